/* A stand-in for CUDA's driver: the calls that map memory, on memory of the host. Prototypes are those of cuda.h. It
   refuses what the real one refuses, and tells how much of its memory is free. */

#define _GNU_SOURCE
#include <cuda.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { UNIT = 1 << 16, DEVICE = 3 };

static size_t free_bytes;

void stand_in_has(size_t num_bytes) { free_bytes = num_bytes; }
size_t stand_in_free(void) { return free_bytes; }

static int is_wrong(const CUmemAllocationProp *p) {
    return p->type != CU_MEM_ALLOCATION_TYPE_PINNED || p->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
           p->location.id != DEVICE || p->requestedHandleTypes || p->win32HandleMetaData || p->allocFlags.usage;
}

static int is_there;

CUresult cuInit(unsigned int flags) {
    is_there = 1;
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *unit, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags o) {
    if (!is_there) return CUDA_ERROR_NOT_INITIALIZED;
    *unit = UNIT;
    return is_wrong(p) || o != CU_MEM_ALLOC_GRANULARITY_MINIMUM ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr near, unsigned long long flags) {
    if (!size || size % UNIT || alignment || near || flags) return CUDA_ERROR_INVALID_VALUE;
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *at = (CUdeviceptr)found;
    return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
    return munmap((void *)at, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *p,
                     unsigned long long flags) {
    if (is_wrong(p) || size % UNIT || flags) return CUDA_ERROR_INVALID_VALUE;
    if (size > free_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    int file = memfd_create("piece", 0);
    if (file < 0 || ftruncate(file, (off_t)size)) return CUDA_ERROR_UNKNOWN;
    free_bytes -= size;
    *handle = (CUmemGenericAllocationHandle)file;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct stat found;
    if (fstat((int)handle, &found) || close((int)handle)) return CUDA_ERROR_INVALID_HANDLE;
    free_bytes += (size_t)found.st_size;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    if (at % 4096 || size % UNIT || offset || flags) return CUDA_ERROR_INVALID_VALUE;
    void *found = mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, 0);
    return found == (void *)at ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *access, size_t count) {
    if (count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || access->location.id != DEVICE ||
        access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    void *found = mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return found == (void *)at ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
