/* What costs say of a path: predicted times, and whether the costs are plausible. */
#ifndef KVS_PREDICT_H
#define KVS_PREDICT_H

#include "plan/cost.h"

/* Predicted nanoseconds; infinity if the path's costs are unknown or the shape has no parts for the path. BURST:
 * gathering overlaps the copies, except for one burst. KVS_OTHER_DIRECTION costs as KVS_D2H. */
double kvs_cost_ns(const struct kvs_costs *costs, const struct kvs_shape *shape, enum kvs_path path);

/* KVS_INVALID, with the value: not a number, or out of the plausible range. */
int kvs_costs_check(const struct kvs_costs *costs, struct kvs_error *err);

#endif
