/* The costs of the paths. A path's cost is its start cost plus the cost of its parts; each row of kvs_paths adds its
 * own up. */
#include "paths/costs.h"

#include "paths/costs_default.h"

void kvs_costs_clear(struct kvs_costs *costs) {
  *costs = (struct kvs_costs){0};
  for (int direction = 0; direction < 2; direction++)
    for (int path = 0; path < KVS_PATHS; path++) costs->paths[direction][path].start = -1;
}

struct kvs_kernel_tuning kvs_kernel_tuning_of(const struct kvs_tuning *tuning, enum kvs_direction direction,
                                              enum kvs_priority priority) {
  int from = direction == KVS_H2D, of = priority == KVS_PRIORITY_DEFAULT ? KVS_PRIORITY_NORMAL : (int)priority;
  if (direction == KVS_OTHER_DIRECTION && of == KVS_PRIORITY_NORMAL) of = KVS_PRIORITY_HIGH;
  const struct kvs_kernel_tuning *known = &tuning->kernel[from][of];
  return known->ctas ? *known : kvs_costs_default()->tuning.kernel[from][of];
}

/* A decode step is bound by the GPU's memory: with less bandwidth, slower stores to the host slow it down. Measured
 * beside a step, path kernel D2H with two CTAs, 64 tensors of 32 KiB: on an H200 (4.8 TB/s) it cost 0.032 more than one
 * bare copy at 42 GB/s; on an H100 (3.35 TB/s) 0.172 at 35 GB/s, 0.047 at 29, and 0.005 at 24, with pace 26. */
enum { FAST_MEMORY_GBPS = 4000 };
static const double SLOW_MEMORY_PACE_GBPS = 26; /* 0.47 of a PCIe 5 link, as in kvswap/calibrate.py */

void kvs_costs_fit(struct kvs_costs *costs, const struct kvs_costs *calibrated, int memory_gbps) {
  static const enum kvs_priority gentle[] = {KVS_PRIORITY_NORMAL, KVS_PRIORITY_BACKGROUND};
  *costs = calibrated ? *calibrated : *kvs_costs_default();
  if (memory_gbps <= 0 || memory_gbps >= FAST_MEMORY_GBPS) return;
  for (size_t i = 0; i < sizeof gentle / sizeof *gentle; i++) {
    struct kvs_kernel_tuning *kernel = &costs->tuning.kernel[KVS_D2H][gentle[i]];
    if (calibrated && kernel->ctas) continue;
    kernel->ctas = kvs_costs_default()->tuning.kernel[KVS_D2H][gentle[i]].ctas;
    kernel->pace_gbps = SLOW_MEMORY_PACE_GBPS;
    kernel->gbps = 0; /* at most the pace */
  }
}
