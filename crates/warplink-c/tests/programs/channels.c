/* One of two or more ranks whose kernels have the channels of all connections in an array: a direct one and a proxied one to
   each other rank. They put, get, exchange packets and meet at barriers, and every byte is compared.
   Arguments: rank, size, address. */

#include "check.h"

/* Bytes of a message, and where the next one lies. As packets, a message takes up to twice as many. */
#define PART 1000
#define STRIDE 2048
#define ROUNDS 8

/* Where messages lie in the region of every rank: its own one first. */
#define PUT(size, tag, from) (STRIDE * (1u + (tag) * (size) + (from)))
#define PACKED(size, kind, from) (STRIDE * (1u + (2 + (kind)) * (size) + (from)))
#define READ(size, kind, from) (STRIDE * (1u + (5 + (kind)) * (size) + (from)))
#define GOT(size, tag, from) (STRIDE * (1u + (8 + (tag)) * (size) + (from)))
#define END(size) (STRIDE * (1u + 10 * (size)))

/* The kernel in both languages. The first channels, one for each other rank, are direct; then come proxied ones. `seen` gets
   peer and epoch of each channel, and at its end where the array lies. */
static const char *const TALK =
    "#include <warplink/device.cuh>\n"
    "using namespace warplink;\n"
    "__device__ u64 place(u32 size, u32 row, u32 from) { return 2048ull * (1 + row * size + from); }\n"
    "extern \"C\" __global__ void talk(const Channel *channels, u32 count, u32 rank, u32 size, u32 round, u64 *seen) {\n"
    "    const Block block;\n"
    "    const u32 others = size - 1, bytes = 1000;\n"
    "    bool good = true;\n"
    "    for (u32 i = 0; i < count; i++)\n"
    "        good &= channels[i].put_with_signal(block, place(size, i / others, rank), 0, bytes) == Status::ok;\n"
    "    for (u32 i = 0; i < count; i++) good &= channels[i].wait(block) == Status::ok;\n"
    "    for (u32 i = 0; i < others; i++) {\n"
    "        good &= channels[i].put_packets8(block, place(size, 2, rank), 0, bytes, round) == Status::ok;\n"
    "        good &= channels[i].put_packets16(block, place(size, 3, rank), 0, bytes, round) == Status::ok;\n"
    "        good &= channels[i].put_packets128(block, place(size, 4, rank), 0, bytes, round) == Status::ok;\n"
    "    }\n"
    "    for (u32 i = 0; i < others; i++) {\n"
    "        const u32 peer = channels[i].peer;\n"
    "        good &= channels[i].read_packets8(block, place(size, 5, peer), place(size, 2, peer), bytes, round) == Status::ok;\n"
    "        good &= channels[i].read_packets16(block, place(size, 6, peer), place(size, 3, peer), bytes, round) == Status::ok;\n"
    "        good &= channels[i].read_packets128(block, place(size, 7, peer), place(size, 4, peer), bytes, round) == Status::ok;\n"
    "    }\n"
    "    for (u32 i = 0; i < count; i++) {\n"
    "        good &= channels[i].get(block, place(size, 8 + i / others, channels[i].peer), 0, bytes) == Status::ok;\n"
    "        good &= channels[i].flush(block) == Status::ok;\n"
    "    }\n"
    "    good &= barrier(block, channels, others) == Status::ok;\n"
    "    good &= barrier(block, channels, count) == Status::ok;\n"
    "    if (!good || threadIdx.x != 0) return;\n"
    "    for (u32 i = 0; i < count; i++) {\n"
    "        seen[2 * i] = channels[i].peer;\n"
    "        seen[2 * i + 1] = channels[i].epoch();\n"
    "    }\n"
    "    seen[2 * count] = (u64)channels;\n"
    "}\n";

/* Ends the body where a call fails. */
#define DO(call)                                                  \
    do {                                                          \
        const int32_t status = (int32_t)(call);                   \
        if (status != WARPLINK_STATUS_SUCCESS) return status;     \
    } while (0)

static int32_t talk(void *user) {
    const uint32_t all = 0;
    uint32_t channels[64], count, index, blocks, threads, i;
    uint64_t given, rank, size, round, epoch;
    int32_t peer;
    (void)user;
    DO(warplink_block_index(&index, &blocks));
    DO(warplink_block_threads(&threads));
    HOLDS(index == 0 && blocks == 1 && threads == 256);
    DO(warplink_block_u64(1, &given));
    DO(warplink_block_u64(2, &rank));
    DO(warplink_block_u64(3, &size));
    DO(warplink_block_u64(4, &round));
    DO(warplink_block_channels(0, &count));
    HOLDS(count == given && count <= 64);
    const uint32_t s = (uint32_t)size, me = (uint32_t)rank, others = s - 1, flag = (uint32_t)round;
    for (i = 0; i < count; i++) DO(warplink_block_channel(0, i, &channels[i]));
    for (i = 0; i < count; i++)
        DO(warplink_block_put_with_signal(channels[i], at(0, PUT(s, i / others, me)), at(0, 0), PART));
    for (i = 0; i < count; i++) DO(warplink_block_wait(channels[i]));
    for (i = 0; i < others; i++) {
        DO(warplink_block_put_packets8(channels[i], at(0, PACKED(s, 0, me)), at(0, 0), PART, flag));
        DO(warplink_block_put_packets16(channels[i], at(0, PACKED(s, 1, me)), at(0, 0), PART, flag));
        DO(warplink_block_put_packets128(channels[i], at(0, PACKED(s, 2, me)), at(0, 0), PART, round));
    }
    for (i = 0; i < others; i++) {
        DO(warplink_block_peer(channels[i], &peer));
        const uint32_t from = (uint32_t)peer;
        DO(warplink_block_read_packets8(channels[i], at(0, READ(s, 0, from)), at(0, PACKED(s, 0, from)), PART, flag));
        DO(warplink_block_read_packets16(channels[i], at(0, READ(s, 1, from)), at(0, PACKED(s, 1, from)), PART, flag));
        DO(warplink_block_read_packets128(channels[i], at(0, READ(s, 2, from)), at(0, PACKED(s, 2, from)), PART, round));
    }
    for (i = 0; i < count; i++) {
        DO(warplink_block_peer(channels[i], &peer));
        DO(warplink_block_get(channels[i], at(0, GOT(s, i / others, (uint32_t)peer)), at(0, 0), PART));
        DO(warplink_block_flush(channels[i]));
    }
    DO(warplink_block_barrier(channels, others));
    /* The numbers of all, or the array in their place. */
    DO(round % 2 == 0 ? warplink_block_barrier(channels, count) : warplink_block_barrier(&all, 1));
    for (i = 0; i < count; i++) {
        DO(warplink_block_peer(channels[i], &peer));
        DO(warplink_block_epoch(channels[i], &epoch));
        const uint64_t pair[2] = {(uint64_t)peer, epoch};
        DO(warplink_block_store(5, at(0, sizeof pair * i), pair, sizeof pair));
    }
    return WARPLINK_STATUS_SUCCESS;
}

/* What calls with numbers that are none, and with places that packets cannot have, come to. The first argument is the array,
   the second a channel of its own, the third a number. */
static int32_t wrong(void *user) {
    const warplink_status invalid = WARPLINK_STATUS_INVALID_ARGUMENT;
    uint32_t count, direct, proxied, number = 77, i;
    int32_t peer, other;
    uint64_t word = 1, first = 0;
    (void)user;
    DO(warplink_block_channels(0, &count));
    DO(warplink_block_channel(0, 0, &direct));
    DO(warplink_block_channel(0, count - 1, &proxied));
    FAILS(warplink_block_channel(0, count, &number), invalid, "expected one below");
    FAILS(warplink_block_channel(0, UINT32_MAX, &number), invalid, "expected one below");
    FAILS(warplink_block_channel(1, 0, &number), invalid, "argument 1 is a channel; expected channels");
    FAILS(warplink_block_channel(3, 0, &number), invalid, "asks for argument 3");
    FAILS(warplink_block_channel(UINT32_MAX, 0, &number), invalid, "asks for argument");
    FAILS(warplink_block_channels(2, &number), invalid, "expected channels");
    HOLDS(number == 77);
    FAILS(warplink_block_wait(0), invalid, "get one of its channels with warplink_block_channel");
    FAILS(warplink_block_signal(2), invalid, "expected a channel");
    FAILS(warplink_block_signal(3), invalid, "asks for argument 3");
    FAILS(warplink_block_peer(UINT32_MAX, &peer), invalid, "asks for argument");
    FAILS(warplink_block_load(0, &word, at(0, 0), 8), invalid, "an array of channels");
    number = 2;
    FAILS(warplink_block_barrier(&number, 1), invalid, "expected a channel");
    DO(warplink_block_barrier(NULL, 0));
    FAILS(warplink_block_put_packets8(proxied, at(0, 0), at(0, 0), 8, 1), WARPLINK_STATUS_UNSUPPORTED, "direct channel");
    FAILS(warplink_block_put_packets16(direct, at(0, STRIDE + 8), at(0, 0), 8, 1), invalid, "multiples of 16");
    FAILS(warplink_block_put_packets128(direct, at(0, STRIDE + 64), at(0, 0), 8, 1), invalid, "multiples of 128");
    FAILS(warplink_block_put_packets8(direct, at(0, STRIDE), at(0, 0), 6, 1), invalid, "multiples of 8 and of 4");
    FAILS(warplink_block_read_packets8(direct, at(0, 0), at(0, UINT64_MAX), 8, 1), invalid, "pass the end");
    FAILS(warplink_block_put_packets8(direct, at(0, 0), at(0, 0), UINT64_MAX / 4, 1), invalid, "pass the end");
    FAILS(warplink_block_put(direct, at(9, 0), at(0, 0), 8), invalid, "unknown region 9");
    /* Both kinds of number name the same channel, and its memory. */
    DO(warplink_block_peer(direct, &peer));
    DO(warplink_block_peer(1, &other));
    HOLDS(peer == other);
    DO(warplink_block_load(direct, &first, at(0, 0), 8));
    DO(warplink_block_load(1, &word, at(0, 0), 8));
    HOLDS(first == word);
    for (i = 0; i < count; i++) {
        DO(warplink_block_channel(0, i, &number));
        DO(warplink_block_store(number, at(0, 0), &word, 8));
    }
    return WARPLINK_STATUS_SUCCESS;
}

static unsigned char byte_of(uint32_t rank, uint32_t round, uint32_t i) {
    return (unsigned char)(101 * rank + 7 * round + 13 * i + i / 256);
}

/* Whether a message of a rank lies there. */
static void compare(const unsigned char *region, uint32_t place, uint32_t from, uint32_t round) {
    for (uint32_t i = 0; i < PART; i++) {
        if (region[place + i] == byte_of(from, round, i)) continue;
        fprintf(stderr, "round %u: byte %u of rank %u at %u differs\n", round, i, from, place);
        exit(1);
    }
}

static warplink_kernel kernel_of(warplink_comm comm, const char *name, warplink_host_kernel_body body, const char *cuda) {
    warplink_host_kernel host;
    warplink_module_source source;
    warplink_module module;
    warplink_kernel kernel;
    host.name = name;
    host.body = body;
    host.user = NULL;
    memset(&source, 0, sizeof source);
    source.name = name;
    source.cuda = cuda;
    source.host_kernels = &host;
    source.host_kernel_count = 1;
    OK(warplink_module_load(comm, &source, &module));
    OK(warplink_kernel_get(module, name, &kernel));
    OK(warplink_module_free(module));
    return kernel;
}

int main(int argc, char **argv) {
    const warplink_options options = test_options();
    const int is_host = strcmp(options.device, "host") == 0;
    warplink_comm comm;
    warplink_region region, result;
    warplink_stream stream;
    warplink_channel channels[64];
    size_t count;
    uint64_t seen[129], array = 0;
    HOLDS(argc == 4);
    const uint32_t rank = (uint32_t)atoi(argv[1]), size = (uint32_t)atoi(argv[2]), others = size - 1;
    HOLDS(size >= 2 && 2 * others <= 64);
    OK(warplink_init(&comm, (int32_t)size, argv[3], (int32_t)rank, &options));
    OK(warplink_alloc(comm, END(size), &region));
    OK(warplink_alloc(comm, sizeof seen, &result));
    OK(warplink_stream_create(comm, &stream));
    unsigned char *bytes = (unsigned char *)calloc(1, END(size));
    HOLDS(bytes != NULL);
    OK(warplink_upload(span(region, 0, END(size)), bytes));
    const warplink_kernel kernel = kernel_of(comm, "talk", talk, TALK);
    warplink_kernel refused = {0};
    if (is_host) refused = kernel_of(comm, "wrong", wrong, NULL);

    /* The proxied ones in a setup of their own: kernels that are launched later have them too. */
    uint32_t flag = 0, peer, i;
    uint64_t expected[2] = {0, 0};
    for (uint32_t tag = 0; tag < 2; tag++) {
        for (i = 1; i < size; i++)
            OK(warplink_connect(comm, (int32_t)((rank + i) % size), tag, region,
                                tag == 0 ? WARPLINK_TRANSPORT_DIRECT : WARPLINK_TRANSPORT_PROXIED, NULL));
        OK(warplink_setup(comm));
        memset(channels, 0x3c, sizeof channels);
        OK(warplink_channel_get_all(comm, channels, 1, &count));
        HOLDS(channels[1].peer == 0x3c3c3c3c && count == (tag + 1) * others);
        OK(warplink_channel_get_all(comm, channels, 64, &count));
        HOLDS(count == (tag + 1) * others);
        for (uint32_t round = 0; round < ROUNDS; round++) {
            const warplink_shape shape = {1, 256, 0, 0};
            flag++;
            for (i = 0; i < PART; i++) bytes[i] = byte_of(rank, flag, i);
            OK(warplink_upload(span(region, 0, PART), bytes));
            memset(seen, 0, sizeof seen);
            OK(warplink_upload(span(result, 0, sizeof seen), seen));
            /* The peers have looked at what they got in the last round. */
            OK(warplink_barrier(comm));
            const warplink_argument arguments[] = {
                warplink_argument_channels(comm),   warplink_argument_u32((uint32_t)count), warplink_argument_u32(rank),
                warplink_argument_u32(size),        warplink_argument_u32(flag),            warplink_argument_region(result, 0),
            };
            OK(warplink_launch(kernel, stream, shape, arguments, 6));
            OK(warplink_stream_synchronize(stream));
            OK(warplink_download(seen, span(result, 0, sizeof seen)));
            OK(warplink_download(bytes, span(region, 0, END(size))));
            /* Signals: of the put, of both barriers over direct channels, and of the second one over all. */
            expected[0] += 3;
            if (tag == 1) expected[1] += 2;
            for (i = 0; i < count; i++) {
                peer = (rank + 1 + i % others) % size;
                HOLDS(seen[2 * i] == peer);
                HOLDS(seen[2 * i + 1] == expected[i / others]);
                compare(bytes, PUT(size, i / others, peer), peer, flag);
                compare(bytes, GOT(size, i / others, peer), peer, flag);
                for (uint32_t kind = 0; kind < 3; kind++) compare(bytes, READ(size, kind, peer), peer, flag);
            }
            /* Every launch has the same array, until there are more channels. */
            HOLDS(round == 0 || seen[2 * count] == array);
            array = seen[2 * count];
        }
    }
    if (is_host) {
        const warplink_shape shape = {1, 1, 0, 0};
        const warplink_argument arguments[] = {
            warplink_argument_channels(comm),
            warplink_argument_channel(comm, (int32_t)((rank + 1) % size), 0),
            warplink_argument_u32(0),
        };
        OK(warplink_launch(refused, stream, shape, arguments, 3));
        OK(warplink_stream_synchronize(stream));
    }
    free(bytes);
    OK(warplink_destroy(comm));
    printf("rank %u of %u: %u rounds\n", rank, size, flag);
    return 0;
}
