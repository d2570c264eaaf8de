/* Checks every address that a kernel will access, in the order of access: first its tables, then the memory that they
 * point at. The kernels' C twins compute their addresses by the same functions, so no other address is used. */
#include "host/kernel.h"

#include <string.h>

#include "base/span.h"
#include "kernels/code.h"
#include "kernels/twins.h"

#define PACE_LIMIT_NS 1e10

size_t kvs_host_kernel_params_nbytes(enum kvs_kernel kernel) {
  switch (kernel) {
#define X(name, symbol, params)                                                                                        \
  case KVS_KERNEL_##name:                                                                                              \
    return sizeof(struct params);
    KVS_KERNEL_LIST(X)
#undef X
  case KVS_KERNELS:
    break;
  }
  return 0;
}

static bool can(struct kvs_host_view *view, enum kvs_host_use use, uint64_t address, uint64_t nbytes) {
  return !kvs_host_view_refuse(view, use, address, nbytes, false);
}

/* Check entries [first, first + count) of a table. */
static bool can_read_entries(struct kvs_host_view *view, uint64_t table, uint64_t first, uint64_t count,
                             size_t entry_nbytes) {
  uint64_t at, nbytes;
  return !__builtin_mul_overflow(first, (uint64_t)entry_nbytes, &at) &&
         !__builtin_mul_overflow(count, (uint64_t)entry_nbytes, &nbytes) && !__builtin_add_overflow(table, at, &at) &&
         can(view, KVS_HOST_READ, at, nbytes);
}

static bool can_use_word(struct kvs_host_view *view, enum kvs_host_use use, uint64_t address) {
  return address % 4 == 0 && can(view, use, address, 4);
}

static bool can_copy(struct kvs_host_view *view, const struct kvs_piece *piece) {
  return can(view, KVS_HOST_READ, piece->src, piece->nbytes) && can(view, KVS_HOST_WRITE, piece->dst, piece->nbytes);
}

static bool can_read_units(struct kvs_host_view *view, const struct kvs_units *units, uint64_t count) {
  uint64_t lines = (uint64_t)units->nrows * units->parts;
  if (units->pieces) return can_read_entries(view, units->pieces, 0, count, sizeof(struct kvs_piece));
  if (count == 0) return true;
  if (lines == 0) return false;
  uint64_t npairs = count / lines + (count % lines != 0);
  if (!can_read_entries(view, units->rows, 0, units->nrows, sizeof(struct kvs_row))) return false;
  if (!units->pairs) return npairs <= KVS_INLINE_PAIRS;
  return can_read_entries(view, units->pairs, 0, npairs, sizeof(struct kvs_pair));
}

static bool prepare_copy(struct kvs_host_view *view, const struct kvs_copy_params *params, struct kvs_host_op *op) {
  uint64_t total = 0;
  if (!can_read_units(view, &params->units, params->count)) return false;
  for (uint64_t i = 0; i < params->count; i++) {
    struct kvs_piece piece = kvs_twin_unit(params, i);
    if (!can_copy(view, &piece)) return false;
    total += piece.nbytes;
  }
  /* The pace is a CTA's; assumes equal shares of the work. */
  double mib = (double)total / (double)op->what.kernel.grid / (1 << 20);
  double pace_ns = mib * (double)params->ns_per_mib;
  op->pace_ns = pace_ns < PACE_LIMIT_NS ? (uint64_t)pace_ns : (uint64_t)PACE_LIMIT_NS;
  return true;
}

/* Bytes of the page that the unit's encoder reads, or that its decoder writes. */
static bool can_use_page(struct kvs_host_view *view, enum kvs_host_use use, const struct kvs_unit *unit, uint64_t page,
                         uint64_t valid_nbytes) {
  for (uint32_t row = 0; row < unit->rows; row++) {
    uint64_t at = unit->offset + row * unit->pitch, left = at < valid_nbytes ? valid_nbytes - at : 0;
    if (!can(view, use, page + at, left < unit->row_nbytes ? left : unit->row_nbytes)) return false;
  }
  return true;
}

static bool can_code(struct kvs_host_view *view, const struct kvs_code_params *params,
                     const struct kvs_code_item *item) {
  const struct kvs_unit *unit = &item->unit;
  uint64_t coded = params->by_src ? item->pages.src : item->pages.dst,
           page = params->by_src ? item->pages.dst : item->pages.src;
  enum kvs_host_use of_coded = params->by_src ? KVS_HOST_READ : KVS_HOST_WRITE,
                    of_page = params->by_src ? KVS_HOST_WRITE : KVS_HOST_READ;
  bool reads = params->by_src || !item->empty, coded_used = !params->by_src || !item->empty;
  if (item->skipped) return true;
  if (coded_used && ((coded + unit->coded) % 16 || !can(view, of_coded, coded + unit->coded, unit->coded_nbytes)))
    return false;
  return !reads || can_use_page(view, of_page, unit, page, params->by_src ? UINT64_MAX : params->valid_nbytes);
}

static bool prepare_code(struct kvs_host_view *view, const struct kvs_code_params *params) {
  const struct kvs_units *units = &params->units;
  if (!can_read_units(view, units, params->count)) return false;
  if (params->count == 0) return true;
  uint64_t npairs = (params->count - 1) / units->nrows / units->parts + 1;
  if (!can_read_entries(view, params->table, 0, units->parts, sizeof(struct kvs_unit)) || params->verdicts % 4 ||
      !can(view, KVS_HOST_WRITE, params->verdicts, 4 * npairs))
    return false;
  for (uint64_t i = 0; i < params->count; i++) {
    struct kvs_code_item item = kvs_twin_code_item(params, i);
    if (!can_code(view, params, &item)) return false;
  }
  return true;
}

static bool prepare_verify(struct kvs_host_view *view, const struct kvs_verify_params *params, uint64_t grid) {
  return !params->code.by_src && params->scratch % 16 == 0 && prepare_code(view, &params->code) &&
         can(view, KVS_HOST_WRITE, params->scratch, grid * KVS_VERIFY_NBYTES);
}

/* The ids at all positions, whichever the pairs name. */
static bool can_read_ids(struct kvs_host_view *view, const struct kvs_ids_params *params) {
  uint64_t low = params->ids, nbytes = params->width;
  if (params->nids == 0) return params->npairs == 0;
  return params->tokens > 0 && kvs_span_extend(&low, &nbytes, params->stride, params->nids) &&
         kvs_span_extend(&low, &nbytes, params->token_stride, params->tokens) && can(view, KVS_HOST_READ, low, nbytes);
}

static bool prepare_ids(struct kvs_host_view *view, const struct kvs_ids_params *params) {
  uint64_t pairs = params->npairs * sizeof(struct kvs_pair), claims = params->nclaims * sizeof(struct kvs_id_claim);
  const struct kvs_pair *named = (const struct kvs_pair *)(uintptr_t)params->named;
  if ((params->width != 4 && params->width != 8) || params->named % 8 != 0 || params->results % 16 != 0) return false;
  if (!can(view, KVS_HOST_READ, params->named, pairs) || !can(view, KVS_HOST_WRITE, params->pairs, pairs) ||
      !can(view, KVS_HOST_WRITE, params->results, params->npairs * sizeof(struct kvs_id_result)))
    return false;
  if (params->claims && (params->nclaims < 2 * params->npairs || (params->nclaims & (params->nclaims - 1)) ||
                         !can(view, KVS_HOST_WRITE, params->claims, claims)))
    return false;
  if (params->step != KVS_IDS_READ) return params->claims != 0;
  for (uint64_t i = 0; i < params->npairs; i++)
    if ((params->by_dst ? named[i].dst : named[i].src) >= params->nids) return false;
  return can_read_ids(view, params);
}

static bool prepare_pattern(struct kvs_host_view *view, const struct kvs_pattern_params *params) {
  const char *table = (const char *)(uintptr_t)params->items;
  bool check = params->mode != KVS_PATTERN_WRITE;
  if (!can_read_entries(view, params->items, 0, params->nitems, sizeof(struct kvs_pattern_item))) return false;
  if (check &&
      (params->result % 8 != 0 || !can(view, KVS_HOST_WRITE, params->result, sizeof(struct kvs_pattern_result))))
    return false;
  for (uint64_t i = 0; i < params->nitems; i++) {
    struct kvs_pattern_item item;
    memcpy(&item, table + i * sizeof item, sizeof item);
    if (!can(view, check ? KVS_HOST_READ : KVS_HOST_WRITE, item.ptr, item.nbytes)) return false;
  }
  return true;
}

static bool prepare_crc(struct kvs_host_view *view, const struct kvs_crc_params *params, const struct kvs_host_op *op) {
  return params->data % 16 == 0 && params->bodies <= KVS_CRC_CTAS && op->what.kernel.grid == params->bodies + 1 &&
         op->what.kernel.threads == KVS_CRC_THREADS && can(view, KVS_HOST_READ, params->data, params->nbytes) &&
         can_use_word(view, KVS_HOST_WRITE, params->result);
}

static bool prepare(struct kvs_host_view *view, struct kvs_host_op *op) {
  const void *params = op->what.kernel.params;
  switch (op->what.kernel.id) {
  case KVS_KERNEL_COPY:
  case KVS_KERNEL_RING:
  case KVS_KERNEL_PACK:
    return prepare_copy(view, params, op);
  case KVS_KERNEL_IDS:
    return prepare_ids(view, params);
  case KVS_KERNEL_CODE:
    return prepare_code(view, params);
  case KVS_KERNEL_VERIFY:
    return prepare_verify(view, params, op->what.kernel.grid);
  case KVS_KERNEL_PATTERN:
    return prepare_pattern(view, params);
  case KVS_KERNEL_CRC:
    return prepare_crc(view, params, op);
  case KVS_KERNEL_DELAY:
  case KVS_KERNELS:
    break;
  }
  return true;
}

bool kvs_host_kernel_prepare(struct kvs_host_memory *memory, struct kvs_host_op *op) {
  struct kvs_host_view view = {.memory = memory, .kernel = true};
  bool good = prepare(&view, op);
  kvs_host_view_clear(&view);
  return good;
}
