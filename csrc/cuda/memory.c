/* Memory of the CUDA device. Pinned memory is allocated and registered portable and mapped: every GPU of the process
 * may copy it, and kernels can access its device alias. */
#include "cuda/memory.h"

#include <string.h>

#include "base/maps.h"

int kvs_cuda_alloc(struct kvs_device *device, size_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  kvs_cu_deviceptr made = 0;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  status = kvs_cuda_leave(&scope, scope.cu->cuMemAlloc(&made, nbytes), "cuMemAlloc", err);
  if (status == KVS_OK) *ptr = made;
  return status;
}

int kvs_cuda_free(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  return kvs_cuda_leave(&scope, scope.cu->cuMemFree(ptr), "cuMemFree", err);
}

/* For 0 bytes the driver returns success and no memory; refused here, as for device memory. */
int kvs_cuda_host_alloc(struct kvs_device *device, size_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  void *made = NULL;
  if (nbytes == 0) return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, "cuMemHostAlloc", "0 bytes");
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuMemHostAlloc(&made, nbytes, KVS_CU_HOST_ALLOC_PORTABLE | KVS_CU_HOST_ALLOC_DEVICEMAP);
  status = kvs_cuda_leave(&scope, code, "cuMemHostAlloc", err);
  if (status == KVS_OK) *ptr = (uintptr_t)made;
  return status;
}

int kvs_cuda_host_free(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  return kvs_cuda_leave(&scope, scope.cu->cuMemFreeHost(kvs_cuda_pointer_of(ptr)), "cuMemFreeHost", err);
}

int kvs_cuda_host_register(struct kvs_device *device, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuMemHostRegister(kvs_cuda_pointer_of(ptr), nbytes,
                                         KVS_CU_HOST_REGISTER_PORTABLE | KVS_CU_HOST_REGISTER_DEVICEMAP);
  return kvs_cuda_leave(&scope, code, "cuMemHostRegister", err);
}

int kvs_cuda_host_unregister(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  return kvs_cuda_leave(&scope, scope.cu->cuMemHostUnregister(kvs_cuda_pointer_of(ptr)), "cuMemHostUnregister", err);
}

/* The driver writes values of 1, 4 and 8 bytes into zeroed 8-byte fields, so on little-endian machines the field has
 * the right value in every case. */
int kvs_cuda_pointer_attributes(const struct kvs_cuda_driver *cu, uint64_t ptr, struct kvs_cuda_pointer *pointer) {
  enum { MEMORY, ORDINAL, MANAGED, BASE, NBYTES, DEVICE_POINTER, BUFFER_ID, COUNT };
  int attributes[COUNT] = {
      [MEMORY] = KVS_CU_POINTER_MEMORY_TYPE,  [ORDINAL] = KVS_CU_POINTER_DEVICE_ORDINAL,
      [MANAGED] = KVS_CU_POINTER_IS_MANAGED,  [BASE] = KVS_CU_POINTER_RANGE_START,
      [NBYTES] = KVS_CU_POINTER_RANGE_NBYTES, [DEVICE_POINTER] = KVS_CU_POINTER_DEVICE_POINTER,
      [BUFFER_ID] = KVS_CU_POINTER_BUFFER_ID,
  };
  uint64_t values[COUNT] = {0};
  void *places[COUNT];
  for (int i = 0; i < COUNT; i++) places[i] = &values[i];
  memset(pointer, 0, sizeof *pointer);
  int code = cu->cuPointerGetAttributes(COUNT, attributes, places, ptr);
  if (code != KVS_CU_SUCCESS) return code;
  pointer->memory = (int)(uint32_t)values[MEMORY];
  pointer->known = pointer->memory == KVS_CU_MEMORY_HOST || pointer->memory == KVS_CU_MEMORY_DEVICE;
  if (!pointer->known) return code;
  int32_t ordinal = (int32_t)(uint32_t)values[ORDINAL];
  pointer->ordinal = ordinal < 0 ? -1 : ordinal;
  pointer->managed = (values[MANAGED] & 0xffu) != 0;
  pointer->base = values[BASE];
  pointer->nbytes = values[NBYTES];
  pointer->device_pointer = values[DEVICE_POINTER];
  pointer->buffer_id = values[BUFFER_ID];
  return code;
}

static int pageable_region(uint64_t ptr, struct kvs_region *region, struct kvs_error *err) {
  struct kvs_mapping mapping;
  if (!kvs_mapping_find(ptr, &mapping) || !mapping.readable)
    return kvs_fail(err, KVS_INVALID, "address 0x%llx is not mapped", (unsigned long long)ptr);
  *region = (struct kvs_region){.base = mapping.base,
                                .nbytes = mapping.nbytes,
                                .memory = KVS_MEMORY_PAGEABLE,
                                .device = -1,
                                .writable = mapping.writable};
  return KVS_OK;
}

int kvs_cuda_pointer_query(struct kvs_device *device, uint64_t ptr, struct kvs_region *region, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  struct kvs_cuda_pointer pointer;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = kvs_cuda_pointer_attributes(scope.cu, ptr, &pointer);
  /* For unknown addresses some drivers return this code, others success and zeros. */
  if (code == KVS_CU_INVALID_VALUE) code = KVS_CU_SUCCESS;
  status = kvs_cuda_leave(&scope, code, "cuPointerGetAttributes", err);
  if (status != KVS_OK) return status;
  if (!pointer.known) return pageable_region(ptr, region, err);

  /* The range is in host or in device addresses, if the two differ: use the one that contains its pointer. */
  uint64_t base = pointer.base, distance = pointer.device_pointer - pointer.base;
  if (ptr - base >= pointer.nbytes) base = ptr - distance;
  if (ptr - base >= pointer.nbytes)
    return kvs_fail(err, KVS_UNSUPPORTED, "the driver does not say where the allocation of 0x%llx begins and ends",
                    (unsigned long long)ptr);
  bool host = pointer.memory == KVS_CU_MEMORY_HOST;
  *region = (struct kvs_region){.base = base,
                                .nbytes = pointer.nbytes,
                                .alias = pointer.device_pointer == 0 ? 0 : pointer.device_pointer - (ptr - base),
                                .buffer_id = pointer.buffer_id,
                                .memory = pointer.managed ? KVS_MEMORY_MANAGED
                                          : host          ? KVS_MEMORY_PINNED
                                                          : KVS_MEMORY_DEVICE,
                                .device = pointer.managed || host ? -1 : pointer.ordinal,
                                .seam = true,
                                .writable = true};
  return KVS_OK;
}
