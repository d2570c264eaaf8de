/* How the blocks of a pool are coded: a page's units, made once from the fields, the same for all pages. Pure; constant
 * once opened, so any thread may read one. */
#ifndef KVS_CODECS_CODING_H
#define KVS_CODECS_CODING_H

#include <stdatomic.h>

#include "codecs/codec.h"

struct kvs_coding {
  atomic_uint refs;
  uint64_t block_nbytes, page_nbytes, pages;
  uint64_t coded_page_nbytes;
  bool lossless;
  size_t nunits, capacity;
  struct kvs_unit *units; /* in order of `coded` */
};

static inline uint64_t kvs_coding_nbytes(const struct kvs_coding *coding) { /* of a coded block */
  return coding->coded_page_nbytes * coding->pages;
}

/* One more reference, which kvs_coding_close() drops. */
const struct kvs_coding *kvs_coding_ref(const struct kvs_coding *);
/* Whether both code the same blocks to the same bytes. */
bool kvs_coding_is(const struct kvs_coding *, const struct kvs_coding *);

#endif
