/* share.h on a GPU: sharing with other processes by the driver's IPC handles of allocations ("legacy" IPC). */
#include "cuda/share.h"

#include <string.h>

#include "cuda/memory.h"
#include "cuda/range.h"
#include "cuda/scope.h"

_Static_assert(sizeof(struct kvs_cu_ipc_handle) == sizeof(struct kvs_handle), "a handle is the driver's");

static int refuse_old(const char *what, struct kvs_error *err) {
  return kvs_fail(err, KVS_UNSUPPORTED, "this CUDA driver has no %s", what);
}

static int memory_share(struct kvs_device *device, uint64_t ptr, struct kvs_handle *handle, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  struct kvs_cu_ipc_handle made;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuIpcGetMemHandle ? scope.cu->cuIpcGetMemHandle(&made, ptr) : KVS_CU_SUCCESS;
  status = kvs_cuda_leave(&scope, code, "cuIpcGetMemHandle", err);
  if (status == KVS_OK && !scope.cu->cuIpcGetMemHandle) return refuse_old("cuIpcGetMemHandle", err);
  if (status == KVS_OK) memcpy(handle, &made, sizeof made);
  return status;
}

/* The mapped size must be at least the exported size; it may be larger, since small allocations share one driver
 * allocation. */
static int check_size(const struct kvs_cuda_driver *cu, kvs_cu_deviceptr ptr, uint64_t nbytes, struct kvs_error *err) {
  struct kvs_cuda_pointer pointer;
  int code = kvs_cuda_pointer_attributes(cu, ptr, &pointer);
  if (code != KVS_CU_SUCCESS) return kvs_cuda_result(cu, code, "cuPointerGetAttributes", err);
  if (pointer.known && ptr - pointer.base < pointer.nbytes && pointer.nbytes - (ptr - pointer.base) >= nbytes)
    return KVS_OK;
  return kvs_fail_driver(err, KVS_REFUSED, KVS_CU_INVALID_VALUE, "cuIpcOpenMemHandle",
                         "the allocation has %llu bytes, not %llu", (unsigned long long)pointer.nbytes,
                         (unsigned long long)nbytes);
}

static int memory_open(struct kvs_device *device, const struct kvs_handle *handle, uint64_t nbytes, uint64_t *ptr,
                       struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  struct kvs_cu_ipc_handle given;
  struct kvs_error wrong = {.status = KVS_OK};
  kvs_cu_deviceptr made = 0;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  bool there = scope.cu->cuIpcOpenMemHandle && scope.cu->cuIpcCloseMemHandle;
  memcpy(&given, handle, sizeof given);
  int code = there ? scope.cu->cuIpcOpenMemHandle(&made, given, KVS_CU_IPC_LAZY_PEER_ACCESS) : KVS_CU_SUCCESS;
  if (there && code == KVS_CU_SUCCESS && check_size(scope.cu, made, nbytes, &wrong) != KVS_OK)
    (void)scope.cu->cuIpcCloseMemHandle(made);
  status = kvs_cuda_leave(&scope, code, "cuIpcOpenMemHandle", err);
  if (status != KVS_OK) return status;
  if (!there) return refuse_old("cuIpcOpenMemHandle", err);
  if (wrong.status != KVS_OK) {
    *err = wrong;
    return wrong.status;
  }
  *ptr = made;
  return KVS_OK;
}

static int memory_close(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuCtxSynchronize(); /* the driver does not document that closing waits */
  if (code != KVS_CU_SUCCESS) return kvs_cuda_leave(&scope, code, "cuCtxSynchronize", err);
  code = scope.cu->cuIpcCloseMemHandle ? scope.cu->cuIpcCloseMemHandle(ptr) : KVS_CU_INVALID_VALUE;
  return kvs_cuda_leave(&scope, code, "cuIpcCloseMemHandle", err);
}

static int event_create_shared(struct kvs_device *device, kvs_event *event, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  kvs_cu_event made = NULL;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuEventCreate(&made, KVS_CU_EVENT_DISABLE_TIMING | KVS_CU_EVENT_INTERPROCESS);
  status = kvs_cuda_leave(&scope, code, "cuEventCreate", err);
  if (status == KVS_OK) *event = (uintptr_t)made;
  return status;
}

static int event_share(struct kvs_device *device, kvs_event event, struct kvs_handle *handle, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  struct kvs_cu_ipc_handle made;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  bool there = scope.cu->cuIpcGetEventHandle;
  int code = there ? scope.cu->cuIpcGetEventHandle(&made, kvs_cuda_event(event)) : KVS_CU_SUCCESS;
  status = kvs_cuda_leave(&scope, code, "cuIpcGetEventHandle", err);
  if (status == KVS_OK && !there) return refuse_old("cuIpcGetEventHandle", err);
  if (status == KVS_OK) memcpy(handle, &made, sizeof made);
  return status;
}

static int event_open(struct kvs_device *device, const struct kvs_handle *handle, kvs_event *event,
                      struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  struct kvs_cu_ipc_handle given;
  kvs_cu_event made = NULL;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  bool there = scope.cu->cuIpcOpenEventHandle;
  memcpy(&given, handle, sizeof given);
  int code = there ? scope.cu->cuIpcOpenEventHandle(&made, given) : KVS_CU_SUCCESS;
  status = kvs_cuda_leave(&scope, code, "cuIpcOpenEventHandle", err);
  if (status == KVS_OK && !there) return refuse_old("cuIpcOpenEventHandle", err);
  if (status == KVS_OK) *event = (uintptr_t)made;
  return status;
}

/* -- other GPUs ------------------------------------------------------------------------------------------------ */

/* Call inside a scope. Peer access lasts as long as both contexts, so the other context stays retained. */
static enum kvs_cuda_peer enable_peer(struct kvs_cuda_device *device, int ordinal) {
  const struct kvs_cuda_driver *cu = device->cu;
  kvs_cu_device handle;
  kvs_cu_context context;
  int can = 0;
  if (!cu->cuDeviceCanAccessPeer || !cu->cuCtxEnablePeerAccess || cu->cuDeviceGet(&handle, ordinal) != KVS_CU_SUCCESS)
    return KVS_CUDA_PEER_STAGED;
  if (cu->cuDeviceCanAccessPeer(&can, device->handle, handle) != KVS_CU_SUCCESS || !can) return KVS_CUDA_PEER_STAGED;
  if (cu->cuDevicePrimaryCtxRetain(&context, handle) != KVS_CU_SUCCESS) return KVS_CUDA_PEER_STAGED;
  int code = cu->cuCtxEnablePeerAccess(context, 0);
  return code == KVS_CU_SUCCESS || code == KVS_CU_PEER_ALREADY_ENABLED ? KVS_CUDA_PEER_DIRECT : KVS_CUDA_PEER_STAGED;
}

/* Peer access does not cover memory mapped by cuMemMap (torch's expandable segments): its owner sets the access rights
 * of each device. */
static bool mapped_for(const struct kvs_cuda_device *device, uint64_t ptr) {
  const struct kvs_cuda_driver *cu = device->cu;
  const struct kvs_cu_location here = {KVS_CU_LOCATION_DEVICE, device->base.ordinal};
  unsigned long long flags = 0;
  kvs_cu_chunk chunk;
  if (!cu->cuMemRetainAllocationHandle || !cu->cuMemRelease || !cu->cuMemGetAccess) return true;
  if (cu->cuMemRetainAllocationHandle(&chunk, kvs_cuda_pointer_of(ptr)) != KVS_CU_SUCCESS) return true;
  (void)cu->cuMemRelease(chunk);
  return cu->cuMemGetAccess(&flags, &here, ptr) == KVS_CU_SUCCESS && flags == KVS_CU_ACCESS_READWRITE;
}

static int peer(struct kvs_device *base, const struct kvs_region *region, bool *direct, struct kvs_error *err) {
  struct kvs_cuda_device *device = (struct kvs_cuda_device *)base;
  struct kvs_cuda_scope scope;
  int ordinal = region->device;
  *direct = false;
  if (ordinal < 0 || ordinal >= KVS_CUDA_PEERS) return KVS_OK;
  int status = kvs_cuda_enter(&scope, base, err);
  if (status != KVS_OK) return status;
  enum kvs_cuda_peer known = atomic_load(&device->peers[ordinal]);
  if (known == KVS_CUDA_PEER_UNKNOWN) { /* concurrent threads compute the same value */
    known = enable_peer(device, ordinal);
    atomic_store(&device->peers[ordinal], (unsigned char)known);
  }
  *direct = known == KVS_CUDA_PEER_DIRECT && mapped_for(device, region->base);
  return kvs_cuda_leave(&scope, KVS_CU_SUCCESS, "cuCtxEnablePeerAccess", err);
}

const struct kvs_share_ops kvs_cuda_share_ops = {
    .memory_share = memory_share,
    .memory_open = memory_open,
    .memory_close = memory_close,
    .event_create_shared = event_create_shared,
    .event_share = event_share,
    .event_open = event_open,
    .chunk_granularity = kvs_cuda_chunk_granularity,
    .range_reserve = kvs_cuda_range_reserve,
    .range_free = kvs_cuda_range_free,
    .chunk_map = kvs_cuda_chunk_map,
    .chunk_unmap = kvs_cuda_chunk_unmap,
    .chunk_query = kvs_cuda_chunk_query,
    .chunk_share = kvs_cuda_chunk_share,
    .peer = peer,
};
