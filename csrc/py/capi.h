/* The table of functions for other extensions. */
#ifndef KVS_PY_CAPI_H
#define KVS_PY_CAPI_H

#include "py/bind.h"

int kvs_py_capi_add(PyObject *module); /* adds the capsule _API */

#endif
