// The gradients of SwiGLU's two factors, quantized to FP8 by delayed scaling as they are computed: in front of this
// text stand the tile.cu of delayed scaling and arithmetic.cu.

// gate, up, gradient: [rows, cols], of 16-bit elements, dense.
struct Inputs {
    const u8 *__restrict__ gate, *__restrict__ up, *__restrict__ gradient;

    // Both gradients.
    __device__ __forceinline__ void read(Rows &of_gate, Rows &of_up, const Place &place,
                                         const Numbers &numbers) const {
        const u64 from = place.row() * numbers.cols + place.col();
        Rows gradients;
        read_rows(of_gate, gate, from, numbers.cols);
        read_rows(of_up, up, from, numbers.cols);
        read_rows(gradients, gradient, from, numbers.cols);
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
            swiglu_backward(of_gate[r].words, of_up[r].words, gradients[r].words);
    }
};

// Quantizes both gradients of a tile.
__device__ __forceinline__ void quantize_both(const Rows &gates, const Rows &ups, const Output (&outputs)[2],
                                              Staging (&staging)[2], const Place &place, const float (&inverses)[2],
                                              const Numbers &numbers) {
    quantize_rows(gates, outputs[0].values, outputs[0].transposed, staging[0], place, inverses[0], numbers);
    quantize_rows(ups, outputs[1].values, outputs[1].transposed, staging[1], place, inverses[1], numbers);
}

// The outputs are those of quantize_delayed for the gradients of gate and of up.
extern "C" __global__ void __launch_bounds__(UNITS, 4)
    quantize_swiglu_gradients_delayed(const u8 *__restrict__ gate, const u8 *__restrict__ up,
                                      const u8 *__restrict__ gradient, const float *__restrict__ gate_delayed,
                                      const float *__restrict__ up_delayed, u8 *__restrict__ gate_values,
                                      u8 *__restrict__ gate_transposed, u8 *__restrict__ up_values,
                                      u8 *__restrict__ up_transposed, float *__restrict__ gate_scale,
                                      float *__restrict__ gate_absmax, float *__restrict__ up_scale,
                                      float *__restrict__ up_absmax, Counters *counters,
                                      const __grid_constant__ Numbers numbers) {
    __shared__ __align__(16) Staging staging[2];
    __shared__ u32 of_warps[2][UNITS / 32], shared;
    const Inputs inputs = {gate, up, gradient};
    const Output outputs[2] = {
        {gate_delayed[numbers.layer], gate_values, gate_transposed, gate_scale, gate_absmax},
        {up_delayed[numbers.up_layer], up_values, up_transposed, up_scale, up_absmax},
    };
    const auto inverse_of = [&](int i, u32 bits) { return __frcp_rn(scale_of(outputs[i].chosen(bits))); };
    const auto note_both = [&](const Rows &gates, const Rows &ups) {
        note(&counters->largest[0], bits_of(gates), of_warps[0]);
        note(&counters->largest[1], bits_of(ups), of_warps[1]);
    };
    Rows gates, ups;
    if (has_scale(__float_as_uint(outputs[0].maximum)) && has_scale(__float_as_uint(outputs[1].maximum))) {
        const Place place((u64)blockIdx.y * TILE_ROWS, (u64)blockIdx.x * TILE_COLS);
        inputs.read(gates, ups, place, numbers);
        quantize_both(gates, ups, outputs, staging, place, {inverse_of(0, 0), inverse_of(1, 0)}, numbers);
        note_both(gates, ups);
    } else {
        const u32 tiles = gridDim.x * gridDim.y;
        look_at_all(counters, tiles, &shared, [&](u32 tile) {
            inputs.read(gates, ups, place_of(tile, numbers), numbers);
            note_both(gates, ups);
        });
        const float inverses[2] = {inverse_of(0, *(volatile u32 *)&counters->largest[0]),
                                   inverse_of(1, *(volatile u32 *)&counters->largest[1])};
        for (u32 tile; (tile = take(&counters->taken_again, &shared)) < tiles;) {
            const Place place = place_of(tile, numbers);
            inputs.read(gates, ups, place, numbers);
            quantize_both(gates, ups, outputs, staging, place, inverses, numbers);
        }
    }
    leave(counters, outputs);
}
