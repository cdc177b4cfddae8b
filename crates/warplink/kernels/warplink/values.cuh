// Integers that the lanes of kernel sections read from memory and store there; a part of sections.cuh. As with the steps in
// steps.cuh, all threads of a lane make every call.

#ifndef WARPLINK_VALUES_CUH
#define WARPLINK_VALUES_CUH

#include <warplink/announcements.cuh>
#include <warplink/views.cuh>

namespace warplink {

namespace detail {

// Offset of the record of an out-of-range value, from the end of a rank's verdicts, and its words of 8 bytes: the
// position in the program's text, the value, the maximum, the lane, and whether a lane has claimed the record. Must
// match the host.
constexpr u32 value_note_offset = 8;

template <typename T> __device__ __forceinline__ i64 load_word(u64 at) {
    if constexpr (sizeof(T) == 8) {
        u64 word;
        asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
        return (i64)word;
    } else {
        u32 word;
        asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
        return (T)word;
    }
}

// The value, if it is from 0 to `most`. If not, records it, ends the lane, which stores nothing from here on, and
// aborts the waits of this rank's other lanes.
__device__ __forceinline__ Index checked(Lane &lane, i64 value, i64 most, u64 place, u64 note) {
    if (value >= 0 && value <= most) return (Index)value;
    lane.ended = true;
    if (threadIdx.x == 0) {
        volatile u64 *words = (volatile u64 *)note;
        if (atomicCAS((u64 *)(note + 32), 0ull, 1ull) == 0) {
            words[1] = (u64)value;
            words[2] = (u64)most;
            words[3] = blockIdx.x;
            // The host takes the record as complete once it has a place.
            __threadfence_system();
            words[0] = place;
        }
        // A host that sees the abort finds the record.
        __threadfence_system();
        *(volatile u64 *)lane.abort = 1;
    }
    return 0;
}

}  // namespace detail

// The integer at `at`, from 0 to `most`; `place` is the position of the step that reads it.
template <typename T> __device__ __forceinline__ Index value(Lane &lane, u64 at, i64 most, u64 place, u64 note) {
    return detail::checked(lane, detail::load_word<T>(at), most, place, note);
}

// The same for an integer at the start of a packet with `DATA` bytes of data, which is waited for; 0 if the lane has
// ended. The threads agree on that, since steps depend on the value.
template <typename T, u32 DATA> __device__ __forceinline__ Index packet_value(Lane &lane, u64 at, i64 most, u64 place, u64 note) {
    static_assert(sizeof(T) <= DATA, "an integer in one packet");
    detail::Packet<DATA> packet = detail::load_packet<DATA>(at);
    if (!detail::await_packet(lane, at, packet, Flag(lane.epoch()))) lane.ended = true;
    if (lane.agree()) return 0;
    i64 word = (T)packet.unit.word[0];
    if constexpr (sizeof(T) == 8) word = (i64)((u64)packet.unit.word[1] << 32 | packet.unit.word[0]);
    return detail::checked(lane, word, most, place, note);
}

// Words among which a lane looks for those from `from` to `to`, exclusive, or for all others.
template <typename T> struct Words {
    u64 at, count;
    i64 from, to;
    bool inside;

    __device__ __forceinline__ bool holds(u64 number) const {
        if (number >= count) return false;
        const i64 word = detail::load_word<T>(at + sizeof(T) * number);
        return (from <= word && word < to) == inside;
    }
};

// How many such words there are.
template <typename T> __device__ __forceinline__ Index count(Lane &lane, const Words<T> &words) {
    u64 all = 0;
#pragma unroll 1
    for (u64 first = 0; first < words.count; first += blockDim.x) all += __syncthreads_count(words.holds(first + threadIdx.x));
    return (Index)all;
}

// The position of such word number `number`. There must be that many: otherwise the lane ends as with a value that is out
// of range.
template <typename T> __device__ __forceinline__ Index position(Lane &lane, const Words<T> &words, i64 number, i64 most, u64 place, u64 note) {
    __shared__ u32 of_warps[32];
    __shared__ i64 found;
    const u32 warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    i64 before = 0;
    // Earlier calls have read it.
    __syncthreads();
    if (threadIdx.x == 0) found = -1;
#pragma unroll 1
    for (u64 first = 0; first < words.count && before <= number; first += blockDim.x) {
        const bool holds = words.holds(first + threadIdx.x);
        const u32 of_warp = __ballot_sync(__activemask(), holds);
        if (threadIdx.x % 32 == 0) of_warps[warp] = __popc(of_warp);
        __syncthreads();
        i64 own = before + __popc(of_warp & ((1u << threadIdx.x % 32) - 1));
        for (u32 i = 0; i < warps; i++) {
            if (i < warp) own += of_warps[i];
            before += of_warps[i];
        }
        if (holds && own == number) found = (i64)(first + threadIdx.x);
        __syncthreads();
    }
    __syncthreads();
    return detail::checked(lane, found, most, place, note);
}

// Stores an integer in one element.
template <typename T> __device__ __forceinline__ void store_integer(Lane &lane, u64 at, i64 value) {
    if (!lane.ended && threadIdx.x == 0) *(volatile T *)at = (T)value;
}

// The same in a packet with `DATA` bytes of data.
template <typename T, u32 DATA> __device__ __forceinline__ void store_packet_integer(Lane &lane, u64 at, i64 value) {
    static_assert(sizeof(T) <= DATA, "an integer in one packet");
    Unit<DATA> unit{};
    unit.word[0] = (u32)value;
    if constexpr (sizeof(T) == 8) unit.word[1] = (u32)((u64)value >> 32);
    if (!lane.ended && threadIdx.x == 0) detail::store_packet(at, unit, Flag(lane.epoch()));
}

}  // namespace warplink

#endif
