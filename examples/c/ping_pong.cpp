// A kernel of one's own that talks to a peer, from C++: two ranks send a number back and forth without their
// hosts.
//
//     just install-c "$HOME/.local"
//     export PKG_CONFIG_PATH="$HOME/.local/lib/pkgconfig" LD_LIBRARY_PATH="$HOME/.local/lib"
//     g++ -std=c++17 -O2 -pthread examples/c/ping_pong.cpp -o ping_pong $(pkg-config --cflags --libs warplink)
//
//     ./ping_pong                          # two ranks as threads of one process
//     warplink launch -n 2 -- ./ping_pong  # two ranks as processes
//
// On GPUs the kernel is compiled when the program runs; nothing of CUDA is needed to build it. Without a GPU, the
// same calls are made by a function in C++.

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <warplink.h>

namespace {

constexpr std::uint32_t ROUNDS = 1000;

// The first word of a rank's region is sent, the second is where the peer's arrives.
const char *const KERNEL = R"cuda(
#include <warplink/device.cuh>

extern "C" __global__ void ping_pong(warplink::Channel channel, unsigned rank, unsigned rounds) {
    const warplink::Thread thread;
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
)cuda";

// The kernel for the host device, with the same calls.
extern "C" std::int32_t ping_pong(void *) {
    std::uint64_t rank = 0, rounds = 0;
    std::int32_t status = warplink_block_u64(1, &rank);
    if (status == 0) status = warplink_block_u64(2, &rounds);
    for (std::uint64_t round = 0; round < rounds && status == 0; round++) {
        if (rank == 0) status = warplink_block_put_with_signal(0, {0, 8}, {0, 0}, 8);
        if (status == 0) status = warplink_block_wait(0);
        std::uint64_t number = 0;
        if (status == 0) status = warplink_block_load(0, &number, {0, 8}, sizeof number);
        number++;
        if (status == 0) status = warplink_block_store(0, {0, 0}, &number, sizeof number);
        if (rank == 1 && status == 0) status = warplink_block_put_with_signal(0, {0, 8}, {0, 0}, 8);
    }
    return status;
}

// Every call gives a status; what happened, to whom and what to do is the thread's last error.
void check(warplink_status status) {
    if (status != WARPLINK_STATUS_SUCCESS) throw std::runtime_error(warplink_last_error());
}

void play(warplink_comm comm) {
    std::int32_t rank = 0;
    check(warplink_rank(comm, &rank));
    // Of more than two ranks, the others take part in the barrier alone.
    if (rank > 1) return check(warplink_barrier(comm));

    // It is loaded before any kernel runs that waits for a peer: loading might wait for that kernel.
    const warplink_host_kernel host{"ping_pong", ping_pong, nullptr};
    warplink_module_source source{};
    source.name = "ping_pong.cpp";
    source.cuda = KERNEL;
    source.host_kernels = &host;
    source.host_kernel_count = 1;
    warplink_module module{};
    warplink_kernel kernel{};
    check(warplink_module_load(comm, &source, &module));
    check(warplink_kernel_get(module, "ping_pong", &kernel));

    // Both ranks name the other, the same tag, and memory of their own.
    const std::int32_t peer = 1 - rank;
    const std::uint64_t tag = 0;
    std::array<std::uint64_t, 2> words{};
    warplink_region region{};
    check(warplink_alloc(comm, sizeof words, &region));
    check(warplink_upload({region, 0, sizeof words}, words.data()));
    check(warplink_connect(comm, peer, tag, region, WARPLINK_TRANSPORT_AUTO, nullptr));
    check(warplink_setup(comm));

    warplink_stream stream{};
    check(warplink_stream_create(comm, &stream));
    const std::array<warplink_argument, 3> arguments{
        warplink_argument_channel(comm, peer, tag),
        warplink_argument_u32(static_cast<std::uint32_t>(rank)),
        warplink_argument_u32(ROUNDS),
    };
    check(warplink_barrier(comm));
    const auto start = std::chrono::steady_clock::now();
    check(warplink_launch(kernel, stream, {1, 1, 0, 0}, arguments.data(), arguments.size()));
    check(warplink_stream_synchronize(stream));
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;

    check(warplink_download(words.data(), {region, 0, sizeof words}));
    if (rank == 0) {
        if (words[0] != 2 * ROUNDS) throw std::runtime_error("the number is " + std::to_string(words[0]));
        std::printf("after %u rounds the number is %llu; %.2f us one way\n", ROUNDS,
                    static_cast<unsigned long long>(words[0]), time.count() / (2 * ROUNDS));
    }
}

// One rank, from joining to leaving.
template <typename Join>
bool run(Join join) {
    warplink_comm comm{};
    try {
        check(join(&comm));
        play(comm);
        check(warplink_destroy(comm));
        return true;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        // The peer learns why.
        warplink_abort(comm, error.what());
        return false;
    }
}

}  // namespace

int main() {
    if (std::getenv("WARPLINK_RANK") != nullptr) {
        const bool played = run([](warplink_comm *comm) { return warplink_init_from_env(comm, nullptr); });
        return played ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    warplink_unique_id id{};
    if (warplink_unique_id_create(nullptr, 0, &id) != WARPLINK_STATUS_SUCCESS) {
        std::fprintf(stderr, "%s\n", warplink_last_error());
        return EXIT_FAILURE;
    }
    const auto rank = [&id](std::int32_t number) {
        return run([&](warplink_comm *comm) { return warplink_init_from_id(comm, 2, &id, number, nullptr); });
    };
    bool played = false;
    std::thread other([&] { played = rank(1); });
    const bool both = rank(0);
    other.join();
    return both && played ? EXIT_SUCCESS : EXIT_FAILURE;
}
