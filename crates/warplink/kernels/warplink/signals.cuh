// Words that kernels of this rank wait for and peers increment, without a connection; a part of device.cuh.

#ifndef WARPLINK_SIGNALS_CUH
#define WARPLINK_SIGNALS_CUH

#include <warplink/groups.cuh>
#include <warplink/memory.cuh>

namespace warplink {
namespace detail {

// Blocks until the word, a count, is at least `value`.
__device__ __forceinline__ Status reach(u64 word, u64 value, u64 abort) {
    for (u32 polls = 1;; polls++) {
        // Acquire: the accesses that the signals cover are visible once they are counted.
        const u64 seen = load_acquire(word);
        if (seen >= ended_epoch) return Status::aborted;
        if ((long long)(seen - value) >= 0) return Status::ok;
        if (polls % polls_per_look == 0 && load_relaxed(abort) != 0) return Status::aborted;
    }
}

// Consumes one count of `awaited` if `word` is ahead of it; `found` is whether it was. False if waits were aborted.
__device__ __forceinline__ bool take(u64 word, u64 awaited, bool &found) {
    // Relaxed: a stale count only makes the exchange below fail.
    u64 taken = load_relaxed(awaited);
    found = false;
    while (true) {
        // Acquire, as in `reach`.
        const u64 seen = load_acquire(word);
        if (seen >= ended_epoch || taken >= ended_epoch) return false;
        if ((long long)(seen - taken) <= 0) return true;
        const u64 before = atomicCAS((u64 *)awaited, taken, taken + 1);
        if ((found = before == taken)) return true;
        taken = before;
    }
}

// Bytes of a signal, a cache line like a slot's; the part shared by all signals comes first. Must match the host.
constexpr u64 signal_bytes = 64;
constexpr u64 awaited_offset = 8;
// Use of a rank's own signals when it is the only one to increment its peers' words of the same numbers: the count of
// its increments, and the lock of lanes that share such a word.
constexpr u64 sent_offset = 16;
constexpr u64 claim_offset = 24;

}  // namespace detail

// Signals of this rank (`Communicator::signals` on the host), by number from 0: as a kernel's argument, by value. The
// calls have the same meaning as those of a channel.
struct Signals {
    u64 base;

    // Blocks until a further count of signal `number` has arrived, and consumes it.
    template <typename Group>
    __device__ __forceinline__ Status wait(Group group, u32 number) const {
        bool failed = false;
        if (group.rank() == 0) {
            // A ticket for each wait, so that of several concurrent ones each consumes another signal.
            const u64 ticket = detail::increment(word(number) + detail::awaited_offset) + 1;
            failed = detail::reach(word(number), ticket, base) != Status::ok;
        }
        return group.any(failed) ? Status::aborted : Status::ok;
    }

    // Blocks until signal `number` was incremented `epoch` times in total. Consumes no count.
    template <typename Group>
    __device__ __forceinline__ Status wait_until(Group group, u32 number, u64 epoch) const {
        bool failed = false;
        if (group.rank() == 0) failed = detail::reach(word(number), epoch, base) != Status::ok;
        return group.any(failed) ? Status::aborted : Status::ok;
    }

    // Like `wait`, without blocking: `arrived` is whether there was a count to consume.
    template <typename Group>
    __device__ __forceinline__ Status poll(Group group, u32 number, bool &arrived) const {
        bool failed = false, found = false;
        if (group.rank() == 0) failed = !detail::take(word(number), word(number) + detail::awaited_offset, found);
        arrived = group.any(found);
        return group.any(failed) ? Status::aborted : Status::ok;
    }

    // Number of increments of signal `number` so far. Values from 2^61 on are not counts: waits were aborted.
    __device__ __forceinline__ u64 epoch(u32 number) const { return detail::load_acquire(word(number)); }

    __device__ __forceinline__ u64 word(u32 number) const { return base + detail::signal_bytes * (1 + number); }
};

// A peer's signals, mapped here (`RemoteSignals` on the host).
struct RemoteSignals {
    u64 base;

    // Increments signal `number`, after all earlier accesses of the group. Several ranks may do so, which requires an
    // atomic operation on the peer's memory.
    template <typename Group>
    __device__ __forceinline__ void add(Group group, u32 number) const {
        // The release of one thread covers the accesses of all behind the barrier.
        group.sync();
        if (group.rank() == 0) detail::add_release(base + detail::signal_bytes * (1 + number));
    }
};

static_assert(sizeof(Signals) == 8 && sizeof(RemoteSignals) == 8, "the host passes an address");

}  // namespace warplink

#endif
