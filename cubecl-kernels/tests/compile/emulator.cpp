// Runs a kernel of CUDA source on a CPU: the threads of a block are threads, blocks run one after the other.
//
//   emulator IN OUT
//
// IN holds the sizes of the grid as three u64; the number of the kernel's pointers, and for each the length of its
// buffer in bytes, as u64; the launcher's numbers; the buffers. OUT gets the buffers.
//
// `kernel.cu` is the kernel's text with its knobs, and `launch.h` calls it. Each of its `asm` statements has become a
// call of the function named after the instruction, with its operands in the order of PTX. SHARED_BYTES is what a
// launch asks for, and THREADS what a block has.
#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
// What is `extern` has become a pointer to `shared_memory` below; of the others static storage is enough, since blocks
// never run at once.
#define __shared__ static

struct Dim {
    uint32_t x, y, z;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr uint32_t WARP = 32, warpSize = WARP;
thread_local Dim threadIdx, blockIdx;
Dim gridDim;
const Dim blockDim = {THREADS, 1, 1};
alignas(1024) unsigned char shared_memory[SHARED_BYTES];
std::barrier threads(THREADS);
// Threads that leave a block early wait for the others here.
std::barrier end_of_block(THREADS);
std::vector<std::unique_ptr<std::barrier<>>> warps;

// What hardware would answer with anything at all.
[[noreturn]] inline void fail(const char *what) {
    fprintf(stderr, "block %u %u %u, thread %u: %s\n", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, what);
    abort();
}

inline void __syncthreads() { threads.arrive_and_wait(); }
inline void __syncwarp() { warps[threadIdx.x / WARP]->arrive_and_wait(); }

// The word of each thread of a warp, for as long as `read` takes: of all 32, in their order.
template <typename T, typename Read> auto in_warp(const T &mine, Read read) {
    static T said[THREADS];
    auto &warp = *warps[threadIdx.x / WARP];
    said[threadIdx.x] = mine;
    warp.arrive_and_wait();
    const auto result = read(said + threadIdx.x / WARP * WARP);
    // No thread may say what comes next before.
    warp.arrive_and_wait();
    return result;
}

inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
    return in_warp(value, [](const uint32_t *all) { return *std::max_element(all, all + WARP); });
}

template <typename T> inline T __shfl_xor_sync(uint32_t, T value, uint32_t mask) {
    return in_warp(value, [=](const T *all) { return all[threadIdx.x % WARP ^ mask]; });
}

template <typename T> inline T __shfl_sync(uint32_t, T value, uint32_t lane) {
    return in_warp(value, [=](const T *all) { return all[lane]; });
}

inline bool __any_sync(uint32_t, uint32_t value) {
    return in_warp(value, [](const uint32_t *all) { return std::any_of(all, all + WARP, [](auto it) { return it; }); });
}

template <typename T> inline T atomicAdd(T *sum, std::type_identity_t<T> value) {
    return __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
}

inline uint32_t atomicMax(uint32_t *largest, uint32_t value) {
    uint32_t before = __atomic_load_n(largest, __ATOMIC_RELAXED);
    while (before < value && !__atomic_compare_exchange_n(largest, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    return before;
}

// Blocks run one after the other, and barriers order the threads of one.
inline void __threadfence() {}
inline void __nanosleep(uint32_t) { fail("waits for another block"); }

template <typename T> inline T __ldg(const T *from) { return *from; }

// ---- Numbers --------------------------------------------------------------------------------------------------------

template <typename A, typename B> inline std::common_type_t<A, B> max(A a, B b) {
    return std::max<std::common_type_t<A, B>>(a, b);
}
template <typename A, typename B> inline std::common_type_t<A, B> min(A a, B b) {
    return std::min<std::common_type_t<A, B>>(a, b);
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }

inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
    return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
}

inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }

// CUDA's arithmetic has one NaN, of a clear sign.
inline float canonical(float value) { return std::isnan(value) ? __uint_as_float(0x7fffffff) : value; }
inline float __fadd_rn(float a, float b) { return canonical(a + b); }
inline float __fsub_rn(float a, float b) { return canonical(a - b); }
inline float __fmul_rn(float a, float b) { return canonical(a * b); }
inline float __fdiv_rn(float a, float b) { return canonical(a / b); }
inline float __frcp_rn(float x) { return canonical(1 / x); }
inline float rsqrtf(float x) { return canonical(1 / std::sqrt(x)); }

inline float __fmaf_rn(float a, float b, float c) { return canonical(std::fma(a, b, c)); }
inline float __fdividef(float a, float b) { return canonical(a / b); }

// The number of the lowest bit that is set, from 1 on.
inline int __ffs(uint32_t bits) { return std::countr_zero(bits) + 1; }

// A name that the C library has too.
#define __powf(base, exponent) powf(base, exponent)

struct __half {
    uint16_t bits;
    __half() = default;
    explicit __half(float value) : bits(std::bit_cast<uint16_t>((_Float16)value)) {}
    explicit operator float() const { return (float)std::bit_cast<_Float16>(bits); }
};
struct __half2 {
    __half x, y;
};
struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    // To the nearest, of two the even one.
    explicit __nv_bfloat16(float value) {
        const uint32_t word = __float_as_uint(value);
        bits = std::isnan(value) ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    }
    explicit operator float() const { return __uint_as_float((uint32_t)bits << 16); }
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

// ---- Instructions of PTX --------------------------------------------------------------------------------------------

inline void ptx_cvt_f32_f16(float &value, uint16_t bits) { value = canonical((float)std::bit_cast<_Float16>(bits)); }

inline void ptx_ld_relaxed_gpu_global_u32(uint32_t &value, const uint32_t *from) {
    value = __atomic_load_n(from, __ATOMIC_RELAXED);
}

inline void ptx_mov_u32(uint32_t &to, uint32_t from) { to = from; }

// What is less than a normal number is 0, before and after.
inline void ptx_ex2_approx_ftz_f32(float &power, float x) {
    const auto flushed = [](float it) { return std::fpclassify(it) == FP_SUBNORMAL ? std::copysign(0.0f, it) : it; };
    power = canonical(flushed(exp2f(flushed(x))));
}

inline void ptx_rcp_approx_ftz_f32(float &inverse, float x) { inverse = canonical(1 / x); }

// Two numbers, the second one in front; NaN becomes the one that the instruction makes.
template <typename T> inline uint32_t two_of(float second, float first) {
    const auto bits = [](float value) { return std::isnan(value) ? (uint16_t)0x7fff : T(value).bits; };
    return (uint32_t)bits(second) << 16 | bits(first);
}

// The FP8 number nearest to x, ties to even, in the saturating mode: of so many bits of exponent and of mantissa.
inline uint32_t fp8_of(float x, int exponent_bits, int mantissa_bits, uint32_t largest) {
    const uint32_t sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x) || x == 0)
        return sign | (x == 0 ? 0 : 0x7f);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = 0;
    std::frexp(x, &exponent);
    // A number's step, which stands still below the normal ones.
    const int step = std::max(exponent - 1, 1 - bias) - mantissa_bits;
    const double steps = std::nearbyint(std::ldexp((double)std::fabs(x), -step));
    const double code = steps + (double)(step + mantissa_bits + bias - 1) * (1 << mantissa_bits);
    return sign | (uint32_t)std::min(code, (double)largest);
}
inline void ptx_cvt_rn_satfinite_e4m3x2_f32(uint16_t &pair, float second, float first) {
    pair = fp8_of(second, 4, 3, 0x7e) << 8 | fp8_of(first, 4, 3, 0x7e);
}
inline void ptx_cvt_rn_satfinite_e5m2x2_f32(uint16_t &pair, float second, float first) {
    pair = fp8_of(second, 5, 2, 0x7b) << 8 | fp8_of(first, 5, 2, 0x7b);
}
// Every E4M3 number is one of FP16.
inline uint16_t fp16_of_e4m3(uint8_t code) {
    if ((code & 0x7f) == 0x7f)
        return 0x7fff;
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return std::bit_cast<uint16_t>((_Float16)(code & 0x80 ? -magnitude : magnitude));
}
inline void ptx_cvt_rn_f16x2_e4m3x2(uint32_t &halves, uint16_t pair) {
    halves = (uint32_t)fp16_of_e4m3(pair >> 8) << 16 | fp16_of_e4m3(pair & 0xff);
}
inline void ptx_max_u16x2(uint32_t &larger, uint32_t a, uint32_t b) {
    larger = std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}

inline void ptx_cvt_rn_f16x2_f32(uint32_t &pair, float second, float first) { pair = two_of<__half>(second, first); }
inline void ptx_cvt_rn_bf16x2_f32(uint32_t &pair, float second, float first) {
    pair = two_of<__nv_bfloat16>(second, first);
}

inline void ptx_prmt_b32(uint32_t &out, uint32_t first, uint32_t second, uint32_t selector) {
    const uint64_t both = (uint64_t)second << 32 | first;
    out = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t nibble = selector >> 4 * i;
        const uint8_t byte = both >> nibble % 8 * 8;
        out |= (uint32_t)(uint8_t)(nibble & 8 ? (int8_t)byte >> 7 : byte) << 8 * i;
    }
}

// Addresses of shared memory are 32 bits wide: those in `shared_memory`.
inline size_t __cvta_generic_to_shared(const void *pointer) { return (const unsigned char *)pointer - shared_memory; }

inline void ptx_ld_volatile_shared_v4_u32(uint32_t &x, uint32_t &y, uint32_t &z, uint32_t &w, uint32_t from) {
    uint4 read;
    memcpy(&read, shared_memory + from, sizeof read);
    x = read.x, y = read.y, z = read.z, w = read.w;
}

inline void ptx_ld_volatile_shared_v2_u32(uint32_t &x, uint32_t &y, uint32_t from) {
    uint2 read;
    memcpy(&read, shared_memory + from, sizeof read);
    x = read.x, y = read.y;
}

// What a thread has started, in the groups that it waits for; the last group is not closed yet. Each is finished as
// late as it may be: when its thread waits for it.
template <typename Started> struct Groups {
    std::deque<std::vector<Started>> groups = std::deque<std::vector<Started>>(1);
    void start(const Started &started) { groups.back().push_back(started); }
    void commit() { groups.emplace_back(); }
    // Until so many closed groups are left.
    template <typename Finish> void wait(size_t pending, Finish finish) {
        for (; groups.size() - 1 > pending; groups.pop_front())
            for (auto &started : groups.front())
                finish(started);
    }
};

// Of what a copy writes, so many bytes are copied, and the others are 0.
struct Copy {
    uint32_t to, written, bytes;
    const unsigned char *from;
};
thread_local Groups<Copy> copies;

inline void ptx_cp_async_ca_shared_global(uint32_t to, const void *from, uint32_t bytes) {
    copies.start({to, bytes, bytes, (const unsigned char *)from});
}
inline void ptx_cp_async_cg_shared_global(uint32_t to, const void *from, uint32_t bytes) {
    ptx_cp_async_ca_shared_global(to, from, bytes);
}

inline void ptx_cp_async_cg_shared__cta_global(uint32_t to, uint64_t from, int, uint32_t bytes) {
    copies.start({to, 16, bytes, (const unsigned char *)from});
}
inline void ptx_cp_async_cg_shared__cta_global(uint32_t to, uint64_t from, int bytes) {
    ptx_cp_async_cg_shared__cta_global(to, from, bytes, (uint32_t)bytes);
}
template <typename... Operands> inline void ptx_cp_async_ca_shared__cta_global(Operands... operands) {
    ptx_cp_async_cg_shared__cta_global(operands...);
}

inline void ptx_cp_async_commit_group() { copies.commit(); }

inline void ptx_cp_async_wait_group(size_t pending) {
    copies.wait(pending, [](const Copy &copy) {
        memset(shared_memory + copy.to, 0, copy.written);
        memcpy(shared_memory + copy.to, copy.from, copy.bytes);
    });
}

inline void ptx_cp_async_wait_all() {
    copies.commit();
    ptx_cp_async_wait_group(0);
}

// Four matrices of 8 x 8 elements of 16 bits, whose rows lie where the threads from 8 i on say for matrix i.
template <bool transposed>
inline void load_matrices(uint32_t &r0, uint32_t &r1, uint32_t &r2, uint32_t &r3, uint32_t row) {
    uint32_t *const registers[4] = {&r0, &r1, &r2, &r3};
    in_warp(row, [&](const uint32_t *rows) {
        const uint32_t lane = threadIdx.x % WARP;
        for (int matrix = 0; matrix < 4; matrix++) {
            uint16_t pair[2];
            for (uint32_t side = 0; side < 2; side++) {
                const uint32_t first = lane / 4, second = lane % 4 * 2 + side;
                const uint32_t of = transposed ? second : first, at = transposed ? first : second;
                memcpy(pair + side, shared_memory + rows[matrix * 8 + of] + 2 * at, 2);
            }
            memcpy(registers[matrix], pair, 4);
        }
        return 0;
    });
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared__cta_b16(uint32_t &r0, uint32_t &r1, uint32_t &r2, uint32_t &r3,
                                                              uint32_t row) {
    load_matrices<false>(r0, r1, r2, r3, row);
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared__cta_b16(uint32_t &r0, uint32_t &r1, uint32_t &r2,
                                                                    uint32_t &r3, uint32_t row) {
    load_matrices<true>(r0, r1, r2, r3, row);
}

// D = A B + C of 16 x 16 and 16 x 8 elements, where PTX says that the threads of a warp have them.
template <typename T>
inline void multiply(float *d, const std::array<uint32_t, 6> &operands, const std::array<float, 4> &c) {
    const auto element = [](const uint32_t *registers, uint32_t index) {
        T value;
        value.bits = registers[index / 2] >> 16 * (index % 2);
        return (float)value;
    };
    in_warp(operands, [&](const std::array<uint32_t, 6> *all) {
        const uint32_t lane = threadIdx.x % WARP;
        for (uint32_t slot = 0; slot < 4; slot++) {
            const uint32_t row = lane / 4 + slot / 2 * 8, col = lane % 4 * 2 + slot % 2;
            d[slot] = c[slot];
            for (uint32_t k = 0; k < 16; k++) {
                const uint32_t *const a = all[row % 8 * 4 + k % 8 / 2].data();
                const uint32_t *const b = all[col * 4 + k % 8 / 2].data() + 4;
                d[slot] += element(a, (row / 8 + k / 8 * 2) * 2 + k % 2) * element(b, k / 8 * 2 + k % 2);
            }
        }
        return 0;
    });
}
#define MULTIPLY(name, type)                                                                                           \
    inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_##name##_f32(                                                \
        float &d0, float &d1, float &d2, float &d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,   \
        uint32_t b1, float c0, float c1, float c2, float c3) {                                                         \
        float d[4];                                                                                                    \
        multiply<type>(d, {a0, a1, a2, a3, b0, b1}, {c0, c1, c2, c3});                                                 \
        d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                                                    \
    }
MULTIPLY(f16_f16, __half)
MULTIPLY(bf16_bf16, __nv_bfloat16)

// D = A B + C of 16 x 64 and 64 x 8 elements of four bits, where PTX says that the threads of a warp have them.
inline void ptx_mma_sync_aligned_m16n8k64_row_col_s32_s4_s4_s32(int &d0, int &d1, int &d2, int &d3, uint32_t a0,
                                                                uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                                uint32_t b1, int c0, int c1, int c2, int c3) {
    const auto element = [](uint32_t word, uint32_t index) { return (int32_t)(word << (28 - 4 * index)) >> 28; };
    int *const d[4] = {&d0, &d1, &d2, &d3};
    d0 = c0, d1 = c1, d2 = c2, d3 = c3;
    in_warp(std::array<uint32_t, 6>{a0, a1, a2, a3, b0, b1}, [&](const std::array<uint32_t, 6> *all) {
        const uint32_t lane = threadIdx.x % WARP;
        for (uint32_t slot = 0; slot < 4; slot++) {
            const uint32_t row = lane / 4 + slot / 2 * 8, col = lane % 4 * 2 + slot % 2;
            for (uint32_t k = 0; k < 64; k++) {
                const auto &a = all[row % 8 * 4 + k % 32 / 8], &b = all[col * 4 + k % 32 / 8];
                *d[slot] += element(a[row / 8 + k / 32 * 2], k % 8) * element(b[4 + k / 32], k % 8);
            }
        }
        return 0;
    });
}

// ---- Barriers of memory, and bulk copies ----------------------------------------------------------------------------

// A copy into shared memory that a barrier counts.
struct BulkCopy {
    uint32_t bytes;
    std::function<void()> land;
};

// The state of a barrier lies here, by its address. Each has a lock of its own: a common one would order threads that
// have nothing to do with one another, and hide their races.
struct Barrier {
    std::mutex lock;
    std::condition_variable changed;
    uint32_t expected = 0, missing = 0, phase = 0;
    // Told and not yet written.
    int64_t bytes = 0;
    std::vector<BulkCopy> copies;

    void settle() {
        if (missing > 0 || bytes != 0)
            return;
        missing = expected;
        phase++;
        changed.notify_all();
    }
};
std::map<uint32_t, Barrier> barriers;
// Readers of it do not order one another.
std::shared_mutex barriers_lock;

inline void ptx_mbarrier_init_shared__cta_b64(uint32_t address, uint32_t arrivals) {
    const std::unique_lock guard(barriers_lock);
    Barrier &barrier = barriers[address];
    barrier.expected = barrier.missing = arrivals;
    barrier.phase = barrier.bytes = 0;
    barrier.copies.clear();
}

inline Barrier &barrier_at(uint32_t address) {
    const std::shared_lock guard(barriers_lock);
    const auto found = barriers.find(address);
    if (found == barriers.end())
        fail("a barrier that nobody has set up");
    return found->second;
}

inline void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(uint32_t address, uint32_t bytes) {
    Barrier &barrier = barrier_at(address);
    const std::lock_guard guard(barrier.lock);
    if (barrier.missing == 0)
        fail("more arrivals at a barrier than it expects");
    barrier.missing--;
    barrier.bytes += bytes;
    barrier.settle();
}
inline void ptx_mbarrier_arrive_shared__cta_b64(uint32_t address) {
    ptx_mbarrier_arrive_expect_tx_shared__cta_b64(address, 0);
}
inline void ptx_cp_async_mbarrier_arrive_shared__cta_b64(uint32_t) { ptx_cp_async_wait_all(); }

// Returns when it need not be tried again. Copies land when somebody waits for them, on the thread that does.
inline void ptx_mbarrier_try_wait_parity_shared__cta_b64(uint32_t address, uint32_t parity) {
    Barrier &barrier = barrier_at(address);
    std::unique_lock guard(barrier.lock);
    while (true) {
        for (const BulkCopy &copy : std::exchange(barrier.copies, {})) {
            copy.land();
            barrier.bytes -= copy.bytes;
            barrier.settle();
        }
        if (barrier.phase % 2 != parity)
            return;
        barrier.changed.wait(guard);
    }
}

// From its start until it lands, what it writes is of no use: NaN.
inline void start_bulk_copy(uint32_t to, uint32_t bytes, uint32_t address, std::function<void()> land) {
    memset(shared_memory + to, 0xff, bytes);
    Barrier &barrier = barrier_at(address);
    const std::lock_guard guard(barrier.lock);
    barrier.copies.push_back({bytes, std::move(land)});
    barrier.changed.notify_all();
}

inline void ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(uint32_t to, const void *from,
                                                                                  uint32_t bytes, uint32_t barrier) {
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16)
        fail("a bulk copy that is not aligned");
    start_bulk_copy(to, bytes, barrier, [=] { memcpy(shared_memory + to, from, bytes); });
}

// The swizzle of 128 bytes.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// A tensor map as `launch.h` makes it. Its dimensions begin with that of neighbours, and those that it has not have one
// element. Strides are in bytes: the first is the size of an element.
struct Box {
    const unsigned char *from;
    std::array<uint64_t, 5> sizes, strides, tile;
};

template <typename... Index>
inline void copy_box(uint32_t to, const void *map, uint32_t barrier, Index... index) {
    Box box;
    memcpy(&box, map, sizeof box);
    const std::array<int32_t, 5> first = {(int32_t)index...};
    const uint32_t size = box.strides[0];
    uint32_t bytes = size;
    for (const uint64_t extent : box.tile)
        bytes *= extent;
    if (to % 128 || box.tile[0] * size != 128)
        fail("a box of other rows than of 128 aligned bytes");
    start_bulk_copy(to, bytes, barrier, [=] {
        for (uint32_t at = 0; at < bytes; at += size) {
            uint64_t rest = at / size;
            const unsigned char *from = box.from;
            bool inside = true;
            for (int dim = 0; dim < 5; dim++) {
                const int64_t place = first[dim] + (int64_t)(rest % box.tile[dim]);
                rest /= box.tile[dim];
                inside = inside && place >= 0 && place < (int64_t)box.sizes[dim];
                from += inside ? place * box.strides[dim] : 0;
            }
            unsigned char *const element = shared_memory + swizzled(to + at);
            if (inside)
                memcpy(element, from, size);
            else
                memset(element, 0, size);
        }
    });
}
inline void ptx_cp_async_bulk_tensor_3d_shared__cluster_global_tile_mbarrier__complete_tx__bytes(
    uint32_t to, const void *map, uint32_t x, uint32_t y, uint32_t z, uint32_t barrier) {
    copy_box(to, map, barrier, x, y, z);
}
inline void ptx_cp_async_bulk_tensor_4d_shared__cluster_global_tile_mbarrier__complete_tx__bytes(
    uint32_t to, const void *map, uint32_t x, uint32_t y, uint32_t z, uint32_t w, uint32_t barrier) {
    copy_box(to, map, barrier, x, y, z, w);
}

// A copy out of shared memory reads as late as it may, and writes as late as it may.
struct BulkStore {
    unsigned char *to;
    uint32_t from, bytes;
    bool adds;
    std::vector<unsigned char> read;

    void take() {
        if (read.empty())
            read.assign(shared_memory + from, shared_memory + from + bytes);
    }
    void write() {
        take();
        if (!adds) {
            memcpy(to, read.data(), bytes);
            return;
        }
        for (uint32_t at = 0; at < bytes; at += sizeof(float)) {
            float sum, part;
            memcpy(&sum, to + at, sizeof sum);
            memcpy(&part, read.data() + at, sizeof part);
            sum += part;
            memcpy(to + at, &sum, sizeof sum);
        }
    }
};
thread_local Groups<BulkStore> stores;

inline void ptx_cp_async_bulk_global_shared__cta_bulk_group(void *to, uint32_t from, uint32_t bytes) {
    stores.start({(unsigned char *)to, from, bytes, false, {}});
}
inline void ptx_cp_reduce_async_bulk_global_shared__cta_bulk_group_add_f32(void *to, uint32_t from, uint32_t bytes) {
    stores.start({(unsigned char *)to, from, bytes, true, {}});
}
inline void ptx_cp_async_bulk_commit_group() { stores.commit(); }
inline void ptx_cp_async_bulk_wait_group(size_t pending) {
    stores.wait(pending, [](BulkStore &store) { store.write(); });
}
inline void ptx_cp_async_bulk_wait_group_read(size_t pending) {
    for (size_t i = 0; i + 1 + pending < stores.groups.size(); i++)
        for (BulkStore &store : stores.groups[i])
            store.take();
}

// ---- Barriers by number, and order ----------------------------------------------------------------------------------

struct NumberedBarrier {
    std::mutex lock;
    std::condition_variable changed;
    uint32_t arrived, phase;
};
NumberedBarrier numbered_barriers[16];

inline void arrive_at(uint32_t number, uint32_t expected, bool waits) {
    NumberedBarrier &barrier = numbered_barriers[number];
    std::unique_lock guard(barrier.lock);
    const uint32_t phase = barrier.phase;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        barrier.phase++;
        barrier.changed.notify_all();
    } else if (waits) {
        barrier.changed.wait(guard, [&] { return barrier.phase != phase; });
    }
}
inline void ptx_bar_sync(uint32_t number, uint32_t expected) { arrive_at(number, expected, true); }
inline void ptx_bar_arrive(uint32_t number, uint32_t expected) { arrive_at(number, expected, false); }

inline void ptx_ld_acquire_gpu_global_u32(uint32_t &value, const uint32_t *from) {
    value = __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
inline void ptx_st_release_gpu_global_u32(uint32_t *to, uint32_t value) {
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
}

// All threads have as many registers as they like, and all copies are of one proxy.
inline void ptx_setmaxnreg_dec_sync_aligned_u32(uint32_t) {}
inline void ptx_setmaxnreg_inc_sync_aligned_u32(uint32_t) {}
inline void ptx_fence_proxy_async_shared__cta() {}
inline void ptx_fence_proxy_async_global() {}

// ---- Products of a warpgroup ----------------------------------------------------------------------------------------

// D (+)= A B, each warp its 16 rows of the 64. It runs when its threads wait for its group, on the registers as they
// are then. Shared memory must hold from its start on what it holds then.
struct Product {
    // Of D; of A where they hold it.
    std::array<void *, 128> sums;
    std::array<const uint32_t *, 4> registers;
    bool a_in_registers, adds;
    // Of A and of B: the descriptor, and whether rows of shared memory run along M or N.
    std::array<uint64_t, 2> descriptors;
    std::array<bool, 2> along_mn;
    // Of this thread's share of the operands in shared memory at the start.
    uint64_t digest;
    uint64_t (*digest_now)(const Product &);
    void (*multiply)(const Product &);
};
thread_local Groups<Product> products;

// An element of an operand in shared memory; the fields of a descriptor are said in hopper.cu.
template <typename Element>
inline Element element_at(const Product &product, int operand, uint32_t row, uint32_t k) {
    const uint64_t descriptor = product.descriptors[operand];
    const auto field = [=](int bit) { return (uint32_t)(descriptor >> bit & 0x3fff) * 16; };
    constexpr uint32_t PANEL = 128 / sizeof(Element);
    const uint32_t size = sizeof(Element);
    const uint32_t place = product.along_mn[operand]
                               ? row / PANEL * field(16) + k / 8 * field(32) + k % 8 * 128 + row % PANEL * size
                               : row / 8 * field(32) + row % 8 * 128 + k * size;
    Element element;
    memcpy(&element, shared_memory + swizzled(field(0) + place), sizeof element);
    return element;
}

// The first of its warp's rows.
inline uint32_t first_row() { return threadIdx.x % 128 / WARP * 16; }

template <typename Element, int N> inline uint64_t digest_of(const Product &product) {
    constexpr uint32_t K = 32 / sizeof(Element);
    uint64_t digest = 0;
    const auto take = [&](int operand, uint32_t first, uint32_t rows) {
        for (uint32_t i = threadIdx.x % WARP; i < rows * K; i += WARP) {
            const auto element = element_at<Element>(product, operand, first + i / K, i % K);
            uint32_t bits = 0;
            memcpy(&bits, &element, sizeof element);
            digest = (digest ^ bits) * 0x100000001b3;
        }
    };
    if (!product.a_in_registers)
        take(0, first_row(), 16);
    take(1, 0, N);
    return digest;
}

template <typename Element, typename Sum, int N> inline void multiply_warp(const Product &product) {
    // A register holds the elements of 4 bytes: neighbours along K, of which a quad's lanes have those of 16.
    constexpr uint32_t K = 32 / sizeof(Element), PER_LANE = 4 / sizeof(Element);
    const uint32_t lane = threadIdx.x % WARP, row = lane / 4;
    Sum a[2][K], b[K];
    if (product.a_in_registers) {
        std::array<uint32_t, 4> own;
        for (int i = 0; i < 4; i++)
            own[i] = *product.registers[i];
        in_warp(own, [&](const std::array<uint32_t, 4> *all) {
            for (uint32_t h = 0; h < 2; h++)
                for (uint32_t k = 0; k < K; k++) {
                    const auto &of_lane = all[row * 4 + k / PER_LANE % 4];
                    const uint32_t word = of_lane[h + k / (4 * PER_LANE) * 2];
                    Element element;
                    memcpy(&element, (const char *)&word + k % PER_LANE * sizeof element, sizeof element);
                    a[h][k] = (Sum)element;
                }
            return 0;
        });
    } else {
        for (uint32_t h = 0; h < 2; h++)
            for (uint32_t k = 0; k < K; k++)
                a[h][k] = (Sum)element_at<Element>(product, 0, first_row() + row + 8 * h, k);
    }
    for (uint32_t j = 0; j < N / 8; j++)
        for (uint32_t e = 0; e < 2; e++) {
            for (uint32_t k = 0; k < K; k++)
                b[k] = (Sum)element_at<Element>(product, 1, 8 * j + lane % 4 * 2 + e, k);
            for (uint32_t h = 0; h < 2; h++) {
                Sum &d = *(Sum *)product.sums[4 * j + 2 * h + e];
                Sum sum = product.adds ? d : 0;
                for (uint32_t k = 0; k < K; k++)
                    sum += a[h][k] * b[k];
                d = sum;
            }
        }
}

// Operands: the registers of D, those or the descriptor of A, the descriptor of B, whether to add, and of floats the
// signs of A and B and along what the rows of those in shared memory run.
template <typename Element, typename Sum, int N, typename... Operands>
inline void start_product(Operands &&...operands) {
    constexpr size_t OF_D = N / 2, OF_ALL = sizeof...(Operands), COUNT = OF_ALL - OF_D;
    constexpr bool IS_FLOAT = std::is_same_v<Sum, float>;
    constexpr bool IN_REGISTERS = COUNT == (IS_FLOAT ? 9 : 6);
    static_assert(IN_REGISTERS || COUNT == (IS_FLOAT ? 7 : 3));
    constexpr size_t B = OF_D + (IN_REGISTERS ? 4 : 1);
    // What an expression gives is gone before the product runs.
    constexpr std::array<bool, OF_ALL> LASTS = {std::is_lvalue_reference_v<Operands>...};
    static_assert(std::all_of(LASTS.begin(), LASTS.begin() + (IN_REGISTERS ? B : OF_D), [](bool it) { return it; }));
    const std::array<const void *, OF_ALL> places = {&operands...};
    const auto word = [](auto operand) -> uint64_t {
        if constexpr (std::is_same_v<decltype(operand), float>)
            return 0;
        else
            return operand;
    };
    const std::array<uint64_t, OF_ALL> words = {word(operands)...};
    Product product = {};
    for (size_t i = 0; i < OF_D; i++)
        product.sums[i] = const_cast<void *>(places[i]);
    product.a_in_registers = IN_REGISTERS;
    for (size_t i = 0; i < (IN_REGISTERS ? 4 : 0); i++)
        product.registers[i] = (const uint32_t *)places[OF_D + i];
    product.descriptors = {words[OF_D], words[B]};
    for (int operand = IN_REGISTERS; operand < 2; operand++)
        // The swizzle of 128 bytes and nothing else.
        if (product.descriptors[operand] >> 46 != 1 << 16)
            fail("an operand of another swizzle");
    product.adds = words[B + 1];
    if constexpr (IS_FLOAT) {
        if (words[B + 2] != 1 || words[B + 3] != 1)
            fail("a product of another sign");
        product.along_mn = {!IN_REGISTERS && words[B + 4], words[OF_ALL - 1] != 0};
    }
    product.digest_now = digest_of<Element, N>;
    product.multiply = multiply_warp<Element, Sum, N>;
    product.digest = product.digest_now(product);
    products.start(product);
}
#define WGMMA(n, depth, types, element, sum)                                                                           \
    template <typename... Operands>                                                                                    \
    inline void ptx_wgmma_mma_async_sync_aligned_m64n##n##k##depth##_##types(Operands &&...operands) {                 \
        start_product<element, sum, n>(std::forward<Operands>(operands)...);                                           \
    }
#define WGMMA_OF(n)                                                                                                    \
    WGMMA(n, 16, f32_f16_f16, __half, float)                                                                           \
    WGMMA(n, 16, f32_bf16_bf16, __nv_bfloat16, float)                                                                  \
    WGMMA(n, 32, s32_s8_s8, int8_t, int)
WGMMA_OF(64)
WGMMA_OF(128)

inline void ptx_wgmma_fence_sync_aligned() {}
inline void ptx_wgmma_commit_group_sync_aligned() { products.commit(); }
inline void ptx_wgmma_wait_group_sync_aligned(size_t pending) {
    products.wait(pending, [](const Product &product) {
        if (product.digest != product.digest_now(product))
            fail("shared memory changed under a product that reads it");
        product.multiply(product);
    });
    // Lanes wait as one.
    __syncwarp();
}

// A warp writes four matrices of 8 x 8 elements of 16 bits into the rows that the threads from 8 i on say for matrix i.
inline void ptx_stmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2,
                                                         uint32_t r3) {
    in_warp(row, [&](const uint32_t *rows) {
        const uint32_t lane = threadIdx.x % WARP, words[4] = {r0, r1, r2, r3};
        for (int matrix = 0; matrix < 4; matrix++)
            memcpy(shared_memory + rows[matrix * 8 + lane / 4] + lane % 4 * 4, words + matrix, 4);
        return 0;
    });
}

// ---- CUDA's barriers ------------------------------------------------------------------------------------------------

namespace cooperative_groups {
struct thread_block {};
inline thread_block this_thread_block() { return {}; }
} // namespace cooperative_groups

namespace cuda {
enum thread_scope { thread_scope_block };

template <thread_scope> struct barrier {
    unsigned long long word;
    struct arrival_token {};
    uint32_t address() const { return __cvta_generic_to_shared(this); }
    arrival_token arrive() {
        ptx_mbarrier_arrive_shared__cta_b64(address());
        return {};
    }
    void wait_parity(uint32_t parity) { ptx_mbarrier_try_wait_parity_shared__cta_b64(address(), parity % 2); }
};
template <thread_scope scope> void init(barrier<scope> *barrier, uint32_t expected) {
    ptx_mbarrier_init_shared__cta_b64(barrier->address(), expected);
}
namespace device {
template <thread_scope scope> unsigned long long *barrier_native_handle(barrier<scope> &barrier) {
    return &barrier.word;
}
} // namespace device
} // namespace cuda

// ---- The launch -----------------------------------------------------------------------------------------------------

#include "kernel.cu"
#include "launch.h"

int main(int, char **arguments) {
    std::ifstream in(arguments[1], std::ios::binary);
    uint64_t grid[3], count;
    in.read((char *)grid, sizeof grid);
    in.read((char *)&count, sizeof count);
    std::vector<uint64_t> lengths(count);
    in.read((char *)lengths.data(), count * sizeof lengths[0]);
    Launched numbers;
    in.read((char *)&numbers, sizeof numbers);
    std::vector<std::vector<unsigned char>> buffers;
    for (const uint64_t length : lengths)
        in.read((char *)buffers.emplace_back(length).data(), length);
    if (!in)
        return 2;
    for (uint32_t warp = 0; warp < THREADS / WARP; warp++)
        warps.push_back(std::make_unique<std::barrier<>>(WARP));
    gridDim = {(uint32_t)grid[0], (uint32_t)grid[1], (uint32_t)grid[2]};
    const auto run = [&](uint32_t thread) {
        threadIdx = {thread, 0, 0};
        for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
            for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
                for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
                    launch(buffers, numbers);
                    copies = {};
                    stores = {};
                    products = {};
                    end_of_block.arrive_and_wait();
                }
    };
    // Those of all blocks: to start one takes longer than what some blocks do.
    std::vector<std::jthread> block;
    for (uint32_t thread = 0; thread < THREADS; thread++)
        block.emplace_back(run, thread);
    block.clear();
    std::ofstream out(arguments[2], std::ios::binary);
    for (const auto &buffer : buffers)
        out.write((const char *)buffer.data(), buffer.size());
    return out.good() ? 0 : 2;
}
