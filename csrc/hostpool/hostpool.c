/* Host pools: opening and closing, chunks, growing and shrinking. map.c has their memory, populate.c the threads.
 *
 * No crew runs during a resize, but other calls read the table of chunks, so the table changes under the lock. */
#include "hostpool/hostpool.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/wait.h"
#include "hostpool/map.h"
#include "hostpool/metrics.h"
#include "hostpool/populate.h"
#include "hostpool/segment.h"
#include "lanes/lane.h"
#include "lanes/peer.h"
#include "memory/reclaim.h"
#include "memory/vacate.h"

/* -- geometry -------------------------------------------------------------------------------------------------- */

static bool room_apart(const struct kvs_host_pool_options *o) { return o->layer_first && o->max_blocks; }

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
  kvs_host_pool_lay_out(pool, asked.pages);
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
  kvs_host_pools_leave(pool);
  pthread_mutex_destroy(&pool->lock);
  pthread_cond_destroy(&pool->changed);
  free(pool->chunks);
  kvs_engine_unref(pool->engine);
  free(pool);
}

/* -- the table of chunks --------------------------------------------------------------------------------------- */

/* The first that ends above the address. */
static size_t find_chunk(const struct kvs_host_pool *pool, uint64_t address) {
  size_t low = 0, high = pool->nchunks;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (pool->chunks[middle].base + pool->chunks[middle].nbytes > address)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

static int insert_chunk(struct kvs_host_pool *pool, uint64_t base, uint64_t nbytes, struct kvs_error *err) {
  if (pool->nchunks == pool->capacity) {
    size_t capacity = pool->capacity ? 2 * pool->capacity : 16;
    struct kvs_host_chunk *grown = realloc(pool->chunks, capacity * sizeof *grown);
    if (!grown) return kvs_fail(err, KVS_NOMEM, "no memory for a table of %zu chunks", capacity);
    pool->chunks = grown;
    pool->capacity = capacity;
  }
  size_t at = find_chunk(pool, base);
  memmove(pool->chunks + at + 1, pool->chunks + at, (pool->nchunks - at) * sizeof *pool->chunks);
  pool->chunks[at] = (struct kvs_host_chunk){.base = base, .nbytes = nbytes, .left = nbytes};
  pool->nchunks++;
  pool->total += nbytes;
  return KVS_OK;
}

static void remove_chunk(struct kvs_host_pool *pool, size_t at) {
  const struct kvs_host_chunk *chunk = &pool->chunks[at];
  pool->total -= chunk->nbytes;
  pool->populated -= chunk->nbytes - chunk->left;
  if (chunk->registered) pool->registered -= chunk->nbytes;
  pool->nchunks--;
  memmove(pool->chunks + at, pool->chunks + at + 1, (pool->nchunks - at) * sizeof *pool->chunks);
}

/* Make chunks for units [from, to) of an extent; `from` must be page-aligned. */
static int cut_chunks(struct kvs_host_pool *pool, uint64_t extent, uint64_t from, uint64_t to, struct kvs_error *err) {
  uint64_t base = pool->base + extent * pool->extent_pitch, page = kvs_page_nbytes(KVS_PAGES_DEFAULT);
  int status = KVS_OK;
  while (!status && from < to) {
    uint64_t end = to - from < pool->chunk_units ? to : from + pool->chunk_units;
    uint64_t nbytes = kvs_round_up(end * pool->unit, page) - from * pool->unit;
    status = insert_chunk(pool, base + from * pool->unit, nbytes, err);
    from = end;
  }
  return status;
}

/* -- opening and queries --------------------------------------------------------------------------------------- */

int kvs_host_pool_start(struct kvs_host_pool *pool, struct kvs_error *err) {
  int status = KVS_OK;
  kvs_host_pool_place(pool, 0, kvs_host_pool_used(pool, pool->num_blocks));
  for (uint64_t i = 0; !status && i < pool->extents; i++)
    status = cut_chunks(pool, i, 0, kvs_host_pool_units(pool, pool->num_blocks), err);
  if (status) return status;
  kvs_host_pools_enter(pool);
  return kvs_crew_hire(pool, err);
}

int kvs_host_pool_open(struct kvs_engine *engine, const struct kvs_host_pool_options *options,
                       struct kvs_host_pool **made, struct kvs_error *err) {
  struct kvs_host_pool *pool;
  int status = kvs_host_pool_new(engine, options, &pool, err);
  if (status) return status;
  status = kvs_host_pool_map(pool, err);
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

/* KVS_OK: READY. */
static int state_error(const struct kvs_host_pool *pool, struct kvs_error *err) {
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
  status = state_error(pool, err);
  pthread_mutex_unlock(&pool->lock);
  if (status != KVS_NOT_READY) return status;
  return kvs_fail(err, KVS_TIMEOUT, "the pool was not populated within %.3f s; it goes on", (double)timeout_ns / 1e9);
}

int kvs_host_pool_ready(struct kvs_host_pool *pool, uint64_t block, struct kvs_error *err) {
  int status = check_fork(pool, err);
  if (status) return status;
  pthread_mutex_lock(&pool->lock);
  if (pool->state == KVS_POOL_CLOSED) status = state_error(pool, err);
  if (!status && block >= pool->num_blocks)
    status = kvs_fail(err, KVS_RANGE, "block is %" PRIu64 "; the pool has %" PRIu64 " blocks, 0 to %" PRIu64, block,
                      pool->num_blocks, pool->num_blocks - 1);
  uint64_t layers = pool->asked.layer_first ? pool->asked.layers : 1;
  for (uint64_t i = 0; !status && i < layers; i++) {
    size_t at = find_chunk(pool, pool->base + i * layer_pitch(pool) + block * pool->stride);
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

/* -- growing and shrinking ------------------------------------------------------------------------------------- */

/* `whatever`: accept a failed or cancelled pool too, since shrinking repairs such a pool. */
static int begin_resize(struct kvs_host_pool *pool, bool whatever, struct kvs_error *err) {
  int status = kvs_dev_check(pool->engine->device, err);
  if (status) return status;
  if (pool->segment) return kvs_fail(err, KVS_UNSUPPORTED, "a shared pool keeps the size that it was made with");
  pthread_mutex_lock(&pool->lock);
  bool ended = pool->state == KVS_POOL_FAILED || pool->state == KVS_POOL_CANCELLED;
  status = whatever && ended ? KVS_OK : state_error(pool, err);
  if (!status && pool->resizing)
    status = kvs_fail(err, KVS_INVALID, "another thread is growing, shrinking or closing the pool");
  if (!status) pool->resizing = true;
  pthread_mutex_unlock(&pool->lock);
  if (!status) kvs_crew_dismiss(pool); /* ended already; only this thread changes the chunks from now on */
  return status;
}

static void end_resize(struct kvs_host_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  pool->resizing = false;
  pthread_mutex_unlock(&pool->lock);
}

/* Unregister the chunks of an extent above `from` (bytes). */
static int unregister_above(struct kvs_host_pool *pool, uint64_t extent, uint64_t from, int64_t timeout_ns,
                            struct kvs_error *err) {
  uint64_t base = pool->base + extent * pool->extent_pitch, end = base + kvs_host_pool_used(pool, pool->num_blocks);
  for (size_t at = find_chunk(pool, base + from); at < pool->nchunks && pool->chunks[at].base < end; at++) {
    struct kvs_host_chunk *chunk = &pool->chunks[at];
    bool kept;
    int status = KVS_OK;
    if (chunk->registered) status = kvs_engine_unregister_within(pool->engine, chunk->base, timeout_ns, &kept, err);
    if (status) return status;
    pthread_mutex_lock(&pool->lock);
    if (chunk->registered) pool->registered -= chunk->nbytes;
    chunk->registered = pool->pinned = false; /* the crew registers the remaining part again */
    pthread_mutex_unlock(&pool->lock);
  }
  return KVS_OK;
}

/* Remove the last chunk of each extent if it ends within a page: it is made again together with the new blocks. *from
 * becomes the chunk's first unit. The contents stay. */
static int reopen_tails(struct kvs_host_pool *pool, uint64_t *from, int64_t timeout_ns, struct kvs_error *err) {
  uint64_t last = *from * pool->unit - 1;
  int status = KVS_OK;
  if ((last + 1) % kvs_page_nbytes(KVS_PAGES_DEFAULT) == 0) return status;
  for (uint64_t i = 0; !status && i < pool->extents; i++) status = unregister_above(pool, i, last, timeout_ns, err);
  for (uint64_t i = 0; !status && i < pool->extents; i++) {
    uint64_t base = pool->base + i * pool->extent_pitch;
    size_t at = find_chunk(pool, base + last);
    *from = (pool->chunks[at].base - base) / pool->unit;
    pthread_mutex_lock(&pool->lock);
    remove_chunk(pool, at);
    pthread_mutex_unlock(&pool->lock);
  }
  return status;
}

/* The last chunk is unregistered and made again, so copies must not use it. */
bool kvs_host_pool_grow_waits(struct kvs_host_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  uint64_t units = kvs_host_pool_units(pool, pool->num_blocks);
  bool waits = units * pool->unit % kvs_page_nbytes(KVS_PAGES_DEFAULT) != 0 && pool->registering;
  pthread_mutex_unlock(&pool->lock);
  return waits;
}

static int grow(struct kvs_host_pool *pool, uint64_t num_blocks, int64_t timeout_ns, struct kvs_error *err) {
  uint64_t before = kvs_host_pool_used(pool, pool->num_blocks), after = kvs_host_pool_used(pool, num_blocks);
  uint64_t from = kvs_host_pool_units(pool, pool->num_blocks), to = kvs_host_pool_units(pool, num_blocks);
  int status = kvs_pages_huge(pool->pages) ? KVS_OK : kvs_host_pool_afford(pool, pool->extents * (after - before), err);
  if (!status && kvs_host_pool_grow_waits(pool)) status = kvs_host_pool_drain(pool, timeout_ns, err);
  if (!status) status = kvs_host_pool_commit(pool, before, after, err);
  if (!status && after > before) kvs_host_pool_place(pool, before, after);
  if (!status) status = reopen_tails(pool, &from, timeout_ns, err);
  if (status) return status;
  pthread_mutex_lock(&pool->lock);
  for (uint64_t i = 0; !status && i < pool->extents; i++) status = cut_chunks(pool, i, from, to, err);
  if (!status) pool->num_blocks = num_blocks;
  pthread_mutex_unlock(&pool->lock);
  return status ? status : kvs_crew_hire(pool, err);
}

int kvs_host_pool_grow(struct kvs_host_pool *pool, uint64_t num_blocks, int64_t timeout_ns, struct kvs_error *err) {
  int status = begin_resize(pool, false, err);
  if (status) return status;
  if (num_blocks <= pool->num_blocks)
    status = kvs_fail(err, KVS_INVALID, "num_blocks is %" PRIu64 ", but the pool has %" PRIu64 " blocks already",
                      num_blocks, pool->num_blocks);
  else if (num_blocks > kvs_host_pool_most(pool))
    status = kvs_fail(err, KVS_INVALID,
                      "num_blocks is %" PRIu64 ", but the pool was made with room for %" PRIu64 " blocks (max_blocks)",
                      num_blocks, kvs_host_pool_most(pool));
  else
    status = grow(pool, num_blocks, timeout_ns, err);
  end_resize(pool);
  return status;
}

/* Remove the chunks above so many units of an extent; a chunk across the boundary is replaced by its lower part. */
static int cut_off(struct kvs_host_pool *pool, uint64_t extent, uint64_t units, struct kvs_error *err) {
  uint64_t base = pool->base + extent * pool->extent_pitch, end = base + kvs_host_pool_used(pool, pool->num_blocks);
  uint64_t keep = base + kvs_round_up(units * pool->unit, kvs_page_nbytes(KVS_PAGES_DEFAULT));
  int status = KVS_OK;
  pthread_mutex_lock(&pool->lock);
  for (size_t at = find_chunk(pool, keep); !status && at < pool->nchunks && pool->chunks[at].base < end;) {
    uint64_t begin = pool->chunks[at].base;
    remove_chunk(pool, at);
    if (begin < keep) status = insert_chunk(pool, begin, keep - begin, err);
    at = find_chunk(pool, keep);
  }
  pthread_mutex_unlock(&pool->lock);
  return status;
}

static int shrink(struct kvs_host_pool *pool, uint64_t num_blocks, int64_t timeout_ns, struct kvs_error *err) {
  uint64_t before = kvs_host_pool_used(pool, pool->num_blocks), after = kvs_host_pool_used(pool, num_blocks);
  uint64_t keep = kvs_host_pool_units(pool, num_blocks) * pool->unit;
  int status = kvs_host_pool_drain(pool, timeout_ns, err);
  for (uint64_t i = 0; !status && i < pool->extents; i++)
    status = unregister_above(pool, i, kvs_round_up(keep, kvs_page_nbytes(KVS_PAGES_DEFAULT)), timeout_ns, err);
  for (uint64_t i = 0; !status && i < pool->extents; i++)
    status = cut_off(pool, i, kvs_host_pool_units(pool, num_blocks), err);
  if (status) return status;
  pthread_mutex_lock(&pool->lock);
  pool->num_blocks = num_blocks;
  pthread_mutex_unlock(&pool->lock);
  for (uint64_t i = 0; !status && i < pool->extents; i++)
    status = kvs_pages_clear(pool->base + i * pool->extent_pitch + after, before - after, err);
  return status ? status : kvs_crew_hire(pool, err); /* registers the shortened chunks */
}

int kvs_host_pool_shrink(struct kvs_host_pool *pool, uint64_t num_blocks, int64_t timeout_ns, struct kvs_error *err) {
  int status = begin_resize(pool, true, err);
  if (status) return status;
  if (num_blocks == 0 || num_blocks >= pool->num_blocks)
    status =
        kvs_fail(err, KVS_INVALID, "num_blocks is %" PRIu64 ": a pool of %" PRIu64 " blocks shrinks to 1 to %" PRIu64,
                 num_blocks, pool->num_blocks, pool->num_blocks - 1);
  else if (pool->asked.layer_first && pool->extents == 1 && pool->asked.layers > 1)
    status =
        kvs_fail(err, KVS_UNSUPPORTED,
                 "the layers of this pool follow each other without a gap: a layer-first pool that shrinks is made "
                 "with max_blocks");
  else
    status = shrink(pool, num_blocks, timeout_ns, err);
  end_resize(pool);
  return status;
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
    bool kept;
    if (!chunk->registered) continue;
    int status = kvs_engine_unregister_within(pool->engine, chunk->base, left_ns(deadline), &kept, &why);
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
