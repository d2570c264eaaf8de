/* Lending a link, and borrowing it.
 *
 * A lender comes first: a transfer takes a link only if the lender has no unfinished transfer in that direction, and no
 * more pieces than there are slots stand on the link at a time, whatever is queued. */
#include "paths/lend.h"

#include <inttypes.h>
#include <string.h>

#include "device/share.h"
#include "lanes/lane.h"
#include "lanes/peer.h"
#include "lanes/registry.h"
#include "memory/reclaim.h"
#include "paths/slots.h"
#include "racecheck/racecheck.h"

enum {
  TINY_NBYTES = 128 << 10, /* slots are multiples of this */
  MOST_NBYTES = 64 << 20,
  LEAST_SLOTS = 2,
};

static const double LEAST_SHARE = 0.1, MOST_SHARE = 10;

/* -- opening and closing ---------------------------------------------------------------------------------------------
 */

static int stage_open(struct kvs_lent_stage *stage, unsigned count, int priority, struct kvs_error *err) {
  int status = kvs_dev_stream_create(stage->device, priority, &stage->stream, err);
  if (!status) status = kvs_dev_event_create(stage->device, false, &stage->tail, err);
  for (unsigned i = 0; !status && i < count; i++)
    status = kvs_dev_event_create(stage->device, false, &stage->done[i], err);
  return status;
}

static void stage_close(struct kvs_lent_stage *stage) {
  struct kvs_error ignored;
  for (unsigned i = 0; i < KVS_LENT_SLOTS; i++)
    if (stage->done[i]) (void)kvs_dev_event_destroy(stage->device, stage->done[i], &ignored);
  if (stage->tail) (void)kvs_dev_event_destroy(stage->device, stage->tail, &ignored);
  if (stage->stream) (void)kvs_dev_stream_destroy(stage->device, stage->stream, &ignored);
}

/* Copy engines ignore priorities; the kernels of the borrower have those of its other transfers. */
static int way_open(struct kvs_lent_way *way, struct kvs_device *borrower, enum kvs_direction direction,
                    struct kvs_error *err) {
  struct kvs_device *lender = way->lender->device;
  int status = KVS_OK;
  for (unsigned i = 0; i < KVS_LENT_STAGES; i++) {
    bool kernels = i == (direction == KVS_D2H ? 0 : 2);
    way->stages[i].device = kernels ? borrower : lender;
  }
  for (unsigned i = 0; !status && i < KVS_LENT_STAGES; i++) {
    const struct kvs_device_info *info = &way->stages[i].device->info;
    int priority = kvs_lane_stream_priority(info, direction, KVS_PRIORITY_NORMAL);
    status = stage_open(&way->stages[i], way->lending.count, priority, err);
  }
  for (int i = 0; !status && i < 2; i++) status = kvs_dev_event_create(borrower, false, &way->begun[i], err);
  return status;
}

static void lent_close(struct kvs_device *borrower, struct kvs_lent_way ways[2]) {
  struct kvs_error ignored;
  for (int direction = 0; direction < 2; direction++) {
    for (unsigned i = 0; i < KVS_LENT_STAGES; i++)
      if (ways[direction].stages[i].device) stage_close(&ways[direction].stages[i]);
    for (int i = 0; i < 2; i++)
      if (ways[direction].begun[i]) (void)kvs_dev_event_destroy(borrower, ways[direction].begun[i], &ignored);
  }
  if (ways[0].near) (void)kvs_dev_free(borrower, ways[0].near, &ignored);
  if (ways[0].far) (void)kvs_dev_free(ways[0].lender->device, ways[0].far, &ignored);
}

/* Whether the two devices reach each other's slots; this enables it. */
static int check_reach(struct kvs_device *device, uint64_t address, struct kvs_device *other, struct kvs_error *err) {
  struct kvs_region region;
  bool direct = false;
  int status = kvs_dev_pointer_query(device, address, &region, err);
  if (!status) status = kvs_dev_peer(other, &region, &direct, err);
  if (status || direct) return status;
  return kvs_fail(err, KVS_UNSUPPORTED, "%s:%d has no peer access to %s:%d: what one lends would cross the host twice",
                  other->ops->kind, other->ordinal, device->ops->kind, device->ordinal);
}

static int lent_open(struct kvs_engine *lender, struct kvs_engine *borrower, const struct kvs_lending *lending,
                     struct kvs_lent_way ways[2], struct kvs_error *err) {
  uint64_t nbytes = lending->slot_nbytes * lending->count;
  int status = kvs_dev_alloc(lender->device, 2 * nbytes, &ways[0].far, err);
  if (!status) status = kvs_dev_alloc(borrower->device, 2 * nbytes, &ways[0].near, err);
  if (!status) status = check_reach(lender->device, ways[0].far, borrower->device, err);
  if (!status) status = check_reach(borrower->device, ways[0].near, lender->device, err);
  for (int direction = 0; direction < 2; direction++) {
    ways[direction].lender = lender;
    ways[direction].lending = *lending;
  }
  ways[1].near = ways[0].near + nbytes;
  ways[1].far = ways[0].far + nbytes;
  for (int direction = 0; !status && direction < 2; direction++)
    status = way_open(&ways[direction], borrower->device, (enum kvs_direction)direction, err);
  if (status) lent_close(borrower->device, ways);
  return status;
}

/* Move what a way consists of. */
static void move_locked(struct kvs_lent_way *to, struct kvs_lent_way *from) {
  to->lender = from->lender;
  to->lending = from->lending;
  to->near = from->near;
  to->far = from->far;
  memcpy(to->stages, from->stages, sizeof to->stages);
  memcpy(to->begun, from->begun, sizeof to->begun);
  to->next = to->last = 0;
  to->lane = NULL;
  from->lending.slot_nbytes = 0;
  from->lender = NULL;
}

static void note_least(struct kvs_engine *borrower) {
  uint64_t least = 0;
  for (int i = 0; i < KVS_LENDERS; i++) {
    uint64_t nbytes = borrower->lent[i].ways[0].lending.slot_nbytes;
    if (nbytes && (!least || nbytes < least)) least = nbytes;
  }
  atomic_store(&borrower->lent_least, least);
}

/* Whether no queued work uses the slots. */
static bool is_over(struct kvs_lent_way *way) {
  struct kvs_error ignored;
  const struct kvs_lent_stage *end = &way->stages[KVS_LENT_STAGES - 1];
  if (!way->lane) return true;
  bool over = atomic_load(&way->lane->ended) >= way->sequence || atomic_load(&end->device->lost) ||
              kvs_dev_event_query(end->device, end->done[way->last], &ignored) == KVS_OK;
  if (atomic_load(&way->unsettled)) over = kvs_lent_way_idle(way, &ignored) == KVS_OK;
  if (over) atomic_store(&way->unsettled, false);
  return over;
}

/* A reclaim task: freeing waits for the devices. */
static int give_back(struct kvs_engine *borrower, void *what, struct kvs_error *err) {
  struct kvs_lent *lent = what;
  struct kvs_lent_way taken[2];
  int held = 0;
  memset(taken, 0, sizeof taken);
  kvs_engine_reap(borrower);
  while (held < 2 && !pthread_mutex_trylock(&lent->ways[held].lock)) held++;
  bool before = kvs_racecheck_internal(true), over = held == 2 && is_over(&lent->ways[0]) && is_over(&lent->ways[1]);
  kvs_racecheck_internal(before);
  for (int i = 0; over && i < 2; i++) move_locked(&taken[i], &lent->ways[i]);
  while (held-- > 0) pthread_mutex_unlock(&lent->ways[held].lock);
  if (!over) return kvs_fail(err, KVS_TIMEOUT, "transfers use the link");
  lent_close(borrower->device, taken);
  return KVS_OK;
}

static int take_back(struct kvs_engine *borrower, struct kvs_lent *lent, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_reclaim *task;
  int status = kvs_reclaim_start(borrower, give_back, lent, &task, err);
  if (status) return status;
  status = kvs_reclaim_wait(task, timeout_ns, err);
  (void)kvs_reclaim_leave(task, KVS_LEAVE_DROP);
  if (status != KVS_TIMEOUT) return status;
  return kvs_fail(err, status, "transfers of %s had not ended after %.1f s, and the link is still lent", borrower->name,
                  (double)timeout_ns / 1e9);
}

/* The entry of a lender, or a free one; NULL: neither. Under lend_lock. */
static struct kvs_lent *entry_of(struct kvs_engine *borrower, const struct kvs_engine *lender) {
  struct kvs_lent *unused = NULL;
  for (int i = KVS_LENDERS - 1; i >= 0; i--) {
    if (borrower->lent[i].ways[0].lender == lender) return &borrower->lent[i];
    if (!borrower->lent[i].ways[0].lender) unused = &borrower->lent[i];
  }
  return unused;
}

static int change_locked(struct kvs_engine *lender, struct kvs_engine *borrower, const struct kvs_lending *lending,
                         int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_lent *lent = entry_of(borrower, lender);
  struct kvs_lent_way made[2];
  int status = KVS_OK;
  if (lent && lent->ways[0].lender) status = take_back(borrower, lent, timeout_ns, err);
  if (status || !lending->slot_nbytes) return status;
  if (!lent) return kvs_fail(err, KVS_UNSUPPORTED, "%d devices lend to %s: no more can", KVS_LENDERS, borrower->name);
  memset(made, 0, sizeof made);
  status = lent_open(lender, borrower, lending, made, err);
  for (int i = 0; !status && i < 2; i++) {
    pthread_mutex_lock(&lent->ways[i].lock);
    move_locked(&lent->ways[i], &made[i]);
    pthread_mutex_unlock(&lent->ways[i].lock);
  }
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
    return kvs_fail(err, KVS_INVALID, "%u slots: a lent link has %d to %d", lending->count, LEAST_SLOTS,
                    KVS_LENT_SLOTS);
  if (nbytes && !(lending->share >= LEAST_SHARE && lending->share <= MOST_SHARE))
    return kvs_fail(err, KVS_INVALID, "share is %g; it is 0.1 to 10", lending->share);
  return KVS_OK;
}

int kvs_engine_lend(struct kvs_engine *lender, struct kvs_engine *borrower, const struct kvs_lending *lending,
                    int64_t timeout_ns, struct kvs_error *err) {
  int status = kvs_open_for_work(lender, err);
  if (!status) status = kvs_open_for_work(borrower, err);
  if (!status) status = check(lender, borrower, lending, err);
  if (status) return status;
  if (pthread_mutex_trylock(&borrower->lend_lock))
    return kvs_fail(err, KVS_TIMEOUT, "another call lends a link to %s: wait for it and call again", borrower->name);
  status = change_locked(lender, borrower, lending, timeout_ns, err);
  note_least(borrower);
  pthread_mutex_unlock(&borrower->lend_lock);
  return status;
}

struct kvs_engine *kvs_engine_lender(struct kvs_engine *borrower, unsigned index, struct kvs_lending *lending) {
  struct kvs_engine *found = NULL;
  if (kvs_dev_forked(borrower->device)) return NULL;
  for (int i = 0; !found && i < KVS_LENDERS; i++) {
    struct kvs_lent_way *way = &borrower->lent[i].ways[0];
    pthread_mutex_lock(&way->lock);
    if (way->lender && index-- == 0) found = way->lender, *lending = way->lending;
    pthread_mutex_unlock(&way->lock);
  }
  return found;
}

/* -- taking ----------------------------------------------------------------------------------------------------------
 */

/* What others have borrowed is no business of the lender's lanes. */
static bool is_busy(struct kvs_engine *lender, enum kvs_direction direction) {
  struct kvs_error ignored;
  bool busy = false;
  for (unsigned i = 0; !busy && i < atomic_load(&lender->nlanes); i++) {
    struct kvs_lane *lane = lender->numbered[i];
    if (lane->direction != direction || !atomic_load(&lane->count)) continue;
    (void)kvs_lane_try_reap(lane, &ignored);
    busy = atomic_load(&lane->count) != 0;
  }
  return busy;
}

static bool serves(struct kvs_submission *s, struct kvs_lent_way *way) {
  if (!way->lending.slot_nbytes || atomic_load(&way->lender->device->lost)) return false;
  if (kvs_longest_packed(&s->work->scratch->rows) > kvs_slot_room(s, way->lending.slot_nbytes)) return false;
  if (is_busy(way->lender, s->work->direction)) return false;
  return is_over(way) || (way->lane == s->lane && !atomic_load(&way->unsettled));
}

bool kvs_lent_take(struct kvs_submission *s) {
  if (s->nlent) return true;
  bool before = kvs_racecheck_internal(true);
  for (int i = 0; i < KVS_LENDERS; i++) {
    struct kvs_lent_way *way = &s->engine->lent[i].ways[s->work->direction];
    if (pthread_mutex_trylock(&way->lock)) continue;
    way->given = 0;
    if (serves(s, way))
      s->lent[s->nlent++] = way;
    else
      pthread_mutex_unlock(&way->lock);
  }
  kvs_racecheck_internal(before);
  return s->nlent > 0;
}

void kvs_lent_release(struct kvs_submission *s) {
  while (s->nlent) pthread_mutex_unlock(&s->lent[--s->nlent]->lock);
}

void kvs_lent_fit(struct kvs_submission *s) {
  const struct kvs_packing *packing = &s->work->scratch->packing;
  uint64_t largest = 0;
  unsigned kept = 0;
  for (size_t i = 0; !s->listed && i < packing->ngroups; i++)
    if (packing->groups[i].nbytes > largest) largest = packing->groups[i].nbytes;
  for (unsigned i = 0; i < s->nlent; i++) {
    struct kvs_lent_way *way = s->lent[i];
    if (largest <= kvs_slot_room(s, way->lending.slot_nbytes))
      s->lent[kept++] = way;
    else
      pthread_mutex_unlock(&way->lock);
  }
  s->nlent = kept;
  for (unsigned i = 0; i < kept; i++) kvs_peer_depend(s->transfer, s->lent[i]->lender);
}

struct kvs_lent_way *kvs_lent_next(const struct kvs_submission *s) {
  struct kvs_lent_way *next = NULL;
  double least = (double)s->given;
  for (unsigned i = 0; i < s->nlent; i++) {
    double given = (double)s->lent[i]->given / s->lent[i]->lending.share;
    if (given < least) next = s->lent[i], least = given;
  }
  return next;
}

void kvs_lent_give(struct kvs_submission *s, struct kvs_lent_way *way, uint64_t nbytes) {
  *(way ? &way->given : &s->given) += nbytes;
  if (way) atomic_fetch_add(&way->lender->lent_nbytes[s->work->direction], nbytes);
}

/* -- queueing --------------------------------------------------------------------------------------------------------
 */

/* A lost lender does not end the borrower: the transfer goes another way. */
static int blame(const struct kvs_lent_way *way, int status, struct kvs_error *why) {
  if (status == KVS_LOST && atomic_load(&way->lender->device->lost)) why->status = status = KVS_REFUSED;
  return status;
}

static int wait_for(const struct kvs_lent_stage *stage, struct kvs_device *device, kvs_event event,
                    struct kvs_error *why) {
  return kvs_dev_stream_wait_foreign(stage->device, stage->stream, device, event, why);
}

int kvs_lent_begin(struct kvs_submission *s, struct kvs_error *why) {
  int status = KVS_OK;
  for (unsigned i = 0; !status && i < s->nlent; i++) {
    struct kvs_lent_way *way = s->lent[i];
    const struct kvs_lent_stage *first = &way->stages[0], *last = &way->stages[KVS_LENT_STAGES - 1];
    way->lane = s->lane;
    way->sequence = s->transfer->sequence;
    way->used = false;
    status = kvs_dev_event_record(s->device, way->begun[0], s->first, why);
    if (!status) status = kvs_dev_event_record(s->device, way->begun[1], s->lane->stream, why);
    if (!status) status = wait_for(first, s->device, way->begun[0], why);
    if (!status) status = wait_for(last, s->device, way->begun[0], why);
    if (!status) status = wait_for(last, s->device, way->begun[1], why);
    status = blame(way, status, why);
  }
  return status;
}

int kvs_lent_end(struct kvs_submission *s, struct kvs_error *why) {
  int status = KVS_OK;
  for (unsigned i = 0; !status && i < s->nlent; i++) {
    const struct kvs_lent_way *way = s->lent[i];
    const struct kvs_lent_stage *last = &way->stages[KVS_LENT_STAGES - 1];
    if (way->used)
      status = kvs_dev_stream_wait_foreign(s->device, s->lane->stream, last->device, last->done[way->last], why);
    status = blame(way, status, why);
  }
  return status;
}

/* Nothing of a lost device runs on. */
static int rejoin(const struct kvs_submission *s, const struct kvs_lent_stage *stage, struct kvs_error *why) {
  if (stage->device != s->device && atomic_load(&stage->device->lost)) return KVS_OK;
  int status = kvs_dev_event_record(stage->device, stage->tail, stage->stream, why);
  return status ? status : kvs_dev_stream_wait_foreign(s->device, s->lane->stream, stage->device, stage->tail, why);
}

int kvs_lent_rejoin(struct kvs_submission *s, struct kvs_error *why) {
  int status = KVS_OK;
  for (unsigned i = 0; i < s->nlent; i++) {
    atomic_store(&s->lent[i]->unsettled, true);
    for (unsigned stage = 0; !status && stage < KVS_LENT_STAGES; stage++)
      status = rejoin(s, &s->lent[i]->stages[stage], why);
    status = blame(s->lent[i], status, why);
  }
  return status;
}

int kvs_lent_enter(const struct kvs_lent_way *way, unsigned stage, struct kvs_error *why) {
  const struct kvs_lent_stage *own = &way->stages[stage], *before = own - 1, *after = own + 1;
  int status = KVS_OK;
  if (stage > 0) status = wait_for(own, before->device, before->done[way->next], why);
  if (!status && stage + 1 < KVS_LENT_STAGES) /* the slot's last piece */
    status = wait_for(own, after->device, after->done[way->next], why);
  return blame(way, status, why);
}

int kvs_lent_leave(const struct kvs_lent_way *way, unsigned stage, struct kvs_error *why) {
  const struct kvs_lent_stage *own = &way->stages[stage];
  return blame(way, kvs_dev_event_record(own->device, own->done[way->next], own->stream, why), why);
}

int kvs_lent_hop(const struct kvs_submission *s, const struct kvs_lent_way *way, uint64_t nbytes,
                 struct kvs_error *why) {
  uint64_t near = kvs_lent_near(way), far = kvs_lent_far(way);
  bool out = s->work->direction == KVS_D2H;
  int status = kvs_lent_enter(way, 1, why);
  if (!status)
    status =
        kvs_dev_copy(way->stages[1].device, out ? far : near, out ? near : far, nbytes, way->stages[1].stream, why);
  status = blame(way, status, why);
  return status ? status : kvs_lent_leave(way, 1, why);
}

void kvs_lent_next_piece(struct kvs_lent_way *way) {
  way->used = true;
  way->last = way->next;
  way->next = (way->next + 1) % way->lending.count;
}
