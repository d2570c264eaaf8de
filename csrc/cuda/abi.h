/* The part of the CUDA driver's ABI that kvswap uses, declared here so that the C code compiles without a CUDA toolkit.
 * Names begin with kvs_cu_, so that <cuda.h> can be included beside this file: cuda/driver.c compares every size,
 * offset and value with <cuda.h> if it is installed.
 *
 * Structures are those of the entry point versions in cuda/driver.h. */
#ifndef KVS_CUDA_ABI_H
#define KVS_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef unsigned long long kvs_cu_deviceptr;
typedef int kvs_cu_device;
typedef struct kvs_cu_context_object *kvs_cu_context;
typedef struct kvs_cu_module_object *kvs_cu_module;
typedef struct kvs_cu_function_object *kvs_cu_function;
typedef struct kvs_cu_stream_object *kvs_cu_stream;
typedef struct kvs_cu_event_object *kvs_cu_event;
typedef unsigned long long kvs_cu_chunk; /* CUmemGenericAllocationHandle */

/* X(our name, name in cuda.h, value) */
#define KVS_CU_VALUES(X)                                                                                               \
  X(KVS_CU_SUCCESS, CUDA_SUCCESS, 0)                                                                                   \
  X(KVS_CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE, 1)                                                                 \
  X(KVS_CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY, 2)                                                                 \
  X(KVS_CU_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED, 4)                                                                 \
  X(KVS_CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE, 100)                                                                       \
  X(KVS_CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT, 201)                                                           \
  X(KVS_CU_ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE, 214)                                                       \
  X(KVS_CU_NVLINK_UNCORRECTABLE, CUDA_ERROR_NVLINK_UNCORRECTABLE, 220)                                                 \
  X(KVS_CU_NOT_READY, CUDA_ERROR_NOT_READY, 600)                                                                       \
  X(KVS_CU_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS, 700)                                                           \
  X(KVS_CU_LAUNCH_TIMEOUT, CUDA_ERROR_LAUNCH_TIMEOUT, 702)                                                             \
  X(KVS_CU_CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED, 709)                                                 \
  X(KVS_CU_ASSERT, CUDA_ERROR_ASSERT, 710)                                                                             \
  X(KVS_CU_HARDWARE_STACK_ERROR, CUDA_ERROR_HARDWARE_STACK_ERROR, 714)                                                 \
  X(KVS_CU_ILLEGAL_INSTRUCTION, CUDA_ERROR_ILLEGAL_INSTRUCTION, 715)                                                   \
  X(KVS_CU_MISALIGNED_ADDRESS, CUDA_ERROR_MISALIGNED_ADDRESS, 716)                                                     \
  X(KVS_CU_INVALID_ADDRESS_SPACE, CUDA_ERROR_INVALID_ADDRESS_SPACE, 717)                                               \
  X(KVS_CU_INVALID_PC, CUDA_ERROR_INVALID_PC, 718)                                                                     \
  X(KVS_CU_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED, 719)                                                               \
  X(KVS_CU_MPS_CLIENT_TERMINATED, CUDA_ERROR_MPS_CLIENT_TERMINATED, 810)                                               \
  X(KVS_CU_CAPTURE_FIRST, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)                                                  \
  X(KVS_CU_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906)                                                  \
  X(KVS_CU_CAPTURE_LAST, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908)                                                  \
  X(KVS_CU_EXTERNAL_DEVICE, CUDA_ERROR_EXTERNAL_DEVICE, 911)                                                           \
  X(KVS_CU_UNKNOWN, CUDA_ERROR_UNKNOWN, 999)                                                                           \
  X(KVS_CU_DEVICE_MAX_PITCH, CU_DEVICE_ATTRIBUTE_MAX_PITCH, 11)                                                        \
  X(KVS_CU_DEVICE_SMS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)                                                   \
  X(KVS_CU_DEVICE_MEMORY_KHZ, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 36)                                               \
  X(KVS_CU_DEVICE_MEMORY_BITS, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 37)                                        \
  X(KVS_CU_DEVICE_COPY_ENGINES, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 40)                                            \
  X(KVS_CU_DEVICE_UNIFIED_ADDRESSING, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 41)                                      \
  X(KVS_CU_DEVICE_CC_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)                                          \
  X(KVS_CU_DEVICE_CC_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)                                          \
  X(KVS_CU_DEVICE_SHARED_OPTIN, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 97)                             \
  X(KVS_CU_FUNCTION_DYNAMIC_SHARED, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8)                                \
  X(KVS_CU_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                                                   \
  X(KVS_CU_POINTER_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, 3)                                             \
  X(KVS_CU_POINTER_BUFFER_ID, CU_POINTER_ATTRIBUTE_BUFFER_ID, 7)                                                       \
  X(KVS_CU_POINTER_IS_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED, 8)                                                     \
  X(KVS_CU_POINTER_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)                                             \
  X(KVS_CU_POINTER_RANGE_START, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11)                                             \
  X(KVS_CU_POINTER_RANGE_NBYTES, CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12)                                                  \
  X(KVS_CU_MEMORY_HOST, CU_MEMORYTYPE_HOST, 1)                                                                         \
  X(KVS_CU_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE, 2)                                                                     \
  X(KVS_CU_MEMORY_UNIFIED, CU_MEMORYTYPE_UNIFIED, 4)                                                                   \
  X(KVS_CU_HOST_ALLOC_PORTABLE, CU_MEMHOSTALLOC_PORTABLE, 1)                                                           \
  X(KVS_CU_HOST_ALLOC_DEVICEMAP, CU_MEMHOSTALLOC_DEVICEMAP, 2)                                                         \
  X(KVS_CU_HOST_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE, 1)                                                     \
  X(KVS_CU_HOST_REGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_DEVICEMAP, 2)                                                   \
  X(KVS_CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING, 1)                                                             \
  X(KVS_CU_EVENT_DEFAULT, CU_EVENT_DEFAULT, 0)                                                                         \
  X(KVS_CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING, 2)                                                           \
  X(KVS_CU_EVENT_INTERPROCESS, CU_EVENT_INTERPROCESS, 4)                                                               \
  X(KVS_CU_PEER_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704)                                          \
  X(KVS_CU_POINTER_MAPPING_NBYTES, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, 18)                                              \
  X(KVS_CU_POINTER_MAPPING_BASE, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, 19)                                           \
  X(KVS_CU_CHUNK_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED, 1)                                                             \
  X(KVS_CU_CHUNK_DESCRIPTOR, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1)                                              \
  X(KVS_CU_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM, 0)                                                   \
  X(KVS_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE, 1)                                                            \
  X(KVS_CU_ACCESS_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3)                                                    \
  X(KVS_CU_IPC_LAZY_PEER_ACCESS, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1)                                                \
  X(KVS_CU_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED, 2)                                                    \
  X(KVS_CU_CAPTURE_STATUS_NONE, CU_STREAM_CAPTURE_STATUS_NONE, 0)                                                      \
  X(KVS_CU_WAIT_VALUE_GEQ, CU_STREAM_WAIT_VALUE_GEQ, 0)                                                                \
  X(KVS_CU_WRITE_VALUE_DEFAULT, CU_STREAM_WRITE_VALUE_DEFAULT, 0)

enum kvs_cu_value {
#define X(ours, theirs, value) ours = (value),
  KVS_CU_VALUES(X)
#undef X
};

/* Values missing from cuda.h of CUDA 11.3. */
enum kvs_cu_newer_value {
  KVS_CU_PROC_LEGACY_STREAM = 1, /* handle 0 is the legacy stream, whatever the caller's compile flags */
  KVS_CU_SOURCE_ORDER_STREAM = 1,
  KVS_CU_CONTAINED = 226,
  KVS_CU_TENSOR_MEMORY_LEAK = 721,
};

struct kvs_cu_uuid {
  unsigned char bytes[16];
};

/* For memory and events; passed by value. */
struct kvs_cu_ipc_handle {
  char bytes[64];
};

struct kvs_cu_location {
  int type, id;
};

struct kvs_cu_access {
  struct kvs_cu_location location;
  int flags;
};

struct kvs_cu_chunk_kind {
  int type, handle_types;
  struct kvs_cu_location location;
  void *windows;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};

struct kvs_cu_copy_attributes {
  int source_order;
  struct kvs_cu_location source_hint, destination_hint;
  unsigned flags;
};

struct kvs_cu_copy_2d {
  size_t src_x, src_y;
  int src_memory;
  const void *src_host;
  kvs_cu_deviceptr src_device;
  void *src_array;
  size_t src_pitch;
  size_t dst_x, dst_y;
  int dst_memory;
  void *dst_host;
  kvs_cu_deviceptr dst_device;
  void *dst_array;
  size_t dst_pitch;
  size_t width, height;
};

struct kvs_cu_copy_3d {
  size_t src_x, src_y, src_z, src_lod;
  int src_memory;
  const void *src_host;
  kvs_cu_deviceptr src_device;
  void *src_array, *reserved0;
  size_t src_pitch, src_height;
  size_t dst_x, dst_y, dst_z, dst_lod;
  int dst_memory;
  void *dst_host;
  kvs_cu_deviceptr dst_device;
  void *dst_array, *reserved1;
  size_t dst_pitch, dst_height;
  size_t width, height, depth;
};

#endif
