/* A private copy of a call's keys. Another thread may modify the caller's keys during the call, so only the copy is
 * checked and used. Pure. */
#ifndef KVS_FILE_KEYS_H
#define KVS_FILE_KEYS_H

#include "kvswap_file.h"

/* Copy, then check. KVS_INVALID names a key that is too short or too long. Free the copy after KVS_OK. */
int kvs_file_keys_copy(const struct kvs_file_keys *theirs, struct kvs_file_keys *own, struct kvs_error *err);
void kvs_file_keys_free(struct kvs_file_keys *own);

/* Load one id exactly once: the compiler may not reload the id after the check. */
static inline int64_t kvs_file_id(const struct kvs_ids *ids, size_t i) {
  return ids->width == 4 ? ((const volatile int32_t *)ids->data)[i] : ((const volatile int64_t *)ids->data)[i];
}

#endif
