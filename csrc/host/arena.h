/* The file without a name behind the device memory of a host device, so that other processes can be given it. */
#ifndef KVS_HOST_ARENA_H
#define KVS_HOST_ARENA_H

#include <pthread.h>

#include "device/share.h"

#define KVS_HOST_PRIVATE UINT64_MAX /* in place of an offset: these pages lie in no file */

struct kvs_host_arena {
  pthread_mutex_t lock;
  int fd;         /* guarded by lock; -1: not made yet, or there is none */
  bool refused;   /* guarded by lock: this system makes no such files */
  uint64_t inode; /* guarded by lock: `fd` may have been closed behind our back, and be another file by now */
  uint64_t begin; /* guarded by lock: offsets before it lay in such a file */
  uint64_t used;  /* guarded by lock: offsets are given once */
};

int kvs_host_arena_init(struct kvs_host_arena *arena, struct kvs_error *err);
void kvs_host_arena_destroy(struct kvs_host_arena *arena); /* what is mapped stays so */

/* Pages for nbytes (whole pages), with one more behind them that nothing may touch. *offset: where they lie in the
 * file, or KVS_HOST_PRIVATE. NULL: there are none to be had. */
void *kvs_host_arena_map(struct kvs_host_arena *arena, size_t nbytes, uint64_t *offset);
void kvs_host_arena_unmap(struct kvs_host_arena *arena, void *pages, size_t nbytes, uint64_t offset);

/* A handle of pages, of which the first `nbytes` bytes count, with an id that is not used again. */
int kvs_host_arena_share(struct kvs_host_arena *arena, uint64_t offset, uint64_t nbytes, uint64_t id,
                         struct kvs_handle *handle, struct kvs_error *err);
/* Map what a handle stands for, as kvs_host_arena_map() does; *nbytes: the bytes that count. `operation` is for errors.
 */
int kvs_host_arena_open(const struct kvs_handle *handle, const char *operation, void **pages, uint64_t *nbytes,
                        struct kvs_error *err);
void kvs_host_arena_close(void *pages, uint64_t nbytes);

#endif
