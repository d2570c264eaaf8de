/* Submitting: from a checked plan to work queued on the device.
 *
 * Steps: find the lane; choose a path and get what it needs (nothing has moved, so any error fails the call); lock the
 * lane; wait for the start dependencies (order.c); issue, layer by layer if layers matter; record the end and let the
 * caller's stream wait for it. After the first issued copy the call does not fail: refused work is tried another way
 * (copies.c), and blocks that still fail are noted in the transfer. */
#include "paths/submit.h"

#include <stdio.h>
#include <stdlib.h>

#include "device/faults.h"
#include "lanes/buffers.h"
#include "lanes/failure.h"
#include "lanes/lane.h"
#include "lanes/late.h"
#include "lanes/order.h"
#include "lanes/peer.h"
#include "lanes/read_ids.h"
#include "lanes/transfer.h"
#include "lanes/verdicts.h"
#include "memory/watch.h"
#include "paths/choose.h"
#include "paths/copies.h"
#include "paths/loads_first.h"
#include "paths/parts.h"
#include "paths/table.h"
#include "paths/units.h"
#include "racecheck/racecheck.h"

/* -- issuing --------------------------------------------------------------------------------------------------- */

/* Positions in the lists where a layer begins and where it ends. SIZE_MAX: the end of all layers. */
static struct kvs_layer_end begin_of(const struct kvs_submission *s, size_t layer) {
  return layer ? s->work->scratch->layers[layer - 1] : (struct kvs_layer_end){0, 0, 0};
}

static struct kvs_layer_end end_of(const struct kvs_submission *s, size_t layer) {
  const struct kvs_scratch *scratch = s->work->scratch;
  if (layer != SIZE_MAX) return begin_of(s, layer);
  return (struct kvs_layer_end){scratch->copies.count, scratch->rects.count, scratch->rows.count};
}

/* Set the view to layers [layer, end). 0 and SIZE_MAX: everything. */
static void look_at(struct kvs_submission *s, size_t layer, size_t end) {
  const struct kvs_copies *all = &s->work->scratch->copies;
  const struct kvs_layer_end from = begin_of(s, layer), to = end_of(s, end);
  s->first_row = from.rows;
  s->rows_end = to.rows;
  s->first_rect = from.rects;
  s->rects_end = to.rects;
  s->view = (struct kvs_copies){.count = 0};
  if (all->count == 0) return;
  s->view = (struct kvs_copies){.dst = all->dst + from.copies,
                                .src = all->src + from.copies,
                                .nbytes = all->nbytes + from.copies,
                                .block = all->block + from.copies,
                                .count = to.copies - from.copies,
                                .capacity = to.copies - from.copies};
}

/* The path was refused: another one takes these layers and all later ones, or the transfer fails. */
static void try_again(struct kvs_submission *s, size_t layer, size_t end, const struct kvs_error *refusal) {
  const struct kvs_path_ops *row = kvs_paths[s->transfer->path];
  const enum kvs_path next = row->after_refusal ? row->after_refusal(s) : KVS_PATH_AUTO;
  struct kvs_error why;
  if (next == KVS_PATH_AUTO) {
    kvs_fail_all(s, refusal);
    return;
  }
  if (!s->work->codings && kvs_plan_copies(s, &why)) {
    kvs_fail_all(s, &why);
    return;
  }
  atomic_fetch_add(&s->engine->second_attempts, 1);
  s->transfer->path = next;
  look_at(s, layer, end);
  int status = kvs_paths[next]->issue(s, &why);
  if (kvs_is_lost(status))
    kvs_stop_issuing(s, &why);
  else if (status)
    kvs_fail_all(s, &why);
}

static void issue_view(struct kvs_submission *s, size_t layer, size_t end) {
  struct kvs_error why;
  size_t refused_end;
  int code = 0;
  kvs_dev_fault_copies(s->device, &s->view, &refused_end, &code);
  if (refused_end > s->view.count) {
    kvs_fail_driver(&why, KVS_REFUSED, code, "copy", "injected fault");
    for (size_t i = s->view.count; i < refused_end; i++) kvs_block_by_block(s, i, false, &why);
  }
  int status = kvs_paths[s->transfer->path]->issue(s, &why);
  if (kvs_is_lost(status))
    kvs_stop_issuing(s, &why);
  else if (status)
    try_again(s, layer, end, &why);
}

/* -- layers ---------------------------------------------------------------------------------------------------- */

/* Note the accesses of layers to the race checker, before the layers are queued. */
static void watch(struct kvs_submission *s, size_t layer, size_t end) {
  static const char *const names[] = {[KVS_D2H] = "D2H", [KVS_H2D] = "H2D", [KVS_OTHER_DIRECTION] = "copy"};
  const struct kvs_transfer *transfer = s->transfer;
  if (!kvs_racecheck_on()) return;
  struct kvs_race_accessor accessor = kvs_watch_accessor(s->engine, s->lane->stream, s->options->where);
  accessor.transfer = transfer->ticket;
  accessor.lane = s->lane->number;
  accessor.sequence = transfer->sequence;
  snprintf(accessor.what, sizeof accessor.what, "%s by %s", names[transfer->direction], kvs_path_name(transfer->path));
  const struct kvs_rects *all = &s->work->scratch->rects;
  for (size_t next = layer; next == layer || next < end; next++) { /* SIZE_MAX: all layers in one step */
    size_t after = end == SIZE_MAX ? end : next + 1;
    look_at(s, next, after);
    size_t from = begin_of(s, next).rects;
    const struct kvs_rects rects = {
        .items = all->items + from, .block = all->block + from, .count = end_of(s, after).rects - from};
    s->work->watch(s->work->call, transfer, after == SIZE_MAX ? after : next, &s->view, &rects, &accessor);
    if (after == SIZE_MAX) break;
  }
}

static void issue_span(struct kvs_submission *s, size_t layer, size_t end) {
  watch(s, layer, end);
  look_at(s, layer, end);
  if (!kvs_await_source(s)) return;
  issue_view(s, layer, end);
}

static size_t layer_group_end(const struct kvs_submission *s, size_t layer) {
  const struct kvs_path_ops *row = kvs_paths[s->transfer->path];
  return row->layer_group_end ? row->layer_group_end(s, layer) : layer + 1;
}

/* Every layer's event is recorded, even if its copies failed: streams that wait for the event must continue. */
static void issue_layers(struct kvs_submission *s) {
  struct kvs_transfer *transfer = s->transfer;
  struct kvs_error why;
  for (size_t layer = 0, end; layer < s->work->scratch->nlayers; layer = end) {
    end = layer_group_end(s, layer);
    for (size_t i = layer; i < end; i++)
      if (!s->fatal && !transfer->all_failed && kvs_order_before_layer(transfer, s->options, i, &why))
        kvs_fail_all(s, &why);
    if (!s->fatal && !transfer->all_failed) issue_span(s, layer, end);
    for (size_t i = layer; i < end && i < transfer->nlayers; i++)
      if (transfer->layers[i] && kvs_dev_event_record(s->device, transfer->layers[i], s->lane->stream, &why)) {
        kvs_engine_event_put(s->engine, transfer->layers[i]);
        transfer->layers[i] = 0;
      }
  }
}

static void issue(struct kvs_submission *s) {
  bool pageable = kvs_pageable(&s->work->scratch->regions);
  s->reads_early = s->work->direction != KVS_D2H && pageable;
  kvs_begin_giving(s, pageable);
  for (size_t i = 0; i < s->work->nlost; i++) kvs_note_failure(s, s->work->lost[i], &s->work->lost_error);
  if (s->work->layered)
    issue_layers(s);
  else
    issue_span(s, 0, SIZE_MAX);
}

static int prepare_layers(struct kvs_submission *s) {
  struct kvs_transfer *transfer = s->transfer;
  if (!s->options->layer_events) return KVS_OK;
  transfer->layers = calloc(s->work->nlayers ? s->work->nlayers : 1, sizeof *transfer->layers);
  if (!transfer->layers) return kvs_fail(s->err, KVS_NOMEM, "no memory for %zu layers", s->work->nlayers);
  for (int status; transfer->nlayers < s->work->nlayers; transfer->nlayers++) {
    status = kvs_engine_event_get(s->engine, &transfer->layers[transfer->nlayers], s->err);
    if (status) return status;
  }
  return KVS_OK;
}

/* -- the call -------------------------------------------------------------------------------------------------- */

/* Start dependencies of layers and lenders may add to the dependency mask later, so they need the record too. */
static int prepare_outcome(struct kvs_submission *s) {
  struct kvs_transfer *transfer = s->transfer;
  if (!s->work->settle || (!transfer->dependencies && !s->options->nafter_layers && !s->nlent)) return KVS_OK;
  struct kvs_failure **shared = s->work->outcome;
  transfer->outcome = shared && *shared ? *shared : kvs_failure_open(transfer->ticket);
  if (!transfer->outcome) return kvs_fail(s->err, KVS_NOMEM, "no memory to follow a transfer");
  if (!shared) return KVS_OK;
  *shared = transfer->outcome;
  atomic_fetch_add(&transfer->outcome->refs, 1); /* one reference each for the caller and the transfer */
  return KVS_OK;
}

static int submit_on_lane(struct kvs_submission *s) {
  struct kvs_lane *lane = s->lane;
  struct kvs_transfer *transfer = s->transfer;
  struct kvs_error ignored, why;
  (void)kvs_lane_reap(lane, &ignored);
  int status = kvs_lane_reserve(lane, transfer, s->err);
  s->leftovers = !status; /* in case the call is refused later */
  if (!status) status = kvs_lane_head(lane, s->ahead, &transfer->head, s->err);
  if (!status) status = kvs_order_before(transfer, s->work, s->options, s->err);
  if (!status) kvs_loads_first_wait(s);
  if (!status) status = prepare_outcome(s);
  if (!status) status = kvs_dev_event_record(s->device, transfer->start, transfer->head, s->err);
  if (status) {
    kvs_lane_unreserve(lane, transfer);
    return status;
  }
  transfer->sequence = ++lane->sequence;
  issue(s);
  if (s->taken && s->taken->close) s->taken->close(s);
  kvs_fetch_ids(s);
  if (kvs_order_behind(transfer, s->work, s->options, &why)) kvs_fail_all(s, &why);
  if (transfer->outcome) {
    transfer->outcome->dependencies |= transfer->dependencies;
    atomic_fetch_add(&transfer->outcome->running, 1);
  }
  if (s->work->settle) s->work->settle(s->work->call, transfer);
  kvs_lane_append(lane, transfer);
  return KVS_OK;
}

static void adopt_owner(struct kvs_transfer *transfer, const struct kvs_options *options) {
  transfer->owner = options->owner;
  transfer->release = options->owner ? options->release : NULL;
}

static void widen(struct kvs_bounds *bounds, const struct kvs_region *region) {
  if (bounds->high == 0 || region->base < bounds->low) bounds->low = region->base;
  if (region->base + region->nbytes > bounds->high) bounds->high = region->base + region->nbytes;
}

static void find_bounds(const struct kvs_regions *regions, struct kvs_transfer *transfer) {
  for (size_t i = 0; i < regions->count; i++)
    widen(kvs_region_is_of(&regions->items[i], transfer->engine->device->ordinal) ? &transfer->gpu : &transfer->cpu,
          &regions->items[i]);
}

static void count(struct kvs_engine *engine, const struct kvs_work *work) {
  const struct kvs_scratch *scratch = work->scratch;
  uint64_t copies = scratch->copies.count + scratch->rects.count;
  if (!copies && !work->planned) copies = scratch->rows.count * work->nslots;
  atomic_fetch_add(&engine->submitted, 1);
  atomic_fetch_add(&engine->copies, copies);
  if (work->entries > copies) atomic_fetch_add(&engine->merged, work->entries - copies);
}

static int submit_in_order(struct kvs_submission *s) {
  /* Two threads that share a stream may use two lanes. Their waits for the stream, and the stream's waits for them,
   * must not interleave. */
  pthread_mutex_t *stream =
      s->options->on_stream ? &s->engine->stream_locks[s->lane->stream_id % KVS_STREAM_LOCKS] : NULL;
  if (stream) pthread_mutex_lock(stream);
  pthread_mutex_lock(&s->lane->submit);
  adopt_owner(s->transfer, s->options);
  int status = submit_on_lane(s);
  pthread_mutex_unlock(&s->lane->submit);
  if (stream) pthread_mutex_unlock(stream);
  return status;
}

/* The lane comes first: what a path can take depends on it. */
static int submit(struct kvs_submission *s) {
  int status = kvs_peer_find(s->engine, &s->work->scratch->regions, &s->peer, &s->peer_direct, s->err);
  if (!status) status = kvs_lane_acquire(s->engine, s->options, s->work->direction, &s->lane, s->err);
  if (status) return status;
  status = kvs_choose_path(s, &s->transfer->path);
  if (!status) status = kvs_prepare_path(s);
  if (!status) status = prepare_layers(s);
  if (!status) kvs_loads_first_look(s);
  if (!status) status = submit_in_order(s);
  kvs_release_path(s);
  kvs_lane_release(s->lane, status != KVS_OK && s->leftovers);
  return status;
}

int kvs_submit(struct kvs_engine *engine, struct kvs_work *work, const struct kvs_options *options,
               struct kvs_transfer **out, struct kvs_error *err) {
  struct kvs_submission s = {
      .engine = engine, .device = engine->device, .link = engine->device, .work = work, .options = options, .err = err};
  s.transfer = kvs_transfer_new(engine, err);
  if (!s.transfer) return KVS_NOMEM;
  s.transfer->direction = work->direction;
  s.transfer->steps = options->nafter_layers > 0;
  s.transfer->nbytes = work->nbytes;
  s.transfer->link_nbytes = work->coded_nbytes ? work->coded_nbytes : work->nbytes;
  s.transfer->nblocks = work->nblocks;
  s.transfer->dependencies = work->dependencies;
  s.transfer->since_ns = options->since_ns ? options->since_ns : work->scratch->since_ns;
  s.transfer->ticket = atomic_fetch_add(&engine->tickets, 1) + 1;
  find_bounds(&work->scratch->regions, s.transfer);
  int status = work->on_device.ids ? kvs_read_ids_new(s.transfer, &work->on_device, err) : KVS_OK;
  if (!status && work->codings) status = kvs_verdicts_new(s.transfer, work, err);
  kvs_late_settle(engine);
  if (!status) status = submit(&s);
  if (status) {
    if (s.transfer->staging) kvs_engine_staging_put(engine, s.transfer->staging);
    s.transfer->staging = NULL;
    kvs_transfer_unref(s.transfer);
    return status;
  }
  if (s.fatal)
    kvs_engine_lose(engine); /* the transfer failed in its lane and keeps the memory that the device may still read */
  count(engine, work);
  *out = s.transfer;
  return KVS_OK;
}
