/* See files/events.h. */
#include "files/events.h"

#include <stdlib.h>
#include <string.h>

#include "files/state.h"

static bool make_room(struct kvs_file_events *events, size_t nbytes) {
  if (events->nbytes + nbytes <= events->capacity) return true;
  size_t capacity = events->capacity ? 2 * events->capacity : 4096;
  uint8_t *grown = realloc(events->data, capacity);
  if (!grown) return false;
  events->data = grown;
  events->capacity = capacity;
  return true;
}

static void free_gone(struct kvs_file_events *events) {
  for (struct kvs_file_entry *entry = events->gone, *next; entry; entry = next) {
    next = entry->next;
    free(entry);
  }
  events->gone = NULL;
  events->ngone = 0;
}

void kvs_file_events_free(struct kvs_file_events *events) {
  free_gone(events);
  free(events->data);
}

/* Drop all that is not taken, and `more` events that have no room. */
static void lose(struct kvs_file_events *events, uint64_t more) {
  events->lost += events->count + events->ngone + more;
  events->count = events->nbytes = events->before = events->before_nbytes = 0;
  free_gone(events);
}

/* Returns whether no event has said that the block is there. */
static bool was_untold(struct kvs_file_events *events, struct kvs_file_entry *entry) {
  const bool untold = entry->untold;
  events->nuntold -= untold && events->nuntold;
  entry->untold = false;
  return untold;
}

void kvs_file_event_locked(struct kvs_file_store *store, struct kvs_file_entry *entry, bool there) {
  struct kvs_file_events *events = &store->events;
  const size_t nbytes = 3 + (size_t)entry->key_nbytes;
  if (!store->settings.events) return;
  if (there && events->many) {
    entry->untold = true;
    events->nuntold++;
    return;
  }
  if (!there && was_untold(events, entry)) return;
  if (events->lost || events->count == store->settings.events || !make_room(events, nbytes)) {
    lose(events, 1);
    return;
  }
  uint8_t *at = events->data + events->nbytes;
  at[0] = there;
  memcpy(at + 1, &entry->key_nbytes, 2);
  memcpy(at + 3, entry->key, entry->key_nbytes);
  events->nbytes += nbytes;
  events->count++;
}

void kvs_file_events_found(struct kvs_file_store *store) {
  const struct kvs_file_index *index = &store->index;
  for (size_t i = 0; store->settings.events && i < index->nbuckets; i++)
    for (struct kvs_file_entry *entry = index->buckets[i]; entry; entry = entry->next) {
      entry->untold = entry->slot != KVS_NO_SLOT;
      store->events.nuntold += entry->untold;
    }
}

/* All of these keys are gone: events of them that are in the list already come first. The list of gone keys has a
 * limit, too, for a caller that takes no events. */
struct kvs_file_entry *kvs_file_events_gone_locked(struct kvs_file_store *store, struct kvs_file_entry *entries) {
  struct kvs_file_events *events = &store->events;
  const size_t most = store->settings.events + (size_t)store->nsegments * store->geometry.slots;
  struct kvs_file_entry *rest = NULL;
  for (struct kvs_file_entry *entry = entries, *next; entry; entry = next) {
    next = entry->next;
    const bool tell = store->settings.events && entry->slot != KVS_NO_SLOT && !was_untold(events, entry);
    struct kvs_file_entry **list = tell ? &events->gone : &rest;
    entry->next = *list;
    *list = entry;
    events->ngone += tell;
  }
  events->before = events->count;
  events->before_nbytes = events->nbytes;
  if (events->lost || events->ngone > most) lose(events, 0);
  return rest;
}

/* -- pieces -------------------------------------------------------------------------------------------------------- */

/* The entries stay marked. A table that grew meanwhile has its entries in the same buckets or behind them. */
static void find_untold(struct kvs_file_store *store, struct kvs_file_piece *piece) {
  const struct kvs_file_index *index = &store->index;
  struct kvs_file_events *events = &store->events;
  size_t looked = 0;
  if (events->bucket >= index->nbuckets) events->bucket = 0;
  for (; events->nuntold && looked < index->nbuckets; looked++) {
    for (struct kvs_file_entry *entry = index->buckets[events->bucket]; entry; entry = entry->next) {
      if (!entry->untold || entry->slot == KVS_NO_SLOT) continue;
      if (piece->nuntold == KVS_FILE_PIECE) return; /* the rest of the bucket next time */
      piece->untold[piece->nuntold++] = entry;
      piece->nbytes += entry->key_nbytes;
    }
    events->bucket = (events->bucket + 1) & (index->nbuckets - 1);
  }
  if (!piece->nuntold) events->nuntold = 0;
}

void kvs_file_events_find_locked(struct kvs_file_store *store, struct kvs_file_piece *piece) {
  const struct kvs_file_events *events = &store->events;
  const bool gone = events->gone != NULL;
  piece->nlisted = gone ? events->before : events->count;
  piece->listed_nbytes = gone ? events->before_nbytes : events->nbytes;
  piece->ngone = piece->nuntold = 0;
  piece->nbytes = piece->listed_nbytes - 3 * piece->nlisted;
  for (const struct kvs_file_entry *entry = events->gone; entry && piece->ngone < KVS_FILE_PIECE; entry = entry->next) {
    piece->nbytes += entry->key_nbytes;
    piece->ngone++;
  }
  if (!gone) find_untold(store, piece);
}

static size_t copy_listed(const struct kvs_file_events *events, size_t count, uint8_t *keys, size_t *ends,
                          bool *there) {
  const uint8_t *at = events->data;
  size_t end = 0;
  for (size_t i = 0; i < count; i++) {
    uint16_t nbytes;
    there[i] = at[0];
    memcpy(&nbytes, at + 1, 2);
    memcpy(keys + end, at + 3, nbytes);
    ends[i] = end += nbytes;
    at += 3 + (size_t)nbytes;
  }
  return end;
}

struct kvs_file_entry *kvs_file_events_take_locked(struct kvs_file_store *store, const struct kvs_file_piece *piece,
                                                   uint8_t *keys, size_t *ends, bool *there) {
  struct kvs_file_events *events = &store->events;
  size_t n = piece->nlisted, end = copy_listed(events, n, keys, ends, there);
  struct kvs_file_entry *done = NULL;
  for (size_t i = 0; i < piece->ngone + piece->nuntold; i++, n++) {
    struct kvs_file_entry *entry = i < piece->ngone ? events->gone : piece->untold[i - piece->ngone];
    memcpy(keys + end, entry->key, entry->key_nbytes);
    ends[n] = end += entry->key_nbytes;
    there[n] = i >= piece->ngone;
    if (there[n]) {
      (void)was_untold(events, entry);
      continue;
    }
    events->gone = entry->next;
    entry->next = done;
    done = entry;
  }
  events->ngone -= piece->ngone;
  events->count -= piece->nlisted;
  events->nbytes -= piece->listed_nbytes;
  if (events->nbytes) memmove(events->data, events->data + piece->listed_nbytes, events->nbytes);
  events->before = events->before_nbytes = 0;
  return done;
}
