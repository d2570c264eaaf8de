/* Which slots of a pool are being read and written by whom: what a new transfer must wait for. Pure: no device, no
 * clock, no lock; the engine guards the tables (core.h).
 *
 * A lane's transfers complete in order, so one number a lane says enough: "wait for lane L up to sequence n" covers all
 * its earlier transfers too. A slot remembers its last write and the last read of each lane since, so a transfer over
 * any number of blocks needs at most one wait a lane. Entries of completed transfers do no harm: whoever looks compares
 * them with how far each lane has come.
 *
 * Room for readers is bounded. A reader that finds none left takes the place of another lane's and waits for that one,
 * so that waiting for the newcomer is waiting for both: three lanes read a slot at the same time, a fourth in turn. */
#ifndef KVS_HAZARD_H
#define KVS_HAZARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
  KVS_LANES = 288, /* lane numbers are below this: 3 directions, 3 priorities, 32 callers' streams each */
  KVS_SLOT_READERS = 3,
};

/* A lane's transfer: lane << 48 | sequence. Sequences begin at 1, so 0 is none. */
typedef uint64_t kvs_stamp;

static inline kvs_stamp kvs_stamp_of(unsigned lane, uint64_t sequence) { return (uint64_t)lane << 48 | sequence; }
static inline unsigned kvs_stamp_lane(kvs_stamp stamp) { return (unsigned)(stamp >> 48); }
static inline uint64_t kvs_stamp_sequence(kvs_stamp stamp) { return stamp & 0xFFFFFFFFFFFFull; }

/* Why a transfer waits for an earlier one. */
enum kvs_hazard {
  KVS_RAW,  /* it reads what that one writes */
  KVS_WAR,  /* it writes what that one reads */
  KVS_WAW,  /* both write */
  KVS_ROOM, /* both read, and the slot remembers no more readers */
  KVS_HAZARDS
};

struct kvs_slot {
  kvs_stamp write;
  kvs_stamp readers[KVS_SLOT_READERS]; /* since that write, of different lanes; 0: free */
};

/* Zero-initialised: nothing has happened. */
struct kvs_hazards {
  struct kvs_slot *slots;
  uint64_t count;
};

/* How far each lane must have come, by reason: 0 is not at all. */
struct kvs_needs {
  uint64_t sequence[KVS_LANES][KVS_HAZARDS];
  unsigned lanes; /* rows in use */
};

/* How far each lane has come: all its transfers up to done[lane] have ended. */
struct kvs_progress {
  uint64_t done[KVS_LANES];
  unsigned lanes;
};

/* Forget all needs, for lanes [0, lanes). */
void kvs_needs_reset(struct kvs_needs *needs, unsigned lanes);

/* Add to `needs` what a transfer of `lane` that reads (writes) these slots must wait for. Its own lane is never in it,
 * nor is what `progress` says is done. `ids` are within the table. A slot may be named several times. */
void kvs_hazards_read(const struct kvs_hazards *table, const int64_t *ids, size_t count, unsigned lane,
                      const struct kvs_progress *progress, struct kvs_needs *needs);
void kvs_hazards_write(const struct kvs_hazards *table, const int64_t *ids, size_t count, unsigned lane,
                       const struct kvs_progress *progress, struct kvs_needs *needs);

/* The transfer `stamp` reads (writes) these slots from now on. Reads take `progress` as it was when their needs were
 * asked for: whose place is taken must be the one that is waited for. */
void kvs_hazards_note_read(struct kvs_hazards *table, const int64_t *ids, size_t count, kvs_stamp stamp,
                           const struct kvs_progress *progress);
void kvs_hazards_note_write(struct kvs_hazards *table, const int64_t *ids, size_t count, kvs_stamp stamp);

#endif
