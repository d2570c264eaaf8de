/* Ranges of chunks on a GPU: share.h over the driver's virtual memory management (CUDA 10.2 and newer). */
#include "cuda/range.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

static struct kvs_cu_chunk_kind kind_of(const struct kvs_device *device) {
  return (struct kvs_cu_chunk_kind){.type = KVS_CU_CHUNK_PINNED,
                                    .handle_types = KVS_CU_CHUNK_DESCRIPTOR,
                                    .location = {KVS_CU_LOCATION_DEVICE, device->ordinal}};
}

/* All these entries arrived by one driver version; the last one is cuMemRetainAllocationHandle (11.0). */
static int enter(struct kvs_cuda_scope *scope, struct kvs_device *device, struct kvs_error *err) {
  const struct kvs_cuda_driver *cu = ((struct kvs_cuda_device *)device)->cu;
  if (!cu->cuMemRetainAllocationHandle || !cu->cuMemRelease || !cu->cuMemAddressReserve || !cu->cuMemAddressFree ||
      !cu->cuMemCreate || !cu->cuMemMap || !cu->cuMemUnmap || !cu->cuMemSetAccess ||
      !cu->cuMemExportToShareableHandle || !cu->cuMemImportFromShareableHandle || !cu->cuMemGetAllocationGranularity)
    return kvs_fail(err, KVS_UNSUPPORTED, "this CUDA driver maps no memory in chunks");
  return kvs_cuda_enter(scope, device, err);
}

int kvs_cuda_chunk_granularity(struct kvs_device *device, uint64_t *nbytes, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  const struct kvs_cu_chunk_kind kind = kind_of(device);
  size_t found = 0;
  int status = enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuMemGetAllocationGranularity(&found, &kind, KVS_CU_GRANULARITY_MINIMUM);
  status = kvs_cuda_leave(&scope, code, "cuMemGetAllocationGranularity", err);
  *nbytes = found;
  return status;
}

int kvs_cuda_range_reserve(struct kvs_device *device, uint64_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  kvs_cu_deviceptr made = 0;
  int status = enter(&scope, device, err);
  if (status != KVS_OK) return status;
  status = kvs_cuda_leave(&scope, scope.cu->cuMemAddressReserve(&made, nbytes, 0, 0, 0), "cuMemAddressReserve", err);
  if (status == KVS_OK) *ptr = made;
  return status;
}

int kvs_cuda_range_free(struct kvs_device *device, uint64_t ptr, uint64_t nbytes, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = enter(&scope, device, err);
  if (status != KVS_OK) return status;
  return kvs_cuda_leave(&scope, scope.cu->cuMemAddressFree(ptr, nbytes), "cuMemAddressFree", err);
}

/* The mapping keeps the chunk alive after its handle is released. */
static int map_chunk(struct kvs_cuda_scope *scope, kvs_cu_chunk chunk, uint64_t at, uint64_t nbytes,
                     const char **operation) {
  const struct kvs_cu_access access = {.location = {KVS_CU_LOCATION_DEVICE, scope->device->base.ordinal},
                                       .flags = KVS_CU_ACCESS_READWRITE};
  *operation = "cuMemMap";
  int code = scope->cu->cuMemMap(at, nbytes, 0, chunk, 0);
  if (code == KVS_CU_SUCCESS) {
    *operation = "cuMemSetAccess";
    code = scope->cu->cuMemSetAccess(at, nbytes, &access, 1);
    if (code != KVS_CU_SUCCESS) (void)scope->cu->cuMemUnmap(at, nbytes);
  }
  (void)scope->cu->cuMemRelease(chunk);
  return code;
}

int kvs_cuda_chunk_map(struct kvs_device *device, uint64_t at, uint64_t nbytes, int fd, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  const struct kvs_cu_chunk_kind kind = kind_of(device);
  const char *operation = fd < 0 ? "cuMemCreate" : "cuMemImportFromShareableHandle";
  kvs_cu_chunk chunk = 0;
  int status = enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = fd < 0 ? scope.cu->cuMemCreate(&chunk, nbytes, &kind, 0)
                    : scope.cu->cuMemImportFromShareableHandle(&chunk, (void *)(intptr_t)fd, KVS_CU_CHUNK_DESCRIPTOR);
  if (code == KVS_CU_SUCCESS) code = map_chunk(&scope, chunk, at, nbytes, &operation);
  return kvs_cuda_leave(&scope, code, operation, err);
}

int kvs_cuda_chunk_unmap(struct kvs_device *device, uint64_t at, uint64_t nbytes, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = enter(&scope, device, err);
  if (status != KVS_OK) return status;
  return kvs_cuda_leave(&scope, scope.cu->cuMemUnmap(at, nbytes), "cuMemUnmap", err);
}

/* The driver identifies a chunk by its handle only, and returns handles for mapped memory only. */
int kvs_cuda_chunk_query(struct kvs_device *device, uint64_t address, uint64_t *base, uint64_t *nbytes,
                         struct kvs_error *err) {
  int attributes[] = {KVS_CU_POINTER_MAPPING_BASE, KVS_CU_POINTER_MAPPING_NBYTES};
  uint64_t values[2] = {0};
  void *places[] = {&values[0], &values[1]};
  struct kvs_cuda_scope scope;
  kvs_cu_chunk chunk = 0;
  const char *operation = "cuMemRetainAllocationHandle";
  int status = enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuMemRetainAllocationHandle(&chunk, kvs_cuda_pointer_of(address));
  if (code == KVS_CU_SUCCESS) {
    (void)scope.cu->cuMemRelease(chunk);
    operation = "cuPointerGetAttributes";
    code = scope.cu->cuPointerGetAttributes(2, attributes, places, address);
  }
  status = kvs_cuda_leave(&scope, code, operation, err);
  if (status != KVS_OK) return status;
  if (address - values[0] >= values[1])
    return kvs_fail(err, KVS_UNSUPPORTED, "this CUDA driver does not say where the chunk of 0x%" PRIx64 " begins",
                    address);
  *base = values[0];
  *nbytes = values[1];
  return KVS_OK;
}

int kvs_cuda_chunk_share(struct kvs_device *device, uint64_t address, int *fd, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  kvs_cu_chunk chunk = 0;
  const char *operation = "cuMemRetainAllocationHandle";
  int made = -1, status = enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuMemRetainAllocationHandle(&chunk, kvs_cuda_pointer_of(address));
  if (code == KVS_CU_SUCCESS) {
    operation = "cuMemExportToShareableHandle";
    code = scope.cu->cuMemExportToShareableHandle(&made, chunk, KVS_CU_CHUNK_DESCRIPTOR, 0);
    (void)scope.cu->cuMemRelease(chunk);
  }
  status = kvs_cuda_leave(&scope, code, operation, err);
  if (status == KVS_OK) *fd = made;
  return status;
}
