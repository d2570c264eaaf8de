/* Path borrow: a burst of which other devices bring a share over their links. burst.c queues it, lend.c has the links.
 */
#include <math.h>

#include "paths/lend.h"
#include "paths/path.h"
#include "plan/cost.h"

/* AUTO borrows for no less: a piece needs a third stage, and its lender may want its link back. */
static const uint64_t LEAST_NBYTES = 32 << 20;

/* What a third stage costs before all links are busy: an estimate, no measurement. */
static const double START_NS = 60000;

static bool worth(const struct kvs_submission *s) { return kvs_path_burst.worth(s); }

static bool fits(const struct kvs_submission *s) {
  if (s->work->on_device.ids) return false;
  if (s->options->priority == KVS_PRIORITY_BACKGROUND) return false; /* its link rests while kernels run */
  if (s->engine->one_queue) return false; /* all that the lender does would stand behind what the borrower waits for */
  if (s->engine->verifies && s->work->codings) return false; /* two streams alone have memory to verify in */
  return (!s->picked || s->work->nbytes >= LEAST_NBYTES) && kvs_path_burst.fits(s);
}

static enum kvs_path instead(const struct kvs_submission *s) {
  (void)s;
  return KVS_PATH_BURST;
}

static const char *why_not(const struct kvs_submission *s, char room[KVS_BURST_NOTE]) {
  return kvs_path_burst.why_not(s, room);
}

/* Its time follows from a burst's. */
static double cost(const struct kvs_costs *costs, const struct kvs_path_cost *own, const struct kvs_shape *shape) {
  (void)costs, (void)own, (void)shape;
  return INFINITY;
}

/* Before the links are held, as if one were. */
static double predict(const struct kvs_submission *s) {
  return START_NS + kvs_path_burst.predict(s) / (s->nlent ? 1 + kvs_lent_shares(s) : 2);
}

static void release(struct kvs_submission *s) { kvs_path_burst.release(s); }

static bool take(struct kvs_submission *s) {
  if (!kvs_path_burst.take(s)) return false;
  if (kvs_lent_take(s)) return true;
  release(s);
  return false;
}

static int measure(struct kvs_submission *s) { return kvs_path_burst.measure(s); }

static int prepare(struct kvs_submission *s) {
  int status = kvs_path_burst.prepare(s);
  if (!status) kvs_lent_fit(s);
  if (!status && !s->nlent) s->transfer->path = KVS_PATH_BURST;
  return status;
}

static int issue(struct kvs_submission *s, struct kvs_error *why) { return kvs_path_burst.issue(s, why); }

static size_t layer_group_end(const struct kvs_submission *s, size_t layer) {
  return kvs_path_burst.layer_group_end(s, layer);
}

static enum kvs_path after_refusal(const struct kvs_submission *s) { return kvs_path_burst.after_refusal(s); }

static void close(struct kvs_submission *s) { kvs_path_burst.close(s); }

const struct kvs_path_ops kvs_path_borrow = {
    .name = "borrow",
    .needs_kernels = true,
    .needs_pinned = true,
    .needs_lender = true,
    .codes = true,
    .rows = true,
    .cost = cost,
    .predict = predict,
    .worth = worth,
    .fits = fits,
    .instead = instead,
    .why_not = why_not,
    .take = take,
    .measure = measure,
    .release = release,
    .prepare = prepare,
    .issue = issue,
    .layer_group_end = layer_group_end,
    .after_refusal = after_refusal,
    .close = close,
};
