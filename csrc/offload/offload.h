/* The struct behind an offloading map, which offload.c opens and offload_job.c submits to. For the core's own files
 * only.
 *
 * What never changes is worked out when a map is opened. Parts that can be addressed alike form a sheet: a list of
 * struct kvs_tensor that share one pair of slot lists, which is what the planner knows how to move. On the GPU a slot
 * is a block. On the host it counts in units of which the distance of chunks and that of a chunk's blocks are
 * multiples, so that block j of chunk c is slot c * chunk_slots + j * page_slots whatever padding lies between chunks;
 * where such slots would be too many, a sheet holds block j of each chunk alone. A job is a transfer a sheet.
 *
 * For order and failures a host block has another number, chunk * factor + j, in one table for all tensors; GPU blocks
 * have one table as well. What the GPU's blocks hold is the model's business, which writes them unseen, so failures are
 * remembered on the host's side only; a group's are its own, but groups that share tensors have theirs together. */
#ifndef KVS_OFFLOAD_H
#define KVS_OFFLOAD_H

#include "core/core.h"
#include "core/peer.h"

struct kvs_sheet {
  struct kvs_tensor *tensors;
  size_t ntensors, group;
  uint64_t chunk_slots, page_slots;
  uint64_t only; /* block of each chunk, UINT64_MAX: all */
  uint64_t writers, writer;
};

struct kvs_offload {
  atomic_uint refs; /* 1 while open, 1 a transfer */
  struct kvs_engine *engine;
  struct kvs_table *gpu, *cpu;
  uint64_t chunks, factor;
  uint64_t *gpu_blocks; /* a group: blocks that all its tensors have */
  bool *shares;         /* a group: a tensor of it is another group's too */
  size_t ngroups;
  struct kvs_sheet *sheets;
  size_t nsheets;
  /* A group, a host block: from kvs_offload_failures() on; NULL where none are remembered. Guarded by
   * engine->hazard_lock. */
  struct kvs_failure **failures;
  size_t nfailures;
  void *owner;
  void (*release)(void *);
  struct kvs_failure *unfinished;  /* of a block whose store is not queued in whole */
  struct kvs_foreign_list foreign; /* guarded by engine->hazard_lock: of other devices, since it was opened */
  /* Guarded by engine->hazard_lock: of the job that is being submitted. */
  int64_t *group_sizes, *block_indices; /* a group */
  int64_t *room;
  size_t capacity;
};

/* offload.c */
void kvs_offload_drop(void *map);                                         /* one reference */
size_t kvs_offload_failures(const struct kvs_offload *map, size_t group); /* where a group's begin in map->failures */
void kvs_offload_forget(struct kvs_offload *map, size_t place);           /* the failure there, if there is one */

#endif
