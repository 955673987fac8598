// The scales of the products on Hopper that take them in FP32 or as powers of two.
//
// Knobs, defined in front of this text:
//   A_E8M0, B_E8M0   1: scales of A and of B are bytes, powers of two; 0: FP32

#if A_E8M0
typedef unsigned char AScale;
#else
typedef float AScale;
#endif
#if B_E8M0
typedef unsigned char BScale;
#else
typedef float BScale;
#endif

__device__ __forceinline__ float decoded(float scale) {
    return scale;
}

// The power of two of a byte; 255 is NaN, and 0 stands for 0.
__device__ __forceinline__ float decoded(unsigned char scale) {
    return __uint_as_float((u32)scale << 23 | (scale == 255 ? 1u << 22 : 0));
}
