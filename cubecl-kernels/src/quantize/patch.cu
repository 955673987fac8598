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

// Reads a row of a patch that begins at this element.
__device__ __forceinline__ void read_row_from(Row &row, const u8 *__restrict__ x, u64 from) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const uint4 vector = __ldg((const uint4 *)(x + from * ELEMENT_BYTES) + v);
        u32 *const words = row.words + 4 * v;
        words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
    }
}

// Reads the one that has this number in a dense matrix.
__device__ __forceinline__ void read_row(Row &row, const u8 *__restrict__ x, u64 piece) {
    read_row_from(row, x, piece * PATCH_COLS);
}

// Reads the rows of a patch of a matrix, from the element where it begins.
__device__ __forceinline__ void read_rows(Rows &rows, const u8 *__restrict__ x, u64 from, u64 row_stride) {
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++)
        read_row_from(rows[r], x, from + r * row_stride);
}

#ifndef IN_F32
// The larger ones of two pairs of magnitudes of 16 bits.
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
    u32 larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// The larger half of such a pair.
__device__ __forceinline__ u32 larger_half(u32 pair) {
    return max(pair >> 16, pair & 0xffffu);
}
#endif

// The largest magnitude so far and in a row of a patch, as bits; of 16-bit elements one in each half of the word. As
// integers they order NaN above infinity above every finite value.
__device__ __forceinline__ u32 larger(u32 largest, const Row &row) {
#pragma unroll
    for (u32 word : row.words) {
#ifdef IN_F32
        largest = max(largest, word & 0x7fffffffu);
#else
        largest = larger_pair(largest, word & 0x7fff7fffu);
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
    return __float_as_uint(from_16_bits(larger_half(largest)));
#endif
}

// The largest magnitude in a row.
__device__ __forceinline__ float largest_in(const Row &row) {
    return __uint_as_float(float_bits(larger(0, row)));
}

__device__ __forceinline__ float element(const Row &row, int col) {
#ifdef IN_F32
    return __uint_as_float(row.words[col]);
#else
    return from_16_bits(row.words[col / 2] >> 16 * (col % 2) & 0xffff);
#endif
}

// Four codes of elements times the inverse of a scale, to nearest, saturating, the first in the low byte; those of NaN
// are not those that are wanted.
__device__ __forceinline__ u32 codes_of(const float (&elements)[4], float inverse) {
    u16 pairs[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float first = __fmul_rn(elements[2 * i], inverse), second = __fmul_rn(elements[2 * i + 1], inverse);
        asm("cvt.rn.satfinite." NUMBER "x2.f32 %0, %1, %2;" : "=h"(pairs[i]) : "f"(second), "f"(first));
    }
    return pairs[0] | (u32)pairs[1] << 16;
}

// Those of four neighbours in a row.
__device__ __forceinline__ u32 codes_of(const Row &row, int col, float inverse) {
    return codes_of({element(row, col), element(row, col + 1), element(row, col + 2), element(row, col + 3)}, inverse);
}
