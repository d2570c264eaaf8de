/* Clearing: a new epoch of a store, for all processes. */
#include <errno.h>
#include <unistd.h>

#include "files/current.h"
#include "files/directory.h"
#include "files/guard.h"

static const int64_t CLEAR_NS = 10ll * 1000 * 1000 * 1000;

static int fail_clear(int code, const char *directory, struct kvs_error *err) {
  if (code == EBUSY)
    return kvs_fail(err, KVS_BUSY, "%.200s: another process has been clearing it for %d s: nothing is cleared",
                    directory, (int)(CLEAR_NS / 1000000000));
  return kvs_file_fail(err, code, "clearing %.200s", directory);
}

/* One of several directories is enough. */
int kvs_file_clear(struct kvs_file_store *store, struct kvs_error *err) {
  int status = kvs_file_enter(store, err), code = 0;
  if (status) return status;
  for (unsigned i = 0; i < store->epochs.nplaces; i++) {
    code = kvs_file_epoch_renew(&store->faults, store->epochs.places[i].folder, CLEAR_NS);
    if (!code) break;
  }
  kvs_file_lock_current(store);
  kvs_file_leave_locked(store);
  pthread_mutex_unlock(&store->lock);
  return code ? fail_clear(code, store->settings.directory, err) : KVS_OK;
}

int kvs_file_clear_directory(const char *directory, struct kvs_error *err) {
  struct kvs_file_root root = {.path = (char *)(uintptr_t)directory, .folder = -1, .state = -1};
  struct kvs_file_faults faults = {0};
  int status = kvs_file_open_folder(&root, false, err);
  kvs_file_faults_init(&faults);
  int code = status ? 0 : kvs_file_epoch_renew(&faults, root.folder, CLEAR_NS);
  kvs_file_faults_destroy(&faults);
  if (root.folder >= 0) close(root.folder);
  return code ? fail_clear(code, directory, err) : status;
}
