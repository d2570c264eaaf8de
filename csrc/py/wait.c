/* Waiting: the core waits without the GIL in slices; between them Python looks for signals, so that Ctrl-C works. */
#include "bind.h"

#include <time.h>

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void kvs_py_collect(struct kvs_engine *engine) {
  Py_BEGIN_ALLOW_THREADS
  kvs_engine_collect(engine);
  Py_END_ALLOW_THREADS
}

int kvs_py_wait(struct kvs_py_state *state, kvs_py_wait_function wait, void *arg, int64_t timeout_ns,
                const char *what) {
  int64_t start = timeout_ns < 0 ? 0 : now_ns();
  int64_t left = timeout_ns;
  for (;;) {
    struct kvs_error err = {0};
    int64_t slice = left >= 0 && left < KVS_PY_SLICE_NS ? left : KVS_PY_SLICE_NS;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = wait(arg, slice, &err);
    Py_END_ALLOW_THREADS
    if (rc == KVS_OK) return 0;
    if (rc == KVS_TIMEOUT && timeout_ns >= 0) left = timeout_ns - (now_ns() - start);
    if (rc == KVS_TIMEOUT && timeout_ns >= 0 && left <= 0)
      kvs_fail(&err, KVS_TIMEOUT, "%s did not end within %g s; it goes on", what, (double)timeout_ns * 1e-9);
    if (rc != KVS_TIMEOUT || (timeout_ns >= 0 && left <= 0)) {
      kvs_py_raise(state, &err);
      return -1;
    }
    if (PyErr_CheckSignals() < 0) return -1;
  }
}
