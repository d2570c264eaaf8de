#include "codecs/fp4.h"

#include <string.h>

#include "codecs/codec.h"

enum { BLOCK = KVS_FP4_BLOCK };

static uint32_t coded_nbytes(uint32_t nbytes) { return kvs_fp4_layout_of(nbytes).nbytes; }

static inline __attribute__((always_inline)) void encode_block(struct kvs_float type, const uint16_t values[BLOCK],
                                                               uint8_t elements[BLOCK / 2], uint8_t *scale) {
  uint32_t most = 0, all;
  for (int i = 0; i < BLOCK; i++) {
    uint32_t magnitude = values[i] & ~type.sign;
    most = magnitude > most ? magnitude : most; /* NaN is larger than all others */
  }
  all = kvs_float_is_nan(type, most) ? KVS_FP4_SCALE_NAN : kvs_fp4_scale(type, kvs_float_finite(type, most));
  for (int i = 0; i < BLOCK / 2; i++)
    elements[i] = (uint8_t)(kvs_fp4_code(type, values[2 * i], all) | kvs_fp4_code(type, values[2 * i + 1], all) << 4);
  *scale = (uint8_t)all;
}

static inline __attribute__((always_inline)) void decode_block(struct kvs_float type, const uint8_t elements[BLOCK / 2],
                                                               uint8_t scale, uint16_t values[BLOCK]) {
  for (int i = 0; i < BLOCK; i++) {
    uint32_t pair = elements[i / 2];
    values[i] = (uint16_t)kvs_fp4_value(type, i & 1 ? pair >> 4 : pair, scale);
  }
}

static bool encode(const struct kvs_unit *unit, const void *values, uint8_t *coded, uint32_t *escapes) {
  const struct kvs_fp4_layout layout = kvs_fp4_layout_of(kvs_unit_nbytes(unit));
  (void)escapes;
  for (uint32_t block = 0; block < layout.blocks; block++) {
    const uint16_t *from = (const uint16_t *)values + (size_t)block * BLOCK;
    uint8_t elements[BLOCK / 2], *scale = coded + layout.scales + block;
    uint32_t first = block * BLOCK, count = layout.values - first < BLOCK ? layout.values - first : BLOCK;
    if (unit->kind == KVS_KIND_BF16)
      encode_block(kvs_bf16(), from, elements, scale);
    else
      encode_block(kvs_fp16(), from, elements, scale);
    memcpy(coded + KVS_UNIT_HEAD + first / 2, elements, (count + 1) / 2);
  }
  return true;
}

static bool decode(const struct kvs_unit *unit, const uint8_t *coded, uint32_t escapes, void *values) {
  const struct kvs_fp4_layout layout = kvs_fp4_layout_of(kvs_unit_nbytes(unit));
  for (uint32_t block = 0; block < layout.blocks; block++) {
    uint16_t *to = (uint16_t *)values + (size_t)block * BLOCK;
    uint8_t elements[BLOCK / 2] = {0}, scale = coded[layout.scales + block];
    uint32_t first = block * BLOCK, count = layout.values - first < BLOCK ? layout.values - first : BLOCK;
    memcpy(elements, coded + KVS_UNIT_HEAD + first / 2, (count + 1) / 2);
    if (unit->kind == KVS_KIND_BF16)
      decode_block(kvs_bf16(), elements, scale, to);
    else
      decode_block(kvs_fp16(), elements, scale, to);
  }
  return escapes == 0;
}

const struct kvs_codec_ops kvs_codec_fp4 = {
    .name = "fp4",
    .version = KVS_FP4_VERSION,
    .kinds = 1u << KVS_KIND_BF16 | 1u << KVS_KIND_FP16,
    .coded_nbytes = coded_nbytes,
    .encode = encode,
    .decode = decode,
};
