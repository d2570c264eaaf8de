/* A piece crosses the link into a bounce slot of this device and goes on from there over NVLink, both on one stream, or
 * the other way round. The lender comes first: the next piece is queued only when fewer than two of others are on the
 * link and no transfer of the lender's own is unfinished in that direction; for a store, no load of its own either. */
#include "share/bring.h"

#include <string.h>
#include <sys/stat.h>

#include "lanes/lane.h"
#include "memory/memory.h"
#include "paths/lend.h"
#include "racecheck/racecheck.h"
#include "share/pools.h"
#include "share/receive.h"

/* -- opening ------------------------------------------------------------------------------------------------------- */

static int bounce_open(struct kvs_share *share, struct kvs_share_bounce *bounce, uint64_t ptr, struct kvs_error *err) {
  struct kvs_device *device = share->engine->device;
  int priority = kvs_lane_stream_priority(&device->info, KVS_H2D, KVS_PRIORITY_NORMAL);
  bounce->ptr = ptr;
  int status = kvs_dev_stream_create(device, priority, &bounce->stream, err);
  if (!status) status = kvs_dev_event_create(device, false, &bounce->crossed, err);
  return status ? status : kvs_dev_event_create(device, false, &bounce->end, err);
}

int kvs_bring_open(struct kvs_share *share, struct kvs_error *err) {
  if (share->asked.takes_only) return KVS_OK;
  int status =
      kvs_engine_alloc(share->engine, KVS_SHARE_BOUNCES * share->slot_nbytes, false, &share->bounce_memory, err);
  for (unsigned i = 0; !status && i < KVS_SHARE_BOUNCES; i++)
    status = bounce_open(share, &share->bounces[i], share->bounce_memory + i * share->slot_nbytes, err);
  if (status) return status;
  return kvs_share_pools_open(share, share->bounce_memory, KVS_SHARE_BOUNCES * (uint64_t)share->piece_blocks,
                              &share->bounce_pools, err);
}

void kvs_bring_close(struct kvs_share *share) {
  struct kvs_device *device = share->engine->device;
  struct kvs_error ignored;
  for (unsigned i = 0; i < KVS_SHARE_BOUNCES; i++) {
    struct kvs_share_bounce *bounce = &share->bounces[i];
    if (bounce->crossed) (void)kvs_dev_event_destroy(device, bounce->crossed, &ignored);
    if (bounce->end) (void)kvs_dev_event_destroy(device, bounce->end, &ignored);
    if (bounce->stream) (void)kvs_dev_stream_destroy(device, bounce->stream, &ignored);
  }
  kvs_share_pools_close(share, share->bounce_pools);
  if (share->bounce_memory) kvs_engine_free_later(share->engine, share->bounce_memory);
}

/* -- what is asked ------------------------------------------------------------------------------------------------- */

static void answer(struct kvs_share *share, struct kvs_share_link *link, const struct kvs_share_request *asked,
                   int status) {
  struct kvs_share_message *message = &share->message;
  if (link->state != KVS_LINK_LIVE) return;
  *message = (struct kvs_share_message){.kind = KVS_SHARE_DONE,
                                        .slot = asked->slot,
                                        .generation = asked->generation,
                                        .direction = asked->direction,
                                        .status = status};
  if (!kvs_share_send(link->socket, message)) link->broken = true;
}

static struct kvs_share_request *request_at(struct kvs_share_link *link, unsigned i) {
  return &link->requests[(link->first + i) % KVS_SHARE_SLOTS];
}

/* The other process is as trusted as any of this user: what is checked is what a defect of it could overwrite. */
bool kvs_bring_take(struct kvs_share *share, struct kvs_share_link *link, const struct kvs_share_message *message) {
  if (!link->far || link->waiting == KVS_SHARE_SLOTS || message->slot >= link->far_slots || message->direction > 1 ||
      !message->count || message->count > share->piece_blocks)
    return false;
  for (uint32_t i = 0; i < message->count; i++)
    if (message->ids[i] >= share->num_blocks) return false;
  struct kvs_share_request *request = request_at(link, link->waiting++);
  request->generation = message->generation;
  request->slot = message->slot;
  request->direction = message->direction;
  request->count = message->count;
  request->piece = message->piece;
  request->key = message->key;
  request->digest = message->digest;
  request->since_ns = kvs_share_now(share);
  memcpy(request->ids, message->ids, message->count * sizeof message->ids[0]);
  return true;
}

static void remove_at(struct kvs_share_link *link, unsigned i) {
  if (i == 0) link->first = (link->first + 1) % KVS_SHARE_SLOTS;
  for (link->waiting--; i > 0 && i < link->waiting; i++) *request_at(link, i) = *request_at(link, i + 1);
}

/* A piece on its way is not stopped: its answer follows. */
bool kvs_bring_drop(struct kvs_share *share, struct kvs_share_link *link, const struct kvs_share_message *message) {
  for (unsigned i = 0; i < link->waiting; i++) {
    struct kvs_share_request *request = request_at(link, i);
    if (request->slot != message->slot || request->generation != message->generation) continue;
    answer(share, link, request, KVS_CANCELLED);
    remove_at(link, i);
    break;
  }
  return true;
}

/* -- queueing ------------------------------------------------------------------------------------------------------ */

/* One copy for blocks that follow each other, on both sides. */
static void add_part(const struct kvs_share *share, const struct kvs_share_bounce *bounce,
                     const struct kvs_share_request *request, unsigned part, struct kvs_copies *copies) {
  bool in = request->direction == KVS_H2D, dense = share->parts == 1 && share->stride == share->block_nbytes;
  uint64_t *host = in ? copies->src : copies->dst, *bounced = in ? copies->dst : copies->src;
  for (uint32_t i = 0; i < request->count; i++) {
    uint32_t id = request->ids[i];
    size_t count = copies->count;
    if (count && dense && request->ids[i - 1] + 1 == id && !share->cut[id - 1]) {
      copies->nbytes[count - 1] += share->block_nbytes;
      continue;
    }
    host[count] = share->host_base + part * share->part_stride + id * share->stride;
    bounced[count] = bounce->ptr + i * share->block_nbytes + part * share->part_nbytes;
    copies->nbytes[count] = share->part_nbytes;
    copies->block[count] = i;
    copies->count++;
  }
}

/* The piece between the host and its bounce slot. */
static int cross(struct kvs_share *share, const struct kvs_share_bounce *bounce,
                 const struct kvs_share_request *request, struct kvs_error *err) {
  struct kvs_copies *copies = &share->copies;
  struct kvs_device *device = share->engine->device;
  copies->count = 0;
  for (unsigned part = 0; part < share->parts; part++) add_part(share, bounce, request, part, copies);
  if (copies->count > 1) return kvs_dev_copy_batch(device, copies, 0, copies->count, bounce->stream, err);
  return kvs_dev_copy(device, copies->dst[0], copies->src[0], copies->nbytes[0], bounce->stream, err);
}

static int hop(struct kvs_share *share, const struct kvs_share_bounce *bounce, struct kvs_error *err) {
  uint64_t far = bounce->link->far + bounce->asked.slot * share->slot_nbytes;
  bool in = bounce->asked.direction == KVS_H2D;
  return kvs_dev_copy(share->engine->device, in ? far : bounce->ptr, in ? bounce->ptr : far, bounce->nbytes,
                      bounce->stream, err);
}

static int queue(struct kvs_share *share, const struct kvs_share_bounce *bounce,
                 const struct kvs_share_request *request, struct kvs_error *err) {
  struct kvs_device *device = share->engine->device;
  bool in = request->direction == KVS_H2D;
  int status = in ? cross(share, bounce, request, err) : hop(share, bounce, err);
  if (!status && in) status = kvs_dev_event_record(device, bounce->crossed, bounce->stream, err);
  if (!status) status = in ? hop(share, bounce, err) : cross(share, bounce, request, err);
  if (!status && !in) status = kvs_dev_event_record(device, bounce->crossed, bounce->stream, err);
  if (!status) status = kvs_dev_event_record(device, bounce->end, bounce->stream, err);
  return status;
}

/* After a refused call, part of the piece may be queued: the answer waits until the stream is idle. */
static void begin(struct kvs_share *share, struct kvs_share_link *link, const struct kvs_share_request *request,
                  struct kvs_share_bounce *bounce) {
  struct kvs_error err;
  bounce->busy = bounce->on_link = true;
  bounce->link = link;
  bounce->job = NULL;
  bounce->nbytes = request->count * share->block_nbytes;
  bounce->asked = (struct kvs_share_request){.generation = request->generation,
                                             .slot = request->slot,
                                             .direction = request->direction,
                                             .count = request->count};
  bounce->status = queue(share, bounce, request, &err);
}

/* A piece of a shared load, which is in this GPU's blocks: gathered and passed on. False: there is no room to queue it.
 */
static bool pass(struct kvs_share *share, struct kvs_share_link *link, const struct kvs_share_request *request,
                 struct kvs_share_job *job, struct kvs_share_bounce *bounce) {
  struct kvs_device *device = share->engine->device;
  struct kvs_error err;
  uint64_t to = (uint64_t)(bounce - share->bounces) * share->piece_blocks;
  int status = kvs_receive_pass(share, job, request->piece, to, bounce->stream, &bounce->gathering, &err);
  if (status == KVS_QUEUE_FULL) return false;
  if (status) {
    answer(share, link, request, status);
    return true;
  }
  bounce->busy = true;
  bounce->link = link;
  bounce->job = job;
  bounce->nbytes = request->count * share->block_nbytes;
  bounce->asked = (struct kvs_share_request){
      .generation = request->generation, .slot = request->slot, .direction = KVS_H2D, .count = request->count};
  status = hop(share, bounce, &err);
  if (!status) status = kvs_dev_event_record(device, bounce->end, bounce->stream, &err);
  bounce->status = status;
  return true;
}

/* The device's link has room for a piece of another process: then it is this one's. A process has a member in each
 * group that it lends its link to. */
static bool enter_link(struct kvs_share *share, uint32_t direction) {
  atomic_uint *pieces = &share->engine->lent_pieces[direction];
  if (atomic_fetch_add(pieces, 1) < KVS_SHARE_ON_LINK) return true;
  atomic_fetch_sub(pieces, 1);
  return false;
}

static void leave_link(struct kvs_share *share, struct kvs_share_bounce *bounce) {
  if (bounce->on_link) atomic_fetch_sub(&share->engine->lent_pieces[bounce->asked.direction], 1);
  bounce->on_link = false;
}

/* An access behind the end of a file is a bus error where the CPU copies, as on a host device. */
static bool is_cut_off(const struct kvs_share *share) {
  struct stat file;
  if (!share->asked.file_nbytes) return false;
  return fstat(share->asked.file, &file) != 0 || (uint64_t)file.st_size < share->asked.file_nbytes;
}

/* The pools of a block's parts may lie in several registrations. */
static bool is_closed(const struct kvs_share *share) {
  struct kvs_error err;
  for (size_t i = 0; i < share->npools; i++)
    if (kvs_pool_check_open(share->host_pools[i], &err) != KVS_OK) return true;
  return false;
}

static struct kvs_share_bounce *free_bounce(struct kvs_share *share) {
  for (unsigned i = 0; i < KVS_SHARE_BOUNCES; i++)
    if (!share->bounces[i].busy) return &share->bounces[i];
  return NULL;
}

/* True: the request is dealt with: it was begun or answered. */
static bool pass_if_here(struct kvs_share *share, struct kvs_share_link *link, const struct kvs_share_request *request,
                         struct kvs_share_bounce *bounce) {
  struct kvs_share_job *job = kvs_receive_find(share, request->key);
  bool may_come = !job && !kvs_receive_was(share, request->key);
  if (may_come && kvs_share_now(share) < request->since_ns + share->asked.wait_ns) return false;
  bool known = job && job->digest == request->digest && request->piece < job->npieces;
  if (known && !job->here[request->piece] && !job->nfailed && !share->stop) return false;
  if (known && job->here[request->piece]) return bounce && pass(share, link, request, job, bounce);
  answer(share, link, request, job && !known ? KVS_INVALID : KVS_NOT_READY);
  return true;
}

static bool begin_if_idle(struct kvs_share *share, struct kvs_share_link *link, const struct kvs_share_request *request,
                          struct kvs_share_bounce *bounce) {
  struct kvs_engine *engine = share->engine;
  bool room = bounce && !kvs_lender_is_first(engine, (enum kvs_direction)request->direction, NULL) &&
              enter_link(share, request->direction);
  if (!room && !is_closed(share)) return false;
  pthread_mutex_lock(&engine->hazard_lock); /* the pool is not closed, and unmapped, before the piece is queued */
  bool closed = is_closed(share) || is_cut_off(share);
  if (!closed) begin(share, link, request, bounce);
  pthread_mutex_unlock(&engine->hazard_lock);
  if (!closed) return true;
  if (room) atomic_fetch_sub(&engine->lent_pieces[request->direction], 1);
  answer(share, link, request, KVS_CLOSED); /* the shared pool was closed here */
  return true;
}

/* Links take turns, so that one of many pieces does not keep others from theirs. */
static bool begin_next(struct kvs_share *share) {
  struct kvs_share_bounce *bounce = free_bounce(share);
  for (unsigned i = 1; i <= KVS_SHARE_RANKS; i++) {
    unsigned rank = (share->last_served + i) % KVS_SHARE_RANKS;
    struct kvs_share_link *link = &share->links[rank];
    for (unsigned at = 0; link->state == KVS_LINK_LIVE && at < link->waiting; at++) {
      const struct kvs_share_request *request = request_at(link, at);
      bool dealt =
          request->key ? pass_if_here(share, link, request, bounce) : begin_if_idle(share, link, request, bounce);
      if (!dealt) continue;
      remove_at(link, at);
      share->last_served = rank;
      return true;
    }
  }
  return false;
}

/* -- ending -------------------------------------------------------------------------------------------------------- */

/* A lost device does nothing more: the driver reports the loss in place of the event's state. */
static bool has_ended(struct kvs_share *share, struct kvs_share_bounce *bounce) {
  struct kvs_device *device = share->engine->device;
  struct kvs_error err;
  int status = bounce->status ? kvs_dev_stream_query(device, bounce->stream, &err)
                              : kvs_dev_event_query(device, bounce->end, &err);
  if (status == KVS_NOT_READY) return false;
  if (bounce->gathering && !kvs_transfer_done(bounce->gathering)) return false;
  if (status && !bounce->status) bounce->status = status;
  return true;
}

/* The device counts what crosses its link for other processes as it counts what it lends in this one. */
static void count(struct kvs_share *share, const struct kvs_share_bounce *bounce) {
  share->stats.brought_for_others[bounce->asked.direction] += bounce->nbytes;
  atomic_fetch_add(&share->engine->lent_nbytes[bounce->asked.direction], bounce->nbytes);
}

static void end_pass(struct kvs_share *share, struct kvs_share_bounce *bounce) {
  struct kvs_error why;
  if (!bounce->status) bounce->status = kvs_transfer_wait(bounce->gathering, 0, &why);
  kvs_transfer_unref(bounce->gathering);
  bounce->gathering = NULL;
  if (!bounce->status) share->stats.passed_on += bounce->nbytes;
  kvs_receive_passed(share, bounce->job);
  bounce->job = NULL;
}

static bool end_one(struct kvs_share *share, struct kvs_share_bounce *bounce) {
  struct kvs_error ignored;
  bool changed = false;
  if (!bounce->busy) return false;
  if (bounce->on_link && !bounce->status &&
      kvs_dev_event_query(share->engine->device, bounce->crossed, &ignored) != KVS_NOT_READY) {
    leave_link(share, bounce);
    changed = true;
  }
  if (!has_ended(share, bounce)) return changed;
  leave_link(share, bounce);
  bounce->busy = false;
  if (bounce->job)
    end_pass(share, bounce);
  else if (!bounce->status)
    count(share, bounce);
  answer(share, bounce->link, &bounce->asked, bounce->status);
  return true;
}

bool kvs_bring_step(struct kvs_share *share) {
  bool changed = false, before = kvs_racecheck_internal(true);
  for (unsigned i = 0; i < KVS_SHARE_BOUNCES; i++) changed |= end_one(share, &share->bounces[i]);
  while (!share->stop && begin_next(share)) changed = true;
  kvs_racecheck_internal(before);
  return changed;
}

bool kvs_bring_works(const struct kvs_share *share, const struct kvs_share_link *link) {
  for (unsigned i = 0; i < KVS_SHARE_BOUNCES; i++)
    if (share->bounces[i].busy && (!link || share->bounces[i].link == link)) return true;
  return false;
}

bool kvs_bring_waits(const struct kvs_share *share) {
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++)
    if (share->links[i].state == KVS_LINK_LIVE && share->links[i].waiting) return true;
  return false;
}
