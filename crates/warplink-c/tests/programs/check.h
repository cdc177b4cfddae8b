/* What the programs of these tests share; C99 and C++17. */

#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <warplink.h>

/* Ends the process where a call fails. */
#define OK(call) expect(__FILE__, __LINE__, #call, call, WARPLINK_STATUS_SUCCESS, "")

/* Ends the process where a call does not fail with the status and a text that contains this. */
#define FAILS(call, status, text) expect(__FILE__, __LINE__, #call, call, status, text)

/* Ends the process where something does not hold. */
#define HOLDS(condition) \
    ((condition) ? (void)0 : (fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition), exit(1)))

static inline void expect(
    const char *file, int line, const char *call, warplink_status given, warplink_status wanted, const char *text) {
    const char *error = given == WARPLINK_STATUS_SUCCESS ? "" : warplink_last_error();
    if (given == wanted && strstr(error, text) != NULL) return;
    fprintf(stderr, "%s:%d: %s gave status %d (%s): %s\n", file, line, call, (int)given, warplink_status_text(given), error);
    fprintf(stderr, "expected status %d with '%s'\n", (int)wanted, text);
    exit(1);
}

static inline warplink_span span(warplink_region region, uint64_t offset, uint64_t bytes) {
    warplink_span made;
    made.region = region;
    made.offset = offset;
    made.bytes = bytes;
    return made;
}

static inline warplink_at at(uint32_t region, uint64_t offset) {
    warplink_at made;
    made.region = region;
    made.offset = offset;
    return made;
}

/* Options for the device under test. */
static inline warplink_options test_options(void) {
    warplink_options options = warplink_options_default();
    const char *device = getenv("WARPLINK_TEST_DEVICE");
    options.device = device != NULL ? device : "host";
    options.timeout = 30;
    return options;
}

/* Whether several ranks have the same GPU. */
static inline int share_gpus(void) {
    const char *ranks = getenv("WARPLINK_TEST_RANKS_PER_GPU");
    return strcmp(test_options().device, "host") != 0 && ranks != NULL && atoi(ranks) > 1;
}

/* Where ranks share a GPU, collectives by the vendor's library are refused, be it there or not. */
static inline void library_refuses(warplink_comm comm, const warplink_collective_options *by_library) {
    warplink_collectives none;
    const warplink_status status = warplink_collectives_join(comm, by_library, &none);
    HOLDS(status == WARPLINK_STATUS_LIBRARY_MISSING ||
          (status == WARPLINK_STATUS_UNSUPPORTED && strstr(warplink_last_error(), "share a GPU") != NULL));
}

/* Both ranks put what lies at `bytes` in their region to the start of the peer's, and wait for the peer's. */
static const char *const SWAP =
    "#include <warplink/device.cuh>\n"
    "extern \"C\" __global__ void swap(warplink::Channel channel, unsigned long long bytes) {\n"
    "    const warplink::Block block;\n"
    "    if (channel.put_with_signal_and_flush(block, 0, bytes, bytes) != warplink::Status::ok) return;\n"
    "    channel.wait(block);\n"
    "}\n";

static inline int32_t swap(void *user) {
    uint64_t bytes;
    int32_t status = warplink_block_u64(1, &bytes);
    if (user != NULL) *(int *)user += 1;
    if (status == WARPLINK_STATUS_SUCCESS)
        status = warplink_block_put_with_signal_and_flush(0, at(0, 0), at(0, bytes), bytes);
    return status == WARPLINK_STATUS_SUCCESS ? (int32_t)warplink_block_wait(0) : status;
}

/* The kernel of the text and the body above. `runs` counts the blocks on the host device. */
static inline warplink_kernel load_swap(warplink_comm comm, int *runs) {
    warplink_host_kernel host;
    warplink_module_source source;
    warplink_module module;
    warplink_kernel kernel;
    host.name = "swap";
    host.body = swap;
    host.user = runs;
    memset(&source, 0, sizeof source);
    source.name = "swap.cu";
    source.cuda = SWAP;
    source.host_kernels = &host;
    source.host_kernel_count = 1;
    OK(warplink_module_load(comm, &source, &module));
    OK(warplink_kernel_get(module, "swap", &kernel));
    FAILS(warplink_kernel_get(module, "nothing", &kernel), WARPLINK_STATUS_INVALID_ARGUMENT, "nothing");
    OK(warplink_module_free(module));
    return kernel;
}

#endif
