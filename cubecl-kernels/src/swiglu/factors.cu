// Gate and up of SwiGLU, of which a thread reads a patch each: in front of this text stand patch.cu, pairs.cu and codes.cu.
//
// Knobs, defined in front of this text:
//   CODES   0: they are 16-bit elements; else codes, and see codes.cu
// and the structure Numbers, of which this text reads the columns.

// [rows, cols], dense.
struct Factors {
#if CODES
    Codes gate, up;

    // The rows of a patch that have this number in the matrices.
    __device__ __forceinline__ void read(Row &of_gate, Row &of_up, u64 piece) const {
        gate.read(of_gate, piece);
        up.read(of_up, piece);
    }
#else
    const u8 *__restrict__ gate, *__restrict__ up;
#endif

    // The patches that begin at an element.
    __device__ __forceinline__ void read(Rows &of_gate, Rows &of_up, u64 from, const Numbers &numbers) const {
#if CODES
        gate.read(of_gate, from, numbers.cols);
        up.read(of_up, from, numbers.cols);
#else
        read_rows(of_gate, gate, from, numbers.cols);
        read_rows(of_up, up, from, numbers.cols);
#endif
    }
};

// What kernels take for them, and what they make of it.
#if CODES
#define FACTORS                                                                                                        \
    const u8 *__restrict__ gate, const u8 *__restrict__ up, const float *__restrict__ gate_scales,                     \
        const float *__restrict__ up_scales
#define FACTORS_OF_KERNEL {{gate, gate_scales}, {up, up_scales}}
#else
#define FACTORS const u8 *__restrict__ gate, const u8 *__restrict__ up
#define FACTORS_OF_KERNEL {gate, up}
#endif
