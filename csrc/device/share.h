/* The seam's second part: memory and events that cross to other processes, or to other devices of this one. A device
 * that fills it in shares; all of it is reached through the kvs_dev_* wrappers here, under the rules of device.h, and
 * what a device lacks is KVS_UNSUPPORTED. */
#ifndef KVS_SHARE_H
#define KVS_SHARE_H

#include "device/device.h"

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

  /* Memory in chunks, mapped one by one into a range of addresses (torch's expandable segments are made so). Sizes and
   * places are multiples of the granularity. Mapping takes a descriptor of another process's chunk, which stays the
   * caller's, or -1 for new memory, which can be shared; the range is of use once all of it is mapped. A query answers
   * KVS_REFUSED for memory that is in no chunk. Unmapping does not wait for work. */
  int (*chunk_granularity)(struct kvs_device *, uint64_t *nbytes, struct kvs_error *);
  int (*range_reserve)(struct kvs_device *, uint64_t nbytes, uint64_t *ptr, struct kvs_error *);
  int (*range_free)(struct kvs_device *, uint64_t ptr, uint64_t nbytes, struct kvs_error *);
  int (*chunk_map)(struct kvs_device *, uint64_t at, uint64_t nbytes, int fd, struct kvs_error *);
  int (*chunk_unmap)(struct kvs_device *, uint64_t at, uint64_t nbytes, struct kvs_error *);
  int (*chunk_query)(struct kvs_device *, uint64_t address, uint64_t *base, uint64_t *nbytes, struct kvs_error *);
  int (*chunk_share)(struct kvs_device *, uint64_t address, int *fd, struct kvs_error *);

  /* Another device's memory in this process: can kernels of this one reach it? That is made so, once. Copies always
   * can: where there is no direct way they are staged through the host, by the driver. */
  int (*peer)(struct kvs_device *, const struct kvs_region *, bool *direct, struct kvs_error *);
  /* Another device's event, of the same kind of device. (optional: as stream_wait) */
  int (*stream_wait_foreign)(struct kvs_device *, kvs_stream, struct kvs_device *other, kvs_event, struct kvs_error *);
};

int kvs_dev_memory_share(struct kvs_device *, uint64_t ptr, struct kvs_handle *, struct kvs_error *);
int kvs_dev_memory_open(struct kvs_device *, const struct kvs_handle *, uint64_t nbytes, uint64_t *ptr,
                        struct kvs_error *);
int kvs_dev_memory_close(struct kvs_device *, uint64_t ptr, struct kvs_error *);
int kvs_dev_event_create_shared(struct kvs_device *, kvs_event *, struct kvs_error *);
int kvs_dev_event_share(struct kvs_device *, kvs_event, struct kvs_handle *, struct kvs_error *);
int kvs_dev_event_open(struct kvs_device *, const struct kvs_handle *, kvs_event *, struct kvs_error *);
int kvs_dev_chunk_granularity(struct kvs_device *, uint64_t *nbytes, struct kvs_error *);
int kvs_dev_range_reserve(struct kvs_device *, uint64_t nbytes, uint64_t *ptr, struct kvs_error *);
int kvs_dev_range_free(struct kvs_device *, uint64_t ptr, uint64_t nbytes, struct kvs_error *);
int kvs_dev_chunk_map(struct kvs_device *, uint64_t at, uint64_t nbytes, int fd, struct kvs_error *);
int kvs_dev_chunk_unmap(struct kvs_device *, uint64_t at, uint64_t nbytes, struct kvs_error *);
int kvs_dev_chunk_query(struct kvs_device *, uint64_t address, uint64_t *base, uint64_t *nbytes, struct kvs_error *);
int kvs_dev_chunk_share(struct kvs_device *, uint64_t address, int *fd, struct kvs_error *);
int kvs_dev_peer(struct kvs_device *, const struct kvs_region *, bool *direct, struct kvs_error *);
/* Also where `other` is the device itself. KVS_INVALID between devices that cannot. */
int kvs_dev_stream_wait_foreign(struct kvs_device *, kvs_stream, struct kvs_device *other, kvs_event,
                                struct kvs_error *);
bool kvs_dev_can_wait_for(const struct kvs_device *, const struct kvs_device *other);

#endif
