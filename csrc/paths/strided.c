/* Path strided: tensors at equal pitch inside one allocation are the rows of one copy a block, by the copy engine. What
 * is no such row goes as plain copies. */
#include <math.h>

#include "paths/copies.h"
#include "paths/path.h"
#include "plan/cost.h"

static double cost(const struct kvs_costs *costs, const struct kvs_path_cost *own, const struct kvs_shape *shape) {
  const struct kvs_path_cost *dma = &costs->paths[shape->direction == KVS_H2D][KVS_PATH_DMA];
  if (shape->rects == 0 || shape->rect_rows == 0) return INFINITY;
  double rows = (double)shape->rects * own->extra +
                kvs_cost_of_both(own, shape->rect_nbytes, shape->rect_rows, shape->apart_nbytes, shape->apart_rows);
  if (shape->rest_copies == 0) return own->start + rows;
  if (dma->start < 0) return INFINITY;
  return own->start + rows + kvs_cost_of_all(dma->each, shape->nbytes - shape->rect_nbytes, shape->rest_copies);
}

static double predict(const struct kvs_submission *s) {
  return kvs_path_ns(&kvs_path_strided, KVS_PATH_STRIDED, &s->engine->costs, &s->work->shape);
}

static bool fits(const struct kvs_submission *s) { return s->work->shape.rects > 0; }

static enum kvs_path instead(const struct kvs_submission *s) {
  (void)s;
  return KVS_PATH_DMA;
}

static int prepare(struct kvs_submission *s) {
  int status = s->work->plan(s->work->call, KVS_FORM_RECTS, s->work->scratch, s->err);
  if (!status && s->work->scratch->rects.count == 0)
    s->transfer->path = KVS_PATH_DMA; /* no pitch that the driver accepts */
  return status;
}

static int issue(struct kvs_submission *s, struct kvs_error *why) {
  (void)why;
  kvs_issue_copies(s);
  kvs_issue_rects(s);
  return KVS_OK;
}

const struct kvs_path_ops kvs_path_strided = {
    .name = "strided",
    .needs_host_ids = true,
    .rects = true,
    .has_extra = true,
    .has_run = true,
    .cost = cost,
    .predict = predict,
    .fits = fits,
    .instead = instead,
    .prepare = prepare,
    .issue = issue,
};
