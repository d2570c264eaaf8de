/* What became of coded blocks: known only once the transfer's device work has ended. */
#ifndef KVS_VERDICTS_H
#define KVS_VERDICTS_H

#include "lanes/state.h"

/* A block of a transfer. */
struct kvs_named_block {
  uint32_t dst, src; /* slots, or positions in ids that are on the device */
  uint32_t position; /* in the caller's lists */
};

struct kvs_verdicts {
  char pool[32];         /* the coded one, for messages */
  bool decode;           /* it is the source */
  const uint32_t *words; /* enum kvs_unit_verdict of each pair, in the transfer's staging; NULL: no kernel was queued */
  bool done;
  size_t count;
  struct kvs_pair *pairs;          /* as the kernels have them */
  struct kvs_named_block blocks[]; /* as the caller has them */
};

/* For a transfer whose rows are coded. */
int kvs_verdicts_new(struct kvs_transfer *, const struct kvs_work *, struct kvs_error *);
/* The pairs are in the order in which kernels have them; their verdicts will be at `words`. */
void kvs_verdicts_place(struct kvs_verdicts *, const struct kvs_packing *, const uint32_t *words);
/* The transfer's device work has ended: fail the blocks that are not good. Under lane->lock. */
void kvs_verdicts_end(struct kvs_transfer *);

#endif
