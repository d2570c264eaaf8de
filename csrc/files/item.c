/* One block of a transfer, from the request for its key to its result. files/item.h draws the states. The functions in
 * order:
 *
 *   begin_locked     asks for the key: shared for loads, exclusive for stores and deletes, in FIFO order
 *   dispatch_locked  the item has its key. It ends here if there is nothing to do. Otherwise it goes to the mover (to
 *                    wait for a start dependency or staging) or to the file queue
 *   item_begin       on an engine thread: takes a slot on disk. The mover takes that of a store from pools; if it finds
 *                    none, such a store takes one here and goes back to the mover for its staging. Makes the header and
 *                    the checksum, and sets the span
 *   item_end         on the same thread: handles the result. A store is published here. An erase that follows is a
 *                    further request of the item
 *   finish_locked    sets the result and releases the key
 *
 * Header and block are written in one request, and the checksum detects a torn block. A newer block of the same key has
 * a higher sequence; after the newer block is published, the older block's header is erased. */
#include "files/item.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "base/crc32c.h"
#include "codecs/coding.h"
#include "files/current.h"
#include "files/descriptors.h"
#include "files/directory.h"
#include "files/ended.h"
#include "files/gds.h"
#include "files/segment.h"
#include "files/slot.h"
#include "files/spans.h"
#include "files/staging.h"
#include "files/state.h"

static struct kvs_file_item *item_of(struct kvs_file_request *request) { return (struct kvs_file_item *)request; }

/* -- keys ---------------------------------------------------------------------------------------------------------- */

static bool reads(const struct kvs_file_item *item) { return item->transfer->kind == KVS_FILE_LOAD; }

static void grant_locked(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  if (reads(item))
    item->entry->readers++;
  else
    item->entry->writer = true;
  if (!reads(item)) kvs_file_request_wait(&item->request, &store->queue.turns);
  store->granted++;
  kvs_file_items_append(&store->ready, item);
}

static bool may_have(const struct kvs_file_item *item) {
  const struct kvs_file_entry *entry = item->entry;
  return !entry->writer && (reads(item) ? entry != item->transfer->store->claimed : !entry->readers);
}

void kvs_file_item_begin_locked(struct kvs_file_item *item) {
  struct kvs_file_entry *entry = item->entry;
  if (!entry->first && may_have(item)) {
    grant_locked(item);
  } else {
    struct kvs_file_items waiting = {entry->first, entry->last};
    kvs_file_items_append(&waiting, item);
    entry->first = waiting.first;
    entry->last = waiting.last;
  }
  kvs_file_index_settle(&item->transfer->store->index, entry);
}

static void give_leaving_locked(struct kvs_file_store *store, struct kvs_file_entry *entry) {
  const uint32_t slot = entry->leaving;
  if (slot == KVS_NO_SLOT || entry->readers || entry->writer) return;
  entry->leaving = KVS_NO_SLOT;
  kvs_file_slot_give_locked(store, slot);
}

/* Release the key and grant it to the next waiters. May free the entry. */
static void release_locked(struct kvs_file_store *store, struct kvs_file_entry *entry, bool reader) {
  if (reader)
    entry->readers--;
  else
    entry->writer = false;
  give_leaving_locked(store, entry);
  kvs_file_fall_back_locked(store, entry);
  if (entry == store->claimed && !entry->readers) kvs_file_claimed_ended_locked(store);
  while (entry->first && may_have(entry->first)) {
    struct kvs_file_items waiting = {entry->first, entry->last};
    struct kvs_file_item *item = kvs_file_items_take(&waiting);
    entry->first = waiting.first;
    entry->last = waiting.last;
    grant_locked(item);
  }
  kvs_file_index_settle(&store->index, entry);
  kvs_file_wake_starved_one_locked(store);
}

/* -- completion ---------------------------------------------------------------------------------------------------- */

static void leave_writes_locked(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  if (!item->sequence) return;
  *(item->earlier ? &item->earlier->later : &store->oldest_write) = item->later;
  *(item->later ? &item->later->earlier : &store->newest_write) = item->earlier;
  item->sequence = 0;
}

static void release_victim_locked(struct kvs_file_item *item) {
  if (item->victim) release_locked(item->transfer->store, item->victim, false);
  item->victim = NULL;
}

void kvs_file_item_finish_locked(struct kvs_file_item *item, int status, int code) {
  struct kvs_file_transfer *transfer = item->transfer;
  struct kvs_file_store *store = transfer->store;
  struct kvs_file_stats *stats = &store->stats;
  if (status == KVS_OK && reads(item) && !kvs_file_epoch_is(&item->epoch, &store->epochs.now)) {
    status = KVS_MISSING;
    code = KVS_FILE_CLEARED;
  }
  if (transfer->kind == KVS_FILE_STORE && item->slot != KVS_NO_SLOT && item->progress < KVS_FILE_WRITTEN)
    kvs_file_slot_return_locked(item);
  leave_writes_locked(item);
  release_victim_locked(item);
  if (item->staging != UINT32_MAX) kvs_file_staging_release(item);
  store->granted--;
  item->progress = KVS_FILE_OVER;
  item->status = status;
  item->code = code;
  if (status == KVS_OK && item->kept)
    stats->kept++;
  else if (status == KVS_OK)
    ++*(transfer->kind == KVS_FILE_STORE ? &stats->stored : reads(item) ? &stats->loaded : &stats->deleted);
  else if (status != KVS_CANCELLED)
    ++*(status == KVS_MISSING ? &stats->missed : status == KVS_DAMAGED ? &stats->damaged : &stats->failed);
  if (status != KVS_OK) store->kinds[transfer->kind].failed_blocks[-status]++;
  transfer->nfailed += status != KVS_OK;
  transfer->nkept += item->kept;
  release_locked(store, item->entry, reads(item));
  if (--transfer->remaining == 0) kvs_file_transfer_ended_locked(transfer);
}

/* -- dispatch ------------------------------------------------------------------------------------------------------ */

static void dispatch_locked(struct kvs_file_item *item) {
  struct kvs_file_transfer *transfer = item->transfer;
  struct kvs_file_entry *entry = item->entry;
  bool there = entry->slot != KVS_NO_SLOT;
  if (transfer->cancelled) {
    kvs_file_item_finish_locked(item, KVS_CANCELLED, 0);
  } else if (reads(item) && !there) {
    kvs_file_item_finish_locked(item, KVS_MISSING, 0);
  } else if (transfer->kind == KVS_FILE_DELETE && !there && entry->stale == KVS_NO_SLOT) {
    kvs_file_item_finish_locked(item, KVS_OK, 0);
  } else if (transfer->kind == KVS_FILE_DELETE && entry->foreign && !transfer->store->refusal) {
    kvs_file_item_finish_locked(item, KVS_UNSUPPORTED, 0);
  } else if (transfer->kind == KVS_FILE_STORE && !transfer->replace && there) {
    item->kept = true;
    kvs_file_item_finish_locked(item, KVS_OK, 0);
  } else if (!reads(item) && transfer->store->refusal) {
    kvs_file_item_finish_locked(item, KVS_FILE, transfer->store->refusal);
  } else if (transfer->gate) {
    kvs_file_staging_push(item);
  } else {
    kvs_file_item_queue(item);
  }
}

void kvs_file_run_ready_locked(struct kvs_file_store *store) {
  struct kvs_file_item *item;
  while ((item = kvs_file_items_take(&store->ready)) != NULL) dispatch_locked(item);
}

/* -- stores -------------------------------------------------------------------------------------------------------- */

static void join_writes_locked(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  item->progress = KVS_FILE_WRITTEN;
  item->sequence = ++store->sequence;
  item->later = NULL;
  item->earlier = store->newest_write;
  *(store->newest_write ? &store->newest_write->later : &store->oldest_write) = item;
  store->newest_write = item;
}

/* If the block is copied, the checksum is computed over the copy: the caller may modify the original meanwhile. */
static void prepare_write(struct kvs_file_item *item) {
  const struct kvs_file_geometry *g = &item->transfer->store->geometry;
  const uint64_t page = KVS_FILE_PAGE, whole = g->block_nbytes / page * page;
  uint8_t *page_at = kvs_file_header_of(item), *data = kvs_file_memory_of(item), *behind = page_at + page;
  struct kvs_file_header header = {
      .sequence = item->sequence, .nbytes = g->block_nbytes, .epoch = item->transfer->epoch};
  memcpy(header.layout_hash, g->layout_hash, sizeof header.layout_hash);
  header.key_nbytes = item->entry->key_nbytes;
  memcpy(header.key, item->entry->key, item->entry->key_nbytes);
  if (!item->transfer->pools && !kvs_file_is_in_place(item)) {
    kvs_file_copy_block(item, behind, true);
    memset(behind + g->block_nbytes, 0, g->slot_nbytes - page - g->block_nbytes);
    data = behind;
  } else if (!item->transfer->pools && whole < g->block_nbytes) {
    memcpy(behind, data + whole, g->block_nbytes - whole);
    memset(behind + (g->block_nbytes - whole), 0, page - (g->block_nbytes - whole));
  }
  header.data_crc = kvs_file_on_device(item) ? item->crc : kvs_crc32c(0, data, g->block_nbytes);
  kvs_file_header_write(&header, page_at);
  kvs_file_span_of_block(item, true);
}

static enum kvs_file_begun finish_item(struct kvs_file_item *item, int status, int code) {
  struct kvs_file_store *store = item->transfer->store;
  pthread_mutex_lock(&store->lock);
  kvs_file_item_finish_locked(item, status, code);
  kvs_file_run_ready_locked(store);
  pthread_mutex_unlock(&store->lock);
  return KVS_FILE_SKIP;
}

/* A request whose segment cannot be opened now, because all that may be open are held, is parked. */
static bool hold_locked(struct kvs_file_item *item, uint32_t slot) {
  struct kvs_file_store *store = item->transfer->store;
  const uint32_t at = slot / store->geometry.slots;
  if (kvs_file_segment_hold_locked(store, at, true)) {
    item->held = at;
    return true;
  }
  kvs_file_items_append(&store->parked, item);
  return false;
}

/* Whether a coded block is one: a cache that finds it can load it. */
static int check_coded(const struct kvs_file_item *item) {
  const struct kvs_file_store *store = item->transfer->store;
  const uint8_t *coded = kvs_file_memory_of(item);
  enum kvs_coded worst = KVS_CODED_GOOD;
  for (size_t i = 0; store->codings[i]; coded += kvs_coding_nbytes(store->codings[i++])) {
    enum kvs_coded one = kvs_coding_check(store->codings[i], coded);
    if (one > worst) worst = one;
  }
  return worst == KVS_CODED_GOOD ? KVS_OK : worst == KVS_CODED_NOT_STORED ? KVS_NOT_STORED : KVS_DAMAGED;
}

static enum kvs_file_begun begin_write(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  int code = 0, status = KVS_OK;
  if (!item->transfer->pools || item->staging != UINT32_MAX) status = check_coded(item);
  if (!status && kvs_file_on_device(item) && item->staging != UINT32_MAX)
    status = kvs_file_gds_checksum(item, &item->crc, &code);
  if (status) return finish_item(item, status, code);
  pthread_mutex_lock(&store->lock);
  enum kvs_file_slot_answer answer = kvs_file_slot_take_locked(item, &code);
  bool staging_first = item->transfer->pools && item->staging == UINT32_MAX;
  if (answer == KVS_FILE_SLOT && staging_first) {
    kvs_file_staging_push(item);
    answer = KVS_FILE_WAIT;
  }
  if (answer == KVS_FILE_SLOT && store->sequence >= KVS_FILE_LAST_SEQUENCE) {
    answer = KVS_FILE_NONE_LEFT;
    code = KVS_FILE_NUMBERS_END;
  }
  if (answer == KVS_FILE_SLOT && !hold_locked(item, item->slot)) answer = KVS_FILE_WAIT;
  if (answer == KVS_FILE_SLOT) join_writes_locked(item);
  if (answer == KVS_FILE_NONE_LEFT) {
    kvs_file_item_finish_locked(item, code ? KVS_FILE : KVS_NO_ROOM, code);
    kvs_file_run_ready_locked(store);
  }
  pthread_mutex_unlock(&store->lock);
  if (answer != KVS_FILE_SLOT) return KVS_FILE_SKIP;
  prepare_write(item);
  return KVS_FILE_GO;
}

static enum kvs_file_begun begin_erase(struct kvs_file_item *item, uint32_t slot) {
  memset(item->request.scratch, 0, KVS_FILE_PAGE);
  kvs_file_span_of_page(item, slot, item->request.scratch);
  return KVS_FILE_GO;
}

/* -- begin --------------------------------------------------------------------------------------------------------- */

/* Not 0: a store whose bytes need not be written, because its epoch has ended or is unknown. */
static int late_code_locked(const struct kvs_file_item *item) {
  const struct kvs_file_transfer *transfer = item->transfer;
  const struct kvs_file_epoch *now = &transfer->store->epochs.now;
  if (transfer->kind != KVS_FILE_STORE || item->phase != KVS_FILE_TRANSFER || item->progress >= KVS_FILE_WRITTEN)
    return 0;
  if (!kvs_file_epoch_known(now)) return KVS_FILE_NO_EPOCH;
  return kvs_file_epoch_is(&transfer->epoch, now) ? 0 : KVS_FILE_CLEARED;
}

static bool deletes_nothing(const struct kvs_file_item *item) {
  const struct kvs_file_entry *entry = item->entry;
  return item->transfer->kind == KVS_FILE_DELETE && item->phase == KVS_FILE_TRANSFER && entry->slot == KVS_NO_SLOT &&
         entry->stale == KVS_NO_SLOT;
}

/* The slot of the item's next request; KVS_NO_SLOT: a store has yet to take one. */
static uint32_t slot_of_request(const struct kvs_file_item *item) {
  if (item->phase == KVS_FILE_SCRUB_STALE) return item->entry->stale;
  if (item->phase == KVS_FILE_SCRUB_OLD) return item->old;
  return item->phase == KVS_FILE_TRANSFER && item->transfer->kind == KVS_FILE_STORE ? KVS_NO_SLOT : item->slot;
}

/* Returns whether the item continues. A begun item cannot be cancelled. The block may be missing by now: a refresh or
 * a new epoch can remove it. */
static bool may_continue(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  pthread_mutex_lock(&store->lock);
  bool cancelled = item->transfer->cancelled && item->progress == KVS_FILE_PENDING;
  bool stop = cancelled || (reads(item) && item->phase == KVS_FILE_TRANSFER && item->entry->slot == KVS_NO_SLOT);
  const int late = stop ? 0 : late_code_locked(item);
  const bool cleared = !stop && deletes_nothing(item);
  bool moves = !item->transfer->pools || item->staging != UINT32_MAX; /* otherwise it only takes a slot */
  if (moves && item->progress == KVS_FILE_PENDING) item->progress = KVS_FILE_BEGUN;
  if (stop) {
    kvs_file_item_finish_locked(item, cancelled ? KVS_CANCELLED : KVS_MISSING, 0);
    kvs_file_run_ready_locked(store);
  } else if (late || cleared) {
    kvs_file_item_finish_locked(item, late ? KVS_FILE : KVS_OK, late);
    kvs_file_run_ready_locked(store);
  } else if (item->phase == KVS_FILE_TRANSFER && !reads(item) && item->entry->stale != KVS_NO_SLOT && !item->tries) {
    item->phase = KVS_FILE_SCRUB_STALE;
  } else if (item->phase == KVS_FILE_TRANSFER && item->transfer->kind != KVS_FILE_STORE) {
    item->slot = item->entry->slot;
    item->epoch = store->epochs.now;
    kvs_file_note_used_locked(store, item->slot);
  }
  bool goes_on = !stop && !late && !cleared;
  const uint32_t slot = goes_on ? slot_of_request(item) : KVS_NO_SLOT;
  if (slot != KVS_NO_SLOT) goes_on = hold_locked(item, slot);
  pthread_mutex_unlock(&store->lock);
  return goes_on;
}

static enum kvs_file_begun begin(struct kvs_file_item *item) {
  if (!may_continue(item)) return KVS_FILE_SKIP;
  switch (item->phase) {
  case KVS_FILE_SCRUB_STALE:
    return begin_erase(item, item->entry->stale);
  case KVS_FILE_SCRUB_OLD:
    return begin_erase(item, item->old);
  case KVS_FILE_SCRUB_OWN:
    return begin_erase(item, item->slot);
  case KVS_FILE_TRANSFER:
    break;
  }
  if (item->transfer->kind == KVS_FILE_STORE) return begin_write(item);
  if (item->transfer->kind == KVS_FILE_DELETE) return begin_erase(item, item->slot);
  kvs_file_span_of_block(item, false);
  return KVS_FILE_GO;
}

enum kvs_file_begun kvs_file_item_begin(struct kvs_file_request *request) {
  struct kvs_file_item *item = item_of(request);
  if (begin(item) != KVS_FILE_GO) return KVS_FILE_SKIP;
  int code = kvs_file_segment_open(item->transfer->store, item->held, &request->span.fd);
  if (!code) return KVS_FILE_GO;
  kvs_file_item_end(request, code);
  return KVS_FILE_SKIP;
}

/* -- completion of a request --------------------------------------------------------------------------------------- */

static void requeue_locked(struct kvs_file_item *item, enum kvs_file_phase phase) {
  item->phase = phase;
  item->request.rank = KVS_FILE_FIRST;
  kvs_file_item_queue(item);
}

/* The header may still be on disk under some key: the slot is not used before the next open. */
static void lose_slot_locked(struct kvs_file_store *store, struct kvs_file_entry *entry, uint32_t slot) {
  store->stats.lost_slots++;
  (void)kvs_file_index_add_stale(entry, slot); /* without memory it may come back at the next open */
}

/* Publish the written block, and erase the block that it replaces. */
static void written_locked(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  struct kvs_file_entry *entry = item->entry;
  if (!kvs_file_epoch_is(&item->transfer->epoch, &store->epochs.now)) { /* no block now, whatever its header says */
    kvs_file_slot_give_locked(store, item->slot);
    kvs_file_item_finish_locked(item, KVS_FILE, KVS_FILE_CLEARED);
    return;
  }
  item->old = entry->foreign ? KVS_NO_SLOT : entry->slot;
  kvs_file_set_slot_locked(store, entry, item->slot);
  entry->sequence = item->sequence;
  store->unchecked_nbytes += store->geometry.slot_nbytes;
  kvs_file_root_of(store, item->slot)->nfailures = 0;
  leave_writes_locked(item);
  release_victim_locked(item);
  if (item->old != KVS_NO_SLOT)
    requeue_locked(item, KVS_FILE_SCRUB_OLD);
  else
    kvs_file_item_finish_locked(item, KVS_OK, 0);
}

/* The write was refused before a byte of it went to the file: the slot has what it had. */
static bool is_unwritten(const struct kvs_file_item *item, int code) {
  const bool refused = code == EROFS || code == EACCES || code == EPERM || code == EMFILE || code == ENFILE ||
                       code == ENOENT || code == ESTALE;
  return refused && item->request.span.offset == kvs_file_slot_at(item->transfer->store, item->slot);
}

static void unwritten_locked(struct kvs_file_item *item) {
  struct kvs_file_store *store = item->transfer->store;
  kvs_file_slot_failed_locked(store, item->slot, false, item->code);
  item->progress = KVS_FILE_BEGUN; /* the end returns the slot, or the block that was evicted */
  kvs_file_item_finish_locked(item, KVS_FILE, item->code);
}

static void store_ended_locked(struct kvs_file_item *item, int code) {
  struct kvs_file_store *store = item->transfer->store;
  struct kvs_file_entry *entry = item->entry;
  switch (item->phase) {
  case KVS_FILE_SCRUB_STALE:
    if (!code) kvs_file_index_drop_stale(entry);
    if (code) item->tries = 1; /* the new block is not evicted before the older one is erased */
    requeue_locked(item, KVS_FILE_TRANSFER);
    break;
  case KVS_FILE_TRANSFER:
    item->code = code;
    if (is_unwritten(item, code))
      unwritten_locked(item);
    else if (code)
      requeue_locked(item, KVS_FILE_SCRUB_OWN);
    else
      written_locked(item);
    break;
  case KVS_FILE_SCRUB_OLD: /* the newer block is valid even if this erase fails */
    if (code)
      lose_slot_locked(store, entry, item->old);
    else
      kvs_file_slot_give_locked(store, item->old);
    kvs_file_item_finish_locked(item, KVS_OK, 0);
    break;
  case KVS_FILE_SCRUB_OWN: /* the slot's header may now be of this key or of the victim's */
    if (code) {
      lose_slot_locked(store, entry, item->slot);
      if (item->sequence < store->whole_below) store->whole_below = item->sequence; /* this header may be whole */
      if (item->victim) (void)kvs_file_index_add_stale(item->victim, item->slot);
    }
    kvs_file_slot_failed_locked(store, item->slot, !code, item->code);
    kvs_file_item_finish_locked(item, KVS_FILE, item->code);
    break;
  }
}

static void delete_ended_locked(struct kvs_file_item *item, int code) {
  struct kvs_file_store *store = item->transfer->store;
  struct kvs_file_entry *entry = item->entry;
  if (code) {
    kvs_file_item_finish_locked(item, KVS_FILE, code);
  } else if (item->phase == KVS_FILE_SCRUB_STALE) {
    kvs_file_index_drop_stale(entry);
    if (entry->slot != KVS_NO_SLOT || entry->stale != KVS_NO_SLOT)
      requeue_locked(item, KVS_FILE_TRANSFER);
    else
      kvs_file_item_finish_locked(item, KVS_OK, 0);
  } else {
    const bool leaving = entry->leaving == item->slot; /* cleared meanwhile */
    if (!leaving) kvs_file_set_slot_locked(store, entry, KVS_NO_SLOT);
    if (!leaving) kvs_file_slot_give_locked(store, item->slot);
    kvs_file_item_finish_locked(item, KVS_OK, 0);
  }
}

/* -- loads --------------------------------------------------------------------------------------------------------- */

static int read_ended(struct kvs_file_item *item) {
  const struct kvs_file_geometry *g = &item->transfer->store->geometry;
  const uint64_t page = KVS_FILE_PAGE, whole = g->block_nbytes / page * page;
  uint8_t *behind = kvs_file_header_of(item) + page, *data = kvs_file_memory_of(item);
  if (item->transfer->pools) return kvs_file_check_block(item, data);
  if (kvs_file_is_in_place(item)) {
    memcpy(data + whole, behind, g->block_nbytes - whole);
    return kvs_file_check_block(item, data);
  }
  int status = kvs_file_check_block(item, behind);
  if (!status) kvs_file_copy_block(item, behind, false);
  return status;
}

/* Whether a failed read says that the block cannot be read. Otherwise it was memory, descriptors or the device. */
static bool is_unreadable(int code) {
  static const int of_others[] = {ENOMEM, EAGAIN, EFAULT, EMFILE, ENFILE, KVS_FILE_DEVICE};
  for (size_t i = 0; i < sizeof of_others / sizeof *of_others; i++)
    if (code == of_others[i]) return false;
  return code < KVS_FILE_CUFILE || code >= KVS_FILE_ENDED;
}

/* Remove a block that cannot be loaded from the index, so that it can be stored again. If the disk cannot read it, its
 * slot is not used before the next open, which may find the block again. If it can, and what it reads is spoilt, the
 * header is erased and the slot is free. Returns whether the item goes on with that. */
static bool remove_lost_locked(struct kvs_file_item *item, int status, int code) {
  struct kvs_file_store *store = item->transfer->store;
  struct kvs_file_entry *entry = item->entry;
  if (entry->slot != item->slot) return false;
  const bool foreign = entry->foreign || store->settings.readonly;
  kvs_file_set_slot_locked(store, entry, KVS_NO_SLOT);
  if (foreign) return false;
  if (!item->spoilt) {
    lose_slot_locked(store, entry, item->slot);
    return false;
  }
  item->status = status;
  item->code = code;
  requeue_locked(item, KVS_FILE_SCRUB_OWN);
  return true;
}

static void load_erased_locked(struct kvs_file_item *item, int code) {
  struct kvs_file_store *store = item->transfer->store;
  if (code)
    lose_slot_locked(store, item->entry, item->slot);
  else
    kvs_file_slot_give_locked(store, item->slot);
  kvs_file_item_finish_locked(item, item->status, item->code);
}

/* For a reader, the writing process may be writing the block just now: retry the read after a pause. */
static bool read_again(struct kvs_file_item *item) {
  static const long pauses_ns[] = {1000000, 20000000};
  struct kvs_file_store *store = item->transfer->store;
  if (!kvs_file_is_foreign(store, item->slot) || item->tries == sizeof pauses_ns / sizeof *pauses_ns) return false;
  nanosleep(&(struct timespec){.tv_nsec = pauses_ns[item->tries++]}, NULL);
  kvs_file_item_queue(item);
  return true;
}

static void load_ended(struct kvs_file_item *item, int code) {
  struct kvs_file_store *store = item->transfer->store;
  const bool erased = item->phase == KVS_FILE_SCRUB_OWN;
  int status = code ? KVS_FILE : erased ? KVS_OK : read_ended(item);
  if (status == KVS_DAMAGED && read_again(item)) return;
  if (status == KVS_OK && !erased && item->transfer->pools) {
    kvs_file_staging_arrived(item);
    return;
  }
  if (code == KVS_FILE_ENDED && !erased && !kvs_file_is_foreign(store, item->slot))
    item->spoilt = kvs_file_segment_repair(store, item->slot / store->geometry.slots) == 0;
  kvs_file_lock_current(store);
  bool lost = status == KVS_DAMAGED || status == KVS_MISSING || (code && is_unreadable(code));
  if (erased)
    load_erased_locked(item, code);
  else if (!lost || !remove_lost_locked(item, status, code ? code : item->code))
    kvs_file_item_finish_locked(item, status, code ? code : item->code);
  kvs_file_run_ready_locked(store);
  pthread_mutex_unlock(&store->lock);
}

/* -- end ----------------------------------------------------------------------------------------------------------- */

/* With O_DIRECT nothing is left in the page cache. */
static int flush(struct kvs_file_item *item, const struct kvs_file_span *whole) {
  const struct kvs_file_store *store = item->transfer->store;
  const unsigned how = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  if (store->settings.durability != KVS_FILE_FLUSH || store->direct) return 0;
  return sync_file_range(whole->fd, (off_t)whole->offset, (off_t)store->geometry.slot_nbytes, how) ? errno : 0;
}

static void end(struct kvs_file_item *item, int code) {
  struct kvs_file_store *store = item->transfer->store;
  if (reads(item)) {
    load_ended(item, code);
    return;
  }
  bool stores = item->transfer->kind == KVS_FILE_STORE, written = stores && item->phase == KVS_FILE_TRANSFER;
  if (!code && written) {
    const int fd = item->request.span.fd;
    kvs_file_span_of_page(item, item->slot, NULL);
    item->request.span.fd = fd;
    code = flush(item, &item->request.span);
  }
  kvs_file_lock_current(store);
  if (stores)
    store_ended_locked(item, code);
  else
    delete_ended_locked(item, code);
  kvs_file_run_ready_locked(store);
  pthread_mutex_unlock(&store->lock);
  if (written) kvs_file_checkpoint_if_due(store); /* the item may have been freed */
}

/* The item may have been freed, or be under way again, before its segment is released. */
void kvs_file_item_end(struct kvs_file_request *request, int code) {
  struct kvs_file_item *item = item_of(request);
  struct kvs_file_store *store = item->transfer->store;
  const uint32_t held = item->held;
  item->held = UINT32_MAX;
  end(item, code);
  kvs_file_segment_release(store, held);
}
