// Lets calls that change files below a folder fail, or end the process at one: see faults.py, which preloads this.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kNone, kKill, kFull, kReadOnly, kBroken };

static char below[PATH_MAX];
static atomic_long calls;
static long chosen;
static int how;

// Begins to count; call number `number`, from 1, fails as `kind` says, and those behind it too but for kBroken.
void fault_begin(const char* folder, long number, int kind) {
  snprintf(below, sizeof(below), "%s", folder);
  calls = 0;
  chosen = number;
  how = kind;
}

// How many calls there were.
long fault_end(void) {
  below[0] = 0;
  return calls;
}

static int is_below(const char* path) {
  if (below[0] == 0) return 0;
  if (path[0] == '/') return strncmp(path, below, strlen(below)) == 0;
  char here[PATH_MAX];
  return getcwd(here, sizeof(here)) != NULL && strncmp(here, below, strlen(below)) == 0;
}

static int is_file_below(int file) {
  if (below[0] == 0) return 0;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  if (length <= 0) return 0;
  path[length] = 0;
  return is_below(path);
}

// Whether this call fails, with errno set; `takes_room` says whether a full disk matters to it.
static int fails(int takes_room) {
  const int kept = errno;
  const long number = ++calls;
  if (number < chosen || (number > chosen && how == kBroken)) return 0;
  if (how == kKill) kill(getpid(), SIGKILL);
  if (how == kFull && !takes_room) return 0;
  errno = how == kFull ? ENOSPC : how == kReadOnly ? EROFS : how == kBroken ? EIO : kept;
  return how != kNone;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name, arguments, given, path)                                 \
  int name arguments {                                                     \
    mode_t mode = 0;                                                       \
    if (flags & (O_CREAT | O_TMPFILE)) {                                   \
      va_list rest;                                                        \
      va_start(rest, flags);                                               \
      mode = va_arg(rest, mode_t);                                         \
      va_end(rest);                                                        \
    }                                                                      \
    const int changes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT; \
    if (changes && is_below(path) && fails(flags & O_CREAT)) return -1;    \
    return REAL(name) given;                                               \
  }

OPEN(open, (const char* path, int flags, ...), (path, flags, mode), path)
OPEN(open64, (const char* path, int flags, ...), (path, flags, mode), path)
OPEN(openat, (int folder, const char* path, int flags, ...), (folder, path, flags, mode), path)
OPEN(openat64, (int folder, const char* path, int flags, ...), (folder, path, flags, mode), path)

ssize_t write(int file, const void* data, size_t size) {
  if (is_file_below(file)) {
    // What is killed, or finds the disk full, has often written a part.
    if (calls + 1 == chosen && (how == kKill || how == kFull) && size > 1) {
      const ssize_t part = REAL(write)(file, data, size / 2);
      if (how == kFull) {
        ++calls;
        return part;
      }
    }
    if (fails(1)) return -1;
  }
  return REAL(write)(file, data, size);
}

ssize_t writev(int file, const struct iovec* parts, int count) {
  if (is_file_below(file) && fails(1)) return -1;
  return REAL(writev)(file, parts, count);
}

ssize_t pwrite64(int file, const void* data, size_t size, off64_t at) {
  if (is_file_below(file) && fails(1)) return -1;
  return REAL(pwrite64)(file, data, size, at);
}

int fsync(int file) {
  if (is_file_below(file) && fails(1)) return -1;
  return REAL(fsync)(file);
}

int ftruncate64(int file, off64_t size) {
  if (is_file_below(file) && fails(0)) return -1;
  return REAL(ftruncate64)(file, size);
}

int rename(const char* from, const char* to) {
  if (is_below(to) && fails(0)) return -1;
  return REAL(rename)(from, to);
}

int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  if (is_below(to) && fails(1)) return -1;
  return REAL(linkat)(from_folder, from, to_folder, to, flags);
}

int unlink(const char* path) {
  if (is_below(path) && fails(0)) return -1;
  return REAL(unlink)(path);
}

int mkdir(const char* path, mode_t mode) {
  if (is_below(path) && fails(1)) return -1;
  return REAL(mkdir)(path, mode);
}

int chmod(const char* path, mode_t mode) {
  if (is_below(path) && fails(0)) return -1;
  return REAL(chmod)(path, mode);
}

int mkstemp(char* path) {
  if (is_below(path) && fails(1)) return -1;
  return REAL(mkstemp)(path);
}

int mkstemp64(char* path) {
  if (is_below(path) && fails(1)) return -1;
  return REAL(mkstemp64)(path);
}
