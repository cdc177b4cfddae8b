/* Rank 1 is killed while a kernel of rank 0 waits for it. Arguments: rank, size, address. */

#include "check.h"
#include <signal.h>
#include <time.h>

/* The level of the message about the lost rank. */
static volatile int lost_level = 0;

static void log_line(int32_t level, const char *message, void *user) {
    HOLDS(strchr(message, '\n') == NULL && user == (void *)&lost_level);
    if (strstr(message, "a rank was lost") != NULL) *(volatile int *)user = level;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv) {
    const warplink_options options = test_options();
    const int32_t rank = argc == 4 ? atoi(argv[1]) : -1;
    const warplink_shape shape = {1, 1, 0, 0};
    warplink_comm comm;
    warplink_region region;
    warplink_stream stream;
    warplink_kernel kernel;
    warplink_argument arguments[2];
    double start;
    OK(warplink_set_log_handler(log_line, (void *)&lost_level));
    OK(warplink_init(&comm, 2, argv[3], rank, &options));
    OK(warplink_alloc(comm, 64, &region));
    OK(warplink_connect(comm, 1 - rank, 3, region, WARPLINK_TRANSPORT_DIRECT, NULL));
    OK(warplink_setup(comm));
    OK(warplink_stream_create(comm, &stream));
    kernel = load_swap(comm, NULL);
    OK(warplink_barrier(comm));
    if (rank == 1) raise(SIGKILL);

    start = seconds();
    arguments[0] = warplink_argument_channel(comm, 1, 3);
    arguments[1] = warplink_argument_u64(32);
    /* The launch may come after the loss is known. */
    if (warplink_launch(kernel, stream, shape, arguments, 2) == WARPLINK_STATUS_SUCCESS) {
        FAILS(warplink_stream_synchronize(stream), WARPLINK_STATUS_PEER_LOST, "peer 1");
    }
    HOLDS(warplink_last_error_peer() == 1);
    HOLDS(seconds() - start < 5);
    FAILS(warplink_barrier(comm), WARPLINK_STATUS_PEER_LOST, "1");
    FAILS(warplink_destroy(comm), WARPLINK_STATUS_PEER_LOST, "1");
    FAILS(warplink_stream_synchronize(stream), WARPLINK_STATUS_CLOSED, "or its communicator was destroyed");
    HOLDS(seconds() - start < 15);
    /* From here on no thread runs the handler. */
    OK(warplink_set_log_handler(NULL, NULL));
    HOLDS(lost_level == WARPLINK_LOG_LEVEL_WARN);
    return 0;
}
