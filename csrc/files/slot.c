/* Slots for new blocks. In order of preference: a free slot, a slot of a new segment, the slot of the least recently
 * used block, the slot of the block that is replaced.
 *
 * An item that evicts a block (the victim) holds the victim's key until its own block is on disk, so no newer block of
 * that key can be written meanwhile. Otherwise, if that newer block were deleted before a crash, the evicted block
 * could reappear.
 *
 * An item that finds no slot waits in `starved` until another item with a key ends. A starved item holds only its key,
 * so the others make progress. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files/store.h"

static const uint64_t GROW_AGAIN_NS = 2ull * 1000 * 1000 * 1000;

bool kvs_file_free_push(struct kvs_file_store *store, uint32_t slot) {
  struct kvs_file_root *root = kvs_file_root_of(store, slot);
  if (root->nfree == root->free_capacity) {
    size_t capacity = root->free_capacity ? 2 * root->free_capacity : 1024;
    uint32_t *grown = realloc(root->free_slots, capacity * sizeof *grown);
    if (!grown) {
      store->stats.lost_slots++;
      return false;
    }
    root->free_slots = grown;
    root->free_capacity = capacity;
  }
  root->free_slots[root->nfree++] = slot;
  return true;
}

static void tell_locked(struct kvs_file_store *store, const struct kvs_file_entry *entry, uint32_t slot, bool gone) {
  struct kvs_file_notice notice = {.segment = store->segments[slot / store->geometry.slots].number,
                                   .slot = slot % store->geometry.slots,
                                   .key_nbytes = entry->key_nbytes,
                                   .gone = gone};
  memcpy(notice.key, entry->key, entry->key_nbytes);
  kvs_file_notices_publish(&store->notices, &notice);
}

void kvs_file_set_slot_locked(struct kvs_file_store *store, struct kvs_file_entry *entry, uint32_t slot) {
  const uint32_t before = entry->slot;
  const bool had = before != KVS_NO_SLOT && !entry->foreign;
  if ((before == KVS_NO_SLOT) != (slot == KVS_NO_SLOT)) kvs_file_event_locked(store, entry, slot != KVS_NO_SLOT);
  kvs_file_index_set_slot(&store->index, entry, slot);
  entry->foreign = slot != KVS_NO_SLOT && kvs_file_is_foreign(store, slot);
  const bool has = slot != KVS_NO_SLOT && !entry->foreign;
  if (has && before != KVS_NO_SLOT && !had && entry->other == KVS_NO_SLOT) entry->other = before;
  if (!store->notices.page) return;
  if (had && !has) tell_locked(store, entry, before, true);
  if (has) tell_locked(store, entry, slot, false);
}

static unsigned root_number(const struct kvs_file_store *store, uint32_t slot) {
  return store->segments[slot / store->geometry.slots].root;
}

/* A writer that stores a key again tells only the new slot, so one slot of each writer is kept. */
void kvs_file_learn_locked(struct kvs_file_store *store, struct kvs_file_entry *entry, uint32_t slot) {
  const uint32_t before = entry->slot;
  if (entry->foreign && root_number(store, before) == root_number(store, slot)) { /* a store here does not use it */
    kvs_file_set_slot_locked(store, entry, slot);
    return;
  }
  if (entry->writer || (before != KVS_NO_SLOT && !entry->foreign)) {
    entry->other = slot;
    return;
  }
  if (before != KVS_NO_SLOT) entry->other = before;
  kvs_file_set_slot_locked(store, entry, slot);
}

void kvs_file_fall_back_locked(struct kvs_file_store *store, struct kvs_file_entry *entry) {
  const uint32_t other = entry->other;
  if (entry->slot != KVS_NO_SLOT || other == KVS_NO_SLOT || entry->writer) return;
  entry->other = KVS_NO_SLOT;
  kvs_file_set_slot_locked(store, entry, other);
}

void kvs_file_wake_starved_locked(struct kvs_file_store *store) {
  struct kvs_file_item *item = store->starved.first;
  store->starved = (struct kvs_file_items){NULL, NULL};
  store->nstarved = 0;
  while (item) {
    struct kvs_file_item *next = item->next;
    kvs_file_queue_push(&store->queue, &item->request);
    item = next;
  }
}

void kvs_file_slot_give_locked(struct kvs_file_store *store, uint32_t slot) {
  (void)kvs_file_free_push(store, slot);
  kvs_file_wake_starved_locked(store);
}

/* Add a segment's slots; the lowest is used first. Releases the lock while the segment is made. */
static void grow_unlocking(struct kvs_file_store *store, unsigned at) {
  struct kvs_file_root *root = &store->roots[at];
  uint32_t number = root->next_number, slots = store->geometry.slots, place = 0;
  int fd = -1;
  store->growing = true;
  pthread_mutex_unlock(&store->lock);
  int code = kvs_file_segment_make(store, at, &number, &fd);
  pthread_mutex_lock(&store->lock);
  if (!code) code = kvs_file_segment_append(store, at, number, fd, false, &place);
  if (!code)
    for (uint32_t i = slots; i-- > 0;) (void)kvs_file_free_push(store, place * slots + i);
  store->growing = false;
  root->grow_code = code;
  root->grow_again_ns = code ? kvs_clock_ns() + GROW_AGAIN_NS : 0;
  kvs_file_wake_starved_locked(store);
}

static bool may_grow(const struct kvs_file_store *store, const struct kvs_file_root *root) {
  uint64_t files = (uint64_t)store->nown + store->stats.foreign;
  return files < store->max_segments && (!root->grow_code || kvs_clock_ns() >= root->grow_again_ns);
}

/* A free slot, of the directories in turn, so that consecutive blocks go to different disks. While another thread makes
 * a segment, of any that has one. Releases the lock while this one does. KVS_NO_SLOT: there is none. */
static uint32_t take_free_unlocking(struct kvs_file_store *store) {
  const unsigned n = store->nroots, first = store->next_root++ % n;
  for (unsigned i = 0; i < n; i++) {
    const unsigned at = (first + i) % n;
    struct kvs_file_root *root = &store->roots[at];
    while (!root->nfree && !store->growing && may_grow(store, root)) grow_unlocking(store, at);
    if (root->nfree) return root->free_slots[--root->nfree];
  }
  return KVS_NO_SLOT;
}

/* Why no directory takes another segment: 0 if the capacity is used up. */
static int grow_code(const struct kvs_file_store *store) {
  int code = 0;
  for (unsigned i = 0; !code && i < store->nroots; i++) code = store->roots[i].grow_code;
  return code;
}

static void evict_locked(struct kvs_file_item *item, struct kvs_file_entry *victim) {
  struct kvs_file_store *store = item->transfer->store;
  item->victim = victim;
  item->slot = victim->slot;
  victim->writer = true;
  kvs_file_set_slot_locked(store, victim, KVS_NO_SLOT);
  kvs_file_index_settle(&store->index, victim);
  store->stats.evicted++;
}

/* Last resort: overwrite the older block of the same key. After a crash during the write, neither block is left. */
static void take_own_locked(struct kvs_file_item *item) {
  item->slot = item->entry->slot;
  item->in_place = true;
  kvs_file_set_slot_locked(item->transfer->store, item->entry, KVS_NO_SLOT);
}

void kvs_file_slot_return_locked(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  if (item->victim) {
    kvs_file_set_slot_locked(store, item->victim, item->slot);
    store->stats.evicted--;
  } else if (item->in_place) {
    kvs_file_set_slot_locked(store, item->entry, item->slot);
  } else {
    kvs_file_slot_give_locked(store, item->slot);
  }
  item->slot = KVS_NO_SLOT;
}

/* All items with a key wait for a slot: give the items that replace a block their old slot. */
static bool reuse_own_slots_locked(struct kvs_file_store *store) {
  bool any = false;
  for (struct kvs_file_item *item = store->starved.first; item; item = item->next) {
    if (item->entry->slot == KVS_NO_SLOT || item->entry->foreign) continue;
    take_own_locked(item);
    any = true;
  }
  return any;
}

static enum kvs_file_slot_answer starve_locked(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  item->progress = KVS_FILE_PENDING;
  item->next = NULL;
  *(store->starved.last ? &store->starved.last->next : &store->starved.first) = item;
  store->starved.last = item;
  store->nstarved++;
  return KVS_FILE_WAIT;
}

enum kvs_file_slot_answer kvs_file_slot_take_locked(struct kvs_file_item *item, int *code) {
  struct kvs_file_store *store = item->transfer->store;
  *code = 0;
  if (item->slot != KVS_NO_SLOT) return KVS_FILE_SLOT; /* given by reuse_own_slots_locked() */
  const uint32_t slot = take_free_unlocking(store);
  if (slot != KVS_NO_SLOT) {
    item->slot = slot;
  } else if (!store->growing && store->index.oldest) {
    evict_locked(item, store->index.oldest);
  } else if (store->growing || store->granted > store->nstarved + 1) {
    return starve_locked(item); /* the end of another item wakes this one */
  } else if (item->entry->slot != KVS_NO_SLOT && !item->entry->foreign) {
    take_own_locked(item);
  } else if (reuse_own_slots_locked(store)) {
    (void)starve_locked(item);
    kvs_file_wake_starved_locked(store);
    return KVS_FILE_WAIT;
  } else {
    *code = grow_code(store);
    return KVS_FILE_NONE_LEFT;
  }
  return KVS_FILE_SLOT;
}
