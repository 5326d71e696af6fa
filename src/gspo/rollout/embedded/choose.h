/* One token per row from its logits, in two passes over them. sampling.py has the same in torch and says what is meant. */

#ifndef GSPO_CHOOSE_H
#define GSPO_CHOOSE_H

#include "real.h"

#define BLOCK 512 /* weights summed at once on the way to the inverse of the distribution function */

INLINE REAL weight_of(REAL x, REAL top) { return x - top < LOWEST ? (REAL)0 : exponential(x - top); }

static int64_t largest(const REAL *x, int64_t size) {
    REAL top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < size; j++) top = x[j] > top ? x[j] : top;
    for (int64_t j = 0; j < size; j++)
        if (x[j] == top) return j;
    return 0; /* nothing but nan */
}

static double block_sum(const REAL *x, int64_t size, REAL top) {
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < size; j++) total += (double)weight_of(x[j], top);
    return total;
}

/* First index whose cumulative weight exceeds target; rounding never leads to one of weight 0. */
static int64_t place_in_block(const REAL *x, int64_t size, REAL top, double target) {
    int64_t last = 0;
    double total = 0;
    for (int64_t j = 0; j < size; j++) {
        const double weight = (double)weight_of(x[j], top);
        if (!(weight > 0)) continue;
        total += weight;
        last = j;
        if (total > target) break;
    }
    return last;
}

static int64_t invert(const REAL *x, int64_t size, REAL top, const double *sums, double target) {
    int64_t chosen = 0;
    for (int64_t block = 0; block * BLOCK < size; block++) {
        if (!(sums[block] > 0)) continue;
        chosen = block;
        if (sums[block] > target) break;
        target -= sums[block];
    }
    const int64_t start = chosen * BLOCK, left = size - start;
    return start + place_in_block(x + start, left < BLOCK ? left : BLOCK, top, target);
}

/* logits (rows, size), overwritten if the temperature is not 1; uniform (rows) in [0, 1), NULL: takes the largest. */
void choose(
    REAL *logits, int64_t rows, int64_t size, double temperature, const double *uniform, int64_t *tokens,
    float *logprobs) {
    const int64_t blocks = (size + BLOCK - 1) / BLOCK;
#pragma omp parallel if (rows * size > PARALLEL_FROM)
    {
        double *sums = malloc(sizeof(double) * (size_t)blocks);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            REAL *x = logits + i * size;
            if (temperature != 1)
                for (int64_t j = 0; j < size; j++) x[j] /= (REAL)temperature;
            tokens[i] = largest(x, size);
            const REAL top = x[tokens[i]];
            double total = 0;
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t start = block * BLOCK, left = size - start;
                sums[block] = block_sum(x + start, left < BLOCK ? left : BLOCK, top);
                total += sums[block];
            }
            if (uniform) tokens[i] = invert(x, size, top, sums, uniform[i] * total);
            logprobs[i] = (float)((double)(x[tokens[i]] - top) - log(total));
        }
        free(sums);
    }
}
#endif
