// A matrix that waits as E4M3 codes in groups along the rows, with FP32 scales, of which a thread reads patches: in front
// of this text stand patch.cu and pairs.cu.
//
// Knobs, defined in front of this text:
//   CODES   the elements of a group, whole rows of patches; 0: no codes are read

// Of a product of bounds, so that the roundings of a few products stay below.
#define SLACK 1.02f

#if CODES
#define LARGEST_CODE 448.0f

struct Codes {
    // [rows, cols], dense.
    const u8 *__restrict__ values;
    // [rows, cols / CODES], dense.
    const float *__restrict__ scales;

    // The patch that begins at an element.
    __device__ __forceinline__ void read(Rows &rows, u64 from, u64 cols) const {
        uint2 of_row[PATCH_ROWS];
        float scale[PATCH_ROWS];
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++) {
            of_row[r] = __ldg((const uint2 *)(values + from + r * cols));
            scale[r] = __ldg(scales + from / CODES + r * (cols / CODES));
        }
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
            decode_e4m3(rows[r].words, of_row[r], scale[r]);
    }

    // The row of a patch that has this number in the matrix.
    __device__ __forceinline__ void read(Row &row, u64 piece) const {
        decode_e4m3(row.words, __ldg((const uint2 *)values + piece), __ldg(scales + piece * PATCH_COLS / CODES));
    }

    // What no magnitude in that row exceeds, with some slack: of the largest code, as it is decoded. NaN where one is.
    __device__ __forceinline__ float bound(u64 piece) const {
        Pair most;
        most.of[0] = most.of[1] = __fmul_rn(LARGEST_CODE, __ldg(scales + piece * PATCH_COLS / CODES));
        return SLACK * pair_of(word_of(most)).of[0];
    }
};
#endif
