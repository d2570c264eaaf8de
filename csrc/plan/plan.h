/* From ids and pointers to a validated, merged list of copies. Pure functions over arrays: no device, no clock, no
 * lock. These functions check ids, sizes and overlaps; the engine checks the kind of memory (memory/cover.c). */
#ifndef KVS_PLAN_H
#define KVS_PLAN_H

#include "device/device.h"
#include "kvswap.h"

/* Working memory reused from plan to plan, so that the steady state does not allocate. Zero-initialised is empty. */
struct kvs_plan_scratch {
  uint64_t *bitmap; /* all zero between plans */
  size_t bitmap_words;
  struct kvs_span *spans; /* buffer for sorting */
  size_t spans_capacity;
  /* The tensors of the last check in each direction: an engine's tensors usually do not change between calls. */
  struct kvs_checked_tensors {
    struct kvs_tensor *items;
    size_t count, capacity;
    bool right, disjoint;
  } checked[2];
};

/* 2-D copies, and the block of each. */
struct kvs_rects {
  struct kvs_rect *items;
  uint32_t *block;
  size_t count, capacity;
  uint64_t rows; /* in all copies */
};

static inline int64_t kvs_id_at(const struct kvs_ids *ids, size_t i) {
  return ids->width == 4 ? ((const int32_t *)ids->data)[i] : ((const int64_t *)ids->data)[i];
}
/* Copies all ids, widened to 8 bytes. */
void kvs_ids_copy(const struct kvs_ids *ids, int64_t *copy);

void kvs_plan_scratch_free(struct kvs_plan_scratch *scratch);
/* Get a zeroed bitmap of that many words. */
int kvs_plan_grow_bitmap(struct kvs_plan_scratch *scratch, size_t words, struct kvs_error *err);
int kvs_copies_reserve(struct kvs_copies *copies, size_t capacity, struct kvs_error *err);
void kvs_copies_free(struct kvs_copies *copies);
int kvs_rects_reserve(struct kvs_rects *rects, size_t capacity, struct kvs_error *err);
void kvs_rects_free(struct kvs_rects *rects);
/* Append; capacity must be sufficient. */
static inline void kvs_copies_push(struct kvs_copies *copies, uint64_t dst, uint64_t src, uint64_t nbytes,
                                   uint32_t block) {
  size_t n = copies->count++;
  copies->dst[n] = dst;
  copies->src[n] = src;
  copies->nbytes[n] = nbytes;
  copies->block[n] = block;
}

/* One past the last byte of `blocks` blocks of a side; KVS_INVALID if the address overflows. */
int kvs_plan_extent(uint64_t base, uint64_t blocks, uint64_t stride, uint64_t nbytes, uint64_t *end);

static inline uint64_t kvs_stride_of(uint64_t stride, uint64_t nbytes) { return stride ? stride : nbytes; }

/* Check both id lists: equal lengths, in range for every tensor (without tensors: from 0 to INT32_MAX), no destination
 * twice. A list without data is not known
 * (gpu_ids, and either list of slots): only its length is checked. */
int kvs_plan_check_ids(const struct kvs_tensor *tensors, size_t ntensors, const struct kvs_ids *gpu_ids,
                       const struct kvs_ids *cpu_ids, enum kvs_direction direction, struct kvs_plan_scratch *scratch,
                       struct kvs_error *err);

/* One list of slot ids, and the number of slots of the smallest pool on that side. */
struct kvs_plan_slots {
  struct kvs_ids ids;
  uint64_t blocks;
  const char *pool; /* for messages: "pool 'kv'" */
};

/* Check both lists: equal lengths, in range, no destination twice; `shared`: no slot on both sides. */
int kvs_plan_check_slots(const struct kvs_plan_slots *src, const struct kvs_plan_slots *dst, bool shared,
                         struct kvs_plan_scratch *scratch, struct kvs_error *err);

/* Append the copies of checked ids, tensor by tensor. `merge`: blocks contiguous on both sides become one copy. */
int kvs_plan_cache(const struct kvs_tensor *tensors, size_t ntensors, const struct kvs_ids *gpu_ids,
                   const struct kvs_ids *cpu_ids, enum kvs_direction direction, bool merge, struct kvs_copies *copies,
                   struct kvs_error *err);

/* Address ranges of copies: all accesses are in [low, high). Without copies, all fields but `smallest` are 0. */
struct kvs_plan_bounds {
  uint64_t src_low, src_high, dst_low, dst_high;
  uint64_t smallest, total; /* bytes of the smallest copy, and of all */
};

/* The same for raw lists: checks that no size is 0 and no range overflows. *bounds: of the appended copies. */
int kvs_plan_batch(const uint64_t *src, const uint64_t *dst, const uint64_t *nbytes, bool one_size, size_t count,
                   bool merge, struct kvs_copies *copies, struct kvs_plan_bounds *bounds, struct kvs_error *err);

/* Split every copy of [from, copies->count) that crosses the end of a region with a seam, on either side. The parts
 * replace the copy, in order. */
int kvs_plan_split(struct kvs_copies *copies, size_t from, const struct kvs_regions *regions, struct kvs_error *err);

/* How many of these bytes one copy may move: up to the end of a region with a seam. */
uint64_t kvs_plan_until_seam(const struct kvs_regions *regions, uint64_t address, uint64_t nbytes);

/* Bytes of the equal parts, whole lines of the link, of a copy or row that one piece of `most` bytes does not hold. A
 * warp may take every second piece: a full piece and a short rest would leave half of the warps the whole work. */
uint64_t kvs_plan_part(uint64_t nbytes, uint64_t most);

/* Divide copies into pieces of at most `piece` bytes for the kernel path, with device addresses (aliases of regions;
 * NULL: addresses are equal). Returns the number of pieces; the caller has room for kvs_plan_most_pieces(), where
 * `nbytes` is the sum of the copies. */
size_t kvs_plan_most_pieces(const struct kvs_copies *copies, uint64_t nbytes, uint64_t piece);
size_t kvs_plan_pieces(const struct kvs_copies *copies, uint64_t piece, const struct kvs_regions *regions,
                       struct kvs_piece *pieces);

#endif
