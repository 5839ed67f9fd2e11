/* Makes reads and writes of the store's files fail, or hang, while files of certain names are in the folder FAULTS. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int on(const char *name) {
    char path[4096];
    const char *folder = getenv("FAULTS");
    if (!folder) return 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

static int ours(int fd) {
    char link[64], target[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 8) return 0;
    return memcmp(target + length - 8, "data.mdb", 8) == 0 || memcmp(target + length - 8, ".extents", 8) == 0;
}

static int fails(int fd, const char *kind) {
    if (!ours(fd)) return 0;
    while (on("hang")) usleep(10000);
    if (!on(kind)) return 0;
    errno = EIO;
    return 1;
}

#define SHIM(result, name, kind, parameters, ...)                  \
    result name parameters {                                       \
        static result(*real) parameters;                           \
        if (!real) real = dlsym(RTLD_NEXT, #name);                 \
        if (fails(fd, kind)) return -1;                            \
        return real(__VA_ARGS__);                                  \
    }

SHIM(ssize_t, pwrite, "write", (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
SHIM(ssize_t, pwrite64, "write", (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
SHIM(ssize_t, pwritev, "write", (int fd, const struct iovec *parts, int count, off_t at), fd, parts, count, at)
SHIM(ssize_t, pwritev64, "write", (int fd, const struct iovec *parts, int count, off64_t at), fd, parts, count, at)
SHIM(ssize_t, writev, "write", (int fd, const struct iovec *parts, int count), fd, parts, count)
SHIM(int, fdatasync, "sync", (int fd), fd)
SHIM(int, fsync, "sync", (int fd), fd)
SHIM(ssize_t, preadv, "read", (int fd, const struct iovec *parts, int count, off_t at), fd, parts, count, at)
SHIM(ssize_t, preadv64, "read", (int fd, const struct iovec *parts, int count, off64_t at), fd, parts, count, at)
SHIM(ssize_t, preadv2, "read", (int fd, const struct iovec *parts, int count, off_t at, int flags), fd, parts, count, at, flags)
SHIM(ssize_t, preadv64v2, "read", (int fd, const struct iovec *parts, int count, off64_t at, int flags), fd, parts, count, at, flags)
