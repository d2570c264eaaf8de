/* Threads that move staged blocks with libcufile, whose calls block. Like the threads of files/engine_threads.c, each
 * runs begin, move and end for one request at a time. Move and end differ:
 *
 *   load   libcufile reads header and block into staging. The header page is copied to the thread's scratch. `end`
 *          checks the header and requests the checksum of the block in staging.
 *   store  `begin` requests the checksum and writes the header into scratch. The header is copied in front of the
 *          block, and libcufile writes both.
 *
 * A short transfer continues at the next page boundary. A negative count, a count of 0 and a count that is too large
 * are errors. Segments and requests that libcufile refuses go through host memory. */
#include <errno.h>
#include <string.h>

#include "base/thread.h"
#include "base/wait.h"
#include "files/gds.h"

/* -- the device ---------------------------------------------------------------------------------------------------- */

struct watched {
  struct kvs_device *device;
  kvs_stream stream;
};

static int poll_stream(void *arg, struct kvs_error *err) {
  const struct watched *watched = arg;
  int status = kvs_dev_stream_query(watched->device, watched->stream, err);
  return status == KVS_REFUSED ? KVS_NOT_READY : status; /* the copies continue */
}

int kvs_file_gds_wait(struct kvs_gds *gds, kvs_stream stream, struct kvs_error *err) {
  struct watched watched = {gds->device, stream};
  return kvs_wait_until(poll_stream, &watched, gds->device->stepped, -1, err);
}

/* Wait until the queued copies have ended, even after an error. */
static int settle(struct kvs_file_gds_worker *worker, bool load, int status, struct kvs_error *err) {
  struct kvs_error ignored;
  int waited = kvs_file_gds_wait(worker->gds, worker->streams[load], status ? &ignored : err);
  return status ? status : waited;
}

static uint64_t address_of(const void *memory) { return (uint64_t)(uintptr_t)memory; }

/* Returns 0 or a KVS_FILE_* code. */
static int copy(struct kvs_file_gds_worker *worker, bool load, const void *to, const void *from, size_t nbytes) {
  struct kvs_error err;
  int status = kvs_dev_copy(worker->gds->device, address_of(to), address_of(from), nbytes, worker->streams[load], &err);
  return settle(worker, load, status, &err) ? KVS_FILE_DEVICE : 0;
}

static size_t worker_of(const struct kvs_file_item *item) {
  const struct kvs_gds *gds = item->transfer->store->gds;
  return (size_t)(address_of(item->request.scratch) - address_of(gds->workers[0].page)) / KVS_FILE_GDS_PINNED_NBYTES;
}

int kvs_file_gds_checksum(struct kvs_file_item *item, uint32_t *crc, int *code) {
  struct kvs_gds *gds = item->transfer->store->gds;
  struct kvs_file_gds_worker *worker = &gds->workers[worker_of(item)];
  bool load = item->transfer->kind == KVS_FILE_GET;
  uint8_t *arrives = worker->page + KVS_FILE_PAGE;
  struct kvs_crc_params params = gds->crc;
  struct kvs_launch launch = {.kernel = KVS_KERNEL_CRC,
                              .grid = params.bodies + 1,
                              .threads = KVS_CRC_THREADS,
                              .params = &params,
                              .params_nbytes = sizeof params};
  struct kvs_error err = {0};
  params.data = item->address;
  params.result = worker->word;
  kvs_stream stream = worker->streams[load];
  int status = kvs_dev_fill(gds->device, worker->word, 0, 1, stream, &err);
  if (!status) status = kvs_dev_launch(gds->device, &launch, stream, &err);
  if (!status) status = kvs_dev_copy(gds->device, address_of(arrives), worker->word, sizeof *crc, stream, &err);
  status = settle(worker, load, status, &err);
  memcpy(crc, arrives, sizeof *crc);
  *code = err.code;
  return status;
}

/* -- libcufile ----------------------------------------------------------------------------------------------------- */

/* Handle of the segment that contains `slot` and is open as `fd`. NULL: libcufile refuses that segment. */
static void *handle_of(struct kvs_gds *gds, uint32_t slot, int fd) {
  struct kvs_file_gds_handle *file = &gds->files[slot / gds->store->geometry.slots];
  struct kvs_error ignored;
  struct stat now;
  pthread_mutex_lock(&gds->lock);
  bool other = fstat(fd, &now) || now.st_ino != file->which.st_ino || now.st_dev != file->which.st_dev;
  if (other) kvs_file_gds_deregister(gds, file);
  if (!file->handle && !file->refused) (void)kvs_file_gds_register(gds, fd, file, &ignored);
  void *handle = file->handle;
  pthread_mutex_unlock(&gds->lock);
  return handle;
}

static bool is_refusal(int code) {
  switch (code) {
  case KVS_CUFILE_NO_PLATFORM:
  case KVS_CUFILE_NO_IO:
  case KVS_CUFILE_NO_DEVICE:
  case KVS_CUFILE_FILE_TYPE:
  case KVS_CUFILE_OPEN_FLAG:
  case KVS_CUFILE_NO_DIRECT:
  case KVS_CUFILE_NO_HANDLE:
  case KVS_CUFILE_DISABLED:
    return true;
  default:
    return false;
  }
}

/* One libcufile call, with injected faults. Returns the bytes moved, or a negative code. */
static ssize_t call(struct kvs_gds *gds, void *handle, bool write, size_t at, size_t nbytes, uint64_t offset) {
  struct kvs_file_fault fault = kvs_file_fault_next(gds->queue.faults, write ? KVS_FILE_WRITE : KVS_FILE_READ);
  if (fault.action == KVS_FILE_FAULT_FAIL) return -fault.code;
  if (fault.action == KVS_FILE_FAULT_INTERRUPT) return -EINTR;
  if (fault.action == KVS_FILE_FAULT_SHORT && nbytes > KVS_FILE_PAGE)
    nbytes = nbytes / 2 / KVS_FILE_PAGE * KVS_FILE_PAGE;
  errno = 0;
  ssize_t n = write ? gds->cu->write(handle, gds->staging, nbytes, (off_t)offset, (off_t)at)
                    : gds->cu->read(handle, gds->staging, nbytes, (off_t)offset, (off_t)at);
  if (n == -1) return errno ? -errno : -EIO; /* -1 means errno; libcufile's own codes are below -5000 */
  return n <= (ssize_t)nbytes ? n : -EOVERFLOW;
}

/* Move the whole span. Returns 0 or a code. */
static int move_directly(struct kvs_gds *gds, void *handle, const struct kvs_file_span *span) {
  const size_t nbytes = span->pieces[0].iov_len, begin = (size_t)((uint8_t *)span->pieces[0].iov_base - gds->staging);
  for (size_t done = 0; done < nbytes;) {
    ssize_t n = call(gds, handle, span->write, begin + done, nbytes - done, span->offset + done);
    if (n == -EINTR) continue;
    if (n < 0) return n > -KVS_CUFILE_CODES_END ? (int)-n : EIO;
    size_t on = (size_t)n < nbytes - done ? (size_t)n / KVS_FILE_PAGE * KVS_FILE_PAGE : (size_t)n;
    if (on == 0) return span->write ? EIO : KVS_FILE_ENDED;
    done += on;
  }
  return 0;
}

/* -- through host memory ------------------------------------------------------------------------------------------- */

static int move_by_host(struct kvs_file_gds_worker *worker, const struct kvs_file_span *span) {
  struct kvs_gds *gds = worker->gds;
  struct kvs_file_span there = *span;
  const struct iovec *staged = &span->pieces[0];
  struct kvs_error err;
  if (!worker->bounce && kvs_engine_alloc(gds->engine, staged->iov_len + KVS_FILE_PAGE, true, &worker->bounce, &err))
    return ENOMEM;
  uint64_t page = KVS_FILE_PAGE;
  uint8_t *room = (uint8_t *)(uintptr_t)((worker->bounce + page - 1) / page * page);
  there.pieces[0].iov_base = room;
  int code = span->write ? copy(worker, false, room, staged->iov_base, staged->iov_len) : 0;
  if (!code) code = kvs_file_move(gds->queue.faults, &there, gds->queue.direct);
  if (!code && !span->write) code = copy(worker, true, staged->iov_base, room, staged->iov_len);
  return code;
}

/* -- one request --------------------------------------------------------------------------------------------------- */

static int move(struct kvs_file_gds_worker *worker, const struct kvs_file_item *item) {
  struct kvs_gds *gds = worker->gds;
  struct kvs_file_store *store = gds->store;
  const struct kvs_file_span *span = &item->request.span;
  const size_t nbytes = span->pieces[0].iov_len;
  uint8_t *header = span->pieces[0].iov_base;
  int code = span->write ? copy(worker, false, header, worker->page, KVS_FILE_PAGE) : 0;
  if (code) return code;
  void *handle = handle_of(gds, item->slot, span->fd);
  if (handle) code = move_directly(gds, handle, span);
  if (!handle || is_refusal(code)) {
    atomic_fetch_add(&store->gds_by_host, 1);
    code = move_by_host(worker, span);
  } else if (!code) {
    if (span->dsync) code = kvs_file_sync(gds->queue.faults, span->fd);
    atomic_fetch_add(&store->gds_nbytes[span->write], nbytes);
  }
  if (!code && !span->write) code = copy(worker, true, worker->page, header, KVS_FILE_PAGE);
  return code;
}

static bool is_staged(const struct kvs_gds *gds, const struct kvs_file_span *span) {
  return address_of(span->pieces[0].iov_base) - address_of(gds->staging) < gds->staging_nbytes;
}

static void *serve(void *arg) {
  struct kvs_file_gds_worker *worker = arg;
  struct kvs_gds *gds = worker->gds;
  struct kvs_file_request *request;
  struct kvs_error err;
  bool bound = kvs_dev_bind(gds->device, &err) == KVS_OK; /* libcufile needs a current context */
  while ((request = kvs_file_queue_pop(&gds->queue, true)) != NULL) {
    request->scratch = worker->page;
    if (request->begin(request) != KVS_FILE_GO) continue;
    if (is_staged(gds, &request->span))
      request->end(request, move(worker, (struct kvs_file_item *)request));
    else
      request->end(request, kvs_file_move(gds->queue.faults, &request->span, gds->queue.direct));
  }
  if (bound) kvs_dev_unbind(gds->device);
  return NULL;
}

void kvs_file_gds_push(struct kvs_file_item *item) {
  kvs_file_queue_push(&item->transfer->store->gds->queue, &item->request);
}

int kvs_file_gds_start(struct kvs_gds *gds, struct kvs_error *err) {
  for (; gds->nthreads < gds->nworkers; gds->nthreads++) {
    struct kvs_file_gds_worker *worker = &gds->workers[gds->nthreads];
    if (kvs_thread_start(&worker->thread, NULL, serve, worker)) break;
  }
  if (gds->nthreads == 0) return kvs_fail(err, KVS_NOMEM, "no thread could be started");
  return KVS_OK; /* fewer threads than requested are enough */
}

void kvs_file_gds_stop(struct kvs_gds *gds) {
  kvs_file_queue_close(&gds->queue);
  for (unsigned i = 0; i < gds->nthreads; i++) pthread_join(gds->workers[i].thread, NULL);
}
