/* The chunks of a host pool, and growing and shrinking. No crew runs during a resize, but other calls read the chunk
 * table, so the table changes under the lock. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "hostpool/hostpool.h"

/* -- the table ------------------------------------------------------------------------------------------------- */

size_t kvs_host_chunk_find(const struct kvs_host_pool *pool, uint64_t address) {
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
  size_t at = kvs_host_chunk_find(pool, base);
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

int kvs_host_chunks_cut(struct kvs_host_pool *pool, uint64_t extent, uint64_t from, uint64_t to,
                        struct kvs_error *err) {
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

/* -- growing and shrinking ------------------------------------------------------------------------------------- */

/* `whatever`: accept a failed or cancelled pool too, since shrinking repairs such a pool. */
static int begin_resize(struct kvs_host_pool *pool, bool whatever, struct kvs_error *err) {
  int status = kvs_dev_check(pool->engine->device, err);
  if (status) return status;
  if (pool->segment) return kvs_fail(err, KVS_UNSUPPORTED, "a shared pool keeps the size that it was made with");
  pthread_mutex_lock(&pool->lock);
  bool ended = pool->state == KVS_POOL_FAILED || pool->state == KVS_POOL_CANCELLED;
  status = whatever && ended ? KVS_OK : kvs_host_pool_state_error(pool, err);
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
  for (size_t at = kvs_host_chunk_find(pool, base + from); at < pool->nchunks && pool->chunks[at].base < end; at++) {
    struct kvs_host_chunk *chunk = &pool->chunks[at];
    int status = KVS_OK;
    if (chunk->registered) status = kvs_engine_unregister_within(pool->engine, chunk->base, timeout_ns, err);
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
    size_t at = kvs_host_chunk_find(pool, base + last);
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
  for (uint64_t i = 0; !status && i < pool->extents; i++) status = kvs_host_chunks_cut(pool, i, from, to, err);
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
  for (size_t at = kvs_host_chunk_find(pool, keep); !status && at < pool->nchunks && pool->chunks[at].base < end;) {
    uint64_t begin = pool->chunks[at].base;
    remove_chunk(pool, at);
    if (begin < keep) status = insert_chunk(pool, begin, keep - begin, err);
    at = kvs_host_chunk_find(pool, keep);
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
