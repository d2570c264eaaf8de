/* The struct behind an offload map: offload.c opens it, offload_job.c submits to it. For the core's own files only.
 *
 * All constants are computed when a map is opened. Parts with the same addressing form a copy group: a list of struct
 * kvs_tensor with one pair of slot lists, the input of the planner. (Cache groups, "groups" for short, are the caller's
 * groups of layers.) On the GPU a slot is a block. On the host a slot is a unit of which the distances of chunks, and
 * of blocks in a chunk, are multiples: block j of chunk c is slot c * chunk_slots + j * page_slots, whatever padding is
 * between chunks. If that would need too many slots, a copy group holds only block j of each chunk. A job is one
 * transfer a copy group.
 *
 * Hazards and failures use another number for a host block, chunk * factor + j, in one table for all tensors; GPU
 * blocks have one table as well. The model writes GPU blocks without kvswap's knowledge, so failures are recorded for
 * host blocks only. Each group has its own failures; groups that share tensors share them. */
#ifndef KVS_OFFLOAD_H
#define KVS_OFFLOAD_H

#include "lanes/peer.h"
#include "lanes/state.h"

struct kvs_copy_group {
  struct kvs_tensor *tensors;
  uint32_t *sources; /* an entry: the index of its tensor in the layout */
  size_t ntensors, group;
  uint64_t chunk_slots, page_slots;
  uint64_t only; /* only this block of each chunk; UINT64_MAX: all blocks */
  uint64_t writers, writer;
};

struct kvs_offload {
  atomic_uint refs; /* one while open, one a transfer */
  struct kvs_engine *engine;
  struct kvs_table *gpu, *cpu;
  uint64_t chunks, factor;
  uint64_t *gpu_blocks; /* a group: blocks that all its tensors have */
  bool *shares;         /* a group: one of its tensors is in another group too */
  size_t ngroups;
  struct kvs_copy_group *copy_groups;
  size_t ncopy_groups;
  /* Indexed by group and host block, from kvs_offload_failures(group) on; no items: none is recorded. Guarded by
   * engine->hazard_lock. */
  struct kvs_failures failures;
  void *owner;
  void (*release)(void *);
  struct kvs_failure *unfinished;  /* failure of blocks whose store is not queued completely */
  struct kvs_foreign_list foreign; /* guarded by engine->hazard_lock: transfers of other devices, since opening */
  /* Guarded by engine->hazard_lock: lists of the job being submitted. */
  int64_t *group_sizes, *block_indices; /* one entry a group */
  int64_t *room;
  size_t capacity;
};

/* offload.c */
void kvs_offload_drop(void *map);                                         /* one reference */
size_t kvs_offload_failures(const struct kvs_offload *map, size_t group); /* the group's first index in map->failures */

#endif
