/* Path burst, D2H: a kernel at the GPU's full width gathers blocks into a slot of device memory, and the copy engine
 * moves the slot to the host in as few copies as the host's runs allow. H2D: the copy engine fills the slot, and a
 * kernel scatters it.
 *
 * A burst has two stages. The second runs on the lane stream, the first on the burst stream, so that a kernel and a
 * copy overlap. Two events a slot join them: `packed` (the second stage may begin) and `free` (the slot may be reused).
 * Everything is queued in the call, no kernel spins on another, and the end of the lane stream is the end of the
 * transfer. A transfer of one burst has both stages on the lane stream and needs no `packed`.
 *
 * If one side is device memory and the other is not, no transfer of the lane can read what another one writes. Then
 * start dependencies are waited for on the burst stream alone, and the first stage overlaps the copies of the previous
 * transfer.
 *
 * After a refused driver call the state of a slot is unknown: the set is not used until both streams are idle, and the
 * copy engine repeats the transfer behind that work. */
#include "paths/submit.h"

#include <string.h>

#include "lanes/buffers.h"
#include "lanes/lane.h"
#include "racecheck/racecheck.h"

enum {
  LAYER_NBYTES = 2 << 20, /* least bytes of a group of layers */
  LAYER_RUN_NBYTES = 128 << 10,
  LEAST_LAYER_GROUPS = 4,
  MOST_LAYER_GROUPS = 8,
  LAUNCH_NBYTES = 32 << 20, /* most bytes of layers that path kernel copies by one launch */
};

/* -- preparing ------------------------------------------------------------------------------------------------- */

/* Layers go in groups: small enough that the first arrives early, large enough for the link and for the runs of a
 * block, which may be copies of their own. */
static size_t layer_groups(const struct kvs_work *work) {
  uint64_t groups = work->nslots ? work->nbytes / work->nslots / LAYER_RUN_NBYTES : 0;
  uint64_t layers = work->scratch->nlayers, large = work->nbytes / LAYER_NBYTES;
  if (groups < LEAST_LAYER_GROUPS) groups = LEAST_LAYER_GROUPS;
  if (groups > MOST_LAYER_GROUPS) groups = MOST_LAYER_GROUPS;
  if (groups > layers) groups = layers;
  if (groups > large) groups = large;
  return groups ? (size_t)groups : 1;
}

/* A layer with a start dependency of its own begins a group, since that dependency may wait for the previous layer. */
static bool starts_alone(const struct kvs_submission *s, size_t layer) {
  const struct kvs_options *options = s->options;
  return layer < options->nafter_layers && options->after_layers[layer].kind != KVS_AFTER_NONE;
}

static bool begins_group(const struct kvs_submission *s, size_t layer) {
  size_t layers = s->work->scratch->nlayers, groups = layer_groups(s->work);
  return starts_alone(s, layer) || layer == 0 || layer * groups / layers != (layer - 1) * groups / layers;
}

/* The link idles between launches. Measured, H200, 512 MiB: 10.9 ms to the host by one launch, 11.9 back by 64. But a
 * model begins when it has the first layers, and ends after the last ones. So groups grow, and shrink at the end. */
static size_t layers_of_launch(const struct kvs_work *work, size_t layers, size_t layer) {
  size_t size = (layers - layer) / 2;
  uint64_t mean = work->nbytes / layers + 1, least = LAYER_NBYTES / mean, most = LAUNCH_NBYTES / mean;
  if (size > layer) size = layer;
  if (size > most) size = (size_t)most;
  if (size < least) size = (size_t)least;
  return size ? size : 1;
}

bool kvs_is_one_launch(const struct kvs_work *work) {
  size_t layers = work->nlayers;
  return !work->layered || layers < 2 || layers_of_launch(work, layers, 0) >= layers;
}

size_t kvs_layer_group_end(const struct kvs_submission *s, size_t layer) {
  const struct kvs_work *work = s->work;
  size_t end = layer + 1, layers = work->scratch->nlayers;
  if (s->transfer->path == KVS_PATH_BURST)
    while (end < layers && !begins_group(s, end)) end++;
  if (s->transfer->path == KVS_PATH_KERNEL)
    for (size_t size = layers_of_launch(work, layers, layer);
         end < layers && end - layer < size && !starts_alone(s, end);)
      end++;
  return end;
}

int kvs_pack_for_burst(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  struct kvs_scratch *scratch = work->scratch;
  uint64_t most = s->slots->slot_nbytes;
  size_t *ends, nends = 0;
  if (work->packed) return KVS_OK;
  work->packed = true;
  if (!work->layered) return kvs_pack_rows(&scratch->rows, work->direction, most, NULL, 0, &scratch->packing, s->err);
  int status = kvs_packing_ends(&scratch->packing, scratch->nlayers, &ends, s->err);
  for (size_t layer = 0; !status && layer < scratch->nlayers; layer++)
    if (layer + 1 == scratch->nlayers || begins_group(s, layer + 1)) ends[nends++] = scratch->layers[layer].rows;
  return status ? status : kvs_pack_rows(&scratch->rows, work->direction, most, ends, nends, &scratch->packing, s->err);
}

/* Whether the first stage may start before earlier transfers of the lane end: not with memory that may be on either
 * side, where one stage could overtake the other, nor under the race checker. */
static bool may_run_ahead(const struct kvs_submission *s) {
  const struct kvs_regions *regions = &s->work->scratch->regions;
  for (size_t i = 0; i < regions->count; i++)
    if (regions->items[i].memory == KVS_MEMORY_ORDINARY || regions->items[i].memory == KVS_MEMORY_MANAGED) return false;
  return !kvs_racecheck_on();
}

/* For example, all its source blocks are lost. */
static bool is_empty(const struct kvs_submission *s) {
  return s->listed ? s->work->scratch->copies.count == 0 : s->work->nslots == 0 || s->work->scratch->rows.count == 0;
}

/* Without overlap the lane stream alone is as good. Background transfers use it alone too: the link then pauses during
 * each kernel, and any other pause would need a kernel that occupies an SM. */
int kvs_prepare_burst(struct kvs_submission *s) {
  bool list = kvs_wants_list(s);
  int status = list ? kvs_prepare_list(s) : kvs_pack_for_burst(s);
  if (!status && !list) status = kvs_prepare_grid(s);
  if (status) return status;
  bool one = kvs_is_one_burst(s->work->nbytes, s->slots->slot_nbytes) && !s->options->nafter_layers;
  one = one || is_empty(s) || s->options->priority == KVS_PRIORITY_BACKGROUND;
  s->first = one ? s->lane->stream : s->lane->burst_stream;
  s->ahead = !one && may_run_ahead(s);
  return KVS_OK;
}

/* -- issuing --------------------------------------------------------------------------------------------------- */

/* Measured, H200, beside a decode step: gathering costs the step 0.006 less with two CTAs an SM than with four,
 * scattering 0.005 more. */
static unsigned full_width(const struct kvs_submission *s) {
  unsigned sms = s->device->info.sms > 0 ? (unsigned)s->device->info.sms : 1;
  return s->options->max_ctas ? s->options->max_ctas : (s->work->direction == KVS_D2H ? 2 : 4) * sms;
}

/* A list uploads its pieces. A grid uploads pairs that are not uploaded yet, if they are too many for kernel
 * parameters. */
static int upload(struct kvs_submission *s, const struct kvs_burst *burst, struct kvs_error *why) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  const struct kvs_staging *staging = s->transfer->staging;
  size_t end = burst->first + burst->count, size = sizeof(struct kvs_piece);
  uint64_t table = s->units.pieces;
  if (s->work->on_device.ids) return KVS_OK; /* kvs_resolve_ids() places all pairs */
  if (!s->listed) {
    if (burst->count <= KVS_INLINE_PAIRS || s->uploaded >= end) return KVS_OK;
    if (!s->units.pairs) (void)kvs_stage(s, packing->npairs * sizeof *packing->pairs, &s->units.pairs);
    size = sizeof *packing->pairs;
    table = s->units.pairs;
  }
  size_t at = (size_t)(table - staging->device), from = s->listed ? burst->first : s->uploaded;
  if (!s->listed) {
    memcpy((char *)(uintptr_t)staging->host + at + from * size, packing->pairs + from, (end - from) * size);
    s->uploaded = end;
  }
  return kvs_upload(s, at + from * size, at + end * size, s->first, why);
}

static int launch(struct kvs_submission *s, const struct kvs_burst *burst, uint64_t slot, kvs_stream stream,
                  struct kvs_error *why) {
  const struct kvs_width width = {.kernel = KVS_KERNEL_PACK, .ctas = full_width(s)};
  struct kvs_units units = s->units;
  if (s->listed) {
    units.pieces += burst->first * sizeof(struct kvs_piece);
    return kvs_launch_units(s, &units, burst->count, 0, &width, stream, why);
  }
  units.rows += burst->first_row * sizeof(struct kvs_row);
  units.nrows = (uint32_t)burst->nrows;
  units.parts = (uint32_t)kvs_burst_parts(&s->work->scratch->rows, burst, &units.piece);
  bool placed = s->work->on_device.ids || burst->count > KVS_INLINE_PAIRS;
  units.pairs = placed ? units.pairs + burst->first * sizeof(struct kvs_pair) : 0;
  units.npairs = (uint32_t)burst->count;
  units.slot = slot;
  units.before = s->work->scratch->rows.items[burst->first_row].before;
  return kvs_launch_units(s, &units, (uint64_t)burst->nrows * units.parts * burst->count, burst->first, &width, stream,
                          why);
}

static int copy_one_by_one(struct kvs_submission *s, size_t from, size_t end, kvs_stream stream,
                           struct kvs_error *why) {
  const struct kvs_copies *copies = &s->work->scratch->packing.copies;
  uint64_t nbytes = 0;
  int status = KVS_OK;
  for (size_t i = from; i < end; i++) nbytes += copies->nbytes[i];
  uint64_t mean = end > from ? nbytes / (end - from) : 0;
  for (size_t begin = from, part; !status && from < end; from = part) {
    part = kvs_call_end(s, copies, from, end, mean, from - begin);
    status = kvs_give(s, copies, from, part, stream, why);
  }
  return status;
}

/* Between slot and host. The rows of a layer, or of a group of layers, lie at one pitch where blocks are neighbours:
 * one call moves them, and faster (H200, 64 KiB a row: 50 GB/s to the host and 54 back, one by one 44). */
static int copy(struct kvs_submission *s, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_copies *copies = &s->work->scratch->packing.copies;
  const struct kvs_regions *regions = &s->work->scratch->regions;
  int status = KVS_OK;
  size_t issued = 0; /* copies before it */
  if (s->engine->disabled.strided) return copy_one_by_one(s, 0, copies->count, stream, why);
  for (size_t from = 0, end; !status && from < copies->count; from = end) {
    struct kvs_rect rect;
    end = kvs_burst_rows(copies, from, s->work->direction, s->device->info.max_pitch, regions, &rect);
    if (!rect.width) continue;
    status = copy_one_by_one(s, issued, from, stream, why);
    if (!status) status = kvs_give_rect(s, &rect, stream, why);
    if (status == KVS_REFUSED)
      status = copy_one_by_one(s, issued, end, stream, why); /* what is copied twice is the same */
    issued = end;
  }
  return status ? status : copy_one_by_one(s, issued, copies->count, stream, why);
}

/* Let the second stage wait for the first. D2H: the device time of the transfer is measured from its first copy. */
static int join_stages(struct kvs_submission *s, unsigned slot, struct kvs_error *why) {
  kvs_stream second = s->lane->stream;
  struct kvs_error ignored;
  if (s->first == second) return KVS_OK;
  int status = kvs_dev_event_record(s->device, s->slots->packed[slot], s->first, why);
  if (!status) status = kvs_dev_stream_wait(s->device, second, s->slots->packed[slot], why);
  if (!status && !s->begun && s->ahead && s->work->direction == KVS_D2H)
    (void)kvs_dev_event_record(s->device, s->transfer->start, second, &ignored);
  return status;
}

static int issue(struct kvs_submission *s, struct kvs_piece *pieces, const struct kvs_burst *burst,
                 struct kvs_error *why) {
  struct kvs_slots *slots = s->slots;
  struct kvs_packing *packing = &s->work->scratch->packing;
  const struct kvs_regions *regions = &s->work->scratch->regions;
  enum kvs_direction direction = s->work->direction;
  bool gather = direction == KVS_D2H;
  unsigned slot = slots->next;
  uint64_t at = slots->address + slot * slots->slot_nbytes;
  int status = s->listed ? kvs_burst_list(packing, pieces, burst, direction, at, regions, why)
                         : kvs_burst_copies(packing, burst, direction, at, regions, why);
  if (!status) status = kvs_dev_stream_wait(s->device, s->first, slots->free[slot], why);
  if (!status) status = upload(s, burst, why);
  if (!status && gather) status = kvs_resolve_ids(s, s->first, why);
  if (!status) status = gather ? launch(s, burst, at, s->first, why) : copy(s, s->first, why);
  if (!status) status = join_stages(s, slot, why);
  /* On the lane stream: an earlier transfer of the lane may scatter ids. */
  if (!status && !gather) status = kvs_resolve_ids(s, s->lane->stream, why);
  if (!status) status = gather ? copy(s, s->lane->stream, why) : launch(s, burst, at, s->lane->stream, why);
  if (!status) status = kvs_dev_event_record(s->device, slots->free[slot], s->lane->stream, why);
  s->begun = true;
  slots->last = slot;
  slots->next = (slot + 1) % slots->count;
  return status;
}

static int issue_grid(struct kvs_submission *s, struct kvs_error *why) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  struct kvs_cutter cutter =
      kvs_cut_grid(packing, s->first_row, s->rows_end, s->work->direction, s->slots->slot_nbytes, s->work->layered);
  struct kvs_burst burst;
  int status = kvs_place_rows(s, s->first, why);
  while (!status && kvs_cut_next(&cutter, packing, &burst)) status = issue(s, NULL, &burst, why);
  return status;
}

static int issue_list(struct kvs_submission *s, struct kvs_error *why) {
  struct kvs_piece *pieces;
  struct kvs_burst burst;
  uint64_t nbytes = 0;
  size_t count = kvs_place_list(s, &pieces);
  for (size_t i = 0; i < count; i++) nbytes += pieces[i].nbytes;
  struct kvs_cutter cutter = kvs_cut_list(nbytes, s->work->direction, s->slots->slot_nbytes, s->work->layered);
  int status = KVS_OK;
  while (!status && kvs_cut_next_list(&cutter, pieces, count, &burst)) status = issue(s, pieces, &burst, why);
  return status;
}

/* The first stage waits for the transfer's head. `begun` lets later transfers see that this one has started. */
static int begin(struct kvs_submission *s, struct kvs_error *why) {
  struct kvs_slots *slots = s->slots;
  int status = s->first == s->transfer->head ? KVS_OK : kvs_lane_fork(s->lane, s->transfer->head, s->first, why);
  slots->lane = s->lane;
  slots->sequence = s->transfer->sequence;
  slots->priority = s->lane->priority;
  slots->steps = s->options->nafter_layers > 0;
  if (!status && !s->begun) status = kvs_dev_event_record(s->device, slots->begun, s->first, why);
  return status;
}

/* What is queued and may still run comes before later work of the lane stream. Retried once, since the transfer fails
 * otherwise. */
static int rejoin(struct kvs_submission *s, struct kvs_error *why) {
  int status = KVS_OK;
  for (int tries = 0; tries < 2; tries++) {
    status = s->first == s->lane->stream ? KVS_OK : kvs_lane_fork(s->lane, s->first, s->lane->stream, why);
    if (!status) break;
  }
  s->transfer->head = s->lane->stream;
  s->lane->ahead = s->lane->ahead && status;
  return status;
}

int kvs_issue_bursts(struct kvs_submission *s, struct kvs_error *why) {
  struct kvs_error unjoined;
  if (s->listed ? s->view.count == 0 : s->work->nslots == 0 || s->first_row == s->rows_end) return KVS_OK;
  int status = begin(s, why);
  if (!status) status = s->listed ? issue_list(s, why) : issue_grid(s, why);
  if (!status) return KVS_OK;
  s->slots->unsettled[0] = s->first;
  s->slots->unsettled[1] = s->lane->stream;
  if (rejoin(s, &unjoined) == KVS_OK) return status;
  s->transfer->unjoined = true; /* no later work can wait for the first stage, so none of its bytes can be trusted */
  kvs_fail_all(s, &unjoined);
  if (!kvs_is_lost(unjoined.status)) return KVS_OK;
  *why = unjoined;
  return unjoined.status;
}

/* The end is recorded on the lane stream, so the lane stream must have waited for all start dependencies. */
void kvs_close_bursts(struct kvs_submission *s) {
  struct kvs_error why;
  if (s->begun || s->fatal || s->transfer->head == s->lane->stream || rejoin(s, &why) == KVS_OK) return;
  s->transfer->unjoined = true;
  kvs_fail_all(s, &why);
  if (kvs_is_lost(why.status)) kvs_stop_issuing(s, &why);
}
