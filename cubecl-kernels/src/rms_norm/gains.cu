// The gains of RMSNorm's columns, and what they make of elements: in front of this text stands pairs.cu.
//
// A knob, defined in front of this text:
//   GAIN_F32   1: gains are FP32; 0: of the type of the elements
// and PATCH_COLS, the columns of a thread.

// Those of a thread's columns.
struct Gains {
    float of[PATCH_COLS];
};

__device__ __forceinline__ Gains read_gains(const unsigned char *gain, unsigned int col) {
    Gains gains;
#if GAIN_F32
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 four = __ldg((const float4 *)gain + col / 4 + half);
        float *const of = gains.of + 4 * half;
        of[0] = four.x, of[1] = four.y, of[2] = four.z, of[3] = four.w;
    }
#else
    const uint4 vector = __ldg((const uint4 *)gain + col / PATCH_COLS);
    const unsigned int words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < PATCH_COLS / 2; i++) {
        const Pair pair = pair_of(words[i]);
        gains.of[2 * i] = pair.of[0], gains.of[2 * i + 1] = pair.of[1];
    }
#endif
    return gains;
}

// The elements of a row times its inverse root mean square and the gains, rounded once.
__device__ __forceinline__ void normalize(unsigned int (&words)[PATCH_COLS / 2], float inverse_rms,
                                          const Gains &gains) {
#pragma unroll
    for (int i = 0; i < PATCH_COLS / 2; i++) {
        Pair pair = pair_of(words[i]);
#pragma unroll
        for (int of = 0; of < 2; of++)
            pair.of[of] = __fmul_rn(__fmul_rn(pair.of[of], inverse_rms), gains.of[2 * i + of]);
        words[i] = word_of(pair);
    }
}
