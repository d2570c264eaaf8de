/* kvswap.memory.Mapped. */
#ifndef KVS_PY_MAPPED_H
#define KVS_PY_MAPPED_H

#include "py/bind.h"

PyObject *kvs_py_mapped_new(struct kvs_py_state *state, struct kvs_mapped *mapped, struct kvs_engine *engine);

#endif
