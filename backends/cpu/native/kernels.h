/* The decoder for one instruction set (ISA, V, LANES, MM, PAIRS) and one FORMAT; see decoder.c, which includes it.
 *
 * Matrices lie as panels of PANEL outputs, [out / PANEL][in][PANEL], so that memory is read once and in order; with
 * PAIRS, two inputs of an output lie together; other bfloat16 numbers lie as MIXED: the outputs of two vectors take turns,
 * as a shift and a mask then make floats of them. A gated matrix has in each panel half gates, half what they gate.
 *
 * Numbers of 8 bits are widened in registers, by each tile that reads them; the scales of their rows follow all panels. With PAIRS a byte is a sign and a size, whose two bytes as bfloat16 are looked up. */

/* ---------------------------------------------------------------- vectors */

typedef uint16_t NAME(Halves) __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef long long NAME(Packed) __attribute__((vector_size(2 * LANES), aligned(2), may_alias));  /* as intrinsics take them */
typedef uint32_t NAME(Words) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(Both) __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

/* Numbers of a format from `at` on. */
ALWAYS V NAME(load)(const void *x, int64_t at, const int64_t format) {
    if (format == FLOAT32) return LOAD((const float *)x + at);
    __auto_type packed = *(const NAME(Packed) *)((const half *)x + at);
    return format == FLOAT16 ? MM(cvtph_ps)(packed) : (V)MM(slli_epi32)(MM(cvtepu16_epi32)(packed), 16);
}

ALWAYS void NAME(store)(void *y, int64_t at, const int64_t format, V x) {  /* as bfloat16: to nearest, ties to even */
    NAME(Words) bits = (NAME(Words))x, odd = bits >> 16 & 1, rounded = (bits + 0x7fff + odd) >> 16;
    y = format == FLOAT32 ? (void *)((float *)y + at) : (void *)((half *)y + at);
    if (format == FLOAT32) STORE(y, x);
    else *(NAME(Halves) *)y = __builtin_convertvector(rounded, NAME(Halves));
}

#if PAIRS  /* factors of products: of two inputs each */
typedef __m512bh NAME(Factor);
ALWAYS NAME(Factor) NAME(factor)(const void *w, int j) { return (__m512bh)_mm512_loadu_si512((const INPUT *)w + 2 * LANES * j); }
ALWAYS void NAME(widen)(const STORED *w, const int wide, NAME(Factor) *b) {  /* a step's vectors of 8 bits, two from each load */
#if SMALL
    for (int j = 0; j < wide; j += 2) {
        __m512i x = _mm512_loadu_si512(w + 2 * LANES * j), half[2];
        for (int i = 0; i < 2; i++)
            half[i] = _mm512_permutex2var_epi8(_mm512_load_si512(BYTES[i]), x, _mm512_load_si512(BYTES[i] + 64));
        half[1] = _mm512_ternarylogic_epi32(half[1], x, _mm512_set1_epi8(-128), 0xf8);  /* | x & sign */
        b[j] = (__m512bh)_mm512_unpacklo_epi8(half[0], half[1]);
        b[j + 1] = (__m512bh)_mm512_unpackhi_epi8(half[0], half[1]);
    }
#endif
}
ALWAYS NAME(Factor) NAME(input)(const INPUT *x, int64_t k) { return (__m512bh)_mm512_set1_epi32(((const int *)x)[k]); }
ALWAYS V NAME(add_product)(NAME(Factor) a, NAME(Factor) b, V sum) { return _mm512_dpbf16_ps(sum, a, b); }
#else
typedef V NAME(Factor);
ALWAYS V NAME(factor)(const void *w, int j) {  /* the j-th of a step's vectors */
    if (!MIXED) return NAME(load)(w, LANES * j, SMALL ? FLOAT32 : FORMAT);
    NAME(Words) both = *(const NAME(Both) *)((const STORED *)w + j / 2 * 2 * LANES);
    return (V)(j % 2 ? both & 0xffff0000 : both << 16);
}
ALWAYS void NAME(widen)(const STORED *w, const int wide, V *b) {
    for (int j = 0; j < wide; j++) {
        const __m128i *x = (const void *)(w + LANES * j);
        b[j] = MM(cvtepi32_ps)(MM(cvtepi8_epi32)(LANES == 16 ? _mm_loadu_si128(x) : _mm_loadl_epi64(x)));
    }
}
ALWAYS V NAME(input)(const INPUT *x, int64_t k) { return SET(x[k]); }
ALWAYS V NAME(add_product)(V a, V b, V sum) { return FMA(a, b, sum); }
#endif

ALWAYS V NAME(exp)(V x) {  /* 2^n p(f) with n + f = x log2(e); 0 below -87 */
    V t = MM(max_ps)(x, SET(-87.0f)) * 1.44269504f;
    __auto_type n = MM(cvtps_epi32)(t);  /* to nearest */
    V f = t - MM(cvtepi32_ps)(n), p = SET(1.54035304e-4f);
    static const float factors[] = {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f};
    for (int i = 0; i < 6; i++) p = FMA(p, f, SET(factors[i]));
    p *= (V)(((NAME(Words))n + 127) << 23);
    return (V)((NAME(Words))p & (NAME(Words))(x >= -87.0f));
}

ALWAYS V NAME(silu)(V x) { return x / (1.0f + NAME(exp)(MM(min_ps)(-x, SET(87.0f)))); }

static inline float NAME(sum)(V x) {
    float total = 0.0f;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

static inline float NAME(largest)(V x) {
    float most = -INFINITY;
    for (int i = 0; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Sums of LANES vectors, one in each lane. */
ALWAYS V NAME(sums)(const V *a) {
#if LANES == 8
    V x = MM(hadd_ps)(MM(hadd_ps)(a[0], a[1]), MM(hadd_ps)(a[2], a[3]));
    V y = MM(hadd_ps)(MM(hadd_ps)(a[4], a[5]), MM(hadd_ps)(a[6], a[7]));
    return MM(permute2f128_ps)(x, y, 0x20) + MM(permute2f128_ps)(x, y, 0x31);
#else
    V pairs[8], fours[4], eights[2];
    for (int i = 0; i < 8; i++)
        pairs[i] = MM(unpacklo_ps)(a[2 * i], a[2 * i + 1]) + MM(unpackhi_ps)(a[2 * i], a[2 * i + 1]);
    for (int i = 0; i < 4; i++) {
        __m512d x = (__m512d)pairs[2 * i], y = (__m512d)pairs[2 * i + 1];
        fours[i] = (V)MM(unpacklo_pd)(x, y) + (V)MM(unpackhi_pd)(x, y);
    }
    for (int i = 0; i < 2; i++)
        eights[i] = MM(shuffle_f32x4)(fours[2 * i], fours[2 * i + 1], 0x88) + MM(shuffle_f32x4)(fours[2 * i], fours[2 * i + 1], 0xdd);
    return MM(shuffle_f32x4)(eights[0], eights[1], 0x88) + MM(shuffle_f32x4)(eights[0], eights[1], 0xdd);
#endif
}

/* ---------------------------------------------------------------- products */

/* The scales behind a matrix of 8 bits, in the order of its panels. */
ALWAYS float *NAME(scales)(const void *packed, int64_t in, int64_t out) {
    return (float *)((char *)packed + up_to(out, PANEL) * up_to(in, 2));
}

/* Where in a step's panel the number of output `j` and input `k` of those taken together lies. */
ALWAYS int64_t NAME(place)(int64_t j, int64_t k) {
    int64_t pair = j % LANES * 2 + k, vector = j / LANES;
    if (PAIRS && SMALL) return vector / 2 * 64 + pair / 8 * 16 + vector % 2 * 8 + pair % 8;
    if (PAIRS) return 2 * j + k;
    return MIXED ? vector / 2 * 2 * LANES + j % LANES * 2 + vector % 2 : j;
}

static void NAME(pack)(const void *weight, const float *scale, int64_t in, int64_t out, int gated, void *packed) {
    const STORED *w = weight;
    STORED *to = packed;
    int64_t each = gated ? PANEL / 2 : PANEL, outputs = gated ? out / 2 : out;
    float *scales = NAME(scales)(packed, in, out);
#pragma omp parallel for
    for (int64_t panel = 0; panel < up_to(outputs, each) / each; panel++)
        for (int64_t k = 0; k < in; k++)
            for (int64_t j = 0; j < PANEL; j++) {
                int64_t o = panel * each + j % each, up = j / each * outputs;
                STORED x = o < outputs ? w[(up + o) * in + k] : 0;
                if (SMALL && PAIRS && (int8_t)x < 0) x = (STORED)(-(int)x | 0x80);
                to[(panel * in + k / TAKEN * TAKEN) * PANEL + NAME(place)(j, k % TAKEN)] = x;
                if (SMALL && k == 0) scales[panel * PANEL + j] = o < outputs ? scale[up + o] : 0;
            }
}

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

/* Add `count` rows by `steps` steps of a panel to `wide` vectors of their sums. Meanwhile what follows is fetched, by
 * `bytes` further at each step. */
ALWAYS void NAME(tile)(
    const int count, const int wide, const INPUT *x, int64_t in, const STORED *w, int64_t steps, V *kept, const char *next, int64_t bytes) {
    V sum[TILE][WIDE];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) sum[i][j] = kept[i * WIDE + j];
    for (int64_t k = 0; k < steps; k++, w += TAKEN * PANEL, next += bytes) {
        NAME(Factor) b[WIDE];
        if (SMALL) NAME(widen)(w, wide, b);
        else for (int j = 0; j < wide; j++) b[j] = NAME(factor)(w, j);
        for (int j = 0; j < STEP; j += 64) _mm_prefetch(next + j, _MM_HINT_T0);
#pragma GCC unroll 6
        for (int i = 0; i < count; i++) {
            NAME(Factor) a = NAME(input)(x + i * in, k);
            for (int j = 0; j < wide; j++) sum[i][j] = NAME(add_product)(a, b[j], sum[i][j]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) kept[i * WIDE + j] = sum[i][j];
}

#define TILE_OF(count) case count: NAME(tile)(count, AT_ONCE(count), from, in, part_of, steps, to, next, bytes); break;
/* x [rows, in] by the panels of each thread of a team, some rows and some steps over the inputs at a time, so that
 * weights are read from the nearest cache but once. What follows comes from memory meanwhile: for one part some steps
 * ahead, for several a share of the next steps with each, as memory would be idle while they multiply. */
static void NAME(multiply)(const INPUT *x, int64_t rows, const Matrix *matrix, const Sink *sink) {
    int64_t in = matrix->in;
    const float *scale = NAME(scales)(matrix->weight, in, matrix->out);
    V sums[SHARING][WIDE];
#pragma omp for schedule(static) nowait
    for (int64_t panel = 0; panel < up_to(matrix->out, PANEL) / PANEL; panel++)
        for (int64_t first = 0, some; first < rows; first += some) {
            some = least(SHARING, rows - first);
            int64_t tiles = (some + TILE - 1) / TILE, parts = tiles * WIDE / AT_ONCE(some), bytes = (STEP + parts - 1) / parts;
            memset(sums, 0, (size_t)some * sizeof(sums[0]));
            for (int64_t k = 0, steps; k < in / TAKEN; k += steps) {
                steps = least(STEPS, in / TAKEN - k);
                const STORED *w = (const STORED *)matrix->weight + (panel * in + k * TAKEN) * PANEL;
                for (int64_t part = 0; part < parts; part++) {
                    int64_t t = part % tiles, vector = part / tiles * AT_ONCE(some), row = some * t / tiles;
                    const INPUT *from = x + (first + row) * in + k * TAKEN;
                    const STORED *part_of = w + TAKEN * LANES * vector;
                    const char *next = (const char *)w + (parts == 1 ? NEAR / 4 : STEPS * (STEP + part * bytes));
                    V *to = sums[row] + vector;
                    switch (some * (t + 1) / tiles - row) {
                        TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
                    }
                }
            }
            for (int64_t row = 0; row < some; row++) {
                if (SMALL) for (int j = 0; j < WIDE; j++) sums[row][j] *= LOAD(scale + panel * PANEL + LANES * j);
                NAME(put)(sink, matrix, first + row, panel, sums[row]);
            }
        }
}
#undef TILE_OF

/* ---------------------------------------------------------------- norms */

/* The factor of a root-mean-square norm of `size` activations, or floats. */
ALWAYS V NAME(scale)(const Call *c, const void *x, int64_t size, const int64_t format) {
    V squares = SET(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        V value = NAME(load)(x, i, format);
        squares = FMA(value, value, squares);
    }
    return SET(1.0f / sqrtf(NAME(sum)(squares) / (float)size + (float)c->eps));
}

/* Into activations or inputs; without a weight as it is. */
ALWAYS void NAME(norm)(const Call *c, const ACT *x, const float *weight, void *y, const int64_t format) {
    V scale = weight ? NAME(scale)(c, x, c->dim, ACTS) : SET(1.0f);
    for (int64_t i = 0; i < c->dim; i += LANES) {
        V value = LOAD_ACT(x, i) * scale;
        if (weight) value *= LOAD(weight + i);
        NAME(store)(y, i, format, value);
    }
}

/* x += norm(part): of families with norms behind attention and SwiGLU, too. */
static void NAME(add_normed)(const Call *c, const float *part, const float *weight, ACT *x) {
    V scale = NAME(scale)(c, part, c->dim, FLOAT32);
    for (int64_t i = 0; i < c->dim; i += LANES)
        STORE_ACT(x, i, FMA(LOAD(part + i) * scale, LOAD(weight + i), LOAD_ACT(x, i)));
}

/* ---------------------------------------------------------------- heads */

/* What a pass needs besides its call: what its threads share, and what one has for itself. */
typedef struct {
    const Call *call;
    float *qkv, *part;                /* [R T, (heads + 2 kv) head_dim], [R T, dim] */
    INPUT *normed, *mixed, *gated;    /* [R T, dim], [R T, heads head_dim], [R T, ffn] */
    int64_t *firsts, *ends;           /* [R] of the positions that a row's queries attend to */
    float *scores, *turned;           /* [4, S rounded up], [head_dim] */
    INPUT *query;                     /* [head_dim] */
    ACT *moved;                       /* [D, head_dim] */
    const ACT *keys, *values, *next;  /* of the unit at hand, from its first position on; what is read behind its values */
    int64_t length, capacity;         /* of its positions that are attended to, and of all */
} NAME(Pass);

/* Chameleon's norm of one head: layer norm with weights of its own, in place. */
static void NAME(head_norm)(float *x, const float *weight, const float *bias, int64_t size) {
    V total = SET(0.0f), squares = SET(0.0f);
    for (int64_t i = 0; i < size; i += LANES) total += LOAD(x + i);
    V mean = SET(NAME(sum)(total) / (float)size);
    for (int64_t i = 0; i < size; i += LANES) {
        V off = LOAD(x + i) - mean;
        squares = FMA(off, off, squares);
    }
    V scale = SET(1.0f / sqrtf(NAME(sum)(squares) / (float)size + 1e-5f));
    for (int64_t i = 0; i < size; i += LANES)
        STORE(x + i, FMA((LOAD(x + i) - mean) * scale, LOAD(weight + i), LOAD(bias + i)));
}

ALWAYS void NAME(store_head)(const float *x, int64_t size, void *y, const int64_t format) {
    for (int64_t i = 0; i < size; i += LANES) NAME(store)(y, i, format, LOAD(x + i));
}

/* A token's query or key, which is in `x`: normed (where a family has norms of heads), rotated, and kept in `y`. */
ALWAYS void NAME(turn)(
    const NAME(Pass) *pass, int64_t token, int64_t head, float *x, const float *weight, const float *bias, void *y, const int64_t format) {
    int64_t size = pass->call->head_dim, pairs = size / 2, interleaved = pass->call->interleaved;
    int64_t step = interleaved ? 2 : 1, far = interleaved ? 1 : pairs;
    const float *rope = pass->call->rope + token * size;
    if (bias) NAME(head_norm)(x, weight + head * size, bias + head * size, size);
    else if (weight) {
        V scale = NAME(scale)(pass->call, x, size, FLOAT32);
        for (int64_t i = 0; i < size; i += LANES) STORE(x + i, LOAD(x + i) * scale * LOAD(weight + i));
    }
    for (int64_t i = 0; i < pairs; i++) {
        float a = x[i * step], b = x[i * step + far], cos = rope[i], sin = rope[pairs + i];
        pass->turned[i * step] = a * cos - b * sin;
        pass->turned[i * step + far] = b * cos + a * sin;
    }
    NAME(store_head)(pass->turned, size, y, format);
}

/* Move what was accepted, then write the new keys and values of a unit: a row and a key head. */
static void NAME(write)(const NAME(Pass) *pass, const Layer *layer, int64_t unit) {
    const Call *c = pass->call;
    int64_t row = unit / c->kv, head = unit % c->kv, size = c->head_dim, moves = c->moves, stride = c->position_stride;
    ACT *keys = (ACT *)layer->keys + head * c->head_stride, *values = (ACT *)layer->values + head * c->head_stride;
    ACT *both[] = {keys, values};
    const int32_t *goal = c->index + row * (moves + c->tokens), *source = c->source ? c->source + row * moves : 0;
    size_t bytes = (size_t)size * sizeof(ACT);
    for (int n = 0; n < 2; n++) {
        for (int64_t i = 0; i < moves; i++) memcpy(pass->moved + i * size, both[n] + source[i] * stride, bytes);
        for (int64_t i = 0; i < moves; i++) memcpy(both[n] + goal[i] * stride, pass->moved + i * size, bytes);
    }
    for (int64_t t = 0; t < c->tokens; t++) {
        int64_t token = row * c->tokens + t;
        float *key = pass->qkv + (token * (c->heads + 2 * c->kv) + c->heads + head) * size;
        NAME(turn)(pass, token, head, key, layer->k_norm, layer->k_norm_bias, keys + goal[moves + t] * stride, ACTS);
        NAME(store_head)(key + c->kv * size, size, values + goal[moves + t] * stride, ACTS);
    }
}

/* A layer's keys or values from the first position on that a unit attends to. */
static ACT *NAME(seen)(const NAME(Pass) *pass, void *cache, int64_t unit) {
    const Call *c = pass->call;
    int64_t first = c->starts[unit / c->kv] + pass->firsts[unit / c->kv];
    return (ACT *)cache + unit % c->kv * c->head_stride + first * c->position_stride;
}

/* Scores of the query at LANES positions from `first` on. */
ALWAYS V NAME(scores)(const NAME(Pass) *pass, int64_t first) {
    int64_t size = pass->call->head_dim, stride = pass->call->position_stride, last = pass->capacity - 1;
    const INPUT *query = pass->query;
    const ACT *keys = pass->keys, *ahead = first + AHEAD < pass->length ? keys : pass->values - up_to(pass->length, LANES) * stride;
    V sum[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        const ACT *key = keys + least(first + i, last) * stride;
        const char *next = (const char *)(ahead + (first + i + AHEAD) * stride);
        for (int64_t d = 0; d < size * (int64_t)sizeof(ACT); d += 64) _mm_prefetch(next + d, _MM_HINT_T0);
        int64_t d = 0;
        V one = SET(0.0f);
        for (; PAIRS && d + 2 * LANES <= size; d += 2 * LANES)
            one = NAME(add_product)(NAME(factor)(query + d, 0), NAME(factor)(key + d, 0), one);
        for (; d < size; d += LANES) one = FMA(NAME(load)(query, d, INPUTS), LOAD_ACT(key, d), one);
        sum[i] = one;
    }
    return NAME(sums)(sum);
}

/* Softmax of the query over the positions, left unnormalised: returns 1 / sum. */
static float NAME(weigh)(const NAME(Pass) *pass, const float *mask, float *scores) {
    int64_t capacity = pass->capacity;
    V scale = SET(1.0f / sqrtf((float)pass->call->head_dim)), most = SET(-INFINITY), total = SET(0.0f);
    for (int64_t p = 0; p < pass->length; p += LANES) {
        float edge[LANES];
        const float *hidden = mask + p;
        if (p + LANES > capacity) {
            for (int64_t i = 0; i < LANES; i++) edge[i] = p + i < capacity ? mask[p + i] : -3e38f;
            hidden = edge;
        }
        V score = FMA(NAME(scores)(pass, p), scale, LOAD(hidden));
        STORE(scores + p, score);
        most = MM(max_ps)(most, score);
    }
    V top = SET(NAME(largest)(most));
    for (int64_t p = 0; p < pass->length; p += LANES) {
        V weight = NAME(exp)(LOAD(scores + p) - top);
        STORE(scores + p, weight);
        total += weight;
    }
    return 1.0f / NAME(sum)(total);
}

/* Weighted sums of values for `count` queries and `wide` vectors of their features from `first` on. */
ALWAYS void NAME(mix)(
    const NAME(Pass) *pass, const int count, const int wide, int64_t first, const float *factor, INPUT *const *out) {
    int64_t length = pass->length, stride = pass->call->position_stride, of_query = up_to(pass->call->capacity, BLOCK);
    const ACT *values = pass->values + first, *next = pass->next + first - length * stride;
    const float *weights = pass->scores;
    V sum[4][4];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) sum[i][j] = SET(0.0f);
    for (int64_t p = 0; p < length; p++) {
        V value[4];
        const ACT *ahead = (p + AHEAD < length ? values : next) + (p + AHEAD) * stride;
        for (int j = 0; j < wide; j++) _mm_prefetch((const char *)(ahead + LANES * j), _MM_HINT_T0);
        for (int j = 0; j < wide; j++) value[j] = LOAD_ACT(values + p * stride, LANES * j);
        for (int i = 0; i < count; i++) {
            V weight = SET(weights[i * of_query + p]);
            for (int j = 0; j < wide; j++) sum[i][j] = FMA(weight, value[j], sum[i][j]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) STORE_INPUT(out[i], first + LANES * j, sum[i][j] * factor[i]);
}

#define MIX(count, wide) case wide * 8 + count: NAME(mix)(pass, count, wide, d, factor, out); break;
static void NAME(mix_all)(const NAME(Pass) *pass, int64_t count, const float *factor, INPUT *const *out) {
    int64_t size = pass->call->head_dim;
    for (int64_t d = 0, wide; d < size; d += wide * LANES) {
        wide = (size - d) / LANES >= 4 ? 4 : (size - d) / LANES >= 2 ? 2 : 1;
        switch (wide * 8 + count) {
            MIX(1, 4) MIX(2, 4) MIX(3, 4) MIX(4, 4)
            MIX(1, 2) MIX(2, 2) MIX(3, 2) MIX(4, 2)
            MIX(1, 1) MIX(2, 1) MIX(3, 1) MIX(4, 1)
        }
    }
}
#undef MIX

/* Attention of a unit's queries; its thread goes on with the unit `next`. */
static void NAME(attend)(NAME(Pass) *pass, const Layer *layer, int64_t unit, int64_t next) {
    const Call *c = pass->call;
    int64_t row = unit / c->kv, group = c->heads / c->kv, count = c->tokens * group, size = c->head_dim;
    pass->keys = NAME(seen)(pass, layer->keys, unit);
    pass->values = NAME(seen)(pass, layer->values, unit);
    pass->next = NAME(seen)(pass, layer->keys, next);
    pass->length = pass->ends[row] - pass->firsts[row];
    pass->capacity = c->capacity - pass->firsts[row];
    for (int64_t first = 0; first < count; first += 4) {
        int64_t some = least(4, count - first);
        float factor[4];
        INPUT *out[4];
        for (int64_t i = 0; i < some; i++) {
            int64_t token = row * c->tokens + (first + i) / group, head = unit % c->kv * group + (first + i) % group;
            float *query = pass->qkv + (token * (c->heads + 2 * c->kv) + head) * size;
            NAME(turn)(pass, token, head, query, layer->q_norm, layer->q_norm_bias, pass->query, INPUTS);
            const float *mask = c->mask + token * c->capacity + pass->firsts[row];
            factor[i] = NAME(weigh)(pass, mask, pass->scores + i * up_to(c->capacity, BLOCK));
            out[i] = pass->mixed + (token * c->heads + head) * size;
        }
        NAME(mix_all)(pass, some, factor, out);
    }
}

/* ---------------------------------------------------------------- the pass */

/* Where a row's queries attend; the first block that they see is read whole, so that sums run as they would from 0 on. */
static void NAME(bound)(const Call *c, int64_t row, int64_t *first, int64_t *end) {
    int64_t begin = c->capacity - 1, p;
    *end = 1;
    for (int64_t t = 0; t < c->tokens; t++) {
        const float *mask = c->mask + (row * c->tokens + t) * c->capacity;
        for (p = 0; p < begin && mask[p] <= HIDDEN;) p++;
        begin = p;
        for (p = c->capacity; p > *end && mask[p - 1] <= HIDDEN;) p--;
        *end = p;
    }
    *first = least(begin, *end - 1) / BLOCK * BLOCK;
}

/* A product of SwiGLU, for each run of tokens that share its matrix. */
static void NAME(feed)(const Call *c, const INPUT *x, const Matrix *image, const Matrix *word, const Sink *sink) {
    int64_t row = (sink->kind == GATED ? image->out / 2 : image->out) * bytes_of(sink->format);
    const uint8_t *words = word->weight ? c->words : 0;
    for (int64_t first = 0, end, count = c->rows * c->tokens; first < count; first = end) {
        for (end = first + 1; end < count && (!words || words[end] == words[first]);) end++;
        Sink part = {sink->kind, sink->format, (char *)sink->y + first * row};
        NAME(multiply)(x + first * image->in, end - first, words && words[first] ? word : image, &part);
    }
}

/* One layer, by each thread of a team. What belongs to one token is always done by the same thread. */
static void NAME(run)(NAME(Pass) *pass, const Layer *layer) {
    const Call *c = pass->call;
    int64_t count = c->rows * c->tokens, dim = c->dim, units = c->rows * c->kv, threads = omp_get_num_threads();
    ACT *x = c->x;
    Sink to_qkv = {KEPT, FLOAT32, pass->qkv}, to_gated = {GATED, INPUTS, pass->gated};
    Sink to_x = {ADDED, ACTS, x}, to_part = {KEPT, FLOAT32, pass->part};
#pragma omp for schedule(static, 1)
    for (int64_t m = 0; m < count; m++) NAME(norm)(c, x + m * dim, layer->attention_norm, pass->normed + m * dim, INPUTS);
    NAME(multiply)(pass->normed, count, &layer->qkv, &to_qkv);
#pragma omp barrier
#pragma omp for schedule(static, 1)
    for (int64_t unit = 0; unit < units; unit++) {
        NAME(write)(pass, layer, unit);
        NAME(attend)(pass, layer, unit, unit + threads < units ? unit + threads : unit);
    }
    NAME(multiply)(pass->mixed, count, &layer->out, layer->attention_post_norm ? &to_part : &to_x);
#pragma omp barrier
#pragma omp for schedule(static, 1)
    for (int64_t m = 0; m < count; m++) {
        if (layer->attention_post_norm) NAME(add_normed)(c, pass->part + m * dim, layer->attention_post_norm, x + m * dim);
        NAME(norm)(c, x + m * dim, layer->ffn_norm, pass->normed + m * dim, INPUTS);
    }
    NAME(feed)(c, pass->normed, &layer->gate_up, &layer->word_gate_up, &to_gated);
#pragma omp barrier
    NAME(feed)(c, pass->gated, &layer->down, &layer->word_down, layer->ffn_post_norm ? &to_part : &to_x);
#pragma omp barrier
    if (!layer->ffn_post_norm) return;
#pragma omp for schedule(static, 1) nowait
    for (int64_t m = 0; m < count; m++) NAME(add_normed)(c, pass->part + m * dim, layer->ffn_post_norm, x + m * dim);
}

/* Where the parts of a pass lie in memory from `at` on, as one thread has them. -> where they end */
static int64_t NAME(lay_out)(NAME(Pass) *pass, int64_t at, int64_t thread) {
    const Call *c = pass->call;
    int64_t count = c->rows * c->tokens, size = c->head_dim, input = sizeof(INPUT), act = sizeof(ACT);
    pass->qkv = take(&at, 4 * count * (c->heads + 2 * c->kv) * size);
    pass->part = take(&at, 4 * count * c->dim);
    pass->normed = take(&at, input * count * c->dim);
    pass->mixed = take(&at, input * count * c->heads * size);
    pass->gated = take(&at, input * count * c->ffn);
    pass->firsts = take(&at, 8 * c->rows);
    pass->ends = take(&at, 8 * c->rows);
    for (int64_t n = 0; n <= thread; n++) {
        pass->turned = take(&at, 4 * size);
        pass->query = take(&at, input * size);
        pass->moved = take(&at, act * c->moves * size);
        pass->scores = take(&at, 4 * 4 * up_to(c->capacity, BLOCK) + 256);  /* no line close to another thread's */
    }
    return at;
}

static int NAME(decode)(const Call *c) {
    int64_t count = c->rows * c->tokens, dim = c->dim, size = c->head_dim, features = (1 + c->aux_count) * dim;
    if (dim % LANES || size % LANES || c->ffn % (PANEL / 2) || c->heads % c->kv || c->heads * size % 2) return -2;
    NAME(Pass) pass = {.call = c};
    void *memory = aligned(NAME(lay_out)(&pass, 0, c->threads - 1));
    if (!memory) return -1;
    NAME(lay_out)(&pass, (int64_t)memory, 0);
    for (int64_t row = 0; row < c->rows; row++) NAME(bound)(c, row, pass.firsts + row, pass.ends + row);
    ACT *x = c->x, *out = c->features;
#pragma omp parallel num_threads((int)c->threads) firstprivate(pass)
    {
        NAME(lay_out)(&pass, (int64_t)memory, omp_get_thread_num());
        for (int64_t l = 0; l < c->layer_count; l++) {
            NAME(run)(&pass, c->layers + l);
            for (int64_t a = 0; a < c->aux_count; a++) {
                if (c->aux[a] != l) continue;
#pragma omp for schedule(static, 1) nowait
                for (int64_t m = 0; m < count; m++) memcpy(out + m * features + (1 + a) * dim, x + m * dim, (size_t)dim * sizeof(ACT));
            }
        }
#pragma omp for schedule(static, 1) nowait
        for (int64_t m = 0; m < count; m++) NAME(norm)(c, x + m * dim, c->final_norm, out + m * features, ACTS);
    }
    free(memory);
    return 0;
}

static int NAME(linear)(int64_t threads, const Matrix *matrix, const void *x, int64_t rows, void *y) {
    const INPUT *from = x;
    INPUT *converted = 0;
    if (PAIRS && matrix->in % 2) return -2;
    if (sizeof(INPUT) != sizeof(ACT)) {  /* bfloat16 activations, multiplied in float32 */
        from = converted = aligned(rows * matrix->in * (int64_t)sizeof(INPUT));
        if (!converted) return -1;
        for (int64_t i = 0; i < rows * matrix->in; i++) ((word *)converted)[i] = (word)((const half *)x)[i] << 16;
    }
    Sink sink = {KEPT, ACTS, y};
#pragma omp parallel num_threads((int)threads)
    NAME(multiply)(from, rows, matrix, &sink);
    free(converted);
    return 0;
}

static const Kernels NAME(kernels) = {PANEL, NAME(pack), NAME(linear), NAME(decode)};
#undef FORMAT
