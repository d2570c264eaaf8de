/* What tests may ask of a host device beyond the seam. */
#ifndef KVS_DEVICE_HOST_H
#define KVS_DEVICE_HOST_H

#include "device/device.h"

/* Deterministic devices: run up to `steps` steps of queued work, chosen by the seed; returns how many were run (less:
 * nothing could run). A step is one copy of a batch, one event, one kernel. -1 on a threaded or CUDA device. */
int64_t kvs_host_step(struct kvs_device *, int64_t steps);

/* A number that is a function of everything that ran so far and in what order: equal seeds and equal calls give equal
 * numbers. */
uint64_t kvs_host_trace(struct kvs_device *);

/* Whether kernels of this device reach the memory of host:<ordinal>: at first they do. Copies do in any case. */
int kvs_host_set_peer(struct kvs_device *, int ordinal, bool reached, struct kvs_error *);

/* Begin or end a (modelled) graph capture on a stream: records nothing, but work on it is refused as a driver would. */
int kvs_host_capture(struct kvs_device *, kvs_stream, bool begin, struct kvs_error *);

#endif
