/* Ids that a kernel has read: their slots, and which blocks fail by them. */
#include "lanes/read_ids.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "lanes/failure.h"

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
