/* A GPU behind device.h, through the driver API alone.
 *
 * Every function is one driver call in a scope (scope.h). There are no extra error checks: the call that reports a
 * fault of earlier work returns KVS_LOST (kvs_cuda_status), and the wrappers in device/device.c record it. */
#include "cuda/device.h"

#include <stdlib.h>

#include "cuda/info.h"
#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "cuda/scope.h"
#include "cuda/share.h"

/* Larger batches have crashed drivers; at this size the fixed cost of a call is negligible. */
enum { BATCH_MAX = 8192 };

static int stream_create(struct kvs_device *device, int priority, kvs_stream *stream, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  kvs_cu_stream made = NULL;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuStreamCreateWithPriority(&made, KVS_CU_STREAM_NON_BLOCKING, priority);
  status = kvs_cuda_leave(&scope, code, "cuStreamCreateWithPriority", err);
  if (status == KVS_OK) *stream = (uintptr_t)made;
  return status;
}

static int stream_destroy(struct kvs_device *device, kvs_stream stream, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  return kvs_cuda_leave(&scope, scope.cu->cuStreamDestroy(kvs_cuda_stream(stream)), "cuStreamDestroy", err);
}

static int stream_query(struct kvs_device *device, kvs_stream stream, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  return kvs_cuda_leave(&scope, scope.cu->cuStreamQuery(kvs_cuda_stream(stream)), "cuStreamQuery", err);
}

static int stream_info(struct kvs_device *device, kvs_stream stream, struct kvs_stream_info *info,
                       struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int capture = KVS_CU_CAPTURE_STATUS_NONE;
  unsigned long long id = stream == 0 ? KVS_STREAM_LEGACY : stream; /* before CUDA 12 a stream has no id */
  const char *operation = "cuStreamIsCapturing";
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuStreamIsCapturing(kvs_cuda_stream(stream), &capture);
  bool implicit = code == KVS_CU_CAPTURE_IMPLICIT; /* legacy stream, while a blocking stream is captured */
  if (implicit) code = KVS_CU_SUCCESS;
  bool capturing = implicit || capture != KVS_CU_CAPTURE_STATUS_NONE;
  if (code == KVS_CU_SUCCESS && !capturing && scope.cu->cuStreamGetId) { /* cuStreamGetId would invalidate a capture */
    operation = "cuStreamGetId";
    code = scope.cu->cuStreamGetId(kvs_cuda_stream(stream), &id);
  }
  status = kvs_cuda_leave(&scope, code, operation, err);
  if (status == KVS_OK) *info = (struct kvs_stream_info){id, capturing};
  return status;
}

static int synchronize(struct kvs_device *device, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  return kvs_cuda_leave(&scope, scope.cu->cuCtxSynchronize(), "cuCtxSynchronize", err);
}

static int event_create(struct kvs_device *device, bool timing, kvs_event *event, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  kvs_cu_event made = NULL;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuEventCreate(&made, timing ? KVS_CU_EVENT_DEFAULT : KVS_CU_EVENT_DISABLE_TIMING);
  status = kvs_cuda_leave(&scope, code, "cuEventCreate", err);
  if (status == KVS_OK) *event = (uintptr_t)made;
  return status;
}

static int event_destroy(struct kvs_device *device, kvs_event event, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  return kvs_cuda_leave(&scope, scope.cu->cuEventDestroy(kvs_cuda_event(event)), "cuEventDestroy", err);
}

static int event_record(struct kvs_device *device, kvs_event event, kvs_stream stream, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuEventRecord(kvs_cuda_event(event), kvs_cuda_stream(stream));
  return kvs_cuda_leave(&scope, code, "cuEventRecord", err);
}

static int event_query(struct kvs_device *device, kvs_event event, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  return kvs_cuda_leave(&scope, scope.cu->cuEventQuery(kvs_cuda_event(event)), "cuEventQuery", err);
}

static int event_elapsed(struct kvs_device *device, kvs_event from, kvs_event to, uint64_t *ns, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  float ms = 0;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuEventElapsedTime(&ms, kvs_cuda_event(from), kvs_cuda_event(to));
  status = kvs_cuda_leave(&scope, code, "cuEventElapsedTime", err);
  if (status == KVS_OK) *ns = ms > 0 ? (uint64_t)((double)ms * 1e6) : 0;
  return status;
}

static int stream_wait(struct kvs_device *device, kvs_stream stream, kvs_event event, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuStreamWaitEvent(kvs_cuda_stream(stream), kvs_cuda_event(event), 0);
  return kvs_cuda_leave(&scope, code, "cuStreamWaitEvent", err);
}

static int copy(struct kvs_device *device, uint64_t dst, uint64_t src, uint64_t nbytes, kvs_stream stream,
                struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuMemcpyAsync(dst, src, nbytes, kvs_cuda_stream(stream));
  return kvs_cuda_leave(&scope, code, "cuMemcpyAsync", err);
}

/* The lists are passed to the driver unchanged: uint64_t, CUdeviceptr (unsigned long long) and size_t are the same 8
 * bytes. The driver only reads them, during the call, although its prototype has no const. */
static int copy_some(const struct kvs_cuda_driver *cu, const struct kvs_copies *copies, size_t from, size_t count,
                     kvs_stream stream) {
  struct kvs_cu_copy_attributes attributes = {.source_order = KVS_CU_SOURCE_ORDER_STREAM};
  size_t first = 0, failed = 0; /* one attribute applies to all copies from index 0 */
  kvs_cu_deviceptr *dst = (kvs_cu_deviceptr *)(void *)(copies->dst + from);
  kvs_cu_deviceptr *src = (kvs_cu_deviceptr *)(void *)(copies->src + from);
  size_t *nbytes = (size_t *)(void *)(copies->nbytes + from);
  _Static_assert(sizeof(kvs_cu_deviceptr) == 8 && sizeof(size_t) == 8, "the lists of kvs_copies");
  if (cu->cuMemcpyBatchAsync)
    return cu->cuMemcpyBatchAsync(dst, src, nbytes, count, &attributes, &first, 1, kvs_cuda_stream(stream));
  return cu->cuMemcpyBatchAsync_12080(dst, src, nbytes, count, &attributes, &first, 1, &failed,
                                      kvs_cuda_stream(stream));
}

static int copy_batch(struct kvs_device *device, const struct kvs_copies *copies, size_t from, size_t to,
                      kvs_stream stream, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int code = KVS_CU_SUCCESS;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  while (from < to && code == KVS_CU_SUCCESS) {
    size_t count = to - from < BATCH_MAX ? to - from : BATCH_MAX;
    code = copy_some(scope.cu, copies, from, count, stream);
    from += count;
  }
  return kvs_cuda_leave(&scope, code, "cuMemcpyBatchAsync", err);
}

static int copy_2d(const struct kvs_cuda_driver *cu, const struct kvs_rect *rect, kvs_stream stream) {
  const struct kvs_cu_copy_2d box = {
      .src_memory = KVS_CU_MEMORY_UNIFIED,
      .src_device = rect->src,
      .src_pitch = rect->src_pitch,
      .dst_memory = KVS_CU_MEMORY_UNIFIED,
      .dst_device = rect->dst,
      .dst_pitch = rect->dst_pitch,
      .width = rect->width,
      .height = rect->height,
  };
  return cu->cuMemcpy2DAsync(&box, kvs_cuda_stream(stream));
}

static int copy_3d(const struct kvs_cuda_driver *cu, const struct kvs_rect *rect, kvs_stream stream) {
  const struct kvs_cu_copy_3d box = {
      .src_memory = KVS_CU_MEMORY_UNIFIED,
      .src_device = rect->src,
      .src_pitch = rect->src_pitch,
      .src_height = rect->src_height,
      .dst_memory = KVS_CU_MEMORY_UNIFIED,
      .dst_device = rect->dst,
      .dst_pitch = rect->dst_pitch,
      .dst_height = rect->dst_height,
      .width = rect->width,
      .height = rect->height,
      .depth = rect->depth,
  };
  return cu->cuMemcpy3DAsync(&box, kvs_cuda_stream(stream));
}

static int copy_rect(struct kvs_device *device, const struct kvs_rect *rect, kvs_stream stream, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  if (rect->depth == 1) return kvs_cuda_leave(&scope, copy_2d(scope.cu, rect, stream), "cuMemcpy2DAsync", err);
  return kvs_cuda_leave(&scope, copy_3d(scope.cu, rect, stream), "cuMemcpy3DAsync", err);
}

static int fill(struct kvs_device *device, uint64_t dst, uint32_t word, size_t nwords, kvs_stream stream,
                struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuMemsetD32Async(dst, word, nwords, kvs_cuda_stream(stream));
  return kvs_cuda_leave(&scope, code, "cuMemsetD32Async", err);
}

static int write32(struct kvs_device *device, uint64_t ptr, uint32_t value, kvs_stream stream, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  if (!device->info.memops) return kvs_fail(err, KVS_UNSUPPORTED, "this driver has no stream memory operations");
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuStreamWriteValue32(kvs_cuda_stream(stream), ptr, value, KVS_CU_WRITE_VALUE_DEFAULT);
  return kvs_cuda_leave(&scope, code, "cuStreamWriteValue32", err);
}

static int wait32(struct kvs_device *device, uint64_t ptr, uint32_t value, kvs_stream stream, struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  if (!device->info.memops) return kvs_fail(err, KVS_UNSUPPORTED, "this driver has no stream memory operations");
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuStreamWaitValue32(kvs_cuda_stream(stream), ptr, value, KVS_CU_WAIT_VALUE_GEQ);
  return kvs_cuda_leave(&scope, code, "cuStreamWaitValue32", err);
}

/* Measured, H200 (benchmarks/small_copies.cu): the copy engine goes on with another stream when the one that it serves
 * waits for a word of memory, writes one behind a barrier, or launches a kernel; not at the end of a call or an event.
 * The wait takes the least time. It never blocks: the word is 1, and the wait is for 0 or more. */
static int gap(struct kvs_device *base, kvs_stream stream, struct kvs_error *err) {
  const struct kvs_cuda_device *device = (const struct kvs_cuda_device *)base;
  return base->info.memops ? wait32(base, device->scratch, 0, stream, err) : KVS_OK;
}

static int call(struct kvs_device *device, void (*function)(void *arg), void *arg, kvs_stream stream,
                struct kvs_error *err) {
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, device, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuLaunchHostFunc(kvs_cuda_stream(stream), function, arg);
  return kvs_cuda_leave(&scope, code, "cuLaunchHostFunc", err);
}

/* Tests stream memory operations by using them: on some drivers the device attributes deny them although they work. The
 * word is freed at close, because freeing device memory waits for the whole device. */
static bool probe_memops(struct kvs_cuda_device *device) {
  const struct kvs_cuda_driver *cu = device->cu;
  kvs_cu_stream stream = NULL;
  if (!cu->cuStreamWriteValue32 || !cu->cuStreamWaitValue32) return false;
  if (cu->cuMemAlloc(&device->scratch, 256) != KVS_CU_SUCCESS) {
    device->scratch = 0;
    return false;
  }
  if (cu->cuStreamCreateWithPriority(&stream, KVS_CU_STREAM_NON_BLOCKING, 0) != KVS_CU_SUCCESS) return false;
  bool works = cu->cuStreamWriteValue32(stream, device->scratch, 1, KVS_CU_WRITE_VALUE_DEFAULT) == KVS_CU_SUCCESS &&
               cu->cuStreamWaitValue32(stream, device->scratch, 1, KVS_CU_WAIT_VALUE_GEQ) == KVS_CU_SUCCESS;
  return cu->cuStreamDestroy(stream) == KVS_CU_SUCCESS && works;
}

/* Results are ignored: the device may be lost, and closing must go on. */
static void close_device(struct kvs_device *base) {
  struct kvs_cuda_device *device = (struct kvs_cuda_device *)base;
  struct kvs_cuda_scope scope;
  struct kvs_error ignored;
  if (kvs_cuda_enter(&scope, base, &ignored) == KVS_OK) {
    kvs_cuda_kernels_unload(device);
    if (device->scratch) (void)device->cu->cuMemFree(device->scratch);
    (void)kvs_cuda_leave(&scope, KVS_CU_SUCCESS, "cuCtxPopCurrent", &ignored);
  }
  (void)device->cu->cuDevicePrimaryCtxRelease(device->handle);
  free(device);
}

static int bind(struct kvs_device *device, struct kvs_error *err) {
  const struct kvs_cuda_device *self = (const struct kvs_cuda_device *)device;
  return kvs_cuda_result(self->cu, self->cu->cuCtxPushCurrent(self->context), "cuCtxPushCurrent", err);
}

static void unbind(struct kvs_device *device) {
  kvs_cu_context popped = NULL;
  (void)((const struct kvs_cuda_device *)device)->cu->cuCtxPopCurrent(&popped);
}

static const struct kvs_device_ops cuda_ops = {
    .kind = "cuda",
    .close = close_device,
    .alloc = kvs_cuda_alloc,
    .free = kvs_cuda_free,
    .host_alloc = kvs_cuda_host_alloc,
    .host_free = kvs_cuda_host_free,
    .host_register = kvs_cuda_host_register,
    .host_unregister = kvs_cuda_host_unregister,
    .pointer_query = kvs_cuda_pointer_query,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_query = stream_query,
    .stream_info = stream_info,
    .synchronize = synchronize,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_query = event_query,
    .event_elapsed = event_elapsed,
    .stream_wait = stream_wait,
    .copy = copy,
    .copy_batch = copy_batch,
    .copy_direct = NULL,
    .copy_rect = copy_rect,
    .fill = fill,
    .launch = kvs_cuda_launch,
    .gap = gap,
    .write32 = write32,
    .wait32 = wait32,
    .call = call,
    .bind = bind,
    .unbind = unbind,
    .share = &kvs_cuda_share_ops,
};

/* Queries that need the context, and allocations that must precede work. */
static int prepare(struct kvs_cuda_device *device, struct kvs_error *err) {
  struct kvs_device_info *info = &device->base.info;
  struct kvs_cuda_scope scope;
  int status = kvs_cuda_enter(&scope, &device->base, err);
  if (status != KVS_OK) return status;
  int code = scope.cu->cuCtxGetStreamPriorityRange(&info->priority_low, &info->priority_high);
  if (code == KVS_CU_SUCCESS) {
    info->memops = probe_memops(device);
    kvs_cuda_kernels_load(device);
  }
  return kvs_cuda_leave(&scope, code, "cuCtxGetStreamPriorityRange", err);
}

static int check_unified(const struct kvs_cuda_device *device, struct kvs_error *err) {
  int unified = 0;
  int code = device->cu->cuDeviceGetAttribute(&unified, KVS_CU_DEVICE_UNIFIED_ADDRESSING, device->handle);
  if (code != KVS_CU_SUCCESS) return kvs_cuda_result(device->cu, code, "cuDeviceGetAttribute", err);
  if (!unified) return kvs_fail(err, KVS_UNSUPPORTED, "%s has no unified addresses", device->base.info.name);
  return KVS_OK;
}

int kvs_device_cuda_open(int ordinal, struct kvs_device **opened, struct kvs_error *err) {
  const struct kvs_cuda_driver *cu = kvs_cuda_driver_get(err);
  if (!cu) return err->status;
  struct kvs_cuda_device *device = calloc(1, sizeof *device);
  if (!device) return kvs_fail(err, KVS_NOMEM, "out of memory");
  device->base.ops = &cuda_ops;
  device->base.ordinal = ordinal;
  device->base.fork_generation = kvs_fork_generation();
  device->cu = cu;
  int status = kvs_cuda_device_get(cu, ordinal, &device->handle, err);
  if (status == KVS_OK) status = kvs_cuda_info(ordinal, &device->base.info, err);
  if (status == KVS_OK) status = check_unified(device, err);
  if (status == KVS_OK)
    status = kvs_cuda_result(cu, cu->cuDevicePrimaryCtxRetain(&device->context, device->handle),
                             "cuDevicePrimaryCtxRetain", err);
  if (status != KVS_OK) goto no_context;
  status = prepare(device, err);
  if (status != KVS_OK) goto no_device;
  *opened = &device->base;
  return KVS_OK;

no_device:
  close_device(&device->base);
  return status;
no_context:
  free(device);
  return status;
}
