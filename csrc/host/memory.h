/* Memory of a host device: allocations, registrations, and queries of other mapped memory. */
#ifndef KVS_HOST_MEMORY_H
#define KVS_HOST_MEMORY_H

#include <pthread.h>

#include "device/device.h"
#include "host/arena.h"

struct kvs_host_memory {
  pthread_rwlock_t lock;
  struct kvs_regions known; /* guarded by lock: allocations and registrations, with the requested size */
  /* Guarded by lock: allocations and imports, with all mapped pages; `alias` is the offset in the arena's file. */
  struct kvs_regions owned;
  struct kvs_host_arena arena;
  struct kvs_regions
      chunks; /* guarded by lock: chunks mapped in ranges; `device` is the descriptor, `buffer_id` the inode */
  uint64_t next_buffer_id; /* guarded by lock */
  uint64_t device_nbytes;  /* guarded by lock: allocated as device memory */
  uint64_t limit;          /* capacity of the device memory */
  int ordinal;
  /* Devices of one process can access each other's memory, except deterministic ones. */
  bool listed;
  struct kvs_host_memory *next;           /* guarded by the list's lock */
  atomic_uint_fast64_t unreachable_peers; /* bit per ordinal: memory that kernels of this device cannot access */
};

int kvs_host_memory_init(struct kvs_host_memory *memory, int ordinal, uint64_t limit, struct kvs_error *err);
void kvs_host_memory_list(struct kvs_host_memory *memory); /* make visible to other devices, and theirs here */
bool kvs_host_memory_reaches(const struct kvs_host_memory *memory, const struct kvs_region *region);
void kvs_host_memory_destroy(struct kvs_host_memory *memory); /* unmaps remaining allocations */

/* `kind` is KVS_MEMORY_DEVICE or KVS_MEMORY_PINNED. Free with the same kind. */
int kvs_host_memory_alloc(struct kvs_host_memory *memory, enum kvs_memory kind, size_t nbytes, uint64_t *ptr,
                          struct kvs_error *err);
int kvs_host_memory_free(struct kvs_host_memory *memory, enum kvs_memory kind, uint64_t ptr, struct kvs_error *err);
int kvs_host_memory_register(struct kvs_host_memory *memory, uint64_t ptr, size_t nbytes, struct kvs_error *err);
int kvs_host_memory_unregister(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_error *err);
/* Sharing with other processes: see share.h. */
int kvs_host_memory_share(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_handle *handle,
                          struct kvs_error *err);
int kvs_host_memory_open(struct kvs_host_memory *memory, const struct kvs_handle *handle, uint64_t nbytes,
                         uint64_t *ptr, struct kvs_error *err);
int kvs_host_memory_close(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_error *err);
int kvs_host_memory_query(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_region *region,
                          struct kvs_error *err);

/* A view of memory during one call. Caches the regions found, so that a list over a few tensors costs a few look-ups
 * instead of one an entry. Used by one thread. Zero-initialise all but `memory`. */
struct kvs_host_view {
  struct kvs_host_memory *memory;
  bool kernel; /* check as for a kernel, which cannot access all mapped memory */
  struct kvs_regions met;
  struct kvs_region last[2]; /* the last region found for sources, for destinations */
};

enum kvs_host_use {
  KVS_HOST_READ,
  KVS_HOST_WRITE,
};

/* Why a range cannot be used, or NULL. `seams`: check as for a driver's copy, which must stay within one region that
 * has seams; otherwise as for a kernel, which may cross regions. */
const char *kvs_host_view_refuse(struct kvs_host_view *view, enum kvs_host_use use, uint64_t address, uint64_t nbytes,
                                 bool seams);
void kvs_host_view_clear(struct kvs_host_view *view);

#endif
