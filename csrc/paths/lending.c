/* Lending a link and taking it back. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/wait.h"
#include "device/share.h"
#include "lanes/lane.h"
#include "lanes/lent.h"
#include "lanes/registry.h"
#include "memory/reclaim.h"
#include "racecheck/racecheck.h"

enum {
  TINY_NBYTES = 128 << 10, /* slots are multiples of this */
  MOST_NBYTES = 64 << 20,
  LEAST_SLOTS = 2,
};

static const double LEAST_SHARE = 0.1, MOST_SHARE = 10;

/* -- what one device has of a link ------------------------------------------------------------------------------- */

struct part {
  struct kvs_lent_stage stages[2 * KVS_LENT_STAGES];
  kvs_event begun[4];
  uint64_t memory;
};

/* A reclaim task, which takes over the part. */
static int part_close(struct kvs_engine *engine, void *what, struct kvs_error *err) {
  struct part *part = what;
  struct kvs_device *device = engine->device;
  for (int i = 0; i < 2 * KVS_LENT_STAGES; i++) {
    struct kvs_lent_stage *stage = &part->stages[i];
    for (unsigned slot = 0; slot < KVS_LENT_SLOTS; slot++)
      if (stage->done[slot]) (void)kvs_dev_event_destroy(device, stage->done[slot], err);
    if (stage->tail) (void)kvs_dev_event_destroy(device, stage->tail, err);
    if (stage->stream) (void)kvs_dev_stream_destroy(device, stage->stream, err);
  }
  for (int i = 0; i < 4; i++)
    if (part->begun[i]) (void)kvs_dev_event_destroy(device, part->begun[i], err);
  if (part->memory) (void)kvs_dev_free(device, part->memory, err);
  free(part);
  return KVS_OK;
}

/* Freeing waits for all work of a device: a thread of each device does it. Without memory to say what is to be freed,
 * it is freed with the device. */
static void close_later(struct kvs_engine *engine, const struct kvs_lent_way ways[2], uint64_t memory, bool borrower) {
  struct part *part = calloc(1, sizeof *part);
  if (!part) return;
  part->memory = memory;
  for (int direction = 0; direction < 2; direction++) {
    for (int i = 0; i < KVS_LENT_STAGES; i++)
      if (ways[direction].stages[i].device == engine->device)
        part->stages[direction * KVS_LENT_STAGES + i] = ways[direction].stages[i];
    if (borrower) memcpy(part->begun + 2 * direction, ways[direction].begun, sizeof ways[direction].begun);
  }
  kvs_reclaim_later(engine, part_close, part);
}

static void lent_close(struct kvs_engine *borrower, const struct kvs_lent_way ways[2]) {
  close_later(borrower, ways, ways[0].near, true);
  close_later(ways[0].lender, ways, ways[0].far, false);
}

/* -- opening ------------------------------------------------------------------------------------------------------- */

static int stage_open(struct kvs_lent_stage *stage, unsigned count, int priority, struct kvs_error *err) {
  int status = kvs_dev_stream_create(stage->device, priority, &stage->stream, err);
  if (!status) status = kvs_dev_event_create(stage->device, false, &stage->tail, err);
  for (unsigned i = 0; !status && i < count; i++)
    status = kvs_dev_event_create(stage->device, false, &stage->done[i], err);
  return status;
}

static int way_open(struct kvs_lent_way *way, struct kvs_device *borrower, enum kvs_direction direction,
                    struct kvs_error *err) {
  int status = KVS_OK;
  for (unsigned i = 0; !status && i < KVS_LENT_STAGES; i++) {
    bool kernels = i == (direction == KVS_D2H ? 0 : KVS_LENT_STAGES - 1);
    struct kvs_device *device = kernels ? borrower : way->lender->device;
    way->stages[i].device = device;
    status = stage_open(&way->stages[i], way->lending.count,
                        kvs_lane_stream_priority(&device->info, direction, KVS_PRIORITY_NORMAL), err);
  }
  for (int i = 0; !status && i < 2; i++) status = kvs_dev_event_create(borrower, false, &way->begun[i], err);
  return status;
}

/* Whether `other` reaches memory of `device`; this enables it. */
static int check_reach(struct kvs_engine *device, uint64_t address, struct kvs_engine *other, struct kvs_error *err) {
  struct kvs_region region;
  bool direct = false;
  int status = kvs_dev_pointer_query(device->device, address, &region, err);
  if (!status) status = kvs_dev_peer(other->device, &region, &direct, err);
  if (status || direct) return status;
  return kvs_fail(err, KVS_UNSUPPORTED,
                  "%s has no peer access to %s: what one lends would go through the host's memory again", other->name,
                  device->name);
}

static int lent_open(struct kvs_engine *lender, struct kvs_engine *borrower, const struct kvs_lending *lending,
                     struct kvs_lent_way ways[2], struct kvs_error *err) {
  uint64_t nbytes = lending->slot_nbytes * lending->count;
  for (int direction = 0; direction < 2; direction++) {
    ways[direction].lender = lender;
    ways[direction].lending = *lending;
  }
  int status = kvs_dev_alloc(lender->device, 2 * nbytes, &ways[0].far, err);
  if (!status) status = kvs_dev_alloc(borrower->device, 2 * nbytes, &ways[0].near, err);
  if (!status) status = check_reach(lender, ways[0].far, borrower, err);
  if (!status) status = check_reach(borrower, ways[0].near, lender, err);
  ways[1].near = ways[0].near + nbytes;
  ways[1].far = ways[0].far + nbytes;
  for (int direction = 0; !status && direction < 2; direction++)
    status = way_open(&ways[direction], borrower->device, (enum kvs_direction)direction, err);
  if (status) lent_close(borrower, ways);
  return status;
}

/* -- changing ------------------------------------------------------------------------------------------------------ */

/* Move what a way consists of; no transfer has used `to`. */
static void move_locked(struct kvs_lent_way *to, struct kvs_lent_way *from) {
  to->lender = from->lender;
  to->lending = from->lending;
  to->near = from->near;
  to->far = from->far;
  memcpy(to->stages, from->stages, sizeof to->stages);
  memcpy(to->begun, from->begun, sizeof to->begun);
  to->next = to->last = to->nqueued = 0;
  to->lane = NULL;
  memset(from->stages, 0, sizeof from->stages);
  memset(from->begun, 0, sizeof from->begun);
  from->lender = NULL;
  from->lending = (struct kvs_lending){0};
  from->near = from->far = 0;
  from->lane = NULL;
}

/* For who asks, and for transfers that choose a path. */
static void note(struct kvs_engine *borrower, struct kvs_lent *lent, struct kvs_engine *lender,
                 const struct kvs_lending *lending) {
  uint64_t least = 0;
  pthread_mutex_lock(&borrower->note_lock);
  lent->lender = lender;
  lent->lending = *lending;
  for (int i = 0; i < KVS_LENDERS; i++) {
    uint64_t nbytes = borrower->lent[i].lender ? borrower->lent[i].lending.slot_nbytes : 0;
    if (nbytes && (!least || nbytes < least)) least = nbytes;
  }
  atomic_store(&borrower->lent_least, least);
  pthread_mutex_unlock(&borrower->note_lock);
}

struct taking {
  struct kvs_engine *borrower;
  struct kvs_lent *lent;
  struct kvs_lent_way ways[2]; /* what was taken */
};

/* Take both directions, if no transfer uses one. */
static int take_now(void *arg, struct kvs_error *err) {
  struct taking *taking = arg;
  struct kvs_lent_way *ways = taking->lent->ways;
  int held = 0;
  kvs_engine_reap(taking->borrower);
  while (held < 2 && !pthread_mutex_trylock(&ways[held].lock)) held++;
  bool before = kvs_racecheck_internal(true);
  bool over = held == 2 && kvs_lent_is_over(&ways[0]) && kvs_lent_is_over(&ways[1]);
  kvs_racecheck_internal(before);
  for (int i = 0; over && i < 2; i++) move_locked(&taking->ways[i], &ways[i]);
  while (held-- > 0) pthread_mutex_unlock(&ways[held].lock);
  return over ? KVS_OK : kvs_fail(err, KVS_NOT_READY, "transfers use the link");
}

static int take_within(void *taking, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_wait_until(take_now, taking, false, timeout_ns, err);
}

static int take_back(struct kvs_engine *borrower, struct kvs_lent *lent, int64_t timeout_ns, struct kvs_error *err) {
  struct taking taking = {.borrower = borrower, .lent = lent};
  int status = kvs_wait_slices(take_within, &taking, timeout_ns, err);
  if (status == KVS_TIMEOUT)
    return kvs_fail(err, status, "transfers of %s had not ended after %.1f s, and the link of %s is still lent: wait",
                    borrower->name, (double)timeout_ns / 1e9, lent->lender->name);
  if (status) return status;
  note(borrower, lent, NULL, &(struct kvs_lending){0});
  lent_close(borrower, taking.ways);
  return KVS_OK;
}

/* The entry of a lender, or a free one; NULL: neither. Only calls that hold lend_lock change them. */
static struct kvs_lent *entry_of(struct kvs_engine *borrower, const struct kvs_engine *lender) {
  struct kvs_lent *unused = NULL;
  for (int i = KVS_LENDERS - 1; i >= 0; i--) {
    if (borrower->lent[i].lender == lender) return &borrower->lent[i];
    if (!borrower->lent[i].lender) unused = &borrower->lent[i];
  }
  return unused;
}

static int change_locked(struct kvs_engine *lender, struct kvs_engine *borrower, const struct kvs_lending *lending,
                         int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_lent *lent = entry_of(borrower, lender);
  struct kvs_lent_way made[2];
  int status = KVS_OK;
  if (lent && lent->lender) status = take_back(borrower, lent, timeout_ns, err);
  if (status || !lending->slot_nbytes) return status;
  if (!lent)
    return kvs_fail(err, KVS_UNSUPPORTED, "%d devices lend to %s: no more can, until one takes its link back",
                    KVS_LENDERS, borrower->name);
  memset(made, 0, sizeof made);
  status = lent_open(lender, borrower, lending, made, err);
  for (int i = 0; !status && i < 2; i++) {
    pthread_mutex_lock(&lent->ways[i].lock); /* of an unused entry: held for a look at most */
    move_locked(&lent->ways[i], &made[i]);
    pthread_mutex_unlock(&lent->ways[i].lock);
  }
  if (!status) note(borrower, lent, lender, lending);
  return status;
}

static int check(const struct kvs_engine *lender, const struct kvs_engine *borrower, const struct kvs_lending *lending,
                 struct kvs_error *err) {
  uint64_t nbytes = lending->slot_nbytes;
  int status = KVS_CHECK_RESERVED(lending, "kvs_lending", err);
  if (status) return status;
  if (lender == borrower) return kvs_fail(err, KVS_INVALID, "%s cannot lend its link to itself", lender->name);
  if (!kvs_dev_can_wait_for(lender->device, borrower->device))
    return kvs_fail(err, KVS_UNSUPPORTED, "%s cannot lend its link to %s: %s", lender->name, borrower->name,
                    lender->device->stepped || borrower->device->stepped ? "one is deterministic"
                                                                         : "they are of different kinds");
  if (nbytes % TINY_NBYTES || nbytes > MOST_NBYTES)
    return kvs_fail(err, KVS_INVALID,
                    "slots of %" PRIu64 " bytes: lent slots have a multiple of 128 KiB, at most 64 MiB; 0: none",
                    nbytes);
  if (nbytes && (lending->count < LEAST_SLOTS || lending->count > KVS_LENT_SLOTS))
    return kvs_fail(err, KVS_INVALID, "count is %u; a lent link has %d to %d slots", lending->count, LEAST_SLOTS,
                    KVS_LENT_SLOTS);
  if (nbytes && !(lending->share >= LEAST_SHARE && lending->share <= MOST_SHARE))
    return kvs_fail(err, KVS_INVALID, "share is %g; it is 0.1 to 10", lending->share);
  return KVS_OK;
}

static int try_lock(void *mutex, struct kvs_error *err) {
  return pthread_mutex_trylock(mutex) ? kvs_fail(err, KVS_NOT_READY, "transfers use the link") : KVS_OK;
}

static int lock_within(void *mutex, int64_t timeout_ns, struct kvs_error *err) {
  return kvs_wait_until(try_lock, mutex, false, timeout_ns, err);
}

/* A lost lender's link can be taken back. */
int kvs_engine_lend(struct kvs_engine *lender, struct kvs_engine *borrower, const struct kvs_lending *lending,
                    int64_t timeout_ns, struct kvs_error *err) {
  int status = kvs_open_for_work(borrower, err);
  if (!status && lending->slot_nbytes) status = kvs_open_for_work(lender, err);
  if (!status) status = check(lender, borrower, lending, err);
  if (status) return status;
  uint64_t start = kvs_clock_ns();
  status = kvs_wait_slices(lock_within, &borrower->lend_lock, timeout_ns, err);
  if (status)
    return kvs_fail(err, status, "another call lends a link to %s: wait for it and call again", borrower->name);
  int64_t left = timeout_ns < 0 ? -1 : kvs_time_left(timeout_ns, start);
  status = change_locked(lender, borrower, lending, left, err);
  pthread_mutex_unlock(&borrower->lend_lock);
  return status;
}

struct kvs_engine *kvs_engine_lender(struct kvs_engine *borrower, unsigned index, struct kvs_lending *lending) {
  struct kvs_engine *found = NULL;
  if (kvs_dev_forked(borrower->device)) return NULL;
  pthread_mutex_lock(&borrower->note_lock);
  for (int i = 0; !found && i < KVS_LENDERS; i++) {
    if (!borrower->lent[i].lender || index-- > 0) continue;
    found = borrower->lent[i].lender;
    *lending = borrower->lent[i].lending;
  }
  pthread_mutex_unlock(&borrower->note_lock);
  return found;
}
