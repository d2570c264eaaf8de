/* Readers and shared directories: find what other processes have stored since. */
#include "files/current.h"
#include "files/guard.h"
#include "files/peers.h"
#include "files/scan.h"
#include "files/segment.h"

/* Runs beside transfers: a new index is built and replaces the old one as a whole. */
static int rescan(struct kvs_file_store *store, struct kvs_error *err) {
  if (store->settings.shared) return kvs_file_peers_refresh(store, err);
  struct kvs_file_index found;
  kvs_file_lock_current(store);
  const struct kvs_file_epoch epoch = store->epochs.now; /* another one may begin during the scan */
  pthread_mutex_unlock(&store->lock);
  if (!kvs_file_index_init(&found)) return kvs_fail(err, KVS_NOMEM, "no memory for an index");
  int status = kvs_file_adopt_new(store, err);
  if (!status) status = kvs_file_scan(store, &found, err);
  kvs_file_lock_current(store);
  if (!status && kvs_file_epoch_is(&epoch, &store->epochs.now)) kvs_file_index_replace(&store->index, &found);
  pthread_mutex_unlock(&store->lock);
  kvs_file_index_free(&found);
  if (!status) kvs_file_close_removed(store);
  return status;
}

int kvs_file_refresh(struct kvs_file_store *store, struct kvs_error *err) {
  int status = kvs_file_enter(store, err);
  if (status) return status;
  pthread_mutex_lock(&store->lock);
  bool mine = !store->refreshing;
  store->refreshing = true;
  pthread_mutex_unlock(&store->lock);
  if (!mine)
    status = kvs_fail(err, KVS_UNSUPPORTED, "another thread refreshes this store already");
  else if (store->settings.readonly || store->settings.shared)
    status = rescan(store, err);
  pthread_mutex_lock(&store->lock);
  if (mine) store->refreshing = false;
  kvs_file_leave_locked(store);
  pthread_mutex_unlock(&store->lock);
  return status;
}
