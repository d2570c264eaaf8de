/* Two devices in one transfer: memory of the other one, and order with its transfers. For the core's own files only. */
#ifndef KVS_PEER_H
#define KVS_PEER_H

#include "core/core.h"

/* The memory of another device among the regions of a call, or NULL (it is one other device: kvs_memory_cover saw to
 * that); *direct: kernels of the engine's device reach it. */
int kvs_peer_find(struct kvs_engine *, const struct kvs_regions *, const struct kvs_region **, bool *direct,
                  struct kvs_error *);

/* What comes before a transfer between pools that `running` does, over and above slots: the unfinished transfers of an
 * engine that touch memory of a pool. Slots are tracked by the engine of their pool alone; between engines it is the
 * pool as a whole that counts, for reads too. Under the hazard_lock of the pool's engine. */
struct kvs_foreign {
  struct kvs_engine *engine;
  uint64_t low, high;
};
struct kvs_foreign_list {
  struct kvs_foreign *items;
  size_t count, capacity;
};
int kvs_peer_collect(const struct kvs_pool *, struct kvs_engine *running, struct kvs_foreign_list *,
                     struct kvs_error *);
int kvs_peer_add_engine(struct kvs_pool *, struct kvs_engine *running,
                        struct kvs_error *);                 /* from now on `running` counts */
int kvs_peer_inherit(struct kvs_pool *, struct kvs_error *); /* a new pool: whoever is at work on its memory counts */
/* The same of memory without a pool, for `running`; and forget those who have ended their work there, and well. */
int kvs_peer_inherit_memory(struct kvs_engine *running, uint64_t low, uint64_t high, struct kvs_foreign_list *,
                            struct kvs_error *);
void kvs_peer_forget(struct kvs_foreign_list *);
int kvs_peer_wait(struct kvs_transfer *, const struct kvs_foreign *, struct kvs_error *); /* on its head */

/* As kvs_engine_drain(), of all other engines of the process. */
int kvs_peer_drain(struct kvs_engine *but, const struct kvs_region *, int64_t timeout_ns, struct kvs_error *);

/* Both engines of a transfer between pools, in an order that all threads keep; `other` may be NULL. */
void kvs_peer_lock(struct kvs_engine *running, struct kvs_engine *other);
void kvs_peer_unlock(struct kvs_engine *running, struct kvs_engine *other);

#endif
