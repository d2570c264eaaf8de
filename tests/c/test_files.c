/* The file tier without Python: checksums, pages, the index, and stores used by many threads under faults. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "check.h"
#include "files/gds.h"
#include "files/state.h"
#include "files/store.h"

static struct kvs_error err;
static const int64_t PATIENCE = 60000000000;

/* -- checksums ----------------------------------------------------------------------------------------------------- */

static void test_crc32c(void) {
  enum { ROOM = 100000 };
  uint8_t *data = malloc(ROOM), zeros[32] = {0}, ones[32];
  uint64_t state = 7;
  memset(ones, 0xff, sizeof ones);
  CHECK(kvs_crc32c(0, "123456789", 9) == 0xe3069283u); /* the check value of the catalogue */
  CHECK(kvs_crc32c(0, zeros, 32) == 0x8a9136aau);      /* RFC 3720, B.4 */
  CHECK(kvs_crc32c(0, ones, 32) == 0x62a8ab43u);
  CHECK(kvs_crc32c(0, "", 0) == 0);
  for (int i = 0; i < ROOM; i++) data[i] = (uint8_t)check_random(&state);
  for (int i = 0; i < 3000; i++) {
    size_t at = check_below(&state, 64), n = check_below(&state, i % 3 ? 3000 : ROOM - 64);
    size_t cut = n ? check_below(&state, n) : 0;
    uint32_t whole = kvs_crc32c_table(0, data + at, n);
    CHECK(kvs_crc32c(0, data + at, n) == whole, "at %zu, %zu bytes", at, n);
    CHECK(kvs_crc32c_narrow(0, data + at, n) == whole, "narrow, at %zu, %zu bytes", at, n);
    CHECK(kvs_crc32c(kvs_crc32c(0, data + at, cut), data + at + cut, n - cut) == whole, "cut at %zu of %zu", cut, n);
  }
  free(data);
}

/* -- pages --------------------------------------------------------------------------------------------------------- */

static enum kvs_file_page read_any(int kind, const void *page) {
  struct kvs_file_geometry geometry;
  struct kvs_file_header header;
  struct kvs_file_checkpoint checkpoint;
  if (kind < 2) return kvs_file_geometry_read(page, kind == 1, &geometry);
  return kind == 2 ? kvs_file_header_read(page, &header) : kvs_file_checkpoint_read(page, &checkpoint);
}

static void write_any(int kind, void *page) {
  struct kvs_file_geometry geometry;
  struct kvs_file_header header = {.sequence = 77, .nbytes = 5000, .data_crc = 5, .key_nbytes = 3, .key = "abc"};
  struct kvs_file_checkpoint checkpoint = {3, 99, true};
  kvs_file_geometry_make("{\"model\":\"m\"}", 5000, 1 << 20, &geometry);
  if (kind < 2) kvs_file_geometry_write(&geometry, kind == 1, page);
  if (kind == 2) kvs_file_header_write(&header, page);
  if (kind == 3) kvs_file_checkpoint_write(&checkpoint, page);
}

static void test_pages(void) {
  uint8_t page[KVS_FILE_PAGE], zeros[KVS_FILE_PAGE] = {0};
  for (int kind = 0; kind < 4; kind++) {
    write_any(kind, page);
    CHECK(read_any(kind, page) == KVS_FILE_GOOD);
    CHECK(read_any(kind, zeros) == KVS_FILE_EMPTY);
    for (int other = 0; other < 4; other++)
      CHECK(other == kind || read_any(other, page) == KVS_FILE_DAMAGED, "%d read as %d", kind, other);
    for (int bit = 0; bit < 8 * KVS_FILE_PAGE; bit++) {
      page[bit / 8] ^= (uint8_t)(1 << bit % 8);
      CHECK(read_any(kind, page) == KVS_FILE_DAMAGED, "kind %d, bit %d", kind, bit);
      page[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
  }
}

static void test_pages_that_lie(void) {
  struct kvs_file_geometry g, read;
  uint8_t page[KVS_FILE_PAGE];
  kvs_file_geometry_make("x", 5000, 1 << 20, &g);
  CHECK(g.slot_nbytes == 3 * KVS_FILE_PAGE && g.slots == 85 && g.segment_nbytes == KVS_FILE_PAGE + 85 * g.slot_nbytes);
  struct kvs_file_geometry lies[] = {g, g, g, g, g, g};
  lies[0].slots = 0;
  lies[1].slots = 84;
  lies[2].slot_nbytes = 4096;
  lies[3].block_nbytes = UINT64_MAX - 4000; /* its pages overflow */
  lies[4].layout_hash[3] ^= 1;
  strcpy(lies[5].layout, "y");
  for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
    kvs_file_geometry_write(&lies[i], true, page); /* with a right checksum */
    CHECK(kvs_file_geometry_read(page, true, &read) == KVS_FILE_DAMAGED, "lie %zu", i);
  }
}

/* Sequence numbers near the end are refused: a writer that continued from one would wrap to 0. */
static void test_numbers_at_their_end(void) {
  const uint64_t last = KVS_FILE_LAST_SEQUENCE,
                 numbers[] = {0, 1, last, last + 1, last + 2, UINT64_MAX - 1, UINT64_MAX};
  uint8_t page[KVS_FILE_PAGE];
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    const bool good = numbers[i] >= 1 && numbers[i] <= last;
    struct kvs_file_header header = {.sequence = numbers[i], .key_nbytes = 1}, h;
    kvs_file_header_write(&header, page);
    CHECK((kvs_file_header_read(page, &h) == KVS_FILE_GOOD) == good && h.sequence == numbers[i], "sequence %zu", i);
    struct kvs_file_checkpoint generation = {numbers[i], 1, true}, sequence = {1, numbers[i], true}, c;
    kvs_file_checkpoint_write(&generation, page);
    CHECK((kvs_file_checkpoint_read(page, &c) == KVS_FILE_GOOD) == good && c.generation == numbers[i], "%zu", i);
    kvs_file_checkpoint_write(&sequence, page);
    CHECK((kvs_file_checkpoint_read(page, &c) == KVS_FILE_GOOD) == (numbers[i] <= last + 1), "checkpoint %zu", i);
    CHECK(c.sequence == numbers[i] && c.clean, "checkpoint %zu", i);
  }
}

/* -- reads and writes ---------------------------------------------------------------------------------------------- */

/* As a file system does with O_DIRECT whose file ends within a page: what is left of it comes again and again. */
static void test_parts_of_pages(void) {
  char path[] = "/tmp/kvswap-test-XXXXXX";
  static uint8_t pages[4 * KVS_FILE_PAGE];
  struct kvs_file_faults faults = {.lock = PTHREAD_MUTEX_INITIALIZER};
  int fd = mkstemp(path);
  CHECK(fd >= 0 && !unlink(path));
  for (size_t left = 0; left <= 3 * KVS_FILE_PAGE; left += KVS_FILE_PAGE / 2) {
    CHECK(!ftruncate(fd, (off_t)left));
    struct kvs_file_span span = {.fd = fd, .pieces = {{pages, 2 * KVS_FILE_PAGE}}, .npieces = 1};
    int code = kvs_file_move(&faults, &span, true);
    CHECK(code == (left < 2 * KVS_FILE_PAGE ? KVS_FILE_ENDED : 0), "%zu bytes: %d", left, code);
  }
  struct kvs_file_span write = {.write = true, .pieces = {{pages, 2 * KVS_FILE_PAGE}}, .npieces = 1}, before = write;
  CHECK(kvs_file_span_advance(&write, 512, true) == EIO && kvs_file_span_advance(&write, 0, false) == EIO);
  CHECK(write.offset == before.offset && kvs_file_span_nbytes(&write) == kvs_file_span_nbytes(&before));
  CHECK(kvs_file_span_advance(&write, KVS_FILE_PAGE + 512, true) == KVS_FILE_MORE && write.offset == KVS_FILE_PAGE);
  CHECK(kvs_file_span_advance(&write, 512, false) == KVS_FILE_MORE && write.offset == KVS_FILE_PAGE + 512);
  CHECK(kvs_file_span_advance(&write, KVS_FILE_PAGE - 512, false) == 0);
  close(fd);
}

/* -- the index ----------------------------------------------------------------------------------------------------- */

static void test_index(void) {
  struct kvs_file_index index;
  uint32_t model[500] = {0}; /* slot + 1 of each key */
  uint64_t state = 3;
  size_t blocks = 0;
  CHECK(kvs_file_index_init(&index));
  for (int step = 0; step < 20000; step++) {
    uint32_t k = (uint32_t)check_below(&state, 500), slot = (uint32_t)check_below(&state, 1000);
    uint8_t key[8] = {(uint8_t)k, (uint8_t)(k >> 8)};
    size_t n = 2 + k % 6;
    struct kvs_file_entry *entry = kvs_file_index_find(&index, key, n);
    CHECK((entry ? entry->slot + 1 : 0) == model[k]);
    entry = kvs_file_index_add(&index, key, n);
    bool drop = check_below(&state, 3) == 0;
    blocks += !drop;
    blocks -= model[k] != 0;
    model[k] = drop ? 0 : slot + 1;
    kvs_file_index_set_slot(&index, entry, drop ? KVS_NO_SLOT : slot);
    kvs_file_index_settle(&index, entry);
    CHECK(index.blocks == blocks && index.count == blocks);
    CHECK(drop || index.newest == entry || index.newest);
  }
  size_t listed = 0;
  for (struct kvs_file_entry *entry = index.oldest; entry; entry = entry->newer) listed++;
  CHECK(listed == blocks);
  kvs_file_index_free(&index);
}

static struct kvs_file_entry *add_entry(struct kvs_file_index *index, const char *key, uint32_t slot) {
  struct kvs_file_entry *entry = kvs_file_index_add(index, (const uint8_t *)key, strlen(key));
  kvs_file_index_set_slot(index, entry, slot);
  return entry;
}

/* Who has an entry has it still when all is replaced: with the slot that was found, or with none. */
static void test_an_index_that_is_replaced(void) {
  struct kvs_file_index index, found;
  CHECK(kvs_file_index_init(&index) && kvs_file_index_init(&found));
  struct kvs_file_entry *read = add_entry(&index, "read", 1), *pinned = add_entry(&index, "pinned", 2),
                        *gone = add_entry(&index, "gone", 3);
  kvs_file_index_settle(&index, add_entry(&index, "moved", 4));
  kvs_file_index_settle(&index, add_entry(&index, "away", 5));
  read->readers = gone->readers = 1;
  kvs_file_index_pin(&index, pinned, true);
  const char *keys[] = {"new", "moved", "read", "pinned"};
  for (uint32_t i = 0; i < 4; i++) {
    struct kvs_file_entry *entry = add_entry(&found, keys[i], 10 + i);
    entry->sequence = 20 + i;
    kvs_file_index_settle(&found, entry);
  }
  kvs_file_index_replace(&index, &found);
  kvs_file_index_free(&found);
  CHECK(kvs_file_index_find(&index, (const uint8_t *)"read", 4) == read && read->slot == 12 && read->sequence == 22);
  CHECK(kvs_file_index_find(&index, (const uint8_t *)"pinned", 6) == pinned && pinned->slot == 13 && pinned->pins == 1);
  CHECK(kvs_file_index_find(&index, (const uint8_t *)"gone", 4) == gone && gone->slot == KVS_NO_SLOT);
  CHECK(!kvs_file_index_find(&index, (const uint8_t *)"away", 4));
  CHECK(index.count == 5 && index.blocks == 4 && index.pinned == 1);
  CHECK(index.oldest->slot == 10 && index.newest->slot == 11 && index.oldest->newer == index.newest);
  read->readers = gone->readers = 0;
  kvs_file_index_pin(&index, pinned, false);
  kvs_file_index_settle(&index, read);
  kvs_file_index_settle(&index, gone);
  kvs_file_index_settle(&index, pinned);
  CHECK(index.count == 4 && index.blocks == 4 && index.pinned == 0 && index.newest == pinned);
  kvs_file_index_free(&index);
}

/* -- stores -------------------------------------------------------------------------------------------------------- */

enum { NBYTES = 6000, KEYS = 24, WORKERS = 4, STEPS = 150 };

static void fill(uint8_t *block, unsigned key, unsigned version) {
  uint64_t state = 1000003u * key + version + 1;
  for (int i = 0; i < NBYTES; i++) block[i] = (uint8_t)check_random(&state);
}

struct worker {
  struct kvs_file_store *store;
  unsigned number, wrong, done;
};

static int finish(struct kvs_file_transfer *transfer) {
  struct kvs_error why;
  int status = kvs_file_transfer_wait(transfer, PATIENCE, &why);
  kvs_file_transfer_unref(transfer);
  return status;
}

/* Keys of its own: what it loads is what it stored last, or the store says that it is not there. */
static void *work(void *arg) {
  struct worker *worker = arg;
  uint64_t state = worker->number + 17;
  unsigned versions[KEYS] = {0};
  uint8_t *block = malloc(NBYTES), *wanted = malloc(NBYTES);
  for (unsigned step = 1; step <= STEPS; step++) {
    unsigned k = (unsigned)check_below(&state, KEYS);
    uint8_t key[2] = {(uint8_t)worker->number, (uint8_t)k};
    size_t end = sizeof key;
    struct kvs_file_keys keys = {key, &end, 1};
    uint64_t address = (uintptr_t)block;
    struct kvs_file_blocks blocks = {.addresses = &address};
    struct kvs_file_options options = {.replace = true};
    struct kvs_file_transfer *transfer;
    struct kvs_error why;
    unsigned what = (unsigned)check_below(&state, 5);
    if (what < 2) {
      fill(block, worker->number * 100 + k, step);
      bool ok = !kvs_file_store_blocks(worker->store, &keys, &blocks, &options, &transfer, &why) && !finish(transfer);
      versions[k] = ok ? step : 0; /* after a failure: the one before, if it is still there; not checked */
      if (!ok && !kvs_file_delete(worker->store, &keys, NULL, &transfer, &why) && finish(transfer))
        versions[k] = UINT32_MAX;
    } else if (what == 2 && check_below(&state, 3) == 0) {
      if (!kvs_file_delete(worker->store, &keys, NULL, &transfer, &why))
        versions[k] = finish(transfer) ? UINT32_MAX : 0;
    } else if (!kvs_file_load_blocks(worker->store, &keys, &blocks, NULL, &transfer, &why)) {
      int status = finish(transfer);
      fill(wanted, worker->number * 100 + k, versions[k]);
      bool told = versions[k] == UINT32_MAX; /* it may be there or not */
      if (status == KVS_OK && !told) worker->wrong += versions[k] == 0 || memcmp(block, wanted, NBYTES) != 0;
      if (status != KVS_OK && status != KVS_MISSING && status != KVS_FILE) worker->wrong++;
    }
    worker->done++;
  }
  free(wanted);
  free(block);
  return NULL;
}

static void empty(const char *folder) {
  char command[300];
  snprintf(command, sizeof command, "rm -rf '%s'", folder);
  CHECK(system(command) == 0);
}

static void inject(struct kvs_file_store *store, enum kvs_file_call call, enum kvs_file_fault_action action,
                   uint64_t every, int code) {
  struct kvs_file_fault fault = {.action = action, .nth = every, .every = every, .code = code, .delay_ns = 200000};
  kvs_file_inject(store, call, &fault);
}

static void test_threads_under_faults(enum kvs_file_fault_action action) {
  char folder[] = "/tmp/kvswap-test-XXXXXX";
  CHECK(mkdtemp(folder) != NULL);
  struct kvs_file_settings settings = {.directory = folder,
                                       .layout = "{}",
                                       .block_nbytes = NBYTES,
                                       .capacity = 5 * (KVS_FILE_PAGE + 8 * 12288),
                                       .segment_nbytes = KVS_FILE_PAGE + 8 * 12288};
  struct kvs_file_store *store;
  for (int round = 0; round < 2; round++) {
    struct worker workers[WORKERS];
    pthread_t threads[WORKERS];
    CHECK(!kvs_file_open(&settings, &store, &err), "%s", err.message);
    inject(store, KVS_FILE_WRITE, action, 7, ENOSPC);
    inject(store, KVS_FILE_READ, action, 5, EIO);
    for (unsigned i = 0; i < WORKERS; i++) {
      workers[i] = (struct worker){.store = store, .number = i + 10 * (unsigned)round};
      CHECK(!pthread_create(&threads[i], NULL, work, &workers[i]));
    }
    for (unsigned i = 0; i < WORKERS; i++) {
      pthread_join(threads[i], NULL);
      CHECK(workers[i].wrong == 0 && workers[i].done == STEPS, "action %d: %u wrong", action, workers[i].wrong);
    }
    struct kvs_file_stats stats;
    CHECK(!kvs_file_get_stats(store, &stats, &err));
    CHECK(stats.stored > 0 && stats.loaded > 0 && stats.damaged == 0 && stats.blocks <= stats.slots);
    CHECK(!kvs_file_close(store, PATIENCE, &err));
    kvs_file_unref(store);
  }
  empty(folder);
}

/* Handles that outlive the store's, and a store that is dropped while transfers run. */
static void test_lifetime(void) {
  char folder[] = "/tmp/kvswap-test-XXXXXX";
  CHECK(mkdtemp(folder) != NULL);
  struct kvs_file_settings settings = {
      .directory = folder, .layout = "{}", .block_nbytes = NBYTES, .capacity = 1 << 20};
  struct kvs_file_store *store;
  static uint8_t block[NBYTES];
  uint64_t address = (uintptr_t)block;
  size_t end = 1;
  struct kvs_file_keys keys = {(const uint8_t *)"k", &end, 1};
  struct kvs_file_blocks blocks = {.addresses = &address};
  struct kvs_file_transfer *first, *second;
  CHECK(!kvs_file_open(&settings, &store, &err));
  CHECK(!kvs_file_store_blocks(store, &keys, &blocks, NULL, &first, &err));
  CHECK(!kvs_file_load_blocks(store, &keys, &blocks, NULL, &second, &err));
  kvs_file_transfer_unref(first);
  kvs_file_unref(store);
  CHECK(!kvs_file_transfer_wait(second, PATIENCE, &err), "%s", err.message);
  kvs_file_transfer_unref(second); /* the last handle: closes it */
  CHECK(!kvs_file_open(&settings, &store, &err), "%s", err.message);
  CHECK(!kvs_file_store_blocks(store, &keys, &blocks, NULL, &first, &err));
  kvs_file_shutdown(PATIENCE);
  CHECK(kvs_file_transfer_done(first));
  CHECK(kvs_file_store_blocks(store, &keys, &blocks, NULL, &second, &err) == KVS_CLOSED);
  kvs_file_transfer_unref(first);
  kvs_file_unref(store);
  empty(folder);
}

/* -- blocks of pools ----------------------------------------------------------------------------------------------- */

enum { POOL_BLOCKS = 32, PART = NBYTES / 2 };

struct device_rig {
  struct kvs_engine *engine;
  uint64_t memory[2];
  struct kvs_pool *pools[2];
  struct kvs_file_store *store;
};

static uint8_t *part_of(const struct device_rig *rig, int part, unsigned slot) {
  return (uint8_t *)(uintptr_t)rig->memory[part] + (size_t)slot * PART;
}

static void set_slot(const struct device_rig *rig, unsigned slot, unsigned key, unsigned version) {
  uint8_t block[NBYTES];
  fill(block, key, version);
  for (int part = 0; part < 2; part++) memcpy(part_of(rig, part, slot), block + part * PART, PART);
}

static bool slot_is(const struct device_rig *rig, unsigned slot, unsigned key, unsigned version) {
  uint8_t block[NBYTES];
  fill(block, key, version);
  return memcmp(part_of(rig, 0, slot), block, PART) == 0 && memcmp(part_of(rig, 1, slot), block + PART, PART) == 0;
}

struct mover {
  const struct device_rig *rig;
  unsigned number, wrong;
};

/* A thread's keys go from its own slots, and come back to them, through four staging slots that all share. */
static void *move_through_staging(void *arg) {
  struct mover *worker = arg;
  const struct device_rig *rig = worker->rig;
  for (unsigned step = 1; step <= 30; step++) {
    unsigned from = worker->number * 8, to = from + 4;
    uint8_t names[4];
    size_t ends[4] = {1, 2, 3, 4};
    int64_t sources[4], targets[4];
    for (unsigned i = 0; i < 4; i++) {
      names[i] = (uint8_t)(worker->number * 4 + i);
      sources[i] = from + i;
      targets[i] = to + 3 - i;
      set_slot(rig, from + i, names[i], step);
    }
    struct kvs_file_keys keys = {names, ends, 4};
    struct kvs_file_blocks out = {.pools = rig->pools, .npools = 2, .ids = {sources, 8, 4}}, back = out;
    struct kvs_file_options options = {.replace = true};
    struct kvs_file_transfer *transfer;
    struct kvs_error why;
    back.ids.data = targets;
    if (kvs_file_store_blocks(rig->store, &keys, &out, &options, &transfer, &why) || finish(transfer)) worker->wrong++;
    if (kvs_file_load_blocks(rig->store, &keys, &back, NULL, &transfer, &why) || finish(transfer)) worker->wrong++;
    for (unsigned i = 0; i < 4; i++) worker->wrong += !slot_is(rig, to + 3 - i, names[i], step);
  }
  return NULL;
}

/* A libcufile that reads and writes by itself, in its compatibility mode. */
static void make_fake(const char *path) {
  char command[300];
  const char *cc = getenv("CC");
  snprintf(command, sizeof command, "%s -D_GNU_SOURCE -shared -fPIC tests/stand_ins/fake_cufile.c -o %s",
           cc && *cc ? cc : "cc", path);
  CHECK(system(command) == 0, "%s", command);
  setenv("KVSWAP_CUFILE", path, 1);
}

static void test_staging(enum kvs_file_gds_mode gds) {
  char folder[] = "/tmp/kvswap-test-XXXXXX";
  struct device_rig rig = {0};
  CHECK(mkdtemp(folder) != NULL);
  CHECK(!kvs_engine_open("host:77", &rig.engine, &err), "%s", err.message);
  for (int part = 0; part < 2; part++) {
    CHECK(!kvs_engine_alloc(rig.engine, POOL_BLOCKS * PART, false, &rig.memory[part], &err));
    struct kvs_pool_layout layout = {.ptr = rig.memory[part], .num_blocks = POOL_BLOCKS, .block_nbytes = PART};
    layout.group = part ? rig.pools[0] : NULL;
    CHECK(!kvs_pool_open(rig.engine, &layout, &rig.pools[part], &err), "%s", err.message);
  }
  struct kvs_file_settings settings = {.directory = folder,
                                       .layout = "{}",
                                       .block_nbytes = NBYTES,
                                       .capacity = 64 * 12288,
                                       .device = rig.engine,
                                       .gds = gds,
                                       .staging_nbytes = 1};
  char fake[64];
  snprintf(fake, sizeof fake, "%s.so", folder);
  if (gds == KVS_FILE_GDS_COMPAT) make_fake(fake);
  CHECK(!kvs_file_open(&settings, &rig.store, &err), "%s", err.message);
  struct mover workers[4];
  pthread_t threads[4];
  for (unsigned i = 0; i < 4; i++) {
    workers[i] = (struct mover){.rig = &rig, .number = i};
    CHECK(!pthread_create(&threads[i], NULL, move_through_staging, &workers[i]));
  }
  for (unsigned i = 0; i < 4; i++) {
    pthread_join(threads[i], NULL);
    CHECK(workers[i].wrong == 0, "thread %u: %u wrong", i, workers[i].wrong);
  }
  struct kvs_file_stats stats;
  CHECK(!kvs_file_get_stats(rig.store, &stats, &err));
  CHECK((stats.gds_read_nbytes > 0) == (gds == KVS_FILE_GDS_COMPAT));
  CHECK(!kvs_file_close(rig.store, PATIENCE, &err), "%s", err.message);
  kvs_file_unref(rig.store);
  CHECK(kvs_file_gds_shutdown());
  unsetenv("KVSWAP_CUFILE");
  unlink(fake);
  for (int part = 1; part >= 0; part--) {
    kvs_pool_unref(rig.pools[part]);
    CHECK(!kvs_engine_free(rig.engine, rig.memory[part], &err), "%s", err.message);
  }
  kvs_engine_unref(rig.engine);
  empty(folder);
}

/* -- closing, from several threads --------------------------------------------------------------------------------- */

enum { FEW = 8 };

struct rival {
  struct kvs_file_store *store;
  struct kvs_pool *const *pools; /* NULL: host memory */
  unsigned wrong, calls;
  int last;
};

static void set_rig_up(struct device_rig *rig, const char *name) {
  CHECK(!kvs_engine_open(name, &rig->engine, &err), "%s", err.message);
  CHECK(!kvs_engine_alloc(rig->engine, FEW * NBYTES, false, &rig->memory[0], &err));
  struct kvs_pool_layout layout = {.ptr = rig->memory[0], .num_blocks = FEW, .block_nbytes = NBYTES};
  CHECK(!kvs_pool_open(rig->engine, &layout, &rig->pools[0], &err), "%s", err.message);
}

static void take_rig_down(struct device_rig *rig) {
  kvs_pool_unref(rig->pools[0]);
  CHECK(!kvs_engine_free(rig->engine, rig->memory[0], &err), "%s", err.message);
  kvs_engine_unref(rig->engine);
}

/* Loads of what is there, until the store says that it is closed; nothing else may be said. */
static void *load_until_closed(void *arg) {
  struct rival *rival = arg;
  uint8_t block[NBYTES], key = 0;
  uint64_t address = (uintptr_t)block;
  int64_t slot = 3;
  size_t end = 1;
  struct kvs_file_keys keys = {&key, &end, 1};
  struct kvs_file_blocks blocks = {.addresses = rival->pools ? NULL : &address,
                                   .pools = rival->pools,
                                   .npools = rival->pools != NULL,
                                   .ids = {&slot, 8, 1}};
  for (rival->last = KVS_OK; rival->last == KVS_OK; rival->calls++, key = (uint8_t)(rival->calls % FEW)) {
    struct kvs_file_transfer *transfer;
    struct kvs_error why;
    rival->last = kvs_file_load_blocks(rival->store, &keys, &blocks, NULL, &transfer, &why);
    if (rival->last) break;
    int status = finish(transfer);
    rival->wrong += status != KVS_OK && status != KVS_CANCELLED;
  }
  return NULL;
}

static void *refresh_until_closed(void *arg) {
  struct rival *rival = arg;
  struct kvs_error why;
  do rival->last = kvs_file_refresh(rival->store, &why);
  while (rival->last == KVS_OK && ++rival->calls);
  return NULL;
}

static void store_few(const struct kvs_file_settings *settings) {
  struct kvs_file_store *store;
  struct kvs_file_transfer *transfer;
  uint8_t block[NBYTES], names[FEW];
  uint64_t addresses[FEW];
  size_t ends[FEW];
  fill(block, 0, 0);
  for (int i = 0; i < FEW; i++) {
    names[i] = (uint8_t)i;
    ends[i] = (size_t)i + 1;
    addresses[i] = (uintptr_t)block;
  }
  struct kvs_file_keys keys = {names, ends, FEW};
  struct kvs_file_blocks blocks = {.addresses = addresses};
  CHECK(!kvs_file_open(settings, &store, &err), "%s", err.message);
  CHECK(!kvs_file_store_blocks(store, &keys, &blocks, NULL, &transfer, &err) && !finish(transfer));
  CHECK(!kvs_file_close(store, PATIENCE, &err));
  kvs_file_unref(store);
}

/* A reader whose threads load and refresh is closed beneath them. */
static void test_closing_beside_calls(void) {
  char folder[] = "/tmp/kvswap-test-XXXXXX";
  struct device_rig rig = {0};
  CHECK(mkdtemp(folder) != NULL);
  struct kvs_file_settings settings = {
      .directory = folder, .layout = "{}", .block_nbytes = NBYTES, .capacity = 1 << 20};
  store_few(&settings);
  set_rig_up(&rig, "host:78");
  settings.readonly = true;
  settings.device = rig.engine;
  for (int round = 0; round < 20; round++) {
    struct rival rivals[4] = {{.pools = rig.pools}, {0}, {.pools = rig.pools}, {0}};
    pthread_t threads[4];
    CHECK(!kvs_file_open(&settings, &rivals[0].store, &err), "%s", err.message);
    if (round % 2) inject(rivals[0].store, KVS_FILE_READ, KVS_FILE_FAULT_DELAY, 3, 0);
    for (int i = 0; i < 4; i++) {
      rivals[i].store = rivals[0].store;
      CHECK(!pthread_create(&threads[i], NULL, i < 3 ? load_until_closed : refresh_until_closed, &rivals[i]));
    }
    usleep(300u * (unsigned)round);
    CHECK(!kvs_file_close(rivals[0].store, PATIENCE, &err), "%s", err.message);
    for (int i = 0; i < 4; i++) {
      pthread_join(threads[i], NULL);
      CHECK(rivals[i].last == KVS_CLOSED && rivals[i].wrong == 0, "round %d, thread %d: %s, %u wrong", round, i,
            kvs_status_name(rivals[i].last), rivals[i].wrong);
    }
    kvs_file_unref(rivals[0].store);
  }
  take_rig_down(&rig);
  empty(folder);
}

static void *close_it(void *arg) {
  struct rival *rival = arg;
  struct kvs_error why;
  rival->last = kvs_file_close(rival->store, PATIENCE, &why);
  return NULL;
}

/* Two threads close a store: it is closed when either call returns. */
static void test_closing_twice_at_once(void) {
  char folder[] = "/tmp/kvswap-test-XXXXXX";
  CHECK(mkdtemp(folder) != NULL);
  struct kvs_file_settings settings = {
      .directory = folder, .layout = "{}", .block_nbytes = NBYTES, .capacity = 1 << 20};
  for (int round = 0; round < 10; round++) {
    struct rival rival = {0};
    pthread_t thread;
    CHECK(!kvs_file_open(&settings, &rival.store, &err), "%s", err.message);
    struct kvs_file_fault slow = {.action = KVS_FILE_FAULT_DELAY, .nth = 1, .every = 1, .delay_ns = 20000000};
    kvs_file_inject(rival.store, KVS_FILE_WRITE, &slow); /* its last checkpoint */
    CHECK(!pthread_create(&thread, NULL, close_it, &rival));
    usleep(1000u * (unsigned)round);
    CHECK(!kvs_file_close(rival.store, PATIENCE, &err), "%s", err.message);
    struct kvs_file_store *again;
    CHECK(!kvs_file_open(&settings, &again, &err), "round %d: %s", round, err.message);
    pthread_join(thread, NULL);
    CHECK(rival.last == KVS_OK);
    kvs_file_unref(rival.store);
    kvs_file_unref(again);
  }
  empty(folder);
}

static void *drop_it(void *arg) {
  kvs_file_unref(arg);
  return NULL;
}

/* The end of the process, while a thread that dropped the last handle of a store waits for what is under way there. */
static void test_the_end_beside_the_last_handle(void) {
  char folder[] = "/tmp/kvswap-test-XXXXXX";
  static uint8_t block[NBYTES];
  uint64_t address = (uintptr_t)block;
  size_t end = 1;
  struct kvs_file_keys keys = {(const uint8_t *)"k", &end, 1};
  struct kvs_file_blocks blocks = {.addresses = &address};
  struct kvs_file_options options = {.replace = true};
  CHECK(mkdtemp(folder) != NULL);
  struct kvs_file_settings settings = {
      .directory = folder, .layout = "{}", .block_nbytes = NBYTES, .capacity = 1 << 20};
  for (int round = 0; round < 10; round++) {
    struct kvs_file_store *store;
    struct kvs_file_transfer *transfer;
    pthread_t thread;
    CHECK(!kvs_file_open(&settings, &store, &err), "%s", err.message);
    struct kvs_file_fault slow = {.action = KVS_FILE_FAULT_DELAY, .nth = 1, .every = 1, .delay_ns = 10000000};
    kvs_file_inject(store, KVS_FILE_WRITE, &slow);
    CHECK(!kvs_file_store_blocks(store, &keys, &blocks, &options, &transfer, &err));
    kvs_file_transfer_unref(transfer);
    CHECK(!pthread_create(&thread, NULL, drop_it, store));
    usleep(1000u * (unsigned)round);
    kvs_file_shutdown(PATIENCE);
    pthread_join(thread, NULL);
  }
  empty(folder);
}

int main(void) {
  test_crc32c();
  test_pages();
  test_pages_that_lie();
  test_numbers_at_their_end();
  test_parts_of_pages();
  test_index();
  test_an_index_that_is_replaced();
  test_threads_under_faults(KVS_FILE_FAULT_NONE);
  test_threads_under_faults(KVS_FILE_FAULT_SHORT);
  test_threads_under_faults(KVS_FILE_FAULT_INTERRUPT);
  test_threads_under_faults(KVS_FILE_FAULT_FAIL);
  test_threads_under_faults(KVS_FILE_FAULT_DELAY);
  test_lifetime();
  test_staging(KVS_FILE_GDS_OFF);
  test_staging(KVS_FILE_GDS_COMPAT);
  test_closing_beside_calls();
  test_closing_twice_at_once();
  test_the_end_beside_the_last_handle();
  return check_close();
}
