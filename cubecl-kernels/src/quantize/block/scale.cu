// The FP32 scale of INT8 codes (scale/fp32.rs).

#define INFINITE 0x7f800000u
// 2^-100: a block whose largest magnitude is below counts as zeros.
#define MIN_ABSMAX (27u << 23)

// The scale of a block from the bits of its largest magnitude: NaN unless that is finite.
__device__ __forceinline__ float scale_of(unsigned int absmax) {
    if (absmax >= INFINITE)
        return __uint_as_float(absmax | 0x7fc00000u);
    return absmax < MIN_ABSMAX ? 0.0f : __fdiv_rn(__uint_as_float(absmax), 127.0f);
}

// Its inverse, or 0, which stands for "all integers are 0".
__device__ __forceinline__ float inverse_of(unsigned int absmax) {
    const bool zeros = absmax >= INFINITE || absmax < MIN_ABSMAX;
    return zeros ? 0.0f : __fdiv_rn(127.0f, __uint_as_float(absmax));
}
