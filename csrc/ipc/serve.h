/* Descriptors of chunks from one process to another, over a Unix socket that only this user reaches. For the core's own
 * files only. */
#ifndef KVS_SERVE_H
#define KVS_SERVE_H

#include "core/core.h"
#include "core/range.h"
#include "kvswap_ipc.h"

/* Serve the chunks of an export to whoever asks with its token, until the server is freed: fills in socket, token and
 * nchunks. One thread a server, which waits for nothing but for clients, and for each of those a few seconds. */
struct kvs_server;
int kvs_server_start(struct kvs_engine *, const struct kvs_chunks *, struct kvs_export *, struct kvs_server **,
                     struct kvs_error *);

/* The other side: all chunks of an export, into one range of `engine`. */
int kvs_serve_fetch(struct kvs_engine *, const struct kvs_export *, struct kvs_range **, struct kvs_error *);

#endif
