/* Memory that an engine allocates, registers and frees. */
#include "memory/memory.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/thread.h"
#include "lanes/lane.h"
#include "lanes/peer.h"
#include "lanes/state.h"
#include "memory/range.h"
#include "memory/reclaim.h"
#include "memory/vacate.h"

/* -- allocating and registering -------------------------------------------------------------------------------- */

static const int64_t DRAIN_NS = 60ll * 1000 * 1000 * 1000, UNDO_NS = 1000 * 1000 * 1000;

int kvs_memory_add(struct kvs_engine *engine, uint64_t ptr, uint64_t nbytes, enum kvs_origin origin,
                   struct kvs_error *err) {
  struct kvs_region region;
  int status = kvs_dev_pointer_query(engine->device, ptr, &region, err);
  if (status) return status;
  region.origin = origin;
  if (nbytes) { /* may be a part of the driver's region */
    region.alias += ptr - region.base;
    region.base = ptr;
    region.nbytes = nbytes;
  }
  pthread_mutex_lock(&engine->memory_lock);
  status = kvs_regions_add(&engine->regions, &region, err);
  pthread_mutex_unlock(&engine->memory_lock);
  return status;
}

static int alloc_kind(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, uint64_t *ptr,
                      struct kvs_error *err) {
  if (kind == KVS_ALLOC_CHUNKS) return kvs_range_alloc(engine, nbytes, ptr, err);
  return kind == KVS_ALLOC_HOST ? kvs_dev_host_alloc(engine->device, nbytes, ptr, err)
                                : kvs_dev_alloc(engine->device, nbytes, ptr, err);
}

static void *as_what(uint64_t ptr) { return (void *)(uintptr_t)ptr; }

static int take_back_device(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  return kvs_dev_free(engine->device, (uint64_t)(uintptr_t)what, err);
}

static int take_back_host(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  return kvs_dev_host_free(engine->device, (uint64_t)(uintptr_t)what, err);
}

static int take_back_chunks(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  return kvs_range_free(engine, (uint64_t)(uintptr_t)what, err);
}

static int take_back_registration(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  return kvs_dev_host_unregister(engine->device, (uint64_t)(uintptr_t)what, err);
}

/* Of memory that was allocated and could not be listed. No caller has it, and the driver's call may wait. */
static void take_back(struct kvs_engine *engine, enum kvs_alloc kind, uint64_t ptr) {
  static kvs_reclaim_function *const functions[] = {
      [KVS_ALLOC_DEVICE] = take_back_device, [KVS_ALLOC_HOST] = take_back_host, [KVS_ALLOC_CHUNKS] = take_back_chunks};
  kvs_reclaim_later(engine, functions[kind], as_what(ptr));
}

int kvs_engine_alloc(struct kvs_engine *engine, size_t nbytes, bool host, uint64_t *ptr, struct kvs_error *err) {
  return kvs_engine_alloc_kind(engine, nbytes, host ? KVS_ALLOC_HOST : KVS_ALLOC_DEVICE, ptr, err);
}

/* If a pending free may make room, waits at most timeout_ns for it. */
static int allocate_within(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, int64_t timeout_ns,
                           uint64_t *ptr, struct kvs_error *err) {
  struct kvs_device *device = engine->device;
  if (nbytes == 0) return kvs_fail(err, KVS_INVALID, "nbytes is 0: an allocation has at least one byte");
  int status = kvs_dev_check(device, err);
  if (status) return status;
  kvs_reclaim_retry(engine);
  status = alloc_kind(engine, nbytes, kind, ptr, err);
  if (status == KVS_NOMEM && kvs_reclaim_pending(engine)) { /* a pending free may make room */
    (void)kvs_reclaim_drain(engine, timeout_ns);
    status = alloc_kind(engine, nbytes, kind, ptr, err);
  }
  if (status) return status;
  status = kvs_memory_add(engine, *ptr, kind == KVS_ALLOC_CHUNKS ? nbytes : 0, KVS_ORIGIN_ALLOCATED, err);
  if (status) take_back(engine, kind, *ptr);
  return status;
}

/* -- allocating in a thread ------------------------------------------------------------------------------------ */

struct kvs_allocating {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct kvs_engine *engine; /* with a reference; this and the next two: constant */
  size_t nbytes;
  enum kvs_alloc kind;
  /* Guarded by lock. */
  unsigned users; /* the caller and the thread */
  bool ended, given;
  int status;
  uint64_t ptr;
  struct kvs_error err;
};

static void drop_allocating(struct kvs_allocating *a) {
  pthread_mutex_lock(&a->lock);
  bool last = --a->users == 0;
  pthread_mutex_unlock(&a->lock);
  if (!last) return;
  if (a->ended && !a->status && !a->given) kvs_engine_free_later(a->engine, a->ptr);
  pthread_cond_destroy(&a->changed);
  pthread_mutex_destroy(&a->lock);
  kvs_engine_unref(a->engine);
  free(a);
}

static void *allocate(void *arg) {
  struct kvs_allocating *a = arg;
  struct kvs_error err = {0};
  uint64_t ptr = 0;
  int status = allocate_within(a->engine, a->nbytes, a->kind, 0, &ptr, &err);
  pthread_mutex_lock(&a->lock);
  a->ended = true;
  a->status = status;
  a->ptr = ptr;
  a->err = err;
  pthread_cond_broadcast(&a->changed);
  pthread_mutex_unlock(&a->lock);
  drop_allocating(a);
  return NULL;
}

static struct kvs_allocating *start_allocating(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind) {
  pthread_t thread;
  struct kvs_allocating *a = calloc(1, sizeof *a);
  if (!a) return NULL;
  pthread_mutex_init(&a->lock, NULL);
  kvs_cond_init(&a->changed);
  kvs_engine_ref(engine);
  a->engine = engine;
  a->nbytes = nbytes;
  a->kind = kind;
  a->users = 2;
  bool here = engine->device->stepped || kvs_dev_forked(engine->device);
  if (here || kvs_thread_start(&thread, "kvswap-alloc", allocate, a))
    (void)allocate(a); /* also where no thread can be started */
  else
    pthread_detach(thread);
  return a;
}

static int wait_allocating(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_allocating *a = arg;
  uint64_t deadline = kvs_deadline(timeout_ns);
  pthread_mutex_lock(&a->lock);
  while (!a->ended && kvs_cond_wait(&a->changed, &a->lock, deadline)) continue;
  int status = a->ended ? a->status : kvs_fail(err, KVS_TIMEOUT, "the driver has not allocated yet");
  if (a->ended && status) *err = a->err;
  a->given = !status;
  pthread_mutex_unlock(&a->lock);
  return status;
}

/* A free under way may make room: wait a little. False: it does not, or there is no time left. */
static bool may_have_room(struct kvs_engine *engine, int64_t timeout_ns, uint64_t start) {
  if (!kvs_reclaim_goes_on(engine)) return false;
  (void)kvs_reclaim_drain(engine, KVS_SLICE_NS);
  return kvs_time_left(timeout_ns, start) > 0 && !kvs_interrupted();
}

int kvs_engine_alloc_within(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, int64_t timeout_ns,
                            uint64_t *ptr, struct kvs_error *err) {
  uint64_t start = kvs_clock_ns();
  struct kvs_allocating *a;
  int status;
  do {
    if (!(a = start_allocating(engine, nbytes, kind))) return kvs_fail(err, KVS_NOMEM, "no memory to allocate memory");
    status = kvs_wait_slices(wait_allocating, a, timeout_ns, err);
    if (!status) *ptr = a->ptr;
    drop_allocating(a);
  } while (status == KVS_NOMEM && may_have_room(engine, timeout_ns, start));
  return status;
}

int kvs_engine_alloc_kind(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, uint64_t *ptr,
                          struct kvs_error *err) {
  return allocate_within(engine, nbytes, kind, DRAIN_NS, ptr, err);
}

static bool known_region(struct kvs_engine *engine, uint64_t ptr, enum kvs_origin origin, struct kvs_region *region) {
  pthread_mutex_lock(&engine->memory_lock);
  const struct kvs_region *known = kvs_regions_find(&engine->regions, ptr);
  bool found = known && known->base == ptr && known->origin == origin;
  if (found) *region = *known;
  pthread_mutex_unlock(&engine->memory_lock);
  return found;
}

static int check_known(struct kvs_engine *engine, uint64_t ptr, enum kvs_origin origin, struct kvs_region *region,
                       struct kvs_error *err) {
  static const char *const done[] = {[KVS_ORIGIN_OTHER] = "made",
                                     [KVS_ORIGIN_ALLOCATED] = "allocated",
                                     [KVS_ORIGIN_REGISTERED] = "registered",
                                     [KVS_ORIGIN_IMPORTED] = "opened"};
  int status = kvs_dev_check(engine->device, err);
  if (status == KVS_FORKED) return status;
  if (!known_region(engine, ptr, origin, region))
    return kvs_fail(err, KVS_INVALID, "0x%" PRIx64 " was not %s by this device, or already given back", ptr,
                    done[origin]);
  if (!status && atomic_load(&engine->closed)) /* running work may never end, and the process is exiting */
    return kvs_fail(err, KVS_CLOSED, "%s was shut down: its memory goes with the process", engine->name);
  return status;
}

int kvs_memory_retire(struct kvs_engine *engine, uint64_t ptr, enum kvs_origin origin, struct kvs_region *region,
                      struct kvs_vacating *vacating, struct kvs_error *err) {
  int status = check_known(engine, ptr, origin, region, err);
  if (!status) status = kvs_engine_drain(engine, region, 0, err);
  if (!status) status = kvs_peer_drain(engine, region, 0, err);
  if (status && status != KVS_LOST) return status;
  struct kvs_error busy;
  if (vacating && kvs_vacate_begin(engine, region->base, region->nbytes, 0, vacating, &busy)) {
    *err = busy;
    return busy.status;
  }
  pthread_mutex_lock(&engine->memory_lock);
  bool mine = kvs_regions_remove(&engine->regions, ptr, region);
  pthread_mutex_unlock(&engine->memory_lock);
  if (!mine) status = kvs_fail(err, KVS_INVALID, "0x%" PRIx64 " was given back by another thread meanwhile", ptr);
  if (vacating && status) kvs_vacate_end(vacating);
  return status;
}

/* -- freeing: functions of reclaim tasks (memory/reclaim.h) and the calls that start them ---------------------------
 */

static int free_now(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  uint64_t ptr = (uint64_t)(uintptr_t)what;
  struct kvs_region region;
  struct kvs_vacating vacating;
  int status = kvs_memory_retire(engine, ptr, KVS_ORIGIN_ALLOCATED, &region, &vacating, err);
  if (status) return status;
  if (region.memory != KVS_MEMORY_DEVICE)
    status = kvs_dev_host_free(engine->device, ptr, err);
  else if (kvs_range_known(engine, ptr)) /* unmapping chunks does not wait for work, but the task already has */
    status = kvs_range_free(engine, ptr, err);
  else
    status = kvs_dev_free(engine->device, ptr, err);
  kvs_vacate_end(&vacating);
  return status;
}

static int unregister_now(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  uint64_t ptr = (uint64_t)(uintptr_t)what;
  struct kvs_region region;
  struct kvs_error ignored;
  int status = kvs_memory_retire(engine, ptr, KVS_ORIGIN_REGISTERED, &region, NULL, err); /* it stays, pageable */
  if (status) return status;
  status = kvs_dev_host_unregister(engine->device, ptr, err);
  if (status == KVS_REFUSED) /* the driver still has the registration, and the caller may retry */
    (void)kvs_memory_add(engine, ptr, 0, KVS_ORIGIN_REGISTERED, &ignored);
  return status;
}

static int late(struct kvs_engine *engine, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_fail(err, KVS_TIMEOUT,
                  "work of %s, or transfers that use this memory, had not ended after %.3g s: nothing was given back",
                  engine->name, (double)timeout_ns / 1e9);
}

int kvs_engine_free_within(struct kvs_engine *engine, uint64_t ptr, int64_t timeout_ns, bool *kept,
                           struct kvs_error *err) {
  struct kvs_reclaim *task;
  struct kvs_region region;
  int status = check_known(engine, ptr, KVS_ORIGIN_ALLOCATED, &region, err);
  *kept = false;
  if (status && status != KVS_LOST) return status;
  status = kvs_reclaim_start(engine, free_now, as_what(ptr), &task, err);
  *kept = status == KVS_NOMEM;
  if (status) return status;
  status = kvs_reclaim_wait(task, timeout_ns, err);
  *kept = kvs_reclaim_leave(task, KVS_LEAVE_WITHDRAW);
  if (status != KVS_TIMEOUT) return status;
  return *kept ? late(engine, timeout_ns, err) : KVS_OK; /* the driver's call is running */
}

int kvs_engine_free(struct kvs_engine *engine, uint64_t ptr, struct kvs_error *err) {
  bool kept;
  return kvs_engine_free_within(engine, ptr, DRAIN_NS, &kept, err);
}

void kvs_engine_free_later(struct kvs_engine *engine, uint64_t ptr) {
  kvs_reclaim_later(engine, free_now, as_what(ptr));
}

int kvs_engine_unregister_within(struct kvs_engine *engine, uint64_t ptr, int64_t timeout_ns, bool *kept,
                                 struct kvs_error *err) {
  struct kvs_reclaim *task;
  struct kvs_region region;
  int status = check_known(engine, ptr, KVS_ORIGIN_REGISTERED, &region, err);
  bool left = status == KVS_INVALID &&
              kvs_reclaim_left(engine, unregister_now, as_what(ptr)); /* an earlier call left its result */
  *kept = false;
  if (status && status != KVS_LOST && !left) return status;
  status = kvs_reclaim_start(engine, unregister_now, as_what(ptr), &task, err);
  *kept = status == KVS_NOMEM;
  if (status) return status;
  status = kvs_reclaim_wait(task, timeout_ns, err);
  *kept = kvs_reclaim_leave(task, KVS_LEAVE_RESULT) || status;
  return status == KVS_TIMEOUT ? late(engine, timeout_ns, err) : status;
}

int kvs_engine_unregister(struct kvs_engine *engine, uint64_t ptr, struct kvs_error *err) {
  bool kept;
  return kvs_engine_unregister_within(engine, ptr, DRAIN_NS, &kept, err);
}

/* Refuse ranges that this device allocated or registered. Ranges that other devices pinned, the driver refuses. */
static int refuse_known(struct kvs_engine *engine, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  int status = KVS_OK;
  pthread_mutex_lock(&engine->memory_lock);
  const struct kvs_region *known = kvs_regions_find(&engine->regions, ptr);
  if (!known) known = kvs_regions_after(&engine->regions, ptr);
  if (known && known->base < ptr + nbytes)
    status =
        kvs_fail(err, KVS_INVALID,
                 "[0x%" PRIx64 ", 0x%" PRIx64 ") overlaps [0x%" PRIx64 ", 0x%" PRIx64 "), which this device has %s",
                 ptr, ptr + nbytes, known->base, known->base + known->nbytes,
                 known->origin == KVS_ORIGIN_REGISTERED ? "registered already" : "allocated");
  pthread_mutex_unlock(&engine->memory_lock);
  return status;
}

/* Wait a little, so that the caller can try again at once; the driver may take longer, behind work of the device. */
static void undo_registration(struct kvs_engine *engine, uint64_t ptr) {
  struct kvs_reclaim *task;
  struct kvs_error ignored;
  if (kvs_reclaim_start(engine, take_back_registration, as_what(ptr), &task, &ignored)) {
    kvs_reclaim_later(engine, take_back_registration, as_what(ptr));
    return;
  }
  (void)kvs_reclaim_wait(task, UNDO_NS, &ignored);
  (void)kvs_reclaim_leave(task, KVS_LEAVE_ALONE);
}

int kvs_engine_register(struct kvs_engine *engine, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  if (nbytes == 0) return kvs_fail(err, KVS_INVALID, "nbytes is 0: a registration has at least one byte");
  if (ptr + nbytes < ptr) return kvs_fail(err, KVS_INVALID, "0x%" PRIx64 " plus %zu bytes wraps around", ptr, nbytes);
  int status = kvs_dev_check(engine->device, err);
  if (!status) status = refuse_known(engine, ptr, nbytes, err);
  kvs_reclaim_forget(engine, unregister_now, as_what(ptr));
  if (!status) status = kvs_dev_host_register(engine->device, ptr, nbytes, err);
  if (status) return status;
  status = kvs_memory_add(engine, ptr, 0, KVS_ORIGIN_REGISTERED, err);
  if (status) undo_registration(engine, ptr);
  return status;
}

void kvs_memory_destroy(struct kvs_engine *engine) {
  kvs_regions_clear(&engine->regions);
  if (engine->free_imports) engine->free_imports(engine);
  kvs_ranges_destroy(engine);
}
