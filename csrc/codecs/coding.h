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
  char *text; /* kvs_coding_text() */
  size_t nunits, capacity;
  struct kvs_unit *units; /* in order of `coded` */
  uint32_t largest_unit;  /* bytes */
};

static inline uint64_t kvs_coding_nbytes(const struct kvs_coding *coding) { /* of a coded block */
  return coding->coded_page_nbytes * coding->pages;
}

/* Whether both code the same blocks to the same bytes. */
bool kvs_coding_is(const struct kvs_coding *, const struct kvs_coding *);
/* What the heads of a coded block say. GOOD: no unit is missing or of another coding; what stands behind the heads is
 * not looked at. */
enum kvs_coded kvs_coding_check(const struct kvs_coding *, const void *coded);

#endif
