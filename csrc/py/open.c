/* How a device is found: by object, by name, by pointer, by default; and what opening one, or a store, says once a
 * process. */
#include "py/open.h"
#include "cuda/info.h"
#include "py/args.h"
#include "py/arrays.h"
#include "py/device_facts.h"
#include "py/errors.h"
#include "py/objects.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Drain at exit. Registered when the first device or store is opened, because an import must have no effects. */
int kvs_py_hook_exit(struct kvs_py_state *state) {
  if (atomic_exchange(&state->exit_hooked, true)) return 0;
  PyObject *module = PyType_GetModule((PyTypeObject *)state->device_type);
  PyObject *shutdown = module ? PyObject_GetAttrString(module, "_shutdown") : NULL;
  PyObject *exit = shutdown ? PyImport_ImportModule("atexit") : NULL;
  PyObject *done = exit ? PyObject_CallMethod(exit, "register", "Od", shutdown, 5.0) : NULL;
  Py_XDECREF(exit);
  Py_XDECREF(shutdown);
  if (!done) atomic_store(&state->exit_hooked, false);
  Py_XDECREF(done);
  return done ? 0 : -1;
}

int kvs_py_say(const char *level, const char *format, const char *text) {
  PyObject *logging = PyImport_ImportModule("logging");
  PyObject *logger = logging ? PyObject_CallMethod(logging, "getLogger", "s", "kvswap") : NULL;
  PyObject *done = logger ? PyObject_CallMethod(logger, level, "ss", format, text) : NULL;
  Py_XDECREF(logging);
  Py_XDECREF(logger);
  Py_XDECREF(done);
  return done ? 0 : -1;
}

/* Log once that there is no GPU: work meant for a GPU is slow on the host device. A warning where there is a GPU, which
 * a missing, old or damaged driver hides. */
static int say_host(struct kvs_py_state *state, const struct kvs_error *why) {
  if (atomic_exchange(&state->host_said, true)) return 0;
  bool hidden = access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
  return kvs_py_say(hidden ? "warning" : "info", "using host:0, which is memory and threads: %s",
                    why->message[0] != '\0' ? why->message : "no CUDA device");
}

/* Log once that this machine's calibration cannot be used. */
static int say_costs(struct kvs_py_state *state, const struct kvs_engine *engine) {
  const char *note = kvs_engine_costs_note(engine), *refused = "built in, since ";
  if (strncmp(note, refused, strlen(refused)) != 0 || atomic_exchange(&state->costs_said, true)) return 0;
  return kvs_py_say("warning", "the calibration cannot be used, and path 'auto' goes by built-in figures: %s",
                    note + strlen(refused));
}

/* Log once that path 'burst' is off or short of memory without having been asked for. */
static int say_burst(struct kvs_py_state *state, struct kvs_engine *engine) {
  const char *wanted = "KVSWAP_DISABLE";
  char note[KVS_BURST_NOTE];
  kvs_engine_burst_note(engine, note);
  bool off = kvs_engine_slots_nbytes(engine) == 0;
  if (!kvs_engine_device(engine)->info.kernels) return 0; /* say_opened() says that */
  if (note[0] == '\0' || strncmp(note, wanted, strlen(wanted)) == 0 || atomic_exchange(&state->burst_said, true))
    return 0;
  return kvs_py_say("warning",
                    off ? "path 'burst' is off, other paths are slower or cost a model beside them more: %s"
                        : "path 'burst' has less memory than it should: %s",
                    note);
}

/* Once a process and device, log what it is, and warn of what a GPU lacks; kvswap._devices has the texts. A filter may
 * make the warning an error. */
static int say_opened(struct kvs_py_state *state, const struct kvs_engine *engine) {
  const struct kvs_device *device = kvs_engine_device((struct kvs_engine *)(uintptr_t)engine);
  uint64_t bit = UINT64_C(1) << (device->ordinal % 64);
  bool cuda = strcmp(device->ops->kind, "cuda") == 0;
  if ((atomic_fetch_or(&state->opened[cuda], bit) & bit) != 0) return 0;
  PyObject *module = PyImport_ImportModule("kvswap._devices");
  PyObject *info = module ? kvs_py_device_info_dict(&device->info) : NULL;
  PyObject *done = info ? PyObject_CallMethod(module, "say_opened", "sO", kvs_engine_name(engine), info) : NULL;
  Py_XDECREF(module);
  Py_XDECREF(info);
  Py_XDECREF(done);
  return done ? 0 : -1;
}

static struct kvs_engine *open_engine(struct kvs_py_state *state, const char *name) {
  struct kvs_engine *engine = NULL;
  struct kvs_error err = {0};
  int rc;
  if (kvs_py_hook_exit(state) < 0) return NULL;
  KVS_PY_NO_GIL(rc = kvs_engine_open(name, &engine, &err));
  if (rc == KVS_OK && say_costs(state, engine) == 0 && say_burst(state, engine) == 0 && say_opened(state, engine) == 0)
    return engine;
  if (rc == KVS_OK)
    kvs_engine_unref(engine);
  else
    kvs_py_raise(state, &err);
  return NULL;
}

static struct kvs_engine *open_cuda(struct kvs_py_state *state, int ordinal) {
  char name[24];
  snprintf(name, sizeof name, "cuda:%d", ordinal);
  return open_engine(state, name);
}

static int cuda_count(struct kvs_error *err) {
  int count = 0;
  Py_BEGIN_ALLOW_THREADS /* the first call in a process loads the driver */
  if (kvs_cuda_count(&count, err) != KVS_OK) count = -1;
  Py_END_ALLOW_THREADS
  return count;
}

static struct kvs_engine *open_current(struct kvs_py_state *state) {
  int ordinal = 0;
  struct kvs_error err = {0};
  if (kvs_cuda_current(&ordinal, &err) == KVS_OK) return open_cuda(state, ordinal);
  kvs_py_raise(state, &err);
  return NULL;
}

static struct kvs_engine *open_default(struct kvs_py_state *state) {
  struct kvs_error why = {0};
  int count = cuda_count(&why);
  if (count > 0) return open_current(state);
  if (count < 0) return kvs_py_raise(state, &why), NULL; /* a GPU that fails to open is an error, not "no GPU" */
  return say_host(state, &why) < 0 ? NULL : open_engine(state, "host:0");
}

static struct kvs_engine *open_named(struct kvs_py_state *state, PyObject *name) {
  const char *text = PyUnicode_AsUTF8(name);
  if (!text) return NULL;
  if (strcmp(text, "cuda") == 0) return open_current(state);
  if (strcmp(text, "cpu") == 0 || strncmp(text, "cpu:", 4) == 0) { /* torch's name of the host */
    char host[24];
    snprintf(host, sizeof host, "host%.16s", text + 3);
    return open_engine(state, host);
  }
  return open_engine(state, text);
}

/* A number is that of a GPU. */
static struct kvs_engine *open_number(struct kvs_py_state *state, PyObject *device) {
  uint64_t ordinal;
  if (kvs_py_uint64(device, "device", -1, &ordinal) < 0) return NULL;
  if (ordinal <= INT32_MAX) return open_cuda(state, (int)ordinal);
  kvs_py_complain(PyExc_ValueError, "device", -1, "is %R: must be the number of a GPU, from 0 on", device);
  return NULL;
}

/* torch's current GPU; without torch, or where torch fails, the driver's. The object came from torch, so that torch is
 * imported already. */
static struct kvs_engine *open_current_of_torch(struct kvs_py_state *state) {
  PyObject *torch = PyImport_GetModule(state->s_torch);
  PyObject *cuda = torch ? PyObject_GetAttrString(torch, "cuda") : NULL;
  PyObject *number = cuda ? PyObject_CallMethod(cuda, "current_device", NULL) : NULL;
  long ordinal = number ? PyLong_AsLong(number) : -1;
  Py_XDECREF(torch);
  Py_XDECREF(cuda);
  Py_XDECREF(number);
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL; /* KeyboardInterrupt */
    PyErr_Clear();
  }
  return ordinal >= 0 && ordinal <= INT32_MAX ? open_cuda(state, (int)ordinal) : open_current(state);
}

static struct kvs_engine *not_a_device(PyObject *device) {
  kvs_py_complain(PyExc_TypeError, "device", -1,
                  "must be a Device, a name such as \"cuda:0\", the number of a GPU, a torch.device or None, not %s",
                  Py_TYPE(device)->tp_name);
  return NULL;
}

/* torch.device: `type` is a str and `index` an int or None. */
static struct kvs_engine *open_torch_device(struct kvs_py_state *state, PyObject *device) {
  PyObject *index = NULL, *type = PyObject_GetAttrString(device, "type");
  if (type && PyUnicode_Check(type)) index = PyObject_GetAttrString(device, "index");
  if (!index) {
    Py_XDECREF(type);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)) return NULL;
    PyErr_Clear();
    return not_a_device(device);
  }
  struct kvs_engine *engine = NULL;
  PyObject *name = NULL;
  if (index == Py_None && PyUnicode_CompareWithASCIIString(type, "cuda") == 0)
    engine = open_current_of_torch(state);
  else
    name = index == Py_None ? Py_NewRef(type) : PyUnicode_FromFormat("%U:%S", type, index);
  if (name) engine = open_named(state, name);
  Py_XDECREF(name);
  Py_DECREF(index);
  Py_DECREF(type);
  return engine;
}

struct kvs_engine *kvs_py_engine_from(struct kvs_py_state *state, PyObject *device) {
  if (!device || device == Py_None) return open_default(state);
  if (PyUnicode_Check(device)) return open_named(state, device);
  if (PyBool_Check(device)) return not_a_device(device);
  if (PyLong_Check(device) || kvs_py_is_scalar(device)) return open_number(state, device);
  if ((PyObject *)Py_TYPE(device) != state->device_type) return open_torch_device(state, device);
  struct kvs_engine *engine = kvs_py_device_engine(device);
  kvs_engine_ref(engine);
  return engine;
}

struct kvs_engine *kvs_py_engine_of(struct kvs_py_state *state, const uint64_t *ptrs, size_t count) {
  struct kvs_error err = {0};
  if (count == 0 || cuda_count(&err) <= 0) return open_default(state);
  for (size_t i = 0; i < count; i++) {
    int ordinal = 0;
    int rc = kvs_cuda_pointer_device(ptrs[i], &ordinal, &err);
    if (rc == KVS_OK) return open_cuda(state, ordinal);
    if (rc == KVS_INVALID) continue;
    kvs_py_raise(state, &err);
    return NULL;
  }
  PyErr_Format(
      PyExc_ValueError,
      "host memory (%p) was given where GPU memory belongs; to swap on the host device, pass device=\"host:0\"",
      (void *)(uintptr_t)ptrs[0]);
  return NULL;
}
