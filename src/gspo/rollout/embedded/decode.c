/* One decoding step of a known decoder: every layer's norms, products, attention and gates, for the running rows.

   decoder.py lays the weights out and mirrors the structures below, field by field. Arrays are row-major. All threads
   are those of the caller's OpenMP runtime; no result depends on their number or on the other rows of a step. */

#include "choose.h"
#include "pages.h"

enum Kind {
    GATED,   /* down(silu(gate x) * up x) */
    MIXTURE, /* the weighted sum of what a router chooses */
    FOREIGN, /* computed by the caller */
};

typedef struct {
    const REAL *input_norm, *query_norm, *key_norm, *mlp_norm; /* query_norm, key_norm: NULL where heads are not normed */
    Weight projection, output, router, gate_up, down;          /* a mixture's experts follow each other */
    double input_eps, query_eps, key_eps, mlp_eps, scale;
    int64_t window; /* 0: none */
    int64_t kind, experts, choices;
    int64_t normalised; /* the gates of a token add up to 1 */
} Layer;

/* The rows of a step and what it computes for them. */
typedef struct {
    int64_t rows, size, table_width;
    Heads heads;
    const int64_t *positions, *prompts, *table; /* by row; table (rows, table_width): addresses of pages */
    const REAL *cosine, *sine;                  /* (positions, head size) */
    REAL *hidden, *normed, *projected, *attended, *activated, *scores, *mixed;
    REAL *gates;                                      /* (rows, choices) */
    int64_t *routes;                                  /* (mixtures, rows, choices): the experts of every token */
    int64_t *places, *sources, *starts;               /* pairs sorted by expert: (rows, choices), pairs, experts + 1 */
} Step;

static void norm_rows(const REAL *x, const REAL *weight, double eps, int64_t rows, int64_t size, REAL *y) {
#pragma omp parallel for schedule(static) if (rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < rows; i++) {
        const REAL r = inverse_norm(x + i * size, size, (REAL)eps);
#pragma omp simd
        for (int64_t j = 0; j < size; j++) y[i * size + j] = weight[j] * (x[i * size + j] * r);
    }
}

/* Writes the new key and value of row i and key head h, and attends with the queries of that head. */
static void attend_head(const Layer *layer, const Step *step, int64_t index, int64_t i, int64_t h, REAL *scratch) {
    const Heads *heads = &step->heads;
    const int64_t size = heads->size, group = heads->query_heads / heads->key_heads;
    const int64_t position = step->positions[i], prompt = step->prompts[i];
    const int64_t *table = step->table + i * step->table_width;
    const REAL *row = step->projected + i * (heads->query_heads + 2 * heads->key_heads) * size;
    const REAL *cosine = step->cosine + position * size, *sine = step->sine + position * size;
    const int64_t place = position - prompt, newest = table[(prompt + PAGE - 1) / PAGE + place / PAGE];
    REAL *turned = scratch, *rest = scratch + group * size;
    norm_rotate_head(
        row + (heads->query_heads + h) * size, layer->key_norm, (REAL)layer->key_eps, cosine, sine, size, turned);
    write_position(
        part_of(newest, index, h, heads), place % PAGE, size, turned,
        row + (heads->query_heads + heads->key_heads + h) * size);
    for (int64_t g = 0; g < group; g++)
        norm_rotate_head(
            row + (h * group + g) * size, layer->query_norm, (REAL)layer->query_eps, cosine, sine, size,
            turned + g * size);
    Visible *pages = (Visible *)rest;
    const int64_t first = layer->window > 0 && position >= layer->window ? position - layer->window + 1 : 0;
    const int64_t count = visible_pages(table, prompt, first, position, index, h, heads, pages);
    rest = (REAL *)(pages + count);
    REAL *out = step->attended + (i * heads->query_heads + h * group) * size;
    int64_t g = 0;
    for (; g + 2 <= group; g += 2)
        attend_queries(2, turned + g * size, pages, count, size, (REAL)layer->scale, rest, out + g * size);
    if (g < group) attend_queries(1, turned + g * size, pages, count, size, (REAL)layer->scale, rest, out + g * size);
}

static void attention(const Layer *layer, const Step *step, int64_t index) {
    const Heads *heads = &step->heads;
    const int64_t group = heads->query_heads / heads->key_heads, size = heads->size;
    int64_t longest = 0;
    for (int64_t i = 0; i < step->rows; i++) longest = step->positions[i] > longest ? step->positions[i] : longest;
    const int64_t pages = longest / PAGE + 2;
    const size_t bytes = sizeof(REAL) * (size_t)(group * size + 2 * pages * PAGE + 2 * padded(size)) +
                         sizeof(Visible) * (size_t)(pages + 1);
    norm_rows(step->hidden, layer->input_norm, layer->input_eps, step->rows, step->size, step->normed);
    product(step->normed, step->rows, &layer->projection, STORE, step->projected);
#pragma omp parallel if (step->rows * layer->projection.width > PARALLEL_FROM)
    {
        REAL *scratch = malloc(bytes);
#pragma omp for schedule(static) collapse(2)
        for (int64_t i = 0; i < step->rows; i++)
            for (int64_t h = 0; h < heads->key_heads; h++) attend_head(layer, step, index, i, h, scratch);
        free(scratch);
    }
    product(step->attended, step->rows, &layer->output, ADD, step->hidden);
}

/* The largest scores of a row, their experts in falling order, and gates that are softmax over all or over the chosen. */
static void choose_experts(REAL *scores, const Layer *layer, int64_t *experts, REAL *gates) {
    REAL top = -INFINITY, total = 0, chosen = 0;
    for (int64_t e = 0; e < layer->experts; e++) top = scores[e] > top ? scores[e] : top;
    for (int64_t e = 0; e < layer->experts; e++) total += scores[e] = exponential(scores[e] - top);
    for (int64_t k = 0; k < layer->choices; k++) {
        int64_t best = 0;
        for (int64_t e = 1; e < layer->experts; e++) best = scores[e] > scores[best] ? e : best;
        experts[k] = best;
        gates[k] = scores[best];
        chosen += scores[best];
        scores[best] = -1;
    }
    for (int64_t k = 0; k < layer->choices; k++) gates[k] /= layer->normalised ? chosen : total;
}

/* Pairs of token and choice by expert: starts (experts + 1), places of the pairs, tokens in sorted order. */
static void sort_pairs(const Step *step, const int64_t *routes, int64_t experts, int64_t choices) {
    const int64_t pairs = step->rows * choices;
    for (int64_t e = 0; e <= experts; e++) step->starts[e] = 0;
    for (int64_t p = 0; p < pairs; p++) step->starts[routes[p] + 1]++;
    for (int64_t e = 0; e < experts; e++) step->starts[e + 1] += step->starts[e];
    for (int64_t p = 0; p < pairs; p++) {
        step->places[p] = step->starts[routes[p]]++;
        step->sources[step->places[p]] = p / choices;
    }
    for (int64_t e = experts; e > 0; e--) step->starts[e] = step->starts[e - 1];
    step->starts[0] = 0;
}

/* Each expert's product with the rows that chose it. */
static void by_expert(
    const REAL *a, const int64_t *sources, const Step *step, const Weight *first, int64_t experts, enum Finish finish,
    REAL *out) {
    const int64_t panels = panels_of(first, finish);
#pragma omp parallel for schedule(dynamic, 2)
    for (int64_t task = 0; task < experts * panels; task++) {
        const int64_t expert = task / panels;
        Weight weight = *first;
        weight.panels += expert * panels * weight.depth * PANEL;
        rows_of_panel(
            a, sources, step->starts[expert], step->starts[expert + 1], &weight, task % panels, finish, out);
    }
}

static void mixture(const Layer *layer, const Step *step, int64_t *routes) {
    const int64_t choices = layer->choices, size = step->size;
    product(step->normed, step->rows, &layer->router, STORE, step->scores);
    for (int64_t i = 0; i < step->rows; i++)
        choose_experts(step->scores + i * layer->experts, layer, routes + i * choices, step->gates + i * choices);
    sort_pairs(step, routes, layer->experts, choices);
    by_expert(step->normed, step->sources, step, &layer->gate_up, layer->experts, GATE, step->activated);
    by_expert(step->activated, NULL, step, &layer->down, layer->experts, STORE, step->mixed);
#pragma omp parallel for schedule(static) if (step->rows * size > PARALLEL_FROM)
    for (int64_t i = 0; i < step->rows; i++)
        for (int64_t k = 0; k < choices; k++) {
            const REAL gate = step->gates[i * choices + k], *from = step->mixed + step->places[i * choices + k] * size;
#pragma omp simd
            for (int64_t j = 0; j < size; j++) step->hidden[i * size + j] += gate * from[j];
        }
}

/* Layers first..last-1 for the rows of a step. Of a FOREIGN layer the caller adds the MLP of `normed` afterwards. */
void decode_layers(const Layer *layers, int64_t first, int64_t last, const Step *step) {
    int64_t mixtures = 0;
    for (int64_t index = 0; index < first; index++) mixtures += layers[index].kind == MIXTURE;
    for (int64_t index = first; index < last; index++) {
        const Layer *layer = layers + index;
        attention(layer, step, index);
        norm_rows(step->hidden, layer->mlp_norm, layer->mlp_eps, step->rows, step->size, step->normed);
        if (layer->kind == MIXTURE) mixture(layer, step, step->routes + mixtures++ * step->rows * layer->choices);
        if (layer->kind != GATED) continue;
        product(step->normed, step->rows, &layer->gate_up, GATE, step->activated);
        product(step->activated, step->rows, &layer->down, ADD, step->hidden);
    }
}

/* hidden (rows, size) = rows `tokens` of the embedding. */
void embed(const REAL *embedding, const int64_t *tokens, const Step *step) {
    for (int64_t i = 0; i < step->rows; i++)
        for (int64_t j = 0; j < step->size; j++)
            step->hidden[i * step->size + j] = embedding[tokens[i] * step->size + j];
}

/* logits (rows, width of the head) after the final norm. */
void decode_logits(const REAL *norm, double eps, const Weight *head, const Step *step, REAL *logits) {
    norm_rows(step->hidden, norm, eps, step->rows, step->size, step->normed);
    product(step->normed, step->rows, head, STORE, logits);
}

/* Logits of given states (rows, depth of the head), normed already. */
void project(const REAL *states, int64_t rows, const Weight *head, REAL *logits) {
    product(states, rows, head, STORE, logits);
}

int64_t panel_width(void) { return PANEL; }
int64_t page_positions(void) { return PAGE; }
