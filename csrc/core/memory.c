/* Memory of an engine: what it allocated and registered, what a call touches, and the buffers that are kept for reuse.
 *
 * A submitting call looks at each region once: kvs_memory_cover() fills the call's own set from the engine's table, and
 * from the driver for memory that somebody else allocated. The set is forgotten with the call, since nobody tells us
 * when others free; that of many tensors is kept for the next call with the same ones, which looks nothing up, but
 * still asks the driver whether others' memory is what it was. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "core/lane.h"
#include "core/range.h"
#include "ipc/peer.h"

enum { SIDE_TEXT = 48 };

/* -- regions of a call ----------------------------------------------------------------------------------------- */

/* Cut `region` so that it overlaps nothing in `set` and still holds `address`. What others tell us of ordinary memory
 * is the whole mapping, of which a part may be registered. */
static void clip(struct kvs_region *region, const struct kvs_regions *set, uint64_t address) {
  const struct kvs_region *above = kvs_regions_after(set, address);
  uint64_t end = region->base + region->nbytes;
  for (size_t i = 0; i < set->count; i++) {
    uint64_t there = set->items[i].base + set->items[i].nbytes;
    if (there <= address && there > region->base) {
      if (region->alias) region->alias += there - region->base;
      region->base = there;
    }
  }
  if (above && above->base < end) end = above->base;
  region->nbytes = end - region->base;
}

static int look_up(struct kvs_engine *engine, struct kvs_scratch *scratch, uint64_t address,
                   const struct kvs_region **found, struct kvs_error *err) {
  struct kvs_region region;
  pthread_mutex_lock(&engine->memory_lock);
  const struct kvs_region *known = kvs_regions_find(&engine->regions, address);
  if (known) region = *known;
  pthread_mutex_unlock(&engine->memory_lock);
  if (!known) {
    int status = kvs_dev_pointer_query(engine->device, address, &region, err);
    if (status) return status;
    region.origin = KVS_ORIGIN_OTHER;
    pthread_mutex_lock(&engine->memory_lock);
    clip(&region, &engine->regions, address);
    pthread_mutex_unlock(&engine->memory_lock);
  }
  clip(&region, &scratch->regions, address);
  int status = kvs_regions_add(&scratch->regions, &region, err);
  *found = status ? NULL : kvs_regions_find(&scratch->regions, address);
  return status;
}

/* -- is it of the right kind? ---------------------------------------------------------------------------------- */

/* "gpu_ptrs[3]", or the name alone where the argument is no list. */
static const char *side_text(const struct kvs_side *side, char text[SIDE_TEXT]) {
  if (side->index == SIZE_MAX)
    snprintf(text, SIDE_TEXT, "%s", side->name);
  else
    snprintf(text, SIDE_TEXT, "%s[%zu]", side->name, side->index);
  return text;
}

/* Memory of another device is the other side of a swap, in place of the host's. */
static int check_peer(const struct kvs_engine *engine, const struct kvs_regions *met, const struct kvs_region *region,
                      uint64_t address, const struct kvs_side *side, struct kvs_error *err) {
  char text[SIDE_TEXT];
  for (size_t i = 0; i < met->count; i++) {
    const struct kvs_region *other = &met->items[i];
    if (other->memory != KVS_MEMORY_DEVICE || kvs_region_is_of(other, engine->device->ordinal) ||
        other->device == region->device)
      continue;
    return kvs_fail(err, KVS_INVALID,
                    "%s = 0x%" PRIx64
                    " is memory of device %d, and there is memory of device %d in this call: %s moves "
                    "blocks to or from one other device a call",
                    side_text(side, text), address, region->device, other->device, engine->name);
  }
  return KVS_OK;
}

static int check_kind(struct kvs_engine *engine, const struct kvs_regions *met, const struct kvs_region *region,
                      uint64_t address, const struct kvs_side *side, struct kvs_error *err) {
  char text[SIDE_TEXT];
  bool device = kvs_region_is_of(region, engine->device->ordinal),
       foreign = region->memory == KVS_MEMORY_DEVICE && !device;
  bool host = region->memory == KVS_MEMORY_PINNED || region->memory == KVS_MEMORY_PAGEABLE;
  if (foreign && side->want == KVS_SIDE_GPU)
    return kvs_fail(err, KVS_INVALID, "%s = 0x%" PRIx64 " is memory of device %d; this call runs on %s",
                    side_text(side, text), address, region->device, engine->name);
  if ((side->want == KVS_SIDE_GPU && host) || (side->want == KVS_SIDE_CPU && device))
    return kvs_fail(err, KVS_INVALID, "%s = 0x%" PRIx64 " is %s memory; %s memory is wanted there",
                    side_text(side, text), address, kvs_memory_name(region->memory),
                    side->want == KVS_SIDE_GPU ? "device" : "host");
  if (foreign && check_peer(engine, met, region, address, side, err)) return err->status;
  if (side->write && !region->writable)
    return kvs_fail(err, KVS_INVALID, "%s = 0x%" PRIx64 " is read-only memory and cannot be a destination",
                    side_text(side, text), address);
  return KVS_OK;
}

static bool is_whole(enum kvs_origin origin) { return origin == KVS_ORIGIN_ALLOCATED || origin == KVS_ORIGIN_IMPORTED; }

int kvs_memory_cover(struct kvs_engine *engine, struct kvs_scratch *scratch, uint64_t address, uint64_t nbytes,
                     const struct kvs_side *side, struct kvs_error *err) {
  uint64_t at = address, end = address + nbytes;
  enum kvs_origin leaving = KVS_ORIGIN_OTHER;
  char text[SIDE_TEXT];
  while (at < end) {
    const struct kvs_region *region = kvs_regions_find(&scratch->regions, at);
    int status = region ? KVS_OK : look_up(engine, scratch, at, &region, err);
    bool beyond = !status && at != address && (is_whole(leaving) || is_whole(region->origin));
    if (beyond) status = KVS_INVALID;
    if (status == KVS_INVALID && at == address)
      return kvs_fail(err, status, "%s = 0x%" PRIx64 " is not mapped memory", side_text(side, text), address);
    if (status == KVS_INVALID)
      return kvs_fail(err, status,
                      "%s = 0x%" PRIx64 ": %" PRIu64 " bytes are named from there, but only %" PRIu64 " are mapped",
                      side_text(side, text), address, nbytes, at - address);
    if (!status) status = check_kind(engine, &scratch->regions, region, at, side, err);
    if (status) return status;
    leaving = region->origin;
    at = region->base + region->nbytes;
  }
  return KVS_OK;
}

/* -- the same as the call before ---------------------------------------------------------------------------------- */

enum { WORTH_KEEPING = 8 }; /* tensors: looking up fewer takes no longer */

uint64_t kvs_memory_changes(struct kvs_engine *engine) {
  pthread_mutex_lock(&engine->memory_lock);
  uint64_t changes = engine->regions.changes;
  pthread_mutex_unlock(&engine->memory_lock);
  return changes;
}

/* Memory that others allocated is asked about once a call, as ever: it may have been freed, and its address used again.
 */
static bool still_there(struct kvs_engine *engine, const struct kvs_region *region) {
  struct kvs_region now;
  struct kvs_error ignored;
  if (region->origin != KVS_ORIGIN_OTHER) return true; /* the engine knows of every change */
  if (kvs_dev_pointer_query(engine->device, region->base, &now, &ignored)) return false;
  return now.buffer_id == region->buffer_id && now.memory == region->memory && now.device == region->device &&
         now.seam == region->seam && now.writable == region->writable && !now.alias == !region->alias &&
         (!now.alias || now.alias - now.base == region->alias - region->base) &&
         region->nbytes <= now.nbytes - (region->base - now.base);
}

static bool add_regions(struct kvs_regions *to, const struct kvs_regions *from) {
  if (to->capacity < from->count) {
    struct kvs_region *grown = realloc(to->items, from->count * sizeof *grown);
    if (!grown) return false;
    to->items = grown;
    to->capacity = from->count;
  }
  memcpy(to->items, from->items, from->count * sizeof *from->items);
  to->count = from->count;
  return true;
}

bool kvs_memory_recall(struct kvs_engine *engine, struct kvs_scratch *scratch, const struct kvs_cache_call *call) {
  struct kvs_cover *cover = &scratch->covers[call->direction];
  if (call->ntensors < WORTH_KEEPING || !cover->right || cover->ntensors != call->ntensors ||
      memcmp(cover->tensors, call->tensors, call->ntensors * sizeof *call->tensors) != 0 ||
      cover->changes != kvs_memory_changes(engine))
    return false;
  for (size_t i = 0; i < cover->regions.count; i++)
    if (!still_there(engine, &cover->regions.items[i])) return false;
  return add_regions(&scratch->regions, &cover->regions);
}

/* Not remembering costs time, nothing else. */
void kvs_memory_remember(struct kvs_scratch *scratch, const struct kvs_cache_call *call, uint64_t changes) {
  struct kvs_cover *cover = &scratch->covers[call->direction];
  cover->right = false;
  if (call->ntensors < WORTH_KEEPING) return;
  if (cover->capacity < call->ntensors) {
    struct kvs_tensor *grown = realloc(cover->tensors, call->ntensors * sizeof *grown);
    if (!grown) return;
    cover->tensors = grown;
    cover->capacity = call->ntensors;
  }
  memcpy(cover->tensors, call->tensors, call->ntensors * sizeof *call->tensors);
  cover->ntensors = call->ntensors;
  cover->changes = changes;
  cover->right = add_regions(&cover->regions, &scratch->regions);
}

/* -- allocating and registering -------------------------------------------------------------------------------- */

static const int64_t DRAIN_NS = 60ll * 1000 * 1000 * 1000;

int kvs_memory_add(struct kvs_engine *engine, uint64_t ptr, uint64_t nbytes, enum kvs_origin origin,
                   struct kvs_error *err) {
  struct kvs_region region;
  int status = kvs_dev_pointer_query(engine->device, ptr, &region, err);
  if (status) return status;
  region.origin = origin;
  if (nbytes) { /* it may be a part of what the driver handles as one */
    region.alias += ptr - region.base;
    region.base = ptr;
    region.nbytes = nbytes;
  }
  pthread_mutex_lock(&engine->memory_lock);
  status = kvs_regions_add(&engine->regions, &region, err);
  pthread_mutex_unlock(&engine->memory_lock);
  return status;
}

static int alloc_kind(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, uint64_t *ptr,
                      struct kvs_error *err) {
  if (kind == KVS_ALLOC_CHUNKS) return kvs_range_alloc(engine, nbytes, ptr, err);
  return kind == KVS_ALLOC_HOST ? kvs_dev_host_alloc(engine->device, nbytes, ptr, err)
                                : kvs_dev_alloc(engine->device, nbytes, ptr, err);
}

static void take_back(struct kvs_engine *engine, enum kvs_alloc kind, uint64_t ptr) {
  struct kvs_error ignored;
  if (kind == KVS_ALLOC_CHUNKS)
    (void)kvs_range_free(engine, ptr, &ignored);
  else
    (void)(kind == KVS_ALLOC_HOST ? kvs_dev_host_free(engine->device, ptr, &ignored)
                                  : kvs_dev_free(engine->device, ptr, &ignored));
}

int kvs_engine_alloc(struct kvs_engine *engine, size_t nbytes, bool host, uint64_t *ptr, struct kvs_error *err) {
  return kvs_engine_alloc_kind(engine, nbytes, host ? KVS_ALLOC_HOST : KVS_ALLOC_DEVICE, ptr, err);
}

int kvs_engine_alloc_within(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, int64_t timeout_ns,
                            uint64_t *ptr, struct kvs_error *err) {
  struct kvs_device *device = engine->device;
  if (nbytes == 0) return kvs_fail(err, KVS_INVALID, "nbytes is 0: an allocation has at least one byte");
  int status = kvs_dev_check(device, err);
  if (status) return status;
  kvs_reclaim_retry(engine);
  status = alloc_kind(engine, nbytes, kind, ptr, err);
  if (status == KVS_NOMEM && kvs_reclaim_pending(engine)) { /* now it is worth waiting for */
    (void)kvs_reclaim_drain(engine, timeout_ns);
    status = alloc_kind(engine, nbytes, kind, ptr, err);
  }
  if (status) return status;
  status = kvs_memory_add(engine, *ptr, kind == KVS_ALLOC_CHUNKS ? nbytes : 0, KVS_ORIGIN_ALLOCATED, err);
  if (status) take_back(engine, kind, *ptr);
  return status;
}

int kvs_engine_alloc_kind(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, uint64_t *ptr,
                          struct kvs_error *err) {
  return kvs_engine_alloc_within(engine, nbytes, kind, DRAIN_NS, ptr, err);
}

static bool known_region(struct kvs_engine *engine, uint64_t ptr, enum kvs_origin origin, struct kvs_region *region) {
  pthread_mutex_lock(&engine->memory_lock);
  const struct kvs_region *known = kvs_regions_find(&engine->regions, ptr);
  bool found = known && known->base == ptr && known->origin == origin;
  if (found) *region = *known;
  pthread_mutex_unlock(&engine->memory_lock);
  return found;
}

/* Pools that other devices have over what this one opened. */
static void close_pools_of_others(struct kvs_engine *engine, const struct kvs_region *region) {
  struct kvs_engine *other;
  for (unsigned i = 0; (other = kvs_engine_at(i)) != NULL; i++) {
    if (other == engine || kvs_dev_forked(other->device)) continue;
    pthread_mutex_lock(&other->memory_lock);
    kvs_pools_close_locked(other, region);
    pthread_mutex_unlock(&other->memory_lock);
  }
}

static int check_known(struct kvs_engine *engine, uint64_t ptr, enum kvs_origin origin, struct kvs_region *region,
                       struct kvs_error *err) {
  static const char *const done[] = {[KVS_ORIGIN_OTHER] = "made",
                                     [KVS_ORIGIN_ALLOCATED] = "allocated",
                                     [KVS_ORIGIN_REGISTERED] = "registered",
                                     [KVS_ORIGIN_IMPORTED] = "opened"};
  int status = kvs_dev_check(engine->device, err);
  if (status == KVS_FORKED) return status;
  if (!known_region(engine, ptr, origin, region))
    return kvs_fail(err, KVS_INVALID, "0x%" PRIx64 " was not %s by this device, or already given back", ptr,
                    done[origin]);
  if (!status && atomic_load(&engine->closed)) /* what still runs may never end, and the process does */
    return kvs_fail(err, KVS_CLOSED, "%s was shut down: its memory goes with the process", engine->name);
  return status;
}

int kvs_memory_retire(struct kvs_engine *engine, uint64_t ptr, enum kvs_origin origin, struct kvs_region *region,
                      struct kvs_error *err) {
  int status = check_known(engine, ptr, origin, region, err);
  if (!status) status = kvs_engine_drain(engine, region, 0, err);
  if (!status) status = kvs_peer_drain(engine, region, 0, err);
  if (status && status != KVS_LOST) return status;
  pthread_mutex_lock(&engine->memory_lock);
  bool mine = kvs_regions_remove(&engine->regions, ptr, region);
  if (mine && origin == KVS_ORIGIN_IMPORTED) kvs_pools_close_locked(engine, region);
  pthread_mutex_unlock(&engine->memory_lock);
  if (mine && origin == KVS_ORIGIN_IMPORTED) close_pools_of_others(engine, region);
  if (!mine) return kvs_fail(err, KVS_INVALID, "0x%" PRIx64 " was given back by another thread meanwhile", ptr);
  return status;
}

/* -- giving back: the functions of tasks (core/reclaim.h), and what starts them -------------------------------- */

static void *as_what(uint64_t ptr) { return (void *)(uintptr_t)ptr; }

static int free_now(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  uint64_t ptr = (uint64_t)(uintptr_t)what;
  struct kvs_region region;
  int status = kvs_memory_retire(engine, ptr, KVS_ORIGIN_ALLOCATED, &region, err);
  if (status) return status;
  if (region.memory != KVS_MEMORY_DEVICE) return kvs_dev_host_free(engine->device, ptr, err);
  /* Unlike freeing, unmapping chunks waits for nothing: the task did. */
  return kvs_range_known(engine, ptr) ? kvs_range_free(engine, ptr, err) : kvs_dev_free(engine->device, ptr, err);
}

static int unregister_now(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  uint64_t ptr = (uint64_t)(uintptr_t)what;
  struct kvs_region region;
  struct kvs_error ignored;
  int status = kvs_memory_retire(engine, ptr, KVS_ORIGIN_REGISTERED, &region, err);
  if (status) return status;
  status = kvs_dev_host_unregister(engine->device, ptr, err);
  if (status == KVS_REFUSED) /* then the driver has it still, and the caller may try again */
    (void)kvs_memory_add(engine, ptr, 0, KVS_ORIGIN_REGISTERED, &ignored);
  return status;
}

int kvs_engine_free_start(struct kvs_engine *engine, uint64_t ptr, struct kvs_reclaim **task, struct kvs_error *err) {
  struct kvs_region region;
  int status = check_known(engine, ptr, KVS_ORIGIN_ALLOCATED, &region, err);
  if (status && status != KVS_LOST) return status;
  return kvs_reclaim_start(engine, free_now, as_what(ptr), task, err);
}

int kvs_engine_unregister_start(struct kvs_engine *engine, uint64_t ptr, struct kvs_reclaim **task,
                                struct kvs_error *err) {
  struct kvs_region region;
  int status = check_known(engine, ptr, KVS_ORIGIN_REGISTERED, &region, err);
  bool left = status == KVS_INVALID && kvs_reclaim_left(engine, unregister_now, as_what(ptr)); /* half-way */
  if (status && status != KVS_LOST && !left) return status;
  return kvs_reclaim_start(engine, unregister_now, as_what(ptr), task, err);
}

static int late(struct kvs_engine *engine, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_fail(err, KVS_TIMEOUT,
                  "work of %s, or transfers that use this memory, had not ended after %.3g s: nothing was given back",
                  engine->name, (double)timeout_ns / 1e9);
}

int kvs_engine_free(struct kvs_engine *engine, uint64_t ptr, struct kvs_error *err) {
  struct kvs_reclaim *task;
  int status = kvs_engine_free_start(engine, ptr, &task, err);
  if (status) return status;
  status = kvs_reclaim_wait(task, DRAIN_NS, err);
  bool withdrawn = kvs_reclaim_leave(task, KVS_LEAVE_WITHDRAW);
  if (status != KVS_TIMEOUT) return status;
  return withdrawn ? late(engine, DRAIN_NS, err) : KVS_OK; /* the driver has been told */
}

void kvs_engine_free_later(struct kvs_engine *engine, uint64_t ptr) {
  kvs_reclaim_later(engine, free_now, as_what(ptr));
}

int kvs_engine_unregister_within(struct kvs_engine *engine, uint64_t ptr, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_reclaim *task;
  int status = kvs_engine_unregister_start(engine, ptr, &task, err);
  if (status) return status;
  status = kvs_reclaim_wait(task, timeout_ns, err);
  (void)kvs_reclaim_leave(task, KVS_LEAVE_RESULT);
  return status == KVS_TIMEOUT ? late(engine, timeout_ns, err) : status;
}

int kvs_engine_unregister(struct kvs_engine *engine, uint64_t ptr, struct kvs_error *err) {
  return kvs_engine_unregister_within(engine, ptr, DRAIN_NS, err);
}

/* What this device allocated or registered already; what others pinned, the driver knows. */
static int refuse_known(struct kvs_engine *engine, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  int status = KVS_OK;
  pthread_mutex_lock(&engine->memory_lock);
  const struct kvs_region *known = kvs_regions_find(&engine->regions, ptr);
  if (!known) known = kvs_regions_after(&engine->regions, ptr);
  if (known && known->base < ptr + nbytes)
    status =
        kvs_fail(err, KVS_INVALID,
                 "[0x%" PRIx64 ", 0x%" PRIx64 ") overlaps [0x%" PRIx64 ", 0x%" PRIx64 "), which this device has %s",
                 ptr, ptr + nbytes, known->base, known->base + known->nbytes,
                 known->origin == KVS_ORIGIN_REGISTERED ? "registered already" : "allocated");
  pthread_mutex_unlock(&engine->memory_lock);
  return status;
}

int kvs_engine_register(struct kvs_engine *engine, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  struct kvs_error ignored;
  if (nbytes == 0) return kvs_fail(err, KVS_INVALID, "nbytes is 0: a registration has at least one byte");
  if (ptr + nbytes < ptr) return kvs_fail(err, KVS_INVALID, "0x%" PRIx64 " plus %zu bytes wraps around", ptr, nbytes);
  int status = kvs_dev_check(engine->device, err);
  if (!status) status = refuse_known(engine, ptr, nbytes, err);
  kvs_reclaim_forget(engine, unregister_now, as_what(ptr));
  if (!status) status = kvs_dev_host_register(engine->device, ptr, nbytes, err);
  if (status) return status;
  status = kvs_memory_add(engine, ptr, 0, KVS_ORIGIN_REGISTERED, err);
  if (status) (void)kvs_dev_host_unregister(engine->device, ptr, &ignored);
  return status;
}

/* -- buffers kept for reuse ------------------------------------------------------------------------------------ */

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
  if (status) { /* what there is stays for the next: a free waits for all that is queued, and the caller holds locks */
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
  if (!scratch) kvs_fail(err, KVS_NOMEM, "no memory for a plan");
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

void kvs_memory_destroy(struct kvs_engine *engine) {
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
    kvs_move_scratch_free(scratch->move);
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
  kvs_regions_clear(&engine->regions);
  if (engine->forget_imports) engine->forget_imports(engine);
  kvs_ranges_destroy(engine);
}
