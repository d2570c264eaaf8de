/* GPUDirect Storage: pool blocks through libcufile, between files and staging in device memory. Header and checksum are
 * verified before a block is copied from staging to its pool. For the file tier's own sources.
 *
 * A block takes the steps of files/mover.c and files/item.c, with these differences: staging is device memory; requests
 * of staged blocks go to a separate queue and its threads; the header is in the thread's scratch; a kernel computes the
 * checksum. */
#ifndef KVS_FILE_GDS_H
#define KVS_FILE_GDS_H

#include "files/state.h"

/* Allocate staging in device memory and set store->gds. False: store->gds_note says why it must be pinned memory. */
bool kvs_file_gds_open(struct kvs_file_store *, size_t staging_nbytes, uint64_t *staging);
void kvs_file_gds_close(struct kvs_file_store *); /* no item is in flight any more; frees the staging */
void kvs_file_gds_push(struct kvs_file_item *);   /* queue a staged item's request for the GDS threads */
/* Checksum of the block in the item's staging; called by the thread that serves the request. On failure *code is the
 * driver's code. */
int kvs_file_gds_checksum(struct kvs_file_item *, uint32_t *crc, int *code);
/* Close libcufile's driver unless a store uses it; true: it is closed. For exit and for tests. */
bool kvs_file_gds_shutdown(void);

#endif
