/* Tensors at equal distances, which one 2-D copy can move together. Pure. */
#ifndef KVS_STRIDE_H
#define KVS_STRIDE_H

#include "plan/plan.h"

/* Tensors order[first] ... order[first + count - 1] of one shape, each `gpu_pitch` bytes after the previous one on the
 * GPU and `cpu_pitch` on the host, all within one region on either side. */
struct kvs_stack {
  size_t first, count;
  uint64_t gpu_pitch, cpu_pitch;
};

/* Zero-initialised is empty; reused from plan to plan. */
struct kvs_stacks {
  struct kvs_stack *items;
  size_t count;
  uint32_t *order;
  struct kvs_base *sorting;
  size_t capacity; /* in tensors */
};

void kvs_stacks_free(struct kvs_stacks *stacks);

/* Put every tensor into a stack, some alone. `regions` cover the tensors. */
int kvs_stacks_find(const struct kvs_tensor *tensors, size_t ntensors, const struct kvs_regions *regions,
                    struct kvs_stacks *stacks, struct kvs_error *err);

/* Append one 2-D copy a block for each stack of several tensors, and plain copies for the others. */
int kvs_plan_stacks(const struct kvs_tensor *tensors, const struct kvs_stacks *stacks, const struct kvs_ids *gpu_ids,
                    const struct kvs_ids *cpu_ids, enum kvs_direction direction, uint64_t max_pitch,
                    struct kvs_rects *rects, struct kvs_copies *copies, struct kvs_error *err);

/* Rows of `width` bytes at the given pitches: a 2-D copy, or a 3-D copy with one row a slice if a pitch is above the
 * limit. False: impossible. */
bool kvs_rect_make(struct kvs_rect *rect, uint64_t dst, uint64_t src, uint64_t width, uint64_t rows, uint64_t dst_pitch,
                   uint64_t src_pitch, uint64_t max_pitch);

/* Number of rows. */
static inline uint64_t kvs_rect_rows(const struct kvs_rect *rect) {
  return rect->depth > 1 ? rect->depth : rect->height;
}
static inline uint64_t kvs_rect_dst(const struct kvs_rect *rect, uint64_t row) {
  return rect->dst + row * rect->dst_pitch * (rect->depth > 1 ? rect->dst_height : 1);
}
static inline uint64_t kvs_rect_src(const struct kvs_rect *rect, uint64_t row) {
  return rect->src + row * rect->src_pitch * (rect->depth > 1 ? rect->src_height : 1);
}

#endif
