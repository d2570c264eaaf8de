/* Two members of a group in one process, whose jobs come from several threads while their link is lost and made again
 * and while they close (run under ThreadSanitizer too). */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "kvswap.h"
#include "share/share.h"

enum { BLOCKS = 1600, NBYTES = 3000, PIECE = 4 * NBYTES, THREADS = 3, ROUNDS = 40, PART = BLOCKS / (2 * THREADS + 2) };
static const int64_t SECONDS = 1000000000;

/* A piece of a store that came late is written twice to the host, with the same bytes: each is compared here. */
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void) { return "race:run_bytes\n"; }

static unsigned char *host;
static struct member {
  struct kvs_engine *engine;
  struct kvs_pool *host_pool, *gpu_pool;
  unsigned char *gpu;
  struct kvs_share *share;
} members[2];
static int sockets[2]; /* copies of the link's */
static atomic_bool over;
static atomic_uint wrong;

/* CHECK() counts without a lock. */
#define EXPECT(condition, ...)                                                                                         \
  do {                                                                                                                 \
    if (condition) break;                                                                                              \
    atomic_fetch_add(&wrong, 1);                                                                                       \
    fprintf(stderr, "not true: %s: ", #condition);                                                                     \
    fprintf(stderr, __VA_ARGS__);                                                                                      \
    fprintf(stderr, "\n");                                                                                             \
  } while (0)

/* -- the two members ----------------------------------------------------------------------------------------------- */

static void open_member(struct member *m, const char *name) {
  struct kvs_error err = {0};
  uint64_t gpu = 0;
  CHECK(!kvs_engine_open(name, &m->engine, &err), "%s", err.message);
  CHECK(!kvs_engine_register(m->engine, (uintptr_t)host, (size_t)BLOCKS * NBYTES, &err), "%s", err.message);
  CHECK(!kvs_engine_alloc(m->engine, (size_t)BLOCKS * NBYTES, false, &gpu, &err), "%s", err.message);
  m->gpu = (unsigned char *)(uintptr_t)gpu;
  struct kvs_pool_layout layout = {.ptr = (uintptr_t)host, .num_blocks = BLOCKS, .block_nbytes = NBYTES};
  CHECK(!kvs_pool_open(m->engine, &layout, &m->host_pool, &err), "%s", err.message);
  layout.ptr = gpu;
  CHECK(!kvs_pool_open(m->engine, &layout, &m->gpu_pool, &err), "%s", err.message);
  const struct kvs_share_options options = {.host_pools = &m->host_pool,
                                            .gpu_pools = &m->gpu_pool,
                                            .npools = 1,
                                            .host = (uintptr_t)host,
                                            .block_nbytes = NBYTES,
                                            .num_blocks = BLOCKS,
                                            .piece_nbytes = PIECE,
                                            .slots = 4,
                                            .share = 1,
                                            .stall_ns = 20 * 1000 * 1000,
                                            .wait_ns = 2 * 1000 * 1000,
                                            .store_ns = (uint64_t)SECONDS};
  CHECK(!kvs_share_open(&options, &m->share, &err), "%s", err.message);
}

static void close_member(struct member *m) {
  struct kvs_error err;
  CHECK(!kvs_share_close(m->share, 60 * SECONDS, &err), "%s", err.message);
  kvs_share_unref(m->share);
  kvs_pool_unref(m->host_pool);
  kvs_pool_unref(m->gpu_pool);
}

static int pidfd_of_this(void) { return (int)syscall(SYS_pidfd_open, getpid(), 0); }

/* False: the link of before has not ended on both sides. */
static bool link_both(void) {
  struct kvs_error err;
  int pair[2], slots[2] = {-1, -1}, status = 0;
  for (unsigned i = 0; i < 2 && !status; i++) status = kvs_share_meet(members[i].share, 1 - i, &slots[i], &err);
  bool made = !status && !socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair);
  EXPECT(made || status == KVS_BUSY, "%s", err.message);
  for (unsigned i = 0; i < 2 && made; i++) {
    sockets[i] = dup(pair[i]);
    status = kvs_share_link(members[i].share, 1 - i, pair[i], pidfd_of_this(), slots[1 - i], 4, true, &err);
    EXPECT(!status, "%s", err.message);
  }
  for (unsigned i = 0; i < 2; i++) {
    if (slots[i] >= 0) close(slots[i]);
    if (!made) kvs_share_unmeet(members[i].share, 1 - i);
  }
  return made;
}

/* A message of a wrong form ends a link on one side; both go on. */
static void *lose_links(void *arg) {
  uint64_t random = 77;
  (void)arg;
  while (!atomic_load(&over)) {
    usleep((useconds_t)check_below(&random, 30000));
    EXPECT(send(sockets[check_below(&random, 2)], "junk", 4, MSG_NOSIGNAL) == 4, "not sent");
    for (int i = 0; i < 2; i++) close(sockets[i]);
    while (!link_both()) usleep(100);
  }
  for (int i = 0; i < 2; i++) close(sockets[i]);
  return NULL;
}

/* -- jobs ---------------------------------------------------------------------------------------------------------- */

/* A thread, and its blocks: no other has them, but that of the other member with which it shares its jobs. */
struct mover {
  pthread_t thread;
  struct member *member;
  unsigned first, rank;
  pthread_barrier_t *together; /* NULL: its jobs are not shared */
};

static void fill(unsigned char *at, uint64_t *random) {
  for (int i = 0; i < NBYTES; i += 8) memset(at + i, (int)check_random(random), 8);
}

static void wait_together(const struct mover *m) {
  if (m->together) (void)pthread_barrier_wait(m->together);
}

/* Blocks go to others in reverse order. What a shared store names as failed was stored by no member. */
static void check_job(const struct mover *m, struct kvs_share_job *job, enum kvs_direction direction, size_t count) {
  uint32_t failed[PART];
  struct kvs_error err;
  struct kvs_share_job_info info;
  int status = kvs_share_job_wait(job, 60 * SECONDS, &err);
  size_t nfailed = kvs_share_job_failed(job, failed, PART);
  kvs_share_job_get_info(job, &info);
  EXPECT(info.num_blocks == count && info.state == (status ? KVS_STATE_FAILED : KVS_STATE_DONE), "%zu", count);
  EXPECT(!status || (m->together && direction == KVS_D2H), "%s", err.message);
  for (size_t i = 0, next = 0; i < count; i++) {
    if (next < nfailed && failed[next] == i) {
      next++;
      continue;
    }
    const unsigned char *gpu = m->member->gpu + (m->first + count - 1 - i) * NBYTES;
    EXPECT(!memcmp(host + (m->first + i) * NBYTES, gpu, NBYTES), "block %zu of %zu", i, count);
  }
}

static void move_blocks(struct mover *m, unsigned round) {
  int64_t host_ids[PART], gpu_ids[PART];
  struct kvs_share_job *job = NULL;
  struct kvs_error err = {0};
  enum kvs_direction direction = round % 2;
  const struct kvs_share_name named = {.key = 1 + round, .ranks = 3, .rank = m->rank};
  uint64_t random = 1 + round + m->first; /* the same for members that share the job */
  const size_t count = check_below(&random, PART + 1);
  for (size_t i = 0; i < count; i++) {
    host_ids[i] = (int64_t)(m->first + i);
    gpu_ids[i] = (int64_t)(m->first + count - 1 - i);
    unsigned char *from = direction == KVS_H2D ? host : m->member->gpu;
    if (direction == KVS_D2H || !m->rank || !m->together) fill(from + (m->first + i) * NBYTES, &random);
  }
  const struct kvs_ids h = {host_ids, 8, count}, g = {gpu_ids, 8, count};
  wait_together(m);
  int status = kvs_share_submit(m->member->share, direction, &h, &g, m->together ? &named : NULL, NULL, &job, &err);
  EXPECT(!status || status == KVS_QUEUE_FULL, "%s", err.message);
  if (!status) check_job(m, job, direction, count);
  if (!status) kvs_share_job_unref(job);
  wait_together(m);
}

static void *work(void *arg) {
  struct mover *m = arg;
  for (unsigned round = 0; round < ROUNDS; round++) move_blocks(m, round);
  return NULL;
}

static uint64_t brought(const struct kvs_share_stats *stats) {
  return stats->brought_by_others[KVS_H2D] + stats->brought_by_others[KVS_D2H];
}

static void test_members(void) {
  struct mover movers[2 * THREADS + 2] = {{0}};
  pthread_barrier_t together;
  struct kvs_share_stats stats;
  pthread_t loser;
  const unsigned all = sizeof movers / sizeof movers[0];
  CHECK(link_both());
  CHECK(!pthread_barrier_init(&together, NULL, 2) && !pthread_create(&loser, NULL, lose_links, NULL));
  for (unsigned i = 0; i < all; i++) {
    bool shared = i >= 2 * THREADS;
    movers[i] = (struct mover){.member = &members[i % 2], .rank = i % 2};
    movers[i].first = (shared ? 2 * THREADS : i) * PART;
    movers[i].together = shared ? &together : NULL;
    CHECK(!pthread_create(&movers[i].thread, NULL, work, &movers[i]));
  }
  for (unsigned i = 0; i < all; i++) pthread_join(movers[i].thread, NULL);
  atomic_store(&over, true);
  pthread_join(loser, NULL);
  pthread_barrier_destroy(&together);
  kvs_share_get_stats(members[0].share, &stats);
  CHECK(stats.links_lost);
  for (unsigned round = 0; round < 10 * ROUNDS && !brought(&stats); round++) { /* a busy machine's links are late */
    move_blocks(&movers[0], ROUNDS + round);
    kvs_share_get_stats(members[0].share, &stats);
  }
  CHECK(brought(&stats));
}

/* -- roles --------------------------------------------------------------------------------------------------------- */

enum {
  CELL = 1000, /* the bytes of a row of NBYTES that are the owner's */
  OWNED = 300, /* its blocks */
  PARTS = 2,   /* of a block: row OWNED + i has the second part of block i */
  CELLS = PARTS * OWNED,
};

/* The owner of rows, whose stores may write its cells only, and a lender that has no blocks. */
static unsigned char *rows, *blocks;

static void open_roles(struct kvs_share *shares[2], struct kvs_pool *cells[2][PARTS], struct kvs_pool *gpu[PARTS]) {
  struct kvs_error err = {0};
  uint64_t ptr;
  rows = calloc(CELLS, NBYTES);
  CHECK(!kvs_engine_alloc(members[0].engine, (size_t)CELLS * CELL, false, &ptr, &err), "%s", err.message);
  blocks = (unsigned char *)(uintptr_t)ptr;
  for (int i = 0; i < 2; i++)
    CHECK(!kvs_engine_register(members[i].engine, (uintptr_t)rows, (size_t)CELLS * NBYTES, &err), "%s", err.message);
  for (int i = 0; i < 2; i++) {
    for (uint64_t part = 0; part < PARTS; part++) {
      struct kvs_pool_layout layout = {.ptr = (uintptr_t)rows + CELL + part * OWNED * NBYTES,
                                       .num_blocks = OWNED,
                                       .block_nbytes = CELL,
                                       .stride = NBYTES};
      CHECK(!kvs_pool_open(members[i].engine, &layout, &cells[i][part], &err), "%s", err.message);
      layout.ptr = ptr + part * OWNED * CELL;
      layout.stride = CELL;
      if (i == 0) CHECK(!kvs_pool_open(members[0].engine, &layout, &gpu[part], &err), "%s", err.message);
    }
    const struct kvs_share_options options = {.host_pools = cells[i],
                                              .gpu_pools = i ? NULL : gpu,
                                              .npools = PARTS,
                                              .host = (uintptr_t)rows + CELL,
                                              .block_nbytes = PARTS * CELL,
                                              .stride = NBYTES,
                                              .parts = PARTS,
                                              .part_stride = (uint64_t)OWNED * NBYTES,
                                              .takes_only = i == 0,
                                              .num_blocks = OWNED,
                                              .piece_nbytes = (uint64_t)4 * PARTS * CELL,
                                              .slots = 4,
                                              .share = 10,
                                              .stall_ns = (uint64_t)SECONDS,
                                              .store_ns = (uint64_t)SECONDS};
    CHECK(!kvs_share_open(&options, &shares[i], &err), "%s", err.message);
  }
}

static void link_roles(struct kvs_share *shares[2]) {
  struct kvs_error err = {0};
  struct kvs_share_form form;
  int pair[2], slots, none;
  CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
  CHECK(!kvs_share_meet(shares[0], 1, &slots, &err) && slots >= 0, "%s", err.message);
  CHECK(!kvs_share_meet(shares[1], 0, &none, &err) && none == -1, "%s", err.message);
  kvs_share_get_form(shares[1], &form);
  CHECK(form.slots == 0);
  CHECK(!kvs_share_link(shares[0], 1, pair[0], pidfd_of_this(), -1, form.slots, true, &err), "%s", err.message);
  CHECK(!kvs_share_link(shares[1], 0, pair[1], pidfd_of_this(), slots, 4, false, &err), "%s", err.message);
  close(slots);
}

static void test_roles(void) {
  struct kvs_share *shares[2];
  struct kvs_pool *cells[2][PARTS], *gpu[PARTS];
  struct kvs_share_stats stats[2];
  struct kvs_share_job *job;
  struct kvs_error err = {0};
  int64_t ids[OWNED];
  uint64_t random = 5;
  unsigned char *wanted = malloc((size_t)CELLS * NBYTES);
  for (int64_t i = 0; i < OWNED; i++) ids[i] = i;
  const struct kvs_ids all = {ids, 8, OWNED};
  open_roles(shares, cells, gpu);
  link_roles(shares);
  CHECK(kvs_share_submit(shares[1], KVS_D2H, &all, &all, NULL, NULL, &job, &err) == KVS_UNSUPPORTED, "%s", err.message);
  kvs_share_get_stats(shares[0], &stats[0]);
  for (int round = 0; round < 100 && (!stats[0].brought_by_others[0] || !stats[0].brought_by_others[1]); round++) {
    for (int i = 0; i < CELLS; i++) memset(blocks + i * CELL, (int)check_random(&random), CELL);
    memcpy(wanted, rows, (size_t)CELLS * NBYTES);
    for (int i = 0; i < CELLS; i++) memcpy(wanted + CELL + i * NBYTES, blocks + i * CELL, CELL);
    for (int direction = 0; direction < 2; direction++) {
      int status = kvs_share_submit(shares[0], (enum kvs_direction)direction, &all, &all, NULL, NULL, &job, &err);
      CHECK(!status && !kvs_share_job_wait(job, 60 * SECONDS, &err), "%s", err.message);
      kvs_share_job_unref(job);
      CHECK(!memcmp(rows, wanted, (size_t)CELLS * NBYTES), "rows after a transfer, direction %d", direction);
      if (!direction) memset(blocks, 0, (size_t)CELLS * CELL);
    }
    for (int i = 0; i < CELLS; i++) CHECK(!memcmp(blocks + i * CELL, wanted + CELL + i * NBYTES, CELL));
    for (int i = 0; i < 2; i++) kvs_share_get_stats(shares[i], &stats[i]);
  }
  CHECK(stats[0].brought_by_others[KVS_D2H] && stats[0].brought_by_others[KVS_H2D]);
  CHECK(stats[1].brought_for_others[KVS_H2D] >= stats[0].brought_by_others[KVS_H2D]);
  for (int i = 0; i < 2; i++) {
    CHECK(!kvs_share_close(shares[i], 60 * SECONDS, &err), "%s", err.message);
    kvs_share_unref(shares[i]);
    for (int part = 0; part < PARTS; part++) kvs_pool_unref(cells[i][part]);
  }
  for (int part = 0; part < PARTS; part++) kvs_pool_unref(gpu[part]);
  free(wanted);
}

int main(void) {
  host = calloc(BLOCKS, NBYTES);
  open_member(&members[0], "host:0");
  open_member(&members[1], "host:1");
  test_members();
  test_roles();
  for (int i = 0; i < 2; i++) close_member(&members[i]);
  for (int i = 0; i < 2; i++) kvs_engine_unref(members[i].engine);
  CHECK(!atomic_load(&wrong));
  return check_close();
}
