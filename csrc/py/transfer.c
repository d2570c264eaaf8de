/* kvswap.Transfer: the handle of one submitted list of copies. It holds its engine too: a deterministic device may have
 * no other reference. */
#include "py/transfer.h"
#include "py/args.h"
#include "py/arrays.h"
#include "py/await.h"
#include "py/errors.h"
#include "py/event.h"
#include "py/handle.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/wait.h"

/* -- what Transfer and FileTransfer have in common ----------------------------------------------------------------- */

static struct kvs_py_any_transfer *object_of(PyObject *self) { return (struct kvs_py_any_transfer *)self; }

PyObject *kvs_py_any_transfer_new(PyObject *type, const struct kvs_py_transfer_kind *kind, void *transfer) {
  struct kvs_py_any_transfer *self =
      (struct kvs_py_any_transfer *)((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
  if (!self) {
    KVS_PY_NO_GIL(kind->unref(transfer));
    return NULL;
  }
  self->kind = kind;
  self->transfer = transfer;
  return (PyObject *)self;
}

static void any_dealloc(PyObject *self) {
  const struct kvs_py_transfer_kind *kind = object_of(self)->kind;
  void *transfer = object_of(self)->transfer;
  kvs_py_object_free(self);
  KVS_PY_NO_GIL(kind->unref(transfer)); /* dropping the last handle of a store closes it without waiting */
}

bool kvs_py_any_transfer_poll(PyObject *self) {
  struct kvs_py_any_transfer *object = object_of(self);
  bool ended;
  KVS_PY_NO_GIL(ended = object->kind->done(object->transfer)); /* a lane's lock may be held by a long submission */
  if (ended) object->kind->collect(object->transfer);
  return ended;
}

static int wait_for_any(struct kvs_py_state *state, const struct kvs_py_transfer_kind *kind, void *transfer,
                        int64_t timeout_ns) {
  PyObject *type, *error, *traceback;
  int rc = kvs_py_wait(state, kind->wait, transfer, timeout_ns, "the transfer");
  PyErr_Fetch(&type, &error, &traceback); /* dropping references runs foreign destructors */
  kind->collect(transfer);
  PyErr_Restore(type, error, traceback);
  return rc;
}

uint32_t *kvs_py_any_transfer_failed(PyObject *self, size_t *count) {
  struct kvs_py_any_transfer *object = object_of(self);
  kvs_py_any_transfer_poll(self);
  *count = object->kind->failed(object->transfer, NULL, 0); /* constant after the end */
  uint32_t *positions = *count == 0 ? NULL : PyMem_Calloc(*count, sizeof *positions);
  if (*count != 0 && !positions) PyErr_NoMemory();
  if (positions) object->kind->failed(object->transfer, positions, *count);
  return positions;
}

/* -- methods of both ----------------------------------------------------------------------------------------------- */

static PyObject *any_done(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  return PyBool_FromLong(kvs_py_any_transfer_poll(self));
}

static PyObject *any_wait(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"timeout"};
  static const struct kvs_py_args spec = {"wait", names, 0, 1, 1};
  struct kvs_py_any_transfer *object = object_of(self);
  PyObject *value;
  int64_t timeout_ns;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_timeout(value, "timeout", &timeout_ns) < 0) return NULL;
  if (wait_for_any(kvs_py_state_of(self), object->kind, object->transfer, timeout_ns) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *any_cancel(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  struct kvs_py_any_transfer *object = object_of(self);
  bool stopped;
  KVS_PY_NO_GIL(stopped = object->kind->cancel(object->transfer));
  return PyBool_FromLong(stopped);
}

/* -- attributes of both -------------------------------------------------------------------------------------------- */

const char *kvs_py_state_name(enum kvs_state state) {
  static const char *const names[] = {"running", "done", "failed", "cancelled"};
  return names[state];
}

static struct kvs_py_transfer_now seen(PyObject *self) {
  struct kvs_py_transfer_now now = {.nbytes = 0};
  object_of(self)->kind->now(object_of(self)->transfer, &now);
  return now;
}

static struct kvs_py_transfer_now now(PyObject *self) {
  kvs_py_any_transfer_poll(self);
  return seen(self);
}

static PyObject *any_state(PyObject *self, void *Py_UNUSED(ignored)) {
  return PyUnicode_FromString(kvs_py_state_name(now(self).state));
}

/* Asking for a number is no look at the device: to the race checker the caller would have seen the end. */
static PyObject *any_nbytes(PyObject *self, void *Py_UNUSED(ignored)) {
  return PyLong_FromUnsignedLongLong(seen(self).nbytes);
}

static PyObject *any_num_blocks(PyObject *self, void *Py_UNUSED(ignored)) {
  return PyLong_FromUnsignedLongLong(seen(self).num_blocks);
}

static PyObject *any_elapsed(PyObject *self, void *Py_UNUSED(ignored)) {
  struct kvs_py_transfer_now found = now(self);
  if (found.state == KVS_STATE_RUNNING) Py_RETURN_NONE;
  return PyFloat_FromDouble((double)found.elapsed_ns * 1e-9);
}

static PyObject *any_error(PyObject *self, void *Py_UNUSED(ignored)) {
  struct kvs_py_any_transfer *object = object_of(self);
  struct kvs_error err = {0};
  kvs_py_any_transfer_poll(self);
  if (object->kind->error(object->transfer, &err) == KVS_OK) Py_RETURN_NONE;
  return kvs_py_exception(kvs_py_state_of(self), &err);
}

static PyObject *any_failed_positions(PyObject *self, void *Py_UNUSED(ignored)) {
  size_t count;
  int64_t *data;
  uint32_t *positions = kvs_py_any_transfer_failed(self, &count);
  if (count != 0 && !positions) return NULL;
  PyObject *array = kvs_py_int64_array(count, &data);
  for (size_t i = 0; array && i < count; i++) data[i] = positions[i];
  PyMem_Free(positions);
  return array;
}

/* -- docs and slots of both ---------------------------------------------------------------------------------------- */

PyDoc_STRVAR(any_doc, "What Transfer and FileTransfer have in common.");
PyDoc_STRVAR(done_doc, "done($self, /)\n--\n\nWhether the transfer has ended, well or not: check error. Never blocks.");
PyDoc_STRVAR(wait_doc, "wait($self, /, timeout=None)\n--\n\n"
                       "Wait for the end; raise the error if the transfer failed or was cancelled.\n\n"
                       "timeout: seconds, None for no limit. TimeoutError and Ctrl-C leave the transfer running.");
PyDoc_STRVAR(cancel_doc,
             "cancel($self, /)\n--\n\n"
             "Skip the blocks that have not begun; returns whether there were any. The transfer then ends as\n"
             "cancelled, with these blocks among its failed blocks. Always False of a Transfer: work issued to a\n"
             "device cannot be recalled.");

static PyMethodDef any_methods[] = {
    {"done", any_done, METH_NOARGS, done_doc},
    {"wait", KVS_PY_FASTCALL(any_wait), METH_FASTCALL | METH_KEYWORDS, wait_doc},
    {"cancel", any_cancel, METH_NOARGS, cancel_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef any_getset[] = {
    {"state", any_state, NULL, "str: 'running', 'done', 'failed' or 'cancelled'.", NULL},
    {"nbytes", any_nbytes, NULL, "int: bytes of all its blocks; of a delete 0.", NULL},
    {"num_blocks", any_num_blocks, NULL, "int: blocks; of a Transfer pairs of them, each in every tensor.", NULL},
    {"elapsed", any_elapsed, NULL,
     "float: seconds; of a Transfer on the device, 0.0 if not measured, of a ShareTransfer from when the stream had "
     "come\n"
     "to it, of a FileTransfer from the call to its end. None while it runs.",
     NULL},
    {"error", any_error, NULL,
     "Exception: why the transfer, or its first failed block, failed; None while it runs and if it succeeded.", NULL},
    {"failed_positions", any_failed_positions, NULL,
     "int64 array: positions, in the lists that were passed, of the blocks that are lost, ascending. All of them where "
     "the\n"
     "device cannot say which; empty while it runs.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot any_slots[] = {
    {Py_tp_doc, (void *)any_doc}, {Py_tp_dealloc, any_dealloc}, {Py_am_await, kvs_py_await},
    {Py_tp_methods, any_methods}, {Py_tp_getset, any_getset},   {0, NULL},
};

PyType_Spec kvs_py_any_transfer_spec = {
    .name = "kvswap._C._AnyTransfer",
    .basicsize = sizeof(struct kvs_py_any_transfer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = any_slots,
};

/* -- kvswap.Transfer, its kind ------------------------------------------------------------------------------------- */

static bool is_done(void *transfer) { return kvs_transfer_done(transfer); }
static int wait_for(void *transfer, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_transfer_wait(transfer, timeout_ns, err);
}
static bool cancel(void *transfer) { return kvs_transfer_cancel(transfer); }
static int error_of(void *transfer, struct kvs_error *err) { return kvs_transfer_error(transfer, err); }
static size_t failed(void *transfer, uint32_t *positions, size_t capacity) {
  return kvs_transfer_failed(transfer, positions, capacity);
}

static void unref(void *transfer) {
  struct kvs_engine *engine = kvs_transfer_engine(transfer);
  kvs_transfer_unref(transfer);
  kvs_engine_unref(engine);
}

static void get_now(void *transfer, struct kvs_py_transfer_now *now) {
  struct kvs_transfer_info info = {0};
  kvs_transfer_get_info(transfer, &info);
  *now = (struct kvs_py_transfer_now){info.state, info.nbytes, info.num_blocks, info.elapsed_ns};
}

static void collect(void *transfer) { kvs_py_collect(kvs_transfer_engine(transfer)); }

static const struct kvs_py_transfer_kind transfer_kind = {is_done,  wait_for, cancel,  unref,
                                                          error_of, failed,   get_now, collect};

PyObject *kvs_py_transfer_new(struct kvs_py_state *state, struct kvs_transfer *transfer) {
  kvs_engine_ref(kvs_transfer_engine(transfer));
  return kvs_py_any_transfer_new(state->transfer_type, &transfer_kind, transfer);
}

int kvs_py_transfer_wait(struct kvs_py_state *state, struct kvs_transfer *transfer, int64_t timeout_ns) {
  return wait_for_any(state, &transfer_kind, transfer, timeout_ns);
}

/* -- order --------------------------------------------------------------------------------------------------------- */

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

static struct kvs_transfer_info info_now(PyObject *self) {
  struct kvs_transfer_info info = {0};
  kvs_py_any_transfer_poll(self);
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

static PyObject *transfer_event(PyObject *self, void *Py_UNUSED(ignored)) {
  return kvs_py_event_of_transfer(kvs_py_state_of(self), kvs_py_transfer_core(self));
}

static PyObject *transfer_device(PyObject *self, void *Py_UNUSED(ignored)) {
  return kvs_py_device_like(kvs_py_state_of(self), kvs_transfer_engine(kvs_py_transfer_core(self)));
}

enum field { NUM_LAYERS, NUMBER, LANE, SEQUENCE };

static PyObject *transfer_number(PyObject *self, void *field) {
  struct kvs_transfer_info info = {0};
  kvs_transfer_get_info(kvs_py_transfer_core(self), &info);
  const uint64_t numbers[] = {
      [NUM_LAYERS] = info.num_layers, [NUMBER] = info.number, [LANE] = info.lane, [SEQUENCE] = info.sequence};
  return PyLong_FromUnsignedLongLong(numbers[(uintptr_t)field]);
}

static PyObject *transfer_duration(PyObject *self, void *Py_UNUSED(ignored)) {
  struct kvs_transfer_info info = info_now(self);
  if (info.state == KVS_STATE_RUNNING) Py_RETURN_NONE;
  return PyFloat_FromDouble((double)info.duration_ns * 1e-9);
}

static PyObject *transfer_path(PyObject *self, void *Py_UNUSED(ignored)) {
  struct kvs_transfer_info info = {0};
  kvs_transfer_get_info(kvs_py_transfer_core(self), &info);
  return PyUnicode_FromString(kvs_path_name(info.path));
}

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(transfer_doc,
             "A submitted transfer. It continues if the object is dropped, and holds its tensors until its end.\n\n"
             "It ends in exactly one state: done, failed or cancelled. Any thread may use it. In asyncio `await "
             "transfer` is wait()\n"
             "without blocking the loop; a cancelled await leaves the transfer running.");
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
    {"make_wait", transfer_make_wait, METH_O, make_wait_doc},
    {"make_wait_layer", KVS_PY_FASTCALL(transfer_make_wait_layer), METH_FASTCALL | METH_KEYWORDS, make_wait_layer_doc},
    {"layer_done", transfer_layer_done, METH_O, layer_done_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"event", transfer_event, NULL, "Event: reached at the end, failed or not. Holds the transfer.", NULL},
    {"device", transfer_device, NULL, "Device: the transfer runs on it.", NULL},
    {"num_layers", transfer_number, NULL, "int: layers that can be waited for, 0 without layer_events.",
     (void *)(uintptr_t)NUM_LAYERS},
    {"number", transfer_number, NULL, "int: its number among all transfers of the device, from 1.",
     (void *)(uintptr_t)NUMBER},
    {"lane", transfer_number, NULL, "int: number of its lane. A lane's transfers run and complete in order.",
     (void *)(uintptr_t)LANE},
    {"sequence", transfer_number, NULL, "int: position in the lane, from 1.", (void *)(uintptr_t)SEQUENCE},
    {"duration", transfer_duration, NULL,
     "float: seconds from the call until a call of kvswap saw the end; None while it runs.", NULL},
    {"path", transfer_path, NULL, "str: the path taken, one of kvswap.typing.ForcedPath.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)transfer_doc},
    {Py_tp_repr, transfer_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec kvs_py_transfer_spec = {
    .name = "kvswap.Transfer",
    .basicsize = sizeof(struct kvs_py_any_transfer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
