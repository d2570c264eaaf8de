/* Path burst: a kernel at the GPU's full width gathers blocks into a slot of device memory, and the copy engine moves
 * the slot to the host in as few copies as the host's runs allow; from host to device the other way round.
 *
 * A burst has two stages, on two streams: the second one is on the lane's spine, the first one on its front, so that a
 * kernel and a copy overlap. They are joined by two events a slot: `packed` (the second stage may begin) and `free`
 * (the slot may be used again). All of it is queued in the call, no kernel waits for anything, and the end of the spine
 * is the end of the transfer. A transfer of one burst has both stages on the spine and no `packed`.
 *
 * Where nothing that a transfer writes can be what another of its lane reads (one side is device memory, the other is
 * not), its start is waited for on the front alone: its first stage begins while the last transfer's copies run.
 *
 * What is refused on the way leaves no use of a slot that is not known: the set of slots serves nobody until both
 * streams are seen idle, and the copy engine does the transfer again, behind all of that. */
#include "core/submit.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/buffers.h"
#include "core/lane.h"
#include "core/racecheck.h"

enum {
  CUDA_SLOT_NBYTES = 64 << 20, /* of this the link moves 1.2 ms, as long as a model's kernels may keep all SMs */
  HOST_SLOT_NBYTES = 1 << 20,  /* on a host device nothing is gained: enough to run the same program */
  LEAST_SLOT_NBYTES = 4 << 20, /* of a GPU that has little memory left */
  SLOTS = 3,
  SPARE_SLOTS = 2,
  TINY_NBYTES = 128 << 10, /* a slot that is asked for: at least, and */
  MOST_NBYTES = 1 << 30,   /* at most */
  LAYER_NBYTES = 2 << 20,  /* of a group of layers, at least */
  LAYER_RUN_NBYTES = 128 << 10,
  LEAST_LAYER_GROUPS = 4,
  MOST_LAYER_GROUPS = 8,
};

/* -- the slots ------------------------------------------------------------------------------------------------- */

static void slots_close(struct kvs_engine *engine, struct kvs_slots *slots) {
  struct kvs_device *device = engine->device;
  struct kvs_error ignored;
  for (unsigned i = 0; i < KVS_SLOTS_MOST; i++) {
    if (slots->packed[i]) (void)kvs_dev_event_destroy(device, slots->packed[i], &ignored);
    if (slots->free[i]) (void)kvs_dev_event_destroy(device, slots->free[i], &ignored);
    slots->packed[i] = slots->free[i] = 0;
  }
  if (slots->begun) (void)kvs_dev_event_destroy(device, slots->begun, &ignored);
  if (slots->address) (void)kvs_dev_free(device, slots->address, &ignored);
  slots->begun = slots->address = slots->nbytes = 0;
  slots->lane = NULL;
  slots->shared = false;
}

static int slots_open(struct kvs_engine *engine, struct kvs_slots *slots, uint64_t slot_nbytes, unsigned count,
                      struct kvs_error *err) {
  struct kvs_device *device = engine->device;
  int status = kvs_dev_alloc(device, slot_nbytes * count, &slots->address, err);
  if (!status) status = kvs_dev_event_create(device, false, &slots->begun, err);
  for (unsigned i = 0; !status && i < count; i++) {
    status = kvs_dev_event_create(device, false, &slots->packed[i], err);
    if (!status) status = kvs_dev_event_create(device, false, &slots->free[i], err);
  }
  slots->slot_nbytes = slot_nbytes;
  slots->count = count;
  slots->next = slots->last = 0;
  slots->doubt[0] = slots->doubt[1] = 0;
  slots->nbytes = slot_nbytes * count;
  if (status) slots_close(engine, slots);
  return status;
}

void kvs_slots_close(struct kvs_engine *engine) {
  for (int i = 0; i < 2 * KVS_SLOT_SETS; i++) slots_close(engine, &engine->slots[i]);
}

static int open_all(struct kvs_engine *engine, uint64_t slot_nbytes, unsigned count, struct kvs_error *err) {
  int status = KVS_OK;
  for (int direction = 0; !status && direction < 2; direction++) {
    struct kvs_slots *sets = &engine->slots[direction * KVS_SLOT_SETS];
    status = slots_open(engine, &sets[0], slot_nbytes, count, err);
    if (!status) status = slots_open(engine, &sets[1], slot_nbytes / 2, SPARE_SLOTS, err);
  }
  if (status) kvs_slots_close(engine);
  return status;
}

void kvs_slots_open(struct kvs_engine *engine) {
  const struct kvs_device_info *info = &engine->device->info;
  bool cuda = strcmp(engine->device->ops->kind, "cuda") == 0;
  uint64_t wanted = cuda ? CUDA_SLOT_NBYTES : HOST_SLOT_NBYTES, nbytes = wanted;
  const char *why = engine->disabled.burst    ? "KVSWAP_DISABLE names it"
                    : engine->disabled.kernel ? "KVSWAP_DISABLE names 'kernel', which it needs"
                    : !info->kernels          ? info->kernels_note
                                              : NULL;
  struct kvs_error err = {.status = KVS_OK};
  while (!why && open_all(engine, nbytes, SLOTS, &err)) {
    nbytes /= 2;
    if (err.status == KVS_LOST || nbytes < LEAST_SLOT_NBYTES) why = err.message;
  }
  if (why)
    snprintf(engine->burst_note, sizeof engine->burst_note, "%.150s", why);
  else if (nbytes < wanted)
    snprintf(engine->burst_note, sizeof engine->burst_note,
             "slots of %" PRIu64 " MiB instead of %" PRIu64 ": the device has no more memory free", nbytes >> 20,
             wanted >> 20);
  atomic_store(&engine->bursts, !why);
}

uint64_t kvs_engine_slots_nbytes(const struct kvs_engine *engine) {
  uint64_t nbytes = 0;
  for (int i = 0; i < 2 * KVS_SLOT_SETS; i++) nbytes += engine->slots[i].nbytes;
  return nbytes;
}

/* Whether nothing that was queued uses them. */
static bool is_over(struct kvs_engine *engine, const struct kvs_slots *slots) {
  struct kvs_device *device = engine->device;
  struct kvs_error ignored;
  bool over = true;
  if (slots->doubt[0])
    over = kvs_dev_stream_query(device, slots->doubt[0], &ignored) == KVS_OK &&
           kvs_dev_stream_query(device, slots->doubt[1], &ignored) == KVS_OK;
  else if (slots->lane && atomic_load(&slots->lane->ended) < slots->sequence)
    /* Looking at an event makes the work of a stepped device go on. */
    over = !device->stepped && kvs_dev_event_query(device, slots->free[slots->last], &ignored) == KVS_OK;
  for (unsigned i = 0; over && slots->shared && i < slots->count; i++)
    over = kvs_dev_event_query(device, slots->free[i], &ignored) == KVS_OK;
  return over;
}

static int rank(enum kvs_priority priority) {
  return priority == KVS_PRIORITY_HIGH ? 2 : priority == KVS_PRIORITY_BACKGROUND ? 0 : 1;
}

/* Whether the transfer that uses them goes on by itself, and is not one that this lane should overtake. */
static bool may_wait_for(struct kvs_engine *engine, const struct kvs_slots *slots, const struct kvs_lane *lane) {
  struct kvs_error ignored;
  if (slots->steps || rank(slots->priority) < rank(lane->priority) || engine->device->stepped) return false;
  return kvs_dev_event_query(engine->device, slots->begun, &ignored) == KVS_OK;
}

static bool usable(struct kvs_engine *engine, struct kvs_slots *slots, const struct kvs_lane *lane, bool waiting) {
  if (!slots->nbytes) return false;
  if (is_over(engine, slots)) {
    slots->doubt[0] = slots->doubt[1] = 0;
    slots->shared = false;
    return true;
  }
  if (slots->doubt[0]) return false;
  if (slots->lane == lane) return true;
  if (!waiting || !may_wait_for(engine, slots, lane)) return false;
  slots->shared = true;
  return true;
}

struct kvs_slots *kvs_slots_take(struct kvs_engine *engine, const struct kvs_lane *lane, enum kvs_direction direction) {
  struct kvs_slots *found = NULL;
  bool before = kvs_racecheck_internal(true);
  for (int i = 0; !found && i < 2 * KVS_SLOT_SETS; i++) { /* rather the spare set than to wait */
    struct kvs_slots *slots = &engine->slots[(int)direction * KVS_SLOT_SETS + i % KVS_SLOT_SETS];
    if (pthread_mutex_trylock(&slots->lock)) continue;
    if (usable(engine, slots, lane, i >= KVS_SLOT_SETS))
      found = slots;
    else
      pthread_mutex_unlock(&slots->lock);
  }
  kvs_racecheck_internal(before);
  return found;
}

/* -- giving them back ------------------------------------------------------------------------------------------ */

struct resizing {
  struct kvs_engine *engine;
  uint64_t slot_nbytes;
  unsigned count;
};

static int resize_locked(const struct resizing *r, struct kvs_error *err) {
  struct kvs_engine *engine = r->engine;
  bool before = kvs_racecheck_internal(true), over = true;
  for (int i = 0; i < 2 * KVS_SLOT_SETS; i++) over = over && is_over(engine, &engine->slots[i]);
  kvs_racecheck_internal(before);
  if (!over) return kvs_fail(err, KVS_NOT_READY, "bursts are under way");
  kvs_slots_close(engine);
  int status = r->slot_nbytes ? open_all(engine, r->slot_nbytes, r->count, err) : KVS_OK;
  bool bursts = r->slot_nbytes && !status;
  if (bursts) atomic_store(&engine->bursts, true); /* others may submit meanwhile: a reason is there while it is off */
  snprintf(engine->burst_note, sizeof engine->burst_note, "%.150s",
           bursts   ? ""
           : status ? err->message
                    : "its slots were given back");
  atomic_store(&engine->bursts, bursts);
  return status;
}

/* No transfer is being queued through any of them, or it is tried again. */
static int resize(void *arg, struct kvs_error *err) {
  const struct resizing *r = arg;
  struct kvs_slots *slots = r->engine->slots;
  int status = KVS_NOT_READY, held = 0;
  kvs_engine_reap(r->engine);
  while (held < 2 * KVS_SLOT_SETS && !pthread_mutex_trylock(&slots[held].lock)) held++;
  if (held == 2 * KVS_SLOT_SETS) status = resize_locked(r, err);
  while (held-- > 0) pthread_mutex_unlock(&slots[held].lock);
  return status;
}

int kvs_engine_set_slots(struct kvs_engine *engine, uint64_t slot_nbytes, unsigned count, int64_t timeout_ns,
                         struct kvs_error *err) {
  struct resizing r = {engine, slot_nbytes, count};
  int status = kvs_dev_check(engine->device, err);
  if (status) return status;
  bool fits = slot_nbytes >= TINY_NBYTES && slot_nbytes <= MOST_NBYTES && slot_nbytes % TINY_NBYTES == 0;
  if (slot_nbytes && (!fits || count < 2 || count > KVS_SLOTS_MOST))
    return kvs_fail(err, KVS_INVALID,
                    "%u slots of %" PRIu64 " bytes: 2 to %d of a multiple of 128 KiB, at most 1 GiB; 0 bytes: none",
                    count, slot_nbytes, KVS_SLOTS_MOST);
  if (slot_nbytes && !engine->device->info.kernels)
    return kvs_fail(err, KVS_UNSUPPORTED, "path 'burst' is off: %s", engine->device->info.kernels_note);
  status = kvs_wait_until(resize, &r, engine->device->stepped, timeout_ns, err);
  if (status != KVS_TIMEOUT) return status;
  return kvs_fail(err, status, "transfers of %s still used its slots after %.1f s", engine->name,
                  (double)timeout_ns / 1e9);
}

const char *kvs_reason_against_burst(const struct kvs_engine *engine) {
  return atomic_load(&engine->bursts) ? NULL : engine->burst_note;
}

/* -- preparing ------------------------------------------------------------------------------------------------- */

/* Layers go in groups: the first is there early, and yet a group is large enough for the link, and so is what it has of
 * a block, which may be a copy of its own. */
static size_t layer_groups(const struct kvs_work *work) {
  uint64_t groups = work->nslots ? work->nbytes / work->nslots / LAYER_RUN_NBYTES : 0;
  uint64_t layers = work->scratch->nlayers, large = work->nbytes / LAYER_NBYTES;
  if (groups < LEAST_LAYER_GROUPS) groups = LEAST_LAYER_GROUPS;
  if (groups > MOST_LAYER_GROUPS) groups = MOST_LAYER_GROUPS;
  if (groups > layers) groups = layers;
  if (groups > large) groups = large;
  return groups ? (size_t)groups : 1;
}

/* One that starts after something of its own does so alone: what it waits for may wait for the layer before. */
static bool begins_group(const struct kvs_submission *s, size_t layer) {
  const struct kvs_options *options = s->options;
  size_t layers = s->work->scratch->nlayers, groups = layer_groups(s->work);
  if (layer < options->nafter_layers && options->after_layers[layer].kind != KVS_AFTER_NONE) return true;
  return layer == 0 || layer * groups / layers != (layer - 1) * groups / layers;
}

size_t kvs_layer_group_end(const struct kvs_submission *s, size_t layer) {
  size_t end = layer + 1;
  if (s->transfer->path != KVS_PATH_BURST) return end;
  while (end < s->work->scratch->nlayers && !begins_group(s, end)) end++;
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

/* Nothing that it writes can be what a transfer before it reads, or the other way round. */
static bool apart(const struct kvs_submission *s) {
  const struct kvs_regions *regions = &s->work->scratch->regions;
  for (size_t i = 0; i < regions->count; i++)
    if (regions->items[i].memory == KVS_MEMORY_ORDINARY || regions->items[i].memory == KVS_MEMORY_MANAGED) return false;
  return !kvs_racecheck_on();
}

/* All of it is lost already, say. */
static bool is_empty(const struct kvs_submission *s) {
  return s->listed ? s->work->scratch->copies.count == 0 : s->work->nslots == 0 || s->work->scratch->rows.count == 0;
}

/* Where nothing overlaps, the spine alone is as good. In the background nothing is to: the link pauses for each kernel.
 * Any other pause would take a kernel that keeps an SM. */
void kvs_prepare_burst(struct kvs_submission *s) {
  bool one = kvs_is_one_burst(s->work->nbytes, s->slots->slot_nbytes) && !s->options->nafter_layers;
  one = one || is_empty(s) || s->options->priority == KVS_PRIORITY_BACKGROUND;
  s->first = one ? s->lane->spine : s->lane->front;
  s->ahead = !one && apart(s);
}

/* -- issuing --------------------------------------------------------------------------------------------------- */

/* Measured, H200, beside a decode step: what gathers costs it 0.006 less with two CTAs an SM than with four, what
 * scatters 0.005 more. */
static unsigned full_width(const struct kvs_submission *s) {
  unsigned sms = s->device->info.sms > 0 ? (unsigned)s->device->info.sms : 1;
  return s->options->max_ctas ? s->options->max_ctas : (s->work->direction == KVS_D2H ? 2 : 4) * sms;
}

/* Of a list: its pieces. Of a grid: those pairs that are not yet on their way, where they are too many for parameters.
 */
static int upload(struct kvs_submission *s, const struct kvs_burst *burst, struct kvs_error *why) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  const struct kvs_staging *staging = s->transfer->staging;
  size_t end = burst->first + burst->count, size = sizeof(struct kvs_piece);
  uint64_t table = s->units.pieces;
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
  const struct kvs_width width = {KVS_KERNEL_PACK, full_width(s), 0};
  struct kvs_units units = s->units;
  if (s->listed) {
    units.pieces += burst->first * sizeof(struct kvs_piece);
    return kvs_launch_units(s, &units, burst->count, 0, &width, stream, why);
  }
  units.rows += burst->first_row * sizeof(struct kvs_row);
  units.nrows = (uint32_t)burst->nrows;
  units.parts = (uint32_t)kvs_burst_parts(&s->work->scratch->rows, burst, &units.piece);
  units.pairs = burst->count > KVS_INLINE_PAIRS ? units.pairs + burst->first * sizeof(struct kvs_pair) : 0;
  units.npairs = (uint32_t)burst->count;
  units.slot = slot;
  units.before = s->work->scratch->rows.items[burst->first_row].before;
  return kvs_launch_units(s, &units, (uint64_t)burst->nrows * units.parts * burst->count, burst->first, &width, stream,
                          why);
}

static int copy(const struct kvs_submission *s, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_copies *copies = &s->work->scratch->packing.copies;
  uint64_t nbytes = 0;
  int status = KVS_OK;
  for (size_t i = 0; i < copies->count; i++) nbytes += copies->nbytes[i];
  size_t most = s->engine->disabled.batch ? 1 : kvs_batch_part(copies->count ? nbytes / copies->count : 0);
  for (size_t from = 0, part; !status && from < copies->count; from += part) {
    part = copies->count - from < most ? copies->count - from : most;
    status = part == 1
                 ? kvs_dev_copy(s->device, copies->dst[from], copies->src[from], copies->nbytes[from], stream, why)
                 : kvs_dev_copy_batch(s->device, copies, from, from + part, stream, why);
  }
  return status;
}

/* The second stage comes after the first. What a transfer takes on the device begins with the copies. */
static int pass(struct kvs_submission *s, unsigned slot, struct kvs_error *why) {
  kvs_stream second = s->lane->spine;
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
  if (!status) status = gather ? launch(s, burst, at, s->first, why) : copy(s, s->first, why);
  if (!status) status = pass(s, slot, why);
  if (!status) status = gather ? copy(s, s->lane->spine, why) : launch(s, burst, at, s->lane->spine, why);
  if (!status) status = kvs_dev_event_record(s->device, slots->free[slot], s->lane->spine, why);
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

/* The first stage comes after the transfer's start, and whoever looks sees whether it began. */
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

/* What was queued so far, and may still happen, comes before what the spine gets next. Much depends on it. */
static int rejoin(struct kvs_submission *s, struct kvs_error *why) {
  int status = KVS_OK;
  for (int tries = 0; tries < 2; tries++) {
    status = s->first == s->lane->spine ? KVS_OK : kvs_lane_fork(s->lane, s->first, s->lane->spine, why);
    if (!status) break;
  }
  s->transfer->head = s->lane->spine;
  s->lane->ahead = s->lane->ahead && status;
  return status;
}

int kvs_issue_bursts(struct kvs_submission *s, struct kvs_error *why) {
  struct kvs_error unjoined;
  if (s->listed ? s->view.count == 0 : s->work->nslots == 0 || s->first_row == s->rows_end) return KVS_OK;
  int status = begin(s, why);
  if (!status) status = s->listed ? issue_list(s, why) : issue_grid(s, why);
  if (!status) return KVS_OK;
  s->slots->doubt[0] = s->first;
  s->slots->doubt[1] = s->lane->spine;
  if (rejoin(s, &unjoined) == KVS_OK) return status;
  s->transfer->unjoined = true; /* nothing can come after the first stage, so nothing of it can be trusted */
  kvs_fail_whole(s, &unjoined);
  if (!kvs_beyond_hope(unjoined.status)) return KVS_OK;
  *why = unjoined;
  return unjoined.status;
}

/* The end is on the spine, and who waits for it alone must have waited for all that this transfer starts after. */
void kvs_close_bursts(struct kvs_submission *s) {
  struct kvs_error why;
  if (s->begun || s->fatal || s->transfer->head == s->lane->spine || rejoin(s, &why) == KVS_OK) return;
  s->transfer->unjoined = true;
  kvs_fail_whole(s, &why);
  if (kvs_beyond_hope(why.status)) kvs_give_up(s, &why);
}
