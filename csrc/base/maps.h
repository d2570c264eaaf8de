/* Mapped ranges of this process's address space, from the kernel. */
#ifndef KVS_MAPS_H
#define KVS_MAPS_H

#include <stdbool.h>
#include <stdint.h>

struct kvs_mapping {
  uint64_t base, nbytes;
  bool readable, writable;
};

/* The mapping that contains `address`; false: not mapped, or no /proc. Any thread. About a microsecond from Linux 6.11
 * on; before, the time to read all of /proc/self/maps. */
bool kvs_mapping_find(uint64_t address, struct kvs_mapping *mapping);

/* A fork takes the lock of the look-up. Locks that are held over a look-up must be taken before it, so their own
 * handlers are registered after this call (pthread_atfork: the last registered runs first). */
void kvs_mapping_watch_fork(void);

/* The same by parsing the text only, for tests. */
bool kvs_mapping_parse(uint64_t address, struct kvs_mapping *mapping);

#endif
