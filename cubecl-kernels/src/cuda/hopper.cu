// The common part of kernels for Hopper: barriers, copies by TMA, wgmma, and the output. It comes first in their texts.
//
// Knobs, defined in front of this text:
//   TILE_N     columns of an output tile
//   STAGES     stages of the ring in shared memory
//   OUT_F32, OUT_F16 or OUT_BF16   the type of the output

typedef unsigned int u32;
typedef unsigned long long u64;

// The structure that cuTensorMapEncodeTiled fills; passed by value, and only its address is used.
struct alignas(64) TensorMap {
    u64 words[16];
};

#define EVERYONE 0xffffffffu

// The number of this block's tile in its turn. Every other turn goes through the grid backwards: where tiles differ in
// cost, and follow one another by cost, that evens out what the blocks get.
__device__ __forceinline__ u32 tile_index(u32 turn) {
    return turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// ---- Shared memory, barriers and copies -----------------------------------------------------------------------------

// PTX instructions take addresses of shared memory as 32 bits.
__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Sets up the barriers of the ring: of each stage one that says that it is full, and one that it is empty. All threads
// of the block come here.
__device__ __forceinline__ void ring_init(u32 full, u32 empty) {
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            // Full: the producer's arrival and its bytes. Empty: an arrival of each of the consumers' warps.
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, 8);
        }
        // TMA is another proxy: without the fence it may see the barriers as they were before.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
}

// Goes on in the ring. The parity is that of the stage's phase; both are counted through all tiles.
__device__ __forceinline__ void next_stage(u32 &stage, u32 &parity) {
    if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
    }
}

// Waits until the phase of this parity has completed. A new barrier is in phase 0, so that a wait for parity 1 returns
// at once. The wait acquires what was written before the arrivals.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and holds the phase open until TMA has written this many bytes too.
__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// A consumer's warp has read what it needs of a stage. Its lanes have waited for their products as one, so one speaks
// for them; to synchronize them once more costs 5% of the speed.
__device__ __forceinline__ void release(u32 empty_barrier) {
    if (threadIdx.x % 32 == 0)
        barrier_arrive(empty_barrier);
}

// Starts the copy of the box of a tensor map that begins at (batch, row, k), k in elements. Outside the matrix it is
// filled with zeros, and these bytes are counted at the barrier too.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap *map, u32 k, u32 row, u32 batch, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(k), "r"(row), "r"(batch), "r"(barrier)
                 : "memory");
}

// The same for a tensor map with two batch dimensions.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap *map, u32 k, u32 row, u32 inner, u32 outer,
                                          u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
                 "l"(map), "r"(k), "r"(row), "r"(inner), "r"(outer), "r"(barrier)
                 : "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

#define FLOATS_4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define FLOATS_16(x, i) FLOATS_4(x, i), FLOATS_4(x, i + 4), FLOATS_4(x, i + 8), FLOATS_4(x, i + 12)
#define FLOATS_64(x, i) FLOATS_16(x, i), FLOATS_16(x, i + 16), FLOATS_16(x, i + 32), FLOATS_16(x, i + 48)
#define REGISTERS_4(x, i) "+r"(x[i]), "+r"(x[i + 1]), "+r"(x[i + 2]), "+r"(x[i + 3])
#define REGISTERS_16(x, i)                                                                                             \
    REGISTERS_4(x, i), REGISTERS_4(x, i + 4), REGISTERS_4(x, i + 8), REGISTERS_4(x, i + 12)
#define REGISTERS_32(x, i) REGISTERS_16(x, i), REGISTERS_16(x, i + 16)
#define REGISTERS_64(x, i) REGISTERS_32(x, i), REGISTERS_32(x, i + 32)

// The registers of 32, 64, 96 and 128 sums in the text of an instruction whose first operands they are.
#define SUMS_32                                                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64                                                                                                        \
    SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                       \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_96                                                                                                        \
    SUMS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                       \
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_128                                                                                                       \
    SUMS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "           \
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Describes an operand in shared memory, swizzled by TMA in groups of 8 rows of 128 bytes:
//   bits  0..13  address / 16
//   bits 16..29  where rows run along M or N: bytes / 16 from one box of rows to the next, BoxBytes; where they run along
//                K: not used, 1, and BoxBytes is 0
//   bits 32..45  bytes / 16 from one group of 8 rows to the next: 8 * 128 / 16 = 64. Rows follow one another along M or
//                N where a row runs along K, and along K where it runs along M or N
//   bits 62..63  the swizzle: 1 is that of 128 bytes
// A product that begins inside the 128 bytes of a row is told its address: hardware swizzles addresses, not offsets.
template <int BoxBytes> __device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(BoxBytes ? BoxBytes / 16 : 1) << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// The descriptor of the operand that begins so many bytes, a multiple of 16, behind that of another one. Products follow
// one another closely: four instructions for each address, of which each waits for the one before, hold them up.
__device__ __forceinline__ u64 behind(u64 descriptor, u32 bytes) {
    return descriptor + bytes / 16;
}

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

// Orders the warpgroup's own accesses to the registers of products and of A before those of the next wgmma.
__device__ __forceinline__ void products_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// products[64, N] (+)= a[64, 32] b[N, 32]^T for a warpgroup, of INT8 in INT32, a in registers; N is 64 or 128. Without
// `add`, what was there is ignored, so that nobody has to set it to zero. Asynchronous: neither `products` nor `a` may be
// touched before products_wait.
template <int N> __device__ __forceinline__ void multiply_codes(int *products, const u32 *a, u64 b, bool add) {
    if (N == 128)
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %69, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
                     SUMS_64 "}, {%64, %65, %66, %67}, %68, add;\n"
                     "}"
                     : REGISTERS_64(products, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
    else
        asm volatile("{\n"
                     ".reg .pred add;\n"
                     "setp.ne.b32 add, %37, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
                     SUMS_32 "}, {%32, %33, %34, %35}, %36, add;\n"
                     "}"
                     : REGISTERS_32(products, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

// Closes the group of wgmma issued so far.
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `Pending` groups are still running.
template <int Pending> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving reads and writes of `x` across this place: it does not know that wgmma goes on reading
// and writing registers after its instruction.
template <int Count> __device__ __forceinline__ void pin(float *x) {
#pragma unroll
    for (int i = 0; i < Count; i++)
        asm volatile("" : "+f"(x[i])::"memory");
}

template <int Count> __device__ __forceinline__ void pin(u32 *x) {
#pragma unroll
    for (int i = 0; i < Count; i++)
        asm volatile("" : "+r"(x[i])::"memory");
}

template <int Count> __device__ __forceinline__ void pin(int *x) {
#pragma unroll
    for (int i = 0; i < Count; i++)
        asm volatile("" : "+r"(x[i])::"memory");
}

// ---- Output ---------------------------------------------------------------------------------------------------------

#if defined(OUT_F32)
typedef float Out;
#else
typedef unsigned short Out;

// Two neighbours in one word, the first in the low half, each rounded to nearest.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
#if defined(OUT_F16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

// The sums of a lane's row lane / 4 + 8 * h, of 8 neighbours each lane, among the columns from 32 * group on: those from
// 8 * (lane % 4) there. In `sums` as write_aligned has them.
__device__ __forceinline__ void pack_neighbours(u32 (&words)[4], const float *sums, int group, int h) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float *pair = sums + 4 * (4 * group + j) + 2 * h;
        words[j] = pack(pair[0], pair[1]);
    }
    // The quad transposes 4 x 4 words. A lane keeps the words of its own parity and swaps the others with its neighbour:
    // first the low bit of lane and word, then the high one.
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    {
        const u32 x = __shfl_xor_sync(EVERYONE, odd ? words[0] : words[1], 1);
        const u32 y = __shfl_xor_sync(EVERYONE, odd ? words[2] : words[3], 1);
        words[0] = odd ? x : words[0];
        words[1] = odd ? words[1] : x;
        words[2] = odd ? y : words[2];
        words[3] = odd ? words[3] : y;
    }
    {
        const u32 x = __shfl_xor_sync(EVERYONE, high ? words[0] : words[2], 2);
        const u32 y = __shfl_xor_sync(EVERYONE, high ? words[1] : words[3], 2);
        words[0] = high ? x : words[0];
        words[1] = high ? y : words[1];
        words[2] = high ? words[2] : x;
        words[3] = high ? words[3] : y;
    }
}
#endif

// A consumer's warp writes its 16 x TILE_N sums into rows of C that are `stride` elements apart and that all start and end
// at multiples of 16 bytes. wgmma leaves in sums[4 * j + 2 * h + e] of a lane the row lane / 4 + 8 * h and the column
// 8 * j + 2 * (lane % 4) + e.
__device__ __forceinline__ void write_aligned(const float *sums, Out *out, u32 first_row, u32 first_col, u32 rows,
                                              u32 cols, u32 stride) {
    const u32 lane = threadIdx.x % 32, quad = lane % 4;
    const u32 row = first_row + lane / 4;
#if defined(OUT_F32)
    // Neighbouring lanes swap pairs, so that a lane has 4 neighbours of a row, 16 bytes, and the quad 64: a store of 32
    // bytes a row takes as long.
    const bool odd = quad & 1;
#pragma unroll
    for (int group = 0; group < TILE_N / 16; group++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float *first = sums + 8 * group + 2 * h, *second = first + 4;
            const float x = __shfl_xor_sync(EVERYONE, odd ? first[0] : second[0], 1);
            const float y = __shfl_xor_sync(EVERYONE, odd ? first[1] : second[1], 1);
            const u32 col = first_col + 16 * group + 8 * odd + 2 * (quad & 2);
            if (row + 8 * h < rows && col < cols)
                *(float4 *)(out + (u64)(row + 8 * h) * stride + col) =
                    odd ? make_float4(x, y, second[0], second[1]) : make_float4(first[0], first[1], x, y);
        }
#else
    // Each lane has 8 neighbours of a row, 16 bytes, and the quad 64.
#pragma unroll
    for (int group = 0; group < TILE_N / 32; group++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 words[4];
            pack_neighbours(words, sums, group, h);
            const u32 col = first_col + 32 * group + 8 * quad;
            if (row + 8 * h < rows && col < cols)
                *(uint4 *)(out + (u64)(row + 8 * h) * stride + col) =
                    make_uint4(words[0], words[1], words[2], words[3]);
        }
#endif
}
