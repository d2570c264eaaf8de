/* kvswap.files.FileTransfer: the handle of a list of blocks being stored, loaded or deleted. It holds its store. */
#include "py/file_transfer.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/transfer.h"

static struct kvs_file_transfer *core(PyObject *self) { return kvs_py_file_transfer_core(self); }

/* -- its kind ------------------------------------------------------------------------------------------------------ */

static bool is_done(void *transfer) { return kvs_file_transfer_done(transfer); }
static int wait_for(void *transfer, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_file_transfer_wait(transfer, timeout_ns, err);
}
static bool cancel(void *transfer) { return kvs_file_transfer_cancel(transfer); }
static void unref(void *transfer) { kvs_file_transfer_unref(transfer); }
static int error_of(void *transfer, struct kvs_error *err) { return kvs_file_transfer_error(transfer, err); }
static size_t failed(void *transfer, uint32_t *positions, size_t capacity) {
  return kvs_file_transfer_failed(transfer, positions, capacity);
}

static void get_now(void *transfer, struct kvs_py_transfer_now *now) {
  struct kvs_file_transfer_info info = {0};
  kvs_file_transfer_get_info(transfer, &info);
  *now = (struct kvs_py_transfer_now){info.state, info.nbytes, info.num_blocks, info.elapsed_ns};
}

static void collect(void *transfer) { KVS_PY_NO_GIL(kvs_file_collect(kvs_file_transfer_store(transfer))); }

static const struct kvs_py_transfer_kind kind = {is_done, wait_for, cancel, unref, error_of, failed, get_now, collect};

PyObject *kvs_py_file_transfer_new(struct kvs_py_state *state, struct kvs_file_transfer *transfer) {
  return kvs_py_any_transfer_new(state->file_transfer_type, &kind, transfer);
}

/* -- attributes ---------------------------------------------------------------------------------------------------- */

static struct kvs_file_transfer_info info_now(PyObject *self) {
  struct kvs_file_transfer_info info = {0};
  kvs_py_any_transfer_poll(self);
  kvs_file_transfer_get_info(core(self), &info);
  return info;
}

static PyObject *transfer_repr(PyObject *self) {
  struct kvs_file_transfer_info info = info_now(self);
  return PyUnicode_FromFormat("<kvswap.files.FileTransfer %s of %llu block%s, %s>", info.what,
                              (unsigned long long)info.num_blocks, info.num_blocks == 1 ? "" : "s",
                              kvs_py_state_name(info.state));
}

static PyObject *transfer_what(PyObject *self, void *Py_UNUSED(ignored)) {
  return PyUnicode_FromString(info_now(self).what);
}

static PyObject *transfer_num_kept(PyObject *self, void *Py_UNUSED(ignored)) {
  return PyLong_FromUnsignedLongLong(info_now(self).num_kept);
}

static int add_reason(PyObject *self, PyObject *dict, uint32_t position) {
  struct kvs_error err = {0};
  kvs_file_transfer_reason(core(self), position, &err);
  PyObject *key = PyLong_FromUnsignedLong(position);
  PyObject *reason = key ? kvs_py_exception(kvs_py_state_of(self), &err) : NULL;
  int rc = reason ? PyDict_SetItem(dict, key, reason) : -1;
  Py_XDECREF(key);
  Py_XDECREF(reason);
  return rc;
}

static PyObject *transfer_reasons(PyObject *self, void *Py_UNUSED(ignored)) {
  size_t count;
  uint32_t *positions = kvs_py_any_transfer_failed(self, &count);
  if (count != 0 && !positions) return NULL;
  PyObject *dict = PyDict_New();
  for (size_t i = 0; dict && i < count; i++)
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
static PyGetSetDef getset[] = {
    {"what", transfer_what, NULL, "str: 'store', 'load' or 'delete'.", NULL},
    {"num_kept", transfer_num_kept, NULL,
     "int: existing blocks that a store left unchanged (replace=False); 0 while it runs.", NULL},
    {"reasons", transfer_reasons, NULL, "dict: an Exception for each of failed_positions, by position.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)transfer_doc},
    {Py_tp_repr, transfer_repr},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec kvs_py_file_transfer_spec = {
    .name = "kvswap.files.FileTransfer",
    .basicsize = sizeof(struct kvs_py_any_transfer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
