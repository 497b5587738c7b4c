/* What a sublayer takes from its streams x [T, 4, width], width a multiple of LANES: what it sees,
 * and the projections for its coefficients, of all 4 width numbers of a token,
 *
 *     seen [T, width] = sum_m pre[m] x[m]
 *     z [T, 24] = (fn @ x) * scale,    scale [T] = 1 / sqrt(mean x^2 + eps),    fn [24, 4 width]
 *
 * Groups of tokens share each row of fn that is loaded; a token's result is the same in any. */

#include "streams.h"

#define OUTPUTS 24
#define AT_ONCE 6 /* outputs of four tokens, whose sums fill the registers with theirs */
#define GROUP 4   /* tokens, forward */
#define WIDER 8   /* tokens, backward */

/* `count` tokens of `size` numbers; count is 1 to GROUP and a constant where this is called. */
INLINE void project(int64_t count, int64_t size, float eps, const float *x, const float *fn,
                    float *z, float *scale) {
    for (int64_t t = 0; t < count; t++)
        scale[t] = inverse_rms(size, eps, x + t * size);
    for (int64_t first = 0; first < OUTPUTS; first += AT_ONCE) {
        vec sums[AT_ONCE][GROUP] = {0};
        for (int64_t d = 0; d < size; d += LANES) {
            vec tokens[GROUP];
            for (int64_t t = 0; t < count; t++) tokens[t] = load(x + t * size + d);
            for (int64_t o = 0; o < AT_ONCE; o++) {
                vec weight = load(fn + (first + o) * size + d);
                for (int64_t t = 0; t < count; t++) sums[o][t] += weight * tokens[t];
            }
        }
        for (int64_t o = 0; o < AT_ONCE; o++) {
            float raw[GROUP];
            totals(sums[o], raw);
            for (int64_t t = 0; t < count; t++) z[t * OUTPUTS + first + o] = raw[t] * scale[t];
        }
    }
}

void enter_forward(int64_t threads, int64_t tokens, int64_t width, float eps, const float *x,
                   const float *pre, const float *fn, float *seen, float *z, float *scale) {
    int64_t size = STREAMS * width;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t begin, end;
        share(tokens, GROUP, thread, threads, &begin, &end);
        for (int64_t t = begin; t < end;) {
            const float *rows = x + t * size;
            int64_t count = t + GROUP <= end ? GROUP : 1;
            if (count == GROUP)
                project(GROUP, size, eps, rows, fn, z + t * OUTPUTS, scale + t);
            else
                project(1, size, eps, rows, fn, z + t * OUTPUTS, scale + t);
            for (int64_t last = t + count; t < last; t++)
                read_token(width, x + t * size, pre + t * STREAMS, seen + t * width);
        }
    }
}

/* by_raw[o][t] = grad_z[t][o] * scale[t], and by the length slope[t], whose gradient is slope x. */
INLINE void by_products(int64_t count, int64_t size, const float *grad_z, const float *z,
                        const float *scale, float by_raw[OUTPUTS][WIDER], float slope[WIDER]) {
    for (int64_t t = 0; t < count; t++) {
        float sum = 0;
        for (int64_t o = 0; o < OUTPUTS; o++) {
            sum += grad_z[t * OUTPUTS + o] * z[t * OUTPUTS + o];
            by_raw[o][t] = grad_z[t * OUTPUTS + o] * scale[t];
        }
        slope[t] = sum * scale[t] * scale[t] / -(float)size;
    }
}

/* grad_x[m] = grad_out[m] + slope x[m] + pre[m] grad_seen,    grad_pre[m] = grad_seen . x[m] */
INLINE void token_backward(int64_t width, float slope, const float *grad_out,
                           const float *grad_seen, const float *x, const float *pre, float *grad_x,
                           float *grad_pre) {
    vec by_pre[STREAMS] = {0};
    for (int64_t d = 0; d < width; d += LANES) {
        vec streams[STREAMS], by_seen = load(grad_seen + d);
        load_streams(streams, x, width, d);
        for (int64_t m = 0; m < STREAMS; m++) {
            by_pre[m] += by_seen * streams[m];
            vec given = load(grad_out + m * width + d);
            store(grad_x + m * width + d, given + slope * streams[m] + pre[m] * by_seen);
        }
    }
    totals(by_pre, grad_pre);
}

/* Adds sum_o by_raw[o][t] fn[o] into grad_x[t] and sum_t by_raw[o][t] x[t] into grad_fn[o].
 * `count` tokens, 1 to WIDER, a constant where this is called. */
INLINE void project_backward(int64_t count, int64_t size, float by_raw[OUTPUTS][WIDER],
                             const float *x, const float *fn, float *grad_x, float *grad_fn) {
    for (int64_t d = 0; d < size; d += 2 * LANES) {
        vec tokens[WIDER][2];
        for (int64_t t = 0; t < count; t++)
            for (int64_t i = 0; i < 2; i++) tokens[t][i] = load(grad_x + t * size + d + i * LANES);
        for (int64_t o = 0; o < OUTPUTS; o++) {
            const float *row = fn + o * size + d;
            vec weights[2] = {load(row), load(row + LANES)};
            for (int64_t t = 0; t < count; t++)
                for (int64_t i = 0; i < 2; i++) tokens[t][i] += by_raw[o][t] * weights[i];
        }
        for (int64_t t = 0; t < count; t++)
            for (int64_t i = 0; i < 2; i++) {
                store(grad_x + t * size + d + i * LANES, tokens[t][i]);
                tokens[t][i] = load(x + t * size + d + i * LANES);
            }
        for (int64_t o = 0; o < OUTPUTS; o++) {
            float *row = grad_fn + o * size + d;
            vec by_weights[2] = {0};
            for (int64_t t = 0; t < count; t++)
                for (int64_t i = 0; i < 2; i++) by_weights[i] += by_raw[o][t] * tokens[t][i];
            store(row, load(row) + by_weights[0]);
            store(row + LANES, load(row + LANES) + by_weights[1]);
        }
    }
}

/* grad_out [T, 4, width]: the gradient by whatever else the streams go to, part of grad_x.
 * grad_fn is summed by each thread, and thread after thread. */
void enter_backward(int64_t threads, int64_t tokens, int64_t width, const float *grad_out,
                    const float *grad_seen, const float *grad_z, const float *x, const float *pre,
                    const float *fn, const float *z, const float *scale, float *grad_x,
                    float *grad_pre, float *grad_fn) {
    int64_t size = STREAMS * width, weights = OUTPUTS * size;
    float *parts = room(threads * weights * sizeof(float));
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t begin, end;
        float *own = parts + thread * weights;
        memset(own, 0, weights * sizeof *own);
        share(tokens, WIDER, thread, threads, &begin, &end);
        for (int64_t t = begin; t < end;) {
            float by_raw[OUTPUTS][WIDER], slope[WIDER];
            int64_t count = t + WIDER <= end ? WIDER : 1;
            by_products(count, size, grad_z + t * OUTPUTS, z + t * OUTPUTS, scale + t, by_raw,
                        slope);
            for (int64_t i = 0, at = t; i < count; i++, at++)
                token_backward(width, slope[i], grad_out + at * size, grad_seen + at * width,
                               x + at * size, pre + at * STREAMS, grad_x + at * size,
                               grad_pre + at * STREAMS);
            if (count == WIDER)
                project_backward(WIDER, size, by_raw, x + t * size, fn, grad_x + t * size, own);
            else
                project_backward(1, size, by_raw, x + t * size, fn, grad_x + t * size, own);
            t += count;
        }
    }
#pragma omp parallel for num_threads(threads) schedule(static) if (weights > 1 << 16)
    for (int64_t i = 0; i < weights; i += LANES) {
        vec sum = load(parts + i);
        for (int64_t thread = 1; thread < threads; thread++)
            sum += load(parts + thread * weights + i);
        store(grad_fn + i, sum);
    }
    free(parts);
}
