/* Private functions of kvswap's modules: facts of the machine that need no open device, a delay, the end of the
 * process. */
#include "cuda/fatbin.h"
#include "cuda/info.h"
#include "engine/pattern.h"
#include "hostpool/budget.h"
#include "kvswap_file.h"
#include "py/args.h"
#include "py/device_facts.h"
#include "py/dicts.h"
#include "py/errors.h"
#include "py/handle.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"

static PyObject *delay(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "seconds", "stream"};
  static const struct kvs_py_args spec = {"_delay", names, 3, 3, 3};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_error err = {0};
  PyObject *values[3];
  uint64_t stream;
  int64_t ns;
  int rc = -1;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_timeout(values[1], "seconds", &ns) < 0) return NULL;
  if (ns < 0) return kvs_py_complain(PyExc_ValueError, "seconds", -1, "must be given"), NULL;
  struct kvs_engine *engine = kvs_py_engine_from(state, values[0]);
  if (!engine) return NULL;
  int known = kvs_py_stream_handle(state, values[2], "stream", engine, &stream);
  if (known == 0) {
    KVS_PY_NO_GIL(rc = kvs_delay(engine, (uint64_t)ns, stream, &err));
  }
  kvs_engine_unref(engine);
  if (known < 0) return NULL;
  if (rc != KVS_OK) return kvs_py_raise(state, &err);
  Py_RETURN_NONE;
}

static PyObject *cuda_count(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  struct kvs_error err = {0};
  int count = 0;
  Py_BEGIN_ALLOW_THREADS
  if (kvs_cuda_count(&count, &err) != KVS_OK) count = 0;
  Py_END_ALLOW_THREADS
  return Py_BuildValue("(is)", count, err.message);
}

static PyObject *cuda_info(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"ordinal"};
  static const struct kvs_py_args spec = {"_cuda_info", names, 1, 1, 1};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_device_info info = {0};
  struct kvs_error err = {0};
  PyObject *value;
  uint64_t ordinal;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_uint64(value, "ordinal", -1, &ordinal) < 0) return NULL;
  if (ordinal > INT32_MAX)
    return kvs_py_complain(PyExc_ValueError, "ordinal", -1, "is %R: no such device", value), NULL;
  int rc;
  KVS_PY_NO_GIL(rc = kvs_cuda_info((int)ordinal, &info, &err));
  return rc == KVS_OK ? kvs_py_device_info_dict(&info) : kvs_py_raise(state, &err);
}

static PyObject *cuda_can_reach(PyObject *module, PyObject *args) {
  struct kvs_error err = {0};
  int ordinal, other, rc;
  bool can;
  if (!PyArg_ParseTuple(args, "ii:_cuda_can_reach", &ordinal, &other)) return NULL;
  KVS_PY_NO_GIL(rc = kvs_cuda_can_reach(ordinal, other, &can, &err));
  return rc == KVS_OK ? PyBool_FromLong(can) : kvs_py_raise(PyModule_GetState(module), &err);
}

static PyObject *fatbin(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return Py_BuildValue("{s:n, s:s}", "nbytes", (Py_ssize_t)kvs_fatbin_nbytes, "archs", kvs_fatbin_archs);
}

static PyObject *host_memory(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"root"};
  static const struct kvs_py_args spec = {"_host_memory", names, 1, 1, 1};
  static const struct kvs_py_field fields[] = {
      KVS_PY_FIELD(struct kvs_budget, available), KVS_PY_FIELD(struct kvs_budget, total),
      KVS_PY_FIELD(struct kvs_budget, group_max), KVS_PY_FIELD(struct kvs_budget, group_used),
      KVS_PY_FIELD(struct kvs_budget, group),     KVS_PY_AS("knob", struct kvs_budget, group_knob)};
  struct kvs_budget budget;
  PyObject *value;
  (void)module;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  const char *root = PyUnicode_AsUTF8(value);
  if (!root) return NULL;
  KVS_PY_NO_GIL(kvs_budget_read(root, &budget));
  return KVS_PY_DICT(&budget, fields);
}

static PyObject *environment(PyObject *module, PyObject *unused) {
  struct kvs_error err = {0};
  (void)module, (void)unused;
  kvs_environment_check(&err);
  return PyUnicode_DecodeFSDefault(err.message);
}

static PyObject *shut_down(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"timeout"};
  static const struct kvs_py_args spec = {"_shutdown", names, 1, 1, 1};
  (void)module;
  PyObject *value;
  int64_t timeout_ns;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_timeout(value, "timeout", &timeout_ns) < 0) return NULL;
  if (timeout_ns < 0) return kvs_py_complain(PyExc_ValueError, "timeout", -1, "must be finite"), NULL;
  Py_BEGIN_ALLOW_THREADS
  kvs_file_shutdown(timeout_ns); /* before the devices, which the stores use */
  kvs_shutdown(timeout_ns);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

/* What there is to say of a path without a device. */
static PyObject *paths(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *list = PyList_New(0);
  for (int path = KVS_PATH_AUTO + 1; list && path < KVS_PATHS; path++) {
    enum kvs_path which = (enum kvs_path)path;
    PyObject *row = Py_BuildValue(
        "{s:s, s:N, s:N, s:N, s:N}", "name", kvs_path_name(which), "kernels",
        PyBool_FromLong(kvs_path_needs_kernels(which)), "threads", PyBool_FromLong(kvs_path_needs_threads(which)),
        "codes", PyBool_FromLong(kvs_path_codes(which)), "lender", PyBool_FromLong(kvs_path_needs_lender(which)));
    if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
    Py_XDECREF(row);
  }
  return list;
}

PyDoc_STRVAR(delay_doc,
             "_delay($module, /, device, seconds, stream)\n--\n\nKeep the stream busy for `seconds`, at most 10.");
PyDoc_STRVAR(cuda_count_doc, "_cuda_count($module, /)\n--\n\n(number of GPUs, why there is none). Opens no context.");
PyDoc_STRVAR(cuda_info_doc, "_cuda_info($module, /, ordinal)\n--\n\nAs Device.info, of a GPU. Opens no context.");
PyDoc_STRVAR(cuda_can_reach_doc, "_cuda_can_reach($module, ordinal, other, /)\n--\n\n"
                                 "Whether a GPU can map memory of the other one. Opens no context.");
PyDoc_STRVAR(fatbin_doc,
             "_fatbin($module, /)\n--\n\nThe kernels in this build: {'nbytes': 0 where none, 'archs': 'sm_80 ...'}.");
PyDoc_STRVAR(paths_doc, "_paths($module, /)\n--\n\n"
                        "The paths: of each its name, and whether it needs kernels, or a host device's threads.");
PyDoc_STRVAR(host_memory_doc,
             "_host_memory($module, /, root)\n--\n\n"
             "What the machine and the control groups of this process permit, bytes; 2**64 - 1: unknown, no limit.\n"
             "root: put before every path that is read; '': this machine.");
PyDoc_STRVAR(environment_doc, "_environment($module, /)\n--\n\n"
                              "Why no device opens with the environment's KVSWAP_... variables; empty: devices open.");
PyDoc_STRVAR(shutdown_doc,
             "_shutdown($module, /, timeout)\n--\n\n"
             "Drain every open device, at most `timeout` seconds in all. Afterwards nothing can be submitted.");

#define ROW(function, name) {"_" #name, KVS_PY_FASTCALL(function), METH_FASTCALL | METH_KEYWORDS, name##_doc}
PyMethodDef kvs_py_machine_methods[] = {
    ROW(delay, delay),
    {"_cuda_count", cuda_count, METH_NOARGS, cuda_count_doc},
    ROW(cuda_info, cuda_info),
    {"_cuda_can_reach", cuda_can_reach, METH_VARARGS, cuda_can_reach_doc},
    {"_fatbin", fatbin, METH_NOARGS, fatbin_doc},
    {"_paths", paths, METH_NOARGS, paths_doc},
    ROW(host_memory, host_memory),
    {"_environment", environment, METH_NOARGS, environment_doc},
    ROW(shut_down, shutdown),
    {NULL, NULL, 0, NULL},
};
