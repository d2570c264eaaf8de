/* What kernels read, and their launches: see units.h. The kernels read ids and a table of rows. They read a list of
 * pieces if there are no ids, or if single copies matter (faults, the race checker, memory under an alias). */
#include "paths/units.h"

#include <string.h>

#include "device/faults.h"
#include "lanes/buffers.h"
#include "lanes/late.h"
#include "lanes/read_ids.h"
#include "lanes/verdicts.h"
#include "paths/copies.h"
#include "racecheck/racecheck.h"

enum {
  THREADS = 512, /* of a CTA of COPY and PACK */
  IDS_THREADS = 256,
  VERIFY_CTAS = 16, /* with scratch memory each */
  IDS_CTAS = 512,
};
static const uint64_t SLOWEST_NS_PER_MIB = 1000000000; /* limit of the kernel's arithmetic: 1 MB/s a CTA */

/* -- staging --------------------------------------------------------------------------------------------------- */

static size_t rounded(size_t nbytes) { return (nbytes + 15) & ~(size_t)15; }

/* Space in the transfer's staging: the host address, and the device address after the upload. */
static void *stage(struct kvs_submission *s, size_t nbytes, uint64_t *device) {
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

/* With one hardware queue the model's kernels stay behind those that wait for a copy. Measured, H200, beside a decode
 * step: copies and 2-D copies add nothing to what one bare copy costs, bursts 0.2 and the kernel 0.3 D2H, 0.2 H2D. A
 * shorter copy holds its caller for longer than a kernel that moves as much holds the model. */
static const uint64_t ONE_QUEUE_COPY_NBYTES = 16 << 10;

bool kvs_kernels_allowed(const struct kvs_submission *s) {
  const struct kvs_shape *shape = &s->work->shape;
  if (!s->engine->one_queue || s->options->priority == KVS_PRIORITY_HIGH || s->work->on_device.ids) return true;
  return shape->rects == 0 && (!shape->copies || shape->nbytes / shape->copies < ONE_QUEUE_COPY_NBYTES);
}

bool kvs_needs_list(const struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  if (work->on_device.ids || work->codings) return false; /* there are no single copies */
  if (!work->grid || kvs_racecheck_on() || kvs_dev_fault_on_copies(s->device)) return true;
  return kvs_regions_aliased(&work->scratch->regions);
}

int kvs_prepare_list(struct kvs_submission *s) {
  struct kvs_work *work = s->work;
  int status = kvs_plan_copies(s, s->err);
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

/* Whether what is coded is verified. */
static bool verifies(const struct kvs_submission *s) {
  return s->engine->verifies && s->work->codings && !s->work->decode;
}

int kvs_prepare_grid(struct kvs_submission *s) {
  const struct kvs_work *work = s->work;
  const struct kvs_rows *rows = &work->scratch->rows;
  int status = kvs_pack_pairs(work->src_slots, work->dst_slots, work->nslots, &work->scratch->packing, s->err);
  size_t all = work->nslots + (work->on_device.ids ? work->nlost : 0); /* kvs_resolve_ids() */
  if (status || !all || !rows->count) return status;
  size_t nbytes = rows->count * sizeof *rows->items + all * sizeof(struct kvs_pair) + 128;
  for (size_t i = 0; i < work->ncodings; i++) nbytes += work->codings[i].coding->nunits * sizeof(struct kvs_unit) + 16;
  if (work->codings) nbytes += all * sizeof(uint32_t);
  if (verifies(s)) nbytes += sizeof s->scratch / sizeof *s->scratch * VERIFY_CTAS * (size_t)KVS_VERIFY_NBYTES;
  if (work->on_device.ids) nbytes += all * sizeof(struct kvs_id_result) + ids_room(s, all);
  return kvs_engine_staging_get(s->engine, nbytes, &s->transfer->staging, s->err);
}

/* -- what the kernels read ------------------------------------------------------------------------------------- */

/* The units of the codings, one after the other. Not uploaded yet. */
static struct kvs_table_tail stage_codings(struct kvs_submission *s) {
  const size_t from = s->staged;
  if (!s->work->codings) return (struct kvs_table_tail){NULL, 0};
  const void *host = (const void *)(uintptr_t)(s->transfer->staging->host + from);
  for (size_t i = 0; i < s->work->ncodings; i++) {
    const struct kvs_coding *coding = s->work->codings[i].coding;
    size_t nbytes = coding->nunits * sizeof *coding->units;
    memcpy(stage(s, nbytes, &s->work->codings[i].units), coding->units, nbytes);
  }
  return (struct kvs_table_tail){host, s->staged - from};
}

/* What has been staged at offset `from` is behind the rows of a table instead. */
static void move_codings(struct kvs_submission *s, size_t from) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  const uint64_t staged = s->transfer->staging->device + from;
  const uint64_t tail = s->units.rows + rows->count * sizeof *rows->items;
  for (size_t i = 0; s->work->codings && i < s->work->ncodings; i++)
    s->work->codings[i].units = tail + (s->work->codings[i].units - staged);
  s->staged = from;
}

/* The rows from the engine's tables, with the units of codings behind them; staged if all tables are in use. */
int kvs_place_rows(struct kvs_submission *s, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  size_t from = s->staged;
  if (s->units.rows) return KVS_OK; /* placed by an earlier layer */
  const struct kvs_table_tail tail = stage_codings(s);
  int status = kvs_table_get(s->engine, rows, &tail, stream, &s->transfer->table, &s->units.rows, why);
  if (status == KVS_OK) move_codings(s, from);
  if (status == KVS_NOT_READY) {
    memcpy(stage(s, rows->count * sizeof *rows->items, &s->units.rows), rows->items, rows->count * sizeof *rows->items);
    status = kvs_upload(s, from, s->staged, stream, why);
  }
  if (status) {
    s->units.rows = 0;
    s->staged = from; /* another path may place them again */
  }
  return status;
}

size_t kvs_place_list(struct kvs_submission *s, bool aliased, struct kvs_piece **pieces) {
  size_t most = kvs_plan_most_pieces(&s->view, s->work->nbytes, KVS_KERNEL_PIECE), before = s->staged;
  struct kvs_piece *list = stage(s, most * sizeof *list, &s->units.pieces);
  size_t count = kvs_plan_pieces(&s->view, KVS_KERNEL_PIECE, aliased ? &s->work->scratch->regions : NULL, list);
  s->staged = before + rounded(count * sizeof *list);
  *pieces = list;
  return count;
}

int kvs_place_pairs(struct kvs_submission *s, size_t first, size_t end, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  const struct kvs_staging *staging = s->transfer->staging;
  size_t size = sizeof *packing->pairs, from = s->uploaded;
  if (s->work->on_device.ids) return KVS_OK; /* kvs_resolve_ids() places all pairs */
  if (end - first <= KVS_INLINE_PAIRS || from >= end) return KVS_OK;
  if (!s->units.pairs) (void)stage(s, packing->npairs * size, &s->units.pairs);
  size_t at = (size_t)(s->units.pairs - staging->device);
  memcpy((char *)(uintptr_t)staging->host + at + from * size, packing->pairs + from, (end - from) * size);
  int status = kvs_upload(s, at + from * size, at + end * size, stream, why);
  if (!status) s->uploaded = end;
  return status;
}

/* The kernel writes verdicts to the host's side of staging, which the driver maps into every context. */
void kvs_place_verdicts(struct kvs_submission *s) {
  struct kvs_verdicts *verdicts = s->transfer->verdicts;
  size_t npairs = s->work->scratch->packing.npairs;
  uint64_t unused;
  if (!s->work->codings || verdicts->words) return;
  uint32_t *words = stage(s, npairs * sizeof *words, &unused);
  memset(words, 0, npairs * sizeof *words);
  kvs_verdicts_place(verdicts, &s->work->scratch->packing, words);
}

/* -- launching ------------------------------------------------------------------------------------------------- */

/* Pace of one CTA out of `ctas`, in ns per MiB; 0: unpaced. */
static uint64_t pace_of_cta(double gbps, unsigned ctas) {
  if (gbps <= 0) return 0;
  double ns = (double)(1 << 20) * ctas / gbps;
  return ns < (double)SLOWEST_NS_PER_MIB ? (uint64_t)ns + 1 : SLOWEST_NS_PER_MIB;
}

static unsigned least(uint64_t a, uint64_t b) { return (unsigned)(a < b ? a : b); }

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

/* A fault that tests inject, a coder that is wrong: a unit's first bytes become those of its head. */
static int spoil(struct kvs_submission *s, const struct kvs_code_params *params, size_t first_row, size_t first_pair,
                 kvs_stream stream, struct kvs_error *why) {
  const uint64_t index = kvs_dev_fault_units(s->device, params->count);
  if (index == UINT64_MAX) return KVS_OK;
  const uint64_t line = index / params->units.parts, block = line / params->units.nrows;
  const struct kvs_row *row = &s->work->scratch->rows.items[first_row + line % params->units.nrows];
  const struct kvs_unit *unit = &s->work->codings[row->coding].coding->units[index % params->units.parts];
  const struct kvs_pair *pair = &s->work->scratch->packing.pairs[first_pair + block];
  const uint64_t head = kvs_code_pages(params, row, pair, block).dst + unit->coded;
  return kvs_dev_copy(s->device, head + KVS_UNIT_HEAD, head, 4, stream, why);
}

/* Kernels of one stream run one after the other, and share scratch memory. */
static int verify(struct kvs_submission *s, const struct kvs_code_params *coded, kvs_stream stream,
                  struct kvs_error *why) {
  uint64_t *scratch = &s->scratch[stream != s->lane->stream];
  if (!*scratch) (void)stage(s, VERIFY_CTAS * (size_t)KVS_VERIFY_NBYTES, scratch);
  const struct kvs_verify_params params = {.code = *coded, .scratch = *scratch};
  const struct kvs_launch launch = {.kernel = KVS_KERNEL_VERIFY,
                                    .grid = least(VERIFY_CTAS, coded->count),
                                    .threads = THREADS,
                                    .params = &params,
                                    .params_nbytes = sizeof params};
  return kvs_dev_launch(s->device, &launch, stream, why);
}

/* Rows of one coding. */
static int launch_a_coding(struct kvs_submission *s, const struct kvs_units *units, size_t npairs, size_t first_row,
                           size_t first_pair, unsigned ctas, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  const struct kvs_row_coding *coding = &s->work->codings[s->work->scratch->rows.items[first_row].coding];
  struct kvs_code_params params = {.units = *units,
                                   .table = coding->units,
                                   .verdicts = (uint64_t)(uintptr_t)(s->transfer->verdicts->words + first_pair),
                                   .valid_nbytes = s->work->valid_nbytes,
                                   .by_src = s->work->decode};
  params.units.parts = (uint32_t)coding->coding->nunits;
  params.count = (uint64_t)units->nrows * params.units.parts * npairs;
  unsigned threads = kvs_code_threads(coding->coding->largest_unit), beside = KVS_CODE_THREADS / threads;
  struct kvs_launch launch = {.kernel = KVS_KERNEL_CODE,
                              .grid = least((uint64_t)ctas * beside, params.count),
                              .threads = threads,
                              .params = &params,
                              .params_nbytes = sizeof params};
  if (!units->pairs) memcpy(params.inline_pairs, packing->pairs + first_pair, npairs * sizeof *packing->pairs);
  int status = kvs_dev_launch(s->device, &launch, stream, why);
  if (!status && !params.by_src) status = spoil(s, &params, first_row, first_pair, stream, why);
  return status || !verifies(s) ? status : verify(s, &params, stream, why);
}

int kvs_launch_code(struct kvs_submission *s, const struct kvs_units *units, size_t first_row, size_t first_pair,
                    unsigned ctas, kvs_stream stream, struct kvs_error *why) {
  const struct kvs_rows *rows = &s->work->scratch->rows;
  size_t npairs = units->slot ? units->npairs : s->work->scratch->packing.npairs, end = first_row + units->nrows;
  int status = KVS_OK;
  for (size_t row = first_row, next; !status && row < end; row = next) {
    struct kvs_units part = *units;
    next = kvs_rows_of_a_coding(rows, row, end);
    part.rows += (row - first_row) * sizeof(struct kvs_row);
    part.nrows = (uint32_t)(next - row);
    status = launch_a_coding(s, &part, npairs, row, first_pair, ctas, stream, why);
  }
  return status;
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
  struct kvs_pair *pairs = stage(s, all * sizeof *pairs, &s->units.pairs);
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
  read->results = stage(s, npairs * sizeof *read->results, &filled);
  read->nresults = npairs;
  params.results = (uint64_t)(uintptr_t)read->results;
  (void)stage(s, room, &filled);
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
  if (!read->results) read->results = stage(s, ids->count * sizeof *read->results, &unused);
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
