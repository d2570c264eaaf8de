/* Calls that move nothing check their ids, too: no tensors, no blocks, no parts. Under UBSan: no arithmetic on ids that
 * were not checked. */
#include <string.h>

#include "check.h"
#include "kvswap.h"

enum { BLOCKS = 4, NBYTES = 64 };

static unsigned char gpu[BLOCKS * NBYTES], cpu[BLOCKS * NBYTES];
static struct kvs_error err;

static struct kvs_ids list(const int64_t *ids, size_t count) { return (struct kvs_ids){ids, sizeof *ids, count}; }

static int finish(int status, struct kvs_transfer *transfer, uint64_t nblocks) {
  if (status) return status;
  struct kvs_transfer_info info;
  status = kvs_transfer_wait(transfer, -1, &err);
  kvs_transfer_get_info(transfer, &info);
  CHECK(info.num_blocks == nblocks && info.num_failed == 0, "%d", (int)info.num_blocks);
  kvs_transfer_unref(transfer);
  return status;
}

static int swap(struct kvs_engine *engine, struct kvs_ids of_gpu, struct kvs_ids of_cpu, enum kvs_direction direction,
                const struct kvs_options *options) {
  struct kvs_transfer *transfer = NULL;
  int status = kvs_swap_cache(engine, NULL, 0, &of_gpu, &of_cpu, direction, options, &transfer, &err);
  return finish(status, transfer, of_gpu.count);
}

#define GIVES(expected, call)                                                                                          \
  do {                                                                                                                 \
    int status_of_call = (call);                                                                                       \
    CHECK(status_of_call == (expected), "%d: %s", status_of_call, status_of_call ? err.message : "");                  \
  } while (0)

static void test_no_tensors(struct kvs_engine *engine, const struct kvs_options *options) {
  static const int64_t right[3] = {2, 0, 1}, most[3] = {INT32_MAX, 5, INT32_MAX - 1}, twice[3] = {1, 0, 1};
  static const int64_t wrong[][3] = {{0, INT64_MAX, 2}, {0, INT64_MIN, 2}, {-1, 1, 2}, {0, 1, (int64_t)INT32_MAX + 1}};
  const int32_t narrow[3] = {2, 0, -1};
  for (int d = 0; d < 2; d++) {
    enum kvs_direction direction = d ? KVS_H2D : KVS_D2H;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
      GIVES(KVS_RANGE, swap(engine, list(wrong[i], 3), list(right, 3), direction, options));
      GIVES(KVS_RANGE, swap(engine, list(right, 3), list(wrong[i], 3), direction, options));
      CHECK(strstr(err.message, "cpu_block_ids[") && strstr(err.message, "without tensors"), "%s", err.message);
    }
    GIVES(KVS_RANGE, swap(engine, (struct kvs_ids){narrow, 4, 3}, list(right, 3), direction, options));
    GIVES(KVS_INVALID, swap(engine, list(right, 3), list(right, 2), direction, options));
    GIVES(d ? KVS_INVALID : KVS_OK, swap(engine, list(twice, 3), list(right, 3), direction, options));
    GIVES(d ? KVS_OK : KVS_INVALID, swap(engine, list(right, 3), list(twice, 3), direction, options));
    GIVES(KVS_OK, swap(engine, list(right, 3), list(most, 3), direction, options));
    GIVES(KVS_OK, swap(engine, (struct kvs_ids){narrow, 4, 2}, list(most, 2), direction, options));
    GIVES(KVS_OK, swap(engine, list(NULL, 0), list(NULL, 0), direction, options));
  }
}

static void test_ids_on_the_device(struct kvs_engine *engine) {
  const int64_t bad = -5, right = 0;
  const struct kvs_device_ids ids = {.ptr = (uintptr_t)&bad, .stride = 8, .count = 1, .width = 8}, none = {.width = 8};
  struct kvs_options options = {.device_ids = &ids, .path = KVS_PATH_KERNEL};
  GIVES(KVS_INVALID, swap(engine, list(NULL, 0), list(&right, 1), KVS_D2H, &options));
  CHECK(strstr(err.message, "no kernel would check the ids"), "%s", err.message);
  options.device_ids = &none;
  GIVES(KVS_OK, swap(engine, list(NULL, 0), list(NULL, 0), KVS_D2H, &options));
}

static void test_no_blocks(struct kvs_engine *engine) {
  const int64_t first = 0;
  struct kvs_tensor tensor = {
      .gpu = (uintptr_t)gpu, .cpu = (uintptr_t)cpu, .nbytes = NBYTES, .gpu_blocks = BLOCKS, .cpu_blocks = 0};
  struct kvs_ids none = list(NULL, 0), one = list(&first, 1);
  struct kvs_transfer *transfer = NULL;
  GIVES(KVS_RANGE, kvs_swap_cache(engine, &tensor, 1, &one, &one, KVS_D2H, NULL, &transfer, &err));
  int status = kvs_swap_cache(engine, &tensor, 1, &none, &none, KVS_D2H, NULL, &transfer, &err);
  GIVES(KVS_OK, finish(status, transfer, 0));
  tensor.nbytes = 0;
  GIVES(KVS_INVALID, kvs_swap_cache(engine, &tensor, 1, &none, &none, KVS_D2H, NULL, &transfer, &err));
  status = kvs_swap_batch(engine, NULL, NULL, NULL, false, 0, NULL, &transfer, &err);
  GIVES(KVS_OK, finish(status, transfer, 0));
}

static int move(struct kvs_pool *src, struct kvs_pool *dst, size_t npairs, struct kvs_ids src_ids,
                struct kvs_ids dst_ids, const struct kvs_part *parts) {
  const struct kvs_move asked = {
      .src = &src, .dst = &dst, .npairs = npairs, .parts = parts, .src_ids = src_ids, .dst_ids = dst_ids};
  struct kvs_transfer *transfer = NULL;
  int status = kvs_move_blocks(&asked, NULL, &transfer, &err);
  return finish(status, transfer, src_ids.count);
}

static void test_pools(struct kvs_engine *engine) {
  static const int64_t right[2] = {1, 0}, wrong[2] = {0, INT64_MAX}, below[2] = {INT64_MIN, 0};
  const struct kvs_part part = {.rows = 1, .row_nbytes = NBYTES};
  struct kvs_pool_layout layout = {.ptr = (uintptr_t)gpu, .num_blocks = BLOCKS, .block_nbytes = NBYTES};
  struct kvs_pool *src = NULL, *dst = NULL;
  GIVES(KVS_OK, kvs_pool_open(engine, &layout, &src, &err));
  layout.ptr = (uintptr_t)cpu;
  GIVES(KVS_OK, kvs_pool_open(engine, &layout, &dst, &err));
  for (int named = 0; named < 2; named++) { /* parts: not NULL, and none of them */
    const struct kvs_part *parts = named ? &part : NULL;
    GIVES(KVS_RANGE, move(src, dst, 1, list(right, 2), list(wrong, 2), parts));
    GIVES(KVS_RANGE, move(src, dst, 1, list(below, 2), list(right, 2), parts));
    GIVES(KVS_INVALID, move(src, dst, 0, list(right, 2), list(right, 2), parts));
    GIVES(KVS_OK, move(src, dst, 1, list(NULL, 0), list(NULL, 0), NULL));
  }
  struct kvs_ids bad = list(wrong, 2), none = list(NULL, 0);
  GIVES(KVS_RANGE, kvs_note_access(src, &bad, true, 0, 0, 0, NULL, &err));
  GIVES(KVS_OK, kvs_note_access(src, &none, true, 0, 0, 0, NULL, &err));
  kvs_pool_unref(src);
  kvs_pool_unref(dst);
}

/* A group without parts has nothing to move, and its lists are checked all the same. */
static void test_jobs(struct kvs_engine *engine) {
  static const int64_t wrong[][2] = {{INT64_MAX, 0}, {INT64_MIN, 0}, {-1, 0}, {BLOCKS, 0}}, right[2] = {1, 0};
  static const int64_t sizes[1] = {2}, large[1] = {INT64_MAX}, zero[1] = {0}, end[1] = {INT64_MAX};
  const struct kvs_offload_tensor tensor = {.gpu = (uintptr_t)gpu,
                                            .gpu_blocks = BLOCKS,
                                            .gpu_stride = NBYTES,
                                            .gpu_page = NBYTES,
                                            .cpu = (uintptr_t)cpu,
                                            .cpu_stride = NBYTES,
                                            .cpu_page = NBYTES,
                                            .cpu_pitch = NBYTES};
  const struct kvs_offload_layout layout = {
      .tensors = &tensor, .ntensors = 1, .ngroups = 1, .chunks = BLOCKS, .factor = 1};
  struct kvs_offload *map = NULL;
  struct kvs_transfer *transfers[1];
  GIVES(KVS_OK, kvs_offload_open(engine, &layout, &map, &err));
  if (!map) return;
  struct kvs_offload_job job = {.gpu_blocks = list(right, 2),
                                .chunks = list(right, 2),
                                .group_sizes = list(sizes, 1),
                                .block_indices = list(zero, 1)};
  size_t next = 0, count = 0;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    struct kvs_offload_job bad = job;
    bad.gpu_blocks = list(wrong[i], 2);
    GIVES(KVS_RANGE, kvs_offload_submit(map, &bad, NULL, &next, transfers, &count, &err));
    bad = job;
    bad.chunks = list(wrong[i], 2);
    GIVES(KVS_RANGE, kvs_offload_submit(map, &bad, NULL, &next, transfers, &count, &err));
  }
  struct kvs_offload_job bad = job;
  bad.group_sizes = list(large, 1);
  GIVES(KVS_INVALID, kvs_offload_submit(map, &bad, NULL, &next, transfers, &count, &err));
  bad.gpu_blocks = bad.chunks = list(NULL, 0);
  GIVES(KVS_INVALID, kvs_offload_submit(map, &bad, NULL, &next, transfers, &count, &err));
  bad.group_sizes = list(zero, 1);
  bad.block_indices = list(end, 1);
  GIVES(KVS_OK, kvs_offload_submit(map, &bad, NULL, &next, transfers, &count, &err));
  if (count) GIVES(KVS_OK, finish(KVS_OK, transfers[0], 0));
  kvs_offload_close(map);
}

int main(void) {
  struct kvs_engine *engine;
  if (kvs_engine_open("host:0", &engine, &err)) return 1;
  for (int path = 0; path < KVS_PATHS; path++)
    if (path != KVS_PATH_BORROW) test_no_tensors(engine, &(struct kvs_options){.path = (enum kvs_path)path});
  test_no_tensors(engine, &(struct kvs_options){.layer_events = true});
  test_ids_on_the_device(engine);
  test_no_blocks(engine);
  test_pools(engine);
  test_jobs(engine);
  kvs_engine_unref(engine);
  return check_close();
}
