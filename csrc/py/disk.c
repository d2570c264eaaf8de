/* Copies of files on a stream, for kvswap.trtllm. */
#include "files/disk.h"
#include "py/args.h"
#include "py/arrays.h"
#include "py/errors.h"
#include "py/handle.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"

static const char capsule_name[] = "kvswap._C._DiskCopy";

/* Arguments of both calls; `check` takes the first five. */
enum { DSTS, SRCS, DST_FDS, SRC_FDS, NBYTES, DEVICE, STREAM, THREADS, CLEAR, ARGUMENTS };
static const char *const names[] = {"dsts",   "srcs",   "dst_fds", "src_fds", "num_bytes",
                                    "device", "stream", "threads", "clear"};

/* Each word of the arrays is read once. */
static int read_tasks(struct kvs_py_state *state, PyObject *const *values, struct kvs_disk_call *call,
                      struct kvs_disk_task **tasks) {
  struct kvs_py_list lists[4] = {{.keep = NULL}};
  int rc = kvs_py_uint64(values[NBYTES], "num_bytes", -1, &call->nbytes);
  for (int i = 0; rc == 0 && i < 4; i++) {
    rc = kvs_py_words(state, values[i], names[i], &lists[i]) < 0 ? -1 : 0;
    if (rc == 0 && !lists[i].keep) rc = kvs_py_complain(PyExc_TypeError, names[i], -1, "must be an int64 array");
    if (rc == 0) rc = kvs_py_same_length(names[i], lists[i].count, names[0], lists[0].count);
  }
  *tasks = rc == 0 ? PyMem_Calloc(lists[0].count + 1, sizeof **tasks) : NULL;
  if (rc == 0 && !*tasks) PyErr_NoMemory();
  for (size_t i = 0; *tasks && i < lists[0].count; i++)
    (*tasks)[i] = (struct kvs_disk_task){.dst = lists[0].data[i],
                                         .src = lists[1].data[i],
                                         .dst_fd = (int)(int64_t)lists[2].data[i],
                                         .src_fd = (int)(int64_t)lists[3].data[i]};
  call->tasks = *tasks;
  call->count = lists[0].count;
  for (int i = 0; i < 4; i++) Py_XDECREF(lists[i].keep);
  return *tasks ? 0 : -1;
}

static PyObject *disk_check(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"_disk_check", names, DEVICE, DEVICE, DEVICE};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_disk_call call = {0};
  struct kvs_disk_task *tasks = NULL;
  struct kvs_error err = {0};
  PyObject *values[ARGUMENTS];
  int rc;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (read_tasks(state, values, &call, &tasks) < 0) return NULL;
  KVS_PY_NO_GIL(rc = kvs_disk_check(&call, &err));
  PyMem_Free(tasks);
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  Py_RETURN_NONE;
}

static struct kvs_disk_copy *copy_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, capsule_name); }

static void drop_copy(PyObject *capsule) { kvs_disk_unref(copy_of(capsule)); }

static PyObject *queue(struct kvs_py_state *state, struct kvs_engine *engine, struct kvs_disk_call *call,
                       PyObject *stream) {
  struct kvs_disk_copy *copy = NULL;
  struct kvs_error err = {0};
  uint64_t handle;
  int rc;
  if (kvs_py_stream_handle(state, stream, "stream", engine, &handle) < 0) return NULL;
  KVS_PY_NO_GIL(rc = kvs_disk_queue(engine, call, handle, &copy, &err));
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  PyObject *capsule = PyCapsule_New(copy, capsule_name, drop_copy);
  if (!capsule) kvs_disk_unref(copy);
  return capsule;
}

static PyObject *disk_queue(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const struct kvs_py_args spec = {"_disk_queue", names, ARGUMENTS, ARGUMENTS, ARGUMENTS};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_disk_call call = {0};
  struct kvs_disk_task *tasks = NULL;
  PyObject *values[ARGUMENTS], *capsule = NULL;
  uint64_t threads;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_uint64(values[THREADS], "threads", -1, &threads) < 0) return NULL;
  call.threads = threads < 1 ? 1 : threads > KVS_DISK_THREADS ? KVS_DISK_THREADS : (unsigned)threads;
  call.clear = values[CLEAR] == Py_True;
  struct kvs_engine *engine = kvs_py_engine_from(state, values[DEVICE]);
  if (!engine) return NULL;
  if (read_tasks(state, values, &call, &tasks) == 0) capsule = queue(state, engine, &call, values[STREAM]);
  PyMem_Free(tasks);
  kvs_engine_unref(engine);
  return capsule;
}

static PyObject *disk_ended(PyObject *module, PyObject *capsule) {
  (void)module;
  const struct kvs_disk_copy *copy = copy_of(capsule);
  return copy ? PyBool_FromLong(kvs_disk_ended(copy)) : NULL;
}

/* Of a copy that has ended: a list of (position, exception). */
static PyObject *disk_failed(PyObject *module, PyObject *capsule) {
  struct kvs_py_state *state = PyModule_GetState(module);
  const struct kvs_disk_copy *copy = copy_of(capsule);
  if (!copy) return NULL;
  size_t n = kvs_disk_failed(copy, NULL, 0);
  uint32_t *positions = PyMem_Calloc(n + 1, sizeof *positions);
  PyObject *list = positions ? PyList_New((Py_ssize_t)n) : PyErr_NoMemory();
  if (positions) (void)kvs_disk_failed(copy, positions, n);
  for (size_t i = 0; list && i < n; i++) {
    struct kvs_error err = {0};
    (void)kvs_disk_reason(copy, positions[i], &err);
    PyObject *reason = kvs_py_exception(state, &err);
    PyObject *pair = reason ? Py_BuildValue("(IN)", positions[i], reason) : NULL;
    if (!pair)
      Py_CLEAR(list);
    else
      PyList_SET_ITEM(list, (Py_ssize_t)i, pair);
  }
  PyMem_Free(positions);
  return list;
}

PyDoc_STRVAR(check_doc, "_disk_check($module, /, dsts, srcs, dst_fds, src_fds, num_bytes)\n--\n\n"
                        "For kvswap.trtllm: check descriptors, offsets and overlaps of tasks.\n\n"
                        "dsts, srcs: int64 arrays, an offset in a file, or an address where the descriptor is -1.");
PyDoc_STRVAR(queue_doc,
             "_disk_queue($module, /, dsts, srcs, dst_fds, src_fds, num_bytes, device, stream, threads, clear)\n--\n\n"
             "For kvswap.trtllm: queue copies between files and host memory on a stream; returns a capsule.\n\n"
             "clear: memory of a failed read becomes zeros.");
PyDoc_STRVAR(ended_doc, "_disk_ended($module, copy, /)\n--\n\nWhether the stream has executed these copies.");
PyDoc_STRVAR(failed_doc, "_disk_failed($module, copy, /)\n--\n\n[(position, exception)] of copies that have ended.");

PyMethodDef kvs_py_disk_methods[] = {
    {"_disk_check", KVS_PY_FASTCALL(disk_check), METH_FASTCALL | METH_KEYWORDS, check_doc},
    {"_disk_queue", KVS_PY_FASTCALL(disk_queue), METH_FASTCALL | METH_KEYWORDS, queue_doc},
    {"_disk_ended", disk_ended, METH_O, ended_doc},
    {"_disk_failed", disk_failed, METH_O, failed_doc},
    {NULL, NULL, 0, NULL},
};
