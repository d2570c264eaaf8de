/* Memory copies within the process at memory bandwidth. */
#ifndef KVS_COPY_H
#define KVS_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Jobs that move at least this much in total use non-temporal stores. */
#define KVS_COPY_STREAMED_NBYTES ((uint64_t)4 << 20)

/* Copy between ranges that do not overlap. `streaming`: use non-temporal stores, which are faster if the whole job is
 * larger than the cache; call kvs_copy_fence() before signalling another thread. */
void kvs_copy_bytes(uint64_t dst, uint64_t src, uint64_t nbytes, bool streaming);
void kvs_copy_fence(void);

#endif
