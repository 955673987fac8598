// A thread's patch of a matrix that is quantized to FP8: 4 x 8 elements, of which four rows are one word of a
// transposed copy, and their magnitudes.
//
// Knobs, defined in front of this text:
//   IN_F32, IN_F16 or IN_BF16   the type of the elements
//   NUMBER                      "e4m3" or "e5m2"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define PATCH_ROWS 4
#define PATCH_COLS 8
#define INFINITE 0x7f800000u

#ifdef IN_F32
#define ELEMENT_BYTES 4
#else
#define ELEMENT_BYTES 2
#endif
// 16-byte vectors of a row of a patch.
#define VECTORS (PATCH_COLS * ELEMENT_BYTES / 16)

struct Row {
    u32 words[4 * VECTORS];
};

typedef Row Rows[PATCH_ROWS];

// Reads the rows of a patch of a matrix, from the element where it begins.
__device__ __forceinline__ void read_rows(Rows &rows, const u8 *__restrict__ x, u64 from, u64 row_stride) {
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++)
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const uint4 vector = __ldg((const uint4 *)(x + (from + r * row_stride) * ELEMENT_BYTES) + v);
            u32 *const words = rows[r].words + 4 * v;
            words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
        }
}

// The largest magnitude so far and in a row of a patch, as bits; of 16-bit elements one in each half of the word. As
// integers they order NaN above infinity above every finite value.
__device__ __forceinline__ u32 larger(u32 largest, const Row &row) {
#pragma unroll
    for (u32 word : row.words) {
#ifdef IN_F32
        largest = max(largest, word & 0x7fffffffu);
#else
        asm("max.u16x2 %0, %0, %1;" : "+r"(largest) : "r"(word & 0x7fff7fffu));
#endif
    }
    return largest;
}

__device__ __forceinline__ float from_16_bits(u32 bits) {
#ifdef IN_F16
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
#else
    return __uint_as_float(bits << 16);
#endif
}

// The larger one of both halves, as the bits of a float.
__device__ __forceinline__ u32 float_bits(u32 largest) {
#ifdef IN_F32
    return largest;
#else
    return __float_as_uint(from_16_bits(max(largest >> 16, largest & 0xffffu)));
#endif
}

__device__ __forceinline__ float element(const Row &row, int col) {
#ifdef IN_F32
    return __uint_as_float(row.words[col]);
#else
    return from_16_bits(row.words[col / 2] >> 16 * (col % 2) & 0xffff);
#endif
}

// Two codes, to nearest, saturating, the first in the low byte; those of NaN are not those that are wanted.
__device__ __forceinline__ u16 codes_of_pair(float first, float second) {
    u16 pair;
    asm("cvt.rn.satfinite." NUMBER "x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

// Those of four neighbours in a row.
__device__ __forceinline__ u32 codes_of(const Row &row, int col, float inverse) {
    u16 pairs[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        pairs[i] = codes_of_pair(__fmul_rn(element(row, col + 2 * i), inverse),
                                 __fmul_rn(element(row, col + 2 * i + 1), inverse));
    return pairs[0] | (u32)pairs[1] << 16;
}
