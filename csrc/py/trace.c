/* A hook round the calls that submit transfers, for NVTX ranges and spans (kvswap.tracing). Without a hook a call costs
 * one load of a flag more. */
#include "trace.h"

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
  PyObject *hook = name == NULL ? NULL : PyObject_GetItem(state->hooks, name);
  PyObject *end = hook == NULL || hook == Py_None ? NULL : PyObject_CallFunction(hook, "s", what);
  if (PyErr_Occurred()) set_aside(hook);
  Py_XDECREF(name);
  Py_XDECREF(hook);
  if (end == Py_None) Py_CLEAR(end);
  return end;
}

PyObject *kvs_py_trace_end(PyObject *end, PyObject *result) {
  PyObject *type, *value, *traceback;
  if (end == NULL) return result;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject *done =
      PyObject_CallFunctionObjArgs(end, result == NULL ? Py_None : result, type == NULL ? Py_None : type, NULL);
  if (done == NULL) set_aside(end);
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
