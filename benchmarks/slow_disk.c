/* Makes the files below each directory of SLOW_DISKS (separated by ':') as slow as a disk of SLOW_MBPS megabytes a
 * second: reads and writes of one directory take turns, those of different ones do not. For LD_PRELOAD, by
 * bench_disks.py. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { DISKS = 16 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double busy_until[DISKS];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int disk_of(int fd) {
  char link[40], path[4096], disks[4096];
  const char *all = getenv("SLOW_DISKS");
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0 || !all) return -1;
  path[n] = 0;
  snprintf(disks, sizeof disks, "%s", all);
  char *rest = NULL, *disk = strtok_r(disks, ":", &rest);
  for (int i = 0; disk && i < DISKS; disk = strtok_r(NULL, ":", &rest), i++)
    if (strncmp(path, disk, strlen(disk)) == 0 && path[strlen(disk)] == '/') return i;
  return -1;
}

static void take_time(int fd, ssize_t nbytes) {
  const char *rate = getenv("SLOW_MBPS");
  int disk = disk_of(fd);
  if (disk < 0 || nbytes <= 0 || !rate) return;
  pthread_mutex_lock(&lock);
  double begin = now();
  if (busy_until[disk] > begin) begin = busy_until[disk];
  double end = busy_until[disk] = begin + (double)nbytes / (1e6 * atof(rate));
  pthread_mutex_unlock(&lock);
  for (double left; (left = end - now()) > 0;)
    nanosleep(&(struct timespec){(time_t)left, (long)(1e9 * (left - (double)(time_t)left))}, NULL);
}

ssize_t preadv(int fd, const struct iovec *pieces, int count, off_t offset) {
  static ssize_t (*next)(int, const struct iovec *, int, off_t);
  if (!next) *(void **)&next = dlsym(RTLD_NEXT, "preadv");
  ssize_t n = next(fd, pieces, count, offset);
  take_time(fd, n);
  return n;
}

ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
  static ssize_t (*next)(int, const struct iovec *, int, off_t, int);
  if (!next) *(void **)&next = dlsym(RTLD_NEXT, "pwritev2");
  ssize_t n = next(fd, pieces, count, offset, flags);
  take_time(fd, n);
  return n;
}
