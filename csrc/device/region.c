#include "device/region.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Index of the first region with base > address. */
static size_t upper(const struct kvs_regions *set, uint64_t address) {
  size_t low = 0, high = set->count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (set->items[middle].base > address)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

static int refuse_overlap(const struct kvs_region *region, const struct kvs_region *there, struct kvs_error *err) {
  return kvs_fail(err, KVS_INVALID,
                  "[0x%" PRIx64 ", 0x%" PRIx64 ") overlaps %s memory that is known already: [0x%" PRIx64 ", 0x%" PRIx64
                  ")",
                  region->base, region->base + region->nbytes, kvs_memory_name(there->memory), there->base,
                  there->base + there->nbytes);
}

int kvs_regions_add(struct kvs_regions *set, const struct kvs_region *region, struct kvs_error *err) {
  size_t at = upper(set, region->base);
  if (region->nbytes == 0 || region->base + region->nbytes < region->base)
    return kvs_fail(err, KVS_INVALID, "a region of %" PRIu64 " bytes at 0x%" PRIx64 " is empty or wraps around",
                    region->nbytes, region->base);
  if (at > 0 && kvs_region_holds(&set->items[at - 1], region->base))
    return refuse_overlap(region, &set->items[at - 1], err);
  if (at < set->count && kvs_region_holds(region, set->items[at].base))
    return refuse_overlap(region, &set->items[at], err);
  if (set->count == set->capacity) {
    size_t capacity = set->capacity ? 2 * set->capacity : 16;
    struct kvs_region *items = realloc(set->items, capacity * sizeof *items);
    if (!items) return kvs_fail(err, KVS_NOMEM, "no memory for a table of %zu regions", capacity);
    set->items = items;
    set->capacity = capacity;
  }
  memmove(set->items + at + 1, set->items + at, (set->count - at) * sizeof *set->items);
  set->items[at] = *region;
  set->count++;
  set->changes++;
  return KVS_OK;
}

bool kvs_regions_aliased(const struct kvs_regions *set) {
  for (size_t i = 0; i < set->count; i++)
    if (set->items[i].alias && set->items[i].alias != set->items[i].base) return true;
  return false;
}

bool kvs_regions_remove(struct kvs_regions *set, uint64_t base, struct kvs_region *removed) {
  size_t at = upper(set, base);
  if (at == 0 || set->items[at - 1].base != base) return false;
  at--;
  if (removed) *removed = set->items[at];
  set->count--;
  set->changes++;
  memmove(set->items + at, set->items + at + 1, (set->count - at) * sizeof *set->items);
  return true;
}

const struct kvs_region *kvs_regions_find(const struct kvs_regions *set, uint64_t address) {
  size_t at = upper(set, address);
  if (at == 0 || !kvs_region_holds(&set->items[at - 1], address)) return NULL;
  return &set->items[at - 1];
}

const struct kvs_region *kvs_regions_after(const struct kvs_regions *set, uint64_t address) {
  size_t at = upper(set, address);
  return at < set->count ? &set->items[at] : NULL;
}

void kvs_regions_clear(struct kvs_regions *set) {
  free(set->items);
  memset(set, 0, sizeof *set);
}

const char *kvs_memory_name(enum kvs_memory memory) {
  static const char *const names[] = {
      [KVS_MEMORY_ORDINARY] = "ordinary",      [KVS_MEMORY_DEVICE] = "device",   [KVS_MEMORY_PINNED] = "pinned host",
      [KVS_MEMORY_PAGEABLE] = "pageable host", [KVS_MEMORY_MANAGED] = "managed",
  };
  return names[memory];
}
