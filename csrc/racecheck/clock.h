/* Vector clocks of streams, events and the host, and the access history of a pool's slots: the state of the race
 * checker. Pure: no device, no time, no lock; racecheck.c guards it. clock.c states the rules by which clocks advance.
 *
 * Functions return false or NULL only when memory runs out, unless they say otherwise. */
#ifndef KVS_CLOCK_H
#define KVS_CLOCK_H

#include "kvswap.h"

enum {
  KVS_HISTORY_LIMIT = 256, /* accesses that a slot keeps: some 80 layers, each written once and read twice */
};

/* The owner of the clock comes after the first tick[i] steps of stream i. A clock with several references is not
 * changed, so a snapshot is a reference. NULL: comes after nothing. */
struct kvs_clock {
  unsigned refs;
  uint32_t count;
  uint64_t tick[];
};

static inline uint64_t kvs_clock_at(const struct kvs_clock *clock, uint32_t stream) {
  return clock && stream < clock->count ? clock->tick[stream] : 0;
}

struct kvs_clock *kvs_clock_ref(struct kvs_clock *clock);
void kvs_clock_unref(struct kvs_clock *clock);
/* Raise one component to at least `to`. */
bool kvs_clock_raise(struct kvs_clock **clock, uint32_t stream, uint64_t to);

/* Identity of a stream: the driver's id, which is never reused, unlike the handle. by_handle: the driver gave no id,
 * and `id` is the handle. */
struct kvs_stream_key {
  const void *device;
  uint64_t id;
  bool by_handle;
};

/* The clocks of streams (by number), of events and of the host. Zero-initialised: nothing has happened. */
struct kvs_clocks {
  struct kvs_clock *host;
  struct kvs_stream_clock *streams;
  uint32_t nstreams, capacity;
  struct kvs_event_clock *events[1024]; /* hash table by device and handle */
};

#define KVS_CLOCK_HOST UINT32_MAX /* the host, in place of a stream's number */

bool kvs_clocks_stream(struct kvs_clocks *clocks, const struct kvs_stream_key *key, uint32_t *number);
struct kvs_clock *kvs_clocks_of(const struct kvs_clocks *clocks,
                                uint32_t owner); /* borrowed; NULL: comes after nothing */
/* `owner` (a stream's number or KVS_CLOCK_HOST) joins the clock: it now comes after all that the clock covers. */
bool kvs_clocks_join(struct kvs_clocks *clocks, uint32_t owner, struct kvs_clock *clock);
/* Snapshot: a reference to the clock of a stream, or to the join of all streams of a device; then their ticks advance.
 * A device without streams gives *snapshot NULL. */
struct kvs_clock *kvs_clocks_snapshot(struct kvs_clocks *clocks, uint32_t stream);
bool kvs_clocks_snapshot_all(struct kvs_clocks *clocks, const void *device, struct kvs_clock **snapshot);
struct kvs_clock *kvs_clocks_event(const struct kvs_clocks *clocks, const void *device,
                                   uint64_t event); /* borrowed; NULL: unknown */
bool kvs_clocks_set_event(struct kvs_clocks *clocks, const void *device, uint64_t event, struct kvs_clock *clock);
void kvs_clocks_forget_event(struct kvs_clocks *clocks, const void *device, uint64_t event);
void kvs_clocks_forget_device(struct kvs_clocks *clocks, const void *device); /* all its work has ended */
void kvs_clocks_free(struct kvs_clocks *clocks);

/* An accessor, for reports: one for each transfer, pool and kind of access, or one for each kvs_note_access(). */
struct kvs_accessor {
  unsigned refs;
  uint64_t serial;
  uint64_t reported[2]; /* serials of the last reading and the last writing accessor that raced with this one */
  struct kvs_race_accessor info;
};

/* An access of one call to one pool, shared by all slots that the call touches. */
struct kvs_access {
  unsigned refs;
  bool write;
  uint32_t stream;
  uint64_t tick;       /* the stream's own component at the access: a clock at or above it comes after the access */
  uint64_t begin, end; /* bytes [begin, end) of each slot */
  struct kvs_accessor *accessor;
};

void kvs_accessor_unref(struct kvs_accessor *accessor);
void kvs_access_unref(struct kvs_access *access);
bool kvs_access_conflicts(const struct kvs_access *a, const struct kvs_access *b);
bool kvs_access_before(const struct kvs_access *access, const struct kvs_clock *now); /* `now` comes after the access */

/* The access history of one slot, oldest first: accesses that a later one may still race with. */
struct kvs_history {
  struct kvs_access **accesses;
  uint32_t count, capacity;
};

/* Add an access whose stream has the clock `now`, and drop those that need not be kept (clock.c). All later accesses
 * come after the clock `host`. */
bool kvs_history_add(struct kvs_history *history, struct kvs_access *access, const struct kvs_clock *now,
                     const struct kvs_clock *host);

/* The histories of a pool's slots, allocated on first access. Zero-initialised except `slots`, the number of slots. */
struct kvs_shadow {
  uint64_t slots;
  struct kvs_history **pages;
};

struct kvs_history *kvs_shadow_make(struct kvs_shadow *shadow, uint64_t slot); /* allocates it if needed */
void kvs_shadow_free(struct kvs_shadow *shadow);

#endif
