/* Codecs: blocks that are smaller in host memory and on the link. A part of the C surface, beside kvswap.h; nothing
 * here needs a device. docs/codecs.md says what each codec is for. */
#ifndef KVSWAP_CODEC_H
#define KVSWAP_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvswap_status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the bytes of a field are. */
enum kvs_kind { KVS_KIND_RAW, KVS_KIND_BF16, KVS_KIND_FP16, KVS_KIND_E4M3, KVS_KIND_E5M2, KVS_KIND_FP32 };

/* Bytes [offset, offset + nbytes) of each repetition. */
struct kvs_field {
  uint64_t offset, nbytes;
  enum kvs_kind kind;
  const char *codec; /* NULL: the layout's, where that one codes the kind, else the bytes are kept as they are; "raw":
                        they are kept in any case */
  uint64_t reserved[2];
};

/* How blocks are coded. A block is pages of equal size: one tensor's part each. The fields repeat every `pitch` bytes
 * of a page; what no field names is kept as it is. Nothing is coded across pages, fields, or repetitions of a field
 * that fills the pitch, so K and V halves are best named as fields of their own. */
struct kvs_coding_layout {
  uint64_t block_nbytes;
  uint64_t page_nbytes; /* 0: the block is one page */
  uint64_t pitch;       /* 0: a page */
  const char *codec;    /* "exact", "mxfp8", "fp4" */
  const struct kvs_field *fields;
  size_t nfields; /* 0: all bytes are bf16 */
  uint64_t reserved[4];
};

struct kvs_coding_info {
  uint64_t block_nbytes, page_nbytes;
  uint64_t coded_nbytes;      /* of a block: a multiple of 16, the same for all blocks */
  uint64_t coded_page_nbytes; /* of a page, which lies at page * coded_page_nbytes */
  uint64_t units;             /* of a page: the pieces that are coded by themselves */
  bool lossless;
  uint64_t reserved[4];
};

/* What became of a block. */
enum kvs_coded { KVS_CODED_GOOD, KVS_CODED_NOT_STORED, KVS_CODED_DAMAGED };

/* Addresses of blocks that are not coded: page p of block b is at ptr + b * stride + p * page_stride. */
struct kvs_blocks {
  void *ptr;
  uint64_t stride, page_stride; /* 0: contiguous */
};

struct kvs_coding;
KVS_API int kvs_coding_open(const struct kvs_coding_layout *layout, struct kvs_coding **coding, struct kvs_error *err);
KVS_API void kvs_coding_close(struct kvs_coding *coding); /* NULL is ignored */
/* One more reference, which kvs_coding_close() drops. */
KVS_API const struct kvs_coding *kvs_coding_ref(const struct kvs_coding *coding);
KVS_API void kvs_coding_get_info(const struct kvs_coding *coding, struct kvs_coding_info *info);
/* All that the coded bytes depend on, as a JSON object: sizes, fields, codecs and their versions. Codings with equal
 * texts give equal bytes for equal blocks. The text lives as long as the coding. */
KVS_API const char *kvs_coding_text(const struct kvs_coding *coding);

/* Encode `count` blocks, coded_stride apart (at least coded_nbytes; any alignment). The bytes of each page behind
 * valid_nbytes (UINT64_MAX: none) are read as zeros. The same block always gives the same bytes. verdicts[b] is GOOD or
 * NOT_STORED: that block does not fit, and must not be kept. Returns how many are not GOOD. Any thread may call. */
KVS_API size_t kvs_encode_blocks(const struct kvs_coding *coding, const struct kvs_blocks *from, uint64_t valid_nbytes,
                                 void *coded, uint64_t coded_stride, size_t count, uint8_t *verdicts);
/* Decode. Any bytes can be given: nothing outside the blocks is read or written. Of a block that is not GOOD the units
 * that cannot be decoded are zeros. Returns how many are not GOOD. */
KVS_API size_t kvs_decode_blocks(const struct kvs_coding *coding, const void *coded, uint64_t coded_stride,
                                 const struct kvs_blocks *to, size_t count, uint8_t *verdicts);

#ifdef __cplusplus
}
#endif
#endif
