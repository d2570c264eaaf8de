/* Offloading maps on deterministic devices: jobs of both directions on several queues, run in an order that a seed
 * decides, leave the bytes that they leave one after another; and who holds what, for how long. test_offload.py
 * has the rest. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "lanes/state.h"
#include "offload/offload.h"
#include "plan/packing.h"

enum { BLOCKS = 12, CHUNKS = 6, MOST = 3, TENSORS = 2, GROUPS = 2, PADDING = 5, QUEUES = 3, JOBS = 24, SEEDS = 150 };
static const uint64_t PAGES[TENSORS] = {40, 24};
static const int64_t PATIENCE = 20000000000;
static struct kvs_error err;

/* Both sides of both tensors: on the device, and as they would be after each job at once. */
struct memory {
  unsigned char gpu[TENSORS][BLOCKS * 40];
  unsigned char cpu[CHUNKS * (MOST * 64 + PADDING)];
};

struct rig {
  struct kvs_engine *engine;
  struct kvs_offload *map;
  struct memory *real, *model;
  uint64_t factor, row;
  bool together; /* on the host: all tensors of a block; else all blocks of a chunk's tensor */
  kvs_stream queues[2][QUEUES];
  uint64_t random;
  int released;
};

static void count_release(void *owner) { ++*(int *)owner; }

static uint64_t below(struct rig *rig, uint64_t limit) { return check_below(&rig->random, limit); }

/* Group 0 has all of both tensors, group 1 two fragments of the first. */
static const struct kvs_offload_part PARTS[] = {
    {.group = 0, .tensor = 0, .nbytes = 40, .count = 1, .gpu_pitch = 40, .cpu_pitch = 40, .writers = 1},
    {.group = 0, .tensor = 1, .nbytes = 24, .count = 1, .gpu_pitch = 24, .cpu_pitch = 24, .writers = 1},
    {.group = 1,
     .tensor = 0,
     .gpu_offset = 4,
     .cpu_offset = 10,
     .nbytes = 7,
     .count = 2,
     .gpu_pitch = 16,
     .cpu_pitch = 20,
     .writers = 1},
};
enum { NPARTS = sizeof PARTS / sizeof *PARTS };

static uint64_t host_offset(const struct rig *rig, uint32_t tensor) {
  return tensor ? (rig->together ? 1 : rig->factor) * PAGES[0] : 0;
}

static uint64_t host_pitch(const struct rig *rig, uint32_t tensor) {
  return rig->together ? PAGES[0] + PAGES[1] : PAGES[tensor];
}

static struct kvs_offload_tensor tensor_at(const struct rig *rig, uint32_t t, uint64_t cpu_offset, uint64_t cpu_stride,
                                           uint64_t cpu_pitch) {
  return (struct kvs_offload_tensor){.gpu = (uintptr_t)rig->real->gpu[t],
                                     .gpu_blocks = BLOCKS,
                                     .gpu_stride = PAGES[t],
                                     .gpu_page = PAGES[t],
                                     .cpu = (uintptr_t)rig->real->cpu + cpu_offset,
                                     .cpu_stride = cpu_stride,
                                     .cpu_page = PAGES[t],
                                     .cpu_pitch = cpu_pitch};
}

static void rig_open(struct rig *rig, uint64_t seed) {
  *rig = (struct rig){
      .random = seed * 2654435761u + 1, .real = malloc(sizeof *rig->real), .model = malloc(sizeof *rig->model)};
  rig->factor = 1 + below(rig, MOST);
  rig->together = below(rig, 2);
  rig->row = rig->factor * (PAGES[0] + PAGES[1]) + below(rig, 2) * PADDING;
  for (size_t i = 0; i < sizeof *rig->real; i++) ((unsigned char *)rig->real)[i] = (unsigned char)below(rig, 256);
  *rig->model = *rig->real;
  CHECK(!kvs_engine_open_deterministic(seed, &rig->engine, &err));
  struct kvs_offload_tensor tensors[TENSORS];
  for (uint32_t t = 0; t < TENSORS; t++)
    tensors[t] = tensor_at(rig, t, host_offset(rig, t), rig->row, host_pitch(rig, t));
  struct kvs_offload_layout layout = {.tensors = tensors,
                                      .ntensors = TENSORS,
                                      .parts = PARTS,
                                      .nparts = NPARTS,
                                      .ngroups = GROUPS,
                                      .chunks = CHUNKS,
                                      .factor = rig->factor,
                                      .remember_failures = true,
                                      .owner = &rig->released,
                                      .release = count_release};
  CHECK(!kvs_offload_open(rig->engine, &layout, &rig->map, &err), "%s", err.message);
  for (int way = 0; way < 2; way++)
    for (int q = 0; q < QUEUES; q++)
      CHECK(!kvs_dev_stream_create(kvs_engine_device(rig->engine), 0, &rig->queues[way][q], &err));
}

static void rig_close(struct rig *rig) {
  kvs_offload_close(rig->map);
  CHECK(!kvs_engine_synchronize(rig->engine, PATIENCE, &err));
  kvs_engine_collect(rig->engine);
  CHECK(rig->released == 1);
  kvs_engine_unref(rig->engine);
  free(rig->real);
  free(rig->model);
}

/* A job in lists of 4 and of 8 bytes. */
struct lists {
  int32_t gpu[BLOCKS];
  int64_t chunks[CHUNKS + 1], sizes[GROUPS], indices[GROUPS];
  size_t ngpu, nchunks;
};

static size_t chunks_of(const struct rig *rig, uint64_t size, uint64_t index) {
  return size ? (size_t)((index % rig->factor + size - 1) / rig->factor + 1) : 0;
}

static void draw(struct rig *rig, struct lists *lists) {
  int32_t blocks[BLOCKS];
  int64_t chunks[CHUNKS];
  for (int i = 0; i < BLOCKS; i++) blocks[i] = i;
  for (int i = 0; i < CHUNKS; i++) chunks[i] = i;
  for (size_t i = BLOCKS; i-- > 1;) {
    size_t k = (size_t)below(rig, i + 1);
    int32_t swapped = blocks[i];
    blocks[i] = blocks[k], blocks[k] = swapped;
  }
  for (size_t i = CHUNKS; i-- > 1;) {
    size_t k = (size_t)below(rig, i + 1);
    int64_t swapped = chunks[i];
    chunks[i] = chunks[k], chunks[k] = swapped;
  }
  lists->ngpu = lists->nchunks = 0;
  for (int g = 0; g < GROUPS; g++) {
    lists->indices[g] = (int64_t)below(rig, 7);
    uint64_t size = below(rig, 5);
    while (lists->nchunks + chunks_of(rig, size, (uint64_t)lists->indices[g]) > CHUNKS) size--;
    lists->sizes[g] = (int64_t)size;
    lists->ngpu += size;
    lists->nchunks += chunks_of(rig, size, (uint64_t)lists->indices[g]);
  }
  memcpy(lists->gpu, blocks, sizeof blocks);
  memcpy(lists->chunks, chunks, sizeof chunks);
}

static void apply(struct rig *rig, const struct lists *lists, bool store) {
  size_t gpu = 0, chunk = 0;
  for (uint32_t g = 0; g < GROUPS; g++) {
    uint64_t skip = (uint64_t)lists->indices[g] % rig->factor;
    for (uint64_t k = 0; k < (uint64_t)lists->sizes[g]; k++)
      for (int p = 0; p < NPARTS; p++)
        for (uint64_t f = 0; PARTS[p].group == g && f < PARTS[p].count; f++) {
          uint64_t page = PAGES[PARTS[p].tensor];
          unsigned char *here = rig->model->gpu[PARTS[p].tensor] + (uint64_t)lists->gpu[gpu + k] * page +
                                PARTS[p].gpu_offset + f * PARTS[p].gpu_pitch;
          unsigned char *there =
              rig->model->cpu + (uint64_t)lists->chunks[chunk + (skip + k) / rig->factor] * rig->row +
              host_offset(rig, PARTS[p].tensor) + (skip + k) % rig->factor * host_pitch(rig, PARTS[p].tensor) +
              PARTS[p].cpu_offset + f * PARTS[p].cpu_pitch;
          memcpy(store ? there : here, store ? here : there, PARTS[p].nbytes);
        }
    gpu += (size_t)lists->sizes[g];
    chunk += chunks_of(rig, (uint64_t)lists->sizes[g], (uint64_t)lists->indices[g]);
  }
}

/* The layers of a job's transfers are those that the map's order says. */
static void check_layers(struct rig *rig, const struct kvs_offload_job *job, struct kvs_transfer **transfers,
                         size_t count, bool layered) {
  struct kvs_offload_order order;
  size_t i = 0, at = 0;
  bool all = job->direction == KVS_H2D && job->gpu_blocks.count > 0;
  for (; !kvs_offload_get_order(rig->map, i, &order, &err); i++) {
    struct kvs_transfer_info info = {0};
    all = all && order.every_block;
    CHECK(order.group < GROUPS && order.nlayers > 0 && order.tensors[order.nlayers - 1] < TENSORS);
    if (!all || kvs_id_at(&job->group_sizes, order.group) == 0) continue;
    CHECK(at < count);
    kvs_transfer_get_info(transfers[at++], &info);
    CHECK(info.num_layers == (layered ? order.nlayers : 0));
  }
  CHECK(i == kvs_offload_most(rig->map) && err.status == KVS_RANGE);
  CHECK(!all || at == count);
}

static void submit(struct rig *rig, const struct lists *lists, bool store) {
  struct kvs_offload_job job = {.gpu_blocks = {lists->gpu, 4, lists->ngpu},
                                .chunks = {lists->chunks, 8, lists->nchunks},
                                .group_sizes = {lists->sizes, 8, GROUPS},
                                .block_indices = {lists->indices, 8, GROUPS},
                                .direction = store ? KVS_D2H : KVS_H2D};
  static const enum kvs_path paths[] = {KVS_PATH_AUTO, KVS_PATH_DMA, KVS_PATH_STRIDED, KVS_PATH_KERNEL};
  struct kvs_options options = {
      .on_stream = true, .stream = rig->queues[store][below(rig, QUEUES)], .path = paths[below(rig, 4)]};
  options.layer_events = below(rig, 2);
  struct kvs_transfer *transfers[8];
  size_t next = 0, count = 0;
  CHECK(kvs_offload_most(rig->map) <= 8);
  CHECK(!kvs_offload_submit(rig->map, &job, &options, &next, transfers, &count, &err), "%s", err.message);
  CHECK(count >= 1 && next == kvs_offload_most(rig->map));
  check_layers(rig, &job, transfers, count, options.layer_events);
  for (size_t i = 0; i < count; i++) kvs_transfer_unref(transfers[i]);
}

static void test_any_order_that_is_allowed_gives_the_same_bytes(uint64_t seed) {
  struct rig rig;
  struct lists lists;
  rig_open(&rig, seed);
  for (int i = 0; i < JOBS; i++) {
    bool store = below(&rig, 2);
    draw(&rig, &lists);
    submit(&rig, &lists, store);
    apply(&rig, &lists, store);
    memset(&lists, 0xff, sizeof lists); /* which is the caller's again */
  }
  CHECK(!kvs_engine_synchronize(rig.engine, PATIENCE, &err));
  CHECK(memcmp(rig.real, rig.model, sizeof *rig.real) == 0, "seed %d", (int)seed);
  rig_close(&rig);
}

static int try_pitch(struct rig *rig, uint64_t pitch, uint64_t offset) {
  struct kvs_offload_tensor tensors[TENSORS];
  for (uint32_t t = 0; t < TENSORS; t++) tensors[t] = tensor_at(rig, t, t ? offset : 0, 3 * 64 + PADDING, pitch);
  struct kvs_offload_layout layout = {.tensors = tensors, .ntensors = TENSORS, .ngroups = 1, .chunks = 3, .factor = 3};
  struct kvs_offload *map;
  int status = kvs_offload_open(rig->engine, &layout, &map, &err);
  if (!status) kvs_offload_close(map);
  return status;
}

static void test_blocks_of_a_chunk_that_share_bytes(void) {
  struct rig rig;
  rig_open(&rig, 3);
  CHECK(!try_pitch(&rig, 64, 40), "%s", err.message);
  CHECK(!try_pitch(&rig, 65, 41), "%s", err.message);
  CHECK(try_pitch(&rig, 64, 39) == KVS_INVALID && strstr(err.message, "share bytes on the host"), "%s", err.message);
  CHECK(try_pitch(&rig, 64, 41) == KVS_INVALID && strstr(err.message, "share bytes on the host"), "%s", err.message);
  CHECK(try_pitch(&rig, 66, 48) == KVS_INVALID && strstr(err.message, "share bytes on the host"), "%s", err.message);
  CHECK(try_pitch(&rig, 39, 100) == KVS_INVALID && strstr(err.message, "blocks of a chunk"), "%s", err.message);
  CHECK(try_pitch(&rig, 80, 40) == KVS_INVALID && strstr(err.message, "chunks are nearer"), "%s", err.message);
  rig_close(&rig);
}

/* Host runs of a copy group's tensors in those blocks, as the copy engine gets them for a packed slot. */
static uint64_t runs_of_copy_group(const struct kvs_copy_group *copies, const uint64_t (*blocks)[2], size_t count) {
  struct kvs_rows rows = {0};
  struct kvs_packing packing = {0};
  struct kvs_plan_scratch scratch = {0};
  int64_t slots[CHUNKS * MOST];
  uint64_t runs = 0;
  CHECK(!kvs_rows_reserve(&rows, copies->ntensors, &err));
  for (size_t t = 0; t < copies->ntensors; t++) {
    const struct kvs_tensor *tensor = &copies->tensors[t];
    kvs_rows_push(&rows, &(struct kvs_row){.src = tensor->gpu,
                                           .dst = tensor->cpu,
                                           .src_stride = tensor->gpu_stride,
                                           .dst_stride = tensor->cpu_stride,
                                           .nbytes = tensor->nbytes});
  }
  for (size_t i = 0; i < count; i++)
    slots[i] = (int64_t)(blocks[i][0] * copies->chunk_slots + blocks[i][1] * copies->page_slots);
  CHECK(!kvs_pack_rows(&rows, KVS_D2H, 1 << 20, NULL, 0, &packing, &err));
  CHECK(!kvs_pack_count_runs(&packing, slots, count, copies->tensors[0].cpu_blocks, &scratch, &runs, &err));
  kvs_rows_free(&rows);
  kvs_packing_free(&packing);
  kvs_plan_scratch_free(&scratch);
  return runs;
}

/* Chunks anywhere, in no order, the last in part: a run each where all tensors of a block lie together, pages of two
 * sizes included. */
static void test_a_chunk_is_one_run(void) {
  static const uint64_t blocks[][2] = {{4, 2}, {4, 0}, {4, 1}, {0, 0}, {0, 1}, {0, 2}, {2, 1}, {2, 2}};
  struct rig rig;
  rig_open(&rig, 5);
  for (int together = 0; together < 2; together++) {
    struct kvs_offload_tensor tensors[TENSORS];
    uint64_t runs = 0;
    for (uint32_t t = 0; t < TENSORS; t++)
      tensors[t] = tensor_at(&rig, t, t ? (together ? 1 : 3) * PAGES[0] : 0, 3 * 64, together ? 64 : PAGES[t]);
    struct kvs_offload_layout layout = {.tensors = tensors,
                                        .ntensors = TENSORS,
                                        .parts = PARTS,
                                        .nparts = 2, /* group 0 */
                                        .ngroups = 1,
                                        .chunks = 5,
                                        .factor = 3};
    struct kvs_offload *map;
    CHECK(!kvs_offload_open(rig.engine, &layout, &map, &err), "%s", err.message);
    for (size_t i = 0; i < map->ncopy_groups; i++)
      runs += runs_of_copy_group(&map->copy_groups[i], blocks, sizeof blocks / sizeof *blocks);
    CHECK(together ? map->ncopy_groups == 1 && runs == 3 : map->ncopy_groups == 2 && runs >= 6,
          "%d copy groups, %d runs", (int)map->ncopy_groups, (int)runs);
    kvs_offload_close(map);
  }
  rig_close(&rig);
}

/* What a map was made of lives as long as what it submitted. */
static void test_transfers_outlive_their_map(void) {
  struct rig rig;
  struct lists lists = {.gpu = {3}, .chunks = {2}, .sizes = {1, 0}, .ngpu = 1, .nchunks = 1};
  uint64_t word;
  rig_open(&rig, 7);
  CHECK(!kvs_engine_alloc(rig.engine, 4, true, &word, &err));
  *(volatile uint32_t *)(uintptr_t)word = 0;
  for (int q = 0; q < QUEUES; q++)
    CHECK(!kvs_dev_wait32(kvs_engine_device(rig.engine), word, 1, rig.queues[1][q], &err));
  submit(&rig, &lists, true);
  kvs_offload_close(rig.map);
  kvs_engine_collect(rig.engine);
  CHECK(rig.released == 0);
  *(volatile uint32_t *)(uintptr_t)word = 1;
  CHECK(!kvs_engine_synchronize(rig.engine, PATIENCE, &err));
  kvs_engine_collect(rig.engine);
  CHECK(rig.released == 1);
  kvs_engine_unref(rig.engine);
  free(rig.real);
  free(rig.model);
}

int main(void) {
  for (uint64_t seed = 1; seed <= SEEDS; seed++) test_any_order_that_is_allowed_gives_the_same_bytes(seed);
  test_blocks_of_a_chunk_that_share_bytes();
  test_a_chunk_is_one_run();
  test_transfers_outlive_their_map();
  return check_close();
}
