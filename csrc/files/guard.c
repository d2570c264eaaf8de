/* Calls on a store: none in the child of a fork, none on a closed store; closing waits for those in progress. */
#include "files/guard.h"

int kvs_file_check_fork(const struct kvs_file_store *store, struct kvs_error *err) {
  if (store->fork_generation == kvs_fork_generation()) return KVS_OK;
  return kvs_fail(err, KVS_FORKED,
                  "this store was opened before fork(): a child process cannot use it; open it again in the child, "
                  "with readonly while the parent writes");
}

int kvs_file_enter(struct kvs_file_store *store, struct kvs_error *err) {
  int status = kvs_file_check_fork(store, err);
  if (status) return status;
  pthread_mutex_lock(&store->lock);
  if (store->closing) status = kvs_fail(err, KVS_CLOSED, "the store is closed");
  store->entered += !status;
  pthread_mutex_unlock(&store->lock);
  return status;
}

void kvs_file_leave_locked(struct kvs_file_store *store) {
  if (--store->entered == 0) pthread_cond_broadcast(&store->ended);
}
