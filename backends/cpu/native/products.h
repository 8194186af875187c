/* Products of rows with a packed matrix: some rows and some inputs of a panel at a time, by `floats.h` or `integers.h`. */

/* Some rows and inputs of one panel: what their products need, and the sums they are added to. */
typedef struct {
    const char *x;         /* of the first row, in the form that products take */
    int64_t stride;        /* bytes from row to row */
    const STORED *w;       /* from the first vector of outputs that takes part */
    int64_t steps;         /* of TAKEN inputs */
    V *kept;               /* [rows, WIDE] */
    const char *next;      /* what is fetched meanwhile, and by how many bytes further at each step */
    int64_t bytes;
    const char *row_scale; /* of integers: of the first row, `stride` apart */
    const float *scale;    /* [groups, PANEL], from the first vector on */
    int64_t group;         /* steps that share a scale */
} NAME(Part);

#if SMALL
#include "integers.h"
#else
#include "floats.h"
#endif

#define TILE_OF(count) case count: NAME(tile)(count, AT_ONCE(count), part); break;
static void NAME(add_part)(int64_t count, const NAME(Part) *part) {
    switch (count) {
        TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
    }
}
#undef TILE_OF

/* One vector of sums of a row, from output `first` on; of the last panel those beyond the outputs are dropped. */
static inline void NAME(keep)(const Sink *sink, const Matrix *matrix, int64_t row, int64_t first, V sum) {
    int64_t count = least(LANES, matrix->out - first), bytes = bytes_of(sink->format);
    if (count <= 0) return;
    float edge[LANES];
    void *y = (char *)sink->y + (row * matrix->out + first) * bytes;
    void *to = count < LANES ? memcpy(edge, y, (size_t)(count * bytes)) : y;
    if (matrix->bias) sum += LOAD(matrix->bias + first);
    if (sink->kind == ADDED) sum += NAME(load)(to, 0, sink->format);
    NAME(store)(to, 0, sink->format, sum);
    if (count < LANES) memcpy(y, edge, (size_t)(count * bytes));
}

/* A row's sums of one panel to where they go. */
static void NAME(put)(const Sink *sink, const Matrix *matrix, int64_t row, int64_t panel, const V *sum) {
    INPUT *gated = (INPUT *)sink->y + row * (matrix->out / 2) + panel * (PANEL / 2);
    if (sink->kind == GATED)
        for (int j = 0; j < WIDE / 2; j++) STORE_INPUT(gated, LANES * j, NAME(silu)(sum[j]) * sum[j + WIDE / 2]);
    else
        for (int j = 0; j < WIDE; j++) NAME(keep)(sink, matrix, row, panel * PANEL + LANES * j, sum[j]);
}

/* Add the products of `some` rows with inputs from `k` on of a panel to their sums.
 *
 * Weights are read from the nearest cache but once. What follows comes from memory meanwhile: for one part some bytes
 * ahead, for several a share of the next inputs with each, as memory would be idle while they multiply. */
static void NAME(add_inputs)(const char *x, int64_t some, const Matrix *matrix, int64_t panel, int64_t k, V *sums) {
    const int tiled = NAME(by_tiles)(matrix);
    int64_t in = NAME(inputs_of)(matrix), read = NAME(step_bytes)(matrix), stride = NAME(row_bytes)(matrix->in);
    int64_t tile = tiled ? ROWS_OF_TILE : TILE, wide = tiled ? WIDE : AT_ONCE(some);
    int64_t tiles = (some + tile - 1) / tile, parts = tiles * WIDE / wide, share = (read + parts - 1) / parts;
    const char *memory = (const char *)matrix->weight + (panel * in + k) / TAKEN * read;
    NAME(Part) whole = {.stride = stride, .steps = least(STEPS, (in - k) / TAKEN), .w = (const STORED *)memory, .bytes = share};
#if SMALL
    uint8_t room[SCALED * PANEL] __attribute__((aligned(64)));
    NAME(describe)(matrix, panel, k, x, room, &whole);
#endif
    for (int64_t n = 0; n < parts; n++) {
        int64_t t = n % tiles, vector = n / tiles * wide;
        int64_t row = tiled ? t * tile : some * t / tiles, end = tiled ? least(row + tile, some) : some * (t + 1) / tiles;
        NAME(Part) part = whole;
        part.x = x + row * stride + k * INPUT_BYTES;
        part.w += TAKEN * LANES * vector;
        part.kept = sums + row * WIDE + vector;
        part.next = memory + (parts == 1 && read == STEP ? NEAR / 4 : STEPS * (read + n * share));
#if SMALL
        part.row_scale += row * stride;
        part.scale += LANES * vector;
#endif
#if TILES
        if (tiled) NAME(add_tiles)(end - row, &part);
        else
#endif
        NAME(add_part)(end - row, &part);
    }
}

/* x [rows, in] by the panels of each thread of a team. */
static void NAME(multiply)(const void *x, int64_t rows, const Matrix *matrix, const Sink *sink) {
    int64_t in = NAME(inputs_of)(matrix), stride = NAME(row_bytes)(matrix->in);
    V sums[SHARING][WIDE];
#if TILES
    TileSizes sizes = tile_sizes(16, SMALL && matrix->group ? (int)least(matrix->group, DEEP) : DEEP);
    tiles_configure(&sizes);
#endif
#pragma omp for schedule(static) nowait
    for (int64_t panel = 0; panel < up_to(matrix->out, PANEL) / PANEL; panel++)
        for (int64_t first = 0, some; first < rows; first += some) {
            some = least(SHARING, rows - first);
            memset(sums, 0, (size_t)some * sizeof(sums[0]));
            for (int64_t k = 0; k < in; k += STEPS * TAKEN)
                NAME(add_inputs)((const char *)x + first * stride, some, matrix, panel, k, sums[0]);
            for (int64_t row = 0; row < some; row++) NAME(put)(sink, matrix, first + row, panel, sums[row]);
        }
#if TILES
    tiles_release();
#endif
}
