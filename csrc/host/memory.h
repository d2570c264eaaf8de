/* The memory of a host device: what was allocated and registered, and what of the rest is mapped. */
#ifndef KVS_HOST_MEMORY_H
#define KVS_HOST_MEMORY_H

#include <pthread.h>

#include "device/device.h"
#include "host/arena.h"

struct kvs_host_memory {
  pthread_rwlock_t lock;
  struct kvs_regions known; /* guarded by lock: allocations and registrations, by the bytes asked for */
  /* Guarded by lock: allocations and what was imported, by the pages that were mapped for them; `alias` is where those
   * lie in the arena's file. */
  struct kvs_regions owned;
  struct kvs_host_arena arena;
  struct kvs_regions
      chunks; /* guarded by lock: mapped in ranges; `device` is the descriptor of each, `buffer_id` its inode */
  uint64_t next_buffer_id; /* guarded by lock */
  uint64_t device_nbytes;  /* guarded by lock: allocated as device memory */
  uint64_t limit;          /* bytes of device memory there are */
  int ordinal;
  /* Devices of one process see each other's memory, but for deterministic ones. */
  bool listed;
  struct kvs_host_memory *next;           /* guarded by the list's lock */
  atomic_uint_fast64_t unreachable_peers; /* 1 << ordinal: no kernel of this device reaches that one's memory */
};

int kvs_host_memory_init(struct kvs_host_memory *memory, int ordinal, uint64_t limit, struct kvs_error *err);
void kvs_host_memory_list(struct kvs_host_memory *memory); /* from now on other devices see it, and it them */
bool kvs_host_memory_reaches(const struct kvs_host_memory *memory, const struct kvs_region *region);
void kvs_host_memory_destroy(struct kvs_host_memory *memory); /* unmaps what is still allocated */

/* `kind` is KVS_MEMORY_DEVICE or KVS_MEMORY_PINNED. Freeing needs the kind that it was allocated with. */
int kvs_host_memory_alloc(struct kvs_host_memory *memory, enum kvs_memory kind, size_t nbytes, uint64_t *ptr,
                          struct kvs_error *err);
int kvs_host_memory_free(struct kvs_host_memory *memory, enum kvs_memory kind, uint64_t ptr, struct kvs_error *err);
int kvs_host_memory_register(struct kvs_host_memory *memory, uint64_t ptr, size_t nbytes, struct kvs_error *err);
int kvs_host_memory_unregister(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_error *err);
/* To and from other processes: share.h. */
int kvs_host_memory_share(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_handle *handle,
                          struct kvs_error *err);
int kvs_host_memory_open(struct kvs_host_memory *memory, const struct kvs_handle *handle, uint64_t nbytes,
                         uint64_t *ptr, struct kvs_error *err);
int kvs_host_memory_close(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_error *err);
/* Ranges of chunks: share.h. */
int kvs_host_range_reserve(struct kvs_host_memory *memory, uint64_t nbytes, uint64_t *ptr, struct kvs_error *err);
int kvs_host_range_free(struct kvs_host_memory *memory, uint64_t ptr, uint64_t nbytes, struct kvs_error *err);
int kvs_host_chunk_map(struct kvs_host_memory *memory, uint64_t at, uint64_t nbytes, int fd, struct kvs_error *err);
int kvs_host_chunk_unmap(struct kvs_host_memory *memory, uint64_t at, uint64_t nbytes, struct kvs_error *err);
int kvs_host_chunk_query(struct kvs_host_memory *memory, uint64_t address, uint64_t *base, uint64_t *nbytes,
                         struct kvs_error *err);
int kvs_host_chunk_share(struct kvs_host_memory *memory, uint64_t address, int *fd, struct kvs_error *err);
void kvs_host_chunks_destroy(struct kvs_host_memory *memory);
int kvs_host_memory_query(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_region *region,
                          struct kvs_error *err);

/* A look at memory for the length of one call: remembers the regions it met, so that a list over a few tensors costs a
 * few look-ups and not one an entry. One thread. Zero-initialise all but `memory`. */
struct kvs_host_view {
  struct kvs_host_memory *memory;
  bool kernel; /* looks as a kernel, to which not all that is mapped is in reach */
  struct kvs_regions met;
  struct kvs_region last[2]; /* the region met last as source, as destination */
};

enum kvs_host_use {
  KVS_HOST_READ,
  KVS_HOST_WRITE,
};

/* Why a range cannot be used, or NULL if it can. `seams`: as a driver's copy sees it, which must stay within one region
 * that has seams; else as a kernel sees it, which may go wherever memory is. */
const char *kvs_host_view_refuse(struct kvs_host_view *view, enum kvs_host_use use, uint64_t address, uint64_t nbytes,
                                 bool seams);
void kvs_host_view_clear(struct kvs_host_view *view);

#endif
