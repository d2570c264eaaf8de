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
 * Blocks of coded pools are coded while they are packed or unpacked: a slot holds them as the host does.
 *
 * Path borrow is a burst that shares its pieces out over links that other devices lend (lend.h). Its own link has
 * larger ones, and all links end together. The lane stream waits for the lent pieces of a view, so that whatever
 * follows a transfer follows these too.
 *
 * After a refused driver call the state of a slot is unknown: the set is not used until both streams are idle, and the
 * copy engine repeats the transfer behind that work, or the kernel what is coded. */
#include <math.h>
#include <string.h>

#include "lanes/buffers.h"
#include "lanes/lane.h"
#include "paths/copies.h"
#include "paths/lend.h"
#include "paths/many.h"
#include "paths/parts.h"
#include "paths/path.h"
#include "paths/slots.h"
#include "paths/units.h"
#include "plan/cost.h"
#include "racecheck/racecheck.h"

enum {
  PIECE = 4 << 10,        /* bytes that a warp (PACK) takes at a time */
  LAYER_NBYTES = 2 << 20, /* least bytes of a group of layers */
  LAYER_RUN_NBYTES = 128 << 10,
  LEAST_LAYER_GROUPS = 4,
  MOST_LAYER_GROUPS = 8,
  OWN_PIECES = 4,
};

/* The kernels of bursts use SMs that the model needs, so a burst must be this much faster than the copy engine alone.
 * Measured beside matrix products (H200, jobs of 256 blocks of 2 MiB): bursts slowed the model by 1.05 D2H and 1.09
 * H2D, plain copies of the same speed by 1.01 and 1.04. */
static const double HANDICAP = 1.04;

/* Copies of this size reach 0.96 of a burst's speed and cost a model less. Measured beside a matrix product (H100, 256
 * blocks of 2 MiB D2H): copies slowed the product by 1.014 at 53 GB/s, bursts by 1.056 at 47. A kernel also delays all
 * later kernels of a model's graphs (docs/performance.md, "A model's graphs"). */
static const double LARGE_HANDICAP = 1.08;
static const uint64_t LARGE_NBYTES = 512 << 10;

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

static bool begins_group(const struct kvs_submission *s, size_t layer) {
  size_t layers = s->work->scratch->nlayers, groups = layer_groups(s->work);
  return kvs_starts_alone(s, layer) || layer == 0 || layer * groups / layers != (layer - 1) * groups / layers;
}

static size_t layer_group_end(const struct kvs_submission *s, size_t layer) {
  size_t end = layer + 1, layers = s->work->scratch->nlayers;
  while (end < layers && !begins_group(s, end)) end++;
  return end;
}

/* The most bytes of a block that stay together. Pieces of a lent link are small; rows that are not cut need not fit. */
static uint64_t most_packed(const struct kvs_submission *s) {
  uint64_t least = kvs_slot_room(s, atomic_load(&s->engine->lent_least));
  bool whole = s->work->layered || s->work->codings;
  bool lent = least && least < s->burst_nbytes;
  return lent && !(whole && kvs_longest_packed(&s->work->scratch->rows) > least) ? least : s->burst_nbytes;
}

/* Pack the work's rows, once. */
static int pack(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  struct kvs_scratch *scratch = work->scratch;
  uint64_t most = most_packed(s);
  size_t *ends, nends = 0;
  if (work->packed) return KVS_OK;
  work->packed = true;
  if (!work->layered) return kvs_pack_rows(&scratch->rows, work->direction, most, NULL, 0, &scratch->packing, s->err);
  int status = kvs_packing_ends(&scratch->packing, scratch->nlayers, &ends, s->err);
  for (size_t layer = 0; !status && layer < scratch->nlayers; layer++)
    if (layer + 1 == scratch->nlayers || begins_group(s, layer + 1)) ends[nends++] = scratch->layers[layer].rows;
  return status ? status : kvs_pack_rows(&scratch->rows, work->direction, most, ends, nends, &scratch->packing, s->err);
}

/* -- choosing ---------------------------------------------------------------------------------------------------- */

static double cost(const struct kvs_costs *costs, const struct kvs_path_cost *own, const struct kvs_shape *shape) {
  (void)costs;
  if (shape->rows == 0 || shape->runs == 0) return INFINITY;
  double gather = kvs_cost_of_all(own->each, shape->nbytes, shape->rows),
         move = kvs_cost_of_all(own->run, shape->nbytes, shape->runs);
  double alone = shape->nbytes > KVS_COST_ALONE ? KVS_COST_ALONE / (double)shape->nbytes : 1;
  double more = own->extra * (shape->nbytes < KVS_COST_SLOT ? (double)shape->nbytes / KVS_COST_SLOT : 1);
  return own->start + more + (gather > move ? gather + move * alone : move + gather * alone);
}

static double handicap(const struct kvs_submission *s) {
  const struct kvs_shape *shape = &s->work->shape;
  bool large = shape->copies && shape->nbytes / shape->copies >= LARGE_NBYTES;
  if (s->options->priority == KVS_PRIORITY_HIGH) return 1; /* the model's slowdown does not count */
  return large ? LARGE_HANDICAP : HANDICAP;
}

/* The costs were measured with runs of whole pages. Odd sizes cost the copy engine more. */
static double odd_runs(const struct kvs_shape *shape) {
  uint64_t mean = shape->runs ? shape->nbytes / shape->runs : 0;
  bool round = mean % 4096 == 0 && mean * shape->runs == shape->nbytes;
  return mean < 128 << 10 && !round ? 1.15 : 1.0;
}

/* The first copies of a burst, of which the costs were measured with many. Those of path `dma` take no longer from host
 * to device than the other way: 4 to 24 KiB, 4 to 64 copies, within 5 us on an H100; 7 of 27 KiB took 23 us in all on
 * an H200 (benchmarks/bench_few.py). */
static double slow_start(const struct kvs_shape *shape) {
  uint64_t copies = shape->runs, mean = copies > 1 ? shape->nbytes / copies : 0,
           first = copies < KVS_COST_BATCH ? copies : KVS_COST_BATCH;
  bool slow = shape->direction == KVS_H2D && mean < KVS_SLOW_COPY_NBYTES;
  return slow ? (double)(first * mean) / 1024 * KVS_SLOW_COPY_NS_PER_KIB : 0;
}

static double predict(const struct kvs_submission *s) {
  const struct kvs_shape *shape = &s->work->shape;
  double ns =
      kvs_path_ns(&kvs_path_burst, KVS_PATH_BURST, &s->engine->costs, shape) * odd_runs(shape) + slow_start(shape);
  return ns * kvs_many_handicap(shape->runs, shape->nbytes) * handicap(s);
}

/* The race checker follows single copies; with ids on the device there are none. */
static bool worth(const struct kvs_submission *s) {
  return kvs_kernels_allowed(s) && (!kvs_racecheck_on() || s->work->on_device.ids);
}

/* A warp of PACK takes no more than KVS_KERNEL_PIECE. */
static bool fits_kernel(const struct kvs_submission *s) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  uint64_t lines = rows->count * s->work->nslots, parts = kvs_longest_row(rows, 0, rows->count) / KVS_KERNEL_PIECE + 1,
           units;
  return !__builtin_mul_overflow(lines, parts, &units) && units < (uint64_t)1 << 31;
}

/* Bursts need the host on one side. */
static bool fits(const struct kvs_submission *s) {
  bool possible = !s->peer && s->work->direction != KVS_OTHER_DIRECTION && atomic_load(&s->engine->bursts);
  return possible && (!s->work->on_device.ids || (s->work->nslots && fits_kernel(s)));
}

static enum kvs_path instead(const struct kvs_submission *s) {
  return s->peer && !s->peer_direct ? KVS_PATH_DMA : KVS_PATH_KERNEL;
}

static const char *why_not(const struct kvs_submission *s, char room[KVS_BURST_NOTE]) {
  return kvs_bursts_off(s->engine, room) ? room : NULL;
}

static void release(struct kvs_submission *s) {
  kvs_lent_release(s);
  if (s->slots) pthread_mutex_unlock(&s->slots->lock);
  s->slots = NULL;
}

/* False, for example: both sets wait for other lanes. Layered transfers do not cut rows, nor do coded ones, so a burst
 * must hold the longest row. The slot size is known once the set is locked. */
static bool take(struct kvs_submission *s) {
  kvs_lent_release(s); /* path borrow may have held some */
  if (!s->slots) s->slots = kvs_slots_take(s->engine, s->lane, s->work->direction);
  if (!s->slots) return false;
  s->burst_nbytes = kvs_slot_room(s, s->slots->slot_nbytes);
  bool whole = s->work->layered || s->work->codings;
  if (whole && kvs_longest_packed(&s->work->scratch->rows) > s->burst_nbytes) release(s);
  return s->slots != NULL;
}

/* Count the host's runs; this costs as much as the rest of the planning. Lists have the count already. */
static int measure(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  const int64_t *host = work->direction == KVS_D2H ? work->dst_slots : work->src_slots;
  if (!work->grid || work->packed) return KVS_OK;
  int status = pack(s);
  return status ? status
                : kvs_pack_count_runs(&work->scratch->packing, host, work->nslots, work->cpu_slots,
                                      &work->scratch->plan, &work->shape.runs, s->err);
}

/* -- preparing, continued ------------------------------------------------------------------------------------------ */

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

static int prepare_pairs(struct kvs_submission *s) {
  int status = kvs_prepare_grid(s);
  if (status) return status;
  s->units.piece = PIECE; /* each burst sets its own parts */
  if (s->work->nslots && s->work->scratch->rows.count) kvs_pack_sort(&s->work->scratch->packing, s->work->direction);
  return KVS_OK;
}

/* Without overlap the lane stream alone is as good. Background transfers use it alone too: the link then pauses during
 * each kernel, and any other pause would need a kernel that occupies an SM. */
static int prepare(struct kvs_submission *s) {
  bool list = kvs_needs_list(s);
  int status = list ? kvs_prepare_list(s) : pack(s);
  if (!status && !list) status = prepare_pairs(s);
  if (status) return status;
  bool one = kvs_is_one_burst(s->work->nbytes, s->slots->slot_nbytes) && !s->options->nafter_layers && !s->nlent;
  one = one || is_empty(s) || s->options->priority == KVS_PRIORITY_BACKGROUND;
  s->first = one ? s->lane->stream : s->lane->burst_stream;
  s->ahead = !one && may_run_ahead(s);
  return KVS_OK;
}

/* -- issuing --------------------------------------------------------------------------------------------------- */

/* Measured, H200, beside a decode step: gathering costs the step 0.006 less with two CTAs an SM than with four,
 * scattering 0.005 more. Coding is faster with four: where one has ended, the next one begins at once. */
static unsigned full_width(const struct kvs_submission *s) {
  unsigned sms = s->device->info.sms > 0 ? (unsigned)s->device->info.sms : 1;
  bool two = s->work->direction == KVS_D2H && !s->work->codings;
  return s->options->max_ctas ? s->options->max_ctas : (two ? 2 : 4) * sms;
}

/* A list uploads its pieces, a grid its pairs. */
static int upload(struct kvs_submission *s, const struct kvs_burst *burst, kvs_stream stream, struct kvs_error *why) {
  const size_t end = burst->first + burst->count, size = sizeof(struct kvs_piece);
  if (!s->listed) return kvs_place_pairs(s, burst->first, end, stream, why);
  size_t at = (size_t)(s->units.pieces - s->transfer->staging->device);
  return kvs_upload(s, at + burst->first * size, at + end * size, stream, why);
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
  bool placed = s->work->on_device.ids || burst->count > KVS_INLINE_PAIRS;
  units.pairs = placed ? units.pairs + burst->first * sizeof(struct kvs_pair) : 0;
  units.npairs = (uint32_t)burst->count;
  units.slot = slot;
  units.before = s->work->scratch->rows.items[burst->first_row].before;
  if (s->work->codings) return kvs_launch_code(s, &units, burst->first_row, burst->first, width.ctas, stream, why);
  units.parts = (uint32_t)kvs_burst_parts(&s->work->scratch->rows, burst, &units.piece);
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

/* Copy between slot and host. Where host blocks are neighbours, the rows of a layer, or of a group of layers, have one
 * pitch. Then one 2-D copy moves them, which is faster than a copy for each row (H200, rows of 64 KiB: 50 GB/s D2H and
 * 54 H2D, against 44). */
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

static int issue_burst(struct kvs_submission *s, struct kvs_piece *pieces, const struct kvs_burst *burst,
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
  if (!status) status = upload(s, burst, s->first, why);
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

/* -- over a lender's link ---------------------------------------------------------------------------------------- */

/* Between the far slot and the host, by the lender's copy engine. */
static int lent_copy(struct kvs_submission *s, struct kvs_lent_way *way, unsigned stage, struct kvs_error *why) {
  struct kvs_error ignored;
  int status = kvs_lent_enter(s, way, stage, why);
  s->link = way->lender->device;
  if (!status) (void)kvs_dev_gap(s->link, way->stages[stage].stream, &ignored); /* the lender's own copies */
  if (!status) status = copy(s, way->stages[stage].stream, why);
  s->link = s->device;
  status = kvs_lent_blame(way, status, why);
  return status ? status : kvs_lent_leave(way, stage, why);
}

/* Between blocks and the near slot, by a kernel. */
static int lent_launch(struct kvs_submission *s, struct kvs_lent_way *way, const struct kvs_burst *burst,
                       unsigned stage, struct kvs_error *why) {
  const kvs_stream stream = way->stages[stage].stream;
  int status = kvs_lent_enter(s, way, stage, why);
  if (!status) status = s->listed ? upload(s, burst, stream, why) : KVS_OK; /* a grid's pairs are there */
  if (!status) status = launch(s, burst, kvs_lent_near(way), stream, why);
  return status ? status : kvs_lent_leave(way, stage, why);
}

static int issue_lent(struct kvs_submission *s, struct kvs_lent_way *way, struct kvs_piece *pieces,
                      const struct kvs_burst *burst, struct kvs_error *why) {
  struct kvs_packing *packing = &s->work->scratch->packing;
  const struct kvs_regions *regions = &s->work->scratch->regions;
  enum kvs_direction direction = s->work->direction;
  const bool gather = direction == KVS_D2H;
  const uint64_t far = kvs_lent_far(way);
  int status = s->listed ? kvs_burst_list(packing, pieces, burst, direction, far, regions, why)
                         : kvs_burst_copies(packing, burst, direction, far, regions, why);
  for (size_t i = burst->first; !status && s->listed && i < burst->first + burst->count; i++)
    *(gather ? &pieces[i].dst : &pieces[i].src) += kvs_lent_near(way) - far; /* the kernel's side of the slot */
  if (!status) status = gather ? lent_launch(s, way, burst, 0, why) : lent_copy(s, way, 0, why);
  if (!status) status = kvs_lent_hop(s, way, burst->nbytes, why);
  if (!status) status = gather ? lent_copy(s, way, 2, why) : lent_launch(s, way, burst, 2, why);
  if (!status) kvs_lent_next_piece(way);
  return status;
}

/* -- the bursts of a view ---------------------------------------------------------------------------------------- */

/* The bytes of the next burst. Beside lent links the device's own takes no more than its share of the view, and no more
 * than OWN_PIECES of their pieces, so that all end together; but a piece at least, into which each block fits. */
static uint64_t most_of(const struct kvs_submission *s, const struct kvs_lent_way *way, uint64_t view_nbytes) {
  uint64_t most = s->burst_nbytes, piece = 0;
  double shares = kvs_lent_shares(s);
  if (way) return way->room;
  for (unsigned i = 0; i < s->nlent; i++)
    if (s->lent[i]->room > piece) piece = s->lent[i]->room;
  if (shares <= 0 || piece >= most) return most;
  uint64_t share = (uint64_t)((double)view_nbytes / (1 + shares));
  if (share > OWN_PIECES * piece) share = OWN_PIECES * piece;
  if (share < piece) share = piece;
  return share < most ? share : most;
}

/* The link for the next burst, which is then cut for it. */
static struct kvs_lent_way *next_link(const struct kvs_submission *s, struct kvs_cutter *cutter) {
  struct kvs_lent_way *way = kvs_lent_next(s);
  cutter->slot_nbytes = most_of(s, way, cutter->nbytes);
  return way;
}

static int issue_next(struct kvs_submission *s, struct kvs_lent_way *way, struct kvs_piece *pieces,
                      const struct kvs_burst *burst, struct kvs_error *why) {
  kvs_lent_give(s, way, burst->nbytes);
  return way ? issue_lent(s, way, pieces, burst, why) : issue_burst(s, pieces, burst, why);
}

static int issue_grid(struct kvs_submission *s, struct kvs_error *why) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  struct kvs_cutter cutter = kvs_cut_grid(packing, s->first_row, s->rows_end, s->work->direction, s->burst_nbytes,
                                          s->work->layered || s->nlent);
  struct kvs_burst burst;
  int status = kvs_place_rows(s, s->first, why);
  if (!status) kvs_place_verdicts(s);
  if (!status && s->nlent) status = kvs_place_pairs(s, 0, packing->npairs, s->first, why);
  if (!status) status = kvs_lent_begin(s, why);
  while (!status) {
    struct kvs_lent_way *way = next_link(s, &cutter);
    if (!kvs_cut_next(&cutter, packing, &burst)) break;
    status = issue_next(s, way, NULL, &burst, why);
  }
  return status ? status : kvs_lent_end(s, why);
}

static int issue_list(struct kvs_submission *s, struct kvs_error *why) {
  struct kvs_piece *pieces;
  struct kvs_burst burst;
  uint64_t nbytes = 0;
  size_t count = kvs_place_list(s, false, &pieces); /* the copy engine reads or writes the host side */
  for (size_t i = 0; i < count; i++) nbytes += pieces[i].nbytes;
  struct kvs_cutter cutter =
      kvs_cut_list(nbytes, s->work->direction, s->slots->slot_nbytes, s->work->layered || s->nlent);
  int status = kvs_lent_begin(s, why);
  while (!status) {
    struct kvs_lent_way *way = next_link(s, &cutter);
    if (!kvs_cut_next_list(&cutter, pieces, count, &burst)) break;
    status = issue_next(s, way, pieces, &burst, why);
  }
  return status ? status : kvs_lent_end(s, why);
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
    if (!status) status = kvs_lent_rejoin(s, why);
    if (!status) break;
  }
  s->transfer->head = s->lane->stream;
  s->lane->ahead = s->lane->ahead && status;
  return status;
}

/* After a refusal part of the view may run; that part ends before later work of the lane stream, and the view is
 * repeated as a whole. */
static int issue(struct kvs_submission *s, struct kvs_error *why) {
  struct kvs_error unjoined;
  if (s->listed ? s->view.count == 0 : s->work->nslots == 0 || s->first_row == s->rows_end) return KVS_OK;
  int status = begin(s, why);
  if (!status) status = s->listed ? issue_list(s, why) : issue_grid(s, why);
  if (!status) return KVS_OK;
  s->slots->unsettled[0] = s->first;
  s->slots->unsettled[1] = s->lane->stream;
  kvs_lent_unsettle(s);
  if (rejoin(s, &unjoined) == KVS_OK) return status;
  s->transfer->unjoined = true; /* no later work can wait for the first stage, so none of its bytes can be trusted */
  kvs_fail_all(s, &unjoined);
  if (!kvs_is_lost(unjoined.status)) return KVS_OK;
  *why = unjoined;
  return unjoined.status;
}

/* The end is recorded on the lane stream, so the lane stream must have waited for all start dependencies. */
static void close_bursts(struct kvs_submission *s) {
  struct kvs_error why;
  if (s->begun || s->fatal || s->transfer->head == s->lane->stream || rejoin(s, &why) == KVS_OK) return;
  s->transfer->unjoined = true;
  kvs_fail_all(s, &why);
  if (kvs_is_lost(why.status)) kvs_stop_issuing(s, &why);
}

/* The host does not know the copies of ids on the device. What is coded goes by a kernel, which takes the host's
 * addresses as they are. */
static enum kvs_path after_refusal(const struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  if (work->on_device.ids) return KVS_PATH_AUTO;
  if (!work->codings) return KVS_PATH_DMA;
  return kvs_regions_aliased(&work->scratch->regions) ? KVS_PATH_AUTO : KVS_PATH_KERNEL;
}

const struct kvs_path_ops kvs_path_burst = {
    .name = "burst",
    .needs_kernels = true,
    .needs_pinned = true,
    .codes = true,
    .rows = true,
    .has_extra = true,
    .has_run = true,
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
    .close = close_bursts,
};
