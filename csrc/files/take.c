/* Taking events: which blocks came and went since the last call. */
#include <stdlib.h>

#include "files/current.h"
#include "files/peers.h"

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
