/* The host pools of the process, for monitoring. */
#include "hostpool/metrics.h"

#include <stdio.h>

#include "base/fork.h"
#include "hostpool/state.h"

static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvs_host_pool *pools; /* guarded by pools_lock */

static void forked(void) { pools = NULL; }

void kvs_host_pools_enter(struct kvs_host_pool *pool) {
  static struct kvs_fork_guard guard = {.lock = &pools_lock, .in_child = forked};
  kvs_fork_watch(&guard);
  pthread_mutex_lock(&pools_lock);
  pool->next = pools;
  pools = pool;
  pthread_mutex_unlock(&pools_lock);
}

void kvs_host_pools_leave(const struct kvs_host_pool *pool) {
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
