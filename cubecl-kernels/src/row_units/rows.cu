// Rows of 16-bit elements that a few threads of a block hold, as row_units.rs has them: the vectors of a row, 8 elements
// each, go to its threads in turn. Sums have the same order.
//
// Knobs, defined in front of this text, beside those of pairs.cu, which comes before it:
//   COLS     elements of a row, whole vectors
//   LANES    threads of a row: a power of two up to a warp, or whole warps
//   ROWS     rows of a block at a time
//   CODES    0: x is elements; 1: it is codes of E4M3, 2: of INT8, with FP32 scales of
//   SCALE_ROWS, SCALE_COLS   so many rows and columns each
//   GAIN_F32   1: gains are FP32; 0: of the type of the elements

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WIDTH 8
#define VECTORS (COLS / WIDTH)
#define HELD ((VECTORS + LANES - 1) / LANES)
#define THREADS (LANES * ROWS)
#define EVERYONE 0xffffffffu

// Sums over a row go through all warps of a block.
static_assert(LANES <= 32 || ROWS == 1);

// A vector of elements.
struct Vector {
    u32 words[4];

    __device__ __forceinline__ void operator=(uint4 from) {
        words[0] = from.x, words[1] = from.y, words[2] = from.z, words[3] = from.w;
    }
    __device__ __forceinline__ Pair pair(int i) const { return pair_of(words[i]); }
    __device__ __forceinline__ float element(int i) const { return pair(i / 2).of[i % 2]; }
    // Writes a thread's vector of this number to a matrix, unless it lies past the end of the row.
    __device__ __forceinline__ void write(u8 *__restrict__ to, u64 row, int piece) const;
};

// A thread's vector of this number in its row: past the end, the row's last.
__device__ __forceinline__ u32 vector_index(int piece) {
    return min(threadIdx.x % LANES + piece * LANES, (u32)VECTORS - 1);
}

__device__ __forceinline__ bool is_inside(int piece) {
    return (piece + 1) * LANES <= VECTORS || threadIdx.x % LANES + piece * LANES < VECTORS;
}

__device__ __forceinline__ void Vector::write(u8 *__restrict__ to, u64 row, int piece) const {
    if (is_inside(piece))
        *((uint4 *)to + row * VECTORS + vector_index(piece)) = make_uint4(words[0], words[1], words[2], words[3]);
}

// The floats of a thread's vectors.
struct Held {
    float of[HELD][WIDTH];
};

// Numbers in memory, of which a thread reads those of its vectors.
__device__ __forceinline__ void read_floats(Held &held, const u8 *__restrict__ from, bool are_f32) {
#pragma unroll
    for (int piece = 0; piece < HELD; piece++) {
        const u32 index = vector_index(piece);
        float *const of = held.of[piece];
        if (are_f32) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float4 four = __ldg((const float4 *)from + 2 * index + half);
                of[4 * half] = four.x, of[4 * half + 1] = four.y, of[4 * half + 2] = four.z, of[4 * half + 3] = four.w;
            }
        } else {
            Vector vector;
            vector = __ldg((const uint4 *)from + index);
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                of[i] = vector.element(i);
        }
    }
}

// The sums over a row's threads, in all of them: in each warp a tree whose last level are neighbours, then warp after warp.
// `of_warps` is for `Count` words of each warp, and another one from a call to the next.
template <int Count>
__device__ __forceinline__ void row_sums(float (&sums)[Count], float (*of_warps)[Count]) {
#pragma unroll
    for (int distance = (LANES < 32 ? LANES : 32) / 2; distance > 0; distance /= 2)
#pragma unroll
        for (int i = 0; i < Count; i++)
            sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(EVERYONE, sums[i], distance));
#if LANES > 32
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int i = 0; i < Count; i++)
            of_warps[threadIdx.x / 32][i] = sums[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Count; i++) {
        sums[i] = of_warps[0][i];
#pragma unroll
        for (int warp = 1; warp < LANES / 32; warp++)
            sums[i] = __fadd_rn(sums[i], of_warps[warp][i]);
    }
#endif
}

__device__ __forceinline__ float mean_of(float sum) { return __fmul_rn(sum, (float)(1.0 / COLS)); }

// A matrix of elements, [rows, COLS], dense.
struct Matrix {
    const u8 *__restrict__ values;
};

// A matrix of codes, E4M3 if 1 and INT8 if 2, of which so many rows and columns have a scale.
template <int Codes, int ScaleRows, int ScaleCols> struct CodedMatrix {
    // [rows, COLS] and [rows / ScaleRows, COLS / ScaleCols], dense.
    const u8 *__restrict__ values;
    const float *__restrict__ scales;

    __device__ __forceinline__ const float *scale(u64 row, u32 index) const {
        return scales + row / ScaleRows * (COLS / ScaleCols) + index * WIDTH / ScaleCols;
    }

    __device__ __forceinline__ static void decode(Vector &vector, uint2 codes, float scale) {
        if (Codes == 1)
            decode_e4m3(vector.words, codes, scale);
        else
            decode_int8(vector.words, codes, scale);
    }
};

// What a norm reads.
#if CODES
typedef CodedMatrix<CODES, SCALE_ROWS, SCALE_COLS> Input;
#else
typedef Matrix Input;
#endif
