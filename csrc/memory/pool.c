/* Pools: checked layouts in known memory, their hazard tables, and the failure records of their slots. */
#include "memory/pool.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "codecs/coding.h"
#include "lanes/buffers.h"
#include "lanes/failure.h"
#include "lanes/lane.h"
#include "lanes/late.h"
#include "lanes/peer.h"
#include "lanes/state.h"
#include "memory/cover.h"
#include "memory/vacate.h"
#include "memory/watch.h"
#include "plan/layout.h"
#include "racecheck/racecheck.h"

static atomic_uint_fast64_t pool_numbers;

/* -- tables ---------------------------------------------------------------------------------------------------- */

void kvs_table_free(struct kvs_table *table) {
  free(table->hazards.slots);
  free(table->inherited);
  free(table);
}

/* calloc of a large table takes no memory until slots are used. */
int kvs_table_new(uint64_t slots, struct kvs_table **made, struct kvs_error *err) {
  struct kvs_table *table = calloc(1, sizeof *table);
  if (table) {
    table->hazards.count = slots;
    table->hazards.slots = calloc(slots, sizeof *table->hazards.slots);
  }
  if (!table || !table->hazards.slots) {
    free(table);
    return kvs_fail(err, KVS_NOMEM, "no memory to track %" PRIu64 " blocks", slots);
  }
  *made = table;
  return KVS_OK;
}

/* -- opening and closing --------------------------------------------------------------------------------------- */

static int check_memory(struct kvs_engine *engine, const struct kvs_pool_layout *layout, struct kvs_error *err) {
  struct kvs_side side = {.name = "ptr", .index = SIZE_MAX};
  struct kvs_scratch *scratch = kvs_scratch_get(engine, err);
  if (!scratch) return KVS_NOMEM;
  int status = kvs_memory_cover(engine, scratch, layout->ptr, kvs_layout_extent(layout), &side, err);
  kvs_scratch_put(engine, scratch);
  return status;
}

static int check_group(const struct kvs_engine *engine, const struct kvs_pool_layout *layout, struct kvs_error *err) {
  const struct kvs_pool *group = layout->group;
  if (!group) return KVS_OK;
  if (group->engine != engine)
    return kvs_fail(err, KVS_INVALID, "group is a pool of %s, not of %s", group->engine->name, engine->name);
  if (group->layout.num_blocks != layout->num_blocks)
    return kvs_fail(err, KVS_INVALID, "group has %" PRIu64 " blocks, this pool %" PRIu64 ": a group shares its slots",
                    group->layout.num_blocks, layout->num_blocks);
  return KVS_OK;
}

static int check_alone_locked(const struct kvs_engine *engine, const struct kvs_pool_layout *layout,
                              struct kvs_error *err) {
  bool sure;
  for (const struct kvs_pool *other = engine->pools; other; other = other->next)
    if (!atomic_load(&other->closed) && kvs_layouts_overlap(layout, &other->layout, &sure))
      return kvs_fail(err, KVS_INVALID,
                      "the blocks from 0x%" PRIx64 " on %s those of pool '%s' (from 0x%" PRIx64
                      " on): pools that share bytes cannot be kept in order",
                      layout->ptr, sure ? "overlap" : "lie among", other->name, other->layout.ptr);
  return KVS_OK;
}

static void name_pool(struct kvs_pool *pool, const char *name) {
  if (name)
    snprintf(pool->name, sizeof pool->name, "%s", name);
  else
    snprintf(pool->name, sizeof pool->name, "pool %" PRIu64, pool->number);
  pool->layout.name = pool->name;
}

/* Kernels code, 16 bytes at a time. */
static int check_coding(const struct kvs_engine *engine, const struct kvs_pool_layout *layout, struct kvs_error *err) {
  const struct kvs_coding *coding = layout->coding;
  const char *why = kvs_kernels_off(engine);
  if (!coding) return KVS_OK;
  if (why) return kvs_fail(err, KVS_UNSUPPORTED, "a coded pool needs kernels, and they are off: %s", why);
  if (layout->block_nbytes != kvs_coding_nbytes(coding))
    return kvs_fail(err, KVS_INVALID, "block_nbytes is %" PRIu64 "; a block is coded to %" PRIu64 " bytes",
                    layout->block_nbytes, kvs_coding_nbytes(coding));
  if ((layout->ptr | layout->stride | layout->pitch) % 16)
    return kvs_fail(err, KVS_INVALID,
                    "ptr is 0x%" PRIx64 ", stride %" PRIu64 " and pitch %" PRIu64
                    ": of a coded pool they are multiples of 16",
                    layout->ptr, layout->stride, layout->pitch);
  if (!kvs_layout_has_pages(layout, coding->coded_page_nbytes))
    return kvs_fail(err, KVS_INVALID,
                    "rows of %" PRIu64 " bytes do not hold whole coded pages, which have %" PRIu64 " bytes",
                    layout->block_nbytes / layout->rows, coding->coded_page_nbytes);
  return KVS_OK;
}

static int put_in(struct kvs_pool *pool, struct kvs_error *err) {
  struct kvs_engine *engine = pool->engine;
  pthread_mutex_lock(&engine->memory_lock);
  int status = check_alone_locked(engine, &pool->layout, err);
  if (!status) {
    pool->next = engine->pools;
    engine->pools = pool;
  }
  pthread_mutex_unlock(&engine->memory_lock);
  return status;
}

int kvs_pool_check_open(const struct kvs_pool *pool, struct kvs_error *err) {
  if (!atomic_load(&pool->closed)) return KVS_OK;
  return kvs_fail(err, KVS_CLOSED, "pool '%s' lies in memory that has been freed, or closed if it is another process's",
                  pool->name);
}

/* Work may still run on this memory, perhaps for a pool that was closed: the new pool's first transfers wait for it. */
int kvs_table_inherit(struct kvs_engine *engine, struct kvs_table *table, uint64_t low, uint64_t high,
                      struct kvs_error *err) {
  uint64_t *inherited = table->inherited;
  unsigned lanes = atomic_load(&engine->nlanes);
  for (unsigned i = 0; i < lanes; i++) {
    uint64_t sequence = kvs_lane_last_on(engine->numbered[i], low, high);
    if (!sequence) continue;
    if (!inherited) inherited = calloc(KVS_LANES, sizeof *inherited);
    if (!inherited) return kvs_fail(err, KVS_NOMEM, "no memory to open a pool whose memory is in use");
    table->inherited = inherited;
    if (sequence > inherited[i]) inherited[i] = sequence;
  }
  return KVS_OK;
}

static void pool_free(struct kvs_pool *pool) {
  kvs_failures_close(&pool->failures);
  free(pool);
}

int kvs_pool_open(struct kvs_engine *engine, const struct kvs_pool_layout *asked, struct kvs_pool **opened,
                  struct kvs_error *err) {
  return kvs_pool_open_within(engine, asked, KVS_POOL_PATIENCE_NS, opened, err);
}

int kvs_pool_open_within(struct kvs_engine *engine, const struct kvs_pool_layout *asked, int64_t timeout_ns,
                         struct kvs_pool **opened, struct kvs_error *err) {
  struct kvs_pool_layout layout = *asked;
  int status = kvs_dev_check(engine->device, err);
  if (layout.coding && !layout.block_nbytes) layout.block_nbytes = kvs_coding_nbytes(layout.coding);
  if (!status) status = kvs_layout_check(&layout, err);
  if (!status) status = check_coding(engine, &layout, err);
  if (!status) status = check_group(engine, &layout, err);
  if (status) return status;
  struct kvs_pool *pool = calloc(1, sizeof *pool);
  if (!pool) return kvs_fail(err, KVS_NOMEM, "no memory for a pool");
  atomic_init(&pool->refs, 1);
  pool->engine = engine;
  pool->layout = layout;
  pool->number = atomic_fetch_add(&pool_numbers, 1) + 1;
  name_pool(pool, layout.name);
  uint64_t end = layout.ptr + kvs_layout_extent(&layout);
  status = kvs_vacate_lock(engine, layout.ptr, end, timeout_ns, err);
  if (status) {
    pool_free(pool);
    return status;
  }
  status = check_memory(engine, &layout, err);
  if (!status) status = kvs_failures_open(&pool->failures, layout.num_blocks, err);
  if (!status && !layout.group) status = kvs_table_new(layout.num_blocks, &pool->table, err);
  if (!status && layout.group) pool->table = layout.group->table;
  if (!status) status = kvs_table_inherit(engine, pool->table, layout.ptr, end, err);
  if (!status) status = kvs_peer_inherit(pool, err);
  if (!status) status = put_in(pool, err);
  if (!status) pool->table->members++;
  pthread_mutex_unlock(&engine->hazard_lock);
  if (status) {
    if (!layout.group && pool->table) kvs_table_free(pool->table);
    pool_free(pool);
    return status;
  }
  if (layout.group) kvs_pool_ref(layout.group);
  if (layout.coding) (void)kvs_coding_ref(layout.coding);
  kvs_engine_ref(engine);
  *opened = pool;
  return KVS_OK;
}

void kvs_pool_ref(struct kvs_pool *pool) { atomic_fetch_add(&pool->refs, 1); }

static void take_out(struct kvs_pool *pool) {
  struct kvs_engine *engine = pool->engine;
  pthread_mutex_lock(&engine->memory_lock);
  struct kvs_pool **at = &engine->pools;
  while (*at != pool) at = &(*at)->next;
  *at = pool->next;
  pthread_mutex_unlock(&engine->memory_lock);
  pthread_mutex_lock(&engine->hazard_lock);
  kvs_late_forget_pool(engine, pool);
  if (--pool->table->members == 0) kvs_table_free(pool->table);
  pthread_mutex_unlock(&engine->hazard_lock);
}

void kvs_pool_unref(struct kvs_pool *pool) {
  struct kvs_engine *engine = pool->engine;
  if (atomic_fetch_sub(&pool->refs, 1) != 1) return;
  if (kvs_dev_forked(engine->device)) return; /* the parent's pool: another thread may have held its lock */
  take_out(pool);
  if (kvs_racecheck_on()) kvs_racecheck_forget_pool(pool->number);
  if (pool->layout.group) kvs_pool_unref(pool->layout.group);
  kvs_coding_close((struct kvs_coding *)pool->layout.coding);
  pool_free(pool);
  kvs_engine_unref(engine);
}

struct kvs_engine *kvs_pool_engine(const struct kvs_pool *pool) { return pool->engine; }

void kvs_pool_get_layout(const struct kvs_pool *pool, struct kvs_pool_layout *layout) { *layout = pool->layout; }

/* -- noted accesses and order -------------------------------------------------------------------------------------- */

static int read_slots(const struct kvs_pool *pool, const struct kvs_ids *ids, int64_t *slots, struct kvs_error *err) {
  kvs_ids_copy(ids, slots);
  for (size_t i = 0; i < ids->count; i++)
    if ((uint64_t)slots[i] >= pool->layout.num_blocks)
      return kvs_fail(err, KVS_RANGE, "slots[%zu] is %" PRId64 "; pool '%s' has %" PRIu64 " blocks, 0 to %" PRIu64, i,
                      slots[i], pool->name, pool->layout.num_blocks, pool->layout.num_blocks - 1);
  return KVS_OK;
}

static void clear_failures(struct kvs_pool *pool, const int64_t *slots, size_t count) {
  pthread_mutex_lock(&pool->engine->hazard_lock);
  for (size_t i = 0; pool->failures.count && i < count; i++)
    kvs_failures_set(&pool->failures, (uint64_t)slots[i], NULL);
  pthread_mutex_unlock(&pool->engine->hazard_lock);
}

int kvs_note_access(struct kvs_pool *pool, const struct kvs_ids *ids, bool write, uint64_t offset, uint64_t nbytes,
                    uint64_t stream, const char *where, struct kvs_error *err) {
  uint64_t block = pool->layout.block_nbytes;
  int status = kvs_dev_check(pool->engine->device, err);
  if (status) return status;
  if (offset >= block || nbytes > block - offset)
    return kvs_fail(err, KVS_INVALID,
                    "offset %" PRIu64 " and nbytes %" PRIu64 " go beyond a block of %" PRIu64 " bytes", offset, nbytes,
                    block);
  if (nbytes == 0) nbytes = block - offset;
  int64_t *slots = malloc((ids->count ? ids->count : 1) * sizeof *slots);
  if (!slots) return kvs_fail(err, KVS_NOMEM, "no memory for %zu slots", ids->count);
  status = read_slots(pool, ids, slots, err);
  if (!status && write && nbytes == block) clear_failures(pool, slots, ids->count);
  if (!status && kvs_racecheck_on()) {
    struct kvs_race_accessor accessor = kvs_watch_accessor(pool->engine, stream, where);
    accessor.write = write;
    snprintf(accessor.what, sizeof accessor.what, "access");
    kvs_racecheck_access(&(struct kvs_race_access){.device = pool->engine->device,
                                                   .stream = stream,
                                                   .pool = pool->number,
                                                   .slots = pool->layout.num_blocks,
                                                   .pool_name = pool->name,
                                                   .ids = slots,
                                                   .count = ids->count,
                                                   .write = write,
                                                   .begin = offset,
                                                   .end = offset + nbytes,
                                                   .accessor = &accessor});
  }
  free(slots);
  return status;
}

int kvs_note_order(struct kvs_engine *engine, const struct kvs_after *before, bool on_host, uint64_t stream,
                   struct kvs_error *err) {
  struct kvs_device *device = engine->device, *later = on_host ? NULL : device;
  int status = kvs_dev_check(device, err);
  if (status || !kvs_racecheck_on()) return status;
  switch (before->kind) {
  case KVS_AFTER_STREAM:
    kvs_racecheck_order(device, before->handle, 0, later, stream);
    break;
  case KVS_AFTER_EVENT:
    kvs_racecheck_order(before->engine ? before->engine->device : device, 0, before->handle, later, stream);
    break;
  case KVS_AFTER_TRANSFER:
    kvs_racecheck_follow(before->transfer->point, later, stream);
    break;
  case KVS_AFTER_NONE:
    break;
  }
  return KVS_OK;
}
