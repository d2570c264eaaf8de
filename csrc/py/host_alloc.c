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
  if (kvs_py_alloc(state, engine, nbytes, KVS_ALLOC_HOST, &ptr) < 0) {
    kvs_engine_unref(engine);
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS
  rc = kvs_host_adopt(engine, ptr, &err);
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
  if (kvs_py_read_address(state, values[0], "ptr", -1, false, NULL, &address) < 0) return NULL;
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

static PyObject *give_back(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                           const char *function, bool registered) {
  static const char *const names[] = {"ptr", "timeout"};
  const struct kvs_py_args spec = {function, names, 1, 1, 2};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_host_giving *giving = NULL;
  struct kvs_py_address address;
  struct kvs_error err = {0};
  PyObject *values[2];
  int64_t timeout_ns;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_patience(values[1], &timeout_ns) < 0) return NULL;
  if (kvs_py_read_address(state, values[0], "ptr", -1, false, NULL, &address) < 0) return NULL;
  KVS_PY_NO_GIL(rc = kvs_host_give_start(address.ptr, registered, &giving, &err));
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  bool kept = kvs_py_give_back(state, kvs_host_giving_task(giving), registered, timeout_ns) == KVS_PY_KEPT;
  /* The registration still exists: the caller may try again. */
  kvs_host_give_end(giving, kept || (registered && PyErr_Occurred() != NULL));
  return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *host_free(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  return give_back(module, args, nargs, kwnames, "host_free", false);
}

static PyObject *host_unregister(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  return give_back(module, args, nargs, kwnames, "host_unregister", true);
}

PyDoc_STRVAR(host_alloc_doc,
             "host_alloc($module, /, nbytes, *, device=None)\n--\n\n"
             "Allocate pinned host memory; returns its address. Only host_free() frees it.\n\n"
             "device: Device, its name, or None: as Device(None); every GPU of the process can copy it. MemoryError.");
PyDoc_STRVAR(host_free_doc,
             "host_free($module, /, ptr, *, timeout=60.0)\n--\n\n"
             "Free memory of host_alloc(), after waiting for the transfers that may use it and all other work of the\n"
             "device. timeout: seconds, None for no limit. After TimeoutError or Ctrl-C nothing was freed.\n"
             "ValueError: not an address of host_alloc(), or freed already.");
PyDoc_STRVAR(host_register_doc,
             "host_register($module, /, ptr, nbytes, *, device=None)\n--\n\n"
             "Pin the caller's host memory: an address, or a tensor, and its bytes. It must stay mapped until\n"
             "host_unregister(). Copies are split at its ends, so pieces of one pool can be registered one by one.\n\n"
             "ValueError: it overlaps a registration or an allocation. kvswap.DeviceError: the driver refuses.");
PyDoc_STRVAR(host_unregister_doc,
             "host_unregister($module, /, ptr, *, timeout=60.0)\n--\n\n"
             "Undo host_register(). Waits as host_free() does; after TimeoutError or Ctrl-C call it again.\n"
             "ValueError: nothing is registered there.");
PyMethodDef kvs_py_host_methods[] = {
    {"host_alloc", KVS_PY_FASTCALL(host_alloc), METH_FASTCALL | METH_KEYWORDS, host_alloc_doc},
    {"host_free", KVS_PY_FASTCALL(host_free), METH_FASTCALL | METH_KEYWORDS, host_free_doc},
    {"host_register", KVS_PY_FASTCALL(host_register), METH_FASTCALL | METH_KEYWORDS, host_register_doc},
    {"host_unregister", KVS_PY_FASTCALL(host_unregister), METH_FASTCALL | METH_KEYWORDS, host_unregister_doc},
    {NULL, NULL, 0, NULL},
};
