/* Which blocks came and went, for engines that publish what they hold. A list of bounded length; if it is not taken in
 * time all of it is dropped and counted, because a list with gaps would be wrong. */
#ifndef KVS_FILE_EVENTS_H
#define KVS_FILE_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvs_file_store;
struct kvs_file_entry;

struct kvs_file_events { /* guarded by store->lock */
  uint8_t *data;         /* of each: whether the block is there, bytes of the key (2), the key */
  size_t nbytes, capacity, count;
  uint64_t lost;
};

void kvs_file_event_locked(struct kvs_file_store *, const struct kvs_file_entry *, bool there);
/* Room for all of them. */
void kvs_file_events_copy(const struct kvs_file_events *, uint8_t *keys, size_t *ends, bool *there);

#endif
