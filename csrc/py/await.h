/* `await transfer`. */
#ifndef KVS_PY_AWAIT_H
#define KVS_PY_AWAIT_H

#include "py/bind.h"

PyObject *kvs_py_await(PyObject *transfer); /* __await__() */

#endif
