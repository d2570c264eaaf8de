/* A codec: one file, one row of kvs_codecs. No file outside codecs/ compares a codec.
 *
 * encode() and decode() see one unit: its values, contiguous and aligned, and its coded bytes behind the head. Bytes
 * that are not values, as fields of kind raw, are a codec too: `raw` copies them. */
#ifndef KVS_CODECS_CODEC_H
#define KVS_CODECS_CODEC_H

#include <stdbool.h>

#include "codecs/unit.h"
#include "kvswap_codec.h"

enum { KVS_KINDS = KVS_KIND_FP32 + 1 };

struct kvs_codec_ops {
  const char *name;
  uint8_t version;
  bool lossless;
  uint32_t kinds; /* what it codes: bits 1 << enum kvs_kind */

  /* Size of a coded unit of `nbytes` bytes of that kind, with its head: a multiple of 16. */
  uint32_t (*coded_nbytes)(uint32_t nbytes, enum kvs_kind);
  /* `coded` begins with the head, which the caller writes; the rest is zeros before. Values are 4-byte aligned, and
   * zeros follow them up to a multiple of KVS_UNIT_ROUND bytes. False: they do not fit. *escapes is 0 before. */
  bool (*encode)(const struct kvs_unit *, const void *values, uint8_t *coded, uint32_t *escapes);
  /* Any bytes may follow a good head. False: they are damaged. Room for the values is rounded up in the same way. */
  bool (*decode)(const struct kvs_unit *, const uint8_t *coded, uint32_t escapes, void *values);
};

enum { KVS_UNIT_ROUND = 1024 };

extern const struct kvs_codec_ops kvs_codec_raw, kvs_codec_exact, kvs_codec_mxfp8, kvs_codec_fp4;

#endif
