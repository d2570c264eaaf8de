/* Compares cuda/abi.h with the toolkit's header. Included by cuda/driver.c only, if the toolkit is installed. */
#include <cuda.h>

#define X(ours, theirs, value) _Static_assert((int)(ours) == (int)(theirs), #theirs);
KVS_CU_VALUES(X)
#undef X

#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs);
#define SAME_PLACE(ours, member, theirs, their_member)                                                                 \
  _Static_assert(offsetof(ours, member) == offsetof(theirs, their_member), #theirs "." #their_member);                 \
  _Static_assert(sizeof(((ours *)0)->member) == sizeof(((theirs *)0)->their_member), #theirs "." #their_member);

SAME_SIZE(kvs_cu_deviceptr, CUdeviceptr)
SAME_SIZE(kvs_cu_device, CUdevice)
SAME_SIZE(kvs_cu_context, CUcontext)
SAME_SIZE(kvs_cu_module, CUmodule)
SAME_SIZE(kvs_cu_function, CUfunction)
SAME_SIZE(kvs_cu_stream, CUstream)
SAME_SIZE(kvs_cu_event, CUevent)
SAME_SIZE(kvs_cu_chunk, CUmemGenericAllocationHandle)
SAME_SIZE(struct kvs_cu_uuid, CUuuid)
SAME_SIZE(struct kvs_cu_ipc_handle, CUipcMemHandle)
SAME_SIZE(struct kvs_cu_ipc_handle, CUipcEventHandle)
SAME_SIZE(struct kvs_cu_copy_2d, CUDA_MEMCPY2D)
SAME_SIZE(struct kvs_cu_copy_3d, CUDA_MEMCPY3D)
/* Enumerations are passed as int. */
SAME_SIZE(int, CUresult)
SAME_SIZE(int, CUdevice_attribute)
SAME_SIZE(int, CUfunction_attribute)
SAME_SIZE(int, CUpointer_attribute)
SAME_SIZE(int, CUstreamCaptureMode)
SAME_SIZE(int, CUstreamCaptureStatus)
SAME_SIZE(uint32_t, cuuint32_t)
SAME_SIZE(uint64_t, cuuint64_t)

#define SIDES(X) X(src) X(dst)
#define CHECK_2D(side)                                                                                                 \
  SAME_PLACE(struct kvs_cu_copy_2d, side##_x, CUDA_MEMCPY2D, side##XInBytes)                                           \
  SAME_PLACE(struct kvs_cu_copy_2d, side##_y, CUDA_MEMCPY2D, side##Y)                                                  \
  SAME_PLACE(struct kvs_cu_copy_2d, side##_memory, CUDA_MEMCPY2D, side##MemoryType)                                    \
  SAME_PLACE(struct kvs_cu_copy_2d, side##_host, CUDA_MEMCPY2D, side##Host)                                            \
  SAME_PLACE(struct kvs_cu_copy_2d, side##_device, CUDA_MEMCPY2D, side##Device)                                        \
  SAME_PLACE(struct kvs_cu_copy_2d, side##_array, CUDA_MEMCPY2D, side##Array)                                          \
  SAME_PLACE(struct kvs_cu_copy_2d, side##_pitch, CUDA_MEMCPY2D, side##Pitch)
#define CHECK_3D(side)                                                                                                 \
  SAME_PLACE(struct kvs_cu_copy_3d, side##_x, CUDA_MEMCPY3D, side##XInBytes)                                           \
  SAME_PLACE(struct kvs_cu_copy_3d, side##_y, CUDA_MEMCPY3D, side##Y)                                                  \
  SAME_PLACE(struct kvs_cu_copy_3d, side##_z, CUDA_MEMCPY3D, side##Z)                                                  \
  SAME_PLACE(struct kvs_cu_copy_3d, side##_lod, CUDA_MEMCPY3D, side##LOD)                                              \
  SAME_PLACE(struct kvs_cu_copy_3d, side##_memory, CUDA_MEMCPY3D, side##MemoryType)                                    \
  SAME_PLACE(struct kvs_cu_copy_3d, side##_host, CUDA_MEMCPY3D, side##Host)                                            \
  SAME_PLACE(struct kvs_cu_copy_3d, side##_device, CUDA_MEMCPY3D, side##Device)                                        \
  SAME_PLACE(struct kvs_cu_copy_3d, side##_array, CUDA_MEMCPY3D, side##Array)                                          \
  SAME_PLACE(struct kvs_cu_copy_3d, side##_pitch, CUDA_MEMCPY3D, side##Pitch)                                          \
  SAME_PLACE(struct kvs_cu_copy_3d, side##_height, CUDA_MEMCPY3D, side##Height)
SIDES(CHECK_2D)
SIDES(CHECK_3D)
SAME_PLACE(struct kvs_cu_copy_2d, width, CUDA_MEMCPY2D, WidthInBytes)
SAME_PLACE(struct kvs_cu_copy_2d, height, CUDA_MEMCPY2D, Height)
SAME_PLACE(struct kvs_cu_copy_3d, reserved0, CUDA_MEMCPY3D, reserved0)
SAME_PLACE(struct kvs_cu_copy_3d, reserved1, CUDA_MEMCPY3D, reserved1)
SAME_PLACE(struct kvs_cu_copy_3d, width, CUDA_MEMCPY3D, WidthInBytes)
SAME_PLACE(struct kvs_cu_copy_3d, height, CUDA_MEMCPY3D, Height)
SAME_PLACE(struct kvs_cu_copy_3d, depth, CUDA_MEMCPY3D, Depth)

#if CUDA_VERSION >= 13000
#define NEWER_VALUES(X)                                                                                                \
  X(KVS_CU_PROC_LEGACY_STREAM, CU_GET_PROC_ADDRESS_LEGACY_STREAM)                                                      \
  X(KVS_CU_SOURCE_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)                                                     \
  X(KVS_CU_CONTAINED, CUDA_ERROR_CONTAINED)                                                                            \
  X(KVS_CU_TENSOR_MEMORY_LEAK, CUDA_ERROR_TENSOR_MEMORY_LEAK)
#define X(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs);
NEWER_VALUES(X)
#undef X
#endif

#if CUDA_VERSION >= 12080
SAME_SIZE(struct kvs_cu_location, CUmemLocation)
SAME_SIZE(struct kvs_cu_access, CUmemAccessDesc)
SAME_PLACE(struct kvs_cu_access, flags, CUmemAccessDesc, flags)
SAME_SIZE(struct kvs_cu_chunk_kind, CUmemAllocationProp)
SAME_PLACE(struct kvs_cu_chunk_kind, handle_types, CUmemAllocationProp, requestedHandleTypes)
SAME_PLACE(struct kvs_cu_chunk_kind, location, CUmemAllocationProp, location)
SAME_PLACE(struct kvs_cu_chunk_kind, windows, CUmemAllocationProp, win32HandleMetaData)
SAME_SIZE(struct kvs_cu_copy_attributes, CUmemcpyAttributes)
SAME_PLACE(struct kvs_cu_copy_attributes, source_order, CUmemcpyAttributes, srcAccessOrder)
SAME_PLACE(struct kvs_cu_copy_attributes, source_hint, CUmemcpyAttributes, srcLocHint)
SAME_PLACE(struct kvs_cu_copy_attributes, destination_hint, CUmemcpyAttributes, dstLocHint)
SAME_PLACE(struct kvs_cu_copy_attributes, flags, CUmemcpyAttributes, flags)
#endif
