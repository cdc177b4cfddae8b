// Words that kernels of this rank wait for and peers count up, without a connection; a part of
// device.cuh.

#ifndef WARPLINK_SIGNALS_CUH
#define WARPLINK_SIGNALS_CUH

#include <warplink/groups.cuh>
#include <warplink/memory.cuh>

namespace warplink {
namespace detail {

// Blocks until the word, a count, is at least `value`.
__device__ __forceinline__ Status reach(u64 word, u64 value, u64 abort) {
    for (u32 polls = 1;; polls++) {
        const u64 seen = load_acquire(word);
        if (seen >= ended_epoch) return Status::aborted;
        if ((long long)(seen - value) >= 0) return Status::ok;
        if (polls % polls_per_look == 0 && load_relaxed(abort) != 0) return Status::aborted;
    }
}

// Takes one count of `awaited` where `word` is further: `found` says whether. False where the waits were
// ended.
__device__ __forceinline__ bool take(u64 word, u64 awaited, bool &found) {
    u64 taken = load_relaxed(awaited);
    found = false;
    while (true) {
        const u64 seen = load_acquire(word);
        if (seen >= ended_epoch || taken >= ended_epoch) return false;
        if ((long long)(seen - taken) <= 0) return true;
        const u64 before = atomicCAS((u64 *)awaited, taken, taken + 1);
        if ((found = before == taken)) return true;
        taken = before;
    }
}

// Bytes of a signal; what all of them share comes first. Must match the host.
constexpr u64 signal_bytes = 64;
constexpr u64 awaited_offset = 8;
// What a rank that is the only one to count up its peers' words has in its own signals of the same numbers: how often it
// has, and what lanes hold that share such a word.
constexpr u64 sent_offset = 16;
constexpr u64 claim_offset = 24;

}  // namespace detail

// Signals of this rank (`Communicator::signals` on the host), by number from 0: as a kernel's argument,
// by value. The calls mean what those of a channel mean.
struct Signals {
    u64 base;

    // Blocks until signal `number` was counted up once more than was waited for.
    template <typename Group>
    __device__ __forceinline__ Status wait(Group group, u32 number) const {
        bool failed = false;
        if (group.rank() == 0) {
            const u64 ticket = detail::increment(word(number) + detail::awaited_offset) + 1;
            failed = detail::reach(word(number), ticket, base) != Status::ok;
        }
        return group.any(failed) ? Status::aborted : Status::ok;
    }

    // Blocks until signal `number` was counted up `epoch` times in all. Uses up no count.
    template <typename Group>
    __device__ __forceinline__ Status wait_until(Group group, u32 number, u64 epoch) const {
        bool failed = false;
        if (group.rank() == 0) failed = detail::reach(word(number), epoch, base) != Status::ok;
        return group.any(failed) ? Status::aborted : Status::ok;
    }

    // As `wait`, where that would not block: `arrived` says whether there was a count to use up.
    template <typename Group>
    __device__ __forceinline__ Status poll(Group group, u32 number, bool &arrived) const {
        bool failed = false, found = false;
        if (group.rank() == 0) failed = !detail::take(word(number), word(number) + detail::awaited_offset, found);
        arrived = group.any(found);
        return group.any(failed) ? Status::aborted : Status::ok;
    }

    // How often signal `number` was counted up so far. From 2^61 on it is no count: the waits were ended.
    __device__ __forceinline__ u64 epoch(u32 number) const { return detail::load_acquire(word(number)); }

    __device__ __forceinline__ u64 word(u32 number) const { return base + detail::signal_bytes * (1 + number); }
};

// A peer's signals, mapped here (`RemoteSignals` on the host).
struct RemoteSignals {
    u64 base;

    // Counts signal `number` up by one, after everything that the group did before. Several ranks may, so that it takes an
    // atomic operation on the peer's memory.
    template <typename Group>
    __device__ __forceinline__ void add(Group group, u32 number) const {
        group.sync();
        if (group.rank() == 0) detail::add_release(base + detail::signal_bytes * (1 + number));
    }
};

static_assert(sizeof(Signals) == 8 && sizeof(RemoteSignals) == 8, "the host passes an address");

}  // namespace warplink

#endif
