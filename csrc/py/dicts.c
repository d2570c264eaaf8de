#include "py/dicts.h"

#include <string.h>

PyObject *kvs_py_of_count(const void *member) { return PyLong_FromUnsignedLongLong(*(const uint64_t *)member); }

PyObject *kvs_py_of_seconds(const void *member) { return PyFloat_FromDouble((double)*(const uint64_t *)member * 1e-9); }

PyObject *kvs_py_of_int(const void *member) { return PyLong_FromLong(*(const int *)member); }

PyObject *kvs_py_of_unsigned(const void *member) { return PyLong_FromUnsignedLong(*(const unsigned *)member); }

PyObject *kvs_py_of_bool(const void *member) { return PyBool_FromLong(*(const bool *)member); }

/* A text that was cut at its buffer's end may end inside a character. */
PyObject *kvs_py_of_text(const void *member) {
  const char *text = member;
  return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

PyObject *kvs_py_of_pointer(const void *member) {
  const char *text = *(const char *const *)member;
  return PyUnicode_FromString(text ? text : "");
}

int kvs_py_put(PyObject *dict, const char *name, PyObject *value) {
  int rc = value ? PyDict_SetItemString(dict, name, value) : -1;
  Py_XDECREF(value);
  return rc;
}

int kvs_py_append(PyObject *list, PyObject *value) {
  int rc = value ? PyList_Append(list, value) : -1;
  Py_XDECREF(value);
  return rc;
}

PyObject *kvs_py_fill(PyObject *dict, const void *from, const struct kvs_py_field *fields, size_t count) {
  for (size_t i = 0; dict && i < count; i++)
    if (kvs_py_put(dict, fields[i].name, fields[i].make((const char *)from + fields[i].offset)) < 0) Py_CLEAR(dict);
  return dict;
}
