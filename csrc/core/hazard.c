/* The table of a pool's slots: see hazard.h. A slot is 32 bytes, half a cache line, and ids come in any order: what a
 * block costs is fetching its slot, so slots are fetched ahead, and all else is compares without guesswork.
 *
 * A read is asked about and noted by one rule, place_of_reader(): the place it would take. Whoever stands there, of
 * another lane and not ended, is the one that loses its place and is waited for. The rule looks at the slot, the lane
 * and `progress` alone, so that both times it says the same. */
#include "core/hazard.h"

#include <string.h>

enum { AHEAD = 16 }; /* slots under way from memory at a time: about what a core can have outstanding */

/* Slot ids[i]; the one that comes AHEAD of it is sent for, to be written: what is asked about is noted next. */
static inline struct kvs_slot *slot_at(const struct kvs_hazards *table, const int64_t *ids, size_t count, size_t i) {
  __builtin_prefetch(&table->slots[ids[i + AHEAD < count ? i + AHEAD : i]], 1);
  return &table->slots[ids[i]];
}

/* How many transfers a transfer of `lane` has to wait for until this one has ended: none (0 or less) where it has, as
 * for the stamp 0, and least of all for one of its own lane. */
static inline int64_t left_for(unsigned lane, kvs_stamp stamp, const struct kvs_progress *progress) {
  unsigned other = kvs_stamp_lane(stamp);
  uint64_t done = other < progress->lanes ? progress->done[other] : 0;
  int64_t left = (int64_t)(kvs_stamp_sequence(stamp) - done);
  return other == lane ? INT64_MIN : left;
}

static inline void wait_for(kvs_stamp stamp, enum kvs_hazard why, unsigned lane, const struct kvs_progress *progress,
                            struct kvs_needs *needs) {
  if (left_for(lane, stamp, progress) <= 0) return;
  unsigned other = kvs_stamp_lane(stamp);
  while (needs->lanes <= other) memset(needs->sequence[needs->lanes++], 0, sizeof needs->sequence[0]);
  uint64_t *sequence = &needs->sequence[other][why];
  if (*sequence < kvs_stamp_sequence(stamp)) *sequence = kvs_stamp_sequence(stamp);
}

/* Where a read of `lane` goes: the place that it has to wait least for. That is its lane's own, or a free one or one
 * whose reader has ended, or somebody else's. Of equals the first, so that places are used in order and lane 0, whose
 * stamps a free place looks like, meets its own first. */
static inline unsigned place_of_reader(const struct kvs_slot *slot, unsigned lane,
                                       const struct kvs_progress *progress) {
  int64_t least = INT64_MAX;
  unsigned place = 0;
  for (unsigned r = 0; r < KVS_SLOT_READERS; r++) {
    int64_t left = left_for(lane, slot->readers[r], progress);
    place = left < least ? r : place;
    least = left < least ? left : least;
  }
  return place;
}

void kvs_needs_reset(struct kvs_needs *needs, unsigned lanes) {
  memset(needs->sequence, 0, lanes * sizeof needs->sequence[0]);
  needs->lanes = lanes;
}

void kvs_hazards_read(const struct kvs_hazards *table, const int64_t *ids, size_t count, unsigned lane,
                      const struct kvs_progress *progress, struct kvs_needs *needs) {
  for (size_t i = 0; i < count; i++) {
    const struct kvs_slot *slot = slot_at(table, ids, count, i);
    wait_for(slot->write, KVS_RAW, lane, progress, needs);
    wait_for(slot->readers[place_of_reader(slot, lane, progress)], KVS_ROOM, lane, progress, needs);
  }
}

void kvs_hazards_write(const struct kvs_hazards *table, const int64_t *ids, size_t count, unsigned lane,
                       const struct kvs_progress *progress, struct kvs_needs *needs) {
  for (size_t i = 0; i < count; i++) {
    const struct kvs_slot *slot = slot_at(table, ids, count, i);
    wait_for(slot->write, KVS_WAW, lane, progress, needs);
    for (unsigned r = 0; r < KVS_SLOT_READERS; r++) wait_for(slot->readers[r], KVS_WAR, lane, progress, needs);
  }
}

/* A slot that is named twice was asked about twice while nothing changed: the same place, the same one to wait for. Now
 * the first time puts the lane in that place and the second finds it there as the lane's own: nobody else loses a
 * place, so what was waited for covers both. */
void kvs_hazards_note_read(struct kvs_hazards *table, const int64_t *ids, size_t count, kvs_stamp stamp,
                           const struct kvs_progress *progress) {
  for (size_t i = 0; i < count; i++) {
    struct kvs_slot *slot = slot_at(table, ids, count, i);
    slot->readers[place_of_reader(slot, kvs_stamp_lane(stamp), progress)] = stamp;
  }
}

/* Earlier readers need no memory: this write waits for them, and whoever comes later waits for this write. */
void kvs_hazards_note_write(struct kvs_hazards *table, const int64_t *ids, size_t count, kvs_stamp stamp) {
  for (size_t i = 0; i < count; i++) *slot_at(table, ids, count, i) = (struct kvs_slot){.write = stamp};
}
