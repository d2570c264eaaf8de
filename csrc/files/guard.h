/* What every call on a store begins and ends with. */
#ifndef KVS_FILE_GUARD_H
#define KVS_FILE_GUARD_H

#include "files/state.h"

int kvs_file_check_fork(const struct kvs_file_store *, struct kvs_error *);
/* Begin a call that uses the mover or the files: KVS_OK, KVS_CLOSED or KVS_FORKED. */
int kvs_file_enter(struct kvs_file_store *, struct kvs_error *);
void kvs_file_leave_locked(struct kvs_file_store *);

#endif
