/* Loads the driver and fills its table.
 *
 * Order: dlopen of libcuda.so.1, which the driver installs (libcuda.so is the toolkit's link); dlsym of
 * cuGetProcAddress_v2, or before CUDA 12 of cuGetProcAddress, which has one argument less; then every entry by name and
 * version. Requesting an entry newer than the driver's version is an error, so such entries stay NULL and no entry has
 * another prototype than declared. */
#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

typedef int (*find_v12)(const char *symbol, void **entry, int version, uint64_t flags, int *status);
typedef int (*find_v11)(const char *symbol, void **entry, int version, uint64_t flags);

struct finder {
  find_v12 v12;
  find_v11 v11; /* used if v12 is NULL */
};

/* ISO C does not allow casting an object pointer to a function pointer; POSIX guarantees the same representation. */
static void set_entry(void *member, void *entry) { memcpy(member, &entry, sizeof entry); }

static void *find_entry(const struct finder *finder, const char *symbol, int version) {
  void *entry = NULL;
  int status = 0;
  int code = finder->v12 ? finder->v12(symbol, &entry, version, KVS_CU_PROC_LEGACY_STREAM, &status)
                         : finder->v11(symbol, &entry, version, KVS_CU_PROC_LEGACY_STREAM);
  return code == KVS_CU_SUCCESS ? entry : NULL;
}

static int fill_table(const struct finder *finder, struct kvs_cuda_driver *driver, struct kvs_error *err) {
  static const struct {
    const char *symbol;
    size_t offset;
    int version;
    bool required;
  } entries[] = {
#define REQUIRED true
#define OPTIONAL false
#define X(need, member, name, since, arguments) {name, offsetof(struct kvs_cuda_driver, member), since, need},
      KVS_CUDA_ENTRIES(X)
#undef X
#undef REQUIRED
#undef OPTIONAL
  };
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
    void *entry = NULL;
    if (entries[i].version <= driver->version) entry = find_entry(finder, entries[i].symbol, entries[i].version);
    if (!entry && entries[i].required)
      return kvs_fail(err, KVS_UNSUPPORTED,
                      "the CUDA driver (for CUDA %d.%d) has no %s as of CUDA %d.%d: its installation is damaged",
                      driver->version / 1000, driver->version % 1000 / 10, entries[i].symbol, entries[i].version / 1000,
                      entries[i].version % 1000 / 10);
    set_entry((char *)driver + entries[i].offset, entry);
  }
  return KVS_OK;
}

/* The driver's CUDA version, 0 where it does not say. */
static int version_of(void *library) {
  int (*get_version)(int *version) = NULL;
  int version = 0;
  set_entry(&get_version, dlsym(library, "cuDriverGetVersion"));
  return get_version && get_version(&version) == KVS_CU_SUCCESS ? version : 0;
}

static int too_old(const char *library, int version, struct kvs_error *err) {
  return kvs_fail(err, KVS_UNSUPPORTED,
                  "the CUDA driver (%s) is for CUDA %d.%d, and kvswap needs CUDA %d.%d or newer: update the driver to "
                  "branch " KVS_CUDA_OLDEST_BRANCH " or later",
                  library, version / 1000, version % 1000 / 10, KVS_CUDA_OLDEST / 1000, KVS_CUDA_OLDEST % 1000 / 10);
}

static int load_table(const char *library, struct kvs_cuda_driver *driver, struct kvs_error *err) {
  struct finder finder = {NULL, NULL};
  driver->version = version_of(driver->library);
  if (driver->version == 0)
    return kvs_fail(err, KVS_UNSUPPORTED, "%s does not tell its version: it is no CUDA driver, or too old", library);
  if (driver->version < KVS_CUDA_OLDEST) return too_old(library, driver->version, err);
  set_entry(&finder.v12, dlsym(driver->library, "cuGetProcAddress_v2"));
  if (!finder.v12) set_entry(&finder.v11, dlsym(driver->library, "cuGetProcAddress"));
  if (!finder.v12 && !finder.v11)
    return kvs_fail(err, KVS_UNSUPPORTED,
                    "%s is for CUDA %d.%d and lacks cuGetProcAddress: the driver's installation is damaged", library,
                    driver->version / 1000, driver->version % 1000 / 10);
  return fill_table(&finder, driver, err);
}

int kvs_cuda_driver_load(const char *library, struct kvs_cuda_driver *driver, struct kvs_error *err) {
  memset(driver, 0, sizeof *driver);
  driver->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!driver->library) {
    const char *reason = dlerror();
    return kvs_fail(
        err, KVS_UNSUPPORTED,
        "there is no CUDA driver here: %.200s: install NVIDIA's driver, give the container its GPUs (docker "
        "run --gpus all), or name host:0, which needs neither",
        reason ? reason : library);
  }
  int status = load_table(library, driver, err);
  if (status != KVS_OK) {
    dlclose(driver->library);
    memset(driver, 0, sizeof *driver);
  }
  return status;
}

static struct {
  pthread_once_t once;
  struct kvs_cuda_driver driver;
  struct kvs_error error; /* KVS_OK: the driver is loaded */
} process = {.once = PTHREAD_ONCE_INIT};

static void load_once(void) {
  if (kvs_cuda_driver_load("libcuda.so.1", &process.driver, &process.error) != KVS_OK) return;
  int code = process.driver.cuInit(0);
  if (code != KVS_CU_SUCCESS) {
    kvs_cuda_result(&process.driver, code, "cuInit", &process.error);
    process.error.status = KVS_UNSUPPORTED; /* "no device" and "version mismatch" mean that CUDA is unavailable, not
                                               that a device was lost */
  }
}

const struct kvs_cuda_driver *kvs_cuda_driver_get(struct kvs_error *err) {
  pthread_once(&process.once, load_once);
  if (process.error.status == KVS_OK) return &process.driver;
  *err = process.error;
  return NULL;
}

int kvs_cuda_status(int code) {
  switch (code) {
  case KVS_CU_SUCCESS:
    return KVS_OK;
  case KVS_CU_NOT_READY:
    return KVS_NOT_READY;
  case KVS_CU_OUT_OF_MEMORY:
    return KVS_NOMEM;
  /* For these codes the driver's documentation requires ending the context or the process. */
  case KVS_CU_DEINITIALIZED:
  case KVS_CU_ECC_UNCORRECTABLE:
  case KVS_CU_NVLINK_UNCORRECTABLE:
  case KVS_CU_CONTAINED:
  case KVS_CU_ILLEGAL_ADDRESS:
  case KVS_CU_LAUNCH_TIMEOUT:
  case KVS_CU_CONTEXT_IS_DESTROYED:
  case KVS_CU_ASSERT:
  case KVS_CU_HARDWARE_STACK_ERROR:
  case KVS_CU_ILLEGAL_INSTRUCTION:
  case KVS_CU_MISALIGNED_ADDRESS:
  case KVS_CU_INVALID_ADDRESS_SPACE:
  case KVS_CU_INVALID_PC:
  case KVS_CU_LAUNCH_FAILED:
  case KVS_CU_TENSOR_MEMORY_LEAK:
  case KVS_CU_MPS_CLIENT_TERMINATED:
  case KVS_CU_EXTERNAL_DEVICE:
  /* Not documented; no later result can be trusted. */
  case KVS_CU_UNKNOWN:
    return KVS_LOST;
  default:
    return code >= KVS_CU_CAPTURE_FIRST && code <= KVS_CU_CAPTURE_LAST ? KVS_CAPTURING : KVS_REFUSED;
  }
}

int kvs_cuda_result(const struct kvs_cuda_driver *driver, int code, const char *operation, struct kvs_error *err) {
  if (code == KVS_CU_SUCCESS) return KVS_OK;
  if (code == KVS_CU_NOT_READY) { /* result of every poll: skip formatting */
    *err = (struct kvs_error){.status = KVS_NOT_READY, .code = code, .operation = operation};
    return KVS_NOT_READY;
  }
  const char *name = NULL, *text = NULL;
  if (driver->cuGetErrorName(code, &name) != KVS_CU_SUCCESS || !name) name = "an error that this driver does not name";
  if (driver->cuGetErrorString(code, &text) != KVS_CU_SUCCESS || !text) text = "no description";
  return kvs_fail_driver(err, kvs_cuda_status(code), code, operation, "%s (%s)", name, text);
}

#if defined(__has_include)
#if __has_include(<cuda.h>)
#include "cuda/abi_check.h"
#endif
#endif
