/* Threads that wait for work, and the barrier where threads that share work meet. */

#ifdef __linux__
#define _GNU_SOURCE /* for sched_getcpu */
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define SPINS 500000 /* at a barrier before a thread sleeps; waking it again takes longer than a short wait */

typedef struct {
    int threads;
    atomic_int waiting, sleeping;
    atomic_uint round; /* starts again at 0 after hours of steps */
    pthread_mutex_t mutex;
    pthread_cond_t next_round;
} Barrier;

static void make_barrier(Barrier *b, int threads) {
    memset(b, 0, sizeof *b);
    b->threads = threads;
    pthread_mutex_init(&b->mutex, NULL);
    pthread_cond_init(&b->next_round, NULL);
}

static void end_barrier(Barrier *b) { /* Windows keeps memory for both */
    pthread_cond_destroy(&b->next_round);
    pthread_mutex_destroy(&b->mutex);
}

/* Wait until all threads are here. On an idle machine the others arrive within microseconds, so we keep looking. If
 * they do not, another process must have taken the core of one of them, so we sleep and leave it our core.
 *
 * A chip such as ARM may show a thread's writes to the others late and out of order. Why does everyone see them here?
 * - Each thread releases its writes with atomic_fetch_add on `waiting`. These additions form a chain, so that of the
 *   last thread acquires the writes of all. It releases them with `round`, where the others acquire them.
 * - It resets `waiting` before it changes `round`, so a thread that sees the new round counts from 0.
 * - Nobody misses the wake-up. A thread counts itself in `sleeping` before it looks at `round`, and the last thread
 *   changes `round` before it looks at `sleeping`. All four are sequentially consistent, so at least one of them sees
 *   the other. From that look until it sleeps, the thread holds the mutex, so the wake-up cannot come in between.
 * ThreadSanitizer, which test_sanitizers.py runs, checks the first two by the rules of C, whatever the chip does. */
static void barrier(Barrier *b) {
    if (b->threads == 1) return;
    unsigned round = atomic_load(&b->round);
    if (atomic_fetch_add(&b->waiting, 1) == b->threads - 1) {
        atomic_store(&b->waiting, 0);
        atomic_store(&b->round, round + 1);
        if (!atomic_load(&b->sleeping)) return;
        pthread_mutex_lock(&b->mutex);
        pthread_cond_broadcast(&b->next_round);
        pthread_mutex_unlock(&b->mutex);
        return;
    }
    for (int spins = 0; spins < SPINS; spins++)
        if (atomic_load_explicit(&b->round, memory_order_acquire) != round) return;
    pthread_mutex_lock(&b->mutex);
    atomic_fetch_add(&b->sleeping, 1);
    while (atomic_load(&b->round) == round) pthread_cond_wait(&b->next_round, &b->mutex);
    atomic_fetch_sub(&b->sleeping, 1);
    pthread_mutex_unlock(&b->mutex);
}

typedef struct {
    Barrier barrier; /* at the start and at the end of each run */
    int joined;
    int end;                         /* 1: the threads return */
    void (*work)(void *job, int part); /* of the current run */
    void *job;
    int parts;
    void *memory; /* of `scratch`, and its size */
    size_t size;
#ifdef __linux__
    cpu_set_t all; /* the cores that the caller may use */
#endif
    pthread_t ids[];
} Pool;

/* Linux wakes a thread on the core where it last ran, or on the core of the thread that wakes it. If that is the same
 * core, the two wait for each other until the kernel balances the load, milliseconds later. So during a run the caller
 * stays on its core, and the other threads stay off it. Where the system does not say which cores we have, as with more
 * than 1,024 or in a sandbox, all threads stay where they are. */
static void part_cores(Pool *pool) {
    (void)pool; /* used on Linux only */
#ifdef __linux__
    cpu_set_t own, others;
    CPU_ZERO(&own);
    CPU_SET(sched_getcpu(), &own);
    if (sched_getaffinity(0, sizeof pool->all, &pool->all)) CPU_ZERO(&pool->all);
    if (CPU_COUNT(&pool->all) < 2) return;
    CPU_XOR(&others, &pool->all, &own);
    sched_setaffinity(0, sizeof own, &own);
    for (int i = 1; i < pool->barrier.threads; i++) pthread_setaffinity_np(pool->ids[i], sizeof others, &others);
#endif
}

/* Let the caller use all of its cores again. */
static void join_cores(const Pool *pool) {
    (void)pool;
#ifdef __linux__
    if (CPU_COUNT(&pool->all) > 1) sched_setaffinity(0, sizeof pool->all, &pool->all);
#endif
}

static void *serve(void *argument) {
    Pool *pool = argument;
    pthread_mutex_lock(&pool->barrier.mutex); /* until it is known how many we are */
    int part = ++pool->joined;
    pthread_mutex_unlock(&pool->barrier.mutex);
    for (;;) {
        barrier(&pool->barrier);
        if (pool->end) return NULL;
        if (part < pool->parts) pool->work(pool->job, part);
        barrier(&pool->barrier);
    }
}

/* Call work(job, part) for all parts at the same time, part 0 in the caller. There are no more parts than threads. */
static void run_parts(Pool *pool, void (*work)(void *job, int part), void *job, int parts) {
    if (parts == 1) {
        work(job, 0);
        return;
    }
    pool->work = work, pool->job = job, pool->parts = parts;
    part_cores(pool);
    barrier(&pool->barrier);
    work(job, 0);
    barrier(&pool->barrier);
    join_cores(pool);
}

/* Return at least `size` bytes for one run, or NULL. They are those of the last run, because touching new pages takes
 * longer than a step of a small model. */
static void *scratch(Pool *pool, size_t size) {
    if (size > pool->size) {
        free(pool->memory);
        pool->memory = malloc(size);
        pool->size = pool->memory ? size : 0;
    }
    return pool->memory;
}

/* Return a pool of this many threads, including the caller's, or of fewer if the system gives us fewer. NULL: there is
 * too little memory. */
Pool *start_threads(int threads) {
    Pool *pool = calloc(1, sizeof(Pool) + threads * sizeof(pthread_t));
    if (!pool) return NULL;
    Barrier *b = &pool->barrier;
    make_barrier(b, 1);
    pthread_mutex_lock(&b->mutex);
    while (b->threads < threads && !pthread_create(pool->ids + b->threads, NULL, serve, pool)) b->threads++;
    pthread_mutex_unlock(&b->mutex);
    return pool;
}

void stop_threads(Pool *pool) {
    pool->end = 1;
    barrier(&pool->barrier);
    for (int i = 1; i < pool->barrier.threads; i++) pthread_join(pool->ids[i], NULL);
    end_barrier(&pool->barrier);
    free(pool->memory);
    free(pool);
}
