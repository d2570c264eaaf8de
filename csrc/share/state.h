/* The structs behind a member of a group of processes that share their links (share.h). For share/ only.
 *
 * A member has one thread, which makes all messages, polls all events, and queues all pieces; `lock` is held for each
 * round of it and by each call. Two roles, both of every member, unless it was opened for one of them:
 *
 *   receiver (receive.c): owns the receive slots, in its own memory, so many for each other member. It says which piece
 *     comes into which slot (TAKE), and copies between the slot and its blocks. Only it decides when a slot is used
 *     again.
 *   bringer (bring.c): has the other's slots mapped for its own device. It carries a piece over its own link through a
 *     bounce slot, in its own memory, and answers (DONE) after the event behind the last copy was reached: a wait that
 *     another process queued on the event could pass before the event is recorded.
 *
 * States of a receive slot, all moved by the member's thread under lock:
 *
 *   FREE -> ASKED -> ARRIVED -> EMPTYING -> FREE   to the GPU: TAKE is sent; DONE; a copy is queued; it has ended
 *   FREE -> FILLING -> ASKED -> FREE               to the host: a copy is queued; it has ended, TAKE is sent; DONE
 *   ASKED -> LATE -> FREE                          the limit passed: DROP is sent, the own link takes the piece; DONE
 *
 * Where the link ends without a BYE, a slot that is ASKED becomes LATE until DONE, a later BYE, or the end of the
 * process.
 *
 * A slot is ASKED or LATE exactly while another process may access it. Its generation rises with each TAKE: a DONE of
 * another generation is dropped.
 *
 * States of a link: UNUSED -> MADE (it has slots) -> LIVE (it has a socket) -> GONE (the other member has ended or
 * failed) -> UNUSED (no slot is in use, no piece for the other is under way, and the other has ended or was told BYE).
 * The first step, and that to LIVE, are made by the thread that meets, under `meeting`. */
#ifndef KVS_SHARE_STATE_H
#define KVS_SHARE_STATE_H

#include "base/wait.h"
#include "lanes/state.h"
#include "share/share.h"
#include "share/wire.h"

enum {
  KVS_SHARE_RANKS = 16,
  KVS_SHARE_SLOTS = 8, /* most receive slots for one member */
  KVS_SHARE_BOUNCES = 4,
  KVS_SHARE_ON_LINK = 2,  /* pieces of others on the device's link, in each direction, of all its members */
  KVS_SHARE_MOVES = 32,   /* copies between slots and blocks that are under way */
  KVS_SHARE_OWN = 2,      /* transfers of a job over the own link that are under way */
  KVS_SHARE_FAILED = 64,  /* failed blocks that a report names; more: all of its part */
  KVS_SHARE_REPORTS = 64, /* kept for calls that this process has not made yet, for each other member */
  KVS_SHARE_PAST = 64,    /* names of shared jobs that have ended, kept for questions that come late */
  KVS_SHARE_STREAMS = 4,  /* pairs of streams; jobs take them in turn */
};

enum kvs_share_slot_state {
  KVS_SLOT_FREE,
  KVS_SLOT_FILLING,
  KVS_SLOT_ASKED,
  KVS_SLOT_ARRIVED,
  KVS_SLOT_EMPTYING,
  KVS_SLOT_LATE
};

struct kvs_share_slot {
  enum kvs_share_slot_state state;
  bool recalled; /* ASKED: the own link would take it, if it has not begun */
  uint32_t generation;
  struct kvs_share_job *job; /* FILLING to EMPTYING; LATE of a store */
  uint32_t piece;
};

/* A TAKE that waits for its turn. */
struct kvs_share_request {
  uint32_t generation, direction, count, piece;
  uint16_t slot;
  uint64_t key, digest, since_ns;
  uint32_t ids[KVS_SHARE_BLOCKS];
};

/* How a member's part of a shared store has ended, kept until this process calls its own. */
struct kvs_share_report {
  uint64_t key, digest; /* key 0: none */
  int32_t status;       /* KVS_OK: all but `failed` of its blocks are stored */
  int32_t why;          /* of `failed` */
  uint32_t count, failed[KVS_SHARE_FAILED];
};

enum kvs_share_link_state { KVS_LINK_UNUSED, KVS_LINK_MADE, KVS_LINK_LIVE, KVS_LINK_GONE };

struct kvs_share_link {
  enum kvs_share_link_state state;
  unsigned rank;
  int socket, process; /* -1: none. process: a pidfd, readable once the other process has ended; -1: unknown */
  bool left;           /* it has said BYE */
  bool broken;         /* a message could not be sent, or its process has ended: the link ends in this round */
  bool said;           /* GONE: BYE was sent */
  bool ended;          /* GONE: a round has seen the end of its process */
  bool lends;          /* pieces may be asked of it */
  uint32_t busy, told; /* directions of unfinished jobs, a bit each: its own, and this member's, as it was told them */
  unsigned unheard;    /* times that it was told, since its last message */
  /* As receiver: */
  uint64_t near;           /* address of the slots */
  struct kvs_pool **pools; /* the slots, as blocks: one pool for each pool of the host */
  struct kvs_share_slot slots[KVS_SHARE_SLOTS];
  uint64_t heard_ns;  /* when it last answered, or was asked while it had nothing to do */
  uint64_t paused_ns; /* asked nothing before: it was late */
  /* As bringer: */
  uint64_t far; /* its slots, mapped here; 0: none */
  unsigned far_slots;
  struct kvs_share_request *requests; /* a ring of KVS_SHARE_SLOTS */
  unsigned first, waiting;
  struct kvs_share_report reports[KVS_SHARE_REPORTS]; /* a ring */
  unsigned next_report;
};

/* A piece on its way over this member's link. */
struct kvs_share_bounce {
  bool busy, on_link;
  struct kvs_share_link *link;
  struct kvs_share_request asked; /* without its ids */
  uint64_t ptr, nbytes;
  kvs_stream stream;
  struct kvs_share_job *job;      /* whose piece is passed on from this GPU; NULL: it comes from the host */
  struct kvs_transfer *gathering; /* of that piece */
  int status;                     /* of queueing; then the stream is idle at the end, not the event reached */
  kvs_event crossed, end;         /* the piece has crossed the link; no copy of it is left */
};

/* A copy between the slots of one link and blocks of the GPU. */
struct kvs_share_move {
  struct kvs_transfer *transfer; /* NULL: unused */
  struct kvs_share_link *link;
  struct kvs_share_job *job;
  uint32_t slots; /* a bit each */
};

struct kvs_share_own {
  struct kvs_transfer *transfer; /* NULL: unused */
  uint32_t *pieces;
  size_t count;
};

struct kvs_share_job {
  atomic_uint refs;
  struct kvs_share *share; /* its handle holds a reference */
  struct kvs_share_job *next;
  enum kvs_direction direction;
  int64_t *host, *gpu; /* ids */
  size_t count, npieces;
  unsigned streams;  /* which pair */
  kvs_event start;   /* what the compute stream had when the job was submitted */
  size_t head, tail; /* pieces [head, tail) are nobody's yet: the own link takes from the front, others from behind */
  /* A shared one: piece p is the part of the rank at p % nranks in `order`, and each part is taken from its front. */
  uint64_t key, digest; /* key 0: it is not shared */
  unsigned nranks, mine, order[KVS_SHARE_RANKS];
  size_t front[KVS_SHARE_RANKS], back[KVS_SHARE_RANKS]; /* of each part: pieces that are nobody's yet */
  uint32_t absent;                                      /* ranks that do not take part */
  uint8_t *here;                                        /* by piece: it is in the GPU's blocks */
  unsigned passing;                                     /* bounces that pass pieces on */
  uint32_t reported;                                    /* of a store: ranks whose part has ended */
  bool told;                                            /* the own part's end */
  uint64_t told_ns;
  uint32_t *again;     /* pieces that others did not bring, for the own link */
  size_t nagain, left; /* left: pieces that have not ended */
  size_t late;         /* of a store: pieces that a late member may still write to the host */
  struct kvs_share_own own[KVS_SHARE_OWN];
  bool short_last; /* the last transfer over the own link is the short one behind another */
  uint64_t given;  /* bytes that others brought */
  uint8_t *failed; /* by position */
  size_t nfailed;
  bool begun;                  /* `start` was reached */
  uint64_t since_ns, ended_ns; /* since: the call, or when `start` was last seen not to be reached */
  struct kvs_error error;
  enum kvs_state state;
};

struct kvs_share {
  atomic_uint refs;
  pid_t pid; /* a forked child has no thread */
  struct kvs_engine *engine;
  struct kvs_pool **host_pools, **gpu_pools;
  size_t npools;
  /* The host's blocks: a run for each part. In slots the parts of a block follow each other. */
  uint64_t host_base, block_nbytes, num_blocks, stride, part_nbytes, part_stride;
  unsigned parts;
  uint64_t kv_nbytes; /* of a block: block_nbytes, or what is coded to them */
  uint8_t *cut;       /* by part and block: another registration begins behind it */
  bool whole;         /* the pools have each byte of a block that is not padding */
  uint32_t piece_blocks;
  uint64_t slot_nbytes;
  unsigned nslots;
  struct kvs_share_options asked;

  pthread_mutex_t meeting; /* of the calls that make and give back links; taken before lock */
  pthread_mutex_t lock;
  pthread_cond_t changed; /* a job has ended, a link has come or gone */
  pthread_t thread;
  bool threaded, stop, stopped;
  int wake;
  struct kvs_share_link links[KVS_SHARE_RANKS]; /* by rank */
  struct kvs_share_link buried;                 /* of the thread: to be given back without the lock */
  struct kvs_share_bounce bounces[KVS_SHARE_BOUNCES];
  uint64_t past[KVS_SHARE_PAST]; /* keys, a ring */
  unsigned npast;
  uint64_t bounce_memory;
  struct kvs_pool **bounce_pools;
  unsigned last_served;                     /* rank whose piece was begun last */
  struct kvs_copies copies;                 /* room for a piece */
  kvs_stream streams[KVS_SHARE_STREAMS][2]; /* for slots, and for the own link */
  struct kvs_share_move moves[KVS_SHARE_MOVES];
  struct kvs_share_job *jobs; /* unfinished, oldest first */
  unsigned njobs;             /* submitted so far */
  struct kvs_share_stats stats;
  struct kvs_share_message message, incoming; /* the last one that was sent, and that came */
  uint64_t clock_ns;                          /* the time, where a test gives it; 0: the machine's */
};

static inline uint64_t kvs_share_now(const struct kvs_share *share) {
  return share->clock_ns ? share->clock_ns : kvs_clock_ns();
}

#endif
