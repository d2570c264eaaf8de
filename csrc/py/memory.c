/* kvswap.Memory, the result of Device.alloc(). `uses` counts exported buffers. Freeing sets it from 0 to FREED by
 * compare-exchange, so that a free and a new export cannot both succeed. And host_alloc, host_free,
 * host_register, host_unregister: pinned memory by plain addresses. */
#include "py/memory.h"
#include "py/address.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/wait.h"

enum { FREED = -1 };

struct memory_object {
  PyObject_HEAD
  struct kvs_engine *engine;
  uint64_t ptr;
  uint64_t nbytes;
  bool host;      /* pinned */
  bool reachable; /* by the CPU */
  atomic_long uses;
};

static struct memory_object *as_memory(PyObject *self) { return (struct memory_object *)self; }

struct kvs_engine *kvs_py_memory_engine(PyObject *memory) { return as_memory(memory)->engine; }

static bool reserve_free(struct memory_object *self) {
  long none = 0;
  return atomic_compare_exchange_strong(&self->uses, &none, FREED);
}

static int raise_freed(struct memory_object *self) {
  struct kvs_error err = {0};
  kvs_fail(&err, KVS_CLOSED, "already freed");
  kvs_py_raise(kvs_py_state_of((PyObject *)self), &err);
  return -1;
}

PyObject *kvs_py_memory_alloc(struct kvs_py_state *state, struct kvs_engine *engine, uint64_t nbytes,
                              enum kvs_alloc kind) {
  PyTypeObject *type = (PyTypeObject *)state->memory_type;
  struct memory_object *self = (struct memory_object *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  atomic_store(&self->uses, FREED);
  kvs_engine_ref(engine);
  self->engine = engine;
  self->nbytes = nbytes;
  self->host = kind == KVS_ALLOC_HOST;
  self->reachable = self->host || kvs_engine_device(engine)->info.driver == 0;
  if (kvs_py_alloc(state, engine, nbytes, kind, &self->ptr) < 0) {
    Py_DECREF(self);
    return NULL;
  }
  atomic_store(&self->uses, 0);
  return (PyObject *)self;
}

static PyObject *memory_free(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"timeout"};
  static const struct kvs_py_args spec = {"free", names, 0, 1, 1};
  struct memory_object *self = as_memory(object);
  struct kvs_py_state *state = kvs_py_state_of(object);
  struct kvs_error err = {0};
  PyObject *value;
  int64_t timeout_ns;
  bool kept;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_patience(value, &timeout_ns) < 0) return NULL;
  if (!reserve_free(self)) {
    if (atomic_load(&self->uses) > 0)
      PyErr_SetString(
          PyExc_BufferError,
          "arrays or transfers of a FileStore still use this memory: drop them, or wait for them, then free it");
    else
      raise_freed(self);
    return NULL;
  }
  KVS_PY_WAITING(state, rc = kvs_engine_free_within(self->engine, self->ptr, timeout_ns, &kept, &err));
  if (kept) atomic_store(&self->uses, 0);
  if (kvs_py_waited(state, rc, &err, timeout_ns, NULL) < 0) return NULL;
  kvs_py_collect(self->engine);
  Py_RETURN_NONE;
}

/* Objects may be dropped on any thread, by the garbage collector too: do not wait. */
static void memory_dealloc(PyObject *object) {
  struct memory_object *self = as_memory(object);
  if (reserve_free(self)) kvs_engine_free_later(self->engine, self->ptr);
  if (self->engine) kvs_engine_unref(self->engine);
  kvs_py_object_free(object);
}

static int memory_getbuffer(PyObject *object, Py_buffer *view, int flags) {
  struct memory_object *self = as_memory(object);
  view->obj = NULL;
  if (!self->reachable) {
    PyErr_Format(PyExc_BufferError, "memory of %s is not readable by the CPU", kvs_engine_name(self->engine));
    return -1;
  }
  long uses = atomic_load(&self->uses);
  do {
    if (uses == FREED) {
      PyErr_SetString(PyExc_BufferError, "already freed");
      return -1;
    }
  } while (!atomic_compare_exchange_weak(&self->uses, &uses, uses + 1));
  if (PyBuffer_FillInfo(view, object, (void *)(uintptr_t)self->ptr, (Py_ssize_t)self->nbytes, 0, flags) == 0) return 0;
  atomic_fetch_sub(&self->uses, 1);
  return -1;
}

static void memory_releasebuffer(PyObject *object, Py_buffer *view) {
  (void)view;
  atomic_fetch_sub(&as_memory(object)->uses, 1);
}

static PyObject *memory_repr(PyObject *object) {
  struct memory_object *self = as_memory(object);
  char size[KVS_SIZE_TEXT];
  kvs_size_text(self->nbytes, size);
  return PyUnicode_FromFormat("<kvswap.Memory %s%s at %p on %s%s>", size, self->host ? " of host memory" : "",
                              (void *)(uintptr_t)self->ptr, kvs_engine_name(self->engine),
                              atomic_load(&self->uses) == FREED ? ", freed" : "");
}

static PyObject *memory_ptr(PyObject *object, void *unused) {
  (void)unused;
  if (atomic_load(&as_memory(object)->uses) != FREED) return PyLong_FromUnsignedLongLong(as_memory(object)->ptr);
  raise_freed(as_memory(object));
  return NULL;
}

static PyObject *memory_data_ptr(PyObject *object, PyObject *unused) {
  (void)unused;
  return memory_ptr(object, NULL);
}

static PyObject *memory_nbytes(PyObject *object, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(as_memory(object)->nbytes);
}

static PyObject *memory_device(PyObject *object, void *unused) {
  (void)unused;
  return kvs_py_device_like(kvs_py_state_of(object), as_memory(object)->engine);
}

static PyObject *memory_host(PyObject *object, void *unused) {
  (void)unused;
  return PyBool_FromLong(as_memory(object)->host);
}

/* Memory that the CPU reads has __array_interface__, GPU memory has the CUDA one; the other must not exist. */
static PyObject *memory_interface(PyObject *object, void *reachable) {
  struct memory_object *self = as_memory(object);
  if (self->reachable != (reachable != NULL)) {
    PyErr_Format(PyExc_AttributeError, "this is %s memory", self->reachable ? "host" : "GPU");
    return NULL;
  }
  PyObject *ptr = memory_ptr(object, NULL);
  if (!ptr) return NULL;
  return Py_BuildValue("{s:(K), s:s, s:(NO), s:O, s:i}", "shape", (unsigned long long)self->nbytes, "typestr", "|u1",
                       "data", ptr, Py_False, "strides", Py_None, "version", 3);
}

PyDoc_STRVAR(
    memory_doc,
    "Memory from Device.alloc(). Dropping the last reference does not wait: the memory is freed once the work\n"
    "that is queued on the device by then has ended.\n\n"
    "It has the buffer protocol (writable bytes) and __array_interface__ if the CPU can read it,\n"
    "__cuda_array_interface__ if it is GPU memory. Accepted as a tensor by all of kvswap.");
PyDoc_STRVAR(
    free_doc,
    "free($self, /, timeout=60.0)\n--\n\n"
    "Free the memory, after waiting for the transfers that may use it and all other work of the device. Transfers of\n"
    "pools in it are refused from then on; one that another thread is just submitting comes before or is refused.\n\n"
    "timeout: seconds, None for no limit; after TimeoutError or Ctrl-C nothing was freed, and free() may be called\n"
    "again, unless the driver is already freeing. BufferError: arrays of it are alive, or transfers of a FileStore\n"
    "are under way in it. kvswap.Error: it is freed already. Any thread may call.");
PyDoc_STRVAR(data_ptr_doc, "data_ptr($self, /)\n--\n\nThe address; the same as ptr. For torch's protocol.");

static PyMethodDef methods[] = {
    {"data_ptr", memory_data_ptr, METH_NOARGS, data_ptr_doc},
    {"free", KVS_PY_FASTCALL(memory_free), METH_FASTCALL | METH_KEYWORDS, free_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"ptr", memory_ptr, NULL, "int: the address. kvswap.Error if freed.", NULL},
    {"nbytes", memory_nbytes, NULL, "int: bytes of the memory.", NULL},
    {"device", memory_device, NULL, "Device: the device that allocated it.", NULL},
    {"host", memory_host, NULL, "bool: pinned host memory.", NULL},
    {"__cuda_array_interface__", memory_interface, NULL, "dict: bytes of a GPU, version 3. AttributeError otherwise.",
     NULL},
    {"__array_interface__", memory_interface, NULL, "dict: bytes that the CPU reads. AttributeError otherwise.",
     (void *)(uintptr_t)1},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)memory_doc},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_repr, memory_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_bf_getbuffer, memory_getbuffer},
    {Py_bf_releasebuffer, memory_releasebuffer},
    {0, NULL},
};

PyType_Spec kvs_py_memory_spec = {
    .name = "kvswap.Memory",
    .basicsize = sizeof(struct memory_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

/* -- pinned memory by plain addresses ------------------------------------------------------------------------------ */

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
  if (!engine) return NULL;
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
  if (!engine) return NULL;
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
  struct kvs_py_address address;
  struct kvs_error err = {0};
  PyObject *values[2];
  int64_t timeout_ns;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_patience(values[1], &timeout_ns) < 0) return NULL;
  if (kvs_py_read_address(state, values[0], "ptr", -1, false, NULL, &address) < 0) return NULL;
  KVS_PY_WAITING(state, rc = kvs_host_give_back(address.ptr, registered, timeout_ns, &err));
  return kvs_py_waited(state, rc, &err, timeout_ns, NULL) < 0 ? NULL : Py_NewRef(Py_None);
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
