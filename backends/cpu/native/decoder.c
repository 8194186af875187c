/* The decoder of a transformer as one call, for x86-64: norms, projections, rotation, the one write into the cache,
 * attention, SwiGLU and residual sums of all layers, in one team of threads with barriers between the parts.
 *
 * `kernels.h` is compiled once for each instruction set and number format; which one runs is chosen when the library
 * is loaded. A row's result depends on nothing but itself: each output adds its inputs in one order, and each
 * query passes over the positions in their order, independent of other rows, threads and positions. */
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

#define RECENT (__GNUC__ >= 11)  /* compilers that know AVX-VNNI and tiles */
#if RECENT
#include "tiles.h"
#endif

typedef uint16_t half;
typedef uint32_t word __attribute__((may_alias));

/* Rows of a tile in registers, rows that share weights, and bytes of weights of floats that they take at a time, which the
 * nearest cache holds twice; positions of a block of attention, how many positions ahead its cache is fetched, and queries that share what is read. */
enum { TILE = 6, SHARING = 48, NEAR = 16384, BLOCK = 16, AHEAD = 32, QUERIES_AT_ONCE = 4 };
enum { SCALED = 256, DEEP = 64 };  /* inputs that share a scale as fixed point; bytes of a row of a tile */
static const float LARGEST = 32512.0f, TINY = 1e-30f;  /* of fixed point: the largest number; inputs up to this are 0 */
_Static_assert(TILE >= 5, "three rows or more are never cut into tiles of one or two, see AT_ONCE");

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t up_to(int64_t size, int64_t step) { return (size + step - 1) / step * step; }
static inline int64_t bytes_of(int64_t format) { return format == FLOAT32 ? sizeof(float) : sizeof(half); }
static void *aligned(int64_t bytes) { return aligned_alloc(64, (size_t)up_to(bytes + 64, 64)); }

static void *take(int64_t *at, int64_t bytes) {  /* the next piece of memory that begins at `at` */
    void *taken = (void *)*at;
    *at += up_to(bytes, 64);
    return taken;
}

/* A row of fixed point has two halves, of low and high bytes where tiles take them; its scales are at its end. */
static inline int64_t scale_bytes(int64_t in) { return up_to(4 * ((in + SCALED - 1) / SCALED), 64); }
static inline int64_t half_row(int64_t in) { return up_to(in, DEEP) + scale_bytes(in); }
static inline char *row_scales(const char *row, int64_t in) { return (char *)row + 2 * half_row(in) - scale_bytes(in); }
static inline int64_t groups_of(const Matrix *matrix) { return matrix->group ? up_to(matrix->in, DEEP) / matrix->group : 1; }

/* Of a panel's `j`-th output the row of the matrix, or -1. */
static inline int64_t row_of(const Matrix *matrix, const Source *source, int64_t panel, int64_t j, int64_t size) {
    int64_t each = source->gated ? size / 2 : size, outputs = source->gated ? matrix->out / 2 : matrix->out;
    int64_t output = panel * each + j % each;
    return output < outputs ? j / each * outputs + output : -1;
}

/* Where the sums of a product go. */
typedef struct {
    enum { KEPT, ADDED, GATED } kind;  /* ADDED: to activations; GATED: silu(gate) * up, half as many numbers */
    int64_t format;
    void *y;
} Sink;

/* What each instance of `kernels.h` offers. */
typedef struct {
    int64_t panel;
    void (*pack)(const Matrix *matrix, const Source *source);
    int (*linear)(int64_t threads, const Matrix *matrix, const void *x, int64_t rows, void *y);
    int (*decode)(const Call *call);
} Kernels;

/* ---------------------------------------------------------------- instances of `kernels.h` */

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(a) JOIN(a, ISA, FORMAT)
#define ALWAYS static inline __attribute__((always_inline))

static const float HIDDEN = -1e30f;  /* an additive mask hides a position by less than this */

/* Of every vector. */
#define SET MM(set1_ps)
#define LOAD MM(loadu_ps)
#define STORE MM(storeu_ps)
#define FMA MM(fmadd_ps)

/* Formats and types of activations, weights, and inputs of products. */
#define SMALL (FORMAT >= INTEGERS)
#define ACTS (FORMAT == BFLOAT16 || FORMAT == INTEGERS ? BFLOAT16 : FLOAT32)
#define INPUTS (PAIRS && !SMALL ? BFLOAT16 : FLOAT32)
#define QUERIES (PAIRS && ACTS == BFLOAT16 ? BFLOAT16 : FLOAT32)
#define NUMBER(format) __typeof__(__builtin_choose_expr((format) == FLOAT32, 0.0f, (half)0))
#define ACT NUMBER(ACTS)
#define STORED __typeof__(__builtin_choose_expr(SMALL, (int8_t)0, (NUMBER(FORMAT))0))
#define INPUT NUMBER(INPUTS)
#define QUERY NUMBER(QUERIES)
#define LOAD_ACT(x, at) NAME(load)(x, at, ACTS)
#define STORE_ACT(y, at, x) NAME(store)(y, at, ACTS, x)
#define STORE_INPUT(y, at, x) NAME(store)(y, at, INPUTS, x)

#define PANEL (4 * LANES)
#define AT_ONCE(count) (LANES == 8 && count > 2 ? 2 : WIDE)  /* vectors of a panel whose sums registers hold for so many rows */
#define MIXED (FORMAT == BFLOAT16 && !PAIRS)
#define WIDE (PANEL / LANES)  /* vectors of a panel */
#define TAKEN (SMALL ? 4 : PAIRS + 1)  /* inputs in one step of a product, and the bytes of a panel's weights for them */
#define STEP (TAKEN * PANEL * (int)sizeof(STORED))
#define STEPS (SMALL ? SCALED / TAKEN : (TILES ? 2 : 1) * NEAR / STEP)
#define INPUT_BYTES (SMALL ? 2 - TILES : (int)sizeof(INPUT))  /* from a row's input to the next one */
#define ROWS_OF_TILE (SMALL ? 8 : 16)

/* Instruction sets only grow: AVX2 with FMA and F16C; AVX512; with products of integers (VNNI) of either; with products of
 * bfloat16 pairs; with tiles. ADD_PAIRS adds products of pairs of 16 bits, BY_PARITY puts inputs 0 2 1 3 for 0 1 2 3. */
#define TILES 0
#define PAIRS 0
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define LANES 8
#define V __m256
#define MM(operation) _mm256_##operation
#define BY_PARITY(x) __builtin_shuffle(x, (__typeof__(x)){0, 2, 1, 3, 4, 6, 5, 7})
#define ISA avx2
#define ADD_PAIRS(sum, a, b) MM(add_epi32)(sum, MM(madd_epi16)(a, b))
#include "all_formats.h"
#include "sampling.h"
#include "step.h"
#undef ISA
#undef ADD_PAIRS

#if RECENT
#pragma GCC push_options
#pragma GCC target("avxvnni")
#define ISA avx2_vnni
#define ADD_PAIRS MM(dpwssd_avx_epi32)
#include "integer_formats.h"
#pragma GCC pop_options
#undef ISA
#undef ADD_PAIRS
#endif
#undef LANES
#undef V
#undef MM
#undef BY_PARITY

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define LANES 16
#define V __m512
#define MM(operation) _mm512_##operation
#define BY_PARITY(x) __builtin_shuffle(x, (__typeof__(x)){0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15})
#define ISA avx512
#define ADD_PAIRS(sum, a, b) MM(add_epi32)(sum, MM(madd_epi16)(a, b))
#include "all_formats.h"
#undef ISA
#undef ADD_PAIRS

#pragma GCC target("avx512vnni")
#define ISA avx512_vnni
#define ADD_PAIRS MM(dpwssd_epi32)
#include "integer_formats.h"
#undef ISA
#undef PAIRS

#pragma GCC target("avx512bf16")
#define ISA avx512_bf16
#define PAIRS 1
#define FORMAT BFLOAT16
#include "kernels.h"
#define FORMAT INTEGERS
#include "kernels.h"
#undef ISA
#undef TILES

#if RECENT
#ifndef PLAIN_TILES
#pragma GCC target("amx-tile,amx-bf16,amx-int8")
#endif
#define ISA avx512_amx
#define TILES 1
#define FORMAT BFLOAT16
#include "kernels.h"
#include "integer_formats.h"
#endif
#pragma GCC pop_options

/* ---------------------------------------------------------------- which of them */

static const struct {
    const char *name;
    const Kernels *formats[5];
} SETS[] = {
#if RECENT
    {"avx512_amx", {&kernels_avx512_amx_0, &kernels_avx512_1, &kernels_avx512_2, &kernels_avx512_amx_3, &kernels_avx512_amx_4}},
#endif
    {"avx512_bf16", {&kernels_avx512_bf16_0, &kernels_avx512_1, &kernels_avx512_2, &kernels_avx512_bf16_3, &kernels_avx512_vnni_4}},
    {"avx512_vnni", {&kernels_avx512_0, &kernels_avx512_1, &kernels_avx512_2, &kernels_avx512_vnni_3, &kernels_avx512_vnni_4}},
    {"avx512", {&kernels_avx512_0, &kernels_avx512_1, &kernels_avx512_2, &kernels_avx512_3, &kernels_avx512_4}},
#if RECENT
    {"avx2_vnni", {&kernels_avx2_0, &kernels_avx2_1, &kernels_avx2_2, &kernels_avx2_vnni_3, &kernels_avx2_vnni_4}},
#endif
    {"avx2", {&kernels_avx2_0, &kernels_avx2_1, &kernels_avx2_2, &kernels_avx2_3, &kernels_avx2_4}},
};
enum { SET_COUNT = sizeof(SETS) / sizeof(SETS[0]) };
static int chosen = -1;

/* Whether processor and system have tiles of bfloat16 and of integers, and this process may use them. */
static int has_tiles(void) {
#if defined(PLAIN_TILES) || !RECENT
    return RECENT;
#else
    enum { OSXSAVE = 1 << 27, TILES_OF_ALL = 1 << 22 | 1 << 24 | 1 << 25, KEPT_BY_THE_SYSTEM = 3 << 17 };
    unsigned a, b, c, d, kept, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES_OF_ALL) != TILES_OF_ALL) return 0;
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    return (kept & KEPT_BY_THE_SYSTEM) == KEPT_BY_THE_SYSTEM && tiles_allowed();
#endif
}

static int supported(const char *set) {
#define HAS __builtin_cpu_supports
#define IS(name) (!strcmp(set, name))
    unsigned a, b, c, d;
    __builtin_cpu_init();
    int f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;  /* for which GCC 10 has no name */
    int avx_vnni = __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1 << 4;
    int avx2 = HAS("avx2") && HAS("fma") && f16c;
    int avx512 = avx2 && HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl");
    int vnni = avx512 && HAS("avx512vnni"), bf16 = vnni && HAS("avx512bf16");
    if (IS("avx512_amx")) return bf16 && has_tiles();
    return IS("avx512_bf16") ? bf16 : IS("avx512_vnni") ? vnni : IS("avx512") ? avx512 : avx2 && (avx_vnni || IS("avx2"));
}

static const Kernels *kernels(int64_t format) { return SETS[chosen].formats[format]; }

__attribute__((constructor)) static void choose(void) {
    for (chosen = 0; chosen < SET_COUNT && !supported(SETS[chosen].name);) chosen++;
}

const char *lantern_isa(void) { return chosen < SET_COUNT ? SETS[chosen].name : ""; }

int lantern_use(const char *isa) {
    for (int set = 0; set < SET_COUNT; set++)
        if (!strcmp(isa, SETS[set].name) && supported(isa)) return chosen = set, 1;
    return 0;
}

int64_t lantern_packed_bytes(int64_t format, const Matrix *matrix) {
    int64_t out = up_to(matrix->out, kernels(format)->panel), filled = up_to(matrix->in, DEEP);
    if (format < INTEGERS) return out * matrix->in * bytes_of(format);
    return out * (matrix->group ? filled / 2 + groups_of(matrix) * 5 : filled + 4);  /* a scale, and of 4 bits a zero */
}

void lantern_pack(int64_t format, const Matrix *matrix, const Source *source) {
    char *packed = (char *)matrix->weight, *end = packed + lantern_packed_bytes(format, matrix);
    char *first = (char *)up_to((int64_t)packed, 4096);
    if (end - first >= 4096) madvise(first, (size_t)(end - first), MADV_HUGEPAGE);  /* where the kernel can: reads wait less */
    kernels(format)->pack(matrix, source);
}

int lantern_linear(int64_t format, int64_t threads, const Matrix *matrix, const void *x, int64_t rows, void *y) {
    return kernels(format)->linear(threads, matrix, x, rows, y);
}

int lantern_decode(const Call *call) { return kernels(call->format)->decode(call); }

#endif  /* on another processor torch's form serves */

int64_t lantern_abi(void) { return LANTERN_ABI; }
