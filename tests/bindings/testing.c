/* The extension kvswap._testing: faults, deterministic devices and the rest of the device's seam, for kvswap.testing
 * and the tests. It has no file of the core: what it calls is in the capsules of kvswap._C. Builds from source have it,
 * and wheels do not. */
#include "py/private_capi.h"

#include "kvswap_capi.h"
#include "py/sources.h"

#include <string.h>

static const struct kvs_py_private *core;

static PyObject *answer(int rc, const struct kvs_error *err) {
  if (rc != KVS_OK) return kvswap_api->raise_error(err);
  Py_RETURN_NONE;
}

static PyObject *deterministic_device(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"seed"};
  static const struct kvs_py_args spec = {"deterministic_device", names, 1, 1, 1};
  struct kvs_engine *engine = NULL;
  struct kvs_error err = {0};
  PyObject *value;
  uint64_t seed;
  (void)module;
  if (core->kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (core->kvs_py_uint64(value, "seed", -1, &seed) < 0) return NULL;
  if (seed == 0) return core->kvs_py_complain(PyExc_ValueError, "seed", -1, "must not be 0"), NULL;
  if (core->kvs_engine_open_deterministic(seed, &engine, &err) != KVS_OK) return kvswap_api->raise_error(&err);
  return core->device_object(engine);
}

/* -- host devices -------------------------------------------------------------------------------------------------- */

/* A new reference, and its host device. */
static struct kvs_engine *host_engine(PyObject *device, struct kvs_device **host) {
  struct kvs_engine *engine = kvswap_api->engine_of(device);
  if (!engine) return NULL;
  *host = core->kvs_engine_device(engine);
  if (strcmp((*host)->ops->kind, "host") == 0) return engine;
  kvswap_api->engine_unref(engine);
  core->kvs_py_complain(PyExc_ValueError, "device", -1, "is no host device");
  return NULL;
}

static PyObject *host_step(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "steps"};
  static const struct kvs_py_args spec = {"host_step", names, 2, 2, 2};
  struct kvs_device *host;
  PyObject *values[2];
  int64_t steps;
  (void)module;
  if (core->kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (core->kvs_py_int64(values[1], "steps", -1, &steps) < 0) return NULL;
  struct kvs_engine *engine = host_engine(values[0], &host);
  if (!engine) return NULL;
  KVS_PY_NO_GIL(steps = core->kvs_host_step(host, steps));
  kvswap_api->engine_unref(engine);
  if (steps < 0) return core->kvs_py_complain(PyExc_ValueError, "device", -1, "is not deterministic"), NULL;
  return PyLong_FromLongLong(steps);
}

static PyObject *host_trace(PyObject *module, PyObject *device) {
  struct kvs_device *host;
  struct kvs_engine *engine = host_engine(device, &host);
  (void)module;
  if (!engine) return NULL;
  const unsigned long long hash = core->kvs_host_trace(host);
  kvswap_api->engine_unref(engine);
  return PyLong_FromUnsignedLongLong(hash);
}

static PyObject *host_capture(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "stream", "begin"};
  static const struct kvs_py_args spec = {"host_capture", names, 3, 3, 3};
  struct kvs_error err = {0};
  struct kvs_device *host;
  PyObject *values[3], *result = NULL;
  uint64_t stream;
  (void)module;
  if (core->kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  struct kvs_engine *engine = host_engine(values[0], &host);
  if (!engine) return NULL;
  int begin = PyObject_IsTrue(values[2]);
  if (begin >= 0 && kvswap_api->stream_of(values[1], engine, &stream) == 0)
    result = answer(core->kvs_host_capture(host, stream, begin == 1, &err), &err);
  kvswap_api->engine_unref(engine);
  return result;
}

static PyObject *host_peer(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "ordinal", "reached"};
  static const struct kvs_py_args spec = {"host_peer", names, 3, 3, 3};
  struct kvs_error err = {0};
  struct kvs_device *host;
  PyObject *values[3];
  uint64_t ordinal;
  (void)module;
  if (core->kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (core->kvs_py_uint64(values[1], "ordinal", -1, &ordinal) < 0) return NULL;
  int reached = PyObject_IsTrue(values[2]);
  struct kvs_engine *engine = reached < 0 ? NULL : host_engine(values[0], &host);
  if (!engine) return NULL;
  int rc = core->kvs_host_set_peer(host, ordinal > 4096 ? 4096 : (int)ordinal, reached == 1, &err);
  kvswap_api->engine_unref(engine);
  return answer(rc, &err);
}

/* -- faults -------------------------------------------------------------------------------------------------------- */

enum { F_DEVICE, F_KIND, F_ACTION, F_OPERATION, F_NTH, F_EVERY, F_CODE, F_DELAY, F_COUNT };

static int read_fault(PyObject *const *values, struct kvs_fault *fault) {
  static const char *const actions[] = {"none", "fail", "skip", "lose", "delay", "spoil"};
  int64_t code = 1, delay_ns = 0;
  int action = core->kvs_py_choice(values[F_ACTION], "action", actions, 6);
  if (action < 0) return -1;
  fault->action = (enum kvs_fault_action)action;
  fault->nth = 1;
  if (values[F_OPERATION]) {
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(values[F_OPERATION], &length);
    if (!text) return -1;
    if ((size_t)length >= sizeof fault->operation)
      return core->kvs_py_complain(PyExc_ValueError, "operation", -1, "is %R: no member of the seam",
                                   values[F_OPERATION]);
    memcpy(fault->operation, text, (size_t)length + 1);
  }
  if (values[F_NTH] && core->kvs_py_uint64(values[F_NTH], "nth", -1, &fault->nth) < 0) return -1;
  if (values[F_EVERY] && core->kvs_py_uint64(values[F_EVERY], "every", -1, &fault->every) < 0) return -1;
  if (values[F_CODE] && core->kvs_py_int64(values[F_CODE], "code", -1, &code) < 0) return -1;
  if (values[F_DELAY] && core->kvs_py_timeout(values[F_DELAY], "delay", &delay_ns) < 0) return -1;
  if (fault->nth == 0) return core->kvs_py_complain(PyExc_ValueError, "nth", -1, "counts from 1");
  if (code != (int)code) return core->kvs_py_complain(PyExc_ValueError, "code", -1, "is %R", values[F_CODE]);
  fault->code = (int)code;
  fault->delay_ns = delay_ns < 0 ? 0 : (uint64_t)delay_ns;
  return 0;
}

/* A fault of the engine, not of its device: transfers between pools omit the waits for one kind of hazard. */
static PyObject *skip_hazard(PyObject *const *values) {
  static const char *const actions[] = {"none", "skip"}, *const hazards[] = {"raw", "war", "waw"};
  struct kvs_error err = {0};
  int hazard = 0;
  int action = core->kvs_py_choice(values[F_ACTION], "action", actions, 2);
  if (action < 0) return NULL;
  if (action == 1 && !values[F_OPERATION])
    hazard = core->kvs_py_complain(PyExc_ValueError, "operation", -1, "is needed: 'raw', 'war' or 'waw'");
  else if (action == 1)
    hazard = core->kvs_py_choice(values[F_OPERATION], "operation", hazards, 3);
  if (hazard < 0) return NULL;
  struct kvs_engine *engine = kvswap_api->engine_of(values[F_DEVICE]);
  if (!engine) return NULL;
  int rc = core->kvs_engine_skip_hazard(engine, action == 1 ? hazards[hazard] : NULL, &err);
  kvswap_api->engine_unref(engine);
  return answer(rc, &err);
}

static PyObject *set_fault(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "kind", "action", "operation", "nth", "every", "code", "delay"};
  static const char *const kinds[] = {
      [KVS_FAULT_CALL] = "call", [KVS_FAULT_COPY] = "copy", [KVS_FAULT_CODE] = "code", "hazard"};
  static const struct kvs_py_args spec = {"set_fault", names, 3, 3, F_COUNT};
  struct kvs_fault fault = {0};
  struct kvs_error err = {0};
  PyObject *values[F_COUNT];
  (void)module;
  if (core->kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  int kind = core->kvs_py_choice(values[F_KIND], "kind", kinds, KVS_FAULT_KINDS + 1);
  if (kind == KVS_FAULT_KINDS) return skip_hazard(values);
  if (kind < 0 || read_fault(values, &fault) < 0) return NULL;
  struct kvs_engine *engine = kvswap_api->engine_of(values[F_DEVICE]);
  if (!engine) return NULL;
  int rc = core->kvs_dev_fault_set(core->kvs_engine_device(engine), (enum kvs_fault_kind)kind, &fault, &err);
  kvswap_api->engine_unref(engine);
  return answer(rc, &err);
}

static PyObject *file_set_fault(PyObject *module, PyObject *args) {
  static const char *const calls[] = {"read", "write", "allocate", "open", "sync"};
  static const char *const actions[] = {"none", "fail", "short", "interrupt", "delay"};
  PyObject *object, *call, *action;
  unsigned long long nth, every;
  double delay;
  struct kvs_file_fault fault = {0};
  struct kvs_file_store *store = NULL;
  (void)module;
  if (!PyArg_ParseTuple(args, "OOOKKid:file_set_fault", &object, &call, &action, &nth, &every, &fault.code, &delay))
    return NULL;
  if (object != Py_None && !(store = kvswap_api->file_store_of(object))) return NULL;
  int which = core->kvs_py_choice(call, "call", calls, KVS_FILE_CALLS);
  int what = which < 0 ? -1 : core->kvs_py_choice(action, "action", actions, 5);
  if (what < 0) return NULL;
  fault.action = (enum kvs_file_fault_action)what;
  fault.nth = nth;
  fault.every = every;
  fault.delay_ns = (uint64_t)(delay * 1e9);
  core->kvs_file_inject(store, (enum kvs_file_call)which, &fault);
  Py_RETURN_NONE;
}

/* -- others -------------------------------------------------------------------------------------------------------- */

static PyObject *file_gds_close(PyObject *module, PyObject *unused) {
  bool closed;
  (void)module, (void)unused;
  KVS_PY_NO_GIL(closed = core->kvs_file_gds_shutdown());
  return PyBool_FromLong(closed);
}

static PyObject *set_lane_depth(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "depth"};
  static const struct kvs_py_args spec = {"set_lane_depth", names, 2, 2, 2};
  struct kvs_error err = {0};
  PyObject *values[2];
  uint64_t depth;
  (void)module;
  if (core->kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (core->kvs_py_uint64(values[1], "depth", -1, &depth) < 0) return NULL;
  struct kvs_engine *engine = kvswap_api->engine_of(values[0]);
  if (!engine) return NULL;
  int rc = core->kvs_engine_set_lane_depth(engine, depth, &err);
  kvswap_api->engine_unref(engine);
  return answer(rc, &err);
}

static PyObject *racecheck_found(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return PyLong_FromUnsignedLongLong(core->kvs_racecheck_found());
}

static PyObject *pattern_word(PyObject *module, PyObject *args) {
  unsigned long long key, index;
  (void)module;
  if (!PyArg_ParseTuple(args, "KK:pattern_word", &key, &index)) return NULL;
  return PyLong_FromUnsignedLongLong(kvs_pattern_word(key, index));
}

/* -- the seam ------------------------------------------------------------------------------------------------------ */

#define MEMBERS(X)                                                                                                     \
  X(check, 0, KVS_SEAM_NOTHING, false, core->kvs_dev_check(c->device, err))                                            \
  X(alloc, 1, KVS_SEAM_NUMBER, false, core->kvs_dev_alloc(c->device, c->a[0], &c->number, err))                        \
  X(free, 1, KVS_SEAM_NOTHING, false, core->kvs_dev_free(c->device, c->a[0], err))                                     \
  X(host_alloc, 1, KVS_SEAM_NUMBER, false, core->kvs_dev_host_alloc(c->device, c->a[0], &c->number, err))              \
  X(host_free, 1, KVS_SEAM_NOTHING, false, core->kvs_dev_host_free(c->device, c->a[0], err))                           \
  X(host_register, 2, KVS_SEAM_NOTHING, false, core->kvs_dev_host_register(c->device, c->a[0], c->a[1], err))          \
  X(host_unregister, 1, KVS_SEAM_NOTHING, false, core->kvs_dev_host_unregister(c->device, c->a[0], err))               \
  X(stream_create, 1, KVS_SEAM_NUMBER, false,                                                                          \
    core->kvs_dev_stream_create(c->device, (int)(int64_t)c->a[0], &c->number, err))                                    \
  X(stream_destroy, 1, KVS_SEAM_NOTHING, false, core->kvs_dev_stream_destroy(c->device, c->a[0], err))                 \
  X(stream_query, 1, KVS_SEAM_READY, false, core->kvs_dev_stream_query(c->device, c->a[0], err))                       \
  X(stream_info, 1, KVS_SEAM_STREAM_INFO, false, core->kvs_dev_stream_info(c->device, c->a[0], &c->stream, err))       \
  X(synchronize, 0, KVS_SEAM_NOTHING, false, core->kvs_dev_synchronize(c->device, err))                                \
  X(event_create, 1, KVS_SEAM_NUMBER, false, core->kvs_dev_event_create(c->device, c->a[0] != 0, &c->number, err))     \
  X(event_destroy, 1, KVS_SEAM_NOTHING, false, core->kvs_dev_event_destroy(c->device, c->a[0], err))                   \
  X(event_record, 2, KVS_SEAM_NOTHING, false, core->kvs_dev_event_record(c->device, c->a[0], c->a[1], err))            \
  X(event_query, 1, KVS_SEAM_READY, false, core->kvs_dev_event_query(c->device, c->a[0], err))                         \
  X(event_elapsed, 2, KVS_SEAM_NUMBER, false,                                                                          \
    core->kvs_dev_event_elapsed(c->device, c->a[0], c->a[1], &c->number, err))                                         \
  X(stream_wait, 2, KVS_SEAM_NOTHING, false, core->kvs_dev_stream_wait(c->device, c->a[0], c->a[1], err))              \
  X(copy_direct, 1, KVS_SEAM_NOTHING, true, core->kvs_dev_copy_direct(c->device, &c->copies, c->a[0], err))            \
  X(copy_rect, 10, KVS_SEAM_NOTHING, false, copy_rect(c, err))                                                         \
  X(gap, 1, KVS_SEAM_NOTHING, false, core->kvs_dev_gap(c->device, c->a[0], err))                                       \
  X(launch_pack, 5, KVS_SEAM_NOTHING, false, launch_pack(c, err))                                                      \
  X(launch_crc, 4, KVS_SEAM_NOTHING, false, launch_crc(c, err))                                                        \
  X(write32, 3, KVS_SEAM_NOTHING, false, core->kvs_dev_write32(c->device, c->a[0], (uint32_t)c->a[1], c->a[2], err))   \
  X(wait32, 3, KVS_SEAM_NOTHING, false, core->kvs_dev_wait32(c->device, c->a[0], (uint32_t)c->a[1], c->a[2], err))     \
  X(call, 2, KVS_SEAM_NOTHING, false, call_count(c, err))                                                              \
  X(chunk_granularity, 0, KVS_SEAM_NUMBER, false, core->kvs_dev_chunk_granularity(c->device, &c->number, err))

/* (dst, src, dst_pitch, src_pitch, dst_height, src_height, width, height, depth, stream) */
static int copy_rect(struct kvs_seam_call *c, struct kvs_error *err) {
  struct kvs_rect rect = {.dst = c->a[0],
                          .src = c->a[1],
                          .dst_pitch = c->a[2],
                          .src_pitch = c->a[3],
                          .dst_height = c->a[4],
                          .src_height = c->a[5],
                          .width = c->a[6],
                          .height = c->a[7],
                          .depth = c->a[8]};
  return core->kvs_dev_copy_rect(c->device, &rect, c->a[9], err);
}

/* (address of the data, its bytes, address of a word that is 0, stream) */
static int launch_crc(struct kvs_seam_call *c, struct kvs_error *err) {
  struct kvs_crc_params params;
  core->kvs_crc_plan(&params, c->a[1]);
  params.data = c->a[0];
  params.result = c->a[2];
  struct kvs_launch launch = {.kernel = KVS_KERNEL_CRC,
                              .grid = params.bodies + 1,
                              .threads = KVS_CRC_THREADS,
                              .params = &params,
                              .params_nbytes = sizeof params};
  return core->kvs_dev_launch(c->device, &launch, c->a[3], err);
}

static void count_up(void *word) { __atomic_add_fetch((uint32_t *)word, 1, __ATOMIC_RELEASE); }

/* (address of a word of the host that is counted up, stream) */
static int call_count(struct kvs_seam_call *c, struct kvs_error *err) {
  return core->kvs_dev_call(c->device, count_up, (void *)(uintptr_t)c->a[0], c->a[1], err);
}
/* (npieces, address of the pieces, grid, threads, stream) */
static int launch_pack(struct kvs_seam_call *c, struct kvs_error *err) {
  struct kvs_copy_params params = {.units = {.pieces = c->a[1]}, .count = c->a[0]};
  struct kvs_launch launch = {.kernel = KVS_KERNEL_PACK,
                              .grid = (unsigned)c->a[2],
                              .threads = (unsigned)c->a[3],
                              .params = &params,
                              .params_nbytes = sizeof params};
  return core->kvs_dev_launch(c->device, &launch, c->a[4], err);
}

MEMBERS(KVS_SEAM_FUNCTION)
static const struct kvs_seam_row rows[] = {MEMBERS(KVS_SEAM_ROW)};

static PyObject *seam(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
  (void)module;
  return core->seam(args, nargs, rows, sizeof rows / sizeof *rows);
}

/* -- costs --------------------------------------------------------------------------------------------------------- */

static PyObject *costs_use(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"device", "costs"};
  static const struct kvs_py_args spec = {"costs_use", names, 2, 2, 2};
  struct kvs_costs costs;
  PyObject *values[2];
  (void)module;
  if (core->kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  bool built_in = values[1] == Py_None;
  if (!built_in && core->kvs_py_costs_read(values[1], &costs) < 0) return NULL;
  struct kvs_engine *engine = kvswap_api->engine_of(values[0]);
  if (!engine) return NULL;
  core->kvs_engine_set_costs(engine, built_in ? NULL : &costs, built_in ? "built in" : "as this process set them");
  kvswap_api->engine_unref(engine);
  Py_RETURN_NONE;
}

static PyObject *costs_predict(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  enum { COSTS, PATH, DIRECTION, NUMBERS, PREDICT = NUMBERS + 13 };
  static const char *const names[PREDICT] = {
      "costs",      "path",         "direction",   "nbytes", "copies",      "rects",       "rect_rows", "rect_nbytes",
      "apart_rows", "apart_nbytes", "rest_copies", "pieces", "skew_pieces", "skew_nbytes", "rows",      "runs"};
  static const char *const directions[] = {"d2h", "h2d"};
  static const struct kvs_py_args spec = {"costs_predict", names, 4, 4, PREDICT};
  struct kvs_costs costs = *core->kvs_costs_default();
  struct kvs_shape shape = {0};
  uint64_t *const numbers[] = {&shape.nbytes,      &shape.copies,      &shape.rects,        &shape.rect_rows,
                               &shape.rect_nbytes, &shape.apart_rows,  &shape.apart_nbytes, &shape.rest_copies,
                               &shape.pieces,      &shape.skew_pieces, &shape.skew_nbytes,  &shape.rows,
                               &shape.runs};
  PyObject *values[PREDICT];
  (void)module;
  if (core->kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (values[COSTS] != Py_None && core->kvs_py_costs_read(values[COSTS], &costs) < 0) return NULL;
  int path = core->kvs_py_path(values[PATH], "path", true);
  int direction = path < 0 ? -1 : core->kvs_py_choice(values[DIRECTION], "direction", directions, 2);
  if (direction < 0) return NULL;
  shape.direction = (enum kvs_direction)direction;
  for (int i = NUMBERS; i < PREDICT; i++)
    if (values[i] && core->kvs_py_uint64(values[i], names[i], -1, numbers[i - NUMBERS]) < 0) return NULL;
  return PyFloat_FromDouble(core->kvs_cost_ns(&costs, &shape, (enum kvs_path)path));
}

/* -- the module ---------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(
    deterministic_device_doc,
    "deterministic_device($module, /, seed)\n--\n\n"
    "A private host device whose work runs only inside calls on it, in an order that the seed (not 0) decides.");
PyDoc_STRVAR(host_step_doc, "host_step($module, /, device, steps)\n--\n\n"
                            "Run up to `steps` steps of a deterministic device's queued work; returns the number run.");
PyDoc_STRVAR(host_trace_doc, "host_trace($module, device, /)\n--\n\n"
                             "A hash of all work that ran on a host device so far, and of its order.");
PyDoc_STRVAR(host_capture_doc, "host_capture($module, /, device, stream, begin)\n--\n\n"
                               "Begin or end a modelled graph capture on a host device's stream.");
PyDoc_STRVAR(host_peer_doc, "host_peer($module, /, device, ordinal, reached)\n--\n\n"
                            "Whether kernels of a host device reach the memory of host:<ordinal>.");
PyDoc_STRVAR(set_fault_doc,
             "set_fault($module, /, device, kind, action, *, operation='', nth=1, every=0, code=1, delay=0.0)\n--\n\n"
             "From now on let the nth 'call' (of a member of the seam, '' for any) or 'copy' fail, be skipped, delayed "
             "by so many\n"
             "seconds, or lose the device; then each `every` more, 0: once. action 'none' ends it. One fault a kind.\n"
             "kind 'hazard', action 'skip', operation 'raw', 'war' or 'waw': the waits between transfers of pools for "
             "such a hazard\n"
             "are left out.");
PyDoc_STRVAR(set_lane_depth_doc,
             "set_lane_depth($module, /, device, depth)\n--\n\n"
             "Set the limit of unfinished transfers of a lane, 1 to 65536. Applies to lanes created later.");
PyDoc_STRVAR(file_set_fault_doc,
             "file_set_fault($module, store, call, action, nth, every, code, delay, /)\n--\n\n"
             "Inject a fault into the nth such call of a store, and each `every` later; store None: while one opens.");
PyDoc_STRVAR(file_gds_close_doc,
             "file_gds_close($module, /)\n--\n\n"
             "Close libcufile's driver, so that the next store looks for the library again. False: a "
             "store still uses it.");
PyDoc_STRVAR(costs_use_doc,
             "costs_use($module, /, device, costs)\n--\n\n"
             "Use these costs on a device; None: the built-in ones. No other thread may submit meanwhile.");
PyDoc_STRVAR(costs_predict_doc, "costs_predict($module, /, costs, path, direction, nbytes, **shape)\n--\n\n"
                                "Nanoseconds that a transfer of this shape (struct kvs_shape) takes; costs None: the "
                                "built-in ones.");
PyDoc_STRVAR(racecheck_found_doc, "racecheck_found($module, /)\n--\n\nHow many races since the first start.");
PyDoc_STRVAR(pattern_word_doc, "pattern_word($module, key, index, /)\n--\n\n"
                               "Word `index` of the pattern: its bytes 8 * index to 8 * index + 7, little-endian.");
PyDoc_STRVAR(
    seam_doc,
    "seam($module, device, operation, /, *args)\n--\n\n"
    "Call one member of csrc/device/device.h and return what it returns; queries return whether it is ready.\n\n"
    "copy_direct takes (dsts, srcs, sizes, stream), launch_pack (npieces, address of the pieces, grid, threads, "
    "stream),\nlaunch_crc (address, bytes, address of a word, stream), copy_rect the fields of struct kvs_rect "
    "and the stream,\nall others as they stand; kvswap._C._seam() has more.");

#define ROW(name) {#name, KVS_PY_FASTCALL(name), METH_FASTCALL | METH_KEYWORDS, name##_doc}
static PyMethodDef methods[] = {
    ROW(deterministic_device),
    ROW(host_step),
    {"host_trace", host_trace, METH_O, host_trace_doc},
    ROW(host_capture),
    ROW(host_peer),
    ROW(set_fault),
    ROW(set_lane_depth),
    ROW(costs_use),
    ROW(costs_predict),
    {"file_set_fault", file_set_fault, METH_VARARGS, file_set_fault_doc},
    {"file_gds_close", file_gds_close, METH_NOARGS, file_gds_close_doc},
    {"racecheck_found", racecheck_found, METH_NOARGS, racecheck_found_doc},
    {"pattern_word", pattern_word, METH_VARARGS, pattern_word_doc},
    {"seam", (PyCFunction)(void (*)(void))seam, METH_FASTCALL, seam_doc},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
  (void)module;
  if (import_kvswap() < 0) return -1;
  core = PyCapsule_Import("kvswap._C._private", 0);
  if (!core) return -1;
  if (strcmp(core->sources, KVSWAP_SOURCES) == 0) return 0;
  PyErr_SetString(PyExc_ImportError,
                  "kvswap._testing and kvswap._C were built from different sources: build both anew");
  return -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "kvswap._testing", .m_methods = methods,
                                        .m_slots = slots};

PyMODINIT_FUNC PyInit__testing(void) { return PyModuleDef_Init(&definition); }
