/* Shared by the files of the Python module kvswap._C. They know the core by kvswap*.h and private.h, and no CUDA.
 *
 * Conventions. A function that returns int gives 0, or -1 with a Python exception set, unless it says otherwise. The
 * GIL is released round exactly one call of the core, with no Python in between; on a free-threaded build nothing here
 * relies on the GIL: shared fields are atomic. All types are final: an object's type leads to the module's state. */
#ifndef KVS_PY_BIND_H
#define KVS_PY_BIND_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../device/device.h"
#include "../private.h"

/* module.c: its table has one row for each PyObject pointer. */
struct kvs_py_state {
  PyObject *error, *queue_full, *device_error, *missing;
  PyObject *device_type, *memory_type, *stream_type, *event_type, *any_transfer_type, *transfer_type, *pool_type,
      *pattern_type;
  PyObject *any_host_pool_type, *host_pool_type, *shared_pool_type, *mapped_type, *offload_type, *file_store_type,
      *file_transfer_type;
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
  atomic_uint_fast64_t warned, bound_said; /* a bit for each GPU that lacks something; digest of a bound's note */
};
struct kvs_py_state *kvs_py_state_of(PyObject *self); /* self: an instance of one of this module's types */

/* errors.c: the one place where a struct kvs_error becomes an exception. */
PyObject *kvs_py_exception(struct kvs_py_state *state, const struct kvs_error *err); /* a new instance */
PyObject *kvs_py_raise(struct kvs_py_state *state, const struct kvs_error *err);     /* always NULL */
PyObject *kvs_py_exception_make(PyObject *module, struct kvs_py_state *state, const void *row);
extern const char kvs_py_error_row[], kvs_py_queue_full_row[], kvs_py_device_error_row[], kvs_py_missing_row[];

/* args.c: arguments. index: position in a list, for messages; -1: not in a list. */
struct kvs_py_args {
  const char *function;
  const char *const *names;
  int required, positional, total;
};
int kvs_py_args_parse(const struct kvs_py_args *spec, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                      PyObject **values); /* borrowed; NULL where not given */
int kvs_py_complain(PyObject *exception, const char *name, Py_ssize_t index, const char *format, ...); /* always -1 */
int kvs_py_int64(PyObject *value, const char *name, Py_ssize_t index, int64_t *number);
int kvs_py_uint64(PyObject *value, const char *name, Py_ssize_t index, uint64_t *number);
int kvs_py_choice(PyObject *value, const char *name, const char *const *choices, int count); /* its index, or -1 */
int kvs_py_timeout(PyObject *value, const char *name, int64_t *ns);       /* seconds; NULL or None: -1, no limit */
int kvs_py_attribute(PyObject *object, PyObject *name, PyObject **value); /* 1, or 0 where it has none */
int kvs_py_same_length(const char *name, size_t count, const char *other, size_t expected);
extern const char *const kvs_py_priority_names[3];
#define KVS_PY_FASTCALL(function) ((PyCFunction)(void (*)(void))(function))
#define KVS_PY_NO_GIL(...)                                                                                             \
  Py_BEGIN_ALLOW_THREADS                                                                                               \
  __VA_ARGS__;                                                                                                         \
  Py_END_ALLOW_THREADS /* one statement without the GIL */
static inline bool kvs_py_given(PyObject *value) { return value != NULL && value != Py_None; }

/* wait.c: wait in slices, so that Ctrl-C works. wait() runs without the GIL; KVS_TIMEOUT: call it again. */
enum { KVS_PY_SLICE_NS = 50 * 1000 * 1000 };
typedef int (*kvs_py_wait_function)(void *arg, int64_t timeout_ns, struct kvs_error *err);
/* kvs_engine_collect() without the GIL, because it takes locks of lanes. Owners' destructors acquire the GIL. */
void kvs_py_collect(struct kvs_engine *engine);
/* The same, and wait for threads that have taken ended transfers and not yet released their objects. -1: raised. */
int kvs_py_wait_collected(struct kvs_py_state *state, struct kvs_engine *engine, int64_t timeout_ns);
int kvs_py_wait(struct kvs_py_state *state, kvs_py_wait_function wait, void *arg, int64_t timeout_ns, const char *what);
/* Wait for a task that frees memory, then release the task. KVS_PY_KEPT: an exception is set, nothing was freed.
 * KVS_PY_GIVEN: freed, with an exception set if the task failed or was interrupted (PyErr_Occurred). */
enum kvs_py_given_back { KVS_PY_GIVEN, KVS_PY_KEPT };
int kvs_py_wait_reclaim(struct kvs_py_state *state, struct kvs_reclaim *task, int64_t timeout_ns, const char *what);
enum kvs_py_given_back kvs_py_give_back(struct kvs_py_state *state, struct kvs_reclaim *task, bool registration,
                                        int64_t timeout_ns);
int kvs_py_patience(PyObject *value, int64_t *timeout_ns); /* timeout=60: NULL, seconds or None; -1: raised */
/* Allocate from the engine; if memory is short, wait for frees under way. 0, or -1 with an exception. */
int kvs_py_alloc(struct kvs_py_state *, struct kvs_engine *, uint64_t nbytes, enum kvs_alloc, uint64_t *ptr);

/* query() and synchronize(timeout=None) of streams and events. poll() returns KVS_OK or KVS_NOT_READY. */
typedef int (*kvs_py_poll_function)(void *object, struct kvs_error *err);
struct kvs_py_waiting {
  kvs_py_poll_function poll;
  void *object;
  bool stepped;     /* of the device */
  const char *what; /* for the message of a TimeoutError */
};
PyObject *kvs_py_query(struct kvs_py_state *state, kvs_py_poll_function poll, void *object);
PyObject *kvs_py_synchronize(struct kvs_py_state *state, const struct kvs_py_waiting *waiting, PyObject *const *args,
                             Py_ssize_t nargs, PyObject *kwnames);

/* arrays.c: NumPy. `keep` owns the data. */
struct kvs_py_list {
  const uint64_t *data;
  const uint64_t *limits; /* of pointers: known bytes at each, UINT64_MAX: unknown; NULL: all unknown */
  size_t count;
  bool one;           /* of numbers: data[0] holds for all items */
  bool words;         /* of pointers: read from the items of an integer array */
  uint64_t single[2]; /* storage for a list of one */
  PyObject *keep;
};
int kvs_py_arrays_init(void);
PyObject *kvs_py_uint64_array(size_t count, uint64_t **data);
PyObject *kvs_py_int64_array(size_t count, int64_t **data);
PyObject *kvs_py_bool_array(size_t count, bool **data);
bool kvs_py_is_array(PyObject *object);
bool kvs_py_is_scalar(PyObject *object); /* np.generic */
int kvs_py_ids(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_ids *ids, PyObject **keep);
int kvs_py_numbers(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_py_list *list);
/* An integer array of shape (n, 6), one struct kvs_part a row. Free *parts with PyMem_Free. */
int kvs_py_parts(PyObject *object, const char *name, struct kvs_part **parts, size_t *count);
/* 8-byte words from an int64 or uint64 array: 1, or 0 if `object` is no array and converts to none. */
int kvs_py_words(struct kvs_py_state *state, PyObject *object, const char *name, struct kvs_py_list *list);
/* A writable uint8 array of shape (rows, row_nbytes) over memory that `base` owns. Steals the reference to base. */
PyObject *kvs_py_rows_view(PyObject *base, uint64_t ptr, uint64_t rows, uint64_t row_nbytes, uint64_t stride);

/* address.c: tensors. */
struct kvs_py_address {
  uint64_t ptr;
  uint64_t nbytes; /* UINT64_MAX: unknown */
  bool readonly;
};
/* An object that must live until the transfer ends is appended to the list *hold, created on demand. hold NULL: the
 * caller keeps the memory valid. write: the address is a destination. */
int kvs_py_read_address(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index, bool write,
                        PyObject **hold, struct kvs_py_address *address);
int kvs_py_pointers(struct kvs_py_state *state, PyObject *object, const char *name, bool write, PyObject **hold,
                    struct kvs_py_list *list);
int kvs_py_hold(PyObject **hold, PyObject *object);
int kvs_py_not_contiguous(PyObject *object, const char *name, Py_ssize_t index); /* always -1 */
int kvs_py_check_size(const char *name, Py_ssize_t index, uint64_t limit, uint64_t blocks, uint64_t nbytes);
int kvs_py_dlpack(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index, PyObject **capsule,
                  struct kvs_py_address *address); /* dlpack.c; 1, or 0: it has no DLPack of a readable version */
/* The same through DLPack's C exchange table, for many objects of one type: 1, or 0 if data_ptr() must be called. */
struct kvs_py_exchange {
  PyTypeObject *type; /* borrowed */
  const struct dl_exchange *table;
};
int kvs_py_exchange_read(struct kvs_py_state *state, struct kvs_py_exchange *exchange, PyObject *object,
                         struct kvs_py_address *address);
int kvs_py_interface(struct kvs_py_state *state, PyObject *object, const char *name, Py_ssize_t index, PyObject **keep,
                     struct kvs_py_address *address); /* interface.c; array interfaces; 1 or 0 */
int kvs_py_array_address(PyObject *array, const char *name, Py_ssize_t index, struct kvs_py_address *address);

/* handle.c: streams, and what a transfer starts after. engine: if an object knows its device, it must be this one. */
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

/* races.c: the race checker. */
void kvs_py_tell_races(struct kvs_py_state *state); /* call the hook for new races; keeps the current exception */
/* The calling Python line for race reports: "engine.py:12 in step"; NULL while no checker runs. */
const char *kvs_py_where(struct kvs_py_state *state, char *text, size_t capacity);

/* open.c and device.c. Engines are new references. */
int kvs_py_hook_exit(struct kvs_py_state *state); /* drain at exit: call it before opening what outlives the call */
struct kvs_engine *kvs_py_engine_from(struct kvs_py_state *state, PyObject *device); /* as device= takes it */
struct kvs_engine *kvs_py_engine_of(struct kvs_py_state *state, const uint64_t *ptrs, size_t count); /* by pointers */
struct kvs_engine *kvs_py_device_engine(PyObject *device);                                           /* borrowed */
PyObject *kvs_py_device_new(struct kvs_py_state *state, struct kvs_engine *engine);  /* takes the reference */
PyObject *kvs_py_device_like(struct kvs_py_state *state, struct kvs_engine *engine); /* takes a new reference */
PyObject *kvs_py_device_info_dict(const struct kvs_device_info *info);
PyObject *kvs_py_device_info(PyObject *device, void *unused);            /* getter */
PyObject *kvs_py_device_stats(PyObject *device, PyObject *unused);       /* method */
int kvs_py_say(const char *level, const char *format, const char *text); /* log as kvswap; one %s in the format */

/* memory.c, stream.c, event.c, transfer.c, pool.c */
PyObject *kvs_py_memory_alloc(struct kvs_py_state *state, struct kvs_engine *engine, uint64_t nbytes,
                              enum kvs_alloc kind);
struct kvs_engine *kvs_py_memory_engine(PyObject *memory);                                           /* borrowed */
struct kvs_engine *kvs_py_stream_engine(PyObject *stream, uint64_t *handle);                         /* borrowed */
struct kvs_engine *kvs_py_event_engine(PyObject *event, uint64_t *handle);                           /* borrowed */
PyObject *kvs_py_event_new(struct kvs_py_state *state, struct kvs_engine *engine, kvs_event handle); /* owns it */
PyObject *kvs_py_event_of_transfer(struct kvs_py_state *state, struct kvs_transfer *transfer);
struct kvs_transfer *kvs_py_transfer_core(PyObject *transfer);                            /* borrowed */
PyObject *kvs_py_transfer_new(struct kvs_py_state *state, struct kvs_transfer *transfer); /* takes the reference */
int kvs_py_transfer_wait(struct kvs_py_state *state, struct kvs_transfer *transfer, int64_t timeout_ns);
struct kvs_pool *kvs_py_pool_core(PyObject *pool); /* borrowed */
PyObject *kvs_py_pool_hold(PyObject *pool);        /* borrowed; a list of what it keeps alive, or one object, or NULL */
bool kvs_py_pool_readonly(PyObject *pool);         /* true: it cannot be a destination */
/* A Pool over memory that `hold` owns. Steals engine and hold, also on failure. name: a str, None or NULL. */
PyObject *kvs_py_pool_over(struct kvs_py_state *state, struct kvs_engine *engine, struct kvs_pool_layout *layout,
                           PyObject *name, PyObject *hold);
PyObject *kvs_py_pattern_new(struct kvs_py_state *state, struct kvs_engine *engine, struct kvs_pattern_job *job);
PyObject *kvs_py_mapped_new(struct kvs_py_state *state, struct kvs_mapped *mapped, struct kvs_engine *engine);
void kvs_py_object_free(PyObject *self);
int kvs_py_capi_add(PyObject *module); /* capi.c: adds the capsule _API */

extern PyType_Spec kvs_py_device_spec, kvs_py_memory_spec, kvs_py_stream_spec, kvs_py_event_spec,
    kvs_py_any_transfer_spec, kvs_py_transfer_spec, kvs_py_pool_spec, kvs_py_pattern_spec, kvs_py_any_host_pool_spec,
    kvs_py_host_pool_spec, kvs_py_shared_pool_spec, kvs_py_mapped_spec, kvs_py_offload_spec, kvs_py_file_store_spec,
    kvs_py_file_transfer_spec;
extern PyMethodDef kvs_py_swap_methods[], kvs_py_move_methods[], kvs_py_note_methods[], kvs_py_race_methods[],
    kvs_py_testing_methods[], kvs_py_machine_methods[], kvs_py_seam_methods[], kvs_py_pattern_methods[],
    kvs_py_calibration_methods[], kvs_py_host_methods[], kvs_py_shared_methods[], kvs_py_ipc_methods[],
    kvs_py_ipc_handle_methods[], kvs_py_file_methods[], kvs_py_await_methods[], kvs_py_metrics_methods[],
    kvs_py_trace_methods[], kvs_py_disk_methods[], kvs_py_remote_methods[], kvs_py_codec_methods[];

#endif
