/* kvswap.Device. */
#include "py/address.h"
#include "py/args.h"
#include "py/device_facts.h"
#include "py/errors.h"
#include "py/memory.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/options.h"
#include "py/wait.h"

#include <stdio.h>
#include <string.h>

/* -- the type ------------------------------------------------------------------------------------------------------ */

static PyObject *device_create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"name", NULL};
  struct kvs_py_state *state = PyType_GetModuleState(type);
  PyObject *name = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:Device", names, &name)) return NULL;
  struct kvs_engine *engine = kvs_py_engine_from(state, name);
  return engine ? kvs_py_device_new(state, engine) : NULL;
}

static void device_dealloc(PyObject *self) {
  struct kvs_engine *engine = kvs_py_device_engine(self);
  kvs_py_object_free(self);
  if (!engine) return;
  kvs_py_collect(engine);
  kvs_engine_unref(engine);
}

static PyObject *device_repr(PyObject *self) {
  struct kvs_engine *engine = kvs_py_device_engine(self);
  struct kvs_device *device = kvs_engine_device(engine);
  return PyUnicode_FromFormat("<kvswap.Device %s %s%s>", kvs_engine_name(engine), device->info.name,
                              atomic_load(&device->lost) != 0 ? ", lost" : "");
}

static PyObject *device_compare(PyObject *self, PyObject *other, int operation) {
  if (Py_TYPE(self) != Py_TYPE(other) || (operation != Py_EQ && operation != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
  bool same = kvs_py_device_engine(self) == kvs_py_device_engine(other);
  return PyBool_FromLong(same == (operation == Py_EQ));
}

static Py_hash_t device_hash(PyObject *self) {
  return (Py_hash_t)((uintptr_t)kvs_py_device_engine(self) >> 4); /* never -1 */
}

static PyObject *device_name(PyObject *self, void *unused) {
  (void)unused;
  return PyUnicode_FromString(kvs_engine_name(kvs_py_device_engine(self)));
}

static PyObject *device_kind(PyObject *self, void *unused) {
  (void)unused;
  return PyUnicode_FromString(kvs_engine_device(kvs_py_device_engine(self))->ops->kind);
}

static PyObject *device_lost(PyObject *self, void *unused) {
  (void)unused;
  return PyBool_FromLong(atomic_load(&kvs_engine_device(kvs_py_device_engine(self))->lost) != 0);
}

/* -- methods ------------------------------------------------------------------------------------------------------- */

/* Keep a foreign stream object alive: dropping it may destroy the stream. The engine keeps kvswap's own streams, and
 * its streams keep the engine. */
static int keep_compute_stream(struct kvs_py_state *state, struct kvs_engine *engine, PyObject *stream) {
  bool ours = (PyObject *)Py_TYPE(stream) == state->stream_type;
  return PyDict_SetItemString(state->compute_streams, kvs_engine_name(engine), ours ? Py_None : stream);
}

static PyObject *device_set_compute_stream(PyObject *self, PyObject *stream) {
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_engine *engine = kvs_py_device_engine(self);
  struct kvs_error err = {0};
  uint64_t handle;
  int rc;
  if (kvs_py_stream_handle(state, stream, "stream", engine, &handle) < 0) return NULL;
  KVS_PY_NO_GIL(rc = kvs_engine_set_compute_stream(engine, handle, &err));
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  return keep_compute_stream(state, engine, stream) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *device_set_defaults(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"path", "priority", "max_ctas", "pace_gbps"};
  static const struct kvs_py_args spec = {"set_defaults", names, 0, 0, 4};
  PyObject *common[KVS_PY_COMMON] = {NULL}; /* stream= and after= are set by each call */
  struct kvs_py_options options = {.common = common};
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, common + 2) < 0 || kvs_py_options_check(&options) < 0) return NULL;
  const struct kvs_options *core = &options.core;
  struct kvs_defaults defaults = {
      .path = core->path, .priority = core->priority, .max_ctas = core->max_ctas, .pace_gbps = core->pace_gbps};
  kvs_engine_set_defaults(kvs_py_device_engine(self), &defaults);
  Py_RETURN_NONE;
}

static PyObject *device_synchronize(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"timeout"};
  static const struct kvs_py_args spec = {"synchronize", names, 0, 1, 1};
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_engine *engine = kvs_py_device_engine(self);
  struct kvs_error err = {0};
  PyObject *value;
  int64_t timeout_ns;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_timeout(value, "timeout", &timeout_ns) < 0) return NULL;
  KVS_PY_WAITING(state, rc = kvs_engine_synchronize(engine, timeout_ns, &err));
  if (kvs_py_waited(state, rc, &err, timeout_ns, "the device's work") < 0) return NULL;
  kvs_py_collect(engine);
  Py_RETURN_NONE;
}

static PyObject *device_alloc(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"nbytes", "host", "chunks"};
  static const struct kvs_py_args spec = {"alloc", names, 1, 1, 3};
  PyObject *values[3];
  uint64_t nbytes;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_uint64(values[0], "nbytes", -1, &nbytes) < 0) return NULL;
  int host = values[1] ? PyObject_IsTrue(values[1]) : 0;
  int chunks = values[2] ? PyObject_IsTrue(values[2]) : 0;
  if (host < 0 || chunks < 0) return NULL;
  if (host && chunks)
    return kvs_py_complain(PyExc_ValueError, "chunks", -1, "is for memory of the device, not of the host"), NULL;
  return kvs_py_memory_alloc(kvs_py_state_of(self), kvs_py_device_engine(self), nbytes,
                             host     ? KVS_ALLOC_HOST
                             : chunks ? KVS_ALLOC_CHUNKS
                                      : KVS_ALLOC_DEVICE);
}

static PyObject *device_register(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"ptr", "nbytes"};
  static const struct kvs_py_args spec = {"register", names, 1, 2, 2};
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_engine *engine = kvs_py_device_engine(self);
  struct kvs_py_address address;
  struct kvs_error err = {0};
  PyObject *values[2];
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_read_address(state, values[0], "ptr", -1, false, NULL, &address) < 0) return NULL;
  uint64_t nbytes = address.nbytes;
  if (values[1] && values[1] != Py_None) {
    if (kvs_py_uint64(values[1], "nbytes", -1, &nbytes) < 0) return NULL;
    if (nbytes > address.nbytes) {
      PyErr_Format(PyExc_ValueError, "nbytes is %llu, but ptr is a tensor of %llu bytes", (unsigned long long)nbytes,
                   (unsigned long long)address.nbytes);
      return NULL;
    }
  } else if (nbytes == UINT64_MAX) {
    PyErr_SetString(PyExc_ValueError, "nbytes is needed where ptr is a plain address");
    return NULL;
  }
  KVS_PY_NO_GIL(rc = kvs_engine_register(engine, address.ptr, nbytes, &err));
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  Py_RETURN_NONE;
}

static PyObject *device_unregister(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"ptr", "timeout"};
  static const struct kvs_py_args spec = {"unregister", names, 1, 2, 2};
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_engine *engine = kvs_py_device_engine(self);
  struct kvs_py_address address;
  struct kvs_error err = {0};
  PyObject *values[2];
  int64_t timeout_ns;
  bool kept;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_patience(values[1], &timeout_ns) < 0) return NULL;
  if (kvs_py_read_address(state, values[0], "ptr", -1, false, NULL, &address) < 0) return NULL;
  KVS_PY_WAITING(state, rc = kvs_engine_unregister_within(engine, address.ptr, timeout_ns, &kept, &err));
  return kvs_py_waited(state, rc, &err, timeout_ns, NULL) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *device_set_slots(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"slot_nbytes", "count", "timeout"};
  static const struct kvs_py_args spec = {"set_slots", names, 1, 2, 3};
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_engine *engine = kvs_py_device_engine(self);
  struct kvs_error err = {0};
  uint64_t nbytes, count = 3;
  PyObject *values[3];
  int64_t timeout_ns = 10000000000;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_uint64(values[0], "slot_nbytes", -1, &nbytes) < 0) return NULL;
  if (values[1] && kvs_py_uint64(values[1], "count", -1, &count) < 0) return NULL;
  if (count > UINT32_MAX) count = UINT32_MAX; /* out of range, also when cut */
  if (values[2] && kvs_py_timeout(values[2], "timeout", &timeout_ns) < 0) return NULL;
  int rc;
  KVS_PY_WAITING(state, rc = kvs_engine_set_slots(engine, nbytes, (unsigned)count, timeout_ns, &err));
  if (kvs_py_waited(state, rc, &err, timeout_ns, "work that may use the slots") < 0) return NULL;
  kvs_py_collect(engine);
  Py_RETURN_NONE;
}

static PyObject *device_lend(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"to", "slot_nbytes", "count", "share", "timeout"};
  static const struct kvs_py_args spec = {"lend", names, 1, 3, 5};
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_engine *engine = kvs_py_device_engine(self);
  struct kvs_lending lending = {.slot_nbytes = 8 << 20, .count = 2, .share = 1};
  struct kvs_error err = {0};
  uint64_t count = lending.count;
  PyObject *values[5];
  int64_t timeout_ns = 10000000000;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (values[1] && kvs_py_uint64(values[1], "slot_nbytes", -1, &lending.slot_nbytes) < 0) return NULL;
  if (values[2] && kvs_py_uint64(values[2], "count", -1, &count) < 0) return NULL;
  if (values[3]) lending.share = PyFloat_AsDouble(values[3]);
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError))
    return kvs_py_complain(PyExc_TypeError, "share", -1, "must be a number, not %s", Py_TYPE(values[3])->tp_name), NULL;
  if (PyErr_Occurred()) return NULL;
  if (values[4] && kvs_py_timeout(values[4], "timeout", &timeout_ns) < 0) return NULL;
  lending.count = count > UINT32_MAX ? UINT32_MAX : (unsigned)count; /* out of range, also when cut */
  struct kvs_engine *borrower = kvs_py_engine_from(state, values[0]);
  if (!borrower) return NULL;
  int rc;
  KVS_PY_WAITING(state, rc = kvs_engine_lend(engine, borrower, &lending, timeout_ns, &err));
  kvs_engine_unref(borrower);
  if (kvs_py_waited(state, rc, &err, timeout_ns, NULL) < 0) return NULL;
  kvs_py_collect(engine);
  Py_RETURN_NONE;
}

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(set_compute_stream_doc,
             "set_compute_stream($self, stream, /)\n--\n\n"
             "Set the compute stream, on which the model runs. Transfers without stream= start after its work.\n\n"
             "Default: the legacy default stream. Applies to transfers submitted later. Any thread may call.");
PyDoc_STRVAR(
    set_defaults_doc,
    "set_defaults($self, /, *, path='auto', priority=None, max_ctas=None, pace_gbps=None)\n--\n\n"
    "Set the defaults of transfers that leave these open (path='auto', None), with values as for swap_blocks_batch().\n"
    "All four are set: what is left out goes back to built-in values. The first ones come from KVSWAP_PATH,\n"
    "KVSWAP_MAX_CTAS and KVSWAP_PACE_GBPS. For transfers submitted later. Any thread may call.");
PyDoc_STRVAR(synchronize_doc,
             "synchronize($self, /, timeout=None)\n--\n\n"
             "Wait until all work queued on the device has ended, that of other libraries too.\n\n"
             "timeout: seconds, None for no limit; after TimeoutError the work goes on. Ctrl-C works. Any thread may "
             "call. On a\n"
             "GPU this is the driver's own wait, which keeps a core busy unless the context's flags say otherwise.");
PyDoc_STRVAR(
    set_slots_doc,
    "set_slots($self, /, slot_nbytes, count=3, *, timeout=10.0)\n--\n\n"
    "Set the GPU memory of path 'burst': each direction has `count` (2 to 8) slots of slot_nbytes bytes\n"
    "(a multiple of 128 KiB, at most 1 GiB) and two of half as much. 0 frees the memory; path 'burst' is off "
    "then.\n\n"
    "Waits until the device's transfers have ended: TimeoutError after `timeout` seconds (None: no limit), and "
    "nothing\n"
    "has changed. The driver's allocating and freeing may hold up what else runs on the device, and the call until "
    "all\n"
    "that is queued there has run, `timeout` or not. ValueError: sizes beyond these.\n"
    "DeviceError: there is not so much memory; path 'burst' is off then. Ctrl-C works. Any thread may call.");
PyDoc_STRVAR(
    lend_doc,
    "lend($self, /, to, slot_nbytes=8388608, count=2, *, share=1.0, timeout=10.0)\n--\n\n"
    "Lend this device's link to the host to transfers of device `to`, which path 'borrow' then uses beside its own.\n\n"
    "Both are devices of this process, of one kind, and reach each other's memory. A transfer borrows while this "
    "device\n"
    "has no unfinished transfer in its direction, and no more than `count` (2 to 4) pieces of slot_nbytes bytes (a\n"
    "multiple of 128 KiB, at most 64 MiB) stand on the link at a time: what this device copies meanwhile waits for no\n"
    "more than these. On both devices 2 * count * slot_nbytes bytes of memory are allocated.\n"
    "share: bytes that this link gets for each byte of the borrower's own, 0.1 to 10.\n\n"
    "What is lent is this device's work, too: synchronize() and free() of it wait for the borrower's transfers.\n"
    "Lending again takes the link back and lends anew; slot_nbytes=0 ends it. Both wait until the link carries "
    "nothing\n"
    "of the borrower's: TimeoutError after `timeout` seconds (None: no limit), and nothing has changed. ValueError: "
    "values\n"
    "beyond these, nothing has changed. Error: no peer access. MemoryError, DeviceError: not so much memory, and "
    "nothing\n"
    "is lent any more. Any thread may call.");
PyDoc_STRVAR(alloc_doc,
             "alloc($self, /, nbytes, *, host=False, chunks=False)\n--\n\n"
             "Allocate nbytes bytes of device memory, or with host=True of pinned host memory; not initialised.\n\n"
             "chunks=True: device memory mapped in chunks, as torch's expandable segments are; kvswap.memory.export() "
             "shares it\n"
             "chunk by chunk.\n\n"
             "MemoryError, DeviceError: the memory is not available. Any thread may call.");
PyDoc_STRVAR(register_doc,
             "register($self, /, ptr, nbytes=None)\n--\n\n"
             "Pin host memory of the caller: copies of pinned memory reach the link's speed.\n\n"
             "ptr: an address, then nbytes is needed, or a tensor, then nbytes may be left out. Ranges must not "
             "overlap, and no\n"
             "copy is merged across the end of a range. The caller keeps the memory mapped until unregister(ptr).");
PyDoc_STRVAR(
    unregister_doc,
    "unregister($self, /, ptr, timeout=60.0)\n--\n\n"
    "Undo register(ptr), after waiting for the transfers that may use the memory and all other work of the device.\n\n"
    "timeout: seconds, None for no limit; after TimeoutError or Ctrl-C call it again. The memory must stay mapped\n"
    "until it returns. ValueError: nothing is registered at ptr.");
PyDoc_STRVAR(
    stats_doc,
    "stats($self, /)\n--\n\n"
    "Dict of counters since the device was opened: submitted, done, failed, cancelled (transfers), "
    "bytes_d2h, bytes_h2d,\n"
    "bytes_other (of transfers done), copies (issued), merged (blocks copied together with a neighbouring "
    "block),\n"
    "refused_full (submissions that a full lane refused), second_attempts (transfers that took another path after\n"
    "the first one was refused or failed), lent_bytes_d2h, lent_bytes_h2d (of other devices' transfers, queued on\n"
    "this one's link), borrowed_bytes_d2h, borrowed_bytes_h2d (of this one's transfers, queued on others' links),\n"
    "waits_raw, waits_war, waits_waw (waits inserted between transfers of pools: for a read after "
    "a write, a write after\n"
    "a read, a write after a write; one may serve several), and as of now unfinished, lanes, "
    "staging_nbytes.\n\n"
    "paths: {'d2h': {'dma': {'transfers': ..., 'blocks': ..., 'bytes': ..., 'link_bytes': ..., 'seconds': on the\n"
    "device, a float}}}, by direction ('d2h', 'h2d', 'other') and path, of transfers done, where there were any.\n"
    "link_bytes are fewer than bytes where blocks were coded. Any thread may call.");
PyDoc_STRVAR(
    device_doc,
    "Device(name=None)\n--\n\n"
    "A device: 'cuda', 'cuda:1', 'host', 'host:0'. None: the current GPU, or host:0 where there is none.\n\n"
    "A number is that of a GPU. A torch.device is taken too: 'cuda' is then torch's current GPU. 'cpu' is host:0.\n"
    "A host device is memory and threads of this process that behave as a GPU does. Objects of the same name are the\n"
    "same device, and equal. The first use of a GPU in a process opens its primary context (about 600 MB of its "
    "memory).\n"
    "Any thread may use it. ValueError: not a device name. kvswap.Error: there is no such device.");

static PyMethodDef methods[] = {
    {"set_compute_stream", device_set_compute_stream, METH_O, set_compute_stream_doc},
    {"set_defaults", KVS_PY_FASTCALL(device_set_defaults), METH_FASTCALL | METH_KEYWORDS, set_defaults_doc},
    {"set_slots", KVS_PY_FASTCALL(device_set_slots), METH_FASTCALL | METH_KEYWORDS, set_slots_doc},
    {"lend", KVS_PY_FASTCALL(device_lend), METH_FASTCALL | METH_KEYWORDS, lend_doc},
    {"synchronize", KVS_PY_FASTCALL(device_synchronize), METH_FASTCALL | METH_KEYWORDS, synchronize_doc},
    {"alloc", KVS_PY_FASTCALL(device_alloc), METH_FASTCALL | METH_KEYWORDS, alloc_doc},
    {"register", KVS_PY_FASTCALL(device_register), METH_FASTCALL | METH_KEYWORDS, register_doc},
    {"unregister", KVS_PY_FASTCALL(device_unregister), METH_FASTCALL | METH_KEYWORDS, unregister_doc},
    {"stats", kvs_py_device_stats, METH_NOARGS, stats_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"name", device_name, NULL, "str: 'cuda:0', 'host:0'.", NULL},
    {"kind", device_kind, NULL, "str: 'cuda' or 'host'.", NULL},
    {"info", kvs_py_device_info, NULL, "dict: facts of the device; kvswap.typing.OpenedInfo says what each is.", NULL},
    {"lost", device_lost, NULL, "bool: the device is lost after an asynchronous fault; every transfer on it fails.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)device_doc},
    {Py_tp_new, device_create},
    {Py_tp_dealloc, device_dealloc},
    {Py_tp_repr, device_repr},
    {Py_tp_richcompare, device_compare},
    {Py_tp_hash, device_hash},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec kvs_py_device_spec = {
    .name = "kvswap.Device",
    .basicsize = sizeof(struct kvs_py_device),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
