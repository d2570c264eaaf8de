/* The race checker: the rules one by one on streams of host devices, then random programs against reachability in a
 * graph of all that happened. */
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "device/faults.h"
#include "device/watch.h"
#include "host/device.h"
#include "racecheck/clock.h"
#include "racecheck/racecheck.h"

/* Asking for more memory than there can be returns NULL there too, as it does without the sanitizers. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }
const char *__tsan_default_options(void) { return "allocator_may_return_null=1"; }

#define OK(call)                                                                                                       \
  do {                                                                                                                 \
    struct kvs_error err = {0};                                                                                        \
    int called = (call);                                                                                               \
    CHECK(called == KVS_OK, "status %d: %s", called, err.message);                                                     \
  } while (0)

enum { STREAMS = 4, SLOTS = 2000, BLOCK = 64 };

static struct kvs_device *device;
static kvs_stream streams[STREAMS];

static struct kvs_device *open_device(uint64_t seed) {
  struct kvs_device *opened = NULL;
  OK(kvs_device_host_open(0, seed, &opened, &err));
  return opened;
}

static kvs_event make_event(void) {
  kvs_event event = 0;
  OK(kvs_dev_event_create(device, true, &event, &err));
  return event;
}

static void record(kvs_event event, int stream) { OK(kvs_dev_event_record(device, event, streams[stream], &err)); }

static void awaits(int stream, kvs_event event) { OK(kvs_dev_stream_wait(device, streams[stream], event, &err)); }

static int query(kvs_event event) {
  struct kvs_error err;
  return kvs_dev_event_query(device, event, &err);
}

/* -- accesses, one by one ---------------------------------------------------------------------------------------- */

static struct kvs_race_accessor who_is(const char *where) {
  struct kvs_race_accessor who = {.what = "access", .stream = "somewhere"};
  snprintf(who.where, sizeof who.where, "%s", where);
  return who;
}

static void touch_window(int stream, const char *where, bool write, uint64_t begin, uint64_t end) {
  struct kvs_race_accessor who = who_is(where);
  int64_t slot = 7;
  kvs_racecheck_access(&(struct kvs_race_access){.device = device,
                                                 .stream = streams[stream],
                                                 .pool = 1,
                                                 .slots = SLOTS,
                                                 .pool_name = "gpu",
                                                 .ids = &slot,
                                                 .count = 1,
                                                 .write = write,
                                                 .begin = begin,
                                                 .end = end,
                                                 .accessor = &who});
}

static void writes(int stream, const char *where) { touch_window(stream, where, true, 0, BLOCK); }

static void reads(int stream, const char *where) { touch_window(stream, where, false, 0, BLOCK); }

/* A transfer: lane, sequence and number are one to three digits each in `number`, as 12034 is 34 of lane 12. */
static void transfer_on(int stream, uint64_t pool, int64_t slot, bool write, uint64_t number) {
  struct kvs_race_accessor who = who_is("transfer");
  who.transfer = number;
  who.lane = number / 1000;
  who.sequence = number % 1000;
  kvs_racecheck_access(&(struct kvs_race_access){.device = device,
                                                 .stream = streams[stream],
                                                 .pool = pool,
                                                 .slots = SLOTS,
                                                 .pool_name = "gpu",
                                                 .ids = &slot,
                                                 .count = 1,
                                                 .write = write,
                                                 .end = BLOCK,
                                                 .accessor = &who});
}

/* With the point that a transfer keeps of itself. */
static struct kvs_race_point *kept_transfer(int stream, uint64_t pool, int64_t slot, bool write, uint64_t number) {
  transfer_on(stream, pool, slot, write, number);
  return kvs_racecheck_point(device, streams[stream]);
}

/* Order the stream after the point, and free the point. */
static void follows(int stream, struct kvs_race_point *point) {
  kvs_racecheck_follow(point, device, streams[stream]);
  kvs_racecheck_point_free(point);
}

static size_t take(struct kvs_race *races, size_t capacity) { return kvs_racecheck_take(races, capacity); }

/* Everything since the last call: how many races there were. */
static size_t races(void) {
  static struct kvs_race taken[32];
  size_t all = 0, n;
  while ((n = take(taken, 32))) all += n;
  return all;
}

/* The one race there is, between these two. */
static bool is_race(const char *first, const char *second) {
  struct kvs_race race[2];
  return take(race, 2) == 1 && strcmp(race[0].first.where, first) == 0 && strcmp(race[0].second.where, second) == 0;
}

static void fresh(void) {
  while (kvs_racecheck_active()) kvs_racecheck_stop();
  (void)races();
  kvs_racecheck_start();
}

/* -- what is a race ---------------------------------------------------------------------------------------------- */

static void test_report(void) {
  struct kvs_race race;
  fresh();
  uint64_t found = kvs_racecheck_found();
  struct kvs_race_accessor first = {.transfer = 5, .lane = 2, .sequence = 3, .what = "D2H by dma", .where = "a.py:1"};
  struct kvs_race_accessor second = {
      .write = true, .what = "access", .stream = "host:0 stream 0x12", .where = "b.py:2"};
  int64_t ids[] = {9, 4, 1900}, others[] = {1900, 3, 4};
  struct kvs_race_access access = {.device = device,
                                   .stream = streams[0],
                                   .pool = 77,
                                   .slots = SLOTS,
                                   .pool_name = "a pool",
                                   .ids = ids,
                                   .count = 3,
                                   .end = BLOCK,
                                   .accessor = &first};
  kvs_racecheck_access(&access);
  access.stream = streams[1], access.ids = others, access.write = true, access.accessor = &second;
  kvs_racecheck_access(&access);
  CHECK(kvs_racecheck_found() - found == 1, "one report for all slots of a pair");
  CHECK(take(&race, 1) == 1);
  CHECK(strcmp(race.pool, "a pool") == 0 && race.slot == 1900, "%s %" PRIu64, race.pool, race.slot);
  CHECK(race.first.transfer == 5 && race.first.lane == 2 && race.first.sequence == 3 && !race.first.write);
  CHECK(strcmp(race.first.what, "D2H by dma") == 0 && strcmp(race.first.where, "a.py:1") == 0);
  CHECK(race.second.transfer == 0 && race.second.write && strcmp(race.second.stream, "host:0 stream 0x12") == 0);
  CHECK(take(&race, 1) == 0, "each is taken once");
}

static void test_conflicts(void) {
  fresh();
  reads(0, "a"), reads(1, "b");
  CHECK(races() == 0, "two reads");
  writes(0, "c"); /* races with b, and is ordered after a */
  CHECK(is_race("b", "c"));
  fresh();
  touch_window(0, "a", true, 0, 10), touch_window(1, "b", true, 10, 20);
  CHECK(races() == 0, "windows that touch do not overlap");
  touch_window(2, "c", false, 9, 11);
  CHECK(races() == 2);
  touch_window(3, "d", true, 30, 30);
  touch_window(2, "e", true, 0, BLOCK);
  CHECK(races() == 2, "an empty window is nothing");
  fresh();
  writes(0, "a"), writes(0, "b"), reads(0, "c");
  CHECK(races() == 0, "one stream");
  fresh();
  kvs_stream before = streams[3];
  streams[3] = 0, writes(3, "a");
  streams[3] = KVS_STREAM_LEGACY, writes(3, "b");
  CHECK(races() == 0, "0 and 1 are the legacy stream");
  streams[3] = before;
}

/* -- order ------------------------------------------------------------------------------------------------------- */

static void test_events(void) {
  kvs_event event = make_event(), other = make_event();
  fresh();
  writes(0, "a"), record(event, 0), awaits(1, event), writes(1, "b");
  CHECK(races() == 0, "recorded and waited for");
  awaits(0, other), writes(0, "c");
  CHECK(is_race("b", "c"), "an event that was never recorded orders nothing");

  fresh();
  record(event, 0), writes(0, "a"), awaits(1, event), writes(1, "b");
  CHECK(is_race("a", "b"), "recorded too early");
  fresh();
  writes(0, "a"), awaits(1, event), record(event, 0), writes(1, "b");
  CHECK(is_race("a", "b"), "waited for too early: what counts is the earlier recording, unknown to this checker");
  fresh();
  record(event, 0), writes(0, "a"), record(event, 0), awaits(1, event), writes(1, "b");
  CHECK(races() == 0, "recorded again");
  fresh();
  writes(0, "a"), record(event, 0), record(event, 2), awaits(1, event), writes(1, "b");
  CHECK(is_race("a", "b"), "recorded elsewhere since");
  fresh();
  writes(0, "a"), record(event, 0), awaits(1, event), record(event, 2), writes(1, "b");
  CHECK(races() == 0, "waited for before it was recorded elsewhere");
  fresh();
  writes(0, "a"), record(event, 0), writes(0, "b"), awaits(1, event), writes(1, "c");
  CHECK(is_race("b", "c"), "only what came before the event is ordered");

  fresh();
  writes(0, "a"), record(event, 0), awaits(1, event), record(other, 1), awaits(2, other), writes(2, "b");
  CHECK(races() == 0, "through a stream in the middle");
  fresh();
  writes(0, "a"), record(event, 0), record(other, 1), awaits(1, event), awaits(2, other), writes(2, "b");
  CHECK(is_race("a", "b"), "the middle one was recorded before it waited");

  fresh();
  writes(0, "a"), record(event, 0);
  kvs_event same = event;
  OK(kvs_dev_event_destroy(device, event, &err));
  event = make_event();
  CHECK(event == same, "handles come back");
  awaits(1, event), writes(1, "b");
  CHECK(is_race("a", "b"), "another event with the handle of one that was recorded");
  OK(kvs_dev_event_destroy(device, event, &err));
  OK(kvs_dev_event_destroy(device, other, &err));
}

static void test_host(void) {
  kvs_event event = make_event(), begin = make_event();
  uint64_t ns;
  fresh();
  writes(0, "a"), record(event, 0);
  while (query(event) == KVS_NOT_READY) continue;
  writes(1, "b");
  CHECK(races() == 0, "seen to be reached");

  fresh();
  writes(0, "a"), record(event, 0);
  bool before = kvs_racecheck_internal(true);
  CHECK(!before && kvs_racecheck_internal(true), "scopes nest");
  while (query(event) == KVS_NOT_READY) continue;
  OK(kvs_dev_stream_query(device, streams[0], &err));
  OK(kvs_dev_synchronize(device, &err));
  OK(kvs_dev_event_elapsed(device, event, event, &ns, &err));
  kvs_racecheck_internal(before);
  writes(1, "b");
  CHECK(is_race("a", "b"), "kvswap's own queries order nothing for the caller");

  fresh();
  record(begin, 0), writes(0, "a"), record(event, 1);
  while (query(event) == KVS_NOT_READY) continue;
  writes(1, "b");
  CHECK(is_race("a", "b"), "another stream's event");
  fresh();
  writes(0, "a"), record(event, 0);
  OK(kvs_dev_synchronize(device, &err));
  writes(1, "b");
  CHECK(races() == 0, "synchronized");
  writes(0, "c");
  CHECK(is_race("b", "c"), "which says nothing of what came later");
  fresh();
  writes(0, "a");
  OK(kvs_dev_stream_query(device, streams[2], &err));
  writes(1, "b");
  CHECK(is_race("a", "b"), "another stream was idle");
  OK(kvs_dev_stream_query(device, streams[0], &err));
  OK(kvs_dev_stream_query(device, streams[1], &err));
  writes(2, "c");
  CHECK(races() == 0, "both were idle");

  fresh();
  record(begin, 0), writes(0, "a"), record(event, 0);
  bool was = kvs_racecheck_internal(true);
  OK(kvs_dev_synchronize(device, &err));
  kvs_racecheck_internal(was);
  OK(kvs_dev_event_elapsed(device, begin, event, &ns, &err));
  writes(1, "b");
  CHECK(races() == 0, "events whose times are known were reached");

  /* What a stream was given before the host saw anything is not ordered by it. */
  fresh();
  writes(0, "a"), record(event, 0), writes(1, "b");
  CHECK(is_race("a", "b"));
  OK(kvs_dev_synchronize(device, &err));
  writes(2, "c");
  CHECK(races() == 0);
  OK(kvs_dev_event_destroy(device, event, &err));
  OK(kvs_dev_event_destroy(device, begin, &err));
}

static void test_told(void) {
  kvs_event event = make_event();
  fresh();
  writes(0, "a");
  kvs_racecheck_order(device, streams[0], 0, device, streams[1]);
  writes(1, "b");
  CHECK(races() == 0, "stream before stream");
  writes(0, "c");
  CHECK(is_race("b", "c"), "not the other way round");
  fresh();
  writes(0, "a");
  kvs_racecheck_order(device, streams[0], 0, device, streams[1]);
  writes(0, "b"), writes(1, "c");
  CHECK(is_race("b", "c"), "what came after it was told of");
  fresh();
  writes(0, "a");
  kvs_racecheck_order(device, streams[0], 0, NULL, 0);
  writes(1, "b");
  CHECK(races() == 0, "stream before host");
  fresh();
  writes(0, "a"), record(event, 0), writes(0, "b");
  kvs_racecheck_order(device, 0, event, device, streams[1]);
  writes(1, "c");
  CHECK(is_race("b", "c"), "event before stream");
  fresh();
  writes(0, "a"), record(event, 0);
  kvs_racecheck_order(device, 0, event, NULL, 0);
  writes(1, "b");
  CHECK(races() == 0, "event before host");
  kvs_racecheck_order(device, 0, 12345, NULL, 0);
  CHECK(races() == 0, "an event that nobody knows");
  OK(kvs_dev_event_destroy(device, event, &err));
}

static void test_points(void) {
  kvs_event event = make_event();
  struct kvs_race_point *point, *all;
  fresh();
  writes(0, "a");
  point = kvs_racecheck_point(device, streams[0]);
  all = kvs_racecheck_point_all(device);
  CHECK(point && all);
  writes(0, "b"), writes(1, "c");
  CHECK(is_race("b", "c"), "a is covered by b, a point alone orders nothing");
  fresh();
  writes(0, "d");
  kvs_racecheck_follow(point, NULL, 0), kvs_racecheck_follow(all, device, streams[1]);
  kvs_racecheck_stands_for(device, event, point), awaits(1, event);
  writes(1, "e");
  CHECK(is_race("d", "e"), "points of an earlier start");
  kvs_racecheck_point_free(point), kvs_racecheck_point_free(all);

  fresh();
  writes(0, "a");
  point = kvs_racecheck_point(device, streams[0]);
  kvs_racecheck_follow(point, device, streams[1]);
  writes(1, "b");
  CHECK(races() == 0, "a stream follows");
  kvs_racecheck_follow(point, NULL, 0);
  writes(2, "c");
  CHECK(is_race("b", "c"), "the host saw the point, which has a only");
  kvs_racecheck_point_free(point);

  fresh();
  writes(0, "a"), touch_window(1, "b", true, BLOCK, 2 * BLOCK);
  all = kvs_racecheck_point_all(device);
  kvs_racecheck_follow(all, NULL, 0);
  touch_window(2, "c", true, 0, 2 * BLOCK);
  CHECK(races() == 0, "all streams of the device");
  kvs_racecheck_point_free(all);

  fresh();
  all = kvs_racecheck_point_all(device); /* nothing yet: no point, and no lack of memory */
  CHECK(!all && races() == 0);
  kvs_racecheck_follow(all, NULL, 0);
  writes(0, "a");
  point = kvs_racecheck_point(device, streams[0]);
  kvs_racecheck_stands_for(device, event, point);
  awaits(1, event), writes(1, "b");
  CHECK(races() == 0, "an event that stands for the point");
  kvs_racecheck_stop();
  CHECK(!kvs_racecheck_point(device, streams[0]) && !kvs_racecheck_point_all(device), "off");
  kvs_racecheck_follow(point, NULL, 0);
  kvs_racecheck_point_free(point);
  kvs_racecheck_point_free(NULL);
  OK(kvs_dev_event_destroy(device, event, &err));
}

/* Transfers of which the later follows the points of those that the hazard table puts before it. */
static void test_follow(void) {
  kvs_event event = make_event();
  fresh();
  kvs_racecheck_point_free(kept_transfer(0, 1, 7, true, 1001));
  transfer_on(1, 1, 7, true, 2001);
  CHECK(races() == 1, "neither waited for nor followed");
  fresh();
  follows(1, kept_transfer(0, 1, 7, true, 1001));
  transfer_on(1, 1, 7, true, 2001);
  CHECK(races() == 0, "followed");
  transfer_on(0, 1, 7, true, 1002);
  transfer_on(2, 1, 7, true, 3001);
  CHECK(races() == 3, "1002 with 2001, 3001 with both");
  fresh();
  struct kvs_race_point *earlier = kept_transfer(0, 1, 7, true, 1001);
  transfer_on(0, 1, 7, true, 1002);
  follows(1, earlier);
  transfer_on(1, 1, 7, true, 2001);
  CHECK(races() == 1, "only the first of two on a stream, between which nothing but the point was taken");
  fresh();
  transfer_on(0, 1, 7, true, 1001);
  follows(1, kept_transfer(0, 1, 7, true, 1002));
  transfer_on(1, 1, 7, true, 2001);
  CHECK(races() == 0, "both of two on a stream");

  /* Whether it was found to have ended makes no difference. */
  for (int follow = 0; follow < 2; follow++) {
    fresh();
    struct kvs_race_point *point = kept_transfer(0, 1, 7, true, 1001);
    bool before = kvs_racecheck_internal(true);
    OK(kvs_dev_synchronize(device, &err));
    kvs_racecheck_internal(before);
    if (follow) kvs_racecheck_follow(point, device, streams[1]);
    kvs_racecheck_point_free(point);
    transfer_on(1, 1, 7, true, 2001);
    CHECK(races() == !follow);
  }

  /* What is followed hands on what it waited for, as its event would have. */
  fresh();
  writes(2, "a"), record(event, 2), awaits(0, event);
  follows(1, kept_transfer(0, 1, 7, false, 1001));
  transfer_on(1, 1, 7, true, 2001);
  CHECK(races() == 0);
  fresh(); /* also over another pool */
  writes(2, "a"), record(event, 2), awaits(0, event);
  follows(1, kept_transfer(0, 2, 9, true, 1001));
  transfer_on(1, 1, 7, true, 2001);
  transfer_on(1, 2, 9, false, 2001);
  CHECK(races() == 0);
  fresh(); /* and what it followed itself */
  follows(1, kept_transfer(0, 1, 7, true, 1001));
  follows(2, kept_transfer(1, 1, 8, true, 2001));
  transfer_on(2, 1, 7, true, 3001);
  CHECK(races() == 0);
  fresh(); /* and from reader to reader */
  follows(1, kept_transfer(0, 1, 7, false, 1001));
  transfer_on(1, 1, 7, false, 2001);
  record(event, 1), awaits(2, event);
  transfer_on(2, 1, 7, true, 3001);
  CHECK(races() == 0);
  /* But not what its stream did later, nor what it followed later. */
  fresh();
  earlier = kept_transfer(0, 1, 7, true, 1001);
  touch_window(0, "a", true, BLOCK, 2 * BLOCK);
  follows(1, earlier);
  transfer_on(1, 1, 7, true, 2001);
  touch_window(1, "b", true, BLOCK, 2 * BLOCK);
  CHECK(is_race("a", "b"));
  fresh();
  writes(2, "a");
  earlier = kept_transfer(0, 1, 8, true, 1001);
  follows(0, kvs_racecheck_point(device, streams[2]));
  follows(1, earlier);
  writes(1, "b");
  CHECK(is_race("a", "b"));
  OK(kvs_dev_event_destroy(device, event, &err));
}

static void test_references(void) {
  kvs_event event = make_event();
  fresh();
  CHECK(!kvs_racecheck_point_ref(NULL));
  struct kvs_race_point *point = kept_transfer(0, 1, 7, true, 1001);
  CHECK(kvs_racecheck_point_ref(point) == point && kvs_racecheck_point_ref(point) == point);
  follows(1, point);
  transfer_on(1, 1, 7, true, 2001);
  CHECK(races() == 0, "one of three");
  kvs_racecheck_stands_for(device, event, point);
  kvs_racecheck_point_free(point);
  awaits(2, event), reads(2, "a");
  CHECK(races() == 1, "two of three, whose event says nothing of 2001");
  kvs_racecheck_follow(point, NULL, 0);
  kvs_racecheck_stop();
  CHECK(kvs_racecheck_point_ref(point) == point, "the checker is off");
  kvs_racecheck_point_free(point);
  fresh();
  writes(0, "a"), follows(1, point), writes(1, "b");
  CHECK(is_race("a", "b"), "the last, of an earlier start");
  OK(kvs_dev_event_destroy(device, event, &err));
}

/* Layers: what is queued after an event of the same transfer does not come before the event. */
static void test_layers(void) {
  kvs_event event = make_event();
  fresh();
  transfer_on(0, 1, 7, true, 1001);
  record(event, 0);
  transfer_on(0, 1, 8, true, 1001);
  awaits(1, event);
  transfer_on(1, 1, 7, true, 2001);
  CHECK(races() == 0, "the first layer");
  transfer_on(1, 1, 8, true, 2001);
  CHECK(races() == 1, "the second layer");

  /* What follows the transfer comes after all its layers; what waits for the first layer's event, after that layer. */
  for (int follow = 0; follow < 2; follow++) {
    struct kvs_race_accessor who = who_is("layers");
    who.transfer = 1001, who.lane = 1, who.sequence = 1;
    int64_t slot = 7;
    struct kvs_race_access access = {.device = device,
                                     .stream = streams[0],
                                     .pool = 1,
                                     .slots = SLOTS,
                                     .pool_name = "gpu",
                                     .ids = &slot,
                                     .count = 1,
                                     .write = true,
                                     .end = BLOCK,
                                     .accessor = &who};
    fresh();
    kvs_racecheck_access(&access);
    record(event, 0);
    access.begin = BLOCK, access.end = 2 * BLOCK;
    kvs_racecheck_access(&access);
    struct kvs_race_point *point = kvs_racecheck_point(device, streams[0]);
    if (follow)
      kvs_racecheck_follow(point, device, streams[1]);
    else
      awaits(1, event);
    kvs_racecheck_point_free(point);
    transfer_on(1, 1, 7, false, 2001);
    CHECK(races() == 0, "the first layer");
    touch_window(1, "a", true, BLOCK, 2 * BLOCK);
    CHECK(follow ? races() == 0 : is_race("layers", "a"), "the second layer");
  }
  OK(kvs_dev_event_destroy(device, event, &err));
}

/* A transfer that comes in parts is one party for each pool and kind of access. */
static void test_parties(void) {
  fresh();
  for (int64_t slot = 0; slot < 50; slot++) transfer_on(0, 1, slot, true, 1001);
  for (int64_t slot = 0; slot < 50; slot++) {
    transfer_on(1, 1, slot, false, 2001);
    transfer_on(1, 2, slot, true, 2001);
  }
  CHECK(races() == 1);
  for (int64_t slot = 0; slot < 50; slot++) {
    transfer_on(2, 1, slot, true, 3001);
    transfer_on(2, 2, slot, true, 3001);
  }
  CHECK(races() == 3, "pool 1 with both, pool 2 with one");
  fresh();
  transfer_on(0, 1, 7, true, 1001);
  transfer_on(0, 1, 8, true, 1001);
  for (int i = 0; i < 10; i++) transfer_on(1, 1, 7 + i % 2, i % 3, 2001);
  CHECK(races() == 2, "its reads and its writes");
}

/* -- bounds and forgetting --------------------------------------------------------------------------------------- */

static void test_forgetting(void) {
  fresh();
  writes(0, "a");
  kvs_racecheck_forget_pool(2);
  writes(1, "b");
  CHECK(is_race("a", "b"), "another pool was forgotten");
  kvs_racecheck_forget_pool(1);
  writes(2, "c");
  CHECK(races() == 0, "this pool was forgotten");

  kvs_event event = make_event();
  fresh();
  writes(0, "a"), writes(1, "b");
  CHECK(races() == 1);
  record(event, 0);
  kvs_racecheck_forget_device(device);
  awaits(1, event), reads(1, "c");
  CHECK(is_race("a", "c"), "an event of a device that was forgotten");
  OK(kvs_dev_event_destroy(device, event, &err));

  /* A slot remembers so many windows and forgets the oldest. */
  fresh();
  for (uint64_t i = 0; i < KVS_HISTORY_LIMIT + 44; i++) touch_window(0, i < 44 ? "old" : "kept", true, i, i + 1);
  touch_window(1, "all", true, 0, KVS_HISTORY_LIMIT + 44);
  static struct kvs_race taken[KVS_HISTORY_LIMIT + 44];
  size_t n = take(taken, KVS_HISTORY_LIMIT + 44);
  CHECK(n == KVS_HISTORY_LIMIT && strcmp(taken[0].first.where, "kept") == 0, "%zu", n);

  /* What is covered by a later access that comes after it is reported through that one. */
  fresh();
  writes(0, "a"), reads(0, "b"), writes(0, "c"), reads(1, "d");
  CHECK(is_race("c", "d"));
  fresh();
  writes(0, "a"), reads(0, "b"), writes(1, "c");
  CHECK(races() == 2, "a read covers no write");
  fresh();
  touch_window(0, "a", true, 0, 9), touch_window(0, "b", true, 0, 8), writes(1, "c");
  CHECK(races() == 2, "a smaller window covers nothing larger");
}

/* A closed device's address, handles and stream numbers come back. */
static void test_devices(void) {
  fresh();
  struct kvs_device *first = device;
  kvs_stream before = streams[0];
  kvs_event event, same = make_event();
  writes(1, "of the first device"), record(same, 1);
  for (int i = 0; i < 3; i++) {
    kvs_racecheck_forget_pool(1);
    writes(1, "of the first device");
    device = open_device(5);
    OK(kvs_dev_stream_create(device, 0, &streams[0], &err));
    OK(kvs_dev_event_create(device, false, &event, &err));
    CHECK(event == same, "handles are of their device");
    awaits(0, event);
    for (int j = 0; j < 4 - i; j++) writes(0, "of the second device"), record(event, 0);
    CHECK(races() == (size_t)(4 - i), "its streams and events are others");
    struct kvs_device *second = device;
    device = first, streams[0] = before;
    writes(2, "of the first device");
    CHECK(races() == 2, "with the last of the second device and with that of the first");
    OK(kvs_dev_synchronize(second, &err));
    kvs_racecheck_forget_device(second);
    kvs_dev_close(second);
  }
  OK(kvs_dev_event_destroy(device, same, &err));
}

/* Where a device gives no ids any more, handles serve. */
static void test_lost(void) {
  struct kvs_fault lose = {.action = KVS_FAULT_LOSE, .nth = 1, .code = KVS_DRIVER_ILLEGAL_ADDRESS};
  struct kvs_device *before = device;
  kvs_stream old[2] = {streams[0], streams[1]};
  struct kvs_error ignored;
  fresh();
  device = open_device(5);
  OK(kvs_dev_fault_set(device, KVS_FAULT_CALL, &lose, &err));
  CHECK(kvs_dev_synchronize(device, &ignored) == KVS_LOST);
  streams[0] = 0, streams[1] = KVS_STREAM_LEGACY;
  writes(0, "a"), writes(1, "b");
  CHECK(races() == 0, "0 and 1 are still the legacy stream");
  writes(2, "c");
  CHECK(is_race("b", "c"));
  kvs_racecheck_forget_device(device);
  kvs_dev_close(device);
  device = before;
  memcpy(streams, old, sizeof old);
}

static void test_capture(void) {
  fresh();
  writes(0, "before");
  OK(kvs_host_capture(device, streams[0], true, &err));
  writes(0, "a"), writes(0, "b");
  CHECK(races() == 2, "what is captured is not queued: the stream is known by its handle");
  writes(1, "c");
  CHECK(races() == 2, "with b, which covers a, and with the one before");
  OK(kvs_host_capture(device, streams[0], false, &err));
}

/* Clocks without a device. */
static void test_clocks(void) {
  struct kvs_clocks clocks = {.host = NULL};
  int one = 1, two = 2;
  const struct kvs_stream_key keys[] = {{&one, 5, false}, {&one, 6, false}, {&two, 5, false}, {&one, 5, true}};
  uint32_t numbers[4], again;
  for (uint32_t i = 0; i < 4; i++) {
    CHECK(kvs_clocks_stream(&clocks, &keys[i], &numbers[i]) && numbers[i] == i);
    CHECK(kvs_clock_at(kvs_clocks_of(&clocks, i), i) == 1);
    struct kvs_clock *first = kvs_clocks_snapshot(&clocks, i);
    CHECK(kvs_clock_at(first, i) == 1 && kvs_clock_at(kvs_clocks_of(&clocks, i), i) == 2);
    kvs_clock_unref(first);
  }
  struct kvs_clock *snapshot = kvs_clocks_snapshot(&clocks, 0), *other = kvs_clocks_snapshot(&clocks, 2);
  CHECK(kvs_clock_at(snapshot, 0) == 2 && kvs_clock_at(kvs_clocks_of(&clocks, 0), 0) == 3);
  CHECK(kvs_clocks_set_event(&clocks, &one, 9, snapshot) && kvs_clocks_set_event(&clocks, &two, 9, other));
  CHECK(kvs_clocks_join(&clocks, 1, snapshot) && kvs_clocks_join(&clocks, KVS_CLOCK_HOST, snapshot));
  CHECK(kvs_clocks_join(&clocks, 2, snapshot));
  kvs_clocks_forget_device(&clocks, &one);
  CHECK(!kvs_clocks_event(&clocks, &one, 9) && kvs_clocks_event(&clocks, &two, 9) == other);
  CHECK(kvs_clocks_stream(&clocks, &keys[2], &again) && again == 2, "the other device's stays");
  CHECK(kvs_clock_at(kvs_clocks_of(&clocks, 2), 0) == 2 && kvs_clock_at(kvs_clocks_of(&clocks, 2), 2) == 3);
  for (int i = 0; i < 3; i++) {
    CHECK(kvs_clocks_stream(&clocks, &keys[i == 2 ? 3 : i], &again) && again != 2 && again < 4, "numbers come back");
    const struct kvs_clock *clock = kvs_clocks_of(&clocks, again);
    CHECK(kvs_clock_at(clock, again) >= 3 && kvs_clock_at(clock, (again + 1) % 4) == 0, "the ticks go on");
  }
  kvs_clocks_forget_event(&clocks, &two, 9), kvs_clocks_forget_event(&clocks, &two, 9);
  CHECK(!kvs_clocks_event(&clocks, &two, 9) && kvs_clock_at(clocks.host, 0) == 2);
  kvs_clock_unref(snapshot), kvs_clock_unref(other);
  kvs_clocks_free(&clocks);
}

static void test_past(void) {
  struct kvs_shadow shadow = {.slots = 257};
  struct kvs_clock *now = NULL, *host = NULL;
  struct kvs_history *history = kvs_shadow_make(&shadow, 256);
  CHECK(history && history->count == 0 && kvs_shadow_make(&shadow, 256) == history);
  CHECK(kvs_shadow_make(&shadow, 0) != history && kvs_shadow_make(&shadow, 255) != history);
  for (uint32_t i = 0; i < 3; i++) { /* of three streams that know nothing of each other */
    struct kvs_access *visit = calloc(1, sizeof *visit);
    *visit = (struct kvs_access){.refs = 1, .stream = i, .tick = 5, .end = 1};
    CHECK(kvs_history_add(history, visit, now, host) && kvs_history_add(history, visit, now, host));
    kvs_access_unref(visit);
  }
  CHECK(history->count == 6 && kvs_clock_raise(&host, 1, 5) && kvs_clock_raise(&now, 2, 5));
  struct kvs_access *visit = calloc(1, sizeof *visit);
  *visit = (struct kvs_access){.refs = 1, .stream = 3, .tick = 1, .end = 1};
  CHECK(kvs_history_add(history, visit, now, host) && history->count == 3,
        "accesses before the host or the access are gone");
  CHECK(history->accesses[0]->stream == 0 && history->accesses[2]->stream == 3);
  kvs_access_unref(visit);
  kvs_clock_unref(now), kvs_clock_unref(host);
  kvs_shadow_free(&shadow);
}

static void test_nesting(void) {
  fresh();
  writes(0, "a");
  kvs_racecheck_start();
  kvs_racecheck_stop();
  CHECK(kvs_racecheck_active());
  struct kvs_race_point *point = kvs_racecheck_point(device, streams[0]);
  kvs_racecheck_start();
  kvs_racecheck_follow(point, device, streams[3]);
  kvs_racecheck_point_free(point);
  kvs_racecheck_stop();
  reads(3, "after a");
  CHECK(races() == 0, "a start within another changes nothing");
  touch_window(1, "b", true, 0, BLOCK - 1);
  uint64_t found = kvs_racecheck_found();
  kvs_racecheck_stop();
  CHECK(!kvs_racecheck_active());
  CHECK(races() == 2, "races stay until they are taken");
  writes(2, "c");
  kvs_racecheck_start();
  writes(0, "d");
  CHECK(races() == 0 && kvs_racecheck_found() == found, "nothing is known of what came before the start");
  kvs_racecheck_stop();
  kvs_racecheck_stop(); /* one too many is nothing */
  CHECK(!kvs_racecheck_active());
}

static void test_limit(void) {
  static struct kvs_race taken[1100];
  fresh();
  uint64_t found = kvs_racecheck_found();
  for (int i = 0; i < 1500; i++) { /* each with the one before */
    char where[16];
    snprintf(where, sizeof where, "%d", i);
    writes(i % 2, where);
    if (i % 2 == 0) continue;
    kvs_racecheck_order(device, streams[0], 0, device, streams[1]);
    kvs_racecheck_order(device, streams[1], 0, device, streams[0]);
  }
  CHECK(kvs_racecheck_found() - found == 750);
  for (int i = 0; i < 700; i++) {
    kvs_racecheck_forget_pool(1);
    writes(0, "more"), writes(1, "yet more");
  }
  CHECK(kvs_racecheck_found() - found == 1450);
  CHECK(take(taken, 10) == 10 && strcmp(taken[9].first.where, "18") == 0, "%s", taken[9].first.where);
  CHECK(take(taken, 1100) == 990 && strcmp(taken[0].second.where, "21") == 0, "%s", taken[0].second.where);
  CHECK(strcmp(taken[989].first.where, "more") == 0 && take(taken, 1100) == 0);
  kvs_racecheck_forget_pool(1);
  writes(0, "a"), writes(1, "b");
  CHECK(is_race("a", "b"), "there is room again");
}

static void test_no_memory(void) {
  struct kvs_race_accessor who = who_is("too large");
  struct kvs_race race[2];
  int64_t slot = 1;
  struct kvs_race_access access = {.device = device,
                                   .stream = streams[0],
                                   .pool = 9,
                                   .slots = UINT64_MAX / 2,
                                   .pool_name = "large",
                                   .ids = &slot,
                                   .count = 1,
                                   .write = true,
                                   .end = 1,
                                   .accessor = &who};
  fresh();
  uint64_t found = kvs_racecheck_found();
  writes(0, "a"), writes(1, "b");
  kvs_racecheck_access(&access);
  kvs_racecheck_access(&access);
  writes(0, "c"), writes(1, "d");
  CHECK(kvs_racecheck_found() - found == 2);
  CHECK(take(race, 1) == 1 && strcmp(race[0].pool, "gpu") == 0);
  CHECK(take(race, 2) == 1 && race[0].pool[0] == '\0', "said once, last, without a pool");
  fresh();
  writes(0, "a"), writes(1, "b");
  CHECK(is_race("a", "b"), "started again");
}

/* -- the device's wrappers --------------------------------------------------------------------------------------- */

static int told[6];
static void count_recorded(struct kvs_device *of, kvs_event event, kvs_stream stream) {
  told[0] += of == device && event && stream == streams[0];
}
static void count_waits(struct kvs_device *of, kvs_stream stream, kvs_event event) {
  told[1] += of == device && event && stream == streams[0];
}
static void count_reached(struct kvs_device *of, kvs_event event) { told[2] += of == device && event; }
static void count_idle(struct kvs_device *of, kvs_stream stream) { told[3] += of == device && stream == streams[0]; }
static void count_all_idle(struct kvs_device *of) { told[4] += of == device; }
static void count_forgotten(struct kvs_device *of, kvs_event event) { told[5] += of == device && event; }

static void call_all(kvs_event event) {
  struct kvs_error err;
  (void)kvs_dev_event_record(device, event, streams[0], &err);
  (void)kvs_dev_stream_wait(device, streams[0], event, &err);
  (void)kvs_dev_synchronize(device, &err);
  (void)kvs_dev_event_query(device, event, &err);
  (void)kvs_dev_stream_query(device, streams[0], &err);
}

static bool told_are(int a, int b, int c, int d, int e, int f) {
  bool right = told[0] == a && told[1] == b && told[2] == c && told[3] == d && told[4] == e && told[5] == f;
  if (!right) printf("told: %d %d %d %d %d %d\n", told[0], told[1], told[2], told[3], told[4], told[5]);
  return right;
}

static void test_watch(void) {
  static const struct kvs_watch counting = {count_recorded, count_waits,    count_reached,
                                            count_idle,     count_all_idle, count_forgotten};
  struct kvs_fault every = {.action = KVS_FAULT_FAIL, .nth = 1, .every = 1, .code = KVS_DRIVER_INVALID_VALUE};
  struct kvs_error ignored;
  uint64_t ns;
  while (kvs_racecheck_active()) kvs_racecheck_stop();
  kvs_event event = make_event();
  call_all(event);
  CHECK(told_are(0, 0, 0, 0, 0, 0), "nobody watches");
  kvs_dev_watch(&counting);
  call_all(event);
  CHECK(told_are(1, 1, 1, 1, 1, 0));
  OK(kvs_dev_event_elapsed(device, event, event, &ns, &err));
  CHECK(told_are(1, 1, 3, 1, 1, 0));
  OK(kvs_dev_fault_set(device, KVS_FAULT_CALL, &every, &err));
  call_all(event);
  CHECK(kvs_dev_event_elapsed(device, event, event, &ns, &ignored) == KVS_REFUSED);
  CHECK(kvs_dev_event_destroy(device, event, &ignored) == KVS_REFUSED);
  CHECK(told_are(1, 1, 3, 1, 1, 0), "nothing happened");
  every.action = KVS_FAULT_NONE;
  OK(kvs_dev_fault_set(device, KVS_FAULT_CALL, &every, &err));
  OK(kvs_dev_event_destroy(device, event, &err));
  CHECK(told_are(1, 1, 3, 1, 1, 1));
  kvs_dev_watch(NULL);
  event = make_event();
  OK(kvs_dev_event_record(device, event, streams[0], &err));
  OK(kvs_dev_event_destroy(device, event, &err));
  CHECK(told_are(1, 1, 3, 1, 1, 1));

  /* The checker's own questions count for no fault. */
  fresh();
  struct kvs_fault second = {.action = KVS_FAULT_FAIL, .nth = 2, .code = KVS_DRIVER_INVALID_VALUE};
  event = make_event();
  OK(kvs_dev_fault_set(device, KVS_FAULT_CALL, &second, &err));
  OK(kvs_dev_event_record(device, event, streams[0], &err));
  CHECK(kvs_dev_stream_wait(device, streams[1], event, &ignored) == KVS_REFUSED);
  second.action = KVS_FAULT_NONE;
  OK(kvs_dev_fault_set(device, KVS_FAULT_CALL, &second, &err));
  OK(kvs_dev_event_destroy(device, event, &err));
}

static int asked;
static int (*ask)(struct kvs_device *, kvs_stream, struct kvs_stream_info *, struct kvs_error *);
static int count_questions(struct kvs_device *of, kvs_stream stream, struct kvs_stream_info *info,
                           struct kvs_error *err) {
  asked++;
  return ask(of, stream, info, err);
}

static void test_off(void) {
  const struct kvs_device_ops *before = device->ops;
  struct kvs_device_ops counting = *before;
  ask = counting.stream_info;
  counting.stream_info = count_questions;
  device->ops = &counting;
  fresh();
  writes(0, "a");
  CHECK(asked == 1);
  kvs_racecheck_stop();
  uint64_t found = kvs_racecheck_found();
  kvs_event event = make_event();
  writes(0, "a"), record(event, 0), awaits(2, event), writes(1, "b");
  call_all(event);
  kvs_racecheck_order(device, streams[0], 0, NULL, 0);
  CHECK(!kvs_racecheck_point(device, streams[0]));
  kvs_racecheck_forget_pool(1);
  kvs_racecheck_forget_device(device);
  CHECK(races() == 0 && kvs_racecheck_found() == found && !kvs_racecheck_on() && asked == 1);
  OK(kvs_dev_event_destroy(device, event, &err));
  device->ops = before;
}

/* -- random programs --------------------------------------------------------------------------------------------- */

/* Each thing that is queued or seen is a node; what comes before it directly are its edges, and its ancestors all that
 * comes before it. No clocks. */
enum { NODES = 1024, POOLS = 2, FEW_SLOTS = 4, EVENTS = 5, POINTS = 3, KEPT = 8, VISITS = 512 };

struct node {
  uint64_t ancestors[NODES / 64]; /* itself included */
};

struct visited {
  int node;
  unsigned pool, slots;
  uint64_t begin, end;
  bool write, gone;
  uint64_t number; /* of the transfer, or of the note, from 1 */
  bool note;
};

struct expected {
  uint64_t first, second, slot;
  bool first_writes, second_writes;
  unsigned pool;
};

static struct model {
  uint64_t random;
  struct node nodes[NODES];
  int nnodes;
  int last[STREAMS], host, event[EVENTS], point[POINTS];
  struct kvs_race_point *points[POINTS];
  struct kvs_race_point *kept[KEPT]; /* of transfers */
  int kept_node[KEPT];
  kvs_event events[EVENTS];
  struct visited visits[VISITS];
  size_t nvisits;
  struct expected races[1000];
  size_t nraces;
  uint64_t numbers;
} model;

static struct kvs_device *devices[2]; /* the last stream is of the second */

static struct kvs_device *device_of(uint64_t stream) { return devices[stream == STREAMS - 1]; }

static bool comes_after(int node, int earlier) { return model.nodes[node].ancestors[earlier / 64] >> earlier % 64 & 1; }

static void add_edge(int node, int from) {
  for (int i = 0; from >= 0 && i < NODES / 64; i++) model.nodes[node].ancestors[i] |= model.nodes[from].ancestors[i];
}

static int new_node(int a, int b) {
  int node = model.nnodes++;
  memset(&model.nodes[node], 0, sizeof model.nodes[node]);
  model.nodes[node].ancestors[node / 64] |= 1ull << node % 64;
  add_edge(node, a);
  add_edge(node, b);
  return node;
}

static bool covers(const struct visited *newer, const struct visited *old, unsigned slot) {
  return newer->pool == old->pool && newer->slots >> slot & 1 && (newer->write || !old->write) &&
         newer->begin <= old->begin && old->end <= newer->end && comes_after(newer->node, old->node);
}

/* Of two accesses in order, the later stands for the earlier, where it covers it. */
static bool stood_for(size_t index, unsigned slot) {
  for (size_t i = index + 1; i < model.nvisits; i++)
    if (covers(&model.visits[i], &model.visits[index], slot)) return true;
  return false;
}

static bool clash(const struct visited *a, const struct visited *b, unsigned slot) {
  return !a->gone && a->pool == b->pool && (a->slots & b->slots) >> slot & 1 && (a->write || b->write) &&
         a->begin < b->end && b->begin < a->end;
}

static void expect(const struct visited *a, const struct visited *b, unsigned slot) {
  for (size_t i = 0; i < model.nraces; i++) {
    const struct expected *race = &model.races[i];
    if (race->first == a->number && race->second == b->number && race->pool == a->pool &&
        race->first_writes == a->write && race->second_writes == b->write)
      return;
  }
  model.races[model.nraces++] = (struct expected){a->number, b->number, slot, a->write, b->write, a->pool};
}

static void random_access(struct visited *visit) {
  visit->pool = (unsigned)check_below(&model.random, POOLS);
  visit->slots = (unsigned)(1 + check_below(&model.random, (1 << FEW_SLOTS) - 1));
  visit->write = check_below(&model.random, 2);
  visit->begin = check_below(&model.random, 3) * 2;
  visit->end = visit->begin + 1 + check_below(&model.random, 6);
}

static void tell(const struct visited *visit, uint64_t stream) {
  static const char *const names[POOLS] = {"zero", "one"};
  struct kvs_race_accessor who = {.transfer = visit->note ? 0 : visit->number, .what = "random"};
  int64_t ids[FEW_SLOTS];
  size_t count = 0;
  snprintf(who.where, sizeof who.where, "%" PRIu64, visit->number);
  for (unsigned slot = 0; slot < FEW_SLOTS; slot++)
    if (visit->slots >> slot & 1) ids[count++] = slot * 300; /* on pages of their own */
  kvs_racecheck_access(&(struct kvs_race_access){.device = device_of(stream),
                                                 .stream = streams[stream],
                                                 .pool = visit->pool + 1,
                                                 .slots = SLOTS,
                                                 .pool_name = names[visit->pool],
                                                 .ids = ids,
                                                 .count = count,
                                                 .write = visit->write,
                                                 .begin = visit->begin,
                                                 .end = visit->end,
                                                 .accessor = &who});
}

static void visit_now(struct visited *visit, uint64_t stream) {
  visit->node = model.last[stream] = new_node(model.last[stream], model.host);
  for (unsigned slot = 0; slot < FEW_SLOTS; slot++)
    for (size_t i = 0; i < model.nvisits; i++)
      if (clash(&model.visits[i], visit, slot) && !comes_after(visit->node, model.visits[i].node) &&
          !stood_for(i, slot))
        expect(&model.visits[i], visit, slot);
  model.visits[model.nvisits++] = *visit;
  tell(visit, stream);
}

/* The stream comes after a transfer's point; `last`: by the last reference, but for one in model.points. */
static void follow_kept(uint64_t stream, size_t k, bool last) {
  struct kvs_race_point *point = kvs_racecheck_point_ref(model.kept[k]);
  if (last) {
    kvs_racecheck_point_free(model.kept[k]);
    model.kept[k] = NULL;
  }
  kvs_racecheck_follow(point, device_of(stream), streams[stream]);
  if (point) model.last[stream] = new_node(model.last[stream], model.kept_node[k]);
  kvs_racecheck_point_free(point);
}

static void keep(uint64_t stream, size_t k) {
  kvs_racecheck_point_free(model.kept[k]);
  model.kept[k] = kvs_racecheck_point(device_of(stream), streams[stream]);
  model.kept_node[k] = model.last[stream] = new_node(model.last[stream], model.host);
}

/* In up to three layers, each after what that one follows; others may come after any of them. */
static void random_transfer(uint64_t stream) {
  uint64_t number = ++model.numbers;
  for (size_t layers = 1 + check_below(&model.random, 3); layers > 0; layers--) {
    struct visited visit = {.number = number};
    for (size_t n = check_below(&model.random, 3); n > 0; n--)
      follow_kept(stream, check_below(&model.random, KEPT), check_below(&model.random, 8) == 0);
    random_access(&visit);
    visit_now(&visit, stream);
    if (layers == 1 || check_below(&model.random, 4) == 0) keep(stream, check_below(&model.random, KEPT));
  }
}

static void random_note(uint64_t stream) {
  struct visited visit = {.number = ++model.numbers, .note = true};
  random_access(&visit);
  visit_now(&visit, stream);
}

static void see(int node) { model.host = new_node(model.host, node); }

static void random_look(uint64_t stream, uint64_t e) {
  struct kvs_error ignored;
  bool internal = check_below(&model.random, 3) == 0, before = kvs_racecheck_internal(internal);
  switch (check_below(&model.random, 8)) {
  case 0: {
    OK(kvs_dev_synchronize(device_of(stream), &err));
    for (uint64_t i = 0; i < STREAMS && !internal; i++)
      if (device_of(i) == device_of(stream)) see(model.last[i]);
    break;
  }
  case 1:
  case 2:
    if (kvs_dev_stream_query(device_of(stream), streams[stream], &ignored) == KVS_OK && !internal)
      see(model.last[stream]);
    break;
  default:
    if (kvs_dev_event_query(devices[0], model.events[e], &ignored) == KVS_OK && !internal) see(model.event[e]);
  }
  kvs_racecheck_internal(before);
}

static void random_order(uint64_t stream, uint64_t e) {
  uint64_t from = check_below(&model.random, STREAMS);
  bool on_host = check_below(&model.random, 4) == 0, by_event = check_below(&model.random, 2);
  int before = by_event ? model.event[e] : model.last[from];
  struct kvs_device *first = by_event ? devices[0] : device_of(from);
  kvs_racecheck_order(first, streams[from], by_event ? model.events[e] : 0, on_host ? NULL : device_of(stream),
                      streams[stream]);
  if (on_host)
    see(before);
  else
    model.last[stream] = new_node(model.last[stream], before);
}

static void random_point(uint64_t stream, uint64_t e, size_t p) {
  size_t k = check_below(&model.random, KEPT);
  switch (check_below(&model.random, 5)) {
  case 0:
    kvs_racecheck_point_free(model.points[p]);
    model.points[p] = kvs_racecheck_point_ref(model.kept[k]);
    model.point[p] = model.points[p] ? model.kept_node[k] : -1;
    break;
  case 1:
    kvs_racecheck_point_free(model.points[p]);
    model.points[p] = kvs_racecheck_point(device_of(stream), streams[stream]);
    model.point[p] = new_node(model.last[stream], model.host);
    break;
  case 2:
    kvs_racecheck_follow(model.points[p], device_of(stream), streams[stream]);
    model.last[stream] = new_node(model.last[stream], model.point[p]);
    break;
  case 3:
    kvs_racecheck_follow(model.points[p], NULL, 0);
    see(model.point[p]);
    break;
  default:
    kvs_racecheck_stands_for(devices[0], model.events[e], model.points[p]);
    if (model.points[p]) model.event[e] = model.point[p];
  }
}

static void random_event(uint64_t stream, uint64_t e) {
  if (stream == STREAMS - 1) stream = 0; /* events are of the first device */
  switch (check_below(&model.random, 9)) {
  case 0:
    OK(kvs_dev_event_destroy(devices[0], model.events[e], &err));
    OK(kvs_dev_event_create(devices[0], true, &model.events[e], &err));
    model.event[e] = -1;
    break;
  case 1:
  case 2:
  case 3:
  case 4:
    OK(kvs_dev_event_record(devices[0], model.events[e], streams[stream], &err));
    model.event[e] = model.last[stream] = new_node(model.last[stream], model.host);
    break;
  default:
    OK(kvs_dev_stream_wait(devices[0], streams[stream], model.events[e], &err));
    model.last[stream] = new_node(model.last[stream], model.event[e]);
  }
}

static void random_step(void) {
  uint64_t stream = check_below(&model.random, STREAMS), e = check_below(&model.random, EVENTS);
  uint64_t what = check_below(&model.random, 100);
  if (what < 20) {
    random_note(stream);
  } else if (what < 40) {
    random_transfer(stream);
  } else if (what < 78) {
    random_event(stream, e);
  } else if (what < 86) {
    random_look(stream, e);
  } else if (what < 90) {
    random_order(stream, e);
  } else if (what < 99) {
    random_point(stream, e, check_below(&model.random, POINTS));
  } else {
    unsigned pool = (unsigned)check_below(&model.random, POOLS);
    kvs_racecheck_forget_pool(pool + 1);
    for (size_t i = 0; i < model.nvisits; i++) model.visits[i].gone |= model.visits[i].pool == pool;
  }
}

static bool as_expected(const struct kvs_race *race, const struct expected *expected) {
  return strtoull(race->first.where, NULL, 10) == expected->first && race->first.write == expected->first_writes &&
         strtoull(race->second.where, NULL, 10) == expected->second && race->second.write == expected->second_writes &&
         strcmp(race->pool, expected->pool ? "one" : "zero") == 0 && race->slot == expected->slot * 300;
}

static size_t random_program(uint64_t seed) {
  static struct kvs_race taken[1001];
  kvs_event events[EVENTS];
  memcpy(events, model.events, sizeof events);
  fresh();
  model = (struct model){.random = seed * 0x9E3779B97F4A7C15u, .host = -1};
  memcpy(model.events, events, sizeof events);
  for (size_t i = 0; i < STREAMS; i++) model.last[i] = -1;
  for (size_t i = 0; i < EVENTS; i++) model.event[i] = -1;
  for (size_t i = 0; i < POINTS; i++) model.point[i] = -1;
  for (size_t i = 0, steps = 20 + check_below(&model.random, 120); i < steps; i++) random_step();
  size_t n = take(taken, 1001), right = 0;
  while (right < n && right < model.nraces && as_expected(&taken[right], &model.races[right])) right++;
  CHECK(n == model.nraces && right == n, "seed %" PRIu64 ": %zu races, expected %zu, right up to %zu", seed, n,
        model.nraces, right);
  for (size_t i = 0; i < POINTS; i++) kvs_racecheck_point_free(model.points[i]);
  for (size_t i = 0; i < KEPT; i++) kvs_racecheck_point_free(model.kept[i]);
  kvs_racecheck_stop();
  return n;
}

static void test_random(void) {
  size_t races_seen = 0, programs_with = 0, n;
  struct kvs_device *before = device;
  kvs_stream last = streams[STREAMS - 1];
  devices[0] = device;
  devices[1] = open_device(3);
  OK(kvs_dev_stream_create(devices[1], 0, &streams[STREAMS - 1], &err));
  for (size_t i = 0; i < EVENTS; i++) model.events[i] = make_event();
  for (uint64_t seed = 1; seed <= 2000; seed++) {
    races_seen += n = random_program(seed);
    programs_with += n > 0;
  }
  CHECK(races_seen > 20000 && programs_with < 2000, "%zu races in %zu programs", races_seen, programs_with);
  for (size_t i = 0; i < EVENTS; i++) OK(kvs_dev_event_destroy(device, model.events[i], &err));
  kvs_dev_close(devices[1]);
  device = before;
  streams[STREAMS - 1] = last;
}

/* -- threads ----------------------------------------------------------------------------------------------------- */

static atomic_bool finished;
static struct kvs_race_point *everybodys;

/* On a stream and a pool of its own: never a race. */
static void *work(void *arg) {
  size_t number = (size_t)(uintptr_t)arg;
  uint64_t random = number + 1, wrong = 0;
  struct kvs_error err;
  kvs_event event = 0;
  wrong += kvs_dev_event_create(device, true, &event, &err) != KVS_OK;
  for (int i = 0; i < 2000; i++) {
    int64_t slot = (int64_t)check_below(&random, SLOTS);
    transfer_on((int)number, 10 + number, slot, check_below(&random, 2), 1000 * number + 1);
    wrong += kvs_dev_event_record(device, event, streams[number], &err) != KVS_OK;
    struct kvs_race_point *point = kvs_racecheck_point(device, streams[number]);
    (void)query(event);
    kvs_racecheck_follow(point, device, streams[(number + 1) % STREAMS]);
    kvs_racecheck_point_free(point);
    kvs_racecheck_follow(kvs_racecheck_point_ref(everybodys), device, streams[number]);
    kvs_racecheck_point_free(everybodys);
    if (i % 50 == 0) kvs_racecheck_forget_pool(10 + number);
    if (i % 500 == 0) wrong += kvs_dev_synchronize(device, &err) != KVS_OK;
  }
  wrong += kvs_dev_event_destroy(device, event, &err) != KVS_OK;
  return (void *)(uintptr_t)wrong;
}

static void *toggle(void *unused) {
  while (!atomic_load(&finished)) {
    kvs_racecheck_start();
    usleep(500);
    kvs_racecheck_stop();
  }
  return unused;
}

static void test_threads(void) {
  pthread_t threads[STREAMS], toggler;
  struct kvs_device *before = device;
  kvs_stream old[STREAMS];
  while (kvs_racecheck_active()) kvs_racecheck_stop();
  memcpy(old, streams, sizeof old);
  uint64_t found = kvs_racecheck_found();
  device = open_device(0);
  for (size_t i = 0; i < STREAMS; i++) OK(kvs_dev_stream_create(device, 0, &streams[i], &err));
  kvs_racecheck_start();
  everybodys = kvs_racecheck_point(device, streams[0]);
  CHECK(everybodys);
  kvs_racecheck_stop();
  pthread_create(&toggler, NULL, toggle, NULL);
  for (size_t i = 0; i < STREAMS; i++) pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i);
  for (int i = 0; i < 20; i++) { /* a thread may hold the lock during fork(): the child can take it */
    pid_t child = fork();
    if (child == 0) {
      kvs_racecheck_start();
      _exit(kvs_racecheck_found() != found);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0, "child %d: %d", (int)child, status);
  }
  for (size_t i = 0; i < STREAMS; i++) {
    void *wrong;
    pthread_join(threads[i], &wrong);
    CHECK(wrong == NULL, "%zu calls failed", (size_t)(uintptr_t)wrong);
  }
  atomic_store(&finished, true);
  pthread_join(toggler, NULL);
  kvs_racecheck_point_free(everybodys); /* the last reference, or the sanitizers tell */
  CHECK(kvs_racecheck_found() == found && !kvs_racecheck_active());
  kvs_dev_close(device);
  device = before;
  memcpy(streams, old, sizeof old);
}

int main(void) {
  device = open_device(11);
  for (size_t i = 0; i < STREAMS; i++) OK(kvs_dev_stream_create(device, 0, &streams[i], &err));
  test_report();
  test_conflicts();
  test_events();
  test_host();
  test_told();
  test_points();
  test_follow();
  test_references();
  test_layers();
  test_parties();
  test_forgetting();
  test_devices();
  test_lost();
  test_capture();
  test_clocks();
  test_past();
  test_nesting();
  test_limit();
  test_no_memory();
  test_watch();
  test_off();
  test_random();
  test_threads();
  kvs_dev_close(device);
  return check_close();
}
