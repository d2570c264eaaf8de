/* A job's pieces are shared out as they go: the own link begins with its share of them in one transfer, from the front,
 * and other members take one piece for each free slot, from behind. The first that is done takes from what is left. A
 * piece that another member does not bring in time, or not at all, goes over the own link, whose failures are the
 * job's. */
#include "share/receive.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"
#include "share/limit.h"
#include "share/pools.h"

enum {
  PAUSE_MS = 200,         /* a late member is asked nothing for so long */
  OWN_MORE = 2,           /* pieces that the own link begins with beyond its share: others begin later */
  OWN_LAST = 8,           /* pieces of a transfer that keeps the own link busy while the next one is chosen */
  LEAST_OWN = 4,          /* pieces that the own link takes at a time, if there are as many */
  PART_NBYTES = 32 << 20, /* of a shared load: others can have pieces of it when a transfer of so much has ended */
};

/* -- jobs ---------------------------------------------------------------------------------------------------------- */

void kvs_receive_free(struct kvs_share_job *job) {
  for (int i = 0; i < KVS_SHARE_OWN; i++) free(job->own[i].pieces);
  free(job->host);
  free(job->gpu);
  free(job->again);
  free(job->failed);
  free(job->here);
  free(job);
}

static size_t blocks_of(const struct kvs_share *share, const struct kvs_share_job *job, size_t piece) {
  size_t first = piece * share->piece_blocks, left = job->count - first;
  return left < share->piece_blocks ? left : share->piece_blocks;
}

static void fail_position(struct kvs_share_job *job, size_t position) {
  job->nfailed += !job->failed[position];
  job->failed[position] = 1;
}

/* Whether others have asked for pieces of it. They are all here when its own work has ended, so that is soon over. */
static bool is_asked_for(const struct kvs_share *share, const struct kvs_share_job *job) {
  if (!job->key || job->direction != KVS_H2D || share->stop) return false;
  for (unsigned rank = 0; rank < KVS_SHARE_RANKS; rank++) {
    const struct kvs_share_link *link = &share->links[rank];
    for (unsigned i = 0; link->state == KVS_LINK_LIVE && i < link->waiting; i++)
      if (link->requests[(link->first + i) % KVS_SHARE_SLOTS].key == job->key) return true;
  }
  return false;
}

static bool awaits_reports(const struct kvs_share_job *job) {
  for (unsigned i = 0; job->key && job->direction == KVS_D2H && i < job->nranks; i++)
    if (!(job->reported >> job->order[i] & 1)) return true;
  return false;
}

static void end_if_over(struct kvs_share *share, struct kvs_share_job *job) {
  struct kvs_error ignored;
  if (job->left || job->late || job->passing || job->state != KVS_STATE_RUNNING) return;
  if (is_asked_for(share, job) || awaits_reports(job)) return;
  job->state = job->nfailed || job->error.status ? KVS_STATE_FAILED : KVS_STATE_DONE;
  if (job->nfailed && !job->error.status)
    kvs_fail(&job->error, KVS_INTERNAL, "%zu blocks were not copied", job->nfailed);
  job->ended_ns = kvs_share_now(share);
  if (job->key && job->direction == KVS_H2D) share->past[share->npast++ % KVS_SHARE_PAST] = job->key;
  if (job->start) (void)kvs_dev_event_destroy(share->engine->device, job->start, &ignored);
  job->start = 0;
  struct kvs_share_job **at = &share->jobs;
  while (*at != job) at = &(*at)->next;
  *at = job->next;
  pthread_cond_broadcast(&share->changed);
  if (atomic_fetch_sub(&job->refs, 1) == 1) kvs_receive_free(job);
}

static void end_pieces(struct kvs_share *share, struct kvs_share_job *job, size_t count) {
  job->left -= count;
  end_if_over(share, job);
}

static void fail_pieces(struct kvs_share *share, struct kvs_share_job *job, const uint32_t *pieces, size_t count,
                        const struct kvs_error *why) {
  if (!job->error.status) job->error = *why;
  for (size_t i = 0; i < count; i++)
    for (size_t block = 0; block < blocks_of(share, job, pieces[i]); block++)
      fail_position(job, pieces[i] * share->piece_blocks + block);
  end_pieces(share, job, count);
}

/* -- moving -------------------------------------------------------------------------------------------------------- */

struct piece_lists {
  int64_t *host, *gpu; /* room for the pieces' blocks; host: ids of the host, or positions in slots */
  size_t count;
};

static void list_piece(const struct kvs_share *share, const struct kvs_share_job *job, size_t piece, int64_t slot,
                       struct piece_lists *lists) {
  size_t first = piece * share->piece_blocks, blocks = blocks_of(share, job, piece);
  for (size_t i = 0; i < blocks; i++) {
    lists->host[lists->count] = slot < 0 ? job->host[first + i] : slot * share->piece_blocks + (int64_t)i;
    lists->gpu[lists->count++] = job->gpu[first + i];
  }
}

/* After what the compute stream had when the job was submitted, and not what it has now. */
static int move(struct kvs_share *share, struct kvs_share_job *job, struct kvs_pool *const *host,
                const struct piece_lists *lists, bool own, struct kvs_transfer **transfer, struct kvs_error *err) {
  const struct kvs_after after = {.kind = KVS_AFTER_EVENT, .handle = job->start};
  bool in = job->direction == KVS_H2D;
  struct kvs_ids ids[2] = {{lists->host, 8, lists->count}, {lists->gpu, 8, lists->count}};
  const struct kvs_move asked = {.src = in ? host : share->gpu_pools,
                                 .dst = in ? share->gpu_pools : host,
                                 .npairs = share->npools,
                                 .src_ids = ids[!in],
                                 .dst_ids = ids[in]};
  struct kvs_options options = {
      .on_stream = true, .stream = share->streams[job->streams][own], .after = &after, .nafter = 1};
  if (!own && share->engine->device->info.kernels) options.path = KVS_PATH_KERNEL;
  return kvs_move_blocks(&asked, &options, transfer, err);
}

static int make_lists(const struct kvs_share *share, size_t pieces, struct piece_lists *lists, struct kvs_error *err) {
  size_t room = pieces * share->piece_blocks;
  lists->count = 0;
  lists->host = malloc(2 * room * sizeof *lists->host);
  if (!lists->host) return kvs_fail(err, KVS_NOMEM, "no memory for the ids of %zu pieces", pieces);
  lists->gpu = lists->host + room;
  return KVS_OK;
}

/* -- the own link -------------------------------------------------------------------------------------------------- */

static struct kvs_share_own *free_own(struct kvs_share_job *job) {
  for (int i = 0; i < KVS_SHARE_OWN; i++)
    if (!job->own[i].transfer) return &job->own[i];
  return NULL;
}

static bool own_works(const struct kvs_share_job *job) {
  for (int i = 0; i < KVS_SHARE_OWN; i++)
    if (job->own[i].transfer) return true;
  return false;
}

static size_t unasked(const struct kvs_share_job *job, unsigned part) { return job->back[part] - job->front[part]; }

/* Takes one piece of a part from its front. */
static uint32_t take_first(struct kvs_share_job *job, unsigned part) {
  return (uint32_t)(job->front[part]++ * job->nranks + part);
}

/* The next pieces of a shared job for the own link, onto `again`: of the own part; then half of what is left of the
 * largest other one, from behind, since that is asked for from its front. */
static void choose_shared(const struct kvs_share *share, struct kvs_share_job *job) {
  size_t most = PART_NBYTES / share->slot_nbytes + 1, left = unasked(job, job->mine);
  unsigned largest = 0;
  for (size_t i = 0; i < left && i < most; i++) job->again[job->nagain++] = take_first(job, job->mine);
  if (left || job->nagain || own_works(job) || job->direction == KVS_D2H) return;
  for (unsigned part = 1; part < job->nranks; part++)
    if (unasked(job, part) > unasked(job, largest)) largest = part;
  left = (unasked(job, largest) + 1) / 2;
  for (size_t i = 0; i < left && i < most; i++)
    job->again[job->nagain++] = (uint32_t)(--job->back[largest] * job->nranks + largest);
}

/* Whether pieces are asked of the member now. It writes none to the host where that would write to bytes of the blocks
 * that are in no pool, or where its end cannot be seen: the store of one that was killed would not end. */
static bool helps(const struct kvs_share *share, const struct kvs_share_link *link, enum kvs_direction direction,
                  uint64_t now) {
  bool writes = share->whole && link->process >= 0;
  return link->state == KVS_LINK_LIVE && link->lends && now >= link->paused_ns && (direction == KVS_H2D || writes);
}

static unsigned count_helpers(const struct kvs_share *share, enum kvs_direction direction) {
  uint64_t now = kvs_share_now(share);
  unsigned helpers = 0;
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++) helpers += helps(share, &share->links[i], direction, now);
  return helpers;
}

static double shares_of_others(const struct kvs_share *share, enum kvs_direction direction) {
  return kvs_limit_shares(share, direction, count_helpers(share, direction) * share->asked.share);
}

/* The next pieces of a job that is not shared, onto `again`: the own link's share of what is left, but for OWN_LAST
 * pieces. These are a transfer of their own behind it: while they move, it is known what is left then, and the link
 * does not idle. */
static void choose(const struct kvs_share *share, struct kvs_share_job *job) {
  size_t fresh = job->tail - job->head, most = (size_t)((double)fresh / (1 + shares_of_others(share, job->direction)));
  bool short_one = own_works(job) && !job->short_last;
  if (own_works(job) && fresh <= 2 * OWN_LAST) return;
  if (short_one)
    most = OWN_LAST;
  else
    most = most > OWN_LAST + LEAST_OWN ? most - OWN_LAST : LEAST_OWN;
  job->short_last = short_one;
  for (size_t i = 0; i < most && i < fresh; i++) job->again[job->nagain++] = (uint32_t)job->head++;
}

/* All of `again` in one transfer. If it is refused, they stay there. */
static int own_begin(struct kvs_share *share, struct kvs_share_job *job, struct kvs_share_own *own,
                     struct kvs_error *err) {
  struct piece_lists lists;
  size_t count = job->nagain;
  uint32_t *pieces = malloc(count * sizeof *pieces);
  int status =
      pieces ? make_lists(share, count, &lists, err) : kvs_fail(err, KVS_NOMEM, "no memory for %zu pieces", count);
  if (!status) {
    memcpy(pieces, job->again, count * sizeof *pieces);
    for (size_t i = 0; i < count; i++) list_piece(share, job, pieces[i], -1, &lists);
    status = move(share, job, share->host_pools, &lists, true, &own->transfer, err);
    free(lists.host);
  }
  if (status) {
    own->transfer = NULL;
    free(pieces);
    return status;
  }
  free(own->pieces);
  own->pieces = pieces;
  own->count = count;
  job->nagain = 0;
  return KVS_OK;
}

static bool has_unasked(const struct kvs_share_job *job) {
  bool some = job->nagain || job->head < job->tail;
  for (unsigned part = 0; part < job->nranks; part++) some |= unasked(job, part) > 0;
  return some;
}

/* All that nobody brings fails. Others' pieces may still come. */
static void lose_rest(struct kvs_share *share, struct kvs_share_job *job, const struct kvs_error *why) {
  while (job->head < job->tail) job->again[job->nagain++] = (uint32_t)job->head++;
  for (unsigned part = 0; part < job->nranks; part++)
    while (unasked(job, part)) job->again[job->nagain++] = take_first(job, part);
  size_t lost = job->nagain;
  job->nagain = 0;
  fail_pieces(share, job, job->again, lost, why);
}

/* What this job has left for the own link, while others go on. */
static bool own_step(struct kvs_share *share, struct kvs_share_job *job) {
  struct kvs_share_own *own = free_own(job);
  struct kvs_error err;
  if (!own) return false;
  if (!share->stop && !job->nagain) {
    if (job->key)
      choose_shared(share, job);
    else
      choose(share, job);
  }
  if (share->stop && has_unasked(job)) {
    kvs_fail(&err, KVS_CLOSED, "the member was closed before all blocks were copied");
    lose_rest(share, job, &err);
    return true;
  }
  if (!job->nagain) return false;
  int status = own_begin(share, job, own, &err);
  if (status == KVS_QUEUE_FULL || !status) return !status;
  lose_rest(share, job, &err); /* it would not be submitted later either */
  return true;
}

/* A transfer that failed leaves its destination as failed. The next write of it may be one that the pools do not know:
 * another process's, or the model's. */
static void forget_failure(const struct kvs_share *share, struct kvs_pool *const *pools, int64_t id,
                           kvs_stream stream) {
  struct kvs_error ignored;
  const struct kvs_ids ids = {&id, 8, 1};
  for (size_t pool = 0; pool < share->npools; pool++)
    (void)kvs_note_access(pools[pool], &ids, true, 0, 0, stream, NULL, &ignored);
}

static void fail_own(struct kvs_share *share, struct kvs_share_job *job, size_t piece, size_t block) {
  size_t position = piece * share->piece_blocks + block;
  bool in = job->direction == KVS_H2D;
  fail_position(job, position);
  forget_failure(share, in ? share->gpu_pools : share->host_pools, in ? job->gpu[position] : job->host[position],
                 share->streams[job->streams][1]);
}

static void note_failures(struct kvs_share *share, struct kvs_share_job *job, const struct kvs_share_own *own) {
  size_t count = kvs_transfer_failed(own->transfer, NULL, 0);
  uint32_t *positions = malloc((count ? count : 1) * sizeof *positions);
  struct kvs_error why;
  (void)kvs_transfer_error(own->transfer, &why);
  kvs_share_explain(share, job, &why);
  if (positions) (void)kvs_transfer_failed(own->transfer, positions, count);
  for (size_t piece = 0, at = 0, next = 0; piece < own->count; piece++)
    for (size_t block = 0; block < blocks_of(share, job, own->pieces[piece]); block++, at++) {
      bool failed = !positions || (next < count && positions[next] == at);
      if (failed) fail_own(share, job, own->pieces[piece], block);
      next += failed;
    }
  free(positions);
}

static bool is_good(const struct kvs_share *share, const struct kvs_share_job *job, size_t piece) {
  return !memchr(job->failed + piece * share->piece_blocks, 1, blocks_of(share, job, piece));
}

/* True: a transfer has ended. The job may be gone then. */
static bool own_end(struct kvs_share *share, struct kvs_share_job *job) {
  for (int i = 0; i < KVS_SHARE_OWN; i++) {
    struct kvs_share_own *own = &job->own[i];
    struct kvs_transfer_info info = {0};
    if (!own->transfer || !kvs_transfer_done(own->transfer)) continue;
    kvs_transfer_get_info(own->transfer, &info);
    if (info.state != KVS_STATE_DONE) note_failures(share, job, own);
    for (size_t piece = 0; piece < own->count; piece++)
      job->here[own->pieces[piece]] = is_good(share, job, own->pieces[piece]);
    kvs_transfer_unref(own->transfer);
    own->transfer = NULL;
    end_pieces(share, job, own->count);
    return true;
  }
  return false;
}

/* -- slots --------------------------------------------------------------------------------------------------------- */

static void give_up(struct kvs_share_slot *slot) {
  struct kvs_share_job *job = slot->job;
  job->again[job->nagain++] = slot->piece;
  slot->job = NULL;
}

/* The other member may still access the slot. And it may still write the host's blocks, with the bytes that the own
 * link writes there too: so a store ends after that. */
static void give_up_late(struct kvs_share_slot *slot) {
  struct kvs_share_job *job = slot->job;
  give_up(slot);
  slot->state = KVS_SLOT_LATE;
  if (job->direction != KVS_D2H) return;
  slot->job = job;
  job->late++;
}

static void end_late(struct kvs_share *share, struct kvs_share_slot *slot) {
  struct kvs_share_job *job = slot->job;
  slot->state = KVS_SLOT_FREE;
  slot->job = NULL;
  if (!job) return;
  job->late--;
  end_if_over(share, job);
}

static bool ask(struct kvs_share *share, struct kvs_share_link *link, struct kvs_share_slot *slot) {
  struct kvs_share_message *message = &share->message;
  struct kvs_share_job *job = slot->job;
  size_t first = (size_t)slot->piece * share->piece_blocks;
  bool idle = true;
  for (unsigned i = 0; i < share->nslots; i++) idle &= link->slots[i].state != KVS_SLOT_ASKED;
  message->kind = KVS_SHARE_TAKE;
  message->slot = (uint16_t)(slot - link->slots);
  message->generation = ++slot->generation;
  message->status = 0;
  message->direction = job->direction;
  message->piece = slot->piece;
  message->key = job->key;
  message->digest = job->digest;
  message->count = (uint32_t)blocks_of(share, job, slot->piece);
  for (uint32_t i = 0; i < message->count; i++) message->ids[i] = (uint32_t)job->host[first + i];
  if (idle) link->heard_ns = kvs_share_now(share);
  slot->state = KVS_SLOT_ASKED;
  slot->recalled = false;
  if (!kvs_share_send(link->socket, message)) link->broken = true;
  return true;
}

static struct kvs_share_move *free_move(struct kvs_share *share) {
  for (int i = 0; i < KVS_SHARE_MOVES; i++)
    if (!share->moves[i].transfer) return &share->moves[i];
  return NULL;
}

/* One copy for all of the job's slots of this link that are in a state, between them and the GPU's blocks. Where that
 * is refused, the pieces go over the own link. */
static bool move_slots(struct kvs_share *share, struct kvs_share_link *link, struct kvs_share_job *job,
                       enum kvs_share_slot_state from, enum kvs_share_slot_state to) {
  struct kvs_share_move *made = free_move(share);
  struct piece_lists lists;
  struct kvs_error err;
  uint32_t slots = 0;
  for (unsigned i = 0; i < share->nslots; i++)
    if (link->slots[i].job == job && link->slots[i].state == from) slots |= UINT32_C(1) << i;
  if (!slots || !made || make_lists(share, share->nslots, &lists, &err)) return false;
  for (unsigned i = 0; i < share->nslots; i++)
    if (slots >> i & 1) list_piece(share, job, link->slots[i].piece, i, &lists);
  int status = move(share, job, link->pools, &lists, false, &made->transfer, &err);
  free(lists.host);
  if (status) made->transfer = NULL;
  if (status == KVS_QUEUE_FULL) return false;
  for (unsigned i = 0; i < share->nslots; i++) {
    if (!(slots >> i & 1)) continue;
    link->slots[i].state = status ? KVS_SLOT_FREE : to;
    if (status) give_up(&link->slots[i]);
  }
  made->link = link;
  made->job = job;
  made->slots = slots;
  return true;
}

static void forget_slot(const struct kvs_share *share, const struct kvs_share_link *link, unsigned i) {
  for (uint32_t block = 0; block < share->piece_blocks; block++)
    forget_failure(share, link->pools, (int64_t)i * share->piece_blocks + block, share->streams[0][0]);
}

static void end_brought(struct kvs_share *share, struct kvs_share_job *job, size_t piece) {
  size_t blocks = blocks_of(share, job, piece);
  job->given += blocks * share->kv_nbytes;
  share->stats.brought_by_others[job->direction] += blocks * share->block_nbytes;
  atomic_fetch_add(&share->engine->borrowed_nbytes[job->direction], blocks * share->block_nbytes);
  end_pieces(share, job, 1);
}

static void end_slot(struct kvs_share *share, struct kvs_share_move *move, unsigned i, bool ok) {
  struct kvs_share_slot *slot = &move->link->slots[i];
  struct kvs_share_job *job = move->job;
  if (ok && slot->state == KVS_SLOT_FILLING && move->link->state == KVS_LINK_LIVE) {
    ask(share, move->link, slot);
    return;
  }
  bool arrived = ok && slot->state == KVS_SLOT_EMPTYING;
  slot->state = KVS_SLOT_FREE;
  if (!arrived) {
    if (!ok) forget_slot(share, move->link, i);
    give_up(slot);
    return;
  }
  slot->job = NULL;
  job->here[slot->piece] = 1;
  end_brought(share, job, slot->piece);
}

/* The slots of a failed copy whose pieces go over the own link. Blocks of a store that do not fit are lost by any way:
 * their slots say so and are brought to the host, so that a load of them fails. In a load a verdict is not final: the
 * bytes came from another process, and the own link brings the host's. */
static uint32_t find_bad(struct kvs_share *share, const struct kvs_share_move *move) {
  struct kvs_share_job *job = move->job;
  struct kvs_error why = {.status = KVS_OK};
  size_t count = kvs_transfer_failed(move->transfer, NULL, 0), at = 0, next = 0;
  (void)kvs_transfer_error(move->transfer, &why);
  uint32_t bad = 0, *positions = kvs_share_is_verdict(why.status) ? malloc(count * sizeof *positions) : NULL;
  bool store = job->direction == KVS_D2H;
  if (!positions) return move->slots;
  (void)kvs_transfer_failed(move->transfer, positions, count);
  if (store) kvs_share_explain(share, job, &why);
  for (unsigned i = 0; i < share->nslots; i++) {
    if (!(move->slots >> i & 1)) continue;
    size_t piece = move->link->slots[i].piece;
    for (size_t block = 0; block < blocks_of(share, job, piece); block++, at++) {
      if (next == count || positions[next] != at) continue;
      if (store)
        fail_position(job, piece * share->piece_blocks + block);
      else
        bad |= UINT32_C(1) << i;
      next++;
    }
    forget_slot(share, move->link, i);
  }
  free(positions);
  return bad;
}

static bool moves_end(struct kvs_share *share) {
  bool changed = false;
  for (int at = 0; at < KVS_SHARE_MOVES; at++) {
    struct kvs_share_move *move = &share->moves[at];
    struct kvs_transfer_info info = {0};
    if (!move->transfer || !kvs_transfer_done(move->transfer)) continue;
    kvs_transfer_get_info(move->transfer, &info);
    uint32_t bad = info.state == KVS_STATE_DONE ? 0 : find_bad(share, move);
    kvs_transfer_unref(move->transfer);
    move->transfer = NULL;
    for (unsigned i = 0; i < share->nslots; i++)
      if (move->slots >> i & 1) end_slot(share, move, i, !(bad >> i & 1));
    changed = true;
  }
  return changed;
}

/* -- links --------------------------------------------------------------------------------------------------------- */

static uint32_t ranks_of(const struct kvs_share_job *job) {
  uint32_t ranks = 0;
  for (unsigned part = 0; part < job->nranks; part++) ranks |= UINT32_C(1) << job->order[part];
  return ranks;
}

static size_t part_of_block(const struct kvs_share *share, const struct kvs_share_job *job, size_t position) {
  return position / share->piece_blocks % job->nranks;
}

/* How the part of a rank has ended. A block of its part is stored only if it says so. */
static void take_report(struct kvs_share *share, struct kvs_share_job *job, unsigned rank, int status, int why,
                        const uint32_t *failed, uint32_t count) {
  const struct kvs_error verdict = {.status = why};
  if (job->reported >> rank & 1) return;
  job->reported |= UINT32_C(1) << rank;
  for (size_t i = 0; status && i < job->count; i++)
    if (job->order[part_of_block(share, job, i)] == rank) fail_position(job, i);
  for (uint32_t i = 0; !status && i < count; i++)
    if (failed[i] < job->count) fail_position(job, failed[i]);
  if (!status && count && kvs_share_is_verdict(why)) kvs_share_explain(share, job, &verdict);
  if (job->nfailed && !job->error.status)
    kvs_fail(&job->error, KVS_CLOSED, "rank %u did not store its part: these blocks are stored for no member", rank);
  end_if_over(share, job);
}

static struct kvs_share_job *find_job(const struct kvs_share *share, uint64_t key, enum kvs_direction direction) {
  struct kvs_share_job *job = share->jobs;
  while (job && (job->key != key || job->direction != direction)) job = job->next;
  return key ? job : NULL;
}

void kvs_receive_report(struct kvs_share *share, struct kvs_share_link *link, const struct kvs_share_message *message) {
  struct kvs_share_job *job = find_job(share, message->key, KVS_D2H);
  int status = message->count > KVS_SHARE_FAILED ? KVS_CLOSED : message->status;
  if (job) {
    take_report(share, job, link->rank, job->digest == message->digest ? status : KVS_INVALID, message->why,
                message->ids, status ? 0 : message->count);
    return;
  }
  struct kvs_share_report *kept = &link->reports[link->next_report++ % KVS_SHARE_REPORTS];
  *kept =
      (struct kvs_share_report){.key = message->key, .digest = message->digest, .status = status, .why = message->why};
  kept->count = status ? 0 : message->count;
  memcpy(kept->failed, message->ids, kept->count * sizeof kept->failed[0]);
}

/* Reports that came before this process's own call. Those of ranks that are not here will not come. */
static void take_kept(struct kvs_share *share, struct kvs_share_job *job) {
  for (unsigned part = 0; part < job->nranks; part++) {
    struct kvs_share_link *link = &share->links[job->order[part]];
    if (part == job->mine) continue;
    for (int i = 0; i < KVS_SHARE_REPORTS; i++) {
      struct kvs_share_report *kept = &link->reports[i];
      if (kept->key != job->key) continue;
      kept->key = 0;
      take_report(share, job, link->rank, kept->digest == job->digest ? kept->status : KVS_INVALID, kept->why,
                  kept->failed, kept->count);
    }
    if (link->state == KVS_LINK_UNUSED || link->state == KVS_LINK_MADE)
      take_report(share, job, job->order[part], KVS_CLOSED, KVS_OK, NULL, 0);
  }
}

/* Tell the others how the own part has ended. With more failed blocks than a report names, all of it counts as failed,
 * here too: ranks must agree on what is stored. The job may be gone then. */
static bool tell(struct kvs_share *share, struct kvs_share_job *job) {
  struct kvs_share_message *message = &share->message;
  if (job->told || job->left || !job->key || job->direction != KVS_D2H) return false;
  job->told = true;
  job->told_ns = kvs_share_now(share);
  *message = (struct kvs_share_message){
      .kind = KVS_SHARE_REPORT, .key = job->key, .digest = job->digest, .why = job->error.status};
  for (size_t i = 0; i < job->count; i++)
    if (job->failed[i] && part_of_block(share, job, i) == job->mine && message->count <= KVS_SHARE_FAILED)
      message->ids[message->count++] = (uint32_t)i;
  for (size_t i = 0; message->count > KVS_SHARE_FAILED && i < job->count; i++)
    if (part_of_block(share, job, i) == job->mine) fail_position(job, i);
  for (unsigned part = 0; part < job->nranks; part++) {
    struct kvs_share_link *link = &share->links[job->order[part]];
    if (part != job->mine && link->state == KVS_LINK_LIVE && !kvs_share_send(link->socket, message))
      link->broken = true;
  }
  job->reported |= UINT32_C(1) << job->order[job->mine];
  end_if_over(share, job);
  return true;
}

/* The limit for the reports of others has passed. */
static void give_up_reports(struct kvs_share *share, struct kvs_share_job *job, uint64_t now) {
  if (!job->told || now < job->told_ns + share->asked.store_ns) return;
  for (unsigned part = 0; part < job->nranks && job->state == KVS_STATE_RUNNING; part++)
    take_report(share, job, job->order[part], KVS_TIMEOUT, KVS_OK, NULL, 0);
}

/* -- passing on ---------------------------------------------------------------------------------------------------- */

struct kvs_share_job *kvs_receive_find(const struct kvs_share *share, uint64_t key) {
  return find_job(share, key, KVS_H2D);
}

bool kvs_receive_was(const struct kvs_share *share, uint64_t key) {
  for (unsigned i = 0; i < KVS_SHARE_PAST; i++)
    if (share->past[i] == key) return true;
  return false;
}

int kvs_receive_pass(struct kvs_share *share, struct kvs_share_job *job, uint32_t piece, uint64_t to, kvs_stream stream,
                     struct kvs_transfer **transfer, struct kvs_error *err) {
  struct piece_lists lists = {0};
  int status = make_lists(share, 1, &lists, err);
  if (status) return status;
  list_piece(share, job, piece, (int64_t)(to / share->piece_blocks), &lists);
  const struct kvs_move asked = {.src = share->gpu_pools,
                                 .dst = share->bounce_pools,
                                 .npairs = share->npools,
                                 .src_ids = {lists.gpu, 8, lists.count},
                                 .dst_ids = {lists.host, 8, lists.count}};
  struct kvs_options options = {.on_stream = true, .stream = stream};
  if (share->engine->device->info.kernels) options.path = KVS_PATH_KERNEL;
  status = kvs_move_blocks(&asked, &options, transfer, err);
  free(lists.host);
  if (!status) job->passing++;
  return status;
}

void kvs_receive_passed(struct kvs_share *share, struct kvs_share_job *job) {
  job->passing--;
  end_if_over(share, job);
}

/* -- answers ------------------------------------------------------------------------------------------------------- */

/* The member brings nothing of a shared load: the own link does. */
static void leave_out(struct kvs_share_job *job, unsigned rank) {
  job->absent |= UINT32_C(1) << rank;
  for (unsigned part = 0; part < job->nranks; part++)
    while (job->order[part] == rank && unasked(job, part)) job->again[job->nagain++] = take_first(job, part);
}

bool kvs_receive_done(struct kvs_share *share, struct kvs_share_link *link, const struct kvs_share_message *message) {
  if (message->slot >= share->nslots) return false;
  struct kvs_share_slot *slot = &link->slots[message->slot];
  bool asked = slot->state == KVS_SLOT_ASKED || slot->state == KVS_SLOT_LATE;
  if (!asked || slot->generation != message->generation) {
    share->stats.answers_dropped++;
    return true;
  }
  link->heard_ns = kvs_share_now(share);
  if (slot->state == KVS_SLOT_LATE) {
    end_late(share, slot);
    return true;
  }
  struct kvs_share_job *job = slot->job;
  slot->state = KVS_SLOT_FREE;
  if (message->status && job->key) {
    give_up(slot);
    leave_out(job, link->rank);
  } else if (message->status) {
    give_up(slot);
    if (message->status != KVS_CANCELLED) link->paused_ns = link->heard_ns + PAUSE_MS * UINT64_C(1000000);
  } else if (job->direction == KVS_H2D) {
    slot->state = KVS_SLOT_ARRIVED;
  } else {
    slot->job = NULL;
    end_brought(share, job, slot->piece);
  }
  return true;
}

/* The other member need not begin the piece. */
static void drop(struct kvs_share *share, struct kvs_share_link *link, const struct kvs_share_slot *slot) {
  share->message = (struct kvs_share_message){
      .kind = KVS_SHARE_DROP, .slot = (uint16_t)(slot - link->slots), .generation = slot->generation};
  if (link->state == KVS_LINK_LIVE && !kvs_share_send(link->socket, &share->message)) link->broken = true;
}

/* Pieces that the other member has not brought; it may still access their slots. */
static void make_late(struct kvs_share *share, struct kvs_share_link *link) {
  for (unsigned i = 0; i < share->nslots; i++) {
    struct kvs_share_slot *slot = &link->slots[i];
    if (slot->state != KVS_SLOT_ASKED) continue;
    if (slot->job->key) leave_out(slot->job, link->rank);
    give_up_late(slot);
    share->stats.pieces_late++;
    drop(share, link, slot);
  }
}

/* The own link has nothing left to do: it takes what others have not begun, perhaps since they are busy themselves. */
static bool recall(struct kvs_share *share, struct kvs_share_job *job) {
  bool changed = false;
  if (job->key || own_works(job) || job->nagain || job->head < job->tail) return false;
  for (unsigned rank = 0; rank < KVS_SHARE_RANKS; rank++)
    for (unsigned i = 0; share->links[rank].state == KVS_LINK_LIVE && i < share->nslots; i++) {
      struct kvs_share_slot *slot = &share->links[rank].slots[i];
      if (slot->job != job || slot->state != KVS_SLOT_ASKED || slot->recalled) continue;
      drop(share, &share->links[rank], slot);
      slot->recalled = changed = true;
    }
  return changed;
}

static bool is_shared_by(const struct kvs_share_job *job, enum kvs_direction direction, unsigned rank) {
  return job->key && job->direction == direction && ranks_of(job) >> rank & 1;
}

void kvs_receive_lose(struct kvs_share *share, struct kvs_share_link *link) {
  make_late(share, link);
  for (struct kvs_share_job *job = share->jobs; job; job = job->next)
    if (is_shared_by(job, KVS_H2D, link->rank)) leave_out(job, link->rank);
  for (unsigned i = 0; i < share->nslots; i++)
    if (link->slots[i].state == KVS_SLOT_ARRIVED) {
      link->slots[i].state = KVS_SLOT_FREE;
      give_up(&link->slots[i]);
    }
}

/* Nobody knows what a member stored that has ended without a report. Its copies have ended only now. */
void kvs_receive_forget(struct kvs_share *share, struct kvs_share_link *link) {
  struct kvs_share_job *next;
  for (unsigned i = 0; i < share->nslots; i++)
    if (link->slots[i].state == KVS_SLOT_LATE) end_late(share, &link->slots[i]);
  for (struct kvs_share_job *job = share->jobs; job; job = next) {
    next = job->next;
    if (is_shared_by(job, KVS_D2H, link->rank)) take_report(share, job, link->rank, KVS_CLOSED, KVS_OK, NULL, 0);
  }
}

bool kvs_receive_uses(const struct kvs_share *share, const struct kvs_share_link *link) {
  for (unsigned i = 0; i < share->nslots; i++)
    if (link->slots[i].state != KVS_SLOT_FREE) return true;
  for (const struct kvs_share_job *job = share->jobs; job; job = job->next)
    if (is_shared_by(job, KVS_D2H, link->rank) && !(job->reported >> link->rank & 1)) return true;
  return false;
}

static bool is_late(const struct kvs_share *share, const struct kvs_share_link *link, uint64_t now) {
  if (link->state != KVS_LINK_LIVE || now < link->heard_ns + share->asked.stall_ns) return false;
  for (unsigned i = 0; i < share->nslots; i++)
    if (link->slots[i].state == KVS_SLOT_ASKED) return true;
  return false;
}

/* The part of a shared load that the member of the link brings; -1: none, or it does not take part. */
static int part_of(const struct kvs_share_job *job, const struct kvs_share_link *link) {
  for (unsigned part = 0; part < job->nranks; part++)
    if (job->order[part] == link->rank && !(job->absent >> link->rank & 1)) return (int)part;
  return -1;
}

/* Ask for pieces of a shared load. */
static bool ask_shared(struct kvs_share *share, struct kvs_share_link *link, struct kvs_share_job *job) {
  int part = job->direction == KVS_H2D ? part_of(job, link) : -1;
  bool changed = false;
  if (link->state != KVS_LINK_LIVE || part < 0 || share->stop) return false;
  for (unsigned i = 0; i < share->nslots && unasked(job, (unsigned)part); i++) {
    struct kvs_share_slot *slot = &link->slots[i];
    if (slot->state != KVS_SLOT_FREE) continue;
    slot->job = job;
    slot->piece = take_first(job, (unsigned)part);
    changed = ask(share, link, slot);
  }
  return changed;
}

/* Give pieces of the job to the free slots of a link. */
static bool share_out(struct kvs_share *share, struct kvs_share_link *link, struct kvs_share_job *job, uint64_t now) {
  bool changed = false;
  if (!helps(share, link, job->direction, now) || share->stop) return false;
  unsigned helpers = count_helpers(share, job->direction);
  unsigned most = kvs_limit_pieces(share, link, job->direction, helpers * share->asked.share, helpers);
  for (unsigned i = 0; i < share->nslots && job->head < job->tail; i++) {
    struct kvs_share_slot *slot = &link->slots[i];
    if (slot->state != KVS_SLOT_FREE || !most) continue;
    most--;
    slot->job = job;
    slot->piece = (uint32_t)--job->tail;
    slot->state = KVS_SLOT_FILLING;
    if (job->direction == KVS_H2D) ask(share, link, slot);
    changed = true;
  }
  return changed;
}

static bool link_step(struct kvs_share *share, struct kvs_share_link *link, struct kvs_share_job *job, uint64_t now) {
  bool changed = job->key ? ask_shared(share, link, job) : share_out(share, link, job, now);
  if (job->direction == KVS_H2D) return move_slots(share, link, job, KVS_SLOT_ARRIVED, KVS_SLOT_EMPTYING) || changed;
  for (int at = 0; at < KVS_SHARE_MOVES; at++) /* slots that a copy fills already */
    if (share->moves[at].transfer && share->moves[at].link == link && share->moves[at].job == job) return changed;
  return move_slots(share, link, job, KVS_SLOT_FILLING, KVS_SLOT_FILLING) || changed;
}

/* -- rounds -------------------------------------------------------------------------------------------------------- */

/* What the compute stream has before the job is none of its time. */
static void note_begun(const struct kvs_share *share, struct kvs_share_job *job, uint64_t now) {
  struct kvs_error ignored;
  if (job->begun) return;
  job->begun = kvs_dev_event_query(share->engine->device, job->start, &ignored) != KVS_NOT_READY;
  if (!job->begun) job->since_ns = now;
}

static bool job_step(struct kvs_share *share, struct kvs_share_job *job, uint64_t now) {
  bool changed = false;
  atomic_fetch_add(&job->refs, 1);
  note_begun(share, job, now);
  while (own_end(share, job)) changed = true;
  if (job->state == KVS_STATE_RUNNING) {
    for (unsigned i = 0; i < KVS_SHARE_RANKS; i++)
      if (share->links[i].state != KVS_LINK_UNUSED) changed |= link_step(share, &share->links[i], job, now);
    changed |= own_step(share, job);
    changed |= job->state == KVS_STATE_RUNNING && recall(share, job);
    changed |= job->state == KVS_STATE_RUNNING && tell(share, job);
    if (job->state == KVS_STATE_RUNNING) give_up_reports(share, job, now);
    end_if_over(share, job);
  }
  if (atomic_fetch_sub(&job->refs, 1) == 1) kvs_receive_free(job);
  return changed;
}

bool kvs_receive_step(struct kvs_share *share) {
  uint64_t now = kvs_share_now(share);
  bool changed = moves_end(share);
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++) {
    struct kvs_share_link *link = &share->links[i];
    if (!is_late(share, link, now)) continue;
    link->paused_ns = now + PAUSE_MS * UINT64_C(1000000);
    make_late(share, link);
    changed = true;
  }
  struct kvs_share_job *next;
  for (struct kvs_share_job *job = share->jobs; job; job = next) {
    next = job->next;
    changed |= job_step(share, job, now);
  }
  return changed;
}

/* A copy between a slot and blocks is under way, or waits for room in its lane. */
static bool slots_work(const struct kvs_share_link *link) {
  for (unsigned i = 0; i < KVS_SHARE_SLOTS; i++) {
    enum kvs_share_slot_state state = link->slots[i].state;
    if (state == KVS_SLOT_FILLING || state == KVS_SLOT_ARRIVED || state == KVS_SLOT_EMPTYING) return true;
  }
  return false;
}

bool kvs_receive_works(const struct kvs_share *share) {
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++)
    if (slots_work(&share->links[i])) return true;
  for (const struct kvs_share_job *job = share->jobs; job; job = job->next)
    if (own_works(job) || has_unasked(job)) return true;
  return false;
}

bool kvs_receive_waits(const struct kvs_share *share) {
  for (const struct kvs_share_job *job = share->jobs; job; job = job->next)
    if (job->begun) return false;
  return share->jobs != NULL;
}

uint64_t kvs_receive_next_ns(const struct kvs_share *share) {
  uint64_t next = UINT64_MAX;
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++) {
    const struct kvs_share_link *link = &share->links[i];
    bool asked = false;
    for (unsigned slot = 0; slot < share->nslots; slot++) asked |= link->slots[slot].state == KVS_SLOT_ASKED;
    if (link->state == KVS_LINK_LIVE && asked && link->heard_ns + share->asked.stall_ns < next)
      next = link->heard_ns + share->asked.stall_ns;
  }
  for (const struct kvs_share_job *job = share->jobs; job; job = job->next)
    if (job->told && job->told_ns + share->asked.store_ns < next) next = job->told_ns + share->asked.store_ns;
  return next;
}

/* -- beginning ----------------------------------------------------------------------------------------------------- */

static int read_ids(const struct kvs_ids *ids, const char *name, uint64_t limit, int64_t *out, struct kvs_error *err) {
  kvs_ids_copy(ids, out);
  for (size_t i = 0; i < ids->count; i++)
    if ((uint64_t)out[i] >= limit)
      return kvs_fail(err, KVS_RANGE, "%s[%zu] is %" PRId64 "; the pool has %" PRIu64 " blocks, 0 to %" PRIu64, name, i,
                      out[i], limit, limit - 1);
  return KVS_OK;
}

static void name_job(const struct kvs_share *share, struct kvs_share_job *job, const struct kvs_share_name *named) {
  job->key = named->key;
  for (unsigned rank = 0; rank < KVS_SHARE_RANKS; rank++) {
    if (!(named->ranks >> rank & 1)) continue;
    if (rank == named->rank) job->mine = job->nranks;
    job->order[job->nranks++] = rank;
  }
  for (unsigned part = 0; part < job->nranks; part++)
    job->back[part] = (job->npieces + job->nranks - 1 - part) / job->nranks;
  job->head = job->tail = 0;
  job->digest = kvs_share_mix(kvs_share_mix(UINT64_C(0xcbf29ce484222325), named->ranks), job->count);
  for (size_t i = 0; i < share->npools; i++) job->digest = kvs_share_mix_pool(share, i, job->digest);
  for (size_t i = 0; i < job->count; i++) job->digest = kvs_share_mix(job->digest, (uint64_t)job->host[i]);
  if (job->direction == KVS_H2D) return;
  job->left = job->back[job->mine];
  for (unsigned part = 0; part < job->nranks; part++)
    if (part != job->mine) job->front[part] = job->back[part];
}

static int job_new(struct kvs_share *share, enum kvs_direction direction, const struct kvs_ids *host,
                   const struct kvs_ids *gpu, struct kvs_share_job **made, struct kvs_error *err) {
  struct kvs_pool_layout layout;
  size_t count = host->count, room = count ? count : 1;
  struct kvs_share_job *job = calloc(1, sizeof *job);
  if (!job) return kvs_fail(err, KVS_NOMEM, "no memory for a job of %zu blocks", count);
  atomic_init(&job->refs, 2);
  job->direction = direction;
  job->count = count;
  job->npieces = job->left = job->tail = (count + share->piece_blocks - 1) / share->piece_blocks;
  job->since_ns = kvs_share_now(share);
  job->host = calloc(room, sizeof *job->host);
  job->gpu = calloc(room, sizeof *job->gpu);
  job->again = calloc(job->npieces + 1, sizeof *job->again);
  job->failed = calloc(room, 1);
  job->here = calloc(job->npieces + 1, 1);
  kvs_pool_get_layout(share->gpu_pools[0], &layout);
  int status = job->host && job->gpu && job->again && job->failed && job->here
                   ? KVS_OK
                   : kvs_fail(err, KVS_NOMEM, "no memory for a job of %zu blocks", count);
  if (!status) status = read_ids(host, "host_ids", share->num_blocks, job->host, err);
  if (!status) status = read_ids(gpu, "gpu_ids", layout.num_blocks, job->gpu, err);
  if (status)
    kvs_receive_free(job);
  else
    *made = job;
  return status;
}

/* Destinations that are named twice would be written by two links. */
static int check_twice(const struct kvs_share_job *job, uint64_t limit, struct kvs_error *err) {
  const int64_t *ids = job->direction == KVS_H2D ? job->gpu : job->host;
  uint8_t *seen = calloc((size_t)(limit + 7) / 8, 1);
  int status = seen ? KVS_OK : kvs_fail(err, KVS_NOMEM, "no memory to check %zu ids", job->count);
  for (size_t i = 0; !status && i < job->count; i++) {
    if (seen[ids[i] / 8] >> (ids[i] % 8) & 1)
      status = kvs_fail(err, KVS_INVALID, "%s[%zu] is %" PRId64 ", which is named before: a destination is named once",
                        job->direction == KVS_H2D ? "gpu_ids" : "host_ids", i, ids[i]);
    seen[ids[i] / 8] |= (uint8_t)(1 << ids[i] % 8);
  }
  free(seen);
  return status;
}

static int record_start(struct kvs_share *share, struct kvs_share_job *job, const uint64_t *after,
                        struct kvs_error *err) {
  struct kvs_device *device = share->engine->device;
  struct kvs_stream_info info;
  kvs_stream compute = after ? *after : kvs_engine_compute_stream(share->engine);
  int status = kvs_stream_ask(device, compute, after ? "after" : "the compute stream", &info, err);
  if (!status) status = kvs_dev_event_create(device, false, &job->start, err);
  return status ? status : kvs_dev_event_record(device, job->start, compute, err);
}

/* What the own link begins with, in the call. */
static void choose_first(const struct kvs_share *share, struct kvs_share_job *job) {
  double shares = shares_of_others(share, job->direction);
  size_t first = shares > 0 ? (size_t)((double)job->tail / (1 + shares)) + OWN_MORE : job->tail;
  if (shares > 0 && first > 2 * OWN_LAST) first -= OWN_LAST;
  if (job->key) choose_shared(share, job);
  while (first-- > 0 && job->head < job->tail) job->again[job->nagain++] = (uint32_t)job->head++;
}

int kvs_receive_begin(struct kvs_share *share, enum kvs_direction direction, const struct kvs_ids *host,
                      const struct kvs_ids *gpu, const struct kvs_share_name *named, const uint64_t *after,
                      struct kvs_share_job **made, struct kvs_error *err) {
  struct kvs_pool_layout layout;
  struct kvs_share_job *job = NULL;
  struct kvs_error ignored;
  kvs_pool_get_layout(share->gpu_pools[0], &layout);
  int status = job_new(share, direction, host, gpu, &job, err);
  if (status) return status;
  status = check_twice(job, direction == KVS_H2D ? layout.num_blocks : share->num_blocks, err);
  if (!status) status = record_start(share, job, after, err);
  job->streams = share->njobs % KVS_SHARE_STREAMS;
  if (named) name_job(share, job, named);
  choose_first(share, job);
  if (!status && job->nagain) status = own_begin(share, job, &job->own[0], err);
  if (status) {
    if (job->start) (void)kvs_dev_event_destroy(share->engine->device, job->start, &ignored);
    kvs_receive_free(job);
    return status;
  }
  share->njobs++;
  struct kvs_share_job **at = &share->jobs;
  while (*at) at = &(*at)->next;
  *at = job;
  *made = job;
  if (job->key && direction == KVS_D2H) take_kept(share, job);
  if (!job->npieces) end_if_over(share, job);
  return KVS_OK;
}
