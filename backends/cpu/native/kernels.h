/* The decoder for one instruction set (ISA, V.., LANES, PANEL, PAIRS) and one FORMAT, or, where
 * none is defined, for each; see decoder.c, which includes it.
 *
 * Matrices lie as panels of PANEL outputs, [out / PANEL][in][PANEL], so that memory is read once and in order; with
 * PAIRS, two inputs of an output lie together. A gated matrix has in each panel half gates, half what they gate. */

#ifndef FORMAT
#define FORMAT BFLOAT16
#include "kernels.h"
#undef FORMAT
#define FORMAT FLOAT16
#include "kernels.h"
#undef FORMAT
#define FORMAT FLOAT32
#include "kernels.h"
#undef FORMAT
#else

#if FORMAT == BFLOAT16
#define ACT half
#define WEIGHT half
#define LOAD_ACT(p) V_LOAD_BF16(p)
#define STORE_ACT(p, x) V_STORE_BF16(p, x)
#define LOAD_WEIGHT(p) V_LOAD_BF16(p)
#define TO_FLOAT(x) from_bf16(x)
#define TO_ACT(x) to_bf16(x)
#else
#define ACT float
#define LOAD_ACT(p) V_LOAD(p)
#define STORE_ACT(p, x) V_STORE(p, x)
#define TO_FLOAT(x) (x)
#define TO_ACT(x) (x)
#if FORMAT == FLOAT16
#define WEIGHT half
#define LOAD_WEIGHT(p) V_LOAD_F16(p)
#else
#define WEIGHT float
#define LOAD_WEIGHT(p) V_LOAD(p)
#endif
#endif
#if PAIRS  /* inputs of products, and their factors */
#define INPUT half
#define STORE_INPUT(p, x) V_STORE_BF16(p, x)
#define FACTOR __m512bh
#define LOAD_FACTOR(p) (__m512bh)_mm512_loadu_si512(p)
#define SET_FACTOR(x, k) (__m512bh)_mm512_set1_epi32(((const int *)(x))[k])
#define ADD_PRODUCT(a, b, sum) _mm512_dpbf16_ps(sum, a, b)
#else
#define INPUT float
#define STORE_INPUT(p, x) V_STORE(p, x)
#define FACTOR V
#define LOAD_FACTOR(p) LOAD_WEIGHT(p)
#define SET_FACTOR(x, k) V_SET((x)[k])
#define ADD_PRODUCT(a, b, sum) V_FMA(a, b, sum)
#endif
#define WIDE (PANEL / LANES)  /* vectors of a panel */
#define INPUTS (PAIRS + 1)  /* taken in one step of a product, and the bytes of a panel's weights for them */
#define STEP (INPUTS * PANEL * (int)sizeof(WEIGHT))
#define STEPS (NEAR / STEP)

/* ---------------------------------------------------------------- products */

static int64_t NAME(packed_bytes)(int64_t in, int64_t out) { return up_to(out, PANEL) * in * (int64_t)sizeof(WEIGHT); }

static void NAME(pack)(const void *weight, int64_t in, int64_t out, int gated, void *packed) {
    const WEIGHT *w = weight;
    WEIGHT *to = packed;
    int64_t each = gated ? PANEL / 2 : PANEL, outputs = gated ? out / 2 : out;
#pragma omp parallel for
    for (int64_t panel = 0; panel < up_to(outputs, each) / each; panel++)
        for (int64_t k = 0; k < in; k++)
            for (int64_t j = 0; j < PANEL; j++) {
                int64_t o = panel * each + j % each, up = j / each * outputs;
                int64_t at = PAIRS ? (k / 2 * PANEL + j) * 2 + k % 2 : k * PANEL + j;
                to[panel * PANEL * in + at] = o < outputs ? w[(up + o) * in + k] : 0;
            }
}

static inline V NAME(exp)(V x) {  /* 2^n p(f) with n + f = x log2(e); 0 below -87 */
    V t = V_MUL(V_MAX(x, V_SET(-87.0f)), V_SET(1.44269504f)), n = V_ROUND(t), f = V_SUB(t, n);
    V p = V_FMA(V_SET(1.54035304e-4f), f, V_SET(1.33335581e-3f));
    p = V_FMA(p, f, V_SET(9.61812911e-3f));
    p = V_FMA(p, f, V_SET(5.55041087e-2f));
    p = V_FMA(p, f, V_SET(2.40226507e-1f));
    p = V_FMA(p, f, V_SET(6.93147181e-1f));
    p = V_FMA(p, f, V_SET(1.0f));
    return V_CLEAR_BELOW(x, V_SET(-87.0f), V_MUL(p, V_POW2(n)));
}

static inline V NAME(silu)(V x) {
    V e = NAME(exp)(V_MIN(V_SUB(V_ZERO, x), V_SET(87.0f)));
    return V_DIV(x, V_ADD(V_SET(1.0f), e));
}

/* One vector of sums of a row, from output `first` on; the last panel may reach beyond the outputs. */
static inline void NAME(keep)(const Sink *sink, int64_t row, int64_t first, V sum) {
    float some[LANES];
    int64_t count = least(LANES, sink->outputs - first), at = row * sink->stride + first;
    if (count <= 0) return;
    if (count < LANES) {
        V_STORE(some, sum);
        for (int64_t i = 0; i < count; i++) {
            float value = some[i] + (sink->bias ? sink->bias[first + i] : 0.0f);
            if (sink->kind == TO_FLOATS) ((float *)sink->y)[at + i] = value;
            if (sink->kind == TO_ACTS) ((ACT *)sink->y)[at + i] = TO_ACT(value);
            if (sink->kind == ADDED) ((ACT *)sink->y)[at + i] = TO_ACT(TO_FLOAT(((ACT *)sink->y)[at + i]) + value);
        }
        return;
    }
    if (sink->bias) sum = V_ADD(sum, V_LOAD(sink->bias + first));
    if (sink->kind == TO_FLOATS) V_STORE((float *)sink->y + at, sum);
    if (sink->kind == TO_ACTS) STORE_ACT((ACT *)sink->y + at, sum);
    if (sink->kind == ADDED) STORE_ACT((ACT *)sink->y + at, V_ADD(sum, LOAD_ACT((ACT *)sink->y + at)));
}

/* Add `count` rows by `steps` steps of a panel to their sums. Of what follows, `bytes` are fetched at each step. */
static inline __attribute__((always_inline)) void NAME(tile)(
    const int count, const INPUT *x, int64_t in, const WEIGHT *w, int64_t steps, V (*kept)[WIDE], const char *next, int64_t bytes) {
    V sum[TILE][WIDE];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < WIDE; j++) sum[i][j] = kept[i][j];
    for (int64_t k = 0; k < steps; k++, w += INPUTS * PANEL, next += bytes) {
        FACTOR b[WIDE];
        for (int j = 0; j < WIDE; j++) b[j] = LOAD_FACTOR(w + INPUTS * LANES * j);
        for (int j = 0; j < STEP; j += 64) _mm_prefetch(next + j, _MM_HINT_T0);
#pragma GCC unroll 6
        for (int i = 0; i < count; i++) {
            FACTOR a = SET_FACTOR(x + i * in, k);
            for (int j = 0; j < WIDE; j++) sum[i][j] = ADD_PRODUCT(a, b[j], sum[i][j]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < WIDE; j++) kept[i][j] = sum[i][j];
}

/* A row's sums of one panel to where they go. */
static void NAME(put)(const Sink *sink, int64_t row, int64_t panel, const V *sum) {
    for (int j = 0; j < WIDE; j++) {
        if (sink->kind != GATED) NAME(keep)(sink, row, panel * PANEL + LANES * j, sum[j]);
        else if (j < WIDE / 2)
            STORE_INPUT((INPUT *)sink->y + row * sink->stride + panel * (PANEL / 2) + LANES * j, V_MUL(NAME(silu)(sum[j]), sum[j + WIDE / 2]));
    }
}

#define TILE_OF(count) case count: NAME(tile)(count, x + row * in + k * INPUTS, in, w, steps, sums + row - first, next, bytes); break;
/* x [rows, in] by the panels of one thread, some rows and some steps over the inputs at a time, so that weights are
 * read from the nearest cache but once. What follows comes from memory meanwhile: for one tile some steps ahead, for
 * several a share of the next steps with each, as memory would be idle while they multiply. */
static void NAME(multiply)(const INPUT *x, int64_t rows, const Matrix *matrix, const Sink *sink, int64_t thread, int64_t threads) {
    int64_t in = matrix->in, each = sink->kind == GATED ? PANEL / 2 : PANEL, panels = up_to(sink->outputs, each) / each;
    V sums[TILES * TILE][WIDE];
    for (int64_t panel = panels * thread / threads; panel < panels * (thread + 1) / threads; panel++)
        for (int64_t first = 0, some; first < rows; first += some) {
            some = least(TILES * TILE, rows - first);
            memset(sums, 0, (size_t)some * sizeof(sums[0]));
            for (int64_t k = 0, steps; k < in / INPUTS; k += steps) {
                steps = least(STEPS, in / INPUTS - k);
                const WEIGHT *w = (const WEIGHT *)matrix->weight + (panel * in + k * INPUTS) * PANEL;
                for (int64_t t = 0, tiles = (some + TILE - 1) / TILE; t < tiles; t++) {
                    int64_t row = first + some * t / tiles, bytes = (STEP + tiles - 1) / tiles;
                    const char *next = (const char *)w + (tiles == 1 ? NEAR / 4 : STEPS * (STEP + t * bytes));
                    switch (first + some * (t + 1) / tiles - row) {
                        TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
                    }
                }
            }
            for (int64_t row = 0; row < some; row++) NAME(put)(sink, first + row, panel, sums[row]);
        }
}
#undef TILE_OF

/* ---------------------------------------------------------------- norms */

static inline float NAME(sum)(V x) {
    float part[LANES], total = 0.0f;
    V_STORE(part, x);
    for (int i = 0; i < LANES; i++) total += part[i];
    return total;
}

static inline float NAME(largest)(V x) {
    float part[LANES], most = -INFINITY;
    V_STORE(part, x);
    for (int i = 0; i < LANES; i++) most = part[i] > most ? part[i] : most;
    return most;
}

/* The factor of a root-mean-square norm of activations, or of floats. */
static inline V NAME(scale)(const ACT *x, int64_t dim, double eps) {
    V squares = V_ZERO;
    for (int64_t i = 0; i < dim; i += LANES) {
        V value = LOAD_ACT(x + i);
        squares = V_FMA(value, value, squares);
    }
    return V_SET(1.0f / sqrtf(NAME(sum)(squares) / (float)dim + (float)eps));
}

static void NAME(norm)(const ACT *x, const float *weight, double eps, int64_t dim, INPUT *y) {
    V scale = weight ? NAME(scale)(x, dim, eps) : V_SET(1.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
        V value = V_MUL(LOAD_ACT(x + i), scale);
        STORE_INPUT(y + i, weight ? V_MUL(value, V_LOAD(weight + i)) : value);
    }
}

static void NAME(norm_to_act)(const ACT *x, const float *weight, double eps, int64_t dim, ACT *y) {
    V scale = weight ? NAME(scale)(x, dim, eps) : V_SET(1.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
        V value = V_MUL(LOAD_ACT(x + i), scale);
        STORE_ACT(y + i, weight ? V_MUL(value, V_LOAD(weight + i)) : value);
    }
}

/* x += norm(part): of families with norms behind attention and SwiGLU, too. */
static void NAME(add_normed)(const float *part, const float *weight, double eps, int64_t dim, ACT *x) {
    V squares = V_ZERO;
    for (int64_t i = 0; i < dim; i += LANES) squares = V_FMA(V_LOAD(part + i), V_LOAD(part + i), squares);
    V scale = V_SET(1.0f / sqrtf(NAME(sum)(squares) / (float)dim + (float)eps));
    for (int64_t i = 0; i < dim; i += LANES)
        STORE_ACT(x + i, V_FMA(V_MUL(V_LOAD(part + i), scale), V_LOAD(weight + i), LOAD_ACT(x + i)));
}

/* ---------------------------------------------------------------- heads */

/* Chameleon's norm of one head: layer norm with weights of its own, in place. */
static void NAME(head_norm)(float *x, const float *weight, const float *bias, int64_t size) {
    V total = V_ZERO, squares = V_ZERO;
    for (int64_t i = 0; i < size; i += LANES) total = V_ADD(total, V_LOAD(x + i));
    V mean = V_SET(NAME(sum)(total) / (float)size);
    for (int64_t i = 0; i < size; i += LANES) {
        V off = V_SUB(V_LOAD(x + i), mean);
        squares = V_FMA(off, off, squares);
    }
    V scale = V_SET(1.0f / sqrtf(NAME(sum)(squares) / (float)size + 1e-5f));
    for (int64_t i = 0; i < size; i += LANES)
        V_STORE(x + i, V_FMA(V_MUL(V_SUB(V_LOAD(x + i), mean), scale), V_LOAD(weight + i), V_LOAD(bias + i)));
}

static void NAME(rotate)(const float *x, const float *rope, int64_t size, int64_t interleaved, float *y) {
    int64_t pairs = size / 2, step = interleaved ? 2 : 1, far = interleaved ? 1 : pairs;
    for (int64_t i = 0; i < pairs; i++) {
        float a = x[i * step], b = x[i * step + far], cos = rope[i], sin = rope[pairs + i];
        y[i * step] = a * cos - b * sin;
        y[i * step + far] = b * cos + a * sin;
    }
}

static inline void NAME(store_head)(const float *x, int64_t size, ACT *y) {
    for (int64_t i = 0; i < size; i += LANES) STORE_ACT(y + i, V_LOAD(x + i));
}

/* One layer's cache, seen by a row and a key head; `next` is what its thread reads behind its values. */
typedef struct {
    const ACT *keys, *values, *next;
    int64_t stride;
} NAME(View);

/* What a thread needs for itself. */
typedef struct {
    float *scores;  /* [BLOCK, S rounded up] */
    ACT *moved;     /* [2 D, head_dim] */
    ACT *queries;   /* [T group, head_dim] */
    float *head;    /* [head_dim] */
} NAME(Scratch);

/* Move what was accepted, then write the new keys and values of a row and a key head. */
static void NAME(write)(const Call *c, const Layer *layer, int64_t row, int64_t head, const float *qkv, NAME(Scratch) *scratch) {
    int64_t size = c->head_dim, moves = c->moves, width = (c->heads + 2 * c->kv) * size;
    ACT *keys = (ACT *)layer->keys + head * c->head_stride, *values = (ACT *)layer->values + head * c->head_stride;
    const int32_t *goal = c->index + row * (moves + c->tokens), *source = c->source ? c->source + row * moves : 0;
    size_t bytes = (size_t)size * sizeof(ACT);
    for (int64_t i = 0; i < moves; i++) {
        memcpy(scratch->moved + 2 * i * size, keys + source[i] * c->position_stride, bytes);
        memcpy(scratch->moved + (2 * i + 1) * size, values + source[i] * c->position_stride, bytes);
    }
    for (int64_t i = 0; i < moves; i++) {
        memcpy(keys + goal[i] * c->position_stride, scratch->moved + 2 * i * size, bytes);
        memcpy(values + goal[i] * c->position_stride, scratch->moved + (2 * i + 1) * size, bytes);
    }
    for (int64_t t = 0; t < c->tokens; t++) {
        float *key = (float *)qkv + (row * c->tokens + t) * width + (c->heads + head) * size;
        if (layer->k_norm) NAME(head_norm)(key, layer->k_norm + head * size, layer->k_norm_bias + head * size, size);
        NAME(rotate)(key, c->rope + (row * c->tokens + t) * size, size, c->interleaved, scratch->head);
        NAME(store_head)(scratch->head, size, keys + goal[moves + t] * c->position_stride);
        NAME(store_head)(key + c->kv * size, size, values + goal[moves + t] * c->position_stride);
    }
}

/* Scores of one query at LANES positions from `first` on. */
static inline V NAME(scores)(const ACT *query, const NAME(View) *view, int64_t first, int64_t length, int64_t last, int64_t size) {
    V sum[LANES];
    const ACT *ahead = first + AHEAD < length ? view->keys : view->values - up_to(length, LANES) * view->stride;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        const ACT *key = view->keys + least(first + i, last) * view->stride;
        for (int64_t d = 0; d < size * (int64_t)sizeof(ACT); d += 64) _mm_prefetch((const char *)(ahead + (first + i + AHEAD) * view->stride) + d, _MM_HINT_T0);
        V one = V_ZERO;
#if PAIRS
        int64_t d = 0;
        for (; d + 2 * LANES <= size; d += 2 * LANES)
            one = _mm512_dpbf16_ps(one, (__m512bh)_mm512_loadu_si512(query + d), (__m512bh)_mm512_loadu_si512(key + d));
        for (; d < size; d += LANES) one = V_FMA(LOAD_ACT(query + d), LOAD_ACT(key + d), one);
#else
        for (int64_t d = 0; d < size; d += LANES) one = V_FMA(LOAD_ACT(query + d), LOAD_ACT(key + d), one);
#endif
        sum[i] = one;
    }
    return V_SUMS(sum);
}

/* Softmax of one query over `length` positions, left unnormalised: returns 1 / sum. */
static float NAME(weigh)(const ACT *query, const NAME(View) *view, const float *mask, int64_t length, int64_t capacity, int64_t size, float *scores) {
    V scale = V_SET(1.0f / sqrtf((float)size)), most = V_SET(-INFINITY), total = V_ZERO;
    for (int64_t p = 0; p < length; p += LANES) {
        float edge[LANES];
        const float *hidden = mask + p;
        if (p + LANES > capacity) {
            for (int64_t i = 0; i < LANES; i++) edge[i] = p + i < capacity ? mask[p + i] : -3e38f;
            hidden = edge;
        }
        V score = V_FMA(NAME(scores)(query, view, p, length, capacity - 1, size), scale, V_LOAD(hidden));
        V_STORE(scores + p, score);
        most = V_MAX(most, score);
    }
    V top = V_SET(NAME(largest)(most));
    for (int64_t p = 0; p < length; p += LANES) {
        V weight = NAME(exp)(V_SUB(V_LOAD(scores + p), top));
        V_STORE(scores + p, weight);
        total = V_ADD(total, weight);
    }
    return 1.0f / NAME(sum)(total);
}

/* Weighted sums of values for `count` queries and `wide` vectors of their features. */
static inline __attribute__((always_inline)) void NAME(mix)(
    const int count, const int wide, const float *weights, int64_t stride, const ACT *values, const ACT *next, int64_t value_stride,
    int64_t length, const float *factor, INPUT *const *out) {
    V sum[4][4];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) sum[i][j] = V_ZERO;
    for (int64_t p = 0; p < length; p++) {
        V value[4];
        const ACT *ahead = (p + AHEAD < length ? values : next - length * value_stride) + (p + AHEAD) * value_stride;
        for (int j = 0; j < wide; j++) _mm_prefetch((const char *)(ahead + LANES * j), _MM_HINT_T0);
        for (int j = 0; j < wide; j++) value[j] = LOAD_ACT(values + p * value_stride + LANES * j);
        for (int i = 0; i < count; i++) {
            V weight = V_SET(weights[i * stride + p]);
            for (int j = 0; j < wide; j++) sum[i][j] = V_FMA(weight, value[j], sum[i][j]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) STORE_INPUT(out[i] + LANES * j, V_MUL(sum[i][j], V_SET(factor[i])));
}

#define MIX(count, wide) case wide * 8 + count: NAME(mix)(count, wide, scores, stride, view->values + d, view->next + d, view->stride, positions, factor, out); break;
static void NAME(mix_all)(int64_t count, const float *scores, int64_t stride, const NAME(View) *view, int64_t positions, const float *factor, INPUT **out, int64_t size) {
    for (int64_t d = 0; d < size;) {
        int64_t wide = (size - d) / LANES >= 4 ? 4 : (size - d) / LANES >= 2 ? 2 : 1;
        switch (wide * 8 + count) {
            MIX(1, 4) MIX(2, 4) MIX(3, 4) MIX(4, 4)
            MIX(1, 2) MIX(2, 2) MIX(3, 2) MIX(4, 2)
            MIX(1, 1) MIX(2, 1) MIX(3, 1) MIX(4, 1)
        }
        for (int64_t i = 0; i < count; i++) out[i] += wide * LANES;
        d += wide * LANES;
    }
}
#undef MIX

/* Attention of a row's queries that share a key head. */
static ACT *NAME(seen)(const Call *c, void *cache, int64_t row, int64_t head) {
    return (ACT *)cache + head * c->head_stride + c->starts[row] * c->position_stride;
}

static void NAME(attend)(const Call *c, const Layer *layer, int64_t row, int64_t head, const ACT *next, float *qkv, int64_t length, INPUT *mixed, NAME(Scratch) *scratch) {
    int64_t size = c->head_dim, group = c->heads / c->kv, width = (c->heads + 2 * c->kv) * size, count = c->tokens * group;
    int64_t stride = up_to(c->capacity, BLOCK);
    NAME(View) view = {NAME(seen)(c, layer->keys, row, head), NAME(seen)(c, layer->values, row, head), next, c->position_stride};
    for (int64_t n = 0; n < count; n++) {  /* token n / group, head n % group of the group */
        int64_t token = row * c->tokens + n / group, h = head * group + n % group;
        float *query = qkv + token * width + h * size;
        if (layer->q_norm) NAME(head_norm)(query, layer->q_norm + h * size, layer->q_norm_bias + h * size, size);
        NAME(rotate)(query, c->rope + token * size, size, c->interleaved, scratch->head);
        NAME(store_head)(scratch->head, size, scratch->queries + n * size);
    }
    for (int64_t n = 0; n < count; n += 4) {
        int64_t some = least(4, count - n);
        float factor[4];
        INPUT *out[4];
        for (int64_t i = 0; i < some; i++) {
            int64_t token = row * c->tokens + (n + i) / group, h = head * group + (n + i) % group;
            factor[i] = NAME(weigh)(scratch->queries + (n + i) * size, &view, c->mask + token * c->capacity, length, c->capacity, size, scratch->scores + i * stride);
            out[i] = mixed + token * c->heads * size + h * size;
        }
        NAME(mix_all)(some, scratch->scores, stride, &view, least(length, c->capacity), factor, out, size);
    }
}

/* ---------------------------------------------------------------- the pass */

/* Positions that a row's queries attend to end before this one. */
static int64_t NAME(filled)(const Call *c, int64_t row) {
    int64_t end = 1;
    for (int64_t t = 0; t < c->tokens; t++) {
        const float *mask = c->mask + (row * c->tokens + t) * c->capacity;
        for (int64_t p = c->capacity; p > end; p--)
            if (mask[p - 1] > -1e30f) end = p;
    }
    return end;
}

/* A product of SwiGLU by the panels of one thread, for each run of tokens that share its matrix. */
static void NAME(feed)(const Call *c, const INPUT *x, const Matrix *image, const Matrix *word, const Sink *sink, int64_t thread, int64_t threads) {
    int64_t size = sink->kind == GATED ? sizeof(INPUT) : sink->kind == ADDED ? sizeof(ACT) : sizeof(float);
    const uint8_t *words = word->weight ? c->words : 0;
    for (int64_t first = 0, end, count = c->rows * c->tokens; first < count; first = end) {
        for (end = first + 1; end < count && (!words || words[end] == words[first]);) end++;
        Sink part = *sink;
        part.y = (char *)sink->y + first * sink->stride * size;
        NAME(multiply)(x + first * image->in, end - first, words && words[first] ? word : image, &part, thread, threads);
    }
}

static int NAME(decode)(const Call *c) {
    int64_t count = c->rows * c->tokens, dim = c->dim, size = c->head_dim, units = c->rows * c->kv;
    int64_t width = (c->heads + 2 * c->kv) * size, mixed_width = c->heads * size, ffn = up_to(c->ffn, PANEL);
    if (dim % LANES || size % LANES || c->ffn % (PANEL / 2) || c->heads % c->kv || mixed_width % 2) return -2;
    int64_t stride = up_to(c->capacity, BLOCK), group = c->heads / c->kv;
    int64_t shared_floats = count * (width + dim) + c->rows, inputs = count * (dim + mixed_width + ffn);
    int64_t own = 4 * stride * 4 + (2 * c->moves + c->tokens * group + 1) * size * (int64_t)sizeof(ACT) + 4 * size + 256;
    own = up_to(own, 64);
    char *memory = aligned(shared_floats * 4 + inputs * (int64_t)sizeof(INPUT) + 8 * c->rows + 256 + own * c->threads);
    if (!memory) return -1;
    float *qkv = (float *)memory, *part = qkv + count * width;
    int64_t *lengths = (int64_t *)(memory + up_to(4 * count * (width + dim), 64));
    INPUT *normed = (INPUT *)((char *)lengths + up_to(8 * c->rows, 64)), *mixed = normed + count * dim, *gated = mixed + count * mixed_width;
    char *scratches = (char *)up_to((int64_t)(gated + count * ffn), 64);
    ACT *x = c->x, *features = c->features;
    for (int64_t row = 0; row < c->rows; row++) lengths[row] = NAME(filled)(c, row);
#pragma omp parallel num_threads((int)c->threads)
    {
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        char *mine = scratches + own * thread;
        NAME(Scratch) scratch = {(float *)mine, 0, 0, 0};
        scratch.head = scratch.scores + 4 * stride;
        scratch.moved = (ACT *)(scratch.head + size);
        scratch.queries = scratch.moved + 2 * c->moves * size;
        for (int64_t l = 0; l < c->layer_count; l++) {
            const Layer *layer = c->layers + l;
            Sink to_qkv = {TO_FLOATS, qkv, width, width, layer->qkv.bias}, to_gated = {GATED, gated, c->ffn, c->ffn, 0};
            Sink to_x = {ADDED, x, dim, dim, 0}, to_part = {TO_FLOATS, part, dim, dim, 0};
            for (int64_t m = thread; m < count; m += threads) NAME(norm)(x + m * dim, layer->norm, c->eps, dim, normed + m * dim);
#pragma omp barrier
            NAME(multiply)(normed, count, &layer->qkv, &to_qkv, thread, threads);
#pragma omp barrier
            for (int64_t u = thread; u < units; u += threads) {
                NAME(write)(c, layer, u / c->kv, u % c->kv, qkv, &scratch);
                int64_t next = u + threads < units ? u + threads : u;
                NAME(attend)(c, layer, u / c->kv, u % c->kv, NAME(seen)(c, layer->keys, next / c->kv, next % c->kv), qkv, lengths[u / c->kv], mixed, &scratch);
            }
#pragma omp barrier
            NAME(multiply)(mixed, count, &layer->out, layer->post_norm ? &to_part : &to_x, thread, threads);
#pragma omp barrier
            for (int64_t m = thread; m < count; m += threads) {
                if (layer->post_norm) NAME(add_normed)(part + m * dim, layer->post_norm, c->eps, dim, x + m * dim);
                NAME(norm)(x + m * dim, layer->ffn_norm, c->eps, dim, normed + m * dim);
            }
#pragma omp barrier
            NAME(feed)(c, normed, &layer->gate_up, &layer->word_gate_up, &to_gated, thread, threads);
#pragma omp barrier
            NAME(feed)(c, gated, &layer->down, &layer->word_down, layer->ffn_post_norm ? &to_part : &to_x, thread, threads);
#pragma omp barrier
            for (int64_t m = thread; layer->ffn_post_norm && m < count; m += threads)
                NAME(add_normed)(part + m * dim, layer->ffn_post_norm, c->eps, dim, x + m * dim);
            for (int64_t a = 0; a < c->aux_count; a++)
                for (int64_t m = thread; c->aux[a] == l && m < count; m += threads)
                    memcpy(features + (m * (1 + c->aux_count) + 1 + a) * dim, x + m * dim, (size_t)dim * sizeof(ACT));
        }
        for (int64_t m = thread; m < count; m += threads)
            NAME(norm_to_act)(x + m * dim, c->final_norm, c->eps, dim, features + m * (1 + c->aux_count) * dim);
    }
    free(memory);
    return 0;
}

static int NAME(linear)(int64_t threads, const Matrix *matrix, const void *x, int64_t rows, void *y) {
    const INPUT *from = x;
    INPUT *converted = 0;
    if (PAIRS && matrix->in % 2) return -2;
    if (sizeof(INPUT) != sizeof(ACT)) {  /* bfloat16 activations, multiplied in float32 */
        converted = aligned(rows * matrix->in * (int64_t)sizeof(INPUT));
        if (!converted) return -1;
        for (int64_t i = 0; i < rows * matrix->in; i++) converted[i] = (INPUT)TO_FLOAT(((const ACT *)x)[i]);
        from = converted;
    }
    Sink sink = {TO_ACTS, y, matrix->out, matrix->out, matrix->bias};
#pragma omp parallel num_threads((int)threads)
    NAME(multiply)(from, rows, matrix, &sink, omp_get_thread_num(), omp_get_num_threads());
    free(converted);
    return 0;
}

static const Kernels JOIN(kernels, ISA, FORMAT) = {NAME(packed_bytes), NAME(pack), NAME(linear), NAME(decode)};

#undef ACT
#undef WEIGHT
#undef LOAD_ACT
#undef STORE_ACT
#undef LOAD_WEIGHT
#undef TO_FLOAT
#undef TO_ACT
#undef INPUT
#undef STORE_INPUT
#undef FACTOR
#undef LOAD_FACTOR
#undef SET_FACTOR
#undef ADD_PRODUCT
#undef WIDE
#undef INPUTS
#undef STEP
#undef STEPS

#endif
