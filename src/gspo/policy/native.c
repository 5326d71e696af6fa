/* The parts of a decoder that are limited by memory and not by arithmetic, each in one pass over its data.

   Compiled once per number type (REAL is float or double) by native.py. All arrays are row-major; a "stride" is the
   distance between rows in elements. Loops over rows are shared by the threads of the caller's OpenMP runtime. Sums
   that cross rows are kept per thread (the `partial` arrays) and added by the caller, so that the result does not
   depend on timing. */

#include "attention.h"
#include "experts.h"
#include "gated.h"
#include "projection.h"
#include "update.h"

#include <string.h>

/* y = weight * x / sqrt(mean(x^2) + eps) over rows of `size`; `inverse` keeps 1 / sqrt(...) unless it is NULL. */
void rms_norm(const REAL *x, const REAL *weight, REAL eps, int64_t rows, int64_t size, REAL *y, REAL *inverse) {
#pragma omp parallel for schedule(static) if (rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++) {
        const REAL *from = x + i * size;
        REAL *to = y + i * size;
        const REAL r = inverse_norm(from, size, eps);
        if (inverse) inverse[i] = r;
#pragma omp simd
        for (int64_t j = 0; j < size; j++) to[j] = weight[j] * (from[j] * r);
    }
}

/* grad_x = r (g w - x r^2 mean(g w x)) + skip unless that is NULL, and partial += g x r for the weight. */
static inline void norm_gradient(
    const REAL *g, const REAL *x, const REAL *weight, REAL r, int64_t size, const REAL *skip, REAL *grad_x,
    REAL *partial) {
    REAL total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < size; j++) total += g[j] * weight[j] * x[j];
    const REAL share = total * r * r / (REAL)size;
#pragma omp simd
    for (int64_t j = 0; j < size; j++) {
        partial[j] += g[j] * (x[j] * r);
        grad_x[j] = r * (g[j] * weight[j] - x[j] * share) + (skip ? skip[j] : (REAL)0);
    }
}

void rms_norm_backward(
    const REAL *grad, const REAL *x, const REAL *weight, const REAL *inverse, const REAL *skip,
    int64_t rows, int64_t size, REAL *grad_x, REAL *partial) {
#pragma omp parallel for schedule(static) if (rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++)
        norm_gradient(
            grad + i * size, x + i * size, weight, inverse[i], size, skip ? skip + i * size : NULL,
            grad_x + i * size, partial + omp_get_thread_num() * size);
}

/* x, y: rows of `heads` heads of `size`, any stride apart, y may be x; cosine, sine: rows of `size`. weight NULL: rotation
   only. */
void norm_rotate(
    const REAL *x, int64_t stride, const REAL *weight, REAL eps, const REAL *cosine, const REAL *sine, int64_t rows,
    int64_t heads, int64_t size, REAL *y, int64_t out_stride, REAL *inverse) {
#pragma omp parallel for schedule(static) if (rows * heads * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = i * heads + h;
            const REAL r = norm_rotate_head(
                x + i * stride + h * size, weight, eps, cosine + i * size, sine + i * size, size,
                y + i * out_stride + h * size);
            if (weight) inverse[at] = r;
        }
}

/* grad, x and grad_x with strides; grad_x may be grad; x is read only if there is a weight. */
void norm_rotate_backward(
    const REAL *grad, int64_t stride, const REAL *x, int64_t x_stride, const REAL *weight, const REAL *inverse, const REAL *cosine,
    const REAL *sine, int64_t rows, int64_t heads, int64_t size, REAL *grad_x, int64_t out_stride, REAL *partial) {
    const int64_t half = size / 2;
#pragma omp parallel if (rows * heads * size > PARALLEL_FROM)
    {
        REAL *turned = malloc(sizeof(REAL) * (size_t)size);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            const REAL *c = cosine + i * size, *s = sine + i * size;
            for (int64_t h = 0; h < heads; h++) {
                const int64_t at = i * heads + h;
                const REAL *g = grad + i * stride + h * size;
                REAL *gradient = grad_x + i * out_stride + h * size;
                REAL *to = weight ? turned : gradient;
#pragma omp simd
                for (int64_t d = 0; d < half; d++) {
                    const REAL first = g[d], second = g[d + half];
                    to[d] = first * c[d] + second * s[d + half];
                    to[d + half] = second * c[d + half] - first * s[d];
                }
                if (weight)
                    norm_gradient(
                        turned, x + i * x_stride + h * size, weight, inverse[at], size, NULL, gradient,
                        partial + omp_get_thread_num() * size);
            }
        }
        free(turned);
    }
}

/* What head sizes must be a multiple of for `attend`. */
int64_t block_lanes(void) { return BLOCK_LANES; }

/* Whether `multiply` runs on tile registers. */
int64_t has_tiles(void) { return HAS_TILES; }
