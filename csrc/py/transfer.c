/* kvswap.Transfer: the handle of one submitted list of copies. It holds its engine too: a deterministic device may have
 * no other reference. done() and similar calls notice the end of transfers and then drop the tensors held for them. */
#include "bind.h"

#include <stdlib.h>

struct transfer_object {
  PyObject_HEAD
  struct kvs_transfer *transfer;
};

struct kvs_transfer *kvs_py_transfer_core(PyObject *transfer) { return ((struct transfer_object *)transfer)->transfer; }

PyObject *kvs_py_transfer_new(struct kvs_py_state *state, struct kvs_transfer *transfer) {
  PyTypeObject *type = (PyTypeObject *)state->transfer_type;
  struct transfer_object *self = (struct transfer_object *)type->tp_alloc(type, 0);
  if (self == NULL) {
    kvs_transfer_unref(transfer);
    return NULL;
  }
  kvs_engine_ref(kvs_transfer_engine(transfer));
  self->transfer = transfer;
  return (PyObject *)self;
}

static void transfer_dealloc(PyObject *self) {
  struct kvs_transfer *transfer = kvs_py_transfer_core(self);
  struct kvs_engine *engine = kvs_transfer_engine(transfer);
  kvs_py_object_free(self);
  kvs_transfer_unref(transfer);
  kvs_engine_unref(engine);
}

/* Whether the transfer has ended; if so, drops what was held for it. */
static bool poll(struct kvs_transfer *transfer) {
  bool ended;
  KVS_PY_NO_GIL(ended = kvs_transfer_done(transfer)); /* the lane's lock may be held by a long submission */
  if (ended) kvs_py_collect(kvs_transfer_engine(transfer));
  return ended;
}

static int wait_transfer(void *transfer, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_transfer_wait(transfer, timeout_ns, err);
}

int kvs_py_transfer_wait(struct kvs_py_state *state, struct kvs_transfer *transfer, int64_t timeout_ns) {
  int rc = kvs_py_wait(state, wait_transfer, transfer, timeout_ns, "the transfer");
  if (rc == 0) {
    kvs_py_collect(kvs_transfer_engine(transfer));
    return 0;
  }
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback); /* dropping references runs foreign destructors */
  kvs_py_collect(kvs_transfer_engine(transfer));
  PyErr_Restore(type, value, traceback);
  return rc;
}

static PyObject *wait_as(const struct kvs_py_args *spec, PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames) {
  PyObject *value;
  int64_t timeout_ns;
  if (kvs_py_args_parse(spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_timeout(value, "timeout", &timeout_ns) < 0) return NULL;
  if (kvs_py_transfer_wait(kvs_py_state_of(self), kvs_py_transfer_core(self), timeout_ns) < 0) return NULL;
  Py_RETURN_NONE;
}

static const char *const wait_names[] = {"timeout"};

static PyObject *transfer_wait(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"wait", wait_names, 0, 1, 1};
  return wait_as(&spec, self, args, nargs, kwnames);
}

static PyObject *transfer_result(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"result", wait_names, 0, 1, 1};
  return wait_as(&spec, self, args, nargs, kwnames);
}

static PyObject *transfer_done(PyObject *self, PyObject *unused) {
  (void)unused;
  return PyBool_FromLong(poll(kvs_py_transfer_core(self)));
}

static PyObject *transfer_cancel(PyObject *self, PyObject *unused) {
  (void)unused;
  bool stopped;
  KVS_PY_NO_GIL(stopped = kvs_transfer_cancel(kvs_py_transfer_core(self)));
  return PyBool_FromLong(stopped);
}

static PyObject *transfer_make_wait(PyObject *self, PyObject *stream) {
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_transfer *transfer = kvs_py_transfer_core(self);
  struct kvs_error err = {0};
  uint64_t handle;
  int rc;
  if (kvs_py_stream_handle(state, stream, "stream", kvs_transfer_engine(transfer), &handle) < 0) return NULL;
  KVS_PY_NO_GIL(rc = kvs_transfer_make_wait(transfer, handle, &err));
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  Py_RETURN_NONE;
}

/* -- layer by layer ------------------------------------------------------------------------------------------------ */

static PyObject *transfer_make_wait_layer(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"layer", "stream"};
  static const struct kvs_py_args spec = {"make_wait_layer", names, 2, 2, 2};
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_transfer *transfer = kvs_py_transfer_core(self);
  struct kvs_error err = {0};
  PyObject *values[2];
  uint64_t layer, handle;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_uint64(values[0], "layer", -1, &layer) < 0) return NULL;
  if (kvs_py_stream_handle(state, values[1], "stream", kvs_transfer_engine(transfer), &handle) < 0) return NULL;
  KVS_PY_NO_GIL(rc = kvs_transfer_make_wait_layer(transfer, layer, handle, &err));
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  Py_RETURN_NONE;
}

static PyObject *transfer_layer_done(PyObject *self, PyObject *value) {
  struct kvs_transfer *transfer = kvs_py_transfer_core(self);
  struct kvs_error err = {0};
  uint64_t layer;
  int rc;
  if (kvs_py_uint64(value, "layer", -1, &layer) < 0) return NULL;
  KVS_PY_NO_GIL(rc = kvs_transfer_layer_done(transfer, layer, &err));
  if (rc == KVS_NOT_READY) Py_RETURN_FALSE;
  kvs_py_collect(kvs_transfer_engine(transfer)); /* it may have been the last reference */
  return rc == KVS_OK ? Py_NewRef(Py_True) : kvs_py_raise(kvs_py_state_of(self), &err);
}

/* -- attributes ---------------------------------------------------------------------------------------------------- */

const char *kvs_py_state_name(enum kvs_state state) {
  static const char *const names[] = {"running", "done", "failed", "cancelled"};
  return names[state];
}

static struct kvs_transfer_info info_now(PyObject *self) {
  struct kvs_transfer_info info = {0};
  poll(kvs_py_transfer_core(self));
  kvs_transfer_get_info(kvs_py_transfer_core(self), &info);
  return info;
}

static PyObject *transfer_repr(PyObject *self) {
  static const char *const directions[] = {"D2H", "H2D", "copy of"};
  struct kvs_transfer_info info = info_now(self);
  char size[KVS_SIZE_TEXT];
  kvs_size_text(info.nbytes, size);
  return PyUnicode_FromFormat("<kvswap.Transfer %s %llu block%s, %s, %s on %s>", directions[info.direction],
                              (unsigned long long)info.num_blocks, info.num_blocks == 1 ? "" : "s", size,
                              kvs_py_state_name(info.state),
                              kvs_engine_name(kvs_transfer_engine(kvs_py_transfer_core(self))));
}

static PyObject *transfer_event(PyObject *self, void *unused) {
  (void)unused;
  return kvs_py_event_of_transfer(kvs_py_state_of(self), kvs_py_transfer_core(self));
}

static PyObject *transfer_device(PyObject *self, void *unused) {
  (void)unused;
  return kvs_py_device_like(kvs_py_state_of(self), kvs_transfer_engine(kvs_py_transfer_core(self)));
}

enum field { NBYTES, NUM_BLOCKS, NUM_LAYERS, NUMBER, LANE, SEQUENCE };

static PyObject *transfer_number(PyObject *self, void *field) {
  struct kvs_transfer_info info = {0};
  kvs_transfer_get_info(kvs_py_transfer_core(self), &info);
  const uint64_t numbers[] = {
      [NBYTES] = info.nbytes, [NUM_BLOCKS] = info.num_blocks, [NUM_LAYERS] = info.num_layers, [NUMBER] = info.number,
      [LANE] = info.lane,     [SEQUENCE] = info.sequence};
  return PyLong_FromUnsignedLongLong(numbers[(uintptr_t)field]);
}

static PyObject *transfer_elapsed(PyObject *self, void *unused) {
  (void)unused;
  struct kvs_transfer_info info = info_now(self);
  if (info.state == KVS_STATE_RUNNING) Py_RETURN_NONE;
  return PyFloat_FromDouble((double)info.elapsed_ns * 1e-9);
}

static PyObject *transfer_duration(PyObject *self, void *unused) {
  (void)unused;
  struct kvs_transfer_info info = info_now(self);
  if (info.state == KVS_STATE_RUNNING) Py_RETURN_NONE;
  return PyFloat_FromDouble((double)info.duration_ns * 1e-9);
}

static PyObject *transfer_path(PyObject *self, void *unused) {
  (void)unused;
  struct kvs_transfer_info info = {0};
  kvs_transfer_get_info(kvs_py_transfer_core(self), &info);
  return PyUnicode_FromString(kvs_path_name(info.path));
}

static PyObject *transfer_state(PyObject *self, void *unused) {
  (void)unused;
  return PyUnicode_FromString(kvs_py_state_name(info_now(self).state));
}

static PyObject *transfer_error(PyObject *self, void *unused) {
  (void)unused;
  struct kvs_error err = {0};
  poll(kvs_py_transfer_core(self));
  if (kvs_transfer_error(kvs_py_transfer_core(self), &err) == KVS_OK) Py_RETURN_NONE;
  return kvs_py_exception(kvs_py_state_of(self), &err);
}

static PyObject *transfer_failed_blocks(PyObject *self, void *unused) {
  (void)unused;
  struct kvs_transfer *transfer = kvs_py_transfer_core(self);
  int64_t *data;
  poll(transfer);
  size_t count = kvs_transfer_failed(transfer, NULL, 0); /* constant after the end */
  uint32_t *positions = count == 0 ? NULL : PyMem_Calloc(count, sizeof *positions);
  if (count != 0 && positions == NULL) return PyErr_NoMemory();
  kvs_transfer_failed(transfer, positions, count);
  PyObject *array = kvs_py_int64_array(count, &data);
  for (size_t i = 0; array != NULL && i < count; ++i) data[i] = positions[i];
  PyMem_Free(positions);
  return array;
}

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(transfer_doc,
             "A submitted transfer. It continues if the object is dropped, and holds its tensors until its end.\n\n"
             "It ends in exactly one state: done, failed or cancelled. Any thread may use it. In asyncio `await "
             "transfer` is wait()\n"
             "without blocking the loop; a cancelled await leaves the transfer running.");
PyDoc_STRVAR(done_doc, "done($self, /)\n--\n\nWhether the transfer has ended, well or not: check error. Never blocks.");
PyDoc_STRVAR(wait_doc, "wait($self, /, timeout=None)\n--\n\n"
                       "Wait for the end; raise the error if the transfer failed or was cancelled.\n\n"
                       "timeout: seconds, None for no limit. TimeoutError and Ctrl-C leave the transfer running.");
PyDoc_STRVAR(result_doc, "result($self, /, timeout=None)\n--\n\nThe same as wait().");
PyDoc_STRVAR(
    cancel_doc,
    "cancel($self, /)\n--\n\n"
    "Returns whether this call stopped the transfer. Work issued to a device cannot be recalled: always False here.");
PyDoc_STRVAR(
    make_wait_doc,
    "make_wait($self, stream, /)\n--\n\n"
    "Work queued on the stream later waits for the transfer, and for all earlier ones of its lane. Does not block.\n\n"
    "It gives order only, and raises if a failure is known already. Before using the bytes check "
    "error.");
PyDoc_STRVAR(
    make_wait_layer_doc,
    "make_wait_layer($self, /, layer, stream)\n--\n\n"
    "Work queued on the stream later waits for layers 0 to `layer`. Does not block. As make_wait() it gives order\n"
    "only, and raises if a failure is known already.\n"
    "\n"
    "ValueError: the transfer was submitted without layer_events. IndexError: it has no such layer.");
PyDoc_STRVAR(layer_done_doc,
             "layer_done($self, layer, /)\n--\n\n"
             "Whether layers 0 to `layer` have arrived. Raises the transfer's error if it failed. Never blocks.\n\n"
             "ValueError: the transfer was submitted without layer_events. IndexError: it has no such layer.");

static PyMethodDef methods[] = {
    {"done", transfer_done, METH_NOARGS, done_doc},
    {"wait", KVS_PY_FASTCALL(transfer_wait), METH_FASTCALL | METH_KEYWORDS, wait_doc},
    {"result", KVS_PY_FASTCALL(transfer_result), METH_FASTCALL | METH_KEYWORDS, result_doc},
    {"cancel", transfer_cancel, METH_NOARGS, cancel_doc},
    {"make_wait", transfer_make_wait, METH_O, make_wait_doc},
    {"make_wait_layer", KVS_PY_FASTCALL(transfer_make_wait_layer), METH_FASTCALL | METH_KEYWORDS, make_wait_layer_doc},
    {"layer_done", transfer_layer_done, METH_O, layer_done_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"event", transfer_event, NULL, "Event: reached at the end, failed or not. Holds the transfer.", NULL},
    {"device", transfer_device, NULL, "Device: the transfer runs on it.", NULL},
    {"nbytes", transfer_number, NULL, "int: bytes of all its blocks.", (void *)(uintptr_t)NBYTES},
    {"num_blocks", transfer_number, NULL, "int: pairs of blocks (each in every tensor).",
     (void *)(uintptr_t)NUM_BLOCKS},
    {"num_layers", transfer_number, NULL, "int: layers that can be waited for, 0 without layer_events.",
     (void *)(uintptr_t)NUM_LAYERS},
    {"number", transfer_number, NULL, "int: its number among all transfers of the device, from 1.",
     (void *)(uintptr_t)NUMBER},
    {"lane", transfer_number, NULL, "int: number of its lane. A lane's transfers run and complete in order.",
     (void *)(uintptr_t)LANE},
    {"sequence", transfer_number, NULL, "int: position in the lane, from 1.", (void *)(uintptr_t)SEQUENCE},
    {"elapsed", transfer_elapsed, NULL, "float: seconds on the device, 0.0 if not measured; None while it runs.", NULL},
    {"duration", transfer_duration, NULL,
     "float: seconds from the call until a call of kvswap saw the end; None while it runs.", NULL},
    {"path", transfer_path, NULL, "str: the path taken: 'dma', 'strided', 'burst', 'kernel' or 'direct'.", NULL},
    {"state", transfer_state, NULL, "str: 'running', 'done', 'failed' or 'cancelled'.", NULL},
    {"error", transfer_error, NULL, "Exception: why the transfer failed; None while it runs and if it succeeded.",
     NULL},
    {"failed_blocks", transfer_failed_blocks, NULL,
     "int64 array: positions, in the lists that were passed, of the blocks that are lost, ascending. All of them where "
     "the\n"
     "device cannot say which; empty while it runs.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)transfer_doc},
    {Py_tp_dealloc, transfer_dealloc},
    {Py_am_await, kvs_py_await},
    {Py_tp_repr, transfer_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec kvs_py_transfer_spec = {
    .name = "kvswap.Transfer",
    .basicsize = sizeof(struct transfer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
