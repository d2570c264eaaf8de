/* What memory.c and ipc.c know of each other: allocations of other processes that are open here. For the core's own
 * files only. */
#ifndef KVS_IMPORTS_H
#define KVS_IMPORTS_H

#include "core/core.h"

void kvs_imports_destroy(struct kvs_engine *);

/* memory.c: into the engine's table of regions, of which the driver says the size (nbytes 0) or it is known; and out of
 * it if no transfer can use it any more (KVS_TIMEOUT: it stays). */
int kvs_memory_add(struct kvs_engine *, uint64_t ptr, uint64_t nbytes, enum kvs_origin, struct kvs_error *);
int kvs_memory_retire(struct kvs_engine *, uint64_t ptr, enum kvs_origin, struct kvs_region *, struct kvs_error *);

#endif
