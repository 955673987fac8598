// Values as they wait for the backward pass, gate and up, and a norm's input: INT8 to nearest in groups of 128 neighbours,
// of which each row of a tile is one. In front of this text stand tile.cu and arithmetic.cu. The numbers are those of
// quantize and dequantize.

#define ROWS_OF_BOTH (2 * TILE)

// The row of a tile in which a thread's line lies.
__device__ __forceinline__ u32 row_of(const FirstPatch &first, int line) {
    return first.row + row_of_line(line);
}

// Where the scale of a row of this tile is among those of the matrix.
__device__ __forceinline__ u32 scale_index(u32 row, const Numbers &numbers) {
    return ((blockIdx.z * (u32)numbers.rows + blockIdx.y * TILE + row) * gridDim.x) + blockIdx.x;
}

// ---- To codes -------------------------------------------------------------------------------------------------------

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

// ---- From codes -----------------------------------------------------------------------------------------------------

// Starts to copy the codes of the thread's patches, each line to a half of where its elements will wait.
__device__ __forceinline__ void copy_codes(uint2 *held, const u8 *values, const FirstPatch &first, u32 cols) {
#pragma unroll
    for (int line = 0; line < LINES; line++) {
        const u32 at = first.offset + row_of_line(line) * cols;
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(held + 2 * line * UNITS)),
                     "l"(values + at), "n"(PATCH_COLS));
    }
}

// Starts to copy the scales of the rows of both, each thread one, those of up behind those of gate.
__device__ __forceinline__ void copy_scales(float *scales, const float *gate_scales, const float *up_scales,
                                            const Numbers &numbers) {
    const float *const of_factor = threadIdx.x / TILE ? up_scales : gate_scales;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(scales + threadIdx.x)),
                 "l"(of_factor + scale_index(threadIdx.x % TILE, numbers)), "n"(4));
}

// The elements of a line whose codes were copied.
__device__ __forceinline__ Line read_codes(const uint2 *held, int line, float scale) {
    u32 codes[2];
    asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(codes[0]), "=r"(codes[1])
                 : "r"(shared_address(held + 2 * line * UNITS)));
    Line read;
    decode_int8(read.words, make_uint2(codes[0], codes[1]), scale);
    return read;
}
