/* Device.info and Device.stats(). */
#ifndef KVS_PY_DEVICE_FACTS_H
#define KVS_PY_DEVICE_FACTS_H

#include "py/bind.h"

PyObject *kvs_py_device_info_dict(const struct kvs_device_info *info);
PyObject *kvs_py_device_info(PyObject *device, void *unused);      /* getter */
PyObject *kvs_py_device_stats(PyObject *device, PyObject *unused); /* method */

#endif
