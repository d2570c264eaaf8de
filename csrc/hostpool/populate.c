/* The crew of a host pool: threads that populate its chunks piece by piece, in address order. Each chunk is registered
 * when its last piece is populated, while other threads populate the next chunk.
 *
 * If the driver refuses a chunk, no further chunk is registered, and the last thread unregisters the others: a pool is
 * pinned completely or not at all. The blocks are usable in both cases. */
#include "hostpool/populate.h"

#include <sched.h>
#include <stdlib.h>

#include "base/thread.h"
#include "hostpool/budget.h"
#include "hostpool/map.h"

static const uint64_t PIECE_NBYTES = UINT64_C(32) << 20; /* pieces end at multiples, so that huge pages are not split */
enum { USEFUL_THREADS = 16 };

struct populate_piece {
  struct kvs_host_chunk *chunk;
  uint64_t base, nbytes;
};

static bool take_piece_locked(struct kvs_host_pool *pool, struct populate_piece *piece) {
  for (; pool->next_chunk < pool->nchunks; pool->next_chunk++) {
    struct kvs_host_chunk *chunk = &pool->chunks[pool->next_chunk];
    if (chunk->taken == chunk->nbytes) continue;
    uint64_t base = chunk->base + chunk->taken, left = chunk->nbytes - chunk->taken;
    uint64_t nbytes = PIECE_NBYTES - base % PIECE_NBYTES;
    *piece = (struct populate_piece){chunk, base, nbytes < left ? nbytes : left};
    chunk->taken += piece->nbytes;
    return true;
  }
  return false;
}

/* Called when the whole chunk is populated. */
static void finish_locked(struct kvs_host_pool *pool, struct kvs_host_chunk *chunk) {
  if (pool->registering && !pool->refused.status) {
    struct kvs_error err = {0};
    pthread_mutex_unlock(&pool->lock);
    int status = kvs_engine_register(pool->engine, chunk->base, chunk->nbytes, &err);
    pthread_mutex_lock(&pool->lock);
    chunk->registered = !status;
    if (!status) pool->registered += chunk->nbytes;
    if (status && !pool->refused.status) pool->refused = err;
  }
  chunk->ready = true;
  pthread_cond_broadcast(&pool->changed);
}

/* Unregister all chunks after one was refused. Called without the lock. */
static void roll_back(struct kvs_host_pool *pool) {
  struct kvs_error err;
  struct kvs_budget budget;
  char size[KVS_SIZE_TEXT] = "";
  for (size_t i = 0; i < pool->nchunks; i++) {
    struct kvs_host_chunk *chunk = &pool->chunks[i];
    if (!chunk->registered) continue;
    if (kvs_engine_unregister(pool->engine, chunk->base, &err)) {
      kvs_host_pool_note(pool, "a chunk stays registered: %s", err.message);
      continue;
    }
    pthread_mutex_lock(&pool->lock);
    chunk->registered = false;
    pool->registered -= chunk->nbytes;
    pthread_mutex_unlock(&pool->lock);
  }
  pthread_mutex_lock(&pool->lock);
  pool->registering = false;
  pthread_mutex_unlock(&pool->lock);
  kvs_budget_read("", &budget);
  bool tight = budget.memlock < pool->total;
  kvs_host_pool_note(pool, "the memory is pageable, not pinned, and copies are slower: %s%s%s", pool->refused.message,
                     tight ? "; RLIMIT_MEMLOCK allows " : "", tight ? kvs_size_text(budget.memlock, size) : "");
  if (tight)
    kvs_host_pool_note(pool, "if that is why, raise it: ulimit -l unlimited, or docker run --ulimit memlock=-1");
}

/* The kernel may use other nodes than requested: check the first page of each chunk. */
static void check_nodes(struct kvs_host_pool *pool) {
  size_t elsewhere = 0;
  for (size_t i = 0; pool->node >= 0 && i < pool->nchunks; i++) {
    int node = kvs_pages_node(pool->chunks[i].base);
    elsewhere += node >= 0 && node != pool->node;
  }
  if (elsewhere)
    kvs_host_pool_note(pool, "%zu of %zu chunks begin on another NUMA node than %d: copies of them are slower",
                       elsewhere, pool->nchunks, pool->node);
}

/* Called by the last thread of the crew. */
static void settle_locked(struct kvs_host_pool *pool) {
  bool all = !pool->failure.status;
  for (size_t i = 0; i < pool->nchunks; i++) all = all && pool->chunks[i].ready;
  pthread_mutex_unlock(&pool->lock);
  if (pool->refused.status && pool->registering) roll_back(pool);
  if (all) check_nodes(pool);
  pthread_mutex_lock(&pool->lock);
  pool->pinned = all && pool->registering;
  pool->state = pool->failure.status ? KVS_POOL_FAILED : all ? KVS_POOL_READY : KVS_POOL_CANCELLED;
  pthread_cond_broadcast(&pool->changed);
}

static void *work(void *arg) {
  struct kvs_host_pool *pool = arg;
  struct populate_piece piece;
  if (pool->node >= 0) kvs_run_on_node(pool->node);
  pthread_mutex_lock(&pool->lock);
  while (!pool->stop && !atomic_load(&pool->engine->closed) && take_piece_locked(pool, &piece)) {
    struct kvs_error err = {0};
    pthread_mutex_unlock(&pool->lock);
    int status = kvs_pages_populate(piece.base, piece.nbytes, &err);
    pthread_mutex_lock(&pool->lock);
    if (status) {
      if (!pool->failure.status) pool->failure = err;
      pool->stop = true;
      break;
    }
    pool->populated += piece.nbytes;
    piece.chunk->left -= piece.nbytes;
    if (piece.chunk->left == 0) finish_locked(pool, piece.chunk);
  }
  if (--pool->working == 0) settle_locked(pool);
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

static unsigned crew_size(const struct kvs_host_pool *pool) {
  cpu_set_t cpus;
  uint64_t pieces = (pool->total - pool->populated) / PIECE_NBYTES + 1;
  unsigned wanted = pool->asked.threads;
  if (wanted == 0) wanted = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? (unsigned)CPU_COUNT(&cpus) : 1;
  if (pool->asked.threads == 0 && wanted > USEFUL_THREADS) wanted = USEFUL_THREADS;
  if (wanted > KVS_CREW) wanted = KVS_CREW;
  return wanted < pieces ? wanted : (unsigned)pieces;
}

/* Assign again the chunks that an earlier crew did not complete, and those that a failed shrink has unregistered. */
static void offer_again_locked(struct kvs_host_pool *pool) {
  for (size_t i = 0; i < pool->nchunks; i++) {
    struct kvs_host_chunk *chunk = &pool->chunks[i];
    if (chunk->left == 0 && (chunk->registered || !pool->registering)) continue;
    pool->populated -= chunk->nbytes - chunk->left;
    chunk->left = chunk->nbytes;
    chunk->taken = 0;
  }
}

int kvs_crew_hire(struct kvs_host_pool *pool, struct kvs_error *err) {
  kvs_crew_dismiss(pool); /* join threads that have ended */
  pthread_mutex_lock(&pool->lock);
  offer_again_locked(pool);
  unsigned size = crew_size(pool);
  pool->stop = false;
  pool->failure.status = KVS_OK;
  pool->next_chunk = 0;
  pool->state = KVS_POOL_POPULATING;
  while (pool->hired < size && kvs_thread_start(&pool->crew[pool->hired], NULL, work, pool) == 0) {
    pool->hired++;
    pool->working++;
  }
  bool none = pool->hired == 0;
  if (none) pool->state = KVS_POOL_CANCELLED;
  pthread_mutex_unlock(&pool->lock);
  return none ? kvs_fail(err, KVS_NOMEM, "no thread could be started to populate host memory") : KVS_OK;
}

void kvs_crew_dismiss(struct kvs_host_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  pool->stop = true;
  pthread_mutex_unlock(&pool->lock);
  while (pool->hired) pthread_join(pool->crew[--pool->hired], NULL);
}
