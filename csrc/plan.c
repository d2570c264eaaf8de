/* Planning: ids to copies. See plan.h. What costs per block is kept to a range check, a bit and four stores; overlaps
 * of whole tensors are decided on their extents, so that only unusual layouts and raw pointer lists pay for sorting
 * (overlap.c). */
#include "plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void kvs_plan_scratch_free(struct kvs_plan_scratch *scratch) {
  free(scratch->bitmap);
  free(scratch->spans);
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

int kvs_plan_extent(uint64_t base, uint64_t blocks, uint64_t stride, uint64_t nbytes, uint64_t *end) {
  uint64_t span = 0;
  if (blocks == 0) {
    *end = base;
    return KVS_OK;
  }
  if (__builtin_mul_overflow(blocks - 1, stride ? stride : nbytes, &span) ||
      __builtin_add_overflow(span, nbytes, &span) || __builtin_add_overflow(base, span, end))
    return KVS_INVALID;
  return KVS_OK;
}

/* -- ids ------------------------------------------------------------------------------------------------------- */

static inline int64_t id_at(const struct kvs_ids *ids, size_t i) {
  return ids->width == 4 ? ((const int32_t *)ids->data)[i] : ((const int64_t *)ids->data)[i];
}

static uint64_t fewest_blocks(const struct kvs_tensor *tensors, size_t ntensors, bool gpu, size_t *which) {
  uint64_t fewest = UINT64_MAX;
  for (size_t t = 0; t < ntensors; t++) {
    uint64_t blocks = gpu ? tensors[t].gpu_blocks : tensors[t].cpu_blocks;
    if (blocks < fewest) fewest = blocks, *which = t;
  }
  return fewest;
}

static int check_range(const struct kvs_ids *ids, const char *name, uint64_t blocks, size_t tensor, size_t ntensors,
                       struct kvs_error *err) {
  char of[48] = "";
  for (size_t i = 0; i < ids->count; i++) {
    int64_t id = id_at(ids, i);
    if ((uint64_t)id < blocks) continue;
    if (ntensors > 1) snprintf(of, sizeof of, " of tensor %zu", tensor);
    if (blocks == 0)
      return kvs_fail(err, KVS_RANGE, "%s[%zu] is %" PRId64 ", but that side%s has no blocks", name, i, id, of);
    return kvs_fail(err, KVS_RANGE, "%s[%zu] is %" PRId64 "; that side%s has %" PRIu64 " blocks, 0 to %" PRIu64, name,
                    i, id, of, blocks, blocks - 1);
  }
  return KVS_OK;
}

static int name_duplicate(const struct kvs_ids *ids, const char *name, size_t second, struct kvs_error *err) {
  int64_t id = id_at(ids, second);
  size_t first = 0;
  while (id_at(ids, first) != id) first++;
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

static int check_duplicates(const struct kvs_ids *ids, const char *name, uint64_t blocks,
                            struct kvs_plan_scratch *scratch, struct kvs_error *err) {
  size_t words = (size_t)((blocks + 63) / 64), i = 0, twice = ids->count;
  int status = ids->count > 1 ? kvs_plan_grow_bitmap(scratch, words, err) : KVS_OK;
  if (status || ids->count <= 1) return status;
  uint64_t *bitmap = scratch->bitmap;
  for (; i < ids->count; i++) {
    uint64_t id = (uint64_t)id_at(ids, i), bit = 1ull << (id & 63);
    if (bitmap[id >> 6] & bit) {
      twice = i;
      break;
    }
    bitmap[id >> 6] |= bit;
  }
  if (words <= ids->count)
    memset(bitmap, 0, words * sizeof *bitmap);
  else
    while (i-- > 0) bitmap[(uint64_t)id_at(ids, i) >> 6] = 0;
  return twice < ids->count ? name_duplicate(ids, name, twice, err) : KVS_OK;
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
  if (ntensors == 0) return KVS_OK;
  uint64_t gpu_blocks = fewest_blocks(tensors, ntensors, true, &tensor);
  int status = check_range(gpu_ids, "gpu_block_ids", gpu_blocks, tensor, ntensors, err);
  if (status) return status;
  uint64_t cpu_blocks = fewest_blocks(tensors, ntensors, false, &tensor);
  status = check_range(cpu_ids, "cpu_block_ids", cpu_blocks, tensor, ntensors, err);
  if (status) return status;
  return direction == KVS_D2H ? check_duplicates(cpu_ids, "cpu_block_ids", cpu_blocks, scratch, err)
                              : check_duplicates(gpu_ids, "gpu_block_ids", gpu_blocks, scratch, err);
}

/* -- copies ---------------------------------------------------------------------------------------------------- */

/* Room is reserved by the caller. */
static inline void push(struct kvs_copies *copies, uint64_t dst, uint64_t src, uint64_t nbytes, uint32_t block) {
  size_t n = copies->count++;
  copies->dst[n] = dst;
  copies->src[n] = src;
  copies->nbytes[n] = nbytes;
  copies->block[n] = block;
}

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
    uint64_t nbytes = tensor->nbytes, gpu_stride = tensor->gpu_stride ? tensor->gpu_stride : nbytes;
    uint64_t cpu_stride = tensor->cpu_stride ? tensor->cpu_stride : nbytes;
    uint64_t src = direction == KVS_D2H ? tensor->gpu : tensor->cpu;
    uint64_t dst = direction == KVS_D2H ? tensor->cpu : tensor->gpu;
    uint64_t src_stride = direction == KVS_D2H ? gpu_stride : cpu_stride;
    uint64_t dst_stride = direction == KVS_D2H ? cpu_stride : gpu_stride;
    bool packed = merge && src_stride == nbytes && dst_stride == nbytes;
    for (size_t i = 0; i < count;) {
      int64_t s = id_at(src_ids, i), d = id_at(dst_ids, i);
      size_t run = 1;
      if (packed)
        while (i + run < count && id_at(src_ids, i + run) == s + (int64_t)run &&
               id_at(dst_ids, i + run) == d + (int64_t)run)
          run++;
      push(copies, dst + (uint64_t)d * dst_stride, src + (uint64_t)s * src_stride, run * nbytes, (uint32_t)i);
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
                   bool merge, struct kvs_copies *copies, struct kvs_error *err) {
  if (count > UINT32_MAX)
    return kvs_fail(err, KVS_INVALID, "%zu copies in one call; the limit is %u", count, UINT32_MAX);
  int status = kvs_copies_reserve(copies, copies->count + count, err);
  size_t from = copies->count;
  for (size_t i = 0; !status && i < count; i++) {
    uint64_t size = nbytes[one_size ? 0 : i];
    size_t last = copies->count - 1;
    if (size == 0 || src[i] == 0 || dst[i] == 0 || src[i] + size < src[i] || dst[i] + size < dst[i])
      return check_entry(src, dst, size, i, err);
    if (merge && copies->count > from && copies->src[last] + copies->nbytes[last] == src[i] &&
        copies->dst[last] + copies->nbytes[last] == dst[i])
      copies->nbytes[last] += size;
    else
      push(copies, dst[i], src[i], size, (uint32_t)i);
  }
  return status;
}

/* -- seams and pieces ------------------------------------------------------------------------------------------ */

/* Bytes from `address` that one copy may move: to the end of its region where that is a seam. */
static uint64_t until_seam(const struct kvs_regions *regions, const struct kvs_region **last, uint64_t address,
                           uint64_t nbytes) {
  const struct kvs_region *region = *last;
  if (!region || !kvs_region_holds(region, address)) *last = region = kvs_regions_find(regions, address);
  if (!region) return nbytes;
  uint64_t left = region->nbytes - (address - region->base);
  if (nbytes <= left) return nbytes;
  if (region->seam) return left;
  /* An unseamed region may be followed by one with a seam: never copy into it from outside. */
  const struct kvs_region *next = kvs_regions_find(regions, region->base + region->nbytes);
  return next && next->seam ? left : left + until_seam(regions, &next, address + left, nbytes - left);
}

int kvs_plan_split(struct kvs_copies *copies, const struct kvs_regions *regions, struct kvs_error *err) {
  const struct kvs_region *src_last = NULL, *dst_last = NULL;
  size_t count = copies->count;
  for (size_t i = 0; i < count; i++) {
    uint64_t nbytes = copies->nbytes[i];
    uint64_t part = until_seam(regions, &src_last, copies->src[i], nbytes);
    uint64_t dst_part = until_seam(regions, &dst_last, copies->dst[i], nbytes);
    if (dst_part < part) part = dst_part;
    if (part == nbytes) continue;
    int status = kvs_copies_reserve(copies, copies->count + 1, err);
    if (status) return status;
    copies->nbytes[i] = part;
    push(copies, copies->dst[i] + part, copies->src[i] + part, nbytes - part, copies->block[i]);
    count++; /* the rest may cross another seam */
  }
  return KVS_OK;
}

size_t kvs_plan_most_pieces(const struct kvs_copies *copies, uint64_t nbytes, uint64_t piece) {
  return copies->count + (size_t)(nbytes / piece);
}

static uint64_t alias_of(const struct kvs_regions *regions, const struct kvs_region **last, uint64_t address) {
  if (!*last || !kvs_region_holds(*last, address)) *last = kvs_regions_find(regions, address);
  return *last && (*last)->alias ? (*last)->alias + (address - (*last)->base) : address;
}

static bool any_alias(const struct kvs_regions *regions) {
  for (size_t i = 0; regions && i < regions->count; i++)
    if (regions->items[i].alias && regions->items[i].alias != regions->items[i].base) return true;
  return false;
}

size_t kvs_plan_pieces(const struct kvs_copies *copies, uint64_t piece, const struct kvs_regions *regions,
                       struct kvs_piece *pieces) {
  const struct kvs_region *src_last = NULL, *dst_last = NULL;
  bool aliased = any_alias(regions); /* unusual: on 64-bit Linux pinned memory is where the device sees it */
  size_t count = 0;
  for (size_t i = 0; i < copies->count; i++) {
    uint64_t dst = copies->dst[i], src = copies->src[i], left = copies->nbytes[i];
    if (aliased) dst = alias_of(regions, &dst_last, dst), src = alias_of(regions, &src_last, src);
    for (; left > piece; dst += piece, src += piece, left -= piece)
      pieces[count++] = (struct kvs_piece){.dst = dst, .src = src, .nbytes = piece};
    pieces[count++] = (struct kvs_piece){.dst = dst, .src = src, .nbytes = left};
  }
  return count;
}
