/* A path: one way to move the blocks of a transfer. One file a path, one row of KVS_PATH_ROWS a path; choosing,
 * preparing and issuing loop over the rows, and no file outside paths/ compares a path.
 *
 * The order of calls for one transfer, all by the submitting thread:
 *
 *   claims, predict   AUTO only, for each row that can serve the transfer: choose.c
 *   why_not, check    the path is refused, with a reason, before anything has moved
 *   take, measure     what the path holds while it is queued (the slots of a burst)
 *   prepare           forms of the plan, memory. The last step that may fail the call
 *   issue             once for each group of layers, with the group in view
 *   after_refusal     issue() was refused: the path for this group and all later ones
 *   close             all groups are issued
 *   release           after the lane has the transfer, or the call has failed
 *
 * A path that takes is predicted twice: before, and exactly after take() and measure(), since the time may depend on
 * what was taken. */
#ifndef KVS_PATH_H
#define KVS_PATH_H

#include <math.h>

#include "paths/names.h"
#include "paths/submission.h"

struct kvs_path_ops {
  const char *name; /* for people, files and Python */

  /* What it needs. AUTO passes a path over where a need is not met; a path that the caller named is refused. */
  bool needs_kernels;
  bool needs_threads;     /* the device's threads copy (copy_direct of the seam): host devices */
  bool needs_host_ids;    /* ids that are on the device cannot be used */
  bool needs_pinned;      /* kernels reach no pageable host memory */
  bool needs_peer_access; /* kernels reach memory of another device only with peer access */
  bool needs_lender;      /* another device lends its link */

  bool codes; /* it can move blocks of coded pools. AUTO takes the first such row that can serve */

  /* Forms of the plan that calls make for it. Copies can always be made. */
  bool rows;  /* rows and pairs of slots, at once */
  bool rects; /* rows at equal pitch */

  bool has_extra, has_run; /* the members of struct kvs_path_cost that it uses, beside `start` and `each` */

  /* Predicted time from measured costs: pure; costs that are unknown never come here. */
  double (*cost)(const struct kvs_costs *, const struct kvs_path_cost *own, const struct kvs_shape *);

  bool (*claims)(const struct kvs_submission *);    /* (optional) AUTO takes it without comparing times */
  double (*predict)(const struct kvs_submission *); /* (optional) ns, with what it costs a model. Absent: AUTO does not
                                                       compare it */
  bool (*worth)(const struct kvs_submission *);     /* (optional) whether AUTO compares it here. Absent: always */
  bool (*fits)(const struct kvs_submission *);      /* (optional) whether it can serve this transfer. Absent: always */
  enum kvs_path (*instead)(const struct kvs_submission *); /* with fits or take: the path where it cannot */

  const char *(*why_not)(const struct kvs_submission *, char room[KVS_BURST_NOTE]); /* (optional) why it is off */
  int (*check)(const struct kvs_submission *); /* (optional) a last look at the transfer; an error refuses the call */

  bool (*take)(struct kvs_submission *);   /* (optional, with release) false: it is not to be had now */
  int (*measure)(struct kvs_submission *); /* (optional, with take) what an exact prediction needs */
  void (*release)(struct kvs_submission *);

  int (*prepare)(struct kvs_submission *);
  int (*issue)(struct kvs_submission *, struct kvs_error *why); /* an error: nothing of the view counts as issued */
  /* (optional) One past the last layer that is issued together with this one. Absent: the next layer. */
  size_t (*layer_group_end)(const struct kvs_submission *, size_t layer);
  /* (optional) The path that repeats what was refused; KVS_PATH_AUTO: none, the transfer fails. Absent: none. */
  enum kvs_path (*after_refusal)(const struct kvs_submission *);
  void (*close)(struct kvs_submission *); /* (optional) */
};

#define KVS_PATH_OPS(upper, lower) extern const struct kvs_path_ops kvs_path_##lower;
KVS_PATH_ROWS(KVS_PATH_OPS)
#undef KVS_PATH_OPS

/* Predicted nanoseconds by the row's cost(); infinity if its costs are unknown. */
static inline double kvs_path_ns(const struct kvs_path_ops *row, enum kvs_path path, const struct kvs_costs *costs,
                                 const struct kvs_shape *shape) {
  const struct kvs_path_cost *own = &costs->paths[shape->direction == KVS_H2D][path];
  return kvs_cost_is_known(own) ? row->cost(costs, own, shape) : INFINITY;
}

#endif
