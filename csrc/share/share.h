/* Links shared by processes: a member of a group brings pieces of others' transfers over its own link (state.h says
 * how). The members know each other by rank; who they are and how they meet is the caller's. Private:
 * kvswap.share is the public form. */
#ifndef KVS_SHARE_SHARE_H
#define KVS_SHARE_SHARE_H

#include "kvswap.h"

struct kvs_share;     /* one member; reference-counted */
struct kvs_share_job; /* one load or store */

struct kvs_share_options {
  /* Pairs of pools: host_pools are block-first in one shared pool, that all members have registered: block i of all of
   * them together is the block_nbytes bytes at host + i * stride. They may be coded, all or none: blocks cross links
   * and NVLink coded, and each member codes between its slots and its GPU's blocks. */
  struct kvs_pool *const *host_pools, *const *gpu_pools;
  size_t npools;
  uint64_t host, block_nbytes, num_blocks;
  uint64_t stride; /* bytes from a block to the next one; 0: as many as a block has there */
  /* A block may lie in parts of equal size, as keys and values: part p of block i is the block_nbytes / parts bytes at
   * host + p * part_stride + i * stride. A pool lies in one part. parts 0: 1. */
  unsigned parts;
  uint64_t part_stride;
  /* A member may have one role only. gpu_pools NULL: it has no blocks and no receive slots, and only brings pieces.
   * takes_only: it brings none, and has no memory for that. */
  bool takes_only;
  int file; /* behind the host's blocks, of file_nbytes; file_nbytes 0: none. A file that was cut off is not accessed */
  uint64_t file_nbytes;
  uint64_t piece_nbytes; /* about so much is brought at a time; a piece is whole blocks */
  unsigned slots;        /* receive slots for each other member, 2 to 8 */
  bool padded;           /* bytes of a block that are in no pool are padding: other members may write to them */
  double share;          /* what another member brings for each byte of the own link, 0.1 to 10 */
  uint64_t stall_ns;     /* a member that answers nothing for so long is late */
  uint64_t wait_ns;      /* for a member's own call of a shared load */
  uint64_t store_ns;     /* for its part of a shared store */
};

struct kvs_share_stats {
  uint64_t brought_for_others[2], brought_by_others[2]; /* bytes, by direction */
  uint64_t passed_on;                                   /* bytes of shared loads, from this GPU to others */
  uint64_t pieces_late, answers_dropped, links_lost;
};

struct kvs_share_job_info {
  enum kvs_state state;
  enum kvs_direction direction;
  uint64_t nbytes, num_blocks, elapsed_ns; /* bytes are those of the GPU's blocks, before coding */
  uint64_t by_others;                      /* bytes that came over other members' links */
};

int kvs_share_open(const struct kvs_share_options *, struct kvs_share **, struct kvs_error *);
void kvs_share_ref(struct kvs_share *);
void kvs_share_unref(struct kvs_share *); /* the last reference closes it */
/* Stop: unfinished jobs fail with KVS_CLOSED for what had not begun. Waits for the pieces under way. KVS_TIMEOUT: it
 * goes on, and may be called again. */
int kvs_share_close(struct kvs_share *, int64_t timeout_ns, struct kvs_error *);
/* For destructors: within a minute; within a second where an earlier call has not ended. */
int kvs_share_finish(struct kvs_share *, struct kvs_error *);

/* What a member must agree on with others. */
struct kvs_share_form {
  uint64_t block_nbytes, num_blocks, slot_nbytes;
  uint32_t piece_blocks, slots;
};
struct kvs_engine *kvs_share_engine(const struct kvs_share *); /* borrowed */
void kvs_share_get_form(const struct kvs_share *, struct kvs_share_form *);

/* Meeting the member `rank`. First receive slots for it: *fd, which is the caller's, goes to it. Then a link: `socket`,
 * a connected SOCK_SEQPACKET, and `process`, a pidfd or -1, are taken over in any case; `slots_fd` is the other's, of
 * far_slots slots of the own form, and stays the caller's. kvs_share_unmeet: give the slots back before a link is made.
 * A member without receive slots has form.slots 0 and *fd -1; the other side of its link has far_slots 0.
 * KVS_BUSY: an earlier member of that rank has not ended. */
int kvs_share_meet(struct kvs_share *, unsigned rank, int *fd, struct kvs_error *);
int kvs_share_link(struct kvs_share *, unsigned rank, int socket, int process, int slots_fd, unsigned far_slots,
                   bool lends, struct kvs_error *);
void kvs_share_unmeet(struct kvs_share *, unsigned rank);
uint32_t kvs_share_linked(struct kvs_share *); /* a bit for each rank that has a link */
int kvs_share_wait_linked(struct kvs_share *, uint32_t ranks, int64_t timeout_ns, struct kvs_error *);

/* A load that members share by a key, of one generation: each rank of `ranks` brings its part from the host, and passes
 * it on. A store: each writes its part, and a block is stored where the parts of all are. Ranks whose lists or ranks
 * differ load alone, and store nothing. */
struct kvs_share_name {
  uint64_t key;   /* not 0; not used again for other blocks while a member may be late */
  uint32_t ranks; /* a bit each, with the own one */
  unsigned rank;  /* the own one */
};

/* named: NULL: not shared. after: a stream; NULL: the device's compute stream: the job starts after what it has now.
 * Copy blocks host[i] -> gpu[i], or back. The blocks belong to the job until it has ended. The first part is queued in
 * the call; the rest by the member's thread. Blocks that fail are known from the job only: pools do not pass the
 * failure on, because what other processes write to the same blocks later is not known to them. */
int kvs_share_submit(struct kvs_share *, enum kvs_direction, const struct kvs_ids *host, const struct kvs_ids *gpu,
                     const struct kvs_share_name *named, const uint64_t *after, struct kvs_share_job **,
                     struct kvs_error *);
void kvs_share_job_unref(struct kvs_share_job *);
bool kvs_share_job_done(struct kvs_share_job *);
int kvs_share_job_wait(struct kvs_share_job *, int64_t timeout_ns, struct kvs_error *);
int kvs_share_job_error(struct kvs_share_job *, struct kvs_error *);
size_t kvs_share_job_failed(struct kvs_share_job *, uint32_t *positions, size_t capacity);
void kvs_share_job_get_info(struct kvs_share_job *, struct kvs_share_job_info *);
void kvs_share_get_stats(struct kvs_share *, struct kvs_share_stats *);

/* For tests: a member without a thread, also of a deterministic device. The caller makes its rounds. */
int kvs_share_new(const struct kvs_share_options *, struct kvs_share **, struct kvs_error *);

/* What the thread does next: another round, if something `changed`; otherwise it waits for a message, for the end of
 * another process, or until `until_ns`. works: it polls events. waits: for the compute stream
 * alone, so that it polls them less often: the model runs. */
struct kvs_share_round {
  bool changed, works, waits, over;
  uint64_t until_ns;
};
struct kvs_share_round kvs_share_round(struct kvs_share *);
/* Whether the end of that member's process wakes the thread. */
bool kvs_share_awaits_end(const struct kvs_share *, unsigned rank);

#endif
