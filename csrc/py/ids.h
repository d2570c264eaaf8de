/* Reading GPU arrays of ids: what device_ids.c takes from dlpack.c and interface.c. */
#ifndef KVS_PY_IDS_H
#define KVS_PY_IDS_H

#include "bind.h"

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
int kvs_py_interface_ids(struct kvs_py_state *state, PyObject *object, const char *name, PyObject **keep,
                         struct kvs_py_strided *ids);

#endif
