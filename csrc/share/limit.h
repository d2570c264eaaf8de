/* Where the host's memory reaches less than all links (plan/host_sum.h), a member asks others for no more than is left
 * beside the links in use. The members tell each other in which directions they have unfinished loads and stores. What
 * other processes do without a member is not known, nor what this one does outside the group. Without the host's sums
 * nothing is told, and nothing is limited. For share/ only, under the member's lock. */
#ifndef KVS_SHARE_LIMIT_H
#define KVS_SHARE_LIMIT_H

#include "share/state.h"

/* In units of the own link: `shares`, which others could bring, or less. What the sum leaves beside the links in use is
 * divided among the members that are busy in this direction. A store gets nothing while a load is unfinished and both
 * directions are the limit. Less than a tenth: 0. */
double kvs_limit_shares(const struct kvs_share *, enum kvs_direction, double shares);
/* Pieces that may be asked of a link now, whose receive slots are all free or not. helpers: links that may be asked,
 * which together bring `shares`. Where less is allowed, so many pieces are on their way at most, in proportion, spread
 * over the helpers. */
unsigned kvs_limit_pieces(const struct kvs_share *, const struct kvs_share_link *, enum kvs_direction, double shares,
                          unsigned helpers);

/* Once a round: tell the others what has changed. kvs_limit_hear: one has told. False: it breaks the rules. */
void kvs_limit_tell(struct kvs_share *);
bool kvs_limit_hear(struct kvs_share_link *, const struct kvs_share_message *);

#endif
