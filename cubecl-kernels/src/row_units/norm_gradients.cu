// The gradients of RMSNorm and of layer normalization, in the order of operations of rms_norm.rs and layer_norm.rs: in
// front of this text stand pairs.cu and rows.cu. Knobs beside theirs:
//   CENTRED   1: layer normalization; 0: RMSNorm
//   TERMS     1 to 3 terms of the gradient of the output
//   TERM_CODES, TERM_SCALE_ROWS, TERM_SCALE_COLS   of each term what CODES, SCALE_ROWS and SCALE_COLS are of x
//   OTHER     1: there is a gradient that is added to that of the input
// and the structure Numbers.
//
// While a row is computed the next one flies to shared memory, where each thread reads only what it copied itself, so that
// no barrier waits for memory. Between both passes over a row a thread holds its elements in 16 bits, which leaves
// registers for the sums of its columns.

// What a thread has in flight of a row.
struct Stage {
#if CODES
    uint2 x[HELD][THREADS];
    float scales[HELD][THREADS];
#else
    uint4 x[HELD][THREADS];
#endif
#if TERM_CODES
    uint2 terms[TERMS][HELD][THREADS];
    float scales_of_terms[TERMS][HELD][THREADS];
#else
    uint4 terms[TERMS][HELD][THREADS];
#endif
#if OTHER
    uint4 other[HELD][THREADS];
#endif
};

template <int Bytes> __device__ __forceinline__ void copy_async(void *to, const void *from) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    if constexpr (Bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(Bytes) : "memory");
}

__device__ __forceinline__ Pair sum_of(const Pair &pair, const Pair &other) {
    Pair sum;
    sum.of[0] = __fadd_rn(pair.of[0], other.of[0]), sum.of[1] = __fadd_rn(pair.of[1], other.of[1]);
    return sum;
}

struct Statistics {
    float inverse;
#if CENTRED
    float mean;
#endif
};

__device__ __forceinline__ float normalized(float x, const Statistics &statistics) {
#if CENTRED
    x = __fsub_rn(x, statistics.mean);
#endif
    return __fmul_rn(x, statistics.inverse);
}

// A term, what the kernel takes for it, and makes of that.
#if TERM_CODES
typedef CodedMatrix<TERM_CODES, TERM_SCALE_ROWS, TERM_SCALE_COLS> Term;
#define TERM(i) const u8 *__restrict__ term##i, const float *__restrict__ scales_of_term##i,
#define TERM_OF_KERNEL(i) {term##i, scales_of_term##i},
#else
typedef Matrix Term;
#define TERM(i) const u8 *__restrict__ term##i,
#define TERM_OF_KERNEL(i) {term##i},
#endif

struct Gradients {
    Term terms[TERMS];
#if OTHER
    const u8 *__restrict__ other;
#endif
};

__device__ __forceinline__ void copy_row(Stage &stage, const Input &x, const Gradients &gradients, u64 row) {
    const u32 thread = threadIdx.x;
#pragma unroll
    for (int piece = 0; piece < HELD; piece++) {
        const u32 index = vector_index(piece);
        const u64 vector = row * VECTORS + index;
#if CODES
        copy_async<8>(&stage.x[piece][thread], (const uint2 *)x.values + vector);
        copy_async<4>(&stage.scales[piece][thread], x.scale(row, index));
#else
        copy_async<16>(&stage.x[piece][thread], (const uint4 *)x.values + vector);
#endif
#pragma unroll
        for (int i = 0; i < TERMS; i++) {
            const Term &term = gradients.terms[i];
#if TERM_CODES
            copy_async<8>(&stage.terms[i][piece][thread], (const uint2 *)term.values + vector);
            copy_async<4>(&stage.scales_of_terms[i][piece][thread], term.scale(row, index));
#else
            copy_async<16>(&stage.terms[i][piece][thread], (const uint4 *)term.values + vector);
#endif
        }
#if OTHER
        copy_async<16>(&stage.other[piece][thread], (const uint4 *)gradients.other + vector);
#endif
    }
}

// What a thread holds of a row: its elements, and the sum of the terms. Both are 0 past its end.
struct Taken {
    Vector x[HELD], dy[HELD];
#if OTHER
    Vector other[HELD];
#endif
};

__device__ __forceinline__ void take_term(Vector &taken, const Stage &stage, int term, int piece) {
#if TERM_CODES
    Term::decode(taken, stage.terms[term][piece][threadIdx.x], stage.scales_of_terms[term][piece][threadIdx.x]);
#else
    taken = stage.terms[term][piece][threadIdx.x];
#endif
}

__device__ __forceinline__ void take(Taken &taken, const Stage &stage) {
    const u32 thread = threadIdx.x;
#pragma unroll
    for (int piece = 0; piece < HELD; piece++) {
        Vector &x = taken.x[piece], &dy = taken.dy[piece];
#if CODES
        Input::decode(x, stage.x[piece][thread], stage.scales[piece][thread]);
#else
        x = stage.x[piece][thread];
#endif
        take_term(dy, stage, 0, piece);
#pragma unroll
        for (int term = 1; term < TERMS; term++) {
            Vector next;
            take_term(next, stage, term, piece);
#pragma unroll
            for (int word = 0; word < WIDTH / 2; word++)
                dy.words[word] = word_of(sum_of(dy.pair(word), next.pair(word)));
        }
        if (!is_inside(piece))
            x = make_uint4(0, 0, 0, 0), dy = make_uint4(0, 0, 0, 0);
#if OTHER
        taken.other[piece] = stage.other[piece][thread];
#endif
    }
}

__device__ __forceinline__ void write_sums(float *__restrict__ to, const Held &sums) {
#pragma unroll
    for (int piece = 0; piece < HELD; piece++)
        if (is_inside(piece)) {
            float4 *const at = (float4 *)to + (u64)blockIdx.x * (COLS / 4) + 2 * vector_index(piece);
            const float *const of = sums.of[piece];
            at[0] = make_float4(of[0], of[1], of[2], of[3]);
            at[1] = make_float4(of[4], of[5], of[6], of[7]);
        }
}

// Adds the sums of a block's rows up, one row after the other, into those of the last. `shared` has a row of floats.
__device__ __forceinline__ void add_rows(Held &sums, float *shared) {
#if ROWS > 1
    for (u32 row = 0; row < ROWS; row++) {
        __syncthreads();
        if (row == threadIdx.x / LANES)
#pragma unroll
            for (int piece = 0; piece < HELD; piece++)
#pragma unroll
                for (int i = 0; i < WIDTH; i++) {
                    float *const slot = shared + (piece * WIDTH + i) * LANES + threadIdx.x % LANES;
                    if (row > 0)
                        sums.of[piece][i] = __fadd_rn(sums.of[piece][i], *slot);
                    *slot = sums.of[piece][i];
                }
    }
#endif
}

// Statistics: of RMSNorm the inverse root mean square of each row; of layer normalization its mean and its inverse
// deviation. of_gain, of_bias: [gridDim.x, COLS], whose sum over rows is the gradient.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_gradients(const u8 *__restrict__ x,
#if CODES
                   const float *__restrict__ scales,
#endif
                   const u8 *__restrict__ gain,
#if CENTRED
                   const float *__restrict__ means,
#endif
                   const float *__restrict__ inverses, TERM(0)
#if TERMS > 1
                   TERM(1)
#endif
#if TERMS > 2
                   TERM(2)
#endif
#if OTHER
                   const u8 *__restrict__ other,
#endif
                   u8 *__restrict__ of_x, float *__restrict__ of_gain,
#if CENTRED
                   float *__restrict__ of_bias,
#endif
                   const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ float of_warps[2][(THREADS + 31) / 32][1 + CENTRED];
    Stage &stage = *(Stage *)memory;
    const Input input = {x,
#if CODES
                         scales
#endif
    };
    const Gradients gradients = {{TERM_OF_KERNEL(0)
#if TERMS > 1
                                  TERM_OF_KERNEL(1)
#endif
#if TERMS > 2
                                  TERM_OF_KERNEL(2)
#endif
                                 },
#if OTHER
                                 other
#endif
    };
    // Threads past the last row take part in what the others wait for, and add and write nothing.
    const u64 rows = numbers.rows, step = (u64)gridDim.x * ROWS, last = rows - 1;
    u64 row = (u64)blockIdx.x * ROWS + threadIdx.x / LANES;
    copy_row(stage, input, gradients, min(row, last));
    Held gains, of_gains = {};
#if CENTRED
    Held of_biases = {};
#endif
    read_floats(gains, gain, GAIN_F32);
    u32 turn = 0;
    for (u64 first = (u64)blockIdx.x * ROWS; first < rows; first += step, row += step, turn ^= 1) {
        const bool counts = row < rows;
        Statistics of_row;
        of_row.inverse = __ldg(inverses + min(row, last));
#if CENTRED
        of_row.mean = __ldg(means + min(row, last));
#endif
        Taken taken;
        asm volatile("cp.async.wait_all;" ::: "memory");
        take(taken, stage);
        // What the thread has read is in its registers by now.
        if (first + step < rows)
            copy_row(stage, input, gradients, min(row + step, last));
        // Of `p`, where the mean is subtracted, and of `p n`: together, they wait once for the row's threads.
        float sums[1 + CENTRED] = {};
#pragma unroll
        for (int piece = 0; piece < HELD; piece++)
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                const float n = normalized(taken.x[piece].element(i), of_row), dy = taken.dy[piece].element(i);
                const float p = __fmul_rn(dy, gains.of[piece][i]);
                float &of_gain = of_gains.of[piece][i];
                of_gain = __fadd_rn(of_gain, counts ? __fmul_rn(dy, n) : 0.0f);
#if CENTRED
                float &of_bias = of_biases.of[piece][i];
                of_bias = __fadd_rn(of_bias, counts ? dy : 0.0f);
                sums[0] = __fadd_rn(sums[0], p);
#endif
                sums[CENTRED] = __fmaf_rn(p, n, sums[CENTRED]);
            }
        row_sums(sums, of_warps[turn]);
        if (!counts)
            continue;
        const float mean_product = mean_of(sums[CENTRED]);
#pragma unroll
        for (int piece = 0; piece < HELD; piece++) {
            Vector out;
#pragma unroll
            for (int word = 0; word < WIDTH / 2; word++) {
                Pair pair;
#pragma unroll
                for (int of = 0; of < 2; of++) {
                    const int i = 2 * word + of;
                    float p = __fmul_rn(taken.dy[piece].element(i), gains.of[piece][i]);
#if CENTRED
                    p = __fsub_rn(p, mean_of(sums[0]));
#endif
                    const float n = normalized(taken.x[piece].element(i), of_row);
                    pair.of[of] = __fmul_rn(of_row.inverse, __fmaf_rn(-n, mean_product, p));
                }
#if OTHER
                pair = sum_of(pair_of(word_of(pair)), taken.other[piece].pair(word));
#endif
                out.words[word] = word_of(pair);
            }
            out.write(of_x, row, piece);
        }
    }
    add_rows(of_gains, (float *)memory);
#if CENTRED
    add_rows(of_biases, (float *)memory);
#endif
    if (threadIdx.x / LANES == ROWS - 1) {
        write_sums(of_gain, of_gains);
#if CENTRED
        write_sums(of_bias, of_biases);
#endif
    }
}
