/* The bringer: pieces of other members over this member's link. By the member's thread, under its lock. */
#ifndef KVS_SHARE_BRING_H
#define KVS_SHARE_BRING_H

#include "share/state.h"

int kvs_bring_open(struct kvs_share *, struct kvs_error *);
void kvs_bring_close(struct kvs_share *); /* nothing is under way */

/* A message of the other member. False: it breaks the rules. */
bool kvs_bring_take(struct kvs_share *, struct kvs_share_link *, const struct kvs_share_message *);
bool kvs_bring_drop(struct kvs_share *, struct kvs_share_link *, const struct kvs_share_message *);

/* Answer for the pieces that have ended, and queue what may be queued. True: something changed. */
bool kvs_bring_step(struct kvs_share *);
/* Whether pieces are on their way, for any link or for this one; and whether some wait for their turn. */
bool kvs_bring_works(const struct kvs_share *, const struct kvs_share_link *);
bool kvs_bring_waits(const struct kvs_share *);

#endif
