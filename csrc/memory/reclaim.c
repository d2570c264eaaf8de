/* Reclaiming what the device may still use: see reclaim.h.
 *
 * The thread synchronizes with the device, then runs the tasks that existed before the synchronization. It holds a
 * reference to the engine and exits when no task is left. A task is owned by the list and by its callers; the last one
 * frees it. */
#include "memory/reclaim.h"

#include <stdlib.h>

#include "base/thread.h"
#include "base/wait.h"
#include "lanes/lane.h"
#include "lanes/state.h"
#include "racecheck/racecheck.h"

enum state { WAITING, RUNNING, ENDED };

enum { PAUSE_FROM_NS = 200000, PAUSE_TO_NS = 50000000 };

/* Guarded by reclaims.lock, except the constant members. */
struct kvs_reclaim {
  struct kvs_reclaim *next;
  struct kvs_engine *engine;      /* constant; each caller holds a reference */
  kvs_reclaim_function *function; /* constant */
  void *what;                     /* constant */
  enum state state;
  bool covered; /* the work that was queued before the task has ended */
  bool kept;    /* the result is kept although no caller waits */
  bool listed;  /* the task is in the list */
  bool seen;    /* a caller has the status */
  bool dropped; /* not retried: the last caller has left by KVS_LEAVE_DROP */
  bool ran;     /* the function has begun; false if the task ended because the device could not be synchronized */
  unsigned callers;
  int status;
  struct kvs_error err;
};

/* The engine whose task runs in this thread: tasks that this task starts run here too, and wait for nothing. */
static _Thread_local const struct kvs_engine *reclaiming;

void kvs_reclaims_init(struct kvs_reclaims *reclaims) {
  pthread_mutex_init(&reclaims->lock, NULL);
  kvs_cond_init(&reclaims->changed);
}

void kvs_reclaims_destroy(struct kvs_reclaims *reclaims) {
  while (reclaims->first) {
    struct kvs_reclaim *task = reclaims->first;
    reclaims->first = task->next;
    free(task);
  }
  pthread_cond_destroy(&reclaims->changed);
  pthread_mutex_destroy(&reclaims->lock);
}

/* -- tasks ----------------------------------------------------------------------------------------------------- */

static struct kvs_reclaim *find_locked(struct kvs_reclaims *reclaims, kvs_reclaim_function *function, void *what) {
  struct kvs_reclaim *task = reclaims->first;
  while (task && (task->function != function || task->what != what || !task->kept)) task = task->next;
  return task;
}

static void append_locked(struct kvs_reclaims *reclaims, struct kvs_reclaim *task) {
  struct kvs_reclaim **at = &reclaims->first;
  while (*at) at = &(*at)->next;
  *at = task;
  task->next = NULL;
  task->listed = true;
  pthread_cond_broadcast(&reclaims->changed);
}

static void remove_locked(struct kvs_reclaims *reclaims, struct kvs_reclaim *task) {
  struct kvs_reclaim **at = &reclaims->first;
  if (!task->listed) return;
  while (*at != task) at = &(*at)->next;
  *at = task->next;
  task->listed = false;
}

static void free_unused_locked(struct kvs_reclaim *task) {
  if (!task->listed && !task->callers) free(task);
}

/* After kvs_shutdown() memory that no caller waits for is given back with the process: a thread that still called the
 * driver while the process takes it down would end in a crash. */
static bool open_task(const struct kvs_engine *engine, const struct kvs_reclaim *task) {
  return task->state == RUNNING || (task->state == WAITING && (task->callers || !atomic_load(&engine->closed)));
}

static struct kvs_reclaim *next_locked(struct kvs_engine *engine) {
  struct kvs_reclaim *task = engine->reclaims.first;
  while (task && (task->state != WAITING || !task->covered || !open_task(engine, task))) task = task->next;
  return task;
}

static bool any_open_locked(const struct kvs_engine *engine) {
  const struct kvs_reclaim *task = engine->reclaims.first;
  while (task && !open_task(engine, task)) task = task->next;
  return task != NULL;
}

/* -- running --------------------------------------------------------------------------------------------------- */

static void end_locked(struct kvs_reclaims *reclaims, struct kvs_reclaim *task, int status,
                       const struct kvs_error *err) {
  task->state = ENDED;
  task->status = status;
  task->err = *err;
  if (!task->kept) remove_locked(reclaims, task);
  pthread_cond_broadcast(&reclaims->changed);
  free_unused_locked(task);
}

/* The lock is released while the function runs. False: still in use. */
static bool run_locked(struct kvs_engine *engine, struct kvs_reclaim *task) {
  struct kvs_reclaims *reclaims = &engine->reclaims;
  struct kvs_error err = {0};
  const struct kvs_engine *before = reclaiming;
  task->state = RUNNING;
  task->ran = true;
  pthread_mutex_unlock(&reclaims->lock);
  reclaiming = engine;
  int status = task->function(engine, task->what, &err);
  reclaiming = before;
  pthread_mutex_lock(&reclaims->lock);
  if (status != KVS_TIMEOUT || task->dropped) {
    end_locked(reclaims, task, status, &err);
    return true;
  }
  task->state = WAITING;
  task->ran = false;
  return false;
}

/* Run all covered tasks once. True if at least one ended. */
static bool run_all_locked(struct kvs_engine *engine) {
  struct kvs_reclaim *task;
  bool progress = false;
  while ((task = next_locked(engine)) != NULL) {
    task->covered = false; /* once a round */
    progress |= run_locked(engine, task);
  }
  return progress;
}

static void cover_locked(struct kvs_reclaims *reclaims) {
  for (struct kvs_reclaim *task = reclaims->first; task; task = task->next) task->covered = true;
}

/* The device could not be synchronized: tasks with callers end with that error, the others are retried. */
static void refuse_locked(struct kvs_reclaims *reclaims, int status, const struct kvs_error *err) {
  struct kvs_reclaim *task = reclaims->first;
  while (task) {
    struct kvs_reclaim *next = task->next;
    bool told = task->covered && task->state == WAITING && task->callers;
    task->covered = false;
    if (told) end_locked(reclaims, task, status, err);
    task = next;
  }
}

/* Synchronize with the device, then run the tasks. */
static bool one_round_locked(struct kvs_engine *engine) {
  struct kvs_reclaims *reclaims = &engine->reclaims;
  struct kvs_error err = {0};
  cover_locked(reclaims);
  pthread_mutex_unlock(&reclaims->lock);
  bool before = kvs_racecheck_internal(true);
  int status = kvs_dev_synchronize(engine->device, &err);
  kvs_engine_reap(engine);
  kvs_racecheck_internal(before);
  pthread_mutex_lock(&reclaims->lock);
  if (!status || status == KVS_LOST || atomic_load(&engine->closed)) return run_all_locked(engine);
  refuse_locked(reclaims, status, &err);
  return false;
}

static void *work(void *arg) {
  struct kvs_engine *engine = arg;
  struct kvs_reclaims *reclaims = &engine->reclaims;
  uint64_t pause = PAUSE_FROM_NS;
  pthread_mutex_lock(&reclaims->lock);
  while (any_open_locked(engine)) {
    if (one_round_locked(engine)) {
      pause = PAUSE_FROM_NS;
    } else if (any_open_locked(engine)) { /* in use, as by another device, or made during the synchronization */
      (void)kvs_cond_wait(&reclaims->changed, &reclaims->lock, kvs_clock_ns() + pause);
      pause = 2 * pause < PAUSE_TO_NS ? 2 * pause : PAUSE_TO_NS;
    }
  }
  reclaims->threaded = false;
  pthread_cond_broadcast(&reclaims->changed);
  pthread_mutex_unlock(&reclaims->lock);
  kvs_engine_unref(engine);
  return NULL;
}

static bool start_thread_locked(struct kvs_engine *engine) {
  struct kvs_reclaims *reclaims = &engine->reclaims;
  pthread_t thread;
  if (reclaims->threaded) return true;
  kvs_engine_ref(engine);
  if (kvs_thread_start(&thread, "kvswap-reclaim", work, engine)) {
    (void)atomic_fetch_sub(&engine->refs, 1); /* not the last reference: the caller holds one */
    return false;
  }
  pthread_detach(thread);
  reclaims->threaded = true;
  return true;
}

static bool is_here(const struct kvs_engine *engine) { return engine->device->stepped || reclaiming == engine; }

/* Run the task in this thread: on a deterministic device, or inside another task, which has synchronized already. A
 * task that cannot run yet stays if it has no caller. */
static void run_here_locked(struct kvs_engine *engine, struct kvs_reclaim *task) {
  struct kvs_reclaims *reclaims = &engine->reclaims;
  struct kvs_error err = {0};
  int status = KVS_OK;
  if (reclaiming != engine) {
    pthread_mutex_unlock(&reclaims->lock);
    status = kvs_dev_synchronize(engine->device, &err);
    kvs_engine_reap(engine);
    pthread_mutex_lock(&reclaims->lock);
  }
  if (task->state != WAITING) return; /* another thread ran it */
  if (!status || status == KVS_LOST)
    (void)run_locked(engine, task);
  else if (task->callers)
    end_locked(reclaims, task, status, &err);
}

/* -- callers --------------------------------------------------------------------------------------------------- */

static struct kvs_reclaim *make_locked(struct kvs_engine *engine, kvs_reclaim_function *function, void *what) {
  struct kvs_reclaim *task = calloc(1, sizeof *task);
  if (!task) return NULL;
  task->engine = engine;
  task->function = function;
  task->what = what;
  append_locked(&engine->reclaims, task);
  return task;
}

int kvs_reclaim_start(struct kvs_engine *engine, kvs_reclaim_function *function, void *what,
                      struct kvs_reclaim **started, struct kvs_error *err) {
  struct kvs_reclaims *reclaims = &engine->reclaims;
  int status = KVS_OK;
  pthread_mutex_lock(&reclaims->lock);
  struct kvs_reclaim *task = find_locked(reclaims, function, what);
  bool joined = task != NULL;
  if (!task) task = make_locked(engine, function, what);
  if (!task) {
    status = kvs_fail(err, KVS_NOMEM, "no memory to give memory back");
  } else {
    task->callers++;
    if (!joined && is_here(engine)) {
      run_here_locked(engine, task);
    } else if (task->state == WAITING && !is_here(engine) && !start_thread_locked(engine)) {
      status = kvs_fail(err, KVS_NOMEM, "no thread could be started to wait in");
      task->callers--;
      if (!joined) remove_locked(reclaims, task);
      free_unused_locked(task);
    }
  }
  if (!status) kvs_engine_ref(engine);
  pthread_mutex_unlock(&reclaims->lock);
  *started = status ? NULL : task;
  return status;
}

/* On a deterministic device. The memory may be in use by another device, or by work that another thread queued after
 * the task was tried. Neither signals `changed` when it ends. */
static void try_again_locked(struct kvs_engine *engine, struct kvs_reclaim *task, uint64_t deadline) {
  struct kvs_reclaims *reclaims = &engine->reclaims;
  uint64_t next = kvs_clock_ns() + PAUSE_FROM_NS;
  (void)kvs_cond_wait(&reclaims->changed, &reclaims->lock, next < deadline ? next : deadline);
  if (task->state == WAITING) run_here_locked(engine, task);
}

static int wait_slice(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_reclaim *task = arg;
  struct kvs_engine *engine = task->engine;
  struct kvs_reclaims *reclaims = &engine->reclaims;
  uint64_t deadline = kvs_deadline(timeout_ns);
  bool inside = reclaiming == engine; /* in a task's function: no task runs meanwhile */
  pthread_mutex_lock(&reclaims->lock);
  while (task->state != ENDED && !inside && kvs_clock_ns() < deadline) {
    if (engine->device->stepped)
      try_again_locked(engine, task, deadline);
    else
      (void)kvs_cond_wait(&reclaims->changed, &reclaims->lock, deadline);
  }
  bool ended = task->state == ENDED;
  task->seen |= ended;
  if (ended && task->status) *err = task->err;
  int status = task->status;
  pthread_mutex_unlock(&reclaims->lock);
  return ended ? status : kvs_fail(err, KVS_TIMEOUT, "queued work that may use it has not ended");
}

int kvs_reclaim_wait(struct kvs_reclaim *task, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_wait_slices(wait_slice, task, timeout_ns, err);
}

bool kvs_reclaim_leave(struct kvs_reclaim *task, enum kvs_leave how) {
  struct kvs_engine *engine = task->engine;
  struct kvs_reclaims *reclaims = &engine->reclaims;
  pthread_mutex_lock(&reclaims->lock);
  bool last = --task->callers == 0, withdrawn = !task->ran && how != KVS_LEAVE_ALONE;
  /* The task may have ended after the caller got KVS_TIMEOUT. */
  bool keep = last && !withdrawn && how == KVS_LEAVE_RESULT && !task->seen;
  if (keep) task->kept = true;
  if (last && how == KVS_LEAVE_DROP) task->dropped = true;
  if (keep && !task->listed) append_locked(reclaims, task);
  if (last && !keep && (withdrawn || task->state == ENDED)) remove_locked(reclaims, task);
  free_unused_locked(task);
  pthread_mutex_unlock(&reclaims->lock);
  kvs_engine_unref(engine);
  return withdrawn;
}

bool kvs_reclaim_left(struct kvs_engine *engine, kvs_reclaim_function *function, void *what) {
  pthread_mutex_lock(&engine->reclaims.lock);
  bool left = find_locked(&engine->reclaims, function, what) != NULL;
  pthread_mutex_unlock(&engine->reclaims.lock);
  return left;
}

void kvs_reclaim_forget(struct kvs_engine *engine, kvs_reclaim_function *function, void *what) {
  struct kvs_reclaims *reclaims = &engine->reclaims;
  pthread_mutex_lock(&reclaims->lock);
  struct kvs_reclaim *task = find_locked(reclaims, function, what);
  if (task && task->state == ENDED && !task->callers) {
    remove_locked(reclaims, task);
    free(task);
  }
  pthread_mutex_unlock(&reclaims->lock);
}

void kvs_reclaim_later(struct kvs_engine *engine, kvs_reclaim_function *function, void *what) {
  struct kvs_reclaims *reclaims = &engine->reclaims;
  if (kvs_dev_forked(engine->device) || atomic_load(&engine->closed)) return;
  kvs_engine_ref(engine); /* `what` may hold the last reference */
  pthread_mutex_lock(&reclaims->lock);
  struct kvs_reclaim *task = make_locked(engine, function, what);
  if (task && is_here(engine))
    run_here_locked(engine, task);
  else if (task)
    (void)start_thread_locked(engine); /* on failure a later call starts the thread */
  pthread_mutex_unlock(&reclaims->lock);
  kvs_engine_unref(engine);
}

void kvs_reclaim_retry(struct kvs_engine *engine) {
  struct kvs_reclaims *reclaims = &engine->reclaims;
  if (reclaiming) return;
  pthread_mutex_lock(&reclaims->lock);
  if (any_open_locked(engine) && engine->device->stepped)
    (void)one_round_locked(engine);
  else if (any_open_locked(engine))
    (void)start_thread_locked(engine);
  pthread_mutex_unlock(&reclaims->lock);
}

bool kvs_reclaim_pending(struct kvs_engine *engine) {
  pthread_mutex_lock(&engine->reclaims.lock);
  bool pending = any_open_locked(engine);
  pthread_mutex_unlock(&engine->reclaims.lock);
  return pending;
}

/* After kvs_shutdown() the thread has ended too. */
static bool is_drained_locked(const struct kvs_engine *engine) {
  return !any_open_locked(engine) && !(atomic_load(&engine->closed) && engine->reclaims.threaded);
}

bool kvs_reclaim_goes_on(struct kvs_engine *engine) {
  pthread_mutex_lock(&engine->reclaims.lock);
  bool goes_on = any_open_locked(engine) && engine->reclaims.threaded;
  pthread_mutex_unlock(&engine->reclaims.lock);
  return goes_on;
}

bool kvs_reclaim_drain(struct kvs_engine *engine, int64_t timeout_ns) {
  struct kvs_reclaims *reclaims = &engine->reclaims;
  uint64_t deadline = kvs_deadline(timeout_ns);
  if (reclaiming) return false;
  kvs_reclaim_retry(engine);
  if (engine->device->stepped) return !kvs_reclaim_pending(engine);
  pthread_mutex_lock(&reclaims->lock);
  pthread_cond_broadcast(&reclaims->changed); /* a thread that pauses looks whether it is still needed */
  while (reclaims->threaded && !is_drained_locked(engine) &&
         kvs_cond_wait(&reclaims->changed, &reclaims->lock, deadline))
    continue;
  bool drained = is_drained_locked(engine);
  pthread_mutex_unlock(&reclaims->lock);
  return drained;
}
