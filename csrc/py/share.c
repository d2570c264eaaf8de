/* kvswap._C._Share, the member that kvswap.share wraps, and kvswap.share.ShareTransfer. A _Share holds its pools until
 * nothing of it is under way. */
#include "share/share.h"
#include "py/args.h"
#include "py/arrays.h"
#include "py/errors.h"
#include "py/handle.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/options.h"
#include "py/transfer.h"
#include "py/wait.h"

struct share_object {
  PyObject_HEAD
  struct kvs_share *share;
  PyObject *hold; /* the pools */
};

static struct kvs_share *core(PyObject *self) { return ((struct share_object *)self)->share; }

/* -- ShareTransfer, its kind --------------------------------------------------------------------------------------- */

static bool is_done(void *job) { return kvs_share_job_done(job); }
static int wait_for(void *job, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_share_job_wait(job, timeout_ns, err);
}
static bool cancel(void *job) {
  (void)job;
  return false;
}
static void unref(void *job) { kvs_share_job_unref(job); }
static int error_of(void *job, struct kvs_error *err) { return kvs_share_job_error(job, err); }
static size_t failed(void *job, uint32_t *positions, size_t capacity) {
  return kvs_share_job_failed(job, positions, capacity);
}

static void get_now(void *job, struct kvs_py_transfer_now *now) {
  struct kvs_share_job_info info = {0};
  kvs_share_job_get_info(job, &info);
  *now = (struct kvs_py_transfer_now){info.state, info.nbytes, info.num_blocks, info.elapsed_ns};
}

static void collect(void *job) { (void)job; }

static const struct kvs_py_transfer_kind kind = {is_done, wait_for, cancel, unref, error_of, failed, get_now, collect};

static struct kvs_share_job_info info_now(PyObject *self) {
  struct kvs_share_job_info info = {0};
  kvs_share_job_get_info(((struct kvs_py_any_transfer *)self)->transfer, &info);
  return info;
}

static PyObject *transfer_by_others(PyObject *self, void *Py_UNUSED(ignored)) {
  return PyLong_FromUnsignedLongLong(info_now(self).by_others);
}

static PyObject *transfer_direction(PyObject *self, void *Py_UNUSED(ignored)) {
  return PyUnicode_FromString(info_now(self).direction == KVS_D2H ? "D2H" : "H2D");
}

static PyObject *transfer_path(PyObject *Py_UNUSED(self), void *Py_UNUSED(ignored)) {
  return PyUnicode_FromString("share");
}

static PyObject *transfer_repr(PyObject *self) {
  struct kvs_share_job_info info = info_now(self);
  return PyUnicode_FromFormat("<kvswap.share.ShareTransfer %s of %llu block%s, %s>",
                              info.direction == KVS_D2H ? "store" : "load", (unsigned long long)info.num_blocks,
                              info.num_blocks == 1 ? "" : "s", kvs_py_state_name(info.state));
}

PyDoc_STRVAR(transfer_doc,
             "A load or store whose pieces go over the links of several processes. It ends in exactly one state: done\n"
             "or failed. Its blocks on both sides belong to it until then. Any thread may use it. In asyncio\n"
             "`await transfer` is wait() without blocking the loop.");
static PyGetSetDef transfer_getset[] = {
    {"by_others", transfer_by_others, NULL, "int: bytes that came over links of other members so far.", NULL},
    {"direction", transfer_direction, NULL, "str: 'H2D' of a load, 'D2H' of a store.", NULL},
    {"path", transfer_path, NULL, "str: 'share': several links, for counts by path.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot transfer_slots[] = {
    {Py_tp_doc, (void *)transfer_doc},
    {Py_tp_repr, transfer_repr},
    {Py_tp_getset, transfer_getset},
    {0, NULL},
};
PyType_Spec kvs_py_share_transfer_spec = {
    .name = "kvswap.share.ShareTransfer",
    .basicsize = sizeof(struct kvs_py_any_transfer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = transfer_slots,
};

/* -- making a member ----------------------------------------------------------------------------------------------- */

static struct kvs_pool **read_pools(struct kvs_py_state *state, PyObject *tuple, const char *name) {
  Py_ssize_t count = PyTuple_GET_SIZE(tuple);
  struct kvs_pool **pools = PyMem_Calloc((size_t)count + 1, sizeof *pools);
  if (!pools) PyErr_NoMemory();
  for (Py_ssize_t i = 0; pools && i < count; i++) {
    PyObject *pool = PyTuple_GET_ITEM(tuple, i);
    bool right = (PyObject *)Py_TYPE(pool) == state->pool_type;
    if (right) pools[i] = kvs_py_pool_core(pool);
    if (right && !kvs_py_pool_readonly(pool)) continue;
    kvs_py_complain(PyExc_TypeError, name, i, "must be a Pool of writable memory, not %s", Py_TYPE(pool)->tp_name);
    PyMem_Free(pools);
    pools = NULL;
  }
  return pools;
}

static int open_share(struct kvs_py_state *state, struct share_object *self, PyObject *host, PyObject *gpu,
                      struct kvs_share_options *options) {
  struct kvs_error err = {0};
  struct kvs_pool **host_pools = read_pools(state, host, "host");
  struct kvs_pool **gpu_pools = host_pools ? read_pools(state, gpu, "gpu") : NULL;
  int rc = -1;
  if (gpu_pools) {
    options->host_pools = host_pools;
    options->gpu_pools = PyTuple_GET_SIZE(gpu) ? gpu_pools : NULL;
    options->npools = (size_t)PyTuple_GET_SIZE(host);
    KVS_PY_NO_GIL(rc = kvs_share_open(options, &self->share, &err));
    if (rc != KVS_OK) kvs_py_raise(state, &err);
  }
  PyMem_Free(host_pools);
  PyMem_Free(gpu_pools);
  return rc == KVS_OK ? 0 : -1;
}

static PyObject *share_create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"host",  "gpu",         "ptr",   "block_nbytes", "num_blocks", "piece_nbytes", "slots",
                          "share", "stall",       "wait",  "store_wait",   "padded",     "stride",       "takes_only",
                          "file",  "file_nbytes", "parts", "part_stride",  NULL};
  struct kvs_py_state *state = PyType_GetModuleState(type);
  struct kvs_share_options options = {0};
  PyObject *host, *gpu;
  unsigned long long ptr, block, blocks, piece, stride = 0, file_nbytes = 0, part_stride = 0;
  int padded, takes_only = 0;
  double stall, wait, store;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!KKKKIddddp|$KpiKIK:_Share", names, &PyTuple_Type, &host,
                                   &PyTuple_Type, &gpu, &ptr, &block, &blocks, &piece, &options.slots, &options.share,
                                   &stall, &wait, &store, &padded, &stride, &takes_only, &options.file, &file_nbytes,
                                   &options.parts, &part_stride))
    return NULL;
  if (PyTuple_GET_SIZE(gpu) &&
      kvs_py_same_length("gpu", (size_t)PyTuple_GET_SIZE(gpu), "host", (size_t)PyTuple_GET_SIZE(host)) < 0)
    return NULL;
  if (!(stall > 0 && stall < 1e6 && wait >= 0 && wait < 1e6 && store > 0 && store < 1e6))
    return kvs_py_complain(PyExc_ValueError, "stall", -1, "or another limit is no time in seconds"), NULL;
  options.host = ptr;
  options.block_nbytes = block;
  options.num_blocks = blocks;
  options.piece_nbytes = piece;
  options.padded = padded != 0;
  options.stride = stride;
  options.takes_only = takes_only != 0;
  options.file_nbytes = file_nbytes;
  options.part_stride = part_stride;
  options.stall_ns = (uint64_t)(stall * 1e9);
  options.wait_ns = (uint64_t)(wait * 1e9);
  options.store_ns = (uint64_t)(store * 1e9);
  struct share_object *self = (struct share_object *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->hold = PyTuple_Pack(2, host, gpu);
  if (self->hold && open_share(state, self, host, gpu, &options) == 0) return (PyObject *)self;
  Py_DECREF(self);
  return NULL;
}

static void share_dealloc(PyObject *self) {
  struct kvs_share *share = core(self);
  PyObject *hold = ((struct share_object *)self)->hold;
  struct kvs_error ignored;
  int rc = KVS_OK;
  kvs_py_object_free(self);
  Py_BEGIN_ALLOW_THREADS
  if (share) rc = kvs_share_finish(share, &ignored);
  if (share) kvs_share_unref(share);
  Py_END_ALLOW_THREADS
  if (rc == KVS_OK) Py_XDECREF(hold); /* else pieces are still under way: the memory stays */
}

/* -- meeting ------------------------------------------------------------------------------------------------------- */

static PyObject *share_form(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  struct kvs_share_form form;
  kvs_share_get_form(core(self), &form);
  return Py_BuildValue("(KKKII)", (unsigned long long)form.block_nbytes, (unsigned long long)form.num_blocks,
                       (unsigned long long)form.slot_nbytes, (unsigned)form.piece_blocks, form.slots);
}

static PyObject *share_meet(PyObject *self, PyObject *args) {
  struct kvs_error err = {0};
  unsigned rank;
  int fd = -1, rc;
  if (!PyArg_ParseTuple(args, "I:meet", &rank)) return NULL;
  KVS_PY_NO_GIL(rc = kvs_share_meet(core(self), rank, &fd, &err));
  return rc == KVS_OK ? PyLong_FromLong(fd) : kvs_py_raise(kvs_py_state_of(self), &err);
}

static PyObject *share_link(PyObject *self, PyObject *args) {
  struct kvs_error err = {0};
  unsigned rank, slots;
  int socket, process, fd, lends, rc;
  if (!PyArg_ParseTuple(args, "IiiiIp:link", &rank, &socket, &process, &fd, &slots, &lends)) return NULL;
  KVS_PY_NO_GIL(rc = kvs_share_link(core(self), rank, socket, process, fd, slots, lends != 0, &err));
  return rc == KVS_OK ? Py_NewRef(Py_None) : kvs_py_raise(kvs_py_state_of(self), &err);
}

static PyObject *share_unmeet(PyObject *self, PyObject *args) {
  unsigned rank;
  if (!PyArg_ParseTuple(args, "I:unmeet", &rank)) return NULL;
  KVS_PY_NO_GIL(kvs_share_unmeet(core(self), rank));
  Py_RETURN_NONE;
}

static PyObject *share_linked(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  uint32_t ranks;
  KVS_PY_NO_GIL(ranks = kvs_share_linked(core(self)));
  return PyLong_FromUnsignedLong(ranks);
}

struct waiting {
  struct kvs_share *share;
  unsigned ranks;
};

static int wait_linked(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  struct waiting *waiting = arg;
  return kvs_share_wait_linked(waiting->share, waiting->ranks, timeout_ns, err);
}

static PyObject *share_wait_linked(PyObject *self, PyObject *args) {
  struct waiting waiting = {core(self), 0};
  PyObject *timeout;
  int64_t timeout_ns;
  if (!PyArg_ParseTuple(args, "IO:wait_linked", &waiting.ranks, &timeout)) return NULL;
  if (kvs_py_timeout(timeout, "timeout", &timeout_ns) < 0) return NULL;
  if (kvs_py_wait(kvs_py_state_of(self), wait_linked, &waiting, timeout_ns, "the other members") < 0) return NULL;
  Py_RETURN_NONE;
}

/* -- work ---------------------------------------------------------------------------------------------------------- */

static PyObject *share_submit(PyObject *self, PyObject *args) {
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_error err = {0};
  struct kvs_share_job *job = NULL;
  struct kvs_ids host, gpu;
  PyObject *given[2], *keep[2] = {NULL, NULL}, *direction, *after;
  unsigned long long key;
  uint64_t stream = 0;
  struct kvs_share_name named = {0};
  int64_t way;
  int rc = -1;
  if (!PyArg_ParseTuple(args, "OOOKIIO:submit", &direction, &given[0], &given[1], &key, &named.ranks, &named.rank,
                        &after))
    return NULL;
  named.key = key;
  if (kvs_py_direction(direction, &way) < 0) return NULL;
  if (after != Py_None && kvs_py_stream_handle(state, after, "after", kvs_share_engine(core(self)), &stream) < 0)
    return NULL;
  if (kvs_py_ids(state, given[0], "host_ids", &host, &keep[0]) == 0 &&
      kvs_py_ids(state, given[1], "gpu_ids", &gpu, &keep[1]) == 0) {
    KVS_PY_NO_GIL(rc = kvs_share_submit(core(self), (enum kvs_direction)way, &host, &gpu, key ? &named : NULL,
                                        after != Py_None ? &stream : NULL, &job, &err));
    if (rc != KVS_OK) kvs_py_raise(state, &err);
  }
  Py_XDECREF(keep[0]);
  Py_XDECREF(keep[1]);
  return rc == KVS_OK ? kvs_py_any_transfer_new(state->share_transfer_type, &kind, job) : NULL;
}

static PyObject *share_stats(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  struct kvs_share_stats stats;
  KVS_PY_NO_GIL(kvs_share_get_stats(core(self), &stats));
  return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "brought_for_others_d2h",
                       (unsigned long long)stats.brought_for_others[KVS_D2H], "brought_for_others_h2d",
                       (unsigned long long)stats.brought_for_others[KVS_H2D], "brought_by_others_d2h",
                       (unsigned long long)stats.brought_by_others[KVS_D2H], "brought_by_others_h2d",
                       (unsigned long long)stats.brought_by_others[KVS_H2D], "passed_on",
                       (unsigned long long)stats.passed_on, "pieces_late", (unsigned long long)stats.pieces_late,
                       "answers_dropped", (unsigned long long)stats.answers_dropped, "links_lost",
                       (unsigned long long)stats.links_lost);
}

static int close_share(void *share, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_share_close(share, timeout_ns, err);
}

static PyObject *share_close(PyObject *self, PyObject *args) {
  PyObject *timeout;
  int64_t timeout_ns;
  if (!PyArg_ParseTuple(args, "O:close", &timeout)) return NULL;
  if (kvs_py_timeout(timeout, "timeout", &timeout_ns) < 0) return NULL;
  if (kvs_py_wait(kvs_py_state_of(self), close_share, core(self), timeout_ns, "the member's last pieces") < 0)
    return NULL;
  Py_RETURN_NONE;
}

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"form", share_form, METH_NOARGS,
     PyDoc_STR("form($self, /)\n--\n\n(block_nbytes, num_blocks, slot_nbytes, piece_blocks, slots)")},
    {"meet", share_meet, METH_VARARGS,
     PyDoc_STR("meet($self, rank, /)\n--\n\nA descriptor of slots for that member; -1: a member that only lends.")},
    {"link", share_link, METH_VARARGS,
     PyDoc_STR("link($self, rank, socket, process, slots_fd, slots, lends, /)\n--\n\nTakes over socket and process.")},
    {"unmeet", share_unmeet, METH_VARARGS, PyDoc_STR("unmeet($self, rank, /)\n--\n\nGive back what meet() made.")},
    {"linked", share_linked, METH_NOARGS, PyDoc_STR("linked($self, /)\n--\n\nA bit for each rank that is here.")},
    {"wait_linked", share_wait_linked, METH_VARARGS,
     PyDoc_STR("wait_linked($self, ranks, timeout, /)\n--\n\nWait for the members of a bit mask.")},
    {"submit", share_submit, METH_VARARGS,
     PyDoc_STR("submit($self, direction, host_ids, gpu_ids, key, ranks, rank, after, /)\n--\n\nA ShareTransfer.")},
    {"stats", share_stats, METH_NOARGS, PyDoc_STR("stats($self, /)\n--\n\nBytes and counts since the start.")},
    {"close", share_close, METH_VARARGS,
     PyDoc_STR("close($self, timeout, /)\n--\n\nStop, and wait for the last pieces.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)"One member of a group of processes that share their links: kvswap.share.Member."},
    {Py_tp_new, share_create},
    {Py_tp_dealloc, share_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec kvs_py_share_spec = {
    .name = "kvswap._C._Share",
    .basicsize = sizeof(struct share_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
