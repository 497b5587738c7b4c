/* Reading and writing the residual streams [T, 4, width] of hyper-connections; widths are multiples
 * of LANES. Every pass goes over the streams once. */

#include "streams.h"

#define M STREAMS

INLINE vec dot4(const float *weights, const vec *v) {
    return (weights[0] * v[0] + weights[1] * v[1]) + (weights[2] * v[2] + weights[3] * v[3]);
}

void read_token(int64_t width, const float *x, const float *pre, float *out) {
    for (int64_t d = 0; d < width; d += LANES) {
        vec streams[M];
        load_streams(streams, x, width, d);
        store(out + d, dot4(pre, streams));
    }
}

/* grad_x[m] = pre[m] grad,    grad_pre[m] = grad . x[m] */
static void read_token_backward(int64_t width, const float *grad, const float *x, const float *pre,
                                float *grad_x, float *grad_pre) {
    vec by_pre[M] = {0};
    for (int64_t d = 0; d < width; d += LANES) {
        vec streams[M], by_out = load(grad + d);
        load_streams(streams, x, width, d);
        for (int64_t m = 0; m < M; m++) {
            by_pre[m] += by_out * streams[m];
            store(grad_x + m * width + d, pre[m] * by_out);
        }
    }
    totals(by_pre, grad_pre);
}

/* out[k] = post[k] y + sum_j comb[j][k] x[j] */
static void expand_token(int64_t width, const float *y, const float *x, const float *post,
                         const float *comb, float *out) {
    float onto[M][M];
    for (int64_t j = 0; j < M; j++)
        for (int64_t k = 0; k < M; k++) onto[k][j] = comb[j * M + k];
    for (int64_t d = 0; d < width; d += LANES) {
        vec streams[M], own = load(y + d);
        load_streams(streams, x, width, d);
        for (int64_t k = 0; k < M; k++)
            store(out + k * width + d, post[k] * own + dot4(onto[k], streams));
    }
}

/* grad_y = sum_k post[k] grad[k],          grad_x[j] = sum_k comb[j][k] grad[k],
 * grad_post[k] = y . grad[k],              grad_comb[j][k] = x[j] . grad[k] */
static void expand_token_backward(int64_t width, const float *grad, const float *y, const float *x,
                                  const float *post, const float *comb, float *grad_y,
                                  float *grad_x, float *grad_post, float *grad_comb) {
    vec by_post[M] = {0}, by_comb[M][M] = {0};
    for (int64_t d = 0; d < width; d += LANES) {
        vec by_out[M], own = load(y + d);
        load_streams(by_out, grad, width, d);
        store(grad_y + d, dot4(post, by_out));
        for (int64_t k = 0; k < M; k++) by_post[k] += own * by_out[k];
        for (int64_t j = 0; j < M; j++) {
            vec stream = load(x + j * width + d);
            store(grad_x + j * width + d, dot4(comb + j * M, by_out));
            for (int64_t k = 0; k < M; k++) by_comb[j][k] += stream * by_out[k];
        }
    }
    totals(by_post, grad_post);
    for (int64_t j = 0; j < M; j++) totals(by_comb[j], grad_comb + j * M);
}

void read_forward(int64_t threads, int64_t tokens, int64_t width, const float *x, const float *pre,
                  float *out) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; t++)
        read_token(width, x + t * M * width, pre + t * M, out + t * width);
}

void read_backward(int64_t threads, int64_t tokens, int64_t width, const float *grad,
                   const float *x, const float *pre, float *grad_x, float *grad_pre) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; t++)
        read_token_backward(width, grad + t * width, x + t * M * width, pre + t * M,
                            grad_x + t * M * width, grad_pre + t * M);
}

void expand_forward(int64_t threads, int64_t tokens, int64_t width, const float *y, const float *x,
                    const float *post, const float *comb, float *out) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; t++)
        expand_token(width, y + t * width, x + t * M * width, post + t * M, comb + t * M * M,
                     out + t * M * width);
}

void expand_backward(int64_t threads, int64_t tokens, int64_t width, const float *grad,
                     const float *y, const float *x, const float *post, const float *comb,
                     float *grad_y, float *grad_x, float *grad_post, float *grad_comb) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; t++)
        expand_token_backward(width, grad + t * M * width, y + t * width, x + t * M * width,
                              post + t * M, comb + t * M * M, grad_y + t * width,
                              grad_x + t * M * width, grad_post + t * M, grad_comb + t * M * M);
}
