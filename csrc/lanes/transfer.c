/* The life of a transfer: new, ended, freed (states in transfer.h).
 *
 * A transfer ends once, when a poll, a wait, a reap or the next submission first sees its end reached, or the device
 * lost. `state` is written last; all fields that readers look at afterwards are written before and stay constant. The
 * owner (the caller's objects) is not released here, since that may need a lock of the caller such as the GIL. It goes
 * to the engine's garbage, which kvs_engine_collect() empties. */
#include <stdlib.h>

#include "base/wait.h"
#include "lanes/buffers.h"
#include "lanes/failure.h"
#include "lanes/late.h"
#include "lanes/read_ids.h"
#include "lanes/registry.h"
#include "lanes/state.h"
#include "lanes/transfer.h"
#include "lanes/verdicts.h"
#include "racecheck/racecheck.h"

struct kvs_transfer *kvs_transfer_new(struct kvs_engine *engine, struct kvs_error *err) {
  struct kvs_transfer *transfer = calloc(1, sizeof *transfer);
  if (!transfer) {
    kvs_fail(err, KVS_NOMEM, "no memory for a transfer");
    return NULL;
  }
  transfer->engine = engine;
  atomic_init(&transfer->refs, 1);
  atomic_init(&transfer->handles, 1);
  atomic_init(&transfer->state, KVS_STATE_RUNNING);
  kvs_engine_ref(engine);
  return transfer;
}

void kvs_transfer_drop(struct kvs_transfer *transfer) {
  struct kvs_error ignored;
  if (atomic_fetch_sub(&transfer->refs, 1) != 1) return;
  if (transfer->end_shared && transfer->end)
    (void)kvs_dev_event_destroy(transfer->engine->device, transfer->end, &ignored);
  for (size_t i = 0; i < transfer->nlayers; i++)
    if (transfer->layers[i]) kvs_engine_event_put(transfer->engine, transfer->layers[i]);
  free(transfer->layers);
  kvs_racecheck_point_free(transfer->point);
  if (transfer->outcome) kvs_failure_unref(transfer->outcome);
  free(transfer->failed);
  free(transfer->ids);
  free(transfer->verdicts);
  free(transfer);
}

/* -- the end --------------------------------------------------------------------------------------------------- */

static int by_position(const void *a, const void *b) {
  uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
  return (left > right) - (left < right);
}

/* Sort, and drop duplicates: a block may have failed in several tensors. */
static void sort_failed(struct kvs_transfer *transfer) {
  size_t n = 0;
  if (transfer->nfailed == 0) return;
  qsort(transfer->failed, transfer->nfailed, sizeof *transfer->failed, by_position);
  for (size_t i = 0; i < transfer->nfailed; i++)
    if (n == 0 || transfer->failed[n - 1] != transfer->failed[i]) transfer->failed[n++] = transfer->failed[i];
  transfer->nfailed = n;
}

static void discard_owner(struct kvs_transfer *transfer) {
  struct kvs_engine *engine = transfer->engine;
  if (!transfer->release) return;
  atomic_fetch_add(&transfer->refs, 1);
  pthread_mutex_lock(&engine->cache_lock);
  transfer->next = engine->garbage;
  engine->garbage = transfer;
  atomic_store(&engine->has_garbage, true);
  pthread_mutex_unlock(&engine->cache_lock);
}

static void count_done(const struct kvs_transfer *transfer, struct kvs_path_counters *counters) {
  uint64_t duration = transfer->ended_ns - transfer->since_ns, elapsed = transfer->elapsed_ns;
  atomic_fetch_add_explicit(&counters->blocks, transfer->nblocks, memory_order_relaxed);
  atomic_fetch_add_explicit(&counters->link_nbytes, transfer->link_nbytes, memory_order_relaxed);
  atomic_fetch_add_explicit(&counters->device_ns, elapsed, memory_order_relaxed);
  kvs_histogram_add(&counters->duration, kvs_time_bounds, duration);
  kvs_histogram_add(&counters->queue, kvs_time_bounds, duration > elapsed ? duration - elapsed : 0);
  kvs_histogram_add(&counters->nbytes, kvs_size_bounds, transfer->nbytes);
}

static void count_failed(const struct kvs_transfer *transfer, struct kvs_path_counters *counters) {
  unsigned kind = (unsigned)-transfer->error.status;
  atomic_fetch_add(&counters->failed[kind < KVS_STATUSES ? kind : -KVS_INTERNAL], 1);
  atomic_fetch_add(&counters->failed_blocks, transfer->all_failed ? transfer->nblocks : transfer->nfailed);
}

void kvs_transfer_finish(struct kvs_transfer *transfer) {
  struct kvs_engine *engine = transfer->engine;
  struct kvs_error ignored;
  struct kvs_error whole = {.status = KVS_OK}; /* an error of the whole transfer */
  bool lost = atomic_load(&engine->device->lost) != 0;
  if (lost)
    (void)kvs_dev_check(engine->device, &whole);
  else if (transfer->dependencies)
    (void)kvs_peer_check(transfer,
                         &whole); /* if one is lost, the transfer ran without waiting for that device's work */
  if (whole.status != KVS_OK) {
    transfer->error = whole;
    transfer->all_failed = true;
  }
  if (!lost && transfer->ids) kvs_read_ids_end(transfer);
  if (!lost && transfer->verdicts) kvs_verdicts_end(transfer);
  if (transfer->outcome) kvs_failure_end(transfer->outcome, &whole);
  bool failed = transfer->error.status != KVS_OK;
  if (!lost && !(transfer->lent && whole.status != KVS_OK)) {
    if (transfer->end && transfer->start)
      (void)kvs_dev_event_elapsed(engine->device, transfer->start, transfer->end, &transfer->elapsed_ns, &ignored);
    if (transfer->table) kvs_table_put(engine, transfer->table);
    if (transfer->staging) kvs_engine_staging_put(engine, transfer->staging);
    discard_owner(transfer); /* memory that a lost device, or a lost lender, may still read is not released */
  }
  transfer->staging = NULL;
  transfer->table = NULL;
  sort_failed(transfer);
  atomic_fetch_add(failed ? &engine->failed : &engine->done, 1);
  transfer->ended_ns = kvs_clock_ns();
  (failed ? count_failed : count_done)(transfer, &engine->paths[transfer->direction][transfer->path]);
  atomic_store_explicit(&transfer->state, failed ? KVS_STATE_FAILED : KVS_STATE_DONE, memory_order_release);
}
