/* The test pattern: kvswap._C._pattern and the job it returns. Underscored: for kvswap.testing and kvswap.replay. */
#include "engine/pattern.h"
#include "py/args.h"
#include "py/arrays.h"
#include "py/errors.h"
#include "py/handle.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/wait.h"

struct pattern_object {
  PyObject_HEAD
  struct kvs_engine *engine;
  struct kvs_pattern_job *job;
};

/* Takes ownership of the job; takes a new reference to the engine. */
static PyObject *new_pattern(struct kvs_py_state *state, struct kvs_engine *engine, struct kvs_pattern_job *job) {
  PyTypeObject *type = (PyTypeObject *)state->pattern_type;
  struct pattern_object *self = (struct pattern_object *)type->tp_alloc(type, 0);
  if (!self) {
    kvs_pattern_free(job);
    return NULL;
  }
  kvs_engine_ref(engine);
  self->engine = engine;
  self->job = job;
  return (PyObject *)self;
}

static void pattern_dealloc(PyObject *object) {
  struct pattern_object *self = (struct pattern_object *)object;
  KVS_PY_NO_GIL(kvs_pattern_free(self->job)); /* queries the device */
  kvs_engine_unref(self->engine);
  kvs_py_object_free(object);
}

static PyObject *pattern_done(PyObject *object, PyObject *unused) {
  (void)unused;
  bool done;
  KVS_PY_NO_GIL(done = kvs_pattern_done(((struct pattern_object *)object)->job));
  return PyBool_FromLong(done);
}

struct pattern_wait {
  struct kvs_pattern_job *job;
  struct kvs_pattern_result result;
};

static int wait_pattern(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  struct pattern_wait *wait = arg;
  return kvs_pattern_wait(wait->job, timeout_ns, &wait->result, err);
}

static PyObject *pattern_result(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"timeout"};
  static const struct kvs_py_args spec = {"result", names, 0, 1, 1};
  struct pattern_wait wait = {.job = ((struct pattern_object *)object)->job, .result = {0, UINT64_MAX}};
  PyObject *value;
  int64_t timeout_ns;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_timeout(value, "timeout", &timeout_ns) < 0) return NULL;
  if (kvs_py_wait(kvs_py_state_of(object), wait_pattern, &wait, timeout_ns, "the pattern's job") < 0) return NULL;
  if (wait.result.first == UINT64_MAX)
    return Py_BuildValue("(KOO)", (unsigned long long)wait.result.wrong, Py_None, Py_None);
  return Py_BuildValue("(KKK)", (unsigned long long)wait.result.wrong, (unsigned long long)(wait.result.first >> 40),
                       (unsigned long long)(wait.result.first & ((1ull << 40) - 1)));
}

/* -- functions ----------------------------------------------------------------------------------------------------- */

/* Three arrays of one length. */
static int read_items(struct kvs_py_state *state, PyObject *const *objects, struct kvs_py_list *lists,
                      struct kvs_pattern_item **items) {
  static const char *const names[3] = {"ptrs", "nbytes", "keys"};
  for (int i = 0; i < 3; i++) {
    int is = kvs_py_words(state, objects[i], names[i], &lists[i]);
    if (is < 0) return -1;
    if (is == 0) return kvs_py_complain(PyExc_TypeError, names[i], -1, "must be an int64 or uint64 array");
    if (lists[i].count != lists[0].count) {
      PyErr_Format(PyExc_ValueError, "%s has %zu items, but ptrs has %zu", names[i], lists[i].count, lists[0].count);
      return -1;
    }
  }
  size_t count = lists[0].count;
  *items = PyMem_Calloc(count == 0 ? 1 : count, sizeof **items);
  if (!*items) {
    PyErr_NoMemory();
    return -1;
  }
  for (size_t i = 0; i < count; i++)
    (*items)[i] = (struct kvs_pattern_item){lists[0].data[i], lists[1].data[i], lists[2].data[i]};
  return 0;
}

static PyObject *pattern(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "check", "ptrs", "nbytes", "keys", "stream", "kind"};
  static const char *const kinds[] = {"bytes", "window", "coarse"};
  static const struct kvs_py_args spec = {"_pattern", names, 6, 7, 7};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_py_list lists[3] = {{0}};
  struct kvs_pattern_item *items = NULL;
  struct kvs_pattern_job *job = NULL;
  struct kvs_error err = {0};
  PyObject *values[7], *result = NULL;
  uint64_t stream;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  int check = PyObject_IsTrue(values[1]);
  const int kind = values[6] ? kvs_py_choice(values[6], "kind", kinds, 3) : 0;
  if (check < 0 || kind < 0) return NULL;
  struct kvs_engine *engine = kvs_py_engine_from(state, values[0]);
  if (!engine) return NULL;
  if (kvs_py_stream_handle(state, values[5], "stream", engine, &stream) == 0 &&
      read_items(state, values + 2, lists, &items) == 0) {
    int rc;
    KVS_PY_NO_GIL(rc = kvs_pattern_submit(engine, check == 1 ? KVS_PATTERN_CHECK : KVS_PATTERN_WRITE,
                                          (enum kvs_pattern_kind)kind, items, lists[0].count, stream, &job, &err));
    result = rc == KVS_OK ? new_pattern(state, engine, job) : kvs_py_raise(state, &err);
  }
  PyMem_Free(items);
  for (int i = 0; i < 3; i++) Py_XDECREF(lists[i].keep);
  kvs_engine_unref(engine);
  return result;
}

PyDoc_STRVAR(job_doc, "A pattern being written or checked on a stream. Dropping it waits for the job, at most 60 s.");
PyDoc_STRVAR(done_doc, "done($self, /)\n--\n\nWhether the job has ended. Never blocks.");
PyDoc_STRVAR(result_doc,
             "result($self, /, timeout=None)\n--\n\n"
             "Wait; returns (wrong bytes, item of the first, its offset in the item), or (0, None, None) if "
             "all bytes are right or written.");
PyDoc_STRVAR(
    pattern_doc,
    "_pattern($module, /, device, check, ptrs, nbytes, keys, stream, kind='bytes')\n--\n\n"
    "Write the pattern of keys[i] to the nbytes[i] bytes at ptrs[i], or check it there, in the stream's order.\n\n"
    "ptrs and nbytes: int64 or uint64 arrays; keys: a uint64 array; all of one length. The caller keeps the memory.\n"
    "kind: 'bytes', or bf16 for coded blocks: 'window' ('exact' holds them, unless the key's low bits are 2), 'coarse' "
    "(each\ncodec gives them back).");
PyMethodDef kvs_py_pattern_methods[] = {
    {"_pattern", KVS_PY_FASTCALL(pattern), METH_FASTCALL | METH_KEYWORDS, pattern_doc},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef methods[] = {
    {"done", pattern_done, METH_NOARGS, done_doc},
    {"result", KVS_PY_FASTCALL(pattern_result), METH_FASTCALL | METH_KEYWORDS, result_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)job_doc},
    {Py_tp_dealloc, pattern_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec kvs_py_pattern_spec = {
    .name = "kvswap._C._PatternJob",
    .basicsize = sizeof(struct pattern_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
