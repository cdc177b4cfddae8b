/* Opens NCCL by its name, as programs do that are not linked with it, and prints which file that is and its version. The
   arguments are paths of libraries to load before, as PyTorch loads NCCL. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **paths) {
    for (int at = 1; at < count; at++) {
        if (dlopen(paths[at], RTLD_NOW) == NULL) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
    }
    void *library = dlopen("libnccl.so.2", RTLD_NOW);
    int (*version)(int *) = library == NULL ? NULL : (int (*)(int *))dlsym(library, "ncclGetVersion");
    Dl_info found;
    int number = 0;
    if (version == NULL || dladdr((void *)version, &found) == 0 || version(&number) != 0) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    printf("%s %d\n", found.dli_fname, number);
    return 0;
}
