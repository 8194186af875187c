/* The decoder of a transformer as one call, for x86-64: norms, projections, rotation, the one write into the cache,
 * attention, SwiGLU and residual sums of all layers, in one team of threads with barriers between the parts.
 *
 * `kernels.h` is compiled once for each instruction set and number format; which one runs is chosen when the library
 * is loaded. A row's result depends on nothing but itself: each output is one sum over its inputs in their order, and
 * each query one pass over the positions in their order, whatever rows, threads or positions are beside them. */
#include "decoder.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <omp.h>

typedef uint16_t half;

/* Rows of a tile of a product, tiles that share sums, bytes of weights that they take at a time, which the nearest cache
 * holds twice; positions and queries of a block of attention, and how far ahead its cache is fetched. */
enum { TILE = 6, TILES = 8, NEAR = 16384, BLOCK = 16, AHEAD = 16 };

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t up_to(int64_t size, int64_t step) { return (size + step - 1) / step * step; }
static void *aligned(int64_t bytes) { return aligned_alloc(64, (size_t)up_to(bytes + 64, 64)); }

static inline float from_bf16(half x) {
    union { uint32_t bits; float value; } word = {.bits = (uint32_t)x << 16};
    return word.value;
}

static inline half to_bf16(float x) {  /* to nearest, ties to even */
    union { float value; uint32_t bits; } word = {.value = x};
    if (x != x) return 0x7fc0;
    return (half)((word.bits + 0x7fff + ((word.bits >> 16) & 1)) >> 16);
}

/* Where the sums of a product go. */
typedef struct {
    enum { TO_FLOATS, TO_ACTS, ADDED, GATED } kind;  /* ADDED: to activations; GATED: silu(gate) * up, as an input */
    void *y;
    int64_t stride, outputs;
    const float *bias;
} Sink;

/* What each instance of `kernels.h` offers. */
typedef struct {
    int64_t (*packed_bytes)(int64_t in, int64_t out);
    void (*pack)(const void *weight, int64_t in, int64_t out, int gated, void *packed);
    int (*linear)(int64_t threads, const Matrix *matrix, const void *x, int64_t rows, void *y);
    int (*decode)(const Call *call);
} Kernels;

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(a) JOIN(a, ISA, FORMAT)

/* ---------------------------------------------------------------- AVX2 with FMA and F16C: 8 numbers */

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ISA avx2
#define LANES 8
#define PANEL 16
#define PAIRS 0
typedef __m256 v8;
#define V v8
#define V_ZERO _mm256_setzero_ps()
#define V_SET(x) _mm256_set1_ps(x)
#define V_LOAD(p) _mm256_loadu_ps(p)
#define V_STORE(p, x) _mm256_storeu_ps(p, x)
#define V_ADD(a, b) _mm256_add_ps(a, b)
#define V_SUB(a, b) _mm256_sub_ps(a, b)
#define V_MUL(a, b) _mm256_mul_ps(a, b)
#define V_DIV(a, b) _mm256_div_ps(a, b)
#define V_MAX(a, b) _mm256_max_ps(a, b)
#define V_MIN(a, b) _mm256_min_ps(a, b)
#define V_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define V_ROUND(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define V_POW2(n) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23))
#define V_LOAD_BF16(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define V_LOAD_F16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
static inline void store_bf16_avx2(half *p, __m256 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    bits = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(bits));
}
#define V_STORE_BF16(p, x) store_bf16_avx2(p, x)
#define V_CLEAR_BELOW(x, limit, value) _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_GE_OQ), value)
/* Sums of the 8 vectors, one in each lane. */
static inline __m256 sums_avx2(const __m256 *a) {
    __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    __m256 y = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}
#define V_SUMS(a) sums_avx2(a)
#include "kernels.h"
#include "sampling.h"
#undef ISA
#undef LANES
#undef PANEL
#undef V
#undef V_ZERO
#undef V_SET
#undef V_LOAD
#undef V_STORE
#undef V_ADD
#undef V_SUB
#undef V_MUL
#undef V_DIV
#undef V_MAX
#undef V_MIN
#undef V_FMA
#undef V_ROUND
#undef V_POW2
#undef V_LOAD_BF16
#undef V_LOAD_F16
#undef V_STORE_BF16
#undef V_CLEAR_BELOW
#undef V_SUMS
#pragma GCC pop_options

/* ---------------------------------------------------------------- AVX512: 16 numbers */

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define ISA avx512
#define LANES 16
#define PANEL 64
typedef __m512 v16;
#define V v16
#define V_ZERO _mm512_setzero_ps()
#define V_SET(x) _mm512_set1_ps(x)
#define V_LOAD(p) _mm512_loadu_ps(p)
#define V_STORE(p, x) _mm512_storeu_ps(p, x)
#define V_ADD(a, b) _mm512_add_ps(a, b)
#define V_SUB(a, b) _mm512_sub_ps(a, b)
#define V_MUL(a, b) _mm512_mul_ps(a, b)
#define V_DIV(a, b) _mm512_div_ps(a, b)
#define V_MAX(a, b) _mm512_max_ps(a, b)
#define V_MIN(a, b) _mm512_min_ps(a, b)
#define V_FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define V_ROUND(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define V_POW2(n) _mm512_scalef_ps(_mm512_set1_ps(1.0f), n)
#define V_LOAD_BF16(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define V_LOAD_F16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
static inline void store_bf16_avx512(half *p, __m512 x) {
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(bits));
}
#define V_STORE_BF16(p, x) store_bf16_avx512(p, x)
#define V_CLEAR_BELOW(x, limit, value) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), value)
/* Sums of the 16 vectors, one in each lane. */
static inline __m512 sums_avx512(const __m512 *a) {
    __m512 pairs[8], fours[4], eights[2];
    for (int i = 0; i < 8; i++)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(pairs[2 * i]), y = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; i++)
        eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                  _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88), _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}
#define V_SUMS(a) sums_avx512(a)
#include "kernels.h"
#undef ISA
#pragma GCC pop_options

/* ---------------------------------------------------------------- AVX512 with products of bfloat16 pairs */

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#undef PAIRS
#define PAIRS 1
#define ISA avx512_bf16
#define FORMAT BFLOAT16
#include "kernels.h"
#undef FORMAT
#undef ISA
#pragma GCC pop_options

/* ---------------------------------------------------------------- which of them */

static const struct {
    const char *name;
    const Kernels *formats[3];
} SETS[] = {
    {"avx512_bf16", {&kernels_avx512_bf16_0, &kernels_avx512_1, &kernels_avx512_2}},
    {"avx512", {&kernels_avx512_0, &kernels_avx512_1, &kernels_avx512_2}},
    {"avx2", {&kernels_avx2_0, &kernels_avx2_1, &kernels_avx2_2}},
};
enum { SET_COUNT = sizeof(SETS) / sizeof(SETS[0]) };
static int chosen = -1;

static int supported(int set) {
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    unsigned a, b, c, d;
    avx2 = avx2 && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    int pairs = avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
    return set == 0 ? pairs : set == 1 ? avx512 : avx2;
}

__attribute__((constructor)) static void choose(void) {
    for (chosen = 0; chosen < SET_COUNT && !supported(chosen);) chosen++;
}

const char *lantern_isa(void) { return chosen < SET_COUNT ? SETS[chosen].name : ""; }

int lantern_use(const char *isa) {
    for (int set = 0; set < SET_COUNT; set++)
        if (!strcmp(isa, SETS[set].name) && supported(set)) return chosen = set, 1;
    return 0;
}

int64_t lantern_packed_bytes(int64_t format, int64_t in, int64_t out) {
    return SETS[chosen].formats[format]->packed_bytes(in, out);
}

void lantern_pack(int64_t format, const void *weight, int64_t in, int64_t out, int gated, void *packed) {
    char *first = (char *)up_to((int64_t)packed, 4096), *end = (char *)packed + lantern_packed_bytes(format, in, out);
    if (end - first >= 4096) madvise(first, (size_t)(end - first), MADV_HUGEPAGE);  /* where the kernel can: reads wait less */
    SETS[chosen].formats[format]->pack(weight, in, out, gated, packed);
}

int lantern_linear(int64_t format, int64_t threads, const Matrix *matrix, const void *x, int64_t rows, void *y) {
    return SETS[chosen].formats[format]->linear(threads, matrix, x, rows, y);
}

int lantern_decode(const Call *call) { return SETS[chosen].formats[call->format]->decode(call); }

#endif  /* on another processor torch's form serves */

int64_t lantern_abi(void) { return LANTERN_ABI; }
