/* Codec `fp4` of fields that are e4m3: e2m1 elements in 0.531 of the size, with the source's own scales beside it. The
 * arithmetic, for C and CUDA C++.
 *
 * 32 consecutive values share a scale, which is their largest magnitude itself, an e4m3. Elements are e2m1 as those of
 * fp4.h, in sixths of that magnitude, and decode to the nearest e4m3. Zero keeps its sign. A NaN makes its whole block
 * NaN, as in fp4.h. e4m3 has no infinity, and nothing saturates.
 *
 * Coding what was decoded gives the same bytes: the largest magnitude decodes to itself, and the e4m3 nearest to an
 * element is nearer to it than to any other. tests/c/test_codecs.c goes through all magnitudes and values.
 *
 * Behind the head, as in fp4.h: n / 2 bytes of elements, the even value in the low half, rounded up to 16; a byte a
 * block, its largest magnitude; zeros. */
#ifndef KVS_CODECS_FP4_E4M3_H
#define KVS_CODECS_FP4_E4M3_H

#include "codecs/fp4.h"

enum {
  KVS_FP4_E4M3_BLOCK = 32,
  KVS_E4M3_NAN = 0x7f, /* as a scale: this one and larger bytes */
};

KVS_BOTH struct kvs_fp4_layout kvs_fp4_e4m3_layout_of(uint32_t nbytes) {
  struct kvs_fp4_layout layout;
  layout.values = nbytes;
  layout.blocks = (layout.values + KVS_FP4_E4M3_BLOCK - 1u) / KVS_FP4_E4M3_BLOCK;
  layout.scales = KVS_UNIT_HEAD + kvs_round16((layout.values + 1u) / 2u);
  layout.nbytes = kvs_round16(layout.scales + layout.blocks);
  return layout;
}

/* A finite magnitude in units of the smallest one, 2^-9: below 2^18. */
KVS_BOTH uint32_t kvs_e4m3_units(uint32_t magnitude) {
  const uint32_t exponent = magnitude >> 3, hidden = exponent ? 8u : 0u;
  return (hidden | (magnitude & 7u)) << (exponent ? exponent - 1u : 0u);
}

/* The code of a value in a block with that largest magnitude: as many as there are middles between elements below it,
 * ties to even. The middles are 1, 3, 5, 7, 10, 14 and 20 of 24 parts. */
KVS_BOTH uint32_t kvs_fp4_e4m3_code(uint32_t value, uint32_t most) {
  const uint32_t parts = 24u * kvs_e4m3_units(value & 0x7fu), unit = kvs_e4m3_units(most);
  const uint32_t below = (uint32_t)(parts > unit) + (parts >= 3u * unit) + (parts > 5u * unit) + (parts >= 7u * unit) +
                         (parts > 10u * unit) + (parts >= 14u * unit) + (parts > 20u * unit);
  if (most >= KVS_E4M3_NAN) return 0;
  return (value >> 4 & 8u) | (unit ? below : 0u);
}

/* What the codes 0 to 7 of a block decode to, a byte each, the lowest first. `scale`: any byte. */
KVS_BOTH uint64_t kvs_fp4_e4m3_levels(uint32_t scale) {
  const struct kvs_float e4m3 = {3, 7, KVS_E4M3_NAN - 1u, 0x80u};
  uint64_t levels = 0;
  for (uint32_t code = 1; code < 8u; code++) {
    const uint32_t halves = code < 4u ? code : (2u + (code & 1u)) << (code / 2u - 1u); /* of 12 */
    struct kvs_number number = kvs_float_number(e4m3, scale & 0x7fu);
    const uint32_t thirds =
        16u * halves * number.significand; /* of a 64th: bits enough to round, and the rest in one */
    number.significand = thirds / 3u | (thirds % 3u ? 1u : 0u);
    number.exponent -= 6;
    levels |= (uint64_t)kvs_float_magnitude(e4m3, number) << (8u * code);
  }
  return scale >= KVS_E4M3_NAN ? 0x7f7f7f7f7f7f7f7full : levels;
}

KVS_BOTH uint32_t kvs_fp4_e4m3_value(uint64_t levels, uint32_t code) {
  return (code & 8u) << 4 | (uint32_t)(levels >> (8u * (code & 7u)) & 0xffu);
}

#endif
