/* Reading the segments' headers. */
#ifndef KVS_FILE_SCAN_H
#define KVS_FILE_SCAN_H

#include "files/state.h"

/* Build an index from them; for a writer also the list of free slots. */
int kvs_file_scan(struct kvs_file_store *, struct kvs_file_index *, struct kvs_error *);
/* Replace what the index knows of a peer's blocks by what its headers say. */
int kvs_file_scan_peer(struct kvs_file_store *, unsigned peer, struct kvs_error *);

#endif
