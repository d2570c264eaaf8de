/* Address ranges into which chunks of memory are mapped: memory that an engine allocates to share, and memory that it
 * opens from another process. For the core's own files only. */
#ifndef KVS_RANGE_H
#define KVS_RANGE_H

#include "lanes/state.h"

struct kvs_range;

/* New memory in shareable chunks; kvs_engine_free() frees it. */
int kvs_range_alloc(struct kvs_engine *, uint64_t nbytes, uint64_t *ptr, struct kvs_error *);

/* Reserve a range. Fill it from the beginning with chunks by their descriptors, which stay the caller's. */
int kvs_range_new(struct kvs_engine *, uint64_t nbytes, struct kvs_range **, struct kvs_error *);
int kvs_range_add(struct kvs_range *, uint64_t nbytes, int fd, struct kvs_error *); /* fd -1: new memory */
int kvs_range_finish(struct kvs_range *, uint64_t *ptr,
                     struct kvs_error *); /* the range is full and gets its address */
void kvs_range_drop(struct kvs_range *);  /* drop an unfinished range */

bool kvs_range_known(struct kvs_engine *, uint64_t ptr);
/* Unmap the range that begins at ptr. KVS_RANGE: there is none. */
int kvs_range_free(struct kvs_engine *, uint64_t ptr, struct kvs_error *);
void kvs_ranges_destroy(struct kvs_engine *);

/* The chunks that hold [address, address + nbytes): where the first begins, how many there are, and their bytes. */
struct kvs_chunks {
  uint64_t base, nbytes, count;
};
int kvs_range_chunks(struct kvs_engine *, uint64_t address, uint64_t nbytes, struct kvs_chunks *, struct kvs_error *);

#endif
