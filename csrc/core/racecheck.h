/* The race checker: finds accesses to one block that nothing orders, whatever their timing was this time.
 *
 * A vector clock a stream and event. Every event recorded, waited for or seen to be reached through kvswap moves the
 * clocks (device.h's watch); transfers note which blocks they read and write, on which stream, as they are queued. Two
 * accesses to the same bytes of a slot, one of them a write, are a race unless the second's stream has heard of the
 * first. The host is one more clock: what it has seen to be over orders all that it queues afterwards.
 *
 * Only what the *caller* sees to be over counts. kvswap itself also looks at streams and events, at moments that depend
 * on timing, and leaves out waits for what it finds to have ended; a race must not be found or missed for that. So it
 * looks within kvs_racecheck_internal(), a transfer keeps a point (what had been queued when it was), and when the
 * caller asks about the transfer, or the caller or kvswap itself orders something after it, kvs_racecheck_follow() says
 * so, whether or not anything was left to wait for.
 *
 * One checker a process, for all its devices. Off, it costs one relaxed load where it would look. Its lock is a leaf
 * that may be taken under any other; the device is asked before it is taken.
 *
 * What it cannot see: an engine's own kernels, events and synchronisations that do not go through kvswap (they are
 * told: kvs_note_access, kvs_note_order), the legacy stream's implicit order with blocking streams, memory outside
 * pools. Host threads count as one: a race between two of them that only their locks decide is not found. */
#ifndef KVS_RACECHECK_H
#define KVS_RACECHECK_H

#include <stdatomic.h>

#include "device/device.h"
#include "kvswap.h"

extern atomic_bool kvs_racecheck_running;

static inline bool kvs_racecheck_on(void) { return atomic_load_explicit(&kvs_racecheck_running, memory_order_relaxed); }

/* Blocks that are read or written by something on `stream`, bytes [begin, end) of each. What stands in `who` is copied;
 * accesses with the same who->transfer (not 0) are one party and are reported once.
 * `pool` is the number of a pool (kvs_pool_number), unique in the process and never used again; `slots` bounds the ids.
 */
struct kvs_race_access {
  struct kvs_device *device;
  kvs_stream stream;
  uint64_t pool, slots;
  const char *pool_name;
  const int64_t *ids;
  size_t count;
  bool write;
  uint64_t begin, end;
  const struct kvs_race_party *accessor;
};

/* Note the access and report what it races with. Called with the work not yet queued but all its waits queued. Never
 * fails: where memory runs out the checker says so once, as a race with an empty pool name, and is silent until it is
 * started again. */
void kvs_racecheck_access(const struct kvs_race_access *access);

/* The pool is gone, the device is about to be closed: forget all about it. Their work is over. */
void kvs_racecheck_forget_pool(uint64_t pool);
void kvs_racecheck_forget_device(const struct kvs_device *device);

/* Order that was told of. Of `event` or, if that is 0, of all queued on `stream` so far: before whatever comes later on
 * `later` (of later_device), or with later_device NULL: before whatever the host queues later. An event that was not
 * recorded through kvswap says nothing: its stream must be told of. */
void kvs_racecheck_order(struct kvs_device *device, kvs_stream stream, kvs_event event, struct kvs_device *later_device,
                         kvs_stream later);

/* What had been queued on a stream, or on all of a device, at some moment: for whoever cannot say later which event
 * that was. NULL where the checker is off or has no memory; NULL and points of an earlier start order nothing. The
 * caller gets a reference, to be dropped whether or not the checker is on. */
struct kvs_race_point;
struct kvs_race_point *kvs_racecheck_point(struct kvs_device *device, kvs_stream stream);
struct kvs_race_point *kvs_racecheck_point_all(struct kvs_device *device);
struct kvs_race_point *kvs_racecheck_point_ref(struct kvs_race_point *point); /* one more reference; NULL of NULL */
void kvs_racecheck_point_free(struct kvs_race_point *point);                  /* drops one */
/* The point comes before whatever comes later on `later`, or with later_device NULL: the caller saw that it is over. */
void kvs_racecheck_follow(const struct kvs_race_point *point, struct kvs_device *later_device, kvs_stream later);
/* The event stands for the point, as if it had been recorded there. */
void kvs_racecheck_stands_for(struct kvs_device *device, kvs_event event, const struct kvs_race_point *point);

/* Round kvswap's own looking, on the calling thread: what the device's wrappers then find to be over was not seen by
 * the caller. Returns what to set it back to. */
bool kvs_racecheck_internal(bool internal);

#endif
