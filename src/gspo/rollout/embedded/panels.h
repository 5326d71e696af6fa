/* Products of few rows with a weight that is read once.

   A weight (outputs, inputs) is packed in panels of PANEL outputs, each panel (inputs, PANEL) without gaps, the last one
   filled up with zeros. A tile of up to ROWS rows times one panel lives in registers. Every output is one chain of fused
   multiply-adds over the inputs in their order, whatever the number of rows, so a row's result depends neither on the
   other rows nor on the threads. While the rows of a call pass over one panel, the next panel is fetched into the cache. */

#ifndef GSPO_PANELS_H
#define GSPO_PANELS_H

#include "real.h"

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define ROWS 12 /* 24 of 32 registers hold sums */
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#define ROWS 6 /* 12 of 16 */
#else
#define VECTOR_BYTES 16
#ifdef __aarch64__
#define ROWS 12
#else
#define ROWS 6
#endif
#endif

#define LANES ((int64_t)(VECTOR_BYTES / sizeof(REAL)))
#define PANEL (2 * LANES)
#define LINE 64    /* bytes that memory delivers at once */
#define STRETCH 16 /* inputs between two looks at what to fetch */

typedef REAL vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

INLINE vector load(const REAL *from) { return *(const vector *)from; }
INLINE void store(REAL *to, vector x) { *(vector *)to = x; }
INLINE vector spread(REAL x) { return x - (vector){0}; }

/* Bytes of the next panel, to be fetched during one tile. */
typedef struct {
    const char *from;
    int64_t size;
} Fetch;

/* sums[r] = a[r] . panel for `rows` rows, which is a constant where this is inlined. */
INLINE void tile_of(const int rows, const REAL *const *a, const REAL *panel, int64_t depth, Fetch fetch, REAL *sums) {
    vector left[ROWS], right[ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) left[r] = right[r] = (vector){0};
    const int64_t stretches = (depth + STRETCH - 1) / STRETCH;
    const int64_t share = stretches ? (fetch.size / stretches + LINE - 1) / LINE * LINE : 0;
    for (int64_t from = 0; from < depth; from += STRETCH) {
        const int64_t to = from + STRETCH < depth ? from + STRETCH : depth;
        for (int64_t line = 0; line < share; line += LINE) __builtin_prefetch(fetch.from + line, 0, 2);
        fetch.from += share;
        for (int64_t k = from; k < to; k++) {
            const vector first = load(panel + k * PANEL), second = load(panel + k * PANEL + LANES);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const vector x = spread(a[r][k]);
                left[r] += x * first;
                right[r] += x * second;
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        store(sums + r * PANEL, left[r]);
        store(sums + r * PANEL + LANES, right[r]);
    }
}

static void tile(int64_t rows, const REAL *const *a, const REAL *panel, int64_t depth, Fetch fetch, REAL *sums) {
    switch (rows) {
#define CASE(n)                                    \
    case n:                                        \
        tile_of(n, a, panel, depth, fetch, sums); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* What becomes of the sums of a row. */
enum Finish {
    STORE, /* out = sums + bias */
    ADD,   /* out += sums + bias */
    GATE,  /* out = silu(gates) * ups, where a panel is LANES gates and then LANES ups */
};

/* A packed weight. width: outputs after the finish. bias: NULL or one number per output, not for GATE. */
typedef struct {
    const REAL *panels, *bias;
    int64_t depth, width;
} Weight;

static inline void finish_row(
    enum Finish finish, const REAL *restrict sums, const REAL *restrict bias, int64_t columns, REAL *restrict out) {
    if (finish == GATE) {
#pragma omp simd
        for (int64_t j = 0; j < columns; j++)
            out[j] = sums[j] / ((REAL)1 + exponential(-sums[j])) * sums[LANES + j];
        return;
    }
    for (int64_t j = 0; j < columns; j++)
        out[j] = (finish == ADD ? out[j] : (REAL)0) + (sums[j] + (bias ? bias[j] : (REAL)0));
}

static inline int64_t columns_of(enum Finish finish) { return finish == GATE ? LANES : PANEL; }

static inline int64_t panels_of(const Weight *weight, enum Finish finish) {
    return (weight->width + columns_of(finish) - 1) / columns_of(finish);
}

/* Rows first..last-1 of out (rows, width) for one panel. Row i of the product is row from[i] of a; from NULL: row i. */
static void rows_of_panel(
    const REAL *a, const int64_t *from, int64_t first, int64_t last, const Weight *weight, int64_t panel,
    enum Finish finish, REAL *out) {
    const int64_t size = weight->depth * PANEL, rows = last - first, blocks = (rows + ROWS - 1) / ROWS;
    const int64_t start = panel * columns_of(finish), left = weight->width - start;
    const REAL *numbers = weight->panels + panel * size;
    const char *next = (const char *)(numbers + size);
    const int64_t fetched = size * (int64_t)sizeof(REAL) / (blocks ? blocks : 1);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t top = first + rows * b / blocks, count = first + rows * (b + 1) / blocks - top;
        const REAL *pointers[ROWS];
        REAL sums[ROWS * PANEL] __attribute__((aligned(VECTOR_BYTES)));
        for (int64_t r = 0; r < count; r++) pointers[r] = a + (from ? from[top + r] : top + r) * weight->depth;
        tile(count, pointers, numbers, weight->depth, (Fetch){next + fetched * b / LINE * LINE, fetched}, sums);
        for (int64_t r = 0; r < count; r++)
            finish_row(
                finish, sums + r * PANEL, weight->bias ? weight->bias + start : NULL,
                left < columns_of(finish) ? left : columns_of(finish), out + (top + r) * weight->width + start);
    }
}

/* out (rows, width) from a (rows, depth). Threads share panels, and rows too where there are few panels. */
static void product(const REAL *a, int64_t rows, const Weight *weight, enum Finish finish, REAL *out) {
    const int64_t panels = panels_of(weight, finish), blocks = (rows + ROWS - 1) / ROWS;
    const int64_t wanted = (4 * omp_get_max_threads() + panels - 1) / panels;
    const int64_t chunks = omp_get_max_threads() == 1 || wanted < 1 ? 1 : wanted < blocks ? wanted : blocks;
#pragma omp parallel for schedule(static) if (rows * weight->depth * weight->width > 8 * PARALLEL_FROM)
    for (int64_t task = 0; task < panels * chunks; task++) {
        const int64_t chunk = task % chunks;
        rows_of_panel(
            a, NULL, rows * chunk / chunks, rows * (chunk + 1) / chunks, weight, task / chunks, finish, out);
    }
}

/* Packs weight (outputs, inputs) of the given row stride; with `ups` of the same shape in panels for GATE. */
void pack(const REAL *weight, const REAL *ups, int64_t stride, int64_t outputs, int64_t inputs, REAL *panels) {
    const int64_t columns = columns_of(ups ? GATE : STORE), count = (outputs + columns - 1) / columns;
#pragma omp parallel for schedule(static) if (outputs * inputs > PARALLEL_FROM)
    for (int64_t panel = 0; panel < count; panel++)
        for (int64_t from = 0; from < inputs; from += STRETCH) {
            const int64_t to = from + STRETCH < inputs ? from + STRETCH : inputs;
            for (int64_t j = 0; j < PANEL; j++) {
                const int64_t row = panel * columns + (ups ? j % LANES : j);
                const REAL *source = (ups && j >= LANES ? ups : weight) + row * stride;
                REAL *target = panels + panel * inputs * PANEL + j;
                for (int64_t k = from; k < to; k++) target[k * PANEL] = row < outputs ? source[k] : (REAL)0;
            }
        }
}
#endif
