/* A path's cost is its start cost plus the cost of its parts; see cost.h. */
#include "plan/cost.h"

#include <math.h>

#include "status.h"

const char *const kvs_path_names[] = {"auto", "dma", "strided", "burst", "kernel", "direct"};

const char *kvs_path_name(enum kvs_path path) { return (unsigned)path < KVS_PATHS ? kvs_path_names[path] : "unknown"; }

/* Cost of one of `count` copies with `nbytes` in total, at their mean size. */
static double at_mean(const double *costs, uint64_t nbytes, uint64_t count) {
  double size = (double)nbytes / (double)count, from = KVS_COST_LEAST;
  int i = 0;
  if (size <= from) return costs[0];
  for (; i < KVS_COST_SIZES - 1; i++, from *= 2)
    if (size < 2 * from) return costs[i] + (costs[i + 1] - costs[i]) * (size - from) / from;
  return costs[i] * size / from;
}

/* Cost of all of them. */
static double of_all(const double *costs, uint64_t nbytes, uint64_t count) {
  return count ? (double)count * at_mean(costs, nbytes, count) : 0;
}

/* `other_count` of the copies, with `other_nbytes`, have the other cost. */
static double of_both(const struct kvs_path_cost *cost, uint64_t nbytes, uint64_t count, uint64_t other_nbytes,
                      uint64_t other_count) {
  return of_all(cost->each, nbytes - other_nbytes, count - other_count) + of_all(cost->run, other_nbytes, other_count);
}

static double dma(const struct kvs_path_cost *cost, const struct kvs_shape *shape) {
  uint64_t first = shape->copies < KVS_COST_BATCH ? shape->copies : KVS_COST_BATCH;
  if (shape->copies == 0) return INFINITY;
  return cost->start + (shape->copies > 1 ? (double)first * cost->extra : 0) +
         of_all(cost->each, shape->nbytes, shape->copies);
}

static double strided(const struct kvs_path_cost *cost, const struct kvs_path_cost *dma,
                      const struct kvs_shape *shape) {
  if (shape->rects == 0 || shape->rect_rows == 0) return INFINITY;
  double rows = (double)shape->rects * cost->extra +
                of_both(cost, shape->rect_nbytes, shape->rect_rows, shape->apart_nbytes, shape->apart_rows);
  if (shape->rest_copies == 0) return cost->start + rows;
  if (dma->start < 0) return INFINITY;
  return cost->start + rows + of_all(dma->each, shape->nbytes - shape->rect_nbytes, shape->rest_copies);
}

static double kernel(const struct kvs_path_cost *cost, const struct kvs_shape *shape) {
  if (shape->pieces == 0) return INFINITY;
  return cost->start + of_both(cost, shape->nbytes, shape->pieces, shape->skew_nbytes, shape->skew_pieces);
}

static double burst(const struct kvs_path_cost *cost, const struct kvs_shape *shape) {
  if (shape->rows == 0 || shape->runs == 0) return INFINITY;
  double pack = of_all(cost->each, shape->nbytes, shape->rows), move = of_all(cost->run, shape->nbytes, shape->runs);
  double alone = shape->nbytes > KVS_COST_ALONE ? KVS_COST_ALONE / (double)shape->nbytes : 1;
  double more = cost->extra * (shape->nbytes < KVS_COST_SLOT ? (double)shape->nbytes / KVS_COST_SLOT : 1);
  return cost->start + more + (pack > move ? pack + move * alone : move + pack * alone);
}

double kvs_cost_ns(const struct kvs_costs *costs, const struct kvs_shape *shape, enum kvs_path path) {
  const struct kvs_path_cost *paths = costs->paths[shape->direction == KVS_H2D], *cost = &paths[path];
  if (path == KVS_PATH_AUTO || cost->start < 0) return INFINITY;
  switch (path) {
  case KVS_PATH_STRIDED:
    return strided(cost, &paths[KVS_PATH_DMA], shape);
  case KVS_PATH_KERNEL:
    return kernel(cost, shape);
  case KVS_PATH_BURST:
    return burst(cost, shape);
  default:
    return dma(cost, shape); /* DIRECT too: its extra is 0 */
  }
}

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

/* -- validation ------------------------------------------------------------------------------------------------ */

static int check(const char *what, double value, double most, struct kvs_error *err) {
  if (value >= 0 && value <= most) return KVS_OK; /* false for nan */
  return kvs_fail(err, KVS_INVALID, "%s is %g; it is a number from 0 to %g", what, value, most);
}

static int check_path(const struct kvs_path_cost *cost, enum kvs_path path, struct kvs_error *err) {
  int status = check("start", cost->start, KVS_COST_MOST_NS, err);
  if (!status) status = check("extra", cost->extra, kvs_cost_has_extra(path) ? KVS_COST_MOST_NS : 0, err);
  for (int i = 0; !status && i < KVS_COST_SIZES; i++) {
    status = check("each", cost->each[i], KVS_COST_MOST_NS, err);
    if (!status) status = check("run", cost->run[i], kvs_cost_has_run(path) ? KVS_COST_MOST_NS : 0, err);
  }
  return status;
}

static int check_tuning(const struct kvs_tuning *tuning, struct kvs_error *err) {
  int status = KVS_OK;
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
    for (int path = KVS_PATH_DMA; !status && path < KVS_PATHS; path++) {
      const struct kvs_path_cost *cost = &costs->paths[direction][path];
      if (!(cost->start < 0)) status = check_path(cost, (enum kvs_path)path, err);
    }
  return status;
}
