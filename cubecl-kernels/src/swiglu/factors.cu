// Gate and up of SwiGLU, of which a thread reads a patch each: in front of this text stand patch.cu and pairs.cu.
//
// Knobs, defined in front of this text:
//   CODES   the elements of a group along the rows, whole rows of patches, where they are E4M3 codes with FP32 scales;
//           0: they are 16-bit elements
// and the structure Numbers, of which this text reads the columns.

// Of E4M3.
#define LARGEST_CODE 448.0f
#define SLACK 1.02f

// gate, up: [rows, cols], dense.
struct Factors {
    const u8 *__restrict__ gate, *__restrict__ up;
#if CODES
    // [rows, cols / CODES].
    const float *__restrict__ gate_scales, *__restrict__ up_scales;
#endif

    // The patches that begin at an element.
    __device__ __forceinline__ void read(Rows &of_gate, Rows &of_up, u64 from, const Numbers &numbers) const {
#if CODES
        const u64 of_scales = from / CODES, across = numbers.cols / CODES;
        read_codes(of_gate, gate + from, gate_scales + of_scales, numbers.cols, across);
        read_codes(of_up, up + from, up_scales + of_scales, numbers.cols, across);
#else
        read_rows(of_gate, gate, from, numbers.cols);
        read_rows(of_up, up, from, numbers.cols);
#endif
    }

#if CODES
    // The same of a row of a patch, by its number in the matrix.
    __device__ __forceinline__ void read(Row &of_gate, Row &of_up, u64 row) const {
        const u64 from = row * PATCH_COLS, of_scales = from / CODES;
        decode_e4m3(of_gate.words, __ldg((const uint2 *)(gate + from)), __ldg(gate_scales + of_scales));
        decode_e4m3(of_up.words, __ldg((const uint2 *)(up + from)), __ldg(up_scales + of_scales));
    }

    // What no magnitude in a row of a patch exceeds by more than what roundings add, with SLACK for a few of these.
    __device__ __forceinline__ void bound(float &of_gate, float &of_up, u64 row) const {
        const u64 of_scales = row * PATCH_COLS / CODES;
        of_gate = LARGEST_CODE * SLACK * __ldg(gate_scales + of_scales);
        of_up = LARGEST_CODE * SLACK * __ldg(up_scales + of_scales);
    }

    // The elements of a patch, each of whose rows has one scale.
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
            decode_e4m3(rows[r].words, of_row[r], scale[r]);
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
