/* Regions: ranges of memory that kvswap knows, and sorted sets of them. Pure: no device, no lock. */
#ifndef KVS_REGION_H
#define KVS_REGION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

enum kvs_memory {
  KVS_MEMORY_ORDINARY, /* host device: any memory of the process, serves as device and as host memory */
  KVS_MEMORY_DEVICE,   /* GPU memory */
  KVS_MEMORY_PINNED,   /* host memory that the GPU can read: allocated pinned, or registered */
  KVS_MEMORY_PAGEABLE, /* host memory that only the copy engine can reach, through the driver's staging */
  KVS_MEMORY_MANAGED,  /* migrates between GPU and host: serves as either side */
};

struct kvs_region {
  uint64_t base;
  uint64_t nbytes;
  uint64_t alias;     /* address of `base` as kernels see it; equal to `base` where there is no difference, 0 if none */
  uint64_t buffer_id; /* the driver's id of the allocation: tells a reused address from the old one; 0 if unknown */
  enum kvs_memory memory;
  int device; /* ordinal the memory belongs to; -1 for host memory */
  bool seam;  /* the driver refuses one copy across this region's ends */
  bool writable;
  /* How this engine got the memory. A copy or pool never spans an allocation and other memory, even if their addresses
   * are adjacent. */
  enum kvs_origin { KVS_ORIGIN_OTHER, KVS_ORIGIN_ALLOCATED, KVS_ORIGIN_REGISTERED, KVS_ORIGIN_IMPORTED } origin;
};

/* A set of disjoint regions, sorted by base. Zero-initialised is empty. Not locked: the owner guards it. */
struct kvs_regions {
  struct kvs_region *items;
  size_t count, capacity;
  uint64_t changes; /* regions added and removed so far */
};

/* Add a region; KVS_INVALID if it overlaps one that is there (the message names both), KVS_NOMEM. */
int kvs_regions_add(struct kvs_regions *set, const struct kvs_region *region, struct kvs_error *err);

/* Remove the region that starts at `base`; false if none does. */
bool kvs_regions_remove(struct kvs_regions *set, uint64_t base, struct kvs_region *removed);

/* The region that holds `address`, or NULL. Valid until the set changes. O(log n). */
const struct kvs_region *kvs_regions_find(const struct kvs_regions *set, uint64_t address);

/* The first region with base > address, or NULL: where an unknown gap must end. */
const struct kvs_region *kvs_regions_after(const struct kvs_regions *set, uint64_t address);

/* Whether the device address of any region differs from the host address. */
bool kvs_regions_aliased(const struct kvs_regions *set);

void kvs_regions_clear(struct kvs_regions *set);

const char *kvs_memory_name(enum kvs_memory memory);

static inline bool kvs_region_holds(const struct kvs_region *region, uint64_t address) {
  return address - region->base < region->nbytes; /* wraps to a large value below base */
}

/* Whether the region is memory of this device. */
static inline bool kvs_region_is_of(const struct kvs_region *region, int ordinal) {
  return region->memory == KVS_MEMORY_DEVICE && region->device == ordinal;
}

#endif
