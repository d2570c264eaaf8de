/* Where the host's memory is the limit, loads go before stores: such a store starts when the loads that have begun on
 * any device of this process have ended.
 *
 * A load that has begun waits for nothing outside any more, so a store is held up for the time of these loads at most,
 * and never by what its caller does later. It does not wait for loads that have not begun, nor for those that begin
 * after it was submitted: stores are not starved. The wait is one of the lane, as those of `after`: later transfers of
 * the lane come behind it.
 *
 * Without the host's sum in a calibration, which a machine with one GPU does not have, nothing is looked at. */
#include "paths/loads_first.h"

#include "device/share.h"
#include "lanes/lane.h"
#include "lanes/registry.h"
#include "lanes/transfer.h"
#include "paths/lend.h"
#include "plan/host_sum.h"
#include "racecheck/racecheck.h"

/* `high` never waits. With a stream of the caller, its later work would wait too; with one hardware queue, all work of
 * the device. */
static bool may_wait(const struct kvs_submission *s) {
  return s->work->direction == KVS_D2H && s->options->priority != KVS_PRIORITY_HIGH && !s->options->on_stream &&
         !s->engine->one_queue && !s->device->stepped;
}

void kvs_loads_first_look(struct kvs_submission *s) {
  const struct kvs_tuning *tuning = &s->engine->costs.tuning;
  double busy[2];
  if (!(tuning->host_gbps[KVS_HOST_BOTH] > 0) || !may_wait(s)) return;
  kvs_links_busy(s->engine, KVS_D2H, busy);
  s->loads_first = kvs_host_loads_first(tuning->host_gbps, busy, kvs_link_gbps(s->engine, KVS_D2H));
}

static void wait_for(struct kvs_submission *s, struct kvs_engine *other, struct kvs_lane *lane) {
  struct kvs_transfer *load;
  struct kvs_error ignored;
  kvs_event end;
  if (!kvs_lane_pin_begun(lane, &load, &end)) return;
  kvs_peer_depend(s->transfer, other);
  s->transfer->dependencies |= load->dependencies;
  (void)kvs_dev_stream_wait_foreign(s->device, s->transfer->head, other->device, end, &ignored);
  kvs_transfer_unpin(load);
  kvs_transfer_drop(load);
}

/* Loads of priority background hold up only stores of background. */
static bool goes_before(const struct kvs_submission *s, const struct kvs_lane *lane) {
  return lane->direction == KVS_H2D && atomic_load(&lane->count) &&
         (lane->priority != KVS_PRIORITY_BACKGROUND || s->options->priority == KVS_PRIORITY_BACKGROUND);
}

/* The race checker does not see these waits: no caller may rely on them. */
void kvs_loads_first_wait(struct kvs_submission *s) {
  struct kvs_engine *other;
  if (!s->loads_first) return;
  bool before = kvs_racecheck_internal(true);
  for (unsigned i = 0; (other = kvs_engine_at(i)) != NULL; i++)
    for (unsigned n = 0; kvs_link_counts(s->engine, other) && n < atomic_load(&other->nlanes); n++)
      if (goes_before(s, other->numbered[n])) wait_for(s, other, other->numbered[n]);
  kvs_racecheck_internal(before);
}
