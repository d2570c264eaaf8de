/* The list of events: records one after the other, taken all at once. */
#include <stdlib.h>
#include <string.h>

#include "files/store.h"

static bool make_room(struct kvs_file_events *events, size_t nbytes) {
  if (events->nbytes + nbytes <= events->capacity) return true;
  size_t capacity = events->capacity ? 2 * events->capacity : 4096;
  uint8_t *grown = realloc(events->data, capacity);
  if (!grown) return false;
  events->data = grown;
  events->capacity = capacity;
  return true;
}

void kvs_file_event_locked(struct kvs_file_store *store, const struct kvs_file_entry *entry, bool there) {
  struct kvs_file_events *events = &store->events;
  const size_t nbytes = 3 + (size_t)entry->key_nbytes;
  if (!store->settings.events) return;
  if (events->lost || events->count == store->settings.events || !make_room(events, nbytes)) {
    events->lost += events->count + 1;
    events->count = events->nbytes = 0;
    return;
  }
  uint8_t *at = events->data + events->nbytes;
  at[0] = there;
  memcpy(at + 1, &entry->key_nbytes, 2);
  memcpy(at + 3, entry->key, entry->key_nbytes);
  events->nbytes += nbytes;
  events->count++;
}

void kvs_file_events_copy(const struct kvs_file_events *events, uint8_t *keys, size_t *ends, bool *there) {
  const uint8_t *at = events->data;
  size_t end = 0;
  for (size_t i = 0; i < events->count; i++) {
    uint16_t nbytes;
    there[i] = at[0];
    memcpy(&nbytes, at + 1, 2);
    memcpy(keys + end, at + 3, nbytes);
    ends[i] = end += nbytes;
    at += 3 + (size_t)nbytes;
  }
}
