// The gradients of SwiGLU's two factors, quantized as they are computed: in front of this text stand tile.cu, pairs.cu,
// arithmetic.cu, and the codes.cu of blocks. Knobs beside theirs:
//   CUBES            cubes that share a multiprocessor
//   GRADIENT_CODES   1: the gradient of the output is codes, of which each tile has a scale; 0: 16-bit elements
// and of CODES also: if not 0, gate and up are codes. Scales of what is read stand behind the outputs.

#if CODES
// Starts to copy the scales of the rows of both, each thread one, those of up behind those of gate.
__device__ __forceinline__ void copy_scales(float *scales, const float *gate_scales, const float *up_scales,
                                            const Numbers &numbers) {
    const float *const of_factor = threadIdx.x / TILE ? up_scales : gate_scales;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(scales + threadIdx.x)),
                 "l"(of_factor + code_scale_index(threadIdx.x % TILE, numbers)), "n"(4));
}
#endif

// gate, up, gradient: [rows, cols], dense. The outputs are those of quantize_whole_tiles for the
// gradients of gate and of up.
extern "C" __global__ void __launch_bounds__(UNITS, CUBES)
quantize_swiglu_gradients(const u8 *gate, const u8 *up, const u8 *gradient, u8 *gate_values, u8 *gate_transposed,
                          float *gate_scales, u8 *up_values, u8 *up_transposed, float *up_scales,
                          const float *scales_of_gate, const float *scales_of_up, const float *scales_of_gradient,
                          const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u32 of_warps[2][UNITS / 32];
    uint4 *const gates = (uint4 *)memory + threadIdx.x;
    uint4 *const ups = gates + LINES * UNITS;
    u32 *const staged = (u32 *)(memory + 2 * TILE * TILE * ELEMENT_BYTES);
    const FirstPatch first = first_patch(numbers);
    const u32 cols = (u32)numbers.cols;
#if CODES
    // What is read of a line waits where its results go: the codes of both in the place of the gate, the gradient in
    // that of up. Less shared memory leaves more of the L1 cache, through which eight bytes at once go.
    const uint4 *const gradients = ups;
    float *const of_rows = (float *)staged;
    copy_codes((uint2 *)gates, gate, first, cols);
    copy_codes((uint2 *)gates + 1, up, first, cols);
    copy_scales(of_rows, scales_of_gate, scales_of_up, numbers);
#else
    // Its place is that of the staged copies, once all threads have multiplied.
    const uint4 *const gradients = (const uint4 *)staged + threadIdx.x;
    copy_patches(gates, gate, first.offset, cols);
    copy_patches(ups, up, first.offset, cols);
#endif
#if GRADIENT_CODES
    copy_codes((uint2 *)gradients, gradient, first, cols);
    const float of_gradient = __ldg(scales_of_gradient + tile_index());
#else
    copy_patches((uint4 *)gradients, gradient, first.offset, cols);
#endif
    copies_wait();
#if CODES
    // Those of other threads too.
    __syncthreads();
#endif
    u32 largest_gate = 0, largest_up = 0;
#pragma unroll 2
    for (int line = 0; line < LINES; line++) {
#if CODES
        const float *const of_row = of_rows + row_of(first, line);
        Line of_gate = read_codes((const uint2 *)gates, line, of_row[0]);
        Line of_up = read_codes((const uint2 *)gates + 1, line, of_row[TILE]);
#else
        Line of_gate = read_line(gates, line), of_up = read_line(ups, line);
#endif
#if GRADIENT_CODES
        const Line of_output = read_codes((const uint2 *)gradients, line, of_gradient);
#else
        const Line of_output = read_line(gradients, line);
#endif
        swiglu_backward(of_gate.words, of_up.words, of_output.words);
        write_line(gates, line, of_gate);
        write_line(ups, line, of_up);
        largest_gate = larger(largest_gate, of_gate);
        largest_up = larger(largest_up, of_up);
    }
    const u32 gate_absmax = largest_of_tile(float_bits(largest_gate), of_warps[0]);
    const u32 up_absmax = largest_of_tile(float_bits(largest_up), of_warps[1]);
    Random random;
    const Key gate_key = key_of(numbers);
    const Outputs to_gate = {gate_values, gate_transposed, gate_scales};
    quantize_tile(to_gate, gates, staged, of_warps[0], first, gate_absmax, 0.0f, random, gate_key, numbers);
    __syncthreads();
    const Key up_key = {{numbers.up_seed[0], numbers.up_seed[1]}, {numbers.up_stream[0], numbers.up_stream[1]}};
    const Outputs to_up = {up_values, up_transposed, up_scales};
    quantize_tile(to_up, ups, staged, of_warps[0], first, up_absmax, 0.0f, random, up_key, numbers);
}
