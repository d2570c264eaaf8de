/* The memory of a host pool: how it is laid out, what it may take, its pages and NUMA nodes. */
#include "hostpool/map.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hostpool/budget.h"

/* -- geometry ------------------------------------------------------------------------------------------------------ */

uint64_t kvs_host_pool_most(const struct kvs_host_pool *pool) {
  return pool->asked.max_blocks ? pool->asked.max_blocks : pool->asked.num_blocks;
}

uint64_t kvs_host_pool_units(const struct kvs_host_pool *pool, uint64_t blocks) {
  return pool->extents == 1 && pool->asked.layer_first ? blocks * pool->asked.layers : blocks;
}

uint64_t kvs_host_pool_used(const struct kvs_host_pool *pool, uint64_t blocks) {
  return kvs_round_up(kvs_host_pool_units(pool, blocks) * pool->unit, kvs_page_nbytes(pool->pages));
}

uint64_t kvs_host_pool_room(const struct kvs_host_pool *pool) {
  return (pool->extents - 1) * pool->extent_pitch + kvs_host_pool_used(pool, kvs_host_pool_most(pool));
}

void kvs_host_pool_lay_out(struct kvs_host_pool *pool, enum kvs_pages pages) {
  pool->pages = pages;
  pool->extent_pitch = kvs_host_pool_used(pool, kvs_host_pool_most(pool));
  pool->map_nbytes = kvs_host_pool_room(pool);
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

int kvs_host_pool_commit(struct kvs_host_pool *pool, uint64_t from, uint64_t to, struct kvs_error *err) {
  int status = KVS_OK;
  for (uint64_t i = 0; !status && i < pool->extents; i++)
    status = kvs_pages_commit(pool->base + i * pool->extent_pitch + from, to - from, pool->pages, err);
  return status;
}

static int map_as(struct kvs_host_pool *pool, enum kvs_pages pages, struct kvs_error *err) {
  kvs_host_pool_lay_out(pool, pages);
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

int kvs_host_pool_map(struct kvs_host_pool *pool, struct kvs_error *err) {
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
