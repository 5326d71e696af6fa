/* A mixture of experts, forward and backward: out_i = skip_i + sum_k gate_ik * down[e_ik] (silu(a) * b), where
   [a | b] = gate_up[e_ik] x_i.

   One thread does the whole of an expert, so threads wait for each other once, before the sums over the choices of a
   token. These follow the order of the experts, so no result depends on the threads. */

#ifndef GSPO_EXPERTS_H
#define GSPO_EXPERTS_H

#include "gated.h"

/* A pair is a token's choice of an expert. Pairs have places by expert and in it by token. */
typedef struct {
    int64_t tokens, choices, experts;
    const int64_t *starts; /* the first place of each expert, and at last the number of pairs */
    const int64_t *order;  /* of each place, the pair: token * choices + choice */
    const int64_t *places; /* of the pairs of each token, ascending: (tokens, choices) */
} Pairs;

typedef struct {
    int64_t size, inner; /* H and I */
    const REAL *gate_up; /* (experts, 2 I, H) */
    const REAL *down;    /* (experts, H, I) */
} Weights;

/* Finds the places of pairs by the experts that they choose. 0 if a number is not one of an expert, else 1. */
int64_t place_pairs(
    const int64_t *ids, int64_t tokens, int64_t choices, int64_t experts, int64_t *starts, int64_t *order,
    int64_t *places) {
    const int64_t pairs = tokens * choices;
    memset(starts, 0, sizeof(int64_t) * (size_t)(experts + 1));
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (ids[pair] < 0 || ids[pair] >= experts) return 0;
        starts[ids[pair] + 1]++;
    }
    for (int64_t expert = 0; expert < experts; expert++) starts[expert + 1] += starts[expert];
    int64_t *next = malloc(sizeof(int64_t) * (size_t)(experts + tokens)), *found = next + experts;
    memcpy(next, starts, sizeof(int64_t) * (size_t)experts);
    memset(found, 0, sizeof(int64_t) * (size_t)tokens);
    for (int64_t pair = 0; pair < pairs; pair++) order[next[ids[pair]]++] = pair;
    for (int64_t place = 0; place < pairs; place++) {
        const int64_t token = order[place] / choices;
        places[token * choices + found[token]++] = place;
    }
    free(next);
    return 1;
}

/* Room for rows of the expert with most of them, for one thread. */
static REAL *expert_room(const Pairs *pairs, int64_t width) {
    int64_t most = 0;
    for (int64_t expert = 0; expert < pairs->experts; expert++) {
        const int64_t rows = pairs->starts[expert + 1] - pairs->starts[expert];
        most = rows > most ? rows : most;
    }
    return aligned_alloc(64, (size_t)quotient_up((int64_t)sizeof(REAL) * most * width, 64) * 64);
}

/* to = the rows of x (tokens, size) at some places. */
static void gather(const Pairs *pairs, Span places, const REAL *x, int64_t size, REAL *to) {
    for (int64_t place = places.first; place < places.last; place++, to += size)
        memcpy(to, x + pairs->order[place] / pairs->choices * size, sizeof(REAL) * (size_t)size);
}

/* c (rows, columns) = a b with contiguous c; see Factor. */
static void multiply_whole(Factor a, Factor b, int64_t rows, int64_t columns, int64_t depth, REAL *c) {
    const Product product = {a, b, depth, NULL, 0, c, columns, NULL, NULL, 0};
    multiply_part(&product, (Span){0, rows}, (Span){0, columns});
}

/* out = skip, or 0, plus the rows of the pairs of each token, times their gates unless that is NULL. In a parallel
   region. */
static void sum_pairs(
    const Pairs *pairs, const REAL *rows, const REAL *gates, const REAL *skip, int64_t size, REAL *out) {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < pairs->tokens; token++) {
        REAL *to = out + token * size;
        if (skip) memcpy(to, skip + token * size, sizeof(REAL) * (size_t)size);
        else memset(to, 0, sizeof(REAL) * (size_t)size);
        for (int64_t k = 0; k < pairs->choices; k++) {
            const int64_t place = pairs->places[token * pairs->choices + k];
            const REAL *from = rows + place * size, gate = gates ? gates[pairs->order[place]] : (REAL)1;
#pragma omp simd
            for (int64_t j = 0; j < size; j++) to[j] += gate * from[j];
        }
    }
}

/* projected: [a | b]; outputs: before the gates; both by place. */
static void expert_forward(
    const Pairs *pairs, const Weights *w, int64_t expert, const REAL *hidden, REAL *room, REAL *projected,
    REAL *outputs) {
    const Span places = {pairs->starts[expert], pairs->starts[expert + 1]};
    const int64_t rows = places.last - places.first, size = w->size, inner = w->inner, both = 2 * inner;
    REAL *inputs = room, *activated = inputs + rows * size, *sides = projected + places.first * both;
    gather(pairs, places, hidden, size, inputs);
    const REAL *gate = w->gate_up + expert * both * size;
    gated_part(inputs, gate, gate + inner * size, (Span){0, rows}, (Span){0, inner}, size, inner, sides, activated);
    const Factor down = {w->down + expert * size * inner, inner, 1};
    multiply_whole((Factor){activated, inner, 1}, down, rows, size, inner, outputs + places.first * size);
}

/* gates, hidden, skip (NULL: 0) and result by token; projected, which the backward pass needs, by place. */
void mix_experts(
    int64_t tokens, int64_t choices, int64_t experts, const int64_t *starts, const int64_t *order,
    const int64_t *places, int64_t size, int64_t inner, const REAL *hidden, const REAL *gates, const REAL *gate_up,
    const REAL *down, const REAL *skip, REAL *projected, REAL *result) {
    const Pairs pairs = {tokens, choices, experts, starts, order, places};
    const Weights weights = {size, inner, gate_up, down};
    const int64_t count = tokens * choices;
    REAL *outputs = malloc(sizeof(REAL) * (size_t)(count * size));
#pragma omp parallel if (count * size * inner > PARALLEL_PRODUCTS)
    {
        REAL *room = expert_room(&pairs, size + inner);
#pragma omp for schedule(dynamic, 1)
        for (int64_t expert = 0; expert < experts; expert++)
            if (starts[expert] < starts[expert + 1])
                expert_forward(&pairs, &weights, expert, hidden, room, projected, outputs);
        free(room);
        sum_pairs(&pairs, outputs, gates, skip, size, result);
    }
    free(outputs);
}

/* Backward of gate * (silu(a) * b), from the gradient by it WITHOUT the gate: the gated activation and the gradients of
   a and b; returns that of the gate. */
INLINE REAL gated_gradient(
    const REAL *grad, const REAL *a, const REAL *b, REAL gate, int64_t size, REAL *to, REAL *to_a, REAL *to_b) {
    REAL dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < size; j++) {
        const REAL sigmoid = (REAL)1 / ((REAL)1 + exponential(-a[j])), silu = a[j] * sigmoid;
        const REAL slope = sigmoid * ((REAL)1 + a[j] * ((REAL)1 - sigmoid)), given = gate * grad[j];
        dot += grad[j] * (silu * b[j]);
        to[j] = gate * (silu * b[j]);
        to_b[j] = given * silu;
        to_a[j] = given * b[j] * slope;
    }
    return dot;
}

/* What the backward pass reads besides the weights, and what it writes. */
typedef struct {
    const REAL *grad, *hidden, *projected, *gates;
    REAL *grad_inputs; /* by place */
    REAL *grad_gate_up, *grad_down, *grad_gates;
} Gradients;

static void expert_backward(const Pairs *pairs, const Weights *w, const Gradients *g, int64_t expert, REAL *room) {
    const Span places = {pairs->starts[expert], pairs->starts[expert + 1]};
    const int64_t rows = places.last - places.first, size = w->size, inner = w->inner, both = 2 * inner;
    REAL *inputs = room, *upstream = inputs + rows * size, *activated = upstream + rows * size;
    REAL *grad_activated = activated + rows * inner, *grad_sides = grad_activated + rows * inner;
    const REAL *sides = g->projected + places.first * both;
    gather(pairs, places, g->hidden, size, inputs);
    gather(pairs, places, g->grad, size, upstream);
    const int64_t up_at = expert * both * size, down_at = expert * size * inner;
    const Factor down = {w->down + down_at, 1, inner}, gate_up = {w->gate_up + up_at, 1, size};
    multiply_whole((Factor){upstream, size, 1}, down, rows, inner, size, grad_activated);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t pair = pairs->order[places.first + i];
        const REAL *a = sides + i * both;
        REAL *to_a = grad_sides + i * both;
        g->grad_gates[pair] = gated_gradient(
            grad_activated + i * inner, a, a + inner, g->gates[pair], inner, activated + i * inner, to_a, to_a + inner);
    }
    const Factor turned = {upstream, 1, size}, sides_turned = {grad_sides, 1, both};
    multiply_whole(turned, (Factor){activated, 1, inner}, size, inner, rows, g->grad_down + down_at);
    multiply_whole(sides_turned, (Factor){inputs, 1, size}, both, size, rows, g->grad_gate_up + up_at);
    multiply_whole((Factor){grad_sides, both, 1}, gate_up, rows, size, both, g->grad_inputs + places.first * size);
}

/* The gradients of weights of experts without tokens are 0. */
void mix_experts_backward(
    int64_t tokens, int64_t choices, int64_t experts, const int64_t *starts, const int64_t *order,
    const int64_t *places, int64_t size, int64_t inner, const REAL *grad, const REAL *hidden, const REAL *projected,
    const REAL *gates, const REAL *gate_up, const REAL *down, REAL *grad_hidden, REAL *grad_gates, REAL *grad_gate_up,
    REAL *grad_down) {
    const Pairs pairs = {tokens, choices, experts, starts, order, places};
    const Weights weights = {size, inner, gate_up, down};
    const int64_t count = tokens * choices;
    REAL *grad_inputs = malloc(sizeof(REAL) * (size_t)(count * size));
    const Gradients gradients = {grad, hidden, projected, gates, grad_inputs, grad_gate_up, grad_down, grad_gates};
#pragma omp parallel if (count * size * inner > PARALLEL_PRODUCTS)
    {
        REAL *room = expert_room(&pairs, 2 * size + 4 * inner);
#pragma omp for schedule(dynamic, 1)
        for (int64_t expert = 0; expert < experts; expert++) {
            if (starts[expert] < starts[expert + 1]) {
                expert_backward(&pairs, &weights, &gradients, expert, room);
                continue;
            }
            memset(grad_gate_up + expert * 2 * inner * size, 0, sizeof(REAL) * (size_t)(2 * inner * size));
            memset(grad_down + expert * size * inner, 0, sizeof(REAL) * (size_t)(size * inner));
        }
        free(room);
        sum_pairs(&pairs, grad_inputs, NULL, NULL, size, grad_hidden);
    }
    free(grad_inputs);
}
#endif
