/* kvswap._C._ReplicaIndex: the index of blocks that the replicas of an engine share (replicas/index.h). */
#include "py/args.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "replicas/index.h"

#include <string.h>

struct index_object {
  PyObject_HEAD
  struct kvs_index *index;
};

static struct kvs_index *core(PyObject *self) { return ((struct index_object *)self)->index; }

static PyObject *answer(PyObject *self, int rc, const struct kvs_error *err) {
  return rc == KVS_OK ? Py_NewRef(Py_None) : kvs_py_raise(kvs_py_state_of(self), err);
}

static PyObject *index_create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"name", "num_slots", "slot_nbytes", "member", "identity", NULL};
  struct kvs_index_options options = {0};
  struct kvs_error err = {0};
  unsigned long long num_slots, slot_nbytes;
  int rc;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sKKsz:_ReplicaIndex", names, &options.name, &num_slots, &slot_nbytes,
                                   &options.member, &options.identity))
    return NULL;
  options.num_slots = num_slots;
  options.slot_nbytes = slot_nbytes;
  struct index_object *self = (struct index_object *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  KVS_PY_NO_GIL(rc = kvs_index_open(&options, &self->index, &err));
  if (rc == KVS_OK) return (PyObject *)self;
  kvs_py_raise(PyType_GetModuleState(type), &err);
  Py_DECREF(self);
  return NULL;
}

static void index_dealloc(PyObject *self) {
  struct kvs_index *index = core(self);
  kvs_py_object_free(self);
  if (index) KVS_PY_NO_GIL(kvs_index_free(index));
}

/* -- lists --------------------------------------------------------------------------------------------------------- */

static int read_key(PyObject *object, Py_ssize_t i, struct kvs_blockmap_key *key) {
  if (!PyBytes_Check(object))
    return kvs_py_complain(PyExc_TypeError, "keys", i, "must be bytes, not %s", Py_TYPE(object)->tp_name);
  Py_ssize_t nbytes = PyBytes_GET_SIZE(object);
  if (nbytes > KVS_BLOCKMAP_KEY_NBYTES)
    return kvs_py_complain(PyExc_ValueError, "keys", i, "has %zd bytes; at most %d", nbytes, KVS_BLOCKMAP_KEY_NBYTES);
  memset(key, 0, sizeof *key);
  memcpy(key->bytes, PyBytes_AS_STRING(object), (size_t)nbytes);
  key->nbytes = (uint64_t)nbytes;
  return 0;
}

/* The caller frees it. */
static struct kvs_blockmap_key *read_keys(PyObject *object, size_t *count) {
  PyObject *list = PySequence_List(object);
  if (!list) return NULL;
  *count = (size_t)PyList_GET_SIZE(list);
  struct kvs_blockmap_key *keys = PyMem_New(struct kvs_blockmap_key, *count + 1);
  if (!keys) PyErr_NoMemory();
  for (size_t i = 0; keys && i < *count; i++)
    if (read_key(PyList_GET_ITEM(list, (Py_ssize_t)i), (Py_ssize_t)i, &keys[i]) < 0) {
      PyMem_Free(keys);
      keys = NULL;
    }
  Py_DECREF(list);
  return keys;
}

static uint32_t *read_slots(PyObject *object, size_t *count) {
  PyObject *list = PySequence_List(object);
  if (!list) return NULL;
  *count = (size_t)PyList_GET_SIZE(list);
  uint32_t *slots = PyMem_New(uint32_t, *count + 1);
  if (!slots) PyErr_NoMemory();
  for (size_t i = 0; slots && i < *count; i++) {
    uint64_t slot;
    if (kvs_py_uint64(PyList_GET_ITEM(list, (Py_ssize_t)i), "slots", (Py_ssize_t)i, &slot) < 0) {
      PyMem_Free(slots);
      slots = NULL;
    } else {
      slots[i] = slot < UINT32_MAX ? (uint32_t)slot : UINT32_MAX; /* which no index has */
    }
  }
  Py_DECREF(list);
  return slots;
}

static PyObject *make_slots(const uint32_t *slots, size_t count) {
  PyObject *list = PyList_New((Py_ssize_t)count);
  for (size_t i = 0; list && i < count; i++) {
    PyObject *item =
        slots[i] == KVS_BLOCKMAP_NONE ? Py_NewRef(Py_None) : PyLong_FromUnsignedLong((unsigned long)slots[i]);
    if (item)
      PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    else
      Py_CLEAR(list);
  }
  return list;
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

static PyObject *index_find(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"key", "pending"};
  static const struct kvs_py_args spec = {"find", names, 2, 2, 2};
  PyObject *values[2];
  struct kvs_error err = {0};
  struct kvs_blockmap_key key;
  struct kvs_index_hit hit = {KVS_INDEX_MISS, 0, false};
  int64_t pending_ns;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (read_key(values[0], -1, &key) < 0 || kvs_py_timeout(values[1], "pending", &pending_ns) < 0) return NULL;
  KVS_PY_NO_GIL(rc = kvs_index_find(core(self), &key, pending_ns < 0 ? UINT64_MAX : (uint64_t)pending_ns, &hit, &err));
  if (rc != KVS_OK) return kvs_py_raise(kvs_py_state_of(self), &err);
  if (hit.found == KVS_INDEX_HIT) return Py_BuildValue("(IO)", (unsigned)hit.slot, hit.foreign ? Py_True : Py_False);
  return PyBool_FromLong(hit.found == KVS_INDEX_PENDING);
}

static PyObject *index_unpin(PyObject *self, PyObject *list) {
  struct kvs_error err = {0};
  size_t count;
  uint32_t *slots = read_slots(list, &count);
  int rc;
  if (!slots) return NULL;
  KVS_PY_NO_GIL(rc = kvs_index_unpin(core(self), slots, count, &err));
  PyMem_Free(slots);
  return answer(self, rc, &err);
}

static PyObject *index_touch(PyObject *self, PyObject *list) {
  struct kvs_error err = {0};
  size_t count;
  struct kvs_blockmap_key *keys = read_keys(list, &count);
  int rc;
  if (!keys) return NULL;
  KVS_PY_NO_GIL(rc = kvs_index_touch(core(self), keys, count, &err));
  PyMem_Free(keys);
  return answer(self, rc, &err);
}

static PyObject *index_take(PyObject *self, PyObject *list) {
  struct kvs_error err = {0};
  size_t count, evicted = 0;
  struct kvs_blockmap_key *keys = read_keys(list, &count);
  uint32_t *slots = keys ? PyMem_New(uint32_t, count + 1) : NULL;
  PyObject *made = NULL;
  int rc = KVS_NOMEM;
  if (keys && !slots) PyErr_NoMemory();
  if (slots) KVS_PY_NO_GIL(rc = kvs_index_take(core(self), keys, count, slots, &evicted, &err));
  if (rc == KVS_OK)
    made = Py_BuildValue("(Nn)", make_slots(slots, count), (Py_ssize_t)evicted);
  else if (rc == KVS_NO_ROOM)
    made = Py_NewRef(Py_None);
  else if (slots)
    kvs_py_raise(kvs_py_state_of(self), &err);
  PyMem_Free(keys);
  PyMem_Free(slots);
  return made;
}

static PyObject *index_settle(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"slots", "stored"};
  static const struct kvs_py_args spec = {"settle", names, 2, 2, 2};
  PyObject *values[2];
  struct kvs_error err = {0};
  size_t count;
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  int stored = PyObject_IsTrue(values[1]);
  uint32_t *slots = stored < 0 ? NULL : read_slots(values[0], &count);
  if (!slots) return NULL;
  KVS_PY_NO_GIL(rc = kvs_index_settle(core(self), slots, count, stored == 1, &err));
  PyMem_Free(slots);
  return answer(self, rc, &err);
}

static PyObject *index_reset(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  struct kvs_error err = {0};
  int rc;
  KVS_PY_NO_GIL(rc = kvs_index_reset(core(self), &err));
  return answer(self, rc, &err);
}

static PyObject *index_info(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  struct kvs_error err = {0};
  struct kvs_index_info info = {0};
  int rc;
  KVS_PY_NO_GIL(rc = kvs_index_get_info(core(self), &info, &err));
  if (rc != KVS_OK) return kvs_py_raise(kvs_py_state_of(self), &err);
  return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:I,s:I,s:I}", "num_slots", (unsigned long long)info.num_slots, "free",
                       (unsigned long long)info.free, "writing", (unsigned long long)info.writing, "ready",
                       (unsigned long long)info.ready, "pinned", (unsigned long long)info.pinned, "epoch", info.epoch,
                       "member", info.member, "members", info.members);
}

static PyObject *index_close(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  KVS_PY_NO_GIL(kvs_index_close(core(self)));
  Py_RETURN_NONE;
}

static PyObject *index_hold(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  struct kvs_error err = {0};
  int rc;
  KVS_PY_NO_GIL(rc = kvs_index_hold(core(self), &err));
  return answer(self, rc, &err);
}

static PyObject *index_let_go(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  kvs_index_let_go(core(self));
  Py_RETURN_NONE;
}

static PyObject *index_check(PyObject *self, PyObject *Py_UNUSED(ignored)) {
  struct kvs_error err = {0};
  int rc;
  KVS_PY_NO_GIL(rc = kvs_index_check(core(self), &err));
  return answer(self, rc, &err);
}

static PyObject *index_nbytes(PyObject *module, PyObject *number) {
  uint64_t num_slots;
  (void)module;
  if (kvs_py_uint64(number, "num_slots", -1, &num_slots) < 0) return NULL;
  return PyLong_FromUnsignedLongLong(kvs_index_nbytes(num_slots));
}

PyMethodDef kvs_py_replica_methods[] = {
    {"_replica_index_nbytes", index_nbytes, METH_O,
     PyDoc_STR("_replica_index_nbytes($module, num_slots, /)\n--\n\nBytes of an index, for SharedPool.")},
    {NULL, NULL, 0, NULL},
};

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"find", KVS_PY_FASTCALL(index_find), METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR(
         "find($self, /, key, pending)\n--\n\n(slot, foreign) of a block, pinned once; True: it is being written, "
         "by another\nreplica for `pending` seconds at most; False: it is not there.")},
    {"unpin", index_unpin, METH_O, PyDoc_STR("unpin($self, slots, /)\n--\n\nGive back one pin of each slot.")},
    {"touch", index_touch, METH_O, PyDoc_STR("touch($self, keys, /)\n--\n\nThese blocks are used; the first most.")},
    {"take", index_take, METH_O,
     PyDoc_STR(
         "take($self, keys, /)\n--\n\n(slots, evicted): a slot to write for each key; None where there is a block "
         "already.\nNone: there is no room.")},
    {"settle", KVS_PY_FASTCALL(index_settle), METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR("settle($self, /, slots, stored)\n--\n\nThe writes of these slots have ended.")},
    {"reset", index_reset, METH_NOARGS, PyDoc_STR("reset($self, /)\n--\n\nForget all blocks, for this replica.")},
    {"info", index_info, METH_NOARGS, PyDoc_STR("info($self, /)\n--\n\nCounts of slots and members.")},
    {"close", index_close, METH_NOARGS, PyDoc_STR("close($self, /)\n--\n\nLeave.")},
    {"_hold", index_hold, METH_NOARGS, PyDoc_STR("_hold($self, /)\n--\n\nKeep the lock. For tests.")},
    {"_let_go", index_let_go, METH_NOARGS, PyDoc_STR("_let_go($self, /)\n--\n\nGive up the lock. For tests.")},
    {"_check", index_check, METH_NOARGS, PyDoc_STR("_check($self, /)\n--\n\nCheck the map. For tests.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)"One replica's view of the index of blocks that all replicas share: kvswap.vllm._replicas."},
    {Py_tp_new, index_create},
    {Py_tp_dealloc, index_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec kvs_py_replica_index_spec = {
    .name = "kvswap._C._ReplicaIndex",
    .basicsize = sizeof(struct index_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
