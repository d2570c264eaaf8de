/* Codec `fp4`: e2m1 elements with unsigned e5m3 scales, in 0.282 of the size of bf16 or fp16. The arithmetic, for C and
 * CUDA C++.
 *
 * 16 consecutive values share a scale. This is NVFP4 with one difference: the sign bit of its e4m3 scale, which is
 * never set there, is a fifth bit of the exponent here. So scales reach from 2^-17 to 114688, and no scale of the whole
 * tensor is needed, which a cache could not know before it has seen all values.
 *
 * The scale is a sixth of the block's largest magnitude, rounded to nearest, so that the largest element is 6. Values
 * beyond 688128 become that. Infinity counts as the largest finite value of its type. A NaN makes its whole block NaN:
 * e2m1 has none. Zero keeps its sign.
 *
 * Coding what was decoded gives the same bytes: 6 times the scale asks for the same scale, and elements times scales
 * are exact in bf16 and fp16.
 *
 * Behind the head: n / 2 bytes of elements, the even value in the low half, rounded up to 16; a byte a block, its
 * scale; zeros. */
#ifndef KVS_CODECS_FP4_H
#define KVS_CODECS_FP4_H

#include "codecs/floats.h"
#include "codecs/unit.h"

enum {
  KVS_FP4_VERSION = 1,
  KVS_FP4_BLOCK = 16,
  KVS_FP4_SCALE_LEAST = -17, /* exponent of the smallest scale */
  KVS_FP4_SCALE_MOST = 0xfe,
  KVS_FP4_SCALE_NAN = 0xff,
};

struct kvs_fp4_layout {
  uint32_t values, blocks, scales, nbytes;
};

KVS_BOTH struct kvs_fp4_layout kvs_fp4_layout_of(uint32_t nbytes) {
  struct kvs_fp4_layout layout;
  layout.values = nbytes / 2u;
  layout.blocks = (layout.values + KVS_FP4_BLOCK - 1u) / KVS_FP4_BLOCK;
  layout.scales = KVS_UNIT_HEAD + kvs_round16((layout.values + 1u) / 2u);
  layout.nbytes = kvs_round16(layout.scales + layout.blocks);
  return layout;
}

/* A scale: 0 to 15 times 2^exponent. */
KVS_BOTH struct kvs_number kvs_fp4_scale_number(uint32_t scale) {
  struct kvs_number number;
  number.significand = scale < 8u ? scale : 8u + (scale & 7u);
  number.exponent = KVS_FP4_SCALE_LEAST + (scale < 8u ? 0 : (int)(scale >> 3) - 1);
  return number;
}

KVS_BOTH int kvs_fp4_within(int shift) { return shift < 0 ? 0 : shift > 16 ? 16 : shift; }

/* The element nearest to number / scale, 0 to 7: as many as there are middles between elements below it, ties to even.
 * The middles are 1, 3, 5, 7, 10, 14 and 20 quarters. */
KVS_BOTH uint32_t kvs_fp4_element(struct kvs_number number, struct kvs_number scale) {
  const int up = number.exponent + 2 - scale.exponent;
  const uint32_t quarters = number.significand << kvs_fp4_within(up), unit = scale.significand << kvs_fp4_within(-up);
  const uint32_t below = (uint32_t)(quarters > unit) + (quarters >= 3u * unit) + (quarters > 5u * unit) +
                         (quarters >= 7u * unit) + (quarters > 10u * unit) + (quarters >= 14u * unit) +
                         (quarters > 20u * unit);
  return unit ? below : 0u;
}

/* The scale for the largest magnitude of a block. */
KVS_BOTH uint32_t kvs_fp4_scale(struct kvs_float type, uint32_t most) {
  const struct kvs_number number = kvs_float_number(type, most);
  const int high = kvs_log2(number.significand);
  if (!number.significand) return 0;
  const int sixth = high + number.exponent - (2u * number.significand >= 3u << high ? 2 : 3);
  const int exponent = sixth - 3 > KVS_FP4_SCALE_LEAST ? sixth - 3 : KVS_FP4_SCALE_LEAST;
  const int up = number.exponent - exponent;
  const uint32_t value = number.significand << kvs_fp4_within(up), six = 6u << kvs_fp4_within(-up);
  const uint32_t whole = (value >> kvs_fp4_within(-up)) / 6u, twice = 2u * (value - whole * six);
  uint32_t scale =
      ((uint32_t)(exponent - KVS_FP4_SCALE_LEAST) << 3) + whole + (twice > six || (twice == six && (whole & 1u)));
  /* 6 times the scale is a value of the type: in fp16 the largest scale is 10240. */
  const uint32_t limit =
      type.bias < 127 ? ((uint32_t)(10 - KVS_FP4_SCALE_LEAST) << 3) + 10u : (uint32_t)KVS_FP4_SCALE_MOST;
  if (scale > limit) scale = limit;
  if (scale && kvs_fp4_element(number, kvs_fp4_scale_number(scale)) != 7u) scale--; /* among the smallest scales */
  return scale;
}

/* 4 bits. */
KVS_BOTH uint32_t kvs_fp4_code(struct kvs_float type, uint32_t value, uint32_t scale) {
  const uint32_t sign = value & type.sign ? 8u : 0u, magnitude = kvs_float_finite(type, value & ~type.sign);
  if (scale == KVS_FP4_SCALE_NAN) return 0;
  return sign | kvs_fp4_element(kvs_float_number(type, magnitude), kvs_fp4_scale_number(scale));
}

KVS_BOTH uint32_t kvs_fp4_value(struct kvs_float type, uint32_t code, uint32_t scale) {
  const uint32_t sign = code & 8u ? type.sign : 0u, element = code & 7u;
  const uint32_t halves = element < 4u ? element : (2u + (element & 1u)) << (element / 2u - 1u);
  struct kvs_number number = kvs_fp4_scale_number(scale);
  number.significand *= halves;
  number.exponent -= 1;
  return sign | (scale == KVS_FP4_SCALE_NAN ? kvs_float_nan(type) : kvs_float_magnitude(type, number));
}

#endif
