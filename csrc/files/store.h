/* The open stores of the process: what the bindings read and set of them (engine/metrics.h). */
#ifndef KVS_FILE_STORE_H
#define KVS_FILE_STORE_H

#include "engine/metrics.h"
#include "files/sys.h"
#include "kvswap_file.h"

/* Of stores, loads or deletes of a file store. */
struct kvs_file_kind_metrics {
  struct kvs_histogram_counts duration_ns; /* transfers done: from the call to the end */
  struct kvs_histogram_counts nbytes;      /* the same */
  uint64_t failed, cancelled;              /* transfers that ended so */
  uint64_t failed_blocks[KVS_STATUSES];    /* blocks that failed, by -status */
};

struct kvs_file_metrics {
  struct kvs_file_stats stats;
  struct kvs_file_kind_metrics stores, loads, deletes;
  char directory[512]; /* cut if longer */
  uint64_t block_nbytes, capacity;
  uint64_t unfinished_load_blocks, unfinished_store_blocks; /* now */
  uint64_t oldest_ns;                                       /* age of the oldest unfinished transfer; 0: none */
};
/* The open stores of this process. Writes up to `capacity`, returns their number. */
size_t kvs_file_stores_get_metrics(struct kvs_file_metrics *metrics, size_t capacity);

/* For tests. A NULL store: applies to stores opened from now on, while they are being opened. */
void kvs_file_inject(struct kvs_file_store *, enum kvs_file_call, const struct kvs_file_fault *);

#endif
