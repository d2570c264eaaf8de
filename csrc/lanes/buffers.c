/* Buffers that an engine keeps for reuse, so that the steady state allocates nothing: staging, events, scratch of
 * calls. */
#include "lanes/buffers.h"
#include "base/wait.h"

#include <stdlib.h>

/* -- staging ------------------------------------------------------------------------------------------------------- */

static unsigned staging_class(size_t nbytes) {
  unsigned class = 0;
  while (class < KVS_STAGING_CLASSES && ((size_t)65536 << class) < nbytes) class++;
  return class;
}

int kvs_engine_staging_get(struct kvs_engine *engine, size_t nbytes, struct kvs_staging **staging,
                           struct kvs_error *err) {
  unsigned class = staging_class(nbytes);
  int status = KVS_OK;
  if (class == KVS_STAGING_CLASSES) return kvs_fail(err, KVS_NOMEM, "%zu bytes of descriptors are too many", nbytes);
  pthread_mutex_lock(&engine->cache_lock);
  struct kvs_staging *kept = engine->staging[class];
  if (kept) engine->staging[class] = kept->next;
  pthread_mutex_unlock(&engine->cache_lock);
  if (!kept) {
    kept = calloc(1, sizeof *kept);
    if (!kept) return kvs_fail(err, KVS_NOMEM, "no memory for descriptors");
    kept->nbytes = (size_t)65536 << class;
  }
  if (!kept->host && !(status = kvs_dev_host_alloc(engine->device, kept->nbytes, &kept->host, err)))
    atomic_fetch_add(&engine->staging_nbytes, kept->nbytes);
  if (!status && !kept->device && !(status = kvs_dev_alloc(engine->device, kept->nbytes, &kept->device, err)))
    atomic_fetch_add(&engine->staging_nbytes, kept->nbytes);
  if (status) { /* keep what was allocated: freeing waits for all queued work, and the caller holds locks */
    kvs_engine_staging_put(engine, kept);
    return status;
  }
  *staging = kept;
  return KVS_OK;
}

void kvs_engine_staging_put(struct kvs_engine *engine, struct kvs_staging *staging) {
  unsigned class = staging_class(staging->nbytes);
  pthread_mutex_lock(&engine->cache_lock);
  staging->next = engine->staging[class];
  engine->staging[class] = staging;
  pthread_mutex_unlock(&engine->cache_lock);
}

/* -- events -------------------------------------------------------------------------------------------------------- */

int kvs_engine_event_get(struct kvs_engine *engine, kvs_event *event, struct kvs_error *err) {
  *event = 0;
  pthread_mutex_lock(&engine->cache_lock);
  if (engine->nevents) *event = engine->events[--engine->nevents];
  pthread_mutex_unlock(&engine->cache_lock);
  return *event ? KVS_OK : kvs_dev_event_create(engine->device, false, event, err);
}

void kvs_engine_event_put(struct kvs_engine *engine, kvs_event event) {
  struct kvs_error ignored;
  pthread_mutex_lock(&engine->cache_lock);
  if (engine->nevents == engine->events_capacity) {
    size_t capacity = engine->events_capacity ? 2 * engine->events_capacity : 256;
    kvs_event *grown = realloc(engine->events, capacity * sizeof *grown);
    if (grown) engine->events = grown, engine->events_capacity = capacity;
  }
  bool kept = engine->nevents < engine->events_capacity;
  if (kept) engine->events[engine->nevents++] = event;
  pthread_mutex_unlock(&engine->cache_lock);
  if (!kept) (void)kvs_dev_event_destroy(engine->device, event, &ignored);
}

/* -- room for a move ------------------------------------------------------------------------------------------------
 */

static void free_move_scratch(struct kvs_move_scratch *room) {
  if (!room) return;
  free(room->runs.items);
  free(room->parts);
  free(room->touches);
  free(room->next_byte);
  free(room->covered);
  free(room->slots);
  free(room->positions);
  free(room->codings);
  free(room->foreign.items);
  free(room);
}

/* Reallocate; old contents are dropped. */
static bool renew(void *pointer, size_t count, size_t size) {
  void **at = pointer;
  free(*at);
  *at = calloc(count ? count : 1, size);
  return *at != NULL;
}

int kvs_move_make_room(struct kvs_scratch *scratch, size_t pairs, size_t parts, size_t blocks, struct kvs_error *err) {
  struct kvs_move_scratch *room = scratch->move;
  bool ok = true;
  if (!room) room = scratch->move = calloc(1, sizeof *room);
  if (!room) return kvs_fail(err, KVS_NOMEM, "no memory for a plan");
  if (pairs > room->pairs) {
    room->pairs = 0;
    ok = renew(&room->touches, 2 * pairs, sizeof *room->touches) &&
         renew(&room->next_byte, pairs, sizeof *room->next_byte) &&
         renew(&room->covered, pairs, sizeof *room->covered) && renew(&room->codings, pairs, sizeof *room->codings);
    if (ok) room->pairs = pairs;
  }
  if (ok && parts > room->nparts) {
    room->nparts = 0;
    ok = renew(&room->parts, parts, sizeof *room->parts);
    if (ok) room->nparts = parts;
  }
  if (ok && blocks > room->blocks) {
    room->blocks = 0;
    ok = renew(&room->slots, 4 * blocks, sizeof *room->slots) &&
         renew(&room->positions, blocks, sizeof *room->positions);
    if (ok) room->blocks = blocks;
  }
  room->runs.count = room->foreign.count = 0;
  return ok ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory for a plan of %zu pools and %zu blocks", pairs, blocks);
}

/* -- working memory ------------------------------------------------------------------------------------------------ */

int kvs_scratch_mark(struct kvs_scratch *scratch, size_t index, bool rows, struct kvs_error *err) {
  if (index >= scratch->layers_capacity) {
    size_t capacity = scratch->layers_capacity ? 2 * scratch->layers_capacity : 64;
    struct kvs_layer_end *grown = realloc(scratch->layers, capacity * sizeof *grown);
    if (!grown) return kvs_fail(err, KVS_NOMEM, "no memory for %zu layers", capacity);
    scratch->layers = grown;
    scratch->layers_capacity = capacity;
  }
  struct kvs_layer_end *layer = &scratch->layers[index];
  if (index == scratch->nlayers) {
    *layer = (struct kvs_layer_end){0, 0, 0};
    scratch->nlayers++;
  }
  if (rows) {
    layer->rows = scratch->rows.count;
  } else {
    layer->copies = scratch->copies.count;
    layer->rects = scratch->rects.count;
  }
  return KVS_OK;
}

int kvs_scratch_reserve_ids(struct kvs_scratch *scratch, size_t count, struct kvs_error *err) {
  if (count <= scratch->ids_capacity) return KVS_OK;
  size_t capacity = count < SIZE_MAX / 16 ? 2 * count : count;
  int64_t *room = capacity < SIZE_MAX / 8 ? malloc(capacity * sizeof *room) : NULL;
  if (!room) return kvs_fail(err, KVS_NOMEM, "no memory for a list of %zu entries", count);
  free(scratch->ids);
  scratch->ids = room;
  scratch->ids_capacity = capacity;
  return KVS_OK;
}

struct kvs_scratch *kvs_scratch_get(struct kvs_engine *engine, struct kvs_error *err) {
  pthread_mutex_lock(&engine->cache_lock);
  struct kvs_scratch *scratch = engine->scratch;
  if (scratch) engine->scratch = scratch->next;
  pthread_mutex_unlock(&engine->cache_lock);
  if (!scratch) scratch = calloc(1, sizeof *scratch);
  if (scratch)
    scratch->since_ns = kvs_clock_ns();
  else
    kvs_fail(err, KVS_NOMEM, "no memory for a plan");
  return scratch;
}

void kvs_scratch_put(struct kvs_engine *engine, struct kvs_scratch *scratch) {
  scratch->copies.count = scratch->rects.count = scratch->rows.count = scratch->nlayers = 0;
  scratch->rects.rows = 0;
  scratch->single.count = 0;
  scratch->regions.count = 0;
  pthread_mutex_lock(&engine->cache_lock);
  scratch->next = engine->scratch;
  engine->scratch = scratch;
  pthread_mutex_unlock(&engine->cache_lock);
}

void kvs_buffers_destroy(struct kvs_engine *engine) {
  struct kvs_error ignored;
  while (engine->scratch) {
    struct kvs_scratch *scratch = engine->scratch;
    engine->scratch = scratch->next;
    free(scratch->ids);
    kvs_copies_free(&scratch->copies);
    kvs_copies_free(&scratch->single);
    kvs_rects_free(&scratch->rects);
    kvs_rows_free(&scratch->rows);
    kvs_packing_free(&scratch->packing);
    free_move_scratch(scratch->move);
    kvs_stacks_free(&scratch->stacks);
    free(scratch->layers);
    kvs_regions_clear(&scratch->regions);
    kvs_plan_scratch_free(&scratch->plan);
    for (int direction = 0; direction < 2; direction++) {
      free(scratch->covers[direction].tensors);
      kvs_regions_clear(&scratch->covers[direction].regions);
    }
    free(scratch);
  }
  for (unsigned class = 0; class < KVS_STAGING_CLASSES; class++)
    while (engine->staging[class]) {
      struct kvs_staging *staging = engine->staging[class];
      engine->staging[class] = staging->next;
      if (staging->device) (void)kvs_dev_free(engine->device, staging->device, &ignored);
      if (staging->host) (void)kvs_dev_host_free(engine->device, staging->host, &ignored);
      free(staging);
    }
  while (engine->nevents) (void)kvs_dev_event_destroy(engine->device, engine->events[--engine->nevents], &ignored);
  free(engine->events);
}
