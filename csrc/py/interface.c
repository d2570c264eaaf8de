/* __cuda_array_interface__ and __array_interface__: dictionaries with `data` (address, read-only), shape, typestr,
 * strides. */
#include "ids.h"

/* Bytes of one element: the digits after the two letters of typestr ("<f4"). 0: unknown. */
static uint64_t element_size(PyObject *interface) {
  PyObject *typestr = PyDict_GetItemString(interface, "typestr");
  const char *text = typestr != NULL && PyUnicode_Check(typestr) ? PyUnicode_AsUTF8(typestr) : NULL;
  uint64_t width = 0;
  if (text == NULL || text[0] == '\0' || text[1] == '\0') {
    PyErr_Clear();
    return 0;
  }
  for (const char *at = text + 2; *at >= '0' && *at <= '9' && width < 1u << 20; ++at)
    width = width * 10 + (uint64_t)(*at - '0');
  return width;
}

/* The size of the shape, and whether the strides (if any) are those of a C-contiguous array. */
static int read_shape(PyObject *object, PyObject *interface, const char *name, Py_ssize_t index, uint64_t *nbytes) {
  PyObject *shape = PyDict_GetItemString(interface, "shape");
  PyObject *strides = PyDict_GetItemString(interface, "strides");
  uint64_t width = element_size(interface);
  *nbytes = UINT64_MAX;
  if (shape == NULL || !PyTuple_Check(shape) || width == 0) return 0;
  bool strided = strides != NULL && PyTuple_Check(strides) && PyTuple_GET_SIZE(strides) == PyTuple_GET_SIZE(shape);
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
  if (data == NULL || !PyTuple_Check(data) || PyTuple_GET_SIZE(data) != 2) return 0;
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
  int has = copy == NULL ? -1 : read_interface(object, copy, name, index, address);
  Py_XDECREF(copy);
  return has;
}

int kvs_py_interface(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index, PyObject **keep,
                     struct kvs_py_address *address) {
  PyObject *const attributes[2] = {state->s_cuda_array, state->s_array};
  for (int i = 0; i < 2 && !PyType_Check(object); ++i) {
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

/* -- ids on the device --------------------------------------------------------------------------------------------- */

static int read_strided(PyObject *interface, const char *name, struct kvs_py_strided *ids) {
  PyObject *shape = PyDict_GetItemString(interface, "shape"), *strides = PyDict_GetItemString(interface, "strides");
  PyObject *data = PyDict_GetItemString(interface, "data"), *stream = PyDict_GetItemString(interface, "stream");
  PyObject *typestr = PyDict_GetItemString(interface, "typestr");
  const char *text = typestr != NULL && PyUnicode_Check(typestr) ? PyUnicode_AsUTF8(typestr) : NULL;
  if (text == NULL || text[0] == '\0' || shape == NULL || !PyTuple_Check(shape) || data == NULL ||
      !PyTuple_Check(data) || PyTuple_GET_SIZE(data) != 2) {
    PyErr_Clear();
    return kvs_py_complain(PyExc_TypeError, name, -1, "has a __cuda_array_interface__ that cannot be read");
  }
  ids->ndim = (int)PyTuple_GET_SIZE(shape);
  ids->kind = text[0] == '>' ? '>' : text[1];
  ids->width = (unsigned)element_size(interface);
  if (kvs_py_uint64(PyTuple_GET_ITEM(data, 0), name, -1, &ids->ptr) < 0) return -1;
  ids->ordered = stream != NULL && stream != Py_None;
  if (ids->ordered && kvs_py_uint64(stream, name, -1, &ids->stream) < 0) return -1;
  if (ids->ndim != 1 && ids->ndim != 2) return 1;
  uint64_t count, tokens = 1;
  if (kvs_py_uint64(PyTuple_GET_ITEM(shape, 0), name, -1, &count) < 0) return -1;
  if (ids->ndim == 2 && kvs_py_uint64(PyTuple_GET_ITEM(shape, 1), name, -1, &tokens) < 0) return -1;
  ids->count = (size_t)count;
  ids->tokens = (size_t)tokens;
  ids->step = ids->width;
  if (__builtin_mul_overflow((int64_t)ids->width, tokens, &ids->stride)) ids->stride = INT64_MAX;
  if (strides == NULL || !PyTuple_Check(strides) || PyTuple_GET_SIZE(strides) != ids->ndim) return 1;
  if (ids->ndim == 2 && kvs_py_int64(PyTuple_GET_ITEM(strides, 1), name, -1, &ids->step) < 0) return -1;
  return kvs_py_int64(PyTuple_GET_ITEM(strides, 0), name, -1, &ids->stride) < 0 ? -1 : 1;
}

int kvs_py_interface_ids(struct kvs_py_state *state, PyObject *object, const char *name, PyObject **keep,
                         struct kvs_py_strided *ids) {
  PyObject *interface;
  int has = kvs_py_attribute(object, state->s_cuda_array, &interface);
  if (has <= 0) return has;
  PyObject *copy = PyDict_Check(interface) ? PyDict_Copy(interface) : NULL;
  if (copy == NULL && !PyErr_Occurred())
    kvs_py_complain(PyExc_TypeError, name, -1, "has a __cuda_array_interface__ that is no dict");
  has = copy == NULL ? -1 : read_strided(copy, name, ids);
  Py_XDECREF(copy);
  if (has == 1)
    *keep = interface; /* the dictionary may own the memory */
  else
    Py_DECREF(interface);
  return has;
}
