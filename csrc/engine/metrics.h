/* Counters and histograms of the process, for monitoring: what the bindings read. Not part of the public surface: the
 * structs grow with paths, statuses and counters.
 *
 * Counters only rise while their owner (device, file store) exists. Reading them waits for no transfer and no driver
 * call, beyond asking the device which transfers have ended. In the child of a fork, what the parent opened is left
 * out. */
#ifndef KVS_METRICS_H
#define KVS_METRICS_H

#include "kvswap.h"
#include "status.h"

enum { KVS_HISTOGRAM_BOUNDS = 20 };

/* Bucket i counts values up to bound i and above bound i - 1; the last counts the values above all bounds. */
struct kvs_histogram_counts {
  uint64_t buckets[KVS_HISTOGRAM_BOUNDS + 1];
  uint64_t sum;
};
const uint64_t *kvs_histogram_time_bounds(void); /* nanoseconds; KVS_HISTOGRAM_BOUNDS of them */
const uint64_t *kvs_histogram_size_bounds(void); /* bytes */

/* Of one direction and path. Histograms are of transfers done. */
struct kvs_path_metrics {
  struct kvs_histogram_counts duration_ns; /* from the call until a call of kvswap saw the end */
  struct kvs_histogram_counts queue_ns;    /* the same, without the time on the device */
  struct kvs_histogram_counts nbytes;
  uint64_t blocks, device_ns;
  uint64_t link_nbytes;          /* that moved: fewer where blocks were coded */
  uint64_t failed[KVS_STATUSES]; /* transfers that failed, by -status */
  uint64_t failed_blocks;
};

/* All lanes of one direction and priority, now. */
struct kvs_lane_metrics {
  uint64_t lanes;
  uint64_t unfinished, nbytes; /* transfers and their bytes */
  uint64_t fullest, limit;     /* transfers in the fullest lane; transfers that a lane takes */
  uint64_t oldest_ns;          /* age of the oldest unfinished transfer; 0: none */
};

struct kvs_engine_metrics {
  struct kvs_path_metrics paths[3][KVS_PATHS];
  struct kvs_lane_metrics lanes[3][KVS_PRIORITY_BACKGROUND + 1];
  uint64_t submitted, copies, merged, refused_full, second_attempts;
  uint64_t waits_raw, waits_war, waits_waw;
  uint64_t lent_d2h_nbytes, lent_h2d_nbytes;         /* queued on this device's link by other devices' transfers */
  uint64_t borrowed_d2h_nbytes, borrowed_h2d_nbytes; /* of this device's transfers, on other links */
  uint64_t staging_nbytes, slots_nbytes;             /* now */
  uint64_t allocated_nbytes, allocated_host_nbytes;  /* now, by kvswap: device memory, pinned memory */
  uint64_t registered_nbytes, imported_nbytes;       /* now: pinned memory of the caller; memory of other processes */
  uint64_t pools, pool_blocks;                       /* now: kvs_pool */
  bool lost;
};
void kvs_engine_get_metrics(struct kvs_engine *engine, struct kvs_engine_metrics *metrics);

#endif
