/* The gated part of an MLP around its products: silu(gate x) * up x and its gradient, taken from the products while their
   numbers are in the cache where these run on tiles. */

#ifndef GSPO_GATED_H
#define GSPO_GATED_H

#include "multiply.h"

#define FUSED_DEPTH 1024 /* of a product that is not cut along the depth */

/* One row of the backward pass of silu(gate) * up, whose value is given again unless `activated` is NULL. It may be
   grad. */
static inline void gated_slopes(
    const REAL *grad, const REAL *gate, const REAL *up, int64_t size, REAL *grad_gate, REAL *grad_up, REAL *activated) {
#pragma omp simd
    for (int64_t j = 0; j < size; j++) {
        const REAL sigmoid = (REAL)1 / ((REAL)1 + exponential(-gate[j])), silu = gate[j] * sigmoid, given = grad[j];
        const REAL slope = sigmoid * ((REAL)1 + gate[j] * ((REAL)1 - sigmoid));
        grad_up[j] = given * silu;
        grad_gate[j] = given * up[j] * slope;
        if (activated) activated[j] = silu * up[j];
    }
}

/* y = silu(gate) * up. */
void swiglu(const REAL *gate, const REAL *up, int64_t stride, int64_t rows, int64_t size, REAL *y) {
#pragma omp parallel for schedule(static) if (rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++) gated(gate + i * stride, up + i * stride, size, y + i * size);
}

/* grad_gate and grad_up have the strides of gate and up; `activated` is computed again unless it is NULL, and may be
   grad. */
void swiglu_backward(
    const REAL *grad, const REAL *gate, const REAL *up, int64_t stride, int64_t rows, int64_t size,
    REAL *grad_gate, REAL *grad_up, REAL *activated) {
#pragma omp parallel for schedule(static) if (rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++) {
        REAL *to = activated ? activated + i * size : NULL;
        gated_slopes(
            grad + i * size, gate + i * stride, up + i * stride, size, grad_gate + i * stride, grad_up + i * stride, to);
    }
}

/* What both directions read and write besides the factors: rows of 2 x inner numbers, gate and up, and of inner. */
typedef struct {
    int64_t inner;
    REAL *projected, *grad_projected, *activated;
    int past; /* the cache */
} Gates;

#if HAS_TILES
#define FUSED_COLUMNS 512 /* at a time */

static void finish_forward(
    const void *context, int64_t row, int64_t rows, int64_t column, int64_t columns, const REAL *numbers,
    int64_t numbers_row, int64_t second) {
    const Gates *g = context;
    REAL room[FUSED_COLUMNS] __attribute__((aligned(64)));
    for (int64_t i = 0; i < rows; i++, numbers += numbers_row) {
        REAL *gate = g->projected + (row + i) * 2 * g->inner + column;
        write_rows(numbers, 0, 1, columns, gate, 0, g->past);
        write_rows(numbers + second, 0, 1, columns, gate + g->inner, 0, g->past);
        for (int64_t j = 0; j < columns; j += FUSED_COLUMNS) {
            const int64_t some = smaller(columns - j, FUSED_COLUMNS);
            gated(numbers + j, numbers + second + j, some, room);
            write_rows(room, 0, 1, some, g->activated + (row + i) * g->inner + column + j, 0, g->past);
        }
    }
}

static void finish_backward(
    const void *context, int64_t row, int64_t rows, int64_t column, int64_t columns, const REAL *numbers,
    int64_t numbers_row, int64_t second) {
    (void)second;
    const Gates *g = context;
    REAL room[3][FUSED_COLUMNS] __attribute__((aligned(64)));
    for (int64_t i = 0; i < rows; i++, numbers += numbers_row)
        for (int64_t j = 0; j < columns; j += FUSED_COLUMNS) {
            const int64_t some = smaller(columns - j, FUSED_COLUMNS), at = (row + i) * 2 * g->inner + column + j;
            const REAL *gate = g->projected + at, *up = gate + g->inner;
            gated_slopes(numbers + j, gate, up, some, room[0], room[1], room[2]);
            write_rows(room[0], 0, 1, some, g->grad_projected + at, 0, g->past);
            write_rows(room[1], 0, 1, some, g->grad_projected + at + g->inner, 0, g->past);
            write_rows(room[2], 0, 1, some, g->activated + (row + i) * g->inner + column + j, 0, g->past);
        }
}
#endif

/* Some rows and columns of `gated_product`, by one thread. */
static void gated_part(
    const REAL *x, const REAL *gate, const REAL *up, Span rows, Span columns, int64_t size, int64_t inner,
    REAL *projected, REAL *activated) {
#if HAS_TILES
    if (size <= FUSED_DEPTH && up != gate) {
        const int64_t numbers = (rows.last - rows.first) * (columns.last - columns.first);
        const Gates gates = {inner, projected, NULL, activated, numbers >= PAST_CACHE_FROM};
        const Product p = {{x, size, 1}, {gate, size, 1}, size, NULL, 0, NULL, 0, finish_forward, &gates, up - gate};
        multiply_part(&p, rows, columns);
        return;
    }
#endif
    for (int side = 0; side < 2; side++) {
        REAL *out = projected + side * inner;
        const Product p = {
            {x, size, 1}, {side ? up : gate, size, 1}, size, NULL, 0, out, 2 * inner, NULL, NULL, 0};
        multiply_part(&p, rows, columns);
    }
    for (int64_t i = rows.first; i < rows.last; i++) {
        const REAL *sides = projected + i * 2 * inner + columns.first;
        gated(sides, sides + inner, columns.last - columns.first, activated + i * inner + columns.first);
    }
}

/* projected (rows, 2 inner) = x gate^T and x up^T, activated (rows, inner) = silu of the first times the second. x: rows
   of `size`; gate, up: (inner, size). */
void gated_product(
    const REAL *x, const REAL *gate, const REAL *up, int64_t rows, int64_t size, int64_t inner, REAL *projected,
    REAL *activated) {
    const Shares shares = shares_of(rows, inner, size);
#pragma omp parallel for schedule(static, 1) if (shares.all > 1)
    for (int64_t i = 0; i < shares.all; i++)
        gated_part(
            x, gate, up, share_of(rows, i / shares.by_column, shares.by_row),
            share_of(inner, i % shares.by_column, shares.by_column), size, inner, projected, activated);
}

/* grad_projected from the gradient by down(activated), and activated again. grad: rows of `size`; down: (size, inner). */
void gated_product_backward(
    const REAL *grad, const REAL *down, int64_t rows, int64_t size, int64_t inner, REAL *projected,
    REAL *grad_projected, REAL *activated) {
#if HAS_TILES
    if (size <= FUSED_DEPTH) {
        const Gates gates = {inner, projected, grad_projected, activated, rows * inner >= PAST_CACHE_FROM};
        const Product p = {
            {grad, size, 1}, {down, 1, inner}, size, NULL, 0, NULL, 0, finish_backward, &gates, 0};
        multiply_shares(&p, rows, inner);
        return;
    }
#endif
    multiply(grad, size, 1, down, inner, 1, rows, inner, size, NULL, 0, activated, inner);
    swiglu_backward(
        activated, projected, projected + inner, 2 * inner, rows, inner, grad_projected, grad_projected + inner,
        activated);
}
#endif
