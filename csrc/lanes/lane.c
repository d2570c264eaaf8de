/* Lanes: FIFO queues of unfinished transfers.
 *
 * A lane owns a stream on which its transfers run and complete in order, a burst stream for the first stage of bursts,
 * and a stock of event pairs. There is one lane for each stream of the caller (by the driver's stream id, since handles
 * are reused), direction and priority, and one for transfers without a stream. So a stream that waits long, or the
 * other direction, delays no other transfer.
 *
 * Streams are created when the device is opened, because creating one may block: when the driver has no room for
 * another (on an H100 after each 42), the call returns only when the GPU has finished all queued work. Each kind of
 * lane, a direction and a priority, has spare streams of its own. A submission that finds none takes over an idle lane
 * of its kind, and creates streams only if all of them are busy.
 *
 * Completions of a lane are in order, so reaping stops at the first transfer that has not ended. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/wait.h"
#include "lanes/lane.h"
#include "lanes/late.h"
#include "lanes/lent.h"
#include "lanes/state.h"
#include "lanes/transfer.h"
#include "racecheck/racecheck.h"

/* -- making and finding ---------------------------------------------------------------------------------------- */

/* Loads overtake stores: normal loads get a higher stream priority. */
int kvs_lane_stream_priority(const struct kvs_device_info *info, enum kvs_direction direction,
                             enum kvs_priority priority) {
  int low = info->priority_low, high = info->priority_high;
  if (priority == KVS_PRIORITY_HIGH) return high;
  if (priority == KVS_PRIORITY_BACKGROUND) return low;
  return direction == KVS_H2D ? (low + high) / 2 : low;
}

enum { SPARE_LANES = 4 }; /* of one priority, to or from the GPU; between GPUs one */

struct kvs_spare {
  struct kvs_spare *next;
  kvs_stream stream;
  enum kvs_direction direction;
  enum kvs_priority priority;
};

static bool has_spare_locked(const struct kvs_engine *engine, enum kvs_direction direction,
                             enum kvs_priority priority) {
  const struct kvs_spare *spare = engine->spare;
  while (spare && (spare->direction != direction || spare->priority != priority)) spare = spare->next;
  return spare != NULL;
}

static int take_stream_locked(struct kvs_engine *engine, enum kvs_direction direction, enum kvs_priority priority,
                              kvs_stream *stream, struct kvs_error *err) {
  for (struct kvs_spare **at = &engine->spare; *at; at = &(*at)->next) {
    struct kvs_spare *spare = *at;
    if (spare->direction != direction || spare->priority != priority) continue;
    *stream = spare->stream;
    *at = spare->next;
    free(spare);
    return KVS_OK;
  }
  return kvs_dev_stream_create(engine->device, kvs_lane_stream_priority(&engine->device->info, direction, priority),
                               stream, err);
}

static int add_spare(struct kvs_engine *engine, enum kvs_direction direction, enum kvs_priority priority,
                     struct kvs_error *err) {
  struct kvs_spare *spare = malloc(sizeof *spare);
  if (!spare) return kvs_fail(err, KVS_NOMEM, "no memory for a stream");
  *spare = (struct kvs_spare){.next = engine->spare, .direction = direction, .priority = priority};
  int wanted = kvs_lane_stream_priority(&engine->device->info, direction, priority);
  int status = kvs_dev_stream_create(engine->device, wanted, &spare->stream, err);
  if (status)
    free(spare);
  else
    engine->spare = spare;
  return status;
}

int kvs_lanes_stock(struct kvs_engine *engine, struct kvs_error *err) {
  int status = KVS_OK;
  for (int direction = KVS_D2H; direction <= KVS_OTHER_DIRECTION; direction++)
    for (int priority = KVS_PRIORITY_NORMAL; priority <= KVS_PRIORITY_BACKGROUND; priority++)
      for (int i = direction == KVS_OTHER_DIRECTION ? 2 : 2 * SPARE_LANES; !status && i > 0; i--)
        status = add_spare(engine, (enum kvs_direction)direction, (enum kvs_priority)priority, err);
  return status == KVS_LOST ? status : KVS_OK; /* with fewer, a submission may have to make streams */
}

static void lane_free(struct kvs_lane *lane) {
  struct kvs_device *device = lane->engine->device;
  struct kvs_error ignored;
  for (unsigned i = 0; i < lane->nevents; i++) {
    (void)kvs_dev_event_destroy(device, lane->events[i].start, &ignored);
    (void)kvs_dev_event_destroy(device, lane->events[i].end, &ignored);
  }
  if (lane->fork) (void)kvs_dev_event_destroy(device, lane->fork, &ignored);
  if (lane->stream) (void)kvs_dev_stream_destroy(device, lane->stream, &ignored);
  if (lane->burst_stream) (void)kvs_dev_stream_destroy(device, lane->burst_stream, &ignored);
  for (unsigned i = 0; i < KVS_LANE_POINTS; i++) kvs_racecheck_point_free(lane->points[i].point);
  pthread_mutex_destroy(&lane->submit);
  pthread_mutex_destroy(&lane->lock);
  free(lane->events);
  free(lane);
}

static int lane_new_locked(struct kvs_engine *engine, enum kvs_direction direction, enum kvs_priority priority,
                           struct kvs_lane **made, struct kvs_error *err) {
  struct kvs_device *device = engine->device;
  struct kvs_lane *lane = calloc(1, sizeof *lane);
  if (!lane) return kvs_fail(err, KVS_NOMEM, "no memory for a lane");
  int status = KVS_OK;
  lane->engine = engine;
  lane->direction = direction;
  lane->priority = priority;
  lane->depth = atomic_load(&engine->depth);
  pthread_mutex_init(&lane->submit, NULL);
  pthread_mutex_init(&lane->lock, NULL);
  lane->events = calloc(lane->depth, sizeof *lane->events);
  if (!lane->events) status = kvs_fail(err, KVS_NOMEM, "no memory for a lane of %u transfers", lane->depth);
  if (!status) status = kvs_dev_event_create(device, false, &lane->fork, err);
  if (!status) status = take_stream_locked(engine, direction, priority, &lane->stream, err);
  if (!status) status = take_stream_locked(engine, direction, priority, &lane->burst_stream, err);
  if (status) {
    lane_free(lane);
    return status;
  }
  *made = lane;
  return KVS_OK;
}

/* The lane has no unfinished transfers. Work left by a refused submission must have ended too, or the next stream would
 * wait for unrelated work. */
static bool is_idle(struct kvs_lane *lane) {
  struct kvs_error ignored;
  pthread_mutex_lock(&lane->lock);
  bool idle = lane->count == 0;
  pthread_mutex_unlock(&lane->lock);
  if (!idle || !lane->leftovers) return idle;
  bool before = kvs_racecheck_internal(true);
  lane->leftovers = kvs_dev_stream_query(lane->engine->device, lane->stream, &ignored) != KVS_OK ||
                    kvs_dev_stream_query(lane->engine->device, lane->burst_stream, &ignored) != KVS_OK;
  kvs_racecheck_internal(before);
  return !lane->leftovers;
}

/* The lane of this key. Else, if there are no spare streams for a new lane, the least recently used idle one of the
 * kind, which gets the key. Else NULL. While the race checker runs, a new lane is preferred: one lane for two of the
 * caller's streams orders them, and would hide that nothing else does. */
static struct kvs_lane *find_locked(struct kvs_engine *engine, uint64_t id, enum kvs_direction direction,
                                    enum kvs_priority priority, unsigned *same_kind) {
  struct kvs_lane *idle = NULL;
  *same_kind = 0;
  for (struct kvs_lane *lane = engine->lanes; lane; lane = lane->next) {
    if (lane->direction != direction || lane->priority != priority) continue;
    if (lane->stream_id == id) return lane;
    ++*same_kind;
    if (lane->users || lane->stream_id == 0) continue;
    if (is_idle(lane) && (!idle || lane->last_used < idle->last_used)) idle = lane;
  }
  bool another = kvs_racecheck_on() || has_spare_locked(engine, direction, priority);
  if (!idle || (*same_kind < KVS_MAX_LANES && another)) return NULL;
  idle->stream_id = id;
  return idle;
}

int kvs_lane_acquire(struct kvs_engine *engine, const struct kvs_options *options, enum kvs_direction direction,
                     struct kvs_lane **found, struct kvs_error *err) {
  struct kvs_stream_info info = {.id = 0};
  unsigned same_kind;
  int status = options->on_stream ? kvs_stream_ask(engine->device, options->stream, "the stream", &info, err) : KVS_OK;
  if (status) return status;
  pthread_mutex_lock(&engine->lock);
  struct kvs_lane *lane = find_locked(engine, info.id, direction, options->priority, &same_kind);
  if (!lane && (same_kind >= KVS_MAX_LANES || !has_spare_locked(engine, direction, options->priority))) {
    pthread_mutex_unlock(&engine->lock);
    kvs_engine_reap(engine); /* transfers may have ended since the last reap */
    pthread_mutex_lock(&engine->lock);
    lane = find_locked(engine, info.id, direction, options->priority, &same_kind);
  }
  if (!lane && same_kind >= KVS_MAX_LANES)
    status = kvs_fail(err, KVS_QUEUE_FULL, "%u streams have unfinished transfers: wait for some of them", same_kind);
  if (!lane && !status) {
    status = lane_new_locked(engine, direction, options->priority, &lane, err);
    if (!status) {
      lane->stream_id = info.id;
      lane->next = engine->lanes;
      engine->lanes = lane;
      lane->number = atomic_load(&engine->nlanes); /* find_locked() keeps the number below KVS_LANES */
      engine->numbered[lane->number] = lane;
      atomic_store(&engine->nlanes, lane->number + 1);
    }
  }
  if (!status) {
    lane->users++;
    lane->last_used = ++engine->clock;
  }
  pthread_mutex_unlock(&engine->lock);
  *found = lane;
  return status;
}

void kvs_lane_release(struct kvs_lane *lane, bool leftovers) {
  pthread_mutex_lock(&lane->engine->lock);
  lane->users--;
  lane->leftovers |= leftovers;
  pthread_mutex_unlock(&lane->engine->lock);
}

/* -- the queue ------------------------------------------------------------------------------------------------- */

int kvs_lane_reserve(struct kvs_lane *lane, struct kvs_transfer *transfer, struct kvs_error *err) {
  struct kvs_device *device = lane->engine->device;
  int status = KVS_OK;
  pthread_mutex_lock(&lane->lock);
  unsigned count = lane->count;
  bool unjoined = false; /* the lane stream does not wait for the copies of such a transfer */
  for (const struct kvs_transfer *queued = lane->head; queued; queued = queued->next) unjoined |= queued->unjoined;
  if (!unjoined && count < lane->depth && lane->nevents) {
    struct kvs_event_pair pair = lane->events[--lane->nevents];
    transfer->start = pair.start;
    transfer->end = pair.end;
  }
  pthread_mutex_unlock(&lane->lock);
  if (unjoined) {
    atomic_fetch_add(&lane->engine->refused_full, 1);
    return kvs_fail(err, KVS_QUEUE_FULL,
                    "a transfer of this lane failed and its copies still run: wait for it and submit again");
  }
  if (count >= lane->depth) {
    atomic_fetch_add(&lane->engine->refused_full, 1);
    return kvs_fail(err, KVS_QUEUE_FULL,
                    "the lane holds %u unfinished transfers, its limit: wait for an older one and submit again", count);
  }
  if (!transfer->start) status = kvs_dev_event_create(device, true, &transfer->start, err);
  if (!status && !transfer->end) status = kvs_dev_event_create(device, true, &transfer->end, err);
  transfer->lane = lane;
  return status;
}

/* Return a transfer's events to the stock, except one that was handed out. Under lane->lock. */
static void take_back_events(struct kvs_lane *lane, struct kvs_transfer *transfer) {
  struct kvs_error ignored;
  if (transfer->start && transfer->end && !transfer->end_shared && lane->nevents < lane->depth) {
    lane->events[lane->nevents++] = (struct kvs_event_pair){transfer->start, transfer->end};
  } else {
    if (transfer->start) (void)kvs_dev_event_destroy(lane->engine->device, transfer->start, &ignored);
    if (transfer->end && !transfer->end_shared)
      (void)kvs_dev_event_destroy(lane->engine->device, transfer->end, &ignored);
  }
  transfer->start = 0;
  if (!transfer->end_shared) transfer->end = 0;
}

void kvs_lane_unreserve(struct kvs_lane *lane, struct kvs_transfer *transfer) {
  pthread_mutex_lock(&lane->lock);
  take_back_events(lane, transfer);
  pthread_mutex_unlock(&lane->lock);
}

/* The lock makes this thread the only writer: plain stores are enough for readers without the lock. */
static void count_locked(struct kvs_lane *lane, unsigned count, uint64_t nbytes) {
  atomic_store_explicit(&lane->count, count, memory_order_relaxed);
  atomic_store_explicit(&lane->nbytes, nbytes, memory_order_relaxed);
  atomic_store_explicit(&lane->oldest_ns, lane->head ? lane->head->since_ns : 0, memory_order_relaxed);
}

void kvs_lane_append(struct kvs_lane *lane, struct kvs_transfer *transfer) {
  atomic_fetch_add(&transfer->refs, 1);
  pthread_mutex_lock(&lane->lock);
  transfer->next = NULL;
  if (lane->tail)
    lane->tail->next = transfer;
  else
    lane->head = transfer;
  lane->tail = transfer;
  count_locked(lane, lane->count + 1, lane->nbytes + transfer->nbytes);
  pthread_mutex_unlock(&lane->lock);
}

int kvs_lane_fork(struct kvs_lane *lane, kvs_stream from, kvs_stream to, struct kvs_error *err) {
  int status = kvs_dev_event_record(lane->engine->device, lane->fork, from, err);
  return status ? status : kvs_dev_stream_wait(lane->engine->device, to, lane->fork, err);
}

int kvs_lane_head(struct kvs_lane *lane, bool ahead, kvs_stream *head, struct kvs_error *err) {
  kvs_stream before = lane->ahead ? lane->burst_stream : lane->stream;
  *head = ahead ? lane->burst_stream : lane->stream;
  int status = *head == before ? KVS_OK : kvs_lane_fork(lane, before, *head, err);
  if (!status) lane->ahead = ahead;
  return status;
}

static struct kvs_transfer *pop_locked(struct kvs_lane *lane) {
  struct kvs_transfer *transfer = lane->head;
  lane->head = transfer->next;
  if (!lane->head) lane->tail = NULL;
  count_locked(lane, lane->count - 1, lane->nbytes - transfer->nbytes);
  transfer->next = NULL;
  return transfer;
}

/* Whether the oldest transfer's device work has ended. */
static int ended_locked(struct kvs_lane *lane, struct kvs_error *err) {
  struct kvs_engine *engine = lane->engine;
  const struct kvs_transfer *oldest = lane->head;
  int status = oldest->end ? kvs_dev_event_query(engine->device, oldest->end, err)
                           : kvs_dev_stream_query(engine->device, lane->stream, err);
  if (!status && oldest->unjoined) status = kvs_dev_stream_query(engine->device, lane->burst_stream, err);
  if (!status && oldest->unjoined) status = kvs_lent_settled(engine, lane->direction, err);
  if (!status && atomic_load(&oldest->unsettled))
    return kvs_fail(err, KVS_NOT_READY, "transfers are unfinished"); /* kvs_late_settle() does it */
  return status;
}

/* For the race checker: order after the transfer may be noted long after the transfer is freed. */
static void keep_point_locked(struct kvs_lane *lane, struct kvs_transfer *transfer) {
  struct kvs_ended_point *kept = &lane->points[transfer->sequence % KVS_LANE_POINTS];
  if (!transfer->point && !kept->point) return;
  kvs_racecheck_point_free(kept->point);
  *kept = (struct kvs_ended_point){transfer->sequence, kvs_racecheck_point_ref(transfer->point)};
}

struct kvs_race_point *kvs_lane_point(struct kvs_lane *lane, uint64_t sequence) {
  struct kvs_race_point *point = NULL;
  pthread_mutex_lock(&lane->lock);
  const struct kvs_ended_point *kept = &lane->points[sequence % KVS_LANE_POINTS];
  if (kept->sequence >= sequence)
    point = kvs_racecheck_point_ref(kept->point); /* the point of a later transfer covers it */
  pthread_mutex_unlock(&lane->lock);
  return point;
}

uint64_t kvs_lane_last_on(struct kvs_lane *lane, uint64_t low, uint64_t high) {
  uint64_t sequence = 0;
  pthread_mutex_lock(&lane->lock);
  for (const struct kvs_transfer *transfer = lane->head; transfer; transfer = transfer->next)
    if ((low < transfer->gpu.high && transfer->gpu.low < high) ||
        (low < transfer->cpu.high && transfer->cpu.low < high))
      sequence = transfer->sequence;
  pthread_mutex_unlock(&lane->lock);
  return sequence;
}

static void finish_oldest_locked(struct kvs_lane *lane) {
  struct kvs_transfer *transfer = pop_locked(lane);
  kvs_transfer_finish(transfer);
  keep_point_locked(lane, transfer);
  atomic_store(&lane->ended, transfer->sequence);
  if (!transfer->pins) take_back_events(lane, transfer);
  kvs_transfer_drop(transfer);
}

static int reap_locked(struct kvs_lane *lane, struct kvs_error *err) {
  int status = KVS_OK;
  while (lane->head && (status = ended_locked(lane, err)) == KVS_OK) finish_oldest_locked(lane);
  return status;
}

int kvs_lane_reap(struct kvs_lane *lane, struct kvs_error *err) {
  bool before = kvs_racecheck_internal(true);
  pthread_mutex_lock(&lane->lock);
  int status = reap_locked(lane, err);
  pthread_mutex_unlock(&lane->lock);
  kvs_racecheck_internal(before);
  return status;
}

int kvs_lane_try_reap(struct kvs_lane *lane, struct kvs_error *err) {
  if (!lane->count || pthread_mutex_trylock(&lane->lock) != 0) return KVS_OK;
  bool before = kvs_racecheck_internal(true);
  int status = reap_locked(lane, err);
  pthread_mutex_unlock(&lane->lock);
  kvs_racecheck_internal(before);
  return status;
}

void kvs_engine_reap(struct kvs_engine *engine) {
  struct kvs_error err;
  bool lost = kvs_dev_check(engine->device, &err) == KVS_LOST;
  kvs_late_settle(engine);
  pthread_mutex_lock(&engine->lock);
  for (struct kvs_lane *lane = engine->lanes; lane && !lost; lane = lane->next)
    lost = kvs_lane_reap(lane, &err) == KVS_LOST;
  pthread_mutex_unlock(&engine->lock);
  if (lost) kvs_engine_lose(engine);
}

void kvs_engine_lose(struct kvs_engine *engine) {
  pthread_mutex_lock(&engine->lock);
  for (struct kvs_lane *lane = engine->lanes; lane; lane = lane->next) {
    pthread_mutex_lock(&lane->lock);
    while (lane->head) finish_oldest_locked(lane);
    pthread_mutex_unlock(&lane->lock);
  }
  pthread_mutex_unlock(&engine->lock);
}

static bool touches(const struct kvs_transfer *transfer, const struct kvs_region *region) {
  const struct kvs_bounds *bounds =
      kvs_region_is_of(region, transfer->engine->device->ordinal) ? &transfer->gpu : &transfer->cpu;
  return region->base < bounds->high && bounds->low < region->base + region->nbytes;
}

struct drain {
  struct kvs_engine *engine;
  const struct kvs_region *region;
  uint64_t
      ticket; /* later transfers are not waited for: their callers submit them while the memory is being given back */
};

static bool busy_locked(const struct kvs_lane *lane, const struct drain *drain) {
  for (const struct kvs_transfer *transfer = lane->head; transfer; transfer = transfer->next)
    if (!drain->region || (transfer->ticket <= drain->ticket && touches(transfer, drain->region))) return true;
  return false;
}

int kvs_transfer_pin(struct kvs_transfer *transfer, kvs_event *end, struct kvs_error *err) {
  int status = KVS_OK;
  pthread_mutex_lock(&transfer->lane->lock);
  if (transfer->error.status != KVS_OK) {
    *err = transfer->error; /* set before the end too, if a copy was refused */
    status = err->status;
  } else if (atomic_load(&transfer->state) == KVS_STATE_RUNNING && !transfer->end) {
    status = kvs_fail(err, KVS_UNSUPPORTED, "the driver gave no event for this transfer: wait() for it instead");
  } else if (atomic_load(&transfer->state) == KVS_STATE_RUNNING) {
    transfer->pins++;
    *end = transfer->end;
    status = KVS_NOT_READY;
  }
  pthread_mutex_unlock(&transfer->lane->lock);
  return status;
}

int kvs_lane_pin(struct kvs_lane *lane, uint64_t sequence, struct kvs_transfer **found, kvs_event *end,
                 struct kvs_error *err) {
  int status = KVS_OK;
  pthread_mutex_lock(&lane->lock);
  struct kvs_transfer *transfer = lane->head;
  while (transfer && transfer->sequence < sequence) transfer = transfer->next;
  if (transfer && transfer->sequence == sequence && !transfer->end) {
    status =
        kvs_fail(err, KVS_UNSUPPORTED,
                 "transfer %" PRIu64 " uses the same blocks, and the driver gave no event for it: wait() for it first",
                 transfer->ticket);
  } else if (transfer && transfer->sequence == sequence) {
    transfer->pins++;
    atomic_fetch_add(&transfer->refs, 1);
    *found = transfer;
    *end = transfer->end;
    status = KVS_NOT_READY;
  }
  pthread_mutex_unlock(&lane->lock);
  return status;
}

bool kvs_lane_pin_begun(struct kvs_lane *lane, struct kvs_transfer **found, kvs_event *end) {
  struct kvs_device *device = lane->engine->device;
  struct kvs_error ignored;
  pthread_mutex_lock(&lane->lock);
  struct kvs_transfer *oldest = lane->head;
  bool begun = oldest && oldest->end && !oldest->steps && !oldest->unjoined &&
               kvs_dev_event_query(device, oldest->start, &ignored) == KVS_OK &&
               kvs_dev_event_query(device, oldest->end, &ignored) == KVS_NOT_READY;
  if (begun) {
    oldest->pins++;
    atomic_fetch_add(&oldest->refs, 1);
    *found = oldest;
    *end = oldest->end;
  }
  pthread_mutex_unlock(&lane->lock);
  return begun;
}

void kvs_transfer_unpin(struct kvs_transfer *transfer) {
  pthread_mutex_lock(&transfer->lane->lock);
  if (--transfer->pins == 0 && atomic_load(&transfer->state) != KVS_STATE_RUNNING)
    take_back_events(transfer->lane, transfer);
  pthread_mutex_unlock(&transfer->lane->lock);
}

static int poll_drained(void *arg, struct kvs_error *err) {
  const struct drain *drain = arg;
  bool busy = false;
  kvs_engine_reap(drain->engine);
  pthread_mutex_lock(&drain->engine->lock);
  for (struct kvs_lane *lane = drain->engine->lanes; lane && !busy; lane = lane->next) {
    pthread_mutex_lock(&lane->lock);
    busy = busy_locked(lane, drain);
    pthread_mutex_unlock(&lane->lock);
  }
  pthread_mutex_unlock(&drain->engine->lock);
  return busy ? kvs_fail(err, KVS_NOT_READY, "transfers are unfinished") : KVS_OK;
}

int kvs_engine_drain(struct kvs_engine *engine, const struct kvs_region *region, int64_t timeout_ns,
                     struct kvs_error *err) {
  struct drain drain = {engine, region, atomic_load(&engine->tickets)};
  int status = kvs_wait_until(poll_drained, &drain, engine->device->stepped, timeout_ns, err);
  if (status != KVS_TIMEOUT) return status;
  return kvs_fail(err, status, "transfers of %s%s were still unfinished after %.1f s", engine->name,
                  region ? " that use this memory" : "", (double)timeout_ns / 1e9);
}

void kvs_engine_uncount_full(struct kvs_engine *engine) { atomic_fetch_sub(&engine->refused_full, 1); }

uint64_t kvs_engine_ended(const struct kvs_engine *engine) {
  return atomic_load(&engine->done) + atomic_load(&engine->failed);
}

struct awaited_end {
  struct kvs_engine *engine;
  uint64_t ended;
};

static int poll_ended(void *arg, struct kvs_error *err) {
  const struct awaited_end *awaited = arg;
  (void)err;
  kvs_engine_reap(awaited->engine);
  return kvs_engine_ended(awaited->engine) != awaited->ended ? KVS_OK : KVS_NOT_READY;
}

int kvs_engine_wait_ended(struct kvs_engine *engine, uint64_t ended, int64_t timeout_ns, struct kvs_error *err) {
  struct awaited_end awaited = {engine, ended};
  return kvs_wait_until(poll_ended, &awaited, engine->device->stepped, timeout_ns, err);
}

void kvs_lanes_destroy(struct kvs_engine *engine) {
  while (engine->lanes) {
    struct kvs_lane *lane = engine->lanes;
    engine->lanes = lane->next;
    lane_free(lane);
  }
  struct kvs_error ignored;
  while (engine->spare) {
    struct kvs_spare *spare = engine->spare;
    engine->spare = spare->next;
    (void)kvs_dev_stream_destroy(engine->device, spare->stream, &ignored);
    free(spare);
  }
}
