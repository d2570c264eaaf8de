/* Block ids in GPU memory. */
#ifndef KVS_PY_DEVICE_IDS_H
#define KVS_PY_DEVICE_IDS_H

#include "py/options.h"

/* Whether block ids are a GPU array: 1, 0, or -1 with an exception. */
int kvs_py_on_device(struct kvs_py_state *state, PyObject *ids);
/* Ids of the host's side: refuse a GPU array. */
int kvs_py_refuse_on_device(struct kvs_py_state *state, PyObject *ids, const char *name);
/* Ids on the device, into core.device_ids; the transfer holds them, and starts after the work that makes them. After
 * kvs_py_options_read(). */
int kvs_py_device_ids(struct kvs_py_state *state, PyObject *ids, const char *name, struct kvs_engine *engine,
                      struct kvs_py_options *options);
#define KVS_PY_DEVICE_IDS_DOC                                                                                          \
  "An int32 or int64 GPU array (DLPack, __cuda_array_interface__; strided too) is not read by the call: a kernel "     \
  "does\n"                                                                                                             \
  "  so, after the array's own stream and before any block is touched, on paths 'burst' and 'kernel'. A block whose "  \
  "id\n"                                                                                                               \
  "  is out of range, or is a destination twice, then fails: the GPU stays as it is, the host gets zeros. A GPU "      \
  "array\n"                                                                                                            \
  "  (n, t) names each block by its t tokens, n * t and those after it in their order; other rows fail too.\n"

#endif
