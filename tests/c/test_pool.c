/* Transfers between pools, in cases that only C can produce: pools that open and close meanwhile, refused events,
 * failures in groups, and what the race checker knows of transfers that have ended. The others are in
 * tests/core/test_pool.py. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "device/faults.h"
#include "lanes/state.h"

enum { BLOCKS = 16, NBYTES = 256, MEMORIES = 6 };
static const int64_t PATIENCE = 20000000000;
static struct kvs_error err;

/* An engine of its own, memory filled with 1, 2, 3, ... and a stream that is held up until its word is 1. */
struct rig {
  struct kvs_engine *engine;
  struct kvs_device *device;
  unsigned char *memory[MEMORIES];
  kvs_stream held;
  uint64_t word;
};

static void rig_open(struct rig *rig, uint64_t seed) {
  static int ordinal = 100;
  char name[16];
  snprintf(name, sizeof name, "host:%d", ordinal++);
  CHECK(!(seed ? kvs_engine_open_deterministic(seed, &rig->engine, &err) : kvs_engine_open(name, &rig->engine, &err)));
  rig->device = kvs_engine_device(rig->engine);
  for (int i = 0; i < MEMORIES; i++) {
    rig->memory[i] = malloc(BLOCKS * NBYTES);
    memset(rig->memory[i], i + 1, BLOCKS * NBYTES);
  }
  CHECK(!kvs_dev_stream_create(rig->device, 0, &rig->held, &err));
  CHECK(!kvs_engine_alloc(rig->engine, 4, true, &rig->word, &err));
  __atomic_store_n((uint32_t *)(uintptr_t)rig->word, 0, __ATOMIC_RELEASE);
  CHECK(!kvs_dev_wait32(rig->device, rig->word, 1, rig->held, &err));
}

static void rig_release(const struct rig *rig) {
  __atomic_store_n((uint32_t *)(uintptr_t)rig->word, 1, __ATOMIC_RELEASE);
}

static void rig_close(struct rig *rig) {
  rig_release(rig);
  CHECK(!kvs_engine_synchronize(rig->engine, PATIENCE, &err));
  kvs_engine_collect(rig->engine);
  CHECK(!kvs_engine_free(rig->engine, rig->word, &err));
  CHECK(!kvs_dev_stream_destroy(rig->device, rig->held, &err));
  kvs_engine_unref(rig->engine);
  for (int i = 0; i < MEMORIES; i++) free(rig->memory[i]);
}

static struct kvs_pool *pool_of(const struct rig *rig, int memory, struct kvs_pool *group) {
  struct kvs_pool_layout layout = {.ptr = (uintptr_t)rig->memory[memory], .num_blocks = BLOCKS, .block_nbytes = NBYTES};
  struct kvs_pool *pool = NULL;
  layout.group = group;
  CHECK(!kvs_pool_open(rig->engine, &layout, &pool, &err), "%s", err.message);
  return pool;
}

static int move(struct kvs_pool *const *src, struct kvs_pool *const *dst, size_t pairs, int64_t from, int64_t to,
                const struct kvs_options *options, struct kvs_transfer **transfer) {
  const struct kvs_move move = {
      .src = src, .dst = dst, .npairs = pairs, .src_ids = {&from, 8, 1}, .dst_ids = {&to, 8, 1}};
  return kvs_move_blocks(&move, options, transfer, &err);
}

static int note(struct kvs_pool *pool, int64_t slot, bool write, kvs_stream stream) {
  const struct kvs_ids ids = {&slot, 8, 1};
  return kvs_note_access(pool, &ids, write, 0, 0, stream, "here", &err);
}

static void refuse(const struct rig *rig, enum kvs_fault_kind kind, const char *operation, uint64_t nth) {
  struct kvs_fault fault = {.action = nth ? KVS_FAULT_FAIL : KVS_FAULT_NONE, .nth = nth, .code = 1};
  snprintf(fault.operation, sizeof fault.operation, "%s", operation);
  CHECK(!kvs_dev_fault_set(rig->device, kind, &fault, &err));
}

/* -- pools that come and go ------------------------------------------------------------------------------------ */

static void test_a_pool_that_is_opened_again(void) {
  for (uint64_t seed = 1; seed < 30; seed++) {
    struct rig rig;
    struct kvs_transfer *load, *store;
    rig_open(&rig, seed);
    struct kvs_pool *host = pool_of(&rig, 0, NULL), *gpu = pool_of(&rig, 1, NULL), *other = pool_of(&rig, 2, NULL);
    struct kvs_options held = {.on_stream = true, .stream = rig.held};
    CHECK(!move(&host, &gpu, 1, 0, 5, &held, &load));
    kvs_pool_unref(gpu);
    gpu = pool_of(&rig, 1, NULL);
    CHECK(!move(&gpu, &other, 1, 5, 6, NULL, &store));
    CHECK(kvs_transfer_wait(store, 1000000, &err) != KVS_OK, "seed %d", (int)seed); /* nothing can run */
    rig_release(&rig);
    CHECK(!kvs_transfer_wait(store, PATIENCE, &err) && rig.memory[2][6 * NBYTES] == 1, "seed %d", (int)seed);
    kvs_transfer_unref(load);
    kvs_transfer_unref(store);
    CHECK(!move(&gpu, &other, 1, 7, 7, NULL, &store)); /* all of that is over now */
    CHECK(!kvs_transfer_wait(store, PATIENCE, &err));
    kvs_transfer_unref(store);
    kvs_pool_unref(host), kvs_pool_unref(gpu), kvs_pool_unref(other);
    rig_close(&rig);
  }
}

static void test_the_first_of_a_group_goes_first(void) {
  struct rig rig;
  struct kvs_transfer *transfer;
  rig_open(&rig, 7);
  struct kvs_pool *k = pool_of(&rig, 0, NULL), *v = pool_of(&rig, 1, k), *out = pool_of(&rig, 2, NULL);
  kvs_pool_unref(k);
  CHECK(!move(&v, &out, 1, 1, 2, NULL, &transfer));
  CHECK(!kvs_transfer_wait(transfer, PATIENCE, &err) && rig.memory[2][2 * NBYTES] == 2);
  kvs_transfer_unref(transfer);
  kvs_pool_unref(v), kvs_pool_unref(out);
  rig_close(&rig);
}

/* -- failures -------------------------------------------------------------------------------------------------- */

/* Writing one pool's block anew says nothing of the group's other blocks. */
static void test_a_failure_in_a_group(void) {
  struct rig rig;
  struct kvs_transfer *transfer;
  rig_open(&rig, 3);
  struct kvs_pool *host[2] = {pool_of(&rig, 0, NULL)}, *gpu[2] = {pool_of(&rig, 2, NULL)},
                  *out[2] = {pool_of(&rig, 4, NULL)};
  host[1] = pool_of(&rig, 1, host[0]);
  gpu[1] = pool_of(&rig, 3, gpu[0]);
  out[1] = pool_of(&rig, 5, out[0]);
  refuse(&rig, KVS_FAULT_COPY, "", 1);
  CHECK(!move(host, gpu, 2, 0, 5, NULL, &transfer));
  refuse(&rig, KVS_FAULT_COPY, "", 0);
  CHECK(kvs_transfer_wait(transfer, PATIENCE, &err) == KVS_REFUSED);
  kvs_transfer_unref(transfer);
  for (int written = 0; written < 3; written++) { /* none, K, K and V */
    if (written) CHECK(!note(gpu[written - 1], 5, true, 1));
    CHECK(!move(gpu, out, 2, 5, 6, NULL, &transfer));
    int status = kvs_transfer_wait(transfer, PATIENCE, &err);
    CHECK(status == (written == 2 ? KVS_OK : KVS_REFUSED), "%d written", written);
    if (status) CHECK(strstr(err.message, "transfer 1 failed") != NULL, "%s", err.message);
    kvs_transfer_unref(transfer);
  }
  for (int i = 0; i < 2; i++) kvs_pool_unref(host[i]), kvs_pool_unref(gpu[i]), kvs_pool_unref(out[i]);
  rig_close(&rig);
}

static void test_a_layer_that_was_refused(void) {
  struct rig rig;
  struct kvs_transfer *transfer;
  rig_open(&rig, 0);
  struct kvs_pool *host[2] = {pool_of(&rig, 0, NULL), pool_of(&rig, 1, NULL)};
  struct kvs_pool *gpu[2] = {pool_of(&rig, 2, NULL), pool_of(&rig, 3, NULL)};
  struct kvs_after after[2] = {{.kind = KVS_AFTER_NONE}, {.kind = KVS_AFTER_STREAM, .handle = rig.held}};
  struct kvs_options options = {.layer_events = true, .after_layers = after, .nafter_layers = 2};
  refuse(&rig, KVS_FAULT_COPY, "", 1);
  CHECK(!move(host, gpu, 2, 0, 5, &options, &transfer));
  refuse(&rig, KVS_FAULT_COPY, "", 0);
  usleep(20000); /* so that the layer's event is reached */
  CHECK(kvs_transfer_layer_done(transfer, 0, &err) == KVS_REFUSED);
  CHECK(kvs_transfer_make_wait_layer(transfer, 0, rig.held, &err) == KVS_REFUSED);
  rig_release(&rig);
  CHECK(kvs_transfer_wait(transfer, PATIENCE, &err) == KVS_REFUSED);
  CHECK(kvs_transfer_layer_done(transfer, 0, &err) == KVS_REFUSED);
  kvs_transfer_unref(transfer);
  for (int i = 0; i < 2; i++) kvs_pool_unref(host[i]), kvs_pool_unref(gpu[i]);
  rig_close(&rig);
}

static void test_an_event_that_is_none(void) {
  struct rig rig;
  struct kvs_transfer *transfer;
  rig_open(&rig, 0);
  struct kvs_pool *host[2] = {pool_of(&rig, 0, NULL), pool_of(&rig, 1, NULL)};
  struct kvs_pool *gpu[2] = {pool_of(&rig, 2, NULL), pool_of(&rig, 3, NULL)};
  struct kvs_after after[2] = {{.kind = KVS_AFTER_NONE}, {.kind = KVS_AFTER_EVENT, .handle = 0x12345671}};
  struct kvs_options options = {.after_layers = after, .nafter_layers = 2};
  CHECK(move(host, gpu, 2, 1, 5, &options, &transfer) == KVS_REFUSED);
  CHECK(rig.memory[2][5 * NBYTES] == 3);
  for (int i = 0; i < 2; i++) kvs_pool_unref(host[i]), kvs_pool_unref(gpu[i]);
  rig_close(&rig);
}

/* The driver records no end: the caller's stream still comes after, and the slot is usable once the copies are over. */
static void test_an_end_that_is_not_recorded(void) {
  struct rig rig;
  struct kvs_transfer *transfer = NULL;
  kvs_stream stream;
  rig_open(&rig, 0);
  struct kvs_pool *host = pool_of(&rig, 0, NULL), *gpu = pool_of(&rig, 1, NULL);
  CHECK(!kvs_dev_stream_create(rig.device, 0, &stream, &err));
  struct kvs_after after = {.kind = KVS_AFTER_STREAM, .handle = rig.held};
  struct kvs_options options = {.on_stream = true, .stream = stream, .after = &after, .nafter = 1};
  refuse(&rig, KVS_FAULT_CALL, "event_record", 4); /* of the stream, of the held one, the start, the end */
  CHECK(!move(&host, &gpu, 1, 1, 5, &options, &transfer), "%s", err.message);
  refuse(&rig, KVS_FAULT_CALL, "", 0);
  CHECK(!kvs_dev_fill(rig.device, (uintptr_t)(rig.memory[1] + 5 * NBYTES), 0x77777777, NBYTES / 4, stream, &err));
  CHECK(kvs_dev_stream_query(rig.device, stream, &err) == KVS_NOT_READY);
  rig_release(&rig);
  CHECK(kvs_transfer_wait(transfer, PATIENCE, &err) == KVS_REFUSED);
  CHECK(!kvs_engine_synchronize(rig.engine, PATIENCE, &err) && rig.memory[1][5 * NBYTES] == 0x77);
  kvs_transfer_unref(transfer);
  CHECK(!move(&host, &gpu, 1, 2, 5, NULL, &transfer), "%s", err.message);
  CHECK(!kvs_transfer_wait(transfer, PATIENCE, &err) && rig.memory[1][5 * NBYTES] == 1);
  kvs_transfer_unref(transfer);
  kvs_pool_unref(host), kvs_pool_unref(gpu);
  CHECK(!kvs_dev_stream_destroy(rig.device, stream, &err));
  rig_close(&rig);
}

/* -- the race checker ------------------------------------------------------------------------------------------ */

static void wait_unseen(struct kvs_engine *engine) {
  struct kvs_stats stats = {.unfinished = 1};
  while (stats.unfinished) {
    usleep(100);
    kvs_engine_stats(engine, &stats);
  }
}

/* Whether a transfer had ended, unseen by the caller, when the next was submitted makes no difference: a layer waits
 * for a stream, what comes after the transfer comes after the stream. `group`: through the slots of a group's other
 * pool. */
static void test_ended_or_not(bool ended, bool group) {
  struct rig rig;
  struct kvs_transfer *first, *second;
  rig_open(&rig, 0);
  struct kvs_pool *host[2] = {pool_of(&rig, 0, NULL), pool_of(&rig, 1, NULL)}, *gpu[2] = {pool_of(&rig, 2, NULL)};
  gpu[1] = pool_of(&rig, 3, group ? gpu[0] : NULL);
  struct kvs_pool *used = pool_of(&rig, 4, NULL);
  struct kvs_after after[2] = {{.kind = KVS_AFTER_NONE}, {.kind = KVS_AFTER_STREAM, .handle = rig.held}};
  struct kvs_options layered = {.layer_events = true, .after_layers = after, .nafter_layers = 2};
  struct kvs_options held = {.on_stream = true, .stream = rig.held}, high = {.priority = KVS_PRIORITY_HIGH};
  kvs_racecheck_start();
  uint64_t before = kvs_racecheck_found();
  CHECK(!note(used, 1, true, rig.held)); /* somebody's kernel on that stream */
  CHECK(!move(host, gpu, group ? 1 : 2, 1, 5, group ? &held : &layered, &first));
  if (ended) {
    rig_release(&rig);
    wait_unseen(rig.engine);
  }
  CHECK(!move(group ? &gpu[1] : &gpu[0], &used, 1, 5, 1, &high, &second));
  CHECK(kvs_racecheck_found() == before, "ended %d, group %d", ended, group);
  rig_release(&rig);
  CHECK(!kvs_transfer_wait(second, PATIENCE, &err));
  kvs_racecheck_stop();
  kvs_transfer_unref(first), kvs_transfer_unref(second);
  for (int i = 0; i < 2; i++) kvs_pool_unref(host[i]), kvs_pool_unref(gpu[i]);
  kvs_pool_unref(used);
  rig_close(&rig);
}

/* The caller saw layer 0 arrive, however much more had arrived by then. */
static void test_a_layer_seen(bool ended) {
  struct rig rig;
  struct kvs_transfer *transfer;
  kvs_stream compute;
  rig_open(&rig, 0);
  struct kvs_pool *host[2] = {pool_of(&rig, 0, NULL), pool_of(&rig, 1, NULL)};
  struct kvs_pool *gpu[2] = {pool_of(&rig, 2, NULL), pool_of(&rig, 3, NULL)};
  struct kvs_after after[2] = {{.kind = KVS_AFTER_NONE}, {.kind = KVS_AFTER_STREAM, .handle = rig.held}};
  struct kvs_options options = {.layer_events = true, .after_layers = after, .nafter_layers = 2};
  CHECK(!kvs_dev_stream_create(rig.device, 0, &compute, &err));
  kvs_racecheck_start();
  uint64_t before = kvs_racecheck_found();
  CHECK(!move(host, gpu, 2, 0, 5, &options, &transfer));
  if (ended) {
    rig_release(&rig);
    wait_unseen(rig.engine);
  }
  while (kvs_transfer_layer_done(transfer, 0, &err) == KVS_NOT_READY) usleep(100);
  CHECK(!note(gpu[0], 5, true, compute));
  CHECK(kvs_racecheck_found() == before, "ended %d", ended);
  CHECK(!note(gpu[1], 5, true, compute)); /* which it did not look at */
  CHECK(kvs_racecheck_found() == before + 1, "ended %d", ended);
  rig_release(&rig);
  CHECK(!kvs_transfer_wait(transfer, PATIENCE, &err));
  kvs_racecheck_stop();
  kvs_transfer_unref(transfer);
  CHECK(!kvs_dev_stream_destroy(rig.device, compute, &err));
  for (int i = 0; i < 2; i++) kvs_pool_unref(host[i]), kvs_pool_unref(gpu[i]);
  rig_close(&rig);
}

/* Many threads' worth of reaping in between: order that is there is seen. */
struct polling {
  struct kvs_engine *engine;
  atomic_bool stop;
};

static void *poll_stats(void *arg) {
  struct polling *polling = arg;
  struct kvs_stats stats;
  while (!atomic_load(&polling->stop)) kvs_engine_stats(polling->engine, &stats);
  return NULL;
}

static void test_reaped_meanwhile(void) {
  struct rig rig;
  uint64_t seed = 11;
  pthread_t thread;
  rig_open(&rig, 0);
  struct kvs_pool *host = pool_of(&rig, 0, NULL), *gpu = pool_of(&rig, 1, NULL);
  struct polling polling = {.engine = rig.engine};
  rig_release(&rig);
  pthread_create(&thread, NULL, poll_stats, &polling);
  kvs_racecheck_start();
  uint64_t before = kvs_racecheck_found();
  for (int i = 0; i < 3000; i++) {
    struct kvs_transfer *transfer;
    bool store = check_below(&seed, 2);
    int64_t a = (int64_t)check_below(&seed, 4), b = (int64_t)check_below(&seed, 4);
    int status = move(store ? &gpu : &host, store ? &host : &gpu, 1, a, b,
                      &(struct kvs_options){.priority = (enum kvs_priority)check_below(&seed, 3)}, &transfer);
    if (status == KVS_QUEUE_FULL) continue;
    CHECK(!status, "%s", err.message);
    if (!status) kvs_transfer_unref(transfer);
  }
  CHECK(!kvs_engine_synchronize(rig.engine, PATIENCE, &err));
  CHECK(kvs_racecheck_found() == before);
  kvs_racecheck_stop();
  atomic_store(&polling.stop, true);
  pthread_join(thread, NULL);
  kvs_pool_unref(host), kvs_pool_unref(gpu);
  rig_close(&rig);
}

int main(void) {
  test_a_pool_that_is_opened_again();
  test_the_first_of_a_group_goes_first();
  test_a_failure_in_a_group();
  test_a_layer_that_was_refused();
  test_an_event_that_is_none();
  test_an_end_that_is_not_recorded();
  for (int i = 0; i < 4; i++) test_ended_or_not(i & 1, i & 2);
  test_a_layer_seen(false);
  test_a_layer_seen(true);
  test_reaped_meanwhile();
  return check_close();
}
