// Quantizes a matrix of tiles of 128 x 128 to FP8 in groups of 128, to nearest: once in groups along its rows, and
// once, as its transpose, in groups along its columns, on CUDA's sm_90. The numbers are those of the portable kernel in
// group.rs, to the bit.
//
// Knobs, defined in front of this text, beside those of patch.cu and of group/scale.cu, which come before it; elements
// have 16 bits:
//   CUBES     blocks of threads that share a multiprocessor
// and the structure Numbers.
//
// A block of threads has one tile after another, in which groups of both kinds are whole, so that the matrix is read
// once. A thread has two patches, 64 rows apart; 16 neighbours have the groups of 4 rows each. They find the maxima of
// rows among themselves, two in a word, and those of columns through shared memory. As soon as a tile is in registers
// the next one begins to fly to shared memory, where each thread reads only what it copied itself: so the device reads
// while the block rounds.

#define UNITS 256
#define TILE 128
#define PATCHES 2
#define EVERYONE 0xffffffffu
// Threads across a tile, and the rows from a thread's patch to its next one.
#define ACROSS (TILE / PATCH_COLS)
#define PATCH_STEP (TILE / PATCHES)
#define WARPS (UNITS / 32)

// ---- Maxima ---------------------------------------------------------------------------------------------------------

// The bits of a magnitude of 16 bits as a float's.
__device__ __forceinline__ u32 widened(u32 magnitude) {
    return __float_as_uint(from_16_bits(magnitude));
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

// The word of four rows of a column in the staged tile, which is ordered by columns. An exclusive or with the patch
// keeps the words of a warp in different banks, and the four words of 16 rows in 16 bytes, though in pairs of either
// order.
__device__ __forceinline__ u32 staged_index(u32 word, u32 col) {
    return col * (TILE / 4) + (word ^ col / PATCH_COLS * 2);
}

// A thread's place in a tile.
struct Place {
    u32 row, col;
};

// Starts to copy the thread's patches of a tile, of those that a row of them has.
__device__ __forceinline__ void copy_patches(uint4 *held, const u8 *x, u32 tile, u32 across, const Place &place,
                                             u64 row_stride) {
    const u64 row = (u64)(tile / across) * TILE + place.row, col = (u64)(tile % across) * TILE + place.col;
#pragma unroll
    for (int p = 0; p < PATCHES; p++)
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++) {
            const u32 to = (u32)__cvta_generic_to_shared(held + (p * PATCH_ROWS + r) * UNITS);
            const u8 *const from = x + ((row + p * PATCH_STEP + r) * row_stride + col) * ELEMENT_BYTES;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
        }
}

// x: [rows, cols], its columns dense, its rows at multiples of 16 bytes. values: [rows, cols], scales:
// [rows, cols / 128], transposed: [cols, rows], scales_of_transposed: [cols, rows / 128], all dense.
extern "C" __global__ void __launch_bounds__(UNITS, CUBES)
    quantize_groups_both_ways(const u8 *__restrict__ x, u8 *__restrict__ values, Scale *__restrict__ scales,
                              u8 *__restrict__ transposed, Scale *__restrict__ scales_of_transposed,
                              const __grid_constant__ Numbers numbers) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ __align__(16) u32 staged[TILE * TILE / 4];
    __shared__ __align__(16) u32 of_warps[WARPS][TILE / 2];
    __shared__ __align__(16) float inverses[TILE];
    const u64 rows = numbers.rows, cols = numbers.cols;
    const u32 across = (u32)(cols / TILE), tiles = across * (u32)(rows / TILE);
    const u32 patch_row = threadIdx.x / ACROSS, patch_col = threadIdx.x % ACROSS, lane = threadIdx.x % 32;
    const Place place = {patch_row * PATCH_ROWS, patch_col * PATCH_COLS};
    uint4 *const held = (uint4 *)memory + threadIdx.x;
    copy_patches(held, x, blockIdx.x, across, place, numbers.row_stride);
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u64 first_row = (u64)(tile / across) * TILE, first_col = (u64)(tile % across) * TILE;
        const u64 row = first_row + place.row, col = first_col + place.col;
        asm volatile("cp.async.wait_all;" ::: "memory");
        Rows patches[PATCHES];
#pragma unroll
        for (int p = 0; p < PATCHES; p++)
#pragma unroll
            for (int r = 0; r < PATCH_ROWS; r++)
                *(uint4 *)patches[p][r].words = held[(p * PATCH_ROWS + r) * UNITS];

        // Of columns, two neighbours in a word: those of the warp's rows.
        u32 of_cols[PATCH_COLS / 2] = {};
#pragma unroll
        for (int word = 0; word < PATCH_COLS / 2; word++) {
#pragma unroll
            for (int p = 0; p < PATCHES; p++)
#pragma unroll
                for (int r = 0; r < PATCH_ROWS; r++)
                    of_cols[word] = larger_pair(of_cols[word], patches[p][r].words[word] & 0x7fff7fffu);
            of_cols[word] = larger_pair(of_cols[word], __shfl_xor_sync(EVERYONE, of_cols[word], ACROSS));
        }
        // What the thread has read is in its registers by now.
        if (tile + gridDim.x < tiles)
            copy_patches(held, x, tile + gridDim.x, across, place, numbers.row_stride);
        if (lane < ACROSS)
            *(uint4 *)&of_warps[threadIdx.x / 32][4 * patch_col] =
                make_uint4(of_cols[0], of_cols[1], of_cols[2], of_cols[3]);

        // Of rows, two of a patch in a word. A lane of 16 then has one of their 8 groups, and the others its inverse.
        u32 own = 0;
#pragma unroll
        for (int p = 0; p < PATCHES; p++)
#pragma unroll
            for (int r = 0; r < PATCH_ROWS; r += 2) {
                u32 pair = larger_half(larger(0, patches[p][r])) | larger_half(larger(0, patches[p][r + 1])) << 16;
#pragma unroll
                for (int other = 1; other < ACROSS; other *= 2)
                    pair = larger_pair(pair, __shfl_xor_sync(EVERYONE, pair, other));
                const int first = p * PATCH_ROWS + r;
                own = patch_col == first ? pair & 0xffffu : patch_col == first + 1 ? pair >> 16 : own;
            }
        const OfGroup of_row = of_group(widened(own));
        if (patch_col < PATCHES * PATCH_ROWS) {
            const u64 of_lane = row + patch_col / PATCH_ROWS * PATCH_STEP + patch_col % PATCH_ROWS;
            scales[of_lane * across + tile % across] = of_row.scale;
        }
#pragma unroll
        for (int p = 0; p < PATCHES; p++)
#pragma unroll
            for (int r = 0; r < PATCH_ROWS; r++) {
                const u32 of_lane = lane / ACROSS * ACROSS + p * PATCH_ROWS + r;
                const float inverse = __shfl_sync(EVERYONE, of_row.inverse, of_lane);
                const bool zeros = inverse == 0.0f;
                const u32 first = codes_of(patches[p][r], 0, inverse), second = codes_of(patches[p][r], 4, inverse);
                *(uint2 *)(values + (row + p * PATCH_STEP + r) * cols + col) =
                    make_uint2(zeros ? 0 : first, zeros ? 0 : second);
            }

        __syncthreads();
        if (threadIdx.x < TILE) {
            u32 pair = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++)
                pair = larger_pair(pair, of_warps[warp][threadIdx.x / 2]);
            const OfGroup of_col = of_group(widened(threadIdx.x % 2 ? pair >> 16 : pair & 0xffffu));
            scales_of_transposed[(first_col + threadIdx.x) * (rows / TILE) + tile / across] = of_col.scale;
            inverses[threadIdx.x] = of_col.inverse;
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < PATCH_COLS; c++) {
            const float inverse = inverses[PATCH_COLS * patch_col + c];
#pragma unroll
            for (int p = 0; p < PATCHES; p++) {
                const Rows &patch = patches[p];
                const u32 word = codes_of(
                    {element(patch[0], c), element(patch[1], c), element(patch[2], c), element(patch[3], c)}, inverse);
                staged[staged_index(patch_row + p * (PATCH_STEP / 4), PATCH_COLS * patch_col + c)] =
                    inverse == 0.0f ? 0 : word;
            }
        }
        __syncthreads();
        const u32 chunk = threadIdx.x % 8;
#pragma unroll
        for (u32 of_tile = threadIdx.x / 8; of_tile < TILE; of_tile += UNITS / 8) {
            const bool swapped = of_tile / PATCH_COLS % 2;
            const uint4 words = *(const uint4 *)&staged[staged_index(4 * chunk, of_tile) / 4 * 4];
            *(uint4 *)(transposed + (first_col + of_tile) * rows + first_row + 16 * chunk) =
                swapped ? make_uint4(words.z, words.w, words.x, words.y) : words;
        }
    }
}
