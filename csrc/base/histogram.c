#include "base/histogram.h"

#define DECADE(unit) (unit), 2 * (unit), 5 * (unit)
const uint64_t kvs_time_bounds[KVS_BOUNDS] = {
    DECADE(10000),         DECADE(100000),        DECADE(1000000),
    DECADE(10000000),      DECADE(100000000),     DECADE(UINT64_C(1000000000)),
    UINT64_C(10000000000), UINT64_C(20000000000),
};

#define POWER(n) UINT64_C(1) << (n)
const uint64_t kvs_size_bounds[KVS_BOUNDS] = {
    POWER(12), POWER(13), POWER(14), POWER(15), POWER(16), POWER(17), POWER(18), POWER(19), POWER(20), POWER(21),
    POWER(22), POWER(23), POWER(24), POWER(25), POWER(26), POWER(27), POWER(28), POWER(29), POWER(30), POWER(31),
};

void kvs_histogram_add(struct kvs_histogram *histogram, const uint64_t bounds[KVS_BOUNDS], uint64_t value) {
  unsigned i = 0;
  while (i < KVS_BOUNDS && value > bounds[i]) i++;
  atomic_fetch_add_explicit(&histogram->buckets[i], 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&histogram->sum, value, memory_order_relaxed);
}

uint64_t kvs_histogram_read(const struct kvs_histogram *histogram, uint64_t buckets[KVS_BOUNDS + 1]) {
  for (unsigned i = 0; i <= KVS_BOUNDS; i++)
    buckets[i] = atomic_load_explicit(&histogram->buckets[i], memory_order_relaxed);
  return atomic_load_explicit(&histogram->sum, memory_order_relaxed);
}
