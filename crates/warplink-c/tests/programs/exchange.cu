// A kernel that nvcc makes machine code of, which images.cu loads.

#include <warplink/device.cuh>

// Writes bytes that depend on rank and round to the first half of the region of each channel, puts them to the second half
// of the peer's, and compares what came. `results` has the rounds so far, and how many bytes were wrong.
extern "C" __global__ void exchange(const warplink::Channel *channels, unsigned count, unsigned rank, unsigned bytes,
                                    unsigned *results) {
    const warplink::Block block;
    const unsigned round = results[0] + 1;
    bool good = true;
    for (unsigned k = 0; k < count; k++) {
        unsigned char *own = reinterpret_cast<unsigned char *>(channels[k].here(0, bytes));
        for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x)
            own[i] = static_cast<unsigned char>(7 * round + 13 * i + 101 * rank + k);
        good &= channels[k].put_with_signal_and_flush(block, bytes, 0, bytes) == warplink::Status::ok;
    }
    for (unsigned k = 0; k < count; k++) {
        good &= channels[k].wait(block) == warplink::Status::ok;
        const unsigned char *arrived = reinterpret_cast<const unsigned char *>(channels[k].here(bytes, bytes));
        for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x)
            if (arrived[i] != static_cast<unsigned char>(7 * round + 13 * i + 101 * channels[k].peer + k))
                atomicAdd(&results[1], 1u);
    }
    // The peer's next launch overwrites what was compared.
    good &= warplink::barrier(block, channels, count) == warplink::Status::ok;
    if (threadIdx.x != 0) return;
    if (!good) atomicAdd(&results[1], bytes);
    results[0] = round;
}
