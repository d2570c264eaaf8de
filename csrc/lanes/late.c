/* Transfers between pools that are settled when their device work has ended: see late.h. */
#include "lanes/late.h"

#include <stdlib.h>
#include <string.h>

#include "lanes/read_ids.h"
#include "lanes/registry.h"
#include "lanes/transfer.h"
#include "lanes/verdicts.h"
#include "racecheck/racecheck.h"

struct reservation {
  uint64_t pool, number;
};

struct kvs_late {
  struct kvs_late *next, *before;
  bool ended;
  struct kvs_transfer *transfer; /* a reference */
  struct kvs_pool **src, **dst;  /* borrowed; NULL: closed since */
  uint64_t *covered;
  size_t npairs;
  int64_t *src_slots, *dst_slots; /* -1 where they are not known yet */
  size_t count;
  struct reservation *reservations;
  size_t nreservations, capacity;
};

static void *copy(const void *from, size_t count, size_t size) {
  void *to = calloc(count ? count : 1, size);
  if (to && count) memcpy(to, from, count * size);
  return to;
}

struct kvs_late *kvs_late_new(const struct kvs_settlement *s, size_t reservations) {
  struct kvs_late *late = calloc(1, sizeof *late);
  if (!late) return NULL;
  late->npairs = s->npairs;
  late->count = s->count;
  late->capacity = reservations;
  late->src = copy(s->src, s->npairs, sizeof(struct kvs_pool *));
  late->dst = copy(s->dst, s->npairs, sizeof(struct kvs_pool *));
  late->covered = copy(s->covered, s->npairs, sizeof *late->covered);
  late->src_slots = copy(s->src_slots, s->count, sizeof *late->src_slots);
  late->dst_slots = copy(s->dst_slots, s->count, sizeof *late->dst_slots);
  late->reservations = calloc(reservations ? reservations : 1, sizeof *late->reservations);
  if (late->src && late->dst && late->covered && late->src_slots && late->dst_slots && late->reservations) return late;
  kvs_late_free(late);
  return NULL;
}

void kvs_late_free(struct kvs_late *late) {
  if (late->transfer) kvs_transfer_drop(late->transfer);
  free(late->src);
  free(late->dst);
  free(late->covered);
  free(late->src_slots);
  free(late->dst_slots);
  free(late->reservations);
  free(late);
}

void kvs_late_reserve(struct kvs_late *late, const struct kvs_race_access *access) {
  uint64_t number = late->nreservations < late->capacity ? kvs_racecheck_reserve(access) : 0;
  if (number) late->reservations[late->nreservations++] = (struct reservation){access->pool, number};
}

/* -- the list ---------------------------------------------------------------------------------------------------- */

static void count_pools(struct kvs_late *late, int by) {
  for (size_t i = 0; i < late->npairs; i++) {
    if (late->src[i]) late->src[i]->late += (unsigned)by;
    if (late->dst[i]) late->dst[i]->late += (unsigned)by;
  }
}

void kvs_late_add(struct kvs_late *late, struct kvs_transfer *transfer) {
  struct kvs_engine *engine = transfer->engine;
  struct kvs_late **at = &engine->late;
  late->transfer = transfer;
  atomic_fetch_add(&transfer->refs, 1);
  atomic_store(&transfer->unsettled, true);
  count_pools(late, 1);
  for (late->before = NULL; *at; at = &(*at)->next) late->before = *at;
  *at = late;
  atomic_fetch_add(&engine->nlate, 1);
}

/* Whether its device work has ended, or its device is lost. */
static bool ended(struct kvs_transfer *transfer) {
  struct kvs_lane *lane = transfer->lane;
  struct kvs_device *device = transfer->engine->device;
  struct kvs_error ignored;
  bool over = true;
  pthread_mutex_lock(&lane->lock);
  if (atomic_load(&transfer->state) == KVS_STATE_RUNNING) {
    over = (transfer->end ? kvs_dev_event_query(device, transfer->end, &ignored)
                          : kvs_dev_stream_query(device, lane->stream, &ignored)) == KVS_OK;
    if (over && transfer->unjoined) over = kvs_dev_stream_query(device, lane->burst_stream, &ignored) == KVS_OK;
    if (over && transfer->unjoined) over = kvs_lent_settled(transfer->engine, lane->direction, &ignored) == KVS_OK;
  }
  pthread_mutex_unlock(&lane->lock);
  return over;
}

static void tell_races(struct kvs_late *late, const int64_t *slots) {
  int64_t *good = malloc((late->count ? late->count : 1) * sizeof *good);
  size_t n = 0;
  for (size_t i = 0; good && i < late->count; i++)
    if (slots[i] >= 0) good[n++] = slots[i];
  for (size_t i = 0; i < late->nreservations; i++)
    kvs_racecheck_fulfil(late->reservations[i].pool, late->reservations[i].number, good, n);
  free(good);
}

/* Fail the blocks whose source is lost. Under lane->lock. */
static void fail_lost(const struct kvs_settlement *s, struct kvs_transfer *transfer) {
  uint32_t *lost = NULL;
  size_t failures = 0, nlost = 0;
  uint64_t dependencies = 0;
  struct kvs_error why = {.status = KVS_OK};
  for (size_t i = 0; i < s->npairs; i++) failures += s->src[i] && kvs_failures_any(&s->src[i]->failures);
  if (!failures || transfer->all_failed) return;
  lost = malloc((s->count ? s->count : 1) * sizeof *lost);
  for (size_t i = 0; i < s->count; i++) {
    const struct kvs_pool *pool;
    const struct kvs_failure *failure = kvs_settlement_lost(s, s->src_slots[i], &pool, &dependencies);
    if (!failure) continue;
    if (!nlost) kvs_settlement_lost_error(&why, i, s->src_slots[i], pool, failure);
    if (lost) lost[nlost] = (uint32_t)i;
    nlost++;
  }
  if (nlost && !lost) transfer->all_failed = true;
  kvs_transfer_fail_blocks(transfer, lost, nlost, &why);
  free(lost);
}

static void settle_one(struct kvs_late *late) {
  struct kvs_transfer *transfer = late->transfer;
  struct kvs_read_ids *ids = transfer->ids;
  struct kvs_error whole;
  pthread_mutex_lock(&transfer->lane->lock);
  bool running = atomic_load(&transfer->state) == KVS_STATE_RUNNING; /* else its device is lost */
  if (running && ids) {
    kvs_read_ids_end(transfer);
    memcpy(ids->side.write ? late->dst_slots : late->src_slots, ids->slots, late->count * sizeof *ids->slots);
  }
  if (running && transfer->verdicts) kvs_verdicts_end(transfer);
  const struct kvs_settlement settlement = {.src = late->src,
                                            .dst = late->dst,
                                            .covered = late->covered,
                                            .npairs = late->npairs,
                                            .src_slots = late->src_slots,
                                            .dst_slots = late->dst_slots,
                                            .count = late->count};
  if (running && transfer->dependencies && kvs_peer_check(transfer, &whole)) {
    transfer->error = whole;
    transfer->all_failed = true;
  }
  if (running) fail_lost(&settlement, transfer);
  if (running) kvs_settle(&settlement, transfer, true);
  pthread_mutex_unlock(&transfer->lane->lock);
  if (ids) tell_races(late, ids->slots);
  atomic_store(&transfer->unsettled, false);
}

static void take_out(struct kvs_engine *engine, struct kvs_late *late) {
  *(late->before ? &late->before->next : &engine->late) = late->next;
  if (late->next) late->next->before = late->before;
  atomic_fetch_sub(&engine->nlate, 1);
}

/* The newest is asked first. So where one has ended, those that it comes after, which are older, are seen to have ended
 * too, and are settled before it. */
void kvs_late_settle_locked(struct kvs_engine *engine) {
  struct kvs_late *late = engine->late;
  if (!late) return;
  bool before = kvs_racecheck_internal(true);
  while (late->next) late = late->next;
  for (; late; late = late->before) late->ended = ended(late->transfer);
  for (struct kvs_late *next = engine->late; (late = next);) {
    next = late->next;
    if (!late->ended) continue;
    settle_one(late);
    count_pools(late, -1);
    take_out(engine, late);
    kvs_late_free(late);
  }
  kvs_racecheck_internal(before);
}

void kvs_late_settle(struct kvs_engine *engine) {
  if (!atomic_load(&engine->nlate) || pthread_mutex_trylock(&engine->hazard_lock)) return;
  kvs_late_settle_locked(engine);
  pthread_mutex_unlock(&engine->hazard_lock);
}

void kvs_late_settle_behind(struct kvs_engine *engine) {
  if (!atomic_load(&engine->nlate)) return;
  pthread_mutex_lock(&engine->hazard_lock);
  kvs_late_settle_locked(engine);
  pthread_mutex_unlock(&engine->hazard_lock);
}

void kvs_late_forget_pool(struct kvs_engine *engine, const struct kvs_pool *pool) {
  for (struct kvs_late *late = engine->late; late; late = late->next)
    for (size_t i = 0; i < late->npairs; i++) {
      if (late->src[i] == pool) late->src[i] = NULL;
      if (late->dst[i] == pool) late->dst[i] = NULL;
    }
}

void kvs_late_destroy(struct kvs_engine *engine) {
  while (engine->late) {
    struct kvs_late *late = engine->late;
    engine->late = late->next;
    kvs_late_free(late);
  }
}
