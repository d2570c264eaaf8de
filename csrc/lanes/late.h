/* What is known of a transfer only once its device work has ended: ids that a kernel has read (struct kvs_read_ids),
 * and, between pools, which blocks failed and what that means for the slots (struct kvs_late). For the core's own files
 * only.
 *
 * Between pools, failures of earlier transfers decide which blocks are lost, and the records of slots (pool.h) are
 * written in the order of submission. While the slots of one transfer are not known, neither are the records, so each
 * later transfer that uses one of its pools is settled late too. engine->late holds them in order of submission. Those
 * whose device work has ended are settled in that order:
 *
 *   kvs_late_new()       kvs_late_add()                    kvs_late_settle()
 *        NEW ---------------> LISTED, transfer->unsettled ------------------> freed; the transfer may end
 *          \ the call is refused: kvs_late_free()
 *
 * A transfer of a lost device ends without being settled, and its entry is dropped. All under engine->hazard_lock. */
#ifndef KVS_LATE_H
#define KVS_LATE_H

#include "lanes/state.h"

struct kvs_race_access;

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

/* An entry for that many pairs of pools, blocks and reservations. NULL: no memory. */
struct kvs_late *kvs_late_new(const struct kvs_settlement *, size_t reservations);
void kvs_late_free(struct kvs_late *);
/* The race checker is told of this access once its slots are known. */
void kvs_late_reserve(struct kvs_late *, const struct kvs_race_access *);
/* Takes over the entry. */
void kvs_late_add(struct kvs_late *, struct kvs_transfer *);
void kvs_late_settle_locked(struct kvs_engine *);
void kvs_late_settle(struct kvs_engine *);        /* unless a submission holds the lock; the next call settles then */
void kvs_late_settle_behind(struct kvs_engine *); /* also then, when it has let go */
void kvs_late_forget_pool(struct kvs_engine *, const struct kvs_pool *);
void kvs_late_destroy(struct kvs_engine *);

#endif
