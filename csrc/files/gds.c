/* GPUDirect Storage (GDS) for a store: the decision to use it, the staging memory, and the file handles of segments.
 * Never run on nvidia-fs here: tests have a stand-in of libcufile, and the real one in its compatibility mode.
 *
 * GDS is used if all of these hold: it is not switched off; libcufile is present and reports direct transfers for the
 * store's files, or its compatibility mode was requested; the device runs kernels, which compute the checksums; a file
 * of the store can be registered and read. Otherwise blocks go through pinned staging, and the store's gds_note says
 * why.
 *
 * Threads move staged blocks with libcufile, whose calls block. Like the threads of files/engine_threads.c, each
 * runs begin, move and end for one request at a time. Move and end differ:
 *
 *   load   libcufile reads header and block into staging. The header page is copied to the thread's scratch. `end`
 *          checks the header and requests the checksum of the block in staging.
 *   store  `begin` requests the checksum and writes the header into scratch. The header is copied in front of the
 *          block, and libcufile writes both.
 *
 * A short transfer continues at the next page boundary. A negative count, a count of 0 and a count that is too large
 * are errors. Segments and requests that libcufile refuses go through host memory. */
#include "files/gds.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/thread.h"
#include "base/wait.h"
#include "files/cufile.h"

static const uint64_t ALIGNMENT = 64 << 10; /* granularity of pinned GPU memory */

enum {
  THREADS = 8,
  PINNED_NBYTES = 2 * KVS_FILE_PAGE, /* a thread's: a header page, and a page that receives checksums */
};

/* State of one thread. */
struct gds_worker {
  struct kvs_gds *gds;
  pthread_t thread;
  kvs_stream streams[2]; /* [1]: loads, [0]: stores */
  uint8_t *page;         /* pinned memory, PINNED_NBYTES bytes */
  uint64_t word;         /* device memory for one checksum */
  uint64_t bounce;       /* pinned slot for requests that libcufile refuses; 0: not allocated yet */
};

struct gds_handle {
  void *handle; /* libcufile's handle; NULL: not registered */
  int fd;
  bool refused;      /* libcufile refuses this file */
  struct stat which; /* identity of the registered file: after a refresh, another file may have this segment's index */
};

struct kvs_gds {
  struct kvs_file_store *store;
  struct kvs_engine *engine;
  struct kvs_device *device;
  const struct kvs_cufile *cu;
  bool real;       /* direct transfers; false: libcufile's compatibility mode */
  char note[160];  /* the driver's version, or why not */
  uint64_t memory; /* the allocation that holds the staging */
  uint8_t *staging;
  size_t staging_nbytes;
  bool registered;
  struct kvs_crc_params crc; /* parameters of a block's checksum, except the address */
  uint64_t pinned, words;    /* for all threads */
  struct kvs_file_queue queue;
  unsigned nworkers, nthreads;
  struct gds_worker workers[THREADS];

  pthread_mutex_t lock;
  struct gds_handle *files; /* guarded by lock; one a segment */
};

/* -- decision ------------------------------------------------------------------------------------------------------ */

bool kvs_file_gds(bool compat, char note[200]) {
  const char *named = kvs_cufile_named();
  if (!kvs_cufile_present(note)) return false;
  bool module = kvs_cufile_kernel_module();
  if (named)
    snprintf(note, 200, "%.120s serves, as KVSWAP_CUFILE says; what it can do, a store will see", named);
  else if (module)
    snprintf(note, 200, "nvidia-fs is loaded; whether it serves a file system, a store there will see");
  else if (compat)
    snprintf(note, 200, "libcufile's compatibility mode");
  else
    snprintf(note, 200,
             "libcufile.so.0 is there, but nvidia-fs is not loaded: only its compatibility mode, by way of "
             "host memory, where gds='compat' asks for it");
  return named || module || compat;
}

static bool refuse(struct kvs_file_store *store, const char *why) {
  snprintf(store->gds_note, sizeof store->gds_note, "%.150s", why);
  return false;
}

/* The checks that need no open driver. */
static bool is_wanted(struct kvs_file_store *store) {
  const struct kvs_file_settings *s = &store->settings;
  if (s->gds == KVS_FILE_GDS_OFF) return refuse(store, "not asked for");
  if (s->ncodings) return refuse(store, "blocks are coded on the way to memory of the host");
  const struct kvs_device *device = kvs_engine_device(s->device);
  if (!kvs_cufile_named() && strcmp(device->ops->kind, "cuda") != 0) return refuse(store, "the device is not a GPU");
  if (!device->info.kernels) return refuse(store, "checksums are made by a kernel, and none could be loaded");
  if (s->gds == KVS_FILE_GDS_COMPAT) return true;
  if (!store->direct) return refuse(store, "the files are not open with O_DIRECT");
  return kvs_cufile_named() || kvs_cufile_kernel_module() || refuse(store, "nvidia-fs is not loaded");
}

/* Open the store's own file with the flags of a segment. */
static int open_sample(struct kvs_file_store *store) {
  int fd, flags = (store->settings.readonly ? O_RDONLY : O_RDWR) | (store->direct ? O_DIRECT : 0);
  if (!store->nroots) return -1;
  return kvs_file_openat(&store->faults, store->roots[0].folder, "store.kvs", flags, &fd) ? -1 : fd;
}

/* -- file handles -------------------------------------------------------------------------------------------------- */

static int register_file(struct kvs_gds *gds, int fd, struct gds_handle *file, struct kvs_error *err) {
  char path[32], text[96];
  memset(file, 0, sizeof *file);
  (void)fstat(fd, &file->which);
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  int flags = (gds->store->settings.readonly ? O_RDONLY : O_RDWR) | (gds->store->direct ? O_DIRECT : 0);
  file->fd = open(path, flags | O_CLOEXEC);
  file->refused = file->fd < 0;
  if (file->refused) return kvs_fail(err, KVS_UNSUPPORTED, "the file cannot be opened for libcufile");
  struct kvs_cufile_file described = {.type = KVS_CUFILE_DESCRIPTOR, .handle = {.fd = file->fd}};
  void *handle = NULL;
  struct kvs_cufile_result result = gds->cu->handle_register(&handle, &described);
  file->refused = result.code != 0 || !handle;
  if (!file->refused) {
    file->handle = handle;
    return KVS_OK;
  }
  close(file->fd);
  return kvs_fail(err, KVS_UNSUPPORTED, "libcufile does not take files of this file system: %s",
                  kvs_cufile_text(result.code, text));
}

static void deregister_file(struct kvs_gds *gds, struct gds_handle *file) {
  if (file->handle) {
    gds->cu->handle_deregister(file->handle);
    close(file->fd);
  }
  memset(file, 0, sizeof *file);
}

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

static int wait_for(struct kvs_gds *gds, kvs_stream stream, struct kvs_error *err) {
  struct watched watched = {gds->device, stream};
  return kvs_wait_until(poll_stream, &watched, gds->device->stepped, -1, err);
}

/* Wait until the queued copies have ended, even after an error. */
static int settle(struct gds_worker *worker, bool load, int status, struct kvs_error *err) {
  struct kvs_error ignored;
  int waited = wait_for(worker->gds, worker->streams[load], status ? &ignored : err);
  return status ? status : waited;
}

static uint64_t address_of(const void *memory) { return (uint64_t)(uintptr_t)memory; }

/* Returns 0 or a KVS_FILE_* code. */
static int copy(struct gds_worker *worker, bool load, const void *to, const void *from, size_t nbytes) {
  struct kvs_error err;
  int status = kvs_dev_copy(worker->gds->device, address_of(to), address_of(from), nbytes, worker->streams[load], &err);
  return settle(worker, load, status, &err) ? KVS_FILE_DEVICE : 0;
}

static size_t worker_of(const struct kvs_file_item *item) {
  const struct kvs_gds *gds = item->transfer->store->gds;
  return (size_t)(address_of(item->request.scratch) - address_of(gds->workers[0].page)) / PINNED_NBYTES;
}

int kvs_file_gds_checksum(struct kvs_file_item *item, uint32_t *crc, int *code) {
  struct kvs_gds *gds = item->transfer->store->gds;
  struct gds_worker *worker = &gds->workers[worker_of(item)];
  bool load = item->transfer->kind == KVS_FILE_LOAD;
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
  struct gds_handle *file = &gds->files[slot / gds->store->geometry.slots];
  struct kvs_error ignored;
  struct stat now;
  pthread_mutex_lock(&gds->lock);
  bool other = fstat(fd, &now) || now.st_ino != file->which.st_ino || now.st_dev != file->which.st_dev;
  if (other) deregister_file(gds, file);
  if (!file->handle && !file->refused) (void)register_file(gds, fd, file, &ignored);
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

static int move_by_host(struct gds_worker *worker, const struct kvs_file_span *span) {
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

static int move(struct gds_worker *worker, const struct kvs_file_item *item) {
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
  struct gds_worker *worker = arg;
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

static int start_threads(struct kvs_gds *gds, struct kvs_error *err) {
  for (; gds->nthreads < gds->nworkers; gds->nthreads++) {
    struct gds_worker *worker = &gds->workers[gds->nthreads];
    if (kvs_thread_start(&worker->thread, NULL, serve, worker)) break;
  }
  if (gds->nthreads == 0) return kvs_fail(err, KVS_NOMEM, "no thread could be started");
  return KVS_OK; /* fewer threads than requested are enough */
}

static void stop_threads(struct kvs_gds *gds) {
  kvs_file_queue_close(&gds->queue);
  for (unsigned i = 0; i < gds->nthreads; i++) pthread_join(gds->workers[i].thread, NULL);
}

/* -- trial read ---------------------------------------------------------------------------------------------------- */

/* Read the store's first page through libcufile into staging, and compare its contents. */
static int read_sample(struct kvs_gds *gds, void *handle, int fd, struct kvs_error *err) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  struct kvs_file_store *store = gds->store;
  struct kvs_file_span span = {.fd = fd, .pieces = {{page, sizeof page}}, .npieces = 1};
  uint8_t *seen = gds->workers[0].page;
  char text[96];
  int code = kvs_file_move(&store->faults, &span, store->direct);
  if (code) return kvs_file_fail(err, code, "reading store.kvs");
  ssize_t n = gds->cu->read(handle, gds->staging, KVS_FILE_PAGE, 0, 0);
  if (n != KVS_FILE_PAGE)
    return kvs_fail(err, KVS_UNSUPPORTED, "libcufile read %d bytes of store.kvs instead of %d%s%s", n < 0 ? 0 : (int)n,
                    KVS_FILE_PAGE, n < -1 ? ": " : "", n < -1 ? kvs_cufile_text((int)-n, text) : "");
  kvs_stream stream = gds->workers[0].streams[1];
  uint64_t from = (uint64_t)(uintptr_t)gds->staging, to = (uint64_t)(uintptr_t)seen;
  int status = kvs_dev_copy(gds->device, to, from, KVS_FILE_PAGE, stream, err);
  if (!status) status = wait_for(gds, stream, err);
  if (!status && memcmp(seen, page, sizeof page) != 0)
    status = kvs_fail(err, KVS_UNSUPPORTED, "libcufile reads other bytes than are in store.kvs");
  return status;
}

static int try_sample(struct kvs_gds *gds, int fd, struct kvs_error *err) {
  struct gds_handle sample = {0};
  int status = register_file(gds, fd, &sample, err);
  if (!status) status = read_sample(gds, sample.handle, fd, err);
  deregister_file(gds, &sample);
  return status;
}

/* -- setting up ---------------------------------------------------------------------------------------------------- */

static int make_workers(struct kvs_gds *gds, struct kvs_error *err) {
  struct kvs_device *device = gds->device;
  unsigned asked = gds->store->settings.depth;
  unsigned nworkers = asked && asked < THREADS ? asked : THREADS;
  const uint64_t page = KVS_FILE_PAGE;
  int status = kvs_engine_alloc(gds->engine, nworkers * PINNED_NBYTES + page, true, &gds->pinned, err);
  if (!status) status = kvs_engine_alloc(gds->engine, nworkers * 256, false, &gds->words, err);
  for (unsigned i = 0; !status && i < nworkers; i++, gds->nworkers++) {
    struct gds_worker *worker = &gds->workers[i];
    *worker = (struct gds_worker){.gds = gds, .word = gds->words + i * 256};
    worker->page = (uint8_t *)(uintptr_t)((gds->pinned + page - 1) / page * page + i * PINNED_NBYTES);
    status = kvs_dev_stream_create(device, device->info.priority_high, &worker->streams[1], err);
    if (!status) status = kvs_dev_stream_create(device, device->info.priority_low, &worker->streams[0], err);
  }
  return status;
}

/* Staging starts as zeros, because the padding after a block goes to disk. */
static int make_staging(struct kvs_gds *gds, size_t nbytes, struct kvs_error *err) {
  kvs_stream stream = gds->workers[0].streams[1];
  int status = kvs_engine_alloc(gds->engine, nbytes + ALIGNMENT, false, &gds->memory, err);
  if (status) return status;
  uint64_t begin = (gds->memory + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  gds->staging = (uint8_t *)(uintptr_t)begin;
  gds->staging_nbytes = nbytes;
  status = kvs_dev_fill(gds->device, begin, 0, nbytes / 4, stream, err);
  if (!status) status = wait_for(gds, stream, err);
  /* unregistered memory works too, through libcufile's own buffers */
  if (!status) gds->registered = gds->cu->buffer_register(gds->staging, nbytes, 0).code == 0;
  return status;
}

static void destroy(struct kvs_gds *gds) {
  struct kvs_error ignored;
  bool bound = kvs_dev_bind(gds->device, &ignored) == KVS_OK; /* false: the device is lost */
  for (uint32_t i = 0; i < gds->store->nsegments; i++) deregister_file(gds, &gds->files[i]);
  if (gds->registered && bound) (void)gds->cu->buffer_deregister(gds->staging);
  if (bound) kvs_dev_unbind(gds->device);
  kvs_cufile_release(!bound);
  for (unsigned i = 0; i < THREADS; i++) {
    for (int k = 0; k < 2; k++)
      if (gds->workers[i].streams[k]) (void)kvs_dev_stream_destroy(gds->device, gds->workers[i].streams[k], &ignored);
    if (gds->workers[i].bounce) kvs_engine_free_later(gds->engine, gds->workers[i].bounce);
  }
  if (gds->memory) kvs_engine_free_later(gds->engine, gds->memory);
  if (gds->words) kvs_engine_free_later(gds->engine, gds->words);
  if (gds->pinned) kvs_engine_free_later(gds->engine, gds->pinned);
  kvs_file_queue_destroy(&gds->queue);
  pthread_mutex_destroy(&gds->lock);
  free(gds->files);
  free(gds);
}

static struct kvs_gds *new_gds(struct kvs_file_store *store, const struct kvs_cufile *cu, struct kvs_error *err) {
  struct kvs_gds *gds = calloc(1, sizeof *gds);
  struct gds_handle *files = calloc(store->segments_capacity, sizeof *files);
  if (!gds || !files || kvs_file_queue_init(&gds->queue, &store->popped, err)) {
    free(gds);
    free(files);
    kvs_fail(err, KVS_NOMEM, "no memory for GPUDirect Storage");
    return NULL;
  }
  pthread_mutex_init(&gds->lock, NULL);
  gds->store = store;
  gds->engine = store->settings.device;
  gds->device = kvs_engine_device(gds->engine);
  gds->cu = cu;
  gds->files = files;
  gds->queue.faults = &store->faults;
  gds->queue.direct = store->direct;
  kvs_crc_plan(&gds->crc, store->geometry.block_nbytes);
  return gds;
}

/* Called with the device's context bound. `fd`: a file opened like a segment. */
static int set_up(struct kvs_gds *gds, int fd, size_t nbytes, struct kvs_error *err) {
  gds->real = kvs_cufile_is_direct(gds->cu, fd, gds->note);
  if (!gds->real && gds->store->settings.gds != KVS_FILE_GDS_COMPAT)
    return kvs_fail(err, KVS_UNSUPPORTED, "%s", gds->note);
  int status = make_workers(gds, err);
  if (!status) status = make_staging(gds, nbytes, err);
  if (!status) status = try_sample(gds, fd, err);
  return status ? status : start_threads(gds, err);
}

bool kvs_file_gds_open(struct kvs_file_store *store, size_t staging_nbytes, uint64_t *staging) {
  const struct kvs_cufile *cu;
  struct kvs_error err = {0};
  if (!is_wanted(store)) return false;
  struct kvs_device *device = kvs_engine_device(store->settings.device);
  if (kvs_dev_bind(device, &err)) return refuse(store, err.message);
  struct kvs_gds *gds = NULL;
  int status = kvs_cufile_get(&cu, &err);
  if (!status && !(gds = new_gds(store, cu, &err))) {
    kvs_cufile_release(false);
    status = KVS_NOMEM;
  }
  int fd = status ? -1 : open_sample(store);
  if (!status && fd < 0) status = kvs_fail(&err, KVS_UNSUPPORTED, "store.kvs cannot be opened");
  if (!status) status = set_up(gds, fd, staging_nbytes, &err);
  if (fd >= 0) close(fd);
  kvs_dev_unbind(device);
  if (status) {
    if (gds) destroy(gds);
    return refuse(store, err.message);
  }
  snprintf(store->gds_note, sizeof store->gds_note, "%.110s%s", gds->note,
           gds->registered ? "" : "; staging could not be registered");
  store->gds = gds;
  store->gds_mode = gds->real ? "on" : "compat";
  *staging = (uint64_t)(uintptr_t)gds->staging;
  return true;
}

void kvs_file_gds_close(struct kvs_file_store *store) {
  if (!store->gds) return;
  stop_threads(store->gds);
  destroy(store->gds);
  store->gds = NULL;
}
