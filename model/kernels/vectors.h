/* Sixteen floats at a time, in the compiler's vector extension: one register with AVX-512, two or
 * four where registers are narrower. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

INLINE vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

INLINE vec splat(float x) { return x - (vec){0}; }

/* where: all bits set in a lane that takes `yes`. */
INLINE vec choose(ivec where, vec yes, vec no) {
    return (vec)(((ivec)yes & where) | ((ivec)no & ~where));
}

/* Of two numbers; a NaN in `a` stays one. */
INLINE vec larger(vec a, vec b) { return choose(b > a, b, a); }
INLINE vec smaller(vec a, vec b) { return choose(b < a, b, a); }

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else /* a GCC before 12 has no other name for it */
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* Sums of a's halves in the even lanes, of b's in the odd ones. */
INLINE vec fold(vec a, vec b) {
    return PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
           PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* The sums of four vectors' lanes. */
INLINE void totals(const vec v[4], float to[4]) {
    vec sums = fold(fold(v[0], v[2]), fold(v[1], v[3])); /* lane i is of vector i % 4 */
    sums += PICK(sums, sums, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    sums += PICK(sums, sums, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    memcpy(to, &sums, 4 * sizeof *to);
}

INLINE float total(vec v) {
    v = fold(v, v);
    v = fold(v, v);
    v = fold(v, v);
    return v[0] + v[8];
}

/* e^x to two units in the last place, e^88 above 88, 0 below -87 (denormal numbers are slow).
 * 2^n * e^r with r in [-ln 2 / 2, ln 2 / 2], e^r by its Taylor series. */
INLINE vec exponential(vec x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    x = smaller(x, splat(88.0f));
    vec n = (x * 1.44269504f + shift) - shift;
    vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f; /* ln 2 in two parts */
    vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return choose(x < splat(-87.0f), splat(0), p * (vec)power);
}

/* ln x to two units in the last place of the larger of its two terms, for normal x > 0.
 * n ln 2 + ln m with m in [2/3, 4/3], ln m = 2 artanh(s) at s = (m - 1) / (m + 1). */
INLINE vec logarithm(vec x) {
    ivec power = ((ivec)x - 0x3f2aaaab) >> 23; /* the bits of 2/3 */
    vec m = (vec)((ivec)x - (power << 23)), n = __builtin_convertvector(power, vec);
    vec s = (m - 1) / (m + 1), square = s * s;
    vec p = splat(2.0f / 11);
    p = p * square + 2.0f / 9;
    p = p * square + 2.0f / 7;
    p = p * square + 2.0f / 5;
    p = p * square + 2.0f / 3;
    p = p * square + 2.0f;
    return n * 0.693147181f + p * s;
}

/* 1 / sqrt(mean x^2 + eps) of `size` numbers. */
INLINE float inverse_rms(int64_t size, float eps, const float *x) {
    vec sum = {0}, other = {0};
    int64_t d = 0;
    for (; d + 2 * LANES <= size; d += 2 * LANES) {
        vec a = load(x + d), b = load(x + d + LANES);
        sum += a * a;
        other += b * b;
    }
    if (d < size) sum += load(x + d) * load(x + d);
    return 1 / sqrtf(total(sum + other) / (float)size + eps);
}

INLINE int64_t up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

/* Memory of whole cache lines. A process that gets none has to end. */
INLINE void *room(int64_t bytes) {
    void *at = aligned_alloc(64, up(bytes + 64, 64));
    if (!at) abort();
    return at;
}

/* The part [*begin, *end) of `count` items that is this thread's, in steps of `step`. */
INLINE void share(int64_t count, int64_t step, int64_t thread, int64_t threads, int64_t *begin,
                  int64_t *end) {
    int64_t steps = (count + step - 1) / step;
    *begin = steps * thread / threads * step;
    *end = steps * (thread + 1) / threads * step;
    if (*end > count) *end = count;
}
