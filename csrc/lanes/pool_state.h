/* The structs behind pools: hazard tables, and the failure records of slots. For the core's own files only. */
#ifndef KVS_POOL_STATE_H
#define KVS_POOL_STATE_H

#include <stdatomic.h>

#include "device/region.h"
#include "kvswap.h"
#include "lanes/hazard.h"

/* Failure record of slots. Either a transfer that writes them failed, or its outcome is known only when it ends, since
 * it depends on work of other devices that may be lost. Readers of the slots look at the record before and after that
 * end: lane order alone does not say whether one transfer needs the bytes of another. */
struct kvs_failure {
  atomic_uint refs;
  atomic_uint running;   /* transfers that have not ended; 0 and not failed: all went well */
  atomic_bool failed;    /* `error` is set, and constant from now on */
  uint64_t dependencies; /* dependency mask of the running transfers; guarded by hazard_lock */
  struct kvs_error error;
  uint64_t transfer; /* its number */
};
enum kvs_verdict { KVS_SLOT_WELL, KVS_SLOT_OPEN, KVS_SLOT_LOST };

/* failure.c */
struct kvs_failure *kvs_failure_new(const struct kvs_error *, uint64_t transfer); /* NULL: no memory */
struct kvs_failure *kvs_failure_open(uint64_t transfer); /* outcome unknown until the end; NULL: no memory */
void kvs_failure_unref(struct kvs_failure *);
enum kvs_verdict kvs_failure_verdict(const struct kvs_failure *); /* of the slots that hold the record; NULL: well */
/* One transfer of the record has ended; any thread. */
void kvs_failure_end(struct kvs_failure *, const struct kvs_error *);

/* Whether the bytes of each slot of a table are right: the one place that says so. Zero-initialised: none is tracked.
 * Guarded by hazard_lock. */
struct kvs_failures {
  struct kvs_failure **items; /* for each slot: NULL, or its failure record */
  uint64_t slots;
  size_t count; /* slots that have one */
};
int kvs_failures_open(struct kvs_failures *, uint64_t slots, struct kvs_error *);
void kvs_failures_close(struct kvs_failures *);
struct kvs_failure *kvs_failures_get(struct kvs_failures *, uint64_t slot); /* NULL: the bytes are right */
/* Set the record of a slot and take a reference; NULL: the bytes are right. */
void kvs_failures_set(struct kvs_failures *, uint64_t slot, struct kvs_failure *);

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

/* pool.c. Close the pools in that memory. Under memory_lock. */
void kvs_pools_close_locked(struct kvs_engine *, const struct kvs_region *);

/* All under the engine's hazard_lock. */
/* A table of untouched slots. */
int kvs_table_new(uint64_t slots, struct kvs_table **, struct kvs_error *);
void kvs_table_free(struct kvs_table *);
/* The first transfers that use the table will wait for all work that still runs on [low, high). */
int kvs_table_inherit(struct kvs_engine *, struct kvs_table *, uint64_t low, uint64_t high, struct kvs_error *);

#endif
