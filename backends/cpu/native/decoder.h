/* The interface of the decoder: plain C, called from Python by ctypes, which reads it here: see `read_header` of
 * `__init__.py`. Sizes are 64-bit, pointers to what torch holds. */
#ifndef LANTERN_DECODER_H
#define LANTERN_DECODER_H

#include <stdint.h>

#define LANTERN_ABI 12

/* Number formats: of the matrices, and of activations, caches and features. */
#define BFLOAT16 0
#define FLOAT16 1  /* activations are float32 */
#define FLOAT32 2
#define INTEGERS 3  /* of 8 or 4 bits, with scales; activations are bfloat16 */
#define INTEGERS_FLOAT32 4  /* the same; activations are float32 */

/* One matrix, packed by `lantern_pack`. */
typedef struct {
    const void *weight;
    const float *bias;  /* [out], with room up to a multiple of 16, or null */
    int64_t in, out;
    int64_t group;  /* of integers: inputs that share a scale, where numbers have 4 bits; 0 where they have 8 */
} Matrix;

/* What is packed, row by row. Numbers of 8 bits are from -127 to 127 [out, in] and have scales [out]; those of 4 bits are 0
 * to 15 [out, in / 2], the lower half of a byte first, and have scales and what stands for zero [out, in / group]. */
typedef struct {
    const void *weight;
    const float *scale;
    const uint8_t *zero;  /* null: 8 */
    int64_t gated;        /* the first half of the outputs are gates of the second half */
} Source;

/* One layer, by the names of `Block` in `models/transformer.py`; what a family lacks is null. Norms and biases are float32. */
typedef struct {
    const float *attention_norm, *attention_post_norm, *ffn_norm, *ffn_post_norm;  /* [dim] */
    /* [heads, head_dim], [kv, head_dim]; of norms by root mean square [head_dim] for all heads, without a bias */
    const float *q_norm, *q_norm_bias, *k_norm, *k_norm_bias;
    Matrix qkv, out, gate_up, down, word_gate_up, word_down;
    void *keys, *values;  /* the cache, see Call */
} Layer;

/* A decoder and one pass through it: R rows of T tokens. */
typedef struct {
    int64_t format, threads;
    int64_t dim, heads, kv, head_dim, ffn, interleaved;
    double eps;
    int64_t layer_count;
    const Layer *layers;
    const float *final_norm;     /* [dim], or null */

    int64_t rows, tokens;        /* R, T */
    int64_t capacity;            /* S: cache positions that a row attends to */
    int64_t moves;               /* D: positions of each row that move before the new ones are written */
    int64_t position_stride, head_stride;  /* of the cache, in numbers */
    const float *rope;           /* [R, T, 2, head_dim / 2]: cosines, sines */
    const float *mask;           /* [R, T, S] additive */
    const int32_t *index;        /* [R, D + T] storage index of each position that is written */
    const int32_t *source;       /* [R, D] of what moves, or null */
    const int64_t *starts;       /* [R] storage index of the first position that a row attends to */
    const uint8_t *words;        /* [R, T] of which tokens SwiGLU takes the `word_` matrices where a layer has them; or null */
    void *x;                     /* [R T, dim] embeddings; the last layer's output is left here */
    void *features;              /* [R T, dim (1 + aux_count)] */
    const int64_t *aux;          /* layers whose outputs follow the normed features */
    int64_t aux_count;
} Call;

/* A verified tree for each of B images: M nodes, at most C children of each, D levels; the I nodes that have children
 * have distributions over V tokens. See `Walk` of `lantern_hpu/ops/kernels.py`. */
typedef struct {
    int64_t images, inner, nodes, depths, widest, vocabulary;  /* B, I, M, D, C, V */
    int64_t lenders, threads;                                  /* K, or 0 */
    const float *p, *q;                                        /* [B, I, V] */
    const int32_t *tokens, *child, *row;                       /* [B, M], [B, M, C], [B, M] */
    const float *uniform;                                      /* [B, D, C]; to traverse [B, M - 1] */
    const int32_t *neighbours, *k;                             /* [V, K], [B] */
    const float *delta, *factor, *weight, *tv, *budget;        /* [B], [B], [B, D], [B], [B]; the last two may be null */
    int32_t *node;                                             /* [B] */
    float *left;                                               /* [B, V] */
    uint8_t *relaxed;                                          /* [B, D] */
    float *spent;                                              /* [B, D] */
} Walk;

int64_t lantern_abi(void);
/* The instruction set in use, of "avx512_amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2"; "" where the
 * processor has none of them. */
const char *lantern_isa(void);
/* Limit the instruction set; 0 if this processor lacks it. */
int lantern_use(const char *isa);
/* Bytes of a packed matrix. */
int64_t lantern_packed_bytes(int64_t format, const Matrix *matrix);
/* Pack a matrix into the memory that its `weight` points to. */
void lantern_pack(int64_t format, const Matrix *matrix, const Source *source);
/* y [rows, out] = x [rows, in] W^T + bias, in the format's activations. Returns as the pass does. */
int lantern_linear(int64_t format, int64_t threads, const Matrix *matrix, const void *x, int64_t rows, void *y);
/* The pass. Returns 0; -1 where memory is short; -2 where sizes are not supported. */
int lantern_decode(const Call *call);
/* Tokens [rows, draws] from probs [rows, n] without replacement, by one uniform each. 0, or -1 where memory is short. */
int lantern_draw(int64_t threads, int64_t rows, int64_t n, int64_t draws, const float *probs, const float *uniform, int32_t *tokens);
/* The walk. 0, or -1 where memory is short. */
int lantern_walk(const Walk *walk);
/* The same with drafts verified together, see `Traverse` there: exact, or blended. */
int lantern_traverse(const Walk *walk);

/* Of a step around its passes: see `step.h`. Where the T new tokens of R rows of B images are; each image's table says
 * which of the X positions from its start on a token attends to. See `place_tokens` of `lantern_hpu/ops/kernels.py`. */
typedef struct {
    int64_t images, rows, tokens, width, capacity, turns;      /* B, R, T, X, S, numbers of a position's angles */
    int64_t threads;
    double hidden;                                             /* what the mask adds where a token attends to nothing */
    const int32_t *start, *offset, *column, *row_start;        /* [B], [B, T], [T], [R] */
    const uint8_t *table;                                      /* [B, T, X] */
    const uint8_t *valid;                                      /* [R, S], or null */
    const int32_t *pads;                                       /* [R], or null */
    const float *angles;                                       /* [positions, turns] */
    float *rope, *mask;                                        /* [R, T, turns], [R, T, S] */
    int32_t *index;                                            /* [R, T] */
} Place;

/* What a step of B images keeps: see `Commit` there. */
typedef struct {
    int64_t images, nodes, depths, judged, vocabulary;         /* B, M, D, J, V */
    int64_t columns, prefix, last, size;                       /* of `tokens` for each image; as `Commit` has them */
    const int32_t *node, *bonus;                               /* [B] */
    const uint8_t *helped;                                     /* [B, D] */
    const float *probs;                                        /* [B, J, V] */
    const int32_t *path, *depth, *drafts;                      /* [B, M, D + 1], [B, M], [B, M] */
    int32_t *way, *news, *added, *before;                      /* [B, D + 1], [B, D + 1], [B], [B] */
    int32_t *tokens, *count, *root, *known, *steps, *accepted, *relaxed, *spoiled;  /* of the state */
    int32_t *source, *goal;                                    /* [B, D], or null */
} Commit;

int lantern_place(const Place *place);
/* Which rows attend to something, by the mask's numbers of each, and how many; where begins what each attends to: a row
 * of the cache, or, without a capacity, what the pass writes. */
int lantern_rows(int64_t rows, int64_t written, int64_t positions, int64_t capacity, const int32_t *index, const float *mask, int64_t *starts, uint8_t *seen);
/* Logits [B, T, n] after guidance, temperature and top-k, where `most` is not 0, from [R, T, n]. */
int lantern_scale(int64_t threads, int64_t images, int64_t tokens, int64_t n, int64_t guided, int64_t most, const float *logits, const float *cfg, const float *heat, const int32_t *top_k, float *scaled);
/* The first of the largest products of each row: tokens [rows] from probs and noise [rows, n]. */
int lantern_race(int64_t threads, int64_t rows, int64_t n, const float *probs, const float *noise, int32_t *tokens);
int lantern_commit(const Commit *commit);

#endif
