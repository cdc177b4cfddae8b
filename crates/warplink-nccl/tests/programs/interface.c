/* A rank, or several, that call NCCL's interface as programs do: the library is opened by path, and every function found by
 * name. The arguments are the library, what to do, the rank, the number of ranks, and a file for the unique id. */

#define _DEFAULT_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char bytes[128]; } id_t128;
typedef void *comm_t;
typedef void *stream_t;

enum { INT32 = 2, FLOAT = 7 };
enum { SUM = 0, PROD = 1, MAX = 2, MIN = 3, AVG = 4 };
enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { COUNT = 1000, RANKS = 8 };

static void *library;

/* A function of the library, by its name and parameters. */
#define CALL(name, ...) ((int (*)(__VA_ARGS__))found(#name))

static void *found(const char *name) {
    void *function = dlsym(library, name);
    if (function == NULL) {
        fprintf(stderr, "%s is missing\n", name);
        exit(1);
    }
    return function;
}

static const char *last_error(comm_t comm) { return ((const char *(*)(comm_t))found("ncclGetLastError"))(comm); }

#define OK(call)                                                                                                    \
    do {                                                                                                            \
        int code_ = (call);                                                                                         \
        if (code_ != SUCCESS) {                                                                                     \
            fprintf(stderr, "line %d: %s gives %d: %s\n", __LINE__, #call, code_, last_error(NULL));                \
            exit(1);                                                                                                \
        }                                                                                                           \
    } while (0)

#define CHECK(condition)                                                                                            \
    do {                                                                                                            \
        if (!(condition)) {                                                                                         \
            fprintf(stderr, "line %d: %s does not hold: %s\n", __LINE__, #condition, last_error(NULL));             \
            exit(1);                                                                                                \
        }                                                                                                           \
    } while (0)

static int synchronize(stream_t stream) { return CALL(warplink_nccl_host_stream_synchronize, stream_t)(stream); }

static id_t128 meet(int rank, const char *file) {
    id_t128 id;
    if (rank == 0) {
        char other[4096];
        OK(CALL(ncclGetUniqueId, id_t128 *)(&id));
        snprintf(other, sizeof other, "%s.part", file);
        FILE *to = fopen(other, "wb");
        CHECK(to != NULL && fwrite(&id, sizeof id, 1, to) == 1 && fclose(to) == 0);
        CHECK(rename(other, file) == 0);
    } else {
        FILE *from = NULL;
        for (int tries = 0; from == NULL && tries < 3000; tries++) {
            usleep(10000);
            from = fopen(file, "rb");
        }
        CHECK(from != NULL && fread(&id, sizeof id, 1, from) == 1);
        fclose(from);
    }
    return id;
}

/* Tells other ranks by a file beside `file` that this one is so far, or waits until one is. */
static void so_far(int tells, const char *file, const char *what) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%s", file, what);
    FILE *found = tells ? fopen(path, "wb") : NULL;
    for (int tries = 0; found == NULL && tries < 3000; tries++) {
        usleep(10000);
        found = fopen(path, "rb");
    }
    CHECK(found != NULL);
    fclose(found);
}

static comm_t join(int rank, int ranks, const char *file) {
    id_t128 id = meet(rank, file);
    comm_t comm = NULL;
    OK(CALL(ncclCommInitRank, comm_t *, int, id_t128, int)(&comm, ranks, id, rank));
    return comm;
}

static void *memory(size_t bytes) {
    void *made = NULL;
    OK(CALL(ncclMemAlloc, void **, size_t)(&made, bytes));
    return made;
}

/* Element i of what rank r gives. */
static int32_t given(int r, int i) { return r * 7 + i % 13 + 1; }

static void fill(int32_t *values, int rank, int count) {
    for (int i = 0; i < count; i++) values[i] = given(rank, i);
}

typedef int (*all_reduce_t)(const void *, void *, size_t, int, int, comm_t, stream_t);

static void collectives(comm_t comm, int rank, int ranks, stream_t stream) {
    int32_t *in = memory(4 * COUNT * RANKS), *out = memory(4 * COUNT * RANKS);
    all_reduce_t all_reduce = (all_reduce_t)found("ncclAllReduce");
    for (int op = SUM; op <= MIN; op++) {
        fill(in, rank, COUNT);
        OK(all_reduce(in, out, COUNT, INT32, op, comm, stream));
        OK(synchronize(stream));
        for (int i = 0; i < COUNT; i++) {
            int32_t all = given(0, i);
            for (int r = 1; r < ranks; r++) {
                int32_t one = given(r, i);
                all = op == SUM ? all + one : op == PROD ? all * one : op == MAX ? (one > all ? one : all) : (one < all ? one : all);
            }
            CHECK(out[i] == all);
        }
    }
    /* In place, an average, and a sum whose inputs are multiplied. */
    float *values = (float *)in;
    for (int i = 0; i < COUNT; i++) values[i] = (float)given(rank, i);
    OK(all_reduce(values, values, COUNT, FLOAT, AVG, comm, stream));
    OK(synchronize(stream));
    for (int i = 0; i < COUNT; i++) {
        float all = 0;
        for (int r = 0; r < ranks; r++) all += (float)given(r, i);
        float off = values[i] - all / (float)ranks;
        CHECK(off < 1e-4f && off > -1e-4f);
    }
    int own = -1;
    float factor = 0.5f;
    OK(CALL(ncclRedOpCreatePreMulSum, int *, void *, int, int, comm_t)(&own, &factor, FLOAT, 1, comm));
    for (int i = 0; i < COUNT; i++) values[i] = (float)given(rank, i);
    OK(all_reduce(values, out, COUNT, FLOAT, own, comm, stream));
    OK(synchronize(stream));
    for (int i = 0; i < COUNT; i++) {
        float all = 0;
        for (int r = 0; r < ranks; r++) all += 0.5f * (float)given(r, i);
        CHECK(((float *)out)[i] == all);
    }
    OK(CALL(ncclRedOpDestroy, int, comm_t)(own, comm));

    /* What only moves parts. */
    fill(in, rank, COUNT);
    OK(CALL(ncclAllGather, const void *, void *, size_t, int, comm_t, stream_t)(in, out, COUNT, INT32, comm, stream));
    OK(synchronize(stream));
    for (int i = 0; i < ranks * COUNT; i++) CHECK(out[i] == given(i / COUNT, i % COUNT));
    OK(CALL(ncclReduceScatter, const void *, void *, size_t, int, int, comm_t, stream_t)(out, in, COUNT, INT32, SUM, comm, stream));
    OK(synchronize(stream));
    for (int i = 0; i < COUNT; i++) CHECK(in[i] == ranks * given(rank, i));
    int root = ranks - 1;
    fill(in, rank, COUNT);
    OK(CALL(ncclBroadcast, const void *, void *, size_t, int, int, comm_t, stream_t)(in, out, COUNT, INT32, root, comm, stream));
    OK(CALL(ncclBcast, void *, size_t, int, int, comm_t, stream_t)(in, COUNT, INT32, 0, comm, stream));
    OK(synchronize(stream));
    for (int i = 0; i < COUNT; i++) CHECK(out[i] == given(root, i) && in[i] == given(0, i));
    fill(in, rank, COUNT);
    OK(CALL(ncclReduce, const void *, void *, size_t, int, int, int, comm_t, stream_t)(in, out, COUNT, INT32, MAX, root, comm, stream));
    OK(synchronize(stream));
    for (int i = 0; rank == root && i < COUNT; i++) CHECK(out[i] == given(root, i));
    for (int p = 0; p < ranks; p++) fill(in + p * COUNT, rank * ranks + p, COUNT);
    OK(CALL(ncclAlltoAll, const void *, void *, size_t, int, comm_t, stream_t)(in, out, COUNT, INT32, comm, stream));
    OK(synchronize(stream));
    for (int i = 0; i < ranks * COUNT; i++) CHECK(out[i] == given(i / COUNT * ranks + rank, i % COUNT));
    OK(CALL(ncclScatter, const void *, void *, size_t, int, int, comm_t, stream_t)(in, out, COUNT, INT32, 0, comm, stream));
    OK(CALL(ncclGather, const void *, void *, size_t, int, int, comm_t, stream_t)(out, in, COUNT, INT32, 0, comm, stream));
    OK(synchronize(stream));
    for (int i = 0; i < COUNT; i++) CHECK(out[i] == given(rank, i));

    /* Of nothing. */
    OK(all_reduce(in, out, 0, INT32, SUM, comm, stream));
    OK(synchronize(stream));
    OK(CALL(ncclMemFree, void *)(in));
    OK(CALL(ncclMemFree, void *)(out));
}

static void messages(comm_t comm, int rank, int ranks, stream_t stream) {
    int32_t *in = memory(4 * COUNT), *out = memory(4 * COUNT), *sum = memory(4 * COUNT);
    int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
    fill(in, rank, COUNT);
    for (int nested = 0; nested < 2; nested++) {
        memset(out, 0, 4 * COUNT);
        for (int i = 0; i <= nested; i++) OK(CALL(ncclGroupStart, void)());
        OK(CALL(ncclSend, const void *, size_t, int, int, comm_t, stream_t)(in, COUNT, INT32, next, comm, stream));
        OK(CALL(ncclRecv, void *, size_t, int, int, comm_t, stream_t)(out, COUNT, INT32, last, comm, stream));
        OK(((all_reduce_t)found("ncclAllReduce"))(in, sum, COUNT, INT32, SUM, comm, stream));
        for (int i = 0; i <= nested; i++) OK(CALL(ncclGroupEnd, void)());
        OK(synchronize(stream));
        for (int i = 0; i < COUNT; i++) {
            int32_t all = 0;
            for (int r = 0; r < ranks; r++) all += given(r, i);
            CHECK(out[i] == given(last, i) && sum[i] == all);
        }
    }
    CHECK(CALL(ncclGroupEnd, void)() == INVALID_USAGE);
    OK(CALL(ncclMemFree, void *)(in));
    OK(CALL(ncclMemFree, void *)(out));
    OK(CALL(ncclMemFree, void *)(sum));
}

static void refusals(comm_t comm, stream_t stream) {
    int32_t *in = memory(64);
    CHECK(((all_reduce_t)found("ncclAllReduce"))(in, in, 4, INT32, SUM, NULL, stream) == INVALID_ARGUMENT);
    CHECK(((all_reduce_t)found("ncclAllReduce"))(in, in, 4, 99, SUM, comm, stream) == INVALID_ARGUMENT);
    CHECK(((all_reduce_t)found("ncclAllReduce"))(in, in, 4, INT32, 77, comm, stream) == INVALID_ARGUMENT);
    CHECK(CALL(ncclBcast, void *, size_t, int, int, comm_t, stream_t)(in, 4, INT32, 100, comm, stream) == INVALID_ARGUMENT);
    CHECK(strlen(last_error(comm)) > 0);
    CHECK(CALL(ncclMemFree, void *)((char *)in + 8) == INVALID_ARGUMENT);
    /* Registration is not needed, and never harmful. */
    void *handle = NULL;
    OK(CALL(ncclCommRegister, comm_t, void *, size_t, void **)(comm, in, 64, &handle));
    OK(CALL(ncclCommDeregister, comm_t, void *)(comm, handle));
    OK(CALL(ncclMemFree, void *)(in));
}

static int split(comm_t comm, int color, comm_t *made) {
    return CALL(ncclCommSplit, comm_t, int, int, comm_t *, void *)(comm, color, 0, made, NULL);
}

static void whole_life(int rank, int ranks, const char *file) {
    int version = 0, value = -1;
    OK(CALL(ncclGetVersion, int *)(&version));
    CHECK(version >= 21800);
    CHECK(strlen(((const char *(*)(int))found("ncclGetErrorString"))(INVALID_USAGE)) > 0);
    comm_t comm = join(rank, ranks, file);
    OK(CALL(ncclCommCount, comm_t, int *)(comm, &value));
    CHECK(value == ranks);
    OK(CALL(ncclCommUserRank, comm_t, int *)(comm, &value));
    CHECK(value == rank);
    stream_t stream = (stream_t)(uintptr_t)16;
    collectives(comm, rank, ranks, stream);
    messages(comm, rank, ranks, stream);
    refusals(comm, stream);
    /* The ranks in two halves, each in the other order, and this rank in both communicators at the same time. */
    comm_t half = NULL;
    OK(CALL(ncclCommSplit, comm_t, int, int, comm_t *, void *)(comm, rank % 2, -rank, &half, NULL));
    int own = -1, count = -1;
    OK(CALL(ncclCommUserRank, comm_t, int *)(half, &own));
    OK(CALL(ncclCommCount, comm_t, int *)(half, &count));
    CHECK(count == (ranks + 1 - rank % 2) / 2 && own == count - 1 - rank / 2);
    collectives(half, own, count, (stream_t)(uintptr_t)17);
    OK(CALL(ncclCommGetAsyncError, comm_t, int *)(comm, &value));
    CHECK(value == SUCCESS);
    OK(CALL(ncclCommDestroy, comm_t)(half));
    /* The last rank takes part in a split, but is in no half. */
    int last = rank == ranks - 1;
    comm_t others = comm;
    OK(split(comm, last ? -1 : 3, &others));
    CHECK((others == NULL) == last);
    if (!last) {
        collectives(others, rank, ranks - 1, (stream_t)(uintptr_t)19);
        OK(CALL(ncclCommDestroy, comm_t)(others));
    }
    /* Without the last rank, which does not call. */
    if (ranks > 1 && rank < ranks - 1) {
        int excluded = ranks - 1;
        comm_t fewer = NULL;
        OK(CALL(ncclCommShrink, comm_t, int *, int, comm_t *, void *, int)(comm, &excluded, 1, &fewer, NULL, 0));
        OK(CALL(ncclCommCount, comm_t, int *)(fewer, &count));
        CHECK(count == ranks - 1);
        collectives(fewer, rank, ranks - 1, (stream_t)(uintptr_t)18);
        OK(CALL(ncclCommDestroy, comm_t)(fewer));
    }
    collectives(comm, rank, ranks, stream);
    OK(CALL(ncclCommFinalize, comm_t)(comm));
    OK(CALL(ncclCommDestroy, comm_t)(comm));
    CHECK(CALL(ncclCommCount, comm_t, int *)(comm, &value) == INVALID_ARGUMENT);
}

/* All ranks in one thread: made together, and called in groups, since each call waits for the other ranks' hosts nowhere. */
static void one_thread(int ranks) {
    comm_t comms[RANKS];
    int32_t *in[RANKS], *out[RANKS];
    OK(CALL(ncclCommInitAll, comm_t *, int, const int *)(comms, ranks, NULL));
    for (int r = 0; r < ranks; r++) {
        in[r] = memory(4 * COUNT), out[r] = memory(4 * COUNT);
        fill(in[r], r, COUNT);
    }
    OK(CALL(ncclGroupStart, void)());
    for (int r = 0; r < ranks; r++)
        OK(((all_reduce_t)found("ncclAllReduce"))(in[r], out[r], COUNT, INT32, SUM, comms[r], (stream_t)(uintptr_t)(32 + r)));
    OK(CALL(ncclGroupEnd, void)());
    for (int r = 0; r < ranks; r++) {
        OK(synchronize((stream_t)(uintptr_t)(32 + r)));
        for (int i = 0; i < COUNT; i++) {
            int32_t all = 0;
            for (int p = 0; p < ranks; p++) all += given(p, i);
            CHECK(out[r][i] == all);
        }
    }
    OK(CALL(ncclGroupStart, void)());
    for (int r = 0; r < ranks; r++) OK(CALL(ncclCommDestroy, comm_t)(comms[r]));
    OK(CALL(ncclGroupEnd, void)());
}

/* What programs of NCCL 2.18 pass, of which the rest is left as it is. */
struct config {
    size_t size;
    unsigned magic, version;
    int blocking, cluster, least, most;
    const char *network;
    int share;
};

/* Waits until what a call gave `code` for is over. */
static void await(comm_t comm, int code) {
    CHECK(code == IN_PROGRESS || code == SUCCESS);
    while (code == IN_PROGRESS) {
        usleep(1000);
        OK(CALL(ncclCommGetAsyncError, comm_t, int *)(comm, &code));
    }
    CHECK(code == SUCCESS);
}

/* Joined in the background: until that is over, the communicator is in progress. */
static int join_in_background(comm_t *comm, int rank, int ranks, const char *file) {
    struct config config = {sizeof config, 0xcafebeef, 21800, 0, INT_MIN, INT_MIN, INT_MIN, NULL, INT_MIN};
    return CALL(ncclCommInitRankConfig, comm_t *, int, id_t128, int, struct config *)(comm, ranks, meet(rank, file), rank, &config);
}

static int progress(comm_t comm) {
    int code = -1;
    OK(CALL(ncclCommGetAsyncError, comm_t, int *)(comm, &code));
    return code;
}

static void in_progress(int rank, int ranks, const char *file) {
    comm_t comm = NULL, half = NULL, more = NULL;
    await(comm, join_in_background(&comm, rank, ranks, file));
    collectives(comm, rank, ranks, (stream_t)(uintptr_t)16);
    /* Until the last rank has split it too, the communicator is in progress, and no other can be made of it. */
    int last = rank == ranks - 1;
    if (last) so_far(0, file, "split");
    int code = split(comm, last ? -1 : 0, &half);
    CHECK(code == IN_PROGRESS);
    if (!last) {
        CHECK(progress(comm) == IN_PROGRESS && progress(half) == IN_PROGRESS);
        CHECK(split(comm, 0, &more) == INVALID_ARGUMENT && strstr(last_error(NULL), "in progress") != NULL);
        so_far(1, file, "split");
    }
    await(comm, code);
    CHECK((half == NULL) == last);
    if (!last) {
        await(half, code);
        collectives(half, rank, ranks - 1, (stream_t)(uintptr_t)17);
        OK(CALL(ncclCommDestroy, comm_t)(half));
    }
    /* Finalized, it is in progress until its calls are done. */
    int32_t *value = memory(4);
    *value = rank + 1;
    if (last) so_far(0, file, "finalized");
    OK(((all_reduce_t)found("ncclAllReduce"))(value, value, 1, INT32, SUM, comm, (stream_t)(uintptr_t)16));
    code = CALL(ncclCommFinalize, comm_t)(comm);
    CHECK(code == IN_PROGRESS && (last || progress(comm) == IN_PROGRESS));
    if (!last) so_far(1, file, "finalized");
    await(comm, code);
    CHECK(*value == ranks * (ranks + 1) / 2);
    OK(CALL(ncclMemFree, void *)(value));
    OK(CALL(ncclCommDestroy, comm_t)(comm));
    /* A rank without a color has no other communicator to find a failure at. */
    char other[4096];
    snprintf(other, sizeof other, "%s.other", file);
    await(comm, join_in_background(&comm, rank, ranks, other));
    if (last) {
        CHECK(split(comm, -1, &half) == IN_PROGRESS);
        while ((code = progress(comm)) == IN_PROGRESS) usleep(1000);
        CHECK(code == INVALID_USAGE);
    } else {
        CHECK(CALL(ncclCommGrow, comm_t, int, void *, int, comm_t *, void *)(comm, ranks + 1, NULL, -1, &half, NULL) == IN_PROGRESS);
        while ((code = progress(half)) == IN_PROGRESS) usleep(1000);
        CHECK(code == INVALID_USAGE);
        OK(CALL(ncclCommDestroy, comm_t)(half));
    }
    OK(CALL(ncclCommAbort, comm_t)(comm));
}

/* Whether a thread of this process joins a communicator. */
static int is_joining(void) {
    int found = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char path[300], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (file == NULL) continue;
        found |= fgets(name, sizeof name, file) != NULL && strcmp(name, "warplink-join\n") == 0;
        fclose(file);
    }
    closedir(tasks);
    return found;
}

/* Ended while the other ranks are awaited, which none of them is: the thread that joins ends long before the timeout. */
static void ended_early(int rank, int ranks, const char *file) {
    for (int destroyed = 0; destroyed < 2; destroyed++) {
        comm_t comm = NULL;
        CHECK(join_in_background(&comm, rank, ranks, file) == IN_PROGRESS);
        usleep(300000);
        CHECK(is_joining());
        OK(destroyed ? CALL(ncclCommDestroy, comm_t)(comm) : CALL(ncclCommAbort, comm_t)(comm));
        for (int waited = 0; is_joining(); waited++) {
            CHECK(waited < 500);
            usleep(10000);
        }
    }
}

int main(int count, char **arguments) {
    if (count != 6) return 2;
    library = dlopen(arguments[1], RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const char *what = arguments[2], *file = arguments[5];
    int rank = atoi(arguments[3]), ranks = atoi(arguments[4]);
    if (strcmp(what, "life") == 0)
        whole_life(rank, ranks, file);
    else if (strcmp(what, "thread") == 0)
        one_thread(ranks);
    else if (strcmp(what, "progress") == 0)
        in_progress(rank, ranks, file);
    else
        ended_early(rank, ranks, file);
    printf("done\n");
    return 0;
}
