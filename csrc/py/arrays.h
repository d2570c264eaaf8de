/* NumPy. `keep` owns the data. */
#ifndef KVS_PY_ARRAYS_H
#define KVS_PY_ARRAYS_H

#include "py/bind.h"

struct kvs_py_list {
  const uint64_t *data;
  const uint64_t *limits; /* of pointers: known bytes at each, UINT64_MAX: unknown; NULL: all unknown */
  size_t count;
  bool one;           /* of numbers: data[0] holds for all items */
  bool words;         /* of pointers: read from the items of an integer array */
  uint64_t single[2]; /* storage for a list of one */
  PyObject *keep;
};
int kvs_py_arrays_init(void);
PyObject *kvs_py_uint64_array(size_t count, uint64_t **data);
PyObject *kvs_py_int64_array(size_t count, int64_t **data);
PyObject *kvs_py_bool_array(size_t count, bool **data);
bool kvs_py_is_array(PyObject *object);
bool kvs_py_is_scalar(PyObject *object); /* np.generic */
int kvs_py_ids(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_ids *ids, PyObject **keep);
int kvs_py_numbers(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_py_list *list);
/* An integer array of shape (n, 6), one struct kvs_part a row. Free *parts with PyMem_Free. */
int kvs_py_parts(PyObject *object, const char *name, struct kvs_part **parts, size_t *count);
/* 8-byte words from an int64 or uint64 array: 1, or 0 if `object` is no array and converts to none. */
int kvs_py_words(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_py_list *list);
/* A writable uint8 array of shape (rows, row_nbytes) over memory that `base` owns. Steals the reference to base. */
PyObject *kvs_py_rows_view(PyObject *base, uint64_t ptr, uint64_t rows, uint64_t row_nbytes, uint64_t stride);

/* Where a tensor lies. */
struct kvs_py_address {
  uint64_t ptr;
  uint64_t nbytes; /* UINT64_MAX: unknown */
  bool readonly;
};
int kvs_py_array_address(PyObject *array, const char *name, Py_ssize_t index, struct kvs_py_address *address);

#endif
