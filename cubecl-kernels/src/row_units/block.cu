// The output of a norm as a linear layer reads it, forward or backward, quantized in blocks as it is computed, from its
// input as that waits or flows: in front of this text stand tile.cu, pairs.cu, the codes.cu of blocks, and columns.cu. A knob
// beside theirs:
//   CUBES   cubes that share a multiprocessor

// x: codes, [rows, cols], and their scales; of each row its numbers, of each column too, all dense. The outputs are those of
// quantize_whole_tiles for the norm.
extern "C" __global__ void __launch_bounds__(UNITS, CUBES)
quantize_norm_by_blocks(const u8 *x, const float *scales_of_x, NORM u8 *values, u8 *transposed, float *scales,
                        const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u32 of_warps[2][UNITS / 32];
    // The codes of a line wait where its elements go.
    uint4 *const held = (uint4 *)memory + threadIdx.x;
    u32 *const staged = (u32 *)(memory + TILE * TILE * ELEMENT_BYTES);
    // Of each row of the tile the scale, what it is multiplied by, and the mean; in front of them random words wait.
    float *const of_rows = (float *)(staged + TILE * TILE / 4);
    const FirstPatch first = first_patch(numbers);
    copy_codes((uint2 *)held, x, first, (u32)numbers.cols);
    const u32 row = threadIdx.x % TILE;
    of_rows[threadIdx.x] = threadIdx.x < TILE ? __ldg(scales_of_x + code_scale_index(row, numbers))
                                              : __ldg(inverses + blockIdx.y * TILE + row);
#if CENTRED
    if (threadIdx.x < TILE)
        of_rows[2 * TILE + row] = __ldg(means + blockIdx.y * TILE + row);
#endif
    Columns columns;
    columns.gains.read(gain, blockIdx.x * TILE + first.col);
#if BIAS
    columns.biases.read(bias, blockIdx.x * TILE + first.col);
#endif
    Random random;
#if DRAW_EARLY
    draw_all(random, (uint4 *)staged + threadIdx.x, first, key_of(numbers));
#endif
    copies_wait();
    // What other threads read too.
    __syncthreads();
    u32 largest = 0;
#pragma unroll 2
    for (int line = 0; line < LINES; line++) {
        const float *const of_row = of_rows + row_of(first, line);
        Line normalized = read_codes((const uint2 *)held, line, of_row[0]);
#if CENTRED
        normalize(normalized.words, {of_row[TILE], of_row[2 * TILE]}, columns);
#else
        normalize(normalized.words, {of_row[TILE]}, columns);
#endif
        write_line(held, line, normalized);
        largest = larger(largest, normalized);
    }
    quantize_computed({values, transposed, scales}, held, staged, of_warps, first, largest, random, numbers);
}
