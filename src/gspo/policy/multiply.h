/* c = base + a b for matrices in memory, in blocks whose parts stay in the second-level cache: on tile registers for
   float32 where the processor has them, else in vectors. Every sum is one chain over the depth in its order, whatever the
   blocks and the threads are.

   Threads share nothing: each has some rows and some columns of c, and splits what it needs of both factors itself. That
   costs less than fetching what another core has split. */

#ifndef GSPO_MULTIPLY_H
#define GSPO_MULTIPLY_H

#include "real.h"

#include <string.h>

#define PARALLEL_PRODUCTS (16 * PARALLEL_FROM) /* multiply-adds below which another thread is not worth waking */

/* Takes `rows` rows of numbers of a product, from `row` and `column` on, while they are in the cache. With a second right
   factor its numbers lie `second` further on in every row. */
typedef void Finish(
    const void *context, int64_t row, int64_t rows, int64_t column, int64_t columns, const REAL *numbers,
    int64_t numbers_row, int64_t second);

typedef struct {
    Factor left, right;
    int64_t depth;
    const REAL *base; /* NULL: 0; may be out */
    int64_t base_row; /* 0: all rows are the same one */
    REAL *out;
    int64_t out_row;
    Finish *finish; /* on tiles only, or NULL: takes the numbers; then base and out do not count */
    const void *context;
    int64_t second; /* with `finish`: 0, or where another right factor lies, seen from the first one */
} Product;

typedef struct {
    int64_t first, last; /* last: the first one beyond */
} Span;

static int64_t quotient_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
static int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

#if HAS_TILES
#include "tiles.h"
#else
#include "products.h"
#endif

/* A block's length where all blocks are about equal, at most `most`, and whole units. */
static int64_t even_block(int64_t size, int64_t most, int64_t unit) {
    return quotient_up(quotient_up(size, quotient_up(size, most)), unit) * unit;
}

/* Share number i of n of `size` lines, in whole pairs of tiles. */
static Span share_of(int64_t size, int64_t i, int64_t n) {
    const int64_t pairs = quotient_up(size, 32);
    return (Span){smaller(pairs * i / n * 32, size), smaller(pairs * (i + 1) / n * 32, size)};
}

#if HAS_TILES
#define WHOLE_STEPS 24  /* tiles of the depth up to which it is not cut: sums would be read and written once more */
#define BLOCK_STEPS 18  /* most of a block of a deeper one */
#define BLOCK_TILES 384 /* of b: 1,152 kB */
#define BLOCK_ROWS 64   /* of a: at most 288 kB */
#define PAST_CACHE_FROM (1 << 17) /* numbers of a thread's share of c from which they are written past the cache */
#define CACHED_STEPS 4  /* of which the first-level cache holds two rows and two columns of tiles */

/* Place of a tile: stretches of CACHED_STEPS of the depth, in them line by line, in them step by step. */
static int64_t tile_place(int64_t line, int64_t step, int64_t lines, int64_t steps) {
    const int64_t first = step / CACHED_STEPS * CACHED_STEPS;
    return (first * lines + line * smaller(steps - first, CACHED_STEPS) + step - first) * TILE_SIZE;
}

typedef void (*MakeTile)(Factor, int64_t, int64_t, int64_t, int64_t, Part *);

/* The tiles of some lines of a factor over a stretch of the depth, in the order in which they lie in memory. They are
   `lines` of `all` lines of tiles, from `place` on. */
INLINE void split_block(MakeTile make, Factor x, Span span, Span depth, int64_t place, int64_t all, Part *to) {
    const int64_t lines = quotient_up(span.last - span.first, 16);
    const int64_t steps = quotient_up(depth.last - depth.first, TILE_DEPTH);
    for (int64_t tile = 0; tile < lines * steps; tile++) {
        const int64_t line = x.depth == 1 ? tile / steps : tile % lines;
        const int64_t step = x.depth == 1 ? tile % steps : tile / lines;
        const int64_t first = span.first + line * 16, at = depth.first + step * TILE_DEPTH;
        make(x, first, span.last - first, at, depth.last - at, to + tile_place(place + line, step, all, steps));
    }
}

/* Rows of sums (rows, width) into out, `past` the cache if they fill whole lines of it. */
static void write_rows(
    const REAL *sums, int64_t width, int64_t rows, int64_t columns, REAL *out, int64_t out_row, int past) {
    const int lines = columns % 16 == 0 && out_row % 16 == 0 && (uintptr_t)out % 64 == 0;
    for (int64_t i = 0; i < rows; i++, sums += width, out += out_row) {
        if (!past || !lines) memcpy(out, sums, sizeof(REAL) * (size_t)columns);
        else
            for (int64_t j = 0; j < columns; j += 16) _mm512_stream_ps(out + j, _mm512_load_ps(sums + j));
    }
}

/* sums: room for 32 rows and all columns, rounded up to pairs of tiles. Whole tiles begin with the base where it lies and,
   where the depth is cut, stay where they belong. */
static void multiply_block(
    const Product *p, Span rows, Span columns, Span depth, const Part *left, const Part *right, REAL *sums, int past) {
    const int64_t steps = quotient_up(depth.last - depth.first, TILE_DEPTH), share = columns.last - columns.first;
    const int64_t side = quotient_up(share, 16), wide = p->second ? 32 * side : share;
    const int64_t left_lines = quotient_up(rows.last - rows.first, 16), right_lines = quotient_up(wide, 16);
    const int64_t width = quotient_up(wide, 32) * 32, base_row = depth.first ? p->out_row : p->base_row;
    const REAL *base = depth.first ? p->out : p->base;
    const int cut = depth.last - depth.first < p->depth;
    for (int64_t row = rows.first; row < rows.last; row += 32) {
        const int64_t high = smaller(rows.last - row, 32);
        const int whole = wide == width && high % 16 == 0, in_place = whole && cut;
        REAL *out = p->out + row * p->out_row + columns.first, *to = in_place ? out : sums;
        const REAL *from = base ? base + row * base_row + columns.first : NULL;
        const int64_t to_row = in_place ? p->out_row : width;
        int64_t from_row = base_row;
        if (from && !whole) {
            for (int64_t i = 0; i < high; i++) memcpy(sums + i * width, from + i * base_row, sizeof(REAL) * (size_t)wide);
            from = sums;
            from_row = width;
        }
        for (int64_t first = 0; first < steps; first += CACHED_STEPS) {
            const Part *tiles = left + tile_place((row - rows.first) / 16, first, left_lines, steps);
            for (int64_t column = 0; column < wide; column += 32)
                some_tiles(
                    high, smaller(wide - column, 32), tiles, right + tile_place(column / 16, first, right_lines, steps),
                    smaller(steps - first, CACHED_STEPS), from ? from + column : NULL, from_row, to + column, to_row);
            from = to;
            from_row = to_row;
        }
        if (p->finish) p->finish(p->context, row, high, columns.first, share, sums, width, 16 * side);
        else if (!in_place) write_rows(sums, width, high, wide, out, p->out_row, past && depth.last == p->depth);
    }
}

/* Some rows and columns of a product, by one thread. */
static void multiply_part(const Product *p, Span rows, Span columns) {
    if (rows.first == rows.last || columns.first == columns.last) return;
    const int64_t most = p->finish || p->depth <= WHOLE_STEPS * TILE_DEPTH ? p->depth : BLOCK_STEPS * TILE_DEPTH;
    const int64_t length = even_block(p->depth, most, TILE_DEPTH), steps = length / TILE_DEPTH;
    const int64_t sides = p->second ? 2 : 1;
    const int64_t width = even_block(columns.last - columns.first, BLOCK_TILES / steps / (2 * sides) * 32, 32);
    const int64_t height = even_block(rows.last - rows.first, BLOCK_ROWS, 32);
    const size_t bytes = sizeof(Part) * TILE_SIZE * (size_t)steps;
    Part *left = aligned_alloc(64, bytes * (size_t)(height / 16));
    Part *right = aligned_alloc(64, bytes * (size_t)(sides * width / 16));
    REAL *sums = aligned_alloc(64, sizeof(REAL) * 32 * (size_t)(sides * width));
    const int past = (rows.last - rows.first) * (columns.last - columns.first) >= PAST_CACHE_FROM;
    begin_tiles();
    for (int64_t column = columns.first; column < columns.last; column += width)
        for (int64_t at = 0; at < p->depth; at += length) {
            const Span wide = {column, smaller(column + width, columns.last)};
            const Span deep = {at, smaller(at + length, p->depth)};
            const int64_t lines = quotient_up(wide.last - wide.first, 16);
            split_block(right_tile, p->right, wide, deep, 0, sides * lines, right);
            if (p->second) {
                const Factor second = {p->right.from + p->second, p->right.line, p->right.depth};
                split_block(right_tile, second, wide, deep, lines, sides * lines, right);
            }
            for (int64_t row = rows.first; row < rows.last; row += height) {
                const Span high = {row, smaller(row + height, rows.last)};
                split_block(left_tile, p->left, high, deep, 0, quotient_up(high.last - high.first, 16), left);
                multiply_block(p, high, wide, deep, left, right, sums, past);
            }
        }
    end_tiles();
    _mm_sfence(); /* what went past the cache, before others are told that it is there */
    free(sums);
    free(left);
    free(right);
}
#else
#define BLOCK_DEPTH 256
#define BLOCK_COLUMNS 256                         /* with it at most 512 kB of b */
#define BLOCK_ROWS 96                             /* whole tiles */
#define PANEL_COLUMNS (TILE_VECTORS * BLOCK_LANES) /* what a tile passes over, without gaps */

#if IS_DOUBLE
typedef int64_t lane_numbers __attribute__((vector_size(BLOCK_BYTES)));
#else
typedef int32_t lane_numbers __attribute__((vector_size(BLOCK_BYTES)));
#endif

INLINE void copy_rows(int64_t rows, int64_t columns, const REAL *from, int64_t from_row, REAL *to, int64_t to_row) {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * to_row, from + i * from_row, sizeof(REAL) * (size_t)columns);
}

/* to[k][j] = from[j][k] for as many of both as a vector has numbers. */
INLINE void turn_square(const REAL *from, int64_t from_row, REAL *to) {
#ifdef __clang__ /* has no shuffle by a vector */
    for (int64_t j = 0; j < BLOCK_LANES; j++)
        for (int64_t k = 0; k < BLOCK_LANES; k++) to[k * PANEL_COLUMNS + j] = from[j * from_row + k];
#else
    lanes x[BLOCK_LANES], y[BLOCK_LANES];
    lane_numbers low, high; /* interleave the first halves of two vectors, or their second ones */
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK_LANES; i++) {
        low[i] = i / 2 + (i % 2 ? BLOCK_LANES : 0);
        high[i] = low[i] + BLOCK_LANES / 2;
        x[i] = *(const lanes *)(from + i * from_row);
    }
#pragma GCC unroll 4
    for (int step = 1; step < BLOCK_LANES; step *= 2) { /* moves one bit of a number's row into its column and back */
#pragma GCC unroll 8
        for (int i = 0; i < BLOCK_LANES / 2; i++) {
            y[2 * i] = __builtin_shuffle(x[i], x[i + BLOCK_LANES / 2], low);
            y[2 * i + 1] = __builtin_shuffle(x[i], x[i + BLOCK_LANES / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < BLOCK_LANES; i++) x[i] = y[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK_LANES; i++) *(lanes *)(to + i * PANEL_COLUMNS) = x[i];
#endif
}

/* A panel from columns whose depth is contiguous. */
static void pack_turned(const REAL *from, int64_t line, int64_t width, int64_t steps, REAL *to) {
    for (int64_t j = 0; j < width; j += BLOCK_LANES)
        for (int64_t k = 0; k < steps; k += BLOCK_LANES) {
            if (j + BLOCK_LANES <= width && k + BLOCK_LANES <= steps) {
                turn_square(from + j * line + k, line, to + k * PANEL_COLUMNS + j);
                continue;
            }
            for (int64_t i = j; i < j + BLOCK_LANES && i < width; i++)
                for (int64_t d = k; d < k + BLOCK_LANES && d < steps; d++)
                    to[d * PANEL_COLUMNS + i] = from[i * line + d];
        }
}

/* Some columns of the right factor over a stretch of the depth, in panels, zeros beyond the last column. */
static void pack_panels(Factor x, Span columns, Span depth, REAL *to) {
    const int64_t steps = depth.last - depth.first;
    for (int64_t column = columns.first; column < columns.last; column += PANEL_COLUMNS, to += steps * PANEL_COLUMNS) {
        const int64_t width = smaller(columns.last - column, PANEL_COLUMNS);
        const REAL *from = x.from + column * x.line + depth.first * x.depth;
        if (width < PANEL_COLUMNS) memset(to, 0, sizeof(REAL) * (size_t)(steps * PANEL_COLUMNS));
        if (x.line != 1) pack_turned(from, x.line, width, steps, to);
        else if (width < PANEL_COLUMNS) copy_rows(steps, width, from, x.depth, to, PANEL_COLUMNS);
        else copy_rows(steps, PANEL_COLUMNS, from, x.depth, to, PANEL_COLUMNS);
    }
}

/* Up to BLOCK_ROWS rows of the left factor over a stretch of the depth: as they are where they are contiguous, else one
   step of the depth after the other in `room`, so that they do not compete for the same places of the cache. */
static Matrix pack_rows(Factor x, Span rows, Span depth, REAL *room) {
    const REAL *from = x.from + rows.first * x.line + depth.first * x.depth;
    if (x.depth == 1) return (Matrix){from, x.line, x.depth};
    copy_rows(depth.last - depth.first, rows.last - rows.first, from, x.depth, room, BLOCK_ROWS);
    return (Matrix){room, 1, BLOCK_ROWS};
}

/* Up to BLOCK_ROWS rows, `left`, times the panels of some columns. room: for columns that are not whole vectors. */
static void multiply_block(
    const Product *p, Matrix left, Span rows, Span columns, Span depth, const REAL *panels, REAL *room) {
    const int64_t height = rows.last - rows.first, steps = depth.last - depth.first;
    const int begins = depth.first == 0, add = !begins || p->base;
    for (int64_t column = columns.first; column < columns.last; column += PANEL_COLUMNS) {
        const int64_t width = smaller(columns.last - column, PANEL_COLUMNS);
        const int fits = width % BLOCK_LANES == 0;
        REAL *out = p->out + rows.first * p->out_row + column, *to = fits ? out : room;
        const int64_t to_row = fits ? p->out_row : PANEL_COLUMNS, base_row = begins ? p->base_row : p->out_row;
        if (add) {
            const REAL *base = begins ? p->base + rows.first * base_row + column : out;
            if (base != to) copy_rows(height, width, base, base_row, to, to_row);
        }
        block_product(height, width, steps, left, panels, PANEL_COLUMNS, to, to_row, add);
        if (!fits) copy_rows(height, width, room, PANEL_COLUMNS, out, p->out_row);
        panels += steps * PANEL_COLUMNS;
    }
}

/* Some rows and columns of a product, by one thread. */
static void multiply_part(const Product *p, Span rows, Span columns) {
    if (rows.first == rows.last || columns.first == columns.last) return;
    const int64_t length = even_block(p->depth, BLOCK_DEPTH, 1);
    const int64_t width = even_block(columns.last - columns.first, BLOCK_COLUMNS, PANEL_COLUMNS);
    const int64_t numbers = length * width + BLOCK_ROWS * (length + PANEL_COLUMNS);
    REAL *panels = aligned_alloc(64, sizeof(REAL) * (size_t)numbers);
    REAL *room = panels + length * width, *packed = room + BLOCK_ROWS * PANEL_COLUMNS;
    for (int64_t column = columns.first; column < columns.last; column += width)
        for (int64_t at = 0; at < p->depth; at += length) {
            const Span wide = {column, smaller(column + width, columns.last)};
            const Span deep = {at, smaller(at + length, p->depth)};
            pack_panels(p->right, wide, deep, panels);
            for (int64_t row = rows.first; row < rows.last; row += BLOCK_ROWS) {
                const Span high = {row, smaller(row + BLOCK_ROWS, rows.last)};
                multiply_block(p, pack_rows(p->left, high, deep, packed), high, wide, deep, panels, room);
            }
        }
    free(panels);
}
#endif

/* Into how many shares to divide the rows, and the columns into the others, so that a thread has least to split. */
static int64_t row_shares(int64_t rows, int64_t columns, int64_t threads) {
    int64_t best = threads, least = rows / threads + columns;
    for (int64_t n = 1; n < threads; n++) {
        const int64_t lines = rows / n + columns * n / threads;
        if (threads % n == 0 && lines < least) {
            best = n;
            least = lines;
        }
    }
    return best;
}

/* One for each thread, or one for all where a product is too small to wake another. */
typedef struct {
    int64_t all, by_row, by_column;
} Shares;

static Shares shares_of(int64_t rows, int64_t columns, int64_t depth) {
    const int64_t threads = rows * columns * depth > PARALLEL_PRODUCTS ? omp_get_max_threads() : 1;
    const int64_t by_row = row_shares(rows, columns, threads);
    return (Shares){threads, by_row, threads / by_row};
}

/* All of a product, by all threads. */
static void multiply_shares(const Product *p, int64_t rows, int64_t columns) {
    const Shares shares = shares_of(rows, columns, p->depth);
#pragma omp parallel for schedule(static, 1) if (shares.all > 1)
    for (int64_t i = 0; i < shares.all; i++)
        multiply_part(
            p, share_of(rows, i / shares.by_column, shares.by_row),
            share_of(columns, i % shares.by_column, shares.by_column));
}

/* a (rows, depth) and b (depth, columns), of whose two distances one is 1, in elements; base and c (rows, columns) with
   contiguous rows. base NULL: 0; it may be c, and its rows may all be the same one. */
void multiply(
    const REAL *a, int64_t a_row, int64_t a_depth, const REAL *b, int64_t b_depth, int64_t b_column, int64_t rows,
    int64_t columns, int64_t depth, const REAL *base, int64_t base_row, REAL *c, int64_t c_row) {
    const Product p = {{a, a_row, a_depth}, {b, b_column, b_depth}, depth, base, base_row, c, c_row, NULL, NULL, 0};
    multiply_shares(&p, rows, columns);
}
#endif
