/* Transfers of the file tier: submission and queries. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/wait.h"
#include "files/current.h"
#include "files/ended.h"
#include "files/guard.h"
#include "files/keys.h"
#include "files/mover.h"
#include "files/peers.h"
#include "files/state.h"

enum { MOST_BLOCKS = 1 << 20 }; /* of unfinished transfers of a kind; the first transfer is always admitted */

/* -- submitting ---------------------------------------------------------------------------------------------------- */

static int check_blocks(const struct kvs_file_keys *keys, const struct kvs_file_blocks *blocks,
                        const struct kvs_file_options *options, struct kvs_error *err) {
  if (!blocks || blocks->addresses) return KVS_OK;
  if (options && options->nparts) return kvs_fail(err, KVS_INVALID, "blocks in pools have no parts of their own");
  if (!blocks->pools || blocks->npools == 0)
    return kvs_fail(err, KVS_INVALID, "blocks are neither addresses nor in pools");
  if (blocks->ids.count == keys->count) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "ids has %zu items, but keys has %zu", blocks->ids.count, keys->count);
}

static void set_up_items(struct kvs_file_transfer *transfer, const struct kvs_file_blocks *blocks) {
  static const enum kvs_file_rank ranks[] = {
      [KVS_FILE_STORE] = KVS_FILE_STORES, [KVS_FILE_LOAD] = KVS_FILE_LOADS, [KVS_FILE_DELETE] = KVS_FILE_DELETES};
  const uint64_t moves = transfer->kind == KVS_FILE_DELETE ? KVS_FILE_PAGE : transfer->store->geometry.slot_nbytes;
  for (size_t i = 0; i < transfer->nitems; i++) {
    struct kvs_file_item *item = &transfer->items[i];
    item->transfer = transfer;
    item->request.begin = kvs_file_item_begin;
    item->request.end = kvs_file_item_end;
    item->request.rank = ranks[transfer->kind];
    item->request.nbytes = kvs_file_request_nbytes(moves);
    item->phase = KVS_FILE_TRANSFER;
    item->slot = item->old = KVS_NO_SLOT;
    item->staging = item->held = UINT32_MAX;
    if (blocks && blocks->addresses && !transfer->nparts) item->address = blocks->addresses[i];
  }
}

static int set_up_parts(struct kvs_file_transfer *transfer, const struct kvs_file_blocks *blocks,
                        const struct kvs_file_options *options, struct kvs_error *err) {
  const uint64_t nbytes = transfer->store->geometry.block_nbytes;
  const size_t n = options->nparts;
  if (transfer->store->settings.ncodings)
    return kvs_fail(err, KVS_INVALID, "a coded block has no parts: it lies together, at one address");
  if (n > KVS_FILE_PARTS) return kvs_fail(err, KVS_INVALID, "a block has %zu parts: at most %d", n, KVS_FILE_PARTS);
  if (transfer->nitems >= SIZE_MAX / sizeof(uint64_t) / n - 1)
    return kvs_fail(err, KVS_NOMEM, "no memory for %zu blocks of %zu parts", transfer->nitems, n);
  uint64_t *part = malloc((transfer->nitems + 1) * n * sizeof *part), left = nbytes;
  if (!part) return kvs_fail(err, KVS_NOMEM, "no memory for %zu blocks of %zu parts", transfer->nitems, n);
  transfer->part_nbytes = part;
  transfer->nparts = n;
  for (size_t i = 0; i < n; i++) {
    part[i] = options->part_nbytes[i];
    if (part[i] == 0 || part[i] > left)
      return kvs_fail(err, KVS_INVALID,
                      "parts[%zu] is %" PRIu64 " bytes: must be 1 or more, and a block has %" PRIu64 " in all", i,
                      part[i], nbytes);
    left -= part[i];
  }
  if (left)
    return kvs_fail(err, KVS_INVALID, "the parts have %" PRIu64 " bytes in all; a block of the store %" PRIu64,
                    nbytes - left, nbytes);
  memcpy(part + n, blocks->addresses, transfer->nitems * n * sizeof *part);
  return KVS_OK;
}

/* Find or create the entries of all keys, or none. The caller begins the items. */
static int find_entries_locked(struct kvs_file_transfer *transfer, const struct kvs_file_keys *keys,
                               struct kvs_error *err) {
  struct kvs_file_index *index = &transfer->store->index;
  size_t begin = 0, i = 0;
  for (; i < keys->count; begin = keys->ends[i++]) {
    struct kvs_file_entry *entry = kvs_file_index_add(index, keys->data + begin, keys->ends[i] - begin);
    if (!entry) break;
    transfer->items[i].entry = entry;
    entry->pins++; /* keeps the entry until all are found */
  }
  bool all = i == keys->count;
  for (size_t k = 0; k < i; k++) transfer->items[k].entry->pins--;
  for (size_t k = 0; !all && k < i; k++) {
    struct kvs_file_entry *entry = transfer->items[k].entry;
    bool again = false; /* settle a repeated key once */
    for (size_t j = 0; j < k && !again; j++) again = transfer->items[j].entry == entry;
    if (!again) kvs_file_index_settle(index, entry);
  }
  return all ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory for %zu keys", keys->count);
}

/* Each kind has a limit of its own: no kind is refused because of another. */
static int check_room_locked(struct kvs_file_store *store, enum kvs_file_kind kind, size_t count,
                             struct kvs_error *err) {
  static const char *const names[] = {"stores", "loads", "deletes"};
  if (store->closing) return kvs_fail(err, KVS_CLOSED, "the store is closed");
  bool many = store->unfinished[kind] && store->unfinished_blocks[kind] + count > MOST_BLOCKS;
  if (store->unfinished[kind] < store->settings.queue && !many) return KVS_OK;
  store->stats.refused_full++;
  return kvs_fail(err, KVS_QUEUE_FULL,
                  "the store holds %u unfinished %s (%zu blocks): nothing of this call was queued; wait for one, or do "
                  "without this block",
                  store->unfinished[kind], names[kind], store->unfinished_blocks[kind]);
}

static void enlist_locked(struct kvs_file_transfer *transfer) {
  struct kvs_file_store *store = transfer->store;
  transfer->earlier = store->newest;
  *(store->newest ? &store->newest->later : &store->oldest) = transfer;
  store->newest = transfer;
  store->unfinished[transfer->kind]++;
  store->unfinished_blocks[transfer->kind] += transfer->nitems;
  transfer->remaining = transfer->nitems;
  atomic_store(&transfer->refs, 2);
  if (transfer->nitems == 0) kvs_file_transfer_ended_locked(transfer);
  for (size_t i = 0; i < transfer->nitems; i++) kvs_file_item_begin_locked(&transfer->items[i]);
  kvs_file_run_ready_locked(store);
}

static int make_transfer(struct kvs_file_store *store, enum kvs_file_kind kind, const struct kvs_file_keys *keys,
                         const struct kvs_file_blocks *blocks, const struct kvs_file_options *options,
                         struct kvs_file_transfer **made, struct kvs_error *err) {
  struct kvs_file_transfer *transfer = calloc(1, sizeof *transfer + keys->count * sizeof *transfer->items);
  if (!transfer) return kvs_fail(err, KVS_NOMEM, "no memory for a transfer of %zu blocks", keys->count);
  transfer->store = store;
  transfer->kind = kind;
  transfer->nitems = keys->count;
  transfer->start_ns = kvs_clock_ns();
  atomic_init(&transfer->refs, 1);
  atomic_init(&transfer->state, KVS_STATE_RUNNING);
  if (options) {
    transfer->replace = options->replace;
    transfer->owner = options->owner;
    transfer->release = options->release;
  }
  bool parts = blocks && blocks->addresses && options && options->nparts;
  int status = parts ? set_up_parts(transfer, blocks, options, err) : KVS_OK;
  if (status) {
    kvs_file_transfer_drop(transfer);
    return status;
  }
  set_up_items(transfer, blocks);
  *made = transfer;
  return KVS_OK;
}

static int check_call(const struct kvs_file_store *store, enum kvs_file_kind kind, const struct kvs_file_keys *keys,
                      const struct kvs_file_blocks *blocks, const struct kvs_file_options *options,
                      struct kvs_error *err) {
  int status = check_blocks(keys, blocks, options, err);
  if (!status && store->settings.readonly && !store->refusal && kind != KVS_FILE_LOAD)
    status = kvs_fail(err, KVS_UNSUPPORTED, "the store was opened with readonly: nothing can be stored or deleted");
  return status;
}

static int submit_own(struct kvs_file_store *store, enum kvs_file_kind kind, const struct kvs_file_keys *keys,
                      const struct kvs_file_blocks *blocks, const struct kvs_file_options *options,
                      struct kvs_file_transfer **submitted, struct kvs_error *err) {
  struct kvs_file_transfer *transfer = NULL;
  int status = options ? KVS_CHECK_RESERVED(options, "kvs_file_options", err) : KVS_OK;
  if (!status) status = check_call(store, kind, keys, blocks, options, err);
  if (!status) status = kvs_file_enter(store, err);
  if (status) return status;
  status = make_transfer(store, kind, keys, blocks, options, &transfer, err);
  if (!status && blocks && (blocks->pools || (options && options->nafter)))
    status = kvs_file_mover_prepare(transfer, blocks, options, err);
  kvs_file_lock_current(store);
  if (!status) status = check_room_locked(store, kind, keys->count, err);
  kvs_file_catch_up_locked(store);
  if (!status) transfer->epoch = store->epochs.now;
  if (!status) status = find_entries_locked(transfer, keys, err);
  if (!status) enlist_locked(transfer);
  kvs_file_leave_locked(store);
  pthread_mutex_unlock(&store->lock);
  if (status) {
    if (transfer) kvs_file_transfer_drop(transfer);
    return status;
  }
  kvs_file_ref(store);
  *submitted = transfer;
  return KVS_OK;
}

/* Every word behind the caller's pointers is read once: keys are copied, addresses go to the items, pools and slots to
 * the transfer. */
static int submit(struct kvs_file_store *store, enum kvs_file_kind kind, const struct kvs_file_keys *keys,
                  const struct kvs_file_blocks *blocks, const struct kvs_file_options *options,
                  struct kvs_file_transfer **submitted, struct kvs_error *err) {
  struct kvs_file_keys own;
  const struct kvs_file_blocks where = blocks ? *blocks : (struct kvs_file_blocks){0};
  const struct kvs_file_options how = options ? *options : (struct kvs_file_options){0};
  int status = kvs_file_keys_copy(keys, &own, err);
  if (status) return status;
  status = submit_own(store, kind, &own, blocks ? &where : NULL, options ? &how : NULL, submitted, err);
  kvs_file_keys_free(&own);
  return status;
}

int kvs_file_store_blocks(struct kvs_file_store *store, const struct kvs_file_keys *keys,
                          const struct kvs_file_blocks *blocks, const struct kvs_file_options *options,
                          struct kvs_file_transfer **transfer, struct kvs_error *err) {
  return submit(store, KVS_FILE_STORE, keys, blocks, options, transfer, err);
}

int kvs_file_load_blocks(struct kvs_file_store *store, const struct kvs_file_keys *keys,
                         const struct kvs_file_blocks *blocks, const struct kvs_file_options *options,
                         struct kvs_file_transfer **transfer, struct kvs_error *err) {
  return submit(store, KVS_FILE_LOAD, keys, blocks, options, transfer, err);
}

int kvs_file_delete(struct kvs_file_store *store, const struct kvs_file_keys *keys,
                    const struct kvs_file_options *options, struct kvs_file_transfer **transfer,
                    struct kvs_error *err) {
  return submit(store, KVS_FILE_DELETE, keys, NULL, options, transfer, err);
}

/* -- queries ------------------------------------------------------------------------------------------------------- */

void kvs_file_transfer_ref(struct kvs_file_transfer *transfer) {
  kvs_file_ref(transfer->store);
  atomic_fetch_add(&transfer->refs, 1);
}

void kvs_file_transfer_unref(struct kvs_file_transfer *transfer) {
  struct kvs_file_store *store = transfer->store;
  if (store->fork_generation != kvs_fork_generation()) return; /* the store is the parent's */
  kvs_file_transfer_drop(transfer);
  kvs_file_unref(store);
}

struct kvs_file_store *kvs_file_transfer_store(const struct kvs_file_transfer *transfer) { return transfer->store; }

static enum kvs_state state_of(struct kvs_file_transfer *transfer) {
  return (enum kvs_state)atomic_load_explicit(&transfer->state, memory_order_acquire);
}

bool kvs_file_transfer_done(struct kvs_file_transfer *transfer) { return state_of(transfer) != KVS_STATE_RUNNING; }

int kvs_file_transfer_wait(struct kvs_file_transfer *transfer, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_file_store *store = transfer->store;
  int status = kvs_file_check_fork(store, err);
  if (status) return status;
  uint64_t deadline = kvs_deadline(timeout_ns);
  pthread_mutex_lock(&store->lock);
  while (state_of(transfer) == KVS_STATE_RUNNING && kvs_cond_wait(&store->ended, &store->lock, deadline)) continue;
  pthread_mutex_unlock(&store->lock);
  if (state_of(transfer) == KVS_STATE_RUNNING)
    return kvs_fail(err, KVS_TIMEOUT, "the transfer had not ended after %.3f s; it goes on", (double)timeout_ns / 1e9);
  return kvs_file_transfer_error(transfer, err);
}

static int fail_item(const struct kvs_file_item *item, struct kvs_error *err) {
  static const char *const verbs[] = {"storing", "loading", "deleting"};
  const char *verb = verbs[item->transfer->kind];
  size_t position = (size_t)(item - item->transfer->items);
  switch (item->status) {
  case KVS_OK:
    return KVS_OK;
  case KVS_MISSING:
    if (item->code == KVS_FILE_CLEARED)
      return kvs_fail(err, KVS_MISSING, "block %zu is not in the store: it was cleared during the load", position);
    return kvs_fail(err, KVS_MISSING, "block %zu is not in the store", position);
  case KVS_NOT_STORED:
    return kvs_fail(err, KVS_NOT_STORED, "block %zu does not fit its coded size, and is not stored", position);
  case KVS_DAMAGED:
    if (item->transfer->kind == KVS_FILE_STORE)
      return kvs_fail(err, KVS_DAMAGED,
                      "block %zu is not stored: its bytes are not a block that is coded as the store's", position);
    return kvs_fail(err, KVS_DAMAGED, "block %zu is damaged on disk: its header or checksum is wrong, it is lost",
                    position);
  case KVS_NO_ROOM:
    return kvs_fail(err, KVS_NO_ROOM, "no room to store block %zu: all blocks of the store are pinned or in use",
                    position);
  case KVS_CANCELLED:
    return kvs_fail(err, KVS_CANCELLED, "cancelled before block %zu had begun", position);
  case KVS_UNSUPPORTED:
    return kvs_fail(err, KVS_UNSUPPORTED, "block %zu was stored by another process, which alone deletes it", position);
  case KVS_FILE:
    return kvs_file_fail(err, item->code, "%s block %zu", verb, position);
  default:
    kvs_fail(err, item->status, "%s block %zu: the copy between device and staging failed (code %d)", verb, position,
             item->code);
    err->code = item->code;
    return item->status;
  }
}

int kvs_file_transfer_reason(struct kvs_file_transfer *transfer, size_t position, struct kvs_error *err) {
  if (position >= transfer->nitems)
    return kvs_fail(err, KVS_RANGE, "position is %zu; the transfer has %zu blocks", position, transfer->nitems);
  if (state_of(transfer) == KVS_STATE_RUNNING) return KVS_OK;
  return fail_item(&transfer->items[position], err);
}

int kvs_file_transfer_error(struct kvs_file_transfer *transfer, struct kvs_error *err) {
  if (state_of(transfer) == KVS_STATE_RUNNING || transfer->nfailed == 0) return KVS_OK;
  size_t first = 0, n = transfer->nfailed;
  while (transfer->items[first].status == KVS_OK) first++;
  int status = fail_item(&transfer->items[first], err);
  size_t used = strlen(err->message);
  if (n > 1)
    snprintf(err->message + used, sizeof err->message - used, "; in all %zu of %zu blocks failed", n, transfer->nitems);
  return status;
}

size_t kvs_file_transfer_failed(struct kvs_file_transfer *transfer, uint32_t *positions, size_t capacity) {
  size_t n = 0;
  if (state_of(transfer) == KVS_STATE_RUNNING) return 0;
  for (size_t i = 0; i < transfer->nitems; i++) {
    if (transfer->items[i].status == KVS_OK) continue;
    if (n < capacity) positions[n] = (uint32_t)i;
    n++;
  }
  return n;
}

void kvs_file_transfer_get_info(struct kvs_file_transfer *transfer, struct kvs_file_transfer_info *info) {
  static const char *const names[] = {"store", "load", "delete"};
  bool moves = transfer->kind != KVS_FILE_DELETE;
  *info = (struct kvs_file_transfer_info){
      .state = state_of(transfer),
      .what = names[transfer->kind],
      .nbytes = moves ? transfer->nitems * transfer->store->geometry.block_nbytes : 0,
      .num_blocks = transfer->nitems,
  };
  if (info->state == KVS_STATE_RUNNING) return;
  info->elapsed_ns = transfer->elapsed_ns;
  info->num_failed = transfer->nfailed;
  info->num_kept = transfer->nkept;
}
