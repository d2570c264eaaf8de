/* Fuzzing of what is read from disk by the file tier: run.sh builds it with libFuzzer and runs it.
 *
 * The first byte says what the rest is: the store's file and a segment, opened as a reader and as a writer, all of
 * whose blocks are then loaded; or one page, read as each kind. Its upper bits say which checksums are made right
 * first, so that lies get past them. What must hold: no crash, no hang, all loads end, and what was read can be written
 * and read again. Without FUZZING it is a program that runs the files named on its command line. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files/crc32c.h"
#include "files/store.h"

enum { PAGE = KVS_FILE_PAGE, BLOCK = 100, SLOT = 2 * PAGE, SLOTS = 4, SEGMENT = PAGE + SLOTS * SLOT };
static char folder[64];

static void require(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "does not hold: %s\n", what);
  abort();
}

static void make_right(uint8_t *page) {
  memset(page + 12, 0, 4);
  uint32_t crc = kvs_crc32c(0, page, PAGE);
  for (int i = 0; i < 4; i++) page[12 + i] = (uint8_t)(crc >> (8 * i));
}

static void read_page(const uint8_t *page) {
  struct kvs_file_geometry geometry;
  struct kvs_file_header header;
  struct kvs_file_checkpoint checkpoint;
  for (int of_segment = 0; of_segment < 2; of_segment++)
    if (kvs_file_geometry_read(page, of_segment, &geometry) == KVS_FILE_GOOD) {
      uint8_t again[PAGE];
      require(geometry.segment_nbytes >= geometry.slots * geometry.slot_nbytes, "sizes");
      require(strlen(geometry.layout) <= KVS_FILE_LAYOUT_NBYTES, "layout");
      kvs_file_geometry_write(&geometry, of_segment, again);
      require(kvs_file_geometry_read(again, of_segment, &geometry) == KVS_FILE_GOOD, "geometry again");
    }
  if (kvs_file_header_read(page, &header) == KVS_FILE_GOOD) {
    uint8_t again[PAGE];
    require(header.key_nbytes >= 1 && header.key_nbytes <= KVS_FILE_KEY_NBYTES && header.sequence, "header");
    kvs_file_header_write(&header, again);
    require(kvs_file_header_read(again, &header) == KVS_FILE_GOOD, "header again");
  }
  (void)kvs_file_checkpoint_read(page, &checkpoint);
}

static void write_file(const char *name, const uint8_t *data, size_t nbytes) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
  require(fd >= 0 && write(fd, data, nbytes) == (ssize_t)nbytes, "write_file");
  close(fd);
}

static void load_all(struct kvs_file_store *store) {
  struct kvs_error err;
  uint8_t *keys = NULL;
  size_t *ends = NULL, count = 0;
  if (kvs_file_list(store, &keys, &ends, &count, &err) == KVS_OK && count) {
    uint8_t *room = malloc(count * BLOCK);
    uint64_t *addresses = malloc(count * sizeof *addresses);
    for (size_t i = 0; i < count; i++) addresses[i] = (uintptr_t)(room + i * BLOCK);
    struct kvs_file_keys wanted = {keys, ends, count};
    struct kvs_file_blocks blocks = {.addresses = addresses};
    struct kvs_file_transfer *transfer;
    require(kvs_file_get(store, &wanted, &blocks, NULL, &transfer, &err) == KVS_OK, "get");
    (void)kvs_file_transfer_wait(transfer, 10000000000, &err);
    require(kvs_file_transfer_done(transfer), "a load does not end");
    kvs_file_transfer_unref(transfer);
    free(addresses);
    free(room);
  }
  free(keys);
  free(ends);
}

static void open_store(bool readonly) {
  struct kvs_file_settings settings = {.directory = folder,
                                       .layout = "{}",
                                       .block_nbytes = BLOCK,
                                       .capacity = 4 * SEGMENT,
                                       .segment_nbytes = SEGMENT,
                                       .engine = KVS_FILE_THREADS,
                                       .depth = 1,
                                       .buffered = true,
                                       .readonly = readonly};
  struct kvs_file_store *store;
  struct kvs_error err;
  if (kvs_file_open(&settings, &store, &err)) return;
  load_all(store);
  require(kvs_file_close(store, 10000000000, &err) == KVS_OK, "close");
  kvs_file_unref(store);
}

/* Three pages of the store's file, then the segment. */
static void read_store(uint8_t *data, size_t nbytes, unsigned right) {
  size_t head = nbytes < 3 * PAGE ? nbytes : 3 * PAGE;
  for (size_t at = 0; at + PAGE <= nbytes; at += PAGE) {
    bool header = at < 4 * PAGE || (at - 4 * PAGE) % SLOT == 0;
    if (header && right & 1 && data[at] == 'K') make_right(data + at);
  }
  if (right & 2) write_file("store.kvs", data, head);
  write_file("segment-00000000.kvs", data + head, nbytes - head);
  open_store(true);
  open_store(false);
  open_store(true);
}

static void clean(void) {
  char command[160];
  snprintf(command, sizeof command, "rm -rf '%s'", folder);
  if (system(command)) fprintf(stderr, "%s is left\n", folder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  static const char *const names[] = {
      "store.kvs", "segment-00000000.kvs", "segment-00000001.kvs", "segment-00000002.kvs", "segment-00000003.kvs",
      "new.tmp"};
  char path[128];
  if (!folder[0]) {
    snprintf(folder, sizeof folder, "/dev/shm/kvswap-fuzz-%d", (int)getpid());
    atexit(clean);
  }
  if (nbytes < 1 || nbytes > 16 * PAGE) return 0;
  uint8_t *copy = malloc(nbytes + PAGE);
  memcpy(copy, data + 1, nbytes - 1);
  memset(copy + nbytes - 1, 0, PAGE + 1);
  if (data[0] & 1) {
    if (data[0] & 2) make_right(copy);
    read_page(copy);
  } else {
    (void)mkdir(folder, 0700);
    read_store(copy, nbytes - 1, data[0] >> 1);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
      snprintf(path, sizeof path, "%s/%s", folder, names[i]);
      (void)unlink(path);
    }
  }
  free(copy);
  return 0;
}

#ifndef FUZZING
int main(int count, char **names) {
  for (int i = 1; i < count; i++) {
    static uint8_t data[16 * PAGE + 1];
    FILE *file = fopen(names[i], "rb");
    require(file != NULL, names[i]);
    size_t nbytes = fread(data, 1, sizeof data, file);
    fclose(file);
    LLVMFuzzerTestOneInput(data, nbytes);
  }
  printf("%d passed, 0 failed\n", count - 1);
  return 0;
}
#endif
