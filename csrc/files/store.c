/* Stores: opening and closing. */
#include "files/store.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/thread.h"
#include "base/wait.h"
#include "codecs/coding.h"
#include "files/bound.h"
#include "files/checks.h"
#include "files/current.h"
#include "files/directory.h"
#include "files/ended.h"
#include "files/engine.h"
#include "files/gds.h"
#include "files/guard.h"
#include "files/mover.h"
#include "files/peers.h"
#include "files/scan.h"
#include "files/state.h"

enum { DEFAULT_QUEUE = 128, DEFAULT_THREADS = 8, DEFAULT_URING = 32 };
static const int64_t CLOSE_NS = 60ll * 1000 * 1000 * 1000, EXIT_NS = 2ll * 1000 * 1000 * 1000;

/* -- stores of the process ----------------------------------------------------------------------------------------- */

static pthread_mutex_t stores_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvs_file_store *stores; /* guarded by stores_lock: from before the directory is locked to the end */
static pthread_cond_t closer_ended;
static const int64_t READERS_NS = 10ll * 1000 * 1000 * 1000;
/* Guarded by stores_lock: threads that close a store after its last handle was dropped, and how many have ended. */
static unsigned closers, closed;

/* The listed stores are the parent's. The directory's locks last while any process has the descriptors open, so the
 * child closes its copies. */
static void forked(void) {
  for (; stores; stores = stores->next_of_all) {
    kvs_file_unlock_directories(stores, false);
    kvs_file_bound_forked(stores);
    if (stores->worker && stores->ops->forked) stores->ops->forked(stores->worker);
  }
  closers = 0;
}

static void enter_list(struct kvs_file_store *store) {
  static struct kvs_fork_guard guard = {&stores_lock, &closer_ended, .hold = true, .in_child = forked};
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&stores_lock);
  store->next_of_all = stores;
  stores = store;
  pthread_mutex_unlock(&stores_lock);
}

/* False: a reader of its counters does not return, so the store must not be freed. */
static bool leave_list(struct kvs_file_store *store) {
  uint64_t deadline = kvs_deadline(READERS_NS);
  pthread_mutex_lock(&stores_lock);
  struct kvs_file_store **at = &stores;
  while (*at && *at != store) at = &(*at)->next_of_all;
  if (*at) *at = store->next_of_all;
  while (store->readers && kvs_cond_wait(&closer_ended, &stores_lock, deadline)) continue;
  bool unused = store->readers == 0;
  pthread_mutex_unlock(&stores_lock);
  return unused;
}

static void note_open(struct kvs_file_store *store, bool open) {
  pthread_mutex_lock(&stores_lock);
  store->open = open;
  pthread_mutex_unlock(&stores_lock);
}

static bool ref_unless_dropped(struct kvs_file_store *store) {
  unsigned refs = atomic_load(&store->refs);
  while (refs && !atomic_compare_exchange_weak(&store->refs, &refs, refs + 1)) continue;
  return refs > 0;
}

/* An open store, with a reference; each store is returned once. The caller that drops the last reference closes the
 * store. */
static struct kvs_file_store *next_open(void) {
  pthread_mutex_lock(&stores_lock);
  struct kvs_file_store *store = stores;
  while (store && !(store->open && ref_unless_dropped(store))) store = store->next_of_all;
  if (store) store->open = false;
  pthread_mutex_unlock(&stores_lock);
  return store;
}

/* -- faults, for tests --------------------------------------------------------------------------------------------- */

static struct kvs_file_fault at_open[KVS_FILE_CALLS]; /* guarded by stores_lock */

void kvs_file_inject(struct kvs_file_store *store, enum kvs_file_call call, const struct kvs_file_fault *fault) {
  if (store) {
    kvs_file_faults_set(&store->faults, call, fault);
    return;
  }
  pthread_mutex_lock(&stores_lock);
  at_open[call] = *fault;
  pthread_mutex_unlock(&stores_lock);
}

static void inject_at_open(struct kvs_file_store *store) {
  pthread_mutex_lock(&stores_lock);
  memcpy(store->faults.fault, at_open, sizeof at_open);
  pthread_mutex_unlock(&stores_lock);
}

static void end_faults(struct kvs_file_store *store) {
  const struct kvs_file_fault none = {.action = KVS_FILE_FAULT_NONE};
  for (int call = 0; call < KVS_FILE_CALLS; call++) kvs_file_inject(store, (enum kvs_file_call)call, &none);
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

/* Requests in flight must keep the directories' locks. */
static int open_uring(struct kvs_file_store *store, unsigned depth, struct kvs_error *err) {
  for (unsigned i = 0; !store->settings.readonly && i < store->nroots; i++) {
    const struct kvs_file_root *root = &store->roots[i];
    if (root->lock_code) {
      kvs_file_fail(err, root->lock_code, "locking the directory %.100s", root->path);
      return KVS_UNSUPPORTED;
    }
    store->queue.kept[store->queue.nkept++] = root->folder;
  }
  return store->ops->open(&store->queue, depth, &store->worker, err);
}

static int open_engine(struct kvs_file_store *store, struct kvs_error *err) {
  const struct kvs_file_settings *s = &store->settings;
  const bool asked = s->engine == KVS_FILE_URING;
  int status = KVS_UNSUPPORTED;
  store->queue.faults = &store->faults;
  store->queue.direct = store->direct;
  store->queue.files_stay = !s->readonly && !store->bound && !s->shared; /* others close removed segments */
  store->queue.scratch_nbytes = store->geometry.slot_nbytes + KVS_FILE_PAGE;
  if (s->engine == KVS_FILE_THREADS) {
    snprintf(store->engine_note, sizeof store->engine_note, "not asked for");
  } else {
    store->ops = &kvs_file_uring;
    unsigned depth = s->depth ? s->depth : DEFAULT_URING;
    status = open_uring(store, depth, err);
    if (!status) store->settings.depth = depth;
    if (status && asked) return status;
    if (status) snprintf(store->engine_note, sizeof store->engine_note, "%.150s", err->message);
  }
  if (!status) return KVS_OK;
  store->ops = &kvs_file_threads;
  store->settings.depth = s->depth ? s->depth : DEFAULT_THREADS;
  return store->ops->open(&store->queue, store->settings.depth, &store->worker, err);
}

static void free_roots(struct kvs_file_store *store) {
  for (unsigned i = 0; i < store->nroots; i++) {
    free(store->roots[i].path);
    free(store->roots[i].free_slots);
  }
  free(store->roots);
  free(store->peers);
}

static bool make_roots(struct kvs_file_store *store, const struct kvs_file_settings *settings) {
  const bool none = settings->shared && settings->readonly; /* the blocks are those of the peers */
  store->nroots = none ? 0 : 1 + (unsigned)settings->nmore;
  store->writer = KVS_FILE_WRITERS;
  store->roots = calloc(store->nroots + 1, sizeof *store->roots);
  if (!store->roots) store->nroots = 0;
  for (unsigned i = 0; i < store->nroots; i++) {
    store->roots[i] = (struct kvs_file_root){.folder = -1, .state = -1};
    char *path = kvs_file_absolute_path(i ? settings->more[i - 1] : settings->directory);
    store->roots[i].path = path ? realloc(path, strlen(path) + 32) : NULL; /* and a writer's name */
    if (!store->roots[i].path) free(path);
    if (!store->roots[i].path) return false;
  }
  if (settings->shared) store->peers = calloc(KVS_FILE_WRITERS, sizeof *store->peers);
  return store->roots && (store->peers || !settings->shared);
}

static bool take_codings(struct kvs_file_store *store, const struct kvs_file_settings *settings) {
  store->codings = calloc(settings->ncodings + 1, sizeof(struct kvs_coding *));
  for (size_t i = 0; store->codings && i < settings->ncodings; i++)
    store->codings[i] = kvs_coding_ref(settings->codings[i]);
  return store->codings;
}

static void drop_codings(struct kvs_file_store *store) {
  for (size_t i = 0; store->codings && store->codings[i]; i++) kvs_coding_close((struct kvs_coding *)store->codings[i]);
  free(store->codings);
}

static void free_store(struct kvs_file_store *store) {
  if (!leave_list(store)) return;
  drop_codings(store);
  if (store->settings.device) kvs_engine_unref(store->settings.device);
  kvs_file_index_free(&store->index);
  kvs_file_queue_destroy(&store->queue);
  kvs_file_faults_destroy(&store->faults);
  pthread_cond_destroy(&store->ended);
  pthread_mutex_destroy(&store->lock);
  kvs_file_bound_free(store);
  free_roots(store);
  kvs_file_events_free(&store->events);
  free((char *)(uintptr_t)store->settings.directory);
  pthread_mutex_destroy(&store->peers_lock);
  pthread_cond_destroy(&store->watch);
  kvs_file_epochs_destroy(&store->epochs);
  free(store);
}

static struct kvs_file_store *new_store(const struct kvs_file_settings *asked, struct kvs_error *err) {
  struct kvs_file_store *store = calloc(1, sizeof *store);
  struct kvs_file_settings settings = *asked;
  char *directory = kvs_file_absolute_path(asked->directory);
  settings.directory = directory;
  if (!store || !directory || !make_roots(store, &settings) || !kvs_file_index_init(&store->index) ||
      !take_codings(store, &settings) || kvs_file_queue_init(&store->queue, &store->popped, err)) {
    if (store) drop_codings(store);
    if (store) kvs_file_index_free(&store->index);
    if (store) free_roots(store);
    free(directory);
    free(store);
    kvs_fail(err, KVS_NOMEM, "no memory for a store");
    return NULL;
  }
  atomic_init(&store->refs, 1);
  store->fork_generation = kvs_fork_generation();
  settings.codings = store->codings;
  store->settings = settings;
  store->settings.more = NULL;
  store->settings.layout = store->geometry.layout;
  if (!store->settings.queue) store->settings.queue = DEFAULT_QUEUE;
  store->notices.fd = -1;
  store->gds_mode = "off";
  snprintf(store->gds_note, sizeof store->gds_note, "the store has no device");
  pthread_mutex_init(&store->lock, NULL);
  kvs_file_faults_init(&store->faults);
  kvs_cond_init(&store->ended);
  kvs_cond_init(&store->watch);
  pthread_mutex_init(&store->peers_lock, NULL);
  kvs_file_epochs_init(&store->epochs);
  if (settings.device) kvs_engine_ref(settings.device);
  kvs_file_geometry_make(settings.layout, settings.block_nbytes, kvs_file_segment_size(&settings), &store->geometry);
  return store;
}

/* Until the next checkpoint or clean close, all blocks written from now on count as possibly torn. */
static int note_opened(struct kvs_file_store *store, struct kvs_error *err) {
  if (store->settings.readonly) return KVS_OK;
  int code = kvs_file_save_checkpoint(store, kvs_file_whole_below_locked(store), false);
  store->unwritable |= code != 0;
  return code ? kvs_file_fail(err, code, "writing to %.200s", store->settings.directory) : KVS_OK;
}

/* The bound first: it gives the capacity, and holds its lock until the own directory is chosen. */
static int open_directories(struct kvs_file_store *store, const struct kvs_file_settings *settings,
                            struct kvs_error *err) {
  int status = kvs_file_bound_open(store, err);
  if (status) return status;
  if (store->bound)
    kvs_file_geometry_make(settings->layout, settings->block_nbytes, kvs_file_segment_size(&store->settings),
                           &store->geometry);
  status = kvs_file_open_directories(store, err);
  int bound = kvs_file_bound_opened(store, status == KVS_OK, status ? &(struct kvs_error){0} : err);
  return status ? status : bound;
}

/* `refused`: why the store cannot be written; NULL: it can, as far as is known. *unwritable: it cannot. */
static int open_store(const struct kvs_file_settings *settings, const struct kvs_error *refused,
                      struct kvs_file_store **opened, bool *unwritable, struct kvs_error *err) {
  struct kvs_file_store *store = new_store(settings, err);
  if (!store) return KVS_NOMEM;
  store->refusal = refused ? refused->code : 0;
  if (refused) snprintf(store->readonly_note, sizeof store->readonly_note, "%.239s", refused->message);
  enter_list(store);
  inject_at_open(store);
  int status = open_directories(store, settings, err);
  if (!status && settings->shared) status = kvs_file_peers_find(store, err);
  if (!status) status = kvs_file_open_segments(store, err);
  if (!status) status = kvs_file_refuse_empty(store, err);
  if (!status) status = kvs_file_epochs_open(store, err);
  if (!status) status = kvs_file_scan(store, &store->index, err);
  if (!status) kvs_file_events_found(store);
  if (!status) status = note_opened(store, err);
  if (!status && settings->device) status = kvs_file_mover_open(store, err);
  if (!status) status = open_engine(store, err);
  if (!status) status = kvs_file_epochs_start(store, err);
  if (!status && settings->shared) status = kvs_file_peers_start(store, err);
  if (!status) status = kvs_file_bound_start(store, err);
  *unwritable = status && (store->unwritable || kvs_file_refuses_writes(status, err->code));
  if (status) {
    if (store->worker) {
      kvs_file_queue_close(&store->queue);
      store->ops->close(&store->worker);
    }
    if (store->mover) kvs_file_mover_close(store);
    kvs_file_epochs_stop(store);
    kvs_file_epochs_close(store);
    kvs_file_peers_stop(store);
    kvs_file_peers_close(store);
    kvs_file_close_directories(store);
    kvs_file_bound_close(store);
    free_store(store);
    return status;
  }
  end_faults(store);
  note_open(store, true);
  *opened = store;
  return KVS_OK;
}

static unsigned count_closed(void) {
  pthread_mutex_lock(&stores_lock);
  unsigned count = closed;
  pthread_mutex_unlock(&stores_lock);
  return count;
}

/* Wait until a closing thread has ended since so many had; false: none is left, or timeout. */
static bool await_closer(unsigned since, uint64_t deadline) {
  pthread_mutex_lock(&stores_lock);
  while (closers && closed == since && kvs_cond_wait(&closer_ended, &stores_lock, deadline)) continue;
  bool more = closed != since;
  pthread_mutex_unlock(&stores_lock);
  return more;
}

/* A store whose disk refuses writes (it is full, or read-only) serves what is there. If that is nothing, the error is
 * that of the write. */
static int open_writable(const struct kvs_file_settings *settings, struct kvs_file_store **opened,
                         struct kvs_error *err) {
  struct kvs_file_settings reads = *settings;
  struct kvs_error ignored;
  bool unwritable;
  int status = open_store(settings, NULL, opened, &unwritable, err);
  if (!unwritable || settings->readonly) return status;
  reads.readonly = true;
  return open_store(&reads, err, opened, &unwritable, &ignored) ? status : KVS_OK;
}

/* If the last handle of this directory was just dropped in this process, a thread is closing that store: wait for the
 * thread. */
int kvs_file_open(const struct kvs_file_settings *theirs, struct kvs_file_store **opened, struct kvs_error *err) {
  const struct kvs_file_settings own = *theirs;
  const uint64_t deadline = kvs_deadline(CLOSE_NS);
  int status = KVS_CHECK_RESERVED(&own, "kvs_file_settings", err);
  unsigned since;
  if (!status) status = kvs_file_check_settings(&own, err);
  if (status) return status;
  do {
    since = count_closed(); /* before: a thread may end just after the store was found busy */
    status = open_writable(&own, opened, err);
  } while (status == KVS_BUSY && await_closer(since, deadline));
  return status;
}

/* -- closing ------------------------------------------------------------------------------------------------------- */

static bool is_idle(const struct kvs_file_store *store) { return !store->oldest && !store->entered; }

static bool is_stopped(const struct kvs_file_store *store) { return store->stopped; }

static bool is_stopped_now(struct kvs_file_store *store) {
  pthread_mutex_lock(&store->lock);
  bool stopped = store->stopped;
  pthread_mutex_unlock(&store->lock);
  return stopped;
}

/* Returns whether the condition holds in time. */
static bool await_locked(struct kvs_file_store *store, bool (*holds)(const struct kvs_file_store *),
                         int64_t timeout_ns) {
  uint64_t deadline = kvs_deadline(timeout_ns);
  while (!holds(store) && kvs_cond_wait(&store->ended, &store->lock, deadline)) continue;
  return holds(store);
}

static void stop(struct kvs_file_store *store) {
  note_open(store, false);
  kvs_file_peers_stop(store);
  kvs_file_epochs_stop(store);
  kvs_file_bound_stop(store);
  kvs_file_queue_close(&store->queue);
  store->ops->close(&store->worker); /* the engine may have registered the staging: close it first */
  if (store->mover) kvs_file_mover_close(store);
  if (!store->settings.readonly) (void)kvs_file_save_checkpoint(store, kvs_file_whole_below_locked(store), true);
  kvs_file_peers_close(store);
  kvs_file_epochs_close(store);
  kvs_file_close_directories(store);
  kvs_file_bound_close(store);
  pthread_mutex_lock(&store->lock);
  store->stopped = true;
  pthread_cond_broadcast(&store->ended);
  pthread_mutex_unlock(&store->lock);
}

/* Requests that have not begun after timeout_ns are cancelled; those in flight get patience_ns more. */
static int close_within(struct kvs_file_store *store, int64_t timeout_ns, int64_t patience_ns, struct kvs_error *err) {
  if (store->fork_generation != kvs_fork_generation())
    return kvs_fail(err, KVS_FORKED, "this store was opened before fork(): it is the parent's to close");
  pthread_mutex_lock(&store->lock);
  store->closing = true;
  bool idle = await_locked(store, is_idle, timeout_ns);
  if (!idle) {
    pthread_mutex_unlock(&store->lock);
    (void)kvs_file_cancel_all(store);
    pthread_mutex_lock(&store->lock);
    idle = await_locked(store, is_idle, patience_ns);
  }
  bool mine = idle && !store->stopping;
  store->stopping |= mine;
  bool stopped = mine || (idle && await_locked(store, is_stopped, patience_ns)); /* another thread stops the store */
  pthread_mutex_unlock(&store->lock);
  if (!idle || !stopped)
    return kvs_fail(err, KVS_TIMEOUT, "%.200s: reads or writes do not end; the store stays open and takes no calls",
                    store->settings.directory);
  if (mine) stop(store);
  kvs_file_collect(store);
  return KVS_OK;
}

int kvs_file_close(struct kvs_file_store *store, int64_t timeout_ns, struct kvs_error *err) {
  return close_within(store, timeout_ns, CLOSE_NS, err);
}

void kvs_file_shutdown(int64_t timeout_ns) {
  uint64_t start = kvs_clock_ns();
  struct kvs_error err;
  for (struct kvs_file_store *store; (store = next_open()) != NULL;) {
    int64_t left = kvs_time_left(timeout_ns, start);
    /* after a timeout the reference stays: the store's threads still use it */
    if (close_within(store, left, left > EXIT_NS ? left : EXIT_NS, &err) == KVS_OK) kvs_file_unref(store);
  }
  while (await_closer(count_closed(), kvs_deadline(EXIT_NS))) continue;
  (void)kvs_file_gds_shutdown();
}

void kvs_file_ref(struct kvs_file_store *store) { atomic_fetch_add(&store->refs, 1); }

static void drop_last(struct kvs_file_store *store) {
  struct kvs_error err;
  int status = kvs_file_close(store, CLOSE_NS, &err);
  bool last = atomic_fetch_sub(&store->refs, 1) == 1; /* kvs_file_shutdown() may hold another reference */
  if (last && (status == KVS_OK || is_stopped_now(store))) free_store(store); /* otherwise its threads still use it */
}

static void *close_on_thread(void *store) {
  drop_last(store);
  pthread_mutex_lock(&stores_lock);
  closers--;
  closed++;
  pthread_cond_broadcast(&closer_ended);
  pthread_mutex_unlock(&stores_lock);
  return NULL;
}

/* Close the store on a new thread, which takes over the reference. */
static bool start_closer(struct kvs_file_store *store) {
  pthread_t thread;
  pthread_mutex_lock(&stores_lock);
  closers++;
  bool started = kvs_thread_start(&thread, NULL, close_on_thread, store) == 0;
  closers -= !started;
  pthread_mutex_unlock(&stores_lock);
  if (started) pthread_detach(thread);
  return started;
}

/* True: closing waits for no disk and no device. A writer writes its checkpoint. */
static bool closes_at_once(struct kvs_file_store *store) {
  pthread_mutex_lock(&store->lock);
  bool idle = store->settings.readonly && is_idle(store) && !store->stopping && !store->mover;
  bool at_once = store->stopped || idle;
  pthread_mutex_unlock(&store->lock);
  return at_once;
}

/* Dropping a reference never waits for reads, writes, a checkpoint or the staging's device. */
void kvs_file_unref(struct kvs_file_store *store) {
  unsigned refs = atomic_load(&store->refs);
  while (refs > 1)
    if (atomic_compare_exchange_weak(&store->refs, &refs, refs - 1)) return;
  if (store->fork_generation != kvs_fork_generation()) return;
  if (closes_at_once(store) || !start_closer(store)) drop_last(store);
}

/* -- queries ------------------------------------------------------------------------------------------------------- */

static void read_stats_locked(const struct kvs_file_store *store, struct kvs_file_stats *stats) {
  *stats = store->stats;
  stats->blocks = store->index.blocks;
  stats->pinned = store->index.pinned;
  stats->segments = store->nsegments - store->nremoved;
  stats->slots = stats->segments * store->geometry.slots;
  stats->file_nbytes = stats->segments * store->geometry.segment_nbytes;
  stats->unfinished_loads = store->unfinished[KVS_FILE_LOAD];
  stats->unfinished_stores = store->unfinished[KVS_FILE_STORE] + store->unfinished[KVS_FILE_DELETE];
  stats->requests = atomic_load(&store->popped.requests);
  stats->gds_read_nbytes = atomic_load(&store->gds_nbytes[0]);
  stats->gds_written_nbytes = atomic_load(&store->gds_nbytes[1]);
  stats->gds_by_host = atomic_load(&store->gds_by_host);
}

int kvs_file_get_stats(struct kvs_file_store *store, struct kvs_file_stats *stats, struct kvs_error *err) {
  int status = kvs_file_check_fork(store, err);
  if (status) return status;
  pthread_mutex_lock(&store->lock);
  read_stats_locked(store, stats);
  pthread_mutex_unlock(&store->lock);
  return KVS_OK;
}

static void read_kind_locked(const struct kvs_file_kind_counters *counters, struct kvs_file_kind_metrics *kind) {
  kind->duration_ns.sum = kvs_histogram_read(&counters->duration, kind->duration_ns.buckets);
  kind->nbytes.sum = kvs_histogram_read(&counters->nbytes, kind->nbytes.buckets);
  kind->failed = counters->failed;
  kind->cancelled = counters->cancelled;
  memcpy(kind->failed_blocks, counters->failed_blocks, sizeof kind->failed_blocks);
}

static void read_metrics(struct kvs_file_store *store, uint64_t now, struct kvs_file_metrics *metrics) {
  pthread_mutex_lock(&store->lock);
  const struct kvs_file_transfer *oldest = store->oldest;
  *metrics = (struct kvs_file_metrics){.block_nbytes = store->geometry.block_nbytes,
                                       .capacity = store->settings.capacity,
                                       .unfinished_load_blocks = store->unfinished_blocks[KVS_FILE_LOAD],
                                       .unfinished_store_blocks = store->unfinished_blocks[KVS_FILE_STORE] +
                                                                  store->unfinished_blocks[KVS_FILE_DELETE],
                                       .oldest_ns = oldest && now > oldest->start_ns ? now - oldest->start_ns : 0};
  read_stats_locked(store, &metrics->stats);
  read_kind_locked(&store->kinds[KVS_FILE_STORE], &metrics->stores);
  read_kind_locked(&store->kinds[KVS_FILE_LOAD], &metrics->loads);
  read_kind_locked(&store->kinds[KVS_FILE_DELETE], &metrics->deletes);
  pthread_mutex_unlock(&store->lock);
  snprintf(metrics->directory, sizeof metrics->directory, "%s", store->settings.directory);
}

/* The stores stay in memory meanwhile. A reference would not do: dropping the last one closes the store. No store's
 * lock is taken under stores_lock: fork() takes that one after locks that are taken under a store's. */
size_t kvs_file_stores_get_metrics(struct kvs_file_metrics *metrics, size_t capacity) {
  struct kvs_file_store **found = calloc(capacity ? capacity : 1, sizeof(struct kvs_file_store *));
  size_t count = 0;
  pthread_mutex_lock(&stores_lock);
  for (struct kvs_file_store *store = stores; store && found; store = store->next_of_all) {
    if (!store->open) continue;
    if (count < capacity) (found[count] = store)->readers++;
    count++;
  }
  pthread_mutex_unlock(&stores_lock);
  size_t held = count < capacity ? count : capacity;
  for (size_t i = 0; i < held; i++) read_metrics(found[i], kvs_clock_ns(), &metrics[i]);
  pthread_mutex_lock(&stores_lock);
  for (size_t i = 0; i < held; i++) found[i]->readers--;
  if (held) pthread_cond_broadcast(&closer_ended);
  pthread_mutex_unlock(&stores_lock);
  free(found);
  return count;
}

void kvs_file_get_info(struct kvs_file_store *store, struct kvs_file_info *info) {
  struct kvs_error ignored;
  bool locked = kvs_file_check_fork(store, &ignored) == KVS_OK; /* a forked child could block forever */
  if (locked) pthread_mutex_lock(&store->lock);                 /* refresh changes the geometry */
  *info = (struct kvs_file_info){
      .engine = store->ops->name,
      .direct = store->direct,
      .gds = store->gds_mode,
      .checksum = kvs_crc32c_how(),
      .readonly = store->settings.readonly,
      .readonly_note = store->readonly_note,
      .block_nbytes = store->geometry.block_nbytes,
      .slot_nbytes = store->geometry.slot_nbytes,
      .segment_nbytes = store->geometry.segment_nbytes,
      .capacity = store->settings.capacity,
      .bound = store->bound && store->bound->runs ? store->bound->path : "",
      .bound_note = store->bound ? store->bound->note : "",
      .depth = store->settings.depth,
  };
  if (locked) pthread_mutex_unlock(&store->lock);
  snprintf(info->engine_note, sizeof info->engine_note, "%s", store->engine_note);
  snprintf(info->direct_note, sizeof info->direct_note, "%s", store->direct_note);
  snprintf(info->gds_note, sizeof info->gds_note, "%s", store->gds_note);
}
