/* SwiGLU with a clamp, and the weight of the token slot: of gate g and up u, [n][inner] each,
 *     hidden = w * act,   act = silu(min(g, limit)) * clamp(u, -limit, limit). */

#include "vectors.h"

typedef struct {
    vec gate, up, sigmoid; /* after the clamps */
} Parts;

INLINE Parts parts_of(const float *gate, const float *up, float limit) {
    vec top = splat(limit), g = smaller(load(gate), top);
    vec u = larger(smaller(load(up), top), -top);
    return (Parts){g, u, 1 / (1 + exponential(-g))};
}

/* both [n, 2 * inner]: gates, then ups. weight [n], or null for 1. hidden [n, inner]. */
void swiglu_forward(int64_t threads, int64_t n, int64_t inner, float limit, const float *both,
                    const float *weight, float *hidden) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < n; row++) {
        const float *gate = both + row * 2 * inner, *up = gate + inner;
        float w = weight ? weight[row] : 1;
        for (int64_t i = 0; i < inner; i += LANES) {
            Parts p = parts_of(gate + i, up + i, limit);
            store(hidden + row * inner + i, p.gate * p.sigmoid * p.up * w);
        }
    }
}

/* From by_hidden [n, inner]: by_both [n, 2 * inner], and by_weight [n] where there are weights;
 * hidden [n, inner] once more. A clamped value passes no gradient; at the limit it does. */
void swiglu_backward(int64_t threads, int64_t n, int64_t inner, float limit, const float *both,
                     const float *weight, const float *by_hidden, float *by_both, float *hidden,
                     float *by_weight) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < n; row++) {
        const float *gate = both + row * 2 * inner, *up = gate + inner;
        float *by_gate = by_both + row * 2 * inner, *by_up = by_gate + inner;
        float w = weight ? weight[row] : 1;
        vec sum = {0}, top = splat(limit);
        for (int64_t i = 0; i < inner; i += LANES) {
            Parts p = parts_of(gate + i, up + i, limit);
            vec silu = p.gate * p.sigmoid, act = silu * p.up, grad = load(by_hidden + row * inner + i);
            vec slope = p.sigmoid * (1 + p.gate * (1 - p.sigmoid));
            vec own_up = load(up + i);
            sum += grad * act;
            grad *= w;
            store(hidden + row * inner + i, act * w);
            store(by_gate + i, choose(load(gate + i) > top, splat(0), grad * p.up * slope));
            store(by_up + i, choose((own_up > top) | (own_up < -top), splat(0), grad * silu));
        }
        if (by_weight) by_weight[row] = total(sum);
    }
}
