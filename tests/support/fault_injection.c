// Preloaded before libc: the n-th system call that writes after `arm` fails, or kills the process.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int calls_left = -1, error_number, fired;
static char record[4096];

// Fails the call with this number, counted from 1; the error number 0 kills the process instead.
void arm(int call, int number) {
  calls_left = call;
  error_number = number;
  fired = 0;
  record[0] = 0;
}

// Returns whether the call came, and what was called meanwhile, by names.
int disarm(char *calls) {
  calls_left = -1;
  strcpy(calls, record);
  return fired;
}

static int fails(const char *name) {
  if (calls_left < 0) return 0;
  if (strlen(record) + strlen(name) + 2 < sizeof record) {
    strcat(record, name);
    strcat(record, " ");
  }
  if (calls_left == 0 || --calls_left > 0) return 0;
  fired = 1;
  if (error_number == 0) kill(getpid(), SIGKILL);
  errno = error_number;
  return 1;
}

#define WRAP(result, name, label, parameters, arguments)   \
  result name parameters {                                 \
    static result(*real) parameters;                       \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);  \
    return fails(label) ? (result)-1 : real arguments;     \
  }

WRAP(ssize_t, write, "write", (int fd, const void *data, size_t size), (fd, data, size))
WRAP(int, ftruncate64, "ftruncate", (int fd, off64_t size), (fd, size))
WRAP(int, fsync, "fsync", (int fd), (fd))
WRAP(int, rename, "rename", (const char *from, const char *to), (from, to))
WRAP(int, unlink, "unlink", (const char *path), (path))
WRAP(int, close, "close", (int fd), (fd))

// Opening takes a mode only where a file may be made.
#define WRAP_OPEN(name, parameters, arguments)                   \
  int name parameters {                                          \
    static int (*real)(int, const char *, int, ...);             \
    va_list more;                                                \
    va_start(more, flags);                                       \
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;    \
    va_end(more);                                                \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "openat64");   \
    return fails("open") ? -1 : real arguments;                  \
  }

WRAP_OPEN(open, (const char *path, int flags, ...), (AT_FDCWD, path, flags, mode))
WRAP_OPEN(open64, (const char *path, int flags, ...), (AT_FDCWD, path, flags, mode))
WRAP_OPEN(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
WRAP_OPEN(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
