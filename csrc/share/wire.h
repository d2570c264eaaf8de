/* Messages between members of a group, each sent whole over a SOCK_SEQPACKET socket. For share/ only. */
#ifndef KVS_SHARE_WIRE_H
#define KVS_SHARE_WIRE_H

#include <stdbool.h>
#include <stdint.h>

enum { KVS_SHARE_BLOCKS = 1024 /* most blocks of a piece */ };

/* TAKE: bring a piece into a slot of the sender, or from it to the host. With a key: a piece of the shared load of that
 * key, from the receiver's own GPU, once it is there. REPORT: how the sender's part of the shared store of that key has
 * ended; ids are the failed positions. DROP: forget a TAKE that has not begun. DONE:
 * the answer to each TAKE, after the last access to the slot; `status` KVS_OK, KVS_CANCELLED (dropped), or a failure.
 * BUSY: the sender has unfinished loads or stores in these directions, a bit each (limit.h).
 * BYE: the sender accesses no slot of the receiver any more; the last message. */
enum kvs_share_kind {
  KVS_SHARE_TAKE = 1,
  KVS_SHARE_DROP,
  KVS_SHARE_DONE,
  KVS_SHARE_BYE,
  KVS_SHARE_REPORT,
  KVS_SHARE_BUSY
};

struct kvs_share_message {
  uint32_t magic;
  uint16_t kind, slot;
  uint32_t generation; /* of the slot: an answer to an earlier use of the slot has another */
  int32_t status;
  uint32_t direction;
  uint32_t count;                 /* of ids */
  uint32_t piece;                 /* with a key: its number */
  int32_t why;                    /* of a REPORT: the status of the failed blocks */
  uint64_t key, digest;           /* of a shared load or store; key 0: none. digest: of its ids and ranks */
  uint32_t ids[KVS_SHARE_BLOCKS]; /* of the host; only `count` of them are sent */
};

enum kvs_share_got { KVS_SHARE_GOT, KVS_SHARE_NONE, KVS_SHARE_ENDED };

/* Neither waits. False: the other side reads nothing, or has ended. A message of a wrong form is KVS_SHARE_ENDED. */
bool kvs_share_send(int socket, struct kvs_share_message *);
enum kvs_share_got kvs_share_receive(int socket, struct kvs_share_message *);

#endif
