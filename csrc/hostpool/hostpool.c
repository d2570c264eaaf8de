/* Host pools: geometry, mapping, opening and closing. populate.c has the threads, hostpool_resize.c growing and
 * shrinking. */
#include "hostpool/hostpool.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/wait.h"
#include "engine/metrics.h"
#include "hostpool/budget.h"
#include "lanes/lane.h"
#include "lanes/peer.h"
#include "memory/reclaim.h"
#include "memory/vacate.h"

/* -- geometry -------------------------------------------------------------------------------------------------- */

static bool room_apart(const struct kvs_host_pool_options *o) { return o->layer_first && o->max_blocks; }

uint64_t kvs_host_pool_most(const struct kvs_host_pool *pool) {
  return pool->asked.max_blocks ? pool->asked.max_blocks : pool->asked.num_blocks;
}

/* Units that so many blocks take in one extent. */
uint64_t kvs_host_pool_units(const struct kvs_host_pool *pool, uint64_t blocks) {
  return pool->extents == 1 && pool->asked.layer_first ? blocks * pool->asked.layers : blocks;
}

/* Bytes that so many blocks take in one extent, in whole pages. */
uint64_t kvs_host_pool_used(const struct kvs_host_pool *pool, uint64_t blocks) {
  return kvs_round_up(kvs_host_pool_units(pool, blocks) * pool->unit, kvs_page_nbytes(pool->pages));
}

uint64_t kvs_host_pool_room(const struct kvs_host_pool *pool) {
  return (pool->extents - 1) * pool->extent_pitch + kvs_host_pool_used(pool, kvs_host_pool_most(pool));
}

static uint64_t layer_pitch(const struct kvs_host_pool *pool) {
  if (!pool->asked.layer_first) return pool->layer_nbytes;
  return pool->extents > 1 ? pool->extent_pitch : pool->asked.num_blocks * pool->layer_nbytes;
}

static uint64_t common_divisor(uint64_t a, uint64_t b) {
  while (b) {
    uint64_t rest = a % b;
    a = b, b = rest;
  }
  return a;
}

static int check_geometry(const struct kvs_host_pool_options *o, struct kvs_error *err) {
  const uint64_t most = UINT64_C(1) << 46; /* addressable bytes, with a margin for additions */
  uint64_t all;
  if (o->num_blocks == 0) return kvs_fail(err, KVS_INVALID, "num_blocks is 0: a pool has at least one block");
  if (o->num_blocks > UINT32_MAX || o->max_blocks > UINT32_MAX)
    return kvs_fail(err, KVS_INVALID, "%s is %" PRIu64 ": a pool has at most 2**32 - 1 blocks",
                    o->num_blocks > UINT32_MAX ? "num_blocks" : "max_blocks",
                    o->num_blocks > UINT32_MAX ? o->num_blocks : o->max_blocks);
  if (o->slot_nbytes == 0) return kvs_fail(err, KVS_INVALID, "slot_nbytes is 0: a slot has at least one byte");
  if (o->slot_nbytes % o->layers)
    return kvs_fail(err, KVS_INVALID,
                    "slot_nbytes is %" PRIu64 ", which is not a multiple of layers (%" PRIu64
                    "): it counts the bytes of one block of all layers together",
                    o->slot_nbytes, o->layers);
  if (o->max_blocks && o->max_blocks < o->num_blocks)
    return kvs_fail(err, KVS_INVALID, "max_blocks is %" PRIu64 ", less than num_blocks, which is %" PRIu64,
                    o->max_blocks, o->num_blocks);
  uint64_t blocks = o->max_blocks ? o->max_blocks : o->num_blocks;
  if (o->layers >= most || __builtin_mul_overflow(blocks, o->slot_nbytes, &all) || all > most)
    return kvs_fail(err, KVS_NOMEM, "%" PRIu64 " blocks of %" PRIu64 " bytes are more than a process can address",
                    blocks, o->slot_nbytes);
  return KVS_OK;
}

static int check_node(const struct kvs_host_pool_options *asked, struct kvs_error *err) {
  struct kvs_nodes nodes;
  if (asked->placement != KVS_PLACE_NODE) return KVS_OK;
  bool known = kvs_nodes_with_memory(&nodes);
  bool there = asked->node >= 0 && asked->node < KVS_NODE_WORDS * 64 &&
               (!known || nodes.bits[asked->node / 64] >> (asked->node % 64) & 1);
  return there ? KVS_OK
               : kvs_fail(err, KVS_INVALID, "numa is %d: this machine has no such node with memory", asked->node);
}

/* Sets the fields that depend on the page size. */
static void lay_out(struct kvs_host_pool *pool, enum kvs_pages pages) {
  pool->pages = pages;
  pool->extent_pitch = kvs_host_pool_used(pool, kvs_host_pool_most(pool));
  pool->map_nbytes = kvs_host_pool_room(pool);
}

/* -- pools of the process ------------------------------------------------------------------------------------------ */

static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvs_host_pool *pools; /* guarded by pools_lock */

static void forked(void) { pools = NULL; }

/* From the start of its crew to the end. */
static void enter_list(struct kvs_host_pool *pool) {
  static struct kvs_fork_guard guard = {.lock = &pools_lock, .in_child = forked};
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&pools_lock);
  pool->next = pools;
  pools = pool;
  pthread_mutex_unlock(&pools_lock);
}

static void leave_list(const struct kvs_host_pool *pool) {
  pthread_mutex_lock(&pools_lock);
  struct kvs_host_pool **at = &pools;
  while (*at && *at != pool) at = &(*at)->next;
  if (*at) *at = pool->next;
  pthread_mutex_unlock(&pools_lock);
}

static void read_metrics(struct kvs_host_pool *pool, struct kvs_host_pool_metrics *metrics) {
  pthread_mutex_lock(&pool->lock);
  *metrics = (struct kvs_host_pool_metrics){.shared = pool->segment != NULL,
                                            .pinned = pool->pinned,
                                            .state = (int)pool->state,
                                            .num_blocks = pool->num_blocks,
                                            .nbytes = pool->num_blocks * pool->asked.slot_nbytes,
                                            .populated_nbytes = pool->populated};
  pthread_mutex_unlock(&pool->lock);
  snprintf(metrics->device, sizeof metrics->device, "%s", pool->engine->name);
}

size_t kvs_host_pools_get_metrics(struct kvs_host_pool_metrics *metrics, size_t capacity) {
  size_t count = 0;
  pthread_mutex_lock(&pools_lock);
  for (struct kvs_host_pool *pool = pools; pool; pool = pool->next) {
    struct kvs_host_pool_metrics row;
    read_metrics(pool, &row);
    if (row.state == KVS_POOL_CLOSED) continue;
    if (count < capacity) metrics[count] = row;
    count++;
  }
  pthread_mutex_unlock(&pools_lock);
  return count;
}

/* -- making and freeing the object --------------------------------------------------------------------------------- */

static const int64_t RECLAIM_NS = 500 * 1000 * 1000;

int kvs_host_pool_new(struct kvs_engine *engine, const struct kvs_host_pool_options *options,
                      struct kvs_host_pool **made, struct kvs_error *err) {
  struct kvs_host_pool_options asked = *options;
  if (asked.layers == 0) asked.layers = 1;
  if (asked.chunk_nbytes == 0) asked.chunk_nbytes = UINT64_C(1) << 30;
  int status = KVS_CHECK_RESERVED(&asked, "kvs_host_pool_options", err);
  if (!status) status = check_geometry(&asked, err);
  if (!status) status = check_node(&asked, err);
  if (!status) status = kvs_dev_check(engine->device, err);
  if (status) return status;
  if (kvs_reclaim_pending(engine)) (void)kvs_reclaim_drain(engine, RECLAIM_NS); /* memory about to be freed */
  struct kvs_host_pool *pool = calloc(1, sizeof *pool);
  if (!pool) return kvs_fail(err, KVS_NOMEM, "no memory for a host pool");
  pool->asked = asked;
  pool->num_blocks = asked.num_blocks;
  pool->layer_nbytes = asked.slot_nbytes / asked.layers;
  pool->unit = pool->stride = asked.layer_first ? pool->layer_nbytes : asked.slot_nbytes;
  pool->extents = room_apart(&asked) ? asked.layers : 1;
  pool->node = -1;
  pool->registering = !asked.pageable;
  lay_out(pool, asked.pages);
  /* Chunks of whole units and whole pages, as large as fits. */
  uint64_t page = kvs_page_nbytes(KVS_PAGES_DEFAULT), step = page / common_divisor(pool->unit, page);
  pool->chunk_units = asked.chunk_nbytes / pool->unit / step * step;
  if (pool->chunk_units == 0) pool->chunk_units = step;
  pthread_mutex_init(&pool->lock, NULL);
  kvs_cond_init(&pool->changed);
  kvs_engine_ref(engine);
  pool->engine = engine;
  *made = pool;
  return KVS_OK;
}

void kvs_host_pool_delete(struct kvs_host_pool *pool) {
  leave_list(pool);
  pthread_mutex_destroy(&pool->lock);
  pthread_cond_destroy(&pool->changed);
  free(pool->chunks);
  kvs_engine_unref(pool->engine);
  free(pool);
}

/* -- notices --------------------------------------------------------------------------------------------------- */

void kvs_host_pool_note(struct kvs_host_pool *pool, const char *format, ...) {
  va_list list;
  pthread_mutex_lock(&pool->lock);
  size_t room = sizeof pool->notices - pool->notices_length;
  va_start(list, format);
  int n = room > 1 ? vsnprintf(pool->notices + pool->notices_length, room - 1, format, list) : 0;
  va_end(list);
  if (n > 0) {
    pool->notices_length += (size_t)n < room - 2 ? (size_t)n : room - 2;
    pool->notices[pool->notices_length++] = '\n';
    pool->notices[pool->notices_length] = '\0';
  }
  pthread_mutex_unlock(&pool->lock);
}

size_t kvs_host_pool_notices(struct kvs_host_pool *pool, char *text, size_t capacity) {
  pthread_mutex_lock(&pool->lock);
  size_t length = pool->notices_length;
  if (capacity) snprintf(text, capacity, "%s", pool->notices);
  pthread_mutex_unlock(&pool->lock);
  return length;
}

/* -- mapping --------------------------------------------------------------------------------------------------- */

int kvs_host_pool_afford(const struct kvs_host_pool *pool, uint64_t nbytes, struct kvs_error *err) {
  struct kvs_budget budget;
  kvs_budget_read("", &budget);
  int64_t reserve = pool->asked.has_reserve ? pool->asked.reserve : kvs_budget_reserve(&budget);
  const char *text = pool->asked.has_reserve ? NULL : getenv("KVSWAP_RESERVE");
  if (text && *text) {
    char *end;
    errno = 0;
    reserve = strtoll(text, &end, 10);
    if (*end || errno)
      return kvs_fail(err, KVS_INVALID, "KVSWAP_RESERVE is '%.40s'; it is a number of bytes, negative ones too", text);
  }
  return kvs_budget_check(&budget, nbytes, reserve, err);
}

/* Reserve pages [from, to) of every extent; offsets in bytes. */
int kvs_host_pool_commit(struct kvs_host_pool *pool, uint64_t from, uint64_t to, struct kvs_error *err) {
  int status = KVS_OK;
  for (uint64_t i = 0; !status && i < pool->extents; i++)
    status = kvs_pages_commit(pool->base + i * pool->extent_pitch + from, to - from, pool->pages, err);
  return status;
}

static int map_as(struct kvs_host_pool *pool, enum kvs_pages pages, struct kvs_error *err) {
  lay_out(pool, pages);
  uint64_t used = kvs_host_pool_used(pool, pool->num_blocks);
  int status = kvs_pages_huge(pages)
                   ? KVS_OK
                   : kvs_host_pool_afford(pool, pool->extents * used, err); /* huge pages are reserved in advance */
  if (!status) status = kvs_pages_reserve(pool->map_nbytes, kvs_page_nbytes(pages), &pool->map_base, err);
  if (status) return status;
  pool->base = pool->map_base;
  status = kvs_host_pool_commit(pool, 0, used, err);
  if (!status) return status;
  kvs_pages_unmap(pool->map_base, pool->map_nbytes);
  pool->map_base = 0;
  return status;
}

/* Map with the requested pages, or with the next smaller available ones. */
static int map_private(struct kvs_host_pool *pool, struct kvs_error *err) {
  enum kvs_pages pages = pool->asked.pages;
  for (;; pages = pages == KVS_PAGES_1GIB ? KVS_PAGES_2MIB : KVS_PAGES_TRANSPARENT) {
    if (pages == KVS_PAGES_TRANSPARENT && !kvs_pages_transparent()) {
      kvs_host_pool_note(pool, "transparent huge pages are off (/sys/kernel/mm/transparent_hugepage/enabled): the pool "
                               "has pages of the usual size");
      pages = KVS_PAGES_DEFAULT;
    }
    int status = map_as(pool, pages, err);
    if (status != KVS_NOMEM || !kvs_pages_huge(pages)) return status;
    kvs_host_pool_note(pool, "%s: smaller pages are used", err->message);
  }
}

/* Fills *nodes. Returns the node, -2 for interleaved or -1 for any. */
static int choose_nodes(const struct kvs_host_pool *pool, struct kvs_nodes *nodes) {
  int node = pool->asked.node;
  memset(nodes, 0, sizeof *nodes);
  switch (pool->asked.placement) {
  case KVS_PLACE_ANYWHERE:
    return -1;
  case KVS_PLACE_INTERLEAVE:
    nodes->interleave = true;
    return kvs_nodes_with_memory(nodes) ? -2 : -1;
  case KVS_PLACE_AUTO:
    node = pool->engine->device->info.numa_node;
    break;
  case KVS_PLACE_NODE:
    break;
  }
  if (node < 0 || node >= KVS_NODE_WORDS * 64) return -1;
  nodes->bits[node / 64] = UINT64_C(1) << (node % 64);
  return node;
}

void kvs_host_pool_place(struct kvs_host_pool *pool, uint64_t from, uint64_t to) {
  struct kvs_nodes nodes;
  struct kvs_error err;
  char wanted[KVS_SIZE_TEXT], there[KVS_SIZE_TEXT];
  int node = choose_nodes(pool, &nodes);
  for (uint64_t i = 0; node != -1 && i < pool->extents; i++)
    if (kvs_pages_bind(pool->base + i * pool->extent_pitch + from, to - from, &nodes, &err)) {
      kvs_host_pool_note(pool, "%s", err.message);
      node = -1;
    }
  uint64_t nbytes = pool->extents * (to - from), left = node >= 0 ? kvs_budget_node("", node) : UINT64_MAX;
  if (!kvs_pages_huge(pool->pages) && nbytes > left)
    kvs_host_pool_note(pool,
                       "NUMA node %d has %s free for %s: the rest will be on other nodes, where copies are slower",
                       node, kvs_size_text(left, there), kvs_size_text(nbytes, wanted));
  pthread_mutex_lock(&pool->lock);
  pool->node = node;
  pthread_mutex_unlock(&pool->lock);
}

int kvs_host_pool_start(struct kvs_host_pool *pool, struct kvs_error *err) {
  int status = KVS_OK;
  kvs_host_pool_place(pool, 0, kvs_host_pool_used(pool, pool->num_blocks));
  for (uint64_t i = 0; !status && i < pool->extents; i++)
    status = kvs_host_chunks_cut(pool, i, 0, kvs_host_pool_units(pool, pool->num_blocks), err);
  if (status) return status;
  enter_list(pool);
  return kvs_crew_hire(pool, err);
}

/* -- opening and queries --------------------------------------------------------------------------------------- */

int kvs_host_pool_open(struct kvs_engine *engine, const struct kvs_host_pool_options *options,
                       struct kvs_host_pool **made, struct kvs_error *err) {
  struct kvs_host_pool *pool;
  int status = kvs_host_pool_new(engine, options, &pool, err);
  if (status) return status;
  status = map_private(pool, err);
  if (!status) {
    status = kvs_host_pool_start(pool, err);
    if (status) kvs_pages_unmap(pool->map_base, pool->map_nbytes);
  }
  if (status)
    kvs_host_pool_delete(pool);
  else
    *made = pool;
  return status;
}

struct kvs_engine *kvs_host_pool_engine(const struct kvs_host_pool *pool) { return pool->engine; }

/* After fork() the child has neither the memory nor the threads, and a thread of the parent may hold the lock. */
static int check_fork(const struct kvs_host_pool *pool, struct kvs_error *err) {
  int status = kvs_dev_check(pool->engine->device, err);
  return status == KVS_FORKED ? status : KVS_OK;
}

int kvs_host_pool_get_info(struct kvs_host_pool *pool, struct kvs_host_pool_info *info, struct kvs_error *err) {
  int status = check_fork(pool, err);
  if (status) return status;
  pthread_mutex_lock(&pool->lock);
  uint64_t work = pool->total;
  *info = (struct kvs_host_pool_info){
      .state = pool->state,
      .ptr = pool->base,
      .nbytes = pool->num_blocks * pool->asked.slot_nbytes,
      .mapped_nbytes = pool->extents * kvs_host_pool_used(pool, pool->num_blocks),
      .num_blocks = pool->num_blocks,
      .max_blocks = kvs_host_pool_most(pool),
      .slot_nbytes = pool->asked.slot_nbytes,
      .layers = pool->asked.layers,
      .layer_nbytes = pool->layer_nbytes,
      .layer_pitch = layer_pitch(pool),
      .stride = pool->stride,
      .extent =
          (pool->asked.layers - 1) * layer_pitch(pool) + (pool->num_blocks - 1) * pool->stride + pool->layer_nbytes,
      .layer_first = pool->asked.layer_first,
      .pinned = pool->pinned,
      .refused = pool->refused.status != KVS_OK,
      .pages = pool->pages,
      .node = pool->node,
      .done_nbytes = pool->registering ? (pool->populated + pool->registered) / 2 : pool->populated,
      .total_nbytes = work,
      .chunks = (unsigned)pool->nchunks,
  };
  if (pool->state == KVS_POOL_READY) info->done_nbytes = work;
  pthread_mutex_unlock(&pool->lock);
  return KVS_OK;
}

int kvs_host_pool_state_error(const struct kvs_host_pool *pool, struct kvs_error *err) {
  switch (pool->state) {
  case KVS_POOL_READY:
    return KVS_OK;
  case KVS_POOL_POPULATING:
    return kvs_fail(err, KVS_NOT_READY, "the pool is still being populated: wait() for it first");
  case KVS_POOL_FAILED:
    *err = pool->failure;
    return err->status;
  case KVS_POOL_CANCELLED:
    return kvs_fail(err, KVS_CANCELLED, "populating the pool was cancelled: only blocks that are ready() can be used");
  case KVS_POOL_CLOSED:
    break;
  }
  return kvs_fail(err, KVS_CLOSED, "the pool is closed");
}

int kvs_host_pool_wait(struct kvs_host_pool *pool, int64_t timeout_ns, struct kvs_error *err) {
  int status = check_fork(pool, err);
  if (status) return status;
  uint64_t deadline = kvs_deadline(timeout_ns);
  pthread_mutex_lock(&pool->lock);
  while (pool->state == KVS_POOL_POPULATING && kvs_cond_wait(&pool->changed, &pool->lock, deadline)) continue;
  status = kvs_host_pool_state_error(pool, err);
  pthread_mutex_unlock(&pool->lock);
  if (status != KVS_NOT_READY) return status;
  return kvs_fail(err, KVS_TIMEOUT, "the pool was not populated within %.3f s; it goes on", (double)timeout_ns / 1e9);
}

int kvs_host_pool_ready(struct kvs_host_pool *pool, uint64_t block, struct kvs_error *err) {
  int status = check_fork(pool, err);
  if (status) return status;
  pthread_mutex_lock(&pool->lock);
  if (pool->state == KVS_POOL_CLOSED) status = kvs_host_pool_state_error(pool, err);
  if (!status && block >= pool->num_blocks)
    status = kvs_fail(err, KVS_RANGE, "block is %" PRIu64 "; the pool has %" PRIu64 " blocks, 0 to %" PRIu64, block,
                      pool->num_blocks, pool->num_blocks - 1);
  uint64_t layers = pool->asked.layer_first ? pool->asked.layers : 1;
  for (uint64_t i = 0; !status && i < layers; i++) {
    size_t at = kvs_host_chunk_find(pool, pool->base + i * layer_pitch(pool) + block * pool->stride);
    if (at == pool->nchunks || !pool->chunks[at].ready) status = KVS_NOT_READY;
  }
  pthread_mutex_unlock(&pool->lock);
  return status;
}

void kvs_host_pool_cancel(struct kvs_host_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  pool->stop = true;
  pthread_mutex_unlock(&pool->lock);
}

/* Drain all devices: any device may copy to or from the pool, even if the pool's own device is lost. */
int kvs_host_pool_drain(struct kvs_host_pool *pool, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_region all = {.base = pool->map_base, .nbytes = pool->map_nbytes};
  uint64_t start = kvs_clock_ns();
  int status = check_fork(pool, err);
  if (!status) status = kvs_engine_drain(pool->engine, &all, timeout_ns, err);
  if (status) return status;
  int64_t waited = (int64_t)(kvs_clock_ns() - start), left = waited < timeout_ns ? timeout_ns - waited : 0;
  return kvs_peer_drain(pool->engine, &all, timeout_ns < 0 ? -1 : left, err);
}

/* -- closing --------------------------------------------------------------------------------------------------- */

/* Wait for calls that read the segment's words. Waits in such calls last less than a second each; Python repeats
 * them. */
static int await_readers(struct kvs_host_pool *pool, uint64_t deadline, struct kvs_error *err) {
  pthread_mutex_lock(&pool->lock);
  pool->closing = true;
  while (pool->readers && kvs_cond_wait(&pool->changed, &pool->lock, deadline)) continue;
  bool late = pool->readers != 0;
  pthread_mutex_unlock(&pool->lock);
  return late ? kvs_fail(err, KVS_TIMEOUT, "another thread still waits for blocks of the pool") : KVS_OK;
}

/* Stop the crew. Its threads may be in the driver, which registers memory for as long as it likes. */
static int await_crew(struct kvs_host_pool *pool, uint64_t deadline, struct kvs_error *err) {
  pthread_mutex_lock(&pool->lock);
  pool->stop = true;
  while (pool->state == KVS_POOL_POPULATING && kvs_cond_wait(&pool->changed, &pool->lock, deadline)) continue;
  bool late = pool->state == KVS_POOL_POPULATING;
  pthread_mutex_unlock(&pool->lock);
  if (late) return kvs_fail(err, KVS_TIMEOUT, "a thread still populates or registers the pool's memory");
  kvs_crew_dismiss(pool);
  return KVS_OK;
}

static int64_t left_ns(uint64_t deadline) {
  uint64_t now = kvs_clock_ns();
  if (deadline == KVS_NO_DEADLINE) return -1;
  return now < deadline ? (int64_t)(deadline - now) : 0;
}

/* Unregister, then unmap. KVS_TIMEOUT: part of the memory is still in use. */
static int unmap(struct kvs_host_pool *pool, bool keep_range, uint64_t deadline, struct kvs_error *err) {
  struct kvs_error why, ignored;
  int refused = KVS_OK;
  for (size_t i = 0; i < pool->nchunks; i++) {
    struct kvs_host_chunk *chunk = &pool->chunks[i];
    if (!chunk->registered) continue;
    int status = kvs_engine_unregister_within(pool->engine, chunk->base, left_ns(deadline), &why);
    if (status && status != KVS_LOST) *err = why;
    if (status == KVS_TIMEOUT || status == KVS_CLOSED) return status;
    if (status && status != KVS_LOST) refused = status;
    pthread_mutex_lock(&pool->lock);
    chunk->registered = pool->pinned = false;
    pthread_mutex_unlock(&pool->lock);
  }
  if (pool->segment) kvs_shared_file_close(pool->segment);
  pthread_mutex_lock(&pool->lock);
  pool->segment = NULL;
  pthread_mutex_unlock(&pool->lock);
  if (refused) keep_range = true; /* the driver still has these addresses registered: they must not be reused */
  if (keep_range) (void)kvs_pages_clear(pool->map_base, pool->map_nbytes, &ignored);
  if (!keep_range) kvs_pages_unmap(pool->map_base, pool->map_nbytes);
  if (!keep_range || refused) pool->map_nbytes = 0;
  return refused;
}

/* The pools that were opened by its address go with the memory. */
static int give_back(struct kvs_host_pool *pool, bool keep_range, uint64_t deadline, struct kvs_error *err) {
  struct kvs_vacating vacating;
  int status = kvs_vacate_begin(pool->engine, pool->map_base, pool->map_nbytes, left_ns(deadline), &vacating, err);
  if (status) return status;
  status = unmap(pool, keep_range, deadline, err);
  kvs_vacate_end(&vacating);
  return status;
}

int kvs_host_pool_close(struct kvs_host_pool *pool, int64_t timeout_ns, bool keep_range, struct kvs_error *err) {
  uint64_t deadline = kvs_deadline(timeout_ns);
  int status = check_fork(pool, err);
  if (status) return status;
  pthread_mutex_lock(&pool->lock);
  bool closed = pool->state == KVS_POOL_CLOSED, busy = pool->resizing;
  if (!closed) pool->resizing = true;
  pthread_mutex_unlock(&pool->lock);
  if (closed) return KVS_OK;
  if (busy) return kvs_fail(err, KVS_INVALID, "another thread is growing, shrinking or closing the pool");
  status = kvs_host_pool_drain(pool, timeout_ns, err);
  if (!status) status = await_crew(pool, deadline, err);
  if (status == KVS_OK) {
    status = await_readers(pool, deadline, err);
    if (!status) status = give_back(pool, keep_range, deadline, err);
    pthread_mutex_lock(&pool->lock);
    if (status != KVS_TIMEOUT && status != KVS_CLOSED) pool->state = KVS_POOL_CLOSED;
    pthread_mutex_unlock(&pool->lock);
  }
  pthread_mutex_lock(&pool->lock);
  pool->resizing = pool->closing = false;
  pthread_mutex_unlock(&pool->lock);
  return status;
}

/* KVS_TIMEOUT: still in use. KVS_FORKED, KVS_CLOSED: left mapped, since the memory is the parent's or the process
 * ends. */
static int free_within(struct kvs_host_pool *pool, int64_t timeout_ns, struct kvs_error *err) {
  int status = kvs_host_pool_close(pool, timeout_ns, false, err);
  if (status == KVS_FORKED || status == KVS_CLOSED) return status;
  if (pool->state != KVS_POOL_CLOSED) return kvs_fail(err, KVS_TIMEOUT, "the pool is in use");
  if (pool->map_nbytes) { /* the address range was kept */
    struct kvs_vacating vacating;
    status = kvs_vacate_begin(pool->engine, pool->map_base, pool->map_nbytes, timeout_ns, &vacating, err);
    if (status) return status;
    kvs_pages_unmap(pool->map_base, pool->map_nbytes);
    kvs_vacate_end(&vacating);
  }
  kvs_host_pool_delete(pool);
  return KVS_OK;
}

/* A reclaim task, which must not block: it stops the crew and is retried until the crew has ended. */
static int free_now(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  struct kvs_host_pool *pool = what;
  (void)engine;
  kvs_host_pool_cancel(pool);
  pthread_mutex_lock(&pool->lock);
  bool busy = pool->state == KVS_POOL_POPULATING;
  pthread_mutex_unlock(&pool->lock);
  return busy ? kvs_fail(err, KVS_TIMEOUT, "it is still being populated") : free_within(pool, 0, err);
}

void kvs_host_pool_free(struct kvs_host_pool *pool, int64_t timeout_ns) {
  struct kvs_error err;
  if (free_within(pool, timeout_ns, &err) == KVS_TIMEOUT) kvs_reclaim_later(pool->engine, free_now, pool);
}

void kvs_host_pool_free_later(struct kvs_host_pool *pool) {
  if (atomic_load(&pool->engine->closed))
    kvs_host_pool_free(pool, 0);
  else
    kvs_reclaim_later(pool->engine, free_now, pool);
}
