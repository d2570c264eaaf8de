/* The segments of a store.
 *
 * A file gets its name after its first page is written. A named file with a damaged first page was therefore damaged
 * later, and is left alone. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "files/checks.h"
#include "files/descriptors.h"
#include "files/segment.h"
#include "files/state.h"

static const char new_name[] = "new.tmp";
enum {
  LAST_NUMBER = 99999999,    /* segment names have eight digits */
  MOST_SEGMENTS = 1 << 20,   /* of a store; each is an open file */
  READER_SEGMENTS = 1 << 16, /* that a reader opens */
};

bool kvs_file_segment_number(const char *name, uint32_t *number) {
  char again[32];
  if (sscanf(name, "segment-%8u", number) != 1) return false;
  kvs_file_segment_name(*number, again);
  return strcmp(name, again) == 0;
}

int kvs_file_erase(struct kvs_file_store *store, int fd, uint64_t offset) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE] = {0};
  return kvs_file_move_page(store, fd, true, offset, page, store->settings.durability == KVS_FILE_FSYNC);
}

/* -- new files ----------------------------------------------------------------------------------------------------- */

/* Link the file to its name; never replaces a file: EEXIST. */
static int name_new_file(int folder, const char *name) {
  const unsigned no_replace = 1; /* RENAME_NOREPLACE */
  struct stat info;
  if (syscall(SYS_renameat2, folder, new_name, folder, name, no_replace) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS) return errno;
  if (fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0) return EEXIST; /* no RENAME_NOREPLACE here */
  return renameat(folder, new_name, folder, name) ? errno : 0;
}

/* Create a file with the given first page, and name it after the page is written. */
static int make_file(struct kvs_file_store *store, int folder, const char *name, uint64_t nbytes, void *page,
                     int *made) {
  bool safe = store->settings.durability == KVS_FILE_FSYNC;
  int fd, flags = O_RDWR | O_CREAT | O_EXCL | (store->direct ? O_DIRECT : 0);
  (void)unlinkat(folder, new_name, 0); /* left by an interrupted call */
  int code = kvs_file_openat(&store->faults, folder, new_name, flags, &fd);
  if (code == EEXIST || code == KVS_FILE_NOT_REGULAR) code = KVS_FILE_IN_THE_WAY;
  if (code) return code;
  code = kvs_file_allocate(&store->faults, fd, nbytes);
  if (!code) code = kvs_file_move_page(store, fd, true, 0, page, false);
  if (!code && safe) code = kvs_file_sync(&store->faults, fd);
  if (!code) code = name_new_file(folder, name);
  if (!code && safe) code = kvs_file_sync_folder(&store->faults, folder);
  if (!code) {
    *made = fd;
    return 0;
  }
  close(fd);
  (void)unlinkat(folder, new_name, 0);
  return code;
}

static uint32_t number_after(uint32_t number) { return number < LAST_NUMBER ? number + 1 : 0; }

/* The first unused segment number from *number on; the search wraps from the last number to 0. */
static int find_number(int folder, uint32_t *number) {
  struct stat info;
  char name[32];
  for (uint32_t tries = 0; tries < 2 * MOST_SEGMENTS; tries++, *number = number_after(*number)) {
    kvs_file_segment_name(*number, name);
    if (fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? 0 : errno;
  }
  return EEXIST;
}

static int make_segment(struct kvs_file_store *store, unsigned root, uint32_t *number, int *fd) {
  const int folder = store->roots[root].folder;
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  struct kvs_file_geometry geometry = store->geometry;
  char name[32];
  int code = find_number(folder, number);
  if (code) return code;
  geometry.segment = *number;
  kvs_file_geometry_write(&geometry, true, page);
  kvs_file_segment_name(*number, name);
  return make_file(store, folder, name, geometry.segment_nbytes, page, fd);
}

int kvs_file_segment_make(struct kvs_file_store *store, unsigned root, uint32_t *number, int *fd) {
  int code;
  kvs_file_descriptors_trim(store, 1);
  do code = make_segment(store, root, number, fd);
  while ((code == EMFILE || code == ENFILE) && kvs_file_descriptor_give_up(store));
  return code;
}

/* Blocks that are stored in it must be found at the next open, so the first page must be right. */
int kvs_file_segment_repair(struct kvs_file_store *store, uint32_t at) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  const struct kvs_file_segment *segment = &store->segments[at];
  struct kvs_file_geometry geometry = store->geometry;
  geometry.segment = segment->number;
  kvs_file_geometry_write(&geometry, true, page);
  int fd, code = kvs_file_segment_open(store, at, &fd);
  if (!code) code = kvs_file_allocate(&store->faults, fd, geometry.segment_nbytes);
  if (!code) code = kvs_file_move_page(store, fd, true, 0, page, store->settings.durability == KVS_FILE_FSYNC);
  return code;
}

/* The array never moves, because threads read it without the lock. Entries of removed segments are reused. */
int kvs_file_segment_append(struct kvs_file_store *store, unsigned root, uint32_t number, int fd, uint64_t inode,
                            bool cut, uint32_t *place) {
  struct kvs_file_root *of = kvs_file_root_at(store, root);
  uint32_t at = store->nremoved ? 0 : store->nsegments;
  while (at < store->nsegments && !store->segments[at].gone) at++;
  if (at == store->segments_capacity || (uint64_t)(at + 1) * store->geometry.slots > KVS_NO_SLOT) return ENOMEM;
  store->segments[at] =
      (struct kvs_file_segment){.fd = -1, .number = number, .root = root, .suspect = cut, .inode = inode};
  kvs_file_descriptor_keep_locked(store, at, fd);
  store->nremoved -= at < store->nsegments;
  store->nsegments += at == store->nsegments;
  store->nown += root < store->nroots;
  if (number >= of->next_number) of->next_number = number_after(number);
  *place = at;
  return 0;
}

/* -- segments ------------------------------------------------------------------------------------------------------ */

/* A segment that is too short was truncated. It is extended again; the missing part reads as empty. */
static int adopt_segment(struct kvs_file_store *store, unsigned root, uint32_t number, struct kvs_error *err) {
  const struct kvs_file_root *of = kvs_file_root_at(store, root);
  const bool foreign = store->settings.readonly || root >= store->nroots;
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  struct kvs_file_geometry there;
  struct stat info;
  char name[32];
  uint32_t at;
  int fd, flags = (foreign ? O_RDONLY : O_RDWR) | (store->direct ? O_DIRECT : 0);
  kvs_file_segment_name(number, name);
  int code = kvs_file_openat(&store->faults, of->folder, name, flags, &fd);
  if (code == ENOENT && foreign) return KVS_OK; /* removed by the writer meanwhile */
  if (code) return kvs_file_fail(err, code, "opening %.200s/%s", of->path, name);
  int status = kvs_file_refuse_writable_by_others(of, fd, name, err);
  if (status) {
    close(fd);
    return status;
  }
  code = kvs_file_move_page(store, fd, false, 0, page, false);
  store->unread_segments |= root < store->nroots && code && code != KVS_FILE_ENDED;
  enum kvs_file_page what = code ? KVS_FILE_DAMAGED : kvs_file_geometry_read(page, true, &there);
  if (what == KVS_FILE_GOOD && !kvs_file_same_layout(&there, &store->geometry)) {
    close(fd);
    return kvs_file_refuse_layout(store, of, &there, name, err);
  }
  bool first = !store->geometry_known && store->nsegments == 0, ours = what == KVS_FILE_GOOD && there.segment == number;
  ours = ours && (first || there.slots == store->geometry.slots);
  ours = ours && fstat(fd, &info) == 0;
  bool cut = ours && (uint64_t)info.st_size < there.segment_nbytes;
  if (cut && !foreign && there.segment_nbytes <= store->settings.capacity) /* extend */
    (void)kvs_file_allocate(&store->faults, fd, there.segment_nbytes);
  pthread_mutex_lock(&store->lock);
  if (ours && first) {
    store->geometry.slots = there.slots;
    store->geometry.segment_nbytes = there.segment_nbytes;
  }
  bool room = !ours || kvs_file_segment_append(store, root, number, fd, info.st_ino, cut, &at) == 0;
  store->stats.foreign += !ours && root < store->nroots;
  pthread_mutex_unlock(&store->lock);
  kvs_file_descriptors_trim(store, 0);
  if (ours && room) return KVS_OK;
  close(fd);
  if (room) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "%.200s has more segments than %u", of->path, store->segments_capacity);
}

static int by_number(const void *a, const void *b) {
  uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
  return (left > right) - (left < right);
}

static bool is_open(struct kvs_file_store *store, unsigned root, uint32_t number) {
  bool open = false;
  pthread_mutex_lock(&store->lock);
  for (uint32_t i = 0; i < store->nsegments && !open; i++) {
    const struct kvs_file_segment *segment = &store->segments[i];
    open = segment->root == root && segment->number == number && !segment->removed;
  }
  pthread_mutex_unlock(&store->lock);
  return open;
}

int kvs_file_list_segments(struct kvs_file_store *store, unsigned root, uint32_t **numbers, size_t *count,
                           struct kvs_error *err) {
  size_t capacity = 0;
  uint32_t number;
  *numbers = NULL;
  *count = 0;
  int fd = openat(kvs_file_root_at(store, root)->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *dir = fd < 0 ? NULL : fdopendir(fd);
  if (!dir) {
    int code = errno;
    if (fd >= 0) close(fd);
    return kvs_file_fail(err, code, "reading the directory %.200s", kvs_file_root_at(store, root)->path);
  }
  for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
    if (!kvs_file_segment_number(entry->d_name, &number) || is_open(store, root, number)) continue;
    if (*count == capacity) {
      capacity = capacity ? 2 * capacity : 64;
      uint32_t *grown = realloc(*numbers, capacity * sizeof *grown);
      if (!grown) {
        closedir(dir);
        free(*numbers);
        return kvs_fail(err, KVS_NOMEM, "no memory to list %.200s", kvs_file_root_at(store, root)->path);
      }
      *numbers = grown;
    }
    (*numbers)[(*count)++] = number;
  }
  closedir(dir);
  if (*count) qsort(*numbers, *count, sizeof **numbers, by_number);
  return KVS_OK;
}

bool kvs_file_note_removed(struct kvs_file_store *store, unsigned root) {
  const int folder = kvs_file_root_at(store, root)->folder;
  char name[32];
  struct stat info;
  bool any = false;
  pthread_mutex_lock(&store->lock);
  const uint32_t nsegments = store->nsegments;
  pthread_mutex_unlock(&store->lock);
  for (uint32_t i = 0; i < nsegments; i++) { /* those of peers are changed by this thread alone */
    struct kvs_file_segment *segment = &store->segments[i];
    if (segment->root != root) continue;
    kvs_file_segment_name(segment->number, name);
    const int code = fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) ? errno : 0;
    pthread_mutex_lock(&store->lock);
    const bool removed = segment->gone || code == ENOENT || (!code && info.st_ino != segment->inode);
    any |= removed && !segment->removed;
    segment->removed = removed;
    pthread_mutex_unlock(&store->lock);
  }
  return any;
}

enum { MOST_LOOKS = 65536 }; /* beyond so many blocks in transfers a segment counts as used */

static bool is_in(const struct kvs_file_store *store, uint32_t slot, const struct kvs_file_segment *segment) {
  return slot != KVS_NO_SLOT && &store->segments[slot / store->geometry.slots] == segment;
}

bool kvs_file_in_use_locked(const struct kvs_file_store *store, const struct kvs_file_segment *segment) {
  size_t looks = 0;
  if (segment->users) return true; /* a request that has ended releases it a little later */
  for (const struct kvs_file_transfer *transfer = store->oldest; transfer; transfer = transfer->later)
    for (size_t i = 0; i < transfer->nitems; i++) {
      const struct kvs_file_item *item = &transfer->items[i];
      if (item->progress == KVS_FILE_OVER) continue;
      if (is_in(store, item->slot, segment) || is_in(store, item->old, segment)) return true;
      if (is_in(store, item->entry->stale, segment) || ++looks == MOST_LOOKS) return true;
    }
  return false;
}

void kvs_file_close_removed(struct kvs_file_store *store) {
  for (uint32_t i = 0; i < store->nsegments; i++) {
    struct kvs_file_segment *segment = &store->segments[i];
    if (!segment->removed || segment->gone) continue;
    pthread_mutex_lock(&store->lock);
    /* leaving: files/retire.c closes it */
    segment->gone = !segment->leaving && !kvs_file_in_use_locked(store, segment);
    store->nremoved += segment->gone;
    int fd = segment->gone ? kvs_file_descriptor_take_locked(store, i) : -1;
    pthread_mutex_unlock(&store->lock);
    if (fd >= 0) close(fd);
  }
}

int kvs_file_adopt_from(struct kvs_file_store *store, unsigned root, struct kvs_error *err) {
  uint32_t *numbers;
  size_t count;
  int status = kvs_file_list_segments(store, root, &numbers, &count, err);
  if (status) return status;
  for (size_t i = 0; !status && i < count; i++) status = adopt_segment(store, root, numbers[i], err);
  free(numbers);
  return status;
}

int kvs_file_adopt_new(struct kvs_file_store *store, struct kvs_error *err) {
  int status = KVS_OK;
  for (unsigned root = 0; store->settings.readonly && root < store->nroots; root++)
    (void)kvs_file_note_removed(store, root);
  pthread_mutex_lock(&store->lock);
  store->stats.foreign = 0;
  pthread_mutex_unlock(&store->lock);
  for (unsigned root = 0; !status && root < store->nroots; root++) status = kvs_file_adopt_from(store, root, err);
  return status;
}

int kvs_file_most_segments(const struct kvs_file_store *store, uint64_t *most, struct kvs_error *err) {
  *most = store->settings.readonly ? READER_SEGMENTS : store->settings.capacity / store->geometry.segment_nbytes;
  if (!*most && store->bound) *most = 1; /* as any writer may have */
  if (*most) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "capacity is %llu bytes; a segment of %u blocks takes %llu: give it more",
                  (unsigned long long)store->settings.capacity, store->geometry.slots,
                  (unsigned long long)store->geometry.segment_nbytes);
}

int kvs_file_size_segments(struct kvs_file_store *store, struct kvs_error *err) {
  uint64_t most;
  int status = kvs_file_most_segments(store, &most, err);
  if (status) return status;
  if (most > MOST_SEGMENTS) most = MOST_SEGMENTS;
  uint64_t slots = KVS_NO_SLOT / store->geometry.slots;
  store->max_segments = (uint32_t)(most < slots ? most : slots);
  store->segments_capacity = store->max_segments > READER_SEGMENTS ? store->max_segments : READER_SEGMENTS;
  if (store->settings.shared) store->segments_capacity += store->max_segments;
  if (store->segments_capacity > slots) store->segments_capacity = (uint32_t)slots;
  store->segments = calloc(store->segments_capacity, sizeof *store->segments);
  return store->segments ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory for the segments of a store");
}

static int by_age(const void *a, const void *b) {
  const struct kvs_file_segment *left = a, *right = b;
  if (left->number != right->number) return left->number > right->number ? 1 : -1;
  return (left->root > right->root) - (left->root < right->root);
}

/* The capacity has been reduced: remove the lowest-numbered segments, which usually hold the oldest blocks. The sorted
 * list also makes the scan read all disks at once. */
void kvs_file_remove_old_segments(struct kvs_file_store *store) {
  uint32_t surplus = store->nsegments > store->max_segments ? store->nsegments - store->max_segments : 0;
  int fd;
  char name[32];
  if (store->nsegments) qsort(store->segments, store->nsegments, sizeof *store->segments, by_age);
  for (uint32_t i = 0; i < surplus; i++) {
    kvs_file_segment_name(store->segments[i].number, name);
    fd = kvs_file_descriptor_take_locked(store, i); /* no other thread uses the store yet */
    if (fd >= 0) close(fd);
    (void)unlinkat(store->roots[store->segments[i].root].folder, name, 0);
  }
  store->nsegments -= surplus;
  store->nown = store->nsegments; /* no peer's segment is open yet */
  memmove(store->segments, store->segments + surplus, store->nsegments * sizeof *store->segments);
}
