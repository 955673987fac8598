// C[M, N] = A[M, K] B[N, K]^T + bias[N] of INT8 matrices with FP32 scales for square blocks of 32, 64 or 128, on
// sm_90a.
//
// Knobs, defined in front of this text:
//   TILE_N     64, 128, 192 or 256, the columns of an output tile (its rows are 128)
//   STAGES     stages of the ring in shared memory
//   BLOCK      32, 64 or 128, the rows, columns and depth of a scale
//   FALLBACK   1: blocks of A whose flag is set add the product of their residual; blocks of 128 only
//   BIAS, OUT_F32, OUT_F16 or OUT_BF16   see hopper.cu, common.cu and chunks.cu, which come before this text
//   ROUNDED    1: the output is quantized, see rounded.cu, which comes before this text then; 0: it is in floats
// and the structure Numbers, which hopper.rs describes.
//
// A block has three warpgroups (128 threads each) and works on one output tile after the other:
//
//   producer      one warp of the first warpgroup; fills the ring: a stage is one step along K, a tile of A (or of A's
//                 residual) and one of B, copied by TMA, and a note of their scales
//   consumers     two warpgroups, each for 64 rows of the tile; multiply a stage with wgmma, then scale and add to FP32
//                 sums in their registers
//
// Where the speed comes from: the tensor cores must not wait while a consumer turns INT32 products into FP32 sums (an
// I2F and an FFMA for each), which takes half as long as the products. So a consumer works in chunks of 64 columns with
// two or three sets of INT32 registers, and converts one chunk while the products of the next are computed. A chunk so
// narrow would need both operands at the full rate of shared memory; with A in registers, read once for all chunks of a
// stage, B's half of it is left. (Chunks of 128 with both operands in shared memory, in one set of registers, are 8%
// slower.)
//
// Smaller blocks convert more often: a 32-deep product needs as many conversions as a 128-deep one. Those of 64 columns
// are 64 instructions of 76, and two consumers share a scheduler: 152 cycles for two such products, which take the
// tensor cores 64 cycles where they are 32 deep and 128 where they are 64 deep. That bounds the speed at 42% and 84% of
// the peak.
//
// Narrow tiles are for outputs that have few: hopper.rs has their speeds.

#if FALLBACK && BLOCK != DEPTH
#error "a stage of several blocks has no place for their residuals"
#endif

// ---- wgmma ----------------------------------------------------------------------------------------------------------

// Starts the products of a unit: those of the 64 rows of A in `fragments` and of the 64 rows of B that `b` describes,
// as deep as a scale block.
__device__ __forceinline__ void multiply_chunk(int *products, const u32 (*fragments)[4], u64 b) {
    pin<CHUNK / 2>(products);
    products_fence();
#pragma unroll
    for (int step = 0; step < BLOCK / 32; step++)
        multiply_codes<64>(products, fragments[step], behind(b, step * 32), step > 0);
    products_commit();
}

// The products of the scales for the first and the second 32 columns of a unit.
struct Scales {
    float first, second;
};

__device__ __forceinline__ Scales scales_of(const Note &note, int sub, int chunk) {
#if BLOCK == DEPTH
    const float scale = scale_of(note, chunk);
    return {scale, scale};
#else
    const float of_a = note.of_a[sub][(threadIdx.x - 128) / 32 * 16 / BLOCK];
    const float *of_b = &note.of_b[sub][chunk * (CHUNK / BLOCK)];
    return {of_a * of_b[0], of_a * of_b[CHUNK / BLOCK - 1]};
#endif
}

// Adds a unit's products, exact integers below 2^21, to the sums of its chunk.
__device__ __forceinline__ void add_scaled(float *sums, const int *products, const Scales &scales) {
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++)
        sums[i] = fmaf((float)products[i], i < CHUNK / 4 ? scales.first : scales.second, sums[i]);
}

// ---- A consumer's sums ----------------------------------------------------------------------------------------------

// Adds the products of a tile's stages to its sums.
__device__ __forceinline__ void add_tile(float *sums, const Stages &stages, u32 &stage, u32 &parity) {
    // The unit that is computed, the one that is converted, and of three units the third.
    int products[SETS][CHUNK / 2];
    int *const pending = products[(UNITS - 1) % SETS];
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++)
        pending[i] = 0;
    // The scales of the last stage's last unit, which is converted while the first unit of the next stage is computed.
    // Before the tile's first stage they stand for zeros.
    Scales pending_scales = {0.0f, 0.0f};
    u32 pending_stage = STAGES;
    bool last;
    do {
        barrier_wait(stages.full + 8 * stage, parity);
        NoteOfStage note = stages.notes[stage];
        last = note.is_end != 0.0f;
        const u64 b = descriptor<0>(stages.memory + stage * STAGE_BYTES + A_BYTES);
        // The fragments of A are still being read by the last unit's products. While this consumer waits for them, the
        // other one keeps the tensor cores busy.
        products_wait<0>();
        pin<CHUNK / 2>(pending);
        if (pending_stage < STAGES)
            release(stages.empty + 8 * pending_stage);
        u32 fragments[DEPTH / 32][4];
        load_fragments(fragments, stages.fragments + stage * STAGE_BYTES);
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            const int sub = unit / CHUNKS, chunk = unit % CHUNKS;
            multiply_chunk(products[unit % SETS], fragments + sub * (BLOCK / 32),
                           behind(b, chunk * CHUNK * DEPTH + sub * BLOCK));
            if (unit > 0) {
                int *const done = products[(unit - 1) % SETS];
                products_wait<1>();
                pin<CHUNK / 2>(done);
                add_scaled(sums + (unit - 1) % CHUNKS * CHUNK / 2, done, pending_scales);
            } else {
                add_scaled(sums + (CHUNKS - 1) * CHUNK / 2, pending, pending_scales);
            }
            pending_scales = scales_of(note, sub, chunk);
        }
        pending_stage = stage;
        next_stage(stage, parity);
    } while (!last);
    products_wait<0>();
    pin<CHUNK / 2>(pending);
    release(stages.empty + 8 * pending_stage);
    add_scaled(sums + (CHUNKS - 1) * CHUNK / 2, pending, pending_scales);
}

// The same for a tile of which only `count` chunks lie in the output, fewer than CHUNKS, or whose stages are one unit.
// They are multiplied and added one after the other: only the other consumer's work overlaps.
__device__ __forceinline__ void add_narrow_tile(float *sums, u32 count, const Stages &stages, u32 &stage, u32 &parity) {
    bool last;
    do {
        barrier_wait(stages.full + 8 * stage, parity);
        NoteOfStage note = stages.notes[stage];
        last = note.is_end != 0.0f;
        const u64 b = descriptor<0>(stages.memory + stage * STAGE_BYTES + A_BYTES);
        u32 fragments[DEPTH / 32][4];
        load_fragments(fragments, stages.fragments + stage * STAGE_BYTES);
#pragma unroll
        for (int chunk = 0; chunk == 0 || chunk < CHUNKS - 1; chunk++) {
            if (chunk < count) {
#pragma unroll
                for (int sub = 0; sub < SUBS; sub++) {
                    // Read before the warp waits as one, so that no lane still reads them when the stage is released.
                    const Scales scales = scales_of(note, sub, chunk);
                    int products[CHUNK / 2];
                    multiply_chunk(products, fragments + sub * (BLOCK / 32),
                                   behind(b, chunk * CHUNK * DEPTH + sub * BLOCK));
                    products_wait<0>();
                    pin<CHUNK / 2>(products);
                    add_scaled(sums + chunk * CHUNK / 2, products, scales);
                }
            }
        }
        release(stages.empty + 8 * stage);
        next_stage(stage, parity);
    } while (!last);
}

// ---- The order of rows ----------------------------------------------------------------------------------------------

#if FALLBACK
// Rows of tiles that can be ordered.
#define ORDERED_ROWS 512

// Orders rows of tiles by the number of their blocks that fell back, most first: without that, a matrix whose fallback
// blocks all lie in a few rows gives some of the grid's blocks more costly tiles than others. order[place] is the row.
//
// Nothing else runs meanwhile, so a thread has a row of its own, whose flags it reads side by side.
__device__ __forceinline__ void order_rows(unsigned short *order, uint4 *keys, const u32 *flags, u64 row_stride,
                                           u64 depth_stride, u32 rows, u32 blocks) {
    // Costs, and of equal ones the first row first; no two are equal. Zeros fill up the last four.
    u32 *const key = (u32 *)keys;
    for (u32 row = threadIdx.x; row < (rows + 3) / 4 * 4; row += 384) {
        u32 cost = 0;
        if (row < rows)
#pragma unroll 16
            for (u32 block = 0; block < blocks; block++)
                cost += flags[row * row_stride + block * depth_stride];
        key[row] = row < rows ? cost * ORDERED_ROWS + ORDERED_ROWS - 1 - row : 0;
    }
    __syncthreads();
    for (u32 row = threadIdx.x; row < rows; row += 384) {
        const u32 own = key[row];
        u32 place = 0;
#pragma unroll 8
        for (u32 four = 0; four < (rows + 3) / 4; four++) {
            const uint4 others = keys[four];
            place += (others.x > own) + (others.y > own) + (others.z > own) + (others.w > own);
        }
        order[place] = row;
    }
}
#endif

// ---- The kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap residual_map,
                const __grid_constant__ TensorMap b_map, const void *, const void *, const void *,
                const float *__restrict__ a_scales, const float *__restrict__ b_scales,
                const float *__restrict__ residual_scales, const u32 *__restrict__ flags,
                const float *__restrict__ bias, Out *__restrict__ out, float *__restrict__ out_scales, const void *,
                const void *, const void *, const __grid_constant__ Numbers numbers) {
    // The swizzle repeats every 1024 bytes, so tiles must begin at multiples of that.
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full_barriers[STAGES], empty_barriers[STAGES];
    __shared__ Note notes[STAGES];
#if ROUNDED
    __shared__ Maxima maxima[2];
#else
    __shared__ __align__(16) Staging staging[8];
#endif

    const u32 m = numbers.m, n = numbers.n, k = numbers.k, parts = numbers.parts;
    const Tiles tiles = tiles_of(numbers.batch * parts, m, n);
    const u32 blocks = (k + DEPTH - 1) / DEPTH;
    const u32 full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const u32 memory = shared_address(ring);

    ring_init(full, empty);
    // Ordered rows are taken in lower groups, so that tiles of one cost follow one another.
    u32 raster = 16;
#if FALLBACK
    __shared__ unsigned short row_order[ORDERED_ROWS];
    __shared__ uint4 row_keys[ORDERED_ROWS / 4];
    // Where each block has one tile at most, there is nothing to balance.
    const bool ordered = numbers.batch == 1 && tiles.all > gridDim.x && tiles.rows <= ORDERED_ROWS;
    if (ordered) {
        order_rows(row_order, row_keys, flags, numbers.a_scale_row, numbers.a_scale_depth, tiles.rows, blocks);
        __syncthreads();
        raster = 8;
    }
#endif

    u32 stage = 0, parity = 0;

    if (threadIdx.x < 128) {
        // The producer's registers go to the consumers: 24 + 2 * 240 <= 3 * 168.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x >= 32)
            return;
        const u32 lane = threadIdx.x;
        u32 index;
        for (u32 turn = 0; (index = tile_index(turn)) < tiles.all; turn++) {
            Tile tile = tile_of(index, tiles, raster);
#if FALLBACK
            if (ordered)
                tile.m = row_order[tile.m];
#endif
            const Part part = part_of(tile, parts, blocks);
            tile.batch = part.matrix;
            const u32 b_batch = numbers.b_batched ? tile.batch : 0;
#if BLOCK == DEPTH
            const u32 b_last = (n - 1) / 128;
            const u32 b_first = tile.n * TILE_N / 128;
            const bool begins_inside = tile.n * TILE_N % 128 != 0;
            const u64 a_row = tile.batch * numbers.a_scale_batch + tile.m * numbers.a_scale_row;
            const u64 b_row = b_batch * numbers.b_scale_batch;
            for (u32 start = part.first; start < part.end; start += 32) {
                // Each lane reads the scales of one of the next 32 blocks along K; a block's are then broadcast.
                const u32 mine = min(start + lane, blocks - 1);
                const u64 a_index = a_row + mine * numbers.a_scale_depth;
                const u64 b_index = b_row + mine * numbers.b_scale_depth;
                const float a_scale = a_scales[a_index];
                const float b_scale_0 = b_scales[b_index + b_first * numbers.b_scale_row];
                const float b_scale_1 =
                    TILE_N > 128 ? b_scales[b_index + min(b_first + 1, b_last) * numbers.b_scale_row] : 0.0f;
#if FALLBACK
                const float residual_scale = residual_scales[a_index];
                const u32 fell_back = __ballot_sync(EVERYONE, flags[a_index] != 0);
#else
                const float residual_scale = 0.0f;
                const u32 fell_back = 0;
#endif
                const u32 count = min(32u, part.end - start);
                for (u32 i = 0; i < count; i++) {
                    const float base = __shfl_sync(EVERYONE, a_scale, i);
                    const float extra = __shfl_sync(EVERYONE, residual_scale, i);
                    const float scale_0 = __shfl_sync(EVERYONE, b_scale_0, i);
                    const float scale_1 = __shfl_sync(EVERYONE, b_scale_1, i);
                    // A block that fell back is two steps: its base, then its residual against the same tile of B.
                    const u32 steps = 1 + (fell_back >> i & 1);
#pragma unroll 1
                    for (u32 step = 0; step < steps; step++) {
                        barrier_wait(empty + 8 * stage, parity ^ 1);
                        if (lane == 0) {
                            const float scale = step ? extra : base;
                            const bool last = start + i + 1 == part.end && step + 1 == steps;
                            const float first = scale * scale_0, second = scale * scale_1;
                            notes[stage] = {first, second, begins_inside ? second : first, last ? 1.0f : 0.0f};
                            copy_stage(memory + stage * STAGE_BYTES, full + 8 * stage, step ? &residual_map : &a_map,
                                       &b_map, (start + i) * DEPTH, tile, b_batch);
                        }
                        // The other lanes' next wait is for another stage, but the warp's shuffles need all of it.
                        __syncwarp();
                        next_stage(stage, parity);
                    }
                }
            }
#else
            // Each lane reads and notes a scale of A and one of B.
            const u32 a_sub = lane / ROW_BLOCKS, b_sub = lane / COL_BLOCKS;
            const u32 a_block = min(tile.m * ROW_BLOCKS + lane % ROW_BLOCKS, (m - 1) / BLOCK);
            const u32 b_block = min(tile.n * COL_BLOCKS + lane % COL_BLOCKS, (n - 1) / BLOCK);
            const float *a_scale = a_scales + tile.batch * numbers.a_scale_batch + a_block * numbers.a_scale_row;
            const float *b_scale = b_scales + b_batch * numbers.b_scale_batch + b_block * numbers.b_scale_row;
            for (u32 block = part.first; block < part.end; block++) {
                // Behind K products are 0: times -0 and added, they change no sum, not even its sign.
                const u32 of_a = block * SUBS + a_sub, of_b = block * SUBS + b_sub;
                const float from_a = of_a * BLOCK < k ? a_scale[of_a * numbers.a_scale_depth] : -0.0f;
                const float from_b = of_b * BLOCK < k ? b_scale[of_b * numbers.b_scale_depth] : 1.0f;
                barrier_wait(empty + 8 * stage, parity ^ 1);
                if (a_sub < SUBS)
                    notes[stage].of_a[a_sub][lane % ROW_BLOCKS] = from_a;
                if (b_sub < SUBS)
                    notes[stage].of_b[b_sub][lane % COL_BLOCKS] = from_b;
                if (lane == 0)
                    notes[stage].is_end = block + 1 == part.end ? 1.0f : 0.0f;
                __syncwarp();
                if (lane == 0)
                    copy_stage(memory + stage * STAGE_BYTES, full + 8 * stage, &a_map, &b_map, block * DEPTH, tile,
                               b_batch);
                next_stage(stage, parity);
            }
#endif
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 consumer = threadIdx.x / 128 - 1;
    const u32 warp = threadIdx.x % 128 / 32;
    const Stages stages = stages_of(memory, full, empty, notes);
    u32 index;
    for (u32 turn = 0; (index = tile_index(turn)) < tiles.all; turn++) {
        Tile tile = tile_of(index, tiles, raster);
#if FALLBACK
        if (ordered)
            tile.m = row_order[tile.m];
#endif
        float sums[TILE_N / 2];
#pragma unroll
        for (int i = 0; i < TILE_N / 2; i++)
            sums[i] = 0.0f;
        const u32 chunks = (n - tile.n * TILE_N + CHUNK - 1) / CHUNK;
        if (UNITS == 1 || chunks < CHUNKS)
            add_narrow_tile(sums, chunks, stages, stage, parity);
        else
            add_tile(sums, stages, stage, parity);
        const u32 first_row = tile.m * TILE_M + consumer * 64 + warp * 16, first_col = tile.n * TILE_N;
#if ROUNDED
        write_rounded(sums, bias, (u8 *)out, out_scales, maxima[turn % 2], tile.batch, first_row, first_col, numbers);
#else
        write_sums(sums, bias, out + tile.batch * (u64)m * n, staging[4 * consumer + warp], first_row, first_col, m, n,
                   n, n * sizeof(Out) % 16 == 0);
#endif
    }
}
