/* Submitting: from a checked plan to work queued on the device.
 *
 * In order: find the lane; choose a path and get what it needs (nothing has moved, any error is the caller's); take the
 * lane; wait for what the transfer must start after (order.c); issue, layer by layer where layers matter; record the
 * end and let the caller's stream wait for it. From the first issued copy on nothing fails the call any more: what the
 * driver refuses is tried another way (issue.c), and what still fails is written down in the transfer, which goes on in
 * its place. */
#include "core/submit.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/buffers.h"
#include "core/lane.h"
#include "core/peer.h"
#include "core/racecheck.h"
#include "core/transfer.h"
#include "device/hooks.h"

/* The kernel takes a merged list instead of rows and pairs if it has so many times fewer entries. */
enum { LIST_IF_SHORTER = 4 };

/* So few copies go to the copy engine: to think of other ways would take longer than any of them could save. */
enum { FEW = 3 };

/* Of two ways that take as long, the one that leaves the SMs to the model: a kernel has to be that much faster. */
static const double KERNEL_HANDICAP = 1.01;

/* The driver holds its caller for half a microsecond a copy, and on the way holds up other threads that call it: 18 ms
 * of 33,000 copies of 32 KiB, which take 20. A kernel, which takes a quarter longer, is queued in 0.1 ms. */
static const double MANY_HANDICAP = 1.25;
static const uint64_t MANY_COPIES = 1024;

static double many(uint64_t copies) { return copies > MANY_COPIES ? MANY_HANDICAP : 1.0; }

/* Between devices no calibration predicts. Measured between two H200: of 256 KiB and more the copy engine moves 367
 * GB/s and more, of 64 KiB 54; a kernel 355 of any size (benchmarks/bench_peer.py). */
static const uint64_t PEER_COPY_NBYTES = 256 << 10;

/* Runs of odd sizes cost the copy engine more than was measured of round ones, which are pages: short ones up to a half
 * more, and below 28 KiB from host to device three times and more. */
static double short_runs(const struct kvs_shape *shape) {
  uint64_t mean = shape->runs ? shape->nbytes / shape->runs : 0;
  bool round = mean % 4096 == 0 && mean * shape->runs == shape->nbytes;
  return mean < 32 << 10 ? 3.0 : mean < 128 << 10 && !round ? 1.15 : 1.0;
}

/* -- what it looks like ---------------------------------------------------------------------------------------- */

/* Pairs of slots that go on where the one before ended, on both sides, are one copy of a tensor without gaps. */
static uint64_t count_breaks(const int64_t *src, const int64_t *dst, size_t count) {
  uint64_t breaks = count > 0;
  for (size_t i = 1; i < count; i++) breaks += src[i] != src[i - 1] + 1 || dst[i] != dst[i - 1] + 1;
  return breaks;
}

/* Which rows begin off the lines that a link moves, on the host: by the last bits of the slots. */
static void find_skew(struct kvs_work *work, const int64_t *host_slots) {
  enum { LINE = KVS_COST_LINE };
  struct kvs_shape *shape = &work->shape;
  const struct kvs_rows *rows = &work->scratch->rows;
  uint64_t slots[LINE] = {0}, off = 0, nbytes = 0;
  unsigned used[LINE], nused = 0; /* those that there are */
  bool counted = false;
  for (size_t i = 0; i < rows->count; i++) {
    const struct kvs_row *row = &rows->items[i];
    uint64_t base = kvs_row_host(row, work->direction), stride = kvs_row_host_stride(row, work->direction);
    if (((base | stride) & (LINE - 1)) == 0) continue;
    for (size_t s = 0; !counted && s < work->nslots; s++)
      if (slots[host_slots[s] & (LINE - 1)]++ == 0) used[nused++] = (unsigned)(host_slots[s] & (LINE - 1));
    counted = true;
    for (unsigned u = 0; u < nused; u++)
      if ((base + used[u] * stride) & (LINE - 1)) off += slots[used[u]], nbytes += slots[used[u]] * row->nbytes;
  }
  shape->skew_pieces = shape->rows ? (uint64_t)((double)off * (double)shape->pieces / (double)shape->rows) : 0;
  shape->skew_nbytes = shape->skew_pieces ? nbytes : 0;
}

void kvs_find_shape(struct kvs_work *work, uint64_t cpu_slots) {
  struct kvs_scratch *scratch = work->scratch;
  struct kvs_shape *shape = &work->shape;
  uint64_t breaks = count_breaks(work->src_slots, work->dst_slots, work->nslots);
  const int64_t *host = work->direction == KVS_D2H ? work->dst_slots : work->src_slots;
  shape->copies = 0;
  for (size_t i = 0; i < scratch->rows.count; i++) {
    const struct kvs_row *row = &scratch->rows.items[i];
    bool packed = row->src_stride == row->nbytes && row->dst_stride == row->nbytes;
    shape->copies += packed ? breaks : work->nslots;
  }
  shape->direction = work->direction;
  shape->nbytes = work->nbytes;
  shape->rows = scratch->rows.count * work->nslots;
  shape->pieces = LIST_IF_SHORTER * shape->copies <= shape->rows ? shape->copies : shape->rows;
  shape->runs = work->grid ? 1 : shape->rows; /* at best: they are counted where a burst could win */
  work->cpu_slots = cpu_slots;
  find_skew(work, host);
}

/* -- which way ------------------------------------------------------------------------------------------------- */

static const struct kvs_region *pageable(const struct kvs_regions *regions) {
  for (size_t i = 0; i < regions->count; i++)
    if (regions->items[i].memory == KVS_MEMORY_PAGEABLE) return &regions->items[i];
  return NULL;
}

/* A driver copies between two places of the host at once, in the caller's thread, waiting for the stream first. */
static bool would_block(const struct kvs_submission *s) {
  const struct kvs_regions *regions = &s->work->scratch->regions;
  bool host = regions->count > 0;
  for (size_t i = 0; i < regions->count; i++) host &= regions->items[i].memory == KVS_MEMORY_PINNED;
  return host && !s->device->ops->copy_direct;
}

static bool prefers_direct(const struct kvs_engine *engine) {
  return engine->device->ops->copy_direct && !engine->device->stepped;
}

static const char *reason_against_kernel(const struct kvs_engine *engine) {
  if (engine->disabled.kernel) return "KVSWAP_DISABLE names it";
  return engine->device->info.kernels ? NULL : engine->device->info.kernels_note;
}

/* A slot has the host on one side. */
static bool may_burst(const struct kvs_submission *s) {
  return !s->peer && s->work->direction != KVS_OTHER_DIRECTION && !kvs_reason_against_burst(s->engine);
}

static void release_slots(struct kvs_submission *s) {
  if (s->slots) pthread_mutex_unlock(&s->slots->lock);
  s->slots = NULL;
}

/* A slot holds whole rows where layers keep them from being cut. Its size is known once the slots are locked. */
static bool take_slots(struct kvs_submission *s) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  if (!s->slots) s->slots = kvs_slots_take(s->engine, s->lane, s->work->direction);
  if (s->slots && s->work->layered && kvs_longest_row(rows, 0, rows->count) > s->slots->slot_nbytes) release_slots(s);
  return s->slots != NULL;
}

/* What a transfer is predicted to take, in nanoseconds. A kernel keeps the pace at which a model beside it does not
 * suffer, but for one of high priority, which takes the link whatever it costs the model. */
static double predict(const struct kvs_submission *s, enum kvs_path path) {
  double ns = kvs_cost_ns(&s->engine->costs, &s->work->shape, path);
  if (path == KVS_PATH_BURST) ns *= short_runs(&s->work->shape) * many(s->work->shape.runs);
  if (path == KVS_PATH_DMA) ns *= many(s->work->shape.copies);
  if (path != KVS_PATH_KERNEL) return ns;
  double gbps = kvs_kernel_gbps(s), paced = gbps > 0 ? (double)s->work->nbytes / gbps : 0;
  if (paced > ns) ns = paced;
  return s->options->priority == KVS_PRIORITY_HIGH ? ns : ns * KERNEL_HANDICAP;
}

/* What only bursts have to know, and as much work as all else together. Of a list of copies it is known already. */
static int count_runs(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  const int64_t *host = work->direction == KVS_D2H ? work->dst_slots : work->src_slots;
  if (!work->grid || work->packed) return KVS_OK;
  int status = kvs_pack_for_burst(s);
  return status ? status
                : kvs_pack_count_runs(&work->scratch->packing, host, work->nslots, work->cpu_slots,
                                      &work->scratch->plan, &work->shape.runs, s->err);
}

/* Bursts last, about which most has to be found out. */
static int fastest(struct kvs_submission *s, enum kvs_path *best) {
  struct kvs_engine *engine = s->engine;
  const struct {
    enum kvs_path path;
    bool possible;
  } ways[] = {{KVS_PATH_DMA, true},
              {KVS_PATH_STRIDED, s->work->shape.rects > 0},
              {KVS_PATH_KERNEL, !reason_against_kernel(engine)}};
  double least = INFINITY;
  *best = KVS_PATH_DMA;
  for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
    double ns = ways[i].possible ? predict(s, ways[i].path) : INFINITY;
    if (ns < least) least = ns, *best = ways[i].path;
  }
  /* A kernel that waits for a copy would hold up a model's kernels behind it in the one queue: measured, H200, beside a
   * decode step 0.2 more than a bare copy. */
  bool possible =
      !kvs_racecheck_on() && !engine->disabled.auto_burst && may_burst(s) && predict(s, KVS_PATH_BURST) < least;
  if (!possible || !take_slots(s)) return KVS_OK;
  int status = count_runs(s);
  if (!status && predict(s, KVS_PATH_BURST) < least)
    *best = KVS_PATH_BURST;
  else
    release_slots(s);
  return status;
}

static enum kvs_path pick_for_peer(const struct kvs_submission *s) {
  uint64_t copies = s->work->shape.copies;
  if (!s->peer_direct || reason_against_kernel(s->engine) || !copies) return KVS_PATH_DMA;
  return s->work->nbytes / copies < PEER_COPY_NBYTES ? KVS_PATH_KERNEL : KVS_PATH_DMA;
}

static int pick(struct kvs_submission *s, enum kvs_path *path) {
  struct kvs_engine *engine = s->engine;
  *path = prefers_direct(engine)                             ? KVS_PATH_DIRECT
          : s->peer                                          ? pick_for_peer(s)
          : pageable(&s->work->scratch->regions)             ? KVS_PATH_DMA /* which the driver stages */
          : would_block(s) && !reason_against_kernel(engine) ? KVS_PATH_KERNEL
                                                             : KVS_PATH_AUTO;
  return *path == KVS_PATH_AUTO ? fastest(s, path) : KVS_OK;
}

void kvs_options_resolve(struct kvs_engine *engine, const struct kvs_options *given, struct kvs_options *options) {
  struct kvs_defaults defaults;
  kvs_engine_get_defaults(engine, &defaults);
  *options = given ? *given : (struct kvs_options){.path = KVS_PATH_AUTO};
  if (options->path == KVS_PATH_AUTO) options->path = defaults.path;
  if (options->priority == KVS_PRIORITY_DEFAULT) options->priority = defaults.priority;
  if (options->priority == KVS_PRIORITY_DEFAULT) options->priority = KVS_PRIORITY_NORMAL;
  if (options->max_ctas == 0) options->max_ctas = defaults.max_ctas;
  if (options->pace_gbps <= 0) options->pace_gbps = defaults.pace_gbps;
}

bool kvs_may_stride(const struct kvs_engine *engine, const struct kvs_options *options, uint64_t entries) {
  if (kvs_dev_fault_on_copies(engine->device)) return false; /* which looks at plain copies */
  return options->path == KVS_PATH_STRIDED ||
         (options->path == KVS_PATH_AUTO && entries > FEW && !prefers_direct(engine) && !engine->disabled.strided);
}

bool kvs_wants_rows(const struct kvs_engine *engine, const struct kvs_options *options, uint64_t entries) {
  return options->path == KVS_PATH_KERNEL || options->path == KVS_PATH_BURST ||
         (options->path == KVS_PATH_AUTO && entries > FEW && !prefers_direct(engine));
}

static int refuse_path(const struct kvs_submission *s, enum kvs_path path, const char *why) {
  return kvs_fail(s->err, KVS_UNSUPPORTED, "path '%s' is off: %s", kvs_path_name(path), why);
}

static int choose_path(struct kvs_submission *s, enum kvs_path *path) {
  *path = s->options->path;
  s->picked = *path == KVS_PATH_AUTO;
  int status = s->picked ? pick(s, path) : KVS_OK;
  if (status) return status;
  if (*path == KVS_PATH_STRIDED && s->work->shape.rects == 0) *path = KVS_PATH_DMA; /* nothing is strided */
  if (*path == KVS_PATH_DIRECT && !s->device->ops->copy_direct)
    return kvs_fail(s->err, KVS_UNSUPPORTED, "path 'direct' is for host devices; %s has 'dma', 'burst' and 'kernel'",
                    s->engine->name);
  if (*path != KVS_PATH_KERNEL && *path != KVS_PATH_BURST) return KVS_OK;
  const char *why = *path == KVS_PATH_BURST ? kvs_reason_against_burst(s->engine) : reason_against_kernel(s->engine);
  if (why) return refuse_path(s, *path, why);
  const struct kvs_region *region = pageable(&s->work->scratch->regions);
  if (region)
    return kvs_fail(s->err, KVS_INVALID,
                    "path '%s' cannot reach pageable host memory at 0x%" PRIx64
                    ": register() it with the device, or use path 'dma'",
                    kvs_path_name(*path), region->base);
  if (s->peer && !s->peer_direct && *path == KVS_PATH_KERNEL)
    return kvs_fail(s->err, KVS_UNSUPPORTED,
                    "path 'kernel' cannot reach 0x%" PRIx64 ", which is memory of device %d: %s has no peer access to "
                    "it; path 'dma' goes through the host",
                    s->peer->base, s->peer->device, s->engine->name);
  if (*path == KVS_PATH_BURST && (!may_burst(s) || !take_slots(s))) /* whose slots wait for others, say */
    *path = s->peer && !s->peer_direct ? KVS_PATH_DMA : KVS_PATH_KERNEL;
  return KVS_OK;
}

/* What the path needs of the plan, and of memory. */
static int prepare(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  enum kvs_path path = s->transfer->path;
  if (path == KVS_PATH_KERNEL || path == KVS_PATH_BURST) {
    int status = kvs_prepare_launch(s);
    if (!s->picked || (status != KVS_NOMEM && status != KVS_REFUSED)) return status;
    s->transfer->path = KVS_PATH_DMA; /* which needs no memory of a GPU that may be full */
  }
  if (path == KVS_PATH_STRIDED) {
    int status = work->plan(work->call, KVS_FORM_RECTS, work->scratch, s->err);
    if (!status && work->scratch->rects.count == 0) s->transfer->path = KVS_PATH_DMA; /* distances that none takes */
    return status;
  }
  return work->planned ? KVS_OK : work->plan(work->call, KVS_FORM_COPIES, work->scratch, s->err);
}

/* -- issuing --------------------------------------------------------------------------------------------------- */

/* Where a layer begins in the lists, and where the one before `layer` ends; SIZE_MAX: of all layers. */
static struct kvs_layer_end begin_of(const struct kvs_submission *s, size_t layer) {
  return layer ? s->work->scratch->layers[layer - 1] : (struct kvs_layer_end){0, 0, 0};
}

static struct kvs_layer_end end_of(const struct kvs_submission *s, size_t layer) {
  const struct kvs_scratch *scratch = s->work->scratch;
  if (layer != SIZE_MAX) return begin_of(s, layer);
  return (struct kvs_layer_end){scratch->copies.count, scratch->rects.count, scratch->rows.count};
}

/* Layers [layer, end); 0 and SIZE_MAX: everything. */
static void look_at(struct kvs_submission *s, size_t layer, size_t end) {
  const struct kvs_copies *all = &s->work->scratch->copies;
  const struct kvs_layer_end from = begin_of(s, layer), to = end_of(s, end);
  s->first_row = from.rows;
  s->rows_end = to.rows;
  s->view = (struct kvs_copies){.count = 0};
  if (all->count == 0) return;
  s->view = (struct kvs_copies){.dst = all->dst + from.copies,
                                .src = all->src + from.copies,
                                .nbytes = all->nbytes + from.copies,
                                .block = all->block + from.copies,
                                .count = to.copies - from.copies,
                                .capacity = to.copies - from.copies};
}

/* The path's kernel or a burst was refused: the copy engine gets these layers, and all that follow. */
static void try_again(struct kvs_submission *s, size_t layer, size_t end, const struct kvs_error *why) {
  struct kvs_work *work = s->work;
  struct kvs_error err;
  if (s->transfer->path == KVS_PATH_KERNEL && s->options->path == KVS_PATH_KERNEL) {
    kvs_fail_whole(s, why); /* insisted on, and nothing of it runs */
    return;
  }
  if (!work->planned && work->plan(work->call, KVS_FORM_COPIES, work->scratch, &err)) {
    kvs_fail_whole(s, &err);
    return;
  }
  work->planned = true;
  atomic_fetch_add(&s->engine->second_attempts, 1);
  s->transfer->path = KVS_PATH_DMA;
  look_at(s, layer, end);
  kvs_issue_copies(s);
}

static void issue_view(struct kvs_submission *s, size_t layer, size_t end) {
  struct kvs_error why;
  size_t refused_end;
  int code = 0, status = KVS_OK;
  kvs_dev_fault_copies(s->device, &s->view, &refused_end, &code);
  if (refused_end > s->view.count) {
    kvs_fail_driver(&why, KVS_REFUSED, code, "copy", "injected fault");
    for (size_t i = s->view.count; i < refused_end; i++) kvs_block_by_block(s, i, false, &why);
  }
  if (s->transfer->path == KVS_PATH_KERNEL)
    status = kvs_launch_copies(s, &why);
  else if (s->transfer->path == KVS_PATH_BURST)
    status = kvs_issue_bursts(s, &why);
  else if (s->transfer->path != KVS_PATH_DIRECT)
    kvs_issue_copies(s);
  else if (s->view.count)
    status = kvs_dev_copy_direct(s->device, &s->view, s->lane->spine, &why);
  if (kvs_beyond_hope(status))
    kvs_give_up(s, &why);
  else if (status)
    try_again(s, layer, end, &why);
}

/* -- layers ---------------------------------------------------------------------------------------------------- */

/* The race checker's side of layers, before anything of them is queued. */
static void watch(struct kvs_submission *s, size_t layer, size_t end) {
  static const char *const names[] = {[KVS_D2H] = "D2H", [KVS_H2D] = "H2D", [KVS_OTHER_DIRECTION] = "copy"};
  const struct kvs_transfer *transfer = s->transfer;
  if (!kvs_racecheck_on()) return;
  struct kvs_race_party who = kvs_watch_party(s->engine, s->lane->spine, s->options->where);
  who.transfer = transfer->ticket;
  who.lane = s->lane->number;
  who.sequence = transfer->sequence;
  snprintf(who.what, sizeof who.what, "%s by %s", names[transfer->direction], kvs_path_name(transfer->path));
  const struct kvs_rects *all = &s->work->scratch->rects;
  for (size_t next = layer; next == layer || next < end; next++) { /* SIZE_MAX: all at once */
    size_t after = end == SIZE_MAX ? end : next + 1;
    look_at(s, next, after);
    size_t from = begin_of(s, next).rects;
    const struct kvs_rects rects = {
        .items = all->items + from, .block = all->block + from, .count = end_of(s, after).rects - from};
    s->work->watch(s->work->call, transfer, after == SIZE_MAX ? after : next, &s->view, &rects, &who);
    if (after == SIZE_MAX) break;
  }
}

static void issue_span(struct kvs_submission *s, size_t layer, size_t end) {
  watch(s, layer, end);
  look_at(s, layer, end);
  issue_view(s, layer, end);
  kvs_issue_rects(s, begin_of(s, layer).rects, end_of(s, end).rects);
}

/* Every layer's event is recorded, whatever became of its copies: who waits for it must get past it. */
static void issue_layers(struct kvs_submission *s) {
  struct kvs_transfer *transfer = s->transfer;
  struct kvs_error why;
  for (size_t layer = 0, end; layer < s->work->scratch->nlayers; layer = end) {
    end = kvs_layer_group_end(s, layer);
    for (size_t i = layer; i < end; i++)
      if (!s->fatal && !transfer->all_failed && kvs_order_before_layer(transfer, s->options, i, &why))
        kvs_fail_whole(s, &why);
    if (!s->fatal && !transfer->all_failed) issue_span(s, layer, end);
    for (size_t i = layer; i < end && i < transfer->nlayers; i++)
      if (transfer->layers[i] && kvs_dev_event_record(s->device, transfer->layers[i], s->lane->spine, &why)) {
        kvs_engine_event_put(s->engine, transfer->layers[i]);
        transfer->layers[i] = 0;
      }
  }
}

static void issue(struct kvs_submission *s) {
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

/* Layers may bring others yet. */
static int prepare_outcome(struct kvs_submission *s) {
  struct kvs_transfer *transfer = s->transfer;
  if (!s->work->settle || (!transfer->others && !s->options->nafter_layers)) return KVS_OK;
  struct kvs_failure **shared = s->work->outcome;
  transfer->outcome = shared && *shared ? *shared : kvs_failure_open(transfer->ticket);
  if (!transfer->outcome) return kvs_fail(s->err, KVS_NOMEM, "no memory to follow a transfer");
  if (!shared) return KVS_OK;
  *shared = transfer->outcome;
  atomic_fetch_add(&transfer->outcome->refs, 1); /* the caller's, or the transfer's */
  return KVS_OK;
}

static int submit_on_lane(struct kvs_submission *s) {
  struct kvs_lane *lane = s->lane;
  struct kvs_transfer *transfer = s->transfer;
  struct kvs_error ignored, why;
  (void)kvs_lane_reap(lane, &ignored);
  int status = kvs_lane_reserve(lane, transfer, s->err);
  s->leftovers = !status; /* should the call be refused from here on */
  if (!status) status = kvs_lane_head(lane, s->ahead, &transfer->head, s->err);
  if (!status) status = kvs_order_before(transfer, s->work, s->options, s->err);
  if (!status) status = prepare_outcome(s);
  if (!status) status = kvs_dev_event_record(s->device, transfer->start, transfer->head, s->err);
  if (status) {
    kvs_lane_unreserve(lane, transfer);
    return status;
  }
  transfer->sequence = ++lane->sequence;
  issue(s);
  kvs_close_bursts(s);
  if (kvs_order_behind(transfer, s->work, s->options, &why)) kvs_fail_whole(s, &why);
  if (transfer->outcome) {
    transfer->outcome->others |= transfer->others;
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
  /* Two threads that share a stream may mean two lanes: forking from it and joining it again must not interleave. */
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

/* The lane is found first, since whether slots can be had depends on it. */
static int submit(struct kvs_submission *s) {
  int status = kvs_peer_find(s->engine, &s->work->scratch->regions, &s->peer, &s->peer_direct, s->err);
  if (!status) status = kvs_lane_acquire(s->engine, s->options, s->work->direction, &s->lane, s->err);
  if (status) return status;
  status = choose_path(s, &s->transfer->path);
  if (!status) status = prepare(s);
  if (!status) status = prepare_layers(s);
  if (!status) status = submit_in_order(s);
  release_slots(s);
  kvs_lane_release(s->lane, status != KVS_OK && s->leftovers);
  return status;
}

int kvs_submit(struct kvs_engine *engine, struct kvs_work *work, const struct kvs_options *options,
               struct kvs_transfer **out, struct kvs_error *err) {
  struct kvs_submission s = {.engine = engine, .device = engine->device, .work = work, .options = options, .err = err};
  s.transfer = kvs_transfer_new(engine, err);
  if (!s.transfer) return KVS_NOMEM;
  s.transfer->direction = work->direction;
  s.transfer->nbytes = work->nbytes;
  s.transfer->nblocks = work->nblocks;
  s.transfer->others = work->others;
  s.transfer->ticket = atomic_fetch_add(&engine->tickets, 1) + 1;
  find_bounds(&work->scratch->regions, s.transfer);
  int status = submit(&s);
  if (status) {
    if (s.transfer->staging) kvs_engine_staging_put(engine, s.transfer->staging);
    s.transfer->staging = NULL;
    kvs_transfer_unref(s.transfer);
    return status;
  }
  if (s.fatal) kvs_engine_lose(engine); /* the transfer failed in its lane, and keeps what may still be read */
  count(engine, work);
  *out = s.transfer;
  return KVS_OK;
}
