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

// One of both.
struct Gradient {
    Inputs inputs;
    bool is_up;

    __device__ __forceinline__ void read(Rows &rows, const Place &place, const Numbers &numbers) const {
        Rows other;
        if (is_up)
            inputs.read(other, rows, place, numbers);
        else
            inputs.read(rows, other, place, numbers);
    }
};

// The outputs are those of quantize_delayed for the gradients of gate and of up. tile_maxima: of all tiles of one, then
// of the other.
extern "C" __global__ void __launch_bounds__(UNITS, 4)
    quantize_swiglu_gradients_delayed(const u8 *__restrict__ gate, const u8 *__restrict__ up,
                                      const u8 *__restrict__ gradient, const float *__restrict__ gate_delayed,
                                      const float *__restrict__ up_delayed, u8 *__restrict__ gate_values,
                                      u8 *__restrict__ gate_transposed, u8 *__restrict__ up_values,
                                      u8 *__restrict__ up_transposed, float *tile_maxima,
                                      float *__restrict__ gate_scale, float *__restrict__ gate_absmax,
                                      float *__restrict__ up_scale, float *__restrict__ up_absmax, u32 *ticket,
                                      const __grid_constant__ Numbers numbers) {
    __shared__ __align__(16) Staging staging[2];
    __shared__ u32 of_warps[4][UNITS / 32];
    const Inputs inputs = {gate, up, gradient};
    const float gate_maximum = gate_delayed[numbers.layer], up_maximum = up_delayed[numbers.up_layer];
    const float of_gate = __frcp_rn(scale_of(__float_as_uint(gate_maximum)));
    const float of_up = __frcp_rn(scale_of(__float_as_uint(up_maximum)));
    const Place place = place_of_block();
    Rows gates, ups;
    inputs.read(gates, ups, place, numbers);
    const u32 gate_bits = quantize_rows(gates, gate_values, gate_transposed, staging[0], place, of_gate, numbers);
    const u32 up_bits = quantize_rows(ups, up_values, up_transposed, staging[1], place, of_up, numbers);
    float *const up_maxima = tile_maxima + gridDim.x * gridDim.y;
    write_tile_maximum(tile_maxima, gate_bits, of_warps[0]);
    write_tile_maximum(up_maxima, up_bits, of_warps[1]);
    if (is_last_block(ticket)) {
        finish(Gradient{inputs, false}, gate_maximum, gate_values, gate_transposed, tile_maxima, gate_scale,
               gate_absmax, staging[0], of_warps[2], numbers);
        finish(Gradient{inputs, true}, up_maximum, up_values, up_transposed, up_maxima, up_scale, up_absmax,
               staging[1], of_warps[3], numbers);
    }
}
