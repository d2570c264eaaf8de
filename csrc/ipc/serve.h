/* Passes descriptors of chunks to processes of the same user, over a Unix socket. For the core's own files only. */
#ifndef KVS_SERVE_H
#define KVS_SERVE_H

#include "kvswap_ipc.h"
#include "lanes/state.h"
#include "memory/range.h"

/* Serve the chunks of an export to any process with its token, until the server is freed. Fills in socket, token and
 * nchunks. A server has one thread for all its clients, each with a deadline. */
struct kvs_server;
int kvs_server_start(struct kvs_engine *, const struct kvs_chunks *, struct kvs_export *, struct kvs_server **,
                     struct kvs_error *);

#endif
