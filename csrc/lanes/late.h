/* What is known of a transfer between pools only once its device work has ended: which blocks failed, and what that
 * means for the slots (struct kvs_late). For the core's own files only.
 *
 * Between pools, failures of earlier transfers decide which blocks are lost, and the records of slots (failure.h) are
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

#include "lanes/failure.h"

struct kvs_race_access;

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
