/* The memory that an engine knows: its table of regions. */
#ifndef KVS_MEMORY_H
#define KVS_MEMORY_H

#include "lanes/state.h"

void kvs_memory_destroy(struct kvs_engine *);
/* kvs_memory_add() enters a region into the engine's table; nbytes 0: the driver gives the size. kvs_memory_retire()
 * removes one that no transfer can use any more. KVS_TIMEOUT: a transfer still can, and the region stays. `vacating`:
 * NULL, or the memory goes: KVS_OK has begun it (memory/vacate.h), and the caller ends it. */
int kvs_memory_add(struct kvs_engine *, uint64_t ptr, uint64_t nbytes, enum kvs_origin, struct kvs_error *);
struct kvs_vacating;
int kvs_memory_retire(struct kvs_engine *, uint64_t ptr, enum kvs_origin, struct kvs_region *, struct kvs_vacating *,
                      struct kvs_error *);

#endif
