/* The optimizer's passes over memory: the gradient's norm, then clipping and AdamW together. */

#ifndef GSPO_UPDATE_H
#define GSPO_UPDATE_H

#include "real.h"

#define STRETCH_SIZE 16384 /* numbers that one partial sum covers: the same for any number of threads */

/* parts[k] = sum of squares of stretch k. */
void squares(const REAL *x, int64_t count, double *parts) {
    const int64_t stretches = (count + STRETCH_SIZE - 1) / STRETCH_SIZE;
#pragma omp parallel for schedule(static) if (stretches > 1)
    for (int64_t k = 0; k < stretches; k++) {
        const int64_t last = (k + 1) * STRETCH_SIZE < count ? (k + 1) * STRETCH_SIZE : count;
        double total = 0;
        for (int64_t from = k * STRETCH_SIZE; from < last; from += 1024) {
            const int64_t to = from + 1024 < last ? from + 1024 : last;
            REAL sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = from; j < to; j++) sum += x[j] * x[j];
            total += (double)sum;
        }
        parts[k] = total;
    }
}

/* One step of AdamW with the gradient clip * g: p *= 1 - decay; m and v are running means of clip g and its square;
   p -= step_size * m / (sqrt(v) / root_correction + eps). */
void adamw(
    REAL *p, const REAL *g, REAL *m, REAL *v, int64_t count, REAL clip, REAL decay, REAL beta1, REAL beta2,
    REAL step_size, REAL root_correction, REAL eps) {
#pragma omp parallel for simd schedule(static) if (count > PARALLEL_FROM)
    for (int64_t j = 0; j < count; j++) {
        const REAL grad = clip * g[j];
        const REAL mean = m[j] + ((REAL)1 - beta1) * (grad - m[j]);
        const REAL square = beta2 * v[j] + ((REAL)1 - beta2) * grad * grad;
        m[j] = mean;
        v[j] = square;
        p[j] = p[j] * ((REAL)1 - decay) - step_size * mean / (square_root(square) / root_correction + eps);
    }
}
#endif
