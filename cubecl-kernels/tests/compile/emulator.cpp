// Runs a kernel of CUDA source on a CPU: the threads of a block are threads, blocks run one after the other.
//
//   emulator IN OUT
//
// IN holds the sizes of the grid as three u64; the number of the kernel's pointers, and for each the length of its
// buffer in bytes, as u64; the launcher's numbers; the buffers. OUT gets the buffers.
//
// `kernel.cu` is the kernel's text with its knobs, and `launch.h` calls it. Each of its `asm` statements has become a
// call of the function named after the instruction, with the operands in their order. SHARED_BYTES is what a launch asks
// for, and THREADS what a block has.
#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <condition_variable>
#include <fstream>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
// `extern __shared__`, which names the array `memory` below, loses the word; of the others static storage is enough,
// since blocks never run at once.
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
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

constexpr uint32_t WARP = 32, warpSize = WARP;
thread_local Dim threadIdx;
Dim blockIdx, gridDim;
const Dim blockDim = {THREADS, 1, 1};
alignas(128) unsigned char memory[SHARED_BYTES];
// CubeCL's name of it.
#define dynamic_shared_mem memory
std::barrier threads(THREADS);
std::vector<std::unique_ptr<std::barrier<>>> warps;

inline void __syncthreads() { threads.arrive_and_wait(); }

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

inline int atomicAdd(int *sum, int value) { return __atomic_fetch_add(sum, value, __ATOMIC_RELAXED); }

// ---- Numbers --------------------------------------------------------------------------------------------------------

inline uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }

inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
    return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
}

inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }

// CUDA's arithmetic has one NaN, of a clear sign.
inline float canonical(float value) { return std::isnan(value) ? __uint_as_float(0x7fffffff) : value; }
inline float __fadd_rn(float a, float b) { return canonical(a + b); }
inline float __fsub_rn(float a, float b) { return canonical(a - b); }
inline float __fmul_rn(float a, float b) { return canonical(a * b); }
inline float __fdiv_rn(float a, float b) { return canonical(a / b); }

inline float __fmaf_rn(float a, float b, float c) { return canonical(std::fma(a, b, c)); }
inline float __fdividef(float a, float b) { return canonical(a / b); }

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

// Two numbers, the second one in front; NaN becomes the one that the instruction makes.
template <typename T> inline uint32_t two_of(float second, float first) {
    const auto bits = [](float value) { return std::isnan(value) ? (uint16_t)0x7fff : T(value).bits; };
    return (uint32_t)bits(second) << 16 | bits(first);
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

// Addresses of shared memory are 32 bits wide: those in `memory`.
inline size_t __cvta_generic_to_shared(const void *pointer) { return (const unsigned char *)pointer - memory; }

inline void ptx_ld_volatile_shared_v4_u32(uint32_t &x, uint32_t &y, uint32_t &z, uint32_t &w, uint32_t from) {
    uint4 read;
    memcpy(&read, memory + from, sizeof read);
    x = read.x, y = read.y, z = read.z, w = read.w;
}

inline void ptx_ld_volatile_shared_v2_u32(uint32_t &x, uint32_t &y, uint32_t from) {
    uint2 read;
    memcpy(&read, memory + from, sizeof read);
    x = read.x, y = read.y;
}

// A copy lands as late as it may: when its thread waits for it, or tells a barrier of it. Of what it writes, so many
// bytes are copied, and the others are 0.
struct Copy {
    uint32_t to, written, bytes;
    const unsigned char *from;
};
thread_local std::vector<Copy> copies;
// How many of them the groups have, in their order; the others are in none yet.
thread_local std::vector<size_t> groups;

inline void ptx_cp_async_ca_shared_global(uint32_t to, const void *from, uint32_t bytes = 16) {
    copies.push_back({to, bytes, bytes, (const unsigned char *)from});
}
inline void ptx_cp_async_cg_shared_global(uint32_t to, const void *from) { ptx_cp_async_ca_shared_global(to, from); }

inline void ptx_cp_async_cg_shared__cta_global(uint32_t to, uint64_t from, int, uint32_t bytes) {
    copies.push_back({to, 16, bytes, (const unsigned char *)from});
}
inline void ptx_cp_async_cg_shared__cta_global(uint32_t to, uint64_t from, int bytes) {
    ptx_cp_async_cg_shared__cta_global(to, from, bytes, (uint32_t)bytes);
}
template <typename... Operands> inline void ptx_cp_async_ca_shared__cta_global(Operands... operands) {
    ptx_cp_async_cg_shared__cta_global(operands...);
}

inline void land(size_t count) {
    for (size_t i = 0; i < count; i++) {
        const auto &[to, written, bytes, from] = copies[i];
        memset(memory + to, 0, written);
        memcpy(memory + to, from, bytes);
    }
    copies.erase(copies.begin(), copies.begin() + count);
}

inline void ptx_cp_async_wait_all() {
    land(copies.size());
    groups.clear();
}

inline void ptx_cp_async_commit_group() {
    size_t grouped = 0;
    for (const size_t count : groups)
        grouped += count;
    groups.push_back(copies.size() - grouped);
}

inline void ptx_cp_async_wait_group(size_t pending) {
    while (groups.size() > pending) {
        land(groups.front());
        groups.erase(groups.begin());
    }
}

inline void ptx_cp_async_mbarrier_arrive_shared__cta_b64(uint32_t) { ptx_cp_async_wait_all(); }

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
                memcpy(pair + side, memory + rows[matrix * 8 + of] + 2 * at, 2);
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

// D = A B + D of 16 x 64 and 64 x 8 elements of four bits, where PTX says that the threads of a warp have them.
inline void ptx_mma_sync_aligned_m16n8k64_row_col_s32_s4_s4_s32(int &d0, int &d1, int &d2, int &d3, uint32_t a0,
                                                                uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                                uint32_t b1) {
    const auto element = [](uint32_t word, uint32_t index) { return (int32_t)(word << (28 - 4 * index)) >> 28; };
    int *const d[4] = {&d0, &d1, &d2, &d3};
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

// ---- CUDA's barriers ------------------------------------------------------------------------------------------------

namespace cooperative_groups {
struct thread_block {};
inline thread_block this_thread_block() { return {}; }
} // namespace cooperative_groups

namespace cuda {
enum thread_scope { thread_scope_block };

// The state of a barrier lies elsewhere: one in shared memory has 8 bytes.
struct Counts {
    uint32_t expected, missing, phase;
};
inline std::vector<Counts> counts;
inline std::mutex lock;
inline std::condition_variable changed;

template <thread_scope> struct barrier {
    unsigned long long index;
    struct arrival_token {};
    arrival_token arrive() {
        const std::lock_guard guard(lock);
        Counts &mine = counts[index];
        if (--mine.missing == 0) {
            mine.missing = mine.expected;
            mine.phase++;
            changed.notify_all();
        }
        return {};
    }
    void wait_parity(uint32_t parity) {
        std::unique_lock guard(lock);
        changed.wait(guard, [&] { return counts[index].phase % 2 != parity % 2; });
    }
};
template <thread_scope scope> void init(barrier<scope> *barrier, uint32_t expected) {
    const std::lock_guard guard(lock);
    barrier->index = counts.size();
    counts.push_back({expected, expected, 0});
}
namespace device {
template <thread_scope scope> unsigned long long *barrier_native_handle(barrier<scope> &barrier) { return &barrier.index; }
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
        launch(buffers, numbers);
    };
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
                std::vector<std::jthread> block;
                for (uint32_t thread = 0; thread < THREADS; thread++)
                    block.emplace_back(run, thread);
            }
    std::ofstream out(arguments[2], std::ios::binary);
    for (const auto &buffer : buffers)
        out.write((const char *)buffer.data(), buffer.size());
    return out.good() ? 0 : 2;
}
