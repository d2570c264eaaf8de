/* Path direct: plain memcpy by the threads of a host device, when speed is wanted rather than proof. */
#include "paths/direct.h"

#include <math.h>

#include "paths/copies.h"
#include "paths/path.h"
#include "plan/cost.h"

bool kvs_prefers_direct(const struct kvs_engine *engine) {
  return engine->device->ops->copy_direct && !engine->device->stepped;
}

static double cost(const struct kvs_costs *costs, const struct kvs_path_cost *own, const struct kvs_shape *shape) {
  (void)costs;
  if (shape->copies == 0) return INFINITY;
  return own->start + kvs_cost_of_all(own->each, shape->nbytes, shape->copies);
}

static bool claims(const struct kvs_submission *s) { return kvs_prefers_direct(s->engine); }

static int prepare(struct kvs_submission *s) { return kvs_plan_copies(s, s->err); }

static int issue(struct kvs_submission *s, struct kvs_error *why) {
  return s->view.count ? kvs_dev_copy_direct(s->device, &s->view, s->lane->stream, why) : KVS_OK;
}

static enum kvs_path after_refusal(const struct kvs_submission *s) {
  (void)s;
  return KVS_PATH_DMA;
}

const struct kvs_path_ops kvs_path_direct = {
    .name = "direct",
    .needs_threads = true,
    .needs_host_ids = true,
    .cost = cost,
    .claims = claims,
    .prepare = prepare,
    .issue = issue,
    .after_refusal = after_refusal,
};
