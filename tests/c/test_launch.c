/* What path kernel launches: how many CTAs, with how much shared memory, at which pace, and for which layers. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "kernels/kernels.h"
#include "lanes/state.h"
#include "paths/costs.h"
#include "paths/costs_default.h"
#include "paths/path.h"

enum { MOST = 64, LAYERS = 16 };
static const int64_t SECONDS = 1000000000;

static struct {
  unsigned grid, chunk, shared_nbytes, rows;
  uint64_t ns_per_mib;
} seen[MOST];
static unsigned nseen;
static const struct kvs_device_ops *below;

static int note(struct kvs_device *device, const struct kvs_launch *launch, kvs_stream stream, struct kvs_error *err) {
  const struct kvs_copy_params *params = launch->params;
  if (launch->kernel == KVS_KERNEL_RING && nseen < MOST) {
    seen[nseen].grid = launch->grid;
    seen[nseen].shared_nbytes = launch->shared_nbytes / (launch->threads / 32);
    seen[nseen].chunk = params->chunk;
    seen[nseen].ns_per_mib = params->ns_per_mib;
    seen[nseen++].rows = params->units.nrows;
  }
  return below->launch(device, launch, stream, err);
}

/* So many blocks of each tensor, there and back, in reverse order on the host. */
static void copy(uint64_t nbytes, size_t blocks, size_t tensors, enum kvs_direction direction,
                 const struct kvs_options *options) {
  struct kvs_engine *engine = NULL;
  struct kvs_transfer *transfer = NULL;
  struct kvs_error err = {0};
  struct kvs_tensor tensor[LAYERS];
  struct kvs_device_ops ops;
  size_t all = nbytes * blocks * tensors;
  unsigned char *gpu = malloc(all), *cpu = malloc(all);
  int64_t *ids = malloc(2 * blocks * sizeof *ids);
  CHECK(!kvs_engine_open("host:0", &engine, &err), "%s", err.message);
  struct kvs_device *device = kvs_engine_device(engine);
  below = device->ops;
  ops = *below;
  ops.launch = note;
  device->ops = &ops;
  device->info.sms = 132;
  for (size_t i = 0; i < all; i++) gpu[i] = (unsigned char)(i * 31 + i / 251), cpu[i] = (unsigned char)(i * 7 + i / 13);
  for (size_t i = 0; i < blocks; i++) ids[i] = (int64_t)i, ids[blocks + i] = (int64_t)(blocks - 1 - i);
  for (size_t i = 0; i < tensors; i++)
    tensor[i] = (struct kvs_tensor){.gpu = (uintptr_t)(gpu + i * nbytes * blocks),
                                    .cpu = (uintptr_t)(cpu + i * nbytes * blocks),
                                    .nbytes = nbytes,
                                    .gpu_blocks = blocks,
                                    .cpu_blocks = blocks};
  const struct kvs_ids gpu_ids = {ids, 8, blocks}, cpu_ids = {ids + blocks, 8, blocks};
  nseen = 0;
  CHECK(!kvs_swap_cache(engine, tensor, tensors, &gpu_ids, &cpu_ids, direction, options, &transfer, &err), "%s",
        err.message);
  CHECK(!kvs_transfer_wait(transfer, 60 * SECONDS, &err), "%s", err.message);
  for (size_t i = 0; i < tensors * blocks; i++) {
    size_t other = i / blocks * blocks + (blocks - 1 - i % blocks);
    CHECK(!memcmp(gpu + i * nbytes, cpu + other * nbytes, nbytes), "block %zu", i);
  }
  kvs_transfer_unref(transfer);
  device->ops = below;
  kvs_engine_unref(engine);
  free(gpu);
  free(cpu);
  free(ids);
}

/* With priority high, rows that are short have more CTAs, of less shared memory; long ones half as many to the device.
 * Other limits stay as they are. */
static void test_width(void) {
  static const struct {
    uint64_t nbytes;
    unsigned ctas, chunk;
  } cases[] = {{128, 32, 1024}, {512, 32, 1024}, {656, 24, 1024}, {1008, 16, 2048}, {1024, 16, 2048},
               {2048, 8, 4096}, {4096, 8, 4096}, {8192, 8, 4096}, {65536, 8, 4096}};
  for (int direction = KVS_D2H; direction <= KVS_H2D; direction++)
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
      struct kvs_options options = {.path = KVS_PATH_KERNEL, .priority = KVS_PRIORITY_HIGH};
      unsigned ctas = direction == KVS_H2D && cases[i].nbytes >= 4096 ? 4 : cases[i].ctas;
      copy(cases[i].nbytes, 200, 1, (enum kvs_direction)direction, &options);
      CHECK(nseen == 1 && seen[0].grid == ctas && seen[0].chunk == cases[i].chunk, "%d bytes: %u CTAs of %u",
            (int)cases[i].nbytes, seen[0].grid, seen[0].chunk);
      CHECK(seen[0].shared_nbytes == KVS_RING_STAGES * seen[0].chunk, "%u", seen[0].shared_nbytes);
      options.max_ctas = 3;
      copy(cases[i].nbytes, 200, 1, (enum kvs_direction)direction, &options);
      CHECK(nseen == 1 && seen[0].grid == 3 && seen[0].chunk == cases[i].chunk, "%u CTAs", seen[0].grid);
      options = (struct kvs_options){.path = KVS_PATH_KERNEL, .priority = KVS_PRIORITY_NORMAL};
      copy(cases[i].nbytes, 200, 1, (enum kvs_direction)direction, &options);
      CHECK(nseen == 1 && seen[0].grid == 2 && seen[0].chunk == cases[i].chunk, "%u CTAs", seen[0].grid);
    }
}

/* Built-in costs: both the pace and the prediction follow the memory of the GPU. A calibration's pace stays. */
static void test_pace(void) {
  static const struct {
    int memory_gbps;
    double normal, background;
  } cases[] = {{0, 42.6, 27.7}, {3352, 26, 26}, {4917, 42.6, 27.7}};
  static struct kvs_work work = {.direction = KVS_D2H,
                                 .shape = {.direction = KVS_D2H, .nbytes = 64 << 20, .pieces = 2048}};
  const struct kvs_costs calibrated = *kvs_costs_default();
  struct kvs_engine *engine = NULL;
  struct kvs_error err = {0};
  CHECK(!kvs_engine_open("host:0", &engine, &err), "%s", err.message);
  struct kvs_device *device = kvs_engine_device(engine);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int known = 0; known < 2; known++)
      for (int background = 0; background < 2; background++) {
        double pace = background ? cases[known ? 0 : i].background : cases[known ? 0 : i].normal;
        const struct kvs_options options = {.path = KVS_PATH_KERNEL,
                                            .priority = background ? KVS_PRIORITY_BACKGROUND : KVS_PRIORITY_NORMAL};
        const struct kvs_submission s = {.engine = engine, .device = device, .work = &work, .options = &options};
        device->info.memory_gbps = cases[i].memory_gbps;
        kvs_engine_set_costs(engine, known ? &calibrated : NULL, "a test's");
        copy(4096, 200, 1, KVS_D2H, &options);
        double gbps = (double)(1 << 20) * seen[0].grid / (double)seen[0].ns_per_mib;
        CHECK(nseen == 1 && seen[0].grid == 2 && fabs(gbps - pace) < 0.01, "%d: %g GB/s", cases[i].memory_gbps, gbps);
        double predicted = (double)work.shape.nbytes / (kvs_path_kernel.predict(&s) / 1.05); /* its handicap */
        if (pace == 26)
          CHECK(fabs(predicted - 26) < 1e-9, "%g GB/s", predicted);
        else
          CHECK(predicted > 27, "%g GB/s", predicted);
        copy(4096, 200, 1, KVS_H2D, &options);
        double h2d = seen[0].ns_per_mib ? (double)(1 << 20) * seen[0].grid / (double)seen[0].ns_per_mib : 0;
        CHECK(nseen == 1 && fabs(h2d - (background ? 27.7 : 0)) < 0.01, "H2D %g GB/s", h2d);
      }
  device->info.memory_gbps = 0;
  kvs_engine_set_costs(engine, NULL, "built in");
  kvs_engine_unref(engine);
}

static void check_layers(const unsigned *rows, unsigned count) {
  CHECK(nseen == count, "%u launches", nseen);
  for (unsigned i = 0; i < nseen && i < count; i++) CHECK(seen[i].rows == rows[i], "launch %u: %u", i, seen[i].rows);
}

/* Large layers: the first and the last go alone. Small ones go together. One that waits by itself begins a launch. */
static void test_layers(void) {
  static const unsigned large[] = {1, 1, 2, 4, 4, 2, 1, 1}, small[] = {16}, waiting[] = {1, 1, 2, 1, 5, 3, 1, 1, 1};
  struct kvs_options options = {.path = KVS_PATH_KERNEL, .layer_events = true};
  copy(64 << 10, 32, LAYERS, KVS_H2D, &options);
  check_layers(large, 8);
  copy(512, 16, LAYERS, KVS_H2D, &options);
  check_layers(small, 1);
  copy(1 << 20, 16, 4, KVS_D2H, &options);
  check_layers((const unsigned[]){1, 1, 1, 1}, 4);
  struct kvs_after after[LAYERS];
  for (int i = 0; i < LAYERS; i++) after[i] = (struct kvs_after){.kind = i == 5 ? KVS_AFTER_STREAM : KVS_AFTER_NONE};
  options.after_layers = after;
  options.nafter_layers = LAYERS;
  copy(64 << 10, 32, LAYERS, KVS_H2D, &options);
  check_layers(waiting, 9);
}

int main(void) {
  test_width();
  test_pace();
  test_layers();
  return check_close();
}
