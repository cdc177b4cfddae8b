// Transfers by kernels.
//
// For a few kilobytes the copy engine, and handing over between it and the unit that waits for words, take
// longer than the bytes. Here a kernel does all of it: `warplink_transfer` waits for words, copies between
// memory of two GPUs and sets words, by one block or several; `warplink_packets` stores packets, or unpacks
// them.

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
    // How many operations come before the copy, and how many there are in all.
    u32 before;
    u32 count;
    // Bit i: operation i waits, or resets a word of this GPU; otherwise it sets.
    u32 waits;
    u32 resets;
    // Of the resets, those of words that every block waits for first.
    u32 late;
    // Of the operations that set, those of words in this process's own memory.
    u32 own;
    // Words that each block adds one to when it has copied, or 0.
    u64 arrivals[2];
    // Counts the blocks that have waited; zero before and after.
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

// Operations `from` to `to`, by one thread. With `only_waits`, another block does the rest.
static __device__ void run(const Transfer &transfer, u32 from, u32 to, bool only_waits) {
    // One fence serves the words of peers that are set one after another; it is what costs.
    bool fenced = false;
    // Own words wait for those: who sees that a transfer is completed may take it that the peer has been told.
    u32 delayed = 0;
    for (u32 i = from; i < to; i++) {
        const u64 word = transfer.operations[i].word, value = transfer.operations[i].value;
        const bool sets = !((transfer.waits | transfer.resets) >> i & 1u);
        if (!sets) set_own(transfer, delayed);
        if (transfer.waits >> i & 1u) {
            // Compared as a signed difference. The host ends the wait of a lost peer by writing a
            // value that is large enough for every wait.
            while ((long long)(detail::load_acquire(word) - value) < 0) {
            }
            fenced = false;
        } else if (only_waits || (transfer.late >> i & 1u)) {
            continue;
        } else if (transfer.resets >> i & 1u) {
            // Later sets come after a fence, and so after this.
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

// Two of its largest blocks have room on a multiprocessor, so that launches of 32 of them may start early.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2) warplink_transfer(const __grid_constant__ Transfer transfer) {
    detail::await_preceding();
    const bool first = blockIdx.x == 0;
    u32 passed = 0;
    if (threadIdx.x == 0) {
        run(transfer, 0, transfer.before, !first);
        // Its waits are over: their loads have returned. The value is not used before the copy is under way.
        if (transfer.late) passed = atomicInc((u32 *)transfer.counter, gridDim.x - 1);
    }
    // What the first thread acquired, all have after the barrier; and what all stored before the
    // second barrier, the first thread's fence covers.
    __syncthreads();
    detail::copy(transfer.target, transfer.source, transfer.bytes, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
    __syncthreads();
    if (threadIdx.x != 0) return;
    // Only the last block to pass the waits resets what they were for, and before it says that it has copied:
    // the peer sets such a word again when all blocks have said so.
    if (transfer.late && passed == gridDim.x - 1) {
        for (u32 i = 0; i < transfer.before; i++)
            if (transfer.late >> i & 1u) store(transfer.operations[i].word, 0);
    }
    if (transfer.arrivals[0] | transfer.arrivals[1]) {
        detail::fence();
        for (u32 i = 0; i < 2; i++)
            if (transfer.arrivals[i]) add(transfer.arrivals[i]);
    }
    // Of several blocks' operations behind the copy, all wait.
    if (first) run(transfer, transfer.before, transfer.count, false);
}

// ---- packets; the host's `device/packets.rs` says how they are laid out and why nothing is overwritten

struct PacketPart {
    // What is sent, or where what is received belongs.
    u64 data;
    u64 bytes;
    // This end's scratch and the other's.
    u64 own;
    u64 peer;
    // Not zero when waits are to end.
    u64 abort;
    // A word that each block adds one to when it is done, or 0.
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

// Both give false where the waits were ended, and the epoch that the block is at.
static __device__ __forceinline__ bool push(const PacketPart &part, u32 block, u64 &epoch) {
    const u64 packets = (part.bytes + 7) / 8, stride = (u64)part.blocks * part.threads;
    u64 i = (u64)block * part.threads + threadIdx.x;
    // Under way before the scratch is known to be free.
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

// The blocks of part 0 come first, then those of part 1, and so on; what sends comes before what receives the
// answer to it.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) warplink_packets(const __grid_constant__ PacketParts all) {
    u32 number = 0, block = blockIdx.x;
    while (number + 1 < all.count && block >= all.parts[number].blocks) block -= all.parts[number++].blocks;
    const PacketPart &part = all.parts[number];
    bool done = true;
    u64 epoch = 0;
    detail::await_preceding();
    // Of several parts, another may want more threads.
    if (threadIdx.x < part.threads) done = part.receives ? unpack(part, block, epoch) : push(part, block, epoch);
    // Where the waits were ended, nothing is counted.
    if (!__syncthreads_and(done) || threadIdx.x != 0) return;
    store(part.own + 8 * block, epoch);
    // All packets of the block have been loaded, as their data was looked at.
    if (part.receives) store(part.peer + consumed_offset + 8 * block, epoch);
    if (part.completed) {
        detail::fence();
        add(part.completed);
    }
}
