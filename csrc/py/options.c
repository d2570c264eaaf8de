/* The options common to all submitting functions, the submission itself, and the hook round
 * the calls that submit. */
#include "py/options.h"
#include "base/wait.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/races.h"
#include "py/wait.h"

#include <math.h>
#include <strings.h>
#include <time.h>

enum common { STREAM, AFTER, PATH, PRIORITY, MAX_CTAS, PACE_GBPS };
enum layered { LAYER_EVENTS, AFTER_LAYERS };

/* Runs inside kvs_engine_collect(), which kvs_shutdown() and an engine's destruction call too, with or without GIL. */

void kvs_py_release_owner(void *owner) {
  PyGILState_STATE gil = PyGILState_Ensure();
  Py_DECREF((PyObject *)owner);
  PyGILState_Release(gil);
}

/* "D2H", in any case. */
static bool is_word(PyObject *value, const char *word) {
  const char *text = PyUnicode_Check(value) ? PyUnicode_AsUTF8(value) : NULL;
  if (!text) PyErr_Clear();
  return text && strcasecmp(text, word) == 0;
}

const char *const kvs_py_direction_names[3] = {[KVS_D2H] = "d2h", [KVS_H2D] = "h2d", [KVS_OTHER_DIRECTION] = "other"};

int kvs_py_direction(PyObject *value, int64_t *direction) {
  if (!PyBool_Check(value) && PyIndex_Check(value)) {
    if (kvs_py_int64(value, "direction", -1, direction) == 0) {
      if (*direction == KVS_D2H || *direction == KVS_H2D) return 0;
    } else if (!PyErr_ExceptionMatches(PyExc_ValueError)) {
      return -1;
    }
    PyErr_Clear();
  }
  bool down = is_word(value, "D2H");
  *direction = down ? KVS_D2H : KVS_H2D;
  if (down || is_word(value, "H2D")) return 0;
  return kvs_py_complain(PyExc_ValueError, "direction", -1,
                         "is %R: must be 0 (\"D2H\", GPU to host) or 1 (\"H2D\", host to GPU)", value);
}

int kvs_py_path(PyObject *value, const char *name, bool with_auto) {
  const char *names[KVS_PATHS];
  const int first = with_auto ? 0 : 1;
  for (int path = first; path < KVS_PATHS; path++) names[path - first] = kvs_path_name((enum kvs_path)path);
  int choice = kvs_py_choice(value, name, names, KVS_PATHS - first);
  return choice < 0 ? -1 : choice + first;
}

static int read_choices(PyObject *const *common, struct kvs_options *core) {
  if (common[PATH]) {
    int path = kvs_py_path(common[PATH], "path", true);
    if (path < 0) return -1;
    core->path = (enum kvs_path)path;
  }
  if (kvs_py_given(common[PRIORITY])) {
    int priority = kvs_py_choice(common[PRIORITY], "priority", kvs_py_priority_names, 3);
    if (priority < 0) return -1;
    core->priority = (enum kvs_priority)(KVS_PRIORITY_NORMAL + priority);
  }
  return 0;
}

static int read_limits(PyObject *const *common, struct kvs_options *core) {
  if (kvs_py_given(common[MAX_CTAS])) {
    uint64_t ctas;
    if (kvs_py_uint64(common[MAX_CTAS], "max_ctas", -1, &ctas) < 0) return -1;
    if (ctas == 0 || ctas > 1024)
      return kvs_py_complain(PyExc_ValueError, "max_ctas", -1, "is %R: must be 1 to 1024, or None", common[MAX_CTAS]);
    core->max_ctas = (unsigned)ctas;
  }
  if (kvs_py_given(common[PACE_GBPS])) {
    core->pace_gbps = PyFloat_AsDouble(common[PACE_GBPS]);
    if (core->pace_gbps == -1.0 && PyErr_Occurred()) {
      if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
      PyErr_Clear();
      return kvs_py_complain(PyExc_TypeError, "pace_gbps", -1, "must be a number, not %s",
                             Py_TYPE(common[PACE_GBPS])->tp_name);
    }
    if (!(core->pace_gbps > 0) || isinf(core->pace_gbps))
      return kvs_py_complain(PyExc_ValueError, "pace_gbps", -1, "is %R: must be above 0, or None", common[PACE_GBPS]);
  }
  return 0;
}

int kvs_py_options_check(struct kvs_py_options *options) {
  if (read_choices(options->common, &options->core) < 0 || read_limits(options->common, &options->core) < 0) return -1;
  if (!options->layered || !options->layered[LAYER_EVENTS]) return 0;
  int events = PyObject_IsTrue(options->layered[LAYER_EVENTS]);
  options->core.layer_events = events == 1;
  return events < 0 ? -1 : 0;
}

static int read_layers(struct kvs_py_state *state, struct kvs_engine *engine, size_t layers,
                       struct kvs_py_options *options) {
  PyObject *value = options->layered ? options->layered[AFTER_LAYERS] : NULL;
  if (!kvs_py_given(value)) return 0;
  if (kvs_py_after_layers(state, value, engine, layers, &options->after_layers) < 0) return -1;
  options->core.after_layers = options->after_layers.items;
  options->core.nafter_layers = options->after_layers.count;
  return 0;
}

int kvs_py_options_read(struct kvs_py_state *state, struct kvs_engine *engine, size_t layers,
                        struct kvs_py_options *options) {
  PyObject *const *common = options->common;
  struct kvs_options *core = &options->core;
  if (kvs_py_given(common[STREAM])) {
    if (kvs_py_stream_handle(state, common[STREAM], "stream", engine, &core->stream) < 0) return -1;
    core->on_stream = true;
  }
  if (kvs_py_read_after(state, common[AFTER], engine, &options->after) < 0) return -1;
  core->after = options->after.items;
  core->nafter = options->after.count;
  if (read_layers(state, engine, layers, options) < 0) return -1;
  core->owner = options->hold;
  core->release = options->hold ? kvs_py_release_owner : NULL;
  core->where = kvs_py_where(state, options->where, sizeof options->where);
  return 0;
}

void kvs_py_options_clear(struct kvs_py_options *options) {
  kvs_py_after_clear(&options->after);
  kvs_py_after_clear(&options->after_layers);
  PyMem_Free(options->more_after);
  Py_XDECREF(options->hold);
}

/* One attempt, and after a refusal a slice of waiting for another transfer's end. */
static int try_submit(struct kvs_engine *engine, int (*submit)(void *call, struct kvs_error *err), void *call,
                      bool patient, struct kvs_error *err) {
  static const struct timespec pause = {.tv_nsec =
                                            1000000}; /* ends in other lanes are no reason to plan again at once */
  struct kvs_error ignored;
  int rc;
  kvs_py_collect(engine);
  Py_BEGIN_ALLOW_THREADS
  uint64_t ended = kvs_engine_ended(engine);
  rc = submit(call, err);
  if (rc == KVS_QUEUE_FULL && patient) {
    (void)kvs_engine_wait_ended(engine, ended, KVS_SLICE_NS, &ignored);
    nanosleep(&pause, NULL);
  }
  Py_END_ALLOW_THREADS
  return rc;
}

int kvs_py_submit(struct kvs_py_state *state, struct kvs_engine *engine, struct kvs_py_options *options,
                  int (*submit)(void *call, struct kvs_error *err), void *call) {
  uint64_t deadline = kvs_deadline(options->patient ? KVS_PY_ROOM_NS : 0);
  if (options->patient) options->core.since_ns = kvs_clock_ns();
  struct kvs_error err = {0};
  int rc;
  while ((rc = try_submit(engine, submit, call, options->patient, &err)) == KVS_QUEUE_FULL &&
         kvs_clock_ns() < deadline) {
    if (PyErr_CheckSignals() < 0) return -1;
    kvs_engine_uncount_full(engine);
  }
  if (rc != KVS_OK) {
    kvs_py_raise(state, &err);
    return -1;
  }
  options->hold = NULL; /* the engine owns it now */
  kvs_py_tell_races(state);
  return 0;
}

/* -- a hook round the calls ---------------------------------------------------------------------------------------- */

static const char key[] = "trace";

/* The transfer does not fail for what the hook raises. Ctrl-C is not the hook's: it comes again. */
static void set_aside(PyObject *hook) {
  if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    PyErr_Clear();
    PyErr_SetInterrupt();
  } else {
    PyErr_WriteUnraisable(hook);
  }
}

PyObject *kvs_py_trace_begin(struct kvs_py_state *state, const char *what) {
  if (!atomic_load_explicit(&state->traced, memory_order_relaxed)) return NULL;
  PyObject *name = PyUnicode_FromString(key);
  PyObject *hook = name ? PyObject_GetItem(state->hooks, name) : NULL;
  PyObject *end = !hook || hook == Py_None ? NULL : PyObject_CallFunction(hook, "s", what);
  if (PyErr_Occurred()) set_aside(hook);
  Py_XDECREF(name);
  Py_XDECREF(hook);
  if (end == Py_None) Py_CLEAR(end);
  return end;
}

PyObject *kvs_py_trace_end(PyObject *end, PyObject *result) {
  PyObject *type, *value, *traceback;
  if (!end) return result;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject *done = PyObject_CallFunctionObjArgs(end, result ? result : Py_None, type ? type : Py_None, NULL);
  if (!done) set_aside(end);
  Py_XDECREF(done);
  Py_DECREF(end);
  PyErr_Restore(type, value, traceback);
  return result;
}

static PyObject *set_trace_hook(PyObject *module, PyObject *hook) {
  struct kvs_py_state *state = PyModule_GetState(module);
  if (hook != Py_None && !PyCallable_Check(hook))
    return kvs_py_complain(PyExc_TypeError, "hook", -1, "must be callable or None, not %s", Py_TYPE(hook)->tp_name),
           NULL;
  if (PyDict_SetItemString(state->hooks, key, hook) < 0) return NULL;
  atomic_store(&state->traced, hook != Py_None);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(
    set_trace_hook_doc,
    "_set_trace_hook($module, hook, /)\n--\n\n"
    "hook(function) is called at the begin of each call that submits; None: nothing is. If it returns a "
    "callable, that is called\nat the end of the call with what the call returns, or None, and with the type of "
    "the exception that it raises, or None.");

PyMethodDef kvs_py_trace_methods[] = {
    {"_set_trace_hook", set_trace_hook, METH_O, set_trace_hook_doc},
    {NULL, NULL, 0, NULL},
};
