/* kvswap.Event: an event that the object owns, or a transfer's completion event, which then holds the transfer. */
#include "py/event.h"
#include "device/share.h"
#include "py/args.h"
#include "py/errors.h"
#include "py/handle.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/wait.h"

static struct kvs_py_event *as_event(PyObject *self) { return (struct kvs_py_event *)self; }

/* Steals the reference to engine. */
static struct kvs_py_event *event_alloc(PyTypeObject *type, struct kvs_engine *engine) {
  struct kvs_py_event *self = (struct kvs_py_event *)type->tp_alloc(type, 0);
  if (!self)
    kvs_engine_unref(engine);
  else
    self->engine = engine;
  return self;
}

static PyObject *event_create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"device", "timing", "interprocess", NULL};
  struct kvs_py_state *state = PyType_GetModuleState(type);
  struct kvs_error err = {0};
  PyObject *device = NULL;
  int timing = -1, shared = 0;
  int rc;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$pp:Event", names, &device, &timing, &shared)) return NULL;
  if (shared && timing == 1) {
    PyErr_SetString(PyExc_ValueError, "an interprocess event has no timing");
    return NULL;
  }
  struct kvs_engine *engine = kvs_py_engine_from(state, device);
  struct kvs_py_event *self = engine ? event_alloc(type, engine) : NULL;
  if (!self) return NULL;
  KVS_PY_NO_GIL(rc = shared ? kvs_dev_event_create_shared(kvs_engine_device(engine), &self->handle, &err)
                            : kvs_dev_event_create(kvs_engine_device(engine), timing != 0, &self->handle, &err));
  if (rc == KVS_OK) return (PyObject *)self;
  self->handle = 0;
  Py_DECREF(self);
  return kvs_py_raise(state, &err);
}

PyObject *kvs_py_event_new(struct kvs_py_state *state, struct kvs_engine *engine, kvs_event handle) {
  struct kvs_error ignored = {0};
  kvs_engine_ref(engine);
  struct kvs_py_event *self = event_alloc((PyTypeObject *)state->event_type, engine);
  if (self)
    self->handle = handle;
  else
    kvs_dev_event_destroy(kvs_engine_device(engine), handle, &ignored);
  return (PyObject *)self;
}

PyObject *kvs_py_event_of_transfer(struct kvs_py_state *state, struct kvs_transfer *transfer) {
  struct kvs_engine *engine = kvs_transfer_engine(transfer);
  struct kvs_error err = {0};
  kvs_engine_ref(engine);
  struct kvs_py_event *self = event_alloc((PyTypeObject *)state->event_type, engine);
  if (!self) return NULL;
  kvs_transfer_ref(transfer);
  self->transfer = transfer;
  int rc;
  KVS_PY_NO_GIL(rc = kvs_transfer_event(transfer, &self->handle, &err));
  if (rc == KVS_OK) return (PyObject *)self;
  Py_DECREF(self);
  return kvs_py_raise(state, &err);
}

static void event_dealloc(PyObject *object) {
  struct kvs_py_event *self = as_event(object);
  struct kvs_error ignored = {0}; /* a destructor cannot raise */
  if (self->transfer)
    kvs_transfer_unref(self->transfer);
  else if (self->handle != 0)
    kvs_dev_event_destroy(kvs_engine_device(self->engine), self->handle, &ignored);
  if (self->engine) kvs_engine_unref(self->engine);
  kvs_py_object_free(object);
}

static PyObject *event_repr(PyObject *object) {
  struct kvs_py_event *self = as_event(object);
  return PyUnicode_FromFormat("<kvswap.Event %p on %s%s>", (void *)(uintptr_t)self->handle,
                              kvs_engine_name(self->engine), self->transfer ? ", of a transfer" : "");
}

static PyObject *event_handle(PyObject *object, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(as_event(object)->handle);
}

static PyObject *event_device(PyObject *object, void *unused) {
  (void)unused;
  return kvs_py_device_like(kvs_py_state_of(object), as_event(object)->engine);
}

static PyObject *event_record(PyObject *object, PyObject *stream) {
  struct kvs_py_event *self = as_event(object);
  struct kvs_py_state *state = kvs_py_state_of(object);
  struct kvs_error err = {0};
  uint64_t handle;
  int rc;
  if (self->transfer) {
    PyErr_SetString(PyExc_ValueError, "this event marks a transfer's end: it cannot be recorded");
    return NULL;
  }
  if (kvs_py_stream_handle(state, stream, "stream", self->engine, &handle) < 0) return NULL;
  KVS_PY_NO_GIL(rc = kvs_dev_event_record(kvs_engine_device(self->engine), self->handle, handle, &err));
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  Py_RETURN_NONE;
}

/* A kvswap Stream may be of another device of the kind. */
static PyObject *event_wait(PyObject *object, PyObject *stream) {
  struct kvs_py_event *self = as_event(object);
  struct kvs_py_state *state = kvs_py_state_of(object);
  struct kvs_engine *engine = self->engine;
  struct kvs_error err = {0};
  uint64_t handle;
  int rc;
  if ((PyObject *)Py_TYPE(stream) == state->stream_type)
    engine = kvs_py_stream_engine(stream, &handle);
  else if (kvs_py_stream_handle(state, stream, "stream", engine, &handle) < 0)
    return NULL;
  struct kvs_device *device = kvs_engine_device(engine), *own = kvs_engine_device(self->engine);
  const struct kvs_after event = {.kind = KVS_AFTER_EVENT, .handle = self->handle, .engine = self->engine};
  Py_BEGIN_ALLOW_THREADS
  rc = kvs_dev_stream_wait_foreign(device, handle, own, self->handle, &err);
  if (rc == KVS_OK && device != own) rc = kvs_note_order(engine, &event, false, handle, &err);
  Py_END_ALLOW_THREADS
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  Py_RETURN_NONE;
}

static int poll_event(void *object, struct kvs_error *err) {
  struct kvs_py_event *self = object;
  return kvs_dev_event_query(kvs_engine_device(self->engine), self->handle, err);
}

static PyObject *event_query(PyObject *object, PyObject *unused) {
  (void)unused;
  return kvs_py_query(kvs_py_state_of(object), poll_event, object);
}

static PyObject *event_synchronize(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  struct kvs_device *device = kvs_engine_device(as_event(object)->engine);
  const struct kvs_py_waiting waiting = {poll_event, object, device->stepped, "what the event marks"};
  return kvs_py_synchronize(kvs_py_state_of(object), &waiting, args, nargs, kwnames);
}

static PyObject *event_elapsed_time(PyObject *object, PyObject *other) {
  struct kvs_py_event *self = as_event(object);
  struct kvs_py_state *state = kvs_py_state_of(object);
  struct kvs_error err = {0};
  uint64_t ns = 0;
  int rc;
  if (Py_TYPE(other) != Py_TYPE(object)) {
    kvs_py_complain(PyExc_TypeError, "other", -1, "must be an Event, not %s", Py_TYPE(other)->tp_name);
    return NULL;
  }
  if (as_event(other)->engine != self->engine) {
    kvs_py_complain(PyExc_ValueError, "other", -1, "is of %s, not of %s", kvs_engine_name(as_event(other)->engine),
                    kvs_engine_name(self->engine));
    return NULL;
  }
  KVS_PY_NO_GIL(
      rc = kvs_dev_event_elapsed(kvs_engine_device(self->engine), self->handle, as_event(other)->handle, &ns, &err));
  return rc == KVS_OK ? PyFloat_FromDouble((double)ns * 1e-9) : kvs_py_raise(state, &err);
}

PyDoc_STRVAR(
    event_doc,
    "Event(device=None, *, timing=True, interprocess=False)\n--\n\n"
    "A mark in the work of a stream of a device (Device, name, or None: as Device(None)).\n\n"
    "An event that was never recorded counts as reached. timing=False: no elapsed_time(), all else is\n"
    "cheaper. An event with timing that is recorded on a stream which waits for a transfer slows that transfer's\n"
    "copies by up to a tenth while a model runs. interprocess=True: kvswap.memory.export_event() can share it with\n"
    "other processes; it has no timing. Any thread may use it.");
PyDoc_STRVAR(record_doc,
             "record($self, stream, /)\n--\n\n"
             "Mark the work queued on the stream so far. Recording again moves the mark, but not for earlier waits.\n"
             "ValueError: a transfer's event.");
PyDoc_STRVAR(query_doc, "query($self, /)\n--\n\nWhether the event has been reached. Never blocks.");
PyDoc_STRVAR(
    synchronize_doc,
    "synchronize($self, /, timeout=None)\n--\n\n"
    "Wait until the event is reached.\n\n"
    "timeout: seconds, None for no limit; TimeoutError. Ctrl-C works. A transfer's event gives order only: check\n"
    "Transfer.error before using the bytes. Any thread may call.");
PyDoc_STRVAR(elapsed_time_doc,
             "elapsed_time($self, other, /)\n--\n\n"
             "Seconds from this event to the other, a float. Both must have been reached and be of one device.\n\n"
             "DeviceError: one was never recorded or has no timing (code 400), or was not reached yet (600).");
PyDoc_STRVAR(
    wait_doc,
    "wait($self, stream, /)\n--\n\nWork queued on the stream later waits for this event. Does not block the caller.\n"
    "A kvswap.Stream may be of another device of the same kind.");

static PyMethodDef methods[] = {
    {"record", event_record, METH_O, record_doc},
    {"query", event_query, METH_NOARGS, query_doc},
    {"synchronize", KVS_PY_FASTCALL(event_synchronize), METH_FASTCALL | METH_KEYWORDS, synchronize_doc},
    {"elapsed_time", event_elapsed_time, METH_O, elapsed_time_doc},
    {"wait", event_wait, METH_O, wait_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"handle", event_handle, NULL, "int: the driver's handle.", NULL},
    {"device", event_device, NULL, "Device: the event's device.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)event_doc},
    {Py_tp_new, event_create},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_repr, event_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec kvs_py_event_spec = {
    .name = "kvswap.Event",
    .basicsize = sizeof(struct kvs_py_event),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
