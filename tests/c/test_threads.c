/* Everything at once: ten threads in all parts of the C surface, on two host devices, for a few seconds (or as many as
 * the first argument says; the second is a seed). Under ThreadSanitizer it must end without a report; and each thread
 * compares what it alone writes with a model. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/wait.h"
#include "check.h"
#include "device/device.h"
#include "engine/metrics.h"
#include "engine/pattern.h"
#include "files/store.h"
#include "hostpool/metrics.h"
#include "kvswap_file.h"
#include "private.h"

enum { THREADS = 10, DEVICES = 2, BLOCKS = 24, NBYTES = 768, POOL_BLOCKS = 32, KEYS = 48, LEAST = 8, MOST = 64 };
static const int64_t PATIENCE = 60000000000, SHORT = 2000000;

/* What all threads use. */
static struct {
  struct kvs_engine *engines[DEVICES], *lender;
  unsigned char *memory[3]; /* of the pools */
  struct kvs_pool *pools[3];
  struct kvs_host_pool *host, *words; /* one of this process, which grows and shrinks, and a shared one */
  struct kvs_file_store *store;
  struct kvs_offload *map;
  pthread_mutex_t lock;
  struct kvs_transfer *last[THREADS]; /* guarded by lock: of each thread, for others to wait for */
  struct kvs_pool *lent;              /* guarded by lock: in memory that its owner frees, without a word to others */
  uint64_t end_ns;
  pid_t pid;
} all;

/* What one thread has for itself: caches on both sides, with what must be in them. */
struct user {
  unsigned number;
  uint64_t random;
  struct kvs_engine *engine;
  kvs_stream stream;
  unsigned char *gpu, *cpu, *gpu_model, *cpu_model;
  struct kvs_transfer *before; /* the last one that touches them */
  struct kvs_pool *pool;       /* blocks for files */
  uint64_t pool_memory;
  unsigned owners; /* given and not yet released: atomic */
  uint64_t calls, wrong;
};

static uint64_t below(struct user *user, uint64_t limit) { return check_below(&user->random, limit); }

/* A call's status is KVS_OK, or one of those that are listed. */
static bool expect(struct user *user, const char *what, int status, const struct kvs_error *err, const int *allowed,
                   size_t nallowed) {
  user->calls++;
  for (size_t i = 0; i < nallowed; i++)
    if (status == allowed[i]) return status == KVS_OK;
  if (user->wrong++ < 3) fprintf(stderr, "thread %u: %s: %d %s\n", user->number, what, status, err->message);
  return false;
}
#define ALLOW(...) (const int[]){KVS_OK, __VA_ARGS__}, sizeof((const int[]){KVS_OK, __VA_ARGS__}) / sizeof(int)
#define EXPECT(call, ...) expect(user, #call, (call), &err, ALLOW(__VA_ARGS__))

/* -- transfers ----------------------------------------------------------------------------------------------------- */

static struct kvs_transfer *of_another(struct user *user) {
  pthread_mutex_lock(&all.lock);
  struct kvs_transfer *transfer = all.last[below(user, THREADS)];
  if (transfer) kvs_transfer_ref(transfer);
  pthread_mutex_unlock(&all.lock);
  return transfer;
}

static void keep_for_others(struct user *user, struct kvs_transfer *transfer) {
  kvs_transfer_ref(transfer);
  pthread_mutex_lock(&all.lock);
  struct kvs_transfer *old = all.last[user->number];
  all.last[user->number] = transfer;
  pthread_mutex_unlock(&all.lock);
  if (old) kvs_transfer_unref(old);
}

static void release(void *owner) { __atomic_fetch_sub(&((struct user *)owner)->owners, 1, __ATOMIC_ACQ_REL); }

struct choice {
  struct kvs_options options;
  struct kvs_after after[2];
};

static void draw_options(struct user *user, struct choice *choice, struct kvs_transfer *other) {
  struct kvs_options *options = &choice->options;
  *choice = (struct choice){.options = {.priority = (enum kvs_priority)below(user, 4),
                                        .path = (enum kvs_path)below(user, KVS_PATHS),
                                        .on_stream = below(user, 2),
                                        .stream = user->stream,
                                        .after_compute = below(user, 2),
                                        .where = "somewhere"}};
  if (user->before)
    choice->after[options->nafter++] = (struct kvs_after){.kind = KVS_AFTER_TRANSFER, .transfer = user->before};
  if (other) choice->after[options->nafter++] = (struct kvs_after){.kind = KVS_AFTER_TRANSFER, .transfer = other};
  options->after = choice->after;
  if (below(user, 2)) {
    options->owner = user;
    options->release = release;
    __atomic_fetch_add(&user->owners, 1, __ATOMIC_ACQ_REL);
  }
}

/* All that can be asked of a transfer, of any thread's. */
static void ask(struct user *user, struct kvs_transfer *transfer) {
  struct kvs_error err = {0};
  struct kvs_transfer_info info;
  uint64_t event;
  uint32_t positions[4];
  kvs_transfer_get_info(transfer, &info);
  (void)kvs_transfer_done(transfer);
  (void)kvs_transfer_cancel(transfer);
  EXPECT(kvs_transfer_error(transfer, &err));
  if (kvs_transfer_failed(transfer, positions, 4)) user->wrong++;
  if (info.num_layers) EXPECT(kvs_transfer_layer_done(transfer, below(user, info.num_layers), &err), KVS_NOT_READY);
  if (kvs_transfer_engine(transfer) == user->engine) {
    EXPECT(kvs_transfer_event(transfer, &event, &err));
    EXPECT(kvs_transfer_make_wait(transfer, user->stream, &err));
    if (info.num_layers)
      EXPECT(kvs_transfer_make_wait_layer(transfer, below(user, info.num_layers), user->stream, &err));
  }
  if (below(user, 2)) EXPECT(kvs_transfer_wait(transfer, SHORT, &err), KVS_TIMEOUT);
}

static void settle(struct user *user) {
  struct kvs_error err = {0};
  if (!user->before) return;
  EXPECT(kvs_transfer_wait(user->before, PATIENCE, &err));
  kvs_transfer_unref(user->before);
  user->before = NULL;
  if (memcmp(user->gpu, user->gpu_model, BLOCKS * NBYTES) || memcmp(user->cpu, user->cpu_model, BLOCKS * NBYTES)) {
    user->wrong++;
    fprintf(stderr, "thread %u: other bytes than the model's\n", user->number);
  }
}

static void submitted(struct user *user, int status, const struct choice *choice, struct kvs_transfer *transfer) {
  if (status) {
    if (choice->options.owner) release(user);
    return;
  }
  if (user->before) kvs_transfer_unref(user->before);
  user->before = transfer;
  keep_for_others(user, transfer);
  ask(user, transfer);
  if (below(user, 4) == 0) settle(user);
}

static void draw_ids(struct user *user, int64_t *ids, size_t limit) {
  for (size_t i = 0; i < limit; i++) ids[i] = (int64_t)i;
  for (size_t i = limit; i-- > 1;) {
    size_t k = (size_t)below(user, i + 1);
    int64_t id = ids[i];
    ids[i] = ids[k], ids[k] = id;
  }
}

static void swap(struct user *user) {
  struct kvs_transfer *other = of_another(user), *transfer = NULL;
  struct kvs_error err = {0};
  struct choice choice;
  int64_t gpu[BLOCKS], cpu[BLOCKS];
  uint64_t src[BLOCKS], dst[BLOCKS], nbytes = NBYTES;
  size_t count = 1 + (size_t)below(user, BLOCKS);
  enum kvs_direction direction = (enum kvs_direction)below(user, 2);
  draw_options(user, &choice, other);
  draw_ids(user, gpu, BLOCKS), draw_ids(user, cpu, BLOCKS);
  struct kvs_tensor tensor = {(uintptr_t)user->gpu, (uintptr_t)user->cpu, NBYTES, BLOCKS, BLOCKS, 0, 0};
  struct kvs_ids gpu_ids = {gpu, 8, count}, cpu_ids = {cpu, 8, count};
  for (size_t i = 0; i < count; i++) {
    uint64_t there = tensor.gpu + (uint64_t)gpu[i] * NBYTES, here = tensor.cpu + (uint64_t)cpu[i] * NBYTES;
    src[i] = direction == KVS_D2H ? there : here;
    dst[i] = direction == KVS_D2H ? here : there;
  }
  bool batch = below(user, 2);
  choice.options.layer_events = !batch && below(user, 2);
  int status =
      batch ? kvs_swap_batch(user->engine, src, dst, &nbytes, true, count, &choice.options, &transfer, &err)
            : kvs_swap_cache(user->engine, &tensor, 1, &gpu_ids, &cpu_ids, direction, &choice.options, &transfer, &err);
  expect(user, "swap", status, &err, ALLOW(KVS_QUEUE_FULL, KVS_UNSUPPORTED)); /* bursts may be off just now */
  for (size_t i = 0; !status && i < count; i++) {
    unsigned char *there = user->gpu_model + gpu[i] * NBYTES, *here = user->cpu_model + cpu[i] * NBYTES;
    memcpy(direction == KVS_D2H ? here : there, direction == KVS_D2H ? there : here, NBYTES);
  }
  submitted(user, status, &choice, transfer);
  if (other) ask(user, other), kvs_transfer_unref(other);
}

/* -- pools --------------------------------------------------------------------------------------------------------- */

static void move(struct user *user) {
  struct kvs_transfer *other = of_another(user), *transfer = NULL;
  struct kvs_error err = {0};
  struct choice choice;
  int64_t from[POOL_BLOCKS], to[POOL_BLOCKS];
  size_t src = (size_t)below(user, 3), count = 1 + (size_t)below(user, 6);
  struct kvs_pool *pools[2] = {all.pools[src], all.pools[(src + 1 + below(user, 2)) % 3]};
  draw_ids(user, from, POOL_BLOCKS), draw_ids(user, to, POOL_BLOCKS);
  draw_options(user, &choice, other);
  choice.options.stream = 0;
  choice.options.on_stream = false;
  struct kvs_move blocks = {
      .src = &pools[0], .dst = &pools[1], .npairs = 1, .src_ids = {from, 8, count}, .dst_ids = {to, 8, count}};
  int status = kvs_move_blocks(&blocks, &choice.options, &transfer, &err);
  expect(user, "move", status, &err, ALLOW(KVS_QUEUE_FULL, KVS_UNSUPPORTED));
  submitted(user, status, &choice, transfer);
  if (other) kvs_transfer_unref(other);
}

static void note(struct user *user) {
  struct kvs_error err = {0};
  int64_t ids[POOL_BLOCKS];
  struct kvs_pool *pool = all.pools[below(user, 3)];
  struct kvs_engine *engine = kvs_pool_engine(pool);
  struct kvs_race races[8];
  struct kvs_pool_layout layout;
  draw_ids(user, ids, POOL_BLOCKS);
  const struct kvs_ids some = {ids, 8, 4};
  const struct kvs_after before = {.kind = KVS_AFTER_STREAM, .handle = 0};
  kvs_pool_get_layout(pool, &layout);
  bool checking = below(user, 4) == 0;
  if (checking) kvs_racecheck_start();
  EXPECT(kvs_note_access(pool, &some, below(user, 2), 0, 0, 0, "here", &err));
  EXPECT(kvs_note_order(engine, &before, below(user, 2), 0, &err));
  (void)kvs_racecheck_active();
  (void)kvs_racecheck_found();
  (void)kvs_racecheck_take(races, 8);
  move(user);
  if (checking) kvs_racecheck_stop();
}

static void open_pool(struct user *user) {
  struct kvs_error err = {0};
  struct kvs_pool *pool = NULL, *second = NULL;
  unsigned char *memory = malloc(2 * BLOCKS * NBYTES);
  struct kvs_pool_layout layout = {.ptr = (uintptr_t)memory, .num_blocks = BLOCKS, .block_nbytes = NBYTES};
  struct kvs_transfer *transfer = NULL;
  int64_t from = (int64_t)below(user, POOL_BLOCKS), to = (int64_t)below(user, BLOCKS);
  if (EXPECT(kvs_pool_open(all.engines[0], &layout, &pool, &err))) {
    layout.ptr += BLOCKS * NBYTES;
    layout.group = pool;
    if (EXPECT(kvs_pool_open(all.engines[0], &layout, &second, &err))) kvs_pool_unref(second);
    struct kvs_move blocks = {
        .src = &all.pools[0], .dst = &pool, .npairs = 1, .src_ids = {&from, 8, 1}, .dst_ids = {&to, 8, 1}};
    if (EXPECT(kvs_move_blocks(&blocks, NULL, &transfer, &err), KVS_QUEUE_FULL)) {
      EXPECT(kvs_transfer_wait(transfer, PATIENCE, &err));
      kvs_transfer_unref(transfer);
    }
    kvs_pool_unref(pool);
  }
  free(memory);
}

static void lend(struct kvs_pool *pool) {
  pthread_mutex_lock(&all.lock);
  struct kvs_pool *old = all.lent;
  all.lent = pool;
  pthread_mutex_unlock(&all.lock);
  if (old) kvs_pool_unref(old);
}

static void borrow(struct user *user) {
  struct kvs_error err = {0};
  struct kvs_transfer *transfer;
  int64_t from = (int64_t)below(user, POOL_BLOCKS), to = (int64_t)below(user, BLOCKS);
  pthread_mutex_lock(&all.lock);
  struct kvs_pool *pool = all.lent;
  if (pool) kvs_pool_ref(pool);
  pthread_mutex_unlock(&all.lock);
  if (!pool) return;
  struct kvs_move blocks = {
      .src = &all.pools[0], .dst = &pool, .npairs = 1, .src_ids = {&from, 8, 1}, .dst_ids = {&to, 8, 1}};
  if (EXPECT(kvs_move_blocks(&blocks, NULL, &transfer, &err), KVS_QUEUE_FULL, KVS_CLOSED)) kvs_transfer_unref(transfer);
  kvs_pool_unref(pool);
}

/* No transfer of a pool reaches what comes after the pool's memory. */
static void free_lent(struct user *user) {
  struct kvs_error err = {0};
  struct kvs_engine *owner = all.engines[below(user, DEVICES)];
  struct kvs_pool *pool;
  struct kvs_pool_layout layout = {.num_blocks = BLOCKS, .block_nbytes = NBYTES};
  if (!EXPECT(kvs_engine_alloc(owner, BLOCKS * NBYTES, true, &layout.ptr, &err))) return;
  if (EXPECT(kvs_pool_open(all.engines[0], &layout, &pool, &err))) lend(pool);
  for (int i = 0; i < 3; i++) borrow(user);
  if (!EXPECT(kvs_engine_free(owner, layout.ptr, &err), KVS_TIMEOUT)) return;
  if (!EXPECT(kvs_engine_alloc(owner, BLOCKS * NBYTES, true, &layout.ptr, &err))) return;
  unsigned char *next = (unsigned char *)(uintptr_t)layout.ptr;
  memset(next, 1, BLOCKS * NBYTES);
  for (int i = 0; i < 3; i++) borrow(user);
  for (size_t i = 0; i < BLOCKS * NBYTES; i++) user->wrong += next[i] != 1;
  EXPECT(kvs_engine_free(owner, layout.ptr, &err), KVS_TIMEOUT);
}

/* -- engines and their memory -------------------------------------------------------------------------------------- */

static void look(struct user *user) {
  struct kvs_error err = {0};
  struct kvs_stats stats;
  struct kvs_defaults defaults;
  char note_text[KVS_BURST_NOTE];
  struct kvs_engine *engine = all.engines[below(user, DEVICES)], *again = NULL;
  kvs_engine_stats(engine, &stats);
  kvs_engine_collect(engine);
  kvs_engine_get_defaults(engine, &defaults);
  kvs_engine_set_defaults(engine, &defaults);
  kvs_engine_burst_note(engine, note_text);
  (void)kvs_engine_slots_nbytes(engine);
  (void)kvs_engine_costs_note(engine);
  EXPECT(kvs_engine_set_lane_depth(engine, 64 + below(user, 64), &err));
  if (EXPECT(kvs_engine_open(kvs_engine_name(engine), &again, &err))) kvs_engine_unref(again);
  if (again != engine) user->wrong++;
  if (below(user, 3) == 0) EXPECT(kvs_engine_synchronize(engine, SHORT, &err), KVS_TIMEOUT);
  if (below(user, 8) == 0) EXPECT(kvs_engine_set_compute_stream(user->engine, user->stream, &err));
  if (below(user, 8) == 0) EXPECT(kvs_engine_set_compute_stream(user->engine, 0, &err));
  if (below(user, 16) == 0)
    EXPECT(kvs_engine_set_slots(engine, below(user, 3) << 17, 2 + (unsigned)below(user, 3), 50 * SHORT, &err),
           KVS_TIMEOUT);
  if (below(user, 8) == 0) {
    const struct kvs_lending lending = {
        .slot_nbytes = (1 + below(user, 2)) << 17, .count = 2 + (unsigned)below(user, 3), .share = 1};
    struct kvs_lending told;
    (void)kvs_engine_lender(engine, 0, &told);
    EXPECT(kvs_engine_lend(all.lender, engine, &lending, 50 * SHORT, &err), KVS_TIMEOUT);
  }
}

/* Reads what others count, open and close. */
static void scrape(struct user *user) {
  enum { ROWS = 4 };
  struct kvs_engine_metrics *metrics = malloc(sizeof *metrics);
  struct kvs_file_metrics *stores = malloc(ROWS * sizeof *stores);
  struct kvs_host_pool_metrics pools[ROWS];
  if (metrics && stores) {
    kvs_engine_get_metrics(all.engines[below(user, DEVICES)], metrics);
    if (metrics->paths[KVS_D2H][KVS_PATH_DMA].nbytes.sum >> 60) user->wrong++;
    (void)kvs_file_stores_get_metrics(stores, ROWS);
    (void)kvs_host_pools_get_metrics(pools, ROWS);
  }
  free(stores);
  free(metrics);
}

static void allocate(struct user *user) {
  struct kvs_error err = {0};
  uint64_t ptr = 0, nbytes = 1 + below(user, 100000);
  enum kvs_alloc kind = (enum kvs_alloc)below(user, 3);
  bool later = below(user, 2);
  unsigned char *own = NULL;
  if (EXPECT(kvs_engine_alloc_kind(user->engine, nbytes, kind, &ptr, &err))) {
    EXPECT(kvs_delay(user->engine, below(user, 100000), user->stream, &err));
    if (later)
      kvs_engine_free_later(user->engine, ptr);
    else
      EXPECT(kvs_engine_free(user->engine, ptr, &err), KVS_TIMEOUT);
  }
  if (posix_memalign((void **)&own, 4096, 65536)) return;
  bool host = below(user, 2);
  uint64_t at = (uintptr_t)own;
  int status =
      host ? kvs_host_register(user->engine, at, 65536, &err) : kvs_engine_register(user->engine, at, 65536, &err);
  if (expect(user, "register", status, &err, ALLOW())) {
    status = host ? kvs_host_unregister(at, &err) : kvs_engine_unregister(user->engine, at, &err);
    expect(user, "unregister", status, &err, ALLOW());
  }
  free(own);
  if (EXPECT(kvs_host_alloc(user->engine, nbytes, &ptr, &err))) EXPECT(kvs_host_free(ptr, &err));
}

static void pattern(struct user *user) {
  struct kvs_error err = {0};
  struct kvs_pattern_job *job = NULL;
  struct kvs_pattern_result result;
  static const size_t words = 512;
  uint64_t *memory = calloc(words, 8);
  struct kvs_pattern_item item = {.ptr = (uintptr_t)memory, .nbytes = 8 * words, .key = below(user, 1000)};
  for (int check = 0; check < 2; check++) {
    enum kvs_pattern_mode mode = check ? KVS_PATTERN_CHECK : KVS_PATTERN_WRITE;
    if (!EXPECT(kvs_pattern_submit(user->engine, mode, KVS_PATTERN_BYTES, &item, 1, user->stream, &job, &err))) break;
    (void)kvs_pattern_done(job);
    if (EXPECT(kvs_pattern_wait(job, PATIENCE, &result, &err)) && result.wrong) user->wrong++;
    kvs_pattern_free(job);
  }
  free(memory);
}

static void deterministic(struct user *user) {
  struct kvs_error err = {0};
  struct kvs_engine *engine = NULL;
  struct kvs_transfer *transfer = NULL;
  char from[64] = "some bytes", to[64] = "";
  uint64_t src = (uintptr_t)from, dst = (uintptr_t)to, nbytes = sizeof from;
  if (!EXPECT(kvs_engine_open_deterministic(1 + below(user, 1000), &engine, &err))) return;
  if (EXPECT(kvs_swap_batch(engine, &src, &dst, &nbytes, true, 1, NULL, &transfer, &err))) {
    EXPECT(kvs_transfer_wait(transfer, PATIENCE, &err));
    if (strcmp(from, to) != 0) user->wrong++;
    kvs_transfer_unref(transfer);
  }
  kvs_engine_unref(engine);
}

/* What the core holds over a fork is taken in the order in which it is taken elsewhere. */
static void split(struct user *user) {
  int status = 1;
  pid_t child = below(user, 8) ? 0 : fork();
  if (getpid() != all.pid) _exit(0);
  if (child > 0 && (waitpid(child, &status, 0) != child || status)) user->wrong++;
}

/* -- host pools ---------------------------------------------------------------------------------------------------- */

static void host_pools(struct user *user) {
  struct kvs_error err = {0};
  struct kvs_host_pool_info info;
  struct kvs_host_pool *pool = NULL;
  char text[256];
  uint64_t blocks = LEAST + below(user, MOST - LEAST);
  EXPECT(kvs_host_pool_get_info(all.host, &info, &err));
  EXPECT(kvs_host_pool_ready(all.host, below(user, LEAST), &err), KVS_NOT_READY);
  (void)kvs_host_pool_notices(all.host, text, sizeof text);
  (void)kvs_host_pool_grow_waits(all.host);
  if (below(user, 2))
    EXPECT(kvs_host_pool_grow(all.host, blocks, 20 * SHORT, &err), KVS_INVALID, KVS_TIMEOUT, KVS_NOT_READY, KVS_BUSY);
  else
    EXPECT(kvs_host_pool_shrink(all.host, blocks, 20 * SHORT, &err), KVS_INVALID, KVS_TIMEOUT, KVS_NOT_READY, KVS_BUSY);
  EXPECT(kvs_host_pool_wait(all.host, 20 * SHORT, &err), KVS_TIMEOUT);
  EXPECT(kvs_host_pool_drain(all.host, SHORT, &err), KVS_TIMEOUT);
  struct kvs_host_pool_options options = {
      .num_blocks = 1 + below(user, 20), .slot_nbytes = 4096 * (1 + below(user, 20)), .max_blocks = 40};
  if (!EXPECT(kvs_host_pool_open(user->engine, &options, &pool, &err))) return;
  if (below(user, 2)) kvs_host_pool_cancel(pool);
  EXPECT(kvs_host_pool_wait(pool, PATIENCE, &err), KVS_CANCELLED);
  if (below(user, 2)) EXPECT(kvs_host_pool_close(pool, PATIENCE, false, &err));
  if (below(user, 2))
    kvs_host_pool_free(pool, PATIENCE);
  else
    kvs_host_pool_free_later(pool);
}

/* Each thread writes blocks of its own, and all look at all. */
static void words(struct user *user) {
  struct kvs_error err = {0};
  struct kvs_shared_info shared;
  struct kvs_host_pool_info info;
  int64_t own = (int64_t)user->number, any[THREADS];
  bool won = false, published[THREADS];
  for (int i = 0; i < THREADS; i++) any[i] = i;
  const struct kvs_ids mine = {&own, 8, 1}, others = {any, 8, THREADS};
  EXPECT(kvs_shared_get_info(all.words, &shared, &err));
  EXPECT(kvs_host_pool_get_info(all.words, &info, &err));
  if (EXPECT(kvs_shared_claim(all.words, &mine, &won, &err)) && won) {
    memset((void *)(uintptr_t)(info.ptr + user->number * info.stride), (int)user->number, 64);
    EXPECT(kvs_shared_publish(all.words, &mine, &err));
  }
  EXPECT(kvs_shared_published(all.words, &others, published, &err));
  EXPECT(kvs_shared_wait(all.words, &others, SHORT, &err), KVS_TIMEOUT);
  if (below(user, 2)) EXPECT(kvs_shared_retract(all.words, &mine, &err));
  char names[64];
  if (below(user, 16) == 0) (void)kvs_shared_clean(names, sizeof names);
}

/* -- exports ------------------------------------------------------------------------------------------------------- */

static void open_export(struct user *user, const struct kvs_export *made) {
  struct kvs_error err = {0};
  struct kvs_export read;
  struct kvs_mapped *mapped = NULL;
  struct kvs_opening *opening = NULL;
  struct kvs_engine *engine = NULL;
  unsigned char bytes[KVS_EXPORT_NBYTES];
  kvs_export_write(made, bytes);
  if (!EXPECT(kvs_export_read(bytes, sizeof bytes, &read, &err))) return;
  if (EXPECT(kvs_export_device(&read, &engine, &err))) kvs_engine_unref(engine);
  int status = below(user, 2) ? kvs_mapped_open(user->engine, &read, &read.generation, &mapped, &err) : KVS_TIMEOUT;
  if (status == KVS_TIMEOUT && !(status = kvs_opening_start(user->engine, &read, NULL, &opening, &err))) {
    status = kvs_opening_wait(opening, PATIENCE, &mapped, &err);
    kvs_opening_drop(opening);
  }
  if (!expect(user, "open an export", status, &err, ALLOW())) return;
  (void)kvs_mapped_export(mapped);
  if (!kvs_mapped_local(mapped) || !kvs_mapped_alive(mapped) || kvs_mapped_ptr(mapped) != made->address) user->wrong++;
  if (below(user, 2)) EXPECT(kvs_mapped_close(mapped, PATIENCE, &err));
  kvs_mapped_free(mapped);
}

static void exports(struct user *user) {
  struct kvs_error err = {0};
  struct kvs_server *server = NULL;
  struct kvs_export made = {.nbytes = 5000, .generation = below(user, 100)};
  enum kvs_alloc kind = below(user, 2) ? KVS_ALLOC_CHUNKS : KVS_ALLOC_DEVICE;
  if (!EXPECT(kvs_engine_alloc_kind(user->engine, 10000, kind, &made.address, &err))) return;
  if (EXPECT(kvs_export_make(user->engine, &made, &server, &err))) open_export(user, &made);
  if (server) kvs_server_free(server);
  EXPECT(kvs_engine_free(user->engine, made.address, &err), KVS_TIMEOUT);
}

/* -- files --------------------------------------------------------------------------------------------------------- */

static void finish_files(struct user *user, int status, struct kvs_file_transfer *transfer, struct kvs_error *why) {
  struct kvs_error err = {0};
  struct kvs_file_transfer_info info;
  uint32_t positions[4];
  if (!expect(user, "files", status, why, ALLOW(KVS_QUEUE_FULL))) return;
  if (below(user, 4) == 0) (void)kvs_file_transfer_cancel(transfer);
  (void)kvs_file_transfer_done(transfer);
  EXPECT(kvs_file_transfer_wait(transfer, PATIENCE, &err), KVS_CANCELLED, KVS_MISSING, KVS_NO_ROOM);
  (void)kvs_file_transfer_error(transfer, &err);
  kvs_file_transfer_get_info(transfer, &info);
  if (kvs_file_transfer_failed(transfer, positions, 4)) (void)kvs_file_transfer_reason(transfer, positions[0], &err);
  (void)kvs_file_transfer_store(transfer);
  kvs_file_transfer_unref(transfer);
}

static void ask_files(struct user *user, const struct kvs_file_keys *keys) {
  struct kvs_error err = {0};
  struct kvs_file_stats stats;
  struct kvs_file_info info;
  bool found[2];
  uint8_t *list = NULL;
  size_t *ends = NULL, count = 0;
  EXPECT(kvs_file_contains(all.store, keys, found, &err));
  EXPECT(kvs_file_touch(all.store, keys, &err));
  if (EXPECT(kvs_file_pin(all.store, keys, true, &err), KVS_MISSING))
    EXPECT(kvs_file_pin(all.store, keys, false, &err), KVS_INVALID, KVS_MISSING); /* deleted meanwhile */
  EXPECT(kvs_file_get_stats(all.store, &stats, &err));
  EXPECT(kvs_file_refresh(all.store, &err), KVS_UNSUPPORTED); /* another thread refreshes */
  kvs_file_get_info(all.store, &info);
  kvs_file_collect(all.store);
  if (EXPECT(kvs_file_list(all.store, &list, &ends, &count, &err))) free(list), free(ends);
}

static void files(struct user *user) {
  struct kvs_error err = {0};
  struct kvs_file_transfer *transfer = NULL;
  uint8_t names[2];
  const size_t ends[2] = {1, 2};
  names[0] = (uint8_t)below(user, KEYS), names[1] = (uint8_t)((names[0] + 1 + below(user, KEYS - 1)) % KEYS);
  const struct kvs_file_keys keys = {names, ends, 2};
  uint64_t addresses[2] = {user->pool_memory, user->pool_memory + NBYTES};
  int64_t slots[2] = {2, 3};
  struct kvs_file_blocks host = {.addresses = addresses},
                         blocks = {.pools = &user->pool, .npools = 1, .ids = {slots, 8, 2}};
  const struct kvs_file_blocks *which = below(user, 2) ? &blocks : &host;
  struct kvs_file_options options = {.replace = below(user, 2)};
  int status;
  switch (below(user, 5)) {
  case 0:
  case 1:
    status = kvs_file_store_blocks(all.store, &keys, which, &options, &transfer, &err);
    break;
  case 2:
  case 3:
    status = kvs_file_load_blocks(all.store, &keys, which, &options, &transfer, &err);
    break;
  default:
    status = kvs_file_delete(all.store, &keys, &options, &transfer, &err);
  }
  finish_files(user, status, transfer, &err);
  ask_files(user, &keys);
}

/* -- offloading ---------------------------------------------------------------------------------------------------- */

enum { CHUNKS = 16, FACTOR = 2 };
static unsigned char offloaded[2][CHUNKS * FACTOR * NBYTES];

static void offload(struct user *user) {
  struct kvs_error err = {0};
  int64_t gpu[CHUNKS * FACTOR], chunks[CHUNKS], size = 1 + (int64_t)below(user, 4), index = (int64_t)below(user, 5);
  draw_ids(user, gpu, CHUNKS * FACTOR), draw_ids(user, chunks, CHUNKS);
  size_t nchunks = ((size_t)index % FACTOR + (size_t)size - 1) / FACTOR + 1, next = 0, count = 0;
  struct kvs_offload_job job = {.gpu_blocks = {gpu, 8, (size_t)size},
                                .chunks = {chunks, 8, nchunks},
                                .group_sizes = {&size, 8, 1},
                                .block_indices = {&index, 8, 1},
                                .direction = (enum kvs_direction)below(user, 2)};
  struct kvs_transfer *transfers[4];
  if (!EXPECT(kvs_offload_submit(all.map, &job, NULL, &next, transfers, &count, &err), KVS_QUEUE_FULL)) return;
  for (size_t i = 0; i < count; i++) {
    ask(user, transfers[i]);
    if (below(user, 2)) EXPECT(kvs_transfer_wait(transfers[i], PATIENCE, &err));
    kvs_transfer_unref(transfers[i]);
  }
}

/* -- the threads --------------------------------------------------------------------------------------------------- */

static void (*const deeds[])(struct user *) = {
    swap,     swap,      swap,    move,  move,  note,  open_pool,     borrow,  borrow,     look,    look, scrape,
    allocate, free_lent, pattern, files, files, words, deterministic, exports, host_pools, offload, split};
enum { DEEDS = sizeof deeds / sizeof *deeds };

static void *use(void *arg) {
  struct user *user = arg;
  while (kvs_clock_ns() < all.end_ns) deeds[below(user, DEEDS)](user);
  settle(user);
  return NULL;
}

static void user_open(struct user *user, unsigned number, uint64_t seed) {
  struct kvs_error err = {0};
  *user = (struct user){.number = number, .random = seed * 7919 + number * 104729 + 1};
  user->engine = all.engines[number % DEVICES];
  EXPECT(kvs_dev_stream_create(kvs_engine_device(user->engine), 0, &user->stream, &err));
  user->gpu = malloc(4 * BLOCKS * NBYTES);
  user->cpu = user->gpu + BLOCKS * NBYTES;
  user->gpu_model = user->cpu + BLOCKS * NBYTES;
  user->cpu_model = user->gpu_model + BLOCKS * NBYTES;
  for (size_t i = 0; i < 2 * BLOCKS * NBYTES; i++) user->gpu[i] = (unsigned char)below(user, 256);
  memcpy(user->gpu_model, user->gpu, 2 * BLOCKS * NBYTES);
  EXPECT(kvs_engine_alloc(all.engines[0], 4 * NBYTES, false, &user->pool_memory, &err));
  struct kvs_pool_layout layout = {.ptr = user->pool_memory, .num_blocks = 4, .block_nbytes = NBYTES};
  EXPECT(kvs_pool_open(all.engines[0], &layout, &user->pool, &err));
  memset((void *)(uintptr_t)user->pool_memory, 1, 4 * NBYTES);
}

static void all_open(const char *folder) {
  struct kvs_error err = {0};
  char name[64];
  for (int i = 0; i < DEVICES; i++) {
    snprintf(name, sizeof name, "host:%d", i);
    CHECK(!kvs_engine_open(name, &all.engines[i], &err), "%s", err.message);
  }
  CHECK(!kvs_engine_open("host:2", &all.lender, &err), "%s", err.message);
  for (int i = 0; i < 3; i++) { /* the last one is of the other device */
    all.memory[i] = calloc(POOL_BLOCKS, NBYTES);
    struct kvs_pool_layout layout = {
        .ptr = (uintptr_t)all.memory[i], .num_blocks = POOL_BLOCKS, .block_nbytes = NBYTES};
    CHECK(!kvs_pool_open(all.engines[0], &layout, &all.pools[i], &err), "%s", err.message);
  }
  struct kvs_host_pool_options options = {.num_blocks = LEAST, .slot_nbytes = 3 * 4096, .max_blocks = MOST};
  CHECK(!kvs_host_pool_open(all.engines[0], &options, &all.host, &err), "%s", err.message);
  options = (struct kvs_host_pool_options){.num_blocks = THREADS, .slot_nbytes = 4096};
  snprintf(name, sizeof name, "test-threads-%d", (int)getpid());
  struct kvs_shared_options shared = {.name = name};
  CHECK(!kvs_shared_open(all.engines[0], &options, &shared, &all.words, &err), "%s", err.message);
  CHECK(!kvs_host_pool_wait(all.words, PATIENCE, &err), "%s", err.message);
  struct kvs_file_settings settings = {
      .directory = folder, .layout = "{}", .block_nbytes = NBYTES, .capacity = 1 << 18, .device = all.engines[0]};
  CHECK(!kvs_file_open(&settings, &all.store, &err), "%s", err.message);
  const struct kvs_offload_tensor tensor = {(uintptr_t)offloaded[0], CHUNKS * FACTOR, NBYTES, NBYTES,
                                            (uintptr_t)offloaded[1], FACTOR * NBYTES, NBYTES, NBYTES};
  const struct kvs_offload_part part = {
      .nbytes = NBYTES, .count = 1, .gpu_pitch = NBYTES, .cpu_pitch = NBYTES, .writers = 1};
  struct kvs_offload_layout layout = {.tensors = &tensor,
                                      .ntensors = 1,
                                      .parts = &part,
                                      .nparts = 1,
                                      .ngroups = 1,
                                      .chunks = CHUNKS,
                                      .factor = FACTOR,
                                      .remember_failures = true};
  CHECK(!kvs_offload_open(all.engines[0], &layout, &all.map, &err), "%s", err.message);
  CHECK(kvs_offload_most(all.map) <= 4);
}

static void all_close(struct user *users) {
  struct kvs_error err = {0};
  kvs_offload_close(all.map);
  CHECK(!kvs_file_close(all.store, PATIENCE, &err), "%s", err.message);
  kvs_file_unref(all.store);
  for (int i = 0; i < THREADS; i++) {
    if (all.last[i]) kvs_transfer_unref(all.last[i]);
    kvs_pool_unref(users[i].pool);
    CHECK(!kvs_engine_free(all.engines[0], users[i].pool_memory, &err), "%s", err.message);
  }
  lend(NULL);
  kvs_host_pool_free(all.host, PATIENCE);
  kvs_host_pool_free(all.words, PATIENCE);
  for (int i = 0; i < 3; i++) kvs_pool_unref(all.pools[i]);
  for (int i = 0; i < DEVICES; i++) {
    CHECK(!kvs_engine_synchronize(all.engines[i], PATIENCE, &err), "%s", err.message);
    kvs_engine_collect(all.engines[i]);
  }
  for (int i = 0; i < THREADS; i++) {
    CHECK(users[i].owners == 0, "thread %d: %u owners are held", i, users[i].owners);
    free(users[i].gpu);
  }
  kvs_shutdown(PATIENCE);
  for (int i = 0; i < DEVICES; i++) kvs_engine_unref(all.engines[i]);
  kvs_engine_unref(all.lender);
  for (int i = 0; i < 3; i++) free(all.memory[i]);
}

int main(int argc, char **argv) {
  static struct user users[THREADS];
  pthread_t threads[THREADS];
  char folder[] = "/tmp/kvswap-test-XXXXXX", command[64];
  double seconds = argc > 1 ? atof(argv[1]) : 3;
  uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1, calls = 0;
  CHECK(mkdtemp(folder) != NULL);
  pthread_mutex_init(&all.lock, NULL);
  all.pid = getpid();
  all_open(folder);
  for (unsigned i = 0; i < THREADS; i++) user_open(&users[i], i, seed);
  all.end_ns = kvs_clock_ns() + (uint64_t)(seconds * 1e9);
  for (unsigned i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, use, &users[i]));
  for (unsigned i = 0; i < THREADS; i++) {
    CHECK(!pthread_join(threads[i], NULL));
    CHECK(users[i].wrong == 0, "thread %u: %u wrong", i, (unsigned)users[i].wrong);
    calls += users[i].calls;
  }
  all_close(users);
  snprintf(command, sizeof command, "rm -r %s", folder);
  CHECK(system(command) == 0);
  printf("seed %d, %d calls\n", (int)seed, (int)calls);
  return check_close();
}
