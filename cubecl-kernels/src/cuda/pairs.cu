// Elements of 16 bits, two in a word, as the floats that kernels compute with.
//
// Knobs, defined in front of this text: IN_F16 or IN_BF16, the type of the elements.

// Two neighbours.
struct Pair {
    float of[2];
};

__device__ __forceinline__ Pair pair_of(unsigned int word) {
    Pair pair;
#ifdef IN_F16
    asm("cvt.f32.f16 %0, %1;" : "=f"(pair.of[0]) : "h"((unsigned short)word));
    asm("cvt.f32.f16 %0, %1;" : "=f"(pair.of[1]) : "h"((unsigned short)(word >> 16)));
#else
    pair.of[0] = __uint_as_float(word << 16);
    pair.of[1] = __uint_as_float(word & 0xffff0000u);
#endif
    return pair;
}

// Rounded to the type, to nearest.
__device__ __forceinline__ unsigned int word_of(const Pair &pair) {
    unsigned int word;
#ifdef IN_F16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(pair.of[1]), "f"(pair.of[0]));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(pair.of[1]), "f"(pair.of[0]));
#endif
    return word;
}

// The elements that eight codes stand for: numbers times a scale, rounded once.
__device__ __forceinline__ void decode_e4m3(unsigned int (&words)[4], uint2 codes, float scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned int two = (i < 2 ? codes.x : codes.y) >> 16 * (i % 2);
        unsigned int halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)two));
        Pair pair;
#pragma unroll
        for (int of = 0; of < 2; of++) {
            float number;
            asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"((unsigned short)(halves >> 16 * of)));
            pair.of[of] = __fmul_rn(number, scale);
        }
        words[i] = word_of(pair);
    }
}

__device__ __forceinline__ void decode_int8(unsigned int (&words)[4], uint2 codes, float scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // Plus 128, each is the last byte of a float of 2^23 and more.
        const unsigned int bytes = (i < 2 ? codes.x : codes.y) ^ 0x80808080u;
        Pair pair;
#pragma unroll
        for (int of = 0; of < 2; of++) {
            unsigned int shifted;
            asm("prmt.b32 %0, %1, %2, %3;"
                : "=r"(shifted)
                : "r"(bytes), "r"(0x4b000000u), "r"(0x7440 + 2 * (i % 2) + of));
            pair.of[of] = __fmul_rn(__fsub_rn(__uint_as_float(shifted), 8388736.0f), scale);
        }
        words[i] = word_of(pair);
    }
}
