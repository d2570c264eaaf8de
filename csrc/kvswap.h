/* kvswap: moves paged KV-cache blocks between GPU and host memory. The C API, without Python.
 *
 * Threads: any thread may call any function at any time, unless it says otherwise. No function takes the GIL.
 *
 * Errors: functions return KVS_OK (0) or a negative status and then fill *err (kvswap_status.h), which is never NULL.
 *
 * `reserved`: room for members of later versions. Set structs to zero before filling them in: other words are refused.
 *
 * Units: addresses are plain numbers (device or host); sizes and strides are bytes; times are nanoseconds.
 *
 * docs/c.md: how to build and link libkvswap, what an extension of Python does, and what may change in a release. */
#ifndef KVSWAP_H
#define KVSWAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvswap_ids.h"
#include "kvswap_lend.h"
#include "kvswap_status.h"
#ifdef __has_include
#if __has_include("kvswap_version.h")
#include "kvswap_version.h" /* KVSWAP_VERSION_MAJOR, _MINOR, _PATCH; written when the library is built or installed */
#endif
#endif

/* The number in the library's soname. It rises when a compiled program would no longer run (docs/c.md). */
#define KVSWAP_ABI_VERSION 0

#ifdef __cplusplus
extern "C" {
#endif

struct kvs_engine;   /* an open device with its lanes; reference-counted */
struct kvs_transfer; /* one submitted list of copies; reference-counted */
struct kvs_pool;     /* blocks in memory, whose slots are tracked; reference-counted */

enum kvs_direction { KVS_D2H = 0, KVS_H2D = 1, KVS_OTHER_DIRECTION = 2 /* device to device, host to host */ };
enum kvs_path {
  KVS_PATH_AUTO,
  KVS_PATH_DMA,
  KVS_PATH_STRIDED,
  KVS_PATH_BORROW,
  KVS_PATH_BURST,
  KVS_PATH_KERNEL,
  KVS_PATH_DIRECT,
  KVS_PATHS
};
enum { KVS_PATHS_MOST = 16 };
enum kvs_priority { KVS_PRIORITY_DEFAULT, KVS_PRIORITY_NORMAL, KVS_PRIORITY_HIGH, KVS_PRIORITY_BACKGROUND };
enum kvs_state { KVS_STATE_RUNNING, KVS_STATE_DONE, KVS_STATE_FAILED, KVS_STATE_CANCELLED };

/* A start dependency of a transfer. */
enum kvs_after_kind { KVS_AFTER_STREAM, KVS_AFTER_EVENT, KVS_AFTER_TRANSFER, KVS_AFTER_NONE };
struct kvs_after {
  enum kvs_after_kind kind;
  uint64_t handle;               /* STREAM, EVENT: the driver's handle */
  struct kvs_engine *engine;     /* EVENT: the event's device, of the same kind; NULL: the transfer's device */
  struct kvs_transfer *transfer; /* TRANSFER: on any device of this process; borrowed for the call */
};

/* How a transfer runs. Zero-initialised: starts after the device's compute stream, delays no stream, and takes the
 * engine's defaults for the rest. NULL options mean the same. */
struct kvs_options {
  bool on_stream;     /* behave as if enqueued on `stream` */
  uint64_t stream;    /* the driver's handle; 0, 1, 2 as in CUDA */
  bool after_compute; /* with on_stream: also start after the device's compute stream */
  const struct kvs_after *after;
  size_t nafter;
  /* Layers are copied in order. kvs_swap_cache: each tensor is a layer; kvs_move_blocks: parts name their layers. */
  bool layer_events;                    /* each layer can be waited for */
  const struct kvs_after *after_layers; /* one a layer: its copies also start after this */
  size_t nafter_layers;                 /* 0, or the number of layers */
  enum kvs_path path;
  enum kvs_priority priority;
  unsigned max_ctas;       /* paths kernel and burst: limit on CTAs; 0: the default */
  double pace_gbps;        /* path kernel: limit in 10^9 bytes a second; 0: the default. Other paths ignore it */
  void *owner;             /* kept until the transfer has ended; then kvs_engine_collect() calls release(owner) */
  void (*release)(void *); /* if the submitting call fails, the caller keeps the owner */
  const char *where; /* where the call comes from, for the race checker's reports: "engine.py:123 in step"; copied */
  uint64_t since_ns; /* CLOCK_MONOTONIC: of the first attempt, where a refused call is made again; 0: of this call */
  /* The ids of the GPU's side, in its memory; NULL: all are in the call's lists. In place of gpu_ids of kvs_swap_cache,
   * which may then be NULL; of kvs_move_blocks in place of the list whose `data` is NULL. Paths burst and kernel. */
  const struct kvs_device_ids *device_ids;
  enum kvs_gpu_order gpu_order; /* with device_ids, between pools */
  uint64_t reserved[5];
};

/* One tensor on both sides. Block i of a side lies at base + i * stride and is nbytes long. */
struct kvs_tensor {
  uint64_t gpu, cpu;
  uint64_t nbytes;
  uint64_t gpu_blocks, cpu_blocks;
  uint64_t gpu_stride, cpu_stride; /* 0: nbytes */
};

struct kvs_transfer_info {
  enum kvs_state state;
  enum kvs_direction direction;
  enum kvs_path path; /* the path that was taken */
  uint64_t number;    /* over all lanes of the engine, from 1 */
  uint64_t lane;      /* number of its lane */
  uint64_t sequence;  /* within its lane, from 1 */
  uint64_t nbytes;    /* of all its blocks */
  uint64_t num_blocks;
  uint64_t elapsed_ns; /* on the device, once it ended; 0 before and where the device cannot say */
  size_t num_failed;
  size_t num_layers;                 /* layers that can be waited for; 0 without layer_events */
  uint64_t duration_ns, reserved[7]; /* duration_ns: from the call until its end was seen; 0 before */
};

struct kvs_path_stats {
  uint64_t transfers, blocks, bytes; /* of transfers done */
  uint64_t device_ns;                /* their elapsed_ns */
  uint64_t link_bytes;               /* bytes that moved: fewer than `bytes` where blocks were coded */
};

struct kvs_stats {
  uint64_t submitted, done, failed, cancelled;     /* transfers */
  uint64_t bytes_d2h, bytes_h2d, bytes_other;      /* of transfers done */
  uint64_t copies, merged;                         /* copies issued; blocks merged into another block's copy */
  uint64_t unfinished, lanes;                      /* now */
  uint64_t refused_full;                           /* submissions refused with KVS_QUEUE_FULL */
  uint64_t second_attempts;                        /* transfers given to the copy engine after their path was refused */
  uint64_t staging_nbytes;                         /* memory held for descriptors */
  uint64_t waits_raw, waits_war, waits_waw;        /* waits for hazards; one wait may count for several kinds */
  struct kvs_path_stats paths[3][KVS_PATHS_MOST];  /* by direction and path */
  uint64_t lent_bytes_d2h, lent_bytes_h2d;         /* of others' transfers, on this device's link */
  uint64_t borrowed_bytes_d2h, borrowed_bytes_h2d; /* of this device's transfers, on others' links */
  uint64_t reserved[12];
};

/* "cuda:N" or "host:N". The same name gives the same engine until the process ends; each open adds a reference. Opening
 * a CUDA device retains its primary context (about 600 MB of its memory the first time in a process). */
KVS_API int kvs_engine_open(const char *name, struct kvs_engine **engine, struct kvs_error *err);
/* A private host device whose work runs only inside calls on this engine, in an order that `seed` (not 0) decides. */
KVS_API int kvs_engine_open_deterministic(uint64_t seed, struct kvs_engine **engine, struct kvs_error *err);
KVS_API void kvs_engine_ref(struct kvs_engine *engine);
KVS_API void kvs_engine_unref(struct kvs_engine *engine);
KVS_API const char *kvs_engine_name(const struct kvs_engine *engine);
/* The stream after which transfers without a stream start. Default: the legacy default stream. */
KVS_API int kvs_engine_set_compute_stream(struct kvs_engine *engine, uint64_t stream, struct kvs_error *err);
/* Wait for all work queued on the device, by any library. timeout_ns < 0: no limit. KVS_TIMEOUT: the work goes on. */
KVS_API int kvs_engine_synchronize(struct kvs_engine *engine, int64_t timeout_ns, struct kvs_error *err);
/* Defaults for options that are AUTO, DEFAULT or 0. Zero-initialised: AUTO, NORMAL, and the measured limits. The first
 * ones come from the environment: KVSWAP_PATH, KVSWAP_MAX_CTAS, KVSWAP_PACE_GBPS. Setting cannot fail: submissions
 * refuse what is not known. In the child of a fork(), where every submission is refused, nothing is set. */
struct kvs_defaults {
  enum kvs_path path;
  enum kvs_priority priority;
  unsigned max_ctas;
  double pace_gbps;
  uint64_t reserved[8];
};
KVS_API void kvs_engine_set_defaults(struct kvs_engine *engine, const struct kvs_defaults *defaults);
KVS_API void kvs_engine_get_defaults(struct kvs_engine *engine, struct kvs_defaults *defaults);
KVS_API void kvs_engine_stats(struct kvs_engine *engine, struct kvs_stats *stats);
/* Device memory in which path burst packs blocks: for each direction `count` slots (2 to 8) of slot_nbytes, and a spare
 * set of two half-size slots. 0: free the memory; path burst is off. Waits at most timeout_ns for the transfers that
 * use slots and for other work that is queued by then. Allocating and freeing may delay other work on the device. */
KVS_API int kvs_engine_set_slots(struct kvs_engine *engine, uint64_t slot_nbytes, unsigned count, int64_t timeout_ns,
                                 struct kvs_error *err);
KVS_API uint64_t kvs_engine_slots_nbytes(const struct kvs_engine *engine); /* total of both directions */
/* Why path burst is off, or has less memory than wanted; empty: neither. */
enum { KVS_BURST_NOTE = 160 };
KVS_API void kvs_engine_burst_note(struct kvs_engine *engine, char note[KVS_BURST_NOTE]);
/* The source of the costs with which AUTO predicts: this machine's calibration, or the built-in costs. */
KVS_API const char *kvs_engine_costs_note(const struct kvs_engine *engine);
/* Reap transfers that have ended and release their owners. Cheap if none has. `release` runs under no lock of kvswap
 * and may call kvswap. kvs_shutdown() and the last kvs_engine_unref() call it too. */
KVS_API void kvs_engine_collect(struct kvs_engine *engine);
/* Drain every open engine, for at most timeout_ns in total: for exit. Nothing can be submitted afterwards. */
KVS_API void kvs_shutdown(int64_t timeout_ns);

/* Memory that kvswap allocates. host: pinned host memory. Freeing waits first for the transfers that may use the memory
 * and for other work on the device, at most 60 s (then KVS_TIMEOUT, and nothing is freed). Pools in it are closed:
 * transfers of theirs are refused from then on (KVS_CLOSED). One that another thread is just submitting comes before or
 * is refused; calls that name addresses do not see that the memory goes. */
KVS_API int kvs_engine_alloc(struct kvs_engine *engine, size_t nbytes, bool host, uint64_t *ptr, struct kvs_error *err);
KVS_API int kvs_engine_free(struct kvs_engine *engine, uint64_t ptr, struct kvs_error *err);
/* Pin the caller's host memory. Ranges must not overlap; a copy is never merged across the end of one. */
KVS_API int kvs_engine_register(struct kvs_engine *engine, uint64_t ptr, size_t nbytes, struct kvs_error *err);
KVS_API int kvs_engine_unregister(struct kvs_engine *engine, uint64_t ptr, struct kvs_error *err);

/* Submit. Everything in host memory is checked before anything is queued: on an error nothing has moved, and *transfer
 * is unchanged. Ids in device memory (kvs_device_ids) are checked there, before they are used. On KVS_OK all of the
 * transfer is queued on the device, and the caller may overwrite the lists. A copy that the driver refuses after the
 * checks does not fail the call: its blocks are in the transfer's failed list, and the transfer ends as
 * KVS_STATE_FAILED. The caller owns one reference to *transfer. */
KVS_API int kvs_swap_batch(struct kvs_engine *engine, const uint64_t *src, const uint64_t *dst, const uint64_t *nbytes,
                           bool one_size, /* nbytes[0] is the size of all entries */
                           size_t count, const struct kvs_options *options, struct kvs_transfer **transfer,
                           struct kvs_error *err);
/* Block gpu_ids[i] of every tensor <-> block cpu_ids[i] of the same tensor. Without tensors ids are checked, too: from
 * 0 to INT32_MAX, and no destination twice. */
KVS_API int kvs_swap_cache(struct kvs_engine *engine, const struct kvs_tensor *tensors, size_t ntensors,
                           const struct kvs_ids *gpu_ids, const struct kvs_ids *cpu_ids, enum kvs_direction direction,
                           const struct kvs_options *options, struct kvs_transfer **transfer, struct kvs_error *err);

KVS_API void kvs_transfer_ref(struct kvs_transfer *transfer);
KVS_API void kvs_transfer_unref(struct kvs_transfer *transfer); /* dropping an unfinished one is safe */
KVS_API struct kvs_engine *kvs_transfer_engine(const struct kvs_transfer *transfer); /* borrowed */
KVS_API bool kvs_transfer_done(struct kvs_transfer *transfer); /* ended in any state; never blocks */
/* KVS_OK once done; KVS_TIMEOUT (still running); else the transfer's own error. timeout_ns < 0: no limit. */
KVS_API int kvs_transfer_wait(struct kvs_transfer *transfer, int64_t timeout_ns, struct kvs_error *err);
/* True: the transfer was stopped. Issued device work cannot be recalled, so false for GPU <-> host transfers. */
KVS_API bool kvs_transfer_cancel(struct kvs_transfer *transfer);
/* `stream` waits for the transfer. This only orders: it fails if a failure is known, and success proves nothing. */
KVS_API int kvs_transfer_make_wait(struct kvs_transfer *transfer, uint64_t stream, struct kvs_error *err);
/* `stream` waits for layers 0 to `layer`, as by kvs_transfer_make_wait(). Without layer_events: KVS_INVALID. */
KVS_API int kvs_transfer_make_wait_layer(struct kvs_transfer *transfer, size_t layer, uint64_t stream,
                                         struct kvs_error *err);
/* KVS_OK: layers 0 to `layer` have arrived. KVS_NOT_READY, or the transfer's error if it failed. Never blocks. */
KVS_API int kvs_transfer_layer_done(struct kvs_transfer *transfer, size_t layer, struct kvs_error *err);
/* The driver's event that marks the end. The event belongs to the transfer and lives as long as the transfer. */
KVS_API int kvs_transfer_event(struct kvs_transfer *transfer, uint64_t *event, struct kvs_error *err);
KVS_API void kvs_transfer_get_info(struct kvs_transfer *transfer, struct kvs_transfer_info *info);
/* KVS_OK while the transfer runs or once it is done; else its error. Does not poll the device. */
KVS_API int kvs_transfer_error(struct kvs_transfer *transfer, struct kvs_error *err);
/* Positions, in the caller's lists, of the failed blocks, ascending. Writes up to `capacity`, returns their number.
 * None while the transfer runs; all blocks if the driver cannot say which failed. */
KVS_API size_t kvs_transfer_failed(struct kvs_transfer *transfer, uint32_t *positions, size_t capacity);

KVS_API const char *kvs_path_name(enum kvs_path path);
KVS_API const char *kvs_version(void); /* of the library that runs: "1.2.3"; the macros are of its headers */

#ifdef __cplusplus
}
#endif

#include "kvswap_ipc.h"
#include "kvswap_memory.h"
#include "kvswap_offload.h"
#include "kvswap_pool.h"
#endif
