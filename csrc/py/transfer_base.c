/* What Transfer and FileTransfer have in common. done() and similar calls notice the end of transfers, and then drop
 * the tensors held for them. */
#include "transfer.h"

static struct kvs_py_any_transfer *object_of(PyObject *self) { return (struct kvs_py_any_transfer *)self; }

PyObject *kvs_py_any_transfer_new(PyObject *type, const struct kvs_py_transfer_kind *kind, void *transfer) {
  struct kvs_py_any_transfer *self =
      (struct kvs_py_any_transfer *)((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
  if (self == NULL) {
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

int kvs_py_any_transfer_wait(struct kvs_py_state *state, const struct kvs_py_transfer_kind *kind, void *transfer,
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
  if (*count != 0 && positions == NULL) PyErr_NoMemory();
  if (positions != NULL) object->kind->failed(object->transfer, positions, *count);
  return positions;
}

/* -- methods ------------------------------------------------------------------------------------------------------- */

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
  if (kvs_py_any_transfer_wait(kvs_py_state_of(self), object->kind, object->transfer, timeout_ns) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *any_cancel(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  struct kvs_py_any_transfer *object = object_of(self);
  bool stopped;
  KVS_PY_NO_GIL(stopped = object->kind->cancel(object->transfer));
  return PyBool_FromLong(stopped);
}

/* -- attributes ---------------------------------------------------------------------------------------------------- */

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

static PyObject *any_failed_blocks(PyObject *self, void *Py_UNUSED(ignored)) {
  size_t count;
  int64_t *data;
  uint32_t *positions = kvs_py_any_transfer_failed(self, &count);
  if (count != 0 && positions == NULL) return NULL;
  PyObject *array = kvs_py_int64_array(count, &data);
  for (size_t i = 0; array != NULL && i < count; ++i) data[i] = positions[i];
  PyMem_Free(positions);
  return array;
}

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

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

static PyMethodDef methods[] = {
    {"done", any_done, METH_NOARGS, done_doc},
    {"wait", KVS_PY_FASTCALL(any_wait), METH_FASTCALL | METH_KEYWORDS, wait_doc},
    {"cancel", any_cancel, METH_NOARGS, cancel_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"state", any_state, NULL, "str: 'running', 'done', 'failed' or 'cancelled'.", NULL},
    {"nbytes", any_nbytes, NULL, "int: bytes of all its blocks; of a delete 0.", NULL},
    {"num_blocks", any_num_blocks, NULL, "int: blocks; of a Transfer pairs of them, each in every tensor.", NULL},
    {"elapsed", any_elapsed, NULL,
     "float: seconds; of a Transfer on the device, 0.0 if not measured, of a FileTransfer from the call to its end. "
     "None\n"
     "while it runs.",
     NULL},
    {"error", any_error, NULL,
     "Exception: why the transfer, or its first failed block, failed; None while it runs and if it succeeded.", NULL},
    {"failed_blocks", any_failed_blocks, NULL,
     "int64 array: positions, in the lists that were passed, of the blocks that are lost, ascending. All of them where "
     "the\n"
     "device cannot say which; empty while it runs.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)any_doc}, {Py_tp_dealloc, any_dealloc}, {Py_am_await, kvs_py_await},
    {Py_tp_methods, methods},     {Py_tp_getset, getset},       {0, NULL},
};

PyType_Spec kvs_py_any_transfer_spec = {
    .name = "kvswap._C._AnyTransfer",
    .basicsize = sizeof(struct kvs_py_any_transfer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
