/* One token's streams, x [STREAMS, width]: what more than one kernel makes of them. Compiled once, so
 * that all of them make the same bits. */

#pragma once

#include "vectors.h"

#define STREAMS 4

/* out = sum_m pre[m] x[m] */
void read_token(int64_t width, const float *x, const float *pre, float *out);

/* rows[m][d ...] */
INLINE void load_streams(vec to[STREAMS], const float *rows, int64_t width, int64_t d) {
    for (int64_t m = 0; m < STREAMS; m++) to[m] = load(rows + m * width + d);
}
