// Memory accesses that implement channels; a part of device.cuh.

#ifndef WARPLINK_MEMORY_CUH
#define WARPLINK_MEMORY_CUH

#include <warplink/groups.cuh>

namespace warplink {
namespace detail {

// Counts from this value on mean that waits were aborted, far above any count of signals. Must match the host.
constexpr u64 ended_epoch = 1ull << 61;
// Polls between two checks of the abort word, so that the awaited word is polled at almost its full rate.
constexpr u32 polls_per_look = 256;

// The first call of a kernel that may start before earlier work of its stream is complete: after it that work is
// complete, and its stores are visible. Lets the following kernel start in the same way.
__device__ __forceinline__ void await_preceding() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For words that publish something: what their writer did before is visible afterwards. Of the system's scope, since
// the writer may be the host or another GPU.
__device__ __forceinline__ u64 load_acquire(u64 word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// For words that stand for themselves, such as counts and addresses.
__device__ __forceinline__ u64 load_relaxed(u64 word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// Sets a word that only this thread changes, after everything before it is visible to the whole system.
__device__ __forceinline__ void store_release(u64 word, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Increments a word after everything before it is visible to the whole system. A peer's memory must support atomic
// operations from here.
__device__ __forceinline__ void add_release(u64 word) {
    asm volatile("red.release.sys.global.add.u64 [%0], 1;" ::"l"(word) : "memory");
}

// Raises a word that threads of this GPU alone read, hence the smaller scope.
__device__ __forceinline__ void max_release(u64 word, u64 value) {
    asm volatile("red.release.gpu.global.max.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Whether the word was 0; it is 1 afterwards: until its `release`, no other thread of this GPU can claim it. Relaxed, so
// that failed attempts order nothing: a caller that relies on the previous owner's stores adds a fence.
__device__ __forceinline__ bool claim(u64 word) {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, 1;" : "=l"(before) : "l"(word) : "memory");
    return before == 0;
}

// An owner that fences after its claim sees the stores of the one before.
__device__ __forceinline__ void release(u64 word) {
    asm volatile("st.release.gpu.global.u64 [%0], 0;" ::"l"(word) : "memory");
}

// Like `fence`; also orders earlier stores of this thread before its later loads, which acquire and release do not.
__device__ __forceinline__ void fence_all() { asm volatile("fence.sc.sys;" ::: "memory"); }

// Orders earlier accesses before later stores, and earlier loads before later accesses, for the whole system.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Relaxed: numbers tickets, which only have to be unique.
__device__ __forceinline__ u64 increment(u64 word) {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(word) : "memory");
    return before;
}

// Loads that a thread has in flight before it stores, to cover the latency of a peer's memory.
constexpr u32 in_flight = 4;

template <typename T>
__device__ __forceinline__ void copy_items(u64 target, u64 source, u64 count, u32 rank, u32 size) {
    if (rank >= count) return;
    const T *in = (const T *)source + rank;
    T *out = (T *)target + rank;
    const u64 stride = size;
    for (u64 left = count - rank;; left -= in_flight * stride) {
        T values[in_flight];
#pragma unroll
        for (u32 j = 0; j < in_flight; j++)
            if (j * stride < left) values[j] = in[j * stride];
#pragma unroll
        for (u32 j = 0; j < in_flight; j++)
            if (j * stride < left) out[j * stride] = values[j];
        if (left <= in_flight * stride) return;
        in += in_flight * stride;
        out += in_flight * stride;
    }
}

// Bytes `from` to `to`, fewer than 16.
__device__ __forceinline__ void copy_edge(u64 target, u64 source, u64 from, u64 to, u32 rank, u32 size) {
    for (u64 i = from + rank; i < to; i += size) *(unsigned char *)(target + i) = *(const unsigned char *)(source + i);
}

// Copies by the widest accesses that the alignment of both allows.
__device__ __forceinline__ void copy(u64 target, u64 source, u64 bytes, u32 rank, u32 size) {
    const u64 apart = target ^ source;
    if ((apart & 15u) == 0) {
        u64 head = (16u - (target & 15u)) & 15u;
        if (head > bytes) head = bytes;
        copy_edge(target, source, 0, head, rank, size);
        copy_items<uint4>(target + head, source + head, (bytes - head) / 16, rank, size);
        copy_edge(target, source, bytes - (bytes - head) % 16, bytes, rank, size);
    } else if (((target | source) & 3u) == 0) {
        const u64 whole = bytes / 4;
        copy_items<u32>(target, source, whole, rank, size);
        copy_items<unsigned char>(target + 4 * whole, source + 4 * whole, bytes - 4 * whole, rank, size);
    } else {
        copy_items<unsigned char>(target, source, bytes, rank, size);
    }
}

}  // namespace detail
}  // namespace warplink

#endif
