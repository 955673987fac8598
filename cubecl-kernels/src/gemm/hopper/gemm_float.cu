// C[M, N] = A[M, K] B[N, K]^T + bias[N] of BF16 or FP16 matrices, FP32 sums, on sm_90a. Matrices lie in two batch
// dimensions, with any strides: heads of attention are slices of a row.
//
// Knobs, defined in front of this text:
//   TILE_N     128 or 256, the columns of an output tile (its rows are 128)
//   STAGES     stages of the ring in shared memory
//   IN         "bf16" or "f16", the type of A and B
//   A_ALONG_MN, B_ALONG_MN   0: neighbours in memory are neighbours along K; 1: along M or N
//   BIAS, OUT_F32, OUT_F16 or OUT_BF16   see hopper.cu, common.cu and accumulate.cu, which come before this text
// and the structure Numbers, which float.rs describes.
//
// A producer warp and two consumer warpgroups, as in gemm.cu. There is nothing to convert between products here: see
// accumulate.cu.

// Elements of a stage along K: 128 bytes.
#define DEPTH 64
// Bytes of a box of 64 elements along M or N and a stage's depth along K, where neighbours along M or N are neighbours
// in memory: 128 bytes is as wide as a swizzled box can be.
#define BOX 64
#define BOX_BYTES (BOX * DEPTH * 2)

// The bytes from one product of depth 16 to the next: 16 elements of a row, or 16 rows.
template <bool AlongMN> __device__ __forceinline__ u32 step_bytes() {
    return AlongMN ? 16 * 128 : 16 * 2;
}

// sums[64, TILE_N] += a[64, 16] b[TILE_N, 16]^T for a warpgroup. Asynchronous: `sums` may be touched only after
// products_wait. The last two numbers tell operands along M or N.
__device__ __forceinline__ void multiply(float *sums, u64 a, u64 b) {
#if TILE_N == 256
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." IN "." IN " {"
                 SUMS_128 "}, %128, %129, 1, 1, 1, " TEXT(A_ALONG_MN) ", " TEXT(B_ALONG_MN) ";"
                 : FLOATS_64(sums, 0), FLOATS_64(sums, 64)
                 : "l"(a), "l"(b));
#else
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." IN "." IN " {"
                 SUMS_64 "}, %64, %65, 1, 1, 1, " TEXT(A_ALONG_MN) ", " TEXT(B_ALONG_MN) ";"
                 : FLOATS_64(sums, 0)
                 : "l"(a), "l"(b));
#endif
}

// Starts the copies of `rows` rows of an operand, `depth` being the first element along K.
template <bool AlongMN>
__device__ __forceinline__ void copy_operand(u32 to, const TensorMap *map, u32 depth, u32 row, u32 rows, u32 inner,
                                             u32 outer, u32 barrier) {
    if (AlongMN) {
        for (u32 box = 0; box < rows / BOX; box++)
            copy_tile(to + box * BOX_BYTES, map, row + box * BOX, depth, inner, outer, barrier);
    } else {
        copy_tile(to, map, depth, row, inner, outer, barrier);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm_float_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const void *,
                      const void *, const float *__restrict__ bias, Out *__restrict__ out, const void *, const void *,
                      const __grid_constant__ Numbers numbers) {
    // The swizzle repeats every 1024 bytes, so tiles must begin at multiples of that.
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full_barriers[STAGES], empty_barriers[STAGES];
    __shared__ __align__(16) Staging staging[8];

    const u32 m = numbers.m, n = numbers.n, k = numbers.k, inner_count = numbers.inner, parts = numbers.parts;
    const Tiles tiles = tiles_of(numbers.outer * inner_count * parts, m, n);
    const u32 blocks = (k + DEPTH - 1) / DEPTH;
    const u32 full = shared_address(full_barriers), empty = shared_address(empty_barriers);
    const u32 memory = shared_address(ring);

    ring_init(full, empty);

    u32 stage = 0, parity = 0;

    if (threadIdx.x < 128) {
        // The producer's registers go to the consumers: 24 + 2 * 240 <= 3 * 168.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x > 0)
            return;
        u32 index;
        for (u32 turn = 0; (index = tile_index(turn)) < tiles.all; turn++) {
            const Tile tile = tile_of(index, tiles, 16);
            const Part part = part_of(tile, parts, blocks);
            const u32 outer = part.matrix / inner_count, inner = part.matrix % inner_count;
            const u32 a_outer = numbers.a_outer ? outer : 0, a_inner = numbers.a_inner ? inner : 0;
            const u32 b_outer = numbers.b_outer ? outer : 0, b_inner = numbers.b_inner ? inner : 0;
            for (u32 block = part.first; block < part.end; block++) {
                barrier_wait(empty + 8 * stage, parity ^ 1);
                const u32 to = memory + stage * STAGE_BYTES, barrier = full + 8 * stage, depth = block * DEPTH;
                barrier_arrive_expect(barrier, STAGE_BYTES);
                copy_operand<A_ALONG_MN>(to, &a_map, depth, tile.m * TILE_M, TILE_M, a_inner, a_outer, barrier);
                copy_operand<B_ALONG_MN>(to + A_BYTES, &b_map, depth, tile.n * TILE_N, TILE_N, b_inner, b_outer,
                                         barrier);
                next_stage(stage, parity);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 consumer = threadIdx.x / 128 - 1;
    const u32 warp = threadIdx.x % 128 / 32;
    const u64 steps = n | numbers.row_stride | numbers.inner_stride | numbers.outer_stride;
    const bool aligned = ((u64)out | steps * sizeof(Out)) % 16 == 0;
    u32 index;
    for (u32 turn = 0; (index = tile_index(turn)) < tiles.all; turn++) {
        const Tile tile = tile_of(index, tiles, 16);
        const Part part = part_of(tile, parts, blocks);
        float sums[TILE_N / 2];
        accumulate(sums, part, memory, full, empty, stage, parity, [&](u32 a, u32 b) {
            const u64 of_a = descriptor<A_ALONG_MN * BOX_BYTES>(a), of_b = descriptor<B_ALONG_MN * BOX_BYTES>(b);
#pragma unroll
            for (int step = 0; step < DEPTH / 16; step++)
                multiply(sums, behind(of_a, step * step_bytes<A_ALONG_MN>()),
                         behind(of_b, step * step_bytes<B_ALONG_MN>()));
        });
        const u32 outer = part.matrix / inner_count, inner = part.matrix % inner_count;
        const u64 of_part = tile.batch % parts * (u64)m * n;
        write_sums(sums, bias, out + outer * numbers.outer_stride + inner * numbers.inner_stride + of_part,
                   staging[4 * consumer + warp], tile.m * TILE_M + consumer * 64 + warp * 16, tile.n * TILE_N, m, n,
                   numbers.row_stride, aligned);
    }
}
