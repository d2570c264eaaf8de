/* Waiting: the core waits without the GIL, and calls back now and then to look for signals, so that Ctrl-C works.
 * A call that reads or writes the disk may take long or never end: it runs on a thread of its own, which goes on after
 * Ctrl-C and discards its argument at its end. */
#include "py/wait.h"
#include "base/thread.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/objects.h"

#include <pthread.h>
#include <stdlib.h>

#define PATIENCE_NS (INT64_C(60) * 1000000000)

void kvs_py_collect(struct kvs_engine *engine) { KVS_PY_NO_GIL(kvs_engine_collect(engine)); }

bool kvs_py_signalled(void *thread) {
  PyThreadState **saved = thread;
  PyEval_RestoreThread(*saved);
  bool stop = PyErr_CheckSignals() < 0;
  *saved = PyEval_SaveThread();
  return stop;
}

int kvs_py_waited(struct kvs_py_state *state, int rc, struct kvs_error *err, int64_t timeout_ns, const char *what) {
  if (PyErr_Occurred()) return -1;
  if (rc == KVS_OK) return 0;
  if (rc == KVS_TIMEOUT && what)
    kvs_fail(err, KVS_TIMEOUT, "%s did not end within %g s; it goes on", what, (double)timeout_ns * 1e-9);
  kvs_py_raise(state, err);
  return -1;
}

int kvs_py_wait(struct kvs_py_state *state, kvs_wait_function *wait, void *arg, int64_t timeout_ns, const char *what) {
  struct kvs_error err = {0};
  int rc;
  KVS_PY_WAITING(state, rc = kvs_wait_slices(wait, arg, timeout_ns, &err));
  return kvs_py_waited(state, rc, &err, timeout_ns, what);
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
  return value ? kvs_py_timeout(value, "timeout", timeout_ns) : 0;
}

int kvs_py_alloc(struct kvs_py_state *state, struct kvs_engine *engine, uint64_t nbytes, enum kvs_alloc kind,
                 uint64_t *ptr) {
  struct kvs_error err = {0};
  int rc;
  KVS_PY_WAITING(state, rc = kvs_engine_alloc_within(engine, nbytes, kind, PATIENCE_NS, ptr, &err));
  return kvs_py_waited(state, rc, &err, PATIENCE_NS, "the driver's allocation");
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

static int wait_ended(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  struct apart_call *apart = arg;
  const uint64_t deadline = kvs_deadline(timeout_ns);
  pthread_mutex_lock(&apart->lock);
  while (!apart->done && kvs_cond_wait(&apart->ended, &apart->lock, deadline)) continue;
  bool done = apart->done;
  pthread_mutex_unlock(&apart->lock);
  return done ? KVS_OK : kvs_fail(err, KVS_TIMEOUT, "it goes on");
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
  if (!apart) {
    PyErr_NoMemory();
    discard(arg);
    return -1;
  }
  *apart = (struct apart_call){.work = work, .discard = discard, .arg = arg};
  pthread_mutex_init(&apart->lock, NULL);
  kvs_cond_init(&apart->ended);
  bool started;
  Py_BEGIN_ALLOW_THREADS
  started = start(apart);
  if (!started) serve(apart); /* no thread could be started: run in this one */
  Py_END_ALLOW_THREADS
  int rc = kvs_py_wait(state, wait_ended, apart, -1, NULL);
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
