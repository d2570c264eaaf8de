/* The struct of a host device. */
#ifndef KVS_HOST_STATE_H
#define KVS_HOST_STATE_H

#include "host/memory.h"
#include "host/ops.h"

struct host_device {
  struct kvs_device base;
  struct kvs_host_memory memory;
  struct kvs_host_queue queue;
};

static inline struct host_device *host_of(struct kvs_device *device) { return (struct host_device *)device; }

#endif
