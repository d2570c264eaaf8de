/* Stacks of tensors: see stride.h. Tensors are sorted by GPU address; neighbours form a stack while both sides have
 * constant distances, as the layers of a cache in one slab have, with a layer-first or block-first host pool. */
#include "plan/stride.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_SLICES = 4096 }; /* limit of the search for a pitch of slices with one row */

struct kvs_base {
  uint64_t gpu;
  uint32_t tensor;
};

void kvs_stacks_free(struct kvs_stacks *stacks) {
  free(stacks->items);
  free(stacks->order);
  free(stacks->sorting);
  memset(stacks, 0, sizeof *stacks);
}

static int reserve(struct kvs_stacks *stacks, size_t ntensors, struct kvs_error *err) {
  if (ntensors <= stacks->capacity) return KVS_OK;
  kvs_stacks_free(stacks);
  stacks->items = calloc(ntensors, sizeof *stacks->items);
  stacks->order = calloc(ntensors, sizeof *stacks->order);
  stacks->sorting = calloc(ntensors, sizeof *stacks->sorting);
  if (!stacks->items || !stacks->order || !stacks->sorting) {
    kvs_stacks_free(stacks);
    return kvs_fail(err, KVS_NOMEM, "no memory to plan %zu tensors", ntensors);
  }
  stacks->capacity = ntensors;
  return KVS_OK;
}

static int by_base(const void *a, const void *b) {
  uint64_t left = ((const struct kvs_base *)a)->gpu, right = ((const struct kvs_base *)b)->gpu;
  return (left > right) - (left < right);
}

/* Insertion sort: the tensors usually come in order. */
static void sort_bases(struct kvs_base *bases, size_t count) {
  for (size_t i = 1; i < count; i++)
    if (bases[i].gpu < bases[i - 1].gpu) {
      qsort(bases, count, sizeof *bases, by_base);
      return;
    }
}

static bool same_shape(const struct kvs_tensor *a, const struct kvs_tensor *b) {
  return a->nbytes == b->nbytes && kvs_stride_of(a->gpu_stride, a->nbytes) == kvs_stride_of(b->gpu_stride, b->nbytes) &&
         kvs_stride_of(a->cpu_stride, a->nbytes) == kvs_stride_of(b->cpu_stride, b->nbytes);
}

/* Whether the region of `base` contains the whole tensor at `at`. */
static bool reaches(const struct kvs_regions *regions, uint64_t base, uint64_t at, uint64_t blocks, uint64_t stride,
                    uint64_t nbytes) {
  const struct kvs_region *region = kvs_regions_find(regions, base);
  uint64_t end;
  return region && !kvs_plan_extent(at, blocks, stride, nbytes, &end) && end - region->base <= region->nbytes;
}

/* Whether `next` continues the stack that begins with `first`. */
static bool goes_on(const struct kvs_stack *stack, const struct kvs_tensor *first, const struct kvs_tensor *last,
                    const struct kvs_tensor *next, const struct kvs_regions *regions) {
  uint64_t gpu_pitch = next->gpu - last->gpu, cpu_pitch = next->cpu - last->cpu, nbytes = first->nbytes;
  if (!same_shape(first, next) || next->cpu <= last->cpu || gpu_pitch < nbytes || cpu_pitch < nbytes) return false;
  if (stack->count > 1 && (gpu_pitch != stack->gpu_pitch || cpu_pitch != stack->cpu_pitch)) return false;
  return reaches(regions, first->gpu, next->gpu, next->gpu_blocks, next->gpu_stride, nbytes) &&
         reaches(regions, first->cpu, next->cpu, next->cpu_blocks, next->cpu_stride, nbytes);
}

/* With more regions than tensors, two tensors rarely share a region on both sides: skip the sort. */
static int each_alone(size_t ntensors, struct kvs_stacks *stacks) {
  for (size_t t = 0; t < ntensors; t++) {
    stacks->order[t] = (uint32_t)t;
    stacks->items[t] = (struct kvs_stack){.first = t, .count = 1};
  }
  stacks->count = ntensors;
  return KVS_OK;
}

int kvs_stacks_find(const struct kvs_tensor *tensors, size_t ntensors, const struct kvs_regions *regions,
                    struct kvs_stacks *stacks, struct kvs_error *err) {
  int status = reserve(stacks, ntensors, err);
  stacks->count = 0;
  if (!status && regions->count > ntensors) return each_alone(ntensors, stacks);
  if (status || ntensors > UINT32_MAX) return status;
  for (size_t t = 0; t < ntensors; t++) stacks->sorting[t] = (struct kvs_base){tensors[t].gpu, (uint32_t)t};
  sort_bases(stacks->sorting, ntensors);
  for (size_t i = 0; i < ntensors; i++) {
    stacks->order[i] = stacks->sorting[i].tensor;
    const struct kvs_tensor *next = &tensors[stacks->order[i]];
    struct kvs_stack *stack = stacks->count ? &stacks->items[stacks->count - 1] : NULL;
    const struct kvs_tensor *last = i ? &tensors[stacks->order[i - 1]] : NULL;
    if (stack && goes_on(stack, &tensors[stacks->order[stack->first]], last, next, regions)) {
      stack->gpu_pitch = next->gpu - last->gpu;
      stack->cpu_pitch = next->cpu - last->cpu;
      stack->count++;
    } else {
      stacks->items[stacks->count++] = (struct kvs_stack){.first = i, .count = 1};
    }
  }
  return KVS_OK;
}

/* -- 2-D copies ------------------------------------------------------------------------------------------------ */

/* pitch = part * slices, with a `part` that the driver accepts. */
static bool cut_pitch(uint64_t pitch, uint64_t width, uint64_t most, uint64_t *part, uint64_t *slices) {
  for (*slices = 1; *slices <= MOST_SLICES; ++*slices) {
    *part = pitch / *slices;
    if (*part < width) return false;
    if (*part <= most && pitch % *slices == 0) return true;
  }
  return false;
}

bool kvs_rect_make(struct kvs_rect *rect, uint64_t dst, uint64_t src, uint64_t width, uint64_t rows, uint64_t dst_pitch,
                   uint64_t src_pitch, uint64_t max_pitch) {
  *rect = (struct kvs_rect){.dst = dst,
                            .src = src,
                            .dst_pitch = dst_pitch,
                            .src_pitch = src_pitch,
                            .width = width,
                            .height = rows,
                            .depth = 1};
  if (dst_pitch <= max_pitch && src_pitch <= max_pitch) return true;
  rect->height = 1;
  rect->depth = rows;
  return cut_pitch(dst_pitch, width, max_pitch, &rect->dst_pitch, &rect->dst_height) &&
         cut_pitch(src_pitch, width, max_pitch, &rect->src_pitch, &rect->src_height);
}

static void push_rects(const struct kvs_tensor *tensor, const struct kvs_rect *shape, const struct kvs_ids *gpu_ids,
                       const struct kvs_ids *cpu_ids, enum kvs_direction direction, struct kvs_rects *rects) {
  uint64_t gpu_stride = kvs_stride_of(tensor->gpu_stride, tensor->nbytes);
  uint64_t cpu_stride = kvs_stride_of(tensor->cpu_stride, tensor->nbytes);
  for (size_t i = 0; i < gpu_ids->count; i++) {
    uint64_t gpu = tensor->gpu + (uint64_t)kvs_id_at(gpu_ids, i) * gpu_stride;
    uint64_t cpu = tensor->cpu + (uint64_t)kvs_id_at(cpu_ids, i) * cpu_stride;
    struct kvs_rect *rect = &rects->items[rects->count];
    *rect = *shape;
    rect->dst = direction == KVS_D2H ? cpu : gpu;
    rect->src = direction == KVS_D2H ? gpu : cpu;
    rects->block[rects->count++] = (uint32_t)i;
  }
}

int kvs_plan_stacks(const struct kvs_tensor *tensors, const struct kvs_stacks *stacks, const struct kvs_ids *gpu_ids,
                    const struct kvs_ids *cpu_ids, enum kvs_direction direction, uint64_t max_pitch,
                    struct kvs_rects *rects, struct kvs_copies *copies, struct kvs_error *err) {
  int status = KVS_OK;
  for (size_t s = 0; !status && s < stacks->count; s++) {
    const struct kvs_stack *stack = &stacks->items[s];
    const struct kvs_tensor *first = &tensors[stacks->order[stack->first]];
    bool store = direction == KVS_D2H;
    struct kvs_rect shape;
    if (stack->count > 1 &&
        kvs_rect_make(&shape, 0, 0, first->nbytes, stack->count, store ? stack->cpu_pitch : stack->gpu_pitch,
                      store ? stack->gpu_pitch : stack->cpu_pitch, max_pitch)) {
      status = kvs_rects_reserve(rects, rects->count + gpu_ids->count, err);
      if (!status) push_rects(first, &shape, gpu_ids, cpu_ids, direction, rects);
      rects->rows += stack->count * gpu_ids->count;
      continue;
    }
    for (size_t i = 0; !status && i < stack->count; i++)
      status =
          kvs_plan_cache(&tensors[stacks->order[stack->first + i]], 1, gpu_ids, cpu_ids, direction, true, copies, err);
  }
  return status;
}
