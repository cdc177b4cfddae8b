// Local kernels of a layer of experts: one before rows are sent, one after they have been returned. Messages move the
// rows themselves (messages.cu).

#include <warplink/elements.cuh>

using namespace warplink;

// In `places`, marks a slot without an expert. Must match the host.
constexpr u32 nowhere = ~0u;

struct Routing {
    // Experts of each token: 32 bits each, `slots` for a token.
    u64 experts, tokens, slots;
    // Total number of experts, and number on each rank.
    u64 all, each;
    // Maximum rows for a rank.
    u64 limit;
    // For each rank: its number of rows, and for each row the token, and the local index of the expert. 32 bits each.
    u64 counts, rows, locals;
    // For each slot, the position of its row among the `limit` rows of each rank. 32 bits.
    u64 places;
};

// One block per rank: lists the slots that go to it, in order.
extern "C" __global__ void __launch_bounds__(1024) route(const __grid_constant__ Routing at) {
    __shared__ u32 of_warps[32];
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, rank = blockIdx.x;
    const u64 total = at.tokens * at.slots, first = rank * at.limit;
    u64 done = 0;
#pragma unroll 1
    for (u64 begin = 0; begin < total; begin += blockDim.x) {
        const u64 slot = begin + threadIdx.x;
        const int expert = slot < total ? ((const int *)at.experts)[slot] : -1;
        const bool there = expert >= 0 && (u64)expert < at.all;
        const bool mine = there && (u64)expert / at.each == rank;
        const u32 of_warp = __ballot_sync(0xffffffffu, mine);
        if (threadIdx.x % 32 == 0) of_warps[warp] = __popc(of_warp);
        __syncthreads();
        u32 before = __popc(of_warp & ((1u << threadIdx.x % 32) - 1)), all = 0;
        for (u32 i = 0; i < warps; i++) {
            if (i < warp) before += of_warps[i];
            all += of_warps[i];
        }
        __syncthreads();
        const u64 place = done + before;
        if (mine) {
            if (place < at.limit) {
                ((u32 *)at.rows)[first + place] = (u32)(slot / at.slots);
                ((u32 *)at.locals)[first + place] = (u32)((u64)expert % at.each);
            }
            ((u32 *)at.places)[slot] = place < at.limit ? (u32)(first + place) : nowhere;
        } else if (!there && rank == 0 && slot < total) {
            ((u32 *)at.places)[slot] = nowhere;
        }
        done += all;
    }
    if (threadIdx.x == 0) ((u32 *)at.counts)[rank] = (u32)done;
}

struct Sum {
    // The returned rows, and the position of each slot's row, as above.
    u64 rows, places;
    // Weight of each slot, a float.
    u64 weights;
    u64 output, tokens, slots;
    // Elements of a row.
    u64 elements;
};

// The weighted sums of `number` elements of a token from `element` on, in slot order, rounded once.
template <typename Element, bool WHOLE> static __device__ __forceinline__ void sum(const Sum &at, u64 token, u64 element, u32 number) {
    constexpr u32 size = sizeof(typename Element::Bits);
    typedef detail::Accumulator<Element, 16> Values;
    Values total;
#pragma unroll
    for (u32 i = 0; i < Values::elements; i++) total.value[i] = 0;
    for (u64 slot = token * at.slots; slot < (token + 1) * at.slots; slot++) {
        const u32 place = ((const u32 *)at.places)[slot];
        if (place == nowhere) continue;
        const float weight = ((const float *)at.weights)[slot];
        const u64 from = at.rows + size * (place * at.elements + element);
        Values row;
        if constexpr (WHOLE)
            row.set(detail::load_unit<16>(from));
        else
            row.set(detail::load_elements<Element, 16>(from, number));
#pragma unroll
        for (u32 i = 0; i < Values::elements; i++) total.value[i] = __fadd_rn(total.value[i], __fmul_rn(weight, row.value[i]));
    }
    const u64 to = at.output + size * (token * at.elements + element);
    const Unit<16> result = total.template result<Add>(1);
    if constexpr (WHOLE)
        detail::store_unit<16>(to, result);
    else
        detail::store_elements<Element, 16>(to, result, number);
}

// Blocks process tokens round-robin.
template <typename Element> static __device__ __forceinline__ void sums(const Sum &at) {
    constexpr u32 unit = 16 / sizeof(typename Element::Bits);
    const bool aligned = (at.rows | at.output | at.elements * sizeof(typename Element::Bits)) % 16 == 0;
#pragma unroll 1
    for (u64 token = blockIdx.x; token < at.tokens; token += gridDim.x) {
        for (u64 element = unit * threadIdx.x; element < at.elements; element += unit * blockDim.x) {
            const u64 left = at.elements - element;
            if (aligned)
                sum<Element, true>(at, token, element, unit);
            else
                sum<Element, false>(at, token, element, left < unit ? (u32)left : unit);
        }
    }
}

extern "C" __global__ void __launch_bounds__(512) sum_f32(const __grid_constant__ Sum at) { sums<F32>(at); }
extern "C" __global__ void __launch_bounds__(512) sum_f16(const __grid_constant__ Sum at) { sums<F16>(at); }
extern "C" __global__ void __launch_bounds__(512) sum_bf16(const __grid_constant__ Sum at) { sums<Bf16>(at); }
