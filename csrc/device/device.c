/* The wrappers of the seam: the only way to call a device.
 *
 * Each wrapper refuses in a forked child and on a lost device, applies a test's fault, makes the call, and notes a
 * loss, so implementations need not. Only the arguments differ, hence the macro below. */
#include "device/device.h"

#include <inttypes.h>

#include "device/faults.h"
#include "device/watch.h"

/* -- the gate -------------------------------------------------------------------------------------------------- */

static int refuse_lost(struct kvs_device *device, struct kvs_error *err) {
  const char *operation = atomic_load(&device->lost_in);
  return kvs_fail_driver(err, KVS_LOST, atomic_load(&device->lost), operation ? operation : "device",
                         "the device is lost and nothing can run on it any more: restart the process");
}

int kvs_dev_check(struct kvs_device *device, struct kvs_error *err) {
  if (kvs_dev_forked(device))
    return kvs_fail(
        err, KVS_FORKED,
        "this device was opened before fork(): a child process cannot use it; open the device in the child, "
        "or start the child with the 'spawn' method");
  if (atomic_load_explicit(&device->lost, memory_order_relaxed)) return refuse_lost(device, err);
  return KVS_OK;
}

int kvs_dev_enter(struct kvs_device *device, const char *operation, struct kvs_error *err) {
  int status = kvs_dev_check(device, err);
  if (status || !atomic_load_explicit(&device->faults, memory_order_relaxed)) return status;
  return kvs_dev_fault_call(device, operation, err);
}

int kvs_dev_leave(struct kvs_device *device, int status, const struct kvs_error *err) {
  int none = 0;
  if (status != KVS_LOST) return status;
  if (atomic_compare_exchange_strong(&device->lost, &none, err->code ? err->code : KVS_DRIVER_LAUNCH_FAILED))
    atomic_store(&device->lost_in, err->operation);
  return status;
}

/* `report` runs if the call succeeds. */
#define THROUGH_REPORTING(report, member, ...)                                                                         \
  do {                                                                                                                 \
    int status = kvs_dev_enter(device, #member, err);                                                                  \
    if (!status) status = device->ops->member(device, __VA_ARGS__);                                                    \
    if (!status) report;                                                                                               \
    return kvs_dev_leave(device, status, err);                                                                         \
  } while (0)

#define THROUGH(member, ...) THROUGH_REPORTING((void)0, member, __VA_ARGS__)

#define REPORT(call)                                                                                                   \
  do {                                                                                                                 \
    const struct kvs_watch *watching = atomic_load_explicit(&watch, memory_order_acquire);                             \
    if (watching) watching->call;                                                                                      \
  } while (0)

static _Atomic(const struct kvs_watch *) watch;

void kvs_dev_watch(const struct kvs_watch *watching) { atomic_store_explicit(&watch, watching, memory_order_release); }

void kvs_dev_close(struct kvs_device *device) {
  if (kvs_dev_forked(device)) return; /* the threads and the context belong to the parent */
  kvs_dev_faults_free(device);
  device->ops->close(device);
}

int kvs_dev_alloc(struct kvs_device *device, size_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  THROUGH(alloc, nbytes, ptr, err);
}

int kvs_dev_free(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) { THROUGH(free, ptr, err); }

int kvs_dev_host_alloc(struct kvs_device *device, size_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  THROUGH(host_alloc, nbytes, ptr, err);
}

int kvs_dev_host_free(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) { THROUGH(host_free, ptr, err); }

int kvs_dev_host_register(struct kvs_device *device, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  THROUGH(host_register, ptr, nbytes, err);
}

int kvs_dev_host_unregister(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) {
  THROUGH(host_unregister, ptr, err);
}

int kvs_dev_pointer_query(struct kvs_device *device, uint64_t ptr, struct kvs_region *region, struct kvs_error *err) {
  THROUGH(pointer_query, ptr, region, err);
}

int kvs_dev_stream_create(struct kvs_device *device, int priority, kvs_stream *stream, struct kvs_error *err) {
  THROUGH(stream_create, priority, stream, err);
}

int kvs_dev_stream_destroy(struct kvs_device *device, kvs_stream stream, struct kvs_error *err) {
  THROUGH(stream_destroy, stream, err);
}

int kvs_dev_stream_query(struct kvs_device *device, kvs_stream stream, struct kvs_error *err) {
  THROUGH_REPORTING(REPORT(idle(device, stream)), stream_query, stream, err);
}

int kvs_dev_stream_info(struct kvs_device *device, kvs_stream stream, struct kvs_stream_info *info,
                        struct kvs_error *err) {
  THROUGH(stream_info, stream, info, err);
}

int kvs_dev_synchronize(struct kvs_device *device, struct kvs_error *err) {
  THROUGH_REPORTING(REPORT(all_idle(device)), synchronize, err);
}

int kvs_dev_event_create(struct kvs_device *device, bool timing, kvs_event *event, struct kvs_error *err) {
  THROUGH(event_create, timing, event, err);
}

int kvs_dev_event_destroy(struct kvs_device *device, kvs_event event, struct kvs_error *err) {
  int status = kvs_dev_enter(device, "event_destroy", err);
  if (status) return kvs_dev_leave(device, status, err);
  REPORT(forget_event(device, event)); /* before the call: another thread may get the handle at once */
  return kvs_dev_leave(device, device->ops->event_destroy(device, event, err), err);
}

int kvs_dev_event_record(struct kvs_device *device, kvs_event event, kvs_stream stream, struct kvs_error *err) {
  THROUGH_REPORTING(REPORT(recorded(device, event, stream)), event_record, event, stream, err);
}

int kvs_dev_event_query(struct kvs_device *device, kvs_event event, struct kvs_error *err) {
  THROUGH_REPORTING(REPORT(reached(device, event)), event_query, event, err);
}

int kvs_dev_event_elapsed(struct kvs_device *device, kvs_event from, kvs_event to, uint64_t *ns,
                          struct kvs_error *err) {
  int status = kvs_dev_enter(device, "event_elapsed", err);
  if (!status) status = device->ops->event_elapsed(device, from, to, ns, err);
  if (!status) REPORT(reached(device, from));
  if (!status) REPORT(reached(device, to));
  return kvs_dev_leave(device, status, err);
}

int kvs_dev_stream_wait(struct kvs_device *device, kvs_stream stream, kvs_event event, struct kvs_error *err) {
  THROUGH_REPORTING(REPORT(waits(device, stream, event)), stream_wait, stream, event, err);
}

int kvs_dev_copy(struct kvs_device *device, uint64_t dst, uint64_t src, uint64_t nbytes, kvs_stream stream,
                 struct kvs_error *err) {
  THROUGH(copy, dst, src, nbytes, stream, err);
}

int kvs_dev_copy_batch(struct kvs_device *device, const struct kvs_copies *copies, size_t from, size_t to,
                       kvs_stream stream, struct kvs_error *err) {
  if (device->ops->copy_batch && device->info.batch) THROUGH(copy_batch, copies, from, to, stream, err);
  for (size_t i = from; i < to; i++) {
    int status = kvs_dev_copy(device, copies->dst[i], copies->src[i], copies->nbytes[i], stream, err);
    if (status) return status;
  }
  return KVS_OK;
}

int kvs_dev_copy_direct(struct kvs_device *device, const struct kvs_copies *copies, kvs_stream stream,
                        struct kvs_error *err) {
  if (!device->ops->copy_direct)
    return kvs_fail(err, KVS_UNSUPPORTED, "path 'direct' is for host devices; a %s device has 'dma' and 'kernel'",
                    device->ops->kind);
  THROUGH(copy_direct, copies, stream, err);
}

int kvs_dev_copy_rect(struct kvs_device *device, const struct kvs_rect *rect, kvs_stream stream,
                      struct kvs_error *err) {
  THROUGH(copy_rect, rect, stream, err);
}

int kvs_dev_gap(struct kvs_device *device, kvs_stream stream, struct kvs_error *err) {
  int status = kvs_dev_enter(device, "gap", err);
  if (!status && device->ops->gap) status = device->ops->gap(device, stream, err);
  return kvs_dev_leave(device, status, err);
}

int kvs_dev_fill(struct kvs_device *device, uint64_t dst, uint32_t word, size_t nwords, kvs_stream stream,
                 struct kvs_error *err) {
  THROUGH(fill, dst, word, nwords, stream, err);
}

int kvs_dev_launch(struct kvs_device *device, const struct kvs_launch *launch, kvs_stream stream,
                   struct kvs_error *err) {
  if (!device->info.kernels)
    return kvs_fail(err, KVS_UNSUPPORTED, "kernels are not available on this device: %s", device->info.kernels_note);
  THROUGH(launch, launch, stream, err);
}

int kvs_dev_write32(struct kvs_device *device, uint64_t ptr, uint32_t value, kvs_stream stream, struct kvs_error *err) {
  THROUGH(write32, ptr, value, stream, err);
}

int kvs_dev_wait32(struct kvs_device *device, uint64_t ptr, uint32_t value, kvs_stream stream, struct kvs_error *err) {
  THROUGH(wait32, ptr, value, stream, err);
}

int kvs_dev_call(struct kvs_device *device, void (*function)(void *arg), void *arg, kvs_stream stream,
                 struct kvs_error *err) {
  THROUGH(call, function, arg, stream, err);
}

int kvs_dev_bind(struct kvs_device *device, struct kvs_error *err) {
  int status = kvs_dev_enter(device, "bind", err);
  if (!status && device->ops->bind) status = device->ops->bind(device, err);
  return kvs_dev_leave(device, status, err);
}

void kvs_dev_unbind(struct kvs_device *device) {
  if (device->ops->unbind && !kvs_dev_forked(device)) device->ops->unbind(device);
}

int kvs_stream_ask(struct kvs_device *device, kvs_stream stream, const char *what, struct kvs_stream_info *info,
                   struct kvs_error *err) {
  int status = kvs_dev_stream_info(device, stream, info, err);
  if (status || !info->capturing) return status;
  return kvs_fail(err, KVS_CAPTURING,
                  "%s (0x%" PRIx64 ") is being captured into a graph: a transfer cannot be ordered with it", what,
                  stream);
}
