/* Opening devices, and what is logged when one opens. Engines are new references. */
#ifndef KVS_PY_OPEN_H
#define KVS_PY_OPEN_H

#include "py/bind.h"

int kvs_py_hook_exit(struct kvs_py_state *state); /* drain at exit: call it before opening what outlives the call */
struct kvs_engine *kvs_py_engine_from(struct kvs_py_state *state, PyObject *device); /* as device= takes it */
struct kvs_engine *kvs_py_engine_of(struct kvs_py_state *state, const uint64_t *ptrs, size_t count); /* by pointers */
int kvs_py_say(const char *level, const char *format, const char *text); /* log as kvswap; one %s in the format */

#endif
