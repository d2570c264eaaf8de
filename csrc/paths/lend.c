/* Borrowing links that other devices lend.
 *
 * A lender comes first: a transfer takes a link only if the lender has no unfinished transfer in that direction, but
 * for one that has borrowed the borrower's link in turn; and a store takes it only if the lender has no unfinished
 * load, which would take a third longer beside it. No more pieces than there are slots stand on the link at a time,
 * whatever is queued, and there is a gap before each of them, in which the lender's copy engine makes what the lender
 * copies itself.
 *
 * Where the host's memory reaches less than all links together, a transfer borrows what is left beside the links in
 * use, and a store nothing while a load is in progress. A link in use that is lent once more adds nothing. */
#include "paths/lend.h"

#include "device/share.h"
#include "lanes/lane.h"
#include "lanes/late.h"
#include "lanes/registry.h"
#include "paths/costs_default.h"
#include "paths/slots.h"
#include "plan/host_sum.h"
#include "racecheck/racecheck.h"

/* A stream takes some 1,000 commands, then the driver holds its caller; a piece is 3 to 5 of each of its streams. */
enum { MOST_QUEUED = 160 };

/* -- taking ----------------------------------------------------------------------------------------------------------
 */

/* Whether the last transfer of a lender's lane has begun, and uses the borrower's own link. */
static bool lends_to(struct kvs_engine *borrower, struct kvs_engine *lender, struct kvs_lane *lane) {
  struct kvs_error ignored;
  uint64_t last = 0;
  bool lends = false;
  if (pthread_mutex_trylock(&lane->lock)) return false;
  if (lane->tail) last = lane->tail->sequence;
  pthread_mutex_unlock(&lane->lock);
  for (int i = 0; last && i < KVS_LENDERS; i++) {
    struct kvs_lent_way *way = &lender->lent[i].ways[lane->direction];
    if (pthread_mutex_trylock(&way->lock)) continue;
    if (way->lender == borrower && way->lane == lane && way->sequence == last)
      lends = kvs_dev_event_query(lender->device, way->begun[0], &ignored) == KVS_OK;
    pthread_mutex_unlock(&way->lock);
  }
  return lends;
}

/* Transfers of other devices on the lender's link do not delay the lender's lanes. Where the lender has borrowed the
 * borrower's link for a transfer that has begun, half of its pieces stand there, and its own link has room for as much:
 * both devices then share both links. A transfer that may still wait for its start would hold up the borrower's pieces.
 */
bool kvs_lent_is_busy(struct kvs_engine *lender, enum kvs_direction direction, struct kvs_engine *borrower) {
  struct kvs_error ignored;
  bool busy = false;
  kvs_late_settle(lender);
  for (unsigned i = 0; !busy && i < atomic_load(&lender->nlanes); i++) {
    struct kvs_lane *lane = lender->numbered[i];
    if (lane->direction != direction || !atomic_load(&lane->count)) continue;
    (void)kvs_lane_try_reap(lane, &ignored);
    busy = atomic_load(&lane->count) != 0 && !(borrower && lends_to(borrower, lender, lane));
  }
  return busy;
}

bool kvs_lender_is_first(struct kvs_engine *lender, enum kvs_direction direction, struct kvs_engine *borrower) {
  return kvs_lent_is_busy(lender, direction, borrower) ||
         (direction == KVS_D2H && kvs_lent_is_busy(lender, KVS_H2D, NULL));
}

/* -- the host's sum --------------------------------------------------------------------------------------------------
 */

static const double LEAST_TAKEN = 0.1; /* of a link: a smaller share is not worth its third stage */

bool kvs_link_counts(const struct kvs_engine *engine, const struct kvs_engine *other) {
  return kvs_dev_can_wait_for(engine->device, other->device) && !kvs_dev_forked(other->device) &&
         !atomic_load(&other->device->lost);
}

double kvs_link_gbps(const struct kvs_engine *engine, enum kvs_direction direction) {
  double gbps = engine->costs.tuning.link_gbps[direction];
  return gbps > 0 ? gbps : kvs_costs_default()->tuning.link_gbps[direction];
}

/* Whether work of this borrower is queued on the lender's link. A way that another thread holds is being queued on. */
static bool is_borrowing(struct kvs_engine *borrower, const struct kvs_engine *lender, enum kvs_direction direction) {
  bool found = false;
  for (int i = 0; !found && i < KVS_LENDERS; i++) {
    struct kvs_lent *lent = &borrower->lent[i];
    struct kvs_lent_way *way = &lent->ways[direction];
    pthread_mutex_lock(&borrower->note_lock);
    bool lends = lent->lender == lender;
    pthread_mutex_unlock(&borrower->note_lock);
    if (!lends) continue;
    found = pthread_mutex_trylock(&way->lock) != 0;
    if (found) continue;
    found = way->lane && !kvs_lent_is_over(way);
    pthread_mutex_unlock(&way->lock);
  }
  return found;
}

/* Whether the link carries transfers of its own device, or of a borrower other than `asking`, whose ways of that
 * direction this thread may hold. NULL: of any. */
static bool is_in_use(struct kvs_engine *engine, enum kvs_direction direction, const struct kvs_engine *asking) {
  struct kvs_engine *borrower;
  bool used = kvs_lent_is_busy(engine, direction, NULL);
  for (unsigned i = 0; !used && (borrower = kvs_engine_at(i)) != NULL; i++)
    if (borrower != asking && borrower != engine && atomic_load(&borrower->lent_least))
      used = is_borrowing(borrower, engine, direction);
  return used;
}

void kvs_links_busy(struct kvs_engine *engine, enum kvs_direction direction, double busy_gbps[2]) {
  struct kvs_engine *other;
  bool before = kvs_racecheck_internal(true);
  busy_gbps[KVS_D2H] = busy_gbps[KVS_H2D] = 0;
  for (unsigned i = 0; (other = kvs_engine_at(i)) != NULL; i++)
    for (int way = 0; kvs_link_counts(engine, other) && way < 2; way++) {
      if (other == engine && way == (int)direction) continue;
      if (is_in_use(other, (enum kvs_direction)way, way == (int)direction ? engine : NULL))
        busy_gbps[way] += kvs_link_gbps(other, (enum kvs_direction)way);
    }
  kvs_racecheck_internal(before);
}

/* As much of the idle links as the host has room for. Of each link in order its whole share, while there is room. */
static void limit(struct kvs_submission *s) {
  const struct kvs_tuning *tuning = &s->engine->costs.tuning;
  enum kvs_direction direction = s->work->direction;
  double busy[2], own = kvs_link_gbps(s->engine, direction), wanted = 0;
  bool used[KVS_LENDERS];
  unsigned kept = 0;
  if (!s->nlent || !tuning->host_links) return;
  kvs_links_busy(s->engine, direction, busy);
  for (unsigned i = 0; i < s->nlent; i++) {
    used[i] = is_in_use(s->lent[i]->lender, direction, s->engine);
    wanted += used[i] ? 0 : own * s->lent[i]->taken;
  }
  bool none = direction == KVS_D2H && kvs_host_loads_first(tuning->host_gbps, busy, own + wanted);
  double room = none ? 0 : kvs_host_room(tuning->host_gbps, busy, direction, own) / own;
  for (unsigned i = 0; i < s->nlent; i++) {
    struct kvs_lent_way *way = s->lent[i];
    if (!used[i] && way->taken > room) way->taken = room;
    if (!used[i]) room -= way->taken;
    if (none || way->taken < LEAST_TAKEN)
      pthread_mutex_unlock(&way->lock);
    else
      s->lent[kept++] = way;
  }
  s->nlent = kept;
}

/* -- taking, continued -----------------------------------------------------------------------------------------------
 */

/* Rows that are not cut must fit. */
static bool serves(struct kvs_submission *s, struct kvs_lent_way *way) {
  if (!way->lending.slot_nbytes || atomic_load(&way->lender->device->lost)) return false;
  bool whole = s->work->layered || s->work->codings || s->work->packed;
  way->room = kvs_slot_room(s, way->lending.slot_nbytes);
  if (whole && kvs_longest_packed(&s->work->scratch->rows) > way->room) return false;
  if (kvs_lender_is_first(way->lender, s->work->direction, s->engine)) return false;
  return kvs_lent_is_over(way) || (way->lane == s->lane && !atomic_load(&way->unsettled));
}

bool kvs_lent_take(struct kvs_submission *s) {
  if (s->nlent) return true;
  bool before = kvs_racecheck_internal(true);
  for (int i = 0; i < KVS_LENDERS; i++) {
    struct kvs_lent_way *way = &s->engine->lent[i].ways[s->work->direction];
    if (pthread_mutex_trylock(&way->lock)) continue;
    way->given = 0;
    way->used = false;
    way->taken = way->lending.share;
    if (serves(s, way))
      s->lent[s->nlent++] = way;
    else
      pthread_mutex_unlock(&way->lock);
  }
  limit(s);
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
    if (largest <= way->room)
      s->lent[kept++] = way;
    else
      pthread_mutex_unlock(&way->lock);
  }
  s->nlent = kept;
}

struct kvs_lent_way *kvs_lent_next(const struct kvs_submission *s) {
  struct kvs_lent_way *next = NULL;
  double least = (double)s->given;
  for (unsigned i = 0; i < s->nlent; i++) {
    double given = (double)s->lent[i]->given / s->lent[i]->taken;
    if (given < least && kvs_lent_queued(s->lent[i]) < MOST_QUEUED) next = s->lent[i], least = given;
  }
  return next;
}

void kvs_lent_give(struct kvs_submission *s, struct kvs_lent_way *way, uint64_t nbytes) {
  *(way ? &way->given : &s->given) += nbytes;
  if (!way) return;
  atomic_fetch_add(&way->lender->lent_nbytes[s->work->direction], nbytes);
  atomic_fetch_add(&s->engine->borrowed_nbytes[s->work->direction], nbytes);
}

double kvs_lent_shares(const struct kvs_submission *s) {
  double shares = 0;
  for (unsigned i = 0; i < s->nlent; i++)
    if (kvs_lent_queued(s->lent[i]) < MOST_QUEUED) shares += s->lent[i]->taken;
  return shares;
}

/* -- queueing --------------------------------------------------------------------------------------------------------
 */

/* A lost lender does not end the borrower: the transfer goes another way. */
int kvs_lent_blame(const struct kvs_lent_way *way, int status, struct kvs_error *why) {
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
    way->used = false;
    status = kvs_dev_event_record(s->device, way->begun[0], s->first, why);
    if (!status && !s->begun) status = kvs_dev_event_record(s->device, way->begun[1], s->lane->stream, why);
  }
  return status;
}

/* Its pieces are counted from here on. */
static void note(struct kvs_lent_way *way) {
  unsigned last = way->nqueued ? way->nqueued - 1 : 0;
  if (!way->nqueued || (way->queued[last].sequence != way->sequence && way->nqueued < KVS_LENT_TRANSFERS)) {
    last = way->nqueued++;
    way->queued[last].pieces = 0;
  }
  way->queued[last].sequence = way->sequence;
}

/* Only a link that a piece goes over waits for what this transfer waits for. */
static int start(struct kvs_submission *s, struct kvs_lent_way *way, struct kvs_error *why) {
  const struct kvs_lent_stage *first = &way->stages[0], *last = &way->stages[KVS_LENT_STAGES - 1];
  bool again = way->lane == s->lane && way->sequence == s->transfer->sequence;
  if (way->used) return KVS_OK;
  way->used = true;
  way->lane = s->lane;
  way->sequence = s->transfer->sequence;
  note(way);
  s->transfer->lent = true;
  kvs_peer_depend(s->transfer, way->lender);
  int status = wait_for(first, s->device, way->begun[0], why);
  if (!status) status = wait_for(last, s->device, way->begun[0], why);
  if (!status && !again) status = wait_for(last, s->device, way->begun[1], why);
  return status;
}

int kvs_lent_end(struct kvs_submission *s, struct kvs_error *why) {
  int status = KVS_OK;
  for (unsigned i = 0; !status && i < s->nlent; i++) {
    const struct kvs_lent_way *way = s->lent[i];
    const struct kvs_lent_stage *last = &way->stages[KVS_LENT_STAGES - 1];
    if (way->used)
      status = kvs_dev_stream_wait_foreign(s->device, s->lane->stream, last->device, last->done[way->last], why);
    status = kvs_lent_blame(way, status, why);
  }
  return status;
}

static int rejoin(const struct kvs_submission *s, const struct kvs_lent_stage *stage, struct kvs_error *why) {
  if (stage->device != s->device && atomic_load(&stage->device->lost)) return KVS_OK;
  int status = kvs_dev_event_record(stage->device, stage->tail, stage->stream, why);
  return status ? status : kvs_dev_stream_wait_foreign(s->device, s->lane->stream, stage->device, stage->tail, why);
}

void kvs_lent_unsettle(struct kvs_submission *s) {
  for (unsigned i = 0; i < s->nlent; i++)
    if (s->lent[i]->used) atomic_store(&s->lent[i]->unsettled, true);
}

int kvs_lent_rejoin(struct kvs_submission *s, struct kvs_error *why) {
  int status = KVS_OK;
  for (unsigned i = 0; !status && i < s->nlent; i++) {
    if (!s->lent[i]->used) continue;
    for (unsigned stage = 0; !status && stage < KVS_LENT_STAGES; stage++)
      status = rejoin(s, &s->lent[i]->stages[stage], why);
    status = kvs_lent_blame(s->lent[i], status, why);
  }
  return status;
}

int kvs_lent_enter(struct kvs_submission *s, struct kvs_lent_way *way, unsigned stage, struct kvs_error *why) {
  const struct kvs_lent_stage *own = &way->stages[stage], *before = own - 1, *after = own + 1;
  int status = start(s, way, why);
  if (!status && stage > 0) status = wait_for(own, before->device, before->done[way->next], why);
  if (!status && stage + 1 < KVS_LENT_STAGES) /* the slot's last piece */
    status = wait_for(own, after->device, after->done[way->next], why);
  return kvs_lent_blame(way, status, why);
}

int kvs_lent_leave(const struct kvs_lent_way *way, unsigned stage, struct kvs_error *why) {
  const struct kvs_lent_stage *own = &way->stages[stage];
  return kvs_lent_blame(way, kvs_dev_event_record(own->device, own->done[way->next], own->stream, why), why);
}

int kvs_lent_hop(struct kvs_submission *s, struct kvs_lent_way *way, uint64_t nbytes, struct kvs_error *why) {
  uint64_t near = kvs_lent_near(way), far = kvs_lent_far(way);
  bool out = s->work->direction == KVS_D2H;
  int status = kvs_lent_enter(s, way, 1, why);
  if (!status)
    status =
        kvs_dev_copy(way->stages[1].device, out ? far : near, out ? near : far, nbytes, way->stages[1].stream, why);
  status = kvs_lent_blame(way, status, why);
  return status ? status : kvs_lent_leave(way, 1, why);
}

void kvs_lent_next_piece(struct kvs_lent_way *way) {
  way->queued[way->nqueued - 1].pieces++;
  way->last = way->next;
  way->next = (way->next + 1) % way->lending.count;
}
