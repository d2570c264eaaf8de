/* The rows of the paths, and what is asked of all of them. */
#ifndef KVS_TABLE_H
#define KVS_TABLE_H

#include "paths/costs.h"
#include "paths/path.h"

extern const struct kvs_path_ops *const kvs_paths[KVS_PATHS]; /* NULL for KVS_PATH_AUTO */

/* Predicted nanoseconds; infinity if the path's costs are unknown or the shape has no parts for the path. BURST:
 * gathering overlaps the copies, except for one burst. KVS_OTHER_DIRECTION costs as KVS_D2H. */
double kvs_cost_ns(const struct kvs_costs *costs, const struct kvs_shape *shape, enum kvs_path path);

/* KVS_INVALID, with the value: not a number, or out of the plausible range. */
int kvs_costs_check(const struct kvs_costs *costs, struct kvs_error *err);

#endif
