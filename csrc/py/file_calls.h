/* Calls of a FileStore on keys. */
#ifndef KVS_PY_FILE_CALLS_H
#define KVS_PY_FILE_CALLS_H

#include "kvswap_file.h"
#include "py/bind.h"

/* Keys from a sequence of bytes or of (block id, pool), or from a 2-D array of bytes. */
struct kvs_py_keys {
  struct kvs_file_keys core;
  Py_buffer view; /* obj NULL: no view */
  uint8_t *data;  /* own copies, or NULL */
  size_t *ends;
};
int kvs_py_read_keys(PyObject *object, struct kvs_py_keys *keys);
void kvs_py_keys_clear(struct kvs_py_keys *keys);

void kvs_py_file_say_note(PyObject *store); /* log what happened beside the calls */

/* Methods of the store. */
PyObject *kvs_py_file_store(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *kvs_py_file_load(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *kvs_py_file_delete(PyObject *self, PyObject *keys);
extern const char kvs_py_file_store_doc[], kvs_py_file_load_doc[], kvs_py_file_delete_doc[];

#endif
