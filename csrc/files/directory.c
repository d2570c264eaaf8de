/* The directories of a store, and the store's file in each: geometry, checkpoints and the writer's locks.
 *
 * A writer holds two locks in each directory. The lock of the store's file ends with the process: it says at once
 * whether another process writes. The lock of the directory itself is also held by the rings of io_uring, and ends when
 * the disk has ended their requests, those of a killed process too: only then may the next writer read the headers.
 *
 * Several directories, on several disks, make one store with one index. Each holds whole segments, a checkpoint and a
 * lock of its own, so that the rules of one directory hold for each. The layout's text in their files has a field more:
 * a random number of the set, and how many directories it has. Without that, a store opened with some of its
 * directories would bring blocks back, of which a newer version was stored elsewhere, or which were deleted. */
#include "files/directory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/wait.h"
#include "files/checks.h"
#include "files/descriptors.h"
#include "files/segment.h"
#include "files/state.h"

static const char store_name[] = "store.kvs";
enum { CHECKPOINTS_AT = KVS_FILE_PAGE, STATE_NBYTES = 3 * KVS_FILE_PAGE }; /* two pages, written alternately */
static const uint64_t CHECKPOINT_NBYTES = 256ull << 20; /* at most so much is verified again after a crash */
static const int64_t REQUESTS_NS = 10ll * 1000 * 1000 * 1000;

/* -- checkpoints --------------------------------------------------------------------------------------------------- */

uint64_t kvs_file_whole_below_locked(const struct kvs_file_store *store) {
  uint64_t below = store->oldest_write ? store->oldest_write->sequence : store->sequence + 1;
  return below < store->whole_below ? below : store->whole_below;
}

/* Where it cannot be written, the older checkpoint stays, and the next open compares more blocks. */
int kvs_file_save_checkpoint(struct kvs_file_store *store, uint64_t sequence, bool clean) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  if (store->generation >= KVS_FILE_LAST_SEQUENCE) return KVS_FILE_NUMBERS_END;
  struct kvs_file_checkpoint checkpoint = {++store->generation, sequence, clean};
  uint64_t at = CHECKPOINTS_AT + (checkpoint.generation & 1) * KVS_FILE_PAGE;
  int first = 0;
  for (unsigned i = 0; i < store->nroots; i++) {
    kvs_file_checkpoint_write(&checkpoint, page);
    int code =
        kvs_file_move_page(store, store->roots[i].state, true, at, page, store->settings.durability == KVS_FILE_FSYNC);
    if (!first) first = code;
  }
  return first;
}

/* All blocks below the oldest write in flight are whole. If the checkpoint fails, the next open only takes longer. */
void kvs_file_checkpoint_if_due(struct kvs_file_store *store) {
  pthread_mutex_lock(&store->lock);
  bool due = store->unchecked_nbytes >= CHECKPOINT_NBYTES && !store->checkpointing;
  uint64_t below = kvs_file_whole_below_locked(store);
  if (due) store->unchecked_nbytes = 0;
  store->checkpointing |= due;
  pthread_mutex_unlock(&store->lock);
  if (!due) return;
  (void)kvs_file_save_checkpoint(store, below, false);
  pthread_mutex_lock(&store->lock);
  store->checkpointing = false;
  pthread_mutex_unlock(&store->lock);
}

static int read_checkpoints(struct kvs_file_store *store, struct kvs_file_root *root, struct kvs_error *err) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  struct kvs_file_checkpoint checkpoint;
  uint64_t newest = 0;
  for (int i = 0; i < 2; i++) {
    uint64_t at = CHECKPOINTS_AT + (uint64_t)i * KVS_FILE_PAGE;
    int code = kvs_file_move_page(store, root->state, false, at, page, false);
    if (code && code != KVS_FILE_ENDED) return kvs_file_fail(err, code, "reading %.200s/%s", root->path, store_name);
    if (code || kvs_file_checkpoint_read(page, &checkpoint) != KVS_FILE_GOOD) continue;
    if (checkpoint.generation <= newest) continue;
    newest = checkpoint.generation;
    root->whole_below = checkpoint.sequence;
  }
  if (newest > store->generation) store->generation = newest;
  if (root->whole_below > store->sequence + 1) store->sequence = root->whole_below - 1;
  return KVS_OK;
}

/* -- geometry ------------------------------------------------------------------------------------------------------ */

/* The first page of the store's file; DAMAGED also where there is none. */
static int read_first_page(struct kvs_file_store *store, const struct kvs_file_root *root, enum kvs_file_page *what,
                           struct kvs_file_geometry *there, struct kvs_error *err) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  int code = kvs_file_move_page(store, root->state, false, 0, page, false);
  if (code == KVS_FILE_ENDED) memset(page, 0, sizeof page);
  if (code && code != KVS_FILE_ENDED) return kvs_file_fail(err, code, "reading %.200s/%s", root->path, store_name);
  *what = kvs_file_geometry_read(page, false, there);
  if (*what != KVS_FILE_FOREIGN) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "%.200s is a store of another version of kvswap: it is left alone", root->path);
}

/* Existing segments keep their size, whatever size is requested now. Without a first page the segments hold the same
 * geometry, and all blocks will be compared. */
static int read_state(struct kvs_file_store *store, struct kvs_file_root *root, struct kvs_error *err) {
  struct kvs_file_geometry there;
  enum kvs_file_page what = KVS_FILE_DAMAGED;
  int status = read_first_page(store, root, &what, &there, err);
  root->fresh = what != KVS_FILE_GOOD;
  if (status || what != KVS_FILE_GOOD) return status;
  if (!kvs_file_same_layout(&there, &store->geometry))
    return kvs_file_refuse_layout(store, root, &there, store_name, err);
  if (store->geometry_known && there.slots != store->geometry.slots)
    return kvs_fail(err, KVS_INVALID, "%.200s has segments of %u blocks, and %.200s of %u: one store has one size",
                    root->path, there.slots, store->roots[0].path, store->geometry.slots);
  store->geometry = there;
  store->geometry_known = true;
  return read_checkpoints(store, root, err);
}

/* Written in place, by the writer only. A process that opens the store with a damaged first page rebuilds the page from
 * the segments. */
static int write_state(struct kvs_file_store *store, struct kvs_error *err) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  for (unsigned i = 0; i < store->nroots; i++) {
    const struct kvs_file_root *root = &store->roots[i];
    kvs_file_geometry_write(&store->geometry, false, page);
    int code = kvs_file_move_page(store, root->state, true, 0, page, store->settings.durability == KVS_FILE_FSYNC);
    store->unwritable |= code != 0;
    if (code) return kvs_file_fail(err, code, "writing %.200s/%s", root->path, store_name);
  }
  return KVS_OK;
}

/* -- folders and locks --------------------------------------------------------------------------------------------- */

int kvs_file_open_folder(struct kvs_file_root *root, bool make, struct kvs_error *err) {
  if (make && mkdir(root->path, 0700) && errno != EEXIST)
    return kvs_file_fail(err, errno, "making the directory %.200s", root->path);
  root->folder = open(root->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (root->folder < 0) return kvs_file_fail(err, errno, "opening the directory %.200s", root->path);
  return kvs_file_refuse_writable_by_others(root, root->folder, "", err);
}

/* A shared lock of bytes, which is permitted on a directory; flock() is left to users, who may lock directories too.
 * The caller has the lock of the state, so no other process asks for this one now. */
static int lock_folder(void *arg, struct kvs_error *err) {
  struct kvs_file_root *root = arg;
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  (void)err;
  bool asked = fcntl(root->folder, F_OFD_GETLK, &lock) == 0;
  if (asked && lock.l_type != F_UNLCK) return KVS_NOT_READY;
  lock = (struct flock){.l_type = F_RDLCK, .l_whence = SEEK_SET};
  root->lock_code = asked && fcntl(root->folder, F_OFD_SETLK, &lock) == 0 ? 0 : errno;
  return KVS_OK;
}

static int await_requests(struct kvs_file_root *root, uint64_t deadline, struct kvs_error *err) {
  const uint64_t now = kvs_clock_ns();
  int status = kvs_wait_until(lock_folder, root, false, deadline > now ? (int64_t)(deadline - now) : 0, err);
  if (status != KVS_TIMEOUT) return status;
  return kvs_fail(err, KVS_BUSY,
                  "%.200s: a process that wrote it has ended, but its writes are still on their way to the disk after "
                  "%d s; open it again when the disk answers",
                  root->path, (int)(REQUESTS_NS / 1000000000));
}

static int open_state(struct kvs_file_store *store, struct kvs_file_root *root, uint64_t deadline,
                      struct kvs_error *err) {
  bool readonly = store->settings.readonly;
  int flags = readonly ? O_RDONLY : O_RDWR | O_CREAT;
  int code = kvs_file_openat(&store->faults, root->folder, store_name, flags, &root->state);
  if (code == ENOENT && readonly)
    return kvs_fail(err, KVS_FILE, "%.200s is no store: there is no %s in it", root->path, store_name);
  if (code) return kvs_file_fail(err, code, "opening %.200s/%s", root->path, store_name);
  int status = kvs_file_refuse_writable_by_others(root, root->state, store_name, err);
  if (status) return status;
  if (readonly) return KVS_OK;
  if (flock(root->state, LOCK_EX | LOCK_NB))
    return kvs_fail(err, KVS_BUSY,
                    "%.200s is being written by another process, or open twice in this one: a store has one writer; "
                    "open it with readonly",
                    root->path);
  status = await_requests(root, deadline, err);
  code = status ? 0 : kvs_file_reserve(&store->faults, root->state, STATE_NBYTES); /* the next opening needs no space */
  return code ? kvs_file_fail(err, code, "reserving the space of %.200s/%s", root->path, store_name) : status;
}

/* Sync the parent of a new directory, which holds its name; for a shared store, where each writer has a directory, also
 * the parent's parent. Stops at the root of the file system. Skips a parent that this process may not read. */
static int sync_above(struct kvs_file_store *store, const struct kvs_file_root *root) {
  static const char *const above[] = {"..", "../.."};
  struct stat own, there;
  int code = fstat(root->folder, &own) ? errno : 0;
  for (int i = 0; !code && i < (store->settings.shared ? 2 : 1); i++) {
    int parent = openat(root->folder, above[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0) return errno == EACCES ? 0 : errno;
    bool same = fstat(parent, &there) == 0 && there.st_dev == own.st_dev;
    if (same) code = kvs_file_sync_folder(&store->faults, parent);
    close(parent);
  }
  return code;
}

/* With `fsync`: what opening has made and removed, before the first page says that the store is there. */
static int sync_names(struct kvs_file_store *store, struct kvs_error *err) {
  for (unsigned i = 0; store->settings.durability == KVS_FILE_FSYNC && i < store->nroots; i++) {
    const struct kvs_file_root *root = &store->roots[i];
    int code = kvs_file_sync_folder(&store->faults, root->folder);
    if (!code && root->fresh) code = sync_above(store, root);
    if (code) return kvs_file_fail(err, code, "syncing the directory %.200s", root->path);
  }
  return KVS_OK;
}

/* 0, or an errno if the name is gone or another directory's. */
static int has_name(const struct kvs_file_root *root) {
  struct stat own, named;
  if (fstat(root->folder, &own)) return 0;
  if (stat(root->path, &named)) return errno == ENOENT || errno == ENOTDIR ? errno : 0;
  return own.st_dev == named.st_dev && own.st_ino == named.st_ino ? 0 : ESTALE;
}

void kvs_file_look_at_directories(struct kvs_file_store *store) {
  for (unsigned i = 0; !store->settings.readonly && i < store->nroots; i++) {
    struct kvs_file_root *root = &store->roots[i];
    const int code = has_name(root);
    pthread_mutex_lock(&store->lock);
    const bool news = code && !root->gone_code;
    root->gone_code = code;
    if (news)
      snprintf(store->note, sizeof store->note,
               "%.160s was removed or replaced: loads of open files go on, stores fail until it is there again",
               root->path);
    if (news) atomic_store(&store->noted, true);
    pthread_mutex_unlock(&store->lock);
  }
}

bool kvs_file_take_note(struct kvs_file_store *store, char note[300]) {
  if (!atomic_load_explicit(&store->noted, memory_order_relaxed)) return false;
  pthread_mutex_lock(&store->lock);
  const bool there = atomic_exchange(&store->noted, false);
  memcpy(note, store->note, sizeof store->note);
  pthread_mutex_unlock(&store->lock);
  return there;
}

/* Ordered for fork() at any step: the child must not keep the locked descriptor, nor close a descriptor number that was
 * reused. */
void kvs_file_unlock_directories(struct kvs_file_store *store, bool everywhere) {
  for (unsigned i = 0; i < store->nroots; i++) {
    const struct flock none = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
    const int folder = store->roots[i].folder, state = store->roots[i].state;
    if (everywhere && folder >= 0) (void)fcntl(folder, F_OFD_SETLK, &none);
    if (everywhere && state >= 0) (void)flock(state, LOCK_UN);
    store->roots[i].folder = store->roots[i].state = -1;
    if (folder >= 0) close(folder);
    if (state >= 0) close(state);
  }
}

/* -- shared directories -------------------------------------------------------------------------------------------- */

static bool exists(const struct kvs_file_root *root, const char *name) {
  struct stat info;
  return fstatat(root->folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0;
}

/* One kind of store a directory: that of one writer has files of its own, a shared one has a directory a writer. */
static int refuse_other_kind(const struct kvs_file_store *store, const struct kvs_file_root *root,
                             struct kvs_error *err) {
  const bool shared = store->settings.shared;
  if (!exists(root, shared ? store_name : "writer-0000")) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "%.200s is %s: open it %s `shared`", root->path,
                  shared ? "the store of one writer" : "shared by several writers", shared ? "without" : "with");
}

/* Whether there is a directory; *taken: a file, or a link to nothing. */
static bool is_directory(const char *path, bool *taken) {
  struct stat info;
  const bool there = stat(path, &info) == 0, directory = there && S_ISDIR(info.st_mode);
  *taken = !directory && (there || lstat(path, &info) == 0);
  return directory;
}

static int open_base(struct kvs_file_store *store, struct kvs_error *err) {
  const bool make = !store->settings.readonly;
  struct kvs_file_root base = {.path = (char *)(uintptr_t)store->settings.directory, .folder = -1, .state = -1};
  int status = kvs_file_open_folder(&base, make, err);
  if (!status) status = refuse_other_kind(store, &base, err);
  if (base.folder >= 0) close(base.folder);
  return status;
}

/* The first of the writers' directories that no process writes: of those that exist, where one that cannot be used is
 * passed over, or a new one. KVS_BUSY: there is none. */
static int find_writer(struct kvs_file_store *store, bool existing, uint64_t deadline, struct kvs_error *err) {
  const char *base = store->settings.directory;
  struct kvs_file_root *root = &store->roots[0];
  bool taken;
  for (uint32_t i = 0; i < KVS_FILE_WRITERS; i++) {
    store->writer = i;
    kvs_file_writer_path(base, i, root->path, strlen(base) + 32);
    if (is_directory(root->path, &taken) != existing || taken) continue;
    int status = kvs_file_open_folder(root, true, err);
    if (!status) status = open_state(store, root, deadline, err);
    if (status != KVS_BUSY && !(existing && status == KVS_FILE)) return status;
    kvs_file_unlock_directories(store, true);
  }
  return KVS_BUSY;
}

static int open_writer(struct kvs_file_store *store, uint64_t deadline, struct kvs_error *err) {
  int status = open_base(store, err);
  if (!status) status = find_writer(store, true, deadline, err);
  if (status == KVS_BUSY) status = find_writer(store, false, deadline, err);
  if (status != KVS_BUSY) return status;
  return kvs_fail(err, KVS_NO_ROOM, "%.200s has %d writers, all of which run: no more are possible",
                  store->settings.directory, KVS_FILE_WRITERS);
}

/* -- sets of directories ------------------------------------------------------------------------------------------- */

enum { SET_NBYTES = 64 }; /* what the field adds to a layout's text */
static const char set_begin[] = "{\"\":\"";

/* The text of the layout with the field of a set: {"":"0123...cdef/2","model":"m"}. */
static void set_text(const char *layout, const char *id, unsigned n, char *text) {
  const char *rest = layout + 1;
  snprintf(text, KVS_FILE_LAYOUT_NBYTES + SET_NBYTES, "%s%.32s/%u\"%s%s", set_begin, id, n, *rest == '}' ? "" : ",",
           rest);
}

/* Whether a text is that layout in a set; then its id, and how many directories it has. */
static bool is_set_of(const char *text, const char *layout, char id[33], unsigned *n) {
  char again[KVS_FILE_LAYOUT_NBYTES + SET_NBYTES];
  if (strncmp(text, set_begin, strlen(set_begin)) != 0) return false;
  if (sscanf(text + strlen(set_begin), "%32[0-9a-f]/%u", id, n) != 2) return false;
  set_text(layout, id, *n, again);
  return strcmp(text, again) == 0;
}

static int make_id(char id[33], struct kvs_error *err) {
  uint8_t random[16];
  if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
    return kvs_file_fail(err, errno, "making a random number");
  for (int i = 0; i < 16; i++) snprintf(id + 2 * i, 3, "%02x", random[i]);
  return KVS_OK;
}

int kvs_file_find_geometry(struct kvs_file_store *store, unsigned at, struct kvs_file_geometry *there, bool *found,
                           size_t *nsegments, struct kvs_error *err) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  const struct kvs_file_root *root = kvs_file_root_at(store, at);
  uint32_t *numbers;
  char name[32];
  int fd, status = kvs_file_list_segments(store, at, &numbers, nsegments, err);
  if (status) return status;
  *found = false;
  for (size_t i = 0; !status && !*found && i <= *nsegments; i++) {
    if (i) kvs_file_segment_name(numbers[i - 1], name);
    if (kvs_file_openat(&store->faults, root->folder, i ? name : store_name, O_RDONLY, &fd)) continue;
    status = kvs_file_refuse_writable_by_others(root, fd, i ? name : store_name, err);
    int code = status ? EACCES : kvs_file_move_page(store, fd, false, 0, page, false);
    *found = !code && kvs_file_geometry_read(page, i > 0, there) == KVS_FILE_GOOD;
    close(fd);
  }
  free(numbers);
  return status;
}

static int refuse_set(const struct kvs_file_store *store, unsigned root, unsigned n, struct kvs_error *err) {
  return kvs_fail(err, KVS_INVALID,
                  "%.200s is one of the %u directories of a store, and %u were named: name all of them, and no others",
                  store->roots[root].path, n, store->nroots);
}

/* The number of the directories' set; empty: all are new. With the directories locked. */
static int find_set(struct kvs_file_store *store, const char *layout, char id[33], struct kvs_error *err) {
  struct kvs_file_geometry *there = malloc(sizeof *there);
  unsigned of = 0, empty = UINT32_MAX;
  size_t all = 0, nsegments;
  char own[33] = "";
  bool found;
  int status = there ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory to open a store");
  id[0] = 0;
  for (unsigned i = 0; !status && i < store->nroots; i++) {
    status = kvs_file_find_geometry(store, i, there, &found, &nsegments, err);
    if (status) break;
    all += nsegments;
    if (!found) empty = i;
    if (!found) continue;
    if (!is_set_of(there->layout, layout, own, &of))
      status = kvs_file_refuse_layout(store, &store->roots[i], there, store_name, err);
    else if (of != store->nroots || (id[0] && strcmp(id, own) != 0))
      status = refuse_set(store, i, of, err);
    memcpy(id, own, sizeof own);
  }
  free(there);
  if (!status && id[0] && empty != UINT32_MAX && all)
    status =
        kvs_fail(err, KVS_INVALID,
                 "%.200s has no store's files, but the other directories have: blocks of it may come back with it; "
                 "empty all of them to begin anew",
                 store->roots[empty].path);
  return status;
}

/* Give the layout the field of the set. */
static int join_set(struct kvs_file_store *store, struct kvs_error *err) {
  char layout[KVS_FILE_LAYOUT_NBYTES + 1], text[KVS_FILE_LAYOUT_NBYTES + SET_NBYTES], id[33];
  memcpy(layout, store->geometry.layout, sizeof layout);
  if (layout[0] != '{' || strlen(layout) > KVS_FILE_LAYOUT_NBYTES - SET_NBYTES)
    return kvs_fail(err, KVS_INVALID, "with several directories the layout must be a JSON object of at most %d bytes",
                    KVS_FILE_LAYOUT_NBYTES - SET_NBYTES);
  int status = find_set(store, layout, id, err);
  if (!status && !id[0] && store->settings.readonly)
    status = kvs_fail(err, KVS_FILE, "%.200s is no store: no file in it can be read", store->roots[0].path);
  if (!status && !id[0]) status = make_id(id, err);
  if (status) return status;
  set_text(layout, id, store->nroots, text);
  kvs_file_geometry_make(text, store->geometry.block_nbytes, store->geometry.segment_nbytes, &store->geometry);
  return KVS_OK;
}

int kvs_file_peek(const char *directory, char *layout, uint64_t *block_nbytes, struct kvs_error *err) {
  struct kvs_file_root root = {.path = (char *)(uintptr_t)directory, .folder = -1, .state = -1};
  struct kvs_file_store store = {.settings = {.directory = directory, .readonly = true}, .roots = &root, .nroots = 1};
  struct kvs_file_geometry there;
  bool found = false;
  size_t nsegments;
  kvs_file_faults_init(&store.faults);
  pthread_mutex_init(&store.lock, NULL);
  int status = kvs_file_open_folder(&root, false, err);
  if (!status) status = kvs_file_find_geometry(&store, 0, &there, &found, &nsegments, err);
  if (root.folder >= 0) close(root.folder);
  pthread_mutex_destroy(&store.lock);
  kvs_file_faults_destroy(&store.faults);
  if (status) return status;
  if (!found)
    return kvs_fail(err, KVS_FILE, "%.200s is no store: neither %s nor a segment in it can be read", directory,
                    store_name);
  memcpy(layout, there.layout, strlen(there.layout) + 1);
  *block_nbytes = there.block_nbytes;
  return KVS_OK;
}

/* -- O_DIRECT ------------------------------------------------------------------------------------------------------ */

/* Tried on the store's own files: some file systems accept the flag and refuse the reads. */
static void try_direct(struct kvs_file_store *store) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  char text[96];
  int fd, code = 0;
  if (store->settings.buffered) {
    snprintf(store->direct_note, sizeof store->direct_note, "not asked for");
    return;
  }
  if (!store->nroots) {
    snprintf(store->direct_note, sizeof store->direct_note, "the store serves read-only");
    return;
  }
  for (unsigned i = 0; !code && i < store->nroots; i++) {
    code = kvs_file_openat(&store->faults, store->roots[i].folder, store_name, O_RDONLY | O_DIRECT, &fd);
    if (code) break;
    store->direct = true;
    code = kvs_file_move_page(store, fd, false, 0, page, false);
    if (code == KVS_FILE_ENDED) code = 0;
    close(fd);
  }
  store->direct = code == 0;
  if (code)
    snprintf(store->direct_note, sizeof store->direct_note, "the file system does not take O_DIRECT: %s",
             kvs_file_error_text(code, text));
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

int kvs_file_open_directories(struct kvs_file_store *store, struct kvs_error *err) {
  const uint64_t deadline = kvs_deadline(REQUESTS_NS);
  int status = KVS_OK;
  if (store->settings.shared) status = store->nroots ? open_writer(store, deadline, err) : open_base(store, err);
  for (unsigned i = 0; !store->settings.shared && !status && i < store->nroots; i++) {
    status = kvs_file_open_folder(&store->roots[i], !store->settings.readonly, err);
    if (!status) status = refuse_other_kind(store, &store->roots[i], err);
    if (!status) status = open_state(store, &store->roots[i], deadline, err);
  }
  if (!status && store->nroots > 1) status = join_set(store, err);
  for (unsigned i = 0; !status && i < store->nroots; i++) status = read_state(store, &store->roots[i], err);
  if (!status) try_direct(store);
  return status;
}

int kvs_file_open_segments(struct kvs_file_store *store, struct kvs_error *err) {
  uint64_t most;
  int status = kvs_file_size_segments(store, err);
  if (!status) status = kvs_file_adopt_new(store, err);
  if (!status) status = kvs_file_most_segments(store, &most, err);
  if (status || store->settings.readonly) return status;
  /* Segments that were there may be larger or smaller than those that were asked for. The list also has the peers'. */
  uint64_t room = store->segments_capacity - (store->settings.shared ? store->max_segments : 0);
  if (room < store->max_segments) room = store->max_segments;
  store->max_segments = (uint32_t)(most < room ? most : room);
  kvs_file_remove_old_segments(store);
  store->geometry_known |= store->settings.shared;
  status = sync_names(store, err);
  return status ? status : write_state(store, err);
}

void kvs_file_close_directories(struct kvs_file_store *store) {
  int fd; /* no other thread is left */
  for (uint32_t i = 0; i < store->nsegments; i++)
    if ((fd = kvs_file_descriptor_take_locked(store, i)) >= 0) close(fd);
  free(store->segments);
  kvs_file_unlock_directories(store, true);
}
