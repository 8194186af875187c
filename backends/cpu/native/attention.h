/* Attention: heads are normed and rotated, the cache is written, queries read what they see of it. */

/* What a pass needs besides its call: what its threads share, and what one has for itself. */
typedef struct {
    const Call *call;
    float *qkv, *part;                /* [R T, (heads + 2 kv) head_dim], [R T, dim] */
    INPUT *normed, *mixed, *gated;    /* [R T, dim], [R T, heads head_dim], [R T, ffn] */
    int64_t *firsts, *ends;           /* [R] of the positions that a row's queries attend to */
    float *scores, *turned;           /* [QUERIES_AT_ONCE, S rounded up], [head_dim] */
    QUERY *query;                     /* [QUERIES_AT_ONCE, head_dim] */
    char *fixed;                      /* [R T] rows of fixed point */
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

/* Scores of `count` queries at LANES positions from `first` on: a key is read once for all. */
ALWAYS void NAME(scores)(const NAME(Pass) *pass, const int count, int64_t first, V *result) {
    int64_t size = pass->call->head_dim, stride = pass->call->position_stride, last = pass->capacity - 1;
    const ACT *keys = pass->keys, *ahead = first + AHEAD < pass->length ? keys : pass->values - up_to(pass->length, LANES) * stride;
    V sum[QUERIES_AT_ONCE][LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        const ACT *key = keys + least(first + i, last) * stride;
        const char *next = (const char *)(ahead + (first + i + AHEAD) * stride);
        for (int64_t d = 0; d < size * (int64_t)sizeof(ACT); d += 64) _mm_prefetch(next + d, _MM_HINT_T0);
        int64_t d = 0;
        V one[QUERIES_AT_ONCE];
        for (int n = 0; n < count; n++) one[n] = SET(0.0f);
#if PAIRS
        for (; QUERIES == BFLOAT16 && d + 2 * LANES <= size; d += 2 * LANES)
            for (int n = 0; n < count; n++)
                one[n] = _mm512_dpbf16_ps(one[n], NAME(pairs)(pass->query + n * size + d), NAME(pairs)(key + d));
#endif
        for (; d < size; d += LANES)
            for (int n = 0; n < count; n++) one[n] = FMA(NAME(load)(pass->query + n * size, d, QUERIES), LOAD_ACT(key, d), one[n]);
        for (int n = 0; n < count; n++) sum[n][i] = one[n];
    }
    for (int n = 0; n < count; n++) result[n] = NAME(sums)(sum[n]);
}

/* An additive mask at LANES positions from `first` on; what is behind the cache is hidden. */
ALWAYS V NAME(hidden)(const float *mask, int64_t first, int64_t capacity) {
    if (first + LANES <= capacity) return LOAD(mask + first);
    float edge[LANES];
    for (int64_t i = 0; i < LANES; i++) edge[i] = first + i < capacity ? mask[first + i] : -3e38f;
    return LOAD(edge);
}

/* Softmax of `count` queries over the positions, left unnormalised; `factor` is 1 / sum of each. */
ALWAYS void NAME(weigh)(const NAME(Pass) *pass, const int count, const float *const *mask, float *factor) {
    int64_t of_query = up_to(pass->call->capacity, BLOCK);
    V scale = SET(1.0f / sqrtf((float)pass->call->head_dim)), most[QUERIES_AT_ONCE], score[QUERIES_AT_ONCE];
    for (int n = 0; n < count; n++) most[n] = SET(-INFINITY);
    for (int64_t p = 0; p < pass->length; p += LANES) {
        NAME(scores)(pass, count, p, score);
        for (int n = 0; n < count; n++) {
            score[n] = FMA(score[n], scale, NAME(hidden)(mask[n], p, pass->capacity));
            STORE(pass->scores + n * of_query + p, score[n]);
            most[n] = MM(max_ps)(most[n], score[n]);
        }
    }
    for (int n = 0; n < count; n++) {
        V top = SET(NAME(largest)(most[n])), total = SET(0.0f);
        float *scores = pass->scores + n * of_query;
        for (int64_t p = 0; p < pass->length; p += LANES) {
            V weight = NAME(exp)(LOAD(scores + p) - top);
            STORE(scores + p, weight);
            total += weight;
        }
        factor[n] = 1.0f / NAME(sum)(total);
    }
}

#define WEIGH(count) case count: NAME(weigh)(pass, count, mask, factor); break;
static void NAME(weigh_all)(const NAME(Pass) *pass, int64_t count, const float *const *mask, float *factor) {
    switch (count) { WEIGH(1) WEIGH(2) WEIGH(3) WEIGH(4) }
}
#undef WEIGH

/* Weighted sums of values for `count` queries and `wide` vectors of their features from `first` on. */
ALWAYS void NAME(mix)(
    const NAME(Pass) *pass, const int count, const int wide, int64_t first, const float *factor, INPUT *const *out) {
    int64_t length = pass->length, stride = pass->call->position_stride, of_query = up_to(pass->call->capacity, BLOCK);
    const ACT *values = pass->values + first, *next = pass->next + first - length * stride;
    const float *weights = pass->scores;
    V sum[QUERIES_AT_ONCE][4];
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
    for (int64_t first = 0; first < count; first += QUERIES_AT_ONCE) {
        int64_t some = least(QUERIES_AT_ONCE, count - first);
        float factor[QUERIES_AT_ONCE];
        const float *mask[QUERIES_AT_ONCE];
        INPUT *out[QUERIES_AT_ONCE];
        for (int64_t i = 0; i < some; i++) {
            int64_t token = row * c->tokens + (first + i) / group, head = unit % c->kv * group + (first + i) % group;
            float *query = pass->qkv + (token * (c->heads + 2 * c->kv) + head) * size;
            NAME(turn)(pass, token, head, query, layer->q_norm, layer->q_norm_bias, pass->query + i * size, QUERIES);
            mask[i] = c->mask + token * c->capacity + pass->firsts[row];
            out[i] = pass->mixed + (token * c->heads + head) * size;
        }
        NAME(weigh_all)(pass, some, mask, factor);
        NAME(mix_all)(pass, some, factor, out);
    }
}

