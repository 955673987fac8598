// GELU as a linear layer reads it, or its gradient as the layer in front of it does, quantized to FP8 by one scale as it
// is computed, from the input as that flows: in front of this text stand the tile.cu and the codes.cu of one scale for a
// matrix, pairs.cu, and arithmetic.cu.

#if GRADIENT
// What the slope does not exceed where |x| does not exceed `most`, which is not negative: its own is 0.8 at most. What is
// not finite stays.
__device__ __forceinline__ float most_of(float most) {
    return __float_as_uint(most) < INFINITE ? fminf(1.13f, fmaf(most, 0.8f, 0.5f)) : most;
}
#else
// What GELU does not exceed where |x| does not exceed `most`, which is not negative: p <= 0.4.
__device__ __forceinline__ float most_of(float most) { return most * fminf(1.0f, fmaf(most, 0.4f, 0.5f)); }
#endif

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
