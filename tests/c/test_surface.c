/* What the public functions refuse of structs that a program fills in: reserved words, and constants of other versions.
 */
#include <string.h>

#include "check.h"
#include "kvswap.h"
#include "kvswap_file.h"

static uint64_t memory[64];
static struct kvs_error err;

#define REFUSED(call, text)                                                                                            \
  do {                                                                                                                 \
    CHECK((call) == KVS_INVALID && strstr(err.message, text), "%s", err.message);                                      \
  } while (0)

static int swap(struct kvs_engine *engine, const struct kvs_options *options) {
  const uint64_t src = (uintptr_t)memory, dst = (uintptr_t)(memory + 32), nbytes = 256;
  struct kvs_transfer *transfer;
  int status = kvs_swap_batch(engine, &src, &dst, &nbytes, true, 1, options, &transfer, &err);
  if (status) return status;
  status = kvs_transfer_wait(transfer, -1, &err);
  kvs_transfer_unref(transfer);
  return status;
}

static struct kvs_transfer *move_cache(struct kvs_engine *engine, const struct kvs_options *options) {
  const int64_t first = 0;
  const struct kvs_ids ids = {&first, sizeof first, 1};
  const struct kvs_tensor tensor = {
      .gpu = (uintptr_t)memory, .cpu = (uintptr_t)(memory + 32), .nbytes = 256, .gpu_blocks = 1, .cpu_blocks = 1};
  struct kvs_transfer *transfer = NULL;
  int status = kvs_swap_cache(engine, &tensor, 1, NULL, &ids, KVS_D2H, options, &transfer, &err);
  CHECK(status == KVS_OK, "%s", err.message);
  return transfer;
}

static int swap_cache(struct kvs_engine *engine, const struct kvs_options *options) {
  const int64_t first = 0;
  const struct kvs_ids ids = {&first, sizeof first, 1};
  const struct kvs_tensor tensor = {
      .gpu = (uintptr_t)memory, .cpu = (uintptr_t)(memory + 32), .nbytes = 256, .gpu_blocks = 1, .cpu_blocks = 1};
  struct kvs_transfer *transfer = NULL;
  return kvs_swap_cache(engine, &tensor, 1, &ids, &ids, KVS_D2H, options, &transfer, &err);
}

static void test_options(struct kvs_engine *engine) {
  struct kvs_options options = {.priority = KVS_PRIORITY_NORMAL};
  CHECK(swap(engine, &options) == KVS_OK, "%s", err.message);
  options.reserved[4] = 1;
  REFUSED(swap(engine, &options), "reserved[4] of struct kvs_options");
  REFUSED(swap_cache(engine, &options), "reserved[4] of struct kvs_options");
  options = (struct kvs_options){.path = (enum kvs_path)99};
  REFUSED(swap(engine, &options), "path is 99");
  options = (struct kvs_options){.priority = (enum kvs_priority)9};
  REFUSED(swap(engine, &options), "priority is 9");
  options = (struct kvs_options){.gpu_order = (enum kvs_gpu_order)2};
  REFUSED(swap(engine, &options), "gpu_order is 2");
  struct kvs_defaults defaults = {.path = (enum kvs_path)77}, before;
  kvs_engine_get_defaults(engine, &before);
  kvs_engine_set_defaults(engine, &defaults);
  REFUSED(swap(engine, NULL), "path is 77");
  defaults = (struct kvs_defaults){.reserved = {[6] = 1}};
  kvs_engine_set_defaults(engine, &defaults);
  REFUSED(swap(engine, NULL), "reserved[6] of struct kvs_defaults");
  kvs_engine_set_defaults(engine, &before);
  CHECK(swap(engine, NULL) == KVS_OK, "%s", err.message);
}

/* Ids on the device: here those are in the same memory as all else. */
static void test_device_ids(struct kvs_engine *engine) {
  const int64_t zero = 0, one = 1;
  struct kvs_device_ids ids = {.ptr = (uintptr_t)&zero, .stride = 8, .count = 1, .width = 8, .reserved = {[1] = 1}};
  struct kvs_options options = {.device_ids = &ids, .path = KVS_PATH_KERNEL};
  REFUSED(swap_cache(engine, &options), "reserved[1] of struct kvs_device_ids");
  ids.reserved[1] = 0;
  REFUSED(swap(engine, &options), "takes no device_ids");
  ids.width = 2;
  REFUSED(swap_cache(engine, &options), "gpu_block_ids has ids of 2 bytes");
  ids.width = 8;
  ids.count = 2;
  REFUSED(swap_cache(engine, &options), "gpu_block_ids has 2 entries and cpu_block_ids has 1");
  ids.count = 1;
  ids.ptr += 4;
  REFUSED(swap_cache(engine, &options), "ids of 8 bytes are read at multiples of their size");
  ids.ptr = 8;
  REFUSED(swap_cache(engine, &options), "gpu_block_ids = 0x8 is not mapped memory");
  for (int bad = 0; bad < 2; bad++) {
    ids.ptr = (uintptr_t)(bad ? &one : &zero);
    memory[0] = 7;
    memory[32] = 8;
    struct kvs_transfer *transfer = move_cache(engine, &options);
    if (!transfer) continue;
    CHECK(kvs_transfer_wait(transfer, -1, &err) == (bad ? KVS_BAD_ID : KVS_OK), "%s", err.message);
    CHECK(memory[0] == 7 && memory[32] == (bad ? 0 : 7), "%llu", (unsigned long long)memory[32]);
    kvs_transfer_unref(transfer);
  }
}

static void test_pools(struct kvs_engine *engine) {
  struct kvs_pool_layout layout = {.ptr = (uintptr_t)memory, .num_blocks = 2, .block_nbytes = 128};
  struct kvs_pool *pool, *other;
  layout.reserved[0] = 1;
  REFUSED(kvs_pool_open(engine, &layout, &pool, &err), "reserved[0] of struct kvs_pool_layout");
  layout.reserved[0] = 0;
  CHECK(kvs_pool_open(engine, &layout, &pool, &err) == KVS_OK, "%s", err.message);
  layout.ptr = (uintptr_t)(memory + 32);
  CHECK(kvs_pool_open(engine, &layout, &other, &err) == KVS_OK, "%s", err.message);
  const int64_t first = 0;
  const struct kvs_ids ids = {&first, sizeof first, 1};
  const struct kvs_move move = {.src = &pool, .dst = &other, .npairs = 1, .src_ids = ids, .dst_ids = ids};
  const struct kvs_options options = {.reserved = {[3] = 5}};
  struct kvs_transfer *transfer;
  REFUSED(kvs_move_blocks(&move, &options, &transfer, &err), "reserved[3] of struct kvs_options");
  const struct kvs_device_ids device_ids = {.ptr = (uintptr_t)&first, .stride = 8, .count = 1, .width = 8};
  const struct kvs_options on_device = {.device_ids = &device_ids};
  REFUSED(kvs_move_blocks(&move, &on_device, &transfer, &err), "device_ids is set, and both lists have data");
  kvs_pool_unref(pool);
  kvs_pool_unref(other);
}

static void test_what_is_opened(struct kvs_engine *engine) {
  struct kvs_host_pool_options pool = {.num_blocks = 1, .slot_nbytes = 4096, .reserved = {[1] = 1}};
  struct kvs_shared_options shared = {.name = "kvs-test-surface", .mode = KVS_SHARED_CREATE, .reserved = {[2] = 1}};
  struct kvs_offload_layout layout = {.reserved = {[4] = 1}};
  struct kvs_file_settings settings = {.directory = "/nowhere", .reserved = {[3] = 1}};
  struct kvs_host_pool *made;
  struct kvs_offload *map;
  struct kvs_file_store *store;
  REFUSED(kvs_host_pool_open(engine, &pool, &made, &err), "reserved[1] of struct kvs_host_pool_options");
  REFUSED(kvs_shared_open(engine, &pool, &shared, &made, &err), "reserved[2] of struct kvs_shared_options");
  REFUSED(kvs_offload_open(engine, &layout, &map, &err), "reserved[4] of struct kvs_offload_layout");
  REFUSED(kvs_file_open(&settings, &store, &err), "reserved[3] of struct kvs_file_settings");
}

int main(void) {
  struct kvs_engine *engine;
  if (kvs_engine_open_deterministic(1, &engine, &err)) return 1;
  test_options(engine);
  test_device_ids(engine);
  test_pools(engine);
  test_what_is_opened(engine);
  CHECK(!strcmp(kvs_status_name(KVS_MISSING), "MISSING") && !strcmp(kvs_status_name(77), "UNKNOWN"), "names");
  CHECK(!strcmp(kvs_path_name((enum kvs_path)99), "unknown"), "%s", kvs_path_name((enum kvs_path)99));
  kvs_engine_unref(engine);
  return check_close();
}
