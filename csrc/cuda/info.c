/* Properties of CUDA devices without creating a context, which would cost hundreds of MiB on each device. */
#include "cuda/info.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "cuda/memory.h"
#include "cuda/scope.h"

int kvs_cuda_count(int *count, struct kvs_error *err) {
  *count = 0;
  const struct kvs_cuda_driver *cu = kvs_cuda_driver_get(err);
  if (!cu) return KVS_OK; /* *err has the reason */
  return kvs_cuda_result(cu, cu->cuDeviceGetCount(count), "cuDeviceGetCount", err);
}

static int numa_node(const char *pci) {
  char path[96];
  int node = -1;
  snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", pci);
  FILE *file = fopen(path, "re");
  if (!file) return -1;
  if (fscanf(file, "%d", &node) != 1) node = -1;
  fclose(file);
  return node;
}

static int read_attributes(const struct kvs_cuda_driver *cu, kvs_cu_device handle, struct kvs_device_info *info,
                           struct kvs_error *err) {
  int pitch = 0;
  const struct {
    int attribute, *value;
  } wanted[] = {
      {KVS_CU_DEVICE_MAX_PITCH, &pitch},
      {KVS_CU_DEVICE_SMS, &info->sms},
      {KVS_CU_DEVICE_SHARED_OPTIN, &info->shared_nbytes},
      {KVS_CU_DEVICE_COPY_ENGINES, &info->copy_engines},
      {KVS_CU_DEVICE_CC_MAJOR, &info->cc_major},
      {KVS_CU_DEVICE_CC_MINOR, &info->cc_minor},
  };
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    int code = cu->cuDeviceGetAttribute(wanted[i].value, wanted[i].attribute, handle);
    if (code != KVS_CU_SUCCESS) return kvs_cuda_result(cu, code, "cuDeviceGetAttribute", err);
  }
  info->max_pitch = pitch < 0 ? 0 : (uint64_t)pitch;
  return KVS_OK;
}

/* Two transfers a clock. 0: the driver does not say. */
static int memory_gbps(const struct kvs_cuda_driver *cu, kvs_cu_device handle) {
  int khz = 0, bits = 0;
  if (cu->cuDeviceGetAttribute(&khz, KVS_CU_DEVICE_MEMORY_KHZ, handle) != KVS_CU_SUCCESS) return 0;
  if (cu->cuDeviceGetAttribute(&bits, KVS_CU_DEVICE_MEMORY_BITS, handle) != KVS_CU_SUCCESS) return 0;
  return (int)((int64_t)2 * khz * bits / 8 / 1000000);
}

int kvs_cuda_info(int ordinal, struct kvs_device_info *info, struct kvs_error *err) {
  const struct kvs_cuda_driver *cu = kvs_cuda_driver_get(err);
  kvs_cu_device handle = 0;
  struct kvs_cu_uuid uuid = {{0}};
  size_t memory = 0;
  memset(info, 0, sizeof *info);
  if (!cu) return err->status;
  int status = kvs_cuda_device_get(cu, ordinal, &handle, err);
  if (status == KVS_OK)
    status =
        kvs_cuda_result(cu, cu->cuDeviceGetName(info->name, (int)sizeof info->name, handle), "cuDeviceGetName", err);
  if (status == KVS_OK)
    status = kvs_cuda_result(cu, cu->cuDeviceGetPCIBusId(info->pci, (int)sizeof info->pci, handle),
                             "cuDeviceGetPCIBusId", err);
  if (status == KVS_OK) status = kvs_cuda_result(cu, cu->cuDeviceGetUuid(&uuid, handle), "cuDeviceGetUuid", err);
  if (status == KVS_OK) status = kvs_cuda_result(cu, cu->cuDeviceTotalMem(&memory, handle), "cuDeviceTotalMem", err);
  if (status == KVS_OK) status = read_attributes(cu, handle, info, err);
  if (status != KVS_OK) return status;
  for (char *c = info->pci; *c; c++) *c = (char)tolower((unsigned char)*c); /* sysfs uses lower case */
  memcpy(info->uuid, uuid.bytes, sizeof info->uuid);
  info->memory = memory;
  info->memory_gbps = memory_gbps(cu, handle);
  info->driver = cu->version;
  info->numa_node = numa_node(info->pci);
  info->batch = cu->cuMemcpyBatchAsync || cu->cuMemcpyBatchAsync_12080;
  snprintf(info->kernels_note, sizeof info->kernels_note, "not loaded: the device is not open");
  return KVS_OK;
}

int kvs_cuda_can_reach(int ordinal, int other, bool *can, struct kvs_error *err) {
  const struct kvs_cuda_driver *cu = kvs_cuda_driver_get(err);
  kvs_cu_device handles[2];
  int value = 0;
  *can = false;
  if (!cu) return err->status;
  int status = kvs_cuda_device_get(cu, ordinal, &handles[0], err);
  if (status == KVS_OK) status = kvs_cuda_device_get(cu, other, &handles[1], err);
  if (status != KVS_OK || !cu->cuDeviceCanAccessPeer) return status;
  status = kvs_cuda_result(cu, cu->cuDeviceCanAccessPeer(&value, handles[0], handles[1]), "cuDeviceCanAccessPeer", err);
  *can = value != 0;
  return status;
}

/* Makes some live primary context current; *held is its device. If the context ends between the check and the retain,
 * it is created and released again. */
static bool borrow_context(const struct kvs_cuda_driver *cu, kvs_cu_device *held) {
  int count = 0;
  if (cu->cuDeviceGetCount(&count) != KVS_CU_SUCCESS) return false;
  for (int i = 0; i < count; i++) {
    kvs_cu_context context = NULL;
    unsigned flags = 0;
    int active = 0;
    if (cu->cuDeviceGet(held, i) != KVS_CU_SUCCESS) continue;
    if (cu->cuDevicePrimaryCtxGetState(*held, &flags, &active) != KVS_CU_SUCCESS || !active) continue;
    if (cu->cuDevicePrimaryCtxRetain(&context, *held) != KVS_CU_SUCCESS) continue;
    if (cu->cuCtxPushCurrent(context) == KVS_CU_SUCCESS) return true;
    cu->cuDevicePrimaryCtxRelease(*held);
  }
  return false;
}

int kvs_cuda_pointer_device(uint64_t ptr, int *ordinal, struct kvs_error *err) {
  const struct kvs_cuda_driver *cu = kvs_cuda_driver_get(err);
  kvs_cu_context current = NULL;
  kvs_cu_device held = 0;
  struct kvs_cuda_pointer pointer;
  if (!cu) return err->status;
  int code = cu->cuCtxGetCurrent(&current);
  if (code != KVS_CU_SUCCESS) return kvs_cuda_result(cu, code, "cuCtxGetCurrent", err);
  bool borrowed = !current && borrow_context(cu, &held);
  if (!current && !borrowed)
    return kvs_fail(err, KVS_INVALID, "address 0x%llx belongs to no CUDA device: none is in use",
                    (unsigned long long)ptr);
  code = kvs_cuda_pointer_attributes(cu, ptr, &pointer);
  if (borrowed) {
    cu->cuCtxPopCurrent(&current);
    cu->cuDevicePrimaryCtxRelease(held);
  }
  if (code != KVS_CU_SUCCESS && code != KVS_CU_INVALID_VALUE)
    return kvs_cuda_result(cu, code, "cuPointerGetAttributes", err);
  if (!pointer.known || pointer.ordinal < 0 || (pointer.memory == KVS_CU_MEMORY_HOST && !pointer.managed))
    return kvs_fail(err, KVS_INVALID, "address 0x%llx belongs to no CUDA device", (unsigned long long)ptr);
  *ordinal = pointer.ordinal;
  return KVS_OK;
}

int kvs_cuda_current(int *ordinal, struct kvs_error *err) {
  const struct kvs_cuda_driver *cu = kvs_cuda_driver_get(err);
  kvs_cu_context context = NULL;
  kvs_cu_device device = 0, other = 0;
  int count = 0;
  *ordinal = 0;
  if (!cu) return err->status;
  int code = cu->cuCtxGetCurrent(&context);
  if (code != KVS_CU_SUCCESS) return kvs_cuda_result(cu, code, "cuCtxGetCurrent", err);
  if (!context) return KVS_OK;
  code = cu->cuCtxGetDevice(&device);
  if (code != KVS_CU_SUCCESS) return kvs_cuda_result(cu, code, "cuCtxGetDevice", err);
  code = cu->cuDeviceGetCount(&count);
  if (code != KVS_CU_SUCCESS) return kvs_cuda_result(cu, code, "cuDeviceGetCount", err);
  for (int i = 0; i < count; i++) /* a device handle need not equal the ordinal */
    if (cu->cuDeviceGet(&other, i) == KVS_CU_SUCCESS && other == device) *ordinal = i;
  return KVS_OK;
}
