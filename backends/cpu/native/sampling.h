/* What follows the decoder: draws by inverse CDF, and the walk down a verified tree (`lantern_hpu/decode/accept.py`).
 *
 * Tokens are those of torch's plain forms where those sum in one thread, as sums run in the same order: cumulative ones from the first token on, in
 * double; totals in 32 partial sums, four vectors of 8, each 16 numbers at a time. */

enum { LANES_OF_SUM = 8, EACH = 16, LEVELS = 4 };

static inline __attribute__((always_inline)) float sum_by(const float *x, int64_t n, const int lanes) {
    float part[LEVELS][4 * LANES_OF_SUM] = {{0}}, result = 0.0f;
    const int wide = 4 * lanes;
    int64_t rows = n / wide, i = 0;
    while (i + EACH <= rows) {
        for (int64_t end = i + EACH; i < end; i++)
            for (int k = 0; k < wide; k++) part[0][k] += x[i * wide + k];
        for (int j = 1; j < LEVELS; j++) {
            for (int k = 0; k < wide; k++) part[j][k] += part[j - 1][k], part[j - 1][k] = 0.0f;
            if (i & ((EACH - 1) << 4 * j)) break;
        }
    }
    for (; i < rows; i++)
        for (int k = 0; k < wide; k++) part[0][k] += x[i * wide + k];
    for (int j = 1; j < LEVELS; j++)
        for (int k = 0; k < wide; k++) part[0][k] += part[j][k];
    for (i = rows * wide; i + lanes <= n; i += lanes)
        for (int k = 0; k < lanes; k++) part[0][k] += x[i + k];
    for (int j = 1; j < 4; j++)
        for (int k = 0; k < lanes; k++) part[0][k] += part[0][j * lanes + k];
    for (; i < n; i++) result += x[i];
    for (int k = 0; k < lanes; k++) result += part[0][k];
    return result;
}

static float total(const float *x, int64_t n) { return n < LANES_OF_SUM ? sum_by(x, n, 1) : sum_by(x, n, LANES_OF_SUM); }

/* The first token whose cumulative mass is beyond the target; the last one if none is. */
static int64_t beyond(const float *mass, int64_t n, float target) {
    int64_t first = 0, end = n - 1;
    while (first < end) {
        int64_t middle = (first + end) / 2;
        if (mass[middle] > target) end = middle;
        else first = middle + 1;
    }
    return first;
}

/* One distribution: draws without replacement. `start` and `size` are of each drawn interval of the cumulative mass. */
static void draw(const float *probs, int64_t n, const float *uniform, int64_t draws, int32_t *tokens, float *mass) {
    float *start = mass + n, *size = start + draws, taken = 0.0f;
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) mass[i] = (float)(sum += probs[i]);
    for (int64_t d = 0; d < draws; d++) {
        float left = mass[n - 1] - taken, target = uniform[d] * (left < 0.0f ? 0.0f : left), shifted = target;
        for (int64_t i = 0; i < d; i++) {  /* an interval's start, once the drawn ones before it are cut out */
            float gone = 0.0f;
            for (int64_t k = 0; k < d; k++) gone += start[k] < start[i] ? size[k] : 0.0f;
            shifted += target >= start[i] - gone ? size[i] : 0.0f;
        }
        int64_t token = beyond(mass, n, shifted);
        tokens[d] = (int32_t)token;
        size[d] = probs[token];
        start[d] = mass[token] - size[d];
        taken += size[d];
    }
}

int lantern_draw(int64_t threads, int64_t rows, int64_t n, int64_t draws, const float *probs, const float *uniform, int32_t *tokens) {
    int64_t own = up_to(n + 2 * draws, 16);
    float *memory = aligned(threads * own * 4);
    if (!memory) return -1;
#pragma omp parallel for num_threads((int)threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        draw(probs + row * n, n, uniform + row * draws, draws, tokens + row * draws, memory + omp_get_thread_num() * own);
    free(memory);
    return 0;
}

/* Mass of the nearest codes, added up as long as the sum stays within the bound. */
static float lent_mass(const float *p, const int32_t *near, int64_t count, float bound) {
    double sum = 0.0;
    float most = 0.0f;
    for (int64_t i = 0; i < count && (float)(sum += p[near[i]]) <= bound; i++) most = (float)sum;
    return most;
}

/* What is left of p once a draft was refused; where nothing is, p as it was at first. */
static void refuse(float *p, const float *q, const float *whole, float weight, int64_t n) {
    float rest = 1.0f - weight < 0.0f ? 0.0f : 1.0f - weight;
    for (int64_t i = 0; i < n; i++) {
        float left = p[i] - q[i] < 0.0f ? 0.0f : p[i] - q[i], share = p[i] * rest;
        p[i] = left < share ? share : left;
    }
    float sum = total(p, n);
    if (!(sum > 0.0f)) memcpy(p, whole, (size_t)n * 4);
    else for (int64_t i = 0; i < n; i++) p[i] /= sum;
}

static void walk(const Walk *w, int64_t image, float *q) {
    const int32_t *child = w->child + image * w->nodes * w->widest, *tokens = w->tokens + image * w->nodes;
    int64_t n = w->vocabulary;
    float *p = w->left + image * n, budget = w->budget ? w->budget[image] : 0.0f;
    int32_t node = 0;
    int walking = 1;
    for (int64_t depth = 0; depth < w->depths; depth++) {
        const int32_t *children = child + node * w->widest;
        float spent = 0.0f, share = 0.0f, weight = w->weight[image * w->depths + depth];
        int helped = 0;
        if ((walking = walking && children[0] > 0)) {
            int64_t at = (image * w->inner + w->row[image * w->nodes + node]) * n;
            const float *whole = w->p + at, *uniform = w->uniform + (image * w->depths + depth) * w->widest;
            memcpy(q, w->q + at, (size_t)n * 4);
            if (w->tv) {  /* blend */
                for (int64_t i = 0; i < n; i++) p[i] = whole[i] - q[i] < 0.0f ? 0.0f : whole[i] - q[i];
                float distance = total(p, n);
                spent = fminf(fminf(distance, w->tv[image]), fmaxf(budget, 0.0f));
                share = spent / fmaxf(distance, FLT_MIN);
            }
            memcpy(p, whole, (size_t)n * 4);
            walking = 0;
            for (int64_t c = 0; c < w->widest && children[c] > 0 && !walking; c++) {
                int64_t token = tokens[children[c]], next = c + 1 < w->widest && children[c + 1] > 0;
                float own = p[token], drawn = q[token], bar = uniform[c] * drawn, mass = own * weight;
                if (w->lenders) {
                    float bound = w->delta[image] + w->factor[image] * own;
                    mass += lent_mass(p, w->neighbours + token * w->lenders, least(w->k[image], w->lenders), bound);
                }
                if (drawn > 0.0f) {  /* else the draws ran out before it */
                    spent += fmaxf(fminf(mass, drawn) - fminf(own, drawn), 0.0f) / fmaxf(drawn, FLT_MIN);
                    if (w->tv && c == 0) mass += share * fmaxf(drawn - mass, 0.0f);
                    walking = bar < mass;  /* strictly: a token of probability 0 is not accepted */
                    if (walking) node = children[c], helped = !(bar < own);
                    else refuse(p, q, whole, weight, n);
                }
                q[token] = 0.0f;
                float sum = next && !walking ? fmaxf(total(q, n), 1e-30f) : 1.0f;
                for (int64_t i = 0; i < n && next && !walking; i++) q[i] /= sum;
            }
            budget -= spent;
        }
        w->relaxed[image * w->depths + depth] = (uint8_t)helped;
        w->spent[image * w->depths + depth] = spent;
    }
    w->node[image] = node;
}

int lantern_walk(const Walk *w) {
    int64_t own = up_to(w->vocabulary, 16);
    float *memory = aligned(w->threads * own * 4);
    if (!memory) return -1;
#pragma omp parallel for num_threads((int)w->threads) if (w->images > 1)
    for (int64_t image = 0; image < w->images; image++) walk(w, image, memory + omp_get_thread_num() * own);
    free(memory);
    return 0;
}

/* The node at or behind this one where the walk stops, and in `chance` that it was kept with; or -1. `memory` has room
 * for two distributions for each depth, which are filled where a child was refused or p is blended. */
static int32_t traverse(const Walk *w, int64_t image, int32_t node, int64_t depth, float weight, float budget, float *memory, float *chance) {
    int64_t n = w->vocabulary;
    const int32_t *children = w->child + (image * w->nodes + node) * w->widest, *tokens = w->tokens + image * w->nodes;
    const float *uniform = w->uniform + image * (w->nodes - 1) - 1;  /* of node 1 on */
    float *left = memory + 2 * depth * n, *rest = left + n, spent = 0.0f;
    int inner = children[0] > 0;
    int64_t at = inner ? (image * w->inner + w->row[image * w->nodes + node]) * n : 0, place = image * w->depths + depth;
    const float *whole = w->p + at, *p = whole, *q = w->q + at;
    if (inner && w->tv) {  /* blend */
        for (int64_t i = 0; i < n; i++) left[i] = p[i] - q[i] < 0.0f ? 0.0f : p[i] - q[i];
        float distance = total(left, n);
        spent = fminf(fminf(distance, w->tv[image]), fmaxf(budget, 0.0f));
        float share = spent / fmaxf(distance, FLT_MIN);
        for (int64_t i = 0; i < n; i++) left[i] = p[i] + share * (q[i] - p[i]);
        p = left;
    }
    for (int64_t c = 0; c < w->widest && children[c] > 0; c++) {
        int64_t token = tokens[children[c]], next = c + 1 < w->widest && children[c + 1] > 0;
        float drawn = q[token], own = p[token];
        if (drawn > 0.0f) {  /* else the draws ran out before it */
            float kept = fminf(weight * own / fmaxf(drawn, FLT_MIN), 1.0f);
            int32_t stop = traverse(w, image, children[c], depth + 1, kept, budget - spent, memory, chance);
            if (stop >= 0) {
                float bar = uniform[children[c]] / (stop == children[c] ? *chance : 1.0f);
                w->relaxed[place] = c == 0 && spent > 0.0f && bar >= whole[token] / fmaxf(fminf(own, drawn), FLT_MIN);
                w->spent[place] = spent;
                return stop;
            }
            for (int64_t i = 0; i < n; i++) left[i] = weight * p[i] - q[i] < 0.0f ? 0.0f : weight * p[i] - q[i];
            float mass = total(left, n), refused = mass + (1.0f - weight);
            if (!(mass > 0.0f)) memcpy(left, whole, (size_t)n * 4);
            else for (int64_t i = 0; i < n; i++) left[i] /= mass;
            p = left;
            weight = refused > 0.0f ? mass / refused : 1.0f;
        }
        if (next) {
            if (q != rest) memcpy(rest, q, (size_t)n * 4);
            rest[token] = 0.0f;
            float sum = fmaxf(total(rest, n), 1e-30f);
            for (int64_t i = 0; i < n; i++) rest[i] /= sum;
            q = rest;
        }
    }
    if (node && !(uniform[node] < weight)) return -1;
    if (inner) memcpy(w->left + image * n, p, (size_t)n * 4), w->spent[place] = spent;
    *chance = weight;
    return node;
}

int lantern_traverse(const Walk *w) {
    int64_t own = up_to(2 * w->depths * w->vocabulary, 16);
    float *memory = aligned(w->threads * own * 4);
    if (!memory) return -1;
    memset(w->relaxed, 0, (size_t)(w->images * w->depths));
    memset(w->spent, 0, (size_t)(w->images * w->depths) * 4);
#pragma omp parallel for num_threads((int)w->threads) if (w->images > 1)
    for (int64_t image = 0; image < w->images; image++) {
        float chance, budget = w->budget ? w->budget[image] : 0.0f, *mine = memory + omp_get_thread_num() * own;
        w->node[image] = traverse(w, image, 0, 0, 1.0f, budget, mine, &chance);
    }
    free(memory);
    return 0;
}
