// Quantizes a matrix of whole tiles to FP8 by one scale: tile.cu, which stands before this text, says how.

// A matrix in memory, its columns dense.
struct Floats {
    static const bool BOUNDED = false;
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

#if DELAYED
extern "C" __global__ void __launch_bounds__(UNITS, BLOCKS)
    quantize_by_matrix(const u8 *__restrict__ x, const float *__restrict__ delayed, u8 *__restrict__ values,
                       u8 *__restrict__ transposed, float *__restrict__ scale, float *__restrict__ absmax,
                       Counters *counters, const __grid_constant__ Numbers numbers) {
    quantize(Floats{x}, {delayed[numbers.layer], values, transposed, scale, absmax}, counters, numbers);
}
#else
extern "C" __global__ void __launch_bounds__(UNITS, BLOCKS)
    quantize_by_matrix(const u8 *__restrict__ x, u8 *__restrict__ values, u8 *__restrict__ transposed,
                       float *__restrict__ scale, Counters *counters, const __grid_constant__ Numbers numbers) {
    quantize(Floats{x}, {values, transposed, scale}, counters, numbers);
}
#endif
