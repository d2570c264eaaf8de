/* DLPack. The capsule is not consumed: it is kept alive until the transfer ends, and its own destructor then calls the
 * producer's deleter. The structures below are DLPack's public ABI, versions 0 and 1. */
#include "py/dlpack.h"
#include "py/args.h"
#include "py/objects.h"

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };
enum { DL_FLAG_READ_ONLY = 1, DL_FLAG_IS_COPIED = 2 };

struct dl_tensor {
  void *data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape;
  int64_t *strides; /* elements; NULL: contiguous */
  uint64_t byte_offset;
};

/* The beginning of DLPack's C exchange table of a type (DLPack 1.2). */
struct dl_exchange {
  struct {
    uint32_t major, minor;
  } version;
  const struct dl_exchange *older;
  void *allocate, *export, *import;
  int (*read)(void *object, struct dl_tensor *tensor); /* gives no ownership; NULL: not offered */
};

struct dl_managed {
  struct dl_tensor tensor;
  void *context;
  void (*deleter)(struct dl_managed *);
};

struct dl_versioned {
  struct {
    uint32_t major, minor;
  } version;
  void *context;
  void (*deleter)(struct dl_versioned *);
  uint64_t flags;
  struct dl_tensor tensor;
};

static bool known_device(long type) {
  return type == DL_CPU || type == DL_CUDA || type == DL_CUDA_HOST || type == DL_CUDA_MANAGED;
}

/* 1 with the device type; 0 if the object does not give one, or one that kvswap does not read. */
static int device_type(struct kvs_py_state *state, PyObject *object, long *type) {
  PyObject *method, *first = NULL;
  int has = kvs_py_attribute(object, state->s_dlpack_device, &method);
  if (has <= 0) return has;
  PyObject *pair = PyObject_CallNoArgs(method);
  Py_DECREF(method);
  if (!pair) return -1;
  if (PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2) first = PyNumber_Index(PyTuple_GET_ITEM(pair, 0));
  Py_DECREF(pair);
  if (!first) return PyErr_Occurred() ? -1 : 0;
  *type = PyLong_AsLong(first);
  Py_DECREF(first);
  if (*type == -1 && PyErr_Occurred()) return -1;
  return known_device(*type) ? 1 : 0;
}

/* Call object.__dlpack__(). For GPU memory `stream` is passed on; -1 asks the producer not to synchronise, because
 * stream= and after= give the order. Producers of DLPack 0 do not accept max_version. */
static PyObject *call_dlpack(struct kvs_py_state *state, PyObject *method, long type, int64_t stream) {
  bool gpu = type == DL_CUDA || type == DL_CUDA_MANAGED;
  PyObject *names =
      gpu ? PyTuple_Pack(2, state->s_max_version, state->s_stream) : PyTuple_Pack(1, state->s_max_version);
  PyObject *none = PyLong_FromLongLong(stream);
  PyObject *capsule = NULL;
  PyObject *values[2] = {state->dlpack_version, none};
  if (names && none) {
    capsule = PyObject_Vectorcall(method, values, 0, names);
    if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
      PyErr_Clear();
      Py_SETREF(names, gpu ? PyTuple_Pack(1, state->s_stream) : NULL);
      if (!PyErr_Occurred()) capsule = PyObject_Vectorcall(method, &none, 0, names);
    }
  }
  Py_XDECREF(names);
  Py_XDECREF(none);
  return capsule;
}

static bool contiguous(const struct dl_tensor *tensor) {
  if (!tensor->strides) return true;
  int64_t expected = 1;
  for (int32_t d = tensor->ndim - 1; d >= 0; --d) {
    if (tensor->shape[d] == 0) return true;
    if (tensor->shape[d] != 1 && tensor->strides[d] != expected) return false;
    expected *= tensor->shape[d];
  }
  return true;
}

static uint64_t size_of(const struct dl_tensor *tensor) {
  uint64_t nbits = (uint64_t)tensor->dtype.bits * tensor->dtype.lanes;
  for (int32_t d = 0; d < tensor->ndim; d++)
    if (tensor->shape[d] < 0 || __builtin_mul_overflow(nbits, (uint64_t)tensor->shape[d], &nbits)) return UINT64_MAX;
  return nbits / 8 + (nbits % 8 != 0);
}

/* NULL: of no version that is read here. */
static const struct dl_tensor *tensor_of(PyObject *capsule, uint64_t *flags) {
  *flags = 0;
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    const struct dl_versioned *versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    *flags = versioned->flags;
    return versioned->version.major == 1 ? &versioned->tensor : NULL;
  }
  if (!PyCapsule_IsValid(capsule, "dltensor")) return NULL;
  const struct dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
  return &managed->tensor;
}

static int read_capsule(PyObject *object, PyObject *capsule, const char *name, Py_ssize_t index,
                        struct kvs_py_address *address) {
  uint64_t flags;
  const struct dl_tensor *tensor = tensor_of(capsule, &flags);
  if (!tensor || !known_device(tensor->device.type)) return 0;
  if ((flags & DL_FLAG_IS_COPIED) != 0)
    return kvs_py_complain(PyExc_ValueError, name, index,
                           "was copied by its __dlpack__(): its own memory is not reachable");
  if (!contiguous(tensor)) return kvs_py_not_contiguous(object, name, index);
  *address = (struct kvs_py_address){(uint64_t)(uintptr_t)tensor->data + tensor->byte_offset, size_of(tensor),
                                     (flags & DL_FLAG_READ_ONLY) != 0};
  return 1;
}

/* The producer refused (a read-only array in the old protocol, an element type that DLPack lacks): another protocol may
 * work. */
static int refused(void) {
  static PyObject **const passing[] = {&PyExc_BufferError, &PyExc_TypeError, &PyExc_ValueError, &PyExc_RuntimeError,
                                       &PyExc_AttributeError};
  for (size_t i = 0; i < sizeof passing / sizeof *passing; i++) {
    if (!PyErr_ExceptionMatches(*passing[i])) continue;
    PyErr_Clear();
    return 0;
  }
  return -1;
}

int kvs_py_dlpack(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index, PyObject **capsule,
                  struct kvs_py_address *address) {
  PyObject *method;
  long type = DL_CPU;
  int has = PyType_Check(object) ? 0 : kvs_py_attribute(object, state->s_dlpack, &method);
  if (has <= 0) return has;
  has = device_type(state, object, &type);
  PyObject *made = has == 1 ? call_dlpack(state, method, type, -1) : NULL;
  Py_DECREF(method);
  if (!made) return PyErr_Occurred() ? refused() : 0;
  has = read_capsule(object, made, name, index, address);
  if (has == 1)
    *capsule = made;
  else
    Py_DECREF(made);
  return has;
}

/* -- ids on the device --------------------------------------------------------------------------------------------- */

int kvs_py_dlpack_device(struct kvs_py_state *state, PyObject *object) {
  long type = DL_CPU;
  int has = PyType_Check(object) ? 0 : device_type(state, object, &type);
  if (has <= 0) return has;
  return type == DL_CUDA || type == DL_CUDA_MANAGED ? 2 : 1;
}

int kvs_py_dlpack_ids(struct kvs_py_state *state, PyObject *object, const char *name, uint64_t stream,
                      PyObject **capsule, struct kvs_py_strided *ids) {
  static const char kinds[] = {'i', 'u', 'f', '?', 'f', 'c', 'b'}; /* by DLPack's code */
  PyObject *method;
  uint64_t flags;
  int has = kvs_py_attribute(object, state->s_dlpack, &method);
  if (has <= 0) return has;
  *capsule = call_dlpack(state, method, DL_CUDA, (int64_t)(stream == 0 ? KVS_STREAM_LEGACY : stream));
  Py_DECREF(method);
  if (!*capsule) return -1;
  const struct dl_tensor *tensor = tensor_of(*capsule, &flags);
  if (!tensor || (flags & DL_FLAG_IS_COPIED) != 0) {
    Py_CLEAR(*capsule);
    return kvs_py_complain(PyExc_TypeError, name, -1, "was not given by its __dlpack__() as the memory that it is");
  }
  uint64_t width = (uint64_t)tensor->dtype.bits * tensor->dtype.lanes / 8;
  *ids = (struct kvs_py_strided){.ptr = (uint64_t)(uintptr_t)tensor->data + tensor->byte_offset,
                                 .ndim = tensor->ndim,
                                 .kind = tensor->dtype.code < sizeof kinds ? kinds[tensor->dtype.code] : '?',
                                 .width = (unsigned)width};
  if (tensor->ndim != 1 && tensor->ndim != 2) return 1;
  int64_t tokens = tensor->ndim == 2 ? tensor->shape[1] : 1;
  const int64_t contiguous[2] = {tokens, 1}, *strides = tensor->strides ? tensor->strides : contiguous;
  ids->count = (size_t)tensor->shape[0];
  ids->tokens = (size_t)tokens;
  if (__builtin_mul_overflow(strides[0], (int64_t)width, &ids->stride)) ids->stride = INT64_MAX;
  if (__builtin_mul_overflow(tensor->ndim == 2 ? strides[1] : 1, (int64_t)width, &ids->step)) ids->step = INT64_MAX;
  return 1;
}

/* -- in C ---------------------------------------------------------------------------------------------------------- */

/* An attribute of a type, or NULL without an exception. */
static PyObject *type_attribute(PyTypeObject *type, PyObject *name) {
  PyObject *value = type ? PyObject_GetAttr((PyObject *)type, name) : NULL;
  if (!value) PyErr_Clear();
  return value;
}

/* The exchange table of a type that defines the table and data_ptr() itself. A subclass may override data_ptr(), so
 * that an inherited table is not used. */
static const struct dl_exchange *find_exchange(struct kvs_py_state *state, PyTypeObject *type) {
  PyObject *capsule = type_attribute(type, state->s_exchange);
  if (!capsule) return NULL;
  PyObject *inherited = type_attribute(type->tp_base, state->s_exchange);
  PyObject *data_ptr = type_attribute(type, state->s_data_ptr);
  const struct dl_exchange *table = NULL;
  if (inherited != capsule && data_ptr && PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
    table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  while (table && table->version.major > 1) table = table->older;
  Py_XDECREF(data_ptr);
  Py_XDECREF(inherited);
  Py_DECREF(capsule); /* the table lives as long as the process */
  return table && table->version.major == 1 && table->read ? table : NULL;
}

int kvs_py_exchange_read(struct kvs_py_state *state, struct kvs_py_exchange *exchange, PyObject *object,
                         struct kvs_py_address *address) {
  struct dl_tensor tensor = {0};
  if (Py_TYPE(object) != exchange->type) {
    exchange->type = Py_TYPE(object);
    exchange->table = find_exchange(state, exchange->type);
  }
  if (!exchange->table) return 0;
  if (exchange->table->read(object, &tensor) != 0) {
    PyErr_Clear(); /* the call of data_ptr() raises the error */
    return 0;
  }
  if (!tensor.data || !known_device(tensor.device.type) || !contiguous(&tensor)) return 0;
  *address = (struct kvs_py_address){(uint64_t)(uintptr_t)tensor.data + tensor.byte_offset, size_of(&tensor),
                                     .readonly = false};
  return 1;
}
