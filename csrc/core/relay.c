/* Path relay: a resident kernel gathers blocks into a ring in device memory (or scatters out of it), and the copy
 * engine moves whole slots of the ring; see kernels/kernels.h for who waits for what.
 *
 * What keeps it from hanging: each kernel is queued before the copies that wait for it; one relay a direction is on the
 * device at a time; whatever is refused on the way raises the abort word, which the kernel watches and which releases
 * all flags; a kernel that waits in vain for a quarter of a second does so by itself. Then the transfer is done again:
 * by the copy engine, if it is known here, else by a kernel that is always queued behind the relay and does nothing
 * unless it was given up. Either way it is done before the transfer's end, for whoever waits for it on the device too.
 */
#include "core/submit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/racecheck.h"

static const uint64_t PATIENCE_NS = 250000000;

/* -- the rings ------------------------------------------------------------------------------------------------- */

static const char *reason_against(const struct kvs_engine *engine) {
  const char *blocking = getenv("CUDA_LAUNCH_BLOCKING");
  const struct kvs_device_info *info = &engine->device->info;
  if (engine->disabled.relay) return "KVSWAP_DISABLE names it";
  if (engine->disabled.kernel) return "KVSWAP_DISABLE names 'kernel', which it needs";
  if (!info->kernels) return info->kernels_note;
  if (!info->memops) return "the driver has no stream memory operations";
  if (strcmp(engine->device->ops->kind, "cuda") == 0 && blocking && *blocking && strcmp(blocking, "0") != 0)
    return "CUDA_LAUNCH_BLOCKING is set, and it needs a kernel and copies at once";
  return NULL;
}

static int relay_open(struct kvs_engine *engine, struct kvs_relay *relay, struct kvs_error *err) {
  struct kvs_device *device = engine->device;
  size_t nbytes = (size_t)KVS_RING_SLOT_NBYTES * KVS_RING_SLOTS;
  uint64_t memory = 0;
  int status = kvs_dev_alloc(device, nbytes + 4096, &memory, err);
  relay->ring =
      (struct kvs_ring_shape){.address = memory, .slot_nbytes = KVS_RING_SLOT_NBYTES, .slots = KVS_RING_SLOTS};
  relay->flags = memory + nbytes;
  if (!status) status = kvs_dev_event_create(device, false, &relay->fork, err);
  if (!status) status = kvs_dev_event_create(device, false, &relay->idle, err);
  for (size_t i = 0; !status && i < KVS_RELAY_STREAMS; i++) {
    status = kvs_dev_stream_create(device, device->info.priority_high, &relay->copying[i], err);
    if (!status) status = kvs_dev_event_create(device, false, &relay->joins[i], err);
  }
  return status;
}

static void relay_close(struct kvs_engine *engine, struct kvs_relay *relay) {
  struct kvs_device *device = engine->device;
  struct kvs_error ignored;
  for (size_t i = 0; i < KVS_RELAY_STREAMS; i++) {
    if (relay->copying[i]) (void)kvs_dev_stream_destroy(device, relay->copying[i], &ignored);
    if (relay->joins[i]) (void)kvs_dev_event_destroy(device, relay->joins[i], &ignored);
    relay->copying[i] = relay->joins[i] = 0;
  }
  if (relay->idle) (void)kvs_dev_event_destroy(device, relay->idle, &ignored);
  if (relay->fork) (void)kvs_dev_event_destroy(device, relay->fork, &ignored);
  if (relay->ring.address) (void)kvs_dev_free(device, relay->ring.address, &ignored);
  relay->idle = relay->fork = relay->ring.address = 0;
}

void kvs_relays_open(struct kvs_engine *engine) {
  const char *why = reason_against(engine);
  struct kvs_error err = {.status = KVS_OK};
  for (int i = 0; !why && i < 2; i++)
    if (relay_open(engine, &engine->relays[i], &err)) why = err.message;
  snprintf(engine->relay_note, sizeof engine->relay_note, "%.150s", why ? why : "");
  if (why) kvs_relays_close(engine);
}

void kvs_relays_close(struct kvs_engine *engine) {
  for (int i = 0; i < 2; i++) relay_close(engine, &engine->relays[i]);
}

/* Everything that was queued for the last transfer is over, as far as anybody can see. */
static bool drained(struct kvs_device *device, const struct kvs_relay *relay) {
  struct kvs_error ignored;
  bool idle = kvs_dev_stream_query(device, relay->spine, &ignored) == KVS_OK;
  for (size_t i = 0; i < KVS_RELAY_STREAMS; i++)
    idle = idle && kvs_dev_stream_query(device, relay->copying[i], &ignored) == KVS_OK;
  return idle;
}

bool kvs_relay_usable(struct kvs_engine *engine, struct kvs_relay *relay) {
  if (atomic_load(&relay->spine) == 0) return true;
  if (pthread_mutex_trylock(&relay->lock)) return false; /* somebody queues, which may take long */
  bool before = kvs_racecheck_internal(true);
  if (relay->spine && drained(engine->device, relay)) atomic_store(&relay->spine, 0);
  kvs_racecheck_internal(before);
  bool usable = relay->spine == 0;
  pthread_mutex_unlock(&relay->lock);
  return usable;
}

/* Whether `idle` has been reached. Not asked of stepped devices, where looking makes work go on. */
static bool is_idle(struct kvs_engine *engine, const struct kvs_relay *relay) {
  struct kvs_error ignored;
  bool before = kvs_racecheck_internal(true);
  bool idle = engine->device->stepped || kvs_dev_event_query(engine->device, relay->idle, &ignored) == KVS_OK;
  kvs_racecheck_internal(before);
  return idle;
}

/* One that waits for a late producer holds up all relays that come after it, whatever their streams: who can do
 * otherwise should. Transfers of one lane wait for each other anyhow; which lane it will be is known later, so here the
 * caller's stream stands for it (that of each thread is another behind one handle). */
bool kvs_relay_free(struct kvs_engine *engine, struct kvs_relay *relay, const struct kvs_options *options) {
  if (pthread_mutex_trylock(&relay->lock)) return false;
  const struct kvs_relay_user *last = &relay->last;
  bool same = last->lane && last->on_stream == options->on_stream && last->stream == options->stream &&
              last->priority == options->priority && !(options->on_stream && options->stream == KVS_STREAM_PER_THREAD);
  bool free = same || is_idle(engine, relay);
  pthread_mutex_unlock(&relay->lock);
  return free;
}

bool kvs_relay_gave_up(const struct kvs_staging *staging) {
  return __atomic_load_n((const uint32_t *)(uintptr_t)staging->host, __ATOMIC_ACQUIRE) != 0;
}

/* -- a transfer ------------------------------------------------------------------------------------------------ */

struct relaying {
  struct kvs_submission *s;
  struct kvs_relay *relay;
  struct kvs_packing *packing;
  struct kvs_relay_params params; /* of the next kernel */
  size_t segment;                 /* its first */
  uint32_t *abort_word;
  uint64_t units; /* of the kernel that would do it again */
  unsigned warps;
};

static uint64_t filled_flag(const struct kvs_relay *relay, unsigned slot) { return relay->flags + 4ull * slot; }

static uint64_t emptied_flag(const struct kvs_relay *relay, unsigned slot) {
  return relay->flags + 4ull * (KVS_RELAY_SLOTS + slot);
}

static uint64_t aborted_flag(const struct kvs_relay *relay) { return relay->flags + 4ull * (2 * KVS_RELAY_SLOTS); }

static void raise_abort(const struct relaying *r) { __atomic_store_n(r->abort_word, 1u, __ATOMIC_RELEASE); }

/* Everything that the kernels read, in the staging and then on the device. */
static int place(struct relaying *r, struct kvs_error *why) {
  struct kvs_submission *s = r->s;
  struct kvs_packing *packing = r->packing;
  uint64_t unused;
  int status = KVS_OK;
  r->abort_word = kvs_stage(s, sizeof *r->abort_word, &unused);
  *r->abort_word = 0;
  size_t from = s->staged;
  if (s->listed) {
    const struct kvs_piece *pieces;
    r->units = kvs_place_list(s, &pieces);
    status = kvs_pack_list(packing, pieces, (size_t)r->units, s->work->direction, &r->relay->ring,
                           &s->work->scratch->regions, why);
    if (!status)
      memcpy(kvs_stage(s, (size_t)r->units * sizeof *packing->packed, &r->params.packed), packing->packed,
             (size_t)r->units * sizeof *packing->packed);
  } else {
    status = kvs_place_grid(s, why);
    s->units.nrows = (uint32_t)s->work->scratch->rows.count;
    r->units = (uint64_t)s->units.nrows * s->units.parts * packing->npairs;
  }
  if (status) return status;
  memcpy(kvs_stage(s, packing->nsegments * sizeof *packing->segments, &r->params.segments), packing->segments,
         packing->nsegments * sizeof *packing->segments);
  return kvs_upload(s, from, why);
}

/* Flags down, and the copies behind all that the spine waits for. */
static int start(struct relaying *r, struct kvs_error *why) {
  struct kvs_submission *s = r->s;
  struct kvs_relay *relay = r->relay;
  int status = place(r, why);
  if (!status) status = kvs_dev_fill(s->device, relay->flags, 0, KVS_RELAY_FLAGS, s->lane->spine, why);
  if (!status) status = kvs_dev_event_record(s->device, relay->fork, s->lane->spine, why);
  for (size_t i = 0; !status && i < KVS_RELAY_STREAMS; i++)
    status = kvs_dev_stream_wait(s->device, relay->copying[i], relay->fork, why);
  r->params.units = s->units;
  r->params.abort_word = (uint64_t)(uintptr_t)r->abort_word;
  return status;
}

/* A kernel for fillings [from, to), whose segments come after those of the kernel before. */
static int launch(struct relaying *r, size_t from, size_t to, struct kvs_error *why) {
  struct kvs_launch launch = kvs_launch_of(r->s, KVS_KERNEL_RELAY, r->units);
  const struct kvs_segment *segments = r->packing->segments + r->segment;
  uint32_t count = 0;
  for (size_t filling = from; filling < to; filling += segments[count++].last) {}
  r->params.first = from;
  r->params.nsegments = count;
  launch.params = &r->params;
  launch.params_nbytes = sizeof r->params;
  r->warps = launch.grid * launch.threads / 32;
  int status = kvs_dev_launch(r->s->device, &launch, r->s->lane->spine, why);
  r->params.segments += count * sizeof *segments;
  r->segment += count;
  return status;
}

static int copy_filling(const struct relaying *r, size_t filling, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_copies *copies = &r->packing->copies;
  size_t from = filling ? r->packing->ends[filling - 1] : 0, to = r->packing->ends[filling];
  uint64_t mean = copies->count ? r->s->work->nbytes / copies->count : 0;
  size_t most = r->s->engine->disabled.batch ? 1 : kvs_batch_part(mean);
  int status = KVS_OK;
  for (size_t part; !status && from < to; from += part) {
    part = to - from < most ? to - from : most;
    status = part == 1
                 ? kvs_dev_copy(r->s->device, copies->dst[from], copies->src[from], copies->nbytes[from], stream, why)
                 : kvs_dev_copy_batch(r->s->device, copies, from, from + part, stream, why);
  }
  return status;
}

static int relay_filling(const struct relaying *r, size_t filling, struct kvs_error *why) {
  struct kvs_device *device = r->s->device;
  kvs_stream stream = r->relay->copying[filling % KVS_RELAY_STREAMS];
  unsigned slot = (unsigned)(filling % r->relay->ring.slots);
  uint32_t use = (uint32_t)(filling / r->relay->ring.slots) + 1;
  uint64_t filled = filled_flag(r->relay, slot), emptied = emptied_flag(r->relay, slot);
  int status = KVS_OK;
  if (r->params.gather)
    status = kvs_dev_wait32(device, filled, use * r->warps, stream, why);
  else if (use > 1)
    status = kvs_dev_wait32(device, emptied, (use - 1) * r->warps, stream, why);
  if (!status) status = copy_filling(r, filling, stream, why);
  if (!status) status = kvs_dev_write32(device, r->params.gather ? emptied : filled, use, stream, why);
  return status;
}

/* The spine goes on once the copies that are queued so far are through. */
static int join(const struct relaying *r, struct kvs_error *why) {
  struct kvs_device *device = r->s->device;
  int status = KVS_OK;
  for (size_t i = 0; i < KVS_RELAY_STREAMS; i++)
    for (int tries = 0, one = KVS_REFUSED; one && tries < 2; tries++) { /* much depends on it */
      one = kvs_dev_event_record(device, r->relay->joins[i], r->relay->copying[i], why);
      if (!one) one = kvs_dev_stream_wait(device, r->s->lane->spine, r->relay->joins[i], why);
      if (one && tries) status = one;
    }
  return status;
}

/* Whoever uses the ring next comes after all that is on the spine now, and on the streams that it joined. */
static void end_use(const struct relaying *r) {
  struct kvs_error ignored;
  if (kvs_dev_event_record(r->s->device, r->relay->idle, r->s->lane->spine, &ignored))
    r->relay->spine = r->s->lane->spine;
}

/* How many kernels share a transfer. Whatever keeps SMs slows a model down, so in the background a long transfer gives
 * them back now and then. */
static size_t count_turns(const struct relaying *r) {
  const struct kvs_submission *s = r->s;
  uint64_t turn = atomic_load(&s->engine->relay_turn);
  uint64_t turns = s->options->priority == KVS_PRIORITY_BACKGROUND ? (s->work->nbytes + turn / 2) / turn : 1;
  return turns < 1 ? 1 : turns < r->packing->nfillings ? (size_t)turns : r->packing->nfillings;
}

/* A kernel and its copies. One that follows another comes when the ring is empty (gathering), or full: its SMs are the
 * model's until then, and the copy engine hardly stops. What is copied ahead of it waits for the kernel before. */
static int take_turn(struct relaying *r, size_t from, size_t to, struct kvs_error *why) {
  size_t ahead = from, ring = r->relay->ring.slots;
  int status = KVS_OK;
  if (from > 0) {
    for (; !status && !r->params.gather && ahead < to && ahead < from + ring; ahead++)
      status = relay_filling(r, ahead, why);
    if (!status) status = join(r, why);
  }
  if (!status) status = launch(r, from, to, why);
  for (; !status && ahead < to; ahead++) status = relay_filling(r, ahead, why);
  return status;
}

static int relay_locked(struct relaying *r, struct kvs_error *why) {
  struct kvs_submission *s = r->s;
  struct kvs_error unjoined;
  if (r->relay->spine) return kvs_fail(why, KVS_REFUSED, "the transfer before cannot be waited for");
  if (s->picked && r->relay->last.lane != s->lane && !is_idle(s->engine, r->relay)) /* taken since it was picked */
    return kvs_fail(why, KVS_REFUSED, "another lane uses the ring");
  int status = kvs_dev_stream_wait(s->device, s->lane->spine, r->relay->idle, why);
  if (status) return status; /* the spine does not come after the transfer before: `idle` still tells of that one */
  r->relay->last = (struct kvs_relay_user){s->lane, s->options->on_stream, s->options->stream, s->options->priority};
  status = start(r, why);
  if (status) { /* no copy was queued, but perhaps what clears the flags */
    end_use(r);
    return status;
  }
  size_t fillings = r->packing->nfillings, turns = count_turns(r);
  for (size_t turn = 0; !status && turn < turns; turn++)
    status = take_turn(r, fillings * turn / turns, fillings * (turn + 1) / turns, why);
  if (status) raise_abort(r);
  if (join(r, &unjoined)) { /* nobody can come after the copies any more, so nothing that they wrote can be trusted */
    raise_abort(r);
    r->relay->spine = s->lane->spine;
    s->transfer->unjoined = true;
    kvs_fail_whole(s, &unjoined);
    if (!kvs_beyond_hope(unjoined.status)) return KVS_OK;
    *why = unjoined;
    return unjoined.status;
  }
  if (!status) { /* unless it is known already that it must be done again */
    status = kvs_launch_units(s, &s->units, r->units, aborted_flag(r->relay), why);
    if (status) raise_abort(r);
  }
  end_use(r);
  return status;
}

int kvs_issue_relay(struct kvs_submission *s, struct kvs_error *why) {
  struct kvs_relay *relay = &s->engine->relays[s->work->direction];
  struct relaying r = {.s = s,
                       .relay = relay,
                       .packing = &s->work->scratch->packing,
                       .params = {.ring = relay->ring.address,
                                  .slot_nbytes = relay->ring.slot_nbytes,
                                  .flags = relay->flags,
                                  .patience_ns = PATIENCE_NS,
                                  .nslots = relay->ring.slots,
                                  .gather = s->work->direction == KVS_D2H,
                                  .chunk = KVS_RING_CHUNK}};
  if (s->listed ? s->view.count == 0 : s->work->nslots == 0 || s->work->scratch->rows.count == 0) return KVS_OK;
  pthread_mutex_lock(&r.relay->lock);
  int status = relay_locked(&r, why);
  pthread_mutex_unlock(&r.relay->lock);
  s->transfer->relayed = status == KVS_OK && !s->transfer->all_failed; /* else nobody did it again */
  return status;
}
