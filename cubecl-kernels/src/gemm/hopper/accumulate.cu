// The common part of the products on Hopper whose sums stay where wgmma accumulates them, from a tile's first stage to
// its last: one stage's products are always queued behind another's.
//
// Knobs, defined in front of this text: those of hopper.cu and common.cu, which come before this text.

// A stage has 128 bytes of each row: as wide as a swizzled box can be.
#define A_BYTES (TILE_M * 128)
#define B_BYTES (TILE_N * 128)
#define STAGE_BYTES (A_BYTES + B_BYTES)
// Bytes of a consumer's 64 rows of A.
#define CONSUMER_BYTES (A_BYTES / 2)

// Adds up the products of a part's stages, for a consumer. `multiply_stage(a, b)` starts those of a stage, of the
// consumer's rows of A from the address `a` and the tile's rows of B from `b`, and adds them to `sums`.
template <class Sum, class MultiplyStage>
__device__ __forceinline__ void accumulate(Sum *sums, const Part &part, u32 memory, u32 full, u32 empty, u32 &stage,
                                           u32 &parity, MultiplyStage multiply_stage) {
    const u32 consumer = threadIdx.x / 128 - 1;
    // wgmma can ignore what was in the sums. But registers that nothing has set would be alive from one tile to the
    // next, beside the output of the last: the compiler would find no room and have each product wait for the one
    // before it. Pinned, or it could set them behind the fence.
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++)
        sums[i] = 0;
    pin<TILE_N / 2>(sums);
    u32 previous = 0;
    for (u32 block = part.first; block < part.end; block++) {
        barrier_wait(full + 8 * stage, parity);
        const u32 to = memory + stage * STAGE_BYTES;
        products_fence();
        multiply_stage(to + consumer * CONSUMER_BYTES, to + A_BYTES);
        products_commit();
        // The stage before this one has been read when its products are done.
        products_wait<1>();
        if (block > part.first)
            release(empty + 8 * previous);
        previous = stage;
        next_stage(stage, parity);
    }
    products_wait<0>();
    pin<TILE_N / 2>(sums);
    release(empty + 8 * previous);
}
