/* GPUDirect Storage (GDS) for a store: the decision to use it, the staging memory, and the file handles of segments.
 *
 * GDS is used if all of these hold: it is not switched off; libcufile is present and reports direct transfers for the
 * store's files, or its compatibility mode was requested; the device runs kernels, which compute the checksums; a file
 * of the store can be registered and read. Otherwise blocks go through pinned staging, and the store's gds_note says
 * why. */
#include "files/gds.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint64_t ALIGNMENT = 64 << 10; /* granularity of pinned GPU memory */

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

int kvs_file_gds_register(struct kvs_gds *gds, int fd, struct kvs_file_gds_handle *file, struct kvs_error *err) {
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

void kvs_file_gds_deregister(struct kvs_gds *gds, struct kvs_file_gds_handle *file) {
  if (file->handle) {
    gds->cu->handle_deregister(file->handle);
    close(file->fd);
  }
  memset(file, 0, sizeof *file);
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
  if (!status) status = kvs_file_gds_wait(gds, stream, err);
  if (!status && memcmp(seen, page, sizeof page) != 0)
    status = kvs_fail(err, KVS_UNSUPPORTED, "libcufile reads other bytes than are in store.kvs");
  return status;
}

static int try_sample(struct kvs_gds *gds, int fd, struct kvs_error *err) {
  struct kvs_file_gds_handle sample = {0};
  int status = kvs_file_gds_register(gds, fd, &sample, err);
  if (!status) status = read_sample(gds, sample.handle, fd, err);
  kvs_file_gds_deregister(gds, &sample);
  return status;
}

/* -- setting up ---------------------------------------------------------------------------------------------------- */

static int make_workers(struct kvs_gds *gds, struct kvs_error *err) {
  struct kvs_device *device = gds->device;
  unsigned asked = gds->store->settings.depth;
  unsigned nworkers = asked && asked < KVS_FILE_GDS_THREADS ? asked : KVS_FILE_GDS_THREADS;
  const uint64_t page = KVS_FILE_PAGE;
  int status = kvs_engine_alloc(gds->engine, nworkers * KVS_FILE_GDS_PINNED_NBYTES + page, true, &gds->pinned, err);
  if (!status) status = kvs_engine_alloc(gds->engine, nworkers * 256, false, &gds->words, err);
  for (unsigned i = 0; !status && i < nworkers; i++, gds->nworkers++) {
    struct kvs_file_gds_worker *worker = &gds->workers[i];
    *worker = (struct kvs_file_gds_worker){.gds = gds, .word = gds->words + i * 256};
    worker->page = (uint8_t *)(uintptr_t)((gds->pinned + page - 1) / page * page + i * KVS_FILE_GDS_PINNED_NBYTES);
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
  if (!status) status = kvs_file_gds_wait(gds, stream, err);
  /* unregistered memory works too, through libcufile's own buffers */
  if (!status) gds->registered = gds->cu->buffer_register(gds->staging, nbytes, 0).code == 0;
  return status;
}

static void destroy(struct kvs_gds *gds) {
  struct kvs_error ignored;
  bool bound = kvs_dev_bind(gds->device, &ignored) == KVS_OK; /* false: the device is lost */
  for (uint32_t i = 0; i < gds->store->nsegments; i++) kvs_file_gds_deregister(gds, &gds->files[i]);
  if (gds->registered && bound) (void)gds->cu->buffer_deregister(gds->staging);
  if (bound) kvs_dev_unbind(gds->device);
  kvs_cufile_release(!bound);
  for (unsigned i = 0; i < KVS_FILE_GDS_THREADS; i++) {
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
  struct kvs_file_gds_handle *files = calloc(store->segments_capacity, sizeof *files);
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
  return status ? status : kvs_file_gds_start(gds, err);
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
  kvs_file_gds_stop(store->gds);
  destroy(store->gds);
  store->gds = NULL;
}
