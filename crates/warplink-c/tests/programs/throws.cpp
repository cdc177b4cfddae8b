// Functions that are passed to Warplink and do not return: the process ends with a message. The last argument says
// which; for the handler there are two ranks, of which one is lost, which is logged.

#include "check.h"

#include <chrono>
#include <cstdlib>
#include <pthread.h>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>

namespace {

void handler(std::int32_t, const char *, void *) { throw std::runtime_error("from the handler"); }

std::int32_t body(void *) { throw std::runtime_error("from the body"); }

std::int32_t end_thread(void *) { pthread_exit(nullptr); }

}  // namespace

int main(int, char **arguments) {
    const std::string which = arguments[4];
    warplink_options options = warplink_options_default();
    options.device = "host";
    options.timeout = 30;
    warplink_comm comm{};
    try {
        const std::int32_t rank = std::atoi(arguments[1]);
        // Before the other rank can be lost.
        if (which == "handler" && rank == 0) OK(warplink_set_log_handler(handler, nullptr));
        OK(warplink_init(&comm, std::atoi(arguments[2]), arguments[3], rank, &options));
        if (which == "handler") {
            if (rank == 1) _exit(0);
            const warplink_status status = warplink_barrier(comm);
            std::this_thread::sleep_for(std::chrono::seconds(5));
            fprintf(stderr, "nothing was logged, status %d\n", (int)status);
            return 1;
        }
        warplink_host_kernel kernel{};
        kernel.name = "throws";
        kernel.body = which == "body" ? body : end_thread;
        warplink_module_source source{};
        source.name = "throws";
        source.host_kernels = &kernel;
        source.host_kernel_count = 1;
        warplink_module module{};
        warplink_kernel throws{};
        warplink_stream stream{};
        OK(warplink_module_load(comm, &source, &module));
        OK(warplink_kernel_get(module, "throws", &throws));
        OK(warplink_stream_create(comm, &stream));
        warplink_shape shape{};
        shape.blocks = shape.threads = 1;
        OK(warplink_launch(throws, stream, shape, nullptr, 0));
        OK(warplink_stream_synchronize(stream));
    } catch (...) {
        fprintf(stderr, "an exception came through\n");
        return 1;
    }
    fprintf(stderr, "nothing was thrown\n");
    return 1;
}
