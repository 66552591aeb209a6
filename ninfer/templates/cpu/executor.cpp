// The plan executor: a pool of threads that runs an array of kernels in order, in one foreign call.
//
// A launch is cut into chunks. Threads claim chunks of the current launch through one 64-bit ticket
// (launch number << 24 | next chunk); whoever finishes the last chunk opens the next launch. No thread is ever waited
// for unless it holds a chunk, so the calling thread alone can finish a plan, and a core that another process takes
// slows a step down without stalling it. Launch entries are copied into a ring that only grows around, so a
// thread that wakes late reads stale but valid memory, and its claim then fails.
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef void (*ni_kernel)(void* const* args, int chunk, int chunks);
struct ni_launch {
    ni_kernel fn;
    void* const* args;
    int64_t chunks;
};

enum { RING = 1 << 16, CHUNK_BITS = 24, SPINS = 2000, NAP_AFTER = 400 };

struct alignas(64) ni_pool {
    alignas(64) uint64_t ticket;
    alignas(64) uint64_t end;   // number of the first launch that does not exist yet
    alignas(64) int64_t done;   // finished chunks of the current launch
    alignas(64) int sleepers;
    int stop;
    int threads;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    pthread_t* workers;
    ni_launch ring[RING];
};

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void drain(ni_pool* p) {
    int idle = 0;
    for (;;) {
        uint64_t ticket = __atomic_load_n(&p->ticket, __ATOMIC_ACQUIRE);
        uint64_t number = ticket >> CHUNK_BITS;
        int64_t chunk = (int64_t)(ticket & ((1u << CHUNK_BITS) - 1));
        if (number >= __atomic_load_n(&p->end, __ATOMIC_ACQUIRE)) return;
        ni_launch* launch = &p->ring[number % RING];
        int64_t chunks = __atomic_load_n(&launch->chunks, __ATOMIC_RELAXED);
        if (chunk >= chunks) {  // others hold the last chunks
            ++idle;
            if (idle < SPINS) {
                relax();
            } else if (idle < SPINS + NAP_AFTER) {
                sched_yield();
            } else {
                timespec nap = {0, 50000};
                nanosleep(&nap, 0);
            }
            continue;
        }
        ni_kernel fn = launch->fn;
        void* const* args = launch->args;
        if (!__atomic_compare_exchange_n(&p->ticket, &ticket, ticket + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
        idle = 0;
        fn(args, (int)chunk, (int)chunks);
        if (__atomic_add_fetch(&p->done, 1, __ATOMIC_ACQ_REL) == chunks) {
            __atomic_store_n(&p->done, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&p->ticket, (number + 1) << CHUNK_BITS, __ATOMIC_RELEASE);
        }
    }
}

static void* work(void* arg) {
    ni_pool* p = (ni_pool*)arg;
    for (;;) {
        drain(p);
        for (int i = 0; i < SPINS; ++i) {  // a step is often followed by another at once
            if ((__atomic_load_n(&p->ticket, __ATOMIC_ACQUIRE) >> CHUNK_BITS) < __atomic_load_n(&p->end, __ATOMIC_ACQUIRE)) break;
            relax();
        }
        pthread_mutex_lock(&p->mutex);
        __atomic_add_fetch(&p->sleepers, 1, __ATOMIC_SEQ_CST);
        while (!p->stop &&
               (__atomic_load_n(&p->ticket, __ATOMIC_SEQ_CST) >> CHUNK_BITS) >= __atomic_load_n(&p->end, __ATOMIC_SEQ_CST))
            pthread_cond_wait(&p->wake, &p->mutex);
        __atomic_sub_fetch(&p->sleepers, 1, __ATOMIC_SEQ_CST);
        int stop = p->stop;
        pthread_mutex_unlock(&p->mutex);
        if (stop) return 0;
    }
}

extern "C" {

ni_pool* ni_pool_new(int threads) {
    void* memory = 0;
    if (posix_memalign(&memory, 64, sizeof(ni_pool))) return 0;
    ni_pool* p = (ni_pool*)memory;
    p->ticket = p->end = 0;
    p->done = 0;
    p->sleepers = p->stop = 0;
    p->threads = 1;
    pthread_mutex_init(&p->mutex, 0);
    pthread_cond_init(&p->wake, 0);
    p->workers = (pthread_t*)malloc(sizeof(pthread_t) * (threads > 1 ? threads - 1 : 1));
    for (int i = 0; i < threads - 1; ++i) {
        if (pthread_create(&p->workers[i], 0, work, p)) break;
        p->threads++;
    }
    return p;
}

int ni_pool_threads(ni_pool* p) { return p->threads; }

void ni_pool_free(ni_pool* p) {
    pthread_mutex_lock(&p->mutex);
    p->stop = 1;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
    for (int i = 0; i < p->threads - 1; ++i) pthread_join(p->workers[i], 0);
    free(p->workers);
    free(p);
}

// Run `count` launches (at most RING - 1) and return when all their effects are visible. One caller at a time.
void ni_run(ni_pool* p, const ni_launch* launches, int count) {
    uint64_t base = p->end;
    for (int i = 0; i < count; ++i) p->ring[(base + i) % RING] = launches[i];
    __atomic_store_n(&p->end, base + count, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&p->sleepers, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&p->mutex);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->mutex);
    }
    drain(p);
}
}
