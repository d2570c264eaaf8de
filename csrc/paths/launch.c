/* Path kernel: one launch for the current view. The kernel reads ids and a table of rows. It reads a list of pieces if
 * there are no ids, or if single copies matter (faults, the race checker, many merged copies). */
#include "paths/submit.h"

#include <math.h>
#include <string.h>

#include "device/hooks.h"
#include "lanes/buffers.h"
#include "lanes/late.h"
#include "racecheck/racecheck.h"

enum {
  PACK_PIECE = 4 << 10, /* bytes that a warp (PACK) takes at a time */
  THREADS = 512,        /* of a CTA of COPY and PACK */
  IDS_THREADS = 256,
  IDS_CTAS = 512,
  PEER_CTAS = 64,         /* between two H200, 16 KiB a block: 8 reach 0.49 of a plain copy, 32 0.81, 64 0.90 */
  ROWS_NBYTES = 16 << 10, /* one row for each CTA, with priority high */
  LEAST_CHUNK = 1 << 10,  /* of a stage of RING */
};
static const uint64_t SLOWEST_NS_PER_MIB = 1000000000; /* limit of the kernel's arithmetic: 1 MB/s a CTA */

static bool bulk_copies(const struct kvs_device *device) {
  return device->info.cc_major >= 9 ||
         strcmp(device->ops->kind, "cuda") != 0; /* a host device runs the C twin of either kernel */
}

/* -- staging --------------------------------------------------------------------------------------------------- */

static size_t rounded(size_t nbytes) { return (nbytes + 15) & ~(size_t)15; }

void *kvs_stage(struct kvs_submission *s, size_t nbytes, uint64_t *device) {
  const struct kvs_staging *staging = s->transfer->staging;
  void *host = (void *)(uintptr_t)(staging->host + s->staged);
  *device = staging->device + s->staged;
  s->staged += rounded(nbytes);
  return host;
}

int kvs_upload(struct kvs_submission *s, size_t from, size_t to, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_staging *staging = s->transfer->staging;
  if (to == from) return KVS_OK;
  return kvs_dev_copy(s->device, staging->device + from, staging->host + from, to - from, stream, why);
}

/* -- preparing ----------------------------------------------------------------------------------------------------- */

/* Whether the kernel needs pieces, which cost O(copies) on the CPU. */
bool kvs_wants_list(const struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  if (work->on_device.ids) return false; /* the copies are not known */
  if (!work->grid || kvs_racecheck_on() || kvs_dev_fault_on_copies(s->device)) return true;
  if (kvs_regions_aliased(&work->scratch->regions)) return true;
  return s->transfer->path == KVS_PATH_KERNEL && work->shape.pieces < work->shape.rows;
}

int kvs_prepare_list(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  int status = work->planned ? KVS_OK : work->plan(work->call, KVS_FORM_COPIES, work->scratch, s->err);
  work->planned = true;
  s->listed = true;
  if (status || work->scratch->copies.count == 0) return status;
  size_t pieces = kvs_plan_most_pieces(&work->scratch->copies, work->nbytes, KVS_KERNEL_PIECE);
  return kvs_engine_staging_get(s->engine, rounded(pieces * sizeof(struct kvs_piece)) + 16 * work->nlayers,
                                &s->transfer->staging, s->err);
}

/* Claims of slots, for ids of destinations. */
static size_t claims_of(size_t npairs) {
  size_t claims = 64;
  while (claims < 2 * npairs) claims *= 2;
  return claims;
}

/* Bytes that the kernel for ids fills first: claims, or zeros in the place of bad sources. */
static size_t ids_room(const struct kvs_submission *s, size_t npairs) {
  return s->work->on_device.write ? claims_of(npairs) * sizeof(struct kvs_id_claim) : KVS_KERNEL_PIECE;
}

/* Staging for the pairs, and for the rows in case all tables are in use. */
int kvs_prepare_grid(struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  struct kvs_packing *packing = &work->scratch->packing;
  const struct kvs_rows *rows = &work->scratch->rows;
  bool burst = s->transfer->path == KVS_PATH_BURST;
  int status = kvs_pack_pairs(work->src_slots, work->dst_slots, work->nslots, packing, s->err);
  size_t all = work->nslots + (work->on_device.ids ? work->nlost : 0); /* kvs_resolve_ids() */
  if (status || !all || !rows->count) return status;
  uint64_t longest = kvs_longest_row(rows, 0, rows->count);
  if (burst) kvs_pack_sort(packing, work->direction);
  if (burst) /* each burst sets its own parts */
    s->units = (struct kvs_units){.piece = PACK_PIECE};
  else
    s->units = (struct kvs_units){.parts = (uint32_t)((longest - 1) / KVS_KERNEL_PIECE + 1),
                                  .piece = (uint32_t)kvs_plan_part(longest, KVS_KERNEL_PIECE)};
  size_t nbytes = rows->count * sizeof *rows->items + all * sizeof(struct kvs_pair) + 128;
  if (work->on_device.ids) nbytes += all * sizeof(struct kvs_id_result) + ids_room(s, all);
  return kvs_engine_staging_get(s->engine, nbytes, &s->transfer->staging, s->err);
}

/* -- what the kernels read ------------------------------------------------------------------------------------- */

/* The rows from the engine's tables; staged if all tables are in use. */
int kvs_place_rows(struct kvs_submission *s, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  size_t from = s->staged;
  if (s->units.rows) return KVS_OK; /* placed by an earlier layer */
  int status = kvs_table_get(s->engine, rows, stream, &s->transfer->table, &s->units.rows, why);
  if (status == KVS_NOT_READY) {
    memcpy(kvs_stage(s, rows->count * sizeof *rows->items, &s->units.rows), rows->items,
           rows->count * sizeof *rows->items);
    status = kvs_upload(s, from, s->staged, stream, why);
  }
  if (status) s->units.rows = 0;
  return status;
}

static int place_pairs(struct kvs_submission *s, struct kvs_error *why) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  size_t from = s->staged;
  if (s->work->on_device.ids) return kvs_resolve_ids(s, s->lane->stream, why);
  if (s->units.pairs || packing->npairs <= KVS_INLINE_PAIRS) return KVS_OK;
  memcpy(kvs_stage(s, packing->npairs * sizeof *packing->pairs, &s->units.pairs), packing->pairs,
         packing->npairs * sizeof *packing->pairs);
  return kvs_upload(s, from, s->staged, s->lane->stream, why);
}

size_t kvs_place_list(struct kvs_submission *s, struct kvs_piece **pieces) {
  size_t most = kvs_plan_most_pieces(&s->view, s->work->nbytes, KVS_KERNEL_PIECE), before = s->staged;
  bool burst = s->transfer->path ==
               KVS_PATH_BURST; /* the copy engine reads or writes its host side, so its pieces need no device alias */
  struct kvs_piece *list = kvs_stage(s, most * sizeof *list, &s->units.pieces);
  size_t count = kvs_plan_pieces(&s->view, KVS_KERNEL_PIECE, burst ? NULL : &s->work->scratch->regions, list);
  s->staged = before + rounded(count * sizeof *list);
  *pieces = list;
  return count;
}

/* -- launching ------------------------------------------------------------------------------------------------- */

/* Copies between GPUs do not load the host link, so they are not paced; background ones still are. */
static bool between_devices(const struct kvs_submission *s) {
  return s->peer && s->options->priority != KVS_PRIORITY_BACKGROUND;
}

static struct kvs_kernel_tuning tuning_of(const struct kvs_submission *s) {
  return kvs_kernel_tuning_of(&s->engine->costs.tuning, s->work->direction, s->options->priority);
}

static double pace_gbps(const struct kvs_submission *s) {
  if (s->options->pace_gbps > 0) return s->options->pace_gbps;
  return between_devices(s) ? 0 : tuning_of(s).pace_gbps;
}

/* The rate with rows of any size; 0: unknown. The link carries no more than it did at `high`. */
static double most_gbps(const struct kvs_submission *s) {
  bool own = s->options->pace_gbps > 0 || s->options->max_ctas;
  const struct kvs_tuning *tuning = &s->engine->costs.tuning;
  double known = own ? 0 : tuning_of(s).gbps, pace = pace_gbps(s),
         high = kvs_kernel_tuning_of(tuning, s->work->direction, KVS_PRIORITY_HIGH).gbps;
  if (known > 0) return known;
  return pace > 0 && !(high > 0 && high < pace) ? pace : high;
}

/* Pace of one CTA out of `ctas`, in ns per MiB; 0: unpaced. */
static uint64_t pace_of_cta(double gbps, unsigned ctas) {
  if (gbps <= 0) return 0;
  double ns = (double)(1 << 20) * ctas / gbps;
  return ns < (double)SLOWEST_NS_PER_MIB ? (uint64_t)ns + 1 : SLOWEST_NS_PER_MIB;
}

static unsigned most_ctas(const struct kvs_submission *s) {
  if (s->options->max_ctas) return s->options->max_ctas;
  return between_devices(s) ? PEER_CTAS : tuning_of(s).ctas;
}

static unsigned least(uint64_t a, uint64_t b) { return (unsigned)(a < b ? a : b); }

/* A stage that holds a row at any position in a line. Shared memory that a CTA does not take is the model's. */
static uint32_t chunk_for(uint64_t row) {
  uint32_t chunk = LEAST_CHUNK;
  while (chunk < KVS_RING_CHUNK && chunk < row + KVS_RING_LINE) chunk *= 2;
  return chunk;
}

/* A warp of RING has a fixed number of copies under way, so short rows need more CTAs to fill the link. Measured, H200,
 * host to device: 51 GB/s from 128 KiB under way on, and in proportion below; 8 CTAs have half of that with rows of 512
 * bytes, and reach 29. If each CTA begins one row, these rows are 16 KiB: 8 CTAs with rows of 2 KiB, 16 with 1 KiB. Not
 * where a priority limits what copies cost a model: that was measured with its own CTAs. */
static unsigned ctas_for(const struct kvs_submission *s, uint64_t row) {
  unsigned ctas = most_ctas(s), sms = s->device->info.sms > 0 ? (unsigned)s->device->info.sms : 1;
  if (s->options->max_ctas || s->options->priority != KVS_PRIORITY_HIGH || s->work->direction == KVS_OTHER_DIRECTION)
    return ctas;
  uint64_t times = ROWS_NBYTES / ctas / (row < KVS_COST_LEAST ? KVS_COST_LEAST : row);
  return times < 2 || ctas > sms ? ctas : least(ctas * times, sms);
}

/* Between the GPU and the host. The costs are those of `normal`. Other CTAs take other rows at a time, until the link
 * or the pace is the limit. */
double kvs_kernel_ns(const struct kvs_submission *s) {
  const struct kvs_costs *costs = &s->engine->costs;
  const struct kvs_shape *shape = &s->work->shape;
  enum kvs_direction direction = s->work->direction == KVS_H2D ? KVS_H2D : KVS_D2H;
  double start = costs->paths[direction == KVS_H2D][KVS_PATH_KERNEL].start,
         ns = kvs_cost_ns(costs, shape, KVS_PATH_KERNEL);
  if (!(ns < INFINITY)) return ns;
  bool measured =
      s->options->priority == KVS_PRIORITY_NORMAL && direction == s->work->direction && !s->options->max_ctas;
  unsigned normal = kvs_kernel_tuning_of(&costs->tuning, direction, KVS_PRIORITY_NORMAL).ctas;
  if (!measured) ns = start + (ns - start) * normal / ctas_for(s, shape->nbytes / shape->pieces);
  double gbps = measured ? pace_gbps(s) : most_gbps(s), least_ns = gbps > 0 ? (double)shape->nbytes / gbps : 0;
  return ns > least_ns ? ns : least_ns;
}

/* For rows of at most so many bytes; 0: unknown. */
static struct kvs_width width_of_kernel(const struct kvs_submission *s, uint64_t row) {
  return (struct kvs_width){.kernel = bulk_copies(s->device) ? KVS_KERNEL_RING : KVS_KERNEL_COPY,
                            .ctas = row ? ctas_for(s, row) : most_ctas(s),
                            .gbps = pace_gbps(s),
                            .chunk = row ? chunk_for(row) : KVS_RING_CHUNK};
}

/* Units that a CTA copies at a time. */
static unsigned units_together(const struct kvs_submission *s, const struct kvs_width *width) {
  if (width->kernel == KVS_KERNEL_PACK) return THREADS / 32;
  if (width->kernel != KVS_KERNEL_RING) return 1;
  uint64_t nbytes = (uint64_t)KVS_RING_WARPS * KVS_RING_STAGES * width->chunk;
  return (uint64_t)s->device->info.shared_nbytes < nbytes ? KVS_RING_WARPS / 2 : KVS_RING_WARPS;
}

int kvs_launch_units(struct kvs_submission *s, const struct kvs_units *units, uint64_t count, size_t first_pair,
                     const struct kvs_width *width, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  bool ring = width->kernel == KVS_KERNEL_RING;
  unsigned together = units_together(s, width);
  struct kvs_copy_params params = {
      .units = *units, .count = count, .chunk = width->chunk, .by_src = s->work->direction == KVS_H2D};
  struct kvs_launch launch = {.kernel = width->kernel,
                              .grid = least(width->ctas, (count + together - 1) / together),
                              .threads = ring ? together * 32 : THREADS,
                              .shared_nbytes = ring ? together * KVS_RING_STAGES * width->chunk : 0,
                              .params = &params,
                              .params_nbytes = sizeof params};
  while (launch.grid > 1 && pace_of_cta(width->gbps, launch.grid) >= SLOWEST_NS_PER_MIB / KVS_RING_WARPS)
    launch.grid /= 2; /* fewer CTAs rather than a faster pace; the warps of RING share a CTA's pace */
  params.ns_per_mib = pace_of_cta(width->gbps, launch.grid);
  if (!units->pieces && !units->pairs) {
    size_t npairs = units->slot ? units->npairs : packing->npairs;
    memcpy(params.inline_pairs, packing->pairs + first_pair, npairs * sizeof *packing->pairs);
  }
  return kvs_dev_launch(s->device, &launch, stream, why);
}

static int launch_list(struct kvs_submission *s, struct kvs_error *why) {
  struct kvs_width width = width_of_kernel(s, 0);
  struct kvs_piece *pieces;
  size_t from = s->staged;
  uint64_t nbytes = 0;
  if (s->view.count == 0) return KVS_OK;
  size_t count = kvs_place_list(s, &pieces);
  for (size_t i = 0; i < s->view.count; i++) nbytes += s->view.nbytes[i];
  width.ctas = ctas_for(s, nbytes / count);
  int status = kvs_upload(s, from, s->staged, s->lane->stream, why);
  return status ? status : kvs_launch_units(s, &s->units, count, 0, &width, s->lane->stream, why);
}

static int launch_rows(struct kvs_submission *s, struct kvs_error *why) {
  size_t nrows = s->rows_end - s->first_row;
  const struct kvs_width width = width_of_kernel(s, kvs_longest_row(&s->work->scratch->rows, s->first_row, nrows));
  if (s->work->nslots == 0) return kvs_resolve_ids(s, s->lane->stream, why);
  if (nrows == 0) return KVS_OK;
  int status = kvs_place_rows(s, s->lane->stream, why);
  if (!status) status = place_pairs(s, why);
  if (status) return status;
  struct kvs_units units = s->units;
  units.rows += s->first_row * sizeof(struct kvs_row);
  units.nrows = (uint32_t)nrows;
  return kvs_launch_units(s, &units, nrows * units.parts * s->work->nslots, 0, &width, s->lane->stream, why);
}

/* -- ids on the device ----------------------------------------------------------------------------------------- */

static int launch_ids(struct kvs_submission *s, struct kvs_ids_params *params, enum kvs_ids_step step,
                      kvs_stream stream, struct kvs_error *why) {
  struct kvs_launch launch = {.kernel = KVS_KERNEL_IDS,
                              .grid = least((params->npairs + IDS_THREADS - 1) / IDS_THREADS, IDS_CTAS),
                              .threads = IDS_THREADS,
                              .params = params,
                              .params_nbytes = sizeof *params};
  params->step = step;
  return kvs_dev_launch(s->device, &launch, stream, why);
}

/* The pairs, and behind them those of the blocks that are left out: where these were to go is lost too. */
static uint64_t name_pairs(struct kvs_submission *s, size_t all) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  struct kvs_pair *pairs = kvs_stage(s, all * sizeof *pairs, &s->units.pairs);
  if (packing->npairs) memcpy(pairs, packing->pairs, packing->npairs * sizeof *pairs);
  for (size_t i = packing->npairs; i < all; i++) {
    uint32_t position = s->work->lost[i - packing->npairs];
    pairs[i] = (struct kvs_pair){position, position};
  }
  return (uint64_t)(uintptr_t)pairs;
}

/* The kernel reaches the host's side of staging, which the driver maps into every context. */
int kvs_resolve_ids(struct kvs_submission *s, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_ids_side *side = &s->work->on_device;
  size_t npairs = s->work->scratch->packing.npairs + s->work->nlost;
  struct kvs_read_ids *read = s->transfer->ids;
  uint64_t filled;
  if (!side->ids || s->units.pairs || !npairs) return KVS_OK;
  size_t room = ids_room(s, npairs);
  struct kvs_ids_params params = {.ids = side->ids->ptr,
                                  .stride = side->ids->stride,
                                  .token_stride = side->tokens > 1 ? side->ids->token_stride : 0,
                                  .tokens = side->tokens,
                                  .nids = side->ids->count,
                                  .blocks = side->blocks,
                                  .named = name_pairs(s, npairs),
                                  .npairs = npairs,
                                  .width = side->ids->width,
                                  .by_dst = side->write};
  params.pairs = s->units.pairs;
  read->results = kvs_stage(s, npairs * sizeof *read->results, &filled);
  read->nresults = npairs;
  params.results = (uint64_t)(uintptr_t)read->results;
  (void)kvs_stage(s, room, &filled);
  if (side->write) params.claims = filled, params.nclaims = claims_of(npairs);
  if (!side->write) s->units.zeros = filled;
  int status = kvs_dev_fill(s->device, filled, side->write ? UINT32_MAX : 0, room / 4, stream, why);
  if (!status) status = launch_ids(s, &params, KVS_IDS_READ, stream, why);
  if (!status && side->write) status = launch_ids(s, &params, KVS_IDS_CLAIM, stream, why);
  read->queued = status == KVS_OK;
  return status;
}

void kvs_fetch_ids(struct kvs_submission *s) {
  const struct kvs_device_ids *ids = s->work->on_device.ids;
  struct kvs_read_ids *read = s->transfer->ids;
  struct kvs_error ignored;
  uint64_t unused;
  if (!ids || !ids->count || !s->work->on_device.write || read->queued || s->fatal || !s->transfer->staging) return;
  if (s->transfer->unjoined) return; /* the lane stream has not waited for who writes the ids */
  if (!read->results) read->results = kvs_stage(s, ids->count * sizeof *read->results, &unused);
  uint64_t host = (uint64_t)(uintptr_t)read->results, back = (ids->count - 1) * (uint64_t)-ids->stride;
  struct kvs_rect rect = {.dst = host,
                          .src = ids->stride < 0 ? ids->ptr - back : ids->ptr,
                          .dst_pitch = ids->width,
                          .src_pitch = (uint64_t)(ids->stride < 0 ? -ids->stride : ids->stride),
                          .width = ids->width,
                          .height = ids->stride ? ids->count : 1,
                          .depth = 1};
  kvs_stream stream = s->lane->stream;
  int status = rect.src_pitch > ids->width
                   ? kvs_dev_copy_rect(s->device, &rect, stream, &ignored)
                   : kvs_dev_copy(s->device, host, rect.src, rect.width * rect.height, stream, &ignored);
  read->width = ids->width;
  read->order = ids->stride < 0 ? -1 : ids->stride > 0;
  read->fetched = status == KVS_OK;
}

int kvs_launch_copies(struct kvs_submission *s, struct kvs_error *why) {
  return s->listed ? launch_list(s, why) : launch_rows(s, why);
}
