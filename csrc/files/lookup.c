/* Calls on keys only, which move no bytes: which blocks there are, which came and went; marking them as used, pinning
 * them. */
#include <stdlib.h>
#include <string.h>

#include "files/current.h"
#include "files/guard.h"
#include "files/keys.h"
#include "files/peers.h"
#include "files/slot.h"

int kvs_file_contains(struct kvs_file_store *store, const struct kvs_file_keys *theirs, bool *found,
                      struct kvs_error *err) {
  struct kvs_file_keys own, *keys = &own;
  int status = kvs_file_check_fork(store, err);
  if (!status) status = kvs_file_keys_copy(theirs, keys, err);
  if (status) return status;
  size_t begin = 0;
  kvs_file_lock_current(store);
  kvs_file_catch_up_locked(store);
  for (size_t i = 0; i < keys->count; begin = keys->ends[i++]) {
    const struct kvs_file_entry *entry = kvs_file_index_find(&store->index, keys->data + begin, keys->ends[i] - begin);
    found[i] = entry && entry->slot != KVS_NO_SLOT;
  }
  pthread_mutex_unlock(&store->lock);
  kvs_file_keys_free(keys);
  return KVS_OK;
}

int kvs_file_touch(struct kvs_file_store *store, const struct kvs_file_keys *theirs, struct kvs_error *err) {
  struct kvs_file_keys own, *keys = &own;
  int status = kvs_file_check_fork(store, err);
  if (!status) status = kvs_file_keys_copy(theirs, keys, err);
  if (status) return status;
  kvs_file_lock_current(store);
  for (size_t i = keys->count; i-- > 0;) { /* first key last: a prefix is evicted from its end */
    size_t begin = i ? keys->ends[i - 1] : 0;
    struct kvs_file_entry *entry = kvs_file_index_find(&store->index, keys->data + begin, keys->ends[i] - begin);
    if (entry) kvs_file_index_touch(&store->index, entry);
    if (entry && entry->slot != KVS_NO_SLOT) kvs_file_note_used_locked(store, entry->slot);
  }
  pthread_mutex_unlock(&store->lock);
  kvs_file_keys_free(keys);
  return KVS_OK;
}

int kvs_file_pin(struct kvs_file_store *store, const struct kvs_file_keys *theirs, bool pin, struct kvs_error *err) {
  struct kvs_file_index *index = &store->index;
  struct kvs_file_keys own, *keys = &own;
  int status = kvs_file_check_fork(store, err);
  if (!status) status = kvs_file_keys_copy(theirs, keys, err);
  if (status) return status;
  size_t begin = 0, done = 0;
  kvs_file_lock_current(store);
  kvs_file_catch_up_locked(store);
  for (; !status && done < keys->count; begin = keys->ends[done++]) {
    struct kvs_file_entry *entry = kvs_file_index_find(index, keys->data + begin, keys->ends[done] - begin);
    if (pin && (!entry || entry->slot == KVS_NO_SLOT))
      status = kvs_fail(err, KVS_MISSING, "keys[%zu] is not in the store: nothing was pinned", done);
    else if (!pin && (!entry || !entry->pins))
      status = kvs_fail(err, KVS_INVALID, "keys[%zu] is not pinned: nothing was unpinned", done);
    else
      kvs_file_index_pin(index, entry, pin);
    if (status) break;
  }
  begin = 0;
  for (size_t i = 0; i < done; begin = keys->ends[i++]) {
    struct kvs_file_entry *entry = kvs_file_index_find(index, keys->data + begin, keys->ends[i] - begin);
    if (!entry) continue; /* a repeated key: deleted with the first occurrence */
    if (status) kvs_file_index_pin(index, entry, !pin);
    kvs_file_index_settle(index, entry);
  }
  if (store->starved.first) kvs_file_wake_starved_locked(store);
  pthread_mutex_unlock(&store->lock);
  kvs_file_keys_free(keys);
  return status;
}

static size_t measure_locked(const struct kvs_file_index *index) {
  size_t nbytes = 0;
  for (size_t i = 0; i < index->nbuckets; i++)
    for (const struct kvs_file_entry *entry = index->buckets[i]; entry; entry = entry->next)
      nbytes += entry->key_nbytes;
  return nbytes;
}

static size_t add_key(const struct kvs_file_entry *entry, uint8_t *keys, size_t *ends, size_t count) {
  size_t begin = count ? ends[count - 1] : 0;
  memcpy(keys + begin, entry->key, entry->key_nbytes);
  ends[count] = begin + entry->key_nbytes;
  return count + 1;
}

/* LRU order; entries in use or pinned come last, unordered. */
static size_t list_locked(const struct kvs_file_index *index, uint8_t *keys, size_t *ends) {
  size_t count = 0;
  for (const struct kvs_file_entry *entry = index->oldest; entry; entry = entry->newer)
    count = add_key(entry, keys, ends, count);
  for (size_t i = 0; i < index->nbuckets; i++)
    for (const struct kvs_file_entry *entry = index->buckets[i]; entry; entry = entry->next)
      if (!entry->idle && entry->slot != KVS_NO_SLOT) count = add_key(entry, keys, ends, count);
  return count;
}

int kvs_file_list(struct kvs_file_store *store, uint8_t **keys, size_t **ends, size_t *count, struct kvs_error *err) {
  int status = kvs_file_check_fork(store, err);
  if (status) return status;
  kvs_file_lock_current(store);
  kvs_file_catch_up_locked(store);
  *keys = malloc(measure_locked(&store->index) + 1);
  *ends = malloc((store->index.blocks + 1) * sizeof **ends);
  *count = *keys && *ends ? list_locked(&store->index, *keys, *ends) : 0;
  pthread_mutex_unlock(&store->lock);
  if (*keys && *ends) return KVS_OK;
  free(*keys);
  free(*ends);
  return kvs_fail(err, KVS_NOMEM, "no memory for the keys of a store");
}

/* -- events -------------------------------------------------------------------------------------------------------- */

struct taken {
  uint8_t *keys;
  size_t *ends;
  bool *there;
};

static bool make_room(struct taken *taken, const struct kvs_file_piece *piece) {
  const size_t count = piece->nlisted + piece->ngone + piece->nuntold;
  taken->keys = malloc(piece->nbytes + 1);
  taken->ends = malloc((count + 1) * sizeof *taken->ends);
  taken->there = malloc((count + 1) * sizeof *taken->there);
  if (taken->keys && taken->ends && taken->there) return true;
  free(taken->keys);
  free(taken->ends);
  free(taken->there);
  return false;
}

static void free_entries(struct kvs_file_entry *entries) {
  for (struct kvs_file_entry *next; entries; entries = next) {
    next = entries->next;
    free(entries);
  }
}

int kvs_file_take_events(struct kvs_file_store *store, uint8_t **keys, size_t **ends, bool **there, size_t *count,
                         uint64_t *lost, struct kvs_error *err) {
  struct kvs_file_entry *done = NULL;
  struct taken taken;
  int status = kvs_file_check_fork(store, err);
  if (status) return status;
  struct kvs_file_piece *piece = malloc(sizeof *piece);
  if (!piece) return kvs_fail(err, KVS_NOMEM, "no memory for the events of a store");
  kvs_file_lock_current(store);
  kvs_file_catch_up_locked(store);
  kvs_file_events_find_locked(store, piece);
  const bool room = make_room(&taken, piece);
  if (room) {
    done = kvs_file_events_take_locked(store, piece, taken.keys, taken.ends, taken.there);
    *lost = store->events.lost;
    store->events.lost = 0;
  }
  pthread_mutex_unlock(&store->lock);
  *count = piece->nlisted + piece->ngone + piece->nuntold;
  free(piece);
  free_entries(done);
  if (!room) return kvs_fail(err, KVS_NOMEM, "no memory for the events of a store");
  *keys = taken.keys;
  *ends = taken.ends;
  *there = taken.there;
  return KVS_OK;
}
