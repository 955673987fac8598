// The output of RMSNorm as a linear layer's backward pass reads it, from its input as that waits: in front of this text
// stand tile.cu, pairs.cu, contexts.cu of SwiGLU, and gains.cu. A knob beside theirs:
//   CUBES   cubes that share a multiprocessor

// x: codes, [rows, cols], and their scales, [rows, cols / 128]; inverse_rms: [rows]; gain: [cols], all dense. The outputs
// are those of quantize_whole_tiles for x inverse_rms gain, but for the row-major copy.
extern "C" __global__ void __launch_bounds__(UNITS, CUBES)
quantize_rms_norm(const u8 *x, const float *scales_of_x, const float *inverse_rms, const u8 *gain, u8 *transposed,
                  float *scales, const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u32 of_warps[2][UNITS / 32];
    // The codes of a line wait where its elements go.
    uint4 *const held = (uint4 *)memory + threadIdx.x;
    u32 *const staged = (u32 *)(memory + TILE * TILE * ELEMENT_BYTES);
    // Of each row of the tile, the scale and the inverse root mean square; in front of them random words wait.
    float *const of_rows = (float *)(staged + TILE * TILE / 4);
    const FirstPatch first = first_patch(numbers);
    copy_codes((uint2 *)held, x, first, (u32)numbers.cols);
    const u32 row = threadIdx.x % TILE;
    of_rows[threadIdx.x] = threadIdx.x < TILE ? __ldg(scales_of_x + scale_index(row, numbers))
                                              : __ldg(inverse_rms + blockIdx.y * TILE + row);
    const Gains gains = read_gains(gain, blockIdx.x * TILE + first.col);
    const Key key = {{numbers.seed[0], numbers.seed[1]}, {numbers.stream[0], numbers.stream[1]}};
    Random random;
    draw_all(random, (uint4 *)staged + threadIdx.x, first, key);
    copies_wait();
    // What other threads read too.
    __syncthreads();
    u32 largest = 0;
#pragma unroll 2
    for (int line = 0; line < LINES; line++) {
        const float *const of_row = of_rows + row_of(first, line);
        Line normalized = read_codes((const uint2 *)held, line, of_row[0]);
        normalize(normalized.words, of_row[TILE], gains);
        write_line(held, line, normalized);
        largest = larger(largest, normalized);
    }
    const u32 absmax = largest_of_tile(float_bits(largest), of_warps[0]);
    const Outputs to = {nullptr, transposed, scales};
    quantize_tile(to, held, staged, of_warps[1], first, absmax, 0.0f, random, key, numbers);
}
