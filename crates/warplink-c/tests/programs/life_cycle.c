/* One of two ranks, from joining to leaving. Arguments: rank, size, address, and "network" where there is one. */

#include "check.h"

enum { BYTES = 4096, ROUNDS = 20 };

static warplink_comm comm;
static int32_t rank, size, peer;

/* What a rank sends in a round. */
static uint32_t number(int32_t from, int round) { return (uint32_t)(1000 * (from + 1) + round); }

static void fill(warplink_region region, uint64_t offset, uint32_t value) {
    uint32_t words[BYTES / 4];
    for (int i = 0; i < BYTES / 4; i++) words[i] = value;
    OK(warplink_upload(span(region, offset, BYTES), words));
}

static void all_are(warplink_region region, uint64_t offset, uint32_t value) {
    uint32_t words[BYTES / 4];
    OK(warplink_download(words, span(region, offset, BYTES)));
    for (int i = 0; i < BYTES / 4; i++) HOLDS(words[i] == value);
}

static void hosts(void) {
    int32_t all[2] = {-1, -1};
    all[rank] = 10 + rank;
    OK(warplink_all_gather(comm, all, sizeof all[0]));
    HOLDS(all[0] == 10 && all[1] == 11);
    OK(warplink_all_gather(comm, all, 0));
    OK(warplink_barrier(comm));
}

static void channels(void) {
    warplink_channel one, all[3];
    size_t count = 0;
    OK(warplink_channel_get(comm, peer, 7, &one));
    OK(warplink_channel_get_all(comm, NULL, 0, &count));
    HOLDS(count == 2);
    OK(warplink_channel_get_all(comm, all, 3, &count));
    HOLDS(count == 2);
    /* In the order of the declarations; the first is direct, the second proxied. */
    HOLDS(memcmp(&one, &all[0], sizeof one) == 0);
    HOLDS(all[0].peer == (uint32_t)peer && all[1].peer == (uint32_t)peer);
    HOLDS(all[0].proxied == 0 && all[1].proxied == 1);
    /* Rank 1's region is longer. */
    HOLDS(one.local_bytes == (rank == 0 ? 2u : 3u) * BYTES);
    HOLDS(one.remote_bytes == (rank == 0 ? 3u : 2u) * BYTES);
}

/* Kernels swap data through both channels. */
static void kernels(warplink_stream stream, const warplink_region *regions) {
    int runs = 0;
    const warplink_kernel kernel = load_swap(comm, &runs);
    const warplink_shape shape = {1, 32, 0, 0};
    OK(warplink_proxy_launch(comm));
    for (int round = 0; round < ROUNDS; round++) {
        for (int which = 0; which < 2; which++) {
            warplink_argument arguments[2];
            arguments[0] = warplink_argument_channel(comm, peer, which == 0 ? 7 : 8);
            arguments[1] = warplink_argument_u64(BYTES);
            fill(regions[which], BYTES, number(rank, round));
            OK(warplink_launch(kernel, stream, shape, arguments, 2));
            OK(warplink_stream_synchronize(stream));
            all_are(regions[which], 0, number(peer, round));
        }
    }
    HOLDS(strcmp(test_options().device, "host") != 0 || runs == 2 * ROUNDS);
    /* As many signals as rounds arrived, so this holds the stream no longer. */
    OK(warplink_stream_wait(stream, comm, peer, 7, ROUNDS));
    OK(warplink_stream_synchronize(stream));
    OK(warplink_kernel_free(kernel));
}

/* The hosts write and read peers' memory, by the connection with this tag and by all. */
static void writes(warplink_stream stream, warplink_region own, warplink_region source, uint64_t tag) {
    warplink_region region;
    warplink_buffer buffer;
    uint32_t registered = 0;
    size_t bytes = 0;
    void *address = NULL;
    OK(warplink_alloc(comm, 2 * BYTES, &region));
    OK(warplink_region_bytes(region, &bytes));
    OK(warplink_region_address(region, &address));
    HOLDS(bytes == 2 * BYTES && address != NULL);
    OK(warplink_register_buffer(comm, region, &buffer));
    OK(warplink_buffer_number(buffer, peer, tag, &registered));
    HOLDS(registered == 1);

    fill(region, 0, 0);
    fill(source, 0, number(rank, 5000));
    OK(warplink_barrier(comm));
    OK(warplink_registered_write(buffer, BYTES, span(source, 0, BYTES), stream));
    OK(warplink_stream_synchronize(stream));
    OK(warplink_barrier(comm));
    all_are(region, BYTES, number(peer, 5000));
    all_are(region, 0, 0);
    FAILS(warplink_registered_write(buffer, BYTES + 1, span(source, 0, BYTES), stream),
          WARPLINK_STATUS_INVALID_ARGUMENT, "pass the end");

    /* By the connection: into the buffer's start, which the peer has looked at, and back from it. */
    OK(warplink_barrier(comm));
    fill(source, 0, number(rank, 6000));
    OK(warplink_write(comm, peer, tag, at(registered, 0), span(source, 0, BYTES), stream));
    OK(warplink_read(comm, peer, tag, span(own, 0, BYTES), at(registered, 0), stream));
    OK(warplink_copy(span(own, BYTES, BYTES), span(own, 0, BYTES), stream));
    OK(warplink_stream_synchronize(stream));
    all_are(own, BYTES, number(rank, 6000));
    OK(warplink_barrier(comm));
    all_are(region, 0, number(peer, 6000));
    OK(warplink_buffer_free(buffer));
    OK(warplink_region_free(region));
}

/* A stream that somebody else made: on a GPU, the handle of another stream will do. */
static void borrowed_streams(warplink_stream stream, warplink_region region) {
    warplink_stream borrowed;
    void *raw = NULL;
    OK(warplink_stream_raw(stream, &raw));
    if (strcmp(test_options().device, "host") == 0) {
        FAILS(warplink_stream_borrow(comm, raw, &borrowed), WARPLINK_STATUS_UNSUPPORTED, "no raw form");
        return;
    }
    OK(warplink_stream_borrow(comm, raw, &borrowed));
    fill(region, 0, 123);
    OK(warplink_copy(span(region, BYTES, BYTES), span(region, 0, BYTES), borrowed));
    OK(warplink_stream_synchronize(borrowed));
    all_are(region, BYTES, 123);
    OK(warplink_stream_destroy(borrowed));
    FAILS(warplink_stream_synchronize(borrowed), WARPLINK_STATUS_CLOSED, "the stream was freed");
    OK(warplink_stream_synchronize(stream));
}

int main(int argc, char **argv) {
    const warplink_options options = test_options();
    warplink_region regions[2], source, part;
    warplink_stream stream;
    void *address = NULL;
    HOLDS(argc == 4 || argc == 5);
    HOLDS(warplink_version() ==
          10000 * WARPLINK_VERSION_MAJOR + 100 * WARPLINK_VERSION_MINOR + WARPLINK_VERSION_PATCH);
    OK(warplink_set_bootstrap_timeout(60));
    OK(warplink_init(&comm, atoi(argv[2]), argv[3], atoi(argv[1]), &options));
    OK(warplink_rank(comm, &rank));
    OK(warplink_size(comm, &size));
    HOLDS(rank == atoi(argv[1]) && size == 2);
    peer = 1 - rank;
    hosts();

    OK(warplink_setup(comm)); /* Nothing was declared. */
    for (int which = 0; which < 2; which++) {
        OK(warplink_alloc(comm, (size_t)(rank == 0 ? 2 : 3) * BYTES, &regions[which]));
        OK(warplink_connect(comm, peer, 7 + (uint64_t)which, regions[which],
                            which == 0 ? WARPLINK_TRANSPORT_DIRECT : WARPLINK_TRANSPORT_PROXIED, NULL));
    }
    OK(warplink_setup(comm));
    channels();

    OK(warplink_stream_create(comm, &stream));
    OK(warplink_alloc(comm, 2 * BYTES, &source));
    borrowed_streams(stream, source);
    OK(warplink_launched(comm, stream));
    kernels(stream, regions);
    writes(stream, regions[0], source, 7);
    if (argc == 5) {
        HOLDS(strcmp(argv[4], "network") == 0);
        OK(warplink_connect(comm, peer, 9, regions[0], WARPLINK_TRANSPORT_NETWORK, NULL));
        OK(warplink_setup(comm));
        writes(stream, regions[0], source, 9);
    }

    /* Memory that somebody else allocated: here, a part of a region. */
    OK(warplink_region_address(source, &address));
    OK(warplink_register(comm, (char *)address + BYTES, BYTES, &part));
    fill(part, 0, 77);
    all_are(source, BYTES, 77);
    OK(warplink_region_free(part));

    OK(warplink_proxy_stop(comm));
    OK(warplink_proxy_stop(comm));
    /* Once more: connections work as before. */
    OK(warplink_barrier(comm));
    OK(warplink_proxy_launch(comm));
    OK(warplink_barrier(comm));
    kernels(stream, regions);
    OK(warplink_barrier(comm));
    OK(warplink_proxy_stop(comm));
    OK(warplink_stream_destroy(stream));
    OK(warplink_destroy(comm));
    return 0;
}
