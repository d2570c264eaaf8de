/* Where items wait for staging and for copies: what files/item.c gives the mover. */
#ifndef KVS_FILE_STAGING_H
#define KVS_FILE_STAGING_H

#include "files/state.h"

struct kvs_file_staging_copy; /* mover.c */

struct kvs_file_mover {
  struct kvs_file_store *store;
  struct kvs_engine *engine;
  kvs_stream streams[2]; /* [1]: loads, [0]: stores */
  uint64_t staging;      /* slot i at staging + i * slot_nbytes */
  uint32_t nslots;
  pthread_t thread;

  pthread_mutex_t pools_lock;
  struct kvs_pool **pools; /* guarded by pools_lock: staging as pools, one for each pool of a block; NULL: not opened */
  size_t npools;

  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool closed; /* guarded by lock, as are the fields below */
  uint32_t *free;
  uint32_t nfree;
  struct kvs_file_transfer *first[2], *last[2]; /* transfers with items in `waiting`; [1]: loads, [0]: others */
  struct kvs_file_items arrived;                /* items read and verified */
  struct kvs_file_turns turns;                  /* of loads and stores that wait for staging */

  struct kvs_file_staging_copy *copies[2], *last_copy[2]; /* mover.c; used by its thread only */
};

void kvs_file_staging_push(struct kvs_file_item *);    /* it holds its key, and needs staging or waits for its gate */
void kvs_file_staging_arrived(struct kvs_file_item *); /* read and verified: copy to the device */
void kvs_file_staging_release(struct kvs_file_item *); /* under store->lock: free the staging slot */

#endif
