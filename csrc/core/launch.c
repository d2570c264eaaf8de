/* Path kernel: one launch for all that is in view. What it reads is ids and a table of rows, or, where there are no ids
 * or single copies matter (faults, the race checker, neighbours that merge well), a list of pieces. */
#include "core/submit.h"

#include <string.h>

#include "core/racecheck.h"
#include "device/hooks.h"

enum {
  PIECE = 32 << 10, /* one warp's share at a time (RING), one CTA's (COPY) */
  COPY_THREADS = 512,
  KERNEL_CTAS = 8,
  BACKGROUND_CTAS = 4,
  PEER_CTAS = 64,     /* between two H200, 16 KiB a block: 8 reach 0.49 of a plain copy, 32 0.81, 64 0.90 */
  MOST_RESIDENT = 32, /* CTAs of a relay: more gain nothing */
  /* A relay's warps wait for memory of the GPU, not for the link, so that few CTAs of more warps do. Measured, H200,
   * beside an 8192^3 product, 256 MiB a transfer: 2 CTAs 1.02 at 39.6 GB/s, 3 1.04 to 1.07 at 42 to 46, 4 of 2 warps
   * 1.05 at 42. One SM that is always taken costs that product 1.06, whatever is done with it. */
  RELAY_WARPS = 4,
  RELAY_BACKGROUND_CTAS = 2,
  RING_NBYTES = KVS_RING_STAGES * KVS_RING_CHUNK, /* of a warp, in shared memory */
};
static const uint64_t SLOWEST_NS_PER_MIB = 1000000000; /* what the kernel's arithmetic has room for: 1 MB/s a CTA */
static const double BACKGROUND_PACE = 40.0; /* GB/s, under the load at which SM stores to the host stall the GPU */

static bool bulk_copies(const struct kvs_device *device) {
  return device->info.cc_major >= 9 || strcmp(device->ops->kind, "cuda") != 0; /* a host device runs either twin */
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

int kvs_upload(struct kvs_submission *s, size_t from, struct kvs_error *why) {
  const struct kvs_staging *staging = s->transfer->staging;
  if (s->staged == from) return KVS_OK;
  return kvs_dev_copy(s->device, staging->device + from, staging->host + from, s->staged - from, s->lane->spine, why);
}

/* -- preparing ------------------------------------------------------------------------------------------------- */

static uint64_t parts_of(const struct kvs_rows *rows) {
  uint64_t longest = 1;
  for (size_t i = 0; i < rows->count; i++)
    if (rows->items[i].nbytes > longest) longest = rows->items[i].nbytes;
  return (longest - 1) / PIECE + 1;
}

/* Pieces say more than rows and pairs; they cost O(copies). */
static bool wants_list(const struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  if (!work->grid || kvs_racecheck_on() || kvs_dev_fault_on_copies(s->device)) return true;
  if (kvs_regions_aliased(&work->scratch->regions)) return true;
  return s->transfer->path == KVS_PATH_KERNEL && work->shape.pieces < work->shape.rows;
}

/* Room for what is staged later: a list is made from what is in view then. */
static size_t room_for_list(const struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  size_t pieces = kvs_plan_most_pieces(&work->scratch->copies, work->nbytes, PIECE);
  size_t fillings = (size_t)(2 * (work->nbytes >> 20)) + 64;
  if (s->transfer->path == KVS_PATH_KERNEL) return rounded(pieces * sizeof(struct kvs_piece)) + 16 * work->nlayers;
  return pieces * (sizeof(struct kvs_piece) + sizeof(uint64_t)) + fillings * sizeof(struct kvs_segment) + 128;
}

static int prepare_list(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  int status = work->planned ? KVS_OK : work->plan(work->call, KVS_FORM_COPIES, work->scratch, s->err);
  work->planned = true;
  s->listed = true;
  if (status || work->scratch->copies.count == 0) return status;
  return kvs_engine_staging_get(s->engine, room_for_list(s), &s->transfer->staging, s->err);
}

int kvs_pack_for_relay(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  if (work->packed) return KVS_OK;
  work->packed = true;
  return kvs_pack_rows(&work->scratch->rows, work->direction, KVS_RING_SLOT_NBYTES, &work->scratch->packing, s->err);
}

static int prepare_grid(struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  struct kvs_packing *packing = &work->scratch->packing;
  const struct kvs_rows *rows = &work->scratch->rows;
  bool relay = s->transfer->path == KVS_PATH_RELAY;
  int status = relay ? kvs_pack_for_relay(s) : KVS_OK;
  if (!status) status = kvs_pack_pairs(work->src_slots, work->dst_slots, work->nslots, packing, s->err);
  if (status || !work->nslots || !rows->count) return status;
  size_t nbytes = rows->count * sizeof *rows->items + work->nslots * sizeof(struct kvs_pair) + 128;
  if (relay) {
    kvs_pack_sort(packing, work->direction);
    const struct kvs_ring_shape *ring = &s->engine->relays[work->direction].ring;
    status = kvs_pack_grid(packing, work->direction, ring, &work->scratch->regions, s->err);
    nbytes += packing->nsegments * sizeof *packing->segments;
  }
  return status ? status : kvs_engine_staging_get(s->engine, nbytes, &s->transfer->staging, s->err);
}

int kvs_prepare_launch(struct kvs_submission *s) {
  enum kvs_path path = s->transfer->path;
  if (path != KVS_PATH_KERNEL && path != KVS_PATH_RELAY) return KVS_OK;
  return wants_list(s) ? prepare_list(s) : prepare_grid(s);
}

/* -- what the kernels read ------------------------------------------------------------------------------------- */

/* The rows: from the engine's tables, or, if all are in use, staged with the rest. */
static int place_rows(struct kvs_submission *s, struct kvs_error *why) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  int status = kvs_table_get(s->engine, rows, s->lane->spine, &s->transfer->table, &s->units.rows, why);
  if (status != KVS_NOT_READY) return status;
  memcpy(kvs_stage(s, rows->count * sizeof *rows->items, &s->units.rows), rows->items,
         rows->count * sizeof *rows->items);
  return KVS_OK;
}

int kvs_place_grid(struct kvs_submission *s, struct kvs_error *why) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  const struct kvs_packing *packing = &s->work->scratch->packing;
  bool relay = s->transfer->path == KVS_PATH_RELAY;
  if (s->units.rows) return KVS_OK; /* a layer before did it */
  s->units = (struct kvs_units){.parts = (uint32_t)parts_of(rows), .piece = PIECE};
  int status = place_rows(s, why);
  if (status) {
    s->units.rows = 0;
    return status;
  }
  if (relay || packing->npairs > KVS_INLINE_PAIRS)
    memcpy(kvs_stage(s, packing->npairs * sizeof *packing->pairs, &s->units.pairs), packing->pairs,
           packing->npairs * sizeof *packing->pairs);
  return KVS_OK;
}

size_t kvs_place_list(struct kvs_submission *s, const struct kvs_piece **pieces) {
  size_t most = kvs_plan_most_pieces(&s->view, s->work->nbytes, PIECE), before = s->staged;
  struct kvs_piece *list = kvs_stage(s, most * sizeof *list, &s->units.pieces);
  size_t count = kvs_plan_pieces(&s->view, PIECE, &s->work->scratch->regions, list);
  s->staged = before + rounded(count * sizeof *list);
  *pieces = list;
  return count;
}

/* -- launching ------------------------------------------------------------------------------------------------- */

double kvs_pace_gbps(const struct kvs_submission *s) {
  const struct kvs_tuning *tuning = &s->engine->costs.tuning;
  if (s->options->pace_gbps > 0) return s->options->pace_gbps;
  if (s->options->priority != KVS_PRIORITY_BACKGROUND) return 0;
  return tuning->background_gbps > 0 ? tuning->background_gbps : BACKGROUND_PACE;
}

/* Of one CTA among so many. */
static uint64_t pace(const struct kvs_submission *s, unsigned ctas) {
  double gbps = kvs_pace_gbps(s);
  if (gbps <= 0) return 0;
  double ns = (double)(1 << 20) * ctas / gbps;
  return ns < (double)SLOWEST_NS_PER_MIB ? (uint64_t)ns + 1 : SLOWEST_NS_PER_MIB;
}

static unsigned most_ctas(const struct kvs_submission *s) {
  const struct kvs_tuning *tuning = &s->engine->costs.tuning;
  if (s->options->max_ctas) return s->options->max_ctas;
  if (s->options->priority == KVS_PRIORITY_BACKGROUND)
    return tuning->background_ctas ? tuning->background_ctas : BACKGROUND_CTAS;
  if (s->peer) return PEER_CTAS;
  return tuning->kernel_ctas ? tuning->kernel_ctas : KERNEL_CTAS;
}

static unsigned least(uint64_t a, uint64_t b) { return (unsigned)(a < b ? a : b); }

/* The relay's warps wait for each other, so all of them must be on the device at once. */
static void shape_relay(const struct kvs_submission *s, unsigned *ctas, unsigned *warps) {
  const struct kvs_device_info *info = &s->device->info;
  if (info->shared_nbytes >= RELAY_WARPS * RING_NBYTES) *warps = RELAY_WARPS;
  if (s->options->priority == KVS_PRIORITY_BACKGROUND && !s->options->max_ctas) *ctas = RELAY_BACKGROUND_CTAS;
  *ctas = least(least(*ctas, MOST_RESIDENT), info->sms > 0 ? (unsigned)info->sms : 1);
}

struct kvs_launch kvs_launch_of(const struct kvs_submission *s, enum kvs_kernel kernel, uint64_t units) {
  unsigned ctas = most_ctas(s), warps = KVS_RING_WARPS;
  if (kernel == KVS_KERNEL_RELAY) shape_relay(s, &ctas, &warps);
  if (kernel == KVS_KERNEL_COPY)
    return (struct kvs_launch){.kernel = kernel, .grid = least(ctas, units), .threads = COPY_THREADS};
  return (struct kvs_launch){.kernel = kernel,
                             .grid = least(ctas, (units + warps - 1) / warps),
                             .threads = warps * 32,
                             .shared_nbytes = warps * RING_NBYTES};
}

int kvs_launch_units(struct kvs_submission *s, const struct kvs_units *units, uint64_t count, uint64_t only_if,
                     struct kvs_error *why) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  enum kvs_kernel kernel = bulk_copies(s->device) ? KVS_KERNEL_RING : KVS_KERNEL_COPY;
  struct kvs_launch launch = kvs_launch_of(s, kernel, count);
  struct kvs_copy_params params = {.units = *units,
                                   .count = count,
                                   .only_if = only_if,
                                   .chunk = KVS_RING_CHUNK,
                                   .by_src = s->work->direction == KVS_H2D};
  while (launch.grid > 1 && pace(s, launch.grid) >= SLOWEST_NS_PER_MIB / KVS_RING_WARPS)
    launch.grid /= 2; /* fewer, rather than faster than was asked for; the warps of RING share a CTA's pace */
  params.ns_per_mib = pace(s, launch.grid);
  if (!units->pieces && !units->pairs)
    memcpy(params.inline_pairs, packing->pairs, packing->npairs * sizeof *packing->pairs);
  launch.params = &params;
  launch.params_nbytes = sizeof params;
  return kvs_dev_launch(s->device, &launch, s->lane->spine, why);
}

static int launch_list(struct kvs_submission *s, struct kvs_error *why) {
  const struct kvs_piece *pieces;
  size_t from = s->staged;
  if (s->view.count == 0) return KVS_OK;
  size_t count = kvs_place_list(s, &pieces);
  int status = kvs_upload(s, from, why);
  return status ? status : kvs_launch_units(s, &s->units, count, 0, why);
}

static int launch_rows(struct kvs_submission *s, struct kvs_error *why) {
  size_t nrows = s->rows_end - s->first_row, from = s->staged;
  if (nrows == 0 || s->work->nslots == 0) return KVS_OK;
  int status = kvs_place_grid(s, why);
  if (!status) status = kvs_upload(s, from, why);
  if (status) return status;
  struct kvs_units units = s->units;
  units.rows += s->first_row * sizeof(struct kvs_row);
  units.nrows = (uint32_t)nrows;
  return kvs_launch_units(s, &units, nrows * units.parts * s->work->nslots, 0, why);
}

int kvs_launch_copies(struct kvs_submission *s, struct kvs_error *why) {
  return s->listed ? launch_list(s, why) : launch_rows(s, why);
}
