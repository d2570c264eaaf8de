/* NumPy: the only file that uses its C API. Converts ids, pointers and sizes to C arrays. A contiguous array of the
 * right type is read in place. */
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include "py/arrays.h"
#include "py/args.h"
#include "py/objects.h"

#include <numpy/arrayobject.h>

int kvs_py_arrays_init(void) { return PyArray_ImportNumPyAPI(); }

static PyObject *new_array(size_t count, int type, void **data) {
  npy_intp shape[1] = {(npy_intp)count};
  PyObject *array = PyArray_SimpleNew(1, shape, type);
  if (array) *data = PyArray_DATA((PyArrayObject *)array);
  return array;
}

PyObject *kvs_py_uint64_array(size_t count, uint64_t **data) {
  void *memory = NULL;
  PyObject *array = new_array(count, NPY_UINT64, &memory);
  *data = memory;
  return array;
}

PyObject *kvs_py_int64_array(size_t count, int64_t **data) {
  void *memory = NULL;
  PyObject *array = new_array(count, NPY_INT64, &memory);
  *data = memory;
  return array;
}

PyObject *kvs_py_bool_array(size_t count, bool **data) {
  void *memory = NULL;
  PyObject *array = new_array(count, NPY_BOOL, &memory);
  *data = memory;
  return array;
}

PyObject *kvs_py_rows_view(PyObject *base, uint64_t ptr, uint64_t rows, uint64_t row_nbytes, uint64_t stride) {
  npy_intp shape[2] = {(npy_intp)rows, (npy_intp)row_nbytes}, strides[2] = {(npy_intp)stride, 1};
  PyObject *array =
      PyArray_New(&PyArray_Type, 2, shape, NPY_UINT8, strides, (void *)(uintptr_t)ptr, 0, NPY_ARRAY_WRITEABLE, NULL);
  if (!array) {
    Py_DECREF(base);
    return NULL;
  }
  if (PyArray_SetBaseObject((PyArrayObject *)array, base) < 0)
    Py_CLEAR(array); /* steals the reference, also on failure */
  return array;
}

bool kvs_py_is_array(PyObject *object) { return PyArray_Check(object); }

bool kvs_py_is_scalar(PyObject *object) { return PyArray_CheckScalar(object) && !PyArray_Check(object); }

int kvs_py_array_address(PyObject *object, const char *name, Py_ssize_t index, struct kvs_py_address *address) {
  PyArrayObject *array = (PyArrayObject *)object;
  if (!PyArray_IS_C_CONTIGUOUS(array)) return kvs_py_not_contiguous(object, name, index);
  if (PyDataType_REFCHK(PyArray_DESCR(array)))
    return kvs_py_complain(PyExc_TypeError, name, index, "holds Python objects: their bytes are not to be moved");
  address->ptr = (uint64_t)(uintptr_t)PyArray_DATA(array);
  address->nbytes = (uint64_t)PyArray_NBYTES(array);
  address->readonly = !PyArray_ISWRITEABLE(array);
  return 0;
}

/* An ndarray from an array or from an object with an array protocol (a CPU tensor of ids): 1, or 0 if it has none. A
 * list is not converted: its elements may be tensors. A tensor must not be read as a sequence either: its elements
 * would count as tensors, with addresses. */
static int as_array(struct kvs_py_state *state, PyObject *object, PyArrayObject **array) {
  *array = NULL;
  if (PyArray_Check(object)) {
    *array = (PyArrayObject *)Py_NewRef(object);
    return 1;
  }
  if (PyList_CheckExact(object) || PyTuple_CheckExact(object) || PyLong_Check(object)) return 0;
  if (kvs_py_is_scalar(object)) return 0;
  if (!PyObject_CheckBuffer(object)) {
    PyObject *method;
    int has = kvs_py_attribute(object, state->s_array_method, &method);
    if (has == 1) Py_DECREF(method);
    if (has == 0) {
      has = kvs_py_attribute(object, state->s_array, &method);
      if (has == 1) Py_DECREF(method);
    }
    if (has <= 0) return has;
  }
  *array = (PyArrayObject *)PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
  return *array ? 1 : -1;
}

static int check_array(PyArrayObject *array, const char *name, const char *wanted, bool fits) {
  const char *hint = "";
  if (PyArray_DESCR(array)->kind == 'b') hint = ": of a mask pass numpy.flatnonzero(mask)";
  if (PyArray_DESCR(array)->kind == 'f') hint = ": convert it, x.astype(numpy.int64)";
  if (!fits)
    return kvs_py_complain(PyExc_TypeError, name, -1, "must be %s, not %S%s", wanted, (PyObject *)PyArray_DESCR(array),
                           hint);
  if (PyArray_NDIM(array) != 1)
    return kvs_py_complain(
        PyExc_ValueError, name, -1,
        "must be one-dimensional, not %d-D: pass x.reshape(-1), or of pairs one column each, x[:, 0]",
        PyArray_NDIM(array));
  return 0;
}

/* NumPy could not convert the object: a tensor on a GPU, of a type that NumPy lacks, or without memory. 0: another
 * exception, which stays set. */
static bool conversion_failed(void) {
  return PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
         PyErr_ExceptionMatches(PyExc_RuntimeError);
}

/* Ids that NumPy cannot read. The exception of the conversion becomes the cause. Always -1. */
static int refuse_ids(PyObject *object, const char *name) {
  if (!conversion_failed()) return -1;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  kvs_py_complain(PyExc_TypeError, name, -1,
                  "is a %s that the host cannot read (%S): pass a copy in host memory, ids.cpu() or a list",
                  Py_TYPE(object)->tp_name, value ? value : Py_None);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return -1;
}

#define POINTERS_WANTED                                                                                                \
  "must be a list of tensors ([tensor] for one), or a one-dimensional int64 or uint64 array of addresses"

/* One tensor where a list of tensors is wanted. array NULL: NumPy could not convert it. Always -1. */
static int refuse_tensor(PyObject *object, PyArrayObject *array, const char *name) {
  if (!array && !conversion_failed()) return -1;
  PyErr_Clear();
  PyObject *shape = PyObject_GetAttrString(array ? (PyObject *)array : object, "shape");
  if (!shape) PyErr_Clear();
  PyObject *type = array ? (PyObject *)PyArray_DESCR(array) : (PyObject *)Py_TYPE(object);
  kvs_py_complain(PyExc_TypeError, name, -1, "is one tensor (%S, shape %S): " POINTERS_WANTED, type,
                  shape ? shape : Py_None);
  Py_XDECREF(shape);
  return -1;
}

/* The array itself if it is contiguous, aligned and in native byte order, else a copy. Steals the reference. */
static PyArrayObject *in_order(PyArrayObject *array, int type) {
  PyArray_Descr *descr = PyArray_DescrFromType(type);
  PyArrayObject *ready = descr ? (PyArrayObject *)PyArray_FromArray(array, descr, NPY_ARRAY_IN_ARRAY) : NULL;
  Py_DECREF(array);
  return ready;
}

static bool is_signed(PyArrayObject *array, npy_intp width) {
  return PyArray_DESCR(array)->kind == 'i' && PyArray_ITEMSIZE(array) == width;
}

static bool is_unsigned(PyArrayObject *array, npy_intp width) {
  return PyArray_DESCR(array)->kind == 'u' && PyArray_ITEMSIZE(array) == width;
}

/* A tuple of a sequence: a list could change while it is read. */
static PyObject *as_tuple(PyObject *object, const char *name, const char *wanted) {
  if (PyAnySet_Check(object) || PyDict_Check(object)) {
    kvs_py_complain(PyExc_TypeError, name, -1, "must be %s, not %s: pass lists, whose items pair up by position",
                    wanted, Py_TYPE(object)->tp_name);
    return NULL;
  }
  PyObject *items = PyUnicode_Check(object) ? NULL : PySequence_Tuple(object);
  if (items) return items;
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return NULL;
    PyErr_Clear();
  }
  kvs_py_complain(PyExc_TypeError, name, -1, "must be %s, not %s%s", wanted, Py_TYPE(object)->tp_name,
                  PyIndex_Check(object) ? ": pass [x] for one" : "");
  return NULL;
}

static int ids_from_sequence(PyObject *object, const char *name, struct kvs_ids *ids, PyObject **keep) {
  PyObject *items = as_tuple(object, name, "an int32 or int64 array or a sequence of ints");
  if (!items) return -1;
  Py_ssize_t count = PyTuple_GET_SIZE(items);
  int64_t *data;
  PyObject *array = kvs_py_int64_array((size_t)count, &data);
  int rc = array ? 0 : -1;
  for (Py_ssize_t i = 0; rc == 0 && i < count; i++) rc = kvs_py_int64(PyTuple_GET_ITEM(items, i), name, i, &data[i]);
  Py_DECREF(items);
  if (rc < 0) {
    Py_XDECREF(array);
    return -1;
  }
  *ids = (struct kvs_ids){.data = data, .width = 8, .count = (size_t)count};
  *keep = array;
  return 0;
}

/* uint64 ids are used as int64. */
static int check_natural_ids(const char *name, const struct kvs_ids *ids) {
  const uint64_t *data = ids->data;
  for (size_t i = 0; i < ids->count; i++) {
    unsigned long long id = data[i];
    if (id > INT64_MAX)
      return kvs_py_complain(PyExc_IndexError, name, (Py_ssize_t)i, "is %llu: a block id is below 2**63", id);
  }
  return 0;
}

int kvs_py_ids(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_ids *ids, PyObject **keep) {
  PyArrayObject *array;
  int is = as_array(state, object, &array);
  if (is < 0) return refuse_ids(object, name);
  if (is == 0) return ids_from_sequence(object, name, ids, keep);
  char kind = PyArray_DESCR(array)->kind;
  if (check_array(array, name, "int32 or int64", kind == 'i' || kind == 'u') < 0) {
    Py_DECREF(array);
    return -1;
  }
  bool narrow = is_signed(array, 4), natural = is_unsigned(array, 8); /* the others are converted to int64 */
  array = in_order(array, narrow ? NPY_INT32 : natural ? NPY_UINT64 : NPY_INT64);
  if (!array) return -1;
  ids->data = PyArray_DATA(array);
  ids->width = narrow ? 4 : 8;
  ids->count = (size_t)PyArray_SIZE(array);
  if (natural && check_natural_ids(name, ids) < 0) {
    Py_DECREF(array);
    return -1;
  }
  *keep = (PyObject *)array;
  return 0;
}

int kvs_py_words(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_py_list *list) {
  PyArrayObject *array;
  int is = as_array(state, object, &array);
  if (is < 0) return refuse_tensor(object, NULL, name);
  if (is == 0) return 0;
  if (PyArray_NDIM(array) != 1 || !(is_signed(array, 8) || is_unsigned(array, 8))) {
    refuse_tensor(object, array, name);
    Py_DECREF(array);
    return -1;
  }
  array = in_order(array, is_signed(array, 8) ? NPY_INT64 : NPY_UINT64);
  if (!array) return -1;
  list->data = PyArray_DATA(array);
  list->count = (size_t)PyArray_SIZE(array);
  list->words = true;
  list->keep = (PyObject *)array;
  return 1;
}

/* -- parts --------------------------------------------------------------------------------------------------------- */

enum { PART_COLUMNS = 6 };

static int fill_part(const int64_t *row, const char *name, Py_ssize_t index, bool natural, struct kvs_part *part) {
  static const char *const columns[PART_COLUMNS] = {"pair", "layer", "offset", "rows", "row_nbytes", "row_pitch"};
  for (int i = 0; i < PART_COLUMNS; i++) {
    bool narrow = i < 2; /* pair and layer */
    if ((natural || row[i] >= 0) && (!narrow || (uint64_t)row[i] <= UINT32_MAX)) continue;
    PyObject *value = natural ? PyLong_FromUnsignedLongLong((uint64_t)row[i]) : PyLong_FromLongLong(row[i]);
    if (!value) return -1;
    kvs_py_complain(PyExc_ValueError, name, index, "has %s %S: must be 0 %s", columns[i], value,
                    narrow ? "to 2**32 - 1" : "or more");
    Py_DECREF(value);
    return -1;
  }
  *part = (struct kvs_part){(uint32_t)row[0], (uint32_t)row[1], (uint64_t)row[2],
                            (uint64_t)row[3], (uint64_t)row[4], (uint64_t)row[5]};
  return 0;
}

static int fill_parts(PyArrayObject *array, const char *name, bool natural, struct kvs_part **parts, size_t *count) {
  const int64_t *data = PyArray_DATA(array);
  *count = (size_t)PyArray_DIM(array, 0);
  *parts = PyMem_Calloc(*count, sizeof **parts);
  if (!*parts) {
    PyErr_NoMemory();
    return -1;
  }
  for (size_t i = 0; i < *count; i++)
    if (fill_part(data + PART_COLUMNS * i, name, (Py_ssize_t)i, natural, &(*parts)[i]) < 0) return -1;
  return 0;
}

int kvs_py_parts(PyObject *object, const char *name, struct kvs_part **parts, size_t *count) {
  PyArrayObject *array = (PyArrayObject *)PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
  if (!array) {
    if (!PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
    PyErr_Clear();
    return kvs_py_complain(PyExc_TypeError, name, -1, "must be an integer array of shape (n, 6), not %s",
                           Py_TYPE(object)->tp_name);
  }
  bool natural = is_unsigned(array, 8) || is_unsigned(array, 4);
  if (PyArray_SIZE(array) == 0 && PyArray_NDIM(array) != 2) {
    kvs_py_complain(PyExc_ValueError, name, -1, "is empty: leave it out to move whole blocks");
    Py_DECREF(array);
    return -1;
  }
  if (!natural && !is_signed(array, 8) && !is_signed(array, 4)) {
    kvs_py_complain(PyExc_TypeError, name, -1, "must be integers of 32 or 64 bits, not %S",
                    (PyObject *)PyArray_DESCR(array));
    Py_DECREF(array);
    return -1;
  }
  if (PyArray_NDIM(array) != 2 || PyArray_DIM(array, 1) != PART_COLUMNS) {
    PyObject *shape = PyObject_GetAttrString((PyObject *)array, "shape");
    if (shape) kvs_py_complain(PyExc_ValueError, name, -1, "has shape %S: must be (n, 6)", shape);
    Py_XDECREF(shape);
    Py_DECREF(array);
    return -1;
  }
  array = in_order(array, natural ? NPY_UINT64 : NPY_INT64);
  if (!array) return -1;
  int rc = fill_parts(array, name, natural, parts, count);
  Py_DECREF(array);
  return rc;
}

/* -- numbers ------------------------------------------------------------------------------------------------------- */

static int numbers_from_array(PyArrayObject *array, const char *name, struct kvs_py_list *list) {
  bool natural = is_unsigned(array, 8) || is_unsigned(array, 4);
  if (check_array(array, name, "integers of 32 or 64 bits", natural || is_signed(array, 8) || is_signed(array, 4)) <
      0) {
    Py_DECREF(array);
    return -1;
  }
  array = in_order(array, natural ? NPY_UINT64 : NPY_INT64);
  if (!array) return -1;
  const int64_t *data = PyArray_DATA(array);
  npy_intp count = PyArray_SIZE(array);
  for (npy_intp i = 0; !natural && i < count; i++) {
    long long number = data[i];
    if (number >= 0) continue;
    Py_DECREF(array);
    return kvs_py_complain(PyExc_ValueError, name, i, "is %lld: must be 0 or more", number);
  }
  list->data = PyArray_DATA(array);
  list->count = (size_t)count;
  list->keep = (PyObject *)array;
  return 0;
}

static int numbers_from_sequence(PyObject *object, const char *name, struct kvs_py_list *list) {
  PyObject *items = as_tuple(object, name, "an int or a list of ints");
  if (!items) return -1;
  Py_ssize_t count = PyTuple_GET_SIZE(items);
  uint64_t *data;
  PyObject *array = kvs_py_uint64_array((size_t)count, &data);
  int rc = array ? 0 : -1;
  for (Py_ssize_t i = 0; rc == 0 && i < count; i++) rc = kvs_py_uint64(PyTuple_GET_ITEM(items, i), name, i, &data[i]);
  Py_DECREF(items);
  if (rc < 0) {
    Py_XDECREF(array);
    return -1;
  }
  list->data = data;
  list->count = (size_t)count;
  list->keep = array;
  return 0;
}

int kvs_py_numbers(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_py_list *list) {
  PyArrayObject *array;
  int is = as_array(state, object, &array);
  if (is < 0) return -1;
  if (is == 1 && PyArray_NDIM(array) > 0) return numbers_from_array(array, name, list);
  Py_XDECREF(array);
  if (is == 0 && !PyIndex_Check(object)) return numbers_from_sequence(object, name, list);
  list->one = true;
  list->data = list->single;
  list->count = 1;
  return kvs_py_uint64(object, name, -1, &list->single[0]);
}
