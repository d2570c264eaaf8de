/* Lent links from many threads, with their lending and taking back (run under ThreadSanitizer too). */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "kvswap.h"

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

int main(void) {
  struct kvs_engine *engines[2];
  struct kvs_error err;
  for (int i = 0; i < 2; i++) {
    if (kvs_engine_open(i ? "host:1" : "host:0", &engines[i], &err)) return 1;
    CHECK(!kvs_engine_set_slots(engines[i], SLOT, 2, SECONDS, &err), "%s", err.message);
  }
  test_threads(engines);
  for (int i = 0; i < 2; i++) kvs_engine_unref(engines[i]);
  return check_close();
}
