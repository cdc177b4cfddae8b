/* One of two ranks that calls every function wrongly, and goes on. Arguments: rank, size, address. calls.inc is made from
   warplink.h by the test (tests/every_call/mod.rs). */

#include "check.h"

#include <time.h>

/* What may be called with. */
struct set {
    warplink_comm comm;
    warplink_region region;
    warplink_stream stream;
    warplink_buffer buffer;
    warplink_module module;
    warplink_kernel kernel;
    warplink_collectives collectives;
    warplink_experts experts;
    warplink_bound_call bound_call;
    warplink_routing routing;
};

static struct set live, freed, made_up;
static const struct set none;
static int32_t rank;
static const char *rank_0;
static const warplink_shape shape = {1, 1, 0, 0};
static warplink_options options;
static warplink_unique_id id;
static warplink_module_source source;
static warplink_host_kernel host;
static warplink_argument one;
static warplink_collective_options ways;
static warplink_collective_call call;
static warplink_fused_call rows;
static warplink_message message;
static warplink_expert_options layer;
static warplink_dispatched dispatched;
static warplink_tokens tokens;
static warplink_parts parts;
static const uint64_t counts[2] = {1, 1};
/* Memory of the device, and of the host, of which nothing may change. */
static void *device;
static uint64_t words[32];

#include "calls.inc"

static int32_t body(void *user) {
    null_pointers_in_a_block();
    in_a_function_of_the_callers();
    *(int *)user += 1;
    return WARPLINK_STATUS_SUCCESS;
}

/* The calls of a block's own, in one. */
static void blocks(void) {
    int runs = 0;
    const warplink_host_kernel in_block = {"swap", body, &runs};
    warplink_module_source with_body = source;
    warplink_module module;
    warplink_kernel kernel;
    warplink_argument arguments[4];
    with_body.host_kernels = &in_block;
    OK(warplink_module_load(live.comm, &with_body, &module));
    OK(warplink_kernel_get(module, "swap", &kernel));
    arguments[0] = one;
    arguments[1] = warplink_argument_u64(1);
    arguments[2] = warplink_argument_i64(1);
    arguments[3] = warplink_argument_f64(1);
    OK(warplink_launch(kernel, live.stream, shape, arguments, 4));
    OK(warplink_stream_synchronize(live.stream));
    HOLDS(runs == 1);
    OK(warplink_kernel_free(kernel));
    OK(warplink_module_free(module));
}

static void ignore(int32_t level, const char *message, void *user) { (void)level, (void)message, (void)user; }

/* Messages come on any thread, but these calls are made by one of them. */
static int handled;

static void handler(int32_t level, const char *message, void *user) {
    uint32_t index;
    (void)level;
    if (*message == '\0' || user != &handled || !__sync_bool_compare_and_swap(&handled, 0, 1)) return;
    in_a_function_of_the_callers();
    FAILS(warplink_block_index(&index, NULL), WARPLINK_STATUS_INVALID_USAGE, "a call in the log handler");
    warplink_default_log_handler(WARPLINK_LOG_LEVEL_INFO, "from the handler", NULL);
    __sync_bool_compare_and_swap(&handled, 1, 2);
}

static int32_t fail(void *user) {
    (void)user;
    return 77;
}

/* A kernel that fails, which is logged in detail. */
static void logs(void) {
    const warplink_host_kernel host_kernel = {"fail", fail, NULL};
    const struct timespec moment = {0, 1000000};
    warplink_module_source failing = source;
    warplink_module module;
    warplink_kernel kernel;
    warplink_stream stream;
    failing.host_kernels = &host_kernel;
    OK(warplink_set_log_handler(handler, &handled));
    OK(warplink_module_load(live.comm, &failing, &module));
    OK(warplink_kernel_get(module, "fail", &kernel));
    OK(warplink_stream_create(live.comm, &stream));
    OK(warplink_launch(kernel, stream, shape, NULL, 0));
    FAILS(warplink_stream_synchronize(stream), WARPLINK_STATUS_INVALID_ARGUMENT, "the kernel returned 77");
    while (!__sync_bool_compare_and_swap(&handled, 2, 3)) nanosleep(&moment, NULL);
    OK(warplink_set_log_handler(ignore, NULL));
    OK(warplink_stream_destroy(stream));
    OK(warplink_kernel_free(kernel));
    OK(warplink_module_free(module));
}

static void make(struct set *set) {
    void *address = NULL;
    set->comm = live.comm;
    OK(warplink_alloc(live.comm, 1 << 16, &set->region));
    OK(warplink_stream_create(live.comm, &set->stream));
    OK(warplink_module_load(live.comm, &source, &set->module));
    OK(warplink_kernel_get(set->module, "swap", &set->kernel));
    OK(warplink_collectives_join(live.comm, NULL, &set->collectives));
    OK(warplink_experts_create(set->collectives, &layer, &set->experts));
    OK(warplink_region_address(set->region, &address));
    OK(warplink_bind_collective(set->collectives, &call, address, address, &set->bound_call));
    tokens.rows = address;
    tokens.numbers = (const int32_t *)address;
    tokens.count = 1;
    dispatched.rows = (char *)address + 4096;
    dispatched.experts = (int32_t *)(void *)((char *)address + 8192);
    dispatched.counts = (int32_t *)(void *)((char *)address + 12288);
    OK(warplink_experts_dispatch(set->experts, &tokens, &dispatched, &set->routing, set->stream));
    OK(warplink_stream_synchronize(set->stream));
}

static void give_back(const struct set *set) {
    OK(warplink_bound_call_free(set->bound_call));
    OK(warplink_routing_free(set->routing));
    OK(warplink_experts_free(set->experts));
    OK(warplink_collectives_free(set->collectives));
    OK(warplink_kernel_free(set->kernel));
    OK(warplink_module_free(set->module));
    OK(warplink_buffer_free(set->buffer));
    OK(warplink_stream_destroy(set->stream));
    OK(warplink_region_free(set->region));
}

static warplink_status launch(warplink_argument argument) {
    return warplink_launch(live.kernel, live.stream, shape, &argument, 1);
}

/* Handles in arguments, which have no status of their own. */
static void handles_in_arguments(void) {
    const warplink_status invalid = WARPLINK_STATUS_INVALID_ARGUMENT;
    const int32_t peer = 1 - rank;
    warplink_comm gone;
    warplink_argument nothing;
    memset(&nothing, 0, sizeof nothing);
    FAILS(launch(nothing), invalid, "unknown kind 0");
    memset(&nothing, 0x3c, sizeof nothing);
    FAILS(launch(nothing), invalid, "unknown kind");
    FAILS(launch(warplink_argument_region(none.region, 0)), invalid, "the region is zero");
    FAILS(launch(warplink_argument_region(made_up.region, 0)), invalid, "is not a region");
    FAILS(launch(warplink_argument_region(freed.region, 0)), WARPLINK_STATUS_CLOSED, "the region was freed");
    FAILS(launch(warplink_argument_region(live.region, UINT64_MAX)), invalid, "");
    FAILS(launch(warplink_argument_channel(none.comm, peer, 0)), invalid, "the communicator is zero");
    FAILS(launch(warplink_argument_channel(made_up.comm, peer, 0)), invalid, "is not a communicator");
    FAILS(launch(warplink_argument_channel(live.comm, -1, 0)), invalid, "no connection to rank -1");
    FAILS(launch(warplink_argument_channel(live.comm, INT32_MAX, 0)), invalid, "no connection to rank");
    FAILS(launch(warplink_argument_channel(live.comm, peer, UINT64_MAX)), invalid, "no connection to rank");
    FAILS(launch(warplink_argument_channels(none.comm)), invalid, "the communicator is zero");
    FAILS(launch(warplink_argument_channels(made_up.comm)), invalid, "is not a communicator");
    OK(warplink_unique_id_create(NULL, 0, &id));
    OK(warplink_init_from_id(&gone, 1, &id, 0, &options));
    OK(warplink_destroy(gone));
    FAILS(launch(warplink_argument_channels(gone)), WARPLINK_STATUS_CLOSED, "the communicator was destroyed");
    FAILS(launch(warplink_argument_channel(gone, peer, 0)), WARPLINK_STATUS_CLOSED, "the communicator was destroyed");
}

/* What points from within what is passed. */
static void null_members(void) {
    const warplink_status invalid = WARPLINK_STATUS_INVALID_ARGUMENT;
    const int32_t type = WARPLINK_ELEMENT_TYPE_F32;
    warplink_module module;
    warplink_module_source wrong = source;
    warplink_host_kernel kernel = host;
    warplink_message to_nowhere = message;
    warplink_parts no_counts = parts;
    warplink_dispatched target = dispatched;
    warplink_routing routing;
    kernel.name = NULL;
    wrong.host_kernels = &kernel;
    FAILS(warplink_module_load(live.comm, &wrong, &module), invalid, "null");
    kernel = host;
    kernel.body = NULL;
    FAILS(warplink_module_load(live.comm, &wrong, &module), invalid, "null");
    wrong.host_kernels = NULL;
    FAILS(warplink_module_load(live.comm, &wrong, &module), invalid, "null");
    wrong = source;
    wrong.option_count = 1;
    FAILS(warplink_module_load(live.comm, &wrong, &module), invalid, "null");
    wrong = source;
    wrong.cuda = NULL;
    wrong.image_bytes = 8;
    FAILS(warplink_module_load(live.comm, &wrong, &module), invalid, "null");
    to_nowhere.memory = NULL;
    FAILS(warplink_send_receive(live.collectives, &to_nowhere, 1, live.stream), invalid, "messages[0].memory is null");
    no_counts.counts = NULL;
    FAILS(warplink_all_to_all_v(live.collectives, type, device, no_counts, device, parts, live.stream), invalid,
          "output_parts.counts is null");
    FAILS(warplink_all_to_all_v(live.collectives, type, device, parts, device, no_counts, live.stream), invalid,
          "input_parts.counts is null");
    for (int member = 0; member < 3; member++) {
        const char *const says[] = {"rows is null", "experts is null", "counts is null"};
        target = dispatched;
        if (member == 0) target.rows = NULL;
        if (member == 1) target.experts = NULL;
        if (member == 2) target.counts = NULL;
        FAILS(warplink_experts_dispatch(live.experts, &tokens, &target, &routing, live.stream), invalid, says[member]);
    }
    for (int member = 0; member < 2; member++) {
        const char *const says[] = {"tokens is null", "numbers is null"};
        warplink_tokens sent = tokens;
        if (member == 0) sent.rows = NULL;
        if (member == 1) sent.numbers = NULL;
        FAILS(warplink_experts_dispatch(live.experts, &sent, &dispatched, &routing, live.stream), invalid, says[member]);
    }
    /* Where there is no status. */
    warplink_default_log_handler(WARPLINK_LOG_LEVEL_ERROR, NULL, NULL);
    HOLDS(*warplink_status_text(-1) != '\0' && *warplink_status_text(INT32_MAX) != '\0');
}

int main(int argc, char **argv) {
    uint64_t before[32];
    HOLDS(argc == 4);
    rank = atoi(argv[1]);
    rank_0 = argv[3];
    options = test_options();
    ways = warplink_collective_options_default();
    for (int i = 0; i < 32; i++) words[i] = 0x0101010101010101u * (uint64_t)(i + 1);
    memcpy(before, words, sizeof words);
    memset(&made_up, 0x3c, sizeof made_up);
    HOLDS(setenv("WARPLINK_LOG", "debug", 1) == 0);
    OK(warplink_set_log_handler(ignore, NULL));

    host.name = "swap";
    host.body = swap;
    source.name = "swap.cu";
    source.cuda = SWAP;
    source.host_kernels = &host;
    source.host_kernel_count = 1;
    call.kind = WARPLINK_COLLECTIVE_KIND_ALL_REDUCE;
    call.op = WARPLINK_REDUCE_OP_SUM;
    call.root = -1;
    call.count = 1;
    rows = warplink_fused_call_default();
    rows.tokens = 1;
    rows.width = 1;
    layer.experts = 2;
    layer.top_k = 1;
    layer.max_tokens = 4;
    layer.elements = 8;
    layer.element_type = WARPLINK_ELEMENT_TYPE_F32;
    parts.counts = counts;

    OK(warplink_unique_id_create(NULL, 0, &id));
    OK(warplink_unique_id_release(&id));
    OK(warplink_init(&live.comm, 2, argv[3], rank, &options));
    make(&freed);
    make(&live);
    OK(warplink_connect(live.comm, 1 - rank, 0, live.region, WARPLINK_TRANSPORT_DIRECT, NULL));
    OK(warplink_setup(live.comm));
    OK(warplink_register_buffer(live.comm, live.region, &live.buffer));
    OK(warplink_register_buffer(live.comm, freed.region, &freed.buffer));
    give_back(&freed);
    OK(warplink_region_address(live.region, &device));
    one = warplink_argument_channel(live.comm, 1 - rank, 0);
    message.peer = 1 - rank;
    message.memory = device;
    rows.input = device;
    rows.sum = (char *)device + 64;
    message.bytes = 8;

    null_pointers();
    null_members();
    outside_of_a_block();
    blocks();
    logs();
    no_handles();
    handles_that_never_were();
    handles_given_back();
    handles_in_arguments();
    /* Nothing of it did anything: what is alive is as it was. */
    OK(warplink_collective(live.collectives, &call, device, device, live.stream));
    OK(warplink_stream_synchronize(live.stream));
    OK(warplink_barrier(live.comm));
    OK(warplink_destroy(live.comm));
    after_destroy();
    HOLDS(memcmp(before, words, sizeof words) == 0);
    return 0;
}
