// Gate and up as they wait for the backward pass: INT8 to nearest in groups of 128 neighbours, of which each row of a tile
// is one. In front of this text stand tile.cu and codes.cu of blocks. The numbers are those of quantize.

#define ROWS_OF_BOTH (2 * TILE)

// Of a row of gate and of up, in the halves of a word, the largest magnitudes, as the bits of elements.
__device__ __forceinline__ void note_rows(u32 *of_rows, const FirstPatch &first, int line, const Line &gate,
                                          const Line &up) {
    const u32 gates = larger(0, gate), ups = larger(0, up);
    u32 both = __vmaxu2(permute(gates, ups, 0x5410), permute(gates, ups, 0x7632));
    // Eight lanes have a row of a warp's columns.
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
        both = __vmaxu2(both, __shfl_xor_sync(EVERYONE, both, distance));
    if (threadIdx.x % 8 == 0)
        of_rows[threadIdx.x / 32 % (TILE / WARP_COLS) * TILE + row_of(first, line)] = both;
}

// Writes the scales of the rows of both, each thread one, and leaves their inverses, those of up behind those of gate.
// What of_rows holds must be there.
__device__ __forceinline__ void scale_rows(float *inverses, const u32 *of_rows, float *gate_scales, float *up_scales,
                                           const Numbers &numbers) {
    const u32 row = threadIdx.x % TILE;
    const bool is_up = threadIdx.x / TILE;
    const u32 both = __vmaxu2(of_rows[row], of_rows[TILE + row]);
    const u32 absmax = float_bits(is_up ? both >> 16 : both & 0xffffu);
    (is_up ? up_scales : gate_scales)[scale_index(row, numbers)] = scale_of(absmax);
    inverses[threadIdx.x] = inverse_of(absmax);
}

// Writes the codes of a line.
__device__ __forceinline__ void write_codes(u8 *values, const FirstPatch &first, int line, const Line &x, float inverse,
                                            u32 cols) {
    float sums[PATCH_COLS];
#pragma unroll
    for (int col = 0; col < PATCH_COLS; col++)
        sums[col] = __fadd_rn(__fmul_rn(element(x, col), inverse), ROUND_TO_EVEN);
    const bool zeros = inverse == 0.0f;
    const u32 at = first.offset + row_of_line(line) * cols;
    *(uint2 *)(values + at) = make_uint2(nearest_word(sums, zeros), nearest_word(sums + 4, zeros));
}
