/* A libcuda.so.1 for tests on machines without one: two GPUs that open and do nothing. The environment says which CUDA
 * it is for (FAKE_CUDA_VERSION, 13000), and what loading kernels returns (FAKE_CUDA_LOAD, 0). */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PITCH = 11, CC_MAJOR = 75, CC_MINOR = 76, INVALID_VALUE = 1, NOT_FOUND = 500, UNSUPPORTED_PTX = 222 };

static int number_of(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

static uintptr_t next_handle(void) {
  static uintptr_t handles = 0x1000;
  return __atomic_add_fetch(&handles, 16, __ATOMIC_RELAXED);
}

static int nothing(void) { return 0; }

static int get_count(int *count) {
  *count = 2;
  return 0;
}

static int get_device(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}

static int get_name(char *name, int nbytes, int device) {
  snprintf(name, (size_t)nbytes, "Fake GPU %d", device);
  return 0;
}

static int get_pci(char *id, int nbytes, int device) {
  snprintf(id, (size_t)nbytes, "0000:%02X:00.0", device + 1);
  return 0;
}

static int get_uuid(unsigned char *uuid, int device) {
  memset(uuid, device + 1, 16);
  return 0;
}

static int get_memory(size_t *nbytes, int device) {
  (void)device;
  *nbytes = (size_t)80 << 30;
  return 0;
}

static int get_attribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == CC_MAJOR ? 9 : attribute == CC_MINOR ? 0 : attribute == MAX_PITCH ? INT32_MAX : 1;
  return 0;
}

static int make_handle(void **handle) {
  *handle = (void *)next_handle();
  return 0;
}

static int get_context(void **context) {
  *context = (void *)0x1;
  return 0;
}

static int get_own_device(int *device) {
  *device = 0;
  return 0;
}

static int get_priorities(int *low, int *high) {
  *low = 0;
  *high = -5;
  return 0;
}

static int load_module(void **module, const void *image) {
  (void)image;
  *module = (void *)next_handle();
  return number_of("FAKE_CUDA_LOAD", 0);
}

static int error_name(int code, const char **name) {
  *name = code == UNSUPPORTED_PTX ? "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" : "CUDA_ERROR_OTHER";
  return 0;
}

static int alloc(uint64_t *ptr, size_t nbytes) {
  void *memory = aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  *ptr = (uint64_t)(uintptr_t)memory;
  return memory ? 0 : 2;
}

static int alloc_host(void **ptr, size_t nbytes, unsigned flags) {
  (void)flags;
  return alloc((uint64_t *)ptr, nbytes);
}

static int release(void *ptr) {
  free(ptr);
  return 0;
}

static int pointer(unsigned count, int *attributes, void **values, uint64_t ptr) {
  (void)count, (void)attributes, (void)values, (void)ptr;
  return INVALID_VALUE;
}

static int stream_id(void *stream, unsigned long long *id) {
  *id = (uintptr_t)stream;
  return 0;
}

static int elapsed(float *ms, void *from, void *to) {
  (void)from, (void)to;
  *ms = 1;
  return 0;
}

static int not_capturing(void *stream, int *status) {
  (void)stream;
  *status = 0;
  return 0;
}

static const struct {
  const char *name;
  void *function;
} entries[] = {
    {"cuDeviceGetCount", get_count},
    {"cuDeviceGet", get_device},
    {"cuDeviceGetName", get_name},
    {"cuDeviceGetPCIBusId", get_pci},
    {"cuDeviceGetUuid", get_uuid},
    {"cuDeviceTotalMem", get_memory},
    {"cuDeviceGetAttribute", get_attribute},
    {"cuDevicePrimaryCtxRetain", make_handle},
    {"cuCtxGetCurrent", get_context},
    {"cuCtxPopCurrent", get_context},
    {"cuCtxGetDevice", get_own_device},
    {"cuCtxGetStreamPriorityRange", get_priorities},
    {"cuModuleLoadData", load_module},
    {"cuModuleGetFunction", make_handle},
    {"cuGetErrorName", error_name},
    {"cuGetErrorString", error_name},
    {"cuMemAlloc", alloc},
    {"cuMemHostAlloc", alloc_host},
    {"cuMemFree", release},
    {"cuMemFreeHost", release},
    {"cuPointerGetAttributes", pointer},
    {"cuStreamCreateWithPriority", make_handle},
    {"cuStreamGetId", stream_id},
    {"cuStreamIsCapturing", not_capturing},
    {"cuEventCreate", make_handle},
    {"cuEventElapsedTime", elapsed},
};

int cuDriverGetVersion(int *version) {
  *version = number_of("FAKE_CUDA_VERSION", 13000);
  return 0;
}

int cuGetProcAddress_v2(const char *name, void **entry, int version, unsigned long long flags, int *status) {
  (void)flags;
  *status = 0;
  *entry = (void *)nothing;
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
    if (strcmp(entries[i].name, name) == 0) *entry = entries[i].function;
  return version <= number_of("FAKE_CUDA_VERSION", 13000) ? 0 : NOT_FOUND;
}
