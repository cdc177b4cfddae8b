// Lanes of kernel sections, and the flags of their launches; a part of steps.cuh.

#ifndef WARPLINK_LANES_CUH
#define WARPLINK_LANES_CUH

#include <warplink/memory.cuh>

namespace warplink {

// Blocks of a lane.
#ifndef WARPLINK_LANE_BLOCKS
#define WARPLINK_LANE_BLOCKS 1
#endif
constexpr u32 lane_blocks = WARPLINK_LANE_BLOCKS;

namespace detail {

// Barrier of the threads of a cluster, in two halves. It orders execution only: a release would wait until all stores
// at peers have arrived.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Values that the warps of a cluster exchange: every warp stores one at every block, in turns that alternate between
// two slots. A slot's barrier counts the bytes that have arrived, so no fence is needed.
struct ClusterExchange {
    // A lane of several blocks has at most 2048 threads.
    static constexpr u32 warps = 64;
    u64 barrier[2];
    u64 values[2][warps];

    static __device__ __forceinline__ ClusterExchange &own() {
        __shared__ ClusterExchange exchange;
        return exchange;
    }

    static __device__ __forceinline__ u32 shared(const u64 *word) { return (u32)__cvta_generic_to_shared(word); }

    // By one thread, before it arrives at the cluster's barrier.
    __device__ __forceinline__ void prepare() {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(barrier)) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(barrier + 1)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }

    // Stores a warp's value at a block.
    __device__ __forceinline__ void store(u32 slot, u32 warp, u32 block, u64 value) {
#if __CUDA_ARCH__ >= 900
        u32 place, counter;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared(values[slot] + warp)), "r"(block));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(shared(barrier + slot)), "r"(block));
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(place), "l"(value), "r"(counter) : "memory");
#endif
    }

    // By one thread of the block in each turn.
    __device__ __forceinline__ void expect(u32 slot, u32 warps) {
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier + slot)), "r"(8 * warps) : "memory");
#endif
    }

    // Waits until the values of all warps have arrived; `parity` alternates between the uses of a slot.
    __device__ __forceinline__ void wait(u32 slot, u32 parity) {
#if __CUDA_ARCH__ >= 900
        u32 there = 0;
        while (there == 0) {
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                         : "=r"(there)
                         : "r"(shared(barrier + slot)), "r"(parity)
                         : "memory");
        }
#endif
    }
};

}  // namespace detail

// Flags of packets of an epoch, from 1 on: `single` in 8-byte packets, which is never 0, `first` and `second` in
// 16-byte packets, a pair that never repeats, and `whole` in 128-byte packets, the epoch itself.
struct Flag {
    u32 first, second, single;
    u64 whole;
    __device__ __forceinline__ explicit Flag(u64 epoch)
        : first((u32)epoch), second((u32)epoch + (u32)(epoch >> 32)), single((u32)((epoch - 1) % 0xffffffffull) + 1), whole(epoch) {}
};

// State of a lane, in registers.
struct Lane {
    u64 abort;
    u64 epochs;
    u32 number;
    // Before this one, once they are counted.
    mutable u64 launches;
    mutable bool counted;
    bool ended;
    // Whether all blocks of the lane are known to run, which has to precede accesses of their shared memory.
    bool together;
    // The block's threads that it has: all, except in a part of a lane.
    u32 first, threads;

    // `epochs`: the number of launches so far for each lane, in this rank's memory. This one is lane `number`.
    __device__ __forceinline__ Lane(u64 abort, u64 epochs, u32 number = blockIdx.x)
        : abort(abort), epochs(epochs), number(number), counted(false), ended(false), together(lane_blocks == 1), first(0), threads(blockDim.x) {
        if constexpr (lane_blocks > 1) {
            if (threadIdx.x == 0) detail::ClusterExchange::own().prepare();
            __syncwarp();
            detail::cluster_arrive();
        }
        // The preceding launch on the workspace advances the epochs.
        detail::await_preceding();
    }

    // Loads the number of launches, unless that is done.
    __device__ __forceinline__ void count() const {
        if (counted) return;
        // The condition holds. With an address that looked the same in all threads, the assembler would move the number to a
        // register of the warp, for which it would wait before the next load.
        launches = detail::load_relaxed(threadIdx.x < blockDim.x ? epochs + 8 * number : 0);
        counted = true;
    }

    // Epoch of this launch, from 1 on. Loads earlier in the code are in flight before `launches` has to arrive.
    __device__ __forceinline__ u64 epoch() const {
        count();
        u64 epoch;
        asm volatile("add.u64 %0, %1, 1;" : "=l"(epoch) : "l"(launches));
        return epoch;
    }

    // Number of this launch among `PERIOD` ones.
    template <u32 PERIOD> __device__ __forceinline__ u32 turn() const {
        count();
        return (u32)(launches % PERIOD);
    }

    __device__ __forceinline__ u32 rank() const {
        if constexpr (lane_blocks > 1) return blockIdx.x % lane_blocks * blockDim.x + threadIdx.x;
        return threadIdx.x - first;
    }
    __device__ __forceinline__ u32 size() const { return lane_blocks * threads; }
    // Whether the thread is in the warp of the one that stores integers, which is the last.
    __device__ __forceinline__ bool in_last_warp() const { return threadIdx.x / 32 == (first + threads - 1) / 32; }
    __device__ __forceinline__ void sync() {
        if constexpr (lane_blocks > 1) {
            gather();
            detail::cluster_arrive();
            detail::cluster_wait();
        } else {
            __syncthreads();
        }
    }

    // Waits until all blocks of the lane run.
    __device__ __forceinline__ void gather() {
        if (!together) detail::cluster_wait();
        together = true;
    }

    // Makes the threads of a block, or of a part, agree on whether the lane has ended.
    __device__ __forceinline__ bool agree() {
        if (threads == blockDim.x)
            ended = __syncthreads_or(ended);
        else if (threads == 32)
            ended = __any_sync(~0u, ended);
        else {
            u32 any;
            asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q;}"
                         : "=r"(any)
                         : "r"((u32)ended), "r"(first / threads + 1), "r"(threads)
                         : "memory");
            ended = any != 0;
        }
        return ended;
    }

    // Whether a wait that has polled so often has to end. Checks the abort word every few polls.
    __device__ __forceinline__ bool gives_up(u32 polls) {
        if (polls % detail::polls_per_look != 0) return false;
        if (!ended && detail::load_relaxed(abort) != 0) ended = true;
        return ended;
    }

    // The last call of a kernel: advances the epochs of `lanes` lanes. If launches with different numbers of blocks
    // share the epochs, `lanes` is the largest of these numbers, in all of them, so that all epochs stay equal.
    __device__ __forceinline__ void finish(u32 lanes) {
        count();
        // Every thread has read its epoch.
        __syncthreads();
        gather();
        const u64 epoch = launches + 1;
        // Needs no release: the end of the kernel orders it before the next one.
        if (threadIdx.x == 0) *(volatile u64 *)(epochs + 8 * blockIdx.x) = epoch;
        // One block is enough for those without one, so that the others end earlier.
        if (blockIdx.x != 0) return;
        for (u32 lane = gridDim.x + threadIdx.x; lane < lanes; lane += blockDim.x) *(volatile u64 *)(epochs + 8 * lane) = epoch;
    }
};

// Division of a lane's warps into parts, each of which has every `count`-th iteration of a loop, from number `number` on. While one
// part waits for the words that name its row, and then for the row, the others have theirs in flight. There are `most` parts, which is
// at most the number of warps, or fewer if there are fewer iterations.
struct Parts {
    u32 warps, number, count;

    __device__ __forceinline__ Parts(long long iterations, u32 most) {
        const u32 all = blockDim.x / 32, warp = threadIdx.x / 32;
        count = iterations < 1 ? 1 : iterations < most ? (u32)iterations : most;
        warps = all / count;
        // Warps that are left over have no iteration.
        number = warp / warps < count ? warp / warps : (u32)iterations;
    }

    // A lane of this thread's part. Its steps may not need the others' threads: no barrier, signal or wait. For reductions along
    // rows, each part has one of the block's named barriers, so that there are at most 15 such parts.
    __device__ __forceinline__ Lane of(const Lane &lane) const {
        Lane part = lane;
        part.first = threadIdx.x / 32 / warps * warps * 32;
        part.threads = 32 * warps;
        return part;
    }
};

// Start times of a lane's steps, in a traced kernel.
struct Times {
    u64 words;
    u64 room;
    u64 count;

    // `all` is the memory for the times of all lanes: per lane three words, the number of steps, the end of the last
    // one, and the epoch; then two words for each of `room` steps, its start and its position in the text. Steps
    // beyond `room` are not recorded.
    __device__ __forceinline__ Times(u64 all, u64 room)
        : words(all + (24 + 16 * room) * blockIdx.x), room(room), count(0) {}

    // Nanoseconds, on a clock shared by all blocks.
    __device__ __forceinline__ static u64 now() {
        u64 time;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
        return time;
    }

    __device__ __forceinline__ void step(u64 place) {
        if (threadIdx.x == 0 && count < room) {
            volatile u64 *entry = (volatile u64 *)(words + 24 + 16 * count);
            entry[0] = now();
            entry[1] = place;
            ++count;
        }
    }

    // After the last step.
    __device__ __forceinline__ void finish(const Lane &self) {
        __syncthreads();
        if (threadIdx.x == 0) {
            volatile u64 *header = (volatile u64 *)words;
            header[0] = count;
            header[1] = now();
            self.count();
            header[2] = self.launches;
        }
    }
};

}  // namespace warplink

#endif
