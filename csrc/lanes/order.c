/* Order: what a transfer starts after, and what comes after it, as waits for events and records of events. Start
 * dependencies are waited for on the transfer's head (the lane stream, or the burst stream that feeds it). The end is
 * recorded on the lane stream. Nothing here blocks. The caller holds the lane (lane->submit). */
#include <inttypes.h>
#include <stdlib.h>

#include "device/share.h"
#include "lanes/handle.h"
#include "lanes/lane.h"
#include "lanes/order.h"
#include "lanes/peer.h"
#include "lanes/registry.h"
#include "lanes/state.h"
#include "lanes/transfer.h"
#include "racecheck/racecheck.h"

static int head_follows(struct kvs_transfer *transfer, kvs_stream stream, struct kvs_error *err) {
  return kvs_lane_fork(transfer->lane, stream, transfer->head, err);
}

static int head_waits_for_stream(struct kvs_transfer *transfer, kvs_stream stream, const char *what,
                                 struct kvs_error *err) {
  struct kvs_stream_info info;
  int status = kvs_stream_ask(transfer->engine->device, stream, what, &info, err);
  return status ? status : head_follows(transfer, stream, err);
}

/* Another device's event can be waited for only between devices of one kind. */
static int refuse_foreign(struct kvs_engine *engine, size_t index, struct kvs_transfer *before, struct kvs_error *err) {
  struct kvs_device *device = engine->device, *other = before->engine->device;
  struct kvs_error ignored;
  if (other == device || kvs_transfer_poll(before, &ignored) == KVS_OK) return KVS_OK;
  if (!kvs_dev_can_wait_for(device, other))
    return kvs_fail(err, KVS_INVALID, "after[%zu] is a transfer of %s, which %s cannot wait for: wait() for it first",
                    index, before->engine->name, engine->name);
  return kvs_dev_check(other, err);
}

/* A failed dependency is returned as an error: the new transfer would read wrong bytes. */
static int head_waits_for_transfer(struct kvs_transfer *transfer, size_t index, struct kvs_transfer *before,
                                   struct kvs_error *err) {
  kvs_event end;
  int status = refuse_foreign(transfer->engine, index, before, err);
  if (status) return status;
  if (kvs_racecheck_on()) kvs_racecheck_follow(before->point, transfer->engine->device, transfer->head);
  status = kvs_transfer_pin(before, &end, err);
  if (status != KVS_NOT_READY) return status;
  kvs_peer_depend(transfer, before->engine);
  transfer->dependencies |= before->dependencies;
  status = kvs_dev_stream_wait_foreign(transfer->engine->device, transfer->head, before->engine->device, end, err);
  kvs_transfer_unpin(before);
  return status;
}

/* The stream may have been destroyed and its handle reused. */
static int head_waits_for_compute(struct kvs_transfer *transfer, struct kvs_error *err) {
  struct kvs_engine *engine = transfer->engine;
  struct kvs_stream_info info;
  pthread_mutex_lock(&engine->lock);
  kvs_stream stream = engine->compute_stream;
  uint64_t id = engine->compute_id;
  pthread_mutex_unlock(&engine->lock);
  int status = kvs_stream_ask(engine->device, stream, "the compute stream", &info, err);
  if (!status && id && info.id != id)
    return kvs_fail(err, KVS_INVALID,
                    "the compute stream (0x%" PRIx64
                    ") was destroyed, and another has its handle now: set_compute_stream() "
                    "again, and keep the stream as long as the device uses it",
                    stream);
  return status ? status : head_follows(transfer, stream, err);
}

static int head_waits_for_event(struct kvs_transfer *transfer, const struct kvs_after *after, struct kvs_error *err) {
  struct kvs_device *device = transfer->engine->device;
  struct kvs_device *other = after->engine ? after->engine->device : device;
  if (other != device && kvs_racecheck_on()) kvs_racecheck_order(other, 0, after->handle, device, transfer->head);
  if (after->engine) kvs_peer_depend(transfer, after->engine);
  return kvs_dev_stream_wait_foreign(device, transfer->head, other, after->handle, err);
}

static int head_waits_after(struct kvs_transfer *transfer, const struct kvs_after *after, size_t index,
                            struct kvs_error *err) {
  switch (after->kind) {
  case KVS_AFTER_STREAM:
    return head_waits_for_stream(transfer, after->handle, "a stream in after", err);
  case KVS_AFTER_EVENT:
    return head_waits_for_event(transfer, after, err);
  case KVS_AFTER_TRANSFER:
    return head_waits_for_transfer(transfer, index, after->transfer, err);
  case KVS_AFTER_NONE:
    break;
  }
  return KVS_OK;
}

/* -- hazards --------------------------------------------------------------------------------------------------- */

/* Read the progress of all lanes. Under the race checker no lane has progress, so that its findings do not depend on
 * what has ended. Caller holds hazard_lock, as for all hazards below. */
static void look_at_progress(struct kvs_engine *engine) {
  struct kvs_progress *progress = &engine->progress;
  progress->lanes = atomic_load(&engine->nlanes);
  for (unsigned i = 0; i < progress->lanes; i++)
    progress->done[i] = kvs_racecheck_on() ? 0 : atomic_load(&engine->numbered[i]->ended);
}

/* Every transfer that uses the table waits for the inherited work until that has ended. */
static void add_inherited(struct kvs_engine *engine, struct kvs_table *table) {
  bool over = true;
  if (!table->inherited) return;
  for (unsigned i = 0; i < engine->progress.lanes; i++) {
    if (table->inherited[i] <= engine->progress.done[i]) continue;
    over = false;
    if (engine->needs.sequence[i][KVS_WAW] < table->inherited[i])
      engine->needs.sequence[i][KVS_WAW] = table->inherited[i];
  }
  if (!over) return;
  free(table->inherited);
  table->inherited = NULL;
}

static const int64_t *slots_of(const struct kvs_work *work, const struct kvs_touch *touch) {
  if (touch->slots) return touch->slots;
  return touch->write ? work->dst_slots : work->src_slots;
}

static void find_needs(const struct kvs_transfer *transfer, const struct kvs_work *work) {
  struct kvs_engine *engine = transfer->engine;
  unsigned lane = transfer->lane->number;
  look_at_progress(engine);
  kvs_needs_reset(&engine->needs, engine->progress.lanes);
  for (size_t i = 0; i < work->ntouches; i++) {
    const struct kvs_touch *touch = &work->touches[i];
    const int64_t *slots = slots_of(work, touch);
    if (touch->whole)
      kvs_hazards_whole(&touch->table->hazards, touch->write, lane, &engine->progress, &engine->needs);
    else if (touch->write)
      kvs_hazards_write(&touch->table->hazards, slots, work->nslots, lane, &engine->progress, &engine->needs);
    else
      kvs_hazards_read(&touch->table->hazards, slots, work->nslots, lane, &engine->progress, &engine->needs);
    add_inherited(engine, touch->table);
  }
}

/* The sequence of another lane to wait for, and the hazards that need it (a bit each). */
static uint64_t farthest(const struct kvs_engine *engine, unsigned lane, uint64_t waited, unsigned *reasons) {
  unsigned skipped = atomic_load(&engine->skipped_hazards);
  uint64_t most = 0;
  *reasons = 0;
  for (unsigned kind = 0; kind < KVS_HAZARDS; kind++) {
    uint64_t sequence = engine->needs.sequence[lane][kind];
    if (sequence <= waited || skipped >> kind & 1) continue;
    *reasons |= 1u << kind;
    if (sequence > most) most = sequence;
  }
  return most;
}

/* Race checker only: the dependency has ended, and this transfer comes after it. */
static void follow_ended(struct kvs_transfer *transfer, struct kvs_lane *before, uint64_t sequence) {
  if (!kvs_racecheck_on()) return;
  struct kvs_race_point *point = kvs_lane_point(before, sequence);
  kvs_racecheck_follow(point, transfer->engine->device, transfer->head);
  kvs_racecheck_point_free(point);
}

static int wait_for_lane(struct kvs_transfer *transfer, unsigned number, struct kvs_error *err) {
  struct kvs_engine *engine = transfer->engine;
  struct kvs_lane *lane = transfer->lane;
  struct kvs_lane *other = engine->numbered[number];
  struct kvs_transfer *before;
  kvs_event end;
  unsigned reasons;
  uint64_t sequence = farthest(engine, number, lane->waited[number], &reasons);
  if (!sequence) return KVS_OK;
  int status = kvs_lane_pin(other, sequence, &before, &end, err);
  if (status == KVS_UNSUPPORTED) { /* the transfer has no end event; it may have ended since the last reap */
    (void)kvs_lane_reap(other, err);
    status = kvs_lane_pin(other, sequence, &before, &end, err);
  }
  if (status == KVS_OK) follow_ended(transfer, other, sequence);
  if (status == KVS_NOT_READY) {
    transfer->dependencies |= before->dependencies; /* dependencies are transitive */
    status = kvs_dev_stream_wait(engine->device, transfer->head, end, err);
    kvs_transfer_unpin(before);
    kvs_transfer_drop(before);
    for (unsigned kind = 0; !status && kind < KVS_HAZARDS; kind++)
      if (reasons >> kind & 1) atomic_fetch_add(&engine->waits[kind], 1);
  }
  if (!status) lane->waited[number] = sequence;
  return status;
}

static int wait_for_hazards(struct kvs_transfer *transfer, const struct kvs_work *work, struct kvs_error *err) {
  int status = KVS_OK;
  for (size_t i = 0; !status && work->foreign && i < work->foreign->count; i++)
    status = kvs_peer_wait(transfer, &work->foreign->items[i], err);
  if (status || !work->ntouches) return status;
  find_needs(transfer, work);
  for (unsigned i = 0; !status && i < transfer->engine->needs.lanes; i++)
    if (i != transfer->lane->number) status = wait_for_lane(transfer, i, err);
  return status;
}

static void note_hazards(const struct kvs_transfer *transfer, const struct kvs_work *work) {
  kvs_stamp stamp = kvs_stamp_of(transfer->lane->number, transfer->sequence);
  for (size_t i = 0; i < work->ntouches; i++) {
    const struct kvs_touch *touch = &work->touches[i];
    const int64_t *slots = slots_of(work, touch);
    if (touch->whole)
      kvs_hazards_note_whole(&touch->table->hazards, touch->write, stamp);
    else if (touch->write)
      kvs_hazards_note_write(&touch->table->hazards, slots, work->nslots, stamp);
    else
      kvs_hazards_note_read(&touch->table->hazards, slots, work->nslots, stamp, &transfer->engine->progress);
  }
}

/* -- before and behind ----------------------------------------------------------------------------------------- */

static int check_event(const struct kvs_transfer *transfer, const struct kvs_after *after, struct kvs_error *err) {
  bool before = kvs_racecheck_internal(true);
  struct kvs_engine *engine = after->engine ? after->engine : transfer->engine;
  int status = kvs_dev_event_query(engine->device, after->handle, err);
  kvs_racecheck_internal(before);
  return status == KVS_NOT_READY ? KVS_OK : status;
}

static int check_waitable(const struct kvs_transfer *transfer, size_t index, struct kvs_transfer *before,
                          struct kvs_error *err) {
  kvs_event end;
  int status = refuse_foreign(transfer->engine, index, before, err);
  if (!status) status = kvs_transfer_pin(before, &end, err);
  if (status != KVS_NOT_READY) return status;
  kvs_transfer_unpin(before);
  return KVS_OK;
}

/* Check the start dependencies of layers before anything moves: one that cannot be waited for refuses the call. */
static int check_layers(const struct kvs_transfer *transfer, const struct kvs_options *options, struct kvs_error *err) {
  struct kvs_stream_info info;
  int status = KVS_OK;
  for (size_t i = 0; !status && i < options->nafter_layers; i++) {
    const struct kvs_after *after = &options->after_layers[i];
    if (after->kind == KVS_AFTER_STREAM)
      status = kvs_stream_ask(transfer->engine->device, after->handle, "a stream in after_layers", &info, err);
    if (after->kind == KVS_AFTER_EVENT) status = check_event(transfer, after, err);
    if (after->kind == KVS_AFTER_TRANSFER) status = check_waitable(transfer, i, after->transfer, err);
  }
  return status;
}

int kvs_order_before(struct kvs_transfer *transfer, const struct kvs_work *work, const struct kvs_options *options,
                     struct kvs_error *err) {
  int status = options->on_stream ? head_waits_for_stream(transfer, options->stream, "the stream", err) : KVS_OK;
  if (!status && (!options->on_stream || options->after_compute)) status = head_waits_for_compute(transfer, err);
  if (!status) status = check_layers(transfer, options, err);
  for (size_t i = 0; !status && i < options->nafter; i++)
    status = head_waits_after(transfer, &options->after[i], i, err);
  return status ? status : wait_for_hazards(transfer, work, err);
}

int kvs_order_before_layer(struct kvs_transfer *transfer, const struct kvs_options *options, size_t layer,
                           struct kvs_error *err) {
  return layer < options->nafter_layers ? head_waits_after(transfer, &options->after_layers[layer], layer, err)
                                        : KVS_OK;
}

/* Without an end event the transfer ends when the lane stream is idle. */
static void drop_end_event(struct kvs_transfer *transfer) {
  struct kvs_error ignored;
  if (transfer->end) (void)kvs_dev_event_destroy(transfer->engine->device, transfer->end, &ignored);
  transfer->end = 0;
}

int kvs_order_behind(struct kvs_transfer *transfer, const struct kvs_work *work, const struct kvs_options *options,
                     struct kvs_error *err) {
  struct kvs_device *device = transfer->engine->device;
  struct kvs_error ignored;
  int status = kvs_dev_event_record(device, transfer->end, transfer->lane->stream, err);
  if (status || transfer->unjoined) drop_end_event(transfer);
  if (kvs_racecheck_on()) transfer->point = kvs_racecheck_point(device, transfer->lane->stream);
  note_hazards(transfer, work);
  if (!options->on_stream) return status;
  if (transfer->end && !(status = kvs_dev_stream_wait(device, options->stream, transfer->end, err))) return KVS_OK;
  /* The copies run even though recording failed, and the caller's later work must come after them. */
  if (!kvs_dev_event_record(device, transfer->lane->fork, transfer->lane->stream, &ignored))
    (void)kvs_dev_stream_wait(device, options->stream, transfer->lane->fork, &ignored);
  return status;
}
