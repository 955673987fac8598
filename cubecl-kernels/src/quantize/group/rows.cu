// Quantizes a matrix without gaps to FP8 in groups along its rows, to nearest, on CUDA's sm_90, by the conversion that
// this hardware has: without it eight elements take more than a hundred instructions, and those bound the kernel. The
// numbers are those of quantize_rows_kernel, the portable kernel in rows.rs, to the bit.
//
// Knobs, defined in front of this text, beside those of patch.cu and of group/scale.cu, which come before it; elements
// have 16 bits:
//   GROUP    elements of a group, 16 to 256
//   PIECES   pieces of eight elements that a thread has
// and the structure Numbers.

#define UNITS 256
#define EVERYONE 0xffffffffu
// Threads that have a group.
#define LANES (GROUP / PATCH_COLS)

// x: so many pieces of 8 elements, values alike, scales: [pieces / LANES].
extern "C" __global__ void __launch_bounds__(UNITS)
    quantize_groups_of_rows(const u8 *__restrict__ x, u8 *__restrict__ values, Scale *__restrict__ scales,
                            const __grid_constant__ Numbers numbers) {
    const u64 first = (u64)blockIdx.x * (UNITS * PIECES) + threadIdx.x;
    Row pieces[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        // Threads past the last piece wait with the others.
        const uint4 vector = __ldg((const uint4 *)x + min(first + p * UNITS, numbers.pieces - 1));
        u32 *const words = pieces[p].words;
        words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        u32 largest = larger(0, pieces[p]);
#pragma unroll
        for (int distance = 1; distance < LANES; distance *= 2)
            largest = larger_pair(largest, __shfl_xor_sync(EVERYONE, largest, distance));
        const u64 at = first + p * UNITS;
        if (at < numbers.pieces) {
            const OfGroup group = of_group(float_bits(largest));
            if (threadIdx.x % LANES == 0)
                scales[at / LANES] = group.scale;
            const bool zeros = group.inverse == 0.0f;
            const u32 codes[2] = {codes_of(pieces[p], 0, group.inverse), codes_of(pieces[p], 4, group.inverse)};
            ((uint2 *)values)[at] = make_uint2(zeros ? 0 : codes[0], zeros ? 0 : codes[1]);
        }
    }
}
