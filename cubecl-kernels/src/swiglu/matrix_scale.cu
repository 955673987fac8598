// The gate of SwiGLU as the input of a linear layer, quantized to FP8 by one scale as it is computed: in front of this
// text stand the tile.cu of one scale for a matrix, pairs.cu, codes.cu, arithmetic.cu and factors.cu.

struct Swiglu {
    static const bool BOUNDED = CODES > 0;
    Factors factors;

    __device__ __forceinline__ void read(Rows &rows, const Place &place, const Numbers &numbers) const {
        Rows gates, ups;
        factors.read(gates, ups, place.row() * numbers.cols + place.col(), numbers);
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
            swiglu(rows[r].words, gates[r].words, ups[r].words);
    }

#if CODES
    __device__ __forceinline__ void bound(float (&bounds)[1], u64 piece) const {
        bounds[0] = most_of_silu(factors.gate.bound(piece)) * factors.up.bound(piece);
    }

    __device__ __forceinline__ void look(u32 (&largest)[1], u64 piece) const {
        Row gates, ups, out;
        factors.read(gates, ups, piece);
        swiglu(out.words, gates.words, ups.words);
        largest[0] = max(largest[0], float_bits(larger(0, out)));
    }
#endif
};

// The outputs are those of quantize_by_matrix for silu(gate) up.
#if DELAYED
extern "C" __global__ void __launch_bounds__(UNITS, 5)
    quantize_swiglu_by_matrix(FACTORS, const float *__restrict__ delayed, u8 *__restrict__ values,
                              u8 *__restrict__ transposed, float *__restrict__ scale, float *__restrict__ absmax,
                              Counters *counters, const __grid_constant__ Numbers numbers) {
    const Output output = {delayed[numbers.layer], values, transposed, scale, absmax};
    quantize(Swiglu{FACTORS_OF_KERNEL}, output, counters, numbers);
}
#else
extern "C" __global__ void __launch_bounds__(UNITS, 4)
    quantize_swiglu_by_matrix(FACTORS, u8 *__restrict__ values, u8 *__restrict__ transposed, float *__restrict__ scale,
                              Counters *counters, const __grid_constant__ Numbers numbers) {
    quantize(Swiglu{FACTORS_OF_KERNEL}, {values, transposed, scale}, counters, numbers);
}
#endif
