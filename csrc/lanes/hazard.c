/* The hazard table: see hazard.h. A slot is 32 bytes, half a cache line, and ids come in any order. The cost of a block
 * is the cache miss on its slot, so slots are prefetched and the rest is branch-free compares.
 *
 * kvs_hazards_read() and kvs_hazards_note_read() use one rule, place_of_reader(): the entry that the read takes. An
 * unfinished reader of another lane in that entry is replaced and waited for. The rule depends only on the slot, the
 * lane and `progress`, so both calls pick the same entry. */
#include "lanes/hazard.h"

#include <string.h>

enum { AHEAD = 16 }; /* prefetch distance in slots: about the misses that a core can have outstanding */

/* Slot ids[i]. Prefetches the slot AHEAD of it for writing, since a query is followed by a note. */
static inline struct kvs_slot *slot_at(const struct kvs_hazards *table, const int64_t *ids, size_t count, size_t i) {
  __builtin_prefetch(&table->slots[ids[i + AHEAD < count ? i + AHEAD : i]], 1);
  return &table->slots[ids[i]];
}

/* How many transfers of the stamp's lane must still end before `stamp` has ended. 0 or less: it has ended, as for the
 * stamp 0. INT64_MIN for the own lane, which is never waited for. */
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

/* The entry for a read of `lane`: the one with the least left to wait for. That is its own lane's, or a free or ended
 * one, or another lane's. Ties go to the first, so entries fill in order. Lane 0, whose stamps look like free entries,
 * then finds its own first. */
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

static void wait_for_each(const uint64_t *sequences, enum kvs_hazard why, unsigned lane,
                          const struct kvs_progress *progress, struct kvs_needs *needs) {
  for (unsigned other = 0; other < progress->lanes; other++)
    if (sequences[other]) wait_for(kvs_stamp_of(other, sequences[other]), why, lane, progress, needs);
}

void kvs_hazards_whole(const struct kvs_hazards *table, bool write, unsigned lane, const struct kvs_progress *progress,
                       struct kvs_needs *needs) {
  wait_for_each(table->uses.writes, write ? KVS_WAW : KVS_RAW, lane, progress, needs);
  if (write) wait_for_each(table->uses.reads, KVS_WAR, lane, progress, needs);
}

/* What touched all slots. */
static void wait_for_whole(const struct kvs_hazards *table, bool write, unsigned lane,
                           const struct kvs_progress *progress, struct kvs_needs *needs) {
  if (!table->uses.whole) return;
  wait_for_each(table->uses.whole_writes, write ? KVS_WAW : KVS_RAW, lane, progress, needs);
  if (write) wait_for_each(table->uses.whole_reads, KVS_WAR, lane, progress, needs);
}

void kvs_hazards_read(const struct kvs_hazards *table, const int64_t *ids, size_t count, unsigned lane,
                      const struct kvs_progress *progress, struct kvs_needs *needs) {
  if (count) wait_for_whole(table, false, lane, progress, needs);
  for (size_t i = 0; i < count; i++) {
    const struct kvs_slot *slot = slot_at(table, ids, count, i);
    wait_for(slot->write, KVS_RAW, lane, progress, needs);
    wait_for(slot->readers[place_of_reader(slot, lane, progress)], KVS_ROOM, lane, progress, needs);
  }
}

void kvs_hazards_write(const struct kvs_hazards *table, const int64_t *ids, size_t count, unsigned lane,
                       const struct kvs_progress *progress, struct kvs_needs *needs) {
  if (count) wait_for_whole(table, true, lane, progress, needs);
  for (size_t i = 0; i < count; i++) {
    const struct kvs_slot *slot = slot_at(table, ids, count, i);
    wait_for(slot->write, KVS_WAW, lane, progress, needs);
    for (unsigned r = 0; r < KVS_SLOT_READERS; r++) wait_for(slot->readers[r], KVS_WAR, lane, progress, needs);
  }
}

/* A slot named twice was queried twice with the same answer. The first note puts the lane in that entry; the second
 * finds it as the lane's own. No second reader is replaced, so the one wait covers both. */
void kvs_hazards_note_read(struct kvs_hazards *table, const int64_t *ids, size_t count, kvs_stamp stamp,
                           const struct kvs_progress *progress) {
  if (count) table->uses.reads[kvs_stamp_lane(stamp)] = kvs_stamp_sequence(stamp);
  for (size_t i = 0; i < count; i++) {
    struct kvs_slot *slot = slot_at(table, ids, count, i);
    slot->readers[place_of_reader(slot, kvs_stamp_lane(stamp), progress)] = stamp;
  }
}

/* Earlier readers can be dropped: this write waits for them, and later transfers wait for this write. */
void kvs_hazards_note_write(struct kvs_hazards *table, const int64_t *ids, size_t count, kvs_stamp stamp) {
  if (count) table->uses.writes[kvs_stamp_lane(stamp)] = kvs_stamp_sequence(stamp);
  for (size_t i = 0; i < count; i++) *slot_at(table, ids, count, i) = (struct kvs_slot){.write = stamp};
}

void kvs_hazards_note_whole(struct kvs_hazards *table, bool write, kvs_stamp stamp) {
  struct kvs_table_uses *uses = &table->uses;
  unsigned lane = kvs_stamp_lane(stamp);
  uses->whole = true;
  (write ? uses->writes : uses->reads)[lane] = kvs_stamp_sequence(stamp);
  (write ? uses->whole_writes : uses->whole_reads)[lane] = kvs_stamp_sequence(stamp);
}
