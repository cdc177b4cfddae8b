// Two ranks as threads of one process, in C++: rounds of a kernel, and threads that use a communicator while
// another destroys it.

#include "check.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr std::uint64_t BYTES = 1 << 16;
constexpr unsigned ROUNDS = 100;

// All calls on one thread and many, with handles that vanish: each gives a status, none crashes.
void use_until_closed(warplink_comm comm, warplink_region region, std::atomic<int> &running) {
    std::vector<char> bytes(64);
    ++running;
    while (true) {
        warplink_region own{};
        warplink_status status = warplink_alloc(comm, 256, &own);
        if (status == WARPLINK_STATUS_SUCCESS) status = warplink_download(bytes.data(), span(region, 0, 64));
        if (status == WARPLINK_STATUS_SUCCESS) status = warplink_region_free(own);
        if (status == WARPLINK_STATUS_SUCCESS) continue;
        // What of it came first depends on the moment.
        if (status == WARPLINK_STATUS_CLOSED && warplink_rank(comm, nullptr) == WARPLINK_STATUS_CLOSED) return;
    }
}

void run(warplink_unique_id id, std::int32_t rank) {
    const warplink_options options = test_options();
    const std::int32_t peer = 1 - rank;
    warplink_comm comm{};
    OK(warplink_init_from_id(&comm, 2, &id, rank, &options));
    warplink_region region{}, upright{};
    OK(warplink_alloc(comm, 2 * BYTES, &region));
    OK(warplink_alloc(comm, 64, &upright));
    OK(warplink_upload(span(upright, 0, 64), std::string(64, 'x').data()));
    OK(warplink_connect(comm, peer, 0, region, WARPLINK_TRANSPORT_DIRECT, nullptr));
    OK(warplink_setup(comm));
    warplink_stream stream{};
    OK(warplink_stream_create(comm, &stream));
    const warplink_kernel kernel = load_swap(comm, nullptr);
    const warplink_argument arguments[] = {warplink_argument_channel(comm, peer, 0), warplink_argument_u64(BYTES)};
    std::vector<unsigned char> sent(BYTES), received(BYTES);
    for (unsigned round = 0; round < ROUNDS; round++) {
        std::fill(sent.begin(), sent.end(), static_cast<unsigned char>(2 * round + static_cast<unsigned>(rank)));
        OK(warplink_upload(span(region, BYTES, BYTES), sent.data()));
        OK(warplink_launch(kernel, stream, warplink_shape{1, 128, 0, 0}, arguments, 2));
        OK(warplink_stream_synchronize(stream));
        OK(warplink_download(received.data(), span(region, 0, BYTES)));
        for (const unsigned char byte : received)
            HOLDS(byte == static_cast<unsigned char>(2 * round + static_cast<unsigned>(peer)));
        // The peer has read its part, which the next round overwrites.
        OK(warplink_barrier(comm));
    }

    std::atomic<int> running{0};
    std::vector<std::thread> users;
    for (int i = 0; i < 3; i++) users.emplace_back(use_until_closed, comm, upright, std::ref(running));
    while (running < 3) std::this_thread::yield();
    OK(warplink_destroy(comm));
    for (std::thread &user : users) user.join();
}

}  // namespace

int main() {
    warplink_default_log_handler(WARPLINK_LOG_LEVEL_INFO, "two ranks as threads", nullptr);
    warplink_unique_id id{};
    OK(warplink_unique_id_create("127.0.0.1", 0, &id));
    std::thread other(run, id, 1);
    run(id, 0);
    other.join();
    return 0;
}
