/* Preloaded into a process, fails its FAULT_AT-th call that writes below FAULT_DIR (opens to write, writes, syncs and
   renames count): with an I/O error, or by killing the process there and then if FAULT_KILLS is set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fault(const char *path) {
    static int calls;
    const char *dir = getenv("FAULT_DIR");
    if (!dir || strncmp(path, dir, strlen(dir)) || strstr(path, ".lock") || ++calls != atoi(getenv("FAULT_AT")))
        return 0;
    if (getenv("FAULT_KILLS"))
        raise(SIGKILL);
    errno = EIO;
    return 1;
}

static int fault_in(int fd) {
    char link[64], path[PATH_MAX] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, path, sizeof path - 1) > 0 && fault(path);
}

#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *from, size_t n) { return fault_in(fd) ? -1 : NEXT(write)(fd, from, n); }
int fsync(int fd) { return fault_in(fd) ? -1 : NEXT(fsync)(fd); }
int rename(const char *from, const char *to) { return fault(to) ? -1 : NEXT(rename)(from, to); }

#define OPEN(name)                                      \
    int name(const char *path, int flags, ...) {        \
        va_list rest;                                   \
        va_start(rest, flags);                          \
        int mode = flags & O_CREAT ? va_arg(rest, int) : 0; \
        va_end(rest);                                   \
        if (flags & (O_WRONLY | O_RDWR) && fault(path)) \
            return -1;                                  \
        return NEXT(name)(path, flags, mode);           \
    }
OPEN(open)
OPEN(open64)
