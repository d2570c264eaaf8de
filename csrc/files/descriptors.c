/* See files/descriptors.h. */
#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files/checks.h"
#include "files/descriptors.h"
#include "files/spans.h"

enum { LEAST = 4, SHARE = 4 }; /* at least so many segments are open, and at most a part of what the process may open */
static atomic_uint open_segments; /* of all stores of the process */

static unsigned most_open(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur > 1 << 20) limit.rlim_cur = 1 << 20;
  const unsigned most = (unsigned)limit.rlim_cur / SHARE;
  return most < LEAST ? LEAST : most;
}

static bool is_idle(const struct kvs_file_segment *segment) { return segment->fd >= 0 && segment->users == 0; }

/* A segment that leaves has no name any more: it could not be opened again. */
static bool may_close(const struct kvs_file_segment *segment) { return is_idle(segment) && !segment->leaving; }

void kvs_file_descriptor_keep_locked(struct kvs_file_store *store, uint32_t at, int fd) {
  store->segments[at].fd = fd;
  store->nidle += is_idle(&store->segments[at]);
  atomic_fetch_add(&open_segments, 1);
}

int kvs_file_descriptor_take_locked(struct kvs_file_store *store, uint32_t at) {
  struct kvs_file_segment *segment = &store->segments[at];
  const int fd = segment->fd;
  if (fd < 0) return -1;
  store->nidle -= is_idle(segment);
  segment->fd = -1;
  atomic_fetch_sub(&open_segments, 1);
  atomic_store(&store->queue.files_move, true); /* before the descriptor is closed, and before it is another file's */
  return fd;
}

/* One of the idle ones that was not used since the hand passed it; -1: there is none. */
static int take_idle_locked(struct kvs_file_store *store) {
  for (uint32_t i = 0; store->nidle && i < 2 * store->nsegments; i++) {
    const uint32_t at = store->hand++ % store->nsegments;
    struct kvs_file_segment *segment = &store->segments[at];
    const bool recent = segment->recent;
    segment->recent = false;
    if (may_close(segment) && !recent) return kvs_file_descriptor_take_locked(store, at);
  }
  return -1;
}

bool kvs_file_descriptor_give_up(struct kvs_file_store *store) {
  pthread_mutex_lock(&store->lock);
  const int fd = take_idle_locked(store);
  pthread_mutex_unlock(&store->lock);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

void kvs_file_descriptors_trim(struct kvs_file_store *store, unsigned room) {
  while (atomic_load(&open_segments) + room > most_open() && kvs_file_descriptor_give_up(store)) continue;
}

bool kvs_file_segment_hold_locked(struct kvs_file_store *store, uint32_t at, bool may_wait) {
  struct kvs_file_segment *segment = &store->segments[at];
  if (segment->fd < 0 && segment->users == 0 && may_wait && store->nheld && !store->nidle &&
      atomic_load(&open_segments) >= most_open())
    return false;
  store->nidle -= is_idle(segment);
  store->nheld += segment->users++ == 0;
  segment->recent = true;
  return true;
}

/* The file must be the one that was found or made under this name: another may have its name since. */
static int open_again(struct kvs_file_store *store, uint32_t at, int *fd) {
  const struct kvs_file_segment *segment = &store->segments[at];
  const bool foreign = store->settings.readonly || segment->root >= store->nroots;
  const int flags = (foreign ? O_RDONLY : O_RDWR) | (store->direct ? O_DIRECT : 0);
  struct stat info;
  char name[32];
  int code;
  kvs_file_segment_name(segment->number, name);
  do code = kvs_file_openat(&store->faults, kvs_file_root_at(store, segment->root)->folder, name, flags, fd);
  while ((code == EMFILE || code == ENFILE) && kvs_file_descriptor_give_up(store));
  if (code) return code;
  if (fstat(*fd, &info) == 0 && info.st_ino == segment->inode) return 0;
  close(*fd);
  return ESTALE;
}

int kvs_file_segment_open(struct kvs_file_store *store, uint32_t at, int *fd) {
  struct kvs_file_segment *segment = &store->segments[at];
  pthread_mutex_lock(&store->lock);
  *fd = segment->fd;
  pthread_mutex_unlock(&store->lock);
  if (*fd >= 0) return 0;
  kvs_file_descriptors_trim(store, 1);
  int opened, code = open_again(store, at, &opened);
  if (code) return code;
  pthread_mutex_lock(&store->lock);
  const bool other = segment->fd >= 0; /* another thread was faster */
  if (!other) kvs_file_descriptor_keep_locked(store, at, opened);
  *fd = segment->fd;
  pthread_mutex_unlock(&store->lock);
  if (other) close(opened);
  kvs_file_descriptors_trim(store, 0); /* threads that made room at the same time have opened one too many */
  return 0;
}

void kvs_file_segment_release(struct kvs_file_store *store, uint32_t at) {
  struct kvs_file_segment *segment = &store->segments[at];
  pthread_mutex_lock(&store->lock);
  const bool last = --segment->users == 0;
  store->nheld -= last;
  store->nidle += is_idle(segment);
  struct kvs_file_item *parked = last ? store->parked.first : NULL;
  if (last) store->parked = (struct kvs_file_items){NULL, NULL};
  for (struct kvs_file_item *next; parked; parked = next) {
    next = parked->next;
    kvs_file_item_queue(parked);
  }
  pthread_mutex_unlock(&store->lock);
}
