/* Codec `mxfp8`: OCP MX with e4m3 elements, in 0.516 of the size of bf16 or fp16. The arithmetic, for C and CUDA C++.
 *
 * 32 consecutive values share a scale, a power of two (e8m0: 127 + its exponent). The scale is the smallest with which
 * the largest element is at most 448, the largest e4m3. Infinity is coded as the largest finite value of its type. NaN
 * stays a NaN, and zero keeps its sign.
 *
 * Coding what was decoded gives the same bytes: each decoded element is exact in the type of the values, the largest of
 * a block decodes to a value that asks for the same scale, and a scale never makes it exceed the type.
 *
 * Behind the head: n bytes of elements, rounded up to 16; a byte a block, its scale; zeros. */
#ifndef KVS_CODECS_MXFP8_H
#define KVS_CODECS_MXFP8_H

#include "codecs/floats.h"
#include "codecs/unit.h"

enum {
  KVS_MXFP8_VERSION = 1,
  KVS_MXFP8_BLOCK = 32,
  KVS_MXFP8_MOST = 0x7e, /* 448 */
  KVS_MXFP8_NAN = 0x7f,
  KVS_MXFP8_NO_SCALE = 0xff, /* e8m0's NaN: never written, decodes to NaN */
};

struct kvs_mxfp8_layout {
  uint32_t values, blocks, scales, nbytes;
};

KVS_BOTH struct kvs_mxfp8_layout kvs_mxfp8_layout_of(uint32_t nbytes) {
  struct kvs_mxfp8_layout layout;
  layout.values = nbytes / 2u;
  layout.blocks = (layout.values + KVS_MXFP8_BLOCK - 1u) / KVS_MXFP8_BLOCK;
  layout.scales = KVS_UNIT_HEAD + kvs_round16(layout.values);
  layout.nbytes = kvs_round16(layout.scales + layout.blocks);
  return layout;
}

KVS_BOTH uint32_t kvs_mxfp8_element(struct kvs_number number, int scale) {
  number.exponent -= scale;
  return kvs_float_nearest(number, 3, -6);
}

/* The scale's exponent for the largest magnitude of a block; NaN does not count. */
KVS_BOTH int kvs_mxfp8_scale(struct kvs_float type, uint32_t most) {
  const struct kvs_number number = kvs_float_number(type, most);
  int scale = kvs_log2(number.significand) + number.exponent - 8;
  if (scale < -127) scale = -127;
  const int larger = kvs_mxfp8_element(number, scale) > KVS_MXFP8_MOST && scale < type.bias - 8;
  return scale + larger;
}

KVS_BOTH uint32_t kvs_mxfp8_code(struct kvs_float type, uint32_t value, int scale) {
  const uint32_t magnitude = value & ~type.sign, sign = value & type.sign ? 0x80u : 0u;
  const uint32_t element = kvs_mxfp8_element(kvs_float_number(type, kvs_float_finite(type, magnitude)), scale);
  const uint32_t within = element < KVS_MXFP8_MOST ? element : (uint32_t)KVS_MXFP8_MOST;
  return sign | (kvs_float_is_nan(type, magnitude) ? (uint32_t)KVS_MXFP8_NAN : within);
}

/* `scale`: the byte. */
KVS_BOTH uint32_t kvs_mxfp8_value(struct kvs_float type, uint32_t code, uint32_t scale) {
  const struct kvs_float e4m3 = {3, 7, KVS_MXFP8_MOST, 0x80u};
  const uint32_t sign = code & 0x80u ? type.sign : 0u, magnitude = code & 0x7fu;
  struct kvs_number number = kvs_float_number(e4m3, magnitude);
  number.exponent += (int)scale - 127;
  const int is_nan = magnitude == KVS_MXFP8_NAN || scale == KVS_MXFP8_NO_SCALE;
  return sign | (is_nan ? kvs_float_nan(type) : kvs_float_magnitude(type, number));
}

#endif
