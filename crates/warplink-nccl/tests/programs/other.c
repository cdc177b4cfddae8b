/* Stands for NCCL itself: a library of its name, whose version is 22999 if its calls of its own public functions, with its own
   handles, reach these functions. */

#include <stddef.h>

struct team {
    int ranks, rank, stride;
};

static int communicator, window, memory, device, reached;

static int reach(const void *handle, const void *own) {
    reached += handle == own;
    return handle == own ? 0 : 4;
}

int ncclGroupStart(void) { return reach(NULL, NULL); }

int ncclGroupEnd(void) { return reach(NULL, NULL); }

int ncclMemAlloc(void **place, size_t bytes) {
    *place = &memory;
    return reach(&bytes, &bytes);
}

int ncclMemFree(void *place) { return reach(place, &memory); }

int ncclCommGetAsyncError(void *comm, int *code) {
    *code = 0;
    return reach(comm, &communicator);
}

int ncclCommRegister(void *comm, void *place, size_t bytes, void **handle) {
    *handle = &memory;
    return reach(place, &memory) + reach(&bytes, &bytes) + reach(comm, &communicator);
}

int ncclCommWindowDeregister(void *comm, void *given) { return reach(given, &window) + reach(comm, &communicator); }

struct team ncclTeamRail(void *comm) {
    struct team team = {2, 1, 1};
    reach(comm, &communicator);
    return team;
}

int ncclGinBarrierCreateRequirement(void *comm, struct team team, int barriers, void *handle, void *requirement) {
    reach(comm, &communicator);
    return team.ranks == 2 && barriers == 3 ? reach(handle, requirement) : 4;
}

int ncclDevCommDestroy(void *comm, const void *made) { return reach(made, &device) + reach(comm, &communicator); }

/* An address of a function in data. */
static int (*volatile start)(void) = ncclGroupStart;

int ncclGetVersion(int *version) {
    void *place = NULL, *handle = NULL;
    int code = 0;
    reached = 0;
    int failed = start() + ncclGroupStart() + ncclMemAlloc(&place, 4) + ncclCommRegister(&communicator, place, 4, &handle) +
                 ncclCommGetAsyncError(&communicator, &code) + ncclCommWindowDeregister(&communicator, &window) +
                 ncclGinBarrierCreateRequirement(&communicator, ncclTeamRail(&communicator), 3, &handle, &handle) +
                 ncclDevCommDestroy(&communicator, &device) + ncclMemFree(place) + ncclGroupEnd();
    *version = 22983 + reached;
    return failed;
}
