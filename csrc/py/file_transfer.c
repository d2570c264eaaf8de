/* kvswap.files.FileTransfer: the handle of a list of blocks being stored, loaded or deleted. It holds its store. */
#include "files.h"

struct file_transfer_object {
  PyObject_HEAD
  struct kvs_file_transfer *transfer;
};

struct kvs_file_transfer *kvs_py_file_transfer_core(PyObject *transfer) {
  return ((struct file_transfer_object *)transfer)->transfer;
}

static struct kvs_file_transfer *core(PyObject *self) { return kvs_py_file_transfer_core(self); }

PyObject *kvs_py_file_transfer_new(struct kvs_py_state *state, struct kvs_file_transfer *transfer) {
  PyTypeObject *type = (PyTypeObject *)state->file_transfer_type;
  struct file_transfer_object *self = (struct file_transfer_object *)type->tp_alloc(type, 0);
  if (self == NULL) {
    KVS_PY_NO_GIL(kvs_file_transfer_unref(transfer));
    return NULL;
  }
  self->transfer = transfer;
  return (PyObject *)self;
}

static void transfer_dealloc(PyObject *self) {
  struct kvs_file_transfer *transfer = core(self);
  kvs_py_object_free(self);
  KVS_PY_NO_GIL(kvs_file_transfer_unref(transfer)); /* dropping the last handle closes the store without waiting */
}

static void collect(struct kvs_file_transfer *transfer) {
  KVS_PY_NO_GIL(kvs_file_collect(kvs_file_transfer_store(transfer)));
}

static bool poll(struct kvs_file_transfer *transfer) {
  bool ended = kvs_file_transfer_done(transfer);
  if (ended) collect(transfer);
  return ended;
}

static int wait_transfer(void *transfer, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_file_transfer_wait(transfer, timeout_ns, err);
}

static PyObject *wait_as(const struct kvs_py_args *spec, PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames) {
  PyObject *value, *type, *error, *traceback;
  int64_t timeout_ns;
  if (kvs_py_args_parse(spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_timeout(value, "timeout", &timeout_ns) < 0) return NULL;
  int rc = kvs_py_wait(kvs_py_state_of(self), wait_transfer, core(self), timeout_ns, "the transfer");
  PyErr_Fetch(&type, &error, &traceback); /* dropping references runs foreign destructors */
  collect(core(self));
  PyErr_Restore(type, error, traceback);
  if (rc < 0) return NULL;
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
  return PyBool_FromLong(poll(core(self)));
}

static PyObject *transfer_cancel(PyObject *self, PyObject *unused) {
  (void)unused;
  bool stopped;
  KVS_PY_NO_GIL(stopped = kvs_file_transfer_cancel(core(self)));
  return PyBool_FromLong(stopped);
}

/* -- attributes ---------------------------------------------------------------------------------------------------- */

static struct kvs_file_transfer_info info_now(PyObject *self) {
  struct kvs_file_transfer_info info = {0};
  poll(core(self));
  kvs_file_transfer_get_info(core(self), &info);
  return info;
}

static PyObject *transfer_repr(PyObject *self) {
  struct kvs_file_transfer_info info = info_now(self);
  return PyUnicode_FromFormat("<kvswap.files.FileTransfer %s of %llu block%s, %s>", info.what,
                              (unsigned long long)info.num_blocks, info.num_blocks == 1 ? "" : "s",
                              kvs_py_state_name(info.state));
}

static PyObject *transfer_what(PyObject *self, void *unused) {
  (void)unused;
  return PyUnicode_FromString(info_now(self).what);
}

static PyObject *transfer_state(PyObject *self, void *unused) {
  (void)unused;
  return PyUnicode_FromString(kvs_py_state_name(info_now(self).state));
}

static PyObject *transfer_nbytes(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(info_now(self).nbytes);
}

static PyObject *transfer_num_blocks(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(info_now(self).num_blocks);
}

static PyObject *transfer_num_kept(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLongLong(info_now(self).num_kept);
}

static PyObject *transfer_elapsed(PyObject *self, void *unused) {
  (void)unused;
  struct kvs_file_transfer_info info = info_now(self);
  if (info.state == KVS_STATE_RUNNING) Py_RETURN_NONE;
  return PyFloat_FromDouble((double)info.elapsed_ns * 1e-9);
}

static PyObject *transfer_error(PyObject *self, void *unused) {
  (void)unused;
  struct kvs_error err = {0};
  poll(core(self));
  if (kvs_file_transfer_error(core(self), &err) == KVS_OK) Py_RETURN_NONE;
  return kvs_py_exception(kvs_py_state_of(self), &err);
}

/* Positions of the failed blocks; the caller frees them. NULL: none, or an exception is set. */
static uint32_t *failed_positions(PyObject *self, size_t *count) {
  struct kvs_file_transfer *transfer = core(self);
  poll(transfer);
  *count = kvs_file_transfer_failed(transfer, NULL, 0); /* constant after the end */
  uint32_t *positions = *count == 0 ? NULL : PyMem_Calloc(*count, sizeof *positions);
  if (*count != 0 && positions == NULL) PyErr_NoMemory();
  if (positions != NULL) kvs_file_transfer_failed(transfer, positions, *count);
  return positions;
}

static PyObject *transfer_failed_blocks(PyObject *self, void *unused) {
  (void)unused;
  size_t count;
  int64_t *data;
  uint32_t *positions = failed_positions(self, &count);
  if (count != 0 && positions == NULL) return NULL;
  PyObject *array = kvs_py_int64_array(count, &data);
  for (size_t i = 0; array != NULL && i < count; ++i) data[i] = positions[i];
  PyMem_Free(positions);
  return array;
}

static int add_reason(PyObject *self, PyObject *dict, uint32_t position) {
  struct kvs_error err = {0};
  kvs_file_transfer_reason(core(self), position, &err);
  PyObject *key = PyLong_FromUnsignedLong(position);
  PyObject *reason = key == NULL ? NULL : kvs_py_exception(kvs_py_state_of(self), &err);
  int rc = reason == NULL ? -1 : PyDict_SetItem(dict, key, reason);
  Py_XDECREF(key);
  Py_XDECREF(reason);
  return rc;
}

static PyObject *transfer_reasons(PyObject *self, void *unused) {
  (void)unused;
  size_t count;
  uint32_t *positions = failed_positions(self, &count);
  if (count != 0 && positions == NULL) return NULL;
  PyObject *dict = PyDict_New();
  for (size_t i = 0; dict != NULL && i < count; ++i)
    if (add_reason(self, dict, positions[i]) < 0) Py_CLEAR(dict);
  PyMem_Free(positions);
  return dict;
}

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(
    transfer_doc,
    "A transfer of blocks to or from files. It continues if the object is dropped, and holds its tensors until\n"
    "its end. It ends in exactly one state: done, failed or cancelled. Any thread may use it. In asyncio\n"
    "`await transfer` is wait() without blocking the loop; a cancelled await leaves the transfer running.");
PyDoc_STRVAR(done_doc, "done($self, /)\n--\n\nWhether the transfer has ended, well or not: check error. Never blocks.");
PyDoc_STRVAR(wait_doc, "wait($self, /, timeout=None)\n--\n\n"
                       "Wait for the end; raise the error of the first failed block, if any.\n\n"
                       "timeout: seconds, None for no limit. TimeoutError and Ctrl-C leave the transfer running.");
PyDoc_STRVAR(result_doc, "result($self, /, timeout=None)\n--\n\nThe same as wait().");
PyDoc_STRVAR(cancel_doc,
             "cancel($self, /)\n--\n\n"
             "Skip the blocks that have not begun; returns whether there were any. The transfer then ends as\n"
             "cancelled, with these blocks among its failed blocks.");

static PyMethodDef methods[] = {
    {"done", transfer_done, METH_NOARGS, done_doc},
    {"wait", KVS_PY_FASTCALL(transfer_wait), METH_FASTCALL | METH_KEYWORDS, wait_doc},
    {"result", KVS_PY_FASTCALL(transfer_result), METH_FASTCALL | METH_KEYWORDS, result_doc},
    {"cancel", transfer_cancel, METH_NOARGS, cancel_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"what", transfer_what, NULL, "str: 'store', 'load' or 'delete'.", NULL},
    {"state", transfer_state, NULL, "str: 'running', 'done', 'failed' or 'cancelled'.", NULL},
    {"nbytes", transfer_nbytes, NULL, "int: bytes of all its blocks; of a delete 0.", NULL},
    {"num_blocks", transfer_num_blocks, NULL, "int: blocks.", NULL},
    {"num_kept", transfer_num_kept, NULL,
     "int: existing blocks that a store left unchanged (replace=False); 0 while it runs.", NULL},
    {"elapsed", transfer_elapsed, NULL, "float: seconds from the call to its end; None while it runs.", NULL},
    {"error", transfer_error, NULL, "Exception: of its first failed block; None while it runs and if none failed.",
     NULL},
    {"failed_blocks", transfer_failed_blocks, NULL,
     "int64 array: positions, in the lists that were passed, of the blocks that failed, ascending; empty while it "
     "runs.",
     NULL},
    {"reasons", transfer_reasons, NULL, "dict: an Exception for each of failed_blocks, by position.", NULL},
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

PyType_Spec kvs_py_file_transfer_spec = {
    .name = "kvswap.files.FileTransfer",
    .basicsize = sizeof(struct file_transfer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
