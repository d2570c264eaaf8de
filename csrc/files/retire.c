/* See files/retire.h.
 *
 * The file is unlinked first, then its blocks are evicted: after a crash none of them can come back that was deleted
 * meanwhile. No segment is chosen that has the only newer block of a key of which an older one could not be erased.
 *
 * A block is evicted when no store or delete holds or awaits its key. Until all blocks are evicted and no transfer uses
 * the segment, it stays open, and the sweep is repeated. A failed store may give an evicted block its slot back:
 * store->came_back counts that, so that a sweep that found no block is known to hold until the end. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "files/checks.h"
#include "files/descriptors.h"
#include "files/retire.h"
#include "files/segment.h"
#include "files/slot.h"

enum { BUCKETS = 16384, OLDEST = 65536 }; /* of the index, that are looked at in one hold of the lock */

static struct kvs_file_segment *segment_of(const struct kvs_file_store *store, uint32_t slot) {
  return slot == KVS_NO_SLOT ? NULL : &store->segments[slot / store->geometry.slots];
}

static bool is_removed(const struct kvs_file_store *store, uint32_t slot) {
  const struct kvs_file_segment *segment = segment_of(store, slot);
  return segment && segment->removed;
}

/* -- sweeping ------------------------------------------------------------------------------------------------------ */

static bool may_evict(const struct kvs_file_entry *entry) {
  return !entry->writer && !entry->first && !entry->pins && entry->stale == KVS_NO_SLOT;
}

/* Older blocks of the key in files that are gone cannot come back. */
static void forget_stale(const struct kvs_file_store *store, struct kvs_file_entry *entry) {
  for (struct kvs_file_stale **at = &entry->more, *stale; (stale = *at) != NULL;) {
    const bool removed = is_removed(store, stale->slot);
    if (removed) *at = stale->next;
    if (removed) free(stale);
    if (!removed) at = &stale->next;
  }
  if (is_removed(store, entry->stale)) kvs_file_index_drop_stale(entry);
}

/* May free the entry. */
static void sweep_entry_locked(struct kvs_file_store *store, struct kvs_file_entry *entry) {
  struct kvs_file_segment *segment = segment_of(store, entry->slot);
  if (is_removed(store, entry->other)) entry->other = KVS_NO_SLOT;
  if (is_removed(store, entry->leaving)) entry->leaving = KVS_NO_SLOT;
  forget_stale(store, entry);
  const bool own = segment && segment->leaving, evict = own && may_evict(entry);
  if (own && !evict) segment->kept++;
  store->stats.evicted += evict;
  if (evict || (segment && segment->removed)) kvs_file_set_slot_locked(store, entry, KVS_NO_SLOT);
  kvs_file_fall_back_locked(store, entry);
  kvs_file_index_settle(&store->index, entry);
}

/* Over all entries, some buckets in each hold of the lock; from the beginning if the index has grown meanwhile. */
static void for_entries(struct kvs_file_store *store, void (*visit)(struct kvs_file_store *, struct kvs_file_entry *)) {
  struct kvs_file_index *index = &store->index;
  size_t at = 0, nbuckets = 0;
  do {
    pthread_mutex_lock(&store->lock);
    if (nbuckets != index->nbuckets) at = 0;
    nbuckets = index->nbuckets;
    for (size_t end = at + BUCKETS; at < end && at < nbuckets; at++)
      for (struct kvs_file_entry *entry = index->buckets[at], *next; entry; entry = next) {
        next = entry->next;
        visit(store, entry);
      }
    pthread_mutex_unlock(&store->lock);
  } while (at < nbuckets);
}

void kvs_file_sweep(struct kvs_file_store *store) { for_entries(store, sweep_entry_locked); }

/* -- choosing ------------------------------------------------------------------------------------------------------ */

static void note_kept_locked(struct kvs_file_store *store, struct kvs_file_entry *entry) {
  if (entry->slot == KVS_NO_SLOT || entry->foreign) return;
  segment_of(store, entry->slot)->kept += entry->pins || entry->stale != KVS_NO_SLOT;
}

/* Of each segment the slots that are free or hold one of the least recently used blocks; then the number of segments.
 */
static uint32_t *count_cold_locked(struct kvs_file_store *store, uint64_t oldest) {
  uint32_t *cold = calloc((size_t)store->segments_capacity + 1, sizeof *cold);
  if (!cold) return NULL;
  cold[store->segments_capacity] = store->nsegments;
  for (unsigned i = 0; i < store->nroots; i++)
    for (size_t k = 0; k < store->roots[i].nfree; k++) cold[store->roots[i].free_slots[k] / store->geometry.slots]++;
  const struct kvs_file_entry *entry = store->index.oldest;
  for (; entry && oldest > 0; entry = entry->newer, oldest--) cold[entry->slot / store->geometry.slots]++;
  return cold;
}

static bool may_leave(const struct kvs_file_store *store, const struct kvs_file_segment *segment) {
  return segment->root < store->nroots && !segment->gone && !segment->removed && !segment->leaving && !segment->kept;
}

/* NULL: none may leave. */
static struct kvs_file_segment *coldest_locked(struct kvs_file_store *store, const uint32_t *cold) {
  struct kvs_file_segment *found = NULL;
  for (uint32_t i = 0; i < cold[store->segments_capacity]; i++) {
    struct kvs_file_segment *segment = &store->segments[i];
    if (may_leave(store, segment) && (!found || cold[i] > cold[found - store->segments])) found = segment;
  }
  return found;
}

/* The first nfailed of the free slots are those that could not be written. */
static void take_free_slots_locked(struct kvs_file_store *store) {
  for (unsigned i = 0; i < store->nroots; i++) {
    struct kvs_file_root *root = &store->roots[i];
    size_t n = 0, nfailed = 0;
    for (size_t k = 0; k < root->nfree; k++) {
      if (segment_of(store, root->free_slots[k])->leaving) continue;
      nfailed += k < root->nfailed;
      root->free_slots[n++] = root->free_slots[k];
    }
    root->nfree = n;
    root->nfailed = nfailed;
  }
}

static void forget_kept(struct kvs_file_store *store) {
  pthread_mutex_lock(&store->lock);
  for (uint32_t i = 0; i < store->nsegments; i++) store->segments[i].kept = 0;
  pthread_mutex_unlock(&store->lock);
}

/* Unlink the coldest segment. False: none may leave, or its file cannot be unlinked. */
static bool retire_coldest(struct kvs_file_store *store, const uint32_t *cold) {
  char name[32];
  pthread_mutex_lock(&store->lock);
  struct kvs_file_segment *segment = coldest_locked(store, cold);
  if (segment) segment->leaving = true;
  if (segment) take_free_slots_locked(store);
  pthread_mutex_unlock(&store->lock);
  if (!segment) return false;
  kvs_file_segment_name(segment->number, name);
  const bool gone = unlinkat(store->roots[segment->root].folder, name, 0) == 0 || errno == ENOENT;
  pthread_mutex_lock(&store->lock);
  segment->leaving = gone; /* if it stays, its free slots are used again after the next open */
  store->stats.retired_segments += gone;
  pthread_mutex_unlock(&store->lock);
  return gone;
}

uint32_t kvs_file_retire(struct kvs_file_store *store, uint32_t count) {
  const uint64_t slots = (uint64_t)count * store->geometry.slots;
  uint32_t gone = 0;
  forget_kept(store);
  for_entries(store, note_kept_locked);
  pthread_mutex_lock(&store->lock);
  uint32_t *cold = count_cold_locked(store, slots < OLDEST ? slots : OLDEST);
  pthread_mutex_unlock(&store->lock);
  while (cold && gone < count && retire_coldest(store, cold)) gone++;
  free(cold);
  return gone;
}

/* -- leaving ------------------------------------------------------------------------------------------------------- */

/* Until the last sweep the segment stays in the list: it forgets the slots that hold older blocks of their keys. */
static bool ends_now(struct kvs_file_store *store, struct kvs_file_segment *segment, uint64_t came_back) {
  pthread_mutex_lock(&store->lock);
  const bool unused = !segment->kept && came_back == store->came_back && !kvs_file_in_use_locked(store, segment);
  segment->removed |= unused;
  pthread_mutex_unlock(&store->lock);
  return unused;
}

static void close_left(struct kvs_file_store *store) {
  for (uint32_t i = 0; i < store->nsegments; i++) {
    struct kvs_file_segment *segment = &store->segments[i];
    if (!segment->leaving || !segment->removed) continue;
    pthread_mutex_lock(&store->lock);
    const int fd = kvs_file_descriptor_take_locked(store, i);
    segment->gone = true;
    segment->leaving = false;
    store->nremoved++;
    store->nown--;
    pthread_mutex_unlock(&store->lock);
    if (fd >= 0) close(fd);
  }
}

uint32_t kvs_file_retire_step(struct kvs_file_store *store) {
  uint32_t left = 0, gone = 0;
  forget_kept(store);
  pthread_mutex_lock(&store->lock);
  const uint64_t came_back = store->came_back;
  const uint32_t nsegments = store->nsegments;
  pthread_mutex_unlock(&store->lock);
  kvs_file_sweep(store);
  for (uint32_t i = 0; i < nsegments; i++) {
    struct kvs_file_segment *segment = &store->segments[i];
    if (!segment->leaving) continue;
    const bool ended = ends_now(store, segment, came_back);
    gone += ended;
    left += !ended;
  }
  if (!gone) return left;
  kvs_file_sweep(store);
  close_left(store);
  return left;
}
