// The steps of kernel sections, called by compiled sections and available to hand-written kernels (sm_80 and newer).
// The steps by which ranks exchange the arguments of a launch are in announcements.cuh.
//
// A lane is a one-dimensional block of whole warps, or a cluster of such blocks (sm_90 and newer) for steps that do not
// signal, wait for signals, read values or locate tensors. All its threads make every call, with the same arguments. The
// steps of a lane are ordered only by signals, packets and `sync`:
//
// | call | orders |
// |---|---|
// | put_packets, reduce of packets | a packet is read after it has arrived; nothing else |
// | signal | all earlier stores of the lane, here and at peers, are visible to the lane that waits for it |
// | wait | all accesses of the peers before their signals are visible to the lane |
// | sync | stores of one thread of the lane are visible to the others |
// | reduce, put, copy | nothing; a thread handles the same elements in each of them only if count and alignment are the same |
//
// Every wait ends when the abort word is set. The lane is then `ended`: its further steps return at once and
// store nothing, and the kernel should return after `finish`.
//
// A step moves fewer than 2^31 units of 16 bytes, or packets.
//
// With WARPLINK_ANY_ALIGNMENT, copies between places that are not aligned alike use the widest accesses that both allow,
// at the cost of more code.
//
// Addresses are of this address space (peers' memory is mapped). Memory is moved in whole units where addresses allow
// that: everywhere, for parts of tensors that begin at a multiple of 16 bytes.

#ifndef WARPLINK_STEPS_CUH
#define WARPLINK_STEPS_CUH

#include <warplink/elements.cuh>
#include <warplink/lanes.cuh>
#include <warplink/signals.cuh>

namespace warplink {

// Several places, one for each source or target of a step. If bit i of `PACKETS` is set, place i contains packets of
// `PACKET` bytes; the others are plain memory. In packets of 8 and 16 bytes, half is data; in those of 128 bytes,
// which 8 threads store together and which require a link that does not split them, 120 bytes are. Loads and stores
// access the places in order starting with number `FIRST`, which should belong to a different rank on each rank.
template <u32 COUNT, u32 PACKETS = 0, u32 PACKET = 16, u32 FIRST = 0> struct Places {
    static constexpr u32 count = COUNT;
    static constexpr u32 packets = PACKETS;
    // Data bytes of a packet, or 0 if there are none.
    static constexpr u32 packet_data = PACKETS == 0 ? 0 : PACKET == 128 ? 120 : PACKET / 2;
    static_assert(COUNT >= 1 && COUNT <= 32, "up to 32 places");
    static_assert(PACKET == 8 || PACKET == 16 || PACKET == 128, "packets have 8, 16 or 128 bytes");
    u64 at[COUNT];
    static __device__ __forceinline__ constexpr bool is_packets(u32 i) { return PACKETS >> i & 1u; }
    // The i-th place in this order.
    static __device__ __forceinline__ constexpr u32 in_turn(u32 i) { return (i + FIRST) % COUNT; }
};

namespace detail {

// A packet as loaded: half of its words are flags.
template <u32 DATA> struct Packet {
    Unit<DATA> unit;
    u32 first, second;
};

template <u32 DATA> __device__ __forceinline__ Packet<DATA> load_packet(u64 at) {
    Packet<DATA> packet;
    if constexpr (DATA == 8) {
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(packet.unit.word[0]), "=r"(packet.first), "=r"(packet.unit.word[1]), "=r"(packet.second)
                     : "l"(at)
                     : "memory");
    } else {
        asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(packet.unit.word[0]), "=r"(packet.first) : "l"(at) : "memory");
    }
    return packet;
}

template <u32 DATA> __device__ __forceinline__ void store_packet(u64 at, const Unit<DATA> &unit, Flag flag) {
    if constexpr (DATA == 8) {
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(unit.word[0]), "r"(flag.first), "r"(unit.word[1]), "r"(flag.second)
                     : "memory");
    } else {
        asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(unit.word[0]), "r"(flag.single) : "memory");
    }
}

template <u32 DATA> __device__ __forceinline__ bool carries(const Packet<DATA> &packet, Flag flag) {
    if constexpr (DATA == 8) return packet.first == flag.first && packet.second == flag.second;
    return packet.first == flag.single;
}

// Reloads a packet until it contains the flag; false if the lane has ended.
template <u32 DATA> __device__ __forceinline__ bool await_packet(Lane &lane, u64 at, Packet<DATA> &packet, Flag flag) {
    for (u32 polls = 1; !carries(packet, flag); polls++) {
        if (lane.ended || lane.gives_up(polls)) return false;
        packet = load_packet<DATA>(at);
    }
    return true;
}

// Plain units that a thread has in flight at a time, for this number of sources: 8 loads.
__device__ constexpr u32 units_under_way(u32 sources) { return sources == 1 ? 8 : sources == 2 ? 4 : sources <= 4 ? 2 : 1; }

// The operator's result for a unit of each source, in their order.
template <typename Element, typename Operator, u32 BYTES, u32 COUNT>
__device__ __forceinline__ Unit<BYTES> combined(const Unit<BYTES> (&units)[COUNT]) {
    if constexpr (COUNT == 1 && !begins<Operator>) {
        return units[0];
    } else {
        Accumulator<Element, BYTES> sum;
        sum.template begin<Operator>(units[0]);
#pragma unroll
        for (u32 i = 1; i < COUNT; i++) sum.template combine<Operator>(units[i]);
        return sum.template result<Operator>(COUNT);
    }
}

// Elements `begin` to `end` of plain places, one by one.
template <typename Element, typename Operator, typename Sources, typename Targets>
__device__ __forceinline__ void single_elements(Lane &lane, const Sources &from, const Targets &to, u64 begin, u64 end) {
    constexpr u32 size = sizeof(typename Element::Bits), bytes = Element::cell * size;
#pragma unroll 1
    for (u64 i = begin + lane.rank(); i < end; i += lane.size()) {
        Unit<bytes> units[Sources::count];
#pragma unroll
        for (u32 k = 0; k < Sources::count; k++) {
            const u32 source = Sources::in_turn(k);
            units[source] = load_elements<Element, bytes>(from.at[source] + size * i, 1);
        }
        const Unit<bytes> result = combined<Element, Operator>(units);
#pragma unroll
        for (u32 k = 0; k < Targets::count; k++) {
            const u32 target = Targets::in_turn(k);
            store_elements<Element, bytes>(to.at[target] + size * i, result, 1);
        }
    }
}

// All `count` elements of plain places that are aligned.
template <typename Element, typename Operator, typename Sources, typename Targets>
__device__ __forceinline__ void plain_units(Lane &lane, const Sources &from, const Targets &to, u64 count) {
    constexpr u32 elements = unit_elements<Element, 16>, number = units_under_way(Sources::count);
    const u32 whole = (u32)(count / elements), stride = lane.size();
#pragma unroll 1
    for (u32 unit = lane.rank(); unit < whole; unit += number * stride) {
        Unit<16> units[number][Sources::count];
#pragma unroll
        for (u32 k = 0; k < Sources::count; k++) {
            const u32 source = Sources::in_turn(k);
#pragma unroll
            for (u32 u = 0; u < number; u++) {
                if (u == 0 || unit + u * stride < whole) units[u][source] = load_unit<16>(from.at[source] + 16 * (u64)(unit + u * stride));
            }
        }
#pragma unroll
        for (u32 u = 0; u < number; u++) {
            if (u == 0 || unit + u * stride < whole) {
                const Unit<16> result = combined<Element, Operator>(units[u]);
#pragma unroll
                for (u32 k = 0; k < Targets::count; k++) store_unit<16>(to.at[Targets::in_turn(k)] + 16 * (u64)(unit + u * stride), result);
            }
        }
    }
    single_elements<Element, Operator>(lane, from, to, count - count % elements, count);
}

// Loads unit number `unit`, or its first `elements` elements, from the plain places among the sources.
template <typename Element, u32 BYTES, bool WHOLE, typename Sources>
__device__ __forceinline__ void load_plain(const Sources &from, u32 unit, u32 elements, Unit<BYTES> (&units)[Sources::count]) {
#pragma unroll
    for (u32 k = 0; k < Sources::count; k++) {
        const u32 source = Sources::in_turn(k);
        if (Sources::is_packets(source)) continue;
        if constexpr (WHOLE)
            units[source] = load_unit<BYTES>(from.at[source] + BYTES * (u64)unit);
        else
            units[source] = load_elements<Element, BYTES>(from.at[source] + BYTES * (u64)unit, elements);
    }
}

// Loads a thread's first unit, or arbitrary data if there are fewer: for whole units without a branch, and at this
// position, so that the load is in flight before anything waits for the epoch.
template <typename Element, u32 BYTES, bool WHOLE, typename Sources>
__device__ __forceinline__ void load_first(const Lane &lane, const Sources &from, u32 whole, Unit<BYTES> (&units)[Sources::count]) {
    const u32 unit = lane.rank();
    if constexpr (WHOLE) {
#pragma unroll
        for (u32 k = 0; k < Sources::count; k++) {
            const u32 source = Sources::in_turn(k);
            units[source] = load_unit_here<BYTES>(unit < whole ? from.at[source] + BYTES * (u64)unit : lane.epochs);
        }
    } else if (unit < whole) {
        load_plain<Element, BYTES, WHOLE>(from, unit, unit_elements<Element, BYTES>, units);
    }
}

// Stores the operator's result for a unit, or its first `elements` elements, to all targets.
template <typename Element, typename Operator, u32 BYTES, bool WHOLE, u32 COUNT, typename Targets>
__device__ __forceinline__ void store_combined(const Unit<BYTES> (&units)[COUNT], const Targets &to, u32 unit, u32 elements, Flag flag) {
    const Unit<BYTES> result = combined<Element, Operator>(units);
#pragma unroll
    for (u32 k = 0; k < Targets::count; k++) {
        const u32 target = Targets::in_turn(k);
        if (Targets::is_packets(target))
            store_packet(to.at[target] + 2 * BYTES * (u64)unit, result, flag);
        else if constexpr (WHOLE)
            store_unit<BYTES>(to.at[target] + BYTES * (u64)unit, result);
        else
            store_elements<Element, BYTES>(to.at[target] + BYTES * (u64)unit, result, elements);
    }
}

// The first `elements` elements of unit number `unit`, one per packet. False if the lane has ended.
template <typename Element, typename Operator, u32 BYTES, bool WHOLE, typename Sources, typename Targets>
__device__ __forceinline__ bool packet_unit(Lane &lane, const Sources &from, const Targets &to, u32 unit, u32 elements, Flag flag) {
    Unit<BYTES> units[Sources::count];
    Packet<BYTES> packets[Sources::count];
#pragma unroll
    for (u32 k = 0; k < Sources::count; k++) {
        const u32 source = Sources::in_turn(k);
        if (Sources::is_packets(source)) packets[source] = load_packet<BYTES>(from.at[source] + 2 * BYTES * (u64)unit);
    }
    load_plain<Element, BYTES, WHOLE>(from, unit, elements, units);
    bool there = true;
#pragma unroll
    for (u32 source = 0; source < Sources::count; source++) {
        if (Sources::is_packets(source)) {
            there &= await_packet(lane, from.at[source] + 2 * BYTES * (u64)unit, packets[source], flag);
            units[source] = packets[source].unit;
        }
    }
    if (there) store_combined<Element, Operator, BYTES, WHOLE>(units, to, unit, elements, flag);
    return there;
}

// All `count` elements if packets of `2 * BYTES` are among the places; `WHOLE` if plain places are aligned to
// `BYTES`. One unit at a time: polling for several finds most of them late.
template <typename Element, typename Operator, u32 BYTES, bool WHOLE, typename Sources, typename Targets>
__device__ __forceinline__ void packet_units(Lane &lane, const Sources &from, const Targets &to, u64 count) {
    constexpr u32 elements = unit_elements<Element, BYTES>;
    const u32 whole = (u32)(count / elements);
    u32 unit = lane.rank();
    Unit<BYTES> units[Sources::count];
    // In flight before the epoch arrives, which determines the packets' slot and flag.
    if constexpr (Sources::packets == 0) load_first<Element, BYTES, WHOLE>(lane, from, whole, units);
    if constexpr (Sources::packets == 0 && lane_blocks > 1) {
        // A lane of several blocks has few units for each thread: both first ones are in flight together.
        Unit<BYTES> second[Sources::count];
        const u32 next = unit + lane.size();
        if (next < whole) load_plain<Element, BYTES, WHOLE>(from, next, elements, second);
        const Flag flag(lane.epoch());
        if (unit < whole) store_combined<Element, Operator, BYTES, WHOLE>(units, to, unit, elements, flag);
        if (next < whole) store_combined<Element, Operator, BYTES, WHOLE>(second, to, next, elements, flag);
        // The loop continues with the third one.
        if (unit < whole) unit = next < whole ? next + lane.size() : next;
        if (unit < whole) load_plain<Element, BYTES, WHOLE>(from, unit, elements, units);
    }
    const Flag flag(lane.epoch());
#pragma unroll 1
    while (unit < whole) {
        if constexpr (Sources::packets == 0) {
            store_combined<Element, Operator, BYTES, WHOLE>(units, to, unit, elements, flag);
            if (unit + lane.size() < whole) load_plain<Element, BYTES, WHOLE>(from, unit + lane.size(), elements, units);
        } else if (!packet_unit<Element, Operator, BYTES, WHOLE>(lane, from, to, unit, elements, flag)) {
            return;
        }
        unit += lane.size();
    }
    // The thread whose turn it is handles the remainder, and fills its packet up with zeros.
    const u32 left = (u32)(count % elements);
    if (left != 0 && unit == whole) packet_unit<Element, Operator, BYTES, false>(lane, from, to, unit, left, flag);
}

// One thread's part of a 128-byte packet shared by 8 threads: two words of 8 bytes; the second word of the last
// thread is the flag.
struct LinePart {
    Unit<16> unit;
    __device__ __forceinline__ u64 second() const { return (u64)unit.word[2] | (u64)unit.word[3] << 32; }
};

__device__ __forceinline__ LinePart load_line_part(u64 at) {
    LinePart part;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(part.unit.word[0]), "=r"(part.unit.word[1]), "=r"(part.unit.word[2]), "=r"(part.unit.word[3])
                 : "l"(at)
                 : "memory");
    return part;
}

// Reloads until the flag has arrived. All 8 threads, those of `mask`, continue, and end, together.
__device__ __forceinline__ void await_line(Lane &lane, u64 at, LinePart &loaded, u32 mask, u64 flag) {
    for (u32 polls = 1; !lane.ended && __shfl_sync(mask, loaded.second(), 7, 8) != flag; polls++) {
        lane.ended = __any_sync(mask, lane.gives_up(polls));
        loaded = load_line_part(at);
    }
}

__device__ __forceinline__ void store_line_part(u64 at, const Unit<16> &unit, u32 part, u32 mask, u64 flag) {
    Unit<16> stored = unit;
    if (part == 7) stored.word[2] = (u32)flag, stored.word[3] = (u32)(flag >> 32);
    __syncwarp(mask);
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(stored.word[0]), "r"(stored.word[1]), "r"(stored.word[2]), "r"(stored.word[3])
                 : "memory");
}

// Two words of plain memory from `at` on, with `first` and `second` elements in them.
template <typename Element, bool WHOLE> __device__ __forceinline__ Unit<16> load_words(u64 at, u32 first, u32 second) {
    constexpr u32 elements = unit_elements<Element, 8>;
    Unit<8> words[2];
    words[0] = WHOLE && first == elements ? load_unit<8>(at) : load_elements<Element, 8>(at, first);
    words[1] = WHOLE && second == elements ? load_unit<8>(at + 8) : load_elements<Element, 8>(at + 8, second);
    return {{words[0].word[0], words[0].word[1], words[1].word[0], words[1].word[1]}};
}

template <typename Element, bool WHOLE> __device__ __forceinline__ void store_words(u64 at, const Unit<16> &unit, u32 first, u32 second) {
    constexpr u32 elements = unit_elements<Element, 8>;
    const Unit<8> words[2] = {{{unit.word[0], unit.word[1]}}, {{unit.word[2], unit.word[3]}}};
    if (WHOLE && first == elements)
        store_unit<8>(at, words[0]);
    else
        store_elements<Element, 8>(at, words[0], first);
    if (WHOLE && second == elements)
        store_unit<8>(at + 8, words[1]);
    else
        store_elements<Element, 8>(at + 8, words[1], second);
}

// All `count` elements if packets of 128 bytes are among the places; `WHOLE` if plain places are aligned to 8 bytes.
template <typename Element, typename Operator, bool WHOLE, typename Sources, typename Targets>
__device__ __forceinline__ void line_units(Lane &lane, const Sources &from, const Targets &to, u64 count) {
    const u64 flag = lane.epoch();
    constexpr u32 elements = unit_elements<Element, 8>;
    const u64 words = (count + elements - 1) / elements;
    const u32 lines = (u32)((words + 14) / 15), part = lane.rank() & 7u, mask = 0xffu << (lane.rank() & 24u);
    const auto left = [&](u64 word) { return word * elements >= count ? 0 : count - word * elements < elements ? (u32)(count - word * elements) : elements; };
    const u32 stride = lane.size() / 8;
    u32 line = lane.rank() / 8;
    if constexpr (Sources::count == 1 && Targets::count == 1 && WHOLE) {
        // Whole ones, several at a time: their loads are in flight together.
        constexpr u32 number = 2;
        const u32 whole = (u32)(count / (15 * elements));
#pragma unroll 1
        while (line < whole) {
            const u32 there = line + stride < whole ? number : 1;
            LinePart parts[number];
            Unit<16> units[number];
#pragma unroll
            for (u32 k = 0; k < number; k++) {
                if (k >= there) continue;
                const u64 at = line + k * stride;
                if constexpr (Sources::is_packets(0))
                    parts[k] = load_line_part(from.at[0] + 128 * at + 16 * part);
                else
                    units[k] = load_words<Element, true>(from.at[0] + 8 * (15 * at + 2 * part), elements, part == 7 ? 0 : elements);
            }
            if constexpr (Sources::is_packets(0)) {
#pragma unroll
                for (u32 k = 0; k < number; k++)
                    if (k < there) await_line(lane, from.at[0] + 128 * (u64)(line + k * stride) + 16 * part, parts[k], mask, flag);
                if (lane.ended) return;
                // Data loaded by another thread together with the flag may be older than it.
#pragma unroll
                for (u32 k = 0; k < number; k++)
                    if (k < there) units[k] = load_line_part(from.at[0] + 128 * (u64)(line + k * stride) + 16 * part).unit;
            }
#pragma unroll
            for (u32 k = 0; k < number; k++) {
                if (k >= there) continue;
                const Unit<16> one[1] = {units[k]};
                const Unit<16> result = combined<Element, Operator>(one);
                const u64 at = line + k * stride;
                if constexpr (Targets::is_packets(0))
                    store_line_part(to.at[0] + 128 * at + 16 * part, result, part, mask, flag);
                else
                    store_words<Element, true>(to.at[0] + 8 * (15 * at + 2 * part), result, elements, part == 7 ? 0 : elements);
            }
            line += there * stride;
        }
    }
#pragma unroll 1
    for (; line < lines; line += stride) {
        const u64 word = 15 * (u64)line + 2 * part, packed = 128 * (u64)line + 16 * part;
        const u32 first = left(word), second = part == 7 ? 0 : left(word + 1);
        Unit<16> units[Sources::count];
        LinePart parts[Sources::count];
#pragma unroll
        for (u32 k = 0; k < Sources::count; k++) {
            const u32 source = Sources::in_turn(k);
            if (Sources::is_packets(source))
                parts[source] = load_line_part(from.at[source] + packed);
            else
                units[source] = load_words<Element, WHOLE>(from.at[source] + 8 * word, first, second);
        }
#pragma unroll
        for (u32 source = 0; source < Sources::count; source++) {
            if (Sources::is_packets(source)) {
                await_line(lane, from.at[source] + packed, parts[source], mask, flag);
                // Data loaded by another thread together with the flag may be older than it.
                units[source] = load_line_part(from.at[source] + packed).unit;
            }
        }
        if (lane.ended) return;
        Unit<16> result = combined<Element, Operator>(units);
#pragma unroll
        for (u32 k = 0; k < Targets::count; k++) {
            const u32 target = Targets::in_turn(k);
            if (Targets::is_packets(target)) {
                store_line_part(to.at[target] + packed, result, part, mask, flag);
            } else {
                store_words<Element, WHOLE>(to.at[target] + 8 * word, result, first, second);
            }
        }
    }
}

// Bits set in the address of any plain place, and bits not set in all of them.
template <typename Sources, typename Targets>
__device__ __forceinline__ void alignment(const Sources &from, const Targets &to, u32 &any, u32 &apart) {
    u32 all = 0xffffffffu;
#pragma unroll
    for (u32 i = 0; i < Sources::count; i++) {
        if (!Sources::is_packets(i)) any |= (u32)from.at[i], all &= (u32)from.at[i];
    }
#pragma unroll
    for (u32 i = 0; i < Targets::count; i++) {
        if (!Targets::is_packets(i)) any |= (u32)to.at[i], all &= (u32)to.at[i];
    }
    apart = any & ~all;
}

template <typename P> __device__ __forceinline__ P advanced(P places, u64 bytes) {
#pragma unroll
    for (u32 i = 0; i < P::count; i++) places.at[i] += bytes;
    return places;
}

}  // namespace detail

// Element i of every target becomes the operator's result for elements i of all sources, combined in the order of the
// sources. Packets contain the epoch, and packets among the sources are waited for. `ALIGNED`: all plain places are
// known to be aligned to 16 bytes (8 with packets). A target may be a source at the same place.
template <typename Element, typename Operator, bool ALIGNED = false, typename Sources, typename Targets>
__device__ __forceinline__ void reduce(Lane &lane, const Sources &from, const Targets &to, u64 count) {
    constexpr u32 data = Sources::packet_data != 0 ? Sources::packet_data : Targets::packet_data;
    static_assert(Targets::packet_data == 0 || Targets::packet_data == data, "packets of one size");
    // Required alignment of plain places.
    constexpr u32 bytes = data == 0 ? 16 : data == 4 ? 4 : 8;
    // Threads that handle packets together end together.
    if constexpr (data == 120) lane.ended = __any_sync(0xffffffffu, lane.ended);
    if (lane.ended) return;
    u32 any = 0, apart = 0;
    if constexpr (!ALIGNED) detail::alignment(from, to, any, apart);
    if constexpr (data == 120) {
        if (any % bytes == 0)
            detail::line_units<Element, Operator, true>(lane, from, to, count);
        else
            detail::line_units<Element, Operator, false>(lane, from, to, count);
    } else if constexpr (data != 0) {
        if (any % bytes == 0)
            detail::packet_units<Element, Operator, data, true>(lane, from, to, count);
        else
            detail::packet_units<Element, Operator, data, false>(lane, from, to, count);
    } else if (apart % bytes != 0) {
#ifdef WARPLINK_ANY_ALIGNMENT
        if constexpr (Sources::count == 1 && Targets::count == 1 && !detail::begins<Operator>) {
            detail::copy(to.at[0], from.at[0], sizeof(typename Element::Bits) * count, lane.rank(), lane.size());
            return;
        }
#endif
        detail::single_elements<Element, Operator>(lane, from, to, 0, count);
    } else {
        // All begin at the same offset within a unit; elements before the next unit are handled separately.
        constexpr u32 size = sizeof(typename Element::Bits);
        u64 head = (bytes - any % bytes) % bytes / size;
        if (head > count) head = count;
        detail::single_elements<Element, Operator>(lane, from, to, 0, head);
        detail::plain_units<Element, Operator>(lane, detail::advanced(from, size * head), detail::advanced(to, size * head), count - head);
    }
}

// Copies `count` elements to every target, possibly at peers or in packets, from a source that may be in packets.
template <typename Element, bool ALIGNED = false, typename Sources, typename Targets>
__device__ __forceinline__ void copy(Lane &lane, const Sources &from, const Targets &to, u64 count) {
    static_assert(Sources::count == 1, "a copy has one source");
    if constexpr (Targets::count == 1 && Sources::packet_data == 0 && Targets::packet_data == 0) {
        // A rank's own part of a call in place.
        if (from.at[0] == to.at[0]) return;
    }
    reduce<Element, Add, ALIGNED>(lane, from, to, count);
}

// ---- signals

// Signals of a number of peers, each of which increments a separate word in this rank's memory, and the counts
// awaited so far. Lives as long as a kernel: construct it at the beginning, and call `finish` before the lane's.
template <u32 PEERS> struct Inbound {
    u64 word;
    u64 awaited;
    bool waited = false;

    // Signals from `number` on, one for each peer.
    __device__ __forceinline__ Inbound(Signals signals, u32 number) : word(signals.word(number + threadIdx.x)), awaited(0) {
        if (threadIdx.x < PEERS) awaited = detail::load_relaxed(word + detail::awaited_offset);
    }

    // Blocks until a further signal has arrived from each peer of the bit set `peers`, and consumes it.
    __device__ __forceinline__ void wait(Lane &lane, u32 peers = PEERS == 32 ? 0xffffffffu : (1u << PEERS) - 1) {
        if (threadIdx.x < PEERS && peers >> threadIdx.x & 1u) {
            awaited++;
            waited = true;
            for (u32 polls = 1; !lane.ended; polls++) {
                const u64 seen = detail::load_acquire(word);
                if (seen >= detail::ended_epoch) {
                    lane.ended = true;
                    break;
                }
                if ((long long)(seen - awaited) >= 0) break;
                if (lane.gives_up(polls)) break;
            }
        }
        lane.agree();
    }

    // Counts of words that this lane did not wait for are left alone: in a kernel of messages another lane may have raised them
    // since this one loaded them.
    __device__ __forceinline__ void finish() const {
        if (waited) *(volatile u64 *)(word + detail::awaited_offset) = awaited;
    }
};

// Signals of a lane to the lane of the same number on each peer. Only this lane increments these words, so it stores
// the count of its increments, which needs no atomic operation on a peer's memory. `counts` is shared memory for a
// number for each peer; the lane's own signals keep the counts between kernels.
template <u32 PEERS> struct Outbound {
    u64 *counts;
    u64 sent;

    // Signals from `number` on of this rank, one for each peer. The lane synchronizes before its first signal.
    __device__ __forceinline__ Outbound(Signals signals, u32 number, u64 *counts) : counts(counts), sent(signals.word(number) + detail::sent_offset) {
        if (threadIdx.x < PEERS) counts[threadIdx.x] = detail::load_relaxed(sent + detail::signal_bytes * threadIdx.x);
    }

    // Increments the words of all places, one at each of `peers`, after all earlier stores of the lane.
    template <u32 COUNT> __device__ __forceinline__ void signal(Lane &lane, const Places<COUNT> &words, const u32 (&peers)[COUNT]) {
        // A lane that has ended has skipped stores that the signal would cover.
        if (lane.agree()) return;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            if (threadIdx.x != i) continue;
            const u64 count = ++counts[peers[i]];
            // Waits were aborted, and so were the peers'.
            if (count >= detail::ended_epoch) continue;
            detail::store_release(words.at[i], count);
            *(volatile u64 *)(sent + detail::signal_bytes * peers[i]) = count;
        }
    }
};

// Increments the words of all places, after all earlier stores of the lane. Several lanes of this rank may increment
// the same word, and no other rank does: they take turns by the word of this rank at the same place of `sent`, which
// `Outbound` uses for words of a single lane.
template <u32 COUNT> __device__ __forceinline__ void signal(Lane &lane, const Places<COUNT> &words, const Places<COUNT> &sent) {
    if (lane.agree()) return;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        if (threadIdx.x != i) continue;
        const u64 claim = sent.at[i] - detail::sent_offset + detail::claim_offset;
        u32 polls = 1;
        // The lock is a word of signals, which the host overwrites when it aborts waits.
        while (!detail::claim(claim) && !lane.gives_up(polls)) polls++;
        if (lane.ended) continue;
        // The previous lane's store there precedes this one's.
        detail::fence();
        const u64 count = detail::load_relaxed(sent.at[i]) + 1;
        if (count < detail::ended_epoch) {
            *(volatile u64 *)sent.at[i] = count;
            detail::store_release(words.at[i], count);
        }
        detail::release(claim);
    }
}

}  // namespace warplink

#endif
