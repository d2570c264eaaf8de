/* Predictions and checks of costs, by the rows of the paths. */
#include "paths/predict.h"

#include <math.h>

#include "paths/costs.h"
#include "paths/table.h"
#include "status.h"

double kvs_cost_ns(const struct kvs_costs *costs, const struct kvs_shape *shape, enum kvs_path path) {
  return kvs_paths[path] ? kvs_path_ns(kvs_paths[path], path, costs, shape) : INFINITY;
}

/* -- validation ------------------------------------------------------------------------------------------------ */

static int check(const char *what, double value, double most, struct kvs_error *err) {
  if (value >= 0 && value <= most) return KVS_OK; /* false for nan */
  return kvs_fail(err, KVS_INVALID, "%s is %g; it is a number from 0 to %g", what, value, most);
}

static int check_path(const struct kvs_path_cost *cost, enum kvs_path path, struct kvs_error *err) {
  int status = check("start", cost->start, KVS_COST_MOST_NS, err);
  if (!status) status = check("extra", cost->extra, kvs_paths[path]->has_extra ? KVS_COST_MOST_NS : 0, err);
  for (int i = 0; !status && i < KVS_COST_SIZES; i++) {
    status = check("each", cost->each[i], KVS_COST_MOST_NS, err);
    if (!status) status = check("run", cost->run[i], kvs_paths[path]->has_run ? KVS_COST_MOST_NS : 0, err);
  }
  return status;
}

static int check_tuning(const struct kvs_tuning *tuning, struct kvs_error *err) {
  int status = check("host_links", tuning->host_links, KVS_COST_MOST_CTAS, err);
  for (int i = 0; !status && i < 3; i++) status = check("host_gbps", tuning->host_gbps[i], KVS_COST_MOST_GBPS, err);
  for (int direction = 0; !status && direction < 2; direction++) {
    status = check("link_gbps", tuning->link_gbps[direction], KVS_COST_MOST_GBPS, err);
    for (int priority = 0; !status && priority < KVS_PRIORITIES; priority++) {
      const struct kvs_kernel_tuning *kernel = &tuning->kernel[direction][priority];
      status = check("ctas", kernel->ctas, KVS_COST_MOST_CTAS, err);
      if (!status) status = check("pace_gbps", kernel->pace_gbps, KVS_COST_MOST_GBPS, err);
      if (!status) status = check("gbps", kernel->gbps, KVS_COST_MOST_GBPS, err);
    }
  }
  return status;
}

int kvs_costs_check(const struct kvs_costs *costs, struct kvs_error *err) {
  int status = check_tuning(&costs->tuning, err);
  for (int direction = 0; !status && direction < 2; direction++)
    for (int path = 1; !status && path < KVS_PATHS; path++) {
      const struct kvs_path_cost *cost = &costs->paths[direction][path];
      if (!(cost->start < 0)) status = check_path(cost, (enum kvs_path)path, err);
    }
  return status;
}
