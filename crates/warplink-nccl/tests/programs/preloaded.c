/* Opens NCCL by its name, as programs do that are not linked with it, and prints which file that is and its version. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int main(void) {
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
