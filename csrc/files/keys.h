/* A call's own keys. The caller's may change while the call runs, by another thread: what was checked is what is used.
 * Pure. */
#ifndef KVS_FILE_KEYS_H
#define KVS_FILE_KEYS_H

#include "kvswap_file.h"

/* Read once, then checked: KVS_INVALID names a key that is too short or too long. To be freed where it is KVS_OK. */
int kvs_file_keys_copy(const struct kvs_file_keys *theirs, struct kvs_file_keys *own, struct kvs_error *err);
void kvs_file_keys_free(struct kvs_file_keys *own);

/* One id, loaded once: the compiler may not read it again behind a check. */
static inline int64_t kvs_file_id(const struct kvs_ids *ids, size_t i) {
  return ids->width == 4 ? ((const volatile int32_t *)ids->data)[i] : ((const volatile int64_t *)ids->data)[i];
}

#endif
