/* kvswap._C._remote_...: sealed blocks, many at once, for kvswap.remote. The lists are the package's own: no
 * other thread changes them, and each address is of memory that the caller keeps. */
#include "py/address.h"
#include "py/args.h"
#include "py/module.h"
#include "py/objects.h"
#include "remote/exit.h"
#include "remote/header.h"

#include <string.h>

/* One call. blocks: NULL where a check copies nothing. */
struct remote_call {
  struct kvs_py_list slots, blocks;
  uint64_t nbytes;
  Py_buffer identity, keys, secret; /* obj NULL: none */
  uint8_t *verdicts;                /* NULL: seal */
  enum kvs_remote_how how;
};

static void clear(struct remote_call *call) {
  Py_XDECREF(call->slots.keep);
  Py_XDECREF(call->blocks.keep);
  PyBuffer_Release(&call->identity);
  PyBuffer_Release(&call->keys);
  PyBuffer_Release(&call->secret);
}

static int read_words(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_py_list *list) {
  int is = kvs_py_words(state, object, name, list);
  if (is == 0) kvs_py_complain(PyExc_TypeError, name, -1, "must be an int64 or uint64 array");
  return is == 1 ? 0 : -1;
}

static int read_bytes(PyObject *object, const char *name, size_t needed, Py_buffer *to) {
  if (PyObject_GetBuffer(object, to, PyBUF_SIMPLE) < 0) return -1;
  if ((size_t)to->len == needed) return 0;
  return kvs_py_complain(PyExc_ValueError, name, -1, "has %zd bytes; it must have %zu", to->len, needed);
}

static void run_one(const struct remote_call *call, size_t i) {
  struct kvs_remote_label label = {
      .identity = call->identity.buf,
      .key = (const uint8_t *)call->keys.buf + i * KVS_REMOTE_HASH_NBYTES,
      .secret = call->secret.obj ? call->secret.buf : NULL,
      .nbytes = call->nbytes,
  };
  void *slot = (void *)(uintptr_t)call->slots.data[i];
  void *block = call->blocks.keep ? (void *)(uintptr_t)call->blocks.data[i] : NULL;
  if (!call->verdicts) {
    kvs_remote_seal(slot, block, &label);
    return;
  }
  call->verdicts[i] = (uint8_t)kvs_remote_open(slot, block, &label, call->how);
}

static void run(const struct remote_call *call) {
  Py_BEGIN_ALLOW_THREADS
  for (size_t i = 0; i < call->slots.count; i++) run_one(call, i);
  Py_END_ALLOW_THREADS
}

enum { SLOTS, BLOCKS, NBYTES, IDENTITY, KEYS, SECRET, HOW, ARGUMENTS };
static const char *const names[] = {"slots", "blocks", "nbytes", "identity", "keys", "secret", "how"};

static int read_all(struct kvs_py_state *state, PyObject *const *values, bool seal, struct remote_call *call) {
  if (read_words(state, values[SLOTS], "slots", &call->slots) < 0) return -1;
  if (kvs_py_uint64(values[NBYTES], "nbytes", -1, &call->nbytes) < 0) return -1;
  if (read_bytes(values[IDENTITY], "identity", KVS_REMOTE_HASH_NBYTES, &call->identity) < 0) return -1;
  if (read_bytes(values[KEYS], "keys", call->slots.count * KVS_REMOTE_HASH_NBYTES, &call->keys) < 0) return -1;
  if (values[SECRET] != Py_None && read_bytes(values[SECRET], "secret", KVS_REMOTE_HASH_NBYTES, &call->secret) < 0)
    return -1;
  if (!seal && values[BLOCKS] == Py_None) return 0;
  if (read_words(state, values[BLOCKS], "blocks", &call->blocks) < 0) return -1;
  return kvs_py_same_length("blocks", call->blocks.count, "slots", call->slots.count);
}

static PyObject *remote_seal(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"_remote_seal", names, HOW, HOW, HOW};
  struct remote_call call = {.verdicts = NULL};
  PyObject *values[ARGUMENTS];
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  int rc = read_all(PyModule_GetState(module), values, true, &call);
  if (rc == 0) run(&call);
  clear(&call);
  return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *remote_check(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"_remote_check", names, HOW, ARGUMENTS, ARGUMENTS};
  struct remote_call call = {.verdicts = NULL};
  PyObject *values[ARGUMENTS], *verdicts = NULL;
  uint64_t how = KVS_REMOTE_COPY;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (values[HOW] && kvs_py_uint64(values[HOW], "how", -1, &how) < 0) return NULL;
  if (read_all(PyModule_GetState(module), values, false, &call) == 0)
    verdicts = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)call.slots.count);
  if (verdicts) {
    call.verdicts = (uint8_t *)PyBytes_AS_STRING(verdicts);
    call.how = (enum kvs_remote_how)how;
    run(&call);
  }
  clear(&call);
  return verdicts;
}

static PyObject *remote_exit_count(PyObject *module, PyObject *more) {
  (void)module;
  kvs_remote_exit_count(more == Py_True ? 1 : -1);
  return Py_NewRef(Py_None);
}

/* -- the caller's blocks ------------------------------------------------------------------------------------------- */

struct wanted {
  struct kvs_py_state *state;
  uint64_t nbytes, count;
  bool write;
  PyObject *hold;
};

/* Blocks of one tensor: block i is at its address + i * nbytes. */
static int rows(struct wanted *wanted, PyObject *tensor, PyObject *object, uint64_t *to) {
  struct kvs_py_address address;
  struct kvs_ids ids;
  PyObject *keep = NULL;
  if (kvs_py_read_address(wanted->state, tensor, "blocks", -1, wanted->write, &wanted->hold, &address) < 0) return -1;
  if (kvs_py_ids(wanted->state, object, "ids", &ids, &keep) < 0) return -1;
  uint64_t most = (address.nbytes == UINT64_MAX ? (uint64_t)INT64_MAX : address.nbytes) / wanted->nbytes;
  int rc = kvs_py_same_length("ids", ids.count, "keys", wanted->count);
  for (size_t i = 0; rc == 0 && i < ids.count; i++) {
    int64_t id = ids.width == 4 ? ((const volatile int32_t *)ids.data)[i] : ((const volatile int64_t *)ids.data)[i];
    if (id < 0 || (uint64_t)id >= most)
      rc = kvs_py_complain(PyExc_IndexError, "ids", (Py_ssize_t)i, "is %lld; blocks has %llu blocks of %llu bytes",
                           (long long)id, (unsigned long long)most, (unsigned long long)wanted->nbytes);
    to[i] = address.ptr + (uint64_t)id * wanted->nbytes;
  }
  Py_XDECREF(keep);
  return rc;
}

static int pointers(struct wanted *wanted, PyObject *object, uint64_t *to) {
  struct kvs_py_list list = {.keep = NULL};
  int rc = kvs_py_pointers(wanted->state, object, "blocks", wanted->write, &wanted->hold, &list);
  if (rc == 0) rc = kvs_py_same_length("blocks", list.count, "keys", wanted->count);
  for (size_t i = 0; rc == 0 && i < list.count; i++) {
    to[i] = list.data[i];
    if (list.limits && list.limits[i] < wanted->nbytes)
      rc = kvs_py_complain(PyExc_ValueError, "blocks", (Py_ssize_t)i, "has %llu bytes; a block of the store has %llu",
                           (unsigned long long)list.limits[i], (unsigned long long)wanted->nbytes);
  }
  Py_XDECREF(list.keep);
  return rc;
}

static PyObject *remote_addresses(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const own[] = {"blocks", "ids", "nbytes", "count", "write"};
  static const struct kvs_py_args spec = {"_remote_addresses", own, 5, 5, 5};
  struct wanted wanted = {.state = PyModule_GetState(module)};
  PyObject *values[5];
  uint64_t *to;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_uint64(values[2], "nbytes", -1, &wanted.nbytes) < 0) return NULL;
  if (kvs_py_uint64(values[3], "count", -1, &wanted.count) < 0) return NULL;
  if (wanted.nbytes == 0) return kvs_py_complain(PyExc_ValueError, "nbytes", -1, "must not be 0"), NULL;
  wanted.write = values[4] == Py_True;
  PyObject *array = kvs_py_uint64_array(wanted.count, &to);
  if (!array) return NULL;
  int rc = values[1] != Py_None ? rows(&wanted, values[0], values[1], to) : pointers(&wanted, values[0], to);
  PyObject *hold = wanted.hold ? wanted.hold : Py_NewRef(Py_None);
  if (rc == 0) return Py_BuildValue("(NN)", array, hold);
  Py_DECREF(array);
  Py_DECREF(hold);
  return NULL;
}

PyDoc_STRVAR(seal_doc, "_remote_seal($module, /, slots, blocks, nbytes, identity, keys, secret)\n--\n\n"
                       "Copy blocks into slots behind headers. slots, blocks: addresses; keys: 16 bytes each, joined.");
PyDoc_STRVAR(
    check_doc,
    "_remote_check($module, /, slots, blocks, nbytes, identity, keys, secret, how=0)\n--\n\n"
    "A byte a slot: 0: right, and copied to blocks unless that is None. how: 1: check the copies, too; 2: slots "
    "have headers only, check the blocks where they are.");
PyDoc_STRVAR(exit_doc,
             "_remote_exit_count($module, opened, /)\n--\n\n"
             "A client of Mooncake was opened, or closed. At exit a process with open ones leaves by _exit().");
PyDoc_STRVAR(addresses_doc,
             "_remote_addresses($module, /, blocks, ids, nbytes, count, write)\n--\n\n"
             "(addresses, what keeps them) of the caller's blocks, as FileStore takes them, of host memory.");
PyMethodDef kvs_py_remote_methods[] = {
    {"_remote_seal", KVS_PY_FASTCALL(remote_seal), METH_FASTCALL | METH_KEYWORDS, seal_doc},
    {"_remote_check", KVS_PY_FASTCALL(remote_check), METH_FASTCALL | METH_KEYWORDS, check_doc},
    {"_remote_exit_count", remote_exit_count, METH_O, exit_doc},
    {"_remote_addresses", KVS_PY_FASTCALL(remote_addresses), METH_FASTCALL | METH_KEYWORDS, addresses_doc},
    {NULL, NULL, 0, NULL},
};
