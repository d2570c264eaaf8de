/* Runs a call that reads or writes the disk on a thread of its own, so that Ctrl-C ends the wait: the call may take
 * long or never end. After Ctrl-C the thread goes on and discards its argument at its end. */
#include "files.h"

#include <pthread.h>
#include <stdlib.h>

#include "../base/wait.h"
#include "base/thread.h"

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
