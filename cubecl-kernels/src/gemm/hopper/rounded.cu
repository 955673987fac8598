// The output of a product, quantized as it leaves the registers. The sums are rounded to 16 bits, and these as a quantizer
// rounds a matrix of them, to the bit: which kernel did it makes no difference. In front of this text stand scale.cu, int8.cu
// and patch.cu, and of what products have hopper.cu and common.cu.
//
// Knobs, defined in front of this text, beside those of patch.cu:
//   SIDE         32, 64 or 128: INT8, a scale for each square block of so many elements, of which tiles have whole columns;
//                0: E4M3 to nearest, a scale for each 16 neighbours of a row
//   STOCHASTIC   1: INT8 is rounded stochastically; 0: to nearest

// Eight neighbours of each of a lane's rows, of every 32 columns of a tile: see pack_neighbours.
typedef Row Pieces[TILE_N / 32][2];

#if SIDE
static_assert(TILE_N % SIDE == 0, "a block of two tiles");
#define BLOCKS (TILE_N / SIDE)
// Warps that have rows of a block.
#define SHARING (SIDE / 16)
// The largest magnitudes that the consumers' warps found, of each block's columns.
typedef u32 Maxima[8][BLOCKS];
#else
// Groups find theirs in a quad.
typedef u32 Maxima[1];
#endif

#if SIDE
// The inverses of the scales of a tile's blocks, which it writes. All warps that have rows of a block come here.
__device__ __forceinline__ void scales_of_blocks(float (&inverses)[BLOCKS], const Pieces &pieces, float *scales,
                                                 Maxima &maxima, u32 batch, u32 first_row, u32 first_col, u32 rows,
                                                 u32 cols) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        u32 largest = 0;
#pragma unroll
        for (int group = block * (SIDE / 32); group < (block + 1) * (SIDE / 32); group++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // A bias stands in rows outside, too.
                const bool exists = first_row + lane / 4 + 8 * h < rows;
                largest = exists ? larger(largest, pieces[group][h]) : largest;
            }
        const u32 of_warp = __reduce_max_sync(EVERYONE, float_bits(largest));
        if (lane == 0)
            maxima[warp][block] = of_warp;
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / SHARING), "n"(32 * SHARING) : "memory");
    const u32 across = (cols + SIDE - 1) / SIDE, down = (rows + SIDE - 1) / SIDE;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        const u32 of_warp = maxima[warp / SHARING * SHARING + lane % SHARING][block];
        const u32 absmax = __reduce_max_sync(EVERYONE, of_warp);
        inverses[block] = inverse_of(absmax);
        const u32 block_col = first_col / SIDE + block;
        if (warp % SHARING == 0 && lane == 0 && first_row < rows && block_col < across)
            scales[((u64)batch * down + first_row / SIDE) * across + block_col] = scale_of(absmax);
    }
}

// The codes of eight neighbours.
__device__ __forceinline__ uint2 codes_of_block(const Row &piece, float inverse, u32 row, u32 col,
                                                const Numbers &numbers) {
    const bool zeros = inverse == 0.0f;
    float sums[PATCH_COLS];
#if STOCHASTIC
    u32 random[4];
    const Key key = {{numbers.seed[0], numbers.seed[1]}, {numbers.stream[0], numbers.stream[1]}};
    philox(random, row, col / PATCH_COLS, key);
#endif
#pragma unroll
    for (int i = 0; i < PATCH_COLS; i++) {
        const float scaled = __fmul_rn(element(piece, i), inverse);
#if STOCHASTIC
        sums[i] = __fadd_rn(scaled, stochastic_offset(random, i, (u32)numbers.bits_of_384));
#else
        sums[i] = __fadd_rn(scaled, ROUND_TO_EVEN);
#endif
    }
#if STOCHASTIC
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        pairs[i] = stochastic_pair(sums[2 * i], sums[2 * i + 1]);
    return make_uint2(stochastic_word(pairs[0], pairs[1], zeros), stochastic_word(pairs[2], pairs[3], zeros));
#else
    return make_uint2(nearest_word(sums, zeros), nearest_word(sums + 4, zeros));
#endif
}
#else
// The largest number of E4M3.
#define LARGEST 448.0f

// The codes of eight neighbours, which are a group together with those of the lane beside, and the group's scale.
__device__ __forceinline__ uint2 codes_of_group(const Row &piece, float &scale) {
    u32 largest = larger(0, piece);
    largest = float_bits(larger_pair(largest, __shfl_xor_sync(EVERYONE, largest, 1)));
    scale = scale_of(largest, LARGEST);
    const float inverse = inverse_of(largest, LARGEST);
    const bool zeros = inverse == 0.0f;
    const u32 codes[2] = {codes_of(piece, 0, inverse), codes_of(piece, 4, inverse)};
    return make_uint2(zeros ? 0 : codes[0], zeros ? 0 : codes[1]);
}
#endif

// Quantizes and writes a consumer's warp's 16 x TILE_N sums, with the bias added. values: [batch, rows, cols], rows at
// multiples of 16 bytes, scales: that of each block or group, both dense. The next tile has other maxima.
__device__ __forceinline__ void write_rounded(float *sums, const float *bias, u8 *values, float *scales,
                                              Maxima &maxima, u32 batch, u32 first_row, u32 first_col,
                                              const Numbers &numbers) {
    const u32 rows = (u32)numbers.m, cols = (u32)numbers.n;
    const u32 lane = threadIdx.x % 32, quad = lane % 4;
    add_bias(sums, bias, first_col, cols);
    Pieces pieces;
#pragma unroll
    for (int group = 0; group < TILE_N / 32; group++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            pack_neighbours(pieces[group][h].words, sums, group, h);
#if SIDE
    float inverses[BLOCKS];
    scales_of_blocks(inverses, pieces, scales, maxima, batch, first_row, first_col, rows, cols);
#endif
#pragma unroll
    for (int both = 0; both < TILE_N / 64; both++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 row = first_row + lane / 4 + 8 * h, row_of_all = batch * rows + row;
            const u32 col = first_col + 64 * both;
            uint2 codes[2];
#if SIDE
#pragma unroll
            for (int i = 0; i < 2; i++)
                codes[i] = codes_of_block(pieces[2 * both + i][h], inverses[(2 * both + i) * 32 / SIDE], row_of_all,
                                          col + 32 * i + 8 * quad, numbers);
#else
            float own[2], others[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                codes[i] = codes_of_group(pieces[2 * both + i][h], own[i]);
                others[i] = __shfl_xor_sync(EVERYONE, own[i], 2);
            }
            // The quad has the scales of four groups, and one lane of it, each time another one, writes them.
            if (quad == both && row < rows && col < cols)
                *(float4 *)(scales + ((u64)row_of_all * cols + col) / 16) =
                    quad < 2 ? make_float4(own[0], others[0], own[1], others[1])
                             : make_float4(others[0], own[0], others[1], own[1]);
#endif
            // Neighbouring lanes swap pieces, so that a lane has 16 neighbours of a row, and the quad 64 bytes.
            const bool odd = quad & 1;
            const uint2 given = odd ? codes[0] : codes[1], kept = odd ? codes[1] : codes[0];
            const u32 x = __shfl_xor_sync(EVERYONE, given.x, 1), y = __shfl_xor_sync(EVERYONE, given.y, 1);
            const u32 at = col + 32 * odd + 8 * (quad & 2);
            if (row < rows && at < cols)
                *(uint4 *)(values + (u64)row_of_all * cols + at) =
                    odd ? make_uint4(x, y, kept.x, kept.y) : make_uint4(kept.x, kept.y, x, y);
        }
}
