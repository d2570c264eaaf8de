/* kvswap.testing.note_access() and note_order(): accesses and order of work that kvswap does not submit. */
#include "py/args.h"
#include "py/arrays.h"
#include "py/errors.h"
#include "py/handle.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/races.h"

enum { STREAM, POOL, SLOTS, WRITE, OFFSET, NBYTES, ACCESS };

struct access {
  struct kvs_pool *pool;
  struct kvs_ids slots;
  PyObject *keep; /* of slots */
  bool write;
  uint64_t offset, nbytes, stream;
};

static int read_access(struct kvs_py_state *state, PyObject *const *values, struct access *access) {
  PyObject *pool = values[POOL];
  if ((PyObject *)Py_TYPE(pool) != state->pool_type)
    return kvs_py_complain(PyExc_TypeError, "pool", -1, "must be a Pool, not %s", Py_TYPE(pool)->tp_name);
  access->pool = kvs_py_pool_core(pool);
  struct kvs_engine *engine = kvs_pool_engine(access->pool);
  if (kvs_py_stream_handle(state, values[STREAM], "stream", engine, &access->stream) < 0) return -1;
  if (values[OFFSET] && kvs_py_uint64(values[OFFSET], "offset", -1, &access->offset) < 0) return -1;
  if (kvs_py_given(values[NBYTES])) {
    if (kvs_py_uint64(values[NBYTES], "nbytes", -1, &access->nbytes) < 0) return -1;
    if (access->nbytes == 0)
      return kvs_py_complain(PyExc_ValueError, "nbytes", -1, "is 0: must be 1 or more, or None for all to the end");
  }
  if (!PyBool_Check(values[WRITE]))
    return kvs_py_complain(PyExc_TypeError, "write", -1, "must be a bool, not %s", Py_TYPE(values[WRITE])->tp_name);
  access->write = values[WRITE] == Py_True;
  return kvs_py_ids(state, values[SLOTS], "slots", &access->slots, &access->keep);
}

static PyObject *note_access(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"stream", "pool", "slots", "write", "offset", "nbytes"};
  static const struct kvs_py_args spec = {"note_access", names, 4, 4, ACCESS};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct access access = {0};
  struct kvs_error err = {0};
  PyObject *values[ACCESS];
  char text[160];
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0 || read_access(state, values, &access) < 0)
    return NULL;
  const char *where = kvs_py_where(state, text, sizeof text);
  KVS_PY_NO_GIL(rc = kvs_note_access(access.pool, &access.slots, access.write, access.offset, access.nbytes,
                                     access.stream, where, &err));
  Py_DECREF(access.keep);
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  kvs_py_tell_races(state);
  Py_RETURN_NONE;
}

/* -- order --------------------------------------------------------------------------------------------------------- */

enum { BEFORE, AFTER, DEVICE, ORDER };

/* The engine of one of kvswap's objects; borrowed, or NULL. */
static struct kvs_engine *engine_of_object(struct kvs_py_state *state, PyObject *object) {
  PyObject *type = (PyObject *)Py_TYPE(object);
  uint64_t unused;
  if (type == state->stream_type) return kvs_py_stream_engine(object, &unused);
  if (type == state->event_type) return kvs_py_event_engine(object, &unused);
  if (type == state->transfer_type) return kvs_transfer_engine(kvs_py_transfer_core(object));
  return NULL;
}

/* The given device, else that of `after`, where the order takes effect, else that of `before`. */
static struct kvs_engine *find_engine(struct kvs_py_state *state, PyObject *const *values) {
  struct kvs_engine *engine = NULL;
  if (!kvs_py_given(values[DEVICE])) {
    engine = engine_of_object(state, values[AFTER]);
    if (!engine) engine = engine_of_object(state, values[BEFORE]);
  }
  if (engine) {
    kvs_engine_ref(engine);
    return engine;
  }
  bool handle = PyLong_Check(values[BEFORE]) || kvs_py_is_scalar(values[BEFORE]);
  if (kvs_py_given(values[DEVICE]) || !handle) return kvs_py_engine_from(state, values[DEVICE]);
  PyErr_SetString(PyExc_ValueError, "device is needed where before is a plain handle");
  return NULL;
}

static int read_order(struct kvs_py_state *state, PyObject *const *values, struct kvs_engine *engine,
                      struct kvs_after *before, uint64_t *stream) {
  int has = kvs_py_after_one(state, values[BEFORE], "before", engine, before);
  if (has < 0) return -1;
  if (has == 0)
    return kvs_py_complain(PyExc_TypeError, "before", -1, "must be an Event, a Transfer or a stream, not %s",
                           Py_TYPE(values[BEFORE])->tp_name);
  return values[AFTER] == Py_None ? 0 : kvs_py_stream_handle(state, values[AFTER], "after", engine, stream);
}

static PyObject *note_order(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"before", "after", "device"};
  static const struct kvs_py_args spec = {"note_order", names, 2, 2, ORDER};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_after before;
  struct kvs_error err = {0};
  PyObject *values[ORDER];
  uint64_t stream = 0;
  int rc = -1;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  struct kvs_engine *engine = find_engine(state, values);
  if (!engine) return NULL;
  int known = read_order(state, values, engine, &before, &stream);
  if (known == 0) {
    Py_BEGIN_ALLOW_THREADS
    rc = kvs_note_order(engine, &before, values[AFTER] == Py_None, stream, &err);
    Py_END_ALLOW_THREADS
  }
  kvs_engine_unref(engine);
  if (known < 0) return NULL;
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  Py_RETURN_NONE;
}

/* -- docs ---------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    note_access_doc,
    "note_access($module, /, stream, pool, slots, write, *, offset=0, nbytes=None)\n--\n\n"
    "Record that work which kvswap did not submit, now queued on the stream, reads or writes slots of a Pool.\n"
    "\n"
    "A write of whole blocks clears the failure record of their slots: move_blocks() reads them again. Otherwise the\n"
    "call serves the race checker only, and is cheap while that is off. It moves and orders nothing.\n"
    "\n"
    "stream: an int handle, or a torch, cupy or kvswap stream, of the pool's device. slots: an int32 or int64 array\n"
    "  (n,), or a sequence of ints. write: whether it writes. offset, nbytes: which bytes of each block, counted in\n"
    "  the block's own bytes; nbytes None: all from offset to the end.\n"
    "\n"
    "IndexError: a slot that the pool does not have. ValueError: bytes that a block does not have. Any thread may\n"
    "call.");
PyDoc_STRVAR(
    note_order_doc,
    "note_order($module, /, before, after, *, device=None)\n--\n\n"
    "Tell the race checker of an order that was made without kvswap. The call itself orders nothing.\n"
    "\n"
    "before: an Event, a Transfer or a stream: all work queued up to it comes first. after: a stream: work\n"
    "  queued on it from now on comes later; None: the host has waited, so all work that it queues now comes later.\n"
    "device: Device or its name, of these streams; needed only if before is an int handle and after is no\n"
    "  kvswap Stream. Cheap while the checker is off. Any thread may call.");

PyMethodDef kvs_py_note_methods[] = {
    {"note_access", KVS_PY_FASTCALL(note_access), METH_FASTCALL | METH_KEYWORDS, note_access_doc},
    {"note_order", KVS_PY_FASTCALL(note_order), METH_FASTCALL | METH_KEYWORDS, note_order_doc},
    {NULL, NULL, 0, NULL},
};
