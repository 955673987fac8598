// What norms have for each column and find of each row, and what they make of elements by it, in the order of operations
// of rms_norm.rs and layer_norm.rs: in front of this text stands pairs.cu.
//
// Knobs, defined in front of this text:
//   GAIN_F32   1: gains and biases are FP32; 0: of the type of the elements
//   CENTRED    1: layer normalization; 0: RMSNorm
//   BIAS       1: it has a bias
// and PATCH_COLS, the columns of a thread.

// The numbers of a thread's columns.
struct OfColumns {
    float of[PATCH_COLS];

    __device__ __forceinline__ void read(const unsigned char *__restrict__ from, unsigned int col) {
#if GAIN_F32
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float4 four = __ldg((const float4 *)from + col / 4 + half);
            float *const to = of + 4 * half;
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        }
#else
        const uint4 vector = __ldg((const uint4 *)from + col / PATCH_COLS);
        const unsigned int words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
        for (int i = 0; i < PATCH_COLS / 2; i++) {
            const Pair pair = pair_of(words[i]);
            of[2 * i] = pair.of[0], of[2 * i + 1] = pair.of[1];
        }
#endif
    }

    __device__ __forceinline__ float largest() const {
        float largest = 0.0f;
#pragma unroll
        for (float number : of)
            largest = __uint_as_float(max(__float_as_uint(largest), __float_as_uint(fabsf(number))));
        return largest;
    }
};

struct Columns {
    OfColumns gains;
#if BIAS
    OfColumns biases;
#endif
};

// What is found of a row: the inverse root mean square, or that of the deviation, and the mean.
struct OfRow {
    float inverse;
#if CENTRED
    float mean;
#endif
};

// The elements of a row, normalized, times the gains and plus the biases, rounded once.
__device__ __forceinline__ void normalize(unsigned int (&words)[PATCH_COLS / 2], const OfRow &row,
                                          const Columns &columns) {
#pragma unroll
    for (int i = 0; i < PATCH_COLS / 2; i++) {
        Pair pair = pair_of(words[i]);
#pragma unroll
        for (int of = 0; of < 2; of++) {
            float x = pair.of[of];
#if CENTRED
            x = __fsub_rn(x, row.mean);
#endif
            x = __fmul_rn(x, row.inverse);
            const float gain = columns.gains.of[2 * i + of];
#if BIAS
            pair.of[of] = __fmaf_rn(x, gain, columns.biases.of[2 * i + of]);
#else
            pair.of[of] = __fmul_rn(x, gain);
#endif
        }
        words[i] = word_of(pair);
    }
}

// What kernels take for rows and columns, and which of it is not there.
#if CENTRED
#define MEANS const float *__restrict__ means,
#else
#define MEANS
#endif
#if BIAS
#define BIASES const unsigned char *__restrict__ bias,
#else
#define BIASES
#endif
#define NORM MEANS const float *__restrict__ inverses, const unsigned char *__restrict__ gain, BIASES
