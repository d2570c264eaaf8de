/* Failure records: why the bytes of a slot are wrong. Kept by the failed transfer and by every slot that it writes. */
#include <inttypes.h>
#include <stdlib.h>

#include "lanes/pool_state.h"

struct kvs_failure *kvs_failure_new(const struct kvs_error *error, uint64_t transfer) {
  struct kvs_failure *failure = calloc(1, sizeof *failure);
  if (!failure) return NULL;
  atomic_init(&failure->refs, 1);
  atomic_init(&failure->failed, true);
  failure->error = *error;
  failure->transfer = transfer;
  return failure;
}

struct kvs_failure *kvs_failure_open(uint64_t transfer) {
  struct kvs_failure *failure = calloc(1, sizeof *failure);
  if (!failure) return NULL;
  atomic_init(&failure->refs, 1);
  failure->transfer = transfer;
  return failure;
}

enum kvs_verdict kvs_failure_verdict(const struct kvs_failure *failure) {
  if (!failure) return KVS_SLOT_WELL;
  if (atomic_load(&failure->failed)) return KVS_SLOT_LOST;
  if (atomic_load(&failure->running)) return KVS_SLOT_OPEN;
  return atomic_load(&failure->failed) ? KVS_SLOT_LOST : KVS_SLOT_WELL; /* it may have ended between the two loads */
}

/* All transfers of one record are in one lane and end under its lock, so `error` has one writer. */
void kvs_failure_end(struct kvs_failure *failure, const struct kvs_error *error) {
  if (error->status != KVS_OK && !atomic_load(&failure->failed)) {
    failure->error = *error;
    atomic_store(&failure->failed, true);
  }
  atomic_fetch_sub(&failure->running, 1);
}

void kvs_failure_unref(struct kvs_failure *failure) {
  if (atomic_fetch_sub(&failure->refs, 1) == 1) free(failure);
}

/* -- the records of a table of slots --------------------------------------------------------------------------- */

int kvs_failures_open(struct kvs_failures *failures, uint64_t slots, struct kvs_error *err) {
  failures->items = calloc(slots, sizeof(struct kvs_failure *));
  failures->slots = slots;
  return failures->items ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory to track %" PRIu64 " blocks", slots);
}

void kvs_failures_close(struct kvs_failures *failures) {
  for (uint64_t slot = 0; failures->count && slot < failures->slots; slot++) kvs_failures_set(failures, slot, NULL);
  free(failures->items);
  failures->items = NULL;
}

struct kvs_failure *kvs_failures_get(struct kvs_failures *failures, uint64_t slot) {
  if (!failures->count || !failures->items[slot]) return NULL;
  if (kvs_failure_verdict(failures->items[slot]) == KVS_SLOT_WELL) kvs_failures_set(failures, slot, NULL);
  return failures->items[slot];
}

void kvs_failures_set(struct kvs_failures *failures, uint64_t slot, struct kvs_failure *failure) {
  struct kvs_failure *before = failures->items[slot];
  if (failure) atomic_fetch_add(&failure->refs, 1);
  failures->items[slot] = failure;
  if (failure && !before) failures->count++;
  if (!failure && before) failures->count--;
  if (before) kvs_failure_unref(before);
}
