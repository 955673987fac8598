// The common part of the products on Hopper: the order of tiles, and output that starts anywhere. See gemm.cu.
//
// Knobs, defined in front of this text: those of hopper.cu, which comes before this text, and
//   BIAS       1: bias is added to the FP32 sums
// An output tile has 128 rows.

// ---- Tiles ----------------------------------------------------------------------------------------------------------

#define TILE_M 128

struct Tile {
    u32 batch, m, n;
};

// The tiles of an output. Those of a last column that TILE_N does not divide cost less than the others and come after
// all of them, so that they fill the gaps that the others leave in the grid's last turn.
struct Tiles {
    // Rows of tiles, and columns of whole tiles.
    u32 rows, cols;
    // Whole tiles of all matrices, and all tiles.
    u32 whole, all;
};

__device__ __forceinline__ Tiles tiles_of(u32 batch, u32 m, u32 n) {
    const u32 rows = (m + TILE_M - 1) / TILE_M, cols = n / TILE_N;
    const u32 whole = batch * rows * cols;
    return {rows, cols, whole, n % TILE_N == 0 ? whole : whole + batch * rows};
}

// Tiles are numbered down `raster` rows of tiles before they go on along the columns, so that those computed at once
// share rows of A and columns of B in the L2 cache.
__device__ __forceinline__ Tile tile_of(u32 index, const Tiles &tiles, u32 raster) {
    // The last column is numbered as if it were the only one; without a branch, since the compiler would then no longer
    // see that all threads are in the same stage, and count it in each.
    const bool last = index >= tiles.whole;
    index -= last ? tiles.whole : 0;
    const u32 cols = last ? 1 : tiles.cols;
    const u32 batch = index / (tiles.rows * cols);
    index -= batch * tiles.rows * cols;
    const u32 first = index / (raster * cols) * raster;
    const u32 height = min(tiles.rows - first, raster);
    index -= first * cols;
    return {batch, first + index % height, index / height + (last ? tiles.cols : 0)};
}

// The stages of a tile: those of a part of K, where parts are summed up side by side (split_k.rs). Those of a matrix
// follow one another in the output, and count as matrices there.
struct Part {
    u32 matrix, first, end;
};

__device__ __forceinline__ Part part_of(const Tile &tile, u32 parts, u32 stages) {
    const u32 of_part = (stages + parts - 1) / parts, first = tile.batch % parts * of_part;
    return {tile.batch / parts, first, min(first + of_part, stages)};
}

// ---- Output ---------------------------------------------------------------------------------------------------------

#if defined(OUT_F32)
// Columns that a warp stages at once where rows of C are not aligned. Eight more keep the rows in different banks.
#define STAGED 32
typedef Out Staging[16][STAGED + 8];
#else
// Eight more: a row is staged from the place on that it has in its first 16 bytes of memory.
#define STAGED (TILE_N % 128 == 0 ? 128 : 64)
typedef Out Staging[8][STAGED + 8];
#endif

// Writes a warp's sums where rows of C do not start at multiples of 16 bytes. Single elements, scattered as wgmma
// leaves them, would be several times slower than the product. Through shared memory, neighbours are written by
// neighbours.
__device__ __forceinline__ void write_unaligned(const float *sums, Out *out, Staging &staging, u32 first_row,
                                                u32 first_col, u32 rows, u32 cols, u32 stride) {
    const u32 lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
    for (int block = 0; block < TILE_N / STAGED; block++) {
        const u32 col = first_col + block * STAGED;
        if (col >= cols)
            break;
        const u32 width = min((u32)STAGED, cols - col);
#if defined(OUT_F32)
#pragma unroll
        for (int j = 0; j < STAGED / 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float *pair = sums + 4 * (block * STAGED / 8 + j) + 2 * h;
                *(float2 *)&staging[lane / 4 + 8 * h][8 * j + 2 * quad] = make_float2(pair[0], pair[1]);
            }
        __syncwarp();
#pragma unroll 8
        for (u32 i = 0; i < 16; i++)
            if (first_row + i < rows && lane < width)
                out[(u64)(first_row + i) * stride + col + lane] = staging[i][lane];
        __syncwarp();
#else
#pragma unroll
        for (int h = 0; h < 2; h++) {
            Out *to = out + (u64)(first_row + 8 * h) * stride + col;
            u32 words[STAGED / 8];
#pragma unroll
            for (int j = 0; j < STAGED / 8; j++) {
                const float *pair = sums + 4 * (block * STAGED / 8 + j) + 2 * h;
                words[j] = pack(pair[0], pair[1]);
            }
            // In a row that starts in the middle of a word, a lane's second element and the next lane's first share
            // one; the next of a quad's last lane is the first lane's in the next eight columns.
            const u32 start = (u64)(to + (u64)(lane / 4) * stride) / sizeof(Out) % 8;
            const bool odd = start % 2;
            Out *place = &staging[lane / 4][start + odd + 2 * quad];
#pragma unroll
            for (int j = 0; j < STAGED / 8; j++) {
                const u32 offered = quad == 0 ? words[min(j + 1, STAGED / 8 - 1)] : words[j];
                const u32 next = __shfl_sync(EVERYONE, offered, lane / 4 * 4 + (quad + 1) % 4);
                *(u32 *)(place + 8 * j) = odd ? __funnelshift_r(words[j], next, 16) : words[j];
            }
            if (odd && quad == 0)
                staging[lane / 4][start] = words[0];
            __syncwarp();
            // Half a warp writes a row: each lane 16 bytes that lie inside, and one element of those at the ends that
            // do not fill 16 bytes.
            const u32 chunk = lane % 16;
#pragma unroll
            for (u32 i = lane / 16; i < 8; i += 2) {
                Out *row = to + (u64)i * stride;
                const u32 begin = (u64)row / sizeof(Out) % 8, end = begin + width;
                row -= begin;
                const bool exists = first_row + 8 * h + i < rows;
                if (exists && 8 * chunk >= begin && 8 * chunk + 8 <= end)
                    *(uint4 *)(row + 8 * chunk) = *(const uint4 *)&staging[i][8 * chunk];
                const bool is_head = chunk < 8;
                const u32 at = is_head ? chunk : end / 8 * 8 + chunk % 8;
                const bool is_single = is_head ? at >= begin && (begin > 0 || end < 8) : at >= 8;
                if (exists && is_single && at < end)
                    row[at] = staging[i][at];
            }
            __syncwarp();
        }
#endif
    }
}

// Adds the bias, if there is one, to a warp's sums, in the order of write_aligned.
__device__ __forceinline__ void add_bias(float *sums, const float *bias, u32 first_col, u32 cols) {
#if BIAS
    const u32 quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < TILE_N / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const u32 col = first_col + 8 * j + 2 * quad + e;
            const float term = col < cols ? bias[col] : 0.0f;
            sums[4 * j + e] += term;
            sums[4 * j + 2 + e] += term;
        }
#endif
}

// A consumer's warp writes its 16 x TILE_N sums, with the bias added; `aligned`: rows of C are as write_aligned needs them.
__device__ __forceinline__ void write_sums(float *sums, const float *bias, Out *out, Staging &staging, u32 first_row,
                                           u32 first_col, u32 rows, u32 cols, u32 stride, bool aligned) {
    add_bias(sums, bias, first_col, cols);
    if (aligned)
        write_aligned(sums, out, first_row, first_col, rows, cols, stride);
    else
        write_unaligned(sums, out, staging, first_row, first_col, rows, cols, stride);
}
