/* Parts of a host device, for host/device.c and for host/share.c, which implements share.h. */
#ifndef KVS_HOST_PARTS_H
#define KVS_HOST_PARTS_H

#include "device/share.h"
#include "host/memory.h"
#include "host/queue.h"

struct host_device {
  struct kvs_device base;
  struct kvs_host_memory memory;
  struct kvs_host_queue queue;
};

static inline struct host_device *host_of(struct kvs_device *device) { return (struct host_device *)device; }

extern const struct kvs_share_ops kvs_host_share_ops;

/* share.c */
/* Equal for all processes that see this ordinal, until reboot. A deterministic device has a UUID of its own seed. */
void kvs_host_uuid(unsigned char uuid[16], int ordinal, uint64_t seed);

#endif
