/* How transfers end. */
#ifndef KVS_FILE_TRANSFER_H
#define KVS_FILE_TRANSFER_H

#include "files/state.h"

void kvs_file_transfer_drop(struct kvs_file_transfer *);         /* one reference */
void kvs_file_transfer_ended_locked(struct kvs_file_transfer *); /* called when the last item has ended */
size_t kvs_file_cancel_all(struct kvs_file_store *);

#endif
