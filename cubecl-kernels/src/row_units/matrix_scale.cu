// The output of a norm as a linear layer reads it, quantized to FP8 by one scale, from its input as that flows: in front of
// this text stand the tile.cu and the codes.cu of one scale for a matrix, pairs.cu, and columns.cu.

struct Normalized {
    static const bool BOUNDED = true;
    Codes x;
#if CENTRED
    const float *__restrict__ means;
#endif
    const float *__restrict__ inverses;
    const u8 *__restrict__ gain;
#if BIAS
    const u8 *__restrict__ bias;
#endif
    // Rows of patches across.
    u32 across;

    __device__ __forceinline__ Columns columns(u32 col) const {
        Columns columns;
        columns.gains.read(gain, col);
#if BIAS
        columns.biases.read(bias, col);
#endif
        return columns;
    }

    __device__ __forceinline__ OfRow of_row(u32 row) const {
        OfRow of;
        of.inverse = __ldg(inverses + row);
#if CENTRED
        of.mean = __ldg(means + row);
#endif
        return of;
    }

    __device__ __forceinline__ void read(Rows &rows, const Place &place, const Numbers &numbers) const {
        x.read(rows, place.row() * numbers.cols + place.col(), numbers.cols);
        const float4 four = __ldg((const float4 *)(inverses + place.row()));
        OfRow of_rows[PATCH_ROWS] = {{four.x}, {four.y}, {four.z}, {four.w}};
#if CENTRED
        const float4 of_means = __ldg((const float4 *)(means + place.row()));
        of_rows[0].mean = of_means.x, of_rows[1].mean = of_means.y;
        of_rows[2].mean = of_means.z, of_rows[3].mean = of_means.w;
#endif
        const Columns columns = this->columns((u32)place.col());
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
            normalize(rows[r].words, of_rows[r], columns);
    }

    __device__ __forceinline__ void bound(float (&bounds)[1], u64 piece) const {
        const OfRow row = of_row((u32)piece / across);
        const Columns columns = this->columns((u32)piece % across * PATCH_COLS);
        float most = x.bound(piece);
#if CENTRED
        most = SLACK * (most + fabsf(row.mean));
#endif
        // In the order of what it bounds: a product of both may vanish where that does not.
        most = most * row.inverse * columns.gains.largest();
#if BIAS
        most += SLACK * columns.biases.largest();
#endif
        bounds[0] = most;
    }

    __device__ __forceinline__ void look(u32 (&largest)[1], u64 piece) const {
        Row normalized;
        x.read(normalized, piece);
        normalize(normalized.words, of_row((u32)piece / across), columns((u32)piece % across * PATCH_COLS));
        largest[0] = max(largest[0], float_bits(larger(0, normalized)));
    }
};

// x: codes, [rows, cols], and their scales; of each row its numbers, of each column too, all dense. The outputs are those of
// quantize_by_matrix for the norm.
extern "C" __global__ void __launch_bounds__(UNITS, 4)
    quantize_norm_by_matrix(const u8 *__restrict__ x, const float *__restrict__ scales_of_x, NORM
                            u8 *__restrict__ values, u8 *__restrict__ transposed, float *__restrict__ scale,
                            Counters *counters, const __grid_constant__ Numbers numbers) {
    Normalized normalized;
    normalized.x = {x, scales_of_x};
#if CENTRED
    normalized.means = means;
#endif
    normalized.inverses = inverses;
    normalized.gain = gain;
#if BIAS
    normalized.bias = bias;
#endif
    normalized.across = (u32)(numbers.cols / PATCH_COLS);
    quantize(normalized, {values, transposed, scale}, counters, numbers);
}
