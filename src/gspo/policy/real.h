/* Arithmetic of one number type, and where its matrices are: REAL is float or double, IS_DOUBLE says which. */

#ifndef GSPO_REAL_H
#define GSPO_REAL_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_max_threads(void) { return 1; }
#endif

#if HAS_TILES && !(defined(__AMX_BF16__) && defined(__AVX512BF16__)) /* a compiler that does not know them */
#undef HAS_TILES
#define HAS_TILES 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define PARALLEL_FROM 16384 /* elements below which waking another thread costs more than it saves */

#if IS_DOUBLE
#define LOWEST ((REAL)-708.0) /* e^x is a normal number from here on */
#else
#define LOWEST ((REAL)-87.0)
#endif

/* Where numbers of a factor are: line i (a row of the left factor, a column of the right one) at depth k is
   from[i * line + k * depth], and one of the two distances is 1. */
typedef struct {
    const REAL *from;
    int64_t line, depth;
} Factor;

/* e^x = 2^n e^r with |r| <= ln(2) / 2 and e^r from its Taylor series, exact to the last digit or two. */
static inline REAL exponential(REAL x) {
    const REAL highest = IS_DOUBLE ? (REAL)709.0 : (REAL)88.0;
    const REAL high_ln2 = IS_DOUBLE ? (REAL)6.93147180369123816490e-01 : (REAL)0.693359375;
    const REAL low_ln2 = IS_DOUBLE ? (REAL)1.90821492927058770002e-10 : (REAL)-2.12194440e-4;
    x = x < LOWEST ? LOWEST : x;
    x = x > highest ? highest : x;
    const REAL n = IS_DOUBLE ? (REAL)rint((double)x * 1.4426950408889634) : (REAL)rintf((float)x * 1.44269504f);
    const REAL r = (x - n * high_ln2) - n * low_ln2;
    REAL series = (REAL)(1.0 / 5040.0);
    if (IS_DOUBLE) {
        series = (REAL)(1.0 / 6227020800.0);
        series = series * r + (REAL)(1.0 / 479001600.0);
        series = series * r + (REAL)(1.0 / 39916800.0);
        series = series * r + (REAL)(1.0 / 3628800.0);
        series = series * r + (REAL)(1.0 / 362880.0);
        series = series * r + (REAL)(1.0 / 40320.0);
        series = series * r + (REAL)(1.0 / 5040.0);
    }
    series = series * r + (REAL)(1.0 / 720.0);
    series = series * r + (REAL)(1.0 / 120.0);
    series = series * r + (REAL)(1.0 / 24.0);
    series = series * r + (REAL)(1.0 / 6.0);
    series = series * r + (REAL)0.5;
    series = series * r + (REAL)1.0;
    series = series * r + (REAL)1.0;
#if IS_DOUBLE
    union { int64_t bits; double value; } power = {((int64_t)n + 1023) << 52};
#else
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
#endif
    return series * power.value;
}

/* to = silu(gate) * up, with silu(g) = g / (1 + e^-g). */
static inline void gated(const REAL *gate, const REAL *up, int64_t size, REAL *to) {
#pragma omp simd
    for (int64_t j = 0; j < size; j++) to[j] = gate[j] / ((REAL)1 + exponential(-gate[j])) * up[j];
}

static inline REAL square_root(REAL x) { return IS_DOUBLE ? (REAL)sqrt((double)x) : (REAL)sqrtf((float)x); }

static inline REAL inverse_norm(const REAL *x, int64_t size, REAL eps) {
    REAL total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < size; j++) total += x[j] * x[j];
    return (REAL)1 / square_root(total / (REAL)size + eps);
}

/* One head: optional norm, then the rotation that pairs entry d with entry d + size / 2. */
static inline REAL norm_rotate_head(
    const REAL *x, const REAL *weight, REAL eps, const REAL *cosine, const REAL *sine, int64_t size, REAL *to) {
    const int64_t half = size / 2;
    REAL r = 1;
    if (weight) {
        r = inverse_norm(x, size, eps);
#pragma omp simd
        for (int64_t d = 0; d < half; d++) {
            const REAL first = weight[d] * (x[d] * r), second = weight[d + half] * (x[d + half] * r);
            to[d] = first * cosine[d] - second * sine[d];
            to[d + half] = second * cosine[d + half] + first * sine[d + half];
        }
    } else {
#pragma omp simd
        for (int64_t d = 0; d < half; d++) {
            const REAL first = x[d], second = x[d + half];
            to[d] = first * cosine[d] - second * sine[d];
            to[d + half] = second * cosine[d + half] + first * sine[d + half];
        }
    }
    return r;
}
#endif
