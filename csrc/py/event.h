/* kvswap.Event. */
#ifndef KVS_PY_EVENT_H
#define KVS_PY_EVENT_H

#include "py/bind.h"

PyObject *kvs_py_event_new(struct kvs_py_state *state, struct kvs_engine *engine, kvs_event handle); /* owns it */
PyObject *kvs_py_event_of_transfer(struct kvs_py_state *state, struct kvs_transfer *transfer);

#endif
