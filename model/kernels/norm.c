/* RMSNorm of rows [rows, width], width a multiple of LANES: unit = x * scale, out = unit * weight
 * with scale = 1 / sqrt(mean x^2 + eps), one a row. */

#include "vectors.h"

#define GROUP 64 /* rows summed in fp32 before they are added in float64 */

void norm_forward(int64_t threads, int64_t rows, int64_t width, float eps, const float *x,
                  const float *weight, float *out, float *scales) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * width, scale = scales[r] = inverse_rms(width, eps, row);
        for (int64_t d = 0; d < width; d += LANES)
            store(out + r * width + d, load(row + d) * scale * load(weight + d));
    }
}

/* by_unit = grad * weight;  grad_x = (by_unit - unit * mean(by_unit * unit)) * scale;
 * adds grad * unit into by_weight. */
static void norm_row_backward(int64_t width, float scale, const float *grad, const float *x,
                              const float *weight, float *grad_x, float *by_weight) {
    vec sum = {0};
    for (int64_t d = 0; d < width; d += LANES) {
        vec by_weight_here = load(grad + d) * (load(x + d) * scale);
        sum += by_weight_here * load(weight + d);
        store(by_weight + d, load(by_weight + d) + by_weight_here);
    }
    float projection = total(sum) / (float)width;
    for (int64_t d = 0; d < width; d += LANES) {
        vec by_unit = load(grad + d) * load(weight + d);
        store(grad_x + d, (by_unit - load(x + d) * scale * projection) * scale);
    }
}

/* grad_weight is summed by each thread, and thread after thread. */
void norm_backward(int64_t threads, int64_t rows, int64_t width, const float *grad, const float *x,
                   const float *weight, const float *scales, float *grad_x,
                   float *grad_weight) {
    double *parts = room(threads * width * sizeof(double));
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        float sum[width];
        double *own = parts + thread * width;
        int64_t begin, end;
        share(rows, 1, thread, threads, &begin, &end);
        for (int64_t d = 0; d < width; d++) own[d] = 0;
        for (int64_t group = begin; group < end; group += GROUP) {
            memset(sum, 0, sizeof sum);
            for (int64_t r = group; r < end && r < group + GROUP; r++)
                norm_row_backward(width, scales[r], grad + r * width, x + r * width, weight,
                                  grad_x + r * width, sum);
            for (int64_t d = 0; d < width; d++) own[d] += sum[d];
        }
    }
    for (int64_t d = 0; d < width; d++) {
        double sum = 0;
        for (int64_t thread = 0; thread < threads; thread++) sum += parts[thread * width + d];
        grad_weight[d] = (float)sum;
    }
    free(parts);
}
