/* A host device and other processes. */
#ifndef KVS_HOST_SHARE_H
#define KVS_HOST_SHARE_H

#include "device/share.h"

extern const struct kvs_share_ops kvs_host_share_ops;

/* Equal for all processes that see this ordinal, until reboot. A deterministic device has a UUID of its own seed. */
void kvs_host_uuid(unsigned char uuid[16], int ordinal, uint64_t seed);

#endif
