/* Failure records: whether the bytes of slots are right, and what the failed blocks of a transfer mean for them. */
#ifndef KVS_FAILURE_H
#define KVS_FAILURE_H

#include <stdatomic.h>

#include "kvswap.h"

struct kvs_pool;
struct kvs_transfer;

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
  size_t count;             /* slots that have one */
  struct kvs_failure *only; /* if all of these have the same one; NULL: they may differ */
};
int kvs_failures_open(struct kvs_failures *, uint64_t slots, struct kvs_error *);
void kvs_failures_close(struct kvs_failures *);
/* Whether a slot has a record. Forgets all of them if they are one, and all went well. */
bool kvs_failures_any(struct kvs_failures *);
/* The dependencies of all transfers whose outcome is open. */
uint64_t kvs_failures_dependencies(struct kvs_failures *);
struct kvs_failure *kvs_failures_get(struct kvs_failures *, uint64_t slot); /* NULL: the bytes are right */
/* Set the record of a slot and take a reference; NULL: the bytes are right. */
void kvs_failures_set(struct kvs_failures *, uint64_t slot, struct kvs_failure *);

/* Add failed blocks to a transfer that has not ended. *why counts if it is the first error. */
void kvs_transfer_fail_blocks(struct kvs_transfer *, const uint32_t *positions, size_t count, const struct kvs_error *);

/* A transfer between pools, as far as failures go: slots as named by the caller, -1 where unknown. */
struct kvs_settlement {
  struct kvs_pool *const *src, *const *dst; /* NULL entries: closed pools */
  const uint64_t *covered;                  /* for each pair: bytes of a block that are written */
  size_t npairs;
  const int64_t *src_slots, *dst_slots;
  size_t count;
};
bool kvs_settlement_whole(const struct kvs_settlement *, size_t pair); /* blocks of that pair are written whole */
/* The failure record of a lost source block and its pool, or NULL. Adds the dependencies of undecided sources. */
struct kvs_failure *kvs_settlement_lost(const struct kvs_settlement *, int64_t src_slot, const struct kvs_pool **,
                                        uint64_t *dependencies);
void kvs_settlement_lost_error(struct kvs_error *, size_t position, int64_t slot, const struct kvs_pool *,
                               const struct kvs_failure *);
/* Write the records of the destination slots: the transfer's failed blocks are known, or open by its dependencies. If
 * it was never known which slots those are, all slots of the pools count as lost. over: its work has ended, though it
 * has not. */
void kvs_settle(const struct kvs_settlement *, const struct kvs_transfer *, bool over);

#endif
