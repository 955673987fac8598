// The arithmetic of swiglu.rs on words of two elements, in the functions that CubeCL writes for it, so that the bits are
// the same too: the exponential is CUDA's own, the quotient its fast one.
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

// 1 / (1 + exp(-x)), and what it lacks to 1.
struct Sigmoids {
    float of_x, rest;
};

__device__ __forceinline__ Sigmoids sigmoids(float x) {
    const float power = expf(-fabsf(x));
    const float larger = __fdividef(1.0f, __fadd_rn(1.0f, power)), smaller = __fmul_rn(power, larger);
    Sigmoids both;
    both.of_x = x >= 0.0f ? larger : smaller;
    both.rest = x >= 0.0f ? smaller : larger;
    return both;
}

// silu(gate) up.
template <int Words>
__device__ __forceinline__ void swiglu(unsigned int (&out)[Words], const unsigned int (&gate)[Words],
                                       const unsigned int (&up)[Words]) {
#pragma unroll
    for (int i = 0; i < Words; i++) {
        const Pair gates = pair_of(gate[i]), ups = pair_of(up[i]);
        Pair outs;
#pragma unroll
        for (int of = 0; of < 2; of++) {
            const float x = gates.of[of];
            outs.of[of] = __fmul_rn(__fmul_rn(x, sigmoids(x).of_x), ups.of[of]);
        }
        out[i] = word_of(outs);
    }
}

// Its gradients from that of the output, each in the place of its input.
template <int Words>
__device__ __forceinline__ void swiglu_backward(unsigned int (&gate)[Words], unsigned int (&up)[Words],
                                                const unsigned int (&gradient)[Words]) {
#pragma unroll
    for (int i = 0; i < Words; i++) {
        Pair gates = pair_of(gate[i]), ups = pair_of(up[i]);
        const Pair gradients = pair_of(gradient[i]);
#pragma unroll
        for (int of = 0; of < 2; of++) {
            const float x = gates.of[of], factor = ups.of[of], dh = gradients.of[of];
            const Sigmoids both = sigmoids(x);
            const float half_slope = __fmul_rn(__fmul_rn(0.5f, __fmaf_rn(x, both.rest, 1.0f)), both.of_x);
            const bool is_up = fabsf(factor) > fabsf(dh);
            const float larger = is_up ? factor : dh, smaller = is_up ? dh : factor;
            gates.of[of] = __fmul_rn(2.0f, __fmul_rn(smaller, __fmul_rn(larger, half_slope)));
            ups.of[of] = __fmul_rn(dh, __fmul_rn(x, both.of_x));
        }
        gate[i] = word_of(gates);
        up[i] = word_of(ups);
    }
}
