// A CUDA driver that does nothing: what a program asks of a GPU, counted, on a machine without one.
//
// Of an H200 it has what CubeCL asks for. Memory has addresses and no bytes, kernels are counted by name and not run,
// and a number that is read back is smaller each time, as a loss is. When the program ends, it writes what was
// launched, the most often first, and what was copied in before it, to standard error.
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uint64_t Address;

enum { SUCCESS = 0, NOT_SUPPORTED = 801, MOST_KERNELS = 4096 };

static struct kernel {
    char name[96];
    _Atomic uint64_t launches, copies_in;
} kernels[MOST_KERNELS];
static _Atomic uint64_t next_address = 1ull << 40, allocations, copies_in, reads, copies_to_come;
// That of index 0 has no name.
static _Atomic uint64_t kernel_count = 1;

static int more_often(const void *a, const void *b) {
    const struct kernel *first = a, *second = b;
    return (first->launches < second->launches) - (first->launches > second->launches);
}

__attribute__((destructor)) static void report(void) {
    uint64_t launches = 0;
    qsort(kernels + 1, kernel_count - 1, sizeof *kernels, more_often);
    for (uint64_t i = 1; i < kernel_count; i++)
        launches += kernels[i].launches;
    fprintf(stderr, "launches %llu, allocations %llu, copies in %llu, reads %llu\n", (unsigned long long)launches,
            (unsigned long long)allocations, (unsigned long long)copies_in, (unsigned long long)reads);
    fprintf(stderr, "launches copies kernel\n");
    for (uint64_t i = 1; i < kernel_count && kernels[i].launches; i++)
        fprintf(stderr, "%8llu %6llu %s\n", (unsigned long long)kernels[i].launches,
                (unsigned long long)kernels[i].copies_in, kernels[i].name);
}

// ---- The device -----------------------------------------------------------------------------------------------------

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
Result cuDeviceGet(int *device, int index) { return *device = index, SUCCESS; }
Result cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
Result cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = 141ull << 30, SUCCESS; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 1: *value = 1024; break;             // threads of a block
    case 2: case 3: *value = 1024; break;     // its dimensions
    case 4: *value = 64; break;
    case 5: *value = 2147483647; break;       // those of a grid
    case 6: case 7: *value = 65535; break;
    case 8: *value = 48 << 10; break;         // bytes of shared memory of a block
    case 10: *value = 32; break;              // threads of a warp
    case 12: case 82: *value = 65536; break;  // registers
    case 14: *value = 512; break;             // alignment of textures
    case 16: *value = 132; break;             // multiprocessors
    case 38: *value = 50 << 20; break;        // bytes of the L2 cache
    case 39: *value = 2048; break;            // threads of a multiprocessor
    case 75: *value = 9; break;               // compute capability
    case 76: *value = 0; break;
    case 81: *value = 228 << 10; break;       // bytes of shared memory of a multiprocessor
    case 97: *value = 227 << 10; break;       // of a block that asks for them
    default: *value = 1;
    }
    return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)1, SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
Result cuCtxSetCurrent(void *context) { return SUCCESS; }
Result cuDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, SUCCESS; }
Result cuGetErrorName(int error, const char **name) { return *name = "none", SUCCESS; }
Result cuGetErrorString(int error, const char **text) { return *text = "none", SUCCESS; }
Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, void *status) {
    return *function = NULL, NOT_SUPPORTED;
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

static Address allocated(size_t bytes) {
    allocations++;
    return atomic_fetch_add(&next_address, (bytes + 511) & ~511ull);
}
Result cuMemAlloc_v2(Address *at, size_t bytes) { return *at = allocated(bytes), SUCCESS; }
Result cuMemAllocAsync(Address *at, size_t bytes, void *stream) { return *at = allocated(bytes), SUCCESS; }
Result cuMemFree_v2(Address at) { return SUCCESS; }
Result cuMemFreeAsync(Address at, void *stream) { return SUCCESS; }
Result cuMemAllocHost_v2(void **at, size_t bytes) { return *at = malloc(bytes), SUCCESS; }
Result cuMemFreeHost(void *at) { return free(at), SUCCESS; }
Result cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = *total = 141ull << 30, SUCCESS; }

Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream) {
    copies_in++, copies_to_come++;
    return SUCCESS;
}
static void read_back(void *to, size_t bytes) {
    const float smaller = 100.0f / (float)(1 + reads++);
    memset(to, 0, bytes);
    if (bytes == sizeof smaller)
        memcpy(to, &smaller, sizeof smaller);
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream) {
    return read_back(to, bytes), SUCCESS;
}
// CUDA_MEMCPY2D, as far as it says where a copy goes.
struct copy_2d {
    size_t from_x, from_y;
    int from_type;
    const void *from_host;
    Address from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    char *to_host;
    Address to_device;
    void *to_array;
    size_t to_pitch, bytes, rows;
};
enum { HOST = 1 };
Result cuMemcpy2DAsync_v2(const struct copy_2d *copy, void *stream) {
    copies_in += copy->to_type != HOST;
    for (size_t row = 0; copy->to_type == HOST && row < copy->rows; row++)
        read_back(copy->to_host + row * copy->to_pitch, copy->bytes);
    return SUCCESS;
}

// ---- Streams and kernels --------------------------------------------------------------------------------------------

Result cuStreamCreate(void **stream, unsigned flags) { return *stream = (void *)1, SUCCESS; }
Result cuStreamSynchronize(void *stream) { return SUCCESS; }
Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return SUCCESS; }
Result cuEventCreate(void **event, unsigned flags) { return *event = (void *)1, SUCCESS; }
Result cuEventDestroy_v2(void *event) { return SUCCESS; }
Result cuEventRecord(void *event, void *stream) { return SUCCESS; }
Result cuEventSynchronize(void *event) { return SUCCESS; }

Result cuModuleLoadData(void **module, const void *image) { return *module = (void *)1, SUCCESS; }
Result cuModuleGetFunction(void **function, void *module, const char *name) {
    const uint64_t index = kernel_count++;
    if (index >= MOST_KERNELS)
        abort();
    strncpy(kernels[index].name, name, sizeof kernels->name - 1);
    return *function = (void *)index, SUCCESS;
}
Result cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
Result cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                      void **extra) {
    kernels[(uint64_t)function].launches++;
    kernels[(uint64_t)function].copies_in += atomic_exchange(&copies_to_come, 0);
    return SUCCESS;
}
Result cuTensorMapEncodeTiled(void *map, ...) { return memset(map, 0, 128), SUCCESS; }
