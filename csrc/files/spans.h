/* Where the header and the bytes of an item are in memory, and what its request reads or writes. */
#ifndef KVS_FILE_SPANS_H
#define KVS_FILE_SPANS_H

#include "files/state.h"

/* Its bytes are staged in device memory, for GPUDirect Storage. */
static inline bool kvs_file_on_device(const struct kvs_file_item *item) {
  return item->transfer->pools && item->transfer->store->gds;
}
uint8_t *kvs_file_memory_of(const struct kvs_file_item *); /* its block, or its staging slot's */
uint8_t *kvs_file_header_of(const struct kvs_file_item *);
bool kvs_file_is_in_place(const struct kvs_file_item *); /* the caller's memory is read and written without a copy */
/* Copy the block between its place in scratch and the caller's memory. */
void kvs_file_copy_block(const struct kvs_file_item *, uint8_t *scratch, bool to_scratch);
void kvs_file_span_of_page(struct kvs_file_item *, uint32_t slot, uint8_t *page);
void kvs_file_span_of_block(struct kvs_file_item *, bool write);

/* Of a block that was read: KVS_OK, KVS_DAMAGED, KVS_MISSING or a device error. Sets item->spoilt. */
int kvs_file_check_block(struct kvs_file_item *, const uint8_t *data);

void kvs_file_item_queue(struct kvs_file_item *); /* its next request, for the threads that can serve it */

#endif
