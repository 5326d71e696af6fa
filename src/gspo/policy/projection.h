/* Log-probs and entropies of rows of logits, and the gradient of the logits, each reading a row once from memory. */

#ifndef GSPO_PROJECTION_H
#define GSPO_PROJECTION_H

#include "real.h"

/* With y = factor * x: logprobs[i] = y[target] - lse, entropies (unless NULL) lse - sum softmax(y) y. */
void logprob_rows(
    const REAL *x, const int64_t *targets, REAL factor, int64_t rows, int64_t size, REAL *logprobs, REAL *lse,
    REAL *entropies) {
#pragma omp parallel for schedule(static) if (rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++) {
        const REAL *row = x + i * size;
        REAL top = -INFINITY, total = 0, weighted = 0;
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < size; j++) {
            const REAL y = row[j] * factor;
            top = y > top ? y : top;
        }
#pragma omp simd reduction(+ : total, weighted)
        for (int64_t j = 0; j < size; j++) {
            const REAL y = row[j] * factor - top, weight = exponential(y);
            total += weight;
            weighted += weight * y;
        }
        const REAL log_total = IS_DOUBLE ? (REAL)log((double)total) : (REAL)logf((float)total);
        lse[i] = top + log_total;
        logprobs[i] = row[targets[i]] * factor - top - log_total;
        if (entropies) entropies[i] = log_total - weighted / total;
    }
}

/* In place: x = gradient of sum_i grad[i] * logprob[i] by x, that is grad[i] * factor * (onehot(target) - softmax). */
void logprob_gradient(
    REAL *x, const int64_t *targets, const REAL *lse, const REAL *grad, REAL factor, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++) {
        REAL *row = x + i * size;
        const REAL scale = grad[i] * factor, shift = lse[i];
#pragma omp simd
        for (int64_t j = 0; j < size; j++) row[j] = -scale * exponential(row[j] * factor - shift);
        row[targets[i]] += scale;
    }
}
#endif
