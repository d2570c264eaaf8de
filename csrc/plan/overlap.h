/* Whether destinations overlap each other or a source. Two checks of different cost: of whole tensors, and of planned
 * copies. */
#ifndef KVS_OVERLAP_H
#define KVS_OVERLAP_H

#include "plan/plan.h"

/* Copy the tensors to scratch->checked[direction], and check the sizes and strides of the copies. A stride of 0 means
 * nbytes, in all functions here. *disjoint: the extents alone prove that destinations overlap neither each other nor a
 * source; if false, kvs_plan_check_disjoint decides on the planned copies. */
int kvs_plan_check_tensors(const struct kvs_tensor *tensors, size_t ntensors, enum kvs_direction direction,
                           struct kvs_plan_scratch *scratch, bool *disjoint, struct kvs_error *err);

/* How messages name a copy: "entry 3", or "block 3 of tensor 1" if the copies are listed by tensor, `per_tensor`
 * each. */
struct kvs_plan_naming {
  const char *entry;
  size_t per_tensor; /* 0: no tensors, or runs were merged */
};

struct kvs_plan_bounds kvs_plan_find_bounds(const struct kvs_copies *copies);

/* Check that no destination overlaps another destination or a source. */
int kvs_plan_check_disjoint(const struct kvs_copies *copies, const struct kvs_plan_bounds *bounds,
                            const struct kvs_plan_naming *naming, struct kvs_plan_scratch *scratch,
                            struct kvs_error *err);

#endif
