// A small transfer in one kernel: wait for words, copy, set words.
//
// For a few kilobytes the copy engine, and handing over between it and the unit that waits for
// words, take longer than the bytes. One block does all of it; the words are ordered as the driver's
// own stream operations are.

typedef unsigned long long u64;
typedef unsigned int u32;

// Must match MAX_OPERATIONS and BLOCK on the host.
#define MAX_OPERATIONS 16
#define BLOCK 1024

// Loads that one thread has under way before it stores, to cover the latency of a peer's memory.
#define IN_FLIGHT 4

struct Operation {
    u64 word;
    u64 value;
};

struct Transfer {
    u64 target;
    u64 source;
    u64 bytes;
    // How many operations come before the copy, and how many there are in all.
    u32 before;
    u32 count;
    // Bit i: operation i waits, or resets a word of this GPU; otherwise it sets.
    u32 waits;
    u32 resets;
    Operation operations[MAX_OPERATIONS];
};

static __device__ __forceinline__ u64 load_acquire(u64 word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

static __device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

static __device__ __forceinline__ void store(u64 word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

static __device__ void run(const Transfer &transfer, u32 from, u32 to) {
    // One fence serves the words that are set one after another; it is what costs.
    bool fenced = false;
    for (u32 i = from; i < to; i++) {
        u64 word = transfer.operations[i].word, value = transfer.operations[i].value;
        if (transfer.waits >> i & 1u) {
            // Compared as a signed difference. The host ends the wait of a lost peer by writing a
            // value that is large enough for every wait.
            while ((long long)(load_acquire(word) - value) < 0) {
            }
            fenced = false;
        } else if (transfer.resets >> i & 1u) {
            // Later sets come after a fence, and so after this.
            store(word, 0);
            fenced = false;
        } else {
            if (!fenced) fence();
            fenced = true;
            store(word, value);
        }
    }
}

template <typename T>
static __device__ __forceinline__ void copy(u64 target, u64 source, u64 count) {
    const T *in = (const T *)source;
    T *out = (T *)target;
    u64 stride = blockDim.x, i = threadIdx.x;
    for (; i + (IN_FLIGHT - 1) * stride < count; i += IN_FLIGHT * stride) {
        T values[IN_FLIGHT];
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; j++) values[j] = in[i + j * stride];
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; j++) out[i + j * stride] = values[j];
    }
    for (; i < count; i += stride) out[i] = in[i];
}

extern "C" __global__ void __launch_bounds__(BLOCK) warplink_transfer(const __grid_constant__ Transfer transfer) {
    if (threadIdx.x == 0) run(transfer, 0, transfer.before);
    // What the first thread acquired, all have after the barrier; and what all stored before the
    // second barrier, the first thread's release covers.
    __syncthreads();
    u64 aligned = (transfer.target | transfer.source) & 15u;
    if (aligned == 0) {
        u64 whole = transfer.bytes / 16;
        copy<uint4>(transfer.target, transfer.source, whole);
        copy<unsigned char>(transfer.target + 16 * whole, transfer.source + 16 * whole, transfer.bytes % 16);
    } else if ((aligned & 3u) == 0) {
        u64 whole = transfer.bytes / 4;
        copy<u32>(transfer.target, transfer.source, whole);
        copy<unsigned char>(transfer.target + 4 * whole, transfer.source + 4 * whole, transfer.bytes % 4);
    } else {
        copy<unsigned char>(transfer.target, transfer.source, transfer.bytes);
    }
    __syncthreads();
    if (threadIdx.x == 0) run(transfer, transfer.before, transfer.count);
}
