// The common part of the products of 8-bit matrices on Hopper: a tile in chunks of 64 columns, and the rows of A that a
// consumer multiplies them with, read into registers. See gemm.cu.
//
// Knobs, defined in front of this text: those of hopper.cu and common.cu, which come before this text, and
//   BLOCK      32, 64 or 128, the rows, columns and depth of a scale

#define DEPTH 128
#define CHUNK 64
#define CHUNKS (TILE_N / CHUNK)
// Scale blocks along a stage's depth, and the products that are added by themselves: of a chunk and a scale block's
// depth.
#define SUBS (DEPTH / BLOCK)
#define UNITS (SUBS * CHUNKS)
// Sets of registers for products of add_tile: a stage's last unit and the next one's first must not share one. A stage
// of one unit does not go through it.
#define SETS (UNITS % 2 ? UNITS : 2)
#define A_BYTES (TILE_M * DEPTH)
#define B_BYTES (TILE_N * DEPTH)
#define STAGE_BYTES (A_BYTES + B_BYTES)

// Reads four 8 x 16 byte matrices, whose rows start at the addresses that lanes 0-7, 8-15, 16-23 and 24-31 give. A lane
// gets of each the four bytes at row lane / 4, column 4 * (lane % 4).
__device__ __forceinline__ void load_matrices(u32 *words, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// Starts the copies of both operands' tiles into the stage at `to`. The arrival releases the producer's note to the
// consumers.
__device__ __forceinline__ void copy_stage(u32 to, u32 barrier, const TensorMap *a, const TensorMap *b, u32 depth,
                                           const Tile &tile, u32 b_batch) {
    barrier_arrive_expect(barrier, STAGE_BYTES);
    copy_tile(to, a, depth, tile.m * TILE_M, tile.batch, barrier);
    copy_tile(to + A_BYTES, b, depth, tile.n * TILE_N, b_batch, barrier);
}

// The producer's note on a stage: its scales, and 1 for the tile's last stage.
#if BLOCK == DEPTH
// The products of the scales for the tile's first and second block of columns, and the one for the second of three
// chunks: every other tile of 192 columns begins in the middle of a block, so that its second chunk lies in the second.
struct __align__(16) Note {
    float first, second, middle, is_end;
};
// Consumers keep it in registers.
typedef const Note NoteOfStage;

__device__ __forceinline__ float scale_of(const Note &note, int chunk) {
    if (CHUNKS == 3 && chunk == 1)
        return note.middle;
    return chunk < 128 / CHUNK ? note.first : note.second;
}
#else
#define ROW_BLOCKS (TILE_M / BLOCK)
#define COL_BLOCKS (TILE_N / BLOCK)
struct __align__(16) Note {
    float of_a[SUBS][ROW_BLOCKS];
    float of_b[SUBS][COL_BLOCKS];
    float is_end;
};
// Too many for registers: consumers read them from shared memory, one by one.
typedef const Note &NoteOfStage;
#endif

// The ring as a consumer reads it.
struct Stages {
    u32 memory, full, empty;
    const Note *notes;
    // The address that a lane gives load_matrices for the first stage and step along K. A lane addresses one row of
    // its warp's 16, and the first or the second 16 bytes of a step. The swizzle exchanges the 16-byte chunks of a row
    // by an exclusive or with the row's index modulo 8.
    u32 fragments;
};

__device__ __forceinline__ Stages stages_of(u32 memory, u32 full, u32 empty, const Note *notes) {
    const u32 row = (threadIdx.x - 128) / 32 * 16 + threadIdx.x % 16;
    const u32 chunk = threadIdx.x % 32 / 16;
    return {memory, full, empty, notes, memory + row * DEPTH + (chunk ^ row % 8) * 16};
}

__device__ __forceinline__ void load_fragments(u32 (*fragments)[4], u32 first) {
#pragma unroll
    for (u32 step = 0; step < DEPTH / 32; step++)
        load_matrices(fragments[step], first ^ 2 * step * 16);
}
