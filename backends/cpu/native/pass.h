/* The pass through all layers, by one team of threads. */

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
static void NAME(feed)(const Call *c, const void *x, const Matrix *image, const Matrix *word, const Sink *sink) {
    int64_t row = (sink->kind == GATED ? image->out / 2 : image->out) * bytes_of(sink->format);
    const uint8_t *words = word->weight ? c->words : 0;
    for (int64_t first = 0, end, count = c->rows * c->tokens; first < count; first = end) {
        for (end = first + 1; end < count && (!words || words[end] == words[first]);) end++;
        Sink part = {sink->kind, sink->format, (char *)sink->y + first * row};
        NAME(multiply)((const char *)x + first * NAME(row_bytes)(image->in), end - first, words && words[first] ? word : image, &part);
    }
}

/* Rows [R T, in] in the form that products take. */
static const void *NAME(factors)(const NAME(Pass) *pass, const INPUT *x, int64_t in) {
#if SMALL
#pragma omp for schedule(static, 1)
    for (int64_t m = 0; m < pass->call->rows * pass->call->tokens; m++)
        NAME(fix)(x + m * in, in, pass->fixed + m * NAME(row_bytes)(in));
    return pass->fixed;
#else
    (void)pass, (void)in;
    return x;
#endif
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
    NAME(multiply)(NAME(factors)(pass, pass->normed, dim), count, &layer->qkv, &to_qkv);
#pragma omp barrier
#pragma omp for schedule(static, 1)
    for (int64_t unit = 0; unit < units; unit++) {
        NAME(write)(pass, layer, unit);
        NAME(attend)(pass, layer, unit, unit + threads < units ? unit + threads : unit);
    }
    NAME(multiply)(NAME(factors)(pass, pass->mixed, c->heads * c->head_dim), count, &layer->out, layer->attention_post_norm ? &to_part : &to_x);
#pragma omp barrier
#pragma omp for schedule(static, 1)
    for (int64_t m = 0; m < count; m++) {
        if (layer->attention_post_norm) NAME(add_normed)(c, pass->part + m * dim, layer->attention_post_norm, x + m * dim);
        NAME(norm)(c, x + m * dim, layer->ffn_norm, pass->normed + m * dim, INPUTS);
    }
    NAME(feed)(c, NAME(factors)(pass, pass->normed, dim), &layer->gate_up, &layer->word_gate_up, &to_gated);
#pragma omp barrier
    NAME(feed)(c, NAME(factors)(pass, pass->gated, c->ffn), &layer->down, &layer->word_down, layer->ffn_post_norm ? &to_part : &to_x);
#pragma omp barrier
    if (!layer->ffn_post_norm) return;
#pragma omp for schedule(static, 1) nowait
    for (int64_t m = 0; m < count; m++) NAME(add_normed)(c, pass->part + m * dim, layer->ffn_post_norm, x + m * dim);
}

/* Where the parts of a pass lie in memory from `at` on, as one thread has them. -> where they end */
static int64_t NAME(lay_out)(NAME(Pass) *pass, int64_t at, int64_t thread) {
    const Call *c = pass->call;
    int64_t count = c->rows * c->tokens, size = c->head_dim, dim = c->dim, input = sizeof(INPUT), act = sizeof(ACT);
    pass->qkv = take(&at, 4 * count * (c->heads + 2 * c->kv) * size);
    pass->part = take(&at, 4 * count * dim);
    int64_t widest = c->ffn > dim ? c->ffn : dim, read = count + (TILES ? 16 : 0);  /* rows that products read */
    pass->normed = take(&at, input * read * dim);
    pass->mixed = take(&at, input * read * c->heads * size);
    pass->gated = take(&at, input * read * c->ffn);
    if (SMALL) pass->fixed = take(&at, read * 2 * half_row(c->heads * size > widest ? c->heads * size : widest));
    pass->firsts = take(&at, 8 * c->rows);
    pass->ends = take(&at, 8 * c->rows);
    for (int64_t n = 0; n <= thread; n++) {
        pass->turned = take(&at, 4 * size);
        pass->query = take(&at, QUERIES_AT_ONCE * (int64_t)sizeof(QUERY) * size);
        pass->moved = take(&at, act * c->moves * size);
        pass->scores = take(&at, QUERIES_AT_ONCE * 4 * up_to(c->capacity, BLOCK) + 256);  /* no line close to another thread's */
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

/* Activations as inputs of products. */
static void NAME(convert)(const ACT *x, int64_t count, INPUT *to) {
    if (sizeof(INPUT) == sizeof(ACT)) memcpy(to, x, (size_t)count * sizeof(ACT));
    else for (int64_t i = 0; i < count; i++) ((word *)to)[i] = (word)((const half *)x)[i] << 16;
}

static int NAME(linear)(int64_t threads, const Matrix *matrix, const void *x, int64_t rows, void *y) {
    int64_t in = matrix->in, filled = SMALL ? up_to(in, DEEP) : in, read = rows + (TILES ? 16 : 0);
    if (!SMALL && PAIRS && in % 2) return -2;
    const int copied = SMALL || TILES || sizeof(INPUT) != sizeof(ACT);  /* else products read activations as they are */
    INPUT *inputs = copied ? aligned(read * filled * (int64_t)sizeof(INPUT)) : (INPUT *)x;
    char *fixed = SMALL ? aligned(read * NAME(row_bytes)(in)) : (char *)inputs;
    Sink sink = {KEPT, ACTS, y};
    int lacking = !inputs || !fixed;
#pragma omp parallel num_threads((int)threads) if (!lacking)
    if (!lacking) {
#pragma omp for schedule(static, 1)
        for (int64_t row = 0; row < (copied ? rows : 0); row++) {
            INPUT *to = memset(inputs + row * filled, 0, (size_t)filled * sizeof(INPUT));
            NAME(convert)((const ACT *)x + row * in, in, to);
#if SMALL
            NAME(fix)(to, filled, fixed + row * NAME(row_bytes)(in));
#endif
        }
        NAME(multiply)(fixed, rows, matrix, &sink);
    }
    if (SMALL) free(fixed);
    if (copied) free(inputs);
    return -lacking;
}
