/* Streams, events and queues of a host device: the callers' side.
 *
 * One lock guards everything. Handles are small numbers that are reused immediately, as a driver's are. Streams are
 * even and events odd, so that a mix-up is refused. Streams are non-blocking; the legacy stream (0 and 1) and the
 * per-thread streams (2) are ordinary streams that always exist.
 *
 * A stream is a FIFO, active while not empty. The operation at its head is runnable, or is a condition that is not met
 * yet; conditions never occupy a worker (host/run.c). An event points to the mark of its latest recording. */
#include "host/queue.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/wait.h"
#include "host/run.h"

#define FIRST_HANDLE 16u

static atomic_uint_fast64_t last_stream_id;
static atomic_uint_fast64_t last_thread_id;
static _Thread_local uint64_t thread_id; /* unlike pthread_self(), never reused */

static struct kvs_host_stream *stream_new(int priority) {
  struct kvs_host_stream *stream = calloc(1, sizeof *stream);
  if (!stream) return NULL;
  stream->id = ++last_stream_id;
  stream->priority = priority;
  return stream;
}

int kvs_host_queue_init(struct kvs_host_queue *queue, unsigned max_workers, uint64_t seed,
                        struct kvs_host_memory *memory, atomic_int *lost, struct kvs_error *err) {
  memset(queue, 0, sizeof *queue);
  queue->legacy.handle = KVS_STREAM_LEGACY;
  queue->legacy.id = ++last_stream_id;
  queue->alarm = KVS_HOST_NEVER;
  queue->awaited = KVS_HOST_NEVER;
  queue->random = queue->trace = seed;
  queue->deterministic = seed != 0;
  queue->max_workers = max_workers;
  queue->memory = memory;
  queue->lost = lost;
  if (kvs_cond_init(&queue->work) || kvs_cond_init(&queue->done))
    return kvs_fail(err, KVS_NOMEM, "cannot make the locks of a device");
  pthread_mutex_init(&queue->lock, NULL);
  return KVS_OK;
}

static void event_free_locked(struct kvs_host_event *event) {
  kvs_host_mark_unref(event->mark);
  kvs_host_words_unref(event->words);
  free(event);
}

void kvs_host_queue_destroy(struct kvs_host_queue *queue) {
  kvs_host_workers_stop(queue);
  pthread_mutex_lock(&queue->lock);
  kvs_host_drop_locked(queue);
  for (size_t i = 0; i < queue->nstreams; i++) free(queue->streams[i]);
  for (size_t i = 0; i < queue->nthreads; i++) free(queue->threads[i]);
  for (size_t i = 0; i < queue->nevents; i++) {
    if (queue->events[i]) event_free_locked(queue->events[i]);
  }
  pthread_mutex_unlock(&queue->lock);
  free(queue->streams);
  free(queue->threads);
  free(queue->events);
  pthread_cond_destroy(&queue->done);
  pthread_cond_destroy(&queue->work);
  pthread_mutex_destroy(&queue->lock);
}

/* -- tables ---------------------------------------------------------------------------------------------------- */

/* Put `item` into the first free entry of a pointer table, which may grow; false: no memory. */
static bool table_put(void ***table, size_t *count, void *item, size_t *index) {
  size_t at = 0;
  while (at < *count && (*table)[at]) at++;
  if (at == *count) {
    size_t larger = *count ? 2 * *count : 16;
    void **grown = realloc(*table, larger * sizeof *grown);
    if (!grown) return false;
    memset(grown + *count, 0, (larger - *count) * sizeof *grown);
    *table = grown;
    *count = larger;
  }
  (*table)[at] = item;
  *index = at;
  return true;
}

static int refuse_handle(const char *operation, const char *what, uint64_t handle, struct kvs_error *err) {
  return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_HANDLE, operation, "0x%" PRIx64 " is no %s", handle,
                         what);
}

static int refuse_nomem(const char *operation, struct kvs_error *err) {
  return kvs_fail_driver(err, KVS_NOMEM, KVS_DRIVER_OUT_OF_MEMORY, operation, "no host memory");
}

static struct kvs_host_stream *thread_stream_locked(struct kvs_host_queue *queue) {
  size_t index;
  if (!thread_id) thread_id = ++last_thread_id;
  for (size_t i = 0; i < queue->nthreads && queue->threads[i]; i++)
    if (queue->threads[i]->thread == thread_id) return queue->threads[i];
  struct kvs_host_stream *stream = stream_new(KVS_HOST_PRIORITY_LOW);
  if (!stream || !table_put((void ***)&queue->threads, &queue->nthreads, stream, &index)) {
    free(stream);
    return NULL;
  }
  stream->handle = KVS_STREAM_PER_THREAD;
  stream->thread = thread_id;
  return stream;
}

static int find_stream_locked(struct kvs_host_queue *queue, kvs_stream handle, const char *operation,
                              struct kvs_host_stream **stream, struct kvs_error *err) {
  uint64_t index = (handle - FIRST_HANDLE) / 2;
  *stream = NULL;
  if (handle <= KVS_STREAM_LEGACY) {
    *stream = &queue->legacy;
  } else if (handle == KVS_STREAM_PER_THREAD) {
    *stream = thread_stream_locked(queue);
    if (!*stream) return refuse_nomem(operation, err);
  } else if (handle >= FIRST_HANDLE && handle % 2 == 0 && index < queue->nstreams) {
    *stream = queue->streams[index];
  }
  return *stream ? KVS_OK : refuse_handle(operation, "stream", handle, err);
}

static int find_event_locked(struct kvs_host_queue *queue, kvs_event handle, const char *operation,
                             struct kvs_host_event **event, struct kvs_error *err) {
  uint64_t index = (handle - FIRST_HANDLE) / 2;
  bool there = handle > FIRST_HANDLE && handle % 2 == 1 && index < queue->nevents;
  *event = there ? queue->events[index] : NULL;
  return *event ? KVS_OK : refuse_handle(operation, "event", handle, err);
}

static int check_lost(const struct kvs_host_queue *queue, const char *operation, struct kvs_error *err) {
  int code = atomic_load(queue->lost);
  return code ? kvs_fail_driver(err, KVS_LOST, code, operation, "the device is lost") : KVS_OK;
}

static int refuse_deadlock(const char *operation, struct kvs_error *err) {
  return kvs_fail(err, KVS_INTERNAL,
                  "deadlock: nothing can run (%s: all queued work waits for 32-bit words that nothing queued writes)",
                  operation);
}

/* -- operations ------------------------------------------------------------------------------------------------ */

/* Whether work may be queued on `handle` now. Finds the stream, and starts the workers if needed. */
static int admit_locked(struct kvs_host_queue *queue, kvs_stream handle, const char *operation,
                        struct kvs_host_stream **stream, struct kvs_error *err) {
  int status = check_lost(queue, operation, err);
  if (!status) status = find_stream_locked(queue, handle, operation, stream, err);
  if (status) return status;
  if ((*stream)->capturing)
    return kvs_fail_driver(err, KVS_CAPTURING, KVS_DRIVER_CAPTURE_UNSUPPORTED, operation,
                           "stream 0x%" PRIx64 " is being captured", handle);
  return queue->deterministic ? KVS_OK : kvs_host_workers_start_locked(queue, err);
}

static void push_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream, struct kvs_host_op *op) {
  kvs_host_stream_push_locked(queue, stream, op);
  /* virtual time does not jump here: the caller goes on queueing */
  if (queue->deterministic)
    kvs_host_steps_locked(queue, (int64_t)kvs_host_random_locked(queue, 3), false);
  else if (queue->idle && stream->head == op)
    pthread_cond_signal(&queue->work);
}

int kvs_host_enqueue(struct kvs_host_queue *queue, struct kvs_host_op *op, kvs_stream handle, const char *operation,
                     struct kvs_error *err) {
  struct kvs_host_stream *stream;
  pthread_mutex_lock(&queue->lock);
  int status = admit_locked(queue, handle, operation, &stream, err);
  if (status)
    kvs_host_op_free_locked(op);
  else
    push_locked(queue, stream, op);
  pthread_mutex_unlock(&queue->lock);
  return status;
}

/* -- streams --------------------------------------------------------------------------------------------------- */

int kvs_host_stream_create(struct kvs_host_queue *queue, int priority, kvs_stream *handle, struct kvs_error *err) {
  size_t index;
  if (priority > KVS_HOST_PRIORITY_LOW) priority = KVS_HOST_PRIORITY_LOW;
  if (priority < KVS_HOST_PRIORITY_HIGH) priority = KVS_HOST_PRIORITY_HIGH;
  struct kvs_host_stream *stream = stream_new(priority);
  if (!stream) return refuse_nomem("stream_create", err);
  pthread_mutex_lock(&queue->lock);
  bool put = table_put((void ***)&queue->streams, &queue->nstreams, stream, &index);
  if (put) *handle = stream->handle = FIRST_HANDLE + 2 * (kvs_stream)index;
  pthread_mutex_unlock(&queue->lock);
  if (put) return KVS_OK;
  free(stream);
  return refuse_nomem("stream_create", err);
}

int kvs_host_stream_destroy(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_error *err) {
  struct kvs_host_stream *stream;
  if (handle <= KVS_STREAM_PER_THREAD) return refuse_handle("stream_destroy", "stream of ours", handle, err);
  pthread_mutex_lock(&queue->lock);
  int status = find_stream_locked(queue, handle, "stream_destroy", &stream, err);
  if (!status) {
    queue->streams[(handle - FIRST_HANDLE) / 2] = NULL;
    stream->destroyed = true;
    if (!stream->head) free(stream);
  }
  pthread_mutex_unlock(&queue->lock);
  return status;
}

/* Deterministic: run a few steps, as a GPU would between two polls. True: nothing is runnable. */
static bool pass_time_locked(struct kvs_host_queue *queue) {
  if (!queue->deterministic || queue->manual) return false;
  int64_t steps = 1 + (int64_t)kvs_host_random_locked(queue, 4);
  return kvs_host_steps_locked(queue, steps, true) < steps;
}

static int not_ready(const char *operation, bool stuck, struct kvs_error *err) {
  if (stuck) return refuse_deadlock(operation, err);
  return kvs_fail_driver(err, KVS_NOT_READY, KVS_DRIVER_NOT_READY, operation, "queued work has not ended");
}

int kvs_host_stream_query(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_error *err) {
  struct kvs_host_stream *stream;
  pthread_mutex_lock(&queue->lock);
  int status = find_stream_locked(queue, handle, "stream_query", &stream, err);
  if (!status && stream->capturing)
    status = kvs_fail_driver(err, KVS_CAPTURING, KVS_DRIVER_CAPTURE_UNSUPPORTED, "stream_query",
                             "stream 0x%" PRIx64 " is being captured", handle);
  if (!status) {
    bool stuck = pass_time_locked(queue);
    status = check_lost(queue, "stream_query", err);
    if (!status && stream->head) status = not_ready("stream_query", stuck, err);
  }
  pthread_mutex_unlock(&queue->lock);
  return status;
}

int kvs_host_stream_info(struct kvs_host_queue *queue, kvs_stream handle, struct kvs_stream_info *info,
                         struct kvs_error *err) {
  struct kvs_host_stream *stream;
  pthread_mutex_lock(&queue->lock);
  int status = find_stream_locked(queue, handle, "stream_info", &stream, err);
  if (!status) *info = (struct kvs_stream_info){.id = stream->id, .capturing = stream->capturing};
  pthread_mutex_unlock(&queue->lock);
  return status;
}

int kvs_host_stream_capture(struct kvs_host_queue *queue, kvs_stream handle, bool begin, struct kvs_error *err) {
  struct kvs_host_stream *stream;
  pthread_mutex_lock(&queue->lock);
  int status = find_stream_locked(queue, handle, "capture", &stream, err);
  if (!status && stream == &queue->legacy)
    status = kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_CAPTURE_UNSUPPORTED, "capture",
                             "the legacy stream cannot be captured");
  if (!status) stream->capturing = begin;
  pthread_mutex_unlock(&queue->lock);
  return status;
}

int kvs_host_synchronize(struct kvs_host_queue *queue, const char *operation, struct kvs_error *err) {
  int status = KVS_OK;
  pthread_mutex_lock(&queue->lock);
  uint64_t target = queue->next_seq; /* operations queued from now on are not waited for */
  while (!status && !(status = check_lost(queue, operation, err)) && kvs_host_oldest_locked(queue) < target) {
    if (queue->deterministic) {
      if (!kvs_host_steps_locked(queue, 1, true) && !(status = check_lost(queue, operation, err)))
        status = refuse_deadlock(operation, err);
    } else {
      if (target < queue->awaited) queue->awaited = target;
      pthread_cond_wait(&queue->done, &queue->lock);
    }
  }
  pthread_mutex_unlock(&queue->lock);
  return status;
}

/* -- events ---------------------------------------------------------------------------------------------------- */

static int event_add(struct kvs_host_queue *queue, bool timing, struct kvs_host_words *words, kvs_event *handle,
                     struct kvs_error *err) {
  size_t index;
  struct kvs_host_event *event = calloc(1, sizeof *event);
  if (!event) return refuse_nomem("event_create", err);
  event->timing = timing;
  event->words = words;
  pthread_mutex_lock(&queue->lock);
  bool put = table_put((void ***)&queue->events, &queue->nevents, event, &index);
  pthread_mutex_unlock(&queue->lock);
  if (!put) {
    free(event);
    return refuse_nomem("event_create", err);
  }
  *handle = FIRST_HANDLE + 2 * (kvs_event)index + 1;
  return KVS_OK;
}

int kvs_host_event_create(struct kvs_host_queue *queue, bool timing, kvs_event *handle, struct kvs_error *err) {
  return event_add(queue, timing, NULL, handle, err);
}

int kvs_host_event_adopt(struct kvs_host_queue *queue, struct kvs_host_words *words, kvs_event *handle,
                         struct kvs_error *err) {
  int status = event_add(queue, false, words, handle, err);
  if (status) kvs_host_words_unref(words);
  return status;
}

struct kvs_host_words *kvs_host_event_words(struct kvs_host_queue *queue, kvs_event handle, struct kvs_error *err) {
  struct kvs_host_event *event;
  pthread_mutex_lock(&queue->lock);
  int status = find_event_locked(queue, handle, "event_share", &event, err);
  struct kvs_host_words *words = status ? NULL : kvs_host_words_ref(event->words);
  pthread_mutex_unlock(&queue->lock);
  if (!status && !words)
    kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_HANDLE, "event_share",
                    "event 0x%" PRIx64 " was not made to be shared between processes", handle);
  return words;
}

int kvs_host_event_destroy(struct kvs_host_queue *queue, kvs_event handle, struct kvs_error *err) {
  struct kvs_host_event *event;
  pthread_mutex_lock(&queue->lock);
  int status = find_event_locked(queue, handle, "event_destroy", &event, err);
  if (!status) {
    queue->events[(handle - FIRST_HANDLE) / 2] = NULL;
    event_free_locked(event);
  }
  pthread_mutex_unlock(&queue->lock);
  return status;
}

/* An operation on a mark; adds a reference. */
static struct kvs_host_op *mark_op(enum kvs_host_kind kind, struct kvs_host_mark *mark, struct kvs_error *err) {
  struct kvs_host_op *op = kvs_host_op_new(kind, 1, 0, err);
  if (!op) return NULL;
  op->what.mark = mark;
  atomic_fetch_add(&mark->refs, 1);
  return op;
}

/* Number of a recording that other processes see; 0: all entries are in use. */
static int number_locked(const struct kvs_host_event *event, struct kvs_host_mark *mark, struct kvs_error *err) {
  if (!event->words) return KVS_OK;
  mark->number = kvs_host_words_begin(event->words);
  if (!mark->number)
    return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_OUT_OF_MEMORY, "event_record",
                           "64 recordings of this event, in all processes, have not been reached yet");
  mark->words = kvs_host_words_ref(event->words);
  return KVS_OK;
}

static int record_locked(struct kvs_host_queue *queue, struct kvs_host_event *event, struct kvs_host_stream *stream,
                         struct kvs_error *err) {
  struct kvs_host_mark *mark = calloc(1, sizeof *mark);
  if (!mark) return refuse_nomem("event_record", err);
  struct kvs_host_op *op = mark_op(KVS_HOST_RECORD, mark, err);
  int status = op ? number_locked(event, mark, err) : KVS_NOMEM;
  if (status) { /* a failed recording must not be visible to other processes */
    free(op);
    free(mark);
    return status;
  }
  atomic_fetch_add(&mark->refs, 1);
  kvs_host_mark_unref(event->mark);
  event->mark = mark;
  push_locked(queue, stream, op);
  return KVS_OK;
}

int kvs_host_event_record(struct kvs_host_queue *queue, kvs_event handle, kvs_stream stream_handle,
                          struct kvs_error *err) {
  struct kvs_host_event *event;
  struct kvs_host_stream *stream;
  pthread_mutex_lock(&queue->lock);
  int status = find_event_locked(queue, handle, "event_record", &event, err);
  if (!status) status = admit_locked(queue, stream_handle, "event_record", &stream, err);
  if (!status) status = record_locked(queue, event, stream, err);
  pthread_mutex_unlock(&queue->lock);
  return status;
}

/* The event's latest recording, with a reference; NULL: none, or completed. A shared event's latest recording may be
 * another process's. */
static int latest_locked(const struct kvs_host_event *event, struct kvs_host_mark **mark, struct kvs_error *err) {
  uint64_t number = event->words ? kvs_host_words_latest(event->words) : 0;
  *mark = NULL;
  if (!event->words) {
    if (!event->mark || event->mark->done) return KVS_OK;
    *mark = event->mark;
    atomic_fetch_add(&(*mark)->refs, 1);
    return KVS_OK;
  }
  if (!number || kvs_host_words_ended(event->words, number) || kvs_host_words_abandoned(event->words, number))
    return KVS_OK;
  *mark = calloc(1, sizeof **mark);
  if (!*mark) return refuse_nomem("stream_wait", err);
  atomic_init(&(*mark)->refs, 1);
  (*mark)->words = kvs_host_words_ref(event->words);
  (*mark)->number = number;
  return KVS_OK;
}

/* Takes over the reference to the mark. */
static int wait_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream, struct kvs_host_mark *mark,
                       bool foreign, struct kvs_error *err) {
  struct kvs_host_op *op = mark_op(KVS_HOST_WAIT_EVENT, mark, err);
  kvs_host_mark_unref(mark);
  if (!op) return KVS_NOMEM;
  op->foreign = foreign;
  push_locked(queue, stream, op);
  return KVS_OK;
}

int kvs_host_stream_wait(struct kvs_host_queue *queue, kvs_stream stream_handle, kvs_event handle,
                         struct kvs_error *err) {
  struct kvs_host_event *event;
  struct kvs_host_stream *stream;
  struct kvs_host_mark *mark = NULL;
  pthread_mutex_lock(&queue->lock);
  int status = find_event_locked(queue, handle, "stream_wait", &event, err);
  if (!status) status = admit_locked(queue, stream_handle, "stream_wait", &stream, err);
  if (!status) status = latest_locked(event, &mark, err);
  if (!status && mark) status = wait_locked(queue, stream, mark, mark->words != NULL, err);
  pthread_mutex_unlock(&queue->lock);
  return status;
}

int kvs_host_stream_wait_foreign(struct kvs_host_queue *queue, kvs_stream stream_handle, struct kvs_host_queue *other,
                                 kvs_event handle, struct kvs_error *err) {
  struct kvs_host_event *event;
  struct kvs_host_stream *stream;
  struct kvs_host_mark *mark = NULL;
  pthread_mutex_lock(&other->lock); /* never two locks at once: two devices may wait for each other */
  int status = check_lost(other, "stream_wait", err);
  if (!status) status = find_event_locked(other, handle, "stream_wait", &event, err);
  if (!status) status = latest_locked(event, &mark, err);
  pthread_mutex_unlock(&other->lock);
  if (status || !mark) return status;
  pthread_mutex_lock(&queue->lock);
  status = admit_locked(queue, stream_handle, "stream_wait", &stream, err);
  if (!status)
    status = wait_locked(queue, stream, mark, true, err);
  else
    kvs_host_mark_unref(mark);
  pthread_mutex_unlock(&queue->lock);
  return status;
}

int kvs_host_event_query(struct kvs_host_queue *queue, kvs_event handle, struct kvs_error *err) {
  struct kvs_host_event *event;
  struct kvs_host_mark *mark = NULL;
  pthread_mutex_lock(&queue->lock);
  int status = find_event_locked(queue, handle, "event_query", &event, err);
  if (!status) {
    bool stuck = pass_time_locked(queue);
    status = check_lost(queue, "event_query", err);
    if (!status) status = latest_locked(event, &mark, err);
    if (!status && mark) status = not_ready("event_query", stuck, err);
    kvs_host_mark_unref(mark);
  }
  pthread_mutex_unlock(&queue->lock);
  return status;
}

static int elapsed_locked(const struct kvs_host_event *from, const struct kvs_host_event *to, uint64_t *ns,
                          struct kvs_error *err) {
  if (!from->timing || !to->timing || !from->mark || !to->mark)
    return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_HANDLE, "event_elapsed",
                           "both events must have timing and have been recorded");
  if (!from->mark->done || !to->mark->done) return not_ready("event_elapsed", false, err);
  *ns = to->mark->ns > from->mark->ns ? to->mark->ns - from->mark->ns : 0;
  return KVS_OK;
}

int kvs_host_event_elapsed(struct kvs_host_queue *queue, kvs_event from, kvs_event to, uint64_t *ns,
                           struct kvs_error *err) {
  struct kvs_host_event *first, *second;
  pthread_mutex_lock(&queue->lock);
  int status = check_lost(queue, "event_elapsed", err);
  if (!status) status = find_event_locked(queue, from, "event_elapsed", &first, err);
  if (!status) status = find_event_locked(queue, to, "event_elapsed", &second, err);
  if (!status) status = elapsed_locked(first, second, ns, err);
  pthread_mutex_unlock(&queue->lock);
  return status;
}
