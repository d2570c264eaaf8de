/* The race checker in Python: the calling line, a hook for found races, and the private functions behind
 * kvswap.testing. */
#include "py/races.h"
#include "py/args.h"
#include "py/module.h"
#include "py/objects.h"

#include <frameobject.h>
#include <stdio.h>
#include <string.h>

/* -- the calling line ---------------------------------------------------------------------------------------------- */

/* "/.../kvswap/": frames of this folder are skipped. A new reference to a str. */
static PyObject *package_folder(struct kvs_py_state *state) {
  PyObject *module = PyType_GetModule((PyTypeObject *)state->pool_type);
  PyObject *file = module ? PyModule_GetFilenameObject(module) : NULL;
  if (!file) return NULL;
  Py_ssize_t length = PyUnicode_GET_LENGTH(file);
  Py_ssize_t slash = PyUnicode_FindChar(file, '/', 0, length, -1);
  PyObject *folder = slash < 0 ? NULL : PyUnicode_Substring(file, 0, slash + 1);
  Py_DECREF(file);
  return folder;
}

static int is_ours(PyCodeObject *code, PyObject *folder) {
  PyObject *file = PyObject_GetAttrString((PyObject *)code, "co_filename");
  Py_ssize_t ours = file ? PyUnicode_Tailmatch(file, folder, 0, PY_SSIZE_T_MAX, -1) : -1;
  Py_XDECREF(file);
  return (int)ours;
}

static int describe(PyFrameObject *frame, PyCodeObject *code, char *text, size_t capacity) {
  PyObject *file = PyObject_GetAttrString((PyObject *)code, "co_filename");
  PyObject *name = file ? PyObject_GetAttrString((PyObject *)code, "co_name") : NULL;
  const char *path = name ? PyUnicode_AsUTF8(file) : NULL;
  const char *function = path ? PyUnicode_AsUTF8(name) : NULL;
  if (function) {
    const char *slash = strrchr(path, '/');
    snprintf(text, capacity, "%s:%d in %s", slash ? slash + 1 : path, PyFrame_GetLineNumber(frame), function);
  }
  Py_XDECREF(name);
  Py_XDECREF(file);
  return function ? 0 : -1;
}

/* The innermost frame outside the package. */
static int find_caller(PyObject *folder, char *text, size_t capacity) {
  PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
  int rc = 1;
  while (frame && rc == 1) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    rc = is_ours(code, folder);
    if (rc == 0) rc = describe(frame, code, text, capacity);
    Py_DECREF(code);
    PyFrameObject *outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return rc;
}

const char *kvs_py_where(struct kvs_py_state *state, char *text, size_t capacity) {
  if (!kvs_racecheck_active()) return NULL;
  text[0] = '\0';
  PyObject *folder = package_folder(state);
  int rc = folder ? find_caller(folder, text, capacity) : -1;
  Py_XDECREF(folder);
  if (rc < 0) PyErr_Clear(); /* report without the line */
  return text;
}

/* -- the hook ------------------------------------------------------------------------------------------------------ */

/* Two threads may both call the hook for the same races: taking them gives each race once. */
void kvs_py_tell_races(struct kvs_py_state *state) {
  PyObject *type, *value, *traceback;
  if (!kvs_racecheck_active()) return;
  uint64_t found = kvs_racecheck_found();
  if (atomic_exchange(&state->races_told, found) == found) return;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject *hook = PyObject_GetItem(state->hooks, state->s_race);
  PyObject *done = !hook || hook == Py_None ? NULL : PyObject_CallNoArgs(hook);
  if (!hook)
    PyErr_Clear(); /* none was ever set */
  else if (!done && hook != Py_None)
    PyErr_WriteUnraisable(hook); /* the submission has succeeded: do not raise from it */
  Py_XDECREF(done);
  Py_XDECREF(hook);
  PyErr_Restore(type, value, traceback);
}

static PyObject *set_race_hook(PyObject *module, PyObject *hook) {
  struct kvs_py_state *state = PyModule_GetState(module);
  if (hook != Py_None && !PyCallable_Check(hook))
    return kvs_py_complain(PyExc_TypeError, "hook", -1, "must be callable or None, not %s", Py_TYPE(hook)->tp_name),
           NULL;
  PyObject *before = PyObject_GetItem(state->hooks, state->s_race);
  if (!before) {
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) return NULL;
    PyErr_Clear();
    before = Py_NewRef(Py_None);
  }
  if (PyObject_SetItem(state->hooks, state->s_race, hook) == 0) return before;
  Py_DECREF(before);
  return NULL;
}

/* -- taking found races -------------------------------------------------------------------------------------------- */

/* A text that was cut at its buffer's end may end inside a character. */
static PyObject *text_of(const char *text) { return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace"); }

static PyObject *accessor_of(const struct kvs_race_accessor *accessor) {
  return Py_BuildValue("(NKKKNNN)", PyBool_FromLong(accessor->write), (unsigned long long)accessor->transfer,
                       (unsigned long long)accessor->lane, (unsigned long long)accessor->sequence,
                       text_of(accessor->what), text_of(accessor->stream), text_of(accessor->where));
}

static int append_race(PyObject *list, const struct kvs_race *race) {
  PyObject *made = Py_BuildValue("(NKNN)", text_of(race->pool), (unsigned long long)race->slot,
                                 accessor_of(&race->first), accessor_of(&race->second));
  int rc = made ? PyList_Append(list, made) : -1;
  Py_XDECREF(made);
  return rc;
}

static PyObject *racecheck_take(PyObject *module, PyObject *unused) {
  enum { AT_ONCE = 32 };
  (void)module, (void)unused;
  PyObject *list = PyList_New(0);
  struct kvs_race *races = PyMem_Calloc(AT_ONCE, sizeof *races);
  size_t taken = AT_ONCE;
  if (!races) PyErr_NoMemory();
  if (!races) Py_CLEAR(list);
  while (list && taken == AT_ONCE) {
    taken = kvs_racecheck_take(races, AT_ONCE);
    for (size_t i = 0; list && i < taken; i++)
      if (append_race(list, &races[i]) < 0) Py_CLEAR(list);
  }
  PyMem_Free(races);
  return list;
}

static PyObject *racecheck_start(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  kvs_racecheck_start();
  Py_RETURN_NONE;
}

static PyObject *racecheck_stop(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  kvs_racecheck_stop();
  Py_RETURN_NONE;
}

PyDoc_STRVAR(set_race_hook_doc,
             "_set_race_hook($module, hook, /)\n--\n\n"
             "hook() is called after a call that submits, notes or waits while new races have been found; None: "
             "nothing is.\n"
             "Returns the previous hook.");
PyDoc_STRVAR(racecheck_start_doc, "_racecheck_start($module, /)\n--\n\nStart the checker. Starts and stops nest.");
PyDoc_STRVAR(racecheck_stop_doc, "_racecheck_stop($module, /)\n--\n\nUndo one start.");
PyDoc_STRVAR(racecheck_take_doc,
             "_racecheck_take($module, /)\n--\n\n"
             "The races not taken yet, at most 1000, oldest first: (pool, slot, first, second), each access being\n"
             "(write, transfer, lane, sequence, what, stream, where).");

PyMethodDef kvs_py_race_methods[] = {
    {"_set_race_hook", set_race_hook, METH_O, set_race_hook_doc},
    {"_racecheck_start", racecheck_start, METH_NOARGS, racecheck_start_doc},
    {"_racecheck_stop", racecheck_stop, METH_NOARGS, racecheck_stop_doc},
    {"_racecheck_take", racecheck_take, METH_NOARGS, racecheck_take_doc},
    {NULL, NULL, 0, NULL},
};
