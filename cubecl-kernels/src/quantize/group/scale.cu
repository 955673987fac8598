// The scales of groups of FP8 numbers. In front of this text stand block/scale.cu and patch.cu.
//
// Knobs, defined in front of this text:
//   LARGEST   the largest number
//   E8M0      1: scales are powers of two, in bytes; 0: FP32

// The scale of a group, and its inverse, of which 0 stands for "all codes are 0".
#if E8M0
typedef u8 Scale;
#else
typedef float Scale;
#endif
struct OfGroup {
    Scale scale;
    float inverse;
};

// Those of the bits of its largest magnitude.
__device__ __forceinline__ OfGroup of_group(u32 absmax) {
#if E8M0
    // The smallest power of two with which nothing saturates (scale/e8m0.rs).
    if (absmax >= INFINITE)
        return {255, 0.0f};
    const u32 byte = (absmax + (127u << 23) + 0x7fffffu - __float_as_uint(LARGEST)) >> 23;
    if (absmax >= MIN_ABSMAX)
        return {(Scale)byte, __uint_as_float((254 - byte) << 23)};
    return {0, 0.0f};
#else
    return {scale_of(absmax, LARGEST), inverse_of(absmax, LARGEST)};
#endif
}
