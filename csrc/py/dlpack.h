/* Tensors, and arrays of ids on the device, by DLPack. */
#ifndef KVS_PY_DLPACK_H
#define KVS_PY_DLPACK_H

#include "py/arrays.h"

int kvs_py_dlpack(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index, PyObject **capsule,
                  struct kvs_py_address *address); /* 1, or 0: it has no DLPack of a readable version */
/* The same through DLPack's C exchange table, for many objects of one type: 1, or 0 if data_ptr() must be called. */
struct kvs_py_exchange {
  PyTypeObject *type; /* borrowed */
  const struct dl_exchange *table;
};
int kvs_py_exchange_read(struct kvs_py_state *state, struct kvs_py_exchange *exchange, PyObject *object,
                         struct kvs_py_address *address);

/* A GPU array of ids, as its producer describes it. */
struct kvs_py_strided {
  uint64_t ptr;
  int64_t stride, step; /* bytes, of the first and the second dimension */
  size_t count, tokens; /* their sizes; 1 where there is no second one */
  int ndim;             /* with more than two, sizes and strides are unknown */
  char kind;            /* as NumPy's: 'i' */
  unsigned width;
  bool ordered; /* the ids are right after what `stream` holds */
  uint64_t stream;
};
int kvs_py_dlpack_device(struct kvs_py_state *state, PyObject *object); /* 2: GPU memory, 1: host, 0: no DLPack */
/* The producer makes `stream` wait for the ids. */
int kvs_py_dlpack_ids(struct kvs_py_state *state, PyObject *object, const char *name, uint64_t stream,
                      PyObject **capsule, struct kvs_py_strided *ids);

#endif
