/* kvswap.memory.SharedPool: blocks of host memory that several processes of one user map. */
#include "base/wait.h"
#include "py/args.h"
#include "py/arrays.h"
#include "py/errors.h"
#include "py/host_pool_base.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/wait.h"

#include <stdlib.h>
#include <string.h>

enum { NAME, NUM_BLOCKS, BLOCK_NBYTES, CREATE, GENERATION, INDEX, COMMON };

static struct kvs_host_pool *core_of(PyObject *self) { return ((struct kvs_py_host_pool *)self)->pool; }

/* -- making one ---------------------------------------------------------------------------------------------------- */

static int read_shared(PyObject *const *values, struct kvs_shared_options *shared) {
  PyObject *create = values[CREATE];
  Py_ssize_t length;
  if (!PyUnicode_Check(values[NAME]))
    return kvs_py_complain(PyExc_TypeError, "name", -1, "must be a str, not %s", Py_TYPE(values[NAME])->tp_name);
  shared->name = PyUnicode_AsUTF8AndSize(values[NAME], &length);
  if (!shared->name) return -1;
  if (strlen(shared->name) != (size_t)length)
    return kvs_py_complain(PyExc_ValueError, "name", -1, "is %R: it has a zero in it", values[NAME]);
  if (create && create != Py_None && !PyBool_Check(create))
    return kvs_py_complain(PyExc_TypeError, "create", -1, "must be a bool or None, not %s", Py_TYPE(create)->tp_name);
  shared->mode = create == Py_None ? KVS_SHARED_EITHER : create == Py_False ? KVS_SHARED_JOIN : KVS_SHARED_CREATE;
  if (kvs_py_given(values[INDEX]) && kvs_py_uint64(values[INDEX], "index_nbytes", -1, &shared->index_nbytes) < 0)
    return -1;
  if (!kvs_py_given(values[GENERATION])) return 0;
  if (shared->mode != KVS_SHARED_JOIN)
    return kvs_py_complain(PyExc_ValueError, "generation", -1, "is for create=False: what is created gets a new one");
  if (kvs_py_uint64(values[GENERATION], "generation", -1, &shared->generation) < 0) return -1;
  if (shared->generation != 0) return 0;
  return kvs_py_complain(PyExc_ValueError, "generation", -1, "is 0, which no segment has");
}

static PyObject *shared_pool_create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"name",       "num_blocks",   "slot_nbytes",     "create",
                          "generation", "index_nbytes", KVS_PY_HOST_NAMES, NULL};
  struct kvs_host_pool_options options = {0};
  struct kvs_shared_options shared = {0};
  struct kvs_error err = {0};
  struct kvs_engine *engine;
  PyObject *values[COMMON + KVS_PY_HOST_ARGUMENTS] = {NULL}, **common = values + COMMON;
  int rc;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$OOOOOOOOOOOOOO:SharedPool", names, &values[NAME],
                                   &values[NUM_BLOCKS], &values[BLOCK_NBYTES], &values[CREATE], &values[GENERATION],
                                   &values[INDEX], &common[0], &common[1], &common[2], &common[3], &common[4],
                                   &common[5], &common[6], &common[7], &common[8], &common[9], &common[10]))
    return NULL;
  if (kvs_py_host_options(values[NUM_BLOCKS], values[BLOCK_NBYTES], common, &options) < 0) return NULL;
  if (read_shared(values, &shared) < 0) return NULL;
  struct kvs_py_host_pool *self = kvs_py_host_pool_new(type, common, &engine);
  if (!self) return NULL;
  Py_BEGIN_ALLOW_THREADS
  rc = kvs_shared_open(engine, &options, &shared, &self->pool, &err);
  kvs_engine_unref(engine);
  Py_END_ALLOW_THREADS
  return kvs_py_host_pool_opened(self, common, rc, &err);
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */

typedef int (*change_function)(struct kvs_host_pool *, const struct kvs_ids *, struct kvs_error *);
typedef int (*ask_function)(struct kvs_host_pool *, const struct kvs_ids *, bool *, struct kvs_error *);

static PyObject *change(PyObject *self, PyObject *blocks, change_function function) {
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_error err = {0};
  struct kvs_ids ids;
  PyObject *keep = NULL;
  if (kvs_py_ids(state, blocks, "blocks", &ids, &keep) < 0) return NULL;
  int rc;
  KVS_PY_NO_GIL(rc = function(core_of(self), &ids, &err));
  Py_XDECREF(keep);
  return rc == KVS_OK ? Py_NewRef(Py_None) : kvs_py_raise(state, &err);
}

static PyObject *ask(PyObject *self, PyObject *blocks, ask_function function) {
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_error err = {0};
  struct kvs_ids ids;
  PyObject *keep = NULL;
  bool *answers;
  if (kvs_py_ids(state, blocks, "blocks", &ids, &keep) < 0) return NULL;
  PyObject *array = kvs_py_bool_array(ids.count, &answers);
  int rc = KVS_OK;
  if (array) {
    KVS_PY_NO_GIL(rc = function(core_of(self), &ids, answers, &err));
  }
  Py_XDECREF(keep);
  if (rc == KVS_OK) return array;
  Py_DECREF(array);
  return kvs_py_raise(state, &err);
}

static PyObject *shared_claim(PyObject *self, PyObject *blocks) { return ask(self, blocks, kvs_shared_claim); }

static PyObject *shared_published(PyObject *self, PyObject *blocks) { return ask(self, blocks, kvs_shared_published); }

static PyObject *shared_publish(PyObject *self, PyObject *blocks) { return change(self, blocks, kvs_shared_publish); }

static PyObject *shared_retract(PyObject *self, PyObject *blocks) { return change(self, blocks, kvs_shared_retract); }

struct publishing {
  struct kvs_host_pool *pool;
  const struct kvs_ids *ids;
};

static int published_slice(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  const struct publishing *publishing = arg;
  return kvs_shared_wait(publishing->pool, publishing->ids, timeout_ns, err);
}

static PyObject *shared_wait_ready(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"blocks", "timeout"};
  static const struct kvs_py_args spec = {"wait_ready", names, 1, 2, 2};
  struct kvs_ids ids;
  PyObject *values[2], *keep = NULL;
  int64_t timeout_ns;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_timeout(values[1], "timeout", &timeout_ns) < 0) return NULL;
  if (kvs_py_ids(kvs_py_state_of(self), values[0], "blocks", &ids, &keep) < 0) return NULL;
  void *copy = malloc(ids.count * ids.width + 1); /* the array may change between two slices */
  if (copy) memcpy(copy, ids.data, ids.count * ids.width);
  Py_XDECREF(keep);
  if (!copy) return PyErr_NoMemory();
  ids.data = copy;
  struct publishing publishing = {core_of(self), &ids};
  int rc = kvs_py_wait(kvs_py_state_of(self), published_slice, &publishing, timeout_ns, NULL);
  free(copy);
  return rc < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *shared_unlink(PyObject *self, PyObject *unused) {
  struct kvs_error err = {0};
  int rc;
  (void)unused;
  KVS_PY_NO_GIL(rc = kvs_shared_unlink(core_of(self), &err));
  return rc == KVS_OK ? Py_NewRef(Py_None) : kvs_py_raise(kvs_py_state_of(self), &err);
}

/* -- attributes ---------------------------------------------------------------------------------------------------- */

enum { PATH, SHOWN_GENERATION, OWNER, OWNER_PID, OWNER_ALIVE };

static PyObject *get_shared(PyObject *self, void *field) {
  struct kvs_shared_info info;
  struct kvs_error err = {0};
  if (kvs_shared_get_info(core_of(self), &info, &err) != KVS_OK) return kvs_py_raise(kvs_py_state_of(self), &err);
  switch ((uintptr_t)field) {
  case PATH:
    return PyUnicode_FromString(info.path);
  case SHOWN_GENERATION:
    return PyLong_FromUnsignedLongLong(info.generation);
  case OWNER_PID:
    return PyLong_FromLongLong(info.owner_pid);
  case OWNER:
    return PyBool_FromLong(info.owner);
  default:
    return PyBool_FromLong(info.owner_alive);
  }
}

static PyObject *shared_pool_repr(PyObject *self) {
  struct kvs_shared_info info;
  struct kvs_error err = {0};
  if (kvs_shared_get_info(core_of(self), &info, &err) != KVS_OK)
    return PyUnicode_FromFormat("<kvswap.memory.SharedPool, %s>", err.message);
  return PyUnicode_FromFormat("<kvswap.memory.SharedPool %s on %s, %s>", info.path,
                              kvs_engine_name(kvs_host_pool_engine(core_of(self))), info.owner ? "owned" : "joined");
}

/* -- module functions ---------------------------------------------------------------------------------------------- */

/* Append what one call has removed to the list. -1: raised. */
static int add_names(PyObject *list, const char *text) {
  PyObject *whole = PyUnicode_DecodeFSDefault(text);
  PyObject *lines = whole ? PyUnicode_Splitlines(whole, 0) : NULL;
  Py_ssize_t at = PyList_GET_SIZE(list);
  int rc = lines ? PyList_SetSlice(list, at, at, lines) : -1;
  Py_XDECREF(whole);
  Py_XDECREF(lines);
  return rc;
}

static PyObject *shared_clean(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"root"};
  static const struct kvs_py_args spec = {"clean", names, 0, 0, 1};
  struct kvs_error err = {0};
  PyObject *value, *path = NULL;
  char text[8192];
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_given(value) && !PyUnicode_FSConverter(value, &path)) return NULL;
  PyObject *list = PyList_New(0);
  int rc = KVS_OK;
  for (size_t count = 1; list && rc == KVS_OK && count != 0;) {
    Py_BEGIN_ALLOW_THREADS
    if (!path)
      count = kvs_shared_clean(text, sizeof text);
    else
      rc = kvs_shared_clean_folder(PyBytes_AS_STRING(path), text, sizeof text, &count, &err);
    Py_END_ALLOW_THREADS
    if (rc == KVS_OK && add_names(list, text) < 0) Py_CLEAR(list);
  }
  Py_XDECREF(path);
  if (rc == KVS_OK) return list;
  Py_XDECREF(list);
  return kvs_py_raise(PyModule_GetState(module), &err);
}

PyDoc_STRVAR(
    clean_doc,
    "clean($module, /, *, root=None)\n--\n\n"
    "Remove shared pools of this user whose owners ended without closing them; returns their names. Creating a\n"
    "shared pool does this too. Processes that have joined such a pool keep its memory.\n\n"
    "root: a folder instead of /dev/shm; '/proc/PID/root/dev/shm' is that of a container in which process PID runs. "
    "No\n"
    "symbolic link in it is followed. ValueError: it cannot be opened.");

PyMethodDef kvs_py_shared_methods[] = {
    {"clean", KVS_PY_FASTCALL(shared_clean), METH_FASTCALL | METH_KEYWORDS, clean_doc},
    {NULL, NULL, 0, NULL},
};

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(
    shared_pool_doc,
    "SharedPool(name, num_blocks, slot_nbytes, *, create=True, generation=None, index_nbytes=0, device=None, layers=1, "
    "layout='block-first', pages='default', numa='auto', chunk_nbytes=1073741824, threads=None, register=True, "
    "reserve=None, progress=None, wait=True)\n--\n\n"
    "A host pool that several processes of one user map: the ranks of a model, or one copy of what all of them "
    "need.\n\n"
    "name: 1 to 100 letters, digits, '.', '_' and '-'. The file is /dev/shm/kvswap.<name>, mode 0600.\n"
    "create: True: create the pool, replacing one of a dead owner. False: join an existing pool; num_blocks,\n"
    "  slot_nbytes, layers and layout must be equal. None: join, or create if there is none.\n"
    "generation: with create=False: join only the segment of this generation.\n"
    "index_nbytes: room for an index of kvswap's own, the same in each process. Not 0: the pool belongs to all\n"
    "  processes that have opened it, and its name is removed by the last one.\n"
    "Everything else as for HostPool; pages '2MiB' and '1GiB' become 'transparent', with a notice.\n\n"
    "The creating process is the owner. The name is removed when the owner closes the pool or ends; joined processes\n"
    "keep the memory. Each process registers it with its own device. A killed owner leaves the name until the next "
    "start.\n\n"
    "Each block has a word that all processes see. One process writes a block, many read it: claim(), write,\n"
    "publish(); readers wait_ready(). Publish after the transfer that writes the block has ended.\n\n"
    "ValueError: the pool exists (create=True), does not exist, or differs. kvswap.Error: it belongs to another user, "
    "or\n"
    "to a running process of another pid namespace. MemoryError: no room in /dev/shm, or as for HostPool. Any thread "
    "may use it.");
PyDoc_STRVAR(claim_doc,
             "claim($self, blocks, /)\n--\n\n"
             "Claim empty blocks, and blocks of a dead writer, for writing by this process. blocks: ids. Returns a\n"
             "bool array: which of them were claimed. Never blocks.");
PyDoc_STRVAR(publish_doc,
             "publish($self, blocks, /)\n--\n\n"
             "Mark blocks as written and wake waiting processes. ValueError: another process is writing one of\n"
             "them; then none is published.");
PyDoc_STRVAR(retract_doc,
             "retract($self, blocks, /)\n--\n\n"
             "Mark blocks as empty, to be written again. The caller must make sure that no process still reads\n"
             "them. ValueError: another process is writing one of them.");
PyDoc_STRVAR(published_doc,
             "published($self, blocks, /)\n--\n\nWhich of these blocks are published: a bool array. Never blocks.");
PyDoc_STRVAR(wait_ready_doc, "wait_ready($self, /, blocks, timeout=None)\n--\n\n"
                             "Wait until all of these blocks are published.\n\n"
                             "timeout: seconds; TimeoutError. kvswap.Error: the writing process of a block has ended.");
PyDoc_STRVAR(unlink_doc,
             "unlink($self, /)\n--\n\n"
             "Remove the name: no more processes can join, joined ones keep the memory. For the owner. Twice is no "
             "error.");

static PyMethodDef methods[] = {
    {"claim", shared_claim, METH_O, claim_doc},
    {"publish", shared_publish, METH_O, publish_doc},
    {"retract", shared_retract, METH_O, retract_doc},
    {"published", shared_published, METH_O, published_doc},
    {"wait_ready", KVS_PY_FASTCALL(shared_wait_ready), METH_FASTCALL | METH_KEYWORDS, wait_ready_doc},
    {"unlink", shared_unlink, METH_NOARGS, unlink_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"path", get_shared, NULL, "str: path of the file.", (void *)PATH},
    {"generation", get_shared, NULL, "int: differs from that of every other pool of this name.",
     (void *)SHOWN_GENERATION},
    {"owner", get_shared, NULL, "bool: this process created the pool.", (void *)OWNER},
    {"owner_pid", get_shared, NULL, "int: the process that created the pool.", (void *)OWNER_PID},
    {"owner_alive", get_shared, NULL, "bool: the owner still runs.", (void *)OWNER_ALIVE},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)shared_pool_doc},
    {Py_tp_new, shared_pool_create},
    {Py_tp_repr, shared_pool_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec kvs_py_shared_pool_spec = {
    .name = "kvswap.memory.SharedPool",
    .basicsize = sizeof(struct kvs_py_host_pool),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
