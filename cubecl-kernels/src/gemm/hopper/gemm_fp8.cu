// C[M, N] = A[M, K] B[N, K]^T + bias[N] of FP8 matrices with scales, on sm_90a.
//
// Knobs, defined in front of this text:
//   TILE_N     64, 128, 192 or 256, the columns of an output tile (its rows are 128)
//   STAGES     stages of the ring in shared memory
//   IN         "e4m3.e4m3", "e4m3.e5m2", "e5m2.e4m3" or "e5m2.e5m2", the types of A and B
//   A_ROWS     1: each row of A has scales of its own; 0: 128 rows have them together
//   B_ROWS     the same of B
//   A_E8M0, B_E8M0   see scales.cu
//   BIAS, OUT_F32, OUT_F16 or OUT_BF16   see hopper.cu, common.cu and chunks.cu, which come before this text
//   ROUNDED    1: the output is quantized, see rounded.cu, which comes before this text then; 0: it is in floats
// and the structure Numbers, which fp8.rs describes. Along K a scale is for 128 elements, or for all, where its stride is 0.
//
// A producer warp and two consumer warpgroups, as in gemm.cu, and like there chunk by chunk: the tensor cores' own sums
// keep about 14 bits, so those of each 128 elements are scaled and added to FP32 sums in registers (DeepSeek-V3, arXiv
// 2412.19437, section 3.3.2). Scales of rows cost nothing: a lane has elements of two rows. Those of columns cost a
// multiplication an element. The producer reads both a stage ahead, and puts them beside the stage.

// ---- wgmma ----------------------------------------------------------------------------------------------------------

#define FLOATS_32(x) FLOATS_16(x, 0), FLOATS_16(x, 16)

// products[64, 64] (+)= a[64, 32] b[64, 32]^T for a warpgroup. Without `add`, what was there is ignored. Asynchronous:
// neither `products` nor `a` may be touched before products_wait.
__device__ __forceinline__ void multiply(float *products, const u32 *a, u64 b, bool add) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32." IN " {"
                 SUMS_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1;\n"
                 "}"
                 : FLOATS_32(products)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

// Starts the products of a chunk: those of the 64 rows of A in `fragments` and of the 64 rows of B that `b` describes.
__device__ __forceinline__ void multiply_chunk(float *products, const u32 (*fragments)[4], u64 b) {
    pin<CHUNK / 2>(products);
    products_fence();
#pragma unroll
    for (int step = 0; step < DEPTH / 32; step++)
        multiply(products, fragments[step], behind(b, step * 32), step > 0);
    products_commit();
}

// ---- Scales ---------------------------------------------------------------------------------------------------------

// The scales of a tile's rows and columns beside the stages of the ring, where they have their own.
struct TileScales {
#if A_ROWS
    float rows[STAGES][TILE_M];
#endif
#if B_ROWS
    float cols[STAGES][TILE_N];
    // Those of a chunk before the first stage.
    float zeros[CHUNK];
#endif
};

// The factors of products: those of a lane's two rows, lane / 4 and 8 behind it, and where columns have their own, the
// place of that of the lane's first one.
struct Scales {
    float rows[2];
    const float *cols;

    // Those of a chunk, with what all its elements share.
    __device__ __forceinline__ Scales of_chunk(const Note &note, int chunk) const {
        const float shared = scale_of(note, chunk);
        return {{rows[0] * shared, rows[1] * shared}, cols + chunk * CHUNK};
    }
};

// What a lane reads of a stage's.
__device__ __forceinline__ Scales scales_of(const TileScales &scales, u32 stage) {
    Scales read = {{1.0f, 1.0f}, nullptr};
#if A_ROWS
    const float *const of_lane = scales.rows[stage] + (threadIdx.x - 128) / 32 * 16 + threadIdx.x % 32 / 4;
    read.rows[0] = of_lane[0];
    read.rows[1] = of_lane[8];
#endif
#if B_ROWS
    read.cols = scales.cols[stage] + 2 * (threadIdx.x % 4);
#endif
    return read;
}

__device__ __forceinline__ void add_scaled(float *sums, const float *products, const Scales &scales) {
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++) {
#if B_ROWS
        const float2 read = *(const float2 *)(scales.cols + 8 * j);
        const float cols[2] = {read.x, read.y};
#endif
#pragma unroll
        for (int i = 0; i < 4; i++) {
#if B_ROWS
            const float product = products[4 * j + i] * cols[i % 2];
#else
            const float product = products[4 * j + i];
#endif
            sums[4 * j + i] = fmaf(product, scales.rows[i / 2], sums[4 * j + i]);
        }
    }
}

// ---- A consumer's sums ----------------------------------------------------------------------------------------------

// Adds the products of a tile's stages to its sums. See gemm.cu, of which this is the twin.
__device__ __forceinline__ void add_tile(float *sums, const Stages &stages, const TileScales &tile_scales, u32 &stage,
                                         u32 &parity) {
    float products[SETS][CHUNK / 2];
    float *const pending = products[(CHUNKS - 1) % SETS];
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++)
        pending[i] = 0.0f;
    Scales of_pending = {{0.0f, 0.0f}, nullptr};
#if B_ROWS
    of_pending.cols = tile_scales.zeros + 2 * (threadIdx.x % 4);
#endif
    u32 pending_stage = STAGES;
    bool last;
    do {
        barrier_wait(stages.full + 8 * stage, parity);
        const Note note = stages.notes[stage];
        const Scales scales = scales_of(tile_scales, stage);
        last = note.is_end != 0.0f;
        const u64 b = descriptor<0>(stages.memory + stage * STAGE_BYTES + A_BYTES);
        products_wait<0>();
        pin<CHUNK / 2>(pending);
#if !B_ROWS
        if (pending_stage < STAGES)
            release(stages.empty + 8 * pending_stage);
#endif
        u32 fragments[DEPTH / 32][4];
        load_fragments(fragments, stages.fragments + stage * STAGE_BYTES);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            multiply_chunk(products[chunk % SETS], fragments, behind(b, chunk * CHUNK * DEPTH));
            if (chunk == 0) {
                add_scaled(sums + (CHUNKS - 1) * CHUNK / 2, pending, of_pending);
#if B_ROWS
                // Only now have all lanes read the scales of the pending chunk's columns.
                __syncwarp();
                if (pending_stage < STAGES)
                    release(stages.empty + 8 * pending_stage);
#endif
            } else {
                float *const done = products[(chunk - 1) % SETS];
                products_wait<1>();
                pin<CHUNK / 2>(done);
                add_scaled(sums + (chunk - 1) * CHUNK / 2, done, scales.of_chunk(note, chunk - 1));
            }
        }
        of_pending = scales.of_chunk(note, CHUNKS - 1);
        pending_stage = stage;
        next_stage(stage, parity);
    } while (!last);
    products_wait<0>();
    pin<CHUNK / 2>(pending);
    add_scaled(sums + (CHUNKS - 1) * CHUNK / 2, pending, of_pending);
#if B_ROWS
    __syncwarp();
#endif
    release(stages.empty + 8 * pending_stage);
}

// The same for a tile of which only `count` chunks lie in the output, one after the other.
__device__ __forceinline__ void add_narrow_tile(float *sums, u32 count, const Stages &stages,
                                                const TileScales &tile_scales, u32 &stage, u32 &parity) {
    bool last;
    do {
        barrier_wait(stages.full + 8 * stage, parity);
        const Note note = stages.notes[stage];
        const Scales scales = scales_of(tile_scales, stage);
        last = note.is_end != 0.0f;
        const u64 b = descriptor<0>(stages.memory + stage * STAGE_BYTES + A_BYTES);
        u32 fragments[DEPTH / 32][4];
        load_fragments(fragments, stages.fragments + stage * STAGE_BYTES);
#pragma unroll
        for (int chunk = 0; chunk == 0 || chunk < CHUNKS - 1; chunk++) {
            if (chunk < count) {
                float products[CHUNK / 2];
                multiply_chunk(products, fragments, behind(b, chunk * CHUNK * DEPTH));
                products_wait<0>();
                pin<CHUNK / 2>(products);
                add_scaled(sums + chunk * CHUNK / 2, products, scales.of_chunk(note, chunk));
            }
        }
        // A warp's lanes have all read their scales: they have waited for the last products as one.
        __syncwarp();
        release(stages.empty + 8 * stage);
        next_stage(stage, parity);
    } while (!last);
}

// ---- The producer ---------------------------------------------------------------------------------------------------

// The scales of a tile's rows at the block to come along K: a lane has those of every 32nd row.
template <int Rows, class Scale> struct ScalesAhead {
    const Scale *scales;
    u64 row_stride, depth_stride;
    // The tile's first row, and the operand's last row and block.
    u32 first, last, last_block;
    Scale ahead[Rows / 32];

    __device__ __forceinline__ void read(u32 block) {
        const Scale *const of_block = scales + min(block, last_block) * depth_stride;
#pragma unroll
        for (int i = 0; i < Rows / 32; i++)
            ahead[i] = of_block[min(first + 32 * i + threadIdx.x, last) * row_stride];
    }
    __device__ __forceinline__ void put(float *beside) const {
#pragma unroll
        for (int i = 0; i < Rows / 32; i++)
            beside[32 * i + threadIdx.x] = decoded(ahead[i]);
    }
};

// ---- The kernel -----------------------------------------------------------------------------------------------------

// Registers of the producer, which has many scales of columns, and of the consumers: at most 3 * 168 in all.
#if B_ROWS
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232
#else
#define PRODUCER_REGISTERS 24
#define CONSUMER_REGISTERS 240
#endif

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm_fp8_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const void *,
                    const void *, const AScale *__restrict__ a_scales, const BScale *__restrict__ b_scales,
                    const float *__restrict__ bias, Out *__restrict__ out, float *__restrict__ out_scales, const void *,
                    const void *, const __grid_constant__ Numbers numbers) {
    // The swizzle repeats every 1024 bytes, so tiles must begin at multiples of that.
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full_barriers[STAGES], empty_barriers[STAGES];
    __shared__ Note notes[STAGES];
#if ROUNDED
    __shared__ Maxima maxima[2];
#else
    __shared__ __align__(16) Staging staging[8];
#endif
    __shared__ __align__(16) TileScales tile_scales;
    static_assert(8 * sizeof(Staging) + sizeof(tile_scales) + sizeof(notes) + 16 * STAGES <= 27 * 1024,
                  "DECLARED in hopper.rs");
#if B_ROWS
    if (threadIdx.x < CHUNK)
        tile_scales.zeros[threadIdx.x] = 0.0f;
#endif

    const u32 m = numbers.m, n = numbers.n, k = numbers.k, parts = numbers.parts;
    const Tiles tiles = tiles_of(numbers.batch * parts, m, n);
    const u32 blocks = (k + DEPTH - 1) / DEPTH;
    const u32 full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const u32 memory = shared_address(ring);

    ring_init(full, empty);
    const u32 raster = 16;
    u32 stage = 0, parity = 0;

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 " TEXT(PRODUCER_REGISTERS) ";");
        if (threadIdx.x >= 32)
            return;
        const u32 lane = threadIdx.x;
        u32 index;
        for (u32 turn = 0; (index = tile_index(turn)) < tiles.all; turn++) {
            Tile tile = tile_of(index, tiles, raster);
            const Part part = part_of(tile, parts, blocks);
            tile.batch = part.matrix;
            const u32 b_batch = numbers.b_batched ? tile.batch : 0;
            const bool begins_inside = tile.n * TILE_N % 128 != 0;
            const AScale *const of_a = a_scales + tile.batch * numbers.a_scale_batch;
            const BScale *const of_b = b_scales + b_batch * numbers.b_scale_batch;
#if A_ROWS
            ScalesAhead<TILE_M, AScale> of_rows = {of_a, numbers.a_scale_row, numbers.a_scale_depth,
                                                   tile.m * TILE_M, m - 1, blocks - 1};
            of_rows.read(part.first);
#endif
#if B_ROWS
            ScalesAhead<TILE_N, BScale> of_cols = {of_b, numbers.b_scale_row, numbers.b_scale_depth,
                                                   tile.n * TILE_N, n - 1, blocks - 1};
            of_cols.read(part.first);
#else
            const u32 b_first = tile.n * TILE_N / 128, b_second = min(b_first + 1, (n - 1) / 128);
#endif
            for (u32 block = part.first; block < part.end; block++) {
#if A_ROWS
                float first = 1.0f;
#else
                float first = decoded(of_a[tile.m * numbers.a_scale_row + block * numbers.a_scale_depth]);
#endif
                float second = first;
#if !B_ROWS
                const BScale *const here = of_b + block * numbers.b_scale_depth;
                first *= decoded(here[b_first * numbers.b_scale_row]);
                second *= decoded(here[b_second * numbers.b_scale_row]);
#endif
                barrier_wait(empty + 8 * stage, parity ^ 1);
#if A_ROWS
                of_rows.put(tile_scales.rows[stage]);
#endif
#if B_ROWS
                of_cols.put(tile_scales.cols[stage]);
#endif
                __syncwarp();
                if (lane == 0) {
                    const bool last = block + 1 == part.end;
                    notes[stage] = {first, second, begins_inside ? second : first, last ? 1.0f : 0.0f};
                    copy_stage(memory + stage * STAGE_BYTES, full + 8 * stage, &a_map, &b_map, block * DEPTH, tile,
                               b_batch);
                }
#if A_ROWS
                of_rows.read(block + 1);
#endif
#if B_ROWS
                of_cols.read(block + 1);
#endif
                // The other lanes' next wait is for another stage.
                __syncwarp();
                next_stage(stage, parity);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 " TEXT(CONSUMER_REGISTERS) ";");
    const u32 consumer = threadIdx.x / 128 - 1;
    const u32 warp = threadIdx.x % 128 / 32;
    const Stages stages = stages_of(memory, full, empty, notes);
    u32 index;
    for (u32 turn = 0; (index = tile_index(turn)) < tiles.all; turn++) {
        const Tile tile = tile_of(index, tiles, raster);
        const u32 first_row = tile.m * TILE_M + consumer * 64 + warp * 16;
        float sums[TILE_N / 2];
#pragma unroll
        for (int i = 0; i < TILE_N / 2; i++)
            sums[i] = 0.0f;
        const u32 chunks = (n - tile.n * TILE_N + CHUNK - 1) / CHUNK;
        if (CHUNKS == 1 || chunks < CHUNKS)
            add_narrow_tile(sums, chunks, stages, tile_scales, stage, parity);
        else
            add_tile(sums, stages, tile_scales, stage, parity);
#if ROUNDED
        write_rounded(sums, bias, (u8 *)out, out_scales, maxima[turn % 2], tile.batch, first_row, tile.n * TILE_N,
                      numbers);
#else
        write_sums(sums, bias, out + tile.batch * (u64)m * n, staging[4 * consumer + warp], first_row,
                   tile.n * TILE_N, m, n, n, n * sizeof(Out) % 16 == 0);
#endif
    }
}
