/* Fuzzing of what is read from disk by the file tier: run.sh builds it with libFuzzer and runs it.
 *
 * The first byte says what the rest is: the store's file and a segment, opened as a reader and as a writer, all of
 * whose blocks are then loaded; or one page, read as each kind. Its upper bits say which checksums are made right
 * first, so that lies get past them; for a store also which odd state it starts from: numbers near their ends, names
 * that are taken, or are no files. What must hold: no crash, no hang, all loads end, what was read can be written and
 * read again, and a block that is stored now is there when the store is opened again. Without FUZZING it is a program
 * that runs the files named on its command line. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "files/state.h"

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
    require(kvs_file_load_blocks(store, &wanted, &blocks, NULL, &transfer, &err) == KVS_OK, "get");
    (void)kvs_file_transfer_wait(transfer, 10000000000, &err);
    require(kvs_file_transfer_done(transfer), "a load does not end");
    kvs_file_transfer_unref(transfer);
    free(addresses);
    free(room);
  }
  free(keys);
  free(ends);
}

/* Of what the first byte says of a store. */
enum {
  RIGHT = 1,   /* checksums are made right */
  STATE = 2,   /* the store's file is there */
  NUMBERS = 4, /* sequences and generations come near their ends */
  NAMES = 8,   /* an empty segment with the last number; new.tmp is a pipe */
  LAST = 16,   /* the segment has the last number */
  PIPE = 32,   /* the store's file is a pipe, or where it is there a segment */
};

static struct kvs_file_store *try_open(bool readonly) {
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
  return kvs_file_open(&settings, &store, &err) ? NULL : store;
}

static void close_store(struct kvs_file_store *store) {
  struct kvs_error err;
  require(kvs_file_close(store, 10000000000, &err) == KVS_OK, "close");
  kvs_file_unref(store);
}

static void open_store(bool readonly) {
  struct kvs_file_store *store = try_open(readonly);
  if (!store) return;
  load_all(store);
  close_store(store);
}

/* More than the corpus leaves free, fewer than a segment has: a new one is made, and none of them has to go again. */
enum { NEW = 3 };

static bool move_new(struct kvs_file_store *store, bool put, uint8_t memory[NEW][BLOCK]) {
  static const size_t ends[NEW] = {4, 8, 12};
  static const struct kvs_file_keys keys = {(const uint8_t *)"new1new2new3", ends, NEW};
  struct kvs_error err;
  struct kvs_file_transfer *transfer;
  const struct kvs_file_options options = {.replace = true};
  uint64_t addresses[NEW];
  for (int i = 0; i < NEW; i++) addresses[i] = (uintptr_t)memory[i];
  struct kvs_file_blocks blocks = {.addresses = addresses};
  int status = put ? kvs_file_store_blocks(store, &keys, &blocks, &options, &transfer, &err)
                   : kvs_file_load_blocks(store, &keys, &blocks, NULL, &transfer, &err);
  require(status == KVS_OK, "submit");
  status = kvs_file_transfer_wait(transfer, 10000000000, &err);
  require(kvs_file_transfer_done(transfer), "a transfer does not end");
  kvs_file_transfer_unref(transfer);
  return status == KVS_OK;
}

/* What was acknowledged is there at the next open. */
static void store_and_open_again(void) {
  struct kvs_file_store *store = try_open(false);
  if (!store) return;
  static uint8_t blocks[NEW][BLOCK] = {"a block", "that is", "stored now"}, back[NEW][BLOCK];
  bool acknowledged = move_new(store, true, blocks);
  close_store(store);
  if (!acknowledged) return;
  store = try_open(false);
  require(store != NULL, "a store that was open cannot be opened again");
  memset(back, 0, sizeof back);
  require(move_new(store, false, back) && memcmp(back, blocks, sizeof back) == 0, "an acknowledged block is lost");
  close_store(store);
}

static void put_number(uint8_t *at, uint64_t value) {
  for (int i = 0; i < 8; i++) at[i] = (uint8_t)(value >> (8 * i));
}

/* The lowest byte of each number says which end it comes near. */
static void move_numbers(uint8_t *page) {
  static const uint64_t ends[] = {0,
                                  UINT64_MAX,
                                  KVS_FILE_LAST_SEQUENCE,
                                  KVS_FILE_LAST_SEQUENCE - 4294967296u,
                                  (uint64_t)1 << 63,
                                  (uint64_t)1 << 32,
                                  KVS_FILE_LAST_SEQUENCE + 2,
                                  KVS_FILE_LAST_SEQUENCE - 8};
  bool block = memcmp(page, "KVSBLOCK", 8) == 0, check = memcmp(page, "KVSCHECK", 8) == 0;
  if (block) put_number(page + 32, ends[page[32] % 8] + page[33] % 8);
  if (check) put_number(page + 24, ends[page[24] % 8] + page[25] % 8);
  if (check && page[33] & 1) put_number(page + 16, ends[page[16] % 8] + page[17] % 8);
}

static void make_pipe(const char *name) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  (void)mkfifo(path, 0600);
}

static void put_odd_names(unsigned how) {
  if (how & NAMES && !(how & LAST)) write_file("segment-99999999.kvs", (const uint8_t *)"", 0);
  if (how & NAMES) make_pipe("new.tmp");
  if (how & PIPE) make_pipe(how & STATE ? "segment-00000777.kvs" : "store.kvs");
}

/* Three pages of the store's file, then the segment. */
static void read_store(uint8_t *data, size_t nbytes, unsigned how) {
  size_t head = nbytes < 3 * PAGE ? nbytes : 3 * PAGE;
  for (size_t at = 0; at + PAGE <= nbytes; at += PAGE) {
    bool header = at < 4 * PAGE || (at - 4 * PAGE) % SLOT == 0;
    if (header && how & NUMBERS && data[at] == 'K') move_numbers(data + at);
    if (header && how & (RIGHT | NUMBERS) && data[at] == 'K') make_right(data + at);
  }
  if (how & STATE) write_file("store.kvs", data, head);
  if (how & LAST && nbytes >= head + PAGE) { /* its page says so too */
    memset(data + head + 60, 0, 4);
    memcpy(data + head + 60, (uint8_t[]){0xff, 0xe0, 0xf5, 0x05}, 4);
    make_right(data + head);
  }
  write_file(how & LAST ? "segment-99999999.kvs" : "segment-00000000.kvs", data + head, nbytes - head);
  put_odd_names(how);
  open_store(true);
  open_store(false);
  open_store(true);
  store_and_open_again();
}

static void empty_folder(void) {
  DIR *dir = opendir(folder);
  require(dir != NULL, "opendir");
  for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
    if (entry->d_name[0] != '.') (void)unlinkat(dirfd(dir), entry->d_name, 0);
  closedir(dir);
}

static void clean(void) {
  char command[160];
  snprintf(command, sizeof command, "rm -rf '%s'", folder);
  if (system(command)) fprintf(stderr, "%s is left\n", folder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
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
    empty_folder();
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
