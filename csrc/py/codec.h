/* Codings, which kvswap.codecs holds as capsules. */
#ifndef KVS_PY_CODEC_H
#define KVS_PY_CODEC_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kvswap_codec.h"

/* Of a kvswap.codecs.Coding: lives as long as that. TypeError names the argument. */
struct kvs_coding *kvs_py_coding_from(PyObject *object, const char *name, Py_ssize_t index);

#endif
