// Messages between pairs of ranks, on any memory: sends and receives that progress at the same time.
//
// Each message has lanes (blocks) of its own at both ends; lane i of the sender works with lane i of the receiver
// and with nobody else. Both ends count the messages of a lane; the count is the flag of the packets of a message, and its
// parity chooses one of two slots for them. Both state their header, as packets, in a slot of the other's. For one lane of a
// message, a header's last word being in brackets:
//
// | sender | receiver |
// |---|---|
// | | states its header [where the memory is published, if it is] |
// | short: states its header [packets], and puts all data as packets | |
// | waits for the receiver's header; compares | waits for the sender's header; compares |
// | published: stores all data where it belongs, then states its header [stored] | packets: copies them to where they belong |
// | else: stores a chunk, then states its header [chunks]; stores each further chunk, and signals | copies each chunk to where it belongs |
// | waits before the third chunk and each later one | signals that a chunk was copied, where another is to take its place |
//
// So a short message takes the time of one store, and nothing is left for the next message or launch but the counts.
//
// Why nothing is overwritten too early: a receiver states its header of message k when it is done with k - 1. A sender is
// done with k - 1 when it has seen the header of that, so that k - 2, which had the slot of k, is over at both ends; and it
// stores chunks of k when it has seen the header of k.
//
// A message may be as long as a number in device memory says, up to a limit that both ends know.

#include <warplink/announcements.cuh>

using namespace warplink;

// Must match the host.
constexpr u32 max_ranks = 8, max_messages = 64;
constexpr u64 any_units = ~0ull;
constexpr u64 chunks = 4, least_chunk = 16 << 10;
constexpr u64 receives = 1u << 8, tells = 1u << 9, wide = 1u << 10;

// The packets of a header, and the bytes of all.
constexpr u32 header_words = 4;
constexpr u64 header_bytes = 16 * header_words;

// How the data of a message comes, as its sender states.
constexpr u64 as_chunks = 0, as_packets = 1, stored = 2;

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
    // Of what is received: one more than the number of its allocation among those that this rank publishes, above
    // `offset_bits`, and its first byte there; 0 where it is not published.
    u64 published;
};

struct Messages {
    // Of each rank, as they are mapped here.
    u64 workspace[max_ranks], signals[max_ranks];
    // For each direction and peer, whether lane 0 waits for it; behind these, for each direction, peer and lane, the number
    // of messages before. And for each peer, what it stated otherwise; behind these, how many lanes stored what they sent
    // where it belongs.
    u64 waiting, verdicts;
    u64 rank, world;
    // The most lanes of a message, the bytes of a chunk, the most bytes that a lane moves as packets, and the number of
    // messages.
    u64 lanes, chunk, packed, count;
    // Where published allocations are mapped.
    u64 tables;
    Message message[max_messages];
};

// What an end states of a message.
struct Header {
    // The most bytes, the bytes of a unit, and how many units there are, where it is known.
    u64 bytes, unit, units;
    // Of a receiver, what is told of its memory; of a sender, how the data comes.
    u64 how;

    __device__ __forceinline__ u64 word(u32 number) const { return number == 0 ? bytes : number == 1 ? unit : number == 2 ? units : how; }
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

    __device__ __forceinline__ bool is_receive() const { return (message.place & receives) != 0; }

    // Where the number of messages of this lane is.
    __device__ __forceinline__ u64 number() const {
        return at.waiting + 8 * (2 * world + ((is_receive() ? world : 0) + peer) * at.lanes + lane);
    }

    // The number of a lane's signal, or box, from `from`: of data at receivers, of room at senders.
    __device__ __forceinline__ u32 data(u32 from) const { return lane * world + from; }
    __device__ __forceinline__ u32 room(u32 from) const { return ((u32)at.lanes + lane) * world + from; }

    // The slot of message number `epoch` for a header, and for packets, in box `box` of `owner`.
    __device__ __forceinline__ u64 header(u32 owner, u32 box, u64 epoch) const { return at.workspace[owner] + header_bytes * (2 * box + epoch % 2); }
    __device__ __forceinline__ u64 packets(u32 owner, u32 box, u64 epoch) const {
        const u64 headers = 4 * header_bytes * at.lanes * world;
        return at.workspace[owner] + headers + 2 * at.packed * (2 * box + epoch % 2);
    }

    // Chunk number `number` from `from`, at `owner`.
    __device__ __forceinline__ u64 chunk(u32 owner, u32 from, u64 number) const {
        const u64 slots = 4 * (header_bytes + at.packed) * at.lanes * world;
        return at.workspace[owner] + slots + (2 * (u64)data(from) + number % 2) * at.chunk;
    }

    // States what this end does: where that is `behind`, after everything that the lane did before.
    __device__ __forceinline__ void state(const Lane &self, u64 to, const Header &all, bool behind) const {
        if (behind) __syncthreads();
        if (threadIdx.x >= header_words) return;
        if (behind) detail::fence();
        const u64 word = all.word(threadIdx.x);
        detail::store_packet<8>(to + 16 * threadIdx.x, {{(u32)word, (u32)(word >> 32)}}, Flag(self.epoch()));
    }

    // Waits for what the other end states; all that preceded it there is seen. False where the waits were ended.
    __device__ __forceinline__ bool stated(Lane &self, u64 from, Header &all) const {
        __shared__ u64 words[header_words];
        waits(true);
        if (threadIdx.x < header_words) {
            const u64 at = from + 16 * threadIdx.x;
            detail::Packet<8> came = detail::load_packet<8>(at);
            if (detail::await_packet(self, at, came, Flag(self.epoch()))) words[threadIdx.x] = (u64)came.unit.word[1] << 32 | came.unit.word[0];
            detail::fence();
        }
        if (self.agree()) return false;
        waits(false);
        all = {words[0], words[1], words[2], words[3]};
        return true;
    }

    // Tells the host whether lane 0 waits.
    __device__ __forceinline__ void waits(bool waits) const {
        if (lane == 0 && threadIdx.x == 0) *(volatile u64 *)(at.waiting + 8 * ((is_receive() ? world : 0) + peer)) = waits ? 1 : 0;
    }

    // Notes that the ends do not fit, and ends the waits of this rank's other lanes.
    __device__ __forceinline__ void refuse(u64 theirs, u64 units) const {
        if (threadIdx.x != 0) return;
        const u64 note = at.verdicts + detail::verdict_bytes * ((peer + world - rank - 1) % world);
        *(volatile u64 *)note = message.bytes | (is_receive() ? 1ull << 63 : 0);
        *(volatile u64 *)(note + 8) = theirs;
        // A count may be any number.
        const bool overflows = __umul64hi(units, message.unit) != 0;
        *(volatile u64 *)(note + 16) = units == any_units ? units : overflows ? any_units - 1 : units * message.unit;
        __threadfence_system();
        *(volatile unsigned char *)(note + 8 * detail::verdict_words) = 1;
        *(volatile u64 *)abort = 1;
    }

    // What a lane moves of `units` units at most, before the last lanes have less.
    __device__ __forceinline__ u64 each(u64 units) const {
        const u64 unit = message.unit, each = (units + lanes - 1) / lanes * unit;
        // Of small units a lane has as many as the widest accesses need.
        return unit < 16 && (unit & (unit - 1)) == 0 ? (each + 15) & ~15ull : each;
    }

    // Which bytes this lane moves of `units` units, and the bytes of its chunks.
    __device__ __forceinline__ void share(u64 units, u64 &from, u64 &to, u64 &step) const {
        const u64 unit = message.unit, each = this->each(units);
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

    // Where unit number `unit` is in what is sent.
    __device__ __forceinline__ u64 source(u64 unit) const {
        const u64 number = message.index == 0 ? unit : *(const u32 *)(message.index + 4 * unit);
        return message.address + message.unit * number;
    }

    // Copies `bytes` from byte `from` of what is sent on.
    __device__ __forceinline__ void gather(u64 target, u64 from, u64 bytes) const {
        if (message.index == 0) {
            detail::copy(target, message.address + from, bytes, threadIdx.x, blockDim.x);
            return;
        }
        const u64 unit = message.unit, first = from / unit, units = bytes / unit;
        for (u64 i = threadIdx.x / 32; i < units; i += blockDim.x / 32) detail::copy(target + unit * i, source(first + i), unit, threadIdx.x & 31u, 32);
    }

    // Whether what is sent of `units` units goes as packets.
    __device__ __forceinline__ bool is_packed(u64 units) const {
        // A packet has bytes of one row.
        return each(units) <= at.packed && (message.index == 0 || message.unit % 8 == 0);
    }

    // Puts `bytes` from byte `from` of what is sent on as packets, of 8 bytes each.
    __device__ __forceinline__ void put(const Lane &self, u64 to, u64 from, u64 bytes) const {
        const u32 all = (u32)((bytes + 7) / 8);
        for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
            const u64 byte = from + 8 * i, left = bytes - 8 * i;
            const u64 address = message.index == 0 ? message.address + byte : source(byte / message.unit) + byte % message.unit;
            const Unit<8> unit = left >= 8 && address % 8 == 0 ? detail::load_unit<8>(address) : detail::load_elements<U8, 8>(address, left < 8 ? (u32)left : 8);
            detail::store_packet<8>(to + 16 * i, unit, Flag(self.epoch()));
        }
    }

    // Copies `bytes` that come as packets to `to`. False where the waits were ended.
    __device__ __forceinline__ bool take(Lane &self, u64 to, u64 from, u64 bytes) const {
        const u32 all = (u32)((bytes + 7) / 8);
        for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
            detail::Packet<8> came = detail::load_packet<8>(from + 16 * i);
            if (!detail::await_packet(self, from + 16 * i, came, Flag(self.epoch()))) break;
            const u64 address = to + 8 * i, left = bytes - 8 * i;
            if (left >= 8 && address % 8 == 0)
                detail::store_unit<8>(address, came.unit);
            else
                detail::store_elements<U8, 8>(address, came.unit, left < 8 ? (u32)left : 8);
        }
        return !self.agree();
    }

    // Where the receiver's memory is mapped here; 0 where it is not.
    __device__ __forceinline__ u64 reached(u64 told) const {
        const u64 entry = (told >> detail::offset_bits) - 1, start = told & ((1ull << detail::offset_bits) - 1);
        if (told == 0 || entry >= detail::published_entries) return 0;
        const u64 base = detail::load_relaxed(at.tables + 8 * (detail::published_entries * peer + entry));
        return base == 0 ? 0 : base + start;
    }

    // False where the waits were ended, or the ends do not fit.
    __device__ __forceinline__ bool send(Lane &self) const {
        const u64 epoch = self.epoch(), units = message.count != 0 ? count() : all_units();
        const bool whole = units <= all_units(), packed = whole && is_packed(units);
        const u64 box = header(peer, data(rank), epoch);
        u64 from = 0, end = 0, step = 0;
        if (whole) share(units, from, end, step);
        const Header own{message.bytes, message.unit, units, packed ? as_packets : as_chunks};
        if (packed) {
            state(self, box, own, false);
            put(self, packets(peer, data(rank), epoch), from, end - from);
        }
        Header theirs;
        if (!stated(self, header(rank, room(peer), epoch), theirs)) return false;
        const bool fits = theirs.bytes == message.bytes && theirs.unit == message.unit && (theirs.units == any_units || theirs.units == units);
        if (!fits || !whole) {
            // The receiver finds the same.
            if (!packed) state(self, box, own, false);
            refuse(theirs.bytes, fits ? units : theirs.units);
            return false;
        }
        if (packed) return true;
        const u64 target = reached(theirs.how);
        if (target != 0) {
            gather(target + from, from, end - from);
            state(self, box, {message.bytes, message.unit, units, stored}, true);
            if (threadIdx.x == 0) atomicAdd((u64 *)(at.verdicts + detail::verdict_bytes * world), 1ull);
            return true;
        }
        const Signals signals{abort};
        const RemoteSignals to{at.signals[peer]};
        u64 number = 0;
        do {
            const u64 bytes = end - from < step ? end - from : step;
            if (number >= 2 && signals.wait(Block(), room(peer)) != Status::ok) return false;
            gather(chunk(peer, rank, number), from, bytes);
            if (number == 0)
                state(self, box, own, true);
            else
                to.add(Block(), data(rank));
            from += bytes;
            number++;
        } while (from < end);
        return true;
    }

    __device__ __forceinline__ bool receive(Lane &self) const {
        const u64 epoch = self.epoch();
        const bool told = (message.place & tells) != 0;
        const u64 expected = told ? any_units : message.count != 0 ? count() : all_units();
        const u64 entry = (message.published >> detail::offset_bits) - 1, start = message.published & ((1ull << detail::offset_bits) - 1);
        const u64 memory = message.published == 0 ? 0 : warplink::told(rank, at.tables, entry, start, message.address);
        // Chunks of the message before have been read.
        state(self, header(peer, room(rank), epoch), {message.bytes, message.unit, expected, memory}, message.bytes > lanes * at.packed);
        Header theirs;
        if (!stated(self, header(rank, data(peer), epoch), theirs)) return false;
        const bool fits = theirs.bytes == message.bytes && theirs.unit == message.unit && (told || theirs.units == expected);
        if (!fits || theirs.units > all_units()) {
            refuse(theirs.bytes, theirs.units);
            return false;
        }
        if (told && lane == 0 && threadIdx.x == 0) tell(theirs.units);
        u64 from, end, step, number = 0;
        share(theirs.units, from, end, step);
        if (theirs.how == stored) return true;
        if (theirs.how == as_packets) return take(self, message.address + from, packets(rank, data(peer), epoch), end - from);
        const Signals signals{abort};
        const RemoteSignals to{at.signals[peer]};
        while (from < end) {
            const u64 bytes = end - from < step ? end - from : step;
            if (number > 0 && signals.wait(Block(), data(peer)) != Status::ok) return false;
            detail::copy(message.address + from, chunk(rank, peer, number), bytes, threadIdx.x, blockDim.x);
            from += bytes;
            // Whether a chunk is to come where this one was.
            if (from < end && end - from > step) to.add(Block(), room(rank));
            number++;
        }
        return true;
    }
};

// All messages of a group, of which a multiprocessor has room for two blocks. Those between the same ranks in the same direction have the same blocks, one after the
// other.
extern "C" __global__ void __launch_bounds__(512, 2) messages(const __grid_constant__ Messages at, u64 signals) {
#pragma unroll 1
    for (u32 i = 0; i < (u32)at.count; i++) {
        const Message &message = at.message[i];
        const u32 first = (u32)(message.place >> 32), lanes = (u32)(message.place >> 16) & 0xffffu;
        if (blockIdx.x < first || blockIdx.x >= first + lanes) continue;
        const End end(at, message, signals);
        // A lane of a message has its number of launches where this block of a launch would.
        Lane self(signals, end.number() - 8 * blockIdx.x);
        if (!(end.is_receive() ? end.receive(self) : end.send(self))) return;
        self.finish(gridDim.x);
    }
}
