/* Costs and their files, for kvswap.calibrate. A dict of costs is {"d2h": {path: {"start": ns, "extra": ns, "each":
 * [ns, ...], "run": [ns, ...]}}, "h2d": ..., "tuning": {"link_gbps_...": number, "host_...": number, "kernel_...":
 * (CTAs, pace, GB/s)}}; unknown paths and tunings are left out. extra is 0 for a path without extra costs, run is empty
 * for a path without run costs. */
#include "py/calibration.h"
#include "paths/calibration.h"
#include "paths/costs_default.h"
#include "py/args.h"
#include "py/dicts.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/open.h"
#include "py/options.h"

#include <string.h>

static const char *const direction_names[2] = {"d2h", "h2d"};
enum { MOST_PATH = 4096 };

/* -- from C -------------------------------------------------------------------------------------------------------- */

static PyObject *numbers_from(const double *numbers, int count) {
  PyObject *list = PyList_New(count);
  for (int i = 0; list && i < count; i++) {
    PyObject *number = PyFloat_FromDouble(numbers[i]);
    if (!number)
      Py_CLEAR(list);
    else
      PyList_SET_ITEM(list, i, number);
  }
  return list;
}

static PyObject *paths_from(const struct kvs_path_cost *costs) {
  PyObject *paths = PyDict_New();
  for (int i = 1; paths && i < KVS_PATHS; i++) {
    enum kvs_path path = (enum kvs_path)i;
    if (!kvs_cost_is_known(&costs[i])) continue;
    PyObject *cost = Py_BuildValue("{s:d, s:d, s:N, s:N}", "start", costs[i].start, "extra", costs[i].extra, "each",
                                   numbers_from(costs[i].each, KVS_COST_SIZES), "run",
                                   numbers_from(costs[i].run, kvs_costs_runs(path)));
    if (kvs_py_put(paths, kvs_path_name(path), cost) < 0) Py_CLEAR(paths);
  }
  return paths;
}

static PyObject *tuning_from(const struct kvs_tuning *tuning) {
  PyObject *dict = PyDict_New();
  for (int i = 0; dict && i < KVS_TUNINGS; i++) {
    double numbers[KVS_TUNING_NUMBERS];
    kvs_tuning_get(tuning, i, numbers);
    if (numbers[0] == 0) continue;
    PyObject *value = kvs_tuning_count(i) == 1 ? PyFloat_FromDouble(numbers[0])
                                               : Py_BuildValue("(idd)", (int)numbers[0], numbers[1], numbers[2]);
    if (kvs_py_put(dict, kvs_tuning_names[i], value) < 0) Py_CLEAR(dict);
  }
  return dict;
}

static PyObject *costs_from(const struct kvs_costs *costs) {
  PyObject *dict = PyDict_New();
  if (!dict) return NULL;
  int rc = kvs_py_put(dict, "tuning", tuning_from(&costs->tuning));
  for (int i = 0; rc == 0 && i < 2; i++) rc = kvs_py_put(dict, direction_names[i], paths_from(costs->paths[i]));
  if (rc < 0) Py_CLEAR(dict);
  return dict;
}

/* -- to C ---------------------------------------------------------------------------------------------------------- */

/* A copy, which nothing changes while we read it: neither another thread nor the __float__ of a number in it. */
static PyObject *copy_dict(PyObject *object, const char *name) {
  if (PyDict_Check(object)) return PyDict_Copy(object);
  kvs_py_complain(PyExc_TypeError, name, -1, "must be a dict, not %s", Py_TYPE(object)->tp_name);
  return NULL;
}

static int read_double(PyObject *value, const char *name, double *number) {
  *number = PyFloat_AsDouble(value);
  if (*number != -1.0 || !PyErr_Occurred()) return 0;
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
  PyErr_Clear();
  return kvs_py_complain(PyExc_TypeError, name, -1, "must be a number, not %s", Py_TYPE(value)->tp_name);
}

static int read_numbers(PyObject *value, const char *name, double *numbers, int count) {
  PyObject *items = PySequence_Tuple(value);
  if (!items) return -1;
  Py_ssize_t length = PyTuple_GET_SIZE(items);
  int rc =
      length == count ? 0 : kvs_py_complain(PyExc_ValueError, name, -1, "has %zd numbers: must be %d", length, count);
  for (int i = 0; rc == 0 && i < count; i++) rc = read_double(PyTuple_GET_ITEM(items, i), name, &numbers[i]);
  Py_DECREF(items);
  return rc;
}

static int read_cost(PyObject *dict, enum kvs_path path, struct kvs_path_cost *cost) {
  enum { START, EXTRA, EACH, RUN, PARTS };
  static const char *const names[PARTS] = {"start", "extra", "each", "run"};
  PyObject *values[PARTS];
  for (int i = 0; i < PARTS; i++) {
    values[i] = PyDict_GetItemString(dict, names[i]);
    if (!values[i]) return kvs_py_complain(PyExc_ValueError, kvs_path_name(path), -1, "lacks '%s'", names[i]);
  }
  if (PyDict_Size(dict) != PARTS)
    return kvs_py_complain(PyExc_ValueError, kvs_path_name(path), -1, "has more than start, extra, each and run");
  if (read_double(values[START], names[START], &cost->start) < 0) return -1;
  if (cost->start < 0)
    return kvs_py_complain(PyExc_ValueError, names[START], -1, "is %R: must be 0 or more", values[START]);
  if (read_double(values[EXTRA], names[EXTRA], &cost->extra) < 0) return -1;
  if (read_numbers(values[EACH], names[EACH], cost->each, KVS_COST_SIZES) < 0) return -1;
  return read_numbers(values[RUN], names[RUN], cost->run, kvs_costs_runs(path));
}

static int copy_cost(PyObject *object, enum kvs_path path, struct kvs_path_cost *cost) {
  PyObject *dict = copy_dict(object, kvs_path_name(path));
  int rc = dict ? read_cost(dict, path, cost) : -1;
  Py_XDECREF(dict);
  return rc;
}

static int read_paths(PyObject *dict, struct kvs_path_cost *costs) {
  PyObject *name, *cost;
  Py_ssize_t at = 0;
  while (PyDict_Next(dict, &at, &name, &cost)) {
    int path = kvs_py_path(name, "a path of costs", false);
    if (path < 0 || copy_cost(cost, (enum kvs_path)path, &costs[path]) < 0) return -1;
  }
  return 0;
}

static int read_tuning(PyObject *dict, struct kvs_tuning *tuning) {
  PyObject *name, *value;
  Py_ssize_t at = 0;
  while (PyDict_Next(dict, &at, &name, &value)) {
    double numbers[KVS_TUNING_NUMBERS];
    int i = kvs_py_choice(name, "a name of tuning", kvs_tuning_names, KVS_TUNINGS);
    if (i < 0) return -1;
    int count = kvs_tuning_count(i), rc = count == 1 ? read_double(value, kvs_tuning_names[i], numbers)
                                                     : read_numbers(value, kvs_tuning_names[i], numbers, count);
    if (rc < 0) return -1;
    if (!kvs_tuning_set(tuning, i, numbers))
      return kvs_py_complain(PyExc_ValueError, kvs_tuning_names[i], -1, "cannot be %R", value);
  }
  return 0;
}

static int read_part(PyObject *name, PyObject *value, struct kvs_costs *costs) {
  static const char *const names[] = {"d2h", "h2d", "tuning"};
  int i = kvs_py_choice(name, "a name of costs", names, 3);
  PyObject *part = i < 0 ? NULL : copy_dict(value, names[i]);
  if (!part) return -1;
  int rc = i < 2 ? read_paths(part, costs->paths[i]) : read_tuning(part, &costs->tuning);
  Py_DECREF(part);
  return rc;
}

int kvs_py_costs_read(PyObject *object, struct kvs_costs *costs) {
  PyObject *name, *value, *dict = copy_dict(object, "costs");
  Py_ssize_t at = 0;
  int rc = 0;
  if (!dict) return -1;
  kvs_costs_clear(costs);
  while (rc == 0 && PyDict_Next(dict, &at, &name, &value)) rc = read_part(name, value, costs);
  Py_DECREF(dict);
  return rc;
}

/* -- functions ----------------------------------------------------------------------------------------------------- */

/* str, bytes or os.PathLike; *keep owns it. */
static const char *read_path(PyObject *value, PyObject **keep) {
  return PyUnicode_FSConverter(value, keep) ? PyBytes_AS_STRING(*keep) : NULL;
}

static PyObject *costs_read(PyObject *module, PyObject *object) {
  struct kvs_costs costs = *kvs_costs_default();
  struct kvs_error err = {0};
  PyObject *keep = NULL;
  int rc = KVS_OK;
  if (object != Py_None) {
    const char *path = read_path(object, &keep);
    if (!path) return NULL;
    KVS_PY_NO_GIL(rc = kvs_costs_read(path, &costs, &err));
    Py_DECREF(keep);
  }
  return rc == KVS_OK ? costs_from(&costs) : kvs_py_raise(PyModule_GetState(module), &err);
}

static PyObject *costs_write(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"path", "costs", "machine"};
  static const struct kvs_py_args spec = {"_costs_write", names, 3, 3, 3};
  struct kvs_costs costs;
  struct kvs_error err = {0};
  PyObject *values[3], *keep = NULL;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0 || kvs_py_costs_read(values[1], &costs) < 0)
    return NULL;
  const char *machine = PyUnicode_AsUTF8(values[2]);
  const char *path = machine ? read_path(values[0], &keep) : NULL;
  if (!path) return NULL;
  int rc;
  KVS_PY_NO_GIL(rc = kvs_costs_write(path, &costs, machine, &err));
  Py_DECREF(keep);
  if (rc != KVS_OK) return kvs_py_raise(PyModule_GetState(module), &err);
  Py_RETURN_NONE;
}

static PyObject *costs_what(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"name", "driver"};
  static const struct kvs_py_args spec = {"_costs_what", names, 2, 2, 2};
  struct kvs_device_info info = {0};
  PyObject *values[2];
  uint64_t driver;
  char what[KVS_COSTS_WHAT];
  (void)module;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  const char *name = PyUnicode_AsUTF8(values[0]);
  if (!name || kvs_py_uint64(values[1], "driver", -1, &driver) < 0) return NULL;
  snprintf(info.name, sizeof info.name, "%s", name);
  info.driver = (int)driver;
  kvs_costs_what(&info, what);
  return PyUnicode_FromString(what);
}

static PyObject *costs_of(PyObject *module, PyObject *device) {
  struct kvs_engine *engine = kvs_py_engine_from(PyModule_GetState(module), device);
  if (!engine) return NULL;
  PyObject *costs = costs_from(kvs_engine_costs(engine));
  kvs_engine_unref(engine);
  return costs;
}

static PyObject *costs_path(PyObject *module, PyObject *object) {
  const char *what = PyUnicode_AsUTF8(object);
  char path[MOST_PATH];
  struct kvs_error err = {0};
  if (!what) return NULL;
  if (kvs_costs_path(what, path, sizeof path, &err) != KVS_OK) return kvs_py_raise(PyModule_GetState(module), &err);
  return PyUnicode_DecodeFSDefault(path);
}

PyDoc_STRVAR(read_doc, "_costs_read($module, path, /)\n--\n\n"
                       "The costs in a calibration file; None: the built-in ones. IndexError: there is no such file.");
PyDoc_STRVAR(write_doc, "_costs_write($module, /, path, costs, machine)\n--\n\n"
                        "Write costs to a new file, mode 0600, which replaces the old one.");
PyDoc_STRVAR(what_doc, "_costs_what($module, /, name, driver)\n--\n\n"
                       "The name of the calibration of a device, by its name and driver in Device.info.");
PyDoc_STRVAR(of_doc, "_costs_of($module, device, /)\n--\n\nThe costs that a device uses.");
PyDoc_STRVAR(path_doc, "_costs_path($module, what, /)\n--\n\n"
                       "The file of the calibration of this name. IndexError: no folder is known for it.");

PyMethodDef kvs_py_calibration_methods[] = {
    {"_costs_read", costs_read, METH_O, read_doc},
    {"_costs_write", KVS_PY_FASTCALL(costs_write), METH_FASTCALL | METH_KEYWORDS, write_doc},
    {"_costs_what", KVS_PY_FASTCALL(costs_what), METH_FASTCALL | METH_KEYWORDS, what_doc},
    {"_costs_of", costs_of, METH_O, of_doc},
    {"_costs_path", costs_path, METH_O, path_doc},
    {NULL, NULL, 0, NULL},
};
