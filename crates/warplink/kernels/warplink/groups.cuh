// Status of a call, and the groups of threads that make it together; a part of device.cuh.

#ifndef WARPLINK_GROUPS_CUH
#define WARPLINK_GROUPS_CUH

namespace warplink {

typedef unsigned int u32;
typedef unsigned long long u64;

enum class Status : u32 {
    ok = 0,
    // The peer or this rank has failed, or the proxy was stopped.
    aborted = 1,
    // An offset or a length exceeds a region, or there is no such region.
    out_of_range = 2,
    // An address or a length does not have the alignment that the call requires.
    misaligned = 3,
    // The kind of channel does not support this.
    unsupported = 4,
};

// The calling thread alone.
struct Thread {
    static constexpr bool synchronizes = true;
    __device__ __forceinline__ u32 rank() const { return 0; }
    __device__ __forceinline__ u32 size() const { return 1; }
    __device__ __forceinline__ void sync() const {}
    __device__ __forceinline__ bool any(bool value) const { return value; }
};

// The 32 threads of a warp of a one-dimensional block.
struct Warp {
    static constexpr bool synchronizes = true;
    __device__ __forceinline__ u32 rank() const { return threadIdx.x & 31u; }
    __device__ __forceinline__ u32 size() const { return 32; }
    __device__ __forceinline__ void sync() const { __syncwarp(); }
    __device__ __forceinline__ bool any(bool value) const {
        const bool found = __any_sync(0xffffffffu, value);
        // Needed to order memory.
        __syncwarp();
        return found;
    }
};

// All threads of a one-dimensional block.
struct Block {
    static constexpr bool synchronizes = true;
    __device__ __forceinline__ u32 rank() const { return threadIdx.x; }
    __device__ __forceinline__ u32 size() const { return blockDim.x; }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    __device__ __forceinline__ bool any(bool value) const { return __syncthreads_or(value); }
};

// All threads of a one-dimensional grid: for direct put and get, and for packets, where each thread handles a part.
// It cannot be synchronized, so each thread gets its own status.
struct Grid {
    static constexpr bool synchronizes = false;
    __device__ __forceinline__ u32 rank() const { return blockIdx.x * blockDim.x + threadIdx.x; }
    __device__ __forceinline__ u32 size() const { return gridDim.x * blockDim.x; }
    __device__ __forceinline__ bool any(bool value) const { return value; }
};

}  // namespace warplink

#endif
