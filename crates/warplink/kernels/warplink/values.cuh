// Integers that the lanes of kernel sections read from memory; a part of sections.cuh. As with the steps in
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
            __threadfence_system();
            words[0] = place;
        }
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

}  // namespace warplink

#endif
