// Quantizes matrices in tiles that are whole blocks: tile.cu, which stands before this text, says how.
//
// Knobs beside those: CUBES, cubes that share a multiprocessor.

// x: [batch, rows, cols], its columns dense, rows and matrices at multiples of 16 bytes. values: [batch, rows, cols],
// transposed: [batch, cols, rows], scales: [batch, rows / 128, cols / 128], all dense. With FALLBACK: residual_values
// as values, residual_scales and flags as scales, thresholds: [layers], counts: [layers, 2]; else they are not touched.
extern "C" __global__ void __launch_bounds__(UNITS, CUBES)
quantize_whole_tiles(const u8 *x, u8 *values, u8 *transposed, float *scales, u8 *residual_values,
                     float *residual_scales, u32 *flags, const float *thresholds, int *counts,
                     const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u32 of_warps[2][UNITS / 32];
    uint4 *const held = (uint4 *)memory + threadIdx.x;
    u32 *const staged = (u32 *)(memory + TILE * TILE * ELEMENT_BYTES);
    const FirstPatch first = first_patch(numbers);
    const u32 row_stride = (u32)numbers.row_stride;
    const u32 row_start = blockIdx.z * (u32)numbers.batch_stride + (blockIdx.y * TILE + first.row) * row_stride;
    copy_patches(held, x, row_start + blockIdx.x * TILE + first.col, row_stride);
    const float threshold = FALLBACK ? thresholds[numbers.layer] : 0.0f;
    const Key key = key_of(numbers);
    Random random;
#if DRAW_EARLY
    draw_all(random, (uint4 *)staged + threadIdx.x, first, key);
#endif
    copies_wait();
    u32 largest = 0;
#pragma unroll
    for (int line = 0; line < LINES; line++)
        largest = larger(largest, read_line(held, line));
    const u32 absmax = largest_of_tile(float_bits(largest), of_warps[0]);
    const Outputs to = {values,          transposed, scales, residual_values,
                        residual_scales, flags,      counts + 2 * numbers.layer};
    quantize_tile(to, held, staged, of_warps[1], first, absmax, threshold, random, key, numbers);
}
