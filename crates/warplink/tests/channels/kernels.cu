// The kernels of the channel tests; their closures for the host device are in closures.rs.

#include <warplink/device.cuh>

using warplink::At;
using warplink::Block;
using warplink::Channel;
using warplink::Grid;
using warplink::Status;
using warplink::Thread;
using warplink::u32;
using warplink::u64;
using warplink::Warp;

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

// Ends the kernel where a call failed.
#define CHECK(call)                                        \
    do {                                                   \
        const Status made = (call);                        \
        if (made != Status::ok) return note(result, 0, made); \
    } while (false)

// Each block on its channel: the lower rank sends the first half of its region to the second half of the
// peer's, which answers; both check.
extern "C" __global__ void ping_pong(const Channel *channels, u64 bytes, u32 rank, u32 rounds, u32 *result) {
    const Channel channel = channels[blockIdx.x];
    const Block block;
    const bool first = rank < channel.peer;
    // Both ends of a connection have the same tag, and no other connection between them has it.
    const u32 start = 1000003u * (u32)channel.tag;
    for (u32 round = 0; round < rounds; round++) {
        if (first) {
            fill(channel.here(0, bytes), bytes, start + 2 * round);
            CHECK(channel.put_with_signal(block, bytes, 0, bytes));
        }
        CHECK(channel.wait(block));
        note(result, differences(channel.here(bytes, bytes), bytes, start + 2 * round + first), Status::ok);
        if (!first) {
            fill(channel.here(0, bytes), bytes, start + 2 * round + 1);
            CHECK(channel.put_with_signal(block, bytes, 0, bytes));
        }
    }
    // The last answer may be taken for read only now.
    CHECK(channel.flush(block));
}

// Waits, in the way that `how` says, for what never comes; 10 signals until that fails.
extern "C" __global__ void wait_by(Channel channel, warplink::Signals signals, u32 how, u32 *result) {
    const Block block;
    bool arrived = false;
    switch (how) {
        case 0: CHECK(channel.wait(block)); break;
        case 1: CHECK(channel.wait_until(block, 3)); break;
        case 2:
            while (!arrived) CHECK(channel.poll(block, arrived));
            break;
        case 3: CHECK(warplink::barrier(block, &channel, 1)); break;
        case 4: CHECK(signals.wait(block, 1)); break;
        case 5: CHECK(signals.wait_until(block, 1, 3)); break;
        case 6:
            while (!arrived) CHECK(signals.poll(block, 1, arrived));
            break;
        case 7: CHECK(channel.read_packets8(block, 0, 256, 128, 1)); break;
        case 8: CHECK(channel.read_packets16(block, 0, 256, 128, 1)); break;
        case 9: CHECK(channel.read_packets128(block, 0, 256, 120, 1)); break;
        default:
            while (true) CHECK(channel.signal(block));
    }
    note(result, 1, Status::ok);
}

// Waits once, for a signal that may never come.
extern "C" __global__ void wait_once(Channel channel, u32 *result) { CHECK(channel.wait(Block())); }

// Signals, and waits for the peer that does the same.
extern "C" __global__ void signal_and_wait(Channel channel, u32 *result) {
    CHECK(channel.signal(Block()));
    CHECK(channel.wait(Block()));
}

// Signals again and again, until that fails.
extern "C" __global__ void signal_on(Channel channel, u32 *result) {
    Status status;
    while ((status = channel.signal(Block())) == Status::ok) {
    }
    note(result, 0, status);
}

// All ranks at once, a block for each peer: both send to one another's slots, check, and say so.
extern "C" __global__ void all_pairs(const Channel *channels, u32 rank, u32 world, u64 bytes, u32 rounds, u32 *result) {
    const Channel channel = channels[blockIdx.x];
    const Block block;
    const u64 own = channel.peer * bytes, at_peer = (world + rank) * bytes, arrived = (world + channel.peer) * bytes;
    for (u32 round = 0; round < rounds; round++) {
        fill(channel.here(own, bytes), bytes, (round * world + rank) * world + channel.peer);
        CHECK(channel.put_with_signal(block, at_peer, own, bytes));
        CHECK(channel.wait(block));
        note(result, differences(channel.here(arrived, bytes), bytes, (round * world + channel.peer) * world + rank), Status::ok);
        CHECK(channel.signal(block));
        CHECK(channel.wait(block));
    }
}

// Every block puts pieces of odd lengths from odd places to other odd places, and signals; the first block
// waits for all.
extern "C" __global__ void odd_pieces(Channel channel, u64 half, u32 pieces, u32 *result) {
    const Block block;
    for (u32 i = blockIdx.x; i < pieces; i += gridDim.x)
        CHECK(channel.put(block, half + 97 * i, 97 * i + i % 5, 61 + i % 31));
    CHECK(channel.signal(block));
    if (blockIdx.x == 0)
        for (u32 i = 0; i < gridDim.x; i++) CHECK(channel.wait(block));
    CHECK(channel.flush(block));
}

// The same source for slot after slot of the peer: each put is flushed before the source changes.
extern "C" __global__ void flushed_slots(Channel channel, u64 bytes, u32 slots, u32 *result) {
    const Block block;
    for (u32 slot = 0; slot < slots; slot++) {
        fill(channel.here(0, bytes), bytes, slot);
        if (slot % 2 == 0) {
            CHECK(channel.put(block, (1 + slot) * bytes, 0, bytes));
            CHECK(channel.flush(block));
        } else {
            CHECK(channel.put_with_signal_and_flush(block, (1 + slot) * bytes, 0, bytes));
        }
    }
    CHECK(channel.signal(block));
    for (u32 i = 0; i < slots / 2 + 1; i++) CHECK(channel.wait(block));
    for (u32 slot = 0; slot < slots; slot++)
        note(result, differences(channel.here((1 + slot) * bytes, bytes), bytes, slot), Status::ok);
}

// Every block puts its words one by one, without waiting for anything, and signals once for each.
extern "C" __global__ void many_puts(Channel channel, u32 each, u32 *result) {
    const u64 from = (u64)blockIdx.x * each;
    if (threadIdx.x != 0) return;
    for (u32 i = 0; i < each; i++) CHECK(channel.put_with_signal(Thread(), 8 * (from + i), 8 * (from + i), 8));
}

// One thread of every block signals `each` times, as fast as it can, and flushes.
extern "C" __global__ void many_signals(Channel channel, u32 each, u32 *result) {
    if (threadIdx.x != 0) return;
    for (u32 i = 0; i < each; i++) CHECK(channel.signal(Thread()));
    CHECK(channel.flush(Thread()));
}

// Waits for `count` signals.
extern "C" __global__ void wait_for(Channel channel, u64 count, u32 *result) { CHECK(channel.wait_until(Block(), count)); }

// Waits for `count` signals by polling.
extern "C" __global__ void poll_for(Channel channel, u32 count, u32 *result) {
    for (u32 found = 0; found < count;) {
        bool arrived;
        CHECK(channel.poll(Block(), arrived));
        found += arrived;
    }
}

// Packets back and forth, of one kind (0 to 2) or of all in turn (3); the flag counts up, and so does the
// data.
extern "C" __global__ void packets(Channel channel, u64 bytes, u32 rounds, u32 kind, u32 *result) {
    const Block block;
    // Own data, data that arrived, and packets of two rounds, so that no round overwrites unread ones.
    const u64 part = (bytes + 127) / 128 * 128, packed = 3 * part + 256;
    for (u32 round = 0; round < rounds; round++) {
        const u64 at = 2 * part + round % 2 * packed;
        fill(channel.here(0, bytes), bytes, round);
        __syncthreads();
        const u32 flag = round + 1, now = kind == 3 ? round % 3 : kind;
        if (now == 0) {
            CHECK(channel.put_packets8(block, at, 0, bytes, flag));
            CHECK(channel.read_packets8(block, part, at, bytes, flag));
        } else if (now == 1) {
            CHECK(channel.put_packets16(block, at, 0, bytes, flag));
            CHECK(channel.read_packets16(block, part, at, bytes, flag));
        } else {
            CHECK(channel.put_packets128(block, at, 0, bytes, (u64)flag << 32 | flag));
            CHECK(channel.read_packets128(block, part, at, bytes, (u64)flag << 32 | flag));
        }
        note(result, differences(channel.here(part, bytes), bytes, round), Status::ok);
        // The flags of the next kind of packets lie elsewhere in the lines.
        CHECK(channel.signal(block));
        CHECK(channel.wait(block));
    }
}

// Barriers of all ranks, with a value that each writes to each before.
extern "C" __global__ void barriers(const Channel *channels, u32 count, u32 rank, u32 rounds, u32 *result) {
    const Block block;
    for (u32 round = 0; round < rounds; round++) {
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
            *(u64 *)channels[i].here(0, 8) = round + 1;
            CHECK(channels[i].put(Thread(), 8 + 8 * rank, 0, 8));
        }
        CHECK(warplink::barrier(block, channels, count));
        for (u32 i = threadIdx.x; i < count; i += blockDim.x)
            if (*(volatile u64 *)channels[i].here(8 + 8 * channels[i].peer, 8) != round + 1) note(result, 1, Status::ok);
        CHECK(warplink::barrier(block, channels, count));
    }
}

// Gets the peer's region `region` into the own one, once the peer has said that it may be read.
extern "C" __global__ void get_region(Channel channel, u32 region, u64 bytes, u32 *result) {
    const Block block;
    CHECK(channel.signal(block));
    CHECK(channel.wait(block));
    CHECK(channel.get(block, 0, At(region, bytes), bytes));
    CHECK(channel.flush(block));
    CHECK(channel.put_with_signal(block, At(region, 0), 0, bytes));
    CHECK(channel.wait(block));
}

// Offsets that pass the ends of regions, and regions that are not there.
extern "C" __global__ void out_of_range(Channel channel, u64 bytes, u32 *result) {
    const Block block;
    u32 accepted = 0;
    accepted += channel.put(block, 1, 0, bytes) != Status::out_of_range;
    accepted += channel.put(block, 0, bytes + 1, 0) != Status::out_of_range;
    accepted += channel.put(block, ~0ull, 0, 8) != Status::out_of_range;
    accepted += channel.get(block, 0, 8, ~0ull) != Status::out_of_range;
    accepted += channel.put(block, At(1, 0), 0, 8) != Status::out_of_range;
    accepted += channel.put_with_signal(block, At(99, 0), 0, 8) != Status::out_of_range;
    if (threadIdx.x == 0) note(result, accepted, Status::ok);
}

// A token goes around all ranks, by a signal of each in turn.
extern "C" __global__ void pass_on(warplink::Signals own, warplink::RemoteSignals right, u32 rank, u32 rounds, u32 *result) {
    const Block block;
    for (u32 round = 0; round < rounds; round++) {
        if (rank == 0) right.add(block, round % 3);
        bool arrived = false;
        if (round % 2 == 0) CHECK(own.wait(block, round % 3));
        while (round % 2 == 1 && !arrived) CHECK(own.poll(block, round % 3, arrived));
        if (rank != 0) right.add(block, round % 3);
    }
    CHECK(own.wait_until(block, 0, own.epoch(0)));
}

// Puts to a region that is added while this runs, until it is there.
extern "C" __global__ void put_when_added(Channel channel, u64 bytes, u32 *result) {
    const Block block;
    Status status;
    while ((status = channel.put(block, At(1, 0), 0, bytes)) == Status::out_of_range) {
    }
    CHECK(status);
    CHECK(channel.flush(block));
    CHECK(channel.signal(block));
}

// Packets that are not aligned, or pass the ends of regions; none of them is put.
extern "C" __global__ void misplaced_packets(Channel channel, u64 bytes, u32 *result) {
    const Block block;
    u32 accepted = 0;
    accepted += channel.put_packets8(block, 4, 0, 8, 1) != Status::misaligned;
    accepted += channel.put_packets8(block, 0, 2, 8, 1) != Status::misaligned;
    accepted += channel.put_packets16(block, 8, 0, 8, 1) != Status::misaligned;
    accepted += channel.put_packets16(block, 0, 0, 12, 1) != Status::misaligned;
    accepted += channel.put_packets128(block, 64, 0, 120, 1) != Status::misaligned;
    accepted += channel.read_packets128(block, 0, 64, 120, 1) != Status::misaligned;
    accepted += channel.put_packets8(block, 0, 0, bytes / 2 + 4, 1) != Status::out_of_range;
    accepted += channel.put_packets16(block, 16, 0, bytes / 2, 1) != Status::out_of_range;
    accepted += channel.put_packets128(block, 0, 0, bytes, 1) != Status::out_of_range;
    accepted += channel.read_packets8(block, 0, bytes, 8, 1) != Status::out_of_range;
    accepted += channel.read_packets16(block, bytes, 0, 8, 1) != Status::out_of_range;
    if (threadIdx.x == 0) note(result, accepted, Status::ok);
}

// Puts the first half of the region to the second half of the peer's, by one call.
extern "C" __global__ void put_half(Channel channel, u64 bytes, u32 *result) {
    CHECK(channel.put_with_signal_and_flush(Block(), bytes, 0, bytes));
    CHECK(channel.wait(Block()));
}
