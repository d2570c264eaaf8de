/* Arguments: one parser driven by a table of names, and the conversions of plain values. Every message begins with the
 * name of the argument and, in a list, the index. */
#include "py/args.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

const char *const kvs_py_priority_names[3] = {"normal", "high", "background"};

static int find_name(const struct kvs_py_args *spec, PyObject *key) {
  for (int i = 0; i < spec->total; i++)
    if (PyUnicode_CompareWithASCIIString(key, spec->names[i]) == 0) return i;
  return -1;
}

/* An unknown keyword: name the nearest one, else all. Always -1. */
static int unknown_keyword(const struct kvs_py_args *spec, PyObject *key) {
  PyObject *names = PyList_New(0), *module = NULL, *close = NULL;
  for (int i = 0; names && i < spec->total; i++) {
    PyObject *name = PyUnicode_FromString(spec->names[i]);
    if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  if (names) module = PyImport_ImportModule("difflib");
  if (module) close = PyObject_CallMethod(module, "get_close_matches", "OOi", key, names, 1);
  if (close && PyList_GET_SIZE(close) == 1)
    PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R: did you mean %R?", spec->function, key,
                 PyList_GET_ITEM(close, 0));
  else if (close)
    PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R: it takes %R", spec->function, key,
                 names);
  Py_XDECREF(close);
  Py_XDECREF(module);
  Py_XDECREF(names);
  return -1;
}

static int take_keywords(const struct kvs_py_args *spec, PyObject *const *args, PyObject *kwnames, PyObject **values) {
  Py_ssize_t count = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t k = 0; k < count; k++) {
    PyObject *key = PyTuple_GET_ITEM(kwnames, k);
    int at = find_name(spec, key);
    if (at < 0) return unknown_keyword(spec, key);
    if (values[at]) {
      PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument %R", spec->function, key);
      return -1;
    }
    values[at] = args[k];
  }
  return 0;
}

int kvs_py_args_parse(const struct kvs_py_args *spec, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                      PyObject **values) {
  if (nargs > spec->positional) {
    PyErr_Format(PyExc_TypeError, "%s() takes at most %d positional arguments (%zd given)", spec->function,
                 spec->positional, nargs);
    return -1;
  }
  for (int i = 0; i < spec->total; i++) values[i] = i < nargs ? args[i] : NULL;
  if (take_keywords(spec, args + nargs, kwnames, values) < 0) return -1;
  for (int i = 0; i < spec->required; i++) {
    if (values[i]) continue;
    PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'", spec->function, spec->names[i]);
    return -1;
  }
  return 0;
}

int kvs_py_complain(PyObject *exception, const char *name, Py_ssize_t index, const char *format, ...) {
  va_list list;
  va_start(list, format);
  PyObject *text = PyUnicode_FromFormatV(format, list);
  va_end(list);
  if (!text) return -1;
  if (index < 0)
    PyErr_Format(exception, "%s %U", name, text);
  else
    PyErr_Format(exception, "%s[%zd] %U", name, index, text);
  Py_DECREF(text);
  return -1;
}

/* A Python int from any object with __index__. bool is refused: it is a mistake here. */
static PyObject *exact_int(PyObject *value, const char *name, Py_ssize_t index) {
  if (PyLong_CheckExact(value)) return Py_NewRef(value);
  PyObject *number = PyBool_Check(value) || !PyIndex_Check(value) ? NULL : PyNumber_Index(value);
  if (number) return number;
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return NULL;
    PyErr_Clear();
  }
  bool real = PyFloat_Check(value);
  kvs_py_complain(PyExc_TypeError, name, index,
                  real ? "must be an int, not %s (%R): pass int(x), or divide with //" : "must be an int, not %s",
                  Py_TYPE(value)->tp_name, value);
  return NULL;
}

/* Replaces OverflowError, which does not name the argument. */
static int out_of_range(PyObject *number, const char *name, Py_ssize_t index, const char *range) {
  if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return -1;
  PyErr_Clear();
  return kvs_py_complain(PyExc_ValueError, name, index, "is %S: must be %s", number, range);
}

int kvs_py_int64(PyObject *value, const char *name, Py_ssize_t index, int64_t *number) {
  PyObject *exact = exact_int(value, name, index);
  if (!exact) return -1;
  *number = PyLong_AsLongLong(exact);
  int rc = *number == -1 && PyErr_Occurred() ? out_of_range(exact, name, index, "a signed 64-bit number") : 0;
  Py_DECREF(exact);
  return rc;
}

int kvs_py_uint64(PyObject *value, const char *name, Py_ssize_t index, uint64_t *number) {
  PyObject *exact = exact_int(value, name, index);
  if (!exact) return -1;
  *number = PyLong_AsUnsignedLongLong(exact); /* OverflowError for a negative number too */
  int rc = 0, beyond;
  if (*number == UINT64_MAX && PyErr_Occurred()) {
    PyErr_Clear(); /* OverflowError, which does not name the argument */
    (void)PyLong_AsLongLongAndOverflow(exact, &beyond);
    rc = kvs_py_complain(PyExc_ValueError, name, index, "is %S: must %s", exact,
                         beyond > 0 ? "be less than 2**64" : "not be negative");
  }
  Py_DECREF(exact);
  return rc;
}

int kvs_py_choice(PyObject *value, const char *name, const char *const *choices, int count) {
  bool text = PyUnicode_Check(value);
  for (int i = 0; text && i < count; i++)
    if (PyUnicode_CompareWithASCIIString(value, choices[i]) == 0) return i;
  char all[120] = "";
  int used = 0;
  for (int i = 0; i < count && used >= 0 && (size_t)used < sizeof all; i++)
    used += snprintf(all + used, sizeof all - (size_t)used, "%s'%s'", i == 0 ? "" : ", ", choices[i]);
  if (!text)
    return kvs_py_complain(PyExc_TypeError, name, -1, "must be a str, one of %s, not %s", all, Py_TYPE(value)->tp_name);
  return kvs_py_complain(PyExc_ValueError, name, -1, "is %R: must be one of %s", value, all);
}

int kvs_py_timeout(PyObject *value, const char *name, int64_t *ns) {
  *ns = -1;
  if (!value || value == Py_None) return 0;
  double seconds = PyBool_Check(value) ? -1.0 : PyFloat_AsDouble(value);
  bool error = PyErr_Occurred() != NULL, large = error && PyErr_ExceptionMatches(PyExc_OverflowError);
  if (error && !large && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
  if (error) PyErr_Clear();
  if (PyBool_Check(value) || (error && !large))
    return kvs_py_complain(PyExc_TypeError, name, -1, "must be a number of seconds or None, not %s",
                           Py_TYPE(value)->tp_name);
  if (large) { /* an int beyond a double */
    PyObject *zero = PyLong_FromLong(0);
    int positive = zero ? PyObject_RichCompareBool(value, zero, Py_GT) : -1;
    Py_XDECREF(zero);
    if (positive < 0) return -1;
    seconds = positive ? 9e9 : -1.0;
  }
  if (!(seconds >= 0)) {
    PyObject *shown = PyFloat_FromDouble(seconds);
    int rc =
        shown ? kvs_py_complain(PyExc_ValueError, name, -1, "is %R: must be 0 or more seconds", large ? shown : value)
              : -1;
    Py_XDECREF(shown);
    return rc;
  }
  if (seconds < 9e9) *ns = (int64_t)(seconds * 1e9); /* beyond 285 years: no limit */
  return 0;
}

int kvs_py_attribute(PyObject *object, PyObject *name, PyObject **value) {
  *value = PyObject_GetAttr(object, name);
  if (*value) return 1;
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
  PyErr_Clear();
  return 0;
}

int kvs_py_same_length(const char *name, size_t count, const char *other, size_t expected) {
  if (count == expected) return 0;
  PyErr_Format(PyExc_ValueError, "%s has %zu items, but %s has %zu", name, count, other, expected);
  return -1;
}

int kvs_py_not_contiguous(PyObject *object, const char *name, Py_ssize_t index) {
  PyObject *shape = PyObject_GetAttrString(object, "shape");
  if (!shape) PyErr_Clear();
  kvs_py_complain(PyExc_ValueError, name, index,
                  "is not contiguous (shape %S): to use its memory in place pass its address, data_ptr() or "
                  ".ctypes.data, and a stride; a contiguous copy has other memory, so it serves as a source only",
                  shape ? shape : Py_None);
  Py_XDECREF(shape);
  return -1;
}
