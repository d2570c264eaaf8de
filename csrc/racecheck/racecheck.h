/* The race checker: finds accesses to one block that nothing orders, whatever their timing was in this run.
 *
 * Each stream and event has a vector clock. Every event that kvswap records, waits for or sees reached advances the
 * clocks (kvs_watch in device/watch.h). Transfers note which blocks they read and write, on which stream, when they are
 * queued. Two accesses to the same bytes of a slot, one of them a write, are a race unless the second's stream comes
 * after the first. The host has a clock too: what it has seen to end comes before all that it queues later.
 *
 * Only what the *caller* sees to end counts. kvswap also queries streams and events by itself, at times that depend on
 * timing, and skips waits for work that has ended; a race must not be found or missed because of that. So kvswap makes
 * these queries within kvs_racecheck_internal(). A transfer keeps a point (the clock when it was queued). When the
 * caller sees the transfer's end, or work is ordered after the transfer, kvs_racecheck_follow() tells the checker,
 * whether or not a wait was needed.
 *
 * One checker for the process and all its devices. When off it costs one relaxed load at each hook. Its lock is a leaf
 * that may be taken under any other; the device is queried before the lock is taken.
 *
 * Out of its sight: an engine's own kernels, events and synchronisations that do not go through kvswap (use
 * kvs_note_access, kvs_note_order), the legacy stream's implicit order with blocking streams, memory outside pools. All
 * host threads share one clock: what one has seen to end counts as seen by all, so a race that only a missing lock
 * between threads makes is not found. */
#ifndef KVS_RACECHECK_H
#define KVS_RACECHECK_H

#include <stdatomic.h>

#include "device/device.h"
#include "kvswap.h"

extern atomic_bool kvs_racecheck_running;

static inline bool kvs_racecheck_on(void) { return atomic_load_explicit(&kvs_racecheck_running, memory_order_relaxed); }

/* An access to bytes [begin, end) of each block in `ids`, on `stream`. *accessor is copied; accesses with the same
 * accessor->transfer (not 0) are one accessor and are reported once. `pool` is the number of a pool (kvs_pool.number),
 * unique in the process and never reused; `slots` bounds the ids. */
struct kvs_race_access {
  struct kvs_device *device;
  kvs_stream stream;
  uint64_t pool, slots;
  const char *pool_name;
  const int64_t *ids;
  size_t count;
  bool write;
  uint64_t begin, end;
  const struct kvs_race_accessor *accessor;
};

/* Note the access and record its races. Call it when all waits of the work are queued but the work is not. Never fails:
 * when memory runs out, the checker reports that once, as a race with an empty pool name, and stays silent until it is
 * started again. */
void kvs_racecheck_access(const struct kvs_race_access *access);

/* An access whose slots are not known yet (ids NULL): notes when it happens, and returns a number for
 * kvs_racecheck_fulfil(), which gives the slots; 0: none is needed. Later accesses to the pool are kept, with their
 * clocks, and compared in order once the slots are known: what is found does not depend on when that is. At most
 * KVS_RACE_KEPT are kept for a pool; then slots that are still unknown count as none. */
enum { KVS_RACE_KEPT = 4096 };
uint64_t kvs_racecheck_reserve(const struct kvs_race_access *access);
void kvs_racecheck_fulfil(uint64_t pool, uint64_t number, const int64_t *ids, size_t count);

/* Drop all state of a pool that is closed, or of a device that is about to be closed. Their work has ended. */
void kvs_racecheck_forget_pool(uint64_t pool);
void kvs_racecheck_forget_device(const struct kvs_device *device);

/* Note order: `event`, or all that is queued on `stream` if event is 0, comes before later work on `later` (of
 * later_device). later_device NULL: before what the host queues later. An event that kvswap did not record orders
 * nothing: name its stream. */
void kvs_racecheck_order(struct kvs_device *device, kvs_stream stream, kvs_event event, struct kvs_device *later_device,
                         kvs_stream later);

/* A point: a snapshot of what was queued on a stream, or on a device, kept in place of an event. NULL if the checker is
 * off or out of memory. NULL, and points of an earlier session, order nothing. The caller drops its reference, whether
 * or not the checker is on. */
struct kvs_race_point;
struct kvs_race_point *kvs_racecheck_point(struct kvs_device *device, kvs_stream stream);
struct kvs_race_point *kvs_racecheck_point_all(struct kvs_device *device);
struct kvs_race_point *kvs_racecheck_point_ref(struct kvs_race_point *point); /* one more reference; NULL stays NULL */
void kvs_racecheck_point_free(struct kvs_race_point *point);                  /* drops a reference */
/* The point comes before later work on `later`. later_device NULL: the caller saw that the point was reached. */
void kvs_racecheck_follow(const struct kvs_race_point *point, struct kvs_device *later_device, kvs_stream later);
/* Let the event stand for the point, as if recorded there. */
void kvs_racecheck_stands_for(struct kvs_device *device, kvs_event event, const struct kvs_race_point *point);

/* Set around kvswap's own queries on this thread: what they find to have ended, the caller has not seen. Returns the
 * previous value, to be restored. */
bool kvs_racecheck_internal(bool internal);

#endif
