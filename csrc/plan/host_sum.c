/* The host's sum; see host_sum.h. */
#include "plan/host_sum.h"

#include <math.h>

double kvs_host_room(const double host_gbps[3], const double busy_gbps[2], enum kvs_direction direction,
                     double own_gbps) {
  double host = host_gbps[direction], room = host - busy_gbps[direction] - own_gbps;
  if (!(host > 0)) return INFINITY;
  return room > 0 ? room : 0;
}

bool kvs_host_loads_first(const double host_gbps[3], const double busy_gbps[2], double own_gbps) {
  double both = host_gbps[KVS_HOST_BOTH];
  return both > 0 && busy_gbps[KVS_H2D] > 0 && busy_gbps[KVS_H2D] + busy_gbps[KVS_D2H] + own_gbps > both;
}
