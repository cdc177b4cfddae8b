// The steps `announce` and `agree`: ranks exchange the arguments of a launch, and the locations of their tensors. As
// with the steps in steps.cuh, all threads of a lane make every call. An announcement proves that the other rank is
// in this launch; if it locates a tensor, all accesses before it are visible too.

#ifndef WARPLINK_ANNOUNCEMENTS_CUH
#define WARPLINK_ANNOUNCEMENTS_CUH

#include <warplink/steps.cuh>

namespace warplink {

namespace detail {

// Words of 8 bytes that a verdict stores of an announcement, and bytes of a verdict: the other rank's words, a byte for
// each packet, and this rank's words in packets that differ. Must match the host.
constexpr u32 verdict_words = 8;
constexpr u32 verdict_own = 8 * verdict_words + 8;
constexpr u32 verdict_bytes = verdict_own + 8 * verdict_words;

// Marks a packet that differs, and one that locates memory unknown to this rank. Must match the host.
constexpr unsigned char differs = 1;
constexpr unsigned char unknown_memory = 2;

// One of several packets for, or from, several places: each is handled by one thread, so that their latencies
// overlap.
template <u32 COUNT, u32 PACKETS> struct OnePacket {
    static constexpr u32 count = COUNT * PACKETS;
    u32 place, packet;
    __device__ __forceinline__ explicit OnePacket(u32 number) : place(number / PACKETS), packet(number % PACKETS) {}

    // Its address. The places are in registers, which cannot be indexed.
    __device__ __forceinline__ u64 at(const Places<COUNT> &places) const {
        u64 at = 0;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            if (i == place) at = places.at[i] + 16 * packet;
        }
        return at;
    }

    // Its announced integers.
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

// Integers that ranks announce to one another in a launch.
template <u32 COUNT> struct Announced {
    static constexpr u32 packets = (COUNT + 1) / 2;
    static_assert(packets <= detail::verdict_words, "up to 16 integers");
    u32 word[COUNT];
    __device__ __forceinline__ Unit<8> unit(u32 packet) const { return {{word[2 * packet], 2 * packet + 1 < COUNT ? word[2 * packet + 1] : 0}}; }
};

namespace detail {

// Whether packet `packet` of the announcement at `at` equals this rank's announcement. If not, records all its
// `packets` packets and which of them differ, and aborts the waits of the lane's signals.
__device__ __forceinline__ bool compare(Lane &lane, const Packet<8> &came, const Unit<8> &own, u64 at, u32 packet, u32 packets, u64 note) {
    if (came.unit.word[0] == own.word[0] && came.unit.word[1] == own.word[1]) return true;
    const Flag flag(lane.epoch());
#pragma unroll 1
    for (u32 i = 0; i < packets; i++) {
        Packet<8> one = load_packet<8>(at + 16 * i);
        if (await_packet(lane, at + 16 * i, one, flag)) *(volatile u64 *)(note + 8 * i) = (u64)one.unit.word[1] << 32 | one.unit.word[0];
    }
    *(volatile u64 *)(note + verdict_own + 8 * packet) = (u64)own.word[1] << 32 | own.word[0];
    // The host reads the words only where this byte says that they are there.
    __threadfence_system();
    *(volatile unsigned char *)(note + 8 * verdict_words + packet) = differs;
    *(volatile u64 *)lane.abort = 1;
    return false;
}

}  // namespace detail

// Stores the announcement as 16-byte packets at every place.
template <typename To, u32 INTEGERS> __device__ __forceinline__ void announce(Lane &lane, const To &to, const Announced<INTEGERS> &all) {
    typedef detail::OnePacket<To::count, Announced<INTEGERS>::packets> One;
    if (lane.rank() >= One::count) return;
    const One one(lane.rank());
    detail::store_packet(one.at(to), one.of(all), Flag(lane.epoch()));
}

// Waits for the announcements at all places. If one differs from `all`, it is recorded in `verdict`, `verdict_bytes`
// for each place. The lane's signals are then aborted, since other lanes may wait for data that will never arrive.
template <u32 COUNT, u32 INTEGERS>
__device__ __forceinline__ void agree(Lane &lane, const Places<COUNT> &from, const Announced<INTEGERS> &all, u64 verdict) {
    typedef detail::OnePacket<COUNT, Announced<INTEGERS>::packets> One;
    if (lane.rank() >= One::count) return;
    const One one(lane.rank());
    const u64 at = one.at(from);
    detail::Packet<8> came = detail::load_packet<8>(at);
    if (!detail::await_packet(lane, at, came, Flag(lane.epoch()))) return;
    detail::compare(lane, came, one.of(all), at - 16 * one.packet, one.packet, Announced<INTEGERS>::packets, verdict + detail::verdict_bytes * one.place);
}

// ---- tensors

// Location of a tensor on every rank: sent and received announcements of the lane, in shared memory.
//
// Every rank numbers its published allocations, and has tables of all ranks' in its memory: for each rank
// `published_entries` addresses at which these allocations are mapped here, or 0. The address in a rank's table of
// its own allocations is set once all others have mapped them. So an announcement consists of a number and an offset,
// and all ranks know whether all of them can access all tensors.
template <u32 WORLD> struct Located {
    // The number of this rank's allocation, counted from 1, and the offset in it; 0 if others cannot access it.
    u64 own;
    u64 at[WORLD];
    // Whether any rank announced 0.
    u32 missing;
    __device__ __forceinline__ bool reachable() const { return missing == 0; }
};

namespace detail {

// Allocations of a rank in a table. Must match the host.
constexpr u32 published_entries = 1024;

// Bits of the offset in an announcement of a tensor; the number of the allocation has the rest of a word. Must match the
// host.
constexpr u32 offset_bits = 48;

}  // namespace detail

// This rank's announcement of its tensor at `address`, which starts at byte `start` of allocation `entry`. Other
// ranks access it in whole units, so its start must be a multiple of their size. The table is read only once, since
// it may change.
__device__ __forceinline__ u64 told(u32 rank, u64 tables, u64 entry, u64 start, u64 address) {
    const bool listed = entry < detail::published_entries;
    const u64 base = detail::load_relaxed(tables + 8 * (detail::published_entries * rank + (listed ? entry : 0)));
    // The entry may have been reused by another allocation, for example when a graph is launched that was captured
    // earlier.
    const bool reached = listed && address % 16 == 0 && base != 0 && base + start == address;
    return reached ? (entry + 1) << detail::offset_bits | start : 0;
}

// Records the location of this rank's own tensor, and its announcement. The lane's threads see it after the
// announcement.
template <u32 WORLD> __device__ __forceinline__ void locate(Lane &lane, Located<WORLD> &tensor, u32 rank, u64 own, u64 address) {
    // Records of the launch's previous tensor may still be read.
    lane.sync();
    if (threadIdx.x == 0) {
        tensor.own = own;
        tensor.missing = own == 0;
        tensor.at[rank] = address;
    }
}

// The same for a tensor whose location on each rank the launch already knows.
template <u32 WORLD> __device__ __forceinline__ void locate(Lane &lane, Located<WORLD> &tensor, const u64 (&bases)[WORLD]) {
    lane.sync();
    if (threadIdx.x == 0) {
#pragma unroll
        for (u32 rank = 0; rank < WORLD; rank++) tensor.at[rank] = bases[rank];
        tensor.own = 1;
        tensor.missing = 0;
    }
}

// Prepares for the location of a tensor that other ranks announce, and this one does not. All threads see it.
template <u32 WORLD> __device__ __forceinline__ void locate_of_others(Lane &lane, Located<WORLD> &tensor, u32 rank, u64 address) {
    locate(lane, tensor, rank, 1, address);
    lane.sync();
}
template <u32 WORLD> __device__ __forceinline__ void locate_of_others(Lane &lane, Located<WORLD> &tensor, const u64 (&bases)[WORLD]) {
    locate(lane, tensor, bases);
    lane.sync();
}

// Integers and tensors that ranks announce in a launch: a packet for two integers or for a tensor.
template <u32 INTEGERS, u32 TENSORS, u32 WORLD> struct AnnouncedTensors {
    static constexpr u32 first = (INTEGERS + 1) / 2;
    static constexpr u32 packets = first + TENSORS;
    static_assert(packets <= detail::verdict_words, "up to 8 packets");
    u32 word[2 * first + 1];
    Located<WORLD> *tensor[TENSORS];
    __device__ __forceinline__ Unit<8> unit(u32 packet) const {
        if (packet < first) return {{word[2 * packet], word[2 * packet + 1]}};
        const u64 own = tensor[packet - first]->own;
        return {{(u32)own, (u32)(own >> 32)}};
    }

    // Compares the integers received from a place, or records the location of the announced tensor.
    __device__ __forceinline__ void take(Lane &lane, const detail::Packet<8> &came, const Unit<8> &own, u64 at, u32 place, u32 packet, u32 rank, u64 tables,
                                         u64 verdict) const {
        if (packet < first) {
            if (!detail::compare(lane, came, own, at, packet, first, verdict + detail::verdict_bytes * place)) lane.ended = true;
            return;
        }
        if (tables == 0) return;
        Located<WORLD> *located = tensor[0];
        // The pointers are in registers, which cannot be indexed.
#pragma unroll
        for (u32 i = 1; i < TENSORS; i++) {
            if (i == packet - first) located = tensor[i];
        }
        Located<WORLD> &it = *located;
        const u32 peer = (rank + 1 + place) % WORLD;
        const u64 told = (u64)came.unit.word[1] << 32 | came.unit.word[0];
        const u64 entry = (told >> detail::offset_bits) - 1, start = told & ((1ull << detail::offset_bits) - 1);
        u64 base = 0;
        if (told != 0 && entry < detail::published_entries) base = detail::load_relaxed(tables + 8 * (detail::published_entries * peer + entry));
        // A rank announces only allocations that all others have in their tables.
        if (told != 0 && base == 0) {
            *(volatile unsigned char *)(verdict + detail::verdict_bytes * place + 8 * detail::verdict_words + packet) = detail::unknown_memory;
            // A host that sees the abort finds the verdict.
            __threadfence_system();
            *(volatile u64 *)lane.abort = 1;
            lane.ended = true;
        }
        it.at[peer] = base + start;
        if (told == 0) *(volatile u32 *)&it.missing = 1;
    }
};

// Stores the announcement as 16-byte packets at every place, after all earlier accesses. `FIRST`: the lane has made none
// in this launch but reads of integers, whose values it has. Those of earlier work of the stream are complete, on which the
// first barriers of kernels of NCCL and PyTorch rely as well, so there is no fence, which takes 2 us.
template <bool FIRST, u32 COUNT, u32 INTEGERS, u32 TENSORS, u32 WORLD>
__device__ __forceinline__ void announce(Lane &lane, const Places<COUNT> &to, const AnnouncedTensors<INTEGERS, TENSORS, WORLD> &all) {
    typedef detail::OnePacket<COUNT, AnnouncedTensors<INTEGERS, TENSORS, WORLD>::packets> One;
    // The lane's stores precede the fences of the threads that announce.
    if (lane.agree()) return;
    if (threadIdx.x >= One::count) return;
    const One one(threadIdx.x);
    if constexpr (!FIRST) detail::fence();
    detail::store_packet(one.at(to), one.of(all), Flag(lane.epoch()));
}

// Like the other `agree`, for announcements that also locate tensors, through `tables`, or, if `tables` is 0, at
// known addresses. Places are in rank order, starting with the next rank. `direct` counts the lanes that found every
// tensor accessible. If an announcement differs, or does not arrive, the lane has ended and accesses nothing.
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
        // By all threads at the same time. A fence would also wait until this rank's stores at peers have arrived.
        detail::load_acquire(at);
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
