/* How transfers end. A transfer ends in exactly one state, written last, under the store's lock. Fields read after the
 * end do not change any more. */
#include "files/ended.h"

#include <stdlib.h>

#include "base/wait.h"
#include "files/slot.h"

static void free_transfer(struct kvs_file_transfer *transfer) {
  for (size_t i = 0; transfer->pools && i < transfer->npools; i++) kvs_pool_unref(transfer->pools[i]);
  free(transfer->pools);
  if (transfer->gate) kvs_transfer_unref(transfer->gate);
  free(transfer->slots);
  free(transfer->part_nbytes);
  free(transfer);
}

void kvs_file_transfer_drop(struct kvs_file_transfer *transfer) {
  if (atomic_fetch_sub(&transfer->refs, 1) == 1) free_transfer(transfer);
}

static void count_locked(const struct kvs_file_transfer *transfer, enum kvs_state state) {
  struct kvs_file_store *store = transfer->store;
  struct kvs_file_kind_counters *counters = &store->kinds[transfer->kind];
  uint64_t moved = transfer->kind == KVS_FILE_DELETE ? 0 : transfer->nitems - transfer->nkept;
  counters->failed += state == KVS_STATE_FAILED;
  counters->cancelled += state == KVS_STATE_CANCELLED;
  if (state != KVS_STATE_DONE) return;
  kvs_histogram_add(&counters->duration, kvs_time_bounds, transfer->elapsed_ns);
  kvs_histogram_add(&counters->nbytes, kvs_size_bounds, moved * store->geometry.block_nbytes);
}

void kvs_file_transfer_ended_locked(struct kvs_file_transfer *transfer) {
  struct kvs_file_store *store = transfer->store;
  *(transfer->earlier ? &transfer->earlier->later : &store->oldest) = transfer->later;
  *(transfer->later ? &transfer->later->earlier : &store->newest) = transfer->earlier;
  store->unfinished[transfer->kind]--;
  store->unfinished_blocks[transfer->kind] -= transfer->nitems;
  transfer->elapsed_ns = kvs_clock_ns() - transfer->start_ns;
  enum kvs_state state = transfer->nfailed ? KVS_STATE_FAILED : KVS_STATE_DONE;
  for (size_t i = 0; transfer->cancelled && state == KVS_STATE_FAILED && i < transfer->nitems; i++)
    if (transfer->items[i].status == KVS_CANCELLED) state = KVS_STATE_CANCELLED;
  count_locked(transfer, state);
  if (transfer->release) {
    atomic_fetch_add(&transfer->refs, 1);
    transfer->next_garbage = store->garbage;
    store->garbage = transfer;
  }
  atomic_store_explicit(&transfer->state, state, memory_order_release);
  pthread_cond_broadcast(&store->ended);
  kvs_file_transfer_drop(transfer);
}

void kvs_file_collect(struct kvs_file_store *store) {
  if (store->fork_generation != kvs_fork_generation()) return;
  kvs_release_begin();
  pthread_mutex_lock(&store->lock);
  struct kvs_file_transfer *garbage = store->garbage;
  store->garbage = NULL;
  pthread_mutex_unlock(&store->lock);
  while (garbage) {
    struct kvs_file_transfer *next = garbage->next_garbage;
    garbage->release(garbage->owner);
    kvs_file_transfer_drop(garbage);
    garbage = next;
  }
  kvs_release_end();
}

static bool cancel_locked(struct kvs_file_transfer *transfer) {
  bool any = false;
  for (size_t i = 0; i < transfer->nitems; i++) any |= transfer->items[i].progress == KVS_FILE_PENDING;
  transfer->cancelled |= any;
  return any;
}

/* Items notice the cancellation when they are next dispatched; starved items are dispatched now. */
bool kvs_file_transfer_cancel(struct kvs_file_transfer *transfer) {
  struct kvs_file_store *store = transfer->store;
  if (store->fork_generation != kvs_fork_generation()) return false;
  pthread_mutex_lock(&store->lock);
  bool any = transfer->remaining && cancel_locked(transfer);
  if (any) kvs_file_wake_starved_locked(store);
  pthread_mutex_unlock(&store->lock);
  return any;
}

size_t kvs_file_cancel_all(struct kvs_file_store *store) {
  size_t n = 0;
  pthread_mutex_lock(&store->lock);
  for (struct kvs_file_transfer *transfer = store->oldest; transfer; transfer = transfer->later, n++)
    (void)cancel_locked(transfer);
  kvs_file_wake_starved_locked(store);
  pthread_mutex_unlock(&store->lock);
  return n;
}
