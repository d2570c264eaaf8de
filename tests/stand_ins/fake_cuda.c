/* A libcuda.so.1 for tests on machines without one: GPUs that open, know their memory, and do nothing else. The
 * environment says how many (FAKE_CUDA_GPUS, 2), which CUDA it is for (FAKE_CUDA_VERSION, 13000), what loading
 * kernels returns (FAKE_CUDA_LOAD, 0), whether it is printed how much shared memory kernels may take and are launched
 * with (FAKE_CUDA_SHARED, 0), how many queries find a stream busy behind an event that it waits for (FAKE_CUDA_BUSY,
 * 0), whether a wait for a word in memory is printed (FAKE_CUDA_WORDS, 0), how many streams can be made
 * (FAKE_CUDA_STREAMS, 1000), and the clock of the GPUs' memory (FAKE_CUDA_MEMORY_KHZ, 2619000, an H100's; below 0 the
 * query fails), and whether they reach each other's memory (FAKE_CUDA_PEERS, 1). A copy prints whether its stream is
 * busy. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PITCH = 11, MEMORY_KHZ = 36, MEMORY_BITS = 37, CC_MAJOR = 75, CC_MINOR = 76, SHARED_OPTIN = 97 };
enum { DYNAMIC_SHARED = 8, SHARED_BY_DEFAULT = 48 << 10 };
enum { INVALID_VALUE = 1, UNSUPPORTED_PTX = 222, NOT_FOUND = 500, NOT_READY = 600 };
enum { MEMORY_TYPE = 2, DEVICE_POINTER = 3, RANGE_START = 11, RANGE_NBYTES = 12, OF_HOST = 1, OF_DEVICE = 2 };

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
  *count = number_of("FAKE_CUDA_GPUS", 2);
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
  switch (attribute) {
  case CC_MAJOR:
    *value = 9;
    return 0;
  case CC_MINOR:
    *value = 0;
    return 0;
  case MAX_PITCH:
    *value = INT32_MAX;
    return 0;
  case MEMORY_KHZ:
    *value = number_of("FAKE_CUDA_MEMORY_KHZ", 2619000);
    return *value < 0 ? INVALID_VALUE : 0;
  case MEMORY_BITS:
    *value = 5120;
    return 0;
  case SHARED_OPTIN:
    *value = 227 << 10;
    return 0;
  default:
    *value = 1;
    return 0;
  }
}

static int make_handle(void **handle) {
  *handle = (void *)next_handle();
  return 0;
}

static int make_stream(void **handle) {
  static int made;
  return ++made > number_of("FAKE_CUDA_STREAMS", 1000) ? 2 : make_handle(handle);
}

static int get_context(void **context) {
  *context = (void *)0x1;
  return 0;
}

static int can_reach(int *can, int device, int other) {
  (void)device, (void)other;
  *can = number_of("FAKE_CUDA_PEERS", 1);
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

static unsigned allowed = SHARED_BY_DEFAULT; /* of the kernel that has asked for more: there is one */

static int set_function(void *function, int attribute, int value) {
  (void)function;
  if (attribute != DYNAMIC_SHARED) return INVALID_VALUE;
  allowed = (unsigned)value;
  if (number_of("FAKE_CUDA_SHARED", 0)) printf("%u bytes of shared memory allowed\n", allowed), fflush(stdout);
  return 0;
}

static int launch(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared, void *stream, void **params, void **extra) {
  (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
  (void)stream, (void)params, (void)extra;
  if (number_of("FAKE_CUDA_SHARED", 0)) printf("launched with %u\n", shared), fflush(stdout);
  return shared > allowed && shared > SHARED_BY_DEFAULT ? INVALID_VALUE : 0;
}

static int error_name(int code, const char **name) {
  *name = code == UNSUPPORTED_PTX ? "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" : "CUDA_ERROR_OTHER";
  return 0;
}

static struct {
  uint64_t base, nbytes, type;
} ranges[256]; /* what was allocated last; freed memory is never reused, so its addresses come once */
static unsigned nranges;

static int alloc_of(uint64_t *ptr, size_t nbytes, uint64_t type) {
  nbytes = (nbytes + 4095) / 4096 * 4096;
  *ptr = (uint64_t)(uintptr_t)aligned_alloc(4096, nbytes);
  unsigned i = __atomic_fetch_add(&nranges, 1, __ATOMIC_RELAXED) % 256;
  ranges[i].base = *ptr, ranges[i].nbytes = nbytes, ranges[i].type = type;
  return *ptr ? 0 : 2;
}

static int alloc(uint64_t *ptr, size_t nbytes) { return alloc_of(ptr, nbytes, OF_DEVICE); }

static int alloc_host(void **ptr, size_t nbytes, unsigned flags) {
  (void)flags;
  return alloc_of((uint64_t *)ptr, nbytes, OF_HOST);
}

static int pointer(unsigned count, int *attributes, void **values, uint64_t ptr) {
  for (unsigned range = 0; range < 256; range++) {
    if (ptr - ranges[range].base >= ranges[range].nbytes) continue;
    for (unsigned i = 0; i < count; i++) {
      uint64_t *value = values[i];
      if (attributes[i] == MEMORY_TYPE) *value = ranges[range].type;
      if (attributes[i] == DEVICE_POINTER) *value = ptr;
      if (attributes[i] == RANGE_START) *value = ranges[range].base;
      if (attributes[i] == RANGE_NBYTES) *value = ranges[range].nbytes;
    }
    return 0;
  }
  return INVALID_VALUE;
}

static int busy;

static int stream_wait(void *stream, void *event, unsigned flags) {
  (void)stream, (void)event, (void)flags;
  busy = number_of("FAKE_CUDA_BUSY", 0);
  return 0;
}

static int stream_query(void *stream) {
  (void)stream;
  return busy && busy-- ? NOT_READY : 0;
}

static int copy(uint64_t dst, uint64_t src, size_t nbytes, void *stream) {
  (void)dst, (void)src, (void)stream;
  printf("%zu bytes copied %s\n", nbytes, busy ? "early" : "in their turn");
  fflush(stdout);
  return 0;
}

static int write_word(void *stream, uint64_t ptr, uint32_t value, unsigned flags) {
  (void)stream, (void)flags;
  *(uint32_t *)(uintptr_t)ptr = value;
  return 0;
}

static int wait_word(void *stream, uint64_t ptr, uint32_t value, unsigned flags) {
  (void)stream;
  if (number_of("FAKE_CUDA_WORDS", 0))
    printf("wait until %u >= %u%s\n", *(uint32_t *)(uintptr_t)ptr, value, flags ? "?" : "");
  fflush(stdout);
  return 0;
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
    {"cuDeviceCanAccessPeer", can_reach},
    {"cuDevicePrimaryCtxRetain", make_handle},
    {"cuCtxGetCurrent", get_context},
    {"cuCtxPopCurrent", get_context},
    {"cuCtxGetDevice", get_own_device},
    {"cuCtxGetStreamPriorityRange", get_priorities},
    {"cuModuleLoadData", load_module},
    {"cuModuleGetFunction", make_handle},
    {"cuFuncSetAttribute", set_function},
    {"cuLaunchKernel", launch},
    {"cuGetErrorName", error_name},
    {"cuGetErrorString", error_name},
    {"cuMemAlloc", alloc},
    {"cuMemHostAlloc", alloc_host},
    {"cuPointerGetAttributes", pointer},
    {"cuStreamCreateWithPriority", make_stream},
    {"cuStreamGetId", stream_id},
    {"cuStreamWaitEvent", stream_wait},
    {"cuStreamQuery", stream_query},
    {"cuStreamWriteValue32", write_word},
    {"cuStreamWaitValue32", wait_word},
    {"cuMemcpyAsync", copy},
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
