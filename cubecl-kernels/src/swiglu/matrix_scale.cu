// The gate of SwiGLU as the input of a linear layer, quantized to FP8 by delayed scaling as it is computed: in front of
// this text stand the tile.cu of one scale for a matrix and arithmetic.cu.

// gate, up: [rows, cols], of 16-bit elements, dense.
struct Swiglu {
    const u8 *__restrict__ gate, *__restrict__ up;

    __device__ __forceinline__ void read(Rows &rows, const Place &place, const Numbers &numbers) const {
        const u64 from = place.row() * numbers.cols + place.col();
        Rows gates, ups;
        read_rows(gates, gate, from, numbers.cols);
        read_rows(ups, up, from, numbers.cols);
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
            swiglu(rows[r].words, gates[r].words, ups[r].words);
    }
};

// The outputs are those of quantize_delayed for silu(gate) up.
extern "C" __global__ void __launch_bounds__(UNITS, 5)
    quantize_swiglu_delayed(const u8 *__restrict__ gate, const u8 *__restrict__ up, const float *__restrict__ delayed,
                            u8 *__restrict__ values, u8 *__restrict__ transposed, float *__restrict__ scale,
                            float *__restrict__ absmax, Counters *counters, const __grid_constant__ Numbers numbers) {
    quantize(Swiglu{gate, up}, {delayed[numbers.layer], values, transposed, scale, absmax}, counters, numbers);
}
