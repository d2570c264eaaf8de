/* Moves blocks from host memory to a GPU and back by their addresses, and checks every byte.
 *
 * GPU memory is an address: one of the driver (CUdeviceptr), of cudaMalloc or of an engine's allocator will do. Here
 * kvswap allocates it, so the program needs none of CUDA's headers; the library loads the driver when it runs. Without
 * a GPU the program says so and exits with 77.
 *
 *   cc -std=c11 cuda.c $(pkg-config --cflags --libs kvswap) -o cuda && ./cuda */
#include <stdio.h>
#include <string.h>

#include <kvswap.h>

enum { BLOCKS = 64, NBYTES = 256 * 1024, NO_GPU = 77 };
static const int64_t SECONDS = 1000000000;

static unsigned char byte_of(int block, int offset) { return (unsigned char)(block * 29 + offset % 239); }

/* Copy block i from src to dst, in the order of `order`, and wait. */
static int copy(struct kvs_engine *engine, uint64_t src, uint64_t dst, struct kvs_error *err) {
  uint64_t from[BLOCKS], to[BLOCKS], nbytes = NBYTES;
  struct kvs_transfer *transfer;
  struct kvs_transfer_info info;
  for (uint64_t i = 0; i < BLOCKS; i++) {
    from[i] = src + i * NBYTES;
    to[i] = dst + (BLOCKS - 1 - i) * NBYTES; /* the last block first */
  }
  /* On a stream of your own: options.on_stream = true and options.stream = the CUstream as a number. */
  int status = kvs_swap_batch(engine, from, to, &nbytes, true, BLOCKS, NULL, &transfer, err);
  if (status != KVS_OK) return status;
  status = kvs_transfer_wait(transfer, 10 * SECONDS, err);
  kvs_transfer_get_info(transfer, &info);
  if (status == KVS_OK)
    printf("%s: %d blocks by path %s in %.0f us\n", info.direction == KVS_H2D ? "H2D" : "D2H", BLOCKS,
           kvs_path_name(info.path), (double)info.elapsed_ns / 1e3);
  kvs_transfer_unref(transfer);
  return status;
}

/* There and back: the order is reversed twice, so block i is block i again. */
static int run(struct kvs_engine *engine, unsigned char *host, uint64_t gpu, struct kvs_error *err) {
  for (int i = 0; i < BLOCKS * NBYTES; i++) host[i] = byte_of(i / NBYTES, i % NBYTES);
  int status = copy(engine, (uintptr_t)host, gpu, err);
  if (status != KVS_OK) return status;
  memset(host, 0, (size_t)BLOCKS * NBYTES);
  return copy(engine, gpu, (uintptr_t)host, err);
}

int main(void) {
  struct kvs_engine *engine;
  struct kvs_error err;
  uint64_t gpu = 0, pinned = 0;
  int failed = 1;
  if (kvs_engine_open("cuda:0", &engine, &err) != KVS_OK) {
    printf("no GPU: %s\n", err.message);
    return NO_GPU;
  }
  if (kvs_engine_alloc(engine, (size_t)BLOCKS * NBYTES, false, &gpu, &err) != KVS_OK ||
      kvs_engine_alloc(engine, (size_t)BLOCKS * NBYTES, true, &pinned, &err) != KVS_OK ||
      run(engine, (unsigned char *)(uintptr_t)pinned, gpu, &err) != KVS_OK) {
    fprintf(stderr, "%s: %s\n", kvs_status_name(err.status), err.message);
  } else {
    const unsigned char *host = (const unsigned char *)(uintptr_t)pinned;
    for (failed = 0; failed < BLOCKS * NBYTES; failed++)
      if (host[failed] != byte_of(failed / NBYTES, failed % NBYTES)) break;
    failed = failed < BLOCKS * NBYTES;
    puts(failed ? "a byte is wrong" : "every byte is right");
  }
  if (gpu != 0 && kvs_engine_free(engine, gpu, &err) != KVS_OK) failed = 1;
  if (pinned != 0 && kvs_engine_free(engine, pinned, &err) != KVS_OK) failed = 1;
  kvs_engine_unref(engine);
  kvs_shutdown(10 * SECONDS);
  return failed;
}
