/* See files/epoch.h. */
#include "files/epoch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/wait.h"

static const char file_name[] = "epoch.kvs", next_name[] = "epoch.tmp";
enum { MARK_AT = KVS_FILE_PAGE, NBYTES = 2 * KVS_FILE_PAGE };

static const struct kvs_file_epoch unknown = {
    {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}};

static struct kvs_file_faults no_faults = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int move(struct kvs_file_faults *faults, int fd, bool write, uint64_t offset, void *data, size_t nbytes) {
  struct kvs_file_span span = {.fd = fd, .write = write, .offset = offset, .pieces = {{data, nbytes}}, .npieces = 1};
  return kvs_file_move(faults, &span, false);
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

bool kvs_file_epoch_known(const struct kvs_file_epoch *epoch) { return !kvs_file_epoch_is(epoch, &unknown); }

void kvs_file_epoch_unmap(struct kvs_file_epoch_place *place) {
  if (place->mark) munmap((char *)(uintptr_t)place->mark - MARK_AT, NBYTES);
  place->mark = NULL;
}

/* False: the file is damaged, or other users may write it. */
static bool read_file(int fd, struct kvs_file_epoch_place *found) {
  uint8_t page[KVS_FILE_PAGE];
  struct stat info;
  if (fstat(fd, &info) || info.st_size < NBYTES || (info.st_mode & (S_IWGRP | S_IWOTH))) return false;
  if (info.st_uid != geteuid() && info.st_uid != 0) return false;
  found->device = info.st_dev;
  found->inode = info.st_ino;
  return move(&no_faults, fd, false, 0, page, sizeof page) == 0 &&
         kvs_file_epoch_read(page, &found->epoch) == KVS_FILE_GOOD;
}

/* If it cannot be mapped, each look is by name. */
static void map_file(int fd, struct kvs_file_epoch_place *found) {
  char *pages = mmap(NULL, NBYTES, PROT_READ, MAP_SHARED, fd, 0);
  if (pages != MAP_FAILED) found->mark = (const atomic_uint *)(const void *)(pages + MARK_AT);
}

static bool is_mapped(const struct kvs_file_epoch_place *known, uint64_t device, uint64_t inode) {
  return known->mark && known->device == device && known->inode == inode;
}

/* Whether the file could be opened if this process had descriptors: it is not the mapped one, and not missing. */
static bool is_another(const struct kvs_file_epoch_place *known) {
  struct stat info;
  if (fstatat(known->folder, file_name, &info, AT_SYMLINK_NOFOLLOW)) return errno != ENOENT && !known->mark;
  return !is_mapped(known, info.st_dev, info.st_ino);
}

bool kvs_file_epoch_look(const struct kvs_file_epoch_place *known, struct kvs_file_epoch_place *found) {
  int fd, code = kvs_file_openat(&no_faults, known->folder, file_name, O_RDONLY, &fd);
  *found = (struct kvs_file_epoch_place){.folder = known->folder};
  if (code && !is_another(known)) return false;
  bool good = !code && read_file(fd, found);
  bool same = good && kvs_file_epoch_is(&found->epoch, &known->epoch);
  if (same && is_mapped(known, found->device, found->inode)) {
    close(fd);
    return false;
  }
  if (good) map_file(fd, found);
  if (!good) found->epoch = unknown;
  if (!code) close(fd);
  return found->mark || known->mark || !kvs_file_epoch_is(&found->epoch, &known->epoch);
}

/* -- writing ------------------------------------------------------------------------------------------------------- */

static bool has_name(int folder, int fd) {
  struct stat own, there;
  return fstat(fd, &own) == 0 && fstatat(folder, next_name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
         own.st_dev == there.st_dev && own.st_ino == there.st_ino;
}

static void unlock(int fd) {
  (void)flock(fd, LOCK_UN); /* a forked child may have the descriptor too */
  close(fd);
}

struct locking {
  struct kvs_file_faults *faults;
  int folder, fd, code;
};

static int try_lock(void *arg, struct kvs_error *err) {
  struct locking *locking = arg;
  (void)err;
  locking->code = kvs_file_openat(locking->faults, locking->folder, next_name, O_RDWR | O_CREAT, &locking->fd);
  if (locking->code) return KVS_OK;
  locking->code = flock(locking->fd, LOCK_EX | LOCK_NB) ? errno : 0;
  if (!locking->code && has_name(locking->folder, locking->fd)) return KVS_OK;
  close(locking->fd);
  return locking->code && locking->code != EWOULDBLOCK ? KVS_OK : KVS_NOT_READY; /* it was renamed before the lock */
}

static int lock_next(struct kvs_file_faults *faults, int folder, int64_t timeout_ns, int *fd) {
  struct locking locking = {.faults = faults, .folder = folder, .fd = -1};
  struct kvs_error ignored;
  if (kvs_wait_until(try_lock, &locking, false, timeout_ns, &ignored)) return EBUSY;
  *fd = locking.fd;
  return locking.code;
}

static int write_next(struct kvs_file_faults *faults, int fd, const struct kvs_file_epoch *epoch, bool safe) {
  uint8_t pages[NBYTES] = {0};
  kvs_file_epoch_write(epoch, pages);
  int code = move(faults, fd, true, 0, pages, sizeof pages);
  return code || !safe ? code : kvs_file_sync(faults, fd);
}

/* A name that is no file has no readers. */
static int set_mark(struct kvs_file_faults *faults, int folder, uint32_t mark) {
  int fd, code = kvs_file_openat(faults, folder, file_name, O_RDWR, &fd);
  if (code) return code == ENOENT || code == KVS_FILE_NOT_REGULAR ? 0 : code;
  code = move(faults, fd, true, MARK_AT, &mark, sizeof mark);
  close(fd);
  return code;
}

/* Reserve the space of the next file. Without it, a full disk may refuse the next epoch. */
static void make_spare(int folder) {
  uint8_t pages[NBYTES] = {0};
  int fd;
  if (kvs_file_openat(&no_faults, folder, next_name, O_RDWR | O_CREAT | O_EXCL, &fd)) return;
  (void)move(&no_faults, fd, true, 0, pages, sizeof pages);
  close(fd);
}

/* After the rename the lock is no longer this process's: the new spare has it. */
static int take_name(struct kvs_file_faults *faults, int folder, bool safe) {
  make_spare(folder);
  return safe ? kvs_file_sync_folder(faults, folder) : 0;
}

static int rename_next(int folder) { return renameat(folder, next_name, folder, file_name) ? errno : 0; }

int kvs_file_epoch_make(int folder, const struct kvs_file_epoch *epoch, bool safe, int64_t timeout_ns) {
  struct stat info;
  int fd, code = lock_next(&no_faults, folder, timeout_ns, &fd);
  if (code) return code;
  if (fstatat(folder, file_name, &info, AT_SYMLINK_NOFOLLOW)) {
    code = write_next(&no_faults, fd, epoch, safe);
    if (!code) code = rename_next(folder);
    if (!code) code = take_name(&no_faults, folder, safe);
  }
  unlock(fd);
  return code;
}

void kvs_file_epoch_reserve(int folder) {
  uint8_t pages[NBYTES] = {0};
  struct stat info;
  int fd;
  if (lock_next(&no_faults, folder, 0, &fd)) return;
  if (fstat(fd, &info) == 0 && info.st_size < NBYTES) (void)move(&no_faults, fd, true, 0, pages, sizeof pages);
  unlock(fd);
}

int kvs_file_epoch_unmark(int folder) {
  int fd, code = lock_next(&no_faults, folder, 0, &fd);
  if (code) return code;
  code = set_mark(&no_faults, folder, 0);
  unlock(fd);
  return code;
}

int kvs_file_epoch_renew(struct kvs_file_faults *faults, int folder, int64_t timeout_ns) {
  struct kvs_file_epoch epoch;
  if (getrandom(epoch.bytes, sizeof epoch.bytes, 0) != (ssize_t)sizeof epoch.bytes) return errno;
  int fd, code = lock_next(faults, folder, timeout_ns, &fd);
  if (code) return code;
  code = write_next(faults, fd, &epoch, true);
  if (!code) code = set_mark(faults, folder, 1);
  if (!code) {
    code = rename_next(folder);
    if (code) (void)set_mark(&no_faults, folder, 0);
  }
  if (!code) code = take_name(faults, folder, true);
  unlock(fd);
  return code;
}
