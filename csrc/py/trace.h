/* trace.c: the hook round the calls that submit transfers. */
#ifndef KVS_PY_TRACE_H
#define KVS_PY_TRACE_H

#include "bind.h"

/* NULL: no hook is set, or it wants no more of this call. */
PyObject *kvs_py_trace_begin(struct kvs_py_state *state, const char *what);
/* Takes the reference that `begin` gave and returns `result`; result NULL: the call raised. */
PyObject *kvs_py_trace_end(PyObject *end, PyObject *result);

#endif
