/* The epoch of an open store. Blocks of other epochs are not in its index. */
#ifndef KVS_FILE_CURRENT_H
#define KVS_FILE_CURRENT_H

#include "files/state.h"

void kvs_file_epochs_init(struct kvs_file_epochs *);
void kvs_file_epochs_destroy(struct kvs_file_epochs *);
int kvs_file_epochs_open(struct kvs_file_store *, struct kvs_error *); /* when the segments are open, before the scan */
int kvs_file_epochs_start(struct kvs_file_store *, struct kvs_error *);
void kvs_file_epochs_stop(struct kvs_file_store *);
void kvs_file_epochs_close(struct kvs_file_store *); /* calls on keys may still come */
/* Take store->lock with an index that has no block of an epoch that ended before this call. Takes `looking` too. */
void kvs_file_lock_current(struct kvs_file_store *);

#endif
