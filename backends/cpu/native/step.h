/* What a step does around its passes and its walk: where tokens are, logits made ready for torch's softmax, tokens that
 * win a race, and what is kept. Each gives what its plain twin gives to the last bit; see `lantern_hpu/ops/kernels.py`. */

enum { SMALL_MASK = 1 << 16 };  /* numbers of a mask that one thread makes as fast as several */

static void place_token(const Place *p, int64_t row, int64_t token) {
    int64_t image = row % p->images, begin = p->start[image], at = row * p->tokens + token, pads = p->pads ? p->pads[row] : 0;
    int64_t position = begin + p->offset[image * p->tokens + token] - pads;
    const uint8_t *table = p->table + (image * p->tokens + token) * p->width, *valid = p->valid + row * p->capacity;
    const float *angles = p->angles + (position < 0 ? 0 : position) * p->turns;
    float *mask = p->mask + at * p->capacity, hidden = (float)p->hidden;
    p->index[at] = p->row_start[row] + (int32_t)begin + p->column[token];
    memcpy(p->rope + at * p->turns, angles, (size_t)p->turns * 4);
    for (int64_t s = 0; s < p->capacity; s++) mask[s] = s < begin ? 0.0f : hidden;
    for (int64_t s = begin; s < least(begin + p->width, p->capacity); s++) mask[s] = table[s - begin] ? 0.0f : hidden;
    for (int64_t s = 0; p->valid && s < p->capacity; s++) mask[s] = valid[s] ? mask[s] : hidden;
}

int lantern_rows(int64_t rows, int64_t written, int64_t positions, int64_t capacity, const int32_t *index, const float *mask, int64_t *starts, uint8_t *seen) {
    int count = 0;
    for (int64_t row = 0; row < rows; row++, mask += positions) {
        int64_t first = index[row * written], i = 0;
        starts[row] = capacity ? first - first % capacity : first;
        while (i < positions && mask[i] <= HIDDEN) i++;
        seen[row] = i < positions;
        count += seen[row];
    }
    return count;
}

int lantern_place(const Place *p) {
#pragma omp parallel for num_threads((int)p->threads) if (p->rows * p->tokens * p->capacity > SMALL_MASK)
    for (int64_t i = 0; i < p->rows * p->tokens; i++) place_token(p, i / p->tokens, i % p->tokens);
    return 0;
}

/* The k-th largest; equal ones count each. A float's bits, with those of negative ones turned round, rise with it. */
static float largest(const float *x, int64_t n, int64_t k) {
    typedef int32_t bits __attribute__((may_alias));
    const bits *all = (const bits *)x;
    union { int32_t key; float value; } found = {INT32_MIN};
    for (int bit = 31; bit >= 0; bit--) {
        int32_t trial = found.key ^ (int32_t)(1u << bit), count = 0;
        for (int64_t i = 0; i < n; i++) count += (all[i] ^ ((all[i] >> 31) & INT32_MAX)) >= trial;
        if (count >= k) found.key = trial;
    }
    found.key ^= (found.key >> 31) & INT32_MAX;
    return found.value;
}

int lantern_scale(int64_t threads, int64_t images, int64_t tokens, int64_t n, int64_t guided, int64_t most, const float *logits, const float *cfg, const float *heat, const int32_t *top_k, float *scaled) {
    int64_t rows = images * tokens;
#pragma omp parallel for num_threads((int)threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        int64_t image = row / tokens, k = most ? top_k[image] : n + 1;
        const float *x = logits + row * n, *u = x + rows * n;
        float *y = scaled + row * n, scale = cfg[image], temperature = heat[image];
        for (int64_t i = 0; i < n; i++) y[i] = (guided ? u[i] + scale * (x[i] - u[i]) : x[i]) / temperature;
        float least_kept = k <= most ? largest(y, n, k) : -INFINITY;
        for (int64_t i = 0; k <= most && i < n; i++) y[i] = y[i] < least_kept ? -INFINITY : y[i];
    }
    return 0;
}

int lantern_race(int64_t threads, int64_t rows, int64_t n, const float *probs, const float *noise, int32_t *tokens) {
#pragma omp parallel for num_threads((int)threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *p = probs + row * n, *e = noise + row * n;
        float most = -INFINITY;
        int64_t token = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < n; i++) most = p[i] * e[i] > most ? p[i] * e[i] : most;
        while (token < n - 1 && p[token] * e[token] != most) token++;
        tokens[row] = (int32_t)token;
    }
    return 0;
}

/* One image of `Step.keep`. */
static void keep(const Commit *c, int64_t image) {
    int64_t deepest = c->depths, at = image * c->nodes + c->node[image], taken = c->depth[at], before = c->count[image];
    int64_t after = least(before + taken + 1, c->last), running = before < c->last, kept = after - before - 1, spoiled = 0;
    const int32_t *path = c->path + at * (deepest + 1), *drafts = c->drafts + image * c->nodes;
    int32_t *way = c->way + image * (deepest + 1), *news = c->news + image * (deepest + 1);
    int32_t *accepted = c->accepted + image * deepest, *tokens = c->tokens + image * c->columns + before + 1;
    for (int64_t i = 0; i <= deepest; i++) {
        way[i] = path[i];
        tokens[i] = news[i] = i < taken ? drafts[path[i + 1]] : c->bonus[image];
    }
    for (int64_t j = 0; j < c->judged; j++) spoiled |= isnan(c->probs[(image * c->judged + j) * c->vocabulary]);
    for (int64_t i = 0; i < deepest && i < taken && before + i < c->last; i++) {
        accepted[i]++;
        c->relaxed[image] += c->helped[image * deepest + i];
    }
    for (int64_t i = 0; c->source && i < deepest; i++) {  /* see `Positions.moves` */
        int64_t beyond = i - (kept < 0 ? 0 : kept), start = c->prefix + before, idle = c->prefix + after + c->nodes + beyond;
        idle -= idle < c->size ? 0 : c->size;
        c->source[image * deepest + i] = (int32_t)(beyond < 0 ? start + path[i + 1] : idle);
        c->goal[image * deepest + i] = (int32_t)(beyond < 0 ? start + i + 1 : idle);
    }
    c->added[image] = (int32_t)(kept < 0 ? 1 : kept + 1);
    c->before[image] = (int32_t)before;
    c->count[image] = (int32_t)after;
    c->root[image] = c->bonus[image];
    c->known[image] = (int32_t)after + 1;
    c->steps[image] += (int32_t)running;
    c->spoiled[image] += (int32_t)(running && spoiled);
}

int lantern_commit(const Commit *c) {
    for (int64_t image = 0; image < c->images; image++) keep(c, image);
    return 0;
}
