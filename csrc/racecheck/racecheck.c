/* The race checker: one lock, one set of clocks (clock.c has the rules), the access histories of pools, and the races
 * found.
 *
 * Calls from the device wrappers and the core become steps of those rules. A stream is identified before the lock is
 * taken, since that queries the device. When memory runs out in any step, the checker drops all state: a clock that
 * missed a step would report races that are not there. */
#include "racecheck/racecheck.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/watch.h"
#include "racecheck/clock.h"

enum { RACES_KEPT = 1000 };

atomic_bool kvs_racecheck_running;

static _Thread_local bool unseen; /* within kvs_racecheck_internal() */

/* An access that waits for its slots, or for those of one before it. */
struct kept_access {
  struct kept_access *next;
  uint64_t number; /* of the reservation; 0: its slots are known */
  struct kvs_access *access;
  struct kvs_clock *now, *host; /* at the access; references */
  int64_t *ids;
  size_t count;
};

struct pool {
  uint64_t number;
  char name[32];
  struct kept_access *kept, **kept_end; /* the first has a reservation */
  size_t nkept;
  struct kvs_accessor *last[2]; /* the last reading and the last writing accessor; each holds a reference */
  struct kvs_shadow shadow;
  struct pool *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  unsigned starts;
  uint64_t session; /* number of this session; stream numbers are valid only within one */
  bool no_memory;   /* memory ran out in this session: accesses are ignored */
  bool unreported;  /* and that is not reported yet */
  struct kvs_clocks clocks;
  struct pool *pools;
  uint64_t accessors, found, reservations; /* totals since the process began */
  struct kvs_race *races;
  size_t nraces, races_capacity;
} checker; /* guarded by lock, as for all functions called ..._locked */

/* -- coming and going ------------------------------------------------------------------------------------------ */

static void free_kept(struct kept_access *kept) {
  if (kept->access) kvs_access_unref(kept->access);
  kvs_clock_unref(kept->now);
  kvs_clock_unref(kept->host);
  free(kept->ids);
  free(kept);
}

static void free_pool(struct pool *pool) {
  while (pool->kept) {
    struct kept_access *kept = pool->kept;
    pool->kept = kept->next;
    free_kept(kept);
  }
  kvs_accessor_unref(pool->last[0]);
  kvs_accessor_unref(pool->last[1]);
  kvs_shadow_free(&pool->shadow);
  free(pool);
}

/* Everything except the races, which stay until they are taken. */
static void drop_all_locked(void) {
  for (struct pool *pool; (pool = checker.pools);) {
    checker.pools = pool->next;
    free_pool(pool);
  }
  kvs_clocks_free(&checker.clocks);
}

static bool enter(void) {
  pthread_mutex_lock(&lock);
  if (checker.starts && !checker.no_memory) return true;
  pthread_mutex_unlock(&lock);
  return false;
}

/* `well`: no allocation failed. */
static void leave(bool well) {
  if (!well) {
    drop_all_locked();
    checker.no_memory = checker.unreported = true;
    checker.found++;
  }
  pthread_mutex_unlock(&lock);
}

/* -- order ----------------------------------------------------------------------------------------------------- */

/* Not through kvs_dev_stream_info(), which would count the call for injected faults: checking must not change
 * behaviour. */
static struct kvs_stream_key identify(struct kvs_device *device, kvs_stream stream) {
  struct kvs_stream_info info = {.capturing = true};
  struct kvs_error ignored;
  if (stream == 0) stream = KVS_STREAM_LEGACY;
  bool asked = kvs_dev_check(device, &ignored) == KVS_OK &&
               device->ops->stream_info(device, stream, &info, &ignored) == KVS_OK && !info.capturing;
  return (struct kvs_stream_key){device, asked ? info.id : stream, !asked};
}

/* A reference to the stream's clock; NULL: no memory. */
static struct kvs_clock *snapshot_locked(const struct kvs_stream_key *key) {
  uint32_t number;
  return kvs_clocks_stream(&checker.clocks, key, &number) ? kvs_clocks_snapshot(&checker.clocks, number) : NULL;
}

/* `later` NULL: the host. */
static bool join_locked(const struct kvs_stream_key *later, struct kvs_clock *clock) {
  uint32_t number = KVS_CLOCK_HOST;
  if (later && !kvs_clocks_stream(&checker.clocks, later, &number)) return false;
  return kvs_clocks_join(&checker.clocks, number, clock);
}

void kvs_racecheck_order(struct kvs_device *device, kvs_stream stream, kvs_event event, struct kvs_device *later_device,
                         kvs_stream later) {
  struct kvs_stream_key before = {.id = 0}, after = {.id = 0};
  if (!kvs_racecheck_on()) return;
  if (!event) before = identify(device, stream);
  if (later_device) after = identify(later_device, later);
  if (!enter()) return;
  struct kvs_clock *clock =
      event ? kvs_clock_ref(kvs_clocks_event(&checker.clocks, device, event)) : snapshot_locked(&before);
  bool well = (event || clock) && join_locked(later_device ? &after : NULL, clock);
  kvs_clock_unref(clock);
  leave(well);
}

bool kvs_racecheck_internal(bool internal) {
  bool before = unseen;
  unseen = internal;
  return before;
}

static void recorded(struct kvs_device *device, kvs_event event, kvs_stream stream) {
  struct kvs_stream_key key = identify(device, stream);
  if (!enter()) return;
  struct kvs_clock *clock = snapshot_locked(&key);
  bool well = clock && kvs_clocks_set_event(&checker.clocks, device, event, clock);
  kvs_clock_unref(clock);
  leave(well);
}

static void waits(struct kvs_device *device, kvs_stream stream, kvs_event event) {
  kvs_racecheck_order(device, 0, event, device, stream);
}

static void reached(struct kvs_device *device, kvs_event event) {
  if (!unseen) kvs_racecheck_order(device, 0, event, NULL, 0);
}

static void idle(struct kvs_device *device, kvs_stream stream) {
  if (!unseen) kvs_racecheck_order(device, stream, 0, NULL, 0);
}

static void all_idle(struct kvs_device *device) {
  struct kvs_clock *all;
  if (unseen || !enter()) return;
  bool well = kvs_clocks_snapshot_all(&checker.clocks, device, &all);
  if (well) {
    well = kvs_clocks_join(&checker.clocks, KVS_CLOCK_HOST, all);
    kvs_clock_unref(all);
  }
  leave(well);
}

static void forget_event(struct kvs_device *device, kvs_event event) {
  if (!enter()) return;
  kvs_clocks_forget_event(&checker.clocks, device, event);
  leave(true);
}

static const struct kvs_watch watcher = {
    .recorded = recorded,
    .waits = waits,
    .reached = reached,
    .idle = idle,
    .all_idle = all_idle,
    .forget_event = forget_event,
};

/* -- points ---------------------------------------------------------------------------------------------------- */

struct kvs_race_point {
  unsigned refs; /* guarded by lock, as the refs of clocks */
  uint64_t session;
  struct kvs_clock *clock;
};

/* Takes over the reference to `clock`. */
static struct kvs_race_point *point_new_locked(struct kvs_clock *clock) {
  struct kvs_race_point *point = clock ? malloc(sizeof *point) : NULL;
  if (point)
    *point = (struct kvs_race_point){1, checker.session, clock};
  else
    kvs_clock_unref(clock);
  return point;
}

struct kvs_race_point *kvs_racecheck_point(struct kvs_device *device, kvs_stream stream) {
  if (!kvs_racecheck_on()) return NULL;
  struct kvs_stream_key key = identify(device, stream);
  if (!enter()) return NULL;
  struct kvs_race_point *point = point_new_locked(snapshot_locked(&key));
  leave(point != NULL);
  return point;
}

struct kvs_race_point *kvs_racecheck_point_all(struct kvs_device *device) {
  struct kvs_race_point *point = NULL;
  struct kvs_clock *all;
  if (!kvs_racecheck_on() || !enter()) return NULL;
  bool well = kvs_clocks_snapshot_all(&checker.clocks, device, &all);
  if (well && all) well = (point = point_new_locked(all)) != NULL;
  leave(well);
  return point;
}

struct kvs_race_point *kvs_racecheck_point_ref(struct kvs_race_point *point) {
  if (!point) return NULL;
  pthread_mutex_lock(&lock);
  point->refs++;
  pthread_mutex_unlock(&lock);
  return point;
}

void kvs_racecheck_point_free(struct kvs_race_point *point) {
  if (!point) return;
  pthread_mutex_lock(&lock);
  bool last = --point->refs == 0;
  if (last) kvs_clock_unref(point->clock);
  pthread_mutex_unlock(&lock);
  if (last) free(point);
}

void kvs_racecheck_follow(const struct kvs_race_point *point, struct kvs_device *later_device, kvs_stream later) {
  struct kvs_stream_key key = {.id = 0};
  if (!point || !kvs_racecheck_on()) return;
  if (later_device) key = identify(later_device, later);
  if (!enter()) return;
  leave(point->session != checker.session || join_locked(later_device ? &key : NULL, point->clock));
}

void kvs_racecheck_stands_for(struct kvs_device *device, kvs_event event, const struct kvs_race_point *point) {
  if (!point || !kvs_racecheck_on() || !enter()) return;
  leave(point->session != checker.session || kvs_clocks_set_event(&checker.clocks, device, event, point->clock));
}

/* -- accesses -------------------------------------------------------------------------------------------------- */

static struct pool *pool_locked(const struct kvs_race_access *call) {
  struct pool *pool = checker.pools;
  while (pool && pool->number != call->pool) pool = pool->next;
  if (pool || !(pool = calloc(1, sizeof *pool))) return pool;
  pool->number = call->pool;
  pool->shadow.slots = call->slots;
  pool->kept_end = &pool->kept;
  snprintf(pool->name, sizeof pool->name, "%s", call->pool_name);
  pool->next = checker.pools;
  checker.pools = pool;
  return pool;
}

/* A reference to the accessor of this access: the last one, if that is the same transfer. */
static struct kvs_accessor *accessor_locked(struct pool *pool, const struct kvs_race_access *call) {
  struct kvs_accessor **last = &pool->last[call->write], *made;
  if (!*last || !call->accessor->transfer || (*last)->info.transfer != call->accessor->transfer) {
    if (!(made = calloc(1, sizeof *made))) return NULL;
    made->refs = 1;
    made->serial = ++checker.accessors;
    made->info = *call->accessor;
    made->info.write = call->write;
    kvs_accessor_unref(*last);
    *last = made;
  }
  (*last)->refs++;
  return *last;
}

static struct kvs_access *access_locked(struct pool *pool, const struct kvs_race_access *call, uint32_t number) {
  struct kvs_access *access = calloc(1, sizeof *access);
  if (!access) return NULL;
  *access = (struct kvs_access){.refs = 1,
                                .write = call->write,
                                .stream = number,
                                .tick = kvs_clock_at(kvs_clocks_of(&checker.clocks, number), number),
                                .begin = call->begin,
                                .end = call->end};
  access->accessor = accessor_locked(pool, call);
  if (access->accessor) return access;
  kvs_access_unref(access);
  return NULL;
}

/* Each pair of accessors is reported once, with the first slot where they race. */
static bool report_locked(const struct pool *pool, int64_t slot, struct kvs_accessor *first,
                          const struct kvs_accessor *second) {
  uint64_t *reported = &first->reported[second->info.write];
  if (*reported == second->serial) return true;
  *reported = second->serial;
  if (checker.nraces == RACES_KEPT) {
    checker.found++;
    return true;
  }
  if (checker.nraces == checker.races_capacity) {
    size_t larger = checker.races_capacity ? 2 * checker.races_capacity : 8;
    struct kvs_race *grown = realloc(checker.races, larger * sizeof *grown);
    if (!grown) return false;
    checker.races = grown;
    checker.races_capacity = larger;
  }
  struct kvs_race *race = &checker.races[checker.nraces++];
  *race = (struct kvs_race){.slot = (uint64_t)slot, .first = first->info, .second = second->info};
  memcpy(race->pool, pool->name, sizeof race->pool);
  checker.found++;
  return true;
}

static bool access_slot_locked(struct pool *pool, int64_t slot, struct kvs_access *access, const struct kvs_clock *now,
                               const struct kvs_clock *host) {
  struct kvs_history *history = kvs_shadow_make(&pool->shadow, (uint64_t)slot);
  if (!history) return false;
  for (uint32_t i = 0; i < history->count; i++) {
    const struct kvs_access *old = history->accesses[i];
    if (kvs_access_conflicts(old, access) && !kvs_access_before(old, now) &&
        !report_locked(pool, slot, old->accessor, access->accessor))
      return false;
  }
  return kvs_history_add(history, access, now, host);
}

/* -- accesses whose slots are not known yet ------------------------------------------------------------------------ */

/* Keep the access; its slots are known unless `number`. Takes over no reference. */
static bool keep_locked(struct pool *pool, const struct kvs_race_access *call, struct kvs_access *access,
                        uint64_t number) {
  struct kept_access *kept = calloc(1, sizeof *kept);
  if (!kept) return false;
  access->refs++;
  kept->access = access;
  kept->number = number;
  kept->now = kvs_clock_ref(kvs_clocks_of(&checker.clocks, access->stream));
  kept->host = kvs_clock_ref(checker.clocks.host);
  kept->count = number ? 0 : call->count;
  kept->ids = malloc((kept->count ? kept->count : 1) * sizeof *kept->ids);
  if (kept->ids && kept->count) memcpy(kept->ids, call->ids, kept->count * sizeof *kept->ids);
  *pool->kept_end = kept;
  pool->kept_end = &kept->next;
  pool->nkept++;
  return kept->ids != NULL;
}

/* Compare what is kept, up to the first whose slots are not known. */
static bool work_off_locked(struct pool *pool) {
  bool well = true;
  while (well && pool->kept && !pool->kept->number) {
    struct kept_access *kept = pool->kept;
    for (size_t i = 0; well && i < kept->count; i++)
      well = access_slot_locked(pool, kept->ids[i], kept->access, kept->now, kept->host);
    pool->kept = kept->next;
    if (!pool->kept) pool->kept_end = &pool->kept;
    pool->nkept--;
    free_kept(kept);
  }
  return well;
}

static bool note_locked(struct pool *pool, const struct kvs_race_access *call, struct kvs_access *access,
                        uint64_t reservation) {
  const struct kvs_clock *now = kvs_clocks_of(&checker.clocks, access->stream);
  bool well = true;
  if (reservation || pool->kept) {
    well = keep_locked(pool, call, access, reservation);
    for (; well && pool->nkept > KVS_RACE_KEPT; well = work_off_locked(pool)) pool->kept->number = 0;
    return well;
  }
  for (size_t i = 0; well && i < call->count; i++)
    well = access_slot_locked(pool, call->ids[i], access, now, checker.clocks.host);
  return well;
}

static uint64_t note(const struct kvs_race_access *call, bool known) {
  struct kvs_access *access = NULL;
  uint32_t number;
  if (!kvs_racecheck_on() || call->begin >= call->end) return 0;
  struct kvs_stream_key key = identify(call->device, call->stream);
  if (!enter()) return 0;
  uint64_t reservation = known ? 0 : ++checker.reservations;
  struct pool *pool = pool_locked(call);
  if (pool && kvs_clocks_stream(&checker.clocks, &key, &number) &&
      kvs_clocks_join(&checker.clocks, number, checker.clocks.host))
    access = access_locked(pool, call, number);
  bool well = access && note_locked(pool, call, access, reservation);
  if (access) kvs_access_unref(access);
  leave(well);
  return reservation;
}

void kvs_racecheck_access(const struct kvs_race_access *call) { (void)note(call, true); }

uint64_t kvs_racecheck_reserve(const struct kvs_race_access *call) { return note(call, false); }

void kvs_racecheck_fulfil(uint64_t number, uint64_t reservation, const int64_t *ids, size_t count) {
  bool well = true;
  if (!enter()) return;
  struct pool *pool = checker.pools;
  while (pool && pool->number != number) pool = pool->next;
  struct kept_access *kept = pool ? pool->kept : NULL;
  while (kept && kept->number != reservation) kept = kept->next;
  if (kept) { /* else too many were kept, or the checker was started anew */
    int64_t *copy = malloc((count ? count : 1) * sizeof *copy);
    well = copy != NULL;
    if (copy && count) memcpy(copy, ids, count * sizeof *copy);
    free(kept->ids);
    kept->ids = copy;
    kept->count = copy ? count : 0;
    kept->number = 0;
    well = well && work_off_locked(pool);
  }
  leave(well);
}

void kvs_racecheck_forget_pool(uint64_t number) {
  if (!enter()) return;
  struct pool **at = &checker.pools, *pool;
  while (*at && (*at)->number != number) at = &(*at)->next;
  if ((pool = *at)) {
    *at = pool->next;
    free_pool(pool);
  }
  leave(true);
}

void kvs_racecheck_forget_device(const struct kvs_device *device) {
  if (!enter()) return;
  kvs_clocks_forget_device(&checker.clocks, device);
  leave(true);
}

/* -- the process's ----------------------------------------------------------------------------------------------- */

void kvs_racecheck_start(void) {
  static struct kvs_fork_guard guard = {.lock = &lock, .hold = true};
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&lock);
  if (checker.starts++ == 0) {
    checker.session++;
    checker.no_memory = false;
    atomic_store(&kvs_racecheck_running, true);
    kvs_dev_watch(&watcher);
  }
  pthread_mutex_unlock(&lock);
}

void kvs_racecheck_stop(void) {
  pthread_mutex_lock(&lock);
  if (checker.starts && --checker.starts == 0) {
    kvs_dev_watch(NULL);
    atomic_store(&kvs_racecheck_running, false);
    drop_all_locked();
  }
  pthread_mutex_unlock(&lock);
}

bool kvs_racecheck_active(void) { return kvs_racecheck_on(); }

uint64_t kvs_racecheck_found(void) {
  pthread_mutex_lock(&lock);
  uint64_t found = checker.found;
  pthread_mutex_unlock(&lock);
  return found;
}

size_t kvs_racecheck_take(struct kvs_race *races, size_t capacity) {
  pthread_mutex_lock(&lock);
  size_t n = capacity < checker.nraces ? capacity : checker.nraces;
  if (n) memcpy(races, checker.races, n * sizeof *races);
  checker.nraces -= n;
  if (checker.nraces) {
    memmove(checker.races, checker.races + n, checker.nraces * sizeof *races);
  } else {
    free(checker.races);
    checker.races = NULL;
    checker.races_capacity = 0;
  }
  if (checker.unreported && n < capacity) {
    races[n++] = (struct kvs_race){.first.what = "out of memory", .second.what = "out of memory"};
    checker.unreported = false;
  }
  pthread_mutex_unlock(&lock);
  return n;
}
