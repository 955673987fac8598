// RMSNorm and layer normalization of codes, in the order of operations of rms_norm.rs and layer_norm.rs: in front of this
// text stand pairs.cu and rows.cu. Knobs beside theirs:
//   CENTRED   1: layer normalization; 0: RMSNorm
//   OUTPUT    1: the output is wanted, not only what is found of rows
//   BIAS      1: it has a bias, like the gains
// and the structure Numbers.

// means, inverses: of each row, as the gradients read them. output: [rows, COLS].
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_of_codes(const u8 *__restrict__ x, const float *__restrict__ scales,
#if OUTPUT
                  const u8 *__restrict__ gain,
#endif
#if BIAS
                  const u8 *__restrict__ bias,
#endif
#if OUTPUT
                  u8 *__restrict__ output,
#endif
#if CENTRED
                  float *__restrict__ means,
#endif
                  float *__restrict__ inverses, const __grid_constant__ Numbers numbers) {
    __shared__ float of_warps[1 + CENTRED][(THREADS + 31) / 32][1];
    const Input input = {x, scales};
    const u64 row = (u64)blockIdx.x * ROWS + threadIdx.x / LANES;
    // Threads past the last row take part in what the others wait for, and write nothing.
    const u64 read_row = min(row, (u64)numbers.rows - 1);
    Held values;
    uint2 codes[HELD];
    float of_codes[HELD];
#pragma unroll
    for (int piece = 0; piece < HELD; piece++) {
        const u32 index = vector_index(piece);
        codes[piece] = __ldg((const uint2 *)input.values + read_row * VECTORS + index);
        of_codes[piece] = __ldg(input.scale(read_row, index));
    }
#if OUTPUT
    Held gains;
    read_floats(gains, gain, GAIN_F32);
#endif
#pragma unroll
    for (int piece = 0; piece < HELD; piece++) {
        Vector vector;
        Input::decode(vector, codes[piece], of_codes[piece]);
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            values.of[piece][i] = is_inside(piece) ? vector.element(i) : 0.0f;
    }
#if CENTRED
    float sum[1] = {};
#pragma unroll
    for (int piece = 0; piece < HELD; piece++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            sum[0] = __fadd_rn(sum[0], values.of[piece][i]);
    row_sums(sum, of_warps[1]);
    const float mean = mean_of(sum[0]);
#pragma unroll
    for (int piece = 0; piece < HELD; piece++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            values.of[piece][i] = is_inside(piece) ? __fsub_rn(values.of[piece][i], mean) : 0.0f;
#endif
    float squares[1] = {};
#pragma unroll
    for (int piece = 0; piece < HELD; piece++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            squares[0] = __fmaf_rn(values.of[piece][i], values.of[piece][i], squares[0]);
    row_sums(squares, of_warps[0]);
    const float inverse = rsqrtf(__fadd_rn(mean_of(squares[0]), __uint_as_float((u32)numbers.bits_of_epsilon)));
    if (row >= numbers.rows)
        return;
#if OUTPUT
#if BIAS
    Held biases;
    read_floats(biases, bias, GAIN_F32);
#endif
#pragma unroll
    for (int piece = 0; piece < HELD; piece++) {
        Vector out;
#pragma unroll
        for (int word = 0; word < WIDTH / 2; word++) {
            Pair pair;
#pragma unroll
            for (int of = 0; of < 2; of++) {
                const int i = 2 * word + of;
                const float normalized = __fmul_rn(values.of[piece][i], inverse), of_column = gains.of[piece][i];
#if BIAS
                pair.of[of] = __fmaf_rn(normalized, of_column, biases.of[piece][i]);
#else
                pair.of[of] = __fmul_rn(normalized, of_column);
#endif
            }
            out.words[word] = word_of(pair);
        }
        out.write(output, row, piece);
    }
#endif
    if (threadIdx.x % LANES == 0) {
#if CENTRED
        means[row] = mean;
#endif
        inverses[row] = inverse;
    }
}
