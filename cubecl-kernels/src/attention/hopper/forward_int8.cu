// O = softmax(scale Q K^T) V and its log-sum-exp from INT8 codes, on sm_90a: products in INT32, all else in FP32.
//
// Texts before this one: hopper.cu, attention/hopper/common.cu, attention/hopper/forward_common.cu. codes.cu makes the codes:
// of Q with a scale for each row, of K and V with one for each tile of 128 keys. Blocks and turns are those of
// forward.cu; but a consumer's products of values end before its exponentials begin, which need their registers.
//
// The probabilities of a row in a tile of keys are codes too, of 127 at the tile's largest: P is their scale times
// them, and the scale is folded into that of V (SageAttention3: Zhang et al., 2025, section 4, which has found that a
// fixed scale loses rows whose largest score lies in another tile). Their sum is of what is not rounded.

// A row of codes has the 128 bytes of a swizzled row, whatever a head's width is.
#define ROW_BYTES 128
#define QUERY_BYTES (ROWS * ROW_BYTES)
#define KEY_BYTES (KEYS * ROW_BYTES)
#define VALUE_BYTES (DIM * ROW_BYTES)
#define STAGE_BYTES KEY_BYTES
// 1.5 * 2^23: an integer below 2^22 added to these bits is a float's mantissa, and sums of 128 products of codes are
// below 2^21. Conversions take twice the time.
#define SHIFTED 12582912.0f
#define SHIFTED_BITS 0x4b400000
// log2 127.
#define LOG2_LARGEST 6.98868468677217f
// Above, a product of SHIFTED would be off by more than probabilities are by their rounding to 16 bits.
#define STEEP 0x1p-14f

// ---- Products of codes ----------------------------------------------------------------------------------------------

// products[64, 128] (+)= a[64, 32] b[128, 32]^T, both in shared memory.
__device__ __forceinline__ void multiply(int *products, u64 a, u64 b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
                 SUMS_64 "}, %64, %65, add;\n"
                 "}"
                 : REGISTERS_64(products, 0)
                 : "l"(a), "l"(b), "r"((int)add));
}

// scores[64, KEYS] = queries[64, DIM] keys[KEYS, DIM]^T.
__device__ __forceinline__ void start_scores(int *scores, u32 queries, u32 keys) {
    const u64 of_queries = descriptor<0>(queries), of_keys = descriptor<0>(keys);
#pragma unroll
    for (int step = 0; step < DIM / 32; step++)
        multiply(scores, behind(of_queries, step * 32), behind(of_keys, step * 32), step > 0);
    products_commit();
}

// products[64, DIM] = probabilities[64, KEYS] values[DIM, KEYS]^T.
__device__ __forceinline__ void start_values(int *products, const u32 *probabilities, u32 values) {
    const u64 of_values = descriptor<0>(values);
#pragma unroll
    for (int step = 0; step < KEYS / 32; step++)
        multiply_codes<DIM>(products, probabilities + 4 * step, behind(of_values, step * 32), step > 0);
    products_commit();
}

// ---- Softmax --------------------------------------------------------------------------------------------------------

// How a tile's products join the sums of those before: these are multiplied with `decay`, and codes with `scale`.
struct Joint {
    float decay[2], scale[2];
};

// Four lowest bytes, the first in front.
__device__ __forceinline__ u32 bytes_of(float a, float b, float c, float d) {
    u32 ab, cd, all;
    asm("prmt.b32 %0, %1, %2, 0x0040;" : "=r"(ab) : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)));
    asm("prmt.b32 %0, %1, %2, 0x0040;" : "=r"(cd) : "r"(__float_as_uint(c)), "r"(__float_as_uint(d)));
    asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(all) : "r"(ab), "r"(cd));
    return all;
}

// The products as floats, SHIFTED more than they are.
__device__ __forceinline__ void to_shifted(const int *products, float *shifted) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
        shifted[i] = __int_as_float(products[i] + SHIFTED_BITS);
}

// Makes codes of probabilities of scores, SHIFTED more than they are, of which one is `factor` (log2 e included) of the
// row, and takes them into the statistics, whose largest scores are times log2 e.
__device__ __forceinline__ Joint to_codes(float *scores, u32 *probabilities, Statistics &statistics,
                                          const float *factors) {
    float largest[2], factor[2], shift[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        largest[h] = -INFINITE;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
            largest[h] = fmaxf(largest[h], fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(EVERYONE, largest[h], 1));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(EVERYONE, largest[h], 2));
        // With a factor of 0, or of NaN from keys that are not seen, what is hidden would be NaN.
        factor[h] = largest[h] == -INFINITE || factors[h] == 0.0f ? 1e-37f : factors[h];
        // A little more than the product is off by, so that no code is above 127. Where nothing is visible, there is no
        // maximum to subtract.
        shift[h] = fmaf(fmaxf(largest[h], 0.0f) * factor[h], -(1.0f + 0x1p-22f), LOG2_LARGEST);
    }
    if (__any_sync(EVERYONE, fmaxf(factor[0], factor[1]) > STEEP)) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            shift[h] = LOG2_LARGEST;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    scores[4 * j + 2 * h + e] -= fmaxf(largest[h], 0.0f);
        }
    }
    Joint joint;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &score = scores[4 * j + 2 * h + e];
                score = exp2_approximately(fmaf(score, factor[h], shift[h]));
                sum += score;
                score += SHIFTED;
            }
        const float of_tile = largest[h] == -INFINITE ? -INFINITE : (largest[h] - SHIFTED) * factor[h];
        const float so_far = fmaxf(statistics.largest[h], of_tile);
        const float origin = so_far == -INFINITE ? 0.0f : so_far;
        joint.decay[h] = exp2_approximately(statistics.largest[h] - origin);
        joint.scale[h] = exp2_approximately(of_tile - origin) * (1.0f / 127.0f);
        statistics.sum[h] = fmaf(statistics.sum[h], joint.decay[h], sum * joint.scale[h]);
        statistics.largest[h] = so_far;
    }
    // wgmma wants four neighbours of a row in a lane, where its sums have two of each eight: codes.cu orders keys so.
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float *const pair = scores + 8 * i + 2 * h, *const next = pair + 4;
            probabilities[2 * i + h] = bytes_of(pair[0], pair[1], next[0], next[1]);
        }
    return joint;
}

// Joins the products of a tile to the sums, in units of the probabilities' scale and this one.
__device__ __forceinline__ void join(float *sums, const int *products, const Joint &joint, float scale) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float factor = joint.scale[h] * scale, shift = -SHIFTED * factor;
#pragma unroll
        for (int j = 0; j < DIM / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &sum = sums[4 * j + 2 * h + e];
                const float shifted = __int_as_float(products[4 * j + 2 * h + e] + SHIFTED_BITS);
                sum = fmaf(shifted, factor, fmaf(sum, joint.decay[h], shift));
            }
    }
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_forward_int8_hopper(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                                  const __grid_constant__ TensorMap value_map, const void *, const void *, const void *,
                                  Out *__restrict__ out, float *__restrict__ log_sum_exp,
                                  const float *__restrict__ query_scales, const float *__restrict__ key_scales,
                                  const float *__restrict__ value_scales, const void *, const void *, const void *,
                                  const u32 *__restrict__ mask, const __grid_constant__ Numbers numbers) {
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
                copy_tile(memory, &query_map, 0, query, head, batch, query_full);
            },
            [&](int of_values, u32 stage, u32 key, u32 batch, u32 head, u32 barrier) {
                const u32 to = ring + stage * STAGE_BYTES;
                barrier_arrive_expect(barrier, of_values ? VALUE_BYTES : KEY_BYTES);
                if (of_values)
                    copy_tile(to, &value_map, key, 0, head, batch, barrier);
                else
                    copy_tile(to, &key_map, 0, key, head, batch, barrier);
            });
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const u32 consumer = own_consumer(), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const u32 own = memory + consumer * 64 * ROW_BYTES;
    const u32 key_tiles = ((u32)numbers.keys + KEYS - 1) / KEYS;
    float sums[DIM / 2];
    int of_scores[KEYS / 2], of_values[DIM / 2];
    u32 probabilities[KEYS / 8];
    for_query_tiles<KEYS>(numbers, band, [&](const QueryWork &of_tile) {
        const auto [work, first_query, first_tile, count] = of_tile;
        const int query = first_query + consumer * 64;
        const u32 head = work.batch * numbers.heads + work.head;
        // Of the first tile.
        const u32 of_keys = (work.batch * (u32)(numbers.heads / numbers.group) + work.head / (u32)numbers.group) *
                                key_tiles + first_tile;
        const u32 row = query + warp * 16 + lane / 4;
        float of_queries[2];
#pragma unroll
        for (int h = 0; h < 2; h++)
            of_queries[h] = row + 8 * h < queries
                                ? query_scales[(u64)head * queries + row + 8 * h] * as_float(numbers.scale) * LOG2_E
                                : 0.0f;
        Statistics statistics = {{-INFINITE, -INFINITE}, {0.0f, 0.0f}};
#pragma unroll
        for (int i = 0; i < DIM / 2; i++)
            sums[i] = 0.0f;

        // Scores of a tile become probabilities.
        const auto softmax = [&, batch = work.batch, own_head = work.head, first = first_tile](int tile, float of_tile) {
            const float factors[2] = {of_queries[0] * of_tile, of_queries[1] * of_tile};
            float scores[KEYS / 2];
            to_shifted(of_scores, scores);
            const int key = (first + tile) * KEYS;
            hide(scores, band, query, key);
#if MASKED
            hide<KEYS>(scores, load_hidden<KEYS>(mask, numbers, batch, own_head, query, key));
#endif
            return to_codes(scores, probabilities, statistics, factors);
        };

        if (count > 0) {
            const float of_last = __ldg(key_scales + of_keys + count - 1);
            barrier_wait(query_full, query_parity);
            query_parity ^= 1;
            barrier_wait(full + 8 * stage, parity);
            products_fence();
            start_scores(of_scores, own, ring + stage * STAGE_BYTES);
            products_wait<0>();
            pin<KEYS / 2>(of_scores);
            release(empty + 8 * stage);
            next_stage(stage, parity);
            Joint joint = softmax(count - 1, of_last);
            // While one consumer's products run, the other has its exponentials.
            if (consumer == 1)
                give_turn(0);
            for (int tile = count - 2; tile >= 0; tile--) {
                const u32 of_key_stage = stage;
                const float of_tile = __ldg(key_scales + of_keys + tile);
                const float of_values_before = __ldg(value_scales + of_keys + tile + 1);
                await_turn(consumer);
                barrier_wait(full + 8 * stage, parity);
                pin<KEYS / 2>(of_scores);
                pin<KEYS / 8>(probabilities);
                pin<DIM / 2>(of_values);
                products_fence();
                start_scores(of_scores, own, ring + stage * STAGE_BYTES);
                next_stage(stage, parity);
                barrier_wait(full + 8 * stage, parity);
                start_values(of_values, probabilities, ring + stage * STAGE_BYTES);
                give_turn(1 - consumer);
                products_wait<0>();
                pin<KEYS / 2>(of_scores);
                pin<DIM / 2>(of_values);
                pin<KEYS / 8>(probabilities);
                release(empty + 8 * of_key_stage);
                release(empty + 8 * stage);
                next_stage(stage, parity);
                join(sums, of_values, joint, of_values_before);
                joint = softmax(tile, of_tile);
            }
            if (consumer == 0)
                await_turn(0);
            // The next queries may be copied over these. Not before the first consumer's last turn: they are what the
            // other one waits for before it gives that a turn again.
            release(query_empty);
            barrier_wait(full + 8 * stage, parity);
            pin<KEYS / 8>(probabilities);
            pin<DIM / 2>(of_values);
            products_fence();
            start_values(of_values, probabilities, ring + stage * STAGE_BYTES);
            products_wait<0>();
            pin<DIM / 2>(of_values);
            release(empty + 8 * stage);
            next_stage(stage, parity);
            join(sums, of_values, joint, __ldg(value_scales + of_keys));
        }

        write_results(sums, statistics, LN_2, out, log_sum_exp, work, numbers, query);
    });
}
