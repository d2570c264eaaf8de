/* kvswap.Memory. */
#ifndef KVS_PY_MEMORY_H
#define KVS_PY_MEMORY_H

#include "py/bind.h"

PyObject *kvs_py_memory_alloc(struct kvs_py_state *state, struct kvs_engine *engine, uint64_t nbytes,
                              enum kvs_alloc kind);
struct kvs_engine *kvs_py_memory_engine(PyObject *memory); /* borrowed */

#endif
