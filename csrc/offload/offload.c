/* Opening an offload map: validation, copy groups and tables. See offload.h. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "lanes/buffers.h"
#include "lanes/failure.h"
#include "memory/cover.h"
#include "memory/pool.h"
#include "offload/offload.h"

static const uint64_t MOST_SLOTS = 1u << 31; /* of the host: kernels take 32-bit slot numbers, and plans a bitmap */

/* -- copy groups ----------------------------------------------------------------------------------------------- */

static uint64_t common(uint64_t a, uint64_t b) {
  while (b) {
    uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/* The numbering of a tensor's host slots. *unit: bytes from slot to slot. */
static struct kvs_copy_group count_slots(const struct kvs_offload *map, const struct kvs_offload_tensor *tensor,
                                         uint64_t *unit) {
  *unit = map->factor == 1 ? tensor->cpu_stride : common(tensor->cpu_stride, tensor->cpu_pitch);
  struct kvs_copy_group copies = {.chunk_slots = tensor->cpu_stride / *unit,
                                  .page_slots = map->factor == 1 ? 0 : tensor->cpu_pitch / *unit,
                                  .only = UINT64_MAX};
  if (copies.chunk_slots <= MOST_SLOTS / map->chunks) return copies;
  *unit = tensor->cpu_stride;
  return (struct kvs_copy_group){.chunk_slots = 1};
}

static struct kvs_copy_group *find_copy_group(struct kvs_offload *map, const struct kvs_copy_group *like) {
  for (size_t i = 0; i < map->ncopy_groups; i++) {
    struct kvs_copy_group *copies = &map->copy_groups[i];
    if (copies->group == like->group && copies->chunk_slots == like->chunk_slots &&
        copies->page_slots == like->page_slots && copies->only == like->only && copies->writers == like->writers &&
        copies->writer == like->writer)
      return copies;
  }
  struct kvs_copy_group *grown = realloc(map->copy_groups, (map->ncopy_groups + 1) * sizeof *grown);
  if (!grown) return NULL;
  map->copy_groups = grown;
  grown[map->ncopy_groups] = *like;
  return &grown[map->ncopy_groups++];
}

static int push_tensors(struct kvs_copy_group *copies, const struct kvs_tensor *first,
                        const struct kvs_offload_part *part, struct kvs_error *err) {
  struct kvs_tensor *grown = realloc(copies->tensors, (copies->ntensors + (size_t)part->count) * sizeof *grown);
  if (grown) copies->tensors = grown;
  uint32_t *sources = realloc(copies->sources, (copies->ntensors + (size_t)part->count) * sizeof *sources);
  if (sources) copies->sources = sources;
  if (!grown || !sources) return kvs_fail(err, KVS_NOMEM, "no memory for %" PRIu64 " fragments", part->count);
  for (uint64_t i = 0; i < part->count; i++) {
    struct kvs_tensor tensor = *first;
    tensor.gpu += i * part->gpu_pitch;
    tensor.cpu += i * part->cpu_pitch;
    sources[copies->ntensors] = part->tensor;
    grown[copies->ntensors++] = tensor;
  }
  return KVS_OK;
}

static int add_part(struct kvs_offload *map, const struct kvs_offload_part *part,
                    const struct kvs_offload_tensor *tensor, struct kvs_error *err) {
  uint64_t unit;
  struct kvs_copy_group like = count_slots(map, tensor, &unit);
  bool each = like.only != UINT64_MAX;
  int status = KVS_OK;
  like.group = part->group;
  like.writers = part->writers;
  like.writer = part->writer;
  for (uint64_t j = 0; !status && j < (each ? map->factor : 1); j++) {
    if (each) like.only = j;
    struct kvs_copy_group *copies = find_copy_group(map, &like);
    if (!copies) return kvs_fail(err, KVS_NOMEM, "no memory to plan offloading");
    struct kvs_tensor first = {.gpu = tensor->gpu + part->gpu_offset,
                               .cpu = tensor->cpu + j * tensor->cpu_pitch + part->cpu_offset,
                               .nbytes = part->nbytes,
                               .gpu_blocks = tensor->gpu_blocks,
                               .cpu_blocks = (map->chunks - 1) * like.chunk_slots + 1,
                               .gpu_stride = tensor->gpu_stride,
                               .cpu_stride = unit};
    if (!each) first.cpu_blocks += (map->factor - 1) * like.page_slots;
    status = push_tensors(copies, &first, part, err);
  }
  return status;
}

/* -- validation of a layout ------------------------------------------------------------------------------------ */

static int refuse_tensor(size_t i, const char *what, struct kvs_error *err) {
  return kvs_fail(err, KVS_INVALID, "tensor %zu: %s", i, what);
}

/* Bytes from a chunk's start to its end, including other tensors in between. */
static uint64_t chunk_span(const struct kvs_offload_layout *layout, const struct kvs_offload_tensor *tensor) {
  return (layout->factor - 1) * tensor->cpu_pitch + tensor->cpu_page;
}

static uint64_t cpu_span(const struct kvs_offload_layout *layout, const struct kvs_offload_tensor *tensor) {
  return (layout->chunks - 1) * tensor->cpu_stride + chunk_span(layout, tensor);
}

static int check_tensor(const struct kvs_offload_layout *layout, size_t i, struct kvs_error *err) {
  const struct kvs_offload_tensor *tensor = &layout->tensors[i];
  uint64_t end, chunk;
  if (!tensor->gpu || !tensor->cpu) return refuse_tensor(i, "its address is 0", err);
  if (!tensor->gpu_blocks || !tensor->gpu_page || !tensor->cpu_page)
    return refuse_tensor(i, "it has no blocks, or blocks without bytes", err);
  if (layout->factor > 1 && tensor->cpu_page > tensor->cpu_pitch)
    return refuse_tensor(i, "the blocks of a chunk are nearer to each other on the host than they are long", err);
  if (__builtin_mul_overflow(layout->factor - 1, tensor->cpu_pitch, &chunk) ||
      __builtin_add_overflow(chunk, tensor->cpu_page, &chunk) || chunk > tensor->cpu_stride)
    return refuse_tensor(i, "its chunks are nearer to each other on the host than they are long", err);
  if (tensor->gpu_page > tensor->gpu_stride)
    return refuse_tensor(i, "its blocks are nearer to each other on the GPU than they are long", err);
  if (kvs_plan_extent(tensor->gpu, tensor->gpu_blocks, tensor->gpu_stride, tensor->gpu_page, &end) ||
      kvs_plan_extent(tensor->cpu, layout->chunks, tensor->cpu_stride, chunk, &end))
    return refuse_tensor(i, "it goes beyond the end of the address space", err);
  return KVS_OK;
}

/* A tensor's bytes on one side: `width` bytes of each `stride`, and within the width `page` bytes of each `pitch`. */
struct extent {
  uint64_t begin, end, stride, width, pitch, page;
  size_t tensor;
};

static int by_begin(const void *a, const void *b) {
  uint64_t left = ((const struct extent *)a)->begin, right = ((const struct extent *)b)->begin;
  return (left > right) - (left < right);
}

/* Tensors may be interleaved if each keeps to its own part of a common stride, or if the two also have a common pitch
 * and each block of the second is between two blocks of the first. */
static bool apart(const struct extent *a, const struct extent *b) {
  if (b->begin >= a->end) return true;
  if (a->stride != b->stride) return false;
  uint64_t offset = (b->begin - a->begin) % a->stride;
  if (offset + b->width > a->stride) return false;
  return offset >= a->width || (a->pitch == b->pitch && offset >= a->page && offset + b->page <= a->pitch);
}

/* All tensors on the host. */
static size_t list_host(const struct kvs_offload_layout *layout, struct extent *extents) {
  for (size_t i = 0; i < layout->ntensors; i++) {
    const struct kvs_offload_tensor *t = &layout->tensors[i];
    extents[i] = (struct extent){.begin = t->cpu,
                                 .end = t->cpu + cpu_span(layout, t),
                                 .stride = t->cpu_stride,
                                 .width = chunk_span(layout, t),
                                 .pitch = layout->factor > 1 ? t->cpu_pitch : t->cpu_stride,
                                 .page = t->cpu_page,
                                 .tensor = i};
  }
  return layout->ntensors;
}

/* The tensors of a cache group on the GPU. Different groups may overlap, because a block belongs to one group at a
 * time. */
static size_t list_group(const struct kvs_offload_layout *layout, size_t group, struct extent *extents) {
  size_t n = 0;
  for (size_t i = 0; i < layout->nparts; i++) {
    size_t tensor = layout->parts[i].tensor, seen = 0;
    if (layout->parts[i].group != group) continue;
    while (seen < n && extents[seen].tensor != tensor) seen++;
    if (seen < n) continue;
    const struct kvs_offload_tensor *t = &layout->tensors[tensor];
    extents[n] = (struct extent){t->gpu, 0, t->gpu_stride, t->gpu_page, t->gpu_stride, t->gpu_page, tensor};
    (void)kvs_plan_extent(t->gpu, t->gpu_blocks, t->gpu_stride, t->gpu_page, &extents[n].end);
    n++;
  }
  return n;
}

static int check_apart(struct extent *extents, size_t count, const char *where, struct kvs_error *err) {
  qsort(extents, count, sizeof *extents, by_begin);
  for (size_t i = 0; i < count; i++)
    for (size_t k = i + 1; k < count && extents[k].begin < extents[i].end; k++)
      if (!apart(&extents[i], &extents[k]))
        return kvs_fail(err, KVS_INVALID, "tensors %zu and %zu share bytes %s: their blocks cannot be told apart",
                        extents[i].tensor, extents[k].tensor, where);
  return KVS_OK;
}

static int check_memory(struct kvs_engine *engine, const struct kvs_offload_layout *layout, struct kvs_error *err) {
  struct kvs_scratch *scratch = kvs_scratch_get(engine, err);
  int status = scratch ? KVS_OK : KVS_NOMEM;
  for (size_t i = 0; !status && i < layout->ntensors; i++) {
    const struct kvs_offload_tensor *t = &layout->tensors[i];
    struct kvs_side gpu = {.name = "gpu_tensors", .index = i, .write = true, .want = KVS_SIDE_GPU};
    struct kvs_side cpu = {.name = "cpu_tensors", .index = i, .write = true, .want = KVS_SIDE_CPU};
    uint64_t gpu_nbytes = (t->gpu_blocks - 1) * t->gpu_stride + t->gpu_page;
    status = kvs_memory_cover(engine, scratch, t->gpu, gpu_nbytes, &gpu, err);
    if (!status) status = kvs_memory_cover(engine, scratch, t->cpu, cpu_span(layout, t), &cpu, err);
  }
  if (scratch) kvs_scratch_put(engine, scratch);
  return status;
}

static bool fits(uint64_t offset, const struct kvs_offload_part *part, uint64_t pitch, uint64_t page) {
  uint64_t end;
  if (part->count > 1 && pitch < part->nbytes) return false;
  return !__builtin_mul_overflow(part->count - 1, pitch, &end) && !__builtin_add_overflow(end, offset, &end) &&
         !__builtin_add_overflow(end, part->nbytes, &end) && end <= page;
}

static int check_part(const struct kvs_offload_layout *layout, size_t i, struct kvs_error *err) {
  const struct kvs_offload_part *part = &layout->parts[i];
  if (part->group >= layout->ngroups || part->tensor >= layout->ntensors)
    return kvs_fail(err, KVS_RANGE, "part %zu is of group %u and tensor %u; there are %zu and %zu, from 0", i,
                    part->group, part->tensor, layout->ngroups, layout->ntensors);
  const struct kvs_offload_tensor *tensor = &layout->tensors[part->tensor];
  if (part->nbytes == 0 || part->count == 0 || part->writers == 0 || part->writer >= part->writers)
    return kvs_fail(err, KVS_INVALID,
                    "part %zu: %" PRIu64 " fragments of %" PRIu64 " bytes, writer %" PRIu64 " of %" PRIu64, i,
                    part->count, part->nbytes, part->writer, part->writers);
  if (!fits(part->gpu_offset, part, part->gpu_pitch, tensor->gpu_page) ||
      !fits(part->cpu_offset, part, part->cpu_pitch, tensor->cpu_page))
    return kvs_fail(err, KVS_INVALID,
                    "part %zu does not fit a block of tensor %u (%" PRIu64 " bytes on the GPU, %" PRIu64
                    " on the host), or its fragments overlap",
                    i, part->tensor, tensor->gpu_page, tensor->cpu_page);
  return KVS_OK;
}

static int check_layout(struct kvs_engine *engine, const struct kvs_offload_layout *layout, struct kvs_error *err) {
  uint64_t blocks;
  if (!layout->ntensors || !layout->ngroups || !layout->chunks || !layout->factor)
    return kvs_fail(err, KVS_INVALID,
                    "%zu tensors, %zu groups, %" PRIu64 " chunks of %" PRIu64
                    " blocks: there must be one of each at least",
                    layout->ntensors, layout->ngroups, layout->chunks, layout->factor);
  if (__builtin_mul_overflow(layout->chunks, layout->factor, &blocks) || blocks > UINT32_MAX)
    return kvs_fail(err, KVS_INVALID, "%" PRIu64 " chunks of %" PRIu64 " blocks are more than can be told apart",
                    layout->chunks, layout->factor);
  int status = KVS_OK;
  for (size_t i = 0; !status && i < layout->ntensors; i++) status = check_tensor(layout, i, err);
  for (size_t i = 0; !status && i < layout->nparts; i++) status = check_part(layout, i, err);
  struct extent *extents = status ? NULL : calloc(layout->ntensors, sizeof *extents);
  if (!status && !extents) status = kvs_fail(err, KVS_NOMEM, "no memory to check %zu tensors", layout->ntensors);
  if (!status) status = check_apart(extents, list_host(layout, extents), "on the host", err);
  for (size_t g = 0; !status && g < layout->ngroups; g++)
    status = check_apart(extents, list_group(layout, g, extents), "on the GPU", err);
  free(extents);
  return status ? status : check_memory(engine, layout, err);
}

/* A copy group must not write a byte twice. Its fragments are few: sort them by address and compare neighbours. */
static int check_copy_group(const struct kvs_copy_group *copies, struct extent *extents, struct kvs_error *err) {
  for (int side = 0; side < 2; side++) {
    for (size_t i = 0; i < copies->ntensors; i++) {
      const struct kvs_tensor *t = &copies->tensors[i];
      uint64_t begin = side ? t->cpu : t->gpu;
      extents[i] = (struct extent){.begin = begin, .end = begin + t->nbytes, .tensor = i};
    }
    qsort(extents, copies->ntensors, sizeof *extents, by_begin);
    for (size_t i = 1; i < copies->ntensors; i++)
      if (extents[i].begin < extents[i - 1].end)
        return kvs_fail(err, KVS_INVALID, "two parts of group %zu share bytes of a block on the %s", copies->group,
                        side ? "host" : "GPU");
  }
  return KVS_OK;
}

static int check_copy_groups(const struct kvs_offload *map, struct kvs_error *err) {
  size_t most = 1;
  int status = KVS_OK;
  for (size_t i = 0; i < map->ncopy_groups; i++)
    if (map->copy_groups[i].ntensors > most) most = map->copy_groups[i].ntensors;
  struct extent *extents = calloc(most, sizeof *extents);
  if (!extents) return kvs_fail(err, KVS_NOMEM, "no memory to check %zu fragments", most);
  for (size_t i = 0; !status && i < map->ncopy_groups; i++)
    status = check_copy_group(&map->copy_groups[i], extents, err);
  free(extents);
  return status;
}

/* -- opening and closing --------------------------------------------------------------------------------------- */

/* Groups that share tensors share the entries of the first such group. */
size_t kvs_offload_failures(const struct kvs_offload *map, size_t group) {
  size_t first = 0;
  while (first < group && !(map->shares[group] && map->shares[first])) first++;
  return first * (size_t)(map->chunks * map->factor);
}

static void map_free(struct kvs_offload *map) {
  kvs_failures_close(&map->failures);
  for (size_t i = 0; i < map->ncopy_groups; i++) {
    free(map->copy_groups[i].tensors);
    free(map->copy_groups[i].sources);
  }
  if (map->gpu) kvs_table_free(map->gpu);
  if (map->cpu) kvs_table_free(map->cpu);
  free(map->copy_groups);
  free(map->gpu_blocks);
  free(map->shares);
  free(map->room);
  free(map->group_sizes);
  free(map->foreign.items);
  if (map->unfinished) kvs_failure_unref(map->unfinished);
  if (map->owner) map->release(map->owner);
  free(map);
}

/* Drops one reference, of a transfer or of the map. The last reference frees the map. */
void kvs_offload_drop(void *arg) {
  struct kvs_offload *map = arg;
  if (atomic_fetch_sub(&map->refs, 1) == 1) map_free(map);
}

static int find_groups(struct kvs_offload *map, const struct kvs_offload_layout *layout, uint64_t *most,
                       struct kvs_error *err) {
  uint32_t *first = calloc(layout->ntensors, sizeof *first); /* index of the tensor's first group, + 1 */
  map->gpu_blocks = calloc(map->ngroups, sizeof *map->gpu_blocks);
  map->shares = calloc(map->ngroups, sizeof *map->shares);
  map->group_sizes = calloc(2 * map->ngroups, sizeof *map->group_sizes);
  map->block_indices = map->group_sizes + map->ngroups;
  if (!first || !map->gpu_blocks || !map->shares || !map->group_sizes) {
    free(first);
    return kvs_fail(err, KVS_NOMEM, "no memory for %zu groups", map->ngroups);
  }
  *most = 0;
  for (size_t i = 0; i < layout->ntensors; i++)
    if (layout->tensors[i].gpu_blocks > *most) *most = layout->tensors[i].gpu_blocks;
  for (size_t g = 0; g < map->ngroups; g++) map->gpu_blocks[g] = *most;
  for (size_t i = 0; i < layout->nparts; i++) {
    const struct kvs_offload_part *part = &layout->parts[i];
    uint64_t blocks = layout->tensors[part->tensor].gpu_blocks;
    if (blocks < map->gpu_blocks[part->group]) map->gpu_blocks[part->group] = blocks;
    if (!first[part->tensor]) first[part->tensor] = part->group + 1;
    if (first[part->tensor] != part->group + 1) map->shares[part->group] = map->shares[first[part->tensor] - 1] = true;
  }
  free(first);
  return KVS_OK;
}

static int make_tables(struct kvs_offload *map, const struct kvs_offload_layout *layout, uint64_t gpu_blocks,
                       struct kvs_error *err) {
  uint64_t blocks = map->chunks * map->factor;
  int status = kvs_table_new(gpu_blocks, &map->gpu, err);
  if (!status) status = kvs_table_new(blocks, &map->cpu, err);
  if (!status && layout->remember_failures) {
    struct kvs_error unfinished;
    kvs_fail(&unfinished, KVS_REFUSED, "its store was not queued in whole");
    uint64_t all;
    if (__builtin_mul_overflow(blocks, map->ngroups, &all)) all = UINT64_MAX;
    status = kvs_failures_open(&map->failures, all, err);
    if (!status && !(map->unfinished = kvs_failure_new(&unfinished, 0)))
      status = kvs_fail(err, KVS_NOMEM, "no memory to track %" PRIu64 " blocks", blocks);
  }
  pthread_mutex_lock(&map->engine->hazard_lock);
  for (size_t i = 0; !status && i < layout->ntensors; i++) {
    const struct kvs_offload_tensor *t = &layout->tensors[i];
    uint64_t gpu_end = t->gpu + (t->gpu_blocks - 1) * t->gpu_stride + t->gpu_page;
    uint64_t cpu_end = t->cpu + cpu_span(layout, t);
    status = kvs_table_inherit(map->engine, map->gpu, t->gpu, gpu_end, err);
    if (!status) status = kvs_table_inherit(map->engine, map->cpu, t->cpu, cpu_end, err);
    if (!status) status = kvs_peer_inherit_memory(map->engine, t->gpu, gpu_end, &map->foreign, err);
    if (!status) status = kvs_peer_inherit_memory(map->engine, t->cpu, cpu_end, &map->foreign, err);
  }
  pthread_mutex_unlock(&map->engine->hazard_lock);
  return status;
}

int kvs_offload_open(struct kvs_engine *engine, const struct kvs_offload_layout *layout, struct kvs_offload **opened,
                     struct kvs_error *err) {
  uint64_t gpu_blocks = 0;
  int status = kvs_dev_check(engine->device, err);
  if (!status) status = KVS_CHECK_RESERVED(layout, "kvs_offload_layout", err);
  if (!status) status = check_layout(engine, layout, err);
  if (status) return status;
  struct kvs_offload *map = calloc(1, sizeof *map);
  if (!map) return kvs_fail(err, KVS_NOMEM, "no memory to plan offloading");
  atomic_init(&map->refs, 1);
  map->engine = engine;
  map->chunks = layout->chunks;
  map->factor = layout->factor;
  map->ngroups = layout->ngroups;
  for (size_t i = 0; !status && i < layout->nparts; i++)
    status = add_part(map, &layout->parts[i], &layout->tensors[layout->parts[i].tensor], err);
  if (!status) status = check_copy_groups(map, err);
  if (!status) status = find_groups(map, layout, &gpu_blocks, err);
  if (!status) status = make_tables(map, layout, gpu_blocks, err);
  if (status) {
    map_free(map);
    return status;
  }
  map->owner = layout->owner;
  map->release = layout->release;
  kvs_engine_ref(engine);
  *opened = map;
  return KVS_OK;
}

void kvs_offload_close(struct kvs_offload *map) {
  struct kvs_engine *engine = map->engine;
  kvs_offload_drop(map);
  kvs_engine_unref(engine);
}

size_t kvs_offload_most(const struct kvs_offload *map) { return map->ncopy_groups ? map->ncopy_groups : 1; }

int kvs_offload_get_order(const struct kvs_offload *map, size_t i, struct kvs_offload_order *order,
                          struct kvs_error *err) {
  if (i >= map->ncopy_groups)
    return kvs_fail(err, KVS_RANGE, "copy group %zu; a job of this map has %zu", i, map->ncopy_groups);
  const struct kvs_copy_group *copies = &map->copy_groups[i];
  *order = (struct kvs_offload_order){.group = copies->group,
                                      .tensors = copies->sources,
                                      .nlayers = copies->ntensors,
                                      .every_block = copies->only == UINT64_MAX};
  return KVS_OK;
}
