/* Copying memory of this process at the speed of its memory. */
#ifndef KVS_HOST_COPY_H
#define KVS_HOST_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Work that moves at least so much in all is copied past the cache. */
#define KVS_HOST_STREAMING_NBYTES ((uint64_t)4 << 20)

/* Copy ranges that do not overlap. `streaming`: write past the cache, which is faster when the whole job is larger than
 * it; then kvs_host_copy_fence() has to follow before another thread is told. */
void kvs_host_copy(uint64_t dst, uint64_t src, uint64_t nbytes, bool streaming);
void kvs_host_copy_fence(void);

#endif
