/* Attention of the sequences of a packed row, forward and backward, in blocks whose scores stay in the cache.

   A sequence is a stretch of queries that attends causally to its own keys and before that to all keys of a prompt that
   it shares with others. Queries, keys and values are (tokens, heads, size) with rows a given stride apart, so that they
   may be parts of one projection. size is a multiple of BLOCK_LANES.
   Source of the backward pass in blocks: arXiv 2205.14135, section 3; here with log-sum-exps over both stretches. */

#ifndef GSPO_ATTENTION_H
#define GSPO_ATTENTION_H

#include "products.h"

#define QUERIES 36 /* rows of a block of scores, whole tiles */
#define KEYS 64    /* its columns */

typedef struct {
    int64_t start, length, prompt, prompt_length;
} Sequence;

typedef struct {
    const REAL *numbers;
    int64_t stride; /* between tokens */
} Heads;

/* numbers (count, size), `stride` apart -> (size, KEYS), columns from count on zero. */
static void transpose(const REAL *numbers, int64_t stride, int64_t count, int64_t size, REAL *to) {
    for (int64_t d = 0; d < size; d++)
        for (int64_t j = count; j < KEYS; j++) to[d * KEYS + j] = 0;
    for (int64_t d0 = 0; d0 < size; d0 += 16)
        for (int64_t j = 0; j < count; j++)
            for (int64_t d = d0; d < d0 + 16 && d < size; d++) to[d * KEYS + j] = numbers[j * stride + d];
}

/* One block of keys: which tokens, and how many of them query i of the sequence sees. */
typedef struct {
    int64_t token, count, place; /* place: of the first key among the sequence's own; -1 for keys of the prompt */
} Keys;

static int64_t num_blocks(const Sequence *s) {
    return (s->prompt_length + KEYS - 1) / KEYS + (s->length + KEYS - 1) / KEYS;
}

static Keys keys_of(const Sequence *s, int64_t block) {
    const int64_t before = (s->prompt_length + KEYS - 1) / KEYS;
    const int64_t at = (block < before ? block : block - before) * KEYS;
    const int64_t left = (block < before ? s->prompt_length : s->length) - at;
    return (Keys){(block < before ? s->prompt : s->start) + at, left < KEYS ? left : KEYS, block < before ? -1 : at};
}

static inline int64_t seen(const Keys *keys, int64_t query) {
    if (keys->place < 0) return keys->count;
    const int64_t all = query - keys->place + 1;
    return all < 0 ? 0 : all < keys->count ? all : keys->count;
}

/* Queries first..first+rows-1 of one head over all keys of their sequence, with a running maximum. */
static void attend_block(
    const Sequence *s, int64_t first, int64_t rows, const REAL *query, int64_t query_stride, const REAL *transposed,
    const REAL *value, int64_t value_stride, int64_t size, REAL scale, REAL *scores, REAL *sums, REAL *out,
    int64_t out_stride, REAL *lse, int64_t lse_stride) {
    REAL top[QUERIES], total[QUERIES];
    for (int64_t i = 0; i < rows; i++) {
        top[i] = -INFINITY;
        total[i] = 0;
    }
    for (int64_t block = 0; block < num_blocks(s); block++) {
        const Keys keys = keys_of(s, block);
        const int64_t count = seen(&keys, first + rows - 1);
        if (!count) break;
        block_product(
            rows, count, size, (Matrix){query, query_stride, 1}, transposed + block * size * KEYS, KEYS, scores, KEYS, 0);
        for (int64_t i = 0; i < rows; i++) {
            REAL *x = scores + i * KEYS, highest = top[i], sum = 0;
            const int64_t known = seen(&keys, first + i);
            for (int64_t j = known; j < count; j++) x[j] = 0;
            if (!known) continue;
#pragma omp simd reduction(max : highest)
            for (int64_t j = 0; j < known; j++) {
                x[j] *= scale;
                highest = x[j] > highest ? x[j] : highest;
            }
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < known; j++) {
                x[j] = exponential(x[j] - highest);
                sum += x[j];
            }
            if (block) {
                const REAL keep = exponential(top[i] - highest);
                if (keep != (REAL)1)
#pragma omp simd
                    for (int64_t d = 0; d < size; d++) sums[i * size + d] *= keep;
                total[i] *= keep;
            }
            total[i] += sum;
            top[i] = highest;
        }
        block_product(
            rows, size, count, (Matrix){scores, KEYS, 1}, value + keys.token * value_stride, value_stride, sums, size,
            block > 0);
    }
    for (int64_t i = 0; i < rows; i++) {
        const REAL factor = (REAL)1 / total[i];
#pragma omp simd
        for (int64_t d = 0; d < size; d++) out[i * out_stride + d] = sums[i * size + d] * factor;
        lse[i * lse_stride] = top[i] + (REAL)log((double)total[i]);
    }
}

/* out (tokens, query_heads, size) and lse (tokens, query_heads) of every sequence. */
void attend(
    const REAL *query, int64_t query_stride, const REAL *key, int64_t key_stride, const REAL *value,
    int64_t value_stride, const Sequence *sequences, int64_t count, int64_t query_heads, int64_t key_heads, int64_t size,
    REAL scale, REAL *out, REAL *lse) {
    const int64_t group = query_heads / key_heads;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t n = 0; n < count; n++)
        for (int64_t h = 0; h < key_heads; h++) {
            const Sequence *s = sequences + n;
            const int64_t blocks = num_blocks(s);
            REAL *room = malloc(sizeof(REAL) * (size_t)(blocks * size * KEYS + QUERIES * (KEYS + size)));
            REAL *scores = room + blocks * size * KEYS;
            for (int64_t block = 0; block < blocks; block++) {
                const Keys keys = keys_of(s, block);
                transpose(
                    key + keys.token * key_stride + h * size, key_stride, keys.count, size, room + block * size * KEYS);
            }
            for (int64_t first = 0; first < s->length; first += QUERIES)
                for (int64_t head = h * group; head < (h + 1) * group; head++) {
                    const int64_t token = s->start + first;
                    attend_block(
                        s, first, s->length - first < QUERIES ? s->length - first : QUERIES,
                        query + token * query_stride + head * size, query_stride, room, value + h * size, value_stride,
                        size, scale, scores, scores + QUERIES * KEYS, out + (token * query_heads + head) * size,
                        query_heads * size, lse + token * query_heads + head, query_heads);
                }
            free(room);
        }
}

/* What the backward pass of one key head reads and writes; pointers are those of its first entry of token 0. */
typedef struct {
    Heads query, key, value, grad, grad_query, grad_key, grad_value; /* numbers of the last three are written */
    const REAL *lse, *delta;
    int64_t heads, group, size; /* query heads of a token, query heads of the key head */
    REAL scale, *room;
} Backward;

/* Adds what one block of queries of one head gives through one block of keys. */
static void backward_block(
    const Backward *b, const Sequence *s, const Keys *keys, int64_t first, int64_t rows, int64_t head, int add) {
    const int64_t size = b->size, token = s->start + first, count = seen(keys, first + rows - 1);
    const REAL *query = b->query.numbers + token * b->query.stride + head * size;
    const REAL *grad = b->grad.numbers + token * b->grad.stride + head * size;
    REAL *weights = b->room + 2 * size * KEYS, *slopes = weights + QUERIES * KEYS;
    block_product(rows, count, size, (Matrix){query, b->query.stride, 1}, b->room, KEYS, weights, KEYS, 0);
    block_product(rows, count, size, (Matrix){grad, b->grad.stride, 1}, b->room + size * KEYS, KEYS, slopes, KEYS, 0);
    for (int64_t i = 0; i < rows; i++) {
        REAL *p = weights + i * KEYS, *ds = slopes + i * KEYS;
        const int64_t known = seen(keys, first + i);
        const REAL lse = b->lse[(token + i) * b->heads + head], delta = b->delta[(token + i) * b->heads + head];
#pragma omp simd
        for (int64_t j = 0; j < known; j++) {
            p[j] = exponential(p[j] * b->scale - lse);
            ds[j] = p[j] * (ds[j] - delta) * b->scale;
        }
        for (int64_t j = known; j < count; j++) p[j] = ds[j] = 0;
    }
    const Heads *k = &b->key;
    block_product(
        count, size, rows, (Matrix){weights, 1, KEYS}, grad, b->grad.stride,
        (REAL *)b->grad_value.numbers + keys->token * b->grad_value.stride, b->grad_value.stride, 1);
    block_product(
        count, size, rows, (Matrix){slopes, 1, KEYS}, query, b->query.stride,
        (REAL *)b->grad_key.numbers + keys->token * b->grad_key.stride, b->grad_key.stride, 1);
    block_product(
        rows, size, count, (Matrix){slopes, KEYS, 1}, k->numbers + keys->token * k->stride, k->stride,
        (REAL *)b->grad_query.numbers + token * b->grad_query.stride + head * size, b->grad_query.stride, add);
}

static void backward_sequence(const Backward *b, const Sequence *s) {
    const int64_t size = b->size;
    for (int64_t j = s->start; j < s->start + s->length; j++)
        for (int64_t d = 0; d < size; d++) {
            ((REAL *)b->grad_key.numbers)[j * b->grad_key.stride + d] = 0;
            ((REAL *)b->grad_value.numbers)[j * b->grad_value.stride + d] = 0;
        }
    for (int64_t block = 0; block < num_blocks(s); block++) {
        const Keys keys = keys_of(s, block);
        transpose(b->key.numbers + keys.token * b->key.stride, b->key.stride, keys.count, size, b->room);
        transpose(
            b->value.numbers + keys.token * b->value.stride, b->value.stride, keys.count, size, b->room + size * KEYS);
        const int64_t from = keys.place < 0 ? 0 : keys.place / QUERIES * QUERIES;
        for (int64_t first = from; first < s->length; first += QUERIES)
            for (int64_t head = 0; head < b->group; head++) {
                const int64_t rows = s->length - first < QUERIES ? s->length - first : QUERIES;
                backward_block(b, s, &keys, first, rows, head, block > 0);
            }
    }
}

/* Gradients of queries, keys and values, given those of `out`. groups (num_groups + 1): first sequence of each group;
   a prompt stands before the sequences that share it, and one thread adds up their gradients in order. */
void attend_backward(
    const REAL *grad, const REAL *query, int64_t query_stride, const REAL *key, int64_t key_stride, const REAL *value,
    int64_t value_stride, const REAL *out, const REAL *lse, const Sequence *sequences, const int64_t *groups,
    int64_t num_groups, int64_t query_heads, int64_t key_heads, int64_t size, REAL scale, REAL *delta, REAL *grad_query,
    int64_t grad_query_stride, REAL *grad_key, int64_t grad_key_stride, REAL *grad_value, int64_t grad_value_stride) {
    const int64_t group = query_heads / key_heads;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t n = 0; n < num_groups; n++)
        for (int64_t h = 0; h < key_heads; h++) {
            const int64_t head = h * group;
            REAL *room = malloc(sizeof(REAL) * (size_t)(2 * KEYS * (size + QUERIES)));
            const Backward b = {
                {query + head * size, query_stride}, {key + h * size, key_stride}, {value + h * size, value_stride},
                {grad + head * size, query_heads * size}, {grad_query + head * size, grad_query_stride},
                {grad_key + h * size, grad_key_stride}, {grad_value + h * size, grad_value_stride}, lse + head,
                delta + head, query_heads, group, size, scale, room};
            for (int64_t s = groups[n]; s < groups[n + 1]; s++) {
                for (int64_t i = sequences[s].start; i < sequences[s].start + sequences[s].length; i++)
                    for (int64_t at = i * query_heads + head; at < i * query_heads + head + group; at++) {
                        REAL dot = 0;
#pragma omp simd reduction(+ : dot)
                        for (int64_t d = 0; d < size; d++) dot += grad[at * size + d] * out[at * size + d];
                        delta[at] = dot;
                    }
                backward_sequence(&b, sequences + s);
            }
            free(room);
        }
}
#endif
