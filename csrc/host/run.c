/* Execution of a host device's work.
 *
 * Threaded: up to four workers. A worker picks the stream of the highest priority with a runnable head (the longest
 * waiting among equals), takes a slice of about a MiB and runs the slice without the lock. Several workers may run
 * slices of one operation, since there is no order within it. An operation ends with its last slice.
 *
 * Wake-ups are chained: a thread that makes something runnable signals one worker; a worker signals the next one before
 * it runs a slice, if more is runnable or a timeout is pending. A worker that has finished looks for work itself. One
 * idle worker sleeps only until the next timeout: the end of a delay, or the next poll of a 32-bit word.
 *
 * Deterministic: no threads. A step picks an operation by the seed, mostly by priority (for a GPU a hint as well), and
 * runs one copy of a batch or one other operation completely, under the lock. Time is virtual: a microsecond a step. If
 * only delays are left, the time advances to the end of the first delay. */
#include "host/run.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/copy.h"
#include "base/thread.h"
#include "base/wait.h"
#include "host/kernel.h"
#include "kernels/twins.h"

#define SLICE_NBYTES ((uint64_t)1 << 20)
#define SLICE_UNITS 1024u             /* limits the time under the lock while taking a slice of small copies */
#define POLL_NS ((uint64_t)100000)    /* polling interval of a word that a stream waits for */
#define OWNER_NS ((uint64_t)20000000) /* interval of the check that the word's writer is alive */
#define STEP_NS 1000u

/* A part of an operation: units [first, first + units), without the first `offset` bytes of the first unit, and up to
 * byte `end` of the last. */
struct slice {
  uint64_t first, units, offset, end;
};

static uint64_t now_locked(const struct kvs_host_queue *queue) {
  return queue->deterministic ? queue->clock : kvs_clock_ns();
}

uint64_t kvs_host_random_locked(struct kvs_host_queue *queue, uint64_t below) {
  if (queue->manual) return 0;
  queue->random++;
  return kvs_pattern_word(queue->random, 0) % below;
}

static void trace_locked(struct kvs_host_queue *queue, uint64_t what) {
  queue->trace = kvs_pattern_word(queue->trace ^ what, 1);
}

/* -- execution ------------------------------------------------------------------------------------------------- */

static uint64_t unit_nbytes(const struct kvs_host_op *op, uint64_t unit) {
  switch (op->kind) {
  case KVS_HOST_COPY:
    return op->pieces[unit].nbytes;
  case KVS_HOST_RECT:
    return op->what.rect.width;
  case KVS_HOST_FILL:
    return op->what.fill.nwords * 4;
  default:
    return 0;
  }
}

static void fill_words(uint64_t dst, uint32_t word, uint64_t nwords) {
  uint32_t *words = (uint32_t *)(uintptr_t)dst; /* aligned: checked at enqueue */
  for (uint64_t i = 0; i < nwords; i++) words[i] = word;
}

static void run_bytes(const struct kvs_host_op *op, uint64_t unit, uint64_t from, uint64_t nbytes) {
  const struct kvs_rect *rect = &op->what.rect;
  uint64_t dst, src;
  if (op->kind == KVS_HOST_FILL) {
    fill_words(op->what.fill.dst + from, op->what.fill.word, nbytes / 4);
    return;
  }
  if (op->kind == KVS_HOST_COPY) {
    dst = op->pieces[unit].dst;
    src = op->pieces[unit].src;
  } else {
    uint64_t depth = unit / rect->height, row = unit % rect->height;
    dst = rect->dst + (depth * rect->dst_height + row) * rect->dst_pitch;
    src = rect->src + (depth * rect->src_height + row) * rect->src_pitch;
  }
  if (nbytes) kvs_copy_bytes(dst + from, src + from, nbytes, op->streaming);
}

/* Take the next slice of an operation that has unassigned units. */
static struct slice take_locked(struct kvs_host_op *op) {
  struct slice slice = {.first = op->unit, .offset = op->offset};
  uint64_t nbytes = 0;
  if (op->kind == KVS_HOST_KERNEL) { /* the cost of CTAs is unknown: smaller slices towards the end */
    slice.units = 1 + (op->units - op->unit) / 16;
    op->unit += slice.units;
    return slice;
  }
  while (op->unit < op->units && slice.units < SLICE_UNITS && nbytes < SLICE_NBYTES) {
    uint64_t left = unit_nbytes(op, op->unit) - op->offset, room = SLICE_NBYTES - nbytes;
    uint64_t part = left < room ? left : room;
    slice.units++;
    slice.end = op->offset + part;
    nbytes += part;
    op->offset = part < left ? slice.end : 0;
    if (part == left) op->unit++;
  }
  return slice;
}

static void run_slice(const struct kvs_host_op *op, struct slice slice) {
  for (uint64_t i = 0; i < slice.units; i++) {
    uint64_t unit = slice.first + i, from = i == 0 ? slice.offset : 0;
    if (op->kind == KVS_HOST_CALL)
      op->what.call.function(op->what.call.arg);
    else if (op->kind == KVS_HOST_KERNEL)
      kvs_twin_run(op->what.kernel.id, op->what.kernel.params, (unsigned)unit, op->what.kernel.grid);
    else
      run_bytes(op, unit, from, (i + 1 == slice.units ? slice.end : unit_nbytes(op, unit)) - from);
  }
  if (op->streaming) kvs_copy_fence();
}

/* -- scheduling ------------------------------------------------------------------------------------------------ */

static bool flag_reached(const struct kvs_host_op *op) {
  uint32_t word = __atomic_load_n((const uint32_t *)(uintptr_t)op->what.flag.ptr, __ATOMIC_ACQUIRE);
  return (int32_t)(word - op->what.flag.value) >= 0;
}

static bool delay_over_locked(struct kvs_host_op *op, uint64_t now) {
  if (!op->started) {
    op->started = true;
    op->until = now + op->what.delay_ns;
  }
  return now >= op->until;
}

/* Whether a recording of another process has completed or its process has ended. */
static bool shared_reached(struct kvs_host_op *op, uint64_t now) {
  const struct kvs_host_mark *mark = op->what.mark;
  if (kvs_host_words_ended(mark->words, mark->number)) return true;
  if (now < op->until) return false;
  op->until = now + OWNER_NS;
  return kvs_host_words_abandoned(mark->words, mark->number);
}

/* Whether the head of a stream can run. If that depends on time, *wake is lowered to the time of the next check. */
static bool ready_locked(struct kvs_host_queue *queue, struct kvs_host_op *op, uint64_t now, uint64_t *wake) {
  uint64_t again;
  switch (op->kind) {
  case KVS_HOST_RECORD:
  case KVS_HOST_WRITE32:
    return true;
  case KVS_HOST_WAIT_EVENT:
    if (atomic_load(&op->what.mark->done)) return true;
    if (!op->foreign) return false;
    if (op->what.mark->words && shared_reached(op, now)) return true;
    again = now + POLL_NS;
    break;
  case KVS_HOST_WAIT32:
    if (flag_reached(op)) return true;
    again = queue->deterministic ? KVS_HOST_NEVER : now + POLL_NS;
    break;
  case KVS_HOST_DELAY:
    if (delay_over_locked(op, now)) return true;
    again = op->until;
    break;
  case KVS_HOST_KERNEL:
    if (!op->prepared) return !op->running;
    return op->unit < op->units;
  default:
    return op->unit < op->units;
  }
  if (again < *wake) *wake = again;
  return false;
}

/* The stream to run next, or NULL. *more: another one is runnable. */
static struct kvs_host_stream *pick_locked(struct kvs_host_queue *queue, uint64_t now, uint64_t *wake, bool *more) {
  bool ranked = !queue->deterministic || kvs_host_random_locked(queue, 4) != 0;
  struct kvs_host_stream *best = NULL;
  uint64_t equals = 0, ready = 0;
  for (struct kvs_host_stream *stream = queue->first; stream; stream = stream->after) {
    if (!ready_locked(queue, stream->head, now, wake)) continue;
    ready++;
    if (best && ranked && stream->priority > best->priority) continue;
    equals = best && ranked && stream->priority < best->priority ? 1 : equals + 1;
    /* Threaded: the first of the best. Deterministic: a random one of the best. */
    if (equals == 1 || (queue->deterministic && kvs_host_random_locked(queue, equals) == 0)) best = stream;
  }
  *more = ready > 1;
  return best;
}

/* -- completion ------------------------------------------------------------------------------------------------ */

static void lose_locked(struct kvs_host_queue *queue, int code) {
  int none = 0;
  atomic_compare_exchange_strong(queue->lost, &none, code);
}

static void run_instant_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream) {
  struct kvs_host_op *op = stream->head;
  if (op->kind == KVS_HOST_RECORD) {
    op->what.mark->ns = now_locked(queue);
    atomic_store(&op->what.mark->done, true);
    if (op->what.mark->words) kvs_host_words_end(op->what.mark->words, op->what.mark->number);
  } else if (op->kind == KVS_HOST_WRITE32) {
    __atomic_store_n((uint32_t *)(uintptr_t)op->what.flag.ptr, op->what.flag.value, __ATOMIC_RELEASE);
  }
  kvs_host_stream_pop_locked(queue, stream);
}

/* The last slice of the head has run. A paced kernel continues as a delay. */
static void finish_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream) {
  struct kvs_host_op *op = stream->head;
  if (op->kind == KVS_HOST_KERNEL && op->pace_ns && !atomic_load(queue->lost)) {
    op->kind = KVS_HOST_DELAY;
    op->started = true;
    op->until = op->begun_ns + op->pace_ns;
    return;
  }
  kvs_host_stream_pop_locked(queue, stream);
}

static bool is_instant(const struct kvs_host_op *op) { return op->kind >= KVS_HOST_DELAY; }

/* -- threaded -------------------------------------------------------------------------------------------------- */

/* Run a slice of a stream's head; releases the lock meanwhile. */
static void run_part_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream) {
  struct kvs_host_op *op = stream->head;
  bool prepare = op->kind == KVS_HOST_KERNEL && !op->prepared, good = true;
  struct slice slice = {0};
  if (prepare)
    op->begun_ns = now_locked(queue);
  else
    slice = take_locked(op);
  op->running++;
  if (queue->idle && op->unit < op->units) pthread_cond_signal(&queue->work); /* another takes the next slice */
  pthread_mutex_unlock(&queue->lock);
  if (prepare)
    good = kvs_host_kernel_prepare(queue->memory, op);
  else
    run_slice(op, slice);
  pthread_mutex_lock(&queue->lock);
  op->running--;
  if (prepare) op->prepared = true;
  if (!good) lose_locked(queue, KVS_DRIVER_ILLEGAL_ADDRESS);
  if (atomic_load(queue->lost)) op->unit = op->units; /* drop the remaining slices */
  if (op->unit == op->units && !op->running) finish_locked(queue, stream);
}

static void next_turn_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream) {
  if (!stream->after) return;
  *(stream->before ? &stream->before->after : &queue->first) = stream->after;
  stream->after->before = stream->before;
  stream->before = queue->last;
  stream->after = NULL;
  queue->last->after = stream;
  queue->last = stream;
}

static void sleep_locked(struct kvs_host_queue *queue, uint64_t wake) {
  queue->idle++;
  if (wake < queue->alarm) {
    queue->alarm = wake;
    (void)kvs_cond_wait(&queue->work, &queue->lock, wake);
    if (queue->alarm == wake) queue->alarm = KVS_HOST_NEVER;
  } else {
    pthread_cond_wait(&queue->work, &queue->lock);
  }
  queue->idle--;
}

static void *work(void *arg) {
  struct kvs_host_queue *queue = arg;
  pthread_mutex_lock(&queue->lock);
  while (!queue->stopping) {
    uint64_t wake = KVS_HOST_NEVER;
    bool more = false;
    if (atomic_load(queue->lost)) kvs_host_drop_locked(queue);
    struct kvs_host_stream *stream = pick_locked(queue, now_locked(queue), &wake, &more);
    if (!stream) {
      sleep_locked(queue, wake);
      continue;
    }
    if (is_instant(stream->head)) {
      run_instant_locked(queue, stream);
      continue;
    }
    next_turn_locked(queue, stream);
    if (queue->idle && (more || wake != KVS_HOST_NEVER)) pthread_cond_signal(&queue->work);
    run_part_locked(queue, stream);
  }
  pthread_mutex_unlock(&queue->lock);
  return NULL;
}

int kvs_host_workers_start_locked(struct kvs_host_queue *queue, struct kvs_error *err) {
  if (queue->nworkers) return KVS_OK;
  while (queue->nworkers < queue->max_workers &&
         kvs_thread_start(&queue->workers[queue->nworkers], "kvswap-host", work, queue) == 0)
    queue->nworkers++;
  if (queue->nworkers) return KVS_OK;
  return kvs_fail_driver(err, KVS_NOMEM, KVS_DRIVER_OUT_OF_MEMORY, "start", "cannot start a worker thread");
}

void kvs_host_workers_stop(struct kvs_host_queue *queue) {
  pthread_mutex_lock(&queue->lock);
  queue->stopping = true;
  pthread_cond_broadcast(&queue->work);
  pthread_mutex_unlock(&queue->lock);
  for (unsigned i = 0; i < queue->nworkers; i++) pthread_join(queue->workers[i], NULL);
}

/* -- deterministic --------------------------------------------------------------------------------------------- */

/* Run one randomly chosen copy of a batch. */
static void step_copy_locked(struct kvs_host_queue *queue, struct kvs_host_op *op) {
  uint64_t chosen = op->unit + kvs_host_random_locked(queue, op->units - op->unit);
  struct kvs_piece piece = op->pieces[chosen];
  op->pieces[chosen] = op->pieces[op->unit];
  op->pieces[op->unit] = piece;
  run_bytes(op, op->unit, 0, piece.nbytes);
  op->unit++;
  trace_locked(queue, chosen);
}

/* Run a stream's head completely; the order of CTAs and rows depends on the seed. */
static void step_whole_locked(struct kvs_host_queue *queue, struct kvs_host_op *op) {
  uint64_t rotation = kvs_host_random_locked(queue, op->units);
  op->begun_ns = queue->clock;
  if (op->kind == KVS_HOST_KERNEL && !kvs_host_kernel_prepare(queue->memory, op)) {
    lose_locked(queue, KVS_DRIVER_ILLEGAL_ADDRESS);
    return;
  }
  for (uint64_t i = 0; i < op->units; i++) {
    uint64_t unit = (rotation + i) % op->units;
    run_slice(op, (struct slice){.first = unit, .units = 1, .end = unit_nbytes(op, unit)});
  }
  op->unit = op->units;
  trace_locked(queue, rotation);
}

static void step_stream_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream) {
  struct kvs_host_op *op = stream->head;
  trace_locked(queue, op->seq << 8 | (uint64_t)op->kind);
  if (is_instant(op)) {
    run_instant_locked(queue, stream);
    return;
  }
  if (op->kind == KVS_HOST_COPY)
    step_copy_locked(queue, op);
  else
    step_whole_locked(queue, op);
  if (atomic_load(queue->lost))
    kvs_host_drop_locked(queue);
  else if (op->unit == op->units)
    finish_locked(queue, stream);
}

static bool step_locked(struct kvs_host_queue *queue, bool jump) {
  uint64_t wake = KVS_HOST_NEVER;
  bool more;
  if (atomic_load(queue->lost)) kvs_host_drop_locked(queue);
  queue->clock += STEP_NS;
  struct kvs_host_stream *stream = pick_locked(queue, queue->clock, &wake, &more);
  if (!stream) {
    if (wake == KVS_HOST_NEVER || !jump) return false;
    queue->clock = wake;
    return true;
  }
  step_stream_locked(queue, stream);
  return true;
}

bool kvs_host_step_stream_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream) {
  uint64_t ignored = KVS_HOST_NEVER;
  if (!stream->head || !ready_locked(queue, stream->head, queue->clock, &ignored)) return false;
  step_stream_locked(queue, stream);
  return true;
}

int64_t kvs_host_steps_locked(struct kvs_host_queue *queue, int64_t steps, bool jump) {
  int64_t ran = 0;
  while (ran < steps && step_locked(queue, jump)) ran++;
  return ran;
}
