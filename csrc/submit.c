/* Submitting: from a checked plan to work queued on the device.
 *
 * In order: choose a path and get what it needs (nothing has moved, any error is the caller's); take the lane; wait, on
 * the spine, for what the transfer must start after (order.c); issue, layer by layer where layers matter; record the
 * end and let the caller's stream wait for it. From the first issued copy on nothing fails the call any more: a copy
 * that the driver refuses is tried smaller, down to single blocks cut at the driver's own ranges, and what still fails
 * is written down in the transfer, which goes on in its place. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "hooks.h"
#include "racecheck.h"

enum {
  BATCH_SMALL = 128, /* copies a batch call */
  BATCH_LARGE = 256, /* the same from LARGE_COPY bytes a copy on */
  LARGE_COPY = 32 << 10,
  KERNEL_BELOW = 12 << 10, /* mean bytes a copy below which the kernel beats the copy engine (measured, H200) */
  STRIDED_FROM = 4 << 10,  /* mean bytes a row from which copies of rows do: a little slower, but no SM is used */
  KERNEL_FROM = 16,        /* copies from which a launch pays */
  KERNEL_CTAS = 8,         /* 4 fill the link of an H200, 8 leave room for slower SMs */
  KERNEL_THREADS = 512,
  KERNEL_PIECE = 32 << 10, /* one CTA's share at a time */
  BACKGROUND_CTAS = 4,
};
static const uint64_t SLOWEST_NS_PER_MIB = 1000000000; /* what the kernel's arithmetic has room for: 1 MB/s a CTA */
static const double BACKGROUND_PACE = 40.0; /* GB/s, under the load at which SM stores to the host stall the GPU */

struct submission {
  struct kvs_engine *engine;
  struct kvs_device *device;
  struct kvs_work *work;
  const struct kvs_options *options;
  struct kvs_transfer *transfer;
  struct kvs_lane *lane;
  struct kvs_copies view; /* of the plan's copies: those of the layer that is being issued */
  size_t npieces;         /* already in the staging, of layers before */
  size_t failed_capacity;
  size_t cursor;         /* where block_by_block() goes on */
  bool leftovers;        /* something may stand on the spine although the call fails */
  int fatal;             /* KVS_OK, or why nothing more can be issued */
  struct kvs_error *err; /* of the whole call */
};

/* -- which way ------------------------------------------------------------------------------------------------- */

static const struct kvs_region *pageable(const struct kvs_regions *regions) {
  for (size_t i = 0; i < regions->count; i++)
    if (regions->items[i].memory == KVS_MEMORY_PAGEABLE) return &regions->items[i];
  return NULL;
}

/* A driver copies between two places of the host at once, in the caller's thread, waiting for the stream first. */
static bool would_block(const struct submission *s) {
  const struct kvs_regions *regions = &s->work->scratch->regions;
  bool host = regions->count > 0;
  for (size_t i = 0; i < regions->count; i++) host &= regions->items[i].memory == KVS_MEMORY_PINNED;
  return host && !s->device->ops->copy_direct;
}

static bool prefers_direct(const struct kvs_engine *engine) {
  return engine->device->ops->copy_direct && !engine->device->stepped;
}

static enum kvs_path predict(const struct submission *s) {
  const struct kvs_scratch *scratch = s->work->scratch;
  size_t count = scratch->copies.count + scratch->rects.rows;
  bool rows = scratch->rects.count > 0;
  enum kvs_path by_engine = rows ? KVS_PATH_STRIDED : KVS_PATH_DMA;
  if (prefers_direct(s->engine)) return KVS_PATH_DIRECT;
  if (pageable(&scratch->regions)) return KVS_PATH_DMA; /* which the driver stages: nobody measured rows of it */
  if (!s->device->info.kernels || s->engine->no_kernel) return by_engine;
  if (would_block(s)) return KVS_PATH_KERNEL;
  if (count < KERNEL_FROM) return by_engine;
  return s->work->nbytes / count >= (rows ? STRIDED_FROM : KERNEL_BELOW) ? by_engine : KVS_PATH_KERNEL;
}

static enum kvs_path asked_for(const struct kvs_engine *engine, const struct kvs_options *options) {
  return options && options->path != KVS_PATH_AUTO ? options->path : engine->default_path;
}

bool kvs_wants_rows(const struct kvs_engine *engine, const struct kvs_options *options, bool *insists) {
  enum kvs_path path = asked_for(engine, options);
  *insists = path == KVS_PATH_STRIDED;
  if (kvs_dev_fault_on_copies(engine->device)) return false; /* which looks at plain copies */
  return *insists || (path == KVS_PATH_AUTO && !prefers_direct(engine));
}

static int choose_path(struct submission *s, enum kvs_path *path) {
  *path = asked_for(s->engine, s->options);
  if (*path == KVS_PATH_AUTO) *path = predict(s);
  if (*path == KVS_PATH_STRIDED && s->work->scratch->rects.count == 0) *path = KVS_PATH_DMA; /* nothing is strided */
  if (*path == KVS_PATH_DIRECT && !s->device->ops->copy_direct)
    return kvs_fail(s->err, KVS_UNSUPPORTED, "path 'direct' is for host devices; %s has 'dma' and 'kernel'",
                    s->engine->name);
  if (*path != KVS_PATH_KERNEL) return KVS_OK;
  const struct kvs_region *region = pageable(&s->work->scratch->regions);
  if (region)
    return kvs_fail(s->err, KVS_INVALID,
                    "path 'kernel' cannot reach pageable host memory at 0x%" PRIx64
                    ": register() it with the device, or use path 'dma'",
                    region->base);
  if (!s->device->info.kernels || s->engine->no_kernel)
    return kvs_fail(s->err, KVS_UNSUPPORTED, "path 'kernel' is off: %s",
                    s->engine->no_kernel ? "KVSWAP_DISABLE names it" : s->device->info.kernels_note);
  return KVS_OK;
}

/* The other paths get the rows as plain copies. */
static int flatten(struct submission *s) {
  struct kvs_scratch *scratch = s->work->scratch;
  if (s->transfer->path == KVS_PATH_STRIDED || scratch->rects.count == 0) return KVS_OK;
  kvs_scratch_clear(scratch);
  return s->work->expand(s->work->call, true, scratch, &scratch->copies, s->err);
}

static int prepare_kernel(struct submission *s) {
  size_t most = kvs_plan_most_pieces(&s->work->scratch->copies, s->work->nbytes, KERNEL_PIECE);
  if (s->transfer->path != KVS_PATH_KERNEL) return KVS_OK;
  return most ? kvs_engine_staging_get(s->engine, most * sizeof(struct kvs_piece), &s->transfer->staging, s->err)
              : KVS_OK;
}

/* -- what was refused ------------------------------------------------------------------------------------------ */

static void note_failure(struct submission *s, uint32_t block, const struct kvs_error *why) {
  struct kvs_transfer *transfer = s->transfer;
  if (transfer->error.status == KVS_OK) transfer->error = *why;
  if (transfer->all_failed) return;
  if (transfer->nfailed == s->failed_capacity) {
    size_t capacity = s->failed_capacity ? 2 * s->failed_capacity : 16;
    uint32_t *failed = realloc(transfer->failed, capacity * sizeof *failed);
    if (!failed) {
      transfer->all_failed = true; /* too many to name: claim none of them */
      return;
    }
    transfer->failed = failed;
    s->failed_capacity = capacity;
  }
  transfer->failed[transfer->nfailed++] = block;
}

static bool beyond_hope(int status) { return status == KVS_LOST; }

/* One block, cut where the driver's own ranges end: it may know seams that we do not. */
static int copy_in_parts(struct submission *s, uint64_t dst, uint64_t src, uint64_t nbytes, struct kvs_error *why) {
  int status = kvs_dev_copy(s->device, dst, src, nbytes, s->lane->spine, why);
  while (status == KVS_REFUSED && nbytes) {
    struct kvs_region from, to;
    struct kvs_error ignored;
    if (kvs_dev_pointer_query(s->device, src, &from, &ignored) || kvs_dev_pointer_query(s->device, dst, &to, &ignored))
      return status;
    uint64_t part = from.base + from.nbytes - src, dst_part = to.base + to.nbytes - dst;
    if (dst_part < part) part = dst_part;
    if (part >= nbytes) return kvs_dev_copy(s->device, dst, src, nbytes, s->lane->spine, why);
    int first = kvs_dev_copy(s->device, dst, src, part, s->lane->spine, why);
    if (first) return first;
    dst += part, src += part, nbytes -= part;
  }
  return status;
}

static uint64_t overlap(uint64_t begin, uint64_t end, uint64_t from, uint64_t to) {
  return (end < to ? end : to) - (begin > from ? begin : from);
}

/* For each block that copy i of the view carries: issue it alone (`again`), or write it off with *why. */
static void block_by_block(struct submission *s, size_t i, bool again, const struct kvs_error *why) {
  struct kvs_copies *copies = &s->view, *single = &s->work->scratch->single;
  uint64_t begin = copies->dst[i], end = begin + copies->nbytes[i];
  struct kvs_error err = *why;
  if (single->count == 0 && s->work->expand(s->work->call, false, s->work->scratch, single, &err)) {
    single->count = 0;
    s->transfer->all_failed = true;
    note_failure(s, copies->block[i], &err);
    return;
  }
  /* Both lists were made in one order, so the search goes on where the last one ended. */
  for (size_t seen = 0, found = 0; seen < single->count && found < end - begin && !s->fatal; seen++) {
    size_t b = s->cursor;
    s->cursor = b + 1 < single->count ? b + 1 : 0;
    if (single->dst[b] >= end || single->dst[b] + single->nbytes[b] <= begin) continue;
    uint64_t from = single->dst[b] > begin ? single->dst[b] : begin;
    uint64_t part = overlap(begin, end, single->dst[b], single->dst[b] + single->nbytes[b]);
    found += part;
    if (found >= end - begin) s->cursor = b; /* the next copy may carry the rest of this block */
    int status = again ? copy_in_parts(s, from, copies->src[i] + (from - begin), part, &err) : why->status;
    if (beyond_hope(status)) s->fatal = kvs_fail_driver(s->err, status, err.code, err.operation, "%s", "");
    if (status) note_failure(s, single->block[b], &err);
  }
}

/* All of it counts as lost, whatever may have arrived. */
static void fail_whole(struct submission *s, const struct kvs_error *why) {
  s->transfer->error = *why;
  s->transfer->all_failed = true;
}

/* -- dma ------------------------------------------------------------------------------------------------------- */

static void issue_range(struct submission *s, size_t from, size_t to) {
  kvs_stream stream = s->lane->spine;
  const struct kvs_copies *copies = &s->view;
  struct kvs_error why;
  int status;
  if (from >= to || s->fatal) return;
  if (to - from == 1)
    status = kvs_dev_copy(s->device, copies->dst[from], copies->src[from], copies->nbytes[from], stream, &why);
  else
    status = kvs_dev_copy_batch(s->device, copies, from, to, stream, &why);
  if (beyond_hope(status)) {
    *s->err = why;
    s->fatal = status;
  } else if (status && to - from == 1) {
    block_by_block(s, from, true, &why);
  } else if (status) {
    size_t middle = from + (to - from) / 2; /* copying again what went through is harmless: sources do not change */
    issue_range(s, from, middle);
    issue_range(s, middle, to);
  }
}

/* One large batch call is slow and, below 28 KiB from host to device, very slow: the driver does far better with the
 * same list in parts, all on one stream (H200, driver 580, 8192 x 16 KiB: 25 -> 45 GB/s D2H, 6 -> 43 H2D; more streams
 * undo it). */
static void issue_dma(struct submission *s) {
  size_t count = s->view.count, all = s->work->scratch->copies.count;
  size_t part = all && s->work->nbytes / all >= LARGE_COPY ? BATCH_LARGE : BATCH_SMALL;
  if (s->engine->no_batch) part = 1;
  for (size_t from = 0; from < count; from += part) issue_range(s, from, count - from < part ? count : from + part);
}

/* A block whose rows are refused as one goes row by row. */
static void issue_rect(struct submission *s, const struct kvs_rect *rect, uint32_t block) {
  struct kvs_error why;
  int status = kvs_dev_copy_rect(s->device, rect, s->lane->spine, &why);
  for (uint64_t row = 0; status && !beyond_hope(status) && row < kvs_rect_rows(rect); row++) {
    int again = copy_in_parts(s, kvs_rect_dst(rect, row), kvs_rect_src(rect, row), rect->width, &why);
    if (beyond_hope(again)) status = again;
    if (again && !beyond_hope(again)) {
      note_failure(s, block, &why);
      return;
    }
  }
  if (!beyond_hope(status)) return;
  *s->err = why;
  s->fatal = status;
}

static void issue_rects(struct submission *s, size_t from, size_t to) {
  const struct kvs_rects *rects = &s->work->scratch->rects;
  for (size_t i = from; i < to && !s->fatal; i++) issue_rect(s, &rects->items[i], rects->block[i]);
}

/* -- kernel and direct ----------------------------------------------------------------------------------------- */

static uint64_t pace(const struct submission *s, unsigned ctas) {
  double gbps = s->options->pace_gbps > 0 ? s->options->pace_gbps : s->engine->default_pace;
  if (gbps <= 0 && s->options->priority == KVS_PRIORITY_BACKGROUND) gbps = BACKGROUND_PACE;
  if (gbps <= 0) return 0;
  double ns = (double)(1 << 20) * ctas / gbps;
  return ns < (double)SLOWEST_NS_PER_MIB ? (uint64_t)ns + 1 : SLOWEST_NS_PER_MIB;
}

static int launch_pieces(struct submission *s, struct kvs_error *why) {
  const struct kvs_staging *staging = s->transfer->staging;
  uint64_t at = s->npieces * sizeof(struct kvs_piece);
  size_t npieces = kvs_plan_pieces(&s->view, KERNEL_PIECE, &s->work->scratch->regions,
                                   (struct kvs_piece *)(uintptr_t)(staging->host + at));
  unsigned ctas = s->options->max_ctas ? s->options->max_ctas : s->engine->default_ctas;
  if (!ctas) ctas = s->options->priority == KVS_PRIORITY_BACKGROUND ? BACKGROUND_CTAS : KERNEL_CTAS;
  if (npieces < ctas) ctas = (unsigned)npieces;
  while (ctas > 1 && pace(s, ctas) >= SLOWEST_NS_PER_MIB) ctas /= 2; /* fewer, rather than faster than was asked for */
  struct kvs_copy_params params = {.pieces = staging->device + at, .npieces = npieces, .ns_per_mib = pace(s, ctas)};
  struct kvs_launch launch = {.kernel = KVS_KERNEL_COPY,
                              .grid = ctas,
                              .threads = KERNEL_THREADS,
                              .params = &params,
                              .params_nbytes = sizeof params};
  s->npieces += npieces;
  int status = kvs_dev_copy(s->device, staging->device + at, staging->host + at, npieces * sizeof(struct kvs_piece),
                            s->lane->spine, why);
  return status ? status : kvs_dev_launch(s->device, &launch, s->lane->spine, why);
}

/* A list that goes as a whole; where it is refused, the copy engine gets it unless the caller insisted. */
static void issue_whole(struct submission *s, enum kvs_path path) {
  struct kvs_error why;
  int status = KVS_OK;
  if (s->view.count)
    status = path == KVS_PATH_KERNEL ? launch_pieces(s, &why)
                                     : kvs_dev_copy_direct(s->device, &s->view, s->lane->spine, &why);
  if (beyond_hope(status)) {
    *s->err = why;
    s->fatal = status;
  } else if (status && path == KVS_PATH_KERNEL && s->options->path == KVS_PATH_KERNEL) {
    fail_whole(s, &why); /* insisted on, and nothing of it runs */
  } else if (status) {
    s->transfer->path = KVS_PATH_DMA;
    issue_dma(s);
  }
}

/* -- layers ---------------------------------------------------------------------------------------------------- */

static void look_at(struct submission *s, size_t from, size_t to) {
  const struct kvs_copies *all = &s->work->scratch->copies;
  s->view = (struct kvs_copies){.dst = all->dst + from,
                                .src = all->src + from,
                                .nbytes = all->nbytes + from,
                                .block = all->block + from,
                                .count = to - from,
                                .capacity = to - from};
}

/* The race checker's side of a layer, before anything of it is queued. */
static void watch(const struct submission *s, size_t layer, size_t from, size_t to) {
  static const char *const names[] = {[KVS_D2H] = "D2H", [KVS_H2D] = "H2D", [KVS_OTHER_DIRECTION] = "copy"};
  const struct kvs_transfer *transfer = s->transfer;
  if (!kvs_racecheck_on()) return;
  struct kvs_race_party who = kvs_watch_party(s->engine, s->lane->spine, s->options->where);
  who.transfer = transfer->ticket;
  who.lane = s->lane->number;
  who.sequence = transfer->sequence;
  snprintf(who.what, sizeof who.what, "%s by %s", names[transfer->direction], kvs_path_name(transfer->path));
  const struct kvs_rects *all = &s->work->scratch->rects;
  const struct kvs_rects rects = {.items = all->items + from, .block = all->block + from, .count = to - from};
  s->work->watch(s->work->call, transfer, layer, &s->view, &rects, &who);
}

static void issue_view(struct submission *s) {
  struct kvs_error why;
  size_t refused_end;
  int code = 0;
  kvs_dev_fault_copies(s->device, &s->view, &refused_end, &code);
  if (refused_end > s->view.count) {
    kvs_fail_driver(&why, KVS_REFUSED, code, "copy", "injected fault");
    for (size_t i = s->view.count; i < refused_end; i++) block_by_block(s, i, false, &why);
  }
  if (s->transfer->path == KVS_PATH_DMA || s->transfer->path == KVS_PATH_STRIDED)
    issue_dma(s);
  else
    issue_whole(s, s->transfer->path);
}

/* Every layer's event is recorded, whatever became of its copies: who waits for it must get past it. */
static void issue_layers(struct submission *s) {
  const struct kvs_scratch *scratch = s->work->scratch;
  struct kvs_transfer *transfer = s->transfer;
  struct kvs_layer_end begin = {0, 0};
  struct kvs_error why;
  for (size_t layer = 0; layer < scratch->nlayers; layer++) {
    struct kvs_layer_end end = scratch->layers[layer];
    if (!s->fatal && !transfer->all_failed && kvs_order_before_layer(transfer, s->options, layer, &why))
      fail_whole(s, &why);
    if (!s->fatal && !transfer->all_failed) {
      look_at(s, begin.copies, end.copies);
      watch(s, layer, begin.rects, end.rects);
      issue_view(s);
      issue_rects(s, begin.rects, end.rects);
    }
    if (layer < transfer->nlayers && transfer->layers[layer] &&
        kvs_dev_event_record(s->device, transfer->layers[layer], s->lane->spine, &why)) {
      kvs_engine_event_put(s->engine, transfer->layers[layer]);
      transfer->layers[layer] = 0;
    }
    begin = end;
  }
}

static void issue(struct submission *s) {
  const struct kvs_scratch *scratch = s->work->scratch;
  for (size_t i = 0; i < s->work->nlost; i++) note_failure(s, s->work->lost[i], &s->work->lost_error);
  if (scratch->nlayers) {
    issue_layers(s);
    return;
  }
  look_at(s, 0, scratch->copies.count);
  watch(s, SIZE_MAX, 0, scratch->rects.count);
  issue_view(s);
  issue_rects(s, 0, scratch->rects.count);
}

static int prepare_layers(struct submission *s) {
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

static int submit_on_lane(struct submission *s) {
  struct kvs_lane *lane = s->lane;
  struct kvs_transfer *transfer = s->transfer;
  struct kvs_error ignored, why;
  (void)kvs_lane_reap(lane, &ignored);
  int status = kvs_lane_reserve(lane, transfer, s->err);
  s->leftovers = !status; /* should the call be refused from here on */
  if (!status) status = kvs_order_before(transfer, s->work, s->options, s->err);
  if (!status) status = kvs_dev_event_record(s->device, transfer->start, lane->spine, s->err);
  if (status) {
    kvs_lane_unreserve(lane, transfer);
    return status;
  }
  transfer->sequence = ++lane->sequence;
  issue(s);
  if (kvs_order_behind(transfer, s->work, s->options, &why)) fail_whole(s, &why);
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
    widen(regions->items[i].memory == KVS_MEMORY_DEVICE ? &transfer->gpu : &transfer->cpu, &regions->items[i]);
}

static void count(struct kvs_engine *engine, const struct kvs_work *work) {
  uint64_t copies = work->scratch->copies.count + work->scratch->rects.count;
  atomic_fetch_add(&engine->submitted, 1);
  atomic_fetch_add(&engine->copies, copies);
  if (work->entries > copies) atomic_fetch_add(&engine->merged, work->entries - copies);
}

static int submit_in_order(struct submission *s) {
  int status = kvs_lane_acquire(s->engine, s->options, s->work->direction, &s->lane, s->err);
  if (status) return status;
  /* Two threads that share a stream may mean two lanes: forking from it and joining it again must not interleave. */
  pthread_mutex_t *stream =
      s->options->on_stream ? &s->engine->stream_locks[s->lane->stream_id % KVS_STREAM_LOCKS] : NULL;
  if (stream) pthread_mutex_lock(stream);
  pthread_mutex_lock(&s->lane->submit);
  adopt_owner(s->transfer, s->options);
  status = submit_on_lane(s);
  pthread_mutex_unlock(&s->lane->submit);
  if (stream) pthread_mutex_unlock(stream);
  kvs_lane_release(s->lane, status != KVS_OK && s->leftovers);
  return status;
}

int kvs_submit(struct kvs_engine *engine, struct kvs_work *work, const struct kvs_options *options,
               struct kvs_transfer **out, struct kvs_error *err) {
  static const struct kvs_options defaults = {.priority = KVS_PRIORITY_NORMAL};
  struct submission s = {.engine = engine, .device = engine->device, .work = work, .err = err};
  s.options = options ? options : &defaults;
  s.transfer = kvs_transfer_new(engine, err);
  if (!s.transfer) return KVS_NOMEM;
  s.transfer->direction = work->direction;
  s.transfer->nbytes = work->nbytes;
  s.transfer->nblocks = work->nblocks;
  s.transfer->ticket = atomic_fetch_add(&engine->tickets, 1) + 1;
  find_bounds(&work->scratch->regions, s.transfer);
  int status = choose_path(&s, &s.transfer->path);
  if (!status) status = flatten(&s);
  if (!status) status = prepare_kernel(&s);
  if (!status) status = prepare_layers(&s);
  if (!status) status = submit_in_order(&s);
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
