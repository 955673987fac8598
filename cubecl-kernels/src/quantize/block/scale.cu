// The FP32 scale of codes (scale/fp32.rs), of INT8 unless another largest number is given.

#define INFINITE 0x7f800000u
// 2^-100: a block whose largest magnitude is below counts as zeros.
#define MIN_ABSMAX (27u << 23)

// The scale of a block from the bits of its largest magnitude: NaN unless that is finite.
__device__ __forceinline__ float scale_of(unsigned int absmax, float largest = 127.0f) {
    if (absmax >= INFINITE)
        return __uint_as_float(absmax | 0x7fc00000u);
    return absmax < MIN_ABSMAX ? 0.0f : __fdiv_rn(__uint_as_float(absmax), largest);
}

// Its inverse, or 0, which stands for "all integers are 0".
__device__ __forceinline__ float inverse_of(unsigned int absmax, float largest = 127.0f) {
    const bool zeros = absmax >= INFINITE || absmax < MIN_ABSMAX;
    return zeros ? 0.0f : __fdiv_rn(largest, __uint_as_float(absmax));
}
