/* Address look-up in /proc/self/maps: by the PROCMAP_QUERY ioctl of Linux 6.11, or by parsing the text.
 *
 * The descriptor for the ioctl is opened once a process and kept. It refers to the address space of the process that
 * opened it, so a forked child opens its own. A program may close all descriptors (daemons do) and reuse the number for
 * another file. The ioctl then fails; a new descriptor is opened and the old number is not closed. */
#include "base/maps.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/fork.h"

/* The kernel's struct procmap_query, declared here since many systems have older kernel headers. */
struct query {
  uint64_t size, flags, address;
  uint64_t start, end, permissions, page_nbytes, file_offset, inode;
  uint32_t device_major, device_minor, name_nbytes, build_id_nbytes;
  uint64_t name, build_id;
};
_Static_assert(sizeof(struct query) == 104, "the kernel's layout");

#define QUERY_CALL _IOWR('f', 17, struct query)
#define QUERY_READABLE 1u
#define QUERY_WRITABLE 2u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int maps = -1;     /* guarded by lock */
static pid_t maps_owner;  /* guarded by lock: the process whose memory `maps` describes */
static bool maps_refused; /* guarded by lock: the kernel does not support the ioctl */

static bool open_maps_locked(void) {
  maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  maps_owner = getpid();
  return maps >= 0;
}

/* 1: found, 0: not mapped, -1: the ioctl failed. */
static int query_locked(uint64_t address, struct query *query) {
  bool fresh = maps < 0 || maps_owner != getpid();
  if (maps_refused || (fresh && !open_maps_locked())) return -1;
  for (;;) {
    *query = (struct query){.size = sizeof *query, .address = address};
    if (ioctl(maps, QUERY_CALL, query) == 0) return 1;
    if (errno == ENOENT) return 0;
    if (errno == EINTR) continue;
    if (fresh) break;
    fresh = true;
    if (!open_maps_locked()) return -1;
  }
  maps_refused = true;
  close(maps);
  maps = -1;
  return -1;
}

bool kvs_mapping_parse(uint64_t address, struct kvs_mapping *mapping) {
  char line[512];
  bool found = false, at_start = true;
  FILE *file = fopen("/proc/self/maps", "re");
  if (!file) return false;
  while (!found && fgets(line, sizeof line, file)) {
    uint64_t start, end;
    char permissions[5];
    bool parse = at_start; /* a long path spans several reads: parse only the start of an entry */
    at_start = strchr(line, '\n') != NULL;
    if (!parse || sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &start, &end, permissions) != 3) continue;
    if (start > address) break; /* entries are sorted by address */
    if (address >= end) continue;
    *mapping = (struct kvs_mapping){start, end - start, permissions[0] == 'r', permissions[1] == 'w'};
    found = true;
  }
  fclose(file);
  return found;
}

bool kvs_mapping_find(uint64_t address, struct kvs_mapping *mapping) {
  static struct kvs_fork_guard guard = {.lock = &lock};
  struct query query;
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&lock);
  int answer = query_locked(address, &query);
  pthread_mutex_unlock(&lock);
  if (answer < 0) return kvs_mapping_parse(address, mapping);
  if (answer == 0) return false;
  mapping->base = query.start;
  mapping->nbytes = query.end - query.start;
  mapping->readable = query.permissions & QUERY_READABLE;
  mapping->writable = query.permissions & QUERY_WRITABLE;
  return true;
}
