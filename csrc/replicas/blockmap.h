/* The index of a segment's slots: which key each slot holds, and which processes use it. Pure functions over memory
 * that several processes have mapped; the caller holds their lock (replicas/index.h).
 *
 * States of a slot:
 *
 *    kvs_blockmap_take           kvs_blockmap_settle(stored)
 *   FREE -----------> WRITING ------------------------> READY ---+
 *     ^                  | kvs_blockmap_settle(not stored),         | take() of another key, of the oldest READY slot
 *     |                  | kvs_blockmap_give_back of its writer     | without readers; kvs_blockmap_forget
 *     +------------------+---------------------------------------+
 *
 * A process may be killed at any instruction in here. So each change is one store to `state`, `readers` or `epoch`
 * after the fields that it needs, and the rest (chains, both lists, counts) is computed from those by
 * kvs_blockmap_rebuild(). */
#ifndef KVS_REPLICAS_BLOCKMAP_H
#define KVS_REPLICAS_BLOCKMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KVS_BLOCKMAP_MEMBERS = 16, KVS_BLOCKMAP_KEY_NBYTES = 40, KVS_BLOCKMAP_READERS = 60000 };
#define KVS_BLOCKMAP_NONE UINT32_MAX

struct kvs_blockmap_key { /* bytes behind nbytes are 0 */
  unsigned char bytes[KVS_BLOCKMAP_KEY_NBYTES];
  uint64_t nbytes;
};

enum kvs_slot_state { KVS_SLOT_FREE, KVS_SLOT_WRITING, KVS_SLOT_READY };

struct kvs_blockmap_slot {
  struct kvs_blockmap_key key;
  uint64_t used;     /* table.clock at the last use */
  uint64_t since_ns; /* of the monotonic clock, when the write began */
  uint32_t epoch;    /* belongs to the key */
  uint32_t origin;   /* number of the writer's membership, which is never used again */
  uint16_t readers[KVS_BLOCKMAP_MEMBERS];
  uint32_t chain, older, newer; /* the next slot of the bucket; neighbours by use. FREE: chain is the next free slot */
  uint8_t state, writer;        /* writer: a member, of a WRITING slot */
};

struct kvs_blockmap {
  uint64_t num_slots, num_buckets; /* num_buckets: a power of 2 */
  uint64_t seed;                   /* of the hash */
  uint64_t clock;
  uint32_t first_free, last_free; /* in the order in which they became free, so that runs of them stay together */
  uint32_t oldest, newest;
  uint32_t num_free, num_writing;
};

uint64_t kvs_blockmap_nbytes(uint64_t num_slots);
/* Memory of kvs_blockmap_nbytes(), aligned to 64 bytes. All slots are free afterwards. */
void kvs_blockmap_init(struct kvs_blockmap *, uint64_t num_slots, uint64_t seed);
void kvs_blockmap_rebuild(struct kvs_blockmap *); /* after the lock's owner was killed */

struct kvs_blockmap_slot *kvs_blockmap_slot(struct kvs_blockmap *, uint32_t slot);
uint32_t kvs_blockmap_find(struct kvs_blockmap *, const struct kvs_blockmap_key *,
                           uint32_t epoch);                    /* KVS_BLOCKMAP_NONE: absent */
void kvs_blockmap_touch(struct kvs_blockmap *, uint32_t slot); /* of a READY slot */

struct kvs_blockmap_writer {
  uint8_t member;
  uint32_t origin, epoch;
  uint64_t now_ns;
};
/* A slot to write for each key that the table does not have: slots[i], KVS_BLOCKMAP_NONE where it has the key, or where
 * an earlier key of the list is the same. *evicted: how many READY slots were taken for it. No slot that holds one of
 * these keys is. False: there is not enough room, and nothing has changed. */
bool kvs_blockmap_take(struct kvs_blockmap *, const struct kvs_blockmap_writer *, const struct kvs_blockmap_key *keys,
                       size_t count, uint32_t *slots, size_t *evicted);
/* The end of a write. False: the slot is not one that the member writes. */
bool kvs_blockmap_settle(struct kvs_blockmap *, uint32_t slot, uint8_t member, bool stored);
/* Readers of a READY slot. False: it has KVS_BLOCKMAP_READERS of this member; or none to take away. */
bool kvs_blockmap_pin(struct kvs_blockmap *, uint32_t slot, uint8_t member);
bool kvs_blockmap_unpin(struct kvs_blockmap *, uint32_t slot, uint8_t member);
size_t kvs_blockmap_pins(struct kvs_blockmap *, uint8_t member); /* the member's pins and writes */

void kvs_blockmap_give_back(struct kvs_blockmap *, uint8_t member); /* all that the member reads or writes */
/* Free the READY slots without readers whose epoch is none of these. Returns how many. */
size_t kvs_blockmap_forget(struct kvs_blockmap *, const uint32_t *epochs, size_t count);

/* Whether chains, lists and counts are right. For tests. */
bool kvs_blockmap_consistent(struct kvs_blockmap *);

#endif
