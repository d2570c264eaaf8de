/* See files/keys.h. */
#include "files/keys.h"

#include <stdlib.h>
#include <string.h>

#include "status.h"

static int check(const size_t *ends, size_t count, struct kvs_error *err) {
  size_t begin = 0;
  for (size_t i = 0; i < count; begin = ends[i++])
    if (ends[i] - begin < 1 || ends[i] - begin > KVS_FILE_KEY_NBYTES)
      return kvs_fail(err, KVS_INVALID, "keys[%zu] has %zu bytes: a key has 1 to %d", i, ends[i] - begin,
                      KVS_FILE_KEY_NBYTES);
  return KVS_OK;
}

/* One allocation: the ends, then the bytes. */
int kvs_file_keys_copy(const struct kvs_file_keys *theirs, struct kvs_file_keys *own, struct kvs_error *err) {
  const size_t count = theirs->count, room = (count + 1) * sizeof(size_t);
  if (count > UINT32_MAX) return kvs_fail(err, KVS_INVALID, "keys has %zu items: too many", count);
  size_t *ends = malloc(room);
  if (!ends) return kvs_fail(err, KVS_NOMEM, "no memory for %zu keys", count);
  if (count) memcpy(ends, theirs->ends, count * sizeof *ends);
  int status = check(ends, count, err);
  const size_t nbytes = status || !count ? 0 : ends[count - 1];
  size_t *grown = status ? NULL : realloc(ends, room + nbytes);
  if (!grown) {
    free(ends);
    return status ? status : kvs_fail(err, KVS_NOMEM, "no memory for %zu keys", count);
  }
  uint8_t *data = (uint8_t *)grown + room;
  if (nbytes) memcpy(data, theirs->data, nbytes);
  *own = (struct kvs_file_keys){data, grown, count};
  return KVS_OK;
}

void kvs_file_keys_free(struct kvs_file_keys *own) { free((size_t *)(uintptr_t)own->ends); }
