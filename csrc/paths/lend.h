/* Links that other devices lend: taking them for a transfer, and the stages of its pieces. lanes/lent.h has the
 * structs. For the core's own files only. */
#ifndef KVS_LEND_H
#define KVS_LEND_H

#include "paths/submission.h"

/* Hold the links that may serve this transfer now: s->lent. A link serves no one while its own device comes first
 * (kvs_lender_is_first), or while another lane's transfer that uses it may still wait. False: none. */
bool kvs_lent_take(struct kvs_submission *);
/* Whether a device's own transfers in that direction are unfinished, but for those that have begun and use the link of
 * `borrower`, if it is not NULL. */
bool kvs_lent_is_busy(struct kvs_engine *lender, enum kvs_direction, struct kvs_engine *borrower);
/* Whether a lender's own transfers keep the borrower's off its link: those in that direction, as above, and any load
 * keeps a store off. */
bool kvs_lender_is_first(struct kvs_engine *lender, enum kvs_direction, struct kvs_engine *borrower);
void kvs_lent_release(struct kvs_submission *);

/* The links of the devices of this process, for the host's sum (plan/host_sum.h). kvs_link_counts: whether the device
 * counts, in what `engine` asks. kvs_links_busy: GB/s by direction, of the links that carry transfers of their own
 * device or of a borrower; the own link in `direction` is left out. */
bool kvs_link_counts(const struct kvs_engine *, const struct kvs_engine *other);
double kvs_link_gbps(const struct kvs_engine *, enum kvs_direction);
void kvs_links_busy(struct kvs_engine *, enum kvs_direction, double busy_gbps[2]);
/* Let go of links whose slots are too small for the packed rows. */
void kvs_lent_fit(struct kvs_submission *);

/* The link that takes the next burst: the one with the least to do, or NULL for the device's own. kvs_lent_give: it
 * has taken so many bytes. kvs_lent_shares: the sum of the shares of the links that still take some. */
struct kvs_lent_way *kvs_lent_next(const struct kvs_submission *);
double kvs_lent_shares(const struct kvs_submission *);
void kvs_lent_give(struct kvs_submission *, struct kvs_lent_way *, uint64_t nbytes);

/* Before the bursts of a view: first stages begin after s->first, last ones also after what the lane stream held when
 * the transfer began. Afterwards: the lane stream waits for all pieces. After a refusal, when a piece may be queued in
 * part, kvs_lent_unsettle() and then kvs_lent_rejoin(), which does the same. */
int kvs_lent_begin(struct kvs_submission *, struct kvs_error *why);
int kvs_lent_end(struct kvs_submission *, struct kvs_error *why);
void kvs_lent_unsettle(struct kvs_submission *);
int kvs_lent_rejoin(struct kvs_submission *, struct kvs_error *why);

/* A stage of the next piece, from its first command to its last: the stages of a piece in order. The second one needs
 * no more than kvs_lent_hop(). kvs_lent_next_piece: the piece is queued. */
int kvs_lent_enter(struct kvs_submission *, struct kvs_lent_way *, unsigned stage, struct kvs_error *why);
int kvs_lent_leave(const struct kvs_lent_way *, unsigned stage, struct kvs_error *why);
int kvs_lent_hop(struct kvs_submission *, struct kvs_lent_way *, uint64_t nbytes, struct kvs_error *why);
void kvs_lent_next_piece(struct kvs_lent_way *);
/* The status of a call on the lender's device: its loss is a refusal. */
int kvs_lent_blame(const struct kvs_lent_way *, int status, struct kvs_error *why);
/* Addresses of that piece's slots. */
static inline uint64_t kvs_lent_near(const struct kvs_lent_way *way) {
  return way->near + way->next * way->lending.slot_nbytes;
}
static inline uint64_t kvs_lent_far(const struct kvs_lent_way *way) {
  return way->far + way->next * way->lending.slot_nbytes;
}

#endif
