/* The anonymous file behind a host device's device memory, which allows sharing with other processes. */
#ifndef KVS_HOST_ARENA_H
#define KVS_HOST_ARENA_H

#include <pthread.h>

#include "device/share.h"

#define KVS_HOST_PRIVATE UINT64_MAX /* in place of an offset: the pages are in no file */

struct kvs_host_arena {
  pthread_mutex_t lock;
  int fd;         /* guarded by lock; -1: not made yet, or not available */
  bool refused;   /* guarded by lock: the system does not support such files */
  uint64_t inode; /* guarded by lock: detects that the program has closed `fd` and reused its number */
  uint64_t begin; /* guarded by lock: smaller offsets were in a lost file */
  uint64_t used;  /* guarded by lock: end of the used range; offsets are not reused */
};

int kvs_host_arena_init(struct kvs_host_arena *arena, struct kvs_error *err);
void kvs_host_arena_destroy(struct kvs_host_arena *arena); /* existing mappings stay */

/* Map nbytes (whole pages), followed by a guard page. *offset: position in the file, or KVS_HOST_PRIVATE. NULL: no
 * memory. */
void *kvs_host_arena_map(struct kvs_host_arena *arena, size_t nbytes, uint64_t *offset);
void kvs_host_arena_unmap(struct kvs_host_arena *arena, void *pages, size_t nbytes, uint64_t offset);

/* Make a handle of pages of which the first `nbytes` bytes are data. Its id is not reused. */
int kvs_host_arena_share(struct kvs_host_arena *arena, uint64_t offset, uint64_t nbytes, uint64_t id,
                         struct kvs_handle *handle, struct kvs_error *err);
/* Map the pages of a handle, like kvs_host_arena_map(). *nbytes: bytes of data. `operation` is for error messages. */
int kvs_host_arena_open(const struct kvs_handle *handle, const char *operation, void **pages, uint64_t *nbytes,
                        struct kvs_error *err);
void kvs_host_arena_close(void *pages, uint64_t nbytes);

#endif
