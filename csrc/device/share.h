/* The seam's second part, for devices that can share: memory and events for other processes, or other devices of this
 * process. Use the kvs_dev_* wrappers below, with the rules of device.h. A missing member is KVS_UNSUPPORTED. */
#ifndef KVS_SHARE_H
#define KVS_SHARE_H

#include "device/device.h"

/* A handle of an allocation or an event, valid in processes of this machine. */
struct kvs_handle {
  unsigned char bytes[64];
};

struct kvs_share_ops {
  /* Handles of allocations. A handle is valid while the allocation exists. Another process may open it, once at a time,
   * and gets the beginning of the allocation at an address of its own. `nbytes`: the least size of the allocation.
   * Closing waits for the device, as freeing does. */
  int (*memory_share)(struct kvs_device *, uint64_t ptr, struct kvs_handle *, struct kvs_error *);
  int (*memory_open)(struct kvs_device *, const struct kvs_handle *, uint64_t nbytes, uint64_t *ptr,
                     struct kvs_error *);
  int (*memory_close)(struct kvs_device *, uint64_t ptr, struct kvs_error *);

  /* Events that several processes use, without timing. Any of these processes may record the event; a wait waits for
   * the latest recording at the time of the call. The process that created the event keeps it while others use it.
   * event_open is for other processes than that one. Each destroys its own like any event. */
  int (*event_create_shared)(struct kvs_device *, kvs_event *, struct kvs_error *);
  int (*event_share)(struct kvs_device *, kvs_event, struct kvs_handle *, struct kvs_error *);
  int (*event_open)(struct kvs_device *, const struct kvs_handle *, kvs_event *, struct kvs_error *);

  /* Memory in chunks, mapped one by one into an address range (as torch's expandable segments are). Sizes and offsets
   * are multiples of the granularity. chunk_map takes a descriptor of another process's chunk, which stays the
   * caller's, or -1 for new shareable memory. The range may be used once it is fully mapped. chunk_query: KVS_REFUSED
   * if the memory is in no chunk. Unmapping does not wait for work. */
  int (*chunk_granularity)(struct kvs_device *, uint64_t *nbytes, struct kvs_error *);
  int (*range_reserve)(struct kvs_device *, uint64_t nbytes, uint64_t *ptr, struct kvs_error *);
  int (*range_free)(struct kvs_device *, uint64_t ptr, uint64_t nbytes, struct kvs_error *);
  int (*chunk_map)(struct kvs_device *, uint64_t at, uint64_t nbytes, int fd, struct kvs_error *);
  int (*chunk_unmap)(struct kvs_device *, uint64_t at, uint64_t nbytes, struct kvs_error *);
  int (*chunk_query)(struct kvs_device *, uint64_t address, uint64_t *base, uint64_t *nbytes, struct kvs_error *);
  int (*chunk_share)(struct kvs_device *, uint64_t address, int *fd, struct kvs_error *);

  /* Memory of another device of this process: *direct: kernels of this device can reach it. Enables peer access on the
   * first call. Copies always work: without peer access the driver stages them through the host. */
  int (*peer)(struct kvs_device *, const struct kvs_region *, bool *direct, struct kvs_error *);
  /* Wait for an event of another device of the same kind. (optional: as stream_wait) */
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
/* `other` may be the device itself. KVS_INVALID if the devices cannot wait for each other. */
int kvs_dev_stream_wait_foreign(struct kvs_device *, kvs_stream, struct kvs_device *other, kvs_event,
                                struct kvs_error *);
bool kvs_dev_can_wait_for(const struct kvs_device *, const struct kvs_device *other);

#endif
