/* For extensions of Python: kvswap's functions on the objects that Python owns, in a table in the capsule
 * kvswap._C._API. Nothing is linked: the compiler needs the folder kvswap.get_include(). examples/extension is a whole
 * extension.
 *
 *   #include <Python.h>
 *   #include <kvswap_capi.h>
 *   ...
 *   if (import_kvswap() < 0) return -1;    once, when the module is executed; in each source file that uses the table
 *   ...
 *   struct kvs_transfer *transfer = kvswap_api->transfer_of(object);
 *   if (transfer == NULL) return NULL;
 *   Py_BEGIN_ALLOW_THREADS
 *   status = kvswap_api->transfer_wait(transfer, timeout_ns, &err);
 *   Py_END_ALLOW_THREADS
 *   if (status != KVS_OK) return kvswap_api->raise_error(&err);
 *
 * The table has the functions of kvswap.h, kvswap_pool.h and kvswap_file.h on handles, by their names without kvs_.
 * Opening and closing devices and stores is left to Python, as are the race checker and the memory of HostPool,
 * SharedPool and Mapped, whose address is an attribute. A thread without the GIL may call all of them but those that
 * take or give a PyObject; functions that wait or submit should be called without it. */
#ifndef KVSWAP_CAPI_H
#define KVSWAP_CAPI_H

#include <Python.h>

#include "kvswap.h"
#include "kvswap_file.h"

/* X(name of the function without kvs_). New ones are added at the end. */
#define KVSWAP_CAPI_LIST(X)                                                                                            \
  X(status_name)                                                                                                       \
  X(status_describe)                                                                                                   \
  X(path_name)                                                                                                         \
  X(engine_ref)                                                                                                        \
  X(engine_unref)                                                                                                      \
  X(engine_name)                                                                                                       \
  X(engine_set_compute_stream)                                                                                         \
  X(engine_synchronize)                                                                                                \
  X(engine_set_defaults)                                                                                               \
  X(engine_get_defaults)                                                                                               \
  X(engine_stats)                                                                                                      \
  X(engine_collect)                                                                                                    \
  X(engine_alloc)                                                                                                      \
  X(engine_free)                                                                                                       \
  X(engine_register)                                                                                                   \
  X(engine_unregister)                                                                                                 \
  X(swap_batch)                                                                                                        \
  X(swap_cache)                                                                                                        \
  X(transfer_ref)                                                                                                      \
  X(transfer_unref)                                                                                                    \
  X(transfer_engine)                                                                                                   \
  X(transfer_done)                                                                                                     \
  X(transfer_wait)                                                                                                     \
  X(transfer_cancel)                                                                                                   \
  X(transfer_make_wait)                                                                                                \
  X(transfer_make_wait_layer)                                                                                          \
  X(transfer_layer_done)                                                                                               \
  X(transfer_event)                                                                                                    \
  X(transfer_get_info)                                                                                                 \
  X(transfer_error)                                                                                                    \
  X(transfer_failed)                                                                                                   \
  X(pool_open)                                                                                                         \
  X(pool_ref)                                                                                                          \
  X(pool_unref)                                                                                                        \
  X(pool_engine)                                                                                                       \
  X(pool_get_layout)                                                                                                   \
  X(move_blocks)                                                                                                       \
  X(note_access)                                                                                                       \
  X(note_order)                                                                                                        \
  X(file_ref)                                                                                                          \
  X(file_unref)                                                                                                        \
  X(file_store_blocks)                                                                                                 \
  X(file_load_blocks)                                                                                                  \
  X(file_delete)                                                                                                       \
  X(file_contains)                                                                                                     \
  X(file_pin)                                                                                                          \
  X(file_touch)                                                                                                        \
  X(file_list)                                                                                                         \
  X(file_refresh)                                                                                                      \
  X(file_collect)                                                                                                      \
  X(file_get_stats)                                                                                                    \
  X(file_get_info)                                                                                                     \
  X(file_transfer_ref)                                                                                                 \
  X(file_transfer_unref)                                                                                               \
  X(file_transfer_store)                                                                                               \
  X(file_transfer_done)                                                                                                \
  X(file_transfer_wait)                                                                                                \
  X(file_transfer_cancel)                                                                                              \
  X(file_transfer_error)                                                                                               \
  X(file_transfer_failed)                                                                                              \
  X(file_transfer_reason)                                                                                              \
  X(file_transfer_get_info)                                                                                            \
  X(file_take_events)                                                                                                  \
  X(file_clear)                                                                                                        \
  X(file_take_note)                                                                                                    \
  X(engine_set_slots)                                                                                                  \
  X(engine_slots_nbytes)                                                                                               \
  X(engine_burst_note)                                                                                                 \
  X(engine_lend)                                                                                                       \
  X(engine_lender)                                                                                                     \
  X(engine_costs_note)

#ifdef __cplusplus
#define KVSWAP_CAPI_MEMBER(name) decltype(&kvs_##name) name;
#else
#define KVSWAP_CAPI_MEMBER(name) __typeof__(&kvs_##name) name;
#endif

struct kvswap_capi {
  /* These three stay as they are in every version. */
  uint32_t abi_version; /* KVSWAP_ABI_VERSION of the kvswap that runs */
  size_t size;          /* of its struct kvswap_capi */
  const char *version;  /* kvs_version() */

  /* With the GIL. A function that returns NULL or -1 has set an exception. */

  /* The engine of a kvswap.Device, of a device's name, or of None, as in Device(None): a new reference. */
  struct kvs_engine *(*engine_of)(PyObject *device);
  /* The C object of a Python object, borrowed: take a reference to keep it. */
  struct kvs_transfer *(*transfer_of)(PyObject *transfer);
  struct kvs_pool *(*pool_of)(PyObject *pool);
  struct kvs_file_store *(*file_store_of)(PyObject *store);
  struct kvs_file_transfer *(*file_transfer_of)(PyObject *transfer);
  /* The handle of anything that kvswap takes as a stream: 0, or -1. engine: its device, if it knows one; NULL: any. */
  int (*stream_of)(PyObject *stream, struct kvs_engine *engine, uint64_t *handle);
  /* A new kvswap.Transfer or kvswap.files.FileTransfer. They take the caller's reference, even when they fail. */
  PyObject *(*transfer_object)(struct kvs_transfer *transfer);
  PyObject *(*file_transfer_object)(struct kvs_file_transfer *transfer);
  /* Set the exception that kvswap's own functions raise for this error. Always NULL. */
  PyObject *(*raise_error)(const struct kvs_error *err);

  KVSWAP_CAPI_LIST(KVSWAP_CAPI_MEMBER)
};

#ifndef KVSWAP_CAPI_PROVIDER
/* NULL until import_kvswap(). */
static const struct kvswap_capi *kvswap_api __attribute__((unused)) = NULL;

/* 0, or -1 with an ImportError: kvswap is not installed, or not the one that this extension was built for. */
static inline int import_kvswap(void) {
  const struct kvswap_capi *api = (const struct kvswap_capi *)PyCapsule_Import("kvswap._C._API", 0);
  if (api == NULL && PyErr_ExceptionMatches(PyExc_AttributeError))
    PyErr_SetString(PyExc_ImportError, "this kvswap has no table of C functions for extensions: install a newer one");
  if (api == NULL) return -1;
  if (api->abi_version != KVSWAP_ABI_VERSION) {
    PyErr_Format(PyExc_ImportError,
                 "this extension was built for ABI %d of kvswap, and kvswap %s has ABI %u: build the extension again "
                 "with the headers in kvswap.get_include()",
                 KVSWAP_ABI_VERSION, api->version, (unsigned)api->abi_version);
    return -1;
  }
  if (api->size < sizeof *api) {
    PyErr_Format(PyExc_ImportError,
                 "this extension was built for a newer kvswap than %s, which lacks functions of it: install a newer "
                 "kvswap, or build the extension again with the headers in kvswap.get_include()",
                 api->version);
    return -1;
  }
  kvswap_api = api;
  return 0;
}
#endif

#endif
