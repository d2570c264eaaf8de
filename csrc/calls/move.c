/* kvs_move_blocks(): transfers between pools. Everything runs under the engine's hazard_lock, so the tables do not
 * change between the check and the note of the transfer. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "calls/shape.h"
#include "calls/swap.h"
#include "device/share.h"
#include "lanes/buffers.h"
#include "lanes/failure.h"
#include "lanes/late.h"
#include "lanes/peer.h"
#include "lanes/registry.h"
#include "lanes/state.h"
#include "lanes/work.h"
#include "memory/cover.h"
#include "paths/choose.h"
#include "paths/submit.h"
#include "plan/layout.h"
#include "racecheck/racecheck.h"

struct move_call {
  const struct kvs_move *move;
  struct kvs_engine *engine, *other; /* the engines of the pools; other NULL: all pools are of one engine */
  struct kvs_move_scratch *room;
  size_t nparts, ntouches;
  bool rows;    /* rects may be used */
  bool codings; /* the blocks are coded or decoded */
  bool layered;
  const int64_t *all_src, *all_dst; /* slots as named by the caller */
  size_t all;
  const int64_t *src, *dst;  /* the slots to copy */
  const uint32_t *positions; /* their positions in the caller's lists; NULL: the same */
  size_t count;
  const struct kvs_device_ids *ids; /* in place of one list, whose slots are then positions; NULL: none */
  bool on_src;                      /* they name sources */
  struct kvs_late *late;            /* the transfer will be settled late; taken over once it is queued */
};

/* A run as a rect: false if the driver takes none of that pitch. */
static bool rect_of_run(const struct move_call *call, const struct kvs_run *run, struct kvs_rect *rect) {
  return kvs_rect_make(rect, run->dst, run->src, run->row_nbytes, run->rows, run->dst_pitch, run->src_pitch,
                       call->engine->device->info.max_pitch);
}

/* -- checks ---------------------------------------------------------------------------------------------------- */

static atomic_uint_fast64_t move_numbers;

/* The engine of src[0] runs the transfer; pools may belong to one other engine. */
static int check_engine(const struct kvs_engine *engine, const struct kvs_pool *pool, const char *side, size_t i,
                        struct kvs_engine **other, struct kvs_error *err) {
  if (pool->engine == engine || pool->engine == *other) return KVS_OK;
  if (*other || !kvs_dev_can_wait_for(engine->device, pool->engine->device))
    return kvs_fail(err, KVS_INVALID,
                    "%s[%zu] is a pool of %s, src[0] of %s%s%s: a transfer is within one device, or between two of a "
                    "kind",
                    side, i, pool->engine->name, engine->name, *other ? ", and there is one of " : "",
                    *other ? (*other)->name : "");
  *other = pool->engine;
  return KVS_OK;
}

/* Bytes of a block of `pool`, as parts count them: where only this pool is coded, those of the other one. */
static uint64_t nbytes_beside(const struct kvs_pool *pool, const struct kvs_pool *other) {
  const struct kvs_coding *coding = pool->layout.coding;
  return coding && !other->layout.coding ? coding->block_nbytes : pool->layout.block_nbytes;
}

/* The coding of a pair whose blocks are coded or decoded on the way; NULL: they move as they are. */
static const struct kvs_coding *coding_between(const struct kvs_pool *src, const struct kvs_pool *dst) {
  const struct kvs_coding *from = src->layout.coding, *to = dst->layout.coding;
  return from && to ? NULL : from ? from : to;
}

static int check_coding(const struct kvs_move *move, size_t i, struct kvs_error *err) {
  const struct kvs_pool *src = move->src[i], *dst = move->dst[i];
  const struct kvs_pool *raw = src->layout.coding ? dst : src, *coded = src->layout.coding ? src : dst;
  const struct kvs_coding *coding = coding_between(src, dst);
  if (!coding && src->layout.coding && !kvs_coding_is(src->layout.coding, dst->layout.coding))
    return kvs_fail(err, KVS_INVALID,
                    "src[%zu] (pool '%s') and dst[%zu] (pool '%s') are coded in two ways: coded blocks move between "
                    "pools that are coded alike",
                    i, src->name, i, dst->name);
  if (!coding == !coding_between(move->src[0], move->dst[0])) {
    if (!coding || kvs_layout_has_pages(&raw->layout, coding->page_nbytes)) return KVS_OK;
    return kvs_fail(err, KVS_INVALID,
                    "pool '%s' is coded in pages of %" PRIu64 " bytes, but a block of pool '%s' has %" PRIu64
                    " rows of %" PRIu64 " bytes: a page must lie in one row",
                    coded->name, coding->page_nbytes, raw->name, raw->layout.rows,
                    raw->layout.block_nbytes / raw->layout.rows);
  }
  return kvs_fail(err, KVS_INVALID,
                  "src[%zu] -> dst[%zu] is %scoded, src[0] -> dst[0] is %s: one call codes all its pairs, or none", i,
                  i, coding ? "" : "not ", coding ? "not" : "coded");
}

static int check_pools(const struct kvs_move *move, struct kvs_engine **other, struct kvs_error *err) {
  *other = NULL;
  if (move->npairs == 0) return kvs_fail(err, KVS_INVALID, "src has no pools");
  const struct kvs_engine *engine = move->src[0]->engine;
  for (size_t i = 0; i < move->npairs; i++) {
    const struct kvs_pool *src = move->src[i], *dst = move->dst[i];
    int status = check_engine(engine, src, "src", i, other, err);
    if (!status) status = check_engine(engine, dst, "dst", i, other, err);
    if (!status) status = check_coding(move, i, err);
    if (status) return status;
    if (!move->parts && nbytes_beside(src, dst) != nbytes_beside(dst, src))
      return kvs_fail(err, KVS_INVALID,
                      "src[%zu] has blocks of %" PRIu64 " bytes, dst[%zu] of %" PRIu64
                      ": name the parts that are to be moved",
                      i, nbytes_beside(src, dst), i, nbytes_beside(dst, src));
  }
  return KVS_OK;
}

/* The tables that the transfer reads and writes, each once. *shared: one table is both read and written. */
static int find_touches(struct move_call *call, const struct kvs_options *options, bool *shared,
                        struct kvs_error *err) {
  const struct kvs_move *move = call->move;
  bool src_whole = call->ids && call->on_src, dst_whole = call->ids && !call->on_src;
  bool by_caller = options->gpu_order == KVS_GPU_ORDER_STREAM;
  struct kvs_touch *touches = call->room->touches;
  uint64_t number = atomic_fetch_add(&move_numbers, 1) + 1;
  *shared = false;
  call->ntouches = 0;
  for (size_t i = 0; i < move->npairs; i++) {
    struct kvs_pool *dst = move->dst[i];
    if (dst->mark == number)
      return kvs_fail(err, KVS_INVALID, "dst[%zu] (pool '%s') is named twice: its blocks would be written twice", i,
                      dst->name);
    dst->mark = number;
    if (dst->table->write_mark != number && dst->engine == call->engine && !(dst_whole && by_caller))
      touches[call->ntouches++] = (struct kvs_touch){.table = dst->table, .write = true, .whole = dst_whole};
    dst->table->write_mark = number;
  }
  for (size_t i = 0; i < move->npairs; i++) {
    struct kvs_table *table = move->src[i]->table;
    if (table->write_mark == number) *shared = true;
    if (table->read_mark != number && move->src[i]->engine == call->engine && !(src_whole && by_caller))
      touches[call->ntouches++] = (struct kvs_touch){.table = table, .whole = src_whole};
    table->read_mark = number;
  }
  if (!call->ids || !*shared) return KVS_OK;
  return kvs_fail(err, KVS_INVALID,
                  "src and dst share slots: whether one is both read and written cannot be checked with %s on the "
                  "device; pass ids.cpu()",
                  call->on_src ? "src_ids" : "dst_ids");
}

/* Collect what to wait for on other engines. */
static int find_foreign(const struct move_call *call, struct kvs_error *err) {
  struct kvs_foreign_list *list = &call->room->foreign;
  int status = KVS_OK;
  for (size_t i = 0; !status && i < call->move->npairs; i++) {
    struct kvs_pool *src = call->move->src[i], *dst = call->move->dst[i];
    status = kvs_peer_collect(src, call->engine, list, err);
    if (!status) status = kvs_peer_collect(dst, call->engine, list, err);
    if (!status) status = kvs_peer_add_engine(src, call->engine, err);
    if (!status) status = kvs_peer_add_engine(dst, call->engine, err);
  }
  return status;
}

/* The list of slots, bounded by the smallest pool. */
static struct kvs_plan_slots slots_of(const int64_t *slots, size_t count, struct kvs_pool *const *pools, size_t npools,
                                      char text[KVS_POOL_TEXT]) {
  const struct kvs_pool *least = pools[0];
  for (size_t i = 1; i < npools; i++)
    if (pools[i]->layout.num_blocks < least->layout.num_blocks) least = pools[i];
  snprintf(text, KVS_POOL_TEXT, "pool '%s'", least->name);
  return (struct kvs_plan_slots){.ids = {slots, 8, count}, .blocks = least->layout.num_blocks, .pool = text};
}

/* Positions in place of slots that are not known. */
static void copy_slots(const struct kvs_ids *ids, bool known, int64_t *slots) {
  if (known) kvs_ids_copy(ids, slots);
  for (size_t i = 0; !known && i < ids->count; i++) slots[i] = (int64_t)i;
}

static int take_slots(struct move_call *call, bool shared, struct kvs_work *work, struct kvs_error *err) {
  const struct kvs_move *move = call->move;
  struct kvs_scratch *scratch = work->scratch;
  int64_t *src = call->room->slots, *dst = src + move->src_ids.count;
  bool src_known = !call->ids || !call->on_src, dst_known = !call->ids || call->on_src;
  copy_slots(&move->src_ids, src_known, src);
  copy_slots(&move->dst_ids, dst_known, dst);
  char src_text[KVS_POOL_TEXT], dst_text[KVS_POOL_TEXT];
  struct kvs_plan_slots from = slots_of(src, move->src_ids.count, move->src, move->npairs, src_text);
  struct kvs_plan_slots to = slots_of(dst, move->dst_ids.count, move->dst, move->npairs, dst_text);
  if (!src_known) from.ids.data = NULL;
  if (!dst_known) to.ids.data = NULL;
  if (call->ids) {
    snprintf(call->room->holder, sizeof call->room->holder, "%s", src_known ? to.pool : from.pool);
    work->on_device = (struct kvs_ids_side){.ids = call->ids,
                                            .write = src_known,
                                            .blocks = src_known ? to.blocks : from.blocks,
                                            .tokens = kvs_tokens_of(call->ids),
                                            .name = src_known ? "dst_ids" : "src_ids",
                                            .holder = call->room->holder};
  }
  call->all_src = call->src = src;
  call->all_dst = call->dst = dst;
  call->all = call->count = move->src_ids.count;
  return kvs_plan_check_slots(&from, &to, shared, &scratch->plan, err);
}

static int cover_pool(struct kvs_engine *engine, struct kvs_scratch *scratch, const struct kvs_pool *pool,
                      const char *name, size_t index, bool write, struct kvs_error *err) {
  struct kvs_side side = {.name = name, .index = index, .write = write};
  return kvs_pool_check_open(pool, err)
             ? err->status
             : kvs_memory_cover(engine, scratch, pool->layout.ptr, kvs_layout_extent(&pool->layout), &side, err);
}

static enum kvs_memory memory_of(const struct kvs_regions *regions, const struct kvs_pool *pool) {
  return kvs_regions_find(regions, pool->layout.ptr)->memory;
}

/* Kernels code between memory of the device and the host's, or within that of the device. */
static int check_coded_side(const struct move_call *call, const struct kvs_regions *regions, size_t i,
                            enum kvs_direction *direction, struct kvs_error *err) {
  const struct kvs_pool *src = call->move->src[i], *dst = call->move->dst[i];
  const struct kvs_pool *coded = src->layout.coding ? src : dst, *raw = src->layout.coding ? dst : src;
  if (!coding_between(src, dst) || (*direction == KVS_D2H && coded == dst) || (*direction == KVS_H2D && coded == src))
    return KVS_OK;
  enum kvs_memory memory = memory_of(regions, raw);
  bool near = memory != KVS_MEMORY_PINNED && memory != KVS_MEMORY_PAGEABLE;
  if (near && memory_of(regions, coded) == KVS_MEMORY_DEVICE && !call->other && !call->ids) {
    *direction = KVS_OTHER_DIRECTION;
    return KVS_OK;
  }
  return kvs_fail(err, KVS_UNSUPPORTED,
                  "src[%zu] -> dst[%zu] goes %s, and pool '%s' is coded: blocks are coded on the way from memory of "
                  "the device to a coded pool in host memory, and decoded on the way back, or within one device's "
                  "memory, with ids in host memory",
                  i, i, kvs_direction_text(*direction), coded->name);
}

static int cover_pools(const struct move_call *call, struct kvs_scratch *scratch, enum kvs_direction *direction,
                       struct kvs_error *err) {
  const struct kvs_move *move = call->move;
  for (size_t i = 0; i < move->npairs; i++) {
    int status = cover_pool(call->engine, scratch, move->src[i], "src", i, false, err);
    if (!status) status = cover_pool(call->engine, scratch, move->dst[i], "dst", i, true, err);
    if (status) return status;
    enum kvs_direction this = kvs_direction_of(kvs_regions_find(&scratch->regions, move->src[i]->layout.ptr),
                                               kvs_regions_find(&scratch->regions, move->dst[i]->layout.ptr));
    status = check_coded_side(call, &scratch->regions, i, &this, err);
    if (status) return status;
    if (i == 0) *direction = this;
    if (this != *direction)
      return kvs_fail(err, KVS_INVALID, "src[%zu] -> dst[%zu] goes %s, src[0] -> dst[0] %s: one call moves one way", i,
                      i, kvs_direction_text(this), kvs_direction_text(*direction));
  }
  return KVS_OK;
}

/* -- parts ----------------------------------------------------------------------------------------------------- */

static int check_part(const struct kvs_move *move, size_t i, struct kvs_error *err) {
  const struct kvs_part *part = &move->parts[i];
  const struct kvs_pool *src = move->src[part->pair], *dst = move->dst[part->pair];
  const struct kvs_coding *coding = coding_between(src, dst);
  uint64_t from = nbytes_beside(src, dst), to = nbytes_beside(dst, src);
  int status = kvs_layout_check_part(part, i, from < to ? from : to, err);
  if (status || !coding) return status;
  uint64_t page = coding->page_nbytes;
  if (part->offset % page == 0 && part->row_nbytes % page == 0 && (part->rows == 1 || part->row_pitch % page == 0))
    return KVS_OK;
  return kvs_fail(err, KVS_INVALID,
                  "parts[%zu] is %" PRIu64 " rows of %" PRIu64 " bytes, %" PRIu64 " apart from byte %" PRIu64
                  " on: pool '%s' is coded in pages of %" PRIu64 " bytes, and a part is whole pages",
                  i, part->rows, part->row_nbytes, part->row_pitch, part->offset,
                  src->layout.coding ? src->name : dst->name, page);
}

/* Parts of a pair are in ascending order of offset, so no byte is written twice. */
static int check_parts(const struct move_call *call, struct kvs_error *err) {
  const struct kvs_move *move = call->move;
  uint32_t layer = 0;
  memset(call->room->next_byte, 0, move->npairs * sizeof *call->room->next_byte);
  for (size_t i = 0; i < move->nparts; i++) {
    const struct kvs_part *part = &move->parts[i];
    if (part->pair >= move->npairs)
      return kvs_fail(err, KVS_RANGE, "parts[%zu] is of pair %u; there are %zu pairs, from 0", i, part->pair,
                      move->npairs);
    if (part->layer != layer && (i == 0 || part->layer != layer + 1))
      return kvs_fail(err, KVS_INVALID, "parts[%zu] is of layer %u after layer %u: layers begin at 0 and rise by 1", i,
                      part->layer, layer);
    layer = part->layer;
    int status = check_part(move, i, err);
    if (status) return status;
    if (part->offset < call->room->next_byte[part->pair])
      return kvs_fail(err, KVS_INVALID,
                      "parts[%zu] begins at byte %" PRIu64
                      " of a block of pair %u, but an earlier part ends at %" PRIu64,
                      i, part->offset, part->pair, call->room->next_byte[part->pair]);
    call->room->next_byte[part->pair] = kvs_part_end(part);
  }
  return KVS_OK;
}

static bool in_one_region(const struct kvs_regions *regions, const struct kvs_pool_layout *layout) {
  const struct kvs_region *region = kvs_regions_find(regions, layout->ptr);
  return kvs_layout_extent(layout) <= region->nbytes - (layout->ptr - region->base);
}

static struct kvs_part part_at(const struct move_call *call, size_t i) {
  if (call->move->parts) return call->move->parts[i];
  return (struct kvs_part){.pair = (uint32_t)i,
                           .layer = (uint32_t)i,
                           .rows = 1,
                           .row_nbytes = nbytes_beside(call->move->src[i], call->move->dst[i])};
}

/* So many bytes of whole pages, as they are in `pool`. */
static uint64_t bytes_in(const struct kvs_pool *pool, const struct kvs_pool *other, uint64_t nbytes) {
  const struct kvs_coding *coding = pool->layout.coding;
  return coding && !other->layout.coding ? nbytes / coding->page_nbytes * coding->coded_page_nbytes : nbytes;
}

/* A rect must lie within one region on each side, and the driver must accept its pitch. */
static bool may_stride(const struct move_call *call, const struct kvs_scratch *scratch, const struct kvs_part *part,
                       size_t from) {
  struct kvs_rect rect;
  const struct kvs_run_list *runs = &call->room->runs;
  if (!call->rows) return false;
  for (size_t r = from; r < runs->count; r++)
    if (!rect_of_run(call, &runs->items[r], &rect)) return false;
  return in_one_region(&scratch->regions, &call->move->src[part->pair]->layout) &&
         in_one_region(&scratch->regions, &call->move->dst[part->pair]->layout);
}

static int plan_parts(struct move_call *call, const struct kvs_scratch *scratch, struct kvs_work *work,
                      struct kvs_error *err) {
  struct kvs_run_list *runs = &call->room->runs;
  memset(call->room->covered, 0, call->move->npairs * sizeof *call->room->covered);
  for (size_t i = 0; i < call->nparts; i++) {
    struct kvs_part part = part_at(call, i);
    size_t from = runs->count;
    const struct kvs_pool *src = call->move->src[part.pair], *dst = call->move->dst[part.pair];
    int status = call->codings ? KVS_OK : kvs_layout_runs(&part, &src->layout, &dst->layout, runs, err);
    if (status) return status;
    call->room->parts[i] = (struct planned_part){part, runs->count, may_stride(call, scratch, &part, from)};
    call->room->covered[part.pair] += bytes_in(dst, src, part.rows * part.row_nbytes);
    work->nbytes += part.rows * part.row_nbytes;
    if (call->codings)
      work->coded_nbytes +=
          part.rows * bytes_in(src->layout.coding ? src : dst, src->layout.coding ? dst : src, part.row_nbytes);
  }
  return KVS_OK;
}

/* -- the plan: copies, rects, or rows with pairs of slots ---------------------------------------------------------- */

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
  if (!rect_of_run(call, run, &shape)) return kvs_fail(err, KVS_INTERNAL, "a run that was said to be strided is not");
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

static int plan_move(const void *arg, enum kvs_form form, struct kvs_scratch *scratch, struct kvs_error *err) {
  const struct move_call *call = arg;
  bool merge = form != KVS_FORM_SINGLE, split = merge && kvs_may_cross_seams(&scratch->regions);
  struct kvs_copies *copies = merge ? &scratch->copies : &scratch->single;
  if (call->codings) return kvs_fail(err, KVS_INTERNAL, "copies were asked for of blocks that are coded");
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

/* The number of a coding among those of the call. Pools that are coded alike share one, and one launch. */
static size_t number_of(const struct move_call *call, const struct kvs_coding *coding, struct kvs_work *work) {
  size_t i = 0;
  while (i < work->ncodings && !kvs_coding_is(work->codings[i].coding, coding)) i++;
  if (i == work->ncodings) call->room->codings[work->ncodings++] = (struct kvs_row_coding){.coding = coding};
  return i;
}

/* A row a page. */
static int list_pages(const struct move_call *call, const struct kvs_part *part, struct kvs_work *work,
                      struct kvs_error *err) {
  const struct kvs_pool *src = call->move->src[part->pair], *dst = call->move->dst[part->pair];
  const struct kvs_coding *coding = coding_between(src, dst);
  struct kvs_rows *rows = &work->scratch->rows;
  uint64_t page = coding->page_nbytes, pages = part->row_nbytes / page;
  size_t number = number_of(call, coding, work);
  int status = kvs_rows_reserve(rows, rows->count + part->rows * pages, err);
  for (uint64_t i = 0; !status && i < part->rows * pages; i++) {
    uint64_t byte = part->offset + i / pages * part->row_pitch + i % pages * page;
    kvs_rows_push(rows,
                  &(struct kvs_row){.src = src->layout.ptr + kvs_layout_place(&src->layout, bytes_in(src, dst, byte)),
                                    .dst = dst->layout.ptr + kvs_layout_place(&dst->layout, bytes_in(dst, src, byte)),
                                    .src_stride = src->layout.stride,
                                    .dst_stride = dst->layout.stride,
                                    .nbytes = page,
                                    .coded_nbytes = coding->coded_page_nbytes,
                                    .coding = number});
  }
  return status;
}

static int list_rows(const struct move_call *call, struct kvs_work *work, struct kvs_error *err) {
  struct kvs_scratch *scratch = work->scratch;
  int status = KVS_OK;
  for (size_t i = 0; !status && i < call->nparts; i++) {
    status = call->codings ? list_pages(call, &call->room->parts[i].part, work, err)
                           : list_part(call, i, &scratch->rows, err);
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

static int find_shape(const struct move_call *call, struct kvs_work *work, const struct kvs_options *options,
                      struct kvs_error *err) {
  if (call->rows) find_rects(call, work->direction, &work->shape);
  if (!call->codings && !kvs_wants_rows(call->engine, options, work->entries)) return KVS_OK;
  work->grid = most_slots(call) <= UINT32_MAX;
  int status = list_rows(call, work, err);
  if (!status) kvs_find_shape(work, most_slots(call));
  return status;
}

/* -- failures are passed on ---------------------------------------------------------------------------------------- */

static struct kvs_settlement settlement_of(const struct move_call *call) {
  return (struct kvs_settlement){.src = call->move->src,
                                 .dst = call->move->dst,
                                 .covered = call->room->covered,
                                 .npairs = call->move->npairs,
                                 .src_slots = call->all_src,
                                 .dst_slots = call->all_dst,
                                 .count = call->all};
}

/* A block that is written in part also depends on the undecided transfers that write the rest. */
static void depend_on_the_rest(const struct move_call *call, struct kvs_work *work) {
  const struct kvs_settlement settlement = settlement_of(call);
  for (size_t i = 0; i < call->move->npairs; i++) {
    struct kvs_pool *dst = call->move->dst[i];
    bool part = kvs_failures_any(&dst->failures) && !kvs_settlement_whole(&settlement, i);
    for (size_t b = 0; part && dst->failures.count && b < call->all; b++) {
      const struct kvs_failure *failure = kvs_failures_get(&dst->failures, (uint64_t)call->all_dst[b]);
      if (kvs_failure_verdict(failure) == KVS_SLOT_OPEN) work->dependencies |= failure->dependencies;
    }
  }
}

/* Drop the blocks whose source is lost, and note them in `work`. */
static void leave_out_lost(struct move_call *call, struct kvs_work *work) {
  const struct kvs_settlement settlement = settlement_of(call);
  int64_t *src = call->room->slots + 2 * call->all, *dst = src + call->all;
  uint32_t *kept = call->room->positions, *lost = kept + call->all; /* kept grows from the front, lost from the back */
  const struct kvs_pool *pool;
  size_t n = 0, failures = 0;
  for (size_t i = 0; i < call->move->npairs; i++) failures += kvs_failures_any(&call->move->src[i]->failures);
  if (!failures) return;
  for (size_t i = 0; i < call->all; i++) {
    const struct kvs_failure *failure = kvs_settlement_lost(&settlement, call->all_src[i], &pool, &work->dependencies);
    if (!failure) {
      src[n] = call->all_src[i];
      dst[n] = call->all_dst[i];
      kept[n++] = (uint32_t)i;
      continue;
    }
    if (!work->nlost++) kvs_settlement_lost_error(&work->lost_error, i, call->all_src[i], pool, failure);
    *--lost = (uint32_t)i;
  }
  work->lost = lost;
  call->src = src;
  call->dst = dst;
  call->positions = kept;
  call->count = n;
}

/* What failures of earlier transfers mean for this one. Where they, or the slots of this one, are not known yet, that
 * is found when it ends. Then no block is left out. A block that is left out waits for nothing, so this transfer could
 * end before an earlier one that writes the same slot. The earlier one would be settled last, and the slot, which is
 * lost, would count as good. */
static int follow_failures(struct move_call *call, struct kvs_work *work, struct kvs_error *err) {
  const struct kvs_move *move = call->move;
  const struct kvs_settlement settlement = settlement_of(call);
  bool late = call->on_src || call->codings;
  for (size_t i = 0; i < move->npairs; i++) late |= move->src[i]->late || move->dst[i]->late;
  if (!late) leave_out_lost(call, work);
  if (!late && !call->ids) {
    depend_on_the_rest(call, work);
    return KVS_OK;
  }
  if (call->other)
    return kvs_fail(err, KVS_UNSUPPORTED,
                    "a transfer whose ids are on the device, or whose blocks are coded, still uses one of these pools: "
                    "wait() for it before a transfer between two devices");
  for (size_t i = 0; i < move->npairs; i++) /* it may be of any slot */
    work->dependencies |=
        kvs_failures_dependencies(&move->src[i]->failures) | kvs_failures_dependencies(&move->dst[i]->failures);
  call->late = kvs_late_new(&settlement, call->nparts);
  return call->late ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory to follow a transfer of %zu blocks", call->all);
}

static void settle(const void *arg, const struct kvs_transfer *transfer) {
  const struct move_call *call = arg;
  const struct kvs_settlement settlement = settlement_of(call);
  if (call->late)
    kvs_late_add(call->late, (struct kvs_transfer *)transfer);
  else
    kvs_settle(&settlement, transfer, false);
}

/* -- the race checker ------------------------------------------------------------------------------------------ */

/* The slots of ids on the device are told once they are known. */
static void watch_side(const struct move_call *call, const struct kvs_transfer *transfer, const struct kvs_part *part,
                       bool write, const struct kvs_race_accessor *accessor) {
  const struct kvs_pool *pool = write ? call->move->dst[part->pair] : call->move->src[part->pair],
                        *other = write ? call->move->src[part->pair] : call->move->dst[part->pair];
  struct kvs_race_accessor side = *accessor;
  side.write = write;
  bool known = !call->ids || call->on_src == write;
  const struct kvs_race_access access = {.device = call->engine->device,
                                         .stream = transfer->lane->stream,
                                         .pool = pool->number,
                                         .slots = pool->layout.num_blocks,
                                         .pool_name = pool->name,
                                         .ids = !known  ? NULL
                                                : write ? call->dst
                                                        : call->src,
                                         .count = known ? call->count : 0,
                                         .write = write,
                                         .begin = bytes_in(pool, other, part->offset),
                                         .end = bytes_in(pool, other, kvs_part_end(part)),
                                         .accessor = &side};
  if (known)
    kvs_racecheck_access(&access);
  else
    kvs_late_reserve(call->late, &access);
}

static void watch_move(const void *arg, const struct kvs_transfer *transfer, size_t layer,
                       const struct kvs_copies *copies, const struct kvs_rects *rects,
                       const struct kvs_race_accessor *accessor) {
  const struct move_call *call = arg;
  (void)copies, (void)rects; /* parts name blocks directly */
  for (size_t i = 0; i < call->nparts; i++) {
    const struct kvs_part *part = &call->room->parts[i].part;
    if (layer != SIZE_MAX && part->layer != layer) continue;
    watch_side(call, transfer, part, false, accessor);
    watch_side(call, transfer, part, true, accessor);
  }
}

/* -- the call -------------------------------------------------------------------------------------------------- */

static const struct kvs_pool *coded_pool(const struct kvs_move *move) {
  return move->src[0]->layout.coding ? move->src[0] : move->dst[0];
}

static uint64_t count_entries(const struct move_call *call) {
  uint64_t entries = 0;
  for (size_t i = 0, r = 0; i < call->nparts; i++)
    for (; r < call->room->parts[i].runs_end; r++)
      entries += call->room->parts[i].strided ? call->count : call->count * call->room->runs.items[r].rows;
  return entries;
}

/* The list on the device is that of the GPU's side. */
static int check_ids(const struct move_call *call, struct kvs_scratch *scratch, const struct kvs_options *options,
                     enum kvs_direction direction, struct kvs_error *err) {
  const char *name = call->on_src ? "src_ids" : "dst_ids";
  if (call->other)
    return kvs_fail(err, KVS_UNSUPPORTED,
                    "%s is on the device: between two devices ids must be in host memory, ids.cpu()", name);
  if (direction == (call->on_src ? KVS_H2D : KVS_D2H))
    return kvs_fail(err, KVS_INVALID,
                    "%s is on the device, but the transfer goes %s: only ids of the GPU's side may be on the device",
                    name, kvs_direction_text(direction));
  return kvs_check_device_ids(call->engine, scratch, options, name, call->on_src ? "dst_ids" : "src_ids",
                              call->on_src ? call->move->dst_ids.count : call->move->src_ids.count, err);
}

static int check_and_plan(struct move_call *call, struct kvs_work *work, const struct kvs_options *options,
                          struct kvs_error *err) {
  struct kvs_scratch *scratch = work->scratch;
  bool shared;
  call->rows = !call->codings && kvs_may_stride(call->engine, options, UINT64_MAX);
  int status = find_touches(call, options, &shared, err);
  if (!status) status = find_foreign(call, err);
  if (!status) status = take_slots(call, shared, work, err);
  if (!status) status = cover_pools(call, scratch, &work->direction, err);
  if (!status && call->ids) status = check_ids(call, scratch, options, work->direction, err);
  if (!status && call->move->parts) status = check_parts(call, err);
  if (!status) status = plan_parts(call, scratch, work, err);
  if (status) return status;
  status = follow_failures(call, work, err);
  if (status) return status;
  work->nbytes *= call->all;
  work->coded_nbytes *= call->all;
  work->nblocks = call->all;
  work->entries = count_entries(call);
  work->nlayers = call->nparts ? call->room->parts[call->nparts - 1].part.layer + 1 : 0;
  work->src_slots = call->src;
  work->dst_slots = call->dst;
  work->nslots = call->count;
  work->touches = call->room->touches;
  work->ntouches = call->ntouches;
  work->foreign = &call->room->foreign;
  work->positions = call->positions;
  if (call->codings) work->codings = call->room->codings;
  if (call->codings) work->coded_pool = coded_pool(call->move)->name;
  if (call->codings) work->decode = call->move->src[0]->layout.coding != NULL;
  work->valid_nbytes = call->move->valid_nbytes ? call->move->valid_nbytes : UINT64_MAX;
  if (call->move->valid_nbytes && (!call->codings || work->decode))
    return kvs_fail(err, KVS_INVALID, "valid_nbytes is %" PRIu64 ", which is for blocks that are encoded",
                    call->move->valid_nbytes);
  status = kvs_check_layer_options(options, work->nlayers, err);
  return status ? status : find_shape(call, work, options, err);
}

static int move_locked(struct move_call *call, struct kvs_scratch *scratch, const struct kvs_options *options,
                       struct kvs_transfer **transfer, struct kvs_error *err) {
  struct kvs_work work = {.scratch = scratch,
                          .plan = plan_move,
                          .layered = call->layered,
                          .watch = watch_move,
                          .settle = settle,
                          .call = call};
  kvs_late_settle_locked(call->engine);
  if (call->other) kvs_late_settle_locked(call->other);
  int status = check_and_plan(call, &work, options, err);
  return status ? status : kvs_submit(call->engine, &work, options, transfer, err);
}

/* Ids on the device take the place of the list without data. */
static int place_ids(struct kvs_move *move, struct move_call *call, const struct kvs_options *options,
                     struct kvs_error *err) {
  call->ids = options->device_ids;
  if (!call->ids) return KVS_OK;
  call->on_src = !move->src_ids.data;
  if (!call->on_src && move->dst_ids.data)
    return kvs_fail(err, KVS_INVALID,
                    "device_ids is set, and both lists have data: the list that the ids stand for has none");
  *(call->on_src ? &move->src_ids : &move->dst_ids) = (struct kvs_ids){.width = 8, .count = call->ids->count};
  return KVS_OK;
}

int kvs_move_blocks(const struct kvs_move *asked, const struct kvs_options *given, struct kvs_transfer **transfer,
                    struct kvs_error *err) {
  struct kvs_engine *other;
  struct kvs_options options;
  struct kvs_move copy = *asked;
  const struct kvs_move *move = &copy;
  int status = check_pools(move, &other, err);
  if (!status) status = kvs_open_for_work(move->src[0]->engine, err);
  if (!status && other) status = kvs_open_for_work(other, err);
  if (!status) status = kvs_options_resolve(move->src[0]->engine, given, &options, err);
  if (status) return status;
  struct move_call call = {.move = move,
                           .engine = move->src[0]->engine,
                           .other = other,
                           .layered = kvs_wants_layers(&options),
                           .codings = coding_between(move->src[0], move->dst[0]) != NULL};
  status = place_ids(&copy, &call, &options, err);
  if (status) return status;
  struct kvs_scratch *scratch = kvs_scratch_get(call.engine, err);
  if (!scratch) return KVS_NOMEM;
  size_t most = move->src_ids.count > move->dst_ids.count ? move->src_ids.count : move->dst_ids.count;
  call.nparts = move->parts ? move->nparts : move->npairs;
  status = kvs_move_make_room(scratch, move->npairs, call.nparts, most, err);
  call.room = scratch->move;
  if (!status) {
    kvs_peer_lock(call.engine, call.other);
    status = move_locked(&call, scratch, &options, transfer, err);
    kvs_peer_unlock(call.engine, call.other);
  }
  if (call.late && status) kvs_late_free(call.late);
  kvs_scratch_put(call.engine, scratch);
  return status;
}
