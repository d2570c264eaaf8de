/* What module.c collects: a type's spec, or functions of the module. Each stands in the file of its name, which
 * includes this header. */
#ifndef KVS_PY_MODULE_H
#define KVS_PY_MODULE_H

#include "py/bind.h"

extern PyType_Spec kvs_py_device_spec, kvs_py_memory_spec, kvs_py_stream_spec, kvs_py_event_spec,
    kvs_py_any_transfer_spec, kvs_py_transfer_spec, kvs_py_pool_spec, kvs_py_pattern_spec, kvs_py_any_host_pool_spec,
    kvs_py_host_pool_spec, kvs_py_shared_pool_spec, kvs_py_mapped_spec, kvs_py_offload_spec, kvs_py_file_store_spec,
    kvs_py_file_transfer_spec, kvs_py_share_spec, kvs_py_share_transfer_spec, kvs_py_replica_index_spec;
extern PyMethodDef kvs_py_swap_methods[], kvs_py_move_methods[], kvs_py_note_methods[], kvs_py_race_methods[],
    kvs_py_machine_methods[], kvs_py_seam_methods[], kvs_py_pattern_methods[], kvs_py_calibration_methods[],
    kvs_py_host_methods[], kvs_py_shared_methods[], kvs_py_ipc_methods[], kvs_py_file_methods[], kvs_py_await_methods[],
    kvs_py_metrics_methods[], kvs_py_trace_methods[], kvs_py_disk_methods[], kvs_py_remote_methods[],
    kvs_py_codec_methods[], kvs_py_replica_methods[];

#endif
