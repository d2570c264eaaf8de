/* The host device, asked through the wrappers: order, events, refusals, loss, memory, kernels, replay.
 *
 * Build: every csrc/ file of the core that it needs, with -Icsrc. The last line says how many tests passed. */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/maps.h"
#include "host_device.h"

#define REFUSED(wanted_status, wanted_code, call)                                                                      \
  do {                                                                                                                 \
    struct kvs_error err = {0};                                                                                        \
    int status = (call);                                                                                               \
    CHECK(status == (wanted_status) && err.code == (wanted_code), "%d, code %d: %s", status, err.code, err.message);   \
  } while (0)

static kvs_stream make_stream_of(struct kvs_device *device, int priority) {
  kvs_stream stream = 0;
  OK(kvs_dev_stream_create(device, priority, &stream, &err));
  return stream;
}

static kvs_event make_event(struct kvs_device *device, bool timing) {
  kvs_event event = 0;
  OK(kvs_dev_event_create(device, timing, &event, &err));
  return event;
}

static int query_event(struct kvs_device *device, kvs_event event) {
  struct kvs_error err;
  return kvs_dev_event_query(device, event, &err);
}

/* -- order ----------------------------------------------------------------------------------------------------- */

static void order_within(uint64_t seed) {
  enum { N = 64, SIZE = 5000 };
  struct kvs_device *device = open_device(seed);
  kvs_stream stream = make_stream(device);
  unsigned char *chain = calloc(N + 1, SIZE);
  memset(chain, 7, SIZE);
  for (size_t i = 0; i < N; i++)
    OK(kvs_dev_copy(device, address(chain + (i + 1) * SIZE), address(chain + i * SIZE), SIZE, stream, &err));
  OK(kvs_dev_synchronize(device, &err));
  CHECK(chain[N * SIZE] == 7 && chain[(N + 1) * SIZE - 1] == 7);
  OK(kvs_dev_stream_query(device, stream, &err));
  kvs_dev_close(device);
  free(chain);
}

/* A value hops between two streams through events; without them it would be lost behind the delays. */
static void order_across(uint64_t seed) {
  enum { HOPS = 30 };
  struct kvs_device *device = open_device(seed);
  kvs_stream streams[2] = {make_stream(device), make_stream_of(device, -5)};
  kvs_event event = make_event(device, false); /* recorded anew for each hop: earlier waits must not move */
  uint64_t values[HOPS + 1] = {42};
  for (int i = 0; i < HOPS; i++) {
    if (i % 7 == 0) delay(device, 300000, streams[i % 2]);
    OK(kvs_dev_copy(device, address(&values[i + 1]), address(&values[i]), 8, streams[i % 2], &err));
    OK(kvs_dev_event_record(device, event, streams[i % 2], &err));
    OK(kvs_dev_stream_wait(device, streams[(i + 1) % 2], event, &err));
  }
  OK(kvs_dev_synchronize(device, &err));
  CHECK(values[HOPS] == 42);
  CHECK(query_event(device, event) == KVS_OK);
  kvs_dev_close(device);
}

static void test_order(void) {
  order_within(0);
  order_across(0);
  for (uint64_t seed = 1; seed < 20; seed++) {
    order_within(seed);
    order_across(seed);
  }
}

/* Streams without events between them are in no order: a free one overtakes a delayed one. */
static void test_overtake(void) {
  struct kvs_device *device = open_device(0);
  kvs_stream slow = make_stream(device), fast = make_stream(device);
  uint64_t one = 1, slow_value = 0, fast_value = 0;
  kvs_event slow_done = make_event(device, false), fast_done = make_event(device, false);
  uint64_t begin = now_ns();
  for (int i = 0; i < 8; i++) delay(device, 1000000, make_stream_of(device, -5)); /* delays occupy no worker */
  delay(device, 50000000, slow);
  OK(kvs_dev_copy(device, address(&slow_value), address(&one), 8, slow, &err));
  OK(kvs_dev_event_record(device, slow_done, slow, &err));
  OK(kvs_dev_copy(device, address(&fast_value), address(&one), 8, fast, &err));
  OK(kvs_dev_event_record(device, fast_done, fast, &err));
  while (query_event(device, fast_done) == KVS_NOT_READY) usleep(100);
  CHECK(fast_value == 1);
  REFUSED(KVS_NOT_READY, KVS_DRIVER_NOT_READY, kvs_dev_event_query(device, slow_done, &err));
  REFUSED(KVS_NOT_READY, KVS_DRIVER_NOT_READY, kvs_dev_stream_query(device, slow, &err));
  OK(kvs_dev_synchronize(device, &err));
  CHECK(slow_value == 1 && now_ns() - begin >= 50000000);
  kvs_dev_close(device);
}

static void test_events(void) {
  struct kvs_device *device = open_device(0);
  kvs_stream a = make_stream(device), b = make_stream(device);
  kvs_event event = make_event(device, true), end = make_event(device, true), plain = make_event(device, false);
  uint64_t ns = 0, one = 1, target = 0;
  CHECK(query_event(device, event) == KVS_OK); /* never recorded: reached */
  OK(kvs_dev_stream_wait(device, a, event, &err));
  REFUSED(KVS_REFUSED, 400, kvs_dev_event_elapsed(device, event, plain, &ns, &err));
  REFUSED(KVS_REFUSED, 400, kvs_dev_event_elapsed(device, event, end, &ns, &err));

  OK(kvs_dev_event_record(device, event, a, &err));
  delay(device, 20000000, a);
  OK(kvs_dev_event_record(device, end, a, &err));
  REFUSED(KVS_NOT_READY, 600, kvs_dev_event_elapsed(device, event, end, &ns, &err));
  /* b waits for the end on a; recording the event again on an idle stream must not let it go early. */
  OK(kvs_dev_stream_wait(device, b, end, &err));
  OK(kvs_dev_event_record(device, end, make_stream(device), &err));
  OK(kvs_dev_copy(device, address(&target), address(&one), 8, b, &err));
  while (query_event(device, end) == KVS_NOT_READY) usleep(100);
  REFUSED(KVS_NOT_READY, 600, kvs_dev_stream_query(device, b, &err));
  OK(kvs_dev_event_record(device, end, a, &err));
  OK(kvs_dev_event_destroy(device, plain, &err));
  OK(kvs_dev_synchronize(device, &err));
  CHECK(target == 1);
  OK(kvs_dev_event_elapsed(device, event, end, &ns, &err));
  CHECK(ns >= 20000000 && ns < 10000000000u);

  /* An event that is destroyed while a stream waits for it still holds the stream. */
  target = 0;
  delay(device, 10000000, a);
  OK(kvs_dev_event_record(device, event, a, &err));
  OK(kvs_dev_stream_wait(device, b, event, &err));
  OK(kvs_dev_event_destroy(device, event, &err));
  OK(kvs_dev_copy(device, address(&target), address(&one), 8, b, &err));
  OK(kvs_dev_stream_destroy(device, b, &err));
  REFUSED(KVS_REFUSED, 400, kvs_dev_stream_query(device, b, &err));
  REFUSED(KVS_REFUSED, 400, kvs_dev_event_query(device, event, &err));
  REFUSED(KVS_NOT_READY, 600, kvs_dev_stream_query(device, a, &err));
  OK(kvs_dev_synchronize(device, &err));
  CHECK(target == 1);
  kvs_dev_close(device);
}

static void *per_thread(void *arg) {
  struct kvs_device *device = arg;
  struct kvs_stream_info info = {0};
  OK(kvs_dev_stream_info(device, KVS_STREAM_PER_THREAD, &info, &err));
  return (void *)(uintptr_t)info.id;
}

static void test_streams(void) {
  struct kvs_device *device = open_device(0);
  struct kvs_stream_info first, second;
  pthread_t thread;
  void *theirs;
  OK(kvs_dev_stream_info(device, 0, &first, &err));
  OK(kvs_dev_stream_info(device, KVS_STREAM_LEGACY, &second, &err));
  CHECK(first.id == second.id);
  uint64_t mine = address(per_thread(device));
  CHECK(mine == address(per_thread(device)) && mine != first.id);
  pthread_create(&thread, NULL, per_thread, device);
  pthread_join(thread, &theirs);
  CHECK(address(theirs) != mine);

  kvs_stream stream = make_stream_of(device, 99);
  CHECK(stream >= 16);
  OK(kvs_dev_stream_info(device, stream, &first, &err));
  OK(kvs_dev_stream_destroy(device, stream, &err));
  CHECK(make_stream_of(device, -99) == stream); /* handles come back, ids do not */
  OK(kvs_dev_stream_info(device, stream, &second, &err));
  CHECK(first.id != second.id);
  REFUSED(KVS_REFUSED, 400, kvs_dev_stream_query(device, 3, &err));
  REFUSED(KVS_REFUSED, 400, kvs_dev_stream_query(device, make_event(device, false), &err));
  REFUSED(KVS_REFUSED, 400, kvs_dev_event_query(device, stream, &err));
  REFUSED(KVS_REFUSED, 400, kvs_dev_stream_destroy(device, KVS_STREAM_LEGACY, &err));
  kvs_dev_close(device);
}

/* One stream of low priority, queued first, and more of high priority than there are workers: which ends first? */
static bool high_ends_first(uint64_t seed) {
  enum { STREAMS = 9, SIZE = 1 << 18 };
  const int rounds = seed ? 20 : 200;
  struct kvs_device *device = open_device(seed);
  kvs_stream opener = make_stream(device), streams[STREAMS];
  kvs_event gate = make_event(device, false), ends[2] = {make_event(device, true), make_event(device, true)};
  unsigned char *memory = calloc(STREAMS + 1, SIZE);
  uint32_t all_queued = 0;
  uint64_t ns = 0;
  OK(kvs_dev_wait32(device, address(&all_queued), 1, opener, &err));
  OK(kvs_dev_event_record(device, gate, opener, &err));
  for (size_t i = 0; i < STREAMS; i++) {
    streams[i] = make_stream_of(device, i == 0 ? 0 : -5);
    OK(kvs_dev_stream_wait(device, streams[i], gate, &err));
    for (int j = 0; j < rounds; j++)
      OK(kvs_dev_copy(device, address(memory + (i + 1) * SIZE), address(memory), SIZE, streams[i], &err));
    if (i < 2) OK(kvs_dev_event_record(device, ends[i], streams[i], &err));
  }
  __atomic_store_n(&all_queued, 1, __ATOMIC_RELEASE);
  OK(kvs_dev_synchronize(device, &err));
  OK(kvs_dev_event_elapsed(device, ends[1], ends[0], &ns, &err));
  kvs_dev_close(device);
  free(memory);
  return ns > 0;
}

static void test_priority(void) {
  for (uint64_t seed = 1; seed <= 20; seed++) CHECK(high_ends_first(seed));
  /* The system may hold back the one worker that has a slice of the stream that is looked at, so it may take two. */
  CHECK(high_ends_first(0) || high_ends_first(0) || high_ends_first(0));
}

/* -- deterministic replay -------------------------------------------------------------------------------------- */

/* Work whose outcome depends on the interleaving; returns it, and the trace. */
static uint64_t replay(uint64_t seed, uint64_t *trace) {
  enum { STREAMS = 3, N = 12 };
  struct kvs_device *device = open_device(seed);
  kvs_stream streams[STREAMS];
  uint64_t values[N], cell = 0, outcome = 0;
  uint64_t dst[4], src[4], nbytes[4] = {8, 8, 8, 8};
  struct kvs_copies batch = {dst, src, nbytes, NULL, 4, 4};
  kvs_event event = make_event(device, false);
  for (size_t i = 0; i < STREAMS; i++) streams[i] = make_stream_of(device, -(int)i);
  for (uint64_t i = 0; i < N; i++) values[i] = i + 1;
  for (size_t i = 0; i < N; i++) { /* everybody writes one cell, and reads what is there into a slot */
    for (size_t j = 0; j < 4; j++) {
      dst[j] = j % 2 ? address(&cell) : address(&values[(i + j) % N]);
      src[j] = j % 2 ? address(&values[i]) : address(&cell);
    }
    OK(kvs_dev_copy_batch(device, &batch, 0, 4, streams[i % STREAMS], &err));
    if (i == 5) delay(device, 7000, streams[1]);
    if (i == 6) OK(kvs_dev_event_record(device, event, streams[0], &err));
    if (i == 7) query_event(device, event);
  }
  kvs_host_step(device, 3);
  OK(kvs_dev_synchronize(device, &err));
  CHECK(kvs_host_step(device, 5) == 0);
  for (size_t i = 0; i < N; i++) outcome = outcome * 1000003 + values[i];
  *trace = kvs_host_trace(device);
  kvs_dev_close(device);
  return outcome * 1000003 + cell;
}

static void test_replay(void) {
  enum { REPLAYS = 50 };
  uint64_t traces[REPLAYS], outcomes[REPLAYS], again;
  int differ = 0;
  for (uint64_t seed = 0; seed < REPLAYS; seed++) {
    outcomes[seed] = replay(seed + 1, &traces[seed]);
    CHECK(replay(seed + 1, &again) == outcomes[seed]);
    CHECK(again == traces[seed]);
    for (uint64_t other = 0; other < seed; other++) CHECK(traces[other] != traces[seed]);
    differ += outcomes[seed] != outcomes[0];
  }
  CHECK(differ > REPLAYS / 2);
  struct kvs_device *device = open_device(0);
  CHECK(kvs_host_step(device, 1) == -1);
  kvs_dev_close(device);
}

static void test_deadlock(void) {
  for (uint64_t seed = 1; seed < 10; seed++) {
    struct kvs_device *device = open_device(seed);
    kvs_stream stream = make_stream(device), other = make_stream(device);
    kvs_event event = make_event(device, false);
    uint32_t word = 0;
    struct kvs_error error;
    OK(kvs_dev_wait32(device, address(&word), 1, stream, &err));
    OK(kvs_dev_event_record(device, event, stream, &err));
    OK(kvs_dev_stream_wait(device, other, event, &err));
    CHECK(kvs_dev_synchronize(device, &error) == KVS_INTERNAL && strstr(error.message, "deadlock: nothing can run"));
    CHECK(query_event(device, event) == KVS_INTERNAL);
    CHECK(kvs_dev_stream_query(device, other, &error) == KVS_INTERNAL);
    delay(device, 3000000, make_stream(device)); /* a delay is no deadlock: virtual time gets there */
    int status;
    while ((status = query_event(device, event)) == KVS_NOT_READY) continue;
    CHECK(status == KVS_INTERNAL);
    OK(kvs_dev_write32(device, address(&word), 1, make_stream(device), &err));
    OK(kvs_dev_synchronize(device, &err));
    CHECK(query_event(device, event) == KVS_OK);
    kvs_dev_close(device);
  }
}

/* -- words in memory ------------------------------------------------------------------------------------------- */

static void test_words(void) {
  struct kvs_device *device = open_device(0);
  kvs_stream waiting = make_stream(device), writing = make_stream(device);
  uint32_t words[2] = {0, UINT32_MAX};
  uint64_t one = 1, target = 0;
  for (int i = 0; i < 6; i++) OK(kvs_dev_wait32(device, address(&words[0]), 5, make_stream_of(device, -5), &err));
  OK(kvs_dev_wait32(device, address(&words[0]), 5, waiting, &err));
  OK(kvs_dev_copy(device, address(&target), address(&one), 8, waiting, &err));
  OK(kvs_dev_write32(device, address(&words[0]), 4, writing, &err));
  while (kvs_dev_stream_query(device, writing, &(struct kvs_error){0}) == KVS_NOT_READY) usleep(100);
  usleep(2000);
  REFUSED(KVS_NOT_READY, 600, kvs_dev_stream_query(device, waiting, &err));
  __atomic_store_n(&words[0], 6, __ATOMIC_RELEASE); /* anybody may write it; at least, not equal */
  OK(kvs_dev_synchronize(device, &err));
  CHECK(target == 1);
  OK(kvs_dev_wait32(device, address(&words[1]), UINT32_MAX - 1, waiting, &err)); /* cyclic comparison */
  OK(kvs_dev_write32(device, address(&words[1]), 3, waiting, &err));
  OK(kvs_dev_wait32(device, address(&words[1]), UINT32_MAX, waiting, &err));
  OK(kvs_dev_synchronize(device, &err));
  CHECK(words[1] == 3);
  REFUSED(KVS_REFUSED, 1, kvs_dev_write32(device, address(words) + 2, 1, waiting, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_wait32(device, address(words) + 1, 1, waiting, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_wait32(device, 64, 1, waiting, &err));
  kvs_dev_close(device);
}

/* -- memory ---------------------------------------------------------------------------------------------------- */

static void test_allocations(void) {
  struct kvs_device *device = open_device(0);
  struct kvs_region region;
  uint64_t memory = 0, pinned = 0, again = 0;
  OK(kvs_dev_alloc(device, 1000, &memory, &err));
  OK(kvs_dev_host_alloc(device, 5000000, &pinned, &err));
  CHECK(memory % 256 == 0 && pinned % 256 == 0 && *(unsigned char *)(uintptr_t)memory == 0xCD);
  OK(kvs_dev_pointer_query(device, memory + 999, &region, &err));
  CHECK(region.base == memory && region.nbytes == 1000 && region.memory == KVS_MEMORY_DEVICE && region.seam);
  CHECK(region.device == 0 && region.alias == memory && region.writable && region.buffer_id != 0);
  uint64_t id = region.buffer_id;
  OK(kvs_dev_pointer_query(device, pinned + 4999999, &region, &err));
  CHECK(region.base == pinned && region.nbytes == 5000000 && region.memory == KVS_MEMORY_PINNED && region.seam);
  CHECK(region.device == -1 && region.buffer_id != id);
  REFUSED(KVS_INVALID, 0, kvs_dev_pointer_query(device, memory + 1000, &region, &err));
  REFUSED(KVS_INVALID, 0, kvs_dev_pointer_query(device, memory + 4096, &region, &err));

  REFUSED(KVS_REFUSED, 1, kvs_dev_alloc(device, 0, &again, &err));
  REFUSED(KVS_NOMEM, 2, kvs_dev_alloc(device, SIZE_MAX, &again, &err));
  REFUSED(KVS_NOMEM, 2, kvs_dev_alloc(device, (size_t)device->info.memory + 1, &again, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_free(device, memory + 256, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_host_free(device, memory, &err));
  REFUSED(KVS_REFUSED, 713, kvs_dev_host_unregister(device, pinned, &err));
  OK(kvs_dev_free(device, memory, &err));
  REFUSED(KVS_INVALID, 0, kvs_dev_pointer_query(device, memory, &region, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_copy(device, pinned, memory, 8, 0, &err)); /* use after free */
  REFUSED(KVS_REFUSED, 1, kvs_dev_free(device, memory, &err));
  OK(kvs_dev_host_free(device, pinned, &err));
  OK(kvs_dev_alloc(device, 100, &again, &err)); /* left to close */
  OK(kvs_dev_pointer_query(device, again, &region, &err));
  CHECK(region.buffer_id != id);
  kvs_dev_close(device);
}

static void test_ordinary(void) {
  struct kvs_device *device = open_device(0);
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  struct kvs_region region;
  struct kvs_error error;
  unsigned char *pages = mmap(NULL, 8 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  uint64_t base = address(pages), local = 0;
  mprotect(pages, page, PROT_NONE);
  mprotect(pages + 5 * page, page, PROT_READ);
  munmap(pages + 6 * page, page);

  OK(kvs_dev_pointer_query(device, base + 3 * page + 17, &region, &err));
  CHECK(region.base == base + page && region.nbytes == 4 * page && region.writable && !region.seam);
  CHECK(region.memory == KVS_MEMORY_ORDINARY && region.alias == region.base && region.device == -1);
  OK(kvs_dev_pointer_query(device, base + 5 * page, &region, &err));
  CHECK(region.base == base + 5 * page && region.nbytes == page && !region.writable);
  CHECK(kvs_dev_pointer_query(device, base, &region, &error) == KVS_INVALID && strstr(error.message, "is not mapped"));
  CHECK(kvs_dev_pointer_query(device, base + 6 * page, &region, &error) == KVS_INVALID);
  CHECK(kvs_dev_pointer_query(device, 0, &region, &error) == KVS_INVALID);
  CHECK(kvs_dev_pointer_query(device, UINT64_MAX, &region, &error) == KVS_INVALID);

  /* Known regions cut the ordinary ones on both sides. */
  OK(kvs_dev_host_register(device, base + 2 * page + 100, 50, &err));
  OK(kvs_dev_pointer_query(device, base + 3 * page, &region, &err));
  CHECK(region.base == base + 2 * page + 150 && region.nbytes == 3 * page - 150);
  OK(kvs_dev_pointer_query(device, base + 2 * page + 99, &region, &err));
  CHECK(region.base == base + page && region.nbytes == page + 100);

  REFUSED(KVS_REFUSED, 1, kvs_dev_copy(device, base + 5 * page, base + page, 8, 0, &err)); /* read-only */
  REFUSED(KVS_REFUSED, 1, kvs_dev_copy(device, base + page, base + 6 * page - 4, 8, 0, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_copy(device, base + page, UINT64_MAX - 3, 8, 0, &err));
  OK(kvs_dev_copy(device, base + page, base + 5 * page - 4, 8, 0, &err)); /* mappings may be walked */
  OK(kvs_dev_copy(device, address(&local), base + page, 8, 0, &err));
  OK(kvs_dev_copy(device, 0, 0, 0, 0, &err));
  OK(kvs_dev_synchronize(device, &err));
  munmap(pages, 6 * page);
  munmap(pages + 7 * page, page);
  kvs_dev_close(device);
}

static void test_maps(void) {
  struct kvs_mapping fast, slow;
  uint64_t addresses[] = {address(&checks_passed), address(&fast), address((const void *)"text"), 0, UINT64_MAX, 4096};
  for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++) {
    bool found = kvs_mapping_find(addresses[i], &fast);
    CHECK(found == kvs_mapping_parse(addresses[i], &slow));
    if (!found) continue;
    CHECK(fast.base == slow.base && fast.nbytes == slow.nbytes);
    CHECK(fast.readable == slow.readable && fast.writable == slow.writable);
  }
  CHECK(kvs_mapping_find(addresses[0], &fast) && fast.readable && fast.writable);
  /* The descriptor is gone, and its number another file: the look-up finds its way back. */
  for (int fd = 3; fd < 64; fd++) {
    char link[64], path[256] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/maps")) {
      int null = open("/dev/null", O_RDONLY);
      dup2(null, fd);
      close(null);
    }
  }
  CHECK(kvs_mapping_find(addresses[0], &fast) && kvs_mapping_find(address(&slow), &fast));
  struct rlimit limit, none;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  none = (struct rlimit){0, limit.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0 && !kvs_mapping_parse(addresses[0], &slow)); /* no file can be opened */
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0 && kvs_mapping_parse(addresses[0], &slow));
#if !defined(__SANITIZE_THREAD__)
  void *extra = mmap(NULL, 4096, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t child = fork();
  if (child == 0) { /* its own address space, not the parent's */
    munmap(extra, 4096);
    _exit(kvs_mapping_find(address(extra), &fast) ? 1 : 0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  munmap(extra, 4096);
#endif
}

/* -- refusals -------------------------------------------------------------------------------------------------- */

static void test_seams(void) {
  enum { SIZE = 3000 };
  struct kvs_device *device = open_device(0);
  unsigned char *memory = calloc(4, SIZE);
  uint64_t base = address(memory), gpu = 0;
  OK(kvs_dev_alloc(device, 2 * SIZE, &gpu, &err));
  OK(kvs_dev_copy(device, gpu, base + 10, 2 * SIZE, 0, &err)); /* nothing known there yet */
  OK(kvs_dev_host_register(device, base, SIZE, &err));
  OK(kvs_dev_host_register(device, base + SIZE, SIZE, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_copy(device, gpu, base + 10, SIZE, 0, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_copy(device, base + 10, gpu, SIZE, 0, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_copy(device, gpu, base + SIZE + 1, SIZE, 0, &err)); /* out into ordinary memory */
  REFUSED(KVS_REFUSED, 1, kvs_dev_copy(device, gpu + 1, base + 2 * SIZE, 2 * SIZE, 0, &err));
  OK(kvs_dev_copy(device, gpu, base, SIZE, 0, &err));
  OK(kvs_dev_copy(device, gpu, base + SIZE, SIZE, 0, &err));
  struct kvs_error error;
  CHECK(kvs_dev_copy(device, gpu, base + 10, SIZE, 0, &error) == KVS_REFUSED && strstr(error.message, "source"));

  /* Path 'direct' and kernels go where memory is. */
  uint64_t dst = gpu, src = base + 10, nbytes = SIZE;
  struct kvs_copies one = {&dst, &src, &nbytes, NULL, 1, 1};
  OK(kvs_dev_copy_direct(device, &one, 0, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_copy_batch(device, &one, 0, 1, make_stream(device), &err));

  REFUSED(KVS_REFUSED, 712, kvs_dev_host_register(device, base + 5, 10, &err));
  REFUSED(KVS_REFUSED, 712, kvs_dev_host_register(device, base + 2 * SIZE - 1, 10, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_host_register(device, gpu, 10, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_host_register(device, 0, 10, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_host_register(device, base + 3 * SIZE, 0, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_host_register(device, 4096, 10, &err));
  REFUSED(KVS_REFUSED, 713, kvs_dev_host_unregister(device, base + 1, &err));
  OK(kvs_dev_host_unregister(device, base, &err));
  REFUSED(KVS_REFUSED, 713, kvs_dev_host_unregister(device, base, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_copy(device, gpu, base + 10, SIZE, 0, &err)); /* runs into the one that is left */
  OK(kvs_dev_host_unregister(device, base + SIZE, &err));
  OK(kvs_dev_copy(device, gpu, base + 10, SIZE, 0, &err));
  kvs_dev_close(device);
  free(memory);
}

static void test_batch(void) {
  enum { N = 100 };
  for (uint64_t seed = 0; seed < 3; seed++) {
    struct kvs_device *device = open_device(seed);
    kvs_stream stream = make_stream(device);
    uint64_t gpu = 0, dst[N], src[N], nbytes[N], values[N], landed[N];
    struct kvs_copies batch = {dst, src, nbytes, NULL, N, N};
    OK(kvs_dev_alloc(device, 8 * N, &gpu, &err));
    memset((void *)(uintptr_t)gpu, 0, 8 * N);
    for (size_t i = 0; i < N; i++) {
      values[i] = 3 * i + 1;
      dst[i] = gpu + 8 * (N - 1 - i);
      src[i] = address(&values[i]);
      nbytes[i] = 8;
    }
    src[40] = gpu + 8 * N - 4; /* across the end */
    REFUSED(KVS_REFUSED, 1, kvs_dev_copy_batch(device, &batch, 0, N, stream, &err));
    OK(kvs_dev_copy(device, address(landed), gpu, 8 * N, stream, &err));
    OK(kvs_dev_synchronize(device, &err));
    for (size_t i = 0; i < N; i++) CHECK(landed[i] == 0);

    src[40] = address(&values[40]);
    nbytes[7] = 0; /* does nothing */
    REFUSED(KVS_REFUSED, 1, kvs_dev_copy_batch(device, &batch, 0, N, 0, &err));
    REFUSED(KVS_REFUSED, 1, kvs_dev_copy_batch(device, &batch, 0, N, KVS_STREAM_LEGACY, &err));
    REFUSED(KVS_REFUSED, 400, kvs_dev_copy_batch(device, &batch, 0, N, 1000, &err));
    OK(kvs_dev_copy_batch(device, &batch, 0, N - 1, KVS_STREAM_PER_THREAD, &err));
    OK(kvs_dev_synchronize(device, &err));
    OK(kvs_dev_copy_batch(device, &batch, 3, 3, stream, &err));
    memset(dst, 0, sizeof dst); /* the list was copied */
    OK(kvs_dev_copy(device, address(landed), gpu, 8 * N, stream, &err));
    OK(kvs_dev_synchronize(device, &err));
    for (size_t i = 0; i < N; i++) CHECK(landed[N - 1 - i] == (i == 7 || i == N - 1 ? 0 : values[i]));
    kvs_dev_close(device);
  }
}

static void test_rect(void) {
  for (uint64_t seed = 0; seed < 2; seed++) {
    struct kvs_device *device = open_device(seed);
    unsigned char from[2 * 5 * 16], to[2 * 4 * 12];
    uint64_t gpu = 0;
    for (size_t i = 0; i < sizeof from; i++) from[i] = (unsigned char)i;
    memset(to, 0xEE, sizeof to);
    OK(kvs_dev_alloc(device, 1024, &gpu, &err));
    struct kvs_rect rect = {address(to), address(from), 12, 16, 4, 5, 7, 3, 2};
    OK(kvs_dev_copy_rect(device, &rect, 0, &err));
    OK(kvs_dev_synchronize(device, &err));
    for (size_t i = 0; i < sizeof to; i++) {
      size_t depth = i / 48, row = i / 12 % 4, column = i % 12;
      CHECK(to[i] == (row < 3 && column < 7 ? from[depth * 80 + row * 16 + column] : 0xEE));
    }
    rect.dst_pitch = 6;
    REFUSED(KVS_REFUSED, 1, kvs_dev_copy_rect(device, &rect, 0, &err));
    rect.dst_pitch = (uint64_t)1 << 31;
    REFUSED(KVS_REFUSED, 1, kvs_dev_copy_rect(device, &rect, 0, &err));
    rect.dst_pitch = 12, rect.dst_height = 2;
    REFUSED(KVS_REFUSED, 1, kvs_dev_copy_rect(device, &rect, 0, &err));
    struct kvs_rect past = {gpu, address(from), 200, 16, 0, 0, 16, 6, 1}; /* 5 * 200 + 16 is inside 1024 */
    OK(kvs_dev_copy_rect(device, &past, 0, &err));
    past.dst = gpu + 9;
    REFUSED(KVS_REFUSED, 1, kvs_dev_copy_rect(device, &past, 0, &err));
    past.height = 1, past.dst_pitch = 0; /* one row has no pitch */
    OK(kvs_dev_copy_rect(device, &past, 0, &err));
    past.height = 0;
    OK(kvs_dev_copy_rect(device, &past, 0, &err));
    OK(kvs_dev_synchronize(device, &err));
    kvs_dev_close(device);
  }
}

static void test_fill_and_launch(void) {
  struct kvs_device *device = open_device(0);
  uint32_t words[9] = {0};
  struct kvs_copy_params params = {0};
  struct kvs_launch launch = {KVS_KERNEL_COPY, 1, 32, 0, &params, sizeof params};
  OK(kvs_dev_fill(device, address(words), 0x12345678, 8, 0, &err));
  OK(kvs_dev_fill(device, address(words), 1, 0, 0, &err));
  REFUSED(KVS_REFUSED, 1, kvs_dev_fill(device, address(words) + 1, 1, 1, 0, &err));
  OK(kvs_dev_launch(device, &launch, 0, &err));
  OK(kvs_dev_synchronize(device, &err));
  CHECK(words[0] == 0x12345678 && words[7] == 0x12345678 && words[8] == 0);
  launch.grid = 0;
  REFUSED(KVS_REFUSED, 1, kvs_dev_launch(device, &launch, 0, &err));
  launch.grid = 1, launch.threads = 0;
  REFUSED(KVS_REFUSED, 1, kvs_dev_launch(device, &launch, 0, &err));
  launch.threads = 1, launch.params_nbytes--;
  REFUSED(KVS_REFUSED, 1, kvs_dev_launch(device, &launch, 0, &err));
  launch.kernel = KVS_KERNELS;
  REFUSED(KVS_REFUSED, 1, kvs_dev_launch(device, &launch, 0, &err));
  kvs_dev_close(device);
}

static void test_capture(void) {
  struct kvs_device *device = open_device(0);
  kvs_stream stream = make_stream(device), other = make_stream(device);
  kvs_event event = make_event(device, false);
  struct kvs_stream_info info = {0};
  uint64_t from = 5, to = 0, other_to = 0;
  OK(kvs_host_capture(device, stream, true, &err));
  OK(kvs_dev_stream_info(device, stream, &info, &err));
  CHECK(info.capturing);
  REFUSED(KVS_CAPTURING, 900, kvs_dev_copy(device, address(&to), address(&from), 8, stream, &err));
  REFUSED(KVS_CAPTURING, 900, kvs_dev_event_record(device, event, stream, &err));
  REFUSED(KVS_CAPTURING, 900, kvs_dev_stream_wait(device, stream, event, &err));
  REFUSED(KVS_CAPTURING, 900, kvs_dev_stream_query(device, stream, &err));
  OK(kvs_dev_copy(device, address(&other_to), address(&from), 8, other, &err));
  OK(kvs_host_capture(device, stream, false, &err));
  OK(kvs_dev_copy(device, address(&to), address(&from), 8, stream, &err));
  OK(kvs_dev_synchronize(device, &err));
  CHECK(to == 5 && other_to == 5);
  kvs_dev_close(device);
}

/* -- loss ------------------------------------------------------------------------------------------------------ */

static void test_loss(void) {
  for (uint64_t seed = 0; seed < 3; seed++) {
    struct kvs_device *device = open_device(seed);
    kvs_stream stream = make_stream(device), other = make_stream(device);
    kvs_event event = make_event(device, false);
    uint64_t gpu = 0, from = 1, to = 0;
    uint32_t never = 0;
    OK(kvs_dev_alloc(device, 64, &gpu, &err));
    struct kvs_piece piece = {.dst = gpu + 60, .src = address(&from), .nbytes = 8}; /* 4 bytes past the end */
    struct kvs_copy_params params = {.units = {.pieces = address(&piece)}, .count = 1};
    struct kvs_launch launch = {KVS_KERNEL_COPY, 1, 32, 0, &params, sizeof params};
    OK(kvs_dev_wait32(device, address(&never), 1, other, &err));
    OK(kvs_dev_launch(device, &launch, stream, &err));
    struct kvs_error error;
    int late = kvs_dev_copy(device, address(&to), address(&from), 8, stream, &error);
    CHECK(late == KVS_OK || late == KVS_LOST);
    REFUSED(KVS_LOST, 700, kvs_dev_synchronize(device, &err));
    CHECK(atomic_load(&device->lost) == 700 && to == 0);
    REFUSED(KVS_LOST, 700, kvs_dev_event_record(device, event, stream, &err));
    REFUSED(KVS_LOST, 700, device->ops->event_query(device, event, &err));
    REFUSED(KVS_LOST, 700, device->ops->stream_query(device, stream, &err));
    REFUSED(KVS_LOST, 700, device->ops->copy(device, address(&to), address(&from), 8, other, &err));
    kvs_dev_close(device);
  }
}

/* A loss that comes from outside, while a thread waits, releases it. */
static void *wait_lost(void *arg) {
  struct kvs_error err;
  return (void *)(intptr_t)kvs_dev_synchronize(arg, &err);
}

static void test_loss_while_waiting(void) {
  struct kvs_device *device = open_device(0);
  pthread_t thread;
  void *status;
  uint32_t never = 0;
  OK(kvs_dev_wait32(device, address(&never), 1, make_stream(device), &err));
  pthread_create(&thread, NULL, wait_lost, device);
  usleep(5000);
  atomic_store(&device->lost, KVS_DRIVER_LAUNCH_FAILED);
  pthread_join(thread, &status);
  CHECK((intptr_t)status == KVS_LOST);
  kvs_dev_close(device);
}

/* Closing with work left drops it. */
static void test_close_busy(void) {
  struct kvs_device *device = open_device(0);
  kvs_stream stream = make_stream(device);
  uint64_t gpu = 0;
  uint32_t never = 0;
  OK(kvs_dev_alloc(device, 1 << 20, &gpu, &err));
  OK(kvs_dev_fill(device, gpu, 1, 1 << 18, make_stream(device), &err));
  OK(kvs_dev_wait32(device, address(&never), 1, stream, &err));
  OK(kvs_dev_event_record(device, make_event(device, false), stream, &err));
  OK(kvs_dev_stream_destroy(device, stream, &err));
  delay(device, 1000000000, KVS_STREAM_PER_THREAD);
  kvs_dev_close(device);
  kvs_dev_close(open_device(0));
}

/* -- kernels --------------------------------------------------------------------------------------------------- */

static void test_copy_kernel(void) {
  enum { ALIGNMENTS = 18, SIZES = 71, ROOM = 128 };
  struct kvs_device *device = open_device(0);
  size_t count = (size_t)ALIGNMENTS * ALIGNMENTS * SIZES, n = 0;
  uint64_t gpu = 0, pinned = 0, table = 0;
  OK(kvs_dev_alloc(device, count * ROOM, &gpu, &err));
  OK(kvs_dev_host_alloc(device, count * ROOM, &pinned, &err));
  OK(kvs_dev_host_alloc(device, count * sizeof(struct kvs_piece), &table, &err));
  struct kvs_piece *pieces = (struct kvs_piece *)(uintptr_t)table;
  unsigned char *from = (unsigned char *)(uintptr_t)pinned, *to = (unsigned char *)(uintptr_t)gpu;
  unsigned char *oracle = malloc(count * ROOM);
  for (size_t i = 0; i < count * ROOM; i++) from[i] = (unsigned char)(i * 31 + i / ROOM);
  memset(to, 0xA5, count * ROOM);
  memset(oracle, 0xA5, count * ROOM);
  for (size_t a = 0; a < ALIGNMENTS; a++)
    for (size_t b = 0; b < ALIGNMENTS; b++)
      for (size_t size = 0; size < SIZES; size++, n++) {
        pieces[n] = (struct kvs_piece){gpu + n * ROOM + a, pinned + n * ROOM + b, size};
        for (size_t i = 0; i < size; i++) oracle[n * ROOM + a + i] = from[n * ROOM + b + i];
        struct kvs_cut cut = kvs_cut_piece(pieces[n].dst, pieces[n].src, size);
        CHECK(cut.head + cut.words * cut.width + cut.tail == size);
        CHECK(cut.words == 0 || ((pieces[n].dst + cut.head) % cut.width | (pieces[n].src + cut.head) % cut.width) == 0);
      }
  struct kvs_copy_params params = {.units = {.pieces = table}, .count = n};
  struct kvs_launch launch = {KVS_KERNEL_COPY, 7, 32, 0, &params, sizeof params};
  OK(kvs_dev_launch(device, &launch, 0, &err));
  params.count = 0; /* the parameters were copied */
  OK(kvs_dev_synchronize(device, &err));
  CHECK(memcmp(to, oracle, count * ROOM) == 0);

  uint64_t begin = now_ns(); /* 4 MiB at 5 ms a MiB by 2 CTAs */
  pieces[0] = (struct kvs_piece){gpu, pinned, 2 << 20};
  pieces[1] = (struct kvs_piece){gpu + (2 << 20), pinned, 2 << 20};
  params.count = 2;
  params.ns_per_mib = 5000000;
  launch.grid = 2;
  if (count * ROOM > (size_t)4 << 20) {
    OK(kvs_dev_launch(device, &launch, 0, &err));
    OK(kvs_dev_synchronize(device, &err));
    CHECK(now_ns() - begin >= 10000000);
  }
  free(oracle);
  kvs_dev_close(device);
}

static void run_pattern(struct kvs_device *device, enum kvs_pattern_mode mode, const struct kvs_pattern_item *items,
                        size_t nitems, struct kvs_pattern_result *result, unsigned grid) {
  struct kvs_pattern_params params = {address(items), nitems, address(result), mode, KVS_PATTERN_BYTES};
  struct kvs_launch launch = {KVS_KERNEL_PATTERN, grid, 128, 0, &params, sizeof params};
  *result = (struct kvs_pattern_result){0, UINT64_MAX};
  OK(kvs_dev_launch(device, &launch, 0, &err));
  OK(kvs_dev_synchronize(device, &err));
}

static void test_pattern_kernel(void) {
  enum { ITEMS = 5 };
  static unsigned char memory[ITEMS][4096 + 16];
  static const uint64_t sizes[ITEMS] = {4096, 1, 0, 131, 4095};
  struct kvs_device *device = open_device(0);
  struct kvs_pattern_item items[ITEMS];
  struct kvs_pattern_result result;
  for (size_t i = 0; i < ITEMS; i++)
    items[i] = (struct kvs_pattern_item){address(memory[i]) + i, sizes[i], 0x1234567 * (i + 1)};
  run_pattern(device, KVS_PATTERN_WRITE, items, ITEMS, &result, 3);
  for (size_t i = 0; i < ITEMS; i++) {
    for (uint64_t j = 0; j < sizes[i]; j++)
      CHECK(memory[i][i + j] == (unsigned char)(kvs_pattern_word(items[i].key, j / 8) >> (8 * (j % 8))));
    CHECK(memory[i][i + sizes[i]] == 0); /* nothing behind */
  }
  run_pattern(device, KVS_PATTERN_CHECK, items, ITEMS, &result, 2);
  CHECK(result.wrong == 0 && result.first == UINT64_MAX);
  for (uint64_t at = 0; at < sizes[3]; at++) {
    memory[3][3 + at] ^= 0x40;
    run_pattern(device, KVS_PATTERN_CHECK, items, ITEMS, &result, 1 + (unsigned)at % 6);
    CHECK(result.wrong == 1 && result.first == ((uint64_t)3 << 40 | at));
    memory[3][3 + at] ^= 0x40;
  }
  memory[4][4 + 4094] ^= 1, memory[4][4 + 9] ^= 1, memory[0][4090] ^= 1;
  run_pattern(device, KVS_PATTERN_CHECK, items, ITEMS, &result, 4);
  CHECK(result.wrong == 3 && result.first == 4090);
  memset(memory, 0, sizeof memory);
  kvs_dev_close(device);
}

/* -- large, and many threads ----------------------------------------------------------------------------------- */

static void test_direct(void) {
  enum { N = 300, SIZE = 70001 };
  for (uint64_t seed = 0; seed < 2; seed++) {
    struct kvs_device *device = open_device(seed);
    uint64_t *dst = calloc(N, 8), *src = calloc(N, 8), *nbytes = calloc(N, 8);
    unsigned char *from = malloc((size_t)N * SIZE + 64), *to = calloc(N, SIZE);
    struct kvs_copies list = {dst, src, nbytes, NULL, N, N};
    for (size_t i = 0; i < (size_t)N * SIZE; i++) from[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t i = 0; i < N; i++) {
      dst[i] = address(to + (i * 7 % N) * SIZE);
      src[i] = address(from + i * SIZE);
      nbytes[i] = SIZE;
    }
    kvs_stream stream = make_stream(device);
    OK(kvs_dev_copy_direct(device, &list, stream, &err));
    OK(kvs_dev_copy(device, address(to), address(from), SIZE, stream, &err)); /* after the whole list */
    OK(kvs_dev_synchronize(device, &err));
    for (size_t i = 0; i < N; i++) CHECK(memcmp(to + (i * 7 % N) * SIZE, from + i * SIZE, SIZE) == 0);
    kvs_dev_close(device);
    free(dst), free(src), free(nbytes), free(from), free(to);
  }
}

struct party {
  struct kvs_device *device;
  unsigned seed;
  bool good;
};

/* Streams and events come and go; the thread's own chain of copies must come out whole. */
static void *party(void *arg) {
  struct party *own = arg;
  struct kvs_error err;
  enum { ROUNDS = 60, SIZE = 3000 };
  unsigned char *chain = calloc(ROUNDS + 1, SIZE);
  own->good = true;
  memset(chain, (int)own->seed, SIZE);
  kvs_event event = 0, last = 0;
  for (size_t i = 0; i < ROUNDS; i++) {
    kvs_stream stream = 0;
    own->good &= kvs_dev_stream_create(own->device, -(int)(i % 6), &stream, &err) == KVS_OK;
    own->good &= kvs_dev_event_create(own->device, false, &event, &err) == KVS_OK;
    if (last) own->good &= kvs_dev_stream_wait(own->device, stream, last, &err) == KVS_OK;
    own->good &= kvs_dev_copy(own->device, address(chain + (i + 1) * SIZE), address(chain + i * SIZE), SIZE, stream,
                              &err) == KVS_OK;
    own->good &= kvs_dev_event_record(own->device, event, stream, &err) == KVS_OK;
    own->good &= kvs_dev_stream_destroy(own->device, stream, &err) == KVS_OK;
    if (last) own->good &= kvs_dev_event_destroy(own->device, last, &err) == KVS_OK;
    last = event;
  }
  while (kvs_dev_event_query(own->device, last, &err) == KVS_NOT_READY) usleep(50);
  own->good &= kvs_dev_synchronize(own->device, &err) == KVS_OK;
  own->good &= chain[ROUNDS * SIZE] == own->seed && chain[(ROUNDS + 1) * SIZE - 1] == own->seed;
  free(chain);
  return NULL;
}

static void test_threads(void) {
  enum { THREADS = 6 };
  for (uint64_t seed = 0; seed < 2; seed++) {
    struct kvs_device *device = open_device(seed);
    struct party parties[THREADS];
    pthread_t threads[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
      parties[i] = (struct party){device, i + 1, false};
      pthread_create(&threads[i], NULL, party, &parties[i]);
    }
    for (unsigned i = 0; i < THREADS; i++) {
      pthread_join(threads[i], NULL);
      CHECK(parties[i].good);
    }
    kvs_dev_close(device);
  }
}

int main(void) {
  static const struct {
    const char *name;
    void (*run)(void);
  } tests[] = {
      {"order", test_order},
      {"overtake", test_overtake},
      {"events", test_events},
      {"streams", test_streams},
      {"priority", test_priority},
      {"replay", test_replay},
      {"deadlock", test_deadlock},
      {"words", test_words},
      {"allocations", test_allocations},
      {"ordinary memory", test_ordinary},
      {"maps", test_maps},
      {"seams", test_seams},
      {"batch", test_batch},
      {"rect", test_rect},
      {"fill and launch", test_fill_and_launch},
      {"capture", test_capture},
      {"loss", test_loss},
      {"loss while waiting", test_loss_while_waiting},
      {"close while busy", test_close_busy},
      {"copy kernel", test_copy_kernel},
      {"pattern kernel", test_pattern_kernel},
      {"direct", test_direct},
      {"threads", test_threads},
  };
  for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
    int before = checks_failed;
    tests[i].run();
    if (checks_failed != before) printf("FAILED: %s\n", tests[i].name);
  }
  return check_close();
}
