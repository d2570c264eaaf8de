/* Memory on its way out. A pool transfer is checked and enters its lane under the hazard_lock of its devices, so who
 * holds them all sees each transfer either in a lane or not begun, and closes the pools in between. The range stays
 * listed until its memory has gone, as the driver still knows it until then. */
#include "memory/vacate.h"

#include <inttypes.h>

#include "base/fork.h"
#include "base/wait.h"
#include "lanes/lane.h"
#include "lanes/late.h"
#include "lanes/state.h"
#include "plan/layout.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended;
static struct kvs_vacating *first; /* guarded by lock */

static void in_child(void) { first = NULL; }

static void watch_fork(void) {
  static struct kvs_fork_guard guard = {.lock = &lock, .cond = &ended, .in_child = in_child};
  kvs_fork_watch(&guard);
}

static void list(struct kvs_vacating *vacating) {
  watch_fork();
  pthread_mutex_lock(&lock);
  vacating->next = first;
  first = vacating;
  pthread_mutex_unlock(&lock);
}

void kvs_vacate_end(struct kvs_vacating *vacating) {
  pthread_mutex_lock(&lock);
  struct kvs_vacating **at = &first;
  while (*at && *at != vacating) at = &(*at)->next; /* the child of a fork has none of its parent's */
  if (*at) *at = vacating->next;
  pthread_cond_broadcast(&ended);
  pthread_mutex_unlock(&lock);
}

static bool meets_locked(uint64_t base, uint64_t end) {
  const struct kvs_vacating *at = first;
  while (at && (end <= at->base || at->end <= base)) at = at->next;
  return at != NULL;
}

int kvs_vacate_lock(struct kvs_engine *engine, uint64_t base, uint64_t end, int64_t timeout_ns, struct kvs_error *err) {
  uint64_t deadline = kvs_deadline(timeout_ns);
  watch_fork();
  for (;;) {
    pthread_mutex_lock(&engine->hazard_lock);
    pthread_mutex_lock(&lock);
    bool going = meets_locked(base, end);
    if (going) pthread_mutex_unlock(&engine->hazard_lock);
    bool late = going && !kvs_cond_wait(&ended, &lock, deadline);
    pthread_mutex_unlock(&lock);
    if (!going) return KVS_OK;
    if (late)
      return kvs_fail(err, KVS_TIMEOUT,
                      "memory of [0x%" PRIx64 ", 0x%" PRIx64 ") is being given back by another thread", base, end);
  }
}

/* -- all devices ------------------------------------------------------------------------------------------------- */

struct devices {
  struct kvs_engine *items[KVS_MAX_ENGINES + 1];
  size_t count;
};

static void add(struct devices *devices, struct kvs_engine *engine) {
  size_t at = devices->count++;
  for (; at && devices->items[at - 1] > engine; at--) devices->items[at] = devices->items[at - 1];
  devices->items[at] = engine;
}

/* All devices in the order of their addresses, in which kvs_peer_lock() takes their locks too. */
static void find(struct devices *devices, struct kvs_engine *own) {
  struct kvs_engine *engine;
  devices->count = 0;
  for (unsigned i = 0; (engine = kvs_engine_at(i)) != NULL; i++)
    if (engine != own && !kvs_dev_forked(engine->device)) add(devices, engine);
  add(devices, own);
}

static void close_pools_locked(struct kvs_engine *engine, const struct kvs_region *region) {
  for (struct kvs_pool *pool = engine->pools; pool; pool = pool->next)
    if (pool->layout.ptr < region->base + region->nbytes &&
        region->base < pool->layout.ptr + kvs_layout_extent(&pool->layout))
      atomic_store(&pool->closed, true);
}

static void close_pools(const struct devices *devices, const struct kvs_region *region) {
  for (size_t i = 0; i < devices->count; i++) {
    pthread_mutex_lock(&devices->items[i]->memory_lock);
    close_pools_locked(devices->items[i], region);
    pthread_mutex_unlock(&devices->items[i]->memory_lock);
  }
}

struct begin {
  struct kvs_engine *engine;
  struct kvs_region region;
  struct kvs_vacating *vacating;
};

/* Every transfer of these devices is in a lane, or not begun: their hazard_locks are held. */
static int begin_locked(const struct begin *begin, const struct devices *devices) {
  struct devices now;
  struct kvs_error ignored;
  for (size_t i = 0; i < devices->count; i++) {
    kvs_late_settle_locked(devices->items[i]);
    /* The transfers of a lost device have ended. */
    if (kvs_engine_drain(devices->items[i], &begin->region, 0, &ignored) == KVS_TIMEOUT) return KVS_NOT_READY;
  }
  list(begin->vacating);
  find(&now, begin->engine);
  if (now.count != devices->count) { /* one was opened before the range was listed, and may have a pool there */
    kvs_vacate_end(begin->vacating);
    return KVS_NOT_READY;
  }
  close_pools(devices, &begin->region);
  return KVS_OK;
}

static int poll_begun(void *arg, struct kvs_error *err) {
  const struct begin *begin = arg;
  struct devices devices;
  (void)err;
  find(&devices, begin->engine);
  for (size_t i = 0; i < devices.count; i++) pthread_mutex_lock(&devices.items[i]->hazard_lock);
  int status = begin_locked(begin, &devices);
  for (size_t i = devices.count; i-- > 0;) pthread_mutex_unlock(&devices.items[i]->hazard_lock);
  return status;
}

int kvs_vacate_begin(struct kvs_engine *engine, uint64_t base, uint64_t nbytes, int64_t timeout_ns,
                     struct kvs_vacating *vacating, struct kvs_error *err) {
  struct begin begin = {engine, {.base = base, .nbytes = nbytes}, vacating};
  *vacating = (struct kvs_vacating){.base = base, .end = base + nbytes};
  int status = kvs_wait_until(poll_begun, &begin, engine->device->stepped, timeout_ns, err);
  if (status != KVS_TIMEOUT) return status;
  return kvs_fail(err, status, "transfers that use this memory were still unfinished after %.1f s",
                  (double)timeout_ns / 1e9);
}
