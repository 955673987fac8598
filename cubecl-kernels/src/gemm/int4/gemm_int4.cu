// The product of INT4 matrices on mma.sync m16n8k64: C = A B^T by the product of their scales, plus a bias.
//
// Knobs, defined in front of this text:
//   STAGES     stages of the ring in shared memory
//   BIAS       1: bias is added to the FP32 product
//   OUT_F32, OUT_F16 or OUT_BF16   the type of the output

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Rows and columns of an output tile, which eight warps share: two along the rows, four along the columns.
#define TILE 128
#define UNITS 256
#define WARP_ROWS 64
#define WARP_COLS 32
// Bytes of a row in a stage, two elements in each, and of a copy.
#define DEPTH 64
#define CHUNK 16
#define OPERAND_BYTES (TILE * DEPTH)
#define STAGE_BYTES (2 * OPERAND_BYTES)

#if defined(OUT_F32)
typedef float Out;
#else
typedef u16 Out;
#endif

// ---- Shared memory --------------------------------------------------------------------------------------------------

// Where a chunk of a row of an operand lies in a stage: so that eight rows of one chunk are in different banks.
__device__ __forceinline__ u32 place_of(u32 row, u32 chunk) {
    return row * DEPTH + (chunk ^ row / 2 % 4) * CHUNK;
}

// Starts to copy a thread's chunks of the rows from `first` on, `DEPTH` bytes from `start` on. What lies behind the end
// of a row is 0, and rows behind the last one are that one again.
__device__ __forceinline__ void copy_operand(u32 to, const u8 *from, u64 stride, u32 first, u32 rows, u32 start,
                                             u32 row_bytes) {
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / CHUNK / UNITS; i++) {
        const u32 index = i * UNITS + threadIdx.x;
        const u32 row = index / (DEPTH / CHUNK), chunk = index % (DEPTH / CHUNK);
        const u32 at = start + chunk * CHUNK;
        const u32 bytes = at < row_bytes ? CHUNK : 0;
        const u8 *source = from + min(first + row, rows - 1) * stride + (bytes ? at : 0);
        asm volatile("cp.async.cg.shared::cta.global [%0], [%1], %2, %3;" ::"r"(to + place_of(row, chunk)),
                     "l"((u64)source), "n"(CHUNK), "r"(bytes));
    }
}

__device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until no more than this many of the thread's last groups are on their way.
#define COPIES_WAIT(groups) asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");

// Four matrices of 8 rows of a chunk: the thread's row is one of them.
__device__ __forceinline__ void load(u32 *registers, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(from));
}

// ---- The product ----------------------------------------------------------------------------------------------------

// Adds the products of 16 x 64 and 64 x 8 elements.
__device__ __forceinline__ void multiply(int *sums, const u32 *a, const u32 *b) {
    asm volatile("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Adds the products of a stage: two instructions deep.
__device__ __forceinline__ void multiply_stage(int (*sums)[WARP_COLS / 8][4], u32 stage, u32 warp_row, u32 warp_col) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < DEPTH / CHUNK / 2; step++) {
        u32 a[WARP_ROWS / 16][4], b[WARP_COLS / 16][4];
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; i++)
            load(a[i], stage + place_of(warp_row + 16 * i + lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int j = 0; j < WARP_COLS / 16; j++)
            load(b[j], stage + OPERAND_BYTES +
                           place_of(warp_col + 16 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; i++)
#pragma unroll
            for (int j = 0; j < WARP_COLS / 8; j++)
                multiply(sums[i][j], a[i], b[j / 2] + j % 2 * 2);
    }
}

__device__ __forceinline__ Out rounded(float value) {
#if defined(OUT_F32)
    return value;
#else
    u32 word;
#if defined(OUT_F16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(value), "f"(value));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(value), "f"(value));
#endif
    return (Out)word;
#endif
}

// a: [batch, m, row_bytes], b: [batch, n, row_bytes], rows and matrices at multiples of 16 bytes. a_scale, b_scale: one
// number each. bias: [n]. out: [batch, m, n], dense.
extern "C" __global__ void __launch_bounds__(UNITS, 2)
gemm_int4(const float *a_scale, const float *b_scale, const float *bias, Out *out, const u8 *a, const u8 *b,
          const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 ring = (u32)__cvta_generic_to_shared(memory);
    const u32 m = (u32)numbers.m, n = (u32)numbers.n, row_bytes = (u32)numbers.row_bytes;
    const u32 tiles_m = (m + TILE - 1) / TILE, tiles_n = (n + TILE - 1) / TILE;
    const u32 matrix = blockIdx.x / (tiles_m * tiles_n), tile = blockIdx.x % (tiles_m * tiles_n);
    // Those computed at once share columns of B.
    const u32 first_row = tile % tiles_m * TILE, first_col = tile / tiles_m * TILE;
    const u8 *const a_rows = a + matrix * numbers.a_batch, *const b_rows = b + matrix * numbers.b_batch;
    const auto copy = [&](u32 stage) {
        const u32 to = ring + stage % STAGES * STAGE_BYTES, start = stage * DEPTH;
        copy_operand(to, a_rows, numbers.a_row, first_row, m, start, row_bytes);
        copy_operand(to + OPERAND_BYTES, b_rows, numbers.b_row, first_col, n, start, row_bytes);
    };

    const u32 stages = (row_bytes + DEPTH - 1) / DEPTH;
    for (u32 stage = 0; stage < STAGES - 1; stage++) {
        if (stage < stages)
            copy(stage);
        copies_commit();
    }
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 warp_row = warp % 2 * WARP_ROWS, warp_col = warp / 2 * WARP_COLS;
    int sums[WARP_ROWS / 16][WARP_COLS / 8][4] = {};
    for (u32 stage = 0; stage < stages; stage++) {
        COPIES_WAIT(STAGES - 2)
        // Behind it all threads' copies are there, and nobody reads the stage that is written next.
        __syncthreads();
        const u32 next = stage + STAGES - 1;
        if (next < stages)
            copy(next);
        copies_commit();
        multiply_stage(sums, ring + stage % STAGES * STAGE_BYTES, warp_row, warp_col);
    }

    const float scale = __fmul_rn(*a_scale, *b_scale);
#pragma unroll
    for (int i = 0; i < WARP_ROWS / 16; i++)
#pragma unroll
        for (int slot = 0; slot < 4; slot++) {
            const u32 row = first_row + warp_row + 16 * i + slot / 2 * 8 + lane / 4;
#pragma unroll
            for (int j = 0; j < WARP_COLS / 8; j++) {
                const u32 col = first_col + warp_col + 8 * j + lane % 4 * 2 + slot % 2;
                if (row < m && col < n) {
                    float value = __fmul_rn((float)sums[i][j][slot], scale);
#if BIAS
                    value = __fadd_rn(value, bias[col]);
#endif
                    out[((u64)matrix * m + row) * n + col] = rounded(value);
                }
            }
        }
}
