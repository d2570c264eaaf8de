/* kvswap._C._remote_...: slots of a remote pool, many at once, for kvswap.remote. The lists are the package's own: no
 * other thread changes them, and each address is of memory that the caller keeps. */
#include "bind.h"

#include <string.h>

#include "../remote/slot.h"

enum work { SEAL, CHECK, RENUMBER, VOID };

/* One call. blocks, keys, generations: NULL where the work takes none. */
struct remote_call {
  enum work work;
  struct kvs_py_list slots, blocks, generations;
  uint64_t nbytes;
  Py_buffer keys; /* obj NULL: none */
  uint8_t *verdicts;
};

static void clear(struct remote_call *call) {
  Py_XDECREF(call->slots.keep);
  Py_XDECREF(call->blocks.keep);
  Py_XDECREF(call->generations.keep);
  PyBuffer_Release(&call->keys);
}

static int read_words(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_py_list *list) {
  int is = kvs_py_words(state, object, name, list);
  if (is == 0) kvs_py_complain(PyExc_TypeError, name, -1, "must be an int64 or uint64 array");
  return is == 1 ? 0 : -1;
}

static int read_keys(struct remote_call *call, PyObject *object) {
  if (PyObject_GetBuffer(object, &call->keys, PyBUF_SIMPLE) < 0) return -1;
  size_t given = (size_t)call->keys.len, needed = call->slots.count * KVS_REMOTE_KEY_NBYTES;
  if (given == needed) return 0;
  return kvs_py_complain(PyExc_ValueError, "keys", -1, "has %zu bytes; %zu slots need %zu", given, call->slots.count,
                         needed);
}

static const uint8_t *key_of(const struct remote_call *call, size_t i) {
  return (const uint8_t *)call->keys.buf + i * KVS_REMOTE_KEY_NBYTES;
}

/* A checked block is copied to where it is wanted; nothing is written where the check fails. */
static void check_one(const struct remote_call *call, size_t i) {
  const void *slot = (const void *)(uintptr_t)call->slots.data[i];
  uint64_t generation = call->generations.keep == NULL ? 0 : call->generations.data[i];
  enum kvs_remote_verdict verdict = kvs_remote_check(slot, call->nbytes, key_of(call, i), generation);
  call->verdicts[i] = (uint8_t)verdict;
  if (verdict == KVS_REMOTE_RIGHT && call->blocks.keep != NULL)
    memcpy((void *)(uintptr_t)call->blocks.data[i], (const uint8_t *)slot + KVS_REMOTE_HEADER_NBYTES, call->nbytes);
}

static void run_one(const struct remote_call *call, size_t i) {
  void *slot = (void *)(uintptr_t)call->slots.data[i];
  switch (call->work) {
  case SEAL:
    kvs_remote_seal(slot, (const void *)(uintptr_t)call->blocks.data[i], call->nbytes, key_of(call, i),
                    call->generations.data[i]);
    break;
  case CHECK:
    check_one(call, i);
    break;
  case RENUMBER:
    kvs_remote_renumber(slot, call->generations.data[i]);
    break;
  case VOID:
    kvs_remote_void(slot);
    break;
  }
}

static void run(const struct remote_call *call) {
  Py_BEGIN_ALLOW_THREADS
  for (size_t i = 0; i < call->slots.count; ++i) run_one(call, i);
  Py_END_ALLOW_THREADS
}

enum { SLOTS, BLOCKS, NBYTES, KEYS, GENERATIONS, ARGUMENTS };
static const char *const names[] = {"slots", "blocks", "nbytes", "keys", "generations"};

static int read_all(struct kvs_py_state *state, PyObject *const *values, struct remote_call *call) {
  if (read_words(state, values[SLOTS], "slots", &call->slots) < 0) return -1;
  if (kvs_py_uint64(values[NBYTES], "nbytes", -1, &call->nbytes) < 0) return -1;
  if (read_keys(call, values[KEYS]) < 0) return -1;
  bool seal = call->work == SEAL;
  if (seal || values[BLOCKS] != Py_None) {
    if (read_words(state, values[BLOCKS], "blocks", &call->blocks) < 0) return -1;
    if (kvs_py_same_length("blocks", call->blocks.count, "slots", call->slots.count) < 0) return -1;
  }
  if (seal || values[GENERATIONS] != Py_None) {
    if (read_words(state, values[GENERATIONS], "generations", &call->generations) < 0) return -1;
    if (kvs_py_same_length("generations", call->generations.count, "slots", call->slots.count) < 0) return -1;
  }
  return 0;
}

static PyObject *remote_seal(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"_remote_seal", names, ARGUMENTS, ARGUMENTS, ARGUMENTS};
  struct remote_call call = {.work = SEAL};
  PyObject *values[ARGUMENTS];
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  int rc = read_all(PyModule_GetState(module), values, &call);
  if (rc == 0) run(&call);
  clear(&call);
  return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *remote_check(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"_remote_check", names, ARGUMENTS, ARGUMENTS, ARGUMENTS};
  struct remote_call call = {.work = CHECK};
  PyObject *values[ARGUMENTS], *verdicts = NULL;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (read_all(PyModule_GetState(module), values, &call) == 0)
    verdicts = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)call.slots.count);
  if (verdicts != NULL) {
    call.verdicts = (uint8_t *)PyBytes_AS_STRING(verdicts);
    run(&call);
  }
  clear(&call);
  return verdicts;
}

static PyObject *remote_renumber(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const own[] = {"slots", "generations"};
  static const struct kvs_py_args spec = {"_remote_renumber", own, 2, 2, 2};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct remote_call call = {.work = RENUMBER};
  PyObject *values[2];
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  int rc = read_words(state, values[0], "slots", &call.slots);
  if (rc == 0) rc = read_words(state, values[1], "generations", &call.generations);
  if (rc == 0) rc = kvs_py_same_length("generations", call.generations.count, "slots", call.slots.count);
  if (rc == 0) run(&call);
  clear(&call);
  return rc == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *remote_void(PyObject *module, PyObject *slots) {
  struct remote_call call = {.work = VOID};
  int rc = read_words(PyModule_GetState(module), slots, "slots", &call.slots);
  if (rc == 0) run(&call);
  clear(&call);
  return rc == 0 ? Py_NewRef(Py_None) : NULL;
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
  for (size_t i = 0; rc == 0 && i < ids.count; ++i) {
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
  for (size_t i = 0; rc == 0 && i < list.count; ++i) {
    to[i] = list.data[i];
    if (list.limits != NULL && list.limits[i] < wanted->nbytes)
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
  if (array == NULL) return NULL;
  int rc = values[1] != Py_None ? rows(&wanted, values[0], values[1], to) : pointers(&wanted, values[0], to);
  PyObject *hold = wanted.hold != NULL ? wanted.hold : Py_NewRef(Py_None);
  if (rc == 0) return Py_BuildValue("(NN)", array, hold);
  Py_DECREF(array);
  Py_DECREF(hold);
  return NULL;
}

PyDoc_STRVAR(seal_doc, "_remote_seal($module, /, slots, blocks, nbytes, keys, generations)\n--\n\n"
                       "Copy blocks into slots behind headers. slots, blocks: addresses; keys: 16 bytes each, joined.");
PyDoc_STRVAR(check_doc, "_remote_check($module, /, slots, blocks, nbytes, keys, generations)\n--\n\n"
                        "A byte a slot: 0: right, and copied to blocks unless that is None. generations None: any.");
PyDoc_STRVAR(renumber_doc, "_remote_renumber($module, /, slots, generations)\n--\n\n"
                           "Give checked slots other generations.");
PyDoc_STRVAR(void_doc, "_remote_void($module, slots, /)\n--\n\n"
                       "No check succeeds on these slots until they are sealed.");
PyDoc_STRVAR(addresses_doc,
             "_remote_addresses($module, /, blocks, ids, nbytes, count, write)\n--\n\n"
             "(addresses, what keeps them) of the caller's blocks, as FileStore takes them, of host memory.");
PyMethodDef kvs_py_remote_methods[] = {
    {"_remote_seal", KVS_PY_FASTCALL(remote_seal), METH_FASTCALL | METH_KEYWORDS, seal_doc},
    {"_remote_check", KVS_PY_FASTCALL(remote_check), METH_FASTCALL | METH_KEYWORDS, check_doc},
    {"_remote_renumber", KVS_PY_FASTCALL(remote_renumber), METH_FASTCALL | METH_KEYWORDS, renumber_doc},
    {"_remote_void", remote_void, METH_O, void_doc},
    {"_remote_addresses", KVS_PY_FASTCALL(remote_addresses), METH_FASTCALL | METH_KEYWORDS, addresses_doc},
    {NULL, NULL, 0, NULL},
};
