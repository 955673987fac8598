// The gate of SwiGLU as a linear layer reads it, quantized as it is computed from gate and up as these flow, in blocks: in
// front of this text stand tile.cu, pairs.cu, arithmetic.cu, and the codes.cu of blocks. A knob beside theirs:
//   CUBES   cubes that share a multiprocessor

// gate, up: codes, [rows, cols], and their scales, all dense. The outputs are those of quantize_whole_tiles for
// silu(gate) up.
extern "C" __global__ void __launch_bounds__(UNITS, CUBES)
quantize_swiglu_of_codes(const u8 *gate, const float *scales_of_gate, const u8 *up, const float *scales_of_up,
                         u8 *values, u8 *transposed, float *scales, const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u32 of_warps[2][UNITS / 32];
    // The codes of a line of both wait where its elements go.
    uint4 *const held = (uint4 *)memory + threadIdx.x;
    u32 *const staged = (u32 *)(memory + TILE * TILE * ELEMENT_BYTES);
    const FirstPatch first = first_patch(numbers);
    copy_codes((uint2 *)held, gate, first, (u32)numbers.cols);
    copy_codes((uint2 *)held + 1, up, first, (u32)numbers.cols);
    const u32 scale = code_scale_index(0, numbers);
    const float of_gate = __ldg(scales_of_gate + scale), of_up = __ldg(scales_of_up + scale);
    copies_wait();
    u32 largest = 0;
#pragma unroll 2
    for (int line = 0; line < LINES; line++) {
        Line product;
        swiglu(product.words, read_codes((const uint2 *)held, line, of_gate).words,
               read_codes((const uint2 *)held + 1, line, of_up).words);
        write_line(held, line, product);
        largest = larger(largest, product);
    }
    Random random;
    quantize_computed({values, transposed, scales}, held, staged, of_warps, first, largest, random, numbers);
}
