/* Streams, and what a transfer starts after. engine: if an object knows its device, it must be this one. */
#ifndef KVS_PY_HANDLE_H
#define KVS_PY_HANDLE_H

#include "py/bind.h"

int kvs_py_stream_handle(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_engine *engine,
                         uint64_t *handle);
struct kvs_py_after {
  struct kvs_after *items;
  size_t count;
  struct kvs_after single;
  PyObject *keep;
};
int kvs_py_read_after(struct kvs_py_state *state, PyObject *object, struct kvs_engine *engine,
                      struct kvs_py_after *after);
/* One item, or None, for each of `layers` layers. */
int kvs_py_after_layers(struct kvs_py_state *state, PyObject *object, struct kvs_engine *engine, size_t layers,
                        struct kvs_py_after *after);
/* A single item: 1, or 0 if the object is no item. */
int kvs_py_after_one(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_engine *engine,
                     struct kvs_after *item);
void kvs_py_after_clear(struct kvs_py_after *after);

#endif
