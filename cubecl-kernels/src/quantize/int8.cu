// How values become INT8: to the nearest integer, or stochastically by random numbers of Philox (philox.rs, rounding.rs).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ---- Random numbers -------------------------------------------------------------------------------------------------

// The key of random numbers.
struct Key {
    u32 seed[2], stream[2];
};

// Philox4x32-10 for the counter (row, index, stream).
__device__ __forceinline__ void philox(u32 *words, u32 row, u32 index, const Key &key) {
    u32 c0 = row, c1 = index, c2 = key.stream[0], c3 = key.stream[1];
    u32 k0 = key.seed[0], k1 = key.seed[1];
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 first = (u64)0xd2511f53u * c0;
        const u64 second = (u64)0xcd9e8d57u * c2;
        c0 = (u32)(second >> 32) ^ c1 ^ k0;
        c1 = (u32)second;
        c2 = (u32)(first >> 32) ^ c3 ^ k1;
        c3 = (u32)first;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

// ---- Integers -------------------------------------------------------------------------------------------------------

// Four bytes of those of two words: the nibbles of the selector say which, where 0 to 3 are the bytes of the first word
// and 4 to 7 those of the second; with bit 3, the byte's sign takes the place of its bits, unlike with __byte_perm.
__device__ __forceinline__ u32 permute(u32 first, u32 second, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(first), "r"(second), "r"(selector));
    return bytes;
}

// 1.5 * 2^23: in a sum with it, the low byte is that of the nearest integer, ties to even.
#define ROUND_TO_EVEN 12582912.0f

// 384 plus the random number of a column. The sum with a value of [-127, 127] lies in [256, 512), where the bits 15 to
// 22 are the integer below, plus 128.
__device__ __forceinline__ float stochastic_offset(const u32 *random, int col, u32 bits_of_384) {
    const u32 word = random[col / 2];
    return __uint_as_float(col % 2 ? (word >> 17) + bits_of_384 : (word & 0x7fff) | bits_of_384);
}

// Two integers as the first and the second byte, from sums with ROUND_TO_EVEN. Behind them stands a byte with a clear
// sign, also of NaN.
__device__ __forceinline__ u32 nearest_pair(float a, float b) {
    return permute(__float_as_uint(a), __float_as_uint(b), 0x3340);
}

// The four integers of two pairs as bytes, or zeros, which a selector of bit 3 makes of a clear sign.
__device__ __forceinline__ u32 nearest_word(u32 first, u32 second, bool zeros) {
    return permute(first, second, zeros ? 0xaaaa : 0x5410);
}

__device__ __forceinline__ u32 nearest_word(const float *sums, bool zeros) {
    return nearest_word(nearest_pair(sums[0], sums[1]), nearest_pair(sums[2], sums[3]), zeros);
}

// Two integers, plus 128, as the second and the last byte, from sums with stochastic_offset.
__device__ __forceinline__ u32 stochastic_pair(float a, float b) {
    return 2 * permute(__float_as_uint(a), __float_as_uint(b), 0x6521);
}

// The four integers of two pairs as bytes, or zeros.
__device__ __forceinline__ u32 stochastic_word(u32 first, u32 second, bool zeros) {
    return (permute(first, second, 0x7531) ^ 0x80808080u) & (zeros ? 0u : 0xffffffffu);
}
