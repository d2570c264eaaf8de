/* File engine with blocking I/O: each thread moves one request at a time with preadv and pwritev. A process that is
 * killed keeps its descriptors, and so the directory's lock, until the last of these calls has ended. */
#include <stdlib.h>

#include "base/thread.h"
#include "files/engine.h"
#include "status.h"

struct kvs_file_worker {
  struct kvs_file_queue *queue;
  uint8_t *scratch;
  size_t scratch_nbytes;
  unsigned nthreads;
  pthread_t threads[];
};

struct thread_args { /* a thread's arguments, stored in its scratch until the thread has copied them */
  struct kvs_file_queue *queue;
  uint8_t *scratch;
};

static void *serve(void *arg) {
  struct thread_args args = *(struct thread_args *)arg;
  struct kvs_file_request *request;
  while ((request = kvs_file_queue_pop(args.queue, true)) != NULL) {
    request->scratch = args.scratch;
    if (request->begin(request) == KVS_FILE_GO)
      request->end(request, kvs_file_move(args.queue->faults, &request->span, args.queue->direct));
  }
  return NULL;
}

static void close_threads(struct kvs_file_worker **opened) {
  struct kvs_file_worker *worker = *opened;
  *opened = NULL;
  for (unsigned i = 0; i < worker->nthreads; i++) pthread_join(worker->threads[i], NULL);
  kvs_file_pages_unmap(worker->scratch, worker->scratch_nbytes);
  free(worker);
}

static int open_threads(struct kvs_file_queue *queue, unsigned depth, struct kvs_file_worker **opened,
                        struct kvs_error *err) {
  struct kvs_file_worker *worker = calloc(1, sizeof *worker + depth * sizeof(pthread_t));
  if (!worker) return kvs_fail(err, KVS_NOMEM, "no memory for %u threads", depth);
  worker->queue = queue;
  worker->scratch_nbytes = depth * queue->scratch_nbytes;
  worker->scratch = kvs_file_pages_map(worker->scratch_nbytes);
  if (!worker->scratch) {
    free(worker);
    return kvs_fail(err, KVS_NOMEM, "no memory for the buffers of %u threads", depth);
  }
  for (; worker->nthreads < depth; worker->nthreads++) {
    uint8_t *scratch = worker->scratch + worker->nthreads * queue->scratch_nbytes;
    *(struct thread_args *)(void *)scratch = (struct thread_args){queue, scratch};
    if (kvs_thread_start(&worker->threads[worker->nthreads], NULL, serve, scratch)) break;
  }
  if (worker->nthreads == 0) {
    close_threads(&worker);
    return kvs_fail(err, KVS_NOMEM, "no thread could be started");
  }
  *opened = worker; /* fewer threads than requested are enough */
  return KVS_OK;
}

const struct kvs_file_engine_ops kvs_file_threads = {.name = "threads", .open = open_threads, .close = close_threads};
