// A matrix that waits or flows as INT8 codes, of which a thread reads the patches of its tile: in front of this text stand
// tile.cu and pairs.cu. The elements are those of dequantize.
//
// Knobs, defined in front of this text:
//   CODES   1: each row of a tile has a scale, a group of 128 neighbours; 2: each tile has one, a block; 0: no codes are read

// The row of a tile in which a thread's line lies.
__device__ __forceinline__ u32 row_of(const FirstPatch &first, int line) {
    return first.row + row_of_line(line);
}

// Where the scale of a row of this tile is among those of groups of 128.
__device__ __forceinline__ u32 scale_index(u32 row, const Numbers &numbers) {
    return ((blockIdx.z * (u32)numbers.rows + blockIdx.y * TILE + row) * gridDim.x) + blockIdx.x;
}

// Where that of the codes which are read is.
__device__ __forceinline__ u32 code_scale_index(u32 row, const Numbers &numbers) {
#if CODES == 2
    return tile_index();
#else
    return scale_index(row, numbers);
#endif
}

// Starts to copy the codes of the thread's patches, a line `Step` times UNITS vectors behind the other: with 2, to a half of
// where its elements will wait.
template <int Step = 2>
__device__ __forceinline__ void copy_codes(uint2 *held, const u8 *values, const FirstPatch &first, u32 cols) {
#pragma unroll
    for (int line = 0; line < LINES; line++) {
        const u32 at = first.offset + row_of_line(line) * cols;
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(held + Step * line * UNITS)),
                     "l"(values + at), "n"(PATCH_COLS));
    }
}

// The elements of a line whose codes were copied so.
template <int Step = 2> __device__ __forceinline__ Line read_codes(const uint2 *held, int line, float scale) {
    u32 codes[2];
    asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(codes[0]), "=r"(codes[1])
                 : "r"(shared_address(held + Step * line * UNITS)));
    Line read;
    decode_int8(read.words, make_uint2(codes[0], codes[1]), scale);
    return read;
}

// Quantizes what a kernel has computed of codes in their place, of this largest magnitude as `larger` gives it, by the key
// among the numbers.
__device__ __forceinline__ void quantize_computed(const Outputs &to, const uint4 *held, u32 *staged,
                                                  u32 (&of_warps)[2][UNITS / 32], const FirstPatch &first, u32 largest,
                                                  Random &random, const Numbers &numbers) {
    const u32 absmax = largest_of_tile(float_bits(largest), of_warps[0]);
    quantize_tile(to, held, staged, of_warps[1], first, absmax, 0.0f, random, key_of(numbers), numbers);
}
