// Quantizes a matrix of whole tiles to FP8 by delayed scaling: tile.cu, which stands before this text, says how.

// A matrix in memory, its columns dense.
struct Floats {
    const u8 *__restrict__ x;

    __device__ __forceinline__ void read(Rows &rows, const Place &place, const Numbers &numbers) const {
        read_rows(rows, x, place.row() * numbers.row_stride + place.col(), numbers.row_stride);
    }
};

// Blocks on a multiprocessor, at least: what is rarely done shall not take registers from the others.
#ifdef IN_F32
#define BLOCKS 3
#else
#define BLOCKS 5
#endif

extern "C" __global__ void __launch_bounds__(UNITS, BLOCKS)
    quantize_delayed(const u8 *__restrict__ x, const float *__restrict__ delayed, u8 *__restrict__ values,
                     u8 *__restrict__ transposed, float *tile_maxima, float *__restrict__ scale,
                     float *__restrict__ absmax, u32 *ticket, const __grid_constant__ Numbers numbers) {
    __shared__ __align__(16) Staging staging;
    __shared__ u32 of_warps[2][UNITS / 32];
    const Floats source = {x};
    const float maximum = delayed[numbers.layer];
    const float inverse = __frcp_rn(scale_of(__float_as_uint(maximum)));
    const Place place = place_of_block();
    Rows rows;
    source.read(rows, place, numbers);
    const u32 bits = quantize_rows(rows, values, transposed, staging, place, inverse, numbers);
    write_tile_maximum(tile_maxima, bits, of_warps[0]);
    if (is_last_block(ticket))
        finish(source, maximum, values, transposed, tile_maxima, scale, absmax, staging, of_warps[1], numbers);
}
