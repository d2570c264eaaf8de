/* The structs behind pools: tables of slots, and what failed transfers left in them. For the core's own files only. */
#ifndef KVS_POOL_H
#define KVS_POOL_H

#include <stdatomic.h>

#include "core/hazard.h"
#include "device/region.h"
#include "kvswap.h"

/* What a failed transfer should have written; or what one should write that comes after work of other devices: should
 * one of those be lost, it fails, and only its end tells. Slots keep it, for whoever reads them before or after that:
 * a lane's order alone says nothing of whether one of its transfers needs what another one wrote. */
struct kvs_failure {
  atomic_uint refs;
  atomic_uint running;   /* transfers that have not ended; 0 and no error: all went well */
  atomic_bool failed;    /* `error` is there, and constant */
  uint64_t dependencies; /* kvs_transfer.others, of those that run; guarded by hazard_lock */
  struct kvs_error error;
  uint64_t transfer; /* its number */
};
enum kvs_verdict { KVS_SLOT_WELL, KVS_SLOT_OPEN, KVS_SLOT_LOST };

/* failure.c */
struct kvs_failure *kvs_failure_new(const struct kvs_error *, uint64_t transfer); /* NULL: no memory */
struct kvs_failure *kvs_failure_open(uint64_t transfer);                          /* only its end tells. The same */
void kvs_failure_unref(struct kvs_failure *);
enum kvs_verdict kvs_failure_verdict(const struct kvs_failure *);     /* of slots that keep it; NULL: well */
void kvs_failure_end(struct kvs_failure *, const struct kvs_error *); /* of one transfer; any thread */

/* Who reads and writes the slots of one pool, or of several whose slots belong together. Guarded by
 * engine->hazard_lock. */
struct kvs_table {
  struct kvs_hazards hazards;
  /* A lane: how far it must have come before anybody touches the slots, since the memory was in use when a pool was
   * made of it. NULL: it was not, or all that is over. */
  uint64_t *inherited;
  unsigned members;               /* pools that share it */
  uint64_t read_mark, write_mark; /* the last call that reads, writes it */
};

enum { KVS_POOL_FOREIGN_ENGINES = 15 };

struct kvs_pool {
  atomic_uint refs;
  struct kvs_engine *engine;
  struct kvs_pool *next; /* guarded by engine->memory_lock */
  atomic_bool closed;    /* its memory was another process's, and is gone */
  struct kvs_table *table;
  struct kvs_pool_layout layout; /* group: a reference */
  uint64_t number;               /* unique in the process */
  char name[32];
  /* Guarded by engine->hazard_lock. */
  struct kvs_failure **failures; /* a slot: NULL, or why its bytes are not what they should be */
  size_t nfailures;
  uint64_t mark; /* the last call that writes it */
  struct kvs_engine
      *foreign_engines[KVS_POOL_FOREIGN_ENGINES]; /* whose transfers have used it, besides its own engine's */
  unsigned nforeign_engines;
};

/* What a transfer does to a table. */
struct kvs_touch {
  struct kvs_table *table;
  bool write;
  const int64_t *slots; /* as many as the work has; NULL: the work's own of that side */
};

/* pool.c. Under memory_lock: pools in that memory cannot be used any more. */
void kvs_pools_close_locked(struct kvs_engine *, const struct kvs_region *);
int kvs_pool_check_open(const struct kvs_pool *, struct kvs_error *);

/* All under the engine's hazard_lock. */
struct kvs_failure *kvs_pool_failure(struct kvs_pool *, int64_t slot); /* NULL: all is well */
/* Take `failure` (referenced; NULL: all is well) for a slot. */
void kvs_pool_set_failure(struct kvs_pool *, int64_t slot, struct kvs_failure *);
/* A table of slots that nobody has touched, and its end. */
int kvs_table_new(uint64_t slots, struct kvs_table **, struct kvs_error *);
void kvs_table_free(struct kvs_table *);
/* Whatever still runs on [low, high) is waited for by whoever touches the table first. */
int kvs_table_inherit(struct kvs_engine *, struct kvs_table *, uint64_t low, uint64_t high, struct kvs_error *);

#endif
