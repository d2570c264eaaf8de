/* THE seam: what kvswap needs from a device. Two devices implement it: host/device.c (memory and threads of this
 * process: the oracle, the test double, and the default without a GPU) and cuda/device.c.
 *
 * Callers use the kvs_dev_* wrappers of device.c. Only the wrappers test optional members for NULL, refuse after fork()
 * and on a lost device, note a loss, and inject faults.
 *
 * Threads: any thread may call anything at any time unless stated otherwise. Implementations make their context current
 * and restore the caller's. They use the relaxed capture mode, so they never invalidate another stream's capture. Only
 * `synchronize`, `free`, `host_free` and `host_unregister` block on the device.
 *
 * Errors: a refused enqueue returns KVS_REFUSED with the driver's code, and nothing else is affected. A failure that
 * the driver will return from now on (an asynchronous fault) returns KVS_LOST. Codes are CUresult numbers on both
 * devices (those in use are below), so tests can compare them. */
#ifndef KVS_DEVICE_H
#define KVS_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/fork.h"
#include "device/region.h"
#include "kernels/kernels.h"
#include "status.h"

typedef uint64_t kvs_stream; /* a driver's stream handle; 0, 1 and 2 as in CUDA */
typedef uint64_t kvs_event;  /* a driver's event handle; 0 is none */

#define KVS_STREAM_LEGACY ((kvs_stream)1)
#define KVS_STREAM_PER_THREAD ((kvs_stream)2)

/* The driver's codes that kvswap inspects or that the host device returns. */
enum kvs_driver_code {
  KVS_DRIVER_INVALID_VALUE = 1,
  KVS_DRIVER_OUT_OF_MEMORY = 2,
  KVS_DRIVER_INVALID_HANDLE = 400,
  KVS_DRIVER_NOT_READY = 600,
  KVS_DRIVER_ILLEGAL_ADDRESS = 700,
  KVS_DRIVER_ALREADY_REGISTERED = 712,
  KVS_DRIVER_NOT_REGISTERED = 713,
  KVS_DRIVER_LAUNCH_FAILED = 719,
  KVS_DRIVER_NOT_SUPPORTED = 801,
  KVS_DRIVER_CAPTURE_UNSUPPORTED = 900,
  KVS_DRIVER_CAPTURE_IMPLICIT = 906,
};

/* Filled at open, constant afterwards. */
struct kvs_device_info {
  char name[96]; /* "NVIDIA H200" */
  char pci[24];  /* "0000:01:00.0", empty for a host device */
  unsigned char uuid[16];
  uint64_t memory;    /* bytes of device memory */
  int memory_gbps;    /* its bandwidth, GB/s; 0: unknown, or a host device */
  uint64_t max_pitch; /* largest pitch of a 2-D copy, bytes */
  int driver;         /* CUDA version of the driver, 13000 for 13.0; 0 for a host device */
  int cc_major, cc_minor;
  int sms;
  int shared_nbytes; /* largest shared memory of a CTA */
  int copy_engines;
  int numa_node;                   /* -1: unknown */
  int priority_low, priority_high; /* as the driver orders them: low >= high */
  bool batch;                      /* the driver has a batch copy call */
  bool memops;                     /* stream memory operations work */
  bool kernels;                    /* kernels are loaded */
  char kernels_note[160];          /* what image was loaded, or why none */
};

/* A list of copies as structure of arrays: what a driver's batch call reads, with no conversion. */
struct kvs_copies {
  uint64_t *dst, *src;
  uint64_t *nbytes;
  uint32_t *block; /* index, in the caller's list, of the first block that the copy carries */
  size_t count, capacity;
};

/* A box of bytes: `depth` slices of `height` rows of `width` bytes. A 2-D copy has depth 1. */
struct kvs_rect {
  uint64_t dst, src;
  uint64_t dst_pitch, src_pitch;   /* bytes from row to row */
  uint64_t dst_height, src_height; /* rows from slice to slice; ignored at depth 1 */
  uint64_t width, height, depth;
};

struct kvs_launch {
  enum kvs_kernel kernel;
  unsigned grid, threads, shared_nbytes;
  const void *params; /* the kernel's one parameter struct (kernels.h), copied before the call returns */
  size_t params_nbytes;
};

struct kvs_stream_info {
  uint64_t id; /* unique in the process, never reused, unlike the handle; undefined while capturing */
  bool capturing;
};

struct kvs_device;
struct kvs_share_ops;

struct kvs_device_ops {
  const char *kind;                   /* "cuda" or "host" */
  void (*close)(struct kvs_device *); /* call after all work has ended or the device is lost; frees the device itself */

  /* Memory. Addresses are 256-byte aligned. The caller must not free memory that queued work uses. */
  int (*alloc)(struct kvs_device *, size_t nbytes, uint64_t *ptr, struct kvs_error *);
  int (*free)(struct kvs_device *, uint64_t ptr, struct kvs_error *);
  int (*host_alloc)(struct kvs_device *, size_t nbytes, uint64_t *ptr, struct kvs_error *);
  int (*host_free)(struct kvs_device *, uint64_t ptr, struct kvs_error *);
  int (*host_register)(struct kvs_device *, uint64_t ptr, size_t nbytes, struct kvs_error *);
  int (*host_unregister)(struct kvs_device *, uint64_t ptr, struct kvs_error *);
  /* The region that holds `ptr`. Unmapped memory: KVS_INVALID. */
  int (*pointer_query)(struct kvs_device *, uint64_t ptr, struct kvs_region *, struct kvs_error *);

  /* Streams are non-blocking (no implicit order with the legacy stream). Destroying lets queued work finish. */
  int (*stream_create)(struct kvs_device *, int priority, kvs_stream *, struct kvs_error *);
  int (*stream_destroy)(struct kvs_device *, kvs_stream, struct kvs_error *);
  int (*stream_query)(struct kvs_device *, kvs_stream, struct kvs_error *); /* KVS_OK idle, KVS_NOT_READY */
  int (*stream_info)(struct kvs_device *, kvs_stream, struct kvs_stream_info *, struct kvs_error *);
  int (*synchronize)(struct kvs_device *, struct kvs_error *); /* waits for all work on the device */

  /* Events. An event that was never recorded counts as reached. Recording again does not move waits queued before. */
  int (*event_create)(struct kvs_device *, bool timing, kvs_event *, struct kvs_error *);
  int (*event_destroy)(struct kvs_device *, kvs_event, struct kvs_error *);
  int (*event_record)(struct kvs_device *, kvs_event, kvs_stream, struct kvs_error *);
  int (*event_query)(struct kvs_device *, kvs_event, struct kvs_error *); /* KVS_OK reached, KVS_NOT_READY */
  int (*event_elapsed)(struct kvs_device *, kvs_event from, kvs_event to, uint64_t *ns, struct kvs_error *);
  int (*stream_wait)(struct kvs_device *, kvs_stream, kvs_event, struct kvs_error *);

  /* Work, queued on a stream. Lists and parameters are copied before the call returns. No order within a batch. */
  int (*copy)(struct kvs_device *, uint64_t dst, uint64_t src, uint64_t nbytes, kvs_stream, struct kvs_error *);
  int (*copy_batch)(struct kvs_device *, const struct kvs_copies *, size_t from, size_t to, kvs_stream,
                    struct kvs_error *); /* (optional: copy by copy) refuses the legacy stream */
  int (*copy_direct)(struct kvs_device *, const struct kvs_copies *, kvs_stream,
                     struct kvs_error *); /* (optional: KVS_UNSUPPORTED) memcpy by threads, host devices */
  int (*copy_rect)(struct kvs_device *, const struct kvs_rect *, kvs_stream, struct kvs_error *);
  int (*gap)(struct kvs_device *, kvs_stream,
             struct kvs_error *); /* (optional: no-op) a pause in which the copy engine serves other streams */
  int (*fill)(struct kvs_device *, uint64_t dst, uint32_t word, size_t nwords, kvs_stream, struct kvs_error *);
  int (*launch)(struct kvs_device *, const struct kvs_launch *, kvs_stream, struct kvs_error *);
  int (*write32)(struct kvs_device *, uint64_t ptr, uint32_t value, kvs_stream, struct kvs_error *);
  int (*wait32)(struct kvs_device *, uint64_t ptr, uint32_t value, kvs_stream,
                struct kvs_error *); /* until (int32)(*ptr - value) >= 0 */
  /* function(arg) on a thread of the host, which must not call the device. On a lost device it may never be called. */
  int (*call)(struct kvs_device *, void (*function)(void *arg), void *arg, kvs_stream, struct kvs_error *);

  /* (optional: no-op) Make the device's context current for the calling thread until unbind: for libraries that use the
   * current context. */
  int (*bind)(struct kvs_device *, struct kvs_error *);
  void (*unbind)(struct kvs_device *);

  const struct kvs_share_ops *share; /* (optional) sharing with other processes: share.h */
};

/* The first member of every implementation's struct. */
struct kvs_device {
  const struct kvs_device_ops *ops;
  int ordinal;
  unsigned fork_generation; /* of the process that opened it: implementations store kvs_fork_generation() */
  bool stepped;             /* work runs only inside calls, so waiters poll without sleeping */
  struct kvs_device_info info;
  atomic_int lost;                     /* the driver's code once the device is lost, else 0 */
  _Atomic(const char *) lost_in;       /* the call that reported the loss; NULL before */
  _Atomic(struct kvs_faults *) faults; /* NULL until a test sets one (faults.h) */
};

/* Whether the device is the parent's, in the child of a fork. Its locks may be held forever there. */
static inline bool kvs_dev_forked(const struct kvs_device *device) {
  return device->fork_generation != kvs_fork_generation();
}

/* The wrappers, one for each member; see the members. */
int kvs_dev_check(struct kvs_device *, struct kvs_error *); /* forked? lost? */
void kvs_dev_close(struct kvs_device *);
int kvs_dev_alloc(struct kvs_device *, size_t nbytes, uint64_t *ptr, struct kvs_error *);
int kvs_dev_free(struct kvs_device *, uint64_t ptr, struct kvs_error *);
int kvs_dev_host_alloc(struct kvs_device *, size_t nbytes, uint64_t *ptr, struct kvs_error *);
int kvs_dev_host_free(struct kvs_device *, uint64_t ptr, struct kvs_error *);
int kvs_dev_host_register(struct kvs_device *, uint64_t ptr, size_t nbytes, struct kvs_error *);
int kvs_dev_host_unregister(struct kvs_device *, uint64_t ptr, struct kvs_error *);
int kvs_dev_pointer_query(struct kvs_device *, uint64_t ptr, struct kvs_region *, struct kvs_error *);
int kvs_dev_stream_create(struct kvs_device *, int priority, kvs_stream *, struct kvs_error *);
int kvs_dev_stream_destroy(struct kvs_device *, kvs_stream, struct kvs_error *);
int kvs_dev_stream_query(struct kvs_device *, kvs_stream, struct kvs_error *);
int kvs_dev_stream_info(struct kvs_device *, kvs_stream, struct kvs_stream_info *, struct kvs_error *);
int kvs_dev_synchronize(struct kvs_device *, struct kvs_error *);
int kvs_dev_event_create(struct kvs_device *, bool timing, kvs_event *, struct kvs_error *);
int kvs_dev_event_destroy(struct kvs_device *, kvs_event, struct kvs_error *);
int kvs_dev_event_record(struct kvs_device *, kvs_event, kvs_stream, struct kvs_error *);
int kvs_dev_event_query(struct kvs_device *, kvs_event, struct kvs_error *);
int kvs_dev_event_elapsed(struct kvs_device *, kvs_event from, kvs_event to, uint64_t *ns, struct kvs_error *);
int kvs_dev_stream_wait(struct kvs_device *, kvs_stream, kvs_event, struct kvs_error *);
int kvs_dev_copy(struct kvs_device *, uint64_t dst, uint64_t src, uint64_t nbytes, kvs_stream, struct kvs_error *);
int kvs_dev_copy_batch(struct kvs_device *, const struct kvs_copies *, size_t from, size_t to, kvs_stream,
                       struct kvs_error *);
int kvs_dev_copy_direct(struct kvs_device *, const struct kvs_copies *, kvs_stream, struct kvs_error *);
int kvs_dev_copy_rect(struct kvs_device *, const struct kvs_rect *, kvs_stream, struct kvs_error *);
int kvs_dev_gap(struct kvs_device *, kvs_stream, struct kvs_error *);
int kvs_dev_fill(struct kvs_device *, uint64_t dst, uint32_t word, size_t nwords, kvs_stream, struct kvs_error *);
int kvs_dev_launch(struct kvs_device *, const struct kvs_launch *, kvs_stream, struct kvs_error *);
int kvs_dev_write32(struct kvs_device *, uint64_t ptr, uint32_t value, kvs_stream, struct kvs_error *);
int kvs_dev_wait32(struct kvs_device *, uint64_t ptr, uint32_t value, kvs_stream, struct kvs_error *);
int kvs_dev_call(struct kvs_device *, void (*function)(void *arg), void *arg, kvs_stream, struct kvs_error *);
int kvs_dev_bind(struct kvs_device *, struct kvs_error *);
void kvs_dev_unbind(struct kvs_device *); /* after a successful bind, on the same thread; also on a lost device */

/* Info of a stream that a transfer is to be ordered with; KVS_CAPTURING if the stream is being captured. */
int kvs_stream_ask(struct kvs_device *, kvs_stream, const char *what, struct kvs_stream_info *, struct kvs_error *);

struct kvs_watch;
void kvs_dev_watch(const struct kvs_watch *watch); /* watch.h */

/* Entry of every wrapper: refuses after fork() and on a lost device, injects faults. Leave: notes a loss. */
int kvs_dev_enter(struct kvs_device *, const char *operation, struct kvs_error *);
int kvs_dev_leave(struct kvs_device *, int status, const struct kvs_error *);

#endif
