/* Failures travel: which source blocks of a transfer between pools are lost, and which records its destination slots
 * get. All under the engine's hazard_lock. And ids that a kernel has read: which blocks fail by them. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lanes/failure.h"
#include "lanes/late.h"

/* -- records of slots -------------------------------------------------------------------------------------------- */

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
    for (size_t b = 0; dst && dst->failures.count && kvs_settlement_whole(s, i) && b < s->count; b++)
      set_record(dst, s->dst_slots[b], NULL);
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

void kvs_settle(const struct kvs_settlement *s, const struct kvs_transfer *transfer) {
  static struct kvs_failure unknown = {
      .refs = 1, .failed = true, .error = {.status = KVS_NOMEM, .message = "out of memory"}};
  clear_failures(s);
  if (transfer->dependencies && transfer->outcome) leave_open(s, transfer->outcome);
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

/* -- ids that a kernel has read ---------------------------------------------------------------------------------- */

int kvs_read_ids_new(struct kvs_transfer *transfer, const struct kvs_ids_side *side, struct kvs_error *err) {
  size_t count = side->ids->count;
  struct kvs_read_ids *ids = malloc(sizeof *ids + count * sizeof ids->slots[0]);
  if (!ids) return kvs_fail(err, KVS_NOMEM, "no memory for %zu ids", count);
  *ids = (struct kvs_read_ids){.side = *side, .count = count};
  snprintf(ids->name, sizeof ids->name, "%s", side->name);
  snprintf(ids->holder, sizeof ids->holder, "%s", side->holder);
  for (size_t i = 0; i < count; i++) ids->slots[i] = -1;
  transfer->ids = ids;
  return KVS_OK;
}

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

/* The message is about the first bad block of the list. */
static void bad_id(const struct kvs_read_ids *ids, const struct kvs_id_result *bad, struct kvs_error *err) {
  const struct kvs_id_result *other = NULL;
  for (size_t i = 0; bad->verdict == KVS_ID_TWICE && i < ids->nresults; i++) {
    const struct kvs_id_result *one = &ids->results[i];
    if (one->id == bad->id && one->position != bad->position && (!other || one->position < other->position))
      other = one;
  }
  if (other)
    kvs_fail(err, KVS_BAD_ID,
             "%s[%" PRIu32 "] and %s[%" PRIu32 "] are both %s%" PRId64
             ", read on the device: two blocks would be written to one destination, so neither was",
             ids->name, bad->position, ids->name, other->position, ids->side.tokens > 1 ? "block " : "", bad->id);
  else if (ids->side.tokens > 1)
    kvs_fail(err, KVS_BAD_ID,
             "%s[%" PRIu32 "] begins with token %" PRId64
             ", read on the device: these are not the %u tokens of one block, in their order; %s has %" PRIu64
             " blocks of them",
             ids->name, bad->position, bad->id, ids->side.tokens, ids->holder, ids->side.blocks);
  else
    kvs_fail(err, KVS_BAD_ID,
             "%s[%" PRIu32 "] is %" PRId64 ", read on the device; %s has %" PRIu64 " blocks, 0 to %" PRIu64, ids->name,
             bad->position, bad->id, ids->holder, ids->side.blocks, ids->side.blocks - 1);
}

void kvs_read_ids_end(struct kvs_transfer *transfer) {
  struct kvs_read_ids *ids = transfer->ids;
  const struct kvs_id_result *first = NULL;
  struct kvs_error why;
  if (ids->done) return;
  ids->done = true;
  for (size_t i = 0; ids->fetched && i < ids->count; i++) {
    size_t at = ids->order > 0 ? i : ids->order < 0 ? ids->count - 1 - i : 0;
    const struct kvs_ids list = {ids->results, ids->width, ids->count};
    int64_t id = kvs_id_at(&list, at);
    uint64_t block = kvs_block_of_tokens(id, ids->side.tokens, 1);
    if (block < ids->side.blocks) ids->slots[i] = (int64_t)block;
  }
  if (!ids->queued) return;
  uint32_t *bad = malloc((ids->nresults ? ids->nresults : 1) * sizeof *bad);
  size_t nbad = 0;
  for (size_t i = 0; i < ids->nresults; i++) {
    const struct kvs_id_result *result = &ids->results[i];
    if (result->verdict == KVS_ID_GOOD) {
      ids->slots[result->position] = result->id;
      continue;
    }
    if (!first || result->position < first->position) first = result;
    if (bad) bad[nbad] = result->position;
    nbad++;
  }
  if (first) bad_id(ids, first, &why);
  if (first && !bad) transfer->all_failed = true;
  kvs_transfer_fail_blocks(transfer, bad, nbad, &why);
  free(bad);
}
