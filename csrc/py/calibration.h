/* Costs from a dict, for kvswap._testing too. */
#ifndef KVS_PY_CALIBRATION_H
#define KVS_PY_CALIBRATION_H

#include "py/bind.h"

struct kvs_costs;

int kvs_py_costs_read(PyObject *dict, struct kvs_costs *costs); /* -1: with an exception */

#endif
