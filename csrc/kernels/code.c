/* Kernels CODE and VERIFY on the CPU: units by csrc/codecs. CTAs may run concurrently, so verdicts are joined by
 * atomics. */
#include "kernels/code.h"

#include <stdatomic.h>
#include <string.h>

#include "codecs/unit_code.h"

/* memcpy, since tables may be unaligned. */
static void read_entry(uint64_t table, uint64_t index, void *entry, size_t nbytes) {
  memcpy(entry, (const char *)(uintptr_t)table + index * nbytes, nbytes);
}

struct kvs_code_item kvs_twin_code_item(const struct kvs_code_params *params, uint64_t index) {
  const struct kvs_units *units = &params->units;
  uint64_t line = index / units->parts, block = line / units->nrows;
  struct kvs_code_item item = {.block = block};
  struct kvs_row row;
  struct kvs_pair pair;
  read_entry(params->table, index % units->parts, &item.unit, sizeof item.unit);
  read_entry(units->rows, line % units->nrows, &row, sizeof row);
  read_entry(units->pairs ? units->pairs : (uint64_t)(uintptr_t)params->inline_pairs, block, &pair, sizeof pair);
  item.pages = kvs_code_pages(params, &row, &pair, block);
  item.skipped = pair.dst == KVS_BAD_SLOT;
  item.empty = pair.src == KVS_BAD_SLOT;
  return item;
}

static enum kvs_unit_verdict code(const struct kvs_code_params *params, const struct kvs_code_item *item) {
  void *dst = (void *)(uintptr_t)item->pages.dst;
  const void *src = (const void *)(uintptr_t)item->pages.src;
  if (!params->by_src) return kvs_unit_encode(&item->unit, src, item->empty ? 0 : params->valid_nbytes, dst);
  if (!item->empty) return kvs_unit_decode(&item->unit, src, dst);
  kvs_unit_zero(&item->unit, dst);
  return KVS_UNIT_NOT_STORED;
}

/* The worst verdict of a pair. */
static void note(const struct kvs_code_params *params, const struct kvs_code_item *item, unsigned verdict) {
  _Atomic uint32_t *word = (_Atomic uint32_t *)(uintptr_t)(params->verdicts + 4 * item->block);
  uint32_t worst = atomic_load(word);
  while (verdict > worst && !atomic_compare_exchange_weak(word, &worst, verdict)) continue;
}

void kvs_twin_code(const struct kvs_code_params *params, unsigned cta, unsigned grid) {
  for (uint64_t index = cta; index < params->count; index += grid) {
    struct kvs_code_item item = kvs_twin_code_item(params, index);
    if (item.skipped) continue;
    note(params, &item, code(params, &item));
  }
}

void kvs_twin_verify(const struct kvs_verify_params *params, unsigned cta, unsigned grid) {
  const struct kvs_code_params *code = &params->code;
  void *scratch = (void *)(uintptr_t)(params->scratch + (uint64_t)cta * KVS_VERIFY_NBYTES);
  for (uint64_t index = cta; index < code->count; index += grid) {
    struct kvs_code_item item = kvs_twin_code_item(code, index);
    if (item.skipped) continue;
    note(code, &item,
         kvs_unit_verify(&item.unit, (const void *)(uintptr_t)item.pages.src, item.empty ? 0 : code->valid_nbytes,
                         (void *)(uintptr_t)item.pages.dst, scratch));
  }
}
