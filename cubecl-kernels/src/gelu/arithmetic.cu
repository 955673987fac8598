// The arithmetic and the numbers of gelu.rs on words of two elements, in the functions that CubeCL writes for it: in front
// of this text stands pairs.cu.
//
// A knob, defined in front of this text:
//   GRADIENT   1: the gradient; 0: GELU

// The distribution function of the standard normal distribution, and its density.
struct Normal {
    float distribution, density;
};

__device__ __forceinline__ Normal normal(float x) {
    const float magnitude = fabsf(x);
    const float power = expf(__fmul_rn(__fmul_rn(-0.5f, magnitude), magnitude));
    // What __fdividef makes of 1 and a number up to 8.
    float t;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(__fmaf_rn(0.35f, fminf(magnitude, 20.0f), 1.0f)));
    const float tail_of[] = {0.1396213f,  0.13986352f, 0.119821295f, 0.10555249f, -0.02321232f,
                             0.15931965f, -0.255839f,   0.14403093f,  -0.029157888f};
    float polynomial = tail_of[8];
#pragma unroll
    for (int power_of_t = 7; power_of_t >= 0; power_of_t--)
        polynomial = __fmaf_rn(polynomial, t, tail_of[power_of_t]);
    const float tail = __fmul_rn(__fmul_rn(polynomial, t), power);
    return {x >= 0.0f ? __fsub_rn(1.0f, tail) : tail, __fmul_rn(0.3989423f, power)};
}

#if GRADIENT
// dy P(x) + dy x p(x), in the place of x.
__device__ __forceinline__ void compute(unsigned int (&words)[4], const unsigned int (&gradient)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Pair pair = pair_of(words[i]);
        const Pair dy = pair_of(gradient[i]);
#pragma unroll
        for (int of = 0; of < 2; of++) {
            const float x = pair.of[of];
            const Normal at = normal(x);
            pair.of[of] = __fmul_rn(dy.of[of], __fmaf_rn(x, at.density, at.distribution));
        }
        words[i] = word_of(pair);
    }
}

#else
// x P(x), in its place.
__device__ __forceinline__ void compute(unsigned int (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Pair pair = pair_of(words[i]);
#pragma unroll
        for (int of = 0; of < 2; of++)
            pair.of[of] = __fmul_rn(pair.of[of], normal(pair.of[of]).distribution);
        words[i] = word_of(pair);
    }
}
#endif
