/* Memory on its way out. A pool transfer is checked and enters its lane under the hazard_lock of its devices, so who
 * holds them all sees each transfer either in a lane or not begun, and closes the pools in between. The range stays
 * listed until its memory has gone, as the driver still knows it until then. */
#include "core/vacate.h"

#include "base/fork.h"
#include "core/core.h"
#include "core/lane.h"

/* A leaf, taken under memory_lock too. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvs_vacating *first; /* guarded by lock */

static void in_child(void) { first = NULL; }

static void watch_fork(void) {
  static struct kvs_fork_guard guard = {.lock = &lock, .in_child = in_child};
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
  pthread_mutex_unlock(&lock);
}

static bool meets(const struct kvs_vacating *vacating, uint64_t base, uint64_t end) {
  return base < vacating->end && vacating->base < end;
}

void kvs_vacate_over(uint64_t base, uint64_t nbytes) {
  watch_fork();
  pthread_mutex_lock(&lock);
  for (struct kvs_vacating *at = first; at; at = at->next)
    if (meets(at, base, base + nbytes)) at->end = at->base;
  pthread_mutex_unlock(&lock);
}

bool kvs_vacate_meets(uint64_t base, uint64_t end) {
  bool found = false;
  watch_fork();
  pthread_mutex_lock(&lock);
  for (const struct kvs_vacating *at = first; at && !found; at = at->next) found = meets(at, base, end);
  pthread_mutex_unlock(&lock);
  return found;
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

static int drained(const struct devices *devices, const struct kvs_region *region, struct kvs_error *err) {
  for (size_t i = 0; i < devices->count; i++)
    if (kvs_engine_drain(devices->items[i], region, 0, err) == KVS_TIMEOUT) return KVS_TIMEOUT;
  return KVS_OK;
}

static void close_pools(const struct devices *devices, const struct kvs_region *region) {
  for (size_t i = 0; i < devices->count; i++) {
    pthread_mutex_lock(&devices->items[i]->memory_lock);
    kvs_pools_close_locked(devices->items[i], region);
    pthread_mutex_unlock(&devices->items[i]->memory_lock);
  }
}

int kvs_vacate_begin(struct kvs_engine *engine, uint64_t base, uint64_t nbytes, struct kvs_vacating *vacating,
                     struct kvs_error *err) {
  struct kvs_region region = {.base = base, .nbytes = nbytes};
  struct devices devices;
  *vacating = (struct kvs_vacating){.base = base, .end = base + nbytes};
  find(&devices, engine);
  /* Between its check and its lane a transfer of pools holds the lock of its device and of theirs. */
  for (size_t i = 0; i < devices.count; i++) pthread_mutex_lock(&devices.items[i]->hazard_lock);
  int status = drained(&devices, &region, err);
  if (!status) {
    list(vacating);
    close_pools(&devices, &region);
  }
  for (size_t i = devices.count; i-- > 0;) pthread_mutex_unlock(&devices.items[i]->hazard_lock);
  return status;
}
