/* The engine on host devices: order, completion, failure, limits, and many threads at once (run under ThreadSanitizer
 * too). */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "device/faults.h"
#include "engine/pattern.h"
#include "host/device.h"
#include "lanes/state.h"
#include "memory/reclaim.h"
#include "paths/slots.h"

enum { BLOCKS = 64, NBYTES = 768 };

static const struct kvs_options plain = {.priority = KVS_PRIORITY_NORMAL};
static const int64_t SECONDS = 1000000000;

struct caches {
  unsigned char *gpu, *cpu;
  struct kvs_tensor tensor;
};

static struct caches caches_new(void) {
  struct caches c = {.gpu = malloc(BLOCKS * NBYTES), .cpu = malloc(BLOCKS * NBYTES)};
  for (int i = 0; i < BLOCKS * NBYTES; i++) c.gpu[i] = (unsigned char)(i * 31 + i / 251), c.cpu[i] = 0;
  c.tensor = (struct kvs_tensor){
      .gpu = (uintptr_t)c.gpu, .cpu = (uintptr_t)c.cpu, .nbytes = NBYTES, .gpu_blocks = BLOCKS, .cpu_blocks = BLOCKS};
  return c;
}

static void caches_free(struct caches *c) {
  free(c->gpu);
  free(c->cpu);
}

static struct kvs_engine *open_engine(uint64_t seed) {
  struct kvs_engine *engine = NULL;
  struct kvs_error err;
  int status = seed ? kvs_engine_open_deterministic(seed, &engine, &err) : kvs_engine_open("host:0", &engine, &err);
  if (status) {
    fprintf(stderr, "cannot open: %s\n", err.message);
    exit(1);
  }
  return engine;
}

static int swap(struct kvs_engine *engine, struct caches *c, const int64_t *gpu, const int64_t *cpu, size_t n,
                enum kvs_direction direction, const struct kvs_options *options, struct kvs_transfer **t,
                struct kvs_error *err) {
  struct kvs_ids gpu_ids = {gpu, 8, n}, cpu_ids = {cpu, 8, n};
  return kvs_swap_cache(engine, &c->tensor, 1, &gpu_ids, &cpu_ids, direction, options, t, err);
}

static void test_paths(uint64_t seed) {
  int64_t gpu[BLOCKS], cpu[BLOCKS];
  struct kvs_error err;
  for (int i = 0; i < BLOCKS; i++) gpu[i] = (i * 37) % BLOCKS, cpu[i] = (i * 11 + 5) % BLOCKS;
  for (int path = KVS_PATH_AUTO; path < KVS_PATHS; path++) {
    if (path == KVS_PATH_BORROW) continue; /* needs a lender */
    struct kvs_engine *engine = open_engine(seed);
    struct caches c = caches_new();
    struct kvs_options options = {.priority = KVS_PRIORITY_NORMAL, .path = (enum kvs_path)path};
    struct kvs_transfer *out = NULL, *in = NULL;
    unsigned char *original = malloc(BLOCKS * NBYTES);
    memcpy(original, c.gpu, BLOCKS * NBYTES);
    CHECK(!swap(engine, &c, gpu, cpu, BLOCKS, KVS_D2H, &options, &out, &err), "%s", err.message);
    memset(gpu, 0, 0);
    CHECK(!kvs_transfer_wait(out, 20 * SECONDS, &err), "%s", err.message);
    for (int i = 0; i < BLOCKS; i++)
      CHECK(!memcmp(c.cpu + cpu[i] * NBYTES, original + gpu[i] * NBYTES, NBYTES), "path %d block %d", path, i);
    memset(c.gpu, 0xEE, BLOCKS * NBYTES);
    CHECK(!swap(engine, &c, gpu, cpu, BLOCKS, KVS_H2D, &options, &in, &err), "%s", err.message);
    CHECK(!kvs_transfer_wait(in, 20 * SECONDS, &err), "%s", err.message);
    CHECK(!memcmp(c.gpu, original, BLOCKS * NBYTES), "path %d", path);
    struct kvs_transfer_info info;
    kvs_transfer_get_info(in, &info);
    CHECK(info.state == KVS_STATE_DONE && info.nbytes == BLOCKS * NBYTES && info.num_blocks == BLOCKS);
    /* strided takes dma for one run of blocks */
    CHECK(path == KVS_PATH_AUTO || path == KVS_PATH_STRIDED || (int)info.path == path, "path %d became %d", path,
          info.path);
    kvs_transfer_unref(out);
    kvs_transfer_unref(in);
    free(original);
    caches_free(&c);
    kvs_engine_unref(engine);
  }
}

/* On every interleaving: a store and then a load through the same host blocks, each after the other by `after`, with a
 * caller's stream that fills the source late and reads the destination early if nothing held it up. */
static void test_order(void) {
  for (uint64_t seed = 1; seed <= 150; seed++) {
    struct kvs_engine *engine = open_engine(seed);
    struct kvs_device *device = kvs_engine_device(engine);
    struct caches c = caches_new();
    struct kvs_error err;
    int64_t ids[] = {1, 5, 9, 10, 11}, to[] = {3, 1, 40, 41, 42}, back[] = {20, 30, 31, 32, 50};
    struct kvs_transfer *out, *in;
    kvs_stream compute;
    CHECK(!kvs_dev_stream_create(device, 0, &compute, &err));
    CHECK(!kvs_engine_set_compute_stream(engine, compute, &err));
    CHECK(!kvs_delay(engine, 20000, compute, &err));
    for (int i = 0; i < 5; i++) /* the kernel that produces the source */
      CHECK(!kvs_dev_fill(device, (uintptr_t)c.gpu + (uint64_t)ids[i] * NBYTES, 0x01010101u * (unsigned)(i + 1),
                          NBYTES / 4, compute, &err));
    CHECK(!swap(engine, &c, ids, to, 5, KVS_D2H, &plain, &out, &err), "%s", err.message);
    struct kvs_after after = {.kind = KVS_AFTER_TRANSFER, .transfer = out};
    struct kvs_options options = {.priority = KVS_PRIORITY_NORMAL, .after = &after, .nafter = 1};
    CHECK(!swap(engine, &c, back, to, 5, KVS_H2D, &options, &in, &err), "%s", err.message);
    CHECK(!kvs_transfer_make_wait(in, compute, &err));
    uint64_t result;
    CHECK(!kvs_engine_alloc(engine, 5 * NBYTES, false, &result, &err));
    for (int i = 0; i < 5; i++) /* the kernel that consumes what was loaded */
      CHECK(!kvs_dev_copy(device, result + (uint64_t)i * NBYTES, (uintptr_t)c.gpu + (uint64_t)back[i] * NBYTES, NBYTES,
                          compute, &err));
    CHECK(!kvs_engine_synchronize(engine, 20 * SECONDS, &err), "%s", err.message);
    for (int i = 0; i < 5 * NBYTES; i++)
      if (((unsigned char *)(uintptr_t)result)[i] != i / NBYTES + 1) {
        CHECK(false, "seed %d: byte %d is %d", (int)seed, i, ((unsigned char *)(uintptr_t)result)[i]);
        break;
      }
    CHECK(kvs_transfer_done(out) && kvs_transfer_done(in));
    kvs_transfer_unref(out);
    kvs_transfer_unref(in);
    CHECK(!kvs_engine_free(engine, result, &err), "%s", err.message);
    CHECK(!kvs_dev_stream_destroy(device, compute, &err));
    caches_free(&c);
    kvs_engine_unref(engine);
  }
}

static void test_on_stream(void) {
  for (uint64_t seed = 1; seed <= 100; seed++) {
    struct kvs_engine *engine = open_engine(seed);
    struct kvs_device *device = kvs_engine_device(engine);
    struct caches c = caches_new();
    struct kvs_error err;
    struct kvs_transfer *t;
    int64_t ids[] = {2, 4, 6}, to[] = {6, 4, 2};
    kvs_stream mine;
    CHECK(!kvs_dev_stream_create(device, 0, &mine, &err));
    struct kvs_options options = {.priority = KVS_PRIORITY_NORMAL, .on_stream = true, .stream = mine};
    for (int i = 0; i < 3; i++)
      kvs_dev_fill(device, (uintptr_t)c.gpu + (uint64_t)ids[i] * NBYTES, 0x11111111u, NBYTES / 4, mine, &err);
    CHECK(!swap(engine, &c, ids, to, 3, KVS_D2H, &options, &t, &err), "%s", err.message);
    for (int i = 0; i < 3; i++) /* queued later on the same stream: must not be seen by the transfer */
      kvs_dev_fill(device, (uintptr_t)c.gpu + (uint64_t)ids[i] * NBYTES, 0x22222222u, NBYTES / 4, mine, &err);
    CHECK(!kvs_engine_synchronize(engine, 20 * SECONDS, &err));
    for (int i = 0; i < 3; i++) CHECK(c.cpu[to[i] * NBYTES + 100] == 0x11, "seed %d", (int)seed);
    for (int i = 0; i < 3; i++) CHECK(c.gpu[ids[i] * NBYTES + 100] == 0x22, "seed %d", (int)seed);
    kvs_transfer_unref(t);
    kvs_dev_stream_destroy(device, mine, &err);
    caches_free(&c);
    kvs_engine_unref(engine);
  }
}

static void test_queue_full(void) {
  struct kvs_engine *engine = open_engine(3);
  struct kvs_device *device = kvs_engine_device(engine);
  struct caches c = caches_new();
  struct kvs_error err;
  struct kvs_transfer *t[9];
  struct kvs_stats stats;
  int64_t id = 1;
  kvs_stream mine;
  kvs_dev_stream_create(device, 0, &mine, &err);
  uint64_t flag;
  CHECK(!kvs_engine_alloc(engine, 4, false, &flag, &err));
  memset((void *)(uintptr_t)flag, 0, 4);
  CHECK(!kvs_dev_wait32(device, flag, 1, mine, &err)); /* blocked until the flag is set */
  CHECK(!kvs_engine_set_lane_depth(engine, 8, &err));
  struct kvs_options options = {.priority = KVS_PRIORITY_NORMAL, .on_stream = true, .stream = mine};
  for (int i = 0; i < 8; i++) CHECK(!swap(engine, &c, &id, &id, 1, KVS_D2H, &options, &t[i], &err), "%s", err.message);
  CHECK(swap(engine, &c, &id, &id, 1, KVS_D2H, &options, &t[8], &err) == KVS_QUEUE_FULL);
  CHECK(strstr(err.message, "8 unfinished"), "%s", err.message);
  kvs_engine_stats(engine, &stats);
  CHECK(stats.unfinished == 8 && stats.refused_full == 1, "%d", (int)stats.unfinished);
  CHECK(kvs_transfer_wait(t[0], 1000, &err) == KVS_TIMEOUT || err.status == KVS_INTERNAL, "%s", err.message);
  *(volatile uint32_t *)(uintptr_t)flag = 1;
  for (int i = 0; i < 8; i++) {
    struct kvs_transfer_info info;
    CHECK(!kvs_transfer_wait(t[i], 20 * SECONDS, &err), "%s", err.message);
    kvs_transfer_get_info(t[i], &info);
    CHECK(info.sequence == (uint64_t)i + 1);
    kvs_transfer_unref(t[i]);
  }
  CHECK(!kvs_engine_free(engine, flag, &err));
  caches_free(&c);
  kvs_engine_unref(engine);
}

/* Allocations may follow each other in the address space. Entries that continue from one into the next are right each,
 * and so must the call be; one tensor that spans both is not. */
static void test_neighbouring_allocations(void) {
  struct kvs_engine *engine = open_engine(5);
  struct caches c = caches_new();
  struct kvs_error err;
  struct kvs_transfer *t = NULL;
  unsigned char *arena = malloc(4096), *out = malloc(4096);
  for (int i = 0; i < 4096; i++) arena[i] = (unsigned char)(i * 7);
  struct kvs_region first = {.base = (uintptr_t)arena,
                             .nbytes = 2048,
                             .alias = (uintptr_t)arena,
                             .seam = true,
                             .memory = KVS_MEMORY_DEVICE,
                             .writable = true,
                             .origin = KVS_ORIGIN_ALLOCATED};
  struct kvs_region second = first;
  second.base = second.alias = first.base + 2048;
  CHECK(!kvs_regions_add(&engine->regions, &first, &err) && !kvs_regions_add(&engine->regions, &second, &err));
  uint64_t src[] = {first.base, first.base + 1024, second.base, second.base + 1024}, size = 1024, dst[4];
  for (int i = 0; i < 4; i++) dst[i] = (uintptr_t)out + (uint64_t)i * 1024;
  CHECK(!kvs_swap_batch(engine, src, dst, &size, true, 4, NULL, &t, &err), "%s", err.message);
  CHECK(!kvs_transfer_wait(t, 20 * SECONDS, &err), "%s", err.message);
  CHECK(!memcmp(arena, out, 4096));
  kvs_transfer_unref(t);
  struct kvs_tensor tensor = {
      .gpu = first.base, .cpu = (uintptr_t)out, .nbytes = 1024, .gpu_blocks = 3, .cpu_blocks = 4};
  int64_t id = 0;
  struct kvs_ids ids = {&id, 8, 1};
  CHECK(kvs_swap_cache(engine, &tensor, 1, &ids, &ids, KVS_D2H, NULL, &t, &err) == KVS_INVALID);
  CHECK(strstr(err.message, "only 2048"), "%s", err.message);
  kvs_regions_remove(&engine->regions, first.base, NULL);
  kvs_regions_remove(&engine->regions, second.base, NULL);
  free(arena);
  free(out);
  caches_free(&c);
  kvs_engine_unref(engine);
}

/* -- failure --------------------------------------------------------------------------------------------------- */

static void test_refused_blocks(void) {
  for (int path = KVS_PATH_DMA; path < KVS_PATHS; path++) {
    if (path == KVS_PATH_BORROW) continue; /* needs a lender */
    struct kvs_engine *engine = open_engine(11);
    struct caches c = caches_new();
    struct kvs_error err;
    struct kvs_transfer *t;
    struct kvs_options options = {.priority = KVS_PRIORITY_NORMAL, .path = (enum kvs_path)path};
    struct kvs_fault fault = {.action = KVS_FAULT_FAIL, .nth = 3, .every = 4, .code = 1};
    int64_t gpu[12], cpu[12];
    uint32_t failed[12];
    for (int i = 0; i < 12; i++) gpu[i] = 3 * i, cpu[i] = 50 - 2 * i;
    CHECK(!kvs_dev_fault_set(kvs_engine_device(engine), KVS_FAULT_COPY, &fault, &err));
    CHECK(!swap(engine, &c, gpu, cpu, 12, KVS_D2H, &options, &t, &err), "%s", err.message);
    CHECK(kvs_transfer_wait(t, 20 * SECONDS, &err) == KVS_REFUSED && err.code == 1, "%s", err.message);
    size_t n = kvs_transfer_failed(t, failed, 12);
    CHECK(n == 3, "path %d: %zu failed", path, n);
    bool lost[12] = {false};
    for (size_t i = 0; i < n; i++) lost[failed[i]] = true;
    for (int i = 0; i < 12; i++)
      CHECK((memcmp(c.cpu + cpu[i] * NBYTES, c.gpu + gpu[i] * NBYTES, NBYTES) != 0) == lost[i], "block %d", i);
    fault.action = KVS_FAULT_NONE;
    kvs_dev_fault_set(kvs_engine_device(engine), KVS_FAULT_COPY, &fault, &err);
    struct kvs_transfer *good;
    CHECK(!swap(engine, &c, gpu, cpu, 12, KVS_D2H, &options, &good, &err)); /* the lane goes on */
    CHECK(!kvs_transfer_wait(good, 20 * SECONDS, &err), "%s", err.message);
    kvs_transfer_unref(t);
    kvs_transfer_unref(good);
    caches_free(&c);
    kvs_engine_unref(engine);
  }
}

/* Whatever driver call fails, once: either the submission is refused and nothing moved, or the transfer says what is
 * lost, and what it does not list has arrived. */
static void test_every_call_may_fail(void) {
  static const char *const calls[] = {
      "", "copy", "copy_batch", "copy_direct", "launch", "event_record", "stream_wait", "stream_info", "pointer_query"};
  int refused = 0, reported = 0, clean = 0;
  for (int path = KVS_PATH_DMA; path < KVS_PATHS; path++)
    for (size_t k = 0; path != KVS_PATH_BORROW && k < sizeof calls / sizeof *calls; k++)
      for (uint64_t nth = 1; nth <= 24; nth++) {
        struct kvs_engine *engine = open_engine(nth);
        struct caches c = caches_new();
        struct kvs_error err;
        struct kvs_transfer *t = NULL;
        struct kvs_options options = {.priority = KVS_PRIORITY_NORMAL, .path = (enum kvs_path)path};
        struct kvs_fault fault = {.action = KVS_FAULT_FAIL, .nth = nth, .code = 1}, none = {.action = KVS_FAULT_NONE};
        int64_t gpu[BLOCKS], cpu[BLOCKS];
        uint32_t failed[BLOCKS];
        bool lost[BLOCKS] = {false};
        snprintf(fault.operation, sizeof fault.operation, "%s", calls[k]);
        for (int i = 0; i < BLOCKS; i++) gpu[i] = (i * 5) % BLOCKS, cpu[i] = (i * 7) % BLOCKS;
        kvs_dev_fault_set(kvs_engine_device(engine), KVS_FAULT_CALL, &fault, &err);
        if (swap(engine, &c, gpu, cpu, BLOCKS, KVS_D2H, &options, &t, &err)) {
          refused++;
          kvs_dev_fault_set(kvs_engine_device(engine), KVS_FAULT_CALL, &none, &err);
          CHECK(!kvs_engine_synchronize(engine, 20 * SECONDS, &err), "%s", err.message);
          for (int i = 0; i < BLOCKS * NBYTES; i++)
            if (c.cpu[i]) {
              CHECK(false, "%s %d: refused, but bytes moved", calls[k], (int)nth);
              break;
            }
        } else {
          int status = KVS_NOT_READY;
          for (int tries = 0; tries < 4 && !kvs_transfer_done(t); tries++) /* a poll may be what fails */
            status = kvs_transfer_wait(t, 20 * SECONDS, &err);
          status = kvs_transfer_wait(t, 20 * SECONDS, &err);
          size_t n = kvs_transfer_failed(t, failed, BLOCKS);
          CHECK((status != KVS_OK) == (n > 0), "%s %d: %s", calls[k], (int)nth, err.message);
          for (size_t i = 0; i < n; i++) lost[failed[i]] = true;
          for (int i = 0; i < BLOCKS; i++)
            if (!lost[i])
              CHECK(!memcmp(c.cpu + cpu[i] * NBYTES, c.gpu + gpu[i] * NBYTES, NBYTES), "%s %d", calls[k], i);
          *(n ? &reported : &clean) += 1;
          kvs_transfer_unref(t);
        }
        caches_free(&c);
        kvs_engine_unref(engine);
      }
  CHECK(refused > 20 && reported > 3 && clean > 20, "%d refused, %d reported, %d clean", refused, reported, clean);
}

static void test_loss(void) {
  struct kvs_engine *engine = open_engine(21);
  struct caches c = caches_new();
  struct kvs_error err;
  struct kvs_transfer *out, *in;
  struct kvs_fault fault = {.action = KVS_FAULT_LOSE, .operation = "event_query", .nth = 1, .code = 719};
  int64_t ids[] = {1, 2, 3}, other[] = {7, 9, 11};
  CHECK(!swap(engine, &c, ids, ids, 3, KVS_D2H, &plain, &out, &err));
  CHECK(!swap(engine, &c, other, other, 3, KVS_H2D, &plain, &in, &err));
  kvs_dev_fault_set(kvs_engine_device(engine), KVS_FAULT_CALL, &fault, &err);
  CHECK(kvs_transfer_wait(out, 5 * SECONDS, &err) == KVS_LOST && err.code == 719, "%s", err.message);
  CHECK(kvs_transfer_done(in) && kvs_transfer_error(in, &err) == KVS_LOST, "every lane is told");
  CHECK(kvs_transfer_failed(in, NULL, 0) == 3, "all its blocks are lost");
  struct kvs_transfer *more = NULL;
  CHECK(swap(engine, &c, ids, ids, 3, KVS_D2H, &plain, &more, &err) == KVS_LOST);
  CHECK(kvs_engine_synchronize(engine, SECONDS, &err) == KVS_LOST);
  kvs_transfer_unref(out);
  kvs_transfer_unref(in);
  kvs_engine_unref(engine);
  caches_free(&c);
}

/* A transfer of four bursts, through slots that three transfers before it used; 0: the submission succeeded. */
static int lose_in_a_burst(struct kvs_engine *engine, enum kvs_direction direction, struct kvs_fault *fault,
                           struct kvs_transfer **transfer, struct kvs_error *err) {
  enum { SLOT = 128 << 10, LARGE = 4 * SLOT / BLOCKS };
  const struct kvs_options burst = {.priority = KVS_PRIORITY_NORMAL, .path = KVS_PATH_BURST};
  struct kvs_tensor tensor = {.nbytes = LARGE, .gpu_blocks = BLOCKS, .cpu_blocks = BLOCKS};
  struct kvs_error ignored;
  int64_t id[BLOCKS];
  struct kvs_ids ids = {id, 8, BLOCKS};
  for (int i = 0; i < BLOCKS; i++) id[i] = (i * 37) % BLOCKS;
  CHECK(!kvs_engine_set_slots(engine, SLOT, 2, SECONDS, &ignored), "%s", ignored.message);
  CHECK(!kvs_engine_alloc(engine, BLOCKS * LARGE, false, &tensor.gpu, &ignored), "%s", ignored.message);
  CHECK(!kvs_engine_alloc(engine, BLOCKS * LARGE, true, &tensor.cpu, &ignored), "%s", ignored.message);
  for (int i = 0; i < 3; i++) {
    struct kvs_transfer *before = NULL;
    CHECK(!kvs_swap_cache(engine, &tensor, 1, &ids, &ids, direction, &burst, &before, &ignored), "%s", ignored.message);
    if (before) kvs_transfer_unref(before);
  }
  kvs_dev_fault_set(engine->device, KVS_FAULT_CALL, fault, &ignored);
  return kvs_swap_cache(engine, &tensor, 1, &ids, &ids, direction, &burst, transfer, err);
}

/* Wherever a burst is being queued: the loss is what is told of, and told at once. (What a lost device may still read
 * stays allocated for good.) */
static void test_loss_in_a_burst(enum kvs_direction direction) {
#if !defined(__SANITIZE_ADDRESS__)
  uint64_t nth = 1;
  for (uint64_t lost = 1; lost; nth++) {
    struct kvs_engine *engine = open_engine(nth);
    struct kvs_error err = {.status = KVS_OK}, ignored;
    struct kvs_transfer *transfer = NULL;
    struct kvs_fault fault = {.action = KVS_FAULT_LOSE, .nth = nth, .code = 719};
    int status = lose_in_a_burst(engine, direction, &fault, &transfer, &err);
    lost = (uint64_t)atomic_load(&engine->device->lost);
    CHECK(!status || (status == KVS_LOST && err.code == 719), "call %d: %d", (int)nth, err.status);
    if (!status && lost) CHECK(kvs_transfer_done(transfer) && kvs_transfer_error(transfer, &ignored) == KVS_LOST);
    if (!status) kvs_transfer_unref(transfer);
    if (lost)
      CHECK(kvs_engine_set_slots(engine, 0, 0, SECONDS, &ignored) == KVS_LOST, "call %d: %s", (int)nth,
            ignored.message);
    fault.action = KVS_FAULT_NONE;
    kvs_dev_fault_set(engine->device, KVS_FAULT_CALL, &fault, &ignored);
    kvs_engine_unref(engine);
  }
  CHECK(nth > 4 * 7, "%d calls are fewer than four bursts make", (int)nth);
#else
  (void)direction;
#endif
}

/* -- the slots of bursts --------------------------------------------------------------------------------------- */

/* Open the slots again, as opening a device does, while a fault makes calls of the driver fail. kind "cuda": with slots
 * as large as a GPU's, 64 MiB; "host": as a host device's. */
static void open_slots(struct kvs_engine *engine, const char *kind, const char *operation, uint64_t nth,
                       uint64_t every) {
  struct kvs_device *device = engine->device;
  const struct kvs_device_ops *ops = device->ops;
  struct kvs_device_ops other = *ops;
  struct kvs_fault fault = {.action = KVS_FAULT_FAIL, .nth = nth, .every = every, .code = 2};
  struct kvs_error ignored;
  snprintf(fault.operation, sizeof fault.operation, "%s", operation);
  other.kind = kind;
  engine->burst_note[0] = 0;
  kvs_slots_close(engine);
  CHECK(!kvs_dev_fault_set(device, KVS_FAULT_CALL, &fault, &ignored));
  device->ops = &other;
  kvs_slots_open(engine);
  device->ops = ops;
  fault.action = KVS_FAULT_NONE;
  kvs_dev_fault_set(device, KVS_FAULT_CALL, &fault, &ignored);
}

/* What memory there is is taken, and said; the device opens whatever there is. */
static void test_little_memory_for_slots(void) {
  struct kvs_engine *engine = open_engine(9);
  const uint64_t mib = 1 << 20;
  const struct {
    const char *kind, *operation;
    uint64_t nth, every, slot_nbytes;
    const char *note;
  } cases[] = {
      {"cuda", "alloc", 100, 0, 64 * mib, ""},
      {"cuda", "alloc", 1, 0, 32 * mib, "slots of 32 MiB instead of 64: the device has no more memory free"},
      {"cuda", "event_create", 5, 0, 32 * mib, "slots of 32 MiB instead of 64: the device has no more memory free"},
      {"cuda", "alloc", 1, 1, 0, "alloc failed with code 2"},
      {"cuda", "event_create", 1, 1, 0, "event_create failed with code 2"},
      {"host", "alloc", 100, 0, mib, ""},
      {"host", "alloc", 1, 0, 0, "alloc failed with code 2"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    open_slots(engine, cases[i].kind, cases[i].operation, cases[i].nth, cases[i].every);
    uint64_t wanted = 8 * cases[i].slot_nbytes; /* a direction: three, and two of half as much */
    CHECK(kvs_engine_slots_nbytes(engine) == wanted, "case %zu: %llu bytes", i,
          (unsigned long long)kvs_engine_slots_nbytes(engine));
    CHECK(strncmp(engine->burst_note, cases[i].note, strlen(cases[i].note)) == 0 &&
              (engine->burst_note[0] == 0) == (cases[i].note[0] == 0),
          "case %zu: '%s'", i, engine->burst_note);
  }
  kvs_engine_unref(engine);
}

/* -- threads --------------------------------------------------------------------------------------------------- */

struct worker {
  struct kvs_engine *engine;
  struct caches c;
  int number, wrong;
};

static int released;
static pthread_mutex_t released_lock = PTHREAD_MUTEX_INITIALIZER;

static void release(void *owner) {
  (void)owner;
  pthread_mutex_lock(&released_lock);
  released++;
  pthread_mutex_unlock(&released_lock);
}

static void *work(void *arg) {
  struct worker *w = arg;
  struct kvs_error err;
  uint64_t seed = (uint64_t)w->number * 977 + 1;
  struct kvs_transfer *previous = NULL;
  for (int round = 0; round < 60; round++) {
    int64_t gpu[8], cpu[8];
    struct kvs_transfer *out = NULL, *in = NULL;
    struct kvs_options options = {.priority = (enum kvs_priority)check_below(&seed, 3),
                                  .path = check_below(&seed, 2) ? KVS_PATH_BURST : (enum kvs_path)check_below(&seed, 3),
                                  .owner = w,
                                  .release = release};
    for (int i = 0; i < 8; i++)
      gpu[i] = 8 * i + (int64_t)check_below(&seed, 8), cpu[i] = 8 * (7 - i) + (int64_t)check_below(&seed, 8);
    struct kvs_after after = {.kind = KVS_AFTER_TRANSFER, .transfer = previous};
    options.after = &after;
    options.nafter = previous != NULL;
    if (swap(w->engine, &w->c, gpu, cpu, 8, KVS_D2H, &options, &out, &err)) w->wrong++;
    after.transfer = out;
    options.nafter = 1;
    if (swap(w->engine, &w->c, gpu, cpu, 8, KVS_H2D, &options, &in, &err)) w->wrong++;
    if (round % 3 && kvs_transfer_wait(in, 20 * SECONDS, &err)) w->wrong++;
    if (round % 5 == 0) kvs_engine_collect(w->engine);
    for (int i = 0; round % 3 && i < 8; i++)
      w->wrong += memcmp(w->c.gpu + gpu[i] * NBYTES, w->c.cpu + cpu[i] * NBYTES, NBYTES) != 0;
    kvs_transfer_unref(out); /* some are dropped while they run */
    if (previous) kvs_transfer_unref(previous);
    previous = in;
  }
  kvs_transfer_unref(previous);
  return NULL;
}

static void test_threads(void) {
  struct kvs_engine *engine = open_engine(0);
  struct worker workers[4];
  pthread_t threads[4];
  struct kvs_error err;
  struct kvs_stats stats;
  for (int i = 0; i < 4; i++) {
    workers[i] = (struct worker){.engine = engine, .c = caches_new(), .number = i};
    pthread_create(&threads[i], NULL, work, &workers[i]);
  }
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
  CHECK(!kvs_engine_synchronize(engine, 20 * SECONDS, &err), "%s", err.message);
  kvs_engine_collect(engine);
  kvs_engine_stats(engine, &stats);
  CHECK(stats.unfinished == 0 && stats.failed == 0, "%d %d", (int)stats.unfinished, (int)stats.failed);
  CHECK(released == 4 * 60 * 2, "%d owners released", released);
  for (int i = 0; i < 4; i++) {
    CHECK(workers[i].wrong == 0, "thread %d saw %d wrong", i, workers[i].wrong);
    for (int b = 0; b < BLOCKS * NBYTES; b++)
      if (workers[i].c.gpu[b] != (unsigned char)(b * 31 + b / 251)) {
        CHECK(false, "thread %d: byte %d changed", i, b);
        break;
      }
    caches_free(&workers[i].c);
  }
  kvs_engine_unref(engine);
}

/* -- fork ------------------------------------------------------------------------------------------------------ */

/* What the child of a fork may call; how many of the calls that can be told so were. */
static int call_all(struct kvs_engine *engine, struct caches *c, struct kvs_pool *const pools[2]) {
  int64_t ids[] = {1, 2};
  uint64_t src = (uintptr_t)c->gpu, dst = (uintptr_t)c->cpu, nbytes = NBYTES;
  struct kvs_transfer *transfer;
  struct kvs_error err;
  struct kvs_defaults defaults;
  const struct kvs_move move = {
      .src = pools, .dst = pools + 1, .npairs = 1, .src_ids = {ids, 8, 2}, .dst_ids = {ids, 8, 2}};
  int told = swap(engine, c, ids, ids, 2, KVS_D2H, NULL, &transfer, &err) == KVS_FORKED;
  told += kvs_swap_batch(engine, &src, &dst, &nbytes, true, 1, NULL, &transfer, &err) == KVS_FORKED;
  told += kvs_move_blocks(&move, NULL, &transfer, &err) == KVS_FORKED;
  told += kvs_engine_alloc(engine, 64, true, &nbytes, &err) == KVS_FORKED;
  told += kvs_engine_free(engine, dst, &err) == KVS_FORKED;
  told += kvs_engine_register(engine, src, NBYTES, &err) == KVS_FORKED;
  told += kvs_engine_unregister(engine, src, &err) == KVS_FORKED;
  told += kvs_engine_set_slots(engine, 0, 0, 0, &err) == KVS_FORKED;
  kvs_engine_free_later(engine, dst);
  kvs_engine_get_defaults(engine, &defaults);
  kvs_engine_set_defaults(engine, &defaults);
  kvs_engine_collect(engine);
  return told;
}

/* Another thread may hold any of the locks when a process forks: the child, which does not have it, must not ask. */
static void test_fork_while_a_lock_is_held(void) {
#if !defined(__SANITIZE_THREAD__)
  struct kvs_engine *engine = open_engine(0);
  struct caches c = caches_new();
  struct kvs_error err;
  struct kvs_pool *pools[2];
  pthread_mutex_t *const locks[] = {&engine->lock, &engine->hazard_lock, &engine->memory_lock, &engine->cache_lock};
  for (int i = 0; i < 2; i++) {
    struct kvs_pool_layout layout = {
        .ptr = (uintptr_t)(i ? c.cpu : c.gpu), .num_blocks = BLOCKS, .block_nbytes = NBYTES};
    CHECK(!kvs_pool_open(engine, &layout, &pools[i], &err), "%s", err.message);
  }
  for (size_t i = 0; i < sizeof locks / sizeof locks[0]; i++) {
    int status = 1;
    pthread_mutex_lock(locks[i]);
    pid_t child = fork();
    if (child == 0) {
      alarm(10);
      _exit(call_all(engine, &c, pools));
    }
    pthread_mutex_unlock(locks[i]);
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 8, "lock %d: status %x", (int)i, (unsigned)status);
  }
  for (int i = 0; i < 2; i++) kvs_pool_unref(pools[i]);
  caches_free(&c);
  kvs_engine_unref(engine);
#endif
}

static int get_table_with(struct kvs_engine *engine, uint64_t number, const char *text,
                          struct kvs_table_of_rows **table) {
  struct kvs_row row = {.src = number, .nbytes = 16};
  struct kvs_rows rows = {&row, 1, 1};
  struct kvs_error err;
  const struct kvs_table_tail tail = {text, strlen(text)};
  uint64_t address;
  int status = kvs_table_get(engine, &rows, &tail, engine->tables.upload, table, &address, &err);
  if (!status && tail.nbytes) CHECK(!kvs_engine_synchronize(engine, -1, &err), "the upload");
  if (!status) CHECK(memcmp((const char *)(uintptr_t)address + sizeof row, text, tail.nbytes) == 0, "%s", text);
  return status;
}

static int get_table(struct kvs_engine *engine, uint64_t number, struct kvs_table_of_rows **table) {
  return get_table_with(engine, number, "", table);
}

/* As a transfer that has ended does: what it uploaded has arrived. */
static void put_table(struct kvs_engine *engine, struct kvs_table_of_rows *table) {
  struct kvs_error err;
  CHECK(!kvs_engine_synchronize(engine, -1, &err));
  kvs_table_put(engine, table);
}

/* A table gives way to another once each transfer that uses it has ended. */
static void test_tables_in_use(void) {
  struct kvs_engine *engine = open_engine(0);
  struct kvs_table_of_rows *tables[KVS_TABLES], *again, *other;
  for (uint64_t i = 0; i < 3 * KVS_TABLES; i++) {
    CHECK(get_table(engine, i, &other) == KVS_OK, "table %d", (int)i);
    put_table(engine, other);
  }
  for (uint64_t i = 0; i < KVS_TABLES; i++)
    CHECK(get_table(engine, 1000 + i, &tables[i]) == KVS_OK, "table %d", (int)i);
  CHECK(get_table(engine, 1003, &again) == KVS_OK && again == tables[3], "it is there");
  CHECK(get_table(engine, 2000, &other) == KVS_NOT_READY, "all are in use");
  put_table(engine, again);
  CHECK(get_table(engine, 2000, &other) == KVS_NOT_READY, "another transfer uses it");
  put_table(engine, tables[3]);
  CHECK(get_table(engine, 2000, &other) == KVS_OK && other == tables[3], "it is free");
  put_table(engine, other);
  CHECK(get_table(engine, 1002, &again) == KVS_OK && again == tables[2], "the others stay");
  put_table(engine, again);
  for (int i = 0; i < KVS_TABLES; i++)
    if (i != 3) put_table(engine, tables[i]);
  kvs_engine_unref(engine);
}

/* A table is its rows and what lies behind them. */
static void test_tails_of_tables(void) {
  struct kvs_engine *engine = open_engine(0);
  struct kvs_table_of_rows *none, *one, *other, *longer, *again;
  CHECK(!get_table_with(engine, 7, "", &none) && !get_table_with(engine, 7, "aaaa", &one), "two tables");
  CHECK(!get_table_with(engine, 7, "aaab", &other) && !get_table_with(engine, 7, "aaaab", &longer), "two more");
  CHECK(none != one && one != other && other != longer && longer != one, "all differ");
  CHECK(!get_table_with(engine, 7, "aaaa", &again) && again == one, "it is there");
  struct kvs_table_of_rows *const all[] = {none, one, other, longer, again};
  for (int i = 0; i < 5; i++) put_table(engine, all[i]);
  kvs_engine_unref(engine);
}

static atomic_int tries;

static int still_in_use(struct kvs_engine *engine, void *what, struct kvs_error *why) {
  (void)engine, (void)what;
  atomic_fetch_add(&tries, 1);
  return kvs_fail(why, KVS_TIMEOUT, "in use");
}

static atomic_bool in_use = true;

static int while_in_use(struct kvs_engine *engine, void *what, struct kvs_error *why) {
  (void)engine, (void)what;
  if (!atomic_load(&in_use)) return KVS_OK;
  usleep(200000); /* its caller gives up meanwhile, and comes back */
  return kvs_fail(why, KVS_TIMEOUT, "in use");
}

static int reclaim(struct kvs_engine *engine, int64_t timeout_ns) {
  struct kvs_reclaim *task;
  struct kvs_error why;
  CHECK(!kvs_reclaim_start(engine, while_in_use, &in_use, &task, &why), "%s", why.message);
  int status = kvs_reclaim_wait(task, timeout_ns, &why);
  (void)kvs_reclaim_leave(task, KVS_LEAVE_RESULT);
  return status;
}

/* What has ended is not waited for. No thread calls the driver while the process ends. */
static void test_shutdown_of_idle_engines(void) {
  struct kvs_engine *engine = open_engine(0);
  kvs_reclaim_later(engine, still_in_use, NULL);
  while (!atomic_load(&tries)) usleep(1000);
  CHECK(reclaim(engine, SECONDS / 20) == KVS_TIMEOUT);
  const uint64_t begin = kvs_clock_ns();
  kvs_shutdown(40 * SECONDS);
  CHECK(kvs_clock_ns() - begin < (uint64_t)(20 * SECONDS), "shutdown waits");
  CHECK(!engine->reclaims.threaded, "the thread goes on");
  int before = atomic_load(&tries);
  kvs_reclaim_later(engine, still_in_use, NULL);
  usleep(100000);
  CHECK(atomic_load(&tries) == before, "%d", atomic_load(&tries) - before);
  atomic_store(&in_use, false);
  CHECK(reclaim(engine, 20 * SECONDS) == KVS_OK, "who waits gets it all the same");
  kvs_engine_unref(engine);
}

int main(void) {
  test_paths(0);
  test_paths(7);
  test_order();
  test_on_stream();
  test_queue_full();
  test_neighbouring_allocations();
  test_refused_blocks();
  test_every_call_may_fail();
  test_loss();
  test_loss_in_a_burst(KVS_D2H);
  test_loss_in_a_burst(KVS_H2D);
  test_little_memory_for_slots();
  test_tables_in_use();
  test_tails_of_tables();
  test_threads();
  test_fork_while_a_lock_is_held();
  test_shutdown_of_idle_engines();
  return check_close();
}
