/* The public handle of a transfer: query, wait, event, unref. Above lane.c, which it calls. */

#include "lanes/handle.h"

#include "base/wait.h"
#include "lanes/lane.h"
#include "lanes/late.h"
#include "lanes/state.h"
#include "lanes/transfer.h"
#include "racecheck/racecheck.h"

void kvs_transfer_ref(struct kvs_transfer *transfer) { atomic_fetch_add(&transfer->handles, 1); }

void kvs_transfer_unref(struct kvs_transfer *transfer) {
  struct kvs_engine *engine = transfer->engine;
  if (atomic_fetch_sub(&transfer->handles, 1) != 1) return;
  if (kvs_dev_forked(engine->device)) return; /* in the child of a fork nothing is freed */
  kvs_transfer_drop(transfer);
  kvs_engine_unref(engine);
}

struct kvs_engine *kvs_transfer_engine(const struct kvs_transfer *transfer) { return transfer->engine; }

void kvs_engine_collect(struct kvs_engine *engine) {
  struct kvs_transfer *garbage;
  if (kvs_dev_forked(engine->device)) return;
  kvs_engine_reap(engine);
  if (!atomic_load(&engine->has_garbage)) return;
  kvs_release_begin(); /* before it takes them off the list, where others look for them */
  pthread_mutex_lock(&engine->cache_lock);
  garbage = engine->garbage;
  engine->garbage = NULL;
  atomic_store(&engine->has_garbage, false);
  pthread_mutex_unlock(&engine->cache_lock);
  while (garbage) {
    struct kvs_transfer *next = garbage->next;
    garbage->release(garbage->owner);
    kvs_transfer_drop(garbage);
    garbage = next;
  }
  kvs_release_end();
}

/* -- asking ---------------------------------------------------------------------------------------------------- */

static enum kvs_state state_of(struct kvs_transfer *transfer) {
  return (enum kvs_state)atomic_load_explicit(&transfer->state, memory_order_acquire);
}

int kvs_transfer_poll(struct kvs_transfer *transfer, struct kvs_error *err) {
  struct kvs_engine *engine = transfer->engine;
  if (state_of(transfer) != KVS_STATE_RUNNING) return KVS_OK;
  int status = kvs_dev_check(engine->device, err);
  if (status == KVS_FORKED) return status;
  if (!status) kvs_late_settle(engine);
  if (!status) status = kvs_lane_reap(transfer->lane, err);
  if (status == KVS_LOST) {
    kvs_engine_lose(engine);
    status = KVS_OK;
  }
  if (state_of(transfer) != KVS_STATE_RUNNING) return KVS_OK;
  if (status && status != KVS_REFUSED) return status;
  /* A refused query says nothing about the work: the next poll asks again. */
  return kvs_fail(err, KVS_NOT_READY, "the transfer has not ended");
}

/* The caller saw the end: what it queues from now on comes after the transfer. */
static void seen_by_caller(const struct kvs_transfer *transfer) {
  if (kvs_racecheck_on()) kvs_racecheck_follow(transfer->point, NULL, 0);
}

bool kvs_transfer_done(struct kvs_transfer *transfer) {
  struct kvs_error err;
  bool done = kvs_transfer_poll(transfer, &err) == KVS_OK;
  if (done) seen_by_caller(transfer);
  return done;
}

int kvs_transfer_error(struct kvs_transfer *transfer, struct kvs_error *err) {
  if (state_of(transfer) == KVS_STATE_RUNNING || transfer->error.status == KVS_OK) return KVS_OK;
  *err = transfer->error;
  return err->status;
}

static int poll(void *arg, struct kvs_error *err) { return kvs_transfer_poll(arg, err); }

int kvs_transfer_wait(struct kvs_transfer *transfer, int64_t timeout_ns, struct kvs_error *err) {
  int status = kvs_wait_until(poll, transfer, transfer->engine->device->stepped, timeout_ns, err);
  if (status == KVS_TIMEOUT)
    return kvs_fail(err, status, "the transfer had not ended after %.3f s; it goes on", (double)timeout_ns / 1e9);
  if (status) return status;
  seen_by_caller(transfer);
  return kvs_transfer_error(transfer, err);
}

/* Queued device work cannot be recalled, so nothing is ever stopped. */
bool kvs_transfer_cancel(struct kvs_transfer *transfer) {
  (void)transfer;
  return false;
}

/* No lock is held here: the driver blocks the caller when its queue is full. */
int kvs_transfer_make_wait(struct kvs_transfer *transfer, uint64_t stream, struct kvs_error *err) {
  struct kvs_device *device = transfer->engine->device;
  struct kvs_stream_info info;
  kvs_event end;
  int status = kvs_dev_check(device, err);
  if (status == KVS_FORKED) return status;
  if (state_of(transfer) == KVS_STATE_RUNNING) {
    status = kvs_stream_ask(device, stream, "the stream", &info, err);
    if (status) return status;
    status = kvs_transfer_pin(transfer, &end, err);
    if (status == KVS_NOT_READY) {
      status = kvs_dev_stream_wait(device, stream, end, err);
      kvs_transfer_unpin(transfer);
    }
  } else {
    status = kvs_transfer_error(transfer, err);
  }
  if (!status && kvs_racecheck_on())
    kvs_racecheck_follow(transfer->point, device, stream); /* also when nothing was left to wait for */
  return status;
}

static int check_layer(const struct kvs_transfer *transfer, size_t layer, struct kvs_error *err) {
  if (layer < transfer->nlayers) return KVS_OK;
  if (transfer->nlayers == 0)
    return kvs_fail(err, KVS_INVALID,
                    "the transfer was submitted without layer_events: its layers cannot be told apart");
  return kvs_fail(err, KVS_RANGE, "layer is %zu; the transfer has %zu layers, 0 to %zu", layer, transfer->nlayers,
                  transfer->nlayers - 1);
}

/* An error that is already known: some blocks may be refused while the transfer still runs. */
static int known_error(struct kvs_transfer *transfer, struct kvs_error *err) {
  pthread_mutex_lock(&transfer->lane->lock);
  int status = transfer->error.status;
  if (status) *err = transfer->error;
  pthread_mutex_unlock(&transfer->lane->lock);
  return status;
}

/* Layer events live as long as the transfer's handle, so they need no pin. */
int kvs_transfer_make_wait_layer(struct kvs_transfer *transfer, size_t layer, uint64_t stream, struct kvs_error *err) {
  struct kvs_device *device = transfer->engine->device;
  struct kvs_stream_info info;
  int status = kvs_dev_check(device, err);
  if (status == KVS_FORKED) return status;
  status = check_layer(transfer, layer, err);
  if (status) return status;
  if (!transfer->layers[layer]) return kvs_transfer_make_wait(transfer, stream, err);
  status = known_error(transfer, err);
  if (!status) status = kvs_stream_ask(device, stream, "the stream", &info, err);
  return status ? status : kvs_dev_stream_wait(device, stream, transfer->layers[layer], err);
}

int kvs_transfer_layer_done(struct kvs_transfer *transfer, size_t layer, struct kvs_error *err) {
  int status = check_layer(transfer, layer, err);
  if (status) return status;
  status = kvs_transfer_poll(transfer, err);
  if (status == KVS_OK) {
    if (kvs_racecheck_on() && transfer->layers[layer])
      kvs_racecheck_order(transfer->engine->device, 0, transfer->layers[layer], NULL, 0);
    else
      seen_by_caller(transfer);
    return kvs_transfer_error(transfer, err);
  }
  if (status != KVS_NOT_READY) return status;
  int error = known_error(transfer, err);
  if (error || !transfer->layers[layer]) return error ? error : status;
  status = kvs_dev_event_query(transfer->engine->device, transfer->layers[layer], err);
  return status == KVS_REFUSED ? KVS_NOT_READY : status;
}

static int new_reached_event(struct kvs_transfer *transfer, struct kvs_error *err) {
  int status = kvs_dev_event_create(transfer->engine->device, false, &transfer->end, err);
  if (!status && kvs_racecheck_on()) kvs_racecheck_stands_for(transfer->engine->device, transfer->end, transfer->point);
  return status;
}

int kvs_transfer_event(struct kvs_transfer *transfer, uint64_t *event, struct kvs_error *err) {
  struct kvs_engine *engine = transfer->engine;
  int status = kvs_dev_check(engine->device, err);
  if (status) return status;
  pthread_mutex_lock(&transfer->lane->lock);
  if (!transfer->end_shared) {
    bool ended = state_of(transfer) != KVS_STATE_RUNNING;
    if (!transfer->end && ended) /* an event that was never recorded counts as reached */
      status = new_reached_event(transfer, err);
    else if (!transfer->end)
      status = kvs_fail(err, KVS_UNSUPPORTED, "the driver gave no event for this transfer: wait() for it instead");
    transfer->end_shared = status == KVS_OK;
  }
  *event = transfer->end;
  pthread_mutex_unlock(&transfer->lane->lock);
  return status;
}

void kvs_transfer_get_info(struct kvs_transfer *transfer, struct kvs_transfer_info *info) {
  enum kvs_state state = state_of(transfer);
  *info = (struct kvs_transfer_info){
      .state = state,
      .direction = transfer->direction,
      .path = transfer->path,
      .number = transfer->ticket,
      .lane = transfer->lane->number,
      .num_layers = transfer->nlayers,
      .sequence = transfer->sequence,
      .nbytes = transfer->nbytes,
      .num_blocks = transfer->nblocks,
  };
  if (state == KVS_STATE_RUNNING) return;
  info->elapsed_ns = transfer->elapsed_ns;
  info->duration_ns = transfer->ended_ns - transfer->since_ns;
  info->num_failed = transfer->all_failed ? (size_t)transfer->nblocks : transfer->nfailed;
}

size_t kvs_transfer_failed(struct kvs_transfer *transfer, uint32_t *positions, size_t capacity) {
  if (state_of(transfer) == KVS_STATE_RUNNING) return 0;
  size_t n = transfer->all_failed ? (size_t)transfer->nblocks : transfer->nfailed;
  for (size_t i = 0; i < n && i < capacity; i++)
    positions[i] = transfer->all_failed ? (uint32_t)i : transfer->failed[i];
  return n;
}
