/* kvswap.Stream: a non-blocking stream that the object owns. */
#include "py/args.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/wait.h"

static struct kvs_py_stream *as_stream(PyObject *self) { return (struct kvs_py_stream *)self; }

/* The device's number for a priority; "normal" is the driver's default priority. */
static int priority_number(const struct kvs_device_info *info, int named) {
  enum kvs_priority priority = (enum kvs_priority)(KVS_PRIORITY_NORMAL + named);
  if (priority == KVS_PRIORITY_HIGH) return info->priority_high;
  return priority == KVS_PRIORITY_BACKGROUND ? info->priority_low : 0;
}

static PyObject *stream_create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"device", "priority", NULL};
  struct kvs_py_state *state = PyType_GetModuleState(type);
  PyObject *device = NULL, *name = NULL;
  int priority = 0;
  struct kvs_error err = {0};
  int rc;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$O:Stream", names, &device, &name)) return NULL;
  if (name && (priority = kvs_py_choice(name, "priority", kvs_py_priority_names, 3)) < 0) return NULL;
  struct kvs_engine *engine = kvs_py_engine_from(state, device);
  if (!engine) return NULL;
  struct kvs_py_stream *self = (struct kvs_py_stream *)type->tp_alloc(type, 0);
  if (!self) {
    kvs_engine_unref(engine);
    return NULL;
  }
  self->engine = engine;
  struct kvs_device *core = kvs_engine_device(engine);
  KVS_PY_NO_GIL(rc = kvs_dev_stream_create(core, priority_number(&core->info, priority), &self->handle, &err));
  if (rc == KVS_OK) return (PyObject *)self;
  self->handle = 0;
  Py_DECREF(self);
  return kvs_py_raise(state, &err);
}

static void stream_dealloc(PyObject *object) {
  struct kvs_py_stream *self = as_stream(object);
  struct kvs_error ignored = {0}; /* a destructor cannot raise */
  if (self->handle != 0 && !kvs_engine_keep_stream(self->engine, self->handle))
    kvs_dev_stream_destroy(kvs_engine_device(self->engine), self->handle, &ignored);
  if (self->engine) kvs_engine_unref(self->engine);
  kvs_py_object_free(object);
}

static PyObject *stream_repr(PyObject *object) {
  return PyUnicode_FromFormat("<kvswap.Stream %p on %s>", (void *)(uintptr_t)as_stream(object)->handle,
                              kvs_engine_name(as_stream(object)->engine));
}

static PyObject *stream_handle(PyObject *object, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(as_stream(object)->handle);
}

static PyObject *stream_device(PyObject *object, void *unused) {
  (void)unused;
  return kvs_py_device_like(kvs_py_state_of(object), as_stream(object)->engine);
}

static int poll_stream(void *object, struct kvs_error *err) {
  struct kvs_py_stream *self = object;
  return kvs_dev_stream_query(kvs_engine_device(self->engine), self->handle, err);
}

static PyObject *stream_query(PyObject *object, PyObject *unused) {
  (void)unused;
  return kvs_py_query(kvs_py_state_of(object), poll_stream, object);
}

static PyObject *stream_synchronize(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  struct kvs_device *device = kvs_engine_device(as_stream(object)->engine);
  const struct kvs_py_waiting waiting = {poll_stream, object, device->stepped, "the stream's work"};
  return kvs_py_synchronize(kvs_py_state_of(object), &waiting, args, nargs, kwnames);
}

static PyObject *stream_protocol(PyObject *object, PyObject *unused) {
  (void)unused;
  return Py_BuildValue("(iK)", 0, (unsigned long long)as_stream(object)->handle);
}

PyDoc_STRVAR(
    stream_doc,
    "Stream(device=None, *, priority='normal')\n--\n\n"
    "A new stream of a device (Device, name, or None: as Device(None)), not ordered with the legacy default stream.\n\n"
    "Work on one stream runs in order, work on two in no order until an event joins them. priority: 'high', 'normal' "
    "or\n"
    "'background'. Queued work finishes when the object is dropped. Any thread may use it. Create streams before work "
    "is\n"
    "queued: if the driver has no room for another one, the call returns only when the GPU has finished all queued "
    "work.");
PyDoc_STRVAR(query_doc, "query($self, /)\n--\n\nWhether all work queued on the stream has ended. Never blocks.");
PyDoc_STRVAR(
    synchronize_doc,
    "synchronize($self, /, timeout=None)\n--\n\n"
    "Wait until all work queued on the stream has ended.\n\n"
    "timeout: seconds, None for no limit; after TimeoutError the work goes on. Ctrl-C works. Any thread may call.");
PyDoc_STRVAR(protocol_doc,
             "__cuda_stream__($self, /)\n--\n\n(0, handle): the protocol by which libraries share streams.");

static PyMethodDef methods[] = {
    {"query", stream_query, METH_NOARGS, query_doc},
    {"synchronize", KVS_PY_FASTCALL(stream_synchronize), METH_FASTCALL | METH_KEYWORDS, synchronize_doc},
    {"__cuda_stream__", stream_protocol, METH_NOARGS, protocol_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"handle", stream_handle, NULL, "int: the driver's handle.", NULL},
    {"device", stream_device, NULL, "Device: the stream's device.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)stream_doc},
    {Py_tp_new, stream_create},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_repr, stream_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec kvs_py_stream_spec = {
    .name = "kvswap.Stream",
    .basicsize = sizeof(struct kvs_py_stream),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
