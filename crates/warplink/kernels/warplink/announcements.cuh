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

// The byte of a packet that differs, and of one that tells of memory which this rank does not know. Must match the host.
constexpr unsigned char differs = 1;
constexpr unsigned char unknown_memory = 2;

// One of several packets that go to, or come from, several places: each has a thread of its own, so that their latencies
// pass at the same time.
template <u32 COUNT, u32 PACKETS> struct OnePacket {
    static constexpr u32 count = COUNT * PACKETS;
    u32 place, packet;
    __device__ __forceinline__ explicit OnePacket(u32 number) : place(number / PACKETS), packet(number % PACKETS) {}

    // Its address. The places are in registers, which have no index.
    __device__ __forceinline__ u64 at(const Places<COUNT> &places) const {
        u64 at = 0;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            if (i == place) at = places.at[i] + 16 * packet;
        }
        return at;
    }

    // What is announced in it.
    template <typename All> __device__ __forceinline__ Unit<8> of(const All &all) const {
        Unit<8> unit = all.unit(0);
#pragma unroll
        for (u32 i = 1; i < PACKETS; i++) {
            if (i == packet) unit = all.unit(i);
        }
        return unit;
    }
};

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

// Whether packet `packet` of the announcement at `at` is what this rank announces. Where not, notes all its `packets`
// packets and which differ, and ends the waits of the lane's signals.
__device__ __forceinline__ bool compare(Lane &lane, const Packet<8> &came, const Unit<8> &own, u64 at, u32 packet, u32 packets, u64 note) {
    if (came.unit.word[0] == own.word[0] && came.unit.word[1] == own.word[1]) return true;
    const Flag flag(lane.epoch());
#pragma unroll 1
    for (u32 i = 0; i < packets; i++) {
        Packet<8> one = load_packet<8>(at + 16 * i);
        if (await_packet(lane, at + 16 * i, one, flag)) *(volatile u64 *)(note + 8 * i) = (u64)one.unit.word[1] << 32 | one.unit.word[0];
    }
    __threadfence_system();
    *(volatile unsigned char *)(note + 8 * verdict_words + packet) = differs;
    *(volatile u64 *)lane.abort = 1;
    return false;
}

}  // namespace detail

// Stores what is announced as packets of 16 bytes at every place.
template <u32 COUNT, u32 INTEGERS> __device__ __forceinline__ void announce(Lane &lane, const Places<COUNT> &to, const Announced<INTEGERS> &all) {
    typedef detail::OnePacket<COUNT, Announced<INTEGERS>::packets> One;
    if (threadIdx.x >= One::count) return;
    const One one(threadIdx.x);
    detail::store_packet(one.at(to), one.of(all), Flag(lane.epoch()));
}

// Waits for the announcements at all places. Where one differs from `all`, what it is goes to `verdict`, `verdict_bytes`
// for each place: 8 for each packet, and behind them a byte for each that is 1 where the packet differs. The
// lane's signals are then aborted, since other lanes may wait for what does not come.
template <u32 COUNT, u32 INTEGERS>
__device__ __forceinline__ void agree(Lane &lane, const Places<COUNT> &from, const Announced<INTEGERS> &all, u64 verdict) {
    typedef detail::OnePacket<COUNT, Announced<INTEGERS>::packets> One;
    if (threadIdx.x >= One::count) return;
    const One one(threadIdx.x);
    const u64 at = one.at(from);
    detail::Packet<8> came = detail::load_packet<8>(at);
    if (!detail::await_packet(lane, at, came, Flag(lane.epoch()))) return;
    detail::compare(lane, came, one.of(all), at - 16 * one.packet, one.packet, Announced<INTEGERS>::packets, verdict + detail::verdict_bytes * one.place);
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

// What this rank has to tell of its tensor at `address`, which starts at byte `start` of allocation `entry`.
// Who accesses it at other ranks does so in whole units, so that its start must be a multiple of their size. The
// table is looked at once, since it may change.
__device__ __forceinline__ u64 told(u32 rank, u64 tables, u64 entry, u64 start, u64 address) {
    const bool listed = entry < detail::published_entries;
    const u64 base = detail::load_relaxed(tables + 8 * (detail::published_entries * rank + (listed ? entry : 0)));
    // An entry may be another allocation's by now, as where a graph is launched that was recorded before.
    const bool reached = listed && address % 16 == 0 && base != 0 && base + start == address;
    return reached ? (entry + 1) << detail::offset_bits | start : 0;
}

// Notes where this rank's own tensor is, and what it tells of it. The lane's threads see it after the announcement.
template <u32 WORLD> __device__ __forceinline__ void locate(Lane &lane, Located<WORLD> &tensor, u32 rank, u64 own, u64 address) {
    // What the launch noted of a tensor before may still be read.
    lane.sync();
    if (threadIdx.x == 0) {
        tensor.own = own;
        tensor.missing = own == 0;
        tensor.at[rank] = address;
    }
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

    // Compares the integers in what came from a place, or notes where the tensor lies that it tells of.
    __device__ __forceinline__ void take(Lane &lane, const detail::Packet<8> &came, const Unit<8> &own, u64 at, u32 place, u32 packet, u32 rank, u64 tables,
                                         u64 verdict) const {
        if (packet < first) {
            if (!detail::compare(lane, came, own, at, packet, first, verdict + detail::verdict_bytes * place)) lane.ended = true;
            return;
        }
        if (tables == 0) return;
        Located<WORLD> &it = *tensor[packet - first];
        const u32 peer = (rank + 1 + place) % WORLD;
        const u64 told = (u64)came.unit.word[1] << 32 | came.unit.word[0];
        const u64 entry = (told >> detail::offset_bits) - 1, start = told & ((1ull << detail::offset_bits) - 1);
        u64 base = 0;
        if (told != 0 && entry < detail::published_entries) base = detail::load_relaxed(tables + 8 * (detail::published_entries * peer + entry));
        // A rank tells of what all others have in their tables.
        if (told != 0 && base == 0) {
            *(volatile unsigned char *)(verdict + detail::verdict_bytes * place + 8 * detail::verdict_words + packet) = detail::unknown_memory;
            __threadfence_system();
            *(volatile u64 *)lane.abort = 1;
            lane.ended = true;
        }
        it.at[peer] = base + start;
        if (told == 0) *(volatile u32 *)&it.missing = 1;
    }
};

// Stores what is announced as packets of 16 bytes at every place, after everything that preceded.
template <u32 COUNT, u32 INTEGERS, u32 TENSORS, u32 WORLD>
__device__ __forceinline__ void announce(Lane &lane, const Places<COUNT> &to, const AnnouncedTensors<INTEGERS, TENSORS, WORLD> &all) {
    typedef detail::OnePacket<COUNT, AnnouncedTensors<INTEGERS, TENSORS, WORLD>::packets> One;
    // What the lane stored precedes the fences of the threads that announce.
    if (lane.agree()) return;
    if (threadIdx.x >= One::count) return;
    const One one(threadIdx.x);
    detail::fence();
    detail::store_packet(one.at(to), one.of(all), Flag(lane.epoch()));
}

// As the other `agree`, for announcements that also say where tensors lie, as `tables` have it, or, where `tables` is
// 0, as is known. Places are in the order of ranks, from the next one on. `direct` counts the lanes that found
// everything reachable. Where one differs, or does not come, the lane has ended and accesses nothing.
template <u32 COUNT, u32 INTEGERS, u32 TENSORS, u32 WORLD>
__device__ __forceinline__ void agree(Lane &lane, const Places<COUNT> &from, const AnnouncedTensors<INTEGERS, TENSORS, WORLD> &all, u32 rank, u64 tables, u64 verdict,
                                      u64 direct) {
    typedef AnnouncedTensors<INTEGERS, TENSORS, WORLD> All;
    typedef detail::OnePacket<COUNT, All::packets> One;
    if (threadIdx.x < One::count) {
        const One one(threadIdx.x);
        const u64 at = one.at(from);
        detail::Packet<8> came = detail::load_packet<8>(at);
        const bool there = detail::await_packet(lane, at, came, Flag(lane.epoch()));
        // Of all threads at the same time.
        detail::fence();
        if (there) all.take(lane, came, one.of(all), at - 16 * one.packet, one.place, one.packet, rank, tables, verdict);
    }
    if (lane.agree() || threadIdx.x != 0 || tables == 0) return;
    bool reachable = true;
#pragma unroll
    for (u32 i = 0; i < TENSORS; i++) reachable = reachable && all.tensor[i]->reachable();
    if (reachable) atomicAdd((u64 *)direct, 1ull);
}

}  // namespace warplink

#endif
