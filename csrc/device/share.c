/* The wrappers of share.h, as device.c has those of device.h. */
#include "device/share.h"

#include <string.h>

#define THROUGH(member, ...)                                                                                           \
  do {                                                                                                                 \
    if (!device->ops->share || !device->ops->share->member)                                                            \
      return kvs_fail(err, KVS_UNSUPPORTED, "this device shares nothing with other processes: it has no " #member);    \
    int status = kvs_dev_enter(device, #member, err);                                                                  \
    if (!status) status = device->ops->share->member(device, __VA_ARGS__);                                             \
    return kvs_dev_leave(device, status, err);                                                                         \
  } while (0)

int kvs_dev_memory_share(struct kvs_device *device, uint64_t ptr, struct kvs_handle *handle, struct kvs_error *err) {
  THROUGH(memory_share, ptr, handle, err);
}

int kvs_dev_memory_open(struct kvs_device *device, const struct kvs_handle *handle, uint64_t nbytes, uint64_t *ptr,
                        struct kvs_error *err) {
  THROUGH(memory_open, handle, nbytes, ptr, err);
}

int kvs_dev_memory_close(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) {
  THROUGH(memory_close, ptr, err);
}

int kvs_dev_event_create_shared(struct kvs_device *device, kvs_event *event, struct kvs_error *err) {
  THROUGH(event_create_shared, event, err);
}

int kvs_dev_event_share(struct kvs_device *device, kvs_event event, struct kvs_handle *handle, struct kvs_error *err) {
  THROUGH(event_share, event, handle, err);
}

int kvs_dev_event_open(struct kvs_device *device, const struct kvs_handle *handle, kvs_event *event,
                       struct kvs_error *err) {
  THROUGH(event_open, handle, event, err);
}

int kvs_dev_chunk_granularity(struct kvs_device *device, uint64_t *nbytes, struct kvs_error *err) {
  THROUGH(chunk_granularity, nbytes, err);
}

int kvs_dev_range_reserve(struct kvs_device *device, uint64_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  THROUGH(range_reserve, nbytes, ptr, err);
}

int kvs_dev_range_free(struct kvs_device *device, uint64_t ptr, uint64_t nbytes, struct kvs_error *err) {
  THROUGH(range_free, ptr, nbytes, err);
}

int kvs_dev_chunk_map(struct kvs_device *device, uint64_t at, uint64_t nbytes, int fd, struct kvs_error *err) {
  THROUGH(chunk_map, at, nbytes, fd, err);
}

int kvs_dev_chunk_unmap(struct kvs_device *device, uint64_t at, uint64_t nbytes, struct kvs_error *err) {
  THROUGH(chunk_unmap, at, nbytes, err);
}

int kvs_dev_chunk_query(struct kvs_device *device, uint64_t address, uint64_t *base, uint64_t *nbytes,
                        struct kvs_error *err) {
  THROUGH(chunk_query, address, base, nbytes, err);
}

int kvs_dev_chunk_share(struct kvs_device *device, uint64_t address, int *fd, struct kvs_error *err) {
  THROUGH(chunk_share, address, fd, err);
}

int kvs_dev_peer(struct kvs_device *device, const struct kvs_region *region, bool *direct, struct kvs_error *err) {
  THROUGH(peer, region, direct, err);
}

/* The work of a deterministic device runs only inside calls on that device. */
bool kvs_dev_can_wait_for(const struct kvs_device *device, const struct kvs_device *other) {
  if (device == other) return true;
  return strcmp(device->ops->kind, other->ops->kind) == 0 && !device->stepped && !other->stepped;
}

int kvs_dev_stream_wait_foreign(struct kvs_device *device, kvs_stream stream, struct kvs_device *other, kvs_event event,
                                struct kvs_error *err) {
  if (!kvs_dev_can_wait_for(device, other))
    return kvs_fail(err, KVS_INVALID, "a %s device%s cannot wait for an event of a %s device%s: wait for it first",
                    device->ops->kind, device->stepped ? " that is deterministic" : "", other->ops->kind,
                    other->stepped ? " that is deterministic" : "");
  if (kvs_dev_check(other, err)) return err->status;
  if (device == other || !device->ops->share || !device->ops->share->stream_wait_foreign)
    return kvs_dev_stream_wait(device, stream, event, err);
  THROUGH(stream_wait_foreign, stream, other, event, err);
}
