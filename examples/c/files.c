/* Stores blocks in files, loads them again, and asks for one that was never stored.
 *
 *   cc -std=c11 files.c $(pkg-config --cflags --libs kvswap) -o files && ./files DIRECTORY */
#include <stdio.h>
#include <string.h>

#include <kvswap_file.h>

enum { BLOCKS = 4, NBYTES = 65536 };
static const int64_t SECONDS = 1000000000;

static unsigned char blocks[BLOCKS][NBYTES], spare[NBYTES];

/* A key is any bytes; engines use hashes of a block's tokens. Here it is a number. */
static struct kvs_file_keys keys_from(uint64_t first, size_t count, uint64_t *data, size_t *ends) {
  for (size_t i = 0; i < count; i++) {
    data[i] = first + i;
    ends[i] = (i + 1) * sizeof *data;
  }
  return (struct kvs_file_keys){.data = (const uint8_t *)data, .ends = ends, .count = count};
}

static int wait_and_drop(struct kvs_file_transfer *transfer, struct kvs_error *err) {
  int status = kvs_file_transfer_wait(transfer, 10 * SECONDS, err);
  kvs_file_transfer_unref(transfer);
  return status;
}

static int store_and_load(struct kvs_file_store *store, struct kvs_error *err) {
  uint64_t data[BLOCKS];
  size_t ends[BLOCKS];
  uint64_t addresses[BLOCKS];
  struct kvs_file_transfer *transfer;
  struct kvs_file_keys keys = keys_from(0, BLOCKS, data, ends);
  struct kvs_file_blocks memory = {.addresses = addresses};
  for (int i = 0; i < BLOCKS; i++) {
    memset(blocks[i], 'a' + i, NBYTES);
    addresses[i] = (uintptr_t)blocks[i];
  }
  int status = kvs_file_store_blocks(store, &keys, &memory, NULL, &transfer, err);
  if (status == KVS_OK) status = wait_and_drop(transfer, err);
  if (status != KVS_OK) return status;
  memset(blocks, 0, sizeof blocks);
  status = kvs_file_load_blocks(store, &keys, &memory, NULL, &transfer, err);
  return status == KVS_OK ? wait_and_drop(transfer, err) : status;
}

static int wrong_bytes(void) {
  int wrong = 0;
  for (int i = 0; i < BLOCKS; i++)
    for (int offset = 0; offset < NBYTES; offset++) wrong += blocks[i][offset] != 'a' + i;
  return wrong;
}

/* A load of two keys, of which the second is in no file: the first block arrives, the second is reported. */
static int load_missing(struct kvs_file_store *store, struct kvs_error *err) {
  uint64_t data[2];
  size_t ends[2];
  uint64_t addresses[2] = {(uintptr_t)blocks[BLOCKS - 1], (uintptr_t)spare};
  uint32_t failed[2] = {0};
  struct kvs_error why;
  struct kvs_file_transfer *transfer;
  struct kvs_file_keys keys = keys_from(BLOCKS - 1, 2, data, ends);
  struct kvs_file_blocks memory = {.addresses = addresses};
  int status = kvs_file_load_blocks(store, &keys, &memory, NULL, &transfer, err);
  if (status != KVS_OK) return status;
  status = kvs_file_transfer_wait(transfer, 10 * SECONDS, err); /* an error: not all blocks arrived */
  size_t count = kvs_file_transfer_failed(transfer, failed, 2);
  int reason = count == 1 ? kvs_file_transfer_reason(transfer, failed[0], &why) : KVS_OK;
  kvs_file_transfer_unref(transfer);
  if (count != 1 || failed[0] != 1 || reason != KVS_MISSING) return status == KVS_OK ? KVS_MISSING : status;
  printf("as expected, key %u of the list is missing: %s\n", failed[0], why.message);
  return KVS_OK;
}

int main(int argc, char **argv) {
  struct kvs_file_settings settings = {.layout = "example, 64 KiB",
                                       .block_nbytes = NBYTES,
                                       .capacity = 64 << 20,
                                       .directory = argc == 2 ? argv[1] : NULL};
  struct kvs_file_store *store;
  struct kvs_error err = {0};
  int failed = 1;
  if (argc != 2) {
    fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
    return 2;
  }
  if (kvs_file_open(&settings, &store, &err) != KVS_OK) {
    fprintf(stderr, "%s does not open: %s\n", argv[1], err.message);
    return 1;
  }
  if (store_and_load(store, &err) != KVS_OK || load_missing(store, &err) != KVS_OK)
    fprintf(stderr, "%s: %s\n", kvs_status_name(err.status), err.message);
  else if (wrong_bytes() != 0)
    fprintf(stderr, "%d bytes are wrong\n", wrong_bytes());
  else
    failed = 0;
  if (kvs_file_close(store, 10 * SECONDS, &err) != KVS_OK) failed = 1;
  kvs_file_unref(store);
  kvs_file_shutdown(10 * SECONDS);
  kvs_shutdown(10 * SECONDS);
  if (!failed) printf("%d blocks went to %s and back: every byte is right\n", BLOCKS, argv[1]);
  return failed;
}
