/* C twins of the kernels.
 *
 * Work is dealt as on the device: CTA c of g takes units c, c + g, c + 2g, ... A piece is cut by kvs_cut_piece as in
 * the CUDA code, so that a mistake in the cut shows up where there is no GPU. Words are moved with memcpy of constant
 * size: the compiler makes one load and one store of it, and nothing is said about the type of the bytes. */
#include "twins.h"

#include <endian.h>
#include <stddef.h>
#include <string.h>

/* Tables are read by bytes: nothing is said about how they are aligned. */
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
  return kvs_row_part(&row, row.src + pair.src * row.src_stride, row.dst + pair.dst * row.dst_stride, part,
                      units->piece);
}

bool kvs_twin_copies(const struct kvs_copy_params *params) {
  return !params->only_if || __atomic_load_n((const uint32_t *)(uintptr_t)params->only_if, __ATOMIC_ACQUIRE) != 0;
}

static void run_copy(const struct kvs_copy_params *params, unsigned cta, unsigned grid) {
  if (!kvs_twin_copies(params)) return;
  for (uint64_t unit = cta; unit < params->count; unit += grid) {
    struct kvs_piece piece = kvs_twin_unit(params, unit);
    copy_piece(&piece);
  }
}

/* -- RELAY ----------------------------------------------------------------------------------------------------- */

struct kvs_segment kvs_twin_segment(const struct kvs_relay_params *params, uint64_t index) {
  struct kvs_segment segment;
  read_entry(params->segments, index, &segment, sizeof segment);
  return segment;
}

uint64_t kvs_twin_segment_units(const struct kvs_relay_params *params, const struct kvs_segment *segment) {
  return params->units.pieces ? segment->count : segment->count * segment->nrows * params->units.parts;
}

struct kvs_piece kvs_twin_segment_unit(const struct kvs_relay_params *params, const struct kvs_segment *segment,
                                       uint64_t slot, uint64_t unit) {
  const struct kvs_units *units = &params->units;
  struct kvs_piece piece;
  struct kvs_row row;
  struct kvs_pair pair;
  if (units->pieces) {
    uint64_t at;
    read_entry(units->pieces, segment->first + unit, &piece, sizeof piece);
    read_entry(params->packed, segment->first + unit, &at, sizeof at);
    *(params->gather ? &piece.dst : &piece.src) = slot + at;
    return piece;
  }
  uint64_t part = unit % units->parts, line = unit / units->parts, block = line / segment->nrows;
  read_entry(units->rows, segment->first_row + line % segment->nrows, &row, sizeof row);
  read_entry(units->pairs, segment->first + block, &pair, sizeof pair);
  uint64_t there = slot + segment->base + row.packed + block * row.packed_stride;
  uint64_t src = params->gather ? row.src + pair.src * row.src_stride : there;
  uint64_t dst = params->gather ? there : row.dst + pair.dst * row.dst_stride;
  return kvs_row_part(&row, src, dst, part, units->piece);
}

static uint64_t slot_of(const struct kvs_relay_params *params, uint64_t filling) {
  return (params->first + filling) % params->nslots;
}

uint64_t kvs_twin_slot(const struct kvs_relay_params *params, uint64_t filling) {
  return params->ring + slot_of(params, filling) * params->slot_nbytes;
}

static uint32_t *relay_flag(const struct kvs_relay_params *params, bool filled, uint64_t slot) {
  return (uint32_t *)(uintptr_t)params->flags + (filled ? 0 : KVS_RELAY_SLOTS) + slot;
}

bool kvs_twin_relay_told(const struct kvs_relay_params *params) {
  return __atomic_load_n((const uint32_t *)(uintptr_t)params->abort_word, __ATOMIC_ACQUIRE) != 0;
}

bool kvs_twin_relay_may(const struct kvs_relay_params *params, uint64_t filling) {
  uint32_t before = (uint32_t)((params->first + filling) / params->nslots); /* fillings of its slot */
  const uint32_t *flag = relay_flag(params, !params->gather, slot_of(params, filling));
  uint32_t wanted = params->gather ? before : before + 1;
  return (int32_t)(__atomic_load_n(flag, __ATOMIC_ACQUIRE) - wanted) >= 0;
}

void kvs_twin_relay_fill(const struct kvs_relay_params *params, uint64_t filling, uint64_t segment, uint32_t warps) {
  uint64_t slot = kvs_twin_slot(params, filling);
  struct kvs_segment part;
  do {
    part = kvs_twin_segment(params, segment++);
    uint64_t units = kvs_twin_segment_units(params, &part);
    for (uint64_t unit = 0; unit < units; unit++) {
      struct kvs_piece piece = kvs_twin_segment_unit(params, &part, slot, unit);
      copy_piece(&piece);
    }
  } while (!part.last);
  __atomic_fetch_add(relay_flag(params, params->gather, slot_of(params, filling)), warps, __ATOMIC_RELEASE);
}

/* `aborted` first: who was released by a flag finds it set. */
void kvs_twin_relay_release(const struct kvs_relay_params *params) {
  uint32_t *flags = (uint32_t *)(uintptr_t)params->flags;
  __atomic_store_n(flags + 2 * KVS_RELAY_SLOTS, 1, __ATOMIC_RELEASE);
  __atomic_store_n((uint32_t *)(uintptr_t)params->abort_word, 1, __ATOMIC_RELEASE);
  for (int i = 0; i < 2 * KVS_RELAY_SLOTS; i++) __atomic_store_n(flags + i, KVS_RELAY_RELEASED, __ATOMIC_RELEASE);
}

/* -- PATTERN --------------------------------------------------------------------------------------------------- */

static void write_item(const struct kvs_pattern_item *item) {
  unsigned char *bytes = (unsigned char *)(uintptr_t)item->ptr;
  uint64_t words = item->nbytes / 8, word;
  for (uint64_t i = 0; i < words; i++) {
    word = htole64(kvs_pattern_word(item->key, i));
    memcpy(bytes + 8 * i, &word, 8);
  }
  word = htole64(kvs_pattern_word(item->key, words));
  memcpy(bytes + 8 * words, &word, (size_t)(item->nbytes % 8));
}

/* Count the bytes that differ among `n` bytes of one word; *first, if none yet, becomes the offset of the least. */
static uint64_t count_wrong(const unsigned char *bytes, uint64_t word, uint64_t n, uint64_t offset, uint64_t *first) {
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < n; i++) {
    if (bytes[i] == (unsigned char)(word >> (8 * i))) continue;
    if (*first == UINT64_MAX) *first = offset + i;
    wrong++;
  }
  return wrong;
}

/* Words are compared by sixteens without a branch on each: a right block costs little more than reading it. */
static uint64_t check_item(const struct kvs_pattern_item *item, uint64_t *first) {
  enum { GROUP = 16 };
  const unsigned char *bytes = (const unsigned char *)(uintptr_t)item->ptr;
  uint64_t words = item->nbytes / 8, wrong = 0;
  for (uint64_t i = 0; i < words; i += GROUP) {
    uint64_t end = words - i < GROUP ? words : i + GROUP, differ = 0;
    for (uint64_t j = i; j < end; j++) {
      uint64_t word;
      memcpy(&word, bytes + 8 * j, 8);
      differ |= le64toh(word) ^ kvs_pattern_word(item->key, j);
    }
    if (!differ) continue;
    for (uint64_t j = i; j < end; j++)
      wrong += count_wrong(bytes + 8 * j, kvs_pattern_word(item->key, j), 8, 8 * j, first);
  }
  return wrong + count_wrong(bytes + 8 * words, kvs_pattern_word(item->key, words), item->nbytes % 8, 8 * words, first);
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
      write_item(&item);
      continue;
    }
    wrong = check_item(&item, &first);
    if (wrong) report((struct kvs_pattern_result *)(uintptr_t)params->result, wrong, i << 40 | first);
  }
}

void kvs_twin_run(enum kvs_kernel kernel, const void *params, unsigned cta, unsigned grid) {
  switch (kernel) {
  case KVS_KERNEL_COPY:
  case KVS_KERNEL_RING:
    run_copy(params, cta, grid);
    break;
  case KVS_KERNEL_PATTERN:
    run_pattern(params, cta, grid);
    break;
  case KVS_KERNEL_CRC:
    kvs_twin_crc(params, cta);
    break;
  case KVS_KERNEL_RELAY:
  case KVS_KERNEL_DELAY:
  case KVS_KERNELS:
    break;
  }
}
