/* Products of blocks that lie in the cache, tile by tile in registers. */

#ifndef GSPO_PRODUCTS_H
#define GSPO_PRODUCTS_H

#include "real.h"

#if defined(__AVX512F__)
#define BLOCK_BYTES 64
#define TILE_ROWS 6
#define TILE_VECTORS 4 /* 24 of 32 registers hold sums */
#elif defined(__AVX__)
#define BLOCK_BYTES 32
#define TILE_ROWS 6
#define TILE_VECTORS 2 /* 12 of 16 */
#else
#define BLOCK_BYTES 16
#define TILE_ROWS 6
#define TILE_VECTORS 2
#endif

#define BLOCK_LANES ((int64_t)(BLOCK_BYTES / sizeof(REAL)))

typedef REAL lanes __attribute__((vector_size(BLOCK_BYTES), aligned(sizeof(REAL)), may_alias));

/* A matrix in memory: entry (i, j) is at from[i * row + j * column]. */
typedef struct {
    const REAL *from;
    int64_t row, column;
} Matrix;

/* c (rows, vectors * BLOCK_LANES) = a (rows, depth) b (depth, ...), or += with `add`. Rows of b are contiguous. */
INLINE void tile_product(
    const int rows, const int vectors, int64_t depth, Matrix a, const REAL *b, int64_t b_row, REAL *c, int64_t c_row,
    const int add) {
    lanes sums[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[r][v] = add ? *(const lanes *)(c + r * c_row + v * BLOCK_LANES) : (lanes){0};
    for (int64_t k = 0; k < depth; k++) {
        const REAL *numbers = b + k * b_row, *scalars = a.from + k * a.column;
        lanes row[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) row[v] = *(const lanes *)(numbers + v * BLOCK_LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const REAL x = scalars[r * a.row];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[r][v] += x * row[v];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) *(lanes *)(c + r * c_row + v * BLOCK_LANES) = sums[r][v];
}

INLINE void columns_product(
    const int vectors, int64_t rows, int64_t depth, Matrix a, const REAL *b, int64_t b_row, REAL *c, int64_t c_row,
    int add) {
    for (int64_t i = 0; i < rows; i += TILE_ROWS) {
        const Matrix part = {a.from + i * a.row, a.row, a.column};
        REAL *to = c + i * c_row;
        switch (rows - i) {
#define CASE(n)                                                                   \
    case n:                                                                       \
        if (add) tile_product(n, vectors, depth, part, b, b_row, to, c_row, 1);   \
        else tile_product(n, vectors, depth, part, b, b_row, to, c_row, 0);       \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
        default:
            if (add) tile_product(TILE_ROWS, vectors, depth, part, b, b_row, to, c_row, 1);
            else tile_product(TILE_ROWS, vectors, depth, part, b, b_row, to, c_row, 0);
#undef CASE
        }
    }
}

/* c (rows, columns) = a (rows, depth) b (depth, columns), or +=. `columns` is rounded up to whole vectors, so b and c
   have room for that; rows of b and c are contiguous and b_row and c_row apart. */
static void block_product(
    int64_t rows, int64_t columns, int64_t depth, Matrix a, const REAL *b, int64_t b_row, REAL *c, int64_t c_row,
    int add) {
    for (int64_t j = 0; j < columns; j += TILE_VECTORS * BLOCK_LANES) {
        const int64_t vectors = (columns - j + BLOCK_LANES - 1) / BLOCK_LANES;
        switch (vectors) {
        case 1: columns_product(1, rows, depth, a, b + j, b_row, c + j, c_row, add); break;
#if TILE_VECTORS == 4
        case 2: columns_product(2, rows, depth, a, b + j, b_row, c + j, c_row, add); break;
        case 3: columns_product(3, rows, depth, a, b + j, b_row, c + j, c_row, add); break;
#endif
        default: columns_product(TILE_VECTORS, rows, depth, a, b + j, b_row, c + j, c_row, add);
        }
    }
}
#endif
