// Copies that are stored late; a part of sections.cuh.

#ifndef WARPLINK_LATER_CUH
#define WARPLINK_LATER_CUH

#include <warplink/steps.cuh>

namespace warplink {

// Copies of rows one after another, each of which is stored once the loads of the next one are in flight: a lane waits for half of
// the latency. `HELD`: units of 16 bytes that a thread holds. Nothing but the end, `flush`, orders the stores.
template <u32 HELD> struct Later {
    Unit<16> units[HELD];
    u64 target = 0;
    u32 count = 0;

    template <typename Element, bool ALIGNED = false, typename Sources, typename Targets>
    __device__ __forceinline__ void copy(Lane &lane, const Sources &from, const Targets &to, u64 elements) {
        const u64 bytes = sizeof(typename Element::Bits) * elements;
        const bool whole = (ALIGNED || (from.at[0] | to.at[0]) % 16 == 0) && bytes % 16 == 0;
        if (!whole || bytes / 16 > HELD * lane.size()) {
            flush(lane);
            warplink::copy<Element, ALIGNED>(lane, from, to, elements);
            return;
        }
        const u32 next = (u32)(bytes / 16);
        // Those without a unit keep what they hold.
        if (lane.ended || lane.rank() >= next) return;
        Unit<16> loaded[HELD];
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            const u32 unit = lane.rank() + i * lane.size();
            if (unit < next) loaded[i] = detail::load_unit<16>(from.at[0] + 16 * unit);
        }
        flush(lane);
        target = to.at[0];
        count = next;
#pragma unroll
        for (u32 i = 0; i < HELD; i++) units[i] = loaded[i];
    }

    __device__ __forceinline__ void flush(const Lane &lane) {
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            const u32 unit = lane.rank() + i * lane.size();
            if (unit < count) detail::store_unit<16>(target + 16 * unit, units[i]);
        }
        count = 0;
    }
};

}  // namespace warplink

#endif
