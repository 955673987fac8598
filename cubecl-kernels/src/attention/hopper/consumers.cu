// The common part of the forward passes: what two consumers hide, and how they take turns.
//
// Texts before this one: hopper.cu, attention/hopper/common.cu.

#define KEYS STAGED_ROWS

// Hides from the 64 queries from `query` on what they do not see of the keys from `key` on.
__device__ __forceinline__ void hide(float *scores, const Band &band, int query, int key) {
    if (all_visible(band, {query, query + 63}, {key, key + KEYS - 1}))
        return;
    const u32 thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const Range visible = keys_of(band, query + row + 8 * h);
        const int first = visible.first - key, last = visible.last - key;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = 8 * j + 2 * (thread % 4) + e;
                if (at < first | at > last)
                    scores[4 * j + 2 * h + e] = -INFINITE;
            }
    }
}

// Consumers take turns to issue products: a barrier of the block for each, at which one waits and the other arrives.
__device__ __forceinline__ void await_turn(u32 consumer) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(128 * CONSUMERS) : "memory");
}

__device__ __forceinline__ void give_turn(u32 consumer) {
    asm volatile("bar.arrive %0, %1;" ::"r"(1 + consumer), "n"(128 * CONSUMERS) : "memory");
}
