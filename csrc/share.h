/* The seam's second part: memory and events that cross to other processes. A device that fills it in shares; all of
 * it is reached through the kvs_dev_* wrappers here, under the rules of device.h, and what a device lacks is
 * KVS_UNSUPPORTED. */
#ifndef KVS_SHARE_H
#define KVS_SHARE_H

#include "device.h"

/* Stands for a whole allocation, or an event, in processes of this machine. */
struct kvs_handle {
  unsigned char bytes[64];
};

struct kvs_share_ops {
  /* Handles of allocations. One is good as long as the allocation is there. It is opened in other processes, once at a
   * time each, and gives the allocation's beginning at an address of theirs. `nbytes`: what the allocation must have.
   * Closing waits for the device, as freeing does. */
  int (*memory_share)(struct kvs_device *, uint64_t ptr, struct kvs_handle *, struct kvs_error *);
  int (*memory_open)(struct kvs_device *, const struct kvs_handle *, uint64_t nbytes, uint64_t *ptr,
                     struct kvs_error *);
  int (*memory_close)(struct kvs_device *, uint64_t ptr, struct kvs_error *);

  /* Events, without timing. One that was made to be shared is, in any process that opened it, an event like others:
   * each may record it, and a wait is for the recording that is the latest by then. Its maker keeps it as long as
   * others use it. Opened in other processes than the maker's; destroyed like others. */
  int (*event_create_shared)(struct kvs_device *, kvs_event *, struct kvs_error *);
  int (*event_share)(struct kvs_device *, kvs_event, struct kvs_handle *, struct kvs_error *);
  int (*event_open)(struct kvs_device *, const struct kvs_handle *, kvs_event *, struct kvs_error *);
};

int kvs_dev_memory_share(struct kvs_device *, uint64_t ptr, struct kvs_handle *, struct kvs_error *);
int kvs_dev_memory_open(struct kvs_device *, const struct kvs_handle *, uint64_t nbytes, uint64_t *ptr,
                        struct kvs_error *);
int kvs_dev_memory_close(struct kvs_device *, uint64_t ptr, struct kvs_error *);
int kvs_dev_event_create_shared(struct kvs_device *, kvs_event *, struct kvs_error *);
int kvs_dev_event_share(struct kvs_device *, kvs_event, struct kvs_handle *, struct kvs_error *);
int kvs_dev_event_open(struct kvs_device *, const struct kvs_handle *, kvs_event *, struct kvs_error *);

#endif
