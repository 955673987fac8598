// The gradients of queries, keys and values on sm_90a: dV = P^T dO, dK = scale dS^T Q and dQ = scale dS K, with
// P = exp(scale Q K^T - L) and dS = P (dO V^T - Delta).
//
// Texts before this one: hopper.cu, attention/hopper/common.cu.
//
// Knobs beside those of common.cu:
//   SPLIT      1 where several blocks share the heads that read a tile of keys: their sums are then left to keys.cu
//   BOUNDED    1 where L is of other scores, and so P = exp(min(scale Q K^T - L, 0))
//
// Each consumer has 64 keys and walks through the queries that see them, of all heads of its block's share. It computes
// the scores transposed, so that they are in registers as products over queries need them. A tile of dQ is a sum over
// blocks: a block's part goes through shared memory and is added in global memory by a bulk copy, by each block in its
// turn, so that results repeat to the bit.

#define QUERIES STAGED_ROWS
#define KEY_BYTES (ROWS * DIM * 2)
#define TILE_BYTES (QUERIES * DIM * 2)
// Queries, gradients of the output, and for each query its log-sum-exp and Delta.
#define STAGE_BYTES (2 * TILE_BYTES)
#define ROW_BYTES (QUERIES * 8)
// dS^T of a block, in panels of 64 queries. There are two, since one consumer may still read the last while the other
// writes the next.
#define SCORE_BYTES (ROWS * QUERIES * 2)
// A block's part of a tile of dQ: a consumer has 64 queries and 64 features of it.
#define PART_BYTES (QUERIES * DIM * 4)

// Starts a copy of neighbours in memory, multiples of 16 bytes.
__device__ __forceinline__ void copy_neighbours(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Orders own writes to shared memory before what products and bulk copies read there.
__device__ __forceinline__ void shared_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// sums[64, 64] (+)= a[16, 64]^T b[16, 64], both in shared memory.
__device__ __forceinline__ void multiply_transposed(float *sums, u64 a, u64 b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." IN "." IN " {"
                 SUMS_32 "}, %32, %33, add, 1, 1, 1, 1;\n"
                 "}"
                 : FLOATS_16(sums, 0), FLOATS_16(sums, 16)
                 : "l"(a), "l"(b), "r"((int)add));
}

// A warp writes 16 x 64 halves, as `pack_operand` leaves them, into rows of 128 swizzled bytes.
__device__ __forceinline__ void store_swizzled(const u32 *words, u32 to) {
    const u32 lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (u32 pair = 0; pair < 4; pair++) {
        const u32 chunk = 2 * pair + lane / 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         to + row * 128 + ((chunk ^ row % 8) << 4)),
                     "r"(words[4 * pair]), "r"(words[4 * pair + 1]), "r"(words[4 * pair + 2]), "r"(words[4 * pair + 3])
                     : "memory");
    }
}

// A consumer's part of dQ on its way to the writer, in the order of its registers: 16 bytes of each thread, eight times.
__device__ __forceinline__ void hand_over(const float *sums, float4 *to, u32 full) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        to[i * 128] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    shared_fence();
    __syncwarp();
    release(full);
}

// Calls visit(index, tile) for each tile of dQ that the block has a part of, in the order of the parts: its index among
// all tiles and within its head.
template <typename Visit>
__device__ __forceinline__ void for_parts(const Numbers &numbers, const Work &work, Range tiles, Visit visit) {
    const u32 of_head = numbers.padded / QUERIES, share = numbers.share;
    u32 head = (work.batch * (u32)numbers.heads + work.head * share) * of_head;
#pragma unroll 1
    for (u32 i = 0; i < share; i++, head += of_head)
#pragma unroll 1
        for (int tile = tiles.first; tile <= tiles.last; tile++)
            visit(head + tile, tile);
}

// The blocks that add to a tile of dQ before this one: those of all later keys that its queries see. They have taken
// lower numbers, and so wait for none that has not started.
__device__ __forceinline__ u32 turn_of(const Numbers &numbers, const Band &band, const Work &work, int tile) {
    const int last = min(tile * QUERIES + QUERIES, (int)numbers.queries) - 1;
    return keys_of(band, last).last / ROWS - work.tile;
}

// One thread waits until it is the block's turn, for each part, and arrives as the consumers do that hand it over.
__device__ __forceinline__ void await_turns(const Numbers &numbers, const Band &band, const Work &work, Range tiles,
                                            const u32 *turns, u32 full) {
    u32 parity = 1;
    for_parts(numbers, work, tiles, [&](u32 index, int tile) {
        const u32 turn = turn_of(numbers, band, work, tile);
        u32 now;
        do
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turns + index) : "memory");
        while (now != turn);
        // Orders what the block before wrote before this block's copy, which is of another proxy.
        asm volatile("fence.proxy.async.global;" ::: "memory");
        barrier_wait(full, parity);
        parity ^= 1;
        barrier_arrive(full);
    });
}

// The next block's turn. Only when the sums of this one are in memory, which the caller has waited for.
__device__ __forceinline__ void end_turn(u32 *turn_of_tile, u32 turn) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turn_of_tile), "r"(turn + 1) : "memory");
}

// Another thread adds the parts to their tiles; the first of a tile is its first sum.
__device__ __forceinline__ void add_parts(const Numbers &numbers, const Band &band, const Work &work, Range tiles,
                                          float *sums, u32 *turns, u32 part, u32 full, u32 empty) {
    u32 parity = 0, last_turn = 0;
    u32 *last = nullptr;
    for_parts(numbers, work, tiles, [&](u32 index, int tile) {
        const u32 turn = turn_of(numbers, band, work, tile);
        float *const to = sums + (u64)index * (QUERIES * DIM);
        barrier_wait(full, parity);
        parity ^= 1;
        if (turn == 0)
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(part),
                         "n"(PART_BYTES)
                         : "memory");
        else
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                         "r"(part), "n"(PART_BYTES)
                         : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        barrier_arrive(empty);
        // By now the copy before this one has ended; to wait for this one would take longer than products do.
        asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
        if (last)
            end_turn(last, last_turn);
        last = turns + index;
        last_turn = turn;
    });
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    end_turn(last, last_turn);
}

#if SPLIT
typedef float4 OfKeys;

// A consumer's sums for keys.cu, in the order of its registers: 16 bytes of each thread, one tile after the other of a
// share, and one share after the other.
__device__ __forceinline__ void write_sums(const float *sums, float4 *out, const Work &work, u32 shares, u32 key_tiles,
                                           u32 consumer) {
    const u64 tile = ((u64)work.batch * shares + work.head) * key_tiles + work.tile;
    out += (tile * CONSUMERS + consumer) * (DIM / 8 * 128) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < DIM / 8; i++)
        out[i * 128] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
}
#else
typedef Out OfKeys;
#endif

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_gradients_hopper(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                               const __grid_constant__ TensorMap value_map,
                               const __grid_constant__ TensorMap gradient_map, const void *, const void *, const void *,
                               const void *, const float2 *__restrict__ rows, u32 *turns, float *sums_of_queries,
                               OfKeys *__restrict__ of_keys, OfKeys *__restrict__ of_values, const void *,
                               const void *, const void *, const void *, const u32 *__restrict__ mask,
                               const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(1024) unsigned char memory_[];
    __shared__ u64 full_barriers[STAGES], empty_barriers[STAGES], key_barrier_[1], part_barriers[2];
    __shared__ u32 number;

    const u32 memory = shared_address(memory_), values = memory + KEY_BYTES, ring = values + KEY_BYTES;
    const u32 transposed = ring + STAGES * STAGE_BYTES, parts = transposed + 2 * SCORE_BYTES, of_rows = parts + PART_BYTES;
    const u32 full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const u32 key_barrier = shared_address(key_barrier_);
    const u32 part_full = shared_address(part_barriers), part_empty = part_full + 8;
    if (threadIdx.x == 0) {
        barrier_init(key_barrier, 1);
        barrier_init(part_full, 4 * CONSUMERS + 1);
        barrier_init(part_empty, 1);
        // Blocks wait for those before them, whatever order they start in.
        number = atomicAdd(turns, 1);
    }
    ring_init(full, empty);

    const Band band = band_of(numbers);
    const int queries = numbers.queries, key_count = numbers.keys, share = numbers.share;
    // Its head is a share: a whole group, and so a head of keys, where groups are not split.
    const u32 key_tiles = (key_count + ROWS - 1) / ROWS, shares = numbers.heads / share;
    Work work = work_of(number, key_tiles, shares, numbers.batches, numbers.section);
    work.tile = key_tiles - 1 - work.tile;
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
        if (count == 0)
            return;
        const Range tiles = {first_tile, first_tile + count - 1};
        if (threadIdx.x == 32)
            add_parts(numbers, band, work, tiles, sums_of_queries, turns + 1, parts, part_full, part_empty);
        if (threadIdx.x == 64)
            await_turns(numbers, band, work, tiles, turns + 1, part_full);
        if (threadIdx.x > 0)
            return;
        const u32 first_head = work.head * share, key_head = first_head / (u32)numbers.group;
        barrier_arrive_expect(key_barrier, 2 * KEY_BYTES);
        copy_rows<ROWS>(memory, &key_map, first_key, key_head, work.batch, key_barrier);
        copy_rows<ROWS>(values, &value_map, first_key, key_head, work.batch, key_barrier);
#pragma unroll 1
        for (u32 head = first_head; head < first_head + share; head++)
#pragma unroll 1
            for (int tile = first_tile; tile < first_tile + count; tile++) {
                barrier_wait(empty + 8 * stage, parity ^ 1);
                const u32 barrier = full + 8 * stage, to = ring + stage * STAGE_BYTES, row = tile * QUERIES;
                barrier_arrive_expect(barrier, STAGE_BYTES + ROW_BYTES);
                copy_rows<QUERIES>(to, &query_map, row, head, work.batch, barrier);
                copy_rows<QUERIES>(to + TILE_BYTES, &gradient_map, row, head, work.batch, barrier);
                copy_neighbours(of_rows + stage * ROW_BYTES,
                                rows + (work.batch * (u32)numbers.heads + head) * (u32)numbers.padded + row, ROW_BYTES,
                                barrier);
                next_stage(stage, parity);
            }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 consumer = own_consumer(), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int key = first_key + consumer * 64;
    const u32 own = consumer * 64 * 128;
    const float factor = as_float(numbers.scale) * LOG2_E;
    float sums_of_keys[DIM / 2], sums_of_values[DIM / 2];
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        sums_of_keys[i] = sums_of_values[i] = 0.0f;

    if (count > 0) {
        float scores[QUERIES / 2], products[QUERIES / 2], part[32];
        u32 probabilities[QUERIES / 4], of_scores[QUERIES / 4];
        // A consumer's part of dQ: half of the queries, or of the features.
        const u32 queries_of_part = QUERIES == 128 ? consumer * ROWS * 128 : 0;
        const u32 features_of_part = DIM == 128 ? consumer * ROWS * 128 : 0;
        float4 *const own_part = (float4 *)(memory_ + (parts - memory)) + consumer * 1024 + threadIdx.x % 128;
        // The queries that see each of a lane's two keys; none where there is no key.
        Range visible[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = key + warp * 16 + lane / 4 + 8 * h, own_query = row - band.offset;
            visible[h] = {own_query - band.behind, row < key_count ? own_query + band.before : -1};
        }
        barrier_wait(key_barrier, 0);
        barrier_wait(full, 0);
        pin<QUERIES / 2>(scores);
        products_fence();
        start_over_features<ROWS, QUERIES>(scores, memory + own, ring);
        products_wait<0>();
        const int last = count * share - 1;
        for (int index = 0; index <= last; index++) {
            const u32 at = ring + stage * STAGE_BYTES;
            pin<QUERIES / 2>(scores);
            pin<QUERIES / 2>(products);
            products_fence();
            start_over_features<ROWS, QUERIES>(products, values + own, at + TILE_BYTES);
            const int query = (first_tile + index % count) * QUERIES;
            const float4 *const pairs =
                (const float4 *)(memory_ + (of_rows - memory) + stage * ROW_BYTES) + lane % 4;
            const bool is_whole = all_visible(band, {query, query + QUERIES - 1}, {key, key + 63});
            if (!is_whole)
#pragma unroll
                for (int i = 0; i < QUERIES / 2; i++) {
                    const int h = i / 2 % 2, column = query + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                    scores[i] = column < visible[h].first | column > visible[h].last ? -INFINITE : scores[i];
                }
#if MASKED
            const u32 head = work.head * share + index / count;
            hide<QUERIES>(scores, load_hidden<QUERIES>(mask, numbers, work.batch, head, key, query));
#endif
#pragma unroll
            for (int j = 0; j < QUERIES / 8; j++) {
                // The log-sum-exp and Delta of two queries.
                const float4 pair = pairs[4 * j];
#pragma unroll
                for (int i = 4 * j; i < 4 * j + 4; i++) {
                    const float exponent = fmaf(scores[i], factor, -(i % 2 ? pair.z : pair.x));
                    // NaN stays NaN.
                    scores[i] = exp2_approximately(BOUNDED && exponent > 0.0f ? 0.0f : exponent);
                }
            }
            pack_operand<QUERIES>(scores, probabilities);
            pin<QUERIES / 4>(probabilities);
            pin<DIM / 2>(sums_of_values);
            products_fence();
            start_over_rows<QUERIES>(sums_of_values, probabilities, at + TILE_BYTES, true);
            products_wait<1>();
            pin<QUERIES / 2>(products);
#pragma unroll
            for (int j = 0; j < QUERIES / 8; j++) {
                const float4 pair = pairs[4 * j];
#pragma unroll
                for (int i = 4 * j; i < 4 * j + 4; i++)
                    scores[i] *= products[i] - (i % 2 ? pair.w : pair.y);
            }
            pack_operand<QUERIES>(scores, of_scores);
            const u32 to = transposed + index % 2 * SCORE_BYTES;
#pragma unroll
            for (int panel = 0; panel < QUERIES / 64; panel++)
                store_swizzled(of_scores + 16 * panel, to + panel * ROWS * 128 + own + warp * 16 * 128);
            shared_fence();
            pin<QUERIES / 4>(of_scores);
            pin<DIM / 2>(sums_of_keys);
            products_fence();
            start_over_rows<QUERIES>(sums_of_keys, of_scores, at, true);
            // Both have written theirs.
            asm volatile("bar.sync 1, %0;" ::"n"(128 * CONSUMERS) : "memory");
            pin<32>(part);
            products_fence();
            const u64 of_queries = descriptor<ROWS * 128>(to + queries_of_part);
            const u64 of_features = descriptor<ROWS * 128>(memory + features_of_part);
#pragma unroll
            for (int step = 0; step < ROWS / 16; step++)
                multiply_transposed(part, behind(of_queries, step * 16 * 128), behind(of_features, step * 16 * 128),
                                    step > 0);
            products_commit();
            products_wait<2>();
            pin<DIM / 2>(sums_of_values);
            pin<QUERIES / 4>(probabilities);

            // The next scores, while this part is handed over. Behind the last there are none: they are computed again, for
            // nothing, since the compiler serializes products that only some iterations start.
            const u32 previous = stage;
            if (index < last) {
                next_stage(stage, parity);
                barrier_wait(full + 8 * stage, parity);
            }
            pin<QUERIES / 2>(scores);
            products_fence();
            start_over_features<ROWS, QUERIES>(scores, memory + own, ring + stage * STAGE_BYTES);
            products_wait<1>();
            pin<DIM / 2>(sums_of_keys);
            pin<QUERIES / 4>(of_scores);
            pin<32>(part);
            release(empty + 8 * previous);
            barrier_wait(part_empty, (index + 1) % 2);
            hand_over(part, own_part, part_full);
            products_wait<0>();
        }
    }

#if SPLIT
    write_sums(sums_of_keys, of_keys, work, shares, key_tiles, consumer);
    write_sums(sums_of_values, of_values, work, shares, key_tiles, consumer);
#else
#pragma unroll
    for (int i = 0; i < DIM / 2; i++)
        sums_of_keys[i] *= as_float(numbers.scale);
    write_head(sums_of_keys, of_keys, work, shares, key + warp * 16, key_count, numbers.width);
    write_head(sums_of_values, of_values, work, shares, key + warp * 16, key_count, numbers.value_width);
#endif
}
