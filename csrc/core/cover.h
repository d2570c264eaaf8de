/* What memory a call touches. For the core's own files only. */
#ifndef KVS_COVER_H
#define KVS_COVER_H

#include "core/core.h"

/* Add to scratch->regions whatever covers [address, address + nbytes); `name`, `index` are for the message.
 */
struct kvs_side {
  const char *name; /* of the argument */
  size_t index;     /* SIZE_MAX: it is no list */
  bool write;
  int want; /* KVS_SIDE_* */
};
enum { KVS_SIDE_ANY, KVS_SIDE_GPU, KVS_SIDE_CPU };
int kvs_memory_cover(struct kvs_engine *, struct kvs_scratch *, uint64_t address, uint64_t nbytes,
                     const struct kvs_side *, struct kvs_error *);

/* Fill scratch->regions with what the call before covered, if its tensors and the memory under them are the same. */
bool kvs_memory_recall(struct kvs_engine *, struct kvs_scratch *, const struct kvs_cache_call *);
void kvs_memory_remember(struct kvs_scratch *, const struct kvs_cache_call *, uint64_t changes);
uint64_t kvs_memory_changes(struct kvs_engine *); /* of what this engine allocated, registered or opened */

#endif
