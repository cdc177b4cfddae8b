/* Stands for NCCL itself, with ranks that are threads or tasks of one process: functions write to a log, and what NCCL's ranks
   do together waits for all of them. Windows are of any memory. */

#define _DEFAULT_SOURCE
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { char bytes[128]; } id_t128;

struct config {
    size_t size;
    unsigned magic, version;
    int blocking, cluster, least, most;
    const char *network;
    int share, traffic;
    const char *name;
};

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4 };
enum { JOBS = 64, OPERATORS = 5, LOG = 1 << 16, LIMIT = 20 };

struct job { int ranks, arrived, rounds; };
struct comm { struct job *job; int rank, made, live[16]; };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct job jobs[JOBS];
static int ids, held, refusing = -1;
static char text[LOG];
static __thread int depth;

int warplink_stands_in_for_nccl(void) { return 1; }

/* The log so far, which is emptied. */
const char *stand_in_log(void) {
    static char taken[LOG];
    pthread_mutex_lock(&mutex);
    memcpy(taken, text, sizeof text);
    text[0] = 0;
    pthread_mutex_unlock(&mutex);
    return taken;
}

/* Whether ranks that join are held, and which rank's windows are refused. */
void stand_in_set(int hold, int refuse) {
    pthread_mutex_lock(&mutex);
    held = hold, refusing = refuse;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

/* A line of the log, with the depth of groups. */
static void note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&mutex);
    size_t at = strlen(text);
    at += (size_t)vsnprintf(text + at, LOG - at, format, arguments);
    snprintf(text + at, LOG - at, " in %d\n", depth);
    pthread_mutex_unlock(&mutex);
    va_end(arguments);
}

/* Waits, with the lock, until a number is not `old`. */
static int wait_for(const int *number, int old) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += LIMIT;
    while (*number == old)
        if (pthread_cond_timedwait(&changed, &mutex, &end) != 0) return INTERNAL_ERROR;
    return SUCCESS;
}

/* Waits for the other ranks. */
static int meet(struct job *job) {
    pthread_mutex_lock(&mutex);
    int round = job->rounds, code = SUCCESS;
    if (++job->arrived == job->ranks) {
        job->arrived = 0;
        job->rounds++;
        pthread_cond_broadcast(&changed);
    } else {
        code = wait_for(&job->rounds, round);
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

int ncclGetVersion(int *version) {
    *version = 22999;
    return SUCCESS;
}

int ncclGetUniqueId(id_t128 *id) {
    pthread_mutex_lock(&mutex);
    memset(id, 0, sizeof *id);
    id->bytes[0] = (char)(ids++ % JOBS);
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

int ncclCommInitRankConfig(void **made, int ranks, id_t128 id, int rank, struct config *config) {
    if (config != NULL)
        note("config %d: blocking %d most %d network %s name %s", rank, config->blocking, config->most,
             config->network ? config->network : "-", config->size > 48 && config->name ? config->name : "-");
    note("init %d of %d", rank, ranks);
    struct comm *comm = calloc(1, sizeof *comm);
    if (comm == NULL) return SYSTEM_ERROR;
    pthread_mutex_lock(&mutex);
    int code = held ? wait_for(&held, 1) : SUCCESS;
    comm->job = &jobs[(int)id.bytes[0]];
    comm->job->ranks = ranks;
    pthread_mutex_unlock(&mutex);
    comm->rank = rank;
    *made = comm;
    return code == SUCCESS ? meet(comm->job) : code;
}

int ncclCommInitRank(void **made, int ranks, id_t128 id, int rank) {
    return ncclCommInitRankConfig(made, ranks, id, rank, NULL);
}

int ncclCommGetAsyncError(void *comm, int *code) {
    *code = SUCCESS;
    return comm ? SUCCESS : INVALID_ARGUMENT;
}

int ncclCommFinalize(struct comm *comm) {
    note("finalize %d", comm->rank);
    return SUCCESS;
}

int ncclCommDestroy(struct comm *comm) {
    note("destroy %d", comm->rank);
    free(comm);
    return SUCCESS;
}

int ncclCommAbort(struct comm *comm) {
    note("abort %d", comm->rank);
    free(comm);
    return SUCCESS;
}

int ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}

int ncclGroupEnd(void) {
    depth--;
    return SUCCESS;
}

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int datatype, int residence, struct comm *comm) {
    (void)scalar, (void)datatype, (void)residence;
    comm->live[comm->made] = 1;
    *op = OPERATORS + comm->made++;
    return SUCCESS;
}

int ncclRedOpDestroy(int op, struct comm *comm) {
    note("end of operator %d", comm->rank);
    comm->live[op - OPERATORS] = 0;
    return SUCCESS;
}

int ncclAllReduce(const void *in, void *out, size_t count, int datatype, int op, struct comm *comm, void *stream) {
    (void)in, (void)out, (void)datatype, (void)stream;
    note("all-reduce %d of %zu", comm->rank, count);
    return op < OPERATORS || comm->live[op - OPERATORS] ? SUCCESS : INVALID_ARGUMENT;
}

int ncclSignal(int peer, int signal, int context, unsigned flags, struct comm *comm, void *stream) {
    (void)signal, (void)context, (void)flags, (void)stream;
    note("signal %d to %d", comm->rank, peer);
    return SUCCESS;
}

int ncclMemAlloc(void **memory, size_t bytes) {
    *memory = malloc(bytes);
    return *memory ? SUCCESS : SYSTEM_ERROR;
}

int ncclMemFree(void *memory) {
    free(memory);
    return SUCCESS;
}

int ncclCommWindowRegister(struct comm *comm, void *memory, size_t bytes, void **window, int flags) {
    (void)bytes, (void)flags;
    int code = meet(comm->job);
    note("window %d", comm->rank);
    if (code == SUCCESS && refusing == comm->rank) return SYSTEM_ERROR;
    *window = memory;
    return code;
}

int ncclCommWindowDeregister(struct comm *comm, void *window) {
    (void)window;
    note("end of window %d", comm->rank);
    return SUCCESS;
}

int ncclDevCommCreate(struct comm *comm, const struct config *wanted, int *made) {
    int code = meet(comm->job);
    note("device communicator %d with %d", comm->rank, wanted->blocking);
    *made = 1;
    return code;
}
