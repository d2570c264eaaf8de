/* C twins of the kernels.
 *
 * Work is assigned as on the device: CTA c of g takes units c, c + g, c + 2g, ... Pieces are divided by kvs_cut_piece
 * as in the CUDA code, so that errors in that function are found without a GPU. Words are moved by memcpy of constant
 * size, which compiles to one load and one store and does not break aliasing rules. */
#include "twins.h"

#include <endian.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "kernels/code.h"

/* memcpy, since tables may be unaligned. */
static void read_entry(uint64_t table, uint64_t index, void *entry, size_t nbytes) {
  memcpy(entry, (const char *)(uintptr_t)table + index * nbytes, nbytes);
}

/* -- COPY and RING --------------------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void copy_words(char *dst, const char *src, uint64_t words, size_t width) {
  for (uint64_t i = 0; i < words; i++) memcpy(dst + i * width, src + i * width, width);
}

static void copy_piece(const struct kvs_piece *piece) {
  struct kvs_cut cut = kvs_cut_piece(piece->dst, piece->src, piece->nbytes);
  char *dst = (char *)(uintptr_t)piece->dst;
  const char *src = (const char *)(uintptr_t)piece->src;
  uint64_t body = cut.words * cut.width;
  copy_words(dst, src, cut.head, 1);
  dst += cut.head;
  src += cut.head;
  switch (cut.width) {
  case 16:
    copy_words(dst, src, cut.words, 16);
    break;
  case 8:
    copy_words(dst, src, cut.words, 8);
    break;
  case 4:
    copy_words(dst, src, cut.words, 4);
    break;
  case 2:
    copy_words(dst, src, cut.words, 2);
    break;
  default:
    copy_words(dst, src, cut.words, 1);
  }
  copy_words(dst + body, src + body, cut.tail, 1);
}

struct kvs_piece kvs_twin_unit(const struct kvs_copy_params *params, uint64_t unit) {
  const struct kvs_units *units = &params->units;
  struct kvs_piece piece;
  struct kvs_row row;
  struct kvs_pair pair;
  if (units->pieces) {
    read_entry(units->pieces, unit, &piece, sizeof piece);
    return piece;
  }
  uint64_t part = unit % units->parts, line = unit / units->parts, block = line / units->nrows;
  read_entry(units->rows, line % units->nrows, &row, sizeof row);
  read_entry(units->pairs ? units->pairs : (uint64_t)(uintptr_t)params->inline_pairs, block, &pair, sizeof pair);
  return kvs_grid_piece(units, params->by_src, &row, &pair, block, part);
}

static void run_copy(const struct kvs_copy_params *params, unsigned cta, unsigned grid) {
  for (uint64_t unit = cta; unit < params->count; unit += grid) {
    struct kvs_piece piece = kvs_twin_unit(params, unit);
    copy_piece(&piece);
  }
}

/* -- IDS ------------------------------------------------------------------------------------------------------- */

static int64_t read_id(const struct kvs_ids_params *params, uint64_t address) {
  const char *at = (const char *)(uintptr_t)address;
  int32_t narrow;
  int64_t id;
  if (params->width == 8) return memcpy(&id, at, 8), id;
  return memcpy(&narrow, at, 4), narrow;
}

/* The block at a position; UINT64_MAX: there is none. *id: its number, or its first token. */
static uint64_t read_block(const struct kvs_ids_params *params, uint32_t position, int64_t *id) {
  uint64_t at = params->ids + (uint64_t)(params->stride * (int64_t)position);
  uint32_t whole = 1;
  *id = read_id(params, at);
  for (uint32_t i = 1; i < params->tokens; i++)
    whole &= (uint64_t)read_id(params, at + (uint64_t)(params->token_stride * (int64_t)i)) == (uint64_t)*id + i;
  uint64_t block = kvs_block_of_tokens(*id, params->tokens, whole);
  return block < params->blocks ? block : UINT64_MAX;
}

/* The claim of a slot; made if there is none. *first: it was made. */
static struct kvs_id_claim *claim_of(const struct kvs_ids_params *params, uint32_t slot, bool *first) {
  struct kvs_id_claim *claims = (struct kvs_id_claim *)(uintptr_t)params->claims;
  for (uint64_t at = kvs_claim_begin(slot, params->nclaims);; at = (at + 1) & (params->nclaims - 1)) {
    uint32_t found = KVS_BAD_SLOT;
    *first = __atomic_compare_exchange_n(&claims[at].slot, &found, slot, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    if (*first || found == slot) return &claims[at];
  }
}

static void run_ids(const struct kvs_ids_params *params, unsigned cta, unsigned grid) {
  const struct kvs_pair *named = (const struct kvs_pair *)(uintptr_t)params->named;
  struct kvs_pair *pairs = (struct kvs_pair *)(uintptr_t)params->pairs;
  struct kvs_id_result *results = (struct kvs_id_result *)(uintptr_t)params->results;
  bool first;
  for (uint64_t i = cta; i < params->npairs; i += grid) {
    uint32_t *slot = params->by_dst ? &pairs[i].dst : &pairs[i].src;
    if (params->step == KVS_IDS_CLAIM) {
      if (*slot == KVS_BAD_SLOT || claim_of(params, *slot, &first)->twice) continue;
      results[i].verdict = KVS_ID_TWICE;
      *slot = KVS_BAD_SLOT;
      continue;
    }
    pairs[i] = named[i];
    int64_t id;
    uint64_t block = read_block(params, *slot, &id);
    bool good = block != UINT64_MAX;
    results[i] = (struct kvs_id_result){good ? (int64_t)block : id, *slot, good ? KVS_ID_GOOD : KVS_ID_RANGE};
    *slot = good ? (uint32_t)block : KVS_BAD_SLOT;
    if (!good || !params->claims) continue;
    struct kvs_id_claim *claim = claim_of(params, *slot, &first);
    if (!first) __atomic_store_n(&claim->twice, 0, __ATOMIC_RELAXED);
  }
}

/* -- PATTERN --------------------------------------------------------------------------------------------------- */

static void write_item(const struct kvs_pattern_item *item, uint64_t kind) {
  unsigned char *bytes = (unsigned char *)(uintptr_t)item->ptr;
  uint64_t words = item->nbytes / 8, word;
  for (uint64_t i = 0; i < words; i++) {
    word = htole64(kvs_pattern_value(kind, item->key, i));
    memcpy(bytes + 8 * i, &word, 8);
  }
  word = htole64(kvs_pattern_value(kind, item->key, words));
  memcpy(bytes + 8 * words, &word, (size_t)(item->nbytes % 8));
}

/* Count the differing bytes among `n` bytes of one word. *first: set to the offset of the first one, if not set yet. */
static uint64_t count_wrong(const unsigned char *bytes, uint64_t word, uint64_t n, uint64_t offset, uint64_t *first) {
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < n; i++) {
    if (bytes[i] == (unsigned char)(word >> (8 * i))) continue;
    if (*first == UINT64_MAX) *first = offset + i;
    wrong++;
  }
  return wrong;
}

/* Compares sixteen words without branches: checking a correct block costs little more than reading it. */
static uint64_t check_item(const struct kvs_pattern_item *item, uint64_t kind, uint64_t *first) {
  enum { GROUP = 16 };
  const unsigned char *bytes = (const unsigned char *)(uintptr_t)item->ptr;
  uint64_t words = item->nbytes / 8, wrong = 0;
  for (uint64_t i = 0; i < words; i += GROUP) {
    uint64_t end = words - i < GROUP ? words : i + GROUP, differ = 0;
    for (uint64_t j = i; j < end; j++) {
      uint64_t word;
      memcpy(&word, bytes + 8 * j, 8);
      differ |= le64toh(word) ^ kvs_pattern_value(kind, item->key, j);
    }
    if (!differ) continue;
    for (uint64_t j = i; j < end; j++)
      wrong += count_wrong(bytes + 8 * j, kvs_pattern_value(kind, item->key, j), 8, 8 * j, first);
  }
  return wrong +
         count_wrong(bytes + 8 * words, kvs_pattern_value(kind, item->key, words), item->nbytes % 8, 8 * words, first);
}

static void report(struct kvs_pattern_result *result, uint64_t wrong, uint64_t first) {
  uint64_t least = __atomic_load_n(&result->first, __ATOMIC_RELAXED);
  __atomic_fetch_add(&result->wrong, wrong, __ATOMIC_RELAXED);
  while (first < least &&
         !__atomic_compare_exchange_n(&result->first, &least, first, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

static void run_pattern(const struct kvs_pattern_params *params, unsigned cta, unsigned grid) {
  for (uint64_t i = cta; i < params->nitems; i += grid) {
    struct kvs_pattern_item item;
    uint64_t first = UINT64_MAX, wrong;
    read_entry(params->items, i, &item, sizeof item);
    if (params->mode == KVS_PATTERN_WRITE) {
      write_item(&item, params->kind);
      continue;
    }
    wrong = check_item(&item, params->kind, &first);
    if (wrong) report((struct kvs_pattern_result *)(uintptr_t)params->result, wrong, i << 40 | first);
  }
}

void kvs_twin_run(enum kvs_kernel kernel, const void *params, unsigned cta, unsigned grid) {
  switch (kernel) {
  case KVS_KERNEL_COPY:
  case KVS_KERNEL_RING:
  case KVS_KERNEL_PACK:
    run_copy(params, cta, grid);
    break;
  case KVS_KERNEL_IDS:
    run_ids(params, cta, grid);
    break;
  case KVS_KERNEL_CODE:
    kvs_twin_code(params, cta, grid);
    break;
  case KVS_KERNEL_VERIFY:
    kvs_twin_verify(params, cta, grid);
    break;
  case KVS_KERNEL_PATTERN:
    run_pattern(params, cta, grid);
    break;
  case KVS_KERNEL_CRC:
    kvs_twin_crc(params, cta);
    break;
  case KVS_KERNEL_DELAY:
  case KVS_KERNELS:
    break;
  }
}
