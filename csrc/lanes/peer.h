/* Transfers between two devices: memory of the other one, and order with its transfers. For the core's own files only.
 */
#ifndef KVS_PEER_H
#define KVS_PEER_H

#include "lanes/state.h"

/* The region of another device among the regions of a call, or NULL. kvs_memory_cover() admits one other device a call.
 * *direct: kernels of this engine's device can reach the region. */
int kvs_peer_find(struct kvs_engine *, const struct kvs_regions *, const struct kvs_region **, bool *direct,
                  struct kvs_error *);

int kvs_peer_collect(const struct kvs_pool *, struct kvs_engine *running, struct kvs_foreign_list *,
                     struct kvs_error *);
int kvs_peer_add_engine(struct kvs_pool *, struct kvs_engine *running,
                        struct kvs_error *); /* later transfers of the pool are ordered after those of `running` */
int kvs_peer_inherit(struct kvs_pool *, struct kvs_error *); /* a new pool: add the engines that still use its memory */
/* The same for memory without a pool. kvs_peer_forget: drop the entries whose work has ended, unless the device is
 * lost. */
int kvs_peer_inherit_memory(struct kvs_engine *running, uint64_t low, uint64_t high, struct kvs_foreign_list *,
                            struct kvs_error *);
void kvs_peer_forget(struct kvs_foreign_list *);
int kvs_peer_wait(struct kvs_transfer *, const struct kvs_foreign *,
                  struct kvs_error *); /* the transfer's head waits */

/* As kvs_engine_drain(), for all other engines of the process. */
int kvs_peer_drain(struct kvs_engine *but, const struct kvs_region *, int64_t timeout_ns, struct kvs_error *);

/* Take the hazard_lock of both engines, in one order for all threads. `other` may be NULL. */
void kvs_peer_lock(struct kvs_engine *running, struct kvs_engine *other);
void kvs_peer_unlock(struct kvs_engine *running, struct kvs_engine *other);

#endif
