/* Lent links from many threads, with their lending and taking back; and stores behind loads where the host's memory is
 * the limit (run under ThreadSanitizer too). */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "lanes/lane.h"
#include "lanes/transfer.h"
#include "paths/costs_default.h"
#include "private.h"

enum { BLOCKS = 40, NBYTES = 16 << 10, SLOT = 128 << 10, THREADS = 4, ROUNDS = 25 };
static const int64_t SECONDS = 1000000000;

struct mover {
  struct kvs_engine *engine;
  enum kvs_direction direction;
  unsigned number, wrong, borrowed;
  unsigned char *gpu, *cpu;
  pthread_t thread;
};

/* Blocks go round by one slot a round, so that each round moves other bytes to each slot. */
static int64_t slot_of(unsigned round, int64_t block) { return (block + round) % BLOCKS; }

static void move(struct mover *m, unsigned round) {
  int64_t gpu[BLOCKS], cpu[BLOCKS];
  struct kvs_error err;
  struct kvs_transfer *transfer;
  struct kvs_transfer_info info;
  const struct kvs_options options = {.path = KVS_PATH_BORROW};
  const struct kvs_tensor tensor = {
      .gpu = (uintptr_t)m->gpu, .cpu = (uintptr_t)m->cpu, .nbytes = NBYTES, .gpu_blocks = BLOCKS, .cpu_blocks = BLOCKS};
  const struct kvs_ids gpu_ids = {gpu, sizeof *gpu, BLOCKS}, cpu_ids = {cpu, sizeof *cpu, BLOCKS};
  for (int i = 0; i < BLOCKS; i++) gpu[i] = i, cpu[i] = slot_of(round, i);
  unsigned char *from = m->direction == KVS_D2H ? m->gpu : m->cpu;
  for (int i = 0; i < BLOCKS; i++) memset(from + i * NBYTES, (int)(m->number + round + (unsigned)i) & 0xFF, NBYTES);
  int status = kvs_swap_cache(m->engine, &tensor, 1, &gpu_ids, &cpu_ids, m->direction, &options, &transfer, &err);
  if (status == KVS_UNSUPPORTED) return; /* no device lends now */
  if (status || kvs_transfer_wait(transfer, 60 * SECONDS, &err)) {
    fprintf(stderr, "%s\n", err.message);
    m->wrong++;
    return;
  }
  kvs_transfer_get_info(transfer, &info);
  m->borrowed += info.path == KVS_PATH_BORROW;
  kvs_transfer_unref(transfer);
  for (int i = 0; i < BLOCKS; i++)
    m->wrong += memcmp(m->gpu + i * NBYTES, m->cpu + slot_of(round, i) * NBYTES, NBYTES) != 0;
}

static void *work(void *arg) {
  struct mover *m = arg;
  m->gpu = calloc(BLOCKS, NBYTES);
  m->cpu = calloc(BLOCKS, NBYTES);
  for (unsigned round = 0; round < ROUNDS; round++) move(m, round);
  free(m->gpu);
  free(m->cpu);
  return NULL;
}

/* The first device only stores and the second only loads, so that each finds the other's link idle. */
static void test_threads(struct kvs_engine *engines[2]) {
  struct mover movers[THREADS] = {{0}};
  struct kvs_error err;
  unsigned borrowed = 0;
  struct kvs_lending lending = {.slot_nbytes = SLOT, .count = 2, .share = 1};
  for (int i = 0; i < 2; i++) CHECK(!kvs_engine_lend(engines[i], engines[1 - i], &lending, SECONDS, &err));
  for (unsigned i = 0; i < THREADS; i++) {
    movers[i] = (struct mover){.engine = engines[i % 2], .direction = i % 2 ? KVS_H2D : KVS_D2H, .number = 50 * i};
    CHECK(!pthread_create(&movers[i].thread, NULL, work, &movers[i]));
  }
  for (unsigned i = 0; i < 12; i++) {
    lending = (struct kvs_lending){.slot_nbytes = (1 + i % 2) * SLOT, .count = 2 + i % 3, .share = 1 + i % 2};
    if (i % 4 == 3) lending.slot_nbytes = 0;
    int status = kvs_engine_lend(engines[i % 2], engines[1 - i % 2], &lending, SECONDS, &err);
    CHECK(!status || status == KVS_TIMEOUT, "%s", err.message);
  }
  for (unsigned i = 0; i < THREADS; i++) {
    pthread_join(movers[i].thread, NULL);
    CHECK(movers[i].wrong == 0, "thread %u: %u", i, movers[i].wrong);
    borrowed += movers[i].borrowed;
  }
  CHECK(borrowed > 0);
  lending.slot_nbytes = 0;
  for (int i = 0; i < 2; i++) CHECK(!kvs_engine_lend(engines[i], engines[1 - i], &lending, 10 * SECONDS, &err));
  for (int i = 0; i < 2; i++) CHECK(!kvs_engine_lender(engines[i], 0, &lending));
}

/* -- loads first --------------------------------------------------------------------------------------------------- */

static void block(void *arg) {
  while (!atomic_load((atomic_bool *)arg)) usleep(100);
}

/* Together with a load of one link, a store of one would exceed what both directions reach. */
static void set_sum(struct kvs_engine *engine, double both) {
  struct kvs_costs costs = *kvs_costs_default();
  costs.tuning.host_links = 2;
  costs.tuning.host_gbps[KVS_HOST_BOTH] = both;
  kvs_engine_set_costs(engine, &costs, "of this test");
}

static struct kvs_transfer *start(struct mover *m, const struct kvs_options *options) {
  int64_t ids[BLOCKS];
  struct kvs_error err;
  struct kvs_transfer *transfer = NULL;
  const struct kvs_tensor tensor = {
      .gpu = (uintptr_t)m->gpu, .cpu = (uintptr_t)m->cpu, .nbytes = NBYTES, .gpu_blocks = BLOCKS, .cpu_blocks = BLOCKS};
  const struct kvs_ids list = {ids, sizeof *ids, BLOCKS};
  for (int i = 0; i < BLOCKS; i++) ids[i] = i;
  CHECK(!kvs_swap_cache(m->engine, &tensor, 1, &list, &list, m->direction, options, &transfer, &err), "%s",
        err.message);
  return transfer;
}

static void finish(struct kvs_transfer *transfer) {
  struct kvs_error err;
  CHECK(!kvs_transfer_wait(transfer, 60 * SECONDS, &err), "%s", err.message);
  kvs_transfer_unref(transfer);
}

static struct kvs_lane *lane_of(struct kvs_engine *engine, enum kvs_direction direction) {
  for (unsigned i = 0; i < atomic_load(&engine->nlanes); i++)
    if (engine->numbered[i]->direction == direction && !engine->numbered[i]->stream_id) return engine->numbered[i];
  return NULL;
}

/* The start event of this load is on the lane stream, and its first burst on the burst stream, which is blocked. */
static void test_a_store_goes_behind_loads(struct kvs_engine *engines[2]) {
  struct mover load = {.engine = engines[1], .direction = KVS_H2D}, store = {.engine = engines[0]};
  struct kvs_lane *lane = lane_of(engines[1], KVS_H2D);
  const struct kvs_options burst = {.path = KVS_PATH_BURST}, high = {.priority = KVS_PRIORITY_HIGH};
  struct kvs_transfer *loading, *storing;
  struct kvs_error err;
  kvs_event end;
  atomic_bool open = false;
  load.gpu = calloc(BLOCKS, NBYTES), load.cpu = calloc(BLOCKS, NBYTES);
  store.gpu = calloc(BLOCKS, NBYTES), store.cpu = calloc(BLOCKS, NBYTES);
  set_sum(engines[0], 60);
  finish(start(&store, NULL)); /* nothing is loaded */
  CHECK(!kvs_dev_call(kvs_engine_device(engines[1]), block, &open, lane->burst_stream, &err));
  loading = start(&load, &burst);
  struct kvs_transfer *pinned;
  while (!kvs_lane_pin_begun(lane, &pinned, &end)) usleep(100);
  CHECK(pinned == loading);
  kvs_transfer_unpin(pinned);
  kvs_transfer_drop(pinned);
  finish(start(&store, &high));
  set_sum(engines[0], 0);
  finish(start(&store, NULL)); /* the sum is unknown */
  set_sum(engines[0], 120);
  finish(start(&store, NULL)); /* the host feeds both */
  set_sum(engines[0], 60);
  storing = start(&store, NULL);
  CHECK(kvs_transfer_wait(storing, SECONDS / 50, &err) == KVS_TIMEOUT);
  atomic_store(&open, true);
  finish(storing);
  CHECK(kvs_transfer_done(loading));
  finish(loading);
  free(load.gpu), free(load.cpu), free(store.gpu), free(store.cpu);
}

/* It would wait for what its caller may do only after the store. steps: only a layer of the load has not begun. */
static void test_a_store_waits_for_no_load_that_has_not_begun(struct kvs_engine *engines[2], bool steps) {
  struct mover load = {.engine = engines[1], .direction = KVS_H2D}, store = {.engine = engines[0]};
  struct kvs_device *device = kvs_engine_device(engines[1]);
  struct kvs_error err;
  kvs_stream stream;
  atomic_bool open = false;
  load.gpu = calloc(BLOCKS, NBYTES), load.cpu = calloc(BLOCKS, NBYTES);
  store.gpu = calloc(BLOCKS, NBYTES), store.cpu = calloc(BLOCKS, NBYTES);
  set_sum(engines[0], 60);
  CHECK(!kvs_dev_stream_create(device, 0, &stream, &err) && !kvs_dev_call(device, block, &open, stream, &err));
  const struct kvs_after after = {.kind = KVS_AFTER_STREAM, .handle = stream};
  const struct kvs_options whole = {.nafter = 1, .after = &after}, layer = {.nafter_layers = 1, .after_layers = &after};
  struct kvs_transfer *loading = start(&load, steps ? &layer : &whole);
  if (steps) /* it has begun, but for its layer */
    while (kvs_dev_event_query(device, loading->start, &err)) usleep(100);
  finish(start(&store, NULL));
  CHECK(!kvs_transfer_done(loading));
  atomic_store(&open, true);
  finish(loading);
  CHECK(!kvs_dev_stream_destroy(device, stream, &err));
  set_sum(engines[0], 0);
  free(load.gpu), free(load.cpu), free(store.gpu), free(store.cpu);
}

int main(void) {
  struct kvs_engine *engines[2];
  struct kvs_error err;
  for (int i = 0; i < 2; i++) {
    if (kvs_engine_open(i ? "host:1" : "host:0", &engines[i], &err)) return 1;
    CHECK(!kvs_engine_set_slots(engines[i], SLOT, 2, SECONDS, &err), "%s", err.message);
  }
  test_threads(engines);
  test_a_store_goes_behind_loads(engines);
  test_a_store_waits_for_no_load_that_has_not_begun(engines, false);
  test_a_store_waits_for_no_load_that_has_not_begun(engines, true);
  for (int i = 0; i < 2; i++) kvs_engine_unref(engines[i]);
  return check_close();
}
