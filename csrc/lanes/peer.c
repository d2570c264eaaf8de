/* Transfers between two devices. */
#include "lanes/peer.h"

#include <stdlib.h>

#include "base/wait.h"
#include "device/share.h"
#include "lanes/lane.h"
#include "lanes/registry.h"
#include "lanes/transfer.h"
#include "plan/layout.h"
#include "racecheck/racecheck.h"

/* -- memory ---------------------------------------------------------------------------------------------------- */

/* Imported memory is mapped for one device. It is undocumented whether kernels of other devices reach it, and a kernel
 * that faults loses its device. */
static bool is_imported(const struct kvs_region *region) {
  struct kvs_engine *engine;
  bool imported = false;
  for (unsigned i = 0; !imported && (engine = kvs_engine_at(i)) != NULL; i++) {
    if (kvs_dev_forked(engine->device)) continue;
    pthread_mutex_lock(&engine->memory_lock);
    const struct kvs_region *known = kvs_regions_find(&engine->regions, region->base);
    imported = known && known->origin == KVS_ORIGIN_IMPORTED;
    pthread_mutex_unlock(&engine->memory_lock);
  }
  return imported;
}

int kvs_peer_find(struct kvs_engine *engine, const struct kvs_regions *regions, const struct kvs_region **peer,
                  bool *direct, struct kvs_error *err) {
  *peer = NULL;
  *direct = true;
  for (size_t i = 0; i < regions->count; i++) {
    const struct kvs_region *region = &regions->items[i];
    bool reached = false;
    if (region->memory != KVS_MEMORY_DEVICE || region->device == engine->device->ordinal) continue;
    int status = kvs_dev_peer(engine->device, region, &reached, err);
    if (status) return status;
    *peer = region;
    *direct &= reached && !is_imported(region);
  }
  return KVS_OK;
}

int kvs_peer_drain(struct kvs_engine *but, const struct kvs_region *region, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_engine *engine;
  uint64_t start = kvs_clock_ns();
  int status = KVS_OK;
  for (unsigned i = 0; !status && (engine = kvs_engine_at(i)) != NULL; i++) {
    if (engine == but || kvs_dev_forked(engine->device)) continue;
    int64_t waited = (int64_t)(kvs_clock_ns() - start), left = waited < timeout_ns ? timeout_ns - waited : 0;
    status = kvs_engine_drain(engine, region, timeout_ns < 0 ? -1 : left, err);
  }
  return status;
}

/* -- pools ----------------------------------------------------------------------------------------------------- */

void kvs_peer_lock(struct kvs_engine *running, struct kvs_engine *other) {
  struct kvs_engine *first = other && other < running ? other : running;
  pthread_mutex_lock(&first->hazard_lock);
  if (other) pthread_mutex_lock(first == running ? &other->hazard_lock : &running->hazard_lock);
}

void kvs_peer_unlock(struct kvs_engine *running, struct kvs_engine *other) {
  if (other) pthread_mutex_unlock(&other->hazard_lock);
  pthread_mutex_unlock(&running->hazard_lock);
}

static int add_range(struct kvs_foreign_list *list, struct kvs_engine *engine, uint64_t low, uint64_t high,
                     struct kvs_error *err) {
  if (list->count == list->capacity) {
    size_t capacity = list->capacity ? 2 * list->capacity : 16;
    struct kvs_foreign *grown = realloc(list->items, capacity * sizeof *grown);
    if (!grown) return kvs_fail(err, KVS_NOMEM, "no memory to order %zu pieces of memory", capacity);
    list->items = grown;
    list->capacity = capacity;
  }
  list->items[list->count++] = (struct kvs_foreign){.engine = engine, .low = low, .high = high};
  return KVS_OK;
}

static int add(struct kvs_foreign_list *list, struct kvs_engine *engine, const struct kvs_pool *pool,
               struct kvs_error *err) {
  uint64_t low = pool->layout.ptr;
  return add_range(list, engine, low, low + kvs_layout_extent(&pool->layout), err);
}

int kvs_peer_collect(const struct kvs_pool *pool, struct kvs_engine *running, struct kvs_foreign_list *list,
                     struct kvs_error *err) {
  int status = KVS_OK;
  if (pool->engine != running) { /* this engine does not track the slots, so its own lanes count as another engine's */
    status = add(list, running, pool, err);
    if (!status) status = add(list, pool->engine, pool, err);
  }
  for (unsigned i = 0; !status && i < pool->nforeign_engines; i++)
    if (pool->foreign_engines[i] != running) status = add(list, pool->foreign_engines[i], pool, err);
  return status;
}

int kvs_peer_add_engine(struct kvs_pool *pool, struct kvs_engine *running, struct kvs_error *err) {
  if (pool->engine == running) return KVS_OK;
  for (unsigned i = 0; i < pool->nforeign_engines; i++)
    if (pool->foreign_engines[i] == running) return KVS_OK;
  if (pool->nforeign_engines == KVS_POOL_FOREIGN_ENGINES)
    return kvs_fail(err, KVS_UNSUPPORTED, "pool '%s' has been used by transfers of %d other devices: no more can",
                    pool->name, KVS_POOL_FOREIGN_ENGINES);
  pool->foreign_engines[pool->nforeign_engines++] = running; /* engines in the registry are never destroyed */
  return KVS_OK;
}

static bool is_at_work(struct kvs_engine *engine, uint64_t low, uint64_t high) {
  bool busy = false;
  for (unsigned lane = 0; !busy && lane < atomic_load(&engine->nlanes); lane++)
    busy = kvs_lane_last_on(engine->numbered[lane], low, high) != 0;
  return busy;
}

/* Skip engines whose events cannot be waited on: every later transfer would be refused. */
static bool counts(const struct kvs_engine *running, const struct kvs_engine *other) {
  return other != running && !kvs_dev_forked(other->device) && kvs_dev_can_wait_for(running->device, other->device);
}

int kvs_peer_inherit(struct kvs_pool *pool, struct kvs_error *err) {
  uint64_t low = pool->layout.ptr, high = low + kvs_layout_extent(&pool->layout);
  struct kvs_engine *engine;
  int status = KVS_OK;
  for (unsigned i = 0; !status && (engine = kvs_engine_at(i)) != NULL; i++)
    if (counts(pool->engine, engine) && is_at_work(engine, low, high)) status = kvs_peer_add_engine(pool, engine, err);
  return status;
}

int kvs_peer_inherit_memory(struct kvs_engine *running, uint64_t low, uint64_t high, struct kvs_foreign_list *list,
                            struct kvs_error *err) {
  struct kvs_engine *engine;
  int status = KVS_OK;
  for (unsigned i = 0; !status && (engine = kvs_engine_at(i)) != NULL; i++)
    if (counts(running, engine) && is_at_work(engine, low, high)) status = add_range(list, engine, low, high, err);
  return status;
}

/* Under the race checker ended work is kept, to be ordered before later work. */
void kvs_peer_forget(struct kvs_foreign_list *list) {
  struct kvs_error ignored;
  size_t kept = 0;
  for (size_t i = 0; i < list->count; i++) {
    const struct kvs_foreign item = list->items[i];
    if (kvs_racecheck_on() || is_at_work(item.engine, item.low, item.high) || kvs_engine_look(item.engine, &ignored))
      list->items[kept++] = item;
  }
  list->count = kept;
}

static int wait_for_lane(struct kvs_transfer *transfer, struct kvs_lane *lane, const struct kvs_foreign *foreign,
                         struct kvs_error *err) {
  struct kvs_device *device = transfer->engine->device;
  kvs_stream head = transfer->head;
  struct kvs_transfer *before;
  kvs_event end;
  if (kvs_racecheck_on()) { /* ended transfers come before this one too */
    struct kvs_race_point *point = kvs_lane_point(lane, atomic_load(&lane->ended));
    kvs_racecheck_follow(point, device, head);
    kvs_racecheck_point_free(point);
  }
  uint64_t sequence = kvs_lane_last_on(lane, foreign->low, foreign->high);
  if (!sequence) return KVS_OK;
  int status = kvs_lane_pin(lane, sequence, &before, &end, err);
  if (status == KVS_UNSUPPORTED) { /* the transfer has no end event; it may have ended since the last reap */
    (void)kvs_lane_reap(lane, err);
    status = kvs_lane_pin(lane, sequence, &before, &end, err);
  }
  if (status != KVS_NOT_READY) return status;
  if (kvs_racecheck_on()) kvs_racecheck_follow(before->point, device, head);
  kvs_peer_depend(transfer, foreign->engine);
  transfer->dependencies |= before->dependencies;
  status = kvs_dev_stream_wait_foreign(device, head, foreign->engine->device, end, err);
  kvs_transfer_unpin(before);
  kvs_transfer_drop(before);
  return status;
}

int kvs_peer_wait(struct kvs_transfer *transfer, const struct kvs_foreign *foreign, struct kvs_error *err) {
  unsigned lanes = atomic_load(&foreign->engine->nlanes);
  int status = kvs_engine_look(foreign->engine, err); /* a lost device may have written any part of the pool */
  for (unsigned i = 0; !status && i < lanes; i++) {
    struct kvs_lane *lane = foreign->engine->numbered[i];
    if (lane != transfer->lane) status = wait_for_lane(transfer, lane, foreign, err);
  }
  return status;
}
