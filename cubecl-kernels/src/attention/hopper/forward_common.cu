// The common part of the forward passes: what a producer copies, what two consumers hide and write, and how they take
// turns.
//
// Texts before this one: hopper.cu, attention/hopper/common.cu.

#define KEYS STAGED_ROWS

// Hides from the 64 queries from `query` on what they do not see of the keys from `key` on.
__device__ __forceinline__ void hide(float *scores, const Band &band, int query, int key) {
    if (all_visible(band, {query, query + 63}, {key, key + KEYS - 1}))
        return;
    const u32 thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const Range visible = keys_of(band, query + row + 8 * h);
        const int first = visible.first - key, last = visible.last - key;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = 8 * j + 2 * (thread % 4) + e;
                if (at < first | at > last)
                    scores[4 * j + 2 * h + e] = -INFINITE;
            }
    }
}

// Consumers take turns to issue products: a barrier of the block for each, at which one waits and the other arrives.
__device__ __forceinline__ void await_turn(u32 consumer) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(128 * CONSUMERS) : "memory");
}

__device__ __forceinline__ void give_turn(u32 consumer) {
    asm volatile("bar.arrive %0, %1;" ::"r"(1 + consumer), "n"(128 * CONSUMERS) : "memory");
}

// ---- The producer ---------------------------------------------------------------------------------------------------

// Sets up the barriers of the queries, and of the ring. All threads of the block come here.
__device__ __forceinline__ void barriers_init(u32 query_full, u32 query_empty, u32 full, u32 empty) {
    if (threadIdx.x == 0) {
        barrier_init(query_full, 1);
        barrier_init(query_empty, 4 * CONSUMERS);
    }
    ring_init(full, empty);
}

// One thread starts the copies of the queries of a block's tiles, `copy_queries(batch, head, query)`, and another those of
// stages, `copy_stage(of_values, stage, key, batch, head, barrier)`.
template <typename CopyQueries, typename CopyStage>
__device__ __forceinline__ void produce(const Numbers &numbers, const Band &band, u32 query_empty, u32 full, u32 empty,
                                        CopyQueries copy_queries, CopyStage copy_stage) {
    u32 stage = 0, parity = 0, query_parity = 0;
    if (threadIdx.x == 32)
        for_query_tiles<KEYS>(numbers, band, [&](const QueryWork &of_tile) {
            const auto [work, first_query, first_tile, count] = of_tile;
            if (count == 0)
                return;
            barrier_wait(query_empty, query_parity ^ 1);
            query_parity ^= 1;
            copy_queries(work.batch, work.head, first_query);
        });
    if (threadIdx.x > 0)
        return;
    for_query_tiles<KEYS>(numbers, band, [&](const QueryWork &of_tile) {
        const auto [work, first_query, first_tile, count] = of_tile;
        const u32 key_head = work.head / numbers.group;
        // In the order in which they are used: the values of a tile behind the keys of the next one.
        for (int i = 0; i <= count; i++) {
            for (int of_values = 0; of_values < 2; of_values++) {
                const int tile = count - 1 - i + of_values;
                if (tile < 0 || tile >= count)
                    continue;
                barrier_wait(empty + 8 * stage, parity ^ 1);
                copy_stage(of_values, stage, (first_tile + tile) * KEYS, work.batch, key_head, full + 8 * stage);
                next_stage(stage, parity);
            }
        }
    });
}

// ---- The results ----------------------------------------------------------------------------------------------------

// Of a lane's two rows: the largest score so far, and the lane's part of the sum of exponentials.
struct Statistics {
    float largest[2], sum[2];
};

// A consumer writes O and the log-sum-exp of its 64 queries from `query` on; `unit` is that of the largest scores.
__device__ __forceinline__ void write_results(float *sums, const Statistics &statistics, float unit, Out *out,
                                              float *log_sum_exp, const Work &work, const Numbers &numbers, int query) {
    const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, queries = numbers.queries;
    const u32 head = work.batch * numbers.heads + work.head;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = statistics.sum[h];
        sum += __shfl_xor_sync(EVERYONE, sum, 1);
        sum += __shfl_xor_sync(EVERYONE, sum, 2);
        const bool is_empty = sum == 0.0f;
        const float inverse = 1.0f / sum;
#pragma unroll
        for (int j = 0; j < DIM / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                sums[4 * j + 2 * h + e] = is_empty ? 0.0f : sums[4 * j + 2 * h + e] * inverse;
        const u32 row = query + warp * 16 + lane / 4 + 8 * h;
        if (lane % 4 == 0 && row < queries)
            log_sum_exp[(u64)head * queries + row] =
                is_empty ? -INFINITE : statistics.largest[h] * unit + logf(sum);
    }
    write_head(sums, out, work, numbers.heads, query + warp * 16, queries, numbers.value_width);
}
