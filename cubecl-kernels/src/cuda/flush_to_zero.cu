// The approximate instructions of PTX that take a subnormal number for 0, in place of CUDA's functions of these names.
// Without -ftz, which CubeCL cannot pass on, those take four instructions where these take one: the others scale what
// is subnormal there and back.

__device__ __forceinline__ float exp2_ftz(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

__device__ __forceinline__ float log2_ftz(float x) {
    float logarithm;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
    return logarithm;
}

__device__ __forceinline__ float log_ftz(float x) {
    return log2_ftz(x) * 0.693147181f;
}

__device__ __forceinline__ float pow_ftz(float x, float exponent) {
    return exp2_ftz(log2_ftz(x) * exponent);
}

// The product flushes nothing: a subnormal dividend or quotient stays.
__device__ __forceinline__ float divide_ftz(float x, float divisor) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
    return x * inverse;
}

__device__ __forceinline__ float rsqrt_ftz(float x) {
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}
