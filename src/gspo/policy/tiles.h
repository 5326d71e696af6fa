/* Products of float32 matrices on the tile registers of a processor that multiplies bfloat16 in them (AMX).

   A float is the sum of three bfloat16 parts, each a nearest one to what the ones before it leave: 8 + 8 + 8 bits, so
   nothing is lost. Of the nine products of parts the six that reach 2^-24 of the whole are computed, summed in float32.
   The result is as close to the exact one as a chain of fused multiply-adds, and sooner there (docs/decisions/0122).
   Exceptions: numbers below about 2^-108 (1e-32) lose digits, since parts below 2^-126 count as 0,
   and a number that is not finite gives nan.

   A tile is 16 rows of 64 bytes. The left factor's has 16 of its rows with 32 numbers of the depth each; the right
   factor's has 16 pairs of numbers of the depth, each for 16 of its columns. Parts of a tile follow each other.
   Every sum runs over the depth in its order, whatever the other rows, the blocks and the threads are.
   Source of sums of bfloat16 parts in place of float32: arXiv 1904.06376. */

#ifndef GSPO_TILES_H
#define GSPO_TILES_H

#include "real.h"

#include <immintrin.h>
#include <string.h>

#define PARTS 3
#define TILE_LINES 16
#define TILE_DEPTH 32
#define TILE_NUMBERS (TILE_LINES * TILE_DEPTH)
#define TILE_SIZE (PARTS * TILE_NUMBERS) /* numbers of a tile with its parts */

typedef uint16_t Part;

INLINE __m512 widen(__m256i parts) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(parts), 16));
}

/* Parts of 32 numbers side by side. */
INLINE void split_line(__m512 low, __m512 high, Part *to) {
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm512_store_si512(to + part * TILE_NUMBERS, both);
        low = _mm512_sub_ps(low, widen(_mm512_castsi512_si256(both)));
        high = _mm512_sub_ps(high, widen(_mm512_extracti64x4_epi64(both, 1)));
    }
}

/* Parts of 16 pairs of numbers: even[0], odd[0], even[1], ... Rounds by adding half a unit, and so a tie away from 0, in
   instructions that do not compete with the shuffles of a transposition. Nothing is left to round in the last part. */
INLINE void split_pairs(__m512 even, __m512 odd, Part *to) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32((int)0xffff0000);
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++) {
        __m512i first = _mm512_castps_si512(even), second = _mm512_castps_si512(odd);
        if (part + 1 < PARTS) {
            first = _mm512_and_si512(_mm512_add_epi32(first, half), upper);
            second = _mm512_and_si512(_mm512_add_epi32(second, half), upper);
        }
        _mm512_store_si512(
            to + part * TILE_NUMBERS, _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(first, 16), second));
        even = _mm512_sub_ps(even, _mm512_castsi512_ps(first));
        odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(second));
    }
}

INLINE void transpose_lanes(__m512 x[16]) {
    __m512 y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)y[i + j], (__m512d)y[i + j + 2]);
            x[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)y[i + j], (__m512d)y[i + j + 2]);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_f32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_f32x4(y[i + 4], y[i + 12], 0xdd);
    }
}

/* Numbers of a tile in `room`, `lines` lines from `line` on and `depth` numbers from `at` on, with zeros around them. */
static __attribute__((noinline)) Factor padded(
    Factor x, int64_t line, int64_t lines, int64_t at, int64_t depth, REAL *room) {
    const Factor to = x.depth == 1 ? (Factor){room, TILE_DEPTH, 1} : (Factor){room, 1, TILE_LINES};
    memset(room, 0, sizeof(REAL) * TILE_NUMBERS);
    for (int64_t i = 0; i < smaller(lines, TILE_LINES); i++)
        for (int64_t k = 0; k < smaller(depth, TILE_DEPTH); k++)
            room[i * to.line + k * to.depth] = x.from[(line + i) * x.line + (at + k) * x.depth];
    return to;
}

/* Where a tile lies if it is whole, so that its numbers can be loaded without masks, which take half as long again; else
   a copy of it. */
INLINE Factor whole_tile(Factor x, int64_t line, int64_t lines, int64_t at, int64_t depth, REAL *room) {
    if (lines < TILE_LINES || depth < TILE_DEPTH) return padded(x, line, lines, at, depth, room);
    x.from += line * x.line + at * x.depth;
    return x;
}

/* 16 stretches of 16 numbers, `stride` apart. */
INLINE void load_lines(const REAL *from, int64_t stride, __m512 x[16]) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_ps(from + i * stride);
}

/* A tile of the left factor. */
static void left_tile(Factor x, int64_t line, int64_t lines, int64_t at, int64_t depth, Part *to) {
    REAL room[TILE_NUMBERS] __attribute__((aligned(64)));
    x = whole_tile(x, line, lines, at, depth, room);
    if (x.depth == 1) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; i++) {
            const REAL *from = x.from + i * x.line;
            _mm_prefetch((const char *)(from + 16 * x.line), _MM_HINT_T0); /* of the tile below */
            _mm_prefetch((const char *)(from + 16 * x.line + 16), _MM_HINT_T0);
            split_line(_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16), to + i * TILE_DEPTH);
        }
    } else {
        __m512 even[16], odd[16];
        load_lines(x.from, 2 * x.depth, even);
        transpose_lanes(even);
        load_lines(x.from + x.depth, 2 * x.depth, odd);
        transpose_lanes(odd);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) split_pairs(even[i], odd[i], to + i * TILE_DEPTH);
    }
}

/* The same of the right factor. */
static void right_tile(Factor x, int64_t line, int64_t lines, int64_t at, int64_t depth, Part *to) {
    REAL room[TILE_NUMBERS] __attribute__((aligned(64)));
    x = whole_tile(x, line, lines, at, depth, room);
    if (x.depth == 1) {
        for (int half = 0; half < 2; half++) {
            __m512 numbers[16];
            load_lines(x.from + 16 * half, x.line, numbers);
            transpose_lanes(numbers);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                split_pairs(numbers[2 * i], numbers[2 * i + 1], to + (8 * half + i) * TILE_DEPTH);
        }
    } else {
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; i++)
            split_pairs(
                _mm512_loadu_ps(x.from + 2 * i * x.depth), _mm512_loadu_ps(x.from + (2 * i + 1) * x.depth),
                to + i * TILE_DEPTH);
    }
}

/* Every thread that uses tiles says so before and after. */
INLINE void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = TILE_LINES;
    }
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* all of it is stored: the intrinsic names only its first bytes */
    _tile_loadconfig(&shapes);
}

INLINE void end_tiles(void) { _tile_release(); }

/* c (32 or 16 rows, 32 or 16 columns) = base + left right over `steps` tiles of the depth. base NULL: 0; it may be c.
   A second row or column of tiles follows the first one, `steps` tiles further on. */
INLINE void four_tiles(
    const int two_rows, const int two_columns, const Part *left, const Part *right, int64_t steps, const REAL *base,
    int64_t base_row, REAL *c, int64_t c_row) {
    const int64_t bytes = base_row * (int64_t)sizeof(REAL), out = c_row * (int64_t)sizeof(REAL);
    __asm__ volatile("" ::: "memory"); /* the intrinsics do not say that they read what has been stored */
    const Part *lower = left + steps * TILE_SIZE, *beside = right + steps * TILE_SIZE;
    if (base) {
        _tile_loadd(0, base, bytes);
        if (two_columns) _tile_loadd(1, base + 16, bytes);
        if (two_rows) _tile_loadd(2, base + 16 * base_row, bytes);
        if (two_rows && two_columns) _tile_loadd(3, base + 16 * base_row + 16, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
#define LEFT(part)                                               \
    _tile_loadd(4, left + (part) * TILE_NUMBERS, 64);            \
    if (two_rows) _tile_loadd(5, lower + (part) * TILE_NUMBERS, 64);
#define RIGHT(part)                                              \
    _tile_loadd(6, right + (part) * TILE_NUMBERS, 64);           \
    if (two_columns) _tile_loadd(7, beside + (part) * TILE_NUMBERS, 64);
#define MULTIPLY                                                 \
    _tile_dpbf16ps(0, 4, 6);                                     \
    if (two_columns) _tile_dpbf16ps(1, 4, 7);                    \
    if (two_rows) _tile_dpbf16ps(2, 5, 6);                       \
    if (two_rows && two_columns) _tile_dpbf16ps(3, 5, 7);
    for (int64_t k = 0; k < steps; k++) { /* one of the two changes between two products */
        LEFT(0) RIGHT(2) MULTIPLY
        RIGHT(1) MULTIPLY
        LEFT(1) MULTIPLY
        RIGHT(0) MULTIPLY
        LEFT(2) MULTIPLY
        LEFT(0) MULTIPLY
        left += TILE_SIZE;
        lower += TILE_SIZE;
        right += TILE_SIZE;
        beside += TILE_SIZE;
    }
#undef LEFT
#undef RIGHT
#undef MULTIPLY
    _tile_stored(0, c, out);
    if (two_columns) _tile_stored(1, c + 16, out);
    if (two_rows) _tile_stored(2, c + 16 * c_row, out);
    if (two_rows && two_columns) _tile_stored(3, c + 16 * c_row + 16, out);
}

/* The same for up to 32 rows and columns; c has room for whole tiles. */
INLINE void some_tiles(
    int64_t rows, int64_t columns, const Part *left, const Part *right, int64_t steps, const REAL *base,
    int64_t base_row, REAL *c, int64_t c_row) {
    if (rows > 16 && columns > 16) four_tiles(1, 1, left, right, steps, base, base_row, c, c_row);
    else if (rows > 16) four_tiles(1, 0, left, right, steps, base, base_row, c, c_row);
    else if (columns > 16) four_tiles(0, 1, left, right, steps, base, base_row, c, c_row);
    else four_tiles(0, 0, left, right, steps, base, base_row, c, c_row);
}
#endif
