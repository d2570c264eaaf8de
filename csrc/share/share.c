/* A member: opening and closing, its links, and its thread. bring.c and receive.c have what it does in each round. */
#include "share/share.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/thread.h"
#include "base/wait.h"
#include "device/share.h"
#include "lanes/registry.h"
#include "memory/memory.h"
#include "memory/range.h"
#include "share/bring.h"
#include "share/limit.h"
#include "share/pools.h"
#include "share/receive.h"

static const double LEAST_SHARE = 0.1, MOST_SHARE = 10;
static const uint64_t MOST_SLOT_NBYTES = 64 << 20;
enum { MOST_PARTS = 8 };
static const int64_t PATIENCE_NS = INT64_C(60) * 1000000000, AGAIN_NS = 1000000000;
enum { MOST_MESSAGES = 256 };         /* read in a round: what the slots of a link allow is less */
static const uint64_t POLL_NS = 5000; /* between looks at events: a piece of 4 MiB takes 75 us */
static const uint64_t WAIT_POLL_NS = 50000;

/* -- opening ------------------------------------------------------------------------------------------------------- */

static int check_parts(const struct kvs_share_options *asked, struct kvs_error *err) {
  const uint64_t parts = asked->parts ? asked->parts : 1, nbytes = asked->block_nbytes / parts;
  const uint64_t stride = asked->stride ? asked->stride : nbytes;
  uint64_t rows, rest;
  if (parts > MOST_PARTS || asked->block_nbytes % parts)
    return kvs_fail(err, KVS_INVALID, "a block of %" PRIu64 " bytes in %" PRIu64 " parts: 1 to %d parts of equal size",
                    asked->block_nbytes, parts, MOST_PARTS);
  if (stride < nbytes)
    return kvs_fail(err, KVS_INVALID, "stride is %" PRIu64 ", less than a block's %" PRIu64 " bytes", stride, nbytes);
  if (asked->num_blocks > UINT32_MAX || __builtin_mul_overflow(asked->num_blocks, stride, &rows))
    return kvs_fail(err, KVS_INVALID, "%" PRIu64 " blocks of %" PRIu64 " bytes: at most 2**32 - 1 blocks",
                    asked->num_blocks, asked->block_nbytes);
  if (parts > 1 && (asked->part_stride < rows || __builtin_mul_overflow(parts, asked->part_stride, &rest)))
    return kvs_fail(err, KVS_INVALID, "part_stride is %" PRIu64 "; the blocks of a part take %" PRIu64 " bytes",
                    asked->part_stride, rows);
  return KVS_OK;
}

static int check(const struct kvs_share_options *asked, struct kvs_error *err) {
  if (!asked->npools || !asked->block_nbytes || !asked->num_blocks)
    return kvs_fail(err, KVS_INVALID, "%zu pairs of pools, %" PRIu64 " blocks of %" PRIu64 " bytes: none may be 0",
                    asked->npools, asked->num_blocks, asked->block_nbytes);
  if (asked->slots < 2 || asked->slots > KVS_SHARE_SLOTS)
    return kvs_fail(err, KVS_INVALID, "slots is %u; a member has 2 to %d slots for each other one", asked->slots,
                    KVS_SHARE_SLOTS);
  if (asked->piece_nbytes > MOST_SLOT_NBYTES || asked->block_nbytes > MOST_SLOT_NBYTES)
    return kvs_fail(err, KVS_INVALID,
                    "pieces of %" PRIu64 " bytes, of blocks of %" PRIu64 ": neither may exceed 64 MiB",
                    asked->piece_nbytes, asked->block_nbytes);
  if (!(asked->share >= LEAST_SHARE && asked->share <= MOST_SHARE))
    return kvs_fail(err, KVS_INVALID, "share is %g; it is 0.1 to 10", asked->share);
  return check_parts(asked, err);
}

static int find_cuts_of(struct kvs_share *share, unsigned part, struct kvs_error *err) {
  const uint64_t base = share->host_base + part * share->part_stride;
  uint64_t at = base, end = at + (share->num_blocks - 1) * share->stride + share->part_nbytes;
  uint8_t *cut = share->cut + part * share->num_blocks;
  while (at < end) {
    struct kvs_region region;
    int status = kvs_dev_pointer_query(share->engine->device, at, &region, err);
    if (status) return status;
    uint64_t stop = region.base + region.nbytes;
    if (region.memory != KVS_MEMORY_PINNED || stop <= at)
      return kvs_fail(err, KVS_INVALID, "the shared pool is not registered with %s: members cannot bring its blocks",
                      share->engine->name);
    if (stop >= end) break;
    uint64_t block = (stop - base) / share->stride, within = (stop - base) % share->stride;
    if (within && within < share->part_nbytes)
      return kvs_fail(err, KVS_UNSUPPORTED, "a registration ends within a block, at 0x%" PRIx64, stop);
    cut[within ? block : block - 1] = 1;
    at = within ? base + (block + 1) * share->stride : stop;
  }
  return KVS_OK;
}

/* Where registrations end: no copy may cross one. */
static int find_cuts(struct kvs_share *share, struct kvs_error *err) {
  int status = KVS_OK;
  share->cut = calloc((size_t)share->num_blocks, share->parts);
  if (!share->cut) return kvs_fail(err, KVS_NOMEM, "no memory for %" PRIu64 " blocks", share->num_blocks);
  for (unsigned part = 0; !status && part < share->parts; part++) status = find_cuts_of(share, part, err);
  return status;
}

static int keep_pools(struct kvs_share *share, struct kvs_error *err) {
  size_t nbytes = share->asked.npools * sizeof *share->host_pools;
  bool blocks = share->asked.gpu_pools != NULL;
  share->host_pools = malloc(nbytes);
  share->gpu_pools = blocks ? malloc(nbytes) : NULL;
  if (!share->host_pools || (blocks && !share->gpu_pools))
    return kvs_fail(err, KVS_NOMEM, "no memory for %zu pools", share->asked.npools);
  memcpy(share->host_pools, share->asked.host_pools, nbytes);
  if (blocks) memcpy(share->gpu_pools, share->asked.gpu_pools, nbytes);
  share->npools = share->asked.npools;
  for (size_t i = 0; i < share->npools; i++) kvs_pool_ref(share->host_pools[i]);
  for (size_t i = 0; blocks && i < share->npools; i++) kvs_pool_ref(share->gpu_pools[i]);
  return KVS_OK;
}

static int open_streams(struct kvs_share *share, struct kvs_error *err) {
  int status = KVS_OK;
  for (int i = 0; !status && share->gpu_pools && i < 2 * KVS_SHARE_STREAMS; i++)
    status = kvs_dev_stream_create(share->engine->device, 0, &share->streams[i / 2][i % 2], err);
  return status;
}

static int open_copies(struct kvs_share *share, struct kvs_error *err) {
  struct kvs_copies *copies = &share->copies;
  copies->capacity = (size_t)share->piece_blocks * share->parts;
  copies->dst = calloc(copies->capacity, sizeof *copies->dst);
  copies->src = calloc(copies->capacity, sizeof *copies->src);
  copies->nbytes = calloc(copies->capacity, sizeof *copies->nbytes);
  copies->block = calloc(copies->capacity, sizeof *copies->block);
  if (copies->dst && copies->src && copies->nbytes && copies->block) return KVS_OK;
  return kvs_fail(err, KVS_NOMEM, "no memory for a piece of %zu blocks", copies->capacity);
}

static void share_free(struct kvs_share *share) {
  struct kvs_error ignored;
  for (int i = 0; i < 2 * KVS_SHARE_STREAMS; i++)
    if (share->streams[i / 2][i % 2])
      (void)kvs_dev_stream_destroy(share->engine->device, share->streams[i / 2][i % 2], &ignored);
  kvs_bring_close(share);
  for (size_t i = 0; i < share->npools; i++) kvs_pool_unref(share->host_pools[i]);
  for (size_t i = 0; share->gpu_pools && i < share->npools; i++) kvs_pool_unref(share->gpu_pools[i]);
  free(share->host_pools);
  free(share->gpu_pools);
  free(share->cut);
  free(share->copies.dst);
  free(share->copies.src);
  free(share->copies.nbytes);
  free(share->copies.block);
  if (share->wake >= 0) close(share->wake);
  pthread_cond_destroy(&share->changed);
  pthread_mutex_destroy(&share->lock);
  pthread_mutex_destroy(&share->meeting);
  kvs_engine_unref(share->engine);
  free(share);
}

static void *serve(void *arg);

static int share_start(struct kvs_share *share, struct kvs_error *err) {
  share->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (share->wake < 0) return kvs_fail(err, KVS_UNSUPPORTED, "cannot make an eventfd: %s", strerror(errno));
  if (kvs_thread_start(&share->thread, "kvswap-share", serve, share))
    return kvs_fail(err, KVS_NOMEM, "cannot start a thread for a member");
  share->threaded = true;
  return KVS_OK;
}

int kvs_share_new(const struct kvs_share_options *asked, struct kvs_share **made, struct kvs_error *err) {
  int status = check(asked, err);
  if (status) return status;
  struct kvs_engine *engine = kvs_pool_engine(asked->gpu_pools ? asked->gpu_pools[0] : asked->host_pools[0]);
  status = kvs_open_for_work(engine, err);
  struct kvs_share *share = status ? NULL : calloc(1, sizeof *share);
  if (!share) return status ? status : kvs_fail(err, KVS_NOMEM, "no memory for a member");
  kvs_engine_ref(engine);
  atomic_init(&share->refs, 1);
  share->pid = getpid();
  share->engine = engine;
  share->asked = *asked;
  share->wake = -1;
  share->host_base = asked->host;
  share->block_nbytes = asked->block_nbytes;
  share->num_blocks = asked->num_blocks;
  share->parts = asked->parts ? asked->parts : 1;
  share->part_nbytes = asked->block_nbytes / share->parts;
  share->part_stride = asked->part_stride;
  share->stride = asked->stride ? asked->stride : share->part_nbytes;
  share->nslots = asked->gpu_pools ? asked->slots : 0;
  uint64_t blocks = (asked->piece_nbytes + asked->block_nbytes / 2) / asked->block_nbytes;
  share->piece_blocks = (uint32_t)(blocks < 1 ? 1 : blocks > KVS_SHARE_BLOCKS ? KVS_SHARE_BLOCKS : blocks);
  share->slot_nbytes = share->piece_blocks * share->block_nbytes;
  pthread_mutex_init(&share->lock, NULL);
  pthread_mutex_init(&share->meeting, NULL);
  (void)kvs_cond_init(&share->changed);
  status = keep_pools(share, err);
  if (!status) status = kvs_share_pools_check(share, err);
  if (!status) status = find_cuts(share, err);
  if (!status) status = open_copies(share, err);
  if (!status) status = open_streams(share, err);
  if (!status) status = kvs_bring_open(share, err);
  if (status)
    share_free(share);
  else
    *made = share;
  return status;
}

int kvs_share_open(const struct kvs_share_options *asked, struct kvs_share **made, struct kvs_error *err) {
  struct kvs_share *share = NULL;
  int status = kvs_share_new(asked, &share, err);
  if (!status && share->engine->device->stepped)
    status = kvs_fail(err, KVS_UNSUPPORTED, "%s is deterministic: it runs only inside calls", share->engine->name);
  if (!status) status = share_start(share, err);
  if (!status)
    *made = share;
  else if (share)
    share_free(share);
  return status;
}

struct kvs_engine *kvs_share_engine(const struct kvs_share *share) { return share->engine; }

void kvs_share_get_form(const struct kvs_share *share, struct kvs_share_form *form) {
  *form = (struct kvs_share_form){share->block_nbytes, share->num_blocks, share->slot_nbytes, share->piece_blocks,
                                  share->nslots};
}

static void wake(const struct kvs_share *share) {
  const uint64_t one = 1;
  if (write(share->wake, &one, sizeof one) < 0) return; /* the counter is full: the thread wakes anyway */
}

/* -- links --------------------------------------------------------------------------------------------------------- */

/* New memory, or that of another member's descriptor. One chunk: one descriptor. */
static int map_slots(struct kvs_share *share, unsigned slots, int fd, uint64_t *ptr, struct kvs_error *err) {
  struct kvs_range *range;
  uint64_t granule, nbytes = slots * share->slot_nbytes;
  int status = kvs_dev_chunk_granularity(share->engine->device, &granule, err);
  if (status) return status;
  nbytes = (nbytes + granule - 1) / granule * granule;
  status = kvs_range_new(share->engine, nbytes, &range, err);
  if (status) return status;
  status = kvs_range_add(range, nbytes, fd, err);
  if (!status) status = kvs_range_finish(range, ptr, err);
  if (status) kvs_range_drop(range);
  return status;
}

static int make_slots(struct kvs_share *share, struct kvs_share_link *link, int *fd, struct kvs_error *err) {
  struct kvs_engine *engine = share->engine;
  struct kvs_error ignored;
  uint64_t ptr;
  if (!share->nslots) return KVS_OK;
  int status = map_slots(share, share->nslots, -1, &ptr, err);
  if (status) return status;
  status = kvs_memory_add(engine, ptr, share->nslots * share->slot_nbytes, KVS_ORIGIN_ALLOCATED, err);
  if (status)
    (void)kvs_range_free(engine, ptr, &ignored);
  else
    link->near = ptr;
  return status ? status : kvs_dev_chunk_share(engine->device, ptr, fd, err);
}

static int open_slot_pools(struct kvs_share *share, struct kvs_share_link *link, struct kvs_error *err) {
  link->requests = calloc(KVS_SHARE_SLOTS, sizeof *link->requests);
  if (!link->requests) return kvs_fail(err, KVS_NOMEM, "no memory for a link");
  if (!share->nslots) return KVS_OK;
  return kvs_share_pools_open(share, link->near, (uint64_t)share->nslots * share->piece_blocks, &link->pools, err);
}

/* What a link had, once nothing uses it. Without the lock: the driver takes its time. */
static void give_back(struct kvs_share *share, const struct kvs_share_link *link) {
  struct kvs_error ignored;
  kvs_share_pools_close(share, link->pools);
  free(link->requests);
  if (link->near) kvs_engine_free_later(share->engine, link->near);
  if (link->far) (void)kvs_range_free(share->engine, link->far, &ignored);
  if (link->socket >= 0) close(link->socket);
  if (link->process >= 0) close(link->process);
}

/* For give_back(). */
static void take_out_locked(struct kvs_share_link *link, struct kvs_share_link *out) {
  *out = *link;
  memset(link, 0, sizeof *link);
}

static int check_rank(struct kvs_share *share, unsigned rank, struct kvs_error *err) {
  if (share->pid != getpid()) return kvs_fail(err, KVS_FORKED, "the member is the parent's: join anew in this process");
  if (rank < KVS_SHARE_RANKS) return KVS_OK;
  return kvs_fail(err, KVS_RANGE, "rank is %u; a group has ranks 0 to %d", rank, KVS_SHARE_RANKS - 1);
}

static int check_unused_locked(const struct kvs_share *share, unsigned rank, struct kvs_error *err) {
  if (share->stop) return kvs_fail(err, KVS_CLOSED, "the member is closed");
  if (share->links[rank].state == KVS_LINK_UNUSED) return KVS_OK;
  return kvs_fail(err, KVS_BUSY, "a member of rank %u is here, or its process has not ended yet", rank);
}

/* The memory is made without the lock, which loads and stores take. */
int kvs_share_meet(struct kvs_share *share, unsigned rank, int *fd, struct kvs_error *err) {
  int status = check_rank(share, rank, err);
  if (status) return status;
  struct kvs_share_link made = {.state = KVS_LINK_MADE, .rank = rank, .socket = -1, .process = -1};
  *fd = -1;
  pthread_mutex_lock(&share->meeting);
  pthread_mutex_lock(&share->lock);
  status = check_unused_locked(share, rank, err);
  pthread_mutex_unlock(&share->lock);
  if (!status) status = make_slots(share, &made, fd, err);
  if (!status) status = open_slot_pools(share, &made, err);
  if (status) {
    give_back(share, &made);
    if (*fd >= 0) close(*fd);
  } else {
    pthread_mutex_lock(&share->lock);
    share->links[rank] = made;
    pthread_mutex_unlock(&share->lock);
  }
  pthread_mutex_unlock(&share->meeting);
  return status;
}

static int check_met_locked(const struct kvs_share *share, unsigned rank, struct kvs_error *err) {
  if (!share->stop && share->links[rank].state == KVS_LINK_MADE) return KVS_OK;
  return kvs_fail(err, KVS_CLOSED, "the member is closed, or rank %u was not met", rank);
}

/* Under `meeting`. */
static int link_up(struct kvs_share *share, unsigned rank, const struct kvs_share_link *given, int slots_fd,
                   struct kvs_error *err) {
  struct kvs_share_link *link = &share->links[rank];
  struct kvs_error ignored;
  uint64_t far = 0;
  pthread_mutex_lock(&share->lock);
  int status = check_met_locked(share, rank, err);
  pthread_mutex_unlock(&share->lock);
  bool brings = given->far_slots && !share->asked.takes_only;
  if (!status && brings) status = map_slots(share, given->far_slots, slots_fd, &far, err);
  if (status) return status;
  pthread_mutex_lock(&share->lock);
  status = check_met_locked(share, rank, err);
  if (!status) {
    link->far = far;
    link->far_slots = given->far_slots;
    link->socket = given->socket;
    link->process = given->process;
    link->lends = given->lends;
    link->state = KVS_LINK_LIVE;
    pthread_cond_broadcast(&share->changed);
  }
  pthread_mutex_unlock(&share->lock);
  if (status && far) (void)kvs_range_free(share->engine, far, &ignored);
  wake(share);
  return status;
}

int kvs_share_link(struct kvs_share *share, unsigned rank, int socket, int process, int slots_fd, unsigned far_slots,
                   bool lends, struct kvs_error *err) {
  const struct kvs_share_link given = {.socket = socket, .process = process, .far_slots = far_slots, .lends = lends};
  int status = check_rank(share, rank, err);
  if (!status && far_slots > KVS_SHARE_SLOTS)
    status = kvs_fail(err, KVS_INVALID, "rank %u has %u slots; 0 to %d are known", rank, far_slots, KVS_SHARE_SLOTS);
  if (!status) {
    pthread_mutex_lock(&share->meeting);
    status = link_up(share, rank, &given, slots_fd, err);
    pthread_mutex_unlock(&share->meeting);
  }
  if (status) close(socket);
  if (status && process >= 0) close(process);
  return status;
}

void kvs_share_unmeet(struct kvs_share *share, unsigned rank) {
  struct kvs_share_link unmet = {.state = KVS_LINK_UNUSED};
  struct kvs_error ignored;
  if (check_rank(share, rank, &ignored)) return;
  pthread_mutex_lock(&share->meeting);
  pthread_mutex_lock(&share->lock);
  if (share->links[rank].state == KVS_LINK_MADE) take_out_locked(&share->links[rank], &unmet);
  pthread_mutex_unlock(&share->lock);
  if (unmet.state != KVS_LINK_UNUSED) give_back(share, &unmet);
  pthread_mutex_unlock(&share->meeting);
}

static uint32_t linked_locked(const struct kvs_share *share) {
  uint32_t ranks = 0;
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++)
    if (share->links[i].state == KVS_LINK_LIVE) ranks |= UINT32_C(1) << i;
  return ranks;
}

uint32_t kvs_share_linked(struct kvs_share *share) {
  if (share->pid != getpid()) return 0;
  pthread_mutex_lock(&share->lock);
  uint32_t ranks = linked_locked(share);
  pthread_mutex_unlock(&share->lock);
  return ranks;
}

int kvs_share_wait_linked(struct kvs_share *share, uint32_t ranks, int64_t timeout_ns, struct kvs_error *err) {
  uint64_t until = kvs_deadline(timeout_ns);
  int status = check_rank(share, 0, err);
  if (status) return status;
  pthread_mutex_lock(&share->lock);
  while ((linked_locked(share) & ranks) != ranks && !status)
    if (share->stop)
      status = kvs_fail(err, KVS_CLOSED, "the member is closed");
    else if (!kvs_cond_wait(&share->changed, &share->lock, until))
      status = kvs_fail(err, KVS_TIMEOUT, "members %#x of %#x are here after %.1f s", linked_locked(share) & ranks,
                        ranks, (double)timeout_ns / 1e9);
  pthread_mutex_unlock(&share->lock);
  return status;
}

/* -- the thread ---------------------------------------------------------------------------------------------------- */

static void lose(struct kvs_share *share, struct kvs_share_link *link) {
  link->state = KVS_LINK_GONE;
  link->waiting = 0;
  share->stats.links_lost += !link->left && !share->stop;
  kvs_receive_lose(share, link);
  if (link->left) kvs_receive_forget(share, link);
  pthread_cond_broadcast(&share->changed);
}

static bool take_message(struct kvs_share *share, struct kvs_share_link *link,
                         const struct kvs_share_message *message) {
  switch (message->kind) {
  case KVS_SHARE_TAKE:
    return kvs_bring_take(share, link, message);
  case KVS_SHARE_DROP:
    return kvs_bring_drop(share, link, message);
  case KVS_SHARE_DONE:
    return kvs_receive_done(share, link, message);
  case KVS_SHARE_REPORT:
    kvs_receive_report(share, link, message);
    return true;
  case KVS_SHARE_BUSY:
    return kvs_limit_hear(link, message);
  case KVS_SHARE_BYE:
    link->left = true;
    return false;
  default:
    return false;
  }
}

/* What a member said before it ended counts. A round reads no more than honest members send. */
static bool read_link(struct kvs_share *share, struct kvs_share_link *link) {
  struct kvs_share_message *message = &share->incoming;
  int messages = 0;
  for (; messages < MOST_MESSAGES && link->state == KVS_LINK_LIVE; messages++) {
    enum kvs_share_got got = kvs_share_receive(link->socket, message);
    if (got == KVS_SHARE_NONE && !link->broken) break;
    link->unheard = 0;
    if (got != KVS_SHARE_GOT || !take_message(share, link, message)) lose(share, link);
  }
  return messages > 0;
}

/* A lost link between two processes that go on: each answers for what it has begun, and says BYE after that. */
static void part(struct kvs_share *share, struct kvs_share_link *link) {
  struct kvs_share_message *message = &share->incoming;
  enum kvs_share_got got = KVS_SHARE_GOT;
  for (int i = 0; i < MOST_MESSAGES && got == KVS_SHARE_GOT; i++) {
    got = kvs_share_receive(link->socket, message);
    if (got == KVS_SHARE_GOT && message->kind == KVS_SHARE_DONE) (void)kvs_receive_done(share, link, message);
    if (got == KVS_SHARE_GOT && message->kind == KVS_SHARE_BYE) link->left = true;
  }
  if (!link->said && !kvs_bring_works(share, link)) {
    share->message = (struct kvs_share_message){.kind = KVS_SHARE_BYE};
    link->said = kvs_share_send(link->socket, &share->message) || errno != EAGAIN;
  }
  if (got != KVS_SHARE_ENDED) return;
  close(link->socket);
  link->socket = -1;
}

static bool has_ended(int process) {
  struct pollfd polled = {.fd = process, .events = POLLIN};
  return process >= 0 && poll(&polled, 1, 0) == 1;
}

/* A member that went without a word may have queued copies: its slots are free when its process has ended. */
static bool bury(struct kvs_share *share, struct kvs_share_link *link) {
  if (link->state != KVS_LINK_GONE || share->buried.state != KVS_LINK_UNUSED) return false;
  if (link->socket >= 0) part(share, link);
  if (!link->ended) link->ended = has_ended(link->process);
  if (link->left || link->ended) kvs_receive_forget(share, link);
  if (kvs_receive_uses(share, link) || kvs_bring_works(share, link)) return false;
  if (link->socket >= 0 && !link->said && !link->ended) return false;
  take_out_locked(link, &share->buried);
  return true;
}

static bool round_locked(struct kvs_share *share) {
  bool changed = false;
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++)
    if (share->links[i].state == KVS_LINK_LIVE) changed |= read_link(share, &share->links[i]);
  changed |= kvs_bring_step(share);
  changed |= kvs_receive_step(share);
  kvs_limit_tell(share);
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++) changed |= bury(share, &share->links[i]);
  return changed;
}

/* All that may still happen has happened: no piece, no job. */
static bool is_over(const struct kvs_share *share) {
  return share->stop && !share->jobs && !kvs_bring_works(share, NULL);
}

static void say_bye(struct kvs_share *share) {
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++) {
    struct kvs_share_link *link = &share->links[i];
    if (link->state != KVS_LINK_LIVE) continue;
    share->message = (struct kvs_share_message){.kind = KVS_SHARE_BYE};
    (void)kvs_share_send(link->socket, &share->message);
    lose(share, link);
    close(link->socket);
    link->socket = -1;
  }
}

bool kvs_share_awaits_end(const struct kvs_share *share, unsigned rank) {
  const struct kvs_share_link *link = &share->links[rank];
  return link->state == KVS_LINK_LIVE || (link->state == KVS_LINK_GONE && !link->left && !link->ended);
}

/* What is polled: the wake-up, the sockets, and the processes, until a round has seen their end: a process may end
 * between the last round and this. A forked child of a process that ended may still hold the socket. BYE waits for room
 * in a socket. */
static void list_polled(struct kvs_share *share, struct pollfd *polled) {
  polled[0] = (struct pollfd){.fd = share->wake, .events = POLLIN};
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++) {
    const struct kvs_share_link *link = &share->links[i];
    bool live = link->state == KVS_LINK_LIVE, gone = link->state == KVS_LINK_GONE;
    bool bye = gone && !link->said && !kvs_bring_works(share, link);
    polled[1 + 2 * i] =
        (struct pollfd){.fd = live || gone ? link->socket : -1, .events = bye ? POLLIN | POLLOUT : POLLIN};
    polled[2 + 2 * i] = (struct pollfd){.fd = kvs_share_awaits_end(share, i) ? link->process : -1, .events = POLLIN};
  }
}

static void note_ended(struct kvs_share *share, const struct pollfd *polled) {
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++)
    if (polled[2 + 2 * i].revents && share->links[i].state == KVS_LINK_LIVE)
      share->links[i].broken |= has_ended(share->links[i].process);
}

/* Wait for messages, for the end of a process, and for events, which are polled. */
static void rest(struct kvs_share *share, const struct kvs_share_round *made) {
  enum { POLLED = 2 * KVS_SHARE_RANKS + 1 };
  struct pollfd polled[POLLED];
  uint64_t now = kvs_clock_ns(), ns = made->until_ns > now ? made->until_ns - now : 0, word;
  const uint64_t poll_ns = made->waits ? WAIT_POLL_NS : POLL_NS;
  pthread_mutex_lock(&share->lock);
  list_polled(share, polled);
  pthread_mutex_unlock(&share->lock);
  if (made->works && ns > poll_ns) ns = poll_ns;
  struct timespec limit = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  (void)ppoll(polled, POLLED, made->until_ns == UINT64_MAX && !made->works ? NULL : &limit, NULL);
  pthread_mutex_lock(&share->lock);
  note_ended(share, polled);
  pthread_mutex_unlock(&share->lock);
  if (polled[0].revents && read(share->wake, &word, sizeof word) < 0) return; /* another round empties it */
}

struct kvs_share_round kvs_share_round(struct kvs_share *share) {
  struct kvs_share_round made = {0};
  pthread_mutex_lock(&share->lock);
  made.changed = round_locked(share);
  bool brings = kvs_bring_works(share, NULL) || kvs_bring_waits(share);
  made.works = brings || kvs_receive_works(share);
  made.waits = !brings && kvs_receive_waits(share);
  made.until_ns = kvs_receive_next_ns(share);
  made.over = is_over(share);
  if (made.over) {
    say_bye(share);
    share->stopped = true;
    pthread_cond_broadcast(&share->changed);
  }
  pthread_mutex_unlock(&share->lock);
  if (share->buried.state != KVS_LINK_UNUSED) give_back(share, &share->buried);
  share->buried.state = KVS_LINK_UNUSED;
  return made;
}

static void *serve(void *arg) {
  struct kvs_share *share = arg;
  struct kvs_share_round made = {0};
  (void)prctl(PR_SET_TIMERSLACK, 1ul);
  while (!made.over) {
    made = kvs_share_round(share);
    if (!made.over && !made.changed) rest(share, &made);
  }
  return NULL;
}

/* -- closing ------------------------------------------------------------------------------------------------------- */

int kvs_share_close(struct kvs_share *share, int64_t timeout_ns, struct kvs_error *err) {
  uint64_t until = kvs_deadline(timeout_ns);
  int status = KVS_OK;
  if (share->pid != getpid()) return KVS_OK;
  pthread_mutex_lock(&share->lock);
  share->stop = true;
  wake(share);
  while (!share->stopped && !status)
    if (!kvs_cond_wait(&share->changed, &share->lock, until))
      status = kvs_fail(err, KVS_TIMEOUT, "pieces were still under way after %.1f s", (double)timeout_ns / 1e9);
  bool join = !status && share->threaded;
  if (join) share->threaded = false;
  pthread_mutex_unlock(&share->lock);
  if (join) (void)pthread_join(share->thread, NULL);
  return status;
}

int kvs_share_finish(struct kvs_share *share, struct kvs_error *err) {
  if (share->pid != getpid()) return KVS_OK;
  pthread_mutex_lock(&share->lock);
  bool asked = share->stop;
  pthread_mutex_unlock(&share->lock);
  return kvs_share_close(share, asked ? AGAIN_NS : PATIENCE_NS, err);
}

void kvs_share_ref(struct kvs_share *share) { atomic_fetch_add(&share->refs, 1); }

/* In a forked child the memory stays: its locks may be held for ever. It also stays where pieces are still under way
 * at the end. */
void kvs_share_unref(struct kvs_share *share) {
  struct kvs_error ignored;
  if (atomic_fetch_sub(&share->refs, 1) != 1 || share->pid != getpid()) return;
  if (share->threaded && kvs_share_finish(share, &ignored)) return;
  for (unsigned i = 0; i < KVS_SHARE_RANKS; i++)
    if (share->links[i].state != KVS_LINK_UNUSED) give_back(share, &share->links[i]);
  share_free(share);
}

/* -- jobs ---------------------------------------------------------------------------------------------------------- */

static int check_name(const struct kvs_share_name *named, struct kvs_error *err) {
  if (named->key && named->rank < KVS_SHARE_RANKS && named->ranks >> named->rank & 1 &&
      named->ranks >> KVS_SHARE_RANKS == 0)
    return KVS_OK;
  return kvs_fail(err, KVS_INVALID, "ranks are %#x: they are 0 to %d, with the own one, %u", named->ranks,
                  KVS_SHARE_RANKS - 1, named->rank);
}

int kvs_share_submit(struct kvs_share *share, enum kvs_direction direction, const struct kvs_ids *host,
                     const struct kvs_ids *gpu, const struct kvs_share_name *named, const uint64_t *after,
                     struct kvs_share_job **made, struct kvs_error *err) {
  int status = check_rank(share, 0, err);
  if (!status && named) status = check_name(named, err);
  if (status) return status;
  if (!share->gpu_pools)
    return kvs_fail(err, KVS_UNSUPPORTED, "the member only lends its link: it has no blocks to load or store");
  if (direction != KVS_D2H && direction != KVS_H2D)
    return kvs_fail(err, KVS_INVALID, "direction is %d: a job is D2H or H2D", (int)direction);
  if (host->count != gpu->count)
    return kvs_fail(err, KVS_INVALID, "host_ids has %zu ids and gpu_ids %zu: one each for a block", host->count,
                    gpu->count);
  pthread_mutex_lock(&share->lock);
  status = share->stop ? kvs_fail(err, KVS_CLOSED, "the member is closed")
                       : kvs_receive_begin(share, direction, host, gpu, named, after, made, err);
  pthread_mutex_unlock(&share->lock);
  if (status) return status;
  (*made)->share = share;
  kvs_share_ref(share);
  wake(share);
  return KVS_OK;
}

void kvs_share_job_unref(struct kvs_share_job *job) {
  struct kvs_share *share = job->share;
  if (atomic_fetch_sub(&job->refs, 1) == 1) kvs_receive_free(job);
  kvs_share_unref(share);
}

bool kvs_share_job_done(struct kvs_share_job *job) {
  if (job->share->pid != getpid()) return true;
  pthread_mutex_lock(&job->share->lock);
  bool done = job->state != KVS_STATE_RUNNING;
  pthread_mutex_unlock(&job->share->lock);
  return done;
}

int kvs_share_job_error(struct kvs_share_job *job, struct kvs_error *err) {
  int status = check_rank(job->share, 0, err);
  if (status) return status;
  pthread_mutex_lock(&job->share->lock);
  if (job->state != KVS_STATE_RUNNING && job->error.status) *err = job->error;
  status = job->state == KVS_STATE_RUNNING ? KVS_OK : job->error.status;
  pthread_mutex_unlock(&job->share->lock);
  return status;
}

int kvs_share_job_wait(struct kvs_share_job *job, int64_t timeout_ns, struct kvs_error *err) {
  struct kvs_share *share = job->share;
  uint64_t until = kvs_deadline(timeout_ns);
  int status = check_rank(share, 0, err);
  if (status) return status;
  pthread_mutex_lock(&share->lock);
  while (job->state == KVS_STATE_RUNNING && !status)
    if (!kvs_cond_wait(&share->changed, &share->lock, until))
      status = kvs_fail(err, KVS_TIMEOUT, "the job had not ended after %.3f s", (double)timeout_ns / 1e9);
  pthread_mutex_unlock(&share->lock);
  return status ? status : kvs_share_job_error(job, err);
}

size_t kvs_share_job_failed(struct kvs_share_job *job, uint32_t *positions, size_t capacity) {
  size_t count = 0;
  if (job->share->pid != getpid()) return 0;
  pthread_mutex_lock(&job->share->lock);
  for (size_t i = 0; job->state != KVS_STATE_RUNNING && i < job->count; i++) {
    if (!job->failed[i]) continue;
    if (count < capacity) positions[count] = (uint32_t)i;
    count++;
  }
  pthread_mutex_unlock(&job->share->lock);
  return count;
}

void kvs_share_job_get_info(struct kvs_share_job *job, struct kvs_share_job_info *info) {
  struct kvs_share *share = job->share;
  bool here = share->pid == getpid();
  if (here) pthread_mutex_lock(&share->lock);
  *info = (struct kvs_share_job_info){.state = job->state,
                                      .direction = job->direction,
                                      .nbytes = job->count * share->kv_nbytes,
                                      .num_blocks = job->count,
                                      .elapsed_ns = job->ended_ns ? job->ended_ns - job->since_ns : 0,
                                      .by_others = job->given};
  if (here) pthread_mutex_unlock(&share->lock);
}

void kvs_share_get_stats(struct kvs_share *share, struct kvs_share_stats *stats) {
  bool here = share->pid == getpid();
  if (here) pthread_mutex_lock(&share->lock);
  *stats = share->stats;
  if (here) pthread_mutex_unlock(&share->lock);
}
