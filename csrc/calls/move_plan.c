/* The plan of a checked kvs_move_blocks(): copies, rects, or rows with pairs of slots. */
#include "calls/move.h"
#include "calls/shape.h"
#include "calls/swap.h"
#include "lanes/buffers.h"
#include "paths/choose.h"

bool kvs_move_rect(const struct move_call *call, const struct kvs_run *run, struct kvs_rect *rect) {
  return kvs_rect_make(rect, run->dst, run->src, run->row_nbytes, run->rows, run->dst_pitch, run->src_pitch,
                       call->engine->device->info.max_pitch);
}

/* -- copies ---------------------------------------------------------------------------------------------------- */

static uint32_t position_of(const struct move_call *call, size_t i) {
  return call->positions ? call->positions[i] : (uint32_t)i;
}

/* One row of each block; copies that are adjacent on both sides are merged. */
static int plan_row(const struct move_call *call, const struct kvs_pool_layout *src, const struct kvs_pool_layout *dst,
                    const struct kvs_run *run, uint64_t row, bool merge, struct kvs_copies *copies,
                    struct kvs_error *err) {
  uint64_t from = src->ptr + run->src + row * run->src_pitch, to = dst->ptr + run->dst + row * run->dst_pitch;
  bool packed = merge && src->stride == run->row_nbytes && dst->stride == run->row_nbytes;
  int status = kvs_copies_reserve(copies, copies->count + call->count, err);
  if (status) return status;
  for (size_t i = 0, n; i < call->count; i += n) {
    for (n = 1; packed && i + n < call->count; n++)
      if (call->src[i + n] != call->src[i] + (int64_t)n || call->dst[i + n] != call->dst[i] + (int64_t)n ||
          position_of(call, i + n) != position_of(call, i) + n)
        break;
    kvs_copies_push(copies, to + (uint64_t)call->dst[i] * dst->stride, from + (uint64_t)call->src[i] * src->stride,
                    n * run->row_nbytes, position_of(call, i));
  }
  return KVS_OK;
}

static int plan_rects(const struct move_call *call, const struct kvs_pool_layout *src,
                      const struct kvs_pool_layout *dst, const struct kvs_run *run, struct kvs_rects *rects,
                      struct kvs_error *err) {
  int status = kvs_rects_reserve(rects, rects->count + call->count, err);
  if (status) return status;
  struct kvs_rect shape;
  if (!kvs_move_rect(call, run, &shape)) return kvs_fail(err, KVS_INTERNAL, "a run that was said to be strided is not");
  for (size_t i = 0; i < call->count; i++) {
    struct kvs_rect *rect = &rects->items[rects->count];
    *rect = shape;
    rect->dst += dst->ptr + (uint64_t)call->dst[i] * dst->stride;
    rect->src += src->ptr + (uint64_t)call->src[i] * src->stride;
    rects->block[rects->count++] = position_of(call, i);
  }
  rects->rows += run->rows * call->count;
  return KVS_OK;
}

/* The runs of a part and its two pools. */
struct part_runs {
  const struct kvs_pool_layout *src, *dst;
  const struct kvs_run *first, *end;
};

static struct part_runs runs_of(const struct move_call *call, size_t index) {
  const struct planned_part *planned = &call->room->parts[index];
  const struct kvs_run *runs = call->room->runs.items;
  return (struct part_runs){.src = &call->move->src[planned->part.pair]->layout,
                            .dst = &call->move->dst[planned->part.pair]->layout,
                            .first = runs + (index ? planned[-1].runs_end : 0),
                            .end = runs + planned->runs_end};
}

static int plan_part(const struct move_call *call, size_t index, bool merge, struct kvs_rects *rects,
                     struct kvs_copies *copies, struct kvs_error *err) {
  struct part_runs part = runs_of(call, index);
  int status = KVS_OK;
  for (const struct kvs_run *run = part.first; !status && run < part.end; run++) {
    if (rects && call->room->parts[index].strided && run->rows > 1)
      status = plan_rects(call, part.src, part.dst, run, rects, err);
    else
      for (uint64_t row = 0; !status && row < run->rows; row++)
        status = plan_row(call, part.src, part.dst, run, row, merge, copies, err);
  }
  return status;
}

static bool ends_layer(const struct move_call *call, size_t part) {
  const struct planned_part *parts = call->room->parts;
  return part + 1 == call->nparts || parts[part + 1].part.layer != parts[part].part.layer;
}

int kvs_move_plan(const void *arg, enum kvs_form form, struct kvs_scratch *scratch, struct kvs_error *err) {
  const struct move_call *call = arg;
  bool merge = form != KVS_FORM_SINGLE, split = merge && kvs_may_cross_seams(&scratch->regions);
  struct kvs_copies *copies = merge ? &scratch->copies : &scratch->single;
  struct kvs_rects *rects = form == KVS_FORM_RECTS ? &scratch->rects : NULL;
  int status = KVS_OK;
  copies->count = 0;
  if (merge) scratch->rects.count = 0, scratch->rects.rows = 0;
  for (size_t i = 0; !status && i < call->nparts; i++) {
    size_t from = copies->count;
    status = plan_part(call, i, merge, rects, copies, err);
    if (!status && split) status = kvs_plan_split(copies, from, &scratch->regions, err);
    if (!status && merge && call->layered && ends_layer(call, i))
      status = kvs_scratch_mark(scratch, call->room->parts[i].part.layer, false, err);
  }
  return status;
}

/* Count what rects could carry. */
static void find_rects(const struct move_call *call, enum kvs_direction direction, struct kvs_shape *shape) {
  for (size_t i = 0; i < call->nparts; i++) {
    struct part_runs part = runs_of(call, i);
    for (const struct kvs_run *run = part.first; run < part.end; run++)
      if (call->room->parts[i].strided && run->rows > 1)
        kvs_shape_add_rects(shape, call->count, run->rows, run->row_nbytes,
                            direction == KVS_D2H ? run->dst_pitch : run->src_pitch);
      else
        shape->rest_copies += run->rows * call->count;
  }
}

static int list_part(const struct move_call *call, size_t index, struct kvs_rows *rows, struct kvs_error *err) {
  struct part_runs part = runs_of(call, index);
  int status = KVS_OK;
  for (const struct kvs_run *run = part.first; !status && run < part.end; run++) {
    status = kvs_rows_reserve(rows, rows->count + run->rows, err);
    for (uint64_t row = 0; !status && row < run->rows; row++)
      kvs_rows_push(rows, &(struct kvs_row){.src = part.src->ptr + run->src + row * run->src_pitch,
                                            .dst = part.dst->ptr + run->dst + row * run->dst_pitch,
                                            .src_stride = part.src->stride,
                                            .dst_stride = part.dst->stride,
                                            .nbytes = run->row_nbytes});
  }
  return status;
}

static int list_rows(const struct move_call *call, struct kvs_scratch *scratch, struct kvs_error *err) {
  int status = KVS_OK;
  for (size_t i = 0; !status && i < call->nparts; i++) {
    status = list_part(call, i, &scratch->rows, err);
    if (!status && call->layered && ends_layer(call, i))
      status = kvs_scratch_mark(scratch, call->room->parts[i].part.layer, true, err);
  }
  return status;
}

/* Kernels take 32-bit slots. */
static uint64_t most_slots(const struct move_call *call) {
  uint64_t most = 0;
  for (size_t i = 0; i < call->move->npairs; i++) {
    uint64_t src = call->move->src[i]->layout.num_blocks, dst = call->move->dst[i]->layout.num_blocks;
    if (src > most) most = src;
    if (dst > most) most = dst;
  }
  return most;
}

int kvs_move_find_shape(const struct move_call *call, struct kvs_work *work, const struct kvs_options *options,
                        struct kvs_error *err) {
  if (call->rows) find_rects(call, work->direction, &work->shape);
  if (!kvs_wants_rows(call->engine, options, work->entries)) return KVS_OK;
  work->grid = most_slots(call) <= UINT32_MAX;
  int status = list_rows(call, work->scratch, err);
  if (!status) kvs_find_shape(work, most_slots(call));
  return status;
}
