// Transfers by kernels.
//
// For a few kilobytes the copy engine, and its handover with the unit that waits for words, take longer than the
// bytes. Here a kernel does everything: `warplink_transfer` waits for words, copies between memory of two GPUs and
// sets words, by one block or several; `warplink_packets` stores packets, or unpacks them.

#include <warplink/memory.cuh>

using namespace warplink;

// Must match the host.
#define MAX_OPERATIONS 16
#define MAX_THREADS 1024
#define MAX_PARTS 8
#define MAX_BLOCKS 128

struct Operation {
    u64 word;
    u64 value;
};

struct Transfer {
    u64 target;
    u64 source;
    u64 bytes;
    // Number of operations before the copy, and in total.
    u32 before;
    u32 count;
    // Bit i: operation i waits, or resets a word of this GPU; otherwise it sets.
    u32 waits;
    u32 resets;
    // Resets of words that every block waits for first.
    u32 late;
    // Sets of words in this process's own memory.
    u32 own;
    // Words that each block increments after its copy, or 0.
    u64 arrivals[2];
    // Counts the blocks whose waits are over; zero before and after.
    u64 counter;
    Operation operations[MAX_OPERATIONS];
};

static __device__ __forceinline__ void store(u64 word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

static __device__ __forceinline__ void add(u64 word) {
    asm volatile("red.relaxed.sys.global.add.u64 [%0], 1;" ::"l"(word) : "memory");
}

// The operations of `delayed`, in their order.
static __device__ __forceinline__ void set_own(const Transfer &transfer, u32 &delayed) {
    for (; delayed != 0; delayed &= delayed - 1) {
        const Operation &operation = transfer.operations[__ffs(delayed) - 1];
        detail::store_release(operation.word, operation.value);
    }
}

// Operations `from` to `to`, by one thread. With `only_waits`, another block executes the rest.
static __device__ void run(const Transfer &transfer, u32 from, u32 to, bool only_waits) {
    // One fence covers consecutive sets of peers' words, since the fence is the expensive part.
    bool fenced = false;
    // Own words are set after those of peers: completion at this rank implies that the peer has been notified.
    u32 delayed = 0;
    for (u32 i = from; i < to; i++) {
        const u64 word = transfer.operations[i].word, value = transfer.operations[i].value;
        const bool sets = !((transfer.waits | transfer.resets) >> i & 1u);
        if (!sets) set_own(transfer, delayed);
        if (transfer.waits >> i & 1u) {
            // Compared as a signed difference. To abort the wait for a lost peer, the host writes a value that is
            // large enough for every wait.
            while ((long long)(detail::load_acquire(word) - value) < 0) {
            }
            fenced = false;
        } else if (only_waits || (transfer.late >> i & 1u)) {
            continue;
        } else if (transfer.resets >> i & 1u) {
            // Later sets follow a fence, and so follow this.
            store(word, 0);
            fenced = false;
        } else {
            if (!fenced) detail::fence();
            fenced = true;
            if (transfer.own >> i & 1u) {
                delayed |= 1u << i;
            } else {
                store(word, value);
            }
        }
    }
    set_own(transfer, delayed);
}

// Launch bounds: two of its largest blocks fit on a multiprocessor, so that launches of 32 of them may start early.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2) warplink_transfer(const __grid_constant__ Transfer transfer) {
    detail::await_preceding();
    const bool first = blockIdx.x == 0;
    u32 passed = 0;
    if (threadIdx.x == 0) {
        run(transfer, 0, transfer.before, !first);
        // Its waits are over: their loads have returned. The value is not used before the copy is in flight.
        if (transfer.late) passed = atomicInc((u32 *)transfer.counter, gridDim.x - 1);
    }
    // The first thread's acquires extend to all threads by the barrier, and the first thread's fence covers the
    // stores of all threads before the second barrier.
    __syncthreads();
    detail::copy(transfer.target, transfer.source, transfer.bytes, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
    __syncthreads();
    if (threadIdx.x != 0) return;
    // Only the last block to pass the waits resets the awaited words, before it reports its copy: the peer sets such
    // a word again only when all blocks have reported.
    if (transfer.late && passed == gridDim.x - 1) {
        for (u32 i = 0; i < transfer.before; i++)
            if (transfer.late >> i & 1u) store(transfer.operations[i].word, 0);
    }
    if (transfer.arrivals[0] | transfer.arrivals[1]) {
        // Once for both words: each `add` is relaxed, and whoever sees it must see the copy.
        detail::fence();
        for (u32 i = 0; i < 2; i++)
            if (transfer.arrivals[i]) add(transfer.arrivals[i]);
    }
    // With several blocks, all operations after the copy are waits.
    if (first) run(transfer, transfer.before, transfer.count, false);
}

// ---- packets; `device/packets.rs` of the host documents their layout and why nothing is overwritten

struct PacketPart {
    // Source of a send, or destination of a receive.
    u64 data;
    u64 bytes;
    // This end's scratch and the other's.
    u64 own;
    u64 peer;
    // Nonzero to abort waits.
    u64 abort;
    // A word that each block increments when it is done, or 0.
    u64 completed;
    u32 blocks;
    u32 threads;
    u32 receives;
    u32 unused;
};

struct PacketParts {
    PacketPart parts[MAX_PARTS];
    u32 count;
    u32 unused;
};

static constexpr u64 consumed_offset = 8 * MAX_BLOCKS;
static constexpr u64 halves_offset = 2 * consumed_offset;

// Up to 8 bytes from an address of any alignment.
static __device__ __forceinline__ uint2 load_data(u64 from, u64 left) {
    if (left >= 8 && (from & 7u) == 0) return *(const uint2 *)from;
    uint2 data = make_uint2(0, 0);
    for (u32 i = 0; i < 8 && i < left; i++) {
        const u32 byte = *(const unsigned char *)(from + i);
        if (i < 4) {
            data.x |= byte << 8 * i;
        } else {
            data.y |= byte << 8 * (i - 4);
        }
    }
    return data;
}

static __device__ __forceinline__ void store_data(u64 to, u64 left, uint2 data) {
    if (left >= 8 && (to & 7u) == 0) {
        *(uint2 *)to = data;
        return;
    }
    for (u32 i = 0; i < 8 && i < left; i++)
        *(unsigned char *)(to + i) = (unsigned char)((i < 4 ? data.x >> 8 * i : data.y >> 8 * (i - 4)) & 0xffu);
}

// Both return false if waits were aborted. `epoch` is that of the block.
static __device__ __forceinline__ bool push(const PacketPart &part, u32 block, u64 &epoch) {
    const u64 packets = (part.bytes + 7) / 8, stride = (u64)part.blocks * part.threads;
    u64 i = (u64)block * part.threads + threadIdx.x;
    // In flight before the scratch is known to be free.
    uint2 data = make_uint2(0, 0);
    if (i < packets) data = load_data(part.data + 8 * i, part.bytes - 8 * i);
    epoch = detail::load_relaxed(part.own + 8 * block) + 1;
    for (u32 polls = 1; (long long)(detail::load_relaxed(part.own + consumed_offset + 8 * block) + 2 - epoch) < 0; polls++)
        if (polls % detail::polls_per_look == 0 && detail::load_relaxed(part.abort) != 0) return false;
    const u64 out = part.peer + halves_offset + (epoch & 1u) * 16 * packets;
    const u32 flag = (u32)epoch;
    while (i < packets) {
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(out + 16 * i), "r"(data.x), "r"(flag), "r"(data.y) : "memory");
        i += stride;
        if (i < packets) data = load_data(part.data + 8 * i, part.bytes - 8 * i);
    }
    return true;
}

static __device__ __forceinline__ bool unpack(const PacketPart &part, u32 block, u64 &epoch) {
    const u64 packets = (part.bytes + 7) / 8, stride = (u64)part.blocks * part.threads;
    epoch = detail::load_relaxed(part.own + 8 * block) + 1;
    const u64 in = part.own + halves_offset + (epoch & 1u) * 16 * packets;
    const u32 flag = (u32)epoch;
    for (u64 i = (u64)block * part.threads + threadIdx.x; i < packets; i += stride) {
        uint2 data;
        u32 first, second;
        for (u32 polls = 1;; polls++) {
            asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(data.x), "=r"(first), "=r"(data.y), "=r"(second)
                         : "l"(in + 16 * i)
                         : "memory");
            if (first == flag && second == flag) break;
            if (polls % detail::polls_per_look == 0 && detail::load_relaxed(part.abort) != 0) return false;
        }
        store_data(part.data + 8 * i, part.bytes - 8 * i, data);
    }
    return true;
}

// The blocks of part 0 come first, then those of part 1, and so on; senders come before receivers of the response.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) warplink_packets(const __grid_constant__ PacketParts all) {
    u32 number = 0, block = blockIdx.x;
    while (number + 1 < all.count && block >= all.parts[number].blocks) block -= all.parts[number++].blocks;
    const PacketPart &part = all.parts[number];
    bool done = true;
    u64 epoch = 0;
    detail::await_preceding();
    // With several parts, another part may need more threads.
    if (threadIdx.x < part.threads) done = part.receives ? unpack(part, block, epoch) : push(part, block, epoch);
    // If waits were aborted, nothing is counted.
    if (!__syncthreads_and(done) || threadIdx.x != 0) return;
    store(part.own + 8 * block, epoch);
    // All packets of the block have been loaded, since their data was used.
    if (part.receives) store(part.peer + consumed_offset + 8 * block, epoch);
    if (part.completed) {
        detail::fence();
        add(part.completed);
    }
}
