#include "codecs/mxfp8.h"

#include <string.h>

#include "codecs/codec.h"

enum { BLOCK = KVS_MXFP8_BLOCK };

static uint32_t coded_nbytes(uint32_t nbytes, enum kvs_kind kind) {
  (void)kind;
  return kvs_mxfp8_layout_of(nbytes).nbytes;
}

static inline __attribute__((always_inline)) void encode_block(struct kvs_float type, const uint16_t values[BLOCK],
                                                               uint8_t elements[BLOCK], uint8_t *scale) {
  uint32_t most = 0;
  for (int i = 0; i < BLOCK; i++) {
    uint32_t magnitude = values[i] & ~type.sign,
             counted = kvs_float_is_nan(type, magnitude) ? 0 : kvs_float_finite(type, magnitude);
    most = counted > most ? counted : most;
  }
  int exponent = kvs_mxfp8_scale(type, most);
  for (int i = 0; i < BLOCK; i++) elements[i] = (uint8_t)kvs_mxfp8_code(type, values[i], exponent);
  *scale = (uint8_t)(exponent + 127);
}

static inline __attribute__((always_inline)) void decode_block(struct kvs_float type, const uint8_t elements[BLOCK],
                                                               uint8_t scale, uint16_t values[BLOCK]) {
  for (int i = 0; i < BLOCK; i++) values[i] = (uint16_t)kvs_mxfp8_value(type, elements[i], scale);
}

static bool encode(const struct kvs_unit *unit, const void *values, uint8_t *coded, uint32_t *escapes) {
  const struct kvs_mxfp8_layout layout = kvs_mxfp8_layout_of(kvs_unit_nbytes(unit));
  (void)escapes;
  for (uint32_t block = 0; block < layout.blocks; block++) {
    const uint16_t *from = (const uint16_t *)values + (size_t)block * BLOCK;
    uint8_t elements[BLOCK], *scale = coded + layout.scales + block;
    uint32_t first = block * BLOCK, count = layout.values - first < BLOCK ? layout.values - first : BLOCK;
    if (unit->kind == KVS_KIND_BF16)
      encode_block(kvs_bf16(), from, elements, scale);
    else
      encode_block(kvs_fp16(), from, elements, scale);
    memcpy(coded + KVS_UNIT_HEAD + first, elements, count);
  }
  return true;
}

static bool decode(const struct kvs_unit *unit, const uint8_t *coded, uint32_t escapes, void *values) {
  const struct kvs_mxfp8_layout layout = kvs_mxfp8_layout_of(kvs_unit_nbytes(unit));
  for (uint32_t block = 0; block < layout.blocks; block++) {
    uint16_t *to = (uint16_t *)values + (size_t)block * BLOCK;
    uint8_t elements[BLOCK] = {0}, scale = coded[layout.scales + block];
    uint32_t first = block * BLOCK, count = layout.values - first < BLOCK ? layout.values - first : BLOCK;
    memcpy(elements, coded + KVS_UNIT_HEAD + first, count);
    if (unit->kind == KVS_KIND_BF16)
      decode_block(kvs_bf16(), elements, scale, to);
    else
      decode_block(kvs_fp16(), elements, scale, to);
  }
  return escapes == 0;
}

const struct kvs_codec_ops kvs_codec_mxfp8 = {
    .name = "mxfp8",
    .version = KVS_MXFP8_VERSION,
    .kinds = 1u << KVS_KIND_BF16 | 1u << KVS_KIND_FP16,
    .coded_nbytes = coded_nbytes,
    .encode = encode,
    .decode = decode,
};
