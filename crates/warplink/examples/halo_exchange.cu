// Heat in a plate that is cut into one piece of n by n cells for each rank: all time steps in one kernel.
//
// A piece has a ghost row above and one below it, and a ghost column at either side, where its neighbours' outermost
// cells are. Before each step, a rank puts its own outermost cells there: rows as they lie, columns packed, since a put
// is of bytes that lie one after another. So a piece is, in doubles,
//
//   ghost row | n rows of cells | ghost row | ghost columns west, east | packed columns west, east
//
// There are two copies of it, read and written in turn, so that no ghost is overwritten while it is read: who puts into
// a copy again has waited for a signal that was sent after it was read.

#include <warplink/device.cuh>

using warplink::Block;
using warplink::Channel;
using warplink::Status;
using warplink::u32;
using warplink::u64;

// The numbers of sides, and their bits. Must match the host's.
enum Side { north, south, west, east };

// `neighbours` has a channel for each of the `sides` that a rank has a neighbour at, in the order of their numbers.
extern "C" __global__ void heat(
    const Channel *neighbours, u32 sides, u64 n, u32 steps, double rate, double *piece) {
    const Block block;
    const u64 columns = (n + 2) * n, length = columns + 4 * n;
    // For each side: offset of the outgoing cells in this piece, and of the ghost cells in the neighbour's piece.
    const u64 sources[] = {n, n * n, columns + 2 * n, columns + 3 * n};
    const u64 targets[] = {(n + 1) * n, 0, columns + n, columns};
    for (u32 step = 0; step < steps; step++) {
        const u64 now = step % 2 * length;
        double *old = piece + now, *cells = piece + (step + 1) % 2 * length;
        for (u64 row = threadIdx.x; row < n; row += blockDim.x) {
            old[columns + 2 * n + row] = old[(row + 1) * n];
            old[columns + 3 * n + row] = old[(row + 1) * n + n - 1];
        }
        // A put begins with a barrier of the block, so what was packed is there. Offsets are in bytes.
        u32 count = 0;
        for (u32 side = north; side <= east; side++) {
            if (!(sides >> side & 1)) continue;
            const u64 target = 8 * (now + targets[side]), source = 8 * (now + sources[side]);
            if (neighbours[count++].put_with_signal(block, target, source, 8 * n) != Status::ok) return;
        }
        for (u32 i = 0; i < count; i++)
            if (neighbours[i].wait(block) != Status::ok) return;
        for (u64 cell = threadIdx.x; cell < n * n; cell += blockDim.x) {
            const u64 row = cell / n, column = cell % n, at = cell + n;
            const double left = column > 0 ? old[at - 1] : old[columns + row];
            const double right = column < n - 1 ? old[at + 1] : old[columns + n + row];
            cells[at] = old[at] + rate * (old[at - n] + old[at + n] + left + right - 4 * old[at]);
        }
        // The next step packs cells that other threads have made.
        block.sync();
    }
}
