/* The receiver: jobs, whose pieces come over the own link and over those of other members. Under the member's lock. */
#ifndef KVS_SHARE_RECEIVE_H
#define KVS_SHARE_RECEIVE_H

#include "share/state.h"

/* By any thread: a job with its first transfer over the own link queued. The list keeps a reference. */
int kvs_receive_begin(struct kvs_share *, enum kvs_direction, const struct kvs_ids *host, const struct kvs_ids *gpu,
                      const struct kvs_share_name *named, const uint64_t *after, struct kvs_share_job **,
                      struct kvs_error *);

/* By the member's thread from here on. An answer of another member. False: it breaks the rules. */
bool kvs_receive_done(struct kvs_share *, struct kvs_share_link *, const struct kvs_share_message *);
/* The other member's part of a shared store has ended. */
void kvs_receive_report(struct kvs_share *, struct kvs_share_link *, const struct kvs_share_message *);
/* A running shared load; NULL: none has the key. Pass a piece of it on: its blocks go to blocks of share->bounce_pools
 * from `to` on. kvs_receive_passed: that has ended. */
struct kvs_share_job *kvs_receive_find(const struct kvs_share *, uint64_t key);
/* Whether such a job has ended lately: it does not come again. */
bool kvs_receive_was(const struct kvs_share *, uint64_t key);
int kvs_receive_pass(struct kvs_share *, struct kvs_share_job *, uint32_t piece, uint64_t to, kvs_stream,
                     struct kvs_transfer **, struct kvs_error *);
void kvs_receive_passed(struct kvs_share *, struct kvs_share_job *);
/* The link has ended: its pieces go over the own link. Its part of a shared store may still be written. */
void kvs_receive_lose(struct kvs_share *, struct kvs_share_link *);
/* The other process has ended or said BYE: no slot is accessed any more. */
void kvs_receive_forget(struct kvs_share *, struct kvs_share_link *);
/* Whether slots of the link are in use, or a shared store may still be written by the other process. */
bool kvs_receive_uses(const struct kvs_share *, const struct kvs_share_link *);

/* True: something changed. */
bool kvs_receive_step(struct kvs_share *);
bool kvs_receive_works(const struct kvs_share *);       /* events are to be polled */
bool kvs_receive_waits(const struct kvs_share *);       /* there are jobs, and none has begun */
uint64_t kvs_receive_next_ns(const struct kvs_share *); /* when a limit passes; UINT64_MAX: none */

void kvs_receive_free(struct kvs_share_job *);

#endif
