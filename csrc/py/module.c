/* The module. Its state is pointers, listed in one table: a row creates its pointer when the module is executed, and
 * serves traverse and clear. Types are added to the module under their names. */
#include "py/module.h"
#include "py/arrays.h"
#include "py/capi.h"
#include "py/errors.h"
#include "py/objects.h"
#include "py/sources.h"

#include <stddef.h>

struct row {
  size_t offset; /* in struct kvs_py_state */
  PyObject *(*make)(PyObject *module, struct kvs_py_state *state, const void *what);
  const void *what;
};

static PyObject *make_type(PyObject *module, struct kvs_py_state *state, const void *what) {
  (void)state;
  /* the function does not write; its prototype lacks const */
  return PyType_FromModuleAndSpec(module, (PyType_Spec *)(uintptr_t)what, NULL);
}

static PyObject *make_host_pool(PyObject *module, struct kvs_py_state *state, const void *what) {
  return PyType_FromModuleAndSpec(module, (PyType_Spec *)(uintptr_t)what, state->any_host_pool_type);
}

static PyObject *make_transfer(PyObject *module, struct kvs_py_state *state, const void *what) {
  return PyType_FromModuleAndSpec(module, (PyType_Spec *)(uintptr_t)what, state->any_transfer_type);
}

static PyObject *make_name(PyObject *module, struct kvs_py_state *state, const void *what) {
  (void)module, (void)state;
  return PyUnicode_InternFromString(what);
}

static PyObject *make_dict(PyObject *module, struct kvs_py_state *state, const void *what) {
  (void)module, (void)state, (void)what;
  return PyDict_New();
}

static PyObject *make_version(PyObject *module, struct kvs_py_state *state, const void *what) {
  (void)module, (void)state, (void)what;
  return Py_BuildValue("(ii)", 1, 1);
}

#define ROW(field, make, what) {offsetof(struct kvs_py_state, field), make, what}
static const struct row rows[] = {
    ROW(error, kvs_py_exception_make, kvs_py_error_row),
    ROW(queue_full, kvs_py_exception_make, kvs_py_queue_full_row),
    ROW(device_error, kvs_py_exception_make, kvs_py_device_error_row),
    ROW(missing, kvs_py_exception_make, kvs_py_missing_row),
    ROW(device_type, make_type, &kvs_py_device_spec),
    ROW(memory_type, make_type, &kvs_py_memory_spec),
    ROW(stream_type, make_type, &kvs_py_stream_spec),
    ROW(event_type, make_type, &kvs_py_event_spec),
    ROW(any_transfer_type, make_type, &kvs_py_any_transfer_spec),
    ROW(transfer_type, make_transfer, &kvs_py_transfer_spec),
    ROW(pool_type, make_type, &kvs_py_pool_spec),
    ROW(pattern_type, make_type, &kvs_py_pattern_spec),
    ROW(any_host_pool_type, make_type, &kvs_py_any_host_pool_spec),
    ROW(host_pool_type, make_host_pool, &kvs_py_host_pool_spec),
    ROW(shared_pool_type, make_host_pool, &kvs_py_shared_pool_spec),
    ROW(mapped_type, make_type, &kvs_py_mapped_spec),
    ROW(offload_type, make_type, &kvs_py_offload_spec),
    ROW(file_store_type, make_type, &kvs_py_file_store_spec),
    ROW(file_transfer_type, make_transfer, &kvs_py_file_transfer_spec),
    ROW(share_type, make_type, &kvs_py_share_spec),
    ROW(share_transfer_type, make_transfer, &kvs_py_share_transfer_spec),
    ROW(replica_index_type, make_type, &kvs_py_replica_index_spec),
    ROW(s_data_ptr, make_name, "data_ptr"),
    ROW(s_is_contiguous, make_name, "is_contiguous"),
    ROW(s_nbytes, make_name, "nbytes"),
    ROW(s_numel, make_name, "numel"),
    ROW(s_element_size, make_name, "element_size"),
    ROW(s_dlpack, make_name, "__dlpack__"),
    ROW(s_dlpack_device, make_name, "__dlpack_device__"),
    ROW(s_exchange, make_name, "__dlpack_c_exchange_api__"),
    ROW(s_max_version, make_name, "max_version"),
    ROW(s_stream, make_name, "stream"),
    ROW(s_cuda_array, make_name, "__cuda_array_interface__"),
    ROW(s_array, make_name, "__array_interface__"),
    ROW(s_array_method, make_name, "__array__"),
    ROW(s_cuda_stream, make_name, "cuda_stream"),
    ROW(s_cuda_stream_method, make_name, "__cuda_stream__"),
    ROW(s_ptr, make_name, "ptr"),
    ROW(s_cuda_event, make_name, "cuda_event"),
    ROW(s_device_index, make_name, "device_index"),
    ROW(s_race, make_name, "race"),
    ROW(s_torch, make_name, "torch"),
    ROW(compute_streams, make_dict, NULL),
    ROW(hooks, make_dict, NULL),
    ROW(dlpack_version, make_version, NULL),
};
enum { ROWS = sizeof rows / sizeof *rows };

static PyObject **slot_of(PyObject *module, const struct row *row) {
  return (PyObject **)(void *)((char *)PyModule_GetState(module) + row->offset);
}

static int module_exec(PyObject *module) {
  PyMethodDef *const methods[] = {
      kvs_py_swap_methods,    kvs_py_move_methods,    kvs_py_note_methods,   kvs_py_race_methods,
      kvs_py_pattern_methods, kvs_py_machine_methods, kvs_py_seam_methods,   kvs_py_calibration_methods,
      kvs_py_host_methods,    kvs_py_shared_methods,  kvs_py_ipc_methods,    kvs_py_file_methods,
      kvs_py_await_methods,   kvs_py_metrics_methods, kvs_py_trace_methods,  kvs_py_disk_methods,
      kvs_py_remote_methods,  kvs_py_codec_methods,   kvs_py_replica_methods};
  if (kvs_py_arrays_init() < 0) return -1;
  for (int i = 0; i < ROWS; i++) {
    PyObject *made = rows[i].make(module, PyModule_GetState(module), rows[i].what);
    if (!made) return -1;
    *slot_of(module, &rows[i]) = made;
    if (PyType_Check(made) && PyModule_AddType(module, (PyTypeObject *)made) < 0) return -1;
  }
  for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
    if (PyModule_AddFunctions(module, methods[i]) < 0) return -1;
  if (kvs_py_capi_add(module) < 0) return -1;
  if (PyModule_AddStringConstant(module, "_sources", KVSWAP_SOURCES) < 0) return -1;
  return PyModule_AddStringConstant(module, "__version__", kvs_version());
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  for (int i = 0; i < ROWS; i++) Py_VISIT(*slot_of(module, &rows[i]));
  return 0;
}

static int module_clear(PyObject *module) {
  for (int i = 0; i < ROWS; i++) Py_CLEAR(*slot_of(module, &rows[i]));
  return 0;
}

PyDoc_STRVAR(module_doc, "The C extension of kvswap. Import kvswap: it re-exports what is public here.");

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* NumPy's C API does not know them */
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,   .m_name = "kvswap._C",
    .m_doc = module_doc,     .m_size = sizeof(struct kvs_py_state),
    .m_slots = slots,        .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
