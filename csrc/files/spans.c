/* See files/spans.h. */
#include "files/spans.h"

#include <string.h>

#include "base/crc32c.h"
#include "files/gds.h"

void kvs_file_span_of_page(struct kvs_file_item *item, uint32_t slot, uint8_t *page) {
  const struct kvs_file_store *store = item->transfer->store;
  item->request.span = (struct kvs_file_span){.fd = -1, /* set where its segment is open */
                                              .write = true,
                                              .dsync = store->settings.durability == KVS_FILE_FSYNC,
                                              .offset = kvs_file_slot_at(store, slot),
                                              .pieces = {{page, KVS_FILE_PAGE}},
                                              .npieces = 1};
}

uint8_t *kvs_file_memory_of(const struct kvs_file_item *item) { return (uint8_t *)(uintptr_t)item->address; }

/* In staging, the block directly follows its header. Other memory is read and written in place up to its last whole
 * page. Two kinds of blocks go through scratch: those in parts, and with O_DIRECT those that are not page-aligned. */
bool kvs_file_is_in_place(const struct kvs_file_item *item) {
  if (item->transfer->nparts) return false;
  return !item->transfer->store->direct || item->address % KVS_FILE_PAGE == 0;
}

void kvs_file_copy_block(const struct kvs_file_item *item, uint8_t *scratch, bool to_scratch) {
  const struct kvs_file_transfer *transfer = item->transfer;
  const size_t n = transfer->nparts ? transfer->nparts : 1;
  const uint64_t *parts = transfer->part_nbytes, whole = transfer->store->geometry.block_nbytes;
  for (size_t i = 0; i < n; i++) {
    uint64_t nbytes = parts ? parts[i] : whole;
    uint64_t address = parts ? parts[n + (size_t)(item - transfer->items) * n + i] : item->address;
    void *memory = (void *)(uintptr_t)address;
    memcpy(to_scratch ? (void *)scratch : memory, to_scratch ? memory : (void *)scratch, nbytes);
    scratch += nbytes;
  }
}

uint8_t *kvs_file_header_of(const struct kvs_file_item *item) {
  return item->transfer->pools && !kvs_file_on_device(item) ? kvs_file_memory_of(item) - KVS_FILE_PAGE
                                                            : item->request.scratch;
}

void kvs_file_span_of_block(struct kvs_file_item *item, bool write) {
  const struct kvs_file_store *store = item->transfer->store;
  const uint64_t page = KVS_FILE_PAGE, whole = store->geometry.block_nbytes / page * page;
  struct kvs_file_span *span = &item->request.span;
  uint8_t *header = kvs_file_header_of(item);
  kvs_file_span_of_page(item, item->slot, item->transfer->pools ? kvs_file_memory_of(item) - page : header);
  span->write = write;
  span->dsync = span->dsync && write;
  if (item->transfer->pools || !kvs_file_is_in_place(item)) {
    span->pieces[0].iov_len = store->geometry.slot_nbytes;
    return;
  }
  if (whole) span->pieces[span->npieces++] = (struct iovec){kvs_file_memory_of(item), whole};
  if (store->geometry.block_nbytes > whole) span->pieces[span->npieces++] = (struct iovec){header + page, page};
}

/* KVS_OK: the block and its key match the header. For a reader, another valid block in the slot is not damage: the
 * writer has replaced the block. */
int kvs_file_check_block(struct kvs_file_item *item, const uint8_t *data) {
  const struct kvs_file_store *store = item->transfer->store;
  const struct kvs_file_geometry *g = &store->geometry;
  const bool foreign = kvs_file_is_foreign(store, item->slot);
  struct kvs_file_header header;
  enum kvs_file_page page = kvs_file_header_read(kvs_file_header_of(item), &header);
  item->spoilt = page != KVS_FILE_GOOD;
  if (page == KVS_FILE_EMPTY) return foreign ? KVS_MISSING : KVS_DAMAGED;
  if (page != KVS_FILE_GOOD) return KVS_DAMAGED;
  bool same = header.key_nbytes == item->entry->key_nbytes &&
              memcmp(header.key, item->entry->key, header.key_nbytes) == 0 &&
              kvs_file_epoch_is(&header.epoch, &item->epoch) && (foreign || header.sequence == item->entry->sequence);
  if (!same) return foreign ? KVS_MISSING : KVS_DAMAGED;
  if (header.nbytes != g->block_nbytes || memcmp(header.layout_hash, g->layout_hash, 16) != 0) return KVS_DAMAGED;
  uint32_t crc;
  int status = KVS_OK;
  if (kvs_file_on_device(item))
    status = kvs_file_gds_checksum(item, &crc, &item->code);
  else
    crc = kvs_crc32c(0, data, g->block_nbytes);
  item->spoilt = !status && crc != header.data_crc;
  return status ? status : item->spoilt ? KVS_DAMAGED : KVS_OK;
}

void kvs_file_item_queue(struct kvs_file_item *item) {
  if (kvs_file_on_device(item) && item->staging != UINT32_MAX && item->phase == KVS_FILE_TRANSFER)
    kvs_file_gds_push(item);
  else
    kvs_file_queue_push(&item->transfer->store->queue, &item->request);
}
