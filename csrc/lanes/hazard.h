/* The hazard table: which lanes read and write each slot of a pool, and so what a new transfer must wait for. Pure: no
 * device, no clock, no lock; the engine guards the tables (pool_state.h).
 *
 * Transfers of a lane complete in order, so one number for each lane suffices: "wait for lane L up to sequence n"
 * covers all its earlier transfers. A slot keeps its last write, and the last read of each lane since. A transfer over
 * any number of blocks therefore needs at most one wait for each lane. Entries of completed transfers are harmless:
 * they are compared with the progress of their lane.
 *
 * Some transfers touch slots that are not known when they are queued. They count as touching the whole table, of which
 * the last reads and writes of each lane are kept.
 *
 * Room for readers is bounded. A reader that finds no free entry replaces another lane's reader and waits for it, so
 * waiting for the new reader covers both. Three lanes can read a slot at the same time; a fourth waits. */
#ifndef KVS_HAZARD_H
#define KVS_HAZARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
  KVS_LANES = 288, /* lane numbers are below: 3 directions, 3 priorities, 32 streams of the caller each */
  KVS_SLOT_READERS = 3,
};

/* Stamp of a transfer: lane << 48 | sequence. Sequences begin at 1, so 0 is none. */
typedef uint64_t kvs_stamp;

static inline kvs_stamp kvs_stamp_of(unsigned lane, uint64_t sequence) { return (uint64_t)lane << 48 | sequence; }
static inline unsigned kvs_stamp_lane(kvs_stamp stamp) { return (unsigned)(stamp >> 48); }
static inline uint64_t kvs_stamp_sequence(kvs_stamp stamp) { return stamp & 0xFFFFFFFFFFFFull; }

/* Why a transfer waits for an earlier one. */
enum kvs_hazard {
  KVS_RAW,  /* reads what the earlier one writes */
  KVS_WAR,  /* writes what the earlier one reads */
  KVS_WAW,  /* both write */
  KVS_ROOM, /* both read, and the slot has no free reader entry */
  KVS_HAZARDS
};

struct kvs_slot {
  kvs_stamp write;
  kvs_stamp readers[KVS_SLOT_READERS]; /* readers since that write, one a lane; 0: free */
};

/* For each lane the last transfer that reads, that writes any slot of the table; whole_*: whose slots are not known, so
 * that it counts as touching all. A transfer that touches all slots waits for the first two, and every later transfer
 * waits for the last two. */
struct kvs_table_uses {
  uint64_t reads[KVS_LANES], writes[KVS_LANES], whole_reads[KVS_LANES], whole_writes[KVS_LANES];
  bool whole; /* a whole_* entry was ever set */
};

/* Zero-initialised: nothing has happened. */
struct kvs_hazards {
  struct kvs_slot *slots;
  uint64_t count;
  struct kvs_table_uses uses;
};

/* For each lane and hazard, the sequence to wait for; 0: none. */
struct kvs_needs {
  uint64_t sequence[KVS_LANES][KVS_HAZARDS];
  unsigned lanes; /* rows in use */
};

/* Progress of lanes: all transfers up to done[lane] have ended. */
struct kvs_progress {
  uint64_t done[KVS_LANES];
  unsigned lanes;
};

/* Clear the needs of lanes [0, lanes). */
void kvs_needs_reset(struct kvs_needs *needs, unsigned lanes);

/* Add to `needs` what a transfer of `lane` that reads (writes) these slots must wait for. Excluded: its own lane, and
 * what has ended by `progress`. All `ids` are within the table; a slot may be named several times. */
void kvs_hazards_read(const struct kvs_hazards *table, const int64_t *ids, size_t count, unsigned lane,
                      const struct kvs_progress *progress, struct kvs_needs *needs);
void kvs_hazards_write(const struct kvs_hazards *table, const int64_t *ids, size_t count, unsigned lane,
                       const struct kvs_progress *progress, struct kvs_needs *needs);

/* Note that the transfer `stamp` reads (writes) these slots. Reads take the same `progress` as their
 * kvs_hazards_read(): the reader that is replaced must be the one that is waited for. */
void kvs_hazards_note_read(struct kvs_hazards *table, const int64_t *ids, size_t count, kvs_stamp stamp,
                           const struct kvs_progress *progress);
void kvs_hazards_note_write(struct kvs_hazards *table, const int64_t *ids, size_t count, kvs_stamp stamp);

/* The same for a transfer that may touch any slot of the table. */
void kvs_hazards_whole(const struct kvs_hazards *table, bool write, unsigned lane, const struct kvs_progress *progress,
                       struct kvs_needs *needs);
void kvs_hazards_note_whole(struct kvs_hazards *table, bool write, kvs_stamp stamp);

#endif
