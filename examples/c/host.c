/* Moves blocks of a cache of several layers to host memory and back, and checks every byte.
 *
 * It runs on "host:0", a device of memory and threads, so that it needs no GPU. On a GPU the calls are the same: see
 * cuda.c.
 *
 *   cc -std=c11 host.c $(pkg-config --cflags --libs kvswap) -o host && ./host */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvswap.h>

enum { LAYERS = 4, BLOCKS = 8, HOST_BLOCKS = 16, NBYTES = 65536, MOVED = 3 };
static const int64_t SECONDS = 1000000000;

static unsigned char *cache[LAYERS], *host[LAYERS];
static const int64_t cache_ids[MOVED] = {1, 2, 7}, host_ids[MOVED] = {9, 0, 4}, new_ids[MOVED] = {3, 5, 0};

/* The bytes of a block are a function of the layer, the block and the offset. */
static unsigned char byte_of(int layer, int64_t block, int offset) {
  return (unsigned char)(layer * 71 + block * 13 + offset % 251);
}

static int check_blocks(const char *where, unsigned char *const *memory, const int64_t *ids) {
  for (int layer = 0; layer < LAYERS; layer++)
    for (int i = 0; i < MOVED; i++)
      for (int offset = 0; offset < NBYTES; offset++)
        if (memory[layer][ids[i] * NBYTES + offset] != byte_of(layer, cache_ids[i], offset)) {
          fprintf(stderr, "%s: layer %d, block %d: byte %d is wrong\n", where, layer, (int)ids[i], offset);
          return 1;
        }
  return 0;
}

/* Move blocks ids[i] of the cache <-> host blocks host_ids[i], in all layers, and wait. */
static int move(struct kvs_engine *engine, const int64_t *ids, enum kvs_direction direction, struct kvs_error *err) {
  struct kvs_tensor tensors[LAYERS];
  struct kvs_ids gpu = {ids, sizeof *ids, MOVED}, cpu = {host_ids, sizeof *host_ids, MOVED};
  struct kvs_transfer *transfer;
  struct kvs_options options = {.priority = KVS_PRIORITY_NORMAL}; /* the rest is 0: the defaults */
  int status;
  for (int layer = 0; layer < LAYERS; layer++)
    tensors[layer] = (struct kvs_tensor){.gpu = (uintptr_t)cache[layer],
                                         .cpu = (uintptr_t)host[layer],
                                         .nbytes = NBYTES,
                                         .gpu_blocks = BLOCKS,
                                         .cpu_blocks = HOST_BLOCKS};
  status = kvs_swap_cache(engine, tensors, LAYERS, &gpu, &cpu, direction, &options, &transfer, err);
  if (status != KVS_OK) return status; /* nothing has moved */
  status = kvs_transfer_wait(transfer, 10 * SECONDS, err);
  kvs_transfer_unref(transfer);
  return status;
}

static int run(struct kvs_engine *engine, struct kvs_error *err) {
  int status = move(engine, cache_ids, KVS_D2H, err);
  if (status != KVS_OK) return status;
  for (int layer = 0; layer < LAYERS; layer++) memset(cache[layer], 0, (size_t)BLOCKS * NBYTES);
  return move(engine, new_ids, KVS_H2D, err); /* back, to other blocks of the cache */
}

int main(void) {
  struct kvs_engine *engine;
  struct kvs_error err;
  int wrong = 1;
  if (kvs_engine_open("host:0", &engine, &err) != KVS_OK) {
    fprintf(stderr, "host:0 does not open: %s\n", err.message);
    return 1;
  }
  for (int layer = 0; layer < LAYERS; layer++) {
    cache[layer] = malloc((size_t)BLOCKS * NBYTES);
    host[layer] = calloc(HOST_BLOCKS, NBYTES);
    if (cache[layer] == NULL || host[layer] == NULL) return 1;
    for (int i = 0; i < BLOCKS * NBYTES; i++) cache[layer][i] = byte_of(layer, i / NBYTES, i % NBYTES);
  }
  if (run(engine, &err) != KVS_OK)
    fprintf(stderr, "%s: %s\n", kvs_status_name(err.status), err.message);
  else
    wrong = check_blocks("host", host, host_ids) || check_blocks("cache", cache, new_ids);
  kvs_engine_unref(engine);
  kvs_shutdown(10 * SECONDS); /* before memory that transfers may use is freed */
  for (int layer = 0; layer < LAYERS; layer++) free(cache[layer]), free(host[layer]);
  if (!wrong) printf("%d blocks of %d layers went to host memory and back: every byte is right\n", MOVED, LAYERS);
  return wrong;
}
