// Warplink's channels for kernels: put, get, signal, wait and flush.
//
// Include it in CUDA C++ that nvcc or NVRTC compiles (C++17, sm_70 and newer); there is nothing to link.
// A channel comes from the host (`Connection::channel`) as a kernel's argument, by value or in an array.
//
//     #include <warplink/device.cuh>
//
//     extern "C" __global__ void ping(warplink::Channel channel, unsigned long long bytes) {
//         channel.put_with_signal(warplink::Block(), 0, 0, bytes);
//         if (channel.wait(warplink::Block()) != warplink::Status::ok) return;
//         // The peer's bytes are here.
//     }
//
// # Groups
// The threads that make a call together: Thread (the calling one alone), Warp, Block, or, for calls that need no
// synchronization, Grid. Every thread of the group makes the same call with the same arguments, and all of them get
// the same status. Writes of the group's threads before a call are visible to all of them in the call (except in
// calls for packets and those of Grid). Any number of groups may use one channel at the same time.
//
// # Order
// | call | guarantee on return |
// |---|---|
// | put | none; neither the source nor the target may be accessed until a later call guarantees it |
// | signal | the group's earlier puts, and its writes to the peer, are visible to the group that waits for the signal |
// | flush | sources of the group's earlier puts may be overwritten, results of its gets may be read |
// | wait | the peer's accesses before the awaited signal are visible to the group |
// | get | none until a flush |
//
// `put_with_signal` is a put and a signal, `put_with_signal_and_flush` a flush as well. Signals count: none is lost
// when a sender runs ahead, and each wait consumes one. A signal orders the accesses of its own group, and accesses
// that the group knows to be complete (by a barrier of the block, for example); not concurrent accesses of other
// groups.
//
// # Kinds
// A direct channel stores to and loads from the peer's memory itself. A proxied one sends triggers to a host thread,
// which makes the copy engine move the bytes: this takes no multiprocessor time, but a round trip to the host. On a
// proxied channel the source must not change until a flush.
//
// # Failure
// Every call returns a status. It is `aborted` when the peer, or this rank, has failed: then no guarantee holds, and
// the kernel should end. The host's next call reports the reason.

#ifndef WARPLINK_DEVICE_CUH
#define WARPLINK_DEVICE_CUH

#include <warplink/groups.cuh>
#include <warplink/memory.cuh>
#include <warplink/signals.cuh>

namespace warplink {

// An offset in one of a connection's regions; number 0 is the region of the connection request.
struct At {
    u32 region;
    u64 offset;
    __device__ __forceinline__ At(u64 offset) : region(0), offset(offset) {}
    __device__ __forceinline__ At(u32 region, u64 offset) : region(region), offset(offset) {}
};

namespace detail {

// A range of memory: a region, here or mapped from the peer.
struct Window {
    u64 base;
    u64 bytes;
};

// Must match the host.
constexpr u32 regions = 16;
constexpr u32 kind_put = 1, kind_get = 2, kind_signal = 4, kind_flush = 8;
// Maximum bytes of one trigger: a multiple of every alignment.
constexpr u64 trigger_bytes = 1ull << 31;
// Words after the count of claimed positions: how much of the ring kernels know to be read, whether one of them is
// polling, and whether the proxy was stopped.
constexpr u64 seen_offset = 8, looking_offset = 16, stopped_offset = 24;

}  // namespace detail

// A connection to a peer, as seen by a kernel. Plain data: copy it, pass it by value, store it in arrays. `peer` and
// `tag` identify the connection; the other members are internal, kernels use the calls.
struct Channel {
    u64 local, local_bytes;
    u64 remote, remote_bytes;
    u64 inbound, awaited, outbound, completed, abort;
    u64 windows;
    u64 ring, head, tail;
    // The tag of the connection, equal on both ranks.
    u64 tag;
    u32 slots, connection;
    // The rank at the other end, in the connection's communicator.
    u32 peer;
    u32 proxied;

    // ---- signals

    // Increments the peer's epoch by one, after all earlier accesses of the group.
    template <typename Group>
    __device__ __forceinline__ Status signal(Group group) const {
        group.sync();
        if (!proxied) {
            if (group.rank() == 0) detail::add_release(outbound);
            return Status::ok;
        }
        return triggers(group, detail::kind_signal, At(0), At(0), 0, nullptr);
    }

    // Blocks until a further signal of the peer has arrived, and consumes it.
    template <typename Group>
    __device__ __forceinline__ Status wait(Group group) const {
        bool failed = false;
        if (group.rank() == 0) failed = detail::reach(inbound, detail::increment(awaited) + 1, abort) != Status::ok;
        return shared(group, failed);
    }

    // Blocks until the peer has signalled `epoch` times in total. Consumes no signal.
    template <typename Group>
    __device__ __forceinline__ Status wait_until(Group group, u64 epoch) const {
        bool failed = false;
        if (group.rank() == 0) failed = detail::reach(inbound, epoch, abort) != Status::ok;
        return shared(group, failed);
    }

    // Number of the peer's signals so far; its accesses before these signals are visible to the thread. Values from
    // 2^61 on are not counts: waits were aborted.
    __device__ __forceinline__ u64 epoch() const { return detail::load_acquire(inbound); }

    // Like `wait`, without blocking: `arrived` is whether there was a signal to consume.
    template <typename Group>
    __device__ __forceinline__ Status poll(Group group, bool &arrived) const {
        bool failed = false, found = false;
        if (group.rank() == 0) failed = !detail::take(inbound, awaited, found);
        arrived = group.any(found);
        return shared(group, failed);
    }

    // ---- data

    // Copies `bytes` from a region here to one of the peer's.
    template <typename Group>
    __device__ __forceinline__ Status put(Group group, At target, At source, u64 bytes) const {
        u64 to, from;
        const Status status = places(target, source, bytes, to, from);
        if (status != Status::ok) return status;
        if (!proxied) {
            begin(group);
            detail::copy(to, from, bytes, group.rank(), group.size());
            return Status::ok;
        }
        return proxied_call(group, detail::kind_put, target, source, bytes, nullptr);
    }

    // Copies `bytes` from a region of the peer's to one here.
    template <typename Group>
    __device__ __forceinline__ Status get(Group group, At target, At source, u64 bytes) const {
        u64 to, from;
        const Status status = places(source, target, bytes, from, to);
        if (status != Status::ok) return status;
        if (!proxied) {
            begin(group);
            detail::copy(to, from, bytes, group.rank(), group.size());
            return Status::ok;
        }
        return proxied_call(group, detail::kind_get, source, target, bytes, nullptr);
    }

    // A put and a signal.
    template <typename Group>
    __device__ __forceinline__ Status put_with_signal(Group group, At target, At source, u64 bytes) const {
        if (!proxied) {
            const Status status = put(group, target, source, bytes);
            return status == Status::ok ? signal(group) : status;
        }
        u64 to, from;
        const Status status = places(target, source, bytes, to, from);
        if (status != Status::ok) return status;
        return proxied_call(group, detail::kind_put | detail::kind_signal, target, source, bytes, nullptr);
    }

    // A put, a signal and a flush.
    template <typename Group>
    __device__ __forceinline__ Status put_with_signal_and_flush(Group group, At target, At source, u64 bytes) const {
        if (!proxied) {
            const Status status = put_with_signal(group, target, source, bytes);
            return status == Status::ok ? flush(group) : status;
        }
        u64 to, from, position;
        Status status = places(target, source, bytes, to, from);
        if (status != Status::ok) return status;
        const u32 kind = detail::kind_put | detail::kind_signal | detail::kind_flush;
        status = proxied_call(group, kind, target, source, bytes, &position);
        return status == Status::ok ? await_flush(group, position) : status;
    }

    // Blocks until sources of earlier puts on this channel may be overwritten, and results of earlier gets may be
    // read. Does not wait for later puts, or for other channels.
    template <typename Group>
    __device__ __forceinline__ Status flush(Group group) const {
        group.sync();
        // The loads of a direct put and the stores of a direct get are executed by the group itself.
        if (!proxied) return Status::ok;
        u64 position;
        const Status status = triggers(group, detail::kind_flush, At(0), At(0), 0, &position);
        return status == Status::ok ? await_flush(group, position) : status;
    }

    // ---- packets: data with an inline flag, for small messages; direct channels only
    //
    // The sender stores data and flag together, and the receiver polls the location until the flag arrives: no
    // signal, no fence. Each location is written once for each flag value, which must differ from the previous
    // content (count up, from 1); it may be written again when the peer is known to have read it. The group needs no
    // synchronization: each thread reads the data that it returns with.
    //
    // | | data | space in the target | aligned to |
    // |---|---|---|---|
    // | packets8 | 4 of 8 bytes | 2 × bytes | 4 (target 8) |
    // | packets16 | 8 of 16 bytes | 2 × bytes | 8 (target 16) |
    // | packets128 | 120 of 128 bytes | 128 × ⌈bytes ÷ 120⌉ | 8 (target 128) |
    //
    // `packets128` requires groups of whole warps (of a grid, blocks of whole warps), and returns `unsupported` for
    // others. It also requires a link that does not split lines of 128 bytes, such as NVLink.

    // Puts `bytes` of a local region as packets of 8 bytes.
    template <typename Group>
    __device__ __forceinline__ Status put_packets8(Group group, At target, At source, u64 bytes, u32 flag) const {
        u64 to, from;
        const Status status = packet_places(target, 2 * bytes, 8, source, bytes, 4, to, from);
        if (status != Status::ok) return status;
        const u32 *in = (const u32 *)from;
        for (u64 i = group.rank(); i < bytes / 4; i += group.size())
            asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to + 8 * i), "r"(in[i]), "r"(flag) : "memory");
        return Status::ok;
    }

    // Reads the peer's puts to a local region with the same flag.
    template <typename Group>
    __device__ __forceinline__ Status read_packets8(Group group, At target, At source, u64 bytes, u32 flag) const {
        u64 to, from;
        const Status status = own_packet_places(source, 2 * bytes, 8, target, bytes, 4, from, to);
        if (status != Status::ok) return status;
        bool failed = false;
        for (u64 i = group.rank(); i < bytes / 4 && !failed; i += group.size()) {
            u32 data, seen, polls = 0;
            while (true) {
                asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(data), "=r"(seen) : "l"(from + 8 * i) : "memory");
                if (seen == flag) break;
                if ((failed = is_ended(++polls))) break;
            }
            if (!failed) ((u32 *)to)[i] = data;
        }
        return shared(group, failed);
    }

    // Puts `bytes` of a local region as packets of 16 bytes.
    template <typename Group>
    __device__ __forceinline__ Status put_packets16(Group group, At target, At source, u64 bytes, u32 flag) const {
        u64 to, from;
        const Status status = packet_places(target, 2 * bytes, 16, source, bytes, 8, to, from);
        if (status != Status::ok) return status;
        const uint2 *in = (const uint2 *)from;
        for (u64 i = group.rank(); i < bytes / 8; i += group.size()) {
            const uint2 data = in[i];
            asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to + 16 * i), "r"(data.x), "r"(flag), "r"(data.y) : "memory");
        }
        return Status::ok;
    }

    // Reads the peer's puts to a local region with the same flag.
    template <typename Group>
    __device__ __forceinline__ Status read_packets16(Group group, At target, At source, u64 bytes, u32 flag) const {
        u64 to, from;
        const Status status = own_packet_places(source, 2 * bytes, 16, target, bytes, 8, from, to);
        if (status != Status::ok) return status;
        bool failed = false;
        for (u64 i = group.rank(); i < bytes / 8 && !failed; i += group.size()) {
            uint2 data;
            u32 first, second, polls = 0;
            while (true) {
                asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(data.x), "=r"(first), "=r"(data.y), "=r"(second)
                             : "l"(from + 16 * i)
                             : "memory");
                if (first == flag && second == flag) break;
                if ((failed = is_ended(++polls))) break;
            }
            if (!failed) ((uint2 *)to)[i] = data;
        }
        return shared(group, failed);
    }

    // Puts `bytes` of a local region as packets of 128 bytes, each by 8 threads together.
    template <typename Group>
    __device__ __forceinline__ Status put_packets128(Group group, At target, At source, u64 bytes, u64 flag) const {
        const u64 lines = (bytes + 119) / 120;
        u64 to, from;
        const Status status = packet_places(target, 128 * lines, 128, source, bytes, 8, to, from);
        if (status != Status::ok) return status;
        if (!whole_warps(group)) return Status::unsupported;
        const u64 *in = (const u64 *)from;
        const u32 part = group.rank() & 7u, mask = 0xffu << (threadIdx.x & 24u);
        const u64 words = bytes / 8;
        for (u64 line = group.rank() / 8; line < lines; line += group.size() / 8) {
            const u64 at = 15 * line + 2 * part;
            const u64 first = at < words ? in[at] : 0;
            const u64 second = part == 7 ? flag : at + 1 < words ? in[at + 1] : 0;
            __syncwarp(mask);
            asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to + 128 * line + 16 * part), "l"(first), "l"(second) : "memory");
        }
        return Status::ok;
    }

    // Reads the peer's puts to a local region with the same flag.
    template <typename Group>
    __device__ __forceinline__ Status read_packets128(Group group, At target, At source, u64 bytes, u64 flag) const {
        const u64 lines = (bytes + 119) / 120;
        u64 to, from;
        const Status status = own_packet_places(source, 128 * lines, 128, target, bytes, 8, from, to);
        if (status != Status::ok) return status;
        if (!whole_warps(group)) return Status::unsupported;
        u64 *out = (u64 *)to;
        const u32 part = group.rank() & 7u, mask = 0xffu << (threadIdx.x & 24u);
        const u64 words = bytes / 8;
        bool failed = false;
        for (u64 line = group.rank() / 8; line < lines && !failed; line += group.size() / 8) {
            u64 first, second;
            u32 polls = 0;
            while (true) {
                __syncwarp(mask);
                asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from + 128 * line + 16 * part) : "memory");
                if (__shfl_sync(mask, second, 7, 8) == flag) break;
                // All 8 threads end together.
                if ((failed = __any_sync(mask, is_ended(++polls)))) break;
            }
            if (failed) break;
            // The line was stored as a whole, but the loads of 8 threads are not one access: data loaded by the other
            // threads may be older than the flag. Data loaded from now on is not.
            asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from + 128 * line + 16 * part) : "memory");
            const u64 at = 15 * line + 2 * part;
            if (at < words) out[at] = first;
            if (part != 7 && at + 1 < words) out[at + 1] = second;
        }
        return shared(group, failed);
    }

    // ---- addresses

    // Address of an offset in this rank's region, for reading or writing data, or 0 if `bytes` from there exceed the
    // region.
    __device__ __forceinline__ u64 here(At at, u64 bytes) const {
        if (at.region == 0) return inside(detail::Window{local, local_bytes}, at.offset, bytes);
        if (at.region >= detail::regions) return 0;
        return inside(window(at.region), at.offset, bytes);
    }

    // ---- implementation of the calls

    // Makes earlier writes of the group's threads visible to all of them.
    template <typename Group>
    __device__ __forceinline__ static void begin(Group group) {
        if constexpr (Group::synchronizes) group.sync();
    }

    template <typename Group>
    __device__ __forceinline__ static Status shared(Group group, bool failed) {
        return group.any(failed) ? Status::aborted : Status::ok;
    }

    // Whether the group consists of whole warps. For a grid, its blocks have to; the size of the grid does not
    // determine it.
    template <typename Group>
    __device__ __forceinline__ static bool whole_warps(Group group) {
        return group.size() % 32 == 0 && (Group::synchronizes || blockDim.x % 32 == 0);
    }

    // Whether waits were aborted, checked every few polls.
    __device__ __forceinline__ bool is_ended(u32 polls) const {
        return polls % detail::polls_per_look == 0 && detail::load_relaxed(abort) != 0;
    }

    // Whether waits were aborted or the proxy was stopped, checked every few polls.
    __device__ __forceinline__ bool is_stopped(u32 polls) const {
        if (polls % detail::polls_per_look != 0) return false;
        return detail::load_relaxed(abort) != 0 || detail::load_relaxed(tail + 8) != 0;
    }

    // Address of an offset in the peer's region, mapped here, or 0 if `bytes` from there exceed the region.
    __device__ __forceinline__ u64 there(At at, u64 bytes) const {
        if (at.region == 0) return inside(detail::Window{remote, remote_bytes}, at.offset, bytes);
        if (at.region >= detail::regions) return 0;
        return inside(window(detail::regions + at.region), at.offset, bytes);
    }

    // An entry of the table, which the host may extend while the kernel runs: an entry that is only half written
    // still has no base or no bytes.
    __device__ __forceinline__ detail::Window window(u32 entry) const {
        const u64 at = windows + sizeof(detail::Window) * entry;
        return detail::Window{detail::load_relaxed(at), detail::load_relaxed(at + 8)};
    }

    __device__ __forceinline__ static u64 inside(detail::Window window, u64 offset, u64 bytes) {
        if (window.base == 0 || offset > window.bytes || bytes > window.bytes - offset) return 0;
        return window.base + offset;
    }

    __device__ __forceinline__ Status places(At peers, At own, u64 bytes, u64 &to, u64 &from) const {
        to = there(peers, bytes);
        from = here(own, bytes);
        return to != 0 && from != 0 ? Status::ok : Status::out_of_range;
    }

    __device__ __forceinline__ Status packet_places(
        At target, u64 packed, u32 packet, At source, u64 bytes, u32 unit, u64 &to, u64 &from) const {
        if (proxied) return Status::unsupported;
        return checked(there(target, packed), packet, here(source, bytes), unit, bytes, to, from);
    }

    __device__ __forceinline__ Status own_packet_places(
        At source, u64 packed, u32 packet, At target, u64 bytes, u32 unit, u64 &from, u64 &to) const {
        return checked(here(source, packed), packet, here(target, bytes), unit, bytes, from, to);
    }

    __device__ __forceinline__ static Status checked(
        u64 packets, u32 packet, u64 plain, u32 unit, u64 bytes, u64 &packets_at, u64 &plain_at) {
        if (packets == 0 || plain == 0) return Status::out_of_range;
        packets_at = packets;
        plain_at = plain;
        return packets % packet == 0 && plain % unit == 0 && bytes % unit == 0 ? Status::ok : Status::misaligned;
    }

    template <typename Group>
    __device__ __forceinline__ Status proxied_call(Group group, u32 kind, At peers, At own, u64 bytes, u64 *position) const {
        if constexpr (Group::synchronizes) {
            group.sync();
            return triggers(group, kind, peers, own, bytes, position);
        } else {
            return Status::unsupported;
        }
    }

    // Sends a request to the proxy, split into several triggers if it is long. `position`, if not null, is set by the
    // first thread.
    template <typename Group>
    __device__ __forceinline__ Status triggers(Group group, u32 kind, At peers, At own, u64 bytes, u64 *position) const {
        bool failed = false;
        if (group.rank() == 0) {
            const u32 move = kind & (detail::kind_put | detail::kind_get);
            while (bytes > detail::trigger_bytes && !failed) {
                u64 unused;
                failed = !push(move, peers, own, detail::trigger_bytes, unused);
                peers.offset += detail::trigger_bytes;
                own.offset += detail::trigger_bytes;
                bytes -= detail::trigger_bytes;
            }
            u64 at = 0;
            failed = failed || !push(kind, peers, own, bytes, at);
            if (position != nullptr) *position = at;
        }
        return shared(group, failed);
    }

    // Puts one trigger into the FIFO, once there is space; false if waits were aborted or the proxy was stopped. A
    // position is claimed only when there is space for it: a thread that gives up has claimed nothing, and the proxy,
    // which serves other communicators too, never waits for a trigger that does not arrive.
    __device__ __forceinline__ bool push(u32 kind, At peers, At own, u64 bytes, u64 &position) const {
        position = detail::load_relaxed(head);
        for (u32 polls = 1;; polls++) {
            // Acquire: pairs with `max_release`; the slot is overwritten only after the proxy has read it.
            if (position < detail::load_acquire(head + detail::seen_offset) + slots) {
                const u64 before = atomicCAS((u64 *)head, position, position + 1);
                if (before == position) break;
                position = before;
                continue;
            }
            // The read count is in host memory. One thread at a time polls it: many would delay the proxy's updates.
            if (detail::claim(head + detail::looking_offset)) {
                // Acquire: the proxy advances the count after it has read the slots.
                const u64 seen = detail::load_acquire(tail);
                detail::max_release(head + detail::seen_offset, seen);
                detail::release(head + detail::looking_offset);
            }
            if (is_stopped(polls)) return false;
            position = detail::load_relaxed(head);
        }
        // Each half contains the lap of the ring in which it was stored, so that the proxy never reads a half that
        // has not arrived yet.
        const u64 lap = (position & slots) == 0 ? 1ull << 63 : 0;
        const u64 first = lap | (u64)kind << 59 | (u64)connection << 49 | (u64)own.region << 45 | own.offset << 9 | (bytes & 511u);
        const u64 second = lap | (u64)peers.region << 59 | peers.offset << 23 | bytes >> 9;
        // The data that the trigger is about is visible before it; and the stop word below is read after it, as the
        // comment there requires.
        detail::fence_all();
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(ring + 16 * (position & (slots - 1))), "l"(first), "l"(second) : "memory");
        // The proxy sets the stop word before it reads the claim count for the last time: a thread whose claim came
        // too late for that finds the word set. If the peer was lost, this check is the only one while there is
        // space.
        return (detail::load_relaxed(head + detail::stopped_offset) | detail::load_relaxed(abort)) == 0;
    }

    // Blocks until the proxy has completed all triggers before `position`, and that one.
    template <typename Group>
    __device__ __forceinline__ Status await_flush(Group group, u64 position) const {
        bool failed = false;
        if (group.rank() == 0) {
            for (u32 polls = 1;; polls++) {
                const u64 seen = detail::load_acquire(completed);
                if ((failed = seen >= detail::ended_epoch)) break;
                if ((long long)(seen - (position + 1)) >= 0) break;
                if (is_stopped(polls)) {
                    // Requests completed before the proxy ended count.
                    failed = (long long)(detail::load_acquire(completed) - (position + 1)) < 0;
                    break;
                }
            }
        }
        return shared(group, failed);
    }
};

// The host, and warplink.h, have the same layout.
static_assert(sizeof(Channel) == 128 && alignof(Channel) == 8, "the layout");

// Blocks until all peers have called it: signals on each of `count` channels and waits for each. Earlier puts and
// writes of the group, and of the peers' groups, are visible after it. Consumes the channels' signals.
template <typename Group>
__device__ __forceinline__ Status barrier(Group group, const Channel *channels, u32 count) {
    group.sync();
    bool failed = false;
    for (u32 i = group.rank(); i < count; i += group.size()) failed |= channels[i].signal(Thread()) != Status::ok;
    for (u32 i = group.rank(); i < count; i += group.size()) failed |= channels[i].wait(Thread()) != Status::ok;
    return Channel::shared(group, failed);
}

}  // namespace warplink

#endif
