/* The address of a tensor, by the first that applies: an int, a NumPy array, data_ptr(), DLPack, the array interfaces,
 * the buffer protocol, __index__. Integer types come first: a NumPy integer has an array interface too, with the
 * address of the number itself. __index__ comes last: every torch tensor has one. */
#include "py/address.h"
#include "py/args.h"
#include "py/objects.h"

#include <string.h>

int kvs_py_hold(PyObject **hold, PyObject *object) {
  if (!hold) return 0;
  if (!*hold && !(*hold = PyList_New(0))) return -1;
  return PyList_Append(*hold, object);
}

/* Without a stride blocks are contiguous, so that a tensor of another size is a mistake. Often block_nbytes was given
 * in elements. */
int kvs_py_check_size(const char *name, Py_ssize_t index, uint64_t limit, uint64_t blocks, uint64_t nbytes) {
  uint64_t needed;
  if (__builtin_mul_overflow(blocks, nbytes, &needed)) needed = UINT64_MAX;
  if (needed == limit) return 0;
  char hint[192] = "name a stride if other bytes lie between or behind them";
  uint64_t block = blocks != 0 && limit % blocks == 0 ? limit / blocks : 0;
  if (block > nbytes && block % nbytes == 0 && block / nbytes <= 16)
    snprintf(hint, sizeof hint,
             "a block of the tensor has %llu bytes: is block_nbytes in elements, or the number of blocks not %llu?",
             (unsigned long long)block, (unsigned long long)(limit / nbytes));
  else if (block != 0 && block < nbytes && limit % nbytes == 0)
    snprintf(hint, sizeof hint, "it has room for %llu of them, or for %llu of %llu bytes",
             (unsigned long long)(limit / nbytes), (unsigned long long)blocks, (unsigned long long)block);
  else if (block != 0)
    snprintf(hint, sizeof hint, "a block of the tensor has %llu bytes%s", (unsigned long long)block,
             limit < needed ? "" : "; name a stride if the other bytes are not the block's");
  else if (limit < needed)
    snprintf(hint, sizeof hint, "it has room for %llu of them", (unsigned long long)(limit / nbytes));
  return kvs_py_complain(PyExc_ValueError, name, index,
                         "is a tensor of %llu bytes, but %llu blocks of %llu bytes without a stride need %llu: %s",
                         (unsigned long long)limit, (unsigned long long)blocks, (unsigned long long)nbytes,
                         (unsigned long long)needed, hint);
}

/* -- data_ptr() ---------------------------------------------------------------------------------------------------- */

/* A tensor without memory: on the meta device, or fake. Always -1. */
static int no_memory(PyObject *object, const char *name, Py_ssize_t index) {
  PyObject *device = PyObject_GetAttrString(object, "device");
  if (!device) PyErr_Clear();
  kvs_py_complain(PyExc_ValueError, name, index,
                  "is a tensor without memory (%s on device %S, address 0): allocate it on a real device first",
                  Py_TYPE(object)->tp_name, device ? device : Py_None);
  Py_XDECREF(device);
  return -1;
}

/* data_ptr() raised: a sparse tensor, say. The message keeps the reason. Always -1. */
static int no_address(PyObject *object, const char *name, Py_ssize_t index) {
  PyObject *type, *value, *traceback;
  if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1;
  PyErr_Fetch(&type, &value, &traceback);
  kvs_py_complain(PyExc_ValueError, name, index, "is a %s without one address (%S): must be a dense tensor",
                  Py_TYPE(object)->tp_name, value ? value : Py_None);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return -1;
}

/* Call object.method() without creating a bound method, which halves the time. 1, or 0 if there is no such method or it
 * raised AttributeError or TypeError: the caller's slow way then raises. */
static int call_method(PyObject *object, PyObject *method, PyObject **value) {
  PyObject *const arguments[] = {object};
  *value = PyObject_VectorcallMethod(method, arguments, 1, NULL);
  if (*value) return 1;
  if (!PyErr_ExceptionMatches(PyExc_AttributeError) && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
  PyErr_Clear();
  return 0;
}

/* object.name() or object.name as a number: 1, or 0 if there is no such attribute. */
static int number_of(PyObject *object, PyObject *attribute, const char *name, Py_ssize_t index, uint64_t *number) {
  PyObject *value;
  int has = kvs_py_attribute(object, attribute, &value);
  if (has <= 0) return has;
  if (!PyLong_CheckExact(value) && PyCallable_Check(value)) {
    PyObject *called = PyObject_CallNoArgs(value);
    Py_DECREF(value);
    if (!called) return -1;
    value = called;
  }
  int rc = kvs_py_uint64(value, name, index, number);
  Py_DECREF(value);
  return rc < 0 ? -1 : 1;
}

/* Bytes of a tensor that has data_ptr(): nbytes, else numel() * element_size(), else unknown. */
static int size_of_tensor(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index,
                          uint64_t *nbytes) {
  uint64_t count, width;
  int has = number_of(object, state->s_nbytes, name, index, nbytes);
  if (has != 0) return has < 0 ? -1 : 0;
  *nbytes = UINT64_MAX;
  has = number_of(object, state->s_numel, name, index, &count);
  if (has <= 0) return has;
  has = number_of(object, state->s_element_size, name, index, &width);
  if (has <= 0) return has;
  if (__builtin_mul_overflow(count, width, nbytes)) *nbytes = UINT64_MAX;
  return 0;
}

/* 1: contiguous or unknown. */
static int is_contiguous(struct kvs_py_state *state, PyObject *object) {
  PyObject *value, *method;
  int has = call_method(object, state->s_is_contiguous, &value);
  if (has == 0) {
    has = kvs_py_attribute(object, state->s_is_contiguous, &method);
    if (has <= 0) return has < 0 ? -1 : 1;
    value = PyObject_CallNoArgs(method);
    Py_DECREF(method);
  }
  int contiguous = value ? PyObject_IsTrue(value) : -1;
  Py_XDECREF(value);
  return contiguous;
}

static int from_data_ptr(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index,
                         struct kvs_py_address *address) {
  PyObject *value;
  int has = call_method(object, state->s_data_ptr, &value);
  if (has == 1) {
    int rc = kvs_py_uint64(value, name, index, &address->ptr);
    Py_DECREF(value);
    if (rc < 0) return -1;
  } else if (has == 0) {
    has = number_of(object, state->s_data_ptr, name, index, &address->ptr);
  }
  if (has < 0) return no_address(object, name, index);
  if (has == 0) return 0;
  int contiguous = is_contiguous(state, object);
  if (contiguous < 0) return -1;
  if (contiguous == 0) return kvs_py_not_contiguous(object, name, index);
  if (size_of_tensor(state, object, name, index, &address->nbytes) < 0) return -1;
  return address->ptr == 0 && address->nbytes != 0 ? no_memory(object, name, index) : 1;
}

/* -- array interfaces: dictionaries with data (address, read-only), shape, typestr, strides ------------------------ */

/* Bytes of one element: the digits after the two letters of typestr ("<f4"). 0: unknown. */
static uint64_t element_size(PyObject *interface) {
  PyObject *typestr = PyDict_GetItemString(interface, "typestr");
  const char *text = typestr && PyUnicode_Check(typestr) ? PyUnicode_AsUTF8(typestr) : NULL;
  uint64_t width = 0;
  if (!text || text[0] == '\0' || text[1] == '\0') {
    PyErr_Clear();
    return 0;
  }
  for (const char *at = text + 2; *at >= '0' && *at <= '9' && width < 1u << 20; at++)
    width = width * 10 + (uint64_t)(*at - '0');
  return width;
}

/* The size of the shape, and whether the strides (if any) are those of a C-contiguous array. */
static int read_shape(PyObject *object, PyObject *interface, const char *name, Py_ssize_t index, uint64_t *nbytes) {
  PyObject *shape = PyDict_GetItemString(interface, "shape");
  PyObject *strides = PyDict_GetItemString(interface, "strides");
  uint64_t width = element_size(interface);
  *nbytes = UINT64_MAX;
  if (!shape || !PyTuple_Check(shape) || width == 0) return 0;
  bool strided = strides && PyTuple_Check(strides) && PyTuple_GET_SIZE(strides) == PyTuple_GET_SIZE(shape);
  bool contiguous = true;
  uint64_t size = width;
  for (Py_ssize_t d = PyTuple_GET_SIZE(shape) - 1; d >= 0; --d) {
    uint64_t extent;
    int64_t stride = (int64_t)size;
    if (kvs_py_uint64(PyTuple_GET_ITEM(shape, d), name, index, &extent) < 0) return -1;
    if (strided && kvs_py_int64(PyTuple_GET_ITEM(strides, d), name, index, &stride) < 0) return -1;
    if (extent > 1 && stride != (int64_t)size) contiguous = false;
    if (__builtin_mul_overflow(size, extent, &size))
      return kvs_py_complain(PyExc_ValueError, name, index, "has an impossible shape");
  }
  if (!contiguous && size != 0) return kvs_py_not_contiguous(object, name, index);
  *nbytes = size;
  return 0;
}

/* 1, or 0 if `data` is absent or an object with a buffer: then the caller tries the buffer protocol. */
static int read_interface(PyObject *object, PyObject *interface, const char *name, Py_ssize_t index,
                          struct kvs_py_address *address) {
  PyObject *data = PyDict_GetItemString(interface, "data");
  if (!data || !PyTuple_Check(data) || PyTuple_GET_SIZE(data) != 2) return 0;
  if (kvs_py_uint64(PyTuple_GET_ITEM(data, 0), name, index, &address->ptr) < 0) return -1;
  int readonly = PyObject_IsTrue(PyTuple_GET_ITEM(data, 1));
  if (readonly < 0) return -1;
  address->readonly = readonly == 1;
  return read_shape(object, interface, name, index, &address->nbytes) < 0 ? -1 : 1;
}

/* Of a copy, which no other thread changes while we read it. */
static int read_copy(PyObject *object, PyObject *interface, const char *name, Py_ssize_t index,
                     struct kvs_py_address *address) {
  if (!PyDict_Check(interface)) return 0;
  PyObject *copy = PyDict_Copy(interface);
  int has = copy ? read_interface(object, copy, name, index, address) : -1;
  Py_XDECREF(copy);
  return has;
}

static int from_interface(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index,
                          PyObject **keep, struct kvs_py_address *address) {
  PyObject *const attributes[2] = {state->s_cuda_array, state->s_array};
  for (int i = 0; i < 2 && !PyType_Check(object); i++) {
    PyObject *interface;
    int has = kvs_py_attribute(object, attributes[i], &interface);
    if (has < 0) return -1;
    if (has == 0) continue;
    has = read_copy(object, interface, name, index, address);
    if (has == 1)
      *keep = interface; /* the dictionary may own the memory */
    else
      Py_DECREF(interface);
    if (has != 0) return has;
  }
  return 0;
}

/* Of ids on the device. */

static int read_strided(PyObject *interface, const char *name, struct kvs_py_strided *ids) {
  PyObject *shape = PyDict_GetItemString(interface, "shape"), *strides = PyDict_GetItemString(interface, "strides");
  PyObject *data = PyDict_GetItemString(interface, "data"), *stream = PyDict_GetItemString(interface, "stream");
  PyObject *typestr = PyDict_GetItemString(interface, "typestr");
  const char *text = typestr && PyUnicode_Check(typestr) ? PyUnicode_AsUTF8(typestr) : NULL;
  if (!text || text[0] == '\0' || !shape || !PyTuple_Check(shape) || !data || !PyTuple_Check(data) ||
      PyTuple_GET_SIZE(data) != 2) {
    PyErr_Clear();
    return kvs_py_complain(PyExc_TypeError, name, -1, "has a __cuda_array_interface__ that cannot be read");
  }
  ids->ndim = (int)PyTuple_GET_SIZE(shape);
  ids->kind = text[0] == '>' ? '>' : text[1];
  ids->width = (unsigned)element_size(interface);
  if (kvs_py_uint64(PyTuple_GET_ITEM(data, 0), name, -1, &ids->ptr) < 0) return -1;
  ids->ordered = stream && stream != Py_None;
  if (ids->ordered && kvs_py_uint64(stream, name, -1, &ids->stream) < 0) return -1;
  if (ids->ndim != 1 && ids->ndim != 2) return 1;
  uint64_t count, tokens = 1;
  if (kvs_py_uint64(PyTuple_GET_ITEM(shape, 0), name, -1, &count) < 0) return -1;
  if (ids->ndim == 2 && kvs_py_uint64(PyTuple_GET_ITEM(shape, 1), name, -1, &tokens) < 0) return -1;
  ids->count = (size_t)count;
  ids->tokens = (size_t)tokens;
  ids->step = ids->width;
  if (__builtin_mul_overflow((int64_t)ids->width, tokens, &ids->stride)) ids->stride = INT64_MAX;
  if (!strides || !PyTuple_Check(strides) || PyTuple_GET_SIZE(strides) != ids->ndim) return 1;
  if (ids->ndim == 2 && kvs_py_int64(PyTuple_GET_ITEM(strides, 1), name, -1, &ids->step) < 0) return -1;
  return kvs_py_int64(PyTuple_GET_ITEM(strides, 0), name, -1, &ids->stride) < 0 ? -1 : 1;
}

int kvs_py_interface_ids(struct kvs_py_state *state, PyObject *object, const char *name, PyObject **keep,
                         struct kvs_py_strided *ids) {
  PyObject *interface;
  int has = kvs_py_attribute(object, state->s_cuda_array, &interface);
  if (has <= 0) return has;
  PyObject *copy = PyDict_Check(interface) ? PyDict_Copy(interface) : NULL;
  if (!copy && !PyErr_Occurred())
    kvs_py_complain(PyExc_TypeError, name, -1, "has a __cuda_array_interface__ that is no dict");
  has = copy ? read_strided(copy, name, ids) : -1;
  Py_XDECREF(copy);
  if (has == 1)
    *keep = interface; /* the dictionary may own the memory */
  else
    Py_DECREF(interface);
  return has;
}

/* -- the first that applies ---------------------------------------------------------------------------------------- */

static int from_buffer(PyObject *object, const char *name, Py_ssize_t index, PyObject **keep,
                       struct kvs_py_address *address) {
  if (!PyObject_CheckBuffer(object)) return 0;
  PyObject *memory = PyMemoryView_FromObject(object); /* holds the buffer export */
  if (!memory) return -1;
  const Py_buffer *buffer = PyMemoryView_GET_BUFFER(memory);
  if (!PyBuffer_IsContiguous(buffer, 'C')) {
    kvs_py_not_contiguous(memory, name, index);
    Py_DECREF(memory);
    return -1;
  }
  *address = (struct kvs_py_address){(uint64_t)(uintptr_t)buffer->buf, (uint64_t)buffer->len, buffer->readonly != 0};
  *keep = memory;
  return 1;
}

static int from_protocols(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index,
                          PyObject **keep, struct kvs_py_address *address) {
  int has = from_data_ptr(state, object, name, index, address);
  if (has == 0) has = kvs_py_dlpack(state, object, name, index, keep, address);
  if (has == 0) has = from_interface(state, object, name, index, keep, address);
  if (has == 0) has = from_buffer(object, name, index, keep, address);
  return has;
}

static bool is_number(PyObject *object) {
  if (PyLong_Check(object)) return true; /* bool is refused by kvs_py_uint64 */
  return kvs_py_is_scalar(object);
}

static int finish(PyObject *object, const char *name, Py_ssize_t index, bool write, PyObject **hold, PyObject *keep,
                  const struct kvs_py_address *address) {
  if (write && address->readonly)
    return kvs_py_complain(PyExc_ValueError, name, index, "is the destination and read-only");
  if (kvs_py_hold(hold, object) < 0) return -1;
  return keep ? kvs_py_hold(hold, keep) : 0;
}

int kvs_py_read_address(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index, bool write,
                        PyObject **hold, struct kvs_py_address *address) {
  *address = (struct kvs_py_address){0, UINT64_MAX, false};
  if (is_number(object)) return kvs_py_uint64(object, name, index, &address->ptr);
  PyObject *keep = NULL;
  int has = 1;
  if (kvs_py_is_array(object))
    has = kvs_py_array_address(object, name, index, address) < 0 ? -1 : 1;
  else
    has = from_protocols(state, object, name, index, &keep, address);
  int rc = has < 0 ? -1 : 0;
  if (has == 1) rc = finish(object, name, index, write, hold, keep, address);
  Py_XDECREF(keep);
  if (has != 0) return rc;
  if (PyIndex_Check(object)) return kvs_py_uint64(object, name, index, &address->ptr);
  bool list = PyList_Check(object) || PyTuple_Check(object);
  return kvs_py_complain(PyExc_TypeError, name, index,
                         "must be an address or a tensor (data_ptr(), DLPack, array interface, buffer), not %s%s",
                         Py_TYPE(object)->tp_name, list ? ": this argument takes one, not several" : "");
}

/* Pointers and limits are the two halves of one array. */
static int pointers_from_tuple(struct kvs_py_state *state, PyObject *items, const char *name, bool write,
                               PyObject **hold, struct kvs_py_list *list) {
  size_t count = (size_t)PyTuple_GET_SIZE(items);
  uint64_t *data;
  PyObject *array = kvs_py_uint64_array(2 * count, &data);
  struct kvs_py_exchange exchange = {NULL, NULL};
  if (!array) return -1;
  for (size_t i = 0; i < count; i++) {
    struct kvs_py_address address;
    PyObject *item = PyTuple_GET_ITEM(items, (Py_ssize_t)i);
    bool read = kvs_py_exchange_read(state, &exchange, item, &address) == 1;
    int rc =
        read ? kvs_py_hold(hold, item) : kvs_py_read_address(state, item, name, (Py_ssize_t)i, write, hold, &address);
    if (rc < 0) {
      Py_DECREF(array);
      return -1;
    }
    data[i] = address.ptr;
    data[count + i] = address.nbytes;
  }
  list->data = data;
  list->limits = data + count;
  list->count = count;
  list->keep = array;
  return 0;
}

int kvs_py_pointers(struct kvs_py_state *state, PyObject *object, const char *name, bool write, PyObject **hold,
                    struct kvs_py_list *list) {
  int is = kvs_py_words(state, object, name, list);
  if (is != 0) return is < 0 ? -1 : 0;
  PyObject *items = PyUnicode_Check(object) || !PySequence_Check(object) ? NULL : PySequence_Tuple(object);
  if (!items && PyErr_Occurred()) return -1;
  if (!items)
    return kvs_py_complain(PyExc_TypeError, name, -1,
                           "must be a list of tensors or addresses, or an int64 or uint64 array, not %s%s",
                           Py_TYPE(object)->tp_name, PyIndex_Check(object) ? ": pass [x] for one" : "");
  int rc = pointers_from_tuple(state, items, name, write, hold, list);
  Py_DECREF(items);
  return rc;
}
