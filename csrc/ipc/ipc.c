/* Device memory of one process mapped in another (kvswap_ipc.h).
 *
 * Drivers count openings of an allocation and return the same address each time. So an engine opens an allocation once
 * for all exports in it: the engine has a list of imports, each with a count of views. A mapped object is a view of an
 * import, or refers to this process's own memory. An open import is registered as a region of the engine, like an
 * allocation. */
#include "kvswap_ipc.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/owner.h"
#include "cuda/info.h"
#include "device/share.h"
#include "ipc/fetch.h"
#include "ipc/serve.h"
#include "lanes/lane.h"
#include "lanes/peer.h"
#include "lanes/registry.h"
#include "lanes/state.h"
#include "memory/memory.h"
#include "memory/range.h"
#include "memory/reclaim.h"
#include "memory/vacate.h"

struct kvs_import {
  struct kvs_import *next; /* guarded by engine->share_lock */
  unsigned views;          /* guarded by engine->share_lock */
  uint64_t base, nbytes;
  enum kvs_export_kind kind;
  unsigned char key[64]; /* driver handle, or token of the chunks */
};

/* The part of a mapped object that a close task owns: the task may outlive the object. */
struct view {
  struct kvs_import *import;
  struct kvs_region region;
};

struct kvs_mapped {
  struct kvs_engine *engine;
  struct view *view; /* NULL: our own memory, or closed */
  uint64_t ptr;
  bool local, closed;
  struct kvs_reclaim *closing; /* the close task in progress */
  struct kvs_export from;
};

/* Opening in progress; `fetch`: its chunks are being fetched. */
struct kvs_opening {
  struct kvs_mapped *mapped;
  struct kvs_fetch *fetch;
};

/* -- exporting ------------------------------------------------------------------------------------------------- */

/* Fill in the fields that exports of memory and events share. */
static void sign(struct kvs_engine *engine, enum kvs_export_kind kind, const struct kvs_handle *handle,
                 struct kvs_export *made) {
  struct kvs_owner self = kvs_owner_self();
  made->kind = kind;
  memcpy(made->uuid, engine->device->info.uuid, sizeof made->uuid);
  memcpy(made->device, engine->name, sizeof made->device);
  made->pid = self.pid;
  made->start = self.start;
  memcpy(made->handle, handle, sizeof made->handle);
}

/* Start a server for the chunks. One descriptor is exported now, to fail early if chunks cannot be shared. */
static int serve_chunks(struct kvs_engine *engine, const struct kvs_chunks *chunks, struct kvs_export *made,
                        struct kvs_server **server, struct kvs_error *err) {
  const struct kvs_handle none = {{0}};
  int fd = -1, status = kvs_dev_chunk_share(engine->device, made->address, &fd, err);
  if (status) return status;
  close(fd);
  status = kvs_server_start(engine, chunks, made, server, err);
  if (status) return status;
  sign(engine, KVS_EXPORT_CHUNKS, &none, made);
  made->allocation_nbytes = chunks->nbytes;
  made->offset = made->address - chunks->base;
  return KVS_OK;
}

static int make_handle(struct kvs_engine *engine, const struct kvs_region *region, struct kvs_export *made,
                       struct kvs_error *err) {
  struct kvs_handle handle;
  if (made->nbytes > region->nbytes - (made->address - region->base))
    return kvs_fail(err, KVS_INVALID,
                    "%" PRIu64 " bytes are named from 0x%" PRIx64 " on, but its allocation ends after %" PRIu64,
                    made->nbytes, made->address, region->nbytes - (made->address - region->base));
  int status = kvs_dev_memory_share(engine->device, region->base, &handle, err);
  if (status) return status;
  sign(engine, KVS_EXPORT_HANDLE, &handle, made);
  made->allocation_nbytes = region->nbytes;
  made->offset = made->address - region->base;
  return KVS_OK;
}

static bool in_chunks(struct kvs_engine *engine, uint64_t address) {
  struct kvs_error ignored;
  uint64_t base, nbytes;
  return kvs_dev_chunk_query(engine->device, address, &base, &nbytes, &ignored) == KVS_OK;
}

int kvs_export_make(struct kvs_engine *engine, struct kvs_export *made, struct kvs_server **server,
                    struct kvs_error *err) {
  struct kvs_device *device = engine->device;
  struct kvs_region region;
  struct kvs_chunks chunks;
  *server = NULL;
  int status = kvs_dev_check(device, err);
  if (!status && made->nbytes == 0) status = kvs_fail(err, KVS_INVALID, "0 bytes cannot be exported");
  if (!status && made->nbytes > UINT64_MAX - made->address)
    status =
        kvs_fail(err, KVS_INVALID, "0x%" PRIx64 " plus %" PRIu64 " bytes wraps around", made->address, made->nbytes);
  if (!status) status = kvs_dev_pointer_query(device, made->address, &region, err);
  if (status) return status;
  if (!kvs_region_is_of(&region, device->ordinal))
    return kvs_fail(err, KVS_INVALID,
                    "0x%" PRIx64 " is %s memory, not memory of %s: only what was allocated on a device can be opened "
                    "by another process",
                    made->address, kvs_memory_name(region.memory), engine->name);
  made->buffer_id = region.buffer_id;
  if (!in_chunks(engine, made->address)) return make_handle(engine, &region, made, err);
  status = kvs_range_chunks(engine, made->address, made->nbytes, &chunks, err);
  return status ? status : serve_chunks(engine, &chunks, made, server, err);
}

int kvs_export_event(struct kvs_engine *engine, uint64_t event, struct kvs_export *made, struct kvs_error *err) {
  struct kvs_handle handle;
  int status = kvs_dev_event_share(engine->device, event, &handle, err);
  if (status) return status;
  memset(made, 0, sizeof *made);
  sign(engine, KVS_EXPORT_EVENT, &handle, made);
  return KVS_OK;
}

/* A bare driver handle, as engines put it in shared memory (FastDeploy's segments contain nothing else). */
int kvs_export_from_handle(struct kvs_engine *engine, const unsigned char handle[64], uint64_t nbytes,
                           struct kvs_export *made, struct kvs_error *err) {
  if (nbytes == 0) return kvs_fail(err, KVS_INVALID, "0 bytes of a handle cannot be opened");
  *made = (struct kvs_export){.kind = KVS_EXPORT_HANDLE, .allocation_nbytes = nbytes, .nbytes = nbytes};
  memcpy(made->uuid, engine->device->info.uuid, sizeof made->uuid);
  memcpy(made->device, engine->name, sizeof made->device);
  memcpy(made->handle, handle, sizeof made->handle);
  return KVS_OK;
}

/* -- finding the device ---------------------------------------------------------------------------------------- */

static int find_gpu(const struct kvs_export *from, char name[32], struct kvs_error *err) {
  struct kvs_device_info info;
  int count = 0, status = kvs_cuda_count(&count, err);
  for (int i = 0; !status && i < count; i++) {
    status = kvs_cuda_info(i, &info, err);
    if (status || memcmp(info.uuid, from->uuid, sizeof info.uuid) != 0) continue;
    snprintf(name, 32, "cuda:%d", i);
    return KVS_OK;
  }
  if (status) return status;
  return kvs_fail(err, KVS_INVALID,
                  "the export is of a GPU (%s in its process) that is none of the %d which this process sees",
                  from->device, count);
}

int kvs_export_device(const struct kvs_export *from, struct kvs_engine **engine, struct kvs_error *err) {
  char name[32];
  int status = KVS_OK;
  memcpy(name, from->device, sizeof name);
  if (strncmp(name, "host:seed-", 10) == 0)
    return kvs_fail(err, KVS_INVALID, "the export is of the deterministic device %s: name the device", name);
  if (strncmp(name, "cuda:", 5) == 0) status = find_gpu(from, name, err);
  return status ? status : kvs_engine_open(name, engine, err);
}

/* -- imports --------------------------------------------------------------------------------------------------- */

static int owner_gone(const struct kvs_export *from, struct kvs_error *err) {
  return kvs_fail(err, KVS_CLOSED,
                  "process %" PRId64
                  ", which exported this memory, has ended (or is not to be seen from here): ask the "
                  "new owner for a new export",
                  from->pid);
}

static void key_of(const struct kvs_export *from, unsigned char key[64]) {
  memset(key, 0, 64);
  if (from->kind == KVS_EXPORT_CHUNKS)
    memcpy(key, from->token, sizeof from->token);
  else
    memcpy(key, from->handle, sizeof from->handle);
}

static struct kvs_import *find_import_locked(struct kvs_engine *engine, const struct kvs_export *from) {
  bool bare = from->pid == 0; /* then allocation_nbytes is only a lower bound */
  unsigned char key[64];
  key_of(from, key);
  for (struct kvs_import *import = engine->imports; import; import = import->next)
    if (import->kind == from->kind && !memcmp(import->key, key, sizeof key) &&
        (import->nbytes == from->allocation_nbytes || (bare && import->nbytes > from->allocation_nbytes)))
      return import;
  return NULL;
}

static struct kvs_import *find_mapping_locked(struct kvs_engine *engine, const struct kvs_import *like) {
  struct kvs_import *import = engine->imports;
  while (import && (import->base != like->base || import->nbytes != like->nbytes)) import = import->next;
  return import;
}

static void imports_destroy(struct kvs_engine *engine) {
  while (engine->imports) { /* the memory is unmapped with the device */
    struct kvs_import *import = engine->imports;
    engine->imports = import->next;
    free(import);
  }
}

/* A reclaim task, which owns the import. */
static int unmap_now(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  struct kvs_import *import = what;
  int status = import->kind == KVS_EXPORT_HANDLE ? kvs_dev_memory_close(engine->device, import->base, err)
                                                 : kvs_range_free(engine, import->base, err);
  free(import);
  return status;
}

/* Add the mapping at import->base to the list. *put: this import, or the listed one of the same memory; in that case
 * this import is unmapped later. */
static int put_import_locked(struct kvs_engine *engine, const struct kvs_export *from, struct kvs_import *import,
                             struct kvs_import **put, struct kvs_error *err) {
  struct kvs_error ignored;
  struct kvs_region region;
  *put = find_mapping_locked(engine, import); /* opened under two handles, so counted twice */
  int status = KVS_OK;
  if (!*put && from->pid == 0 && !kvs_dev_pointer_query(engine->device, import->base, &region, &ignored))
    import->nbytes = region.nbytes - (import->base - region.base); /* all of it: a later export may cover more */
  if (!*put) status = kvs_memory_add(engine, import->base, import->nbytes, KVS_ORIGIN_IMPORTED, err);
  if (*put || status) {
    kvs_reclaim_later(engine, unmap_now, import);
    return status;
  }
  import->next = engine->imports;
  engine->imports = import;
  engine->free_imports = imports_destroy;
  *put = import;
  return KVS_OK;
}

static struct kvs_import *import_new(const struct kvs_export *from, struct kvs_error *err) {
  struct kvs_import *import = calloc(1, sizeof *import);
  if (!import) {
    kvs_fail(err, KVS_NOMEM, "no memory to open an export");
    return NULL;
  }
  import->nbytes = from->allocation_nbytes;
  import->kind = from->kind;
  key_of(from, import->key);
  return import;
}

/* Open a driver handle, which needs no exchange with the exporter. */
static int open_handle_locked(struct kvs_engine *engine, const struct kvs_export *from, struct kvs_import **opened,
                              struct kvs_error *err) {
  struct kvs_handle handle;
  struct kvs_import *import = import_new(from, err);
  if (!import) return KVS_NOMEM;
  memcpy(&handle, from->handle, sizeof handle);
  int status = kvs_dev_memory_open(engine->device, &handle, import->nbytes, &import->base, err);
  if (!status) return put_import_locked(engine, from, import, opened, err);
  free(import);
  return status;
}

static int open_chunks_locked(struct kvs_engine *engine, const struct kvs_export *from, struct kvs_range *range,
                              struct kvs_import **opened, struct kvs_error *err) {
  struct kvs_import *import = import_new(from, err);
  int status = import ? kvs_range_finish(range, &import->base, err) : KVS_NOMEM;
  if (!status) return put_import_locked(engine, from, import, opened, err);
  free(import);
  kvs_range_drop(range);
  return status;
}

/* `range`: fetched chunks (taken over), or NULL. Without a range, chunks are found only if they are open already;
 * otherwise KVS_NOT_READY. The exchange runs without a lock: if two threads fetch the same chunks, one of them drops
 * its copy. */
static int take_import(struct kvs_engine *engine, const struct kvs_export *from, struct kvs_range *range,
                       struct kvs_import **import, struct kvs_error *err) {
  int status = KVS_OK;
  pthread_mutex_lock(&engine->share_lock);
  *import = find_import_locked(engine, from);
  bool found = *import != NULL;
  if (!found && from->kind == KVS_EXPORT_HANDLE)
    status = open_handle_locked(engine, from, import, err);
  else if (!found)
    status = range ? open_chunks_locked(engine, from, range, import, err) : KVS_NOT_READY;
  if (!status) (*import)->views++;
  pthread_mutex_unlock(&engine->share_lock);
  if (found && range) kvs_range_drop(range);
  return status;
}

static void unlink_locked(struct kvs_engine *engine, const struct kvs_import *import) {
  struct kvs_import **at = &engine->imports;
  while (*at && *at != import) at = &(*at)->next;
  if (*at) *at = import->next;
}

/* A reclaim task, which owns the view: drop the view, and unmap the memory with its last view. */
static int drop_view_now(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  struct view *view = what;
  struct kvs_import *import = view->import;
  struct kvs_region region;
  struct kvs_vacating vacating;
  int status = kvs_engine_drain(engine, &view->region, 0, err);
  if (!status) status = kvs_peer_drain(engine, &view->region, 0, err);
  if (status == KVS_TIMEOUT) return status;
  pthread_mutex_lock(&engine->share_lock);
  bool last = import->views == 1;
  status = last ? kvs_memory_retire(engine, import->base, KVS_ORIGIN_IMPORTED, &region, &vacating, err) : KVS_OK;
  bool gone = !status || status == KVS_LOST;
  if (gone) import->views--;
  if (gone && last) unlink_locked(engine, import);
  pthread_mutex_unlock(&engine->share_lock);
  if (status == KVS_TIMEOUT) return status;
  free(view);
  if (!last || !gone) return status;
  if (status) { /* lost: it stays mapped */
    free(import);
    return status;
  }
  status = unmap_now(engine, import, err);
  kvs_vacate_end(&vacating);
  return status;
}

/* -- mapped memory --------------------------------------------------------------------------------------------- */

static int check_wanted(struct kvs_engine *engine, const struct kvs_export *from, const uint64_t *generation,
                        struct kvs_error *err) {
  const struct kvs_owner owner = {from->pid, from->start};
  if (generation && *generation != from->generation)
    return kvs_fail(err, KVS_INVALID,
                    "the export is of generation %" PRIu64 ", and %" PRIu64 " is expected: one of the two is old",
                    from->generation, *generation);
  if (memcmp(from->uuid, engine->device->info.uuid, sizeof from->uuid) != 0)
    return kvs_fail(err, KVS_INVALID, "the export is of another device than %s here (its UUID differs; it is %s there)",
                    engine->name, from->device);
  return kvs_owner_alive(&owner) ? KVS_OK : owner_gone(from, err);
}

int kvs_open_event(struct kvs_engine *engine, const struct kvs_export *from, uint64_t *event, struct kvs_error *err) {
  const struct kvs_owner owner = {from->pid, from->start};
  struct kvs_handle handle;
  int status = kvs_open_for_work(engine, err);
  if (!status && from->kind != KVS_EXPORT_EVENT)
    status = kvs_fail(err, KVS_INVALID, "the export is of memory, not of an event: open() it");
  if (!status) status = check_wanted(engine, from, NULL, err);
  if (status) return status;
  if (kvs_owner_is_self(&owner))
    return kvs_fail(err, KVS_INVALID, "this process exported the event: use the event itself");
  memcpy(&handle, from->handle, sizeof handle);
  status = kvs_dev_event_open(engine->device, &handle, event, err);
  return status == KVS_REFUSED && !kvs_owner_alive(&owner) ? owner_gone(from, err) : status;
}

/* Our own memory: check that the exported allocation still exists. */
static int check_own(struct kvs_engine *engine, const struct kvs_export *from, struct kvs_error *err) {
  struct kvs_region region;
  int status = kvs_dev_pointer_query(engine->device, from->address, &region, err);
  bool chunks = from->kind == KVS_EXPORT_CHUNKS; /* a region may hold more chunks than exported */
  bool same = !status && region.buffer_id == from->buffer_id &&
              (chunks || (region.base == from->address - from->offset && region.nbytes == from->allocation_nbytes));
  if (same || (status && status != KVS_INVALID)) return status;
  return kvs_fail(err, KVS_INVALID, "the memory at 0x%" PRIx64 " has been freed since it was exported", from->address);
}

void kvs_opening_drop(struct kvs_opening *opening) {
  if (opening->fetch) kvs_fetch_drop(opening->fetch);
  if (opening->mapped) {
    struct kvs_engine *engine = opening->mapped->engine;
    free(opening->mapped->view);
    free(opening->mapped);
    kvs_engine_unref(engine);
  }
  free(opening);
}

static int opening_new(struct kvs_engine *engine, const struct kvs_export *from, struct kvs_opening **made,
                       struct kvs_error *err) {
  const struct kvs_owner owner = {from->pid, from->start};
  struct kvs_opening *opening = calloc(1, sizeof *opening);
  struct kvs_mapped *mapped = calloc(1, sizeof *mapped);
  struct view *view = calloc(1, sizeof *view);
  if (!opening || !mapped || !view) {
    free(opening);
    free(mapped);
    free(view);
    return kvs_fail(err, KVS_NOMEM, "no memory to open an export");
  }
  kvs_engine_ref(engine);
  opening->mapped = mapped;
  mapped->engine = engine;
  mapped->from = *from;
  mapped->ptr = from->address;
  mapped->view = view;
  mapped->local = kvs_owner_is_self(&owner);
  *made = opening;
  return KVS_OK;
}

int kvs_opening_start(struct kvs_engine *engine, const struct kvs_export *from, const uint64_t *generation,
                      struct kvs_opening **made, struct kvs_error *err) {
  int status = kvs_open_for_work(engine, err);
  if (!status && from->kind == KVS_EXPORT_EVENT)
    status = kvs_fail(err, KVS_INVALID, "the export is of an event, not of memory: open_event() it");
  if (!status) status = check_wanted(engine, from, generation, err);
  if (status) return status;
  kvs_reclaim_retry(engine);
  return opening_new(engine, from, made, err);
}

static int open_view(struct kvs_opening *opening, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_mapped *mapped = opening->mapped;
  const struct kvs_export *from = &mapped->from;
  struct kvs_engine *engine = mapped->engine;
  struct view *view = mapped->view;
  struct kvs_range *range = NULL;
  int status = opening->fetch ? KVS_NOT_READY : take_import(engine, from, NULL, &view->import, err);
  if (status == KVS_NOT_READY) {
    status = opening->fetch ? KVS_OK : kvs_fetch_start(engine, from, &opening->fetch, err);
    if (!status) status = kvs_fetch_wait(opening->fetch, timeout_ns, &range, err);
    if (!status) status = take_import(engine, from, range, &view->import, err);
  }
  if (status) return status;
  mapped->ptr = view->import->base + from->offset;
  view->region = (struct kvs_region){
      .base = mapped->ptr, .nbytes = from->nbytes, .memory = KVS_MEMORY_DEVICE, .device = engine->device->ordinal};
  return KVS_OK;
}

int kvs_opening_wait(struct kvs_opening *opening, int64_t timeout_ns, struct kvs_mapped **made, struct kvs_error *err) {
  struct kvs_mapped *mapped = opening->mapped;
  const struct kvs_owner owner = {mapped->from.pid, mapped->from.start};
  int status = mapped->local ? check_own(mapped->engine, &mapped->from, err) : open_view(opening, timeout_ns, err);
  if (status == KVS_REFUSED && !kvs_owner_alive(&owner)) return owner_gone(&mapped->from, err);
  if (status) return status;
  if (mapped->local) {
    free(mapped->view);
    mapped->view = NULL;
  }
  opening->mapped = NULL;
  *made = mapped;
  return KVS_OK;
}

int kvs_mapped_open(struct kvs_engine *engine, const struct kvs_export *from, const uint64_t *generation,
                    struct kvs_mapped **made, struct kvs_error *err) {
  struct kvs_opening *opening;
  int status = kvs_opening_start(engine, from, generation, &opening, err);
  if (status) return status;
  status = kvs_opening_wait(opening, -1, made, err);
  kvs_opening_drop(opening);
  return status;
}

uint64_t kvs_mapped_ptr(const struct kvs_mapped *mapped) { return mapped->ptr; }

const struct kvs_export *kvs_mapped_export(const struct kvs_mapped *mapped) { return &mapped->from; }

bool kvs_mapped_local(const struct kvs_mapped *mapped) { return mapped->local; }

bool kvs_mapped_closed(const struct kvs_mapped *mapped) { return mapped->closed; }

bool kvs_mapped_alive(const struct kvs_mapped *mapped) {
  return kvs_owner_alive(&(struct kvs_owner){mapped->from.pid, mapped->from.start});
}

void kvs_mapped_keep(struct kvs_mapped *mapped) {
  if (!mapped->closing) return;
  if (!kvs_reclaim_leave(mapped->closing, KVS_LEAVE_WITHDRAW)) { /* the task runs already */
    mapped->view = NULL;
    mapped->closed = true;
  }
  mapped->closing = NULL;
}

int kvs_mapped_close(struct kvs_mapped *mapped, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_engine *engine = mapped->engine;
  if (mapped->closed) return kvs_fail(err, KVS_CLOSED, "already closed");
  int status = mapped->view ? kvs_dev_check(engine->device, err) : KVS_OK;
  if (status == KVS_FORKED || (mapped->view && atomic_load(&engine->closed))) { /* unmapped when the process exits */
    mapped->closed = true;
    return status ? status : kvs_fail(err, KVS_CLOSED, "%s was shut down", engine->name);
  }
  if (mapped->view) {
    status = mapped->closing ? KVS_OK : kvs_reclaim_start(engine, drop_view_now, mapped->view, &mapped->closing, err);
    if (status) return status;
    status = kvs_reclaim_wait(mapped->closing, timeout_ns, err);
    if (status == KVS_TIMEOUT) return status;
    bool open = kvs_reclaim_leave(mapped->closing, KVS_LEAVE_WITHDRAW); /* the device could not be synchronized */
    mapped->closing = NULL;
    if (open) return status;
  }
  mapped->view = NULL;
  mapped->closed = true;
  return status;
}

void kvs_mapped_free(struct kvs_mapped *mapped) {
  struct kvs_engine *engine = mapped->engine;
  if (!kvs_dev_forked(engine->device)) {
    if (mapped->closing)
      (void)kvs_reclaim_leave(mapped->closing, KVS_LEAVE_ALONE);
    else if (mapped->view)
      kvs_reclaim_later(engine, drop_view_now, mapped->view);
  }
  free(mapped);
  kvs_engine_unref(engine);
}
