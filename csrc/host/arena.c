/* One anonymous file (memfd) a host device, made on first use and sparse: its holes take no memory. An allocation is a
 * range of the file that is used once and becomes a hole when it is freed.
 *
 * The page before an allocation's pages is its tag: once the allocation is shared, the tag has the same contents as its
 * handle. A handle names the process, its descriptor and the offset. A process opens a handle through /proc/<pid>/fd,
 * which the kernel permits only to processes that may trace the owner, and compares the tag with the handle; a freed
 * allocation has a hole instead of the tag. */
#include "host/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/owner.h"

#define MAGIC "kvsarena"
#define HUGE_PAGE_NBYTES ((size_t)2 << 20)

/* The contents of a handle, and of the tag of a shared allocation. */
struct file_place {
  char magic[8];
  int64_t pid;
  uint64_t start; /* start time of that process */
  int64_t fd;
  uint64_t inode;
  uint64_t offset; /* offset of the first data page */
  uint64_t nbytes;
  uint64_t id;
};
_Static_assert(sizeof(struct file_place) == sizeof(struct kvs_handle), "a handle is a place");

static size_t page_nbytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static size_t whole_pages(uint64_t nbytes) {
  size_t page = page_nbytes();
  return (size_t)(nbytes + page - 1) / page * page;
}

int kvs_host_arena_init(struct kvs_host_arena *arena, struct kvs_error *err) {
  memset(arena, 0, sizeof *arena);
  arena->fd = -1;
  return pthread_mutex_init(&arena->lock, NULL) ? kvs_fail(err, KVS_NOMEM, "cannot make a lock") : KVS_OK;
}

/* A program may close all descriptors and reuse their numbers: such a file must be neither written nor closed. */
static bool is_ours_locked(const struct kvs_host_arena *arena) {
  struct stat file;
  return arena->fd >= 0 && fstat(arena->fd, &file) == 0 && file.st_ino == arena->inode && file.st_nlink == 0;
}

void kvs_host_arena_destroy(struct kvs_host_arena *arena) {
  if (is_ours_locked(arena)) close(arena->fd);
  pthread_mutex_destroy(&arena->lock);
}

/* -- mapping --------------------------------------------------------------------------------------------------- */

/* Under a file size limit, extending the file would end the process with SIGXFSZ. */
static bool limited(void) {
  struct rlimit limit;
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

static bool make_file_locked(struct kvs_host_arena *arena) {
  struct stat file;
  if (is_ours_locked(arena)) return true;
  if (arena->refused) return false;
  arena->fd = limited() ? -1 : memfd_create("kvswap", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  /* Seal the file against shrinking: access to a mapped page beyond the end is a SIGBUS. */
  arena->refused =
      arena->fd < 0 || fcntl(arena->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0 || fstat(arena->fd, &file) != 0;
  if (arena->refused) return false;
  arena->inode = file.st_ino;
  arena->begin = arena->used;
  return true;
}

/* Reserve nbytes and the page before them: a descriptor to map, or -1. */
static int take_room(struct kvs_host_arena *arena, size_t nbytes, uint64_t *offset) {
  size_t page = page_nbytes();
  int fd = -1;
  pthread_mutex_lock(&arena->lock);
  if (make_file_locked(arena) && ftruncate(arena->fd, (off_t)(arena->used + page + nbytes)) == 0) {
    *offset = arena->used + page;
    arena->used += page + nbytes;
    fd = arena->fd;
  }
  pthread_mutex_unlock(&arena->lock);
  return fd;
}

static void *map_guarded(int fd, uint64_t offset, size_t nbytes) {
  char *pages = mmap(NULL, nbytes + page_nbytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return NULL;
  int flags = MAP_FIXED | (fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
  void *mapped = mmap(pages, nbytes, PROT_READ | PROT_WRITE, flags, fd, fd >= 0 ? (off_t)offset : 0);
  if (mapped == MAP_FAILED) {
    munmap(pages, nbytes + page_nbytes());
    return NULL;
  }
  if (nbytes >= HUGE_PAGE_NBYTES) madvise(pages, nbytes, MADV_HUGEPAGE);
  return pages;
}

void *kvs_host_arena_map(struct kvs_host_arena *arena, size_t nbytes, uint64_t *offset) {
  int fd = take_room(arena, nbytes, offset);
  void *pages = fd >= 0 ? map_guarded(fd, *offset, nbytes) : NULL;
  if (pages) return pages;
  *offset = KVS_HOST_PRIVATE;
  return map_guarded(-1, 0, nbytes);
}

void kvs_host_arena_unmap(struct kvs_host_arena *arena, void *pages, size_t nbytes, uint64_t offset) {
  size_t page = page_nbytes();
  munmap(pages, nbytes + page);
  if (offset == KVS_HOST_PRIVATE) return;
  pthread_mutex_lock(&arena->lock);
  int flags = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  if (offset >= arena->begin && is_ours_locked(arena))
    (void)fallocate(arena->fd, flags, (off_t)(offset - page), (off_t)(nbytes + page));
  pthread_mutex_unlock(&arena->lock);
}

/* -- sharing --------------------------------------------------------------------------------------------------- */

static int refuse(const char *operation, int code, const char *why, struct kvs_error *err) {
  return kvs_fail_driver(err, KVS_REFUSED, code, operation, "%s", why);
}

int kvs_host_arena_share(struct kvs_host_arena *arena, uint64_t offset, uint64_t nbytes, uint64_t id,
                         struct kvs_handle *handle, struct kvs_error *err) {
  struct kvs_owner self = kvs_owner_self();
  struct file_place place = {.pid = self.pid, .start = self.start, .offset = offset, .nbytes = nbytes, .id = id};
  if (offset == KVS_HOST_PRIVATE)
    return refuse("memory_share", KVS_DRIVER_NOT_SUPPORTED, "this system has no memory that can be shared (memfd)",
                  err);
  memcpy(place.magic, MAGIC, sizeof place.magic);
  pthread_mutex_lock(&arena->lock);
  place.fd = arena->fd;
  place.inode = arena->inode;
  bool there = offset >= arena->begin && is_ours_locked(arena);
  bool written = there && pwrite(arena->fd, &place, sizeof place, (off_t)(offset - page_nbytes())) == sizeof place;
  pthread_mutex_unlock(&arena->lock);
  if (!written)
    return refuse("memory_share", KVS_DRIVER_INVALID_VALUE,
                  there ? "the file behind the device's memory cannot be written"
                        : "the file behind the device's memory was closed by this program",
                  err);
  memcpy(handle, &place, sizeof place);
  return KVS_OK;
}

/* Open the file that a handle names, after checking that it is the same file and belongs to this user; otherwise -1 and
 * the reason. */
static int open_file(const struct file_place *place, const char **why) {
  struct kvs_owner owner = {place->pid, place->start};
  struct stat file;
  char path[64];
  *why = "the process that shared it has ended";
  if (!kvs_owner_alive(&owner)) return -1;
  snprintf(path, sizeof path, "/proc/%" PRId64 "/fd/%" PRId64, place->pid, place->fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  *why = errno == EACCES || errno == EPERM ? "its process belongs to another user, or lets nobody look at it"
                                           : "its process has closed the memory";
  if (fd < 0) return -1;
  bool found = fstat(fd, &file) == 0 && file.st_ino == place->inode;
  if (found && file.st_uid == geteuid()) return fd;
  if (found) *why = "it belongs to another user";
  close(fd);
  return -1;
}

/* Whether the file contains these bytes and is sealed against shrinking. */
static bool is_sealed(int fd, uint64_t offset, uint64_t nbytes) {
  struct stat file;
  int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, &file) == 0 && offset <= (uint64_t)file.st_size &&
         nbytes <= (uint64_t)file.st_size - offset;
}

int kvs_host_arena_open(const struct kvs_handle *handle, const char *operation, void **pages, uint64_t *nbytes,
                        struct kvs_error *err) {
  struct file_place place, there;
  const char *why;
  size_t page = page_nbytes();
  memcpy(&place, handle, sizeof place);
  if (memcmp(place.magic, MAGIC, sizeof place.magic) != 0)
    return refuse(operation, KVS_DRIVER_INVALID_VALUE, "this is no handle of a host device", err);
  if (place.pid == getpid())
    return refuse(operation, KVS_DRIVER_INVALID_VALUE, "a handle is for other processes than the one that made it",
                  err);
  int fd = open_file(&place, &why);
  if (fd < 0) return refuse(operation, KVS_DRIVER_INVALID_VALUE, why, err);
  bool same = place.offset >= page && pread(fd, &there, sizeof there, (off_t)(place.offset - page)) == sizeof there &&
              memcmp(&there, &place, sizeof there) == 0 && is_sealed(fd, place.offset, place.nbytes);
  *pages = same ? map_guarded(fd, place.offset, whole_pages(place.nbytes)) : NULL;
  close(fd);
  if (!same) return refuse(operation, KVS_DRIVER_INVALID_VALUE, "it has been freed since it was shared", err);
  if (!*pages) return kvs_fail_driver(err, KVS_NOMEM, KVS_DRIVER_OUT_OF_MEMORY, operation, "no room to map it");
  *nbytes = place.nbytes;
  return KVS_OK;
}

void kvs_host_arena_close(void *pages, uint64_t nbytes) { munmap(pages, whole_pages(nbytes) + page_nbytes()); }
