// GELU as a linear layer reads it, or its gradient as the layer in front of it does, quantized to FP8 by one scale as it
// is computed, from the input as that flows: in front of this text stand the tile.cu and the codes.cu of one scale for a
// matrix, and pairs.cu. A knob beside theirs:
//   GRADIENT   1: the gradient; 0: GELU

// ---- The arithmetic and the numbers of gelu.rs, in the functions that CubeCL writes for it ----------------------------

// The distribution function of the standard normal distribution, and its density.
struct Normal {
    float distribution, density;
};

__device__ __forceinline__ Normal normal(float x) {
    const float magnitude = fabsf(x);
    const float power = expf(__fmul_rn(__fmul_rn(-0.5f, magnitude), magnitude));
    // What __fdividef makes of 1 and a number up to 8.
    float t;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(__fmaf_rn(0.35f, fminf(magnitude, 20.0f), 1.0f)));
    const float tail_of[] = {0.1396213f,  0.13986352f, 0.119821295f, 0.10555249f, -0.02321232f,
                             0.15931965f, -0.255839f,   0.14403093f,  -0.029157888f};
    float polynomial = tail_of[8];
#pragma unroll
    for (int power_of_t = 7; power_of_t >= 0; power_of_t--)
        polynomial = __fmaf_rn(polynomial, t, tail_of[power_of_t]);
    const float tail = __fmul_rn(__fmul_rn(polynomial, t), power);
    return {x >= 0.0f ? __fsub_rn(1.0f, tail) : tail, __fmul_rn(0.3989423f, power)};
}

#if GRADIENT
// dy P(x) + dy x p(x), in the place of x.
__device__ __forceinline__ void compute(u32 (&words)[PATCH_COLS / 2], const u32 (&gradient)[PATCH_COLS / 2]) {
#pragma unroll
    for (int i = 0; i < PATCH_COLS / 2; i++) {
        Pair pair = pair_of(words[i]);
        const Pair dy = pair_of(gradient[i]);
#pragma unroll
        for (int of = 0; of < 2; of++) {
            const float x = pair.of[of];
            const Normal at = normal(x);
            pair.of[of] = __fmul_rn(dy.of[of], __fmaf_rn(x, at.density, at.distribution));
        }
        words[i] = word_of(pair);
    }
}

// What the slope does not exceed where |x| does not exceed `most`, which is not negative: its own is 0.8 at most. What is
// not finite stays.
__device__ __forceinline__ float most_of(float most) {
    return __float_as_uint(most) < INFINITE ? fminf(1.13f, fmaf(most, 0.8f, 0.5f)) : most;
}
#else
// x P(x), in its place.
__device__ __forceinline__ void compute(u32 (&words)[PATCH_COLS / 2]) {
#pragma unroll
    for (int i = 0; i < PATCH_COLS / 2; i++) {
        Pair pair = pair_of(words[i]);
#pragma unroll
        for (int of = 0; of < 2; of++)
            pair.of[of] = __fmul_rn(pair.of[of], normal(pair.of[of]).distribution);
        words[i] = word_of(pair);
    }
}

// What GELU does not exceed where |x| does not exceed `most`, which is not negative: p <= 0.4.
__device__ __forceinline__ float most_of(float most) { return most * fminf(1.0f, fmaf(most, 0.4f, 0.5f)); }
#endif

// ---- The kernel -----------------------------------------------------------------------------------------------------

struct Gelu {
    static const bool BOUNDED = true;
    Codes x;
#if GRADIENT
    // [rows, cols], of 16-bit elements, dense.
    const u8 *__restrict__ gradient;
#endif

    __device__ __forceinline__ void read(Rows &rows, const Place &place, const Numbers &numbers) const {
        const u64 from = place.row() * numbers.cols + place.col();
        x.read(rows, from, numbers.cols);
#if GRADIENT
        Rows gradients;
        read_rows(gradients, gradient, from, numbers.cols);
#endif
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
#if GRADIENT
            compute(rows[r].words, gradients[r].words);
#else
            compute(rows[r].words);
#endif
    }

    __device__ __forceinline__ void bound(float (&bounds)[1], u64 piece) const {
        bounds[0] = most_of(x.bound(piece));
#if GRADIENT
        Row gradients;
        read_row(gradients, gradient, piece);
        bounds[0] *= SLACK * largest_in(gradients);
#endif
    }

    __device__ __forceinline__ void look(u32 (&largest)[1], u64 piece) const {
        Row elements;
        x.read(elements, piece);
#if GRADIENT
        Row gradients;
        read_row(gradients, gradient, piece);
        compute(elements.words, gradients.words);
#else
        compute(elements.words);
#endif
        largest[0] = max(largest[0], float_bits(larger(0, elements)));
    }
};

// x: codes, [rows, cols], and their scales. The outputs are those of quantize_by_matrix for GELU, or its gradient.
extern "C" __global__ void __launch_bounds__(UNITS, 4)
    quantize_gelu_by_matrix(const u8 *__restrict__ x, const float *__restrict__ scales_of_x,
#if GRADIENT
                            const u8 *__restrict__ gradient,
#endif
                            u8 *__restrict__ values, u8 *__restrict__ transposed, float *__restrict__ scale,
                            Counters *counters, const __grid_constant__ Numbers numbers) {
#if GRADIENT
    const Gelu gelu = {{x, scales_of_x}, gradient};
#else
    const Gelu gelu = {{x, scales_of_x}};
#endif
    quantize(gelu, {values, transposed, scale}, counters, numbers);
}
