/* Codec `fp4` of e4m3 by one CTA: 2 lanes have a block of 32 values, 16 each. */
#ifndef KVS_CODECS_FP4_E4M3_CUH
#define KVS_CODECS_FP4_E4M3_CUH

#include "codecs/fp4_e4m3.h"
#include "codecs/page.cuh"

static __device__ __forceinline__ uint32_t byte_of(const uint4 &words, uint32_t value) {
  const uint32_t word = value < 4u ? words.x : value < 8u ? words.y : value < 12u ? words.z : words.w;
  return word >> (8u * (value % 4u)) & 0xffu;
}

static __device__ __noinline__ void encode_fp4_e4m3(const struct kvs_unit &unit, const struct code_place place,
                                                    uint64_t coded) {
  const struct kvs_fp4_layout layout = kvs_fp4_e4m3_layout_of(kvs_unit_nbytes(&unit));
  const struct code_values values = load_values(unit, place);
#pragma unroll 1
  for (uint32_t k = 0; k < CODE_GROUPS; k++) {
    const uint32_t first = 2u * group_first(k);
    const uint4 words = values.of[k];
    uint32_t most = 0, codes[2] = {0, 0};
#pragma unroll
    for (uint32_t i = 0; i < 16u; i++) {
      const uint32_t magnitude = byte_of(words, i) & 0x7fu;
      most = magnitude > most ? magnitude : most; /* NaN is larger than all others */
    }
    most = largest<KVS_FP4_E4M3_BLOCK / 16u>(most);
#pragma unroll
    for (uint32_t i = 0; i < 16u; i++) codes[i / 8u] |= kvs_fp4_e4m3_code(byte_of(words, i), most) << (4u * (i % 8u));
    store_8(coded + KVS_UNIT_HEAD + first / 2u, codes, bytes_left((layout.values + 1u) / 2u, first / 2u, 8u));
    if (first < layout.values && first % KVS_FP4_E4M3_BLOCK == 0)
      store_byte(coded + layout.scales + first / KVS_FP4_E4M3_BLOCK, most);
  }
  zero_bytes(coded, KVS_UNIT_HEAD + (layout.values + 1u) / 2u, layout.scales);
  zero_bytes(coded, layout.scales + layout.blocks, layout.nbytes);
}

static __device__ __noinline__ enum kvs_unit_verdict decode_fp4_e4m3(const struct kvs_unit &unit,
                                                                     const struct code_place place, uint64_t coded) {
  const struct kvs_fp4_layout layout = kvs_fp4_e4m3_layout_of(kvs_unit_nbytes(&unit));
  const struct code_head head = load_head(coded);
  uint32_t codes[CODE_GROUPS][2], scales[CODE_GROUPS];
  struct code_values values;
#pragma unroll
  for (uint32_t k = 0; k < CODE_GROUPS; k++) {
    const uint32_t first = 2u * group_first(k) < layout.values ? 2u * group_first(k) : 0u;
    load_words<2>(coded + KVS_UNIT_HEAD + first / 2u, codes[k]);
    scales[k] = load_byte(coded + layout.scales + first / KVS_FP4_E4M3_BLOCK);
  }
  const enum kvs_unit_verdict verdict = check_head(unit, KVS_FP4_VERSION, head);
  if (verdict != KVS_UNIT_GOOD) return verdict;
#pragma unroll
  for (uint32_t k = 0; k < CODE_GROUPS; k++) {
    const uint64_t levels = kvs_fp4_e4m3_levels(scales[k]);
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (uint32_t i = 0; i < 16u; i++)
      words[i / 4u] |= kvs_fp4_e4m3_value(levels, codes[k][i / 8u] >> (4u * (i % 8u)) & 15u) << (8u * (i % 4u));
    values.of[k] = {words[0], words[1], words[2], words[3]};
  }
  store_values(unit, place, values);
  return KVS_UNIT_GOOD;
}

#endif
