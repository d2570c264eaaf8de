/* Slots for new blocks. In order of preference: a free slot, a slot of a new segment, the slot of the least recently
 * used block, the slot of the block that is replaced.
 *
 * An item that evicts a block (the victim) holds the victim's key until its own block is on disk, so no newer block of
 * that key can be written meanwhile. Otherwise, if that newer block were deleted before a crash, the evicted block
 * could reappear.
 *
 * An item that finds no slot waits in `starved` until another item with a key ends and a slot can be found. A starved
 * item holds only its key, so the others make progress. The oldest is woken first, and then goes before loads.
 *
 * Loads that never pause may keep all blocks in use. So while items starve, one block that is in use by loads only is
 * claimed: further loads of its key wait, and when the last earlier load has ended, the oldest starved item evicts the
 * block. The waiting loads then find the key missing. */
#include "files/slot.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/wait.h"
#include "files/bound.h"
#include "files/segment.h"
#include "files/state.h"

static const uint64_t GROW_AGAIN_NS = 2ull * 1000 * 1000 * 1000, WRITE_AGAIN_NS = 2ull * 1000 * 1000 * 1000;
enum {
  FAILURES = 8,  /* writes of a directory that failed in a row: it is left alone for a while */
  VICTIMS = 256, /* least recently used blocks among which one is looked for whose directory takes writes */
  CLAIMS = 4096, /* items of loads among which a block to claim is looked for */
};

bool kvs_file_free_push(struct kvs_file_store *store, uint32_t slot) {
  struct kvs_file_root *root = kvs_file_root_of(store, slot);
  if (store->segments[slot / store->geometry.slots].leaving) return false;
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
  store->came_back += slot != KVS_NO_SLOT && store->segments[slot / store->geometry.slots].leaving;
  entry->foreign = slot != KVS_NO_SLOT && kvs_file_is_foreign(store, slot);
  const bool has = slot != KVS_NO_SLOT && !entry->foreign;
  if (has && before != KVS_NO_SLOT && !had && entry->other == KVS_NO_SLOT) entry->other = before;
  if (store->notices.fd < 0) return;
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

/* The oldest one leaves the list. Without starved items nothing is claimed: the loads that wait for a claimed key get
 * it when one of the earlier loads ends. */
static void wake_oldest_locked(struct kvs_file_store *store) {
  struct kvs_file_item *item = store->starved.first;
  store->starved.first = item->next;
  store->nstarved--;
  if (!item->next) {
    store->starved.last = NULL;
    store->claimed = NULL;
  }
  item->request.rank = KVS_FILE_FIRST;
  kvs_file_queue_push(&store->queue, &item->request);
}

void kvs_file_wake_starved_locked(struct kvs_file_store *store) {
  for (size_t n = store->nstarved; n > 0; n--) wake_oldest_locked(store);
}

void kvs_file_slot_give_locked(struct kvs_file_store *store, uint32_t slot) {
  if (kvs_file_free_push(store, slot)) kvs_file_wake_starved_one_locked(store);
}

/* -- failed writes ------------------------------------------------------------------------------------------------- */

/* A slot that could not be written is used again when no other is free: it may be a bad part of the disk. */
static void give_failed_locked(struct kvs_file_store *store, uint32_t slot) {
  struct kvs_file_root *root = kvs_file_root_of(store, slot);
  if (!kvs_file_free_push(store, slot)) return;
  root->free_slots[root->nfree - 1] = root->free_slots[root->nfailed];
  root->free_slots[root->nfailed++] = slot;
}

static uint32_t take_failed_locked(struct kvs_file_root *root) {
  const uint32_t slot = root->free_slots[--root->nfailed];
  root->free_slots[root->nfailed] = root->free_slots[--root->nfree];
  return slot;
}

void kvs_file_slot_failed_locked(struct kvs_file_store *store, uint32_t slot, bool erased, int code) {
  struct kvs_file_root *root = kvs_file_root_of(store, slot);
  if (erased) give_failed_locked(store, slot);
  root->write_code = code;
  root->nfailures++;
  root->write_again_ns = kvs_clock_ns() + WRITE_AGAIN_NS;
  kvs_file_wake_starved_locked(store);
}

/* Why the directory takes no block now: 0 or an errno. After some failures in a row one write is tried from time to
 * time, so that a disk that takes no writes does not cost the blocks on it. */
static int refusal_of(const struct kvs_file_root *root) {
  if (root->gone_code) return root->gone_code;
  return root->nfailures >= FAILURES && kvs_clock_ns() < root->write_again_ns ? root->write_code : 0;
}

/* -- finding a slot ------------------------------------------------------------------------------------------------ */

/* Add a segment's slots; the lowest is used first. */
void kvs_file_grown_locked(struct kvs_file_store *store, unsigned at, int code, uint32_t number, int fd) {
  struct kvs_file_root *root = &store->roots[at];
  uint32_t slots = store->geometry.slots, place = 0;
  struct stat info = {0};
  if (!code && fstat(fd, &info)) code = errno;
  if (!code) code = kvs_file_segment_append(store, at, number, fd, info.st_ino, false, &place);
  if (!code)
    for (uint32_t i = slots; i-- > 0;) (void)kvs_file_free_push(store, place * slots + i);
  if (code && fd >= 0) close(fd);
  store->growing = false;
  root->grow_code = code;
  root->grow_again_ns = code ? kvs_clock_ns() + GROW_AGAIN_NS : 0;
  kvs_file_wake_starved_locked(store);
}

void kvs_file_not_grown_locked(struct kvs_file_store *store, unsigned at, uint64_t again_ns) {
  store->growing = false;
  store->roots[at].grow_code = 0;
  store->roots[at].grow_again_ns = again_ns;
  kvs_file_wake_starved_locked(store);
}

/* Releases the lock while the segment is made, if this thread makes it. */
static void grow_unlocking(struct kvs_file_store *store, unsigned at) {
  uint32_t number = store->roots[at].next_number;
  int fd = -1;
  store->growing = true;
  if (kvs_file_bound_ask_locked(store)) return;
  pthread_mutex_unlock(&store->lock);
  int code = kvs_file_segment_make(store, at, &number, &fd);
  pthread_mutex_lock(&store->lock);
  kvs_file_grown_locked(store, at, code, number, fd);
}

static bool may_grow(const struct kvs_file_store *store, const struct kvs_file_root *root) {
  uint64_t files = (uint64_t)store->nown + store->stats.foreign;
  return files < store->max_segments && kvs_clock_ns() >= root->grow_again_ns;
}

/* A free slot, of the directories in turn, so that consecutive blocks go to different disks. While another thread makes
 * a segment, of any that has one. Releases the lock while this one does. KVS_NO_SLOT: there is none. */
static uint32_t take_free_unlocking(struct kvs_file_store *store) {
  const unsigned n = store->nroots, first = store->next_root++ % n;
  for (unsigned i = 0; i < n; i++) {
    const unsigned at = (first + i) % n;
    struct kvs_file_root *root = &store->roots[at];
    if (refusal_of(root)) continue;
    if (root->nfailures >= FAILURES && root->nfailed) return take_failed_locked(root);
    while (root->nfree == root->nfailed && !store->growing && may_grow(store, root)) grow_unlocking(store, at);
    if (root->nfree > root->nfailed) return root->free_slots[--root->nfree];
  }
  return KVS_NO_SLOT;
}

static uint32_t take_any_failed_locked(struct kvs_file_store *store) {
  for (unsigned i = 0; i < store->nroots; i++)
    if (store->roots[i].nfailed && !refusal_of(&store->roots[i])) return take_failed_locked(&store->roots[i]);
  return KVS_NO_SLOT;
}

/* Why no directory takes another segment: 0 if the capacity is used up. */
static int grow_code(const struct kvs_file_store *store) {
  int code = 0;
  for (unsigned i = 0; !code && i < store->nroots; i++) code = store->roots[i].grow_code;
  return code;
}

/* An errno: no directory takes a block, for another reason than its room. 0: older blocks may make way. */
static int refusal_of_all(const struct kvs_file_store *store) {
  const bool room = (uint64_t)store->nown + store->stats.foreign < store->max_segments;
  int code = 0;
  for (unsigned i = 0; i < store->nroots; i++) {
    const struct kvs_file_root *root = &store->roots[i];
    const bool full = root->grow_code == ENOSPC || root->grow_code == EDQUOT;
    const int why = refusal_of(root);
    code = why ? why : room && !full ? root->grow_code : 0;
    if (!code) return 0;
  }
  return code;
}

/* Blocks of a segment that is being removed are lost anyway, and their slots are not used again. */
static void evict_leaving_locked(struct kvs_file_store *store) {
  struct kvs_file_entry *entry;
  while ((entry = store->index.oldest) && store->segments[entry->slot / store->geometry.slots].leaving) {
    kvs_file_set_slot_locked(store, entry, KVS_NO_SLOT);
    kvs_file_fall_back_locked(store, entry);
    kvs_file_index_settle(&store->index, entry);
    store->stats.evicted++;
  }
}

/* NULL: no block can make way. */
static struct kvs_file_entry *find_victim_locked(struct kvs_file_store *store) {
  evict_leaving_locked(store);
  struct kvs_file_entry *entry = store->index.oldest;
  for (int i = 0; entry && i < VICTIMS && refusal_of(kvs_file_root_of(store, entry->slot)); i++) entry = entry->newer;
  return entry;
}

static void evict_locked(struct kvs_file_item *item, struct kvs_file_entry *victim) {
  struct kvs_file_store *store = item->transfer->store;
  item->victim = victim;
  item->slot = victim->slot;
  item->epoch = store->epochs.now;
  victim->writer = true;
  kvs_file_set_slot_locked(store, victim, KVS_NO_SLOT);
  kvs_file_index_settle(&store->index, victim);
  store->stats.evicted++;
}

/* -- starved items ------------------------------------------------------------------------------------------------- */

static bool may_find_free(const struct kvs_file_store *store) {
  for (unsigned i = 0; i < store->nroots; i++) {
    const struct kvs_file_root *root = &store->roots[i];
    if (!refusal_of(root) && (root->nfree || (!store->growing && may_grow(store, root)))) return true;
  }
  return false;
}

void kvs_file_wake_starved_one_locked(struct kvs_file_store *store) {
  if (!store->starved.first) return;
  bool may = store->granted <= store->nstarved || may_find_free(store);
  if (!store->growing) may = may || find_victim_locked(store) || refusal_of_all(store);
  if (may) wake_oldest_locked(store);
}

static bool may_claim(const struct kvs_file_store *store, const struct kvs_file_entry *entry) {
  if (entry->slot == KVS_NO_SLOT || entry->foreign || entry->writer || entry->pins) return false;
  return entry->stale == KVS_NO_SLOT && entry->leaving == KVS_NO_SLOT &&
         !refusal_of(kvs_file_root_of(store, entry->slot));
}

/* Blocks of the oldest loads are free again first. An item that has not ended keeps its entry in memory. */
static void claim_locked(struct kvs_file_store *store) {
  unsigned looks = 0;
  for (struct kvs_file_transfer *transfer = store->oldest; transfer; transfer = transfer->later)
    for (size_t i = 0; transfer->kind == KVS_FILE_LOAD && i < transfer->nitems; i++) {
      const struct kvs_file_item *item = &transfer->items[i];
      if (store->claimed || looks++ == CLAIMS) return;
      const bool reads = item->progress != KVS_FILE_OVER && item->entry->readers;
      if (reads && may_claim(store, item->entry)) store->claimed = item->entry;
    }
}

void kvs_file_claimed_ended_locked(struct kvs_file_store *store) {
  struct kvs_file_entry *entry = store->claimed;
  store->claimed = NULL;
  if (may_claim(store, entry)) {
    evict_locked(store->starved.first, entry);
    wake_oldest_locked(store);
  }
  if (store->starved.first) claim_locked(store);
}

/* -- taking a slot ------------------------------------------------------------------------------------------------- */

/* Last resort: overwrite the older block of the same key. After a crash during the write, neither block is left. */
static void take_own_locked(struct kvs_file_item *item) {
  item->slot = item->entry->slot;
  item->epoch = item->transfer->store->epochs.now;
  item->in_place = true;
  kvs_file_set_slot_locked(item->transfer->store, item->entry, KVS_NO_SLOT);
}

void kvs_file_slot_return_locked(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  const bool same = kvs_file_epoch_is(&item->epoch, &store->epochs.now); /* else the older block is gone */
  if (item->victim && same) {
    kvs_file_set_slot_locked(store, item->victim, item->slot);
    store->stats.evicted--;
  } else if (item->in_place && same) {
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
  struct kvs_file_items *starved = &store->starved;
  const bool older = starved->first && item->request.since_ns < starved->first->request.since_ns; /* it was woken */
  item->progress = KVS_FILE_PENDING;
  item->next = older ? starved->first : NULL;
  *(starved->last && !older ? &starved->last->next : &starved->first) = item;
  if (!older) starved->last = item;
  store->nstarved++;
  if (!store->growing && !store->claimed) claim_locked(store);
  return KVS_FILE_WAIT;
}

static enum kvs_file_slot_answer take_locked(struct kvs_file_item *item, int *code) {
  struct kvs_file_store *store = item->transfer->store;
  if (item->slot != KVS_NO_SLOT) return KVS_FILE_SLOT; /* given by reuse_own_slots_locked() */
  item->slot = take_free_unlocking(store);
  if (item->slot != KVS_NO_SLOT) return KVS_FILE_SLOT;
  if (!store->growing) *code = refusal_of_all(store);
  if (*code) return KVS_FILE_NONE_LEFT;
  struct kvs_file_entry *victim = store->growing ? NULL : find_victim_locked(store);
  if (victim) {
    evict_locked(item, victim);
  } else if (!store->growing && (item->slot = take_any_failed_locked(store)) != KVS_NO_SLOT) {
    return KVS_FILE_SLOT;
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

bool kvs_file_slot_take_now_locked(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  const unsigned n = store->nroots, first = store->next_root % n;
  if (item->slot != KVS_NO_SLOT) return true;
  if (item->entry->stale != KVS_NO_SLOT || store->starved.first || store->growing || refusal_of_all(store))
    return false;
  for (unsigned i = 0; i < n; i++) {
    struct kvs_file_root *root = &store->roots[(first + i) % n];
    if (root->nfailures || (root->nfree == root->nfailed && may_grow(store, root))) return false;
    if (root->nfree == root->nfailed) continue;
    store->next_root++;
    item->slot = root->free_slots[--root->nfree];
    return true;
  }
  struct kvs_file_entry *victim = find_victim_locked(store);
  if (victim) evict_locked(item, victim);
  return victim != NULL;
}

enum kvs_file_slot_answer kvs_file_slot_take_locked(struct kvs_file_item *item, int *code) {
  *code = 0;
  enum kvs_file_slot_answer answer = take_locked(item, code);
  if (answer != KVS_FILE_SLOT) return answer;
  struct kvs_file_root *root = kvs_file_root_of(item->transfer->store, item->slot);
  if (root->nfailures >= FAILURES) root->write_again_ns = kvs_clock_ns() + WRITE_AGAIN_NS; /* this one is the try */
  return KVS_FILE_SLOT;
}
