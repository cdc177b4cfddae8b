// Functions of rows, called by compiled sections for steps with an expression between sources and targets; a part of
// sections.cuh.
//
// A row is cut into units of 8 elements; thread t of a lane handles units t, t + size, …, of every operand, whatever
// the alignment: so the order of sums along the row depends only on its length and the lane's threads. All
// computations are in f32, without contraction. Sources are read before any target is stored, except for units that
// are read again (Row::each) or later (Row::next), each by the thread that stores it.

#ifndef WARPLINK_ROWS_CUH
#define WARPLINK_ROWS_CUH

#include <warplink/steps.cuh>

namespace warplink {

// Elements of a unit. Must match the host.
constexpr u32 row_unit = 8;

// Bytes that targets of rows store as integers: values are truncated, and saturate at 0 and 255.
struct RowByte {
    typedef unsigned char Bits;
    static constexpr u32 cell = 4;
    static __device__ __forceinline__ void pack(const float *value, u32 *word) {
        *word = 0;
#pragma unroll
        for (u32 i = 0; i < cell; i++) *word |= min(__float2uint_rz(value[i]), 255u) << 8 * i;
    }
};

namespace detail {

// A unit in its memory layout.
template <typename Element> struct RowUnit {
    static constexpr u32 bytes = row_unit * sizeof(typename Element::Bits), words = bytes / 4;
    u32 word[words];

    __device__ __forceinline__ void values(float (&value)[row_unit]) const {
#pragma unroll
        for (u32 i = 0; i < words; i++) Element::unpack(word + i, value + Element::cell * i);
    }

    __device__ __forceinline__ void set(const float (&value)[row_unit]) {
#pragma unroll
        for (u32 i = 0; i < words; i++) Element::pack(value + Element::cell * i, word + i);
    }
};

// How many of `count` elements are in piece `i` of those with `elements`.
__device__ __forceinline__ u32 in_piece(u32 count, u32 elements, u32 i) {
    return count <= elements * i ? 0 : count - elements * i < elements ? count - elements * i : elements;
}

// The widest accesses that make up a unit.
template <typename Element> constexpr u32 row_access = RowUnit<Element>::bytes < 16 ? RowUnit<Element>::bytes : 16;

// The first `count` elements of a unit; `whole` if it may be accessed as a whole.
template <typename Element> __device__ __forceinline__ RowUnit<Element> load_row_unit(u64 at, u32 count, bool whole) {
    constexpr u32 bytes = row_access<Element>, elements = unit_elements<Element, bytes>;
    RowUnit<Element> unit;
#pragma unroll
    for (u32 i = 0; i < RowUnit<Element>::bytes / bytes; i++) {
        const Unit<bytes> piece = whole && count == row_unit ? load_unit<bytes>(at + bytes * i)
                                                             : load_elements<Element, bytes>(at + bytes * i, in_piece(count, elements, i));
#pragma unroll
        for (u32 k = 0; k < bytes / 4; k++) unit.word[bytes / 4 * i + k] = piece.word[k];
    }
    return unit;
}

template <typename Element> __device__ __forceinline__ void store_row_unit(u64 at, const RowUnit<Element> &unit, u32 count, bool whole) {
    constexpr u32 bytes = row_access<Element>, elements = unit_elements<Element, bytes>;
#pragma unroll
    for (u32 i = 0; i < RowUnit<Element>::bytes / bytes; i++) {
        Unit<bytes> piece;
#pragma unroll
        for (u32 k = 0; k < bytes / 4; k++) piece.word[k] = unit.word[bytes / 4 * i + k];
        if (whole && count == row_unit)
            store_unit<bytes>(at + bytes * i, piece);
        else
            store_elements<Element, bytes>(at + bytes * i, piece, in_piece(count, elements, i));
    }
}

// Unit `unit` of a row in packets with `DATA` bytes of data each, of which a thread loads all of its own.
template <typename Element, u32 DATA> struct RowPackets {
    static constexpr u32 elements = unit_elements<Element, DATA>, number = row_unit / elements;
    Packet<DATA> packet[number];

    __device__ __forceinline__ void load(u64 row, u32 unit, u32 count) {
        const u64 at = row + 2 * RowUnit<Element>::bytes * (u64)unit;
#pragma unroll
        for (u32 i = 0; i < number; i++)
            if (elements * i < count) packet[i] = load_packet<DATA>(at + 2 * DATA * i);
    }

    __device__ __forceinline__ bool arrived(u32 count, Flag flag) const {
        bool there = true;
#pragma unroll
        for (u32 i = 0; i < number; i++) there &= elements * i >= count || carries(packet[i], flag);
        return there;
    }

    __device__ __forceinline__ RowUnit<Element> values(u64, u32, u32) const {
        RowUnit<Element> unit;
#pragma unroll
        for (u32 i = 0; i < number; i++) {
#pragma unroll
            for (u32 k = 0; k < DATA / 4; k++) unit.word[DATA / 4 * i + k] = packet[i].unit.word[k];
        }
        return unit;
    }
};

// The same in packets of 128 bytes: a unit is in one of them, or in two. Their flags are loaded first, then the data, which
// is there with its flag, as packets arrive whole.
template <typename Element> struct RowPackets<Element, 120> {
    static constexpr u32 elements = unit_elements<Element, 8>, number = row_unit / elements;
    u64 first, last;

    // The words of a unit that `count` elements are in.
    static __device__ __forceinline__ u32 words(u32 count) { return (count + elements - 1) / elements; }
    static __device__ __forceinline__ u64 line(u64 row, u32 word) { return row + 128 * (u64)(word / 15); }

    __device__ __forceinline__ void load(u64 row, u32 unit, u32 count) {
        first = load_relaxed(line(row, number * unit) + 120);
        last = number == 1 ? first : load_relaxed(line(row, number * unit + words(count) - 1) + 120);
    }

    __device__ __forceinline__ bool arrived(u32, Flag flag) const { return first == flag.whole && last == flag.whole; }

    __device__ __forceinline__ RowUnit<Element> values(u64 row, u32 unit, u32 count) const {
        RowUnit<Element> all;
#pragma unroll
        for (u32 i = 0; i < number; i++) {
            const u32 word = number * unit + i;
            const u64 value = elements * i < count ? load_relaxed(line(row, word) + 8 * (word % 15)) : 0;
            all.word[2 * i] = (u32)value, all.word[2 * i + 1] = (u32)(value >> 32);
        }
        return all;
    }
};

template <typename Element, u32 DATA>
__device__ __forceinline__ void store_row_packets(u64 at, const RowUnit<Element> &unit, u32 count, Flag flag) {
    constexpr u32 elements = unit_elements<Element, DATA>;
#pragma unroll
    for (u32 i = 0; i < row_unit / elements; i++) {
        Unit<DATA> piece;
#pragma unroll
        for (u32 k = 0; k < DATA / 4; k++) piece.word[k] = unit.word[DATA / 4 * i + k];
        if (elements * i < count) store_packet<DATA>(at + 2 * DATA * i, piece, flag);
    }
}

}  // namespace detail

// ---- operators along a row
struct RowSum {
    static __device__ __forceinline__ float none() { return 0.0f; }
    static __device__ __forceinline__ float combine(float a, float b) { return detail::plus(a, b); }
};
struct RowMax {
    static __device__ __forceinline__ float none() { return __uint_as_float(0xff800000u); }
    static __device__ __forceinline__ float combine(float a, float b) { return detail::larger(a, b); }
};

// ---- functions of values
__device__ __forceinline__ float row_product(float a, float b) { return detail::times(a, b); }
__device__ __forceinline__ float row_divide(float a, float b) { return __fdiv_rn(a, b); }

// Divides a unit by one number, with the results of `row_divide`, but with one reciprocal and one branch for all elements. A
// quotient that is off by less than its last bit becomes the nearest one when its exact remainder, times the nearest
// reciprocal, is added (Markstein, 1990); the first correction brings it that close. Numbers near the ends of the range,
// whose remainders may not be exact, infinities and NaN are divided one by one.
__device__ __forceinline__ void row_divide(float (&value)[row_unit], float by) {
    // From 2^-60 to 2^60.
    const auto is_usual = [](u32 size) { return size - 0x21800000u < 0x3c000000u; };
    const float inverse = __frcp_rn(by);
    bool usual = is_usual(__float_as_uint(by) & 0x7fffffffu);
    float quotient[row_unit];
#pragma unroll
    for (u32 e = 0; e < row_unit; e++) {
        const u32 size = __float_as_uint(value[e]) & 0x7fffffffu;
        usual &= size == 0 || is_usual(size);
        const float first = __fmul_rn(value[e], inverse);
        const float second = __fmaf_rn(__fmaf_rn(-first, by, value[e]), inverse, first);
        const float third = __fmaf_rn(__fmaf_rn(-second, by, value[e]), inverse, second);
        // Corrections lose the sign of -0.
        quotient[e] = size == 0 ? first : third;
    }
    if (!usual) {
#pragma unroll
        for (u32 e = 0; e < row_unit; e++) quotient[e] = __fdiv_rn(value[e], by);
    }
#pragma unroll
    for (u32 e = 0; e < row_unit; e++) value[e] = quotient[e];
}
__device__ __forceinline__ float row_minus(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float row_sqrt(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ float row_rsqrt(float a) { return __frcp_rn(__fsqrt_rn(a)); }
__device__ __forceinline__ float row_exp(float a) { return expf(a); }
__device__ __forceinline__ float row_abs(float a) { return fabsf(a); }
// The smallest power of two that is not smaller in magnitude.
__device__ __forceinline__ float row_power_of_two(float a) {
    constexpr u32 mantissa = (1u << 23) - 1;
    return a == a ? __uint_as_float((__float_as_uint(a) + mantissa) & ~mantissa) : a;
}
// The exponent in its stored encoding.
__device__ __forceinline__ float row_exponent(float a) { return (float)(__float_as_uint(a) >> 23 & 0xff); }
// The code of the nearest 4-bit float, e2m1, ties to even; for NaN, the largest, like the conversion of GPUs that
// have one.
__device__ __forceinline__ float row_e2m1(float a) {
    const float size = fabsf(a);
    // Midpoints between neighbours, which round to the one with an even code.
    const u32 code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
    return a == a ? (float)(code | __float_as_uint(a) >> 31 << 3) : 7.0f;
}
// As in PTX: -0 is less than 0.
__device__ __forceinline__ float row_min(float a, float b) {
    float least;
    asm("min.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
}
__device__ __forceinline__ float row_max(float a, float b) {
    float most;
    asm("max.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

// The nearest value of an element type.
template <typename Element> __device__ __forceinline__ float rounded(float value) {
    float values[Element::cell];
    u32 word;
#pragma unroll
    for (u32 i = 0; i < Element::cell; i++) values[i] = value;
    Element::pack(values, &word);
    Element::unpack(&word, values);
    return values[0];
}

// A single value.
template <typename Element> __device__ __forceinline__ float single(u64 at) {
    float values[Element::cell];
    const Unit<4> unit = detail::load_elements<Element, 4>(at, 1);
    Element::unpack(unit.word, values);
    return values[0];
}

// Combined in the order of the sources.
template <typename Element, typename Operator, typename P> __device__ __forceinline__ float single_reduced(const P &from) {
    float value = 0;
#pragma unroll
    for (u32 i = 0; i < P::count; i++) {
        float next = single<Element>(from.at[i]);
        if constexpr (detail::begins<Operator>) next = Operator::begin(next);
        value = i == 0 ? next : Operator::combine(value, next);
    }
    return Operator::finish(value, P::count);
}

// A row that a lane processes. `turn` counts the lane's reductions along rows. `WHOLE`: its length is known to be a
// multiple of a unit; `KEPT`: and that threads keep all of their units. In its calls, `ALIGNED`: plain places are known to be
// aligned to 16 bytes.
template <bool WHOLE = false, bool KEPT = false> struct Row {
    Lane &lane;
    u32 &turn;
    u32 width, units;
    // The first unit of this thread that is not done.
    u32 first;
    Flag flag;

    __device__ __forceinline__ Row(Lane &lane, u32 &turn, u64 width)
        : lane(lane), turn(turn), width((u32)width), units(((u32)width + row_unit - 1) / row_unit), first(lane.rank()), flag(lane.epoch()) {}

    // Whether this thread has units left after `UNITS` more of them, which are done.
    template <u32 UNITS> __device__ __forceinline__ bool next() {
        first += UNITS * lane.size();
        return first < units;
    }

    __device__ __forceinline__ u32 count(u32 unit) const {
        if constexpr (WHOLE) return row_unit;
        return width - row_unit * unit < row_unit ? width - row_unit * unit : row_unit;
    }

    // Calls `with` for each of this thread's next `UNITS` units, with its value cached in registers.
    template <u32 UNITS, typename Kept, typename With> __device__ __forceinline__ void each_kept(Kept (&kept)[UNITS], const With &with) const {
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32 unit = first + i * lane.size();
            if (unit < units) with(unit, count(unit), kept[i]);
        }
    }

    // The same for all units of this thread; for further ones, `again` recomputes the value.
    template <u32 UNITS, typename Kept, typename Again, typename With>
    __device__ __forceinline__ void each(Kept (&kept)[UNITS], const Again &again, const With &with) const {
        each_kept(kept, with);
        if constexpr (KEPT) return;
#pragma unroll 1
        for (u32 unit = lane.rank() + UNITS * lane.size(); unit < units; unit += lane.size()) {
            Kept further;
            again(unit, count(unit), further);
            with(unit, count(unit), further);
        }
    }

    // Combines values of all threads, on each of them and each by its operator: by the bits of the thread's number from bit 4 on
    // within a warp, and then of the warp's number. All values go in one exchange, since its latency counts more than its size. The
    // threads agree on whether the lane has ended.
    template <typename... Operators> __device__ __forceinline__ void across(decltype(Operators::none()) &...values) {
        if constexpr (lane_blocks > 1) {
            ((values = across_blocks<Operators>(values)), ...);
            return;
        }
        __shared__ float of_warps[2][sizeof...(Operators)][32];
        float(*stored)[32] = of_warps[turn++ % 2];
        const u32 number = threadIdx.x % 32, warp = threadIdx.x / 32, first_warp = lane.first / 32;
        within_warp<Operators...>(values...);
        u32 i = 0;
        if (number == 0) ((stored[i++][warp] = values), ...);
        lane.agree();
        i = 0;
        ((values = number < lane.size() / 32 ? stored[i][first_warp + number] : Operators::none(), i++), ...);
        within_warp<Operators...>(values...);
    }

    template <typename... Operators> static __device__ __forceinline__ void within_warp(decltype(Operators::none()) &...values) {
#pragma unroll
        for (u32 half = 16; half > 0; half /= 2) ((values = Operators::combine(values, __shfl_xor_sync(0xffffffffu, values, half))), ...);
    }

    // The same with one value for a lane of several blocks: each warp stores its value, and whether the lane has ended, at all blocks.
    template <typename Operator> __device__ __forceinline__ float across_blocks(float value) {
        detail::ClusterExchange &exchange = detail::ClusterExchange::own();
        const u32 slot = turn % 2, parity = turn / 2 % 2, number = lane.rank() % 32, warps = lane.size() / 32;
        turn++;
        within_warp<Operator>(value);
        lane.ended = __any_sync(0xffffffffu, lane.ended);
        lane.gather();
        if (threadIdx.x == 0) exchange.expect(slot, warps);
        if (number < lane_blocks) exchange.store(slot, lane.rank() / 32, number, (u64)lane.ended << 32 | __float_as_uint(value));
        exchange.wait(slot, parity);
        value = Operator::none();
#pragma unroll
        for (u32 first = 0; first < exchange.warps; first += 32) {
            if (first + number >= warps) break;
            const u64 stored = ((volatile u64 *)exchange.values[slot])[first + number];
            lane.ended |= stored >> 32 != 0;
            value = first == 0 ? __uint_as_float((u32)stored) : Operator::combine(value, __uint_as_float((u32)stored));
        }
        lane.ended = __any_sync(0xffffffffu, lane.ended);
        within_warp<Operator>(value);
        return value;
    }

    // Combines the values of the threads that have units of a block of `UNITS`, on each of them: these are a part of
    // a warp; missing units have no thread.
    template <typename Operator, u32 UNITS> __device__ __forceinline__ float across_block(u32 unit, float value) const {
        static_assert(UNITS <= 32 && (UNITS & (UNITS - 1)) == 0, "blocks of up to a warp");
        const u32 place = unit % UNITS, there = units - (unit - place) < UNITS ? units - (unit - place) : UNITS;
        const u32 first = lane.rank() % 32 / UNITS * UNITS, mask = 0xffffffffu >> (32 - there) << first;
#pragma unroll
        for (u32 half = UNITS / 2; half > 0; half /= 2) {
            const float other = __shfl_down_sync(mask, value, half);
            // Values of threads without a unit are ignored.
            if (place + half < there) value = Operator::combine(value, other);
        }
        value = __shfl_sync(mask, value, first);
        return value;
    }

    // A unit of a plain operand, whose load is in flight until its values are used.
    template <typename Element, bool ALIGNED = false> __device__ __forceinline__ detail::RowUnit<Element> load(u64 at, u32 unit, u32 count) const {
        return detail::load_row_unit<Element>(at + detail::RowUnit<Element>::bytes * (u64)unit, count, ALIGNED || at % 16 == 0);
    }

    // The same for an operand that is absent if its address is 0: all of its elements are `number` then.
    template <typename Element, bool ALIGNED = false>
    __device__ __forceinline__ detail::RowUnit<Element> load_or(float number, u64 at, u32 unit, u32 count) const {
        if (at != 0) return load<Element, ALIGNED>(at, unit, count);
        float values[row_unit];
#pragma unroll
        for (u32 e = 0; e < row_unit; e++) values[e] = number;
        detail::RowUnit<Element> all;
        all.set(values);
        return all;
    }

    // The value of the block that contains a unit, from a row with one value per block.
    template <typename Element, u32 UNITS> __device__ __forceinline__ float of_block(u64 at, u32 unit) const {
        return single<Element>(at + sizeof(typename Element::Bits) * (u64)(unit / UNITS));
    }

    // The operator's result for a unit of each source, in their order.
    template <typename Element, typename Operator, bool ALIGNED = false, typename P>
    __device__ __forceinline__ void reduce(const P &from, u32 unit, u32 count, float (&value)[row_unit]) const {
        // As many at a time as registers allow.
        constexpr u32 together = P::packets != 0 && P::count > 4 ? 4 : P::count;
        constexpr u32 data = P::packet_data == 0 ? 8 : P::packet_data;
#pragma unroll
        for (u32 first = 0; first < P::count; first += together) {
            detail::RowUnit<Element> units[together];
            detail::RowPackets<Element, data> packets[together];
#pragma unroll
            for (u32 k = 0; k < together; k++) {
                const u32 i = together == P::count ? P::in_turn(k) : first + k;
                if (i >= P::count) continue;
                if (P::is_packets(i))
                    packets[i - first].load(from.at[i], unit, count);
                else
                    units[i - first] = load<Element, ALIGNED>(from.at[i], unit, count);
            }
            // All are loaded again together: one after the other, each would take a load's latency after the previous one has
            // arrived.
            for (u32 polls = 1; P::packets != 0 && !lane.ended; polls++) {
                bool there = true;
#pragma unroll
                for (u32 k = 0; k < together; k++) {
                    const u32 i = first + k;
                    if (i < P::count && P::is_packets(i)) there &= packets[k].arrived(count, flag);
                }
                if (there || lane.gives_up(polls)) break;
#pragma unroll
                for (u32 k = 0; k < together; k++) {
                    const u32 i = first + k;
                    if (i < P::count && P::is_packets(i)) packets[k].load(from.at[i], unit, count);
                }
            }
#pragma unroll
            for (u32 k = 0; k < together; k++) {
                const u32 i = first + k;
                if (i >= P::count) continue;
                if (P::is_packets(i)) units[k] = packets[k].values(from.at[i], unit, count);
                float next[row_unit];
                units[k].values(next);
#pragma unroll
                for (u32 e = 0; e < row_unit; e++) {
                    if constexpr (detail::begins<Operator>) next[e] = Operator::begin(next[e]);
                    value[e] = i == 0 ? next[e] : Operator::combine(value[e], next[e]);
                }
            }
        }
#pragma unroll
        for (u32 e = 0; e < row_unit; e++) value[e] = Operator::finish(value[e], P::count);
    }

    // Stores a unit, rounded, to all targets; nothing if the lane has ended.
    template <typename Element, bool ALIGNED = false, typename P>
    __device__ __forceinline__ void store(const P &to, u32 unit, u32 count, const float (&value)[row_unit]) const {
        detail::RowUnit<Element> stored;
        stored.set(value);
        store_unit<Element, ALIGNED>(to, unit, count, stored);
    }

    // The same for a unit as loaded.
    template <typename Element, bool ALIGNED = false, typename P>
    __device__ __forceinline__ void store_unit(const P &to, u32 unit, u32 count, const detail::RowUnit<Element> &stored) const {
        if (lane.ended) return;
        constexpr u32 data = P::packet_data == 0 ? 8 : P::packet_data, bytes = detail::RowUnit<Element>::bytes;
#pragma unroll
        for (u32 k = 0; k < P::count; k++) {
            const u32 i = P::in_turn(k);
            if (P::is_packets(i))
                detail::store_row_packets<Element, data>(to.at[i] + 2 * bytes * (u64)unit, stored, count, flag);
            else
                detail::store_row_unit<Element>(to.at[i] + bytes * (u64)unit, stored, count, ALIGNED || to.at[i] % 16 == 0);
        }
    }

    // The same for a single value. An empty row has none, so that the step does nothing.
    template <typename Element, typename P> __device__ __forceinline__ void store_single(const P &to, float value) const {
        if (lane.ended || lane.rank() != 0 || width == 0) return;
        float values[Element::cell];
#pragma unroll
        for (u32 i = 0; i < Element::cell; i++) values[i] = value;
        Unit<4> unit;
        Element::pack(values, unit.word);
#pragma unroll
        for (u32 k = 0; k < P::count; k++) detail::store_elements<Element, 4>(to.at[P::in_turn(k)], unit, 1);
    }

    // Stores the value of a block, by the thread of its first unit.
    template <typename Element, u32 UNITS, typename P> __device__ __forceinline__ void store_block(const P &to, u32 unit, float value) const {
        if (lane.ended || unit % UNITS != 0) return;
        float values[Element::cell];
#pragma unroll
        for (u32 i = 0; i < Element::cell; i++) values[i] = value;
        Unit<4> stored;
        Element::pack(values, stored.word);
        constexpr u32 bytes = detail::RowUnit<Element>::bytes / row_unit;
#pragma unroll
        for (u32 k = 0; k < P::count; k++) detail::store_elements<Element, 4>(to.at[P::in_turn(k)] + bytes * (unit / UNITS), stored, 1);
    }

    // Stores two whole numbers from 0 to 15 in each byte, the first in its low bits.
    template <typename P> __device__ __forceinline__ void store_pairs(const P &to, u32 unit, u32 count, const float (&value)[row_unit]) const {
        if (lane.ended) return;
        Unit<4> stored;
        stored.word[0] = 0;
#pragma unroll
        for (u32 i = 0; i < row_unit; i++)
            if (i < count) stored.word[0] |= min(__float2uint_rz(value[i]), 15u) << 4 * i;
#pragma unroll
        for (u32 k = 0; k < P::count; k++) {
            const u64 at = to.at[P::in_turn(k)] + row_unit / 2 * (u64)unit;
            if (count == row_unit && at % 4 == 0)
                detail::store_unit<4>(at, stored);
            else
                detail::store_elements<RowByte, 4>(at, stored, (count + 1) / 2);
        }
    }
};

}  // namespace warplink

#endif
