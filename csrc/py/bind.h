/* Included by all files of the Python module kvswap._C. They know the core by kvswap*.h and private.h, and no CUDA.
 *
 * Conventions. A function that returns int gives 0, or -1 with a Python exception set, unless it says otherwise. The
 * GIL is released round exactly one call of the core, with no Python in between; on a free-threaded build nothing here
 * relies on the GIL: shared fields are atomic. All types are final: an object's type leads to the module's state.
 *
 * No file calls one that calls it back: what several files need of an object stands in objects.h. */
#ifndef KVS_PY_BIND_H
#define KVS_PY_BIND_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "private.h"

struct kvs_py_state; /* objects.h */

#define KVS_PY_FASTCALL(function) ((PyCFunction)(void (*)(void))(function))
#define KVS_PY_NO_GIL(...)                                                                                             \
  Py_BEGIN_ALLOW_THREADS                                                                                               \
  __VA_ARGS__;                                                                                                         \
  Py_END_ALLOW_THREADS /* one statement without the GIL */
static inline bool kvs_py_given(PyObject *value) { return value && value != Py_None; }

#endif
