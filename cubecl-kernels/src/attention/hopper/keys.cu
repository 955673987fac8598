// The gradients of keys and values, dK = scale dS^T Q and dV = P^T dO with dS = P (dO V^T - Delta), on sm_90a.
//
// Texts before this one: hopper.cu, attention/hopper/common.cu.
//
// Each consumer has 64 keys and walks through the queries that see them, of all heads that read these keys. It computes
// the scores transposed, so that they are in registers as products over queries need them.

#define QUERIES STAGED_ROWS
#define KEY_BYTES (ROWS * DIM * 2)
#define TILE_BYTES (QUERIES * DIM * 2)
// Queries, gradients of the output, and for each query its log-sum-exp and Delta.
#define STAGE_BYTES (2 * TILE_BYTES)
#define ROW_BYTES (QUERIES * 8)

// Starts a copy of neighbours in memory, multiples of 16 bytes.
__device__ __forceinline__ void copy_neighbours(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_keys_hopper(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                          const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap gradient_map,
                          const void *, const void *, const void *, const void *, const float2 *__restrict__ rows,
                          Out *__restrict__ of_keys, Out *__restrict__ of_values, const void *, const void *,
                          const void *, const void *, const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(1024) unsigned char memory_[];
    __shared__ u64 full_barriers[STAGES], empty_barriers[STAGES], key_barrier_[1];

    const u32 memory = shared_address(memory_), values = memory + KEY_BYTES, ring = values + KEY_BYTES;
    const u32 of_rows = ring + STAGES * STAGE_BYTES;
    const u32 full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const u32 key_barrier = shared_address(key_barrier_);
    if (threadIdx.x == 0)
        barrier_init(key_barrier, 1);
    ring_init(full, empty);

    const Band band = band_of(numbers);
    const int queries = numbers.queries, key_count = numbers.keys, group = numbers.group;
    const u32 tiles = (key_count + ROWS - 1) / ROWS, key_heads = numbers.heads / group;
    // The first keys of a causal head are seen most, and come first.
    const Work work = work_of(blockIdx.x, tiles, key_heads, numbers.batches, numbers.section);
    const int first_key = work.tile * ROWS, last_key = min(first_key + ROWS, key_count) - 1;
    // The queries that see one of these keys.
    const int first_query = max(first_key - band.behind - band.offset, 0);
    const int last_query = min(last_key + band.before - band.offset, queries - 1);
    const int first_tile = first_query / QUERIES;
    const int count = last_query < first_query ? 0 : last_query / QUERIES - first_tile + 1;

    u32 stage = 0, parity = 0;

    if (threadIdx.x < 128) {
        // The producer's registers go to the consumers: 24 + 2 * 240 <= 3 * 168.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x > 0 || count == 0)
            return;
        barrier_arrive_expect(key_barrier, 2 * KEY_BYTES);
        copy_rows<ROWS>(memory, &key_map, first_key, work.head, work.batch, key_barrier);
        copy_rows<ROWS>(values, &value_map, first_key, work.head, work.batch, key_barrier);
        for (int index = 0; index < count * group; index++) {
            const u32 head = work.head * group + index / count, row = (first_tile + index % count) * QUERIES;
            barrier_wait(empty + 8 * stage, parity ^ 1);
            const u32 barrier = full + 8 * stage, to = ring + stage * STAGE_BYTES;
            barrier_arrive_expect(barrier, STAGE_BYTES + ROW_BYTES);
            copy_rows<QUERIES>(to, &query_map, row, head, work.batch, barrier);
            copy_rows<QUERIES>(to + TILE_BYTES, &gradient_map, row, head, work.batch, barrier);
            copy_neighbours(of_rows + stage * ROW_BYTES,
                            rows + (work.batch * numbers.heads + head) * numbers.padded + row, ROW_BYTES, barrier);
            next_stage(stage, parity);
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 consumer = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int key = first_key + consumer * 64;
    const u32 own = consumer * 64 * 128;
    const float factor = as_float(numbers.scale) * LOG2_E;
    float sums_of_keys[DIM / 2], sums_of_values[DIM / 2];
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        sums_of_keys[i] = sums_of_values[i] = 0.0f;

    if (count > 0) {
        float scores[QUERIES / 2], products[QUERIES / 2];
        u32 probabilities[QUERIES / 4], of_scores[QUERIES / 4];
        // The queries that see each of a lane's two keys.
        Range visible[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = key + warp * 16 + lane / 4 + 8 * h - band.offset;
            visible[h] = {row - band.behind, row + band.before};
        }
        barrier_wait(key_barrier, 0);
        u32 previous = 0;
        for (int index = 0; index < count * group; index++) {
            const u32 at = ring + stage * STAGE_BYTES;
            barrier_wait(full + 8 * stage, parity);
            pin<QUERIES / 2>(scores);
            pin<QUERIES / 2>(products);
            products_fence();
            start_over_features<ROWS, QUERIES>(scores, memory + own, at);
            start_over_features<ROWS, QUERIES>(products, values + own, at + TILE_BYTES);
            if (index > 0) {
                products_wait<2>();
                release(empty + 8 * previous);
            }
            products_wait<1>();
            pin<QUERIES / 2>(scores);
            pin<QUERIES / 4>(probabilities);
            pin<QUERIES / 4>(of_scores);
            const int query = (first_tile + index % count) * QUERIES;
            const float4 *const pairs =
                (const float4 *)(memory_ + (of_rows - memory) + stage * ROW_BYTES) + lane % 4;
            const bool is_whole = all_visible(band, {query, query + QUERIES - 1}, {key, key + 63});
#pragma unroll
            for (int j = 0; j < QUERIES / 8; j++) {
                // The log-sum-exp and Delta of two queries.
                const float4 pair = pairs[4 * j];
#pragma unroll
                for (int i = 4 * j; i < 4 * j + 4; i++) {
                    const int h = i / 2 % 2, column = query + 8 * j + 2 * (lane % 4) + i % 2;
                    const bool sees = is_whole || (column >= visible[h].first && column <= visible[h].last);
                    scores[i] = exp2_approximately(
                        fmaf(sees ? scores[i] : -INFINITE, factor, -(i % 2 ? pair.z : pair.x)));
                }
            }
            pack_operand<QUERIES>(scores, probabilities);
            products_wait<0>();
            pin<QUERIES / 2>(products);
            pin<QUERIES / 4>(probabilities);
            pin<DIM / 2>(sums_of_values);
            products_fence();
            start_over_rows<QUERIES>(sums_of_values, probabilities, at + TILE_BYTES, true);
#pragma unroll
            for (int j = 0; j < QUERIES / 8; j++) {
                const float4 pair = pairs[4 * j];
#pragma unroll
                for (int i = 4 * j; i < 4 * j + 4; i++)
                    scores[i] *= products[i] - (i % 2 ? pair.w : pair.y);
            }
            pack_operand<QUERIES>(scores, of_scores);
            pin<QUERIES / 4>(of_scores);
            pin<DIM / 2>(sums_of_keys);
            products_fence();
            start_over_rows<QUERIES>(sums_of_keys, of_scores, at, true);
            // There are no registers for both operands beside the next scores.
            products_wait<1>();
            pin<DIM / 2>(sums_of_values);
            previous = stage;
            next_stage(stage, parity);
        }
        products_wait<0>();
        pin<DIM / 2>(sums_of_keys);
        pin<DIM / 2>(sums_of_values);
    }

#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        sums_of_keys[i] *= as_float(numbers.scale);
    write_head(sums_of_keys, of_keys, work, key_heads, key + warp * 16, key_count, numbers.width);
    write_head(sums_of_values, of_values, work, key_heads, key + warp * 16, key_count, numbers.value_width);
}
