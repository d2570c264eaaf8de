/* The rows of the codecs, and names. */
#ifndef KVS_CODECS_TABLE_H
#define KVS_CODECS_TABLE_H

#include "codecs/codec.h"

extern const struct kvs_codec_ops *const kvs_codecs[KVS_CODECS];
int kvs_codec_named(const char *name); /* enum kvs_codec, or -1; `raw` is not for layouts */
const char *kvs_kind_name(enum kvs_kind);
uint32_t kvs_kind_nbytes(enum kvs_kind); /* of a value */

#endif
