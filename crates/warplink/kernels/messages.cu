// Messages between pairs of ranks, on any memory: sends and receives that progress at the same time.
//
// Each message has lanes (blocks) of its own at both ends; lane i of the sender works with lane i of the receiver
// and with nobody else. For one message of one lane:
//
// | sender | receiver |
// |---|---|
// | | stores what it expects into the sender's workspace, and signals |
// | waits; compares | |
// | stores what it sends, and the first chunk, into the receiver's workspace; signals | |
// | | waits; compares; copies the chunk to where it belongs |
// | waits before the third chunk and each later one | signals that a chunk was copied, where another is to take its place |
//
// So each signal of a message is waited for in it, and nothing is left for the next message or launch. A receiver
// has room for two chunks of each lane of each sender.
//
// A message may be as long as a number in device memory says, up to a limit that both ends know.

#include <warplink/announcements.cuh>

using namespace warplink;

// Must match the host.
constexpr u32 max_ranks = 8, max_messages = 64;
constexpr u64 header_bytes = 64, any_units = ~0ull;
constexpr u64 chunks = 4, least_chunk = 16 << 10;
constexpr u64 receives = 1u << 8, tells = 1u << 9, wide = 1u << 10;

struct Message {
    // The peer's rank in bits 0 to 7, `receives`, `tells` and `wide`, the number of lanes in bits 16 to 31, and the
    // block of the first from bit 32 on.
    u64 place;
    u64 address;
    // The most bytes, and those of a unit, of which a lane moves whole ones.
    u64 bytes, unit;
    // Where the number of units is, or is to be stored where the message `tells`: 32 bits, or 64 where it is `wide`; 0
    // where it has all bytes.
    u64 count;
    // Where the number of each unit is in what is sent, 32 bits each; 0 where they lie in order.
    u64 index;
};

struct Messages {
    // Of each rank, as they are mapped here.
    u64 workspace[max_ranks], signals[max_ranks];
    // For each direction and peer, whether lane 0 waits for it; and for each peer, what it stated otherwise.
    u64 waiting, verdicts;
    u64 rank, world;
    // The most lanes of a message, the bytes of a chunk, and the number of messages.
    u64 lanes, chunk, count, unused;
    Message message[max_messages];
};

// What an end states of a message.
struct Header {
    // The most bytes, the bytes of a unit, and how many units there are, where it is known.
    u64 bytes, unit, units;
};

// One lane of a message, at one end.
struct End {
    const Messages &at;
    const Message &message;
    u64 abort;
    u32 rank, world, peer, lane, lanes;

    __device__ __forceinline__ End(const Messages &at, const Message &message, u64 signals)
        : at(at), message(message), abort(signals), rank((u32)at.rank), world((u32)at.world), peer((u32)message.place & 0xffu),
          lane(blockIdx.x - (u32)(message.place >> 32)), lanes((u32)(message.place >> 16) & 0xffffu) {}

    // The number of a lane's signal, or header, from `from`: of data at receivers, of room at senders.
    __device__ __forceinline__ u32 data(u32 from) const { return lane * world + from; }
    __device__ __forceinline__ u32 room(u32 from) const { return ((u32)at.lanes + lane) * world + from; }

    __device__ __forceinline__ u64 header(u32 owner, u32 number) const { return at.workspace[owner] + header_bytes * number; }

    // Chunk number `chunk` from `from`, at `owner`.
    __device__ __forceinline__ u64 chunk(u32 owner, u32 from, u64 number) const {
        return at.workspace[owner] + header_bytes * 2 * at.lanes * world + (2 * (u64)data(from) + number % 2) * at.chunk;
    }

    __device__ __forceinline__ void state(u32 owner, u32 number, Header all) const {
        if (threadIdx.x != 0) return;
        volatile u64 *to = (volatile u64 *)header(owner, number);
        to[0] = all.bytes, to[1] = all.unit, to[2] = all.units;
    }

    __device__ __forceinline__ Header stated(u32 number) const {
        const u64 from = header(rank, number);
        return {detail::load_relaxed(from), detail::load_relaxed(from + 8), detail::load_relaxed(from + 16)};
    }

    // Tells the host whether lane 0 waits.
    __device__ __forceinline__ void waits(bool waits) const {
        const u64 number = ((message.place & receives) != 0 ? world : 0) + peer;
        if (lane == 0 && threadIdx.x == 0) *(volatile u64 *)(at.waiting + 8 * number) = waits ? 1 : 0;
    }

    // Notes that the ends do not fit, and ends the waits of this rank's other lanes.
    __device__ __forceinline__ void refuse(u64 theirs, u64 units) const {
        if (threadIdx.x != 0) return;
        const u64 note = at.verdicts + detail::verdict_bytes * ((peer + world - rank - 1) % world);
        *(volatile u64 *)note = message.bytes | ((message.place & receives) != 0 ? 1ull << 63 : 0);
        *(volatile u64 *)(note + 8) = theirs;
        // A count may be any number.
        const bool overflows = __umul64hi(units, message.unit) != 0;
        *(volatile u64 *)(note + 16) = units == any_units ? units : overflows ? any_units - 1 : units * message.unit;
        __threadfence_system();
        *(volatile unsigned char *)(note + 8 * detail::verdict_words) = 1;
        *(volatile u64 *)abort = 1;
    }

    // Which bytes this lane moves of `units` units, and the bytes of its chunks.
    __device__ __forceinline__ void share(u64 units, u64 &from, u64 &to, u64 &step) const {
        const u64 unit = message.unit;
        u64 each = (units + lanes - 1) / lanes * unit;
        // Of small units a lane has as many as the widest accesses need.
        if (unit < 16 && (unit & (unit - 1)) == 0) each = (each + 15) & ~15ull;
        // The last unit of a message without a count may be short.
        const u64 all = message.count != 0 || units * unit < message.bytes ? units * unit : message.bytes;
        from = lane * each < all ? lane * each : all;
        to = all - from < each ? all : from + each;
        // Several chunks, so that one is copied out while the next one comes.
        u64 piece = each / chunks < least_chunk ? least_chunk : each / chunks;
        // Each begins as aligned as the first, for the widest accesses.
        piece = (piece + 15) & ~15ull;
        if (piece < unit) piece = unit;
        step = (piece < at.chunk ? piece : at.chunk) / unit * unit;
    }

    // The count in device memory. What stands for an unknown one is none.
    __device__ __forceinline__ u64 count() const {
        if ((message.place & wide) == 0) return *(const volatile u32 *)message.count;
        const u64 count = *(const volatile u64 *)message.count;
        return count == any_units ? count - 1 : count;
    }

    __device__ __forceinline__ void tell(u64 units) const {
        if ((message.place & wide) == 0)
            *(volatile u32 *)message.count = (u32)units;
        else
            *(volatile u64 *)message.count = units;
    }

    __device__ __forceinline__ u64 all_units() const { return (message.bytes + message.unit - 1) / message.unit; }

    // Copies `bytes` from byte `from` of what is sent on.
    __device__ __forceinline__ void gather(u64 target, u64 from, u64 bytes) const {
        if (message.index == 0) {
            detail::copy(target, message.address + from, bytes, threadIdx.x, blockDim.x);
            return;
        }
        const u64 unit = message.unit, first = from / unit, units = bytes / unit;
        for (u64 i = threadIdx.x / 32; i < units; i += blockDim.x / 32) {
            const u64 number = *(const u32 *)(message.index + 4 * (first + i));
            detail::copy(target + unit * i, message.address + unit * number, unit, threadIdx.x & 31u, 32);
        }
    }

    // False where the waits were ended, or the ends do not fit.
    __device__ __forceinline__ bool send() const {
        const Signals own{abort};
        const RemoteSignals to{at.signals[peer]};
        waits(true);
        if (own.wait(Block(), room(peer)) != Status::ok) return false;
        waits(false);
        const Header theirs = stated(room(peer));
        const u64 units = message.count != 0 ? count() : all_units();
        state(peer, data(rank), {message.bytes, message.unit, units});
        const bool fits = theirs.bytes == message.bytes && theirs.unit == message.unit && (theirs.units == any_units || theirs.units == units);
        if (!fits || units > all_units()) {
            // The receiver finds the same.
            to.add(Block(), data(rank));
            refuse(theirs.bytes, fits ? units : theirs.units);
            return false;
        }
        u64 from, end, step, number = 0;
        share(units, from, end, step);
        // The first signal comes also where there is nothing to send.
        do {
            const u64 bytes = end - from < step ? end - from : step;
            if (number >= 2 && own.wait(Block(), room(peer)) != Status::ok) return false;
            gather(chunk(peer, rank, number), from, bytes);
            to.add(Block(), data(rank));
            from += bytes;
            number++;
        } while (from < end);
        return true;
    }

    __device__ __forceinline__ bool receive() const {
        const Signals own{abort};
        const RemoteSignals to{at.signals[peer]};
        const bool told = (message.place & tells) != 0;
        const u64 expected = told ? any_units : message.count != 0 ? count() : all_units();
        state(peer, room(rank), {message.bytes, message.unit, expected});
        to.add(Block(), room(rank));
        waits(true);
        if (own.wait(Block(), data(peer)) != Status::ok) return false;
        waits(false);
        const Header theirs = stated(data(peer));
        const bool fits = theirs.bytes == message.bytes && theirs.unit == message.unit && (told || theirs.units == expected);
        if (!fits || theirs.units > all_units()) {
            refuse(theirs.bytes, theirs.units);
            return false;
        }
        if (told && lane == 0 && threadIdx.x == 0) tell(theirs.units);
        u64 from, end, step, number = 0;
        share(theirs.units, from, end, step);
        while (from < end) {
            const u64 bytes = end - from < step ? end - from : step;
            if (number > 0 && own.wait(Block(), data(peer)) != Status::ok) return false;
            detail::copy(message.address + from, chunk(rank, peer, number), bytes, threadIdx.x, blockDim.x);
            from += bytes;
            // Whether a chunk is to come where this one was.
            if (from < end && end - from > step) to.add(Block(), room(rank));
            number++;
        }
        return true;
    }
};

// All messages of a group. Those between the same ranks in the same direction have the same blocks, one after the
// other.
extern "C" __global__ void __launch_bounds__(512) messages(const __grid_constant__ Messages at, u64 signals) {
#pragma unroll 1
    for (u32 i = 0; i < (u32)at.count; i++) {
        const Message &message = at.message[i];
        const u32 first = (u32)(message.place >> 32), lanes = (u32)(message.place >> 16) & 0xffffu;
        if (blockIdx.x < first || blockIdx.x >= first + lanes) continue;
        const End end(at, message, signals);
        if (!((message.place & receives) != 0 ? end.receive() : end.send())) return;
        // What one thread still reads of a header, another does not overwrite.
        __syncthreads();
    }
}
