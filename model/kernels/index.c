/* The lightning indexer's choice: of the entries g that query t sees, the `topk` with the largest
 *     score(t, g) = sum_h weight_th * relu(q_th . key_g),
 * of equal ones those with the lower position; and blocks of entries by their largest scores. */

#include <limits.h>

#include "vectors.h"

#define HEADS 8 /* in flight in `scores_of` */

typedef struct {
    int64_t heads, dim, topk, size, blocks; /* size: entries of a block */
} Sizes;

/* sum_h of `heads` heads for 16 keys, panel [dim][16]. */
INLINE vec scores_of_heads(int64_t dim, const float *q, const float *weights, const float *panel,
                           vec sum, const int heads) {
    vec products[HEADS] = {0};
    for (int64_t d = 0; d < dim; d++) {
        vec key = load(panel + d * LANES);
        for (int h = 0; h < heads; h++) products[h] += q[h * dim + d] * key;
    }
    for (int h = 0; h < heads; h++) sum += weights[h] * larger(products[h], splat(0));
    return sum;
}

static vec scores_of(Sizes s, const float *q, const float *weights, const float *panel) {
    vec sum = {0};
    int64_t h = 0;
    for (; h + HEADS <= s.heads; h += HEADS)
        sum = scores_of_heads(s.dim, q + h * s.dim, weights + h, panel, sum, HEADS);
    for (; h < s.heads; h++)
        sum = scores_of_heads(s.dim, q + h * s.dim, weights + h, panel, sum, 1);
    return sum;
}

/* Whole numbers that order like the scores; -0 and 0 are one. */
INLINE ivec ordered(vec scores) {
    ivec bits = (ivec)(scores + 0.0f);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

/* panels [ceil(n / 16)][dim][16] of n keys; what lies behind the last is never looked at. */
static void pack(int64_t dim, int64_t n, const float *keys, const int32_t *which, float *panels) {
    for (int64_t g = 0; g < n; g++) {
        const float *key = keys + (which ? which[g] : g) * dim;
        float *to = panels + g / LANES * dim * LANES + g % LANES;
        for (int64_t d = 0; d < dim; d++) to[d * LANES] = key[d];
    }
}

/* The k-th largest of n numbers, n > k > 0: the largest v that at least k of them reach. */
static int32_t kth_largest(const int32_t *numbers, int64_t n, int64_t k) {
    int64_t low = INT_MAX, high = INT_MIN;
    for (int64_t i = 0; i < n; i++) {
        if (numbers[i] < low) low = numbers[i];
        if (numbers[i] > high) high = numbers[i];
    }
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        int32_t bound = (int32_t)middle, reached = 0;
        for (int64_t i = 0; i < n; i++) reached += numbers[i] >= bound;
        if (reached >= k)
            low = middle;
        else
            high = middle - 1;
    }
    return (int32_t)low;
}

/* The places of the k largest of n numbers, ascending; of equal ones the first. Returns how many. */
static int64_t largest(const int32_t *numbers, int64_t n, int64_t k, int32_t *places) {
    int64_t found = 0, equal = k;
    int32_t bound = INT_MIN;
    if (n > k) {
        bound = kth_largest(numbers, n, k);
        for (int64_t i = 0; i < n; i++) equal -= numbers[i] > bound;
    }
    for (int64_t i = 0; i < n; i++)
        if (numbers[i] > bound || (numbers[i] == bound && equal-- > 0)) places[found++] = (int32_t)i;
    return found;
}

/* Of n scores from a document's first entry on: the first entries [blocks] of the blocks with the
 * largest scores, the newest entry's always among them; -1 behind them. */
static void keep_blocks(Sizes s, int64_t low, int64_t n, const int32_t *scores, int32_t *best,
                        int32_t *places, int32_t *kept) {
    int64_t count = (n + s.size - 1) / s.size;
    for (int64_t b = 0; b < count; b++) {
        best[b] = INT_MIN;
        for (int64_t g = b * s.size; g < n && g < (b + 1) * s.size; g++)
            if (scores[g] > best[b]) best[b] = scores[g];
    }
    if (count) best[count - 1] = INT_MAX;
    int64_t found = largest(best, count, s.blocks, places);
    for (int64_t b = 0; b < s.blocks; b++)
        kept[b] = b < found ? (int32_t)(low + places[b] * s.size) : -1;
}

/* One thread's memory for one query. */
typedef struct {
    float *panels;    /* [most][dim], of a pool's keys */
    int32_t *entries; /* [most], of a pool, or the best of blocks */
    int32_t *scores;  /* [most], ordered */
    int32_t *places;  /* [most], among them */
} Scratch;

static Scratch scratch_of(int64_t most, int64_t dim, int pooled) {
    return (Scratch){
        .panels = pooled ? room(most * dim * sizeof(float)) : NULL,
        .entries = room(most * sizeof(int32_t)),
        .scores = room((most + 2 * LANES) * sizeof(int32_t)),
        .places = room(most * sizeof(int32_t)),
    };
}

static void drop(Scratch own) {
    free(own.panels), free(own.entries), free(own.scores), free(own.places);
}

/* The pool's entries before `high`, ascending, to own.entries. Returns how many. */
static int64_t see_pool(Sizes s, const int32_t *pool, int64_t high, Scratch own) {
    int64_t n = 0;
    for (int64_t b = 0; b < s.blocks && pool[b] >= 0; b++)
        for (int64_t g = pool[b]; g < pool[b] + s.size && g < high; g++)
            own.entries[n++] = (int32_t)g;
    return n;
}

/* Ordered scores of the keys [first, end) of `panels`, to own.scores; first is that of a panel. */
static void score(Sizes s, const float *q, const float *weights, const float *panels, int64_t first,
                  int64_t end, Scratch own) {
    for (int64_t g = first; g < end; g += LANES) {
        ivec found = ordered(scores_of(s, q, weights, panels + g * s.dim));
        memcpy(own.scores + g - first, &found, sizeof found);
    }
}

/* q [count, heads, dim], weights [count, heads], keys [entries, dim]. A query sees entries
 * [low, high) [count], of them only those in the blocks of `pool` [count, blocks] (first entries,
 * -1 behind the last) if there is one. chosen [count, topk]: ascending, -1 behind the last. kept
 * [count, blocks], or null: the pool of each query for later choices. */
void choose_entries(int64_t threads, int64_t count, int64_t heads, int64_t dim, int64_t entries,
                    int64_t topk, int64_t size, int64_t blocks, const float *q,
                    const float *weights, const float *keys, const int64_t *low,
                    const int64_t *high, const int32_t *pool, int64_t *chosen, int32_t *kept) {
    Sizes s = {heads, dim, topk, size, blocks};
    int64_t most = up(pool ? size * blocks : entries, LANES);
    float *panels = pool ? NULL : room(most * dim * sizeof(float));
    if (panels) pack(dim, entries, keys, NULL, panels);
#pragma omp parallel num_threads(threads)
    {
        Scratch own = scratch_of(most, dim, pool != NULL);
#pragma omp for schedule(dynamic, 16)
        for (int64_t t = 0; t < count; t++) {
            const float *query = q + t * heads * dim, *weight = weights + t * heads;
            int64_t n, before = 0; /* the first one's place in its panel */
            if (pool) {
                n = see_pool(s, pool + t * blocks, high[t], own);
                pack(dim, n, keys, own.entries, own.panels);
                score(s, query, weight, own.panels, 0, n, own);
            } else {
                n = high[t] - low[t], before = low[t] % LANES;
                score(s, query, weight, panels, low[t] - before, high[t], own);
            }
            const int32_t *scores = own.scores + before;
            int64_t found = largest(scores, n, topk, own.places);
            for (int64_t k = 0; k < topk; k++) {
                int64_t at = k < found ? own.places[k] : -1;
                chosen[t * topk + k] = at < 0 ? -1 : pool ? own.entries[at] : low[t] + at;
            }
            if (kept)
                keep_blocks(s, low[t], n, scores, own.entries, own.places, kept + t * blocks);
        }
        drop(own);
    }
    free(panels);
}
