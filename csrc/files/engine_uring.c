/* io_uring, where liburing was there to build with and the kernel lets it be used: few threads, each with a ring and
 * many requests under way. Requests that came while a thread was busy go to the kernel in one call. Files that stay are
 * registered as they are met, staging and scratch when the ring is made (where the kernel refuses that, it goes
 * without). An eventfd in the ring tells a thread that waits for completions of new requests. */
#include "base/thread.h"
#include "files/engine.h"

#ifndef KVSWAP_URING

static int open_uring(struct kvs_file_queue *queue, unsigned depth, struct kvs_file_worker **opened,
                      struct kvs_error *err) {
  (void)queue, (void)depth, (void)opened;
  return kvs_fail(err, KVS_UNSUPPORTED, "built without liburing");
}

static void close_uring(struct kvs_file_worker *worker) { (void)worker; }

#else

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

enum { FILES = 1024, TWO_FROM = 16, FIXED_NBYTES_LOG2 = 30 }; /* one registered buffer is at most 1 GiB */

struct ring_seat {
  struct kvs_file_request *request; /* NULL: free */
  uint8_t *scratch;
  struct kvs_file_span now; /* what the kernel was told: it reads it until it is through */
};

struct io_ring {
  struct kvs_file_queue *queue;
  struct io_uring uring;
  pthread_t thread;
  bool started, watching; /* a poll of the queue's eventfd is under way */
  bool has_files, has_buffers;
  bool file_known[FILES];
  unsigned nseats, used;
  struct ring_seat *seats;
};

struct kvs_file_worker {
  uint8_t *scratch;
  size_t scratch_nbytes;
  unsigned nrings;
  struct io_ring rings[2];
};

/* -- telling the kernel -------------------------------------------------------------------------------------------- */

static bool within(const struct iovec *piece, const uint8_t *base, size_t nbytes) {
  const uint8_t *at = piece->iov_base;
  return nbytes && at >= base && piece->iov_len <= nbytes && (size_t)(at - base) <= nbytes - piece->iov_len;
}

/* Number of the registered buffer that holds the span's only piece, or -1. */
static int buffer_of(const struct io_ring *ring, const struct ring_seat *seat) {
  const struct iovec *piece = &seat->now.pieces[0];
  if (!ring->has_buffers || seat->now.npieces != 1) return -1;
  if (within(piece, ring->queue->fixed, ring->queue->fixed_nbytes)) return 1;
  return within(piece, seat->scratch, ring->queue->scratch_nbytes) ? 0 : -1;
}

/* The descriptor's own number in the table of registered files, or -1. */
static int file_of(struct io_ring *ring, int fd) {
  if (!ring->has_files || fd >= FILES) return -1;
  if (!ring->file_known[fd] && io_uring_register_files_update(&ring->uring, (unsigned)fd, &fd, 1) != 1) return -1;
  ring->file_known[fd] = true;
  return fd;
}

static void tell_kernel(struct io_ring *ring, struct ring_seat *seat) {
  struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring); /* there is one for each seat, and one for the poll */
  const struct kvs_file_span *span = &seat->now;
  int buffer = buffer_of(ring, seat), file = file_of(ring, span->fd), fd = file < 0 ? span->fd : file;
  void *base = span->pieces[0].iov_base;
  unsigned length = (unsigned)span->pieces[0].iov_len;
  if (buffer >= 0 && span->write)
    io_uring_prep_write_fixed(sqe, fd, base, length, span->offset, buffer);
  else if (buffer >= 0)
    io_uring_prep_read_fixed(sqe, fd, base, length, span->offset, buffer);
  else if (span->write)
    io_uring_prep_writev(sqe, fd, span->pieces, span->npieces, span->offset);
  else
    io_uring_prep_readv(sqe, fd, span->pieces, span->npieces, span->offset);
  if (span->dsync) sqe->rw_flags = RWF_DSYNC;
  if (file >= 0) sqe->flags |= IOSQE_FIXED_FILE;
  io_uring_sqe_set_data(sqe, seat);
}

static void leave(struct io_ring *ring, struct ring_seat *seat, int code) {
  struct kvs_file_request *request = seat->request;
  request->end(request, code); /* uses the seat's scratch */
  seat->request = NULL;
  ring->used--;
}

/* What is left of the request, or of it what an injected fault lets happen. */
static void go_on(struct io_ring *ring, struct ring_seat *seat) {
  struct kvs_file_span *span = &seat->request->span;
  struct kvs_file_fault fault;
  do fault = kvs_file_fault_next(ring->queue->faults, span->write ? KVS_FILE_WRITE : KVS_FILE_READ);
  while (fault.action == KVS_FILE_FAULT_INTERRUPT);
  if (fault.action == KVS_FILE_FAULT_FAIL) {
    leave(ring, seat, fault.code);
    return;
  }
  seat->now = fault.action == KVS_FILE_FAULT_SHORT ? kvs_file_span_shortened(span) : *span;
  tell_kernel(ring, seat);
}

static void see_completion(struct io_ring *ring, struct ring_seat *seat, int result) {
  int code = -result;
  if (result == -EINTR || result == -EAGAIN)
    code = KVS_FILE_MORE;
  else if (result >= 0)
    code = kvs_file_span_advance(&seat->request->span, (size_t)result, ring->queue->direct);
  if (code == KVS_FILE_MORE)
    go_on(ring, seat);
  else
    leave(ring, seat, code);
}

/* -- the thread ---------------------------------------------------------------------------------------------------- */

/* Take requests while there are seats. False: the queue is closed, and nothing is under way. */
static bool take_requests(struct io_ring *ring) {
  unsigned next = 0;
  while (ring->used < ring->nseats) {
    struct kvs_file_request *request = kvs_file_queue_pop(ring->queue, ring->used == 0);
    if (!request) return ring->used > 0;
    while (ring->seats[next].request) next++;
    struct ring_seat *seat = &ring->seats[next];
    request->scratch = seat->scratch;
    if (request->begin(request) != KVS_FILE_GO) continue;
    seat->request = request;
    ring->used++;
    go_on(ring, seat);
    next = 0; /* it may have ended already */
  }
  return true;
}

/* Before waiting with seats free: a push then ends the wait. */
static void watch_queue(struct io_ring *ring) {
  if (ring->watching || ring->used == ring->nseats) return;
  struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
  io_uring_prep_poll_add(sqe, ring->queue->wake, POLLIN);
  io_uring_sqe_set_data(sqe, ring);
  ring->watching = true;
}

static void *serve(void *arg) {
  struct io_ring *ring = arg;
  struct io_uring_cqe *cqe;
  while (take_requests(ring)) {
    if (ring->used == 0) continue;
    watch_queue(ring);
    bool room = ring->used < ring->nseats, more = room && kvs_file_queue_watch(ring->queue);
    (void)(more ? io_uring_submit(&ring->uring) : io_uring_submit_and_wait(&ring->uring, 1));
    if (room && !more) kvs_file_queue_unwatch(ring->queue);
    while (io_uring_peek_cqe(&ring->uring, &cqe) == 0) {
      void *whose = io_uring_cqe_get_data(cqe);
      int result = cqe->res;
      io_uring_cqe_seen(&ring->uring, cqe);
      if (whose == ring) {
        ring->watching = false;
        kvs_file_queue_heard(ring->queue);
      } else {
        see_completion(ring, whose, result);
      }
    }
  }
  return NULL;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static void register_what_can_be(struct io_ring *ring) {
  const struct kvs_file_queue *queue = ring->queue;
  const struct iovec buffers[2] = {{ring->seats[0].scratch, ring->nseats * queue->scratch_nbytes},
                                   {queue->fixed, queue->fixed_nbytes}};
  const size_t most = (size_t)1 << FIXED_NBYTES_LOG2;
  int none[FILES];
  memset(none, 0xff, sizeof none);
  ring->has_files = queue->files_stay && io_uring_register_files(&ring->uring, none, FILES) == 0;
  if (queue->fixed && buffers[0].iov_len <= most && buffers[1].iov_len <= most)
    ring->has_buffers = io_uring_register_buffers(&ring->uring, buffers, 2) == 0;
}

static int open_ring(struct io_ring *ring, struct kvs_file_queue *queue, unsigned nseats, uint8_t *scratch,
                     struct kvs_error *err) {
  char text[96];
  ring->queue = queue;
  ring->seats = calloc(nseats, sizeof *ring->seats);
  if (!ring->seats) return kvs_fail(err, KVS_NOMEM, "no memory for %u requests", nseats);
  for (unsigned i = 0; i < nseats; i++) ring->seats[i].scratch = scratch + i * queue->scratch_nbytes;
  int code = io_uring_queue_init(nseats + 1, &ring->uring, 0);
  if (code) {
    free(ring->seats);
    return kvs_fail(err, KVS_UNSUPPORTED, "the kernel refuses io_uring: %s", kvs_file_error_text(-code, text));
  }
  ring->nseats = nseats;
  register_what_can_be(ring);
  ring->started = kvs_thread_start(&ring->thread, NULL, serve, ring) == 0;
  if (ring->started) return KVS_OK;
  io_uring_queue_exit(&ring->uring);
  free(ring->seats);
  return kvs_fail(err, KVS_NOMEM, "no thread could be started");
}

static void close_uring(struct kvs_file_worker *worker) {
  for (unsigned i = 0; i < worker->nrings; i++) {
    pthread_join(worker->rings[i].thread, NULL);
    io_uring_queue_exit(&worker->rings[i].uring);
    free(worker->rings[i].seats);
  }
  kvs_file_pages_unmap(worker->scratch, worker->scratch_nbytes);
  free(worker);
}

static int open_uring(struct kvs_file_queue *queue, unsigned depth, struct kvs_file_worker **opened,
                      struct kvs_error *err) {
  unsigned nrings = depth >= TWO_FROM ? 2 : 1, nseats = (depth + nrings - 1) / nrings;
  struct kvs_file_worker *worker = calloc(1, sizeof *worker);
  if (!worker) return kvs_fail(err, KVS_NOMEM, "no memory for an engine");
  worker->scratch_nbytes = nrings * nseats * queue->scratch_nbytes;
  worker->scratch = kvs_file_pages_map(worker->scratch_nbytes);
  int status = worker->scratch ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory for the buffers of an engine");
  for (unsigned i = 0; !status && i < nrings; i++) {
    uint8_t *scratch = worker->scratch + (size_t)i * nseats * queue->scratch_nbytes;
    status = open_ring(&worker->rings[i], queue, nseats, scratch, err);
    worker->nrings += !status;
    if (status && i > 0) status = KVS_OK; /* the other one does all of it */
  }
  if (status) {
    if (worker->scratch) kvs_file_pages_unmap(worker->scratch, worker->scratch_nbytes);
    free(worker);
    return status;
  }
  *opened = worker;
  return KVS_OK;
}

#endif

const struct kvs_file_engine_ops kvs_file_uring = {.name = "io_uring", .open = open_uring, .close = close_uring};
