// Runs the kernel of whole_tiles.cu on a CPU: the threads of a block are threads, blocks run one after the other.
//
//   emulator IN OUT
//
// IN holds the sizes of the grid as three u64; for each pointer that the kernel takes the length of its buffer in bytes
// as a u64; the launcher's numbers; the buffers. OUT gets the buffers.
//
// `kernel.cu` is the kernel's text with its knobs. Each of its `asm` statements has become a call of the function named
// after the instruction, with the operands in their order. SHARED_BYTES is what a launch asks for.
#include <algorithm>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
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

constexpr uint32_t THREADS = 256, WARP = 32;
thread_local Dim threadIdx;
Dim blockIdx, gridDim;
alignas(16) unsigned char memory[SHARED_BYTES];
std::barrier threads(THREADS);

inline void __syncthreads() { threads.arrive_and_wait(); }

// All threads of a block must take part, not those of a warp only.
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
    static uint32_t values[THREADS];
    values[threadIdx.x] = value;
    __syncthreads();
    const uint32_t *const warp = values + threadIdx.x / WARP * WARP;
    const uint32_t largest = *std::max_element(warp, warp + WARP);
    // No thread may write its next value before.
    __syncthreads();
    return largest;
}

inline int atomicAdd(int *sum, int value) { return __atomic_fetch_add(sum, value, __ATOMIC_RELAXED); }

// ---- Numbers --------------------------------------------------------------------------------------------------------

inline uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }

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

// ---- Instructions of PTX --------------------------------------------------------------------------------------------

inline void ptx_cvt_f32_f16(float &value, uint16_t bits) { value = canonical((float)std::bit_cast<_Float16>(bits)); }

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

// A copy lands as late as it may: when its thread waits for it.
thread_local std::vector<std::pair<uint32_t, const unsigned char *>> copies;

inline void ptx_cp_async_ca_shared_global(uint32_t to, const unsigned char *from) { copies.push_back({to, from}); }
inline void ptx_cp_async_cg_shared_global(uint32_t to, const unsigned char *from) { copies.push_back({to, from}); }

inline void ptx_cp_async_wait_all() {
    for (const auto &[to, from] : copies)
        memcpy(memory + to, from, 16);
    copies.clear();
}

// ---- The launch -----------------------------------------------------------------------------------------------------

#include "kernel.cu"

template <typename T> T *buffer(std::vector<std::vector<unsigned char>> &buffers, size_t index) {
    return (T *)buffers[index].data();
}

int main(int, char **arguments) {
    std::ifstream in(arguments[1], std::ios::binary);
    uint64_t grid[3], lengths[9];
    Numbers numbers;
    in.read((char *)grid, sizeof grid);
    in.read((char *)lengths, sizeof lengths);
    in.read((char *)&numbers, sizeof numbers);
    std::vector<std::vector<unsigned char>> buffers;
    for (const uint64_t length : lengths)
        in.read((char *)buffers.emplace_back(length).data(), length);
    if (!in)
        return 2;
    gridDim = {(uint32_t)grid[0], (uint32_t)grid[1], (uint32_t)grid[2]};
    const auto run = [&](uint32_t thread) {
        threadIdx = {thread, 0, 0};
        quantize_whole_tiles(buffer<u8>(buffers, 0), buffer<u8>(buffers, 1), buffer<u8>(buffers, 2),
                             buffer<float>(buffers, 3), buffer<u8>(buffers, 4), buffer<float>(buffers, 5),
                             buffer<u32>(buffers, 6), buffer<float>(buffers, 7), buffer<int>(buffers, 8), numbers);
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
