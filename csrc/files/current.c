/* The epoch of an open store, and what becomes of its index when another one begins: all blocks in it are gone. Slots
 * of own blocks are free, but for those in which a load or a delete is under way, and nothing is erased: a header of
 * another epoch is no block. Other writers' headers are read again, for what they stored since.
 *
 * Calls take the store's lock by kvs_file_lock_current(). It reads the marks of the mapped files, which is all it does
 * while nothing changes. A thread looks by name besides (and whether the directories are still there), for file systems
 * on which a mapped file does not change, as those of networks, and so that the slots of a store that is not used
 * become free too. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/thread.h"
#include "base/wait.h"
#include "files/current.h"
#include "files/directory.h"
#include "files/slot.h"

static const int64_t LOOK_NS = 500 * 1000 * 1000, MAKE_NS = 1000 * 1000 * 1000;

/* -- a new epoch --------------------------------------------------------------------------------------------------- */

static void free_entries(struct kvs_file_entry *entries) {
  for (struct kvs_file_entry *next; entries; entries = next) {
    next = entries->next;
    free(entries);
  }
}

static bool has_own_slot(const struct kvs_file_store *store, const struct kvs_file_entry *entry) {
  return entry->slot != KVS_NO_SLOT && !entry->foreign && !store->settings.readonly;
}

/* Its key is in use, pinned or stale. */
static void clear_entry_locked(struct kvs_file_store *store, struct kvs_file_entry *entry) {
  entry->other = KVS_NO_SLOT;
  if (entry->slot == KVS_NO_SLOT) return;
  const uint32_t slot = has_own_slot(store, entry) ? entry->slot : KVS_NO_SLOT;
  const bool used = entry->readers || entry->writer;
  kvs_file_set_slot_locked(store, entry, KVS_NO_SLOT);
  if (slot != KVS_NO_SLOT && used) entry->leaving = slot;
  if (slot != KVS_NO_SLOT && !used) (void)kvs_file_free_push(store, slot);
}

static void rescan_peers_locked(struct kvs_file_store *store) {
  for (unsigned i = 0; i < store->npeers; i++) store->peers[i].rescan = true;
  store->watch_now = true;
  pthread_cond_signal(&store->watch);
}

/* Returns entries to be freed, without the lock. */
static struct kvs_file_entry *begin_locked(struct kvs_file_store *store, const struct kvs_file_epoch *now) {
  struct kvs_file_index *index = &store->index;
  store->epochs.now = *now;
  struct kvs_file_entry *gone = kvs_file_index_take_unused(index);
  for (const struct kvs_file_entry *entry = gone; entry; entry = entry->next)
    if (has_own_slot(store, entry)) (void)kvs_file_free_push(store, entry->slot);
  gone = kvs_file_events_gone_locked(store, gone);
  for (size_t i = 0; i < index->nbuckets; i++)
    for (struct kvs_file_entry *entry = index->buckets[i]; entry; entry = entry->next) clear_entry_locked(store, entry);
  rescan_peers_locked(store);
  kvs_file_wake_starved_locked(store);
  return gone;
}

/* -- looking ------------------------------------------------------------------------------------------------------- */

/* Unknown if one of them is. */
static struct kvs_file_epoch all_of(const struct kvs_file_epochs *epochs) {
  struct kvs_file_epoch all = {{0}};
  for (unsigned i = 0; i < epochs->nplaces; i++)
    if (!kvs_file_epoch_known(&epochs->places[i].epoch)) return epochs->places[i].epoch;
  for (unsigned i = 0; i < epochs->nplaces; i++)
    for (size_t k = 0; k < sizeof all.bytes; k++) all.bytes[k] ^= epochs->places[i].epoch.bytes[k];
  return all;
}

static bool stands_locked(const struct kvs_file_epochs *epochs) {
  bool stands = true;
  for (unsigned i = 0; i < epochs->nplaces; i++) stands &= kvs_file_epoch_stands(&epochs->places[i]);
  return stands;
}

/* The places change together with the index: as long as a place has no mark, the index is of its epoch. */
static struct kvs_file_entry *take_places_locked(struct kvs_file_store *store, struct kvs_file_epoch_place *found,
                                                 const bool *changed) {
  struct kvs_file_epochs *epochs = &store->epochs;
  for (unsigned i = 0; i < epochs->nplaces; i++) {
    const struct kvs_file_epoch_place before = epochs->places[i];
    if (!changed[i]) continue;
    epochs->places[i] = found[i];
    found[i] = before;
  }
  const struct kvs_file_epoch now = all_of(epochs);
  return epochs->nplaces && !kvs_file_epoch_is(&now, &epochs->now) ? begin_locked(store, &now) : NULL;
}

static void look(struct kvs_file_store *store) {
  struct kvs_file_epochs *epochs = &store->epochs;
  struct kvs_file_epoch_place found[KVS_FILE_DIRECTORIES];
  bool changed[KVS_FILE_DIRECTORIES];
  pthread_mutex_lock(&epochs->looking);
  const unsigned n = epochs->nplaces;
  for (unsigned i = 0; i < n; i++) changed[i] = kvs_file_epoch_look(&epochs->places[i], &found[i]);
  pthread_mutex_lock(&store->lock);
  struct kvs_file_entry *gone = take_places_locked(store, found, changed);
  pthread_mutex_unlock(&store->lock);
  pthread_mutex_unlock(&epochs->looking);
  for (unsigned i = 0; i < n; i++) {
    if (!changed[i]) continue;
    kvs_file_epoch_unmap(&found[i]);
    if (!store->settings.readonly)
      kvs_file_epoch_reserve(found[i].folder); /* unmapped, the older file takes no space */
  }
  free_entries(gone);
}

void kvs_file_lock_current(struct kvs_file_store *store) {
  pthread_mutex_lock(&store->lock);
  if (stands_locked(&store->epochs)) return;
  pthread_mutex_unlock(&store->lock);
  look(store);
  pthread_mutex_lock(&store->lock);
}

static bool sleep_until_next(struct kvs_file_store *store) {
  const uint64_t deadline = kvs_deadline(LOOK_NS);
  pthread_mutex_lock(&store->lock);
  while (!store->epochs.stop && kvs_cond_wait(&store->epochs.wake, &store->lock, deadline)) continue;
  bool stop = store->epochs.stop;
  pthread_mutex_unlock(&store->lock);
  return !stop;
}

static void *watch(void *arg) {
  struct kvs_file_store *store = arg;
  while (sleep_until_next(store)) {
    look(store);
    kvs_file_look_at_directories(store);
  }
  return NULL;
}

void kvs_file_epochs_init(struct kvs_file_epochs *epochs) {
  pthread_mutex_init(&epochs->looking, NULL);
  kvs_cond_init(&epochs->wake);
}

void kvs_file_epochs_destroy(struct kvs_file_epochs *epochs) {
  pthread_cond_destroy(&epochs->wake);
  pthread_mutex_destroy(&epochs->looking);
}

/* -- opening and closing ------------------------------------------------------------------------------------------- */

/* A writer's directory of a shared store is a store too, whose epoch is in the directory around it. */
static bool is_of_writer(int folder) {
  char link[40], path[4096], again[32];
  unsigned number;
  snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return false;
  path[n] = 0;
  const char *name = strrchr(path, '/');
  if (!name || sscanf(name + 1, "writer-%4u", &number) != 1) return false;
  snprintf(again, sizeof again, "writer-%04u", number);
  return strcmp(name + 1, again) == 0 && number < KVS_FILE_WRITERS;
}

static int open_place(struct kvs_file_store *store, unsigned at, int *folder) {
  if (!store->nroots) { /* a shared store that is read-only */
    *folder = open(store->settings.directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *folder < 0 ? errno : 0;
  }
  const int own = store->roots[at].folder;
  const bool around = store->settings.shared || is_of_writer(own);
  *folder = openat(own, around ? ".." : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* a duplicate would share its lock */
  return *folder < 0 ? errno : 0;
}

/* A new store begins with a random epoch: if the file is lost later, and the epoch is zero then, no block belongs to
 * it. */
static void make_file(struct kvs_file_store *store, int folder) {
  bool fresh = store->nsegments == 0 && store->npeers == 0;
  for (unsigned i = 0; i < store->nroots; i++) fresh &= store->roots[i].fresh;
  const bool safe = store->settings.durability != KVS_FILE_NONE;
  struct kvs_file_epoch epoch = {{0}};
  if (fresh && getentropy(epoch.bytes, sizeof epoch.bytes)) epoch = (struct kvs_file_epoch){{0}};
  (void)kvs_file_epoch_make(folder, &epoch, safe, MAKE_NS); /* if it cannot be made, looks are by name */
}

static void open_file(struct kvs_file_store *store, struct kvs_file_epoch_place *place) {
  struct kvs_file_epoch_place found;
  bool there = kvs_file_epoch_look(place, &found);
  if (store->settings.readonly && !there) return;
  if (!there) make_file(store, place->folder);
  if (there && !store->settings.readonly && !kvs_file_epoch_known(&found.epoch))
    (void)kvs_file_epoch_renew(&store->faults, place->folder, MAKE_NS);
  if (there && found.mark && !kvs_file_epoch_stands(&found)) (void)kvs_file_epoch_unmark(place->folder);
  if (there) kvs_file_epoch_unmap(&found);
  if (kvs_file_epoch_look(place, &found)) *place = found;
}

int kvs_file_epochs_open(struct kvs_file_store *store, struct kvs_error *err) {
  struct kvs_file_epochs *epochs = &store->epochs;
  const unsigned n = store->nroots ? store->nroots : 1;
  for (; epochs->nplaces < n; epochs->nplaces++) {
    struct kvs_file_epoch_place *place = &epochs->places[epochs->nplaces];
    int code = open_place(store, epochs->nplaces, &place->folder);
    if (code) return kvs_file_fail(err, code, "opening the directory of %.200s", store->settings.directory);
    open_file(store, place);
  }
  epochs->now = all_of(epochs);
  return KVS_OK;
}

int kvs_file_epochs_start(struct kvs_file_store *store, struct kvs_error *err) {
  store->epochs.watched = kvs_thread_start(&store->epochs.thread, "kvswap-epoch", watch, store) == 0;
  return store->epochs.watched ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no thread could be started");
}

void kvs_file_epochs_stop(struct kvs_file_store *store) {
  if (!store->epochs.watched) return;
  pthread_mutex_lock(&store->lock);
  store->epochs.stop = true;
  pthread_cond_signal(&store->epochs.wake);
  pthread_mutex_unlock(&store->lock);
  pthread_join(store->epochs.thread, NULL);
  store->epochs.watched = false;
}

void kvs_file_epochs_close(struct kvs_file_store *store) {
  struct kvs_file_epochs *epochs = &store->epochs;
  pthread_mutex_lock(&epochs->looking);
  pthread_mutex_lock(&store->lock);
  const unsigned n = epochs->nplaces;
  epochs->nplaces = 0;
  pthread_mutex_unlock(&store->lock);
  for (unsigned i = 0; i < n; i++) {
    kvs_file_epoch_unmap(&epochs->places[i]);
    close(epochs->places[i].folder);
  }
  pthread_mutex_unlock(&epochs->looking);
}
