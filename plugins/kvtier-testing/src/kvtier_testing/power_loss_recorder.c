/* Records what a process does to the files below a directory: loaded before the C library by power_loss.py.
 *
 * KVT_RECORD_ROOT is the directory, KVT_RECORD_LOG the file that gets one record a call, in the order in which the calls
 * were made (one lock is held around call and record):
 *
 *     kind u8, path length u32, second path length u32, offset u64, length u64, path, second path, data
 *
 * Kinds: W write (length bytes of data follow), T truncate or extend to length, C create, U unlink, R rename, S sync.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static char root[PATH_MAX];
static ssize_t (*real_write)(int, const void *, size_t);
static int (*real_open)(const char *, int, ...);

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

__attribute__((constructor)) static void start(void) {
    const char *directory = getenv("KVT_RECORD_ROOT"), *log = getenv("KVT_RECORD_LOG");
    real_write = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    real_open = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    if (!directory || !log) return;
    snprintf(root, sizeof root, "%s", directory);
    log_fd = real_open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int is_below(const char *path) {
    size_t length = strlen(root);
    return log_fd >= 0 && length && !strncmp(path, root, length) && path[length] == '/';
}

static int path_of(int fd, char *path) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int resolve(int directory, const char *name, char *path) {
    if (log_fd < 0) return 0;
    if (name[0] == '/') snprintf(path, PATH_MAX, "%s", name);
    else {
        char base[PATH_MAX], link[64];
        snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, base, PATH_MAX - 1);
        if (length < 0) return 0;
        base[length] = 0;
        if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) return 0;
    }
    return is_below(path);
}

static void put(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t done = real_write(log_fd, at, size);
        if (done <= 0) _exit(99);
        at += done;
        size -= (size_t)done;
    }
}

static void record(char kind, const char *path, const char *second, uint64_t offset, uint64_t length) {
    uint32_t first_length = (uint32_t)strlen(path), second_length = (uint32_t)strlen(second);
    put(&kind, 1);
    put(&first_length, 4);
    put(&second_length, 4);
    put(&offset, 8);
    put(&length, 8);
    put(path, first_length);
    put(second, second_length);
}

#define LOCKED(statement) \
    pthread_mutex_lock(&lock); \
    statement; \
    int saved = errno; \
    pthread_mutex_unlock(&lock); \
    errno = saved

static ssize_t written(const char *path, off_t offset, const struct iovec *parts, int count, ssize_t done) {
    if (done > 0) {
        record('W', path, "", (uint64_t)offset, (uint64_t)done);
        size_t left = (size_t)done;
        for (int i = 0; i < count && left; i++) {
            size_t size = parts[i].iov_len < left ? parts[i].iov_len : left;
            put(parts[i].iov_base, size);
            left -= size;
        }
    }
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t);
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real(fd, data, size, offset);
    struct iovec part = {(void *)data, size};
    LOCKED(ssize_t done = written(path, offset, &part, 1, real(fd, data, size, offset)));
    return done;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) {
    REAL(ssize_t, "pwritev64", int, const struct iovec *, int, off_t);
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real(fd, parts, count, offset);
    LOCKED(ssize_t done = written(path, offset, parts, count, real(fd, parts, count, offset)));
    return done;
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    return pwritev64(fd, parts, count, offset);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    REAL(ssize_t, "pwritev64v2", int, const struct iovec *, int, off_t, int);
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real(fd, parts, count, offset, flags);
    LOCKED(ssize_t done = written(path, offset, parts, count, real(fd, parts, count, offset, flags)));
    return done;
}
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    return pwritev64v2(fd, parts, count, offset, flags);
}

ssize_t write(int fd, const void *data, size_t size) {
    char path[PATH_MAX];
    if (log_fd < 0 || !path_of(fd, path)) return real_write(fd, data, size);
    struct iovec part = {(void *)data, size};
    LOCKED(off_t offset = lseek(fd, 0, SEEK_CUR); struct stat status;
           if (fcntl(fd, F_GETFL) & O_APPEND) { fstat(fd, &status); offset = status.st_size; }
           ssize_t done = written(path, offset, &part, 1, real_write(fd, data, size)));
    return done;
}

int ftruncate64(int fd, off_t size) {
    REAL(int, "ftruncate64", int, off_t);
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real(fd, size);
    LOCKED(int done = real(fd, size); if (!done) record('T', path, "", 0, (uint64_t)size));
    return done;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int truncate64(const char *name, off_t size) {
    REAL(int, "truncate64", const char *, off_t);
    char path[PATH_MAX];
    int ours = resolve(AT_FDCWD, name, path);
    LOCKED(int done = real(name, size); if (!done && ours) record('T', path, "", 0, (uint64_t)size));
    return done;
}
int truncate(const char *name, off_t size) { return truncate64(name, size); }

int posix_fallocate64(int fd, off_t offset, off_t size) {
    REAL(int, "posix_fallocate64", int, off_t, off_t);
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real(fd, offset, size);
    LOCKED(int done = real(fd, offset, size);
           struct stat status;
           if (!done && !fstat(fd, &status)) record('T', path, "", 0, (uint64_t)status.st_size));
    return done;
}
int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }

static int opened(const char *path, int ours, int existed, int flags, int fd) {
    if (fd >= 0 && ours) {
        if (!existed && (flags & O_CREAT)) record('C', path, "", 0, 0);
        else if (flags & O_TRUNC) record('T', path, "", 0, 0);
    }
    return fd;
}

int openat64(int directory, const char *name, int flags, ...) {
    REAL(int, "openat64", int, const char *, int, ...);
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    char path[PATH_MAX];
    int ours = resolve(directory, name, path);
    LOCKED(int existed = ours && !access(path, F_OK);
           int fd = opened(path, ours, existed, flags, real(directory, name, flags, mode)));
    return fd;
}
#define OPEN(function, directory) \
    va_list arguments; \
    va_start(arguments, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0; \
    va_end(arguments); \
    return openat64(directory, name, flags, mode)
int openat(int directory, const char *name, int flags, ...) { OPEN(openat, directory); }
int open64(const char *name, int flags, ...) { OPEN(open64, AT_FDCWD); }
int open(const char *name, int flags, ...) { OPEN(open, AT_FDCWD); }

int unlink(const char *name) {
    REAL(int, "unlink", const char *);
    char path[PATH_MAX];
    int ours = resolve(AT_FDCWD, name, path);
    LOCKED(int done = real(name); if (!done && ours) record('U', path, "", 0, 0));
    return done;
}
int unlinkat(int directory, const char *name, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    char path[PATH_MAX];
    int ours = !(flags & AT_REMOVEDIR) && resolve(directory, name, path);
    LOCKED(int done = real(directory, name, flags); if (!done && ours) record('U', path, "", 0, 0));
    return done;
}
int rename(const char *name, const char *target) {
    REAL(int, "rename", const char *, const char *);
    char path[PATH_MAX], second[PATH_MAX];
    int ours = resolve(AT_FDCWD, name, path) && resolve(AT_FDCWD, target, second);
    LOCKED(int done = real(name, target); if (!done && ours) record('R', path, second, 0, 0));
    return done;
}

static int synced(int fd, int done) {
    char path[PATH_MAX];
    if (!done && path_of(fd, path)) record('S', path, "", 0, 0);
    return done;
}
int fsync(int fd) {
    REAL(int, "fsync", int);
    LOCKED(int done = synced(fd, real(fd)));
    return done;
}
int fdatasync(int fd) {
    REAL(int, "fdatasync", int);
    LOCKED(int done = synced(fd, real(fd)));
    return done;
}
