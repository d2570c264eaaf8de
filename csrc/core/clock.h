/* Vector clocks, who has one, and what the slots of a pool remember of who visited them: the race checker's knowledge.
 * Pure: no device, no time, no lock; racecheck.c guards it. The rules by which clocks move stand in clock.c.
 *
 * Functions that return bool are false, and those that return a pointer NULL, only where memory ran out, unless they
 * say otherwise. */
#ifndef KVS_CLOCK_H
#define KVS_CLOCK_H

#include "kvswap.h"

enum {
  KVS_HISTORY_LIMIT = 256, /* visits that a slot remembers: some 80 layers, each written once and read twice */
};

/* How much of each stream's work the owner of the clock comes after: everything up to tick[stream]. Counted by its
 * holders and unchanged while there are several, so that to keep a clock as it is now is to take a reference. NULL is
 * the clock of what comes after nothing. */
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
/* *into becomes the greater of both in each component: its owner comes after all that `from` comes after. */
bool kvs_clock_join(struct kvs_clock **into, struct kvs_clock *from);
/* One component becomes at least `to`. */
bool kvs_clock_raise(struct kvs_clock **clock, uint32_t stream, uint64_t to);

/* Which stream: the driver's id on a device, which unlike the handle is not used again; where it gives none, the
 * handle.
 */
struct kvs_stream_key {
  const void *device;
  uint64_t id;
  bool by_handle;
};

/* All clocks: of streams by their numbers, of events and of the host. Zero-initialised: nothing has happened. */
struct kvs_clocks {
  struct kvs_clock *host;
  struct kvs_stream_clock *streams;
  uint32_t nstreams, capacity;
  struct kvs_event_clock *events[1024]; /* by a hash of device and handle */
};

#define KVS_CLOCK_HOST UINT32_MAX /* in the place of a stream's number */

bool kvs_clocks_stream(struct kvs_clocks *clocks, const struct kvs_stream_key *key, uint32_t *number);
struct kvs_clock *kvs_clocks_of(const struct kvs_clocks *clocks, uint32_t owner); /* borrowed; NULL: heard of nothing */
/* Who comes after all that the clock comes after. */
bool kvs_clocks_join(struct kvs_clocks *clocks, uint32_t owner, struct kvs_clock *clock);
/* The clock of all that the stream, or each stream of the device, was given so far: a reference. Of a device, *moment
 * is NULL where it has no streams yet. */
struct kvs_clock *kvs_clocks_snapshot(struct kvs_clocks *clocks, uint32_t stream);
bool kvs_clocks_snapshot_all(struct kvs_clocks *clocks, const void *device, struct kvs_clock **snapshot);
struct kvs_clock *kvs_clocks_event(const struct kvs_clocks *clocks, const void *device, uint64_t event); /* as _of */
bool kvs_clocks_set_event(struct kvs_clocks *clocks, const void *device, uint64_t event, struct kvs_clock *clock);
void kvs_clocks_forget_event(struct kvs_clocks *clocks, const void *device, uint64_t event);
void kvs_clocks_forget_device(struct kvs_clocks *clocks, const void *device); /* all its work is over */
void kvs_clocks_free(struct kvs_clocks *clocks);

/* Who visits, for reports: one a transfer, pool and kind of access, or one a call of anybody else's. */
struct kvs_accessor {
  unsigned refs;
  uint64_t serial;
  uint64_t reported[2]; /* serials of the last readers' and the last writers' party that raced with this one */
  struct kvs_race_party info;
};

/* One call's access to one pool, shared by all its slots. */
struct kvs_access {
  unsigned refs;
  bool write;
  uint32_t stream;
  uint64_t tick;       /* the stream's own component then: who has heard of that comes after this visit */
  uint64_t begin, end; /* bytes of each slot */
  struct kvs_accessor *accessor;
};

void kvs_accessor_unref(struct kvs_accessor *accessor);
void kvs_access_unref(struct kvs_access *access);
bool kvs_access_conflicts(const struct kvs_access *a, const struct kvs_access *b);
bool kvs_access_before(const struct kvs_access *access, const struct kvs_clock *now); /* `now` comes after the visit */

/* The visits of one slot that something later may yet race with, oldest first. */
struct kvs_history {
  struct kvs_access **accesses;
  uint32_t count, capacity;
};

/* Add a visit by whoever has the clock `now`, and forget what needs no remembering any more (clock.c); `host` is the
 * clock that everything later comes after. */
bool kvs_history_add(struct kvs_history *history, struct kvs_access *access, const struct kvs_clock *now,
                     const struct kvs_clock *host);

/* The slots of one pool, made as they are visited. Zero-initialised but for `slots`, how many there may be. */
struct kvs_shadow {
  uint64_t slots;
  struct kvs_history **pages;
};

struct kvs_history *kvs_shadow_make(struct kvs_shadow *shadow, uint64_t slot); /* there already or made now */
void kvs_shadow_free(struct kvs_shadow *shadow);

#endif
