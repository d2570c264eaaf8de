/* The row of `fp4`: units of bf16 and fp16 by blocks of 16 values (fp4.h), of e4m3 by blocks of 32 (fp4_e4m3.h). */
#include "codecs/fp4.h"

#include <string.h>

#include "codecs/codec.h"
#include "codecs/fp4_e4m3.h"

enum { BLOCK = KVS_FP4_BLOCK, WIDE = KVS_FP4_E4M3_BLOCK };

static uint32_t coded_nbytes(uint32_t nbytes, enum kvs_kind kind) {
  return kind == KVS_KIND_E4M3 ? kvs_fp4_e4m3_layout_of(nbytes).nbytes : kvs_fp4_layout_of(nbytes).nbytes;
}

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

/* -- e4m3 ------------------------------------------------------------------------------------------------------ */

static void encode_e4m3(uint32_t nbytes, const uint8_t *values, uint8_t *coded) {
  const struct kvs_fp4_layout layout = kvs_fp4_e4m3_layout_of(nbytes);
  for (uint32_t first = 0; first < layout.values; first += WIDE) {
    uint32_t most = 0, count = layout.values - first < WIDE ? layout.values - first : WIDE;
    uint8_t codes[WIDE], elements[WIDE / 2];
    for (int i = 0; i < WIDE; i++) {
      uint32_t magnitude = values[first + (uint32_t)i] & 0x7fu;
      most = magnitude > most ? magnitude : most;
    }
    for (int i = 0; i < WIDE; i++) codes[i] = (uint8_t)kvs_fp4_e4m3_code(values[first + (uint32_t)i], most);
    for (int i = 0; i < WIDE / 2; i++) elements[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    memcpy(coded + KVS_UNIT_HEAD + first / 2, elements, (count + 1) / 2);
    coded[layout.scales + first / WIDE] = (uint8_t)most;
  }
}

static void decode_e4m3(uint32_t nbytes, const uint8_t *coded, uint8_t *values) {
  const struct kvs_fp4_layout layout = kvs_fp4_e4m3_layout_of(nbytes);
  for (uint32_t at = 0; at < layout.values; at += WIDE) {
    uint64_t levels = kvs_fp4_e4m3_levels(coded[layout.scales + at / WIDE]);
    uint32_t end = layout.values - at < WIDE ? layout.values : at + WIDE;
    for (uint32_t i = at; i < end; i++)
      values[i] = (uint8_t)kvs_fp4_e4m3_value(levels, coded[KVS_UNIT_HEAD + i / 2] >> (4 * (i & 1)));
  }
}

/* -- the row --------------------------------------------------------------------------------------------------- */

static bool encode(const struct kvs_unit *unit, const void *values, uint8_t *coded, uint32_t *escapes) {
  const struct kvs_fp4_layout layout = kvs_fp4_layout_of(kvs_unit_nbytes(unit));
  (void)escapes;
  if (unit->kind == KVS_KIND_E4M3) {
    encode_e4m3(kvs_unit_nbytes(unit), values, coded);
    return true;
  }
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
  if (unit->kind == KVS_KIND_E4M3) {
    decode_e4m3(kvs_unit_nbytes(unit), coded, values);
    return escapes == 0;
  }
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
    .kinds = 1u << KVS_KIND_BF16 | 1u << KVS_KIND_FP16 | 1u << KVS_KIND_E4M3,
    .coded_nbytes = coded_nbytes,
    .encode = encode,
    .decode = decode,
};
