/* Lists of items for the mover, and the free staging slots. */
#include "files/staging.h"

void kvs_file_staging_push(struct kvs_file_item *item) {
  struct kvs_file_transfer *transfer = item->transfer;
  struct kvs_file_mover *mover = transfer->store->mover;
  bool load = transfer->kind == KVS_FILE_LOAD;
  pthread_mutex_lock(&mover->lock);
  if (!transfer->waiting.first) {
    transfer->next_waiting = NULL;
    *(mover->last[load] ? &mover->last[load]->next_waiting : &mover->first[load]) = transfer;
    mover->last[load] = transfer;
    pthread_cond_signal(&mover->changed);
  }
  kvs_file_items_append(&transfer->waiting, item);
  pthread_mutex_unlock(&mover->lock);
}

void kvs_file_staging_arrived(struct kvs_file_item *item) {
  struct kvs_file_mover *mover = item->transfer->store->mover;
  pthread_mutex_lock(&mover->lock);
  kvs_file_items_append(&mover->arrived, item);
  pthread_cond_signal(&mover->changed);
  pthread_mutex_unlock(&mover->lock);
}

void kvs_file_staging_release(struct kvs_file_item *item) {
  struct kvs_file_mover *mover = item->transfer->store->mover;
  pthread_mutex_lock(&mover->lock);
  mover->free[mover->nfree++] = item->staging;
  item->staging = UINT32_MAX;
  pthread_cond_signal(&mover->changed);
  pthread_mutex_unlock(&mover->lock);
}
