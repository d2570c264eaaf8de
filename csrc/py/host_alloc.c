/* host_alloc, host_free, host_register, host_unregister: pinned memory by plain addresses. */
#include "bind.h"

static PyObject *host_alloc(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"nbytes", "device"};
  static const struct kvs_py_args spec = {"host_alloc", names, 1, 1, 2};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_error err = {0};
  PyObject *values[2];
  uint64_t nbytes, ptr = 0;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_uint64(values[0], "nbytes", -1, &nbytes) < 0) return NULL;
  struct kvs_engine *engine = kvs_py_engine_from(state, values[1]);
  if (engine == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS
  rc = kvs_host_alloc(engine, nbytes, &ptr, &err);
  kvs_engine_unref(engine);
  Py_END_ALLOW_THREADS
  return rc == KVS_OK ? PyLong_FromUnsignedLongLong(ptr) : kvs_py_raise(state, &err);
}

static PyObject *host_register(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"ptr", "nbytes", "device"};
  static const struct kvs_py_args spec = {"host_register", names, 2, 2, 3};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_py_address address;
  struct kvs_error err = {0};
  PyObject *values[3];
  uint64_t nbytes;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_address(state, values[0], "ptr", -1, false, NULL, &address) < 0) return NULL;
  if (kvs_py_uint64(values[1], "nbytes", -1, &nbytes) < 0) return NULL;
  if (nbytes > address.nbytes) {
    PyErr_Format(PyExc_ValueError, "nbytes is %llu, but ptr is a tensor of %llu bytes", (unsigned long long)nbytes,
                 (unsigned long long)address.nbytes);
    return NULL;
  }
  struct kvs_engine *engine = kvs_py_engine_from(state, values[2]);
  if (engine == NULL) return NULL;
  Py_BEGIN_ALLOW_THREADS
  rc = kvs_host_register(engine, address.ptr, nbytes, &err);
  kvs_engine_unref(engine);
  Py_END_ALLOW_THREADS
  return rc == KVS_OK ? Py_NewRef(Py_None) : kvs_py_raise(state, &err);
}

static PyObject *give_back(PyObject *module, PyObject *ptr, int (*function)(uint64_t, struct kvs_error *)) {
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_py_address address;
  struct kvs_error err = {0};
  int rc;
  if (kvs_py_address(state, ptr, "ptr", -1, false, NULL, &address) < 0) return NULL;
  Py_BEGIN_ALLOW_THREADS /* it waits for transfers */
  rc = function(address.ptr, &err);
  Py_END_ALLOW_THREADS
  return rc == KVS_OK ? Py_NewRef(Py_None) : kvs_py_raise(state, &err);
}

static PyObject *host_free(PyObject *module, PyObject *ptr) { return give_back(module, ptr, kvs_host_free); }

static PyObject *host_unregister(PyObject *module, PyObject *ptr) {
  return give_back(module, ptr, kvs_host_unregister);
}

PyDoc_STRVAR(host_alloc_doc,
             "host_alloc($module, /, nbytes, *, device=None)\n--\n\n"
             "Pinned host memory for callers who keep a plain address; returns it. Freed by host_free() alone.\n\n"
             "device: Device, its name, or None: as Device(None); every GPU of the process can copy it. MemoryError.");
PyDoc_STRVAR(host_free_doc,
             "host_free($module, ptr, /)\n--\n\n"
             "Free what host_alloc() returned. First waits for the transfers that may use it (after 60 s TimeoutError, "
             "and\nnothing was freed). ValueError: it is none, or was freed already.");
PyDoc_STRVAR(host_register_doc,
             "host_register($module, /, ptr, nbytes, *, device=None)\n--\n\n"
             "Pin the caller's host memory: an address, or a tensor, and its bytes. It must stay mapped until\n"
             "host_unregister(). Copies are split at its ends, so pieces of one pool can be registered one by one.\n\n"
             "ValueError: it overlaps what is registered or allocated. kvswap.DeviceError: the driver refuses.");
PyDoc_STRVAR(
    host_unregister_doc,
    "host_unregister($module, ptr, /)\n--\n\n"
    "Take host_register() back. First waits, as host_free() does. ValueError: nothing was registered there, or "
    "no\nlonger is.");

PyMethodDef kvs_py_host_methods[] = {
    {"host_alloc", KVS_PY_FASTCALL(host_alloc), METH_FASTCALL | METH_KEYWORDS, host_alloc_doc},
    {"host_free", host_free, METH_O, host_free_doc},
    {"host_register", KVS_PY_FASTCALL(host_register), METH_FASTCALL | METH_KEYWORDS, host_register_doc},
    {"host_unregister", host_unregister, METH_O, host_unregister_doc},
    {NULL, NULL, 0, NULL},
};
