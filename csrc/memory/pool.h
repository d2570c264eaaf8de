/* The tables of hazards that pools share. kvswap_pool.h has the pools. */
#ifndef KVS_POOL_H
#define KVS_POOL_H

#include "lanes/state.h"

/* All under the engine's hazard_lock. */
/* A table of untouched slots. */
int kvs_table_new(uint64_t slots, struct kvs_table **, struct kvs_error *);
void kvs_table_free(struct kvs_table *);
/* The first transfers that use the table will wait for all work that still runs on [low, high). */
int kvs_table_inherit(struct kvs_engine *, struct kvs_table *, uint64_t low, uint64_t high, struct kvs_error *);

#endif
