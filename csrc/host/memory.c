/* Memory of a host device.
 *
 * Each allocation is a mapping followed by a guard page, so that a copy past the end faults, and so does a use after
 * free. New memory starts with 0xCD bytes, since GPU memory is not zeroed either; only the first 64 KiB are filled, to
 * keep large allocations cheap.
 *
 * Two sets of regions describe the memory. `known` answers pointer queries, to the byte: allocations and registrations.
 * `owned` has the pages of allocations including the guard: it tells an allocation from a registration, and the padding
 * behind an allocation from ordinary memory. Other memory of the process is looked up in the kernel's list of mappings
 * and clipped at known regions. */
#include "host/memory.h"

#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/maps.h"
#include "host/range.h"

#define HUGE_PAGE_NBYTES ((size_t)2 << 20)
#define POISON_NBYTES ((size_t)64 << 10)
#define POISON 0xCD

int kvs_host_memory_init(struct kvs_host_memory *memory, int ordinal, uint64_t limit, struct kvs_error *err) {
  memset(memory, 0, sizeof *memory);
  memory->ordinal = ordinal;
  memory->limit = limit;
  memory->next_buffer_id = 1;
  int status = kvs_host_arena_init(&memory->arena, err);
  if (status) return status;
  if (pthread_rwlock_init(&memory->lock, NULL) == 0) return KVS_OK;
  kvs_host_arena_destroy(&memory->arena);
  return kvs_fail(err, KVS_NOMEM, "cannot make a lock");
}

static void unmap(struct kvs_host_memory *memory, const struct kvs_region *pages) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  kvs_host_arena_unmap(&memory->arena, (void *)(uintptr_t)pages->base, (size_t)pages->nbytes - page, pages->alias);
}

/* -- the process's devices ------------------------------------------------------------------------------------- */

static pthread_rwlock_t list_lock = PTHREAD_RWLOCK_INITIALIZER; /* lock order: before the lock of any memory */
static struct kvs_host_memory *list;                            /* guarded by list_lock */

/* Devices of the parent are not available in the child, and another thread may hold their locks. */
static void forked(void) {
  list = NULL;
  pthread_rwlock_init(&list_lock, NULL);
}

void kvs_host_memory_list(struct kvs_host_memory *memory) {
  static struct kvs_fork_guard guard = {.in_child = forked};
  kvs_fork_watch(&guard);
  pthread_rwlock_wrlock(&list_lock);
  memory->listed = true;
  memory->next = list;
  list = memory;
  pthread_rwlock_unlock(&list_lock);
}

static void unlist(struct kvs_host_memory *memory) {
  if (!memory->listed) return;
  pthread_rwlock_wrlock(&list_lock);
  struct kvs_host_memory **at = &list;
  while (*at && *at != memory) at = &(*at)->next;
  if (*at) *at = memory->next;
  pthread_rwlock_unlock(&list_lock);
}

/* Look up memory of other devices. */
static bool query_others(const struct kvs_host_memory *memory, uint64_t ptr, struct kvs_region *region) {
  bool found = false;
  if (!memory->listed) return false;
  pthread_rwlock_rdlock(&list_lock);
  for (struct kvs_host_memory *other = list; other && !found; other = other->next) {
    if (other->ordinal == memory->ordinal) continue;
    pthread_rwlock_rdlock(&other->lock);
    const struct kvs_region *known = kvs_regions_find(&other->known, ptr);
    found = known != NULL;
    if (found) *region = *known;
    pthread_rwlock_unlock(&other->lock);
  }
  pthread_rwlock_unlock(&list_lock);
  return found;
}

bool kvs_host_memory_reaches(const struct kvs_host_memory *memory, const struct kvs_region *region) {
  if (region->memory != KVS_MEMORY_DEVICE || region->device == memory->ordinal) return true;
  return region->device >= 64 || !(atomic_load(&memory->unreachable_peers) >> region->device & 1);
}

void kvs_host_memory_destroy(struct kvs_host_memory *memory) {
  unlist(memory);
  for (size_t i = 0; i < memory->owned.count; i++) unmap(memory, &memory->owned.items[i]);
  kvs_host_arena_destroy(&memory->arena);
  kvs_host_chunks_destroy(memory);
  kvs_regions_clear(&memory->owned);
  kvs_regions_clear(&memory->known);
  pthread_rwlock_destroy(&memory->lock);
}

/* -- allocation ------------------------------------------------------------------------------------------------ */

static const char *alloc_name(enum kvs_memory kind) { return kind == KVS_MEMORY_DEVICE ? "alloc" : "host_alloc"; }

/* The last page of `nbytes` is the guard. Only device memory comes from the arena, since private pages are cheaper. */
static void *map_pages(struct kvs_host_memory *memory, enum kvs_memory kind, size_t nbytes, size_t page,
                       uint64_t *offset) {
  if (kind == KVS_MEMORY_DEVICE) return kvs_host_arena_map(&memory->arena, nbytes - page, offset);
  *offset = KVS_HOST_PRIVATE;
  char *pages = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return NULL;
  mprotect(pages + nbytes - page, page, PROT_NONE);
  if (nbytes >= HUGE_PAGE_NBYTES) madvise(pages, nbytes - page, MADV_HUGEPAGE);
  return pages;
}

/* Add an allocation to both sets, or to neither. */
static int add_locked(struct kvs_host_memory *memory, const struct kvs_region *region, const struct kvs_region *pages,
                      struct kvs_error *err) {
  int status = kvs_regions_add(&memory->owned, pages, err);
  if (status) return status;
  status = kvs_regions_add(&memory->known, region, err);
  if (status) kvs_regions_remove(&memory->owned, pages->base, NULL);
  return status;
}

int kvs_host_memory_alloc(struct kvs_host_memory *memory, enum kvs_memory kind, size_t nbytes, uint64_t *ptr,
                          struct kvs_error *err) {
  const char *name = alloc_name(kind);
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  uint64_t charge = kind == KVS_MEMORY_DEVICE ? nbytes : 0, offset = KVS_HOST_PRIVATE;
  void *pages = NULL;
  int status = KVS_OK;
  if (nbytes == 0) return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, name, "0 bytes");
  size_t mapped = (nbytes + page - 1) / page * page + page;

  pthread_rwlock_wrlock(&memory->lock);
  if (nbytes <= memory->limit && charge <= memory->limit - memory->device_nbytes)
    pages = map_pages(memory, kind, mapped, page, &offset);
  if (pages) {
    bool device = kind == KVS_MEMORY_DEVICE;
    uint64_t base = (uint64_t)(uintptr_t)pages;
    struct kvs_region region = {.base = base, .nbytes = nbytes, .alias = base, .memory = kind, .seam = true};
    struct kvs_region all = {.base = base, .nbytes = mapped, .alias = offset, .memory = kind};
    region.device = device ? memory->ordinal : -1;
    region.writable = true;
    region.buffer_id = memory->next_buffer_id++;
    status = add_locked(memory, &region, &all, err);
    if (status)
      unmap(memory, &all);
    else
      memory->device_nbytes += charge;
  }
  pthread_rwlock_unlock(&memory->lock);
  if (!pages)
    return kvs_fail_driver(err, KVS_NOMEM, KVS_DRIVER_OUT_OF_MEMORY, name, "%zu bytes are not to be had", nbytes);
  if (status) return status;
  memset(pages, POISON, nbytes < POISON_NBYTES ? nbytes : POISON_NBYTES);
  *ptr = (uint64_t)(uintptr_t)pages;
  return KVS_OK;
}

int kvs_host_memory_free(struct kvs_host_memory *memory, enum kvs_memory kind, uint64_t ptr, struct kvs_error *err) {
  struct kvs_region region, pages;
  pthread_rwlock_wrlock(&memory->lock);
  const struct kvs_region *owned = kvs_regions_find(&memory->owned, ptr);
  bool found = owned && owned->base == ptr && owned->memory == kind && owned->origin == KVS_ORIGIN_OTHER;
  if (found) {
    kvs_regions_remove(&memory->known, ptr, &region);
    kvs_regions_remove(&memory->owned, ptr, &pages);
    if (kind == KVS_MEMORY_DEVICE) memory->device_nbytes -= region.nbytes;
    unmap(memory, &pages);
  }
  pthread_rwlock_unlock(&memory->lock);
  if (found) return KVS_OK;
  return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, kind == KVS_MEMORY_DEVICE ? "free" : "host_free",
                         "0x%" PRIx64 " is not the start of such an allocation", ptr);
}

/* -- sharing --------------------------------------------------------------------------------------------------- */

int kvs_host_memory_share(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_handle *handle,
                          struct kvs_error *err) {
  struct kvs_region region = {.nbytes = 0};
  uint64_t offset = KVS_HOST_PRIVATE;
  pthread_rwlock_rdlock(&memory->lock);
  const struct kvs_region *known = kvs_regions_find(&memory->known, ptr);
  const struct kvs_region *owned = kvs_regions_find(&memory->owned, ptr);
  bool ours = known && owned && known->memory == KVS_MEMORY_DEVICE && owned->origin == KVS_ORIGIN_OTHER;
  if (ours) region = *known, offset = owned->alias;
  pthread_rwlock_unlock(&memory->lock);
  if (!ours)
    return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, "memory_share",
                           "0x%" PRIx64 " is no device memory that was allocated here", ptr);
  return kvs_host_arena_share(&memory->arena, offset, region.nbytes, region.buffer_id, handle, err);
}

int kvs_host_memory_open(struct kvs_host_memory *memory, const struct kvs_handle *handle, uint64_t nbytes,
                         uint64_t *ptr, struct kvs_error *err) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  uint64_t there = 0;
  void *pages = NULL;
  int status = kvs_host_arena_open(handle, "memory_open", &pages, &there, err);
  if (status) return status;
  if (there < nbytes) {
    kvs_host_arena_close(pages, there);
    return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, "memory_open",
                           "the allocation has %" PRIu64 " bytes, not %" PRIu64, there, nbytes);
  }
  nbytes = there; /* a driver maps the whole allocation */
  uint64_t base = (uint64_t)(uintptr_t)pages;
  struct kvs_region region = {.base = base, .nbytes = nbytes, .alias = base, .memory = KVS_MEMORY_DEVICE, .seam = true};
  struct kvs_region all = {.base = base, .nbytes = (nbytes + page - 1) / page * page + page, .alias = KVS_HOST_PRIVATE};
  region.device = memory->ordinal;
  region.writable = true;
  all.origin = KVS_ORIGIN_IMPORTED; /* an imported mapping cannot be freed, and unmapping it must not punch a hole */
  pthread_rwlock_wrlock(&memory->lock);
  region.buffer_id = memory->next_buffer_id++;
  status = add_locked(memory, &region, &all, err);
  pthread_rwlock_unlock(&memory->lock);
  if (status) kvs_host_arena_close(pages, nbytes);
  if (!status) *ptr = base;
  return status;
}

int kvs_host_memory_close(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_error *err) {
  struct kvs_region pages;
  pthread_rwlock_wrlock(&memory->lock);
  const struct kvs_region *owned = kvs_regions_find(&memory->owned, ptr);
  bool found = owned && owned->base == ptr && owned->origin == KVS_ORIGIN_IMPORTED;
  if (found) {
    kvs_regions_remove(&memory->known, ptr, NULL);
    kvs_regions_remove(&memory->owned, ptr, &pages);
    unmap(memory, &pages);
  }
  pthread_rwlock_unlock(&memory->lock);
  if (found) return KVS_OK;
  return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, "memory_close", "nothing was opened at 0x%" PRIx64,
                         ptr);
}

/* -- look-up --------------------------------------------------------------------------------------------------- */

static bool query_ordinary_locked(const struct kvs_host_memory *memory, uint64_t ptr, struct kvs_region *region) {
  struct kvs_mapping mapping;
  if (kvs_regions_find(&memory->owned, ptr)) return false; /* padding or guard of an allocation */
  if (!kvs_mapping_find(ptr, &mapping) || !mapping.readable) return false;
  uint64_t start = mapping.base, end = mapping.base + mapping.nbytes;
  const struct kvs_regions *sets[] = {&memory->known, &memory->owned};
  for (size_t i = 0; i < 2; i++) {
    const struct kvs_regions *set = sets[i];
    const struct kvs_region *after = kvs_regions_after(set, ptr);
    size_t below = after ? (size_t)(after - set->items) : set->count;
    if (after && after->base < end) end = after->base;
    if (below == 0) continue;
    const struct kvs_region *before = &set->items[below - 1];
    if (before->base + before->nbytes > start) start = before->base + before->nbytes;
  }
  *region = (struct kvs_region){.base = start,
                                .nbytes = end - start,
                                .alias = start,
                                .memory = KVS_MEMORY_ORDINARY,
                                .device = -1,
                                .writable = mapping.writable};
  return true;
}

static bool query_locked(const struct kvs_host_memory *memory, uint64_t ptr, struct kvs_region *region) {
  const struct kvs_region *known = kvs_regions_find(&memory->known, ptr);
  if (!known) return query_ordinary_locked(memory, ptr, region);
  *region = *known;
  return true;
}

int kvs_host_memory_query(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_region *region,
                          struct kvs_error *err) {
  pthread_rwlock_rdlock(&memory->lock);
  const struct kvs_region *known = kvs_regions_find(&memory->known, ptr);
  if (known) *region = *known;
  pthread_rwlock_unlock(&memory->lock);
  bool found = known || query_others(memory, ptr, region); /* never holds the locks of two memories */
  if (!found) {
    pthread_rwlock_rdlock(&memory->lock);
    found = query_ordinary_locked(memory, ptr, region);
    pthread_rwlock_unlock(&memory->lock);
  }
  return found ? KVS_OK : kvs_fail(err, KVS_INVALID, "address 0x%" PRIx64 " is not mapped", ptr);
}

/* -- registration ---------------------------------------------------------------------------------------------- */

/* Register [ptr, ptr + nbytes): 0 or the driver's error code. */
static int register_locked(struct kvs_host_memory *memory, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  struct kvs_region pinned = {.base = ptr, .nbytes = nbytes, .alias = ptr, .memory = KVS_MEMORY_PINNED, .device = -1};
  struct kvs_region part;
  pinned.seam = true;
  pinned.writable = true;
  for (uint64_t at = ptr; at < ptr + nbytes; at = part.base + part.nbytes) {
    if (!query_locked(memory, at, &part)) return KVS_DRIVER_INVALID_VALUE;
    if (part.memory != KVS_MEMORY_ORDINARY) /* the driver uses another code for its own allocations */
      return kvs_regions_find(&memory->owned, at) ? KVS_DRIVER_INVALID_VALUE : KVS_DRIVER_ALREADY_REGISTERED;
    pinned.writable = pinned.writable && part.writable;
  }
  pinned.buffer_id = memory->next_buffer_id++;
  return kvs_regions_add(&memory->known, &pinned, err) ? KVS_DRIVER_OUT_OF_MEMORY : 0;
}

int kvs_host_memory_register(struct kvs_host_memory *memory, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  if (ptr == 0 || nbytes == 0 || ptr + nbytes < ptr)
    return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, "host_register",
                           "%zu bytes at 0x%" PRIx64 " are no range", nbytes, ptr);
  pthread_rwlock_wrlock(&memory->lock);
  int code = register_locked(memory, ptr, nbytes, err);
  pthread_rwlock_unlock(&memory->lock);
  if (code == 0) return KVS_OK;
  return kvs_fail_driver(err, code == KVS_DRIVER_OUT_OF_MEMORY ? KVS_NOMEM : KVS_REFUSED, code, "host_register",
                         "[0x%" PRIx64 ", 0x%" PRIx64 ") %s", ptr, ptr + nbytes,
                         code == KVS_DRIVER_ALREADY_REGISTERED ? "overlaps memory that is pinned or allocated already"
                         : code == KVS_DRIVER_OUT_OF_MEMORY    ? "cannot be noted"
                                                               : "is not mapped ordinary memory throughout");
}

int kvs_host_memory_unregister(struct kvs_host_memory *memory, uint64_t ptr, struct kvs_error *err) {
  pthread_rwlock_wrlock(&memory->lock);
  bool found = !kvs_regions_find(&memory->owned, ptr) && kvs_regions_remove(&memory->known, ptr, NULL);
  pthread_rwlock_unlock(&memory->lock);
  if (found) return KVS_OK;
  return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_NOT_REGISTERED, "host_unregister",
                         "no registration begins at 0x%" PRIx64, ptr);
}

/* -- views ----------------------------------------------------------------------------------------------------- */

static const struct kvs_region *view_region(struct kvs_host_view *view, enum kvs_host_use use, uint64_t address) {
  struct kvs_region *last = &view->last[use];
  struct kvs_error ignored;
  if (kvs_region_holds(last, address)) return last;
  const struct kvs_region *met = kvs_regions_find(&view->met, address);
  if (met) {
    *last = *met;
    return last;
  }
  if (kvs_host_memory_query(view->memory, address, last, &ignored)) {
    last->nbytes = 0;
    return NULL;
  }
  /* Overlapping regions mean that mappings have changed: drop the cached regions, which only save look-ups. */
  if (kvs_regions_add(&view->met, last, &ignored)) kvs_regions_clear(&view->met);
  return last;
}

const char *kvs_host_view_refuse(struct kvs_host_view *view, enum kvs_host_use use, uint64_t address, uint64_t nbytes,
                                 bool seams) {
  uint64_t end = address + nbytes;
  if (nbytes == 0) return NULL;
  const struct kvs_region *region = view_region(view, use, address);
  if (end < address || !region) return "is not mapped";
  for (;;) {
    uint64_t region_end = region->base + region->nbytes;
    if (use == KVS_HOST_WRITE && !region->writable) return "is read-only";
    if (view->kernel && !kvs_host_memory_reaches(view->memory, region)) return "is out of reach";
    if (end <= region_end) return NULL;
    if (seams && region->seam) return "crosses the end of one allocation or registration";
    region = view_region(view, use, region_end);
    if (!region) return "is not mapped throughout";
    if (seams && region->seam) return "runs into an allocation or registration";
  }
}

void kvs_host_view_clear(struct kvs_host_view *view) { kvs_regions_clear(&view->met); }
