/* Do destinations overlap each other or a source? Two checks of different cost:
 *
 * kvs_plan_check_tensors compares whole tensors. It sorts their extents; if some intersect, layouts that interleave
 * with one common stride (K beside V, all layers of a block adjacent) are proved disjoint by their offsets within the
 * stride. kvs_plan_check_disjoint sorts all destinations: for raw pointer lists, and if the first check is
 * inconclusive. */
#include "plan/overlap.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct kvs_span {
  uint64_t begin, end;
  uint64_t stride;
  uint32_t index;
  bool dst;
};

static int grow_spans(struct kvs_plan_scratch *scratch, size_t count, struct kvs_error *err) {
  if (count <= scratch->spans_capacity) return KVS_OK;
  struct kvs_span *spans = malloc(count * sizeof *spans);
  if (!spans) return kvs_fail(err, KVS_NOMEM, "no memory to check %zu ranges for overlap", count);
  free(scratch->spans);
  scratch->spans = spans;
  scratch->spans_capacity = count;
  return KVS_OK;
}

static bool ascending(const struct kvs_span *spans, size_t count) {
  for (size_t i = 1; i < count; i++)
    if (spans[i].begin < spans[i - 1].begin) return false;
  return true;
}

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

/* LSD radix sort by `begin`, over the bits in which the values differ. `room` has the same size as spans. */
static struct kvs_span *sort_spans(struct kvs_span *spans, struct kvs_span *room, size_t count) {
  uint64_t low = UINT64_MAX, differ = 0;
  if (ascending(spans, count)) return spans;
  for (size_t i = 0; i < count; i++)
    if (spans[i].begin < low) low = spans[i].begin;
  for (size_t i = 0; i < count; i++) differ |= spans[i].begin - low;
  unsigned top = 64u - (unsigned)__builtin_clzll(differ);
  for (unsigned shift = (unsigned)__builtin_ctzll(differ); shift < top; shift += DIGIT_BITS) {
    size_t start[DIGITS] = {0}, sum = 0;
    for (size_t i = 0; i < count; i++) start[((spans[i].begin - low) >> shift) & (DIGITS - 1)]++;
    for (size_t d = 0; d < DIGITS; d++) {
      size_t n = start[d];
      start[d] = sum;
      sum += n;
    }
    for (size_t i = 0; i < count; i++) room[start[((spans[i].begin - low) >> shift) & (DIGITS - 1)]++] = spans[i];
    struct kvs_span *sorted = room;
    room = spans;
    spans = sorted;
  }
  return spans;
}

/* -- whole tensors --------------------------------------------------------------------------------------------- */

/* A cluster is a set of intersecting spans: true if they all interleave within one stride. `room` holds count spans. */
static bool interleaved(const struct kvs_span *spans, size_t count, const struct kvs_tensor *tensors,
                        struct kvs_span *room) {
  uint64_t stride = spans[0].stride, base = spans[0].begin;
  struct kvs_span *offsets = room, *spare = room + count;
  for (size_t i = 0; i < count; i++) {
    if (spans[i].stride != stride || spans[i].dst != spans[0].dst) return false;
    uint64_t offset = (spans[i].begin - base) % stride;
    offsets[i] = (struct kvs_span){.begin = offset, .end = offset + tensors[spans[i].index].nbytes};
  }
  offsets = sort_spans(offsets, spare, count);
  for (size_t i = 1; i < count; i++)
    if (offsets[i].begin < offsets[i - 1].end) return false;
  return offsets[count - 1].end <= stride + offsets[0].begin;
}

static bool prove_disjoint(const struct kvs_span *spans, size_t count, const struct kvs_tensor *tensors,
                           struct kvs_span *room) {
  for (size_t from = 0, to; from < count; from = to) {
    uint64_t end = spans[from].end;
    bool any_dst = spans[from].dst;
    for (to = from + 1; to < count && spans[to].begin < end; to++) {
      if (spans[to].end > end) end = spans[to].end;
      any_dst |= spans[to].dst;
    }
    if (to - from > 1 && any_dst && !interleaved(spans + from, to - from, tensors, room)) return false;
  }
  return true;
}

static int check_tensor(const struct kvs_tensor *tensor, size_t t, uint64_t ends[2], struct kvs_error *err) {
  if (tensor->nbytes == 0) return kvs_fail(err, KVS_INVALID, "block_nbytes of tensor %zu is 0", t);
  for (int cpu = 0; cpu < 2; cpu++) {
    const char *side = cpu ? "cpu" : "gpu";
    uint64_t base = cpu ? tensor->cpu : tensor->gpu, blocks = cpu ? tensor->cpu_blocks : tensor->gpu_blocks;
    uint64_t stride = cpu ? tensor->cpu_stride : tensor->gpu_stride;
    if (base == 0) return kvs_fail(err, KVS_INVALID, "%s_ptr of tensor %zu is 0 (a null pointer)", side, t);
    if (stride != 0 && stride < tensor->nbytes)
      return kvs_fail(err, KVS_INVALID,
                      "%s_stride of tensor %zu is %" PRIu64 ", less than a block of %" PRIu64 " bytes: blocks overlap",
                      side, t, stride, tensor->nbytes);
    if (kvs_plan_extent(base, blocks, stride, tensor->nbytes, &ends[cpu]))
      return kvs_fail(err, KVS_INVALID,
                      "tensor %zu: %" PRIu64 " blocks of stride %" PRIu64 " from 0x%" PRIx64
                      " reach beyond the address space (num_%s_blocks or %s_stride is wrong)",
                      t, blocks, kvs_stride_of(stride, tensor->nbytes), base, side, side);
  }
  return KVS_OK;
}

/* *fresh: the tensors differ from those of the last check. */
static int take_tensors(const struct kvs_tensor *tensors, size_t ntensors, struct kvs_checked_tensors *checked,
                        bool *fresh, struct kvs_error *err) {
  *fresh = !checked->right || ntensors != checked->count ||
           (ntensors && memcmp(tensors, checked->items, ntensors * sizeof *tensors) != 0);
  if (!*fresh) return KVS_OK;
  checked->right = false;
  if (ntensors > UINT32_MAX / 2) return kvs_fail(err, KVS_INVALID, "%zu tensors in one call are too many", ntensors);
  if (ntensors > checked->capacity) {
    struct kvs_tensor *grown = realloc(checked->items, ntensors * sizeof *grown);
    if (!grown) return kvs_fail(err, KVS_NOMEM, "no memory to check %zu tensors", ntensors);
    checked->items = grown;
    checked->capacity = ntensors;
  }
  if (ntensors) memcpy(checked->items, tensors, ntensors * sizeof *tensors);
  checked->count = ntensors;
  return KVS_OK;
}

int kvs_plan_check_tensors(const struct kvs_tensor *tensors, size_t ntensors, enum kvs_direction direction,
                           struct kvs_plan_scratch *scratch, bool *disjoint, struct kvs_error *err) {
  struct kvs_checked_tensors *checked = &scratch->checked[direction];
  bool fresh;
  int status = take_tensors(tensors, ntensors, checked, &fresh, err);
  *disjoint = checked->disjoint;
  if (status || !fresh) return status;
  status = grow_spans(scratch, 6 * ntensors, err); /* the spans, buffers to sort them, and their offsets */
  if (status) return status;
  struct kvs_span *spans = scratch->spans;
  size_t count = 0;
  for (size_t t = 0; t < ntensors; t++) {
    const struct kvs_tensor *tensor = &checked->items[t];
    uint64_t ends[2];
    status = check_tensor(tensor, t, ends, err);
    if (status) return status;
    spans[count++] = (struct kvs_span){.begin = tensor->gpu,
                                       .end = ends[0],
                                       .index = (uint32_t)t,
                                       .stride = kvs_stride_of(tensor->gpu_stride, tensor->nbytes),
                                       .dst = direction == KVS_H2D};
    spans[count++] = (struct kvs_span){.begin = tensor->cpu,
                                       .end = ends[1],
                                       .index = (uint32_t)t,
                                       .stride = kvs_stride_of(tensor->cpu_stride, tensor->nbytes),
                                       .dst = direction == KVS_D2H};
  }
  struct kvs_span *sorted = sort_spans(spans, spans + count, count);
  checked->disjoint = *disjoint = prove_disjoint(sorted, count, checked->items, spans + 2 * count);
  checked->right = true;
  return KVS_OK;
}

/* -- every copy ------------------------------------------------------------------------------------------------ */

enum { ENTRY_TEXT = 48 };

/* "entry 3", "block 3", or "block 3 of tensor 1" if the copies are listed by tensor. */
static const char *entry_text(const struct kvs_copies *copies, size_t i, const struct kvs_plan_naming *naming,
                              char text[ENTRY_TEXT]) {
  int n = snprintf(text, ENTRY_TEXT, "%s %" PRIu32, naming->entry, copies->block[i]);
  if (naming->per_tensor && copies->count > naming->per_tensor)
    snprintf(text + n, ENTRY_TEXT - (size_t)n, " of tensor %zu", i / naming->per_tensor);
  return text;
}

static int refuse_two(const struct kvs_copies *copies, uint32_t a, uint32_t b, const struct kvs_plan_naming *naming,
                      struct kvs_error *err) {
  uint32_t first = a < b ? a : b, second = a < b ? b : a;
  char one[ENTRY_TEXT], other[ENTRY_TEXT];
  return kvs_fail(
      err, KVS_INVALID,
      "destinations overlap: %s writes [0x%" PRIx64 ", 0x%" PRIx64 ") and %s writes [0x%" PRIx64 ", 0x%" PRIx64 ")",
      entry_text(copies, first, naming, one), copies->dst[first], copies->dst[first] + copies->nbytes[first],
      entry_text(copies, second, naming, other), copies->dst[second], copies->dst[second] + copies->nbytes[second]);
}

/* The last span with begin <= address, or NULL. */
static const struct kvs_span *below(const struct kvs_span *spans, size_t count, uint64_t address) {
  size_t low = 0, high = count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (spans[middle].begin <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low ? &spans[low - 1] : NULL;
}

static int check_sources(const struct kvs_copies *copies, const struct kvs_span *dst,
                         const struct kvs_plan_naming *naming, struct kvs_error *err) {
  uint64_t low = dst[0].begin, high = dst[copies->count - 1].end;
  char reader[ENTRY_TEXT], writer[ENTRY_TEXT];
  for (size_t i = 0; i < copies->count; i++) {
    uint64_t begin = copies->src[i], end = begin + copies->nbytes[i];
    if (end <= low || begin >= high) continue;
    const struct kvs_span *hit = below(dst, copies->count, end - 1);
    if (!hit || hit->end <= begin) continue;
    return kvs_fail(err, KVS_INVALID,
                    "%s reads [0x%" PRIx64 ", 0x%" PRIx64
                    "), which %s of the same call writes: the copies of a call have "
                    "no order",
                    entry_text(copies, i, naming, reader), begin, end, entry_text(copies, hit->index, naming, writer));
  }
  return KVS_OK;
}

struct kvs_plan_bounds kvs_plan_find_bounds(const struct kvs_copies *copies) {
  struct kvs_plan_bounds b = {.src_low = UINT64_MAX, .dst_low = UINT64_MAX, .smallest = UINT64_MAX};
  for (size_t i = 0; i < copies->count; i++) {
    uint64_t dst = copies->dst[i], src = copies->src[i], nbytes = copies->nbytes[i];
    if (dst < b.dst_low) b.dst_low = dst;
    if (dst + nbytes > b.dst_high) b.dst_high = dst + nbytes;
    if (src < b.src_low) b.src_low = src;
    if (src + nbytes > b.src_high) b.src_high = src + nbytes;
    if (nbytes < b.smallest) b.smallest = nbytes;
    b.total += nbytes;
  }
  if (copies->count == 0) b.src_low = b.dst_low = 0;
  return b;
}

enum { BITS_A_BLOCK = 64 }; /* above this many bits a destination, sorting is cheaper than clearing the bitmap */

/* nbytes / unit if exact; otherwise, or above 2^50, a number whose product is not nbytes. Avoids the slower
 * division. */
static uint64_t units_in(uint64_t nbytes, double inverse) {
  double units = (double)(int64_t)nbytes * inverse + 0.5;
  return units < (double)(1ll << 50) ? (uint64_t)(int64_t)units : 0;
}

/* Blocks of one size at multiples of that size, as in pools: a bitmap proves them disjoint without sorting. False is
 * inconclusive. */
static bool apart_on_a_grid(const struct kvs_copies *copies, const struct kvs_plan_bounds *b,
                            struct kvs_plan_scratch *scratch) {
  uint64_t unit = b->smallest, bits = (b->dst_high - b->dst_low) / unit + 1;
  bool apart = b->src_high <= b->dst_low || b->dst_high <= b->src_low; /* sources are disjoint from destinations */
  double inverse = 1.0 / (double)unit;
  struct kvs_error ignored;
  if (!apart || b->dst_high - b->dst_low > INT64_MAX || bits / BITS_A_BLOCK > b->total / unit) return false;
  size_t words = (size_t)(bits / 64 + 1);
  if (kvs_plan_grow_bitmap(scratch, words, &ignored)) return false;
  uint64_t *bitmap = scratch->bitmap;
  for (size_t i = 0; apart && i < copies->count; i++) {
    uint64_t offset = copies->dst[i] - b->dst_low, at = units_in(offset, inverse), n = 1;
    if (copies->nbytes[i] != unit) n = units_in(copies->nbytes[i], inverse);
    apart = at * unit == offset && n * unit == copies->nbytes[i];
    for (; apart && n; n--, at++) {
      uint64_t word = bitmap[at >> 6], bit = 1ull << (at & 63);
      apart = (word & bit) == 0;
      bitmap[at >> 6] = word | bit;
    }
  }
  memset(bitmap, 0, words * sizeof *bitmap);
  return apart;
}

int kvs_plan_check_disjoint(const struct kvs_copies *copies, const struct kvs_plan_bounds *bounds,
                            const struct kvs_plan_naming *naming, struct kvs_plan_scratch *scratch,
                            struct kvs_error *err) {
  size_t count = copies->count;
  if (count == 0 || apart_on_a_grid(copies, bounds, scratch)) return KVS_OK;
  int status = grow_spans(scratch, 2 * count, err);
  if (status) return status;
  struct kvs_span *spans = scratch->spans;
  for (size_t i = 0; i < count; i++)
    spans[i] =
        (struct kvs_span){.begin = copies->dst[i], .end = copies->dst[i] + copies->nbytes[i], .index = (uint32_t)i};
  const struct kvs_span *sorted = sort_spans(spans, spans + count, count);
  for (size_t i = 1; i < count; i++)
    if (sorted[i].begin < sorted[i - 1].end)
      return refuse_two(copies, sorted[i - 1].index, sorted[i].index, naming, err);
  return check_sources(copies, sorted, naming, err);
}
