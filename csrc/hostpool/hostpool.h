/* Making a host pool, for shared pools too. The rest is public (kvswap_memory.h). */
#ifndef KVS_HOSTPOOL_H
#define KVS_HOSTPOOL_H

#include "hostpool/state.h"

int kvs_host_pool_new(struct kvs_engine *, const struct kvs_host_pool_options *, struct kvs_host_pool **,
                      struct kvs_error *); /* checks the geometry; maps nothing */
void kvs_host_pool_delete(struct kvs_host_pool *);
/* Needs map_base, map_nbytes, base and pages. Binds to NUMA nodes, makes the chunks and starts the crew. */
int kvs_host_pool_start(struct kvs_host_pool *, struct kvs_error *);

#endif
