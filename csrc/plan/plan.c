/* Planning: ids to copies. See plan.h. The cost per block is a range check, a bit and four stores. Overlaps are decided
 * on the extents of whole tensors; only unusual layouts and raw pointer lists need sorting (overlap.c). */
#include "plan/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE = 128 };                             /* bytes of a link transaction */
static const int64_t MOST_UNBOUNDED = INT32_MAX; /* a bitmap of so many blocks takes 256 MiB */

void kvs_plan_scratch_free(struct kvs_plan_scratch *scratch) {
  free(scratch->bitmap);
  free(scratch->spans);
  for (int direction = 0; direction < 2; direction++) free(scratch->checked[direction].items);
  memset(scratch, 0, sizeof *scratch);
}

int kvs_copies_reserve(struct kvs_copies *copies, size_t capacity, struct kvs_error *err) {
  if (capacity <= copies->capacity) return KVS_OK;
  if (capacity < 2 * copies->capacity) capacity = 2 * copies->capacity;
  if (capacity < 256) capacity = 256;
  uint64_t *dst = realloc(copies->dst, capacity * sizeof *dst);
  if (dst) copies->dst = dst;
  uint64_t *src = realloc(copies->src, capacity * sizeof *src);
  if (src) copies->src = src;
  uint64_t *nbytes = realloc(copies->nbytes, capacity * sizeof *nbytes);
  if (nbytes) copies->nbytes = nbytes;
  uint32_t *block = realloc(copies->block, capacity * sizeof *block);
  if (block) copies->block = block;
  if (!dst || !src || !nbytes || !block)
    return kvs_fail(err, KVS_NOMEM, "no memory for a plan of %zu copies", capacity);
  copies->capacity = capacity;
  return KVS_OK;
}

void kvs_copies_free(struct kvs_copies *copies) {
  free(copies->dst);
  free(copies->src);
  free(copies->nbytes);
  free(copies->block);
  memset(copies, 0, sizeof *copies);
}

int kvs_rects_reserve(struct kvs_rects *rects, size_t capacity, struct kvs_error *err) {
  if (capacity <= rects->capacity) return KVS_OK;
  if (capacity < 2 * rects->capacity) capacity = 2 * rects->capacity;
  struct kvs_rect *items = realloc(rects->items, capacity * sizeof *items);
  if (items) rects->items = items;
  uint32_t *block = realloc(rects->block, capacity * sizeof *block);
  if (block) rects->block = block;
  if (!items || !block) return kvs_fail(err, KVS_NOMEM, "no memory for a plan of %zu copies of rows", capacity);
  rects->capacity = capacity;
  return KVS_OK;
}

void kvs_rects_free(struct kvs_rects *rects) {
  free(rects->items);
  free(rects->block);
  memset(rects, 0, sizeof *rects);
}

int kvs_plan_extent(uint64_t base, uint64_t blocks, uint64_t stride, uint64_t nbytes, uint64_t *end) {
  uint64_t span = 0;
  if (blocks == 0) {
    *end = base;
    return KVS_OK;
  }
  if (__builtin_mul_overflow(blocks - 1, kvs_stride_of(stride, nbytes), &span) ||
      __builtin_add_overflow(span, nbytes, &span) || __builtin_add_overflow(base, span, end))
    return KVS_INVALID;
  return KVS_OK;
}

/* -- ids ------------------------------------------------------------------------------------------------------- */

void kvs_ids_copy(const struct kvs_ids *ids, int64_t *copy) {
  if (ids->width == 8 && ids->count)
    memcpy(copy, ids->data, ids->count * sizeof *copy);
  else
    for (size_t i = 0; i < ids->count; i++) copy[i] = kvs_id_at(ids, i);
}

static uint64_t fewest_blocks(const struct kvs_tensor *tensors, size_t ntensors, bool gpu, size_t *which) {
  uint64_t fewest = UINT64_MAX;
  for (size_t t = 0; t < ntensors; t++) {
    uint64_t blocks = gpu ? tensors[t].gpu_blocks : tensors[t].cpu_blocks;
    if (blocks < fewest) fewest = blocks, *which = t;
  }
  return fewest;
}

/* Whether all ids are in [0, blocks). Uses sign bits instead of branches, so that the compiler can vectorise the
 * loop. */
static bool all_below(const struct kvs_ids *ids, uint64_t blocks) {
  uint64_t last = blocks - 1, outside = 0;                 /* 0 blocks: `last` is -1, and every id is out of range */
  if (ids->width != 8 || blocks > INT64_MAX) return false; /* no fast check */
  for (size_t i = 0; i < ids->count; i++) {
    uint64_t id = (uint64_t)((const int64_t *)ids->data)[i];
    outside |= id | (last - id);
  }
  return outside >> 63 == 0;
}

static int check_range(const struct kvs_ids *ids, const char *name, uint64_t blocks, const char *side, size_t tensor,
                       size_t ntensors, struct kvs_error *err) {
  char of[48] = "";
  if (all_below(ids, blocks)) return KVS_OK;
  for (size_t i = 0; i < ids->count; i++) {
    int64_t id = kvs_id_at(ids, i);
    if ((uint64_t)id < blocks) continue;
    if (ntensors > 1) snprintf(of, sizeof of, " of tensor %zu", tensor);
    if (blocks == 0)
      return kvs_fail(err, KVS_RANGE, "%s[%zu] is %" PRId64 ", but %s%s has no blocks", name, i, id, side, of);
    return kvs_fail(err, KVS_RANGE, "%s[%zu] is %" PRId64 "; %s%s has %" PRIu64 " blocks, 0 to %" PRIu64, name, i, id,
                    side, of, blocks, blocks - 1);
  }
  return KVS_OK;
}

static int name_duplicate(const struct kvs_ids *ids, const char *name, size_t second, struct kvs_error *err) {
  int64_t id = kvs_id_at(ids, second);
  size_t first = 0;
  while (kvs_id_at(ids, first) != id) first++;
  return kvs_fail(err, KVS_INVALID,
                  "%s[%zu] and %s[%zu] are both %" PRId64 ": two blocks would be written to one destination", name,
                  first, name, second, id);
}

int kvs_plan_grow_bitmap(struct kvs_plan_scratch *scratch, size_t words, struct kvs_error *err) {
  if (words <= scratch->bitmap_words) return KVS_OK;
  uint64_t *bitmap = calloc(words, sizeof *bitmap);
  if (!bitmap) return kvs_fail(err, KVS_NOMEM, "no memory to check %zu blocks for duplicates", words * 64);
  free(scratch->bitmap);
  scratch->bitmap = bitmap;
  scratch->bitmap_words = words;
  return KVS_OK;
}

static void clear_bits(const struct kvs_ids *ids, size_t count, size_t words, uint64_t *bitmap) {
  if (words <= count)
    memset(bitmap, 0, words * sizeof *bitmap);
  else
    while (count-- > 0) bitmap[(uint64_t)kvs_id_at(ids, count) >> 6] = 0;
}

static int name_shared(const struct kvs_ids *src_ids, const struct kvs_ids *dst_ids, size_t at, struct kvs_error *err) {
  int64_t id = kvs_id_at(src_ids, at);
  size_t there = 0;
  while (kvs_id_at(dst_ids, there) != id) there++;
  return kvs_fail(err, KVS_INVALID,
                  "src_ids[%zu] and dst_ids[%zu] are both %" PRId64
                  " of one pool: a slot cannot be read and written by the same transfer",
                  at, there, id);
}

/* No id occurs twice or is in `others` (may be NULL). */
static int check_duplicates(const struct kvs_ids *ids, const char *name, uint64_t blocks, const struct kvs_ids *others,
                            struct kvs_plan_scratch *scratch, struct kvs_error *err) {
  size_t words = (size_t)((blocks + 63) / 64), i = 0, twice = ids->count, shared = 0;
  if (ids->count <= 1 && !others) return KVS_OK;
  int status = kvs_plan_grow_bitmap(scratch, words, err);
  if (status) return status;
  uint64_t *bitmap = scratch->bitmap;
  for (; i < ids->count; i++) {
    uint64_t id = (uint64_t)kvs_id_at(ids, i), bit = 1ull << (id & 63);
    if (bitmap[id >> 6] & bit) {
      twice = i;
      break;
    }
    bitmap[id >> 6] |= bit;
  }
  if (others)
    for (; shared < others->count; shared++) {
      uint64_t id = (uint64_t)kvs_id_at(others, shared);
      if (id < blocks && bitmap[id >> 6] >> (id & 63) & 1) break;
    }
  clear_bits(ids, i, words, bitmap);
  if (twice < ids->count) return name_duplicate(ids, name, twice, err);
  return others && shared < others->count ? name_shared(others, ids, shared, err) : KVS_OK;
}

/* Without tensors the number of blocks is not known. *end: above all ids. */
static int check_unbounded(const struct kvs_ids *ids, const char *name, uint64_t *end, struct kvs_error *err) {
  *end = 0;
  for (size_t i = 0; i < ids->count; i++) {
    int64_t id = kvs_id_at(ids, i);
    if (id < 0 || id > MOST_UNBOUNDED)
      return kvs_fail(err, KVS_RANGE, "%s[%zu] is %" PRId64 "; without tensors ids are from 0 to %" PRId64, name, i, id,
                      MOST_UNBOUNDED);
    if ((uint64_t)id >= *end) *end = (uint64_t)id + 1;
  }
  return KVS_OK;
}

static int check_without_tensors(const struct kvs_ids *gpu_ids, const struct kvs_ids *cpu_ids,
                                 enum kvs_direction direction, struct kvs_plan_scratch *scratch,
                                 struct kvs_error *err) {
  uint64_t gpu_end = 0, cpu_end;
  bool known = gpu_ids->data || !gpu_ids->count;
  int status = known ? check_unbounded(gpu_ids, "gpu_block_ids", &gpu_end, err) : KVS_OK;
  if (!status) status = check_unbounded(cpu_ids, "cpu_block_ids", &cpu_end, err);
  if (status) return status;
  if (direction == KVS_D2H) return check_duplicates(cpu_ids, "cpu_block_ids", cpu_end, NULL, scratch, err);
  return known ? check_duplicates(gpu_ids, "gpu_block_ids", gpu_end, NULL, scratch, err) : KVS_OK;
}

int kvs_plan_check_ids(const struct kvs_tensor *tensors, size_t ntensors, const struct kvs_ids *gpu_ids,
                       const struct kvs_ids *cpu_ids, enum kvs_direction direction, struct kvs_plan_scratch *scratch,
                       struct kvs_error *err) {
  size_t tensor = 0;
  if (gpu_ids->count != cpu_ids->count)
    return kvs_fail(err, KVS_INVALID,
                    "gpu_block_ids has %zu entries and cpu_block_ids has %zu: they name pairs and must be equally long",
                    gpu_ids->count, cpu_ids->count);
  if (gpu_ids->count > UINT32_MAX)
    return kvs_fail(err, KVS_INVALID, "%zu blocks in one call; the limit is %u", gpu_ids->count, UINT32_MAX);
  if (ntensors == 0) return check_without_tensors(gpu_ids, cpu_ids, direction, scratch, err);
  uint64_t gpu_blocks = fewest_blocks(tensors, ntensors, true, &tensor);
  bool known = gpu_ids->data || !gpu_ids->count;
  int status = known ? check_range(gpu_ids, "gpu_block_ids", gpu_blocks, "that side", tensor, ntensors, err) : KVS_OK;
  if (status) return status;
  uint64_t cpu_blocks = fewest_blocks(tensors, ntensors, false, &tensor);
  status = check_range(cpu_ids, "cpu_block_ids", cpu_blocks, "that side", tensor, ntensors, err);
  if (status) return status;
  if (direction == KVS_D2H) return check_duplicates(cpu_ids, "cpu_block_ids", cpu_blocks, NULL, scratch, err);
  return known ? check_duplicates(gpu_ids, "gpu_block_ids", gpu_blocks, NULL, scratch, err) : KVS_OK;
}

int kvs_plan_check_slots(const struct kvs_plan_slots *src, const struct kvs_plan_slots *dst, bool shared,
                         struct kvs_plan_scratch *scratch, struct kvs_error *err) {
  const struct kvs_ids *src_ids = &src->ids, *dst_ids = &dst->ids;
  if (src_ids->count != dst_ids->count)
    return kvs_fail(err, KVS_INVALID,
                    "src_ids has %zu entries and dst_ids has %zu: they name pairs and must be equally long",
                    src_ids->count, dst_ids->count);
  if (src_ids->count > UINT32_MAX)
    return kvs_fail(err, KVS_INVALID, "%zu blocks in one call; the limit is %u", src_ids->count, UINT32_MAX);
  bool src_known = src_ids->data || !src_ids->count, dst_known = dst_ids->data || !dst_ids->count;
  int status = src_known ? check_range(src_ids, "src_ids", src->blocks, src->pool, 0, 0, err) : KVS_OK;
  if (!status && dst_known) status = check_range(dst_ids, "dst_ids", dst->blocks, dst->pool, 0, 0, err);
  if (status || !dst_known) return status;
  return check_duplicates(dst_ids, "dst_ids", dst->blocks, shared ? src_ids : NULL, scratch, err);
}

/* -- copies ---------------------------------------------------------------------------------------------------- */

int kvs_plan_cache(const struct kvs_tensor *tensors, size_t ntensors, const struct kvs_ids *gpu_ids,
                   const struct kvs_ids *cpu_ids, enum kvs_direction direction, bool merge, struct kvs_copies *copies,
                   struct kvs_error *err) {
  const struct kvs_ids *src_ids = direction == KVS_D2H ? gpu_ids : cpu_ids;
  const struct kvs_ids *dst_ids = direction == KVS_D2H ? cpu_ids : gpu_ids;
  size_t count = src_ids->count, worst;
  if (__builtin_mul_overflow(count, ntensors, &worst) || __builtin_add_overflow(worst, copies->count, &worst))
    return kvs_fail(err, KVS_NOMEM, "%zu blocks of %zu tensors are too many for one call", count, ntensors);
  int status = kvs_copies_reserve(copies, worst, err);
  if (status) return status;
  for (size_t t = 0; t < ntensors; t++) {
    const struct kvs_tensor *tensor = &tensors[t];
    uint64_t nbytes = tensor->nbytes, gpu_stride = kvs_stride_of(tensor->gpu_stride, nbytes);
    uint64_t cpu_stride = kvs_stride_of(tensor->cpu_stride, nbytes);
    uint64_t src = direction == KVS_D2H ? tensor->gpu : tensor->cpu;
    uint64_t dst = direction == KVS_D2H ? tensor->cpu : tensor->gpu;
    uint64_t src_stride = direction == KVS_D2H ? gpu_stride : cpu_stride;
    uint64_t dst_stride = direction == KVS_D2H ? cpu_stride : gpu_stride;
    bool packed = merge && src_stride == nbytes && dst_stride == nbytes;
    for (size_t i = 0; i < count;) {
      int64_t s = kvs_id_at(src_ids, i), d = kvs_id_at(dst_ids, i);
      size_t run = 1;
      if (packed)
        while (i + run < count && kvs_id_at(src_ids, i + run) == s + (int64_t)run &&
               kvs_id_at(dst_ids, i + run) == d + (int64_t)run)
          run++;
      kvs_copies_push(copies, dst + (uint64_t)d * dst_stride, src + (uint64_t)s * src_stride, run * nbytes,
                      (uint32_t)i);
      i += run;
    }
  }
  return KVS_OK;
}

static int check_entry(const uint64_t *src, const uint64_t *dst, uint64_t nbytes, size_t i, struct kvs_error *err) {
  if (nbytes == 0) return kvs_fail(err, KVS_INVALID, "sizes[%zu] is 0: every copy moves at least one byte", i);
  if (src[i] == 0 || dst[i] == 0)
    return kvs_fail(err, KVS_INVALID, "%s[%zu] is 0 (a null pointer)", src[i] ? "dst_ptrs" : "src_ptrs", i);
  if (src[i] + nbytes < src[i] || dst[i] + nbytes < dst[i])
    return kvs_fail(err, KVS_INVALID, "%s[%zu] = 0x%" PRIx64 " plus %" PRIu64 " bytes is beyond the address space",
                    src[i] + nbytes < src[i] ? "src_ptrs" : "dst_ptrs", i, src[i] + nbytes < src[i] ? src[i] : dst[i],
                    nbytes);
  return KVS_OK;
}

int kvs_plan_batch(const uint64_t *src, const uint64_t *dst, const uint64_t *nbytes, bool one_size, size_t count,
                   bool merge, struct kvs_copies *copies, struct kvs_plan_bounds *bounds, struct kvs_error *err) {
  if (count > UINT32_MAX)
    return kvs_fail(err, KVS_INVALID, "%zu copies in one call; the limit is %u", count, UINT32_MAX);
  int status = kvs_copies_reserve(copies, copies->count + count, err);
  struct kvs_plan_bounds all = {.src_low = UINT64_MAX, .dst_low = UINT64_MAX, .smallest = UINT64_MAX};
  uint64_t src_next = 0, dst_next = 0, run = 0; /* end of the last copy, and its bytes */
  size_t from = copies->count;
  for (size_t i = 0; !status && i < count; i++) {
    uint64_t size = nbytes[one_size ? 0 : i], s = src[i], d = dst[i], s_end = s + size, d_end = d + size;
    if (size == 0 || s == 0 || d == 0 || s_end < s || d_end < d) return check_entry(src, dst, size, i, err);
    bool goes_on = merge && s == src_next && d == dst_next && copies->count > from;
    src_next = s_end;
    dst_next = d_end;
    if (s < all.src_low) all.src_low = s;
    if (d < all.dst_low) all.dst_low = d;
    if (s_end > all.src_high) all.src_high = s_end;
    if (d_end > all.dst_high) all.dst_high = d_end;
    all.total += size;
    if (goes_on) {
      copies->nbytes[copies->count - 1] = run += size;
      continue;
    }
    if (run && run < all.smallest) all.smallest = run;
    run = size;
    kvs_copies_push(copies, d, s, size, (uint32_t)i);
  }
  if (run && run < all.smallest) all.smallest = run;
  if (copies->count == from) all.src_low = all.dst_low = 0;
  *bounds = all;
  return status;
}

/* -- seams and pieces ------------------------------------------------------------------------------------------ */

/* Bytes from `address` that one copy may move: up to the end of its region if the region has a seam. */
static uint64_t until_seam(const struct kvs_regions *regions, const struct kvs_region **last, uint64_t address,
                           uint64_t nbytes) {
  const struct kvs_region *region = *last;
  if (!region || !kvs_region_holds(region, address)) *last = region = kvs_regions_find(regions, address);
  if (!region) return nbytes;
  uint64_t left = region->nbytes - (address - region->base);
  if (nbytes <= left) return nbytes;
  if (region->seam) return left;
  /* A region without a seam may be followed by one with a seam; a copy must not cross into that one. */
  const struct kvs_region *next = kvs_regions_find(regions, region->base + region->nbytes);
  return next && next->seam ? left : left + until_seam(regions, &next, address + left, nbytes - left);
}

struct seams {
  const struct kvs_regions *regions;
  const struct kvs_region *src, *dst; /* regions of the last copy */
};

static uint64_t first_part(struct seams *seams, uint64_t dst, uint64_t src, uint64_t nbytes) {
  uint64_t part = until_seam(seams->regions, &seams->src, src, nbytes);
  uint64_t dst_part = until_seam(seams->regions, &seams->dst, dst, nbytes);
  return dst_part < part ? dst_part : part;
}

/* Number of parts into which a copy must be split. */
static size_t parts_of(struct seams *seams, uint64_t dst, uint64_t src, uint64_t nbytes) {
  size_t parts = 0;
  for (uint64_t part; nbytes; dst += part, src += part, nbytes -= part, parts++)
    part = first_part(seams, dst, src, nbytes);
  return parts;
}

uint64_t kvs_plan_until_seam(const struct kvs_regions *regions, uint64_t address, uint64_t nbytes) {
  const struct kvs_region *region = NULL;
  return until_seam(regions, &region, address, nbytes);
}

int kvs_plan_split(struct kvs_copies *copies, size_t from, const struct kvs_regions *regions, struct kvs_error *err) {
  struct seams seams = {.regions = regions};
  size_t count = copies->count, total = from;
  for (size_t i = from; i < count; i++) total += parts_of(&seams, copies->dst[i], copies->src[i], copies->nbytes[i]);
  if (total == count) return KVS_OK;
  int status = kvs_copies_reserve(copies, total, err);
  if (status) return status;
  for (size_t i = count, at = total; i-- > from;) { /* backwards, since the parts overwrite their sources */
    uint64_t dst = copies->dst[i], src = copies->src[i], nbytes = copies->nbytes[i];
    uint32_t block = copies->block[i];
    at -= parts_of(&seams, dst, src, nbytes);
    copies->count = at;
    for (uint64_t part; nbytes; dst += part, src += part, nbytes -= part) {
      part = first_part(&seams, dst, src, nbytes);
      kvs_copies_push(copies, dst, src, part, block);
    }
  }
  copies->count = total;
  return KVS_OK;
}

uint64_t kvs_plan_part(uint64_t nbytes, uint64_t most) {
  uint64_t count = nbytes ? (nbytes - 1) / most + 1 : 1, part = (nbytes + count - 1) / count;
  part = (part + LINE - 1) / LINE * LINE;
  return part < most ? part : most;
}

size_t kvs_plan_most_pieces(const struct kvs_copies *copies, uint64_t nbytes, uint64_t piece) {
  return copies->count + (size_t)(nbytes / piece);
}

static uint64_t alias_of(const struct kvs_regions *regions, const struct kvs_region **last, uint64_t address) {
  if (!*last || !kvs_region_holds(*last, address)) *last = kvs_regions_find(regions, address);
  return *last && (*last)->alias ? (*last)->alias + (address - (*last)->base) : address;
}

size_t kvs_plan_pieces(const struct kvs_copies *copies, uint64_t piece, const struct kvs_regions *regions,
                       struct kvs_piece *pieces) {
  const struct kvs_region *src_last = NULL, *dst_last = NULL;
  /* Rare: on 64-bit Linux, pinned memory has equal device and host addresses. */
  bool aliased = regions && kvs_regions_aliased(regions);
  size_t count = 0;
  for (size_t i = 0; i < copies->count; i++) {
    uint64_t dst = copies->dst[i], src = copies->src[i], left = copies->nbytes[i];
    if (aliased) dst = alias_of(regions, &dst_last, dst), src = alias_of(regions, &src_last, src);
    uint64_t part = kvs_plan_part(left, piece);
    for (; left > part; dst += part, src += part, left -= part)
      pieces[count++] = (struct kvs_piece){.dst = dst, .src = src, .nbytes = part};
    pieces[count++] = (struct kvs_piece){.dst = dst, .src = src, .nbytes = left};
  }
  return count;
}
