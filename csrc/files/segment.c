/* The store's directory: the store's file, which holds the geometry and the checkpoints, and the segments.
 *
 * A file gets its name after its first page is written. A named file with a damaged first page was therefore damaged
 * later, and is left alone. The writing process holds a lock on the store's file. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "files/store.h"

static const char store_name[] = "store.kvs", new_name[] = "new.tmp";
enum { CHECKPOINTS_AT = KVS_FILE_PAGE }; /* two pages, written alternately */
enum {
  LAST_NUMBER = 99999999,    /* segment names have eight digits */
  MOST_SEGMENTS = 1 << 20,   /* of a store; each is an open file */
  READER_SEGMENTS = 1 << 16, /* that a reader opens */
};

static void segment_name(uint32_t number, char name[32]) { snprintf(name, 32, "segment-%08u.kvs", number); }

static bool is_segment_name(const char *name, uint32_t *number) {
  char again[32];
  if (sscanf(name, "segment-%8u", number) != 1) return false;
  segment_name(*number, again);
  return strcmp(name, again) == 0;
}

/* The store's own file is never opened with O_DIRECT, but whole pages are moved all the same. */
static int move_page(struct kvs_file_store *store, int fd, bool write, uint64_t offset, void *page, bool dsync) {
  struct kvs_file_span span = {
      .fd = fd, .write = write, .dsync = dsync, .offset = offset, .pieces = {{page, KVS_FILE_PAGE}}, .npieces = 1};
  return kvs_file_move(&store->faults, &span, store->direct);
}

int kvs_file_erase(struct kvs_file_store *store, int fd, uint64_t offset) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE] = {0};
  return move_page(store, fd, true, offset, page, store->settings.durability == KVS_FILE_FSYNC);
}

/* Refuse files that other users may write: a checksum does not protect against deliberate changes. Root always has
 * access. */
static int refuse_writable_by_others(const struct kvs_file_store *store, int fd, const char *name,
                                     struct kvs_error *err) {
  const char *directory = store->settings.directory, *slash = *name ? "/" : "";
  struct stat info;
  if (fstat(fd, &info)) return kvs_file_fail(err, errno, "looking at %.200s%s%s", directory, slash, name);
  const bool folder = S_ISDIR(info.st_mode);
  const unsigned mode = info.st_mode & 07777;
  if (info.st_uid != geteuid() && info.st_uid != 0)
    return kvs_fail(err, KVS_FILE,
                    "%.200s%s%s belongs to user %u, and this process is user %u: what another user may write is not "
                    "trusted; run as that user, or chown it, or use another directory",
                    directory, slash, name, (unsigned)info.st_uid, (unsigned)geteuid());
  if (mode & (S_IWGRP | S_IWOTH))
    return kvs_fail(err, KVS_FILE, "%.200s%s%s may be written by other users (mode %04o): chmod %s it", directory,
                    slash, name, mode, folder ? "700" : "600");
  return KVS_OK;
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
static int make_file(struct kvs_file_store *store, const char *name, uint64_t nbytes, void *page, int *made) {
  bool safe = store->settings.durability == KVS_FILE_FSYNC;
  int fd, flags = O_RDWR | O_CREAT | O_EXCL | (store->direct ? O_DIRECT : 0);
  (void)unlinkat(store->folder, new_name, 0); /* left by an interrupted call */
  int code = kvs_file_openat(&store->faults, store->folder, new_name, flags, &fd);
  if (code == EEXIST || code == KVS_FILE_NOT_REGULAR) code = KVS_FILE_IN_THE_WAY;
  if (code) return code;
  code = kvs_file_allocate(&store->faults, fd, nbytes);
  if (!code) code = move_page(store, fd, true, 0, page, false);
  if (!code && safe) code = kvs_file_sync(&store->faults, fd);
  if (!code) code = name_new_file(store->folder, name);
  if (!code && safe) code = fsync(store->folder) ? errno : 0;
  if (!code) {
    *made = fd;
    return 0;
  }
  close(fd);
  (void)unlinkat(store->folder, new_name, 0);
  return code;
}

static uint32_t number_after(uint32_t number) { return number < LAST_NUMBER ? number + 1 : 0; }

/* The first unused segment number from *number on; the search wraps from the last number to 0. */
static int find_number(const struct kvs_file_store *store, uint32_t *number) {
  struct stat info;
  char name[32];
  for (uint32_t tries = 0; tries < 2 * MOST_SEGMENTS; tries++, *number = number_after(*number)) {
    segment_name(*number, name);
    if (fstatat(store->folder, name, &info, AT_SYMLINK_NOFOLLOW)) return errno == ENOENT ? 0 : errno;
  }
  return EEXIST;
}

int kvs_file_segment_make(struct kvs_file_store *store, uint32_t *number, int *fd) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  struct kvs_file_geometry geometry = store->geometry;
  char name[32];
  int code = find_number(store, number);
  if (code) return code;
  geometry.segment = *number;
  kvs_file_geometry_write(&geometry, true, page);
  segment_name(*number, name);
  return make_file(store, name, geometry.segment_nbytes, page, fd);
}

/* The array never moves, because threads read it without the lock. Entries of removed segments are reused. */
int kvs_file_segment_append(struct kvs_file_store *store, uint32_t number, int fd, bool cut) {
  uint32_t at = store->settings.readonly ? 0 : store->nsegments;
  while (at < store->nsegments && store->segments[at].fd >= 0) at++;
  if (at == store->segments_capacity || (uint64_t)(at + 1) * store->geometry.slots > KVS_NO_SLOT) return ENOMEM;
  store->segments[at] = (struct kvs_file_segment){.fd = fd, .number = number, .suspect = cut};
  store->nremoved -= at < store->nsegments;
  store->nsegments += at == store->nsegments;
  if (number >= store->next_number) store->next_number = number_after(number);
  return 0;
}

uint64_t kvs_file_whole_below_locked(const struct kvs_file_store *store) {
  uint64_t below = store->oldest_write ? store->oldest_write->sequence : store->sequence + 1;
  return below < store->whole_below ? below : store->whole_below;
}

int kvs_file_save_checkpoint(struct kvs_file_store *store, uint64_t sequence, bool clean) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  if (store->generation >= KVS_FILE_LAST_SEQUENCE) return KVS_FILE_NUMBERS_END;
  struct kvs_file_checkpoint checkpoint = {++store->generation, sequence, clean};
  kvs_file_checkpoint_write(&checkpoint, page);
  uint64_t at = CHECKPOINTS_AT + (checkpoint.generation & 1) * KVS_FILE_PAGE;
  return move_page(store, store->state, true, at, page, store->settings.durability == KVS_FILE_FSYNC);
}

/* -- the store's file ---------------------------------------------------------------------------------------------- */

static int refuse_layout(const struct kvs_file_store *store, const struct kvs_file_geometry *there, const char *name,
                         struct kvs_error *err) {
  return kvs_fail(err, KVS_INVALID,
                  "%.80s holds blocks of another layout (%s), which are left alone: there '%.90s', %llu bytes a block; "
                  "asked for '%.90s', %llu bytes",
                  store->settings.directory, name, there->layout, (unsigned long long)there->block_nbytes,
                  store->geometry.layout, (unsigned long long)store->geometry.block_nbytes);
}

static bool same_layout(const struct kvs_file_geometry *a, const struct kvs_file_geometry *b) {
  return a->block_nbytes == b->block_nbytes && strcmp(a->layout, b->layout) == 0;
}

/* Existing segments keep their size, whatever size is requested now. */
static int read_state(struct kvs_file_store *store, struct kvs_error *err) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  struct kvs_file_geometry there;
  struct kvs_file_checkpoint checkpoint;
  int code = move_page(store, store->state, false, 0, page, false);
  if (code == KVS_FILE_ENDED) memset(page, 0, sizeof page);
  if (code && code != KVS_FILE_ENDED)
    return kvs_file_fail(err, code, "reading %.200s/%s", store->settings.directory, store_name);
  enum kvs_file_page what = kvs_file_geometry_read(page, false, &there);
  if (what == KVS_FILE_FOREIGN)
    return kvs_fail(err, KVS_INVALID, "%.200s is a store of another version of kvswap: it is left alone",
                    store->settings.directory);
  if (what != KVS_FILE_GOOD) return KVS_OK; /* the segments hold the same geometry; all blocks will be verified */
  if (!same_layout(&there, &store->geometry)) return refuse_layout(store, &there, store_name, err);
  store->geometry = there;
  store->geometry_known = true;
  for (int i = 0; i < 2; i++) {
    uint64_t at = CHECKPOINTS_AT + (uint64_t)i * KVS_FILE_PAGE;
    code = move_page(store, store->state, false, at, page, false);
    if (code && code != KVS_FILE_ENDED)
      return kvs_file_fail(err, code, "reading %.200s/%s", store->settings.directory, store_name);
    if (code) continue;
    if (kvs_file_checkpoint_read(page, &checkpoint) != KVS_FILE_GOOD) continue;
    if (checkpoint.generation <= store->generation) continue;
    store->generation = checkpoint.generation;
    store->sequence = checkpoint.sequence ? checkpoint.sequence - 1 : 0;
  }
  return KVS_OK;
}

/* Written in place, by the writer only. A process that opens the store with a damaged first page rebuilds the page from
 * the segments. */
static int write_state(struct kvs_file_store *store, struct kvs_error *err) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  kvs_file_geometry_write(&store->geometry, false, page);
  int code = move_page(store, store->state, true, 0, page, store->settings.durability == KVS_FILE_FSYNC);
  if (!code) return KVS_OK;
  return kvs_file_fail(err, code, "writing %.200s/%s", store->settings.directory, store_name);
}

static int open_state(struct kvs_file_store *store, struct kvs_error *err) {
  bool readonly = store->settings.readonly;
  int flags = readonly ? O_RDONLY : O_RDWR | O_CREAT;
  int code = kvs_file_openat(&store->faults, store->folder, store_name, flags, &store->state);
  if (code == ENOENT && readonly)
    return kvs_fail(err, KVS_FILE, "%.200s is no store: there is no %s in it", store->settings.directory, store_name);
  if (code) return kvs_file_fail(err, code, "opening %.200s/%s", store->settings.directory, store_name);
  int status = refuse_writable_by_others(store, store->state, store_name, err);
  if (status) return status;
  if (!readonly && flock(store->state, LOCK_EX | LOCK_NB))
    return kvs_fail(err, KVS_BUSY,
                    "%.200s is being written by another process, or open twice in this one: a store has one writer; "
                    "open it with readonly",
                    store->settings.directory);
  return read_state(store, err);
}

/* Ordered for fork() at any step: the child must not keep the locked descriptor, nor close a descriptor number that was
 * reused. */
void kvs_file_unlock_directory(struct kvs_file_store *store, bool everywhere) {
  int fd = store->state;
  if (fd < 0) return;
  if (everywhere && !store->settings.readonly) (void)flock(fd, LOCK_UN);
  store->state = -1;
  close(fd);
}

/* -- O_DIRECT ------------------------------------------------------------------------------------------------------ */

/* Tried on the store's own file: some file systems accept the flag and refuse the reads. */
static void try_direct(struct kvs_file_store *store) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  char text[96];
  int fd;
  if (store->settings.buffered) {
    snprintf(store->direct_note, sizeof store->direct_note, "not asked for");
    return;
  }
  int code = kvs_file_openat(&store->faults, store->folder, store_name, O_RDONLY | O_DIRECT, &fd);
  if (!code) {
    store->direct = true;
    code = move_page(store, fd, false, 0, page, false);
    if (code == KVS_FILE_ENDED) code = 0;
    close(fd);
  }
  store->direct = code == 0;
  if (code)
    snprintf(store->direct_note, sizeof store->direct_note, "the file system does not take O_DIRECT: %s",
             kvs_file_error_text(code, text));
}

/* -- segments ------------------------------------------------------------------------------------------------------ */

/* A segment that is too short was truncated. It is extended again; the missing part reads as empty. */
static int adopt_segment(struct kvs_file_store *store, uint32_t number, struct kvs_error *err) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  struct kvs_file_geometry there;
  struct stat info;
  char name[32];
  int fd, flags = (store->settings.readonly ? O_RDONLY : O_RDWR) | (store->direct ? O_DIRECT : 0);
  segment_name(number, name);
  int code = kvs_file_openat(&store->faults, store->folder, name, flags, &fd);
  if (code == ENOENT && store->settings.readonly) return KVS_OK; /* removed by the writer meanwhile */
  if (code) return kvs_file_fail(err, code, "opening %.200s/%s", store->settings.directory, name);
  int status = refuse_writable_by_others(store, fd, name, err);
  if (status) {
    close(fd);
    return status;
  }
  code = move_page(store, fd, false, 0, page, false);
  store->unread_segments |= code && code != KVS_FILE_ENDED;
  enum kvs_file_page what = code ? KVS_FILE_DAMAGED : kvs_file_geometry_read(page, true, &there);
  if (what == KVS_FILE_GOOD && !same_layout(&there, &store->geometry)) {
    close(fd);
    return refuse_layout(store, &there, name, err);
  }
  bool first = store->nsegments == 0 && !store->geometry_known, ours = what == KVS_FILE_GOOD && there.segment == number;
  ours = ours && (first || there.slots == store->geometry.slots);
  bool cut = ours && fstat(fd, &info) == 0 && (uint64_t)info.st_size < there.segment_nbytes;
  if (cut && !store->settings.readonly && there.segment_nbytes <= store->settings.capacity) /* extend */
    (void)kvs_file_allocate(&store->faults, fd, there.segment_nbytes);
  pthread_mutex_lock(&store->lock);
  if (ours && first) {
    store->geometry.slots = there.slots;
    store->geometry.segment_nbytes = there.segment_nbytes;
  }
  bool room = !ours || kvs_file_segment_append(store, number, fd, cut) == 0;
  store->stats.foreign += !ours;
  pthread_mutex_unlock(&store->lock);
  if (ours && room) return KVS_OK;
  close(fd);
  if (room) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "%.200s has more segments than %u", store->settings.directory,
                  store->segments_capacity);
}

static int by_number(const void *a, const void *b) {
  uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
  return (left > right) - (left < right);
}

static bool is_open(const struct kvs_file_store *store, uint32_t number) {
  for (uint32_t i = 0; i < store->nsegments; i++)
    if (store->segments[i].number == number && !store->segments[i].removed) return true;
  return false;
}

/* Numbers of the segments that exist and are not open, ascending; the caller frees the list. */
static int list_segments(struct kvs_file_store *store, uint32_t **numbers, size_t *count, struct kvs_error *err) {
  size_t capacity = 0;
  uint32_t number;
  *numbers = NULL;
  *count = 0;
  int fd = openat(store->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR *dir = fd < 0 ? NULL : fdopendir(fd);
  if (!dir) {
    int code = errno;
    if (fd >= 0) close(fd);
    return kvs_file_fail(err, code, "reading the directory %.200s", store->settings.directory);
  }
  for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
    if (!is_segment_name(entry->d_name, &number) || is_open(store, number)) continue;
    if (*count == capacity) {
      capacity = capacity ? 2 * capacity : 64;
      uint32_t *grown = realloc(*numbers, capacity * sizeof *grown);
      if (!grown) {
        closedir(dir);
        free(*numbers);
        return kvs_fail(err, KVS_NOMEM, "no memory to list %.200s", store->settings.directory);
      }
      *numbers = grown;
    }
    (*numbers)[(*count)++] = number;
  }
  closedir(dir);
  if (*count) qsort(*numbers, *count, sizeof **numbers, by_number);
  return KVS_OK;
}

static void note_removed(struct kvs_file_store *store) {
  struct stat info;
  for (uint32_t i = 0; i < store->nsegments; i++) {
    struct kvs_file_segment *segment = &store->segments[i];
    segment->removed = segment->fd < 0 || (fstat(segment->fd, &info) == 0 && info.st_nlink == 0);
  }
}

void kvs_file_close_removed(struct kvs_file_store *store) {
  for (uint32_t i = 0; i < store->nsegments; i++) {
    struct kvs_file_segment *segment = &store->segments[i];
    if (!segment->removed || segment->fd < 0) continue;
    pthread_mutex_lock(&store->lock);
    int fd = store->oldest ? -1 : segment->fd; /* unfinished transfers may read there */
    store->nremoved += fd >= 0;
    if (fd >= 0) segment->fd = -1;
    pthread_mutex_unlock(&store->lock);
    if (fd >= 0) close(fd);
  }
}

int kvs_file_adopt_new(struct kvs_file_store *store, struct kvs_error *err) {
  uint32_t *numbers;
  size_t count;
  if (store->settings.readonly) note_removed(store);
  pthread_mutex_lock(&store->lock);
  store->stats.foreign = 0;
  pthread_mutex_unlock(&store->lock);
  int status = list_segments(store, &numbers, &count, err);
  if (status) return status;
  for (size_t i = 0; !status && i < count; i++) status = adopt_segment(store, numbers[i], err);
  free(numbers);
  return status;
}

static int open_folder(struct kvs_file_store *store, struct kvs_error *err) {
  const char *path = store->settings.directory;
  if (!store->settings.readonly && mkdir(path, 0700) && errno != EEXIST)
    return kvs_file_fail(err, errno, "making the directory %.200s", path);
  store->folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (store->folder < 0) return kvs_file_fail(err, errno, "opening the directory %.200s", path);
  return refuse_writable_by_others(store, store->folder, "", err);
}

/* Geometry from the store's file, else from the first readable segment. */
static int peek(struct kvs_file_store *store, struct kvs_file_geometry *there, struct kvs_error *err) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  uint32_t *numbers;
  size_t count;
  char name[32];
  int fd, status = list_segments(store, &numbers, &count, err);
  if (status) return status;
  bool found = false;
  for (size_t i = 0; !status && !found && i <= count; i++) {
    if (i) segment_name(numbers[i - 1], name);
    if (kvs_file_openat(&store->faults, store->folder, i ? name : store_name, O_RDONLY, &fd)) continue;
    status = refuse_writable_by_others(store, fd, i ? name : store_name, err);
    int code = status ? EACCES : move_page(store, fd, false, 0, page, false);
    found = !code && kvs_file_geometry_read(page, i > 0, there) == KVS_FILE_GOOD;
    close(fd);
  }
  free(numbers);
  if (found || status) return status;
  return kvs_fail(err, KVS_FILE, "%.200s is no store: neither %s nor a segment in it can be read",
                  store->settings.directory, store_name);
}

int kvs_file_peek(const char *directory, char *layout, uint64_t *block_nbytes, struct kvs_error *err) {
  struct kvs_file_store store = {.settings = {.directory = directory, .readonly = true}};
  struct kvs_file_geometry there;
  kvs_file_faults_init(&store.faults);
  int status = open_folder(&store, err);
  if (!status) status = peek(&store, &there, err);
  if (store.folder >= 0) close(store.folder);
  kvs_file_faults_destroy(&store.faults);
  if (status) return status;
  memcpy(layout, there.layout, strlen(there.layout) + 1);
  *block_nbytes = there.block_nbytes;
  return KVS_OK;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static int size_segments(struct kvs_file_store *store, struct kvs_error *err) {
  uint64_t most = store->settings.capacity / store->geometry.segment_nbytes;
  if (store->settings.readonly) most = READER_SEGMENTS;
  if (most == 0)
    return kvs_fail(err, KVS_INVALID, "capacity is %llu bytes; a segment of %u blocks takes %llu: give it more",
                    (unsigned long long)store->settings.capacity, store->geometry.slots,
                    (unsigned long long)store->geometry.segment_nbytes);
  if (most > MOST_SEGMENTS) most = MOST_SEGMENTS;
  uint64_t slots = KVS_NO_SLOT / store->geometry.slots;
  store->max_segments = (uint32_t)(most < slots ? most : slots);
  store->segments_capacity = store->max_segments > READER_SEGMENTS ? store->max_segments : READER_SEGMENTS;
  if (store->segments_capacity > slots) store->segments_capacity = (uint32_t)slots;
  store->segments = calloc(store->segments_capacity, sizeof *store->segments);
  return store->segments ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory for the segments of a store");
}

/* The capacity has been reduced: remove the lowest-numbered segments, which usually hold the oldest blocks. */
static void remove_old_segments(struct kvs_file_store *store) {
  uint32_t surplus = store->nsegments > store->max_segments ? store->nsegments - store->max_segments : 0;
  char name[32];
  for (uint32_t i = 0; i < surplus; i++) {
    segment_name(store->segments[i].number, name);
    close(store->segments[i].fd);
    (void)unlinkat(store->folder, name, 0);
  }
  store->nsegments -= surplus;
  memmove(store->segments, store->segments + surplus, store->nsegments * sizeof *store->segments);
}

int kvs_file_open_directory(struct kvs_file_store *store, struct kvs_error *err) {
  int status = open_folder(store, err);
  if (!status) status = open_state(store, err);
  if (!status) try_direct(store);
  if (!status) status = size_segments(store, err);
  if (!status) status = kvs_file_adopt_new(store, err);
  if (status || store->settings.readonly) return status;
  uint64_t most = store->settings.capacity / store->geometry.segment_nbytes;
  if (most < store->max_segments) store->max_segments = (uint32_t)most; /* segments may be larger than requested */
  remove_old_segments(store);
  return write_state(store, err);
}

void kvs_file_close_directory(struct kvs_file_store *store) {
  for (uint32_t i = 0; i < store->nsegments; i++)
    if (store->segments[i].fd >= 0) close(store->segments[i].fd);
  free(store->segments);
  kvs_file_unlock_directory(store, true);
  if (store->folder >= 0) close(store->folder);
}
