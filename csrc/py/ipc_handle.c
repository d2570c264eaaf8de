/* Private functions for kvswap.fastdeploy's segments: the driver's handle in an export, and an export from a handle. */
#include "bind.h"

#include <string.h>

enum { HANDLE_NBYTES = sizeof((struct kvs_export *)NULL)->handle };

static PyObject *ipc_handle(PyObject *module, PyObject *data) {
  struct kvs_export from;
  struct kvs_error err = {0};
  Py_buffer view;
  if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return NULL;
  int rc = kvs_export_read(view.buf, (size_t)view.len, &from, &err);
  PyBuffer_Release(&view);
  if (rc != KVS_OK) return kvs_py_raise(PyModule_GetState(module), &err);
  return PyBytes_FromStringAndSize((const char *)from.handle, HANDLE_NBYTES);
}

static int read_handle(PyObject *value, unsigned char handle[HANDLE_NBYTES]) {
  Py_buffer view;
  if (PyObject_GetBuffer(value, &view, PyBUF_SIMPLE) < 0) return -1;
  int rc = 0;
  if (view.len == HANDLE_NBYTES)
    memcpy(handle, view.buf, HANDLE_NBYTES);
  else
    rc =
        kvs_py_complain(PyExc_ValueError, "handle", -1, "has %zd bytes: a handle has %d", view.len, (int)HANDLE_NBYTES);
  PyBuffer_Release(&view);
  return rc;
}

static PyObject *ipc_of_handle(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  enum { HANDLE, DEVICE, SIZE, COUNT };
  static const char *const names[] = {"handle", "device", "nbytes"};
  static const struct kvs_py_args spec = {"_ipc_of_handle", names, COUNT, COUNT, COUNT};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_export made;
  struct kvs_error err = {0};
  PyObject *values[COUNT];
  unsigned char handle[HANDLE_NBYTES], bytes[KVS_EXPORT_NBYTES];
  uint64_t nbytes;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (read_handle(values[HANDLE], handle) < 0) return NULL;
  if (kvs_py_uint64(values[SIZE], "nbytes", -1, &nbytes) < 0) return NULL;
  struct kvs_engine *engine = kvs_py_engine_from(state, values[DEVICE]);
  if (engine == NULL) return NULL;
  int rc = kvs_export_from_handle(engine, handle, nbytes, &made, &err);
  kvs_engine_unref(engine);
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  kvs_export_write(&made, bytes);
  return PyBytes_FromStringAndSize((const char *)bytes, sizeof bytes);
}

PyDoc_STRVAR(ipc_handle_doc,
             "_ipc_handle($module, data, /)\n--\n\nThe driver's 64-byte handle in an export, of the whole allocation.");
PyDoc_STRVAR(ipc_of_handle_doc, "_ipc_of_handle($module, /, handle, device, nbytes)\n--\n\n"
                                "An export from a foreign handle, whose allocation has at least nbytes bytes.");

PyMethodDef kvs_py_ipc_handle_methods[] = {
    {"_ipc_handle", ipc_handle, METH_O, ipc_handle_doc},
    {"_ipc_of_handle", KVS_PY_FASTCALL(ipc_of_handle), METH_FASTCALL | METH_KEYWORDS, ipc_of_handle_doc},
    {NULL, NULL, 0, NULL},
};
