/* What more than one file reads of the module's objects. */
#include "py/objects.h"

struct kvs_py_state *kvs_py_state_of(PyObject *self) {
  return PyType_GetModuleState(Py_TYPE(self)); /* the types are final, so this is the type that the module created */
}

void kvs_py_object_free(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject *kvs_py_device_new(struct kvs_py_state *state, struct kvs_engine *engine) {
  PyTypeObject *type = (PyTypeObject *)state->device_type;
  struct kvs_py_device *self = (struct kvs_py_device *)type->tp_alloc(type, 0);
  if (!self)
    kvs_engine_unref(engine);
  else
    self->engine = engine;
  return (PyObject *)self;
}

PyObject *kvs_py_device_like(struct kvs_py_state *state, struct kvs_engine *engine) {
  kvs_engine_ref(engine);
  return kvs_py_device_new(state, engine);
}

struct kvs_engine *kvs_py_device_engine(PyObject *device) { return ((struct kvs_py_device *)device)->engine; }

struct kvs_engine *kvs_py_stream_engine(PyObject *stream, uint64_t *handle) {
  *handle = ((struct kvs_py_stream *)stream)->handle;
  return ((struct kvs_py_stream *)stream)->engine;
}

struct kvs_engine *kvs_py_event_engine(PyObject *event, uint64_t *handle) {
  *handle = ((struct kvs_py_event *)event)->handle;
  return ((struct kvs_py_event *)event)->engine;
}

struct kvs_pool *kvs_py_pool_core(PyObject *pool) { return ((struct kvs_py_pool *)pool)->pool; }

PyObject *kvs_py_pool_hold(PyObject *pool) { return ((struct kvs_py_pool *)pool)->hold; }

bool kvs_py_pool_readonly(PyObject *pool) { return ((struct kvs_py_pool *)pool)->readonly; }

struct kvs_transfer *kvs_py_transfer_core(PyObject *transfer) {
  return ((struct kvs_py_any_transfer *)transfer)->transfer;
}

struct kvs_file_transfer *kvs_py_file_transfer_core(PyObject *transfer) {
  return ((struct kvs_py_any_transfer *)transfer)->transfer;
}

struct kvs_file_store *kvs_py_file_core(PyObject *store) { return ((struct kvs_py_store *)store)->store; }
