/* Codec `fp4` by one CTA: 2 lanes have a block of 16 values. */
#ifndef KVS_CODECS_FP4_CUH
#define KVS_CODECS_FP4_CUH

#include "codecs/fp4.h"
#include "codecs/page.cuh"

static __device__ __forceinline__ void encode_fp4(const struct kvs_unit &unit, const struct code_place &place,
                                                  uint64_t coded, struct kvs_float type) {
  const struct kvs_fp4_layout layout = kvs_fp4_layout_of(kvs_unit_nbytes(&unit));
  for (uint32_t from = 0; from < layout.values; from += blockDim.x * CODE_VALUES) {
    const uint32_t first = from + threadIdx.x * CODE_VALUES;
    const uint4 words = load_group(unit, place, 2u * first);
    uint32_t most = 0, codes = 0;
#pragma unroll
    for (uint32_t i = 0; i < CODE_VALUES; i++) {
      const uint32_t magnitude = half_word(words, i) & ~type.sign;
      most = magnitude > most ? magnitude : most;
    }
    most = largest<KVS_FP4_BLOCK / CODE_VALUES>(most);
    const uint32_t scale =
        kvs_float_is_nan(type, most) ? (uint32_t)KVS_FP4_SCALE_NAN : kvs_fp4_scale(type, kvs_float_finite(type, most));
#pragma unroll
    for (uint32_t i = 0; i < CODE_VALUES; i++) codes |= kvs_fp4_code(type, half_word(words, i), scale) << (4u * i);
    store_bytes<1>(coded + KVS_UNIT_HEAD + first / 2u, &codes, bytes_left((layout.values + 1u) / 2u, first / 2u, 4u));
    if (first < layout.values && first % KVS_FP4_BLOCK == 0)
      store_byte(coded + layout.scales + first / KVS_FP4_BLOCK, scale);
  }
  zero_bytes(coded, KVS_UNIT_HEAD + (layout.values + 1u) / 2u, layout.scales);
  zero_bytes(coded, layout.scales + layout.blocks, layout.nbytes);
}

static __device__ __forceinline__ void decode_fp4(const struct kvs_unit &unit, const struct code_place &place,
                                                  uint64_t coded, struct kvs_float type) {
  const struct kvs_fp4_layout layout = kvs_fp4_layout_of(kvs_unit_nbytes(&unit));
  for (uint32_t first = threadIdx.x * CODE_VALUES; first < layout.values; first += blockDim.x * CODE_VALUES) {
    const uint32_t scale = load_byte(coded + layout.scales + first / KVS_FP4_BLOCK);
    uint32_t codes, pairs[4] = {0, 0, 0, 0};
    load_words<1>(coded + KVS_UNIT_HEAD + first / 2u, &codes);
#pragma unroll
    for (uint32_t i = 0; i < CODE_VALUES; i++)
      pairs[i / 2u] |= kvs_fp4_value(type, codes >> (4u * i) & 15u, scale) << (16u * (i % 2u));
    store_group(unit, place, 2u * first, pairs);
  }
}

#endif
