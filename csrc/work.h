/* What one submitting call works with: the plan, and what there is to know of it. For the core's own files only. */
#ifndef KVS_WORK_H
#define KVS_WORK_H

#include "plan.h"
#include "pool.h"
#include "stride.h"

struct kvs_move_scratch; /* move.c's own */

/* Where the copies of a layer end. */
struct kvs_layer_end {
  size_t copies, rects;
};

/* Working memory of one submitting call. */
struct kvs_scratch {
  int64_t *ids; /* both lists as they were at the call: the caller's arrays are read once */
  size_t ids_capacity;
  struct kvs_copies copies, single; /* merged; one entry a block, made only when something was refused */
  struct kvs_rects rects;           /* of copies: those that are rows at a pitch */
  struct kvs_layer_end *layers;     /* made where layers matter */
  size_t nlayers, layers_capacity;
  struct kvs_regions regions; /* those that this call touches */
  struct kvs_move_scratch *move;
  struct kvs_stacks stacks;
  struct kvs_plan_scratch plan;
  struct kvs_scratch *next;
};

/* What is to be moved, checked and planned. `expand` makes the list again as plain copies, merged or with one entry a
 * block: for paths that have no use for rectangles, and for a merged copy that is refused and tried block by block. */
struct kvs_work {
  struct kvs_scratch *scratch;
  enum kvs_direction direction;
  uint64_t nbytes, nblocks, entries; /* entries: blocks of all tensors */
  int (*expand)(const void *call, bool merge, struct kvs_scratch *, struct kvs_copies *, struct kvs_error *);
  /* Tell the race checker of the accesses of one layer, or of all (SIZE_MAX), which are these copies and rows. */
  void (*watch)(const void *call, const struct kvs_transfer *, size_t layer, const struct kvs_copies *,
                const struct kvs_rects *, const struct kvs_race_party *);
  const void *call;
  size_t nlayers; /* that there could be */
  /* Of transfers between pools, whose caller holds hazard_lock. */
  const struct kvs_touch *touches;
  size_t ntouches;
  const int64_t *src_slots, *dst_slots;
  size_t nslots;
  const uint32_t *lost; /* blocks that are not copied since their source is lost */
  size_t nlost;
  struct kvs_error lost_error;
  void (*settle)(const void *call, const struct kvs_transfer *); /* once it is known which blocks failed */
};

/* swap.c */
int kvs_open_for_work(struct kvs_engine *, struct kvs_error *); /* neither shut down nor lost, nor a parent's */
int kvs_check_layer_options(const struct kvs_options *, size_t nlayers, struct kvs_error *);
bool kvs_wants_layers(const struct kvs_options *);
bool kvs_may_cross_seams(const struct kvs_regions *);
enum kvs_direction kvs_direction_of(const struct kvs_region *src, const struct kvs_region *dst);
const char *kvs_direction_text(enum kvs_direction); /* "device to host" */

/* submit.c */
/* Whether copies of rows are of use to a call: where there are any, or (auto) where they make it much shorter. */
bool kvs_wants_rows(const struct kvs_engine *, const struct kvs_options *, bool *insists);
int kvs_submit(struct kvs_engine *, struct kvs_work *, const struct kvs_options *, struct kvs_transfer **,
               struct kvs_error *);

/* order.c, on the lane that the caller holds: the spine waits for what the transfer must start after; what comes after
 * it waits for the spine. */
int kvs_order_before(struct kvs_transfer *, const struct kvs_work *, const struct kvs_options *, struct kvs_error *);
int kvs_order_before_layer(struct kvs_transfer *, const struct kvs_options *, size_t layer, struct kvs_error *);
int kvs_order_behind(struct kvs_transfer *, const struct kvs_work *, const struct kvs_options *, struct kvs_error *);

/* memory.c */
struct kvs_scratch *kvs_scratch_get(struct kvs_engine *, struct kvs_error *);
void kvs_scratch_put(struct kvs_engine *, struct kvs_scratch *);
void kvs_scratch_clear(struct kvs_scratch *);                    /* no copies, rows or layers are planned */
int kvs_scratch_layer(struct kvs_scratch *, struct kvs_error *); /* a layer ends where the lists end now */

#endif
