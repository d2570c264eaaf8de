/* THE seam: what kvswap asks of a device. Two devices fill it: host/device.c (memory and threads of this process: the
 * oracle, the test double and the default where no GPU is) and cuda/device.c.
 *
 * Callers go through the kvs_dev_* wrappers of device.c: they alone test optional members for NULL, refuse after
 * fork(), refuse on a lost device, note a loss, and inject faults. Implementations do none of that.
 *
 * Threads: any thread may call anything at any time unless said otherwise. Implementations make their context current
 * themselves and restore the caller's; they use the relaxed capture mode, so that another stream's capture is never
 * invalidated. Nothing here blocks on the device except `synchronize`, `free`, `host_free`, `host_unregister`.
 *
 * Errors: an enqueue that the driver refuses returns KVS_REFUSED with the driver's code: nothing else is harmed. A
 * failure that the driver will now return for ever (an asynchronous fault) returns KVS_LOST. Codes are CUresult numbers
 * on both devices (the few that are used stand below), so that tests can compare them. */
#ifndef KVS_DEVICE_H
#define KVS_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/region.h"
#include "kernels/kernels.h"
#include "status.h"

typedef uint64_t kvs_stream; /* a driver's stream handle; 0, 1 and 2 mean what CUDA means by them */
typedef uint64_t kvs_event;  /* a driver's event handle; 0 is none */

#define KVS_STREAM_LEGACY ((kvs_stream)1)
#define KVS_STREAM_PER_THREAD ((kvs_stream)2)

/* The driver's codes that kvswap itself looks at or that the host device returns. */
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
  uint64_t max_pitch; /* largest pitch of a 2-D copy, bytes */
  int driver;         /* CUDA version of the driver, 13000 for 13.0; 0 for a host device */
  int cc_major, cc_minor;
  int sms;
  int shared_nbytes; /* most shared memory that a CTA may ask for */
  int copy_engines;
  int numa_node;                   /* -1: unknown */
  int priority_low, priority_high; /* as the driver orders them: low >= high */
  bool batch;                      /* one call copies a list */
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
  uint64_t id; /* unique in the process, never used again, unlike the handle; of a stream being captured: anything */
  bool capturing;
};

struct kvs_device;
struct kvs_share_ops;

struct kvs_device_ops {
  const char *kind;                   /* "cuda" or "host" */
  void (*close)(struct kvs_device *); /* after all work ended or the device was lost; frees the device itself */

  /* Memory. Addresses are 256-byte aligned. Freeing while queued work uses the memory is the caller's fault. */
  int (*alloc)(struct kvs_device *, size_t nbytes, uint64_t *ptr, struct kvs_error *);
  int (*free)(struct kvs_device *, uint64_t ptr, struct kvs_error *);
  int (*host_alloc)(struct kvs_device *, size_t nbytes, uint64_t *ptr, struct kvs_error *);
  int (*host_free)(struct kvs_device *, uint64_t ptr, struct kvs_error *);
  int (*host_register)(struct kvs_device *, uint64_t ptr, size_t nbytes, struct kvs_error *);
  int (*host_unregister)(struct kvs_device *, uint64_t ptr, struct kvs_error *);
  /* The region that holds `ptr`. Memory that is not mapped at all: KVS_INVALID. */
  int (*pointer_query)(struct kvs_device *, uint64_t ptr, struct kvs_region *, struct kvs_error *);

  /* Streams are non-blocking (no implicit order with the legacy stream). Destroying lets queued work finish. */
  int (*stream_create)(struct kvs_device *, int priority, kvs_stream *, struct kvs_error *);
  int (*stream_destroy)(struct kvs_device *, kvs_stream, struct kvs_error *);
  int (*stream_query)(struct kvs_device *, kvs_stream, struct kvs_error *); /* KVS_OK idle, KVS_NOT_READY */
  int (*stream_info)(struct kvs_device *, kvs_stream, struct kvs_stream_info *, struct kvs_error *);
  int (*synchronize)(struct kvs_device *, struct kvs_error *); /* everything queued on the device */

  /* Events. An event never recorded counts as reached. Re-recording does not move waits queued before it. */
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
  int (*fill)(struct kvs_device *, uint64_t dst, uint32_t word, size_t nwords, kvs_stream, struct kvs_error *);
  int (*launch)(struct kvs_device *, const struct kvs_launch *, kvs_stream, struct kvs_error *);
  int (*write32)(struct kvs_device *, uint64_t ptr, uint32_t value, kvs_stream, struct kvs_error *);
  int (*wait32)(struct kvs_device *, uint64_t ptr, uint32_t value, kvs_stream,
                struct kvs_error *); /* until (int32)(*ptr - value) >= 0 */

  /* (optional: nothing) Make the device's context the calling thread's until unbind: for libraries that look for one.
   */
  int (*bind)(struct kvs_device *, struct kvs_error *);
  void (*unbind)(struct kvs_device *);

  const struct kvs_share_ops *share; /* (optional) with other processes: share.h */
};

/* Every implementation's struct begins with this one. */
struct kvs_device {
  const struct kvs_device_ops *ops;
  int ordinal;
  unsigned fork_generation; /* of the process that opened it: kvs_fork_generation() */
  bool stepped;             /* work runs only inside calls: waiters poll without sleeping */
  struct kvs_device_info info;
  atomic_int lost;                     /* the driver's code once the device is lost, else 0 */
  _Atomic(const char *) lost_in;       /* the call that said so, NULL before */
  _Atomic(struct kvs_faults *) faults; /* NULL until a test sets one (device.c) */
};

/* Open a device. Host: any ordinal; a seed other than 0 makes it deterministic (host/device.h). */
int kvs_device_host_open(int ordinal, uint64_t seed, struct kvs_device **, struct kvs_error *);
int kvs_device_cuda_open(int ordinal, struct kvs_device **, struct kvs_error *);

/* Without a context: how many CUDA devices there are (0 with the reason in *err's message where there is no driver),
 * what one is, and which one a pointer belongs to (KVS_INVALID: none). */
int kvs_cuda_count(int *count, struct kvs_error *);
int kvs_cuda_info(int ordinal, struct kvs_device_info *, struct kvs_error *);
int kvs_cuda_pointer_device(uint64_t ptr, int *ordinal, struct kvs_error *);
int kvs_cuda_current(int *ordinal, struct kvs_error *); /* the calling thread's current device, else 0 */

/* What implementations store in `fork_generation` at open: changes in the child of a fork. */
unsigned kvs_fork_generation(void);
/* A parent's, in the child of a fork: its locks may be held there for ever. */
static inline bool kvs_dev_forked(const struct kvs_device *device) {
  return device->fork_generation != kvs_fork_generation();
}

/* The wrappers, one a member; see the members. */
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
int kvs_dev_fill(struct kvs_device *, uint64_t dst, uint32_t word, size_t nwords, kvs_stream, struct kvs_error *);
int kvs_dev_launch(struct kvs_device *, const struct kvs_launch *, kvs_stream, struct kvs_error *);
int kvs_dev_write32(struct kvs_device *, uint64_t ptr, uint32_t value, kvs_stream, struct kvs_error *);
int kvs_dev_wait32(struct kvs_device *, uint64_t ptr, uint32_t value, kvs_stream, struct kvs_error *);
int kvs_dev_bind(struct kvs_device *, struct kvs_error *);
void kvs_dev_unbind(struct kvs_device *); /* after a bind that succeeded, on the same thread; of a lost device too */

/* What the driver says of a stream that a transfer is to be ordered with; KVS_CAPTURING if that cannot be. */
int kvs_stream_ask(struct kvs_device *, kvs_stream, const char *what, struct kvs_stream_info *, struct kvs_error *);

#endif
