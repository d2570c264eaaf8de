/* Engines: opening, the registry, waiting, and the end of the process. */
#include "lanes/state.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/thread.h"
#include "base/wait.h"
#include "cuda/device.h"
#include "host/device.h"
#include "lanes/buffers.h"
#include "lanes/lane.h"
#include "lanes/late.h"
#include "lanes/registry.h"
#include "lanes/state.h"
#include "memory/memory.h"
#include "memory/reclaim.h"
#include "paths/calibration.h"
#include "paths/slots.h"
#include "racecheck/racecheck.h"

/* -- costs ----------------------------------------------------------------------------------------------------- */

void kvs_engine_set_costs(struct kvs_engine *engine, const struct kvs_costs *costs, const char *note) {
  kvs_costs_fit(&engine->costs, costs, engine->device->info.memory_gbps);
  snprintf(engine->costs_note, sizeof engine->costs_note, "%s", note);
}

const struct kvs_costs *kvs_engine_costs(const struct kvs_engine *engine) { return &engine->costs; }

const char *kvs_engine_costs_note(const struct kvs_engine *engine) { return engine->costs_note; }

/* A machine without a usable calibration gets the built-in costs; the note says why. */
static void load_costs(struct kvs_engine *engine) {
  const struct kvs_device_info *info = &engine->device->info;
  char what[KVS_COSTS_WHAT], path[512], note[sizeof engine->costs_note];
  struct kvs_costs costs;
  struct kvs_error err;
  kvs_costs_what(info, what);
  int status = kvs_costs_path(what, path, sizeof path, &err);
  if (!status) status = kvs_costs_read(path, &costs, &err);
  if (!status)
    snprintf(note, sizeof note, "%.200s", path);
  else if (status == KVS_RANGE)
    snprintf(note, sizeof note, "built in: kvswap calibrate measures this machine");
  else
    snprintf(note, sizeof note, "built in, since %.200s", err.message);
  kvs_engine_set_costs(engine, status ? NULL : &costs, note);
}

/* -- opening and closing --------------------------------------------------------------------------------------- */

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER; /* guards adding to the registry */

static int read_disabled(struct kvs_engine *engine, const char *list, struct kvs_error *err) {
  const struct {
    const char *word;
    bool *flag;
  } known[] = {{"kernel", &engine->disabled.kernel},
               {"batch", &engine->disabled.batch},
               {"burst", &engine->disabled.burst},
               {"strided", &engine->disabled.strided},
               {"gaps", &engine->disabled.gaps}};
  const size_t nknown = sizeof known / sizeof known[0];
  for (const char *at = list; at && *at;) {
    size_t n = strcspn(at, ","), i = 0;
    while (i < nknown && (strlen(known[i].word) != n || strncmp(at, known[i].word, n) != 0)) i++;
    if (i == nknown)
      return kvs_fail(err, KVS_INVALID, "KVSWAP_DISABLE is '%s'; it is a list of: kernel, batch, burst, strided, gaps",
                      list);
    *known[i].flag = true;
    at += n + (at[n] == ',');
  }
  return KVS_OK;
}

static pthread_once_t racecheck = PTHREAD_ONCE_INIT;

static void start_racecheck(void) {
  const char *wanted = getenv("KVSWAP_RACECHECK");
  if (wanted && *wanted && strcmp(wanted, "0") != 0) kvs_racecheck_start(); /* never stopped */
}

static int read_path(const char *wanted, enum kvs_path *path, struct kvs_error *err) {
  char all[80] = "";
  for (int i = 0; i < KVS_PATHS; i++) {
    *path = (enum kvs_path)i;
    if (strcmp(wanted, kvs_path_name((enum kvs_path)i)) == 0) return KVS_OK;
    snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : "", kvs_path_name((enum kvs_path)i));
  }
  return kvs_fail(err, KVS_INVALID, "KVSWAP_PATH is '%s'; it is one of %s", wanted, all);
}

static int read_environment(struct kvs_engine *engine, struct kvs_error *err) {
  const char *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const char *path = getenv("KVSWAP_PATH"), *ctas = getenv("KVSWAP_MAX_CTAS"), *gbps = getenv("KVSWAP_PACE_GBPS");
  const char *verify = getenv("KVSWAP_VERIFY_CODEC");
  char *end;
  int status = read_disabled(engine, getenv("KVSWAP_DISABLE"), err);
  if (status) return status;
  if (verify && *verify && strcmp(verify, "0") != 0 && strcmp(verify, "1") != 0)
    return kvs_fail(err, KVS_INVALID, "KVSWAP_VERIFY_CODEC is '%s'; it is 1 or 0", verify);
  engine->verifies = verify && strcmp(verify, "1") == 0;
  engine->one_queue = queues && strcmp(queues, "1") == 0;
  if (path && *path) status = read_path(path, &engine->defaults.path, err);
  if (status) return status;
  if (ctas && *ctas) {
    long n = strtol(ctas, &end, 10);
    if (*end || n < 1 || n > 1024)
      return kvs_fail(err, KVS_INVALID, "KVSWAP_MAX_CTAS is '%s'; it is a number from 1 to 1024", ctas);
    engine->defaults.max_ctas = (unsigned)n;
  }
  if (gbps && *gbps) {
    engine->defaults.pace_gbps = strtod(gbps, &end);
    if (*end || !(engine->defaults.pace_gbps > 0))
      return kvs_fail(err, KVS_INVALID, "KVSWAP_PACE_GBPS is '%s'; it is a positive number", gbps);
  }
  return KVS_OK;
}

int kvs_environment_check(struct kvs_error *err) {
  struct kvs_engine *engine = calloc(1, sizeof *engine);
  if (!engine) return kvs_fail(err, KVS_NOMEM, "no memory");
  int status = read_environment(engine, err);
  free(engine);
  return status;
}

/* Lanes, streams and buffers for the first transfers, so that they are not created beside running work. */
static int warm_up(struct kvs_engine *engine, struct kvs_error *err) {
  const struct kvs_options plain = {.priority = KVS_PRIORITY_NORMAL};
  struct kvs_staging *staging[2] = {NULL, NULL};
  int status = KVS_OK;
  for (int direction = KVS_D2H; !status && direction <= KVS_H2D; direction++) {
    struct kvs_lane *lane;
    status = kvs_lane_acquire(engine, &plain, (enum kvs_direction)direction, &lane, err);
    if (!status) kvs_lane_release(lane, false);
  }
  for (int i = 0; !status && i < 2; i++) status = kvs_engine_staging_get(engine, 65536, &staging[i], err);
  for (int i = 0; i < 2; i++)
    if (staging[i]) kvs_engine_staging_put(engine, staging[i]);
  if (!status) status = kvs_tables_open(engine, err);
  if (!status) status = kvs_lanes_stock(engine, err);
  if (!status) kvs_slots_open(engine);
  return status;
}

static bool submitting_locked(const struct kvs_engine *engine) {
  bool any = false;
  for (const struct kvs_lane *lane = engine->lanes; lane && !any; lane = lane->next) any = lane->users > 0;
  return any;
}

/* Destroy retired streams once no submission is in progress: one may have read the compute stream's handle and not
 * waited for it yet. */
static void destroy_retired_locked(struct kvs_engine *engine) {
  struct kvs_error ignored;
  while (engine->nretired && !submitting_locked(engine))
    (void)kvs_dev_stream_destroy(engine->device, engine->retired[--engine->nretired], &ignored);
}

static void destroy(struct kvs_engine *engine) {
  struct kvs_error err;
  if (!kvs_dev_forked(engine->device)) {
    /* Only a deterministic device ends before its process. If it cannot synchronize now, its work never ends. */
    if (!engine->device->stepped || kvs_dev_synchronize(engine->device, &err) == KVS_OK)
      (void)kvs_engine_drain(engine, NULL, 10ll * 1000 * 1000 * 1000, &err);
    kvs_engine_collect(engine);
    kvs_late_destroy(engine);
    kvs_lanes_destroy(engine);
    kvs_slots_close(engine);
    kvs_tables_close(engine);
    if (engine->compute_kept) (void)kvs_dev_stream_destroy(engine->device, engine->compute_stream, &err);
    destroy_retired_locked(engine);
    free(engine->retired);
    kvs_buffers_destroy(engine);
    kvs_memory_destroy(engine);
    kvs_racecheck_forget_device(engine->device);
    kvs_dev_close(engine->device);
  }
  kvs_reclaims_destroy(&engine->reclaims);
  pthread_mutex_destroy(&engine->lock);
  pthread_mutex_destroy(&engine->note_lock);
  pthread_mutex_destroy(&engine->hazard_lock);
  pthread_mutex_destroy(&engine->memory_lock);
  pthread_mutex_destroy(&engine->share_lock);
  pthread_mutex_destroy(&engine->range_lock);
  pthread_mutex_destroy(&engine->cache_lock);
  pthread_mutex_destroy(&engine->tables.lock);
  for (int i = 0; i < 2 * KVS_SLOT_SETS; i++) pthread_mutex_destroy(&engine->slots[i].lock);
  kvs_lent_destroy(engine);
  pthread_mutex_destroy(&engine->lend_lock);
  for (int i = 0; i < KVS_STREAM_LOCKS; i++) pthread_mutex_destroy(&engine->stream_locks[i]);
  free(engine);
}

/* Takes over the device, also on failure. */
static int create(const char *name, struct kvs_device *device, struct kvs_engine **made, struct kvs_error *err) {
  struct kvs_engine *engine = calloc(1, sizeof *engine);
  if (!engine) {
    kvs_dev_close(device);
    return kvs_fail(err, KVS_NOMEM, "no memory to open %s", name);
  }
  atomic_init(&engine->refs, 1);
  atomic_init(&engine->depth, KVS_DEFAULT_DEPTH);
  engine->compute_stream = KVS_STREAM_LEGACY;
  engine->device = device;
  engine->destroy = destroy;
  snprintf(engine->name, sizeof engine->name, "%s", name);
  kvs_reclaims_init(&engine->reclaims);
  pthread_mutex_init(&engine->lock, NULL);
  pthread_mutex_init(&engine->note_lock, NULL);
  pthread_mutex_init(&engine->hazard_lock, NULL);
  pthread_mutex_init(&engine->memory_lock, NULL);
  pthread_mutex_init(&engine->share_lock, NULL);
  pthread_mutex_init(&engine->range_lock, NULL);
  pthread_mutex_init(&engine->cache_lock, NULL);
  pthread_mutex_init(&engine->tables.lock, NULL);
  for (int i = 0; i < 2 * KVS_SLOT_SETS; i++) pthread_mutex_init(&engine->slots[i].lock, NULL);
  kvs_lent_init(engine);
  pthread_mutex_init(&engine->lend_lock, NULL);
  for (int i = 0; i < KVS_STREAM_LOCKS; i++) pthread_mutex_init(&engine->stream_locks[i], NULL);
  load_costs(engine);
  pthread_once(&racecheck, start_racecheck);
  int status = read_environment(engine, err);
  if (!status) status = warm_up(engine, err);
  if (status) {
    destroy(engine);
    return status;
  }
  *made = engine;
  return KVS_OK;
}

static int parse_name(const char *name, bool *cuda, int *ordinal, struct kvs_error *err) {
  const char *colon = strchr(name, ':');
  size_t kind = colon ? (size_t)(colon - name) : strlen(name);
  char *end = NULL;
  long number = colon ? strtol(colon + 1, &end, 10) : 0;
  *cuda = kind == 4 && strncmp(name, "cuda", 4) == 0;
  bool host = kind == 4 && strncmp(name, "host", 4) == 0;
  if ((!*cuda && !host) || (colon && (end == colon + 1 || *end || colon[1] < '0' || colon[1] > '9')) || number > 4095)
    return kvs_fail(
        err, KVS_INVALID,
        "device '%.40s' is not known; devices are called cuda:0, cuda:1, ... (GPUs) and host:0 to host:4095 (this "
        "machine's memory and threads)",
        name);
  *ordinal = (int)number;
  return KVS_OK;
}

static struct kvs_engine *find_locked(const char *name) {
  struct kvs_engine *engine;
  for (unsigned i = 0; (engine = kvs_engine_at(i)) != NULL; i++)
    if (strcmp(engine->name, name) == 0 && !kvs_dev_forked(engine->device))
      return engine; /* the child of a fork opens its own */
  return NULL;
}

int kvs_engine_open(const char *name, struct kvs_engine **engine, struct kvs_error *err) {
  struct kvs_device *device;
  char canonical[24];
  bool cuda = false;
  int ordinal = 0, status = parse_name(name, &cuda, &ordinal, err);
  if (status) return status;
  snprintf(canonical, sizeof canonical, "%s:%d", cuda ? "cuda" : "host", ordinal);
  static struct kvs_fork_guard guard = {.lock = &registry_lock};
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&registry_lock);
  struct kvs_engine *there = find_locked(canonical);
  if (!there && kvs_engine_at(KVS_MAX_ENGINES - 1))
    status = kvs_fail(err, KVS_INVALID, "%d devices are open already", KVS_MAX_ENGINES);
  if (!there && !status) {
    status = cuda ? kvs_device_cuda_open(ordinal, &device, err) : kvs_device_host_open(ordinal, 0, &device, err);
    if (!status) status = create(canonical, device, &there, err);
    if (!status) kvs_engine_add(there);
  }
  if (!status) {
    kvs_engine_ref(there);
    *engine = there;
  }
  pthread_mutex_unlock(&registry_lock);
  return status;
}

int kvs_engine_open_deterministic(uint64_t seed, struct kvs_engine **engine, struct kvs_error *err) {
  struct kvs_device *device;
  char name[32];
  if (seed == 0) return kvs_fail(err, KVS_INVALID, "seed is 0; a deterministic device needs another");
  int status = kvs_device_host_open(0, seed, &device, err);
  if (status) return status;
  device->stepped = true;
  snprintf(name, sizeof name, "host:seed-%" PRIu64, seed);
  return create(name, device, engine, err);
}

void kvs_shutdown(int64_t timeout_ns) {
  struct kvs_engine *engine;
  struct kvs_error err;
  uint64_t start = kvs_clock_ns();
  kvs_begin_shutdown();
  for (unsigned i = 0; (engine = kvs_engine_at(i)) != NULL; i++) {
    if (kvs_dev_forked(engine->device)) continue;
    atomic_store(&engine->closed, true);
    (void)kvs_engine_drain(engine, NULL, kvs_time_left(timeout_ns, start), &err);
    kvs_engine_collect(engine);
    (void)kvs_reclaim_drain(engine, kvs_time_left(timeout_ns, start));
  }
}

/* -- properties ------------------------------------------------------------------------------------------------ */

static void retire_locked(struct kvs_engine *engine, kvs_stream stream) {
  kvs_stream *grown = realloc(engine->retired, (engine->nretired + 1) * sizeof *grown);
  if (!grown) return; /* no memory to list the stream: it is not destroyed */
  engine->retired = grown;
  engine->retired[engine->nretired++] = stream;
}

int kvs_engine_set_compute_stream(struct kvs_engine *engine, uint64_t stream, struct kvs_error *err) {
  struct kvs_stream_info info;
  if (stream == KVS_STREAM_PER_THREAD)
    return kvs_fail(err, KVS_INVALID,
                    "the per-thread default stream (2) is another one in each thread: it cannot be the compute stream; "
                    "give the handle of a real one");
  int status = kvs_dev_stream_info(engine->device, stream, &info, err);
  if (status) return status;
  if (stream == 0) stream = KVS_STREAM_LEGACY;
  pthread_mutex_lock(&engine->lock);
  if (stream != engine->compute_stream) {
    if (engine->compute_kept) retire_locked(engine, engine->compute_stream);
    engine->compute_kept = false;
  }
  engine->compute_id = info.capturing ? 0 : info.id;
  engine->compute_stream = stream;
  destroy_retired_locked(engine);
  pthread_mutex_unlock(&engine->lock);
  return KVS_OK;
}

kvs_stream kvs_engine_compute_stream(struct kvs_engine *engine) {
  pthread_mutex_lock(&engine->lock);
  kvs_stream stream = engine->compute_stream;
  pthread_mutex_unlock(&engine->lock);
  return stream;
}

bool kvs_engine_keep_stream(struct kvs_engine *engine, kvs_stream stream) {
  if (kvs_dev_forked(engine->device)) return true; /* the stream is the parent's */
  pthread_mutex_lock(&engine->lock);
  bool keep = engine->compute_stream == stream;
  engine->compute_kept |= keep;
  destroy_retired_locked(engine);
  if (!keep && submitting_locked(engine)) { /* it may have been the compute stream when a submission read it */
    retire_locked(engine, stream);
    keep = true;
  }
  pthread_mutex_unlock(&engine->lock);
  return keep;
}

int kvs_engine_skip_hazard(struct kvs_engine *engine, const char *kind, struct kvs_error *err) {
  static const char *const names[] = {[KVS_RAW] = "raw", [KVS_WAR] = "war", [KVS_WAW] = "waw"};
  unsigned mask = 0;
  for (unsigned i = 0; kind && i < sizeof names / sizeof *names; i++)
    if (strcmp(kind, names[i]) == 0) mask = 1u << i;
  if (kind && !mask) return kvs_fail(err, KVS_INVALID, "hazard is '%s'; it is one of raw, war, waw", kind);
  atomic_store(&engine->skipped_hazards, mask);
  return KVS_OK;
}

int kvs_engine_set_lane_depth(struct kvs_engine *engine, uint64_t depth, struct kvs_error *err) {
  if (depth < 1 || depth > 65536) return kvs_fail(err, KVS_INVALID, "depth is %" PRIu64 "; it is 1 to 65536", depth);
  atomic_store(&engine->depth, (unsigned)depth);
  return KVS_OK;
}

/* -- synchronising --------------------------------------------------------------------------------------------- */

/* The driver's call has no time limit, so a thread makes it and callers wait for the thread with their own limit. */
struct kvs_sync {
  atomic_uint refs; /* one of the caller, one of the thread */
  struct kvs_engine *engine;
  struct kvs_race_point *point; /* what was queued when the call began */
  atomic_int status;            /* KVS_NOT_READY until the driver's call returned */
  struct kvs_error err;
};

static void drop_sync(struct kvs_sync *sync) {
  if (atomic_fetch_sub(&sync->refs, 1) != 1) return;
  kvs_engine_unref(sync->engine);
  kvs_racecheck_point_free(sync->point);
  free(sync);
}

static void *synchronize(void *arg) {
  struct kvs_sync *sync = arg;
  bool before = kvs_racecheck_internal(true); /* the caller sees the end in wait_sync(), if it waits that long */
  int status = kvs_dev_synchronize(sync->engine->device, &sync->err);
  kvs_racecheck_internal(before);
  kvs_late_settle_behind(sync->engine); /* afterwards no transfer goes on */
  kvs_engine_reap(sync->engine);
  atomic_store(&sync->status, status);
  drop_sync(sync);
  return NULL;
}

static int start_sync(struct kvs_engine *engine, struct kvs_sync **out, struct kvs_error *err) {
  pthread_t thread;
  int status = kvs_dev_check(engine->device, err);
  if (status) return status;
  struct kvs_sync *sync = calloc(1, sizeof *sync);
  if (!sync) return kvs_fail(err, KVS_NOMEM, "no memory to synchronize");
  atomic_init(&sync->refs, 2);
  atomic_init(&sync->status, KVS_NOT_READY);
  sync->engine = engine;
  sync->point = kvs_racecheck_on() ? kvs_racecheck_point_all(engine->device) : NULL;
  kvs_engine_ref(engine);
  if (engine->device->stepped) { /* a deterministic device works only inside calls */
    (void)synchronize(sync);
  } else if (kvs_thread_start(&thread, "kvswap-sync", synchronize, sync)) {
    atomic_store(&sync->refs, 1);
    drop_sync(sync);
    return kvs_fail(err, KVS_NOMEM, "no thread could be started to wait in");
  } else {
    pthread_detach(thread);
  }
  *out = sync;
  return KVS_OK;
}

static int poll_sync(void *arg, struct kvs_error *err) {
  struct kvs_sync *sync = arg;
  int status = atomic_load(&sync->status);
  if (status && status != KVS_NOT_READY) *err = sync->err;
  return status;
}

static int wait_sync(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_sync *sync = arg;
  int status = kvs_wait_until(poll_sync, sync, false, timeout_ns, err);
  if (!status && kvs_racecheck_on()) kvs_racecheck_follow(sync->point, NULL, 0);
  return status;
}

int kvs_engine_synchronize(struct kvs_engine *engine, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_sync *sync = NULL;
  int status = start_sync(engine, &sync, err);
  if (status) return status;
  status = kvs_wait_slices(wait_sync, sync, timeout_ns, err);
  drop_sync(sync);
  return status;
}
