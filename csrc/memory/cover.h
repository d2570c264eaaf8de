/* The memory that a call touches. For the core's own files only. */
#ifndef KVS_COVER_H
#define KVS_COVER_H

#include "lanes/state.h"

/* Add the regions that cover [address, address + nbytes) to scratch->regions. `side` names the argument in messages. */
struct kvs_side {
  const char *name; /* name of the argument */
  size_t index;     /* SIZE_MAX: the argument is no list */
  bool write;
  int want; /* KVS_SIDE_* */
};
enum { KVS_SIDE_ANY, KVS_SIDE_GPU, KVS_SIDE_CPU };
int kvs_memory_cover(struct kvs_engine *, struct kvs_scratch *, uint64_t address, uint64_t nbytes,
                     const struct kvs_side *, struct kvs_error *);

/* Reuse the regions of the previous call, if its tensors and the memory under them are the same. */
bool kvs_memory_recall(struct kvs_engine *, struct kvs_scratch *, const struct kvs_cache_call *);
void kvs_memory_remember(struct kvs_scratch *, const struct kvs_cache_call *, uint64_t changes);
/* Changes to the memory that this engine allocated, registered or opened. */
uint64_t kvs_memory_changes(struct kvs_engine *);

#endif
