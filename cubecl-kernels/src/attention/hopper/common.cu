// The common part of attention on Hopper: the order of blocks, which keys a query sees, and products of tiles.
//
// Knobs, defined in front of this text: those of hopper.cu, which comes before this text, with
//   TILE_N     64 or 128, the features of a head; what lies past those that it has is 0
//   STAGED_ROWS   keys or queries of a stage
//   IN         "bf16" or "f16", the type of all matrices, which OUT_* names too
//   MASKED     1 where the mask hides keys, 0 where there is none
// and the structure Numbers, which hopper.rs describes.
//
// A producer warp and two consumer warpgroups of 64 rows each, as in the products.

#define DIM TILE_N
#define CONSUMERS 2
// Rows that the consumers of a block have together.
#define ROWS (64 * CONSUMERS)
// Elements of a row of swizzled shared memory. A tile lies in panels of so many features, each with all of its rows.
#define PANEL 64
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define INFINITE __int_as_float(0x7f800000)

// ---- Order of blocks ------------------------------------------------------------------------------------------------

struct Work {
    u32 batch, head, tile;
};

// A batch, head and tile by their number. Heads are taken in sections whose other operands fit into the L2 cache, and
// of a section first all first tiles, then all second ones: the caller numbers those first that take longest.
__device__ __forceinline__ Work work_of(u32 index, u32 tiles, u32 heads, u32 batches, u32 section) {
    const u32 first = index / (section * tiles) * section;
    const u32 width = min(section, heads * batches - first);
    index -= first * tiles;
    const u32 head = first + index % width;
    return {head / heads, head % heads, index / width};
}

// ---- Visibility -----------------------------------------------------------------------------------------------------

// Query i sees the keys from i + offset - before to i + offset + behind that there are: attention::Band.
struct Band {
    int offset, before, behind, keys;
};

// Numbers from `first` to `last`, inclusive; none where the last is less.
struct Range {
    int first, last;
};

__device__ __forceinline__ Band band_of(const Numbers &numbers) {
    return {(int)numbers.keys - (int)numbers.queries, (int)numbers.before, (int)numbers.behind, (int)numbers.keys};
}

// The keys that a query sees.
__device__ __forceinline__ Range keys_of(const Band &band, int query) {
    const int own = query + band.offset;
    return {max(own - band.before, 0), min(own + band.behind, band.keys - 1)};
}

// The keys that queries from `first` to `last` see, of all of them together.
__device__ __forceinline__ Range keys_of(const Band &band, int first, int last) {
    return {keys_of(band, first).first, keys_of(band, last).last};
}

// True if each of these queries sees each of these keys.
__device__ __forceinline__ bool all_visible(const Band &band, Range queries, Range keys) {
    return keys.first >= keys_of(band, queries.last).first && keys.last <= keys_of(band, queries.first).last;
}

// ---- Masks ----------------------------------------------------------------------------------------------------------

#if MASKED
// The bits of a lane's two rows of a tile of scores, one for each of its columns: 1 where a key is hidden from a query.
template <int Columns> struct Hidden {
    u32 words[2][Columns / 32];
};

// Of a lane's rows of the 64 from `row` on that its warpgroup has, in a tile that starts at `column`. A mask has whole
// tiles of rows and of columns. Where the lane's rows are is asked for anew each time: the backward pass has no
// register to keep it.
template <int Columns>
__device__ __forceinline__ Hidden<Columns> load_hidden(const u32 *mask, const Numbers &numbers, u32 batch, u32 head,
                                                       u32 row, u32 column) {
    const u32 stride = numbers.mask_row;
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    row += thread % 128 / 32 * 16 + thread % 32 / 4;
    mask += batch * (u32)numbers.mask_batch + head * (u32)numbers.mask_head + row * stride + column / 32;
    Hidden<Columns> hidden;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < Columns / 64; i++) {
            const uint2 pair = __ldg((const uint2 *)(mask + 8 * h * stride) + i);
            hidden.words[h][2 * i] = pair.x;
            hidden.words[h][2 * i + 1] = pair.y;
        }
    return hidden;
}

// Hides a tile's scores by the mask.
template <int Columns> __device__ __forceinline__ void hide(float *scores, const Hidden<Columns> &hidden) {
    u32 any = 0;
#pragma unroll
    for (int i = 0; i < Columns / 32; i++)
        any |= hidden.words[0][i] | hidden.words[1][i];
    if (!__any_sync(EVERYONE, any))
        return;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < Columns / 32; i++) {
            // A lane's first column is in the first bit.
            const u32 bits = hidden.words[h][i] >> threadIdx.x % 4 * 2;
#pragma unroll
            for (int j = 4 * i; j < 4 * i + 4; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (bits & 1u << (8 * (j % 4) + e))
                        scores[4 * j + 2 * h + e] = -INFINITE;
        }
}
#endif

// ---- A block's queries ----------------------------------------------------------------------------------------------

// The batch and head of a tile of queries, its first query, and the keys that one of its queries sees: `count` tiles.
struct QueryWork {
    Work work;
    int first_query, first_tile, count;
};

// Calls visit(work) for each tile of queries that a block has. Each section starts a round of its own: so all rounds of
// it but the last are whole, and to go through the grid forth and back evens them out.
template <int Keys, typename Visit>
__device__ __forceinline__ void for_query_tiles(const Numbers &numbers, const Band &band, Visit visit) {
    const u32 queries = numbers.queries, tiles = (queries + ROWS - 1) / ROWS, section = (u32)numbers.section * tiles;
    const u32 all = (u32)numbers.heads * (u32)numbers.batches * tiles, rounds = (section + gridDim.x - 1) / gridDim.x;
#pragma unroll 1
    for (u32 turn = 0; turn / rounds * section < all; turn++) {
        const u32 first = turn / rounds * section;
        const u32 place = tile_index(turn) - turn / rounds * rounds * gridDim.x;
        if (place >= min(section, all - first))
            continue;
        const Work work = work_of(first + place, tiles, numbers.heads, numbers.batches, numbers.section);
        // The last queries of a causal head see most.
        const int first_query = (tiles - 1 - work.tile) * ROWS;
        const Range keys = keys_of(band, first_query, min(first_query + ROWS, (int)queries) - 1);
        const int first_tile = keys.first / Keys;
        visit(QueryWork{work, first_query, first_tile, keys.last < keys.first ? 0 : keys.last / Keys - first_tile + 1});
    }
}

// ---- Products of tiles ----------------------------------------------------------------------------------------------

// sums[64, N] (+)= a[64, 16] b[N, 16]^T, both in shared memory.
template <int N> __device__ __forceinline__ void multiply(float *sums, u64 a, u64 b, bool add) {
    if (N == 128)
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." IN "." IN " {"
                     SUMS_64 "}, %64, %65, add, 1, 1, 0, 0;\n"
                     "}"
                     : FLOATS_64(sums, 0)
                     : "l"(a), "l"(b), "r"((int)add));
    else
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %34, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." IN "." IN " {"
                     SUMS_32 "}, %32, %33, add, 1, 1, 0, 0;\n"
                     "}"
                     : FLOATS_16(sums, 0), FLOATS_16(sums, 16)
                     : "l"(a), "l"(b), "r"((int)add));
}

// sums[64, DIM] (+)= a[64, 16] b[16, DIM], a in registers.
__device__ __forceinline__ void multiply(float *sums, const u32 *a, u64 b, bool add) {
#if DIM == 128
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." IN "." IN " {"
                 SUMS_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n"
                 "}"
                 : FLOATS_64(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
#else
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." IN "." IN " {"
                 SUMS_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n"
                 "}"
                 : FLOATS_16(sums, 0), FLOATS_16(sums, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
#endif
}

// The consumer of this thread. From a shuffle the compiler knows that a warp has one, and one descriptor of each operand.
__device__ __forceinline__ u32 own_consumer() {
    return __shfl_sync(EVERYONE, threadIdx.x / 128, 0) - 1;
}

// sums[64, N] = a[64, DIM] b[N, DIM]^T: `a` is 64 rows of a tile of ARows, `b` a tile of N rows. Asynchronous, as are all
// products: their registers may be touched only after products_wait.
template <int ARows, int N> __device__ __forceinline__ void start_over_features(float *sums, u32 a, u32 b) {
    const u64 of_a = descriptor<0>(a), of_b = descriptor<0>(b);
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        const u32 panel = step * 16 / PANEL, within = step * 16 % PANEL * 2;
        multiply<N>(sums, behind(of_a, panel * ARows * 128 + within), behind(of_b, panel * N * 128 + within), step > 0);
    }
    products_commit();
}

// sums[64, DIM] (+)= a[64, Rows] b[Rows, DIM]: `a` in registers as `pack_operand` leaves it, `b` a tile.
template <int Rows> __device__ __forceinline__ void start_over_rows(float *sums, const u32 *a, u32 b, bool add) {
    const u64 of_b = descriptor<Rows * 128>(b);
#pragma unroll
    for (int step = 0; step < Rows / 16; step++)
        multiply(sums, a + 4 * step, behind(of_b, step * 16 * 128), add || step > 0);
    products_commit();
}

// Rounds 64 x Cols sums of a warpgroup to the left operand of a product: wgmma wants in a lane what it left there.
template <int Cols> __device__ __forceinline__ void pack_operand(const float *sums, u32 *a) {
#pragma unroll
    for (int i = 0; i < Cols / 4; i++)
        a[i] = pack(sums[2 * i], sums[2 * i + 1]);
}

// Starts the copy of `Rows` rows of a head, all of its features.
template <int Rows>
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap *map, u32 row, u32 head, u32 batch, u32 barrier) {
#pragma unroll
    for (u32 panel = 0; panel < DIM / PANEL; panel++)
        copy_tile(to + panel * Rows * 128, map, panel * PANEL, row, head, batch, barrier);
}

// A consumer's warp writes its 16 rows of a head, from `row` on, into a tensor that has `heads` of `width` features side by
// side in each of its `rows`.
__device__ __forceinline__ void write_head(const float *sums, Out *out, const Work &work, u32 heads, u32 row, u32 rows,
                                           u32 width) {
    const u64 start = ((u64)work.batch * rows * heads + work.head) * width;
    write_aligned(sums, out + start, row, 0, rows, width, heads * width);
}

// ---- Exponentials ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approximately(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float as_float(u64 bits) {
    return __uint_as_float((u32)bits);
}
