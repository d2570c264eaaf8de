/* Histograms with fixed bounds, counted without a lock. A reader that runs beside writers may miss the last values. */
#ifndef KVS_HISTOGRAM_H
#define KVS_HISTOGRAM_H

#include <stdatomic.h>
#include <stdint.h>

enum { KVS_BOUNDS = 20 };

/* Bucket i counts values up to bound i, and above bound i - 1; the last bucket counts the values above all bounds. */
struct kvs_histogram {
  atomic_uint_fast64_t buckets[KVS_BOUNDS + 1], sum;
};

extern const uint64_t kvs_time_bounds[KVS_BOUNDS]; /* nanoseconds: 10 us, 20 us, 50 us, ... 20 s */
extern const uint64_t kvs_size_bounds[KVS_BOUNDS]; /* bytes: powers of two, 4 KiB to 2 GiB */

void kvs_histogram_add(struct kvs_histogram *, const uint64_t bounds[KVS_BOUNDS], uint64_t value);
uint64_t kvs_histogram_read(const struct kvs_histogram *, uint64_t buckets[KVS_BOUNDS + 1]); /* returns the sum */

#endif
