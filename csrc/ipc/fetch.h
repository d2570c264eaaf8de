/* Fetches descriptors of chunks from the server of another process. For the core's own files only. */
#ifndef KVS_FETCH_H
#define KVS_FETCH_H

#include "kvswap_ipc.h"
#include "lanes/state.h"
#include "memory/range.h"

/* Fetches all chunks of an export into one range of `engine`. Start, wait (again after KVS_TIMEOUT),
 * drop. */
struct kvs_fetch;
int kvs_fetch_start(struct kvs_engine *, const struct kvs_export *, struct kvs_fetch **, struct kvs_error *);
int kvs_fetch_wait(struct kvs_fetch *, int64_t timeout_ns, struct kvs_range **, struct kvs_error *);
void kvs_fetch_drop(struct kvs_fetch *);

#endif
