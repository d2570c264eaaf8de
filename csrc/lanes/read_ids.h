/* Ids that were on the device, and are known only once the transfer's device work has ended. */
#ifndef KVS_READ_IDS_H
#define KVS_READ_IDS_H

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

#endif
