// One block on each of two ranks: a number goes back and forth, and each rank adds one to it.

#include <warplink/device.cuh>

extern "C" __global__ void ping_pong(warplink::Channel channel, unsigned rank, unsigned rounds) {
    const warplink::Thread thread;
    // The first word of the own region is sent, the second is where the peer's arrives.
    unsigned long long *region = (unsigned long long *)channel.here(0, 16);
    for (unsigned round = 0; round < rounds; round++) {
        // Rank 0 begins with what is in its region.
        if (rank == 0 && channel.put_with_signal(thread, 8, 0, 8) != warplink::Status::ok) return;
        // Only after the wait may the number be read. It fails if the peer is lost.
        if (channel.wait(thread) != warplink::Status::ok) return;
        region[0] = region[1] + 1;
        if (rank == 1 && channel.put_with_signal(thread, 8, 0, 8) != warplink::Status::ok) return;
    }
}
