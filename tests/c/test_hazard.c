/* hazard.c: its rules one by one, then random programs against the plainest model, which remembers every access and
 * works out what comes before what. */
#include <string.h>

#include "check.h"
#include "lanes/hazard.h"

/* -- the rules ------------------------------------------------------------------------------------------------- */

enum { SLOTS = 8 };

static struct kvs_slot slots[SLOTS];
static struct kvs_hazards table = {.slots = slots, .count = SLOTS};
static struct kvs_progress progress;
static struct kvs_needs needs;

static void start(void) {
  memset(slots, 0, sizeof slots);
  memset(&table.uses, 0, sizeof table.uses);
  memset(&progress, 0, sizeof progress);
  progress.lanes = KVS_LANES;
}

static void ask_read(unsigned lane, int64_t slot) {
  kvs_needs_reset(&needs, KVS_LANES);
  kvs_hazards_read(&table, &slot, 1, lane, &progress, &needs);
}

static void ask_write(unsigned lane, int64_t slot) {
  kvs_needs_reset(&needs, KVS_LANES);
  kvs_hazards_write(&table, &slot, 1, lane, &progress, &needs);
}

static void reads(unsigned lane, uint64_t sequence, int64_t slot) {
  ask_read(lane, slot);
  kvs_hazards_note_read(&table, &slot, 1, kvs_stamp_of(lane, sequence), &progress);
}

static void writes(unsigned lane, uint64_t sequence, int64_t slot) {
  ask_write(lane, slot);
  kvs_hazards_note_write(&table, &slot, 1, kvs_stamp_of(lane, sequence));
}

static unsigned count_needs(void) {
  unsigned count = 0;
  for (unsigned lane = 0; lane < needs.lanes; lane++)
    for (int why = 0; why < KVS_HAZARDS; why++) count += needs.sequence[lane][why] != 0;
  return count;
}

static bool needs_only(unsigned lane, enum kvs_hazard why, uint64_t sequence) {
  return count_needs() == 1 && needs.sequence[lane][why] == sequence;
}

static void test_stamps(void) {
  kvs_stamp stamp = kvs_stamp_of(KVS_LANES - 1, 0xFFFFFFFFFFFF);
  CHECK(kvs_stamp_lane(stamp) == KVS_LANES - 1 && kvs_stamp_sequence(stamp) == 0xFFFFFFFFFFFF);
  start();
  writes(KVS_LANES - 1, 0xFFFFFFFFFFFF, 0);
  CHECK(count_needs() == 0, "the first access");
  progress.done[KVS_LANES - 1] = 0xFFFFFFFFFFFE;
  ask_read(0, 0);
  CHECK(needs_only(KVS_LANES - 1, KVS_RAW, 0xFFFFFFFFFFFF));
}

static void test_two_accesses(void) {
  start();
  writes(4, 7, 0);
  ask_read(5, 0);
  CHECK(needs_only(4, KVS_RAW, 7));
  ask_write(5, 0);
  CHECK(needs_only(4, KVS_WAW, 7));
  reads(4, 8, 1);
  ask_write(5, 1);
  CHECK(needs_only(4, KVS_WAR, 8));
  ask_read(5, 1);
  CHECK(count_needs() == 0, "two read");
  ask_write(5, 2);
  CHECK(count_needs() == 0, "another slot");
  for (int64_t slot = 0; slot < 2; slot++) {
    ask_read(4, slot);
    CHECK(count_needs() == 0, "its own lane");
    ask_write(4, slot);
    CHECK(count_needs() == 0, "its own lane");
  }
}

static void test_a_writer_waits_for_all(void) {
  start();
  writes(1, 1, 0);
  for (unsigned lane = 2; lane <= 4; lane++) {
    reads(lane, 10 + lane, 0);
    CHECK(needs_only(1, KVS_RAW, 1), "other readers do not matter");
  }
  writes(5, 1, 0);
  CHECK(count_needs() == 4 && needs.sequence[1][KVS_WAW] == 1);
  for (unsigned lane = 2; lane <= 4; lane++) CHECK(needs.sequence[lane][KVS_WAR] == 10 + lane);
  writes(6, 1, 0);
  CHECK(needs_only(5, KVS_WAW, 1), "the write before it waited for the readers");
}

static void test_maxima(void) {
  const int64_t ids[] = {0, 1, 2};
  start();
  reads(1, 5, 1);
  writes(1, 6, 0);
  writes(1, 9, 1);
  writes(1, 7, 2);
  reads(2, 3, 2);
  kvs_needs_reset(&needs, KVS_LANES);
  kvs_hazards_read(&table, ids, 3, 3, &progress, &needs);
  CHECK(needs_only(1, KVS_RAW, 9));
  kvs_hazards_write(&table, ids, 3, 3, &progress, &needs);
  CHECK(count_needs() == 3 && needs.sequence[1][KVS_WAW] == 9 && needs.sequence[2][KVS_WAR] == 3, "needs add up");
  kvs_needs_reset(&needs, KVS_LANES);
  CHECK(count_needs() == 0 && needs.lanes == KVS_LANES);
}

static void test_what_has_ended(void) {
  start();
  writes(1, 7, 0);
  reads(2, 7, 0);
  progress.done[1] = progress.done[2] = 6;
  ask_write(3, 0);
  CHECK(count_needs() == 2);
  progress.done[1] = progress.done[2] = 7;
  ask_write(3, 0);
  CHECK(count_needs() == 0);
  ask_read(3, 0);
  CHECK(count_needs() == 0);
}

static void test_lanes_that_nobody_told_of(void) {
  start();
  progress.lanes = 2;
  progress.done[2] = 100;
  writes(2, 7, 0);
  int64_t id = 0;
  memset(&needs, 0xFF, sizeof needs);
  kvs_needs_reset(&needs, 1);
  kvs_hazards_read(&table, &id, 1, 0, &progress, &needs);
  CHECK(needs.lanes == 3 && needs_only(2, KVS_RAW, 7), "done is not known, and the rows grow");
}

static void test_room(void) {
  for (unsigned own = 0; own < 4; own++) { /* lane 0 is what a free place looks like */
    start();
    for (unsigned lane = 0; lane < 4; lane++)
      if (lane != own) reads(lane, 10 * (lane + 1), 0);
    progress.done[(own + 1) % 4] = 10 * ((own + 1) % 4 + 1) - 3;
    progress.done[(own + 2) % 4] = 10 * ((own + 2) % 4 + 1) - 2; /* the nearest to its end */
    progress.done[(own + 3) % 4] = 10 * ((own + 3) % 4 + 1) - 4;
    reads(own, 50, 0);
    CHECK(needs_only((own + 2) % 4, KVS_ROOM, 10 * ((own + 2) % 4 + 1)));
    reads(own, 51, 0);
    CHECK(count_needs() == 0, "it has a place");
    writes(5, 1, 0);
    CHECK(count_needs() == 3 && needs.sequence[own][KVS_WAR] == 51 && !needs.sequence[(own + 2) % 4][KVS_WAR]);
    for (unsigned lane = 6; lane < 9; lane++) {
      reads(lane, 1, 0);
      CHECK(needs_only(5, KVS_RAW, 1), "a write makes room");
    }
  }
}

static void test_places(void) {
  start();
  for (unsigned lane = 1; lane < 4; lane++) reads(lane, 1, 0);
  reads(2, 2, 0);
  CHECK(count_needs() == 0, "in its own place");
  progress.done[3] = 1;
  reads(4, 1, 0);
  CHECK(count_needs() == 0, "in an ended one's place");
  ask_write(5, 0);
  CHECK(count_needs() == 3 && needs.sequence[1][KVS_WAR] == 1 && needs.sequence[2][KVS_WAR] == 2 &&
        needs.sequence[4][KVS_WAR] == 1);
  progress.done[1] = 1;
  reads(4, 2, 0);
  ask_write(5, 0);
  CHECK(count_needs() == 2 && needs.sequence[4][KVS_WAR] == 2, "its own place rather than an ended one's");
}

static void test_a_slot_named_twice(void) {
  const int64_t ids[] = {0, 1, 0, 0};
  start();
  for (unsigned lane = 1; lane < 4; lane++) reads(lane, lane, 0);
  kvs_needs_reset(&needs, KVS_LANES);
  kvs_hazards_read(&table, ids, 4, 4, &progress, &needs);
  CHECK(needs_only(1, KVS_ROOM, 1));
  kvs_hazards_note_read(&table, ids, 4, kvs_stamp_of(4, 1), &progress);
  ask_write(5, 0);
  CHECK(count_needs() == 3 && needs.sequence[2][KVS_WAR] == 2 && needs.sequence[3][KVS_WAR] == 3 &&
            needs.sequence[4][KVS_WAR] == 1,
        "only the one that was waited for lost its place");
  kvs_hazards_note_write(&table, ids, 4, kvs_stamp_of(6, 1));
  ask_read(7, 0);
  CHECK(needs_only(6, KVS_RAW, 1));
}

static void test_slots_that_are_not_known(void) {
  start();
  reads(1, 3, 0);
  writes(2, 4, 1);
  kvs_needs_reset(&needs, KVS_LANES);
  kvs_hazards_whole(&table, false, 3, &progress, &needs);
  CHECK(needs_only(2, KVS_RAW, 4), "it may read what was written, and reads do not matter");
  kvs_hazards_note_whole(&table, false, kvs_stamp_of(3, 1));
  ask_read(4, 5);
  CHECK(count_needs() == 0, "two read");
  ask_write(4, 5);
  CHECK(needs_only(3, KVS_WAR, 1), "it may read any slot");
  kvs_needs_reset(&needs, KVS_LANES);
  kvs_hazards_whole(&table, true, 4, &progress, &needs);
  CHECK(count_needs() == 3 && needs.sequence[1][KVS_WAR] == 3 && needs.sequence[2][KVS_WAW] == 4 &&
        needs.sequence[3][KVS_WAR] == 1);
  kvs_hazards_note_whole(&table, true, kvs_stamp_of(4, 9));
  ask_read(5, 6);
  CHECK(needs_only(4, KVS_RAW, 9), "it may write any slot");
  ask_read(4, 6);
  CHECK(count_needs() == 0, "its own lane");
  progress.done[4] = 9;
  ask_read(5, 6);
  CHECK(count_needs() == 0, "it has ended");
}

/* -- the plainest model: a program's transfers, and what comes before what -------------------------------------- */

enum { LANES = 12, TRANSFERS = 128, WORDS = TRANSFERS / 64, MOST_IDS = 3 };

struct transfer {
  unsigned lane; /* index into lanes */
  uint64_t sequence;
  uint32_t reads, writes;  /* bit i: slot i */
  bool whole;              /* its slots are not known: it has no places */
  uint64_t waits[LANES];   /* up to which sequence of each lane */
  uint64_t earlier[WORDS]; /* the transfers that come before it, by its lane, its waits or theirs */
};

struct lane {
  unsigned number;
  uint64_t last;          /* sequence */
  unsigned at[TRANSFERS]; /* transfers by sequence - 1 */
};

struct program {
  uint64_t seed;
  unsigned nlanes, nslots, haste, count;
  unsigned ignored; /* bit k: waits of hazard k are left out */
  struct transfer transfers[TRANSFERS];
  struct lane lanes[LANES];
  uint64_t needed[KVS_HAZARDS];
};

static struct program program;

static bool has_ended(const struct transfer *t) { return progress.done[program.lanes[t->lane].number] >= t->sequence; }

/* Only what comes before nothing unended ends: a device keeps to the order that it is told. */
static void end_one(void) {
  unsigned lane = (unsigned)check_below(&program.seed, program.nlanes);
  uint64_t *done = &progress.done[program.lanes[lane].number];
  if (*done == program.lanes[lane].last) return;
  const struct transfer *next = &program.transfers[program.lanes[lane].at[*done]];
  for (unsigned l = 0; l < program.nlanes; l++)
    if (next->waits[l] > progress.done[program.lanes[l].number]) return;
  ++*done;
}

static void end_some(void) {
  for (uint64_t n = check_below(&program.seed, program.haste + 1); n > 0; n--) end_one();
}

static size_t draw_slots(int64_t *ids, uint32_t *set) {
  size_t count = check_below(&program.seed, MOST_IDS + 1);
  for (size_t i = 0; i < count; i++) {
    ids[i] = (int64_t)check_below(&program.seed, program.nslots);
    *set |= 1u << ids[i];
  }
  return count;
}

static void come_after(struct transfer *t, unsigned index) {
  t->earlier[index / 64] |= 1ull << index % 64;
  for (int w = 0; w < WORDS; w++) t->earlier[w] |= program.transfers[index].earlier[w];
}

static void order(struct transfer *t) {
  const struct lane *own = &program.lanes[t->lane];
  if (t->sequence > 1) come_after(t, own->at[t->sequence - 2]);
  for (unsigned l = 0; l < program.nlanes; l++) {
    for (int why = 0; why < KVS_HAZARDS; why++) {
      uint64_t sequence = needs.sequence[program.lanes[l].number][why];
      if (sequence > t->waits[l] && !(program.ignored >> why & 1)) t->waits[l] = sequence;
    }
    if (t->waits[l]) come_after(t, program.lanes[l].at[t->waits[l] - 1]);
  }
}

/* Of how many other lanes there are unended reads of this slot since it was written last. */
static unsigned count_readers(const struct transfer *t, unsigned slot) {
  uint32_t lanes = 0;
  for (unsigned u = program.count; u-- > 0;) {
    const struct transfer *other = &program.transfers[u];
    if (other->whole) continue;
    if (other->reads >> slot & 1 && other->lane != t->lane && !has_ended(other)) lanes |= 1u << other->lane;
    if (other->writes >> slot & 1) break;
  }
  return (unsigned)__builtin_popcount(lanes);
}

static bool may_lack_room(const struct transfer *t) {
  for (unsigned slot = 0; slot < program.nslots; slot++)
    if (t->reads >> slot & 1 && count_readers(t, slot) >= KVS_SLOT_READERS) return true;
  return false;
}

/* Each need names another lane's transfer that has not ended and is in the way as it is said to be. */
static void check_need(const struct transfer *t, unsigned lane, enum kvs_hazard why) {
  uint64_t sequence = needs.sequence[program.lanes[lane].number][why];
  if (!sequence) return;
  program.needed[why]++;
  CHECK(lane != t->lane && sequence <= program.lanes[lane].last, "hazard %d", why);
  if (sequence > program.lanes[lane].last) return;
  const struct transfer *other = &program.transfers[program.lanes[lane].at[sequence - 1]];
  uint32_t theirs = why == KVS_RAW || why == KVS_WAW ? other->writes : other->reads;
  uint32_t ours = why == KVS_WAR || why == KVS_WAW ? t->writes : t->reads;
  CHECK(!has_ended(other) && (theirs & ours), "hazard %d", why);
  if (why == KVS_ROOM) CHECK(may_lack_room(t), "readers wait for each other only where there are too many");
}

static uint64_t count_unordered(const struct transfer *t) {
  uint64_t unordered = 0;
  for (unsigned u = 0; u < program.count; u++) {
    const struct transfer *other = &program.transfers[u];
    bool conflict = (other->writes & (t->reads | t->writes)) || (other->reads & t->writes);
    unordered += conflict && !(t->earlier[u / 64] >> u % 64 & 1) && !has_ended(other);
  }
  return unordered;
}

/* Submit a random transfer as the engine does; how many earlier ones conflict with it and are not ordered with it. */
static uint64_t submit(void) {
  int64_t read_ids[MOST_IDS], write_ids[MOST_IDS];
  struct transfer *t = &program.transfers[program.count];
  *t = (struct transfer){.lane = (unsigned)check_below(&program.seed, program.nlanes)};
  struct lane *lane = &program.lanes[t->lane];
  size_t nreads = 0, nwrites = 0;
  bool whole = check_below(&program.seed, 6) == 0, write = check_below(&program.seed, 2);
  t->whole = whole;
  if (whole) *(write ? &t->writes : &t->reads) = (1u << program.nslots) - 1;
  if (!whole) nreads = draw_slots(read_ids, &t->reads);
  if (!whole && check_below(&program.seed, 3) == 0) nwrites = draw_slots(write_ids, &t->writes);
  kvs_needs_reset(&needs, progress.lanes);
  if (whole) kvs_hazards_whole(&table, write, lane->number, &progress, &needs);
  kvs_hazards_read(&table, read_ids, nreads, lane->number, &progress, &needs);
  kvs_hazards_write(&table, write_ids, nwrites, lane->number, &progress, &needs);
  for (unsigned l = 0; l < program.nlanes && !program.ignored; l++)
    for (enum kvs_hazard why = 0; why < KVS_HAZARDS; why++) check_need(t, l, why);
  t->sequence = ++lane->last;
  lane->at[t->sequence - 1] = program.count;
  order(t);
  uint64_t unordered = count_unordered(t);
  kvs_stamp stamp = kvs_stamp_of(lane->number, t->sequence);
  bool read_first = check_below(&program.seed, 2);
  if (whole) kvs_hazards_note_whole(&table, write, stamp);
  if (read_first) kvs_hazards_note_read(&table, read_ids, nreads, stamp, &progress);
  kvs_hazards_note_write(&table, write_ids, nwrites, stamp);
  if (!read_first) kvs_hazards_note_read(&table, read_ids, nreads, stamp, &progress);
  program.count++;
  return unordered;
}

static uint64_t play(uint64_t *seed) {
  unsigned step = check_below(seed, 4) ? 1 : (KVS_LANES - 1) / (LANES - 1);
  start();
  program.seed = check_random(seed);
  program.count = 0;
  program.nlanes = 1 + (unsigned)check_below(seed, LANES);
  program.nslots = 1 + (unsigned)check_below(seed, SLOTS);
  program.haste = (unsigned)check_below(seed, 2) ? (unsigned)check_below(seed, 2 * LANES) : 0;
  for (unsigned l = 0; l < program.nlanes; l++) program.lanes[l] = (struct lane){.number = l * step};
  progress.lanes = program.lanes[program.nlanes - 1].number + 1;
  uint64_t unordered = 0;
  while (program.count < TRANSFERS) {
    unordered += submit();
    end_some();
  }
  return unordered;
}

static uint64_t play_all(unsigned programs, unsigned ignored) {
  uint64_t seed = 2024, unordered = 0;
  memset(&program, 0, sizeof program);
  program.ignored = ignored;
  for (unsigned i = 0; i < programs; i++) unordered += play(&seed);
  return unordered;
}

static void test_programs(void) {
  CHECK(play_all(4000, 0) == 0, "pairs that nothing orders");
  for (int why = 0; why < KVS_HAZARDS; why++) CHECK(program.needed[why] > 1000, "hazard %d hardly occurred", why);
}

/* The model notices whatever is left out. */
static void test_programs_without(void) {
  for (int why = 0; why < KVS_HAZARDS; why++) CHECK(play_all(500, 1u << why) > 0, "hazard %d is never missed", why);
}

int main(void) {
  test_stamps();
  test_two_accesses();
  test_a_writer_waits_for_all();
  test_maxima();
  test_what_has_ended();
  test_lanes_that_nobody_told_of();
  test_room();
  test_places();
  test_a_slot_named_twice();
  test_slots_that_are_not_known();
  test_programs();
  test_programs_without();
  return check_close();
}
