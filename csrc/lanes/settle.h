/* Settling a transfer: ids that a kernel has read, and what its failed blocks mean for the slots. */
#ifndef KVS_SETTLE_H
#define KVS_SETTLE_H

#include "lanes/state.h"

/* The ids of a transfer that were on the device. */
struct kvs_read_ids {
  struct kvs_ids_side side; /* `ids` may be gone once the call has returned */
  char name[16], holder[48];
  size_t count;
  const struct kvs_id_result *results; /* in the transfer's staging; right once its device work has ended */
  size_t nresults;
  bool queued;     /* the results will be there; else nothing was copied */
  bool fetched;    /* not so, and in their place there are the ids alone, by position */
  unsigned width;  /* fetched: bytes of an id */
  int order;       /* fetched: 1: ascending, -1: descending, 0: one id for all */
  bool done;       /* `slots` is right */
  int64_t slots[]; /* by position; -1: a bad id */
};
int kvs_read_ids_new(struct kvs_transfer *, const struct kvs_ids_side *, struct kvs_error *);
/* The transfer's device work has ended: find the slots, and fail the blocks of bad ids. Under lane->lock. */
void kvs_read_ids_end(struct kvs_transfer *);
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
 * it was never known which slots those are, all slots of the pools count as lost. */
void kvs_settle(const struct kvs_settlement *, const struct kvs_transfer *);

#endif
