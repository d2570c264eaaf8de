/* The base of kvswap.memory.HostPool and SharedPool: arguments, waiting, views, closing,
 * attributes. */
#include "py/host_pool_base.h"
#include "base/wait.h"
#include "py/args.h"
#include "py/arrays.h"
#include "py/errors.h"
#include "py/module.h"
#include "py/objects.h"
#include "py/open.h"
#include "py/pool.h"
#include "py/wait.h"

#include <limits.h>
#include <string.h>

enum { CLOSED = KVS_PY_HOST_CLOSED, SHRINKING = KVS_PY_HOST_SHRINKING, CLOSE_SECONDS = 60 };
static const long FORCED = LONG_MIN / 2;
static const int64_t SECOND_NS = 1000000000;

static struct kvs_py_host_pool *as_pool(PyObject *self) { return (struct kvs_py_host_pool *)self; }

/* -- arguments ----------------------------------------------------------------------------------------------------- */

static int read_numa(PyObject *value, struct kvs_host_pool_options *options) {
  int64_t node;
  if (!value) return 0;
  if (value == Py_None) {
    options->placement = KVS_PLACE_ANYWHERE;
    return 0;
  }
  if (PyUnicode_Check(value)) {
    static const char *const words[] = {"auto", "interleave"};
    int which = kvs_py_choice(value, "numa", words, 2);
    options->placement = which == 1 ? KVS_PLACE_INTERLEAVE : KVS_PLACE_AUTO;
    return which < 0 ? -1 : 0;
  }
  if (kvs_py_int64(value, "numa", -1, &node) < 0) return -1;
  if (node < 0 || node > INT_MAX)
    return kvs_py_complain(PyExc_ValueError, "numa", -1, "is %lld: a node is 0 or more", (long long)node);
  options->placement = KVS_PLACE_NODE;
  options->node = (int)node;
  return 0;
}

static int read_flag(PyObject *value, int otherwise) { return value ? PyObject_IsTrue(value) : otherwise; }

/* A number of at least 1; NULL and None leave *number unchanged. */
static int read_count(PyObject *value, const char *name, uint64_t most, uint64_t *number) {
  if (!kvs_py_given(value)) return 0;
  if (kvs_py_uint64(value, name, -1, number) < 0) return -1;
  if (*number >= 1 && *number <= most) return 0;
  return kvs_py_complain(PyExc_ValueError, name, -1, "is %llu: must be 1 to %llu", (unsigned long long)*number,
                         (unsigned long long)most);
}

int kvs_py_host_options(PyObject *num_blocks, PyObject *slot_nbytes, PyObject *const *common,
                        struct kvs_host_pool_options *options) {
  static const char *const layouts[] = {"block-first", "layer-first"};
  static const char *const pages[] = {"default", "transparent", "2MiB", "1GiB"};
  uint64_t threads = 0;
  if (kvs_py_uint64(num_blocks, "num_blocks", -1, &options->num_blocks) < 0) return -1;
  if (kvs_py_uint64(slot_nbytes, "slot_nbytes", -1, &options->slot_nbytes) < 0) return -1;
  if (read_count(common[KVS_PY_HOST_LAYERS], "layers", UINT32_MAX, &options->layers) < 0) return -1;
  if (read_count(common[KVS_PY_HOST_CHUNK], "chunk_nbytes", UINT64_MAX, &options->chunk_nbytes) < 0) return -1;
  if (read_count(common[KVS_PY_HOST_THREADS], "threads", 64, &threads) < 0) return -1;
  options->threads = (unsigned)threads;
  int layout = common[KVS_PY_HOST_LAYOUT] ? kvs_py_choice(common[KVS_PY_HOST_LAYOUT], "layout", layouts, 2) : 0;
  int kind = common[KVS_PY_HOST_PAGES] ? kvs_py_choice(common[KVS_PY_HOST_PAGES], "pages", pages, 4) : 0;
  if (layout < 0 || kind < 0 || read_numa(common[KVS_PY_HOST_NUMA], options) < 0) return -1;
  options->layer_first = layout == 1;
  options->pages = (enum kvs_pages)kind;
  int pinned = read_flag(common[KVS_PY_HOST_REGISTER], 1);
  if (pinned < 0) return -1;
  options->pageable = pinned == 0;
  if (kvs_py_given(common[KVS_PY_HOST_RESERVE])) {
    options->has_reserve = true;
    if (kvs_py_int64(common[KVS_PY_HOST_RESERVE], "reserve", -1, &options->reserve) < 0) return -1;
  }
  PyObject *progress = common[KVS_PY_HOST_PROGRESS];
  if (!kvs_py_given(progress) || PyCallable_Check(progress)) return 0;
  return kvs_py_complain(PyExc_TypeError, "progress", -1, "must be callable or None, not %s",
                         Py_TYPE(progress)->tp_name);
}

struct kvs_py_host_pool *kvs_py_host_pool_new(PyTypeObject *type, PyObject *const *common, struct kvs_engine **engine) {
  struct kvs_py_host_pool *self = (struct kvs_py_host_pool *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  PyObject_GC_UnTrack(self); /* until it is open: see alloc_pool() in pool.c */
  *engine = kvs_py_engine_from(PyType_GetModuleState(type), common[KVS_PY_HOST_DEVICE]);
  if (!*engine) {
    Py_DECREF(self);
    return NULL;
  }
  PyObject *progress = common[KVS_PY_HOST_PROGRESS];
  if (kvs_py_given(progress)) self->progress = Py_NewRef(progress);
  return self;
}

/* Log new notices. */
static int tell_notices(struct kvs_py_host_pool *self) {
  struct kvs_host_pool_info info;
  struct kvs_error ignored;
  char text[2048];
  if (kvs_host_pool_get_info(self->pool, &info, &ignored) != KVS_OK) return 0;
  kvs_host_pool_notices(self->pool, text, sizeof text);
  char *line = text + atomic_exchange(&self->told, strlen(text));
  for (char *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
    *end = '\0';
    if (kvs_py_say(info.refused ? "warning" : "info", "host pool: %s", line) < 0) return -1;
  }
  return 0;
}

PyObject *kvs_py_host_pool_opened(struct kvs_py_host_pool *self, PyObject *const *common, int rc,
                                  const struct kvs_error *err) {
  int wait = rc == KVS_OK ? read_flag(common[KVS_PY_HOST_WAIT], 1) : 0;
  if (rc != KVS_OK)
    kvs_py_raise(kvs_py_state_of((PyObject *)self), err);
  else if (wait == 0 ? tell_notices(self) == 0 : wait > 0 && kvs_py_host_pool_wait(self, -1) == 0) {
    PyObject_GC_Track(self);
    return (PyObject *)self;
  }
  Py_DECREF(self);
  return NULL;
}

/* -- open or closed ------------------------------------------------------------------------------------------------ */

static PyObject *raise_closed(PyObject *self) {
  struct kvs_error err = {0};
  kvs_fail(&err, KVS_CLOSED,
           atomic_load(&as_pool(self)->uses) == SHRINKING ? "another thread is shrinking the pool"
                                                          : "the pool is closed");
  return kvs_py_raise(kvs_py_state_of(self), &err);
}

int kvs_py_host_any_info(PyObject *self, struct kvs_host_pool_info *info) {
  struct kvs_error err = {0};
  if (kvs_host_pool_get_info(as_pool(self)->pool, info, &err) == KVS_OK) return 0;
  kvs_py_raise(kvs_py_state_of(self), &err);
  return -1;
}

int kvs_py_host_pool_info(PyObject *self, struct kvs_host_pool_info *info) {
  if (kvs_py_host_any_info(self, info) < 0) return -1;
  long uses = atomic_load(&as_pool(self)->uses);
  if (info->state != KVS_POOL_CLOSED && (uses >= 0 || uses == SHRINKING)) return 0;
  raise_closed(self);
  return -1;
}

/* -- waiting ------------------------------------------------------------------------------------------------------- */

static int call_progress(struct kvs_py_host_pool *self) {
  struct kvs_host_pool_info info;
  struct kvs_error ignored;
  PyObject *progress = self->progress;
  if (!progress || kvs_host_pool_get_info(self->pool, &info, &ignored) != KVS_OK) return 0;
  Py_INCREF(progress);
  PyObject *done = PyObject_CallFunction(progress, "KK", (unsigned long long)info.done_nbytes,
                                         (unsigned long long)info.total_nbytes);
  Py_DECREF(progress);
  Py_XDECREF(done);
  return done ? 0 : -1;
}

int kvs_py_host_pool_wait(struct kvs_py_host_pool *self, int64_t timeout_ns) {
  int64_t start = timeout_ns < 0 ? 0 : (int64_t)kvs_clock_ns();
  for (;;) {
    struct kvs_error err = {0};
    int64_t left = timeout_ns < 0 ? KVS_SLICE_NS : timeout_ns - ((int64_t)kvs_clock_ns() - start);
    int rc;
    KVS_PY_NO_GIL(rc = kvs_host_pool_wait(self->pool, left < 0 ? 0 : left < KVS_SLICE_NS ? left : KVS_SLICE_NS, &err));
    if (call_progress(self) < 0) return -1;
    if (rc == KVS_OK) return tell_notices(self);
    if (rc == KVS_TIMEOUT && timeout_ns >= 0 && left <= KVS_SLICE_NS)
      kvs_fail(&err, KVS_TIMEOUT, "the pool was not populated within %g s; it goes on", (double)timeout_ns * 1e-9);
    if (rc != KVS_TIMEOUT || (timeout_ns >= 0 && left <= KVS_SLICE_NS)) {
      kvs_py_raise(kvs_py_state_of((PyObject *)self), &err);
      return -1;
    }
    if (PyErr_CheckSignals() < 0) return -1;
  }
}

static PyObject *host_wait(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"timeout"};
  static const struct kvs_py_args spec = {"wait", names, 0, 1, 1};
  PyObject *value;
  int64_t timeout_ns;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, &value) < 0) return NULL;
  if (kvs_py_timeout(value, "timeout", &timeout_ns) < 0) return NULL;
  return kvs_py_host_pool_wait(as_pool(self), timeout_ns) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *host_ready(PyObject *self, PyObject *block) {
  struct kvs_error err = {0};
  uint64_t index;
  if (kvs_py_uint64(block, "block", -1, &index) < 0) return NULL;
  int rc = kvs_host_pool_ready(as_pool(self)->pool, index, &err);
  if (rc != KVS_OK && rc != KVS_NOT_READY) return kvs_py_raise(kvs_py_state_of(self), &err);
  return PyBool_FromLong(rc == KVS_OK);
}

static PyObject *host_cancel(PyObject *self, PyObject *unused) {
  struct kvs_host_pool_info info;
  (void)unused;
  if (kvs_py_host_any_info(self, &info) < 0) return NULL;
  kvs_host_pool_cancel(as_pool(self)->pool);
  Py_RETURN_NONE;
}

/* -- views --------------------------------------------------------------------------------------------------------- */

/* A view of all blocks' bytes if they are contiguous, else one row a layer. view->internal holds shape and strides. */
static int fill_view(PyObject *self, const struct kvs_host_pool_info *info, Py_buffer *view, int flags) {
  if (info->extent == info->nbytes)
    return PyBuffer_FillInfo(view, self, (void *)(uintptr_t)info->ptr, (Py_ssize_t)info->nbytes, 0, flags);
  const int contiguous = (PyBUF_C_CONTIGUOUS | PyBUF_F_CONTIGUOUS | PyBUF_ANY_CONTIGUOUS) & ~PyBUF_STRIDES;
  if ((flags & PyBUF_STRIDES) != PyBUF_STRIDES || (flags & contiguous) != 0) {
    PyErr_SetString(PyExc_BufferError, "the layers of this pool have room to grow between them: take layer(i)");
    return -1;
  }
  Py_ssize_t *shape = PyMem_Calloc(4, sizeof *shape);
  if (!shape) {
    PyErr_NoMemory();
    return -1;
  }
  shape[0] = (Py_ssize_t)info->layers;
  shape[1] = (Py_ssize_t)(info->num_blocks * info->layer_nbytes);
  shape[2] = (Py_ssize_t)info->layer_pitch;
  shape[3] = 1;
  *view = (Py_buffer){.buf = (void *)(uintptr_t)info->ptr,
                      .obj = Py_NewRef(self),
                      .len = (Py_ssize_t)info->nbytes,
                      .itemsize = 1,
                      .ndim = 2,
                      .format = (flags & PyBUF_FORMAT) ? (char *)(uintptr_t)"B" : NULL,
                      .shape = shape,
                      .strides = shape + 2,
                      .internal = shape};
  return 0;
}

static int host_getbuffer(PyObject *self, Py_buffer *view, int flags) {
  atomic_long *uses = &as_pool(self)->uses;
  struct kvs_host_pool_info info;
  view->obj = NULL;
  long seen = atomic_load(uses);
  do {
    if (seen < 0) {
      PyErr_SetString(PyExc_BufferError, seen == SHRINKING ? "the pool is being shrunk" : "the pool is closed");
      return -1;
    }
  } while (!atomic_compare_exchange_weak(uses, &seen, seen + 1));
  if (kvs_py_host_pool_info(self, &info) == 0 && fill_view(self, &info, view, flags) == 0) return 0;
  atomic_fetch_sub(uses, 1);
  return -1;
}

static void host_releasebuffer(PyObject *self, Py_buffer *view) {
  PyMem_Free(view->internal);
  atomic_fetch_sub(&as_pool(self)->uses, 1);
}

static PyObject *layer_view(PyObject *self, PyObject *index) {
  struct kvs_host_pool_info info;
  uint64_t layer;
  PyObject *memory = PyMemoryView_FromObject(self); /* counted in `uses`: the pool stays open while the array lives */
  if (!memory || kvs_py_host_pool_info(self, &info) < 0 || kvs_py_uint64(index, "layer", -1, &layer) < 0) {
    Py_XDECREF(memory);
    return NULL;
  }
  if (layer >= info.layers) {
    PyErr_Format(PyExc_IndexError, "layer is %llu; the pool has %llu layers, 0 to %llu", (unsigned long long)layer,
                 (unsigned long long)info.layers, (unsigned long long)info.layers - 1);
    Py_DECREF(memory);
    return NULL;
  }
  return kvs_py_rows_view(memory, info.ptr + layer * info.layer_pitch, info.num_blocks, info.layer_nbytes, info.stride);
}

static PyObject *host_layer(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"layer"};
  static const struct kvs_py_args spec = {"layer", names, 1, 1, 1};
  PyObject *index;
  return kvs_py_args_parse(&spec, args, nargs, kwnames, &index) < 0 ? NULL : layer_view(self, index);
}

/* (num_blocks, *shape) */
static PyObject *whole_shape(PyObject *tensor, PyObject *shape) {
  PyObject *own = PyObject_GetAttrString(tensor, "shape");
  PyObject *first = own ? PySequence_GetSlice(own, 0, 1) : NULL;
  PyObject *head = first ? PySequence_Tuple(first) : NULL;
  PyObject *rest = head ? PySequence_Tuple(shape) : NULL;
  PyObject *whole = rest ? PySequence_Concat(head, rest) : NULL;
  Py_XDECREF(own);
  Py_XDECREF(first);
  Py_XDECREF(head);
  Py_XDECREF(rest);
  return whole;
}

static PyObject *host_torch(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"layer", "dtype", "shape"};
  static const struct kvs_py_args spec = {"torch", names, 1, 3, 3};
  PyObject *values[3];
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  PyObject *torch = PyImport_ImportModule("torch");
  PyObject *array = torch ? layer_view(self, values[0]) : NULL;
  PyObject *tensor = array ? PyObject_CallMethod(torch, "from_numpy", "O", array) : NULL;
  Py_XDECREF(torch);
  Py_XDECREF(array);
  if (tensor && kvs_py_given(values[1])) {
    PyObject *typed = PyObject_CallMethod(tensor, "view", "O", values[1]);
    Py_SETREF(tensor, typed);
  }
  if (tensor && kvs_py_given(values[2])) {
    PyObject *shape = whole_shape(tensor, values[2]);
    PyObject *shaped = shape ? PyObject_CallMethod(tensor, "view", "(O)", shape) : NULL;
    Py_XDECREF(shape);
    Py_SETREF(tensor, shaped);
  }
  return tensor;
}

static PyObject *host_layer_ptrs(PyObject *self, PyObject *unused) {
  struct kvs_host_pool_info info;
  uint64_t *data;
  (void)unused;
  if (kvs_py_host_pool_info(self, &info) < 0) return NULL;
  PyObject *array = kvs_py_uint64_array(info.layers, &data);
  for (uint64_t i = 0; array && i < info.layers; i++) data[i] = info.ptr + i * info.layer_pitch;
  return array;
}

static PyObject *host_pool(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"name", "device", "coding"};
  static const struct kvs_py_args spec = {"pool", names, 0, 0, 3};
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_host_pool_info info;
  PyObject *values[3];
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0 || kvs_py_host_pool_info(self, &info) < 0) return NULL;
  struct kvs_engine *engine = kvs_host_pool_engine(as_pool(self)->pool);
  if (kvs_py_given(values[1]))
    engine = kvs_py_engine_from(state, values[1]);
  else
    kvs_engine_ref(engine);
  /* A device's attributes are Python, which may have shrunk the pool. With the view it keeps its size. */
  PyObject *view = engine ? PyMemoryView_FromObject(self) : NULL;
  if (!view || kvs_py_host_any_info(self, &info) < 0) {
    if (engine) kvs_engine_unref(engine);
    Py_XDECREF(view);
    return NULL;
  }
  struct kvs_pool_layout layout = {.ptr = info.ptr,
                                   .num_blocks = info.num_blocks,
                                   .block_nbytes = info.slot_nbytes,
                                   .stride = info.stride,
                                   .rows = info.layer_first ? info.layers : 1,
                                   .pitch = info.layer_first ? info.layer_pitch : 0};
  return kvs_py_pool_over(state, engine, &layout, values[0], values[2], view);
}

/* -- the end ------------------------------------------------------------------------------------------------------- */

static int drain_slice(void *pool, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_host_pool_drain(pool, timeout_ns, err);
}

/* Unregistering waits for the device. Wait here first, so that the core's wait returns at once. A device that cannot be
 * waited for (a lost one) runs no copies: ignore its error. */
static int wait_for_device(struct kvs_py_state *state, struct kvs_engine *engine, int64_t timeout_ns) {
  struct kvs_error err = {0};
  int rc;
  KVS_PY_WAITING(state, rc = kvs_engine_synchronize(engine, timeout_ns, &err));
  return kvs_py_waited(state, rc == KVS_TIMEOUT ? rc : KVS_OK, &err, timeout_ns, "the device's work");
}

/* Wait for transfers and for the device; ended transfers drop the pool's views. */
int kvs_py_host_pool_drain(PyObject *self, int64_t timeout_ns) {
  struct kvs_py_state *state = kvs_py_state_of(self);
  struct kvs_host_pool *pool = as_pool(self)->pool;
  int64_t start = (int64_t)kvs_clock_ns();
  if (kvs_py_wait(state, drain_slice, pool, timeout_ns, "the transfers that use the pool") < 0) return -1;
  int64_t left = timeout_ns - ((int64_t)kvs_clock_ns() - start);
  if (wait_for_device(state, kvs_host_pool_engine(pool), timeout_ns < 0 ? -1 : left < 0 ? 0 : left) < 0) return -1;
  left = timeout_ns - ((int64_t)kvs_clock_ns() - start);
  return kvs_py_wait_collected(state, kvs_host_pool_engine(pool), timeout_ns < 0 ? -1 : left < 0 ? 0 : left);
}

/* Refuse new exports: set `uses` from 0 to `wanted`. */
int kvs_py_host_pool_take(PyObject *self, long wanted) {
  long none = 0;
  if (atomic_compare_exchange_strong(&as_pool(self)->uses, &none, wanted)) return 0;
  if (none < 0) return raise_closed(self), -1;
  PyErr_Format(PyExc_BufferError, "%ld view%s of the pool %s in use (arrays, tensors, kvswap.Pool): drop them first",
               none, none == 1 ? "" : "s", none == 1 ? "is" : "are");
  return -1;
}

/* Once, and only where there are views. */
static bool force(PyObject *self) {
  long uses = atomic_load(&as_pool(self)->uses);
  while (uses > 0 && !atomic_compare_exchange_weak(&as_pool(self)->uses, &uses, uses + FORCED)) continue;
  return uses > 0;
}

struct closing {
  struct kvs_host_pool *pool;
  bool forced;
};

static int close_slice(void *arg, int64_t timeout_ns, struct kvs_error *err) {
  const struct closing *closing = arg;
  return kvs_host_pool_close(closing->pool, timeout_ns, closing->forced, err);
}

static int close_core(PyObject *self, int64_t timeout_ns, bool forced) {
  struct closing closing = {as_pool(self)->pool, forced};
  struct kvs_host_pool_info info;
  struct kvs_error ignored;
  if (kvs_py_wait(kvs_py_state_of(self), close_slice, &closing, timeout_ns, "what uses the pool") == 0) return 0;
  bool open = kvs_host_pool_get_info(closing.pool, &info, &ignored) == KVS_OK && info.state != KVS_POOL_CLOSED &&
              !PyErr_ExceptionMatches(kvs_py_state_of(self)->error);
  if (open) atomic_fetch_sub(&as_pool(self)->uses, forced ? FORCED : CLOSED);
  return -1;
}

static int close_pool(PyObject *self, int64_t timeout_ns, bool forced) {
  struct kvs_host_pool_info info;
  int64_t start = (int64_t)kvs_clock_ns();
  if (kvs_py_host_any_info(self, &info) < 0) return -1;
  long uses = atomic_load(&as_pool(self)->uses);
  if (info.state == KVS_POOL_CLOSED || (uses < 0 && uses != SHRINKING)) return 0;
  if (kvs_py_host_pool_drain(self, timeout_ns) < 0) return -1;
  int64_t left = timeout_ns - ((int64_t)kvs_clock_ns() - start);
  if (timeout_ns >= 0 && left < SECOND_NS) left = SECOND_NS; /* the waits above leave little to wait for */
  if (timeout_ns < 0) left = -1;
  if (forced && force(self)) return close_core(self, left, true);
  return kvs_py_host_pool_take(self, CLOSED) < 0 ? -1 : close_core(self, left, false);
}

static PyObject *host_close(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
  static const char *const names[] = {"timeout", "force"};
  static const struct kvs_py_args spec = {"close", names, 0, 1, 2};
  PyObject *values[2];
  int64_t timeout_ns = CLOSE_SECONDS * SECOND_NS;
  if (kvs_py_args_parse(&spec, args, nargs, kwnames, values) < 0) return NULL;
  if (values[0] && kvs_py_timeout(values[0], "timeout", &timeout_ns) < 0) return NULL;
  int force = read_flag(values[1], 0);
  if (force < 0 || close_pool(self, timeout_ns, force == 1) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *host_enter(PyObject *self, PyObject *unused) {
  (void)unused;
  return Py_NewRef(self);
}

static PyObject *host_exit(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  if (close_pool(self, CLOSE_SECONDS * SECOND_NS, false) < 0) {
    /* A traceback may hold views. BufferError must not hide the original error; the pool is freed with the views. */
    if (nargs < 1 || args[0] == Py_None || !PyErr_ExceptionMatches(PyExc_BufferError)) return NULL;
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

static int host_traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_pool(self)->progress);
  return 0;
}

static int host_clear(PyObject *self) {
  Py_CLEAR(as_pool(self)->progress);
  return 0;
}

static void host_dealloc(PyObject *self) {
  struct kvs_host_pool *pool = as_pool(self)->pool;
  PyObject *progress = as_pool(self)->progress;
  PyObject_GC_UnTrack(self);
  kvs_py_object_free(self);
  if (pool) kvs_host_pool_free_later(pool);
  Py_XDECREF(progress);
}

/* -- attributes ---------------------------------------------------------------------------------------------------- */

enum { NUM_BLOCKS, SLOT_NBYTES, NBYTES, MAPPED, LAYER_COUNT, LAYER_NBYTES, LAYER_STRIDE, PTR, CHUNKS };

static PyObject *host_number(PyObject *self, void *field) {
  struct kvs_host_pool_info info;
  uintptr_t which = (uintptr_t)field;
  if ((which == PTR ? kvs_py_host_pool_info(self, &info) : kvs_py_host_any_info(self, &info)) < 0) return NULL;
  const uint64_t numbers[] = {[NUM_BLOCKS] = info.num_blocks,
                              [SLOT_NBYTES] = info.slot_nbytes,
                              [NBYTES] = info.nbytes,
                              [MAPPED] = info.mapped_nbytes,
                              [LAYER_COUNT] = info.layers,
                              [LAYER_STRIDE] = info.stride,
                              [LAYER_NBYTES] = info.layer_nbytes,
                              [PTR] = info.ptr,
                              [CHUNKS] = info.chunks};
  return PyLong_FromUnsignedLongLong(numbers[which]);
}

static PyObject *host_layout(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  (void)unused;
  return kvs_py_host_any_info(self, &info) < 0 ? NULL
                                               : PyUnicode_FromString(info.layer_first ? "layer-first" : "block-first");
}

static PyObject *host_pages(PyObject *self, void *unused) {
  static const char *const names[] = {[KVS_PAGES_DEFAULT] = "default",
                                      [KVS_PAGES_TRANSPARENT] = "transparent",
                                      [KVS_PAGES_2MIB] = "2MiB",
                                      [KVS_PAGES_1GIB] = "1GiB"};
  struct kvs_host_pool_info info;
  (void)unused;
  return kvs_py_host_any_info(self, &info) < 0 ? NULL : PyUnicode_FromString(names[info.pages]);
}

const char *const kvs_py_host_state_names[] = {[KVS_POOL_POPULATING] = "populating",
                                               [KVS_POOL_READY] = "ready",
                                               [KVS_POOL_FAILED] = "failed",
                                               [KVS_POOL_CANCELLED] = "cancelled",
                                               [KVS_POOL_CLOSED] = "closed"};

static PyObject *host_state(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  (void)unused;
  return kvs_py_host_any_info(self, &info) < 0 ? NULL : PyUnicode_FromString(kvs_py_host_state_names[info.state]);
}

static PyObject *host_pinned(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  (void)unused;
  return kvs_py_host_any_info(self, &info) < 0 ? NULL : PyBool_FromLong(info.pinned && info.state != KVS_POOL_CLOSED);
}

static PyObject *host_numa_node(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  (void)unused;
  if (kvs_py_host_any_info(self, &info) < 0) return NULL;
  if (info.node == -2) return PyUnicode_FromString("interleave");
  return info.node < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(info.node);
}

static PyObject *host_device(PyObject *self, void *unused) {
  (void)unused;
  return kvs_py_device_like(kvs_py_state_of(self), kvs_host_pool_engine(((struct kvs_py_host_pool *)self)->pool));
}

static PyObject *host_notices(PyObject *self, void *unused) {
  struct kvs_host_pool_info info;
  char text[2048];
  (void)unused;
  if (kvs_py_host_any_info(self, &info) < 0) return NULL;
  kvs_host_pool_notices(((struct kvs_py_host_pool *)self)->pool, text, sizeof text);
  PyObject *whole = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
  PyObject *lines = whole ? PyUnicode_Splitlines(whole, 0) : NULL;
  PyObject *tuple = lines ? PyList_AsTuple(lines) : NULL;
  Py_XDECREF(whole);
  Py_XDECREF(lines);
  return tuple;
}

static PyGetSetDef getset[] = {
    {"ptr", host_number, NULL, "int: address of the first block. kvswap.Error if the pool is closed.", (void *)PTR},
    {"nbytes", host_number, NULL, "int: bytes of all blocks, num_blocks * slot_nbytes.", (void *)NBYTES},
    {"mapped_nbytes", host_number, NULL, "int: bytes of memory used: nbytes, rounded up to pages.", (void *)MAPPED},
    {"num_blocks", host_number, NULL, "int: blocks 0 to num_blocks - 1.", (void *)NUM_BLOCKS},
    {"slot_nbytes", host_number, NULL, "int: bytes of a slot: one block, of all layers.", (void *)SLOT_NBYTES},
    {"layers", host_number, NULL, "int: layers of a block.", (void *)LAYER_COUNT},
    {"layer_nbytes", host_number, NULL, "int: bytes of a block in one layer.", (void *)LAYER_NBYTES},
    {"layer_stride", host_number, NULL, "int: bytes from block to block within a layer: cpu_stride of the swap calls.",
     (void *)LAYER_STRIDE},
    {"chunks", host_number, NULL, "int: number of registrations with the driver.", (void *)CHUNKS},
    {"layout", host_layout, NULL, "str: 'block-first' or 'layer-first'.", NULL},
    {"pages", host_pages, NULL, "str: kind of pages: 'default', 'transparent', '2MiB', '1GiB'.", NULL},
    {"state", host_state, NULL, "str: 'populating', 'ready', 'failed', 'cancelled' or 'closed'.", NULL},
    {"pinned", host_pinned, NULL, "bool: the whole pool is registered with the device.", NULL},
    {"numa_node", host_numa_node, NULL, "int, 'interleave' or None: requested NUMA node of the pages.", NULL},
    {"device", host_device, NULL, "Device: the pool is registered with it.", NULL},
    {"notices", host_notices, NULL, "tuple of str: what differs from the request; logged too.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* -- docs and slots ------------------------------------------------------------------------------------------------ */

PyDoc_STRVAR(any_doc, "What HostPool and SharedPool have in common.");
PyDoc_STRVAR(wait_doc,
             "wait($self, /, timeout=None)\n--\n\n"
             "Wait until all blocks are ready; calls progress= meanwhile, in this thread.\n\n"
             "timeout: seconds; after TimeoutError populating goes on. MemoryError: memory is short. kvswap.Error: it\n"
             "was cancelled. Any thread may wait.");
PyDoc_STRVAR(ready_doc, "ready($self, block, /)\n--\n\n"
                        "Whether that block can be used: populated and, with register=True, registered. "
                        "Never blocks.");
PyDoc_STRVAR(cancel_doc, "cancel($self, /)\n--\n\n"
                         "Stop populating. Ready blocks stay ready; close() frees all memory.");
PyDoc_STRVAR(
    layer_doc,
    "layer($self, /, layer)\n--\n\n"
    "One layer as a NumPy array of uint8, shape (num_blocks, layer_nbytes): a view, with gaps between its rows if\n"
    "the layout is block-first. While the array lives the pool can neither close nor shrink.");
PyDoc_STRVAR(torch_doc,
             "torch($self, /, layer, dtype=None, shape=None)\n--\n\n"
             "One layer as a torch tensor on the CPU: layer(i) as dtype (None: uint8) and shape (num_blocks, *shape).\n"
             "While the tensor lives the pool can neither close nor shrink.");
PyDoc_STRVAR(
    layer_ptrs_doc,
    "layer_ptrs($self, /)\n--\n\n"
    "Address of each layer's part of block 0, NumPy uint64: cpu_ptrs of the swap calls, with cpu_stride=layer_stride.");
PyDoc_STRVAR(
    pool_doc,
    "pool($self, /, *, name=None, device=None, coding=None)\n--\n\n"
    "A kvswap.Pool of the blocks, for move_blocks(), on this pool's device or another one. While the kvswap.Pool "
    "lives\n"
    "this pool can neither close nor shrink. At most one on a device, since pools must not share bytes. coding: as "
    "for\n"
    "kvswap.Pool: the blocks of this pool are coded, and have coding.coded_nbytes bytes.");
PyDoc_STRVAR(
    close_doc,
    "close($self, /, timeout=60, *, force=False)\n--\n\n"
    "Free the memory, after waiting for the transfers that may use it. A second call does nothing.\n\n"
    "timeout: seconds to wait, None: no limit; after TimeoutError the pool is unchanged.\n"
    "force: close although views are alive, which otherwise is a BufferError. The views then read zeros, and their\n"
    "  addresses are not reused before the views are gone.\n"
    "kvswap.Error in the child of a fork.");
PyDoc_STRVAR(enter_doc, "__enter__($self, /)\n--\n\nThe pool itself.");
PyDoc_STRVAR(exit_doc, "__exit__($self, /, *error)\n--\n\nclose(). If the block raised, live views cause no "
                       "BufferError: the pool is freed with the last of them.");

static PyMethodDef methods[] = {
    {"wait", KVS_PY_FASTCALL(host_wait), METH_FASTCALL | METH_KEYWORDS, wait_doc},
    {"ready", host_ready, METH_O, ready_doc},
    {"cancel", host_cancel, METH_NOARGS, cancel_doc},
    {"layer", KVS_PY_FASTCALL(host_layer), METH_FASTCALL | METH_KEYWORDS, layer_doc},
    {"torch", KVS_PY_FASTCALL(host_torch), METH_FASTCALL | METH_KEYWORDS, torch_doc},
    {"layer_ptrs", host_layer_ptrs, METH_NOARGS, layer_ptrs_doc},
    {"pool", KVS_PY_FASTCALL(host_pool), METH_FASTCALL | METH_KEYWORDS, pool_doc},
    {"close", KVS_PY_FASTCALL(host_close), METH_FASTCALL | METH_KEYWORDS, close_doc},
    {"__enter__", host_enter, METH_NOARGS, enter_doc},
    {"__exit__", KVS_PY_FASTCALL(host_exit), METH_FASTCALL, exit_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)any_doc},
    {Py_tp_dealloc, host_dealloc},
    {Py_tp_traverse, host_traverse},
    {Py_tp_clear, host_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_bf_getbuffer, host_getbuffer},
    {Py_bf_releasebuffer, host_releasebuffer},
    {0, NULL},
};

PyType_Spec kvs_py_any_host_pool_spec = {
    .name = "kvswap._C._AnyHostPool",
    .basicsize = sizeof(struct kvs_py_host_pool),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
