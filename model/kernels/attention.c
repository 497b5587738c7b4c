/* Attention of single queries over window keys, selected entries and a sink, in one softmax.
 *
 * For query t of H heads, with the key rows K_j [dim] that it looks at (they are the values too):
 *     s_jh = scale * q_h . K_j,   p_jh = exp(s_jh - log_sum_h),   out_h = sum_j p_jh K_j,
 *     log_sum_h = log(exp(sink_h) + sum_j exp(s_jh)).
 * Nothing larger than one query's scores exists. Scores lie as [keys][lanes]: one lane a head, so
 * that the softmax runs along vectors; `lanes` is H, rounded up to whole vectors. */

#include "vectors.h"

#define KEYS 8 /* in flight in `products` */

typedef struct {
    int64_t heads, lanes, dim, window, chosen;
    float scale;
} Shape;

/* What the queries of a call look at. near: the row of position p is p + window - 1. start [T], by
 * position: the first one a query may look at. selected [T, chosen]: rows of entries, -1 for none. */
typedef struct {
    const float *near, *entries, *sink;
    const int64_t *start, *selected;
} Keys;

/* One thread's memory for one query. */
typedef struct {
    const float **rows; /* [keys], filled up to a multiple of KEYS with the first */
    float **grads;      /* [keys], where the gradient of each row is summed up */
    float *turned;      /* [dim][lanes], 0 where there is no head; or of twice the heads */
    float *weights;     /* [keys][lanes] */
    float *by_weights;  /* [keys][lanes] */
    float *products;    /* [keys][lanes] of twice the heads, and a vector behind them */
} Scratch;

static Shape shape_of(int64_t heads, int64_t dim, int64_t window, int64_t chosen) {
    return (Shape){heads, up(heads, LANES), dim, window, chosen, 1 / sqrtf((float)dim)};
}

/* Queries beside their outputs' gradients: all of their products with a key at once. */
static Shape doubled(Shape s) {
    s.heads *= 2;
    s.lanes = up(s.heads, LANES);
    return s;
}

static Scratch scratch_of(Shape s) {
    int64_t keys = up(s.window + s.chosen, KEYS), most = doubled(s).lanes;
    Scratch own = {
        .rows = room(keys * sizeof(float *)),
        .grads = room(keys * sizeof(float *)),
        .turned = room(s.dim * most * sizeof(float)),
        .weights = room(keys * s.lanes * sizeof(float)),
        .by_weights = room(keys * s.lanes * sizeof(float)),
        .products = room((keys * most + LANES) * sizeof(float)),
    };
    memset(own.turned, 0, s.dim * most * sizeof(float));
    return own;
}

static void drop(Scratch own) {
    free(own.rows), free(own.grads), free(own.turned);
    free(own.weights), free(own.by_weights), free(own.products);
}

/* The rows that query t sees, window keys first. Returns how many, and how many of these. */
static int64_t see(Shape s, Keys keys, int64_t t, const float **rows, int64_t *window_keys) {
    int64_t first = t - s.window + 1, n = 0;
    if (keys.start[t] > first) first = keys.start[t];
    for (int64_t p = first; p <= t; p++) rows[n++] = keys.near + (p + s.window - 1) * s.dim;
    *window_keys = n;
    for (int64_t k = 0; k < s.chosen; k++) {
        int64_t entry = keys.selected[t * s.chosen + k];
        if (entry >= 0) rows[n++] = keys.entries + entry * s.dim;
    }
    for (int64_t fill = n; fill % KEYS; fill++) rows[fill] = rows[0];
    return n;
}

/* x [heads][dim] -> turned [dim][lanes], times `factor`. */
static void turn(int64_t heads, int64_t dim, int64_t lanes, const float *x, float factor,
                 float *turned) {
    for (int64_t d = 0; d < dim; d++)
        for (int64_t h = 0; h < heads; h++) turned[d * lanes + h] = factor * x[h * dim + d];
}

/* out [n][lanes] = rows . turned: n products with every head's vector. */
static void products(Shape s, int64_t n, const float *const *rows, const float *turned,
                     float *out) {
    for (int64_t h = 0; h < s.lanes; h += LANES)
        for (int64_t j = 0; j < n; j += KEYS) {
            vec sum[KEYS] = {0};
            const float *const *here = rows + j;
            for (int64_t d = 0; d < s.dim; d++) {
                vec x = load(turned + d * s.lanes + h);
                for (int i = 0; i < KEYS; i++) sum[i] += here[i][d] * x;
            }
            for (int i = 0; i < KEYS; i++) store(out + (j + i) * s.lanes + h, sum[i]);
        }
}

/* out [heads h..][vectors from d] = sum_j weights[j][head] * rows[j]. */
INLINE void mix_block(Shape s, int64_t n, const float *const *rows, const float *weights, int64_t h,
                      int64_t d, float *out, const int heads, const int vectors) {
    vec sum[4][4] = {0};
    for (int64_t j = 0; j < n; j++) {
        const float *weight = weights + j * s.lanes + h;
        for (int v = 0; v < vectors; v++) {
            vec x = load(rows[j] + d + v * LANES);
            for (int i = 0; i < heads; i++) sum[i][v] += weight[i] * x;
        }
    }
    for (int i = 0; i < heads; i++)
        for (int v = 0; v < vectors; v++) store(out + (h + i) * s.dim + d + v * LANES, sum[i][v]);
}

/* out [heads][dim] = weights^T rows. */
static void mix(Shape s, int64_t n, const float *const *rows, const float *weights, float *out) {
    int64_t d = 0, h;
    for (; d + 4 * LANES <= s.dim; d += 4 * LANES) {
        for (h = 0; h + 4 <= s.heads; h += 4) mix_block(s, n, rows, weights, h, d, out, 4, 4);
        for (; h < s.heads; h++) mix_block(s, n, rows, weights, h, d, out, 1, 4);
    }
    for (; d < s.dim; d += LANES) {
        for (h = 0; h + 4 <= s.heads; h += 4) mix_block(s, n, rows, weights, h, d, out, 4, 1);
        for (; h < s.heads; h++) mix_block(s, n, rows, weights, h, d, out, 1, 1);
    }
}

/* grads[j] += sum_h a[j][h] x_h + b[j][h] y_h for `keys` keys and `vectors` vectors from d. */
INLINE void spread_block(Shape s, float *const *grads, const float *a, const float *x,
                         const float *b, const float *y, int64_t d, const int keys,
                         const int vectors) {
    vec sum[2][4] = {0};
    for (int64_t h = 0; h < s.heads; h++)
        for (int v = 0; v < vectors; v++) {
            int64_t at = h * s.dim + d + v * LANES;
            vec one = load(x + at), other = load(y + at);
            for (int i = 0; i < keys; i++)
                sum[i][v] += a[i * s.lanes + h] * one + b[i * s.lanes + h] * other;
        }
    for (int i = 0; i < keys; i++)
        for (int v = 0; v < vectors; v++) {
            float *at = grads[i] + d + v * LANES;
            store(at, load(at) + sum[i][v]);
        }
}

static void spread(Shape s, int64_t n, float *const *grads, const float *a, const float *x,
                   const float *b, const float *y) {
    for (int64_t j = 0; j < n;) {
        int64_t d = 0, at = j * s.lanes, keys = j + 1 < n ? 2 : 1;
        for (; d + 4 * LANES <= s.dim; d += 4 * LANES)
            if (keys == 2)
                spread_block(s, grads + j, a + at, x, b + at, y, d, 2, 4);
            else
                spread_block(s, grads + j, a + at, x, b + at, y, d, 1, 4);
        for (; d < s.dim; d += LANES)
            for (int64_t i = 0; i < keys; i++)
                spread_block(s, grads + j + i, a + at + i * s.lanes, x, b + at + i * s.lanes, y, d,
                             1, 1);
        j += keys;
    }
}

/* weights = exp(scores - log_sum), in place. */
static void exponentiate(Shape s, int64_t n, float *weights, const float *log_sum) {
    for (int64_t h = 0; h < s.lanes; h += LANES) {
        vec shift = load(log_sum + h);
        for (int64_t j = 0; j < n; j++) {
            float *at = weights + j * s.lanes + h;
            store(at, exponential(load(at) - shift));
        }
    }
}

/* Scores to probabilities, in place; log_sum [lanes] is made, sink [lanes] only weighs in it. */
static void normalise(Shape s, int64_t n, float *weights, const float *sink, float *log_sum) {
    for (int64_t h = 0; h < s.lanes; h += LANES) {
        vec own = load(sink + h), shift = own, sum;
        for (int64_t j = 0; j < n; j++) shift = larger(shift, load(weights + j * s.lanes + h));
        sum = exponential(own - shift);
        for (int64_t j = 0; j < n; j++) {
            float *at = weights + j * s.lanes + h;
            vec weight = exponential(load(at) - shift);
            sum += weight;
            store(at, weight);
        }
        vec share = 1 / sum;
        for (int64_t j = 0; j < n; j++) {
            float *at = weights + j * s.lanes + h;
            store(at, load(at) * share);
        }
        store(log_sum + h, shift + logarithm(sum));
    }
}

/* x [heads] with zeros up to whole vectors. */
static void widen(Shape s, const float *x, float *wide) {
    memset(wide, 0, s.lanes * sizeof(float));
    memcpy(wide, x, s.heads * sizeof(float));
}

/* Queries q [count, heads, dim] of positions low, low + 1, ... -> out, alike, and log_sum
 * [count, heads]; an `out` of zeros for a query that sees nothing. */
void attend_forward(int64_t threads, int64_t low, int64_t count, int64_t heads, int64_t dim,
                    int64_t window, int64_t chosen, const float *q, const float *near,
                    const int64_t *start, const float *sink, const float *entries,
                    const int64_t *selected, float *out, float *log_sum) {
    Shape s = shape_of(heads, dim, window, chosen);
    Keys keys = {near, entries, sink, start, selected};
#pragma omp parallel num_threads(threads)
    {
        Scratch own = scratch_of(s);
        float *wide = room(2 * s.lanes * sizeof(float)), *logs = wide + s.lanes;
        widen(s, sink, wide);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            int64_t near_keys, n = see(s, keys, low + i, own.rows, &near_keys);
            turn(heads, dim, s.lanes, q + i * heads * dim, s.scale, own.turned);
            products(s, n, own.rows, own.turned, own.weights);
            normalise(s, n, own.weights, wide, logs);
            mix(s, n, own.rows, own.weights, out + i * heads * dim);
            memcpy(log_sum + i * heads, logs, heads * sizeof(float));
        }
        drop(own), free(wide);
    }
}

/* mass [count, chosen]: the sum over heads of each selected entry's probability, 0 for none. */
void attend_mass(int64_t threads, int64_t low, int64_t count, int64_t heads, int64_t dim,
                 int64_t window, int64_t chosen, const float *q, const float *entries,
                 const int64_t *selected, const float *log_sum, float *mass) {
    Shape s = shape_of(heads, dim, window, chosen);
#pragma omp parallel num_threads(threads)
    {
        Scratch own = scratch_of(s);
        float *logs = room(s.lanes * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            const int64_t *entry = selected + (low + i) * chosen;
            for (int64_t k = 0; k < up(chosen, KEYS); k++)
                own.rows[k] = entries + (k < chosen && entry[k] >= 0 ? entry[k] : 0) * dim;
            turn(heads, dim, s.lanes, q + i * heads * dim, s.scale, own.turned);
            products(s, chosen, own.rows, own.turned, own.weights);
            widen(s, log_sum + i * heads, logs);
            exponentiate(s, chosen, own.weights, logs);
            for (int64_t k = 0; k < chosen; k++) {
                float sum = 0;
                for (int64_t h = 0; h < heads; h++) sum += own.weights[k * s.lanes + h];
                mass[i * chosen + k] = entry[k] >= 0 ? sum : 0;
            }
        }
        drop(own), free(logs);
    }
}

/* What one thread adds to the gradients of keys: window rows from `first` on, all entries. */
typedef struct {
    int64_t first, rows;
    float *near, *entries, *sink;
} Sums;

static Sums sums_of(Shape s, int64_t first, int64_t rows, int64_t entries) {
    size_t near = rows * s.dim, far = entries * s.dim, all = near + far + s.lanes;
    float *at = calloc(all, sizeof(float));
    if (!at) abort();
    return (Sums){first, rows, at, at + near, at + near + far};
}

/* One query's part of everything; by_q [heads, dim] is written. */
static void query_backward(Shape s, Keys keys, int64_t t, const float *q, const float *out,
                           const float *log_sum, const float *wide_sink, const float *grad,
                           float *by_q, Scratch own, Sums into) {
    Shape both = doubled(s);
    float mean[s.lanes], logs[s.lanes];
    int64_t near_keys, n = see(s, keys, t, own.rows, &near_keys);
    for (int64_t j = 0; j < near_keys; j++)
        own.grads[j] = into.near + (own.rows[j] - keys.near) - into.first * s.dim;
    for (int64_t j = near_keys; j < n; j++)
        own.grads[j] = into.entries + (own.rows[j] - keys.entries);
    turn(s.heads, s.dim, both.lanes, q, s.scale, own.turned);
    turn(s.heads, s.dim, both.lanes, grad, 1, own.turned + s.heads);
    products(both, n, own.rows, own.turned, own.products);
    widen(s, log_sum, logs);
    memset(mean, 0, sizeof mean);
    for (int64_t h = 0; h < s.heads; h++) {
        vec sum = {0};
        for (int64_t d = 0; d < s.dim; d += LANES)
            sum += load(grad + h * s.dim + d) * load(out + h * s.dim + d);
        mean[h] = total(sum);
    }
    for (int64_t h = 0; h < s.lanes; h += LANES) {
        vec middle = load(mean + h), shift = load(logs + h);
        vec sink = exponential(load(wide_sink + h) - shift);
        store(into.sink + h, load(into.sink + h) - sink * middle);
        for (int64_t j = 0; j < n; j++) {
            const float *score = own.products + j * both.lanes + h, *by = score + s.heads;
            vec weight = exponential(load(score) - shift);
            store(own.weights + j * s.lanes + h, weight);
            store(own.by_weights + j * s.lanes + h, (load(by) - middle) * weight * s.scale);
        }
    }
    mix(s, n, own.rows, own.by_weights, by_q);
    spread(s, n, own.grads, own.by_weights, q, own.weights, grad);
}

/* to [count, dim], which begins at `first`, += what each thread has of it, in their order. */
static void add_near(Shape s, int64_t threads, int64_t first, int64_t count, const Sums *all,
                     float *to) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = first; row < first + count; row++)
        for (int64_t thread = 0; thread < threads; thread++) {
            int64_t own = row - all[thread].first;
            if (own < 0 || own >= all[thread].rows) continue;
            for (int64_t d = 0; d < s.dim; d++)
                to[row * s.dim + d] += all[thread].near[own * s.dim + d];
        }
}

static void add_entries(Shape s, int64_t threads, int64_t entries, const Sums *all, float *to) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < entries; row++)
        for (int64_t thread = 0; thread < threads; thread++)
            for (int64_t i = row * s.dim; i < (row + 1) * s.dim; i++)
                to[i] += all[thread].entries[i];
}

/* The gradient by_q of q for `grad` [count, heads, dim], that of `out`; adds those of keys to
 * by_near, by_entries [entries, dim] and by_sink [heads].
 *
 * Each of `summing` threads adds up its own stretch of queries in memory of its own, as large as
 * all entries, and their sums are added in their order: the bits depend on their number alone. */
void attend_backward(int64_t threads, int64_t low, int64_t count, int64_t heads, int64_t dim,
                     int64_t window, int64_t chosen, int64_t entry_count, int64_t summing,
                     const float *q, const float *near, const int64_t *start, const float *sink,
                     const float *entries, const int64_t *selected, const float *out,
                     const float *log_sum, const float *grad, float *by_q, float *by_near,
                     float *by_entries, float *by_sink) {
    Shape s = shape_of(heads, dim, window, chosen);
    Keys keys = {near, entries, sink, start, selected};
    if (threads > summing) threads = summing;
    Sums *all = room(threads * sizeof(Sums));
    float *wide = room(s.lanes * sizeof(float));
    widen(s, sink, wide);
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t begin, end;
        share(count, 1, thread, threads, &begin, &end);
        Scratch own = scratch_of(s);
        Sums into = sums_of(s, low + begin, end - begin + window - 1, entry_count);
        for (int64_t i = begin; i < end; i++) {
            int64_t at = i * heads * dim;
            query_backward(s, keys, low + i, q + at, out + at, log_sum + i * heads, wide, grad + at,
                           by_q + at, own, into);
        }
        all[thread] = into;
        drop(own);
    }
    add_near(s, threads, low, count + window - 1, all, by_near);
    add_entries(s, threads, entry_count, all, by_entries);
    for (int64_t thread = 0; thread < threads; thread++) {
        for (int64_t h = 0; h < heads; h++) by_sink[h] += all[thread].sink[h];
        free(all[thread].near);
    }
    free(all), free(wide);
}
