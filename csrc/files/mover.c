/* Moves pool blocks between device and files through a ring of staging slots. Staging is pinned memory, or device
 * memory with GPUDirect Storage. Copies between device and staging overlap reads and writes of other blocks.
 *
 * A staging slot is a header page and a block, as on disk. One thread waits for gates (a transfer's start
 * dependencies), assigns staging slots to items that hold their key, and slots on disk to stores, submits batched
 * copies with kvs_move_blocks() on the store's own streams, and polls for their completion. An item with a staging slot
 * never waits for a key or for a slot on disk, so every staging slot becomes free again. A quarter is reserved for
 * loads, which go first, except before stores that are due (files/engine.h): stores keep their staging while they wait
 * in the file queue behind loads.
 *
 * Locks: store->lock is never taken under mover->lock. Under mover->lock the device is only polled. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/thread.h"
#include "base/wait.h"
#include "codecs/coding.h"
#include "device/device.h"
#include "files/current.h"
#include "files/gds.h"
#include "files/keys.h"
#include "files/mover.h"
#include "files/slot.h"
#include "files/spans.h"
#include "files/staging.h"
#include "private.h"

enum { LEAST_SLOTS = 4, MOST_SLOTS = 4096, BATCH = 64 };
static const uint64_t STAGING_NBYTES = 128ull << 20;
static const int64_t POLL_NS = 50 * 1000;

/* Copies in flight, oldest first. */
struct kvs_file_staging_copy {
  struct kvs_file_staging_copy *next;
  struct kvs_transfer *transfer;
  size_t count;
  struct kvs_file_item *items[BATCH];
};

static bool is_load(const struct kvs_file_item *item) { return item->transfer->kind == KVS_FILE_LOAD; }

static void finish(struct kvs_file_item *item, int status, int code) {
  struct kvs_file_store *store = item->transfer->store;
  kvs_file_lock_current(store);
  kvs_file_item_finish_locked(item, status, code);
  kvs_file_run_ready_locked(store);
  pthread_mutex_unlock(&store->lock);
}

/* -- copies -------------------------------------------------------------------------------------------------------- */

/* Marks in `lost` the positions of the batch whose copy failed. */
static int copy_result(struct kvs_file_staging_copy *copy, bool lost[BATCH], int *code) {
  uint32_t failed[BATCH];
  struct kvs_error err = {0};
  int status = kvs_transfer_error(copy->transfer, &err);
  size_t n = kvs_transfer_failed(copy->transfer, failed, BATCH);
  for (size_t i = 0; i < BATCH; i++) lost[i] = status && n == 0; /* failed without a list of blocks */
  for (size_t i = 0; i < n; i++) lost[failed[i]] = true;
  *code = err.code;
  return status;
}

/* The staging pool remembers the failed copy into this slot. Note a host write, which overwrites the slot, so that the
 * failure does not travel to the next block. */
static void clear_staging_failure(struct kvs_file_mover *mover, const struct kvs_file_item *item) {
  int64_t slot = item->staging;
  const struct kvs_ids ids = {&slot, 8, 1};
  struct kvs_error ignored;
  for (size_t i = 0; !is_load(item) && i < mover->npools; i++)
    (void)kvs_note_access(mover->pools[i], &ids, true, 0, 0, mover->streams[0], "the file tier", &ignored);
}

static void finish_copy(struct kvs_file_mover *mover, struct kvs_file_staging_copy *copy) {
  bool lost[BATCH];
  int code, status = copy_result(copy, lost, &code);
  for (size_t i = 0; i < copy->count; i++) {
    struct kvs_file_item *item = copy->items[i];
    if (lost[i]) {
      clear_staging_failure(mover, item);
      finish(item, status, code);
    } else if (is_load(item)) {
      finish(item, KVS_OK, 0);
    } else {
      kvs_file_item_queue(item);
    }
  }
  kvs_transfer_unref(copy->transfer);
  free(copy);
}

/* Handle the copies that have ended; true: there were some. */
static bool collect_copies(struct kvs_file_mover *mover) {
  bool any = false;
  for (int load = 1; load >= 0; load--)
    for (struct kvs_file_staging_copy *copy; (copy = mover->copies[load]) != NULL && kvs_transfer_done(copy->transfer);
         any = true) {
      mover->copies[load] = copy->next;
      if (!copy->next) mover->last_copy[load] = NULL;
      finish_copy(mover, copy);
    }
  return any;
}

/* KVS_QUEUE_FULL: nothing was submitted, retry later. Otherwise the items are submitted or have failed. */
static int start_copy(struct kvs_file_mover *mover, struct kvs_file_item *const *items, size_t count) {
  struct kvs_file_transfer *transfer = items[0]->transfer;
  bool load = is_load(items[0]);
  int64_t staging[BATCH], slots[BATCH];
  struct kvs_error err = {0};
  struct kvs_file_staging_copy *copy = calloc(1, sizeof *copy);
  for (size_t i = 0; i < count; i++) {
    staging[i] = items[i]->staging;
    slots[i] = transfer->slots[items[i] - transfer->items];
  }
  struct kvs_ids inside = {staging, 8, count}, outside = {slots, 8, count};
  struct kvs_move move = {.src = load ? mover->pools : transfer->pools,
                          .dst = load ? transfer->pools : mover->pools,
                          .npairs = transfer->npools,
                          .src_ids = load ? inside : outside,
                          .dst_ids = load ? outside : inside};
  struct kvs_options options = {.on_stream = true, .stream = mover->streams[load]};
  int status = copy ? kvs_move_blocks(&move, &options, &copy->transfer, &err) : KVS_NOMEM;
  if (status) free(copy);
  if (status == KVS_QUEUE_FULL) return status;
  for (size_t i = 0; status && i < count; i++) finish(items[i], status, err.code);
  if (status) return KVS_OK;
  memcpy(copy->items, items, count * sizeof(struct kvs_file_item *));
  copy->count = count;
  *(mover->last_copy[load] ? &mover->last_copy[load]->next : &mover->copies[load]) = copy;
  mover->last_copy[load] = copy;
  return KVS_OK;
}

/* -- one round ----------------------------------------------------------------------------------------------------- */

/* Copy the loaded blocks of one transfer to the device. */
static bool copy_arrived(struct kvs_file_mover *mover) {
  struct kvs_file_item *items[BATCH];
  size_t count = 0;
  pthread_mutex_lock(&mover->lock);
  while (count < BATCH && mover->arrived.first && (count == 0 || mover->arrived.first->transfer == items[0]->transfer))
    items[count++] = kvs_file_items_take(&mover->arrived);
  pthread_mutex_unlock(&mover->lock);
  if (count == 0) return false;
  if (start_copy(mover, items, count) == KVS_OK) return true;
  pthread_mutex_lock(&mover->lock); /* back to the front */
  while (count > 0) {
    struct kvs_file_item *item = items[--count];
    item->next = mover->arrived.first;
    mover->arrived.first = item;
    if (!item->next) mover->arrived.last = item;
  }
  pthread_mutex_unlock(&mover->lock);
  return false;
}

/* Whether the transfer may start. If a start dependency has failed, *status is the error of its blocks. */
static bool gate_open(struct kvs_file_transfer *transfer, int *status, int *code) {
  struct kvs_error err = {0};
  *status = KVS_OK;
  if (!transfer->gate) return true;
  if (!kvs_transfer_done(transfer->gate)) return false;
  *status = kvs_transfer_error(transfer->gate, &err);
  *code = err.code;
  return true;
}

/* Whose items are given staging: in this order. */
enum { DUE, LOADS, STORES, KINDS };

/* Take up to `most` items of the first transfer of that kind with an open gate. Transfers with no waiting items leave
 * the list. */
static size_t take_waiting(struct kvs_file_mover *mover, int whose, size_t most, struct kvs_file_item **items,
                           int *status, int *code) {
  const bool load = whose == LOADS;
  size_t count = 0;
  pthread_mutex_lock(&mover->lock);
  struct kvs_file_transfer **at = &mover->first[load], *before = NULL;
  while (*at && !gate_open(*at, status, code)) {
    before = *at;
    at = &(*at)->next_waiting;
  }
  struct kvs_file_transfer *transfer = *at;
  if (transfer && (*status || !transfer->pools))
    most = BATCH; /* these items need no staging */
  else if (transfer && most && whose == DUE)
    most = mover->first[1] && kvs_file_request_is_due(&transfer->waiting.first->request, &mover->turns);
  while (transfer && count < most && transfer->waiting.first) items[count++] = kvs_file_items_take(&transfer->waiting);
  if (transfer && !transfer->waiting.first) {
    *at = transfer->next_waiting;
    if (mover->last[load] == transfer) mover->last[load] = before;
  }
  pthread_mutex_unlock(&mover->lock);
  return count;
}

static void put_back(struct kvs_file_mover *mover, struct kvs_file_item *const *items, size_t count) {
  bool load = is_load(items[0]);
  struct kvs_file_transfer *transfer = items[0]->transfer;
  pthread_mutex_lock(&mover->lock);
  if (!transfer->waiting.first) {
    transfer->next_waiting = mover->first[load];
    mover->first[load] = transfer;
    if (!mover->last[load]) mover->last[load] = transfer;
  }
  while (count > 0) {
    struct kvs_file_item *item = items[--count];
    mover->free[mover->nfree++] = item->staging;
    item->staging = UINT32_MAX;
    item->next = transfer->waiting.first;
    transfer->waiting.first = item;
    if (!item->next) transfer->waiting.last = item;
  }
  pthread_mutex_unlock(&mover->lock);
}

static void give_staging(struct kvs_file_mover *mover, struct kvs_file_item *item) {
  const struct kvs_file_geometry *g = &mover->store->geometry;
  pthread_mutex_lock(&mover->lock);
  item->staging = mover->free[--mover->nfree];
  pthread_mutex_unlock(&mover->lock);
  item->address = mover->staging + item->staging * g->slot_nbytes + KVS_FILE_PAGE;
}

/* Finish the items that are cancelled or whose start dependency has failed. Stores take a slot on disk here; where that
 * takes file system calls, an engine thread does it. Returns the number of items left. */
static size_t drop_ended(struct kvs_file_mover *mover, struct kvs_file_item **items, size_t count, int status,
                         int code) {
  struct kvs_file_store *store = mover->store;
  size_t left = 0;
  pthread_mutex_lock(&store->lock);
  for (size_t i = 0; i < count; i++) {
    struct kvs_file_item *item = items[i];
    if (item->transfer->cancelled || status) {
      bool cancelled = item->transfer->cancelled;
      kvs_file_item_finish_locked(item, cancelled ? KVS_CANCELLED : status, cancelled ? 0 : code);
      continue; /* the item may have been freed */
    }
    if (item->transfer->pools && !is_load(item) && !kvs_file_slot_take_now_locked(item)) {
      kvs_file_item_queue(item); /* it comes back with a slot */
      continue;
    }
    if (item->transfer->pools) item->progress = KVS_FILE_BEGUN;
    items[left++] = item;
  }
  kvs_file_run_ready_locked(store);
  pthread_mutex_unlock(&store->lock);
  return left;
}

/* Give waiting items staging slots. Loads go to the file queue, stores to the copy engine. */
static bool serve_waiting(struct kvs_file_mover *mover, int whose) {
  struct kvs_file_item *items[BATCH];
  int status = KVS_OK, code = 0;
  pthread_mutex_lock(&mover->lock);
  const size_t nfree = mover->nfree, quarter = mover->nslots / 4, batch = whose == DUE ? 1 : (mover->nslots + 3) / 4;
  pthread_mutex_unlock(&mover->lock);
  const bool load = whose == LOADS;
  size_t most = whose != STORES ? nfree : nfree > quarter ? nfree - quarter : 0;
  if (most > batch) most = batch;
  size_t count = take_waiting(mover, whose, most < BATCH ? most : BATCH, items, &status, &code);
  if (count == 0) return false;
  bool staged = items[0]->transfer->pools != NULL;
  count = drop_ended(mover, items, count, status, code);
  for (size_t i = 0; staged && i < count; i++) give_staging(mover, items[i]);
  if (count && staged && !load) {
    if (start_copy(mover, items, count) == KVS_OK) return true;
    put_back(mover, items, count);
    return false;
  }
  for (size_t i = 0; i < count; i++) kvs_file_item_queue(items[i]);
  return true;
}

/* Sleep until something may have changed. */
static void wait_for_change(struct kvs_file_mover *mover) {
  pthread_mutex_lock(&mover->lock);
  bool poll = mover->copies[0] || mover->copies[1] || mover->first[0] || mover->first[1] || mover->arrived.first;
  if (!mover->closed) (void)kvs_cond_wait(&mover->changed, &mover->lock, kvs_deadline(poll ? POLL_NS : -1));
  pthread_mutex_unlock(&mover->lock);
}

static void *serve(void *arg) {
  struct kvs_file_mover *mover = arg;
  for (bool closed = false; !closed;) {
    bool any = collect_copies(mover);
    any |= copy_arrived(mover);
    for (int whose = 0; whose < KINDS; whose++) any |= serve_waiting(mover, whose);
    if (!any) wait_for_change(mover);
    pthread_mutex_lock(&mover->lock);
    closed = mover->closed;
    pthread_mutex_unlock(&mover->lock);
  }
  return NULL;
}

/* -- preparing a transfer ------------------------------------------------------------------------------------------ */

static const struct kvs_coding *coding_of(const struct kvs_file_store *store, size_t pool) {
  return pool < store->settings.ncodings ? store->codings[pool] : NULL;
}

static int open_pools_locked(struct kvs_file_mover *mover, const struct kvs_file_blocks *blocks,
                             struct kvs_error *err) {
  const struct kvs_file_geometry *g = &mover->store->geometry;
  uint64_t offset = KVS_FILE_PAGE;
  struct kvs_pool **pools = calloc(blocks->npools, sizeof(struct kvs_pool *));
  int status = pools ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory for %zu pools", blocks->npools);
  size_t n = 0;
  for (; !status && n < blocks->npools; n++) {
    struct kvs_pool_layout theirs, ours = {.num_blocks = mover->nslots, .stride = g->slot_nbytes, .rows = 1};
    kvs_pool_get_layout(blocks->pools[n], &theirs);
    ours.ptr = mover->staging + offset;
    ours.coding = coding_of(mover->store, n);
    ours.block_nbytes = ours.coding ? kvs_coding_nbytes(ours.coding) : theirs.block_nbytes;
    ours.group = n ? pools[0] : NULL;
    ours.name = "staging of files";
    status = kvs_pool_open(mover->engine, &ours, &pools[n], err);
    if (status) break;
    offset += ours.block_nbytes;
  }
  if (!status) {
    mover->pools = pools;
    mover->npools = n;
    return KVS_OK;
  }
  while (n > 0) kvs_pool_unref(pools[--n]);
  free(pools);
  return status;
}

/* An empty copy says whether blocks can be coded between these pools and staging. */
static int try_coding(struct kvs_file_mover *mover, const struct kvs_file_blocks *blocks, bool load,
                      struct kvs_error *err) {
  const struct kvs_move move = {.src = load ? mover->pools : blocks->pools,
                                .dst = load ? blocks->pools : mover->pools,
                                .npairs = blocks->npools,
                                .src_ids = {.width = 8},
                                .dst_ids = {.width = 8}};
  const struct kvs_options options = {.on_stream = true, .stream = mover->streams[load]};
  struct kvs_transfer *transfer;
  int status = kvs_move_blocks(&move, &options, &transfer, err);
  if (!status) kvs_transfer_unref(transfer);
  return status == KVS_QUEUE_FULL ? KVS_OK : status;
}

/* The first pools define how staging is divided; all later blocks must match them. */
static int match_pools(struct kvs_file_mover *mover, const struct kvs_file_blocks *blocks, struct kvs_error *err) {
  int status = KVS_OK;
  pthread_mutex_lock(&mover->pools_lock);
  if (!mover->pools) status = open_pools_locked(mover, blocks, err);
  bool same = !status && mover->npools == blocks->npools;
  for (size_t i = 0; same && i < blocks->npools; i++) {
    struct kvs_pool_layout theirs, ours;
    kvs_pool_get_layout(blocks->pools[i], &theirs);
    kvs_pool_get_layout(mover->pools[i], &ours);
    same = ours.coding || theirs.block_nbytes == ours.block_nbytes;
  }
  pthread_mutex_unlock(&mover->pools_lock);
  if (status || same) return status;
  return kvs_fail(err, KVS_INVALID, "the store was used with pools of other sizes before: a block is made of %zu",
                  mover->npools);
}

static int check_coding(const struct kvs_file_store *store, size_t i, size_t npools,
                        const struct kvs_pool_layout *layout, struct kvs_error *err) {
  const struct kvs_coding *coding = coding_of(store, i);
  const size_t n = store->settings.ncodings;
  if (n && n != npools)
    return kvs_fail(err, KVS_INVALID, "blocks are in %zu pools; the layout of the store has %zu codings, one a pool",
                    npools, n);
  if (!coding && layout->coding)
    return kvs_fail(err, KVS_INVALID,
                    "blocks[%zu] (pool '%s') is coded, and the layout of the store does not say so: make it with "
                    "coding=, as the pool",
                    i, layout->name);
  if (!coding ||
      (layout->coding ? kvs_coding_is(layout->coding, coding) : layout->block_nbytes == coding->block_nbytes))
    return KVS_OK;
  if (layout->coding)
    return kvs_fail(err, KVS_INVALID, "blocks[%zu] (pool '%s') is coded as %.150s, the blocks of the store as %.150s",
                    i, layout->name, kvs_coding_text(layout->coding), kvs_coding_text(coding));
  return kvs_fail(err, KVS_INVALID,
                  "blocks[%zu] (pool '%s') has blocks of %" PRIu64 " bytes; the store codes blocks of %" PRIu64
                  " bytes and takes those of pools that are coded as it is",
                  i, layout->name, layout->block_nbytes, coding->block_nbytes);
}

static int check_pools(const struct kvs_file_store *store, const struct kvs_file_blocks *blocks,
                       struct kvs_error *err) {
  uint64_t nbytes = 0;
  for (size_t i = 0; i < blocks->npools; i++) {
    struct kvs_pool_layout layout;
    int status = kvs_pool_check_open(blocks->pools[i], err);
    if (status) return status;
    kvs_pool_get_layout(blocks->pools[i], &layout);
    status = check_coding(store, i, blocks->npools, &layout, err);
    if (status) return status;
    nbytes += coding_of(store, i) ? kvs_coding_nbytes(coding_of(store, i)) : layout.block_nbytes;
    if (kvs_pool_engine(blocks->pools[i]) != store->mover->engine)
      return kvs_fail(err, KVS_INVALID, "blocks[%zu] is a pool of %s, and the store of %s", i,
                      kvs_engine_name(kvs_pool_engine(blocks->pools[i])), kvs_engine_name(store->mover->engine));
  }
  if (nbytes == store->geometry.block_nbytes) return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "a block of the pools has %" PRIu64 " bytes in all; one of the store %" PRIu64,
                  nbytes, store->geometry.block_nbytes);
}

static int by_value(const void *a, const void *b) {
  int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
  return (left > right) - (left < right);
}

static int read_slots(struct kvs_file_transfer *transfer, const struct kvs_file_blocks *blocks, struct kvs_error *err) {
  size_t count = transfer->nitems;
  struct kvs_pool_layout layout;
  kvs_pool_get_layout(blocks->pools[0], &layout);
  transfer->slots = malloc((2 * count + 1) * sizeof *transfer->slots); /* one copy for the items, one to be sorted */
  if (!transfer->slots) return kvs_fail(err, KVS_NOMEM, "no memory for %zu slots", count);
  int64_t *sorted = transfer->slots + count;
  for (size_t i = 0; i < count; i++) {
    int64_t id = kvs_file_id(&blocks->ids, i);
    if (id < 0 || (uint64_t)id >= layout.num_blocks)
      return kvs_fail(err, KVS_RANGE, "ids[%zu] is %" PRId64 "; the pool has %" PRIu64 " blocks, 0 to %" PRIu64, i, id,
                      layout.num_blocks, layout.num_blocks - 1);
    transfer->slots[i] = sorted[i] = id;
  }
  if (transfer->kind != KVS_FILE_LOAD) return KVS_OK;
  qsort(sorted, count, sizeof *sorted, by_value);
  for (size_t i = 1; i < count; i++)
    if (sorted[i] == sorted[i - 1])
      return kvs_fail(err, KVS_INVALID, "ids name slot %" PRId64 " twice: a slot can be loaded once", sorted[i]);
  return KVS_OK;
}

/* Whether the pool's blocks can be read and written in place: host memory, each block contiguous. */
static bool in_host_memory(struct kvs_file_mover *mover, const struct kvs_pool_layout *layout) {
  struct kvs_region region;
  struct kvs_error ignored;
  if (layout->rows > 1) return false;
  if (kvs_dev_pointer_query(kvs_engine_device(mover->engine), layout->ptr, &region, &ignored)) return false;
  return region.memory == KVS_MEMORY_PINNED || region.memory == KVS_MEMORY_PAGEABLE;
}

/* The transfer takes `pools` if its blocks go through staging. */
static int set_up_own_pools(struct kvs_file_transfer *transfer, const struct kvs_file_blocks *blocks,
                            struct kvs_pool **pools, struct kvs_error *err) {
  struct kvs_file_mover *mover = transfer->store->mover;
  struct kvs_pool_layout layout;
  int status = check_pools(transfer->store, blocks, err);
  if (!status) status = read_slots(transfer, blocks, err);
  if (status) return status;
  kvs_pool_get_layout(blocks->pools[0], &layout);
  bool coded_here = transfer->store->settings.ncodings && !layout.coding;
  bool in_place = blocks->npools == 1 && !coded_here && in_host_memory(mover, &layout);
  for (size_t i = 0; in_place && i < transfer->nitems; i++)
    transfer->items[i].address = layout.ptr + (uint64_t)transfer->slots[i] * layout.stride;
  if (in_place) return KVS_OK;
  status = match_pools(mover, blocks, err);
  if (!status && transfer->store->settings.ncodings)
    status = try_coding(mover, blocks, transfer->kind == KVS_FILE_LOAD, err);
  if (status) return status;
  transfer->pools = pools;
  transfer->npools = blocks->npools;
  for (size_t i = 0; i < blocks->npools; i++) kvs_pool_ref(pools[i]);
  return KVS_OK;
}

static int set_up_pools(struct kvs_file_transfer *transfer, const struct kvs_file_blocks *blocks,
                        struct kvs_error *err) {
  struct kvs_pool **pools = calloc(blocks->npools, sizeof(struct kvs_pool *));
  if (!pools) return kvs_fail(err, KVS_NOMEM, "no memory for %zu pools", blocks->npools);
  memcpy(pools, blocks->pools, blocks->npools * sizeof(struct kvs_pool *)); /* the caller's list is read once */
  struct kvs_file_blocks own = *blocks;
  own.pools = pools;
  int status = set_up_own_pools(transfer, &own, pools, err);
  if (!transfer->pools) free(pools);
  return status;
}

/* An empty transfer that ends when all start dependencies have ended. The gates of loads and of stores are on two
 * lanes: a lane is in order, and has a limit. */
static int set_up_gate(struct kvs_file_transfer *transfer, const struct kvs_file_options *options,
                       struct kvs_error *err) {
  const uint64_t none = 0;
  const bool load = transfer->kind == KVS_FILE_LOAD;
  const struct kvs_options after = {.after = options ? options->after : NULL,
                                    .nafter = options ? options->nafter : 0,
                                    .priority = load ? KVS_PRIORITY_HIGH : KVS_PRIORITY_BACKGROUND};
  return kvs_swap_batch(transfer->store->mover->engine, &none, &none, &none, true, 0, &after, &transfer->gate, err);
}

int kvs_file_mover_prepare(struct kvs_file_transfer *transfer, const struct kvs_file_blocks *blocks,
                           const struct kvs_file_options *options, struct kvs_error *err) {
  if (!transfer->store->mover)
    return kvs_fail(err, KVS_INVALID, "the store was opened without a device: it takes no pools, and no `after`");
  int status = blocks->pools ? set_up_pools(transfer, blocks, err) : KVS_OK;
  return status ? status : set_up_gate(transfer, options, err);
}

/* -- opening and closing ------------------------------------------------------------------------------------------- */

static void destroy(struct kvs_file_mover *mover) {
  struct kvs_device *device = kvs_engine_device(mover->engine);
  struct kvs_error ignored;
  while (mover->npools > 0) kvs_pool_unref(mover->pools[--mover->npools]);
  free(mover->pools);
  for (int i = 0; i < 2; i++)
    if (mover->streams[i]) (void)kvs_dev_stream_destroy(device, mover->streams[i], &ignored);
  if (mover->store->gds)
    kvs_file_gds_close(mover->store);
  else if (mover->staging)
    kvs_engine_free_later(mover->engine, mover->staging); /* closing does not wait for other work of the device */
  pthread_cond_destroy(&mover->changed);
  pthread_mutex_destroy(&mover->lock);
  pthread_mutex_destroy(&mover->pools_lock);
  free(mover->free);
  free(mover);
}

static int make_staging(struct kvs_file_mover *mover, struct kvs_error *err) {
  struct kvs_file_store *store = mover->store;
  struct kvs_device *device = kvs_engine_device(mover->engine);
  uint64_t wanted = store->settings.staging_nbytes ? store->settings.staging_nbytes : STAGING_NBYTES;
  uint64_t slots = wanted / store->geometry.slot_nbytes;
  mover->nslots = (uint32_t)(slots < LEAST_SLOTS ? LEAST_SLOTS : slots > MOST_SLOTS ? MOST_SLOTS : slots);
  mover->free = calloc(mover->nslots, sizeof *mover->free);
  if (!mover->free) return kvs_fail(err, KVS_NOMEM, "no memory for %u staging slots", mover->nslots);
  size_t nbytes = mover->nslots * store->geometry.slot_nbytes + KVS_FILE_PAGE;
  int status = KVS_OK;
  if (!kvs_file_gds_open(store, nbytes, &mover->staging)) {
    status = kvs_engine_alloc(mover->engine, nbytes, true, &mover->staging, err);
    if (status) return status;
    memset((void *)(uintptr_t)mover->staging, 0, nbytes);
    store->queue.fixed = (uint8_t *)(uintptr_t)mover->staging;
    store->queue.fixed_nbytes = nbytes;
  }
  for (uint32_t i = 0; i < mover->nslots; i++) mover->free[mover->nfree++] = mover->nslots - 1 - i;
  status = kvs_dev_stream_create(device, device->info.priority_high, &mover->streams[1], err);
  return status ? status : kvs_dev_stream_create(device, device->info.priority_low, &mover->streams[0], err);
}

int kvs_file_mover_open(struct kvs_file_store *store, struct kvs_error *err) {
  struct kvs_file_mover *mover = calloc(1, sizeof *mover);
  if (!mover) return kvs_fail(err, KVS_NOMEM, "no memory for a mover");
  mover->store = store;
  mover->engine = store->settings.device;
  mover->turns.popped = &store->popped;
  pthread_mutex_init(&mover->lock, NULL);
  pthread_mutex_init(&mover->pools_lock, NULL);
  kvs_cond_init(&mover->changed);
  int status = make_staging(mover, err);
  if (!status && kvs_thread_start(&mover->thread, NULL, serve, mover))
    status = kvs_fail(err, KVS_NOMEM, "no thread could be started");
  if (status) {
    destroy(mover);
    return status;
  }
  store->mover = mover;
  return KVS_OK;
}

void kvs_file_mover_close(struct kvs_file_store *store) {
  struct kvs_file_mover *mover = store->mover;
  pthread_mutex_lock(&mover->lock);
  mover->closed = true;
  pthread_cond_signal(&mover->changed);
  pthread_mutex_unlock(&mover->lock);
  pthread_join(mover->thread, NULL);
  destroy(mover);
  store->mover = NULL;
}
