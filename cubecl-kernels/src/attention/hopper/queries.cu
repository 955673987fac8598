// The gradient of the queries from its sums in FP32, which gradients.cu leaves in the order of its registers: times the
// scale, rounded. Queries of a tile that sees nothing have no sums, and get zeros.
//
// Texts before this one: hopper.cu, attention/hopper/common.cu.

#define QUERIES STAGED_ROWS
// Queries of a block, as many as a consumer has.
#define BLOCK_ROWS 64

extern "C" __global__ void __launch_bounds__(128)
    attention_queries_hopper(const float4 *__restrict__ sums, Out *__restrict__ of_queries,
                             const __grid_constant__ Numbers numbers) {
    const u32 blocks = numbers.padded / BLOCK_ROWS, head = blockIdx.x / blocks, heads = numbers.heads;
    const int queries = numbers.queries, first = blockIdx.x % blocks * BLOCK_ROWS;
    if (first >= queries)
        return;
    const int tile = first / QUERIES * QUERIES;
    const Range keys = keys_of(band_of(numbers), tile, min(tile + QUERIES, queries) - 1);
    const float scale = as_float(numbers.scale);
    float own[DIM / 2];
#pragma unroll
    for (int i = 0; i < DIM / 8; i++) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (keys.first <= keys.last)
            x = sums[((u64)blockIdx.x * (DIM / 8) + i) * 128 + threadIdx.x];
        own[4 * i] = x.x * scale;
        own[4 * i + 1] = x.y * scale;
        own[4 * i + 2] = x.z * scale;
        own[4 * i + 3] = x.w * scale;
    }
    const Work work = {head / heads, head % heads, 0};
    write_head(own, of_queries, work, heads, first + threadIdx.x / 32 * 16, queries, numbers.width);
}
