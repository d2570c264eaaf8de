/* The scope of a driver call; scope.h says what it restores. */
#include "cuda/scope.h"

int kvs_cuda_device_get(const struct kvs_cuda_driver *cu, int ordinal, kvs_cu_device *handle, struct kvs_error *err) {
  int count = 0;
  int status = kvs_cuda_result(cu, cu->cuDeviceGetCount(&count), "cuDeviceGetCount", err);
  if (status != KVS_OK) return status;
  if (ordinal < 0 || ordinal >= count)
    return kvs_fail(
        err, KVS_UNSUPPORTED,
        "cuda:%d: this process sees %d CUDA device%s (kvswap info lists them; CUDA_VISIBLE_DEVICES may hide others)",
        ordinal, count, count == 1 ? "" : "s");
  return kvs_cuda_result(cu, cu->cuDeviceGet(handle, ordinal), "cuDeviceGet", err);
}

int kvs_cuda_enter(struct kvs_cuda_scope *scope, struct kvs_device *device, struct kvs_error *err) {
  kvs_cu_context popped = NULL;
  scope->device = (struct kvs_cuda_device *)device;
  scope->cu = scope->device->cu;
  scope->mode = KVS_CU_CAPTURE_MODE_RELAXED;
  int code = scope->cu->cuCtxPushCurrent(scope->device->context);
  if (code != KVS_CU_SUCCESS) return kvs_cuda_result(scope->cu, code, "cuCtxPushCurrent", err);
  code = scope->cu->cuThreadExchangeStreamCaptureMode(&scope->mode);
  if (code == KVS_CU_SUCCESS) return KVS_OK;
  (void)scope->cu->cuCtxPopCurrent(&popped); /* the first error is reported */
  return kvs_cuda_result(scope->cu, code, "cuThreadExchangeStreamCaptureMode", err);
}

int kvs_cuda_leave(struct kvs_cuda_scope *scope, int code, const char *operation, struct kvs_error *err) {
  kvs_cu_context popped = NULL;
  int restored = scope->cu->cuThreadExchangeStreamCaptureMode(&scope->mode);
  int left = scope->cu->cuCtxPopCurrent(&popped);
  /* The operation's own result has precedence: a queued operation must not be reported as refused. */
  if (code == KVS_CU_SUCCESS && kvs_cuda_status(restored) == KVS_LOST)
    return kvs_cuda_result(scope->cu, restored, "cuThreadExchangeStreamCaptureMode", err);
  if (code == KVS_CU_SUCCESS && kvs_cuda_status(left) == KVS_LOST)
    return kvs_cuda_result(scope->cu, left, "cuCtxPopCurrent", err);
  return kvs_cuda_result(scope->cu, code, operation, err);
}
