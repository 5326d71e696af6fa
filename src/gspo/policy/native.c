/* The parts of a decoder that are limited by memory and not by arithmetic, each in one pass over its data.

   Compiled once per number type (REAL is float or double) by native.py. All arrays are row-major; a "stride" is the
   distance between rows in elements. Loops over rows are shared by the threads of the caller's OpenMP runtime. Sums
   that cross rows are kept per thread (the `partial` arrays) and added by the caller, so that the result does not
   depend on timing. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

#define PARALLEL_FROM 16384 /* elements below which waking another thread costs more than it saves */
#define KEYS_AT_ONCE 64

/* e^x = 2^n e^r with |r| <= ln(2) / 2 and e^r from its Taylor series, exact to the last digit or two. */
static inline REAL exponential(REAL x) {
    const int is_double = sizeof(REAL) == 8;
    const REAL lowest = is_double ? (REAL)-708.0 : (REAL)-87.0, highest = is_double ? (REAL)709.0 : (REAL)88.0;
    const REAL high_ln2 = is_double ? (REAL)6.93147180369123816490e-01 : (REAL)0.693359375;
    const REAL low_ln2 = is_double ? (REAL)1.90821492927058770002e-10 : (REAL)-2.12194440e-4;
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    const REAL n = is_double ? (REAL)rint((double)x * 1.4426950408889634) : (REAL)rintf((float)x * 1.44269504f);
    const REAL r = (x - n * high_ln2) - n * low_ln2;
    REAL series;
    if (is_double) {
        series = (REAL)(1.0 / 6227020800.0);
        series = series * r + (REAL)(1.0 / 479001600.0);
        series = series * r + (REAL)(1.0 / 39916800.0);
        series = series * r + (REAL)(1.0 / 3628800.0);
        series = series * r + (REAL)(1.0 / 362880.0);
        series = series * r + (REAL)(1.0 / 40320.0);
        series = series * r + (REAL)(1.0 / 5040.0);
    } else {
        series = (REAL)(1.0 / 5040.0);
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

static inline REAL square_root(REAL x) { return sizeof(REAL) == 8 ? (REAL)sqrt((double)x) : (REAL)sqrtf((float)x); }

static inline REAL inverse_norm(const REAL *x, int64_t size, REAL eps) {
    REAL total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < size; j++) total += x[j] * x[j];
    return (REAL)1 / square_root(total / (REAL)size + eps);
}

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

/* grad_x = r (g w - x r^2 mean(g w x)), and partial[thread] += g x r for the weight. */
static inline void norm_gradient(
    const REAL *g, const REAL *x, const REAL *weight, REAL r, int64_t size, REAL *grad_x, REAL *partial) {
    REAL total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < size; j++) total += g[j] * weight[j] * x[j];
    const REAL share = total * r * r / (REAL)size;
#pragma omp simd
    for (int64_t j = 0; j < size; j++) {
        partial[j] += g[j] * (x[j] * r);
        grad_x[j] = r * (g[j] * weight[j] - x[j] * share);
    }
}

void rms_norm_backward(
    const REAL *grad, const REAL *x, const REAL *weight, const REAL *inverse, int64_t rows, int64_t size,
    REAL *grad_x, REAL *partial) {
#pragma omp parallel for schedule(static) if (rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++)
        norm_gradient(
            grad + i * size, x + i * size, weight, inverse[i], size, grad_x + i * size,
            partial + omp_get_thread_num() * size);
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

/* x, y: rows of `heads` heads of `size`; cosine, sine: rows of `size`. weight NULL: rotation only. */
void norm_rotate(
    const REAL *x, const REAL *weight, REAL eps, const REAL *cosine, const REAL *sine, int64_t rows, int64_t heads,
    int64_t size, REAL *y, REAL *inverse) {
#pragma omp parallel for schedule(static) if (rows * heads * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = i * heads + h;
            const REAL r = norm_rotate_head(
                x + at * size, weight, eps, cosine + i * size, sine + i * size, size, y + at * size);
            if (weight) inverse[at] = r;
        }
}

void norm_rotate_backward(
    const REAL *grad, const REAL *x, const REAL *weight, const REAL *inverse, const REAL *cosine, const REAL *sine,
    int64_t rows, int64_t heads, int64_t size, REAL *grad_x, REAL *partial) {
    const int64_t half = size / 2;
#pragma omp parallel if (rows * heads * size > PARALLEL_FROM)
    {
        REAL *turned = malloc(sizeof(REAL) * (size_t)size);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            const REAL *c = cosine + i * size, *s = sine + i * size;
            for (int64_t h = 0; h < heads; h++) {
                const int64_t at = i * heads + h;
                const REAL *g = grad + at * size;
                REAL *to = weight ? turned : grad_x + at * size;
#pragma omp simd
                for (int64_t d = 0; d < half; d++) {
                    to[d] = g[d] * c[d] + g[d + half] * s[d + half];
                    to[d + half] = g[d + half] * c[d + half] - g[d] * s[d];
                }
                if (weight)
                    norm_gradient(
                        turned, x + at * size, weight, inverse[at], size, grad_x + at * size,
                        partial + omp_get_thread_num() * size);
            }
        }
        free(turned);
    }
}

/* y = silu(gate) * up, with silu(g) = g / (1 + e^-g). */
void swiglu(const REAL *gate, const REAL *up, int64_t stride, int64_t rows, int64_t size, REAL *y) {
#pragma omp parallel for schedule(static) if (rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++) {
        const REAL *g = gate + i * stride, *u = up + i * stride;
        REAL *to = y + i * size;
#pragma omp simd
        for (int64_t j = 0; j < size; j++) to[j] = g[j] / ((REAL)1 + exponential(-g[j])) * u[j];
    }
}

void swiglu_backward(
    const REAL *grad, const REAL *gate, const REAL *up, int64_t stride, int64_t rows, int64_t size,
    REAL *grad_gate, REAL *grad_up) {
#pragma omp parallel for schedule(static) if (rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++) {
        const REAL *g = gate + i * stride, *u = up + i * stride, *d = grad + i * size;
        REAL *to_gate = grad_gate + i * stride, *to_up = grad_up + i * stride;
#pragma omp simd
        for (int64_t j = 0; j < size; j++) {
            const REAL sigmoid = (REAL)1 / ((REAL)1 + exponential(-g[j]));
            const REAL slope = sigmoid * ((REAL)1 + g[j] * ((REAL)1 - sigmoid));
            to_up[j] = d[j] * (g[j] * sigmoid);
            to_gate[j] = d[j] * u[j] * slope;
        }
    }
}

/* out[i] = sum over k of gates[i, k] * y[places[i, k]], rows of `size`; gates NULL: all 1. */
void combine(
    const REAL *y, const int64_t *places, const REAL *gates, int64_t rows, int64_t choices, int64_t size, REAL *out) {
#pragma omp parallel for schedule(static) if (rows * choices * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++) {
        REAL *to = out + i * size;
        for (int64_t k = 0; k < choices; k++) {
            const REAL *from = y + places[i * choices + k] * size;
            const REAL gate = gates ? gates[i * choices + k] : (REAL)1;
            if (k == 0) {
#pragma omp simd
                for (int64_t j = 0; j < size; j++) to[j] = gate * from[j];
            } else {
#pragma omp simd
                for (int64_t j = 0; j < size; j++) to[j] += gate * from[j];
            }
        }
    }
}

/* Its gradients: grad_y[places[i, k]] = gates[i, k] * grad[i] and grad_gates[i, k] = grad[i] . y[places[i, k]]. */
void combine_backward(
    const REAL *grad, const REAL *y, const int64_t *places, const REAL *gates, int64_t rows, int64_t choices,
    int64_t size, REAL *grad_y, REAL *grad_gates) {
#pragma omp parallel for schedule(static) if (rows * choices * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++) {
        const REAL *g = grad + i * size;
        for (int64_t k = 0; k < choices; k++) {
            const int64_t at = i * choices + k;
            const REAL *from = y + places[at] * size;
            REAL *to = grad_y + places[at] * size, dot = 0;
            const REAL gate = gates[at];
#pragma omp simd reduction(+ : dot)
            for (int64_t j = 0; j < size; j++) {
                dot += g[j] * from[j];
                to[j] = gate * g[j];
            }
            grad_gates[at] = dot;
        }
    }
}

/* Attention of one new token over one key head of a slot: `group` queries, keys first..last, in blocks of keys with a
   running maximum, so that scores live in a small buffer whatever the length. */
static void attend_head(
    const REAL *query, int64_t group, int64_t size, const REAL *keys, const REAL *values, int64_t stride,
    int64_t first, int64_t last, REAL scale, REAL *out) {
    REAL scores[KEYS_AT_ONCE];
    for (int64_t h = 0; h < group; h++) {
        const REAL *q = query + h * size;
        REAL *o = out + h * size;
        REAL top = -INFINITY, total = 0;
        for (int64_t d = 0; d < size; d++) o[d] = 0;
        for (int64_t start = first; start <= last; start += KEYS_AT_ONCE) {
            const int64_t count = last + 1 - start < KEYS_AT_ONCE ? last + 1 - start : KEYS_AT_ONCE;
            REAL highest = top;
            for (int64_t t = 0; t < count; t++) {
                const REAL *k = keys + (start + t) * stride;
                REAL dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int64_t d = 0; d < size; d++) dot += q[d] * k[d];
                scores[t] = dot * scale;
                highest = scores[t] > highest ? scores[t] : highest;
            }
            REAL sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t t = 0; t < count; t++) {
                scores[t] = exponential(scores[t] - highest);
                sum += scores[t];
            }
            const REAL keep = start == first ? (REAL)0 : exponential(top - highest);
            if (keep != (REAL)1)
                for (int64_t d = 0; d < size; d++) o[d] *= keep;
            for (int64_t t = 0; t < count; t++) {
                const REAL *v = values + (start + t) * stride, weight = scores[t];
#pragma omp simd
                for (int64_t d = 0; d < size; d++) o[d] += weight * v[d];
            }
            total = total * keep + sum;
            top = highest;
        }
        const REAL factor = (REAL)1 / total;
        for (int64_t d = 0; d < size; d++) o[d] *= factor;
    }
}

/* One decoding step of one layer. projected: rows of [queries | keys | values], not normed, not rotated. Row i's new key
   and value are written to slot i at positions[i]; then it attends to positions 0..positions[i] of its slot, the last
   `window` of them if window > 0. keys, values: (slots, length, key_heads, size). tables: (positions, size). */
void decode_attention(
    REAL *projected, const REAL *query_weight, const REAL *key_weight, REAL query_eps, REAL key_eps,
    const REAL *cosine, const REAL *sine, REAL *keys, REAL *values, const int64_t *positions, int64_t rows,
    int64_t query_heads, int64_t key_heads, int64_t size, int64_t length, int64_t window, REAL scale, REAL *out) {
    const int64_t width = (query_heads + 2 * key_heads) * size, group = query_heads / key_heads;
    const int64_t stride = key_heads * size;
#pragma omp parallel if (rows * width > PARALLEL_FROM)
    {
        REAL *turned = malloc(sizeof(REAL) * (size_t)(group * size));
#pragma omp for schedule(static) collapse(2)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t h = 0; h < key_heads; h++) {
                const int64_t position = positions[i];
                const REAL *row = projected + i * width, *c = cosine + position * size, *s = sine + position * size;
                REAL *slot_keys = keys + (i * length * key_heads + h) * size;
                REAL *slot_values = values + (i * length * key_heads + h) * size;
                const REAL *key = row + (query_heads + h) * size, *value = row + (query_heads + key_heads + h) * size;
                norm_rotate_head(key, key_weight, key_eps, c, s, size, slot_keys + position * stride);
                for (int64_t d = 0; d < size; d++) slot_values[position * stride + d] = value[d];
                for (int64_t g = 0; g < group; g++)
                    norm_rotate_head(
                        row + (h * group + g) * size, query_weight, query_eps, c, s, size, turned + g * size);
                const int64_t first = window > 0 && position >= window ? position - window + 1 : 0;
                attend_head(
                    turned, group, size, slot_keys, slot_values, stride, first, position, scale,
                    out + (i * query_heads + h * group) * size);
            }
        free(turned);
    }
}
