/* The decode step of sample.py --compile in C: the network of model.py, its sampler, and speculation.

It gives the tokens of GPT.generate for the same seed. c_build.py compiles this file for one shape, which it passes as
macros (N_LAYER, N_EMBD, MIN_CHANCE, ...), and calls `run_steps` with pointers to packed weights and to a cache.

Every forward has the same form: n tokens, each with a row and a position. A prefill feeds the tokens of a prompt, a
decode step feeds the newest token of each row, and speculative decoding also feeds the draft tokens after it.

The order of additions depends on neither the number of tokens nor the number of threads, so a row gets the same bits
alone or among 63 others, with or without draft tokens. The vector types are those of GCC and Clang, which map them to
the registers of the chip. */

#include "pool.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>

/* Floats per vector register, and the largest tile of a matrix product whose sums fit in registers. */
#if defined(__AVX512F__)
#define LANES 16
#define TILE_TOKENS 6
#define TILE_PANELS 4
#elif defined(__AVX__)
#define LANES 8
#define TILE_TOKENS 4
#define TILE_PANELS 2
#else /* NEON, or SSE, which has half as many registers */
#define LANES 4
#define TILE_TOKENS 4
#define TILE_PANELS 4
#endif

#define PAD(n) (((n) + BLOCK - 1) / BLOCK * BLOCK)
#define HEAD_SIZE (N_EMBD / N_HEAD)
#define GROUP (N_HEAD / N_KV_HEAD) /* query heads per key/value head */
#define C_ATTN ((N_HEAD + 2 * N_KV_HEAD) * HEAD_SIZE)
#define C_FC (GATED ? 2 * HIDDEN : HIDDEN)
/* floats per token in each buffer: rows are padded, because matmul writes whole vectors */
#define X PAD(N_EMBD)
#define QKV PAD(C_ATTN)
#define FC (PAD(C_FC) + LANES)
#define H (PAD(HIDDEN) + LANES) /* rows a power of two apart would compete for the same lines of the L1 cache */
#define V PAD(VOCAB_SIZE)

#define NONE -1 /* the pick where the logits are infinite or NaN */

/* NORM is one of these: the name of its class in PyTorch. */
enum { LayerNorm };

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float four __attribute__((vector_size(16), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
#define INLINE static inline __attribute__((always_inline))

/* A matrix W (N, K) is a sequence of panels, each with the weights of LANES outputs:
 * - float32: (K, LANES), so a product needs no sum across the lanes. TILE_PANELS of them are one of (K, TILE_PANELS,
 *   LANES), which a product reads in one piece from its start to its end. Those that are left are single panels
 * - INT8: for each BLOCK of inputs, LANES scales in bfloat16, then the weights as (BLOCK / 4, LANES, 4) */
#define BLOCK_BYTES (LANES * (2 + BLOCK))
/* bytes of a panel */
#define PANEL(K) (INT8 ? (size_t)((K) + BLOCK - 1) / BLOCK * BLOCK_BYTES : (size_t)(K) * LANES * sizeof(float))
/* panels of a tile with one token: a large model comes from memory, which is faster from more places at once */
#define ONE_TOKEN_PANELS (INT8 ? 2 * TILE_PANELS : TILE_PANELS)

/* -- what Python passes: the structures of c_library.py, which compares their sizes with these ----------------------- */

typedef struct {
    const void *weight; /* NULL: no such layer. A norm is then the identity */
    const float *bias;  /* NULL: no bias */
} Params;

typedef struct {
    Params c_attn, q_norm, k_norm, attn_proj, c_fc, mlp_proj;
} Layer;

typedef struct {
    const float *wte, *wpe, *cos, *sin; /* either wpe, or cos and sin, are NULL; cos: (BLOCK_SIZE, HEAD_SIZE) */
    Params lm_head;
    Params norm[2 * N_LAYER + 1]; /* before attention, before the MLP, ..., before lm_head */
    Layer layer[N_LAYER];
} Model;

typedef struct {
    float *key, *value; /* of one layer: (B, N_KV_HEAD, BLOCK_SIZE, HEAD_SIZE) */
} Cache;

typedef struct { /* BatchState in speculate.py */
    int64_t *tokens, *end, *cached, *limit, *first_new, *sample, *seed;
    float *temperature;
    int64_t *top_k; /* NULL: no filter */
    float *top_p;
} State;

typedef struct { /* ngram_table in ngrams.py */
    const float *logits;
    const int32_t *after;
} Table;

const size_t struct_sizes[] = {sizeof(Model), sizeof(Cache), sizeof(State), sizeof(Table)};

/* -- vectors ------------------------------------------------------------------------------------------------------- */

INLINE vec load(const float *x) { return *(const vec *)x; }

INLINE void store(float *x, vec v) { *(vec *)x = v; }

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec choose(ivec where, vec x, vec y) { return (vec)((where & (ivec)x) | (~where & (ivec)y)); }

INLINE vec larger(vec x, vec y) { return choose(x > y, x, y); }

INLINE vec smaller(vec x, vec y) { return choose(x < y, x, y); }

/* Four numbers whose sum is the sum of all lanes. Sixteen additions in sequence would take far longer. */
INLINE four fold(vec v) {
    four sums = *(four *)&v;
    for (int i = 1; i < LANES / 4; i++) sums += ((four *)&v)[i];
    return sums;
}

INLINE float total(vec v) {
    four x = fold(v);
    return (x[0] + x[2]) + (x[1] + x[3]);
}

/* exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, where a Taylor polynomial of degree 7 is exact up to rounding. NaN stays
 * NaN, because `larger` and `smaller` return y if x > y and x < y are false. */
INLINE vec vexp(vec x) {
    x = smaller(splat(88.0f), larger(splat(-87.0f), x));
    vec n = (x * 1.442695041f + 12582912.0f) - 12582912.0f; /* rounds to an integer: 1.5 * 2^23 has no fraction bits */
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;      /* ln(2) in two parts: n times the first is exact */
    vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}

/* log(x) = n ln(2) + 2 artanh(s), s = (m - 1) / (m + 1), for x = m 2^n > 0 with m from sqrt(1/2) to sqrt(2). */
INLINE vec vlog(vec x) {
    ivec n = ((ivec)x - 0x3f3504f3) >> 23; /* 0x3f3504f3 holds the bits of sqrt(1/2) */
    vec m = (vec)((ivec)x - (n << 23));
    vec s = (m - 1.0f) / (m + 1.0f), z = s * s;
    vec p = splat(2.0f / 11);
    p = p * z + 2.0f / 9;
    p = p * z + 2.0f / 7;
    p = p * z + 2.0f / 5;
    p = p * z + 2.0f / 3;
    vec power = __builtin_convertvector(n, vec);
    return power * 0.693359375f + (s * 2.0f + (s * z * p - power * 2.12194440e-4f));
}

INLINE void prefetch(const float *x, int n) {
    for (int i = 0; i < n; i += 16) __builtin_prefetch(x + i); /* a line of the cache */
}

INLINE float sum(const float *x, int n) {
    vec sums = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) sums += load(x + i);
    float sum = total(sums);
    for (; i < n; i++) sum += x[i];
    return sum;
}

/* Four numbers whose sum is the inner product. `attend` adds up those of many products at once. */
INLINE void dot_in_four(const float *x, const float *y, int n, float *parts) {
    vec sums = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) sums += load(x + i) * load(y + i);
    *(four *)parts = fold(sums);
    for (; i < n; i++) parts[0] += x[i] * y[i];
}

INLINE float dot(const float *x, const float *y, int n) {
    float parts[4];
    dot_in_four(x, y, n, parts);
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
}

/* -- who computes what --------------------------------------------------------------------------------------------- */

typedef struct {
    Barrier barrier;
    int parts;                                                  /* threads that share the forwards of these rows */
    int first_row, end_row, next_row;                           /* next_row: the first row after the current forward */
    int n, row[MAX_TOKENS], pos[MAX_TOKENS], token[MAX_TOKENS]; /* the tokens of the current forward */
    int num_picks, fed[MAX_TOKENS], picks[MAX_TOKENS];          /* pick j follows the fed token fed[j]; or it is NONE */
    int failed;                                                 /* a row got no token, so the steps end */
    float *x, *qkv, *y, *fc, *logits;                           /* MAX_TOKENS rows each */
    int64_t steps, offered, accepted;
} Group;

typedef struct {
    Group *group;
    int part; /* which of the group's `parts` it computes, of each matrix product and of the heads */
    int max_steps, num_drafts;
    const Model *model;
    const Cache *cache;
    const State *state;
    const Table *table;
    float *in, *hidden;    /* this thread's own inputs of the next product, MAX_TOKENS rows each */
    float *weights;        /* of attention */
    float *scores, *probs; /* of each token of the vocabulary */
    int *ids;              /* of the vocabulary, as a heap */
} Worker;

/* Where the time goes: seconds of the first thread, by kind of work. extras.bench --parts compiles it in. */
enum { PRODUCTS, ATTENTION, NORMS, SAMPLING, WAITING, BETWEEN_CALLS, KINDS };
#if PARTS
#include <time.h>
double seconds[KINDS];
static void lap(const Worker *w, int kind) {
    static double since;
    struct timespec now;
    if (w->part || w->group->first_row) return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    seconds[kind] += now.tv_sec + 1e-9 * now.tv_nsec - since;
    since = now.tv_sec + 1e-9 * now.tv_nsec;
}
/* Read n numbers several times, as fast as one thread can. */
float read_all(const float *x, size_t n, int times) {
    vec sums[4] = {{0}};
    for (; times > 0; times--)
        for (size_t i = 0; i + 4 * LANES <= n; i += 4 * LANES)
            for (int j = 0; j < 4; j++) sums[j] += load(x + i + j * LANES);
    return total(sums[0] + sums[1] + sums[2] + sums[3]);
}
#else
#define lap(w, kind) ((void)(w), (void)(kind))
#endif

/* Wait for the other threads of the group. kind: of the work before. */
static void meet(const Worker *w, int kind) {
    lap(w, kind);
    barrier(&w->group->barrier);
    lap(w, WAITING);
}

/* -- the network --------------------------------------------------------------------------------------------------- */

typedef struct { /* a matrix whose rows start ld floats apart */
    float *data;
    int width, ld;
} Rows;

typedef struct { /* what a tile of a product reads and writes: K inputs per token, and the panels from `weight` on */
    const float *x;
    int ldx, K;
    const char *weight;
    const float *bias, *residual; /* or NULL */
    float *y;
    int ldy;
    const char *next; /* a panel to prefetch */
} Tile;

/* The inner loop of matmul for a few tokens and panels, one function per layout. Both counts are constants in every
 * call, so the sums stay in registers. */

INLINE void start_with_bias(int tokens, int panels, const Tile *t, vec sums[][ONE_TOKEN_PANELS]) {
    for (int i = 0; i < tokens; i++)
        for (int s = 0; s < panels; s++) sums[i][s] = t->bias ? load(t->bias + s * LANES) : splat(0);
}

INLINE void store_with_residual(int tokens, int panels, const Tile *t, vec sums[][ONE_TOKEN_PANELS]) {
    for (int i = 0; i < tokens; i++)
        for (int s = 0; s < panels; s++) {
            int at = i * t->ldy + s * LANES;
            store(t->y + at, t->residual ? sums[i][s] + load(t->residual + at) : sums[i][s]);
        }
}

INLINE void tile_of_panels(int tokens, int panels, const Tile *t) {
    vec sums[TILE_TOKENS][ONE_TOKEN_PANELS], w[ONE_TOKEN_PANELS];
    start_with_bias(tokens, panels, t, sums);
    for (int k = 0; k < t->K; k++) {
        if (2 * tokens > TILE_TOKENS) __builtin_prefetch(t->next + k * sizeof(vec));
        for (int s = 0; s < panels; s++) w[s] = load((const float *)t->weight + (k * panels + s) * LANES);
        for (int i = 0; i < tokens; i++)
            for (int s = 0; s < panels; s++) sums[i][s] += t->x[i * t->ldx + k] * w[s];
    }
    store_with_residual(tokens, panels, t, sums);
}

INLINE void tile_of_int8_panels(int tokens, int panels, const Tile *t) {
    vec sums[TILE_TOKENS][ONE_TOKEN_PANELS], w[ONE_TOKEN_PANELS], scale[ONE_TOKEN_PANELS];
    uvec words[ONE_TOKEN_PANELS]; /* each holds the weights of four inputs */
    start_with_bias(tokens, panels, t, sums);
    const char *block = t->weight;
    for (int k = 0; k < t->K; block += BLOCK_BYTES) {
        for (int s = 0; s < panels; s++) /* bfloat16 is the upper half of a float */
            scale[s] = (vec)(__builtin_convertvector(*(const halves *)(block + s * PANEL(t->K)), uvec) << 16);
        for (int word = 0; word < BLOCK / 4; word++) {
            for (int s = 0; s < panels; s++)
                words[s] = *(const uvec *)(block + s * PANEL(t->K) + (2 + 4 * word) * LANES);
#pragma GCC unroll 4
            for (int byte = 0; byte < 4; byte++, k++) {
                for (int s = 0; s < panels; s++)
                    w[s] = __builtin_convertvector((ivec)(words[s] << (24 - 8 * byte)) >> 24, vec) * scale[s];
                for (int i = 0; i < tokens; i++)
                    for (int s = 0; s < panels; s++) sums[i][s] += t->x[i * t->ldx + k] * w[s];
            }
        }
    }
    store_with_residual(tokens, panels, t, sums);
}

INLINE void tile(int tokens, int panels, const Tile *t) {
    if (INT8) tile_of_int8_panels(tokens, panels, t);
    else tile_of_panels(tokens, panels, t);
}

/* A tile whose number of tokens is not a constant. */
INLINE void tile_of_tokens(int tokens, int panels, const Tile *t) {
    switch (tokens) {
    case 1: tile(1, panels, t); break;
    case 2: tile(2, panels, t); break;
    case 3: tile(3, panels, t); break;
    case 4: tile(4, panels, t); break;
#if TILE_TOKENS > 4
    case 5: tile(5, panels, t); break;
    case 6: tile(6, panels, t); break;
#endif
    }
}

/* y = x W^T + bias + residual for n tokens. Each part of the group computes some of the panels. residual: NULL, or
 * rows with the layout of y. */
static void matmul(const Worker *w, int n, Rows x, Params params, const float *residual, Rows y) {
    int panels = (y.width + LANES - 1) / LANES, wides = (panels + TILE_PANELS - 1) / TILE_PANELS;
    int s = wides * w->part / w->group->parts * TILE_PANELS;
    int end = wides * (w->part + 1) / w->group->parts * TILE_PANELS;
    end = end < panels ? end : panels;
    for (int width; s < end; s += width) {
        width = n == 1 && end - s >= ONE_TOKEN_PANELS ? ONE_TOKEN_PANELS : end - s >= TILE_PANELS ? TILE_PANELS : 1;
        const char *weight = (const char *)params.weight + s * PANEL(x.width);
        const float *bias = params.bias ? params.bias + s * LANES : NULL;
        for (int i = 0, tiles = (n + TILE_TOKENS - 1) / TILE_TOKENS, tokens; i < n; i += tokens, tiles--) {
            tokens = (n - i + tiles - 1) / tiles; /* tiles of about the same size */
            int at = i * y.ld + s * LANES;
            const float *plus = residual ? residual + at : NULL;
            /* all tiles but the first find their panels in the L2 cache, so the last ones prefetch the next panels */
            int ahead = n > TILE_TOKENS && tiles <= width ? width + tiles - 1 : 0;
            const char *next = weight + ahead * PANEL(x.width);
            Tile t = {x.data + i * x.ld, x.ld, x.width, weight, bias, plus, y.data + at, y.ld, next};
            if (width == TILE_PANELS) tile_of_tokens(tokens, TILE_PANELS, &t);
            else if (width == 1) tile_of_tokens(tokens, 1, &t);
            else tile(1, ONE_TOKEN_PANELS, &t);
        }
    }
}

/* The norm of n numbers; y may be x. Where the variance overflows, PyTorch gives NaN for some n and 0 for others. We
 * give NaN, because a network that reads zeros writes text as if nothing had happened. */
INLINE void norm(const float *x, Params params, float *y, int n) {
    const float *weight = params.weight;
    if (!weight) {
        memmove(y, x, n * sizeof(float));
        return;
    }
    float mean = sum(x, n) / n;
    for (int i = 0; i < n; i++) y[i] = x[i] - mean;
    float variance = dot(y, y, n) / n, scale = variance < INFINITY ? 1 / sqrtf(variance + 1e-5f) : NAN;
    for (int i = 0; i < n; i++) y[i] = y[i] * scale * weight[i] + (params.bias ? params.bias[i] : 0);
}

/* Rotary position embedding; `rotate` in model.py. */
INLINE void rotate(float *x, const float *cos, const float *sin) {
    for (int i = 0, j = HEAD_SIZE / 2; i < HEAD_SIZE / 2; i++, j++) {
        float first = x[i], second = x[j];
        x[i] = first * cos[i] - second * sin[i];
        x[j] = second * cos[j] + first * sin[j];
    }
}

/* Attention of one query over the first `slots` slots of its head: y = softmax(q K^T / sqrt(HEAD_SIZE)) V. `weights`
 * has room for the weights and for four parts of each score.
 *
 * The cache of many rows comes from memory. So while we read the keys we prefetch the values, and then the keys of the
 * next query, unless next_key is NULL. */
static void attend(const float *q, const float *key, const float *value, int slots, const float *next_key,
                   float *weights, float *y) {
    float *parts = weights + PAD(BLOCK_SIZE), scale = 1 / sqrtf(HEAD_SIZE);
    for (int s = 0; s < slots; s++) {
        if (next_key) prefetch(value + s * HEAD_SIZE, HEAD_SIZE);
        dot_in_four(q, key + s * HEAD_SIZE, HEAD_SIZE, parts + 4 * s);
    }
    for (int s = 0; s < slots; s++)
        weights[s] = ((parts[4 * s] + parts[4 * s + 2]) + (parts[4 * s + 1] + parts[4 * s + 3])) * scale;
    for (int s = slots; s % LANES; s++) weights[s] = -INFINITY;
    vec largest = load(weights), sums = {0};
    for (int s = LANES; s < slots; s += LANES) largest = larger(largest, load(weights + s));
    for (int i = 1; i < LANES; i++) largest[0] = largest[i] > largest[0] ? largest[i] : largest[0];
    for (int s = 0; s < slots; s += LANES) {
        vec w = vexp(load(weights + s) - largest[0]);
        store(weights + s, w);
        sums += w;
    }
    float scale_y = 1 / total(sums);
    /* sums of the values, CHAINS per vector, because each addition waits four cycles for the one before it */
    enum { VECTORS = HEAD_SIZE / LANES, CHAINS = VECTORS < 4 ? 4 : 1 };
    vec chains[CHAINS][VECTORS + 1] = {{{0}}};
    int s = 0;
    for (; s + CHAINS <= slots; s += CHAINS) {
        if (next_key) prefetch(next_key + s * HEAD_SIZE, CHAINS * HEAD_SIZE);
        for (int c = 0; c < CHAINS; c++)
            for (int v = 0; v < VECTORS; v++)
                chains[c][v] += weights[s + c] * load(value + (s + c) * HEAD_SIZE + v * LANES);
    }
    for (; s < slots; s++)
        for (int v = 0; v < VECTORS; v++) chains[0][v] += weights[s] * load(value + s * HEAD_SIZE + v * LANES);
    for (int v = 0; v < VECTORS; v++) {
        for (int c = 1; c < CHAINS; c++) chains[0][v] += chains[c][v];
        store(y + v * LANES, chains[0][v] * scale_y);
    }
    for (int d = VECTORS * LANES; d < HEAD_SIZE; d++) {
        y[d] = 0;
        for (s = 0; s < slots; s++) y[d] += weights[s] * value[s * HEAD_SIZE + d] * scale_y;
    }
}

/* The activation of an MLP, on one vector. For SwiGLU x is the gate. */
INLINE vec activate(vec x) {
#if GATED
    return x / (1 + vexp(-x));
#elif GELU_TANH
    return x / (1 + vexp(-1.5957691216f * (x + 0.044715f * x * x * x))); /* (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)) */
#else
    /* erf by formula 7.1.26 of Abramowitz and Stegun, whose error is below 1.5e-7 */
    vec z = choose(x < 0, -x, x) * 0.7071067812f, t = 1 / (1 + 0.3275911f * z);
    vec p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    vec erf = 1 - p * vexp(-z * z);
    return 0.5f * x * (1 + choose(x < 0, -erf, erf));
#endif
}

/* Feed the group's tokens: write their keys and values to the caches, and compute the logits of the picks. */
static void forward(const Worker *w) {
    Group *g = w->group;
    const Model *m = w->model;
    const int n = g->n;
    Rows x = {g->x, N_EMBD, X}, qkv = {g->qkv, C_ATTN, QKV}, y = {g->y, N_EMBD, X}, fc = {g->fc, C_FC, FC};
    Rows in = {w->in, N_EMBD, X}, hidden = {w->hidden, HIDDEN, H}, logits = {g->logits, VOCAB_SIZE, V};
    const float *residual = POST_LN ? in.data : x.data;

    /* a block in int8 may reach past the end of a row. Its weights there are 0, but 0 times a NaN is NaN */
    for (int i = 0; i < n; i++)
        for (int c = N_EMBD; c < X; c++) in.data[i * X + c] = 0;

    /* embeddings. Each part writes the rows of some tokens */
    for (int i = w->part; i < n; i += g->parts) {
        for (int c = 0; c < N_EMBD; c++) {
            float position = m->wpe ? m->wpe[(size_t)g->pos[i] * N_EMBD + c] : 0;
            x.data[i * X + c] = m->wte[(size_t)g->token[i] * N_EMBD + c] + position;
        }
        for (int c = N_EMBD; c < X; c++) y.data[i * X + c] = 0; /* as above */
    }
    meet(w, NORMS);

    for (int l = 0; l < N_LAYER; l++) {
        const Layer *layer = m->layer + l;
        /* queries, keys and values. Every part computes all norms, which is faster than waiting for them */
        for (int i = 0; i < n; i++) norm(x.data + i * X, m->norm[2 * l], in.data + i * X, N_EMBD);
        lap(w, NORMS);
        matmul(w, n, in, layer->c_attn, NULL, qkv);
        meet(w, PRODUCTS);

        /* attention: a token first writes its slot, then reads all slots up to its own */
        for (int h = N_KV_HEAD * w->part / g->parts; h < N_KV_HEAD * (w->part + 1) / g->parts; h++)
            for (int i = 0; i < n; i++) {
                size_t head = ((size_t)g->row[i] * N_KV_HEAD + h) * BLOCK_SIZE * HEAD_SIZE;
                float *keys = w->cache[l].key + head, *values = w->cache[l].value + head;
                int pos = g->pos[i], rope = pos * HEAD_SIZE;
                float *q = qkv.data + i * QKV, *k = q + (N_HEAD + h) * HEAD_SIZE, *v = k + N_KV_HEAD * HEAD_SIZE;
                const float *next_key = NULL;
                if (n > TILE_TOKENS && i + 1 < n && g->row[i + 1] != g->row[i])
                    next_key = keys + (size_t)(g->row[i + 1] - g->row[i]) * N_KV_HEAD * BLOCK_SIZE * HEAD_SIZE;
                norm(k, layer->k_norm, k, HEAD_SIZE);
                if (m->cos) rotate(k, m->cos + rope, m->sin + rope);
                memcpy(keys + pos * HEAD_SIZE, k, HEAD_SIZE * sizeof(float));
                memcpy(values + pos * HEAD_SIZE, v, HEAD_SIZE * sizeof(float));
                for (int j = h * GROUP * HEAD_SIZE; j < (h + 1) * GROUP * HEAD_SIZE; j += HEAD_SIZE) {
                    norm(q + j, layer->q_norm, q + j, HEAD_SIZE);
                    if (m->cos) rotate(q + j, m->cos + rope, m->sin + rope);
                    attend(q + j, keys, values, pos + 1, next_key, w->weights, y.data + i * X + j);
                }
            }
        meet(w, ATTENTION);
        matmul(w, n, y, layer->attn_proj, residual, x);
        meet(w, PRODUCTS);

        /* MLP */
        for (int i = 0; i < n; i++) norm(x.data + i * X, m->norm[2 * l + 1], in.data + i * X, N_EMBD);
        lap(w, NORMS);
        matmul(w, n, in, layer->c_fc, NULL, fc);
        meet(w, PRODUCTS);
        for (int i = 0; i < n; i++) {
            const float *from = fc.data + i * FC;
            float *to = hidden.data + i * H;
            for (int c = 0; c < HIDDEN; c += LANES) {
                vec active = activate(load(from + c));
                store(to + c, GATED ? active * load(from + HIDDEN + c) : active);
            }
            for (int c = HIDDEN; c < H; c++) to[c] = 0;
        }
        lap(w, NORMS);
        matmul(w, n, hidden, layer->mlp_proj, residual, x);
        meet(w, PRODUCTS);
    }

    /* logits of the tokens that a pick follows */
    for (int j = 0; j < g->num_picks; j++) {
        norm(x.data + g->fed[j] * X, m->norm[2 * N_LAYER], in.data + j * X, N_EMBD);
    }
    lap(w, NORMS);
    matmul(w, g->num_picks, in, m->lm_head, NULL, logits);
    meet(w, PRODUCTS);
}

/* -- the sampler of model.py --------------------------------------------------------------------------------------- */

#define MIX(h)                         \
    h = (h ^ (h >> 16)) * 0x7FEB352Du; \
    h = (h ^ (h >> 15)) * 0x846CA68Bu; \
    h = h ^ (h >> 16)

INLINE uint32_t mix(uint32_t h) {
    MIX(h);
    return h;
}

/* Gumbel noise of one step, for the whole vocabulary; `gumbel_noise`. */
static void gumbel_noise(const State *s, int row, int64_t step, float *noise) {
    uint32_t counters[4] = {s->seed[0], s->seed[1], s->sample[row], step}, seed = 0;
    for (int i = 0; i < 4; i++) seed = mix(seed ^ mix(counters[i] + 0x9E3779B9u));
    for (int id = 0; id < VOCAB_SIZE; id += LANES) {
        uvec h;
        for (int i = 0; i < LANES; i++) h[i] = id + i;
        h = h + 0x9E3779B9u;
        MIX(h);
        h = h ^ seed;
        MIX(h);
        vec u = (__builtin_convertvector(h, vec) + 0.5f) * 0x1p-32f;
        u = smaller(u, splat(1 - 0x1p-24f));
        /* -log1p(-u): the factor u / lost undoes the rounding of `rest`, so small u lose no digits */
        vec rest = 1 - u, lost = 1 - rest;
        vec exponential = choose(lost > 0, -vlog(rest) * u / choose(lost > 0, lost, splat(1)), u);
        store(noise + id, -vlog(exponential));
    }
}

INLINE int likelier(const float *logits, int a, int b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
}

/* Move the id at `place` down in a heap of n ids until it is likelier than the two below it. */
static void sift(const float *logits, int *heap, int n, int place) {
    for (int child, id = heap[place]; (child = 2 * place + 1) < n; place = child) {
        if (child + 1 < n && likelier(logits, heap[child + 1], heap[child])) child++;
        if (!likelier(logits, heap[child], id)) return;
        heap[place] = heap[child], heap[child] = id;
    }
}

/* Move the likeliest id of a heap of n ids to its end, and return it. */
static int pop(const float *logits, int *heap, int n) {
    int id = heap[0];
    heap[0] = heap[n - 1], heap[n - 1] = id;
    sift(logits, heap, n - 1, 0);
    return id;
}

/* The token with the largest score among those that top_k and top_p keep. They keep few of a large vocabulary, so we
 * rank with a heap, which yields the likeliest first and never sorts the rest. */
static int best_of_kept(const Worker *w, const float *logits) {
    const State *s = w->state;
    int *heap = w->ids, n = VOCAB_SIZE, most = s->top_k && *s->top_k < n ? *s->top_k : n, best = -1;
    float divisor = fmaxf(*s->temperature, 1e-30f), *probs = w->probs;
    double sum = 0, kept = 0; /* torch.cumsum adds in double too */
    for (int i = 0; i < n; i++) heap[i] = i;
    for (int i = n / 2; i >= 0; i--) sift(logits, heap, n, i);
    if (s->top_p) {
        float largest = logits[heap[0]];
        for (int i = 0; i < n; i++) probs[i] = (logits[i] - largest) / divisor;
        for (int i = 0; i < n; i += LANES) store(probs + i, vexp(load(probs + i)));
    }
    if (s->top_k)
        for (; n > VOCAB_SIZE - most; n--) sum += probs[pop(logits, heap, n)];
    else if (s->top_p)
        for (int i = 0; i < n; i++) sum += probs[i];
    for (int i = 0; i < most; i++) {
        int id = s->top_k ? heap[VOCAB_SIZE - 1 - i] : pop(logits, heap, n--);
        float prob = probs[id] / (float)sum;
        kept += prob;
        if (s->top_p && i > 0 && (float)kept - prob >= *s->top_p) break;
        if (best < 0 || w->scores[id] > w->scores[best]) best = id;
    }
    return best;
}

INLINE int all_finite(const float *logits) {
    int finite = 1;
    for (int i = 0; i < VOCAB_SIZE; i++) finite &= fabsf(logits[i]) < INFINITY; /* which NaN is not */
    return finite;
}

/* The token with the largest logit + temperature * noise; `sample_token`. `margin` receives the distance to the second
 * largest of the whole vocabulary, unless it is NULL. */
static int sample_token(const Worker *w, int row, int64_t step, const float *logits, float *margin) {
    const State *s = w->state;
    float *scores = w->scores, temperature = *s->temperature, second = -INFINITY;
    int best = 0;
    gumbel_noise(s, row, step, scores);
    for (int i = 0; i < VOCAB_SIZE; i++) scores[i] = logits[i] + temperature * scores[i];
    if (s->top_k || s->top_p) {
        best = best_of_kept(w, logits);
    } else {
        for (int i = VOCAB_SIZE; i % LANES; i++) scores[i] = -INFINITY;
        vec largest = load(scores);
        for (int i = LANES; i < VOCAB_SIZE; i += LANES) largest = larger(largest, load(scores + i));
        for (int i = 1; i < LANES; i++) largest[0] = fmaxf(largest[0], largest[i]);
        while (best < VOCAB_SIZE - 1 && scores[best] < largest[0]) best++;
    }
    if (margin) {
        for (int i = 0; i < VOCAB_SIZE; i++) second = i != best && scores[i] > second ? scores[i] : second;
        *margin = scores[best] - second;
    }
    return best;
}

/* -- speculation: speculate.py in C -------------------------------------------------------------------------------- */

/* The row of the n-gram table after the first `end` tokens of the text. Its context is the newest of them. */
static int context_row(const Table *table, const int64_t *text, int end) {
    int row = 0;
    for (int i = end > MAX_ORDER ? end - MAX_ORDER : 0; i < end; i++) row = table->after[row * VOCAB_SIZE + text[i]];
    return row;
}

/* The draft tokens of one row so far, in a forward. */
typedef struct {
    int context;  /* the row of the n-gram table after them */
    float chance; /* that all of them are right */
} Draft;

/* Write a draft token to text[pos]. Returns 0 if it is too unlikely to be worth a row of the forward. */
static int draft_next(const Worker *w, Draft *draft, int row, int64_t *text, int pos) {
    const State *s = w->state;
    const Table *table = w->table;
    /* the token that the table picks with the same noise. The larger its margin, the likelier the model picks it too:
     * see docs/speed.md */
    float margin;
    const float *logits = table->logits + (size_t)draft->context * VOCAB_SIZE;
    int token = sample_token(w, row, pos - s->first_new[row], logits, &margin);
    draft->chance *= 1 / (1 + expf(-0.67f * margin / fmaxf(*s->temperature, 0.5f)));
    if (draft->chance < MIN_CHANCE) return 0;
    text[pos] = token;
    draft->context = table->after[draft->context * VOCAB_SIZE + token];
    return 1;
}

/* -- a step -------------------------------------------------------------------------------------------------------- */

/* Choose the tokens of the next forward: for each row, the known ones that are not cached yet, then draft tokens.
 * Returns the first row left for a later forward. */
static int plan(const Worker *w, int row) {
    Group *g = w->group;
    const State *s = w->state;
    g->n = g->num_picks = 0;
    for (; row < g->end_row && !g->failed; row++) {
        int64_t *text = s->tokens + (size_t)row * (BLOCK_SIZE + 1);
        int end = s->end[row], limit = s->limit[row], room = limit - end - 1;
        if (end >= limit) continue;
        room = room < w->num_drafts ? room : w->num_drafts;
        if (g->n + 1 + room > MAX_TOKENS) return row;
        Draft draft = {room ? context_row(w->table, text, end) : 0, 1};
        for (int pos = s->cached[row]; pos < end + room; pos++) {
            if (g->n == MAX_TOKENS) return row; /* the rest of a long prompt follows in the next forward */
            g->row[g->n] = row, g->pos[g->n] = pos, g->token[g->n] = text[pos], g->n++;
            if (pos < end - 1) continue;
            g->fed[g->num_picks++] = g->n - 1; /* a pick follows this token, and maybe a draft token */
            if (pos + 1 == end + room || !draft_next(w, &draft, row, text, pos + 1)) break;
        }
    }
    return row;
}

/* Append the picks of the forward up to the first rejected draft token. */
static void accept(const Worker *w) {
    Group *g = w->group;
    const State *s = w->state;
    for (int i = 0; i < g->n; i++) s->cached[g->row[i]] = g->pos[i] + 1;
    for (int j = 0, drafts; j < g->num_picks; j += drafts + 1) {
        int row = g->row[g->fed[j]];
        int64_t *text = s->tokens + (size_t)row * (BLOCK_SIZE + 1) + s->end[row], right = 0;
        for (drafts = 0; j + drafts + 1 < g->num_picks && g->row[g->fed[j + drafts + 1]] == row; drafts++) {}
        while (right < drafts && text[right] == g->picks[j + right]) right++;
        g->offered += drafts, g->accepted += right;
        if (g->picks[j + right] != NONE) text[right] = g->picks[j + right], right++;
        if (!right) g->failed = 1;
        s->end[row] += right;
        s->cached[row] = s->end[row] - 1; /* later slots hold keys of rejected draft tokens and will be overwritten */
    }
}

/* Run the steps of worker i's group. Every step appends at least one token to each row below its limit, or is the last
 * and does not count. */
static void work(void *workers, int i) {
    const Worker *w = (const Worker *)workers + i;
    Group *g = w->group;
    lap(w, BETWEEN_CALLS);
    for (int step = 0; step < w->max_steps; step++) {
        int row = g->first_row, fed = 0;
        while (row < g->end_row) {
            if (w->part == 0) g->next_row = plan(w, row);
            meet(w, SAMPLING);
            row = g->next_row;
            if (!g->n) break; /* the other rows are at their limits, or the group has failed */
            forward(w);
            for (int j = w->part; j < g->num_picks; j += g->parts) {
                int at = g->fed[j], place = g->row[at];
                int64_t step = g->pos[at] + 1 - w->state->first_new[place];
                const float *logits = g->logits + (size_t)j * V;
                g->picks[j] = all_finite(logits) ? sample_token(w, place, step, logits, NULL) : NONE;
            }
            meet(w, SAMPLING);
            if (w->part == 0) accept(w);
            fed = 1;
        }
        if (!fed) break;
        if (w->part == 0) g->steps += !g->failed;
    }
}

/* -- what Python calls --------------------------------------------------------------------------------------------- */

/* Outputs per panel of packed weights, and panels that are packed together. */
int lanes(void) { return LANES; }
int tile_panels(void) { return TILE_PANELS; }

/* We read and write wherever the numbers of a State say. Returns 0 if all are in range, or which of its fields, counted
 * from 1, has one that is not. */
static int out_of_range(const State *s, int B) {
    for (int row = 0; row < B; row++) {
        const int64_t *text = s->tokens + (size_t)row * (BLOCK_SIZE + 1), end = s->end[row];
        for (int i = 0; i <= BLOCK_SIZE; i++)
            if (text[i] < 0 || text[i] >= VOCAB_SIZE) return 1;
        if (end < 1 || end > BLOCK_SIZE + 1) return 2;
        if (s->cached[row] < 0 || s->cached[row] >= end) return 3;
        if (s->limit[row] < 0 || s->limit[row] > BLOCK_SIZE + 1) return 4;
        if (s->first_new[row] < INT64_MIN / 2 || s->first_new[row] > end) return 5;
    }
    if ((s->seed[0] | s->seed[1]) >> 32) return 7;
    if (!(*s->temperature >= 0 && *s->temperature < INFINITY)) return 8; /* which NaN is not */
    if (s->top_k && *s->top_k < 1) return 9;
    if (s->top_p && !(*s->top_p >= 0 && *s->top_p <= 1)) return 10; /* float32 rounds a tiny one to 0 */
    return 0;
}

/* Run up to max_steps steps for the rows below their limits. Writes the numbers of steps, of draft tokens offered and of
 * those accepted to counters[0..2], which start at 0. Returns 0, or what out_of_range says, or -1 if there is too little
 * memory, or -2 if a row has logits that are infinite or NaN. After some steps it is still 0, so that their tokens get
 * out, and the next call, which meets the same logits at once, returns -2. */
int run_steps(Pool *pool, const Model *model, const Cache *cache, const State *state, const Table *table, int B,
              int threads, int by_rows, int max_steps, int num_drafts, int64_t *counters) {
    int wrong = out_of_range(state, B);
    if (wrong) return wrong;
    threads = threads < pool->barrier.threads ? threads : pool->barrier.threads;
    int num_groups = by_rows ? threads : 1, parts = by_rows ? 1 : threads;
    size_t shared = ((size_t)X + QKV + X + FC + (size_t)V) * MAX_TOKENS;
    size_t own = ((size_t)X + H) * MAX_TOKENS + 5 * (size_t)PAD(BLOCK_SIZE) + 3 * (size_t)V;
    void *memory = scratch(pool, (num_groups * shared + threads * own) * sizeof(float) + 63);
    float *next = (float *)(((uintptr_t)memory + 63) / 64 * 64); /* by hand, because Windows has no aligned_alloc */
    if (!memory) return -1;
    Group groups[num_groups];
    Worker workers[threads];

    /* divide the rows among the groups, and each forward among the threads of its group */
    for (int i = 0; i < num_groups; i++) {
        Group *g = groups + i;
        memset(g, 0, sizeof *g);
        make_barrier(&g->barrier, parts);
        g->parts = parts, g->first_row = B * i / num_groups, g->end_row = B * (i + 1) / num_groups;
        float **buffers[] = {&g->x, &g->qkv, &g->y, &g->fc, &g->logits};
        size_t sizes[] = {X, QKV, X, FC, V};
        for (int j = 0; j < 5; j++) *buffers[j] = next, next += sizes[j] * MAX_TOKENS;
    }
    for (int i = 0; i < threads; i++) {
        float *in = next, *hidden = in + (size_t)X * MAX_TOKENS, *weights = hidden + (size_t)H * MAX_TOKENS;
        float *scores = weights + 5 * (size_t)PAD(BLOCK_SIZE);
        next += own;
        workers[i] = (Worker){groups + i / parts, i % parts, max_steps, num_drafts, model, cache,
                              state, table, in, hidden, weights, scores, scores + V, (int *)(scores + 2 * V)};
    }

    run_parts(pool, work, workers, threads);
    int result = 0;
    for (int i = 0; i < num_groups; i++) {
        Group *g = groups + i;
        end_barrier(&g->barrier);
        counters[0] = counters[0] > g->steps ? counters[0] : g->steps;
        counters[1] += g->offered, counters[2] += g->accepted;
        if (g->failed && !g->steps) result = -2;
    }
    return result;
}
