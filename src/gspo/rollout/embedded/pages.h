/* Keys and values in pages of PAGE positions, and the attention of one new token over the pages of its row.

   Part (layer, head) of a page holds keys as (size, PAGE), so that PAGE scores are computed at once without sums across
   a register, and values as (PAGE, padded size). A row's table lists the pages of its prompt, which the rows of a group
   share, and then those of its response, which begins on a page of its own. */

#ifndef GSPO_PAGES_H
#define GSPO_PAGES_H

#include "panels.h"

#define PAGE 16
#define VECTORS (PAGE / LANES)

/* What is the same for every layer and row. layer_stride: numbers from a part of a page to that of the next layer, so
   that the pages of one layer lie side by side. */
typedef struct {
    int64_t query_heads, key_heads, size, layer_stride;
} Heads;

INLINE int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }
INLINE int64_t part_size(int64_t size) { return PAGE * (size + padded(size)); }
INLINE REAL *part_of(int64_t page, int64_t layer, int64_t head, const Heads *heads) {
    return (REAL *)(intptr_t)page + layer * heads->layer_stride + head * part_size(heads->size);
}

/* Numbers of one layer in a page. */
int64_t page_size(int64_t key_heads, int64_t size) { return key_heads * part_size(size); }

static void write_position(REAL *part, int64_t place, int64_t size, const REAL *key, const REAL *value) {
    for (int64_t d = 0; d < size; d++) part[d * PAGE + place] = key[d];
    REAL *to = part + PAGE * size + place * padded(size);
    for (int64_t d = 0; d < size; d++) to[d] = value[d];
    for (int64_t d = size; d < padded(size); d++) to[d] = 0;
}

/* Copies keys and values (tokens, heads, size) of a prompt to one layer of its pages, which begins `offset` numbers
   after the page. Strides in numbers. */
void keep_prompt(
    const REAL *keys, const REAL *values, int64_t key_stride, int64_t key_head_stride, int64_t value_stride,
    int64_t value_head_stride, int64_t tokens, int64_t offset, int64_t key_heads, int64_t size, const int64_t *pages) {
    const Heads heads = {0, key_heads, size, offset};
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < key_heads; h++)
            write_position(
                part_of(pages[t / PAGE], 1, h, &heads), t % PAGE, size, keys + t * key_stride + h * key_head_stride,
                values + t * value_stride + h * value_head_stride);
}

/* scores (PAGE) of `queries` queries against a page; four chains of sums each. */
INLINE void page_scores(
    const int queries, const REAL *query, int64_t size, const REAL *keys, REAL scale, REAL *scores, int64_t stride) {
    for (int64_t v = 0; v < VECTORS; v++) {
        vector sums[2][4];
        for (int q = 0; q < queries; q++)
            for (int c = 0; c < 4; c++) sums[q][c] = (vector){0};
        int64_t d = 0;
        for (; d + 4 <= size; d += 4)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                const vector key = load(keys + (d + c) * PAGE + v * LANES);
#pragma GCC unroll 2
                for (int q = 0; q < queries; q++) sums[q][c] += spread(query[q * size + d + c]) * key;
            }
        for (; d < size; d++)
            for (int q = 0; q < queries; q++)
                sums[q][0] += spread(query[q * size + d]) * load(keys + d * PAGE + v * LANES);
        for (int q = 0; q < queries; q++)
            store(
                scores + q * stride + v * LANES,
                ((sums[q][0] + sums[q][1]) + (sums[q][2] + sums[q][3])) * spread(scale));
    }
}

/* The positions of a page that a row sees: places from..to-1. */
typedef struct {
    const REAL *part;
    int64_t from, to;
} Visible;

/* out += sum of weights times values over all pages, `vectors` vectors of every head. */
INLINE void weigh(
    const int queries, const int vectors, const REAL *weights, int64_t stride, const Visible *pages, int64_t count,
    int64_t size, int64_t start, REAL *out) {
    vector sums[2][4];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = (vector){0};
    for (int64_t i = 0; i < count; i++) {
        const REAL *values = pages[i].part + PAGE * size + start;
        for (int64_t t = pages[i].from; t < pages[i].to; t++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                const vector value = load(values + t * padded(size) + v * LANES);
#pragma GCC unroll 2
                for (int q = 0; q < queries; q++) sums[q][v] += spread(weights[q * stride + i * PAGE + t]) * value;
            }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) store(out + q * padded(size) + start + v * LANES, sums[q][v]);
}

/* Weights of one query from its scores: e^(score - largest) where visible, 0 elsewhere; returns their sum. */
static REAL to_weights(REAL *scores, const Visible *pages, int64_t count) {
    REAL top = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; i++)
        for (int64_t t = pages[i].from; t < pages[i].to; t++)
            top = scores[i * PAGE + t] > top ? scores[i * PAGE + t] : top;
    for (int64_t i = 0; i < count; i++) {
        REAL *part = scores + i * PAGE;
#pragma omp simd
        for (int64_t t = 0; t < PAGE; t++) part[t] = exponential(part[t] - top);
        for (int64_t t = pages[i].from; t < pages[i].to; t++) total += part[t];
    }
    return total;
}

/* `queries` queries (1 or 2) over the pages; scratch: scores (2, count PAGE) and sums (2, padded size). */
INLINE void attend_queries(
    const int queries, const REAL *query, const Visible *pages, int64_t count, int64_t size, REAL scale, REAL *scratch,
    REAL *out) {
    REAL *scores = scratch, *sums = scratch + 2 * count * PAGE, totals[2];
    for (int64_t i = 0; i < count; i++)
        page_scores(queries, query, size, pages[i].part, scale, scores + i * PAGE, count * PAGE);
    for (int q = 0; q < queries; q++) totals[q] = to_weights(scores + q * count * PAGE, pages, count);
    int64_t start = 0;
    for (; start + 4 * LANES <= padded(size); start += 4 * LANES)
        weigh(queries, 4, scores, count * PAGE, pages, count, size, start, sums);
    for (; start < padded(size); start += LANES)
        weigh(queries, 1, scores, count * PAGE, pages, count, size, start, sums);
    for (int q = 0; q < queries; q++)
        for (int64_t d = 0; d < size; d++) out[q * size + d] = sums[q * padded(size) + d] / totals[q];
}

/* The pages that a token sees: positions first..position of a row whose prompt has `prompt` tokens. */
static int64_t visible_pages(
    const int64_t *table, int64_t prompt, int64_t first, int64_t position, int64_t layer, int64_t head,
    const Heads *heads, Visible *pages) {
    int64_t count = 0;
    const int64_t prompt_pages = (prompt + PAGE - 1) / PAGE, ends[2] = {prompt, position + 1};
    for (int64_t part = 0, begin = 0, index = 0; part < 2; begin = prompt, index = prompt_pages, part++)
        for (int64_t at = begin; at < ends[part]; at += PAGE, index++) {
            const int64_t from = first > at ? first - at : 0;
            const int64_t to = ends[part] - at < PAGE ? ends[part] - at : PAGE;
            if (from < to) pages[count++] = (Visible){part_of(table[index], layer, head, heads), from, to};
        }
    return count;
}
#endif
