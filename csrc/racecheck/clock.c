/* Vector clocks and the access history of slots.
 *
 * Each stream has a vector clock: for every stream, how much of that stream's work comes before what this stream is
 * given next. (Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978; vector clocks:
 * Mattern and Fidge, 1988.) A stream's own component is its tick. An access stores only its stream and tick, an epoch
 * of FastTrack (Flanagan and Freund, PLDI 2009). That suffices to ask whether a clock comes after the access. The
 * rules, where "a joins b" sets each component of a to the maximum of both:
 *
 *   access on s         s joins the host's clock: the access is queued after all that the host has seen. An earlier
 *                       conflicting access is a race unless clock(s)[its stream] >= its tick
 *   record event on s   clock(event) = clock(s); then s's tick advances: the event does not cover later work of s
 *   s waits for event   s joins clock(event); an unknown event orders nothing
 *   caller sees event   the host joins clock(event)
 *   caller sees s idle  the host joins clock(s), whose tick then advances as for a record
 *
 * Everything else is made of these rules: a point is a record without an event; following a point, or a noted order, is
 * a wait or a look. Every snapshot of a clock advances the tick, so accesses between two snapshots may share a tick.
 *
 * When a slot may drop an access. Let `old` come before `new`, and let a later access `next` race with old. Then next
 * does not come after new either, or it would come after old. If new covers all bytes of old, and new writes or old
 * only reads, then next races with new too. That pair is reported instead: ordering new and next also orders old and
 * next. So old is dropped and no race is lost. (FastTrack keeps the last write and the reads since for the same
 * reason.) An access that comes before the host's clock comes before all later accesses, and is dropped too. */
#include "racecheck/clock.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE = 256 }; /* slots in a page */

/* -- clocks ---------------------------------------------------------------------------------------------------- */

struct kvs_clock *kvs_clock_ref(struct kvs_clock *clock) {
  if (clock) clock->refs++;
  return clock;
}

void kvs_clock_unref(struct kvs_clock *clock) {
  if (clock && --clock->refs == 0) free(clock);
}

/* Whether a is at least b in each component. */
static bool covers(const struct kvs_clock *a, const struct kvs_clock *b) {
  for (uint32_t i = 0; b && i < b->count; i++)
    if (kvs_clock_at(a, i) < b->tick[i]) return false;
  return true;
}

/* Make *clock writable: one reference, room for `count` streams. */
static bool own(struct kvs_clock **clock, uint32_t count) {
  struct kvs_clock *old = *clock;
  if (old && old->refs == 1 && old->count >= count) return true;
  if (old && old->count > count) count = old->count;
  struct kvs_clock *made = calloc(1, sizeof *made + count * sizeof made->tick[0]);
  if (!made) return false;
  made->refs = 1;
  made->count = count;
  if (old) memcpy(made->tick, old->tick, old->count * sizeof old->tick[0]);
  kvs_clock_unref(old);
  *clock = made;
  return true;
}

/* *into becomes the maximum of both in each component. */
static bool join(struct kvs_clock **into, struct kvs_clock *from) {
  if (covers(*into, from)) return true;
  if (covers(from, *into)) {
    kvs_clock_unref(*into);
    *into = kvs_clock_ref(from);
    return true;
  }
  if (!own(into, from->count)) return false;
  for (uint32_t i = 0; i < from->count; i++)
    if ((*into)->tick[i] < from->tick[i]) (*into)->tick[i] = from->tick[i];
  return true;
}

bool kvs_clock_raise(struct kvs_clock **clock, uint32_t stream, uint64_t to) {
  if (kvs_clock_at(*clock, stream) >= to) return true;
  if (!own(clock, stream + 1)) return false;
  (*clock)->tick[stream] = to;
  return true;
}

/* -- clocks of streams, events and the host ------------------------------------------------------------------------ */

/* The numbers of a closed device's streams are reused; ticks continue, so old accesses stay in the past. */
struct kvs_stream_clock {
  struct kvs_stream_key key; /* device NULL: the entry is free */
  uint64_t tick;             /* of a free entry: its last tick */
  struct kvs_clock *clock;
};

struct kvs_event_clock {
  const void *device;
  uint64_t event;
  struct kvs_clock *clock;
  struct kvs_event_clock *next;
};

static bool same(const struct kvs_stream_key *a, const struct kvs_stream_key *b) {
  return a->device == b->device && a->id == b->id && a->by_handle == b->by_handle;
}

bool kvs_clocks_stream(struct kvs_clocks *clocks, const struct kvs_stream_key *key, uint32_t *number) {
  uint32_t at = clocks->nstreams;
  for (uint32_t i = 0; i < clocks->nstreams; i++) {
    if (same(&clocks->streams[i].key, key)) {
      *number = i;
      return true;
    }
    if (!clocks->streams[i].key.device) at = i;
  }
  if (at == clocks->capacity) {
    uint32_t larger = at ? 2 * at : 16;
    struct kvs_stream_clock *grown = realloc(clocks->streams, larger * sizeof *grown);
    if (!grown) return false;
    clocks->streams = grown;
    clocks->capacity = larger;
  }
  if (at == clocks->nstreams) clocks->streams[clocks->nstreams++] = (struct kvs_stream_clock){.tick = 0};
  struct kvs_stream_clock *stream = &clocks->streams[at];
  stream->key = *key;
  *number = at;
  return kvs_clock_raise(&stream->clock, at, stream->tick + 1);
}

static struct kvs_clock **clock_of(struct kvs_clocks *clocks, uint32_t owner) {
  return owner == KVS_CLOCK_HOST ? &clocks->host : &clocks->streams[owner].clock;
}

struct kvs_clock *kvs_clocks_of(const struct kvs_clocks *clocks, uint32_t owner) {
  return owner == KVS_CLOCK_HOST ? clocks->host : clocks->streams[owner].clock;
}

static bool tick(struct kvs_clocks *clocks, uint32_t stream) {
  struct kvs_clock **clock = clock_of(clocks, stream);
  return kvs_clock_raise(clock, stream, kvs_clock_at(*clock, stream) + 1);
}

bool kvs_clocks_join(struct kvs_clocks *clocks, uint32_t owner, struct kvs_clock *clock) {
  return join(clock_of(clocks, owner), clock);
}

struct kvs_clock *kvs_clocks_snapshot(struct kvs_clocks *clocks, uint32_t stream) {
  struct kvs_clock *snapshot = kvs_clock_ref(kvs_clocks_of(clocks, stream));
  if (tick(clocks, stream)) return snapshot;
  kvs_clock_unref(snapshot);
  return NULL;
}

bool kvs_clocks_snapshot_all(struct kvs_clocks *clocks, const void *device, struct kvs_clock **snapshot) {
  bool well = true;
  *snapshot = NULL;
  for (uint32_t i = 0; well && i < clocks->nstreams; i++) {
    if (clocks->streams[i].key.device != device) continue;
    struct kvs_clock *one = kvs_clocks_snapshot(clocks, i);
    well = one && join(snapshot, one);
    kvs_clock_unref(one);
  }
  if (well) return true;
  kvs_clock_unref(*snapshot);
  return false;
}

static struct kvs_event_clock **find_event(struct kvs_clocks *clocks, const void *device, uint64_t event) {
  uint64_t hash = (event ^ (uint64_t)(uintptr_t)device >> 4) * 0x9E3779B97F4A7C15u;
  struct kvs_event_clock **at = &clocks->events[hash >> 54];
  while (*at && ((*at)->device != device || (*at)->event != event)) at = &(*at)->next;
  return at;
}

struct kvs_clock *kvs_clocks_event(const struct kvs_clocks *clocks, const void *device, uint64_t event) {
  const struct kvs_event_clock *found = *find_event((struct kvs_clocks *)clocks, device, event);
  return found ? found->clock : NULL;
}

bool kvs_clocks_set_event(struct kvs_clocks *clocks, const void *device, uint64_t event, struct kvs_clock *clock) {
  struct kvs_event_clock **at = find_event(clocks, device, event);
  if (!*at) {
    *at = calloc(1, sizeof **at);
    if (!*at) return false;
    (*at)->device = device;
    (*at)->event = event;
  }
  kvs_clock_ref(clock);
  kvs_clock_unref((*at)->clock);
  (*at)->clock = clock;
  return true;
}

static void take_out(struct kvs_event_clock **at) {
  struct kvs_event_clock *event = *at;
  *at = event->next;
  kvs_clock_unref(event->clock);
  free(event);
}

void kvs_clocks_forget_event(struct kvs_clocks *clocks, const void *device, uint64_t event) {
  struct kvs_event_clock **at = find_event(clocks, device, event);
  if (*at) take_out(at);
}

void kvs_clocks_forget_device(struct kvs_clocks *clocks, const void *device) {
  for (uint32_t i = 0; i < clocks->nstreams; i++) {
    struct kvs_stream_clock *stream = &clocks->streams[i];
    if (stream->key.device != device) continue;
    uint64_t tick = kvs_clock_at(stream->clock, i);
    kvs_clock_unref(stream->clock);
    *stream = (struct kvs_stream_clock){.tick = tick};
  }
  for (size_t i = 0; i < sizeof clocks->events / sizeof clocks->events[0]; i++)
    for (struct kvs_event_clock **at = &clocks->events[i]; *at;)
      if ((*at)->device == device)
        take_out(at);
      else
        at = &(*at)->next;
}

void kvs_clocks_free(struct kvs_clocks *clocks) {
  for (uint32_t i = 0; i < clocks->nstreams; i++) kvs_clock_unref(clocks->streams[i].clock);
  free(clocks->streams);
  for (size_t i = 0; i < sizeof clocks->events / sizeof clocks->events[0]; i++)
    while (clocks->events[i]) take_out(&clocks->events[i]);
  kvs_clock_unref(clocks->host);
  *clocks = (struct kvs_clocks){.host = NULL};
}

/* -- accesses -------------------------------------------------------------------------------------------------- */

void kvs_accessor_unref(struct kvs_accessor *accessor) {
  if (accessor && --accessor->refs == 0) free(accessor);
}

void kvs_access_unref(struct kvs_access *access) {
  if (!access || --access->refs) return;
  kvs_accessor_unref(access->accessor);
  free(access);
}

bool kvs_access_conflicts(const struct kvs_access *a, const struct kvs_access *b) {
  return (a->write || b->write) && a->begin < b->end && b->begin < a->end;
}

bool kvs_access_before(const struct kvs_access *access, const struct kvs_clock *now) {
  return kvs_clock_at(now, access->stream) >= access->tick;
}

/* Every access that conflicts with old conflicts with newer. */
static bool stands_for(const struct kvs_access *newer, const struct kvs_access *old) {
  return (newer->write || !old->write) && newer->begin <= old->begin && old->end <= newer->end;
}

bool kvs_history_add(struct kvs_history *history, struct kvs_access *access, const struct kvs_clock *now,
                     const struct kvs_clock *host) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < history->count; i++) {
    struct kvs_access *old = history->accesses[i];
    if (kvs_access_before(old, host) || (stands_for(access, old) && kvs_access_before(old, now)))
      kvs_access_unref(old);
    else
      history->accesses[kept++] = old;
  }
  history->count = kept;
  if (kept == KVS_HISTORY_LIMIT) {
    kvs_access_unref(history->accesses[0]);
    memmove(history->accesses, history->accesses + 1, --history->count * sizeof history->accesses[0]);
  }
  if (history->count == history->capacity) {
    uint32_t larger = history->capacity ? 2 * history->capacity : 2;
    struct kvs_access **grown = realloc(history->accesses, larger * sizeof *grown);
    if (!grown) return false;
    history->accesses = grown;
    history->capacity = larger;
  }
  access->refs++;
  history->accesses[history->count++] = access;
  return true;
}

/* -- slots ----------------------------------------------------------------------------------------------------- */

struct kvs_history *kvs_shadow_make(struct kvs_shadow *shadow, uint64_t slot) {
  if (!shadow->pages) shadow->pages = calloc(shadow->slots / PAGE + 1, sizeof *shadow->pages);
  if (!shadow->pages) return NULL;
  struct kvs_history **page = &shadow->pages[slot / PAGE];
  if (!*page) *page = calloc(PAGE, sizeof **page);
  return *page ? &(*page)[slot % PAGE] : NULL;
}

void kvs_shadow_free(struct kvs_shadow *shadow) {
  for (uint64_t i = 0; shadow->pages && i <= shadow->slots / PAGE; i++) {
    for (uint64_t j = 0; shadow->pages[i] && j < PAGE; j++) {
      struct kvs_history *history = &shadow->pages[i][j];
      while (history->count) kvs_access_unref(history->accesses[--history->count]);
      free(history->accesses);
    }
    free(shadow->pages[i]);
  }
  free(shadow->pages);
  shadow->pages = NULL;
}
