/* Rotary positions: the last channels of a vector, adjacent pairs taken as complex numbers, times
 * unit complex numbers. */

#include "vectors.h"

/* Swaps the two numbers of each pair. */
INLINE vec swapped(vec x) {
    return PICK(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}

/* x [count, heads, dim] -> out, alike or the same memory; turn [count, pairs] complex numbers, as
 * (real, imaginary), shared by the heads; their conjugates where `back` is not 0. */
void rotate(int64_t threads, int64_t count, int64_t heads, int64_t dim, int64_t pairs, int64_t back,
            const float *x, const float *turn, float *out) {
    const vec even = {1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0};
    const vec sign = (back ? -1.0f : 1.0f) * (1 - 2 * even); /* -1 for the real part */
    int64_t still = dim - 2 * pairs;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < heads; h++) {
            const float *from = x + (i * heads + h) * dim;
            float *to = out + (i * heads + h) * dim;
            if (to != from) memcpy(to, from, still * sizeof(float));
            for (int64_t c = 0; c < 2 * pairs; c += LANES) {
                vec own = load(turn + i * 2 * pairs + c), other = swapped(own);
                vec real = choose(even > 0, own, other), imaginary = choose(even > 0, other, own);
                vec z = load(from + still + c);
                store(to + still + c, z * real + swapped(z) * imaginary * sign);
            }
        }
}
