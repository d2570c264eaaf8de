/* What only kvswap.testing and the tests use: faults, deterministic devices. Left out of wheels, with what the macro
 * KVSWAP_NO_TEST_BINDINGS leaves out of other files. */
#include "../device/faults.h"
#include "../host/device.h"
#include "args.h"
#include "errors.h"
#include "handle.h"
#include "module.h"
#include "objects.h"
#include "open.h"

#include <string.h>

static PyObject *answer(struct kvs_py_state *state, int rc, const struct kvs_error *err) {
  if (rc != KVS_OK) return kvs_py_raise(state, err);
  Py_RETURN_NONE;
}

static PyObject *deterministic_device(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"seed"};
  static const struct kvs_py_args spec = {"_deterministic_device", names, 1, 1, 1};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_engine *engine = NULL;
  struct kvs_error err = {0};
  PyObject *value;
  uint64_t seed;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_uint64(value, "seed", -1, &seed) < 0) return NULL;
  if (seed == 0) return kvs_py_complain(PyExc_ValueError, "seed", -1, "must not be 0"), NULL;
  if (kvs_engine_open_deterministic(seed, &engine, &err) != KVS_OK) return kvs_py_raise(state, &err);
  return kvs_py_device_new(state, engine);
}

/* The host device behind a Device; borrowed. */
static struct kvs_device *host_device_of(PyObject *module, PyObject *device) {
  struct kvs_py_state *state = PyModule_GetState(module);
  if ((PyObject *)Py_TYPE(device) != state->device_type) {
    kvs_py_complain(PyExc_TypeError, "device", -1, "must be a Device, not %s", Py_TYPE(device)->tp_name);
    return NULL;
  }
  struct kvs_device *core = kvs_engine_device(kvs_py_device_engine(device));
  if (strcmp(core->ops->kind, "host") == 0) return core;
  kvs_py_complain(PyExc_ValueError, "device", -1, "is no host device");
  return NULL;
}

static PyObject *host_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "steps"};
  static const struct kvs_py_args spec = {"_host_step", names, 2, 2, 2};
  PyObject *values[2];
  int64_t steps;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  struct kvs_device *core = host_device_of(module, values[0]);
  if (core == NULL || kvs_py_int64(values[1], "steps", -1, &steps) < 0) return NULL;
  KVS_PY_NO_GIL(steps = kvs_host_step(core, steps));
  if (steps < 0) return kvs_py_complain(PyExc_ValueError, "device", -1, "is not deterministic"), NULL;
  return PyLong_FromLongLong(steps);
}

static PyObject *host_trace(PyObject *module, PyObject *device) {
  struct kvs_device *core = host_device_of(module, device);
  return core == NULL ? NULL : PyLong_FromUnsignedLongLong(kvs_host_trace(core));
}

static PyObject *host_capture(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "stream", "begin"};
  static const struct kvs_py_args spec = {"_host_capture", names, 3, 3, 3};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_error err = {0};
  PyObject *values[3];
  uint64_t stream;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  struct kvs_device *core = host_device_of(module, values[0]);
  if (core == NULL) return NULL;
  if (kvs_py_stream_handle(state, values[1], "stream", kvs_py_device_engine(values[0]), &stream) < 0) return NULL;
  int begin = PyObject_IsTrue(values[2]);
  if (begin < 0) return NULL;
  return answer(state, kvs_host_capture(core, stream, begin == 1, &err), &err);
}

static PyObject *host_peer(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "ordinal", "reached"};
  static const struct kvs_py_args spec = {"_host_peer", names, 3, 3, 3};
  struct kvs_error err = {0};
  PyObject *values[3];
  uint64_t ordinal;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  struct kvs_device *core = host_device_of(module, values[0]);
  if (core == NULL || kvs_py_uint64(values[1], "ordinal", -1, &ordinal) < 0) return NULL;
  int reached = PyObject_IsTrue(values[2]);
  if (reached < 0) return NULL;
  return answer(PyModule_GetState(module),
                kvs_host_set_peer(core, ordinal > 4096 ? 4096 : (int)ordinal, reached == 1, &err), &err);
}

/* -- faults -------------------------------------------------------------------------------------------------------- */

enum { F_DEVICE, F_KIND, F_ACTION, F_OPERATION, F_NTH, F_EVERY, F_CODE, F_DELAY, F_COUNT };

static int read_fault(PyObject *const *values, struct kvs_fault *fault) {
  static const char *const actions[] = {"none", "fail", "skip", "lose", "delay", "spoil"};
  int64_t code = 1, delay_ns = 0;
  int action = kvs_py_choice(values[F_ACTION], "action", actions, 6);
  if (action < 0) return -1;
  fault->action = (enum kvs_fault_action)action;
  fault->nth = 1;
  if (values[F_OPERATION] != NULL) {
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(values[F_OPERATION], &length);
    if (text == NULL) return -1;
    if ((size_t)length >= sizeof fault->operation)
      return kvs_py_complain(PyExc_ValueError, "operation", -1, "is %R: no member of the seam", values[F_OPERATION]);
    memcpy(fault->operation, text, (size_t)length + 1);
  }
  if (values[F_NTH] != NULL && kvs_py_uint64(values[F_NTH], "nth", -1, &fault->nth) < 0) return -1;
  if (values[F_EVERY] != NULL && kvs_py_uint64(values[F_EVERY], "every", -1, &fault->every) < 0) return -1;
  if (values[F_CODE] != NULL && kvs_py_int64(values[F_CODE], "code", -1, &code) < 0) return -1;
  if (values[F_DELAY] != NULL && kvs_py_timeout(values[F_DELAY], "delay", &delay_ns) < 0) return -1;
  if (fault->nth == 0) return kvs_py_complain(PyExc_ValueError, "nth", -1, "counts from 1");
  if (code != (int)code) return kvs_py_complain(PyExc_ValueError, "code", -1, "is %R", values[F_CODE]);
  fault->code = (int)code;
  fault->delay_ns = delay_ns < 0 ? 0 : (uint64_t)delay_ns;
  return 0;
}

/* A fault of the engine, not of its device: transfers between pools omit the waits for one kind of hazard. */
static PyObject *skip_hazard(struct kvs_py_state *state, PyObject *const *values) {
  static const char *const actions[] = {"none", "skip"}, *const hazards[] = {"raw", "war", "waw"};
  struct kvs_error err = {0};
  int hazard = 0;
  int action = kvs_py_choice(values[F_ACTION], "action", actions, 2);
  if (action < 0) return NULL;
  if (action == 1 && values[F_OPERATION] == NULL)
    hazard = kvs_py_complain(PyExc_ValueError, "operation", -1, "is needed: 'raw', 'war' or 'waw'");
  else if (action == 1)
    hazard = kvs_py_choice(values[F_OPERATION], "operation", hazards, 3);
  if (hazard < 0) return NULL;
  struct kvs_engine *engine = kvs_py_engine_from(state, values[F_DEVICE]);
  if (engine == NULL) return NULL;
  int rc = kvs_engine_skip_hazard(engine, action == 1 ? hazards[hazard] : NULL, &err);
  kvs_engine_unref(engine);
  return answer(state, rc, &err);
}

static PyObject *set_fault(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "kind", "action", "operation", "nth", "every", "code", "delay"};
  static const char *const kinds[] = {
      [KVS_FAULT_CALL] = "call", [KVS_FAULT_COPY] = "copy", [KVS_FAULT_CODE] = "code", "hazard"};
  static const struct kvs_py_args spec = {"_set_fault", names, 3, 3, F_COUNT};
  struct kvs_py_state *state = PyModule_GetState(module);
  struct kvs_fault fault = {0};
  struct kvs_error err = {0};
  PyObject *values[F_COUNT];
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  int kind = kvs_py_choice(values[F_KIND], "kind", kinds, KVS_FAULT_KINDS + 1);
  if (kind == KVS_FAULT_KINDS) return skip_hazard(state, values);
  if (kind < 0 || read_fault(values, &fault) < 0) return NULL;
  struct kvs_engine *engine = kvs_py_engine_from(state, values[F_DEVICE]);
  if (engine == NULL) return NULL;
  int rc = kvs_dev_fault_set(kvs_engine_device(engine), (enum kvs_fault_kind)kind, &fault, &err);
  kvs_engine_unref(engine);
  return answer(state, rc, &err);
}

/* Two arguments, a device and a number. */
static PyObject *set_number(struct kvs_py_state *state, const struct kvs_py_args *spec, PyObject *const *args,
                            Py_ssize_t nargs, PyObject *kwnames,
                            int (*set)(struct kvs_engine *, uint64_t, struct kvs_error *)) {
  struct kvs_error err = {0};
  PyObject *values[2];
  uint64_t number;
  if (kvs_py_args_parse(spec, args, nargs, kwnames, values) < 0) return NULL;
  if (kvs_py_uint64(values[1], spec->names[1], -1, &number) < 0) return NULL;
  struct kvs_engine *engine = kvs_py_engine_from(state, values[0]);
  if (engine == NULL) return NULL;
  int rc = set(engine, number, &err);
  kvs_engine_unref(engine);
  return answer(state, rc, &err);
}

static PyObject *set_lane_depth(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "depth"};
  static const struct kvs_py_args spec = {"_set_lane_depth", names, 2, 2, 2};
  return set_number(PyModule_GetState(module), &spec, args, nargs, kwnames, kvs_engine_set_lane_depth);
}

PyDoc_STRVAR(
    deterministic_device_doc,
    "_deterministic_device($module, /, seed)\n--\n\n"
    "A private host device whose work runs only inside calls on it, in an order that the seed (not 0) decides.");
PyDoc_STRVAR(host_step_doc, "_host_step($module, /, device, steps)\n--\n\n"
                            "Run up to `steps` steps of a deterministic device's queued work; returns the number run.");
PyDoc_STRVAR(host_trace_doc, "_host_trace($module, device, /)\n--\n\n"
                             "A hash of all work that ran on a host device so far, and of its order.");
PyDoc_STRVAR(host_capture_doc, "_host_capture($module, /, device, stream, begin)\n--\n\n"
                               "Begin or end a modelled graph capture on a host device's stream.");
PyDoc_STRVAR(host_peer_doc, "_host_peer($module, /, device, ordinal, reached)\n--\n\n"
                            "Whether kernels of a host device reach the memory of host:<ordinal>.");
PyDoc_STRVAR(set_fault_doc,
             "_set_fault($module, /, device, kind, action, *, operation='', nth=1, every=0, code=1, delay=0.0)\n--\n\n"
             "From now on let the nth 'call' (of a member of the seam, '' for any) or 'copy' fail, be skipped, delayed "
             "by so many\n"
             "seconds, or lose the device; then each `every` more, 0: once. action 'none' ends it. One fault a kind.\n"
             "kind 'hazard', action 'skip', operation 'raw', 'war' or 'waw': the waits between transfers of pools for "
             "such a hazard\n"
             "are left out.");
PyDoc_STRVAR(set_lane_depth_doc,
             "_set_lane_depth($module, /, device, depth)\n--\n\n"
             "Set the limit of unfinished transfers of a lane, 1 to 65536. Applies to lanes created later.");
#define ROW(function, name) {"_" #name, KVS_PY_FASTCALL(function), METH_FASTCALL | METH_KEYWORDS, name##_doc}
PyMethodDef kvs_py_testing_methods[] = {
    ROW(deterministic_device, deterministic_device),
    ROW(host_step, host_step),
    {"_host_trace", host_trace, METH_O, host_trace_doc},
    ROW(host_capture, host_capture),
    ROW(host_peer, host_peer),
    ROW(set_fault, set_fault),
    ROW(set_lane_depth, set_lane_depth),
    {NULL, NULL, 0, NULL},
};
