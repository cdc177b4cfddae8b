// One of two ranks whose kernel nvcc compiles and CUDA's own call launches. Arguments: rank, size, address.

#include "check.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <vector>
#include <warplink/device.cuh>

namespace {

// Of an odd number of bytes for each warp.
constexpr unsigned WARPS = 4, PART = 1021, BYTES = WARPS * PART, ROUNDS = 100;

// Every warp puts its part of the first half of the region to the second half of the peer's, and waits for one of the
// peer's. When the block is past the waits of all, it has them all.
__global__ void exchange(warplink::Channel channel, unsigned round, unsigned *wrong) {
    const warplink::Warp warp;
    const warplink::u64 at = threadIdx.x / 32 * PART;
    const warplink::Status put = channel.put_with_signal_and_flush(warp, BYTES + at, at, PART);
    const warplink::Status waited = channel.wait(warp);
    if (put != warplink::Status::ok || waited != warplink::Status::ok) atomicAdd(wrong, BYTES);
    __syncthreads();
    const unsigned char *arrived = reinterpret_cast<const unsigned char *>(channel.here(BYTES, BYTES));
    for (unsigned i = threadIdx.x; i < BYTES; i += blockDim.x)
        if (arrived[i] != static_cast<unsigned char>(7 * round + 13 * i + channel.peer)) atomicAdd(wrong, 1u);
}

void cuda(cudaError_t code) {
    if (code == cudaSuccess) return;
    std::fprintf(stderr, "%s\n", cudaGetErrorString(code));
    std::exit(1);
}

}  // namespace

int main(int argc, char **argv) {
    const warplink_options options = test_options();
    HOLDS(argc == 4);
    const int32_t rank = std::atoi(argv[1]), peer = 1 - rank;
    warplink_comm comm{};
    OK(warplink_init(&comm, 2, argv[3], rank, &options));
    warplink_region regions[2]{}, result{};
    void *address = nullptr;
    OK(warplink_alloc(comm, sizeof(unsigned), &result));
    OK(warplink_region_address(result, &address));
    for (unsigned which = 0; which < 2; which++) {
        OK(warplink_alloc(comm, 2 * BYTES, &regions[which]));
        OK(warplink_connect(comm, peer, which, regions[which],
                            which == 0 ? WARPLINK_TRANSPORT_DIRECT : WARPLINK_TRANSPORT_PROXIED, nullptr));
    }
    OK(warplink_setup(comm));

    // The runtime's device is that of the rank, which may be any.
    cudaPointerAttributes where{};
    cuda(cudaPointerGetAttributes(&where, address));
    cuda(cudaSetDevice(where.device));
    cudaStream_t cuda_stream = nullptr;
    cuda(cudaStreamCreateWithFlags(&cuda_stream, cudaStreamNonBlocking));
    warplink_stream stream{};
    OK(warplink_stream_borrow(comm, cuda_stream, &stream));
    // Loaded before a kernel waits for a peer.
    cudaFuncAttributes attributes{};
    cuda(cudaFuncGetAttributes(&attributes, exchange));

    std::vector<unsigned char> sent(BYTES);
    for (unsigned which = 0; which < 2; which++) {
        warplink_channel bytes{};
        warplink::Channel channel;
        OK(warplink_channel_get(comm, peer, which, &bytes));
        static_assert(sizeof channel == sizeof bytes, "one layout");
        std::memcpy(&channel, &bytes, sizeof bytes);
        for (unsigned round = 0; round < ROUNDS; round++) {
            unsigned wrong = 0;
            for (unsigned i = 0; i < BYTES; i++)
                sent[i] = static_cast<unsigned char>(7 * round + 13 * i + static_cast<unsigned>(rank));
            OK(warplink_upload(span(regions[which], 0, BYTES), sent.data()));
            OK(warplink_upload(span(result, 0, sizeof wrong), &wrong));
            // The peer has looked at what came in the last round.
            OK(warplink_barrier(comm));
            exchange<<<1, 32 * WARPS, 0, cuda_stream>>>(channel, round, static_cast<unsigned *>(address));
            cuda(cudaGetLastError());
            OK(warplink_launched(comm, stream));
            OK(warplink_stream_synchronize(stream));
            OK(warplink_download(&wrong, span(result, 0, sizeof wrong)));
            HOLDS(wrong == 0);
        }
    }
    OK(warplink_stream_destroy(stream));
    cuda(cudaStreamDestroy(cuda_stream));
    OK(warplink_destroy(comm));
    std::printf("%u rounds of %u bytes on each of two channels\n", ROUNDS, BYTES);
    return 0;
}
