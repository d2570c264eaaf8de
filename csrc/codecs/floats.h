/* Small floating-point types, by integer arithmetic: it needs no rounding mode, flushes no subnormals, and gives the
 * same bits on every processor. For C and CUDA C++. */
#ifndef KVS_CODECS_FLOATS_H
#define KVS_CODECS_FLOATS_H

#include "codecs/both.h"

/* A type with a sign bit above `mantissa` bits of mantissa and an exponent. A magnitude is a value without its sign;
 * magnitudes up to `most` are finite, then comes infinity, then NaN. */
struct kvs_float {
  int mantissa, bias;
  uint32_t most, sign;
};

KVS_BOTH struct kvs_float kvs_bf16(void) {
  const struct kvs_float type = {7, 127, 0x7f7fu, 0x8000u};
  return type;
}

KVS_BOTH struct kvs_float kvs_fp16(void) {
  const struct kvs_float type = {10, 15, 0x7bffu, 0x8000u};
  return type;
}

KVS_BOTH uint32_t kvs_float_nan(struct kvs_float type) { return (type.most + 1u) | 1u << (type.mantissa - 1); }

/* Infinity counts as the largest finite value. */
KVS_BOTH uint32_t kvs_float_finite(struct kvs_float type, uint32_t magnitude) {
  return magnitude < type.most ? magnitude : type.most;
}

KVS_BOTH int kvs_float_is_nan(struct kvs_float type, uint32_t magnitude) { return magnitude > type.most + 1u; }

/* A number: significand * 2^exponent, the significand below 2^12. */
struct kvs_number {
  uint32_t significand;
  int exponent;
};

KVS_BOTH struct kvs_number kvs_float_number(struct kvs_float type, uint32_t magnitude) {
  const uint32_t exponent = magnitude >> type.mantissa, hidden = exponent ? 1u << type.mantissa : 0u;
  struct kvs_number number;
  number.significand = (magnitude & ((1u << type.mantissa) - 1u)) | hidden;
  number.exponent = (int)(exponent ? exponent : 1u) - type.bias - type.mantissa;
  return number;
}

enum { KVS_LOG2_OF_0 = -1024 };

/* The exponent of the highest bit; of 0: below that of every number. */
KVS_BOTH int kvs_log2(uint32_t value) {
#if defined(__CUDA_ARCH__)
  return value ? 31 - __clz((int)value) : KVS_LOG2_OF_0;
#else
  union {
    float number; /* exact, and vectorised on every processor */
    uint32_t bits;
  } as;
  as.number = (float)(int32_t)value;
  return value ? (int)(as.bits >> 23) - 127 : KVS_LOG2_OF_0;
#endif
}

/* Divided by 2^by, to nearest, ties to even. */
KVS_BOTH uint32_t kvs_halve(uint32_t value, int by) {
  const uint32_t half = 1u << by >> 1;
  return (value + half - (by ? 1u : 0u) + (by ? value >> by & 1u : 0u)) >> by;
}

/* The magnitude of a type with that mantissa and smallest normal exponent, nearest to the number, ties to even. The
 * exponent has no upper limit: the caller compares with the largest magnitude. */
KVS_BOTH uint32_t kvs_float_nearest(struct kvs_number number, int mantissa, int least) {
  const int top = kvs_log2(number.significand) + number.exponent, exponent = top > least ? top : least;
  const int drop = exponent - mantissa - number.exponent;
  const uint32_t up = number.significand << (-drop & 31),
                 down = kvs_halve(number.significand, drop > 0 ? (drop & ~31 ? 31 : drop) : 0);
  return ((uint32_t)(exponent - least) << mantissa) + (drop > 0 ? down : up);
}

/* The same, within the type. */
KVS_BOTH uint32_t kvs_float_magnitude(struct kvs_float type, struct kvs_number number) {
  return kvs_float_finite(type, kvs_float_nearest(number, type.mantissa, 1 - type.bias));
}

#endif
