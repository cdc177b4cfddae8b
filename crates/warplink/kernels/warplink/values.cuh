// Integers that the lanes of kernel sections read from memory and store there; a part of sections.cuh. As with the steps in
// steps.cuh, all threads of a lane make every call.

#ifndef WARPLINK_VALUES_CUH
#define WARPLINK_VALUES_CUH

#include <warplink/announcements.cuh>
#include <warplink/views.cuh>

namespace warplink {

namespace detail {

// Offset of the record of an out-of-range value, from the end of a rank's verdicts, and its words of 8 bytes: the
// position in the program's text, the value, the maximum, the lane, whether a lane has claimed the record, and the address
// that the value was read from, or 0 if it is no word. Must match the host.
constexpr u32 value_note_offset = 8;

// Loads a word; a CONSTANT one is stored by no rank during the launch, so that the multiprocessor may cache it.
template <typename T, bool CONSTANT = false> __device__ __forceinline__ i64 load_word(u64 at) {
    if constexpr (sizeof(T) == 8) {
        u64 word;
        if constexpr (CONSTANT) asm volatile("ld.global.u64 %0, [%1];" : "=l"(word) : "l"(at));
        else asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
        return (i64)word;
    } else {
        u32 word;
        if constexpr (CONSTANT) asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(at));
        else asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
        return (T)word;
    }
}

// Four words, of which the first is at a multiple of 16 bytes.
template <typename T> struct FourWords {
    T word[4];
};
template <typename T, bool CONSTANT> __device__ __forceinline__ FourWords<T> load_four_words(u64 at) {
    u32 a, b, c, d;
    if constexpr (CONSTANT) asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(at));
    else asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(at) : "memory");
    return {{(T)a, (T)b, (T)c, (T)d}};
}

// The value, if it is from 0 to `most`. If not, records it with `at`, ends the lane, which stores nothing from here on, and
// aborts the waits of this rank's other lanes.
__device__ __forceinline__ Index checked(Lane &lane, u64 at, i64 value, i64 most, u64 place, u64 note) {
    if (value >= 0 && value <= most) return (Index)value;
    // What an aborted lane reads may not be what it waited for.
    if (lane.ended) return 0;
    lane.ended = true;
    // Any thread, since some steps are one warp's.
    volatile u64 *words = (volatile u64 *)note;
    if (atomicCAS((u64 *)(note + 32), 0ull, 1ull) == 0) {
        words[1] = (u64)value;
        words[2] = (u64)most;
        words[3] = blockIdx.x;
        words[5] = at;
        // The host takes the record as complete once it has a place.
        __threadfence_system();
        words[0] = place;
        // A host that sees the abort finds the record.
        __threadfence_system();
        *(volatile u64 *)lane.abort = 1;
    }
    return 0;
}

}  // namespace detail

// The integer at `at`, from 0 to `most`; `place` is the position of the step that reads it.
template <typename T, bool CONSTANT = false>
__device__ __forceinline__ Index value(Lane &lane, u64 at, i64 most, u64 place, u64 note) {
    return detail::checked(lane, at, detail::load_word<T, CONSTANT>(at), most, place, note);
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
    return detail::checked(lane, at, word, most, place, note);
}

// Rows of `row` words among which a lane looks for those with a word from `from` to `to`, exclusive, or for all others.
template <typename T, bool CONSTANT = false> struct Words {
    u64 at, count, row;
    i64 from, to;
    bool inside;

    __device__ __forceinline__ bool in_range(i64 word) const { return from <= word && word < to; }

    __device__ __forceinline__ bool any_in_range(const detail::FourWords<T> &four) const {
        return in_range(four.word[0]) | in_range(four.word[1]) | in_range(four.word[2]) | in_range(four.word[3]);
    }

    // Whether groups of four words from `at` on can be loaded at once.
    __device__ __forceinline__ bool by_four() const { return sizeof(T) == 4 && at % 16 == 0; }

    // Whether row `number` has a word in the range. Loads do not depend on one another, so that they are in flight together; the
    // address is always within the words, so that no branch is needed either.
    __device__ __forceinline__ bool found(u64 number) const {
        const u64 first = at + sizeof(T) * row * (number < count ? number : count - 1);
        if (row == 1) return in_range(detail::load_word<T, CONSTANT>(first));
        bool any = false;
        if (by_four() && row % 4 == 0) {
#pragma unroll 2
            for (u64 i = 0; i < row; i += 4) {
                const detail::FourWords<T> four = detail::load_four_words<T, CONSTANT>(first + sizeof(T) * i);
                any |= any_in_range(four);
            }
        } else {
#pragma unroll 4
            for (u64 i = 0; i < row; i++) any |= in_range(detail::load_word<T, CONSTANT>(first + sizeof(T) * i));
        }
        return any;
    }

    __device__ __forceinline__ bool holds(u64 number) const {
        const bool any = found(number);
        return number < count && any == inside;
    }
};

// How many such rows there are. Every warp counts few CONSTANT ones for itself, which takes less time than a barrier.
template <typename T, bool CONSTANT> __device__ __forceinline__ Index count(Lane &lane, const Words<T, CONSTANT> &words) {
    if (words.count == 0) return 0;
    u32 own = 0;
    if (CONSTANT && words.count <= 128) {
#pragma unroll 1
        for (u64 first = 0; first < words.count; first += 32) own += words.holds(first + threadIdx.x % 32);
        return (Index)__reduce_add_sync(~0u, own);
    }
    if (words.count <= blockDim.x) return __syncthreads_count(words.holds(threadIdx.x));
    // Loads of so many steps are in flight together.
    constexpr u32 together = 4;
    u64 counted = 0;
    if (words.row == 1 && words.by_four()) {
        const u64 fours = words.count / 4;
#pragma unroll 1
        for (u64 first = threadIdx.x; first < fours; first += together * blockDim.x) {
            detail::FourWords<T> loaded[together];
#pragma unroll
            for (u32 i = 0; i < together; i++) {
                const u64 number = first + i * blockDim.x;
                loaded[i] = detail::load_four_words<T, CONSTANT>(words.at + 4 * sizeof(T) * (number < fours ? number : fours - 1));
            }
#pragma unroll
            for (u32 i = 0; i < together; i++) {
                u32 here = 0;
                for (u32 j = 0; j < 4; j++) here += words.in_range(loaded[i].word[j]) == words.inside;
                if (first + i * blockDim.x < fours) own += here;
            }
        }
        counted = 4 * fours;
    }
    if (words.row % 4 == 0 && words.by_four()) {
        // A row has few words, so the loads of several rows are in flight together.
        const u64 last = words.count - 1;
#pragma unroll 1
        for (u64 first = threadIdx.x; first < words.count; first += together * blockDim.x) {
            bool any[together] = {};
#pragma unroll 1
            for (u64 word = 0; word < words.row; word += 4) {
                detail::FourWords<T> loaded[together];
#pragma unroll
                for (u32 i = 0; i < together; i++) {
                    const u64 number = first + i * blockDim.x;
                    loaded[i] = detail::load_four_words<T, CONSTANT>(words.at + sizeof(T) * (words.row * (number < last ? number : last) + word));
                }
#pragma unroll
                for (u32 i = 0; i < together; i++) any[i] |= words.any_in_range(loaded[i]);
            }
#pragma unroll
            for (u32 i = 0; i < together; i++) own += first + i * blockDim.x < words.count && any[i] == words.inside;
        }
        counted = words.count;
    }
#pragma unroll together
    for (u64 number = counted + threadIdx.x; number < words.count; number += blockDim.x) own += words.holds(number);
    own = __reduce_add_sync(~0u, own);
    __shared__ u32 of_warps[32];
    // The sums of an earlier call may still be read.
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    own = threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : 0;
    return (Index)__reduce_add_sync(~0u, own);
}

// The same of at most one, for the thread that asks.
template <typename T, bool CONSTANT> __device__ __forceinline__ Index held(const Words<T, CONSTANT> &words) {
    return words.count != 0 && words.holds(0);
}

// A search among such rows: of those before `next`, the last 32 are passed but for the bits of `left`, and `before` that match
// are passed.
struct Search {
    u64 at = 0, count = 0, next = 0;
    i64 from = 0, to = 0, before = 0;
    u32 left = 0;
};

// The position of such row number `number`. There must be that many: otherwise the lane ends as with a value that is out
// of range. Calls for rising numbers of the same CONSTANT words go on where the last one stopped. Each warp looks for itself,
// since that takes less time than a barrier.
template <typename T, bool CONSTANT>
__device__ __forceinline__ Index position(Lane &lane, Search &search, const Words<T, CONSTANT> &words, i64 number, i64 most, u64 place, u64 note) {
    const bool same = words.at == search.at && words.count == search.count && words.from == search.from && words.to == search.to;
    if (!CONSTANT || !same || number < search.before) {
        search = Search{};
        search.at = words.at, search.count = words.count, search.from = words.from, search.to = words.to;
    }
    i64 position = -1;
    while (true) {
        const i64 here = __popc(search.left);
        if (search.before + here > number) {
            for (; search.before < number; search.before++) search.left &= search.left - 1;
            position = (i64)search.next - 32 + __ffs(search.left) - 1;
            search.left &= search.left - 1;
            search.before++;
            break;
        }
        search.before += here;
        search.left = 0;
        if (search.next >= words.count) break;
        const u64 own = search.next + threadIdx.x % 32;
        search.left = __ballot_sync(~0u, words.holds(own));
        search.next += 32;
    }
    return detail::checked(lane, 0, position, most, place, note);
}

// Stores an integer in one element. The lane's last thread stores all of them, so that they need no barrier among themselves; the
// first ones copy what is short. With `every`, each thread that calls stores its own.
template <typename T> __device__ __forceinline__ void store_integer(Lane &lane, u64 at, i64 value, bool every = false) {
    if (!lane.ended && (every || lane.rank() == lane.size() - 1)) *(volatile T *)at = (T)value;
}

// The same in a packet with `DATA` bytes of data.
template <typename T, u32 DATA> __device__ __forceinline__ void store_packet_integer(Lane &lane, u64 at, i64 value, bool every = false) {
    static_assert(sizeof(T) <= DATA, "an integer in one packet");
    Unit<DATA> unit{};
    unit.word[0] = (u32)value;
    if constexpr (sizeof(T) == 8) unit.word[1] = (u32)((u64)value >> 32);
    if (!lane.ended && (every || lane.rank() == lane.size() - 1)) detail::store_packet(at, unit, Flag(lane.epoch()));
}

}  // namespace warplink

#endif
