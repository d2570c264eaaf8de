/* Verdicts of coded blocks: which blocks fail by them. */
#include "lanes/verdicts.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lanes/failure.h"

int kvs_verdicts_new(struct kvs_transfer *transfer, const struct kvs_work *work, struct kvs_error *err) {
  size_t count = work->nslots, size = sizeof(struct kvs_pair) + sizeof(struct kvs_named_block);
  struct kvs_verdicts *verdicts = malloc(sizeof *verdicts + count * size);
  if (!verdicts) return kvs_fail(err, KVS_NOMEM, "no memory for the verdicts of %zu blocks", count);
  *verdicts = (struct kvs_verdicts){.decode = work->decode, .count = count};
  snprintf(verdicts->pool, sizeof verdicts->pool, "%s", work->coded_pool);
  for (size_t i = 0; i < count; i++)
    verdicts->blocks[i] = (struct kvs_named_block){.dst = (uint32_t)work->dst_slots[i],
                                                   .src = (uint32_t)work->src_slots[i],
                                                   .position = work->positions ? work->positions[i] : (uint32_t)i};
  verdicts->pairs = (struct kvs_pair *)(verdicts->blocks + count);
  transfer->verdicts = verdicts;
  return KVS_OK;
}

void kvs_verdicts_place(struct kvs_verdicts *verdicts, const struct kvs_packing *packing, const uint32_t *words) {
  memcpy(verdicts->pairs, packing->pairs, verdicts->count * sizeof *verdicts->pairs);
  verdicts->words = words;
}

static int by_dst(const void *a, const void *b) {
  uint32_t left = ((const struct kvs_named_block *)a)->dst, right = ((const struct kvs_named_block *)b)->dst;
  return (left > right) - (left < right);
}

static void explain(const struct kvs_verdicts *verdicts, const struct kvs_named_block *block, uint32_t verdict,
                    struct kvs_error *why) {
  uint32_t slot = verdicts->decode ? block->src : block->dst;
  if (verdict == KVS_UNIT_MISCODED)
    kvs_fail(why, KVS_MISCODED,
             "the block at position %" PRIu32 " is coded wrong, and is not stored in slot %" PRIu32
             " of pool '%s': its coded bytes do not decode to it (KVSWAP_VERIFY_CODEC)",
             block->position, slot, verdicts->pool);
  else if (!verdicts->decode)
    kvs_fail(why, KVS_NOT_STORED,
             "the block at position %" PRIu32 " does not fit the coded size of pool '%s', and is not stored in slot "
             "%" PRIu32,
             block->position, verdicts->pool, slot);
  else if (verdict == KVS_UNIT_NOT_STORED)
    kvs_fail(why, KVS_NOT_STORED,
             "slot %" PRIu32 " of pool '%s', for position %" PRIu32 ", holds a block that was not stored, since it did "
             "not fit its coded size",
             slot, verdicts->pool, block->position);
  else
    kvs_fail(why, KVS_DAMAGED,
             "slot %" PRIu32 " of pool '%s', for position %" PRIu32 ", does not hold a block that this pool's codec "
             "has written: what could not be decoded is zeros",
             slot, verdicts->pool, block->position);
}

/* Destinations are named once each, so they tell the position. The message is about the first block of the list that
 * is coded wrong, or else about the first bad one. */
void kvs_verdicts_end(struct kvs_transfer *transfer) {
  struct kvs_verdicts *verdicts = transfer->verdicts;
  const struct kvs_named_block *first = NULL;
  struct kvs_error why = {.status = KVS_OK};
  size_t nbad = 0;
  if (verdicts->done) return;
  verdicts->done = true;
  for (size_t i = 0; verdicts->words && i < verdicts->count; i++) nbad += verdicts->words[i] != KVS_UNIT_GOOD;
  if (nbad == 0 || transfer->all_failed) return;
  uint32_t *bad = malloc(nbad * sizeof *bad), worst = KVS_UNIT_GOOD;
  qsort(verdicts->blocks, verdicts->count, sizeof *verdicts->blocks, by_dst);
  nbad = 0;
  for (size_t i = 0; i < verdicts->count; i++) {
    if (verdicts->words[i] == KVS_UNIT_GOOD) continue;
    const struct kvs_named_block key = {.dst = verdicts->pairs[i].dst},
                                 *block = bsearch(&key, verdicts->blocks, verdicts->count, sizeof key, by_dst);
    bool worse = verdicts->words[i] == KVS_UNIT_MISCODED && worst != KVS_UNIT_MISCODED,
         as_bad = (verdicts->words[i] == KVS_UNIT_MISCODED) == (worst == KVS_UNIT_MISCODED);
    if (!first || worse || (as_bad && block->position < first->position)) first = block, worst = verdicts->words[i];
    if (bad) bad[nbad] = block->position;
    nbad++;
  }
  explain(verdicts, first, worst, &why);
  if (!bad) transfer->all_failed = true;
  kvs_transfer_fail_blocks(transfer, bad, nbad, &why);
  free(bad);
}
