/* Path dma: merged runs to the copy engine, in calls of bounded size. Serves every transfer. */
#include <math.h>

#include "paths/copies.h"
#include "paths/many.h"
#include "paths/path.h"
#include "plan/cost.h"

static double cost(const struct kvs_costs *costs, const struct kvs_path_cost *own, const struct kvs_shape *shape) {
  uint64_t first = shape->copies < KVS_COST_BATCH ? shape->copies : KVS_COST_BATCH;
  (void)costs;
  if (shape->copies == 0) return INFINITY;
  return own->start + (shape->copies > 1 ? (double)first * own->extra : 0) +
         kvs_cost_of_all(own->each, shape->nbytes, shape->copies);
}

/* Between two devices what kernel does not claim goes to the copy engine. Pageable memory is staged by the driver. */
static bool claims(const struct kvs_submission *s) { return s->peer || kvs_pageable(&s->work->scratch->regions); }

static double predict(const struct kvs_submission *s) {
  const struct kvs_shape *shape = &s->work->shape;
  return kvs_path_ns(&kvs_path_dma, KVS_PATH_DMA, &s->engine->costs, shape) *
         kvs_many_handicap(shape->copies, shape->nbytes);
}

static int prepare(struct kvs_submission *s) { return kvs_plan_copies(s, s->err); }

static int issue(struct kvs_submission *s, struct kvs_error *why) {
  (void)why;
  kvs_issue_copies(s);
  return KVS_OK;
}

const struct kvs_path_ops kvs_path_dma = {
    .name = "dma",
    .needs_host_ids = true,
    .has_extra = true,
    .cost = cost,
    .claims = claims,
    .predict = predict,
    .prepare = prepare,
    .issue = issue,
};
