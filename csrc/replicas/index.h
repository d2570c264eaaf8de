/* One index for all replicas of an engine on a machine: which blocks a shared segment holds, for the schedulers of
 * several processes. A block is found only after its write was reported complete. It stays while a replica reads it.
 *
 * A replica is a member: its scheduler and its workers, each of which has the index open, under one name. What a member
 * reads and writes belongs to it until it says so, or until all of its processes have ended: a worker may still copy
 * after its scheduler was killed. Other members notice the end of these processes when they need room, when they wait
 * for a block, when they join, and otherwise about once a second.
 *
 * A reset makes all blocks unreachable for the member that calls it, and those that it still writes: its keys are of
 * another epoch from then on. The next members that reset come to the same epoch, so that replicas that are all reset,
 * as after new weights, share again. A member that joins later is in epoch 0, that of the weights that an engine loads.
 *
 * All members have one lock, which is given up when its owner is killed; the next one repairs the table. Any thread may
 * call; a forked child must not. No call waits longer than KVS_INDEX_LOCK_NS. */
#ifndef KVS_REPLICAS_INDEX_H
#define KVS_REPLICAS_INDEX_H

#include "kvswap.h"
#include "replicas/blockmap.h"

enum { KVS_INDEX_TEXT = 4096, KVS_INDEX_LOCK_NS = 500 * 1000 * 1000 };

struct kvs_index_options {
  const char *name; /* of the segment, as kvs_shared_options.name */
  uint64_t num_slots, slot_nbytes;
  const char *member; /* 1 to 100 bytes, the same in all processes of a replica, and in no others */
  /* Of a scheduler: what the bytes of the blocks mean, below KVS_INDEX_TEXT bytes. NULL: a worker. */
  const char *identity;
};

struct kvs_index;
uint64_t kvs_index_nbytes(uint64_t num_slots); /* for kvs_shared_options.index_nbytes */
/* The segment is made if there is none. KVS_INVALID: it has other sizes, or blocks with another identity. KVS_BUSY: an
 * engine that still runs has the member's name, or there are KVS_BLOCKMAP_MEMBERS. KVS_UNSUPPORTED, KVS_NOMEM,
 * KVS_TIMEOUT: as kvs_shared_open(). */
int kvs_index_open(const struct kvs_index_options *, struct kvs_index **, struct kvs_error *);
/* Leave; a second call does nothing. A worker leaves when its copies have ended. What a scheduler has not given back
 * stays taken until its process has ended. */
void kvs_index_close(struct kvs_index *);
void kvs_index_free(struct kvs_index *); /* closes it; no thread is in a call */

/* For all that follows. KVS_TIMEOUT: a process that does not go on holds the lock. KVS_CLOSED; KVS_FORKED. */

enum kvs_index_found { KVS_INDEX_MISS, KVS_INDEX_PENDING, KVS_INDEX_HIT };
struct kvs_index_hit {
  enum kvs_index_found found;
  uint32_t slot; /* HIT */
  bool foreign;  /* HIT: another replica has stored it */
};
/* A hit is pinned. PENDING: it is being written, not longer than pending_ns by another member. */
int kvs_index_find(struct kvs_index *, const struct kvs_blockmap_key *, uint64_t pending_ns, struct kvs_index_hit *,
                   struct kvs_error *);
/* One pin of each slot. KVS_INVALID: a slot has none of this member; those before it have lost theirs. */
int kvs_index_unpin(struct kvs_index *, const uint32_t *slots, size_t count, struct kvs_error *);
int kvs_index_touch(struct kvs_index *, const struct kvs_blockmap_key *, size_t count, struct kvs_error *);
/* As kvs_blockmap_take(). KVS_NO_ROOM: nothing was taken. */
int kvs_index_take(struct kvs_index *, const struct kvs_blockmap_key *, size_t count, uint32_t *slots, size_t *evicted,
                   struct kvs_error *);
/* As kvs_blockmap_settle(). KVS_INVALID: this member does not write a slot; those before it are settled. */
int kvs_index_settle(struct kvs_index *, const uint32_t *slots, size_t count, bool stored, struct kvs_error *);
int kvs_index_reset(struct kvs_index *, struct kvs_error *);

struct kvs_index_info {
  uint64_t num_slots, free, writing, ready; /* slots */
  uint64_t pinned;                          /* this member's pins and writes */
  uint32_t epoch, member, members;          /* members: how many there are */
};
int kvs_index_get_info(struct kvs_index *, struct kvs_index_info *, struct kvs_error *);
/* For tests: take the lock and keep it, as a process does that is stopped or killed inside a call. */
int kvs_index_hold(struct kvs_index *, struct kvs_error *);
void kvs_index_let_go(struct kvs_index *);                   /* by the same thread */
int kvs_index_check(struct kvs_index *, struct kvs_error *); /* KVS_INTERNAL: the table is wrong */

#endif
