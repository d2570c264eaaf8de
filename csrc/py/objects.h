/* The module's state, the objects that more than one file reads, and what is read of them. These functions call no
 * other file of the bindings, so that the files of the types need not call each other. */
#ifndef KVS_PY_OBJECTS_H
#define KVS_PY_OBJECTS_H

#include "kvswap_file.h"
#include "py/bind.h"

/* The table in module.c has one row for each PyObject pointer. */
struct kvs_py_state {
  PyObject *error, *queue_full, *device_error, *missing;
  PyObject *device_type, *memory_type, *stream_type, *event_type, *any_transfer_type, *transfer_type, *pool_type,
      *pattern_type;
  PyObject *any_host_pool_type, *host_pool_type, *shared_pool_type, *mapped_type, *offload_type, *file_store_type,
      *file_transfer_type, *share_type, *share_transfer_type, *replica_index_type;
  PyObject *s_data_ptr, *s_is_contiguous, *s_nbytes, *s_numel, *s_element_size;
  PyObject *s_dlpack, *s_dlpack_device, *s_exchange, *s_max_version, *s_stream, *s_cuda_array, *s_array;
  PyObject *s_array_method, *s_cuda_stream, *s_cuda_stream_method, *s_ptr, *s_cuda_event, *s_device_index, *s_race,
      *s_torch;
  PyObject *compute_streams;       /* {device name: foreign stream object given to set_compute_stream()} */
  PyObject *dlpack_version;        /* the newest DLPack that dlpack.c reads, a tuple */
  PyObject *hooks;                 /* {"race": callable for newly found races} */
  atomic_uint_fast64_t races_told; /* kvs_racecheck_found() at the last call of that hook */
  atomic_bool exit_hooked;         /* _shutdown is registered with atexit */
  /* traced: hooks has "trace". logged: no GPU; calibration unusable; path burst off or small; no io_uring */
  atomic_bool host_said, costs_said, burst_said, engine_said, traced;
  atomic_uint_fast64_t opened[2], bound_said; /* a bit for each host device, and GPU; digest of a bound's note */
};

struct kvs_py_device {
  PyObject_HEAD
  struct kvs_engine *engine;
};

struct kvs_py_stream {
  PyObject_HEAD
  struct kvs_engine *engine;
  kvs_stream handle;
};

struct kvs_py_event {
  PyObject_HEAD
  struct kvs_engine *engine;
  kvs_event handle;
  struct kvs_transfer *transfer; /* owner of the event; NULL: the object owns it */
};

struct kvs_py_pool {
  PyObject_HEAD
  struct kvs_pool *pool;
  PyObject *hold;   /* list: the tensor and its exporter; a HostPool's buffer; NULL for a plain address */
  PyObject *group;  /* a Pool, or NULL */
  PyObject *coding; /* a kvswap.codecs.Coding, or NULL */
  PyObject *weakrefs;
  bool readonly; /* it cannot be a destination */
};

struct kvs_py_any_transfer { /* Transfer and FileTransfer */
  PyObject_HEAD
  const struct kvs_py_transfer_kind *kind; /* transfer.h */
  void *transfer;
};

struct kvs_py_store {
  PyObject_HEAD
  struct kvs_file_store *store; /* NULL: not open */
};

struct kvs_py_state *kvs_py_state_of(PyObject *self); /* self: an instance of one of this module's types */
void kvs_py_object_free(PyObject *self);

PyObject *kvs_py_device_new(struct kvs_py_state *state, struct kvs_engine *engine);  /* takes the reference */
PyObject *kvs_py_device_like(struct kvs_py_state *state, struct kvs_engine *engine); /* takes a new reference */

/* What is returned is borrowed. */
struct kvs_engine *kvs_py_device_engine(PyObject *device);
struct kvs_engine *kvs_py_stream_engine(PyObject *stream, uint64_t *handle);
struct kvs_engine *kvs_py_event_engine(PyObject *event, uint64_t *handle);
struct kvs_pool *kvs_py_pool_core(PyObject *pool);
PyObject *kvs_py_pool_hold(PyObject *pool); /* a list of what it keeps alive, or one object, or NULL */
bool kvs_py_pool_readonly(PyObject *pool);
struct kvs_transfer *kvs_py_transfer_core(PyObject *transfer);
struct kvs_file_transfer *kvs_py_file_transfer_core(PyObject *transfer);
struct kvs_file_store *kvs_py_file_core(PyObject *store); /* NULL: not open */

#endif
