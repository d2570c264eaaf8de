/* What the bindings use beyond the C surface: not stable, and not installed. A label names the file that defines the
 * functions below it, and a line says why they are private. The bindings also include these headers of the core:
 *
 *   base/crc32c.h         the name of the CRC's implementation, for FileStore.info
 *   base/fork.h           the thread behind `await` starts anew in the child of a fork
 *   base/thread.h         a call on a thread of its own, while Python looks for signals
 *   base/wait.h           waits in slices, and the callback that looks for signals
 *   cuda/fatbin.h         which GPUs the kernels were built for, for `kvswap info`
 *   cuda/info.h           GPUs that are not open, for devices() and Device()
 *   device/device.h       streams and events, of which a C program has the driver's own
 *   device/faults.h       for kvswap._testing only, as files/gds.h, host/device.h and paths/predict.h
 *   device/share.h        events of other processes
 *   engine/metrics.h      numbers of all engines at once, for kvswap.metrics
 *   engine/pattern.h      bytes that a test or a replay can check
 *   files/disk.h          the tier DISK of kvswap.trtllm.batched_copy
 *   files/engine_uring.h  whether io_uring works here, for `kvswap doctor`
 *   files/gds.h           see device/faults.h
 *   files/store.h         numbers of all stores at once, for kvswap.metrics
 *   host/device.h         see device/faults.h
 *   hostpool/budget.h     memory that the machine can give, for `kvswap doctor` and replay
 *   hostpool/metrics.h    numbers of all host pools at once, for kvswap.metrics
 *   paths/calibration.h   files of kvswap.calibrate
 *   paths/costs_default.h the built-in costs, for kvswap.calibrate
 *   paths/names.h         the names of paths in messages
 *   paths/predict.h       see device/faults.h
 *   remote/exit.h         the end of a process with open clients of Mooncake, which only Python opens
 *   remote/header.h       headers of blocks in Mooncake's memory, whose client is Python's
 *   replicas/index.h      the index of blocks that the replicas of an engine share: for kvswap.vllm alone
 *   share/share.h         kvswap.share: sharing links between the ranks of an engine, which are Python's processes
 */
#ifndef KVS_PRIVATE_H
#define KVS_PRIVATE_H

#include "kvswap.h"

struct kvs_device;
struct kvs_costs;
struct kvs_pattern_job;

/* -- engine/engine.c ----------------------------------------------------------------------------------------------- */
/* Private: they serve kvswap.calibrate and kvswap.testing. */

/* Whether a device would open with the variables KVSWAP_... of the environment; err names the first wrong one. */
int kvs_environment_check(struct kvs_error *err);

/* Call before destroying a stream of the engine. True: the engine destroys it later: the compute stream once another is
 * set or the engine ends, any other once no submission is in progress. */
bool kvs_engine_keep_stream(struct kvs_engine *engine, uint64_t stream);

/* Replace the costs; NULL: by the built-in ones. Both as kvs_costs_fit() has them for the device. No submission may be
 * in progress. kvs_engine_open() takes the machine's calibration, else the built-in costs. */
void kvs_engine_set_costs(struct kvs_engine *engine, const struct kvs_costs *costs, const char *note);
const struct kvs_costs *kvs_engine_costs(const struct kvs_engine *engine);

/* Unfinished transfers that a lane holds before KVS_QUEUE_FULL; 1 to 65536, default 128. New lanes only. */
int kvs_engine_set_lane_depth(struct kvs_engine *engine, uint64_t depth, struct kvs_error *err);

/* The stream after which transfers without a stream start. */
uint64_t kvs_engine_compute_stream(struct kvs_engine *engine);

/* For tests that must fail: skip the waits for one kind of hazard, "raw", "war" or "waw"; NULL: skip none. */
int kvs_engine_skip_hazard(struct kvs_engine *engine, const char *kind, struct kvs_error *err);

/* -- lanes/registry.c ---------------------------------------------------------------------------------------------- */
/* Private: they show the seam below the C surface, and count releases of Python objects. */

/* The device of an engine, for streams, events and tests. Borrowed; lives as long as the engine. */
struct kvs_device *kvs_engine_device(struct kvs_engine *engine);

/* The engine that kvs_engine_open() made with this number, from 0; NULL: no more. These engines stay until the process
 * ends. */
struct kvs_engine *kvs_engine_at(unsigned number);

/* Around every release of callers' objects. A caller whose object is not free yet may have to wait for the thread that
 * is releasing it: kvs_release_wait() returns once no other thread releases anything; KVS_TIMEOUT. A thread that is
 * releasing itself does not wait, as two could wait for each other. */
void kvs_release_begin(void);
void kvs_release_end(void);
int kvs_release_wait(int64_t timeout_ns, struct kvs_error *err);

/* -- lanes/lane.c -------------------------------------------------------------------------------------------------- */
/* Private: kvswap waits for room in a full lane only where Python asks for it. */

/* For a caller that was refused with KVS_QUEUE_FULL: transfers that have ended so far, read before submitting; and wait
 * until there are more. KVS_TIMEOUT: none has ended. */
uint64_t kvs_engine_ended(const struct kvs_engine *engine);
void kvs_engine_uncount_full(struct kvs_engine *engine); /* the caller waits for room: its last refusal is none */
int kvs_engine_wait_ended(struct kvs_engine *engine, uint64_t ended, int64_t timeout_ns, struct kvs_error *err);

/* -- calls/swap.c -------------------------------------------------------------------------------------------------- */
/* Private: a C program knows which side is which. */

/* Which way a copy from src to dst goes, by the memory that they lie in. KVS_OTHER_DIRECTION: within one kind. */
int kvs_direction_between(struct kvs_engine *engine, uint64_t src, uint64_t dst, enum kvs_direction *direction,
                          struct kvs_error *err);

/* -- paths/table.c ------------------------------------------------------------------------------------------------- */
/* Private: for devices(), which opens none. */

/* Of paths, for what is said of devices that are not open. threads: the device's copy, so that it is a host device.
 * lender: another device's link. */
bool kvs_path_needs_kernels(enum kvs_path path);
bool kvs_path_needs_threads(enum kvs_path path);
bool kvs_path_codes(enum kvs_path path);
bool kvs_path_needs_lender(enum kvs_path path);

/* -- memory/pool.c ------------------------------------------------------------------------------------------------- */
/* Private: a wait with a limit, and a check that other layers make before they use a pool. */

/* As kvs_pool_open(), which waits for a minute for memory that another thread is giving back. KVS_TIMEOUT. */
#define KVS_POOL_PATIENCE_NS (INT64_C(60) * 1000000000)
int kvs_pool_open_within(struct kvs_engine *, const struct kvs_pool_layout *, int64_t timeout_ns, struct kvs_pool **,
                         struct kvs_error *);

/* KVS_CLOSED: the memory that the pool lies in has been freed, and may be another's. */
int kvs_pool_check_open(const struct kvs_pool *, struct kvs_error *);

/* -- memory/memory.c ----------------------------------------------------------------------------------------------- */
/* Private: waits with a limit, and destructors, which must not wait. */

/* As kvs_engine_alloc(). KVS_ALLOC_CHUNKS: device memory mapped in chunks, as torch's expandable segments are; each
 * chunk can be shared with other processes by a descriptor. */
enum kvs_alloc { KVS_ALLOC_DEVICE, KVS_ALLOC_HOST, KVS_ALLOC_CHUNKS };
int kvs_engine_alloc_kind(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, uint64_t *ptr,
                          struct kvs_error *err);
/* The same in a thread, since a driver with little memory left waits for the device. Waits for frees under way if there
 * is no room. KVS_TIMEOUT: what is allocated later is freed. */
int kvs_engine_alloc_within(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, int64_t timeout_ns,
                            uint64_t *ptr, struct kvs_error *err);

/* kvs_engine_free() and kvs_engine_unregister() with a limit. kept: the call failed and may be made again. */
int kvs_engine_free_within(struct kvs_engine *engine, uint64_t ptr, int64_t timeout_ns, bool *kept,
                           struct kvs_error *err);
int kvs_engine_unregister_within(struct kvs_engine *engine, uint64_t ptr, int64_t timeout_ns, bool *kept,
                                 struct kvs_error *err);

/* Free without waiting, for destructors: the memory is freed when the device's work has ended. */
void kvs_engine_free_later(struct kvs_engine *engine, uint64_t ptr);

/* -- hostpool/hostalloc.c ------------------------------------------------------------------------------------------ */
/* Private: waits with a limit. */

/* kvs_host_free() and kvs_host_unregister() with a limit. kvs_host_adopt() turns an allocation of the engine into one
 * of kvs_host_alloc(). */
int kvs_host_give_back(uint64_t ptr, bool registered, int64_t timeout_ns, struct kvs_error *err);
int kvs_host_adopt(struct kvs_engine *engine, uint64_t ptr, struct kvs_error *err);

#endif
