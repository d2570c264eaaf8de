/* kvswap's exceptions, and the one function that turns the core's error into an exception. */
#include "py/errors.h"
#include "py/objects.h"

#include <string.h>

const char kvs_py_error_row[] = "kvswap.Error";
const char kvs_py_queue_full_row[] = "kvswap.QueueFull";
const char kvs_py_missing_row[] = "kvswap.files.MissingKey";
const char kvs_py_device_error_row[] = "kvswap.DeviceError";

PyDoc_STRVAR(error_doc,
             "Base of kvswap's own errors. Wrong arguments are ValueError, IndexError or TypeError instead, a passed\n"
             "time limit is TimeoutError and exhausted memory MemoryError.");
PyDoc_STRVAR(queue_full_doc,
             "The lane holds its maximum of unfinished transfers. Nothing of the refused call was queued: wait for\n"
             "an earlier transfer and call again.");
PyDoc_STRVAR(missing_doc, "A key is not in the store. A KeyError too, with a plain message.");
PyDoc_STRVAR(device_error_doc,
             "A call of the device's driver failed.\n\n"
             "code: the driver's number (CUresult; a host device uses the same numbers), 0 if there is none.\n"
             "operation: name of the call that failed, or None.");

/* KeyError's own __str__ would quote the message. */
static PyObject *make_missing(PyObject *error) {
  PyObject *bases = PyTuple_Pack(2, error, PyExc_KeyError), *type = NULL;
  PyObject *text = PyObject_GetAttrString(PyExc_Exception, "__str__");
  PyObject *members = text ? Py_BuildValue("{s:O}", "__str__", text) : NULL;
  if (bases && members) type = PyErr_NewExceptionWithDoc(kvs_py_missing_row, missing_doc, bases, members);
  Py_XDECREF(members);
  Py_XDECREF(text);
  Py_XDECREF(bases);
  return type;
}

PyObject *kvs_py_exception_make(PyObject *module, struct kvs_py_state *state, const void *row) {
  (void)module;
  if (row == kvs_py_error_row) return PyErr_NewExceptionWithDoc(kvs_py_error_row, error_doc, NULL, NULL);
  if (row == kvs_py_queue_full_row)
    return PyErr_NewExceptionWithDoc(kvs_py_queue_full_row, queue_full_doc, state->error, NULL);
  if (row == kvs_py_missing_row) return make_missing(state->error);
  PyObject *defaults = Py_BuildValue("{s:i,s:O}", "code", 0, "operation", Py_None);
  if (!defaults) return NULL;
  PyObject *type = PyErr_NewExceptionWithDoc(kvs_py_device_error_row, device_error_doc, state->error, defaults);
  Py_DECREF(defaults);
  return type;
}

static PyObject *exception_type(struct kvs_py_state *state, int status) {
  switch (kvs_status_exception(status)) {
  case KVS_EXC_VALUE:
    return PyExc_ValueError;
  case KVS_EXC_INDEX:
    return PyExc_IndexError;
  case KVS_EXC_TYPE:
    return PyExc_TypeError;
  case KVS_EXC_MEMORY:
    return PyExc_MemoryError;
  case KVS_EXC_TIMEOUT:
    return PyExc_TimeoutError;
  case KVS_EXC_QUEUE_FULL:
    return state->queue_full;
  case KVS_EXC_DEVICE:
    return state->device_error;
  case KVS_EXC_MISSING:
    return state->missing;
  case KVS_EXC_NONE:
  case KVS_EXC_BASE:
    break;
  }
  return state->error;
}

static int set_details(PyObject *exception, const struct kvs_error *err) {
  PyObject *code = PyLong_FromLong(err->code);
  if (!code) return -1;
  int rc = PyObject_SetAttrString(exception, "code", code);
  Py_DECREF(code);
  if (rc < 0 || !err->operation) return rc;
  PyObject *operation = PyUnicode_FromString(err->operation);
  if (!operation) return -1;
  rc = PyObject_SetAttrString(exception, "operation", operation);
  Py_DECREF(operation);
  return rc;
}

PyObject *kvs_py_exception(struct kvs_py_state *state, const struct kvs_error *err) {
  const char *text = err->message[0] != '\0' ? err->message : kvs_status_describe(err->status);
  PyObject *type = exception_type(state, err->status);
  /* "replace": a message that was cut to its buffer may end inside a character */
  PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
  if (!message) return NULL;
  PyObject *exception = PyObject_CallFunctionObjArgs(type, message, NULL);
  Py_DECREF(message);
  if (!exception) return NULL;
  if (type == state->device_error && set_details(exception, err) < 0) Py_CLEAR(exception);
  return exception;
}

PyObject *kvs_py_raise(struct kvs_py_state *state, const struct kvs_error *err) {
  PyObject *exception = kvs_py_exception(state, err);
  if (!exception) return NULL;
  PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
  Py_DECREF(exception);
  return NULL;
}
