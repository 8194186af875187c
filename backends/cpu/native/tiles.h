/* The operations of matrix tiles (AMX) that are used; with -DPLAIN_TILES as plain C, after the published pseudo-code,
 * which equals the processor bit for bit: integers are exact; products of bfloat16 pairs are two sums a number, of even and
 * of odd inputs, by fused multiply-add, which are added to the tile at the end; denormal numbers, which the processor takes
 * for zero, are not looked for.
 *
 * Tiles 0 to 3 are sums, 4 is of rows, 5 and more are of weights: of `rows` rows, and `deep` bytes of a row's inputs. */
#ifndef LANTERN_TILES_H
#define LANTERN_TILES_H

typedef struct __attribute__((packed)) {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileSizes;

static inline TileSizes tile_sizes(int rows, int deep) {
    TileSizes sizes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        sizes.bytes[tile] = (uint16_t)(tile == 4 ? deep : 64);
        sizes.rows[tile] = (uint8_t)(tile <= 4 ? rows : deep / 4);
    }
    return sizes;
}

#ifdef PLAIN_TILES
static __thread TileSizes tile_size;
static __thread char tile_data[8][16][64] __attribute__((aligned(64)));

static inline int tiles_allowed(void) { return 1; }
static inline void tiles_configure(const TileSizes *sizes) { tile_size = *sizes; }
static inline void tiles_release(void) {}
static inline void tiles_see_memory(void) {}
static inline void tile_zero(int tile) { memset(tile_data[tile], 0, sizeof(tile_data[tile])); }

static inline void tile_load(int tile, const void *from, int64_t stride) {
    tile_zero(tile);
    for (int row = 0; row < tile_size.rows[tile]; row++)
        memcpy(tile_data[tile][row], (const char *)from + row * stride, tile_size.bytes[tile]);
}

static inline void tile_store(int tile, void *to, int64_t stride) {
    for (int row = 0; row < tile_size.rows[tile]; row++)
        memcpy((char *)to + row * stride, tile_data[tile][row], tile_size.bytes[tile]);
}

static inline void tile_int8(int c, int a, int b) {
    for (int row = 0; row < tile_size.rows[a]; row++)
        for (int k = 0; k < tile_size.bytes[a] / 4; k++)
            for (int n = 0; n < 16; n++)
                for (int i = 4 * k; i < 4 * k + 4; i++) {
                    int32_t product = (int8_t)tile_data[a][row][i] * (int8_t)tile_data[b][k][4 * n + i % 4];
                    ((int32_t *)tile_data[c][row])[n] += product;
                }
}

static inline float tile_number(const char *at) {
    uint32_t bits = (uint32_t)*(const uint16_t *)at << 16;
    float number;
    memcpy(&number, &bits, sizeof(number));
    return number;
}

static inline void tile_bf16(int c, int a, int b) {
    for (int row = 0; row < tile_size.rows[a]; row++)
        for (int n = 0; n < 16; n++) {
            float even = 0.0f, odd = 0.0f;
            for (int k = 0; k < tile_size.bytes[a] / 4; k++) {
                const char *x = tile_data[a][row] + 4 * k, *w = tile_data[b][k] + 4 * n;
                even = fmaf(tile_number(x), tile_number(w), even);
                odd = fmaf(tile_number(x + 2), tile_number(w + 2), odd);
            }
            ((float *)tile_data[c][row])[n] += even + odd;
        }
}

#else
#include <sys/syscall.h>
#include <unistd.h>

/* The system's leave to use tiles: once a process, its threads have it too. */
static inline int tiles_allowed(void) {
    enum { REQUEST_COMPONENT = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_COMPONENT, TILE_DATA) == 0;
}

/* Compilers do not know that a load of a tile reads memory, nor, some of them, how much a configuration reads. */
static inline void tiles_see_memory(void) { __asm__ volatile("" ::: "memory"); }
static inline void tiles_configure(const TileSizes *sizes) { __asm__ volatile("ldtilecfg %0" ::"m"(*sizes)); }
#define tiles_release _tile_release
#define tile_zero _tile_zero
#define tile_load _tile_loadd
#define tile_store _tile_stored
#define tile_int8 _tile_dpbssd
#define tile_bf16 _tile_dpbf16ps
#endif

#endif
