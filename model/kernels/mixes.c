/* What hyper-connections of four streams make of their projections z [T, 24]:
 *
 *     logits = base + z * scale      base [24]; scale [3], one each for 4 + 4 + 16 of them
 *     pre [T, 4] = sigmoid + eps,    post [T, 4] = 2 sigmoid,    comb [T, 4, 4] = Sinkhorn
 *
 * A vec holds one coefficient of sixteen tokens. Missing tokens of the last sixteen are zeros. */

#include "vectors.h"

#define M 4
#define LOGITS (M * (M + 2))
#define SUMS (LOGITS + 3) /* the gradients of base and scale */

typedef double dvec __attribute__((vector_size(8 * LANES)));

typedef struct {
    int64_t iterations;
    float eps;
} Sinkhorn;

/* Rows of `columns` numbers, one of a token -> a vec of each column. */
INLINE void gather(vec *to, const float *rows, int64_t columns, int64_t tokens) {
    for (int64_t c = 0; c < columns; c++) to[c] = splat(0);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t c = 0; c < columns; c++) to[c][t] = rows[t * columns + c];
}

INLINE void scatter(float *rows, const vec *from, int64_t columns, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t c = 0; c < columns; c++) rows[t * columns + c] = from[c][t];
}

/* Which of the three scales is logit i's. */
INLINE int64_t part(int64_t i) { return i < M ? 0 : i < 2 * M ? 1 : 2; }

INLINE void to_logits(vec *logits, const vec *z, const float *base, const float *scale) {
    for (int64_t i = 0; i < LOGITS; i++) logits[i] = base[i] + z[i] * scale[part(i)];
}

INLINE vec sigmoid(vec x) { return 1 / (1 + exponential(-x)); }

/* sigmoid' = s (1 - s), exact also where s rounds to 1. */
INLINE vec sigmoid_slope(vec x) {
    vec power = exponential(-x), s = 1 / (1 + power);
    return s * (power * s);
}

INLINE vec sum4(vec a, vec b, vec c, vec d) { return (a + b) + (c + d); }

/* Each row of [M, M] logits to its softmax. */
INLINE void softmax_rows(vec soft[M][M], const vec *logits) {
    for (int64_t i = 0; i < M; i++) {
        const vec *row = logits + i * M;
        vec top = larger(larger(row[0], row[1]), larger(row[2], row[3]));
        for (int64_t j = 0; j < M; j++) soft[i][j] = exponential(row[j] - top);
        vec inverse = 1 / sum4(soft[i][0], soft[i][1], soft[i][2], soft[i][3]);
        for (int64_t j = 0; j < M; j++) soft[i][j] *= inverse;
    }
}

/* Divides each column by its sum + eps, the divisor. */
INLINE void divide_columns(vec comb[M][M], float eps, vec divisor[M]) {
    for (int64_t j = 0; j < M; j++) {
        divisor[j] = sum4(comb[0][j], comb[1][j], comb[2][j], comb[3][j]) + eps;
        vec inverse = 1 / divisor[j];
        for (int64_t i = 0; i < M; i++) comb[i][j] *= inverse;
    }
}

INLINE void divide_rows(vec comb[M][M], float eps, vec divisor[M]) {
    for (int64_t i = 0; i < M; i++) {
        divisor[i] = sum4(comb[i][0], comb[i][1], comb[i][2], comb[i][3]) + eps;
        vec inverse = 1 / divisor[i];
        for (int64_t j = 0; j < M; j++) comb[i][j] *= inverse;
    }
}

/* comb = soft + eps, its columns divided, then again its rows and its columns. The divisors of
 * step n go to divisors[n], or where `keep` is 0 all to the first. */
INLINE void balance(vec comb[M][M], vec soft[M][M], Sinkhorn how, vec divisors[][M], int64_t keep) {
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < M; j++) comb[i][j] = soft[i][j] + how.eps;
    divide_columns(comb, how.eps, divisors[0]);
    for (int64_t n = 1; n < how.iterations; n++) {
        divide_rows(comb, how.eps, divisors[keep * (2 * n - 1)]);
        divide_columns(comb, how.eps, divisors[keep * 2 * n]);
    }
}

/* With h = gradient * value, a division by a sum undoes as h <- h - value * sum(h). */
INLINE void undo_columns(vec h[M][M], vec comb[M][M], const vec divisor[M]) {
    for (int64_t j = 0; j < M; j++) {
        vec sum = sum4(h[0][j], h[1][j], h[2][j], h[3][j]);
        for (int64_t i = 0; i < M; i++) h[i][j] -= comb[i][j] * sum;
        for (int64_t i = 0; i < M; i++) comb[i][j] *= divisor[j];
    }
}

INLINE void undo_rows(vec h[M][M], vec comb[M][M], const vec divisor[M]) {
    for (int64_t i = 0; i < M; i++) {
        vec sum = sum4(h[i][0], h[i][1], h[i][2], h[i][3]);
        for (int64_t j = 0; j < M; j++) h[i][j] -= comb[i][j] * sum;
        for (int64_t j = 0; j < M; j++) comb[i][j] *= divisor[i];
    }
}

/* The gradient of 16 logits from that of their comb. */
INLINE void balance_backward(vec *grad, const vec *logits, const vec *grad_comb, Sinkhorn how) {
    vec soft[M][M], comb[M][M], h[M][M], divisors[2 * how.iterations - 1][M];
    softmax_rows(soft, logits);
    balance(comb, soft, how, divisors, 1);
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < M; j++) h[i][j] = grad_comb[i * M + j] * comb[i][j];
    for (int64_t n = how.iterations - 1; n > 0; n--) {
        undo_columns(h, comb, divisors[2 * n]);
        undo_rows(h, comb, divisors[2 * n - 1]);
    }
    undo_columns(h, comb, divisors[0]);
    for (int64_t i = 0; i < M; i++) {
        for (int64_t j = 0; j < M; j++) h[i][j] *= soft[i][j] / (soft[i][j] + how.eps);
        vec sum = sum4(h[i][0], h[i][1], h[i][2], h[i][3]);
        for (int64_t j = 0; j < M; j++) grad[i * M + j] = h[i][j] - soft[i][j] * sum;
    }
}

/* Up to sixteen tokens. */
static void mix(int64_t tokens, Sinkhorn how, const float *z, const float *base, const float *scale,
                float *pre, float *post, float *comb) {
    vec rows[LOGITS], logits[LOGITS], soft[M][M], out[M][M], divisors[1][M];
    gather(rows, z, LOGITS, tokens);
    to_logits(logits, rows, base, scale);
    for (int64_t i = 0; i < M; i++) rows[i] = sigmoid(logits[i]) + how.eps;
    for (int64_t i = M; i < 2 * M; i++) rows[i] = 2 * sigmoid(logits[i]);
    softmax_rows(soft, logits + 2 * M);
    balance(out, soft, how, divisors, 0);
    scatter(pre, rows, M, tokens);
    scatter(post, rows + M, M, tokens);
    scatter(comb, out[0], M * M, tokens);
}

/* Up to sixteen tokens; adds what they give to base and scale into `sums`. */
static void mix_backward(int64_t tokens, Sinkhorn how, const float *z, const float *base,
                         const float *scale, const float *grad_pre, const float *grad_post,
                         const float *grad_comb, float *grad_z, dvec sums[SUMS]) {
    vec rows[LOGITS], logits[LOGITS], grad[LOGITS];
    gather(rows, z, LOGITS, tokens);
    gather(grad, grad_pre, M, tokens);
    gather(grad + M, grad_post, M, tokens);
    gather(grad + 2 * M, grad_comb, M * M, tokens);
    to_logits(logits, rows, base, scale);
    for (int64_t i = 0; i < M; i++) grad[i] *= sigmoid_slope(logits[i]);
    for (int64_t i = M; i < 2 * M; i++) grad[i] *= 2 * sigmoid_slope(logits[i]);
    balance_backward(grad + 2 * M, logits + 2 * M, grad + 2 * M, how);
    for (int64_t i = 0; i < LOGITS; i++) {
        sums[i] += __builtin_convertvector(grad[i], dvec);
        sums[LOGITS + part(i)] += __builtin_convertvector(grad[i] * rows[i], dvec);
        grad[i] *= scale[part(i)];
    }
    scatter(grad_z, grad, LOGITS, tokens);
}

void mixes_forward(int64_t threads, int64_t tokens, int64_t iterations, float eps, const float *z,
                   const float *base, const float *scale, float *pre, float *post, float *comb) {
    Sinkhorn how = {iterations, eps};
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t begin, end;
        share(tokens, LANES, thread, threads, &begin, &end);
        for (int64_t t = begin; t < end; t += LANES) {
            int64_t count = end - t < LANES ? end - t : LANES;
            mix(count, how, z + t * LOGITS, base, scale, pre + t * M, post + t * M,
                comb + t * M * M);
        }
    }
}

/* grad_base [24] and grad_scale [3] are summed in float64, thread after thread. */
void mixes_backward(int64_t threads, int64_t tokens, int64_t iterations, float eps, const float *z,
                    const float *base, const float *scale, const float *grad_pre,
                    const float *grad_post, const float *grad_comb, float *grad_z,
                    float *grad_base, float *grad_scale) {
    Sinkhorn how = {iterations, eps};
    dvec sums[threads][SUMS];
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t begin, end;
        share(tokens, LANES, thread, threads, &begin, &end);
        memset(sums[thread], 0, sizeof sums[thread]);
        for (int64_t t = begin; t < end; t += LANES) {
            int64_t count = end - t < LANES ? end - t : LANES;
            mix_backward(count, how, z + t * LOGITS, base, scale, grad_pre + t * M,
                         grad_post + t * M, grad_comb + t * M * M, grad_z + t * LOGITS,
                         sums[thread]);
        }
    }
    for (int64_t i = 0; i < SUMS; i++) {
        double sum = 0;
        for (int64_t thread = 0; thread < threads; thread++)
            for (int64_t lane = 0; lane < LANES; lane++) sum += sums[thread][i][lane];
        *(i < LOGITS ? grad_base + i : grad_scale + i - LOGITS) = (float)sum;
    }
}
