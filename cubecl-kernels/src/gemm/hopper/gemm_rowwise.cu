// C[M, N] = A[M, K] B[N, K]^T + bias[N] of INT8 or FP8 matrices whose scales cover all of K, those of rows or of whole
// matrices, on sm_90a.
//
// Knobs, defined in front of this text:
//   TILE_N     64, 128, 192 or 256, the columns of an output tile (its rows are 128)
//   STAGES     stages of the ring in shared memory
//   FP8        0: INT8; 1: FP8
//   IN         of FP8, "e4m3.e4m3", "e4m3.e5m2", "e5m2.e4m3" or "e5m2.e5m2", the types of A and B
//   A_E8M0, B_E8M0   see scales.cu
//   BIAS, OUT_F32, OUT_F16 or OUT_BF16   see hopper.cu, common.cu and accumulate.cu, which come before this text
//   ROUNDED    1: the output is quantized, see rounded.cu, which comes before this text then; 0: it is in floats
// and the structure Numbers, which hopper.rs describes.
//
// A producer warp and two consumer warpgroups, as in gemm.cu. The scales leave the sum, so that nothing is converted
// between products: see accumulate.cu. Sums of INT8 are INT32, and exact: selector.rs gives no K in which they
// overflow. Those of FP8 keep the about 14 bits of the tensor cores' accumulators from the first element to the last:
// fast accumulation, which gemm_fp8.cu does without.

// Elements of a stage along K: 128 bytes.
#define DEPTH 128

#if FP8
typedef float Product;
#define PRODUCTS_32(x, i) FLOATS_16(x, i), FLOATS_16(x, i + 16)
#define PRODUCTS_64(x, i) FLOATS_64(x, i)
#define TYPES "f32." IN
// Neither operand is negated.
#define SIGNS ", 1, 1"
#else
typedef int Product;
#define PRODUCTS_32(x, i) REGISTERS_32(x, i)
#define PRODUCTS_64(x, i) REGISTERS_64(x, i)
#define TYPES "s32.s8.s8"
#define SIGNS ""
#endif

#if TILE_N == 256
#define SUMS SUMS_128
#define PRODUCTS(x) PRODUCTS_64(x, 0), PRODUCTS_64(x, 64)
#define OPERANDS "%128, %129"
#elif TILE_N == 192
#define SUMS SUMS_96
#define PRODUCTS(x) PRODUCTS_64(x, 0), PRODUCTS_32(x, 64)
#define OPERANDS "%96, %97"
#elif TILE_N == 128
#define SUMS SUMS_64
#define PRODUCTS(x) PRODUCTS_64(x, 0)
#define OPERANDS "%64, %65"
#else
#define SUMS SUMS_32
#define PRODUCTS(x) PRODUCTS_32(x, 0)
#define OPERANDS "%32, %33"
#endif

// sums[64, TILE_N] += a[64, 32] b[TILE_N, 32]^T for a warpgroup. Asynchronous: `sums` may be touched only after
// products_wait.
__device__ __forceinline__ void multiply(Product *sums, u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n" TEXT(TILE_N) "k32." TYPES " {" SUMS "}, " OPERANDS ", 1" SIGNS ";"
                 : PRODUCTS(sums)
                 : "l"(a), "l"(b));
}

// The scales of a warp's 16 rows and of the tile's columns, as its lanes hold them: a lane those of the two rows of its
// sums, and of every 32nd column. Each column's scale is read once for all rows, and in front of the products.
struct Scales {
    float rows[2];
    float cols[TILE_N / 32];
};

// Reads them from those of A's and B's matrices, in steps of 0 where one is for all rows.
__device__ __forceinline__ Scales scales_of(const AScale *a, const BScale *b, u32 a_step, u32 b_step,
                                            u32 first_row, u32 first_col, u32 rows, u32 cols) {
    const u32 lane = threadIdx.x % 32;
    Scales scales;
#pragma unroll
    for (int h = 0; h < 2; h++)
        scales.rows[h] = decoded(a[min(first_row + lane / 4 + 8 * h, rows - 1) * a_step]);
#pragma unroll
    for (int group = 0; group < TILE_N / 32; group++)
        scales.cols[group] = decoded(b[min(first_col + 32 * group + lane, cols - 1) * b_step]);
    return scales;
}

// The results of a warp's products, in the order of write_aligned's sums. The zero that is added changes nothing but
// the sign of a zero; with it the compiler cannot round the scaled product together with the bias.
__device__ __forceinline__ void scale_products(float *sums, const Product *products, const Scales &scales) {
    const u32 quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float of_col = __shfl_sync(EVERYONE, scales.cols[j / 4], 8 * (j % 4) + 2 * quad + e);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int i = 4 * j + 2 * h + e;
                sums[i] = fmaf((float)products[i], scales.rows[h] * of_col, 0.0f);
            }
        }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm_rowwise_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const void *,
                        const void *, const AScale *__restrict__ a_scales, const BScale *__restrict__ b_scales,
                        const float *__restrict__ bias, Out *__restrict__ out, float *__restrict__ out_scales,
                        const void *, const void *, const __grid_constant__ Numbers numbers) {
    // The swizzle repeats every 1024 bytes, so tiles must begin at multiples of that.
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full_barriers[STAGES], empty_barriers[STAGES];
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
            const u32 b_batch = numbers.b_batched ? part.matrix : 0;
            for (u32 block = part.first; block < part.end; block++) {
                barrier_wait(empty + 8 * stage, parity ^ 1);
                const u32 to = memory + stage * STAGE_BYTES, barrier = full + 8 * stage;
                barrier_arrive_expect(barrier, STAGE_BYTES);
                copy_tile(to, &a_map, block * DEPTH, tile.m * TILE_M, part.matrix, barrier);
                copy_tile(to + A_BYTES, &b_map, block * DEPTH, tile.n * TILE_N, b_batch, barrier);
                next_stage(stage, parity);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32 consumer = threadIdx.x / 128 - 1;
    const u32 warp = threadIdx.x % 128 / 32;
    u32 index;
    for (u32 turn = 0; (index = tile_index(turn)) < tiles.all; turn++) {
        const Tile tile = tile_of(index, tiles, 16);
        const Part part = part_of(tile, parts, blocks);
        const u32 b_batch = numbers.b_batched ? part.matrix : 0;
        const u32 first_row = tile.m * TILE_M + consumer * 64 + warp * 16, first_col = tile.n * TILE_N;
        const Scales scales = scales_of(a_scales + part.matrix * numbers.a_scale_batch,
                                        b_scales + b_batch * numbers.b_scale_batch, numbers.a_scale_row,
                                        numbers.b_scale_row, first_row, first_col, m, n);
        Product products[TILE_N / 2];
        accumulate(products, part, memory, full, empty, stage, parity, [&](u32 a, u32 b) {
            const u64 of_a = descriptor<0>(a), of_b = descriptor<0>(b);
#pragma unroll
            for (int step = 0; step < DEPTH / 32; step++)
                multiply(products, behind(of_a, step * 32), behind(of_b, step * 32));
        });
        float sums[TILE_N / 2];
        scale_products(sums, products, scales);
#if ROUNDED
        write_rounded(sums, bias, (u8 *)out, out_scales, maxima[turn % 2], tile.batch, first_row, first_col, numbers);
#else
        write_sums(sums, bias, out + tile.batch * (u64)m * n, staging[4 * consumer + warp], first_row, first_col, m, n,
                   n, n * sizeof(Out) % 16 == 0);
#endif
    }
}
