/* An engine: an open device with its regions, lanes and staging. What the bindings use beyond kvswap.h. */
#ifndef KVS_ENGINE_H
#define KVS_ENGINE_H

#include "base/wait.h"
#include "device/device.h"
#include "kvswap.h"
#include "memory/reclaim.h"
#include "plan/cost.h"

/* The device of an engine, for streams, events and tests. Borrowed; lives as long as the engine. */
struct kvs_device *kvs_engine_device(struct kvs_engine *engine);

/* Call before destroying a stream of the engine. True: the engine destroys it later: the compute stream once another is
 * set or the engine ends, any other once no submission is in progress. */
bool kvs_engine_keep_stream(struct kvs_engine *engine, kvs_stream stream);

/* The engine that kvs_engine_open() made with this number, from 0; NULL: no more. These engines stay until the process
 * ends. */
struct kvs_engine *kvs_engine_at(unsigned number);

/* KVS_CLOSED: the memory that the pool lies in has been freed, and may be another's. */
int kvs_pool_check_open(const struct kvs_pool *, struct kvs_error *);
/* Why path burst is off, or has less memory than wanted; empty: neither. And the source of the costs that AUTO predicts
 * with. */
enum { KVS_BURST_NOTE = 160 };
void kvs_engine_burst_note(struct kvs_engine *engine, char note[KVS_BURST_NOTE]);
const char *kvs_engine_costs_note(const struct kvs_engine *engine);
/* Replace the costs; NULL: by the built-in ones. Both as kvs_costs_fit() has them for the device. No submission may be
 * in progress. kvs_engine_open() takes the machine's calibration, else the built-in costs. */
void kvs_engine_set_costs(struct kvs_engine *engine, const struct kvs_costs *costs, const char *note);
const struct kvs_costs *kvs_engine_costs(const struct kvs_engine *engine);

/* Unfinished transfers that a lane holds before KVS_QUEUE_FULL; 1 to 65536, default 128. New lanes only. */
int kvs_engine_set_lane_depth(struct kvs_engine *engine, uint64_t depth, struct kvs_error *err);

/* For a caller that was refused with KVS_QUEUE_FULL: transfers that have ended so far, read before submitting; and wait
 * until there are more. KVS_TIMEOUT: none has ended. */
uint64_t kvs_engine_ended(const struct kvs_engine *engine);
void kvs_engine_uncount_full(struct kvs_engine *engine); /* the caller waits for room: its last refusal is none */
int kvs_engine_wait_ended(struct kvs_engine *engine, uint64_t ended, int64_t timeout_ns, struct kvs_error *err);

/* Device memory in which bursts are packed: for each direction `count` slots (2 to 8) of slot_nbytes, and a spare set
 * of two half-size slots. 0: free the memory; path burst is off. Waits at most timeout_ns for the transfers that use
 * slots. Allocating and freeing may delay other work on the device. */
int kvs_engine_set_slots(struct kvs_engine *engine, uint64_t slot_nbytes, unsigned count, int64_t timeout_ns,
                         struct kvs_error *err);
uint64_t kvs_engine_slots_nbytes(const struct kvs_engine *engine); /* total of both directions */

/* The stream after which transfers without a stream start. */
kvs_stream kvs_engine_compute_stream(struct kvs_engine *engine);

/* For tests that must fail: skip the waits for one kind of hazard, "raw", "war" or "waw"; NULL: skip none. */
int kvs_engine_skip_hazard(struct kvs_engine *engine, const char *kind, struct kvs_error *err);

/* As kvs_engine_alloc(). KVS_ALLOC_CHUNKS: device memory mapped in chunks, as torch's expandable segments are; each
 * chunk can be shared with other processes by a descriptor. */
enum kvs_alloc { KVS_ALLOC_DEVICE, KVS_ALLOC_HOST, KVS_ALLOC_CHUNKS };
int kvs_engine_alloc_kind(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, uint64_t *ptr,
                          struct kvs_error *err);

/* The same. If a pending free may make room, waits at most timeout_ns for it. */
int kvs_engine_alloc_within(struct kvs_engine *engine, size_t nbytes, enum kvs_alloc kind, int64_t timeout_ns,
                            uint64_t *ptr, struct kvs_error *err);

/* kvs_engine_free() and kvs_engine_unregister() in steps (memory/reclaim.h), for callers with work between waits:
 * start, kvs_reclaim_wait (KVS_TIMEOUT: again), kvs_reclaim_leave. */
int kvs_engine_free_start(struct kvs_engine *engine, uint64_t ptr, struct kvs_reclaim **task, struct kvs_error *err);
int kvs_engine_unregister_start(struct kvs_engine *engine, uint64_t ptr, struct kvs_reclaim **task,
                                struct kvs_error *err);
int kvs_engine_unregister_within(struct kvs_engine *engine, uint64_t ptr, int64_t timeout_ns, struct kvs_error *err);

/* memory/hostalloc.c: kvs_host_free() and kvs_host_unregister() in steps; `kept`: nothing was freed. kvs_host_adopt()
 * turns an allocation of the engine into one of kvs_host_alloc(). */
struct kvs_host_giving;
int kvs_host_give_start(uint64_t ptr, bool registered, struct kvs_host_giving **giving, struct kvs_error *err);
struct kvs_reclaim *kvs_host_giving_task(const struct kvs_host_giving *giving);
void kvs_host_give_end(struct kvs_host_giving *giving, bool kept);
int kvs_host_adopt(struct kvs_engine *engine, uint64_t ptr, struct kvs_error *err);

/* Around every release of callers' objects. A caller whose object is not free yet may have to wait for the thread that
 * is releasing it: kvs_release_wait() returns once no other thread releases anything; KVS_TIMEOUT. A thread that is
 * releasing itself does not wait, as two could wait for each other. */
void kvs_release_begin(void);
void kvs_release_end(void);
int kvs_release_wait(int64_t timeout_ns, struct kvs_error *err);

/* Free without waiting, for destructors: the memory is freed when the device's work has ended. */
void kvs_engine_free_later(struct kvs_engine *engine, uint64_t ptr);

/* kvs_engine_synchronize() in steps, for callers with work between waits: start, wait (KVS_TIMEOUT: again), drop. */
struct kvs_sync;
int kvs_sync_start(struct kvs_engine *engine, struct kvs_sync **sync, struct kvs_error *err);
int kvs_sync_wait(struct kvs_sync *sync, int64_t timeout_ns, struct kvs_error *err);
void kvs_sync_drop(struct kvs_sync *sync);

/* The test pattern (kernels.h) over a list of items, enqueued on a stream. CHECK compares, WRITE writes. The items are
 * copied. The caller frees the job. kvs_pattern_wait() waits (timeout_ns < 0: no limit); kvs_pattern_free() never does.
 */
struct kvs_pattern_job;
int kvs_pattern_submit(struct kvs_engine *engine, enum kvs_pattern_mode mode, const struct kvs_pattern_item *items,
                       size_t nitems, kvs_stream stream, struct kvs_pattern_job **job, struct kvs_error *err);
bool kvs_pattern_done(struct kvs_pattern_job *job);
int kvs_pattern_wait(struct kvs_pattern_job *job, int64_t timeout_ns, struct kvs_pattern_result *result,
                     struct kvs_error *err);
void kvs_pattern_free(struct kvs_pattern_job *job);

/* Keep a stream busy for a time (at most 10 s): for order tests and demonstrations. */
int kvs_delay(struct kvs_engine *engine, uint64_t ns, kvs_stream stream, struct kvs_error *err);

#endif
