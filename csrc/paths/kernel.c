/* Path kernel: one launch moves the view over the link, by a ring of bulk copies or 16-byte accesses. Its CTAs are
 * bounded and its pace is below the link's, because stores to the host that fill the link stall a model's own. */
#include <math.h>
#include <string.h>

#include "paths/copies.h"
#include "paths/costs.h"
#include "paths/path.h"
#include "paths/units.h"

enum {
  PEER_CTAS = 64,           /* between two H200, 16 KiB a block: 8 reach 0.49 of a plain copy, 32 0.81, 64 0.90 */
  ROWS_NBYTES = 16 << 10,   /* one row for each CTA, with priority high */
  LEAST_CHUNK = 1 << 10,    /* of a stage of RING */
  LAYER_NBYTES = 2 << 20,   /* least bytes of the layers that are copied by one launch */
  LAUNCH_NBYTES = 32 << 20, /* most bytes */
};

/* Kernels use SMs that the model needs, so this one must be this much faster than the copy engine alone. */
static const double HANDICAP = 1.05;

/* Layer by layer the kernel is launched several times, and the link idles in between: 12.0 ms for 512 MiB H2D beside
 * the 32 layers of a model that wait for them, where one launch is predicted to take 10.5 (H200). */
static const double LAUNCHES_HANDICAP = 1.15;

/* No calibration covers copies between GPUs. Measured between two H200: the copy engine moves 367 GB/s and more from
 * 256 KiB a copy on, 54 at 64 KiB; a kernel 355 at any size (benchmarks/bench_peer.py). */
static const uint64_t PEER_COPY_NBYTES = 256 << 10;

static bool bulk_copies(const struct kvs_device *device) {
  return device->info.cc_major >= 9 ||
         strcmp(device->ops->kind, "cuda") != 0; /* a host device runs the C twin of either kernel */
}

/* -- width and pace ---------------------------------------------------------------------------------------------- */

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

static unsigned most_ctas(const struct kvs_submission *s) {
  if (s->options->max_ctas) return s->options->max_ctas;
  return between_devices(s) ? PEER_CTAS : tuning_of(s).ctas;
}

/* Within device memory coding takes the whole GPU, as in a burst. */
static unsigned coding_ctas(const struct kvs_submission *s) {
  unsigned sms = s->device->info.sms > 0 ? (unsigned)s->device->info.sms : 1;
  bool within = s->work->direction == KVS_OTHER_DIRECTION && !s->options->max_ctas;
  return within ? 4 * sms : most_ctas(s);
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

/* For rows of at most so many bytes; 0: unknown. */
static struct kvs_width width_of_kernel(const struct kvs_submission *s, uint64_t row) {
  return (struct kvs_width){.kernel = bulk_copies(s->device) ? KVS_KERNEL_RING : KVS_KERNEL_COPY,
                            .ctas = row ? ctas_for(s, row) : most_ctas(s),
                            .gbps = pace_gbps(s),
                            .chunk = row ? chunk_for(row) : KVS_RING_CHUNK};
}

/* -- choosing ---------------------------------------------------------------------------------------------------- */

static double cost(const struct kvs_costs *costs, const struct kvs_path_cost *own, const struct kvs_shape *shape) {
  (void)costs;
  if (shape->pieces == 0) return INFINITY;
  return own->start + kvs_cost_of_both(own, shape->nbytes, shape->pieces, shape->skew_nbytes, shape->skew_pieces);
}

/* cuMemcpy from host to host waits for the stream and runs in the caller's thread. */
static bool copies_would_block(const struct kvs_submission *s) {
  const struct kvs_regions *regions = &s->work->scratch->regions;
  bool host = regions->count > 0;
  for (size_t i = 0; i < regions->count; i++) host &= regions->items[i].memory == KVS_MEMORY_PINNED;
  return host && !s->device->ops->copy_direct;
}

static bool claims(const struct kvs_submission *s) {
  uint64_t copies = s->work->shape.copies;
  if (kvs_kernels_off(s->engine)) return false;
  if (s->peer) return s->peer_direct && copies && s->work->nbytes / copies < PEER_COPY_NBYTES;
  return copies_would_block(s);
}

/* Between the GPU and the host. The costs are those of `normal`. Other CTAs take other rows at a time, until the link
 * or the pace is the limit. */
static double link_ns(const struct kvs_submission *s) {
  const struct kvs_costs *costs = &s->engine->costs;
  const struct kvs_shape *shape = &s->work->shape;
  enum kvs_direction direction = s->work->direction == KVS_H2D ? KVS_H2D : KVS_D2H;
  double start = costs->paths[direction == KVS_H2D][KVS_PATH_KERNEL].start,
         ns = kvs_path_ns(&kvs_path_kernel, KVS_PATH_KERNEL, costs, shape);
  if (!(ns < INFINITY)) return ns;
  bool measured =
      s->options->priority == KVS_PRIORITY_NORMAL && direction == s->work->direction && !s->options->max_ctas;
  unsigned normal = kvs_kernel_tuning_of(&costs->tuning, direction, KVS_PRIORITY_NORMAL).ctas;
  if (!measured) ns = start + (ns - start) * normal / ctas_for(s, shape->nbytes / shape->pieces);
  double gbps = measured ? pace_gbps(s) : most_gbps(s), least_ns = gbps > 0 ? (double)shape->nbytes / gbps : 0;
  return ns > least_ns ? ns : least_ns;
}

/* The link idles between launches. Measured, H200, 512 MiB: 10.9 ms to the host by one launch, 11.9 back by 64. But a
 * model begins when it has the first layers, and ends after the last ones. So groups grow, and shrink at the end. */
static size_t layers_of_launch(const struct kvs_work *work, size_t layers, size_t layer) {
  size_t size = (layers - layer) / 2;
  uint64_t mean = work->nbytes / layers + 1, least_layers = LAYER_NBYTES / mean, most = LAUNCH_NBYTES / mean;
  if (size > layer) size = layer;
  if (size > most) size = (size_t)most;
  if (size < least_layers) size = (size_t)least_layers;
  return size ? size : 1;
}

/* Whether all layers go by one launch, if none has a start dependency of its own. */
static bool is_one_launch(const struct kvs_work *work) {
  size_t layers = work->nlayers;
  return !work->layered || layers < 2 || layers_of_launch(work, layers, 0) >= layers;
}

/* High priority has no handicap: the model's slowdown does not count. */
static double predict(const struct kvs_submission *s) {
  return link_ns(s) * (s->options->priority == KVS_PRIORITY_HIGH ? 1 : HANDICAP) *
         (is_one_launch(s->work) ? 1 : LAUNCHES_HANDICAP);
}

/* A kernel that knows no single copy takes the addresses of the host as they are. */
static int check(const struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  if (!kvs_regions_aliased(&work->scratch->regions)) return KVS_OK;
  if (work->codings)
    return kvs_fail(s->err, KVS_UNSUPPORTED,
                    "pool '%s' is coded: path 'kernel' then needs host memory that the device sees at the host's own "
                    "addresses; allocate it by the device, or use path 'burst'",
                    work->coded_pool);
  if (!work->on_device.ids) return KVS_OK;
  return kvs_fail(s->err, KVS_UNSUPPORTED,
                  "%s is on the device: path 'kernel' then needs host memory that the device sees at the host's own "
                  "addresses; allocate it by the device, or pass ids.cpu()",
                  work->on_device.name);
}

/* -- preparing and issuing ----------------------------------------------------------------------------------------- */

static bool wants_list(const struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  bool rows = work->on_device.ids || work->codings;
  return kvs_needs_list(s) || (!rows && work->shape.pieces < work->shape.rows);
}

static int prepare(struct kvs_submission *s) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  if (wants_list(s)) return kvs_prepare_list(s);
  uint64_t longest = rows->count ? kvs_longest_row(rows, 0, rows->count) : 1;
  s->units = (struct kvs_units){.parts = (uint32_t)((longest - 1) / KVS_KERNEL_PIECE + 1),
                                .piece = (uint32_t)kvs_plan_part(longest, KVS_KERNEL_PIECE)};
  return kvs_prepare_grid(s);
}

static int launch_list(struct kvs_submission *s, struct kvs_error *why) {
  struct kvs_width width = width_of_kernel(s, 0);
  struct kvs_piece *pieces;
  size_t from = s->staged;
  uint64_t nbytes = 0;
  if (s->view.count == 0) return KVS_OK;
  size_t count = kvs_place_list(s, true, &pieces);
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
  if (!status) status = kvs_resolve_ids(s, s->lane->stream, why);
  if (!status) status = kvs_place_pairs(s, 0, s->work->scratch->packing.npairs, s->lane->stream, why);
  if (status) return status;
  kvs_place_verdicts(s);
  struct kvs_units units = s->units;
  units.rows += s->first_row * sizeof(struct kvs_row);
  units.nrows = (uint32_t)nrows;
  if (s->work->codings) return kvs_launch_code(s, &units, s->first_row, 0, coding_ctas(s), s->lane->stream, why);
  return kvs_launch_units(s, &units, nrows * units.parts * s->work->nslots, 0, &width, s->lane->stream, why);
}

static int issue(struct kvs_submission *s, struct kvs_error *why) {
  return s->listed ? launch_list(s, why) : launch_rows(s, why);
}

static size_t layer_group_end(const struct kvs_submission *s, size_t layer) {
  size_t end = layer + 1, layers = s->work->scratch->nlayers, size = layers_of_launch(s->work, layers, layer);
  while (end < layers && end - layer < size && !kvs_starts_alone(s, end)) end++;
  return end;
}

/* The host does not know the copies of ids on the device, and cannot code; a caller who named the path is told. */
static enum kvs_path after_refusal(const struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  return work->on_device.ids || work->codings || s->options->path == KVS_PATH_KERNEL ? KVS_PATH_AUTO : KVS_PATH_DMA;
}

const struct kvs_path_ops kvs_path_kernel = {
    .name = "kernel",
    .needs_kernels = true,
    .needs_pinned = true,
    .needs_peer_access = true,
    .codes = true,
    .rows = true,
    .has_run = true,
    .cost = cost,
    .claims = claims,
    .predict = predict,
    .worth = kvs_kernels_allowed,
    .check = check,
    .prepare = prepare,
    .issue = issue,
    .layer_group_end = layer_group_end,
    .after_refusal = after_refusal,
};
