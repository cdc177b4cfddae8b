// The steps `announce` and `agree`: what ranks tell one another of a launch, and where their tensors lie. As the steps in
// steps.cuh, all threads of a lane make every call. Who has seen an announcement knows that the other rank is in this
// launch; where it tells of a tensor, all that preceded it is seen.

#ifndef WARPLINK_ANNOUNCEMENTS_CUH
#define WARPLINK_ANNOUNCEMENTS_CUH

#include <warplink/steps.cuh>

namespace warplink {

namespace detail {

// Words of 8 bytes that a verdict has of an announcement, and bytes of a verdict. Must match the host.
constexpr u32 verdict_words = 4;
constexpr u32 verdict_bytes = 8 * verdict_words + 8;

}  // namespace detail

// ---- integers

// Integers that ranks tell one another of a launch.
template <u32 COUNT> struct Announced {
    static constexpr u32 packets = (COUNT + 1) / 2;
    static_assert(packets <= detail::verdict_words, "up to 8 integers");
    u32 word[COUNT];
    __device__ __forceinline__ Unit<8> unit(u32 packet) const { return {{word[2 * packet], 2 * packet + 1 < COUNT ? word[2 * packet + 1] : 0}}; }
};

namespace detail {

// Whether what was announced is what this rank announces; notes it and ends the waits of the lane's signals where not.
__device__ __forceinline__ bool compare(Lane &lane, const Packet<8> &came, const Unit<8> &own, u32 packet, u64 note) {
    if (came.unit.word[0] == own.word[0] && came.unit.word[1] == own.word[1]) return true;
    *(volatile u64 *)(note + 8 * packet) = (u64)came.unit.word[1] << 32 | came.unit.word[0];
    *(volatile unsigned char *)(note + 8 * verdict_words + packet) = 1;
    *(volatile u64 *)lane.abort = 1;
    return false;
}

}  // namespace detail

// Stores what is announced as packets of 16 bytes at every place.
template <u32 COUNT, u32 INTEGERS> __device__ __forceinline__ void announce(Lane &lane, const Places<COUNT> &to, const Announced<INTEGERS> &all) {
    constexpr u32 packets = Announced<INTEGERS>::packets;
#pragma unroll
    for (u32 place = 0; place < COUNT; place++) {
#pragma unroll
        for (u32 packet = 0; packet < packets; packet++) {
            if (threadIdx.x == place * packets + packet) detail::store_packet(to.at[place] + 16 * packet, all.unit(packet), Flag(lane.epoch));
        }
    }
}

// Waits for the announcements at all places. Where one differs from `all`, what it is goes to `verdict`, 40 bytes
// for each place: 8 for each packet, and from byte 32 on a byte for each that is 1 where the packet differs. The
// lane's signals are then aborted, since other lanes may wait for what does not come.
template <u32 COUNT, u32 INTEGERS>
__device__ __forceinline__ void agree(Lane &lane, const Places<COUNT> &from, const Announced<INTEGERS> &all, u64 verdict) {
    constexpr u32 packets = Announced<INTEGERS>::packets;
    const Flag flag(lane.epoch);
#pragma unroll
    for (u32 place = 0; place < COUNT; place++) {
#pragma unroll
        for (u32 packet = 0; packet < packets; packet++) {
            if (threadIdx.x != place * packets + packet) continue;
            const u64 at = from.at[place] + 16 * packet;
            detail::Packet<8> came = detail::load_packet<8>(at);
            if (!detail::await_packet(lane, at, came, flag)) continue;
            detail::compare(lane, came, all.unit(packet), packet, verdict + detail::verdict_bytes * place);
        }
    }
}

// ---- tensors

// Where a tensor lies on every rank: what the lane has told the others and heard from them, in shared memory.
//
// Every rank numbers the allocations that it has published, and has tables of all ranks' in its memory: for each
// rank `published_entries` addresses, at which this rank reaches these allocations, or 0. The address in a rank's
// table of its own is there when all others have theirs. So what one rank tells another is a number and an offset,
// and all ranks know whether all of them reach all.
template <u32 WORLD> struct Located {
    // The number of this rank's allocation, counted from 1, and the offset in it; 0 where others do not reach it.
    u64 own;
    u64 at[WORLD];
    // Whether any rank told 0.
    u32 missing;
    __device__ __forceinline__ bool reachable() const { return missing == 0; }
};

namespace detail {

// Allocations of a rank in a table. Must match the host.
constexpr u32 published_entries = 1024;

// Bits of the offset in what is told of a tensor. Must match the host.
constexpr u32 offset_bits = 48;

}  // namespace detail

// Looks up what this rank has to tell of its tensor at `address`, which starts at byte `start` of allocation `entry`.
// Who accesses it at other ranks does so in whole units, so that its start must be a multiple of their size. The
// table is looked at once, since it may change.
template <u32 WORLD> __device__ __forceinline__ void locate(Lane &lane, Located<WORLD> &tensor, u32 rank, u64 tables, u64 entry, u64 start, u64 address) {
    lane.sync();
    if (threadIdx.x == 0) {
        u64 own = 0;
        if (entry < detail::published_entries && address % 16 == 0) {
            const u64 base = detail::load_relaxed(tables + 8 * (detail::published_entries * rank + entry));
            // An entry may be another allocation's by now, as where a graph is launched that was recorded before.
            if (base != 0 && base + start == address) own = (entry + 1) << detail::offset_bits | start;
        }
        tensor.own = own;
        tensor.missing = own == 0;
        tensor.at[rank] = address;
    }
    lane.sync();
}

// The same for a tensor of which the launch knows where it is on each rank.
template <u32 WORLD> __device__ __forceinline__ void locate(Lane &lane, Located<WORLD> &tensor, const u64 (&bases)[WORLD]) {
    lane.sync();
    if (threadIdx.x == 0) {
#pragma unroll
        for (u32 rank = 0; rank < WORLD; rank++) tensor.at[rank] = bases[rank];
        tensor.own = 1;
        tensor.missing = 0;
    }
    lane.sync();
}

// Integers and tensors that ranks tell one another of a launch: a packet for two integers or for a tensor.
template <u32 INTEGERS, u32 TENSORS, u32 WORLD> struct AnnouncedTensors {
    static constexpr u32 first = (INTEGERS + 1) / 2;
    static constexpr u32 packets = first + TENSORS;
    static_assert(packets <= detail::verdict_words, "up to 4 packets");
    u32 word[2 * first + 1];
    Located<WORLD> *tensor[TENSORS];
    __device__ __forceinline__ Unit<8> unit(u32 packet) const {
        if (packet < first) return {{word[2 * packet], word[2 * packet + 1]}};
        const u64 own = tensor[packet - first]->own;
        return {{(u32)own, (u32)(own >> 32)}};
    }
};

// Stores what is announced as packets of 16 bytes at every place, after everything that preceded.
template <u32 COUNT, u32 INTEGERS, u32 TENSORS, u32 WORLD>
__device__ __forceinline__ void announce(Lane &lane, const Places<COUNT> &to, const AnnouncedTensors<INTEGERS, TENSORS, WORLD> &all) {
    constexpr u32 packets = AnnouncedTensors<INTEGERS, TENSORS, WORLD>::packets;
    // What the lane stored precedes the fences of the threads that announce.
    if (lane.agree()) return;
#pragma unroll
    for (u32 place = 0; place < COUNT; place++) {
#pragma unroll
        for (u32 packet = 0; packet < packets; packet++) {
            if (threadIdx.x != place * packets + packet) continue;
            detail::fence();
            detail::store_packet(to.at[place] + 16 * packet, all.unit(packet), Flag(lane.epoch));
        }
    }
}

// As the other `agree`, for announcements that also say where tensors lie, as `tables` have it, or, where `tables` is
// 0, as is known. Places are in the order of ranks, from the next one on. `direct` counts the lanes that found
// everything reachable. Where one differs, or does not come, the lane has ended and accesses nothing.
template <u32 COUNT, u32 INTEGERS, u32 TENSORS, u32 WORLD>
__device__ __forceinline__ void agree(Lane &lane, const Places<COUNT> &from, const AnnouncedTensors<INTEGERS, TENSORS, WORLD> &all, u32 rank, u64 tables, u64 verdict,
                                      u64 direct) {
    typedef AnnouncedTensors<INTEGERS, TENSORS, WORLD> All;
    const Flag flag(lane.epoch);
#pragma unroll
    for (u32 place = 0; place < COUNT; place++) {
#pragma unroll
        for (u32 packet = 0; packet < All::packets; packet++) {
            if (threadIdx.x != place * All::packets + packet) continue;
            const u64 at = from.at[place] + 16 * packet;
            detail::Packet<8> came = detail::load_packet<8>(at);
            if (!detail::await_packet(lane, at, came, flag)) continue;
            detail::fence();
            if (packet < All::first) {
                if (!detail::compare(lane, came, all.unit(packet), packet, verdict + detail::verdict_bytes * place)) lane.ended = true;
                continue;
            }
            if (tables == 0) continue;
            Located<WORLD> &tensor = *all.tensor[packet - All::first];
            const u32 peer = (rank + 1 + place) % WORLD;
            const u64 told = (u64)came.unit.word[1] << 32 | came.unit.word[0];
            const u64 entry = (told >> detail::offset_bits) - 1, start = told & ((1ull << detail::offset_bits) - 1);
            u64 base = 0;
            if (told != 0 && entry < detail::published_entries) base = detail::load_relaxed(tables + 8 * (detail::published_entries * peer + entry));
            // A rank tells of what all others have in their tables.
            if (told != 0 && base == 0) {
                *(volatile u64 *)lane.abort = 1;
                lane.ended = true;
            }
            tensor.at[peer] = base + start;
            if (told == 0) *(volatile u32 *)&tensor.missing = 1;
        }
    }
    if (lane.agree() || threadIdx.x != 0 || tables == 0) return;
    bool reachable = true;
#pragma unroll
    for (u32 i = 0; i < TENSORS; i++) reachable = reachable && all.tensor[i]->reachable();
    if (reachable) atomicAdd((u64 *)direct, 1ull);
}

}  // namespace warplink

#endif
