// The kernels of the channel tests; their closures for the host device are in kernels.rs.

#include <warplink/device.cuh>

using warplink::At;
using warplink::Block;
using warplink::Channel;
using warplink::Status;
using warplink::Thread;
using warplink::u32;
using warplink::u64;

// Word `i` of what is sent in `round`.
static __device__ u32 pattern(u32 round, u64 i) { return round * 2654435761u + (u32)i * 40503u + 1u; }

static __device__ void fill(u64 at, u64 bytes, u32 round) {
    for (u64 i = threadIdx.x; i < bytes / 4; i += blockDim.x) ((u32 *)at)[i] = pattern(round, i);
}

// How many words differ from what is sent in `round`.
static __device__ u32 differences(u64 at, u64 bytes, u32 round) {
    u32 wrong = 0;
    for (u64 i = threadIdx.x; i < bytes / 4; i += blockDim.x) wrong += ((u32 *)at)[i] != pattern(round, i);
    return wrong;
}

static __device__ void note(u32 *result, u32 wrong, Status status) {
    if (wrong != 0) atomicAdd(&result[0], wrong);
    if (threadIdx.x == 0 && status != Status::ok) result[1] = (u32)status;
}

// The last argument is the region, which closures need. Rank 0 sends the first half of its region to the second half of rank 1's, which answers; both check.
extern "C" __global__ void ping_pong(Channel channel, u64 bytes, u32 rank, u32 rounds, u32 *result, const unsigned char *) {
    const Block block;
    for (u32 round = 0; round < rounds; round++) {
        Status status = Status::ok;
        if (rank == 0) {
            fill(channel.local, bytes, 2 * round);
            status = channel.put_with_signal(block, bytes, 0, bytes);
        }
        if (status == Status::ok) status = channel.wait(block);
        if (status != Status::ok) return note(result, 0, status);
        note(result, differences(channel.local + bytes, bytes, 2 * round + (rank == 0)), status);
        if (rank == 1) {
            fill(channel.local, bytes, 2 * round + 1);
            status = channel.put_with_signal(block, bytes, 0, bytes);
            if (status != Status::ok) return note(result, 0, status);
        }
    }
}

// Waits once, for a signal that may never come.
extern "C" __global__ void wait_once(Channel channel, u32 *result) {
    note(result, 0, channel.wait(Block()));
}
