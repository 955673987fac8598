// The output of RMSNorm as a linear layer reads it, quantized to FP8 by one scale, from its input as that flows: in front
// of this text stand the tile.cu and the codes.cu of one scale for a matrix, pairs.cu, and gains.cu.

struct Normalized {
    static const bool BOUNDED = true;
    Codes x;
    const float *__restrict__ inverse_rms;
    const u8 *__restrict__ gain;
    // Rows of patches across.
    u32 across;

    __device__ __forceinline__ void read(Rows &rows, const Place &place, const Numbers &numbers) const {
        x.read(rows, place.row() * numbers.cols + place.col(), numbers.cols);
        const float4 of_rows = __ldg((const float4 *)(inverse_rms + place.row()));
        const float roots[PATCH_ROWS] = {of_rows.x, of_rows.y, of_rows.z, of_rows.w};
        const Gains gains = read_gains(gain, (u32)place.col());
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
            normalize(rows[r].words, roots[r], gains);
    }

    __device__ __forceinline__ void bound(float (&bounds)[1], u64 piece) const {
        const Gains gains = read_gains(gain, (u32)piece % across * PATCH_COLS);
        u32 largest = 0;
#pragma unroll
        for (float of_col : gains.of)
            largest = max(largest, __float_as_uint(fabsf(of_col)));
        bounds[0] = x.bound(piece) * __ldg(inverse_rms + (u32)piece / across) * __uint_as_float(largest);
    }

    __device__ __forceinline__ void look(u32 (&largest)[1], u64 piece) const {
        Row normalized;
        x.read(normalized, piece);
        normalize(normalized.words, __ldg(inverse_rms + (u32)piece / across),
                  read_gains(gain, (u32)piece % across * PATCH_COLS));
        largest[0] = max(largest[0], float_bits(larger(0, normalized)));
    }
};

// x: codes, [rows, cols], and their scales; inverse_rms: [rows]; gain: [cols]. The outputs are those of quantize_by_matrix
// for x inverse_rms gain.
extern "C" __global__ void __launch_bounds__(UNITS, 4)
    quantize_rms_norm_by_matrix(const u8 *__restrict__ x, const float *__restrict__ scales_of_x,
                                const float *__restrict__ inverse_rms, const u8 *__restrict__ gain,
                                u8 *__restrict__ values, u8 *__restrict__ transposed, float *__restrict__ scale,
                                Counters *counters, const __grid_constant__ Numbers numbers) {
    const Normalized normalized = {{x, scales_of_x}, inverse_rms, gain, (u32)(numbers.cols / PATCH_COLS)};
    quantize(normalized, {values, transposed, scale}, counters, numbers);
}
