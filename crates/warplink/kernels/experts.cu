// Lists the rows that a layer of experts sends. Messages move the rows themselves (messages.cu).

#include <warplink/elements.cuh>

using namespace warplink;

struct Routing {
    // Experts of each token: 32 bits each, `slots` for a token.
    u64 experts, tokens, slots;
    // Total number of experts, and number on each rank.
    u64 all, each;
    // Maximum rows for a rank.
    u64 limit;
    // For each rank: its number of rows, and for each row the token, and the local index of the expert. Behind the
    // numbers of rows, that of tokens. 32 bits each.
    u64 counts, rows, locals;
    // For each slot, the position of its row among the `limit` rows of each rank, or their number for a slot without an
    // expert. 32 bits.
    u64 places;
};

// One block per rank: lists the slots that go to it, in order.
extern "C" __global__ void __launch_bounds__(1024) route(const __grid_constant__ Routing at) {
    __shared__ u32 of_warps[32];
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, rank = blockIdx.x;
    const u64 total = at.tokens * at.slots, first = rank * at.limit;
    const u32 nowhere = (u32)(gridDim.x * at.limit);
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
    if (threadIdx.x == 0 && rank == 0) ((u32 *)at.counts)[gridDim.x] = (u32)at.tokens;
}
