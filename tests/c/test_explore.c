/* The protocol between members (share/state.h), explored. Each member has a deterministic device, all run on this
 * thread, and this program makes each step: a round of a member, one copy or kernel of a device, a message that comes
 * late, time that passes, a kill, a lost link, a member that leaves. Small cases: every order of the steps, but for
 * states that were seen before. Larger ones: orders by seeds.
 *
 *     test_explore [CASE [MOST RUNS]]   one case, or all; a run is one order, from the beginning to the end
 *     test_explore random SEED CASES    ten runs of each of so many random cases
 *
 * Checked after each step: no copy of another process touches a slot that its owner may use; a store that has ended is
 * not written any more. At the end: every job has ended, every block is right or reported, all slots are free, no piece
 * is under way, and nobody waits for what cannot come. Of coded blocks, those that do not fit are reported, and no
 * others because of them. A failure prints its steps.
 *
 * The sockets are simulated (kvs_share_send and kvs_share_receive are here, not in share/wire.c): messages keep their
 * order within a link, and what was sent before an end is there after it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "host/run.h"
#include "host/state.h"
#include "kvswap.h"
#include "kvswap_codec.h"
#include "share/bring.h"
#include "share/receive.h"
#include "share/share.h"

enum {
  MEMBERS = 3,
  BLOCKS = 16,
  NBYTES = 64,
  MEMORY = 4096,
  JOBS = 6,
  WIRE = 64,
  MOST_ACTIONS = 64,
  MOST_STEPS = 4000
};
static const uint64_t MS = 1000000, BEGIN_NS = 1000000000;

/* -- what is explored ---------------------------------------------------------------------------------------------- */

struct job {
  unsigned member;
  enum kvs_direction direction;
  uint64_t key;          /* 0: not shared; else by all members */
  unsigned first, count; /* host and GPU blocks, the latter in reverse order */
  bool later;            /* submitted after the member's job before it has ended */
};

struct scenario {
  const char *name;
  unsigned members, slots, blocks_a_piece;
  double share;
  bool roles;                                     /* member 0 only takes, and the others only bring */
  bool limited;                                   /* all links together reach only one and a half times one */
  bool coded;                                     /* the host's blocks are */
  uint32_t unfit;                                 /* coded: a bit for each block that does not fit its coded size */
  unsigned kills, losses, leaves, repeats, times; /* most of each in a run; times: that pass without need */
  unsigned njobs;
  struct job jobs[JOBS];
};

/* Of four or five pieces the own link begins with two. */
#define UNSHARED .members = 2, .slots = 2, .blocks_a_piece = 1, .share = 10, .njobs = 1
#define LOAD(pieces) UNSHARED, .jobs = {{0, KVS_H2D, 0, 0, pieces, false}}
#define STORE(pieces) UNSHARED, .jobs = {{0, KVS_D2H, 0, 0, pieces, false}}
#define ONE_CALLS(direction)                                                                                           \
  .members = 2, .slots = 2, .blocks_a_piece = 1, .share = 1, .njobs = 1, .jobs = {{0, direction, 1, 0, 3, false}}
#define SHARED(direction, pieces)                                                                                      \
  .members = 2, .slots = 2, .blocks_a_piece = 1, .share = 1, .njobs = 2,                                               \
  .jobs = {{0, direction, 1, 0, pieces, false}, {1, direction, 1, 0, pieces, false}}

#define LOAD_AND_STORE                                                                                                 \
  .members = 2, .slots = 2, .blocks_a_piece = 1, .share = 1, .njobs = 2,                                               \
  .jobs = {{0, KVS_H2D, 0, 0, 7, false}, {1, KVS_D2H, 0, 8, 7, false}}
#define OF_THREE(direction)                                                                                            \
  .members = 3, .slots = 2, .blocks_a_piece = 1, .share = 1, .njobs = 3,                                               \
  .jobs = {{0, direction, 1, 0, 3, false}, {1, direction, 1, 0, 3, false}, {2, direction, 1, 0, 3, false}}

static const struct scenario cases[] = {
    {"load", LOAD(5), .times = 1},
    {"load, kill", LOAD(4), .kills = 1},
    {"load, lost link", LOAD(4), .losses = 1},
    {"load, a member leaves", LOAD(4), .leaves = 1},
    {"load, old answer", LOAD(5), .repeats = 1},
    {"store", STORE(4), .times = 1},
    {"store, kill", STORE(4), .kills = 1, .times = 1},
    {"store, lost link", STORE(4), .losses = 1},
    {"store, a member leaves", STORE(4), .leaves = 1},
    {"shared load", SHARED(KVS_H2D, 3), .times = 1},
    {"shared load, kill", SHARED(KVS_H2D, 3), .kills = 1},
    {"shared load, a member leaves", SHARED(KVS_H2D, 3), .leaves = 1},
    {"shared store", SHARED(KVS_D2H, 3), .times = 1},
    {"shared store, kill", SHARED(KVS_D2H, 3), .kills = 1},
    {"shared store, lost link", SHARED(KVS_D2H, 3), .losses = 1},
    {"shared store, a member leaves", SHARED(KVS_D2H, 3), .leaves = 1},
    {"shared load that one does not call", ONE_CALLS(KVS_H2D), .times = 1},
    {"shared store that one does not call", ONE_CALLS(KVS_D2H), .times = 1},
    {"load by one that only takes, kill", LOAD(4), .roles = true, .kills = 1},
    {"store by one that only takes, kill", STORE(4), .roles = true, .kills = 1, .times = 1},
    {"load and store, the host is the limit", LOAD_AND_STORE, .limited = true},
    {"coded load", LOAD(5), .coded = true, .unfit = 1 << 4 | 1 << 0, .times = 1},
    {"coded store", STORE(4), .coded = true, .unfit = 1 << 3 | 1 << 0, .kills = 1},
    {"coded shared load", SHARED(KVS_H2D, 3), .coded = true, .unfit = 1 << 1, .times = 1},
    {"coded shared store", SHARED(KVS_D2H, 4), .coded = true, .unfit = 1 << 1, .times = 1},
    {"coded shared store, kill", SHARED(KVS_D2H, 3), .coded = true, .unfit = 1 << 1 | 1 << 2, .kills = 1},
    {"shared load of three, kill", OF_THREE(KVS_H2D), .kills = 1},
    {"shared store of three, kill", OF_THREE(KVS_D2H), .kills = 1},
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* -- the world ----------------------------------------------------------------------------------------------------- */

struct wire { /* to a member, from another */
  struct kvs_share_message *messages[WIRE];
  unsigned first, count;
  unsigned readable; /* in this round */
  bool closed;
  bool stored;                     /* a REPORT was sent that all of a part is stored, but for what does not fit */
  struct kvs_share_message answer; /* the last DONE that was read, without ids */
};

struct member {
  struct kvs_engine *engine;
  struct kvs_pool *host_pool, *coded_pool, *gpu_pool;
  unsigned char *gpu;
  struct kvs_share *share;
  int sockets[MEMBERS], watched[MEMBERS], process; /* by the other member; process: readable once it has ended */
  struct wire wires[MEMBERS];
  struct kvs_share_round last;
  bool dirty, woken;  /* something happened that a poll sees; what ends a sleep */
  bool sleeps;        /* after a round that changed nothing, and a look at what is to be polled: */
  uint32_t awaited;   /* members whose end wakes it */
  bool killed, ended; /* it makes no rounds any more; its device does nothing any more */
  bool leaves;
};

static const struct scenario *asked;
static struct member members[MEMBERS];
static unsigned char *host; /* the blocks of this case, of host_nbytes each */
static uint64_t host_nbytes;
static unsigned char *memory;
static struct kvs_coding *coding;
static uint64_t coded_nbytes;
static struct kvs_share_job *jobs[JOBS];
static bool submitted[JOBS], checked[JOBS];
static uint32_t met[JOBS]; /* the members that were linked, or had been, when the job was submitted */
static uint64_t now, base; /* base: added to keys, which are used in one run only */
static unsigned kills, losses, leaves, repeats, times;
static const char *wrong; /* what this run found */
static uint64_t wrong_at[2];

static void report(const char *what, uint64_t first, uint64_t second) {
  if (wrong) return;
  wrong = what;
  wrong_at[0] = first;
  wrong_at[1] = second;
}

static void must(int status, const struct kvs_error *err, const char *what) {
  if (!status) return;
  printf("%s: %s\n", what, err->message);
  exit(2);
}

static bool disturbed(void) { return kills || losses || leaves; }

static bool is_unfit(unsigned block) { return asked->coded && asked->unfit >> block & 1; }

/* -- the sockets --------------------------------------------------------------------------------------------------- */

static bool find_wire(int socket, unsigned *member, unsigned *other) {
  for (*member = 0; *member < asked->members; ++*member)
    for (*other = 0; *other < asked->members; ++*other)
      if (members[*member].sockets[*other] == socket) return true;
  return false;
}

static void put_message(unsigned member, unsigned other, const struct kvs_share_message *message) {
  struct wire *wire = &members[member].wires[other];
  size_t nbytes = offsetof(struct kvs_share_message, ids) + message->count * sizeof message->ids[0];
  if (wire->count == WIRE) report("a socket is full", other, member);
  if (wire->count == WIRE) return;
  struct kvs_share_message *put = malloc(nbytes);
  memcpy(put, message, nbytes);
  wire->messages[(wire->first + wire->count++) % WIRE] = put;
}

static void check_takes(unsigned owner, unsigned other, const struct kvs_share_message *message);

bool kvs_share_send(int socket, struct kvs_share_message *message) {
  unsigned from, to;
  if (socket < 0 || !find_wire(socket, &from, &to) || members[from].wires[to].closed) {
    errno = EPIPE;
    return false;
  }
  put_message(to, from, message);
  bool stored = message->kind == KVS_SHARE_REPORT && !message->status;
  for (uint32_t i = 0; stored && i < message->count; i++) stored = is_unfit(message->ids[i]); /* it begins at block 0 */
  members[to].wires[from].stored |= stored;
  check_takes(from, to, message);
  return true;
}

enum kvs_share_got kvs_share_receive(int socket, struct kvs_share_message *message) {
  unsigned to, from;
  if (!find_wire(socket, &to, &from)) return KVS_SHARE_ENDED;
  struct wire *wire = &members[to].wires[from];
  if (!wire->readable) return KVS_SHARE_NONE;
  if (!wire->count) return wire->closed ? KVS_SHARE_ENDED : KVS_SHARE_NONE;
  struct kvs_share_message *came = wire->messages[wire->first];
  memcpy(message, came, offsetof(struct kvs_share_message, ids) + came->count * sizeof came->ids[0]);
  if (came->kind == KVS_SHARE_DONE) memcpy(&wire->answer, message, offsetof(struct kvs_share_message, ids));
  free(came);
  wire->first = (wire->first + 1) % WIRE;
  wire->count--;
  wire->readable--;
  return KVS_SHARE_GOT;
}

/* The member's end was closed: by itself, or with its process. */
static void end_wire(unsigned member, unsigned other) {
  struct wire *in = &members[member].wires[other], *out = &members[other].wires[member];
  if (out->closed) return;
  out->closed = true;
  while (in->count) {
    free(in->messages[in->first]);
    in->first = (in->first + 1) % WIRE;
    in->count--;
  }
}

static void watch_sockets(unsigned member) {
  char byte;
  for (unsigned other = 0; other < asked->members; other++) {
    struct member *m = &members[member];
    if (m->watched[other] < 0 || recv(m->watched[other], &byte, 1, MSG_DONTWAIT) != 0) continue;
    close(m->watched[other]);
    m->watched[other] = m->sockets[other] = -1;
    end_wire(member, other);
  }
}

/* -- the devices --------------------------------------------------------------------------------------------------- */

static struct kvs_host_queue *queue_of(unsigned member) { return &host_of(members[member].engine->device)->queue; }

static bool is_work(const struct kvs_host_op *op) { return op->kind < KVS_HOST_DELAY; }

/* Events are reached and waits pass at once: that a round sees them late, is that the round comes early. So are tables
 * uploaded: a device does that once. */
static bool is_instant(unsigned member, const struct kvs_host_stream *stream) {
  return stream->head && (!is_work(stream->head) || stream->handle == members[member].engine->tables.upload);
}

static void run_instants(unsigned member) {
  struct kvs_host_queue *queue = queue_of(member);
  queue->clock += 1000 * MS; /* a paced kernel has ended */
  for (bool some = true; some;) {
    some = false;
    for (struct kvs_host_stream *at = queue->first, *next; at; at = next) {
      next = at->after;
      while (is_instant(member, at) && kvs_host_step_stream_locked(queue, at)) some = true;
      if (some) break; /* the list has changed */
    }
  }
}

/* The n-th stream that has work to do now; NULL: there are fewer. */
static struct kvs_host_stream *working(unsigned member, unsigned n) {
  for (struct kvs_host_stream *at = queue_of(member)->first; at; at = at->after)
    if (at->head && is_work(at->head) && n-- == 0) return at;
  return NULL;
}

static void step_device(unsigned member, unsigned n) {
  struct kvs_host_stream *stream = working(member, n);
  (void)kvs_host_step_stream_locked(queue_of(member), stream);
  run_instants(member);
  members[member].dirty = true;
}

static bool overlaps(uint64_t a, uint64_t a_nbytes, uint64_t b, uint64_t b_nbytes) {
  return a < b + b_nbytes && b < a + a_nbytes;
}

/* Whether the device still copies to or from that memory. */
static bool copies_touch(unsigned member, uint64_t ptr, uint64_t nbytes, bool write_only) {
  for (struct kvs_host_stream *at = queue_of(member)->first; at && !members[member].ended; at = at->after)
    for (const struct kvs_host_op *op = at->head; op; op = op->next)
      for (uint64_t i = op->unit; op->kind == KVS_HOST_COPY && i < op->units; i++) {
        const struct kvs_piece *piece = &op->pieces[i];
        if (overlaps(piece->dst, piece->nbytes, ptr, nbytes)) return true;
        if (!write_only && overlaps(piece->src, piece->nbytes, ptr, nbytes)) return true;
      }
  return false;
}

/* -- checks -------------------------------------------------------------------------------------------------------- */

static bool touched(unsigned owner, unsigned other, unsigned slot) {
  const struct kvs_share *far = members[other].share;
  uint64_t at = far->links[owner].far;
  return at && copies_touch(other, at + slot * far->slot_nbytes, far->slot_nbytes, false);
}

/* A slot is given away: its last writer's copies have ended. */
static void check_takes(unsigned owner, unsigned other, const struct kvs_share_message *message) {
  if (message->kind == KVS_SHARE_TAKE && touched(owner, other, message->slot))
    report("a slot is asked for while an earlier copy still uses it", owner, message->slot);
}

static void check_slots(void) {
  for (unsigned owner = 0; owner < asked->members; owner++)
    for (unsigned other = 0; other < asked->members && !members[owner].killed; other++) {
      const struct kvs_share_link *link = &members[owner].share->links[other];
      if (other == owner || link->state == KVS_LINK_UNUSED) continue;
      for (unsigned slot = 0; slot < asked->slots; slot++) {
        enum kvs_share_slot_state state = link->slots[slot].state;
        if (state != KVS_SLOT_ASKED && state != KVS_SLOT_LATE && touched(owner, other, slot))
          report("the owner uses a slot that another process still copies to or from", owner, slot);
      }
    }
}

/* Coded blocks are of bf16: with one exponent they fit, with all exponents they do not. */
static unsigned char byte_of(unsigned first, unsigned block, unsigned i) {
  if (asked->coded && i % 2 && !is_unfit(block)) return 0x3f;
  return (unsigned char)(first + 31 * block + 7 * i + (i >> 3));
}

static unsigned host_first(const struct job *job) { return job->direction == KVS_H2D ? 1 : 101; }

/* Whether a coded block can be read. */
static bool decode(const unsigned char *at, unsigned char *block) {
  const struct kvs_blocks to = {.ptr = block};
  uint8_t verdict;
  return kvs_decode_blocks(coding, at, coded_nbytes, &to, 1, &verdict) == 0;
}

static bool right(const unsigned char *at, const struct job *job, unsigned block) {
  for (unsigned i = 0; i < NBYTES; i++)
    if (at[i] != byte_of(host_first(job), block, i)) return false;
  return true;
}

static bool right_on_host(unsigned block, const struct job *job) {
  unsigned char decoded[NBYTES];
  const unsigned char *at = host + block * host_nbytes;
  return asked->coded ? decode(at, decoded) && right(decoded, job, block) : right(at, job, block);
}

static unsigned gpu_block(const struct job *job, unsigned i) { return job->first + job->count - 1 - i; }

/* A block that does not fit was failed by the job, and cannot be read on the host either. */
static void check_unfit(unsigned at, unsigned position, bool failed) {
  unsigned char ignored[NBYTES];
  if (!failed) report("a block that does not fit is not reported", at, position);
  if (decode(host + (asked->jobs[at].first + position) * host_nbytes, ignored))
    report("a block that does not fit can be read on the host", at, position);
}

/* The report of a member that was there counts, also if it has ended since. A lost link may lose it, and time may. */
static void check_failed(unsigned at, unsigned position) {
  const struct job *job = &asked->jobs[at];
  const struct member *m = &members[job->member];
  unsigned rank = position / asked->blocks_a_piece % asked->members;
  if (!job->key || losses || m->leaves || now >= BEGIN_NS + 1000 * MS || !(met[at] >> rank & 1)) return;
  if (m->wires[rank].stored) report("a block is reported failed whose member reported it stored", at, position);
}

static void check_job(unsigned at) {
  const struct job *job = &asked->jobs[at];
  struct member *m = &members[job->member];
  uint32_t failed[BLOCKS];
  size_t nfailed = kvs_share_job_failed(jobs[at], failed, BLOCKS);
  bool may_fail = m->leaves || (job->key && job->direction == KVS_D2H && (disturbed() || now > BEGIN_NS));
  for (unsigned i = 0, next = 0; i < job->count; i++) {
    unsigned block = job->first + i;
    bool in = job->direction == KVS_H2D, fails = next < nfailed && failed[next] == i;
    next += fails;
    for (unsigned other = 0; other < asked->members && !in && !job->key; other++)
      if (copies_touch(other, (uintptr_t)(host + block * host_nbytes), host_nbytes, true))
        report("a store has ended, and is still written", at, i);
    if (is_unfit(block)) {
      check_unfit(at, i, fails);
    } else if (fails) {
      if (!may_fail) report("blocks are reported failed that nothing disturbed", at, i);
      check_failed(at, i);
    } else if (!(in ? right(m->gpu + gpu_block(job, i) * NBYTES, job, block) : right_on_host(block, job))) {
      report("a block is wrong, and not reported", at, i);
    }
  }
}

static bool job_over(unsigned at) { return submitted[at] && jobs[at]->state != KVS_STATE_RUNNING; }

static void check_jobs(void) {
  for (unsigned at = 0; at < asked->njobs; at++)
    if (!checked[at] && job_over(at) && !members[asked->jobs[at].member].killed) {
      checked[at] = true;
      check_job(at);
    }
}

/* A member that has left waits for no late answer. */
static bool slot_is_given_back(const struct kvs_share *share, const struct kvs_share_slot *slot) {
  return slot->state == KVS_SLOT_FREE || (share->stopped && slot->state == KVS_SLOT_LATE);
}

/* Nothing goes on any more. */
static void check_end(void) {
  for (unsigned at = 0; at < asked->njobs; at++)
    if (!members[asked->jobs[at].member].killed) {
      if (submitted[at] && !job_over(at)) report("nothing goes on, and a job has not ended", at, 0);
      if (submitted[at] && job_over(at)) check_job(at);
    }
  for (unsigned owner = 0; owner < asked->members; owner++) {
    const struct kvs_share *share = members[owner].share;
    if (members[owner].killed) continue;
    if (kvs_bring_works(share, NULL)) report("nothing goes on, and a piece is under way", owner, 0);
    if (kvs_bring_waits(share)) report("nothing goes on, and a request waits", owner, 0);
    for (unsigned other = 0; other < asked->members; other++) {
      if (share->links[other].state == KVS_LINK_GONE && !share->stopped)
        report("nothing goes on, and a link has not ended", owner, other);
      for (unsigned slot = 0; slot < asked->slots; slot++)
        if (!slot_is_given_back(share, &share->links[other].slots[slot]))
          report("a slot is not free at the end", owner, slot);
    }
  }
}

/* -- opening and closing ------------------------------------------------------------------------------------------- */

static void open_coding(void) {
  const struct kvs_coding_layout layout = {.block_nbytes = NBYTES, .codec = "exact"};
  struct kvs_coding_info info;
  struct kvs_error err = {0};
  must(kvs_coding_open(&layout, &coding, &err), &err, "coding");
  kvs_coding_get_info(coding, &info);
  coded_nbytes = info.coded_nbytes;
  if (BLOCKS * (NBYTES + coded_nbytes) > MEMORY) exit(2);
}

static void open_device(unsigned rank) {
  struct member *m = &members[rank];
  struct kvs_error err = {0};
  uint64_t gpu = 0;
  must(kvs_engine_open_deterministic(1 + rank, &m->engine, &err), &err, "open");
  must(kvs_engine_register(m->engine, (uintptr_t)memory, MEMORY, &err), &err, "register");
  must(kvs_engine_alloc(m->engine, (size_t)BLOCKS * NBYTES, false, &gpu, &err), &err, "alloc");
  m->gpu = (unsigned char *)(uintptr_t)gpu;
  struct kvs_pool_layout layout = {.ptr = (uintptr_t)memory, .num_blocks = BLOCKS, .block_nbytes = NBYTES};
  must(kvs_pool_open(m->engine, &layout, &m->host_pool, &err), &err, "pool");
  layout.ptr = gpu;
  must(kvs_pool_open(m->engine, &layout, &m->gpu_pool, &err), &err, "pool");
  layout.ptr = (uintptr_t)memory + BLOCKS * NBYTES;
  layout.block_nbytes = coded_nbytes;
  layout.coding = coding;
  must(kvs_pool_open(m->engine, &layout, &m->coded_pool, &err), &err, "pool");
}

static void open_member(unsigned rank) {
  struct member *m = &members[rank];
  struct kvs_tuning *tuning = &m->engine->costs.tuning;
  struct kvs_error err = {0};
  tuning->host_links = asked->limited ? 2 : 0;
  for (int way = 0; way < 2; way++) tuning->link_gbps[way] = 50;
  for (int sum = 0; sum < 3; sum++) tuning->host_gbps[sum] = 75;
  *m = (struct member){.engine = m->engine,
                       .host_pool = m->host_pool,
                       .coded_pool = m->coded_pool,
                       .gpu_pool = m->gpu_pool,
                       .gpu = m->gpu};
  m->process = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  for (unsigned other = 0; other < MEMBERS; other++) m->sockets[other] = m->watched[other] = -1;
  const struct kvs_share_options options = {.host_pools = asked->coded ? &m->coded_pool : &m->host_pool,
                                            .gpu_pools = asked->roles && rank ? NULL : &m->gpu_pool,
                                            .takes_only = asked->roles && !rank,
                                            .npools = 1,
                                            .host = (uintptr_t)host,
                                            .block_nbytes = host_nbytes,
                                            .num_blocks = BLOCKS,
                                            .piece_nbytes = asked->blocks_a_piece * host_nbytes,
                                            .slots = asked->slots,
                                            .share = asked->share,
                                            .stall_ns = 20 * MS,
                                            .wait_ns = 2 * MS,
                                            .store_ns = 1000 * MS};
  must(kvs_share_new(&options, &m->share, &err), &err, "share");
  m->share->clock_ns = BEGIN_NS;
  must(kvs_dev_synchronize(m->engine->device, &err), &err, "synchronize");
  queue_of(rank)->manual = true;
}

static void link_members(unsigned a, unsigned b) {
  const unsigned ranks[2] = {a, b};
  struct kvs_error err = {0};
  int slots[2];
  for (int i = 0; i < 2; i++)
    must(kvs_share_meet(members[ranks[i]].share, ranks[1 - i], &slots[i], &err), &err, "meet");
  for (int i = 0; i < 2; i++) {
    struct member *m = &members[ranks[i]];
    unsigned other = ranks[1 - i];
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) exit(2);
    m->sockets[other] = pair[0];
    m->watched[other] = pair[1];
    must(kvs_share_link(m->share, other, pair[0], dup(members[other].process), slots[1 - i],
                        members[other].share->nslots, !members[other].share->asked.takes_only, &err),
         &err, "link");
  }
  for (int i = 0; i < 2; i++)
    if (slots[i] >= 0) close(slots[i]);
}

static void open_all(void) {
  host = memory + (asked->coded ? BLOCKS * NBYTES : 0);
  host_nbytes = asked->coded ? coded_nbytes : NBYTES;
  for (unsigned i = 0; i < asked->members; i++) open_member(i);
  for (unsigned i = 0; i < asked->members; i++)
    for (unsigned j = 0; j < i; j++) link_members(j, i);
}

static void unref_jobs(unsigned rank) {
  for (unsigned i = 0; i < asked->njobs; i++)
    if (submitted[i] && asked->jobs[i].member == rank) {
      kvs_share_job_unref(jobs[i]);
      submitted[i] = false;
    }
}

static void close_member(unsigned rank) {
  struct member *m = &members[rank];
  queue_of(rank)->manual = false; /* what a process that was killed had queued runs here, after all */
  m->share->stop = true;
  for (int i = 0; i < 1000 && !kvs_share_round(m->share).over; i++) m->share->clock_ns += 1000 * MS;
  unref_jobs(rank);
  kvs_share_unref(m->share);
  for (unsigned i = 0; i < asked->members; i++) {
    if (m->watched[i] >= 0) close(m->watched[i]);
    for (struct wire *wire = &m->wires[i]; wire->count; wire->count--) {
      free(wire->messages[wire->first]);
      wire->first = (wire->first + 1) % WIRE;
    }
  }
  close(m->process);
}

static void close_all(void) {
  for (unsigned i = 0; i < asked->members; i++) {
    for (unsigned other = 0; other < asked->members; other++) {
      members[i].wires[other].closed = true;
      members[i].wires[other].readable = WIRE;
    }
    if (eventfd_write(members[i].process, 1)) exit(2);
  }
  for (unsigned i = 0; i < asked->members; i++) close_member(i);
}

static void put_block(unsigned char *at, const struct job *job, unsigned block) {
  for (unsigned i = 0; i < NBYTES; i++) at[i] = byte_of(host_first(job), block, i);
}

static void put_on_host(const struct job *job, unsigned block) {
  unsigned char bytes[NBYTES], *at = host + block * host_nbytes;
  const struct kvs_blocks from = {.ptr = bytes};
  uint8_t verdict;
  put_block(asked->coded ? bytes : at, job, block);
  if (!asked->coded) return;
  size_t unfit = kvs_encode_blocks(coding, &from, UINT64_MAX, at, coded_nbytes, 1, &verdict);
  if (unfit != is_unfit(block)) report("a block fits, or does not, against what the case says", block, verdict);
}

static void begin_run(void) {
  now = BEGIN_NS;
  base += 16;
  kills = losses = leaves = repeats = times = 0;
  wrong = NULL;
  memset(host, 0xEE, (size_t)(BLOCKS * host_nbytes));
  for (unsigned i = 0; i < asked->members; i++) {
    struct member *m = &members[i];
    memset(m->gpu, 0xDD, (size_t)BLOCKS * NBYTES);
    m->dirty = m->woken = m->sleeps = false;
    m->last = (struct kvs_share_round){.until_ns = UINT64_MAX};
    m->share->clock_ns = now;
    for (unsigned other = 0; other < asked->members; other++) {
      m->wires[other].answer.kind = 0;
      m->wires[other].stored = false;
      m->share->links[other].heard_ns = m->share->links[other].paused_ns = 0;
    }
    m->share->last_served = 0;
  }
  for (unsigned i = 0; i < asked->njobs; i++) {
    const struct job *job = &asked->jobs[i];
    submitted[i] = checked[i] = false;
    for (unsigned b = 0; b < job->count; b++)
      if (job->direction == KVS_H2D)
        put_on_host(job, job->first + b);
      else
        put_block(members[job->member].gpu + gpu_block(job, b) * NBYTES, job, job->first + b);
  }
}

static void end_run(void) {
  if (disturbed() || wrong) {
    close_all();
    open_all();
    return;
  }
  for (unsigned i = 0; i < asked->members; i++) unref_jobs(i);
}

/* -- steps --------------------------------------------------------------------------------------------------------- */

enum kind { STEP, ROUND, ROUND_ONE, SLEEP, SUBMIT, END, TIME, KILL, LOSE, LEAVE, REPEAT };
static const char *const kinds[] = {"device", "round", "round with one message of", "sleep", "submit",       "ended",
                                    "time",   "kill",  "lose the link to",          "leave", "old answer of"};

struct action {
  enum kind kind;
  unsigned member, arg;
};

static void submit(unsigned at) {
  const struct job *job = &asked->jobs[at];
  int64_t host_ids[BLOCKS], gpu_ids[BLOCKS];
  struct kvs_error err = {0};
  const struct kvs_share_name named = {
      .key = base + job->key, .ranks = (UINT32_C(1) << asked->members) - 1, .rank = job->member};
  for (unsigned i = 0; i < job->count; i++) {
    host_ids[i] = job->first + i;
    gpu_ids[i] = gpu_block(job, i);
  }
  const struct kvs_ids h = {host_ids, 8, job->count}, g = {gpu_ids, 8, job->count};
  must(kvs_share_submit(members[job->member].share, job->direction, &h, &g, job->key ? &named : NULL, NULL, &jobs[at],
                        &err),
       &err, "submit");
  submitted[at] = true;
  met[at] = 0;
  for (unsigned other = 0; other < asked->members; other++)
    if (members[job->member].share->links[other].state != KVS_LINK_UNUSED) met[at] |= UINT32_C(1) << other;
  members[job->member].woken = members[job->member].dirty = true;
}

static void make_round(unsigned member, unsigned only, bool all) {
  struct member *m = &members[member];
  for (unsigned other = 0; other < asked->members; other++) {
    struct kvs_share_link *link = &m->share->links[other];
    m->wires[other].readable = all || members[other].ended ? WIRE : other == only;
    if (other != member && members[other].ended && link->state == KVS_LINK_LIVE) link->broken = true;
  }
  m->dirty = m->woken = false;
  m->last = kvs_share_round(m->share);
  m->dirty |= m->last.changed;
  m->sleeps = false;
  watch_sockets(member);
}

/* A process may end between the round and this. */
static void go_to_sleep(unsigned member) {
  struct member *m = &members[member];
  m->sleeps = true;
  m->awaited = 0;
  for (unsigned other = 0; other < asked->members; other++)
    if (kvs_share_awaits_end(m->share, other)) m->awaited |= UINT32_C(1) << other;
}

static bool some_end(void) {
  for (unsigned i = 0; i < asked->members; i++)
    if (members[i].killed && !members[i].ended) return true;
  return false;
}

static bool may_sleep(unsigned member) {
  const struct member *m = &members[member];
  return !m->sleeps && !m->killed && !m->last.over && !m->last.changed && !m->woken;
}

/* When what a member waits for is over; UINT64_MAX: it waits for no time. */
static uint64_t next_time(const struct kvs_share *share) {
  uint64_t next = kvs_receive_next_ns(share);
  for (unsigned rank = 0; rank < asked->members; rank++) {
    const struct kvs_share_link *link = &share->links[rank];
    for (unsigned i = 0; i < link->waiting; i++) {
      uint64_t until = link->requests[(link->first + i) % KVS_SHARE_SLOTS].since_ns + share->asked.wait_ns;
      if (until > now && until < next) next = until;
    }
    if (share->jobs && link->paused_ns > now && link->paused_ns < next) next = link->paused_ns;
  }
  return next;
}

static uint64_t next_of_all(void) {
  uint64_t next = UINT64_MAX;
  for (unsigned i = 0; i < asked->members; i++)
    if (!members[i].killed && next_time(members[i].share) < next) next = next_time(members[i].share);
  return next;
}

static void pass_time(void) {
  uint64_t next = next_of_all();
  if (next > now) now = next;
  for (unsigned i = 0; i < asked->members; i++) {
    members[i].share->clock_ns = now;
    members[i].dirty = true;
  }
}

static void end_process(unsigned member) {
  members[member].ended = true;
  if (eventfd_write(members[member].process, 1)) exit(2);
}

static void act(const struct action *action) {
  struct member *m = &members[action->member];
  switch (action->kind) {
  case STEP:
    step_device(action->member, action->arg);
    break;
  case ROUND:
  case ROUND_ONE:
    make_round(action->member, action->arg, action->kind == ROUND);
    break;
  case SLEEP:
    go_to_sleep(action->member);
    break;
  case SUBMIT:
    submit(action->arg);
    break;
  case END:
    end_process(action->member);
    break;
  case TIME:
    times += action->arg;
    pass_time();
    break;
  case KILL:
    kills++;
    m->killed = true;
    for (unsigned other = 0; other < asked->members; other++)
      if (other != action->member) end_wire(action->member, other);
    break;
  case LOSE:
    losses++;
    put_message(action->member, action->arg, &(struct kvs_share_message){.kind = 99});
    break;
  case REPEAT:
    repeats++;
    put_message(action->member, action->arg, &m->wires[action->arg].answer);
    break;
  case LEAVE:
    leaves++;
    m->leaves = m->share->stop = m->woken = true;
    break;
  }
  for (unsigned i = 0; i < asked->members; i++)
    if (!members[i].ended) run_instants(i);
  for (unsigned i = 0; i < asked->members && !some_end(); i++)
    if (may_sleep(i)) go_to_sleep(i);
  check_slots();
  check_jobs();
}

static bool has_message(unsigned member, unsigned other) {
  const struct kvs_share_link *link = &members[member].share->links[other];
  const struct wire *wire = &members[member].wires[other];
  bool open = (link->state == KVS_LINK_LIVE || link->state == KVS_LINK_GONE) && link->socket >= 0;
  return other != member && open && (wire->count || wire->closed);
}

/* Whether the member's thread would make a round now, with something new to see: as rest() in share.c sleeps. */
static bool awake(unsigned member) {
  const struct member *m = &members[member];
  if (m->killed || m->last.over) return false;
  if (m->last.changed || m->woken || (m->dirty && (m->last.works || now >= m->last.until_ns))) return true;
  for (unsigned other = 0; other < asked->members; other++) {
    const struct kvs_share_link *link = &m->share->links[other];
    if (m->sleeps && m->awaited >> other & 1 && members[other].ended) return true;
    if (has_message(member, other)) return true;
    if (link->state == KVS_LINK_GONE && link->socket >= 0 && !link->said && !kvs_bring_works(m->share, link))
      return true;
  }
  return false;
}

static void add(struct action *list, unsigned *count, enum kind kind, unsigned member, unsigned arg) {
  if (*count < MOST_ACTIONS) list[(*count)++] = (struct action){kind, member, arg};
}

static bool may_submit(unsigned at) {
  const struct job *job = &asked->jobs[at];
  if (submitted[at] || members[job->member].killed || members[job->member].leaves) return false;
  for (unsigned before = 0; before < at; before++)
    if (asked->jobs[before].member == job->member && (!submitted[before] || (job->later && !job_over(before))))
      return false;
  return true;
}

static void list_rounds(unsigned member, struct action *list, unsigned *count) {
  unsigned links = 0;
  if (!awake(member)) {
    if (may_sleep(member) && some_end()) add(list, count, SLEEP, member, 0);
    return;
  }
  add(list, count, ROUND, member, 0);
  for (unsigned other = 0; other < asked->members; other++) links += has_message(member, other);
  for (unsigned other = 0; other < asked->members; other++)
    if (has_message(member, other) && (links > 1 || members[member].wires[other].count > 1))
      add(list, count, ROUND_ONE, member, other);
}

static unsigned list_actions(struct action *list) {
  unsigned count = 0;
  for (unsigned i = 0; i < asked->members; i++) {
    for (unsigned n = 0; !members[i].ended && working(i, n); n++) add(list, &count, STEP, i, n);
    list_rounds(i, list, &count);
  }
  for (unsigned at = 0; at < asked->njobs; at++)
    if (may_submit(at)) add(list, &count, SUBMIT, asked->jobs[at].member, at);
  for (unsigned i = 0; i < asked->members; i++)
    if (members[i].killed && !members[i].ended) add(list, &count, END, i, 0);
  bool timed = next_of_all() != UINT64_MAX;
  if (!count && timed) add(list, &count, TIME, 0, 0);
  if (!count) return 0;
  if (timed && list[0].kind != TIME && times < asked->times) add(list, &count, TIME, 0, 1);
  for (unsigned i = 0; i < asked->members; i++) {
    if (members[i].killed || members[i].leaves) continue;
    if (kills < asked->kills) add(list, &count, KILL, i, 0);
    if (leaves < asked->leaves) add(list, &count, LEAVE, i, 0);
    for (unsigned other = 0; other < asked->members; other++) {
      if (other == i || members[i].share->links[other].state != KVS_LINK_LIVE) continue;
      if (losses < asked->losses) add(list, &count, LOSE, i, other);
      if (repeats < asked->repeats && members[i].wires[other].answer.kind) add(list, &count, REPEAT, i, other);
    }
  }
  return count;
}

/* -- states -------------------------------------------------------------------------------------------------------- */

static uint64_t mixed;

static void mix(uint64_t word) {
  mixed = (mixed ^ word) * UINT64_C(0x9e3779b97f4a7c15);
  mixed ^= mixed >> 29;
}

static void mix_bytes(const void *at, size_t nbytes) {
  const unsigned char *bytes = at;
  for (size_t i = 0; i + 8 <= nbytes; i += 8) {
    uint64_t word;
    memcpy(&word, bytes + i, 8);
    mix(word);
  }
}

static void mix_time(uint64_t at) { mix(at > now ? at - now : 0); }

static unsigned number_of(const struct kvs_share_job *job) {
  for (unsigned i = 0; i < asked->njobs; i++)
    if (submitted[i] && jobs[i] == job) return i;
  return JOBS;
}

static void mix_address(unsigned member, uint64_t at) {
  const struct kvs_share *share = members[member].share;
  struct {
    uint64_t base, nbytes;
  } known[3 + 2 * MEMBERS] = {{(uintptr_t)host, BLOCKS * host_nbytes},
                              {(uintptr_t)members[member].gpu, BLOCKS * NBYTES},
                              {share->bounce_memory, KVS_SHARE_BOUNCES * share->slot_nbytes}};
  for (unsigned i = 0; i < asked->members; i++) {
    known[3 + 2 * i].base = share->links[i].near;
    known[4 + 2 * i].base = share->links[i].far;
    known[3 + 2 * i].nbytes = known[4 + 2 * i].nbytes = asked->slots * share->slot_nbytes;
  }
  for (unsigned i = 0; i < 3 + 2 * asked->members; i++)
    if (known[i].base && at >= known[i].base && at < known[i].base + known[i].nbytes) {
      mix(i << 16 | (at - known[i].base));
      return;
    }
  mix(77);
}

/* How much is ahead of a recording that a stream waits for. */
static uint64_t ahead_of(const struct kvs_host_queue *queue, const struct kvs_host_mark *mark) {
  for (const struct kvs_host_stream *at = queue->first; at; at = at->after) {
    uint64_t ahead = 1;
    for (const struct kvs_host_op *op = at->head; op; op = op->next, ahead++)
      if (op->kind == KVS_HOST_RECORD && op->what.mark == mark) return ahead;
  }
  return 0;
}

static void mix_device(unsigned member) {
  const struct kvs_host_queue *queue = queue_of(member);
  uint64_t before = mixed, sum = 0;
  for (const struct kvs_host_stream *at = queue->first; at; at = at->after) {
    mixed = 1;
    for (const struct kvs_host_op *op = at->head; op; op = op->next) {
      mix(op->kind);
      if (op->kind == KVS_HOST_WAIT_EVENT) mix(ahead_of(queue, op->what.mark));
      if (op->kind == KVS_HOST_KERNEL) mix(op->what.kernel.id);
      for (uint64_t i = op->unit; op->kind == KVS_HOST_COPY && i < op->units; i++) {
        mix_address(member, op->pieces[i].dst);
        mix_address(member, op->pieces[i].src);
        mix(op->pieces[i].nbytes);
      }
    }
    sum += mixed;
  }
  mixed = before;
  mix(sum);
}

static void mix_job(const struct kvs_share_job *job) {
  mix(number_of(job));
  mix(job->head), mix(job->tail), mix(job->left), mix(job->late), mix(job->nagain), mix(job->absent);
  mix(job->passing), mix(job->reported), mix(job->told), mix(job->nfailed), mix(job->short_last);
  if (job->told) mix_time(job->told_ns + members[0].share->asked.store_ns);
  for (unsigned part = 0; part < job->nranks; part++) mix(job->front[part]), mix(job->back[part]);
  for (size_t i = 0; i < job->nagain; i++) mix(job->again[i]);
  for (size_t i = 0; i < job->npieces; i++) mix(job->here[i]);
  for (size_t i = 0; i < job->count; i++) mix(job->failed[i]);
  for (int i = 0; i < KVS_SHARE_OWN; i++) {
    mix(job->own[i].transfer != NULL);
    for (size_t k = 0; job->own[i].transfer && k < job->own[i].count; k++) mix(job->own[i].pieces[k]);
  }
}

static void mix_link(unsigned member, unsigned other) {
  const struct kvs_share *share = members[member].share;
  const struct kvs_share_link *link = &share->links[other];
  mix(link->state), mix(link->left), mix(link->broken), mix(link->said), mix(link->socket >= 0);
  bool asks = false;
  for (unsigned i = 0; i < asked->slots; i++) {
    const struct kvs_share_slot *slot = &link->slots[i];
    mix(slot->state);
    asks |= slot->state == KVS_SLOT_ASKED;
    if (slot->state == KVS_SLOT_FREE) continue;
    mix(slot->recalled), mix(slot->piece), mix(slot->job ? number_of(slot->job) : JOBS + 1u);
    mix_bytes((const void *)(uintptr_t)(link->near + i * share->slot_nbytes), share->slot_nbytes);
  }
  mix(link->busy), mix(link->told), mix(link->unheard);
  if (asks) mix_time(link->heard_ns + share->asked.stall_ns);
  mix_time(link->paused_ns);
  for (unsigned i = 0; i < link->waiting; i++) {
    const struct kvs_share_request *request = &link->requests[(link->first + i) % KVS_SHARE_SLOTS];
    mix(members[other].share->links[member].slots[request->slot].generation - request->generation);
    mix(request->slot), mix(request->direction), mix(request->piece), mix(request->ids[0]);
    mix(request->key ? request->key - base : 0);
    if (request->key) mix_time(request->since_ns + share->asked.wait_ns);
  }
  for (unsigned i = 0; i < KVS_SHARE_REPORTS; i++)
    if (link->reports[i].key > base) mix(link->reports[i].key - base), mix((uint64_t)link->reports[i].status);
}

static void mix_wire(unsigned member, unsigned other) {
  const struct wire *wire = &members[member].wires[other];
  mix(wire->closed), mix(wire->count);
  if (repeats < asked->repeats && wire->answer.kind) {
    mix(wire->answer.slot), mix((uint64_t)wire->answer.status);
    mix(members[member].share->links[other].slots[wire->answer.slot].generation - wire->answer.generation);
  }
  for (unsigned i = 0; i < wire->count; i++) {
    const struct kvs_share_message *message = wire->messages[(wire->first + i) % WIRE];
    bool done = message->kind == KVS_SHARE_DONE, slotted = done || message->kind <= KVS_SHARE_DROP;
    unsigned owner = done ? member : other;
    mix(message->kind), mix(message->slot), mix((uint64_t)message->status), mix(message->piece);
    mix(message->key ? message->key - base : 0);
    if (slotted && message->slot < KVS_SHARE_SLOTS)
      mix(members[owner].share->links[done ? other : member].slots[message->slot].generation - message->generation);
  }
}

static void mix_member(unsigned member) {
  const struct member *m = &members[member];
  const struct kvs_share *share = m->share;
  mix(m->killed), mix(m->ended), mix(m->leaves), mix(m->last.over);
  mix(m->last.changed), mix(m->woken), mix(m->last.works && m->dirty);
  mix(m->sleeps), mix(m->sleeps ? m->awaited : 0);
  mix_time(m->last.until_ns);
  mix_bytes(m->gpu, BLOCKS * NBYTES);
  if (m->ended) return;
  mix_device(member);
  for (unsigned i = 0; i < KVS_SHARE_BOUNCES; i++) {
    const struct kvs_share_bounce *bounce = &share->bounces[i];
    mix(bounce->busy);
    if (!bounce->busy) continue;
    mix(bounce->on_link), mix(bounce->link->rank), mix(bounce->asked.slot), mix(bounce->asked.direction);
    mix(members[bounce->link->rank].share->links[member].slots[bounce->asked.slot].generation -
        bounce->asked.generation);
    mix(bounce->job ? number_of(bounce->job) : JOBS), mix((uint64_t)bounce->status);
    mix_bytes((const void *)(uintptr_t)bounce->ptr, share->slot_nbytes);
  }
  for (unsigned i = 0; i < KVS_SHARE_MOVES; i++)
    if (share->moves[i].transfer) mix(share->moves[i].slots), mix(share->moves[i].link->rank);
  for (const struct kvs_share_job *job = share->jobs; job; job = job->next) mix_job(job);
  mix(share->last_served);
  for (unsigned other = 0; other < asked->members; other++) {
    if (other == member) continue;
    mix_link(member, other);
    mix_wire(member, other);
  }
}

static uint64_t state_hash(void) {
  mixed = 1;
  mix(kills << 24 | losses << 16 | leaves << 8 | times), mix(repeats);
  for (unsigned i = 0; i < asked->njobs; i++) mix(submitted[i]), mix(job_over(i));
  mix_bytes(host, BLOCKS * host_nbytes);
  for (unsigned i = 0; i < asked->members; i++) mix_member(i);
  return mixed | 1;
}

static uint64_t *seen; /* a table of hashes; 0: empty */
static size_t seen_room, seen_count;

static bool put(uint64_t hash) {
  if (2 * seen_count >= seen_room) {
    uint64_t *old = seen;
    size_t room = seen_room;
    seen_room = room ? 2 * room : 1 << 16;
    seen = calloc(seen_room, sizeof *seen);
    seen_count = 0;
    for (size_t i = 0; i < room; i++)
      if (old[i]) put(old[i]);
    free(old);
  }
  size_t at = hash % seen_room;
  while (seen[at] && seen[at] != hash) at = (at + 1) % seen_room;
  if (seen[at]) return false;
  seen[at] = hash;
  seen_count++;
  return true;
}

/* -- runs ---------------------------------------------------------------------------------------------------------- */

static unsigned char steps[MOST_STEPS]; /* which action was taken, at each step of a run */
static struct action taken[MOST_STEPS];

/* Runs to come: the steps that are given. Taken in any order, so that a limited number of them is spread out. */
struct prefix {
  unsigned length;
  unsigned char steps[];
};
static struct prefix **todo;
static size_t todo_count, todo_room;

static void push(unsigned length, unsigned char last) {
  struct prefix *made = malloc(sizeof *made + length + 1);
  memcpy(made->steps, steps, length);
  made->steps[length] = last;
  made->length = length + 1;
  if (todo_count == todo_room) todo = realloc(todo, (todo_room = 2 * todo_room + 64) * sizeof *todo);
  todo[todo_count++] = made;
}

static unsigned pop(uint64_t *random) {
  size_t at = check_below(random, todo_count);
  struct prefix *next = todo[at];
  unsigned length = next->length;
  memcpy(steps, next->steps, length);
  todo[at] = todo[--todo_count];
  free(next);
  return length;
}

static void print_run(unsigned length) {
  printf("case \"%s\": %s (%d, %d), after %u steps:\n", asked->name, wrong, (int)wrong_at[0], (int)wrong_at[1], length);
  for (unsigned i = 0; i < length; i++) printf("  %u %s %u\n", taken[i].member, kinds[taken[i].kind], taken[i].arg);
}

/* What disturbs the members is rarer than what they do. */
static unsigned draw_action(uint64_t *random, const struct action *list, unsigned count) {
  unsigned normal = 0;
  while (normal < count && list[normal].kind < TIME) normal++;
  return (unsigned)check_below(random, normal && check_below(random, 30) ? normal : count);
}

/* The first `length` steps are given. random: the others by it; NULL: the first of each, and those not taken are noted
 * where the state is new. */
static void run(unsigned length, uint64_t *random) {
  struct action list[MOST_ACTIONS];
  bool fresh = true;
  unsigned at = 0, count;
  begin_run();
  for (; !wrong && (count = list_actions(list)); at++) {
    if (at == MOST_STEPS) {
      report("it goes on for ever", 0, 0);
      break;
    }
    unsigned choice = 0;
    if (at < length) {
      choice = steps[at];
    } else if (random) {
      choice = draw_action(random, list, count);
    } else if (fresh && (fresh = put(state_hash()))) {
      for (unsigned i = count; i-- > 1;) push(at, (unsigned char)i);
    }
    if (choice >= count) {
      report("the same steps led to another state", choice, count);
      break;
    }
    steps[at] = (unsigned char)choice;
    taken[at] = list[choice];
    act(&list[choice]);
  }
  if (!wrong) check_end();
  CHECK(!wrong, "%s", wrong);
  if (wrong) print_run(at);
  end_run();
}

static void explore(const struct scenario *scenario, uint64_t most) {
  uint64_t runs = 1, random = 1;
  asked = scenario;
  open_all();
  run(0, NULL);
  for (; todo_count && !checks_failed && runs < most; runs++) run(pop(&random), NULL);
  fprintf(stderr, "%s: %zu states, %d runs%s\n", asked->name, seen_count, (int)runs,
          todo_count ? ", not all" : ": all");
  while (todo_count) pop(&random);
  free(todo);
  free(seen);
  todo = NULL;
  seen = NULL;
  todo_room = seen_room = seen_count = 0;
  close_all();
}

/* A shared job of all, or one of the second half of the blocks for some members; then more of these. */
static struct scenario draw(uint64_t *random) {
  static const double shares[] = {0.5, 1, 10};
  struct scenario made = {.name = "random", .members = 2 + (unsigned)check_below(random, MEMBERS - 1)};
  unsigned shared = check_below(random, 3) ? 1 + (unsigned)check_below(random, BLOCKS / 2) : 0;
  enum kvs_direction direction = check_below(random, 2) ? KVS_H2D : KVS_D2H;
  made.slots = 2 + (unsigned)check_below(random, 3);
  made.blocks_a_piece = 1 + (unsigned)check_below(random, 2);
  made.share = shares[check_below(random, 3)];
  made.kills = (unsigned)check_below(random, made.members);
  made.losses = (unsigned)check_below(random, 2);
  made.leaves = (unsigned)check_below(random, 2);
  made.repeats = (unsigned)check_below(random, 3);
  made.times = (unsigned)check_below(random, 6);
  made.coded = check_below(random, 3) == 0;
  made.unfit = (uint32_t)check_below(random, 1 << BLOCKS) & (uint32_t)check_below(random, 1 << BLOCKS);
  for (unsigned i = 0; shared && i < made.members; i++)
    made.jobs[made.njobs++] = (struct job){i, direction, 1, 0, shared, false};
  for (unsigned i = 0; i < 2; i++) {
    struct job *job = &made.jobs[made.njobs++];
    job->member = (unsigned)check_below(random, made.members);
    job->direction = check_below(random, 2) ? KVS_H2D : KVS_D2H;
    job->first = BLOCKS / 2 + i * BLOCKS / 4;
    job->count = 1 + (unsigned)check_below(random, BLOCKS / 4);
    job->later = check_below(random, 2);
  }
  return made;
}

static void explore_at_random(uint64_t seed, uint64_t most) {
  uint64_t random = seed;
  for (uint64_t i = 0; i < most && !checks_failed; i++) {
    struct scenario drawn = draw(&random);
    asked = &drawn;
    open_all();
    for (int k = 0; k < 10 && !checks_failed; k++) run(0, &random);
    close_all();
  }
}

int main(int argc, char **argv) {
  bool at_random = argc > 1 && !strcmp(argv[1], "random"), all = argc < 2 || !strcmp(argv[1], "all");
  uint64_t given = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
  memory = aligned_alloc(4096, MEMORY);
  open_coding();
  for (unsigned i = 0; i < MEMBERS; i++) open_device(i);
  for (unsigned i = 0; i < CASES && !checks_failed; i++)
    if (all || !strcmp(argv[1], cases[i].name)) explore(&cases[i], given ? given : 200);
  if (at_random || argc < 2) explore_at_random(given ? given : 1, argc > 3 ? strtoull(argv[3], NULL, 10) : 50);
  for (unsigned i = 0; i < MEMBERS; i++) {
    kvs_pool_unref(members[i].host_pool);
    kvs_pool_unref(members[i].coded_pool);
    kvs_pool_unref(members[i].gpu_pool);
    kvs_engine_unref(members[i].engine);
  }
  kvs_coding_close(coding);
  free(memory);
  return check_close();
}
