/* Costs of parts by their sizes; see cost.h. */
#include "plan/cost.h"

/* Cost of one of `count` copies with `nbytes` in total, at their mean size. */
static double at_mean(const double *costs, uint64_t nbytes, uint64_t count) {
  double size = (double)nbytes / (double)count, from = KVS_COST_LEAST;
  int i = 0;
  if (size <= from) return costs[0];
  for (; i < KVS_COST_SIZES - 1; i++, from *= 2)
    if (size < 2 * from) return costs[i] + (costs[i + 1] - costs[i]) * (size - from) / from;
  return costs[i] * size / from;
}

double kvs_cost_of_all(const double *costs, uint64_t nbytes, uint64_t count) {
  return count ? (double)count * at_mean(costs, nbytes, count) : 0;
}

double kvs_cost_of_both(const struct kvs_path_cost *cost, uint64_t nbytes, uint64_t count, uint64_t other_nbytes,
                        uint64_t other_count) {
  return kvs_cost_of_all(cost->each, nbytes - other_nbytes, count - other_count) +
         kvs_cost_of_all(cost->run, other_nbytes, other_count);
}
