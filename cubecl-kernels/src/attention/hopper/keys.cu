// The gradients of keys and of values where blocks of gradients.cu shared the heads of a group: the sums in FP32 that
// they left, in the order of their registers, added share by share; those of keys times the scale; rounded.
//
// Texts before this one: hopper.cu, attention/hopper/common.cu.

// Keys of a block, as many as a consumer has.
#define BLOCK_ROWS 64
// 16 bytes of each thread.
#define BLOCK_SUMS (DIM / 8 * 128)

// Even blocks have keys, odd ones values.
extern "C" __global__ void __launch_bounds__(128)
    attention_keys_hopper(const float4 *__restrict__ sums_of_keys, const float4 *__restrict__ sums_of_values,
                          Out *__restrict__ of_keys, Out *__restrict__ of_values,
                          const __grid_constant__ Numbers numbers) {
    const bool has_keys = blockIdx.x % 2 == 0;
    const u32 keys = numbers.keys, blocks = (keys + ROWS - 1) / ROWS * CONSUMERS;
    const u32 head = blockIdx.x / 2 / blocks, block = blockIdx.x / 2 % blocks;
    if (block * BLOCK_ROWS >= keys)
        return;
    const u32 key_heads = numbers.heads / numbers.group, shares = numbers.group / numbers.share;
    const float4 *sums = has_keys ? sums_of_keys : sums_of_values;
    sums += ((u64)head * shares * blocks + block) * BLOCK_SUMS + threadIdx.x;
    float own[DIM / 2];
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        own[i] = 0.0f;
#pragma unroll 1
    for (u32 share = 0; share < shares; share++, sums += (u64)blocks * BLOCK_SUMS)
#pragma unroll
        for (int i = 0; i < DIM / 8; i++) {
            const float4 x = sums[i * 128];
            own[4 * i] += x.x;
            own[4 * i + 1] += x.y;
            own[4 * i + 2] += x.z;
            own[4 * i + 3] += x.w;
        }
    const float scale = has_keys ? as_float(numbers.scale) : 1.0f;
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        own[i] *= scale;
    const Work work = {head / key_heads, head % key_heads, 0};
    write_head(own, has_keys ? of_keys : of_values, work, key_heads, block * BLOCK_ROWS + threadIdx.x / 32 * 16, keys,
               has_keys ? numbers.width : numbers.value_width);
}
