/* Products of numbers of 8 or 4 bits: exact integers, see `products.h`. The twin is `integer_product` of tests/test_integers.py.
 *
 * A row of inputs becomes fixed point: of each SCALED inputs 16 bits a number, and a scale. A panel's numbers of 8 bits lie as
 * [in / 4][PANEL][4], those of 4 bits as [in / 8][PANEL][4], inputs 0 to 3 of eight in the low halves of bytes; inputs are
 * filled up to a multiple of DEEP with zeros. Behind all panels are scales [groups, PANEL] of each, and of 4 bits the numbers
 * [groups, PANEL] that stand for zero. Sums of a group are the same whatever multiplies, and become floats in the order of
 * inputs; so does a tile, whose rows are the high and low bytes of fixed point, taken apart. */

typedef int32_t NAME(Ints) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t NAME(Shorts) __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint8_t NAME(Bytes) __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint8_t NAME(Few) __attribute__((vector_size(LANES), aligned(1), may_alias));

ALWAYS int64_t NAME(inputs_of)(const Matrix *matrix) { return up_to(matrix->in, DEEP); }
ALWAYS int64_t NAME(row_bytes)(int64_t in) { return 2 * half_row(in); }
ALWAYS int64_t NAME(step_bytes)(const Matrix *matrix) { return matrix->group ? STEP / 2 : STEP; }
ALWAYS int NAME(by_tiles)(const Matrix *matrix) { return (void)matrix, TILES; }

/* The scales of a panel, and the numbers that stand for zero. */
ALWAYS float *NAME(scales)(const Matrix *matrix, int64_t panel) {
    int64_t numbers = up_to(matrix->out, PANEL) * NAME(inputs_of)(matrix);
    return (float *)((char *)matrix->weight + (matrix->group ? numbers / 2 : numbers)) + panel * groups_of(matrix) * PANEL;
}
ALWAYS uint8_t *NAME(zeros)(const Matrix *matrix, int64_t panel) {
    float *end = NAME(scales)(matrix, up_to(matrix->out, PANEL) / PANEL);
    return (uint8_t *)end + panel * groups_of(matrix) * PANEL;
}

static void NAME(pack)(const Matrix *matrix, const Source *source) {
    const uint8_t *weight = source->weight;
    int64_t in = matrix->in, group = matrix->group, filled = NAME(inputs_of)(matrix), groups = groups_of(matrix);
    int64_t given = group ? in / group : 1, bytes = (group ? filled / 2 : filled) * PANEL;
#pragma omp parallel for
    for (int64_t panel = 0; panel < up_to(matrix->out, PANEL) / PANEL; panel++) {
        uint8_t *to = memset((uint8_t *)matrix->weight + panel * bytes, 0, (size_t)bytes);
        float *scales = memset(NAME(scales)(matrix, panel), 0, (size_t)(4 * groups * PANEL));
        uint8_t *zeros = group ? memset(NAME(zeros)(matrix, panel), 0, (size_t)(groups * PANEL)) : 0;
        for (int64_t j = 0; j < PANEL; j++) {
            int64_t row = row_of(matrix, source, panel, j, PANEL);
            if (row < 0) continue;
            for (int64_t g = 0; g < given; g++) scales[g * PANEL + j] = source->scale[row * given + g];
            for (int64_t g = 0; group && g < given; g++) zeros[g * PANEL + j] = source->zero ? source->zero[row * given + g] : 8;
            for (int64_t k = 0; k < in && !group; k++) to[k / 4 * 4 * PANEL + 4 * j + k % 4] = weight[row * in + k];
            for (int64_t k = 0; k < in && group; k++) {
                int number = weight[(row * in + k) / 2] >> k % 2 * 4 & 15;
                to[k / 8 * 4 * PANEL + 4 * j + k % 4] |= (uint8_t)(number << k / 4 % 2 * 4);
            }
        }
    }
}

/* A row of inputs as fixed point. One that is no number, or infinite, makes its scale NaN. */
static void NAME(fix)(const float *x, int64_t in, char *to) {
    char *scales = row_scales(to, in);
    memset(to, 0, (size_t)NAME(row_bytes)(in));
    for (int64_t first = 0; first < in; first += SCALED) {
        int64_t end = least(first + SCALED, in);
        NAME(Whole) most = {0};  /* sizes are in the order of their bits, those of NaN the largest */
        for (int64_t i = first; i < end; i += LANES)
            most = MM(max_epi32)(most, (NAME(Whole))((NAME(Ints))LOAD(x + i) & 0x7fffffff));
        int32_t bits = 0;
        for (int i = 0; i < LANES; i++) bits = ((NAME(Ints))most)[i] > bits ? ((NAME(Ints))most)[i] : bits;
        float largest;
        memcpy(&largest, &bits, sizeof(largest));
        float scale = largest / LARGEST;
        if (!(largest > TINY)) scale = 0.0f;
        if (!(largest <= FLT_MAX)) scale = NAN;
        ((float *)scales)[first / SCALED] = scale;
        if (!(scale > 0.0f)) continue;
        V factor = SET(LARGEST / largest);
        for (int64_t i = first; i < end; i += LANES) {
            NAME(Ints) number = (NAME(Ints))MM(cvtps_epi32)(LOAD(x + i) * factor);
#if TILES
            NAME(Ints) high = (number + 128) >> 8;
            *(NAME(Few) *)(to + i) = __builtin_convertvector(high, NAME(Few));
            *(NAME(Few) *)(to + half_row(in) + i) = __builtin_convertvector(number, NAME(Few));
#else
            NAME(Shorts) by_parity = __builtin_convertvector(number, NAME(Shorts));
            *(NAME(Shorts) *)(to + 2 * i) = BY_PARITY(by_parity);
#endif
        }
    }
}

/* Numbers of 4 bits as such of 8, from the `first` input on. */
static const STORED *NAME(expand)(const Matrix *matrix, int64_t panel, int64_t first, int64_t inputs, uint8_t *room) {
    const uint8_t *w = (const uint8_t *)matrix->weight + (panel * NAME(inputs_of)(matrix) + first) / 2 * PANEL;
    const uint8_t *zeros = NAME(zeros)(matrix, panel) + first / matrix->group * PANEL;
    uint8_t *to = room;
    for (int64_t k = 0; k < inputs; k += matrix->group, zeros += PANEL) {
        NAME(Bytes) zero[WIDE];
        for (int j = 0; j < WIDE; j++)
            zero[j] = (NAME(Bytes))(__builtin_convertvector(*(const NAME(Few) *)(zeros + LANES * j), NAME(Words)) * 0x01010101);
        for (int64_t end = k + matrix->group, i = k; i < end; i += 8, w += 4 * PANEL, to += 8 * PANEL)
            for (int j = 0; j < WIDE; j++) {
                NAME(Bytes) both = *(const NAME(Bytes) *)(w + 4 * LANES * j);
                *(NAME(Bytes) *)(to + 4 * LANES * j) = (both & 15) - zero[j];
                *(NAME(Bytes) *)(to + 4 * PANEL + 4 * LANES * j) = (both >> 4) - zero[j];
            }
    }
    return (const STORED *)room;
}

/* What rows are multiplied with for inputs from `k` on. */
ALWAYS void NAME(describe)(const Matrix *matrix, int64_t panel, int64_t k, const char *x, uint8_t *room, NAME(Part) *part) {
    int64_t inputs = part->steps * TAKEN;
    part->group = matrix->group ? matrix->group / TAKEN : part->steps;
    part->scale = NAME(scales)(matrix, panel) + (matrix->group ? k / matrix->group * PANEL : 0);
    part->row_scale = row_scales(x, matrix->in) + k / SCALED * (int64_t)sizeof(float);
    if (matrix->group) part->w = NAME(expand)(matrix, panel, k, inputs, room);
}

/* A vector of exact sums, drained as floats. */
ALWAYS void NAME(drain)(const NAME(Part) *part, int64_t row, int j, const float *scale, NAME(Ints) sum) {
    V *kept = part->kept + row * WIDE + j;
    V number = MM(cvtepi32_ps)((NAME(Whole))sum) * SET(*(const float *)(part->row_scale + row * part->stride));
    *kept = FMA(number, LOAD(scale + LANES * j), *kept);
}

/* `count` rows by `wide` vectors of a panel, in registers: two of the four inputs of a step at a time. */
ALWAYS void NAME(tile)(const int count, const int wide, const NAME(Part) *part) {
    const char *x = part->x, *next = part->next;
    const STORED *w = part->w;
    const float *scale = part->scale;
    int64_t stride = part->stride, bytes = part->bytes, group = part->group;
    for (int64_t done = 0; done < part->steps; done += group, scale += PANEL) {
        NAME(Whole) sum[TILE][WIDE];
        for (int i = 0; i < count; i++)
            for (int j = 0; j < wide; j++) sum[i][j] = (NAME(Whole)){0};
        for (int64_t k = 0; k < group; k++, w += TAKEN * PANEL, x += 2 * TAKEN, next += bytes) {
            for (int j = 0; j < STEP; j += 64) _mm_prefetch(next + j, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                NAME(Whole) b[WIDE];
                for (int j = 0; j < wide; j++) {
                    NAME(Whole) four = *(const NAME(Whole) *)(w + TAKEN * LANES * j);
                    if (!odd) four = MM(slli_epi16)(four, 8);
                    b[j] = MM(srai_epi16)(four, 8);
                }
#pragma GCC unroll 6
                for (int i = 0; i < count; i++) {
                    NAME(Whole) a = MM(set1_epi32)(((const int *)(x + i * stride))[odd]);
                    for (int j = 0; j < wide; j++) sum[i][j] = ADD_PAIRS(sum[i][j], a, b[j]);
                }
            }
        }
        for (int i = 0; i < count; i++)
            for (int j = 0; j < wide; j++) NAME(drain)(part, i, j, scale, (NAME(Ints))sum[i][j]);
    }
}

#if TILES  /* eight rows by a panel: high and low bytes of a row take turns, as rows of a tile */
static void NAME(add_tiles)(int64_t count, const NAME(Part) *part) {
    const char *x = part->x, *w = (const char *)part->w, *next = part->next;
    const float *scale = part->scale;
    int64_t stride = part->stride / 2, steps = least(part->group, DEEP / TAKEN), bytes = steps * part->bytes;
    int32_t sums[4][16][LANES] __attribute__((aligned(64)));
    tiles_see_memory();
    for (int64_t done = 0; done < part->steps; done += part->group, scale += PANEL) {
        tile_zero(0); tile_zero(1); tile_zero(2); tile_zero(3);
        for (int64_t k = 0; k < part->group; k += steps, x += TAKEN * steps, w += steps * STEP, next += bytes) {
            for (int64_t j = 0; j < bytes; j += 64) _mm_prefetch(next + j, _MM_HINT_T0);
            tile_load(4, x, stride);
            tile_load(5, w, STEP); tile_int8(0, 4, 5);
            tile_load(6, w + 64, STEP); tile_int8(1, 4, 6);
            tile_load(7, w + 128, STEP); tile_int8(2, 4, 7);
            tile_load(5, w + 192, STEP); tile_int8(3, 4, 5);
        }
        tile_store(0, sums[0], 64); tile_store(1, sums[1], 64); tile_store(2, sums[2], 64); tile_store(3, sums[3], 64);
        for (int64_t row = 0; row < count; row++)
            for (int j = 0; j < WIDE; j++) {
                const NAME(Ints) *high = (const void *)sums[j][2 * row], *low = (const void *)sums[j][2 * row + 1];
                NAME(drain)(part, row, j, scale, (*high << 8) + *low);
            }
    }
}
#endif
