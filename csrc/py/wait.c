/* Waiting: the core waits without the GIL in slices. Between slices Python checks for signals, so that Ctrl-C works.
 * A call that reads or writes the disk may take long or never end: it runs on a thread of its own, which goes on after
 * Ctrl-C and discards its argument at its end. */
#include "../base/wait.h"
#include "../base/thread.h"
#include "../memory/reclaim.h"
#include "args.h"
#include "errors.h"
#include "objects.h"
#include "races.h"
#include "wait.h"

#include <pthread.h>
#include <stdlib.h>

#define PATIENCE_NS (INT64_C(60) * 1000000000)

void kvs_py_collect(struct kvs_engine *engine) { KVS_PY_NO_GIL(kvs_engine_collect(engine)); }

int kvs_py_wait(struct kvs_py_state *state, kvs_py_wait_function wait, void *arg, int64_t timeout_ns,
                const char *what) {
  int64_t start = timeout_ns < 0 ? 0 : (int64_t)kvs_clock_ns();
  int64_t left = timeout_ns;
  kvs_py_tell_races(state); /* also the races that other threads' calls found */
  for (;;) {
    struct kvs_error err = {0};
    int64_t slice = left >= 0 && left < KVS_PY_SLICE_NS ? left : KVS_PY_SLICE_NS;
    int rc;
    KVS_PY_NO_GIL(rc = wait(arg, slice, &err));
    if (rc == KVS_OK) return 0;
    if (rc == KVS_TIMEOUT && timeout_ns >= 0) left = timeout_ns - ((int64_t)kvs_clock_ns() - start);
    if (rc == KVS_TIMEOUT && timeout_ns >= 0 && left <= 0)
      kvs_fail(&err, KVS_TIMEOUT, "%s did not end within %g s; it goes on", what, (double)timeout_ns * 1e-9);
    if (rc != KVS_TIMEOUT || (timeout_ns >= 0 && left <= 0)) {
      kvs_py_raise(state, &err);
      return -1;
    }
    if (PyErr_CheckSignals() < 0) return -1;
  }
}

static int release_slice(void *unused, int64_t timeout_ns, struct kvs_error *err) {
  (void)unused;
  return kvs_release_wait(timeout_ns, err);
}

int kvs_py_wait_collected(struct kvs_py_state *state, struct kvs_engine *engine, int64_t timeout_ns) {
  kvs_py_collect(engine);
  return kvs_py_wait(state, release_slice, NULL, timeout_ns, "another thread's release");
}

PyObject *kvs_py_query(struct kvs_py_state *state, kvs_py_poll_function poll, void *object) {
  struct kvs_error err = {0};
  int rc;
  KVS_PY_NO_GIL(rc = poll(object, &err));
  if (rc != KVS_OK && rc != KVS_NOT_READY) return kvs_py_raise(state, &err);
  return PyBool_FromLong(rc == KVS_OK);
}

static int wait_polling(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  const struct kvs_py_waiting *waiting = arg;
  return kvs_wait_until(waiting->poll, waiting->object, waiting->stepped, timeout_ns, err);
}

PyObject *kvs_py_synchronize(struct kvs_py_state *state, const struct kvs_py_waiting *waiting, PyObject *const *args,
                             Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"timeout"};
  static const struct kvs_py_args spec = {"synchronize", names, 0, 1, 1};
  struct kvs_py_waiting copy = *waiting;
  PyObject *value;
  int64_t timeout_ns;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_timeout(value, "timeout", &timeout_ns) < 0) return NULL;
  if (kvs_py_wait(state, wait_polling, &copy, timeout_ns, waiting->what) < 0) return NULL;
  Py_RETURN_NONE;
}

/* -- freeing memory ------------------------------------------------------------------------------------------------ */

int kvs_py_patience(PyObject *value, int64_t *timeout_ns) {
  *timeout_ns = PATIENCE_NS;
  return value == NULL ? 0 : kvs_py_timeout(value, "timeout", timeout_ns);
}

static int wait_reclaim(void *task, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_reclaim_wait(task, timeout_ns, err);
}

int kvs_py_wait_reclaim(struct kvs_py_state *state, struct kvs_reclaim *task, int64_t timeout_ns, const char *what) {
  int rc = kvs_py_wait(state, wait_reclaim, task, timeout_ns, what);
  KVS_PY_NO_GIL(kvs_reclaim_leave(task, KVS_LEAVE_DROP));
  return rc;
}

enum kvs_py_given_back kvs_py_give_back(struct kvs_py_state *state, struct kvs_reclaim *task, bool registration,
                                        int64_t timeout_ns) {
  bool withdrawn;
  int rc = kvs_py_wait(state, wait_reclaim, task, timeout_ns, "work that may use this memory");
  KVS_PY_NO_GIL(withdrawn = kvs_reclaim_leave(task, registration ? KVS_LEAVE_RESULT : KVS_LEAVE_WITHDRAW));
  if (rc == 0) return KVS_PY_GIVEN;
  if (withdrawn) return KVS_PY_KEPT;
  /* The free was submitted to the driver and will complete. */
  if (!registration && PyErr_ExceptionMatches(PyExc_TimeoutError)) PyErr_Clear();
  return KVS_PY_GIVEN;
}

struct allocating {
  struct kvs_allocating *core;
  uint64_t *ptr;
  int rc;
  struct kvs_error err;
};

static int wait_alloc(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  struct allocating *a = arg;
  a->rc = kvs_engine_alloc_wait(a->core, timeout_ns, a->ptr, &a->err);
  if (a->rc == KVS_TIMEOUT) *err = a->err;
  return a->rc == KVS_TIMEOUT ? KVS_TIMEOUT : KVS_OK;
}

int kvs_py_alloc(struct kvs_py_state *state, struct kvs_engine *engine, uint64_t nbytes, enum kvs_alloc kind,
                 uint64_t *ptr) {
  int64_t start = (int64_t)kvs_clock_ns(), left;
  do {
    struct allocating a = {.ptr = ptr};
    bool more = false;
    KVS_PY_NO_GIL(a.rc = kvs_engine_alloc_start(engine, nbytes, kind, &a.core, &a.err));
    if (a.rc != KVS_OK) return kvs_py_raise(state, &a.err), -1;
    int waited = kvs_py_wait(state, wait_alloc, &a, PATIENCE_NS, "the driver's allocation");
    Py_BEGIN_ALLOW_THREADS
    kvs_engine_alloc_leave(a.core);
    if (waited == 0 && a.rc == KVS_NOMEM) { /* what is being freed may make room */
      more = kvs_reclaim_goes_on(engine);
      if (more) (void)kvs_reclaim_drain(engine, KVS_PY_SLICE_NS);
    }
    Py_END_ALLOW_THREADS
    left = PATIENCE_NS - ((int64_t)kvs_clock_ns() - start);
    if (waited < 0) return -1;
    if (a.rc == KVS_OK) return 0;
    if (!more || left <= 0) return kvs_py_raise(state, &a.err), -1;
  } while (PyErr_CheckSignals() == 0);
  return -1;
}

/* -- on a thread of its own ---------------------------------------------------------------------------------------- */

struct apart_call {
  int (*work)(void *arg, struct kvs_error *err);
  void (*discard)(void *arg);
  void *arg;
  pthread_mutex_t lock;
  pthread_cond_t ended;
  bool done, left; /* guarded by lock: work() has returned; the caller has stopped waiting */
  int rc;
  struct kvs_error err;
};

static void free_apart(struct apart_call *apart) {
  pthread_cond_destroy(&apart->ended);
  pthread_mutex_destroy(&apart->lock);
  free(apart);
}

static void *serve(void *arg) {
  struct apart_call *apart = arg;
  int rc = apart->work(apart->arg, &apart->err);
  pthread_mutex_lock(&apart->lock);
  apart->rc = rc;
  apart->done = true;
  bool left = apart->left;
  pthread_cond_signal(&apart->ended);
  pthread_mutex_unlock(&apart->lock);
  if (left) {
    apart->discard(apart->arg);
    free_apart(apart);
  }
  return NULL;
}

static bool start(struct apart_call *apart) {
  pthread_t thread;
  int code = kvs_thread_start(&thread, NULL, serve, apart);
  if (code == 0) pthread_detach(thread);
  return code == 0;
}

static bool wait_slice(struct apart_call *apart) {
  const uint64_t deadline = kvs_deadline(KVS_PY_SLICE_NS);
  pthread_mutex_lock(&apart->lock);
  while (!apart->done && kvs_cond_wait(&apart->ended, &apart->lock, deadline)) continue;
  bool done = apart->done;
  pthread_mutex_unlock(&apart->lock);
  return done;
}

/* Stop waiting. True: the thread owns `apart` from now on. False: work() has returned meanwhile. */
static bool leave(struct apart_call *apart) {
  pthread_mutex_lock(&apart->lock);
  bool left = apart->left = !apart->done;
  pthread_mutex_unlock(&apart->lock);
  return left;
}

int kvs_py_apart(struct kvs_py_state *state, int (*work)(void *, struct kvs_error *), void (*discard)(void *),
                 void *arg) {
  struct apart_call *apart = calloc(1, sizeof *apart);
  if (apart == NULL) {
    PyErr_NoMemory();
    discard(arg);
    return -1;
  }
  *apart = (struct apart_call){.work = work, .discard = discard, .arg = arg};
  pthread_mutex_init(&apart->lock, NULL);
  kvs_cond_init(&apart->ended);
  bool done = false, started;
  int rc = 0;
  Py_BEGIN_ALLOW_THREADS
  started = start(apart);
  if (!started) serve(apart); /* no thread could be started: run in this one */
  Py_END_ALLOW_THREADS
  while (!done && rc == 0) {
    KVS_PY_NO_GIL(done = wait_slice(apart));
    if (!done) rc = PyErr_CheckSignals();
  }
  if (rc < 0 && leave(apart)) return -1;
  if (rc == 0 && apart->rc != KVS_OK) {
    kvs_py_raise(state, &apart->err);
    rc = -1;
  }
  if (rc < 0) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    KVS_PY_NO_GIL(discard(arg));
    PyErr_Restore(type, error, traceback);
  }
  free_apart(apart);
  return rc;
}
