/* Stands for NCCL itself: a library of its name, which has a version, and calls a function that this library has, too. */

int ncclCommCount(void *comm, int *count) {
    (void)comm;
    *count = 22999;
    return 0;
}

int ncclGetVersion(int *version) { return ncclCommCount(0, version); }
