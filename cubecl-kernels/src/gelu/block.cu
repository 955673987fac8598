// GELU as a linear layer reads it, or its gradient as the layer in front of it does, quantized as it is computed from the
// input as that flows, in blocks: in front of this text stand tile.cu, pairs.cu, arithmetic.cu, and the codes.cu of blocks.
// Knobs beside theirs:
//   CUBES            cubes that share a multiprocessor
//   GRADIENT_CODES   1: the gradient of the output is codes too, with scales behind it; 0: 16-bit elements

// x, gradient: [rows, cols], dense, and the scales of codes. The outputs are those of quantize_whole_tiles for GELU, or its
// gradient.
extern "C" __global__ void __launch_bounds__(UNITS, CUBES)
quantize_gelu_by_blocks(const u8 *x, const float *scales_of_x,
#if GRADIENT
                        const u8 *gradient,
#if GRADIENT_CODES
                        const float *scales_of_gradient,
#endif
#endif
                        u8 *values, u8 *transposed, float *scales, const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u32 of_warps[2][UNITS / 32];
    uint4 *const held = (uint4 *)memory + threadIdx.x;
    u32 *const staged = (u32 *)(memory + TILE * TILE * ELEMENT_BYTES);
    // Where the copy is staged once all threads have computed.
    uint2 *const codes = (uint2 *)staged + threadIdx.x;
    const FirstPatch first = first_patch(numbers);
    copy_codes<1>(codes, x, first, (u32)numbers.cols);
#if GRADIENT_CODES
    copy_codes((uint2 *)held, gradient, first, (u32)numbers.cols);
    const float of_gradient = __ldg(scales_of_gradient + code_scale_index(0, numbers));
#elif GRADIENT
    copy_patches(held, gradient, first.offset, (u32)numbers.cols);
#endif
    const float of_x = __ldg(scales_of_x + code_scale_index(0, numbers));
    copies_wait();
    u32 largest = 0;
#pragma unroll 2
    for (int line = 0; line < LINES; line++) {
        Line elements = read_codes<1>(codes, line, of_x);
#if GRADIENT_CODES
        compute(elements.words, read_codes((const uint2 *)held, line, of_gradient).words);
#elif GRADIENT
        compute(elements.words, read_line(held, line).words);
#else
        compute(elements.words);
#endif
        write_line(held, line, elements);
        largest = larger(largest, elements);
    }
    Random random;
    quantize_computed({values, transposed, scales}, held, staged, of_warps, first, largest, random, numbers);
}
