/* Buffers that an engine keeps for reuse. For the core's own files only. */
#ifndef KVS_BUFFERS_H
#define KVS_BUFFERS_H

#include "lanes/state.h"

/* Staging: pinned memory with a device mirror, for descriptors that queued kernels read. Kept by size class, so the
 * steady state allocates nothing. */
struct kvs_staging {
  uint64_t host;   /* pinned: the CPU writes here */
  uint64_t device; /* device memory of the same size, or 0 */
  size_t nbytes;
  struct kvs_staging *next;
};
int kvs_engine_staging_get(struct kvs_engine *engine, size_t nbytes, struct kvs_staging **staging,
                           struct kvs_error *err);
void kvs_engine_staging_put(struct kvs_engine *engine, struct kvs_staging *staging); /* once no queued work reads it */

/* Events without timing, kept for reuse. Put takes any event without timing. */
int kvs_engine_event_get(struct kvs_engine *, kvs_event *, struct kvs_error *);
void kvs_engine_event_put(struct kvs_engine *, kvs_event);

int kvs_scratch_reserve_ids(struct kvs_scratch *, size_t count, struct kvs_error *); /* old contents are dropped */
struct kvs_scratch *kvs_scratch_get(struct kvs_engine *, struct kvs_error *);
void kvs_scratch_put(struct kvs_engine *, struct kvs_scratch *);
/* Mark the end of layer `index` at the current end of the lists; rows: of the rows alone, else of copies and rects. */
int kvs_scratch_mark(struct kvs_scratch *, size_t index, bool rows, struct kvs_error *);

/* Room for a move of so many pairs of pools, parts and blocks; old contents are dropped. */
int kvs_move_make_room(struct kvs_scratch *, size_t pairs, size_t parts, size_t blocks, struct kvs_error *);

void kvs_buffers_destroy(struct kvs_engine *);

#endif
