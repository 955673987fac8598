// The gradients of SwiGLU's two factors, quantized to FP8 by one scale each as they are computed: in front of this text
// stand the tile.cu of one scale for a matrix and arithmetic.cu. Knobs beside theirs:
//   CODES   1: gate and up are E4M3 codes in groups along the rows, with FP32 scales

// gate, up, gradient: [rows, cols], of 16-bit elements, gate and up of codes if they are some; dense.
struct Inputs {
    const u8 *__restrict__ gate, *__restrict__ up, *__restrict__ gradient;
#if CODES
    // [rows, cols / group].
    const float *__restrict__ gate_scales, *__restrict__ up_scales;
#endif

    // Both gradients.
    __device__ __forceinline__ void read(Rows &of_gate, Rows &of_up, const Place &place,
                                         const Numbers &numbers) const {
        const u64 from = place.row() * numbers.cols + place.col();
        Rows gradients;
#if CODES
        const u64 of_scales = from / numbers.group, across = numbers.cols / numbers.group;
        read_codes(of_gate, gate + from, gate_scales + of_scales, numbers.cols, across);
        read_codes(of_up, up + from, up_scales + of_scales, numbers.cols, across);
#else
        read_rows(of_gate, gate, from, numbers.cols);
        read_rows(of_up, up, from, numbers.cols);
#endif
        read_rows(gradients, gradient, from, numbers.cols);
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
            swiglu_backward(of_gate[r].words, of_up[r].words, gradients[r].words);
    }

#if CODES
    // The elements of a patch, each of whose rows has one scale.
    __device__ __forceinline__ static void read_codes(Rows &rows, const u8 *__restrict__ codes,
                                                      const float *__restrict__ scales, u64 cols, u64 across) {
        uint2 of_row[PATCH_ROWS];
        float scale[PATCH_ROWS];
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++) {
            of_row[r] = __ldg((const uint2 *)(codes + r * cols));
            scale[r] = __ldg(scales + r * across);
        }
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
#pragma unroll
            for (int i = 0; i < PATCH_COLS / 2; i++) {
                const u32 word = i < 2 ? of_row[r].x : of_row[r].y;
                u32 halves;
                asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)(word >> 16 * (i % 2))));
                Pair pair;
#pragma unroll
                for (int of = 0; of < 2; of++) {
                    float number;
                    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"((u16)(halves >> 16 * of)));
                    pair.of[of] = __fmul_rn(number, scale[r]);
                }
                rows[r].words[i] = word_of(pair);
            }
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
        look_at_all<2>(counters, tiles, &shared, of_warps, [&](u32(&largest)[2], u32 tile) {
            inputs.read(gates, ups, place_of(tile, numbers), numbers);
            largest[0] = max(largest[0], bits_of(gates));
            largest[1] = max(largest[1], bits_of(ups));
        });
        const float inverses[2] = {outputs[0].inverse(*(volatile u32 *)&counters->largest[0]),
                                   outputs[1].inverse(*(volatile u32 *)&counters->largest[1])};
        take_all(&counters->taken_again, tiles, &shared, [&](u32 tile) {
            const Place place = place_of(tiles - 1 - tile, numbers);
            inputs.read(gates, ups, place, numbers);
            quantize_both(gates, ups, outputs, staging, place, inverses, numbers);
        });
    }
    leave(counters, outputs);
}

#if CODES
#define SCALES_OF_CODES const float *__restrict__ scales_of_gate, const float *__restrict__ scales_of_up,
#define INPUTS {gate, up, gradient, scales_of_gate, scales_of_up}
#else
#define SCALES_OF_CODES
#define INPUTS {gate, up, gradient}
#endif

// The outputs are those of quantize_by_matrix for the gradients of gate and of up.
#if DELAYED
extern "C" __global__ void __launch_bounds__(UNITS, 4)
    quantize_swiglu_gradients_by_matrix(const u8 *__restrict__ gate, const u8 *__restrict__ up,
                                        const u8 *__restrict__ gradient, SCALES_OF_CODES
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
    quantize_gradients(INPUTS, outputs, counters, numbers);
}
#else
extern "C" __global__ void __launch_bounds__(UNITS, 4)
    quantize_swiglu_gradients_by_matrix(const u8 *__restrict__ gate, const u8 *__restrict__ up,
                                        const u8 *__restrict__ gradient, SCALES_OF_CODES
                                        u8 *__restrict__ gate_values, u8 *__restrict__ gate_transposed,
                                        u8 *__restrict__ up_values, u8 *__restrict__ up_transposed,
                                        float *__restrict__ gate_scale, float *__restrict__ up_scale,
                                        Counters *counters, const __grid_constant__ Numbers numbers) {
    const Output outputs[2] = {
        {gate_values, gate_transposed, gate_scale},
        {up_values, up_transposed, up_scale},
    };
    quantize_gradients(INPUTS, outputs, counters, numbers);
}
#endif
