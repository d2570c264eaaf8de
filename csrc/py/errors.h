/* The one place where a struct kvs_error becomes an exception. */
#ifndef KVS_PY_ERRORS_H
#define KVS_PY_ERRORS_H

#include "py/bind.h"

PyObject *kvs_py_exception(struct kvs_py_state *state, const struct kvs_error *err); /* a new instance */
PyObject *kvs_py_raise(struct kvs_py_state *state, const struct kvs_error *err);     /* always NULL */
PyObject *kvs_py_exception_make(PyObject *module, struct kvs_py_state *state, const void *row);
extern const char kvs_py_error_row[], kvs_py_queue_full_row[], kvs_py_device_error_row[], kvs_py_missing_row[];

#endif
