/* Costs of the paths: those of a calibration, fitted to a device. costs_default.h has the built-in ones, predict.h what
 * follows from them. */
#ifndef KVS_COSTS_H
#define KVS_COSTS_H

#include "plan/cost.h"

/* Measured values, or the built-in ones. KVS_PRIORITY_DEFAULT means KVS_PRIORITY_NORMAL. KVS_OTHER_DIRECTION, which
 * does not use the link to the host, uses the values of KVS_D2H, and `normal` is unpaced there, like `high`. */
struct kvs_kernel_tuning kvs_kernel_tuning_of(const struct kvs_tuning *tuning, enum kvs_direction direction,
                                              enum kvs_priority priority);

/* The costs to use on a device: `calibrated`, or the built-in ones if that is NULL. Kernel settings that `calibrated`
 * lacks are set by the bandwidth of the device's memory, in GB/s (0: unknown). */
void kvs_costs_fit(struct kvs_costs *costs, const struct kvs_costs *calibrated, int memory_gbps);

/* All paths unknown, nothing tuned. */
void kvs_costs_clear(struct kvs_costs *costs);

/* Plausible ranges. */
#define KVS_COST_MOST_NS 1e10 /* of a start, copy or run */
#define KVS_COST_MOST_GBPS 1e5
#define KVS_COST_MOST_CTAS 1024

#endif
