/* Waiting so that Ctrl-C works: the core's waits call back, and the callback looks for signals. */
#ifndef KVS_PY_WAIT_H
#define KVS_PY_WAIT_H

#include "base/wait.h"
#include "py/bind.h"
#include "py/races.h"

bool kvs_py_signalled(void *thread); /* PyThreadState **: saved */
/* One statement without the GIL, whose waits end on Ctrl-C as if their limit had passed. Then kvs_py_waited(). */
#define KVS_PY_WAITING(state, ...)                                                                                     \
  do {                                                                                                                 \
    kvs_py_tell_races(state); /* also the races that other threads' calls found */                                     \
    PyThreadState *saved = PyEval_SaveThread();                                                                        \
    struct kvs_interrupt before = kvs_interrupt_set((struct kvs_interrupt){kvs_py_signalled, &saved});                 \
    __VA_ARGS__;                                                                                                       \
    (void)kvs_interrupt_set(before);                                                                                   \
    PyEval_RestoreThread(saved);                                                                                       \
  } while (0)
/* 0; or -1 with the exception of a signal, or of rc. what: for TimeoutError's message; NULL: the core's. */
int kvs_py_waited(struct kvs_py_state *state, int rc, struct kvs_error *err, int64_t timeout_ns, const char *what);
/* kvs_engine_collect() without the GIL, because it takes locks of lanes. Owners' destructors acquire the GIL. */
void kvs_py_collect(struct kvs_engine *engine);
/* The same, and wait for threads that have taken ended transfers and not yet released their objects. -1: raised. */
int kvs_py_wait_collected(struct kvs_py_state *state, struct kvs_engine *engine, int64_t timeout_ns);
/* wait(arg) in slices, without the GIL. */
int kvs_py_wait(struct kvs_py_state *state, kvs_wait_function *wait, void *arg, int64_t timeout_ns, const char *what);
int kvs_py_patience(PyObject *value, int64_t *timeout_ns); /* timeout=60: NULL, seconds or None; -1: raised */
/* Allocate from the engine; if memory is short, wait for frees under way. 0, or -1 with an exception. */
int kvs_py_alloc(struct kvs_py_state *, struct kvs_engine *, uint64_t nbytes, enum kvs_alloc, uint64_t *ptr);

/* query() and synchronize(timeout=None) of streams and events. poll() returns KVS_OK or KVS_NOT_READY. */
typedef int (*kvs_py_poll_function)(void *object, struct kvs_error *err);
struct kvs_py_waiting {
  kvs_py_poll_function poll;
  void *object;
  bool stepped;     /* of the device */
  const char *what; /* for the message of a TimeoutError */
};
PyObject *kvs_py_query(struct kvs_py_state *state, kvs_py_poll_function poll, void *object);
PyObject *kvs_py_synchronize(struct kvs_py_state *state, const struct kvs_py_waiting *waiting, PyObject *const *args,
                             Py_ssize_t nargs, PyObject *kwnames);

/* Run work(arg) on a new thread. Ctrl-C ends the wait, not the thread. 0: done, the caller owns arg. -1: an exception
 * is set, and arg is discarded now or when the thread ends. `work` and `discard` run without the GIL. */
int kvs_py_apart(struct kvs_py_state *state, int (*work)(void *arg, struct kvs_error *err), void (*discard)(void *arg),
                 void *arg);

#endif
