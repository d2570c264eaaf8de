/* The wrappers of share.h, as device.c has those of device.h. */
#include "share.h"

#include "hooks.h"

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
