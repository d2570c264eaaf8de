/* The host pools of the process, for monitoring: what the bindings read (engine/metrics.h). */
#ifndef KVS_HOSTPOOL_METRICS_H
#define KVS_HOSTPOOL_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvs_host_pool;

struct kvs_host_pool_metrics {
  char device[32];
  bool shared, pinned;
  int state; /* enum kvs_host_pool_state */
  uint64_t num_blocks, nbytes, populated_nbytes;
};
/* The host pools of this process, shared ones too. Writes up to `capacity`, returns their number. */
size_t kvs_host_pools_get_metrics(struct kvs_host_pool_metrics *pools, size_t capacity);

/* A pool is listed from the start of its crew to its end. */
void kvs_host_pools_enter(struct kvs_host_pool *);
void kvs_host_pools_leave(const struct kvs_host_pool *); /* also one that was not listed */

#endif
