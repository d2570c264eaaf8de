/* GPUDirect Storage (GDS) for a store, all of it: libcufile, the decision to use it, its staging memory, file handles
 * and threads. Never run on nvidia-fs here: tests have a stand-in of libcufile, and the real one in its compatibility
 * mode.
 *
 * GDS is used if libcufile reports direct transfers for the store's files, or its compatibility mode was requested, and
 * kernels of the device can compute checksums. Otherwise blocks go through pinned staging; the store's gds_note says
 * why. Threads, since libcufile's calls block, run begin, move and end for one request at a time:
 *
 *   load   libcufile reads header and block into staging. The header page is copied to the thread's scratch. `end`
 *          checks the header and requests the checksum of the block in staging.
 *   store  `begin` requests the checksum and writes the header into scratch. The header is copied in front of the
 *          block, and libcufile writes both.
 *
 * A short transfer continues at the next page boundary. A negative count, a count of 0 and a count that is too large
 * are errors. Segments and requests that libcufile refuses go through host memory. */
#include "files/gds.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/thread.h"
#include "base/wait.h"

enum {
  THREADS = 8,
  PINNED_NBYTES = 2 * KVS_FILE_PAGE, /* a thread's: a header page, and a page that receives checksums */
  ALIGNMENT = 64 << 10,              /* granularity of pinned GPU memory */
  DESCRIPTOR = 1,                    /* libcufile's numbers; COMPAT_ALLOWED is of a bit in `flags` */
  COMPAT_ALLOWED = 1,
  ALREADY_OPEN = 5026,
};

/* -- libcufile ----------------------------------------------------------------------------------------------------- */

/* Its structs as its header has them; tests/c/cufile_check.c compares them. Nothing links it. */
struct cufile_result {
  int code, cuda;
};

struct cufile_file {
  int type, unused; /* DESCRIPTOR */
  int fd, unused2;
  const void *operations;
};

struct cufile_properties {
  unsigned major, minor; /* version of nvidia-fs; 0.0: not loaded or not used */
  size_t poll_nbytes, direct_nbytes;
  unsigned file_systems, flags; /* supported file systems, one bit each */
  unsigned others[36];          /* and room for fields that later libraries write */
};

/* Reads and writes return these codes negated. by_host: a request with this result goes through host memory. */
static const struct {
  int code;
  bool by_host;
  const char *words;
} codes[] = {{5001, false, ": nvidia-fs is not loaded"},
             {5004, false, ": the version of nvidia-fs does not match"},
             {5007, true, ": not on this platform"},
             {5008, true, ": not for this file"},
             {5009, true, ": not for this GPU"},
             {5011, false, ": the CUDA driver refused"},
             {5018, true, ": not for this kind of file"},
             {5019, true, ": not for files that are opened so"},
             {5020, true, ": the file is not open with O_DIRECT"},
             {5027, true, ": the file is not registered"},
             {5034, true, ": switched off for this file"},
             {0, false, ""}};

/* X(member, symbol, type, arguments) */
#define ENTRIES(X)                                                                                                     \
  X(driver_open, "cuFileDriverOpen", struct cufile_result, (void))                                                     \
  X(driver_close, "cuFileDriverClose_v2", struct cufile_result, (void))                                                \
  X(get_properties, "cuFileDriverGetProperties", struct cufile_result, (struct cufile_properties *))                   \
  X(handle_register, "cuFileHandleRegister", struct cufile_result, (void **handle, struct cufile_file *))              \
  X(handle_deregister, "cuFileHandleDeregister", void, (void *handle))                                                 \
  X(buffer_register, "cuFileBufRegister", struct cufile_result, (const void *, size_t nbytes, int flags))              \
  X(buffer_deregister, "cuFileBufDeregister", struct cufile_result, (const void *))                                    \
  X(read, "cuFileRead", ssize_t, (void *handle, void *buffer, size_t nbytes, off_t at, off_t in_buffer))               \
  X(write, "cuFileWrite", ssize_t, (void *handle, const void *buffer, size_t nbytes, off_t at, off_t in_buffer))

/* The first store opens the library's driver, which starts threads and scans the PCI topology and mounts. It stays open
 * until exit. */
static struct {
  pthread_mutex_t lock;
  struct cufile {
#define X(member, symbol, type, arguments) type(*member) arguments;
    ENTRIES(X)
#undef X
  } table;                         /* guarded by lock, as are the fields below; constant while there are users */
  bool open, ours;                 /* ours: opened by kvswap, which closes it */
  unsigned users, fork_generation; /* of the process that opened it */
} process = {.lock = PTHREAD_MUTEX_INITIALIZER};

static size_t row_of(int code) {
  size_t i = 0;
  while (codes[i].code && codes[i].code != code) i++;
  return i;
}

static const char *text_of(int code, char text[96]) {
  snprintf(text, 96, "libcufile's error %d%s", code, codes[row_of(code)].words);
  return text;
}

/* The library that KVSWAP_CUFILE names, or NULL. It is asked what it can do, and the kernel is not: tests name one. */
static const char *named(void) {
  const char *name = getenv("KVSWAP_CUFILE");
  return name && name[0] ? name : NULL;
}

static bool has_module(void) { return access("/proc/driver/nvidia-fs/version", F_OK) == 0; }

/* Never closed, because the library runs threads. NULL: `note` says why. */
static void *load(char note[200]) {
  const char *name = named();
  void *library = dlopen(name ? name : "libcufile.so.0", RTLD_NOW | RTLD_LOCAL);
  if (!library && !name) library = dlopen("libcufile.so", RTLD_NOW | RTLD_LOCAL);
  if (!library) snprintf(note, 200, name ? "KVSWAP_CUFILE: %.180s" : "libcufile.so.0 is not there", dlerror());
  return library;
}

static int open_locked(struct kvs_error *err) {
  static const char *const symbols[] = {
#define X(member, symbol, type, arguments) symbol,
      ENTRIES(X)
#undef X
  };
  char note[200], text[96];
  void *library = load(note), *entries[sizeof symbols / sizeof *symbols];
  if (!library) return kvs_fail(err, KVS_UNSUPPORTED, "%s", note);
  /* libcufile 1.20 loops forever in cuFileDriverOpen without /proc/modules (kernels without modules, sandboxes) */
  if (!named() && access("/proc/modules", R_OK))
    return kvs_fail(err, KVS_UNSUPPORTED, "there is no /proc/modules to read, for which libcufile would look for ever");
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    entries[i] = dlsym(library, symbols[i]);
    if (!entries[i] && i == 1) entries[i] = dlsym(library, "cuFileDriverClose"); /* in older libraries */
    if (!entries[i]) return kvs_fail(err, KVS_UNSUPPORTED, "libcufile has no %s: it is too old", symbols[i]);
  }
  memcpy(&process.table, entries, sizeof process.table);
  struct cufile_result result = process.table.driver_open();
  if (result.code && result.code != ALREADY_OPEN)
    return kvs_fail(err, KVS_UNSUPPORTED, "libcufile does not open its driver: %s (CUDA %d)",
                    text_of(result.code, text), result.cuda);
  process.open = true;
  process.ours = result.code == 0;
  process.fork_generation = kvs_fork_generation();
  return KVS_OK;
}

/* With a current CUDA context. KVS_UNSUPPORTED: the error says why libcufile cannot be used. */
static int take_library(struct kvs_error *err) {
  static struct kvs_fork_guard guard = {.lock = &process.lock};
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&process.lock);
  int status = process.open ? KVS_OK : open_locked(err);
  if (!status && process.fork_generation != kvs_fork_generation())
    status = kvs_fail(err, KVS_UNSUPPORTED, "libcufile was opened before fork(): a child cannot use it");
  process.users += !status;
  pthread_mutex_unlock(&process.lock);
  return status;
}

static void release_library(bool lost) {
  pthread_mutex_lock(&process.lock);
  process.users--;
  if (lost) process.ours = false; /* without the device, closing could hang */
  pthread_mutex_unlock(&process.lock);
}

bool kvs_file_gds_shutdown(void) {
  pthread_mutex_lock(&process.lock);
  bool mine = process.open && process.users == 0 && process.fork_generation == kvs_fork_generation();
  if (mine && process.ours) (void)process.table.driver_close();
  if (mine) process.open = false;
  bool closed = !process.open;
  pthread_mutex_unlock(&process.lock);
  return closed;
}

/* -- decision ------------------------------------------------------------------------------------------------------ */

/* Whether the library says that it serves the file's file system: ext4, XFS, NFS, Lustre, GPFS, BeeGFS, virtiofs. For
 * one on a block device this depends on the device: any bit of a block device will do. */
static bool serves(unsigned bits, int fd, char note[160]) {
  static const struct {
    unsigned magic, bits;
  } known[] = {{0xef53, 0x9f0}, {0x58465342, 0x9f0},  {0x6969, 1 << 2},     {0x0bd00bd0, 1},
               {0x47504653, 8}, {0x19830326, 1 << 9}, {0x65735546, 1 << 13}};
  struct statfs info = {0};
  (void)fstatfs(fd, &info);
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].magic == (unsigned)info.f_type && bits & known[i].bits) return true;
  snprintf(note, 160, "the driver does not say that it serves this file system (%#x)", (unsigned)info.f_type);
  return false;
}

/* Whether the library reports direct transfers between disk and GPU for this kind of file. `note`: the driver's
 * version, or why not. If allow_compat_mode is false in its configuration, each file that it accepts is direct. */
static bool is_direct(int fd, char note[160]) {
  struct cufile_properties p = {0};
  char text[96];
  int code = process.table.get_properties(&p).code;
  bool direct = !code && (p.major || p.minor);
  if (direct && p.flags >> COMPAT_ALLOWED & 1 && !serves(p.file_systems, fd, note)) return false;
  if (code)
    snprintf(note, 160, "the driver does not tell its properties: %s", text_of(code, text));
  else if (direct)
    snprintf(note, 160, "nvidia-fs %u.%u", p.major, p.minor);
  else
    snprintf(note, 160, "nvidia-fs is not loaded: libcufile has only its compatibility mode");
  return direct;
}

bool kvs_file_gds(bool compat, char note[200]) {
  const char *name = named(), *text = "libcufile's compatibility mode";
  const bool module = has_module();
  if (!load(note)) return false;
  if (name)
    text = "KVSWAP_CUFILE names the library; what it can do, a store will see";
  else if (module)
    text = "nvidia-fs is loaded; whether it serves a file system, a store there will see";
  else if (!compat)
    text = "libcufile.so.0 is there, but nvidia-fs is not loaded: only its compatibility mode, by way of host memory, "
           "where gds='compat' asks for it";
  snprintf(note, 200, "%s", text);
  return name || module || compat;
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
  if (!named() && strcmp(device->ops->kind, "cuda") != 0) return refuse(store, "the device is not a GPU");
  if (!device->info.kernels) return refuse(store, "checksums are made by a kernel, and none could be loaded");
  if (s->gds == KVS_FILE_GDS_COMPAT) return true;
  if (!store->direct) return refuse(store, "the files are not open with O_DIRECT");
  return named() || has_module() || refuse(store, "nvidia-fs is not loaded");
}

/* -- state, file handles, copies ----------------------------------------------------------------------------------- */

struct gds_worker {
  struct kvs_gds *gds;
  pthread_t thread;
  kvs_stream streams[2]; /* [1]: loads, [0]: stores */
  kvs_stream stream;     /* of the current request */
  uint8_t *page;         /* pinned memory, PINNED_NBYTES bytes */
  uint64_t word;         /* device memory for one checksum */
  uint64_t bounce;       /* pinned slot for requests that libcufile refuses; 0: not allocated yet */
};

struct gds_handle {
  void *handle; /* libcufile's handle; NULL: not registered, or refused */
  int fd;
  struct stat which; /* identity of the registered file: after a refresh, another file may have this segment's index */
};

struct kvs_gds {
  struct kvs_file_store *store;
  struct kvs_engine *engine;
  struct kvs_device *device;
  bool registered;                /* the staging */
  uint64_t memory, pinned, words; /* allocations: of the staging; for all threads */
  uint8_t *staging;
  size_t staging_nbytes;
  struct kvs_crc_params crc; /* parameters of a block's checksum, except the address */
  struct kvs_file_queue queue;
  unsigned nworkers, nthreads;
  struct gds_worker workers[THREADS];
  pthread_mutex_t lock;
  struct gds_handle files[]; /* guarded by lock; one a segment */
};

static int register_file(struct kvs_gds *gds, int fd, struct gds_handle *file, struct kvs_error *err) {
  char path[32], text[96];
  int flags = (gds->store->settings.readonly ? O_RDONLY : O_RDWR) | (gds->store->direct ? O_DIRECT : 0) | O_CLOEXEC;
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  *file = (struct gds_handle){.fd = open(path, flags)};
  (void)fstat(fd, &file->which);
  if (file->fd < 0) return kvs_fail(err, KVS_UNSUPPORTED, "the file cannot be opened for libcufile");
  struct cufile_file described = {.type = DESCRIPTOR, .fd = file->fd};
  int code = process.table.handle_register(&file->handle, &described).code;
  if (!code && file->handle) return KVS_OK;
  close(file->fd);
  file->handle = NULL;
  return kvs_fail(err, KVS_UNSUPPORTED, "libcufile does not take files of this file system: %s", text_of(code, text));
}

static void deregister_file(struct gds_handle *file) {
  if (file->handle) {
    process.table.handle_deregister(file->handle);
    close(file->fd);
  }
  memset(file, 0, sizeof *file);
}

/* Handle of the segment that contains `slot` and is open as `fd`. NULL: libcufile refuses that segment. */
static void *handle_of(struct kvs_gds *gds, uint32_t slot, int fd) {
  struct gds_handle *file = &gds->files[slot / gds->store->geometry.slots];
  struct kvs_error ignored;
  struct stat now;
  pthread_mutex_lock(&gds->lock);
  if (fstat(fd, &now) || now.st_ino != file->which.st_ino || now.st_dev != file->which.st_dev) {
    deregister_file(file);
    (void)register_file(gds, fd, file, &ignored);
  }
  void *handle = file->handle;
  pthread_mutex_unlock(&gds->lock);
  return handle;
}

static uint64_t address_of(const void *memory) { return (uint64_t)(uintptr_t)memory; }
static uint8_t *aligned(uint64_t at, uint64_t to) { return (uint8_t *)(uintptr_t)((at + to - 1) / to * to); }

static int poll_stream(void *arg, struct kvs_error *err) {
  const struct gds_worker *worker = arg;
  int status = kvs_dev_stream_query(worker->gds->device, worker->stream, err);
  return status == KVS_REFUSED ? KVS_NOT_READY : status; /* the copies continue */
}

/* Wait until what was queued has ended, even after an error. */
static int settle(struct gds_worker *worker, int status, struct kvs_error *err) {
  struct kvs_error ignored;
  int waited = kvs_wait_until(poll_stream, worker, worker->gds->device->stepped, -1, status ? &ignored : err);
  return status ? status : waited;
}

/* Returns 0 or a KVS_FILE_* code. */
static int copy(struct gds_worker *worker, const void *to, const void *from, size_t nbytes) {
  struct kvs_error err;
  int status = kvs_dev_copy(worker->gds->device, address_of(to), address_of(from), nbytes, worker->stream, &err);
  return settle(worker, status, &err) ? KVS_FILE_DEVICE : 0;
}

int kvs_file_gds_checksum(struct kvs_file_item *item, uint32_t *crc, int *code) {
  struct kvs_gds *gds = item->transfer->store->gds;
  struct gds_worker *worker = &gds->workers[(size_t)(item->request.scratch - gds->workers[0].page) / PINNED_NBYTES];
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
  int status = kvs_dev_fill(gds->device, worker->word, 0, 1, worker->stream, &err);
  if (!status) status = kvs_dev_launch(gds->device, &launch, worker->stream, &err);
  if (!status) status = kvs_dev_copy(gds->device, address_of(arrives), worker->word, sizeof *crc, worker->stream, &err);
  status = settle(worker, status, &err);
  memcpy(crc, arrives, sizeof *crc);
  *code = err.code;
  return status;
}

/* -- one request --------------------------------------------------------------------------------------------------- */

/* One libcufile call, with injected faults. Returns the bytes moved, or a negative code. */
static ssize_t call(struct kvs_gds *gds, void *handle, bool write, size_t at, size_t nbytes, uint64_t offset) {
  struct kvs_file_fault fault = kvs_file_fault_next(gds->queue.faults, write ? KVS_FILE_WRITE : KVS_FILE_READ);
  if (fault.action == KVS_FILE_FAULT_FAIL) return -fault.code;
  if (fault.action == KVS_FILE_FAULT_INTERRUPT) return -EINTR;
  if (fault.action == KVS_FILE_FAULT_SHORT && nbytes > KVS_FILE_PAGE)
    nbytes = nbytes / 2 / KVS_FILE_PAGE * KVS_FILE_PAGE;
  errno = 0;
  ssize_t n = write ? process.table.write(handle, gds->staging, nbytes, (off_t)offset, (off_t)at)
                    : process.table.read(handle, gds->staging, nbytes, (off_t)offset, (off_t)at);
  if (n == -1) return errno ? -errno : -EIO; /* -1 means errno; libcufile's own codes are below -5000 */
  return n <= (ssize_t)nbytes ? n : -EOVERFLOW;
}

/* Move the whole span. Returns 0 or a code. */
static int move_directly(struct kvs_gds *gds, void *handle, const struct kvs_file_span *span) {
  const size_t nbytes = span->pieces[0].iov_len, begin = (size_t)((uint8_t *)span->pieces[0].iov_base - gds->staging);
  for (size_t done = 0; done < nbytes;) {
    ssize_t n = call(gds, handle, span->write, begin + done, nbytes - done, span->offset + done);
    if (n == -EINTR) continue;
    if (n < 0) return n > -KVS_FILE_CUFILE_END ? (int)-n : EIO;
    size_t on = (size_t)n < nbytes - done ? (size_t)n / KVS_FILE_PAGE * KVS_FILE_PAGE : (size_t)n;
    if (on == 0) return span->write ? EIO : KVS_FILE_ENDED;
    done += on;
  }
  return 0;
}

/* By way of host memory. */
static int move_by_host(struct gds_worker *worker, const struct kvs_file_span *span) {
  const struct iovec staged = span->pieces[0];
  struct kvs_gds *gds = worker->gds;
  struct kvs_file_span there = *span;
  struct kvs_error err;
  if (!worker->bounce && kvs_engine_alloc(gds->engine, staged.iov_len + KVS_FILE_PAGE, true, &worker->bounce, &err))
    return ENOMEM;
  uint8_t *room = there.pieces[0].iov_base = aligned(worker->bounce, KVS_FILE_PAGE);
  int code = span->write ? copy(worker, room, staged.iov_base, staged.iov_len) : 0;
  if (!code) code = kvs_file_move(gds->queue.faults, &there, gds->queue.direct);
  if (!code && !span->write) code = copy(worker, staged.iov_base, room, staged.iov_len);
  return code;
}

static int move(struct gds_worker *worker, const struct kvs_file_item *item) {
  struct kvs_gds *gds = worker->gds;
  const struct kvs_file_span *span = &item->request.span;
  uint8_t *header = span->pieces[0].iov_base;
  int code = span->write ? copy(worker, header, worker->page, KVS_FILE_PAGE) : 0;
  if (code) return code;
  void *handle = handle_of(gds, item->slot, span->fd);
  if (handle) code = move_directly(gds, handle, span);
  if (!handle || codes[row_of(code)].by_host) {
    atomic_fetch_add(&gds->store->gds_by_host, 1);
    code = move_by_host(worker, span);
  } else if (!code) {
    if (span->dsync) code = kvs_file_sync(gds->queue.faults, span->fd);
    atomic_fetch_add(&gds->store->gds_nbytes[span->write], span->pieces[0].iov_len);
  }
  if (!code && !span->write) code = copy(worker, worker->page, header, KVS_FILE_PAGE);
  return code;
}

static void *serve(void *arg) {
  struct gds_worker *worker = arg;
  struct kvs_gds *gds = worker->gds;
  struct kvs_file_request *request;
  struct kvs_error err;
  bool bound = kvs_dev_bind(gds->device, &err) == KVS_OK; /* libcufile needs a current context */
  while ((request = kvs_file_queue_pop(&gds->queue, true)) != NULL) {
    const struct kvs_file_item *item = (struct kvs_file_item *)request;
    worker->stream = worker->streams[item->transfer->kind == KVS_FILE_LOAD];
    request->scratch = worker->page;
    if (request->begin(request) != KVS_FILE_GO) continue;
    const uint64_t offset = address_of(request->span.pieces[0].iov_base) - address_of(gds->staging);
    request->end(request, offset < gds->staging_nbytes
                              ? move(worker, item)
                              : kvs_file_move(gds->queue.faults, &request->span, gds->queue.direct));
  }
  if (bound) kvs_dev_unbind(gds->device);
  return NULL;
}

void kvs_file_gds_push(struct kvs_file_item *item) {
  kvs_file_queue_push(&item->transfer->store->gds->queue, &item->request);
}

/* -- opening and closing ------------------------------------------------------------------------------------------- */

/* Read the store's first page, of a file that is open as segments are, through libcufile into staging, and compare. */
static int try_sample(struct kvs_gds *gds, int fd, struct kvs_error *err) {
  _Alignas(KVS_FILE_PAGE) uint8_t page[KVS_FILE_PAGE];
  struct kvs_file_span span = {.fd = fd, .pieces = {{page, sizeof page}}, .npieces = 1};
  struct gds_worker *worker = &gds->workers[0];
  struct gds_handle sample = {0};
  char text[96];
  int status = register_file(gds, fd, &sample, err), code = 0;
  if (status) return status;
  ssize_t n = process.table.read(sample.handle, gds->staging, KVS_FILE_PAGE, 0, 0);
  deregister_file(&sample);
  if (n != KVS_FILE_PAGE)
    return kvs_fail(err, KVS_UNSUPPORTED, "libcufile read %d bytes of store.kvs instead of %d%s%s", n < 0 ? 0 : (int)n,
                    KVS_FILE_PAGE, n < -1 ? ": " : "", n < -1 ? text_of((int)-n, text) : "");
  code = kvs_file_move(gds->queue.faults, &span, gds->queue.direct);
  if (!code) code = copy(worker, worker->page, gds->staging, KVS_FILE_PAGE);
  if (code) return kvs_file_fail(err, code, "reading store.kvs");
  if (memcmp(worker->page, page, sizeof page) == 0) return KVS_OK;
  return kvs_fail(err, KVS_UNSUPPORTED, "libcufile reads other bytes than are in store.kvs");
}

static int make_workers(struct kvs_gds *gds, struct kvs_error *err) {
  struct kvs_device *device = gds->device;
  unsigned asked = gds->store->settings.depth, nworkers = asked && asked < THREADS ? asked : THREADS;
  int status = kvs_engine_alloc(gds->engine, nworkers * PINNED_NBYTES + KVS_FILE_PAGE, true, &gds->pinned, err);
  if (!status) status = kvs_engine_alloc(gds->engine, nworkers * 256, false, &gds->words, err);
  for (unsigned i = 0; !status && i < nworkers; i++, gds->nworkers++) {
    struct gds_worker *worker = &gds->workers[i];
    *worker = (struct gds_worker){.gds = gds, .word = gds->words + i * 256};
    worker->page = aligned(gds->pinned, KVS_FILE_PAGE) + i * PINNED_NBYTES;
    status = kvs_dev_stream_create(device, device->info.priority_high, &worker->streams[1], err);
    if (!status) status = kvs_dev_stream_create(device, device->info.priority_low, &worker->streams[0], err);
    worker->stream = worker->streams[1];
  }
  return status;
}

static void destroy(struct kvs_gds *gds) {
  struct kvs_error ignored;
  kvs_file_queue_close(&gds->queue);
  for (unsigned i = 0; i < gds->nthreads; i++) pthread_join(gds->workers[i].thread, NULL);
  bool bound = kvs_dev_bind(gds->device, &ignored) == KVS_OK; /* false: the device is lost */
  for (uint32_t i = 0; i < gds->store->nsegments; i++) deregister_file(&gds->files[i]);
  if (gds->registered && bound) (void)process.table.buffer_deregister(gds->staging);
  if (bound) kvs_dev_unbind(gds->device);
  release_library(!bound);
  for (unsigned i = 0; i < THREADS; i++) {
    for (int k = 0; k < 2; k++)
      if (gds->workers[i].streams[k]) (void)kvs_dev_stream_destroy(gds->device, gds->workers[i].streams[k], &ignored);
    if (gds->workers[i].bounce) kvs_engine_free_later(gds->engine, gds->workers[i].bounce);
  }
  const uint64_t memory[] = {gds->memory, gds->words, gds->pinned};
  for (int i = 0; i < 3; i++)
    if (memory[i]) kvs_engine_free_later(gds->engine, memory[i]);
  kvs_file_queue_destroy(&gds->queue);
  pthread_mutex_destroy(&gds->lock);
  free(gds);
}

static struct kvs_gds *new_gds(struct kvs_file_store *store) {
  struct kvs_gds *gds = calloc(1, sizeof *gds + store->segments_capacity * sizeof *gds->files);
  struct kvs_error ignored;
  if (!gds || kvs_file_queue_init(&gds->queue, &store->popped, &ignored)) {
    free(gds);
    return NULL;
  }
  pthread_mutex_init(&gds->lock, NULL);
  gds->store = store;
  gds->engine = store->settings.device;
  gds->device = kvs_engine_device(gds->engine);
  gds->queue.faults = &store->faults;
  gds->queue.direct = store->direct;
  kvs_crc_plan(&gds->crc, store->geometry.block_nbytes);
  return gds;
}

/* `fd`: a file opened as segments are. */
static int set_up(struct kvs_gds *gds, int fd, size_t nbytes, struct kvs_error *err) {
  struct gds_worker *worker = &gds->workers[0];
  char note[160];
  const bool real = is_direct(fd, note);
  if (!real && gds->store->settings.gds != KVS_FILE_GDS_COMPAT) return kvs_fail(err, KVS_UNSUPPORTED, "%s", note);
  int status = make_workers(gds, err);
  if (!status) status = kvs_engine_alloc(gds->engine, nbytes + ALIGNMENT, false, &gds->memory, err);
  if (status) return status;
  gds->staging = aligned(gds->memory, ALIGNMENT);
  gds->staging_nbytes = nbytes;
  /* zeros, because the padding after a block goes to disk */
  status = kvs_dev_fill(gds->device, address_of(gds->staging), 0, nbytes / 4, worker->stream, err);
  status = settle(worker, status, err);
  /* unregistered memory works too, through libcufile's own buffers */
  if (!status) gds->registered = process.table.buffer_register(gds->staging, nbytes, 0).code == 0;
  if (!status) status = try_sample(gds, fd, err);
  for (; !status && gds->nthreads < gds->nworkers; gds->nthreads++, worker++)
    if (kvs_thread_start(&worker->thread, NULL, serve, worker)) break; /* fewer threads than requested are enough */
  if (!status && !gds->nthreads) status = kvs_fail(err, KVS_NOMEM, "no thread could be started");
  gds->store->gds_mode = status ? "off" : real ? "on" : "compat";
  snprintf(gds->store->gds_note, 160, "%.110s%s", note, gds->registered ? "" : "; staging could not be registered");
  return status;
}

/* Called with the device's context bound. */
static int make(struct kvs_file_store *store, size_t staging_nbytes, struct kvs_error *err) {
  int fd = -1, flags = (store->settings.readonly ? O_RDONLY : O_RDWR) | (store->direct ? O_DIRECT : 0);
  if (!store->nroots || kvs_file_openat(&store->faults, store->roots[0].folder, "store.kvs", flags, &fd))
    return kvs_fail(err, KVS_UNSUPPORTED, "store.kvs cannot be opened");
  int status = take_library(err);
  struct kvs_gds *gds = status ? NULL : new_gds(store);
  if (gds) {
    status = set_up(gds, fd, staging_nbytes, err);
  } else if (!status) {
    release_library(false);
    status = kvs_fail(err, KVS_NOMEM, "no memory for GPUDirect Storage");
  }
  close(fd);
  if (gds && status)
    destroy(gds);
  else
    store->gds = gds;
  return status;
}

bool kvs_file_gds_open(struct kvs_file_store *store, size_t staging_nbytes, uint64_t *staging) {
  struct kvs_error err = {0};
  if (!is_wanted(store)) return false;
  struct kvs_device *device = kvs_engine_device(store->settings.device);
  if (kvs_dev_bind(device, &err)) return refuse(store, err.message);
  int status = make(store, staging_nbytes, &err);
  kvs_dev_unbind(device);
  if (status) return refuse(store, err.message);
  *staging = address_of(store->gds->staging);
  return true;
}

void kvs_file_gds_close(struct kvs_file_store *store) {
  if (store->gds) destroy(store->gds);
  store->gds = NULL;
}
