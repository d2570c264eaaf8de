/* The host device: memory and threads of this process that behave like a GPU.
 *
 * The host device is the default on machines without a GPU, and the reference in tests. This file has its function
 * table and the checks that a driver makes at enqueue; nothing of a refused call is queued. Below: host/memory.c
 * (memory), host/queue.c (streams and events), host/run.c (execution), host/kernel.c and kernels/twins.c (kernels).
 *
 * Refused as by the driver: one copy across the end of an allocation or registration, rows of one rectangle in several
 * allocations, a pitch above the limit, a batch on the legacy stream (CUDA_ERROR_INVALID_VALUE on driver 580), work on
 * a capturing stream. A kernel that accesses unmapped memory loses the device with code 700 when it runs, as on a GPU.
 * Stricter than a GPU: a copy from or to unmapped memory is refused. */
#include "host/device.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/copy.h"
#include "host/kernel.h"
#include "host/queue.h"
#include "host/run.h"
#include "host/share.h"
#include "host/state.h"

#define MAX_PITCH ((uint64_t)INT32_MAX)
#define MAX_THREADS 1024u
#define MAX_DELAY_NS ((uint64_t)10 * 1000000000u)

static struct kvs_host_queue *queue_of(struct kvs_device *device) { return &host_of(device)->queue; }

/* -- memory ---------------------------------------------------------------------------------------------------- */

static int host_alloc_device(struct kvs_device *device, size_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  return kvs_host_memory_alloc(&host_of(device)->memory, KVS_MEMORY_DEVICE, nbytes, ptr, err);
}

static int host_alloc_pinned(struct kvs_device *device, size_t nbytes, uint64_t *ptr, struct kvs_error *err) {
  return kvs_host_memory_alloc(&host_of(device)->memory, KVS_MEMORY_PINNED, nbytes, ptr, err);
}

/* Freeing waits for the device, as a driver's free does. On a lost device it fails: a worker may still run a slice.
 * Closing joins the workers and then unmaps everything. */
static int host_free_device(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) {
  int status = kvs_host_synchronize(queue_of(device), "free", err);
  return status ? status : kvs_host_memory_free(&host_of(device)->memory, KVS_MEMORY_DEVICE, ptr, err);
}

static int host_free_pinned(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) {
  int status = kvs_host_synchronize(queue_of(device), "host_free", err);
  return status ? status : kvs_host_memory_free(&host_of(device)->memory, KVS_MEMORY_PINNED, ptr, err);
}

static int host_register(struct kvs_device *device, uint64_t ptr, size_t nbytes, struct kvs_error *err) {
  return kvs_host_memory_register(&host_of(device)->memory, ptr, nbytes, err);
}

static int host_unregister(struct kvs_device *device, uint64_t ptr, struct kvs_error *err) {
  int status = kvs_host_synchronize(queue_of(device), "host_unregister", err);
  return status ? status : kvs_host_memory_unregister(&host_of(device)->memory, ptr, err);
}

static int host_pointer_query(struct kvs_device *device, uint64_t ptr, struct kvs_region *region,
                              struct kvs_error *err) {
  return kvs_host_memory_query(&host_of(device)->memory, ptr, region, err);
}

/* -- streams and events ---------------------------------------------------------------------------------------- */

static int host_stream_create(struct kvs_device *device, int priority, kvs_stream *stream, struct kvs_error *err) {
  return kvs_host_stream_create(queue_of(device), priority, stream, err);
}

static int host_stream_destroy(struct kvs_device *device, kvs_stream stream, struct kvs_error *err) {
  return kvs_host_stream_destroy(queue_of(device), stream, err);
}

static int host_stream_query(struct kvs_device *device, kvs_stream stream, struct kvs_error *err) {
  return kvs_host_stream_query(queue_of(device), stream, err);
}

static int host_stream_info(struct kvs_device *device, kvs_stream stream, struct kvs_stream_info *info,
                            struct kvs_error *err) {
  return kvs_host_stream_info(queue_of(device), stream, info, err);
}

static int host_synchronize(struct kvs_device *device, struct kvs_error *err) {
  return kvs_host_synchronize(queue_of(device), "synchronize", err);
}

static int host_event_create(struct kvs_device *device, bool timing, kvs_event *event, struct kvs_error *err) {
  return kvs_host_event_create(queue_of(device), timing, event, err);
}

static int host_event_destroy(struct kvs_device *device, kvs_event event, struct kvs_error *err) {
  return kvs_host_event_destroy(queue_of(device), event, err);
}

static int host_event_record(struct kvs_device *device, kvs_event event, kvs_stream stream, struct kvs_error *err) {
  return kvs_host_event_record(queue_of(device), event, stream, err);
}

static int host_event_query(struct kvs_device *device, kvs_event event, struct kvs_error *err) {
  return kvs_host_event_query(queue_of(device), event, err);
}

static int host_event_elapsed(struct kvs_device *device, kvs_event from, kvs_event to, uint64_t *ns,
                              struct kvs_error *err) {
  return kvs_host_event_elapsed(queue_of(device), from, to, ns, err);
}

static int host_stream_wait(struct kvs_device *device, kvs_stream stream, kvs_event event, struct kvs_error *err) {
  return kvs_host_stream_wait(queue_of(device), stream, event, err);
}

/* -- work ------------------------------------------------------------------------------------------------------ */

static int refuse_value(const char *operation, const char *why, struct kvs_error *err) {
  return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, operation, "%s", why);
}

static int refuse_range(const char *operation, const char *side, uint64_t address, uint64_t nbytes, const char *why,
                        struct kvs_error *err) {
  return kvs_fail_driver(err, KVS_REFUSED, KVS_DRIVER_INVALID_VALUE, operation, "%s [0x%" PRIx64 ", 0x%" PRIx64 ") %s",
                         side, address, address + nbytes, why);
}

static int check_side(struct kvs_host_view *view, enum kvs_host_use use, uint64_t address, uint64_t nbytes, bool seams,
                      const char *operation, struct kvs_error *err) {
  const char *why = kvs_host_view_refuse(view, use, address, nbytes, seams);
  if (!why) return KVS_OK;
  return refuse_range(operation, use == KVS_HOST_READ ? "source" : "destination", address, nbytes, why, err);
}

static int check_copy(struct kvs_host_view *view, const struct kvs_piece *piece, bool seams, const char *operation,
                      struct kvs_error *err) {
  int status = check_side(view, KVS_HOST_READ, piece->src, piece->nbytes, seams, operation, err);
  return status ? status : check_side(view, KVS_HOST_WRITE, piece->dst, piece->nbytes, seams, operation, err);
}

/* Queue the copies [from, to) of a list as one operation; their order is undefined. */
static int queue_copies(struct kvs_device *device, const struct kvs_copies *copies, size_t from, size_t to, bool seams,
                        kvs_stream stream, const char *operation, struct kvs_error *err) {
  struct kvs_host_view view = {.memory = &host_of(device)->memory};
  /* cannot overflow: the list itself has as many bytes */
  struct kvs_host_op *op = kvs_host_op_new(KVS_HOST_COPY, 0, (to - from) * sizeof(struct kvs_piece), err);
  uint64_t total = 0;
  int status = KVS_OK;
  if (!op) return KVS_NOMEM;
  for (size_t i = from; i < to && !status; i++) {
    struct kvs_piece piece = {copies->dst[i], copies->src[i], copies->nbytes[i]};
    if (piece.nbytes == 0) continue;
    status = check_copy(&view, &piece, seams, operation, err);
    op->pieces[op->units++] = piece;
    total += piece.nbytes;
  }
  kvs_host_view_clear(&view);
  if (status || op->units == 0) {
    free(op);
    return status;
  }
  op->streaming = total >= KVS_COPY_STREAMED_NBYTES;
  return kvs_host_enqueue(queue_of(device), op, stream, operation, err);
}

static int host_copy(struct kvs_device *device, uint64_t dst, uint64_t src, uint64_t nbytes, kvs_stream stream,
                     struct kvs_error *err) {
  struct kvs_copies one = {.dst = &dst, .src = &src, .nbytes = &nbytes, .count = 1};
  return queue_copies(device, &one, 0, 1, true, stream, "copy", err);
}

static int host_copy_batch(struct kvs_device *device, const struct kvs_copies *copies, size_t from, size_t to,
                           kvs_stream stream, struct kvs_error *err) {
  if (stream <= KVS_STREAM_LEGACY) return refuse_value("copy_batch", "a batch on the legacy stream", err);
  if (from > to || to > copies->count) return refuse_value("copy_batch", "a range outside the list", err);
  return queue_copies(device, copies, from, to, true, stream, "copy_batch", err);
}

static int host_copy_direct(struct kvs_device *device, const struct kvs_copies *copies, kvs_stream stream,
                            struct kvs_error *err) {
  return queue_copies(device, copies, 0, copies->count, false, stream, "copy_direct", err);
}

/* The bytes that one side of a rectangle spans, including gaps; false: invalid pitches. */
static bool rect_span(const struct kvs_rect *rect, uint64_t pitch, uint64_t slice_rows, uint64_t *nbytes) {
  uint64_t rows = rect->height - 1, below;
  *nbytes = rect->width;
  if (rect->height == 1 && rect->depth == 1) return true;
  if (pitch < rect->width || pitch > MAX_PITCH) return false;
  if (rect->depth > 1) {
    if (slice_rows < rect->height || __builtin_mul_overflow(rect->depth - 1, slice_rows, &below)) return false;
    if (__builtin_add_overflow(rows, below, &rows)) return false;
  }
  return !__builtin_mul_overflow(rows, pitch, &rows) && !__builtin_add_overflow(rows, rect->width, nbytes);
}

static int check_rect(struct kvs_host_view *view, const struct kvs_rect *rect, struct kvs_error *err) {
  uint64_t dst_nbytes, src_nbytes;
  if (!rect_span(rect, rect->dst_pitch, rect->dst_height, &dst_nbytes) ||
      !rect_span(rect, rect->src_pitch, rect->src_height, &src_nbytes))
    return refuse_value("copy_rect", "a pitch is below the width or above the limit, or slices overlap", err);
  int status = check_side(view, KVS_HOST_READ, rect->src, src_nbytes, true, "copy_rect", err);
  return status ? status : check_side(view, KVS_HOST_WRITE, rect->dst, dst_nbytes, true, "copy_rect", err);
}

static int host_copy_rect(struct kvs_device *device, const struct kvs_rect *rect, kvs_stream stream,
                          struct kvs_error *err) {
  struct kvs_host_view view = {.memory = &host_of(device)->memory};
  if (rect->width == 0 || rect->height == 0 || rect->depth == 0) return KVS_OK;
  int status = check_rect(&view, rect, err);
  kvs_host_view_clear(&view);
  if (status) return status;
  struct kvs_host_op *op = kvs_host_op_new(KVS_HOST_RECT, rect->height * rect->depth, 0, err);
  if (!op) return KVS_NOMEM;
  op->what.rect = *rect;
  op->streaming = op->units * rect->width >= KVS_COPY_STREAMED_NBYTES;
  return kvs_host_enqueue(queue_of(device), op, stream, "copy_rect", err);
}

static int check_words(struct kvs_device *device, enum kvs_host_use use, uint64_t ptr, uint64_t nwords, bool seams,
                       const char *operation, struct kvs_error *err) {
  struct kvs_host_view view = {.memory = &host_of(device)->memory};
  if (ptr % 4 != 0) return refuse_value(operation, "an address that is not aligned to 4 bytes", err);
  if (nwords > UINT64_MAX / 4) return refuse_value(operation, "more words than memory has", err);
  int status = check_side(&view, use, ptr, 4 * nwords, seams, operation, err);
  kvs_host_view_clear(&view);
  return status;
}

static int host_fill(struct kvs_device *device, uint64_t dst, uint32_t word, size_t nwords, kvs_stream stream,
                     struct kvs_error *err) {
  if (nwords == 0) return KVS_OK;
  int status = check_words(device, KVS_HOST_WRITE, dst, nwords, true, "fill", err);
  if (status) return status;
  struct kvs_host_op *op = kvs_host_op_new(KVS_HOST_FILL, 1, 0, err);
  if (!op) return KVS_NOMEM;
  op->what.fill.dst = dst;
  op->what.fill.nwords = nwords;
  op->what.fill.word = word;
  return kvs_host_enqueue(queue_of(device), op, stream, "fill", err);
}

static int host_launch(struct kvs_device *device, const struct kvs_launch *launch, kvs_stream stream,
                       struct kvs_error *err) {
  size_t nbytes = kvs_host_kernel_params_nbytes(launch->kernel);
  bool delay = launch->kernel == KVS_KERNEL_DELAY;
  if (nbytes == 0) return refuse_value("launch", "no such kernel", err);
  if (launch->params_nbytes != nbytes || !launch->params)
    return refuse_value("launch", "parameters of another size than the kernel's", err);
  if (launch->grid == 0 || launch->threads == 0 || launch->threads > MAX_THREADS)
    return refuse_value("launch", "an empty grid, or a CTA of 0 or more than 1024 threads", err);
  struct kvs_host_op *op = kvs_host_op_new(delay ? KVS_HOST_DELAY : KVS_HOST_KERNEL, launch->grid, nbytes, err);
  if (!op) return KVS_NOMEM;
  if (delay) {
    uint64_t ns = ((const struct kvs_delay_params *)launch->params)->ns;
    op->what.delay_ns = ns < MAX_DELAY_NS ? ns : MAX_DELAY_NS;
  } else {
    op->what.kernel.id = launch->kernel;
    op->what.kernel.grid = launch->grid;
    op->what.kernel.threads = launch->threads;
    op->what.kernel.params = memcpy(op->pieces, launch->params, nbytes);
  }
  return kvs_host_enqueue(queue_of(device), op, stream, "launch", err);
}

static int queue_flag(struct kvs_device *device, enum kvs_host_kind kind, uint64_t ptr, uint32_t value,
                      kvs_stream stream, struct kvs_error *err) {
  bool write = kind == KVS_HOST_WRITE32;
  const char *operation = write ? "write32" : "wait32";
  int status = check_words(device, write ? KVS_HOST_WRITE : KVS_HOST_READ, ptr, 1, true, operation, err);
  if (status) return status;
  struct kvs_host_op *op = kvs_host_op_new(kind, 1, 0, err);
  if (!op) return KVS_NOMEM;
  op->what.flag.ptr = ptr;
  op->what.flag.value = value;
  return kvs_host_enqueue(queue_of(device), op, stream, operation, err);
}

static int host_write32(struct kvs_device *device, uint64_t ptr, uint32_t value, kvs_stream stream,
                        struct kvs_error *err) {
  return queue_flag(device, KVS_HOST_WRITE32, ptr, value, stream, err);
}

static int host_wait32(struct kvs_device *device, uint64_t ptr, uint32_t value, kvs_stream stream,
                       struct kvs_error *err) {
  return queue_flag(device, KVS_HOST_WAIT32, ptr, value, stream, err);
}

static int host_call(struct kvs_device *device, void (*function)(void *arg), void *arg, kvs_stream stream,
                     struct kvs_error *err) {
  struct kvs_host_op *op = kvs_host_op_new(KVS_HOST_CALL, 1, 0, err);
  if (!op) return KVS_NOMEM;
  op->what.call.function = function;
  op->what.call.arg = arg;
  return kvs_host_enqueue(queue_of(device), op, stream, "call", err);
}

/* -- open and close -------------------------------------------------------------------------------------------- */

static void host_close(struct kvs_device *device) {
  struct host_device *host = host_of(device);
  kvs_host_queue_destroy(&host->queue);
  kvs_host_memory_destroy(&host->memory);
  free(host);
}

static const struct kvs_device_ops host_ops = {
    .kind = "host",
    .close = host_close,
    .alloc = host_alloc_device,
    .free = host_free_device,
    .host_alloc = host_alloc_pinned,
    .host_free = host_free_pinned,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .pointer_query = host_pointer_query,
    .stream_create = host_stream_create,
    .stream_destroy = host_stream_destroy,
    .stream_query = host_stream_query,
    .stream_info = host_stream_info,
    .synchronize = host_synchronize,
    .event_create = host_event_create,
    .event_destroy = host_event_destroy,
    .event_record = host_event_record,
    .event_query = host_event_query,
    .event_elapsed = host_event_elapsed,
    .stream_wait = host_stream_wait,
    .copy = host_copy,
    .copy_batch = host_copy_batch,
    .copy_direct = host_copy_direct,
    .copy_rect = host_copy_rect,
    .fill = host_fill,
    .launch = host_launch,
    .write32 = host_write32,
    .wait32 = host_wait32,
    .call = host_call,
    .share = &kvs_host_share_ops,
};

static int count_cores(void) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
  long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? (int)online : 1;
}

static void describe(struct kvs_device_info *info, unsigned workers, int cores, uint64_t seed) {
  struct utsname system;
  const char *machine = uname(&system) == 0 ? system.machine : "unknown";
  snprintf(info->name, sizeof info->name, "host device (%.40s, %d core%s%s)", machine, cores, cores == 1 ? "" : "s",
           seed ? ", deterministic" : "");
  snprintf(info->kernels_note, sizeof info->kernels_note, "C twins");
  info->memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
  info->max_pitch = MAX_PITCH;
  info->sms = (int)workers;
  info->shared_nbytes = 227 << 10; /* value of an H200 */
  info->copy_engines = 2;
  info->numa_node = -1;
  info->priority_low = KVS_HOST_PRIORITY_LOW;
  info->priority_high = KVS_HOST_PRIORITY_HIGH;
  info->batch = info->memops = info->kernels = true;
}

int kvs_device_host_open(int ordinal, uint64_t seed, struct kvs_device **device, struct kvs_error *err) {
  int cores = count_cores();
  unsigned workers = cores < KVS_HOST_WORKERS_MAX ? (unsigned)cores : KVS_HOST_WORKERS_MAX;
  struct host_device *host = calloc(1, sizeof *host);
  if (!host) return kvs_fail(err, KVS_NOMEM, "no memory for a device");
  host->base.ops = &host_ops;
  host->base.ordinal = ordinal;
  host->base.fork_generation = kvs_fork_generation();
  describe(&host->base.info, workers, cores, seed);
  kvs_host_uuid(host->base.info.uuid, ordinal, seed);
  int status = kvs_host_memory_init(&host->memory, ordinal, host->base.info.memory, err);
  if (status) goto no_memory;
  status = kvs_host_queue_init(&host->queue, workers, seed, &host->memory, &host->base.lost, err);
  if (status) goto no_queue;
  if (!seed) kvs_host_memory_list(&host->memory);
  *device = &host->base;
  return KVS_OK;

no_queue:
  kvs_host_memory_destroy(&host->memory);
no_memory:
  free(host);
  return status;
}

/* -- for tests ------------------------------------------------------------------------------------------------- */

static struct kvs_host_queue *deterministic_of(struct kvs_device *device) {
  return device->ops == &host_ops && queue_of(device)->deterministic ? queue_of(device) : NULL;
}

int64_t kvs_host_step(struct kvs_device *device, int64_t steps) {
  struct kvs_host_queue *queue = deterministic_of(device);
  if (!queue) return -1;
  pthread_mutex_lock(&queue->lock);
  int64_t ran = kvs_host_steps_locked(queue, steps, true);
  pthread_mutex_unlock(&queue->lock);
  return ran;
}

uint64_t kvs_host_trace(struct kvs_device *device) {
  struct kvs_host_queue *queue = deterministic_of(device);
  if (!queue) return 0;
  pthread_mutex_lock(&queue->lock);
  uint64_t trace = queue->trace;
  pthread_mutex_unlock(&queue->lock);
  return trace;
}

int kvs_host_set_peer(struct kvs_device *device, int ordinal, bool reached, struct kvs_error *err) {
  if (device->ops != &host_ops) return kvs_fail(err, KVS_UNSUPPORTED, "only a host device models peer access");
  if (ordinal < 0 || ordinal >= 64) return kvs_fail(err, KVS_RANGE, "ordinal is %d; it is 0 to 63", ordinal);
  atomic_uint_fast64_t *peers = &host_of(device)->memory.unreachable_peers;
  if (reached)
    atomic_fetch_and(peers, ~((uint64_t)1 << ordinal));
  else
    atomic_fetch_or(peers, (uint64_t)1 << ordinal);
  return KVS_OK;
}

int kvs_host_capture(struct kvs_device *device, kvs_stream stream, bool begin, struct kvs_error *err) {
  if (device->ops != &host_ops) return kvs_fail(err, KVS_UNSUPPORTED, "only a host device models a capture");
  return kvs_host_stream_capture(queue_of(device), stream, begin, err);
}
