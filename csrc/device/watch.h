/* What the wrappers of device.c report, for the race checker: kvs_dev_watch(). */
#ifndef KVS_DEVICE_WATCH_H
#define KVS_DEVICE_WATCH_H

#include "device/device.h"

/* Callbacks about order, for the race checker. Called after the device call succeeded (forget_event: before the call).
 * One watcher in the process, NULL for none; set at any time. */
struct kvs_watch {
  void (*recorded)(struct kvs_device *, kvs_event, kvs_stream);
  void (*waits)(struct kvs_device *, kvs_stream, kvs_event); /* later work of the stream comes after the event */
  void (*reached)(struct kvs_device *, kvs_event);           /* the host saw the event reached */
  void (*idle)(struct kvs_device *, kvs_stream);             /* the host saw the stream idle */
  void (*all_idle)(struct kvs_device *);
  void (*forget_event)(struct kvs_device *, kvs_event); /* the event is destroyed: its handle may be reused */
};

#endif
