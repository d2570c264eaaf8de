/* What of this process's address space is mapped, asked of the kernel: ordinary memory has no other register. */
#ifndef KVS_HOST_MAPS_H
#define KVS_HOST_MAPS_H

#include <stdbool.h>
#include <stdint.h>

struct kvs_mapping {
  uint64_t base, nbytes;
  bool readable, writable;
};

/* The mapping that holds `address`; false if none does, or where there is no /proc. Any thread. About a microsecond
 * from Linux 6.11 on; before, the time to read all of /proc/self/maps. */
bool kvs_mapping_find(uint64_t address, struct kvs_mapping *mapping);

/* The same without the fast call, for tests of the way that older kernels go. */
bool kvs_mapping_parse(uint64_t address, struct kvs_mapping *mapping);

#endif
