/* The ring is written by one process and read by many. A reader copies an entry and then looks whether the writer can
 * have begun to write its place again. */
#include "files/notices.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static const char file_name[] = "notices.kvs";
static const char magic[8] = {'K', 'V', 'S', 'N', 'O', 'T', 'E', 'S'};

struct notices_page {
  char magic[8];
  uint32_t version, entries;
  atomic_uint_fast64_t epoch; /* 0: being set up */
  atomic_uint_fast64_t begun; /* entries whose writing has begun */
  atomic_uint_fast64_t count; /* entries that can be read */
  struct kvs_file_notice ring[KVS_FILE_NOTICES];
};
_Static_assert(sizeof(atomic_uint_fast64_t) == 8, "shared between processes");

static int map(int fd, int protection, struct kvs_file_notices *notices) {
  void *page = mmap(NULL, sizeof(struct notices_page), protection, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return errno;
  notices->page = page;
  return 0;
}

/* The space is reserved: a write to a page that the disk has no room for would be a bus error. */
int kvs_file_notices_make(struct kvs_file_faults *faults, int folder, struct kvs_file_notices *notices) {
  int fd;
  uint64_t epoch = 0;
  int code = kvs_file_openat(faults, folder, file_name, O_RDWR | O_CREAT, &fd);
  if (code) return code;
  code = kvs_file_allocate(faults, fd, sizeof(struct notices_page));
  if (!code) code = map(fd, PROT_READ | PROT_WRITE, notices);
  close(fd);
  if (code) return code;
  struct notices_page *page = notices->page;
  atomic_store(&page->epoch, 0);
  atomic_store(&page->begun, 0);
  atomic_store(&page->count, 0);
  memcpy(page->magic, magic, sizeof magic);
  page->version = KVS_FILE_VERSION;
  page->entries = KVS_FILE_NOTICES;
  while (!epoch && getrandom(&epoch, sizeof epoch, 0) == (ssize_t)sizeof epoch) continue;
  atomic_store(&page->epoch, epoch ? epoch : 1);
  return 0;
}

int kvs_file_notices_map(struct kvs_file_faults *faults, int folder, struct kvs_file_notices *notices) {
  struct stat info;
  int fd, code = kvs_file_openat(faults, folder, file_name, O_RDONLY, &fd);
  if (code) return code;
  bool whole = fstat(fd, &info) == 0 && info.st_size >= (off_t)sizeof(struct notices_page) &&
               info.st_uid == geteuid() && !(info.st_mode & (S_IWGRP | S_IWOTH));
  code = whole ? map(fd, PROT_READ, notices) : KVS_FILE_ENDED;
  close(fd);
  if (code) return code;
  const struct notices_page *page = notices->page;
  if (memcmp(page->magic, magic, sizeof magic) == 0 && page->version == KVS_FILE_VERSION &&
      page->entries == KVS_FILE_NOTICES)
    return 0;
  kvs_file_notices_unmap(notices);
  return KVS_FILE_ENDED;
}

void kvs_file_notices_unmap(struct kvs_file_notices *notices) {
  if (notices->page) munmap(notices->page, sizeof(struct notices_page));
  notices->page = NULL;
}

void kvs_file_notices_publish(struct kvs_file_notices *notices, const struct kvs_file_notice *notice) {
  struct notices_page *page = notices->page;
  uint64_t number = atomic_load_explicit(&page->count, memory_order_relaxed);
  atomic_store(&page->begun, number + 1);
  atomic_thread_fence(memory_order_seq_cst);
  struct kvs_file_notice *entry = &page->ring[number % KVS_FILE_NOTICES];
  entry->segment = notice->segment;
  entry->slot = notice->slot;
  entry->gone = notice->gone;
  entry->key_nbytes = notice->key_nbytes;
  memcpy(entry->key, notice->key, notice->key_nbytes);
  atomic_store(&page->count, number + 1);
}

void kvs_file_notices_skip(struct kvs_file_notices *notices) {
  notices->epoch = atomic_load(&notices->page->epoch);
  notices->seen = atomic_load(&notices->page->count);
}

enum kvs_file_noticed kvs_file_notices_next(const struct kvs_file_notices *notices, struct kvs_file_notice *notice) {
  struct notices_page *page = notices->page;
  uint64_t count = atomic_load(&page->count);
  if (atomic_load(&page->epoch) != notices->epoch || count < notices->seen) return KVS_FILE_BEHIND;
  if (count == notices->seen) return KVS_FILE_NOTHING_NEW;
  if (count - notices->seen > KVS_FILE_NOTICES) return KVS_FILE_BEHIND;
  *notice = page->ring[notices->seen % KVS_FILE_NOTICES];
  atomic_thread_fence(memory_order_seq_cst);
  bool torn = atomic_load(&page->begun) - notices->seen > KVS_FILE_NOTICES;
  bool same = atomic_load(&page->epoch) == notices->epoch;
  bool good = notice->key_nbytes >= 1 && notice->key_nbytes <= KVS_FILE_KEY_NBYTES;
  return torn || !same || !good ? KVS_FILE_BEHIND : KVS_FILE_NOTICE;
}
