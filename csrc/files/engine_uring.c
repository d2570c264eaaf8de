/* File engine on io_uring: a few threads, each with one ring and many requests in flight. Used if kvswap is built with
 * liburing and the kernel permits io_uring. Requests that arrive while a thread is busy are submitted in one system
 * call. Staging and scratch are registered when the ring is made. File descriptors that stay open are registered at
 * their first use. Without registration the engine works too. A thread that waits for completions also polls the
 * queue's eventfd in its ring, so a new request wakes it.
 *
 * Requests outlive a process that is killed: with O_DIRECT the kernel ends the process while the disk still writes. The
 * next process must not read the files before that. So queue->kept is registered in each ring: the kernel closes these
 * descriptors, which ends their locks, when the ring's last request has ended. The child of a fork must not keep the
 * ring alive: it does not inherit the ring's memory, and closes its copy of the descriptor. */
#include "files/engine_uring.h"

#include "base/fork.h"
#include "base/thread.h"
#include "files/engine.h"
#include "status.h"

#ifndef KVSWAP_URING

static int open_uring(struct kvs_file_queue *queue, unsigned depth, struct kvs_file_worker **opened,
                      struct kvs_error *err) {
  (void)queue, (void)depth, (void)opened;
  return kvs_fail(err, KVS_UNSUPPORTED, "built without liburing");
}

static void close_uring(struct kvs_file_worker **opened) { (void)opened; }
static void leave_uring(struct kvs_file_worker *worker) { (void)worker; }

int kvs_file_uring_try(struct kvs_error *err) { return open_uring(NULL, 0, NULL, err); }

#else

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FILES = 1024, TWO_FROM = 16, FIXED_NBYTES_LOG2 = 30 }; /* one registered buffer is at most 1 GiB */

struct ring_entry {
  struct kvs_file_request *request; /* NULL: unused */
  uint8_t *scratch;
  struct kvs_file_span now; /* the part in flight; the kernel reads this struct until completion */
};

struct io_ring {
  struct kvs_file_queue *queue;
  struct io_uring uring;
  pthread_t thread;
  int fd;                 /* of the ring; -1: none. Guarded by rings_lock */
  bool started, watching; /* watching: a poll of the queue's eventfd is in flight */
  bool has_buffers;
  unsigned nfiles; /* descriptors below can be registered */
  bool file_known[FILES];
  unsigned nentries, used;
  struct ring_entry *entries;
};

struct kvs_file_worker {
  uint8_t *scratch;
  size_t scratch_nbytes;
  unsigned nrings;
  struct io_ring rings[2];
};

/* -- submission ---------------------------------------------------------------------------------------------------- */

static bool within(const struct iovec *piece, const uint8_t *base, size_t nbytes) {
  const uint8_t *at = piece->iov_base;
  return nbytes && at >= base && piece->iov_len <= nbytes && (size_t)(at - base) <= nbytes - piece->iov_len;
}

/* Index of the registered buffer that holds the span's only piece, or -1. */
static int buffer_of(const struct io_ring *ring, const struct ring_entry *entry) {
  const struct iovec *piece = &entry->now.pieces[0];
  if (!ring->has_buffers || entry->now.npieces != 1) return -1;
  if (within(piece, ring->queue->fixed, ring->queue->fixed_nbytes)) return 1;
  return within(piece, entry->scratch, ring->queue->scratch_nbytes) ? 0 : -1;
}

/* Index of the descriptor in the registered file table, or -1. */
static int file_of(struct io_ring *ring, int fd) {
  if ((unsigned)fd >= ring->nfiles || atomic_load_explicit(&ring->queue->files_move, memory_order_relaxed)) return -1;
  if (!ring->file_known[fd] && io_uring_register_files_update(&ring->uring, (unsigned)fd, &fd, 1) != 1) return -1;
  ring->file_known[fd] = true;
  return fd;
}

static void submit_entry(struct io_ring *ring, struct ring_entry *entry) {
  struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring); /* never NULL: one for each entry and for the poll */
  const struct kvs_file_span *span = &entry->now;
  int buffer = buffer_of(ring, entry), file = file_of(ring, span->fd), fd = file < 0 ? span->fd : file;
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
  io_uring_sqe_set_data(sqe, entry);
}

static void end_entry(struct io_ring *ring, struct ring_entry *entry, int code) {
  struct kvs_file_request *request = entry->request;
  request->end(request, code); /* end() reads the entry's scratch: free the entry afterwards */
  entry->request = NULL;
  ring->used--;
}

/* Submit the rest of the request, or the part of it that an injected fault permits. */
static void continue_entry(struct io_ring *ring, struct ring_entry *entry) {
  struct kvs_file_span *span = &entry->request->span;
  struct kvs_file_fault fault;
  do fault = kvs_file_fault_next(ring->queue->faults, span->write ? KVS_FILE_WRITE : KVS_FILE_READ);
  while (fault.action == KVS_FILE_FAULT_INTERRUPT);
  if (fault.action == KVS_FILE_FAULT_FAIL) {
    end_entry(ring, entry, fault.code);
    return;
  }
  entry->now = fault.action == KVS_FILE_FAULT_SHORT ? kvs_file_span_shortened(span) : *span;
  submit_entry(ring, entry);
}

static void handle_completion(struct io_ring *ring, struct ring_entry *entry, int result) {
  int code = -result;
  if (result == -EINTR || result == -EAGAIN)
    code = KVS_FILE_MORE;
  else if (result >= 0)
    code = kvs_file_span_advance(&entry->request->span, (size_t)result, ring->queue->direct);
  if (code == KVS_FILE_MORE)
    continue_entry(ring, entry);
  else
    end_entry(ring, entry, code);
}

/* -- the thread ---------------------------------------------------------------------------------------------------- */

/* Pop requests while there are free entries. False: the queue is closed and nothing is in flight. */
static bool take_requests(struct io_ring *ring) {
  unsigned next = 0;
  while (ring->used < ring->nentries) {
    struct kvs_file_request *request = kvs_file_queue_pop(ring->queue, ring->used == 0);
    if (!request) return ring->used > 0;
    while (ring->entries[next].request) next++;
    struct ring_entry *entry = &ring->entries[next];
    request->scratch = entry->scratch;
    if (request->begin(request) != KVS_FILE_GO) continue;
    entry->request = request;
    ring->used++;
    continue_entry(ring, entry);
    next = 0; /* next may have been freed */
  }
  return true;
}

/* Called before the thread sleeps with free entries: a push then ends the wait. */
static void watch_queue(struct io_ring *ring) {
  if (ring->watching || ring->used == ring->nentries) return;
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
    bool room = ring->used < ring->nentries, more = room && kvs_file_queue_watch(ring->queue);
    (void)(more ? io_uring_submit(&ring->uring) : io_uring_submit_and_wait(&ring->uring, 1));
    if (room && !more) kvs_file_queue_unwatch(ring->queue);
    while (io_uring_peek_cqe(&ring->uring, &cqe) == 0) {
      void *whose = io_uring_cqe_get_data(cqe);
      int result = cqe->res;
      io_uring_cqe_seen(&ring->uring, cqe);
      if (whose == ring) {
        ring->watching = false;
        kvs_file_queue_drain_wake(ring->queue);
      } else {
        handle_completion(ring, whose, result);
      }
    }
  }
  return NULL;
}

/* -- rings and fork() ---------------------------------------------------------------------------------------------- */

static pthread_mutex_t rings_lock = PTHREAD_MUTEX_INITIALIZER; /* fork() waits while a ring is made or closed */

static void lock_rings(void) {
  static struct kvs_fork_guard guard = {.lock = &rings_lock, .hold = true};
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&rings_lock);
}

/* 0 or an errno. */
static int make_ring(struct io_ring *ring, unsigned nentries) {
  lock_rings();
  int code = -io_uring_queue_init(nentries, &ring->uring, 0);
  if (!code) {
    ring->fd = ring->uring.ring_fd;
    code = -io_uring_ring_dontfork(&ring->uring);
  }
  pthread_mutex_unlock(&rings_lock);
  return code;
}

static void close_ring(struct io_ring *ring) {
  lock_rings();
  if (ring->fd >= 0) io_uring_queue_exit(&ring->uring);
  ring->fd = -1;
  pthread_mutex_unlock(&rings_lock);
  free(ring->entries);
}

static void leave_uring(struct kvs_file_worker *worker) {
  for (size_t i = 0; i < sizeof worker->rings / sizeof *worker->rings; i++)
    if (worker->rings[i].fd >= 0) close(worker->rings[i].fd);
}

static struct kvs_file_worker *new_worker(struct kvs_file_worker **opened) {
  struct kvs_file_worker *worker = calloc(1, sizeof *worker);
  if (!worker) return NULL;
  for (size_t i = 0; i < sizeof worker->rings / sizeof *worker->rings; i++) worker->rings[i].fd = -1;
  lock_rings();
  *opened = worker; /* a fork() from now on finds the rings */
  pthread_mutex_unlock(&rings_lock);
  return worker;
}

static void free_worker(struct kvs_file_worker **opened) {
  struct kvs_file_worker *worker = *opened;
  lock_rings();
  *opened = NULL;
  pthread_mutex_unlock(&rings_lock);
  if (worker->scratch) kvs_file_pages_unmap(worker->scratch, worker->scratch_nbytes);
  free(worker);
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

/* What is kept is at the end of the table. 0 or an errno. */
static int register_files(struct io_ring *ring) {
  const struct kvs_file_queue *queue = ring->queue;
  const unsigned nfiles = FILES - queue->nkept;
  int table[FILES];
  memset(table, 0xff, sizeof table);
  memcpy(table + nfiles, queue->kept, queue->nkept * sizeof *table);
  if (queue->files_stay && io_uring_register_files(&ring->uring, table, FILES) == 0) {
    ring->nfiles = nfiles;
    return 0;
  }
  return queue->nkept ? -io_uring_register_files(&ring->uring, queue->kept, queue->nkept) : 0;
}

static void register_buffers(struct io_ring *ring) {
  const struct kvs_file_queue *queue = ring->queue;
  const struct iovec buffers[2] = {{ring->entries[0].scratch, ring->nentries * queue->scratch_nbytes},
                                   {queue->fixed, queue->fixed_nbytes}};
  const size_t most = (size_t)1 << FIXED_NBYTES_LOG2;
  if (queue->fixed && buffers[0].iov_len <= most && buffers[1].iov_len <= most)
    ring->has_buffers = io_uring_register_buffers(&ring->uring, buffers, 2) == 0;
}

static int refused(int code, struct kvs_error *err) {
  char text[96];
  return kvs_fail(err, KVS_UNSUPPORTED, "the kernel refuses io_uring: %s", kvs_file_error_text(code, text));
}

int kvs_file_uring_try(struct kvs_error *err) {
  struct io_ring ring = {.fd = -1};
  int code = make_ring(&ring, 1);
  close_ring(&ring);
  return code ? refused(code, err) : KVS_OK;
}

static int open_ring(struct io_ring *ring, struct kvs_file_queue *queue, unsigned nentries, uint8_t *scratch,
                     struct kvs_error *err) {
  ring->queue = queue;
  ring->nentries = nentries;
  ring->entries = calloc(nentries, sizeof *ring->entries);
  if (!ring->entries) return kvs_fail(err, KVS_NOMEM, "no memory for %u requests", nentries);
  for (unsigned i = 0; i < nentries; i++) ring->entries[i].scratch = scratch + i * queue->scratch_nbytes;
  int code = make_ring(ring, nentries + 1);
  if (!code) code = register_files(ring);
  if (code) {
    close_ring(ring);
    return refused(code, err);
  }
  register_buffers(ring);
  ring->started = kvs_thread_start(&ring->thread, NULL, serve, ring) == 0;
  if (ring->started) return KVS_OK;
  close_ring(ring);
  return kvs_fail(err, KVS_NOMEM, "no thread could be started");
}

static void close_uring(struct kvs_file_worker **opened) {
  struct kvs_file_worker *worker = *opened;
  for (unsigned i = 0; i < worker->nrings; i++) {
    pthread_join(worker->rings[i].thread, NULL);
    close_ring(&worker->rings[i]);
  }
  free_worker(opened);
}

static int open_uring(struct kvs_file_queue *queue, unsigned depth, struct kvs_file_worker **opened,
                      struct kvs_error *err) {
  unsigned nrings = depth >= TWO_FROM ? 2 : 1, nentries = (depth + nrings - 1) / nrings;
  struct kvs_file_worker *worker = new_worker(opened);
  if (!worker) return kvs_fail(err, KVS_NOMEM, "no memory for an engine");
  worker->scratch_nbytes = nrings * nentries * queue->scratch_nbytes;
  worker->scratch = kvs_file_pages_map(worker->scratch_nbytes);
  int status = worker->scratch ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory for the buffers of an engine");
  for (unsigned i = 0; !status && i < nrings; i++) {
    uint8_t *scratch = worker->scratch + (size_t)i * nentries * queue->scratch_nbytes;
    status = open_ring(&worker->rings[i], queue, nentries, scratch, err);
    worker->nrings += !status;
    if (status && i > 0) status = KVS_OK; /* one ring is enough */
  }
  if (status) free_worker(opened);
  return status;
}

#endif

const struct kvs_file_engine_ops kvs_file_uring = {
    .name = "io_uring", .open = open_uring, .close = close_uring, .forked = leave_uring};
