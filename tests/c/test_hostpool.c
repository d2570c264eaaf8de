/* Host pools from C: limits read from a tree of files, how chunks are cut, random growing and shrinking against a
 * model, and shared pools between threads. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/owner.h"
#include "check.h"
#include "hostpool/budget.h"
#include "hostpool/hostpool.h"
#include "hostpool/map.h"

#define OK(call)                                                                                                       \
  do {                                                                                                                 \
    struct kvs_error err = {0};                                                                                        \
    int status_of_call = (call);                                                                                       \
    CHECK(status_of_call == KVS_OK, "%s", err.message);                                                                \
  } while (0)

#define FAILS(call, wanted, text)                                                                                      \
  do {                                                                                                                 \
    struct kvs_error err = {0};                                                                                        \
    int status_of_call = (call);                                                                                       \
    CHECK(status_of_call == (wanted) && strstr(err.message, text), "%d: %s", status_of_call, err.message);             \
  } while (0)

static struct kvs_engine *engine;

/* -- limits ---------------------------------------------------------------------------------------------------- */

static char root[] = "/tmp/kvs-test-hostpool-XXXXXX";

/* A file below the root, with the folders that lead to it. */
static void put(const char *path, const char *text) {
  char full[512];
  snprintf(full, sizeof full, "%s%s", root, path);
  for (char *at = full + strlen(root) + 1; (at = strchr(at, '/')) != NULL; *at++ = '/') {
    *at = '\0';
    CHECK(mkdir(full, 0700) == 0 || errno == EEXIST, "%s", full);
  }
  FILE *file = fopen(full, "w");
  CHECK(file != NULL, "%s", full);
  if (!file) return;
  fputs(text, file);
  fclose(file);
}

static void remove_tree(void) {
  char command[600];
  snprintf(command, sizeof command, "rm -rf '%s'", root);
  CHECK(system(command) == 0, "%s", command);
}

static void test_budget(void) {
  struct kvs_budget budget;
  CHECK(mkdtemp(root) != NULL, "%s", root);
  kvs_budget_read(root, &budget);
  CHECK(budget.available == UINT64_MAX && budget.group_max == UINT64_MAX, "nothing can be read: nothing limits");
  OK(kvs_budget_check(&budget, UINT64_C(1) << 45, 0, &err));

  put("/proc/meminfo", "MemTotal:       65536 kB\nMemFree:  1 kB\nMemAvailable:   32768 kB\n");
  kvs_budget_read(root, &budget);
  CHECK(budget.total == 65536 * 1024 && budget.available == 32768 * 1024, "meminfo");
  OK(kvs_budget_check(&budget, 32768 * 1024, 0, &err));
  FAILS(kvs_budget_check(&budget, 32768 * 1024 + 1, 0, &err), KVS_NOMEM, "machine has 32.0 MiB available");
  FAILS(kvs_budget_check(&budget, 32768 * 1024, 1, &err), KVS_NOMEM, "keeps free 1 B");
  OK(kvs_budget_check(&budget, 32768 * 1024 + 5, -5, &err));
  FAILS(kvs_budget_check(&budget, 32768 * 1024 + 6, -5, &err), KVS_NOMEM, "expects another 5 B");
  OK(kvs_budget_check(&budget, UINT64_MAX, INT64_MIN, &err) == KVS_NOMEM ? KVS_OK : KVS_INTERNAL);

  /* Version 2: the tightest of the group and those above counts; what the page cache holds does not. */
  put("/proc/self/cgroup", "0::/kubepods/pod1/box\n");
  put("/proc/self/mountinfo", "31 23 0:28 / /sys rw - sysfs sysfs rw\n32 31 0:29 / /sys/fs/cgroup rw,nosuid shared:4 - "
                              "cgroup2 cgroup2 rw,nsdelegate\n");
  put("/sys/fs/cgroup/kubepods/pod1/box/memory.max", "max\n");
  put("/sys/fs/cgroup/kubepods/pod1/box/memory.current", "5\n");
  put("/sys/fs/cgroup/kubepods/pod1/memory.max", "20000000\n");
  put("/sys/fs/cgroup/kubepods/pod1/memory.current", "15000000\n");
  put("/sys/fs/cgroup/kubepods/pod1/memory.stat", "anon 1\nfile_dirty 1000\ninactive_file 6000000\nactive_file 1000\n");
  put("/sys/fs/cgroup/kubepods/memory.max", "30000000\n");
  put("/sys/fs/cgroup/kubepods/memory.current", "15000000\n");
  kvs_budget_read(root, &budget);
  CHECK(budget.group_max == 20000000 && budget.group_used == 9000000, "%d %d", (int)budget.group_max,
        (int)budget.group_used);
  CHECK(strstr(budget.group, "/kubepods/pod1") && strcmp(budget.group_knob, "memory.max") == 0, "%s", budget.group);
  OK(kvs_budget_check(&budget, 11000000, 0, &err));
  FAILS(kvs_budget_check(&budget, 11000001, 0, &err), KVS_NOMEM, "Raise memory.max there");
  put("/sys/fs/cgroup/kubepods/memory.current", "29000000\n");
  kvs_budget_read(root, &budget);
  CHECK(budget.group_max == 30000000, "the one above leaves less");

  /* Version 1 in a container, whose path begins above what is mounted. */
  put("/proc/self/cgroup", "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n");
  put("/proc/self/mountinfo", "40 31 0:35 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n41 31 0:35 / "
                              "/x rw - cgroup c rw,cpu\n");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "8000000\n");
  put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "3000000\n");
  put("/sys/fs/cgroup/memory/memory.stat", "cache 9\ntotal_inactive_file 400000\ntotal_active_file 600000\n");
  kvs_budget_read(root, &budget);
  CHECK(budget.group_max == 8000000 && budget.group_used == 2000000, "%d", (int)budget.group_max);
  FAILS(kvs_budget_check(&budget, 6000001, 0, &err), KVS_NOMEM, "memory.limit_in_bytes");
  put("/proc/self/mountinfo", "40 31 0:35 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  kvs_budget_read(root, &budget);
  CHECK(budget.group_max == 8000000, "a path that is not there is cut from the left");
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  kvs_budget_read(root, &budget);
  CHECK(budget.group_max == UINT64_MAX, "what version 1 writes for no limit");

  put("/sys/devices/system/node/node3/meminfo",
      "Node 3 MemTotal: 9 kB\nNode 3 MemFree:   100 kB\nNode 3 "
      "Inactive(file):  20 kB\nNode 3 Active(file): 8 kB\nNode 3 Dirty: 3 kB\n");
  CHECK(kvs_budget_node(root, 3) == 125 * 1024 && kvs_budget_node(root, 4) == UINT64_MAX, "node");
  remove_tree();
}

static void test_lists(void) {
  uint64_t bits[2];
  CHECK(kvs_budget_list("0-3,8\n", bits, 2) == 5 && bits[0] == 0x10f && bits[1] == 0, "0-3,8");
  CHECK(kvs_budget_list("63-64", bits, 2) == 2 && bits[0] == UINT64_C(1) << 63 && bits[1] == 1, "63-64");
  CHECK(kvs_budget_list("", bits, 2) == 0 && kvs_budget_list("\n", bits, 2) == 0, "nothing");
  CHECK(kvs_budget_list("5,200", bits, 2) == 1 && bits[0] == 32, "beyond the words");
}

/* -- pages ----------------------------------------------------------------------------------------------------- */

static void test_touching(void) {
  const uint64_t nbytes = 64 * 4096;
  uint64_t base = 0;
  OK(kvs_pages_reserve(nbytes, 1 << 22, &base, &err));
  CHECK(base % (1 << 22) == 0, "aligned");
  unsigned char *bytes = (unsigned char *)(uintptr_t)base, resident[64] = {0};
  bytes[5] = 7;
  kvs_pages_touch(base, nbytes);
  CHECK(mincore(bytes, nbytes, resident) == 0, "mincore");
  for (int i = 0; i < 64; i++) CHECK(resident[i] & 1, "page %d", i);
  OK(kvs_pages_populate(base, nbytes, &err));
  CHECK(bytes[5] == 7 && bytes[4096] == 0, "contents stay");
  OK(kvs_pages_clear(base, nbytes, &err));
  CHECK(bytes[5] == 0, "given back");
  kvs_pages_unmap(base, nbytes);
  FAILS(kvs_pages_reserve(UINT64_MAX - 4096, 0, &base, &err), KVS_NOMEM, "no address space");
}

/* -- pools ----------------------------------------------------------------------------------------------------- */

static unsigned char byte_of(uint64_t layer, uint64_t block) {
  return (unsigned char)(1 + (layer * 31 + block * 7) % 250);
}

static unsigned char *place_of(const struct kvs_host_pool_info *info, uint64_t layer, uint64_t block) {
  return (unsigned char *)(uintptr_t)(info->ptr + layer * info->layer_pitch + block * info->stride);
}

/* Chunks hold all blocks, none twice; seams lie between units and between pages. */
static void check_chunks(struct kvs_host_pool *pool) {
  uint64_t covered = 0, wrong = 0;
  for (size_t i = 0; i < pool->nchunks; i++) {
    const struct kvs_host_chunk *chunk = &pool->chunks[i], *next = chunk + 1;
    uint64_t extent = (chunk->base - pool->base) / (pool->extent_pitch ? pool->extent_pitch : 1);
    uint64_t within = chunk->base - pool->base - (pool->extents > 1 ? extent * pool->extent_pitch : 0);
    wrong += chunk->base % 4096 != 0 || chunk->nbytes % 4096 != 0 || within % pool->unit != 0;
    wrong += !chunk->ready || !chunk->registered || chunk->left != 0;
    if (i + 1 < pool->nchunks) wrong += chunk->base + chunk->nbytes > next->base;
    covered += chunk->nbytes;
  }
  CHECK(wrong == 0, "%d wrong chunks", (int)wrong);
  CHECK(covered == pool->extents * kvs_host_pool_used(pool, pool->num_blocks) && covered == pool->total, "covered");
  CHECK(pool->populated == pool->total && pool->registered == pool->total, "populated and registered");
}

static void check_blocks(struct kvs_host_pool *pool, uint64_t blocks, bool write) {
  struct kvs_host_pool_info info = {0};
  uint64_t wrong = 0;
  OK(kvs_host_pool_get_info(pool, &info, &err));
  for (uint64_t layer = 0; layer < info.layers; layer++)
    for (uint64_t block = 0; block < blocks; block++) {
      unsigned char *at = place_of(&info, layer, block), value = byte_of(layer, block);
      if (write) memset(at, value, info.layer_nbytes);
      wrong += at[0] != value || at[info.layer_nbytes - 1] != value;
    }
  CHECK(wrong == 0, "%d of %d blocks are wrong", (int)wrong, (int)blocks);
}

static void test_random_sizes(void) {
  static const uint64_t sizes[] = {4096, 1000, 12288, 7, 513, 65536};
  uint64_t random = 99;
  for (int round = 0; round < 40; round++) {
    uint64_t layers = 1 + check_below(&random, 4), most = 1 + check_below(&random, 300);
    struct kvs_host_pool_options options = {.num_blocks = 1 + check_below(&random, most),
                                            .slot_nbytes = layers * sizes[check_below(&random, 6)],
                                            .layers = layers,
                                            .layer_first = check_below(&random, 2),
                                            .max_blocks = most,
                                            .threads = 1 + (unsigned)check_below(&random, 3),
                                            .chunk_nbytes = 1 + check_below(&random, 200000)};
    struct kvs_host_pool *pool = NULL;
    OK(kvs_host_pool_open(engine, &options, &pool, &err));
    if (!pool) return;
    OK(kvs_host_pool_wait(pool, -1, &err));
    uint64_t blocks = options.num_blocks;
    check_chunks(pool);
    check_blocks(pool, blocks, true);
    for (int step = 0; step < 6; step++) {
      uint64_t wanted = 1 + check_below(&random, most), kept = wanted < blocks ? wanted : blocks;
      if (wanted == blocks) continue;
      if (wanted > blocks) OK(kvs_host_pool_grow(pool, wanted, -1, &err));
      if (wanted < blocks) OK(kvs_host_pool_shrink(pool, wanted, -1, &err));
      OK(kvs_host_pool_wait(pool, -1, &err));
      blocks = wanted;
      check_chunks(pool);
      check_blocks(pool, kept, false);
      check_blocks(pool, blocks, true);
      FAILS(kvs_host_pool_ready(pool, blocks, &err), KVS_RANGE, "the pool has");
      OK(kvs_host_pool_ready(pool, blocks - 1, &err));
    }
    OK(kvs_host_pool_close(pool, -1, false, &err));
    OK(kvs_host_pool_close(pool, -1, false, &err));
    FAILS(kvs_host_pool_wait(pool, -1, &err), KVS_CLOSED, "closed");
    kvs_host_pool_free(pool, 0);
  }
}

static void test_cancel(void) {
  struct kvs_host_pool_options options = {.num_blocks = 256, .slot_nbytes = 1 << 20, .chunk_nbytes = 1 << 20};
  for (int i = 0; i < 20; i++) {
    struct kvs_host_pool *pool = NULL;
    OK(kvs_host_pool_open(engine, &options, &pool, &err));
    if (!pool) return;
    if (i % 2) kvs_host_pool_cancel(pool);
    kvs_host_pool_free(pool, -1);
  }
}

static void test_pieces(void) {
  uint64_t ptr = 0;
  OK(kvs_host_alloc(engine, 5000, &ptr, &err));
  OK(kvs_host_free(ptr, &err));
  FAILS(kvs_host_free(ptr, &err), KVS_INVALID, "given back already");
  static unsigned char bytes[8 * 4096] __attribute__((aligned(4096)));
  uint64_t where = (uint64_t)(uintptr_t)bytes;
  OK(kvs_host_register(engine, where, sizeof bytes, &err));
  FAILS(kvs_host_free(where, &err), KVS_INVALID, "host_alloc");
  OK(kvs_host_unregister(where, &err));
  FAILS(kvs_host_unregister(where, &err), KVS_INVALID, "host_register");
}

/* -- shared pools ---------------------------------------------------------------------------------------------- */

enum { ROUNDS = 20, THREADS = 4 };
static struct kvs_host_pool *shared;

/* Returns how often something failed: the counters of check.h are for one thread. */
static void *pass_on(void *arg) {
  int64_t block = (int64_t)(intptr_t)arg;
  struct kvs_ids mine = {&block, 8, 1};
  struct kvs_host_pool_info info;
  struct kvs_error err;
  intptr_t failed = kvs_host_pool_get_info(shared, &info, &err) != KVS_OK;
  for (int round = 0; !failed && round < ROUNDS; round++, block += THREADS) {
    int64_t before = block - 1;
    struct kvs_ids other = {&before, 8, 1};
    if (before >= 0) failed += kvs_shared_wait(shared, &other, INT64_C(60000000000), &err) != KVS_OK;
    unsigned char value = before < 0 ? 0 : *place_of(&info, 0, (uint64_t)before);
    memset(place_of(&info, 0, (uint64_t)block), value + 1, info.slot_nbytes);
    failed += kvs_shared_publish(shared, &mine, &err) != KVS_OK;
  }
  return (void *)failed;
}

/* Legs of a race through blocks: each is written after the one before it was read. */
static void test_shared(void) {
  char name[64];
  pthread_t threads[THREADS];
  struct kvs_host_pool_options options = {.num_blocks = THREADS * ROUNDS, .slot_nbytes = 4096};
  struct kvs_shared_info about = {0};
  snprintf(name, sizeof name, "test-c-%d", (int)getpid());
  struct kvs_shared_options named = {.name = name};
  OK(kvs_shared_open(engine, &options, &named, &shared, &err));
  if (!shared) return;
  OK(kvs_host_pool_wait(shared, -1, &err));
  OK(kvs_shared_get_info(shared, &about, &err));
  CHECK(about.owner && about.owner_alive && about.owner_pid == getpid(), "owner");
  for (intptr_t i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, pass_on, (void *)i), "thread");
  for (int i = 0; i < THREADS; i++) {
    void *failed = NULL;
    CHECK(pthread_join(threads[i], &failed) == 0 && !failed, "thread %d", i);
  }
  struct kvs_host_pool_info info = {0};
  OK(kvs_host_pool_get_info(shared, &info, &err));
  CHECK(*place_of(&info, 0, THREADS * ROUNDS - 1) == THREADS * ROUNDS, "the last one counted all");
  named.mode = KVS_SHARED_JOIN;
  named.generation = about.generation + 1;
  struct kvs_host_pool *joined = NULL;
  FAILS(kvs_shared_open(engine, &options, &named, &joined, &err), KVS_INVALID, "generation");
  kvs_host_pool_free(shared, -1);
  CHECK(access(about.path, F_OK) != 0, "its name is gone");
  FAILS(kvs_shared_open(engine, &options, &named, &joined, &err), KVS_INVALID, "there is no shared pool");
}

static void test_alive(void) {
  pid_t child = fork();
  if (child == 0) _exit(0);
  while (kvs_process_alive(child, 0)) usleep(1000); /* a zombie does not count */
  CHECK(waitpid(child, NULL, 0) == child && !kvs_process_alive(child, 0), "reaped");
  CHECK(kvs_process_alive(getpid(), 0) && !kvs_process_alive(getpid(), 1), "born at another time");
  CHECK(!kvs_process_alive(0, 0) && !kvs_process_alive(-1, 0), "no process");
}

/* A process that may not be sent signals lives all the same, also where there is no /proc. Run in a child: the root of
 * the file system, if it may be changed, and the user are then others. */
static int look_as_another_user(const char *empty, pid_t gone) {
  const pid_t parent = getppid();
  if (chroot(empty) == 0 && (!kvs_process_alive(parent, 0) || kvs_process_alive(gone, 0))) return 1;
  if (geteuid() == 0 && (setgid(65534) || setuid(65534))) return 2;
  if (kill(1, 0) == 0 || errno != EPERM) return 0; /* the first process is of this user, too */
  return kvs_process_alive(1, 0) && !kvs_process_alive(gone, 0) ? 0 : 3;
}

static void test_alive_of_another_user(void) {
  char empty[] = "/tmp/kvswap-test-XXXXXX";
  int status = -1;
  pid_t gone = fork();
  if (gone == 0) _exit(0);
  CHECK(waitpid(gone, NULL, 0) == gone && mkdtemp(empty), "%s", empty);
  pid_t child = fork();
  if (child == 0) _exit(look_as_another_user(empty, gone));
  CHECK(waitpid(child, &status, 0) == child && status == 0, "status %d", status >> 8);
  CHECK(rmdir(empty) == 0, "%s", empty);
}

int main(void) {
  struct kvs_error err = {0};
  if (kvs_engine_open("host:0", &engine, &err)) {
    printf("open: %s\n", err.message);
    return 1;
  }
  test_budget();
  test_lists();
  test_touching();
  test_random_sizes();
  test_cancel();
  test_pieces();
  test_shared();
  test_alive();
  test_alive_of_another_user();
  kvs_shutdown(INT64_C(1000000000));
  kvs_engine_unref(engine);
  return check_close();
}
