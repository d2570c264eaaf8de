/* How the blocks of a pool are coded: a page's units, made once from the fields, the same for all pages. Pure; constant
 * once opened, so any thread may read one. */
#ifndef KVS_CODECS_CODING_H
#define KVS_CODECS_CODING_H

#include "codecs/codec.h"

struct kvs_coding {
  uint64_t block_nbytes, page_nbytes, pages;
  uint64_t coded_page_nbytes;
  bool lossless;
  size_t nunits, capacity;
  struct kvs_unit *units; /* in order of `coded` */
};

#endif
