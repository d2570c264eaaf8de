/* For the race checker: maps the addresses of plain copies to blocks of pools. */
#include "memory/watch.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lanes/state.h"
#include "plan/layout.h"
#include "racecheck/racecheck.h"

struct kvs_race_accessor kvs_watch_accessor(const struct kvs_engine *engine, kvs_stream stream, const char *where) {
  struct kvs_race_accessor accessor = {.write = false};
  snprintf(accessor.stream, sizeof accessor.stream, "%s stream 0x%" PRIx64, engine->name, stream);
  if (where) snprintf(accessor.where, sizeof accessor.where, "%s", where);
  return accessor;
}

/* A copy of what is needed of a pool, since the pool may be closed during the lookup. */
struct target {
  struct kvs_pool_layout layout;
  uint64_t number, end;
  char name[32];
};

struct pool_lookup {
  struct kvs_race_access access; /* collects ids of blocks with the same bytes */
  int64_t *ids;
  size_t capacity;
};

static void flush(struct pool_lookup *look) {
  if (look->access.count) kvs_racecheck_access(&look->access);
  look->access.count = 0;
}

static void add(struct pool_lookup *look, const struct target *target, uint64_t block, uint64_t begin, uint64_t end) {
  struct kvs_race_access *access = &look->access;
  if (access->pool != target->number || access->begin != begin || access->end != end) flush(look);
  if (access->count == look->capacity) {
    size_t capacity = look->capacity ? 2 * look->capacity : 256;
    int64_t *grown = realloc(look->ids, capacity * sizeof *grown);
    if (!grown) flush(look); /* report what is collected so far, and go on */
    if (!grown && !look->capacity) return;
    if (grown) look->ids = grown, look->capacity = capacity;
  }
  access->pool = target->number;
  access->pool_name = target->name;
  access->slots = target->layout.num_blocks;
  access->begin = begin;
  access->end = end;
  access->ids = look->ids;
  look->ids[access->count++] = (int64_t)block;
}

static void look_under(struct pool_lookup *look, const struct target *target, uint64_t address, uint64_t nbytes) {
  uint64_t at = address > target->layout.ptr ? address : target->layout.ptr;
  uint64_t end = address + nbytes < target->end ? address + nbytes : target->end;
  while (at < end) {
    uint64_t block, byte, n;
    bool found = kvs_layout_locate(&target->layout, at - target->layout.ptr, &block, &byte, &n);
    if (n > end - at) n = end - at;
    if (found) add(look, target, block, byte, byte + n);
    at += n;
  }
}

static struct target *list_pools(struct kvs_engine *engine, size_t *count) {
  struct target *targets = NULL;
  size_t n = 0;
  *count = 0;
  pthread_mutex_lock(&engine->memory_lock);
  for (const struct kvs_pool *pool = engine->pools; pool; pool = pool->next) n++;
  if (n) targets = calloc(n, sizeof *targets);
  for (const struct kvs_pool *pool = engine->pools; targets && pool; pool = pool->next) {
    if (atomic_load(&pool->closed)) continue;
    struct target *target = &targets[(*count)++];
    target->layout = pool->layout;
    target->number = pool->number;
    target->end = pool->layout.ptr + kvs_layout_extent(&pool->layout);
    memcpy(target->name, pool->name, sizeof target->name);
  }
  pthread_mutex_unlock(&engine->memory_lock);
  return targets;
}

static void look_at_all(struct pool_lookup *look, const struct target *target, bool write,
                        const struct kvs_copies *copies, const struct kvs_rects *rects) {
  for (size_t i = 0; i < copies->count; i++)
    look_under(look, target, write ? copies->dst[i] : copies->src[i], copies->nbytes[i]);
  for (size_t i = 0; i < rects->count; i++)
    for (uint64_t row = 0; row < kvs_rect_rows(&rects->items[i]); row++)
      look_under(look, target, write ? kvs_rect_dst(&rects->items[i], row) : kvs_rect_src(&rects->items[i], row),
                 rects->items[i].width);
}

void kvs_watch_copies(const void *unused, const struct kvs_transfer *transfer, size_t layer,
                      const struct kvs_copies *copies, const struct kvs_rects *rects,
                      const struct kvs_race_accessor *accessor) {
  (void)unused, (void)layer;
  size_t count;
  struct target *targets = list_pools(transfer->engine, &count);
  struct kvs_race_accessor side = *accessor;
  struct pool_lookup look = {
      .access = {.device = transfer->engine->device, .stream = transfer->lane->stream, .accessor = &side}};
  for (int write = 0; write < 2; write++) {
    side.write = look.access.write = write;
    for (size_t t = 0; t < count; t++) look_at_all(&look, &targets[t], write, copies, rects);
    flush(&look);
  }
  free(look.ids);
  free(targets);
}
