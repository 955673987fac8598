// Gate and up of SwiGLU, of which a thread reads a patch each: in front of this text stand patch.cu and arithmetic.cu.
//
// Knobs, defined in front of this text:
//   CODES   1: they are E4M3 codes in groups along the rows, with FP32 scales; 0: 16-bit elements
// and the structure Numbers, of which this text reads the columns, and the elements of a group.

// gate, up: [rows, cols], dense.
struct Factors {
    const u8 *__restrict__ gate, *__restrict__ up;
#if CODES
    // [rows, cols / group].
    const float *__restrict__ gate_scales, *__restrict__ up_scales;
#endif

    // The patches that begin at an element.
    __device__ __forceinline__ void read(Rows &of_gate, Rows &of_up, u64 from, const Numbers &numbers) const {
#if CODES
        const u64 of_scales = from / numbers.group, across = numbers.cols / numbers.group;
        read_codes(of_gate, gate + from, gate_scales + of_scales, numbers.cols, across);
        read_codes(of_up, up + from, up_scales + of_scales, numbers.cols, across);
#else
        read_rows(of_gate, gate, from, numbers.cols);
        read_rows(of_up, up, from, numbers.cols);
#endif
    }

#if CODES
    // The elements of a patch, each of whose rows has one scale: numbers times scale, rounded once.
    __device__ __forceinline__ static void read_codes(Rows &rows, const u8 *__restrict__ codes,
                                                      const float *__restrict__ scales, u64 cols, u64 across) {
        uint2 of_row[PATCH_ROWS];
        float scale[PATCH_ROWS];
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++) {
            of_row[r] = __ldg((const uint2 *)(codes + r * cols));
            scale[r] = __ldg(scales + r * across);
        }
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
#pragma unroll
            for (int i = 0; i < PATCH_COLS / 2; i++) {
                const u32 word = i < 2 ? of_row[r].x : of_row[r].y;
                u32 halves;
                asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)(word >> 16 * (i % 2))));
                Pair pair;
#pragma unroll
                for (int of = 0; of < 2; of++) {
                    float number;
                    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"((u16)(halves >> 16 * of)));
                    pair.of[of] = __fmul_rn(number, scale[r]);
                }
                rows[r].words[i] = word_of(pair);
            }
    }
#endif
};

// What kernels take for them, and what they make of it.
#if CODES
#define FACTORS                                                                                                        \
    const u8 *__restrict__ gate, const u8 *__restrict__ up, const float *__restrict__ gate_scales,                     \
        const float *__restrict__ up_scales
#define FACTORS_OF_KERNEL {gate, up, gate_scales, up_scales}
#else
#define FACTORS const u8 *__restrict__ gate, const u8 *__restrict__ up
#define FACTORS_OF_KERNEL {gate, up}
#endif
