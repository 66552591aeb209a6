// What CUDA text needs to run on a CPU: one launch at a time, one block at a time, a fiber per thread.
//
// A fiber runs until it reaches a barrier or a warp collective and then hands over to the next one, in thread order or
// (order = 1) in reverse, so that a missing barrier shows as two different results. Shared memory is filled with 0xff
// before each block, asynchronous copies land only when they are waited for, a collective that its lanes enter with
// different operations, a block that cannot go on and an access that is not aligned to its type are errors. Races inside a warp, occupancy and speed are not modelled.
#pragma once
#define NI_SIM 1
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <utility>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static __attribute__((section("ni_shared")))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct uint3 { unsigned x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern char ni_shared_begin[] __asm__("__start_ni_shared") __attribute__((weak, visibility("hidden")));
extern char ni_shared_end[] __asm__("__stop_ni_shared") __attribute__((weak, visibility("hidden")));

namespace sim {

constexpr int MAX_THREADS = 1024, MAX_COPIES = 512, WORDS = 8, MEETINGS = 8;
constexpr size_t STACK_BYTES = 256 << 10;

struct Copy { void* dst; const void* src; int bytes, zero_from, group; };

struct Thread {
    uint3 id;
    unsigned lane;
    struct Warp* warp;
    bool done;
    const unsigned* wait_word;  // runnable unless *wait_word == wait_value
    unsigned wait_value;
    void* sp;
    Copy copies[MAX_COPIES];
    int num_copies, group;
};

struct Meeting {  // of the lanes of `mask`; the buffers alternate, so that one rendezvous suffices per exchange
    unsigned mask, arrived, epoch;
    int kind;
    unsigned words[2][32][WORDS];
    const void* pointers[2][32];
};

struct Warp {
    unsigned live;
    Meeting meetings[MEETINGS];
};

struct Barrier { unsigned arrived, epoch, expected, tally[2]; };

static Thread* self;
static Thread threads[MAX_THREADS];
static Warp warps[MAX_THREADS / 32];
static Barrier barriers[16];
static unsigned live;
static uint3 block_index, block_dim, grid_dim;
static unsigned char* dynamic_shared;
static size_t dynamic_bytes;
static char* stacks;
static void (*body)();
static bool failed;
static char message[256];

static void enter();
static void to_scheduler();

// Ends the launch: the fibers are abandoned.
static inline void note_failure(const char* what) {
    if (failed) return;
    failed = true;
    std::snprintf(message, sizeof message, "%s (block %u,%u,%u thread %u)", what, block_index.x, block_index.y,
                  block_index.z, self ? self->id.x : 0u);
}
[[noreturn]] static inline void fail(const char* what) {
    note_failure(what);
    to_scheduler();
    __builtin_unreachable();
}

}  // namespace sim

// What -fsanitize=alignment calls: a GPU stops at an access that is not aligned to its type, where a CPU goes on.
extern "C" __attribute__((weak, visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(void* where, void*) {
    char what[64];
    std::snprintf(what, sizeof what, "line %u: a misaligned access", ((const unsigned*)where)[2]);
    sim::fail(what);
}

namespace sim {

#if defined(__x86_64__)
extern "C" void ni_sim_switch(void** save, void* load);
__asm__(R"(
    .text
    .type ni_sim_switch,@function
ni_sim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
static void* main_sp;
static void to_scheduler() { ni_sim_switch(&self->sp, main_sp); }
static inline void to_thread(Thread* t) { ni_sim_switch(&main_sp, t->sp); }
static inline void prepare(Thread* t, char* stack) {
    void** top = (void**)(stack + STACK_BYTES);
    *--top = nullptr;  // keeps the stack 16-byte aligned at entry
    *--top = (void*)enter;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    t->sp = top;
}
#else
static ucontext_t main_context, contexts[MAX_THREADS];
static void to_scheduler() { swapcontext(&contexts[self - threads], &main_context); }
static inline void to_thread(Thread* t) { swapcontext(&main_context, &contexts[t - threads]); }
static inline void prepare(Thread* t, char* stack) {
    ucontext_t* c = &contexts[t - threads];
    getcontext(c);
    c->uc_stack.ss_sp = stack;
    c->uc_stack.ss_size = STACK_BYTES;
    c->uc_link = &main_context;
    makecontext(c, enter, 0);
}
#endif

static inline void wait(const unsigned* word, unsigned value) {
    self->wait_word = word;
    self->wait_value = value;
    to_scheduler();
}

// Lets others go on.
static inline void yield() {
    static const unsigned never = 0;
    wait(&never, 1);
}

static inline void finish_copies(int newest_kept) {
    Thread* t = self;
    int kept = 0;
    for (int i = 0; i < t->num_copies; i++) {
        Copy c = t->copies[i];
        if (c.group < t->group - newest_kept) {
            std::memcpy(c.dst, c.src, c.zero_from);
            std::memset((char*)c.dst + c.zero_from, 0, c.bytes - c.zero_from);
        } else {
            t->copies[kept++] = c;
        }
    }
    t->num_copies = kept;
}

static inline void release_barriers() {
    for (Barrier& b : barriers) {
        unsigned expected = b.expected ? b.expected : live;
        if (b.arrived && b.arrived >= expected) {
            b.arrived = 0;
            b.epoch++;
            b.tally[b.epoch & 1] = 0;
        }
    }
}

static void enter() {
    body();
    if (self->num_copies) fail("a thread ends with asynchronous copies that nobody waited for");
    self->done = true;
    live--;
    self->warp->live &= ~(1u << self->lane);
    release_barriers();
    for (Meeting& m : self->warp->meetings)
        if (m.arrived && (m.mask >> self->lane & 1)) fail("a lane left before a collective of its warp");
    to_scheduler();
}

// Wait for all live threads (count 0), or for `count` threads at the named barrier. Returns the sum of `value`.
static inline unsigned barrier(int id, unsigned count, unsigned value = 0) {
    Barrier& b = barriers[id];
    b.expected = count;
    unsigned epoch = b.epoch, slot = (epoch + 1) & 1;
    b.tally[slot ^ 1] += value;
    b.arrived++;
    unsigned expected = count ? count : live;
    if (b.arrived >= expected) {
        b.arrived = 0;
        b.epoch++;
        b.tally[slot] = 0;
    } else {
        wait(&b.epoch, epoch);
    }
    return b.tally[slot ^ 1];
}

enum Kind { SYNC, SHUFFLE, VOTE, MMA, LDMATRIX };

// The lanes of `mask` meet; each leaves `n` words and a pointer. Returns the meeting and the buffer to read.
struct Exchange { Meeting* m; int buffer; const unsigned* of(int lane) const { return m->words[buffer][lane]; } };

template <class Last>
static inline Exchange meet(unsigned mask, int kind, const unsigned* in, int n, const void* pointer, Last last) {
    Warp* w = self->warp;
    unsigned bit = 1u << self->lane;
    if (!(mask & bit)) fail("a lane is not in the mask of its own collective");
    if (mask & ~w->live) fail("a lane left before a collective of its warp");
    Meeting* m = nullptr;
    for (Meeting& c : w->meetings)
        if (c.mask == mask) { m = &c; break; }
    if (!m)
        for (Meeting& c : w->meetings)
            if (!c.arrived) { m = &c; break; }
    if (!m) fail("too many lane masks in use");
    m->mask = mask;
    if (m->arrived && m->kind != kind) fail("lanes of a warp meet in different collectives");
    m->kind = kind;
    int buffer = m->epoch & 1;
    for (int i = 0; i < n; i++) m->words[buffer][self->lane][i] = in[i];
    m->pointers[buffer][self->lane] = pointer;
    m->arrived |= bit;
    Exchange x{m, buffer};
    if ((m->arrived & mask) == mask) {
        last(x);
        m->arrived = 0;
        m->epoch++;
    } else {
        unsigned epoch = m->epoch;
        wait(&m->epoch, epoch);
    }
    return x;
}

static inline Exchange meet(unsigned mask, int kind, const unsigned* in, int n) {
    return meet(mask, kind, in, n, nullptr, [](Exchange) {});
}

template <class T>
static inline T shuffle(unsigned mask, T value, int source_lane) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    unsigned words[2] = {0, 0};
    std::memcpy(words, &value, sizeof(T));
    Exchange x = meet(mask, SHUFFLE, words, 2);
    if (!(mask >> source_lane & 1)) return value;
    T out;
    std::memcpy(&out, x.of(source_lane), sizeof(T));
    return out;
}

static inline void run_block(int num_threads, int order) {
    if (ni_shared_begin) std::memset(ni_shared_begin, 0xff, ni_shared_end - ni_shared_begin);
    std::memset(dynamic_shared, 0xff, dynamic_bytes);
    std::memset(barriers, 0, sizeof barriers);
    live = num_threads;
    for (int w = 0; w < (num_threads + 31) / 32; w++) {
        warps[w].live = 0;
        for (Meeting& m : warps[w].meetings) m.mask = m.arrived = m.epoch = 0;
    }
    for (int i = 0; i < num_threads; i++) {
        Thread& t = threads[i];
        t.id = {(unsigned)i, 0, 0};
        t.lane = i & 31;
        t.warp = &warps[i >> 5];
        t.warp->live |= 1u << t.lane;
        t.done = false;
        t.wait_word = nullptr;
        t.num_copies = t.group = 0;
        prepare(&t, stacks + (size_t)i * STACK_BYTES);
    }
    while (live) {
        bool progress = false;
        for (int i = 0; i < num_threads; i++) {
            Thread* t = &threads[order ? num_threads - 1 - i : i];
            if (t->done || (t->wait_word && *t->wait_word == t->wait_value)) continue;
            t->wait_word = nullptr;
            self = t;
            to_thread(t);
            if (failed) return;
            progress = true;
        }
        if (!progress) {
            note_failure("no thread of the block can go on");
            return;
        }
    }
}

static void* const* kernel_args;
template <class F> struct Kernel;
// Parameters are pointers; the last may be a struct of the pointers that remain.
template <class T> static inline T kernel_arg(size_t i) {
    if constexpr (std::is_pointer_v<T>) return (T)kernel_args[i];
    else return *(const T*)(kernel_args + i);
}
template <class... A> struct Kernel<void (*)(A...)> {
    static constexpr int num_args = (0 + ... + (int)(sizeof(A) / sizeof(void*)));
    static inline void (*function)(A...);
    template <size_t... I> static void call(std::index_sequence<I...>) { function(kernel_arg<A>(I)...); }
    static void run() { call(std::index_sequence_for<A...>{}); }
};

// 0, or 1 with the reason in `error`.
template <class F>
static int launch(F kernel, void* const* args, int num_args, const int* grid, int block, int shared, int order,
                  char* error, int error_bytes) {
    if (num_args != Kernel<F>::num_args) {
        std::snprintf(error, error_bytes, "the kernel has %d parameters, not %d", Kernel<F>::num_args, num_args);
        return 1;
    }
    if (block < 1 || block > MAX_THREADS || block % 32) {
        std::snprintf(error, error_bytes, "blocks of %d threads are not whole warps of at most 1024", block);
        return 1;
    }
    self = nullptr;
    failed = false;
    stacks = (char*)mmap(nullptr, STACK_BYTES * block, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) {
        std::snprintf(error, error_bytes, "no memory for the stacks of %d threads", block);
        return 1;
    }
    Kernel<F>::function = kernel;
    body = Kernel<F>::run;
    kernel_args = args;
    dynamic_bytes = shared;
    dynamic_shared = (unsigned char*)std::aligned_alloc(1024, (shared + 1023) / 1024 * 1024 + 1024);
    block_dim = {(unsigned)block, 1, 1};
    grid_dim = {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]};
    for (int z = 0; z < grid[2] && !failed; z++)
        for (int y = 0; y < grid[1] && !failed; y++)
            for (int x = 0; x < grid[0] && !failed; x++) {
                block_index = {(unsigned)x, (unsigned)y, (unsigned)z};
                run_block(block, order);
            }
    std::free(dynamic_shared);
    munmap(stacks, STACK_BYTES * block);
    if (failed) std::snprintf(error, error_bytes, "%s", message);
    return failed;
}

}  // namespace sim

#define NI_SIM_EXPORT(entry)                                                                                          \
    extern "C" __attribute__((visibility("default"))) int entry##_sim(                                                \
        void* const* args, int num_args, const int* grid, int block, int shared, int order, char* error, int bytes) { \
        return sim::launch(&entry, args, num_args, grid, block, shared, order, error, bytes);                         \
    }

#define threadIdx (sim::self->id)
#define blockIdx (sim::block_index)
#define blockDim (sim::block_dim)
#define gridDim (sim::grid_dim)
#define warpSize 32

static inline void __syncthreads() { sim::barrier(0, 0); }
static inline int __syncthreads_count(int p) { return sim::barrier(0, 0, p != 0); }
static inline int __syncthreads_or(int p) { return sim::barrier(0, 0, p != 0) != 0; }
static inline int __syncthreads_and(int p) { return sim::barrier(0, 0, p == 0) == 0; }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { sim::meet(mask, sim::SYNC, nullptr, 0); }

template <class T> static inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
    int base = sim::self->lane & ~(width - 1);
    return sim::shuffle(mask, v, base + (lane & (width - 1)));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
    int lane = sim::self->lane, base = lane & ~(width - 1), other = lane ^ bits;
    return sim::shuffle(mask, v, other < base + width ? other : lane);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    int lane = sim::self->lane, base = lane & ~(width - 1), other = lane - (int)delta;
    return sim::shuffle(mask, v, other >= base ? other : lane);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    int lane = sim::self->lane, base = lane & ~(width - 1), other = lane + (int)delta;
    return sim::shuffle(mask, v, other < base + width ? other : lane);
}
static inline unsigned __ballot_sync(unsigned mask, int p) {
    unsigned word = p != 0, out = 0;
    sim::Exchange x = sim::meet(mask, sim::VOTE, &word, 1);
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) out |= x.of(i)[0] << i;
    return out;
}
static inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
static inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }
template <class T> static inline T ni_sim_reduce(unsigned mask, T v, T (*f)(T, T)) {
    sim::Exchange x = sim::meet(mask, sim::VOTE, (const unsigned*)&v, 1);
    bool first = true;
    T out = v;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) {
            T other;
            std::memcpy(&other, x.of(i), 4);
            out = first ? other : f(out, other);
            first = false;
        }
    return out;
}
template <class T> static inline T __reduce_add_sync(unsigned m, T v) { return ni_sim_reduce<T>(m, v, [](T a, T b) { return (T)(a + b); }); }
template <class T> static inline T __reduce_max_sync(unsigned m, T v) { return ni_sim_reduce<T>(m, v, [](T a, T b) { return a > b ? a : b; }); }
template <class T> static inline T __reduce_min_sync(unsigned m, T v) { return ni_sim_reduce<T>(m, v, [](T a, T b) { return a < b ? a : b; }); }
static inline unsigned __match_any_sync(unsigned mask, unsigned v) {
    sim::Exchange x = sim::meet(mask, sim::VOTE, &v, 1);
    unsigned out = 0;
    for (int i = 0; i < 32; i++)
        if ((mask >> i & 1) && x.of(i)[0] == v) out |= 1u << i;
    return out;
}

static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __nanosleep(unsigned) {}
static inline void __trap() { sim::fail("trap"); }

template <class T, class U> static inline T atomicAdd(T* p, U v) { T old = *p; *p = (T)(old + (T)v); return old; }
template <class T, class U> static inline T atomicMax(T* p, U v) { T old = *p; if ((T)v > old) *p = (T)v; return old; }
template <class T, class U> static inline T atomicMin(T* p, U v) { T old = *p; if ((T)v < old) *p = (T)v; return old; }
template <class T, class U> static inline T atomicOr(T* p, U v) { T old = *p; *p = (T)(old | (T)v); return old; }
template <class T, class U> static inline T atomicExch(T* p, U v) { T old = *p; *p = (T)v; return old; }
template <class T, class U, class V> static inline T atomicCAS(T* p, U c, V v) { T old = *p; if (old == (T)c) *p = (T)v; return old; }
static inline unsigned atomicInc(unsigned* p, unsigned last) { unsigned old = *p; *p = old >= last ? 0 : old + 1; return old; }

template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline T __ldca(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
template <class T> static inline void __stcg(T* p, T v) { *p = v; }

static inline unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
static inline int __float_as_int(float x) { int u; std::memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(unsigned x) { float f; std::memcpy(&f, &x, 4); return f; }
static inline float __int_as_float(int x) { float f; std::memcpy(&f, &x, 4); return f; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i); return r; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) { return (unsigned)(((unsigned long long)hi << 32 | lo) >> (n & 31)); }
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) { return (unsigned)(((unsigned long long)hi << 32 | lo) << (n & 31) >> 32); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        unsigned sel = s >> 4 * i & 15, byte = bytes >> 8 * (sel & 7) & 255;
        if (sel & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << 8 * i;
    }
    return out;
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(signed char)(a >> 8 * i) * (int)(signed char)(b >> 8 * i);
    return c;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; i++) c += (a >> 8 * i & 255) * (b >> 8 * i & 255);
    return c;
}
#define NI_SIM_SIMD4(name, expression)                                                                                \
    static inline unsigned name(unsigned a, unsigned b) {                                                             \
        unsigned out = 0;                                                                                             \
        for (int i = 0; i < 4; i++) {                                                                                 \
            unsigned x = a >> 8 * i & 255, y = b >> 8 * i & 255;                                                      \
            out |= (unsigned)((expression) & 255) << 8 * i;                                                           \
        }                                                                                                             \
        return out;                                                                                                   \
    }
NI_SIM_SIMD4(__vadd4, x + y)
NI_SIM_SIMD4(__vsub4, x - y)
NI_SIM_SIMD4(__vcmpeq4, x == y ? 255 : 0)
NI_SIM_SIMD4(__vcmpne4, x != y ? 255 : 0)
NI_SIM_SIMD4(__vmaxu4, x > y ? x : y)
NI_SIM_SIMD4(__vminu4, x < y ? x : y)

static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
#define __expf ni_sim_expf  // the host's library declares the other name
static inline float ni_sim_expf(float x) { return std::exp(x); }
#define __exp2f ni_sim_exp2f  // the host's library declares the other name
static inline float ni_sim_exp2f(float x) { return std::exp2(x); }
#define __logf ni_sim_logf  // the host's library declares the other name
static inline float ni_sim_logf(float x) { return std::log(x); }
#define __sinf ni_sim_sinf  // the host's library declares the other name
static inline float ni_sim_sinf(float x) { return std::sin(x); }
#define __cosf ni_sim_cosf  // the host's library declares the other name
static inline float ni_sim_cosf(float x) { return std::cos(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return std::sqrt(x); }
static inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
static inline float __fadd_rn(float a, float b) { volatile float c = a + b; return c; }
static inline float __fsub_rn(float a, float b) { volatile float c = a - b; return c; }
static inline float __fmul_rn(float a, float b) { volatile float c = a * b; return c; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
