// The numbers of each query for the backward pass: its log-sum-exp, base 2, and Delta = dO·O. Rows of padding, of
// which each head has as many as make it whole tiles, get what makes all their probabilities 0. And the zeros that
// gradients.cu counts from: its blocks, and for each tile of queries the blocks that had their turn.
//
// Texts before this one: hopper.cu, attention/hopper/common.cu.

#define THREADS 256
// Lanes of a row, with 8 elements each, and rows of a block.
#define LANES (DIM / 8)
#define BLOCK_ROWS (THREADS / LANES)

#if defined(OUT_F16)
#define WIDEN(half, bits) asm("cvt.f32.f16 %0, %1;" : "=f"(half) : "h"((unsigned short)(bits)))
#else
#define WIDEN(half, bits) half = __uint_as_float((bits) << 16)
#endif

__device__ __forceinline__ float dot(u32 a, u32 b, float sum) {
    float x, y;
    WIDEN(x, a & 0xffff);
    WIDEN(y, b & 0xffff);
    sum = fmaf(x, y, sum);
    WIDEN(x, a >> 16);
    WIDEN(y, b >> 16);
    return fmaf(x, y, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_rows_hopper(const Out *__restrict__ out, const Out *__restrict__ gradient,
                          const float *__restrict__ log_sum_exp, float2 *__restrict__ rows, u32 *__restrict__ turns,
                          const __grid_constant__ Numbers numbers) {
    const u32 padded = numbers.padded, queries = numbers.queries;
    const u32 index = blockIdx.x * BLOCK_ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    // A block's rows are all of one head.
    const u32 head = index / padded, row = index % padded;
    const u32 batch = head / numbers.heads, within = head % numbers.heads;
    float sum = 0.0f;
    if (row < queries && 8 * lane < numbers.value_width) {
        const u64 of_out = batch * numbers.out_batch + within * numbers.out_head + row * numbers.out_row;
        const u64 of_gradient = batch * numbers.gradient_batch + within * numbers.gradient_head + row * numbers.gradient_row;
        const uint4 a = *(const uint4 *)(out + of_out + 8 * lane);
        const uint4 b = *(const uint4 *)(gradient + of_gradient + 8 * lane);
        sum = dot(a.x, b.x, dot(a.y, b.y, dot(a.z, b.z, dot(a.w, b.w, 0.0f))));
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(EVERYONE, sum, distance);
    if (lane == 0) {
        const float log = row < queries ? log_sum_exp[(u64)head * queries + row] : INFINITE;
        // A row that sees nothing has no probabilities either way.
        rows[index] = make_float2(log == -INFINITE ? 0.0f : log * LOG2_E, sum);
        if (index == 0)
            turns[0] = 0;
        if (index % STAGED_ROWS == 0)
            turns[1 + index / STAGED_ROWS] = 0;
    }
}
