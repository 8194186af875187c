/* Products of floats: see `products.h`. Panels are [out / PANEL][in][PANEL]; with PAIRS two inputs of an output lie together;
 * other bfloat16 numbers lie as MIXED: the outputs of two vectors take turns, as a shift and a mask then make floats of them. */

#if PAIRS  /* factors of products: of two inputs each */
typedef __m512bh NAME(Factor);
ALWAYS NAME(Factor) NAME(factor)(const void *w, int j) { return NAME(pairs)((const INPUT *)w + 2 * LANES * j); }
ALWAYS NAME(Factor) NAME(input)(const char *x, int64_t k) { return (__m512bh)_mm512_set1_epi32(((const int *)x)[k]); }
ALWAYS V NAME(add_product)(NAME(Factor) a, NAME(Factor) b, V sum) { return _mm512_dpbf16_ps(sum, a, b); }
#else
typedef V NAME(Factor);
ALWAYS V NAME(factor)(const void *w, int j) {  /* the j-th of a step's vectors */
    if (!MIXED) return NAME(load)(w, LANES * j, FORMAT);
    NAME(Words) both = *(const NAME(Both) *)((const STORED *)w + j / 2 * 2 * LANES);
    return (V)(j % 2 ? both & 0xffff0000 : both << 16);
}
ALWAYS V NAME(input)(const char *x, int64_t k) { return SET(((const float *)x)[k]); }
ALWAYS V NAME(add_product)(V a, V b, V sum) { return FMA(a, b, sum); }
#endif

ALWAYS int64_t NAME(inputs_of)(const Matrix *matrix) { return matrix->in; }
ALWAYS int64_t NAME(row_bytes)(int64_t in) { return in * (int64_t)sizeof(INPUT); }
ALWAYS int64_t NAME(step_bytes)(const Matrix *matrix) { return (void)matrix, STEP; }

/* Where in a step's panel the number of output `j` and input `k` of those taken together lies. */
ALWAYS int64_t NAME(place)(int64_t j, int64_t k) {
    if (PAIRS) return 2 * j + k;
    return MIXED ? j / LANES / 2 * 2 * LANES + j % LANES * 2 + j / LANES % 2 : j;
}

static void NAME(pack)(const Matrix *matrix, const Source *source) {
    const STORED *w = source->weight;
    STORED *to = (STORED *)matrix->weight;
    int64_t in = matrix->in;
#pragma omp parallel for
    for (int64_t panel = 0; panel < up_to(matrix->out, PANEL) / PANEL; panel++)
        for (int64_t k = 0; k < in; k++)
            for (int64_t j = 0; j < PANEL; j++) {
                int64_t row = row_of(matrix, source, panel, j, PANEL);
                STORED *place = to + (panel * in + k / TAKEN * TAKEN) * PANEL + NAME(place)(j, k % TAKEN);
                *place = row < 0 ? 0 : w[row * in + k];
            }
}

/* `count` rows by `wide` vectors of a panel, in registers. */
ALWAYS void NAME(tile)(const int count, const int wide, const NAME(Part) *part) {
    const char *x = part->x, *next = part->next;
    const STORED *w = part->w;
    int64_t stride = part->stride, bytes = part->bytes, steps = part->steps;
    V sum[TILE][WIDE];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) sum[i][j] = part->kept[i * WIDE + j];
    for (int64_t k = 0; k < steps; k++, w += TAKEN * PANEL, next += bytes) {
        NAME(Factor) b[WIDE];
        for (int j = 0; j < wide; j++) b[j] = NAME(factor)(w, j);
        for (int j = 0; j < STEP; j += 64) _mm_prefetch(next + j, _MM_HINT_T0);
#pragma GCC unroll 6
        for (int i = 0; i < count; i++) {
            NAME(Factor) a = NAME(input)(x + i * stride, k);
            for (int j = 0; j < wide; j++) sum[i][j] = NAME(add_product)(a, b[j], sum[i][j]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) part->kept[i * WIDE + j] = sum[i][j];
}

#if TILES  /* sixteen rows by a panel; where inputs leave no part of a tile over, which all widths of published models do */
ALWAYS int NAME(by_tiles)(const Matrix *matrix) { return matrix->in % (DEEP / 2) == 0; }

static void NAME(add_tiles)(int64_t count, const NAME(Part) *part) {
    (void)count;  /* of rows beyond it nothing is kept */
    const char *x = part->x, *w = (const char *)part->w, *next = part->next;
    enum { BESIDE = WIDE * sizeof(V) };  /* bytes from a row's sums to the next row's */
    char *kept = (char *)part->kept;
    tiles_see_memory();
    tile_load(0, kept, BESIDE); tile_load(1, kept + 64, BESIDE); tile_load(2, kept + 128, BESIDE); tile_load(3, kept + 192, BESIDE);
    for (int64_t k = 0; k < part->steps; k += 16, x += 64, w += 16 * STEP, next += 16 * part->bytes) {
        for (int64_t j = 0; j < 16 * part->bytes; j += 64) _mm_prefetch(next + j, _MM_HINT_T0);
        tile_load(4, x, part->stride);
        tile_load(5, w, STEP); tile_bf16(0, 4, 5);
        tile_load(6, w + 64, STEP); tile_bf16(1, 4, 6);
        tile_load(7, w + 128, STEP); tile_bf16(2, 4, 7);
        tile_load(5, w + 192, STEP); tile_bf16(3, 4, 5);
    }
    tile_store(0, kept, BESIDE); tile_store(1, kept + 64, BESIDE); tile_store(2, kept + 128, BESIDE); tile_store(3, kept + 192, BESIDE);
}
#else
ALWAYS int NAME(by_tiles)(const Matrix *matrix) { return (void)matrix, 0; }
#endif
