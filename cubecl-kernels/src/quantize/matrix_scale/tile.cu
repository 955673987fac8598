// A tile that is quantized to FP8 by one scale for its matrix, on CUDA's sm_90. The numbers are those of the portable
// kernels, to the bit, but for the sign of a NaN in FP16, which those drop.
//
// Knobs, defined in front of this text, beside those of patch.cu, which comes before it as scale.cu does:
//   DELAYED                 1: the scale is that of a maximum that earlier data had, and the matrix's own is found too
//                           (delayed scaling); 0: the scale is that of its own (current scaling)
//   LARGEST                 the largest number
//   ROW_MAJOR, TRANSPOSED   1: the copy is wanted
// and the structure Numbers, of which this text reads the rows and the columns.
//
// By delayed scaling blocks of threads take a tile each, by its place. What needs the largest magnitude of all tiles,
// the last block does that leaves: so nothing has to be read, or launched, behind the one read. By current scaling, and
// where a layer has no maximum yet, the blocks that run take tiles by turns, first for their magnitudes, and when all of
// these are there once more, to quantize them: from the last tile on, since the cache still has it.
//
// A thread has a patch, all of whose reads are in flight at once; the lanes of a warp read 256 neighbours of two rows
// of 16-bit elements.
//
// The elements come from a source: a structure whose `read` gives the rows of a patch. What is computed of codes need not
// be computed twice: such a source is `BOUNDED`, and also knows a `bound` of the magnitudes in a piece, a row of a patch,
// by its number in the matrix, and can `look` at them. Blocks tell each other the largest one so far, and look only at
// pieces whose bound is above it.

#define UNITS 256
#define TILE_ROWS 64
#define TILE_COLS 128
#define EVERYONE 0xffffffffu

// The words of the transposed copy, each four rows of a column. Four more keep 16-byte writes aligned, and rows in
// different banks.
typedef u32 Staging[TILE_ROWS / PATCH_ROWS][TILE_COLS + 4];

// The sign of an element, and all ones below it where that is NaN.
__device__ __forceinline__ u32 code_of_nan(const Row &row, int col) {
#ifdef IN_F32
    const u32 sign = row.words[col] >> 31;
#else
    const u32 sign = row.words[col / 2] >> (16 * (col % 2) + 15) & 1;
#endif
    return sign << 7 | 0x7f;
}

// The codes with those of NaN in their places.
__device__ __forceinline__ u32 with_nan(u32 codes, const Row &row, int col) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        if ((__float_as_uint(element(row, col + i)) & 0x7fffffffu) > INFINITE)
            codes = (codes & ~(0xffu << 8 * i)) | code_of_nan(row, col + i) << 8 * i;
    return codes;
}

__device__ __forceinline__ u32 bytes(u32 first, u32 second, u32 selector) {
    u32 word;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(first), "r"(second), "r"(selector));
    return word;
}

// Four columns of four rows of codes, each a word.
__device__ __forceinline__ uint4 turned(u32 a, u32 b, u32 c, u32 d) {
    const u32 low_ab = bytes(a, b, 0x5140), low_cd = bytes(c, d, 0x5140);
    const u32 high_ab = bytes(a, b, 0x7362), high_cd = bytes(c, d, 0x7362);
    return make_uint4(bytes(low_ab, low_cd, 0x5410), bytes(low_ab, low_cd, 0x7632), bytes(high_ab, high_cd, 0x5410),
                      bytes(high_ab, high_cd, 0x7632));
}

// The bits of the largest magnitude of a patch.
__device__ __forceinline__ u32 bits_of(const Rows &rows) {
    u32 largest = 0;
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++)
        largest = larger(largest, rows[r]);
    return float_bits(largest);
}

// Where a tile begins, and the thread's patch in it.
struct Place {
    u64 first_row, first_col;
    u32 patch_row, patch_col;

    __device__ __forceinline__ Place(u64 first_row, u64 first_col) : first_row(first_row), first_col(first_col) {
        patch_row = threadIdx.x / (TILE_COLS / PATCH_COLS), patch_col = threadIdx.x % (TILE_COLS / PATCH_COLS);
    }
    __device__ __forceinline__ u64 row() const { return first_row + PATCH_ROWS * patch_row; }
    __device__ __forceinline__ u64 col() const { return first_col + PATCH_COLS * patch_col; }
};

// Quantizes the rows of the thread's patch with the inverse of a scale. Gives the bits of their largest magnitude.
__device__ __forceinline__ u32 quantize_rows(const Rows &rows, u8 *__restrict__ values, u8 *__restrict__ transposed,
                                             Staging &staging, const Place &place, float inverse,
                                             const Numbers &numbers) {
    u32 codes[PATCH_ROWS][2];
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++) {
        codes[r][0] = codes_of(rows[r], 0, inverse);
        codes[r][1] = codes_of(rows[r], 4, inverse);
    }
    const u32 bits = bits_of(rows);
#if DELAYED
    if (bits > INFINITE) {
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++) {
            codes[r][0] = with_nan(codes[r][0], rows[r], 0);
            codes[r][1] = with_nan(codes[r][1], rows[r], 4);
        }
    }
#else
    // Zero times NaN is none, and times a negative number has a sign.
    if (inverse == 0.0f) {
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++)
            codes[r][0] = codes[r][1] = 0;
    }
#endif
#if ROW_MAJOR
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++)
        *(uint2 *)(values + (place.row() + r) * numbers.cols + place.col()) = make_uint2(codes[r][0], codes[r][1]);
#endif
#if TRANSPOSED
#pragma unroll
    for (int half = 0; half < 2; half++)
        *(uint4 *)&staging[place.patch_row][PATCH_COLS * place.patch_col + 4 * half] =
            turned(codes[0][half], codes[1][half], codes[2][half], codes[3][half]);
    __syncthreads();
    const u32 thread = threadIdx.x, quarter = thread % 4;
#pragma unroll
    for (u32 of_tile = thread / 4; of_tile < TILE_COLS; of_tile += UNITS / 4) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = staging[4 * quarter + i][of_tile];
        *(uint4 *)(transposed + (place.first_col + of_tile) * numbers.rows + place.first_row + 16 * quarter) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
#endif
    return bits;
}

// The largest of all threads' bits, in all threads. `of_warps` has a word for each warp.
template <int Warps> __device__ __forceinline__ u32 largest_of_block(u32 bits, u32 *of_warps) {
    bits = __reduce_max_sync(EVERYONE, bits);
    if (threadIdx.x % 32 == 0)
        of_warps[threadIdx.x / 32] = bits;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < Warps; warp++)
        bits = max(bits, of_warps[warp]);
    return bits;
}

// ---- The scale ------------------------------------------------------------------------------------------------------

#if DELAYED
#define QUIET_NAN 0x7fc00000u

__device__ __forceinline__ bool has_scale(u32 maximum) {
    return maximum >= MIN_ABSMAX && maximum < INFINITE;
}

// A quantized matrix: the maximum of its layer before, which is 0 where there is none, and where its own goes.
struct Output {
    float maximum;
    u8 *values, *transposed;
    float *scale, *absmax;

    // True where nothing need be known of the matrix.
    __device__ __forceinline__ bool has_history() const { return has_scale(__float_as_uint(maximum)); }
    // The scale of a matrix whose largest magnitude has these bits: 1 where there is none. Its inverse is a normal number.
    __device__ __forceinline__ float chosen(u32 bits) const {
        const u32 scaling = has_history() ? __float_as_uint(maximum) : bits;
        return has_scale(scaling) ? __fdiv_rn(__uint_as_float(scaling), LARGEST) : 1.0f;
    }
    __device__ __forceinline__ float inverse(u32 bits) const { return __frcp_rn(chosen(bits)); }
    __device__ __forceinline__ void finish(u32 bits) const {
        const u32 hidden = bits >= INFINITE ? QUIET_NAN : 0;
        *scale = __uint_as_float(__float_as_uint(chosen(bits)) | hidden);
        *absmax = __uint_as_float(bits | hidden);
    }
};
#else
// A quantized matrix.
struct Output {
    u8 *values, *transposed;
    float *scale;

    __device__ __forceinline__ bool has_history() const { return false; }
    // Of the scale of a matrix whose largest magnitude has these bits.
    __device__ __forceinline__ float inverse(u32 bits) const { return inverse_of(bits, LARGEST); }
    __device__ __forceinline__ void finish(u32 bits) const { *scale = scale_of(bits, LARGEST); }
};
#endif

// ---- The kernels ----------------------------------------------------------------------------------------------------

// What the blocks of a launch tell each other: all 0 wherever no kernel runs that takes them.
struct Counters {
    // Blocks that have left, tiles that have been taken and that are done, and tiles that have been taken once more.
    u32 left, taken, done, taken_again;
    // The bits of the largest magnitude of each output.
    u32 largest[2];
};

// What other blocks have made of a word by now.
__device__ __forceinline__ u32 now(const u32 *word) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// The next one that a counter has for this block.
__device__ __forceinline__ u32 take(u32 *counter, u32 *shared) {
    __syncthreads();
    if (threadIdx.x == 0)
        *shared = atomicAdd(counter, 1);
    __syncthreads();
    return *shared;
}

// Looks at all tiles that a counter has left for this block, and takes the next one meanwhile.
template <class Look> __device__ __forceinline__ void take_all(u32 *counter, u32 tiles, u32 *shared, const Look &look) {
    u32 tile = take(counter, shared);
    while (tile < tiles) {
        u32 next = 0;
        if (threadIdx.x == 0)
            next = atomicAdd(counter, 1);
        look(tile);
        __syncthreads();
        if (threadIdx.x == 0)
            *shared = next;
        __syncthreads();
        tile = *shared;
    }
}

__device__ __forceinline__ u32 tiles_of(const Numbers &numbers) {
    return numbers.rows / TILE_ROWS * (numbers.cols / TILE_COLS);
}

__device__ __forceinline__ Place place_of(u32 tile, const Numbers &numbers) {
    const u32 across = numbers.cols / TILE_COLS;
    return Place((u64)(tile / across) * TILE_ROWS, (u64)(tile % across) * TILE_COLS);
}

// Adds a thread's largest magnitude to that of an output.
__device__ __forceinline__ void note(u32 *largest, u32 bits, u32 *of_warps) {
    bits = largest_of_block<UNITS / 32>(bits, of_warps);
    if (threadIdx.x == 0)
        atomicMax(largest, bits);
}

// Waits until all parts of a matrix are looked at by whoever has taken them: blocks that run, so that none waits for one
// that has not started. This one has looked at `seen`, of which a thread has the largest magnitudes.
template <int Outputs>
__device__ __forceinline__ void wait_for_all(Counters *counters, u32 parts, u32 seen, const u32 (&largest)[Outputs],
                                             u32 (&of_warps)[Outputs][UNITS / 32]) {
#pragma unroll
    for (int i = 0; i < Outputs; i++)
        note(&counters->largest[i], largest[i], of_warps[i]);
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&counters->done, seen);
        while (now(&counters->done) < parts)
            __nanosleep(100);
        __threadfence();
    }
    __syncthreads();
}

// Finds the largest magnitude of each output in all tiles: `look` raises the bits of a thread's to those of a tile.
template <int Outputs, class Look>
__device__ __forceinline__ void look_at_all(Counters *counters, u32 tiles, u32 *shared,
                                            u32 (&of_warps)[Outputs][UNITS / 32], const Look &look) {
    u32 largest[Outputs] = {}, seen = 0;
    take_all(&counters->taken, tiles, shared, [&](u32 tile) {
        look(largest, tile);
        seen++;
    });
    wait_for_all(counters, tiles, seen, largest, of_warps);
}

// Finds them in all pieces, in the order in which these lie in memory: `bound` gives bounds of one, and `look` raises bits
// to those of its magnitudes. A bound that is not finite is above every magnitude.
//
// A thread has a few pieces at once, so that a turn is as many elements as a tile. A block takes one turn first, and more
// at once when others have told what they found.
#define AT_ONCE (TILE_ROWS * TILE_COLS / PATCH_COLS / UNITS)
#define TURNS 4

template <int Outputs, class Bound, class Look>
__device__ __forceinline__ void look_where_needed(Counters *counters, const Numbers &numbers, u32 *shared,
                                                  u32 (&of_warps)[Outputs][UNITS / 32], const Bound &bound,
                                                  const Look &look) {
    const u32 turns = tiles_of(numbers);
    const u32 alone = gridDim.x, parts = alone + (turns - alone + TURNS - 1) / TURNS;
    u32 largest[Outputs] = {}, seen = 0;
    take_all(&counters->taken, parts, shared, [&](u32 part) {
        const u32 first = part < alone ? part : alone + TURNS * (part - alone);
        const u32 end = part < alone ? part + 1 : min(first + TURNS, turns);
        u32 known[Outputs];
#pragma unroll
        for (int i = 0; i < Outputs; i++) {
            known[i] = now(&counters->largest[i]);
            largest[i] = max(largest[i], known[i]);
        }
#pragma unroll 1
        for (u32 turn = first; turn < end; turn++) {
            const u64 piece = (u64)turn * AT_ONCE * UNITS + threadIdx.x;
            float bounds[AT_ONCE][Outputs];
#pragma unroll
            for (int of = 0; of < AT_ONCE; of++)
                bound(bounds[of], piece + of * UNITS);
            u32 to_look_at = 0;
#pragma unroll
            for (int of = 0; of < AT_ONCE; of++)
#pragma unroll
                for (int i = 0; i < Outputs; i++)
                    to_look_at |= (u32)(__float_as_uint(bounds[of][i]) > min(largest[i], INFINITE - 1)) << of;
            for (; to_look_at != 0; to_look_at &= to_look_at - 1)
                look(largest, piece + (__ffs(to_look_at) - 1) * UNITS);
        }
#pragma unroll
        for (int i = 0; i < Outputs; i++)
            if (largest[i] > known[i])
                atomicMax(&counters->largest[i], largest[i]);
        seen++;
    });
    wait_for_all(counters, parts, seen, largest, of_warps);
}

// Leaves the kernel: the last block finishes the outputs, and leaves the counters as they were.
template <int Outputs>
__device__ __forceinline__ void leave(Counters *counters, const Output (&outputs)[Outputs]) {
    if (threadIdx.x != 0)
        return;
    __threadfence();
    if (atomicAdd(&counters->left, 1) != gridDim.x * gridDim.y - 1)
        return;
    __threadfence();
#pragma unroll
    for (int i = 0; i < Outputs; i++)
        outputs[i].finish(now(&counters->largest[i]));
    *counters = Counters();
}

// A whole kernel with one output.
template <class Source>
__device__ __forceinline__ void quantize(const Source &source, const Output &output, Counters *counters,
                                         const Numbers &numbers) {
    __shared__ __align__(16) Staging staging;
    __shared__ u32 of_warps[1][UNITS / 32], shared;
    Rows rows;
    if (output.has_history()) {
        const Place place((u64)blockIdx.y * TILE_ROWS, (u64)blockIdx.x * TILE_COLS);
        source.read(rows, place, numbers);
        const u32 bits =
            quantize_rows(rows, output.values, output.transposed, staging, place, output.inverse(0), numbers);
        note(&counters->largest[0], bits, of_warps[0]);
    } else {
        const u32 tiles = tiles_of(numbers);
        if constexpr (Source::BOUNDED)
            look_where_needed<1>(
                counters, numbers, &shared, of_warps,
                [&](float(&bounds)[1], u64 piece) { source.bound(bounds, piece); },
                [&](u32(&largest)[1], u64 piece) { source.look(largest, piece); });
        else
            look_at_all<1>(counters, tiles, &shared, of_warps, [&](u32(&largest)[1], u32 tile) {
                source.read(rows, place_of(tile, numbers), numbers);
                largest[0] = max(largest[0], bits_of(rows));
            });
        const float inverse = output.inverse(now(&counters->largest[0]));
        take_all(&counters->taken_again, tiles, &shared, [&](u32 tile) {
            const Place place = place_of(tiles - 1 - tile, numbers);
            source.read(rows, place, numbers);
            quantize_rows(rows, output.values, output.transposed, staging, place, inverse, numbers);
        });
    }
    leave(counters, {output});
}
