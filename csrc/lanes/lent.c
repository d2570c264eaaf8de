/* What the lanes ask of lent links. */
#include "lanes/lent.h"

#include "lanes/state.h"

void kvs_lent_init(struct kvs_engine *engine) {
  for (int i = 0; i < 2 * KVS_LENDERS; i++) pthread_mutex_init(&engine->lent[i / 2].ways[i % 2].lock, NULL);
}

void kvs_lent_destroy(struct kvs_engine *engine) {
  for (int i = 0; i < 2 * KVS_LENDERS; i++) pthread_mutex_destroy(&engine->lent[i / 2].ways[i % 2].lock);
}

/* A lost device's streams are never idle, and no use to ask. */
static int idle(const struct kvs_lent_way *way, struct kvs_error *err) {
  int status = KVS_OK;
  for (int i = 0; !status && i < KVS_LENT_STAGES; i++) {
    const struct kvs_lent_stage *stage = &way->stages[i];
    if (stage->device && !atomic_load(&stage->device->lost))
      status = kvs_dev_stream_query(stage->device, stage->stream, err);
  }
  return status;
}

bool kvs_lent_is_over(struct kvs_lent_way *way) {
  const struct kvs_lent_stage *end = &way->stages[KVS_LENT_STAGES - 1];
  struct kvs_error ignored;
  bool over = true;
  if (atomic_load(&way->unsettled))
    over = idle(way, &ignored) == KVS_OK;
  else if (way->lane)
    over = atomic_load(&way->lane->ended) >= way->sequence || atomic_load(&end->device->lost) ||
           kvs_dev_event_query(end->device, end->done[way->last], &ignored) == KVS_OK;
  if (over) atomic_store(&way->unsettled, false);
  if (over) way->nqueued = 0;
  return over;
}

unsigned kvs_lent_queued(struct kvs_lent_way *way) {
  uint64_t ended = way->lane ? atomic_load(&way->lane->ended) : 0;
  unsigned kept = 0, pieces = 0;
  for (unsigned i = 0; i < way->nqueued; i++) {
    if (way->queued[i].sequence <= ended) continue;
    way->queued[kept++] = way->queued[i];
    pieces += way->queued[i].pieces;
  }
  way->nqueued = kept;
  return pieces;
}

int kvs_lent_settled(struct kvs_engine *engine, enum kvs_direction direction, struct kvs_error *err) {
  int status = KVS_OK;
  for (int i = 0; direction != KVS_OTHER_DIRECTION && !status && i < KVS_LENDERS; i++) {
    struct kvs_lent_way *way = &engine->lent[i].ways[direction];
    if (!atomic_load(&way->unsettled)) continue;
    if (pthread_mutex_trylock(&way->lock)) return kvs_fail(err, KVS_NOT_READY, "transfers are unfinished");
    status = atomic_load(&way->unsettled) ? idle(way, err) : KVS_OK;
    pthread_mutex_unlock(&way->lock);
  }
  return status;
}
