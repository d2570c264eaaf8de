/* The structs behind pools: hazard tables, and the failure records of slots. For the core's own files only. */
#ifndef KVS_POOL_STATE_H
#define KVS_POOL_STATE_H

#include <stdatomic.h>

#include "device/region.h"
#include "kvswap.h"
#include "lanes/failure.h"
#include "lanes/hazard.h"

/* Hazards of the slots of one pool, or of a group of pools that share slots. Guarded by engine->hazard_lock. */
struct kvs_table {
  struct kvs_hazards hazards;
  /* For each lane, the sequence that must end before the slots are used: the memory was in use when the pool was
   * opened. NULL: none is left. */
  uint64_t *inherited;
  unsigned members;               /* pools that share the table */
  uint64_t read_mark, write_mark; /* number of the last call that reads, that writes the table */
};

enum { KVS_POOL_FOREIGN_ENGINES = 15 };

struct kvs_pool {
  atomic_uint refs;
  struct kvs_engine *engine;
  struct kvs_pool *next; /* guarded by engine->memory_lock */
  atomic_bool closed;    /* its memory was freed, or was opened from another process and closed */
  struct kvs_table *table;
  struct kvs_pool_layout layout; /* group: a reference */
  uint64_t number;               /* unique in the process */
  char name[32];
  /* Guarded by engine->hazard_lock. */
  struct kvs_failures failures;
  uint64_t mark;                                                /* number of the last call that writes the pool */
  unsigned late;                                                /* transfers to be settled that use the pool (late.h) */
  struct kvs_engine *foreign_engines[KVS_POOL_FOREIGN_ENGINES]; /* other engines whose transfers have used the pool */
  unsigned nforeign_engines;
};

/* How a transfer uses a table. */
struct kvs_touch {
  struct kvs_table *table;
  bool write;
  bool whole;           /* its slots are not known yet: it counts as touching all */
  const int64_t *slots; /* work->nslots of them; NULL: the work's own of that side */
};

#endif
