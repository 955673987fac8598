// The gradient of the queries, dQ = scale dS K with dS = P (dO V^T - Delta), P = exp(scale Q K^T - L), on sm_90a.
//
// Texts before this one: hopper.cu, attention/hopper/common.cu.
//
// Each consumer has 64 queries and walks through the keys that they see. Scores are computed again here and in keys.cu,
// which sums over queries: with a pass for each, every sum stays in registers and has one order.

#define KEYS STAGED_ROWS
#define QUERY_BYTES (ROWS * DIM * 2)
#define TILE_BYTES (KEYS * DIM * 2)
#define STAGE_BYTES (2 * TILE_BYTES)

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_queries_hopper(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                             const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap gradient_map,
                             const void *, const void *, const void *, const void *, const float2 *__restrict__ rows,
                             Out *__restrict__ of_queries, const void *, const void *, const void *, const void *,
                             const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(1024) unsigned char memory_[];
    __shared__ u64 full_barriers[STAGES], empty_barriers[STAGES], query_barrier_[1];

    const u32 memory = shared_address(memory_), gradient = memory + QUERY_BYTES, ring = gradient + QUERY_BYTES;
    const u32 full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const u32 query_barrier = shared_address(query_barrier_);
    if (threadIdx.x == 0)
        barrier_init(query_barrier, 1);
    ring_init(full, empty);

    const Band band = band_of(numbers);
    const u32 queries = numbers.queries;
    const auto [work, first_query, first_tile, count] = query_work_of<KEYS>(numbers, band);

    u32 stage = 0, parity = 0;

    if (threadIdx.x < 128) {
        // The producer's registers go to the consumers: 24 + 2 * 240 <= 3 * 168.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x > 0 || count == 0)
            return;
        const u32 key_head = work.head / numbers.group;
        barrier_arrive_expect(query_barrier, 2 * QUERY_BYTES);
        copy_rows<ROWS>(memory, &query_map, first_query, work.head, work.batch, query_barrier);
        copy_rows<ROWS>(gradient, &gradient_map, first_query, work.head, work.batch, query_barrier);
        for (int tile = 0; tile < count; tile++) {
            barrier_wait(empty + 8 * stage, parity ^ 1);
            const u32 barrier = full + 8 * stage, to = ring + stage * STAGE_BYTES, row = (first_tile + tile) * KEYS;
            barrier_arrive_expect(barrier, STAGE_BYTES);
            copy_rows<KEYS>(to, &key_map, row, key_head, work.batch, barrier);
            copy_rows<KEYS>(to + TILE_BYTES, &value_map, row, key_head, work.batch, barrier);
            next_stage(stage, parity);
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 consumer = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int query = first_query + consumer * 64;
    const u32 own = consumer * 64 * 128;
    const float factor = as_float(numbers.scale) * LOG2_E;
    float sums[DIM / 2], scores[KEYS / 2], products[KEYS / 2];
    u32 of_scores[KEYS / 4];
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        sums[i] = 0.0f;

    if (count > 0) {
        const u32 head = work.batch * numbers.heads + work.head, own_row = query + warp * 16 + lane / 4;
        float log_sum_exp[2], delta[2];
        Range visible[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 row = rows[head * numbers.padded + own_row + 8 * h];
            log_sum_exp[h] = row.x;
            delta[h] = row.y;
            visible[h] = keys_of(band, own_row + 8 * h);
        }
        barrier_wait(query_barrier, 0);
        u32 previous = 0;
        for (int tile = 0; tile < count; tile++) {
            const u32 at = ring + stage * STAGE_BYTES;
            barrier_wait(full + 8 * stage, parity);
            pin<KEYS / 2>(scores);
            pin<KEYS / 2>(products);
            products_fence();
            start_over_features<ROWS, KEYS>(scores, memory + own, at);
            start_over_features<ROWS, KEYS>(products, gradient + own, at + TILE_BYTES);
            if (tile > 0) {
                products_wait<2>();
                release(empty + 8 * previous);
            }
            products_wait<1>();
            pin<KEYS / 2>(scores);
            pin<KEYS / 4>(of_scores);
            const int key = (first_tile + tile) * KEYS;
            const bool is_whole = all_visible(band, {query, query + 63}, {key, key + KEYS - 1});
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                const int h = i / 2 % 2, column = key + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                const bool sees = is_whole || (column >= visible[h].first && column <= visible[h].last);
                scores[i] = exp2_approximately(fmaf(sees ? scores[i] : -INFINITE, factor, -log_sum_exp[h]));
            }
            products_wait<0>();
            pin<KEYS / 2>(products);
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                scores[i] *= products[i] - delta[i / 2 % 2];
            pack_operand<KEYS>(scores, of_scores);
            pin<KEYS / 4>(of_scores);
            pin<DIM / 2>(sums);
            products_fence();
            start_over_rows<KEYS>(sums, of_scores, at, true);
            previous = stage;
            next_stage(stage, parity);
        }
        products_wait<0>();
        pin<DIM / 2>(sums);
    }

#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        sums[i] *= as_float(numbers.scale);
    write_head(sums, of_queries, work, numbers.heads, query + warp * 16, queries, numbers.width);
}
