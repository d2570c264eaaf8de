/* The mover: moves pool blocks through staging. */
#ifndef KVS_FILE_MOVER_H
#define KVS_FILE_MOVER_H

#include "files/state.h"

int kvs_file_mover_open(struct kvs_file_store *, struct kvs_error *);
void kvs_file_mover_close(struct kvs_file_store *); /* no item is in flight any more */
/* Sets pools, slots and gate of a transfer before its submission. */
int kvs_file_mover_prepare(struct kvs_file_transfer *, const struct kvs_file_blocks *, const struct kvs_file_options *,
                           struct kvs_error *);

#endif
