// The gate of SwiGLU as the input of a linear layer, quantized as it is computed: in front of this text stand tile.cu,
// pairs.cu, arithmetic.cu, the codes.cu of blocks, and contexts.cu. Knobs beside theirs:
//   CUBES      cubes that share a multiprocessor
//   CONTEXTS   1: gate and up are written as they wait for the backward pass, too

// gate, up: [rows, cols], of 16-bit elements, dense. The outputs are those of quantize_whole_tiles for silu(gate) up, and
// behind them the codes and the scales of gate and of up.
extern "C" __global__ void __launch_bounds__(UNITS, CUBES)
quantize_swiglu(const u8 *gate, const u8 *up, u8 *values, u8 *transposed, float *scales, u8 *residual_values,
                float *residual_scales, u32 *flags, const float *thresholds, int *counts,
                u8 *gate_values, float *gate_scales, u8 *up_values, float *up_scales,
                const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u32 of_warps[2][UNITS / 32];
    uint4 *const held = (uint4 *)memory + threadIdx.x;
    // Its place is that of the staged copy, once all threads have multiplied.
    u32 *const staged = (u32 *)(memory + TILE * TILE * ELEMENT_BYTES);
    const uint4 *const ups = (const uint4 *)staged + threadIdx.x;
    const FirstPatch first = first_patch(numbers);
    copy_patches(held, gate, first.offset, (u32)numbers.cols);
    copy_patches((uint4 *)ups, up, first.offset, (u32)numbers.cols);
    const float threshold = FALLBACK ? thresholds[numbers.layer] : 0.0f;
    const Key key = key_of(numbers);
    copies_wait();
#if CONTEXTS
    u32 *const of_rows = (u32 *)(memory + 2 * TILE * TILE * ELEMENT_BYTES);
    float *const inverses = (float *)(of_rows + ROWS_OF_BOTH);
#pragma unroll 2
    for (int line = 0; line < LINES; line++)
        note_rows(of_rows, first, line, read_line(held, line), read_line(ups, line));
    __syncthreads();
    scale_rows(inverses, of_rows, gate_scales, up_scales, numbers);
    __syncthreads();
#endif
    u32 largest = 0;
#pragma unroll 2
    for (int line = 0; line < LINES; line++) {
        const Line of_gate = read_line(held, line), of_up = read_line(ups, line);
#if CONTEXTS
        const float *const of_row = inverses + row_of(first, line);
        write_codes(gate_values, first, line, of_gate, of_row[0], (u32)numbers.cols);
        write_codes(up_values, first, line, of_up, of_row[TILE], (u32)numbers.cols);
#endif
        Line product;
        swiglu(product.words, of_gate.words, of_up.words);
        write_line(held, line, product);
        largest = larger(largest, product);
    }
    const u32 absmax = largest_of_tile(float_bits(largest), of_warps[0]);
    Random random;
    const Outputs to = {values,          transposed, scales, residual_values,
                        residual_scales, flags,      counts + 2 * numbers.layer};
    quantize_tile(to, held, staged, of_warps[1], first, absmax, threshold, random, key, numbers);
}
