/* kvswap.Pool. */
#ifndef KVS_PY_POOL_H
#define KVS_PY_POOL_H

#include "py/bind.h"

/* A Pool over memory that `hold` owns. Steals engine and hold, also on failure. name: a str, coding: a Coding; or None
 * or NULL. */
PyObject *kvs_py_pool_over(struct kvs_py_state *state, struct kvs_engine *engine, struct kvs_pool_layout *layout,
                           PyObject *name, PyObject *coding, PyObject *hold);

#endif
