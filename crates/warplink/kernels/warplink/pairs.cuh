// Header of kernels compiled from a program of two ranks, which any two ranks of a group run: many messages in one
// launch, each a launch of the program between this rank, as the one or the other of the two, and a peer.

#ifndef WARPLINK_PAIRS_CUH
#define WARPLINK_PAIRS_CUH

#include <warplink/sections.cuh>

namespace warplink {

// Must match the host.
constexpr u32 max_ranks = 8, carried_words = 3;
// Maximum messages of a launch of this kernel.
constexpr u32 max_messages = WARPLINK_MAX_MESSAGES;

struct Message {
    // The peer's rank in bits 0 to 7, this rank's role in bit 8, whether the blocks of its line are every second one in bit 9,
    // the number of these in bits 16 to 31, and the first of them from bit 32 on.
    u64 place;
    // Location of the data among this rank's published memory, as it is announced; 0 if it is not published.
    u64 published;
    // Addresses of the data, and of the count.
    u64 data, count;
    // Words that the program reads as integers.
    i64 carried[carried_words];

    // The peer and the role.
    __device__ __forceinline__ u32 line() const { return (u32)place & 0x1ffu; }
};

struct Messages {
    // Workspace and signals of each rank, as mapped here.
    u64 workspace[max_ranks], signals[max_ranks];
    // Numbers of messages so far: for each role, peer and lane. Then the verdicts of each role and peer.
    u64 counts;
    // Number of lanes that found the data of both ends reachable; the record of an out-of-range value follows it.
    u64 direct;
    // Mappings of published allocations.
    u64 tables;
    u64 rank, world, count;
    Message message[max_messages];
};

// Signals of a lane to its lane at the other end, which only this lane increments. Like `Outbound`, but for one peer: the
// count stays in a register, and nothing waits for it before the first signal.
struct PairOutbound {
    u64 sent;
    u64 count;

    // Number of this rank's signal whose place for the count is used.
    __device__ __forceinline__ PairOutbound(Signals signals, u32 number) : sent(signals.word(number) + detail::sent_offset), count(0) {
        if (threadIdx.x == 0) count = detail::load_relaxed(sent);
    }

    // Increments the word of the place, after all earlier stores of the lane.
    __device__ __forceinline__ void signal(Lane &lane, const Places<1> &word, const u32 (&)[1]) {
        // A lane that has ended has skipped stores that the signal would cover.
        if (lane.agree() || threadIdx.x != 0) return;
        // Waits were aborted, and so were the peer's.
        if (++count >= detail::ended_epoch) return;
        detail::store_release(word.at[0], count);
        *(volatile u64 *)sent = count;
    }
};

// Like `agree` for integers, except that all threads wait: if an announcement differs, or does not arrive, the lane has
// ended and stores nothing.
template <u32 COUNT, u32 INTEGERS>
__device__ __forceinline__ void agree_together(Lane &lane, const Places<COUNT> &from, const Announced<INTEGERS> &all, u64 verdict) {
    typedef detail::OnePacket<COUNT, Announced<INTEGERS>::packets> One;
    if (threadIdx.x < One::count) {
        const One one(threadIdx.x);
        const u64 at = one.at(from);
        detail::Packet<8> came = detail::load_packet<8>(at);
        const u32 packets = Announced<INTEGERS>::packets;
        const bool fits = detail::await_packet(lane, at, came, Flag(lane.epoch())) &&
                          detail::compare(lane, came, one.of(all), at - 16 * one.packet, one.packet, packets, verdict + detail::verdict_bytes * one.place);
        if (!fits) lane.ended = true;
    }
    lane.agree();
}

// The line of a block: one of the program's two ranks, and a peer.
struct Line {
    // Number of its first message, its blocks, and the lane of this block.
    u32 first, blocks, lane;
    u32 peer, role;
    // Index of the line.
    u32 number;

    __device__ __forceinline__ explicit Line(const Messages &all) {
#pragma unroll 1
        for (first = 0;; first++) {
            const u64 place = all.message[first].place;
            blocks = (u32)(place >> 16) & 0xffffu;
            const u32 offset = blockIdx.x - (u32)(place >> 32), apart = (u32)(place >> 9) & 1u;
            lane = offset >> apart;
            if ((lane < blocks && !(offset & apart)) || first + 1 >= (u32)all.count) break;
        }
        const u32 line = all.message[first].line();
        peer = line & 0xffu;
        role = line >> 8;
        number = role * (u32)all.world + peer;
    }

    __device__ __forceinline__ bool has(const Message &message) const { return message.line() == (role << 8 | peer); }

    // Announcement of a peer looks its allocation up in these tables, as rank `1 - role` of the program.
    __device__ __forceinline__ u64 peer_tables(const Messages &all) const {
        return all.tables + 8ull * detail::published_entries * peer - 8ull * detail::published_entries * (1 - role);
    }

    __device__ __forceinline__ u64 own_tables(const Messages &all) const { return all.tables + 8ull * detail::published_entries * all.rank; }

    // Before each message but the first of a launch: stores the count of those that this lane has done, for the host, and
    // orders their accesses, after a barrier, before the announcements of the next one.
    __device__ __forceinline__ void next(const Lane &self) const {
        if (threadIdx.x == 0) *(volatile u64 *)(self.epochs + 8 * lane) = self.launches;
        detail::fence();
    }

    // Stores the count of messages, for lanes that this launch has no blocks of, too. The last call of a kernel.
    __device__ __forceinline__ void finish(const Lane &self, u32 lanes) const {
        // Every thread has read its epoch.
        __syncthreads();
        for (u32 other = lane + blocks * threadIdx.x; other < lanes; other += blocks * blockDim.x) *(volatile u64 *)(self.epochs + 8 * other) = self.launches;
    }
};

}  // namespace warplink

#endif
