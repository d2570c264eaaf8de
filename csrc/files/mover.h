/* Pool blocks through staging, as files/item.c sees it. */
#ifndef KVS_FILE_MOVER_H
#define KVS_FILE_MOVER_H

#include "files/state.h"

int kvs_file_mover_open(struct kvs_file_store *, struct kvs_error *);
void kvs_file_mover_close(struct kvs_file_store *); /* no item is in flight any more */
int kvs_file_mover_prepare(struct kvs_file_transfer *, const struct kvs_file_blocks *, const struct kvs_file_options *,
                           struct kvs_error *);   /* sets pools, slots and gate before submission */
void kvs_file_mover_push(struct kvs_file_item *); /* the item holds its key and needs staging or waits for its gate */
void kvs_file_mover_arrived(struct kvs_file_item *); /* read and verified: copy to the device */
void kvs_file_mover_release(struct kvs_file_item *); /* under store->lock: free the staging slot */

#endif
