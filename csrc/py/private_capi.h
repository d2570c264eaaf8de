/* What the extension kvswap._testing (tests/bindings) calls of the core and of the bindings, in the capsule
 * kvswap._C._private: it has no file of them. Only one of the same sources will do. */
#ifndef KVS_PY_PRIVATE_CAPI_H
#define KVS_PY_PRIVATE_CAPI_H

#include "device/faults.h"
#include "files/gds.h"
#include "files/store.h"
#include "host/device.h"
#include "paths/costs_default.h"
#include "paths/predict.h"
#include "py/args.h"
#include "py/calibration.h"
#include "py/options.h"
#include "py/seam.h"

#define KVS_PY_PRIVATE(X)                                                                                              \
  X(kvs_dev_check)                                                                                                     \
  X(kvs_dev_alloc)                                                                                                     \
  X(kvs_dev_free)                                                                                                      \
  X(kvs_dev_host_alloc)                                                                                                \
  X(kvs_dev_host_free)                                                                                                 \
  X(kvs_dev_host_register)                                                                                             \
  X(kvs_dev_host_unregister)                                                                                           \
  X(kvs_dev_stream_create)                                                                                             \
  X(kvs_dev_stream_destroy)                                                                                            \
  X(kvs_dev_stream_query)                                                                                              \
  X(kvs_dev_stream_info)                                                                                               \
  X(kvs_dev_synchronize)                                                                                               \
  X(kvs_dev_event_create)                                                                                              \
  X(kvs_dev_event_destroy)                                                                                             \
  X(kvs_dev_event_record)                                                                                              \
  X(kvs_dev_event_query)                                                                                               \
  X(kvs_dev_event_elapsed)                                                                                             \
  X(kvs_dev_stream_wait)                                                                                               \
  X(kvs_dev_copy_direct)                                                                                               \
  X(kvs_dev_copy_rect)                                                                                                 \
  X(kvs_dev_gap)                                                                                                       \
  X(kvs_dev_launch)                                                                                                    \
  X(kvs_dev_write32)                                                                                                   \
  X(kvs_dev_wait32)                                                                                                    \
  X(kvs_dev_call)                                                                                                      \
  X(kvs_dev_chunk_granularity)                                                                                         \
  X(kvs_dev_fault_set)                                                                                                 \
  X(kvs_cost_ns)                                                                                                       \
  X(kvs_costs_default)                                                                                                 \
  X(kvs_crc_plan)                                                                                                      \
  X(kvs_host_step)                                                                                                     \
  X(kvs_host_trace)                                                                                                    \
  X(kvs_host_capture)                                                                                                  \
  X(kvs_host_set_peer)                                                                                                 \
  X(kvs_engine_device)                                                                                                 \
  X(kvs_engine_open_deterministic)                                                                                     \
  X(kvs_engine_skip_hazard)                                                                                            \
  X(kvs_engine_set_costs)                                                                                              \
  X(kvs_engine_set_lane_depth)                                                                                         \
  X(kvs_file_inject)                                                                                                   \
  X(kvs_file_gds_shutdown)                                                                                             \
  X(kvs_racecheck_found)                                                                                               \
  X(kvs_py_args_parse)                                                                                                 \
  X(kvs_py_choice)                                                                                                     \
  X(kvs_py_complain)                                                                                                   \
  X(kvs_py_costs_read)                                                                                                 \
  X(kvs_py_int64)                                                                                                      \
  X(kvs_py_path)                                                                                                       \
  X(kvs_py_timeout)                                                                                                    \
  X(kvs_py_uint64)

struct kvs_py_private {
  const char *sources;                             /* KVSWAP_SOURCES */
  PyObject *(*device_object)(struct kvs_engine *); /* takes the reference */
  PyObject *(*seam)(PyObject *const *args, Py_ssize_t nargs, const struct kvs_seam_row *more, size_t nmore);
#define X(name) __typeof__(&name) name;
  KVS_PY_PRIVATE(X)
#undef X
};

#endif
