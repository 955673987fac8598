// O = softmax(scale Q K^T) V and its log-sum-exp, scores only in registers, on sm_90a.
//
// Texts before this one: hopper.cu, attention/hopper/common.cu, attention/hopper/forward_common.cu.
//
// Each consumer has 64 queries and walks through the keys from the last that they see to the first, so that what is
// hidden by its place comes at once, and other tiles have nothing to hide but by a mask. The scores of a tile are
// multiplied while the probabilities of the last one are multiplied with its values, and the exponentials of one
// consumer run under the products of the other (FlashAttention-3: Shah et al., 2024, sections 3.1 and 3.2). Blocks stay
// until there are no tiles of queries, so that the first copies of the next one run under the last products of this.

#define QUERY_BYTES (ROWS * DIM * 2)
#define STAGE_BYTES (KEYS * DIM * 2)

// Makes exponentials of scores, and takes them into the statistics; `decay`: the factors of what was summed before.
__device__ __forceinline__ void exponentiate(float *scores, Statistics &statistics, float *decay, float factor) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float largest = statistics.largest[h];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
            largest = fmaxf(largest, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(EVERYONE, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(EVERYONE, largest, 2));
        // Where nothing is visible, there is no maximum to subtract.
        const float shift = largest == -INFINITE ? 0.0f : largest * factor;
        decay[h] = exp2_approximately(fmaf(statistics.largest[h], factor, -shift));
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &score = scores[4 * j + 2 * h + e];
                score = exp2_approximately(fmaf(score, factor, -shift));
                sum += score;
            }
        statistics.sum[h] = fmaf(statistics.sum[h], decay[h], sum);
        statistics.largest[h] = largest;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_forward_hopper(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                             const __grid_constant__ TensorMap value_map, const void *, const void *, const void *,
                             Out *__restrict__ out, float *__restrict__ log_sum_exp, const void *, const void *,
                             const void *, const u32 *__restrict__ mask, const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(1024) unsigned char memory_[];
    __shared__ u64 full_barriers[STAGES], empty_barriers[STAGES], query_barriers[2];

    const u32 memory = shared_address(memory_), ring = memory + QUERY_BYTES;
    const u32 full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const u32 query_full = shared_address(query_barriers), query_empty = query_full + 8;
    barriers_init(query_full, query_empty, full, empty);

    const Band band = band_of(numbers);
    const u32 queries = numbers.queries;
    u32 stage = 0, parity = 0, query_parity = 0;

    if (threadIdx.x < 128) {
        // The producer's registers go to the consumers: 40 + 2 * 232 <= 3 * 168.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        produce(
            numbers, band, query_empty, full, empty,
            [&](u32 batch, u32 head, u32 query) {
                barrier_arrive_expect(query_full, QUERY_BYTES);
                copy_rows<ROWS>(memory, &query_map, query, head, batch, query_full);
            },
            [&](int of_values, u32 stage, u32 key, u32 batch, u32 head, u32 barrier) {
                barrier_arrive_expect(barrier, STAGE_BYTES);
                copy_rows<KEYS>(ring + stage * STAGE_BYTES, of_values ? &value_map : &key_map, key, head, batch, barrier);
            });
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const u32 consumer = own_consumer(), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const u32 own = memory + consumer * 64 * 128;
    const float factor = as_float(numbers.scale) * LOG2_E;
    float sums[DIM / 2], scores[KEYS / 2];
    u32 probabilities[KEYS / 4];
    float decay[2];
    for_query_tiles<KEYS>(numbers, band, [&](const QueryWork &of_tile) {
        const auto [work, first_query, first_tile, count] = of_tile;
        const int query = first_query + consumer * 64;
        Statistics statistics = {{-INFINITE, -INFINITE}, {0.0f, 0.0f}};
#pragma unroll
        for (int i = 0; i < DIM / 2; i++)
            sums[i] = 0.0f;

        if (count > 0) {
#if MASKED
            const int key = (first_tile + count - 1) * KEYS;
            Hidden<KEYS> hidden = load_hidden<KEYS>(mask, numbers, work.batch, work.head, query, key);
#endif
            barrier_wait(query_full, query_parity);
            query_parity ^= 1;
            barrier_wait(full + 8 * stage, parity);
            products_fence();
            start_over_features<ROWS, KEYS>(scores, own, ring + stage * STAGE_BYTES);
            products_wait<0>();
            pin<KEYS / 2>(scores);
            release(empty + 8 * stage);
            next_stage(stage, parity);
            hide(scores, band, query, (first_tile + count - 1) * KEYS);
#if MASKED
            hide<KEYS>(scores, hidden);
#endif
            exponentiate(scores, statistics, decay, factor);
            pack_operand<KEYS>(scores, probabilities);
            // While one consumer's products run, the other has its exponentials.
            if (consumer == 1)
                give_turn(0);
            for (int tile = count - 2; tile >= 0; tile--) {
                const u32 of_keys = stage;
#if MASKED
                // Under the products, which take longer.
                hidden = load_hidden<KEYS>(mask, numbers, work.batch, work.head, query, (first_tile + tile) * KEYS);
#endif
                await_turn(consumer);
                barrier_wait(full + 8 * stage, parity);
                pin<KEYS / 2>(scores);
                pin<KEYS / 4>(probabilities);
                pin<DIM / 2>(sums);
                products_fence();
                start_over_features<ROWS, KEYS>(scores, own, ring + stage * STAGE_BYTES);
                next_stage(stage, parity);
                barrier_wait(full + 8 * stage, parity);
                start_over_rows<KEYS>(sums, probabilities, ring + stage * STAGE_BYTES, true);
                give_turn(1 - consumer);
                products_wait<1>();
                pin<KEYS / 2>(scores);
                release(empty + 8 * of_keys);
                hide(scores, band, query, (first_tile + tile) * KEYS);
#if MASKED
                hide<KEYS>(scores, hidden);
#endif
                exponentiate(scores, statistics, decay, factor);
                products_wait<0>();
                pin<DIM / 2>(sums);
                pin<KEYS / 4>(probabilities);
                release(empty + 8 * stage);
                next_stage(stage, parity);
#pragma unroll
                for (int i = 0; i < DIM / 2; i++)
                    sums[i] *= decay[i / 2 % 2];
                pack_operand<KEYS>(scores, probabilities);
            }
            if (consumer == 0)
                await_turn(0);
            // The next queries may be copied over these. Not before the first consumer's last turn: they are what the
            // other one waits for before it gives that a turn again.
            release(query_empty);
            barrier_wait(full + 8 * stage, parity);
            pin<KEYS / 4>(probabilities);
            pin<DIM / 2>(sums);
            products_fence();
            start_over_rows<KEYS>(sums, probabilities, ring + stage * STAGE_BYTES, true);
            products_wait<0>();
            pin<DIM / 2>(sums);
            release(empty + 8 * stage);
            next_stage(stage, parity);
        }

        write_results(sums, statistics, as_float(numbers.scale), out, log_sum_exp, work, numbers, query);
    });
}
