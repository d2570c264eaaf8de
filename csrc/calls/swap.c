/* kvs_swap_batch() and kvs_swap_cache(): check everything, plan, submit. */
#include <inttypes.h>
#include <string.h>

#include "base/span.h"
#include "calls/shape.h"
#include "calls/swap.h"
#include "lanes/buffers.h"
#include "lanes/registry.h"
#include "lanes/state.h"
#include "memory/cover.h"
#include "memory/watch.h"
#include "paths/choose.h"
#include "paths/submit.h"
#include "plan/overlap.h"

int kvs_check_layer_options(const struct kvs_options *options, size_t nlayers, struct kvs_error *err) {
  if (!options->nafter_layers || options->nafter_layers == nlayers) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "after_layers has %zu entries, but there are %zu layers: one a layer",
                  options->nafter_layers, nlayers);
}

bool kvs_wants_layers(const struct kvs_options *options) { return options->layer_events || options->nafter_layers; }

/* With two regions, each side has one and no copy crosses a seam. */
bool kvs_may_cross_seams(const struct kvs_regions *regions) {
  size_t seams = 0;
  for (size_t i = 0; i < regions->count; i++) seams += regions->items[i].seam;
  return regions->count > 2 && seams > 0;
}

/* Merged copies are fewer to check. On an overlap the list is rebuilt unmerged, to name the entries. */
static int check_disjoint(struct kvs_scratch *scratch, const struct kvs_plan_bounds *bounds,
                          const struct kvs_work *work, const char *entry, size_t ntensors, struct kvs_error *err) {
  struct kvs_plan_naming naming = {.entry = entry};
  int status = kvs_plan_check_disjoint(&scratch->copies, bounds, &naming, &scratch->plan, err);
  if (status != KVS_INVALID) return status;
  if (work->plan(work->call, KVS_FORM_SINGLE, scratch, err)) return err->status;
  naming.per_tensor = ntensors ? scratch->single.count / ntensors : 0;
  const struct kvs_plan_bounds single = kvs_plan_find_bounds(&scratch->single);
  (void)kvs_plan_check_disjoint(&scratch->single, &single, &naming, &scratch->plan, err);
  return err->status;
}

/* -- tensors and ids ------------------------------------------------------------------------------------------- */

static int plan_tensors(const struct kvs_cache_call *call, size_t from, size_t to, bool merge,
                        struct kvs_copies *copies, struct kvs_error *err) {
  return kvs_plan_cache(call->tensors + from, to - from, call->gpu_ids, call->cpu_ids, call->direction, merge, copies,
                        err);
}

/* Plan tensor by tensor and mark where each ends. */
static int plan_layers(const struct kvs_cache_call *call, struct kvs_scratch *scratch, struct kvs_error *err) {
  bool split = kvs_may_cross_seams(&scratch->regions);
  int status = KVS_OK;
  for (size_t t = 0; !status && t < call->ntensors; t++) {
    size_t from = scratch->copies.count;
    status = plan_tensors(call, t, t + 1, true, &scratch->copies, err);
    if (!status && split) status = kvs_plan_split(&scratch->copies, from, &scratch->regions, err);
    if (!status) status = kvs_scratch_mark(scratch, t, false, err);
  }
  return status;
}

int kvs_cache_plan(const void *arg, enum kvs_form form, struct kvs_scratch *scratch, struct kvs_error *err) {
  const struct kvs_cache_call *call = arg;
  if (form == KVS_FORM_SINGLE) return plan_tensors(call, 0, call->ntensors, false, &scratch->single, err);
  scratch->copies.count = scratch->rects.count = 0;
  scratch->rects.rows = 0;
  if (call->layered) return plan_layers(call, scratch, err);
  int status = form == KVS_FORM_RECTS
                   ? kvs_plan_stacks(call->tensors, &scratch->stacks, call->gpu_ids, call->cpu_ids, call->direction,
                                     call->max_pitch, &scratch->rects, &scratch->copies, err)
                   : plan_tensors(call, 0, call->ntensors, true, &scratch->copies, err);
  if (status || !kvs_may_cross_seams(&scratch->regions)) return status;
  return kvs_plan_split(&scratch->copies, 0, &scratch->regions, err);
}

/* Count what rects could carry, where tensors lie at equal distances. */
static int find_stacks(const struct kvs_cache_call *call, struct kvs_work *work, struct kvs_error *err) {
  struct kvs_stacks *stacks = &work->scratch->stacks;
  struct kvs_shape *shape = &work->shape;
  if (call->ntensors < 2 || call->layered) return KVS_OK;
  int status = kvs_stacks_find(call->tensors, call->ntensors, &work->scratch->regions, stacks, err);
  if (status || stacks->count == call->ntensors) return status;
  for (size_t i = 0; i < stacks->count; i++) {
    const struct kvs_stack *stack = &stacks->items[i];
    const struct kvs_tensor *first = &call->tensors[stacks->order[stack->first]];
    if (stack->count > 1)
      kvs_shape_add_rects(shape, call->gpu_ids->count, stack->count, first->nbytes, stack->cpu_pitch);
    else
      shape->rest_copies += call->gpu_ids->count;
  }
  return KVS_OK;
}

static int list_rows(const struct kvs_cache_call *call, struct kvs_work *work, struct kvs_error *err) {
  struct kvs_scratch *scratch = work->scratch;
  int status = kvs_rows_reserve(&scratch->rows, call->ntensors, err);
  for (size_t t = 0; !status && t < call->ntensors; t++) {
    const struct kvs_tensor *tensor = &call->tensors[t];
    uint64_t gpu_stride = kvs_stride_of(tensor->gpu_stride, tensor->nbytes);
    uint64_t cpu_stride = kvs_stride_of(tensor->cpu_stride, tensor->nbytes);
    bool store = call->direction == KVS_D2H;
    kvs_rows_push(&scratch->rows, &(struct kvs_row){.src = store ? tensor->gpu : tensor->cpu,
                                                    .dst = store ? tensor->cpu : tensor->gpu,
                                                    .src_stride = store ? gpu_stride : cpu_stride,
                                                    .dst_stride = store ? cpu_stride : gpu_stride,
                                                    .nbytes = tensor->nbytes});
    if (call->layered) status = kvs_scratch_mark(scratch, t, true, err);
  }
  return status;
}

/* Kernels take 32-bit slots. */
static bool slots_fit(const struct kvs_cache_call *call) {
  for (size_t t = 0; t < call->ntensors; t++)
    if (call->tensors[t].gpu_blocks > UINT32_MAX || call->tensors[t].cpu_blocks > UINT32_MAX) return false;
  return true;
}

static uint64_t cpu_slots(const struct kvs_cache_call *call) {
  uint64_t most = 0;
  for (size_t t = 0; t < call->ntensors; t++)
    if (call->tensors[t].cpu_blocks > most) most = call->tensors[t].cpu_blocks;
  return most;
}

static int look_up_tensors(struct kvs_engine *engine, struct kvs_scratch *scratch, const struct kvs_cache_call *call,
                           struct kvs_error *err) {
  bool load = call->direction == KVS_H2D;
  for (size_t t = 0; t < call->ntensors; t++) {
    const struct kvs_tensor *tensor = &call->tensors[t];
    bool one = call->ntensors == 1;
    size_t index = one ? SIZE_MAX : t;
    struct kvs_side gpu = {.name = one ? "gpu_ptr" : "gpu_ptrs", .index = index, .write = load, .want = KVS_SIDE_GPU};
    struct kvs_side cpu = {.name = one ? "cpu_ptr" : "cpu_ptrs", .index = index, .write = !load, .want = KVS_SIDE_CPU};
    uint64_t gpu_end = 0, cpu_end = 0;
    if (kvs_plan_extent(tensor->gpu, tensor->gpu_blocks, tensor->gpu_stride, tensor->nbytes, &gpu_end) ||
        kvs_plan_extent(tensor->cpu, tensor->cpu_blocks, tensor->cpu_stride, tensor->nbytes, &cpu_end))
      return kvs_fail(err, KVS_INTERNAL, "tensor %zu was not checked", t);
    int status = kvs_memory_cover(engine, scratch, tensor->gpu, gpu_end - tensor->gpu, &gpu, err);
    if (!status) status = kvs_memory_cover(engine, scratch, tensor->cpu, cpu_end - tensor->cpu, &cpu, err);
    if (status) return status;
  }
  return KVS_OK;
}

static int cover_tensors(struct kvs_engine *engine, struct kvs_scratch *scratch, const struct kvs_cache_call *call,
                         struct kvs_error *err) {
  if (kvs_memory_recall(engine, scratch, call)) return KVS_OK;
  uint64_t changes = kvs_memory_changes(engine); /* read before the lookup, so that a concurrent change is noticed */
  int status = look_up_tensors(engine, scratch, call, err);
  if (!status) kvs_memory_remember(scratch, call, changes);
  return status;
}

/* The shape of the transfer, for the planner. */
static int find_shape(struct kvs_engine *engine, struct kvs_work *work, const struct kvs_cache_call *call,
                      const struct kvs_options *options, struct kvs_error *err) {
  int status = KVS_OK;
  if (kvs_may_stride(engine, options, work->entries)) status = find_stacks(call, work, err);
  if (status || !kvs_wants_rows(engine, options, work->entries)) return status;
  work->grid = slots_fit(call);
  status = list_rows(call, work, err);
  if (!status) kvs_find_shape(work, cpu_slots(call));
  return status;
}

int kvs_cache_prepare(struct kvs_engine *engine, struct kvs_work *work, const struct kvs_cache_call *call,
                      const struct kvs_options *options, struct kvs_error *err) {
  int status = cover_tensors(engine, work->scratch, call, err);
  return status ? status : find_shape(engine, work, call, options, err);
}

int kvs_check_device_ids(struct kvs_engine *engine, struct kvs_scratch *scratch, const struct kvs_options *options,
                         const char *name, const char *other, size_t count, struct kvs_error *err) {
  const struct kvs_device_ids *ids = options->device_ids;
  struct kvs_side side = {.name = name, .index = SIZE_MAX, .want = KVS_SIDE_GPU};
  uint64_t low = ids->ptr, nbytes = ids->width;
  int status = KVS_CHECK_RESERVED(ids, "kvs_device_ids", err);
  if (status) return status;
  if (ids->width != 4 && ids->width != 8)
    return kvs_fail(err, KVS_INVALID, "%s has ids of %u bytes; on the device they have 4 or 8", name, ids->width);
  if (ids->count != count)
    return kvs_fail(err, KVS_INVALID, "%s has %zu entries and %s has %zu: they name pairs and must be equally long",
                    name, ids->count, other, count);
  if (ids->tokens > UINT32_MAX)
    return kvs_fail(err, KVS_INVALID, "%s has %" PRIu64 " tokens a block; the limit is %u", name, ids->tokens,
                    UINT32_MAX);
  if (ids->count == 0) return KVS_OK;
  int64_t step = ids->tokens > 1 ? ids->token_stride : 0;
  if (ids->ptr % ids->width || ids->stride % (int64_t)ids->width || step % (int64_t)ids->width)
    return kvs_fail(err, KVS_INVALID,
                    "%s lies at 0x%" PRIx64 " with a stride of %" PRId64
                    " bytes: ids of %u bytes are read at multiples "
                    "of their size",
                    name, ids->ptr, ids->stride % (int64_t)ids->width ? ids->stride : step, ids->width);
  if (!kvs_span_extend(&low, &nbytes, ids->stride, ids->count) ||
      !kvs_span_extend(&low, &nbytes, step, kvs_tokens_of(ids)))
    return kvs_fail(err, KVS_INVALID, "%s has a stride of %" PRId64 " bytes, beyond the address space", name,
                    ids->stride);
  return kvs_memory_cover(engine, scratch, low, nbytes, &side, err);
}

/* Ids on the device: what of them can be known. */
static int check_ids(struct kvs_engine *engine, struct kvs_work *work, const struct kvs_cache_call *call,
                     const struct kvs_options *options, bool disjoint, struct kvs_error *err) {
  if (!disjoint)
    return kvs_fail(err, KVS_INVALID,
                    "the memory of these tensors overlaps: whether a block is both read and written cannot be checked "
                    "with gpu_block_ids on the device; pass ids.cpu()");
  uint64_t least = UINT64_MAX;
  for (size_t t = 0; t < call->ntensors; t++)
    if (call->tensors[t].gpu_blocks < least) least = call->tensors[t].gpu_blocks;
  work->on_device = (struct kvs_ids_side){.ids = options->device_ids,
                                          .write = call->direction == KVS_H2D,
                                          .blocks = least,
                                          .tokens = kvs_tokens_of(options->device_ids),
                                          .name = "gpu_block_ids",
                                          .holder = "the GPU's side"};
  return kvs_check_device_ids(engine, work->scratch, options, "gpu_block_ids", "cpu_block_ids", call->cpu_ids->count,
                              err);
}

static int check_cache(struct kvs_engine *engine, struct kvs_work *work, struct kvs_cache_call *call,
                       const struct kvs_options *options, struct kvs_error *err) {
  struct kvs_scratch *scratch = work->scratch;
  bool disjoint;
  int status = kvs_plan_check_tensors(call->tensors, call->ntensors, call->direction, &scratch->plan, &disjoint, err);
  call->tensors = scratch->plan.checked[call->direction].items; /* the checked copy: the caller may change its own */
  if (!status)
    for (size_t t = 0; t < call->ntensors; t++) work->nbytes += call->tensors[t].nbytes * call->gpu_ids->count;
  if (!status) status = cover_tensors(engine, scratch, call, err); /* proves that the block counts fit the memory */
  const struct kvs_ids unknown = {.width = 8, .count = call->gpu_ids->count};
  if (!status)
    status = kvs_plan_check_ids(call->tensors, call->ntensors, options->device_ids ? &unknown : call->gpu_ids,
                                call->cpu_ids, call->direction, &scratch->plan, err);
  if (!status && options->device_ids)
    status = check_ids(engine, work, call, options, disjoint, err);
  else if (!status && !disjoint) {
    status = plan_tensors(call, 0, call->ntensors, true, &scratch->copies, err);
    const struct kvs_plan_bounds bounds = kvs_plan_find_bounds(&scratch->copies);
    if (!status) status = check_disjoint(scratch, &bounds, work, "block", call->ntensors, err);
    scratch->copies.count = 0;
  }
  return status ? status : find_shape(engine, work, call, options, err);
}

/* The caller's arrays are read once. Another thread that writes to them causes a wrong transfer, not a wrong address.
 */
static int copy_ids(struct kvs_scratch *scratch, const struct kvs_ids *gpu, const struct kvs_ids *cpu,
                    struct kvs_error *err) {
  int status = kvs_scratch_reserve_ids(scratch, gpu->count + cpu->count, err);
  if (status) return status;
  if (gpu->data) kvs_ids_copy(gpu, scratch->ids);
  for (size_t i = 0; !gpu->data && i < gpu->count; i++) scratch->ids[i] = (int64_t)i; /* positions of ids elsewhere */
  kvs_ids_copy(cpu, scratch->ids + gpu->count);
  return KVS_OK;
}

int kvs_swap_cache(struct kvs_engine *engine, const struct kvs_tensor *tensors, size_t ntensors,
                   const struct kvs_ids *gpu_ids, const struct kvs_ids *cpu_ids, enum kvs_direction direction,
                   const struct kvs_options *given, struct kvs_transfer **transfer, struct kvs_error *err) {
  struct kvs_ids gpu, cpu = *cpu_ids;
  struct kvs_options options;
  int status = kvs_open_for_work(engine, err);
  if (!status) status = kvs_options_resolve(engine, given, &options, err);
  if (status) return status;
  gpu = options.device_ids ? (struct kvs_ids){.width = 8, .count = options.device_ids->count} : *gpu_ids;
  struct kvs_cache_call call = {
      tensors, ntensors, &gpu, &cpu, direction, engine->device->info.max_pitch, kvs_wants_layers(&options)};
  if (direction != KVS_D2H && direction != KVS_H2D)
    return kvs_fail(err, KVS_INVALID, "direction is %d; 0 is D2H (offload) and 1 is H2D (onboard)", (int)direction);
  struct kvs_scratch *scratch = kvs_scratch_get(engine, err);
  if (!scratch) return KVS_NOMEM;
  struct kvs_work work = {.scratch = scratch,
                          .direction = direction,
                          .nblocks = gpu.count,
                          .entries = gpu.count * ntensors,
                          .plan = kvs_cache_plan,
                          .layered = call.layered,
                          .watch = kvs_watch_copies,
                          .call = &call,
                          .nlayers = ntensors};
  status = copy_ids(scratch, &gpu, &cpu, err);
  gpu = (struct kvs_ids){scratch->ids, 8, gpu.count};
  cpu = (struct kvs_ids){scratch->ids + gpu.count, 8, cpu.count};
  work.src_slots = scratch->ids + (direction == KVS_D2H ? 0 : gpu.count);
  work.dst_slots = scratch->ids + (direction == KVS_D2H ? gpu.count : 0);
  work.nslots = ntensors ? gpu.count : 0; /* without tensors nothing is to be moved */
  if (!status) status = kvs_check_layer_options(&options, ntensors, err);
  if (!status) status = check_cache(engine, &work, &call, &options, err);
  if (!status) status = kvs_submit(engine, &work, &options, transfer, err);
  kvs_scratch_put(engine, scratch);
  return status;
}

/* -- raw pointers ---------------------------------------------------------------------------------------------- */

struct batch_call {
  const uint64_t *src, *dst, *nbytes;
  bool one_size;
  size_t count;
};

static int list_copies(const struct batch_call *call, bool merge, struct kvs_copies *copies,
                       struct kvs_plan_bounds *bounds, struct kvs_error *err) {
  copies->count = 0;
  return kvs_plan_batch(call->src, call->dst, call->nbytes, call->one_size, call->count, merge, copies, bounds, err);
}

/* Like ids, the caller's lists are read once: every plan is made from the checked copy. */
static int copy_batch(struct kvs_scratch *scratch, struct batch_call *call, struct kvs_error *err) {
  size_t count = call->count, sizes = call->one_size && count ? 1 : count;
  if (count > UINT32_MAX)
    return kvs_fail(err, KVS_INVALID, "%zu copies in one call; the limit is %u", count, UINT32_MAX);
  int status = kvs_scratch_reserve_ids(scratch, 2 * count + sizes, err);
  if (status) return status;
  uint64_t *src = (uint64_t *)scratch->ids, *dst = src + count, *nbytes = dst + count;
  if (count) memcpy(src, call->src, count * sizeof *src);
  if (count) memcpy(dst, call->dst, count * sizeof *dst);
  if (sizes) memcpy(nbytes, call->nbytes, sizes * sizeof *nbytes);
  call->src = src;
  call->dst = dst;
  call->nbytes = nbytes;
  return KVS_OK;
}

static int plan_batch(const void *arg, enum kvs_form form, struct kvs_scratch *scratch, struct kvs_error *err) {
  struct kvs_plan_bounds unused;
  bool merge = form != KVS_FORM_SINGLE;
  return list_copies(arg, merge, merge ? &scratch->copies : &scratch->single, &unused, err);
}

/* Entries that are adjacent on the host, in the given order, form one run. */
static void find_batch_shape(struct kvs_work *work) {
  const struct kvs_copies *copies = &work->scratch->copies;
  const uint64_t *host = work->direction == KVS_D2H ? copies->dst : copies->src;
  uint64_t runs = 0, skewed = 0, nbytes = 0;
  for (size_t i = 0; i < copies->count; i++) {
    runs += i == 0 || host[i] != host[i - 1] + copies->nbytes[i - 1];
    if (host[i] % KVS_COST_LINE) skewed++, nbytes += copies->nbytes[i];
  }
  work->shape = (struct kvs_shape){.direction = work->direction,
                                   .nbytes = work->nbytes,
                                   .copies = copies->count,
                                   .pieces = copies->count,
                                   .skew_pieces = skewed,
                                   .skew_nbytes = nbytes,
                                   .rows = copies->count,
                                   .runs = runs};
}

/* The region that holds the entry, or its beginning (kvs_memory_cover() checks the rest). */
static int find_region(struct kvs_engine *engine, struct kvs_scratch *scratch, uint64_t address, uint64_t nbytes,
                       const struct kvs_side *side, struct kvs_region *region, struct kvs_error *err) {
  if (region->nbytes && kvs_region_holds(region, address) && region->nbytes - (address - region->base) >= nbytes)
    return KVS_OK;
  int status = kvs_memory_cover(engine, scratch, address, nbytes, side, err);
  if (!status) *region = *kvs_regions_find(&scratch->regions, address);
  return status;
}

const char *kvs_direction_text(enum kvs_direction direction) {
  static const char *const texts[] = {"device to host", "host to device", "within one kind of memory"};
  return texts[direction];
}

enum kvs_direction kvs_direction_of(const struct kvs_region *src, const struct kvs_region *dst) {
  bool src_device = src->memory == KVS_MEMORY_DEVICE, dst_device = dst->memory == KVS_MEMORY_DEVICE;
  bool src_host = src->memory == KVS_MEMORY_PINNED || src->memory == KVS_MEMORY_PAGEABLE;
  bool dst_host = dst->memory == KVS_MEMORY_PINNED || dst->memory == KVS_MEMORY_PAGEABLE;
  if ((src_device && !dst_device) || (dst_host && !src_host)) return KVS_D2H;
  if ((dst_device && !src_device) || (src_host && !dst_host)) return KVS_H2D;
  return KVS_OTHER_DIRECTION;
}

int kvs_direction_between(struct kvs_engine *engine, uint64_t src, uint64_t dst, enum kvs_direction *direction,
                          struct kvs_error *err) {
  struct kvs_region from, to;
  int status = kvs_dev_pointer_query(engine->device, src, &from, err);
  if (!status) status = kvs_dev_pointer_query(engine->device, dst, &to, err);
  if (!status) *direction = kvs_direction_of(&from, &to);
  return status;
}

static int cover_each(struct kvs_engine *engine, struct kvs_scratch *scratch, enum kvs_direction *direction,
                      struct kvs_error *err) {
  const struct kvs_copies *copies = &scratch->copies;
  struct kvs_region src = {.nbytes = 0}, dst = {.nbytes = 0};
  *direction = KVS_OTHER_DIRECTION;
  for (size_t i = 0; i < copies->count; i++) {
    uint64_t nbytes = copies->nbytes[i];
    struct kvs_side from = {.name = "src_ptrs", .index = copies->block[i]};
    struct kvs_side to = {.name = "dst_ptrs", .index = copies->block[i], .write = true};
    int status = find_region(engine, scratch, copies->src[i], nbytes, &from, &src, err);
    if (!status) status = find_region(engine, scratch, copies->dst[i], nbytes, &to, &dst, err);
    if (!status && !dst.writable) status = kvs_memory_cover(engine, scratch, copies->dst[i], nbytes, &to, err);
    if (status) return status;
    enum kvs_direction this = kvs_direction_of(&src, &dst);
    if (i == 0) *direction = this;
    if (this != *direction)
      return kvs_fail(err, KVS_INVALID, "copy %" PRIu32 " goes %s, copy 0 %s: one call moves one way", copies->block[i],
                      kvs_direction_text(this), kvs_direction_text(*direction));
  }
  return KVS_OK;
}

static bool within(const struct kvs_region *region, uint64_t low, uint64_t high) {
  return kvs_region_holds(region, low) && high - low <= region->nbytes - (low - region->base);
}

/* If all copies lie in the two regions of the first copy, one check covers all. */
static int cover_batch(struct kvs_engine *engine, struct kvs_scratch *scratch, const struct kvs_plan_bounds *bounds,
                       enum kvs_direction *direction, struct kvs_error *err) {
  struct kvs_copies *copies = &scratch->copies;
  size_t count = copies->count;
  if (count > 1) copies->count = 1;
  int status = cover_each(engine, scratch, direction, err);
  copies->count = count;
  if (status || count <= 1) return status;
  const struct kvs_region *src = kvs_regions_find(&scratch->regions, copies->src[0]);
  const struct kvs_region *dst = kvs_regions_find(&scratch->regions, copies->dst[0]);
  if (within(src, bounds->src_low, bounds->src_high) && within(dst, bounds->dst_low, bounds->dst_high)) return KVS_OK;
  return cover_each(engine, scratch, direction, err);
}

int kvs_swap_batch(struct kvs_engine *engine, const uint64_t *src, const uint64_t *dst, const uint64_t *nbytes,
                   bool one_size, size_t count, const struct kvs_options *given, struct kvs_transfer **transfer,
                   struct kvs_error *err) {
  struct batch_call call = {src, dst, nbytes, one_size, count};
  struct kvs_plan_bounds bounds;
  struct kvs_options options;
  int status = kvs_open_for_work(engine, err);
  if (!status) status = kvs_options_resolve(engine, given, &options, err);
  if (!status && options.device_ids)
    status = kvs_fail(err, KVS_INVALID, "a list of copies has no ids, and takes no device_ids");
  if (status) return status;
  struct kvs_scratch *scratch = kvs_scratch_get(engine, err);
  if (!scratch) return KVS_NOMEM;
  struct kvs_work work = {.scratch = scratch,
                          .nblocks = count,
                          .entries = count,
                          .plan = plan_batch,
                          .planned = true,
                          .watch = kvs_watch_copies,
                          .call = &call};
  status = kvs_check_layer_options(&options, 0, err);
  if (!status) status = copy_batch(scratch, &call, err);
  if (!status) status = list_copies(&call, true, &scratch->copies, &bounds, err);
  if (!status) status = cover_batch(engine, scratch, &bounds, &work.direction, err);
  if (status ==
      KVS_INVALID) { /* a merged run may cross the end of an allocation; unmerged, errors name the entry too */
    status = list_copies(&call, false, &scratch->copies, &bounds, err);
    if (!status) status = cover_batch(engine, scratch, &bounds, &work.direction, err);
  }
  if (!status) work.nbytes = bounds.total;
  if (!status) status = check_disjoint(scratch, &bounds, &work, "entry", 0, err);
  if (!status && kvs_may_cross_seams(&scratch->regions))
    status = kvs_plan_split(&scratch->copies, 0, &scratch->regions, err);
  if (!status) find_batch_shape(&work);
  if (!status) status = kvs_submit(engine, &work, &options, transfer, err);
  kvs_scratch_put(engine, scratch);
  return status;
}
