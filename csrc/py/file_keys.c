/* Keys of the file tier. */
#include "files.h"

#include <stdio.h>
#include <string.h>

/* The rows of a 2-D byte array are keys of one length. The core reads them in place, once. */
static int from_rows(PyObject *object, struct kvs_py_keys *keys) {
  if (PyObject_GetBuffer(object, &keys->view, PyBUF_ND | PyBUF_C_CONTIGUOUS) < 0) return -1;
  const Py_buffer *view = &keys->view;
  if (view->ndim != 2 || view->itemsize != 1)
    return kvs_py_complain(PyExc_TypeError, "keys", -1,
                           "is an array of %d dimensions with items of %zd bytes: must be 2-D, a row of single bytes a "
                           "key",
                           view->ndim, view->itemsize);
  size_t count = (size_t)view->shape[0], width = (size_t)view->shape[1];
  keys->ends = PyMem_Calloc(count + 1, sizeof *keys->ends);
  if (keys->ends == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (size_t i = 0; i < count; ++i) keys->ends[i] = (i + 1) * width;
  keys->core = (struct kvs_file_keys){view->buf, keys->ends, count};
  return 0;
}

/* "block_7_pool_0": TensorRT-LLM's name of a block's file (kvCacheTransferManager.cpp). */
static int pair_text(PyObject *pair, Py_ssize_t index, char text[64]) {
  uint64_t id, pool;
  if (kvs_py_uint64(PyTuple_GET_ITEM(pair, 0), "keys", index, &id) < 0) return -1;
  if (kvs_py_uint64(PyTuple_GET_ITEM(pair, 1), "keys", index, &pool) < 0) return -1;
  return snprintf(text, 64, "block_%llu_pool_%llu", (unsigned long long)id, (unsigned long long)pool);
}

/* The bytes of one key; `text` is storage for a pair's key. */
static Py_ssize_t bytes_of(PyObject *key, Py_ssize_t index, char text[64], const char **bytes) {
  if (PyBytes_Check(key)) {
    *bytes = PyBytes_AS_STRING(key);
    return PyBytes_GET_SIZE(key);
  }
  *bytes = text;
  if (PyTuple_Check(key) && PyTuple_GET_SIZE(key) == 2) return pair_text(key, index, text);
  const char *hint = PyUnicode_Check(key) ? ": encode it, key.encode()"
                     : PyIndex_Check(key) ? ": pass key.to_bytes(8, 'little'), or a pair"
                                          : "";
  return kvs_py_complain(PyExc_TypeError, "keys", index, "must be bytes or a pair (block id, pool), not %s%s",
                         Py_TYPE(key)->tp_name, hint);
}

static int from_items(PyObject *items, struct kvs_py_keys *keys) {
  Py_ssize_t count = PyTuple_GET_SIZE(items);
  size_t used = 0, capacity = 64 * (size_t)count + 1;
  char text[64];
  const char *bytes;
  keys->ends = PyMem_Calloc((size_t)count + 1, sizeof *keys->ends);
  keys->data = PyMem_Malloc(capacity);
  if (keys->ends == NULL || keys->data == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_ssize_t n = bytes_of(PyTuple_GET_ITEM(items, i), i, text, &bytes);
    if (n < 0) return -1;
    if (used + (size_t)n > capacity) {
      size_t bigger = 2 * (used + (size_t)n);
      uint8_t *grown = PyMem_Realloc(keys->data, bigger);
      if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
      }
      keys->data = grown;
      capacity = bigger;
    }
    memcpy(keys->data + used, bytes, (size_t)n);
    used += (size_t)n;
    keys->ends[i] = used;
  }
  keys->core = (struct kvs_file_keys){keys->data, keys->ends, (size_t)count};
  return 0;
}

int kvs_py_read_keys(PyObject *object, struct kvs_py_keys *keys) {
  bool text = PyUnicode_Check(object) || PyBytes_Check(object) || PyByteArray_Check(object);
  if (!text && PyObject_CheckBuffer(object)) return from_rows(object, keys);
  PyObject *items = text ? NULL : PySequence_Tuple(object); /* a list could change while it is read */
  if (items == NULL) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
    PyErr_Clear();
    return kvs_py_complain(PyExc_TypeError, "keys", -1, "must be a sequence of keys, not %s: pass [key] for one",
                           Py_TYPE(object)->tp_name);
  }
  int rc = from_items(items, keys);
  Py_DECREF(items);
  return rc;
}

void kvs_py_keys_clear(struct kvs_py_keys *keys) {
  if (keys->view.obj != NULL) PyBuffer_Release(&keys->view);
  PyMem_Free(keys->data);
  PyMem_Free(keys->ends);
}
