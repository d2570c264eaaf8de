/* Builds the index from the headers on disk.
 *
 * Several threads read the headers. The results are sorted by sequence: of two blocks with one key the newer wins, and
 * the initial LRU order is the order of writing. A block written after the last checkpoint may be torn, so its data is
 * read and verified. Torn and superseded headers are erased, so that those blocks cannot reappear.
 *
 * A header or block that cannot be read is left alone: nothing is written there, and no older block is erased in favour
 * of one that was not verified. A slot with an unreadable header is not used until the next open and may hold any
 * block; blocks written from now on therefore get sequences above all that the slot may contain.
 *
 * A reader beside a writer erases nothing, and treats a torn block as missing. */
#include "files/scan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/thread.h"
#include "files/descriptors.h"
#include "files/segment.h"
#include "files/slot.h"
#include "files/state.h"

enum { SCANNERS = 8 };
/* More than the number of blocks written between two checkpoints. */
static const uint64_t UNREAD_MARGIN = 4294967296u;

struct found {
  uint64_t sequence;
  uint32_t slot;
  uint16_t key_nbytes;
  bool torn;
  bool unverified; /* the data should have been verified but could not be read */
  size_t key_at;   /* offset in keys */
};

struct scan {
  struct kvs_file_store *store;
  struct kvs_file_index *index;
  int64_t root; /* of the segments to read; -1: all */
  struct kvs_file_epoch epoch;
  uint32_t nsegments; /* to look at */
  atomic_uint next;   /* next segment to read */
  pthread_mutex_t lock;
  struct found *found; /* guarded by lock, as are the fields below */
  size_t count, capacity;
  uint8_t *keys;
  size_t keys_nbytes, keys_capacity;
  uint32_t *bad; /* slots with damaged headers */
  size_t nbad, bad_capacity;
  uint32_t *unreadable; /* slots whose headers cannot be read */
  size_t nunreadable, unreadable_capacity;
  int code; /* KVS_OK, or why the scan stops */
  uint64_t cut, lost;
  uint64_t passed; /* highest sequence of a header of another epoch */
  bool doubtful;   /* a block that may be torn is left */
};

static bool grow(void **array, size_t *capacity, size_t needed, size_t size) {
  if (needed <= *capacity) return true;
  size_t bigger = *capacity ? 2 * *capacity : 1024;
  while (bigger < needed) bigger *= 2;
  void *grown = realloc(*array, bigger * size);
  if (!grown) return false;
  *array = grown;
  *capacity = bigger;
  return true;
}

static void note(struct scan *scan, const struct kvs_file_header *header, struct found found) {
  pthread_mutex_lock(&scan->lock);
  bool room = grow((void **)&scan->found, &scan->capacity, scan->count + 1, sizeof *scan->found) &&
              grow((void **)&scan->keys, &scan->keys_capacity, scan->keys_nbytes + header->key_nbytes, 1);
  if (room) {
    found.key_at = scan->keys_nbytes;
    scan->found[scan->count++] = found;
    memcpy(scan->keys + scan->keys_nbytes, header->key, header->key_nbytes);
    scan->keys_nbytes += header->key_nbytes;
  } else {
    scan->code = KVS_NOMEM;
  }
  pthread_mutex_unlock(&scan->lock);
}

static void note_slot(struct scan *scan, uint32_t slot, uint32_t **slots, size_t *count, size_t *capacity) {
  pthread_mutex_lock(&scan->lock);
  if (grow((void **)slots, capacity, *count + 1, sizeof **slots))
    (*slots)[(*count)++] = slot;
  else
    scan->code = KVS_NOMEM;
  pthread_mutex_unlock(&scan->lock);
}

/* Not a block of the store any more. Later blocks get higher sequences all the same. */
static void pass_over(struct scan *scan, uint64_t sequence) {
  pthread_mutex_lock(&scan->lock);
  if (sequence > scan->passed) scan->passed = sequence;
  pthread_mutex_unlock(&scan->lock);
}

static int read_at(struct kvs_file_store *store, uint32_t slot, uint8_t *to, size_t nbytes) {
  struct kvs_file_span span = {
      .fd = -1, .offset = kvs_file_slot_at(store, slot), .pieces = {{to, nbytes}}, .npieces = 1};
  int code = kvs_file_segment_open(store, slot / store->geometry.slots, &span.fd);
  return code ? code : kvs_file_move(&store->faults, &span, store->direct);
}

static void look_at_slot(struct scan *scan, uint32_t slot, uint8_t *room) {
  struct kvs_file_store *store = scan->store;
  const struct kvs_file_geometry *g = &store->geometry;
  struct kvs_file_header header;
  int code = read_at(store, slot, room, KVS_FILE_PAGE);
  if (code == KVS_FILE_ENDED) return; /* truncated file: no block here */
  if (code) {
    note_slot(scan, slot, &scan->unreadable, &scan->nunreadable, &scan->unreadable_capacity);
    return;
  }
  enum kvs_file_page page = kvs_file_header_read(room, &header);
  if (page == KVS_FILE_EMPTY) return;
  bool good = page == KVS_FILE_GOOD && header.nbytes == g->block_nbytes &&
              memcmp(header.layout_hash, g->layout_hash, sizeof header.layout_hash) == 0;
  if (!good) {
    note_slot(scan, slot, &scan->bad, &scan->nbad, &scan->bad_capacity);
    return;
  }
  if (!kvs_file_epoch_is(&header.epoch, &scan->epoch)) {
    pass_over(scan, header.sequence);
    return;
  }
  struct found found = {.sequence = header.sequence, .slot = slot, .key_nbytes = header.key_nbytes};
  if (scan->root >= 0) { /* a peer's, which may be writing: loads compare */
    note(scan, &header, found);
    return;
  }
  if (header.sequence >= kvs_file_root_of(store, slot)->whole_below || store->segments[slot / g->slots].suspect) {
    code = read_at(store, slot, room, g->slot_nbytes);
    found.unverified = code && code != KVS_FILE_ENDED;
    found.torn = !found.unverified && (code || kvs_crc32c(0, room + KVS_FILE_PAGE, g->block_nbytes) != header.data_crc);
  }
  note(scan, &header, found);
}

static void hold(struct kvs_file_store *store, uint32_t segment) {
  pthread_mutex_lock(&store->lock);
  (void)kvs_file_segment_hold_locked(store, segment, false);
  pthread_mutex_unlock(&store->lock);
}

static bool is_wanted(const struct scan *scan, uint32_t segment) {
  const struct kvs_file_segment *what = &scan->store->segments[segment];
  return !what->removed && (scan->root < 0 || what->root == (unsigned)scan->root);
}

static void *scan_segments(void *arg) {
  struct scan *scan = arg;
  const struct kvs_file_geometry *g = &scan->store->geometry;
  uint8_t *room = kvs_file_pages_map(g->slot_nbytes);
  for (uint32_t segment; room && (segment = atomic_fetch_add(&scan->next, 1)) < scan->nsegments;)
    if (is_wanted(scan, segment)) {
      hold(scan->store, segment);
      for (uint32_t i = 0; i < g->slots; i++) look_at_slot(scan, segment * g->slots + i, room);
      kvs_file_segment_release(scan->store, segment);
    }
  if (room) kvs_file_pages_unmap(room, g->slot_nbytes);
  pthread_mutex_lock(&scan->lock);
  if (!room) scan->code = KVS_NOMEM;
  pthread_mutex_unlock(&scan->lock);
  return NULL;
}

static void read_all(struct scan *scan) {
  pthread_t threads[SCANNERS];
  unsigned n = 0;
  while (n < SCANNERS && n + 1 < scan->nsegments && kvs_thread_start(&threads[n], NULL, scan_segments, scan) == 0) n++;
  scan_segments(scan);
  while (n > 0) pthread_join(threads[--n], NULL);
}

/* -- results ------------------------------------------------------------------------------------------------------- */

static int by_sequence(const void *a, const void *b) {
  const struct found *left = a, *right = b;
  if (left->sequence != right->sequence) return left->sequence > right->sequence ? 1 : -1;
  return (left->slot > right->slot) - (left->slot < right->slot); /* equal sequences: one header is forged */
}

/* Erase an unwanted header. True: the slot is free; false: the slot stays unused. */
static bool erase(struct scan *scan, uint32_t slot) {
  struct kvs_file_store *store = scan->store;
  if (store->settings.readonly) return false;
  const uint32_t segment = slot / store->geometry.slots;
  int fd;
  hold(store, segment);
  int code = kvs_file_segment_open(store, segment, &fd);
  if (!code) code = kvs_file_erase(store, fd, kvs_file_slot_at(store, slot));
  kvs_file_segment_release(store, segment);
  if (!code) return true;
  scan->lost++;
  scan->doubtful = true;
  return false;
}

/* The block is the newest of its key so far. The older block is erased only if this one is known to be whole. */
static int index_block(struct scan *scan, const struct found *found, struct kvs_file_entry *entry, uint8_t *taken,
                       struct kvs_error *err) {
  uint32_t before = entry->slot;
  kvs_file_index_set_slot(scan->index, entry, found->slot);
  entry->sequence = found->sequence;
  taken[found->slot] = 1;
  scan->doubtful |= found->unverified;
  if (before == KVS_NO_SLOT) return KVS_OK;
  taken[before] = found->unverified || !erase(scan, before);
  scan->lost += found->unverified;
  const bool stale = taken[before] && !scan->store->settings.readonly;
  if (!stale || kvs_file_index_add_stale(entry, before)) return KVS_OK;
  return kvs_fail(err, KVS_NOMEM, "no memory for the index of %zu blocks", scan->count);
}

static int index_blocks(struct scan *scan, uint8_t *taken, struct kvs_error *err) {
  struct kvs_file_store *store = scan->store;
  int status = KVS_OK;
  if (scan->passed > store->sequence) store->sequence = scan->passed;
  if (scan->count) qsort(scan->found, scan->count, sizeof *scan->found, by_sequence);
  for (size_t i = 0; !status && i < scan->count; i++) {
    const struct found *found = &scan->found[i];
    if (found->sequence > store->sequence) store->sequence = found->sequence;
    if (found->torn) { /* if it cannot be erased, the next open finds the torn block again */
      scan->cut++;
      taken[found->slot] = !erase(scan, found->slot);
      continue;
    }
    struct kvs_file_entry *entry = kvs_file_index_add(scan->index, scan->keys + found->key_at, found->key_nbytes);
    if (!entry) return kvs_fail(err, KVS_NOMEM, "no memory for the index of %zu blocks", scan->count);
    status = index_block(scan, found, entry, taken, err);
    kvs_file_index_settle(scan->index, entry);
  }
  return status;
}

static int build_index(struct scan *scan, struct kvs_error *err) {
  struct kvs_file_store *store = scan->store;
  uint32_t end = store->nsegments * store->geometry.slots;
  uint8_t *taken = calloc((size_t)end + 1, 1);
  if (!taken) return kvs_fail(err, KVS_NOMEM, "no memory for the index of a store");
  for (size_t i = 0; i < scan->nbad; i++) taken[scan->bad[i]] = !erase(scan, scan->bad[i]);
  scan->cut += scan->nbad;
  for (size_t i = 0; i < scan->nunreadable; i++) taken[scan->unreadable[i]] = 1;
  scan->lost += scan->nunreadable;
  scan->doubtful |= scan->nunreadable > 0;
  int status = index_blocks(scan, taken, err);
  bool unseen = !store->settings.readonly && (scan->nunreadable || store->stats.foreign);
  if (unseen && store->sequence > KVS_FILE_LAST_SEQUENCE - UNREAD_MARGIN)
    store->sequence = KVS_FILE_LAST_SEQUENCE - UNREAD_MARGIN;
  if (unseen) store->sequence += UNREAD_MARGIN;
  for (uint32_t slot = end; !status && !store->settings.readonly && slot-- > 0;)
    if (!taken[slot]) (void)kvs_file_free_push(store, slot);
  free(taken);
  return status;
}

int kvs_file_scan(struct kvs_file_store *store, struct kvs_file_index *index, struct kvs_error *err) {
  struct scan scan = {
      .store = store, .index = index, .root = -1, .nsegments = store->nsegments, .doubtful = store->unread_segments};
  uint64_t unchecked = UINT64_MAX; /* blocks from this sequence on may be torn */
  for (unsigned i = 0; i < store->nroots; i++) {
    struct kvs_file_root *root = &store->roots[i];
    if (root->whole_below < 1) root->whole_below = 1;
    if (root->whole_below < unchecked) unchecked = root->whole_below;
  }
  pthread_mutex_init(&scan.lock, NULL);
  pthread_mutex_lock(&store->lock);
  scan.epoch = store->epochs.now;
  pthread_mutex_unlock(&store->lock);
  read_all(&scan);
  int status = scan.code ? kvs_fail(err, scan.code, "no memory for the index of %u segments", store->nsegments)
                         : build_index(&scan, err);
  pthread_mutex_destroy(&scan.lock);
  free(scan.found);
  free(scan.keys);
  free(scan.bad);
  free(scan.unreadable);
  store->whole_below = scan.doubtful ? unchecked : UINT64_MAX;
  for (unsigned i = 0; !status && i < store->nroots; i++)
    store->roots[i].whole_below = store->sequence + 1; /* a reader's next scan */
  pthread_mutex_lock(&store->lock);
  store->stats.found = index->blocks;
  store->stats.cut += scan.cut;
  store->stats.lost_slots += scan.lost;
  pthread_mutex_unlock(&store->lock);
  return status;
}

/* -- peers --------------------------------------------------------------------------------------------------------- */

static bool is_of(const struct kvs_file_store *store, uint32_t slot, unsigned root) {
  return store->segments[slot / store->geometry.slots].root == root;
}

/* What the index knows of the peer's slots and was not found in them. Entries without a block and a user are freed.
 * found[slot]: the entry of the block that is there. */
static void forget_locked(const struct scan *scan, struct kvs_file_entry *const *found) {
  struct kvs_file_store *store = scan->store;
  const unsigned root = (unsigned)scan->root;
  struct kvs_file_index *index = &store->index;
  for (size_t i = 0; i < index->nbuckets; i++)
    for (struct kvs_file_entry *entry = index->buckets[i], *next; entry; entry = next) {
      next = entry->next;
      if (entry->other != KVS_NO_SLOT && is_of(store, entry->other, root) && found[entry->other] != entry)
        entry->other = KVS_NO_SLOT;
      if (!entry->foreign || !is_of(store, entry->slot, root) || found[entry->slot] == entry) continue;
      kvs_file_set_slot_locked(store, entry, KVS_NO_SLOT);
      kvs_file_fall_back_locked(store, entry);
      kvs_file_index_settle(index, entry);
    }
}

/* Only what differs from the index gives events, and blocks that are new are told in pieces. */
static int take_in_locked(const struct scan *scan) {
  struct kvs_file_store *store = scan->store;
  const size_t end = (size_t)store->nsegments * store->geometry.slots;
  struct kvs_file_entry **found = calloc(end + 1, sizeof(struct kvs_file_entry *));
  bool room = found != NULL;
  store->events.many = true;
  for (size_t i = 0; room && i < scan->count; i++) {
    const struct found *block = &scan->found[i];
    struct kvs_file_entry *entry = kvs_file_index_add(&store->index, scan->keys + block->key_at, block->key_nbytes);
    room = entry != NULL;
    if (!room) break;
    kvs_file_learn_locked(store, entry, block->slot);
    kvs_file_index_settle(&store->index, entry);
    found[block->slot] = entry;
  }
  store->events.many = false;
  if (room) forget_locked(scan, found);
  free(found);
  return room ? KVS_OK : KVS_NOMEM;
}

int kvs_file_scan_peer(struct kvs_file_store *store, unsigned peer, struct kvs_error *err) {
  const unsigned root = store->nroots + peer;
  struct scan scan = {.store = store, .root = root};
  pthread_mutex_init(&scan.lock, NULL);
  pthread_mutex_lock(&store->lock);
  scan.nsegments = store->nsegments;
  scan.epoch = store->epochs.now;
  pthread_mutex_unlock(&store->lock);
  read_all(&scan);
  pthread_mutex_lock(&store->lock);
  const bool same = kvs_file_epoch_is(&scan.epoch, &store->epochs.now); /* else it is scanned again */
  if (same && !scan.code) scan.code = take_in_locked(&scan);
  store->peers[peer].rescan = !same;
  pthread_mutex_unlock(&store->lock);
  pthread_mutex_destroy(&scan.lock);
  free(scan.found);
  free(scan.keys);
  free(scan.bad);
  free(scan.unreadable);
  return scan.code ? kvs_fail(err, scan.code, "no memory for the index of another writer's blocks") : KVS_OK;
}
