// The arithmetic of swiglu.rs on words of two elements, in the functions that CubeCL writes for it, so that the bits are
// the same too: the exponential is CUDA's own, the quotient its fast one. In front of this text stands pairs.cu.

// 1 / (1 + exp(-x)), and what it lacks to 1.
struct Sigmoids {
    float of_x, rest;
};

__device__ __forceinline__ Sigmoids sigmoids(float x) {
    const float power = expf(-fabsf(x));
    // What __fdividef makes of 1 and such a number, without the care that it takes of larger ones.
    float larger;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(larger) : "f"(__fadd_rn(1.0f, power)));
    const float smaller = __fmul_rn(power, larger);
    Sigmoids both;
    both.of_x = x >= 0.0f ? larger : smaller;
    both.rest = x >= 0.0f ? smaller : larger;
    return both;
}

// What |silu(x)| and |silu'(x)| do not exceed where |x| does not exceed `most`, which is not negative: silu'' <= 1 / 2. What
// is not finite stays.
__device__ __forceinline__ float most_of_silu(float most) {
    return most * fminf(1.0f, fmaf(most, 0.25f, 0.5f));
}
__device__ __forceinline__ float most_of_slope(float most) {
    return __float_as_uint(most) < INFINITE ? fminf(1.1f, fmaf(most, 0.5f, 0.5f)) : most;
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
