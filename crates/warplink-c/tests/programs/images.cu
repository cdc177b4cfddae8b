// One of two ranks that load machine code which nvcc made of exchange.cu, through warplink.h, and launch it: by calls, and in
// a graph that has the array of channels. Arguments: rank, size, address, files with images for this GPU, and at last one
// for another GPU.

#include "check.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <string>
#include <vector>

namespace {

// Of an odd number of bytes.
constexpr unsigned BYTES = 40001, ROUNDS = 20;

void cuda(cudaError_t code) {
    if (code == cudaSuccess) return;
    std::fprintf(stderr, "%s\n", cudaGetErrorString(code));
    std::exit(1);
}

std::vector<unsigned char> read(const char *path) {
    std::vector<unsigned char> bytes;
    std::FILE *file = std::fopen(path, "rb");
    HOLDS(file != nullptr);
    for (int byte; (byte = std::fgetc(file)) != EOF;) bytes.push_back(static_cast<unsigned char>(byte));
    std::fclose(file);
    HOLDS(!bytes.empty());
    return bytes;
}

warplink_status load(warplink_comm comm, const char *path, const std::vector<unsigned char> &bytes, warplink_module *module) {
    warplink_module_source source{};
    source.name = path;
    source.image = bytes.data();
    source.image_bytes = bytes.size();
    return warplink_module_load(comm, &source, module);
}

}  // namespace

int main(int argc, char **argv) {
    const warplink_options options = test_options();
    HOLDS(argc >= 6);
    const int32_t rank = std::atoi(argv[1]), peer = 1 - rank;
    warplink_comm comm{};
    OK(warplink_init(&comm, 2, argv[3], rank, &options));
    warplink_region result{};
    void *address = nullptr;
    unsigned results[2] = {0, 0};
    OK(warplink_alloc(comm, sizeof results, &result));
    OK(warplink_region_address(result, &address));
    OK(warplink_upload(span(result, 0, sizeof results), results));
    for (unsigned tag = 0; tag < 2; tag++) {
        warplink_region region{};
        OK(warplink_alloc(comm, 2 * BYTES, &region));
        OK(warplink_connect(comm, peer, tag, region, tag == 0 ? WARPLINK_TRANSPORT_DIRECT : WARPLINK_TRANSPORT_PROXIED,
                            nullptr));
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

    // What is refused leaves the device as it was.
    warplink_module module{};
    const std::vector<unsigned char> foreign = read(argv[argc - 1]);
    FAILS(load(comm, "foreign", foreign, &module), WARPLINK_STATUS_DRIVER, "NO_BINARY_FOR_GPU");
    HOLDS(std::strstr(warplink_last_error(), "help: make the image for the GPU at hand") != nullptr);
    unsigned rounds = 0;
    for (int file = 4; file < argc - 1; file++) {
        std::vector<unsigned char> image = read(argv[file]);
        warplink_kernel kernel{};
        std::vector<unsigned char> cut(image.begin(), image.begin() + static_cast<std::ptrdiff_t>(image.size() / 2));
        // Half a text of PTX is one that does not compile.
        HOLDS(load(comm, argv[file], cut, &module) != WARPLINK_STATUS_SUCCESS);
        const warplink_status status = load(comm, argv[file], image, &module);
        // The driver compiles PTX of its own version and earlier ones.
        if (status == WARPLINK_STATUS_DRIVER && std::strstr(warplink_last_error(), "UNSUPPORTED_PTX_VERSION") != nullptr) {
            std::printf("left out: %s\n", warplink_last_error());
            continue;
        }
        OK(status);
        FAILS(warplink_kernel_get(module, "nothing", &kernel), WARPLINK_STATUS_INVALID_ARGUMENT, "unknown kernel 'nothing'");
        OK(warplink_kernel_get(module, "exchange", &kernel));
        OK(warplink_module_free(module));
        const warplink_shape shape = {1, 256, 0, 0};
        const warplink_argument arguments[] = {
            warplink_argument_channels(comm), warplink_argument_u32(2), warplink_argument_u32(static_cast<uint32_t>(rank)),
            warplink_argument_u32(BYTES), warplink_argument_region(result, 0),
        };
        for (unsigned round = 0; round < ROUNDS; round++) OK(warplink_launch(kernel, stream, shape, arguments, 5));
        OK(warplink_stream_synchronize(stream));

        cudaGraph_t graph = nullptr;
        cudaGraphExec_t replay = nullptr;
        cuda(cudaStreamBeginCapture(cuda_stream, cudaStreamCaptureModeRelaxed));
        OK(warplink_launch(kernel, stream, shape, arguments, 5));
        cuda(cudaStreamEndCapture(cuda_stream, &graph));
        cuda(cudaGraphInstantiate(&replay, graph, 0));
        for (unsigned round = 0; round < ROUNDS; round++) {
            OK(warplink_proxy_launch(comm));
            cuda(cudaGraphLaunch(replay, cuda_stream));
        }
        OK(warplink_launched(comm, stream));
        OK(warplink_stream_synchronize(stream));
        rounds += 2 * ROUNDS;
        OK(warplink_download(results, span(result, 0, sizeof results)));
        HOLDS(results[0] == rounds);
        HOLDS(results[1] == 0);
        cuda(cudaGraphExecDestroy(replay));
        cuda(cudaGraphDestroy(graph));
        OK(warplink_kernel_free(kernel));
    }
    HOLDS(rounds > 0);
    OK(warplink_stream_destroy(stream));
    cuda(cudaStreamDestroy(cuda_stream));
    OK(warplink_destroy(comm));
    std::printf("%u rounds of %u bytes on each of two channels\n", rounds, BYTES);
    return 0;
}
