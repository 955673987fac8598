// The gate of SwiGLU as a linear layer's backward pass reads it, of gate and up as they wait: in front of this text stand
// tile.cu, arithmetic.cu and contexts.cu. Knobs beside theirs:
//   CUBES      cubes that share a multiprocessor

// gate, up: codes, [rows, cols], and their scales, [rows, cols / 128], dense. The outputs are those of
// quantize_whole_tiles for silu(gate) up, but for the row-major copy.
extern "C" __global__ void __launch_bounds__(UNITS, CUBES)
quantize_waiting_swiglu(const u8 *gate, const u8 *up, u8 *transposed, float *scales, const float *scales_of_gate,
                        const float *scales_of_up, const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u32 of_warps[2][UNITS / 32];
    // The codes of a line's gate and up wait where its product goes.
    uint4 *const held = (uint4 *)memory + threadIdx.x;
    u32 *const staged = (u32 *)(memory + TILE * TILE * ELEMENT_BYTES);
    float *const of_rows = (float *)staged;
    const FirstPatch first = first_patch(numbers);
    copy_codes((uint2 *)held, gate, first, (u32)numbers.cols);
    copy_codes((uint2 *)held + 1, up, first, (u32)numbers.cols);
    copy_scales(of_rows, scales_of_gate, scales_of_up, numbers);
    copies_wait();
    // Those of other threads too.
    __syncthreads();
    u32 largest = 0;
#pragma unroll 2
    for (int line = 0; line < LINES; line++) {
        const float *const of_row = of_rows + row_of(first, line);
        const Line of_gate = read_codes((const uint2 *)held, line, of_row[0]);
        const Line of_up = read_codes((const uint2 *)held + 1, line, of_row[TILE]);
        Line product;
        swiglu(product.words, of_gate.words, of_up.words);
        write_line(held, line, product);
        largest = larger(largest, product);
    }
    const u32 absmax = largest_of_tile(float_bits(largest), of_warps[0]);
    const Key key = {{numbers.seed[0], numbers.seed[1]}, {numbers.stream[0], numbers.stream[1]}};
    Random random;
    const Outputs to = {nullptr, transposed, scales};
    quantize_tile(to, held, staged, of_warps[1], first, absmax, 0.0f, random, key, numbers);
}
