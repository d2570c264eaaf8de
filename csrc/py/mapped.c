/* kvswap.memory.Mapped, the result of kvswap.memory.open(). `uses` counts exported buffers, as in memory.c. Closing
 * sets it from 0 to CLOSED. */
#include "py/mapped.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/wait.h"

#include <string.h>

enum { CLOSED = -1 };

struct mapped_object {
  PyObject_HEAD
  struct kvs_mapped *mapped;
  struct kvs_engine *engine; /* borrowed from `mapped` */
  bool reachable;            /* by the CPU */
  atomic_long uses;
};

static struct mapped_object *as_mapped(PyObject *self) { return (struct mapped_object *)self; }

static const struct kvs_export *export_of(PyObject *self) { return kvs_mapped_export(as_mapped(self)->mapped); }

static bool is_closed(PyObject *self) { return atomic_load(&as_mapped(self)->uses) == CLOSED; }

PyObject *kvs_py_mapped_new(struct kvs_py_state *state, struct kvs_mapped *mapped, struct kvs_engine *engine) {
  PyTypeObject *type = (PyTypeObject *)state->mapped_type;
  struct mapped_object *self = (struct mapped_object *)type->tp_alloc(type, 0);
  if (!self) {
    kvs_mapped_free(mapped);
    return NULL;
  }
  self->mapped = mapped;
  self->engine = engine;
  self->reachable = kvs_engine_device(engine)->info.driver == 0;
  return (PyObject *)self;
}

static PyObject *raise_closed(PyObject *self) {
  struct kvs_error err = {0};
  kvs_fail(&err, KVS_CLOSED, "already closed");
  return kvs_py_raise(kvs_py_state_of(self), &err);
}

static void mapped_dealloc(PyObject *self) {
  if (as_mapped(self)->mapped) kvs_mapped_free(as_mapped(self)->mapped);
  kvs_py_object_free(self);
}

/* -- closing ------------------------------------------------------------------------------------------------------- */

static int close_slice(void *mapped, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_mapped_close(mapped, timeout_ns, err);
}

static PyObject *close_within(PyObject *self, int64_t timeout_ns) {
  long none = 0;
  if (!atomic_compare_exchange_strong(&as_mapped(self)->uses, &none, CLOSED)) {
    if (none == CLOSED) Py_RETURN_NONE;
    PyErr_SetString(
        PyExc_BufferError,
        "arrays or transfers of a FileStore still use this memory: drop them, or wait for them, then close it");
    return NULL;
  }
  if (kvs_py_wait(kvs_py_state_of(self), close_slice, as_mapped(self)->mapped, timeout_ns,
                  "the work that may use this memory") < 0) {
    bool failed = kvs_mapped_closed(as_mapped(self)->mapped);
    if (!failed) kvs_mapped_keep(as_mapped(self)->mapped); /* the next close() also waits for work queued from now on */
    if (!kvs_mapped_closed(as_mapped(self)->mapped)) atomic_store(&as_mapped(self)->uses, 0);
    if (failed || atomic_load(&as_mapped(self)->uses) != CLOSED || !PyErr_ExceptionMatches(PyExc_TimeoutError))
      return NULL;
    PyErr_Clear(); /* the driver is already unmapping */
  }
  kvs_py_collect(as_mapped(self)->engine);
  Py_RETURN_NONE;
}

enum { PATIENCE_S = 60 };

static PyObject *mapped_close(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"timeout"};
  static const struct kvs_py_args spec = {"close", names, 0, 1, 1};
  PyObject *value;
  int64_t timeout_ns;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_timeout(value, "timeout", &timeout_ns) < 0) return NULL;
  if (!value) timeout_ns = (int64_t)PATIENCE_S * 1000000000;
  return close_within(self, timeout_ns);
}

static PyObject *mapped_enter(PyObject *self, PyObject *unused) {
  (void)unused;
  return is_closed(self) ? raise_closed(self) : Py_NewRef(self);
}

static PyObject *mapped_exit(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)args, (void)nargs;
  return close_within(self, (int64_t)PATIENCE_S * 1000000000);
}

/* -- what it is ---------------------------------------------------------------------------------------------------- */

static int mapped_getbuffer(PyObject *self, Py_buffer *view, int flags) {
  struct mapped_object *mapped = as_mapped(self);
  view->obj = NULL;
  if (!mapped->reachable) {
    PyErr_Format(PyExc_BufferError, "memory of %s is not readable by the CPU", kvs_engine_name(mapped->engine));
    return -1;
  }
  long uses = atomic_load(&mapped->uses);
  do {
    if (uses == CLOSED) {
      PyErr_SetString(PyExc_BufferError, "already closed");
      return -1;
    }
  } while (!atomic_compare_exchange_weak(&mapped->uses, &uses, uses + 1));
  void *ptr = (void *)(uintptr_t)kvs_mapped_ptr(mapped->mapped);
  if (PyBuffer_FillInfo(view, self, ptr, (Py_ssize_t)export_of(self)->nbytes, 0, flags) == 0) return 0;
  atomic_fetch_sub(&mapped->uses, 1);
  return -1;
}

static void mapped_releasebuffer(PyObject *self, Py_buffer *view) {
  (void)view;
  atomic_fetch_sub(&as_mapped(self)->uses, 1);
}

static PyObject *mapped_ptr(PyObject *self, void *unused) {
  (void)unused;
  return is_closed(self) ? raise_closed(self) : PyLong_FromUnsignedLongLong(kvs_mapped_ptr(as_mapped(self)->mapped));
}

static PyObject *mapped_data_ptr(PyObject *self, PyObject *unused) {
  (void)unused;
  return mapped_ptr(self, NULL);
}

/* Memory that the CPU reads has __array_interface__, GPU memory has the CUDA one; the other must not exist. */
static PyObject *mapped_interface(PyObject *self, void *reachable) {
  if (as_mapped(self)->reachable != (reachable != NULL)) {
    PyErr_Format(PyExc_AttributeError, "this is %s memory", as_mapped(self)->reachable ? "host" : "GPU");
    return NULL;
  }
  PyObject *ptr = mapped_ptr(self, NULL);
  if (!ptr) return NULL;
  return Py_BuildValue("{s:(K), s:s, s:(NO), s:O, s:i}", "shape", (unsigned long long)export_of(self)->nbytes,
                       "typestr", "|u1", "data", ptr, Py_False, "strides", Py_None, "version", 3);
}

static PyObject *mapped_alive(PyObject *self, PyObject *unused) {
  (void)unused;
  return PyBool_FromLong(kvs_mapped_alive(as_mapped(self)->mapped));
}

static PyObject *mapped_pool(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"name"};
  static const struct kvs_py_args spec = {"pool", names, 0, 0, 1};
  struct kvs_py_state *state = kvs_py_state_of(self);
  const struct kvs_export *from = export_of(self);
  PyObject *name = NULL;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &name) < 0) return NULL;
  if (is_closed(self)) return raise_closed(self);
  if (from->num_blocks == 0) {
    PyErr_SetString(PyExc_ValueError, "no pool was exported: make a kvswap.Pool of this memory");
    return NULL;
  }
  if (!kvs_mapped_alive(as_mapped(self)->mapped)) {
    struct kvs_error err = {0};
    kvs_fail(&err, KVS_CLOSED, "process %lld, which owns this memory, has ended", (long long)from->pid);
    return kvs_py_raise(state, &err);
  }
  PyObject *device = kvs_py_device_like(state, as_mapped(self)->engine);
  if (!device) return NULL;
  PyObject *given = Py_BuildValue("(NOKK)", device, self, (unsigned long long)from->num_blocks,
                                  (unsigned long long)from->block_nbytes);
  PyObject *named = Py_BuildValue("{s:K, s:K, s:K, s:O}", "stride", (unsigned long long)from->stride, "rows",
                                  (unsigned long long)from->rows, "pitch", (unsigned long long)from->pitch, "name",
                                  name ? name : Py_None);
  PyObject *pool = !given || !named ? NULL : PyObject_Call(state->pool_type, given, named);
  Py_XDECREF(given);
  Py_XDECREF(named);
  return pool;
}

static PyObject *mapped_shape(PyObject *self, void *unused) {
  (void)unused;
  const struct kvs_export *from = export_of(self);
  PyObject *shape = PyTuple_New((Py_ssize_t)from->ndim);
  for (uint32_t i = 0; shape && i < from->ndim; i++) {
    PyObject *count = PyLong_FromUnsignedLongLong(from->shape[i]);
    if (!count)
      Py_CLEAR(shape);
    else
      PyTuple_SET_ITEM(shape, (Py_ssize_t)i, count);
  }
  return shape;
}

static PyObject *mapped_dtype(PyObject *self, void *unused) {
  (void)unused;
  return PyUnicode_DecodeUTF8(export_of(self)->dtype, (Py_ssize_t)strlen(export_of(self)->dtype), "replace");
}

static PyObject *mapped_device(PyObject *self, void *unused) {
  (void)unused;
  return kvs_py_device_like(kvs_py_state_of(self), as_mapped(self)->engine);
}

enum { NBYTES, GENERATION, OWNER };

static PyObject *mapped_number(PyObject *self, void *field) {
  const struct kvs_export *from = export_of(self);
  const uint64_t numbers[] = {[NBYTES] = from->nbytes, [GENERATION] = from->generation, [OWNER] = (uint64_t)from->pid};
  return PyLong_FromUnsignedLongLong(numbers[(uintptr_t)field]);
}

static PyObject *mapped_local(PyObject *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(kvs_mapped_local(as_mapped(self)->mapped));
}

static PyObject *mapped_is_closed(PyObject *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(is_closed(self));
}

static PyObject *mapped_repr(PyObject *self) {
  char size[KVS_SIZE_TEXT];
  kvs_size_text(export_of(self)->nbytes, size);
  return PyUnicode_FromFormat("<kvswap.memory.Mapped %s of process %lld at %p on %s%s>", size,
                              (long long)export_of(self)->pid,
                              (void *)(uintptr_t)kvs_mapped_ptr(as_mapped(self)->mapped),
                              kvs_engine_name(as_mapped(self)->engine), is_closed(self) ? ", closed" : "");
}

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(
    mapped_doc,
    "Device memory of another process, from kvswap.memory.open(). Closed by close(), its with block or its last\n"
    "reference. Accepted as a tensor by all of kvswap; has the protocols of kvswap.Memory.\n\n"
    "The owner may write the bytes at any time, and must not free them while this process uses them. Any\n"
    "thread may use it.");
PyDoc_STRVAR(close_doc,
             "close($self, /, timeout=60.0)\n--\n\n"
             "Unmap the memory after all work queued on the device has ended. Pools of this memory become unusable. A\n"
             "second call does nothing.\n\n"
             "timeout: seconds, None for no limit; TimeoutError leaves the memory open. BufferError: arrays of it are\n"
             "alive. Ctrl-C works.");
PyDoc_STRVAR(alive_doc, "alive($self, /)\n--\n\n"
                        "Whether the process that owns the memory still runs. After its end the bytes may be "
                        "incomplete.");
PyDoc_STRVAR(pool_doc, "pool($self, /, *, name=None)\n--\n\n"
                       "The kvswap.Pool that was exported, as a pool of this process.\n\n"
                       "Transfers of the two processes are not ordered with each other: use events (export_event).\n"
                       "ValueError: no pool was exported. kvswap.Error: the owner has ended, or this is closed.");
PyDoc_STRVAR(data_ptr_doc, "data_ptr($self, /)\n--\n\nThe address; the same as ptr. For torch's protocol.");
PyDoc_STRVAR(enter_doc, "__enter__($self, /)\n--\n\nThe object itself.");
PyDoc_STRVAR(exit_doc, "__exit__($self, type, value, traceback, /)\n--\n\nclose().");

static PyMethodDef methods[] = {
    {"data_ptr", mapped_data_ptr, METH_NOARGS, data_ptr_doc},
    {"pool", KVS_PY_FASTCALL(mapped_pool), METH_FASTCALL | METH_KEYWORDS, pool_doc},
    {"close", KVS_PY_FASTCALL(mapped_close), METH_FASTCALL | METH_KEYWORDS, close_doc},
    {"alive", mapped_alive, METH_NOARGS, alive_doc},
    {"__enter__", mapped_enter, METH_NOARGS, enter_doc},
    {"__exit__", KVS_PY_FASTCALL(mapped_exit), METH_FASTCALL, exit_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"ptr", mapped_ptr, NULL, "int: the address in this process. kvswap.Error if closed.", NULL},
    {"nbytes", mapped_number, NULL, "int: bytes of the memory.", (void *)(uintptr_t)NBYTES},
    {"shape", mapped_shape, NULL, "tuple of int: as it was exported, elements.", NULL},
    {"dtype", mapped_dtype, NULL, "str: as it was exported ('bfloat16'); empty if unknown.", NULL},
    {"generation", mapped_number, NULL, "int: as it was exported.", (void *)(uintptr_t)GENERATION},
    {"owner", mapped_number, NULL, "int: the process that owns it.", (void *)(uintptr_t)OWNER},
    {"local", mapped_local, NULL, "bool: this process is the owner, and ptr is the plain address.", NULL},
    {"closed", mapped_is_closed, NULL, "bool: closed.", NULL},
    {"device", mapped_device, NULL, "Device: the memory's device.", NULL},
    {"__cuda_array_interface__", mapped_interface, NULL, "dict: bytes of a GPU, version 3. AttributeError otherwise.",
     NULL},
    {"__array_interface__", mapped_interface, NULL, "dict: bytes that the CPU reads. AttributeError otherwise.",
     (void *)(uintptr_t)1},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)mapped_doc},
    {Py_tp_dealloc, mapped_dealloc},
    {Py_tp_repr, mapped_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_bf_getbuffer, mapped_getbuffer},
    {Py_bf_releasebuffer, mapped_releasebuffer},
    {0, NULL},
};

PyType_Spec kvs_py_mapped_spec = {
    .name = "kvswap.memory.Mapped",
    .basicsize = sizeof(struct mapped_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
