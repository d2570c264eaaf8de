/* What the links of several devices take together, and what the host's memory reaches. Pure. Rates are GB/s.
 *
 * host_gbps: as in struct kvs_tuning; 0: unknown, no limit. busy_gbps: by direction, of the links that are in use, but
 * for the own one in the transfer's own direction. own_gbps: of the own link. */
#ifndef KVS_HOST_SUM_H
#define KVS_HOST_SUM_H

#include "plan/cost.h"

/* What other links may add to a transfer's own link before the host is the limit: 0 or more; INFINITY: no limit is
 * known. A load is measured against the sum of loads alone: it goes before stores. */
double kvs_host_room(const double host_gbps[3], const double busy_gbps[2], enum kvs_direction direction,
                     double own_gbps);

/* Whether a store over links of own_gbps goes behind the loads that are in progress: there are some, and together with
 * all stores they would exceed the sum of both directions. */
bool kvs_host_loads_first(const double host_gbps[3], const double busy_gbps[2], double own_gbps);

#endif
