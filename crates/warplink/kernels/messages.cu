// Messages between pairs of ranks, on any memory: sends and receives that progress concurrently.
//
// Each message has lanes (blocks) at both ends that serve it alone; lane i of the sender interacts only with lane i
// of the receiver. Both ends count the messages of a lane; the count is the flag of the packets of a message, and its
// parity selects one of two slots for them. Both ends send a header, as packets, to a slot of the other end. For one
// lane of a message:
//
// | sender | receiver |
// |---|---|
// | sends its header; puts the first bytes as packets | sends its header, with the location of its memory if that is published |
// | waits for the receiver's header; compares | waits for the sender's header; compares; copies the packets to their destination |
// | if the receiver's memory is published: stores the rest at its destination, and reports that in the tail | waits for the tail |
// | else: stores a chunk, and reports that in the tail; stores each further chunk, and signals | copies each chunk to its destination |
// | waits before the third chunk and each later one | signals that a chunk was copied, if another one will reuse its slot |
//
// A short message fits into the first bytes, so it takes the time of one store; in a long one, they hide the latency
// of the header. The counts are the only state that remains for the next message or launch.
//
// Why nothing is overwritten too early: a receiver sends its header of message k after it has completed k - 1. A
// sender has completed k - 1 when it has received the header of k - 1, so k - 2, which used the slot of k, is
// complete at both ends; and it stores chunks of k only after it has received the header of k.
//
// The length of a message may be a number in device memory, up to a limit that both ends know.

#include <warplink/announcements.cuh>

using namespace warplink;

// Must match the host.
constexpr u32 max_ranks = 8, max_messages = 64;
constexpr u64 any_units = ~0ull;
constexpr u64 chunks = 4, least_chunk = 16 << 10;
constexpr u64 receives = 1u << 8, tells = 1u << 9, wide = 1u << 10;

// Packets of a header, and bytes of a slot for them and the tail.
constexpr u32 header_words = 4;
constexpr u64 slot_bytes = 128;

// Encoding of the first bytes of a message, which its sender reports in the header, and of the rest, in the tail.
constexpr u64 as_nothing = 0, as_packets = 1, as_lines = 2;
constexpr u32 as_chunks = 1, stored = 2;

// Data bytes of a 128-byte packet, which 8 threads store together.
constexpr u64 line_data = 120;

// 128-byte packets that a thread has a part of in flight.
constexpr u32 lines_in_flight = 2;

struct Message {
    // The peer's rank in bits 0 to 7, then `receives`, `tells` and `wide`, the number of lanes in bits 16 to 31, and
    // the number of the first block from bit 32 on.
    u64 place;
    u64 address;
    // Maximum bytes, and bytes of a unit; a lane moves whole units.
    u64 bytes, unit;
    // Address of the number of units, which is read, or stored if the message `tells`: 32 bits, or 64 if it is
    // `wide`; 0 if the message has all bytes.
    u64 count;
    // Address of the index of each unit in the sent data, 32 bits each; 0 if units are contiguous.
    u64 index;
    // For a receive: one more than the index of its allocation among those that this rank publishes, above
    // `offset_bits`, and the offset of its first byte; 0 if it is not published.
    u64 published;
};

struct Messages {
    // Workspace of each rank, as mapped here.
    u64 workspace[max_ranks], signals[max_ranks];
    // For each direction and peer, whether lane 0 waits for it; then, for each direction, peer and lane, the number
    // of previous messages. And for each peer, the values of a header that did not match; then the number of lanes
    // that stored sent data directly at its destination.
    u64 waiting, verdicts;
    u64 rank, world;
    // Maximum lanes of a message, bytes of a chunk, and of a packet slot. Per lane, the maximum bytes sent as 16-byte
    // packets, and the maximum of a longer message sent as 128-byte packets, or 0 if links split these. And the
    // number of messages.
    u64 lanes, chunk, room, packed, lined, count;
    // Mappings of published allocations.
    u64 tables;
    Message message[max_messages];
};

// Header that an end sends about a message.
struct Header {
    // Maximum bytes, bytes of a unit, and number of units, if known.
    u64 bytes, unit, units;
    // From a receiver, the location of its memory if published; from a sender, the encoding of the first bytes.
    u64 how;

    __device__ __forceinline__ u64 word(u32 number) const { return number == 0 ? bytes : number == 1 ? unit : number == 2 ? units : how; }
};

// The first 8 bytes of `left`, at any address.
static __device__ __forceinline__ Unit<8> load_bytes(u64 address, u64 left) {
    if (left >= 8 && address % 8 == 0) return detail::load_unit<8>(address);
    u64 word = 0;
#pragma unroll 1
    for (u32 i = 0; i < 8 && i < left; i++) word |= (u64) * (const unsigned char *)(address + i) << 8 * i;
    return {{(u32)word, (u32)(word >> 32)}};
}

static __device__ __forceinline__ void store_bytes(u64 address, const Unit<8> &unit, u64 left) {
    if (left >= 8 && address % 8 == 0) return detail::store_unit<8>(address, unit);
    const u64 word = (u64)unit.word[1] << 32 | unit.word[0];
#pragma unroll 1
    for (u32 i = 0; i < 8 && i < left; i++) *(unsigned char *)(address + i) = (unsigned char)(word >> 8 * i);
}

// A thread's part of 128-byte packets, which 8 threads store and load together: two words of 8 bytes; the second word
// of the last thread is the flag.
struct Line {
    u32 part, mask, first, stride;

    __device__ __forceinline__ Line() : part(threadIdx.x & 7u), mask(0xffu << (threadIdx.x & 24u)), first(threadIdx.x / 8), stride(blockDim.x / 8) {}

    // First byte of the data in the part of packet `i`.
    __device__ __forceinline__ u64 byte(u32 i) const { return line_data * i + 16 * part; }

    __device__ __forceinline__ void store(u64 to, u32 i, const Unit<8> &first, const Unit<8> &second, u64 flag) const {
        const u32 low = part == 7 ? (u32)flag : second.word[0], high = part == 7 ? (u32)(flag >> 32) : second.word[1];
        __syncwarp(mask);
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to + 128 * (u64)i + 16 * part), "r"(first.word[0]), "r"(first.word[1]), "r"(low),
                     "r"(high)
                     : "memory");
    }

    __device__ __forceinline__ detail::LinePart load(u64 from, u32 i) const { return detail::load_line_part(from + 128 * (u64)i + 16 * part); }

    // Reload until the flag has arrived. All 8 threads continue, and end, together.
    __device__ __forceinline__ void await(Lane &self, u64 from, u32 i, detail::LinePart &loaded, u64 flag) const {
        for (u32 polls = 1; !self.ended && __shfl_sync(mask, loaded.second(), 7, 8) != flag; polls++) {
            self.ended = __any_sync(mask, self.gives_up(polls));
            loaded = load(from, i);
        }
    }
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

    // Address of the number of messages of this lane.
    __device__ __forceinline__ u64 number() const {
        return at.waiting + 8 * (2 * world + ((is_receive() ? world : 0) + peer) * at.lanes + lane);
    }

    // Index of a lane's signal or box for `from`: data at receivers, credit at senders.
    __device__ __forceinline__ u32 data(u32 from) const { return lane * world + from; }
    __device__ __forceinline__ u32 room(u32 from) const { return ((u32)at.lanes + lane) * world + from; }

    // Slot of message number `epoch` for a header, and for packets, in box `box` of `owner`.
    __device__ __forceinline__ u64 header(u32 owner, u32 box, u64 epoch) const { return at.workspace[owner] + slot_bytes * (2 * box + epoch % 2); }
    __device__ __forceinline__ u64 packets(u32 owner, u32 box, u64 epoch) const {
        const u64 headers = 4 * slot_bytes * at.lanes * world;
        return at.workspace[owner] + headers + at.room * (2 * box + epoch % 2);
    }

    // Like `packets`, for 128-byte packets. They never share memory with the others, since their data may equal the
    // flag of a packet.
    __device__ __forceinline__ u64 packed_lines(u32 owner, u32 box, u64 epoch) const { return packets(owner, box, epoch) + ((2 * at.packed + 127) & ~127ull); }

    // Chunk number `number` from `from`, at `owner`.
    __device__ __forceinline__ u64 chunk(u32 owner, u32 from, u64 number) const {
        const u64 slots = (4 * slot_bytes + 2 * at.room) * at.lanes * world;
        return at.workspace[owner] + slots + (2 * (u64)data(from) + number % 2) * at.chunk;
    }

    // Sends this end's header.
    __device__ __forceinline__ void state(const Lane &self, u64 to, const Header &all) const {
        if (threadIdx.x >= header_words) return;
        const u64 word = all.word(threadIdx.x);
        detail::store_packet<8>(to + 16 * threadIdx.x, {{(u32)word, (u32)(word >> 32)}}, Flag(self.epoch()));
    }

    // Reports the encoding of the rest in the tail, after all earlier accesses of the lane.
    __device__ __forceinline__ void state_tail(const Lane &self, u64 to, u32 how) const {
        __syncthreads();
        if (threadIdx.x != 0) return;
        // Behind the barrier, covers the stores of all threads: a receiver that sees the tail sees their data.
        detail::fence();
        detail::store_packet<8>(to + 16 * header_words, {{how, 0}}, Flag(self.epoch()));
    }

    // Waits for the tail; all earlier accesses of the peer are visible then. 0 if waits were aborted.
    __device__ __forceinline__ u32 tail(Lane &self, u64 from) const {
        __shared__ u32 how;
        if (threadIdx.x == 0) {
            const u64 at = from + 16 * header_words;
            detail::Packet<8> came = detail::load_packet<8>(at);
            detail::await_packet(self, at, came, Flag(self.epoch()));
            how = came.unit.word[0];
            // Pairs with the fence before the tail; packets are loaded without acquire.
            detail::fence();
        }
        return self.agree() ? 0 : how;
    }

    // Waits for the other end's header. False if waits were aborted. Earlier accesses of the peer need not be
    // visible: packets need no fence, which would wait for all puts of this lane.
    __device__ __forceinline__ bool stated(Lane &self, u64 from, Header &all) const {
        __shared__ u64 words[header_words];
        waits(true);
        if (threadIdx.x < header_words) {
            const u64 at = from + 16 * threadIdx.x;
            detail::Packet<8> came = detail::load_packet<8>(at);
            if (detail::await_packet(self, at, came, Flag(self.epoch()))) words[threadIdx.x] = (u64)came.unit.word[1] << 32 | came.unit.word[0];
        }
        if (self.agree()) return false;
        waits(false);
        all = {words[0], words[1], words[2], words[3]};
        return true;
    }

    // Records for the host whether lane 0 waits.
    __device__ __forceinline__ void waits(bool waits) const {
        if (lane == 0 && threadIdx.x == 0) *(volatile u64 *)(at.waiting + 8 * ((is_receive() ? world : 0) + peer)) = waits ? 1 : 0;
    }

    // Increments signal `number` of the peer, which only this lane does, after all its earlier accesses. This rank's
    // own signal `own` stores the count, so that no atomic operation on the peer's memory is needed.
    __device__ __forceinline__ void signal(u32 number, u32 own) const {
        __syncthreads();
        if (threadIdx.x != 0) return;
        const u64 sent = Signals{abort}.word(own) + detail::sent_offset, count = detail::load_relaxed(sent) + 1;
        // Waits were aborted, and so were the peer's.
        if (count >= detail::ended_epoch) return;
        *(volatile u64 *)sent = count;
        detail::store_release(at.signals[peer] + detail::signal_bytes * (1 + number), count);
    }

    // Records that the ends do not match, and aborts the waits of this rank's other lanes.
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

    // Number of units in `bytes`. A 64-bit division takes as long as a packet.
    __device__ __forceinline__ u64 units_of(u64 bytes) const {
        const u64 unit = message.unit;
        if ((unit & (unit - 1)) == 0) return bytes >> (__ffsll(unit) - 1);
        return (bytes | unit) >> 32 == 0 ? (u32)bytes / (u32)unit : bytes / unit;
    }

    // Maximum bytes that a lane moves of `units` units. The number of lanes is a power of two.
    __device__ __forceinline__ u64 each(u64 units) const {
        const u64 unit = message.unit, each = (units + lanes - 1 >> (__ffs(lanes) - 1)) * unit;
        // Small units are grouped to fill the widest accesses.
        return unit < 16 && (unit & (unit - 1)) == 0 ? (each + 15) & ~15ull : each;
    }

    // Byte range that this lane moves of `units` units, and the bytes of its chunks.
    __device__ __forceinline__ void share(u64 units, u64 &from, u64 &to, u64 &step) const {
        const u64 unit = message.unit, each = this->each(units);
        // The last unit of a message without a count may be partial.
        const u64 all = message.count != 0 || units * unit < message.bytes ? units * unit : message.bytes;
        from = lane * each < all ? lane * each : all;
        to = all - from < each ? all : from + each;
        // Several chunks, so that one is copied out while the next arrives.
        u64 piece = each / chunks < least_chunk ? least_chunk : each / chunks;
        // Each starts with the same alignment as the first, for the widest accesses.
        piece = (piece + 15) & ~15ull;
        if (piece < unit) piece = unit;
        step = units_of(piece < at.chunk ? piece : at.chunk) * unit;
    }

    // The count in device memory. The marker for unknown counts is invalid.
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

    __device__ __forceinline__ u64 all_units() const { return units_of(message.bytes + message.unit - 1); }

    // Address of unit number `unit` of the sent data.
    __device__ __forceinline__ u64 source(u64 unit) const {
        const u64 number = message.index == 0 ? unit : *(const u32 *)(message.index + 4 * unit);
        return message.address + message.unit * number;
    }

    // Copies `bytes` bytes, from byte `from` of the sent data on.
    __device__ __forceinline__ void gather(u64 target, u64 from, u64 bytes) const {
        if (message.index == 0) {
            detail::copy(target, message.address + from, bytes, threadIdx.x, blockDim.x);
            return;
        }
        const u64 unit = message.unit, first = units_of(from), units = units_of(bytes);
        for (u64 i = threadIdx.x / 32; i < units; i += blockDim.x / 32) detail::copy(target + unit * i, source(first + i), unit, threadIdx.x & 31u, 32);
    }

    // Encoding of the first bytes when `units` units are sent.
    __device__ __forceinline__ u64 first_of(u64 units) const {
        // Each 8 bytes of a packet belong to one row.
        if (message.index != 0 && message.unit % 8 != 0) return as_nothing;
        if (each(units) <= at.packed) return as_packets;
        // If there are many rows, locating each takes longer than waiting for the receiver.
        const bool few = message.index == 0 || each(units) <= at.lined;
        return few && message.address % 8 == 0 && at.lined >= message.unit ? as_lines : as_nothing;
    }

    // Number of leading bytes, of `bytes`, with this encoding.
    __device__ __forceinline__ u64 first_bytes(u64 how, u64 bytes) const {
        const u64 most = how == as_packets ? bytes : how == as_lines ? units_of(at.lined) * message.unit : 0;
        return bytes < most ? bytes : most;
    }

    // Address of byte `byte` of the sent data.
    __device__ __forceinline__ u64 source_of(u64 byte) const {
        if (message.index == 0) return message.address + byte;
        const u64 unit = units_of(byte);
        return source(unit) + (byte - unit * message.unit);
    }

    // Puts `bytes` bytes, from byte `from` of the sent data on, as 16-byte packets.
    __device__ __forceinline__ void put(const Lane &self, u64 to, u64 from, u64 bytes) const {
        const Flag flag(self.epoch());
#pragma unroll 1
        for (u64 byte = 8 * threadIdx.x; byte < bytes; byte += 8 * blockDim.x)
            detail::store_packet(to + 2 * byte, load_bytes(source_of(from + byte), bytes - byte), flag);
    }

    // Waits for `bytes` bytes in 16-byte packets and copies them to `to`. False if waits were aborted.
    __device__ __forceinline__ bool take(Lane &self, u64 to, u64 from, u64 bytes) const {
        const Flag flag(self.epoch());
#pragma unroll 1
        for (u64 byte = 8 * threadIdx.x; byte < bytes; byte += 8 * blockDim.x) {
            detail::Packet<8> came = detail::load_packet<8>(from + 2 * byte);
            if (!detail::await_packet(self, from + 2 * byte, came, flag)) break;
            store_bytes(to + byte, came.unit, bytes - byte);
        }
        return !self.agree();
    }

    // Like `put`, as 128-byte packets, from addresses that are multiples of 8.
    __device__ __forceinline__ void put_lines(const Lane &self, u64 to, u64 from, u64 bytes) const {
        const Line line;
        const u32 whole = (u32)(bytes / line_data);
        const u64 flag = self.epoch();
        u32 i = line.first;
#pragma unroll 1
        for (; i + (lines_in_flight - 1) * line.stride < whole; i += lines_in_flight * line.stride) {
            Unit<8> words[lines_in_flight][2];
#pragma unroll
            for (u32 k = 0; k < lines_in_flight; k++) {
                const u64 byte = from + line.byte(i + k * line.stride);
                words[k][0] = detail::load_unit<8>(source_of(byte));
                if (line.part != 7) words[k][1] = detail::load_unit<8>(source_of(byte + 8));
            }
#pragma unroll
            for (u32 k = 0; k < lines_in_flight; k++) line.store(to, i + k * line.stride, words[k][0], words[k][1], flag);
        }
#pragma unroll 1
        for (; line_data * i < bytes; i += line.stride) {
            const u64 byte = line.byte(i);
            Unit<8> first = {}, second = {};
            if (byte < bytes) first = load_bytes(source_of(from + byte), bytes - byte);
            if (byte + 8 < bytes) second = load_bytes(source_of(from + byte + 8), bytes - byte - 8);
            line.store(to, i, first, second, flag);
        }
    }

    // Like `take`, for 128-byte packets.
    __device__ __forceinline__ bool take_lines(Lane &self, u64 to, u64 from, u64 bytes) const {
        const Line line;
        // Data whose address is not a multiple of 8 has none.
        const u32 whole = to % 8 == 0 ? (u32)(bytes / line_data) : 0;
        const u64 flag = self.epoch();
        u32 i = line.first;
#pragma unroll 1
        for (; i + (lines_in_flight - 1) * line.stride < whole; i += lines_in_flight * line.stride) {
            detail::LinePart parts[lines_in_flight];
#pragma unroll
            for (u32 k = 0; k < lines_in_flight; k++) parts[k] = line.load(from, i + k * line.stride);
#pragma unroll
            for (u32 k = 0; k < lines_in_flight; k++) line.await(self, from, i + k * line.stride, parts[k], flag);
            if (self.ended) break;
            // Data loaded by another thread together with the flag may be older than it.
#pragma unroll
            for (u32 k = 0; k < lines_in_flight; k++) parts[k] = line.load(from, i + k * line.stride);
#pragma unroll
            for (u32 k = 0; k < lines_in_flight; k++) {
                const u64 at = to + line.byte(i + k * line.stride);
                detail::store_unit<8>(at, {{parts[k].unit.word[0], parts[k].unit.word[1]}});
                if (line.part != 7) detail::store_unit<8>(at + 8, {{parts[k].unit.word[2], parts[k].unit.word[3]}});
            }
        }
#pragma unroll 1
        for (; line_data * i < bytes && !self.ended; i += line.stride) {
            detail::LinePart part = line.load(from, i);
            line.await(self, from, i, part, flag);
            if (self.ended) break;
            part = line.load(from, i);
            const u64 byte = line.byte(i);
            if (byte < bytes) store_bytes(to + byte, {{part.unit.word[0], part.unit.word[1]}}, bytes - byte);
            if (line.part != 7 && byte + 8 < bytes) store_bytes(to + byte + 8, {{part.unit.word[2], part.unit.word[3]}}, bytes - byte - 8);
        }
        return !self.agree();
    }

    // Address at which the receiver's memory is mapped here; 0 if it is not.
    __device__ __forceinline__ u64 reached(u64 place) const {
        const u64 entry = (place >> detail::offset_bits) - 1, start = place & ((1ull << detail::offset_bits) - 1);
        if (place == 0 || entry >= detail::published_entries) return 0;
        const u64 base = detail::load_relaxed(at.tables + 8 * (detail::published_entries * peer + entry));
        return base == 0 ? 0 : base + start;
    }

    // False if waits were aborted, or the ends do not match.
    __device__ __forceinline__ bool send(Lane &self) const {
        const u64 units = message.count != 0 ? count() : all_units();
        const bool whole = units <= all_units();
        const u64 how = whole ? first_of(units) : as_nothing;
        u64 from = 0, end = 0, step = 0;
        if (whole) share(units, from, end, step);
        const u64 epoch = self.epoch(), box = header(peer, data(rank), epoch), first = first_bytes(how, end - from);
        state(self, box, {message.bytes, message.unit, units, how});
        if (how == as_packets)
            put(self, packets(peer, data(rank), epoch), from, first);
        else if (how == as_lines)
            put_lines(self, packed_lines(peer, data(rank), epoch), from, first);
        Header theirs;
        if (!stated(self, header(rank, room(peer), epoch), theirs)) return false;
        const bool fits = theirs.bytes == message.bytes && theirs.unit == message.unit && (theirs.units == any_units || theirs.units == units);
        // The receiver comes to the same conclusion.
        if (!fits || !whole) {
            refuse(theirs.bytes, fits ? units : theirs.units);
            return false;
        }
        from += first;
        if (from >= end) return true;
        const u64 target = reached(theirs.how);
        // The receiver's accesses before its header precede all stores from here on.
        detail::fence();
        if (target != 0) {
            gather(target + from, from, end - from);
            state_tail(self, box, stored);
            if (threadIdx.x == 0) atomicAdd((u64 *)(at.verdicts + detail::verdict_bytes * world), 1ull);
            return true;
        }
        const Signals signals{abort};
        for (u64 number = 0; from < end; number++) {
            const u64 bytes = end - from < step ? end - from : step;
            if (number >= 2 && signals.wait(Block(), room(peer)) != Status::ok) return false;
            gather(chunk(peer, rank, number), from, bytes);
            if (number == 0)
                state_tail(self, box, as_chunks);
            else
                signal(data(rank), data(peer));
            from += bytes;
        }
        return true;
    }

    __device__ __forceinline__ bool receive(Lane &self) const {
        const bool told = (message.place & tells) != 0;
        const u64 expected = told ? any_units : message.count != 0 ? count() : all_units();
        const u64 entry = (message.published >> detail::offset_bits) - 1, start = message.published & ((1ull << detail::offset_bits) - 1);
        const u64 memory = message.published == 0 ? 0 : warplink::told(rank, at.tables, entry, start, message.address);
        // Not earlier: the load of the epoch is in flight meanwhile.
        const u64 epoch = self.epoch(), box = header(rank, data(peer), epoch);
        // Chunks of the previous message have been read. A message without chunks needs no order.
        if (message.bytes > lanes * (at.lined > at.packed ? at.lined : at.packed)) detail::fence();
        state(self, header(peer, room(rank), epoch), {message.bytes, message.unit, expected, memory});
        Header theirs;
        if (!stated(self, box, theirs)) return false;
        const bool fits = theirs.bytes == message.bytes && theirs.unit == message.unit && (told || theirs.units == expected);
        if (!fits || theirs.units > all_units()) {
            refuse(theirs.bytes, theirs.units);
            return false;
        }
        if (told && lane == 0 && threadIdx.x == 0) tell(theirs.units);
        u64 from, end, step;
        share(theirs.units, from, end, step);
        const u64 first = first_bytes(theirs.how, end - from);
        if (theirs.how == as_packets && !take(self, message.address + from, packets(rank, data(peer), epoch), first)) return false;
        if (theirs.how == as_lines && !take_lines(self, message.address + from, packed_lines(rank, data(peer), epoch), first)) return false;
        from += first;
        if (from >= end) return true;
        const u32 rest = tail(self, box);
        if (rest != as_chunks) return rest == stored;
        const Signals signals{abort};
        for (u64 number = 0; from < end; number++) {
            const u64 bytes = end - from < step ? end - from : step;
            if (number > 0 && signals.wait(Block(), data(peer)) != Status::ok) return false;
            detail::copy(message.address + from, chunk(rank, peer, number), bytes, threadIdx.x, blockDim.x);
            from += bytes;
            // Whether another chunk will reuse this slot.
            if (from < end && end - from > step) signal(room(rank), room(peer));
        }
        return true;
    }
};

// All messages of a group. Those between the same ranks in the same direction use the same blocks, one after the
// other. A multiprocessor has space for two blocks.
extern "C" __global__ void __launch_bounds__(512, 2) messages(const __grid_constant__ Messages at, u64 signals) {
#pragma unroll 1
    for (u32 i = 0; i < (u32)at.count; i++) {
        const Message &message = at.message[i];
        const u32 first = (u32)(message.place >> 32), lanes = (u32)(message.place >> 16) & 0xffffu;
        if (blockIdx.x < first || blockIdx.x >= first + lanes) continue;
        const End end(at, message, signals);
        // A lane of a message stores its number of launches in the word that a block of a launch would use.
        Lane self(signals, end.number() - 8 * blockIdx.x);
        if (!(end.is_receive() ? end.receive(self) : end.send(self))) return;
        self.finish(gridDim.x);
    }
}
