/* Stores that share a directory, in one process: threads of each store, load and look, and stores are closed and opened
 * beside them. A key stands for its bytes. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "files/state.h"

enum { NBYTES = 3000, KEYS = 64, STORES = 3 };
static struct kvs_error err;
static const int64_t PATIENCE = 60000000000;
static atomic_bool stop;
static atomic_uint served, wrong;

static void fill(uint8_t *block, unsigned key) { memset(block, (int)(key * 37 + 11), NBYTES); }

static struct kvs_file_store *open_shared(const char *folder) {
  struct kvs_file_settings settings = {.directory = folder,
                                       .layout = "{}",
                                       .block_nbytes = NBYTES,
                                       .capacity = 40 * 8192,
                                       .segment_nbytes = 4096 + 8 * 8192,
                                       .engine = KVS_FILE_THREADS,
                                       .depth = 2,
                                       .events = 100,
                                       .shared = true};
  struct kvs_file_store *store = NULL;
  CHECK(!kvs_file_open(&settings, &store, &err), "%s", err.message);
  return store;
}

static int move(struct kvs_file_store *store, unsigned key, uint8_t *block, bool load) {
  char text[16];
  size_t end = (size_t)snprintf(text, sizeof text, "%u", key);
  uint64_t address = (uintptr_t)block;
  struct kvs_file_keys keys = {(const uint8_t *)text, &end, 1};
  struct kvs_file_blocks blocks = {.addresses = &address};
  struct kvs_file_transfer *transfer;
  struct kvs_error why;
  int status = load ? kvs_file_load_blocks(store, &keys, &blocks, NULL, &transfer, &why)
                    : kvs_file_store_blocks(store, &keys, &blocks, NULL, &transfer, &why);
  if (status) return status;
  status = kvs_file_transfer_wait(transfer, PATIENCE, &why);
  kvs_file_transfer_unref(transfer);
  return status;
}

static void *use(void *arg) {
  struct kvs_file_store *store = arg;
  uint64_t state = (uintptr_t)arg;
  uint8_t block[NBYTES], expected[NBYTES];
  struct kvs_error why;
  while (!atomic_load(&stop)) {
    unsigned key = (unsigned)check_below(&state, KEYS);
    fill(expected, key);
    if (check_below(&state, 3) == 0) {
      (void)move(store, key, expected, false);
      continue;
    }
    memset(block, 0, sizeof block);
    int status = move(store, key, block, true);
    if (status == KVS_OK) atomic_fetch_add(&served, 1);
    if (status == KVS_OK ? memcmp(block, expected, NBYTES) != 0 : status != KVS_MISSING && status != KVS_CLOSED)
      atomic_fetch_add(&wrong, 1);
    if (check_below(&state, 50) == 0) (void)kvs_file_refresh(store, &why);
  }
  return NULL;
}

static void *look(void *arg) {
  struct kvs_file_store *store = arg;
  size_t *ends, end = 1, count;
  uint8_t *keys;
  bool *there, found;
  uint64_t lost;
  struct kvs_file_keys one = {(const uint8_t *)"7", &end, 1};
  struct kvs_error why;
  while (!atomic_load(&stop)) {
    (void)kvs_file_contains(store, &one, &found, &why);
    if (kvs_file_list(store, &keys, &ends, &count, &why)) continue;
    free(keys);
    free(ends);
    if (kvs_file_take_events(store, &keys, &ends, &there, &count, &lost, &why)) continue;
    free(keys);
    free(ends);
    free(there);
  }
  return NULL;
}

static void test_threads_of_several_stores(void) {
  char folder[] = "/tmp/kvswap-test-XXXXXX", command[64];
  CHECK(mkdtemp(folder) != NULL);
  for (int round = 0; round < 4; round++) {
    struct kvs_file_store *stores[STORES];
    pthread_t threads[2 * STORES];
    atomic_store(&stop, false);
    for (int i = 0; i < STORES; i++) stores[i] = open_shared(folder);
    for (int i = 0; i < STORES; i++) {
      CHECK(!pthread_create(&threads[2 * i], NULL, use, stores[i]));
      CHECK(!pthread_create(&threads[2 * i + 1], NULL, look, stores[i]));
    }
    usleep(300000);
    CHECK(!kvs_file_close(stores[0], PATIENCE, &err), "%s", err.message); /* beside calls and the other stores */
    struct kvs_file_store *again = open_shared(folder);
    usleep(200000);
    atomic_store(&stop, true);
    for (int i = 0; i < 2 * STORES; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < STORES; i++) kvs_file_unref(stores[i]);
    kvs_file_unref(again);
  }
  kvs_file_shutdown(PATIENCE);
  CHECK(atomic_load(&wrong) == 0 && atomic_load(&served) > 0, "%u wrong, %u served", atomic_load(&wrong),
        atomic_load(&served));
  snprintf(command, sizeof command, "rm -r %s", folder);
  CHECK(system(command) == 0);
}

int main(void) {
  test_threads_of_several_stores();
  return check_close();
}
