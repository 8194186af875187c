/* Vectors of one instruction set: numbers of each format, exp, sums, norms by root mean square. */

typedef uint16_t NAME(Halves) __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef long long NAME(Packed) __attribute__((vector_size(2 * LANES), aligned(2), may_alias));  /* as intrinsics take them */
typedef long long NAME(Whole) __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint32_t NAME(Words) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(Both) __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

#if PAIRS
ALWAYS __m512bh NAME(pairs)(const void *x) { return (__m512bh)_mm512_loadu_si512(x); }
#endif

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

