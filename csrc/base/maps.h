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

/* The same by parsing the text only, for tests. */
bool kvs_mapping_parse(uint64_t address, struct kvs_mapping *mapping);

#endif
