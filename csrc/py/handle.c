/* Streams by their driver's handle, and the list of what a transfer starts after. */
#include "py/handle.h"
#include "device/share.h"
#include "py/args.h"
#include "py/arrays.h"
#include "py/objects.h"

/* An argument's name and position, for messages. */
struct argument {
  const char *name;
  Py_ssize_t index; /* -1: not a list */
};

static int same_engine(struct kvs_engine *have, struct kvs_engine *wanted, struct argument place) {
  if (!wanted || have == wanted) return 0;
  return kvs_py_complain(PyExc_ValueError, place.name, place.index, "is of %s, not of %s", kvs_engine_name(have),
                         kvs_engine_name(wanted));
}

/* An attribute as a handle: 1, or 0 if the object has no such attribute. */
static int handle_attribute(PyObject *object, PyObject *attribute, struct argument place, uint64_t *handle) {
  PyObject *value;
  int has = kvs_py_attribute(object, attribute, &value);
  if (has <= 0) return has;
  if (PyCallable_Check(value) || value == Py_None) {
    Py_DECREF(value);
    return 0;
  }
  int rc = kvs_py_uint64(value, place.name, place.index, handle);
  Py_DECREF(value);
  return rc < 0 ? -1 : 1;
}

/* __cuda_stream__: (version, handle), by a method or as an attribute. */
static int from_protocol(struct kvs_py_state *state, PyObject *object, struct argument place, uint64_t *handle) {
  PyObject *pair;
  int has = kvs_py_attribute(object, state->s_cuda_stream_method, &pair);
  if (has <= 0) return has;
  if (PyCallable_Check(pair)) {
    PyObject *called = PyObject_CallNoArgs(pair);
    Py_DECREF(pair);
    if (!called) return -1;
    pair = called;
  }
  uint64_t version = 0;
  int rc = 1;
  if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
    rc = kvs_py_complain(PyExc_TypeError, place.name, place.index,
                         "has a __cuda_stream__ that is no pair (version, handle)");
  else if (kvs_py_uint64(PyTuple_GET_ITEM(pair, 0), place.name, place.index, &version) < 0 ||
           kvs_py_uint64(PyTuple_GET_ITEM(pair, 1), place.name, place.index, handle) < 0)
    rc = -1;
  else if (version != 0)
    rc = kvs_py_complain(PyExc_ValueError, place.name, place.index, "has __cuda_stream__ version %llu: only 0 is known",
                         (unsigned long long)version);
  Py_DECREF(pair);
  return rc;
}

/* A torch stream has the number of its GPU. */
static int check_index(struct kvs_py_state *state, PyObject *object, struct argument place, struct kvs_engine *engine) {
  PyObject *value;
  if (!engine || kvs_engine_device(engine)->info.driver == 0) return 0;
  int has = kvs_py_attribute(object, state->s_device_index, &value);
  if (has <= 0) return has;
  int ordinal = kvs_engine_device(engine)->ordinal;
  long index = PyLong_Check(value) ? PyLong_AsLong(value) : ordinal;
  Py_DECREF(value);
  if (index == -1 && PyErr_Occurred()) return -1;
  if (index == ordinal) return 0;
  return kvs_py_complain(PyExc_ValueError, place.name, place.index, "is of cuda:%ld, not of %s", index,
                         kvs_engine_name(engine));
}

/* 1, or 0 if the object is no stream. */
static int find_stream(struct kvs_py_state *state, PyObject *object, struct argument place, struct kvs_engine *engine,
                       uint64_t *handle) {
  if ((PyObject *)Py_TYPE(object) == state->stream_type)
    return same_engine(kvs_py_stream_engine(object, handle), engine, place) < 0 ? -1 : 1;
  if (PyLong_Check(object) || kvs_py_is_scalar(object))
    return kvs_py_uint64(object, place.name, place.index, handle) < 0 ? -1 : 1;
  if (PyType_Check(object) || PyUnicode_Check(object)) return 0;
  PyObject *type = (PyObject *)Py_TYPE(object);
  if (type == state->memory_type || type == state->mapped_type || type == state->pool_type ||
      (PyObject *)Py_TYPE(object)->tp_base == state->any_host_pool_type)
    return 0; /* arrays have a ptr too, which is no stream */
  int has = handle_attribute(object, state->s_cuda_stream, place, handle);
  if (has == 0) has = from_protocol(state, object, place, handle);
  if (has == 0) has = handle_attribute(object, state->s_ptr, place, handle);
  if (has == 1 && check_index(state, object, place, engine) < 0) return -1;
  return has;
}

int kvs_py_stream_handle(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_engine *engine,
                         uint64_t *handle) {
  int has = find_stream(state, object, (struct argument){name, -1}, engine, handle);
  if (has != 0) return has < 0 ? -1 : 0;
  return kvs_py_complain(
      PyExc_TypeError, name, -1,
      "must be a stream: an int handle, a kvswap.Stream, or an object with cuda_stream, __cuda_stream__ "
      "or ptr, not %s",
      Py_TYPE(object)->tp_name);
}

/* One item to start after: 1, or 0 if the object is none (it may be a list of items). */
static int find_item(struct kvs_py_state *state, PyObject *object, struct argument place, struct kvs_engine *engine,
                     struct kvs_after *item) {
  *item = (struct kvs_after){.kind = KVS_AFTER_STREAM};
  if ((PyObject *)Py_TYPE(object) == state->transfer_type) {
    item->kind = KVS_AFTER_TRANSFER;
    item->transfer = kvs_py_transfer_core(object);
    return 1;
  }
  if ((PyObject *)Py_TYPE(object) == state->event_type) {
    item->kind = KVS_AFTER_EVENT;
    item->engine = kvs_py_event_engine(object, &item->handle);
    bool can = !engine || kvs_dev_can_wait_for(kvs_engine_device(engine), kvs_engine_device(item->engine));
    return can || same_engine(item->engine, engine, place) == 0 ? 1 : -1;
  }
  if (PyTuple_Check(object) || PyList_Check(object)) return 0;
  int has = PyLong_Check(object) ? 0 : handle_attribute(object, state->s_cuda_event, place, &item->handle);
  if (has == 0) return find_stream(state, object, place, engine, &item->handle);
  if (has == 1) item->kind = item->handle == 0 ? KVS_AFTER_NONE : KVS_AFTER_EVENT; /* torch: 0 was never recorded */
  return has;
}

int kvs_py_after_one(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_engine *engine,
                     struct kvs_after *item) {
  return find_item(state, object, (struct argument){name, -1}, engine, item);
}

/* Fill the items from the tuple after->keep. none: None is a valid item. */
static int fill_items(struct kvs_py_state *state, struct kvs_engine *engine, const char *name, bool none,
                      struct kvs_py_after *after) {
  size_t count = (size_t)PyTuple_GET_SIZE(after->keep);
  after->items = count <= 1 ? &after->single : PyMem_Calloc(count, sizeof *after->items);
  if (!after->items) {
    PyErr_NoMemory();
    return -1;
  }
  for (size_t i = 0; i < count; i++) {
    PyObject *object = PyTuple_GET_ITEM(after->keep, (Py_ssize_t)i);
    after->items[i].kind = KVS_AFTER_NONE;
    if (none && object == Py_None) continue;
    int has = find_item(state, object, (struct argument){name, (Py_ssize_t)i}, engine, &after->items[i]);
    if (has < 0) return -1;
    if (has == 0)
      return kvs_py_complain(PyExc_TypeError, name, (Py_ssize_t)i, "must be an Event, a Transfer or a stream%s, not %s",
                             none ? ", or None" : "", Py_TYPE(object)->tp_name);
  }
  after->count = count;
  return 0;
}

/* after->keep from any iterable but a str. */
static int keep_items(PyObject *object, const char *name, const char *wanted, struct kvs_py_after *after) {
  after->keep = PyUnicode_Check(object) ? NULL : PySequence_Tuple(object);
  if (after->keep) return 0;
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
    PyErr_Clear();
  }
  return kvs_py_complain(PyExc_TypeError, name, -1, "must be %s, not %s", wanted, Py_TYPE(object)->tp_name);
}

int kvs_py_read_after(struct kvs_py_state *state, PyObject *object, struct kvs_engine *engine,
                      struct kvs_py_after *after) {
  if (!object || object == Py_None) return 0;
  int has = kvs_py_after_one(state, object, "after", engine, &after->single);
  if (has < 0) return -1;
  if (has == 1) {
    after->items = &after->single;
    after->count = 1;
    return 0;
  }
  if (keep_items(object, "after", "an Event, a Transfer or a stream, or an iterable of them", after) < 0) return -1;
  return fill_items(state, engine, "after", false, after);
}

int kvs_py_after_layers(struct kvs_py_state *state, PyObject *object, struct kvs_engine *engine, size_t layers,
                        struct kvs_py_after *after) {
  if (keep_items(object, "after_layers", "a sequence with one entry a layer, or None", after) < 0) return -1;
  size_t count = (size_t)PyTuple_GET_SIZE(after->keep);
  if (count == layers) return fill_items(state, engine, "after_layers", true, after);
  PyErr_Format(PyExc_ValueError, "after_layers has %zu items, but there %s %zu layer%s", count,
               layers == 1 ? "is" : "are", layers, layers == 1 ? "" : "s");
  return -1;
}

void kvs_py_after_clear(struct kvs_py_after *after) {
  if (after->items != &after->single) PyMem_Free(after->items);
  Py_CLEAR(after->keep);
}
