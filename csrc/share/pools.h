/* The pools of a member: the checks when it opens, pools over slots, and the verdicts of coded blocks. */
#ifndef KVS_SHARE_POOLS_H
#define KVS_SHARE_POOLS_H

#include "share/state.h"

/* When a member opens: check its pools, and set kv_nbytes and `whole`. */
int kvs_share_pools_check(struct kvs_share *, struct kvs_error *);

/* Memory at `base` for so many blocks of the host's form, as pools: one for each pool of the host, coded as that one
 * is. Closing takes what opening made, also in part, and NULL. */
int kvs_share_pools_open(const struct kvs_share *, uint64_t base, uint64_t blocks, struct kvs_pool ***,
                         struct kvs_error *);
void kvs_share_pools_close(const struct kvs_share *, struct kvs_pool **);

/* Whether all blocks that failed in a transfer with that error did so by their verdicts. */
bool kvs_share_is_verdict(int status);
/* The job's error, if it has none yet, from that of one of its transfers. */
void kvs_share_explain(const struct kvs_share *, struct kvs_share_job *, const struct kvs_error *);

/* Digests of what members of a shared job must agree on. mix_pool: which bytes of the blocks a pool has, and how they
 * are coded. */
uint64_t kvs_share_mix(uint64_t digest, uint64_t word);
uint64_t kvs_share_mix_pool(const struct kvs_share *, size_t pool, uint64_t digest);

#endif
