// The gradients of SwiGLU's two factors, quantized to FP8 by one scale each as they are computed: in front of this text
// stand the tile.cu of one scale for a matrix, pairs.cu, codes.cu, arithmetic.cu and factors.cu.

// gradient: [rows, cols], of 16-bit elements, dense.
struct Inputs {
    Factors factors;
    const u8 *__restrict__ gradient;

    // Both gradients.
    __device__ __forceinline__ void read(Rows &of_gate, Rows &of_up, const Place &place,
                                         const Numbers &numbers) const {
        const u64 from = place.row() * numbers.cols + place.col();
        Rows gradients;
        factors.read(of_gate, of_up, from, numbers);
        read_rows(gradients, gradient, from, numbers.cols);
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
            swiglu_backward(of_gate[r].words, of_up[r].words, gradients[r].words);
    }

#if CODES
    __device__ __forceinline__ void bound(float (&bounds)[2], u64 piece) const {
        const float of_gate = factors.gate.bound(piece), of_up = factors.up.bound(piece);
        Row gradients;
        read_row(gradients, gradient, piece);
        const float most = largest_in(gradients);
        bounds[0] = most_of_slope(of_gate) * of_up * most;
        bounds[1] = most_of_silu(of_gate) * most;
    }

    __device__ __forceinline__ void look(u32 (&largest)[2], u64 piece) const {
        Row of_gate, of_up, gradients;
        factors.read(of_gate, of_up, piece);
        read_row(gradients, gradient, piece);
        swiglu_backward(of_gate.words, of_up.words, gradients.words);
        largest[0] = max(largest[0], float_bits(larger(0, of_gate)));
        largest[1] = max(largest[1], float_bits(larger(0, of_up)));
    }
#endif
};

// Quantizes both gradients of a tile.
__device__ __forceinline__ void quantize_both(const Rows &gates, const Rows &ups, const Output (&outputs)[2],
                                              Staging (&staging)[2], const Place &place, const float (&inverses)[2],
                                              const Numbers &numbers) {
    quantize_rows(gates, outputs[0].values, outputs[0].transposed, staging[0], place, inverses[0], numbers);
    quantize_rows(ups, outputs[1].values, outputs[1].transposed, staging[1], place, inverses[1], numbers);
}

__device__ __forceinline__ void quantize_gradients(const Inputs &inputs, const Output (&outputs)[2], Counters *counters,
                                                   const Numbers &numbers) {
    __shared__ __align__(16) Staging staging[2];
    __shared__ u32 of_warps[2][UNITS / 32], shared;
    Rows gates, ups;
    if (outputs[0].has_history() && outputs[1].has_history()) {
        const Place place((u64)blockIdx.y * TILE_ROWS, (u64)blockIdx.x * TILE_COLS);
        inputs.read(gates, ups, place, numbers);
        quantize_both(gates, ups, outputs, staging, place, {outputs[0].inverse(0), outputs[1].inverse(0)}, numbers);
        note(&counters->largest[0], bits_of(gates), of_warps[0]);
        note(&counters->largest[1], bits_of(ups), of_warps[1]);
    } else {
        const u32 tiles = tiles_of(numbers);
#if CODES
        look_where_needed<2>(
            counters, numbers, &shared, of_warps,
            [&](float(&bounds)[2], u64 piece) { inputs.bound(bounds, piece); },
            [&](u32(&largest)[2], u64 piece) { inputs.look(largest, piece); });
#else
        look_at_all<2>(counters, tiles, &shared, of_warps, [&](u32(&largest)[2], u32 tile) {
            inputs.read(gates, ups, place_of(tile, numbers), numbers);
            largest[0] = max(largest[0], bits_of(gates));
            largest[1] = max(largest[1], bits_of(ups));
        });
#endif
        const float inverses[2] = {outputs[0].inverse(now(&counters->largest[0])),
                                   outputs[1].inverse(now(&counters->largest[1]))};
        take_all(&counters->taken_again, tiles, &shared, [&](u32 tile) {
            const Place place = place_of(tiles - 1 - tile, numbers);
            inputs.read(gates, ups, place, numbers);
            quantize_both(gates, ups, outputs, staging, place, inverses, numbers);
        });
    }
    leave(counters, outputs);
}

// The outputs are those of quantize_by_matrix for the gradients of gate and of up.
#if DELAYED
extern "C" __global__ void __launch_bounds__(UNITS, 4)
    quantize_swiglu_gradients_by_matrix(FACTORS, const u8 *__restrict__ gradient,
                                        const float *__restrict__ gate_delayed, const float *__restrict__ up_delayed,
                                        u8 *__restrict__ gate_values, u8 *__restrict__ gate_transposed,
                                        u8 *__restrict__ up_values, u8 *__restrict__ up_transposed,
                                        float *__restrict__ gate_scale, float *__restrict__ gate_absmax,
                                        float *__restrict__ up_scale, float *__restrict__ up_absmax,
                                        Counters *counters, const __grid_constant__ Numbers numbers) {
    const Output outputs[2] = {
        {gate_delayed[numbers.layer], gate_values, gate_transposed, gate_scale, gate_absmax},
        {up_delayed[numbers.up_layer], up_values, up_transposed, up_scale, up_absmax},
    };
    quantize_gradients({FACTORS_OF_KERNEL, gradient}, outputs, counters, numbers);
}
#else
extern "C" __global__ void __launch_bounds__(UNITS, 3)
    quantize_swiglu_gradients_by_matrix(FACTORS, const u8 *__restrict__ gradient,
                                        u8 *__restrict__ gate_values, u8 *__restrict__ gate_transposed,
                                        u8 *__restrict__ up_values, u8 *__restrict__ up_transposed,
                                        float *__restrict__ gate_scale, float *__restrict__ up_scale,
                                        Counters *counters, const __grid_constant__ Numbers numbers) {
    const Output outputs[2] = {
        {gate_values, gate_transposed, gate_scale},
        {up_values, up_transposed, up_scale},
    };
    quantize_gradients({FACTORS_OF_KERNEL, gradient}, outputs, counters, numbers);
}
#endif
