/* Operations of a host device, and the FIFOs that hold them: a stream is active while not empty. */
#include "host/ops.h"

#include <stdlib.h>
#include <string.h>

void kvs_host_mark_unref(struct kvs_host_mark *mark) {
  if (!mark || atomic_fetch_sub(&mark->refs, 1) != 1) return;
  kvs_host_words_unref(mark->words);
  free(mark);
}

struct kvs_host_op *kvs_host_op_new(enum kvs_host_kind kind, uint64_t units, size_t behind, struct kvs_error *err) {
  struct kvs_host_op *op = NULL;
  if (behind < SIZE_MAX - sizeof *op) op = malloc(sizeof *op + behind);
  if (!op) {
    kvs_fail(err, KVS_NOMEM, "no memory to queue work that is described by %zu bytes", behind);
    return NULL;
  }
  memset(op, 0, sizeof *op);
  op->kind = kind;
  op->units = units;
  return op;
}

void kvs_host_op_free_locked(struct kvs_host_op *op) {
  bool record = op->kind == KVS_HOST_RECORD;
  struct kvs_host_mark *mark = record || op->kind == KVS_HOST_WAIT_EVENT ? op->what.mark : NULL;
  if (record && !atomic_exchange(&mark->done, true) && mark->words) /* dropped on a lost device: release the waiters */
    kvs_host_words_end(mark->words, mark->number);
  kvs_host_mark_unref(mark);
  free(op);
}

/* The oldest unfinished operation is at the head of some stream. */
uint64_t kvs_host_oldest_locked(const struct kvs_host_queue *queue) {
  uint64_t oldest = UINT64_MAX;
  for (const struct kvs_host_stream *stream = queue->first; stream; stream = stream->after)
    if (stream->head->seq < oldest) oldest = stream->head->seq;
  return oldest;
}

static void wake_waiters_locked(struct kvs_host_queue *queue) {
  queue->awaited = KVS_HOST_NEVER;
  pthread_cond_broadcast(&queue->done);
}

static void activate_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream) {
  stream->before = queue->last;
  stream->after = NULL;
  *(queue->last ? &queue->last->after : &queue->first) = stream;
  queue->last = stream;
}

static void deactivate_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream) {
  *(stream->before ? &stream->before->after : &queue->first) = stream->after;
  *(stream->after ? &stream->after->before : &queue->last) = stream->before;
  if (stream->destroyed) free(stream);
}

void kvs_host_stream_push_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream, struct kvs_host_op *op) {
  op->seq = queue->next_seq++;
  if (stream->tail) {
    stream->tail->next = op;
  } else {
    stream->head = op;
    activate_locked(queue, stream);
  }
  stream->tail = op;
}

void kvs_host_stream_pop_locked(struct kvs_host_queue *queue, struct kvs_host_stream *stream) {
  struct kvs_host_op *op = stream->head;
  stream->head = op->next;
  kvs_host_op_free_locked(op);
  if (!stream->head) {
    stream->tail = NULL;
    deactivate_locked(queue, stream);
  }
  if (queue->awaited != KVS_HOST_NEVER && kvs_host_oldest_locked(queue) >= queue->awaited) wake_waiters_locked(queue);
}

void kvs_host_drop_locked(struct kvs_host_queue *queue) {
  struct kvs_host_stream *stream = queue->first;
  while (stream) {
    struct kvs_host_stream *after = stream->after;
    struct kvs_host_op *kept = stream->head->running ? stream->head : NULL;
    struct kvs_host_op *op = kept ? kept->next : stream->head;
    while (op) {
      struct kvs_host_op *next = op->next;
      kvs_host_op_free_locked(op);
      op = next;
    }
    if (kept) kept->next = NULL;
    stream->head = stream->tail = kept;
    if (!kept) deactivate_locked(queue, stream);
    stream = after;
  }
  wake_waiters_locked(queue);
}
