/* Loads the embedded kernels and launches them.
 *
 * All kernels are loaded at open. With lazy loading, the first launch of a kernel waits for the whole device: a
 * deadlock if a running kernel waits for that launch. */
#include "cuda/kernels.h"

#include <stdio.h>

#include "cuda/fatbin.h"

enum { RING_NBYTES = KVS_RING_WARPS * KVS_RING_STAGES * KVS_RING_CHUNK };

static const struct {
  const char *symbol;
  size_t params_nbytes;
} kernels[KVS_KERNELS] = {
#define X(name, symbol, params) [KVS_KERNEL_##name] = {#symbol, sizeof(struct params)},
    KVS_KERNEL_LIST(X)
#undef X
};

static int load_functions(struct kvs_cuda_device *device, const char **operation) {
  const struct kvs_cuda_driver *cu = device->cu;
  for (int i = 0; i < KVS_KERNELS; i++) {
    *operation = "cuModuleGetFunction";
    int code = cu->cuModuleGetFunction(&device->functions[i], device->module, kernels[i].symbol);
    if (code != KVS_CU_SUCCESS) return code;
    *operation = "cuFuncLoad";
    if (cu->cuFuncLoad) code = cu->cuFuncLoad(device->functions[i]);
    if (code != KVS_CU_SUCCESS) return code;
  }
  return KVS_CU_SUCCESS;
}

/* More than 48 KiB of dynamic shared memory have to be allowed, by a setting of the kernel. If each launch set what it
 * takes, a launch of fewer bytes in another thread could take the permission away before this one's launch. */
static int allow_shared(struct kvs_cuda_device *device, const char **operation) {
  int nbytes = device->base.info.shared_nbytes < RING_NBYTES ? RING_NBYTES / 2 : RING_NBYTES; /* half: half the warps */
  *operation = "cuFuncSetAttribute";
  return device->cu->cuFuncSetAttribute(device->functions[KVS_KERNEL_RING], KVS_CU_FUNCTION_DYNAMIC_SHARED, nbytes);
}

void kvs_cuda_kernels_load(struct kvs_cuda_device *device) {
  struct kvs_device_info *info = &device->base.info;
  const char *operation = "cuModuleLoadData", *name = NULL;
  info->kernels = false;
  if (kvs_fatbin_nbytes == 0) {
    snprintf(info->kernels_note, sizeof info->kernels_note, "built without nvcc");
    return;
  }
  int code = device->cu->cuModuleLoadData(&device->module, kvs_fatbin);
  if (code != KVS_CU_SUCCESS) device->module = NULL;
  if (code == KVS_CU_SUCCESS) code = load_functions(device, &operation);
  if (code == KVS_CU_SUCCESS) code = allow_shared(device, &operation);
  if (code == KVS_CU_SUCCESS) {
    info->kernels = true;
    snprintf(info->kernels_note, sizeof info->kernels_note, "%s", kvs_fatbin_archs);
    return;
  }
  kvs_cuda_kernels_unload(device);
  if (device->cu->cuGetErrorName(code, &name) != KVS_CU_SUCCESS || !name) name = "?";
  snprintf(info->kernels_note, sizeof info->kernels_note, "%s on sm_%d%d: %s (%d); built for %s", operation,
           info->cc_major, info->cc_minor, name, code, kvs_fatbin_archs);
}

void kvs_cuda_kernels_unload(struct kvs_cuda_device *device) {
  if (device->module) (void)device->cu->cuModuleUnload(device->module); /* a failure has no consequence */
  device->module = NULL;
}

int kvs_cuda_launch(struct kvs_device *base, const struct kvs_launch *launch, kvs_stream stream,
                    struct kvs_error *err) {
  struct kvs_cuda_device *device = (struct kvs_cuda_device *)base;
  struct kvs_cuda_scope scope;
  void *params[] = {(void *)(uintptr_t)launch->params}; /* the driver copies the parameters */
  static const char operation[] = "cuLaunchKernel";
  if (!device->module)
    return kvs_fail(err, KVS_UNSUPPORTED, "kernels are not available on this device: %s", base->info.kernels_note);
  bool whole_warps = launch->kernel == KVS_KERNEL_DELAY || launch->threads % 32 == 0; /* the others use shuffles */
  if (launch->params_nbytes != kernels[launch->kernel].params_nbytes || !whole_warps)
    return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, operation,
                           "%s: %zu bytes of parameters, %u threads", kernels[launch->kernel].symbol,
                           launch->params_nbytes, launch->threads);
  int status = kvs_cuda_enter(&scope, base, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuLaunchKernel(device->functions[launch->kernel], launch->grid, 1, 1, launch->threads, 1, 1,
                                      launch->shared_nbytes, kvs_cuda_stream(stream), params, NULL);
  return kvs_cuda_leave(&scope, code, operation, err);
}
