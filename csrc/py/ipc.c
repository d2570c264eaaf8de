/* The underscored functions behind kvswap.memory: exports as bytes, and opening them; and behind
 * kvswap.fastdeploy's segments: the driver's handle in an export, and an export from a handle. */
#include "py/address.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/event.h"
#include "py/mapped.h"
#include "py/memory.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/wait.h"

#include <string.h>

/* -- exporting ----------------------------------------------------------------------------------------------------- */

static int read_text(PyObject *value, const char *name, char *text, size_t capacity) {
  Py_ssize_t length;
  if (!kvs_py_given(value)) return 0;
  if (!PyUnicode_Check(value))
    return kvs_py_complain(PyExc_TypeError, name, -1, "must be a str, not %s", Py_TYPE(value)->tp_name);
  const char *utf8 = PyUnicode_AsUTF8AndSize(value, &length);
  if (!utf8) return -1;
  if ((size_t)length >= capacity || strlen(utf8) != (size_t)length)
    return kvs_py_complain(PyExc_ValueError, name, -1, "is %R: must be at most %zu bytes of UTF-8, none of them 0",
                           value, capacity - 1);
  memcpy(text, utf8, (size_t)length + 1);
  return 0;
}

static int read_shape(PyObject *value, struct kvs_export *made) {
  if (!kvs_py_given(value)) return 0;
  PyObject *items = PySequence_Tuple(value);
  if (!items) return -1;
  Py_ssize_t count = PyTuple_GET_SIZE(items);
  int rc = 0;
  if (count > KVS_EXPORT_DIMS)
    rc = kvs_py_complain(PyExc_ValueError, "shape", -1, "has %zd dimensions: at most %d travel", count,
                         (int)KVS_EXPORT_DIMS);
  for (Py_ssize_t i = 0; rc == 0 && i < count; i++)
    rc = kvs_py_uint64(PyTuple_GET_ITEM(items, i), "shape", i, &made->shape[i]);
  made->ndim = (uint32_t)count;
  Py_DECREF(items);
  return rc;
}

/* Bytes from a pool's first to its last. */
static uint64_t extent_of(const struct kvs_pool_layout *layout) {
  uint64_t row = layout->block_nbytes / layout->rows;
  return (layout->num_blocks - 1) * layout->stride + (layout->rows - 1) * layout->pitch + row;
}

static int take_pool(struct kvs_py_state *state, PyObject *pool, struct kvs_export *made) {
  struct kvs_pool_layout layout;
  struct kvs_error err = {0};
  if (kvs_pool_check_open(kvs_py_pool_core(pool), &err)) {
    kvs_py_raise(state, &err);
    return -1;
  }
  kvs_pool_get_layout(kvs_py_pool_core(pool), &layout);
  made->address = layout.ptr;
  made->nbytes = extent_of(&layout);
  made->num_blocks = layout.num_blocks;
  made->block_nbytes = layout.block_nbytes;
  made->stride = layout.stride;
  made->rows = layout.rows;
  made->pitch = layout.pitch;
  memcpy(made->pool, layout.name, strlen(layout.name) + 1);
  return 0;
}

static int take_address(struct kvs_py_state *state, PyObject *source, PyObject *nbytes, struct kvs_export *made) {
  struct kvs_py_address address;
  if (kvs_py_read_address(state, source, "source", -1, false, NULL, &address) < 0) return -1;
  made->address = address.ptr;
  made->nbytes = address.nbytes;
  if (!kvs_py_given(nbytes) && made->nbytes == UINT64_MAX)
    return kvs_py_complain(PyExc_ValueError, "nbytes", -1, "is needed where source is a plain address");
  if (!kvs_py_given(nbytes)) return 0;
  if (kvs_py_uint64(nbytes, "nbytes", -1, &made->nbytes) < 0) return -1;
  if (made->nbytes <= address.nbytes) return 0;
  return kvs_py_complain(PyExc_ValueError, "nbytes", -1, "is %llu, but source has %llu bytes",
                         (unsigned long long)made->nbytes, (unsigned long long)address.nbytes);
}

/* The memory's device; kvswap's own objects know theirs. */
static struct kvs_engine *engine_of(struct kvs_py_state *state, PyObject *source, PyObject *device,
                                    const struct kvs_export *made) {
  PyObject *type = (PyObject *)Py_TYPE(source);
  struct kvs_engine *engine = NULL;
  if (type == state->pool_type) engine = kvs_pool_engine(kvs_py_pool_core(source));
  if (type == state->memory_type) engine = kvs_py_memory_engine(source);
  if (engine && !kvs_py_given(device)) {
    kvs_engine_ref(engine);
    return engine;
  }
  return kvs_py_given(device) ? kvs_py_engine_from(state, device) : kvs_py_engine_of(state, &made->address, 1);
}

/* Name of the capsule that owns the server of an export's chunks. */
static const char SERVER[] = "kvswap.server";

static void drop_server(PyObject *capsule) {
  struct kvs_server *server = PyCapsule_GetPointer(capsule, SERVER);
  KVS_PY_NO_GIL(kvs_server_free(server));
}

static PyObject *export_result(const unsigned char *bytes, struct kvs_server *server) {
  PyObject *keeper = server ? PyCapsule_New(server, SERVER, drop_server) : Py_NewRef(Py_None);
  if (!keeper) {
    kvs_server_free(server);
    return NULL;
  }
  return Py_BuildValue("(y#N)", (const char *)bytes, (Py_ssize_t)KVS_EXPORT_NBYTES, keeper);
}

static PyObject *ipc_export(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  enum { SOURCE, DEVICE, SIZE, DTYPE, SHAPE, GENERATION, COUNT };
  static const char *const names[] = {"source", "device", "nbytes", "dtype", "shape", "generation"};
  static const struct kvs_py_args spec = {"_ipc_export", names, 1, 1, COUNT};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_export made = {0};
  struct kvs_error err = {0};
  PyObject *values[COUNT];
  unsigned char bytes[KVS_EXPORT_NBYTES];
  struct kvs_server *server = NULL;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (read_text(values[DTYPE], "dtype", made.dtype, sizeof made.dtype) < 0) return NULL;
  if (read_shape(values[SHAPE], &made) < 0) return NULL;
  if (values[GENERATION] && kvs_py_uint64(values[GENERATION], "generation", -1, &made.generation) < 0) return NULL;
  rc = (PyObject *)Py_TYPE(values[SOURCE]) == state->pool_type
           ? take_pool(state, values[SOURCE], &made)
           : take_address(state, values[SOURCE], values[SIZE], &made);
  if (rc < 0) return NULL;
  struct kvs_engine *engine = engine_of(state, values[SOURCE], values[DEVICE], &made);
  if (!engine) return NULL;
  KVS_PY_NO_GIL(rc = kvs_export_make(engine, &made, &server, &err));
  kvs_engine_unref(engine);
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  kvs_export_write(&made, bytes);
  return export_result(bytes, server);
}

static PyObject *ipc_stop(PyObject *module, PyObject *capsule) {
  (void)module;
  struct kvs_server *server = PyCapsule_GetPointer(capsule, SERVER);
  if (!server || PyCapsule_SetDestructor(capsule, NULL) < 0) return NULL;
  if (PyCapsule_SetName(capsule, "stopped") < 0) return NULL;
  KVS_PY_NO_GIL(kvs_server_free(server)); /* waits for the server's thread */
  Py_RETURN_NONE;
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

static int read_export(struct kvs_py_state *state, PyObject *data, struct kvs_export *made) {
  struct kvs_error err = {0};
  Py_buffer view;
  if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return -1;
  int rc = kvs_export_read(view.buf, (size_t)view.len, made, &err);
  PyBuffer_Release(&view);
  if (rc == KVS_OK) return 0;
  kvs_py_raise(state, &err);
  return -1;
}

static PyObject *ipc_read(PyObject *module, PyObject *data) {
  struct kvs_export from;
  if (read_export(PyModule_GetState(module), data, &from) < 0) return NULL;
  PyObject *shape = PyTuple_New((Py_ssize_t)from.ndim);
  for (uint32_t i = 0; shape && i < from.ndim; i++) {
    PyObject *count = PyLong_FromUnsignedLongLong(from.shape[i]);
    if (!count)
      Py_CLEAR(shape);
    else
      PyTuple_SET_ITEM(shape, (Py_ssize_t)i, count);
  }
  if (!shape) return NULL;
  return Py_BuildValue("{s:s, s:y#, s:L, s:K, s:K, s:K, s:K, s:s, s:N, s:K, s:K, s:K, s:K, s:K}", "device", from.device,
                       "uuid", from.uuid, (Py_ssize_t)sizeof from.uuid, "pid", (long long)from.pid, "generation",
                       (unsigned long long)from.generation, "allocation_nbytes",
                       (unsigned long long)from.allocation_nbytes, "offset", (unsigned long long)from.offset, "nbytes",
                       (unsigned long long)from.nbytes, "dtype", from.dtype, "shape", shape, "num_blocks",
                       (unsigned long long)from.num_blocks, "block_nbytes", (unsigned long long)from.block_nbytes,
                       "stride", (unsigned long long)from.stride, "rows", (unsigned long long)from.rows, "pitch",
                       (unsigned long long)from.pitch);
}

static struct kvs_engine *engine_for(struct kvs_py_state *state, PyObject *device, const struct kvs_export *from) {
  struct kvs_engine *engine = NULL;
  struct kvs_error err = {0};
  int rc;
  if (kvs_py_given(device)) return kvs_py_engine_from(state, device);
  KVS_PY_NO_GIL(rc = kvs_export_device(from, &engine, &err));
  return rc == KVS_OK ? engine : (kvs_py_raise(state, &err), NULL);
}

struct mapped_opening {
  struct kvs_opening *opening;
  struct kvs_mapped *mapped;
};

static int open_slice(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  struct mapped_opening *open = arg;
  return kvs_opening_wait(open->opening, timeout_ns, &open->mapped, err);
}

static PyObject *ipc_open(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  enum { DATA, DEVICE, GENERATION, COUNT };
  static const char *const names[] = {"data", "device", "generation"};
  static const struct kvs_py_args spec = {"_ipc_open", names, 1, 1, COUNT};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_export from;
  struct kvs_error err = {0};
  struct mapped_opening open = {NULL, NULL};
  PyObject *values[COUNT];
  uint64_t generation = 0;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  bool wanted = kvs_py_given(values[GENERATION]);
  if (wanted && kvs_py_uint64(values[GENERATION], "generation", -1, &generation) < 0) return NULL;
  if (read_export(state, values[DATA], &from) < 0) return NULL;
  struct kvs_engine *engine = engine_for(state, values[DEVICE], &from);
  if (!engine) return NULL;
  KVS_PY_NO_GIL(rc = kvs_opening_start(engine, &from, wanted ? &generation : NULL, &open.opening, &err));
  PyObject *result = NULL;
  if (rc != KVS_OK)
    kvs_py_raise(state, &err);
  else if (kvs_py_wait(state, open_slice, &open, -1, "opening") == 0) /* the exchange has its own limit */
    result = kvs_py_mapped_new(state, open.mapped, engine);
  if (open.opening) kvs_opening_drop(open.opening);
  kvs_engine_unref(engine); /* the mapping holds its own reference */
  return result;
}

/* -- events -------------------------------------------------------------------------------------------------------- */

static PyObject *ipc_export_event(PyObject *module, PyObject *event) {
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_export made = {0};
  struct kvs_error err = {0};
  unsigned char bytes[KVS_EXPORT_NBYTES];
  uint64_t handle;
  int rc;
  if ((PyObject *)Py_TYPE(event) != state->event_type)
    return kvs_py_complain(PyExc_TypeError, "event", -1, "must be a kvswap.Event, not %s", Py_TYPE(event)->tp_name),
           NULL;
  struct kvs_engine *engine = kvs_py_event_engine(event, &handle);
  KVS_PY_NO_GIL(rc = kvs_export_event(engine, handle, &made, &err));
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  kvs_export_write(&made, bytes);
  return PyBytes_FromStringAndSize((const char *)bytes, sizeof bytes);
}

static PyObject *ipc_open_event(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"data", "device"};
  static const struct kvs_py_args spec = {"_ipc_open_event", names, 1, 1, 2};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_export from;
  struct kvs_error err = {0};
  PyObject *values[2];
  uint64_t handle = 0;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (read_export(state, values[0], &from) < 0) return NULL;
  struct kvs_engine *engine = engine_for(state, values[1], &from);
  if (!engine) return NULL;
  KVS_PY_NO_GIL(rc = kvs_open_event(engine, &from, &handle, &err));
  PyObject *event = rc == KVS_OK ? kvs_py_event_new(state, engine, handle) : kvs_py_raise(state, &err);
  kvs_engine_unref(engine);
  return event;
}

/* -- handles of the driver, for segments of kvswap.fastdeploy ------------------------------------------------------ */

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
  if (!engine) return NULL;
  int rc = kvs_export_from_handle(engine, handle, nbytes, &made, &err);
  kvs_engine_unref(engine);
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  kvs_export_write(&made, bytes);
  return PyBytes_FromStringAndSize((const char *)bytes, sizeof bytes);
}

/* -- docs ---------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(ipc_export_event_doc, "_ipc_export_event($module, event, /)\n--\n\nAn interprocess event as bytes.");
PyDoc_STRVAR(ipc_open_event_doc, "_ipc_open_event($module, /, data, *, device=None)\n--\n\nOpen an exported event.");
PyDoc_STRVAR(
    ipc_export_doc,
    "_ipc_export($module, /, source, *, device=None, nbytes=None, dtype='', shape=(), generation=0)\n--\n\n"
    "Device memory (a tensor, Memory, Pool or address) as the bytes of struct kvs_export, and the server of its "
    "chunks or None.");
PyDoc_STRVAR(ipc_stop_doc, "_ipc_stop($module, server, /)\n--\n\nStop serving. Call once.");
PyDoc_STRVAR(
    ipc_read_doc,
    "_ipc_read($module, data, /)\n--\n\nThe fields of an export's bytes, as a dict. ValueError: not an export.");
PyDoc_STRVAR(
    ipc_open_doc,
    "_ipc_open($module, /, data, *, device=None, generation=None)\n--\n\nOpen an export's bytes; returns a Mapped.");

PyDoc_STRVAR(ipc_handle_doc,
             "_ipc_handle($module, data, /)\n--\n\nThe driver's 64-byte handle in an export, of the whole allocation.");
PyDoc_STRVAR(ipc_of_handle_doc, "_ipc_of_handle($module, /, handle, device, nbytes)\n--\n\n"
                                "An export from a foreign handle, whose allocation has at least nbytes bytes.");

PyMethodDef kvs_py_ipc_methods[] = {
    {"_ipc_export", KVS_PY_FASTCALL(ipc_export), METH_FASTCALL | METH_KEYWORDS, ipc_export_doc},
    {"_ipc_stop", ipc_stop, METH_O, ipc_stop_doc},
    {"_ipc_read", ipc_read, METH_O, ipc_read_doc},
    {"_ipc_open", KVS_PY_FASTCALL(ipc_open), METH_FASTCALL | METH_KEYWORDS, ipc_open_doc},
    {"_ipc_export_event", ipc_export_event, METH_O, ipc_export_event_doc},
    {"_ipc_open_event", KVS_PY_FASTCALL(ipc_open_event), METH_FASTCALL | METH_KEYWORDS, ipc_open_event_doc},
    {"_ipc_handle", ipc_handle, METH_O, ipc_handle_doc},
    {"_ipc_of_handle", KVS_PY_FASTCALL(ipc_of_handle), METH_FASTCALL | METH_KEYWORDS, ipc_of_handle_doc},
    {NULL, NULL, 0, NULL},
};
