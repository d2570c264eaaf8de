/* What the lanes ask of lent links. */
#include "lanes/lent.h"

#include "lanes/state.h"

void kvs_lent_init(struct kvs_engine *engine) {
  for (int i = 0; i < 2 * KVS_LENDERS; i++) pthread_mutex_init(&engine->lent[i / 2].ways[i % 2].lock, NULL);
}

void kvs_lent_destroy(struct kvs_engine *engine) {
  for (int i = 0; i < 2 * KVS_LENDERS; i++) pthread_mutex_destroy(&engine->lent[i / 2].ways[i % 2].lock);
}

int kvs_lent_way_idle(struct kvs_lent_way *way, struct kvs_error *err) {
  int status = KVS_OK;
  for (int i = 0; !status && i < KVS_LENT_STAGES; i++) {
    const struct kvs_lent_stage *stage = &way->stages[i];
    if (!atomic_load(&stage->device->lost)) status = kvs_dev_stream_query(stage->device, stage->stream, err);
  }
  return status;
}

/* Who lends no more has waited for the streams: `unsettled` is false then. */
int kvs_lent_settled(struct kvs_engine *engine, enum kvs_direction direction, struct kvs_error *err) {
  int status = KVS_OK;
  for (int i = 0; direction != KVS_OTHER_DIRECTION && !status && i < KVS_LENDERS; i++) {
    struct kvs_lent_way *way = &engine->lent[i].ways[direction];
    if (atomic_load(&way->unsettled)) status = kvs_lent_way_idle(way, err);
  }
  return status;
}
