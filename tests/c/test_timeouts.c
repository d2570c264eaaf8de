/* Every timeout of the public headers, at the limits of its integer: idle objects end at once whatever it is, and no
 * arithmetic on it overflows (UBSan). tests/core/test_timeouts.py looks whether each function of the headers is here.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "kvswap.h"
#include "kvswap_file.h"

static const int64_t LIMITS[] = {INT64_MIN, INT64_MIN + 1, -1, 0, 1, 1000000, INT64_MAX - 1, INT64_MAX};
static struct kvs_error err;

/* A limit that is over before anything can end is no error of the arithmetic. */
#define ENDS(call)                                                                                                     \
  do {                                                                                                                 \
    int status_of_call = (call);                                                                                       \
    bool short_limit = limit >= 0 && limit <= 1000000;                                                                 \
    CHECK(status_of_call == KVS_OK || (short_limit && status_of_call == KVS_TIMEOUT), "%lld: %d %s", (long long)limit, \
          status_of_call, err.message);                                                                                \
  } while (0)

static void test_device(struct kvs_engine *engine, int64_t limit) {
  struct kvs_transfer *transfer = NULL;
  ENDS(kvs_engine_synchronize(engine, limit, &err));
  ENDS(kvs_engine_set_slots(engine, 128 << 10, 2, limit, &err));
  const struct kvs_lending lending = {.slot_nbytes = 128 << 10, .count = 2, .share = 1};
  struct kvs_engine *lender = NULL;
  CHECK(kvs_engine_open("host:59", &lender, &err) == KVS_OK, "%s", err.message);
  for (int i = 0; lender && i < 2; i++) ENDS(kvs_engine_lend(lender, engine, &lending, limit, &err));
  kvs_engine_unref(lender);
  CHECK(kvs_swap_batch(engine, NULL, NULL, NULL, true, 0, NULL, &transfer, &err) == KVS_OK, "%s", err.message);
  if (!transfer) return;
  ENDS(kvs_transfer_wait(transfer, limit, &err));
  kvs_transfer_unref(transfer);
}

static void test_host_pool(struct kvs_engine *engine, int64_t limit) {
  const struct kvs_host_pool_options options = {.num_blocks = 2, .slot_nbytes = 4096, .max_blocks = 4};
  struct kvs_host_pool *pool = NULL;
  CHECK(kvs_host_pool_open(engine, &options, &pool, &err) == KVS_OK, "%s", err.message);
  if (!pool) return;
  ENDS(kvs_host_pool_wait(pool, limit, &err));
  CHECK(kvs_host_pool_wait(pool, -1, &err) == KVS_OK, "%s", err.message);
  ENDS(kvs_host_pool_grow(pool, 3, limit, &err));
  CHECK(kvs_host_pool_wait(pool, -1, &err) == KVS_OK, "%s", err.message);
  ENDS(kvs_host_pool_shrink(pool, 1, limit, &err));
  ENDS(kvs_host_pool_drain(pool, limit, &err));
  ENDS(kvs_host_pool_close(pool, limit, false, &err));
  kvs_host_pool_free(pool, limit);
}

static void test_shared(struct kvs_engine *engine, int64_t limit) {
  const struct kvs_host_pool_options options = {.num_blocks = 2, .slot_nbytes = 4096};
  const int64_t first = 0;
  const struct kvs_ids blocks = {&first, sizeof first, 1};
  char name[64];
  bool won = false;
  snprintf(name, sizeof name, "kvs-test-timeouts-%d", (int)getpid());
  const struct kvs_shared_options shared = {.name = name, .mode = KVS_SHARED_CREATE};
  struct kvs_host_pool *pool = NULL;
  CHECK(kvs_shared_open(engine, &options, &shared, &pool, &err) == KVS_OK, "%s", err.message);
  if (!pool) return;
  CHECK(kvs_host_pool_wait(pool, -1, &err) == KVS_OK, "%s", err.message);
  CHECK(kvs_shared_claim(pool, &blocks, &won, &err) == KVS_OK && won, "%s", err.message);
  CHECK(kvs_shared_publish(pool, &blocks, &err) == KVS_OK, "%s", err.message);
  ENDS(kvs_shared_wait(pool, &blocks, limit, &err));
  kvs_host_pool_free(pool, limit);
}

/* Of the exporter's own memory: the plain address. */
static void test_mapped(struct kvs_engine *engine, int64_t limit) {
  struct kvs_export made;
  struct kvs_server *server = NULL;
  struct kvs_opening *opening = NULL;
  struct kvs_mapped *mapped = NULL;
  uint64_t ptr = 0;
  CHECK(kvs_engine_alloc(engine, 4096, false, &ptr, &err) == KVS_OK, "%s", err.message);
  memset(&made, 0, sizeof made);
  made.address = ptr;
  made.nbytes = 4096;
  if (kvs_export_make(engine, &made, &server, &err) == KVS_OK &&
      kvs_opening_start(engine, &made, NULL, &opening, &err) == KVS_OK) {
    int status = kvs_opening_wait(opening, limit, &mapped, &err);
    if (status == KVS_TIMEOUT) status = kvs_opening_wait(opening, -1, &mapped, &err);
    CHECK(status == KVS_OK, "%s", err.message);
    kvs_opening_drop(opening);
    if (mapped) ENDS(kvs_mapped_close(mapped, limit, &err));
    if (mapped) kvs_mapped_free(mapped);
    if (server) kvs_server_free(server);
  } else {
    CHECK(false, "%s", err.message);
  }
  CHECK(kvs_engine_free(engine, ptr, &err) == KVS_OK, "%s", err.message);
}

static struct kvs_file_store *open_store(const char *folder) {
  char directory[256];
  static int number;
  snprintf(directory, sizeof directory, "%s/%d", folder, number++);
  const struct kvs_file_settings settings = {
      .directory = directory, .layout = "{}", .block_nbytes = 512, .capacity = 1 << 20, .engine = KVS_FILE_THREADS};
  struct kvs_file_store *store = NULL;
  CHECK(kvs_file_open(&settings, &store, &err) == KVS_OK, "%s", err.message);
  return store;
}

static void test_files(const char *folder, int64_t limit) {
  struct kvs_file_store *store = open_store(folder);
  if (!store) return;
  const size_t end = 1;
  const struct kvs_file_keys keys = {.data = (const uint8_t *)"x", .ends = &end, .count = 1};
  struct kvs_file_transfer *transfer = NULL;
  CHECK(kvs_file_delete(store, &keys, NULL, &transfer, &err) == KVS_OK, "%s", err.message);
  if (transfer) {
    int status = kvs_file_transfer_wait(transfer, limit, &err);
    CHECK(status == KVS_OK || status == KVS_TIMEOUT || status == KVS_MISSING, "%d %s", status, err.message);
    status = kvs_file_transfer_wait(transfer, -1, &err);
    kvs_file_transfer_unref(transfer);
  }
  ENDS(kvs_file_close(store, limit, &err));
  kvs_file_unref(store);
}

int main(void) {
  char folder[] = "/tmp/kvs-timeouts-XXXXXX", command[64];
  struct kvs_engine *engine;
  if (!mkdtemp(folder) || kvs_engine_open("host:0", &engine, &err)) return 1;
  for (size_t i = 0; i < sizeof LIMITS / sizeof *LIMITS; i++) {
    test_device(engine, LIMITS[i]);
    test_host_pool(engine, LIMITS[i]);
    test_shared(engine, LIMITS[i]);
    test_mapped(engine, LIMITS[i]);
    test_files(folder, LIMITS[i]);
    struct kvs_file_store *left = open_store(folder);
    kvs_file_shutdown(LIMITS[i]);
    if (left) kvs_file_unref(left);
  }
  kvs_engine_unref(engine);
  for (size_t i = 0; i < sizeof LIMITS / sizeof *LIMITS; i++) kvs_shutdown(LIMITS[i]);
  snprintf(command, sizeof command, "rm -r %s", folder);
  CHECK(system(command) == 0, "%s", folder);
  return check_close();
}
