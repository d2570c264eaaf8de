/* Codec `fp4` by one CTA: 2 lanes have a block of 16 values. Two bf16 are coded together, as integers: a value is above
 * a middle between two elements if its bits are above those of the middle, rounded down. */
#ifndef KVS_CODECS_FP4_CUH
#define KVS_CODECS_FP4_CUH

#include "codecs/fp4.h"
#include "codecs/page.cuh"

/* -- by the arithmetic of fp4.h, not inlined: the common case stays short --------------------------------------- */

static __device__ __noinline__ uint32_t fp4_codes_of(const uint4 words, const struct kvs_float type, uint32_t scale) {
  uint32_t codes = 0;
#pragma unroll 2
  for (uint32_t i = 0; i < CODE_VALUES; i++) codes |= kvs_fp4_code(type, half_word(words, i), scale) << (4u * i);
  return codes;
}

static __device__ __noinline__ uint4 fp4_values_of(uint32_t codes, const struct kvs_float type, uint32_t scale) {
  uint32_t pairs[4] = {0, 0, 0, 0};
#pragma unroll
  for (uint32_t i = 0; i < CODE_VALUES; i++)
    pairs[i / 2u] |= kvs_fp4_value(type, codes >> (4u * i) & 15u, scale) << (16u * (i % 2u));
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

/* -- bf16 ------------------------------------------------------------------------------------------------------- */

/* A scale that is no NaN. */
static __device__ __forceinline__ float fp4_scale_float(uint32_t scale) {
  const struct kvs_number number = kvs_fp4_scale_number(scale);
  return (float)number.significand * __uint_as_float((uint32_t)(127 + number.exponent) << 23);
}

/* What is to be added to a pair of magnitudes, so that those above `middle` become positive. Ties are above it. */
static __device__ __forceinline__ uint32_t fp4_middle(float middle, uint32_t ties) {
  const uint32_t bits = (__float_as_uint(middle) - ties) >> 16;
  return (0x10000u - bits & 0xffffu) * 0x00010001u;
}

static __device__ __forceinline__ uint32_t fp4_codes(const uint4 &words, uint32_t scale) {
  const float quarter = scale == 0 ? __uint_as_float(0x7f800000u) : 0.25f * fp4_scale_float(scale);
  const uint32_t middles[7] = {fp4_middle(quarter, 0),         fp4_middle(3.0f * quarter, 1),
                               fp4_middle(5.0f * quarter, 0),  fp4_middle(7.0f * quarter, 1),
                               fp4_middle(10.0f * quarter, 0), fp4_middle(14.0f * quarter, 1),
                               fp4_middle(20.0f * quarter, 0)};
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
  uint32_t codes[4];
#pragma unroll
  for (uint32_t i = 0; i < 4u; i++) {
    const uint32_t magnitudes = __vminu2(pairs[i] & 0x7fff7fffu, 0x7f7f7f7fu);
    codes[i] = pairs[i] >> 12 & 0x00080008u;
#pragma unroll
    for (uint32_t k = 0; k < 7u; k++) codes[i] += __viaddmin_s16x2_relu(magnitudes, middles[k], 0x00010001u);
  }
  return join_codes(codes);
}

/* The bytes of the 8 magnitudes of a scale, which the codes select. */
struct fp4_table {
  uint32_t low[2], high[2];
};

static __device__ __forceinline__ struct fp4_table fp4_table_of(uint32_t scale) {
  const float half = 0.5f * fp4_scale_float(scale);
  const uint32_t one = __float_as_uint(half), three = __float_as_uint(3.0f * half), two = __float_as_uint(2.0f * half),
                 four = __float_as_uint(4.0f * half), six = __float_as_uint(6.0f * half),
                 eight = __float_as_uint(8.0f * half), twelve = __float_as_uint(12.0f * half);
  if (scale == KVS_FP4_SCALE_NAN) return {{0xc0c0c0c0u, 0xc0c0c0c0u}, {0x7f7f7f7fu, 0x7f7f7f7fu}};
  return {{__byte_perm(one << 8 & 0xff000000u, __byte_perm(two, three, 0x0062), 0x5430),
           __byte_perm(__byte_perm(four, six, 0x0062), __byte_perm(eight, twelve, 0x0062), 0x5410)},
          {__byte_perm(one & 0xff000000u, __byte_perm(two, three, 0x0073), 0x5430),
           __byte_perm(__byte_perm(four, six, 0x0073), __byte_perm(eight, twelve, 0x0073), 0x5410)}};
}

static __device__ __forceinline__ uint4 fp4_values(uint32_t codes, uint32_t scale) {
  const struct fp4_table table = fp4_table_of(scale);
  uint32_t pairs[4];
#pragma unroll
  for (uint32_t i = 0; i < 2u; i++) {
    const uint32_t four = codes >> (16u * i), signs = __byte_perm(0x8000u, 0, four >> 3 & 0x1111u);
    const uint32_t low = __byte_perm(table.low[0], table.low[1], four & 0x7777u),
                   high = __byte_perm(table.high[0], table.high[1], four & 0x7777u) | signs;
    pairs[2u * i] = __byte_perm(low, high, 0x5140);
    pairs[2u * i + 1u] = __byte_perm(low, high, 0x7362);
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

/* -- units ------------------------------------------------------------------------------------------------------ */

template <bool Bf16>
static __device__ __noinline__ void encode_fp4(const struct kvs_unit &unit, const struct code_place place,
                                               uint64_t coded) {
  const struct kvs_float type = Bf16 ? kvs_bf16() : kvs_fp16(); /* known to the compiler */
  const struct kvs_fp4_layout layout = kvs_fp4_layout_of(kvs_unit_nbytes(&unit));
  const struct code_values values = load_values(unit, place);
#pragma unroll
  for (uint32_t k = 0; k < CODE_GROUPS; k++) {
    const uint32_t first = group_first(k);
    const uint4 &words = values.of[k];
    const uint32_t most = largest<KVS_FP4_BLOCK / CODE_VALUES>(largest_of_group(words, type));
    const bool is_nan = kvs_float_is_nan(type, most);
    const uint32_t scale = is_nan ? (uint32_t)KVS_FP4_SCALE_NAN : kvs_fp4_scale(type, kvs_float_finite(type, most));
    const uint32_t codes = is_nan ? 0u : Bf16 ? fp4_codes(words, scale) : fp4_codes_of(words, type, scale);
    store_4(coded + KVS_UNIT_HEAD + first / 2u, codes, bytes_left((layout.values + 1u) / 2u, first / 2u, 4u));
    if (first < layout.values && first % KVS_FP4_BLOCK == 0)
      store_byte(coded + layout.scales + first / KVS_FP4_BLOCK, scale);
  }
  zero_bytes(coded, KVS_UNIT_HEAD + (layout.values + 1u) / 2u, layout.scales);
  zero_bytes(coded, layout.scales + layout.blocks, layout.nbytes);
}

template <bool Bf16>
static __device__ __noinline__ enum kvs_unit_verdict decode_fp4(const struct kvs_unit &unit,
                                                                const struct code_place place, uint64_t coded) {
  const struct kvs_fp4_layout layout = kvs_fp4_layout_of(kvs_unit_nbytes(&unit));
  const struct code_head head = load_head(coded);
  uint32_t codes[CODE_GROUPS], scales[CODE_GROUPS];
  struct code_values values;
#pragma unroll
  for (uint32_t k = 0; k < CODE_GROUPS; k++) {
    const uint32_t first = group_first(k) < layout.values ? group_first(k) : 0u;
    load_words<1>(coded + KVS_UNIT_HEAD + first / 2u, &codes[k]);
    scales[k] = load_byte(coded + layout.scales + first / KVS_FP4_BLOCK);
  }
  const enum kvs_unit_verdict verdict = check_head(unit, KVS_FP4_VERSION, head);
  if (verdict != KVS_UNIT_GOOD) return verdict;
#pragma unroll
  for (uint32_t k = 0; k < CODE_GROUPS; k++)
    values.of[k] = Bf16 ? fp4_values(codes[k], scales[k]) : fp4_values_of(codes[k], kvs_fp16(), scales[k]);
  store_values(unit, place, values);
  return KVS_UNIT_GOOD;
}

#endif
