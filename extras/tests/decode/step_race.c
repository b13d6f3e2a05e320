/* The C backend on several threads, for the sanitizers: test_sanitizers.py compiles and runs it.

Prints each race or other fault that a sanitizer sees, and "differs" if the number of threads changes a token. Before each run on
several threads they get a model whose logits are infinite. If run_steps does not say so, this prints "not refused". */

#include "step.c"

#include <stdio.h>

enum { ROWS = 9, THREADS = 3, DRAFTS = 3, SLOTS = ROWS * (BLOCK_SIZE + 1) };

static float numbers[1 << 20];

/* Continue ROWS rows of one token on this many threads. Writes their tokens. Returns the last result of run_steps. */
static int generate(Pool *pool, const Model *model, const Cache *cache, int threads, int by_rows, int64_t *tokens) {
    int64_t end[ROWS], cached[ROWS] = {0}, limit[ROWS], first_new[ROWS], sample[ROWS];
    int64_t seed[2] = {7, 0}, counters[3] = {0}, top_k = 9;
    float temperature = 1, top_p = 0.9f;
    for (int i = 0; i < ROWS; i++) end[i] = first_new[i] = 1, limit[i] = BLOCK_SIZE, sample[i] = i;
    memset(tokens, 0, SLOTS * sizeof *tokens);
    static const int32_t after[VOCAB_SIZE]; /* an n-gram table with one row, whatever the context */
    Table table = {numbers, after};
    State state = {tokens, end, cached, limit, first_new, sample, seed, &temperature, NULL, NULL};
    int result = 0;
    for (int call = 0; call < 2; call++) { /* the threads sleep in between */
        if (call) state.top_k = &top_k, state.top_p = &top_p;
        result = run_steps(pool, model, cache, &state, &table, ROWS, threads, by_rows, call ? BLOCK_SIZE : 2, DRAFTS,
                           counters);
    }
    return result;
}

int main(void) {
    static float slots[2 * N_LAYER][ROWS * N_EMBD * BLOCK_SIZE];
    static int64_t alone[SLOTS], together[SLOTS];
    static float infinite[VOCAB_SIZE + 64];
    Model model, broken;
    Cache cache[N_LAYER];
    for (unsigned i = 0; i < 1 << 20; i++) { /* small numbers in float32 and, for the scales of int8, in bfloat16 */
        uint32_t bits = 0x3c003c00 | (mix(i) & 0x83ff83ff);
        memcpy(numbers + i, &bits, sizeof bits);
    }
    for (size_t i = 0; i < sizeof model / sizeof(float *); i++) ((const float **)&model)[i] = numbers + 64 * i;
    for (int i = 0; i < VOCAB_SIZE; i++) infinite[i] = INFINITY;
    broken = model, broken.lm_head.bias = infinite;
    for (int i = 0; i < N_LAYER; i++) cache[i] = (Cache){slots[2 * i], slots[2 * i + 1]};

    Pool *pool = start_threads(THREADS);
    if (!pool) return 1;
    generate(pool, &model, cache, 1, 0, alone);
    for (int threads = 2; threads <= THREADS; threads++)
        for (int by_rows = 0; by_rows < 2; by_rows++) {
            if (generate(pool, &broken, cache, threads, by_rows, together) != -2) printf("not refused\n");
            generate(pool, &model, cache, threads, by_rows, together);
            if (memcmp(alone, together, sizeof alone)) printf("differs\n");
        }
    stop_threads(pool);
    return 0;
}
