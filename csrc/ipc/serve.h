/* Descriptors of chunks from one process to another, over a Unix socket that only this user reaches. For the core's own
 * files only. */
#ifndef KVS_SERVE_H
#define KVS_SERVE_H

#include "core/core.h"
#include "core/range.h"
#include "kvswap_ipc.h"

/* Serve the chunks of an export to whoever asks with its token, until the server is freed: fills in socket, token and
 * nchunks. One thread a server, which looks after all clients at once, and after each for a limited time. */
struct kvs_server;
int kvs_server_start(struct kvs_engine *, const struct kvs_chunks *, struct kvs_export *, struct kvs_server **,
                     struct kvs_error *);

/* The other side: all chunks of an export, into one range of `engine`. Start, wait (KVS_TIMEOUT: again), drop. */
struct kvs_fetch;
int kvs_fetch_start(struct kvs_engine *, const struct kvs_export *, struct kvs_fetch **, struct kvs_error *);
int kvs_fetch_wait(struct kvs_fetch *, int64_t timeout_ns, struct kvs_range **, struct kvs_error *);
void kvs_fetch_drop(struct kvs_fetch *);

#endif
