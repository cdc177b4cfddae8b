/* One of two ranks that does everything wrong, and goes on. Arguments: rank, size, address. */

#include "check.h"

#define INVALID WARPLINK_STATUS_INVALID_ARGUMENT
#define USAGE WARPLINK_STATUS_INVALID_USAGE
#define CLOSED WARPLINK_STATUS_CLOSED

static warplink_comm comm;
static int32_t rank, peer;

static int32_t count(void *user) {
    *(int *)user += 1;
    return WARPLINK_STATUS_SUCCESS;
}

/* Before there is a communicator. */
static void before_init(const char *address) {
    const warplink_comm none = {0};
    const warplink_comm made_up = {12345};
    warplink_options options = test_options();
    warplink_unique_id id;
    int32_t value = -7;
    FAILS(warplink_rank(none, &value), INVALID, "the communicator is zero");
    FAILS(warplink_rank(made_up, &value), INVALID, "is not a communicator");
    FAILS(warplink_barrier(none), INVALID, "the communicator is zero");
    FAILS(warplink_destroy(none), INVALID, "the communicator is zero");
    HOLDS(value == -7);

    FAILS(warplink_init(NULL, 2, address, 0, &options), INVALID, "comm is null");
    FAILS(warplink_init(&comm, 2, NULL, 0, &options), INVALID, "address is null");
    FAILS(warplink_init(&comm, 2, "nowhere", 0, &options), WARPLINK_STATUS_PARSE, "WARPLINK_ADDRESS");
    FAILS(warplink_init(&comm, 2, "\xff", 0, &options), INVALID, "not UTF-8");
    FAILS(warplink_init(&comm, 2, address, 2, &options), INVALID, "rank 2 of 2 ranks");
    FAILS(warplink_init(&comm, 2, address, -1, &options), INVALID, "rank -1 of 2 ranks");
    FAILS(warplink_init(&comm, 0, address, 0, &options), INVALID, "rank 0 of 0 ranks");
    options.device = "abacus";
    FAILS(warplink_init(&comm, 2, address, 0, &options), WARPLINK_STATUS_PARSE, "abacus");
    options = test_options();
    options.timeout = -1;
    FAILS(warplink_init(&comm, 2, address, 0, &options), INVALID, "a timeout of -1");
    options = test_options();
    options.size -= 1;
    FAILS(warplink_init(&comm, 2, address, 0, &options), INVALID, "warplink_options_default");

    FAILS(warplink_unique_id_create(NULL, 0, NULL), INVALID, "id is null");
    FAILS(warplink_unique_id_create("moon", 0, &id), INVALID, "'moon' is not an IP address");
    FAILS(warplink_unique_id_create("0.0.0.0", 0, &id), INVALID, "0.0.0.0");
    FAILS(warplink_init_from_id(&comm, 2, NULL, 0, NULL), INVALID, "id is null");
    OK(warplink_unique_id_create(NULL, 0, &id));
    OK(warplink_unique_id_release(&id));
    id.bytes[60] ^= 1;
    FAILS(warplink_init_from_id(&comm, 2, &id, 0, NULL), WARPLINK_STATUS_INVALID_HANDLE, "altered");
    FAILS(warplink_set_bootstrap_timeout(0), INVALID, "a timeout of 0 seconds");
}

/* Without connections. */
static void before_setup(warplink_region region, warplink_stream stream) {
    warplink_channel channel;
    warplink_buffer buffer;
    warplink_argument argument;
    warplink_kernel kernel = load_swap(comm, NULL);
    const warplink_shape shape = {1, 1, 0, 0};
    size_t count = 0;
    FAILS(warplink_channel_get(comm, peer, 0, &channel), INVALID, "no connection to rank");
    FAILS(warplink_channel_get_all(comm, NULL, 0, &count), USAGE, "call warplink_connect");
    FAILS(warplink_register_buffer(comm, region, &buffer), USAGE, "no connection was set up");
    FAILS(warplink_proxy_launch(comm), USAGE, "no connection was set up");
    FAILS(warplink_proxy_stop(comm), USAGE, "no connection was set up");
    FAILS(warplink_launched(comm, stream), USAGE, "no connection was set up");
    argument = warplink_argument_channels(comm);
    FAILS(warplink_launch(kernel, stream, shape, &argument, 1), USAGE, "no connection was set up");

    FAILS(warplink_connect(comm, rank, 0, region, WARPLINK_TRANSPORT_DIRECT, NULL), INVALID, "is not a peer of rank");
    FAILS(warplink_connect(comm, 2, 0, region, WARPLINK_TRANSPORT_DIRECT, NULL), INVALID, "rank 2 is not a peer");
    FAILS(warplink_connect(comm, -1, 0, region, WARPLINK_TRANSPORT_DIRECT, NULL), INVALID, "rank -1 is not a peer");
    FAILS(warplink_connect(comm, peer, 0, region, 9, NULL), INVALID, "unknown transport 9");
    FAILS(warplink_connect(comm, peer, 0, region, WARPLINK_TRANSPORT_DIRECT, "eth0"), INVALID, "no network devices");
    OK(warplink_connect(comm, peer, 0, region, WARPLINK_TRANSPORT_DIRECT, NULL));
    FAILS(warplink_connect(comm, peer, 0, region, WARPLINK_TRANSPORT_DIRECT, NULL), INVALID, "was declared before");
    FAILS(warplink_channel_get(comm, peer, 0, &channel), USAGE, "declared but not set up");
    HOLDS(warplink_last_error_peer() == peer);
    HOLDS(strstr(warplink_last_error(), "help: call warplink_setup first") != NULL);
    FAILS(warplink_write(comm, peer, 0, at(0, 0), span(region, 0, 8), stream), USAGE, "declared but not set up");
    FAILS(warplink_read(comm, peer, 0, span(region, 0, 8), at(0, 0), stream), USAGE, "declared but not set up");
    FAILS(warplink_stream_wait(stream, comm, peer, 0, 0), USAGE, "declared but not set up");
    argument = warplink_argument_channel(comm, peer, 0);
    FAILS(warplink_launch(kernel, stream, shape, &argument, 1), USAGE, "declared but not set up");
    OK(warplink_kernel_free(kernel));
    FAILS(warplink_kernel_free(kernel), CLOSED, "the kernel was freed");
}

/* Machine code that is none, is cut off, is for another machine, or for none of the kernels of this device. */
static void images(warplink_stream stream) {
    /* The start of a fat binary of 16 + 100 bytes, and the whole of it. */
    static unsigned char fat[116] = {0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0, 100};
    static unsigned char object[64] = {0x7f, 'E', 'L', 'F', 2, 1};
    static const char ptx[] = "// Generated\n.version 8.0\n.target sm_75\nnonsense";
    const int is_host = strcmp(test_options().device, "host") == 0;
    const warplink_shape shape = {1, 1, 0, 0};
    int runs = 0;
    warplink_host_kernel host;
    warplink_module_source source;
    warplink_module module = {0};
    warplink_kernel kernel;
    memset(&source, 0, sizeof source);
    source.name = "image";
    source.image = "nonsense";
    source.image_bytes = 8;
    FAILS(warplink_module_load(comm, &source, &module), INVALID, "starts with the bytes 6e 6f 6e 73 65 6e 73 65;");
    HOLDS(strstr(warplink_last_error(), "expected a whole cubin, a whole fat binary, or PTX") != NULL);
    HOLDS(strstr(warplink_last_error(), "help: pass the whole file that nvcc produced") != NULL);
    source.image_bytes = 0;
    FAILS(warplink_module_load(comm, &source, &module), INVALID, "the image has no bytes");
    source.image = fat;
    source.image_bytes = sizeof fat - 1;
    FAILS(warplink_module_load(comm, &source, &module), INVALID, "115 bytes of the 116");
    object[18] = 62;
    source.image = object;
    source.image_bytes = sizeof object;
    FAILS(warplink_module_load(comm, &source, &module), INVALID, "an object file for CPUs");
    source.image = ptx;
    source.image_bytes = sizeof ptx;
    source.cuda = SWAP;
    FAILS(warplink_module_load(comm, &source, &module), INVALID, "both CUDA C++ and machine code");
    source.cuda = NULL;
    if (!is_host) {
        FAILS(warplink_module_load(comm, &source, &module), WARPLINK_STATUS_DRIVER, "for the GPU at hand");
        return;
    }
    FAILS(warplink_module_load(comm, &source, &module), WARPLINK_STATUS_UNSUPPORTED, "`host_kernels` in C");
    /* With a body, the image is for other devices. */
    host.name = "count";
    host.body = count;
    host.user = &runs;
    source.host_kernels = &host;
    source.host_kernel_count = 1;
    OK(warplink_module_load(comm, &source, &module));
    OK(warplink_kernel_get(module, "count", &kernel));
    OK(warplink_launch(kernel, stream, shape, NULL, 0));
    OK(warplink_stream_synchronize(stream));
    HOLDS(runs == 1);
    OK(warplink_kernel_free(kernel));
    OK(warplink_module_free(module));
}

/* With everything there. */
static void wrong_arguments(warplink_region region, warplink_stream stream) {
    const warplink_shape shape = {1, 1, 0, 0};
    warplink_kernel kernel = load_swap(comm, NULL);
    warplink_argument arguments[2];
    warplink_module_source source;
    warplink_module module;
    char bytes[64];
    FAILS(warplink_upload(span(region, 60, 8), bytes), INVALID, "out of bounds");
    FAILS(warplink_upload(span(region, UINT64_MAX, 8), bytes), INVALID, "pass the end");
    FAILS(warplink_upload(span(region, 0, 8), NULL), INVALID, "source is null");
    FAILS(warplink_download(NULL, span(region, 0, 8)), INVALID, "target is null");
    FAILS(warplink_copy(span(region, 0, 8), span(region, 8, 16), stream), INVALID, "");
    FAILS(warplink_write(comm, peer, 0, at(0, 60), span(region, 0, 8), stream), INVALID, "pass the end");
    FAILS(warplink_write(comm, peer, 0, at(3, 0), span(region, 0, 8), stream), INVALID, "unknown region 3");
    FAILS(warplink_write(comm, peer, 1, at(0, 0), span(region, 0, 8), stream), INVALID, "with tag 1");
    FAILS(warplink_alloc(comm, 8, NULL), INVALID, "region is null");
    FAILS(warplink_alloc(comm, 0, &region), INVALID, "");
    FAILS(warplink_register(comm, NULL, 8, &region), INVALID, "address is null");
    FAILS(warplink_all_gather(comm, NULL, 8), INVALID, "data is null");
    FAILS(warplink_all_gather(comm, bytes, SIZE_MAX), INVALID, "what memory can hold");
    FAILS(warplink_abort(comm, NULL), INVALID, "reason is null");

    memset(arguments, 0, sizeof arguments);
    FAILS(warplink_launch(kernel, stream, shape, arguments, 2), INVALID, "argument 0 is of unknown kind 0");
    FAILS(warplink_launch(kernel, stream, shape, NULL, 2), INVALID, "arguments is null");
    FAILS(warplink_module_load(comm, NULL, &module), INVALID, "source is null");
    memset(&source, 0, sizeof source);
    FAILS(warplink_module_load(comm, &source, &module), WARPLINK_STATUS_UNSUPPORTED, "");
    source.host_kernel_count = 1;
    FAILS(warplink_module_load(comm, &source, &module), INVALID, "the host kernels is null");
    images(stream);

    /* Outside of a host kernel's body. */
    FAILS(warplink_block_wait(0), USAGE, "no kernel of the host device runs on this thread");
    FAILS(warplink_block_put(0, at(0, 0), at(0, 0), 1), USAGE, "no kernel of the host device");
    OK(warplink_kernel_free(kernel));
}

/* Calls that succeed only after others, where these have not been made. */
static void wrong_orders(warplink_region region, warplink_stream stream) {
    const warplink_shape shape = {1, 1, 0, 0};
    warplink_kernel kernel = load_swap(comm, NULL);
    warplink_argument arguments[2];
    warplink_buffer buffer;
    warplink_stream broken;
    uint32_t number = 77;
    /* A buffer is on the connections that were there before it. */
    OK(warplink_register_buffer(comm, region, &buffer));
    OK(warplink_connect(comm, peer, 5, region, WARPLINK_TRANSPORT_PROXIED, NULL));
    FAILS(warplink_buffer_number(buffer, peer, 5, &number), INVALID, "not on a connection");
    OK(warplink_setup(comm));
    FAILS(warplink_buffer_number(buffer, peer, 5, &number), INVALID, "not on a connection");
    FAILS(warplink_buffer_number(buffer, -1, 5, &number), INVALID, "not on a connection");
    HOLDS(number == 77);
    OK(warplink_buffer_free(buffer));
    FAILS(warplink_buffer_free(buffer), CLOSED, "the buffer was freed");
    /* A proxied channel without the proxy: the launch, or the kernel, fails. */
    OK(warplink_stream_create(comm, &broken));
    OK(warplink_barrier(comm));
    OK(warplink_proxy_stop(comm));
    arguments[0] = warplink_argument_channel(comm, peer, 5);
    arguments[1] = warplink_argument_u64(8);
    if (warplink_launch(kernel, broken, shape, arguments, 2) == WARPLINK_STATUS_SUCCESS)
        HOLDS(strcmp(test_options().device, "host") != 0 || warplink_stream_synchronize(broken) != WARPLINK_STATUS_SUCCESS);
    HOLDS(strstr(warplink_last_error(), "proxy") != NULL || strcmp(test_options().device, "host") != 0);
    OK(warplink_stream_destroy(broken));
    FAILS(warplink_launch(kernel, broken, shape, arguments, 2), CLOSED, "the stream was freed");
    /* The others go on. */
    OK(warplink_stream_synchronize(stream));
    OK(warplink_kernel_free(kernel));
    FAILS(warplink_launch(kernel, stream, shape, arguments, 2), CLOSED, "the kernel was freed");
    /* What is declared and never set up is no obstacle to leaving. */
    OK(warplink_connect(comm, peer, 6, region, WARPLINK_TRANSPORT_DIRECT, NULL));
}

int main(int argc, char **argv) {
    const warplink_options options = test_options();
    warplink_region region, freed;
    warplink_stream stream;
    warplink_channel channel;
    int32_t value;
    HOLDS(argc == 4);
    before_init(argv[3]);
    HOLDS(*warplink_last_error() != '\0');
    OK(warplink_init(&comm, 2, argv[3], atoi(argv[1]), &options));
    OK(warplink_rank(comm, &rank));
    FAILS(warplink_rank(comm, NULL), INVALID, "rank is null");
    peer = 1 - rank;
    OK(warplink_alloc(comm, 64, &region));
    OK(warplink_alloc(comm, 64, &freed));
    OK(warplink_region_free(freed));
    FAILS(warplink_region_free(freed), CLOSED, "the region was freed");
    FAILS(warplink_connect(comm, peer, 0, freed, WARPLINK_TRANSPORT_DIRECT, NULL), CLOSED, "the region was freed");
    OK(warplink_stream_create(comm, &stream));
    before_setup(region, stream);
    OK(warplink_setup(comm));
    FAILS(warplink_connect(comm, peer, 0, region, WARPLINK_TRANSPORT_DIRECT, NULL), INVALID, "was declared before");
    FAILS(warplink_channel_get(comm, peer, 0, NULL), INVALID, "channel is null");
    OK(warplink_channel_get(comm, peer, 0, &channel));
    wrong_arguments(region, stream);
    wrong_orders(region, stream);

    OK(warplink_destroy(comm));
    /* Everything of it went with it. */
    FAILS(warplink_destroy(comm), CLOSED, "the communicator was destroyed");
    FAILS(warplink_rank(comm, &value), CLOSED, "the communicator was destroyed");
    FAILS(warplink_setup(comm), CLOSED, "the communicator was destroyed");
    FAILS(warplink_stream_synchronize(stream), CLOSED, "or its communicator was destroyed");
    FAILS(warplink_upload(span(region, 0, 1), "x"), CLOSED, "or its communicator was destroyed");
    FAILS(warplink_region_free(region), CLOSED, "or its communicator was destroyed");
    return 0;
}
