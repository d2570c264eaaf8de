/* The ring is written by one process and read by many. A reader copies an entry and then looks whether the writer can
 * have begun to write its place again. Both use pread and pwrite on the page cache: memory that is mapped from a file
 * would be a bus error in the engine as soon as another process truncates the file. */
#include "files/notices.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static const char file_name[] = "notices.kvs";
static const char magic[8] = {'K', 'V', 'S', 'N', 'O', 'T', 'E', 'S'};
enum { AHEAD = 64 }; /* entries that `begun` is ahead: it is written once for so many */

struct head {
  char magic[8];
  uint32_t version, entries;
  uint64_t epoch; /* of this opening; a reader that finds another one reads the blocks' headers */
  uint64_t begun; /* entries whose writing may have begun */
  uint64_t count; /* entries that can be read */
};
_Static_assert(sizeof(struct head) == 40, "the format");
_Static_assert(sizeof(struct kvs_file_notice) == 524, "the format");
static const off_t FILE_NBYTES = sizeof(struct head) + KVS_FILE_NOTICES * sizeof(struct kvs_file_notice);

static off_t place_of(uint64_t number) {
  return (off_t)(sizeof(struct head) + number % KVS_FILE_NOTICES * sizeof(struct kvs_file_notice));
}

static bool put(int fd, const void *from, size_t nbytes, off_t at) {
  ssize_t n;
  do n = pwrite(fd, from, nbytes, at);
  while (n < 0 && errno == EINTR);
  atomic_thread_fence(memory_order_seq_cst);
  return n == (ssize_t)nbytes;
}

static bool get(int fd, void *to, size_t nbytes, off_t at) {
  ssize_t n;
  do n = pread(fd, to, nbytes, at);
  while (n < 0 && errno == EINTR);
  atomic_thread_fence(memory_order_seq_cst);
  return n == (ssize_t)nbytes;
}

static bool is_head(const struct head *head) {
  return memcmp(head->magic, magic, sizeof magic) == 0 && head->version == KVS_FILE_VERSION &&
         head->entries == KVS_FILE_NOTICES;
}

/* -- the writer ---------------------------------------------------------------------------------------------------- */

/* Under a new epoch readers read the headers. */
static bool begin_epoch(struct kvs_file_notices *notices) {
  struct head head = {.version = KVS_FILE_VERSION, .entries = KVS_FILE_NOTICES, .begun = AHEAD};
  memcpy(head.magic, magic, sizeof magic);
  while (!head.epoch && getrandom(&head.epoch, sizeof head.epoch, 0) == (ssize_t)sizeof head.epoch) continue;
  notices->epoch = head.epoch;
  notices->begun = AHEAD;
  notices->seen = 0;
  notices->lost = !put(notices->fd, &head, sizeof head, 0);
  return !notices->lost;
}

int kvs_file_notices_make(struct kvs_file_faults *faults, int folder, struct kvs_file_notices *notices) {
  int code = kvs_file_openat(faults, folder, file_name, O_RDWR | O_CREAT, &notices->fd);
  if (code) return code;
  code = kvs_file_reserve(faults, notices->fd, (uint64_t)FILE_NBYTES);
  if (!code && !begin_epoch(notices)) code = errno ? errno : EIO;
  if (code) kvs_file_notices_close(notices);
  return code;
}

bool kvs_file_notices_are_whole(int folder, const struct kvs_file_notices *notices) {
  struct stat own, named;
  struct head head;
  if (fstat(notices->fd, &own) || fstatat(folder, file_name, &named, AT_SYMLINK_NOFOLLOW)) return false;
  return own.st_ino == named.st_ino && own.st_size >= FILE_NBYTES && get(notices->fd, &head, sizeof head, 0) &&
         is_head(&head);
}

void kvs_file_notices_publish(struct kvs_file_notices *notices, const struct kvs_file_notice *notice) {
  if (notices->lost && !begin_epoch(notices)) return;
  const uint64_t number = notices->seen, count = number + 1;
  if (count > notices->begun) {
    notices->begun = number + AHEAD;
    notices->lost |= !put(notices->fd, &notices->begun, sizeof notices->begun, offsetof(struct head, begun));
  }
  const size_t nbytes = offsetof(struct kvs_file_notice, key) + notice->key_nbytes;
  notices->lost |= !put(notices->fd, notice, nbytes, place_of(number));
  notices->lost |= !put(notices->fd, &count, sizeof count, offsetof(struct head, count));
  notices->seen = count;
}

/* -- readers ------------------------------------------------------------------------------------------------------- */

int kvs_file_notices_open(struct kvs_file_faults *faults, int folder, struct kvs_file_notices *notices) {
  struct stat info;
  struct head head;
  int code = kvs_file_openat(faults, folder, file_name, O_RDONLY, &notices->fd);
  if (code) return code;
  bool whole = fstat(notices->fd, &info) == 0 && info.st_size >= FILE_NBYTES && info.st_uid == geteuid() &&
               !(info.st_mode & (S_IWGRP | S_IWOTH));
  if (whole && get(notices->fd, &head, sizeof head, 0) && is_head(&head)) return 0;
  kvs_file_notices_close(notices);
  return KVS_FILE_ENDED;
}

void kvs_file_notices_close(struct kvs_file_notices *notices) {
  if (notices->fd >= 0) close(notices->fd);
  notices->fd = -1;
}

void kvs_file_notices_skip(struct kvs_file_notices *notices) {
  struct head head = {.epoch = 0};
  if (notices->fd < 0 || !get(notices->fd, &head, sizeof head, 0)) return;
  notices->epoch = head.epoch;
  notices->seen = head.count;
}

enum kvs_file_noticed kvs_file_notices_next(const struct kvs_file_notices *notices, struct kvs_file_notice *notice) {
  struct head head;
  if (notices->fd < 0 || !get(notices->fd, &head, sizeof head, 0) || !is_head(&head)) return KVS_FILE_UNHEARD;
  if (head.epoch != notices->epoch || head.count < notices->seen) return KVS_FILE_BEHIND;
  if (head.count == notices->seen) return KVS_FILE_NOTHING_NEW;
  if (head.count - notices->seen > KVS_FILE_NOTICES) return KVS_FILE_BEHIND;
  if (!get(notices->fd, notice, sizeof *notice, place_of(notices->seen))) return KVS_FILE_UNHEARD;
  if (!get(notices->fd, &head, sizeof head, 0)) return KVS_FILE_UNHEARD;
  bool torn = head.begun - notices->seen > KVS_FILE_NOTICES, same = head.epoch == notices->epoch;
  bool good = notice->key_nbytes >= 1 && notice->key_nbytes <= KVS_FILE_KEY_NBYTES;
  return torn || !same || !good ? KVS_FILE_BEHIND : KVS_FILE_NOTICE;
}
