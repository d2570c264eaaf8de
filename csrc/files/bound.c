/* See files/bound.h. */
#include "files/bound.h"
#include "files/checks.h"
#include "files/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/thread.h"
#include "base/wait.h"
#include "files/directory.h"
#include "files/retire.h"
#include "files/slot.h"
#include "files/survey.h"

static const char file_name[] = "bound.kvs";
static const int64_t LOOK_NS = 200 * 1000 * 1000, STEP_NS = 10 * 1000 * 1000, AGAIN_NS = 1000 * 1000 * 1000;
static const int64_t OPEN_WAIT_NS = 30ll * 1000 * 1000 * 1000, GROW_WAIT_NS = 2ll * 1000 * 1000 * 1000;
static const int64_t TOUCH_NS = 1000 * 1000 * 1000, TOUCH_ALONE_NS = 60ll * 1000 * 1000 * 1000;
enum { LEVELS = 4, MOST_AT_ONCE = 64 }; /* of folders from a store up to the directory; segments given back */

/* -- the lock and the page ----------------------------------------------------------------------------------------- */

static int lock_byte(int fd, int64_t at, short type) {
  struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
  return fcntl(fd, F_OFD_SETLK, &lock) ? errno : 0;
}

static int try_lock(void *arg, struct kvs_error *err) {
  const int code = lock_byte(*(const int *)arg, 0, F_WRLCK);
  if (code == EAGAIN || code == EACCES) return KVS_NOT_READY;
  return code ? kvs_file_fail(err, code, "locking %s", file_name) : KVS_OK;
}

static int enter(int fd, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_wait_until(try_lock, &fd, false, timeout_ns, err);
}

static void leave(int fd) { (void)lock_byte(fd, 0, F_UNLCK); }

/* EMPTY: the file is new. */
static int read_page(int fd, enum kvs_file_page *what, struct kvs_file_bound_page *there) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE] = {0};
  const ssize_t n = pread(fd, page, sizeof page, 0);
  if (n < 0) return errno;
  *what = kvs_file_bound_read(page, there);
  return 0;
}

static int write_page(int fd, const struct kvs_file_bound_page *now) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  kvs_file_bound_write(now, page);
  const ssize_t n = pwrite(fd, page, sizeof page, 0);
  return n == (ssize_t)sizeof page ? 0 : n < 0 ? errno : ENOSPC;
}

static int open_file(struct kvs_file_faults *faults, const struct kvs_file_root *root, int flags, int *fd,
                     struct kvs_error *err) {
  const int code = kvs_file_openat(faults, root->folder, file_name, flags, fd);
  if (code) return kvs_file_fail(err, code, "opening %.200s/%s", root->path, file_name);
  const int status = kvs_file_refuse_writable_by_others(root, *fd, file_name, err);
  if (!status) return KVS_OK;
  close(*fd);
  *fd = -1;
  return status;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

/* The limit in the file, or the capacity as the first limit. */
static int agree(struct kvs_file_bound *bound, uint64_t *capacity, struct kvs_error *err) {
  struct kvs_file_bound_page page = {0};
  enum kvs_file_page what;
  int code = read_page(bound->fd, &what, &page);
  if (code) return kvs_file_fail(err, code, "reading %.200s/%s", bound->path, file_name);
  if (what == KVS_FILE_FOREIGN)
    return kvs_fail(err, KVS_INVALID, "%.200s/%s is of another version of kvswap", bound->path, file_name);
  if (what == KVS_FILE_GOOD && page.limit != *capacity)
    snprintf(bound->note, sizeof bound->note,
             "%.200s is limited to %" PRIu64 " bytes, not the %" PRIu64 " asked for: `kvswap files limit` changes it",
             bound->path, page.limit, *capacity);
  bound->turn = page.turn;
  if (what == KVS_FILE_GOOD) *capacity = page.limit;
  if (what == KVS_FILE_GOOD) return KVS_OK;
  if (what == KVS_FILE_DAMAGED)
    snprintf(bound->note, sizeof bound->note, "%.200s/%s was damaged: the limit is %" PRIu64 " bytes now", bound->path,
             file_name, *capacity);
  page.limit = *capacity;
  code = write_page(bound->fd, &page);
  if (code) { /* no room on the disk: the next process writes it */
    char text[96];
    snprintf(bound->note, sizeof bound->note, "%.200s/%s cannot be written: %s", bound->path, file_name,
             kvs_file_error_text(code, text));
  }
  return KVS_OK;
}

static int open_bound(struct kvs_file_store *store, struct kvs_file_bound *bound, struct kvs_error *err) {
  struct kvs_file_root root = {.path = bound->path, .folder = -1, .state = -1};
  int status = kvs_file_open_folder(&root, true, err);
  bound->folder = root.folder;
  if (!status) status = open_file(&store->faults, &root, O_RDWR | O_CREAT, &bound->fd, err);
  if (!status) status = enter(bound->fd, OPEN_WAIT_NS, err);
  if (!status) status = agree(bound, &store->settings.capacity, err);
  return status;
}

static void close_bound(struct kvs_file_bound *bound) {
  const struct flock all = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
  const int fd = bound->fd, folder = bound->folder;
  if (fd >= 0) (void)fcntl(fd, F_OFD_SETLK, &all); /* a forked child may have a copy */
  bound->fd = bound->folder = -1;
  if (fd >= 0) close(fd);
  if (folder >= 0) close(folder);
}

/* The store of one writer in the directory itself, which opening refuses. */
static bool is_other_kind(const char *path) {
  char name[4096];
  struct stat info;
  return snprintf(name, sizeof name, "%s/store.kvs", path) < (int)sizeof name && lstat(name, &info) == 0;
}

int kvs_file_bound_open(struct kvs_file_store *store, struct kvs_error *err) {
  const struct kvs_file_settings *s = &store->settings;
  const char *path = s->bound ? s->bound : s->directory;
  struct kvs_error why;
  const bool asked = s->bound != NULL;
  store->settings.bound = NULL; /* the caller's */
  if (s->readonly || !(asked || s->shared) || (!asked && is_other_kind(path))) return KVS_OK;
  if (asked && store->nroots > 1)
    return kvs_fail(err, KVS_INVALID, "a store of several directories has a capacity of its own, and no bound");
  struct kvs_file_bound *bound = calloc(1, sizeof *bound);
  if (!bound || !(bound->path = kvs_file_absolute_path(path))) {
    free(bound);
    return kvs_fail(err, KVS_NOMEM, "no memory for a store");
  }
  bound->folder = bound->fd = -1;
  store->settings.bound = bound->path;
  kvs_cond_init(&bound->wake);
  store->bound = bound;
  if (open_bound(store, bound, &why) == KVS_OK) return KVS_OK;
  snprintf(bound->note, sizeof bound->note, "the limit of a directory is not kept, only this store's own: %.230s",
           why.message);
  close_bound(bound);
  return KVS_OK;
}

/* Whether the store lies in the directory, not too deep to be found. */
static bool is_inside(const struct kvs_file_store *store) {
  struct stat directory, here;
  bool inside = false;
  int fd = openat(store->roots[0].folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fstat(store->bound->folder, &directory)) inside = true;
  for (int level = 0; fd >= 0 && !inside && level < LEVELS; level++) {
    inside = fstat(fd, &here) == 0 && here.st_dev == directory.st_dev && here.st_ino == directory.st_ino;
    int above = openat(fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    close(fd);
    fd = above;
  }
  if (fd >= 0) close(fd);
  return inside;
}

int kvs_file_bound_opened(struct kvs_file_store *store, bool opened, struct kvs_error *err) {
  struct kvs_file_bound *bound = store->bound;
  struct stat info;
  if (!bound || bound->fd < 0) return KVS_OK;
  const bool inside = !opened || is_inside(store);
  if (opened && fstat(store->roots[0].state, &info) == 0) {
    bound->inode = info.st_ino;
    (void)lock_byte(bound->fd, kvs_file_byte_of(bound->inode), F_WRLCK);
  }
  leave(bound->fd);
  if (inside) return KVS_OK;
  return kvs_fail(err, KVS_INVALID,
                  "%.200s is not in the directory that bounds it, %.200s, or more than 3 folders down",
                  store->roots[0].path, bound->path);
}

/* -- use ----------------------------------------------------------------------------------------------------------- */

/* Set the file times of segments from which blocks were loaded: the times decide which segments are reclaimed first. By
 * name and not by descriptor, because another thread may close the file. */
static void touch_used(struct kvs_file_store *store, bool now) {
  struct kvs_file_bound *bound = store->bound;
  const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_NOW}};
  char name[32];
  if (!now && kvs_clock_ns() < bound->touch_ns) return;
  bound->touch_ns = kvs_deadline(store->settings.shared ? TOUCH_NS : TOUCH_ALONE_NS); /* readers watch the times */
  pthread_mutex_lock(&store->lock);
  const bool any = store->any_used;
  store->any_used = false;
  for (uint32_t i = 0; any && i < store->nsegments; i++) {
    struct kvs_file_segment *segment = &store->segments[i];
    if (!segment->used) continue;
    segment->used = false;
    const int folder = kvs_file_root_at(store, segment->root)->folder;
    kvs_file_segment_name(segment->number, name);
    pthread_mutex_unlock(&store->lock);
    (void)utimensat(folder, name, times, AT_SYMLINK_NOFOLLOW);
    pthread_mutex_lock(&store->lock);
  }
  pthread_mutex_unlock(&store->lock);
}

/* -- growing ------------------------------------------------------------------------------------------------------- */

static uint64_t segment_nbytes(const struct kvs_file_store *store) { return store->geometry.segment_nbytes; }

static uint64_t over(uint64_t nbytes, uint64_t limit) { return nbytes > limit ? nbytes - limit : 0; }

static void set_limit(struct kvs_file_store *store, uint64_t limit) {
  uint64_t most = limit / segment_nbytes(store);
  const uint64_t room = store->segments_capacity / 2;
  pthread_mutex_lock(&store->lock);
  store->settings.capacity = limit;
  store->max_segments = (uint32_t)(most < 1 ? 1 : most < room ? most : room);
  store->roots[0].grow_again_ns = 0;
  pthread_mutex_unlock(&store->lock);
}

/* The own directory's part of a survey, as if it had `more` segments more; NULL: the directory is gone. */
static struct kvs_file_surveyed_writer *own_of(struct kvs_file_store *store, struct kvs_file_survey *survey) {
  struct kvs_file_surveyed_writer *own = kvs_file_survey_own(survey);
  if (own && own->segment_nbytes < segment_nbytes(store)) own->segment_nbytes = segment_nbytes(store);
  if (own) kvs_file_survey_share(survey, store->settings.capacity);
  return own;
}

static bool may_make_own(struct kvs_file_store *store) {
  pthread_mutex_lock(&store->lock);
  const bool may = store->nown < store->max_segments;
  pthread_mutex_unlock(&store->lock);
  return may;
}

static bool has_none(struct kvs_file_store *store) {
  pthread_mutex_lock(&store->lock);
  const bool none = store->nown == 0;
  pthread_mutex_unlock(&store->lock);
  return none;
}

/* Whether one more segment may be made. Removes segments of writers that do not run for it. *turn: others should look
 * whether they have to give room back. */
static bool may_make(struct kvs_file_store *store, struct kvs_file_survey *survey, bool *turn) {
  const uint64_t limit = store->settings.capacity, more = segment_nbytes(store);
  const struct kvs_file_surveyed_writer *own = own_of(store, survey);
  if (!own) return may_make_own(store); /* the own folder is gone, or has been moved away */
  const bool first = own->nbytes == 0, entitled = first || own->nbytes + more <= kvs_file_survey_half(own);
  const uint64_t kept_free = entitled ? 0 : kvs_file_survey_kept_free(survey, own);
  uint64_t lacking = over(survey->nbytes + more + kept_free, limit);
  if (lacking) {
    const uint64_t freed = kvs_file_survey_reclaim(survey, &store->faults, lacking, &store->bound->reclaimed);
    lacking = over(lacking, freed);
  }
  *turn = first || (entitled && lacking);
  return !lacking || first || (entitled && survey->nbytes < limit);
}

/* Make a segment; if the disk is full, in the room of writers that do not run. */
static int make(struct kvs_file_store *store, struct kvs_file_survey *survey, uint32_t *number, int *fd) {
  int code = kvs_file_segment_make(store, 0, number, fd);
  const bool full = code == ENOSPC || code == EDQUOT;
  if (full && kvs_file_survey_reclaim(survey, &store->faults, segment_nbytes(store), &store->bound->reclaimed))
    code = kvs_file_segment_make(store, 0, number, fd);
  return code;
}

static void note(struct kvs_file_store *store, const struct kvs_file_bound_page *page) {
  pthread_mutex_lock(&store->lock);
  store->stats.directory_nbytes = page->nbytes;
  store->stats.reclaimed_segments = store->bound->reclaimed;
  pthread_mutex_unlock(&store->lock);
}

/* With the lock of the bound. Returns whether a segment may be made, and then *code of making it. */
static bool grow_counted(struct kvs_file_store *store, uint32_t *number, int *fd, int *code, bool *turn) {
  struct kvs_file_bound *bound = store->bound;
  struct kvs_file_bound_page page;
  struct kvs_file_survey survey;
  enum kvs_file_page what;
  const bool known = read_page(bound->fd, &what, &page) == 0 && what == KVS_FILE_GOOD;
  if (known && page.limit != store->settings.capacity) set_limit(store, page.limit);
  if (!known) page = (struct kvs_file_bound_page){.limit = store->settings.capacity, .turn = bound->turn};
  *code = kvs_file_survey_make(&survey, bound->folder, bound->fd, bound->inode);
  const bool may = *code == 0 && may_make(store, &survey, turn);
  if (may) *code = make(store, &survey, number, fd);
  page.nbytes = survey.nbytes + (may && !*code ? segment_nbytes(store) : 0);
  page.turn += *turn;
  kvs_file_survey_free(&survey);
  (void)write_page(bound->fd, &page);
  note(store, &page);
  return may || *code;
}

static void grow(struct kvs_file_store *store) {
  struct kvs_file_bound *bound = store->bound;
  struct kvs_error ignored;
  int fd = -1, code = 0;
  bool turn = false; /* others are asked for room, which takes them a look */
  touch_used(store, true);
  pthread_mutex_lock(&store->lock);
  uint32_t number = store->roots[0].next_number;
  pthread_mutex_unlock(&store->lock);
  const bool counted = enter(bound->fd, GROW_WAIT_NS, &ignored) == KVS_OK;
  const bool made = counted ? grow_counted(store, &number, &fd, &code, &turn) : has_none(store);
  if (counted) leave(bound->fd);
  if (made && !counted) code = kvs_file_segment_make(store, 0, &number, &fd);
  pthread_mutex_lock(&store->lock);
  bound->asked = false;
  if (made)
    kvs_file_grown_locked(store, 0, code, number, fd);
  else
    kvs_file_not_grown_locked(store, 0, kvs_deadline(turn ? LOOK_NS : AGAIN_NS));
  pthread_mutex_unlock(&store->lock);
}

/* -- giving back --------------------------------------------------------------------------------------------------- */

/* How many own segments to remove; *lacking: bytes that writers lack. */
static uint32_t count_surplus(struct kvs_file_store *store, struct kvs_file_survey *survey, uint64_t *lacking) {
  const struct kvs_file_surveyed_writer *own = own_of(store, survey);
  const uint64_t part = segment_nbytes(store);
  *lacking = own ? over(survey->nbytes + kvs_file_survey_kept_free(survey, NULL), store->settings.capacity) : 0;
  if (*lacking)
    *lacking = over(*lacking, kvs_file_survey_reclaim(survey, &store->faults, *lacking, &store->bound->reclaimed));
  if (!own || !*lacking || own->nbytes <= own->share) return 0;
  const uint64_t above = own->nbytes - own->share, give = above < *lacking ? above : *lacking;
  const uint64_t count = (give + part - 1) / part, most = (own->nbytes + part - 1) / part - 1;
  const uint64_t now = count < most ? count : most;
  return (uint32_t)(now < MOST_AT_ONCE ? now : MOST_AT_ONCE);
}

/* Whether room may still have to be given back. */
static bool give_back(struct kvs_file_store *store) {
  struct kvs_file_bound *bound = store->bound;
  struct kvs_file_bound_page page;
  struct kvs_file_survey survey;
  struct kvs_error ignored;
  enum kvs_file_page what;
  uint64_t lacking = 0;
  uint32_t surplus = 0, gone = 0;
  if (enter(bound->fd, LOOK_NS, &ignored)) return true;
  const bool good = read_page(bound->fd, &what, &page) == 0 && what == KVS_FILE_GOOD;
  if (good && page.limit != store->settings.capacity) set_limit(store, page.limit);
  if (good && kvs_file_survey_make(&survey, bound->folder, bound->fd, bound->inode) == 0) {
    surplus = count_surplus(store, &survey, &lacking);
    if (surplus) gone = kvs_file_retire(store, surplus);
    page.nbytes = over(survey.nbytes, gone * segment_nbytes(store));
    (void)write_page(bound->fd, &page);
    note(store, &page);
  }
  if (good) kvs_file_survey_free(&survey);
  leave(bound->fd);
  bound->leaving += gone;
  return lacking > 0;
}

/* Somebody has removed bound.kvs: a new one begins with the limit that is known. */
static void open_again(struct kvs_file_store *store) {
  struct kvs_file_bound *bound = store->bound;
  const struct kvs_file_root root = {.path = bound->path, .folder = bound->folder};
  struct kvs_error ignored;
  struct stat info;
  int fd = -1;
  uint64_t limit = store->settings.capacity;
  if (fstat(bound->fd, &info) || info.st_nlink) return;
  if (open_file(&store->faults, &root, O_RDWR | O_CREAT, &fd, &ignored)) return;
  if (enter(fd, LOOK_NS, &ignored) == KVS_OK) {
    const int old = bound->fd;
    bound->fd = fd;
    if (agree(bound, &limit, &ignored) == KVS_OK) (void)lock_byte(fd, kvs_file_byte_of(bound->inode), F_WRLCK);
    leave(fd);
    fd = old;
  }
  close(fd);
}

static void look(struct kvs_file_store *store) {
  struct kvs_file_bound *bound = store->bound;
  struct kvs_file_bound_page page;
  enum kvs_file_page what;
  touch_used(store, false);
  open_again(store);
  if (read_page(bound->fd, &what, &page) || what != KVS_FILE_GOOD) return; /* being written, or damaged */
  const bool changed = page.limit != store->settings.capacity;
  if (changed) set_limit(store, page.limit);
  if (changed || page.turn != bound->turn) bound->again_ns = 0;
  bound->doubtful |= changed || page.turn != bound->turn;
  bound->turn = page.turn;
  note(store, &page);
  if (!bound->doubtful || bound->leaving || kvs_clock_ns() < bound->again_ns) return;
  bound->doubtful = give_back(store);
  bound->again_ns = bound->leaving ? 0 : kvs_deadline(AGAIN_NS);
}

/* -- the thread ---------------------------------------------------------------------------------------------------- */

/* False: the store stops. *asked: a segment is asked for. */
static bool wait_for_work(struct kvs_file_store *store, bool *asked) {
  struct kvs_file_bound *bound = store->bound;
  const uint64_t step_ns = kvs_deadline(STEP_NS), until = bound->leaving ? step_ns : bound->look_ns;
  pthread_mutex_lock(&store->lock);
  while (!bound->stop && !bound->asked && kvs_cond_wait(&bound->wake, &store->lock, until)) continue;
  *asked = bound->asked;
  const bool stop = bound->stop;
  pthread_mutex_unlock(&store->lock);
  return !stop;
}

static void *serve(void *arg) {
  struct kvs_file_store *store = arg;
  struct kvs_file_bound *bound = store->bound;
  for (bool asked; wait_for_work(store, &asked);) {
    if (asked) grow(store);
    if (bound->leaving) bound->leaving = kvs_file_retire_step(store);
    if (bound->fd < 0 || kvs_clock_ns() < bound->look_ns) continue;
    bound->look_ns = kvs_deadline(LOOK_NS);
    look(store);
  }
  return NULL;
}

int kvs_file_bound_start(struct kvs_file_store *store, struct kvs_error *err) {
  struct kvs_file_bound *bound = store->bound;
  if (!bound || bound->fd < 0) return KVS_OK;
  bound->look_ns = kvs_deadline(LOOK_NS);
  bound->doubtful = true;
  bound->runs = kvs_thread_start(&bound->thread, "kvswap-bound", serve, store) == 0;
  return bound->runs ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no thread could be started");
}

void kvs_file_bound_stop(struct kvs_file_store *store) {
  struct kvs_file_bound *bound = store->bound;
  if (!bound || !bound->runs) return;
  pthread_mutex_lock(&store->lock);
  bound->stop = true;
  pthread_cond_signal(&bound->wake);
  pthread_mutex_unlock(&store->lock);
  pthread_join(bound->thread, NULL);
  bound->runs = false;
}

void kvs_file_bound_close(struct kvs_file_store *store) {
  if (store->bound) close_bound(store->bound);
}

void kvs_file_bound_free(struct kvs_file_store *store) {
  if (!store->bound) return;
  pthread_cond_destroy(&store->bound->wake);
  free(store->bound->path);
  free(store->bound);
}

void kvs_file_bound_forked(struct kvs_file_store *store) {
  if (!store->bound) return;
  const int fd = store->bound->fd, folder = store->bound->folder;
  store->bound->fd = store->bound->folder = -1;
  if (fd >= 0) close(fd);
  if (folder >= 0) close(folder);
}

/* -- the limit from outside ---------------------------------------------------------------------------------------- */

static int change(int fd, const char *path, uint64_t limit, uint64_t *found, struct kvs_error *err) {
  struct kvs_file_bound_page page = {0};
  enum kvs_file_page what;
  int code = read_page(fd, &what, &page);
  if (code) return kvs_file_fail(err, code, "reading %.200s/%s", path, file_name);
  if (what == KVS_FILE_FOREIGN)
    return kvs_fail(err, KVS_INVALID, "%.200s/%s is of another version of kvswap", path, file_name);
  if (what != KVS_FILE_GOOD && !limit)
    return kvs_fail(err, KVS_FILE, "%.200s has no limit: no engine has opened it, or %s is damaged", path, file_name);
  if (limit) {
    page.limit = limit;
    page.turn++;
    code = write_page(fd, &page);
    if (!code) code = fdatasync(fd) ? errno : 0;
  }
  if (code) return kvs_file_fail(err, code, "writing %.200s/%s", path, file_name);
  *found = page.limit;
  return KVS_OK;
}

int kvs_file_limit(const char *directory, uint64_t limit, uint64_t found[3], struct kvs_error *err) {
  struct kvs_file_root root = {.path = (char *)(uintptr_t)directory, .folder = -1, .state = -1};
  struct kvs_file_faults none = {0};
  struct kvs_file_survey survey;
  int fd = -1, status = kvs_file_open_folder(&root, false, err);
  if (!status && limit > KVS_FILE_LAST_SEQUENCE)
    status = kvs_fail(err, KVS_INVALID, "limit is %" PRIu64 " bytes: must be at most 2**62", limit);
  kvs_file_faults_init(&none);
  if (!status) status = open_file(&none, &root, limit ? O_RDWR | O_CREAT : O_RDWR, &fd, err);
  if (!status) status = enter(fd, OPEN_WAIT_NS, err);
  if (!status) {
    status = change(fd, directory, limit, found, err);
    leave(fd);
  }
  if (!status) {
    int code = kvs_file_survey_make(&survey, root.folder, fd, 0);
    found[1] = survey.nbytes;
    found[2] = 0;
    for (size_t i = 0; i < survey.nwriters; i++) found[2] += survey.writers[i].runs;
    kvs_file_survey_free(&survey);
    if (code) status = kvs_file_fail(err, code, "reading the directory %.200s", directory);
  }
  kvs_file_faults_destroy(&none);
  if (fd >= 0) close(fd);
  if (root.folder >= 0) close(root.folder);
  return status;
}
