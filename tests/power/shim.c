/* Records what a process does to the files below a folder, in the order of its effects; loaded by LD_PRELOAD.

   POWER_FOLDER  the folder. POWER_LOG  the file that gets a record for each call that succeeded (tests/power/disk.py
   has their form). Calls are serialised, over all processes with this log, so that an fsync covers exactly the writes
   before it. -shm files are left out: SQLite makes them anew after a crash.

   POWER_FAULTS  of a thousand reads, writes and fsyncs, how many fail (EIO, ENOSPC, or only a part is written), chosen
   by POWER_SEED, while the last mark of the workload begins a call. After an fsync that failed the next one succeeds,
   and what was written before is lost, as on Linux. POWER_LIES  such an fsync says that it succeeded. */
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
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 65536
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const char *folder;
static int log_fd = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t inodes[FILES]; /* of recorded open files, by descriptor; 0: not recorded */
static uint64_t marks, chance; /* the file of marks; the state of a generator of random numbers */
static int faults, lies, armed;

struct record {
    char op;
    char pad[7];
    uint64_t inode;
    int64_t at;
    uint32_t path, data; /* lengths of what follows */
};

static void begin(void) {
    pthread_mutex_lock(&mutex);
    if (log_fd >= 0) flock(log_fd, LOCK_EX);
}

static void end(void) {
    int kept = errno;
    if (log_fd >= 0) flock(log_fd, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    errno = kept;
}

static int number(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }

static uint32_t drawn(void) { return (chance = chance * 6364136223846793005ULL + 1442695040888963407ULL) >> 33; }

static int fails(uint64_t inode) { return armed && inode != marks && drawn() % 1000 < (uint32_t)faults; }

static int failing(int error) {
    errno = error;
    return -1;
}

static void open_log(void) {
    folder = getenv("POWER_FOLDER");
    faults = number("POWER_FAULTS"), lies = number("POWER_LIES"), chance = number("POWER_SEED");
    log_fd = folder ? REAL(open)(getenv("POWER_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
}

static void in_child(void) { /* a lock of its own, not that of its parent's open file */
    pthread_mutex_unlock(&mutex);
    open_log();
}

__attribute__((constructor)) static void start(void) {
    open_log();
    pthread_atfork(begin, end, in_child);
}

/* The absolute path if it is below the folder, else NULL. */
static const char *below(const char *path, char *room) {
    if (!folder || !path) return NULL;
    if (path[0] != '/') {
        char here[PATH_MAX];
        if (!getcwd(here, sizeof here)) return NULL;
        snprintf(room, 2 * PATH_MAX, "%s/%s", here, path);
        path = room;
    }
    size_t size = strlen(folder), length = strlen(path);
    if (length > 4 && !strcmp(path + length - 4, "-shm")) return NULL;
    return strncmp(path, folder, size) || (path[size] != '/' && path[size]) ? NULL : path;
}

static void note(char op, uint64_t inode, int64_t at, const char *path, const struct iovec *data, int count, size_t size) {
    struct record head = {op, {0}, inode, at, path ? strlen(path) : 0, size};
    struct iovec parts[IOV_MAX];
    int n = 0;
    parts[n++] = (struct iovec){&head, sizeof head};
    if (path) parts[n++] = (struct iovec){(void *)path, head.path};
    for (int i = 0; i < count && size && n < IOV_MAX; i++) {
        size_t part = data[i].iov_len < size ? data[i].iov_len : size;
        parts[n++] = (struct iovec){data[i].iov_base, part};
        size -= part;
    }
    if (REAL(writev)(log_fd, parts, n) < 0) abort();
}

static uint64_t inode_of(const char *path) {
    struct stat found;
    return lstat(path, &found) ? 0 : found.st_ino;
}

static uint64_t recorded(int fd) { return log_fd >= 0 && fd >= 0 && fd < FILES ? inodes[fd] : 0; }

static int opened(int (*real)(int, const char *, int, ...), int where, const char *path, int flags, mode_t mode) {
    char room[2 * PATH_MAX];
    const char *ours = where == AT_FDCWD || path[0] == '/' ? below(path, room) : NULL;
    if (!ours) {
        int fd = real(where, path, flags, mode);
        if (fd >= 0 && fd < FILES) inodes[fd] = 0;
        return fd;
    }
    begin();
    uint64_t before = inode_of(ours);
    int fd = real(where, path, flags, mode);
    if (fd >= 0 && fd < FILES) {
        inodes[fd] = inode_of(ours);
        if (!strcmp(ours + strlen(ours) - 6, "/marks")) marks = inodes[fd];
        if (!before) note('c', inodes[fd], 0, ours, NULL, 0, 0);
        if (before && (flags & O_TRUNC)) note('t', inodes[fd], 0, NULL, NULL, 0, 0);
    }
    end();
    return fd;
}

#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
int open(const char *path, int flags, ...) { MODE(flags) return opened(REAL(openat), AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(REAL(openat), AT_FDCWD, path, flags, mode); }
int openat(int where, const char *path, int flags, ...) { MODE(flags) return opened(REAL(openat), where, path, flags, mode); }
int openat64(int where, const char *path, int flags, ...) { MODE(flags) return opened(REAL(openat), where, path, flags, mode); }

int close(int fd) {
    if (fd == log_fd && log_fd >= 0) return 0; /* programs that close all files */
    if (fd >= 0 && fd < FILES) inodes[fd] = 0;
    return REAL(close)(fd);
}

static ssize_t written(int fd, const struct iovec *data, int count, int64_t at) {
    uint64_t inode = recorded(fd);
    if (!inode) return at < 0 ? REAL(writev)(fd, data, count) : REAL(pwritev)(fd, data, count, at);
    begin();
    struct iovec half = {data[0].iov_base, (data[0].iov_len + 1) / 2};
    if (inode == marks) armed = !strncmp(data[0].iov_base, "[\"begin\"", 8);
    if (fails(inode)) {
        if (drawn() % 2) {
            end();
            return failing(drawn() % 2 ? EIO : ENOSPC);
        }
        data = &half, count = 1;
    }
    int64_t where = at;
    if (at < 0) where = fcntl(fd, F_GETFL) & O_APPEND ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
    ssize_t done = at < 0 ? REAL(writev)(fd, data, count) : REAL(pwritev)(fd, data, count, at);
    if (done > 0) note('w', inode, where, NULL, data, count, done);
    end();
    return done;
}

#define ONE(data, size) &(struct iovec){(void *)(data), size}, 1
ssize_t write(int fd, const void *data, size_t size) {
    return recorded(fd) ? written(fd, ONE(data, size), -1) : REAL(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *data, int count) { return written(fd, data, count, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return written(fd, ONE(data, size), at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return written(fd, ONE(data, size), at); }
ssize_t pwritev(int fd, const struct iovec *data, int count, off_t at) { return written(fd, data, count, at); }
ssize_t pwritev64(int fd, const struct iovec *data, int count, off64_t at) { return written(fd, data, count, at); }

#define OF_FILE(op, fd, at, call) \
    uint64_t inode = recorded(fd); \
    if (!inode) return call; \
    begin(); \
    int done = call; \
    if (!done) note(op, inode, at, NULL, NULL, 0, 0); \
    end(); \
    return done;
int ftruncate(int fd, off_t size) { OF_FILE('t', fd, size, REAL(ftruncate)(fd, size)) }
int ftruncate64(int fd, off64_t size) { OF_FILE('t', fd, size, REAL(ftruncate)(fd, size)) }

static int synced(int fd, int (*real)(int)) {
    uint64_t inode = recorded(fd);
    if (!inode) return real(fd);
    begin();
    int fault = fails(inode), done = real(fd);
    if (!done) note(fault ? 'f' : 's', inode, 0, NULL, NULL, 0, 0);
    end();
    return fault && !lies ? failing(EIO) : done;
}
int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }

static int unreadable(int fd) {
    if (!recorded(fd) || !armed) return 0;
    begin();
    int fault = fails(recorded(fd));
    end();
    return fault;
}
ssize_t read(int fd, void *data, size_t size) { return unreadable(fd) ? failing(EIO) : REAL(read)(fd, data, size); }
ssize_t pread(int fd, void *data, size_t size, off_t at) {
    return unreadable(fd) ? failing(EIO) : REAL(pread)(fd, data, size, at);
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { return pread(fd, data, size, at); }

/* Calls on names; `from` is recorded as the data. */
#define OF_NAMES(op, path, from, call) \
    char room[2 * PATH_MAX]; \
    const char *ours = below(path, room); \
    if (!ours) return call; \
    begin(); \
    uint64_t inode = inode_of(from); \
    int done = call; \
    if (!done) note(op, inode ? inode : inode_of(ours), 0, ours, ONE(from, strlen(from)), strlen(from)); \
    end(); \
    return done;
int rename(const char *from, const char *to) { OF_NAMES('r', to, from, REAL(rename)(from, to)) }
int link(const char *from, const char *to) { OF_NAMES('l', to, from, REAL(link)(from, to)) }
int unlink(const char *path) { OF_NAMES('u', path, path, REAL(unlink)(path)) }
int mkdir(const char *path, mode_t mode) { OF_NAMES('d', path, path, REAL(mkdir)(path, mode)) }
int renameat(int a, const char *from, int b, const char *to) {
    if (a != AT_FDCWD || b != AT_FDCWD) return REAL(renameat)(a, from, b, to);
    return rename(from, to);
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    if (a != AT_FDCWD || b != AT_FDCWD) return REAL(linkat)(a, from, b, to, flags);
    return link(from, to);
}
int unlinkat(int where, const char *path, int flags) {
    if (where != AT_FDCWD || flags) return REAL(unlinkat)(where, path, flags);
    return unlink(path);
}
int mkdirat(int where, const char *path, mode_t mode) {
    if (where != AT_FDCWD) return REAL(mkdirat)(where, path, mode);
    return mkdir(path, mode);
}
