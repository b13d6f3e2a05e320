/* System calls that fail, for test_system_calls.py: preloaded, with their names in $FAIL.
 *
 * Only those of step.c fail, whose library is called step..., and of Python, but not those of OpenMP, say. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int fails(const char *name, const void *caller, const char *library) {
    Dl_info from = {0};
    const char *names = getenv("FAIL");
    if (!names || !strstr(names, name) || !dladdr(caller, &from) || !from.dli_fname) return 0;
    const char *slash = strrchr(from.dli_fname, '/');
    return !strncmp(slash ? slash + 1 : from.dli_fname, library, strlen(library));
}

static int fails_python(const char *name, const void *caller) {
    return fails(name, caller, "python") || fails(name, caller, "libpython");
}

#define CALLER __builtin_return_address(0)
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
    if (fails("getaffinity", CALLER, "step") || fails_python("getaffinity", CALLER)) {
        errno = EPERM;
        return -1;
    }
    return REAL(sched_getaffinity)(pid, size, set);
}

int sched_setaffinity(pid_t pid, size_t size, const cpu_set_t *set) {
    if (fails("setaffinity", CALLER, "step")) {
        errno = EPERM;
        return -1;
    }
    return REAL(sched_setaffinity)(pid, size, set);
}

int pthread_setaffinity_np(pthread_t thread, size_t size, const cpu_set_t *set) {
    return fails("setaffinity", CALLER, "step") ? EPERM : REAL(pthread_setaffinity_np)(thread, size, set);
}

int sched_getcpu(void) { return fails("getcpu", CALLER, "step") ? -1 : REAL(sched_getcpu)(); }

int madvise(void *address, size_t size, int advice) {
    const char *names = getenv("FAIL");
    if (advice == MADV_HUGEPAGE && names && strstr(names, "madvise")) {
        errno = EPERM;
        return -1;
    }
    return REAL(madvise)(address, size, advice);
}

/* the first thread of step.c starts and the second does not; of Python, none starts */
int pthread_create(pthread_t *id, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    static int calls;
    if ((fails("create", CALLER, "step") && calls++ > 0) || fails_python("new thread", CALLER)) return EAGAIN;
    return REAL(pthread_create)(id, attributes, run, argument);
}

/* how many mutexes of step.c were never destroyed: a leak on Windows */
static int mutexes;

int pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes) {
    mutexes += fails("mutex", CALLER, "step");
    return REAL(pthread_mutex_init)(mutex, attributes);
}

int pthread_mutex_destroy(pthread_mutex_t *mutex) {
    mutexes -= fails("mutex", CALLER, "step");
    return REAL(pthread_mutex_destroy)(mutex);
}

__attribute__((destructor)) static void count_mutexes(void) {
    if (mutexes) fprintf(stderr, "%d mutexes\n", mutexes);
}
