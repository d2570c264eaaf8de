/* The other writers of a shared directory. */
#ifndef KVS_FILE_PEERS_H
#define KVS_FILE_PEERS_H

#include "files/state.h"

int kvs_file_peers_find(struct kvs_file_store *, struct kvs_error *);  /* open those that are new */
int kvs_file_peers_start(struct kvs_file_store *, struct kvs_error *); /* read their headers, start the watcher */
void kvs_file_peers_stop(struct kvs_file_store *);
void kvs_file_peers_close(struct kvs_file_store *);
int kvs_file_peers_refresh(struct kvs_file_store *, struct kvs_error *);
void kvs_file_catch_up_locked(struct kvs_file_store *); /* take in what they have told; no file access */

#endif
