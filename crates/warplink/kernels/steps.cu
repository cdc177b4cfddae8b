// Instantiates every step of warplink/steps.cuh with every type and operator, so that all of them are compiled for
// every architecture. Tests use the kernels to reduce arrays of one GPU.

#include <warplink/steps.cuh>

using namespace warplink;

struct Operands {
    u64 sources[3], target;
    u64 packets, words, epochs;
    u64 count;
};

// Three sources, the second as packets that the block itself puts, to a target and a signal.
template <typename Element, typename Operator, u32 PACKET>
static __device__ void through_packets(Lane &lane, const Operands &a) {
    copy<Element>(lane, Places<1>{{a.sources[1]}}, Places<1, 1, PACKET>{{a.packets}}, a.count);
    lane.sync();
    const Places<3, 2, PACKET, 1> from{{a.sources[0], a.packets, a.sources[2]}};
    reduce<Element, Operator>(lane, from, Places<1>{{a.target}}, a.count);
}

template <typename Element, typename Operator> static __device__ void steps(const Operands &a, u32 packet) {
    Lane lane(a.words, a.epochs);
    Inbound<2> inbound(Signals{a.words}, 0);
    if (packet == 16) {
        through_packets<Element, Operator, 16>(lane, a);
    } else if (packet == 128) {
        through_packets<Element, Operator, 128>(lane, a);
    } else if (packet == 8) {
        if constexpr (sizeof(typename Element::Bits) <= 4) through_packets<Element, Operator, 8>(lane, a);
    } else {
        const Places<3, 0, 16, 2> from{{a.sources[0], a.sources[1], a.sources[2]}};
        reduce<Element, Operator>(lane, from, Places<1>{{a.target}}, a.count);
    }
    // Words of one lane only, and words shared by lanes.
    __shared__ u64 counts[2];
    Outbound<2> outbound(Signals{a.words}, 0, counts);
    const u64 words[2] = {Signals{a.words}.word(0), Signals{a.words}.word(1)};
    outbound.signal(lane, Places<2>{{words[0], words[1]}}, {0, 1});
    signal(lane, Places<2>{{words[0], words[1]}}, Places<2>{{words[0] + detail::sent_offset, words[1] + detail::sent_offset}});
    inbound.wait(lane);
    inbound.finish();
    lane.finish(gridDim.x);
}

#define STEPS_KERNEL(type, operator)                                                                                            \
    extern "C" __global__ void __launch_bounds__(512) steps_##type##_##operator(const __grid_constant__ Operands a, u32 packet) { \
        steps<type, operator>(a, packet);                                                                                       \
    }

// Every type, and every operator with a float and with a signed and an unsigned integer.
STEPS_KERNEL(F32, Add)
STEPS_KERNEL(F32, Multiply)
STEPS_KERNEL(F64, Minimum)
STEPS_KERNEL(F16, Maximum)
STEPS_KERNEL(Bf16, Average)
STEPS_KERNEL(E4m3, Add)
STEPS_KERNEL(E5m2, Maximum)
STEPS_KERNEL(I8, Minimum)
STEPS_KERNEL(U8, Average)
STEPS_KERNEL(I32, Multiply)
STEPS_KERNEL(U32, Maximum)
STEPS_KERNEL(I64, Average)
STEPS_KERNEL(U64, Add)
