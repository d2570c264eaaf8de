/* Opens a host device; and functions for tests, beyond device.h. */
#ifndef KVS_DEVICE_HOST_H
#define KVS_DEVICE_HOST_H

#include "device/device.h"

/* Any ordinal; a seed other than 0 makes it deterministic. */
int kvs_device_host_open(int ordinal, uint64_t seed, struct kvs_device **, struct kvs_error *);

/* Deterministic devices: run up to `steps` steps of queued work, chosen by the seed. Returns the number of steps run;
 * fewer than `steps`: nothing was runnable. A step is one copy of a batch, one event or one kernel. -1 on a threaded or
 * CUDA device. */
int64_t kvs_host_step(struct kvs_device *, int64_t steps);

/* A hash of everything that ran, in order: equal seeds and equal calls give equal hashes. */
uint64_t kvs_host_trace(struct kvs_device *);

/* Set whether kernels of this device can access the memory of host:<ordinal> (default: yes). Copies always can. */
int kvs_host_set_peer(struct kvs_device *, int ordinal, bool reached, struct kvs_error *);

/* Begin or end a simulated graph capture: nothing is recorded, but work on the stream is refused, as by a driver. */
int kvs_host_capture(struct kvs_device *, kvs_stream, bool begin, struct kvs_error *);

#endif
