// Heat in a rod that is cut into one piece for each rank: all time steps in one kernel.
//
//        rank 0                      rank 1
//   ghost | cells ............ | ghost
//                         ghost | cells ............ | ghost
//
// Before each step, a rank puts its outermost cells into its neighbours' ghost cells. There are two copies
// of the piece, read and written in turn, so that no ghost is overwritten while it is read: who puts into
// a copy again has waited for a signal that was sent after it was read.

#include <warplink/device.cuh>

using warplink::Block;
using warplink::Channel;
using warplink::Status;
using warplink::u32;
using warplink::u64;

extern "C" __global__ void heat(
    const Channel *neighbours, u32 has_left, u32 has_right, u64 cells, u32 steps, double rate, double *piece) {
    const Block block;
    const u64 length = cells + 2;
    const u32 count = has_left + has_right;
    for (u32 step = 0; step < steps; step++) {
        const u64 now = step % 2 * length, next = (step + 1) % 2 * length;
        // Offsets are in bytes.
        if (has_left && neighbours[0].put_with_signal(block, 8 * (now + cells + 1), 8 * (now + 1), 8) != Status::ok) return;
        if (has_right && neighbours[has_left].put_with_signal(block, 8 * now, 8 * (now + cells), 8) != Status::ok) return;
        for (u32 i = 0; i < count; i++)
            if (neighbours[i].wait(block) != Status::ok) return;
        for (u64 i = 1 + threadIdx.x; i <= cells; i += blockDim.x) {
            const double left = piece[now + i - 1], here = piece[now + i], right = piece[now + i + 1];
            piece[next + i] = here + rate * (left - 2 * here + right);
        }
        // The next put begins with a barrier of the block, so what it sends is there.
    }
}
