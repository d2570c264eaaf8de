/* What tests of the host device share: opening it, memory to the byte, and checks of what its members return. */
#ifndef KVS_TEST_HOST_DEVICE_H
#define KVS_TEST_HOST_DEVICE_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "host/device.h"

enum { SEEDS = 200, MARGIN = 64, MS = 1000000 };
#define NOWHERE ((uint64_t)64) /* nothing is mapped there */

#define OK(call)                                                                                                       \
  do {                                                                                                                 \
    struct kvs_error err = {0};                                                                                        \
    int status_of_call = (call);                                                                                       \
    CHECK(status_of_call == KVS_OK, "%s", err.message);                                                                \
  } while (0)

static inline uint64_t address(const void *pointer) { return (uint64_t)(uintptr_t)pointer; }

static inline struct kvs_device *open_device(uint64_t seed) {
  struct kvs_error err;
  struct kvs_device *device = NULL;
  if (kvs_device_host_open(0, seed, &device, &err)) {
    printf("open: %s\n", err.message);
    exit(1);
  }
  return device;
}

static inline kvs_stream make_stream(struct kvs_device *device) {
  kvs_stream stream = 0;
  OK(kvs_dev_stream_create(device, 0, &stream, &err));
  return stream;
}

/* Memory to the byte: what is behind it is not there, for kernels. Freed with the device. */
static inline void *make_memory(struct kvs_device *device, size_t nbytes) {
  uint64_t ptr = 0;
  OK(kvs_dev_alloc(device, nbytes ? nbytes : 1, &ptr, &err));
  return (void *)(uintptr_t)ptr;
}

static inline void fill_random(uint64_t *random, unsigned char *bytes, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i++) bytes[i] = (unsigned char)check_random(random);
}

static inline void shuffle(uint64_t *random, uint32_t *ids, size_t count) {
  for (size_t i = 0; i < count; i++) ids[i] = (uint32_t)i;
  for (size_t i = count; i > 1; i--) {
    size_t other = check_below(random, i);
    uint32_t id = ids[i - 1];
    ids[i - 1] = ids[other];
    ids[other] = id;
  }
}

static inline uint32_t load32(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static inline uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void delay(struct kvs_device *device, uint64_t ns, kvs_stream stream) {
  struct kvs_delay_params params = {ns};
  struct kvs_launch launch = {KVS_KERNEL_DELAY, 1, 1, 0, &params, sizeof params};
  OK(kvs_dev_launch(device, &launch, stream, &err));
}

static inline void launch_copy(struct kvs_device *device, enum kvs_kernel kernel, const struct kvs_copy_params *params,
                               unsigned grid, kvs_stream stream) {
  struct kvs_launch launch = {kernel, grid, 64, 0, params, sizeof *params};
  OK(kvs_dev_launch(device, &launch, stream, &err));
}

/* A table in memory of the device. */
static inline uint64_t make_table(struct kvs_device *device, const void *entries, size_t nbytes) {
  return address(memcpy(make_memory(device, nbytes), entries, nbytes));
}

static inline void expect_lost(struct kvs_device *device, const char *what, uint64_t seed) {
  struct kvs_error err = {0};
  int status = kvs_dev_synchronize(device, &err);
  CHECK(status == KVS_LOST && err.code == KVS_DRIVER_ILLEGAL_ADDRESS, "%s, seed %d: %d %s", what, (int)seed, status,
        err.message);
}

#endif
