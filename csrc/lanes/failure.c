/* Failure records: why the bytes of a slot are wrong. Kept by the failed transfer and by every slot that it writes.
 * Failures travel: a transfer whose source blocks are lost passes their records on to its destination slots. */
#include "lanes/failure.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "lanes/read_ids.h"
#include "lanes/state.h"

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

static void unref(struct kvs_failure *failure, unsigned count) {
  if (atomic_fetch_sub(&failure->refs, count) == count) free(failure);
}

void kvs_failure_unref(struct kvs_failure *failure) { unref(failure, 1); }

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

/* A transfer of all layers of many blocks leaves one record in 100,000 slots. In a large table with few records it is
 * faster to look each up. */
bool kvs_failures_any(struct kvs_failures *failures) {
  struct kvs_failure *only = failures->count ? failures->only : NULL;
  if (only && failures->slots / 64 <= failures->count && kvs_failure_verdict(only) == KVS_SLOT_WELL) {
    memset(failures->items, 0, failures->slots * sizeof *failures->items);
    unref(only, (unsigned)failures->count);
    failures->count = 0;
  }
  return failures->count != 0;
}

uint64_t kvs_failures_dependencies(struct kvs_failures *failures) {
  uint64_t dependencies = 0;
  if (!kvs_failures_any(failures)) return 0;
  for (uint64_t slot = 0; failures->count && slot < failures->slots; slot++) {
    const struct kvs_failure *failure = kvs_failures_get(failures, slot);
    if (kvs_failure_verdict(failure) == KVS_SLOT_OPEN) dependencies |= failure->dependencies;
    if (failure && failure == failures->only) break;
  }
  return dependencies;
}

struct kvs_failure *kvs_failures_get(struct kvs_failures *failures, uint64_t slot) {
  if (!failures->count || !failures->items[slot]) return NULL;
  if (kvs_failure_verdict(failures->items[slot]) == KVS_SLOT_WELL) kvs_failures_set(failures, slot, NULL);
  return failures->items[slot];
}

void kvs_failures_set(struct kvs_failures *failures, uint64_t slot, struct kvs_failure *failure) {
  struct kvs_failure *before = failures->items[slot];
  if (failure == before) return;
  if (failure) atomic_fetch_add(&failure->refs, 1);
  if (failure && (!failures->count || failures->only != failure)) failures->only = failures->count ? NULL : failure;
  failures->items[slot] = failure;
  if (failure && !before) failures->count++;
  if (!failure && before) failures->count--;
  if (before) kvs_failure_unref(before);
}

/* -- the failed blocks of a transfer ------------------------------------------------------------------------------- */

void kvs_transfer_fail_blocks(struct kvs_transfer *transfer, const uint32_t *positions, size_t count,
                              const struct kvs_error *why) {
  if (!count) return;
  if (transfer->error.status == KVS_OK) transfer->error = *why;
  if (transfer->all_failed) return;
  uint32_t *grown = realloc(transfer->failed, (transfer->nfailed + count) * sizeof *grown);
  if (!grown) {
    transfer->all_failed = true; /* no memory to name them */
    return;
  }
  memcpy(grown + transfer->nfailed, positions, count * sizeof *grown);
  transfer->failed = grown;
  transfer->nfailed += count;
}

/* -- what they mean for slots -------------------------------------------------------------------------------------- */

bool kvs_settlement_whole(const struct kvs_settlement *s, size_t pair) {
  return s->covered[pair] == s->dst[pair]->layout.block_nbytes;
}

struct kvs_failure *kvs_settlement_lost(const struct kvs_settlement *s, int64_t src_slot, const struct kvs_pool **pool,
                                        uint64_t *dependencies) {
  for (size_t i = 0; src_slot >= 0 && i < s->npairs; i++) {
    if (!s->src[i]) continue;
    struct kvs_failure *failure = kvs_failures_get(&s->src[i]->failures, (uint64_t)src_slot);
    *pool = s->src[i];
    if (kvs_failure_verdict(failure) == KVS_SLOT_LOST) return failure;
    if (failure) *dependencies |= failure->dependencies;
  }
  return NULL;
}

void kvs_settlement_lost_error(struct kvs_error *err, size_t position, int64_t slot, const struct kvs_pool *pool,
                               const struct kvs_failure *failure) {
  const struct kvs_error *first = &failure->error;
  kvs_fail(err, first->status,
           "src_ids[%zu]: slot %" PRId64
           " of pool '%s' does not hold what it should, which began when transfer %" PRIu64 " failed: %.200s",
           position, slot, pool->name, failure->transfer, first->message);
  err->code = first->code;
  err->operation = first->operation;
}

static void set_record(struct kvs_pool *pool, int64_t slot, struct kvs_failure *failure) {
  if (pool && slot >= 0) kvs_failures_set(&pool->failures, (uint64_t)slot, failure);
}

/* A block that was lost before keeps its first failure record. */
static void pass_on(const struct kvs_settlement *s, size_t position, struct kvs_failure *failure) {
  const struct kvs_pool *pool;
  uint64_t dependencies = 0;
  struct kvs_failure *first = kvs_settlement_lost(s, s->src_slots[position], &pool, &dependencies);
  if (first) failure = first;
  for (size_t i = 0; i < s->npairs; i++) set_record(s->dst[i], s->dst_slots[position], failure);
}

/* A block that is written whole is right again. */
static void clear_failures(const struct kvs_settlement *s) {
  for (size_t i = 0; i < s->npairs; i++) {
    struct kvs_pool *dst = s->dst[i];
    bool whole = dst && kvs_failures_any(&dst->failures) && kvs_settlement_whole(s, i);
    for (size_t b = 0; whole && dst->failures.count && b < s->count; b++) set_record(dst, s->dst_slots[b], NULL);
  }
}

/* The outcome is known only at completion: the written slots share the record. */
static void leave_open(const struct kvs_settlement *s, struct kvs_failure *outcome) {
  for (size_t i = 0; i < s->npairs; i++)
    for (size_t b = 0; s->dst[i] && b < s->count; b++) {
      int64_t slot = s->dst_slots[b];
      if (slot >= 0 && kvs_failure_verdict(kvs_failures_get(&s->dst[i]->failures, (uint64_t)slot)) != KVS_SLOT_LOST)
        set_record(s->dst[i], slot, outcome);
    }
}

static void lose_all(const struct kvs_settlement *s, struct kvs_failure *failure) {
  for (size_t i = 0; i < s->npairs; i++)
    for (uint64_t slot = 0; s->dst[i] && slot < s->dst[i]->layout.num_blocks; slot++)
      set_record(s->dst[i], (int64_t)slot, failure);
}

/* Its own work has ended: only other transfers that share the record may leave it open. */
static bool is_open(const struct kvs_transfer *transfer, bool over) {
  const struct kvs_failure *outcome = transfer->outcome;
  if (!transfer->dependencies || !outcome) return false;
  return atomic_load(&outcome->running) > over || atomic_load(&outcome->failed);
}

void kvs_settle(const struct kvs_settlement *s, const struct kvs_transfer *transfer, bool over) {
  static struct kvs_failure unknown = {
      .refs = 1, .failed = true, .error = {.status = KVS_NOMEM, .message = "out of memory"}};
  clear_failures(s);
  if (is_open(transfer, over)) leave_open(s, transfer->outcome);
  if (transfer->error.status == KVS_OK) return;
  struct kvs_failure *failure = kvs_failure_new(&transfer->error, transfer->ticket);
  struct kvs_failure *used = failure ? failure : &unknown;
  const struct kvs_read_ids *ids = transfer->ids;
  if (ids && ids->side.write && !ids->queued && !ids->fetched && ids->count) lose_all(s, used);
  if (transfer->all_failed)
    for (size_t i = 0; i < s->count; i++) pass_on(s, i, used);
  else
    for (size_t i = 0; i < transfer->nfailed; i++) pass_on(s, transfer->failed[i], used);
  if (failure) kvs_failure_unref(failure);
}
