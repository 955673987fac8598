// INT8 codes of heads for forward_int8.cu, from tiles of 128 rows. Text before this one: quantize/block/scale.cu.
//
// Knobs, defined in front of this text:
//   OF_BF16      1: of bf16; 0: of f16
//   OF_ROWS      1: a scale for each row; 0: one for each tile
//   TRANSPOSED   1: codes [features, rows], of whole tiles, rows in the order of wgmma's registers; 0: [rows, features]
// and the structure Numbers, which codes.rs describes.

typedef unsigned int u32;
typedef unsigned long long u64;

#define EVERYONE 0xffffffffu
#define UNITS 256
#define TILE 128
// Features that a lane reads at once; a row has so many lanes.
#define VECTOR 8
#define LANES 16
// Groups of four rows whose codes are a word of the other order; so many of them for a lane.
#define GROUPS (TILE / 4)
#define OWN (GROUPS * LANES / UNITS)
// A word more, so that the lanes of a row write to different banks.
#define PITCH (GROUPS + 1)
// 1.5 * 2^23: what is added to it is rounded to an integer, to even, in the lowest bits.
#define ROUND_TO_EVEN 12582912.0f

__device__ __forceinline__ float to_float(u32 bits) {
#if OF_BF16
    return __uint_as_float(bits << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
#endif
}

__device__ __forceinline__ u32 code_of(u32 bits, float inverse) {
    return inverse == 0.0f ? 0 : __float_as_uint(__fadd_rn(__fmul_rn(to_float(bits), inverse), ROUND_TO_EVEN)) & 0xff;
}

// The larger of the two magnitudes in a word.
__device__ __forceinline__ u32 magnitude_of(u32 word) {
    return max(word & 0x7fff, word >> 16 & 0x7fff);
}

__device__ __forceinline__ u32 magnitude_of(const uint4 &words) {
    return max(max(magnitude_of(words.x), magnitude_of(words.y)), max(magnitude_of(words.z), magnitude_of(words.w)));
}

__device__ __forceinline__ u32 word_of(const uint4 &words, int index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// Group and row of group: wgmma's sums have rows 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of 16 in a lane t, whose word of
// the left operand the four are.
__device__ __forceinline__ u32 row_of(u32 group, u32 j) {
    return group / 4 * 16 + 8 * (j / 2) + 2 * (group % 4) + j % 2;
}

// x: [batch, heads, rows, width], of these strides; codes: [batch, heads, rows, pitch] or [batch, heads, width, pitch];
// scales: [batch, heads, rows] or [batch, heads, tiles].
extern "C" __global__ void __launch_bounds__(UNITS)
attention_codes_hopper(const unsigned short *__restrict__ x, unsigned char *__restrict__ codes,
                       float *__restrict__ scales, const __grid_constant__ Numbers numbers) {
    const u32 lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
    const u32 rows = numbers.rows, width = numbers.width, start = blockIdx.x * TILE, col = lane * VECTOR;
    const u64 head = (u64)blockIdx.z * gridDim.y + blockIdx.y;
    x += blockIdx.z * numbers.of_batch + blockIdx.y * numbers.of_head;
    uint4 words[OWN][4];
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 row = start + row_of(first + UNITS / LANES * i, j);
            words[i][j] = make_uint4(0, 0, 0, 0);
            if (row < rows && col < width)
                words[i][j] = *(const uint4 *)(x + row * numbers.of_row + col);
            largest = max(largest, magnitude_of(words[i][j]));
        }

#if !OF_ROWS
    __shared__ u32 of_warps[UNITS / 32];
    largest = __reduce_max_sync(EVERYONE, largest);
    if (threadIdx.x % 32 == 0)
        of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < UNITS / 32; warp++)
        largest = max(largest, of_warps[warp]);
    const u32 absmax = __float_as_uint(to_float(largest));
    const float inverse = inverse_of(absmax);
    if (threadIdx.x == 0)
        scales[head * gridDim.x + blockIdx.x] = scale_of(absmax);
#endif

#if TRANSPOSED
    __shared__ u32 staged[LANES * VECTOR * PITCH];
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            u32 word = 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
                word |= code_of(word_of(words[i][j], k / 2) >> k % 2 * 16 & 0xffff, inverse) << 8 * j;
            staged[(col + k) * PITCH + first + UNITS / LANES * i] = word;
        }
    __syncthreads();
    // A row of the other order has 128 bytes, 16 for each of eight units.
    for (u32 feature = threadIdx.x / 8; feature < width; feature += UNITS / 8) {
        const u32 *const from = staged + feature * PITCH + threadIdx.x % 8 * 4;
        *(uint4 *)(codes + (head * width + feature) * numbers.pitch + start + threadIdx.x % 8 * 16) =
            make_uint4(from[0], from[1], from[2], from[3]);
    }
#else
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 row = start + row_of(first + UNITS / LANES * i, j);
            const uint4 &of_row = words[i][j];
#if OF_ROWS
            u32 magnitude = magnitude_of(of_row);
#pragma unroll
            for (int distance = LANES / 2; distance > 0; distance /= 2)
                magnitude = max(magnitude, __shfl_xor_sync(EVERYONE, magnitude, distance));
            const u32 absmax = __float_as_uint(to_float(magnitude));
            const float inverse = inverse_of(absmax);
            if (lane == 0 && row < rows)
                scales[head * rows + row] = scale_of(absmax);
#endif
            u32 pair[2] = {0, 0};
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                pair[k / 4] |= code_of(word_of(of_row, k / 2) >> k % 2 * 16 & 0xffff, inverse) << k % 4 * 8;
            if (row < rows && col < width)
                *(uint2 *)(codes + (head * rows + row) * numbers.pitch + col) = make_uint2(pair[0], pair[1]);
        }
#endif
}
