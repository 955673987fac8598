// A tile that is quantized in blocks of 128 x 128, on CUDA's sm_80 and later: a row-major copy, and a transposed one,
// or one of both. The numbers are those of quantize_block_kernel, the portable kernel in portable.rs, to the bit.
//
// Knobs, defined in front of this text:
//   IN_F32, IN_F16 or IN_BF16   the type of the elements
//   ROW_MAJOR, TRANSPOSED       1: there is this copy; at least one
//   ROW_STOCHASTIC, TRANSPOSED_STOCHASTIC   0: the copy is rounded to nearest; 1: stochastically
//   FALLBACK                    1: blocks above the threshold get a residual
//   DRAW_EARLY                  1: random words are drawn before the rounding; 0: where they are used
// and the structure Numbers. scale.cu and int8.cu come before this text.
//
// A block of threads, or cube, quantizes one tile, which is one block of the matrix. A thread has two patches of 4 x 8
// elements: eight neighbours share the words of a Philox counter, and four rows are one word of the transposed copy.
// The lanes of a warp lie in 4 rows of 8 patches.
//
// Where the speed comes from. The whole tile flies at once, straight into shared memory (cp.async), where each thread
// reads only what it copied itself, so that no registers wait for it and no barrier is needed. What is left is the
// number of instructions, most of all those of the pipe for integers and logic, half as wide as that for floats:
//
//   - bytes are gathered by byte permutation, two elements at a time, not shifted and masked one by one,
//   - magnitudes of 16 bits are compared in pairs, and a warp reduces them in one instruction,
//   - a patch is unrolled, and the loop over patches is not: independent instructions enough, and registers few enough
//     for all cubes whose tiles fit into shared memory,
//   - only blocks that fall back look for the largest residual, while they are rounded, in a copy of the loop,
//   - random numbers depend on nothing that is read. Where all tiles fly at once and no other cube has anything to
//     compute meanwhile, those of the second patch are drawn then, and wait where the transposed copy is staged later;
//     those of the first one are drawn before the rounding, as far as the compiler has registers. Where tiles are
//     many, registers are better spent on the rounding.

typedef unsigned char u8;

#define UNITS 256
#define TILE 128
#define PATCH_ROWS 4
#define PATCH_COLS 8
#define PATCHES 2
#define WARP_ROWS (4 * PATCH_ROWS)
#define WARP_COLS (8 * PATCH_COLS)
// Rows from a thread's patch to its next one.
#define PATCH_STEP (UNITS / 32 / (TILE / WARP_COLS) * WARP_ROWS)
#define EVERYONE 0xffffffffu

#ifdef IN_F32
#define ELEMENT_BYTES 4
#else
#define ELEMENT_BYTES 2
#endif
// Random words are drawn.
#define STOCHASTIC (ROW_STOCHASTIC || TRANSPOSED_STOCHASTIC)
// Rows of patches of a thread, and 16-byte vectors of such a row.
#define LINES (PATCHES * PATCH_ROWS)
#define VECTORS (PATCH_COLS * ELEMENT_BYTES / 16)

// Where a thread's first patch lies: in the tile, in the batch, whose rows Philox counts, and in a row-major copy.
struct FirstPatch {
    u32 row, col, batch_row, offset;
};

__device__ __forceinline__ FirstPatch first_patch(const Numbers &numbers) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    FirstPatch first;
    first.row = warp / (TILE / WARP_COLS) * WARP_ROWS + lane / 8 * PATCH_ROWS;
    first.col = warp % (TILE / WARP_COLS) * WARP_COLS + lane % 8 * PATCH_COLS;
    first.batch_row = blockIdx.z * (u32)numbers.rows + blockIdx.y * TILE + first.row;
    first.offset = first.batch_row * (u32)numbers.cols + blockIdx.x * TILE + first.col;
    return first;
}

// The tile's number among all, which is that of its scale.
__device__ __forceinline__ u32 tile_index() {
    return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
}

// ---- The elements ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// Two FP32 vectors of a thread are neighbours, and the first one brings the line of both into the L1 cache. A 16-bit
// row of a patch is one vector, which goes past that cache.
__device__ __forceinline__ void copy_async(uint4 *to, const u8 *from) {
#ifdef IN_F32
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
#endif
}

// The row of a thread's line, from that of its first one.
__device__ __forceinline__ u32 row_of_line(int line) { return line / PATCH_ROWS * PATCH_STEP + line % PATCH_ROWS; }

// Starts to copy the thread's patches of a matrix, from the element where the first one begins.
__device__ __forceinline__ void copy_patches(uint4 *held, const u8 *x, u32 from, u32 row_stride) {
#pragma unroll
    for (int line = 0; line < LINES; line++) {
        const u64 at = from + row_of_line(line) * row_stride;
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            copy_async(held + (line * VECTORS + i) * UNITS, x + at * ELEMENT_BYTES + 16 * i);
    }
}

// Until this thread's copies have landed.
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// A row of a patch.
struct Line {
    u32 words[PATCH_COLS * ELEMENT_BYTES / 4];
};

// Volatile: the compiler would rather keep the elements of an earlier read, and spill registers for them.
__device__ __forceinline__ Line read_line(const uint4 *held, u32 line) {
    Line read;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        u32 *const words = read.words + 4 * i;
        asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(shared_address(held + (line * VECTORS + i) * UNITS)));
    }
    return read;
}

__device__ __forceinline__ void write_line(uint4 *held, u32 line, const Line &written) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const u32 *const words = written.words + 4 * i;
        held[(line * VECTORS + i) * UNITS] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

__device__ __forceinline__ float from_half(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}

__device__ __forceinline__ float element(const Line &line, int col) {
#if defined(IN_F32)
    return __uint_as_float(line.words[col]);
#elif defined(IN_F16)
    return from_half(line.words[col / 2] >> col % 2 * 16);
#else
    const u32 pair = line.words[col / 2];
    return __uint_as_float(col % 2 ? pair & 0xffff0000u : pair << 16);
#endif
}

// The largest magnitude so far and in a line, as bits; of 16-bit elements one in each half of the word. As integers
// they order NaN above infinity above every finite value.
__device__ __forceinline__ u32 larger(u32 largest, const Line &line) {
#pragma unroll
    for (u32 word : line.words) {
#ifdef IN_F32
        largest = max(largest, word & 0x7fffffffu);
#else
        largest = __vmaxu2(largest, word & 0x7fff7fffu);
#endif
    }
    return largest;
}

// The bits of the magnitude as a float.
__device__ __forceinline__ u32 float_bits(u32 largest) {
#if defined(IN_F32)
    return largest;
#elif defined(IN_F16)
    return __float_as_uint(from_half(max(largest >> 16, largest & 0xffffu)));
#else
    return max(largest << 16, largest & 0xffff0000u);
#endif
}

// The largest of all threads' numbers, in all threads. No earlier call may still use the buffer.
__device__ __forceinline__ u32 largest_of_tile(u32 largest, u32 *of_warps) {
    largest = __reduce_max_sync(EVERYONE, largest);
    if (threadIdx.x % 32 == 0)
        of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    return __reduce_max_sync(EVERYONE, of_warps[threadIdx.x % (UNITS / 32)]);
}

// ---- Random numbers -------------------------------------------------------------------------------------------------

__device__ __forceinline__ Key key_of(const Numbers &numbers) {
    return {{numbers.seed[0], numbers.seed[1]}, {numbers.stream[0], numbers.stream[1]}};
}

// The random words of a patch, four for each of its rows.
typedef u32 Random[PATCH_ROWS][4];

// Draws those of a row of the thread's patches.
__device__ __forceinline__ void draw(u32 *words, const FirstPatch &first, int patch, int row, const Key &key) {
    const u32 index = (blockIdx.x * TILE + first.col) / PATCH_COLS;
    philox(words, first.batch_row + patch * PATCH_STEP + row, index, key);
}

// Draws those of the first patch, and leaves those of the second one in `waiting`.
__device__ __forceinline__ void draw_all(Random &random, uint4 *waiting, const FirstPatch &first,
                                         const Key &key) {
#pragma unroll
    for (int row = 0; row < PATCH_ROWS; row++) {
        u32 words[4];
        draw(words, first, 1, row, key);
        waiting[row * UNITS] = make_uint4(words[0], words[1], words[2], words[3]);
    }
#pragma unroll
    for (int row = 0; row < PATCH_ROWS; row++) {
        draw(random[row], first, 0, row, key);
        // Otherwise the compiler draws them all where they are used.
#pragma unroll
        for (u32 &word : random[row])
            asm volatile("" : "+r"(word));
    }
}

__device__ __forceinline__ void take(Random &random, const uint4 *waiting) {
#pragma unroll
    for (int row = 0; row < PATCH_ROWS; row++) {
        const uint4 words = waiting[row * UNITS];
        random[row][0] = words.x;
        random[row][1] = words.y;
        random[row][2] = words.z;
        random[row][3] = words.w;
    }
}

// ---- Rounding -------------------------------------------------------------------------------------------------------

// The part of a value that its nearest integer misses.
__device__ __forceinline__ float residual_of(float value, float nearest, float scale) {
    return __fsub_rn(value, __fmul_rn(__fsub_rn(nearest, ROUND_TO_EVEN), scale));
}

// ---- The copies of a tile -------------------------------------------------------------------------------------------

// The word of four rows of a column in the staged tile, which is ordered by columns. The eight 16-byte chunks of a
// column are permuted by an exclusive or, so that a warp meets no bank twice, neither where it writes words of eight
// patches nor where it reads the chunks of columns.
__device__ __forceinline__ u32 staged_index(u32 row, u32 col) {
    return col * (TILE / 4) + (row / 4 ^ col / PATCH_COLS % 8 * 4);
}

// Rounds the thread's patches: writes the row-major copy and stages the transposed one, as far as there are these, and
// gives the largest magnitude of the residual, if that is asked for.
template <bool WITH_RESIDUAL>
__device__ __forceinline__ float round_patches(u8 *values, u32 *staged, const uint4 *held, const FirstPatch &first,
                                               float inverse, float scale, Random &random,
                                               const Key &key, const Numbers &numbers) {
    const bool zeros = inverse == 0.0f;
    const u32 cols = (u32)numbers.cols;
    const u32 bits_of_384 = (u32)numbers.bits_of_384;
#if ROW_MAJOR
    u8 *out = values + first.offset;
#endif
    float largest = 0.0f;
#pragma unroll 1
    for (int patch = 0; patch < PATCHES; patch++) {
        u32 columns[PATCH_COLS];
#pragma unroll
        for (int pair = 0; pair < PATCH_ROWS / 2; pair++) {
            float nearest[2][PATCH_COLS], sums[2][PATCH_COLS];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = 2 * pair + i;
#if STOCHASTIC && !DRAW_EARLY
                draw(random[row], first, patch, row, key);
#endif
                const Line x = read_line(held, patch * PATCH_ROWS + row);
#pragma unroll
                for (int col = 0; col < PATCH_COLS; col++) {
                    const float value = element(x, col);
                    const float scaled = __fmul_rn(value, inverse);
                    nearest[i][col] = __fadd_rn(scaled, ROUND_TO_EVEN);
#if STOCHASTIC
                    sums[i][col] = __fadd_rn(scaled, stochastic_offset(random[row], col, bits_of_384));
#endif
                    if (WITH_RESIDUAL)
                        largest = fmaxf(largest, fabsf(residual_of(value, nearest[i][col], scale)));
                }
#if ROW_MAJOR
                u32 words[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
#if ROW_STOCHASTIC
                    const float *const sum = sums[i] + 4 * half;
                    const u32 both = stochastic_pair(sum[0], sum[1]), others = stochastic_pair(sum[2], sum[3]);
                    words[half] = stochastic_word(both, others, zeros);
#else
                    words[half] = nearest_word(nearest[i] + 4 * half, zeros);
#endif
                }
                *(uint2 *)(out + row * cols) = make_uint2(words[0], words[1]);
#endif
            }
#if TRANSPOSED
#pragma unroll
            for (int col = 0; col < PATCH_COLS; col++) {
#if TRANSPOSED_STOCHASTIC
                const u32 both = stochastic_pair(sums[0][col], sums[1][col]);
                columns[col] = pair == 0 ? both : stochastic_word(columns[col], both, zeros);
#else
                const u32 both = nearest_pair(nearest[0][col], nearest[1][col]);
                columns[col] = pair == 0 ? both : nearest_word(columns[col], both, zeros);
#endif
            }
#endif
        }
#if DRAW_EARLY
        if (patch == 0) {
            take(random, (const uint4 *)staged + threadIdx.x);
            __syncthreads();
        }
#endif
#if TRANSPOSED
#pragma unroll
        for (int col = 0; col < PATCH_COLS; col++)
            staged[staged_index(first.row + patch * PATCH_STEP, first.col + col)] = columns[col];
#endif
#if ROW_MAJOR
        out += PATCH_STEP * cols;
#endif
    }
    return largest;
}

// Writes the residual of the thread's patches.
__device__ __forceinline__ void round_residual(u8 *values, const uint4 *held, const FirstPatch &first, float inverse,
                                               float scale, float residual_inverse, u32 cols) {
    u8 *out = values + first.offset;
#pragma unroll 1
    for (int patch = 0; patch < PATCHES; patch++) {
#pragma unroll
        for (int row = 0; row < PATCH_ROWS; row++) {
            const Line x = read_line(held, patch * PATCH_ROWS + row);
            float sums[PATCH_COLS];
#pragma unroll
            for (int col = 0; col < PATCH_COLS; col++) {
                const float value = element(x, col);
                const float nearest = __fadd_rn(__fmul_rn(value, inverse), ROUND_TO_EVEN);
                const float residual = residual_of(value, nearest, scale);
                sums[col] = __fadd_rn(__fmul_rn(residual, residual_inverse), ROUND_TO_EVEN);
            }
            const bool zeros = residual_inverse == 0.0f;
            *(uint2 *)(out + row * cols) = make_uint2(nearest_word(sums, zeros), nearest_word(sums + 4, zeros));
        }
        out += PATCH_STEP * cols;
    }
}

// Writes the staged tile to the transposed copy, if there is one.
__device__ __forceinline__ void write_transposed(u8 *transposed, const u32 *staged, u32 rows, u32 cols) {
#if TRANSPOSED
    const u32 chunk = threadIdx.x % 8, col = threadIdx.x / 8;
    const u32 batch_col = blockIdx.z * cols + blockIdx.x * TILE + col;
    u8 *const out = transposed + (u64)batch_col * rows + blockIdx.y * TILE + 16 * chunk;
#pragma unroll
    for (int i = 0; i < TILE * TILE / 16 / UNITS; i++) {
        const u32 step = i * (UNITS / 8);
        *(uint4 *)(out + (u64)step * rows) = *(const uint4 *)(staged + staged_index(16 * chunk, col + step));
    }
#endif
}

// ---- A tile ---------------------------------------------------------------------------------------------------------

// Where the copies of a matrix go. With FALLBACK also those of its residual, the flags and the layer's counts.
struct Outputs {
    u8 *values, *transposed;
    float *scales;
    u8 *residual_values;
    float *residual_scales;
    u32 *flags;
    int *of_layer;
};

// Quantizes the tile that waits in shared memory, of this largest magnitude. Threads may still be reading what waits in
// `staged` when the last ones leave.
__device__ __forceinline__ void quantize_tile(const Outputs &to, const uint4 *held, u32 *staged, u32 *of_warps,
                                              const FirstPatch &first, u32 absmax, float threshold, Random &random,
                                              const Key &key, const Numbers &numbers) {
    const u32 rows = (u32)numbers.rows, cols = (u32)numbers.cols;
    const float inverse = inverse_of(absmax), scale = scale_of(absmax);
    const bool falls_back = FALLBACK && absmax < INFINITE && __uint_as_float(absmax) > threshold;
    const u32 block = tile_index();
    if (threadIdx.x == 0) {
        to.scales[block] = scale;
        if (FALLBACK) {
            to.flags[block] = falls_back;
            if (falls_back)
                atomicAdd(to.of_layer, 1);
            else
                to.residual_scales[block] = 0.0f;
            if (block == 0)
                atomicAdd(to.of_layer + 1, (int)(gridDim.x * gridDim.y * gridDim.z));
        }
    }
    if (falls_back) {
        const float most = round_patches<true>(to.values, staged, held, first, inverse, scale, random, key, numbers);
        // Its barrier is that of the staged tile too.
        const u32 residual_absmax = largest_of_tile(__float_as_uint(most), of_warps);
        if (threadIdx.x == 0)
            to.residual_scales[block] = scale_of(residual_absmax);
        write_transposed(to.transposed, staged, rows, cols);
        round_residual(to.residual_values, held, first, inverse, scale, inverse_of(residual_absmax), cols);
    } else {
        round_patches<false>(to.values, staged, held, first, inverse, scale, random, key, numbers);
        __syncthreads();
        write_transposed(to.transposed, staged, rows, cols);
    }
}
