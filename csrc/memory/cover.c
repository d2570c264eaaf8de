/* The memory that a call touches.
 *
 * A submitting call looks up each region once: kvs_memory_cover() fills the call's own set from the engine's table, and
 * from the driver for memory that other libraries allocated. The set lasts for one call, since kvswap does not see when
 * other libraries free memory. The set of many tensors is kept for the next call with the same tensors: that call skips
 * the lookups, and only asks the driver whether memory of other libraries is unchanged. */
#include "memory/cover.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIDE_TEXT = 48 };

/* -- regions of a call ----------------------------------------------------------------------------------------- */

/* Cut `region` so that it overlaps nothing in `set` and still holds `address`. For ordinary memory the system reports
 * the whole mapping, of which a part may be registered. */
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

/* Memory of another device takes the place of the host's in a swap. */
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

enum { WORTH_KEEPING = 8 }; /* tensors: for fewer, a lookup costs no more than this */

uint64_t kvs_memory_changes(struct kvs_engine *engine) {
  pthread_mutex_lock(&engine->memory_lock);
  uint64_t changes = engine->regions.changes;
  pthread_mutex_unlock(&engine->memory_lock);
  return changes;
}

/* Memory that other libraries allocated is queried in every call: it may have been freed and its address reused. */
static bool still_there(struct kvs_engine *engine, const struct kvs_region *region) {
  struct kvs_region now;
  struct kvs_error ignored;
  if (region->origin != KVS_ORIGIN_OTHER) return true; /* the engine counts every change */
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

/* Without memory the next call looks everything up again. */
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
