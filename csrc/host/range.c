/* Ranges of chunks on a host device: reserved address ranges into which anonymous files (memfd) are mapped. A range is
 * device memory from its first byte, and usable when completely mapped. */
#include "host/range.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRANULARITY ((uint64_t)65536)

/* The program may have closed the descriptor and reused its number. */
static bool is_ours(const struct kvs_region *chunk) {
  struct stat file;
  return fstat(chunk->device, &file) == 0 && file.st_ino == chunk->buffer_id && file.st_nlink == 0;
}

static void close_ours(const struct kvs_region *chunk) {
  if (is_ours(chunk)) close(chunk->device);
}

static int refuse(const char *operation, const char *why, uint64_t address, struct kvs_error *err) {
  return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, operation, "0x%" PRIx64 " %s", address, why);
}

static int nomem(const char *operation, uint64_t nbytes, struct kvs_error *err) {
  return kvs_fail_driver(err, KVS_NOMEM, KVS_DRIVER_OUT_OF_MEMORY, operation, "%" PRIu64 " bytes are not to be had",
                         nbytes);
}

int kvs_host_range_reserve(struct kvs_host_memory *memory, uint64_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  if (nbytes == 0 || nbytes % GRANULARITY) return refuse("range_reserve", "bytes are no whole granules", nbytes, err);
  if (nbytes > memory->limit) return nomem("range_reserve", nbytes, err);
  void *pages = mmap(NULL, nbytes + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return nomem("range_reserve", nbytes, err);
  uint64_t base = (uint64_t)(uintptr_t)pages;
  struct kvs_region known = {.base = base, .nbytes = nbytes, .alias = base, .memory = KVS_MEMORY_DEVICE, .seam = true};
  struct kvs_region owned = {.base = base, .nbytes = nbytes + page, .alias = KVS_HOST_PRIVATE};
  known.device = memory->ordinal;
  known.writable = true;
  owned.origin = KVS_ORIGIN_REGISTERED; /* such memory cannot be freed by free() or memory_close() */
  pthread_rwlock_wrlock(&memory->lock);
  known.buffer_id = memory->next_buffer_id++;
  int status = kvs_regions_add(&memory->owned, &owned, err);
  if (!status) {
    status = kvs_regions_add(&memory->known, &known, err);
    if (status) kvs_regions_remove(&memory->owned, base, NULL);
  }
  pthread_rwlock_unlock(&memory->lock);
  if (status)
    munmap(pages, nbytes + page);
  else
    *ptr = base;
  return status;
}

int kvs_host_range_free(struct kvs_host_memory *memory, uint64_t ptr, uint64_t nbytes, struct kvs_error *err) {
  struct kvs_region pages;
  pthread_rwlock_wrlock(&memory->lock);
  const struct kvs_region *owned = kvs_regions_find(&memory->owned, ptr);
  const struct kvs_region *chunk = kvs_regions_find(&memory->chunks, ptr);
  if (!chunk) chunk = kvs_regions_after(&memory->chunks, ptr);
  bool empty = !chunk || chunk->base >= ptr + nbytes;
  bool found = owned && owned->base == ptr && owned->origin == KVS_ORIGIN_REGISTERED && owned->nbytes > nbytes && empty;
  if (found) {
    kvs_regions_remove(&memory->known, ptr, NULL);
    kvs_regions_remove(&memory->owned, ptr, &pages);
    munmap((void *)(uintptr_t)pages.base, (size_t)pages.nbytes);
  }
  pthread_rwlock_unlock(&memory->lock);
  return found ? KVS_OK : refuse("range_free", "is no range, or chunks are mapped in it", ptr, err);
}

/* A new descriptor for a file of that size: a duplicate of `given`, or a new file; -1 and the reason. The file is
 * sealed against shrinking: access to a mapped page beyond the end is a SIGBUS. */
static int file_for(int given, uint64_t nbytes, uint64_t *inode, const char **why) {
  struct stat file;
  int fd = given < 0 ? memfd_create("kvswap-chunk", MFD_CLOEXEC | MFD_ALLOW_SEALING) : fcntl(given, F_DUPFD_CLOEXEC, 0);
  *why = strerror(errno);
  if (fd < 0) return -1;
  bool sized = given >= 0 || (ftruncate(fd, (off_t)nbytes) == 0 &&
                              fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK)) {
    *why = "the descriptor is of a file that can be cut off";
    close(fd);
    return -1;
  }
  if (sized && fstat(fd, &file) == 0 && (uint64_t)file.st_size == nbytes) {
    *inode = file.st_ino;
    return fd;
  }
  *why = given < 0 ? "there is no such file to be had" : "the descriptor is of a chunk of another size";
  close(fd);
  return -1;
}

int kvs_host_chunk_map(struct kvs_host_memory *memory, uint64_t at, uint64_t nbytes, int given, struct kvs_error *err) {
  struct kvs_region chunk = {.base = at, .nbytes = nbytes};
  const char *why = "is no place in a range";
  pthread_rwlock_wrlock(&memory->lock);
  const struct kvs_region *range = kvs_regions_find(&memory->known, at);
  const struct kvs_region *owned = kvs_regions_find(&memory->owned, at);
  bool fits = range && owned && owned->origin == KVS_ORIGIN_REGISTERED && nbytes && nbytes % GRANULARITY == 0 &&
              (at - range->base) % GRANULARITY == 0 && nbytes <= range->nbytes - (at - range->base);
  chunk.device = fits ? file_for(given, nbytes, &chunk.buffer_id, &why) : -1;
  int status = chunk.device < 0 ? KVS_REFUSED : kvs_regions_add(&memory->chunks, &chunk, err);
  if (status == KVS_INVALID) why = "has a chunk already", status = KVS_REFUSED;
  if (!status && mmap((void *)(uintptr_t)at, (size_t)nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                      chunk.device, 0) == MAP_FAILED) {
    kvs_regions_remove(&memory->chunks, at, NULL);
    status = KVS_NOMEM;
  }
  pthread_rwlock_unlock(&memory->lock);
  if (status && chunk.device >= 0) close(chunk.device);
  if (status == KVS_NOMEM) return nomem("chunk_map", nbytes, err);
  return status ? refuse("chunk_map", why, at, err) : KVS_OK;
}

int kvs_host_chunk_unmap(struct kvs_host_memory *memory, uint64_t at, uint64_t nbytes, struct kvs_error *err) {
  struct kvs_region chunk;
  pthread_rwlock_wrlock(&memory->lock);
  const struct kvs_region *there = kvs_regions_find(&memory->chunks, at);
  bool found = there && there->base == at && there->nbytes == nbytes && kvs_regions_remove(&memory->chunks, at, &chunk);
  if (found) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    (void)mmap((void *)(uintptr_t)at, (size_t)nbytes, PROT_NONE, flags, -1, 0);
    close_ours(&chunk);
  }
  pthread_rwlock_unlock(&memory->lock);
  return found ? KVS_OK : refuse("chunk_unmap", "is not where a chunk of that size begins", at, err);
}

int kvs_host_chunk_query(struct kvs_host_memory *memory, uint64_t address, uint64_t *base, uint64_t *nbytes,
                         struct kvs_error *err) {
  pthread_rwlock_rdlock(&memory->lock);
  const struct kvs_region *chunk = kvs_regions_find(&memory->chunks, address);
  if (chunk) *base = chunk->base, *nbytes = chunk->nbytes;
  pthread_rwlock_unlock(&memory->lock);
  return chunk ? KVS_OK : refuse("chunk_query", "is in no chunk", address, err);
}

int kvs_host_chunk_share(struct kvs_host_memory *memory, uint64_t address, int *fd, struct kvs_error *err) {
  pthread_rwlock_rdlock(&memory->lock);
  const struct kvs_region *chunk = kvs_regions_find(&memory->chunks, address);
  *fd = chunk && is_ours(chunk) ? fcntl(chunk->device, F_DUPFD_CLOEXEC, 0) : -1;
  pthread_rwlock_unlock(&memory->lock);
  return *fd >= 0
             ? KVS_OK
             : refuse("chunk_share", "is in no chunk, or its file was closed, or there are too many", address, err);
}

/* The ranges are unmapped with the other memory. */
void kvs_host_chunks_destroy(struct kvs_host_memory *memory) {
  for (size_t i = 0; i < memory->chunks.count; i++) close_ours(&memory->chunks.items[i]);
  kvs_regions_clear(&memory->chunks);
}
