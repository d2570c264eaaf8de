/* The CUDA driver as one table of entry points, loaded at run time: nothing links libcuda. */
#ifndef KVS_CUDA_DRIVER_H
#define KVS_CUDA_DRIVER_H

#include "cuda/abi.h"
#include "status.h"

/* The oldest driver that can serve: every REQUIRED entry below is in it. 1000 * major + 10 * minor of its CUDA. */
#define KVS_CUDA_OLDEST 11040
#define KVS_CUDA_OLDEST_BRANCH "470"

/* X(need, member, symbol, version, arguments): all entries return the driver's code. `version` is the version of the
 * prototype declared here and is passed to cuGetProcAddress, so that a newer driver returns the matching entry. Entries
 * newer than the driver are not requested. OPTIONAL entries may be NULL. */
#define KVS_CUDA_ENTRIES(X)                                                                                            \
  X(REQUIRED, cuInit, "cuInit", 2000, (unsigned flags))                                                                \
  X(REQUIRED, cuGetErrorName, "cuGetErrorName", 6000, (int code, const char **name))                                   \
  X(REQUIRED, cuGetErrorString, "cuGetErrorString", 6000, (int code, const char **text))                               \
  X(REQUIRED, cuDeviceGetCount, "cuDeviceGetCount", 2000, (int *count))                                                \
  X(REQUIRED, cuDeviceGet, "cuDeviceGet", 2000, (kvs_cu_device * device, int ordinal))                                 \
  X(REQUIRED, cuDeviceGetName, "cuDeviceGetName", 2000, (char *name, int nbytes, kvs_cu_device device))                \
  X(REQUIRED, cuDeviceGetUuid, "cuDeviceGetUuid", 11040, (struct kvs_cu_uuid * uuid, kvs_cu_device device))            \
  X(REQUIRED, cuDeviceTotalMem, "cuDeviceTotalMem", 3020, (size_t *nbytes, kvs_cu_device device))                      \
  X(REQUIRED, cuDeviceGetAttribute, "cuDeviceGetAttribute", 2000, (int *value, int attribute, kvs_cu_device device))   \
  X(REQUIRED, cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId", 4010, (char *id, int nbytes, kvs_cu_device device))          \
  X(REQUIRED, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000,                                              \
    (kvs_cu_context * context, kvs_cu_device device))                                                                  \
  X(REQUIRED, cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease", 11000, (kvs_cu_device device))                   \
  X(REQUIRED, cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", 7000,                                          \
    (kvs_cu_device device, unsigned *flags, int *active))                                                              \
  X(REQUIRED, cuCtxPushCurrent, "cuCtxPushCurrent", 4000, (kvs_cu_context context))                                    \
  X(REQUIRED, cuCtxPopCurrent, "cuCtxPopCurrent", 4000, (kvs_cu_context * context))                                    \
  X(REQUIRED, cuCtxGetCurrent, "cuCtxGetCurrent", 4000, (kvs_cu_context * context))                                    \
  X(REQUIRED, cuCtxGetDevice, "cuCtxGetDevice", 2000, (kvs_cu_device * device))                                        \
  X(REQUIRED, cuCtxSynchronize, "cuCtxSynchronize", 2000, (void))                                                      \
  X(REQUIRED, cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", 5050, (int *low, int *high))                 \
  X(REQUIRED, cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", 10010, (int *mode))              \
  X(REQUIRED, cuModuleLoadData, "cuModuleLoadData", 2000, (kvs_cu_module * module, const void *image))                 \
  X(REQUIRED, cuModuleUnload, "cuModuleUnload", 2000, (kvs_cu_module module))                                          \
  X(REQUIRED, cuModuleGetFunction, "cuModuleGetFunction", 2000,                                                        \
    (kvs_cu_function * function, kvs_cu_module module, const char *name))                                              \
  X(OPTIONAL, cuFuncLoad, "cuFuncLoad", 12040, (kvs_cu_function function))                                             \
  X(REQUIRED, cuFuncSetAttribute, "cuFuncSetAttribute", 9000, (kvs_cu_function function, int attribute, int value))    \
  X(REQUIRED, cuLaunchKernel, "cuLaunchKernel", 4000,                                                                  \
    (kvs_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,  \
     unsigned block_z, unsigned shared_nbytes, kvs_cu_stream stream, void **params, void **extra))                     \
  X(REQUIRED, cuMemAlloc, "cuMemAlloc", 3020, (kvs_cu_deviceptr * ptr, size_t nbytes))                                 \
  X(REQUIRED, cuMemFree, "cuMemFree", 3020, (kvs_cu_deviceptr ptr))                                                    \
  X(REQUIRED, cuMemHostAlloc, "cuMemHostAlloc", 2020, (void **ptr, size_t nbytes, unsigned flags))                     \
  X(REQUIRED, cuMemFreeHost, "cuMemFreeHost", 2000, (void *ptr))                                                       \
  X(REQUIRED, cuMemHostRegister, "cuMemHostRegister", 6050, (void *ptr, size_t nbytes, unsigned flags))                \
  X(REQUIRED, cuMemHostUnregister, "cuMemHostUnregister", 4000, (void *ptr))                                           \
  X(REQUIRED, cuPointerGetAttributes, "cuPointerGetAttributes", 7000,                                                  \
    (unsigned count, int *attributes, void **values, kvs_cu_deviceptr ptr))                                            \
  X(REQUIRED, cuMemcpyAsync, "cuMemcpyAsync", 4000,                                                                    \
    (kvs_cu_deviceptr dst, kvs_cu_deviceptr src, size_t nbytes, kvs_cu_stream stream))                                 \
  X(REQUIRED, cuMemcpy2DAsync, "cuMemcpy2DAsync", 3020, (const struct kvs_cu_copy_2d *copy, kvs_cu_stream stream))     \
  X(REQUIRED, cuMemcpy3DAsync, "cuMemcpy3DAsync", 3020, (const struct kvs_cu_copy_3d *copy, kvs_cu_stream stream))     \
  X(OPTIONAL, cuMemcpyBatchAsync, "cuMemcpyBatchAsync", 13000,                                                         \
    (kvs_cu_deviceptr * dst, kvs_cu_deviceptr * src, size_t *nbytes, size_t count,                                     \
     struct kvs_cu_copy_attributes *attributes, size_t *first_of_attribute, size_t nattributes, kvs_cu_stream stream)) \
  X(OPTIONAL, cuMemcpyBatchAsync_12080, "cuMemcpyBatchAsync", 12080,                                                   \
    (kvs_cu_deviceptr * dst, kvs_cu_deviceptr * src, size_t *nbytes, size_t count,                                     \
     struct kvs_cu_copy_attributes *attributes, size_t *first_of_attribute, size_t nattributes, size_t *failed,        \
     kvs_cu_stream stream))                                                                                            \
  X(REQUIRED, cuLaunchHostFunc, "cuLaunchHostFunc", 10000,                                                             \
    (kvs_cu_stream stream, void (*function)(void *arg), void *arg))                                                    \
  X(REQUIRED, cuMemsetD32Async, "cuMemsetD32Async", 3020,                                                              \
    (kvs_cu_deviceptr dst, unsigned word, size_t nwords, kvs_cu_stream stream))                                        \
  X(REQUIRED, cuStreamCreateWithPriority, "cuStreamCreateWithPriority", 5050,                                          \
    (kvs_cu_stream * stream, unsigned flags, int priority))                                                            \
  X(REQUIRED, cuStreamDestroy, "cuStreamDestroy", 4000, (kvs_cu_stream stream))                                        \
  X(REQUIRED, cuStreamQuery, "cuStreamQuery", 2000, (kvs_cu_stream stream))                                            \
  X(REQUIRED, cuStreamWaitEvent, "cuStreamWaitEvent", 3020,                                                            \
    (kvs_cu_stream stream, kvs_cu_event event, unsigned flags))                                                        \
  X(OPTIONAL, cuStreamGetId, "cuStreamGetId", 12000, (kvs_cu_stream stream, unsigned long long *id))                   \
  X(REQUIRED, cuStreamIsCapturing, "cuStreamIsCapturing", 10000, (kvs_cu_stream stream, int *status))                  \
  X(OPTIONAL, cuStreamWriteValue32, "cuStreamWriteValue32", 11070,                                                     \
    (kvs_cu_stream stream, kvs_cu_deviceptr ptr, uint32_t value, unsigned flags))                                      \
  X(OPTIONAL, cuStreamWaitValue32, "cuStreamWaitValue32", 11070,                                                       \
    (kvs_cu_stream stream, kvs_cu_deviceptr ptr, uint32_t value, unsigned flags))                                      \
  X(REQUIRED, cuEventCreate, "cuEventCreate", 2000, (kvs_cu_event * event, unsigned flags))                            \
  X(REQUIRED, cuEventDestroy, "cuEventDestroy", 4000, (kvs_cu_event event))                                            \
  X(REQUIRED, cuEventRecord, "cuEventRecord", 2000, (kvs_cu_event event, kvs_cu_stream stream))                        \
  X(REQUIRED, cuEventQuery, "cuEventQuery", 2000, (kvs_cu_event event))                                                \
  X(REQUIRED, cuEventElapsedTime, "cuEventElapsedTime", 2000, (float *ms, kvs_cu_event from, kvs_cu_event to))         \
  X(OPTIONAL, cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010, (struct kvs_cu_ipc_handle * handle, kvs_cu_deviceptr ptr)) \
  X(OPTIONAL, cuIpcOpenMemHandle, "cuIpcOpenMemHandle", 11000,                                                         \
    (kvs_cu_deviceptr * ptr, struct kvs_cu_ipc_handle handle, unsigned flags))                                         \
  X(OPTIONAL, cuIpcCloseMemHandle, "cuIpcCloseMemHandle", 4010, (kvs_cu_deviceptr ptr))                                \
  X(OPTIONAL, cuIpcGetEventHandle, "cuIpcGetEventHandle", 4010,                                                        \
    (struct kvs_cu_ipc_handle * handle, kvs_cu_event event))                                                           \
  X(OPTIONAL, cuIpcOpenEventHandle, "cuIpcOpenEventHandle", 4010,                                                      \
    (kvs_cu_event * event, struct kvs_cu_ipc_handle handle))                                                           \
  X(OPTIONAL, cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", 4000,                                                    \
    (int *can, kvs_cu_device device, kvs_cu_device peer))                                                              \
  X(OPTIONAL, cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", 4000, (kvs_cu_context peer, unsigned flags))             \
  X(OPTIONAL, cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, (kvs_cu_chunk * chunk, void *ptr))    \
  X(OPTIONAL, cuMemRelease, "cuMemRelease", 10020, (kvs_cu_chunk chunk))                                               \
  X(OPTIONAL, cuMemGetAccess, "cuMemGetAccess", 10020,                                                                 \
    (unsigned long long *flags, const struct kvs_cu_location *location, kvs_cu_deviceptr ptr))                         \
  X(OPTIONAL, cuMemAddressReserve, "cuMemAddressReserve", 10020,                                                       \
    (kvs_cu_deviceptr * ptr, size_t nbytes, size_t alignment, kvs_cu_deviceptr wanted, unsigned long long flags))      \
  X(OPTIONAL, cuMemAddressFree, "cuMemAddressFree", 10020, (kvs_cu_deviceptr ptr, size_t nbytes))                      \
  X(OPTIONAL, cuMemCreate, "cuMemCreate", 10020,                                                                       \
    (kvs_cu_chunk * chunk, size_t nbytes, const struct kvs_cu_chunk_kind *kind, unsigned long long flags))             \
  X(OPTIONAL, cuMemMap, "cuMemMap", 10020,                                                                             \
    (kvs_cu_deviceptr ptr, size_t nbytes, size_t offset, kvs_cu_chunk chunk, unsigned long long flags))                \
  X(OPTIONAL, cuMemUnmap, "cuMemUnmap", 10020, (kvs_cu_deviceptr ptr, size_t nbytes))                                  \
  X(OPTIONAL, cuMemSetAccess, "cuMemSetAccess", 10020,                                                                 \
    (kvs_cu_deviceptr ptr, size_t nbytes, const struct kvs_cu_access *access, size_t count))                           \
  X(OPTIONAL, cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020,                                     \
    (void *shared, kvs_cu_chunk chunk, int kind, unsigned long long flags))                                            \
  X(OPTIONAL, cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020,                                 \
    (kvs_cu_chunk * chunk, void *shared, int kind))                                                                    \
  X(OPTIONAL, cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", 10020,                                   \
    (size_t *nbytes, const struct kvs_cu_chunk_kind *kind, int option))

struct kvs_cuda_driver {
  void *library; /* from dlopen; never closed, because the driver runs threads */
  int version;   /* 13000 for CUDA 13.0 */
#define X(need, member, symbol, since, arguments) int(*member) arguments;
  KVS_CUDA_ENTRIES(X)
#undef X
};

/* Fill the table from a library. KVS_UNSUPPORTED: the error names what is missing. Calls only cuDriverGetVersion and
 * cuGetProcAddress; does not initialise the driver. On failure the library is closed. */
int kvs_cuda_driver_load(const char *library, struct kvs_cuda_driver *driver, struct kvs_error *err);

/* The table of libcuda.so.1, initialised. The first call in the process loads it, and its result is final. NULL: no
 * driver or no GPU, see *err. Any thread. */
const struct kvs_cuda_driver *kvs_cuda_driver_get(struct kvs_error *err);

/* The status for a driver's code: KVS_OK, KVS_NOT_READY, KVS_NOMEM, KVS_CAPTURING, KVS_LOST for sticky errors,
 * otherwise KVS_REFUSED. */
int kvs_cuda_status(int code);

/* The status of `code`; fills *err unless it is KVS_OK. */
int kvs_cuda_result(const struct kvs_cuda_driver *driver, int code, const char *operation, struct kvs_error *err);

#endif
