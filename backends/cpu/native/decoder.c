/* The decoder of a transformer as one call, for x86-64: norms, projections, rotation, the one write into the cache,
 * attention, SwiGLU and residual sums of all layers, in one team of threads with barriers between the parts.
 *
 * `kernels.h` is compiled once for each instruction set and number format; which one runs is chosen when the library
 * is loaded. A row's result depends on nothing but itself: each output is one sum over its inputs in their order, and
 * each query one pass over the positions in their order, independent of other rows, threads and positions. */
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
typedef uint32_t word __attribute__((may_alias));

/* Rows of a tile of a product, rows that share weights, and bytes of weights that they take at a time, which the nearest
 * cache holds twice; positions of a block of attention, and how many positions ahead its cache is fetched. */
enum { TILE = 6, SHARING = 48, NEAR = 16384, BLOCK = 16, AHEAD = 32 };
_Static_assert(TILE >= 5, "three rows or more are never cut into tiles of one or two, see AT_ONCE");

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t up_to(int64_t size, int64_t step) { return (size + step - 1) / step * step; }
static inline int64_t bytes_of(int64_t format) { return format >= INT8 ? 1 : format == FLOAT32 ? sizeof(float) : sizeof(half); }
static void *aligned(int64_t bytes) { return aligned_alloc(64, (size_t)up_to(bytes + 64, 64)); }

static void *take(int64_t *at, int64_t bytes) {  /* the next piece of memory that begins at `at` */
    void *taken = (void *)*at;
    *at += up_to(bytes, 64);
    return taken;
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
    void (*pack)(const void *weight, const float *scale, int64_t in, int64_t out, int gated, void *packed);
    int (*linear)(int64_t threads, const Matrix *matrix, const void *x, int64_t rows, void *y);
    int (*decode)(const Call *call);
} Kernels;

/* ---------------------------------------------------------------- instances of `kernels.h` */

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(a) JOIN(a, ISA, FORMAT)
#define ALWAYS static inline __attribute__((always_inline))

static const float HIDDEN = -1e30f;  /* an additive mask hides a position by less than this */
static uint8_t BYTES[2][128] __attribute__((aligned(64)));  /* of 0 to 127 as bfloat16: the lower and the higher one */

/* Of every vector. */
#define SET MM(set1_ps)
#define LOAD MM(loadu_ps)
#define STORE MM(storeu_ps)
#define FMA MM(fmadd_ps)

/* Formats and types of activations, weights, and inputs of products. */
#define SMALL (FORMAT >= INT8)
#define ACTS (FORMAT == BFLOAT16 || FORMAT == INT8 ? BFLOAT16 : FLOAT32)
#define INPUTS (PAIRS ? BFLOAT16 : FLOAT32)
#define NUMBER(format) __typeof__(__builtin_choose_expr((format) == FLOAT32, 0.0f, (half)0))
#define ACT NUMBER(ACTS)
#define STORED __typeof__(__builtin_choose_expr(SMALL, (int8_t)0, (NUMBER(FORMAT))0))
#define INPUT NUMBER(INPUTS)
#define LOAD_ACT(x, at) NAME(load)(x, at, ACTS)
#define STORE_ACT(y, at, x) NAME(store)(y, at, ACTS, x)
#define STORE_INPUT(y, at, x) NAME(store)(y, at, INPUTS, x)

#define PANEL (4 * LANES)
#define AT_ONCE(count) (LANES == 8 && count > 2 ? 2 : WIDE)  /* vectors of a panel whose sums registers hold for so many rows */
#define MIXED (FORMAT == BFLOAT16 && !PAIRS)
#define WIDE (PANEL / LANES)  /* vectors of a panel */
#define TAKEN (PAIRS + 1)  /* inputs in one step of a product, and the bytes of a panel's weights for them */
#define STEP (TAKEN * PANEL * (int)sizeof(STORED))
#define STEPS (NEAR / STEP)

/* Instruction sets only grow: AVX2 with FMA and F16C; AVX512; AVX512 with products of bfloat16 pairs. */
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ISA avx2
#define LANES 8
#define V __m256
#define MM(operation) _mm256_##operation
#define PAIRS 0
#define FORMAT BFLOAT16
#include "kernels.h"
#define FORMAT FLOAT16
#include "kernels.h"
#define FORMAT FLOAT32
#include "kernels.h"
#define FORMAT INT8
#include "kernels.h"
#define FORMAT INT8_FLOAT32
#include "kernels.h"
#include "sampling.h"
#include "step.h"
#undef ISA
#undef LANES
#undef V
#undef MM

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define ISA avx512
#define LANES 16
#define V __m512
#define MM(operation) _mm512_##operation
#define FORMAT BFLOAT16
#include "kernels.h"
#define FORMAT FLOAT16
#include "kernels.h"
#define FORMAT FLOAT32
#include "kernels.h"
#define FORMAT INT8
#include "kernels.h"
#define FORMAT INT8_FLOAT32
#include "kernels.h"
#undef ISA
#undef PAIRS

#pragma GCC target("avx512bf16")
#define ISA avx512_bf16
#define PAIRS 1
#define FORMAT BFLOAT16
#include "kernels.h"
#pragma GCC target("avx512vbmi")
#define FORMAT INT8
#include "kernels.h"
#pragma GCC pop_options

/* ---------------------------------------------------------------- which of them */

static const struct {
    const char *name;
    const Kernels *formats[5];
} SETS[] = {
    {"avx512_bf16", {&kernels_avx512_bf16_0, &kernels_avx512_1, &kernels_avx512_2, &kernels_avx512_bf16_3, &kernels_avx512_4}},
    {"avx512", {&kernels_avx512_0, &kernels_avx512_1, &kernels_avx512_2, &kernels_avx512_3, &kernels_avx512_4}},
    {"avx2", {&kernels_avx2_0, &kernels_avx2_1, &kernels_avx2_2, &kernels_avx2_3, &kernels_avx2_4}},
};
enum { SET_COUNT = sizeof(SETS) / sizeof(SETS[0]) };
static int chosen = -1;

static int supported(int set) {
#define HAS __builtin_cpu_supports
    unsigned a, b, c, d;
    __builtin_cpu_init();
    int f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;  /* for which GCC 10 has no name */
    int avx2 = HAS("avx2") && HAS("fma") && f16c;
    int avx512 = avx2 && HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl");
    return set == 0 ? avx512 && HAS("avx512bf16") : set == 1 ? avx512 : avx2;
}

static const Kernels *kernels(int64_t format) {  /* the first AVX512-BF16 came without the table look-ups of INT8 */
    int lacking = format == INT8 && chosen == 0 && !HAS("avx512vbmi");
    return SETS[chosen + lacking].formats[format];
}

__attribute__((constructor)) static void choose(void) {
    for (int number = 0; number < 128; number++) {
        union { float value; uint8_t bytes[4]; } as = {(float)number};
        for (int i = 0; i < 2; i++) BYTES[i][number] = as.bytes[2 + i];
    }
    for (chosen = 0; chosen < SET_COUNT && !supported(chosen);) chosen++;
}

const char *lantern_isa(void) { return chosen < SET_COUNT ? SETS[chosen].name : ""; }

int lantern_use(const char *isa) {
    for (int set = 0; set < SET_COUNT; set++)
        if (!strcmp(isa, SETS[set].name) && supported(set)) return chosen = set, 1;
    return 0;
}

int64_t lantern_packed_bytes(int64_t format, int64_t in, int64_t out) {
    int64_t scale = format >= INT8 ? sizeof(float) : 0;
    return up_to(out, kernels(format)->panel) * (up_to(in, 2) * bytes_of(format) + scale);
}

void lantern_pack(int64_t format, const void *weight, const float *scale, int64_t in, int64_t out, int gated, void *packed) {
    char *first = (char *)up_to((int64_t)packed, 4096), *end = (char *)packed + lantern_packed_bytes(format, in, out);
    if (end - first >= 4096) madvise(first, (size_t)(end - first), MADV_HUGEPAGE);  /* where the kernel can: reads wait less */
    kernels(format)->pack(weight, scale, in, out, gated, packed);
}

int lantern_linear(int64_t format, int64_t threads, const Matrix *matrix, const void *x, int64_t rows, void *y) {
    return kernels(format)->linear(threads, matrix, x, rows, y);
}

int lantern_decode(const Call *call) { return kernels(call->format)->decode(call); }

#endif  /* on another processor torch's form serves */

int64_t lantern_abi(void) { return LANTERN_ABI; }
